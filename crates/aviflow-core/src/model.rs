//! What the core knows of the world: nodes, queues, jobs, gangs, and the
//! snapshot they form. Facts only; what follows from them is in the other modules.

use crate::gpus::{GpuSet, Slots};
use crate::ledger::Ledger;
use crate::time::{Span, Time};
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
    /// GPUs that leave the node once their job has ended: it came back smaller.
    #[serde(default)]
    pub leaving: Slots,
    /// Whether new work may start here.
    pub condition: NodeCondition,
    /// Whether a person said that it should not; kept while the node is gone.
    #[serde(default)]
    pub cordoned: bool,
}

impl Node {
    /// GPUs that a new gang may take now.
    #[must_use]
    pub fn free(&self) -> Slots {
        match self.condition {
            NodeCondition::Ready => self.gpus.without(self.held).without(self.unhealthy).without(self.leaving),
            NodeCondition::Cordoned | NodeCondition::Gone => Slots::NONE,
        }
    }
}

/// Whether a node takes new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodeCondition {
    /// It does.
    Ready,
    /// A person said it should not; what runs there goes on.
    Cordoned,
    /// Its own agent or kubelet is not heard of.
    Gone,
}

/// A node of the quota tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// The unique name.
    pub name: String,
    /// The parent's name; `None` for a root.
    pub parent: Option<String>,
    /// Whether it starts jobs.
    pub state: QueueState,
}

/// Whether a queue takes and starts jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QueueState {
    /// Takes and starts jobs.
    Open,
    /// Takes jobs and starts none.
    Held,
    /// Takes no jobs; those it has may start.
    Draining,
}

/// What a job asks for, as far as decisions need it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The queue.
    pub queue: String,
    /// The priority; higher goes first.
    pub priority: i32,
    /// Workers, one a node.
    pub nodes: NodeRange,
    /// GPUs on each node, at least 1.
    pub gpus_per_node: u32,
    /// Accelerator types in order of preference; empty means any.
    pub gpu_types: Vec<String>,
    /// Ranks that each worker starts.
    pub ranks_per_node: u32,
    /// The greatest time in Running, over all attempts.
    pub time_limit: Option<Span>,
    /// Whether the plan may suspend it.
    pub preemptible: bool,
    /// Application failures after which it is still run again.
    pub failures_allowed: u32,
    /// Time between SIGTERM and SIGKILL at a graceful stop.
    pub grace: Span,
}

/// How many nodes a gang may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeRange {
    /// The least number, at least 1.
    pub min: u32,
    /// The greatest number.
    pub max: u32,
}

/// What jobs have in common that wait for the same reason. Jobs of one shape share one verdict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// GPUs on each node.
    pub gpus_per_node: u32,
    /// Workers.
    pub nodes: NodeRange,
    /// Accelerator types in order of preference.
    pub gpu_types: Vec<String>,
}

impl Request {
    /// The shape of the request.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { gpus_per_node: self.gpus_per_node, nodes: self.nodes, gpu_types: self.gpu_types.clone() }
    }
}

/// A job that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The job's number.
    pub id: JobId,
    /// The job's name.
    pub key: JobKey,
    /// Who submitted it.
    pub user: String,
    /// What it asks for.
    pub request: Request,
    /// The environment it runs in, if it needs one made ready.
    pub environment: Option<EnvironmentHash>,
    /// When it was submitted; its place in the order, kept through every suspension.
    pub submitted: Time,
    /// Where it stands.
    pub phase: Phase,
    /// How many attempts have begun.
    pub attempts: u32,
    /// What ended earlier attempts, counted apart; only `failures` spends retries.
    pub counters: Counters,
    /// Time in Running, over the attempts that ended.
    pub ran: Span,
    /// The highest training step ever reached.
    pub best_step: Option<u64>,
    /// The last complete checkpoint that was seen.
    pub checkpoint: Option<Checkpoint>,
    /// Not to be started before this instant (back-off).
    pub not_before: Option<Time>,
}

impl Job {
    /// A job as it is submitted at `now`.
    #[must_use]
    pub fn submitted(
        id: JobId,
        key: JobKey,
        user: String,
        request: Request,
        environment: Option<EnvironmentHash>,
        now: Time,
    ) -> Job {
        Job {
            id,
            key,
            user,
            request,
            environment,
            submitted: now,
            phase: Phase::Queued,
            attempts: 0,
            counters: Counters::default(),
            ran: Span(0),
            best_step: None,
            checkpoint: None,
            not_before: None,
        }
    }
}

/// Four separate counters of how attempts ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counters {
    /// Failures of the application.
    pub failures: u32,
    /// Failures of nodes and agents.
    pub node_failures: u32,
    /// Suspensions by the plan or a person, and requeues the job asked for.
    pub suspensions: u32,
    /// Starts that never became ready.
    pub unready: u32,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The training step it holds.
    pub step: u64,
    /// Where it is, as the job named it.
    pub path: String,
    /// When it was complete.
    pub at: Time,
    /// The attempt that wrote it.
    pub attempt: u32,
}

/// Where a job stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Waits for the plan.
    Queued,
    /// Holds its GPUs; not every rank is up.
    Starting(Gang),
    /// Every rank is up.
    Running(Gang),
    /// Is being stopped and will wait again, in its old place.
    Suspending(Suspending),
    /// Is being stopped; `intent` says what follows.
    Stopping(Stopping),
    /// Every rank ended with 0.
    Succeeded,
    /// Ended otherwise.
    Failed(Failure),
    /// A person ended it.
    Cancelled {
        /// Who.
        by: String,
    },
}

/// A gang on its way back to the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspending {
    /// The gang.
    pub gang: Gang,
    /// Who or what suspends it.
    pub by: String,
}

/// A gang on its way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopping {
    /// The gang.
    pub gang: Gang,
    /// What follows when its last process is gone.
    pub intent: Intent,
}

/// Why a gang is being stopped, which decides what follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Intent {
    /// A person cancelled the job.
    Cancel {
        /// Who.
        by: String,
    },
    /// The job used up its time limit.
    TimeLimit,
    /// A rank failed: another attempt if a retry is left.
    Failure(Failure),
    /// A worker was lost with its node or its agent: another attempt, no retry spent.
    NodeFailure(Failure),
    /// The job asked to be queued again (exit code 75): no retry spent.
    Requeue,
    /// Not every worker was ready in time: queued again with back-off, no retry spent.
    Unready {
        /// Which workers were missing.
        missing: Vec<u32>,
    },
}

impl Phase {
    /// The gang, where there is one.
    #[must_use]
    pub fn gang(&self) -> Option<&Gang> {
        match self {
            Phase::Starting(gang) | Phase::Running(gang) => Some(gang),
            Phase::Suspending(s) => Some(&s.gang),
            Phase::Stopping(s) => Some(&s.gang),
            Phase::Queued | Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => None,
        }
    }

    /// Whether the job has ended.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        match self {
            Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => true,
            Phase::Queued | Phase::Starting(_) | Phase::Running(_) | Phase::Suspending(_) | Phase::Stopping(_) => false,
        }
    }

    /// The phase's name, as DESIGN's table has it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Queued => "Queued",
            Phase::Starting(_) => "Starting",
            Phase::Running(_) => "Running",
            Phase::Suspending(_) => "Suspending",
            Phase::Stopping(_) => "Stopping",
            Phase::Succeeded => "Succeeded",
            Phase::Failed(_) => "Failed",
            Phase::Cancelled { .. } => "Cancelled",
        }
    }
}

/// All workers of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gang {
    /// The attempt's number, from 1.
    pub attempt: u32,
    /// The restart in place within the attempt, from 1.
    pub epoch: u32,
    /// When the attempt got its GPUs.
    pub placed: Time,
    /// When every rank was up.
    pub up: Option<Time>,
    /// The workers; a worker's number is its index.
    pub workers: Vec<Worker>,
    /// Whether a training step was reported in this epoch.
    pub stepped: bool,
    /// Whether it trains again what earlier attempts had reached.
    pub repeating: bool,
}

impl Gang {
    /// The GPUs that the gang holds.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        self.workers.iter().map(|w| (w.node, w.slots)).collect()
    }

    /// The nodes in the order of the workers.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.workers.iter().map(|w| w.node)
    }

    /// Whether the last process of every worker is gone.
    #[must_use]
    pub fn all_gone(&self) -> bool {
        self.workers.iter().all(|w| matches!(w.state, WorkerState::Gone))
    }
}

/// One node's share of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its node.
    pub node: NodeId,
    /// Its GPUs there.
    pub slots: Slots,
    /// Where it stands.
    pub state: WorkerState,
    /// Where the gang's rank 0 may be reached, as this worker's agent offers it.
    pub address: Option<Address>,
    /// Ranks of this worker that ended, by rank.
    pub exits: BTreeMap<u32, Exit>,
    /// When its last process was gone.
    #[serde(default)]
    pub ended: Option<Time>,
}

impl Worker {
    /// Whether each of its ranks ended with 0 by itself.
    #[must_use]
    pub fn finished(&self, ranks: u32) -> bool {
        self.exits.len() == ranks as usize && self.exits.values().all(|e| e.code == 0 && !e.stopping)
    }
}

/// Where a worker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WorkerState {
    /// Ordered, and not heard of.
    Launched,
    /// Its agent is connected and waits for the word to start.
    Ready,
    /// Its ranks have started.
    Up,
    /// Its last process is gone.
    Gone,
}

/// A host address and a port that was free there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// An address, never a name that DNS would have to know.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The code as a shell would report it: the exit code, or 128 + the signal.
    pub code: i32,
    /// The signal, if one ended it.
    pub signal: Option<i32>,
    /// When, by the engine's time.
    pub at: Time,
    /// Its last lines of output, oldest first.
    pub last_lines: Vec<String>,
    /// Whether its agent had begun to stop it before: then its end, also one with 0, is not its own.
    #[serde(default)]
    pub stopping: bool,
}

/// Why a job failed, with everything that a person needs to act.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub cause: Cause,
    /// The exit code that `aviflow run` ends with.
    pub exit_code: i32,
    /// When it happened.
    pub at: Time,
}

/// Kinds of failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Cause {
    /// A rank ended with something other than 0; the first of the attempt.
    Rank {
        /// The attempt.
        attempt: u32,
        /// The rank; with one process a node it is the worker's number.
        rank: u32,
        /// The worker.
        worker: u32,
        /// Its node.
        node: NodeId,
        /// Its end.
        exit: Exit,
    },
    /// A worker's agent or node is gone.
    WorkerLost {
        /// The attempt.
        attempt: u32,
        /// The worker.
        worker: u32,
        /// Its node.
        node: NodeId,
        /// What is known of it.
        reason: String,
    },
    /// The worker could not be started or its ranks could not.
    Launch {
        /// The attempt.
        attempt: u32,
        /// The worker.
        worker: u32,
        /// Its node.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// The job used up its time limit.
    TimeLimit {
        /// The limit.
        limit: Span,
    },
    /// The environment could not be made.
    Environment {
        /// Why, as the builder says it.
        reason: String,
    },
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
