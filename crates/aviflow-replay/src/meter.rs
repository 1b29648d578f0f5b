//! Integrals over the time of a replay, and what a drawing of it needs.

use crate::bound::Bound;
use crate::cluster::Cluster;
use crate::sim::Index;
use crate::trace::{Trace, TraceJob};
use aviflow_core::time::Time;

/// Counts GPUs over time. GPU-milliseconds are exact.
#[derive(Clone, Debug)]
pub struct Meter {
    now: Time,
    gpus_per_node: u32,
    used: u64,
    /// Free GPUs on nodes of which others are held.
    broken: u64,
    waiting: u64,
    waiting_gpus: u64,
    waiting_whole: u64,
    /// Time in which jobs wait, and GPU-time held then.
    pub waiting_ms: i64,
    /// See [`Meter::waiting_ms`].
    pub used_while_waiting: i64,
    /// Time in which jobs wait that want whole nodes, and free GPU-time on broken nodes then.
    pub waiting_whole_ms: i64,
    /// See [`Meter::waiting_whole_ms`].
    pub broken_while_waiting: i64,
    /// GPU-time that could at most have been held while jobs waited, where jobs must be inside one domain.
    pub bound_while_waiting: Option<i64>,
    /// GPU-time held in all.
    pub held: i64,
    bound: Option<Bound>,
    /// What a drawing needs, if it was asked for.
    pub record: Option<Record>,
}

/// What a drawing of a replay needs.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Which job held which nodes, and when.
    pub stretches: Vec<Stretch>,
    /// From each instant on: GPUs held, and GPUs that waiting jobs want.
    pub series: Vec<(Time, u64, u64)>,
}

/// A job on its nodes.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// The job.
    pub job: Index,
    /// Since when.
    pub from: Time,
    /// Until when.
    pub to: Time,
    /// Nodes, with GPUs on each.
    pub place: Vec<(u32, u32)>,
}

impl Meter {
    pub(crate) fn new(begin: Time, trace: &Trace, cluster: &Cluster, record: Option<Record>) -> Meter {
        let bound = Bound::new(trace, cluster);
        Meter {
            now: begin,
            gpus_per_node: cluster.gpus_per_node,
            used: 0,
            broken: 0,
            waiting: 0,
            waiting_gpus: 0,
            waiting_whole: 0,
            waiting_ms: 0,
            used_while_waiting: 0,
            waiting_whole_ms: 0,
            broken_while_waiting: 0,
            bound_while_waiting: bound.as_ref().map(|_| 0),
            held: 0,
            bound,
            record,
        }
    }

    /// Jobs that wait.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Lets time pass with everything as it is.
    pub(crate) fn advance(&mut self, now: Time) {
        let passed = now.since(self.now).0;
        if passed == 0 {
            return;
        }
        self.held += passed * self.used.cast_signed();
        if self.waiting > 0 {
            self.waiting_ms += passed;
            self.used_while_waiting += passed * self.used.cast_signed();
            if let (Some(sum), Some(bound)) = (&mut self.bound_while_waiting, &mut self.bound) {
                *sum += passed * bound.now().cast_signed();
            }
        }
        if self.waiting_whole > 0 {
            self.waiting_whole_ms += passed;
            self.broken_while_waiting += passed * self.broken.cast_signed();
        }
        if let Some(record) = &mut self.record {
            let same =
                record.series.last().is_some_and(|(_, used, gpus)| (*used, *gpus) == (self.used, self.waiting_gpus));
            if !same {
                record.series.push((self.now, self.used, self.waiting_gpus));
            }
        }
        self.now = now;
    }

    /// A job is submitted, or ends.
    pub(crate) fn comes(&mut self, job: Index, comes: bool) {
        if let Some(bound) = &mut self.bound {
            bound.change(job as usize, comes);
        }
    }

    /// A job begins or ceases to wait.
    pub(crate) fn waits(&mut self, job: &TraceJob, begins: bool) {
        let step = |value: &mut u64, by: u64| *value = if begins { *value + by } else { *value - by };
        step(&mut self.waiting, 1);
        step(&mut self.waiting_gpus, u64::from(job.gpus()));
        step(&mut self.waiting_whole, u64::from(job.gpus_per_node == self.gpus_per_node));
    }

    /// A node's free GPUs change.
    pub(crate) fn change(&mut self, before: u32, after: u32) {
        let broken = |free: u32| if free == self.gpus_per_node { 0 } else { u64::from(free) };
        self.broken = self.broken + broken(after) - broken(before);
        self.used = self.used + u64::from(before) - u64::from(after);
    }

    /// A job leaves its nodes.
    pub(crate) fn ran(&mut self, job: Index, from: Time, to: Time, place: Vec<(u32, u32)>) {
        if let Some(record) = &mut self.record {
            record.stretches.push(Stretch { job, from, to, place });
        }
    }
}
