//! What one object tells of its job.

use super::moment;
use crate::names;
use crate::object;
use aviflow_api::convert::{to_ending, to_request};
use aviflow_api::crd::{ConditionStatus, PhaseWord, TrainingJobStatus};
use aviflow_api::file::Priorities;
use aviflow_api::spec::ObjectRef;
use aviflow_core::lifecycle::{Moment, MomentKind};
use aviflow_core::model::{
    Cause, Checkpoint, Counters, Dependency, Ending, EnvironmentHash, Failure, Job, JobId, JobKey, Phase,
};
use aviflow_core::time::{Span, Time};
use aviflow_engine::ports::{JobRecord, ending};
use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use std::collections::BTreeMap;

/// Who holds a job that waits for one of which nobody knows any more how it ended.
const HOLDER: &str = "the control plane, as a job that it waits for was lost with the store";

/// A job as its object tells it.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) record: JobRecord,
    /// Its phase is that of a job that waits, where it has a gang.
    pub(super) job: Job,
    pub(super) ended: Option<Time>,
    /// What its gang does, where the object says that it has one.
    pub(super) gang: Option<PhaseWord>,
    pub(super) status: TrainingJobStatus,
}

/// The number of the job that an object is, if it is one yet.
pub(super) fn number(object: &DynamicObject) -> Option<u64> {
    object::made_for(object).or(object.data.pointer("/status/jobId").and_then(serde_json::Value::as_u64))
}

/// An object as a sentence calls it.
pub(super) fn called(object: &DynamicObject) -> String {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    format!("the object {}/{name}", object.metadata.namespace.as_deref().unwrap_or_default())
}

/// An instant, as Kubernetes writes them.
pub(super) fn instant(text: &str) -> Option<Time> {
    text.parse::<Timestamp>().ok().map(|at| Time(at.as_millisecond()))
}

impl Told {
    /// What an object tells; nothing where it is no job yet.
    pub(super) fn of(
        object: &DynamicObject,
        queue: &str,
        priorities: &Priorities,
        now: Time,
    ) -> Result<Option<Told>, String> {
        let Some(id) = number(object) else { return Ok(None) };
        let status = match object.data.get("status") {
            Some(status) => {
                serde_json::from_value(status.clone()).map_err(|e| format!("its status cannot be read: {e}"))?
            }
            None => TrainingJobStatus::default(),
        };
        let (mut spec, mut provenance) = object::document(object, queue)?;
        let metadata = &object.metadata;
        let (Some(namespace), Some(name)) = (metadata.namespace.clone(), metadata.name.clone()) else {
            return Err("it has no name".to_owned());
        };
        // What its image was found to be is what it goes on with, whatever a tag or an environment means now.
        provenance.image = provenance.image.or_else(|| status.image.clone());
        if object::made_for(object).is_some() {
            spec.name = object::work(object).unwrap_or(&spec.name).to_owned();
        } else {
            provenance.object = metadata.uid.clone().map(|uid| ObjectRef { name: name.clone(), uid });
        }
        let user = object::submitter(object).or(status.submitted_by.as_deref()).map(str::to_owned);
        let user = user.ok_or_else(|| format!("nobody stamped who submitted it (annotation {})", names::SUBMITTER))?;
        let created = metadata.creation_timestamp.as_ref().map(|at| Time(at.0.as_millisecond()));
        let submitted = status.submitted.as_deref().and_then(instant).or(created).unwrap_or(now).min(now);
        let key = JobKey { namespace, name: status.job_name.clone().unwrap_or(name) };
        let environment = provenance.made_first().map(|hash| EnvironmentHash(hash.to_owned()));
        let record = JobRecord { id: JobId(id), key: key.clone(), user: user.clone(), submitted, spec, provenance };
        let request = to_request(&record.spec, priorities);
        let mut job = Job::submitted(record.id, key, user, request, environment, submitted);
        changed(&mut job, &status);
        progress(&mut job, &record, &status);
        let (phase, gang) = phase(&status, now);
        let ended = phase.is_terminal().then(|| status.ended.as_deref().and_then(instant).unwrap_or(now).min(now));
        job.phase = phase;
        Ok(Some(Told { record, job, ended, gang, status }))
    }

    /// Finds the jobs that this one waits for, among all as they were submitted.
    pub(super) fn dependencies(&mut self, all: &BTreeMap<JobId, Job>) {
        for after in &self.record.spec.after {
            let on = to_ending(after.on);
            let (namespace, name) = after.job.split_once('/').unwrap_or((&self.record.key.namespace, &after.job));
            let key = JobKey { namespace: namespace.to_owned(), name: name.to_owned() };
            // The latest of a work has its name with the highest suffix.
            let meant = |job: &&Job| {
                let of_work = job.key.name.strip_prefix(name).is_some_and(|rest| {
                    rest.strip_prefix('-').is_some_and(|n| n.parse::<u32>().is_ok()) && !after.job.contains('/')
                });
                job.key.namespace == namespace && (job.key == key || of_work) && job.id < self.record.id
            };
            let other = all.values().filter(meant).max_by_key(|job| (job.user == self.record.user, job.id));
            let fits = |ended: Ending| on == Ending::Ended || on == ended;
            let met = match other.map(|job| ending(&job.phase)) {
                Some(None) => Some(None),
                Some(Some(ended)) if fits(ended) => Some(Some(true)),
                Some(Some(_)) | None => None,
            };
            match (other, met) {
                (Some(other), Some(met)) => {
                    let name = other.key.name.clone();
                    self.job.after.push(Dependency { job: other.id, name, on, met });
                }
                // One that has begun has not waited in vain.
                _ if self.job.attempts == 0 && self.job.held.is_none() => self.job.held = Some(HOLDER.to_owned()),
                _ => {}
            }
        }
    }

    /// Since when its gang is as its object says.
    pub(super) fn up(&self) -> Option<Time> {
        let running = self.status.conditions.iter().find(|c| c.kind == "Running" && c.status == ConditionStatus::True);
        let since = running.map(|c| c.last_transition_time.as_str()).or(self.status.started.as_deref());
        since.and_then(instant)
    }

    /// Its timeline, as far as it is known.
    pub(super) fn moments(&self, now: Time) -> [Moment; 2] {
        let by = self.record.user.clone();
        let submitted = moment(&self.record, self.record.submitted, 0, MomentKind::Submitted { by });
        [submitted, moment(&self.record, now, self.job.attempts, MomentKind::Rebuilt)]
    }
}

/// What was changed of it since it was submitted.
fn changed(job: &mut Job, status: &TrainingJobStatus) {
    if let Some(queue) = &status.queue {
        job.request.queue.clone_from(queue);
    }
    if let Some(priority) = status.priority {
        job.request.priority = priority;
    }
    if let Some(limit) = status.time_limit {
        job.request.time_limit = Some(limit.0);
    }
    job.held.clone_from(&status.held);
}

/// How far it got.
fn progress(job: &mut Job, record: &JobRecord, status: &TrainingJobStatus) {
    job.attempts = status.attempt.unwrap_or_default();
    if let Some(c) = &status.counters {
        job.counters = Counters {
            failures: c.failures.min(job.request.failures_allowed),
            node_failures: c.node_failures,
            suspensions: c.suspensions,
            unready: c.unready,
        };
    }
    job.ran = Span(status.ran.unwrap_or_default());
    job.best_step = status.step;
    let path = record.spec.checkpoint.as_ref().map(|c| c.path.clone());
    job.checkpoint = status.last_checkpoint.as_ref().zip(path).and_then(|(last, path)| {
        Some(Checkpoint { step: last.step, path, at: instant(&last.at)?, attempt: job.attempts })
    });
}

/// The phase of a job that holds nothing, and what its gang does where it has one.
fn phase(status: &TrainingJobStatus, now: Time) -> (Phase, Option<PhaseWord>) {
    let reason = status.reason.clone().unwrap_or_default();
    let at = status.ended.as_deref().and_then(instant).unwrap_or(now).min(now);
    match status.phase {
        None | Some(PhaseWord::Queued) => (Phase::Queued, None),
        Some(word @ (PhaseWord::Starting | PhaseWord::Running | PhaseWord::Suspending | PhaseWord::Stopping)) => {
            (Phase::Queued, Some(word))
        }
        Some(PhaseWord::Succeeded) => (Phase::Succeeded, None),
        Some(PhaseWord::Failed) => {
            let cause = Cause::Recorded { reason };
            (Phase::Failed(Failure { cause, exit_code: 1, at }), None)
        }
        Some(PhaseWord::Cancelled) => {
            (Phase::Cancelled { by: canceller(&reason).unwrap_or("somebody").to_owned() }, None)
        }
    }
}

/// Who cancelled a job, as its object says.
pub(super) fn canceller(reason: &str) -> Option<&str> {
    reason.strip_prefix(object::CANCELLED_BY)
}
