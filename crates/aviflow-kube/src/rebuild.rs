//! A store that was lost, rebuilt from the objects of the cluster and the pods of running gangs.
//!
//! [`rebuild`] is a pure function of what [`collect`] found. It makes the first batch of an empty store: jobs with
//! their numbers, names and places in the order; gangs as their pods are, so that their agents are adopted and nothing
//! starts again; queues and pools. What the objects do not say is lost, and said to be ([`Rebuilt::lost`]).
//!
//! Only what the control plane itself wrote is trusted: the status, which no person may write, annotations and specs
//! that the admission policies guard, and pods, which it alone makes.
//!
//! Invariants:
//! - no attempt is begun whose workers may still run: a gang is taken as a whole, or its job waits until what is left
//!   of it is surely gone;
//! - terms and job numbers go on beyond all that may have been handed out.

mod gang;
mod read;

#[cfg(test)]
mod tests;

use crate::body::DEFAULT_POOL;
use crate::documents::read::{Document, Kind, document};
use crate::object;
use crate::profile::{NodeFacts, Profile};
use aviflow_api::file::Priorities;
use aviflow_core::gpus::Slots;
use aviflow_core::ledger::{GpuState, Open, Owner};
use aviflow_core::lifecycle::{Moment, MomentKind};
use aviflow_core::model::{
    Decayed, EnvironmentHash, EnvironmentState, Job, JobId, JobKey, Node, NodeId, Phase, Pool, Queue, Snapshot, Term,
};
use aviflow_core::time::{Span, Time};
use aviflow_engine::engine::default_queue;
use aviflow_engine::ports::{Batch, Beyond, JobRecord};
use futures_util::future::try_join_all;
use gang::Gangs;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::api::ListParams;
use kube::core::DynamicObject;
use kube::{Api, Client};
use read::Told;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Job numbers that are left out, as jobs may have had them whose objects are gone. Logs and volumes of jobs are kept
/// by their numbers.
pub const NUMBERS: u64 = 1_000_000;

/// How long a job waits of which something may still run that could not be taken over: longer than it takes to stop it.
const SETTLE: Span = Span::seconds(120);

/// Objects of one answer.
const PAGE: u32 = 500;

/// What the cluster has.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// TrainingJobs.
    pub jobs: Vec<DynamicObject>,
    /// Queues.
    pub queues: Vec<DynamicObject>,
    /// Pools.
    pub pools: Vec<DynamicObject>,
    /// Nodes.
    pub nodes: Vec<NodeObject>,
    /// Pods of workers.
    pub pods: Vec<Pod>,
}

/// What was made of it.
#[derive(Debug, Default)]
pub struct Rebuilt {
    /// The store's first batch.
    pub batch: Batch,
    /// Jobs that hold GPUs, that wait, and that have ended.
    pub counts: [usize; 3],
    /// What could not be recovered of single jobs, in sentences.
    pub lost: Vec<String>,
}

/// Everything that a store can be rebuilt from.
///
/// # Errors
/// If the apiserver does not answer.
pub async fn collect(client: &Client) -> Result<Found, String> {
    let objects = [object::resource(), Kind::Queue.resource(), Kind::Pool.resource()];
    let objects = objects.map(|resource| {
        let client = client.clone();
        async move { all(&Api::<DynamicObject>::all_with(client, &resource), "").await }
    });
    let mut objects = try_join_all(objects).await?.into_iter();
    let mut next = || objects.next().unwrap_or_default();
    let ours = format!("{}={}", crate::names::MANAGED_BY, crate::names::AVIFLOW);
    Ok(Found {
        jobs: next(),
        queues: next(),
        pools: next(),
        nodes: all(&Api::<NodeObject>::all(client.clone()), "").await?,
        pods: all(&Api::<Pod>::all(client.clone()), &ours).await?,
    })
}

async fn all<T>(api: &Api<T>, labels: &str) -> Result<Vec<T>, String>
where
    T: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let (mut found, mut page) = (Vec::new(), ListParams::default().limit(PAGE).labels(labels));
    loop {
        let list = api.list(&page).await.map_err(|e| e.to_string())?;
        found.extend(list.items);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}

impl Found {
    /// Whether a control plane had jobs here: then an empty store is one that was lost.
    #[must_use]
    pub fn has_jobs(&self) -> bool {
        self.jobs.iter().any(|object| read::number(object).is_some())
    }
}

/// The first batch of an empty store that is held under `term`, and what could not be recovered.
///
/// `default_queue` is that of objects that name none. Terms go on beyond `now` in seconds: an agent obeys none that is
/// lower than the highest it has seen, and no control plane starts as often as once a second.
#[must_use]
pub fn rebuild(found: &Found, term: Term, now: Time, queue: &str, priorities: &Priorities) -> Rebuilt {
    let mut lost = Vec::new();
    let mut told: BTreeMap<JobId, Told> = BTreeMap::new();
    let mut names: BTreeMap<JobKey, JobId> = BTreeMap::new();
    for object in &found.jobs {
        match Told::of(object, queue, priorities, now) {
            Ok(Some(one)) if told.contains_key(&one.record.id) || names.contains_key(&one.record.key) => {
                lost.push(format!(
                    "{} says that it is a job that another object is, and was left out",
                    read::called(object)
                ));
            }
            Ok(Some(one)) => {
                names.insert(one.record.key.clone(), one.record.id);
                told.insert(one.record.id, one);
            }
            Ok(None) => {}
            Err(why) => lost.push(format!("{} was left out: {why}", read::called(object))),
        }
    }
    let mut state = Snapshot { nodes: nodes(found), ..Snapshot::default() };
    documents(found, priorities, &mut state);
    let gangs = Gangs::of(&found.pods);
    let endings: BTreeMap<JobId, Job> = told.iter().map(|(id, one)| (*id, one.job.clone())).collect();
    let mut batch = Batch { term, generation: 1, at: now, ..Batch::default() };
    let mut counts = [0; 3];
    for (id, mut one) in told {
        if let Some(at) = one.ended {
            batch.ended.insert(id, at);
        } else {
            one.dependencies(&endings);
            if let Some(phase) = one.gang {
                match gangs.take(&one, phase, &mut state, now) {
                    Ok(phase) => one.job.phase = phase,
                    Err(why) => {
                        let name = &one.record.key.name;
                        lost.push(format!("{name} waits again: attempt {} {why}", one.job.attempts));
                        one.job.not_before = Some(now + SETTLE);
                    }
                }
            }
        }
        let which = match &one.job.phase {
            phase if phase.is_terminal() => 2,
            Phase::Queued => 1,
            _ => 0,
        };
        counts[which] += 1;
        if let Some(hash) = one.job.environment.clone().filter(|_| which < 2) {
            batch.environments.push((hash, Some(EnvironmentState::Preparing)));
        }
        batch.moments.extend(one.moments(now));
        batch.records.push(Arc::new(one.record));
        batch.jobs.push(one.job);
    }
    batch.environments.sort_by(|(a, _), (b, _): &(EnvironmentHash, _)| a.cmp(b));
    batch.environments.dedup_by(|(a, _), (b, _)| a == b);
    let highest = batch.records.iter().map(|r| r.id.0).max().unwrap_or_default();
    batch.beyond = Some(Beyond { term: u64::try_from(now.0 / 1000).unwrap_or_default(), job: highest + NUMBERS });
    let first = default_queue();
    if batch.jobs.iter().any(|job| job.request.queue == first.name) {
        state.queues.entry(first.name.clone()).or_insert(first);
    }
    batch.queues = state.queues.into_iter().map(|(name, queue)| (name, Some(queue))).collect();
    batch.pools = state.pools.into_iter().map(|(name, pool)| (name, Some(pool))).collect();
    let holders: BTreeSet<NodeId> =
        batch.jobs.iter().filter_map(|job| job.phase.gang()).flat_map(aviflow_core::model::Gang::nodes).collect();
    // Others are seen when the cluster is looked at, and have no past that would be missing.
    batch.nodes = state.nodes.into_values().filter(|node| holders.contains(&node.id)).collect();
    batch.usage = usage(&batch.jobs, now).into_iter().map(|(whose, used)| (whose, Some(used))).collect();
    batch.open = batch.nodes.iter().map(|node| (node.id, open(node, &batch.jobs, now))).collect();
    Rebuilt { batch, counts, lost }
}

/// The nodes of the pools, with numbers of their own.
fn nodes(found: &Found) -> BTreeMap<NodeId, Node> {
    let profiles: Vec<Profile> = found.pools.iter().filter_map(object::profile).collect();
    let profiles = if profiles.is_empty() { vec![Profile::nvidia(DEFAULT_POOL)] } else { profiles };
    let facts = found.nodes.iter().filter_map(|node| NodeFacts::of(node, &profiles)).filter(|f| f.capacity > 0);
    let facts: BTreeMap<String, NodeFacts> = facts.map(|f| (f.name.clone(), f)).collect();
    let node = |(id, f): (u32, NodeFacts)| {
        let node = Node::new(NodeId(id), &f.name, &f.pool, &f.gpu_type, Slots::first(f.capacity));
        (node.id, Node { reported: f.path, ..node })
    };
    (1..).zip(facts.into_values()).map(node).collect()
}

/// Queues and pools, and what follows from pools for their nodes: those by which the control plane decided. Others are
/// judged when it looks at their objects, as ever.
fn documents(found: &Found, priorities: &Priorities, state: &mut Snapshot) {
    let read = |kind: Kind, objects: &[DynamicObject]| -> Vec<Document> {
        let held = objects.iter().filter(|object| accepted(object));
        held.filter_map(|object| document(kind, object, priorities).ok()).collect()
    };
    let mut queues: BTreeMap<String, Queue> = BTreeMap::new();
    let mut pools: BTreeMap<String, Pool> = BTreeMap::new();
    for document in read(Kind::Queue, &found.queues).into_iter().chain(read(Kind::Pool, &found.pools)) {
        match document {
            Document::Queue(queue) => drop(queues.insert(queue.name.clone(), queue)),
            Document::Pool(pool) => drop(pools.insert(pool.name.clone(), pool)),
        }
    }
    // From the root down: one whose parent is missing makes no sense, nor do those below it.
    let mut known: BTreeMap<String, Queue> = BTreeMap::new();
    loop {
        let fits = |queue: &Queue| queue.parent.as_ref().is_none_or(|parent| known.contains_key(parent));
        let (some, rest): (BTreeMap<_, _>, BTreeMap<_, _>) = queues.into_iter().partition(|(_, queue)| fits(queue));
        queues = rest;
        if some.is_empty() {
            break;
        }
        known.extend(some);
    }
    for node in state.nodes.values_mut() {
        node.path = pools.get(&node.pool).map(|pool| pool.path(&node.name, &node.reported)).unwrap_or_default();
    }
    (state.queues, state.pools) = (known, pools);
}

/// Whether the control plane said of a document, as it is now, that it decides by it.
fn accepted(object: &DynamicObject) -> bool {
    let condition = |c: &&serde_json::Value| c["type"] == "Accepted" && c["status"] == "True";
    let conditions = object.data.pointer("/status/conditions").and_then(serde_json::Value::as_array);
    let accepted = conditions.into_iter().flatten().find(condition);
    accepted.is_some_and(|c| c["observedGeneration"].as_i64() == object.metadata.generation)
}

/// Who holds how many GPUs in which queue from now on; what each had before is not known.
fn usage(jobs: &[Job], now: Time) -> BTreeMap<(String, String), Decayed> {
    let mut usage: BTreeMap<(String, String), Decayed> = BTreeMap::new();
    for (job, gang) in jobs.iter().filter_map(|job| Some((job, job.phase.gang()?))) {
        let whose = (job.request.queue.clone(), job.user.clone());
        usage.entry(whose).or_insert(Decayed { value: 0, at: now, gpus: 0 }).gpus += gang.gpu_count();
    }
    usage
}

/// The open intervals of a node, which begin now: of what was before nobody knows.
fn open(node: &Node, jobs: &[Job], now: Time) -> Vec<Open> {
    let held = jobs.iter().filter_map(|job| Some((job, job.phase.gang()?))).flat_map(|(job, gang)| {
        let state = match &job.phase {
            Phase::Running(_) => GpuState::Productive,
            Phase::Suspending(_) | Phase::Stopping(_) => GpuState::Stopping,
            _ => GpuState::Starting,
        };
        let owner = Some(Owner { job: job.id, attempt: gang.attempt });
        let here = gang.workers.iter().filter(|w| w.node == node.id);
        here.map(move |w| Open { slots: w.slots, state, owner, from: now })
    });
    let free = Open { slots: node.gpus.without(node.held), state: GpuState::Free, owner: None, from: now };
    held.chain([free]).filter(|open| !open.slots.is_empty()).collect()
}

/// What happened to a job, as far as anybody still knows.
fn moment(record: &JobRecord, at: Time, attempt: u32, kind: MomentKind) -> Moment {
    Moment { job: record.id, at, attempt, kind }
}
