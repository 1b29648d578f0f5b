//! The way from a person's machine to a control plane in a cluster: through the apiserver, as his kubeconfig
//! reaches it, to the pod behind the control plane's Service.
//!
//! Connections to a port of this machine's loopback go there each on its own. What comes in carries the
//! person's token, which the control plane has the apiserver review, or shows his certificate; nothing is trusted for
//! its way in. Where the Service says that TLS is spoken, the control plane is known by the authority that it has
//! published in its cluster, if by nothing else.

use crate::authority;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{ListParams, Portforwarder};
use kube::client::{Body, ConfigExt as _};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use secrecy::ExposeSecret as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer as _, ServiceExt as _};

/// The port of a Service that is the API.
const PORT: &str = "api";
/// What its `appProtocol` is where TLS is spoken.
const HTTPS: &str = "https";

/// A cluster as a person reaches it.
pub struct Way {
    client: Client,
    /// The namespace of his context.
    pub namespace: String,
    /// His token; none where he shows a certificate instead.
    pub token: Option<String>,
    /// His certificate, if he has one.
    pub certificate: Option<Certificate>,
}

/// A client certificate of a kubeconfig.
pub struct Certificate {
    /// It and those above it, in PEM.
    pub chain: Vec<u8>,
    /// Its key, in PEM.
    pub key: Vec<u8>,
}

/// A control plane as it is reached.
pub struct Reached {
    /// An address of this machine that leads there.
    pub address: SocketAddr,
    /// Whether it speaks TLS.
    pub tls: bool,
    /// The certificate of its authority in PEM, as it has published it.
    pub published: Option<String>,
}

impl Way {
    /// The way that a kubeconfig knows: that of `$KUBECONFIG` and its current context if none is named.
    ///
    /// # Errors
    /// If there is none, with why.
    pub async fn find(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Way, String> {
        let read = kubeconfig.map_or_else(Kubeconfig::read, Kubeconfig::read_from);
        let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
        let config = match read {
            Ok(read) => Config::from_custom_kubeconfig(read, &options).await,
            Err(e) => Err(e),
        };
        let config = config.map_err(|e| format!("the kubeconfig cannot be used: {e}"))?;
        let token = token(&config).await?;
        let certificate = certificate(&config.auth_info)?;
        let namespace = config.default_namespace.clone();
        let client = Client::try_from(config).map_err(|e| format!("the cluster cannot be reached: {e}"))?;
        Ok(Way { client, namespace, token, certificate })
    }

    /// Listens on this machine, for the control plane behind a Service, as long as the runtime lives. By what it has
    /// published it is known unless something else is `known`; the right to read that is then not needed.
    ///
    /// # Errors
    /// If the Service has no pod that is ready, or may not be looked at, or the way to the pod is refused.
    pub async fn listen(self, namespace: &str, service: &str, known: bool) -> Result<Reached, String> {
        let (pod, port, tls) = self.behind(namespace, service).await?;
        let published = match tls && !known {
            true => Some(authority::published(&self.client, namespace).await?),
            false => None,
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(|e| format!("no port of this machine can be had: {e}"))?;
        let address = listener.local_addr().map_err(|e| e.to_string())?;
        let pods: Api<Pod> = Api::namespaced(self.client, namespace);
        // Now, as later there is nobody to tell why it cannot be had.
        let first = pods.portforward(&pod, &[port]).await;
        let mut first = Some(
            first.map_err(|e| format!("the way through the apiserver to the pod {namespace}/{pod} is refused: {e}"))?,
        );
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (pods, pod, first) = (pods.clone(), pod.clone(), first.take());
                tokio::spawn(async move {
                    let forwarder = match first {
                        Some(forwarder) => Ok(forwarder),
                        None => pods.portforward(&pod, &[port]).await,
                    };
                    if let Ok(forwarder) = forwarder {
                        forward(forwarder, port, stream).await;
                    }
                });
            }
        });
        Ok(Reached { address, tls, published })
    }

    /// A pod of a Service that is ready, its port, and whether TLS is spoken there.
    async fn behind(&self, namespace: &str, service: &str) -> Result<(String, u16, bool), String> {
        let failed = |what: &str, e: kube::Error| {
            let why = match e {
                kube::Error::Api(status) => status.message.clone(),
                e => e.to_string(),
            };
            format!("{what} of the control plane, {namespace}/{service}, cannot be seen: {why}")
        };
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let found = services.get(service).await.map_err(|e| failed("the Service", e))?;
        let spec = found.spec.unwrap_or_default();
        let selector: Vec<String> =
            spec.selector.unwrap_or_default().iter().map(|(key, value)| format!("{key}={value}")).collect();
        let port = spec.ports.unwrap_or_default().into_iter().find(|port| port.name.as_deref() == Some(PORT));
        let (Some(port), false) = (port, selector.is_empty()) else {
            return Err(format!("the Service {namespace}/{service} is not that of a control plane"));
        };
        let tls = port.app_protocol.as_deref() == Some(HTTPS);
        let target = port.target_port.unwrap_or(IntOrString::Int(port.port));
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let listed = pods.list(&ListParams::default().labels(&selector.join(","))).await;
        let listed = listed.map_err(|e| failed("the pods", e))?;
        let ready = listed.items.iter().filter(|pod| is_ready(pod));
        let mut there = ready.filter_map(|pod| Some((pod.metadata.name.clone()?, port_of(pod, &target)?, tls)));
        there.next().ok_or_else(|| format!("no pod of the control plane, {namespace}/{service}, is ready"))
    }
}

/// The token with which a kubeconfig speaks to its apiserver, wherever it has it from.
async fn token(config: &Config) -> Result<Option<String>, String> {
    let failed = |e: String| format!("the kubeconfig gives no token: {e}");
    let Some(layer) = config.auth_layer().map_err(|e| failed(e.to_string()))? else { return Ok(None) };
    // The layer knows files, plugins and their expiry; what it puts into a request is what is wanted.
    let seen = tower::service_fn(async |request: http::Request<Body>| {
        Ok::<_, tower::BoxError>(http::Response::new(request.headers().clone()))
    });
    let request = http::Request::new(Body::empty());
    let headers = layer.layer(seen).oneshot(request).await.map_err(|e| failed(e.to_string()))?.into_body();
    let value = headers.get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    Ok(value.and_then(|value| value.strip_prefix("Bearer ")).map(|token| token.trim().to_owned()))
}

/// The certificate with which a kubeconfig speaks to its apiserver, where it has one itself.
fn certificate(user: &AuthInfo) -> Result<Option<Certificate>, String> {
    let read = |what: &str, data: Option<&str>, path: Option<&String>| match (data, path) {
        (Some(data), _) => {
            STANDARD.decode(data.trim()).map(Some).map_err(|_| format!("the kubeconfig's `{what}-data` is no base64"))
        }
        (None, Some(path)) => {
            std::fs::read(path).map(Some).map_err(|e| format!("the kubeconfig's `{what}`, {path}, cannot be read: {e}"))
        }
        (None, None) => Ok(None),
    };
    let data = user.client_certificate_data.as_deref();
    let chain = read("client-certificate", data, user.client_certificate.as_ref())?;
    let data = user.client_key_data.as_ref().map(|key| key.expose_secret());
    let key = read("client-key", data, user.client_key.as_ref())?;
    match (chain, key) {
        (Some(chain), Some(key)) => Ok(Some(Certificate { chain, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err("the kubeconfig has a client certificate without its key".to_owned()),
        (None, Some(_)) => {
            Err("the kubeconfig has the key of a client certificate, and not the certificate".to_owned())
        }
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    pod.metadata.deletion_timestamp.is_none()
        && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

fn port_of(pod: &Pod, target: &IntOrString) -> Option<u16> {
    match target {
        IntOrString::Int(port) => u16::try_from(*port).ok(),
        IntOrString::String(name) => {
            let containers = &pod.spec.as_ref()?.containers;
            let mut ports = containers.iter().filter_map(|c| c.ports.as_ref()).flatten();
            u16::try_from(ports.find(|port| port.name.as_ref() == Some(name))?.container_port).ok()
        }
    }
}

/// Carries one connection. Whoever speaks through it sees it end if the way is gone.
async fn forward(mut forwarder: Portforwarder, port: u16, mut stream: TcpStream) {
    let Some(mut upstream) = forwarder.take_stream(port) else { return };
    // An end on either side is the end of the connection.
    let _ = tokio::io::copy_bidirectional(&mut stream, &mut upstream).await;
    drop(upstream);
    let _ = forwarder.join().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The token of a kubeconfig with this user.
    async fn token_of(user: serde_json::Value) -> Result<Option<String>, String> {
        let kubeconfig = serde_json::from_value(json!({
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "ann", "namespace": "nlp"}}],
            "clusters": [{"name": "test", "cluster": {"server": "https://127.0.0.1:6443"}}],
            "users": [{"name": "ann", "user": user}],
        }));
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig.unwrap(), &options).await.unwrap();
        assert_eq!(config.default_namespace, "nlp");
        token(&config).await
    }

    #[tokio::test]
    async fn the_token_is_that_of_the_kubeconfig() {
        assert_eq!(token_of(json!({"token": "abc"})).await, Ok(Some("abc".to_owned())));
        let credential = json!({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                                "status": {"token": "of-a-plugin", "expirationTimestamp": "2999-01-01T00:00:00Z"}});
        let exec = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "echo",
                                   "args": [credential.to_string()], "interactiveMode": "Never"}});
        assert_eq!(token_of(exec).await, Ok(Some("of-a-plugin".to_owned())));
        assert_eq!(token_of(json!({})).await, Ok(None));
        // A name and a password are no token.
        assert_eq!(token_of(json!({"username": "ann", "password": "secret"})).await, Ok(None));
        let failing = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}});
        assert!(token_of(failing).await.unwrap_err().contains("gives no token"));
    }

    #[test]
    fn the_certificate_is_that_of_the_kubeconfig() {
        let folder = std::env::temp_dir().join(format!("aviflow-reach-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("key"), "of a file").unwrap();
        let of = |user: serde_json::Value| {
            let found = certificate(&serde_json::from_value(user).unwrap());
            found.map(|found| found.map(|c| [c.chain, c.key].map(|part| String::from_utf8(part).unwrap())))
        };
        assert_eq!(of(json!({"token": "abc"})), Ok(None));
        let (data, key) = (STANDARD.encode("inline"), folder.join("key"));
        let both = of(json!({"client-certificate-data": data, "client-key": key}));
        assert_eq!(both, Ok(Some(["inline", "of a file"].map(str::to_owned))));
        let error = |user| of(user).unwrap_err();
        assert!(error(json!({"client-certificate-data": data})).contains("without its key"));
        assert!(error(json!({"client-key-data": data})).contains("not the certificate"));
        assert!(error(json!({"client-certificate-data": "?"})).contains("is no base64"));
        assert!(error(json!({"client-certificate": folder.join("none")})).contains("cannot be read"));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn what_is_published_is_needed_where_nothing_else_is_known() {
        let way = || {
            let cluster = tower::service_fn(|request: http::Request<Body>| {
                let path = request.uri().path();
                let (code, body) = match path.rsplit('/').next().unwrap_or_default() {
                    "aviflow" => {
                        let port = json!({"name": "api", "port": 8080, "appProtocol": "https"});
                        (200, json!({"metadata": {}, "spec": {"selector": {"app": "aviflow"}, "ports": [port]}}))
                    }
                    "pods" => {
                        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
                        (200, json!({"metadata": {}, "items": [{"metadata": {"name": "aviflow-0"}, "status": ready}]}))
                    }
                    _ => {
                        let message = format!("ann may not ask for {path}");
                        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
                                            "message": message});
                        (403, status)
                    }
                };
                let answer = http::Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
                async { answer }
            });
            let client = Client::new(cluster, "default");
            Way { client, namespace: "nlp".to_owned(), token: None, certificate: None }
        };
        let error = way().listen("system", "aviflow", false).await.map(drop).unwrap_err();
        assert!(error.starts_with("the ConfigMap system/aviflow-ca") && error.contains("ann may not"), "{error}");
        let error = way().listen("system", "aviflow", true).await.map(drop).unwrap_err();
        assert!(error.starts_with("the way through the apiserver to the pod system/aviflow-0"), "{error}");
    }

    #[test]
    fn a_pod_is_one_that_is_ready_and_has_the_port() {
        let pod = |ready: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "aviflow-0"},
                "spec": {"containers": [{"name": "aviflow", "ports": [{"name": "api", "containerPort": 8080}]}]},
                "status": {"conditions": [{"type": "Ready", "status": ready}]},
            }))
            .unwrap()
        };
        assert!(is_ready(&pod("True")) && !is_ready(&pod("False")) && !is_ready(&Pod::default()));
        let named = |name: &str| port_of(&pod("True"), &IntOrString::String(name.into()));
        assert_eq!((named("api"), named("agents")), (Some(8080), None));
        assert_eq!(port_of(&pod("True"), &IntOrString::Int(9000)), Some(9000));
        assert_eq!(port_of(&pod("True"), &IntOrString::Int(70_000)), None);
    }
}
