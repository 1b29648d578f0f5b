//! Who an agent is: kubelet gave its pod a token, and the apiserver says whose it is.

use crate::names;
use aviflow_agent::protocol::Ended;
use aviflow_core::model::{JobId, Term};
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::Hello;
use aviflow_tls::{Listener, Stream};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::{Api, Client};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// This cluster, as the agents' connections ask for it.
pub struct Pods {
    pub(crate) client: Client,
    /// The term under which the store is held now; none where it does not answer.
    pub(crate) held: Held,
}

/// Asks the store for the term under which it is held; none where it does not answer, for which it may wait.
pub type Held = Arc<dyn Fn() -> Option<Term> + Send + Sync>;

/// A pod by its name and uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What is kept of a worker beside what is told to its agent.
#[derive(Default)]
pub struct Own {
    /// Its pod, once it is known.
    pub(crate) pod: Option<PodRef>,
    pub(crate) node: String,
    /// SHA-256 of the code snapshot that it may fetch.
    pub(crate) code: Option<String>,
    /// The hash of the layer that it may fetch.
    pub(crate) layer: Option<String>,
    /// Workers of its gang.
    pub(crate) workers: u32,
    /// Since when its agent has not been connected; none while it is, or never was.
    pub(crate) silent: Option<Instant>,
    /// Its agent was connected.
    pub(crate) heard: bool,
    /// Since when kube-scheduler finds no room for its pod, and why.
    pub(crate) unschedulable: Option<(Instant, String)>,
    /// Since when its pod is on its node, and kubelet has not made what its containers need.
    pub(crate) preparing: Option<Instant>,
    /// When kubelet's Events of its pod were asked for last.
    pub(crate) asked: Option<Instant>,
    /// It could not start, or was asked to leave; said once.
    pub(crate) told: bool,
    /// Its pod was deleted from here.
    pub(crate) deleted: bool,
    /// It is not certain that nothing of it runs, as its pod was removed before kubelet had said so.
    pub(crate) adrift: bool,
}

pub(crate) type Worker = aviflow_link::Worker<Own>;

/// Whether an agent ever spoke for a worker: from then on ranks may run.
pub(crate) fn heard(worker: &Worker) -> bool {
    worker.own.heard || worker.link.is_some()
}

/// Where agents connect: with TLS, or, those of a version before it, without.
pub(crate) struct Agents(pub(crate) Listener);

impl aviflow_link::Listener for Agents {
    type Stream = Stream;
    const PING: Option<Duration> = aviflow_link::ACROSS_A_NETWORK;

    async fn accept(&self) -> std::io::Result<Stream> {
        Ok(self.0.accept().await?.0)
    }
}

impl aviflow_link::Site for Pods {
    type Own = Own;
    type Proof = PodRef;

    async fn decides(&self, term: Term) -> bool {
        let held = self.held.clone();
        tokio::task::spawn_blocking(move || held()).await.is_ok_and(|held| held == Some(term))
    }

    async fn prove(&self, hello: &Hello) -> Option<PodRef> {
        review(&self.client, &hello.token).await
    }

    fn is(&self, worker: &Own, proof: &PodRef) -> Option<bool> {
        Some(worker.pod.as_ref()? == proof)
    }

    fn ended(&self, _: StreamKey) -> std::io::Result<Option<Ended>> {
        // What an agent wrote down is in its pod; it says so itself when it connects again.
        Ok(None)
    }

    fn named(&self, _: JobId, path: &str) -> String {
        path.to_owned()
    }

    fn place(&self, worker: &Own) -> Option<String> {
        worker.pod.as_ref().map(|pod| format!("pod {}/{}", pod.namespace, pod.name))
    }
}

/// The pod that a token of the audience `aviflow` is bound to.
pub(crate) async fn review(client: &Client, token: &str) -> Option<PodRef> {
    let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![names::AUDIENCE.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let answer = Api::<TokenReview>::all(client.clone()).create(&Default::default(), &review).await.ok()?;
    let status = answer.status?;
    if status.authenticated != Some(true) || !status.audiences?.iter().any(|a| a == names::AUDIENCE) {
        return None;
    }
    let user = status.user?;
    // system:serviceaccount:NAMESPACE:NAME
    let namespace = user.username?.strip_prefix("system:serviceaccount:")?.split(':').next()?.to_owned();
    let extra = user.extra?;
    let one = |name: &str| extra.get(&format!("authentication.kubernetes.io/{name}"))?.first().cloned();
    Some(PodRef { namespace, name: one("pod-name")?, uid: one("pod-uid")? })
}
