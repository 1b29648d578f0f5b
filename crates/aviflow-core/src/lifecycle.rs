//! What an event does to a job: `step(job, event) -> (job, effects)`.
//!
//! The phases and their ways out are the table "A job's life" of the design.
//! Observations may come twice, late or in another order, so an event that does
//! not fit the job's attempt, epoch or phase changes nothing.
//!
//! Invariants:
//! - a gang holds all of its GPUs until the last process of its last worker is gone;
//! - ranks start only by [`Action::Confirm`], once every worker is ready;
//! - only application failures spend retries;
//! - a job that ended never changes again.

mod advance;
mod fault;
mod moment;
mod resolve;
mod waiting;
mod worker;

pub use advance::{Advance, advance, quarantine_pool, set_condition, set_quarantined};
pub use moment::{Moment, MomentKind};

use crate::gpus::GpuSet;
use crate::health::News;
use crate::health::quarantine::Seen;
use crate::ledger::GpuState;
use crate::model::{
    Address, Cause, Claim, Ending, Eviction, EvictionCause, Failure, Gang, Intent, Job, JobId, Phase, Placement,
    Stopping, Suspending, TurnedOut, Why, Worker, WorkerState,
};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A gang that is not up after this long gives its GPUs back.
pub const START_LIMIT: Span = Span::minutes(10);

/// The grace of the other ranks once one has failed: what they could still save
/// belongs to a step that cannot be completed.
pub const FAILED_GRACE: Span = Span::seconds(2);

/// Starts in a row that are refused for what the job asks for, after which it fails.
pub const REFUSALS: u32 = 5;

/// The exit code with which a job asks to be queued again (`EX_TEMPFAIL`).
pub const REQUEUE_CODE: i32 = 75;
/// The exit code of a job that used up its time limit, as `timeout` reports it.
pub const TIME_LIMIT_CODE: i32 = 124;
/// The exit code for faults of the platform itself.
pub const PLATFORM_CODE: i32 = 125;

/// The exit code of a program that could not be started, as a shell reports it.
pub const LAUNCH_CODE: i32 = 127;

/// What may happen to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// The plan found a place.
    Place {
        /// Where.
        placement: Placement,
    },
    /// A person or the plan wants the GPUs back; the job waits again.
    Suspend {
        /// Who.
        by: String,
        /// Whether it waits until it is released.
        hold: bool,
        /// For whom, where the plan wants it.
        turned_out: Option<TurnedOut>,
    },
    /// GPUs are promised to it while their holders leave.
    Claim {
        /// Which.
        claim: Claim,
    },
    /// Nothing is promised to it any more.
    Unclaim {
        /// Why.
        reason: String,
    },
    /// It is to give its GPUs up soon.
    Evict {
        /// Why, and until when.
        eviction: Eviction,
    },
    /// It may keep its GPUs after all.
    Spare,
    /// A person keeps it from starting.
    Hold {
        /// Who.
        by: String,
    },
    /// A person lets it start again.
    Release {
        /// Who.
        by: String,
    },
    /// A person changes what may be changed.
    Update {
        /// What.
        change: Change,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A job that it waits for has ended.
    DependencyEnded {
        /// Which.
        job: JobId,
        /// How: [`Ending::Succeeded`] or [`Ending::Failed`].
        ending: Ending,
    },
    /// A person ends it.
    Cancel {
        /// Who.
        by: String,
    },
    /// The environment cannot be made.
    EnvironmentFailed {
        /// Why.
        reason: String,
    },
    /// A deadline of the job may have passed, see [`deadline`].
    Deadline,
    /// Something happened to a worker.
    Worker {
        /// The attempt.
        attempt: u32,
        /// The epoch; 0 before the first start.
        epoch: u32,
        /// The worker.
        worker: u32,
        /// What.
        event: WorkerEvent,
    },
    /// The watch over its gang found something wrong, or says what it suspects.
    Found {
        /// The attempt.
        attempt: u32,
        /// The epoch.
        epoch: u32,
        /// What.
        news: News,
    },
}

/// What of a job may be changed after its submission; the document stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Change {
    /// The priority.
    pub priority: Option<i32>,
    /// The time limit; `Some(None)` takes it away.
    pub time_limit: Option<Option<Span>>,
    /// The queue.
    pub queue: Option<String>,
}

/// What may happen to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WorkerEvent {
    /// Its agent is connected and waits for the word to start.
    Ready {
        /// Where rank 0 could listen on its node.
        address: Address,
    },
    /// Its ranks have started.
    Up,
    /// Its ranks could not be started, or it could not for what only the job can mend. A failure of the application.
    LaunchFailed {
        /// Why.
        reason: String,
    },
    /// The cluster would not take it, or could not make it, and no rank of it ran. Nothing that the application
    /// did: the gang waits again, and no retry is spent. `Gone` follows once nothing of it is left.
    Refused {
        /// Why, in words that are the same the next time.
        reason: String,
        /// Whether it lies in what the job asks for (an image or a volume that is not there), so that another
        /// time or place hardly helps: a number of these in a row fails the job.
        lasting: bool,
    },
    /// The cluster asks it to leave while it runs. The gang saves itself, leaves and waits again in its old place.
    Leaving {
        /// Why.
        reason: String,
        /// How long it has until it is killed; none if the job's own grace is granted.
        within: Option<Span>,
    },
    /// A rank ended.
    RankExited {
        /// The rank.
        rank: u32,
        /// The exit code, or 128 + the signal.
        code: i32,
        /// The signal.
        signal: Option<i32>,
        /// Whether its agent had begun to stop the ranks before.
        stopping: bool,
        /// Its last lines.
        last_lines: Vec<String>,
        /// The highest step it reported.
        last_step: Option<u64>,
        /// Why, as far as it is known.
        why: Option<Why>,
    },
    /// The first training step of the epoch.
    FirstStep {
        /// The step.
        step: u64,
    },
    /// The training passed the highest step of all earlier attempts.
    CaughtUp {
        /// The step.
        step: u64,
    },
    /// The training stands still for a checkpoint.
    CheckpointBegun {
        /// The step.
        step: u64,
    },
    /// The training goes on, whatever becomes of the checkpoint.
    CheckpointGoesOn {
        /// The step.
        step: u64,
    },
    /// A checkpoint is complete.
    CheckpointComplete {
        /// The step.
        step: u64,
        /// The path.
        path: String,
    },
    /// A checkpoint will not be complete.
    CheckpointFailed {
        /// The step.
        step: u64,
    },
    /// The training named what reproduces it, or its results.
    Facts {
        /// Names and values.
        values: BTreeMap<String, String>,
    },
    /// Its last process is gone, and its agent said how each rank ended.
    Gone {
        /// By rank: the code, the signal, the time before the worker's end, the last lines.
        ranks: BTreeMap<u32, RankEnd>,
        /// Why its agent stopped the ranks by itself, if it did.
        reason: Option<String>,
        /// The highest step of any rank.
        last_step: Option<u64>,
        /// Where its agent waits for another epoch, the port on which rank 0 of that could listen.
        next_port: Option<u16>,
    },
    /// Its agent is gone without a word, and it is certain that none of its
    /// processes runs any more. The event's time is the last sign of life.
    Lost {
        /// What is known.
        reason: String,
    },
}

/// How a rank ended, in a worker's last report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RankEnd {
    /// The exit code, or 128 + the signal.
    pub code: i32,
    /// The signal.
    pub signal: Option<i32>,
    /// Whether its agent had begun to stop the ranks before.
    pub stopping: bool,
    /// Time between its end and the worker's.
    pub before: Span,
    /// Its last lines.
    pub last_lines: Vec<String>,
    /// Why, as far as it is known.
    pub why: Option<Why>,
}

/// What a step asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Tell the cluster.
    Act(Action),
    /// These GPUs belong to the attempt from now on.
    Hold(GpuSet),
    /// These GPUs are promised to the job from now on.
    Claim(GpuSet),
    /// These GPUs are promised to nobody from now on.
    Unclaim(GpuSet),
    /// Their time is of this kind from the given instant.
    Post {
        /// Which.
        gpus: GpuSet,
        /// What kind.
        state: GpuState,
        /// From when.
        at: Time,
        /// The attempt they belong to.
        attempt: u32,
    },
    /// These GPUs belong to nobody from now on; their last process was gone at the given instant.
    Release {
        /// Which.
        gpus: GpuSet,
        /// Since when nobody used them.
        at: Time,
    },
    /// A node or GPU failed, which may keep it from work.
    Blame(Seen),
    /// Something that people want to know.
    Moment(MomentKind),
}

/// What the cluster is told about one job.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start the workers, but no rank.
    Launch {
        /// The attempt.
        attempt: u32,
        /// Where.
        placement: Placement,
    },
    /// Start the ranks.
    Confirm {
        /// The attempt.
        attempt: u32,
        /// The epoch.
        epoch: u32,
        /// Where rank 0 listens.
        rank0: Address,
        /// The highest step so far.
        best_step: Option<u64>,
    },
    /// Stop the ranks.
    Stop {
        /// The attempt.
        attempt: u32,
        /// The epoch whose ranks are meant.
        epoch: u32,
        /// SIGTERM to SIGKILL.
        grace: Span,
        /// Why.
        reason: String,
    },
    /// Remove what is left of the attempt.
    Remove {
        /// The attempt.
        attempt: u32,
    },
}

/// The instant at which [`Event::Deadline`] would change the job.
#[must_use]
pub fn deadline(job: &Job) -> Option<Time> {
    match &job.phase {
        Phase::Starting(gang) => Some(gang.began() + START_LIMIT),
        Phase::Running(gang) => {
            let limit = job.request.time_limit?;
            let left = Span((limit.0 - job.ran.0).max(0));
            gang.up.map(|up| up + left)
        }
        Phase::Stopping(stopping) => stopping.kept_until,
        Phase::Queued | Phase::Suspending(_) | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => None,
    }
}

/// The word to start, where every worker of a gang that starts is ready.
#[must_use]
pub fn confirm_again(job: &Job) -> Option<Action> {
    worker::word(job)
}

/// The pause before the `n`th repetition: 1 s, 2 s, 4 s, … 256 s.
#[must_use]
pub fn back_off(n: u32) -> Span {
    Span::seconds(1 << n.min(8))
}

/// Applies an event to a job. `at` is when it happened, `now` when it became
/// known; `at` is never later than `now`.
#[must_use]
pub fn step(mut job: Job, event: &Event, at: Time, now: Time) -> (Job, Vec<Effect>) {
    let mut fx = Vec::new();
    match event {
        Event::Place { placement } => place(&mut job, placement, now, &mut fx),
        Event::Suspend { by, hold, turned_out } => suspend(&mut job, by, *hold, turned_out.as_ref(), now, &mut fx),
        Event::Claim { claim } => waiting::claim(&mut job, claim, &mut fx),
        Event::Unclaim { reason } => waiting::unclaim(&mut job, Some(reason), &mut fx),
        Event::Evict { eviction } => waiting::evict(&mut job, eviction, &mut fx),
        Event::Spare => waiting::spare(&mut job, &mut fx),
        Event::Hold { by } => waiting::hold(&mut job, by, &mut fx),
        Event::Release { by } => waiting::release(&mut job, by, &mut fx),
        Event::Update { change, by, reason } => waiting::update(&mut job, change, by, reason.as_ref(), &mut fx),
        Event::DependencyEnded { job: other, ending } => waiting::dependency(&mut job, *other, *ending, &mut fx),
        Event::Cancel { by } => cancel(&mut job, by, now, &mut fx),
        Event::EnvironmentFailed { reason } => {
            if job.phase == Phase::Queued {
                waiting::unclaim(&mut job, None, &mut fx);
                let cause = Cause::Environment { reason: reason.clone() };
                resolve::fail(&mut job, Failure { cause, exit_code: PLATFORM_CODE, at: now }, &mut fx);
            }
        }
        Event::Deadline => {
            if deadline(&job).is_some_and(|d| d <= now) {
                deadline_passed(&mut job, now, &mut fx);
            }
        }
        Event::Worker { attempt, epoch, worker, event } => {
            let fits = job.phase.gang().is_some_and(|g| {
                g.attempt == *attempt && (*worker as usize) < g.workers.len() && (*epoch == 0 || *epoch == g.epoch)
            });
            if fits {
                worker::step(&mut job, *worker as usize, event, at, now, &mut fx);
            }
        }
        Event::Found { attempt, epoch, news } => {
            let fits = |g: &Gang| (g.attempt, g.epoch) == (*attempt, *epoch);
            if matches!(&job.phase, Phase::Running(gang) if fits(gang)) {
                fault::found(&mut job, news, now, &mut fx);
            }
        }
    }
    (job, fx)
}

fn place(job: &mut Job, placement: &Placement, now: Time, fx: &mut Vec<Effect>) {
    if job.phase != Phase::Queued || placement.0.is_empty() {
        return;
    }
    waiting::unclaim(job, None, fx);
    job.attempts += 1;
    job.not_before = None;
    job.refused = None;
    let workers = placement
        .0
        .iter()
        .map(|(node, slots)| Worker {
            node: *node,
            slots: *slots,
            state: WorkerState::Launched,
            address: None,
            exits: BTreeMap::new(),
            ended: None,
            next_port: None,
        })
        .collect();
    let gang = Gang {
        attempt: job.attempts,
        epoch: 1,
        placed: now,
        up: None,
        workers,
        stepped: false,
        repeating: false,
        again: None,
        xids: Vec::new(),
    };
    let gpus = gang.gpus();
    fx.push(Effect::Hold(gpus.clone()));
    fx.push(Effect::Moment(MomentKind::Placed { nodes: gang.nodes().collect(), gpus: gpus.count() }));
    fx.push(Effect::Post { gpus, state: GpuState::Starting, at: now, attempt: gang.attempt });
    fx.push(Effect::Act(Action::Launch { attempt: gang.attempt, placement: placement.clone() }));
    job.phase = Phase::Starting(gang);
}

fn suspend(job: &mut Job, by: &str, hold: bool, turned_out: Option<&TurnedOut>, now: Time, fx: &mut Vec<Effect>) {
    // What waits, or will wait again, holds nothing to give back: it only must not start.
    if hold && !matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
        waiting::hold(job, by, fx);
    }
    if !matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
        return;
    }
    if let Some(gang) = leave(job, now) {
        stop_ranks(&gang, job.request.grace, format!("suspended by {by}"), now, fx);
        fx.push(Effect::Moment(MomentKind::Suspending { by: by.to_owned() }));
        if hold {
            job.held = Some(by.to_owned());
        }
        job.turned_out = turned_out.cloned();
        if turned_out.is_some_and(|t| t.cause != EvictionCause::Turn) {
            job.preempted += 1;
        }
        job.phase = Phase::Suspending(Suspending { gang, by: by.to_owned(), asked: false });
    }
}

fn cancel(job: &mut Job, by: &str, now: Time, fx: &mut Vec<Effect>) {
    let intent = Intent::Cancel { by: by.to_owned() };
    match &mut job.phase {
        Phase::Queued => {
            waiting::unclaim(job, None, fx);
            job.phase = Phase::Cancelled { by: by.to_owned() };
            fx.push(Effect::Moment(MomentKind::Cancelled { by: by.to_owned() }));
        }
        Phase::Starting(_) | Phase::Running(_) => {
            fx.push(Effect::Moment(MomentKind::Cancelling { by: by.to_owned() }));
            let grace = job.request.grace;
            stop(job, intent, grace, format!("cancelled by {by}"), now, fx);
        }
        Phase::Suspending(s) => {
            let gang = s.gang.clone();
            fx.push(Effect::Moment(MomentKind::Cancelling { by: by.to_owned() }));
            job.phase = Phase::Stopping(Stopping { gang, intent, kept_until: None });
        }
        // It has failed, and somebody has looked around.
        Phase::Stopping(s) if s.kept_until.is_some() => fault::release(job, now, fx),
        Phase::Stopping(s) => {
            if !matches!(s.intent, Intent::Cancel { .. }) {
                s.intent = intent;
                fx.push(Effect::Moment(MomentKind::Cancelling { by: by.to_owned() }));
            }
        }
        Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => {}
    }
}

fn deadline_passed(job: &mut Job, now: Time, fx: &mut Vec<Effect>) {
    let grace = job.request.grace;
    match &job.phase {
        Phase::Running(_) => {
            fx.push(Effect::Moment(MomentKind::TimeLimitReached));
            stop(job, Intent::TimeLimit, grace, "the time limit is reached".to_owned(), now, fx);
        }
        Phase::Starting(gang) => {
            let missing: Vec<u32> =
                (0u32..).zip(&gang.workers).filter(|(_, w)| w.state < WorkerState::Up).map(|(i, _)| i).collect();
            fx.push(Effect::Moment(MomentKind::NeverReady { missing: missing.clone() }));
            let reason = format!("not every worker was ready within {START_LIMIT}");
            stop(job, Intent::Unready { missing }, FAILED_GRACE, reason, now, fx);
        }
        Phase::Stopping(_) => fault::release(job, now, fx),
        Phase::Queued | Phase::Suspending(_) | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => {}
    }
}

/// Starting or Running → Stopping. `at` is when the reason for it arose: time
/// after it is no running time, even if it became known much later.
fn stop(job: &mut Job, intent: Intent, grace: Span, reason: String, at: Time, fx: &mut Vec<Effect>) {
    if let Some(gang) = leave(job, at) {
        stop_ranks(&gang, grace, reason, at, fx);
        job.phase = Phase::Stopping(Stopping { gang, intent, kept_until: None });
    }
}

fn stop_ranks(gang: &Gang, grace: Span, reason: String, at: Time, fx: &mut Vec<Effect>) {
    fx.push(Effect::Post { gpus: gang.gpus(), state: GpuState::Stopping, at, attempt: gang.attempt });
    fx.push(Effect::Act(Action::Stop { attempt: gang.attempt, epoch: gang.epoch, grace, reason }));
}

/// Takes the gang out of Starting or Running and counts its running time.
fn leave(job: &mut Job, at: Time) -> Option<Gang> {
    job.eviction = None;
    match std::mem::replace(&mut job.phase, Phase::Queued) {
        Phase::Starting(gang) => Some(gang),
        Phase::Running(gang) => {
            job.ran += gang.up.map_or(Span(0), |up| at.since(up));
            Some(gang)
        }
        other @ (Phase::Queued
        | Phase::Suspending(_)
        | Phase::Stopping(_)
        | Phase::Succeeded
        | Phase::Failed(_)
        | Phase::Cancelled { .. }) => {
            job.phase = other;
            None
        }
    }
}

#[cfg(test)]
mod tests;
