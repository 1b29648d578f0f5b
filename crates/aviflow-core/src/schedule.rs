//! Who runs where: `plan(&snapshot, &mut memo, now) -> Plan`.
//!
//! Queues are taken by what they lack of their guarantee, then by decayed use over weight; inside a
//! queue jobs go by priority, then their users' decayed use, then submission. For each job in order:
//! quota; a place now that is in the way of no promise; else the cheapest gangs that must leave for it,
//! if it has a right to any; else, for the first of each type, a promise of nodes; else it waits. At the
//! end each waiting job gets the constraint that keeps it, from the same state.
//!
//! Properties, each under test:
//! - a gang is placed whole or not at all, on nodes of one pool and accelerator type;
//! - no GPU is given twice, none that is held, promised, broken or on a node without work;
//! - limits hold at every level of the tree; guarantees come back;
//! - nobody leaves if the gang would still not fit, and no victim is superfluous;
//! - no promise is delayed by a job that started after it was made;
//! - the plan depends on nothing but its arguments, and not on the memo;
//! - a plan made on its own result decides nothing.
//!
//! Cost: O(nodes + holders + waiting · log) for a pass, and one search for each class of jobs that does
//! not fit.

mod claims;
mod constraint;
mod drains;
mod forecast;
mod grid;
mod memo;
mod order;
mod pass;
mod place;
mod preempt;
mod quota;
mod report;
mod reserve;
mod sooner;
mod turn_forecast;
mod turns;
mod victims;

pub use constraint::never_fits;
pub use forecast::estimate;
pub use memo::Memo;
pub use report::{Factors, QueueFactor, QueueUse, QuotaUse, factors, queues};
pub use sooner::{Sooner, sooner};

use crate::model::{
    Claim, Drain, Ending, EnvironmentHash, Eviction, EvictionCause, JobId, NodeId, Placement, Snapshot, TurnedOut,
};
use crate::time::Time;
use serde::{Deserialize, Serialize};

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
    /// The queue does not exist any more.
    QueueGone {
        /// The queue.
        queue: String,
    },
    /// A person holds the job.
    Held {
        /// Who.
        by: String,
    },
    /// A job that it waits for has not ended as asked.
    After {
        /// Which.
        job: JobId,
        /// Its name.
        name: String,
        /// How it must end.
        on: Ending,
        /// It has ended otherwise: this one can never start.
        impossible: bool,
    },
    /// GPUs are promised to it, and their holders are leaving.
    Claimed {
        /// Who leaves.
        victims: Vec<JobId>,
        /// By what right.
        cause: EvictionCause,
    },
    /// There is room, but it is promised from an instant on that the job would run beyond.
    Promised {
        /// To which job; none for a node's drain.
        job: Option<String>,
        /// From when on.
        start: Time,
    },
    /// There is room, but not where the job would rather be.
    #[serde(rename_all = "camelCase")]
    Preference {
        /// The level that it prefers.
        level: String,
        /// Nodes it needs.
        needs_nodes: u32,
        /// The most nodes with room that one domain of the level has.
        best: u32,
        /// Until when it waits for it.
        until: Time,
    },
    /// A limit of the queue or of one above it.
    #[serde(rename_all = "camelCase")]
    QueueLimit {
        /// The queue with the limit.
        queue: String,
        /// The accelerator type.
        gpu_type: String,
        /// The limit.
        limit: u32,
        /// GPUs in use below it.
        used: u32,
        /// GPUs the job needs.
        needs: u32,
    },
    /// It is not preemptible, and the queue's guarantee is in use by others that are not.
    #[serde(rename_all = "camelCase")]
    QueueGuarantee {
        /// The queue.
        queue: String,
        /// The accelerator type.
        gpu_type: String,
        /// The guarantee.
        guarantee: u32,
        /// GPUs of it in use by jobs that are not preemptible.
        used: u32,
        /// GPUs the job needs.
        needs: u32,
    },
    /// What is free is the guarantee of queues that do not lend.
    #[serde(rename_all = "camelCase")]
    Kept {
        /// The accelerator type.
        gpu_type: String,
        /// GPUs that nobody uses.
        free: u32,
        /// GPUs of them that are kept.
        kept: u32,
        /// GPUs the job needs.
        needs: u32,
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
        /// The node that refused the attempt, if that is how it ended.
        node: Option<String>,
        /// Why it was refused.
        refused: Option<String>,
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
        /// GPUs of these types that others use.
        foreign_gpus: u32,
        /// Nodes of these types that are there and take no new work.
        closed_nodes: u32,
        /// The level of which one domain must hold it; `nodes_with_room` is then of the best domain.
        level: Option<String>,
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
        /// Nodes that could hold a worker if they were empty, in the best domain.
        capable_nodes: u32,
        /// The level of which one domain must hold it.
        level: Option<String>,
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
    pass::run(snapshot, memo, now)
}

#[cfg(test)]
mod tests;
