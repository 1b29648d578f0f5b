//! The store port in memory, for the simulator and for tests.
//!
//! What a batch wrote outlives the handle that wrote it: a clone is durable
//! state as it was at that instant, and [`MemoryStore::handle`] is what another
//! process would open. Deterministic: nothing here depends on addresses, time or
//! the order of hashing.

use crate::ports::{Act, Batch, JobRecord, Known, Loaded, Store, StoreError, ending};
use aviflow_core::health::quarantine::Quarantine;
use aviflow_core::ledger::{Entry, Open};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{
    Decayed, Ending, EnvironmentHash, EnvironmentState, History, Job, JobId, JobKey, Node, NodeId, Phase, Policy, Pool,
    Queue, RollingDrain, Snapshot, Term,
};
use aviflow_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A store that is gone with the process.
///
/// A clone has durable state of its own and costs a few pointers; the first
/// commit after it copies maps of pointers, never jobs.
#[derive(Debug, Default)]
pub struct MemoryStore(Arc<Mutex<State>>);

/// A job as it is kept, ended or not.
#[derive(Clone, Debug)]
struct Row {
    job: Arc<Job>,
    record: Arc<JobRecord>,
    ended: Option<Time>,
}

#[derive(Clone, Debug, Default)]
struct State {
    term: u64,
    generation: u64,
    clock: Time,
    last_job: u64,
    last_node: u32,
    last_drain: u64,
    paused: Option<String>,
    policy: Policy,
    rows: Arc<BTreeMap<JobId, Row>>,
    live: Arc<BTreeSet<JobId>>,
    names: Arc<BTreeMap<JobKey, JobId>>,
    pools: Arc<BTreeMap<String, Pool>>,
    usage: Arc<BTreeMap<(String, String), Decayed>>,
    /// What is remembered of ended jobs.
    past: Arc<History>,
    drains: Arc<Vec<RollingDrain>>,
    quarantines: Arc<BTreeMap<String, Quarantine>>,
    nodes: Arc<BTreeMap<NodeId, Node>>,
    queues: Arc<BTreeMap<String, Queue>>,
    environments: Arc<BTreeMap<EnvironmentHash, EnvironmentState>>,
    open: Arc<BTreeMap<NodeId, Vec<Open>>>,
    history: Arc<Vec<Arc<Batch>>>,
    forgetful: bool,
    refusal: Option<StoreError>,
}

impl Clone for MemoryStore {
    /// A copy of the durable state, with a life of its own.
    fn clone(&self) -> MemoryStore {
        MemoryStore(Arc::new(Mutex::new(self.state().clone())))
    }
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// An empty store that keeps neither batches nor ended jobs, for long simulations.
    #[must_use]
    pub fn forgetful() -> MemoryStore {
        let store = MemoryStore::default();
        store.state().forgetful = true;
        store
    }

    /// Another handle on the same durable state, as another process would open it.
    #[must_use]
    pub fn handle(&self) -> MemoryStore {
        MemoryStore(Arc::clone(&self.0))
    }

    /// Refuses every commit with this error, until `None` is given.
    pub fn refuse(&self, error: Option<StoreError>) {
        self.state().refusal = error;
    }

    /// The term under which it is held now.
    #[must_use]
    pub fn term(&self) -> Term {
        Term(self.state().term)
    }

    /// A job with its document, ended or not.
    #[must_use]
    pub fn job(&self, id: JobId) -> Option<(Job, Arc<JobRecord>)> {
        self.state().rows.get(&id).map(|r| (r.job.as_ref().clone(), Arc::clone(&r.record)))
    }

    /// When a job ended.
    #[must_use]
    pub fn ended(&self, id: JobId) -> Option<Time> {
        self.state().rows.get(&id).and_then(|r| r.ended)
    }

    /// Every batch that was committed, oldest first.
    #[must_use]
    pub fn history(&self) -> Arc<Vec<Arc<Batch>>> {
        Arc::clone(&self.state().history)
    }

    /// Every closed ledger interval, in the order of the commits.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        self.history().iter().flat_map(|b| b.entries.iter().cloned()).collect()
    }

    /// The moments of a job, in their order.
    #[must_use]
    pub fn moments(&self, job: JobId) -> Vec<Moment> {
        self.history().iter().flat_map(|b| b.moments.iter().filter(|m| m.job == job).cloned()).collect()
    }

    /// What people did, newest first.
    #[must_use]
    pub fn acts(&self) -> Vec<Act> {
        self.history().iter().rev().flat_map(|b| b.acts.iter().rev().cloned()).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        let mut state = self.state();
        state.term += 1;
        Ok(state.load())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        let mut state = self.state();
        state.check(batch)?;
        state.apply(batch);
        Ok(())
    }

    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
        let state = self.state();
        let Some(id) = state.names.get(key) else { return Ok(None) };
        // Of one that was not kept nobody knows how it ended.
        let ended = state.rows.get(id).map_or(Some(Ending::Ended), |r| ending(&r.job.phase));
        Ok(Some(Known { id: *id, key: key.clone(), ended }))
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        let state = self.state();
        let fits = |r: &&Row| {
            r.job.key.namespace == namespace && r.record.spec.name == work && user.is_none_or(|u| r.job.user == u)
        };
        let newest = state.rows.values().rev().find(fits);
        Ok(newest.map(|r| Known { id: r.job.id, key: r.job.key.clone(), ended: ending(&r.job.phase) }))
    }
}

impl State {
    /// Everything that can be wrong with a batch, so that applying it cannot fail.
    fn check(&self, batch: &Batch) -> Result<(), StoreError> {
        if batch.term.0 != self.term {
            return Err(StoreError::Fenced { ours: batch.term.0, held: self.term, by: None });
        }
        let failed = |why: String| Err(StoreError::Failed(why));
        if batch.generation != self.generation + 1 {
            return failed(format!("commit {} does not follow commit {}", batch.generation, self.generation));
        }
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        let mut new: BTreeMap<JobId, &JobRecord> = batch.records.iter().map(|r| (r.id, r.as_ref())).collect();
        let mut names = BTreeSet::new();
        for job in &batch.jobs {
            match (new.remove(&job.id), self.rows.contains_key(&job.id)) {
                (Some(_), true) => return failed(format!("job {} was stored before", job.id.0)),
                (Some(_), false) => {
                    if self.names.contains_key(&job.key) || !names.insert(&job.key) {
                        return failed(format!("the name {} is taken", job.key.name));
                    }
                }
                (None, true) => {}
                (None, false) => {
                    let gone = self.forgetful && job.id.0 <= self.last_job;
                    if !gone {
                        return failed(format!("job {} changed and its document was never stored", job.id.0));
                    }
                }
            }
        }
        match new.keys().next() {
            Some(id) => failed(format!("job {} came with a document and no state", id.0)),
            None => Ok(()),
        }
    }

    fn apply(&mut self, batch: &Batch) {
        self.generation = batch.generation;
        self.clock = self.clock.max(batch.at);
        self.apply_jobs(batch);
        if !batch.nodes.is_empty() {
            let nodes = Arc::make_mut(&mut self.nodes);
            for node in &batch.nodes {
                self.last_node = self.last_node.max(node.id.0);
                nodes.insert(node.id, node.clone());
            }
        }
        put(&mut self.queues, &batch.queues);
        put(&mut self.pools, &batch.pools);
        put(&mut self.usage, &batch.usage);
        put(&mut self.environments, &batch.environments);
        if let Some(policy) = &batch.policy {
            self.policy = policy.clone();
        }
        if let Some(history) = &batch.history {
            self.past = Arc::new(history.clone());
        }
        if let Some(drains) = &batch.drains {
            self.last_drain = drains.iter().map(|d| d.id).fold(self.last_drain, u64::max);
            self.drains = Arc::new(drains.clone());
        }
        if let Some(quarantines) = &batch.quarantines {
            self.quarantines = Arc::new(quarantines.clone());
        }
        if !batch.open.is_empty() {
            Arc::make_mut(&mut self.open).extend(batch.open.iter().cloned());
        }
        if let Some(paused) = &batch.paused {
            self.paused.clone_from(paused);
        }
        if let Some(beyond) = batch.beyond {
            self.term = self.term.max(beyond.term);
            self.last_job = self.last_job.max(beyond.job);
        }
        if !self.forgetful {
            Arc::make_mut(&mut self.history).push(Arc::new(batch.clone()));
        }
    }

    fn apply_jobs(&mut self, batch: &Batch) {
        if batch.jobs.is_empty() {
            return;
        }
        let records: BTreeMap<JobId, &Arc<JobRecord>> = batch.records.iter().map(|r| (r.id, r)).collect();
        let rows = Arc::make_mut(&mut self.rows);
        for job in &batch.jobs {
            self.last_job = self.last_job.max(job.id.0);
            let terminal = job.phase.is_terminal();
            let old = rows.get(&job.id);
            // A job ends once: the first end stays.
            let at = batch.ended.get(&job.id).copied().unwrap_or(batch.at);
            let ended = old.and_then(|r| r.ended).or(terminal.then_some(at));
            let Some(record) = old.map(|r| &r.record).or(records.get(&job.id).copied()) else { continue };
            let row = Row { job: Arc::new(job.clone()), record: Arc::clone(record), ended };
            if old.is_none() {
                Arc::make_mut(&mut self.names).insert(job.key.clone(), job.id);
            }
            let live = Arc::make_mut(&mut self.live);
            if ended.is_some() {
                live.remove(&job.id)
            } else {
                live.insert(job.id)
            };
            if ended.is_some() && self.forgetful {
                rows.remove(&job.id);
            } else {
                rows.insert(job.id, row);
            }
        }
    }

    fn load(&self) -> Loaded {
        let mut snapshot = Snapshot {
            nodes: self.nodes.as_ref().clone(),
            queues: self.queues.as_ref().clone(),
            environments: self.environments.as_ref().clone(),
            paused: self.paused.clone(),
            pools: self.pools.as_ref().clone(),
            policy: self.policy.clone(),
            usage: self.usage.as_ref().clone(),
            history: self.past.as_ref().clone(),
            drains: self.drains.as_ref().clone(),
            quarantines: self.quarantines.as_ref().clone(),
            ..Snapshot::default()
        };
        for (node, open) in self.open.iter() {
            snapshot.ledger.restore(*node, open.clone());
        }
        let mut records = BTreeMap::new();
        for id in self.live.iter() {
            let Some(row) = self.rows.get(id) else { continue };
            if row.job.phase == Phase::Queued {
                snapshot.waiting.insert(*id);
            }
            snapshot.jobs.insert(*id, row.job.as_ref().clone());
            records.insert(*id, Arc::clone(&row.record));
        }
        Loaded {
            term: Term(self.term),
            generation: self.generation,
            clock: self.clock,
            last_job: self.last_job,
            last_node: self.last_node,
            last_drain: self.last_drain,
            snapshot,
            records,
        }
    }
}

/// Puts what changed into a map, and takes out what is gone.
fn put<K: Ord + Clone, V: Clone>(map: &mut Arc<BTreeMap<K, V>>, changes: &[(K, Option<V>)]) {
    for (key, value) in changes {
        let map = Arc::make_mut(map);
        match value {
            Some(value) => map.insert(key.clone(), value.clone()),
            None => map.remove(key),
        };
    }
}
