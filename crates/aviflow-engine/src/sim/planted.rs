//! Bugs that the simulator must find. Only tests can switch them on.

use crate::ports::{Batch, Order, Stamped};
use aviflow_core::gpus::Slots;
use aviflow_core::lifecycle::{Action, Advance, Event, MomentKind, WorkerEvent};
use aviflow_core::model::{JobId, Phase, Snapshot};
use aviflow_core::schedule::Decision;
use aviflow_core::time::Span;

/// The bug that is switched on, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planted(pub(crate) Option<Bug>);

/// A bug, named after what it does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    TakesEventsOfOtherAttempts,
    CountsLostAgentsAsFailures,
    OverlooksFailedRanks,
    BlamesRanksThatItStopped,
    PlacesHalfAGang,
    SharesGpus,
    ReleasesWhileStopping,
    ForgetsWhatIsHeld,
    LosesLedgerIntervals,
    BooksLedgerIntervalsTwice,
    LosesWaitingJobs,
    ConfirmsOnlyTheFirstAttempt,
    GivesRetriesBack,
    ForgetsToRemove,
    ForgetsToStop,
    WritesHalfOfTheJobs,
    LosesSubmissions,
    KeepsOpenIntervalsInMemory,
    SkipsGenerations,
    TurnsTimeBack,
    DoesNotLaunchAgain,
    DoesNotReconcile,
    DoesNotStopAgain,
    DoesNotPrepareAgain,
}

impl Bug {
    pub(crate) const ALL: [Bug; 24] = [
        Bug::TakesEventsOfOtherAttempts,
        Bug::CountsLostAgentsAsFailures,
        Bug::OverlooksFailedRanks,
        Bug::BlamesRanksThatItStopped,
        Bug::PlacesHalfAGang,
        Bug::SharesGpus,
        Bug::ReleasesWhileStopping,
        Bug::ForgetsWhatIsHeld,
        Bug::LosesLedgerIntervals,
        Bug::BooksLedgerIntervalsTwice,
        Bug::LosesWaitingJobs,
        Bug::ConfirmsOnlyTheFirstAttempt,
        Bug::GivesRetriesBack,
        Bug::ForgetsToRemove,
        Bug::ForgetsToStop,
        Bug::WritesHalfOfTheJobs,
        Bug::LosesSubmissions,
        Bug::KeepsOpenIntervalsInMemory,
        Bug::SkipsGenerations,
        Bug::TurnsTimeBack,
        Bug::DoesNotLaunchAgain,
        Bug::DoesNotReconcile,
        Bug::DoesNotStopAgain,
        Bug::DoesNotPrepareAgain,
    ];
}

impl Planted {
    fn has(self, bug: Bug) -> bool {
        self.0 == Some(bug)
    }

    /// Changes an event before the core sees it.
    pub(crate) fn before(self, event: &Event, snapshot: &Snapshot, job: JobId) -> Event {
        let mut event = event.clone();
        match &mut event {
            Event::Place { placement } => {
                if self.has(Bug::PlacesHalfAGang) && placement.0.len() > 1 {
                    placement.0.pop();
                }
                if self.has(Bug::SharesGpus) {
                    for (_, slots) in &mut placement.0 {
                        *slots = Slots::first(slots.count());
                    }
                }
            }
            Event::Worker { attempt, event, .. } => {
                if self.has(Bug::TakesEventsOfOtherAttempts)
                    && let Some(gang) = snapshot.jobs.get(&job).and_then(|j| j.phase.gang())
                {
                    *attempt = gang.attempt;
                }
                self.worker_event(event);
            }
            Event::Suspend { .. }
            | Event::Claim { .. }
            | Event::Unclaim { .. }
            | Event::Evict { .. }
            | Event::Spare
            | Event::Hold { .. }
            | Event::Release { .. }
            | Event::Update { .. }
            | Event::DependencyEnded { .. }
            | Event::Cancel { .. }
            | Event::EnvironmentFailed { .. }
            | Event::Deadline => {}
        }
        event
    }

    fn worker_event(self, event: &mut WorkerEvent) {
        if self.has(Bug::CountsLostAgentsAsFailures)
            && let WorkerEvent::Lost { reason } = event
        {
            *event = WorkerEvent::LaunchFailed { reason: reason.clone() };
        }
        if let WorkerEvent::RankExited { code, stopping, .. } = event {
            if self.has(Bug::OverlooksFailedRanks) {
                *code = 0;
            }
            *stopping &= !self.has(Bug::BlamesRanksThatItStopped);
        }
        if let WorkerEvent::Gone { ranks, .. } = event {
            for end in ranks.values_mut() {
                if self.has(Bug::OverlooksFailedRanks) {
                    end.code = 0;
                }
                end.stopping &= !self.has(Bug::BlamesRanksThatItStopped);
            }
        }
    }

    /// Changes what the plan decided.
    pub(crate) fn decisions(self, _decisions: &mut Vec<Decision>) {}

    /// Whether the plan is told which jobs changed.
    pub(crate) fn touches(self) -> bool {
        true
    }

    /// Changes what a step did.
    pub(crate) fn after(self, mut out: Advance, snapshot: &mut Snapshot, job: JobId) -> Advance {
        let stopping = out.job.as_ref().is_some_and(|j| matches!(j.phase, Phase::Stopping(_)));
        let starting = out.job.as_ref().is_some_and(|j| matches!(j.phase, Phase::Starting(_)));
        if (self.has(Bug::ReleasesWhileStopping) && stopping) || (self.has(Bug::ForgetsWhatIsHeld) && starting) {
            for node in &out.nodes {
                if let Some(node) = snapshot.nodes.get_mut(node) {
                    node.held = Slots::NONE;
                }
            }
        }
        if self.has(Bug::LosesLedgerIntervals) {
            out.entries.pop();
        }
        if self.has(Bug::BooksLedgerIntervalsTwice) {
            out.entries.extend(out.entries.clone());
        }
        let again = out.moments.iter().any(|m| matches!(m.kind, MomentKind::QueuedAgain { .. }));
        if self.has(Bug::LosesWaitingJobs) && again {
            snapshot.waiting.remove(&job);
        }
        if self.has(Bug::GivesRetriesBack)
            && again
            && let (Some(kept), Some(written)) = (snapshot.jobs.get_mut(&job), out.job.as_mut())
        {
            kept.counters.failures = 0;
            written.counters.failures = 0;
        }
        if self.has(Bug::ConfirmsOnlyTheFirstAttempt) {
            out.actions.retain(|a| !matches!(a, Action::Confirm { attempt: 2.., .. }));
        }
        out
    }

    /// Changes what a turn writes and orders.
    pub(crate) fn turn(self, mut batch: Batch, mut orders: Vec<Order>) -> (Batch, Vec<Order>) {
        if self.has(Bug::ForgetsToRemove) {
            orders.retain(|o| !matches!(o, Order::Remove { .. }));
        }
        if self.has(Bug::ForgetsToStop) {
            orders.retain(|o| !matches!(o, Order::Stop { .. }));
        }
        if self.has(Bug::WritesHalfOfTheJobs) && batch.jobs.len() > 1 {
            batch.jobs.pop();
        }
        if self.has(Bug::LosesSubmissions) {
            batch.records.clear();
        }
        if self.has(Bug::KeepsOpenIntervalsInMemory) {
            batch.open.clear();
        }
        if self.has(Bug::SkipsGenerations) {
            batch.generation += 1;
        }
        if self.has(Bug::TurnsTimeBack) {
            batch.at = batch.at - Span(1000 * i64::try_from(batch.generation % 2).unwrap_or(0));
        }
        (batch, orders)
    }

    /// Changes what a new control plane orders first.
    pub(crate) fn recovery(self, mut orders: Vec<Stamped>) -> Vec<Stamped> {
        orders.retain(|s| match s.order {
            Order::Reconcile { .. } => !self.has(Bug::DoesNotReconcile),
            Order::Prepare { .. } => !self.has(Bug::DoesNotPrepareAgain),
            Order::Launch { .. } => !self.has(Bug::DoesNotLaunchAgain),
            Order::Stop { .. } => !self.has(Bug::DoesNotStopAgain),
            Order::Confirm { .. } | Order::Remove { .. } => true,
        });
        orders
    }
}
