//! What the decisions do to the snapshot, as `lifecycle::advance` would in the end leave it.

use super::index;
use crate::sim::Act;
use aviflow_core::model::{
    EvictionCause, Gang, Job, JobId, Node, Phase, Placement, Snapshot, TurnedOut, Worker, WorkerState,
};
use aviflow_core::schedule::Decision;
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;

/// What carrying out a decision came to.
pub(super) struct Done {
    /// The job it was about.
    pub job: JobId,
    /// What the virtual cluster is to do.
    pub act: Option<Act>,
}

/// Carries a decision out; says what is impossible about it.
pub(super) fn out(snapshot: &mut Snapshot, decision: &Decision, restart: Span, now: Time) -> Result<Done, String> {
    match decision {
        Decision::Start { job, placement } => start(snapshot, *job, placement, restart, now),
        Decision::Suspend { job, turned_out } => suspend(snapshot, *job, turned_out, now),
        Decision::Claim { job, claim } => {
            let id = *job;
            let job = waiting(snapshot, id)?;
            if job.claim.is_some() {
                return Err(format!("{} gets a second claim", job.key.name));
            }
            job.claim = Some(claim.clone());
            promise(snapshot, &claim.placement, |node, slots| node.claimed = node.claimed.or(slots));
            Ok(quiet(id))
        }
        Decision::Unclaim { job, .. } => {
            let id = *job;
            waiting(snapshot, id)?;
            unclaim(snapshot, id);
            Ok(quiet(id))
        }
        Decision::Evict { job, eviction } => {
            let id = *job;
            let job = running(snapshot, id)?;
            job.eviction.get_or_insert_with(|| eviction.clone());
            Ok(quiet(id))
        }
        Decision::Spare { job } => {
            let id = *job;
            running(snapshot, id)?.eviction = None;
            Ok(quiet(id))
        }
        Decision::Window { node, .. } | Decision::Take { node, .. } => {
            Err(format!("it drains node {}, and nobody asked for that", node.0))
        }
    }
}

fn quiet(job: JobId) -> Done {
    Done { job, act: None }
}

fn waiting(snapshot: &mut Snapshot, id: JobId) -> Result<&mut Job, String> {
    match snapshot.jobs.get_mut(&id) {
        Some(job) if job.phase == Phase::Queued => Ok(job),
        Some(job) => Err(format!("{} is {} and does not wait", job.key.name, job.phase.name())),
        None => Err(format!("job {} is unknown or has ended", id.0)),
    }
}

fn running(snapshot: &mut Snapshot, id: JobId) -> Result<&mut Job, String> {
    match snapshot.jobs.get_mut(&id) {
        Some(job) if matches!(job.phase, Phase::Running(_)) => Ok(job),
        Some(job) => Err(format!("{} is {} and does not run", job.key.name, job.phase.name())),
        None => Err(format!("job {} is unknown or has ended", id.0)),
    }
}

fn start(snapshot: &mut Snapshot, id: JobId, placement: &Placement, restart: Span, now: Time) -> Result<Done, String> {
    waiting(snapshot, id)?;
    unclaim(snapshot, id);
    for (node, slots) in &placement.0 {
        let Some(node) = snapshot.nodes.get_mut(node) else { return Err(format!("node {} is unknown", node.0)) };
        if !slots.without(node.free()).is_empty() {
            return Err(format!("job {} gets GPUs of {} that are held or promised", id.0, node.name));
        }
        node.held = node.held.or(*slots);
    }
    let worker = |(node, slots)| Worker {
        node,
        slots,
        state: WorkerState::Up,
        address: None,
        exits: BTreeMap::new(),
        ended: None,
        next_port: None,
    };
    let job = waiting(snapshot, id)?;
    job.attempts += 1;
    job.not_before = None;
    let first = job.attempts == 1;
    job.phase = Phase::Running(Gang {
        attempt: job.attempts,
        epoch: 1,
        placed: now,
        up: Some(if first { now } else { now + restart }),
        workers: placement.0.iter().copied().map(worker).collect(),
        stepped: true,
        repeating: false,
        again: None,
        xids: Vec::new(),
    });
    let (gpus, estimate) = (job.request.gpus(), job.estimate.filter(|_| first));
    if let Some(estimate) = estimate {
        snapshot.history.calibration.learn(&estimate, now);
    }
    snapshot.waiting.remove(&id);
    charge(snapshot, id, gpus, true, now);
    let place = placement.0.iter().map(|(node, slots)| (node.0, slots.count())).collect();
    Ok(Done { job: id, act: Some(Act::Start { job: index(id), place }) })
}

fn suspend(snapshot: &mut Snapshot, id: JobId, turned_out: &TurnedOut, now: Time) -> Result<Done, String> {
    running(snapshot, id)?;
    leave(snapshot, id, now);
    let job = waiting(snapshot, id)?;
    job.counters.suspensions += 1;
    job.turned_out = Some(turned_out.clone());
    let turn = turned_out.cause == EvictionCause::Turn;
    job.preempted += u32::from(!turn);
    snapshot.waiting.insert(id);
    Ok(Done { job: id, act: Some(Act::Stop { job: index(id), turn }) })
}

/// A running job has ended.
pub(super) fn end(snapshot: &mut Snapshot, id: JobId, now: Time) {
    leave(snapshot, id, now);
    if let Some(job) = snapshot.jobs.remove(&id) {
        snapshot.history.ran(job.request.gpus(), job.ran, job.request.time_limit);
    }
}

/// Takes a running job from its nodes, and counts what it had.
fn leave(snapshot: &mut Snapshot, id: JobId, now: Time) {
    let Some(job) = snapshot.jobs.get_mut(&id) else { return };
    let Phase::Running(gang) = std::mem::replace(&mut job.phase, Phase::Queued) else { return };
    let gpus = gang.gpu_count();
    job.ran += gang.up.map_or(Span(0), |up| now.since(up));
    job.gpu_time += Span(i64::from(gpus) * now.since(gang.placed).0);
    job.last_nodes = gang.nodes().collect();
    job.eviction = None;
    for worker in &gang.workers {
        if let Some(node) = snapshot.nodes.get_mut(&worker.node) {
            node.held = node.held.without(worker.slots);
        }
    }
    charge(snapshot, id, gpus, false, now);
}

/// Charges the decayed use of queue and user with the GPUs that the job holds from now on.
fn charge(snapshot: &mut Snapshot, id: JobId, gpus: u32, more: bool, now: Time) {
    let Some(job) = snapshot.jobs.get(&id) else { return };
    let half_life = snapshot.policy.half_life;
    let usage = snapshot.usage.entry((job.request.queue.clone(), job.user.clone())).or_default();
    let gpus = if more { usage.gpus + gpus } else { usage.gpus.saturating_sub(gpus) };
    *usage = usage.hold(gpus, now, half_life);
}

fn unclaim(snapshot: &mut Snapshot, id: JobId) {
    let Some(claim) = snapshot.jobs.get_mut(&id).and_then(|job| job.claim.take()) else { return };
    promise(snapshot, &claim.placement, |node, slots| node.claimed = node.claimed.without(slots));
}

fn promise(snapshot: &mut Snapshot, placement: &Placement, change: impl Fn(&mut Node, aviflow_core::gpus::Slots)) {
    for (id, slots) in &placement.0 {
        if let Some(node) = snapshot.nodes.get_mut(id) {
            change(node, *slots);
        }
    }
}
