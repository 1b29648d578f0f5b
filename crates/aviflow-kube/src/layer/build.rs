//! Making layers: a task for each, which sees to it that the layer is in the object store, and leaves no pod behind.
//!
//! Invariants: a layer that is there is never made again; of one that is asked for twice one pod is made, as its name
//! follows from its hash, and a control plane that is started again finds that pod; a pod whose layer nobody
//! wants any more is deleted.

use super::{Ground, Stage, pod, pod_name, stage, tag};
use crate::api::persist;
use crate::body::{Body, reference};
use crate::check::remove;
use crate::cluster::Message;
use crate::depot::{Build, Builds, Objects};
use crate::names;
use crate::namespace::Namespaces;
use crate::pod::Site;
use crate::resolve::pull_secrets;
use crate::site::PodRef;
use aviflow_core::model::EnvironmentHash;
use aviflow_engine::ports::{JobRecord, Observation};
use aviflow_engine::telemetry::{BuildProgress, Telemetry};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::task::AbortHandle;

/// How often a build is tried whose pod was evicted or could not start.
const TRIES: u32 = 3;

/// Layers that are being made, and their pods.
#[derive(Default)]
pub(crate) struct Making {
    /// By the hash.
    tasks: BTreeMap<String, Task>,
    /// The number of the last.
    last: u64,
    /// Pods of builds that are there, by their uid.
    pods: BTreeMap<String, (String, PodRef)>,
}

/// A task that makes a layer.
struct Task {
    /// What of one that was given up is still under way has another number.
    number: u64,
    handle: AbortHandle,
    namespace: String,
}

/// What a task needs.
struct Maker {
    client: Client,
    site: Site,
    objects: Arc<dyn Objects>,
    builds: Builds,
    namespaces: Arc<Namespaces>,
    telemetry: Arc<dyn Telemetry>,
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
            ground: Ground {
                namespace: record.key.namespace.clone(),
                layer: layer.clone(),
                image: image.pinned.clone(),
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
        let task = Task { number, handle: task.abort_handle(), namespace: record.key.namespace.clone() };
        self.making.tasks.insert(layer.hash.clone(), task);
    }

    /// A layer is there, or cannot be made.
    pub(crate) fn made(&mut self, hash: String, number: u64, made: Result<(), String>) {
        // One that was given up meanwhile is nobody's.
        if self.making.tasks.get(&hash).is_none_or(|task| task.number != number) {
            return;
        }
        self.making.tasks.remove(&hash);
        let hash = EnvironmentHash(hash);
        let observation = match made {
            Ok(()) => Observation::EnvironmentReady { hash },
            Err(reason) => Observation::EnvironmentFailed { hash, reason },
        };
        self.workers.report(observation, None);
    }

    /// Nobody wants a layer any more.
    pub(crate) fn abandon(&mut self, hash: &str) {
        let Some(Task { handle, namespace, .. }) = self.making.tasks.remove(hash) else { return };
        handle.abort();
        crate::depot::forget(&self.builds, hash);
        let api = Api::<Pod>::namespaced(self.config.client.clone(), &namespace);
        let name = pod_name(hash);
        // One that was being made at this moment is seen, and deleted, as that of nobody.
        tokio::spawn(async move { remove(&api, &name).await });
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
    /// Makes the layer unless it is there, and removes what that took.
    async fn run(mut self) -> Result<(), String> {
        let hash = self.ground.layer.hash.clone();
        let api = Api::<Pod>::namespaced(self.client.clone(), &self.ground.namespace);
        let made = self.make(&api).await;
        crate::depot::forget(&self.builds, &hash);
        // Also where it was there: a control plane that was killed may have left the pod that made it.
        remove(&api, &pod_name(&hash)).await;
        made.map_err(|reason| format!("{} cannot be made into a layer: {reason}", self.name))
    }

    async fn make(&mut self, api: &Api<Pod>) -> Result<(), String> {
        if self.there().await? {
            return Ok(());
        }
        self.tell("making its pod");
        self.namespaces.prepare(&self.client, &self.ground.namespace).await?;
        // Where they cannot be read, kubelet says what it cannot pull.
        self.ground.pull_secrets =
            persist(|| pull_secrets(&self.client, &self.ground.namespace)).await.unwrap_or_default();
        let pod = pod(&self.ground, &self.site)?;
        let mut tries = 0;
        loop {
            tries += 1;
            let (reason, lasting) = match self.try_once(api, &pod).await? {
                Ended::Done if self.there().await? => return Ok(()),
                Ended::Done => ("its pod ended, and the layer is not in the object store".to_owned(), false),
                Ended::Failed { reason, lasting } => (reason, lasting),
            };
            if lasting {
                return Err(reason);
            }
            if tries >= TRIES {
                return Err(format!("{reason} (tried {tries} times); submit the job again once that is set right"));
            }
            remove(api, &pod_name(&self.ground.layer.hash)).await;
        }
    }

    /// Follows the pod, which is made unless it is there, to its end.
    async fn try_once(&self, api: &Api<Pod>, pod: &Pod) -> Result<Ended, String> {
        let name = pod_name(&self.ground.layer.hash);
        let here = loop {
            let refused = match persist(|| async { api.create(&PostParams::default(), pod).await }).await {
                Ok(made) => break made,
                Err(refused) => refused,
            };
            if !refused.is_conflict() {
                return Err(format!("its pod was refused by the apiserver: {}", refused.message));
            }
            match persist(|| async { api.get_opt(&name).await }).await {
                // That of the last control plane, or of a job that was cancelled and is on its way out.
                Ok(Some(found)) if found.metadata.deletion_timestamp.is_none() => break found,
                Ok(_) => remove(api, &name).await,
                Err(refused) => return Err(format!("its pod {name} cannot be read: {}", refused.message)),
            }
        };
        let here = reference(&here).ok_or_else(|| format!("its pod {name} has no uid"))?;
        let lock = self.ground.layer.lock.clone();
        crate::depot::expect(&self.builds, &self.ground.layer.hash, Build { pod: here.clone(), lock });
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut events = watcher::watcher(api.clone(), config).boxed();
        let mut told = String::new();
        // Whether the list that begins a watch had it.
        let mut listed = false;
        let gone = || Ended::Failed { reason: "somebody deleted its pod".to_owned(), lasting: false };
        while let Some(event) = events.next().await {
            let seen = match event {
                Ok(Event::Apply(pod) | Event::InitApply(pod)) => pod,
                Ok(Event::Delete(pod)) if pod.metadata.uid.as_ref() == Some(&here.uid) => return Ok(gone()),
                Ok(Event::Init) => {
                    listed = false;
                    continue;
                }
                Ok(Event::InitDone) if !listed => return Ok(gone()),
                Ok(Event::Delete(_) | Event::InitDone) | Err(_) => continue,
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
        }
        Ok(Ended::Failed { reason: "the watch of its pod ended".to_owned(), lasting: false })
    }

    fn tell(&self, step: &str) {
        let (hash, name) = (self.ground.layer.hash.clone(), self.name.clone());
        self.telemetry.build(BuildProgress { hash, name, step: step.to_owned(), done: 0, total: 0 });
    }

    async fn there(&self) -> Result<bool, String> {
        let (objects, hash) = (self.objects.clone(), self.ground.layer.hash.clone());
        let found = tokio::task::spawn_blocking(move || objects.layer(&hash)).await;
        let found = found.map_err(|_| "the control plane is stopping".to_owned())?;
        found.map(|found| found.is_some()).map_err(|e| format!("the object store cannot be read: {e}"))
    }
}

/// How one try ended.
enum Ended {
    Done,
    Failed { reason: String, lasting: bool },
}
