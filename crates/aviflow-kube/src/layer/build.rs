//! Making layers: a task for each, which sees to it that the layer is in the object store.
//!
//! Invariants: a layer that is there, whole, is never made again; of one that is asked for twice one pod is made, as
//! its name follows from its hash, and a control plane that is started again finds that pod; a pod whose layer is
//! made, has failed, or is wanted by nobody any more is deleted, by its uid, and nobody waits for that but who needs
//! its name; a node that is down holds no job up.

use super::{Ground, LONGEST, Stage, pod, pod_name, stage, tag};
use crate::api::{persist, watch};
use crate::body::{Body, reference};
use crate::cluster::Message;
use crate::depot::{self, Build, Builds, Objects};
use crate::names;
use crate::namespace::Namespaces;
use crate::pod::Site;
use crate::remove::{KUBELETS, remove};
use crate::resolve::pull_secrets;
use crate::site::PodRef;
use aviflow_core::model::EnvironmentHash;
use aviflow_engine::ports::{JobRecord, Observation};
use aviflow_engine::telemetry::{BuildProgress, Telemetry};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// The pauses before a build is tried again whose pod was evicted, was lost with its node, or could not start: what
/// passes at all has passed after them, or takes an administrator.
const PAUSES: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(60)];

/// How many layers of a namespace are made at a time, so that it leaves room for others.
const OF_NAMESPACE: usize = 4;
/// How many are in all: each takes the index, a node's disk and the depot.
const IN_ALL: usize = 16;

/// Layers that are being made, and their pods.
#[derive(Default)]
pub(crate) struct Making {
    room: Room,
    /// By the hash.
    tasks: BTreeMap<String, Task>,
    /// The number of the last.
    last: u64,
    /// Pods of builds that are there, by their uid.
    pods: BTreeMap<String, (String, PodRef)>,
}

/// How many more layers may be made now.
struct Room {
    all: Arc<Semaphore>,
    namespaces: BTreeMap<String, Arc<Semaphore>>,
}

impl Default for Room {
    fn default() -> Room {
        Room { all: Arc::new(Semaphore::new(IN_ALL)), namespaces: BTreeMap::new() }
    }
}

impl Room {
    /// What to take of, in this order: whoever waits for his own namespace's holds nothing of the others'.
    fn of(&mut self, namespace: &str) -> [Arc<Semaphore>; 2] {
        let own = self.namespaces.entry(namespace.to_owned());
        [own.or_insert_with(|| Arc::new(Semaphore::new(OF_NAMESPACE))).clone(), self.all.clone()]
    }
}

/// Takes of each, or waits; `waits` is called first.
async fn enter(room: &[Arc<Semaphore>; 2], waits: impl FnOnce()) -> Result<Vec<OwnedSemaphorePermit>, AcquireError> {
    if room.iter().any(|room| room.available_permits() == 0) {
        waits();
    }
    let mut taken = Vec::new();
    for room in room {
        taken.push(room.clone().acquire_owned().await?);
    }
    Ok(taken)
}

/// A task that makes a layer.
struct Task {
    /// What of one that was given up is still under way has another number.
    number: u64,
    handle: AbortHandle,
}

/// What a task needs.
struct Maker {
    client: Client,
    site: Site,
    objects: Arc<dyn Objects>,
    builds: Builds,
    namespaces: Arc<Namespaces>,
    telemetry: Arc<dyn Telemetry>,
    room: [Arc<Semaphore>; 2],
    ground: Ground,
    /// What it is told as: the environment and the lock's file.
    name: String,
}

impl Body {
    /// Sees to it that the layer of a job is there.
    pub(crate) fn make_layer(&mut self, record: &JobRecord) {
        let (Some(layer), Some(image)) = (&record.provenance.layer, &record.provenance.image) else {
            // Nothing is made for a job of another kind: an image is pulled by kubelet.
            if let Some(hash) = record.provenance.made_first() {
                let hash = EnvironmentHash(hash.to_owned());
                self.workers.report(Observation::EnvironmentReady { hash }, None);
            }
            return;
        };
        if self.making.tasks.contains_key(&layer.hash) {
            return;
        }
        let environment = image.environment.as_ref().unwrap_or(&image.reference);
        let lock = record.spec.requirements.as_deref().unwrap_or("requirements");
        let maker = Maker {
            client: self.config.client.clone(),
            site: self.config.site.clone(),
            objects: self.config.objects.clone(),
            builds: self.builds.clone(),
            namespaces: self.namespaces.clone(),
            telemetry: self.workers.telemetry.clone(),
            room: self.making.room.of(&record.key.namespace),
            ground: Ground {
                namespace: record.key.namespace.clone(),
                layer: layer.clone(),
                image: image.clone(),
                profiles: self.books.profiles().to_vec(),
                pull_secrets: Default::default(),
                pip: self.config.pip.clone(),
            },
            name: format!("{environment} with {lock}"),
        };
        self.making.last += 1;
        let (messages, number, hash) = (self.messages.clone(), self.making.last, layer.hash.clone());
        let task = tokio::spawn(async move {
            let made = maker.run().await;
            let _ = messages.send(Message::Made(hash, number, made));
        });
        self.making.tasks.insert(layer.hash.clone(), Task { number, handle: task.abort_handle() });
    }

    /// A layer is there, or cannot be made.
    pub(crate) fn made(&mut self, hash: String, number: u64, made: Result<(), String>) {
        // One that was given up meanwhile is nobody's.
        if self.making.tasks.get(&hash).is_none_or(|task| task.number != number) {
            return;
        }
        self.making.tasks.remove(&hash);
        self.clear_away(&hash);
        let hash = EnvironmentHash(hash);
        let observation = match made {
            Ok(()) => Observation::EnvironmentReady { hash },
            Err(reason) => Observation::EnvironmentFailed { hash, reason },
        };
        self.workers.report(observation, None);
    }

    /// Nobody wants a layer any more.
    pub(crate) fn abandon(&mut self, hash: &str) {
        let Some(task) = self.making.tasks.remove(hash) else { return };
        task.handle.abort();
        self.workers.telemetry.forget_build(hash);
        self.clear_away(hash);
    }

    /// Removes the pods of a layer that is not being made any more: those of its task, and what a control plane
    /// that was killed has left. One that is being made at this moment is seen, and deleted, as that of nobody.
    fn clear_away(&self, hash: &str) {
        let mut pods = depot::retire(&self.builds, hash);
        let seen = self.making.pods.values().filter(|(label, _)| label == tag(hash)).map(|(_, pod)| pod);
        pods.extend(seen.filter(|seen| !pods.contains(seen)).cloned().collect::<Vec<_>>());
        for pod in pods {
            let (client, builds) = (self.config.client.clone(), self.builds.clone());
            tokio::spawn(async move {
                remove(&client, &pod, KUBELETS).await;
                depot::forget(&builds, &pod.uid);
            });
        }
    }

    /// Takes note of a pod, if it is one that makes a layer: one whose layer is not being made belongs to nobody.
    pub(crate) fn layer_pod(&mut self, pod: &Pod) {
        let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(names::LAYER)).cloned();
        let (Some(tag), Some(here)) = (label, reference(pod)) else { return };
        self.making.pods.insert(here.uid.clone(), (tag.clone(), here.clone()));
        let reconciled = self.workers.lock().awaited.is_some();
        if reconciled && !self.making.has(&tag) {
            self.delete_stray(here);
        }
    }

    /// A pod is no more.
    pub(crate) fn layer_pod_deleted(&mut self, uid: &str) {
        self.making.pods.remove(uid);
        depot::forget(&self.builds, uid);
    }

    /// Deletes the pods of earlier terms whose layers nobody wants; after the orders that say which are wanted.
    pub(crate) fn sweep_layers(&self) {
        let strays = self.making.pods.values().filter(|(tag, _)| !self.making.has(tag));
        for (_, stray) in strays {
            self.delete_stray(stray.clone());
        }
    }
}

impl Making {
    fn has(&self, label: &str) -> bool {
        self.tasks.keys().any(|hash| tag(hash) == label)
    }
}

impl Maker {
    /// Makes the layer unless it is there.
    async fn run(mut self) -> Result<(), String> {
        let api = Api::<Pod>::namespaced(self.client.clone(), &self.ground.namespace);
        let made = self.make(&api).await;
        made.map_err(|reason| format!("{} cannot be made into a layer: {reason}", self.name))
    }

    async fn make(&mut self, api: &Api<Pod>) -> Result<(), String> {
        if self.there().await? {
            return Ok(());
        }
        let entered = enter(&self.room, || self.tell("waiting until fewer layers are being made")).await;
        let _room = entered.map_err(|_| "the control plane is stopping".to_owned())?;
        self.tell("making its pod");
        self.namespaces.prepare(&self.client, &self.ground.namespace).await?;
        // Where they cannot be read, kubelet says what it cannot pull.
        self.ground.pull_secrets =
            persist(|| pull_secrets(&self.client, &self.ground.namespace)).await.unwrap_or_default();
        let pod = pod(&self.ground, &self.site)?;
        let mut pauses = PAUSES.iter();
        loop {
            let (reason, kubelets) = match self.try_once(api, &pod).await? {
                Ended::Done if self.there().await? => return Ok(()),
                Ended::Done => ("its pod ended, and the layer is not in the object store".to_owned(), KUBELETS),
                Ended::Failed { reason, lasting: true } => return Err(reason),
                Ended::Failed { reason, lasting: false } => (reason, KUBELETS),
                // Kubelet has had its time.
                Ended::Silent { reason } => (reason, Duration::ZERO),
            };
            let Some(pause) = pauses.next() else {
                let tries = PAUSES.len() + 1;
                return Err(format!("{reason} (tried {tries} times); submit the job again once that is set right"));
            };
            self.tell(&format!("trying again after {} s: {reason}", pause.as_secs()));
            for left in depot::retire(&self.builds, &self.ground.layer.hash) {
                remove(&self.client, &left, kubelets).await;
                depot::forget(&self.builds, &left.uid);
            }
            // What is full, busy or away needs a while.
            tokio::time::sleep(*pause).await;
        }
    }

    /// Follows the pod, which is made unless it is there, to its end.
    async fn try_once(&self, api: &Api<Pod>, pod: &Pod) -> Result<Ended, String> {
        let name = pod_name(&self.ground.layer.hash);
        let here = self.pod(api, pod, &name).await?;
        let build = Build {
            pod: here.clone(),
            layer: self.ground.layer.hash.clone(),
            lock: self.ground.layer.lock.clone(),
            over: false,
        };
        depot::expect(&self.builds, build);
        let mut events = watch(api.clone(), Some(&name));
        let mut told = String::new();
        // Whether the list that begins a watch had it.
        let mut listed = false;
        let mut patience = Patience::default();
        let passing = |reason: &str| Ended::Failed { reason: reason.to_owned(), lasting: false };
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                reason = patience.ends() => return Ok(Ended::Silent { reason }),
            };
            let seen = match event {
                Some(Ok(Event::Apply(pod) | Event::InitApply(pod))) => pod,
                Some(Ok(Event::Delete(pod))) if pod.metadata.uid.as_ref() == Some(&here.uid) => {
                    return Ok(passing("somebody deleted its pod"));
                }
                Some(Ok(Event::Init)) => {
                    listed = false;
                    continue;
                }
                Some(Ok(Event::InitDone)) if !listed => return Ok(passing("somebody deleted its pod")),
                Some(Ok(Event::Delete(_) | Event::InitDone) | Err(_)) => continue,
                None => return Ok(passing("the watch of its pod ended")),
            };
            if seen.metadata.uid.as_ref() != Some(&here.uid) {
                continue;
            }
            listed = true;
            match stage(&seen) {
                Stage::Going(step) if step != told => {
                    self.tell(&step);
                    told = step;
                }
                Stage::Going(_) => {}
                Stage::Done => return Ok(Ended::Done),
                Stage::Failed { reason, lasting } => return Ok(Ended::Failed { reason, lasting }),
            }
            patience.see(&seen, Instant::now());
        }
    }

    /// Makes the pod, or takes up the one that is there: that of the last control plane.
    async fn pod(&self, api: &Api<Pod>, pod: &Pod, name: &str) -> Result<PodRef, String> {
        let of = |pod: &Pod| reference(pod).ok_or_else(|| format!("its pod {name} has no uid"));
        loop {
            let refused = match persist(|| async { api.create(&PostParams::default(), pod).await }).await {
                Ok(made) => return of(&made),
                Err(refused) => refused,
            };
            if !refused.is_conflict() {
                return Err(format!("its pod was refused by the apiserver: {}", refused.message));
            }
            match persist(|| async { api.get_opt(name).await }).await {
                Ok(Some(found)) => {
                    let there = of(&found)?;
                    if goes_on(&found) && !depot::retired(&self.builds, &there.uid) {
                        return Ok(there);
                    }
                    // Of a job that was cancelled, or of an earlier try.
                    self.tell("removing the pod that made it before");
                    remove(&self.client, &there, KUBELETS).await;
                }
                Ok(None) => {}
                Err(refused) => return Err(format!("its pod {name} cannot be read: {}", refused.message)),
            }
        }
    }

    fn tell(&self, step: &str) {
        let (hash, name) = (self.ground.layer.hash.clone(), self.name.clone());
        self.telemetry.build(BuildProgress { hash, name, step: step.to_owned(), done: 0, total: 0 });
    }

    async fn there(&self) -> Result<bool, String> {
        let (objects, hash) = (self.objects.clone(), self.ground.layer.hash.clone());
        let found = tokio::task::spawn_blocking(move || depot::whole(objects.as_ref(), &hash)).await;
        let found = found.map_err(|_| "the control plane is stopping".to_owned())?;
        found.map_err(|e| format!("the object store cannot be read: {e}"))
    }
}

/// How one try ended.
enum Ended {
    Done,
    Failed {
        reason: String,
        lasting: bool,
    },
    /// Its kubelet, which should have ended the pod, does not say so.
    Silent {
        reason: String,
    },
}

/// Whether a pod that was found may still make its layer.
fn goes_on(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}

/// How long a pod is waited for that kubelet should have ended: where its node is down, kubelet never does.
#[derive(Debug, Default)]
struct Patience {
    /// When it ends, and what is told then.
    end: Option<(Instant, String)>,
    leaving: bool,
}

impl Patience {
    /// Takes note of a pod that has not ended.
    fn see(&mut self, pod: &Pod, now: Instant) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("its node");
        let started = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
        if pod.metadata.deletion_timestamp.is_some() && !self.leaving {
            self.leaving = true;
            let reason = format!("somebody deleted its pod, and the kubelet of {node} has not ended it; is it down?");
            self.end = Some((now + KUBELETS, reason));
        } else if started && self.end.is_none() {
            let minutes = LONGEST.as_secs() / 60;
            let reason = format!(
                "it was not done after {minutes} minutes, and the kubelet of {node} has not ended it; is it down?"
            );
            self.end = Some((now + LONGEST + KUBELETS, reason));
        }
    }

    /// Waits until it ends; gives the reason.
    async fn ends(&self) -> String {
        match &self.end {
            Some((end, reason)) => {
                tokio::time::sleep_until(*end).await;
                reason.clone()
            }
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use serde_json::{Value, json};

    #[test]
    fn a_namespace_leaves_room_for_others_and_all_have_an_end() {
        let mut room = Room::default();
        let mut held = Vec::new();
        let mut enters = |namespace: &str| {
            let (of, mut waits) = (room.of(namespace), false);
            let entered = enter(&of, || waits = true).now_or_never();
            assert_eq!(waits, entered.is_none(), "who waits is told");
            let entered = entered.map(|taken| taken.expect("open"));
            let did = entered.is_some();
            held.extend(entered.into_iter().flatten());
            did
        };
        assert!((0..OF_NAMESPACE).all(|_| enters("nlp")));
        assert!(!enters("nlp"), "others have room");
        for namespace in ["vision", "speech", "search"] {
            assert!((0..OF_NAMESPACE).all(|_| enters(namespace)), "{namespace}");
        }
        assert!(!enters("robots"), "there are enough in all");
        held.drain(..2);
        assert!(!room.of("nlp").iter().any(|room| room.available_permits() == 0), "one has ended");
    }

    fn seen(metadata: Value, status: Value) -> Pod {
        let pod = json!({"metadata": metadata, "spec": {"nodeName": "hgx0", "containers": []}, "status": status});
        serde_json::from_value(pod).expect("a pod")
    }

    #[test]
    fn a_node_that_is_down_is_waited_for_only_so_long() {
        let (now, mut patience) = (Instant::now(), Patience::default());
        let leaving = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        patience.see(&seen(json!({}), json!({"phase": "Pending"})), now);
        assert_eq!(patience.end, None, "it may wait for a node as long as it must");
        let runs = json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"});
        for later in [0, 5] {
            patience.see(&seen(json!({}), runs.clone()), now + Duration::from_secs(later));
            let (end, reason) = patience.end.clone().expect("an end");
            assert_eq!(end, now + LONGEST + KUBELETS);
            assert_eq!(
                reason,
                "it was not done after 60 minutes, and the kubelet of hgx0 has not ended it; is it down?"
            );
        }
        for later in [10, 20] {
            patience.see(&seen(leaving.clone(), runs.clone()), now + Duration::from_secs(later));
            let (end, reason) = patience.end.clone().expect("an end");
            assert_eq!(end, now + Duration::from_secs(10) + KUBELETS);
            assert_eq!(reason, "somebody deleted its pod, and the kubelet of hgx0 has not ended it; is it down?");
        }
    }

    #[test]
    fn a_pod_that_has_ended_or_leaves_is_not_taken_up() {
        assert!(goes_on(&seen(json!({}), json!({"phase": "Running"}))));
        assert!(!goes_on(&seen(json!({}), json!({"phase": "Failed"}))));
        assert!(!goes_on(&seen(json!({}), json!({"phase": "Succeeded"}))));
        let leaving = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(!goes_on(&seen(leaving, json!({"phase": "Running"}))));
    }
}
