//! Promises that are being kept: claims and the evictions behind them.

use super::Decision;
use super::grid::View;
use super::memo::Holder;
use super::pass::{self, Ask, Pass};
use super::reserve::{expected_end, free_again, worth_moving};
use crate::gpus::Slots;
use crate::model::{Beneficiary, Claim, Eviction, EvictionCause, Job, JobId, Node, Phase, TurnedOut};
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// Notes who is leaving already.
pub(super) fn leaving(pass: &mut Pass<'_>) {
    for (id, holder) in pass.index.holders.iter().filter(|(_, h)| h.leaving || h.evicting) {
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let back = match &job.eviction {
            Some(e) => expected_end(pass, job).min(e.deadline + job.request.grace),
            None => pass.now + job.request.grace,
        };
        leaves(pass, *id, holder, back);
    }
}

fn leaves(pass: &mut Pass<'_>, id: JobId, holder: &Holder, back: Time) {
    if pass.leaving.insert(id, back).is_none() {
        let branch = pass.branch[holder.queue as usize];
        pass.quotas.leave(branch, holder.gpu_type, holder.gpus, holder.preemptible, true);
        pass.rights = None;
        pass.ends = None;
    }
}

/// Starts the jobs whose claims are complete, and takes back what cannot be kept.
pub(super) fn keep(pass: &mut Pass<'_>) {
    let mut kept = Vec::new();
    for id in &pass.index.claimers {
        let (Some(job), Some(waiter)) = (pass.snapshot.jobs.get(id), pass.index.waiter(*id)) else { continue };
        let (Some(claim), Some(ask)) = (&job.claim, pass.ask(*id, waiter)) else { continue };
        let first = claim.placement.0.first().and_then(|(n, _)| pass.grid.index.get(n));
        match first.map(|n| pass.grid.segment_of[*n]) {
            Some(segment) => {
                let gpus = claim.placement.gpus().count();
                charge(pass, &ask, segment, gpus, true);
                kept.push((ask, claim, segment, gpus, (waiter.queue as usize, waiter.user)));
            }
            None => drop_claim(pass, job, "its nodes are gone"),
        }
    }
    // Each is looked at with what all the others are promised.
    kept.retain(|(ask, claim, segment, gpus, _)| {
        charge(pass, ask, *segment, *gpus, false);
        let reason = broken(pass, ask, claim, *segment);
        match &reason {
            Some(reason) => drop_claim(pass, ask.job, reason),
            None => charge(pass, ask, *segment, *gpus, true),
        }
        reason.is_none()
    });
    for (ask, claim, segment, gpus, user) in kept {
        charge(pass, &ask, segment, gpus, false);
        if complete(pass, &ask, claim, segment) {
            free_claimed(pass, claim);
            pass.start(&ask, user, segment, claim.placement.clone());
        } else {
            charge(pass, &ask, segment, gpus, true);
            *pass.charged.entry(user).or_default() += gpus;
        }
    }
}

fn charge(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize, gpus: u32, more: bool) {
    let t = pass.grid.segments[segment].gpu_type;
    pass.quotas.charge(ask.queue, t, gpus, ask.class.preemptible, more);
}

/// Whether the GPUs of a claim are free, and those that leave because of a limit alone are gone.
fn complete(pass: &Pass<'_>, ask: &Ask<'_>, claim: &Claim, segment: usize) -> bool {
    let nobodys = |(n, slots): &(_, Slots)| pass.snapshot.nodes.get(n).is_some_and(|n| n.held.and(*slots).is_empty());
    let (t, gpus) = (pass.grid.segments[segment].gpu_type, claim.placement.gpus().count());
    pass.snapshot.paused.is_none()
        && pass::environment_ready(pass.snapshot, ask.job)
        && claim.placement.0.iter().all(nobodys)
        && pass.quotas.short(ask.queue, t, gpus, ask.class.preemptible).is_none()
}

/// Starts a job whose claim is not complete where there is room meanwhile: nobody needs to leave any more.
/// Tells how many GPUs it got.
pub(super) fn elsewhere(pass: &mut Pass<'_>, ask: &Ask<'_>, user: (usize, u32)) -> Option<u32> {
    if pass.snapshot.paused.is_some() || !pass::environment_ready(pass.snapshot, ask.job) {
        return None;
    }
    let new = pass.out.decisions.iter().position(|d| matches!(d, Decision::Claim { job, .. } if *job == ask.id));
    let claim = match new.map(|at| &pass.out.decisions[at]) {
        Some(Decision::Claim { claim, .. }) => claim.clone(),
        _ => ask.job.claim.clone()?,
    };
    let first = claim.placement.0.first().and_then(|(n, _)| pass.grid.index.get(n))?;
    let of = pass.grid.segment_of[*first];
    let gpus = claim.placement.gpus().count();
    // What others were promised may have been promised behind this claim: none of it.
    let modest = Ask { end: Time(i64::MAX), ..*ask };
    charge(pass, ask, of, gpus, false);
    let Some((segment, placement)) = pass.place_free(&modest) else {
        charge(pass, ask, of, gpus, true);
        return None;
    };
    if let Some(charged) = pass.charged.get_mut(&user) {
        *charged = charged.saturating_sub(gpus);
    }
    free_claimed(pass, &claim);
    let got = pass.start(ask, user, segment, placement);
    match new {
        Some(at) => withdraw(pass, ask.id, at),
        None => spare_for(pass, ask.id),
    }
    Some(got)
}

/// Nobody needs to leave for a job any more that was told to before this pass.
fn spare_for(pass: &mut Pass<'_>, claimer: JobId) {
    for (id, holder) in &pass.index.holders {
        let Some(job) = pass.snapshot.jobs.get(id).filter(|_| holder.evicting && !pass.suspended.contains(id)) else {
            continue;
        };
        if job.eviction.as_ref().and_then(|e| e.beneficiary.as_ref()).is_some_and(|b| b.job == claimer) {
            spare(pass, *id, holder);
        }
    }
}

/// Takes back the claim that this pass decided for a job, with what it told others.
fn withdraw(pass: &mut Pass<'_>, claimer: JobId, at: usize) {
    pass.out.decisions.remove(at);
    pass.promised.remove(&claimer);
    let told = |d: &Decision| match d {
        Decision::Evict { job, eviction } => eviction.beneficiary.as_ref().filter(|b| b.job == claimer).map(|_| *job),
        _ => None,
    };
    let victims: Vec<JobId> = pass.out.decisions.iter().filter_map(told).collect();
    pass.out.decisions.retain(|d| match d {
        Decision::Suspend { job, .. } => !victims.contains(job),
        other => told(other).is_none(),
    });
    for victim in victims {
        pass.suspended.remove(&victim);
        if let Some(holder) = pass.index.holders.get(&victim) {
            stays(pass, victim, holder);
        }
    }
}

/// Why a claim cannot be kept.
fn broken(pass: &Pass<'_>, ask: &Ask<'_>, claim: &Claim, segment: usize) -> Option<String> {
    for (id, slots) in &claim.placement.0 {
        let Some(node) = pass.snapshot.nodes.get(id) else { return Some("a node of it is gone".to_owned()) };
        if !slots.and(node.foreign).is_empty() || node.overrun() > left_to_others(pass, node) {
            return Some(format!("others took GPUs of node {}", node.name));
        }
        if pass.takes_none(node) || !slots.without(node.works()).is_empty() || barred(pass, ask, node) {
            return Some(format!("node {} takes no work any more", node.name));
        }
    }
    let t = pass.grid.segments[segment].gpu_type;
    let gpus = claim.placement.gpus().count();
    if pass.quotas.short_after(ask.queue, t, gpus, ask.class.preemptible, &BTreeMap::new()).is_some() {
        return Some("the quota does not allow it any more".to_owned());
    }
    pass::held_queue(pass, ask.queue).map(|queue| format!("queue {queue} is held"))
}

/// GPUs of a node that are given up and promised to nobody.
fn left_to_others(pass: &Pass<'_>, node: &Node) -> u32 {
    let gangs = pass.leaving.keys().filter_map(|id| pass.snapshot.jobs.get(id)?.phase.gang());
    let leaving = gangs.fold(Slots::NONE, |all, gang| all.or(gang.gpus().on(node.id)));
    leaving.without(node.claimed).count()
}

/// Whether a node's drain begins before the job would end, and too early for it to begin there.
pub(super) fn barred(pass: &Pass<'_>, ask: &Ask<'_>, node: &Node) -> bool {
    let coming = pass.drained_from(node).filter(|from| *from > pass.now && *from < ask.end);
    coming.is_some_and(|from| !worth_moving(pass, ask, from))
}

fn drop_claim(pass: &mut Pass<'_>, job: &Job, reason: &str) {
    if let Some(claim) = &job.claim {
        free_claimed(pass, claim);
    }
    pass.dropped.insert(job.id);
    pass.out.decisions.push(Decision::Unclaim { job: job.id, reason: reason.to_owned() });
}

/// What was promised and is held by nobody is free again.
fn free_claimed(pass: &mut Pass<'_>, claim: &Claim) {
    for (id, slots) in &claim.placement.0 {
        let (Some(node), Some(i)) = (pass.snapshot.nodes.get(id), pass.grid.index.get(id)) else { continue };
        pass.claimed[*i] = pass.claimed[*i].without(*slots);
        free_again(pass, *i, slots.and(pass.usable(node)).without(node.held));
    }
}

/// Suspends whose time has come, and lets go whoever need not leave any more.
pub(super) fn evictions(pass: &mut Pass<'_>) {
    for (id, holder) in &pass.index.holders {
        if !holder.evicting || holder.leaving {
            continue;
        }
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let Some(eviction) = &job.eviction else { continue };
        if !needed(pass, job, eviction) {
            spare(pass, *id, holder);
        } else if eviction.is_due(job, pass.now) {
            suspend(pass, job, eviction);
        } else {
            pass.wake(eviction.deadline);
        }
    }
    again(pass);
}

fn spare(pass: &mut Pass<'_>, id: JobId, holder: &Holder) {
    pass.out.decisions.push(Decision::Spare { job: id });
    stays(pass, id, holder);
}

fn stays(pass: &mut Pass<'_>, id: JobId, holder: &Holder) {
    if pass.leaving.remove(&id).is_some() {
        let branch = pass.branch[holder.queue as usize];
        pass.quotas.leave(branch, holder.gpu_type, holder.gpus, holder.preemptible, false);
    }
    (pass.rights, pass.ends) = (None, None);
}

fn suspend(pass: &mut Pass<'_>, job: &Job, eviction: &Eviction) {
    let beneficiary = eviction.beneficiary.as_ref().map(|b| b.key.clone());
    let turned_out = TurnedOut { cause: eviction.cause, beneficiary, at: pass.now };
    pass.leaving.insert(job.id, pass.now + job.request.grace);
    pass.suspended.insert(job.id);
    pass.out.decisions.push(Decision::Suspend { job: job.id, turned_out });
}

/// Whether a job must still leave.
fn needed(pass: &Pass<'_>, job: &Job, eviction: &Eviction) -> bool {
    if eviction.cause == EvictionCause::Drain {
        let drained = |n| pass.snapshot.nodes.get(&n).is_some_and(|n| pass.drained_from(n).is_some());
        return job.phase.gang().is_some_and(|g| g.nodes().any(drained));
    }
    let Some(beneficiary) = &eviction.beneficiary else { return false };
    let settled = pass.started.contains_key(&beneficiary.job) || pass.dropped.contains(&beneficiary.job);
    let claim = pass.snapshot.jobs.get(&beneficiary.job).and_then(|j| j.claim.as_ref());
    !settled && claim.is_some_and(|c| c.victims.contains(&(job.id, job.attempts)))
}

/// A victim that a claim counts on and that was not told, or was told and then spared, is told again.
fn again(pass: &mut Pass<'_>) {
    for id in &pass.index.claimers {
        if pass.started.contains_key(id) || pass.dropped.contains(id) {
            continue;
        }
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let Some(claim) = &job.claim else { continue };
        for (victim, attempt) in &claim.victims {
            let Some(holder) = pass.index.holders.get(victim) else { continue };
            let Some(other) = pass.snapshot.jobs.get(victim) else { continue };
            if holder.leaving || pass.leaving.contains_key(victim) || other.attempts != *attempt {
                continue;
            }
            evict(pass, other, claim.cause, Some(job));
        }
    }
}

/// Tells a job to leave, and suspends it at once where that is due.
pub(super) fn evict(pass: &mut Pass<'_>, victim: &Job, cause: EvictionCause, by: Option<&Job>) {
    let deadline = pass.now + patience(pass, victim);
    evict_by(pass, victim, cause, by, deadline);
}

pub(super) fn evict_by(pass: &mut Pass<'_>, victim: &Job, cause: EvictionCause, by: Option<&Job>, deadline: Time) {
    let beneficiary = by.map(|j| Beneficiary { job: j.id, key: j.key.clone() });
    let eviction = Eviction { cause, beneficiary, since: pass.now, deadline };
    pass.out.decisions.push(Decision::Evict { job: victim.id, eviction: eviction.clone() });
    let back = expected_end(pass, victim).min(deadline + victim.request.grace);
    if let Some(holder) = pass.index.holders.get(&victim.id) {
        leaves(pass, victim.id, holder, back);
    }
    if eviction.is_due(victim, pass.now) {
        suspend(pass, victim, &eviction);
    } else {
        pass.wake(deadline);
    }
}

/// How long a victim may go on: until its next checkpoint, a quarter more than it says it takes from one to the next.
/// One that is expected to end within its grace may do so, as it would keep its GPUs for as long if it were stopped.
fn patience(pass: &Pass<'_>, victim: &Job) -> Span {
    let seen = victim.checkpoint.as_ref().is_some_and(|c| c.attempt == victim.attempts);
    let most = pass.snapshot.policy.patience;
    let checkpoint = match victim.request.checkpoint_every {
        Some(every) => Span(every.0 / 4 * 5),
        None if seen => most,
        None => Span(0),
    };
    let grace = victim.request.grace;
    let ends = matches!(victim.phase, Phase::Running(_)) && expected_end(pass, victim) <= pass.now + grace;
    if ends { checkpoint.max(grace) } else { checkpoint }.min(most)
}

/// What is free for a job once everybody who leaves is gone: not what is promised to others. Those who are only
/// told to leave may be spared, so that nothing can be built on them; it may be waited for.
pub(super) fn free_soon(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize, told: bool) -> View {
    let mut view = pass.view_for(ask, segment).clone();
    let nodes = pass.grid.segments[segment].nodes.clone();
    for id in pass.leaving.keys().filter(|id| told || leaves_for_certain(pass, **id)) {
        let Some(gang) = pass.snapshot.jobs.get(id).and_then(|j| j.phase.gang()) else { continue };
        for worker in &gang.workers {
            let Some(i) = pass.grid.index.get(&worker.node).filter(|i| nodes.contains(i)) else { continue };
            let promised = pass.out.reservations.iter().flat_map(|r| &r.placement.0);
            let promised = promised.filter(|(n, _)| *n == worker.node).fold(Slots::NONE, |a, (_, s)| a.or(*s));
            let free = view.free[*i].or(given(pass, ask, *i, worker.slots).without(promised));
            view.set(pass.grid, *i, free);
        }
    }
    view
}

fn leaves_for_certain(pass: &Pass<'_>, id: JobId) -> bool {
    pass.suspended.contains(&id) || pass.index.holders.get(&id).is_some_and(|h| h.leaving)
}

/// Takes back what this pass decided for a job, as another has a right to its GPUs.
pub(super) fn undo(pass: &mut Pass<'_>, id: JobId) {
    let Some(started) = pass.started.remove(&id) else { return };
    let mine = |d: &Decision| matches!(d, Decision::Start { job, .. } if *job == id);
    let Some(at) = pass.out.decisions.iter().position(mine) else { return };
    let Decision::Start { placement, .. } = pass.out.decisions.remove(at) else { return };
    for (node, slots) in &placement.0 {
        if let Some(i) = pass.grid.index.get(node) {
            free_again(pass, *i, *slots);
        }
    }
    let t = pass.grid.segments[started.segment].gpu_type;
    pass.quotas.charge(started.queue, t, started.gpus, started.preemptible, false);
    if let Some(charged) = pass.charged.get_mut(&started.user) {
        *charged = charged.saturating_sub(started.gpus);
    }
    (pass.ends, pass.rights, pass.undone) = (None, None, true);
    if pass.snapshot.jobs.get(&id).is_some_and(|j| j.claim.is_some()) {
        pass.dropped.insert(id);
        let reason = "another queue takes its guarantee back".to_owned();
        pass.out.decisions.push(Decision::Unclaim { job: id, reason });
    }
}

/// What a gang that leaves a node gives to a job.
pub(super) fn given(pass: &Pass<'_>, ask: &Ask<'_>, node: usize, slots: Slots) -> Slots {
    let Some(n) = pass.snapshot.nodes.get(&pass.grid.ids[node]).filter(|n| !barred(pass, ask, n)) else {
        return Slots::NONE;
    };
    slots.and(pass.usable(n)).without(pass.claimed[node])
}
