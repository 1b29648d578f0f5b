//! Time sharing: preemptible jobs of equal priority take turns. A job that has had little goes before one that
//! has had much, counted in doublings of a span of the whole pool, and waiting takes doublings off. After its
//! shortest turn a job yields to one at least [`GAP`] levels below it, or to one no higher that fills at least
//! twice as many GPUs.

use super::claims;
use super::grid::View;
use super::pass::{Ask, Pass, held_for};
use super::place::{self, Wanted};
use super::preempt::{self, Candidate, add};
use super::reserve::{self, Promise};
use crate::fixed;
use crate::model::{EvictionCause, Job, TimeSharing};
use crate::time::{Span, Time};
use std::cmp::Reverse;

/// Levels by which a job must be above another to yield to it. With 1, twice as much was lost for restarts.
pub(super) const GAP: i64 = 2;

/// For a job that could start once others have had their shortest turns, what is free is kept this long.
const HOLD: Span = Span::minutes(30);

/// The GPU-time of the first level: the pool's GPUs for the span of the policy.
fn unit(pass: &Pass<'_>, sharing: &TimeSharing) -> u64 {
    let gpus: u64 = pass.quotas.capacity.iter().map(|c| u64::from(*c)).sum();
    sharing.level.0.max(1).unsigned_abs().saturating_mul(gpus.max(1))
}

/// How long a job has waited: since its submission, less what it ran.
fn waited(had: Span, gpus: u32, submitted: Time, now: Time) -> i64 {
    (now.since(submitted).0 - had.0 / i64::from(gpus.max(1))).max(0)
}

/// The level of a job: one more for each doubling of the GPU-time that it had, one less for each span of waiting.
pub(super) fn level(pass: &Pass<'_>, sharing: &TimeSharing, had: Span, gpus: u32, submitted: Time) -> i64 {
    level_at(pass, sharing, had, gpus, submitted, pass.now)
}

/// The same at another instant.
pub(super) fn level_at(
    pass: &Pass<'_>,
    sharing: &TimeSharing,
    had: Span,
    gpus: u32,
    submitted: Time,
    now: Time,
) -> i64 {
    let service = i64::from(fixed::log2_ratio(had.0.max(0).unsigned_abs(), unit(pass, sharing)));
    service - waited(had, gpus, submitted, now) / sharing.ageing.0.max(1)
}

/// The level of a job that holds GPUs.
fn level_of(pass: &Pass<'_>, sharing: &TimeSharing, job: &Job) -> i64 {
    let gpus = job.phase.gang().map_or(1, |g| g.gpu_count());
    level(pass, sharing, job.attained(pass.now), gpus, job.submitted)
}

/// A holder that takes turns with the one that asks, and whether its shortest turn is over.
struct Turn {
    level: i64,
    submitted: Time,
    over_at: Time,
    candidate: Candidate,
}

/// Who takes turns with the job in a segment, in the order in which they would have to leave: the highest level
/// first, then the latest submission.
fn turns(pass: &mut Pass<'_>, ask: &Ask<'_>, sharing: &TimeSharing, segment: usize) -> Vec<Turn> {
    let mut found = Vec::new();
    preempt::rights(pass);
    let Some(rights) = &pass.rights else { return found };
    for (id, holder) in &pass.index.holders {
        if holder.segment != segment
            || !holder.preemptible
            || holder.priority != ask.class.priority
            || pass.leaving.contains_key(id)
        {
            continue;
        }
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let queue = pass.branch[holder.queue as usize];
        // Between queues only with what is nobody's guarantee.
        let borrowed = || pass.quotas.part(ask.queue, queue).is_none_or(|(_, level)| rights.borrows(*id, level));
        let theirs = pass.quotas.managed[holder.gpu_type] && !borrowed();
        if queue != ask.queue && (theirs || pass.sharing(queue, &[segment]).is_none()) {
            continue;
        }
        let Some(gang) = job.phase.gang() else { continue };
        let candidate = Candidate::new(pass, ask, job, holder, queue, EvictionCause::Turn);
        let (level, over_at) = (level_of(pass, sharing, job), gang.placed + sharing.minimum_run);
        found.push(Turn { level, submitted: job.submitted, over_at, candidate });
    }
    found.sort_by_key(|t| (Reverse(t.level), Reverse(t.submitted), Reverse(t.candidate.job)));
    found
}

/// Whom the job displaces in a segment, if anybody; or, where it could soon, keeps what is free for it.
pub(super) fn displace(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize) -> Option<Vec<Candidate>> {
    let sharing = ask.sharing?;
    if pass.held.is_some() {
        return None;
    }
    let wanted = pass.wanted(ask, segment, false)?;
    let mine = level(pass, &sharing, ask.job.gpu_time, ask.class.gpus(), ask.job.submitted);
    let mut turns = turns(pass, ask, &sharing, segment);
    if turns.is_empty() {
        return None;
    }
    let base = claims::free_soon(pass, ask, segment, false);
    let search = Search { ask, segment, wanted, base: &base };
    if search.enough(pass, &claims::free_soon(pass, ask, segment, true), &[]) {
        return None;
    }
    let gpus = ask.class.gpus();
    let over = |t: &Turn| t.over_at <= pass.now;
    let lower: Vec<usize> = (0..turns.len()).filter(|i| over(&turns[*i]) && turns[*i].level >= mine + GAP).collect();
    let smaller = |i: &usize| over(&turns[*i]) && turns[*i].level >= mine && turns[*i].candidate.gpus < gpus;
    let filling: Vec<usize> = (0..turns.len()).filter(smaller).collect();
    let mut chosen = search.needed(pass, &turns, &lower);
    if chosen.is_none() {
        let half = |set: &Vec<usize>| set.iter().map(|i| turns[*i].candidate.gpus).sum::<u32>() <= gpus / 2;
        chosen = search.needed(pass, &turns, &filling).filter(half);
    }
    if let Some(mut set) = chosen {
        set.sort_unstable();
        return Some(set.into_iter().rev().map(|i| turns.swap_remove(i).candidate).collect());
    }
    // Those whose shortest turns end soon go on; what is free and would be missing then is kept.
    turns.retain(|t| t.over_at <= pass.now + HOLD && t.level >= mine + GAP);
    turns.sort_by_key(|t| (t.over_at, t.candidate.job));
    let all: Vec<usize> = (0..turns.len()).collect();
    let soon = search.until_enough(pass, &turns, &all)?;
    let mut after = base.clone();
    add(pass, &mut after, soon.iter().map(|i| &turns[*i].candidate));
    // Of the place that it would have then, the part that is free now; those who go on first.
    let leaving = taken_slots(&soon, &turns);
    let placement = place::place_preferring(pass.grid, &pass.grid.segments[segment], &after, &search.wanted, &leaving)?;
    // Whoever ends before may use it meanwhile.
    let start = soon.iter().map(|i| turns[*i].over_at).max().unwrap_or(pass.now).max(pass.now + Span(1));
    let slots = placement.0.iter().filter_map(|(id, slots)| {
        let node = *pass.grid.index.get(id)?;
        Some((node, slots.and(pass.views[0].free[node])))
    });
    let slots = slots.collect();
    let owner = reserve::owner(pass, ask, pass.grid.segments[segment].gpu_type, start);
    reserve::promise(pass, Promise { segment, start, owner: Some(owner), slots });
    pass.held = Some(ask.id);
    None
}

fn taken_slots(set: &[usize], turns: &[Turn]) -> Vec<usize> {
    let mut nodes: Vec<usize> = set.iter().flat_map(|i| &turns[*i].candidate.slots).map(|(n, _)| *n).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// The search for those who yield in a segment.
struct Search<'s, 'a> {
    ask: &'s Ask<'a>,
    segment: usize,
    wanted: Wanted<'a>,
    base: &'s View,
}

impl Search<'_, '_> {
    /// Whether there is room and quota for the job once some have given it up.
    fn enough(&self, pass: &Pass<'_>, view: &View, gone: &[&Candidate]) -> bool {
        let s = &pass.grid.segments[self.segment];
        if place::room(pass.grid, s, view, self.wanted.gpus_per_node, self.wanted.within) < self.wanted.nodes.0 {
            return false;
        }
        let given = preempt::given(pass, gone.iter().copied());
        let class = self.ask.class;
        pass.quotas.short_after(self.ask.queue, s.gpu_type, class.gpus(), class.preemptible, &given).is_none()
    }

    /// The first of the list, as many as it takes.
    fn until_enough(&self, pass: &Pass<'_>, turns: &[Turn], list: &[usize]) -> Option<Vec<usize>> {
        let mut view = self.base.clone();
        let mut gone = Vec::with_capacity(list.len());
        for (n, i) in list.iter().enumerate() {
            add(pass, &mut view, std::iter::once(&turns[*i].candidate));
            gone.push(&turns[*i].candidate);
            if self.enough(pass, &view, &gone) {
                return Some(list[..=n].to_vec());
            }
        }
        None
    }

    /// The same, without those that are not needed: the last taken are left out first.
    fn needed(&self, pass: &Pass<'_>, turns: &[Turn], list: &[usize]) -> Option<Vec<usize>> {
        let mut set = self.until_enough(pass, turns, list)?;
        let mut i = set.len();
        while i > 0 {
            i -= 1;
            let rest: Vec<&Candidate> =
                set.iter().enumerate().filter(|(n, _)| *n != i).map(|(_, t)| &turns[*t].candidate).collect();
            let mut without = self.base.clone();
            add(pass, &mut without, rest.iter().copied());
            if self.enough(pass, &without, &rest) {
                set.remove(i);
            }
        }
        Some(set)
    }
}

/// Notes that a job waits for its turn.
pub(super) fn note(pass: &mut Pass<'_>, ask: &Ask<'_>) {
    let Some(sharing) = ask.sharing else { return };
    let waited = waited(ask.job.gpu_time, ask.class.gpus(), ask.job.submitted, pass.now);
    let ageing = sharing.ageing.0.max(1);
    let lower = pass.now + Span(ageing - waited.rem_euclid(ageing));
    pass.turn = Some(pass.turn.map_or(lower, |t| t.min(lower)));
}

/// Jobs that wait for their turns are looked at again when the next running one has had its shortest turn,
/// or will soon have, or when either changes its level.
pub(super) fn wake(pass: &mut Pass<'_>) {
    let Some(mut next) = pass.turn else { return };
    for (id, holder) in &pass.index.holders {
        if pass.leaving.contains_key(id) {
            continue;
        }
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let queue = pass.branch[holder.queue as usize];
        let Some(sharing) = pass.sharing(queue, &[holder.segment]) else { continue };
        let over_at = pass.now + Span(sharing.minimum_run.0 - held_for(job, pass.now).0);
        for at in [over_at - HOLD, over_at] {
            if at > pass.now {
                next = next.min(at);
            }
        }
        // When it has had twice as much as the last level wanted.
        let unit = unit(pass, &sharing);
        let had = job.attained(pass.now).0.unsigned_abs();
        let doublings = (fixed::log2_ratio(had, unit) + 1).min(40);
        let step = unit.saturating_mul(1 << doublings).saturating_sub(had) / u64::from(holder.gpus.max(1)) + 1;
        next = next.min(pass.now + Span(i64::try_from(step).unwrap_or(i64::MAX)));
    }
    pass.wake(next);
}
