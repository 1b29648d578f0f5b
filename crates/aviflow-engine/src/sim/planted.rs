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
    EvictsWithoutAClaim,
    LosesClaimsAtReopen,
    GivesClaimedGpusAway,
    KeepsClaimsForEver,
    SparesNobody,
    DrainsForgetTheirEnd,
    DrainsForgetTheirBeginning,
    TakesNodesAndForgetsIt,
    ChargesNobodyForUpdates,
    TellsNobodyOfEnds,
    StartsHeldJobs,
    ForgetsThatJobsChanged,
    WritesNoQueues,
    WritesNoUsage,
    WritesNoDrains,
    WritesNoActs,
    ExceedsLimits,
    CountsOthersTwice,
    ForgetsThatOthersLeft,
    GivesOthersGpusAway,
    KeepsNothing,
    KeepsForEver,
    KeepsTooLate,
    GivesUpBeforeTheLaunch,
    DoesNotKeepAgain,
    RefusalsCostRetries,
    BlamesWhoIsAskedToLeave,
}

impl Bug {
    pub(crate) const ALL: [Bug; 51] = [
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
        Bug::EvictsWithoutAClaim,
        Bug::LosesClaimsAtReopen,
        Bug::GivesClaimedGpusAway,
        Bug::KeepsClaimsForEver,
        Bug::SparesNobody,
        Bug::DrainsForgetTheirEnd,
        Bug::DrainsForgetTheirBeginning,
        Bug::TakesNodesAndForgetsIt,
        Bug::ChargesNobodyForUpdates,
        Bug::TellsNobodyOfEnds,
        Bug::StartsHeldJobs,
        Bug::ForgetsThatJobsChanged,
        Bug::WritesNoQueues,
        Bug::WritesNoUsage,
        Bug::WritesNoDrains,
        Bug::WritesNoActs,
        Bug::ExceedsLimits,
        Bug::CountsOthersTwice,
        Bug::ForgetsThatOthersLeft,
        Bug::GivesOthersGpusAway,
        Bug::KeepsNothing,
        Bug::KeepsForEver,
        Bug::KeepsTooLate,
        Bug::GivesUpBeforeTheLaunch,
        Bug::DoesNotKeepAgain,
        Bug::RefusalsCostRetries,
        Bug::BlamesWhoIsAskedToLeave,
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
            // It would never come to anything.
            Event::DependencyEnded { job, .. } if self.has(Bug::TellsNobodyOfEnds) => *job = JobId(0),
            Event::Found { .. }
            | Event::Suspend { .. }
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
        let blamed = self.has(Bug::RefusalsCostRetries) && matches!(event, WorkerEvent::Refused { .. })
            || self.has(Bug::BlamesWhoIsAskedToLeave) && matches!(event, WorkerEvent::Leaving { .. });
        if blamed {
            *event = WorkerEvent::LaunchFailed { reason: "blamed".to_owned() };
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

    /// Changes how many GPUs others use, where it was another number before.
    pub(crate) fn others(self, before: u32, now: u32) -> u32 {
        let now = if self.has(Bug::CountsOthersTwice) { 2 * now } else { now };
        if self.has(Bug::ForgetsThatOthersLeft) { now.max(before) } else { now }
    }

    /// Changes what a new control plane read.
    pub(crate) fn opened(self, snapshot: &mut Snapshot) {
        if self.has(Bug::LosesClaimsAtReopen) {
            snapshot.jobs.values_mut().for_each(|j| j.claim = None);
        }
    }

    /// Changes what the plan sees.
    pub(crate) fn planned(self, snapshot: &Snapshot) -> Snapshot {
        let mut seen = snapshot.clone();
        if self.has(Bug::StartsHeldJobs) {
            seen.jobs.values_mut().for_each(|j| j.held = None);
        }
        if self.has(Bug::ExceedsLimits) {
            seen.queues.values_mut().flat_map(|q| q.quotas.values_mut()).for_each(|q| q.limit = None);
        }
        seen
    }

    /// Whether the plan sees what there is.
    pub(crate) fn sees(self) -> bool {
        !self.has(Bug::StartsHeldJobs) && !self.has(Bug::ExceedsLimits)
    }

    /// Changes what the plan decided.
    pub(crate) fn decisions(self, decisions: &mut Vec<Decision>) {
        decisions.retain(|d| match d {
            Decision::Claim { .. } => !self.has(Bug::EvictsWithoutAClaim),
            Decision::Unclaim { .. } => !self.has(Bug::KeepsClaimsForEver),
            Decision::Spare { .. } => !self.has(Bug::SparesNobody),
            Decision::Window { closed, .. } => {
                !self.has(if *closed { Bug::DrainsForgetTheirBeginning } else { Bug::DrainsForgetTheirEnd })
            }
            Decision::Start { .. } | Decision::Evict { .. } | Decision::Suspend { .. } | Decision::Take { .. } => true,
        });
    }

    /// Whether the plan is told which jobs changed.
    pub(crate) fn touches(self) -> bool {
        !self.has(Bug::ForgetsThatJobsChanged)
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
        let claimed = out.moments.iter().any(|m| matches!(m.kind, MomentKind::Claimed { .. }));
        if self.has(Bug::GivesClaimedGpusAway) && claimed {
            for node in &out.nodes {
                if let Some(node) = snapshot.nodes.get_mut(node) {
                    node.claimed = Slots::NONE;
                }
            }
        }
        if self.has(Bug::GivesOthersGpusAway) && starting {
            snapshot.nodes.values_mut().for_each(|n| n.foreign = Slots::NONE);
        }
        let updated = out.moments.iter().any(|m| matches!(m.kind, MomentKind::Updated { .. }));
        if self.has(Bug::ChargesNobodyForUpdates) && updated {
            for key in &out.usage {
                snapshot.usage.remove(key);
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
        let keeps = |o: &Order| if let Order::Keep { gpus, .. } = o { Some(*gpus) } else { None };
        if self.has(Bug::KeepsNothing) {
            orders.retain(|o| keeps(o).is_none_or(|gpus| gpus == 0));
        }
        if self.has(Bug::KeepsForEver) {
            orders.retain(|o| keeps(o) != Some(0));
        }
        // In a stable order: all that is kept first, or last.
        if self.has(Bug::GivesUpBeforeTheLaunch) {
            orders.sort_by_key(|o| keeps(o).is_none());
        }
        if self.has(Bug::KeepsTooLate) {
            orders.sort_by_key(|o| keeps(o).is_some());
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
        if self.has(Bug::WritesNoQueues) {
            batch.queues.clear();
        }
        if self.has(Bug::WritesNoUsage) {
            batch.usage.clear();
        }
        if self.has(Bug::WritesNoDrains) {
            batch.drains = None;
        }
        if self.has(Bug::TakesNodesAndForgetsIt) && batch.drains.is_some() {
            batch.nodes.clear();
        }
        if self.has(Bug::WritesNoActs) {
            batch.acts.clear();
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
            Order::Keep { .. } => !self.has(Bug::DoesNotKeepAgain),
            Order::Abandon { .. } | Order::Confirm { .. } | Order::Remove { .. } => true,
        });
        orders
    }
}
