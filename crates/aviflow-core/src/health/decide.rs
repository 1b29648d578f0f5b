//! What is done about a fault: a function of the fault and of what was done since the last new checkpoint.
//!
//! - An application's fault never blames a node, and alone spends retries. It is run again in place, then as a new
//!   gang; after [`FAILURES`] in a row without a new complete checkpoint the job stops, with a summary.
//! - A fault of which nobody can tell whose it is blames nobody. What is changed grows: in place, the same nodes, other
//!   nodes; then the job stops. A node that stands out twice is replaced at the second time.
//! - A fault of a machine moves what ran there; the gang's other nodes stay.
//! - A fault that comes again however often it is run stops at once.
//!
//! A new complete checkpoint is progress: the count begins anew.

use super::Settings;
use super::fault::{Blame, Kind, Remedy, Severity};
use super::xid::Asks;
use crate::model::NodeId;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Failures of the application in a row, without a new complete checkpoint, after which the job stops.
pub const FAILURES: u32 = 3;

/// Restarts for which nobody is to blame, without a new complete checkpoint, after which the job stops.
pub const RESTARTS: u32 = 3;

/// Faults that are kept for the summary, and nodes that stood out.
const KEPT: usize = 8;

/// Where a fault was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Place {
    /// The rank.
    pub rank: Option<u32>,
    /// The node.
    pub node: Option<NodeId>,
    /// The GPU's slot there.
    pub gpu: Option<u32>,
}

/// All that a decision follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Situation<'a> {
    /// The class of the fault.
    pub kind: Kind,
    /// What an XID asks for that explains it, see [`super::xid::Xids::judge`].
    pub asks: Option<Asks>,
    /// Where it was seen: the culprit's place, where one is named.
    pub place: Place,
    /// Whether an agent of each worker is connected, so that ranks can be started again without new workers.
    pub agents: bool,
    /// Whether only the words of a rank say what it is: no driver, kubelet or watch did.
    pub words: bool,
    /// Whether a failure of the application may be followed by another attempt (`retry.failures`).
    pub retry_left: bool,
    /// What was done before.
    pub past: &'a Past,
    /// What is detected.
    pub settings: &'a Settings,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum Action {
    /// Nothing; people see it.
    Nothing,
    /// The same workers start their ranks again, in the next epoch.
    RestartInPlace,
    /// Another attempt, on the same nodes where they are free.
    RestartGang,
    /// Another attempt without this node; without any of the same nodes, where none is named.
    Replace {
        /// The node.
        node: Option<NodeId>,
    },
    /// Another attempt without this GPU, which is reset first.
    ResetGpu {
        /// The node.
        node: NodeId,
        /// The slot; all of the node's if it is not known.
        gpu: Option<u32>,
    },
    /// Another attempt without this node, which takes nothing new until it was checked.
    Drain {
        /// The node.
        node: NodeId,
    },
    /// The job ends, and its owner is told.
    Stop,
}

/// A decision and what it follows from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// What is done.
    #[serde(flatten)]
    pub action: Action,
    /// Whom it blames.
    pub blame: Blame,
    /// Whether it spends a retry.
    pub charged: bool,
    /// What happened.
    pub kind: Kind,
    /// Where.
    pub place: Place,
    /// Why this follows, in a sentence without a full stop; "its" is of what stands in `place`.
    pub reason: String,
    /// What a person may do next.
    pub next: String,
}

/// What happened to a job since its last new complete checkpoint. At most 0.5 kB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Past {
    /// Failures of the application in a row.
    pub failures: u32,
    /// Restarts for which nobody was to blame.
    pub restarts: u32,
    /// Nodes that stood out in faults for which nobody was to blame.
    suspects: VecDeque<NodeId>,
    /// The last faults, oldest first; they are kept over checkpoints.
    faults: VecDeque<(Time, Kind, Option<u32>)>,
}

impl Past {
    /// Takes in what was decided.
    pub fn note(&mut self, decision: &Decision, at: Time) {
        if decision.action == Action::Nothing {
            return;
        }
        keep(&mut self.faults, (at, decision.kind, decision.place.rank));
        if decision.blame == Blame::Application {
            self.failures = self.failures.saturating_add(1);
        } else if !decision.blame.is_hardware() {
            self.restarts = self.restarts.saturating_add(1);
            if let Some(node) = decision.place.node {
                keep(&mut self.suspects, node);
            }
        }
    }

    /// A new checkpoint is complete: what happened before did not keep the job from getting on.
    pub fn checkpoint(&mut self) {
        (self.failures, self.restarts) = (0, 0);
        self.suspects.clear();
    }

    /// How the last faults followed each other, for a person.
    #[must_use]
    pub fn summary(&self, now: Time) -> String {
        let each = self.faults.iter().map(|(at, kind, rank)| {
            let rank = rank.map(|rank| format!(" of rank {rank}")).unwrap_or_default();
            format!("{kind}{rank} {} ago", now.since(*at))
        });
        each.collect::<Vec<_>>().join(", ")
    }
}

fn keep<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() >= KEPT {
        list.pop_front();
    }
    list.push_back(item);
}

/// Decides what is done about a fault.
#[must_use]
pub fn decide(situation: &Situation<'_>) -> Decision {
    let fault = situation.kind.fault();
    let asks = situation.asks.unwrap_or(Asks::Watch);
    let told = |action, blame, reason: String| Decision {
        action,
        blame,
        charged: false,
        kind: situation.kind,
        place: situation.place.clone(),
        reason,
        next: fault.next.to_owned(),
    };
    // What the driver says of a GPU explains what the ranks on it said.
    if let Some(node) = situation.place.node.filter(|_| asks.blame().is_hardware()) {
        let (action, reason) = match asks {
            Asks::ResetGpu => {
                let gpu = situation.place.gpu;
                let which = if gpu.is_some() { "its GPU is" } else { "its GPUs are" };
                (Action::ResetGpu { node, gpu }, format!("{which} reset before anything else runs there"))
            }
            _ => (Action::Drain { node }, "its node takes nothing new until it was checked".to_owned()),
        };
        return told(action, asks.blame(), format!("{reason}, and is left out of the next attempt ({})", asks.words()));
    }
    let blame = if asks == Asks::RestartApplication { Blame::Application } else { fault.blame };
    if situation.kind == Kind::Xid && asks != Asks::RestartApplication {
        return told(Action::Nothing, blame, asks.words().to_owned());
    }
    match fault.remedy {
        Remedy::Watch if fault.severity < Severity::Fatal && situation.kind != Kind::Xid => {
            told(Action::Nothing, blame, "nothing is stopped for it".to_owned())
        }
        Remedy::Person => told(Action::Stop, blame, "to run it again would end in the same way".to_owned()),
        Remedy::Elsewhere => elsewhere(situation, &told),
        Remedy::Watch | Remedy::Restart => {
            if blame == Blame::Application {
                application(situation, &told)
            } else {
                nobody(situation, blame, &told)
            }
        }
    }
}

type Told<'a> = &'a dyn Fn(Action, Blame, String) -> Decision;

/// A machine's fault that no XID tells.
fn elsewhere(situation: &Situation<'_>, told: Told<'_>) -> Decision {
    let fault = situation.kind.fault();
    let Some(node) = situation.place.node else {
        return told(Action::RestartGang, fault.blame, "the gang starts again; no node is named".to_owned());
    };
    match situation.kind {
        // A program's word drains no node: another one takes its place, and what comes again there counts.
        _ if situation.words => {
            let reason = "as its last lines say; another node takes the place of its own".to_owned();
            told(Action::Replace { node: Some(node) }, Blame::Unknown, reason)
        }
        // It is gone: whether it comes back as it was is seen when it does.
        Kind::NodeLost => {
            let reason = "the gang starts again, with another node where there is one".to_owned();
            told(Action::Replace { node: Some(node) }, fault.blame, reason)
        }
        _ => {
            let reason = "its node takes nothing new until it was checked, the gang starts again without it".to_owned();
            told(Action::Drain { node }, fault.blame, reason)
        }
    }
}

/// The application's own fault.
fn application(situation: &Situation<'_>, told: Told<'_>) -> Decision {
    let past = situation.past;
    let n = past.failures + 1;
    let (action, reason) = if n >= FAILURES && situation.settings.on(Kind::CrashLoop) {
        let reason = format!("failed {n} times in a row without a new complete checkpoint, it stops");
        let mut stop = told(Action::Stop, Blame::Application, reason);
        stop.charged = true;
        stop.next = Kind::CrashLoop.fault().next.to_owned();
        return stop;
    } else if !situation.retry_left {
        (Action::Stop, "no retry is left".to_owned())
    } else if situation.agents && past.failures == 0 {
        (Action::RestartInPlace, "the ranks start again where they are".to_owned())
    } else if situation.agents {
        (Action::RestartGang, format!("failed {n} times since its last checkpoint, a new gang starts"))
    } else {
        (Action::RestartGang, "a new gang starts, as not every agent is there".to_owned())
    };
    Decision { charged: true, ..told(action, Blame::Application, reason) }
}

/// A fault of which nobody can tell whose it is.
fn nobody(situation: &Situation<'_>, blame: Blame, told: Told<'_>) -> Decision {
    let past = situation.past;
    if past.restarts >= RESTARTS {
        let reason =
            format!("{} restarts, the last on other nodes, brought no new checkpoint: it stops", past.restarts);
        return told(Action::Stop, blame, reason);
    }
    let suspect = situation.place.node.filter(|node| past.suspects.contains(node));
    if let Some(node) = suspect {
        let reason = "its node stood out for the second time, another one takes its place".to_owned();
        return told(Action::Replace { node: Some(node) }, blame, reason);
    }
    match past.restarts {
        0 if situation.agents => {
            told(Action::RestartInPlace, blame, "it may pass, the ranks start again where they are".to_owned())
        }
        0 => told(Action::RestartGang, blame, "it may pass, a new gang starts as not every agent is there".to_owned()),
        1 => told(Action::RestartGang, blame, "the second one since the last checkpoint, a new gang starts".to_owned()),
        _ => {
            let node = situation.place.node;
            told(Action::Replace { node }, blame, "it came again in a new gang, it is tried on other nodes".to_owned())
        }
    }
}

#[cfg(test)]
mod tests;
