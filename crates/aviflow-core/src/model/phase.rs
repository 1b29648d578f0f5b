//! The life of a job: its phases, and the gang of an attempt with its workers and their ends.

use super::NodeId;
use crate::gpus::{GpuSet, Slots};
use crate::health::xid::Asks;
use crate::health::{Finding, Kind};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// Whether the cluster asked it to leave: then it pauses before it starts again, where it had only begun.
    #[serde(default)]
    pub asked: bool,
}

/// A gang on its way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopping {
    /// The gang.
    pub gang: Gang,
    /// What follows when its last process is gone.
    pub intent: Intent,
    /// That its processes are gone, and it keeps its GPUs until then for somebody to look around (`--keep-on-failure`).
    #[serde(default)]
    pub kept_until: Option<Time>,
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
    /// The cluster refused a worker: queued again with back-off, no retry spent, or failed after too many of
    /// those that another place hardly mends.
    Refused {
        /// What became of the start.
        refusal: Refusal,
        /// Whether another time or place hardly helps.
        lasting: bool,
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
    /// When the present epoch began, where it is not the first.
    #[serde(default)]
    pub again: Option<Time>,
    /// What NVIDIA's driver said of its GPUs, the newest last, at most [`Gang::XIDS`].
    #[serde(default)]
    pub xids: Vec<XidSeen>,
}

/// An XID on a node of a gang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XidSeen {
    /// When.
    pub at: Time,
    /// The node.
    pub node: NodeId,
    /// The GPU's slot, where it is known.
    pub gpu: Option<u32>,
    /// What it asks for.
    pub asks: Asks,
}

impl Gang {
    /// How many XIDs it keeps.
    pub const XIDS: usize = 16;

    /// When its present epoch began: with its GPUs, or with a restart in place.
    #[must_use]
    pub fn began(&self) -> Time {
        self.again.unwrap_or(self.placed)
    }

    /// The GPUs that the gang holds.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        self.workers.iter().map(|w| (w.node, w.slots)).collect()
    }

    /// How many GPUs the gang holds.
    #[must_use]
    pub fn gpu_count(&self) -> u32 {
        self.workers.iter().map(|w| w.slots.count()).sum()
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
    /// Once it ended, the port on which rank 0 of another epoch could listen there: its agent waits for one.
    #[serde(default)]
    pub next_port: Option<u16>,
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
    /// Why, as its agent read it of what the rank left; none if it ended with 0, or of an agent that does not say.
    #[serde(default)]
    pub why: Option<Why>,
}

/// Why a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Why {
    /// The class.
    pub kind: Kind,
    /// Whether it may only be the effect of another rank's end.
    #[serde(default)]
    pub consequence: bool,
    /// The line that tells, if one does.
    #[serde(default)]
    pub line: String,
}

/// That the cluster would not take a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
    /// Its node.
    pub node: NodeId,
    /// Why, as the cluster says it.
    pub reason: String,
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
    /// The watch over its gang found what ends it: it hung, for example.
    Found {
        /// The attempt.
        attempt: u32,
        /// What.
        finding: Finding,
    },
    /// What its object in the cluster says: the store that knew more was lost.
    Recorded {
        /// In a few words.
        reason: String,
    },
    /// The environment could not be made.
    Environment {
        /// Why, as the builder says it.
        reason: String,
    },
}
