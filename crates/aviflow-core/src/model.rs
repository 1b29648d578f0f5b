//! What the core knows of the world: nodes, queues, jobs, gangs, and the
//! snapshot they form. Facts only; what follows from them is in the other modules.

mod history;
mod job;
mod phase;
mod pool;
mod queue;

pub use history::{Calibration, Decayed, Estimate, Histogram, History, size_class};
pub use job::{
    Beneficiary, Checkpoint, Claim, Counters, Dependency, Ending, Eviction, EvictionCause, Job, NODE_LEVEL, NodeRange,
    Request, Shape, Topology, TurnedOut,
};
pub use phase::{
    Address, Cause, Exit, Failure, Gang, Intent, Phase, Refusal, Stopping, Suspending, Why, Worker, WorkerState,
    XidSeen,
};
pub use pool::{Drain, Policy, Pool, RollingDrain};
pub use queue::{Queue, QueueDefaults, QueueState, Quota, TimeSharing};

use crate::gpus::{GpuSet, Slots};
use crate::health::quarantine::Quarantine;
use crate::ledger::Ledger;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The number under which one control plane holds the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Term(pub u64);

/// A job's number in the store, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

/// A node's number in the store, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// The content hash of an environment, hexadecimal SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EnvironmentHash(pub String);

/// How a person names a job: namespace and name. Locally the namespace is `default`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobKey {
    /// The namespace.
    pub namespace: String,
    /// The name, unique within the namespace.
    pub name: String,
}

/// One node of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The node's number.
    pub id: NodeId,
    /// The node's name.
    pub name: String,
    /// The pool it belongs to.
    pub pool: String,
    /// The accelerator type that the pool maps it to, such as `H100`.
    pub gpu_type: String,
    /// All its GPUs.
    pub gpus: Slots,
    /// GPUs held by live attempts. A book of its own: it says nothing of health.
    pub held: Slots,
    /// GPUs known to be broken. A book of its own: a broken GPU may still be held.
    pub unhealthy: Slots,
    /// GPUs that are kept from work since they failed, until the node passes a check: a book of its own, too.
    #[serde(default)]
    pub quarantined: Slots,
    /// Why, in a few words, where any are.
    #[serde(default)]
    pub quarantine: Option<String>,
    /// GPUs that leave the node once their job has ended: it came back smaller.
    #[serde(default)]
    pub leaving: Slots,
    /// How many GPUs others use here, as the cluster counts them: it may be more than our jobs leave them.
    #[serde(default)]
    pub others: u32,
    /// The GPUs that count as theirs, derived from [`Node::others`] by [`Node::settle`]. A cluster counts GPUs
    /// and does not say which: these are none that a job of ours holds.
    #[serde(default)]
    pub foreign: Slots,
    /// Whether new work may start here.
    pub condition: NodeCondition,
    /// Whether a person said that it should not; kept while the node is gone.
    #[serde(default)]
    pub cordoned: bool,
    /// Why others keep new work away, if they do; apart from what a person said here.
    #[serde(default)]
    pub closed: Option<String>,
    /// Since when they want it empty, if they do: what may be asked to leave then leaves, as in a drain.
    #[serde(default)]
    pub vacate: Option<crate::time::Time>,
    /// GPUs promised to gangs while their present holders leave, see [`Claim`].
    #[serde(default)]
    pub claimed: Slots,
    /// Its domains in the pool's topology, smallest first, one for each of [`Pool::levels`].
    #[serde(default)]
    pub path: Vec<String>,
    /// The domains that the cluster reports for it, smallest first; empty where only the pool's document says it.
    #[serde(default)]
    pub reported: Vec<String>,
    /// When it is to be empty, if it is.
    #[serde(default)]
    pub drain: Option<Drain>,
}

impl Node {
    /// A node as it comes: whole, free and ready.
    #[must_use]
    pub fn new(id: NodeId, name: &str, pool: &str, gpu_type: &str, gpus: Slots) -> Node {
        Node {
            id,
            name: name.to_owned(),
            pool: pool.to_owned(),
            gpu_type: gpu_type.to_owned(),
            gpus,
            held: Slots::NONE,
            unhealthy: Slots::NONE,
            quarantined: Slots::NONE,
            quarantine: None,
            leaving: Slots::NONE,
            others: 0,
            foreign: Slots::NONE,
            condition: NodeCondition::Ready,
            cordoned: false,
            closed: None,
            vacate: None,
            claimed: Slots::NONE,
            path: Vec::new(),
            reported: Vec::new(),
            drain: None,
        }
    }

    /// GPUs that nobody holds and nobody was promised, on a node that takes work.
    #[must_use]
    pub fn free(&self) -> Slots {
        self.usable().without(self.held).without(self.claimed)
    }

    /// GPUs that gangs may have, now or later: none on a node that takes no work.
    #[must_use]
    pub fn usable(&self) -> Slots {
        match self.condition {
            NodeCondition::Ready => self.workable(),
            NodeCondition::Cordoned | NodeCondition::Gone => Slots::NONE,
        }
    }

    /// GPUs that work, stay and are not used by others, whether or not the node takes work. Nobody knows when
    /// others give theirs back; where they use more than our jobs leave them, not even what jobs give up is ours.
    #[must_use]
    pub fn workable(&self) -> Slots {
        if self.overrun() > 0 { Slots::NONE } else { self.works().without(self.foreign) }
    }

    /// GPUs that work and stay, whoever uses them.
    #[must_use]
    pub fn works(&self) -> Slots {
        self.gpus.without(self.broken()).without(self.leaving)
    }

    /// GPUs that are known to be broken, or kept from work as they may be.
    #[must_use]
    pub fn broken(&self) -> Slots {
        self.unhealthy.or(self.quarantined)
    }

    /// How many GPUs others use that a job of ours holds in the books: what it gives up is theirs first. So it is
    /// while a part of a gang is gone, since a gang holds its GPUs to the end, and where others were faster.
    #[must_use]
    pub fn overrun(&self) -> u32 {
        self.others.saturating_sub(self.foreign.count())
    }

    /// Whether anybody said that no new work may start here now or at any time to come.
    #[must_use]
    pub fn shut(&self) -> bool {
        self.cordoned || self.closed.is_some()
    }

    /// Sets which GPUs count as used by others, after anything of the node changed.
    ///
    /// As many as others use, as far as no job of ours holds them; what is beyond becomes theirs as soon as a job
    /// gives it up. Whole ones first, since a cluster counts broken ones as used by nobody; of these such as nobody
    /// was promised first; then those that were theirs; then the lowest.
    pub fn settle(&mut self) {
        let loose = self.gpus.without(self.held).without(self.leaving);
        let mut left = self.others.min(loose.count());
        let mut foreign = Slots::NONE;
        let whole = loose.without(self.broken());
        for some in [whole.without(self.claimed), whole, loose] {
            for some in [some.and(self.foreign), some] {
                let some = some.without(foreign);
                let taken = some.lowest(left.min(some.count())).unwrap_or(some);
                left -= taken.count();
                foreign = foreign.or(taken);
            }
        }
        self.foreign = foreign;
    }
}

/// Whether a node takes new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodeCondition {
    /// It does.
    Ready,
    /// A person or the cluster said it should not; what runs there goes on.
    Cordoned,
    /// Its own agent or kubelet is not heard of.
    Gone,
}

/// Whether an environment can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum EnvironmentState {
    /// Being built, or found in the cache.
    Preparing,
    /// Complete on every node that may run the jobs that want it.
    Ready,
}

/// Everything that decisions depend on. Ended jobs are not part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes.
    pub nodes: BTreeMap<NodeId, Node>,
    /// Queues by name.
    pub queues: BTreeMap<String, Queue>,
    /// Jobs that have not ended.
    pub jobs: BTreeMap<JobId, Job>,
    /// Environments that live jobs want.
    pub environments: BTreeMap<EnvironmentHash, EnvironmentState>,
    /// The open intervals of GPU time.
    pub ledger: Ledger,
    /// Jobs that wait, kept beside `jobs` so that a pass does not read those that run.
    pub waiting: BTreeSet<JobId>,
    /// Whether a person paused all starts, and who.
    pub paused: Option<String>,
    /// Pools by name, where their documents say something.
    pub pools: BTreeMap<String, Pool>,
    /// How the platform decides.
    pub policy: Policy,
    /// Decayed use by queue and user.
    pub usage: BTreeMap<(String, String), Decayed>,
    /// What is remembered of jobs that ended.
    pub history: History,
    /// Drains that go on.
    pub drains: Vec<RollingDrain>,
    /// By pool, what nodes and GPUs did that is kept from work for it, or may be.
    pub quarantines: BTreeMap<String, Quarantine>,
}

/// A place for a gang: for each worker its node and GPUs there, in the order of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Placement(pub Vec<(NodeId, Slots)>);

impl Placement {
    /// The GPUs of the placement.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        self.0.iter().copied().collect()
    }
}
