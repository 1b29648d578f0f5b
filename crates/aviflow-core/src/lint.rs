//! The invariants, checked over a snapshot. Runs after every simulated step.

use crate::gpus::Slots;
use crate::ledger::{GpuState, unallocated};
use crate::model::{EvictionCause, Job, JobId, Node, NodeCondition, NodeId, Phase, Snapshot, WorkerState};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that is wrong with a snapshot; empty if nothing is.
#[must_use]
pub fn lint(snapshot: &Snapshot) -> Vec<String> {
    let mut wrong = Vec::new();
    let holders = gangs(snapshot, &mut wrong);
    books(snapshot, &holders, &mut wrong);
    ledger(snapshot, &holders, &mut wrong);
    claims(snapshot, &mut wrong);
    charges(snapshot, &mut wrong);
    tree(snapshot, &mut wrong);
    drains(snapshot, &mut wrong);
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
        others(node, wrong);
    }
}

/// What others use is nobody's of ours and free to none; it is as much as they are known to use, as far as there is room.
fn others(node: &Node, wrong: &mut Vec<String>) {
    let (name, foreign) = (&node.name, node.foreign);
    if !foreign.and(node.held).is_empty() || !foreign.without(node.gpus).is_empty() {
        wrong.push(format!("node {name}: others use {foreign:?}, of which a job holds some or the node has not all"));
    }
    if !foreign.and(node.free()).is_empty() {
        wrong.push(format!("node {name}: a GPU that others use is free"));
    }
    let room = node.gpus.without(node.held).without(node.leaving).count();
    if foreign.count() != node.others.min(room) {
        wrong.push(format!("node {name}: others use {} GPUs, and {foreign:?} of {room} count as theirs", node.others));
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
                s == state || state == GpuState::Free && matches!(s, GpuState::Reserved | GpuState::Stranded)
            };
            for open in snapshot.ledger.node(node.id) {
                if !open.slots.and(slots).is_empty() && !booked(open.state) {
                    wrong.push(format!("ledger: node {} books loose GPUs as {}", node.name, open.state.name()));
                }
            }
        }
    }
}

/// What is promised is promised once, to a job that waits, and to nobody else; who must leave, leaves for somebody.
fn claims(snapshot: &Snapshot, wrong: &mut Vec<String>) {
    let mut promised: BTreeMap<NodeId, Slots> = BTreeMap::new();
    for job in snapshot.jobs.values() {
        let name = &job.key.name;
        if job.held.is_some() && matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
            wrong.push(format!("job {name} is held and {}", job.phase.name()));
        }
        for dependency in job.after.iter().filter(|d| d.met.is_none()) {
            if !snapshot.jobs.contains_key(&dependency.job) {
                wrong.push(format!("job {name} waits for {}, which has ended", dependency.name));
            }
        }
        eviction(snapshot, job, wrong);
        let Some(claim) = &job.claim else { continue };
        if job.phase != Phase::Queued || job.held.is_some() {
            wrong.push(format!("job {name} is {}, held by {:?}, and has a claim", job.phase.name(), job.held));
        }
        for (node, slots) in claim.placement.gpus().iter() {
            let all = promised.entry(node).or_default();
            if !all.and(slots).is_empty() {
                wrong.push(format!("a GPU of node {} is promised to {name} and to another", node.0));
            }
            *all = all.or(slots);
        }
    }
    for node in snapshot.nodes.values() {
        let all = promised.remove(&node.id).unwrap_or_default();
        if all != node.claimed {
            wrong.push(format!("node {}: the book says {:?} is claimed, the jobs {all:?}", node.name, node.claimed));
        }
        if !node.free().and(all).is_empty() {
            wrong.push(format!("node {}: a promised GPU is free", node.name));
        }
    }
    for node in promised.keys() {
        wrong.push(format!("GPUs of node {} are promised, which is unknown", node.0));
    }
}

fn eviction(snapshot: &Snapshot, job: &Job, wrong: &mut Vec<String>) {
    let Some(eviction) = &job.eviction else { return };
    let name = &job.key.name;
    if !matches!(job.phase, Phase::Starting(_) | Phase::Running(_)) {
        wrong.push(format!("job {name} is {} and is to be evicted", job.phase.name()));
    }
    let whom = eviction.beneficiary.as_ref().map(|b| b.job);
    match (eviction.cause, whom) {
        (EvictionCause::Drain, None) => {}
        (EvictionCause::Drain, Some(_)) => wrong.push(format!("job {name} leaves a drained node for another job")),
        (EvictionCause::Reclaim | EvictionCause::Priority | EvictionCause::Turn, whom) => {
            let claim = whom.and_then(|id| snapshot.jobs.get(&id)).and_then(|j| j.claim.as_ref());
            if !claim.is_some_and(|c| c.victims.iter().any(|(v, attempt)| *v == job.id && *attempt == job.attempts)) {
                wrong.push(format!("job {name} is to leave for job {whom:?}, whose claim does not name it"));
            }
        }
    }
}

/// Decayed use grows by what live attempts hold.
fn charges(snapshot: &Snapshot, wrong: &mut Vec<String>) {
    let mut held: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for job in snapshot.jobs.values() {
        if let Some(gang) = job.phase.gang() {
            *held.entry((&job.request.queue, &job.user)).or_default() += gang.gpu_count();
        }
    }
    for ((queue, user), usage) in &snapshot.usage {
        let gpus = held.remove(&(queue.as_str(), user.as_str())).unwrap_or(0);
        if gpus != usage.gpus {
            wrong.push(format!("{user} is charged for {} GPUs in queue {queue} and holds {gpus}", usage.gpus));
        }
    }
    for ((queue, user), gpus) in held {
        wrong.push(format!("{user} holds {gpus} GPUs in queue {queue} and is charged for none"));
    }
}

/// Queues form a tree, and the path of each node fits its pool.
fn tree(snapshot: &Snapshot, wrong: &mut Vec<String>) {
    for queue in snapshot.queues.values() {
        let mut above = queue;
        for step in 0.. {
            let Some(parent) = &above.parent else { break };
            match snapshot.queues.get(parent) {
                None => {
                    wrong.push(format!("queue {} is below {parent}, which does not exist", above.name));
                    break;
                }
                Some(_) if step > snapshot.queues.len() => {
                    wrong.push(format!("queue {} is below itself", queue.name));
                    break;
                }
                Some(next) => above = next,
            }
        }
    }
    for node in snapshot.nodes.values() {
        let pool = snapshot.pools.get(&node.pool);
        let fits = pool.map_or(node.path.is_empty(), |p| {
            let unsaid = p.domains.is_empty() && node.reported.is_empty();
            node.path.len() == p.levels.len() && (unsaid || node.path == p.path(&node.name, &node.reported))
        });
        if !fits {
            wrong.push(format!("node {} is at {:?}, which is not what its pool says", node.name, node.path));
        }
    }
}

/// A node is part of one drain, once; what is away is drained.
fn drains(snapshot: &Snapshot, wrong: &mut Vec<String>) {
    for node in snapshot.nodes.values() {
        if node.cordoned && node.condition == NodeCondition::Ready {
            wrong.push(format!("node {} is cordoned and takes work", node.name));
        }
        if node.vacate.is_some() && node.closed.is_none() {
            wrong.push(format!("node {} is to be empty and open to work", node.name));
        }
        if node.closed.is_some() && node.condition == NodeCondition::Ready {
            wrong.push(format!("node {} is closed by others and takes work", node.name));
        }
        if node.condition == NodeCondition::Cordoned && !node.shut() && node.drain.is_none() {
            wrong.push(format!("node {} takes no work, and nobody said so", node.name));
        }
    }
    let mut seen = BTreeSet::new();
    for drain in &snapshot.drains {
        if drain.nodes.is_empty() && drain.taken.is_empty() {
            wrong.push(format!("drain {} is over and is kept", drain.id));
        }
        for id in drain.nodes.iter().chain(&drain.taken) {
            if !seen.insert(id) {
                wrong.push(format!("node {} is drained twice", id.0));
            }
        }
        for id in &drain.taken {
            if snapshot.nodes.get(id).is_none_or(|n| n.drain.is_none()) {
                wrong.push(format!("node {} was taken by drain {} and is not drained", id.0, drain.id));
            }
        }
    }
}
