//! The parts of a verdict that are worked out for one job, when somebody asks: who is in front, when it will
//! probably start, what would start it sooner, and what its place follows from.

use aviflow_api::convert::full_name;
use aviflow_api::rest::{Estimate, Factors, MoveInfo, QueueFactor, Verdict};
use aviflow_core::explain;
use aviflow_core::model::{JobId, Snapshot};
use aviflow_core::schedule::{self, Constraint, Decision, Memo, Plan};
use aviflow_core::time::Time;

/// Jobs in front that are named.
const FRONT: usize = 5;

/// Fills in what one job is worth working out.
pub(crate) fn complete(verdict: &mut Verdict, snapshot: &Snapshot, id: JobId, constraint: &Constraint, now: Time) {
    let mut memo = Memo::default();
    let plan = schedule::plan(snapshot, &mut memo, now);
    verdict.front = front(snapshot, &plan, id, constraint);
    let estimate = schedule::estimate(snapshot, &mut memo, &plan, id, now);
    verdict.estimate = estimate.map(|e| Estimate { p50: e.p50.0, p90: e.p90.0 });
    verdict.sooner = schedule::sooner(snapshot, id, now).map(|change| explain::sooner(&change));
    verdict.factors = schedule::factors(snapshot, &[id], now).remove(&id).map(factors);
}

/// The factors as REST has them.
pub(crate) fn factors(factors: schedule::Factors) -> Factors {
    let int = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let queue = |q: schedule::QueueFactor| QueueFactor {
        queue: q.queue,
        guarantee_used: q.guarantee_used.map(int),
        use_over_weight: int(q.use_over_weight),
    };
    Factors {
        queues: factors.queues.into_iter().map(queue).collect(),
        priority: factors.priority,
        level: factors.level,
        user_use: factors.user_use.map(int),
        submitted: factors.submitted.0,
    }
}

/// Who leaves for it, or the nearest of those that go before it and want GPUs too.
fn front(snapshot: &Snapshot, plan: &Plan, id: JobId, constraint: &Constraint) -> Vec<String> {
    let name = |id: &JobId| snapshot.jobs.get(id).map(|j| full_name(&j.key));
    match constraint {
        Constraint::Claimed { victims, .. } => victims.iter().filter_map(name).collect(),
        Constraint::After { job, .. } => name(job).into_iter().collect(),
        Constraint::Capacity { .. } | Constraint::Promised { .. } | Constraint::Kept { .. } => {
            let before = plan.waiting.iter().take_while(|w| w.job != id);
            let wants = |w: &&schedule::Waiting| {
                matches!(
                    plan.constraints.get(w.constraint),
                    Some(Constraint::Capacity { .. } | Constraint::Claimed { .. })
                )
            };
            let mut nearest: Vec<String> = before.filter(wants).filter_map(|w| name(&w.job)).collect();
            nearest.reverse();
            nearest.truncate(FRONT);
            nearest
        }
        Constraint::QueueLimit { queue, .. } | Constraint::QueueGuarantee { queue, .. } => {
            let holds = |j: &&aviflow_core::model::Job| j.phase.gang().is_some() && j.request.queue == *queue;
            snapshot.jobs.values().filter(holds).take(FRONT).map(|j| full_name(&j.key)).collect()
        }
        Constraint::Paused { .. }
        | Constraint::QueueHeld { .. }
        | Constraint::QueueGone { .. }
        | Constraint::Held { .. }
        | Constraint::Preference { .. }
        | Constraint::Environment { .. }
        | Constraint::BackOff { .. }
        | Constraint::Never { .. } => Vec::new(),
    }
}

/// Whom a plan moves for a job.
pub(crate) fn moves(snapshot: &Snapshot, plan: &Plan, id: JobId) -> Vec<MoveInfo> {
    let moved = |decision: &Decision| match decision {
        Decision::Evict { job, eviction } if eviction.beneficiary.as_ref().is_some_and(|b| b.job == id) => {
            let victim = snapshot.jobs.get(job)?;
            Some(MoveInfo {
                job: full_name(&victim.key),
                cause: eviction.cause.name().to_owned(),
                gpus: victim.phase.gang().map_or(0, |g| g.gpu_count()),
            })
        }
        Decision::Evict { .. }
        | Decision::Start { .. }
        | Decision::Claim { .. }
        | Decision::Unclaim { .. }
        | Decision::Spare { .. }
        | Decision::Suspend { .. }
        | Decision::Window { .. }
        | Decision::Take { .. } => None,
    };
    plan.decisions.iter().filter_map(moved).collect()
}
