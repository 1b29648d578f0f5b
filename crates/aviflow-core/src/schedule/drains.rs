//! Maintenance: windows begin and end, jobs move out of their way, rolling drains take nodes.

use super::pass::Pass;
use super::reserve::{Promise, expected_end, promise};
use super::{Decision, claims, preempt};
use crate::gpus::Slots;
use crate::model::{Drain, EvictionCause, NodeCondition, NodeId, RollingDrain};
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// Windows that begin or end now.
pub(super) fn windows(pass: &mut Pass<'_>) {
    for node in pass.snapshot.nodes.values() {
        let Some(drain) = &node.drain else { continue };
        if drain.over(pass.now) {
            pass.out.decisions.push(Decision::Window { node: node.id, closed: false });
            continue;
        }
        pass.wake(drain.from);
        if let Some(until) = drain.until {
            pass.wake(until);
        }
        if drain.covers(pass.now) && node.condition == NodeCondition::Ready {
            pass.out.decisions.push(Decision::Window { node: node.id, closed: true });
        }
    }
}

/// Windows that are to come: nothing that ends later may start there.
pub(super) fn coming(pass: &mut Pass<'_>) {
    let mut coming: BTreeMap<(Time, usize), Vec<(usize, Slots)>> = BTreeMap::new();
    for node in pass.snapshot.nodes.values() {
        let Some(drain) = node.drain.as_ref().filter(|d| d.from > pass.now && !d.over(pass.now)) else { continue };
        if let Some(i) = pass.grid.index.get(&node.id) {
            coming.entry((drain.from, pass.grid.segment_of[*i])).or_default().push((*i, node.gpus));
        }
    }
    for ((start, segment), slots) in coming {
        promise(pass, Promise { segment, start, owner: None, slots });
    }
}

/// Tells jobs to leave nodes that are to be empty, late enough that they lose nothing by it.
pub(super) fn move_away(pass: &mut Pass<'_>) {
    let snapshot = pass.snapshot;
    let patience = snapshot.policy.patience;
    let from: BTreeMap<NodeId, Time> =
        snapshot.nodes.values().filter_map(|n| Some((n.id, pass.drained_from(n)?))).collect();
    if from.is_empty() || !snapshot.policy.preemption {
        return;
    }
    for (id, holder) in &pass.index.holders {
        if !holder.preemptible || pass.leaving.contains_key(id) {
            continue;
        }
        let Some(job) = snapshot.jobs.get(id) else { continue };
        let Some(gang) = job.phase.gang() else { continue };
        let Some(from) = gang.nodes().filter_map(|n| from.get(&n)).min().copied() else { continue };
        let begin = from - patience;
        if begin > pass.now {
            pass.wake(begin);
        } else if job.request.time_limit.is_none() || expected_end(pass, job) > from.max(pass.now) {
            let deadline = if from > pass.now { from - job.request.grace } else { pass.now + patience };
            claims::evict_by(pass, job, EvictionCause::Drain, None, deadline.max(pass.now));
        }
    }
}

/// Lets rolling drains take the next nodes: empty ones at once, others only if the time for waiting is over.
pub(super) fn roll(pass: &mut Pass<'_>) {
    let snapshot = pass.snapshot;
    for drain in &snapshot.drains {
        let away = drain.taken.iter().filter(|n| is_away(pass, **n)).count();
        let away = u32::try_from(away).unwrap_or(u32::MAX);
        let mut room = drain.max_unavailable.saturating_sub(away);
        let mut left: Vec<(u64, NodeId)> = drain.nodes.iter().filter_map(|n| Some((price(pass, *n)?, *n))).collect();
        left.sort_unstable();
        let mut remaining = u32::try_from(left.len()).unwrap_or(u32::MAX);
        for (price, node) in left {
            if room == 0 {
                break;
            }
            if price > 0 && !must_begin(pass, drain, remaining) {
                break;
            }
            room -= 1;
            remaining -= 1;
            take(pass, drain, node);
        }
    }
}

fn is_away(pass: &Pass<'_>, node: NodeId) -> bool {
    pass.snapshot.nodes.get(&node).is_some_and(|n| n.drain.as_ref().is_some_and(|d| !d.over(pass.now)))
}

/// What it costs to empty a node now, in GPU-milliseconds; none for a node that is not there.
fn price(pass: &Pass<'_>, id: NodeId) -> Option<u64> {
    let node = pass.snapshot.nodes.get(&id)?;
    if node.held.is_empty() {
        return Some(0);
    }
    let on = |(job, _): &(&crate::model::JobId, &super::memo::Holder)| {
        let gang = pass.snapshot.jobs.get(job).and_then(|j| j.phase.gang());
        gang.is_some_and(|g| g.nodes().any(|n| n == id))
    };
    let holders = pass.index.holders.iter().filter(on);
    Some(
        holders.filter_map(|(job, _)| pass.snapshot.jobs.get(job)).map(|j| preempt::price(pass, j)).sum::<u64>().max(1),
    )
}

/// Whether the nodes that are left can only be done in time if the next is taken now.
fn must_begin(pass: &mut Pass<'_>, drain: &RollingDrain, remaining: u32) -> bool {
    let Some(by) = drain.by else { return false };
    let rounds = i64::from(remaining.div_ceil(drain.max_unavailable.max(1)));
    let each = drain.each.unwrap_or(Span::minutes(60)) + pass.snapshot.policy.patience;
    let latest = by - Span(rounds.saturating_mul(each.0));
    pass.wake(latest);
    latest <= pass.now
}

fn take(pass: &mut Pass<'_>, drain: &RollingDrain, node: NodeId) {
    let now = pass.now;
    let window = Drain {
        from: now,
        until: drain.each.map(|d| now + d),
        by: drain.ordered_by.clone(),
        reason: drain.reason.clone(),
    };
    pass.out.decisions.push(Decision::Take { drain: drain.id, node, window: window.clone() });
    // What the taking brings about is decided in the same pass, so that the next finds nothing to do.
    pass.out.decisions.push(Decision::Window { node, closed: true });
    if let Some(until) = window.until {
        pass.wake(until);
    }
    pass.taken.insert(node, window.until);
    if let Some(i) = pass.grid.index.get(&node) {
        for view in &mut pass.views {
            view.set(pass.grid, *i, Slots::NONE);
        }
    }
}
