//! What of a job's timeline people are told. Pure.
//!
//! A story is read from the beginning of the timeline, also where its first parts were told long ago: whether ranks
//! that come up are the first or come again follows from what was before.

use aviflow_api::spec::NotifyOn;
use aviflow_core::lifecycle::{Moment, MomentKind};

/// A job's life as far as it was read.
#[derive(Debug, Default)]
pub struct Story {
    ran: bool,
    /// What ended its ranks last, in words.
    ended_by: Option<String>,
    /// Whether its GPUs are kept after it failed, which was told.
    kept: bool,
    over: bool,
}

/// Something that a person may want to be told.
#[derive(Debug, PartialEq, Eq)]
pub struct Happened {
    /// Under which word it is asked for.
    pub on: NotifyOn,
    /// The phase that the job is in by it.
    pub phase: &'static str,
    /// What came before it, where that is why.
    pub reason: Option<String>,
}

impl Story {
    /// Takes the next moment, with its sentence.
    pub fn next(&mut self, moment: &Moment, sentence: &str) -> Option<Happened> {
        let happened = |on, phase, reason| Some(Happened { on, phase, reason });
        match &moment.kind {
            MomentKind::Running { .. } => {
                let again = std::mem::replace(&mut self.ran, true);
                let reason = self.ended_by.take().filter(|_| again);
                happened(if again { NotifyOn::Restarted } else { NotifyOn::Started }, "Running", reason)
            }
            MomentKind::Suspending { .. } | MomentKind::AskedToLeave { .. } => {
                self.ended_by = Some(sentence.to_owned());
                happened(NotifyOn::Suspended, "Suspending", None)
            }
            MomentKind::Failing { .. } | MomentKind::RequeueAsked { .. } | MomentKind::NeverReady { .. } => {
                self.ended_by = Some(sentence.to_owned());
                None
            }
            MomentKind::Decided { .. } => {
                let before = self.ended_by.take().map(|before| before + "; ").unwrap_or_default();
                self.ended_by = Some(before + sentence);
                None
            }
            // It has failed for good, and somebody is to look around now.
            MomentKind::Kept { .. } => {
                self.kept = true;
                happened(NotifyOn::Failed, "Stopping", self.ended_by.take())
            }
            MomentKind::Failed { .. } => {
                self.over = true;
                if self.kept { None } else { happened(NotifyOn::Failed, "Failed", None) }
            }
            MomentKind::Succeeded => {
                self.over = true;
                happened(NotifyOn::Succeeded, "Succeeded", None)
            }
            MomentKind::Cancelled { .. } => {
                self.over = true;
                None
            }
            MomentKind::Submitted { .. }
            | MomentKind::Rebuilt
            | MomentKind::Placed { .. }
            | MomentKind::FirstStep { .. }
            | MomentKind::CaughtUp { .. }
            | MomentKind::CheckpointComplete { .. }
            | MomentKind::CheckpointFailed { .. }
            | MomentKind::Facts { .. }
            | MomentKind::Claimed { .. }
            | MomentKind::Unclaimed { .. }
            | MomentKind::Evicting { .. }
            | MomentKind::Spared
            | MomentKind::Held { .. }
            | MomentKind::Released { .. }
            | MomentKind::Updated { .. }
            | MomentKind::DependencyMet { .. }
            | MomentKind::DependencyFailed { .. }
            | MomentKind::Cancelling { .. }
            | MomentKind::TimeLimitReached
            | MomentKind::Refused { .. }
            | MomentKind::Found { .. }
            | MomentKind::Again { .. }
            | MomentKind::Quarantined { .. }
            | MomentKind::NotQuarantined { .. }
            | MomentKind::QueuedAgain { .. } => None,
        }
    }

    /// Whether the job has ended: nothing comes any more.
    pub fn is_over(&self) -> bool {
        self.over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::{Cause, Failure, JobId};
    use aviflow_core::time::{Span, Time};

    fn check(kinds: &[MomentKind], expected: &[(NotifyOn, Option<&str>)]) -> bool {
        let mut story = Story::default();
        let mut told = Vec::new();
        for (n, kind) in kinds.iter().enumerate() {
            let moment = Moment { job: JobId(1), at: Time(0), attempt: 1, kind: kind.clone() };
            told.extend(story.next(&moment, &format!("sentence {n}")));
        }
        let told: Vec<_> = told.iter().map(|h| (h.on, h.reason.as_deref())).collect();
        assert_eq!(told, expected);
        story.is_over()
    }

    #[test]
    fn ranks_that_come_again_are_told_with_what_ended_them() {
        let running = || MomentKind::Running { ranks: 4 };
        let failure = || Failure { exit_code: 124, at: Time(0), cause: Cause::TimeLimit { limit: Span::minutes(1) } };
        let again = MomentKind::QueuedAgain { not_before: None };
        use NotifyOn::{Failed, Restarted, Started, Succeeded, Suspended};
        let over = check(
            &[
                MomentKind::Submitted { by: "ada".into() },
                MomentKind::NeverReady { missing: vec![0] },
                running(),
                MomentKind::Failing { failure: failure() },
                again.clone(),
                running(),
                MomentKind::Suspending { by: "ada".into() },
                again,
                running(),
                MomentKind::Succeeded,
            ],
            &[
                (Started, None),
                (Restarted, Some("sentence 3")),
                (Suspended, None),
                (Restarted, Some("sentence 6")),
                (Succeeded, None),
            ],
        );
        assert!(over);
        let failing =
            [running(), MomentKind::Failing { failure: failure() }, MomentKind::Failed { failure: failure() }];
        assert!(check(&failing, &[(Started, None), (Failed, None)]));
        assert!(!check(&[running()], &[(Started, None)]));
        assert!(check(&[MomentKind::Cancelled { by: "ada".into() }], &[]));
    }
}
