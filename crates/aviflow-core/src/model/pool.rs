//! Pools and the platform's own settings: topology, maintenance, and how preemption is done.

use super::{Node, NodeId, TimeSharing};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nodes of one kind with their topology. A gang never spans two pools.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// The name.
    pub name: String,
    /// The levels above the node, smallest first, such as `leaf`, `spine`. [`super::Node::path`] has a
    /// domain's name for each.
    pub levels: Vec<String>,
    /// Whether its jobs take turns.
    pub time_sharing: Option<TimeSharing>,
    /// Where its nodes are: by the node's name a domain for each level, smallest first. Nodes that are
    /// not there yet may be named.
    #[serde(default)]
    pub domains: BTreeMap<String, Vec<String>>,
}

impl Pool {
    /// The path of a node: as the cluster reports it, where that fits the levels; else as the document says, else
    /// domains of its own, since nobody knows that it shares a switch with another.
    #[must_use]
    pub fn path(&self, node: &str, reported: &[String]) -> Vec<String> {
        if !reported.is_empty() && reported.len() == self.levels.len() {
            return reported.to_vec();
        }
        self.domains.get(node).cloned().unwrap_or_else(|| vec![format!("unlisted-{node}"); self.levels.len()])
    }
}

/// A time in which a node takes no work, and before which its jobs are moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// Its beginning: by then the node is to be empty.
    pub from: Time,
    /// Its end; none until somebody says so.
    pub until: Option<Time>,
    /// Who ordered it.
    pub by: String,
    /// Why.
    pub reason: String,
}

impl Drain {
    /// Whether the node takes no work at an instant.
    #[must_use]
    pub fn covers(&self, now: Time) -> bool {
        self.from <= now && self.until.is_none_or(|u| now < u)
    }

    /// Whether it is over.
    #[must_use]
    pub fn over(&self, now: Time) -> bool {
        self.until.is_some_and(|u| u <= now)
    }
}

impl Node {
    /// Whether its drain is in effect.
    #[must_use]
    pub fn drained(&self, now: Time) -> bool {
        self.drain.as_ref().is_some_and(|d| d.covers(now))
    }
}

/// Nodes that are to be drained a few at a time, each at the cheapest moment that is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RollingDrain {
    /// Its number.
    pub id: u64,
    /// Nodes that are still to be taken.
    pub nodes: Vec<NodeId>,
    /// Nodes that were taken and are not back.
    pub taken: Vec<NodeId>,
    /// How many may be away at once.
    pub max_unavailable: u32,
    /// When all must have been taken; none means whenever they are empty.
    pub by: Option<Time>,
    /// How long each is away; none until somebody uncordons it.
    pub each: Option<Span>,
    /// Who ordered it.
    pub ordered_by: String,
    /// Why.
    pub reason: String,
}

/// How the platform decides where no document says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policy {
    /// The time after which used GPU-time counts half.
    pub half_life: Span,
    /// Jobs of each accelerator type in a pool that get a reservation.
    pub reservations: u32,
    /// Whether the plan may suspend jobs at all.
    pub preemption: bool,
    /// A job is left alone for this long after its start, except for reclaim.
    pub minimum_run: Span,
    /// How long a victim may take for its next checkpoint before it is stopped anyhow.
    pub patience: Span,
    /// What a restart costs, in time of its GPUs, where it was never observed.
    pub restart: Span,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            half_life: Span::minutes(7 * 24 * 60),
            reservations: 1,
            preemption: true,
            minimum_run: Span::minutes(10),
            patience: Span::minutes(15),
            restart: Span::minutes(5),
        }
    }
}
