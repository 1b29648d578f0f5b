//! The ports: what the engine needs of the world, and in which words.
//!
//! A cluster does what it is told and reports what it sees; it chooses nothing.
//! A store makes a batch durable or refuses it whole. The clock is read by the
//! driver and handed in.

use aviflow_api::spec::{JobSpec, Provenance};
use aviflow_core::health::quarantine::Quarantine;
use aviflow_core::ledger::{Entry, Open};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{
    Address, Decayed, Ending, EnvironmentHash, EnvironmentState, History, Job, JobId, JobKey, Node, NodeId, Phase,
    Placement, Policy, Pool, Queue, RollingDrain, Snapshot, Term,
};
use aviflow_core::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The body: this machine's processes, Kubernetes, or a simulation.
///
/// `apply` never blocks on the work itself and never fails: what cannot be done
/// comes back as an [`Observation`]. Every order may be repeated, after a crash
/// for example, and must then change nothing.
pub trait Cluster {
    /// Carries out orders, in their order.
    fn apply(&mut self, orders: &[Stamped]);
}

impl Cluster for Box<dyn Cluster + Send> {
    fn apply(&mut self, orders: &[Stamped]) {
        (**self).apply(orders);
    }
}

/// Takes stacks for the watch over running gangs.
pub trait TakeStacks: Send {
    /// Asks for the stacks of all ranks of a gang. Returns at once; what comes is told to the watch's feed as
    /// [`aviflow_core::health::Fact::Stack`].
    fn take(&self, of: &crate::watcher::Said);
}

/// An order with the term and generation of the decision behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stamped {
    /// The term; a body refuses orders of an earlier one.
    pub term: Term,
    /// The number of the commit that decided it.
    pub generation: u64,
    /// What to do.
    pub order: Order,
}

/// What the engine tells the cluster to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// First order of a term: these attempts live. Whatever else the body finds
    /// of earlier terms is stopped and removed.
    Reconcile {
        /// Live attempts.
        live: Vec<(JobId, u32)>,
    },
    /// Make an environment usable. Answered by `EnvironmentReady` or `EnvironmentFailed`.
    Prepare {
        /// A job that wants it; says where the locks are.
        record: Arc<JobRecord>,
    },
    /// No job wants an environment any more: end what makes it. What is complete may be kept.
    Abandon {
        /// Which.
        hash: EnvironmentHash,
    },
    /// Start the workers of an attempt, or adopt those that already exist. They
    /// report `WorkerReady` and start no rank before `Confirm`.
    Launch {
        /// The job.
        record: Arc<JobRecord>,
        /// The attempt.
        attempt: u32,
        /// Where.
        placement: Placement,
        /// Names of the placement's nodes, in its order.
        nodes: Vec<String>,
        /// Workers that were heard of: they exist or existed, and must not be made a second time. Of one that
        /// is not there any more, the end is reported.
        heard: BTreeSet<u32>,
    },
    /// Every worker is ready: start the ranks of this epoch. One after the first begins where nothing of the one before
    /// runs any more; workers of which nothing is left by then are reported as lost.
    Confirm {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The epoch.
        epoch: u32,
        /// Where rank 0 listens.
        rank0: Address,
        /// The highest step that any attempt reached, to know repeated work.
        best_step: Option<u64>,
    },
    /// Stop every rank: SIGTERM, then SIGKILL after the grace.
    Stop {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The epoch whose ranks are meant: a later one may be confirmed.
        epoch: u32,
        /// The grace.
        grace: Span,
        /// Why, for the ranks and the logs.
        reason: String,
    },
    /// The attempt is over and its last process gone: remove what is left of it.
    Remove {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
    },
    /// Keep others away from GPUs of a node that are promised to a gang: from those that are free already, and
    /// from the rest as soon as their holders have left. This is a level, not a step: it replaces what was said
    /// of the node before, 0 ends it, and after `Reconcile` nothing is kept but what is said then.
    ///
    /// In one batch of orders a level that rises comes before the orders that free GPUs, and one that falls
    /// after the `Launch` of the gang that the GPUs were kept for, so that a body can hand them over.
    Keep {
        /// The node.
        node: String,
        /// How many of its GPUs.
        gpus: u32,
        /// Whether these are all of its GPUs that work, so that the node may be closed to others as a whole.
        whole: bool,
    },
}

/// What the cluster saw. May come twice, late, or in another order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Observation {
    /// A node is there, or there again.
    NodeSeen {
        /// Its name.
        name: String,
        /// Its pool.
        pool: String,
        /// Its accelerator type.
        gpu_type: String,
        /// How many GPUs it has; 0 where it is no part of the pool any more.
        gpus: u32,
        /// Its domains in the pool's topology, smallest first, as the cluster knows them; empty where only the
        /// pool's document says it.
        #[serde(default)]
        path: Vec<String>,
    },
    /// A node's own agent or kubelet is not heard of.
    NodeGone {
        /// Its name.
        name: String,
    },
    /// GPUs of a node are broken, or whole again.
    NodeHealth {
        /// Its name.
        name: String,
        /// Slot numbers that are broken.
        broken: Vec<u32>,
    },
    /// How many GPUs of a node are used by workloads that are not ours, those that are ending included.
    NodeForeign {
        /// Its name.
        name: String,
        /// How many.
        gpus: u32,
    },
    /// Others say whether new work may start on a node (`kubectl cordon`, a taint). What people said of the node here
    /// is kept apart.
    NodeClosed {
        /// Its name.
        name: String,
        /// Why it is closed, in a few words; none opens it again.
        reason: Option<String>,
        /// Whether they want it empty, as for a new driver: what may be suspended leaves as in a drain.
        #[serde(default)]
        vacate: bool,
    },
    /// An environment is complete.
    EnvironmentReady {
        /// Which.
        hash: EnvironmentHash,
    },
    /// An environment could not be made.
    EnvironmentFailed {
        /// Which.
        hash: EnvironmentHash,
        /// Why and what to do, as the builder says it.
        reason: String,
    },
    /// Something happened to a worker.
    Worker {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The epoch; 0 before the first start.
        epoch: u32,
        /// The worker's number.
        worker: u32,
        /// How long ago, by the reporter's own monotonic clock.
        ago: Span,
        /// What.
        event: WorkerEvent,
    },
    /// The watch over a gang found something: [`News::Suspected`], [`News::Found`] or [`News::Over`].
    Found {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The epoch.
        epoch: u32,
        /// What.
        news: News,
    },
}

pub use aviflow_core::health::News;
pub use aviflow_core::lifecycle::WorkerEvent;

/// A job as submitted: never changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRecord {
    /// The number.
    pub id: JobId,
    /// The name.
    pub key: JobKey,
    /// Who submitted it.
    pub user: String,
    /// When.
    pub submitted: Time,
    /// The document.
    pub spec: JobSpec,
    /// What it was resolved to.
    pub provenance: Provenance,
}

/// Durable state. One writer holds it under a term.
pub trait Store {
    /// Takes the store under the next term, which fences the writer before, and reads it.
    ///
    /// # Errors
    /// If the store cannot be read, or was written by a newer version.
    fn acquire(&mut self) -> Result<Loaded, StoreError>;

    /// Makes a batch durable, whole or not at all.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if another writer took a later term; then nothing was written.
    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError>;

    /// The job of exactly this name, ended or not.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError>;

    /// The newest job whose document has the name `work`, of `user` if one is given, ended or not.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError>;

    /// Whether a job of this name is kept, ended or not.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn name_taken(&self, key: &JobKey) -> Result<bool, StoreError> {
        Ok(self.named(key)?.is_some())
    }
}

impl<S: Store + ?Sized> Store for Box<S> {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        (**self).acquire()
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        (**self).commit(batch)
    }

    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
        (**self).named(key)
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        (**self).latest(namespace, work, user)
    }

    fn name_taken(&self, key: &JobKey) -> Result<bool, StoreError> {
        (**self).name_taken(key)
    }
}

/// A job that the store knows by a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its number.
    pub id: JobId,
    /// Its name.
    pub key: JobKey,
    /// How it ended, if it has.
    pub ended: Option<Ending>,
}

/// How a job ended, as those ask who wait for it; none while it lives.
#[must_use]
pub fn ending(phase: &Phase) -> Option<Ending> {
    match phase {
        Phase::Succeeded => Some(Ending::Succeeded),
        Phase::Failed(_) | Phase::Cancelled { .. } => Some(Ending::Failed),
        Phase::Queued | Phase::Starting(_) | Phase::Running(_) | Phase::Suspending(_) | Phase::Stopping(_) => None,
    }
}

/// What a person changed, for whoever asks who did it and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Act {
    /// When.
    pub at: Time,
    /// Who.
    pub by: String,
    /// What, in a sentence without a subject: `changed queue nlp: guarantee of H100 16 → 24`.
    pub what: String,
    /// What kind of thing it was done to.
    pub kind: ActKind,
    /// Its name: of a job `namespace/name`, of a drain its number; empty where there is only one.
    pub name: String,
    /// Why, as the person said.
    pub reason: Option<String>,
}

/// What an act was done to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ActKind {
    /// A queue.
    Queue,
    /// A pool.
    Pool,
    /// The policy.
    Policy,
    /// All starts.
    Starts,
    /// A node.
    Node,
    /// A rolling drain.
    Drain,
    /// A job.
    Job,
}

impl ActKind {
    /// All kinds.
    pub const ALL: [ActKind; 7] =
        [ActKind::Queue, ActKind::Pool, ActKind::Policy, ActKind::Starts, ActKind::Node, ActKind::Drain, ActKind::Job];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ActKind::Queue => "queue",
            ActKind::Pool => "pool",
            ActKind::Policy => "policy",
            ActKind::Starts => "starts",
            ActKind::Node => "node",
            ActKind::Drain => "drain",
            ActKind::Job => "job",
        }
    }
}

impl fmt::Display for ActKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the store held.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The term now held.
    pub term: Term,
    /// The number of the last commit.
    pub generation: u64,
    /// The engine's time at the last commit.
    pub clock: Time,
    /// The highest job number ever used.
    pub last_job: u64,
    /// The highest node number ever used.
    pub last_node: u32,
    /// The highest number of a rolling drain ever used.
    pub last_drain: u64,
    /// The state.
    pub snapshot: Snapshot,
    /// Records of the live jobs.
    pub records: BTreeMap<JobId, Arc<JobRecord>>,
}

/// One transaction: states, ledger, moments and the inputs behind them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The writer's term.
    pub term: Term,
    /// The number of this commit, one more than the last.
    pub generation: u64,
    /// The engine's time.
    pub at: Time,
    /// New jobs.
    pub records: Vec<Arc<JobRecord>>,
    /// Jobs that changed, ended ones too.
    pub jobs: Vec<Job>,
    /// Nodes that changed.
    pub nodes: Vec<Node>,
    /// Queues that changed; `None` means that it was deleted.
    pub queues: Vec<(String, Option<Queue>)>,
    /// Pools that changed; `None` means that its document was deleted.
    pub pools: Vec<(String, Option<Pool>)>,
    /// The policy, where it changed.
    pub policy: Option<Policy>,
    /// Decayed use by queue and user, where it changed; `None` means that it is forgotten.
    pub usage: Vec<((String, String), Option<Decayed>)>,
    /// What is remembered of ended jobs, where that changed.
    pub history: Option<History>,
    /// The drains that go on, all of them, where any changed.
    pub drains: Option<Vec<RollingDrain>>,
    /// What nodes did that are kept from work for it, or may be, by pool: all of it, where any changed.
    pub quarantines: Option<BTreeMap<String, Quarantine>>,
    /// Environments that changed; `None` means that nobody wants it any more.
    pub environments: Vec<(EnvironmentHash, Option<EnvironmentState>)>,
    /// Who paused all starts, where that changed.
    pub paused: Option<Option<String>>,
    /// Closed ledger intervals.
    pub entries: Vec<Entry>,
    /// The open intervals of each node where they changed.
    pub open: Vec<(NodeId, Vec<Open>)>,
    /// What happened, for people.
    pub moments: Vec<Moment>,
    /// What people did.
    pub acts: Vec<Act>,
    /// What was observed and asked, for the journal.
    pub journal: Vec<String>,
    /// When jobs ended that come into the store as such, by their numbers; those that are missing ended at `at`.
    pub ended: BTreeMap<JobId, Time>,
    /// Numbers that another store, which is lost, may have handed out. The term is then no more this writer's: he
    /// takes the store again.
    pub beyond: Option<Beyond>,
}

/// Numbers that were handed out, whatever the store has of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// The highest term.
    pub term: u64,
    /// The highest number of a job.
    pub job: u64,
}

impl Batch {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
            && self.jobs.is_empty()
            && self.nodes.is_empty()
            && self.queues.is_empty()
            && self.pools.is_empty()
            && self.policy.is_none()
            && self.usage.is_empty()
            && self.history.is_none()
            && self.drains.is_none()
            && self.quarantines.is_none()
            && self.environments.is_empty()
            && self.paused.is_none()
            && self.entries.is_empty()
            && self.open.is_empty()
            && self.moments.is_empty()
            && self.acts.is_empty()
            && self.beyond.is_none()
    }
}

fn called(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!(", {name},")).unwrap_or_default()
}

/// Why the store refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Another control plane took over.
    #[error("another control plane{} took over the store (term {held}, ours was {ours}); this one stops", called(.by))]
    Fenced {
        /// Our term.
        ours: u64,
        /// The term that is held.
        held: u64,
        /// What its holder calls itself, where the store knows.
        by: Option<String>,
    },
    /// The store was written by a newer version.
    #[error(
        "the store has version {found}, this program knows up to {known}; use the newer program, or restore a backup"
    )]
    Newer {
        /// The version found.
        found: u32,
        /// The version known.
        known: u32,
    },
    /// No space.
    #[error("the disk with the store is full ({0}); free some space, nothing acknowledged was lost")]
    Full(String),
    /// Anything else.
    #[error("the store failed: {0}")]
    Failed(String),
}
