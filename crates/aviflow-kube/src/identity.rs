//! Who the holder of a token or of a certificate is, and what he may: the apiserver says it.
//!
//! Answers are kept for a short time, so that a burst of requests is one question. What was taken from
//! somebody is therefore gone after [`KEPT`] at the latest, and what was given is there after [`REFUSED`].
//!
//! Invariants: no token is kept, only its hash; the account of job pods is nobody, whatever rights
//! somebody may have given to it; what the apiserver does not answer is neither yes nor no.

use crate::certified::{Clients, Uncertified};
use crate::names;
use aviflow_api::rights::{Identity, Right};
use aviflow_tls::CertificateDer;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// For how long a yes holds.
pub const KEPT: Duration = Duration::from_secs(30);
/// For how long a no holds: who was just given a right tries again soon.
pub const REFUSED: Duration = Duration::from_secs(5);
/// Answers that are kept, of each kind.
const MOST: usize = 4096;
/// Questions at a time: who tries tokens must not keep the apiserver busy.
const AT_ONCE: usize = 16;
/// How long the apiserver may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The apiserver as the one who knows people and their rights.
pub struct Reviews {
    client: Client,
    clients: Option<Arc<Clients>>,
    tokens: Mutex<Cache<[u8; 32], Option<Arc<Identity>>>>,
    rights: Mutex<Cache<(Arc<Identity>, Right), bool>>,
    turns: Semaphore,
}

impl Reviews {
    /// Asks this apiserver; certificates count where it is known which ones do.
    #[must_use]
    pub fn new(client: Client, clients: Option<Arc<Clients>>) -> Reviews {
        Reviews { client, clients, tokens: Mutex::default(), rights: Mutex::default(), turns: Semaphore::new(AT_ONCE) }
    }

    /// Whose a token is; none if it is nobody's, or a job pod's.
    ///
    /// # Errors
    /// If the apiserver does not answer, with why.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Arc<Identity>>, String> {
        let hash: [u8; 32] = Sha256::digest(token).into();
        if let Some(known) = locked(&self.tokens).get(&hash, Instant::now()) {
            return Ok(known);
        }
        let mut identity = None;
        // First the apiserver's own audience, which only it can name: tokens of kubeconfigs.
        for audiences in [None, Some(vec![names::AUDIENCE.to_owned()])] {
            let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences };
            let review = self.ask(TokenReview { spec, ..TokenReview::default() }).await?;
            identity = identity_of(review);
            if identity.is_some() {
                break;
            }
        }
        let identity = identity.map(Arc::new);
        let kept = if identity.is_some() { KEPT } else { REFUSED };
        locked(&self.tokens).put(hash, identity.clone(), kept, Instant::now());
        Ok(identity)
    }

    /// Whose a client certificate is, which is the first of these, with those above it.
    ///
    /// # Errors
    /// With why it is nobody's.
    pub fn certified(&self, chain: &[CertificateDer<'_>]) -> Result<Arc<Identity>, Uncertified> {
        let none = || Uncertified::Refused("this control plane takes none".to_owned());
        self.clients.as_ref().ok_or_else(none)?.who(chain).map(Arc::new)
    }

    /// Whether somebody has a right.
    ///
    /// # Errors
    /// If the apiserver does not answer, with why.
    pub async fn may(&self, identity: &Arc<Identity>, right: &Right) -> Result<bool, String> {
        let key = (identity.clone(), right.clone());
        if let Some(known) = locked(&self.rights).get(&key, Instant::now()) {
            return Ok(known);
        }
        let review = self.ask(question(identity, right)).await?;
        let status = review.status.ok_or("the apiserver answered nothing")?;
        // `denied` is a veto: it holds whatever another authorizer allows.
        let may = status.allowed && status.denied != Some(true);
        locked(&self.rights).put(key, may, if may { KEPT } else { REFUSED }, Instant::now());
        Ok(may)
    }

    async fn ask<K>(&self, review: K) -> Result<K, String>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        // Never closed, so a permit always comes.
        let _turn = self.turns.acquire().await;
        let (api, how) = (Api::<K>::all(self.client.clone()), PostParams::default());
        let asked = tokio::time::timeout(PATIENCE, api.create(&how, &review)).await;
        // Errors of the client may quote what was sent, and a token was.
        asked.map_err(|_| "the apiserver does not answer".to_owned())?.map_err(|e| match e {
            kube::Error::Api(status) => format!("the apiserver refuses to say: {}", status.message),
            _ => "the apiserver cannot be reached".to_owned(),
        })
    }
}

/// Who a review is of.
fn identity_of(review: TokenReview) -> Option<Identity> {
    let status = review.status.filter(|status| status.authenticated == Some(true))?;
    let asked = review.spec.audiences.unwrap_or_default();
    // An authenticator that knows no audiences answers without them, and its yes is for the apiserver alone.
    let ours = asked.is_empty() || status.audiences.is_some_and(|a| a.iter().any(|a| asked.contains(a)));
    let user = status.user.filter(|_| ours)?;
    let name = user.username.filter(|name| !name.is_empty())?;
    if names::is_job_pod(&name) {
        return None;
    }
    Some(Identity {
        user: name,
        uid: user.uid.filter(|uid| !uid.is_empty()),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    })
}

/// The question whether somebody has a right.
fn question(identity: &Identity, right: &Right) -> SubjectAccessReview {
    let attributes = ResourceAttributes {
        group: Some(names::GROUP.to_owned()),
        version: Some(names::VERSION.to_owned()),
        resource: Some(right.resource.to_owned()),
        subresource: right.subresource.map(str::to_owned),
        verb: Some(right.verb.name().to_owned()),
        namespace: right.namespace.clone(),
        name: right.name.clone(),
        ..ResourceAttributes::default()
    };
    let spec = SubjectAccessReviewSpec {
        user: Some(identity.user.clone()),
        uid: identity.uid.clone(),
        groups: Some(identity.groups.clone()),
        extra: Some(identity.extra.clone()),
        resource_attributes: Some(attributes),
        ..SubjectAccessReviewSpec::default()
    };
    SubjectAccessReview { spec, ..SubjectAccessReview::default() }
}

fn locked<T>(cache: &Mutex<T>) -> MutexGuard<'_, T> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers, each until an instant.
struct Cache<K, V>(HashMap<K, (V, Instant)>);

impl<K, V> Default for Cache<K, V> {
    fn default() -> Cache<K, V> {
        Cache(HashMap::new())
    }
}

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    fn get(&self, key: &K, now: Instant) -> Option<V> {
        self.0.get(key).filter(|(_, until)| now < *until).map(|(value, _)| value.clone())
    }

    fn put(&mut self, key: K, value: V, kept: Duration, now: Instant) {
        if self.0.len() >= MOST {
            self.0.retain(|_, (_, until)| now < *until);
        }
        if self.0.len() >= MOST {
            // Rather ask again than hold more: this many within seconds is somebody who tries tokens.
            self.0.clear();
        }
        self.0.insert(key, (value, now + kept));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_api::rights::{Part, Verb};
    use serde_json::json;

    fn review(audiences: &[&str], status: serde_json::Value) -> TokenReview {
        let spec =
            if audiences.is_empty() { json!({"token": "t"}) } else { json!({"token": "t", "audiences": audiences}) };
        serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": status})).unwrap()
    }

    #[test]
    fn who_a_review_is_of() {
        let user = json!({"username": "oidc:ann@example.com", "groups": ["nlp"], "extra": {"scopes": ["a"]}});
        let ann = identity_of(review(&[], json!({"authenticated": true, "user": user}))).unwrap();
        assert_eq!((ann.user.as_str(), ann.groups.as_slice()), ("oidc:ann@example.com", ["nlp".to_owned()].as_slice()));
        assert_eq!(ann.extra["scopes"], ["a"]);
        let nobody = [
            review(&[], json!({"authenticated": false, "user": user})),
            review(&[], json!({"user": user})),
            review(&[], json!({"authenticated": true})),
            review(&[], json!({"authenticated": true, "user": {"username": ""}})),
            // Asked for an audience, which it was not given for.
            review(&["aviflow"], json!({"authenticated": true, "user": user})),
            review(&["aviflow"], json!({"authenticated": true, "user": user, "audiences": ["other"]})),
        ];
        for review in nobody {
            assert_eq!(identity_of(review.clone()), None, "{review:?}");
        }
        let ours = review(&["aviflow"], json!({"authenticated": true, "user": user, "audiences": ["aviflow"]}));
        assert!(identity_of(ours).is_some());
    }

    #[test]
    fn a_job_pod_is_nobody_in_every_namespace() {
        let account = |user: &str| {
            let status = json!({"authenticated": true, "user": {"username": user}, "audiences": ["aviflow"]});
            identity_of(review(&["aviflow"], status)).map(|identity| identity.user)
        };
        assert_eq!(account("system:serviceaccount:nlp:aviflow-job"), None);
        assert_eq!(account("system:serviceaccount:default:aviflow-job"), None);
        assert!(account("system:serviceaccount:nlp:aviflow-jobs").is_some());
        assert!(account("aviflow-job").is_some(), "a person of that name");
    }

    #[test]
    fn a_right_is_asked_for_as_it_is_named() {
        let identity = Identity { user: "ann".into(), groups: vec!["nlp".into()], ..Identity::default() };
        let asked = |right: Right| {
            let spec = serde_json::to_value(question(&identity, &right).spec).unwrap();
            assert_eq!((&spec["user"], &spec["groups"]), (&json!("ann"), &json!(["nlp"])));
            spec["resourceAttributes"].clone()
        };
        let (group, version) = (names::GROUP, names::VERSION);
        assert_eq!(
            asked(Right::part(Verb::Create, Part::Exec, "nlp")),
            json!({"group": group, "version": version, "resource": "trainingjobs", "subresource": "exec",
                   "verb": "create", "namespace": "nlp"})
        );
        assert_eq!(
            asked(Right::use_queue("nlp")),
            json!({"group": group, "version": version, "resource": "queues", "verb": "use", "name": "nlp"})
        );
        assert_eq!(
            asked(Right::jobs(Verb::List, None)),
            json!({"group": group, "version": version, "resource": "trainingjobs", "verb": "list"})
        );
    }

    #[test]
    fn answers_are_kept_for_their_time_and_no_more_than_there_is_room_for() {
        let mut cache = Cache::default();
        let start = Instant::now();
        cache.put(0, "yes", KEPT, start);
        cache.put(1, "no", REFUSED, start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!((cache.get(&0, at(4)), cache.get(&1, at(4))), (Some("yes"), Some("no")));
        assert_eq!((cache.get(&0, at(5)), cache.get(&1, at(5))), (Some("yes"), None));
        assert_eq!(cache.get(&0, at(30)), None);
        // What is over makes room first.
        for key in 2..MOST {
            cache.put(key, "no", REFUSED, at(1));
        }
        cache.put(MOST, "yes", KEPT, at(10));
        assert_eq!((cache.get(&0, at(10)), cache.get(&MOST, at(10)), cache.0.len()), (Some("yes"), Some("yes"), 2));
        for key in 0..3 * MOST {
            cache.put(key, "no", REFUSED, at(11));
            assert!(cache.0.len() <= MOST);
        }
    }
}
