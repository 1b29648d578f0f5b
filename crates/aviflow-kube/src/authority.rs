//! The control plane's own authority, as the cluster keeps it: its key in a Secret of Aviflow's namespace, its
//! certificate in a ConfigMap beside it, which everybody may read.
//!
//! It is made once. Two replicas, and each after a restart, find the same; agents that were launched by one know the
//! other by it.

use crate::api::{ANSWER, within};
use aviflow_tls::authority::{Authority, Kept};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::time::SystemTime;

/// The Secret with the authority's key.
pub const SECRET: &str = "aviflow-authority";
/// The ConfigMap with its certificate.
pub const CONFIG_MAP: &str = "aviflow-ca";
/// The certificate in it.
pub const CA: &str = "ca.crt";

/// The keys of a Secret of type `kubernetes.io/tls`.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// Why a namespace's authority is not to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The control plane may not read it, make it or publish it.
    Forbidden(String),
    /// The apiserver did not answer, or could not.
    Unanswered(String),
    /// It is there, and of no use: it cannot be read, or is over.
    Unusable(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Forbidden(why) | Trouble::Unanswered(why) | Trouble::Unusable(why) => f.write_str(why),
        }
    }
}

impl Trouble {
    fn with(what: &str, error: kube::Error) -> Trouble {
        let forbidden = matches!(&error, kube::Error::Api(status) if matches!(status.code, 401 | 403));
        let why = format!("{what} {}", said(error));
        if forbidden { Trouble::Forbidden(why) } else { Trouble::Unanswered(why) }
    }
}

/// The authority of a namespace, which is made if there is none, and published.
///
/// # Errors
/// If it can neither be read nor made, with why.
pub async fn of(client: &Client, namespace: &str) -> Result<Authority, Trouble> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let failed = |e| Trouble::with(&format!("the Secret {namespace}/{SECRET}, with its authority,"), e);
    let found = match within(ANSWER, secrets.get_opt(SECRET)).await.map_err(failed)? {
        Some(found) => found,
        None => {
            match within(ANSWER, secrets.create(&PostParams::default(), &made().map_err(Trouble::Unanswered)?)).await {
                Ok(made) => made,
                // Another was faster, and then its authority is the one.
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    within(ANSWER, secrets.get(SECRET)).await.map_err(failed)?
                }
                Err(e) => return Err(failed(e)),
            }
        }
    };
    let unusable = |why| Trouble::Unusable(format!("the Secret {namespace}/{SECRET} holds no authority: {why}"));
    let authority = read(&found).map_err(unusable)?;
    publish(client, namespace, authority.certificate()).await?;
    Ok(authority)
}

fn made() -> Result<Secret, String> {
    let Kept { certificate, key } = Authority::make(SystemTime::now())?;
    let mut secret = Secret { type_: Some("kubernetes.io/tls".to_owned()), ..Secret::default() };
    secret.metadata.name = Some(SECRET.to_owned());
    secret.metadata.labels = Some(labels());
    // Nobody changes it by mistake: agents that run know it by this certificate alone.
    secret.immutable = Some(true);
    let data = [(CERTIFICATE, certificate), (KEY, key)];
    secret.data = Some(data.map(|(name, pem)| (name.to_owned(), ByteString(pem.into_bytes()))).into());
    Ok(secret)
}

fn labels() -> BTreeMap<String, String> {
    [("app.kubernetes.io/name", "aviflow"), ("app.kubernetes.io/part-of", "aviflow")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn read(secret: &Secret) -> Result<Authority, String> {
    let (certificate, key) = pair(secret)?;
    let text = |bytes: &[u8], name| String::from_utf8(bytes.to_vec()).map_err(|_| format!("its {name} is no text"));
    let kept = Kept { certificate: text(certificate, CERTIFICATE)?, key: text(key, KEY)? };
    Authority::read(&kept, SystemTime::now())
}

/// The certificate and the key of a Secret in the form of `kubernetes.io/tls`.
///
/// # Errors
/// If one of them is missing.
pub(crate) fn pair(secret: &Secret) -> Result<(&[u8], &[u8]), String> {
    let value = |name| {
        let value = secret.data.as_ref().and_then(|data| data.get(name));
        value.map(|value| value.0.as_slice()).ok_or_else(|| format!("it has no `{name}`"))
    };
    Ok((value(CERTIFICATE)?, value(KEY)?))
}

async fn publish(client: &Client, namespace: &str, certificate: &str) -> Result<(), Trouble> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let failed = |e| Trouble::with(&format!("the ConfigMap {namespace}/{CONFIG_MAP}"), e);
    let mut map = match within(ANSWER, maps.get_opt(CONFIG_MAP)).await.map_err(failed)? {
        Some(found) if certificate_of(&found) == Some(certificate) => return Ok(()),
        Some(found) => found,
        None => ConfigMap::default(),
    };
    map.metadata.name = Some(CONFIG_MAP.to_owned());
    map.metadata.labels.get_or_insert_default().extend(labels());
    map.data.get_or_insert_default().insert(CA.to_owned(), certificate.to_owned());
    let how = PostParams::default();
    let written = match map.metadata.resource_version {
        Some(_) => within(ANSWER, maps.replace(CONFIG_MAP, &how, &map)).await,
        None => within(ANSWER, maps.create(&how, &map)).await,
    };
    match written {
        // Another writes it at once, and nothing else.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        written => written.map(drop).map_err(failed),
    }
}

/// The certificate of a control plane's own authority, as a person finds it.
///
/// # Errors
/// If it is not published, or he may not read it.
pub async fn published(client: &Client, namespace: &str) -> Result<String, String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = within(ANSWER, maps.get(CONFIG_MAP)).await;
    let map = map.map_err(|e| format!("the ConfigMap {namespace}/{CONFIG_MAP}, with its authority, {}", said(e)))?;
    let certificate =
        certificate_of(&map).ok_or_else(|| format!("the ConfigMap {namespace}/{CONFIG_MAP} has no `{CA}`"))?;
    Ok(certificate.to_owned())
}

fn certificate_of(map: &ConfigMap) -> Option<&str> {
    map.data.as_ref()?.get(CA).map(String::as_str)
}

/// What the apiserver said of an object, as a sentence goes on.
pub(crate) fn said(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("cannot be used: {}", status.message),
        kube::Error::Service(why) => format!("cannot be asked for: {why}"),
        error => format!("cannot be asked for: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::client::Body;
    use serde_json::json;
    use std::convert::Infallible;

    #[test]
    fn what_is_made_is_read_again() {
        let mut secret = made().unwrap();
        let kept = secret.data.as_ref().unwrap()[CERTIFICATE].0.clone();
        assert_eq!(read(&secret).unwrap().certificate().as_bytes(), kept);
        secret.data.as_mut().unwrap().remove(KEY);
        assert_eq!(read(&secret).unwrap_err(), "it has no `tls.key`");
    }

    #[tokio::test]
    async fn what_keeps_it_from_being_had_is_told_apart() {
        let trouble = async |code: u16, body: serde_json::Value| {
            let cluster = tower::service_fn(move |_| {
                let body = Body::from(body.to_string().into_bytes());
                async move { Ok::<_, Infallible>(http::Response::builder().status(code).body(body).unwrap()) }
            });
            of(&Client::new(cluster, "default"), "aviflow-system").await.unwrap_err()
        };
        let status = |code: u16, message: &str| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message});
        let error = trouble(403, status(403, "`aviflow` cannot get it")).await;
        assert!(matches!(&error, Trouble::Forbidden(why) if why.ends_with("`aviflow` cannot get it")), "{error:?}");
        let error = trouble(503, status(503, "etcd is away")).await;
        assert!(matches!(&error, Trouble::Unanswered(why) if why.ends_with("etcd is away")), "{error:?}");
        let mut secret = made().unwrap();
        secret.data.as_mut().unwrap().remove(KEY);
        let error = trouble(200, serde_json::to_value(&secret).unwrap()).await;
        let expected = "the Secret aviflow-system/aviflow-authority holds no authority: it has no `tls.key`";
        assert_eq!(error, Trouble::Unusable(expected.to_owned()));
    }
}
