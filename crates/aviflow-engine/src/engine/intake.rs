//! What each input does to the snapshot: to whom it goes, and what the cluster saw.

use super::{Answer, Engine, Input, Work};
use crate::ports::{ActKind, Observation, Store, StoreError};
use aviflow_core::gpus::Slots;
use aviflow_core::lifecycle::{Event, set_condition};
use aviflow_core::model::{EnvironmentHash, EnvironmentState, Job, JobId, Node, NodeCondition, NodeId, Phase};
use aviflow_core::time::Time;

/// The condition of a node, which follows from four facts and is derived nowhere else.
fn condition(gone: bool, node: &Node, now: Time) -> NodeCondition {
    if gone {
        NodeCondition::Gone
    } else if node.shut() || node.drained(now) {
        NodeCondition::Cordoned
    } else {
        NodeCondition::Ready
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
            Input::Cancel { job, by } => self.cancel(*job, by, work),
            Input::Suspend { job, by, reason } => self.suspend(*job, (by, reason.as_ref()), work),
            Input::Hold { job, by, reason } => self.hold(*job, (by, reason.as_ref()), work),
            Input::Release { job, by, reason } => self.release(*job, (by, reason.as_ref()), work),
            Input::Update { job, change, by, reason } => self.update(*job, change, (by, reason.as_ref()), work),
            Input::ApplyQueue { queue, by, reason } => self.apply_queue(queue, (by, reason.as_ref()), work),
            Input::DeleteQueue { name, jobs, by, reason } => self.delete_queue(name, jobs, (by, reason.as_ref()), work),
            Input::ApplyPool { pool, by, reason } => self.apply_pool(pool, (by, reason.as_ref()), work),
            Input::DeletePool { name, by, reason } => self.delete_pool(name, (by, reason.as_ref()), work),
            Input::SetPolicy { policy, by, reason } => self.set_policy(policy, (by, reason.as_ref()), work),
            Input::Pause { on, by, reason } => self.pause(*on, (by, reason.as_ref()), work),
            Input::Cordon { node, cordoned, by, reason } => self.cordon(node, *cordoned, (by, reason.as_ref()), work),
            Input::Passed { node, by, reason } => self.passed(node, (by, reason.as_ref()), work),
            Input::Drain(order) => self.drain(order, work),
            Input::CancelDrain { drain, by, reason } => self.cancel_drain(drain, (by, reason.as_ref()), work),
        })
    }

    fn pause(&mut self, on: bool, whose: (&str, Option<&String>), work: &mut Work) -> Answer {
        if self.snapshot.paused.is_some() != on {
            self.snapshot.paused = on.then(|| whose.0.to_owned());
            work.paused = true;
            let what = if on { "paused all starts" } else { "let starts go on" };
            self.act(ActKind::Starts, "", what.to_owned(), whose, work);
        }
        Answer::Done
    }

    fn observe(&mut self, observation: &Observation, work: &mut Work) {
        match observation {
            Observation::NodeSeen { name, pool, gpu_type, gpus, path } => {
                self.node_seen(name, (pool, gpu_type, path), *gpus, work);
            }
            Observation::NodeGone { name } => {
                if let Some(id) = self.node_named(name) {
                    self.change_node_to(id, true, |_| {}, work);
                }
            }
            Observation::NodeHealth { name, broken } => {
                if let Some(id) = self.node_named(name) {
                    let mask = broken.iter().filter(|i| **i < 64).fold(0u64, |m, i| m | 1 << i);
                    self.change_node(id, |n| n.unhealthy = Slots(mask).and(n.gpus), work);
                }
            }
            Observation::NodeForeign { name, gpus } => {
                if let Some(id) = self.node_named(name) {
                    let gpus = *gpus;
                    #[cfg(test)]
                    let gpus = self.planted.others(self.snapshot.nodes.get(&id).map_or(0, |n| n.others), gpus);
                    self.change_node(id, |n| n.others = gpus, work);
                }
            }
            Observation::NodeClosed { name, reason, vacate } => {
                if let Some(id) = self.node_named(name) {
                    let (now, vacate) = (self.now, *vacate && reason.is_some());
                    let change = |n: &mut Node| {
                        n.closed.clone_from(reason);
                        n.vacate = n.vacate.or(Some(now)).filter(|_| vacate);
                    };
                    self.change_node(id, change, work);
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
            Observation::Found { job, attempt, epoch, news } => {
                let event = Event::Found { attempt: *attempt, epoch: *epoch, news: news.clone() };
                self.advance(*job, &event, self.now, work);
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

    pub(super) fn node_named(&self, name: &str) -> Option<NodeId> {
        self.snapshot.nodes.values().find(|n| n.name == name).map(|n| n.id)
    }

    fn node_seen(&mut self, name: &str, kind: (&str, &str, &[String]), gpus: u32, work: &mut Work) {
        let (pool, gpu_type, reported) = kind;
        let slots = Slots::first(gpus);
        let path = self.snapshot.pools.get(pool).map(|p| p.path(name, reported)).unwrap_or_default();
        if let Some(id) = self.node_named(name) {
            let Some(node) = self.snapshot.nodes.get(&id) else { return };
            if node.gpus.without(node.leaving) != slots {
                self.resize_node(id, slots, work);
            }
            self.change_node_to(
                id,
                false,
                |n| {
                    pool.clone_into(&mut n.pool);
                    gpu_type.clone_into(&mut n.gpu_type);
                    n.path = path;
                    reported.clone_into(&mut n.reported);
                },
                work,
            );
            return;
        }
        if slots.is_empty() {
            return;
        }
        self.last_node += 1;
        let node = Node {
            path,
            reported: reported.to_vec(),
            ..Node::new(NodeId(self.last_node), name, pool, gpu_type, slots)
        };
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
        node.settle();
        let gpus = node.gpus;
        work.entries.extend(self.snapshot.ledger.resize_node(id, gpus, self.now));
        work.nodes.insert(id);
    }

    /// Changes a node, and its condition accordingly.
    pub(super) fn change_node(&mut self, id: NodeId, change: impl FnOnce(&mut Node), work: &mut Work) {
        let gone = self.snapshot.nodes.get(&id).is_some_and(|n| n.condition == NodeCondition::Gone);
        self.change_node_to(id, gone, change, work);
    }

    fn change_node_to(&mut self, id: NodeId, gone: bool, change: impl FnOnce(&mut Node), work: &mut Work) {
        let before = self.snapshot.nodes.get(&id).cloned();
        let now = self.now;
        let both = |n: &mut Node| {
            change(n);
            n.condition = condition(gone, n, now);
        };
        let entries = set_condition(&mut self.snapshot, id, both, now);
        if self.snapshot.nodes.get(&id) != before.as_ref() || !entries.is_empty() {
            work.nodes.insert(id);
        }
        work.entries.extend(entries);
    }
}
