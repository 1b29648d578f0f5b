//! Which control plane a command speaks to.
//!
//! `config.yaml` knows control planes by name. The one of this machine is always
//! there under the name `local` and needs no entry.

use crate::client::{Client, Security};
use crate::error::{Failure, Result, While};
use crate::home::{Home, read_token, write_private};
use aviflow_api::source::Sources;
use aviflow_api::yaml::to_yaml;
use aviflow_kube::authority::CONFIG_MAP;
use aviflow_kube::reach::Way;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The name of this machine's own control plane.
pub const LOCAL: &str = "local";

/// `config.yaml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    /// The context in use; `local` if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The known ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contexts: Vec<Context>,
    /// The queue of documents that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// The priority of documents that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
}

/// A control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Context {
    /// What it is called here.
    pub name: String,
    /// Its address; none where a cluster leads to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The cluster that leads to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube: Option<KubeWay>,
    /// The file with the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// The file with the certificates that vouch for it; the system's, or those of its cluster, if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_authority: Option<PathBuf>,
    /// The namespace of what is submitted and of bare names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The way to a control plane through the apiserver of its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KubeWay {
    /// The kubeconfig; that of `$KUBECONFIG` if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The context in it; its current one if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// The control plane's Service, as `namespace/name`.
    pub service: String,
}

/// Where `config.yaml` is: `$AVIFLOW_CONFIG`, else in the user's folder of configurations.
pub fn config_path() -> Result<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("AVIFLOW_CONFIG")
        .or_else(|| Some(var("XDG_CONFIG_HOME").filter(|p| p.is_absolute())?.join("aviflow/config.yaml")))
        .or_else(|| Some(var("HOME")?.join(".config/aviflow/config.yaml")))
        .ok_or_else(|| Failure::new("there is no home folder").help("set AVIFLOW_CONFIG"))
}

impl Config {
    /// Reads the file; one that is not there is empty.
    pub fn read(path: &Path) -> Result<Config> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Config::default()),
            Err(e) => return Err(Failure::new(format!("{} cannot be read: {e}", path.display()))),
        };
        let mut sources = Sources::default();
        let name = path.display().to_string();
        let root = aviflow_api::yaml::parse_bytes(&mut sources, &name, &bytes).map_err(|diagnostics| {
            let plain = aviflow_api::render::Style::Plain;
            Failure::document(aviflow_api::render::render(&diagnostics, &sources, plain))
        })?;
        if root.is_null() {
            return Ok(Config::default());
        }
        serde_json::from_value(root.to_json()).map_err(|e| {
            Failure::usage(format!("{name}: {e}")).help("`aviflow context ls` and `aviflow login` write this file")
        })
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let value = serde_json::to_value(self).or_fail(|| "the configuration cannot be written".to_owned())?;
        write_private(path, to_yaml(&value).as_bytes())
    }

    /// The name of the context in use.
    pub fn current(&self, asked: Option<&str>) -> String {
        asked.or(self.current.as_deref()).unwrap_or(LOCAL).to_owned()
    }

    /// A context by its name; `None` is this machine.
    pub fn find(&self, name: &str) -> Result<Option<&Context>> {
        if name == LOCAL {
            return Ok(None);
        }
        self.contexts.iter().find(|c| c.name == name).map(Some).ok_or_else(|| {
            let names: Vec<&str> =
                std::iter::once(LOCAL).chain(self.contexts.iter().map(|c| c.name.as_str())).collect();
            Failure::usage(format!("there is no context `{name}`"))
                .why(format!("there are: {}", names.join(", ")))
                .help("`aviflow login URL --token-file FILE` adds one")
        })
    }

    /// Adds or replaces a context.
    pub fn put(&mut self, context: Context) {
        self.contexts.retain(|c| c.name != context.name);
        self.contexts.push(context);
        self.contexts.sort_by(|a, b| a.name.cmp(&b.name));
    }
}

/// An address as it is kept: with its scheme and without a slash at its end.
pub fn check_url(url: &str) -> Result<String> {
    let wrong = |why: &str| {
        Failure::usage(format!("`{url}` is no address of a control plane: {why}"))
            .help("write it as https://HOST or http://HOST:PORT")
    };
    let rest = url
        .strip_prefix("https://")
        .or_else(|| url.strip_prefix("http://"))
        .ok_or_else(|| wrong("it begins with neither https:// nor http://"))?;
    let host = rest.split('/').next().unwrap_or_default();
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(wrong("it has no host"));
    }
    if host.contains('@') {
        return Err(wrong("a user or password in it would be seen by others; a token belongs into a file"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

/// A name for the context of an address: its host.
pub fn name_of(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', ':']).next().unwrap_or(rest).to_owned()
}

/// A control plane to speak to, or why there is none.
pub fn connect(home: &Home, config: &Config, asked: Option<&str>) -> Result<Client> {
    let name = config.current(asked);
    match config.find(&name)? {
        Some(context) => {
            let token = match &context.token_file {
                None => None,
                Some(path) => Some(read_token(path)?.ok_or_else(|| {
                    Failure::new(format!("the token of context `{name}` is not there: {}", path.display()))
                        .help("`aviflow context set` or `aviflow login` with --token-file sets it")
                })?),
            };
            let namespace = context.namespace.clone();
            match (&context.kube, &context.url) {
                (Some(way), _) => through(&name, way, token, context.certificate_authority.as_ref(), namespace),
                (None, Some(url)) => {
                    let security = Security::default().file(context.certificate_authority.as_ref())?;
                    Ok(Client::secured(&name, url, token, &security)?.in_namespace(namespace))
                }
                (None, None) => Err(Failure::usage(format!("the context `{name}` has no address"))
                    .help(format!("`aviflow context set {name} --url URL` sets it, or `--kube`"))),
            }
        }
        None => local(home)?.ok_or_else(no_server),
    }
}

/// A client through the apiserver of a cluster, for as long as it lives.
fn through(
    name: &str,
    way: &KubeWay,
    token: Option<String>,
    authority: Option<&PathBuf>,
    namespace: Option<String>,
) -> Result<Client> {
    let (system, service) = check_service(&way.service)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .or_fail(|| "threads cannot be started".to_owned())?;
    let failed = |why: String| {
        Failure::platform(format!("the control plane of context `{name}` cannot be reached: {why}")).help(format!(
            "the way needs, in `{system}`, `get` on services, `list` on pods, `get` and `create` on pods/portforward, and \
             `get` on the ConfigMap `{CONFIG_MAP}` unless the context has a `certificateAuthority`"
        ))
    };
    let mut found = runtime.block_on(Way::find(way.kubeconfig.as_deref(), way.context.as_deref())).map_err(failed)?;
    // A token that somebody names is what he wants to come with.
    let certificate = if token.is_some() { None } else { found.certificate.take() };
    let token = token.or_else(|| found.token.take());
    let namespace = namespace.unwrap_or_else(|| found.namespace.clone());
    let reached = runtime.block_on(found.listen(system, service, authority.is_some())).map_err(failed)?;
    if token.is_none() && (certificate.is_none() || !reached.tls) {
        let why = match certificate {
            Some(_) => "it has a client certificate, and the control plane's Service says that it speaks no TLS",
            None => "it has no client certificate of its own either",
        };
        return Err(Failure::new(format!("the kubeconfig of context `{name}` has no token")).why(why).help(format!(
            "`kubectl create token ACCOUNT --audience aviflow` makes one of a service account; then \
             `aviflow context set {name} --kube --token-file FILE`"
        )));
    }
    let address = reached.address;
    let client = if reached.tls {
        let security = match &reached.published {
            Some(published) => Security::default().known("that the cluster has published", published),
            None => Security::default(),
        };
        let security = security.file(authority)?.shows(certificate);
        Client::secured(name, &format!("https://{address}"), token, &security)?
    } else {
        Client::new(name, &format!("http://{address}"), token)
    };
    Ok(client.in_namespace(Some(namespace)).through(runtime))
}

/// The namespace and the name of a Service.
pub fn check_service(service: &str) -> Result<(&str, &str)> {
    service
        .split_once('/')
        .filter(|(system, name)| !system.is_empty() && !name.is_empty())
        .ok_or_else(|| Failure::usage(format!("`{service}` names no Service")).help("write it as NAMESPACE/NAME"))
}

/// The control plane of this machine, if it runs.
pub fn local(home: &Home) -> Result<Option<Client>> {
    let Some(server) = home.server()? else { return Ok(None) };
    let token = home.token()?;
    Ok(Some(match &server.authority {
        None => Client::new(LOCAL, &server.url, token),
        Some(pem) => {
            let security = Security::default().known("in its server.json", pem);
            Client::secured(LOCAL, &server.url, token, &security)?
        }
    }))
}

/// Nothing runs here.
pub fn no_server() -> Failure {
    Failure::new("no control plane runs on this machine")
        .help("start it with `aviflow server start`, or use another with `aviflow context use NAME`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(name: &str) -> Context {
        let url = Some(format!("https://{name}"));
        let (token_file, namespace) = (Some("/t".into()), Some("nlp".into()));
        Context { name: name.into(), url, kube: None, token_file, certificate_authority: None, namespace }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("deep/config.yaml");
        assert_eq!(Config::read(&path), Ok(Config::default()));
        let mut config = Config { current: Some("work".into()), queue: Some("nlp".into()), ..Config::default() };
        config.put(context("work"));
        config.put(context("home"));
        config.put(context("work"));
        let way = KubeWay { kubeconfig: None, context: Some("prod".into()), service: "aviflow-system/aviflow".into() };
        config.put(Context { url: None, kube: Some(way), token_file: None, ..context("prod") });
        config.write(&path).expect("write");
        assert_eq!(Config::read(&path), Ok(config));
        insta::assert_snapshot!(std::fs::read_to_string(&path).expect("file"));
    }

    #[test]
    fn the_local_one_needs_no_entry_and_unknown_ones_are_named() {
        let config = Config { contexts: vec![context("work")], ..Config::default() };
        assert_eq!(config.current(None), LOCAL);
        assert_eq!(config.find(LOCAL), Ok(None));
        assert_eq!(config.find("work").expect("work").and_then(|c| c.url.as_deref()), Some("https://work"));
        let failure = config.find("wrok").expect_err("unknown");
        assert_eq!((failure.code, failure.why), (2, vec!["there are: local, work".to_owned()]));
    }

    #[test]
    fn addresses_are_checked() {
        assert_eq!(check_url("https://a.example/").as_deref(), Ok("https://a.example"));
        for wrong in ["a.example", "https://", "https://user:password@a", "ftp://a"] {
            assert!(check_url(wrong).is_err(), "{wrong}");
        }
        assert_eq!(name_of("https://a.example:8443/x"), "a.example");
    }

    #[test]
    fn a_service_has_a_namespace() {
        assert_eq!(check_service("aviflow-system/aviflow"), Ok(("aviflow-system", "aviflow")));
        for wrong in ["aviflow", "/aviflow", "aviflow-system/"] {
            assert!(check_service(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_is_wrong_says_where() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("config.yaml");
        std::fs::write(&path, "contexts:\n  - name: [\n").expect("write");
        assert_eq!(Config::read(&path).expect_err("wrong").code, 2);
        std::fs::write(&path, "contextes: []\n").expect("write");
        assert!(Config::read(&path).expect_err("wrong").message.contains("contextes"));
    }
}
