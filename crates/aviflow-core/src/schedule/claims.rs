//! Promises that are being kept: claims and the evictions behind them.

use super::Decision;
use super::pass::{self, Pass};
use crate::gpus::Slots;
use crate::model::{Beneficiary, Eviction, EvictionCause, Job, JobId, TurnedOut};
use crate::time::{Span, Time};

/// Starts the jobs whose claims are complete, and takes back what cannot be kept.
pub(super) fn keep(pass: &mut Pass<'_>) {
    for id in &pass.index.claimers {
        let (Some(job), Some(waiter)) = (pass.snapshot.jobs.get(id), pass.index.waiter(*id)) else { continue };
        let Some(claim) = &job.claim else { continue };
        let Some(ask) = pass.ask(*id, waiter) else { continue };
        let Some(segment) =
            claim.placement.0.first().and_then(|(n, _)| pass.grid.index.get(n)).map(|n| pass.grid.segment_of[*n])
        else {
            drop_claim(pass, job, "its nodes are gone");
            continue;
        };
        let t = pass.grid.segments[segment].gpu_type;
        if let Some(reason) = broken(pass, job) {
            drop_claim(pass, job, &reason);
            continue;
        }
        if pass.snapshot.paused.is_none() && pass::environment_ready(pass.snapshot, job) {
            let held = claim
                .placement
                .0
                .iter()
                .any(|(n, slots)| pass.snapshot.nodes.get(n).is_none_or(|node| !node.held.and(*slots).is_empty()));
            let place = if held {
                // Others ended meanwhile: nobody needs to leave any more.
                pass.place_free(&ask)
            } else {
                Some((segment, claim.placement.clone()))
            };
            if let Some((segment, placement)) = place {
                if held {
                    free_claimed(pass, job);
                }
                pass.take(segment, &placement, ask.queue, ask.class.preemptible);
                pass.settled.insert(*id);
                pass.out.decisions.push(Decision::Start { job: *id, placement });
                continue;
            }
        }
        pass.quotas.charge(ask.queue, t, claim.placement.gpus().count(), ask.class.preemptible, true);
    }
}

/// Why a claim cannot be kept.
fn broken(pass: &Pass<'_>, job: &Job) -> Option<String> {
    let claim = job.claim.as_ref()?;
    for (id, slots) in &claim.placement.0 {
        let Some(node) = pass.snapshot.nodes.get(id) else { return Some("a node of it is gone".to_owned()) };
        if !slots.without(pass.usable(node)).is_empty() {
            return Some(format!("node {} takes no work any more", node.name));
        }
    }
    let queue = pass.index.waiter(job.id).map(|w| pass.index.classes[w.class as usize].queue)?;
    pass::held_queue(pass, pass.branch[queue as usize]).map(|queue| format!("queue {queue} is held"))
}

fn drop_claim(pass: &mut Pass<'_>, job: &Job, reason: &str) {
    free_claimed(pass, job);
    pass.dropped.insert(job.id);
    pass.out.decisions.push(Decision::Unclaim { job: job.id, reason: reason.to_owned() });
}

/// What was promised and is held by nobody is free again.
fn free_claimed(pass: &mut Pass<'_>, job: &Job) {
    for (id, slots) in job.claim.iter().flat_map(|c| &c.placement.0) {
        let (Some(node), Some(i)) = (pass.snapshot.nodes.get(id), pass.grid.index.get(id)) else { continue };
        let free = slots.and(pass.usable(node)).without(node.held);
        for view in &mut pass.views {
            let all = view.free[*i].or(free);
            view.set(pass.grid, *i, all);
        }
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
            pass.out.decisions.push(Decision::Spare { job: *id });
        } else if eviction.is_due(job, pass.now) {
            suspend(pass, *id, eviction);
        } else {
            pass.wake(eviction.deadline);
        }
    }
    again(pass);
}

pub(super) fn suspend(pass: &mut Pass<'_>, id: JobId, eviction: &Eviction) {
    let beneficiary = eviction.beneficiary.as_ref().map(|b| b.key.clone());
    let turned_out = TurnedOut { cause: eviction.cause, beneficiary, at: pass.now };
    pass.leaving.insert(id);
    pass.out.decisions.push(Decision::Suspend { job: id, turned_out });
}

/// Whether a job must still leave.
fn needed(pass: &Pass<'_>, job: &Job, eviction: &Eviction) -> bool {
    if eviction.cause == EvictionCause::Drain {
        let drained = |n| pass.snapshot.nodes.get(&n).is_some_and(|n| pass.drained_from(n).is_some());
        return job.phase.gang().is_some_and(|g| g.nodes().any(drained));
    }
    let Some(beneficiary) = &eviction.beneficiary else { return false };
    let settled = pass.settled.contains(&beneficiary.job) || pass.dropped.contains(&beneficiary.job);
    let claim = pass.snapshot.jobs.get(&beneficiary.job).and_then(|j| j.claim.as_ref());
    !settled && claim.is_some_and(|c| c.victims.contains(&(job.id, job.attempts)))
}

/// A victim that a claim counts on and that was not told, or was told and then spared, is told again.
fn again(pass: &mut Pass<'_>) {
    for id in &pass.index.claimers {
        if pass.settled.contains(id) || pass.dropped.contains(id) {
            continue;
        }
        let Some(job) = pass.snapshot.jobs.get(id) else { continue };
        let Some(claim) = &job.claim else { continue };
        for (victim, attempt) in &claim.victims {
            let Some(holder) = pass.index.holders.get(victim) else { continue };
            let Some(other) = pass.snapshot.jobs.get(victim) else { continue };
            if holder.leaving || holder.evicting || other.attempts != *attempt {
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
    if eviction.is_due(victim, pass.now) {
        suspend(pass, victim.id, &eviction);
    } else {
        pass.leaving.insert(victim.id);
        pass.wake(deadline);
    }
}

/// How long a victim may take for its next checkpoint: a quarter more than it says it takes from one to the next,
/// nothing if it never saves itself.
fn patience(pass: &Pass<'_>, victim: &Job) -> Span {
    let seen = victim.checkpoint.as_ref().is_some_and(|c| c.attempt == victim.attempts);
    match victim.request.checkpoint_every {
        Some(every) => Span(every.0 / 4 * 5).min(pass.snapshot.policy.patience),
        None if seen => pass.snapshot.policy.patience,
        None => Span(0),
    }
}

/// Slots of leaving gangs that nobody was promised: free soon, without anybody's leave.
pub(super) fn free_soon(pass: &Pass<'_>) -> Vec<(usize, Slots)> {
    let mut soon = Vec::new();
    for (id, holder) in &pass.index.holders {
        if !holder.leaving {
            continue;
        }
        let Some(gang) = pass.snapshot.jobs.get(id).and_then(|j| j.phase.gang()) else { continue };
        for worker in &gang.workers {
            let (Some(node), Some(i)) = (pass.snapshot.nodes.get(&worker.node), pass.grid.index.get(&worker.node))
            else {
                continue;
            };
            let slots = worker.slots.and(pass.usable(node)).without(node.claimed);
            if !slots.is_empty() {
                soon.push((*i, slots));
            }
        }
    }
    soon
}
