//! Reports of GPU time. Whole GPU-milliseconds, no rounding: over any period the
//! rows sum to the capacity exactly, which is the ledger's own invariant.
//!
//! A store reads its rows within one snapshot, so that no interval is in both the
//! closed and the open ones or in neither, and hands them to a [`Report`].

use crate::convert::failed;
use aviflow_core::gpus::GpuSet;
use aviflow_core::ledger::{GpuState, Open};
use aviflow_core::model::{JobId, Node, NodeId};
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use std::collections::BTreeMap;

/// By what a report adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Who submitted the job.
    User,
    /// The queue it was in at the time.
    Queue,
    /// The job.
    Job,
    /// Nothing but the state.
    State,
    /// The node.
    Node,
}

/// A line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageRow {
    /// The user, queue, `namespace/name` of the job, state, or node; `None` is
    /// time that belonged to nobody.
    pub key: Option<String>,
    /// The job, in a report by job. Two jobs may have had one name, one after the other.
    pub job: Option<JobId>,
    /// GPU-milliseconds by state.
    pub gpu_ms: BTreeMap<GpuState, i128>,
}

impl UsageRow {
    /// GPU-milliseconds in all states.
    #[must_use]
    pub fn total(&self) -> i128 {
        self.gpu_ms.values().sum()
    }
}

/// A report over `[from, to)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The first millisecond.
    pub from: Time,
    /// The millisecond after the last, at most the present.
    pub to: Time,
    /// Lines by key.
    pub rows: Vec<UsageRow>,
    /// GPU-milliseconds that there were: for each node the GPUs it had, over the
    /// part of the period since its account began. The rows sum to it.
    pub capacity: i128,
}

/// Whose a job's time is.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    /// `namespace/name`.
    pub(crate) name: String,
    pub(crate) user: String,
    pub(crate) queue: String,
}

/// A report in the making.
pub(crate) struct Report {
    pub(crate) from: Time,
    pub(crate) to: Time,
    pub(crate) by: By,
    nodes: BTreeMap<NodeId, Node>,
    sums: BTreeMap<(Option<JobId>, Option<String>), BTreeMap<GpuState, i128>>,
}

impl Report {
    /// An empty one, over `[from, to)` and up to `now`.
    pub(crate) fn new(from: Time, to: Time, now: Time, by: By) -> Report {
        let to = Time(to.0.min(now.0)).max(from);
        Report { from, to, by, nodes: BTreeMap::new(), sums: BTreeMap::new() }
    }

    /// The nodes, before anything is added.
    pub(crate) fn nodes(&mut self, nodes: impl IntoIterator<Item = Node>) {
        self.nodes = nodes.into_iter().map(|node| (node.id, node)).collect();
    }

    /// The columns of the ledger by which closed intervals are grouped: the job and the key.
    pub(crate) fn columns(&self) -> (&'static str, &'static str) {
        match self.by {
            By::User => ("NULL", "\"user\""),
            By::Queue => ("NULL", "queue"),
            By::Job => ("job", "name"),
            By::State | By::Node => ("NULL", "state"),
        }
    }

    /// Adds closed time of one group.
    pub(crate) fn add(&mut self, job: Option<JobId>, key: Option<String>, state: GpuState, gpu_ms: i128) {
        if gpu_ms != 0 {
            *self.sums.entry((job, key)).or_default().entry(state).or_default() += gpu_ms;
        }
    }

    /// Adds a closed interval to the nodes it was on: it may span several.
    pub(crate) fn add_to_nodes(&mut self, state: GpuState, ms: i64, gpus: &GpuSet) {
        for (node, slots) in gpus.iter() {
            self.add(None, Some(self.node_name(node)), state, i128::from(slots.count()) * i128::from(ms));
        }
    }

    /// Adds the open intervals.
    pub(crate) fn add_open(&mut self, intervals: &[(NodeId, Open)], owners: &BTreeMap<JobId, Owner>) {
        for (node, o) in intervals {
            let ms = self.to.since(Time(o.from.0.max(self.from.0))).0;
            let job = o.owner.map(|owner| owner.job);
            let owner = job.and_then(|job| owners.get(&job));
            let key = match self.by {
                By::User => owner.map(|o| o.user.clone()),
                By::Queue => owner.map(|o| o.queue.clone()),
                By::Job => owner.map(|o| o.name.clone()),
                By::State => Some(o.state.name().to_owned()),
                By::Node => Some(self.node_name(*node)),
            };
            let job = job.filter(|_| self.by == By::Job);
            self.add(job, key, o.state, i128::from(o.slots.count()) * i128::from(ms));
        }
    }

    fn node_name(&self, node: NodeId) -> String {
        self.nodes.get(&node).map_or_else(|| format!("node {}", node.0), |n| n.name.clone())
    }

    /// The report. `began` says when each node's account began, `sizes` how many GPUs it had from when on.
    pub(crate) fn finish(
        self,
        began: &BTreeMap<u32, Time>,
        sizes: &BTreeMap<u32, Vec<(Time, u32)>>,
    ) -> Result<Usage, StoreError> {
        let capacity = capacity(began, sizes, self.from, self.to)?;
        let rows = self.sums.into_iter().map(|((job, key), gpu_ms)| UsageRow { key, job, gpu_ms }).collect();
        Ok(Usage { from: self.from, to: self.to, rows, capacity })
    }
}

/// GPUs that there were, over the part of the period since each account began.
fn capacity(
    began: &BTreeMap<u32, Time>,
    sizes: &BTreeMap<u32, Vec<(Time, u32)>>,
    from: Time,
    to: Time,
) -> Result<i128, StoreError> {
    let mut capacity = 0;
    for (node, began) in began {
        let Some(sizes) = sizes.get(node) else {
            return Err(failed(format!("node {node} has an account and was never stored; restore a backup")));
        };
        for (index, (since, gpus)) in sizes.iter().enumerate() {
            let first = if index == 0 { *began } else { (*since).max(*began) };
            let last = sizes.get(index + 1).map_or(to, |next| next.0.max(*began));
            let ms = last.min(to).since(first.max(from));
            capacity += i128::from(*gpus) * i128::from(ms.0);
        }
    }
    Ok(capacity)
}
