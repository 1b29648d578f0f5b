//! What the plan promises to a waiting job or asks of a running one, and what people change of both.

use super::{Change, Effect, MomentKind};
use crate::model::{Claim, Ending, Eviction, Job, JobId, Phase};

pub(super) fn claim(job: &mut Job, claim: &Claim, fx: &mut Vec<Effect>) {
    if job.phase != Phase::Queued || job.claim.is_some() {
        return;
    }
    let victims = u32::try_from(claim.victims.len()).unwrap_or(u32::MAX);
    let gpus = claim.placement.gpus();
    fx.push(Effect::Moment(MomentKind::Claimed { gpus: gpus.count(), victims, cause: claim.cause }));
    fx.push(Effect::Claim(gpus));
    job.claim = Some(claim.clone());
}

/// Without a reason nobody needs to be told: the job got what it was promised, or ended.
pub(super) fn unclaim(job: &mut Job, reason: Option<&String>, fx: &mut Vec<Effect>) {
    let Some(claim) = job.claim.take() else { return };
    fx.push(Effect::Unclaim(claim.placement.gpus()));
    if let Some(reason) = reason {
        fx.push(Effect::Moment(MomentKind::Unclaimed { reason: reason.clone() }));
    }
}

pub(super) fn evict(job: &mut Job, eviction: &Eviction, fx: &mut Vec<Effect>) {
    if !matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) || job.eviction.is_some() {
        return;
    }
    let beneficiary = eviction.beneficiary.as_ref().map(|b| b.key.clone());
    fx.push(Effect::Moment(MomentKind::Evicting { cause: eviction.cause, beneficiary, deadline: eviction.deadline }));
    job.eviction = Some(eviction.clone());
}

pub(super) fn spare(job: &mut Job, fx: &mut Vec<Effect>) {
    if job.eviction.take().is_some() {
        fx.push(Effect::Moment(MomentKind::Spared));
    }
}

pub(super) fn hold(job: &mut Job, by: &str, fx: &mut Vec<Effect>) {
    if job.held.is_some() || job.phase.is_terminal() {
        return;
    }
    let reason = format!("held by {by}");
    unclaim(job, Some(&reason), fx);
    job.held = Some(by.to_owned());
    fx.push(Effect::Moment(MomentKind::Held { by: by.to_owned() }));
}

pub(super) fn release(job: &mut Job, by: &str, fx: &mut Vec<Effect>) {
    if job.held.take().is_some() {
        fx.push(Effect::Moment(MomentKind::Released { by: by.to_owned() }));
    }
}

pub(super) fn update(job: &mut Job, change: &Change, by: &str, reason: Option<&String>, fx: &mut Vec<Effect>) {
    let before = job.request.clone();
    if let Some(priority) = change.priority {
        job.request.priority = priority;
    }
    if let Some(limit) = change.time_limit {
        job.request.time_limit = limit;
    }
    if let Some(queue) = &change.queue {
        job.request.queue.clone_from(queue);
    }
    if job.request == before {
        return;
    }
    // By what right it was promised something may be another now.
    unclaim(job, Some(&format!("changed by {by}")), fx);
    let (by, reason, change) = (by.to_owned(), reason.cloned(), change.clone());
    fx.push(Effect::Moment(MomentKind::Updated { by, reason, change }));
}

pub(super) fn dependency(job: &mut Job, other: JobId, ending: Ending, fx: &mut Vec<Effect>) {
    for dependency in job.after.iter_mut().filter(|d| d.job == other && d.met.is_none()) {
        let met = dependency.on == Ending::Ended || dependency.on == ending;
        dependency.met = Some(met);
        let (job, name, on) = (dependency.job, dependency.name.clone(), dependency.on);
        fx.push(Effect::Moment(if met {
            MomentKind::DependencyMet { job, name }
        } else {
            MomentKind::DependencyFailed { job, name, on }
        }));
    }
}
