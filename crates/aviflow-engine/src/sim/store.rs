//! Durable memory that can fail at any write, and that notes which transitions
//! each write held.

use super::labels;
use super::script::{Fault, FaultAt, Write};
use crate::ports::{Batch, JobRecord, Known, Loaded, Store, StoreError, ending};
use aviflow_core::ledger::Entry;
use aviflow_core::model::{Job, JobId, JobKey, Phase, Term};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// A store that all engines of a history share.
#[derive(Clone, Debug)]
pub(super) struct SimStore(Rc<RefCell<Durable>>);

#[derive(Debug, Default)]
struct Durable {
    loaded: Loaded,
    ended: BTreeMap<JobId, Job>,
    records: BTreeMap<JobId, Arc<JobRecord>>,
    /// Entries that were not yet looked at.
    fresh: Vec<Entry>,
    faults: Vec<FaultAt>,
    writes: u32,
    end: WriteEnd,
    wrong: Vec<String>,
}

/// What became of the last write.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteEnd {
    pub(super) fault: Option<Fault>,
    pub(super) transitions: Vec<String>,
}

impl SimStore {
    pub(super) fn new(faults: Vec<FaultAt>) -> SimStore {
        SimStore(Rc::new(RefCell::new(Durable { faults, ..Durable::default() })))
    }

    pub(super) fn end_of_write(&self) -> WriteEnd {
        std::mem::take(&mut self.0.borrow_mut().end)
    }

    pub(super) fn loaded(&self) -> Loaded {
        self.0.borrow().loaded.clone()
    }

    pub(super) fn ended(&self) -> BTreeMap<JobId, Job> {
        self.0.borrow().ended.clone()
    }

    pub(super) fn has(&self, job: JobId) -> bool {
        self.0.borrow().records.contains_key(&job)
    }

    /// The first live job in a phase.
    pub(super) fn first_in(&self, phase: &str) -> Option<JobId> {
        let durable = self.0.borrow();
        durable.loaded.snapshot.jobs.values().find(|j| labels::phase(&j.phase) == phase).map(|j| j.id)
    }

    /// Entries since the last call.
    pub(super) fn fresh_entries(&self) -> Vec<Entry> {
        std::mem::take(&mut self.0.borrow_mut().fresh)
    }

    /// What writes should never have held.
    pub(super) fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut self.0.borrow_mut().wrong)
    }

    /// Whether memory and durable state agree.
    pub(super) fn agrees(&self, snapshot: &aviflow_core::model::Snapshot) -> bool {
        let durable = &self.0.borrow().loaded.snapshot;
        durable.jobs == snapshot.jobs
            && durable.nodes == snapshot.nodes
            && durable.ledger == snapshot.ledger
            && durable.waiting == snapshot.waiting
            && durable.paused == snapshot.paused
            && durable.queues == snapshot.queues
            && durable.pools == snapshot.pools
            && durable.policy == snapshot.policy
            && durable.usage == snapshot.usage
            && durable.history == snapshot.history
            && durable.drains == snapshot.drains
            && durable.quarantines == snapshot.quarantines
    }
}

impl Store for SimStore {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        let mut d = self.0.borrow_mut();
        d.loaded.term = Term(d.loaded.term.0 + 1);
        Ok(d.loaded.clone())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        let mut d = self.0.borrow_mut();
        if batch.term != d.loaded.term {
            return Err(StoreError::Fenced { ours: batch.term.0, held: d.loaded.term.0, by: None });
        }
        if batch.generation != d.loaded.generation + 1 {
            let last = d.loaded.generation;
            d.wrong.push(format!("generation {} follows {last}", batch.generation));
        }
        let write = d.writes;
        d.writes += 1;
        let transitions: Vec<String> = labels::of(batch, &d.loaded.snapshot).into_iter().collect();
        let fault = d.fault(write, &transitions);
        d.end = WriteEnd { fault, transitions };
        match fault {
            Some(Fault::CrashBefore) => return Err(StoreError::Failed("the control plane died".to_owned())),
            Some(Fault::StoreFull) => return Err(StoreError::Full("simulated".to_owned())),
            Some(Fault::CrashAfter { .. }) | None => {}
        }
        d.write(batch);
        Ok(())
    }

    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
        let durable = self.0.borrow();
        Ok(durable.records.values().find(|r| r.key == *key).map(|r| durable.known(r)))
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        let durable = self.0.borrow();
        let fits = |r: &&Arc<JobRecord>| {
            r.key.namespace == namespace && r.spec.name == work && user.is_none_or(|u| r.user == u)
        };
        Ok(durable.records.values().rev().find(fits).map(|r| durable.known(r)))
    }
}

impl Durable {
    fn known(&self, record: &JobRecord) -> Known {
        let ended = self.ended.get(&record.id).and_then(|j| ending(&j.phase));
        Known { id: record.id, key: record.key.clone(), ended }
    }

    /// The fault of this write. One that is aimed at a transition strikes once.
    fn fault(&mut self, write: u32, transitions: &[String]) -> Option<Fault> {
        let index = self.faults.iter().position(|f| match &f.write {
            Write::Number(n) => *n == write,
            Write::With(transition) => transitions.contains(transition),
        })?;
        Some(self.faults.remove(index).fault)
    }

    fn write(&mut self, batch: &Batch) {
        self.loaded.generation = batch.generation;
        if batch.at < self.loaded.clock {
            self.wrong.push(format!("time went back from {:?} to {:?}", self.loaded.clock, batch.at));
        }
        self.loaded.clock = batch.at;
        let documents = !batch.pools.is_empty() || batch.policy.is_some() || batch.paused.is_some();
        // The first submission makes a queue that nobody asked for.
        let queues = !batch.queues.is_empty() && batch.records.is_empty();
        if (documents || queues) && batch.acts.is_empty() {
            self.wrong.push("a document changed, and nobody is said to have done it".to_owned());
        }
        for record in &batch.records {
            if self.records.values().any(|r| r.key == record.key) {
                self.wrong.push(format!("the name {} is given twice", record.key.name));
            }
            self.loaded.last_job = self.loaded.last_job.max(record.id.0);
            self.records.insert(record.id, record.clone());
            self.loaded.records.insert(record.id, record.clone());
        }
        for job in &batch.jobs {
            if let Some(before) = self.ended.get(&job.id) {
                self.wrong.push(format!("job {} had ended as {} and changed", job.key.name, before.phase.name()));
            }
            let snapshot = &mut self.loaded.snapshot;
            if job.phase == Phase::Queued {
                snapshot.waiting.insert(job.id);
            } else {
                snapshot.waiting.remove(&job.id);
            }
            if job.phase.is_terminal() {
                snapshot.jobs.remove(&job.id);
                self.loaded.records.remove(&job.id);
                self.ended.insert(job.id, job.clone());
            } else {
                snapshot.jobs.insert(job.id, job.clone());
            }
        }
        let snapshot = &mut self.loaded.snapshot;
        for node in &batch.nodes {
            self.loaded.last_node = self.loaded.last_node.max(node.id.0);
            snapshot.nodes.insert(node.id, node.clone());
        }
        put(&mut snapshot.queues, &batch.queues);
        put(&mut snapshot.pools, &batch.pools);
        put(&mut snapshot.usage, &batch.usage);
        put(&mut snapshot.environments, &batch.environments);
        if let Some(policy) = &batch.policy {
            snapshot.policy = policy.clone();
        }
        if let Some(history) = &batch.history {
            snapshot.history = history.clone();
        }
        if let Some(drains) = &batch.drains {
            self.loaded.last_drain = drains.iter().map(|d| d.id).fold(self.loaded.last_drain, u64::max);
            snapshot.drains.clone_from(drains);
        }
        if let Some(quarantines) = &batch.quarantines {
            snapshot.quarantines.clone_from(quarantines);
        }
        if let Some(paused) = &batch.paused {
            snapshot.paused.clone_from(paused);
        }
        for (node, open) in &batch.open {
            snapshot.ledger.restore(*node, open.clone());
        }
        self.fresh.extend(batch.entries.iter().cloned());
    }
}

fn put<K: Ord + Clone, V: Clone>(map: &mut BTreeMap<K, V>, changes: &[(K, Option<V>)]) {
    for (key, value) in changes {
        match value {
            Some(value) => map.insert(key.clone(), value.clone()),
            None => map.remove(key),
        };
    }
}
