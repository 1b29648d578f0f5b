//! When GPUs will be free, and the promises made to jobs that cannot start yet.

use super::Decision;
use super::Reservation;
use super::memo::Holder;
use super::pass::{Ask, Pass, held_for};
use super::place::Wanted;
use super::quota::{Borrowed, Held};
use crate::gpus::Slots;
use crate::model::{Claim, Job, JobId, NodeCondition, Phase, Placement};
use crate::time::{Span, Time};

/// Nodes that are promised from an instant on: to a job, or to whoever repairs them.
#[derive(Debug)]
pub(super) struct Promise {
    pub(super) segment: usize,
    pub(super) start: Time,
    pub(super) owner: Option<Owner>,
    /// Of the GPUs that are free now, those that are kept for it, by node.
    pub(super) slots: Vec<(usize, Slots)>,
}

/// Whose a promise is.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) job: JobId,
    pub(super) queue: usize,
    pub(super) gpu_type: usize,
    pub(super) gpus: u32,
    /// GPUs of each branch that are held beyond the promise's beginning.
    used_then: Vec<u32>,
    /// Who borrows then.
    then: Borrowed,
}

/// A preemptible job that saves itself may begin this long before its node's drain.
const WORTH_MOVING: Span = Span::minutes(60);

/// Whether a job may begin on a node whose drain begins before its end: it is moved then, and loses little.
pub(super) fn worth_moving(pass: &Pass<'_>, ask: &Ask<'_>, drain: Time) -> bool {
    worth_moving_at(pass, ask, pass.now, drain)
}

fn worth_moving_at(pass: &Pass<'_>, ask: &Ask<'_>, start: Time, drain: Time) -> bool {
    let may_move = ask.class.preemptible && pass.snapshot.policy.preemption;
    may_move && ask.job.request.checkpoint_every.is_some() && start + WORTH_MOVING <= drain
}

impl Promise {
    /// Whether a job may be in the way: whoever it is promised to could take it back at once.
    pub(super) fn yields_to(&self, pass: &Pass<'_>, ask: &Ask<'_>) -> bool {
        let Some(owner) = &self.owner else { return worth_moving(pass, ask, self.start) };
        if !ask.class.preemptible || !pass.snapshot.policy.preemption {
            return false;
        }
        let (t, tree) = (owner.gpu_type, &pass.quotas);
        if !tree.managed[t] || !tree.branches[owner.queue].reclaim {
            return false;
        }
        let Some((taker, level)) = tree.part(owner.queue, ask.queue) else { return false };
        let lender = tree.branches[ask.queue].path[level];
        owner.used_then[taker] + owner.gpus <= tree.guarantee(taker, t)
            && owner.then.filled(lender, t) + ask.class.gpus() > tree.guarantee(lender, t)
    }
}

/// When a job that holds GPUs is expected to give them back.
pub(super) fn expected_end(pass: &Pass<'_>, job: &Job) -> Time {
    if let Some(back) = pass.leaving.get(&job.id) {
        return (*back).max(pass.now + Span::seconds(1));
    }
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
        Phase::Suspending(_) | Phase::Stopping(_) => pass.now + job.request.grace,
        Phase::Queued | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => pass.now,
    };
    by_itself.max(pass.now + Span::seconds(1))
}

/// How long a job without a limit goes on, by the jobs of its size that ran as long.
fn remaining(pass: &Pass<'_>, job: &Job, gpus: u32) -> Span {
    pass.snapshot.history.left(gpus, job.ran + held_for(job, pass.now))
}

/// How long a waiting job is expected to run once it starts on so many GPUs.
fn expected_left(pass: &Pass<'_>, id: JobId, gpus: u32) -> Span {
    let left = pass.index.waiter(id).and_then(|w| w.left);
    let of = |job: &Job| remaining(pass, job, gpus);
    left.or_else(|| pass.snapshot.jobs.get(&id).map(of)).unwrap_or(Span::minutes(60)).max(Span::seconds(1))
}

/// A gang that is not among the holders yet: whose, where, and when it is expected to end.
struct Coming<'p> {
    job: JobId,
    placement: &'p Placement,
    end: Time,
}

/// What this pass has started and all claims, but not what it has promised.
fn coming<'p>(pass: &'p Pass<'_>) -> Vec<Coming<'p>> {
    let claim = |id: JobId, claim: &'p Claim| {
        let victims = claim.victims.iter().filter_map(|(v, attempt)| {
            let victim = pass.snapshot.jobs.get(v).filter(|j| j.attempts == *attempt && j.phase.gang().is_some())?;
            Some(expected_end(pass, victim))
        });
        let start = victims.max().unwrap_or(pass.now);
        Coming {
            job: id,
            placement: &claim.placement,
            end: start + expected_left(pass, id, claim.placement.gpus().count()),
        }
    };
    let mut found = Vec::new();
    for id in &pass.index.claimers {
        if let Some(kept) = pass.snapshot.jobs.get(id).and_then(|j| j.claim.as_ref())
            && !pass.started.contains_key(id)
            && !pass.dropped.contains(id)
        {
            found.push(claim(*id, kept));
        }
    }
    for decision in &pass.out.decisions {
        match decision {
            Decision::Start { job, placement } => {
                let left = expected_left(pass, *job, placement.gpus().count());
                found.push(Coming { job: *job, placement, end: pass.now + left });
            }
            Decision::Claim { job, claim: new } => found.push(claim(*job, new)),
            Decision::Unclaim { .. }
            | Decision::Evict { .. }
            | Decision::Spare { .. }
            | Decision::Suspend { .. }
            | Decision::Window { .. }
            | Decision::Take { .. } => {}
        }
    }
    found
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
        for slot in pass.usable(node).iter() {
            all[slot as usize] = pass.now;
        }
        // A drain that has an end: later everything is free again.
        let open = !node.shut() && node.condition != NodeCondition::Gone;
        if let Some((_, until)) = pass.drain(node).filter(|(from, _)| open && *from <= pass.now) {
            for slot in node.workable().iter() {
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
    for gang in coming(pass) {
        for (node, held) in &gang.placement.0 {
            note(node, *held, gang.end);
        }
    }
    // Promised GPUs are busy until the one they are promised to has ended.
    for reservation in &pass.out.reservations {
        let left = expected_left(pass, reservation.job, reservation.placement.gpus().count());
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

/// Whether one more job may be promised nodes of a segment.
pub(super) fn open(pass: &Pass<'_>, segment: usize) -> bool {
    let reserved = |p: &&Promise| p.owner.as_ref().is_some_and(|o| Some(o.job) != pass.held);
    let reserved = pass.promises.iter().filter(|p| p.segment == segment).filter(reserved);
    reserved.count() < pass.snapshot.policy.reservations as usize
}

/// Promises nodes to the job, if it is among the first that wait for its type. Tells whether it did.
pub(super) fn reserve(pass: &mut Pass<'_>, ask: &Ask<'_>) -> bool {
    if ask.sharing.is_some() {
        return false;
    }
    let segments = pass.segments(ask).to_vec();
    if !segments.iter().any(|s| open(pass, *s)) {
        return false;
    }
    if pass.ends.is_none() {
        pass.ends = Some(ends(pass));
    }
    let until = ask.class.topology.max_wait.filter(|_| ask.insists).map(|wait| ask.job.submitted + wait);
    let anywhere = Ask { insists: false, ..*ask };
    let found = segments.into_iter().filter(|s| open(pass, *s)).filter_map(|s| {
        let (start, placement) = earliest(pass, ask, s, &pass.wanted(ask, s, true)?).unzip();
        // From then on it takes any place.
        let later = until.and_then(|until| {
            let (start, placement) = earliest(pass, ask, s, &pass.wanted(&anywhere, s, true)?)?;
            Some((start.max(until), placement))
        });
        let (start, placement) = start.zip(placement).into_iter().chain(later).min_by_key(|(start, _)| *start)?;
        Some((start, s, placement))
    });
    let Some((start, segment, placement)) = found.min_by_key(|(start, s, _)| (*start, *s)) else { return false };
    let owner = owner(pass, ask, pass.grid.segments[segment].gpu_type, start);
    let slots = kept_free(pass, &placement, start);
    promise(pass, Promise { segment, start, owner: Some(owner), slots });
    pass.out.reservations.push(Reservation { job: ask.id, placement, start });
    pass.ends = None;
    true
}

/// Whose a promise is that begins at `start`.
pub(super) fn owner(pass: &Pass<'_>, ask: &Ask<'_>, t: usize, start: Time) -> Owner {
    let mut used_then = vec![0; pass.quotas.branches.len()];
    let mut held = Vec::new();
    for (id, holder) in pass.index.holders.iter().filter(|(_, h)| h.gpu_type == t) {
        if pass.snapshot.jobs.get(id).is_some_and(|j| expected_end(pass, j) > start) {
            let queue = pass.branch[holder.queue as usize];
            let Holder { gpus, preemptible, placed, .. } = *holder;
            held.push(Held { job: *id, queue, t, gpus, preemptible, placed });
        }
    }
    for gang in coming(pass).into_iter().filter(|g| g.end > start) {
        let of_type = gang.placement.0.first().and_then(|(n, _)| pass.grid.index.get(n));
        let of_type = of_type.is_some_and(|n| pass.grid.segments[pass.grid.segment_of[*n]].gpu_type == t);
        if let Some(waiter) = pass.index.waiter(gang.job).filter(|_| of_type) {
            let (queue, gpus) = (pass.branch[waiter.queue as usize], gang.placement.gpus().count());
            let preemptible = pass.index.classes[waiter.class as usize].preemptible;
            held.push(Held { job: gang.job, queue, t, gpus, preemptible, placed: pass.now });
        }
    }
    for gang in &held {
        for above in &pass.quotas.branches[gang.queue].path {
            used_then[*above] += gang.gpus;
        }
    }
    let then = pass.quotas.borrowed(held);
    Owner { job: ask.id, queue: ask.queue, gpu_type: t, gpus: ask.class.gpus(), used_then, then }
}

/// When a gang can start at the earliest, and where: on the nodes that are free last by then, so that
/// those that are free now can be used meanwhile.
fn earliest(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize, wanted: &Wanted<'_>) -> Option<(Time, Placement)> {
    let ends = pass.ends.as_ref()?;
    let width = pass.grid.stride.saturating_sub(1);
    let gpus = wanted.gpus_per_node as usize;
    if gpus == 0 || gpus > width {
        return None;
    }
    let at = |node: usize| {
        let free = ends[node * width + gpus - 1];
        let drain = pass.snapshot.nodes.get(&pass.grid.ids[node]).and_then(|n| pass.drain(n));
        match drain.filter(|(from, _)| *from > pass.now) {
            // On a node whose drain begins before its end it may begin only afterwards.
            Some((from, until)) if free + ask.end.since(pass.now) > from && !worth_moving_at(pass, ask, free, from) => {
                free.max(until)
            }
            _ => free,
        }
    };
    let s = &pass.grid.segments[segment];
    let need = wanted.nodes.0 as usize;
    // When, in which domain, and when each of its nodes is free.
    type Best = (Time, usize, Vec<(Time, usize)>);
    let mut best: Option<Best> = None;
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
        let rest = node.workable().without(free);
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
pub(super) fn promise(pass: &mut Pass<'_>, promise: Promise) {
    let at = pass.promises.partition_point(|p| p.start <= promise.start);
    let view = pass.views[at].clone();
    pass.views.insert(at + 1, view);
    for view in &mut pass.views[at + 1..] {
        for (node, slots) in &promise.slots {
            let free = view.free[*node].without(*slots);
            view.set(pass.grid, *node, free);
        }
    }
    pass.promises.insert(at, promise);
}

/// GPUs are free again, for those that end before the promises which keep them.
pub(super) fn free_again(pass: &mut Pass<'_>, node: usize, slots: Slots) {
    let mut slots = slots;
    pass.full.fill([false; 2]);
    for (i, view) in pass.views.iter_mut().enumerate() {
        if let Some(before) = i.checked_sub(1) {
            let kept = pass.promises[before].slots.iter().filter(|(n, _)| *n == node);
            slots = kept.fold(slots, |rest, (_, kept)| rest.without(*kept));
        }
        let free = view.free[node].or(slots);
        view.set(pass.grid, node, free);
    }
}
