//! A step in its snapshot: the job, its nodes and the ledger change together.

use super::{Action, Effect, Event, Moment, step};
use crate::gpus::GpuSet;
use crate::ledger::{Entry, Owner, Posting, unallocated};
use crate::model::{Job, JobId, Node, NodeId, Phase, Snapshot};
use crate::time::Time;
use std::collections::BTreeSet;

/// What a step changed beside the job itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advance {
    /// The job after the step, where it changed.
    pub job: Option<Job>,
    /// Nodes whose books changed.
    pub nodes: BTreeSet<NodeId>,
    /// Ledger intervals that were closed.
    pub entries: Vec<Entry>,
    /// For the job's timeline.
    pub moments: Vec<Moment>,
    /// For the cluster.
    pub actions: Vec<Action>,
    /// Queues and users whose decayed use changed.
    pub usage: BTreeSet<(String, String)>,
    /// Whether what is remembered of ended jobs changed.
    pub history: bool,
}

/// Applies an event to a job of the snapshot. A job that ends leaves the
/// snapshot; its last form is in the result. An unknown job changes nothing.
pub fn advance(snapshot: &mut Snapshot, id: JobId, event: &Event, at: Time, now: Time) -> Advance {
    let mut out = Advance::default();
    let Some(before) = snapshot.jobs.remove(&id) else { return out };
    let (job, effects) = step(before.clone(), event, at.min(now), now);
    for effect in effects {
        match effect {
            Effect::Act(action) => out.actions.push(action),
            Effect::Hold(gpus) => {
                for (node, slots) in gpus.iter() {
                    if let Some(n) = snapshot.nodes.get_mut(&node) {
                        n.held = n.held.or(slots);
                        out.nodes.insert(node);
                    }
                }
            }
            Effect::Claim(gpus) => promise(snapshot, &gpus, true, now, &mut out),
            Effect::Unclaim(gpus) => promise(snapshot, &gpus, false, now, &mut out),
            Effect::Release { gpus, at } => release(snapshot, &gpus, at, now, &mut out),
            Effect::Post { gpus, state, at, attempt } => {
                let owner = Some(Owner { job: id, attempt });
                out.nodes.extend(gpus.iter().map(|(n, _)| n));
                out.entries.extend(snapshot.ledger.post(&Posting { gpus, state, owner, at }));
            }
            Effect::Moment(kind) => {
                out.moments.push(Moment { job: id, at: at.min(now), attempt: job.attempts, kind });
            }
        }
    }
    if let Some(gang) = job.phase.gang().filter(|_| job.request.queue != before.request.queue) {
        // Up to here its time belongs to the queue before.
        out.nodes.extend(gang.nodes());
        out.entries.extend(snapshot.ledger.cut(&gang.gpus(), now));
    }
    charge(snapshot, &before, &job, now, &mut out);
    if job.phase == Phase::Succeeded {
        let gpus = before.phase.gang().map_or(0, |g| g.gpu_count());
        snapshot.history.ran(gpus, job.ran, job.request.time_limit);
        out.history = true;
    }
    if let Some(estimate) = job.estimate.filter(|_| before.attempts == 0 && job.attempts == 1) {
        snapshot.history.calibration.learn(&estimate, now);
        out.history = true;
    }
    if job.phase == Phase::Queued {
        snapshot.waiting.insert(id);
    } else {
        snapshot.waiting.remove(&id);
    }
    if !job.phase.is_terminal() {
        snapshot.jobs.insert(id, job.clone());
    }
    if job != before {
        out.job = Some(job);
    }
    out
}

/// Charges the decayed use of queue and user with the GPUs that the job holds from now on.
fn charge(snapshot: &mut Snapshot, before: &Job, after: &Job, now: Time, out: &mut Advance) {
    let holds = |job: &Job| {
        let gpus = job.phase.gang().map_or(0, |g| g.gpu_count());
        ((job.request.queue.clone(), job.user.clone()), gpus)
    };
    let (old, new) = (holds(before), holds(after));
    if old == new {
        return;
    }
    let half_life = snapshot.policy.half_life;
    for (key, gpus, more) in [(old.0, old.1, false), (new.0, new.1, true)] {
        if gpus == 0 {
            continue;
        }
        let usage = snapshot.usage.entry(key.clone()).or_default();
        let gpus = if more { usage.gpus.saturating_add(gpus) } else { usage.gpus.saturating_sub(gpus) };
        *usage = usage.hold(gpus, now, half_life);
        out.usage.insert(key);
    }
}

/// Notes which GPUs are promised, and books those that nobody holds accordingly.
fn promise(snapshot: &mut Snapshot, gpus: &GpuSet, on: bool, now: Time, out: &mut Advance) {
    for (node, slots) in gpus.iter() {
        let change = |n: &mut Node| n.claimed = if on { n.claimed.or(slots) } else { n.claimed.without(slots) };
        out.entries.extend(set_condition(snapshot, node, change, now));
        out.nodes.insert(node);
    }
}

fn release(snapshot: &mut Snapshot, gpus: &GpuSet, at: Time, now: Time, out: &mut Advance) {
    for (node, slots) in gpus.iter() {
        let Some(n) = snapshot.nodes.get_mut(&node) else { continue };
        n.held = n.held.without(slots);
        // What others use beyond what there was becomes theirs at once.
        n.settle();
        out.nodes.insert(node);
        for (loose, state) in unallocated(n) {
            // What was loose before may be another's now, too: from when that is known.
            for (slots, at) in [(loose.and(slots), at), (loose.without(slots), now)] {
                let gpus = GpuSet::of(node, slots);
                out.entries.extend(snapshot.ledger.post(&Posting { gpus, state, owner: None, at }));
            }
        }
        let leaving = n.leaving.without(n.held);
        if !leaving.is_empty() {
            n.leaving = n.leaving.without(leaving);
            n.gpus = n.gpus.without(leaving);
            n.unhealthy = n.unhealthy.and(n.gpus);
            let size = n.gpus;
            out.entries.extend(snapshot.ledger.resize_node(node, size, now));
        }
    }
}

/// Changes a node, and with it what counts as used by others; books its unallocated GPUs accordingly.
pub fn set_condition(snapshot: &mut Snapshot, id: NodeId, change: impl FnOnce(&mut Node), now: Time) -> Vec<Entry> {
    let Some(node) = snapshot.nodes.get_mut(&id) else { return Vec::new() };
    change(node);
    node.settle();
    let states = unallocated(node);
    let mut entries = Vec::new();
    for (slots, state) in states {
        let gpus = GpuSet::of(id, slots);
        entries.extend(snapshot.ledger.post(&Posting { gpus, state, owner: None, at: now }));
    }
    entries
}
