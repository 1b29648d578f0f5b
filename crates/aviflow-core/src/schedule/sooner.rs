//! What would start a waiting job sooner: the plan, made again with one thing changed at a time, the most
//! harmless first. For one job, when somebody asks.

use super::memo::Memo;
use super::{Constraint, Decision, plan};
use crate::model::{JobId, NodeRange, Request, Snapshot, Topology};
use crate::time::{Span, Time};

/// A change of the request with which the job would start now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sooner {
    /// Prefer the level of the topology instead of requiring it.
    Prefer {
        /// The level.
        level: String,
    },
    /// Not wait for the level that it prefers.
    Anywhere {
        /// The level.
        level: String,
    },
    /// A time limit that ends before what is promised to others.
    TimeLimit {
        /// The longest that fits.
        limit: Span,
    },
    /// Another accelerator type, too.
    GpuType {
        /// Which.
        gpu_type: String,
    },
    /// Let the platform suspend it.
    Preemptible,
    /// Fewer nodes.
    Nodes {
        /// The most that have a place.
        nodes: u32,
    },
    /// Another queue.
    Queue {
        /// Which.
        queue: String,
    },
}

/// The most harmless change with which a waiting job would start now; none if no single one does it.
#[must_use]
pub fn sooner(snapshot: &Snapshot, job: JobId, now: Time) -> Option<Sooner> {
    let request = &snapshot.jobs.get(&job)?.request;
    let constraint = plan(snapshot, &mut Memo::default(), now).verdict(job)?.0.clone();
    candidates(snapshot, &constraint, request, now).into_iter().find_map(|change| {
        let mut other = snapshot.clone();
        let changed = &mut other.jobs.get_mut(&job)?.request;
        apply(&change, changed);
        starts(&other, job, now).then_some(change)
    })
}

fn starts(snapshot: &Snapshot, job: JobId, now: Time) -> bool {
    let decisions = plan(snapshot, &mut Memo::default(), now).decisions;
    decisions.iter().any(|d| matches!(d, Decision::Start { job: started, .. } if *started == job))
}

fn apply(change: &Sooner, request: &mut Request) {
    match change {
        Sooner::Prefer { level } => {
            request.topology = Topology { require: None, prefer: Some(level.clone()), max_wait: None };
        }
        Sooner::Anywhere { .. } => request.topology.max_wait = None,
        Sooner::TimeLimit { limit } => request.time_limit = Some(*limit),
        Sooner::GpuType { gpu_type } => request.gpu_types.push(gpu_type.clone()),
        Sooner::Preemptible => request.preemptible = true,
        Sooner::Nodes { nodes } => request.nodes = NodeRange { min: *nodes, max: *nodes },
        Sooner::Queue { queue } => request.queue.clone_from(queue),
    }
}

/// Changes that are worth a try, the most harmless first.
fn candidates(snapshot: &Snapshot, constraint: &Constraint, request: &Request, now: Time) -> Vec<Sooner> {
    let mut list = Vec::new();
    let topology = &request.topology;
    match constraint {
        // Nothing about the request keeps it.
        Constraint::Paused { .. }
        | Constraint::QueueHeld { .. }
        | Constraint::Held { .. }
        | Constraint::After { .. }
        | Constraint::Environment { .. }
        | Constraint::BackOff { .. }
        | Constraint::Claimed { .. } => return list,
        Constraint::Promised { start, .. } => list.push(Sooner::TimeLimit { limit: start.since(now) }),
        Constraint::QueueGuarantee { .. } => list.push(Sooner::Preemptible),
        Constraint::QueueGone { .. }
        | Constraint::Preference { .. }
        | Constraint::QueueLimit { .. }
        | Constraint::Kept { .. }
        | Constraint::Capacity { .. }
        | Constraint::Never { .. } => {}
    }
    list.extend(topology.require.clone().map(|level| Sooner::Prefer { level }));
    if topology.max_wait.is_some() {
        list.extend(topology.prefer.clone().map(|level| Sooner::Anywhere { level }));
    }
    if !request.gpu_types.is_empty() {
        let mut others: Vec<&String> = snapshot.nodes.values().map(|n| &n.gpu_type).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|t| !request.gpu_types.contains(t));
        list.extend(others.into_iter().map(|t| Sooner::GpuType { gpu_type: t.clone() }));
    }
    // Half as many, and so on: to the next place of that size it is as far as to any.
    let mut nodes = request.nodes.min;
    while nodes > 1 {
        nodes = nodes.div_ceil(2).min(nodes - 1);
        list.push(Sooner::Nodes { nodes });
    }
    let elsewhere = snapshot.queues.keys().filter(|q| **q != request.queue);
    list.extend(elsewhere.map(|q| Sooner::Queue { queue: q.clone() }).take(8));
    list
}
