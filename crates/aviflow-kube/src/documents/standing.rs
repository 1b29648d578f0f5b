//! What queues and pools have and use, as the status of their objects shows it.

use aviflow_api::crd::{PoolStatus, QueueStatus, QuotaStatus};
use aviflow_core::gpus::Slots;
use aviflow_core::ledger::GpuState;
use aviflow_core::model::{NodeCondition, Snapshot};
use aviflow_core::schedule;
use aviflow_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// Each queue. What is about its object is not filled in.
#[must_use]
pub fn queues(snapshot: &Snapshot, now: Time) -> BTreeMap<String, QueueStatus> {
    let uses = schedule::queues(snapshot, now);
    let mut out: BTreeMap<String, QueueStatus> = BTreeMap::new();
    for name in snapshot.queues.keys() {
        let quotas = uses.get(name).into_iter().flat_map(|u| &u.quotas).map(|(gpu_type, q)| {
            (gpu_type.clone(), QuotaStatus { used: q.used, guarantee: q.guarantee, limit: q.limit })
        });
        let quotas: BTreeMap<String, QuotaStatus> = quotas.collect();
        let words: Vec<String> = quotas.iter().map(|(t, q)| format!("{t} {}/{}", q.used, q.guarantee)).collect();
        let summary = (!words.is_empty()).then(|| words.join(", "));
        let (waiting, running) = (Some(0), Some(0));
        let status = QueueStatus {
            path: Some(path(snapshot, name)),
            waiting,
            running,
            summary,
            quotas,
            ..QueueStatus::default()
        };
        out.insert(name.clone(), status);
    }
    for job in snapshot.jobs.values() {
        let Some(status) = out.get_mut(&job.request.queue) else { continue };
        let counted = if job.phase.gang().is_some() { &mut status.running } else { &mut status.waiting };
        *counted = counted.map(|n: u32| n + 1);
    }
    out
}

/// The names from the root down to a queue.
fn path(snapshot: &Snapshot, name: &str) -> String {
    let (mut names, mut seen) = (vec![name], BTreeSet::from([name]));
    let mut at = snapshot.queues.get(name);
    while let Some(parent) = at.and_then(|q| q.parent.as_deref()).filter(|parent| seen.insert(parent)) {
        names.push(parent);
        at = snapshot.queues.get(parent);
    }
    names.reverse();
    names.join("/")
}

/// Each pool that has a document or nodes. What is about its object is not filled in.
#[must_use]
pub fn pools(snapshot: &Snapshot) -> BTreeMap<String, PoolStatus> {
    let empty = || PoolStatus { nodes: Some(0), gpus: Some(0), free: Some(0), ..PoolStatus::default() };
    let mut out: BTreeMap<String, PoolStatus> = snapshot.pools.keys().map(|name| (name.clone(), empty())).collect();
    let there = |n: &&aviflow_core::model::Node| n.gpus != Slots::NONE && n.condition != NodeCondition::Gone;
    for node in snapshot.nodes.values().filter(there) {
        let status = out.entry(node.pool.clone()).or_insert_with(empty);
        let gpus = node.gpus.count();
        let open = snapshot.ledger.node(node.id).iter();
        let free: u32 = open
            .filter(|e| matches!(e.state, GpuState::Free | GpuState::Reserved | GpuState::Stranded))
            .map(|e| e.slots.count())
            .sum();
        status.nodes = status.nodes.map(|n| n + 1);
        status.gpus = status.gpus.map(|n| n + gpus);
        status.free = status.free.map(|n| n + free);
        *status.gpu_types.entry(node.gpu_type.clone()).or_default() += gpus;
    }
    out
}
