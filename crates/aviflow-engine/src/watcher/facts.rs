//! What others report, as facts for the watch.

use super::Notice;
use crate::ports::Observation;
use crate::telemetry::Point;
use aviflow_core::health::Fact;
use aviflow_core::health::numbers::Reading;
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::{JobId, Snapshot};
use aviflow_core::time::Span;

/// A report of progress. That of an evaluation is no step.
#[must_use]
pub fn of_point(point: &Point) -> Fact {
    if point.is_evaluation() {
        return Fact::Active;
    }
    let loss = match point.values.get("loss") {
        Some(loss) => Some(Reading::Micro(micros(*loss))),
        None => point.odd.contains_key("loss").then_some(Reading::NotFinite),
    };
    let own = point.values.get("own_seconds").and_then(|seconds| u64::try_from(micros(*seconds)).ok());
    Fact::Step { rank: point.rank, step: point.step, total: point.total_steps, loss, own_micros: own }
}

#[expect(clippy::cast_possible_truncation, reason = "what is out of range becomes the end of it")]
fn micros(value: f64) -> i64 {
    (value * 1e6).round() as i64
}

/// What the engine is told of a worker or a node, and how long ago it happened; none where the watch has no use for it.
#[must_use]
pub fn of_observation(observation: &Observation, snapshot: &Snapshot) -> Option<(Notice, Span)> {
    match observation {
        Observation::Worker { job, attempt, epoch, worker, ago, event } => {
            let fact = of_event(*job, *worker, event, snapshot)?;
            Some((Notice::Fact { job: *job, attempt: *attempt, epoch: Some(*epoch), fact }, *ago))
        }
        Observation::NodeHealth { name, broken } if !broken.is_empty() => {
            let node = snapshot.nodes.values().find(|node| node.name == *name)?.id;
            Some((Notice::Broken { node, slots: broken.clone() }, Span(0)))
        }
        Observation::NodeHealth { .. }
        | Observation::NodeSeen { .. }
        | Observation::NodeGone { .. }
        | Observation::NodeForeign { .. }
        | Observation::NodeClosed { .. }
        | Observation::EnvironmentReady { .. }
        | Observation::EnvironmentFailed { .. }
        | Observation::Found { .. } => None,
    }
}

fn of_event(job: JobId, worker: u32, event: &WorkerEvent, snapshot: &Snapshot) -> Option<Fact> {
    let first = || snapshot.jobs.get(&job).map_or(worker, |job| worker.saturating_mul(job.request.ranks_per_node));
    match event {
        WorkerEvent::RankExited { rank, code, stopping, .. } => {
            Some(Fact::Ended { rank: *rank, ok: *code == 0 && !stopping })
        }
        WorkerEvent::Gone { ranks, .. } => {
            let ok = !ranks.is_empty() && ranks.values().all(|end| end.code == 0 && !end.stopping);
            Some(Fact::Ended { rank: first(), ok })
        }
        WorkerEvent::Lost { .. } | WorkerEvent::LaunchFailed { .. } => Some(Fact::Ended { rank: first(), ok: false }),
        WorkerEvent::FirstStep { step } => Some(Fact::FirstStep { step: *step }),
        WorkerEvent::CheckpointBegun { .. } => Some(Fact::CheckpointBegun),
        WorkerEvent::CheckpointComplete { .. } => Some(Fact::CheckpointOver { complete: true }),
        WorkerEvent::CheckpointGoesOn { .. } | WorkerEvent::CheckpointFailed { .. } => {
            Some(Fact::CheckpointOver { complete: false })
        }
        WorkerEvent::Ready { .. }
        | WorkerEvent::Up
        | WorkerEvent::Refused { .. }
        | WorkerEvent::Leaving { .. }
        | WorkerEvent::CaughtUp { .. }
        | WorkerEvent::Facts { .. } => None,
    }
}
