//! Who runs where: `plan(&snapshot, &mut memo, now) -> Plan`.
//!
//! Jobs are taken in their order: priority, then submission. A job starts if its
//! whole gang has a place now; otherwise it gets the constraint that keeps it.
//! The same pass decides and explains, so a verdict is never of another plan.
//!
//! Properties, each under test:
//! - a gang is placed whole or not at all, on nodes of one accelerator type;
//! - no GPU is given twice, none that is held, broken or on a node without work;
//! - if a job could be placed on what the jobs before it leave free, it is;
//! - the plan depends on nothing but its arguments, and not on the memo;
//! - a plan made on its own result starts nothing.
//!
//! Cost: O(nodes + waiting · log waiting) for a pass, and for each shape that
//! does not fit one search.

use crate::gpus::Slots;
use crate::model::{
    Claim, Drain, EnvironmentHash, EnvironmentState, Eviction, Job, JobId, Node, NodeCondition, NodeId, Placement,
    QueueState, Shape, Snapshot, TurnedOut,
};
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What the next pass may reuse. It only saves work: an empty one gives the same plan.
#[derive(Debug, Default)]
pub struct Memo {
    order: Vec<(Reverse<i32>, Time, JobId)>,
}

/// What a pass decided and found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What to do, in this order.
    pub decisions: Vec<Decision>,
    /// Jobs that go on waiting, in their order.
    pub waiting: Vec<Waiting>,
    /// What they wait for; jobs of one shape share one.
    pub constraints: Vec<Constraint>,
    /// Nodes promised to jobs that cannot start yet.
    pub reservations: Vec<Reservation>,
    /// When a pass may come out differently though nothing happens.
    pub next_wake: Option<Time>,
}

/// One decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "decision")]
pub enum Decision {
    /// Start the job's next attempt.
    Start {
        /// Which.
        job: JobId,
        /// Where.
        placement: Placement,
    },
    /// Promise GPUs to the job while their holders leave; written before the first of them is evicted.
    Claim {
        /// Which.
        job: JobId,
        /// What.
        claim: Claim,
    },
    /// Take back a promise that cannot be kept.
    Unclaim {
        /// Which.
        job: JobId,
        /// Why.
        reason: String,
    },
    /// Tell a running job that it is to give its GPUs up.
    Evict {
        /// Which.
        job: JobId,
        /// Why, and until when.
        eviction: Eviction,
    },
    /// Let a job keep its GPUs after all.
    Spare {
        /// Which.
        job: JobId,
    },
    /// Suspend a job whose eviction is due.
    Suspend {
        /// Which.
        job: JobId,
        /// For whom.
        turned_out: TurnedOut,
    },
    /// The beginning or the end of a node's drain has come.
    Window {
        /// Which.
        node: NodeId,
        /// Whether it takes no work from now on; else its drain is over.
        closed: bool,
    },
    /// A rolling drain takes a node.
    Take {
        /// Which drain.
        drain: u64,
        /// Which node.
        node: NodeId,
        /// The window.
        window: Drain,
    },
}

/// A job that goes on waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Which.
    pub job: JobId,
    /// The index of its constraint in [`Plan::constraints`].
    pub constraint: usize,
}

/// Nodes and a start promised to a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reservation {
    /// The job.
    pub job: JobId,
    /// Where.
    pub placement: Placement,
    /// When.
    pub start: Time,
}

/// What keeps a job from starting. Lifting just what it names lets the job start.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "constraint")]
pub enum Constraint {
    /// All starts are paused.
    Paused {
        /// Who paused them.
        by: String,
    },
    /// The queue starts no jobs.
    QueueHeld {
        /// The queue.
        queue: String,
    },
    /// The environment is not ready yet.
    Environment {
        /// Which.
        hash: EnvironmentHash,
    },
    /// A pause after an attempt that ended early.
    BackOff {
        /// Its end.
        until: Time,
    },
    /// Too few nodes have enough free GPUs.
    #[serde(rename_all = "camelCase")]
    Capacity {
        /// Nodes it needs.
        needs_nodes: u32,
        /// GPUs it needs on each of them.
        gpus_per_node: u32,
        /// The accelerator types it may have; empty means any.
        gpu_types: Vec<String>,
        /// Nodes that have enough free GPUs now.
        nodes_with_room: u32,
        /// Free GPUs on all nodes of these types.
        free_gpus: u32,
        /// The most free GPUs on one of them.
        most_free_on_a_node: u32,
    },
    /// The pool cannot hold it, whatever ends: it had shrunk since the submission.
    #[serde(rename_all = "camelCase")]
    Never {
        /// Nodes it needs.
        needs_nodes: u32,
        /// GPUs it needs on each of them.
        gpus_per_node: u32,
        /// The accelerator types it may have; empty means any.
        gpu_types: Vec<String>,
        /// Nodes that could hold a worker if they were empty.
        capable_nodes: u32,
    },
}

impl Plan {
    /// The constraint of a waiting job and its place in the order, from 1.
    #[must_use]
    pub fn verdict(&self, job: JobId) -> Option<(&Constraint, u32)> {
        let index = self.waiting.iter().position(|w| w.job == job)?;
        let place = u32::try_from(index + 1).unwrap_or(u32::MAX);
        Some((&self.constraints[self.waiting[index].constraint], place))
    }
}

/// Decides. Pure and deterministic.
#[must_use]
pub fn plan(snapshot: &Snapshot, memo: &mut Memo, now: Time) -> Plan {
    let mut pass = Pass::new(snapshot);
    memo.order.clear();
    memo.order.extend(snapshot.waiting.iter().filter_map(|id| {
        let job = snapshot.jobs.get(id)?;
        Some((Reverse(job.request.priority), job.submitted, *id))
    }));
    memo.order.sort_unstable();
    for (_, _, id) in &memo.order {
        let Some(job) = snapshot.jobs.get(id) else { continue };
        pass.visit(snapshot, job, now);
    }
    pass.explain_blocked(snapshot);
    pass.out
}

/// Whether the pool, empty, could hold the shape; `None` if it could, else the constraint that says why not.
#[must_use]
pub fn never_fits(snapshot: &Snapshot, shape: &Shape) -> Option<Constraint> {
    let usable = |n: &&Node| n.condition != NodeCondition::Gone;
    let capable = |gpu_type: &str| {
        let fits = |n: &&Node| n.gpu_type == gpu_type && n.gpus.without(n.unhealthy).count() >= shape.gpus_per_node;
        snapshot.nodes.values().filter(usable).filter(fits).count()
    };
    let types: BTreeSet<&str> = snapshot
        .nodes
        .values()
        .map(|n| n.gpu_type.as_str())
        .filter(|t| shape.gpu_types.is_empty() || shape.gpu_types.iter().any(|want| want == t))
        .collect();
    let most = types.into_iter().map(capable).max().unwrap_or(0);
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    (most < shape.nodes.min).then(|| Constraint::Never {
        needs_nodes: shape.nodes.min,
        gpus_per_node: shape.gpus_per_node,
        gpu_types: shape.gpu_types.clone(),
        capable_nodes: most,
    })
}

/// Nodes of one type by their number of free GPUs, so that the best fit is found without a search.
type Buckets = Vec<BTreeSet<NodeId>>;

struct Pass {
    free: BTreeMap<NodeId, Slots>,
    types: BTreeMap<String, Buckets>,
    /// Shapes that did not fit in this pass: since a pass only takes GPUs away, they still do not.
    blocked: BTreeMap<Shape, usize>,
    known: BTreeMap<Constraint, usize>,
    out: Plan,
}

impl Pass {
    fn new(snapshot: &Snapshot) -> Pass {
        let mut free = BTreeMap::new();
        let mut types: BTreeMap<String, Buckets> = BTreeMap::new();
        for node in snapshot.nodes.values() {
            let slots = node.free();
            free.insert(node.id, slots);
            if !types.contains_key(&node.gpu_type) {
                types.insert(node.gpu_type.clone(), Buckets::new());
            }
            if let Some(buckets) = types.get_mut(&node.gpu_type) {
                put(buckets, slots.count(), node.id);
            }
        }
        Pass { free, types, blocked: BTreeMap::new(), known: BTreeMap::new(), out: Plan::default() }
    }

    fn visit(&mut self, snapshot: &Snapshot, job: &Job, now: Time) {
        if let Some(constraint) = self.gate(snapshot, job, now) {
            let index = self.constraint(constraint);
            self.out.waiting.push(Waiting { job: job.id, constraint: index });
            return;
        }
        let shape = job.request.shape();
        if let Some(index) = self.blocked.get(&shape) {
            self.out.waiting.push(Waiting { job: job.id, constraint: *index });
            return;
        }
        if let Some(placement) = self.place(&shape) {
            self.take(&placement, snapshot);
            self.out.decisions.push(Decision::Start { job: job.id, placement });
            return;
        }
        let index = self.out.constraints.len();
        self.out.constraints.push(self.capacity(&shape));
        self.blocked.insert(shape, index);
        self.out.waiting.push(Waiting { job: job.id, constraint: index });
    }

    /// Jobs further back may have taken GPUs since a shape was found not to fit:
    /// its numbers are those at the end of the pass.
    fn explain_blocked(&mut self, snapshot: &Snapshot) {
        for (shape, index) in std::mem::take(&mut self.blocked) {
            self.out.constraints[index] = never_fits(snapshot, &shape).unwrap_or_else(|| self.capacity(&shape));
        }
    }

    /// What keeps the job whatever is free.
    fn gate(&mut self, snapshot: &Snapshot, job: &Job, now: Time) -> Option<Constraint> {
        if let Some(by) = &snapshot.paused {
            return Some(Constraint::Paused { by: by.clone() });
        }
        if snapshot.queues.get(&job.request.queue).is_some_and(|q| q.state == QueueState::Held) {
            return Some(Constraint::QueueHeld { queue: job.request.queue.clone() });
        }
        if let Some(hash) = &job.environment
            && snapshot.environments.get(hash) != Some(&EnvironmentState::Ready)
        {
            return Some(Constraint::Environment { hash: hash.clone() });
        }
        let until = job.not_before.filter(|t| *t > now)?;
        self.out.next_wake = Some(self.out.next_wake.map_or(until, |w| w.min(until)));
        Some(Constraint::BackOff { until })
    }

    fn constraint(&mut self, constraint: Constraint) -> usize {
        if let Some(index) = self.known.get(&constraint) {
            return *index;
        }
        let index = self.out.constraints.len();
        self.out.constraints.push(constraint.clone());
        self.known.insert(constraint, index);
        index
    }

    /// The accelerator types to try, in order.
    fn candidates<'a>(&'a self, shape: &'a Shape) -> Vec<&'a Buckets> {
        if shape.gpu_types.is_empty() {
            self.types.values().collect()
        } else {
            shape.gpu_types.iter().filter_map(|t| self.types.get(t)).collect()
        }
    }

    /// The fullest nodes that still have room, so that whole nodes stay whole; among equals the first.
    fn place(&self, shape: &Shape) -> Option<Placement> {
        for buckets in self.candidates(shape) {
            let fitting = buckets.iter().skip(shape.gpus_per_node as usize).flatten();
            let nodes: Vec<NodeId> = fitting.copied().take(shape.nodes.max as usize).collect();
            if nodes.len() < shape.nodes.min as usize {
                continue;
            }
            let mut nodes = nodes;
            nodes.sort_unstable();
            let places = nodes.iter().filter_map(|n| Some((*n, self.free.get(n)?.lowest(shape.gpus_per_node)?)));
            return Some(Placement(places.collect()));
        }
        None
    }

    fn take(&mut self, placement: &Placement, snapshot: &Snapshot) {
        for (id, slots) in &placement.0 {
            let (Some(free), Some(node)) = (self.free.get_mut(id), snapshot.nodes.get(id)) else { continue };
            let before = free.count();
            *free = free.without(*slots);
            if let Some(buckets) = self.types.get_mut(&node.gpu_type) {
                if let Some(bucket) = buckets.get_mut(before as usize) {
                    bucket.remove(id);
                }
                put(buckets, free.count(), *id);
            }
        }
    }

    fn capacity(&self, shape: &Shape) -> Constraint {
        let mut best = (0, 0, 0);
        for buckets in self.candidates(shape) {
            let count = |b: &BTreeSet<NodeId>| u32::try_from(b.len()).unwrap_or(u32::MAX);
            let room: u32 = buckets.iter().skip(shape.gpus_per_node as usize).map(count).sum();
            let free: u32 = (0u32..).zip(buckets).map(|(n, b)| n * count(b)).sum();
            let most = (0u32..).zip(buckets).filter(|(_, b)| !b.is_empty()).map(|(n, _)| n).last().unwrap_or(0);
            // The type that comes nearest is the one to name.
            best = best.max((room, free, most));
        }
        Constraint::Capacity {
            needs_nodes: shape.nodes.min,
            gpus_per_node: shape.gpus_per_node,
            gpu_types: shape.gpu_types.clone(),
            nodes_with_room: best.0,
            free_gpus: best.1,
            most_free_on_a_node: best.2,
        }
    }
}

fn put(buckets: &mut Buckets, free: u32, node: NodeId) {
    let index = free as usize;
    if buckets.len() <= index {
        buckets.resize_with(index + 1, BTreeSet::new);
    }
    buckets[index].insert(node);
}

#[cfg(test)]
mod tests;
