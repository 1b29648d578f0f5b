//! People with client certificates, and the certificate that an administrator gives: what the cluster says of both,
//! read again and again, as both change.
//!
//! The API server publishes the authorities whose client certificates it takes. What it takes, the control plane
//! takes too; while it cannot be read, or where there are none, certificates are refused with why.

use crate::api::{ANSWER, within};
use crate::authority::{pair, said};
use crate::names;
use aviflow_agent::protocol::CONTROL_PLANE;
use aviflow_api::rights::Identity;
use aviflow_tls::{Authorities, CertificateDer, Shown};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Where the API server publishes its authorities.
pub(crate) const PUBLISHED: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
/// The RoleBinding in its namespace by which the control plane may read them.
pub const BINDING: &str = "aviflow-client-ca";
/// The key with those of clients.
const CLIENT_CA: &str = "client-ca-file";

/// When what is done.
#[derive(Clone, Copy)]
struct Rhythm {
    /// How long the apiserver may take for an answer.
    answer: Duration,
    /// How often the cluster is asked again.
    again: Duration,
    /// How often the own certificate is signed anew, long before it is over.
    renewed: Duration,
}

const RHYTHM: Rhythm =
    Rhythm { answer: ANSWER, again: Duration::from_secs(15), renewed: Duration::from_secs(24 * 60 * 60) };

/// Every identity is of this group, as the API server has it.
const AUTHENTICATED: &str = "system:authenticated";

/// Why a certificate makes nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uncertified {
    /// It does not hold.
    Refused(String),
    /// The cluster has not said yet which ones hold.
    Unknown(String),
    /// The control plane has not the right to ask which ones hold.
    Forbidden(String),
}

impl Uncertified {
    /// The reason.
    #[must_use]
    pub fn why(&self) -> &str {
        match self {
            Uncertified::Refused(why) | Uncertified::Unknown(why) | Uncertified::Forbidden(why) => why,
        }
    }
}

/// The authorities of the cluster's people, as last read.
#[derive(Default)]
pub struct Clients(RwLock<State>);

enum State {
    /// Why it is not known which there are.
    Unknown(Uncertified),
    /// The cluster has none.
    None,
    /// These, and the text in which they stand.
    Known(String, Arc<Authorities>),
}

impl Default for State {
    fn default() -> State {
        State::Unknown(Uncertified::Unknown("it was not asked yet".to_owned()))
    }
}

impl Clients {
    /// Whose a certificate is, which is the first, with those above it.
    ///
    /// # Errors
    /// With why it is nobody's.
    pub fn who(&self, chain: &[CertificateDer<'_>]) -> Result<Identity, Uncertified> {
        let authorities = match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            State::Unknown(why) => return Err(why.clone()),
            State::None => {
                let (namespace, name) = PUBLISHED;
                return Err(Uncertified::Refused(format!(
                    "this cluster takes none, as ConfigMap {namespace}/{name} has no `{CLIENT_CA}`"
                )));
            }
            State::Known(_, authorities) => authorities.clone(),
        };
        let person = authorities.who(chain).map_err(Uncertified::Refused)?;
        if names::is_job_pod(&person.user) {
            return Err(Uncertified::Refused("it names the account of job pods, which is nobody here".to_owned()));
        }
        let mut groups = person.groups;
        if !groups.iter().any(|group| group == AUTHENTICATED) {
            groups.push(AUTHENTICATED.to_owned());
        }
        let id = format!("X509SHA256={}", aviflow_api::environment::hex(&person.fingerprint));
        let extra = BTreeMap::from([("authentication.kubernetes.io/credential-id".to_owned(), vec![id])]);
        Ok(Identity { user: person.user, uid: None, groups, extra })
    }

    /// Takes what the ConfigMap says; tells what of it is news.
    fn take(&self, read: Result<Option<String>, Uncertified>) -> Option<String> {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(Some(pem)) => {
                if matches!(&*state, State::Known(known, _) if *known == pem) {
                    return None;
                }
                match Authorities::read(pem.as_bytes()) {
                    Ok(authorities) => {
                        *state = State::Known(pem, Arc::new(authorities));
                        Some("client certificates of the cluster are taken".to_owned())
                    }
                    Err(why) => state.unknown(Uncertified::Unknown(format!("its `{CLIENT_CA}` is of no use: {why}"))),
                }
            }
            Ok(None) => {
                let news = !matches!(&*state, State::None);
                *state = State::None;
                news.then(|| "the cluster takes no client certificates, and so this does not".to_owned())
            }
            // What was known holds on while the cluster does not answer: it has not been taken back.
            Err(_) if matches!(&*state, State::Known(..)) => None,
            Err(why) => state.unknown(why),
        }
    }
}

impl State {
    fn unknown(&mut self, why: Uncertified) -> Option<String> {
        let news = !matches!(self, State::Unknown(known) if *known == why);
        let said = news.then(|| format!("client certificates are not taken: {}", why.why()));
        *self = State::Unknown(why);
        said
    }
}

/// What keeps both up to date.
pub struct Keeper {
    client: Client,
    clients: Option<Arc<Clients>>,
    shown: Arc<Shown>,
    given: Option<(String, String)>,
    /// Of the administrator's certificate that is shown.
    version: Option<String>,
    /// Why none of it is; said once.
    trouble: Option<String>,
    rhythm: Rhythm,
}

impl Keeper {
    /// Of the `clients` of a cluster, where any are taken, and of the administrator's certificate in the Secret
    /// `given`, by namespace and name.
    #[must_use]
    pub fn new(
        client: Client,
        clients: Option<Arc<Clients>>,
        shown: Arc<Shown>,
        given: Option<(String, String)>,
    ) -> Keeper {
        Keeper { client, clients, shown, given, version: None, trouble: None, rhythm: RHYTHM }
    }

    /// Asks the cluster once, before anybody comes; `note` is told what is news.
    pub async fn look(&mut self, note: &(dyn Fn(&str) + Sync)) {
        self.look_for_clients(note).await;
        let trouble = self.look_for_given().await.err();
        if let Some(why) = trouble.as_ref().filter(|_| trouble != self.trouble) {
            // It may come yet. Until then it is the own certificate that is shown.
            note(&format!("the administrator's certificate is not taken: {why}"));
        }
        self.trouble = trouble;
    }

    /// Asks again and again, for ever. The own certificate is renewed whatever the cluster answers.
    pub async fn run(mut self, note: impl Fn(&str) + Sync) {
        let (shown, Rhythm { again, renewed, .. }) = (self.shown.clone(), self.rhythm);
        let renews = async {
            loop {
                tokio::time::sleep(renewed).await;
                match shown.renew() {
                    Ok(()) => note("the own certificate was signed anew, as each day"),
                    Err(why) => note(&format!("the own certificate is not renewed: {why}")),
                }
            }
        };
        let looks = async {
            loop {
                tokio::time::sleep(again).await;
                self.look(&note).await;
            }
        };
        tokio::join!(renews, looks);
    }

    async fn look_for_clients(&self, note: &(dyn Fn(&str) + Sync)) {
        let Some(clients) = &self.clients else { return };
        let (namespace, name) = PUBLISHED;
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let read = match within(self.rhythm.answer, maps.get_opt(name)).await {
            Ok(map) => Ok(map.and_then(|map| map.data?.remove(CLIENT_CA)).filter(|pem| !pem.trim().is_empty())),
            Err(e) => {
                let forbidden = matches!(&e, kube::Error::Api(status) if status.code == 403);
                let why = format!("the ConfigMap {namespace}/{name}, with the cluster's authorities, {}", said(e));
                Err(if forbidden { Uncertified::Forbidden(why) } else { Uncertified::Unknown(why) })
            }
        };
        if let Some(news) = clients.take(read) {
            note(&news);
        }
    }

    /// Shows the administrator's certificate if it has changed since it was looked at.
    async fn look_for_given(&mut self) -> Result<(), String> {
        let Some((namespace, name)) = &self.given else { return Ok(()) };
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let failed = |why: String| format!("the Secret {namespace}/{name} {why}");
        let secret = within(self.rhythm.answer, secrets.get(name)).await.map_err(|e| failed(said(e)))?;
        if secret.metadata.resource_version.is_some() && secret.metadata.resource_version == self.version {
            return Ok(());
        }
        let pair = pair(&secret).and_then(|(certificate, key)| aviflow_tls::pem::pair(certificate, key));
        self.shown.give(pair.map_err(|why| failed(format!("holds no certificate: {why}")))?);
        self.version = secret.metadata.resource_version;
        Ok(())
    }
}

/// The names of a control plane behind a Service, as those who know its own authority ask for it.
#[must_use]
pub fn names_of(service: &str, namespace: &str) -> Vec<String> {
    ["", ".svc", ".svc.cluster.local"]
        .map(|rest| format!("{service}.{namespace}{rest}"))
        .into_iter()
        .chain([service, "localhost", CONTROL_PLANE].map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::client::Body;
    use std::convert::Infallible;
    use std::future::pending;
    use std::sync::Mutex;
    use std::time::SystemTime;
    use tokio::sync::mpsc;

    /// A keeper of a cluster that answers so.
    fn keeper<F>(answer: impl Fn() -> F + Send + 'static, rhythm: Rhythm) -> Keeper
    where
        F: Future<Output = Result<http::Response<Body>, Infallible>> + Send + 'static,
    {
        let cluster = tower::service_fn(move |_| answer());
        let now = SystemTime::now();
        let authority = aviflow_tls::Authority::read(&aviflow_tls::Authority::make(now).unwrap(), now).unwrap();
        let shown = Arc::new(Shown::new(authority, Vec::new(), Vec::new()).unwrap());
        let given = Some(("aviflow-system".to_owned(), "given".to_owned()));
        let keeper = Keeper::new(Client::new(cluster, "default"), Some(Arc::default()), shown, given);
        Keeper { rhythm, ..keeper }
    }

    #[tokio::test]
    async fn a_cluster_that_does_not_answer_is_left() {
        let (moment, day) = (Duration::from_millis(5), RHYTHM.renewed);
        let mut keeper = keeper(pending, Rhythm { answer: moment, again: day, renewed: day });
        let notes = Mutex::new(Vec::new());
        keeper.look(&|said: &str| notes.lock().unwrap().push(said.to_owned())).await;
        let notes = notes.into_inner().unwrap();
        let expected =
            ["client certificates are not taken: the ConfigMap", "the administrator's certificate is not taken"];
        for (said, expected) in notes.iter().zip(expected) {
            assert!(said.starts_with(expected) && said.ends_with("no answer within 5ms"), "{said}");
        }
        assert_eq!(notes.len(), 2);
    }

    #[tokio::test]
    async fn a_right_that_is_missing_is_told_from_an_apiserver_that_is_away() {
        let refused = || async {
            let status = serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
                                            "reason": "Forbidden", "message": "`aviflow` cannot get it"});
            let body = Body::from(status.to_string().into_bytes());
            Ok(http::Response::builder().status(403).body(body).unwrap())
        };
        let mut keeper = keeper(refused, RHYTHM);
        keeper.look(&|_: &str| {}).await;
        let error = keeper.clients.unwrap().who(&[CertificateDer::from(vec![1])]).unwrap_err();
        let Uncertified::Forbidden(why) = &error else { panic!("{error:?}") };
        assert!(why.contains("extension-apiserver-authentication") && why.contains("`aviflow` cannot get it"), "{why}");
    }

    #[tokio::test]
    async fn the_own_certificate_is_renewed_whatever_the_cluster_answers() {
        let (moment, day) = (Duration::from_millis(5), RHYTHM.renewed);
        let keeper = keeper(pending, Rhythm { answer: day, again: Duration::ZERO, renewed: moment });
        let (notes, mut said) = mpsc::unbounded_channel();
        let runs = tokio::spawn(keeper.run(move |said: &str| drop(notes.send(said.to_owned()))));
        for _ in 0..2 {
            assert_eq!(said.recv().await.unwrap(), "the own certificate was signed anew, as each day");
        }
        runs.abort();
    }

    #[test]
    fn what_was_known_holds_on_and_what_is_not_known_makes_nobody() {
        let clients = Clients::default();
        let shown = [CertificateDer::from(vec![1])];
        let why = |clients: &Clients| clients.who(&shown).unwrap_err();
        assert_eq!(why(&clients), Uncertified::Unknown("it was not asked yet".to_owned()));
        let forbidden = Uncertified::Forbidden("not allowed".to_owned());
        assert!(clients.take(Err(forbidden.clone())).unwrap().contains("are not taken: not allowed"));
        assert_eq!(why(&clients), forbidden);
        let away = || Uncertified::Unknown("away".to_owned());
        assert!(clients.take(Err(away())).unwrap().contains("are not taken: away"));
        assert_eq!(clients.take(Err(away())), None, "said once");
        assert_eq!(why(&clients), away());
        assert!(clients.take(Ok(None)).unwrap().contains("takes no client certificates"));
        assert!(matches!(why(&clients), Uncertified::Refused(why) if why.contains("this cluster takes none")));
        let authority = aviflow_tls::Authority::make(SystemTime::now()).unwrap().certificate;
        assert!(clients.take(Ok(Some(authority.clone()))).is_some());
        assert_eq!(clients.take(Ok(Some(authority))), None, "no news");
        for read in [away(), forbidden] {
            assert_eq!(clients.take(Err(read)), None);
            assert_eq!(why(&clients), Uncertified::Refused("it cannot be read".to_owned()), "asked of the authorities");
        }
        assert!(clients.take(Ok(Some("nothing".to_owned()))).unwrap().contains("holds no certificate"));
        assert!(matches!(why(&clients), Uncertified::Unknown(_)));
    }
}
