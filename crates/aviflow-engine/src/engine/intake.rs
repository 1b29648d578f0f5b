//! What each input does to the snapshot.

use super::{Answer, Engine, Input, Refusal, Submission, Work, default_queue};
use crate::ports::{JobRecord, Observation, Store, StoreError};
use aviflow_core::explain;
use aviflow_core::gpus::Slots;
use aviflow_core::lifecycle::{Event, Moment, MomentKind, set_condition};
use aviflow_core::model::{
    EnvironmentHash, EnvironmentState, Job, JobId, JobKey, Node, NodeCondition, NodeId, Phase, QueueState, Request,
    Snapshot,
};
use aviflow_core::schedule::never_fits;
use std::sync::Arc;

/// Why a request would not be taken, now and whatever ends.
#[must_use]
pub fn refusal(snapshot: &Snapshot, request: &Request) -> Option<Refusal> {
    let first = default_queue();
    let queue = match snapshot.queues.get(&request.queue) {
        None if snapshot.queues.is_empty() && first.name == request.queue => &first,
        None => {
            let known = snapshot.queues.keys().cloned().collect::<Vec<_>>().join(", ");
            return Some(Refusal::NoSuchQueue { queue: request.queue.clone(), known });
        }
        Some(queue) => queue,
    };
    if queue.state == QueueState::Draining {
        return Some(Refusal::QueueDraining(queue.name.clone()));
    }
    let never = never_fits(snapshot, request)?;
    explain::never(&never).map(Refusal::NeverFits)
}

fn condition(cordoned: bool, gone: bool) -> NodeCondition {
    match (gone, cordoned) {
        (true, _) => NodeCondition::Gone,
        (false, true) => NodeCondition::Cordoned,
        (false, false) => NodeCondition::Ready,
    }
}

impl<S: Store> Engine<S> {
    pub(super) fn take(&mut self, input: &Input, work: &mut Work) -> Result<Answer, StoreError> {
        work.journal.push(serde_json::to_string(input).unwrap_or_default());
        Ok(match input {
            Input::Observe(observation) => {
                self.observe(observation, work);
                Answer::Done
            }
            Input::Submit(submission) => self.submit(submission, work)?,
            Input::Cancel { job, by } => self.act(*job, &Event::Cancel { by: by.clone() }, work),
            Input::Suspend { job, by } => {
                self.act(*job, &Event::Suspend { by: by.clone(), hold: false, turned_out: None }, work)
            }
            Input::Pause { by } => {
                work.paused |= self.snapshot.paused != *by;
                self.snapshot.paused.clone_from(by);
                Answer::Done
            }
            Input::Cordon { node, cordoned } => {
                let Some(id) = self.node_named(node) else {
                    return Ok(Answer::Refused(Refusal::NoSuchNode(node.clone())));
                };
                let cordoned = *cordoned;
                self.change_node(
                    id,
                    |n| {
                        n.cordoned = cordoned;
                        n.condition = condition(n.cordoned, n.condition == NodeCondition::Gone);
                    },
                    work,
                );
                Answer::Done
            }
        })
    }

    fn act(&mut self, job: JobId, event: &Event, work: &mut Work) -> Answer {
        if !self.snapshot.jobs.contains_key(&job) {
            return Answer::Refused(Refusal::NoSuchJob);
        }
        self.advance(job, event, self.now, work);
        Answer::Done
    }

    fn submit(&mut self, submission: &Submission, work: &mut Work) -> Result<Answer, StoreError> {
        if let Some(refusal) = refusal(&self.snapshot, &submission.request) {
            return Ok(Answer::Refused(refusal));
        }
        if self.snapshot.queues.is_empty() {
            let queue = default_queue();
            work.queues.insert(queue.name.clone());
            self.snapshot.queues.insert(queue.name.clone(), queue);
        }
        let request = &submission.request;
        let key = self.free_name(&submission.namespace, &submission.spec.name, work)?;
        self.last_job += 1;
        let id = JobId(self.last_job);
        let record = Arc::new(JobRecord {
            id,
            key: key.clone(),
            user: submission.user.clone(),
            submitted: self.now,
            spec: submission.spec.clone(),
            provenance: submission.provenance.clone(),
        });
        let environment = submission.provenance.environment.as_ref().map(|e| EnvironmentHash(e.hash.clone()));
        let user = submission.user.clone();
        let job = Job::submitted(id, key, user, request.clone(), environment.clone(), self.now);
        self.records.insert(id, record.clone());
        self.snapshot.waiting.insert(id);
        self.snapshot.jobs.insert(id, job.clone());
        work.records.push(record.clone());
        work.jobs.insert(id, job);
        let kind = MomentKind::Submitted { by: submission.user.clone() };
        work.moments.push(Moment { job: id, at: self.now, attempt: 0, kind });
        if let Some(hash) = environment {
            self.want_environment(&hash, work);
        }
        Ok(Answer::Submitted(record))
    }

    /// The name, or the name with the first free suffix from 2.
    fn free_name(&mut self, namespace: &str, name: &str, work: &Work) -> Result<JobKey, StoreError> {
        let base = JobKey { namespace: namespace.to_owned(), name: name.to_owned() };
        let taken = |store: &S, key: &JobKey| -> Result<bool, StoreError> {
            Ok(work.records.iter().any(|r| r.key == *key) || store.name_taken(key)?)
        };
        let mut suffix = self.suffixes.get(&base).copied().unwrap_or(1);
        let mut key = base.clone();
        loop {
            if suffix > 1 {
                key.name = format!("{name}-{suffix}");
            }
            if !taken(&self.store, &key)? {
                break;
            }
            suffix += 1;
        }
        // The hints only save look-ups; they are not worth much memory.
        if self.suffixes.len() > 10_000 {
            self.suffixes.clear();
        }
        self.suffixes.insert(base, suffix + 1);
        Ok(key)
    }

    fn observe(&mut self, observation: &Observation, work: &mut Work) {
        match observation {
            Observation::NodeSeen { name, pool, gpu_type, gpus } => self.node_seen(name, pool, gpu_type, *gpus, work),
            Observation::NodeGone { name } => {
                if let Some(id) = self.node_named(name) {
                    self.change_node(id, |n| n.condition = NodeCondition::Gone, work);
                }
            }
            Observation::NodeHealth { name, broken } => {
                if let Some(id) = self.node_named(name) {
                    let mask = broken.iter().filter(|i| **i < 64).fold(0u64, |m, i| m | 1 << i);
                    self.change_node(id, |n| n.unhealthy = Slots(mask).and(n.gpus), work);
                }
            }
            Observation::EnvironmentReady { hash } => {
                if let Some(state) = self.snapshot.environments.get_mut(hash)
                    && *state != EnvironmentState::Ready
                {
                    *state = EnvironmentState::Ready;
                    work.environments.insert(hash.clone());
                }
            }
            Observation::EnvironmentFailed { hash, reason } => self.environment_failed(hash, reason, work),
            Observation::Worker { job, attempt, epoch, worker, ago, event } => {
                let at = self.now - *ago;
                let event = Event::Worker { attempt: *attempt, epoch: *epoch, worker: *worker, event: event.clone() };
                self.advance(*job, &event, at, work);
            }
        }
    }

    fn environment_failed(&mut self, hash: &EnvironmentHash, reason: &str, work: &mut Work) {
        if self.snapshot.environments.remove(hash).is_none() {
            return;
        }
        work.environments.insert(hash.clone());
        let wants = |j: &&Job| j.environment.as_ref() == Some(hash) && j.phase == Phase::Queued;
        let jobs: Vec<JobId> = self.snapshot.jobs.values().filter(wants).map(|j| j.id).collect();
        for job in jobs {
            self.advance(job, &Event::EnvironmentFailed { reason: reason.to_owned() }, self.now, work);
        }
    }

    fn node_named(&self, name: &str) -> Option<NodeId> {
        self.snapshot.nodes.values().find(|n| n.name == name).map(|n| n.id)
    }

    fn node_seen(&mut self, name: &str, pool: &str, gpu_type: &str, gpus: u32, work: &mut Work) {
        let slots = Slots::first(gpus);
        if let Some(id) = self.node_named(name) {
            let Some(node) = self.snapshot.nodes.get(&id) else { return };
            if node.gpus.without(node.leaving) != slots {
                self.resize_node(id, slots, work);
            }
            self.change_node(
                id,
                |n| {
                    pool.clone_into(&mut n.pool);
                    gpu_type.clone_into(&mut n.gpu_type);
                    n.condition = condition(n.cordoned, false);
                },
                work,
            );
            return;
        }
        if slots.is_empty() {
            return;
        }
        self.last_node += 1;
        let node = Node::new(NodeId(self.last_node), name, pool, gpu_type, slots);
        self.snapshot.ledger.open_node(&node, self.now);
        work.nodes.insert(node.id);
        self.snapshot.nodes.insert(node.id, node);
    }

    /// A node came back with another number of GPUs. Those that are held leave
    /// it once their job has ended.
    fn resize_node(&mut self, id: NodeId, slots: Slots, work: &mut Work) {
        let Some(node) = self.snapshot.nodes.get_mut(&id) else { return };
        node.gpus = slots.or(node.held);
        node.leaving = node.held.without(slots);
        node.unhealthy = node.unhealthy.and(node.gpus);
        let gpus = node.gpus;
        work.entries.extend(self.snapshot.ledger.resize_node(id, gpus, self.now));
        work.nodes.insert(id);
    }

    fn change_node(&mut self, id: NodeId, change: impl FnOnce(&mut Node), work: &mut Work) {
        let before = self.snapshot.nodes.get(&id).cloned();
        let entries = set_condition(&mut self.snapshot, id, change, self.now);
        if self.snapshot.nodes.get(&id) != before.as_ref() || !entries.is_empty() {
            work.nodes.insert(id);
        }
        work.entries.extend(entries);
    }
}
