//! The one task of the body: it takes orders, and holds what is known of the cluster.

use crate::api::{Watch, insist, watch};
use crate::books::Books;
use crate::check::{self, Ground};
use crate::cluster::{KubeConfig, Listed, Message};
use crate::create::create_all;
use crate::depot::Builds;
use crate::documents::read::Kind;
use crate::exporters::Exporters;
use crate::keep::Keeping;
use crate::layer::build::Making;
use crate::namespace::Namespaces;
use crate::object;
use crate::observe::Sightings;
use crate::pod::Share;
use crate::profile::{NodeFacts, Profile};
use crate::site::{Own, PodRef, Pods, heard};
use aviflow_api::convert::GRACE;
use aviflow_api::rest::ExecFrame;
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::{JobId, Placement};
use aviflow_core::time::Span;
use aviflow_engine::ports::{JobRecord, Observation, Order, Stamped};
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::{Site as _, Workers};
use futures_util::StreamExt;
use futures_util::stream::pending;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::DeleteParams;
use kube::core::DynamicObject;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};

/// The pool of a cluster that has no document of one: all nodes with `nvidia.com/gpu`.
pub const DEFAULT_POOL: &str = "main";

/// Seconds that a pod has of which no rank runs. With 0, kubelet would not be asked whether it has ended.
const SHORT: i64 = 1;

/// How often silent workers are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What the task holds.
pub(crate) struct Body {
    pub(crate) config: KubeConfig,
    pub(crate) workers: Arc<Workers<Pods>>,
    pub(crate) books: Books,
    /// Every pod that asks for GPUs.
    pub(crate) sightings: Sightings,
    /// Pods that report what GPUs do.
    pub(crate) exporters: Exporters,
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) keeping: Keeping,
    /// Layers that are being made.
    pub(crate) making: Making,
    /// The same, as the depot knows them.
    pub(crate) builds: Builds,
    /// The pools of the cluster's objects.
    pub(crate) pools: BTreeMap<String, Profile>,
    pub(crate) requests: Arc<Semaphore>,
    pub(crate) messages: mpsc::UnboundedSender<Message>,
    /// Whether all nodes and pods were listed once.
    pub(crate) listed: Arc<Listed>,
    /// Orders that wait for both.
    pub(crate) held: Vec<Stamped>,
    /// Pods of ours that were seen before their workers were launched: the newest of each.
    pub(crate) unseen: BTreeMap<StreamKey, Pod>,
}

impl Body {
    pub(crate) async fn run(mut self, mut messages: mpsc::UnboundedReceiver<Message>) {
        let client = self.config.client.clone();
        let mut pools: Watch<DynamicObject> = watch(Api::all_with(client.clone(), &Kind::Pool.resource()), None);
        // Which nodes there are follows from the pools.
        let (mut nodes, mut pods): (Watch<Node>, Watch<Pod>) = (pending().boxed(), pending().boxed());
        let (mut node_list, mut pod_list) = (BTreeSet::new(), BTreeSet::new());
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                message = messages.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                Some(event) = pools.next() => {
                    if self.pool_event(event) {
                        nodes = watch(Api::all(client.clone()), None);
                        pods = watch(Api::all(client.clone()), None);
                    }
                }
                Some(event) = nodes.next() => self.node_event(event, &mut node_list),
                Some(event) = pods.next() => self.pod_event(event, &mut pod_list),
                _ = look.tick() => self.look(),
            }
        }
    }

    /// Takes a pool's document; whether the nodes are to be looked at again.
    fn pool_event(&mut self, event: watcher::Result<Event<DynamicObject>>) -> bool {
        match event {
            Ok(Event::Init) => {
                self.pools.clear();
                return false;
            }
            Ok(Event::InitApply(pool)) => {
                self.pools.extend(object::profile(&pool).map(|p| (p.pool.clone(), p)));
                return false;
            }
            Ok(Event::InitDone) => {}
            Ok(Event::Apply(pool)) => self.pools.extend(object::profile(&pool).map(|p| (p.pool.clone(), p))),
            Ok(Event::Delete(pool)) => {
                self.pools.remove(pool.metadata.name.as_deref().unwrap_or_default());
            }
            // The watch begins again by itself, after a pause.
            Err(_) => return false,
        }
        let profiles = match self.pools.is_empty() {
            true => vec![Profile::nvidia(DEFAULT_POOL)],
            false => self.pools.values().cloned().collect(),
        };
        if self.books.profiles() == profiles {
            return false;
        }
        self.books.set_profiles(profiles);
        true
    }

    pub(crate) fn say(&self, observations: Vec<Observation>) {
        for observation in observations {
            self.workers.report(observation, None);
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            // Where a pod may be is known only with the nodes, and which there are only with the pods.
            Message::Orders(orders) if !self.listed.all() => self.held.extend(orders),
            Message::Orders(orders) => {
                let begins = orders.iter().any(|o| matches!(o.order, Order::Reconcile { .. }));
                for stamped in orders {
                    self.order(stamped);
                }
                if begins {
                    // What an earlier term kept and this one did not speak of.
                    self.books.names().iter().for_each(|node| self.keep(node));
                    self.sweep_layers();
                }
                self.workers.notify();
            }
            Message::Made(hash, number, made) => self.made(hash, number, made),
            Message::Platforms(types, answer) => {
                let may = |node: &&NodeFacts| types.is_empty() || types.contains(&node.gpu_type);
                // Who asked may have gone.
                let _ = answer.send(self.books.nodes().filter(may).map(|node| node.platform.clone()).collect());
            }
            Message::Observe(answer) => {
                let now = aviflow_engine::driver::wall_clock().0;
                // Who asked may have gone.
                let _ = answer.send(self.sightings.observed(&self.books, self.config.observe, now));
            }
            Message::Check(check, to) => {
                let (client, namespace) = (self.config.client.clone(), self.config.namespace.clone());
                let site = self.config.site.clone();
                let ground = self.books.node_of(&check.node).zip(self.books.profile_of(&check.node));
                let ground = ground.map(|(node, profile)| Ground { profile: profile.clone(), gpus: node.allocatable });
                tokio::spawn(async move {
                    match ground {
                        Some(ground) => check::run(client, &namespace, &site, &check, &ground, to).await,
                        None => {
                            let reason = format!("node `{}` is not in the cluster", check.node);
                            let _ = to.send(ExecFrame::Failed { reason }).await;
                        }
                    }
                });
            }
            Message::Created(key, pod) => {
                let known = self.workers.with(key, |worker| {
                    worker.own.pod = Some(pod.clone());
                    !worker.remove && !worker.own.deleted
                });
                // Its attempt ended meanwhile, or belongs to an earlier term.
                if known != Some(true) {
                    self.delete(pod, Some(SHORT));
                }
                self.workers.notify();
                if let Some(pod) = self.unseen.remove(&key) {
                    self.pod_seen(pod);
                }
            }
            Message::NotBegun(key, pod, trouble) => self.not_begun(key, &pod, trouble),
            Message::NotCreated(key, reason) => {
                if self.workers.with(key, |w| !w.remove && !std::mem::replace(&mut w.own.told, true)) == Some(true) {
                    self.event(key, WorkerEvent::Refused { reason: reason.clone(), lasting: true });
                }
                self.gone(key, Some(reason));
            }
        }
    }

    /// Carries out what waited for the first lists.
    pub(crate) fn begin(&mut self) {
        if self.listed.all() && !self.held.is_empty() {
            let held = std::mem::take(&mut self.held);
            self.take(Message::Orders(held));
        }
    }

    pub(crate) fn event(&self, key: StreamKey, event: WorkerEvent) {
        self.workers.report_worker(key, 0, Span(0), event, None);
    }

    fn order(&mut self, Stamped { term, order, .. }: Stamped) {
        match order {
            Order::Reconcile { live } => {
                let found = self.unseen.keys().copied().collect();
                let (known, new) = self.workers.reconcile(&live, found);
                for key in known.into_iter().chain(new) {
                    self.discard(key);
                }
                self.keeping.begin();
            }
            // An image is pulled by kubelet, and what cannot be resolved is refused at submission: what is made is a
            // layer.
            Order::Prepare { record } => self.make_layer(&record),
            Order::Abandon { hash } => self.abandon(&hash.0),
            Order::Launch { record, attempt, placement, nodes, heard } => {
                self.launch(&record, attempt, &placement, &nodes, &heard);
            }
            Order::Confirm { job, attempt, epoch, rank0, best_step } => {
                self.workers.start(term, (job, attempt, epoch), &rank0, best_step, |_| {});
            }
            Order::Stop { job, attempt, epoch, grace, reason } => {
                self.stop(term, (job, attempt, epoch), grace, &reason)
            }
            Order::Remove { job, attempt } => self.remove(job, attempt),
            Order::Keep { node, gpus, whole } => {
                self.keeping.set(&node, gpus, whole);
                self.keep(&node);
            }
        }
    }

    /// Makes the pods of an attempt, but for those of workers that were heard of, which must exist.
    fn launch(
        &mut self,
        record: &Arc<JobRecord>,
        attempt: u32,
        placement: &Placement,
        nodes: &[String],
        heard: &BTreeSet<u32>,
    ) {
        let workers = u32::try_from(placement.0.len()).unwrap_or(u32::MAX);
        let mut pods = Vec::new();
        for (worker, ((_, slots), node)) in (0..workers).zip(placement.0.iter().zip(nodes)) {
            let key = StreamKey { job: record.id, attempt, worker };
            let heard = heard.contains(&worker);
            {
                let mut state = self.workers.lock();
                if let Some(known) = state.workers.get(&key) {
                    if !known.over || known.remove {
                        continue;
                    }
                    // Said again, as the report of its end may have been lost.
                    drop(state);
                    self.event(key, lost("its pod is gone"));
                    continue;
                }
                let code = record.provenance.code.as_ref().map(|c| c.sha256.clone());
                let own = Own {
                    node: node.clone(),
                    code,
                    layer: record.provenance.layer.as_ref().map(|layer| layer.hash.clone()),
                    workers,
                    silent: heard.then(Instant::now),
                    heard,
                    ..Own::default()
                };
                state.workers.insert(key, aviflow_link::Worker { own, ..Default::default() });
            }
            if heard {
                self.adopt(key);
                continue;
            }
            let slots: Vec<u32> = slots.iter().collect();
            let node_gpus = self.books.gpus_of(node);
            pods.push(Share { key, workers, node: node.clone(), slots, node_gpus, grace: GRACE });
        }
        self.workers.settled(record.id, attempt);
        if pods.is_empty() {
            return;
        }
        let profile = pods.first().and_then(|share| self.books.profile_of(&share.node)).cloned();
        let Some(profile) = profile else {
            for share in pods {
                let reason = format!("node `{}` is not in the cluster any more", share.node);
                self.event(share.key, WorkerEvent::Refused { reason: reason.clone(), lasting: false });
                self.gone(share.key, Some(reason));
            }
            return;
        };
        tokio::spawn(create_all(
            self.config.client.clone(),
            self.requests.clone(),
            self.messages.clone(),
            (self.workers.clone(), self.namespaces.clone()),
            (record.clone(), pods, profile, self.config.site.clone()),
        ));
    }

    /// Takes up a worker whose pod was made before.
    fn adopt(&mut self, key: StreamKey) {
        match self.unseen.remove(&key) {
            Some(pod) => {
                self.workers.with(key, |worker| worker.own.pod = reference(&pod));
                self.pod_seen(pod);
            }
            None if self.listed.pods.load(Ordering::Acquire) => self.adrift(key),
            // The list of pods will tell.
            None => {}
        }
    }

    /// A worker whose pod is gone without kubelet's word that nothing of it runs.
    pub(crate) fn adrift(&self, key: StreamKey) {
        self.workers.with(key, |worker| {
            worker.own.adrift = true;
            worker.own.silent.get_or_insert_with(Instant::now);
        });
    }

    fn stop(&mut self, term: aviflow_core::model::Term, epoch: (JobId, u32, u32), grace: Span, reason: &str) {
        let mut unheard = Vec::new();
        self.workers.stop(term, epoch, grace, reason, |key, worker| {
            // No rank of it was ever started: there is nothing to save.
            if !heard(worker) && !worker.over {
                unheard.push(key);
            }
        });
        for key in unheard {
            self.end_pod(key);
        }
    }

    /// Deletes the pod of a worker of which no rank runs, if it was not deleted yet: at once, or once it is made.
    pub(crate) fn end_pod(&self, key: StreamKey) {
        let pod = self.workers.with(key, |worker| {
            let first = !std::mem::replace(&mut worker.own.deleted, true);
            worker.own.pod.clone().filter(|_| first)
        });
        if let Some(pod) = pod.flatten() {
            self.delete(pod, Some(SHORT));
        }
    }

    fn remove(&mut self, job: JobId, attempt: u32) {
        self.workers.settled(job, attempt);
        let mut over = Vec::new();
        {
            let mut state = self.workers.lock();
            for (key, worker) in state.of_attempt(job, attempt) {
                worker.remove = true;
                worker.release();
                if worker.over {
                    over.push(*key);
                }
            }
        }
        for key in over {
            self.discard(key);
        }
    }

    /// Forgets a worker that is over or unwanted, and deletes what is left of its pod.
    pub(crate) fn discard(&mut self, key: StreamKey) {
        let seen = self.unseen.remove(&key).and_then(|pod| reference(&pod));
        let removed = self.workers.lock().workers.remove(&key);
        let pod = removed.and_then(|worker| worker.own.pod).or(seen);
        if let Some(pod) = pod {
            self.delete(pod, None);
        }
    }

    /// Deletes a pod that no attempt has. It may be of another control plane, which decides since and of which this
    /// one has not heard: so the store is asked, after the pod was seen, whose its decision could be.
    pub(crate) fn delete_stray(&self, pod: PodRef) {
        let (workers, ours) = (self.workers.clone(), self.workers.lock().term);
        let (client, requests) = (self.config.client.clone(), self.requests.clone());
        tokio::spawn(async move {
            // Where the store does not answer it is left to the next list of all pods.
            if workers.site.decides(ours).await {
                delete(client, requests, pod, None).await;
            }
        });
    }

    pub(crate) fn delete(&self, pod: PodRef, grace: Option<i64>) {
        let (client, requests) = (self.config.client.clone(), self.requests.clone());
        tokio::spawn(delete(client, requests, pod, grace));
    }

    /// Nothing of a worker runs any more.
    pub(crate) fn gone(&mut self, key: StreamKey, reason: Option<String>) {
        let Some((said, remove)) = self.workers.with(key, |worker| {
            let said = worker.gone.is_some() || std::mem::replace(&mut worker.over, true);
            worker.over = true;
            worker.link = None;
            (said, worker.remove)
        }) else {
            return;
        };
        if !said {
            self.event(key, WorkerEvent::Gone { ranks: BTreeMap::new(), reason, last_step: None, next_port: None });
        }
        if remove {
            self.discard(key);
        }
    }
}

async fn delete(client: Client, requests: Arc<Semaphore>, pod: PodRef, grace: Option<i64>) {
    let _turn = requests.acquire().await;
    let api = Api::<Pod>::namespaced(client, &pod.namespace);
    let how = DeleteParams {
        grace_period_seconds: grace.and_then(|g| u32::try_from(g).ok()),
        preconditions: Some(kube::api::Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
        ..DeleteParams::default()
    };
    // Whatever it refuses for good (it is gone, or another by now) leaves nothing to do.
    let _ = insist(|| async { api.delete(&pod.name, &how).await.map(|_| ()) }).await;
}

fn lost(reason: &str) -> WorkerEvent {
    WorkerEvent::Lost { reason: reason.to_owned() }
}

/// A pod by its name and uid.
pub(crate) fn reference(pod: &Pod) -> Option<PodRef> {
    let metadata = pod.metadata.clone();
    Some(PodRef { namespace: metadata.namespace?, name: metadata.name?, uid: metadata.uid? })
}
