//! Which rank is the culprit: the one that failed first, or the one that is not where all others wait.
//!
//! Most ranks of a gang that fails only notice: they lose a peer, or wait in a collective that one never enters. So
//! whoever ended for that reason, or was stopped, is not named as long as another may be.

use super::fault::Kind;
use crate::model::NodeId;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is known of a rank. 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RankFacts {
    /// Its last step.
    pub step: Option<u64>,
    /// The number of the last collective that it entered, of one process group all ranks are in.
    pub collective: Option<u64>,
    /// What its stack is, as a number: equal stacks have equal numbers.
    pub stack: Option<u64>,
    /// How it ended, if it has, and not with 0.
    pub end: Option<End>,
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct End {
    /// When, by the engine's time.
    pub at: Time,
    /// The class of its end.
    pub kind: Kind,
    /// Whether its agent had begun to stop it.
    pub stopping: bool,
}

/// The rank that is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Culprit {
    /// The lowest of the ranks that are named.
    pub rank: u32,
    /// Its node.
    pub node: NodeId,
    /// How many ranks stand there with it, itself included; all of one node if more than one.
    pub ranks: u32,
    /// What tells it.
    pub because: Because,
}

/// What tells the culprit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Because {
    /// It failed first, for a reason of its own.
    FailedFirst,
    /// It ended first, though only for the loss of a peer: whom it lost said nothing.
    EndedFirst,
    /// It did not enter a collective in which the others wait.
    BehindInCollectives,
    /// It is steps behind.
    BehindInSteps,
    /// Its stack is another than that of the others.
    OtherStack,
    /// It says nothing, where the others do.
    Silent,
}

impl Because {
    /// What tells it, after "rank 3".
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Because::FailedFirst => "failed first",
            Because::EndedFirst => "ended first, as it lost a peer that said nothing",
            Because::BehindInCollectives => "did not enter the collective in which the others wait",
            Because::BehindInSteps => "is steps behind the others",
            Because::OtherStack => "has another stack than the others",
            Because::Silent => "says nothing, where the others do",
        }
    }
}

/// How long after the end of another rank an error of NCCL may be that is nothing but its echo.
const SETTLE: Span = Span::seconds(3);

/// Ends this far apart may have been reported in the wrong order, by agents on other nodes.
const SKEW: Span = Span(500);

/// The rank that failed first. `node` tells the node of a rank.
#[must_use]
pub fn of_failure(ranks: &[RankFacts], node: impl Fn(u32) -> NodeId) -> Option<Culprit> {
    let ends = || (0u32..).zip(ranks).filter_map(|(rank, facts)| Some((rank, facts.end?)));
    let named = |rank, because| Culprit { rank, node: node(rank), ranks: 1, because };
    let mut times: Vec<Time> = ends().filter(|(_, e)| !e.stopping).map(|(_, e)| e.at).collect();
    times.sort_unstable();
    let another_before = |at: Time| {
        let from = times.partition_point(|other| at.since(*other) > SETTLE);
        times.get(from).is_some_and(|other| *other < at)
    };
    let noticed = |end: &End| match end.kind {
        Kind::PeerLost | Kind::NcclTimeout => true,
        Kind::Nccl => another_before(end.at),
        _ => false,
    };
    let own = || ends().filter(|(_, e)| !e.stopping && !noticed(e));
    if let Some(first) = own().map(|(_, e)| e.at).min() {
        // Of those at about one time, who says what it died of is more likely the first than who does not, and who
        // had trouble with the others the last.
        let doubt = |kind| match kind {
            Kind::Nccl => 2,
            Kind::Exit | Kind::Signal => 1,
            _ => 0,
        };
        let likely = |(rank, end): &(u32, End)| (doubt(end.kind), end.at, *rank);
        let rank = own().filter(|(_, e)| e.at <= first + SKEW).min_by_key(likely)?.0;
        return Some(named(rank, Because::FailedFirst));
    }
    // All waited for somebody: he is where they are not.
    if let Some(culprit) = of_hang(ranks, &node) {
        return Some(culprit);
    }
    let first = ends().filter(|(_, e)| !e.stopping).min_by_key(|(rank, e)| (e.at, *rank))?;
    Some(named(first.0, Because::EndedFirst))
}

/// The rank that is not where all others are, in a gang that stands still. None where none stands out: several that
/// differ are no culprit unless they are of one node, and two ranks have no majority.
#[must_use]
pub fn of_hang(ranks: &[RankFacts], node: impl Fn(u32) -> NodeId) -> Option<Culprit> {
    let behind = |value: fn(&RankFacts) -> Option<u64>, because| {
        let known: Vec<(u32, u64)> = (0u32..).zip(ranks).filter_map(|(rank, f)| Some((rank, value(f)?))).collect();
        let most = known.iter().map(|(_, v)| *v).max()?;
        let least = known.iter().map(|(_, v)| *v).min()?;
        let last: Vec<u32> = known.iter().filter(|(_, v)| *v == least).map(|(rank, _)| *rank).collect();
        (least < most).then(|| outlier(&last, known.len(), because, &node)).flatten()
    };
    behind(|f| f.collective, Because::BehindInCollectives)
        .or_else(|| behind(|f| f.step, Because::BehindInSteps))
        .or_else(|| other_stack(ranks, &node))
        .or_else(|| silent(ranks, &node))
}

fn other_stack(ranks: &[RankFacts], node: &impl Fn(u32) -> NodeId) -> Option<Culprit> {
    let mut groups: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (rank, facts) in (0u32..).zip(ranks) {
        if let Some(stack) = facts.stack {
            groups.entry(stack).or_default().push(rank);
        }
    }
    let known = groups.values().map(Vec::len).sum();
    let most = groups.values().map(Vec::len).max()?;
    let majority = groups.iter().find(|(_, ranks)| ranks.len() == most).map(|(stack, _)| *stack)?;
    let mut others: Vec<u32> = groups.iter().filter(|(s, _)| **s != majority).flat_map(|(_, r)| r.clone()).collect();
    others.sort_unstable();
    outlier(&others, known, Because::OtherStack, node)
}

/// Ranks of which neither step, collective nor stack is known, where almost all others tell one of them.
fn silent(ranks: &[RankFacts], node: &impl Fn(u32) -> NodeId) -> Option<Culprit> {
    let says = |f: &RankFacts| f.stack.is_some() || f.collective.is_some();
    let silent: Vec<u32> = (0u32..).zip(ranks).filter(|(_, f)| !says(f)).map(|(rank, _)| rank).collect();
    outlier(&silent, ranks.len(), Because::Silent, node)
}

/// The ranks that differ, where they are few of the known and of one node.
fn outlier(which: &[u32], known: usize, because: Because, node: &impl Fn(u32) -> NodeId) -> Option<Culprit> {
    let first = *which.first()?;
    let at = node(first);
    let few = which.len() == 1 || which.iter().all(|rank| node(*rank) == at);
    (2 * which.len() < known && few).then(|| Culprit {
        rank: first,
        node: at,
        ranks: u32::try_from(which.len()).unwrap_or(u32::MAX),
        because,
    })
}

#[cfg(test)]
mod tests;
