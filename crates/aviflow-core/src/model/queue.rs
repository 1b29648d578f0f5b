//! The quota tree: queues with their guarantees, limits and weights.

use crate::time::Span;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A node of the quota tree. Jobs wait in any of them, also in one that has children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// The unique name.
    pub name: String,
    /// The parent's name; `None` for a root.
    pub parent: Option<String>,
    /// The team it belongs to.
    #[serde(default)]
    pub team: Option<String>,
    /// Whether it starts jobs.
    pub state: QueueState,
    /// The quota by accelerator type. A type that no queue names is not managed: everybody may use it.
    #[serde(default)]
    pub quotas: BTreeMap<String, Quota>,
    /// Whether others may use its guarantee while it does not.
    #[serde(default = "yes")]
    pub lend: bool,
    /// Whether it may use more than its guarantee.
    #[serde(default = "yes")]
    pub borrow: bool,
    /// Whether it takes its guarantee back from those who borrowed it, or waits until they end.
    #[serde(default = "yes")]
    pub reclaim: bool,
    /// What a job gets that does not say it.
    #[serde(default)]
    pub defaults: QueueDefaults,
    /// The highest priority that its users may ask for; none means any.
    #[serde(default)]
    pub highest_priority: Option<i32>,
    /// Who may submit; empty means everybody.
    #[serde(default)]
    pub submitters: BTreeSet<String>,
    /// Whether its jobs take turns; none means as its parent or the pool says.
    #[serde(default)]
    pub time_sharing: Option<TimeSharing>,
}

fn yes() -> bool {
    true
}

impl Queue {
    /// A root queue without quotas, open to everybody.
    #[must_use]
    pub fn open(name: &str) -> Queue {
        Queue {
            name: name.to_owned(),
            parent: None,
            team: None,
            state: QueueState::Open,
            quotas: BTreeMap::new(),
            lend: true,
            borrow: true,
            reclaim: true,
            defaults: QueueDefaults::default(),
            highest_priority: None,
            submitters: BTreeSet::new(),
            time_sharing: None,
        }
    }
}

/// What a queue has of one accelerator type, in GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    /// GPUs that are its own whenever it wants them.
    pub guarantee: u32,
    /// GPUs that it never exceeds, with all queues below it.
    #[serde(default)]
    pub limit: Option<u32>,
    /// Its share of what is above the guarantees, relative to its siblings.
    #[serde(default = "one")]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// What a job gets that does not say it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueDefaults {
    /// The time limit.
    #[serde(default)]
    pub time_limit: Option<Span>,
    /// The priority, by its name.
    #[serde(default)]
    pub priority: Option<String>,
    /// Whether it may be suspended.
    #[serde(default)]
    pub preemptible: Option<bool>,
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

/// How jobs take turns: preemptible jobs of equal priority, ordered by the level of the service they had,
/// which waiting lowers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeSharing {
    /// Whether they do.
    pub enabled: bool,
    /// The shortest turn.
    pub minimum_run: Span,
    /// Time of the whole pool whose GPU-time makes the first level; each further level is twice the one before.
    pub level: Span,
    /// Waiting that lowers the level by one.
    pub ageing: Span,
}

impl TimeSharing {
    /// On, with turns of 2 h, levels from a quarter of an hour of the whole pool, a level less for each 40 h of
    /// waiting: what did best on the Kalos trace and on perturbed ones, see `docs/performance.md`.
    #[must_use]
    pub fn on() -> TimeSharing {
        TimeSharing {
            enabled: true,
            minimum_run: Span::minutes(120),
            level: Span::minutes(15),
            ageing: Span::minutes(40 * 60),
        }
    }
}
