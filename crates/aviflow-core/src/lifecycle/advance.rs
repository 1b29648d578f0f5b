//! A step in its snapshot: the job, its nodes and the ledger change together.

use super::{Action, Effect, Event, Moment, MomentKind, step};
use crate::gpus::{GpuSet, Slots};
use crate::health::Kind;
use crate::health::quarantine::{self, Outcome, Rules, Seen};
use crate::ledger::{Entry, Owner, Posting, unallocated};
use crate::model::{Job, JobId, Node, NodeCondition, NodeId, Phase, Snapshot};
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
    /// Whether what is known of faults of nodes changed.
    pub quarantines: bool,
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
            Effect::Blame(seen) => blamed(snapshot, id, &seen, job.attempts, now, &mut out),
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
            n.quarantined = n.quarantined.and(n.gpus);
            let size = n.gpus;
            out.entries.extend(snapshot.ledger.resize_node(node, size, now));
        }
    }
}

/// Notes a fault of a node or GPU, which is kept from work if it was not the first or asks for it.
fn blamed(snapshot: &mut Snapshot, job: JobId, seen: &Seen, attempt: u32, now: Time, out: &mut Advance) {
    let Some(node) = snapshot.nodes.get(&seen.node) else { return };
    // A worker may be lost with its pod or its agent, which says nothing of its node.
    if seen.kind == Kind::NodeLost && node.condition != NodeCondition::Gone {
        return;
    }
    let name = node.pool.clone();
    let pool = quarantine_pool(snapshot, &name);
    let book = snapshot.quarantines.entry(name).or_default();
    let outcome = book.note(seen, pool, &Rules::default());
    out.quarantines = true;
    let kind = match outcome {
        Outcome::Ignored | Outcome::Noted | Outcome::Already => return,
        Outcome::Quarantined { reason } => MomentKind::Quarantined { node: seen.node, gpu: seen.gpu, reason },
        Outcome::Exceeds { reason } => MomentKind::NotQuarantined { node: seen.node, reason },
    };
    out.entries.extend(set_quarantined(snapshot, seen.node, now));
    out.nodes.insert(seen.node);
    out.moments.push(Moment { job, at: now, attempt, kind });
}

/// The nodes of a pool, as far as the budget of quarantines asks.
#[must_use]
pub fn quarantine_pool(snapshot: &Snapshot, name: &str) -> quarantine::Pool {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let nodes = || snapshot.nodes.values().filter(|n| n.pool == name && !n.gpus.is_empty());
    let open = nodes().filter(|n| n.condition == NodeCondition::Ready && n.closed.is_none()).count();
    let gpus = nodes().map(|n| n.gpus.count()).max().unwrap_or_default();
    quarantine::Pool { nodes: count(nodes().count()), open: count(open), gpus }
}

/// Makes a node's book agree with what its pool's quarantine says of it.
pub fn set_quarantined(snapshot: &mut Snapshot, id: NodeId, now: Time) -> Vec<Entry> {
    let Some(node) = snapshot.nodes.get(&id) else { return Vec::new() };
    let (slots, reason) = snapshot.quarantines.get(&node.pool).map_or((Slots::NONE, None), |book| {
        let reason = book.kept().find(|(n, _)| *n == id).map(|(_, kept)| kept.reason.clone());
        (book.of(id, node.gpus), reason)
    });
    let change = |node: &mut Node| {
        node.quarantined = slots;
        node.quarantine = reason;
    };
    set_condition(snapshot, id, change, now)
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
