//! What people want to see of the quota tree and of the order, with the figures by which the pass goes.

use super::memo::Memo;
use super::pass::Pass;
use super::turns;
use crate::model::{JobId, Snapshot, TimeSharing};
use crate::time::Time;
use std::collections::BTreeMap;

/// What a queue has of one accelerator type, in GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaUse {
    /// What it is guaranteed, or what those below it are.
    pub guarantee: u32,
    /// What of that there really is.
    pub effective: u32,
    /// What it never exceeds, as its own document says.
    pub limit: Option<u32>,
    /// Its weight.
    pub weight: u32,
    /// In use or promised, with all queues below.
    pub used: u32,
    /// Of its effective guarantee, what others use.
    pub lent: u32,
    /// What it could still use, by limits and by what nobody holds.
    pub headroom: u32,
}

/// A queue as the plan sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueUse {
    /// By accelerator type that any queue has a quota of.
    pub quotas: BTreeMap<String, QuotaUse>,
    /// Decayed GPU-milliseconds, with all queues below.
    pub decayed: u64,
    /// How its jobs take turns.
    pub time_sharing: Option<TimeSharing>,
}

/// Each queue as the plan sees it.
#[must_use]
pub fn queues(snapshot: &Snapshot, now: Time) -> BTreeMap<String, QueueUse> {
    let mut memo = Memo::default();
    memo.refresh(snapshot);
    let mut pass = Pass::new(snapshot, &memo, now);
    pass.charge_claims();
    let mut out = BTreeMap::new();
    for (b, branch) in pass.quotas.branches.iter().enumerate().filter(|(_, b)| !b.own) {
        let mut queue =
            QueueUse { decayed: pass.quotas.decayed(b), time_sharing: pass.shares(b), ..QueueUse::default() };
        for (t, name) in pass.grid.types.iter().enumerate().filter(|(t, _)| pass.quotas.managed[*t]) {
            queue.quotas.insert(name.clone(), pass.quotas.report(b, t));
        }
        out.insert(branch.name.clone(), queue);
    }
    out
}

/// What the place of a queue follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFactor {
    /// The queue.
    pub queue: String,
    /// The part of its guarantee that it uses, in millionths; none if it would exceed it with the job.
    pub guarantee_used: Option<u64>,
    /// Decayed GPU-milliseconds over its weight, with what it holds.
    pub use_over_weight: u64,
}

/// What the place of a waiting job follows from, in the order in which it is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factors {
    /// Its queue and those above it, the root first.
    pub queues: Vec<QueueFactor>,
    /// The priority.
    pub priority: i32,
    /// The level, where jobs take turns.
    pub level: Option<i64>,
    /// The decayed GPU-milliseconds of its user in its queue, where they do not.
    pub user_use: Option<u64>,
    /// When it was submitted.
    pub submitted: Time,
}

/// What the places of the waiting jobs follow from.
#[must_use]
pub fn factors(snapshot: &Snapshot, jobs: &[JobId], now: Time) -> BTreeMap<JobId, Factors> {
    let mut memo = Memo::default();
    memo.refresh(snapshot);
    let mut pass = Pass::new(snapshot, &memo, now);
    pass.charge_claims();
    let of = |id: &JobId| {
        let waiter = pass.index.waiter(*id)?;
        let ask = pass.ask(*id, waiter)?;
        let within = pass.quotas.within(ask.queue, waiter.gpu_type, ask.class.gpus());
        let key = pass.quotas.key(ask.queue, waiter.gpu_type, within);
        let queue = |(lacks_nothing, figure, b): (bool, u64, usize)| QueueFactor {
            queue: pass.quotas.branches[b].name.clone(),
            guarantee_used: (!lacks_nothing).then_some(figure),
            use_over_weight: if lacks_nothing { figure } else { pass.quotas.decayed(b) },
        };
        let sharing = pass.shares(ask.queue);
        let gpus = ask.class.gpus();
        let level = sharing.map(|s| turns::level(&pass, &s, waiter.had, gpus, waiter.submitted));
        let usage = snapshot.usage.get(&(ask.job.request.queue.clone(), ask.job.user.clone()));
        let used = usage.map_or(0, |u| u.at(now, snapshot.policy.half_life));
        let factors = Factors {
            queues: key.into_iter().filter(|(.., b)| !pass.quotas.branches[*b].own).map(queue).collect(),
            priority: ask.class.priority,
            level,
            user_use: level.is_none().then_some(used),
            submitted: waiter.submitted,
        };
        Some((*id, factors))
    };
    jobs.iter().filter_map(of).collect()
}
