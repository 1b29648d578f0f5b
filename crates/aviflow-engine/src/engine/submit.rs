//! Submissions: whether the platform takes a job, its name, and the jobs that it waits for.

use super::{Answer, Engine, Refusal, Submission, Work, default_queue};
use crate::ports::{JobRecord, Known, Store, StoreError, ending};
use aviflow_api::spec::After;
use aviflow_core::explain;
use aviflow_core::lifecycle::{Event, Moment, MomentKind};
use aviflow_core::model::{
    Dependency, Ending, EnvironmentHash, Job, JobId, JobKey, Queue, QueueState, Request, Snapshot,
};
use aviflow_core::schedule::never_fits;
use std::sync::Arc;

/// Why a request of a user would not be taken, now and whatever ends.
#[must_use]
pub fn refusal(snapshot: &Snapshot, request: &Request, user: &str) -> Option<Refusal> {
    let first = default_queue();
    let queue = match snapshot.queues.get(&request.queue) {
        None if snapshot.queues.is_empty() && first.name == request.queue => &first,
        None => return Some(no_such_queue(snapshot, &request.queue)),
        Some(queue) => queue,
    };
    if let Some(refusal) = entry_refusal(queue, user, request.priority) {
        return Some(refusal);
    }
    let never = never_fits(snapshot, request)?;
    explain::never(&never).map(Refusal::NeverFits)
}

pub(super) fn no_such_queue(snapshot: &Snapshot, queue: &str) -> Refusal {
    let known = snapshot.queues.keys().cloned().collect::<Vec<_>>().join(", ");
    Refusal::NoSuchQueue { queue: queue.to_owned(), known }
}

/// Why a job of a user may not come into a queue.
pub(super) fn entry_refusal(queue: &Queue, user: &str, priority: i32) -> Option<Refusal> {
    let name = || queue.name.clone();
    if queue.state == QueueState::Draining {
        return Some(Refusal::QueueDraining(name()));
    }
    if !queue.submitters.is_empty() && !queue.submitters.contains(user) {
        return Some(Refusal::NotSubmitter { queue: name(), user: user.to_owned() });
    }
    priority_refusal(queue, priority)
}

pub(super) fn priority_refusal(queue: &Queue, asked: i32) -> Option<Refusal> {
    let highest = queue.highest_priority.filter(|highest| asked > *highest)?;
    Some(Refusal::PriorityTooHigh { queue: queue.name.clone(), highest, asked })
}

fn core_ending(on: aviflow_api::spec::Ending) -> Ending {
    match on {
        aviflow_api::spec::Ending::Succeeded => Ending::Succeeded,
        aviflow_api::spec::Ending::Failed => Ending::Failed,
        aviflow_api::spec::Ending::Ended => Ending::Ended,
    }
}

/// A job to wait for, and how it ended if it has.
type Found = (Dependency, Option<Ending>);

impl<S: Store> Engine<S> {
    pub(super) fn submit(&mut self, submission: &Submission, work: &mut Work) -> Result<Answer, StoreError> {
        if let Some(refusal) = refusal(&self.snapshot, &submission.request, &submission.user) {
            return Ok(Answer::Refused(refusal));
        }
        let after = match self.dependencies(submission, work)? {
            Ok(after) => after,
            Err(refusal) => return Ok(Answer::Refused(refusal)),
        };
        if self.snapshot.queues.is_empty() {
            self.make_default_queue(work);
        }
        let key = self.free_name(&submission.namespace, &submission.spec.name, work)?;
        self.last_job += 1;
        let id = JobId(self.last_job);
        let record = Arc::new(JobRecord {
            id,
            key: key.clone(),
            user: submission.user.clone(),
            submitted: self.now,
            spec: submission.spec.clone(),
            provenance: submission.provenance.clone(),
        });
        let environment = submission.provenance.made_first().map(|hash| EnvironmentHash(hash.to_owned()));
        let (user, request) = (submission.user.clone(), submission.request.clone());
        let mut job = Job::submitted(id, key, user, request, environment.clone(), self.now);
        job.after = after.iter().map(|(dependency, _)| dependency.clone()).collect();
        self.records.insert(id, record.clone());
        self.snapshot.waiting.insert(id);
        self.snapshot.jobs.insert(id, job.clone());
        self.memo.touch(id);
        work.records.push(record.clone());
        work.jobs.insert(id, job);
        let kind = MomentKind::Submitted { by: submission.user.clone() };
        work.moments.push(Moment { job: id, at: self.now, attempt: 0, kind });
        for (dependency, ended) in after {
            match ended {
                Some(ending) => {
                    let event = Event::DependencyEnded { job: dependency.job, ending };
                    self.advance(id, &event, self.now, work);
                }
                None => {
                    self.dependants.entry(dependency.job).or_default().insert(id);
                }
            }
        }
        if let Some(hash) = environment {
            self.want_environment(&hash, work);
        }
        Ok(Answer::Submitted(record))
    }

    pub(super) fn make_default_queue(&mut self, work: &mut Work) {
        let queue = default_queue();
        work.queues.insert(queue.name.clone());
        self.snapshot.queues.insert(queue.name.clone(), queue);
    }

    /// The jobs that a submission waits for, with how those ended that have.
    fn dependencies(&self, submission: &Submission, work: &Work) -> Result<Result<Vec<Found>, Refusal>, StoreError> {
        let mut found: Vec<Found> = Vec::new();
        for After { job: name, on } in &submission.spec.after {
            let on = core_ending(*on);
            let Some(known) = self.meant(submission, name, work)? else {
                return Ok(Err(Refusal::NoSuchDependency(name.clone())));
            };
            // What ended in this turn is not in the store yet.
            let ended = match work.jobs.get(&known.id).or_else(|| self.snapshot.jobs.get(&known.id)) {
                Some(job) => ending(&job.phase),
                None => known.ended,
            };
            if ended.is_some_and(|ended| on != Ending::Ended && on != ended) {
                return Ok(Err(Refusal::DependencyFailed { name: known.key.name, on }));
            }
            let dependency = Dependency { job: known.id, name: known.key.name, on, met: None };
            if !found.iter().any(|(d, _)| *d == dependency) {
                found.push((dependency, ended));
            }
        }
        Ok(Ok(found))
    }

    /// The job that a name in a document means: the user's own latest whose document has it, else
    /// anybody's in the namespace, else the one of exactly that name. `namespace/name` is exact.
    fn meant(&self, submission: &Submission, name: &str, work: &Work) -> Result<Option<Known>, StoreError> {
        let (namespace, bare) = name.split_once('/').unwrap_or((&submission.namespace, name));
        let here = |r: &Arc<JobRecord>| Known { id: r.id, key: r.key.clone(), ended: None };
        if !name.contains('/') {
            for user in [Some(submission.user.as_str()), None] {
                let fits = |r: &&Arc<JobRecord>| {
                    r.key.namespace == namespace && r.spec.name == bare && user.is_none_or(|u| r.user == u)
                };
                // Those of this turn are newer than any in the store.
                if let Some(record) = work.records.iter().rev().find(fits) {
                    return Ok(Some(here(record)));
                }
                if let Some(known) = self.store.latest(namespace, bare, user)? {
                    return Ok(Some(known));
                }
            }
        }
        let key = JobKey { namespace: namespace.to_owned(), name: bare.to_owned() };
        match work.records.iter().find(|r| r.key == key) {
            Some(record) => Ok(Some(here(record))),
            None => self.store.named(&key),
        }
    }

    /// The name, or the name with the first free suffix from 2.
    fn free_name(&mut self, namespace: &str, name: &str, work: &Work) -> Result<JobKey, StoreError> {
        let base = JobKey { namespace: namespace.to_owned(), name: name.to_owned() };
        let taken = |store: &S, key: &JobKey| -> Result<bool, StoreError> {
            Ok(work.records.iter().any(|r| r.key == *key) || store.name_taken(key)?)
        };
        let mut suffix = self.suffixes.get(&base).copied().unwrap_or(1);
        let mut key = base.clone();
        loop {
            if suffix > 1 {
                key.name = format!("{name}-{suffix}");
            }
            if !taken(&self.store, &key)? {
                break;
            }
            suffix += 1;
        }
        // The hints only save look-ups; they are not worth much memory.
        if self.suffixes.len() > 10_000 {
            self.suffixes.clear();
        }
        self.suffixes.insert(base, suffix + 1);
        Ok(key)
    }
}
