//! How long turns take, how long jobs waited, and what ended attempts: counted for `/metrics`.
//!
//! All of it is since this process began: a counter that begins anew is what a monitoring system expects after a
//! restart. Nothing here is read by a decision.

use aviflow_core::lifecycle::{Moment, MomentKind};
use aviflow_core::model::{Cause, EvictionCause, Job, JobId, size_class};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds of the classes of a computation's duration, in microseconds: from half a millisecond to 10 s.
pub const DURATIONS: &[u64] = &[
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000,
];

/// Upper bounds of the classes of a job's wait, in microseconds: from a second to a week.
pub const WAITS: &[u64] = &[
    1_000_000,
    5_000_000,
    15_000_000,
    60_000_000,
    300_000_000,
    900_000_000,
    3_600_000_000,
    4 * 3_600_000_000,
    12 * 3_600_000_000,
    24 * 3_600_000_000,
    3 * 86_400_000_000,
    7 * 86_400_000_000,
];

/// Counts in classes with fixed bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Upper bounds in microseconds, inclusive, ascending.
    pub bounds: &'static [u64],
    /// Observations of each class; one more than bounds, for what is above the last.
    pub counts: Vec<u64>,
    /// The sum of all observations in microseconds.
    pub sum: u64,
}

impl Histogram {
    /// An empty one with these bounds.
    #[must_use]
    pub fn new(bounds: &'static [u64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len() + 1], sum: 0 }
    }

    /// Adds an observation.
    pub fn add(&mut self, micros: u64) {
        let class = self.bounds.partition_point(|bound| *bound < micros);
        if let Some(count) = self.counts.get_mut(class) {
            *count += 1;
        }
        self.sum = self.sum.saturating_add(micros);
    }
}

/// Why an attempt ended though its job goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RestartCause {
    /// A rank failed.
    Failure,
    /// A worker was lost with its node or its agent.
    NodeFailure,
    /// The plan or a person suspended it, or its node asked it to leave.
    Suspension,
    /// Not every worker was ready in time.
    NeverReady,
    /// The cluster refused a worker.
    Refused,
    /// The job asked to be queued again.
    Requeue,
    /// It was being stopped when this control plane began.
    Unknown,
}

impl RestartCause {
    /// All causes, so that each is shown before it has happened.
    pub const ALL: [RestartCause; 7] = [
        RestartCause::Failure,
        RestartCause::NodeFailure,
        RestartCause::Suspension,
        RestartCause::NeverReady,
        RestartCause::Refused,
        RestartCause::Requeue,
        RestartCause::Unknown,
    ];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RestartCause::Failure => "failure",
            RestartCause::NodeFailure => "node_failure",
            RestartCause::Suspension => "suspension",
            RestartCause::NeverReady => "never_ready",
            RestartCause::Refused => "refused",
            RestartCause::Requeue => "requeue",
            RestartCause::Unknown => "unknown",
        }
    }
}

/// What was counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Whole turns, the commit included.
    pub turns: Histogram,
    /// The plans of the turns.
    pub plans: Histogram,
    /// Waits from the submission to the first placement, by [`size_class`] of the job's GPUs.
    pub waits: BTreeMap<u32, Histogram>,
    /// Attempts that ended though their jobs go on.
    pub restarts: BTreeMap<RestartCause, u64>,
    /// Running jobs that were told to give their GPUs up.
    pub preemptions: BTreeMap<EvictionCause, u64>,
    /// Jobs that ended, by queue and phase.
    pub ended: BTreeMap<(String, &'static str), u64>,
    /// Turns whose commit the store refused.
    pub store_failures: u64,
    /// Why attempts are being stopped whose last process is not gone.
    stopping: BTreeMap<JobId, RestartCause>,
}

impl Default for Measured {
    fn default() -> Measured {
        Measured {
            turns: Histogram::new(DURATIONS),
            plans: Histogram::new(DURATIONS),
            waits: BTreeMap::new(),
            restarts: BTreeMap::new(),
            preemptions: BTreeMap::new(),
            ended: BTreeMap::new(),
            store_failures: 0,
            stopping: BTreeMap::new(),
        }
    }
}

/// What is counted while the engine runs. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<Mutex<Measured>>);

impl Meter {
    /// What was counted so far.
    #[must_use]
    pub fn measured(&self) -> Measured {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn with(&self, change: impl FnOnce(&mut Measured)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn planned(&self, took: Duration) {
        self.with(|m| m.plans.add(micros(took)));
    }

    pub(crate) fn store_failed(&self) {
        self.with(|m| m.store_failures += 1);
    }

    /// A turn that is durable: what happened in it, of the jobs as they are now.
    pub(crate) fn turned<'a>(
        &self,
        took: Duration,
        moments: &[Moment],
        ended: &[Job],
        job: impl Fn(JobId) -> Option<&'a Job>,
    ) {
        self.with(|m| {
            m.turns.add(micros(took));
            for moment in moments {
                m.moment(moment, || job(moment.job).or_else(|| ended.iter().find(|j| j.id == moment.job)));
            }
            for job in ended {
                m.stopping.remove(&job.id);
                *m.ended.entry((job.request.queue.clone(), job.phase.name())).or_default() += 1;
            }
        });
    }
}

impl Measured {
    fn moment<'a>(&mut self, moment: &Moment, job: impl Fn() -> Option<&'a Job>) {
        let cause = match &moment.kind {
            MomentKind::Placed { gpus, .. } if moment.attempt == 1 => {
                let Some(job) = job() else { return };
                let wait = moment.at.since(job.submitted).0.max(0).unsigned_abs().saturating_mul(1000);
                self.waits.entry(size_class(*gpus)).or_insert_with(|| Histogram::new(WAITS)).add(wait);
                return;
            }
            MomentKind::Evicting { cause, .. } => {
                *self.preemptions.entry(*cause).or_default() += 1;
                return;
            }
            // Only now it is certain that it goes on.
            MomentKind::QueuedAgain { .. } | MomentKind::Again { .. } => {
                let cause = self.stopping.remove(&moment.job).unwrap_or(RestartCause::Unknown);
                *self.restarts.entry(cause).or_default() += 1;
                return;
            }
            MomentKind::Failing { failure } => match failure.cause {
                Cause::WorkerLost { .. } => RestartCause::NodeFailure,
                Cause::Rank { .. }
                | Cause::Launch { .. }
                | Cause::TimeLimit { .. }
                | Cause::Found { .. }
                | Cause::Environment { .. }
                | Cause::Recorded { .. } => RestartCause::Failure,
            },
            MomentKind::Suspending { .. } => RestartCause::Suspension,
            MomentKind::NeverReady { .. } => RestartCause::NeverReady,
            MomentKind::Refused { .. } => RestartCause::Refused,
            MomentKind::RequeueAsked { .. } => RestartCause::Requeue,
            _ => return,
        };
        self.stopping.insert(moment.job, cause);
    }
}

fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::time::Time;

    #[test]
    fn a_bound_belongs_to_its_class() {
        let check = |micros: u64, class: usize| {
            let mut histogram = Histogram::new(DURATIONS);
            histogram.add(micros);
            assert_eq!(histogram.counts.iter().position(|n| *n == 1), Some(class), "{micros}");
            assert_eq!(histogram.sum, micros);
        };
        check(0, 0);
        check(500, 0);
        check(501, 1);
        check(10_000_000, DURATIONS.len() - 1);
        check(10_000_001, DURATIONS.len());
        check(u64::MAX, DURATIONS.len());
    }

    #[test]
    fn a_restart_is_counted_once_it_is_certain() {
        let mut measured = Measured::default();
        let mut say = |job: u64, kind: MomentKind| {
            measured.moment(&Moment { job: JobId(job), at: Time(0), attempt: 2, kind }, || None);
            measured.restarts.clone()
        };
        let again = || MomentKind::QueuedAgain { not_before: None };
        assert!(say(1, MomentKind::Suspending { by: "ada".into() }).is_empty());
        assert_eq!(say(1, again()), [(RestartCause::Suspension, 1)].into());
        assert!(!say(2, MomentKind::RequeueAsked { rank: 0 }).contains_key(&RestartCause::Requeue));
        say(2, again());
        let all = say(1, again());
        let expected = [(RestartCause::Suspension, 1), (RestartCause::Requeue, 1), (RestartCause::Unknown, 1)];
        assert_eq!(all, expected.into());
        assert!(measured.stopping.is_empty());
    }

    #[test]
    fn bounds_ascend() {
        for bounds in [DURATIONS, WAITS] {
            assert!(bounds.is_sorted_by(|a, b| a < b));
        }
    }
}
