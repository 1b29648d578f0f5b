//! The canonical documents of administrators: every default filled in, every shorthand resolved.

use super::kubernetes::KubernetesSpec;
use crate::duration::Duration;
use aviflow_core::model as core;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A document of an administrator. Its kind stands in it under `kind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind")]
pub enum AdminDocument {
    /// A node of the quota tree.
    Queue(QueueSpec),
    /// A pool's topology.
    Pool(PoolSpec),
    /// How the platform decides where nothing else says so.
    Policy(PolicySpec),
}

impl AdminDocument {
    /// The kind, as it stands in the document.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            AdminDocument::Queue(_) => "Queue",
            AdminDocument::Pool(_) => "Pool",
            AdminDocument::Policy(_) => "Policy",
        }
    }

    /// The name; there is one policy, which has none.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            AdminDocument::Queue(queue) => Some(&queue.name),
            AdminDocument::Pool(pool) => Some(&pool.name),
            AdminDocument::Policy(_) => None,
        }
    }
}

/// As a person names it: `queue nlp`, `pool main`, `the policy`.
impl fmt::Display for AdminDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminDocument::Queue(queue) => write!(f, "queue {}", queue.name),
            AdminDocument::Pool(pool) => write!(f, "pool {}", pool.name),
            AdminDocument::Policy(_) => f.write_str("the policy"),
        }
    }
}

/// A queue: a node of the quota tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QueueSpec {
    /// The unique name: a DNS label.
    pub name: String,
    /// The parent's name; none for a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The team it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// Whether it takes and starts jobs.
    pub state: QueueState,
    /// The quota by accelerator type.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quotas: BTreeMap<String, QuotaSpec>,
    /// Whether others may use its guarantee while it does not.
    pub lend: bool,
    /// Whether it may use more than its guarantee.
    pub borrow: bool,
    /// Whether it takes its guarantee back from those who borrowed it, or waits until they end.
    pub reclaim: bool,
    /// What a job gets that does not say it.
    #[serde(default, skip_serializing_if = "QueueDefaults::is_empty")]
    pub defaults: QueueDefaults,
    /// The highest priority that its users may ask for, by its name; none means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub highest_priority: Option<String>,
    /// Who may submit; empty means everybody.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub submitters: Vec<String>,
    /// Whether its jobs take turns; none means as its parent or the pool says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_sharing: Option<TimeSharingSpec>,
}

impl QueueSpec {
    /// A root without quotas, open to everybody.
    #[must_use]
    pub fn open(name: &str) -> QueueSpec {
        QueueSpec {
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
            submitters: Vec::new(),
            time_sharing: None,
        }
    }
}

/// Whether a queue takes and starts jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum QueueState {
    /// Takes and starts jobs.
    #[default]
    Open,
    /// Takes jobs and starts none.
    Held,
    /// Takes no jobs; those it has may start.
    Draining,
}

/// What a queue has of one accelerator type, in GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QuotaSpec {
    /// GPUs that are its own whenever it wants them.
    pub guarantee: u32,
    /// GPUs that it never exceeds, with all queues below it; none means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Its share of what is above the guarantees, relative to its siblings.
    pub weight: u32,
}

/// What a job gets that does not say it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QueueDefaults {
    /// The time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<Duration>,
    /// The priority, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Whether it may be suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preemptible: Option<bool>,
}

impl QueueDefaults {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == QueueDefaults::default()
    }
}

/// How jobs take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TimeSharingSpec {
    /// Whether they do.
    pub enabled: bool,
    /// The shortest turn.
    pub minimum_run: Duration,
    /// Time of the whole pool whose GPU-time makes the first level; each further level is twice the one before.
    pub level: Duration,
    /// Waiting that lowers the level by one.
    pub ageing: Duration,
}

/// A pool: nodes of one kind with their topology.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSpec {
    /// The name: a DNS label.
    pub name: String,
    /// How its nodes are joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<TopologySpec>,
    /// Whether its jobs take turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_sharing: Option<TimeSharingSpec>,
    /// Its part for Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Box<KubernetesSpec>>,
}

/// How the nodes of a pool are joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TopologySpec {
    /// The levels above the node, smallest first, such as `leaf`, `spine`.
    pub levels: Vec<String>,
    /// The domains of the greatest level by name, with the smaller ones in them; none where labels
    /// of Kubernetes' nodes tell them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub domains: BTreeMap<String, Domain>,
}

/// A domain of the topology.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Domain {
    /// Of the smallest level: its nodes by name; `node-[1-8]` stands for eight.
    Nodes(Vec<String>),
    /// Of a greater level: the domains of the next smaller one.
    Domains(BTreeMap<String, Domain>),
}

/// How the platform decides where no other document says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicySpec {
    /// The time after which used GPU-time counts half.
    pub half_life: Duration,
    /// Jobs of each accelerator type in a pool that get a reservation.
    pub reservations: u32,
    /// Whether the plan may suspend jobs at all.
    pub preemption: bool,
    /// A job is left alone for this long after its start, except for reclaim.
    pub minimum_run: Duration,
    /// How long a victim may take for its next checkpoint before it is stopped anyhow.
    pub patience: Duration,
    /// What a restart costs, in time of its GPUs, where it was never observed.
    pub restart: Duration,
}

impl From<core::QueueState> for QueueState {
    fn from(state: core::QueueState) -> QueueState {
        match state {
            core::QueueState::Open => QueueState::Open,
            core::QueueState::Held => QueueState::Held,
            core::QueueState::Draining => QueueState::Draining,
        }
    }
}

impl From<QueueState> for core::QueueState {
    fn from(state: QueueState) -> core::QueueState {
        match state {
            QueueState::Open => core::QueueState::Open,
            QueueState::Held => core::QueueState::Held,
            QueueState::Draining => core::QueueState::Draining,
        }
    }
}

impl From<core::TimeSharing> for TimeSharingSpec {
    fn from(t: core::TimeSharing) -> TimeSharingSpec {
        TimeSharingSpec {
            enabled: t.enabled,
            minimum_run: Duration(t.minimum_run),
            level: Duration(t.level),
            ageing: Duration(t.ageing),
        }
    }
}

impl From<TimeSharingSpec> for core::TimeSharing {
    fn from(t: TimeSharingSpec) -> core::TimeSharing {
        core::TimeSharing { enabled: t.enabled, minimum_run: t.minimum_run.0, level: t.level.0, ageing: t.ageing.0 }
    }
}

impl From<&core::QueueDefaults> for QueueDefaults {
    fn from(d: &core::QueueDefaults) -> QueueDefaults {
        QueueDefaults {
            time_limit: d.time_limit.map(Duration),
            priority: d.priority.clone(),
            preemptible: d.preemptible,
        }
    }
}
