//! When GPUs will be free, and the promises made to jobs that cannot start yet.

use super::Decision;
use super::Reservation;
use super::pass::{Ask, Pass, held_for};
use super::place::Wanted;
use crate::gpus::Slots;
use crate::model::{Job, JobId, Phase, Placement};
use crate::time::{Span, Time};

/// Nodes that are promised from an instant on: to a job, or to whoever repairs them.
#[derive(Debug)]
pub(super) struct Promise {
    pub(super) segment: usize,
    pub(super) start: Time,
    pub(super) owner: Option<Owner>,
}

/// Whose a promise is.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) job: JobId,
    queue: usize,
    gpu_type: usize,
    gpus: u32,
    /// GPUs of each branch that are held beyond the promise's beginning.
    used_then: Vec<u32>,
}

/// A preemptible job that saves itself may begin this long before its node's drain.
const WORTH_MOVING: Span = Span::minutes(60);

impl Promise {
    /// Whether a job may be in the way: whoever it is promised to could take it back at once.
    pub(super) fn yields_to(&self, pass: &Pass<'_>, ask: &Ask<'_>) -> bool {
        if !ask.class.preemptible || !pass.snapshot.policy.preemption {
            return false;
        }
        let Some(owner) = &self.owner else {
            return ask.job.request.checkpoint_every.is_some() && pass.now + WORTH_MOVING <= self.start;
        };
        let (t, tree) = (owner.gpu_type, &pass.quotas);
        if !tree.managed[t] || !tree.branches[owner.queue].reclaim {
            return false;
        }
        let (ours, theirs) = (&tree.branches[owner.queue].path, &tree.branches[ask.queue].path);
        let common = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        let Some(taker) = ours.get(common).filter(|_| common < theirs.len()) else { return false };
        let within = owner.used_then[*taker] + owner.gpus <= tree.guarantee(*taker, t);
        let above = |q: &usize| owner.used_then[*q] + ask.class.gpus() > tree.guarantee(*q, t);
        within && theirs[common..].iter().all(above)
    }
}

/// When a job that holds GPUs is expected to give them back.
pub(super) fn expected_end(pass: &Pass<'_>, job: &Job) -> Time {
    let soon = pass.now + Span::seconds(1);
    let grace = pass.now + job.request.grace;
    let by_itself = match &job.phase {
        Phase::Running(gang) => {
            let up = gang.up.unwrap_or(gang.placed);
            match job.request.time_limit {
                Some(limit) => up + Span((limit.0 - job.ran.0).max(0)),
                None => pass.now + remaining(pass, job, gang.gpu_count()),
            }
        }
        Phase::Starting(gang) => match job.request.time_limit {
            Some(limit) => pass.now + Span((limit.0 - job.ran.0).max(0)),
            None => pass.now + remaining(pass, job, gang.gpu_count()),
        },
        Phase::Suspending(_) | Phase::Stopping(_) => grace,
        Phase::Queued | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => pass.now,
    };
    let evicted = match &job.eviction {
        Some(e) => e.deadline + job.request.grace,
        None if pass.leaving.contains(&job.id) => grace,
        None => Time(i64::MAX),
    };
    by_itself.min(evicted).max(soon)
}

/// How long a job without a limit goes on, by the jobs of its size that ran as long.
fn remaining(pass: &Pass<'_>, job: &Job, gpus: u32) -> Span {
    pass.snapshot.history.left(gpus, job.ran + held_for(job, pass.now))
}

/// How long a waiting job is expected to run once it starts.
fn expected_left(pass: &Pass<'_>, id: JobId) -> Span {
    let left = pass.index.waiter(id).and_then(|w| w.left);
    let of = |job: &Job| remaining(pass, job, job.request.gpus());
    left.or_else(|| pass.snapshot.jobs.get(&id).map(of)).unwrap_or(Span::minutes(60))
}

/// For each node, when its GPUs are free: in order, `Time(i64::MAX)` for those that never are; a stride
/// of one less than the grid's.
fn ends(pass: &Pass<'_>) -> Vec<Time> {
    let (grid, never) = (pass.grid, Time(i64::MAX));
    // By node and slot.
    let bits = grid.bits;
    let mut times = vec![never; grid.ids.len() * bits];
    for (i, id) in grid.ids.iter().enumerate() {
        let all = &mut times[i * bits..(i + 1) * bits];
        let Some(node) = pass.snapshot.nodes.get(id) else { continue };
        let usable = pass.usable(node);
        for slot in usable.iter() {
            all[slot as usize] = pass.now;
        }
        // What is promised is somebody's until that one ends, which is not known.
        for slot in node.claimed.and(usable).iter() {
            all[slot as usize] = pass.now + Span::minutes(60);
        }
        // A drain that has an end: later everything is free again.
        if let Some(until) = node.drain.as_ref().filter(|d| d.covers(pass.now) && !node.cordoned).and_then(|d| d.until)
        {
            for slot in node.gpus.without(node.unhealthy).without(node.leaving).iter() {
                all[slot as usize] = until;
            }
        }
    }
    let mut note = |node: &crate::model::NodeId, held: Slots, end: Time| {
        let Some(i) = grid.index.get(node) else { return };
        for slot in held.iter() {
            let at = &mut times[i * bits + slot as usize];
            if *at != never {
                *at = (*at).max(end);
            }
        }
    };
    for id in pass.index.holders.keys() {
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let end = expected_end(pass, job);
        for worker in job.phase.gang().iter().flat_map(|g| &g.workers) {
            note(&worker.node, worker.slots, end);
        }
    }
    for decision in &pass.out.decisions {
        let (id, placement) = match decision {
            Decision::Start { job, placement } => (job, placement),
            Decision::Claim { job, claim } => (job, &claim.placement),
            Decision::Unclaim { .. }
            | Decision::Evict { .. }
            | Decision::Spare { .. }
            | Decision::Suspend { .. }
            | Decision::Window { .. }
            | Decision::Take { .. } => continue,
        };
        let left = expected_left(pass, *id);
        for (node, held) in &placement.0 {
            note(node, *held, pass.now + left);
        }
    }
    // Promised GPUs are busy until the one they are promised to has ended.
    for reservation in &pass.out.reservations {
        let left = expected_left(pass, reservation.job);
        for (node, held) in &reservation.placement.0 {
            note(node, *held, reservation.start + left);
        }
    }
    let width = grid.stride.saturating_sub(1);
    let mut out = Vec::with_capacity(grid.ids.len() * width);
    for all in times.chunks_mut(bits.max(1)) {
        all.sort_unstable();
        out.extend_from_slice(&all[..width]);
    }
    out
}

/// Promises nodes to the job, if it is among the first that wait for its type.
pub(super) fn reserve(pass: &mut Pass<'_>, ask: &Ask<'_>) {
    if ask.sharing.is_some() {
        return;
    }
    let most = pass.snapshot.policy.reservations as usize;
    let open =
        |pass: &Pass<'_>, s: usize| pass.promises.iter().filter(|p| p.segment == s && p.owner.is_some()).count() < most;
    let segments = pass.segments(ask).to_vec();
    if !segments.iter().any(|s| open(pass, *s)) {
        return;
    }
    if pass.ends.is_none() {
        pass.ends = Some(ends(pass));
    }
    let found = segments.into_iter().filter(|s| open(pass, *s)).filter_map(|s| {
        let wanted = pass.wanted(ask, s, true)?;
        earliest(pass, s, &wanted).map(|(start, placement)| (start, s, placement))
    });
    let Some((start, segment, placement)) = found.min_by_key(|(start, s, _)| (*start, *s)) else { return };
    let t = pass.grid.segments[segment].gpu_type;
    let mut used_then = vec![0; pass.quotas.branches.len()];
    for (id, holder) in pass.index.holders.iter().filter(|(_, h)| h.gpu_type == t) {
        if pass.snapshot.jobs.get(id).is_some_and(|j| expected_end(pass, j) > start) {
            for above in &pass.quotas.branches[pass.branch[holder.queue as usize]].path {
                used_then[*above] += holder.gpus;
            }
        }
    }
    let owner = Owner { job: ask.id, queue: ask.queue, gpu_type: t, gpus: ask.class.gpus(), used_then };
    let slots = kept_free(pass, &placement, start);
    promise(pass, Promise { segment, start, owner: Some(owner) }, &slots);
    pass.out.reservations.push(Reservation { job: ask.id, placement, start });
    pass.ends = None;
}

/// When a gang can start at the earliest, and where: on the nodes that are free last by then, so that
/// those that are free now can be used meanwhile.
fn earliest(pass: &Pass<'_>, segment: usize, wanted: &Wanted<'_>) -> Option<(Time, Placement)> {
    let ends = pass.ends.as_ref()?;
    let width = pass.grid.stride.saturating_sub(1);
    let gpus = wanted.gpus_per_node as usize;
    if gpus == 0 || gpus > width {
        return None;
    }
    let at = |node: usize| ends[node * width + gpus - 1];
    let s = &pass.grid.segments[segment];
    let need = wanted.nodes.0 as usize;
    let mut best: Option<(Time, usize, Vec<(Time, usize)>)> = None;
    for (i, domain) in s.domains[wanted.within.min(s.top())].iter().enumerate() {
        let mut list: Vec<(Time, usize)> =
            domain.nodes.clone().map(|n| (at(n), n)).filter(|(t, _)| *t < Time(i64::MAX)).collect();
        if list.len() < need {
            continue;
        }
        let (_, nth, _) = list.select_nth_unstable(need - 1);
        let start = nth.0;
        if best.as_ref().is_none_or(|(t, j, _)| (start, i) < (*t, *j)) {
            list.retain(|(t, _)| *t <= start);
            best = Some((start, i, list));
        }
    }
    let (start, _, mut list) = best?;
    list.sort_unstable_by_key(|(t, n)| (std::cmp::Reverse(*t), *n));
    let mut nodes: Vec<usize> = list.into_iter().take(need).map(|(_, n)| n).collect();
    nodes.sort_unstable();
    let slots = |n: usize| {
        let node = pass.snapshot.nodes.get(&pass.grid.ids[n])?;
        let free = pass.views[0].free[n];
        let rest = node.gpus.without(node.unhealthy).without(node.leaving).without(free);
        // Those that are free now last: others may use them meanwhile.
        let from_rest = rest.lowest(wanted.gpus_per_node.min(rest.count()))?;
        let more = free.lowest(wanted.gpus_per_node - from_rest.count())?;
        Some((pass.grid.ids[n], from_rest.or(more)))
    };
    Some((start, Placement(nodes.into_iter().map(slots).collect::<Option<_>>()?)))
}

/// Of the GPUs that are free now on promised nodes, those that must not be in use then.
fn kept_free(pass: &Pass<'_>, placement: &Placement, start: Time) -> Vec<(usize, Slots)> {
    let width = pass.grid.stride.saturating_sub(1);
    let ends = pass.ends.as_deref().unwrap_or_default();
    let keep = |(id, slots): &(crate::model::NodeId, Slots)| {
        let node = *pass.grid.index.get(id)?;
        let all = ends.get(node * width..(node + 1) * width).unwrap_or_default();
        let busy = all.iter().filter(|t| **t > pass.now && **t <= start).count();
        let free = pass.views[0].free[node];
        let need = slots.count().saturating_sub(u32::try_from(busy).unwrap_or(u32::MAX)).min(free.count());
        Some((node, free.lowest(need)?))
    };
    placement.0.iter().filter_map(keep).collect()
}

/// Adds a promise: who ends after its beginning does not get these GPUs.
pub(super) fn promise(pass: &mut Pass<'_>, promise: Promise, slots: &[(usize, Slots)]) {
    let at = pass.promises.partition_point(|p| p.start <= promise.start);
    let view = pass.views[at].clone();
    pass.views.insert(at + 1, view);
    for view in &mut pass.views[at + 1..] {
        for (node, slots) in slots {
            let free = view.free[*node].without(*slots);
            view.set(pass.grid, *node, free);
        }
    }
    pass.promises.insert(at, promise);
}
