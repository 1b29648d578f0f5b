//! The invariants, checked over a snapshot. Runs after every simulated step.

use crate::gpus::Slots;
use crate::ledger::{GpuState, unallocated};
use crate::model::{JobId, NodeId, Phase, Snapshot, WorkerState};
use std::collections::BTreeMap;

/// Everything that is wrong with a snapshot; empty if nothing is.
#[must_use]
pub fn lint(snapshot: &Snapshot) -> Vec<String> {
    let mut wrong = Vec::new();
    let holders = gangs(snapshot, &mut wrong);
    books(snapshot, &holders, &mut wrong);
    ledger(snapshot, &holders, &mut wrong);
    wrong
}

type Holders = BTreeMap<NodeId, Vec<(JobId, u32, Slots)>>;

/// Gangs are whole; jobs are where their phase says.
fn gangs(snapshot: &Snapshot, wrong: &mut Vec<String>) -> Holders {
    let mut holders = Holders::new();
    for (id, job) in &snapshot.jobs {
        let name = &job.key.name;
        if job.phase.is_terminal() {
            wrong.push(format!("job {name} has ended and is still in the snapshot"));
        }
        if snapshot.waiting.contains(id) != (job.phase == Phase::Queued) {
            wrong.push(format!("job {name} is {} and its place among the waiting says otherwise", job.phase.name()));
        }
        if job.counters.failures > job.request.failures_allowed {
            wrong.push(format!(
                "job {name} spent {} retries of {}",
                job.counters.failures, job.request.failures_allowed
            ));
        }
        let Some(gang) = job.phase.gang() else { continue };
        let workers = u32::try_from(gang.workers.len()).unwrap_or(u32::MAX);
        if workers < job.request.nodes.min || workers > job.request.nodes.max {
            wrong.push(format!("job {name} has a gang of {workers} workers and asked for {:?}", job.request.nodes));
        }
        if gang.attempt != job.attempts {
            wrong.push(format!("job {name} runs attempt {} of {}", gang.attempt, job.attempts));
        }
        if gang.all_gone() {
            wrong.push(format!("job {name} is {} and its last process is gone", job.phase.name()));
        }
        let up = gang.workers.iter().all(|w| w.state >= WorkerState::Up);
        if matches!(job.phase, Phase::Running(_)) != up && matches!(job.phase, Phase::Running(_) | Phase::Starting(_)) {
            wrong.push(format!("job {name} is {} though its workers say otherwise", job.phase.name()));
        }
        for worker in &gang.workers {
            if worker.slots.count() != job.request.gpus_per_node {
                wrong.push(format!("job {name} holds {} GPUs on a node", worker.slots.count()));
            }
            holders.entry(worker.node).or_default().push((*id, gang.attempt, worker.slots));
        }
    }
    for id in &snapshot.waiting {
        if !snapshot.jobs.contains_key(id) {
            wrong.push(format!("job {} waits and is unknown", id.0));
        }
    }
    holders
}

/// No GPU is held twice, and the nodes' books say who holds what.
fn books(snapshot: &Snapshot, holders: &Holders, wrong: &mut Vec<String>) {
    for (id, list) in holders {
        let Some(node) = snapshot.nodes.get(id) else {
            wrong.push(format!("node {} is held and unknown", id.0));
            continue;
        };
        let mut seen = Slots::NONE;
        for (job, _, slots) in list {
            if !seen.and(*slots).is_empty() {
                wrong.push(format!("node {}: a GPU of job {} is held twice", node.name, job.0));
            }
            if !slots.without(node.gpus).is_empty() {
                wrong.push(format!("node {}: job {} holds GPUs that do not exist", node.name, job.0));
            }
            seen = seen.or(*slots);
        }
    }
    for node in snapshot.nodes.values() {
        let held = holders.get(&node.id).into_iter().flatten().fold(Slots::NONE, |a, (_, _, s)| a.or(*s));
        if held != node.held {
            wrong.push(format!("node {}: the book says {:?} is held, the gangs hold {held:?}", node.name, node.held));
        }
    }
}

/// Each GPU is in exactly one open interval, of its holder.
fn ledger(snapshot: &Snapshot, holders: &Holders, wrong: &mut Vec<String>) {
    for node in snapshot.nodes.values() {
        let mut seen = Slots::NONE;
        for open in snapshot.ledger.node(node.id) {
            if !seen.and(open.slots).is_empty() {
                wrong.push(format!("ledger: node {} has a GPU in two states", node.name));
            }
            seen = seen.or(open.slots);
            let owned = open.owner.map_or(Slots::NONE, |owner| {
                let of = |(job, attempt, _): &&(JobId, u32, Slots)| (*job, *attempt) == (owner.job, owner.attempt);
                holders.get(&node.id).into_iter().flatten().find(of).map_or(Slots::NONE, |h| h.2)
            });
            if open.owner.is_some() && !open.slots.without(owned).is_empty() {
                wrong.push(format!("ledger: node {} charges an attempt for GPUs it does not hold", node.name));
            }
            if open.owner.is_none() && !open.slots.and(node.held).is_empty() {
                wrong.push(format!("ledger: node {} has a held GPU as {}", node.name, open.state.name()));
            }
        }
        if seen != node.gpus {
            wrong.push(format!("ledger: node {} accounts for {seen:?} of {:?}", node.name, node.gpus));
        }
        for (slots, state) in unallocated(node) {
            let booked = |s: GpuState| {
                s == state
                    || matches!(s, GpuState::Claimed | GpuState::Reserved | GpuState::Stranded | GpuState::Foreign)
            };
            for open in snapshot.ledger.node(node.id) {
                if !open.slots.and(slots).is_empty() && !booked(open.state) {
                    wrong.push(format!("ledger: node {} books loose GPUs as {}", node.name, open.state.name()));
                }
            }
        }
    }
}
