//! What a worker's event does to its gang.

use super::resolve::resolve;
use super::{
    Action, Effect, FAILED_GRACE, LAUNCH_CODE, MomentKind, PLATFORM_CODE, REQUEUE_CODE, WorkerEvent, leave, stop,
    stop_ranks,
};
use crate::gpus::GpuSet;
use crate::ledger::GpuState;
use crate::model::{Cause, Checkpoint, Exit, Failure, Gang, Intent, Job, Phase, Refusal, Suspending, WorkerState};
use crate::time::{Span, Time};

/// The caller has checked that the attempt, the epoch and the worker's number fit.
pub(super) fn step(job: &mut Job, index: usize, event: &WorkerEvent, at: Time, now: Time, fx: &mut Vec<Effect>) {
    if worker_is_gone(job, index) {
        return;
    }
    match event {
        WorkerEvent::Ready { address } => {
            let Some(gang) = gang_mut(job) else { return };
            let worker = &mut gang.workers[index];
            if worker.state == WorkerState::Launched {
                worker.state = WorkerState::Ready;
                worker.address = Some(address.clone());
            }
            // Of one that was found when the store was rebuilt, it is not known.
            worker.address.get_or_insert_with(|| address.clone());
            confirm(job, fx);
        }
        WorkerEvent::Up => up(job, index, at, fx),
        WorkerEvent::LaunchFailed { reason } => {
            let Some(gang) = job.phase.gang() else { return };
            let cause = Cause::Launch {
                attempt: gang.attempt,
                worker: index_u32(index),
                node: gang.workers[index].node,
                reason: reason.clone(),
            };
            failing(job, Failure { cause, exit_code: LAUNCH_CODE, at }, false, at, fx);
        }
        WorkerEvent::Refused { reason, lasting } => refused(job, index, reason, *lasting, at, fx),
        WorkerEvent::Leaving { reason, within } => leaving(job, index, reason, *within, now, fx),
        WorkerEvent::RankExited { rank, code, signal, stopping, last_lines, last_step, why } => {
            reached(job, *last_step);
            let (last_lines, why) = (last_lines.clone(), why.clone());
            let exit = Exit { code: *code, signal: *signal, at, last_lines, stopping: *stopping, why };
            rank_exited(job, index, *rank, exit, fx);
        }
        WorkerEvent::FirstStep { step } => first_step(job, *step, at, fx),
        WorkerEvent::CaughtUp { step } => {
            if let Phase::Running(gang) = &mut job.phase
                && gang.repeating
            {
                gang.repeating = false;
                fx.push(Effect::Moment(MomentKind::CaughtUp { step: *step }));
                post(gang, GpuState::Productive, at, fx);
            }
        }
        WorkerEvent::CheckpointBegun { .. } => {
            if let Phase::Running(gang) = &job.phase {
                post(gang, GpuState::Checkpointing, at, fx);
            }
        }
        WorkerEvent::CheckpointGoesOn { .. } => checkpoint_over(job, at, fx),
        WorkerEvent::CheckpointComplete { step, path } => {
            checkpoint_over(job, at, fx);
            checkpoint(job, *step, path, at, fx);
        }
        WorkerEvent::CheckpointFailed { step } => {
            checkpoint_over(job, at, fx);
            fx.push(Effect::Moment(MomentKind::CheckpointFailed { step: *step }));
        }
        WorkerEvent::Facts { values } => fx.push(Effect::Moment(MomentKind::Facts { values: values.clone() })),
        WorkerEvent::Gone { ranks, reason, last_step, next_port } => {
            reached(job, *last_step);
            for (rank, end) in ranks {
                let exit = Exit {
                    code: end.code,
                    signal: end.signal,
                    at: at - end.before,
                    last_lines: end.last_lines.clone(),
                    stopping: end.stopping,
                    why: end.why.clone(),
                };
                rank_exited(job, index, *rank, exit, fx);
            }
            if let Some(gang) = gang_mut(job) {
                gang.workers[index].next_port = *next_port;
            }
            gone(job, index, reason.as_deref(), at, now, fx);
        }
        WorkerEvent::Lost { reason } => lost(job, index, reason, at, now, fx),
    }
}

fn worker_is_gone(job: &Job, index: usize) -> bool {
    job.phase.gang().is_none_or(|g| g.workers[index].state == WorkerState::Gone)
}

fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn gang_mut(job: &mut Job) -> Option<&mut Gang> {
    match &mut job.phase {
        Phase::Starting(gang) | Phase::Running(gang) => Some(gang),
        Phase::Suspending(s) => Some(&mut s.gang),
        Phase::Stopping(s) => Some(&mut s.gang),
        Phase::Queued | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => None,
    }
}

pub(super) fn post(gang: &Gang, state: GpuState, at: Time, fx: &mut Vec<Effect>) {
    fx.push(Effect::Post { gpus: gang.gpus(), state, at, attempt: gang.attempt });
}

/// Gives the word to start once every worker is ready. Given again to a worker
/// that reports ready again, since the word may have been lost with a crash.
pub(super) fn confirm(job: &Job, fx: &mut Vec<Effect>) {
    fx.extend(word(job).map(Effect::Act));
}

pub(super) fn word(job: &Job) -> Option<Action> {
    let Phase::Starting(gang) = &job.phase else { return None };
    if gang.workers.iter().any(|w| w.state < WorkerState::Ready) {
        return None;
    }
    let rank0 = gang.workers.first()?.address.clone()?;
    Some(Action::Confirm { attempt: gang.attempt, epoch: gang.epoch, rank0, best_step: job.best_step })
}

fn up(job: &mut Job, index: usize, at: Time, fx: &mut Vec<Effect>) {
    let Some(gang) = gang_mut(job) else { return };
    let worker = &mut gang.workers[index];
    worker.state = worker.state.max(WorkerState::Up);
    running_if_all_up(job, at, fx);
}

/// A worker whose ranks have all ended with 0 was up, even if that was not heard of.
fn running_if_all_up(job: &mut Job, at: Time, fx: &mut Vec<Effect>) {
    let ranks = job.request.ranks_per_node;
    if let Phase::Starting(gang) = &mut job.phase
        && gang.workers.iter().all(|w| w.state >= WorkerState::Up)
    {
        let at = at.max(gang.began());
        gang.up = Some(at);
        job.startup = Some(at.since(gang.began()));
        let ranks = ranks * index_u32(gang.workers.len());
        fx.push(Effect::Moment(MomentKind::Running { ranks }));
        post(gang, GpuState::Productive, at, fx);
        job.refusals = 0;
        job.phase = Phase::Running(gang.clone());
    }
}

/// Until the first step the ranks load and compile: that time is Starting, which
/// becomes known only now. A job that never reports a step is taken at its word.
fn first_step(job: &mut Job, step: u64, at: Time, fx: &mut Vec<Effect>) {
    let Phase::Running(gang) = &mut job.phase else { return };
    if gang.stepped {
        return;
    }
    gang.stepped = true;
    job.startup = Some(at.since(gang.began()));
    gang.repeating = job.best_step.is_some_and(|best| step <= best);
    fx.push(Effect::Moment(MomentKind::FirstStep { step }));
    post(gang, GpuState::Starting, gang.up.unwrap_or(at), fx);
    let state = if gang.repeating { GpuState::Repeating } else { GpuState::Productive };
    post(gang, state, at, fx);
}

fn checkpoint_over(job: &Job, at: Time, fx: &mut Vec<Effect>) {
    if let Phase::Running(gang) = &job.phase {
        let state = if gang.repeating { GpuState::Repeating } else { GpuState::Productive };
        post(gang, state, at, fx);
    }
}

fn checkpoint(job: &mut Job, step: u64, path: &str, at: Time, fx: &mut Vec<Effect>) {
    reached(job, Some(step));
    let attempt = job.attempts;
    // Whoever saves itself now was asked to stop.
    job.saves_on_request |= matches!(job.phase, Phase::Suspending(_) | Phase::Stopping(_));
    let newer = job.checkpoint.as_ref().is_none_or(|c| (c.attempt, c.step) < (attempt, step));
    // It gets on: what happened before is over.
    if job.checkpoint.as_ref().is_none_or(|c| c.step < step) {
        job.past.checkpoint();
        job.avoid.clear();
    }
    if newer {
        job.checkpoint = Some(Checkpoint { step, path: path.to_owned(), at, attempt });
        fx.push(Effect::Moment(MomentKind::CheckpointComplete { step, path: path.to_owned() }));
    }
}

fn reached(job: &mut Job, step: Option<u64>) {
    job.best_step = job.best_step.max(step);
}

fn rank_exited(job: &mut Job, index: usize, rank: u32, exit: Exit, fx: &mut Vec<Effect>) {
    let Some(gang) = gang_mut(job) else { return };
    let worker = &mut gang.workers[index];
    if worker.exits.contains_key(&rank) {
        return;
    }
    worker.exits.insert(rank, exit.clone());
    let (attempt, node, at) = (gang.attempt, worker.node, exit.at);
    if exit.code == 0 || exit.stopping {
        return;
    }
    if exit.code == REQUEUE_CODE {
        if matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
            fx.push(Effect::Moment(MomentKind::RequeueAsked { rank }));
            stop(job, Intent::Requeue, FAILED_GRACE, format!("rank {rank} asked to be queued again"), at, fx);
        }
        return;
    }
    let failure = Failure {
        exit_code: exit.code,
        at,
        cause: Cause::Rank { attempt, rank, worker: index_u32(index), node, exit },
    };
    failing(job, failure, false, at, fx);
}

/// Begins to stop a gang that has failed; where it already is being stopped for
/// a failure, the one that happened first is the one to report.
pub(super) fn failing(job: &mut Job, failure: Failure, node_failure: bool, at: Time, fx: &mut Vec<Effect>) {
    match &mut job.phase {
        Phase::Starting(_) | Phase::Running(_) => {
            fx.push(Effect::Moment(MomentKind::Failing { failure: failure.clone() }));
            let reason = crate::explain::failure_short(&failure);
            let intent = if node_failure { Intent::NodeFailure(failure) } else { Intent::Failure(failure) };
            stop(job, intent, FAILED_GRACE, reason, at, fx);
        }
        Phase::Stopping(s) => {
            if let Intent::Failure(first) = &mut s.intent
                && !node_failure
                && failure.at < first.at
            {
                fx.push(Effect::Moment(MomentKind::Failing { failure: failure.clone() }));
                *first = failure;
            }
        }
        Phase::Queued | Phase::Suspending(_) | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => {}
    }
}

/// A start that fails, and not by what the application did. A worker that was up is lost with its end, which follows.
fn refused(job: &mut Job, index: usize, reason: &str, lasting: bool, at: Time, fx: &mut Vec<Effect>) {
    let Phase::Starting(gang) = &job.phase else { return };
    let worker = &gang.workers[index];
    if worker.state >= WorkerState::Up {
        return;
    }
    let (attempt, node, number) = (gang.attempt, worker.node, index_u32(index));
    let refusal = Refusal { attempt, worker: number, node, reason: reason.to_owned() };
    fx.push(Effect::Moment(MomentKind::Refused { worker: number, node, reason: reason.to_owned() }));
    stop(
        job,
        Intent::Refused { refusal, lasting },
        FAILED_GRACE,
        format!("worker {number} was refused: {reason}"),
        at,
        fx,
    );
}

/// The gang saves itself in the time that the worker is given, and leaves.
fn leaving(job: &mut Job, index: usize, reason: &str, within: Option<Span>, now: Time, fx: &mut Vec<Effect>) {
    let (Phase::Starting(gang) | Phase::Running(gang)) = &job.phase else { return };
    let (worker, node) = (index_u32(index), gang.workers[index].node);
    let grace = within.map_or(job.request.grace, |within| within.min(job.request.grace));
    let Some(gang) = leave(job, now) else { return };
    stop_ranks(&gang, grace, format!("the cluster asks worker {worker} to leave: {reason}"), now, fx);
    fx.push(Effect::Moment(MomentKind::AskedToLeave { worker, node, reason: reason.to_owned() }));
    job.turned_out = None;
    job.phase = Phase::Suspending(Suspending { gang, by: "the cluster".to_owned(), asked: true });
}

fn gone(job: &mut Job, index: usize, reason: Option<&str>, at: Time, now: Time, fx: &mut Vec<Effect>) {
    let ranks = job.request.ranks_per_node;
    let Some(gang) = gang_mut(job) else { return };
    let attempt = gang.attempt;
    let worker = &mut gang.workers[index];
    worker.state = WorkerState::Gone;
    worker.ended = Some(at);
    let node = worker.node;
    if worker.finished(ranks) {
        running_if_all_up(job, at, fx);
    } else if matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
        // The ranks did not end by themselves, and nobody here asked them to stop.
        let reason = reason.unwrap_or("its ranks ended without a report").to_owned();
        let cause = Cause::WorkerLost { attempt, worker: index_u32(index), node, reason };
        failing(job, Failure { cause, exit_code: PLATFORM_CODE, at }, true, at, fx);
    }
    resolve(job, now, fx);
}

fn lost(job: &mut Job, index: usize, reason: &str, at: Time, now: Time, fx: &mut Vec<Effect>) {
    let ranks = job.request.ranks_per_node;
    let Some(gang) = gang_mut(job) else { return };
    let attempt = gang.attempt;
    let worker = &mut gang.workers[index];
    worker.next_port = None;
    worker.state = WorkerState::Gone;
    worker.ended = Some(now);
    let node = worker.node;
    if worker.finished(ranks) {
        running_if_all_up(job, at, fx);
    } else {
        // Between the last sign of life and now nobody knows what its GPUs did.
        let gpus = GpuSet::of(node, worker.slots);
        if at < now {
            fx.push(Effect::Post { gpus, state: GpuState::Unknown, at, attempt });
        }
        let cause = Cause::WorkerLost { attempt, worker: index_u32(index), node, reason: reason.to_owned() };
        failing(job, Failure { cause, exit_code: PLATFORM_CODE, at }, true, now, fx);
    }
    resolve(job, now, fx);
}
