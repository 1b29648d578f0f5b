//! What happens to a pool: people, failures, and the writes at which the
//! control plane dies. A script is data: it can be printed, cut and replayed.

use aviflow_core::time::Span;
use serde::{Deserialize, Serialize};

/// A history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// Decides delays and everything else that the items leave open.
    pub seed: u64,
    /// Nodes of the pool, each with 8 GPUs.
    pub nodes: u32,
    /// What happens, by time.
    pub items: Vec<Step>,
}

/// An item and its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Milliseconds since the beginning.
    pub at: i64,
    /// What.
    pub item: Item,
}

/// One thing that happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Item {
    /// A person submits a job.
    Submit(JobScript),
    /// A person cancels it.
    Cancel {
        /// Its name.
        job: String,
    },
    /// A person cancels the first job that is seen in a phase.
    CancelWhen {
        /// The phase, as the coverage names it.
        phase: String,
    },
    /// A person suspends it.
    Suspend {
        /// Its name.
        job: String,
    },
    /// A person keeps it from starting.
    Hold {
        /// Its name.
        job: String,
    },
    /// A person lets it start again.
    Release {
        /// Its name.
        job: String,
    },
    /// A person changes it.
    Update {
        /// Its name.
        job: String,
        /// The priority.
        priority: Option<i32>,
        /// The queue.
        queue: Option<String>,
        /// The time limit.
        time_limit: Option<Span>,
    },
    /// A person makes or changes a queue.
    Queue(QueueScript),
    /// A person deletes a queue.
    DropQueue {
        /// Its name.
        name: String,
        /// Where its jobs go: nowhere, or to another queue; none refuses if there are any.
        to: Option<String>,
        /// Whether they stay.
        leave: bool,
    },
    /// A person says how the nodes are joined: pairs of nodes below a leaf, pairs of leaves below a spine.
    Pool {
        /// Whether they are joined at all.
        levels: bool,
        /// Whether jobs take turns.
        sharing: bool,
    },
    /// A person sets the policy.
    Policy {
        /// Whether jobs may be suspended.
        preemption: bool,
        /// The minimum run.
        minimum_run: Span,
        /// How long a victim may take.
        patience: Span,
    },
    /// A person takes the description of the nodes away.
    DropPool,
    /// A person drains nodes.
    Drain {
        /// Their numbers, from 1.
        nodes: Vec<u32>,
        /// When it begins, from then on; none means at once.
        ahead: Option<Span>,
        /// How long each is away.
        length: Option<Span>,
        /// How many may be away at once.
        at_once: Option<u32>,
        /// By when all must have been taken, from then on.
        within: Option<Span>,
    },
    /// A person calls off the drain of a node, or the first rolling one.
    CancelDrain {
        /// The node's number, from 1.
        node: Option<u32>,
    },
    /// A person cancels what waits for what cannot be.
    Clear,
    /// A person pauses all starts, or lets them go on.
    Pause {
        /// Which.
        on: bool,
    },
    /// A person cordons a node, or lets it work again.
    Cordon {
        /// The node's number, from 1.
        node: u32,
        /// Which.
        on: bool,
    },
    /// One of the ranks that run gets SIGKILL.
    KillRank {
        /// Which one, among those that run then.
        pick: u64,
    },
    /// One of the agents that live gets SIGKILL.
    KillAgent {
        /// Which one, among those that live then.
        pick: u64,
    },
    /// A node dies with all that runs there, and comes back.
    LoseNode {
        /// The node's number, from 1.
        node: u32,
        /// For how long.
        for_ms: i64,
    },
    /// GPUs of a node break, or are whole again.
    Break {
        /// The node's number, from 1.
        node: u32,
        /// The slots that are broken from now on.
        slots: Vec<u32>,
    },
    /// Others want GPUs of a node, or give some back.
    Others {
        /// The node's number, from 1.
        node: u32,
        /// How many they want in all.
        gpus: u32,
    },
    /// Others close a node to new work, or open it.
    Close {
        /// The node's number, from 1.
        node: u32,
        /// Which.
        on: bool,
    },
    /// A node gets labels that say where it is.
    Label {
        /// The node's number, from 1.
        node: u32,
        /// Its domains, smallest first; none takes the labels away.
        path: Vec<String>,
    },
    /// The control plane dies, or its store fails, at a write.
    Fault(FaultAt),
}

/// Which write fails, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultAt {
    /// Which.
    pub write: Write,
    /// How.
    pub fault: Fault,
}

/// A write of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Write {
    /// By its number, from 0.
    Number(u32),
    /// The first one that holds this transition.
    With(String),
}

/// How a write fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fault {
    /// The control plane dies before the write is durable.
    CrashBefore,
    /// It dies after the write, having given the first of the orders.
    CrashAfter {
        /// How many orders came out.
        orders: u32,
    },
    /// The store refuses the write, and works again later.
    StoreFull,
}

impl Fault {
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::CrashBefore => "crash before",
            Fault::CrashAfter { .. } => "crash after",
            Fault::StoreFull => "store full",
        }
    }
}

/// A queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueScript {
    /// The name.
    pub name: String,
    /// The parent.
    pub parent: Option<String>,
    /// GPUs that are its own.
    pub guarantee: u32,
    /// GPUs that it never exceeds.
    pub limit: Option<u32>,
    /// Whether it does not lend.
    pub keeps: bool,
    /// Whether it does not borrow.
    pub modest: bool,
    /// Whether it does not take back.
    pub patient: bool,
    /// Whether it starts nothing.
    pub held: bool,
    /// Whether its jobs take turns.
    pub sharing: bool,
    /// The highest priority.
    pub highest: Option<i32>,
}

/// A job, and how its attempts end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobScript {
    /// The name.
    pub name: String,
    /// Nodes.
    pub nodes: u32,
    /// GPUs on each.
    pub gpus_per_node: u32,
    /// Ranks on each.
    pub ranks_per_node: u32,
    /// The priority.
    pub priority: i32,
    /// How long a rank trains.
    pub run_ms: i64,
    /// Application failures after which it is run again.
    pub failures_allowed: u32,
    /// The time limit.
    pub time_limit: Option<Span>,
    /// The environment's number.
    pub environment: Option<u32>,
    /// The queue.
    pub queue: String,
    /// Who submits it.
    pub user: String,
    /// Whether it may be suspended.
    pub preemptible: bool,
    /// How often it saves itself.
    pub saves_every: Option<Span>,
    /// Whether it saves itself when it is told to stop.
    pub saves_on_request: bool,
    /// The level that it requires.
    pub require: Option<String>,
    /// The level that it prefers, for a while.
    pub prefer: Option<String>,
    /// Jobs that it waits for, and how they must end: `succeeded`, `failed` or `ended`.
    pub after: Vec<(String, String)>,
    /// How each attempt ends; those after the last succeed.
    pub outcomes: Vec<Outcome>,
}

/// How an attempt ends if nothing disturbs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// Every rank ends with 0.
    Succeed,
    /// A rank ends with 1 at half of its time, and takes others with it.
    Fail,
    /// A rank ends with 75 at half of its time.
    Requeue,
    /// A worker cannot start its ranks.
    LaunchFails,
    /// A worker's agent never says that it is ready.
    NeverReady,
    /// A worker's agent is told to stop by its node.
    Evicted,
    /// A worker is asked to leave at half of its time.
    Leaves,
    /// The cluster refuses a worker.
    Refused,
    /// It does so wherever and whenever it is tried.
    Impossible,
}

impl JobScript {
    /// How attempt `n` (from 1) ends.
    pub(super) fn outcome(&self, attempt: u32) -> Outcome {
        let index = (attempt as usize).saturating_sub(1);
        self.outcomes.get(index).copied().unwrap_or(Outcome::Succeed)
    }
}

impl Script {
    /// Lets the first write that holds a transition fail.
    #[cfg(test)]
    pub(super) fn aim(&mut self, transition: &str, fault: Fault) {
        let write = Write::With(transition.to_owned());
        self.items.insert(0, Step { at: 0, item: Item::Fault(FaultAt { write, fault }) });
    }

    /// Whether the node's wall clock never steps in this history.
    #[must_use]
    pub fn steady_clock(&self) -> bool {
        !self.seed.is_multiple_of(4)
    }

    pub(super) fn faults(&self) -> Vec<FaultAt> {
        let fault = |s: &Step| if let Item::Fault(f) = &s.item { Some(f.clone()) } else { None };
        self.items.iter().filter_map(fault).collect()
    }

    pub(super) fn cancel_when(&self) -> Vec<String> {
        let phase = |s: &Step| if let Item::CancelWhen { phase } = &s.item { Some(phase.clone()) } else { None };
        self.items.iter().filter_map(phase).collect()
    }

    pub(super) fn jobs(&self) -> impl Iterator<Item = &JobScript> {
        self.items.iter().filter_map(|s| if let Item::Submit(j) = &s.item { Some(j) } else { None })
    }
}
