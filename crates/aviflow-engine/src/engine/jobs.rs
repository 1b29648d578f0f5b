//! What people do to a job that has not ended.

use super::submit::{entry_refusal, no_such_queue, priority_refusal};
use super::{Answer, Engine, Refusal, Work};
use crate::ports::{ActKind, Store};
use aviflow_core::lifecycle::{Change, Event};
use aviflow_core::model::{Job, JobId, Phase};
use aviflow_core::time::{Span, Time};

/// Who, and why.
pub(super) type Whose<'a> = (&'a str, Option<&'a String>);

/// The name by which acts know a job.
pub(super) fn name_of(job: &Job) -> String {
    format!("{}/{}", job.key.namespace, job.key.name)
}

/// How long the job has been in Running, over all attempts.
fn ran(job: &Job, now: Time) -> Span {
    match &job.phase {
        Phase::Running(gang) => job.ran + gang.up.map_or(Span(0), |up| now.since(up)),
        Phase::Queued
        | Phase::Starting(_)
        | Phase::Suspending(_)
        | Phase::Stopping(_)
        | Phase::Succeeded
        | Phase::Failed(_)
        | Phase::Cancelled { .. } => job.ran,
    }
}

pub(super) fn change_words(change: &Change) -> String {
    let mut what = Vec::new();
    what.extend(change.priority.map(|p| format!("priority {p}")));
    what.extend(change.queue.as_ref().map(|q| format!("queue {q}")));
    what.extend(change.time_limit.map(|l| match l {
        Some(limit) => format!("time limit {limit}"),
        None => "no time limit".to_owned(),
    }));
    what.join(", ")
}

impl<S: Store> Engine<S> {
    pub(super) fn cancel(&mut self, job: JobId, by: &str, work: &mut Work) -> Answer {
        let event = Event::Cancel { by: by.to_owned() };
        self.act_on_job(job, &event, "cancelled it".to_owned(), (by, None), work)
    }

    pub(super) fn suspend(&mut self, job: JobId, whose: Whose<'_>, work: &mut Work) -> Answer {
        let event = Event::Suspend { by: whose.0.to_owned(), hold: true, turned_out: None };
        self.act_on_job(job, &event, "suspended it until it is released".to_owned(), whose, work)
    }

    pub(super) fn hold(&mut self, job: JobId, whose: Whose<'_>, work: &mut Work) -> Answer {
        if let Some(live) = self.snapshot.jobs.get(&job)
            && matches!(live.phase, Phase::Starting(_) | Phase::Running(_))
        {
            let refusal = Refusal::NotWaiting { job: live.key.name.clone(), phase: live.phase.name() };
            return Answer::Refused(refusal);
        }
        let event = Event::Hold { by: whose.0.to_owned() };
        self.act_on_job(job, &event, "held it until it is released".to_owned(), whose, work)
    }

    pub(super) fn release(&mut self, job: JobId, whose: Whose<'_>, work: &mut Work) -> Answer {
        let event = Event::Release { by: whose.0.to_owned() };
        self.act_on_job(job, &event, "released it".to_owned(), whose, work)
    }

    pub(super) fn update(&mut self, id: JobId, change: &Change, whose: Whose<'_>, work: &mut Work) -> Answer {
        let Some(job) = self.snapshot.jobs.get(&id) else { return Answer::Refused(Refusal::NoSuchJob) };
        if let Some(refusal) = self.update_refusal(job, change) {
            return Answer::Refused(refusal);
        }
        let (change, reason) = (change.clone(), whose.1.cloned());
        let what = format!("set {}", change_words(&change));
        self.act_on_job(id, &Event::Update { change, by: whose.0.to_owned(), reason }, what, whose, work)
    }

    fn update_refusal(&self, job: &Job, change: &Change) -> Option<Refusal> {
        let priority = change.priority.unwrap_or(job.request.priority);
        let queues = &self.snapshot.queues;
        match change.queue.as_ref().filter(|q| **q != job.request.queue) {
            Some(name) => match queues.get(name) {
                Some(queue) => {
                    if let Some(refusal) = entry_refusal(queue, &job.user, priority) {
                        return Some(refusal);
                    }
                }
                None => return Some(no_such_queue(&self.snapshot, name)),
            },
            None => {
                if let (Some(asked), Some(queue)) = (change.priority, queues.get(&job.request.queue))
                    && let Some(refusal) = priority_refusal(queue, asked)
                {
                    return Some(refusal);
                }
            }
        }
        let limit = change.time_limit.flatten()?;
        let ran = ran(job, self.now);
        let job = job.key.name.clone();
        (limit <= ran).then_some(Refusal::TimeLimitPassed { job, ran, limit })
    }

    /// Gives a job an event, and notes who did it if anything came of it.
    fn act_on_job(&mut self, id: JobId, event: &Event, what: String, whose: Whose<'_>, work: &mut Work) -> Answer {
        let Some(before) = self.snapshot.jobs.get(&id).cloned() else { return Answer::Refused(Refusal::NoSuchJob) };
        self.advance(id, event, self.now, work);
        if self.snapshot.jobs.get(&id) != Some(&before) {
            self.act(ActKind::Job, &name_of(&before), what, whose, work);
        }
        Answer::Done
    }
}
