//! Nodes and GPUs that are kept from work since they failed, until they passed a check.
//!
//! What an application did is never noted here, nor what says nothing of the node it is seen on: a hang, a full disk,
//! the loss of a peer. A fault that asks for it quarantines at once, others once they come again on the same node or
//! GPU within a day; of faults for which nobody is to blame, only what two jobs saw counts. Faults within [`EVENT`] of
//! each other on one node are one event, which counts once: each job there sees it, and each detector.
//!
//! A budget bounds what automation takes from a pool, by a share of its nodes and by their number, and it never takes
//! the last node that works, neither at once nor GPU by GPU. What would exceed it is told, and done once the budget
//! allows.
//!
//! This is a book of its own: what people cordoned is neither read as a fault nor changed, and a node that passed its
//! check stays cordoned where a person said so. One value for each pool; it is state, and survives a restart.

use super::fault::{Blame, Kind};
use crate::gpus::Slots;
use crate::model::{JobId, NodeId};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// When something is quarantined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rules {
    /// Faults of one node or GPU after which it is.
    pub repeats: u32,
    /// Within this time.
    pub within: Span,
    /// Nodes of a pool at most, in hundredths; one may always be if another works.
    pub percent: u32,
    /// Nodes of a pool at most.
    pub nodes: u32,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { repeats: 2, within: Span::minutes(24 * 60), percent: 10, nodes: 16 }
    }
}

/// A fault of a node or a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Seen {
    /// The class.
    pub kind: Kind,
    /// Whom it blames.
    pub blame: Blame,
    /// The node.
    pub node: NodeId,
    /// The GPU's slot, where it is the GPU's.
    pub gpu: Option<u32>,
    /// The job that ran there.
    pub job: Option<JobId>,
    /// When.
    pub at: Time,
    /// Whether it asks for a quarantine by itself, as what is to be reset, checked or started anew.
    pub at_once: bool,
}

/// What is kept from work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Single GPUs; none where the whole node is.
    pub gpus: Option<Slots>,
    /// Since when.
    pub since: Time,
    /// Why, in a few words.
    pub reason: String,
}

/// The pool, as far as the budget asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its nodes.
    pub nodes: u32,
    /// Those that take work, apart from what is quarantined here: there, not cordoned and not closed.
    pub open: u32,
    /// GPUs of each of its nodes: one of which so many are kept is kept as a whole.
    pub gpus: u32,
}

/// What came of a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum Outcome {
    /// It is none that counts here.
    Ignored,
    /// It is noted.
    Noted,
    /// It is kept from work already.
    Already,
    /// It is kept from work from now on.
    Quarantined {
        /// Why.
        reason: String,
    },
    /// It should be, and would exceed the budget: a person is asked.
    Exceeds {
        /// Why it should be, and what keeps it from it.
        reason: String,
    },
}

/// Faults of one node within this time of the first of them are one event.
pub const EVENT: Span = Span::seconds(60);

/// Faults that are kept of a node.
const KEPT: usize = 16;

/// What is known of the nodes of one pool: at most 16 faults of each, 48 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Quarantine {
    #[serde(with = "crate::health::pairs")]
    seen: BTreeMap<NodeId, VecDeque<Seen>>,
    #[serde(with = "crate::health::pairs")]
    kept: BTreeMap<NodeId, Kept>,
    /// What should be, beyond the budget.
    #[serde(with = "crate::health::pairs")]
    wanted: BTreeMap<NodeId, Kept>,
}

impl Quarantine {
    /// Takes a fault in.
    pub fn note(&mut self, fault: &Seen, pool: Pool, rules: &Rules) -> Outcome {
        match fault.blame {
            Blame::Application | Blame::Platform => return Outcome::Ignored,
            Blame::Node | Blame::Gpu | Blame::Network | Blame::Unknown => {}
        }
        if matches!(fault.kind, Kind::Hang | Kind::BusyIdle | Kind::DiskFull | Kind::PeerLost) {
            return Outcome::Ignored;
        }
        let seen = self.seen.entry(fault.node).or_default();
        seen.retain(|s| fault.at.since(s.at) <= rules.within);
        if seen.len() >= KEPT {
            seen.pop_front();
        }
        seen.push_back(*fault);
        let Some((gpu, why)) = due(seen, fault, rules) else { return Outcome::Noted };
        let gpus = gpu.map(|slot| Slots(1 << slot));
        if self.kept.get(&fault.node).is_some_and(|kept| covers(kept, gpus)) {
            return Outcome::Already;
        }
        let kept = Kept { gpus, since: fault.at, reason: why };
        self.keep(fault.node, kept, pool, rules)
    }

    /// A node passed its check: it takes work again, as far as it is up to this book. Returns whether it was kept.
    pub fn passed(&mut self, node: NodeId) -> bool {
        self.seen.remove(&node);
        self.wanted.remove(&node).is_some() | self.kept.remove(&node).is_some()
    }

    /// A node left the pool for good.
    pub fn forget(&mut self, node: NodeId) {
        self.passed(node);
    }

    /// Does what exceeded the budget before, oldest first, as far as it allows now. Returns the nodes.
    pub fn settle(&mut self, pool: Pool, rules: &Rules) -> Vec<NodeId> {
        let mut wanted: Vec<(NodeId, Kept)> = self.wanted.iter().map(|(n, k)| (*n, k.clone())).collect();
        wanted.sort_by_key(|(node, kept)| (kept.since, *node));
        let mut done = Vec::new();
        for (node, kept) in wanted {
            if matches!(self.keep(node, kept, pool, rules), Outcome::Quarantined { .. }) {
                done.push(node);
            }
        }
        done
    }

    /// What is kept from work, by node.
    pub fn kept(&self) -> impl Iterator<Item = (NodeId, &Kept)> {
        self.kept.iter().map(|(node, kept)| (*node, kept))
    }

    /// What should be kept from work, beyond the budget.
    pub fn wanted(&self) -> impl Iterator<Item = (NodeId, &Kept)> {
        self.wanted.iter().map(|(node, kept)| (*node, kept))
    }

    /// The GPUs of a node that are kept from work, of those that it has.
    #[must_use]
    pub fn of(&self, node: NodeId, gpus: Slots) -> Slots {
        self.kept.get(&node).map_or(Slots::NONE, |kept| kept.gpus.map_or(gpus, |some| some.and(gpus)))
    }

    fn keep(&mut self, node: NodeId, mut kept: Kept, pool: Pool, rules: &Rules) -> Outcome {
        let before = self.kept.get(&node);
        if let Some(before) = before {
            kept.gpus = kept.gpus.zip(before.gpus).map(|(a, b)| a.or(b));
        }
        // All of its GPUs are all of the node, however few at a time.
        kept.gpus = kept.gpus.filter(|some| some.count() < pool.gpus);
        if let Some(limit) = self.limit(before, &kept, pool, rules) {
            let reason = format!("{}; {limit}", kept.reason);
            self.wanted.insert(node, kept);
            return Outcome::Exceeds { reason };
        }
        let reason = kept.reason.clone();
        self.wanted.remove(&node);
        self.kept.insert(node, kept);
        Outcome::Quarantined { reason }
    }

    /// What of the budget keeps a node from being taken, if anything does.
    fn limit(&self, before: Option<&Kept>, kept: &Kept, pool: Pool, rules: &Rules) -> Option<String> {
        let taken = u32::try_from(self.kept.len()).unwrap_or(u32::MAX);
        let share = u64::from(pool.nodes) * u64::from(rules.percent) / 100;
        let budget = rules.nodes.min(u32::try_from(share.max(1)).unwrap_or(u32::MAX));
        if before.is_none() && taken >= budget {
            return Some(format!(
                "{taken} of {} nodes are quarantined, which is all that may be; check it, or cordon it yourself",
                pool.nodes
            ));
        }
        let whole = u32::try_from(self.kept.values().filter(|k| k.gpus.is_none()).count()).unwrap_or(u32::MAX);
        let more = kept.gpus.is_none() && before.is_none_or(|b| b.gpus.is_some());
        (more && pool.open <= whole + 1)
            .then(|| "it is the last node that works; check it as soon as it is empty".to_owned())
    }
}

fn covers(kept: &Kept, gpus: Option<Slots>) -> bool {
    match (kept.gpus, gpus) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(have), Some(want)) => want.without(have).is_empty(),
    }
}

/// Whether a fault, with those before it, asks for a quarantine: of which GPU, or of the node, and why.
fn due(seen: &VecDeque<Seen>, fault: &Seen, rules: &Rules) -> Option<(Option<u32>, String)> {
    // A slot that no node has says nothing of which GPU it is.
    let gpu = fault.gpu.filter(|slot| *slot < u64::BITS && fault.blame == Blame::Gpu);
    if fault.at_once && fault.blame != Blame::Unknown {
        return Some((gpu, fault.kind.to_string()));
    }
    let blamed = || seen.iter().filter(|s| s.blame != Blame::Unknown);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX) >= rules.repeats.max(1);
    if fault.blame == Blame::Unknown {
        let mut jobs: Vec<JobId> = Vec::new();
        let mut last = None;
        for (at, job) in seen.iter().filter(|s| s.blame == Blame::Unknown).filter_map(|s| Some((s.at, s.job?))) {
            if !jobs.contains(&job) && last.is_none_or(|last| at.since(last) > EVENT) {
                jobs.push(job);
                last = Some(at);
            }
        }
        let several = jobs.len() >= 2 && count(jobs.len());
        return several.then(|| (None, format!("{} jobs failed on it without another cause", jobs.len())));
    }
    let same = events(blamed().filter(|s| s.gpu == fault.gpu && s.blame == fault.blame));
    if gpu.is_some() && count(same) {
        return Some((gpu, format!("{} for the {}", fault.kind, nth(same))));
    }
    let all = events(blamed());
    count(all).then(|| (None, format!("{} faults within {}, the last of them: {}", all, rules.within, fault.kind)))
}

/// How many events these faults are, in the order in which they came.
fn events<'a>(faults: impl Iterator<Item = &'a Seen>) -> usize {
    let (mut n, mut begun) = (0, None);
    for fault in faults {
        if begun.is_none_or(|begun| fault.at.since(begun) > EVENT) {
            n += 1;
            begun = Some(fault.at);
        }
    }
    n
}

fn nth(n: usize) -> String {
    match n {
        1 => "first time".to_owned(),
        2 => "second time".to_owned(),
        n => format!("{n}th time"),
    }
}

#[cfg(test)]
mod tests;
