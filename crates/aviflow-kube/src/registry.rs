//! Which content a tag stands for, asked of its registry by the OCI distribution API.
//!
//! Only digests are asked for; nothing is pulled. A registry is spoken to over TLS, unless an administrator lists it;
//! a password goes to the registry that it is for, and to whom that names for its tokens.
//!
//! Invariant: at most [`AT_ONCE`] requests run at a time, each for a few seconds at most, and one that does not
//! answer is left alone for [`PAUSE`]: a registry that is away holds up no other work.

use aviflow_api::environment::hex;
use aviflow_api::image::{DOCKER_HUB, ImageName, LATEST, is_digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use ureq::http::{Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Requests at a time.
pub const AT_ONCE: usize = 8;
/// How long a registry that did not answer is left alone.
pub const PAUSE: Duration = Duration::from_secs(15);
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of a manifest.
const MANIFEST: u64 = 4 << 20;
/// Where Docker Hub answers.
const HUB: &str = "registry-1.docker.io";
/// What an image may be: of one platform, or an index of several, of which each node takes its own.
const KINDS: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json";

/// Why it is not known which content a tag stands for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// There is no such image.
    #[error("registry {registry} has no image `{image}`")]
    NotFound {
        /// The image as it was written.
        image: String,
        /// Host and port.
        registry: String,
    },
    /// The registry wants to know who asks, and does not show the image to whom it was told.
    #[error("registry {registry} does not show `{image}` to {who}")]
    Denied {
        /// The image as it was written.
        image: String,
        /// Host and port.
        registry: String,
        /// Who asked.
        who: String,
    },
    /// It gave no answer that says anything about the image.
    #[error("registry {registry} gives no answer about `{image}`: {why}")]
    Unreachable {
        /// The image as it was written.
        image: String,
        /// Host and port.
        registry: String,
        /// What happened.
        why: String,
    },
}

/// A name and password for a registry, of a pull secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The Secret that has it.
    pub secret: String,
    /// The name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("secret", &self.secret).finish_non_exhaustive()
    }
}

/// Asks registries.
pub struct Registries {
    agent: Agent,
    plain: BTreeSet<String>,
    turns: Semaphore,
    /// Those that did not answer: when, and what happened.
    silent: Mutex<BTreeMap<String, (Instant, String)>>,
}

impl Registries {
    /// `plain` are the registries, as host and port, that are spoken to without TLS. `roots` are certificates in PEM
    /// that vouch for registries, instead of the public ones.
    ///
    /// # Errors
    /// If `roots` has no certificates, with what is wrong.
    pub fn new(plain: impl IntoIterator<Item = String>, roots: Option<&[u8]>) -> Result<Registries, String> {
        let mut tls = TlsConfig::builder();
        if let Some(pem) = roots {
            let items: Result<Vec<PemItem<'static>>, ureq::Error> = parse_pem(pem).collect();
            let certificate = |item| match item {
                PemItem::Certificate(certificate) => Some(certificate),
                _ => None,
            };
            let roots: Vec<Certificate<'static>> =
                items.map_err(|e| e.to_string())?.into_iter().filter_map(certificate).collect();
            if roots.is_empty() {
                return Err("it has no certificate in PEM".to_owned());
            }
            tls = tls.root_certs(RootCerts::new_with_certs(&roots));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER))
            .user_agent(concat!("aviflow/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls.build())
            .build();
        Ok(Registries {
            agent: config.into(),
            plain: plain.into_iter().collect(),
            turns: Semaphore::new(AT_ONCE),
            silent: Mutex::default(),
        })
    }

    /// Waits for a turn to ask.
    pub(crate) async fn turn(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        // Never closed.
        self.turns.acquire().await.ok()
    }

    /// The digest of an image, as `login` or else as anybody. Blocks.
    ///
    /// # Errors
    /// If it is not told, with why.
    pub fn digest(&self, image: &ImageName, login: Option<&Login>) -> Result<String, RegistryError> {
        let registry = image.registry();
        let silent = || self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        let before = silent().get(registry).filter(|(at, _)| at.elapsed() < PAUSE).cloned();
        if let Some((_, why)) = before {
            return Err(Asked { image, registry, login }.unreachable(&why));
        }
        let answer = self.ask(&Asked { image, registry, login });
        match &answer {
            Err(RegistryError::Unreachable { why, .. }) => {
                let mut silent = silent();
                silent.retain(|_, (at, _)| at.elapsed() < PAUSE);
                silent.insert(registry.to_owned(), (Instant::now(), why.clone()));
            }
            Ok(_) | Err(RegistryError::NotFound { .. } | RegistryError::Denied { .. }) => {
                silent().remove(registry);
            }
        }
        answer
    }

    fn ask(&self, asked: &Asked<'_>) -> Result<String, RegistryError> {
        let host = if asked.registry == DOCKER_HUB { HUB } else { asked.registry };
        let scheme = if self.plain.contains(asked.registry) { "http" } else { "https" };
        let repository = asked.image.repository();
        let tag = asked.image.tag.as_deref().unwrap_or(LATEST);
        let url = format!("{scheme}://{host}/v2/{repository}/manifests/{tag}");
        let mut authorization = None;
        let mut answer = self.head(asked, &url, None)?;
        if answer.status() == StatusCode::UNAUTHORIZED {
            authorization = Some(self.authorization(asked, &answer, scheme, &repository)?);
            answer = self.head(asked, &url, authorization.as_deref())?;
        }
        asked.judge(answer.status())?;
        let told = answer.headers().get("Docker-Content-Digest").and_then(|value| value.to_str().ok());
        if let Some(digest) = told.filter(|digest| is_digest(digest)) {
            return Ok(digest.to_owned());
        }
        // The content itself says it.
        let mut answer = self.send(asked, self.agent.get(&url), authorization.as_deref())?;
        asked.judge(answer.status())?;
        let content = answer.body_mut().with_config().limit(MANIFEST).read_to_vec();
        let content = content.map_err(|e| asked.unreachable(&e.to_string()))?;
        Ok(format!("sha256:{}", hex(&Sha256::digest(content))))
    }

    fn head(&self, asked: &Asked<'_>, url: &str, authorization: Option<&str>) -> Result<Response<Body>, RegistryError> {
        self.send(asked, self.agent.head(url), authorization)
    }

    fn send(
        &self,
        asked: &Asked<'_>,
        request: ureq::RequestBuilder<ureq::typestate::WithoutBody>,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, RegistryError> {
        let mut request = request.header("Accept", KINDS);
        if let Some(authorization) = authorization {
            request = request.header("Authorization", authorization);
        }
        request.call().map_err(|e| asked.unreachable(&e.to_string()))
    }

    /// What to show the registry, which has asked for it.
    fn authorization(
        &self,
        asked: &Asked<'_>,
        answer: &Response<Body>,
        scheme: &str,
        repository: &str,
    ) -> Result<String, RegistryError> {
        let basic = asked.login.map(|l| format!("Basic {}", STANDARD.encode(format!("{}:{}", l.user, l.password))));
        let challenges: Vec<Challenge> = answer
            .headers()
            .get_all("WWW-Authenticate")
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?))
            .collect();
        let Some(bearer) = challenges.iter().find(|c| c.scheme == "bearer") else {
            let knows = challenges.iter().any(|c| c.scheme == "basic");
            return basic.filter(|_| knows).ok_or_else(|| asked.denied());
        };
        let realm = bearer.get("realm").unwrap_or_default();
        let plain = scheme == "http" && realm.starts_with("http://");
        if !plain && !realm.starts_with("https://") {
            return Err(asked.unreachable(&format!("it names `{realm}` for its tokens, which is not https")));
        }
        let own = format!("repository:{repository}:pull");
        let mut request = self.agent.get(realm).query("scope", bearer.get("scope").unwrap_or(&own));
        if let Some(service) = bearer.get("service") {
            request = request.query("service", service);
        }
        if let Some(basic) = basic {
            request = request.header("Authorization", basic);
        }
        let mut answer = request.call().map_err(|e| asked.unreachable(&format!("{realm}: {e}")))?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::BAD_REQUEST => return Err(asked.denied()),
            other => return Err(asked.unreachable(&format!("{realm} answered {other}"))),
        }
        let text = answer.body_mut().with_config().limit(MANIFEST).read_to_string().map_err(|e| e.to_string());
        let token = text.and_then(|text| serde_json::from_str::<Token>(&text).map_err(|e| e.to_string()));
        let token = token.map_err(|e| asked.unreachable(&format!("{realm} gave no token: {e}")))?;
        let token = token.token.or(token.access_token).unwrap_or_default();
        Ok(format!("Bearer {token}"))
    }
}

/// What is asked, of whom, as whom.
struct Asked<'a> {
    image: &'a ImageName,
    registry: &'a str,
    login: Option<&'a Login>,
}

impl Asked<'_> {
    fn judge(&self, status: StatusCode) -> Result<(), RegistryError> {
        let (image, registry) = (self.image.to_string(), self.registry.to_owned());
        match status {
            StatusCode::OK => Ok(()),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.denied()),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                Err(self.unreachable(&format!("it answered {status}")))
            }
            // Also of a name that it does not take: who writes one keeps nobody else from asking.
            other if other.is_client_error() => Err(RegistryError::NotFound { image, registry }),
            other => Err(self.unreachable(&format!("it answered {other}"))),
        }
    }

    fn denied(&self) -> RegistryError {
        let who = self.login.map_or_else(|| "everybody".to_owned(), |l| format!("the login of Secret `{}`", l.secret));
        RegistryError::Denied { image: self.image.to_string(), registry: self.registry.to_owned(), who }
    }

    fn unreachable(&self, why: &str) -> RegistryError {
        let why = why.to_owned();
        RegistryError::Unreachable { image: self.image.to_string(), registry: self.registry.to_owned(), why }
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// What a registry wants to be shown.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    /// Reads `Bearer realm="…",service="…",scope="…"`.
    fn parse(text: &str) -> Option<Challenge> {
        let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        let mut parameters = Vec::new();
        while let Some((key, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(',').map_or((after, ""), |(value, after)| (value, after)),
            };
            parameters.push((key.trim_matches([' ', ',']).to_ascii_lowercase(), value.to_owned()));
            rest = after;
        }
        Some(Challenge { scheme: scheme.to_ascii_lowercase(), parameters })
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.parameters.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }
}

/// The logins for an image that a pull secret has, by its keys as Kubernetes names them.
#[must_use]
pub fn logins(secret: &str, data: &BTreeMap<String, Vec<u8>>, image: &ImageName) -> Vec<Login> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        auths: BTreeMap<String, Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        auth: Option<String>,
        username: Option<String>,
        password: Option<String>,
    }
    let config = |key: &str| serde_json::from_slice::<Config>(data.get(key)?).ok().map(|c| c.auths);
    let old = || serde_json::from_slice::<BTreeMap<String, Entry>>(data.get(".dockercfg")?).ok();
    let entries = config(".dockerconfigjson").or_else(old).unwrap_or_default();
    let login = |entry: Entry| {
        let plain = entry.username.zip(entry.password);
        let (user, password) = plain.or_else(|| {
            let decoded = String::from_utf8(STANDARD.decode(entry.auth?.trim()).ok()?).ok()?;
            decoded.split_once(':').map(|(user, password)| (user.to_owned(), password.to_owned()))
        })?;
        Some(Login { secret: secret.to_owned(), user, password })
    };
    let fits = |key: &str| is_for(key, image);
    entries.into_iter().filter(|(key, _)| fits(key)).filter_map(|(_, entry)| login(entry)).collect()
}

/// Whether what a pull secret calls a registry, perhaps with part of a repository, has an image.
fn is_for(key: &str, image: &ImageName) -> bool {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.trim_end_matches('/').split_once('/').unwrap_or((key.trim_end_matches('/'), ""));
    let hub = ["docker.io", "index.docker.io", HUB];
    if image.registry() == DOCKER_HUB {
        // Docker's own key ends with the version of its API.
        return hub.contains(&host) && (["", "v1", "v2"].contains(&path) || below(&image.repository(), path));
    }
    host == image.registry() && below(&image.repository(), path)
}

fn below(repository: &str, path: &str) -> bool {
    path.is_empty() || repository.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests;
