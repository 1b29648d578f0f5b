//! From the core's types to what REST shows. Nothing is decided here, and
//! everything that a job said about itself is masked.

use crate::app::App;
use crate::secret::masked;
use aviflow_api::file::Priorities;
use aviflow_api::rest::{
    Build, CheckpointInfo, Estimate, JobCounters, JobSummary, ProgressPoint, TimelineEntry, Verdict, WorkerInfo,
};
use aviflow_core::explain::{self, NodeNames};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Cause, Failure, Job, JobId, NodeId, Phase, Snapshot, WorkerState};
use aviflow_core::schedule::{Constraint, Plan};
use aviflow_core::time::Time;
use aviflow_engine::driver::View;
use aviflow_engine::telemetry::Point;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The exit code of `aviflow run` for a job that a person cancelled, as after Ctrl-C.
const CANCELLED_CODE: i32 = 130;

/// Names of nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(BTreeMap<NodeId, String>);

impl Names {
    /// All nodes' names.
    pub(crate) fn of(snapshot: &Snapshot) -> Names {
        Names(snapshot.nodes.values().map(|n| (n.id, n.name.clone())).collect())
    }

    /// Names of the nodes that a job has or failed on.
    fn of_job(snapshot: &Snapshot, job: &Job) -> Names {
        let held = job.phase.gang().into_iter().flat_map(|g| g.nodes());
        let ids = held.chain(failure(&job.phase).and_then(failed_on));
        Names(ids.filter_map(|id| Some((id, snapshot.nodes.get(&id)?.name.clone()))).collect())
    }
}

impl NodeNames for Names {
    fn node_name(&self, id: NodeId) -> String {
        self.0.get(&id).cloned().unwrap_or_else(|| format!("node {}", id.0))
    }
}

fn failed_on(failure: &Failure) -> Option<NodeId> {
    match &failure.cause {
        Cause::Rank { node, .. } | Cause::WorkerLost { node, .. } | Cause::Launch { node, .. } => Some(*node),
        Cause::Found { finding, .. } => finding.node,
        Cause::TimeLimit { .. } | Cause::Environment { .. } | Cause::Recorded { .. } => None,
    }
}

/// Why the job failed, if it did.
pub(crate) fn failure(phase: &Phase) -> Option<&Failure> {
    match phase {
        Phase::Failed(failure) => Some(failure),
        _ => None,
    }
}

/// Last lines of the rank that failed first.
pub(crate) fn last_lines(failure: &Failure) -> Vec<String> {
    match &failure.cause {
        Cause::Rank { exit, .. } => exit.last_lines.iter().map(|line| masked(line)).collect(),
        Cause::WorkerLost { .. }
        | Cause::Launch { .. }
        | Cause::TimeLimit { .. }
        | Cause::Found { .. }
        | Cause::Environment { .. }
        | Cause::Recorded { .. } => Vec::new(),
    }
}

/// The exit code of `aviflow run`, once the job has ended.
pub(crate) fn exit_code(phase: &Phase) -> Option<i32> {
    match phase {
        Phase::Succeeded => Some(0),
        Phase::Failed(failure) => Some(failure.exit_code),
        Phase::Cancelled { .. } => Some(CANCELLED_CODE),
        Phase::Queued | Phase::Starting(_) | Phase::Running(_) | Phase::Suspending(_) | Phase::Stopping(_) => None,
    }
}

/// Why a job waits, in the plan's terms.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Waits {
    pub(crate) constraint: Constraint,
    pub(crate) place: u32,
    pub(crate) waiting: u32,
}

/// A job with what is known of it at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) job: Job,
    pub(crate) ended: Option<Time>,
    pub(crate) waits: Option<Waits>,
    pub(crate) names: Arc<Names>,
    pub(crate) now: Time,
}

/// The places of all jobs that wait, so that a list does not search for each.
pub(crate) fn places(plan: &Plan) -> BTreeMap<JobId, Waits> {
    let waiting = count(plan.waiting.len());
    let place = |(place, w): (u32, &aviflow_core::schedule::Waiting)| {
        let constraint = plan.constraints.get(w.constraint)?.clone();
        Some((w.job, Waits { constraint, place, waiting }))
    };
    (1u32..).zip(&plan.waiting).filter_map(place).collect()
}

impl Seen {
    /// A live job, with its place among those that wait.
    pub(crate) fn live(view: &View<'_>, job: &Job, waits: Option<Waits>) -> Seen {
        let names = Arc::new(Names::of_job(view.snapshot, job));
        Seen { job: job.clone(), ended: None, waits, names, now: view.now }
    }

    /// One live job.
    pub(crate) fn one(view: &View<'_>, id: JobId) -> Option<Seen> {
        let job = view.snapshot.jobs.get(&id)?;
        let waits = view.plan.verdict(id).map(|(constraint, place)| Waits {
            constraint: constraint.clone(),
            place,
            waiting: count(view.plan.waiting.len()),
        });
        Some(Seen::live(view, job, waits))
    }

    /// What lists show, with the last progress.
    pub(crate) fn summary(&self, app: &App) -> JobSummary {
        // A series that cannot be read is told where it is asked for.
        let progress = app.parts.telemetry.latest(self.job.id).ok().flatten();
        JobSummary { progress: progress.as_ref().map(point), ..self.brief(app) }
    }

    /// The same without progress, which for jobs that ended is one file to read for each.
    pub(crate) fn brief(&self, app: &App) -> JobSummary {
        let job = &self.job;
        let gang = job.phase.gang();
        let up = match &job.phase {
            Phase::Running(gang) => gang.up,
            _ => None,
        };
        JobSummary {
            id: job.id.0,
            namespace: job.key.namespace.clone(),
            name: job.key.name.clone(),
            user: job.user.clone(),
            queue: job.request.queue.clone(),
            priority: priority_name(&app.parts.defaults.priorities, job.request.priority),
            phase: job.phase.name().to_owned(),
            attempts: job.attempts,
            nodes: gang.map_or(job.request.nodes.min, |g| count(g.workers.len())),
            gpus_per_node: job.request.gpus_per_node,
            on: gang.into_iter().flat_map(|g| g.nodes()).map(|n| self.names.node_name(n)).collect(),
            submitted: job.submitted.0,
            running_since: up.map(|t| t.0),
            ended: self.ended.map(|t| t.0),
            ran: job.ran.0 + up.map_or(0, |up| self.now.since(up).0),
            verdict: self.waits.as_ref().map(|w| {
                // As it was expected at the submission; asked for one job alone it is worked out anew.
                let expected = job.estimate.filter(|_| job.attempts == 0);
                let estimate = expected.map(|e| Estimate { p50: e.p50.max(self.now).0, p90: e.p90.max(self.now).0 });
                Verdict { estimate, ..verdict(app, w, self.now) }
            }),
            progress: None,
            failure: failure(&job.phase).map(|f| masked(&explain::failure(f, &*self.names))),
            exit_code: exit_code(&job.phase),
        }
    }
}

/// Why a job waits, in words.
pub(crate) fn verdict(app: &App, waits: &Waits, now: Time) -> Verdict {
    let build = match &waits.constraint {
        Constraint::Environment { hash } => app.parts.telemetry.builds().into_iter().find(|b| b.hash == hash.0),
        _ => None,
    };
    Verdict {
        place: waits.place,
        waiting: waits.waiting,
        constraint: (&waits.constraint).into(),
        reason: explain::constraint(&waits.constraint, now),
        build: build.map(|b| Build { name: b.name, step: b.step, done: b.done, total: b.total }),
        ..Verdict::default()
    }
}

/// The name of a priority; the number itself where it has none any more.
pub(crate) fn priority_name(priorities: &Priorities, priority: i32) -> String {
    let named = priorities.0.iter().find(|(_, n)| **n == priority);
    named.map_or_else(|| priority.to_string(), |(name, _)| name.clone())
}

/// The workers of the gang that a job has.
pub(crate) fn workers(job: &Job, names: &dyn NodeNames) -> Vec<WorkerInfo> {
    let each = job.request.ranks_per_node;
    let gang = job.phase.gang().into_iter();
    gang.flat_map(|g| (0u32..).zip(&g.workers))
        .map(|(number, worker)| WorkerInfo {
            worker: number,
            node: names.node_name(worker.node),
            slots: worker.slots.iter().collect(),
            state: match worker.state {
                WorkerState::Launched => "launched",
                WorkerState::Ready => "ready",
                WorkerState::Up => "up",
                WorkerState::Gone => "gone",
            }
            .to_owned(),
            ranks: (number * each..(number + 1) * each).collect(),
            exits: worker.exits.iter().map(|(rank, exit)| (*rank, exit.code)).collect(),
        })
        .collect()
}

/// What ended earlier attempts.
pub(crate) fn counters(job: &Job) -> JobCounters {
    let c = &job.counters;
    JobCounters { failures: c.failures, node_failures: c.node_failures, suspensions: c.suspensions, unready: c.unready }
}

/// The last complete checkpoint.
pub(crate) fn checkpoint(job: &Job) -> Option<CheckpointInfo> {
    let c = job.checkpoint.as_ref()?;
    Some(CheckpointInfo { step: c.step, path: masked(&c.path), at: c.at.0, attempt: c.attempt })
}

/// An entry of a timeline.
pub(crate) fn timeline_entry(moment: &Moment, names: &dyn NodeNames) -> TimelineEntry {
    let kind = serde_json::to_value(&moment.kind).ok();
    let kind = kind.as_ref().and_then(|k| k.get("moment")?.as_str()).unwrap_or_default();
    TimelineEntry {
        at: moment.at.0,
        attempt: moment.attempt,
        kind: kind.to_owned(),
        text: masked(&explain::moment(moment, names)),
    }
}

/// A point of progress.
pub(crate) fn point(point: &Point) -> ProgressPoint {
    ProgressPoint {
        at: point.at.0,
        attempt: point.attempt,
        rank: point.rank,
        step: point.step,
        total_steps: point.total_steps,
        values: point.values.clone(),
        odd: point.odd.clone(),
    }
}

/// Numbers of things; more than fit into 32 bits there are not.
pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
