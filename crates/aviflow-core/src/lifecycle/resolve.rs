//! What follows once a gang's last process is gone: the end, or the queue, and which counter it costs.

use super::{Action, Effect, MomentKind, PLATFORM_CODE, REFUSALS, TIME_LIMIT_CODE, back_off, fault, leave};
use crate::health::decide;
use crate::model::{Cause, Failure, Intent, Job, Phase, Refusal, Stopping};
use crate::time::{Span, Time};

fn succeed(job: &mut Job, fx: &mut Vec<Effect>) {
    fx.push(Effect::Moment(MomentKind::Succeeded));
    job.phase = Phase::Succeeded;
}

pub(super) fn fail(job: &mut Job, failure: Failure, fx: &mut Vec<Effect>) {
    fx.push(Effect::Moment(MomentKind::Failed { failure: failure.clone() }));
    job.phase = Phase::Failed(failure);
}

/// What follows once the last process of the gang is gone.
pub(super) fn resolve(job: &mut Job, now: Time, fx: &mut Vec<Effect>) {
    let Some(gang) = job.phase.gang() else { return };
    if !gang.all_gone() || fault::stays(job, now, fx) {
        return;
    }
    let Some(gang) = job.phase.gang() else { return };
    let ended = gang.workers.iter().filter_map(|w| w.ended).max().unwrap_or(now);
    let had = i64::from(gang.gpu_count()) * ended.since(gang.placed).0;
    let nodes = gang.nodes().collect();
    fx.push(Effect::Release { gpus: gang.gpus(), at: ended });
    fx.push(Effect::Act(Action::Remove { attempt: gang.attempt }));
    let short = gang.up.is_none_or(|up| ended.since(up) < Span::minutes(1));
    let finished = gang.workers.iter().all(|w| w.finished(job.request.ranks_per_node));
    job.gpu_time += Span(had);
    job.last_nodes = nodes;
    match job.phase.clone() {
        Phase::Starting(_) | Phase::Running(_) => {
            leave(job, ended);
            succeed(job, fx);
        }
        // It was done before it could be stopped: there is nothing to run again.
        Phase::Suspending(_)
        | Phase::Stopping(Stopping {
            intent: Intent::TimeLimit | Intent::Unready { .. } | Intent::Refused { .. },
            ..
        }) if finished => {
            succeed(job, fx);
        }
        Phase::Suspending(suspending) => {
            job.counters.suspensions += 1;
            let wait = back_off(job.counters.suspensions - 1);
            queue_again(job, (suspending.asked && short).then_some(now + wait), fx);
        }
        Phase::Stopping(stopping) => match stopping.intent {
            Intent::Cancel { by } => {
                fx.push(Effect::Moment(MomentKind::Cancelled { by: by.clone() }));
                job.phase = Phase::Cancelled { by };
            }
            Intent::TimeLimit => {
                let limit = job.request.time_limit.unwrap_or_default();
                fail(job, Failure { cause: Cause::TimeLimit { limit }, exit_code: TIME_LIMIT_CODE, at: now }, fx);
            }
            Intent::Failure(failure) | Intent::NodeFailure(failure) if stopping.kept_until.is_some() => {
                fail(job, failure, fx);
            }
            Intent::Failure(failure) | Intent::NodeFailure(failure) => {
                let verdict = fault::judge(job, &stopping.gang, failure);
                fault::note(job, &stopping.gang, &verdict, now, fx);
                let charged = verdict.decision.charged;
                let n = if charged { job.counters.failures } else { job.counters.node_failures };
                if verdict.decision.action == decide::Action::Stop {
                    fail(job, verdict.failure, fx);
                } else {
                    let wait = back_off(n.saturating_sub(1));
                    queue_again(job, (short || charged).then_some(now + wait), fx);
                }
            }
            Intent::Requeue => {
                job.counters.suspensions += 1;
                let wait = back_off(job.counters.suspensions - 1);
                queue_again(job, short.then_some(now + wait), fx);
            }
            Intent::Unready { .. } => {
                job.counters.unready += 1;
                let wait = back_off(job.counters.unready - 1);
                queue_again(job, Some(now + wait), fx);
            }
            Intent::Refused { refusal, lasting } => {
                job.counters.unready += 1;
                job.refusals += u32::from(lasting);
                if job.refusals >= REFUSALS {
                    let Refusal { attempt, worker, node, reason } = refusal;
                    let reason = format!("{reason} ({REFUSALS} starts in a row were refused so)");
                    let cause = Cause::Launch { attempt, worker, node, reason };
                    fail(job, Failure { cause, exit_code: PLATFORM_CODE, at: now }, fx);
                } else {
                    let wait = back_off(job.counters.unready - 1);
                    queue_again(job, Some(now + wait), fx);
                    job.refused = Some(refusal);
                }
            }
        },
        Phase::Queued | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => {}
    }
}

fn queue_again(job: &mut Job, not_before: Option<Time>, fx: &mut Vec<Effect>) {
    job.phase = Phase::Queued;
    job.not_before = not_before;
    fx.push(Effect::Moment(MomentKind::QueuedAgain { not_before }));
}
