//! What happens to a pool: people, failures, and the writes at which the
//! control plane dies. A script is data: it can be printed, cut and replayed.

use super::hash;
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
    /// A person lets it start again.
    Release {
        /// Its name.
        job: String,
    },
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
}

impl JobScript {
    /// How attempt `n` (from 1) ends.
    pub(super) fn outcome(&self, attempt: u32) -> Outcome {
        let index = (attempt as usize).saturating_sub(1);
        self.outcomes.get(index).copied().unwrap_or(Outcome::Succeed)
    }
}

impl Script {
    /// The history of a seed.
    #[must_use]
    pub fn generate(seed: u64) -> Script {
        let draw = |what: u64, n: u64, below: u64| hash(&[seed, what, n]) % below.max(1);
        let nodes = u32::try_from(2 + draw(1, 0, 3)).unwrap_or(2);
        let mut items = Vec::new();
        let jobs = 2 + draw(2, 0, 6);
        for n in 0..jobs {
            let at = i64::try_from(draw(3, n, 60_000)).unwrap_or(0);
            items.push(Step { at, item: Item::Submit(job(seed, n, nodes)) });
            let name = format!("j{n}");
            let later = at + i64::try_from(draw(4, n, 120_000)).unwrap_or(0);
            match draw(5, n, 6) {
                0 => items.push(Step { at: later, item: Item::Cancel { job: name } }),
                1 => items.push(Step { at: later, item: Item::Suspend { job: name } }),
                2 => {
                    items.push(Step { at: later, item: Item::Suspend { job: name.clone() } });
                    let soon = later + i64::try_from(draw(16, n, 20_000)).unwrap_or(0);
                    items.push(Step { at: soon, item: Item::Cancel { job: name } });
                }
                _ => {}
            }
        }
        for n in 0..draw(6, 0, 7) {
            let at = i64::try_from(draw(7, n, 200_000)).unwrap_or(0);
            let node = u32::try_from(1 + draw(8, n, u64::from(nodes))).unwrap_or(1);
            let pick = draw(9, n, u64::MAX);
            let for_ms = 1000 + i64::try_from(draw(10, n, 60_000)).unwrap_or(0);
            let end = at + for_ms;
            match draw(11, n, 8) {
                0..=2 => items.push(Step { at, item: Item::KillRank { pick } }),
                3 | 4 => items.push(Step { at, item: Item::KillAgent { pick } }),
                5 => items.push(Step { at, item: Item::LoseNode { node, for_ms } }),
                6 => {
                    items.push(Step { at, item: Item::Cordon { node, on: true } });
                    items.push(Step { at: end, item: Item::Cordon { node, on: false } });
                    items.push(Step { at, item: Item::Pause { on: true } });
                    items.push(Step { at: end, item: Item::Pause { on: false } });
                }
                _ => {
                    items.push(Step { at, item: Item::Break { node, slots: vec![0, 3] } });
                    items.push(Step { at: end, item: Item::Break { node, slots: vec![] } });
                }
            }
        }
        if draw(17, 0, 2) == 0 {
            let phases =
                ["Suspending", "Stopping/failure", "Stopping/node failure", "Stopping/requeue", "Stopping/time limit"];
            let phase = phases[usize::try_from(draw(18, 0, 5)).unwrap_or(0)].to_owned();
            items.push(Step { at: 0, item: Item::CancelWhen { phase } });
        }
        for n in 0..draw(12, 0, 9) {
            let write = u32::try_from(draw(13, n, 60)).unwrap_or(0);
            let orders = u32::try_from(draw(15, n, 4)).unwrap_or(0);
            let fault = match draw(14, n, 5) {
                0 | 1 => Fault::CrashBefore,
                2 | 3 => Fault::CrashAfter { orders },
                _ => Fault::StoreFull,
            };
            items.push(Step { at: 0, item: Item::Fault(FaultAt { write: Write::Number(write), fault }) });
        }
        items.sort_by_key(|s| s.at);
        Script { seed, nodes, items }
    }

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

fn job(seed: u64, n: u64, nodes: u32) -> JobScript {
    let draw = |what: u64, below: u64| hash(&[seed, 100 + what, n]) % below;
    let draw32 = |what: u64, below: u64| u32::try_from(draw(what, below)).unwrap_or(0);
    let outcome = |k: u64| match hash(&[seed, 200, n, k]) % 12 {
        0..=2 => Outcome::Fail,
        3 => Outcome::Requeue,
        4 => Outcome::LaunchFails,
        5 => Outcome::NeverReady,
        6 => Outcome::Evicted,
        _ => Outcome::Succeed,
    };
    let gpus_per_node = [1, 2, 4, 8][draw32(0, 4) as usize];
    JobScript {
        name: format!("j{n}"),
        nodes: 1 + draw32(1, u64::from(nodes)),
        gpus_per_node,
        ranks_per_node: if draw(2, 2) == 0 { 1 } else { gpus_per_node.min(2) },
        priority: [0, 0, 100][draw32(3, 3) as usize],
        run_ms: 1000 + i64::try_from(draw(4, 60_000)).unwrap_or(0),
        failures_allowed: draw32(5, 3),
        time_limit: (draw(6, 5) == 0).then(|| Span(5_000 + i64::try_from(draw(7, 60_000)).unwrap_or(0))),
        environment: (draw(8, 3) == 0).then(|| draw32(9, 2)),
        outcomes: (0..draw(10, 4)).map(outcome).collect(),
    }
}
