//! The pool and its account: nodes, environments, usage, agents, objects.

use super::WindowInfo;
use crate::admin::PoolSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeInfo {
    /// The name.
    pub name: String,
    /// The pool.
    pub pool: String,
    /// The accelerator type.
    pub gpu_type: String,
    /// Ready, Cordoned (by a person, or drained), Closed (by others, see `closed`) or Gone.
    pub condition: String,
    /// Why others keep new work away from it, such as a cordon of the cluster's own, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<String>,
    /// Why GPUs of it are kept from work since they failed, if any are, until it passes a check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<String>,
    /// The slots of these GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<u32>,
    /// Its domain of each level of the pool.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub domains: BTreeMap<String, String>,
    /// When it is to be empty, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<WindowInfo>,
    /// Its GPUs, slot by slot.
    pub gpus: Vec<GpuInfo>,
}

/// A short test on a node before it takes work again; answered as a command inside a worker is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeCheck {
    /// The image to run it in, on Kubernetes; Aviflow's own if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The command; Aviflow's own test if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub run: Vec<String>,
    /// Whether the node stays cordoned also if it passes.
    #[serde(default)]
    pub keep_cordoned: bool,
    /// Why, for the log of what people did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolInfo {
    /// The name.
    pub name: String,
    /// Its accelerator types.
    pub gpu_types: Vec<String>,
    /// Its nodes, those that are gone too.
    pub nodes: u32,
    /// Their GPUs.
    pub gpus: u32,
    /// GPUs that a job could have now.
    pub free: u32,
    /// GPUs that workloads which are not jobs use.
    #[serde(default)]
    pub foreign: u32,
    /// The most free GPUs on one node.
    pub most_free_on_a_node: u32,
    /// The levels above the node, smallest first; `node` is always one below them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<String>,
    /// The domains of all levels, smallest level first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<DomainInfo>,
    /// The document, as it can be applied again; none where nobody wrote one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<PoolSpec>,
}

/// A domain of a pool's topology: nodes below one switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DomainInfo {
    /// Its level.
    pub level: String,
    /// Its name.
    pub name: String,
    /// The domain of the next greater level that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<String>,
    /// Its nodes that are there.
    pub nodes: u32,
    /// Their GPUs.
    pub gpus: u32,
    /// GPUs that a job could have now.
    pub free: u32,
    /// Nodes all of whose GPUs a job could have now.
    pub free_nodes: u32,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuInfo {
    /// The slot.
    pub slot: u32,
    /// Its ledger state.
    pub state: String,
    /// The job that holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Who submitted that job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Since when it is in this state.
    pub since: i64,
    /// Whether it is known to be broken.
    pub unhealthy: bool,
}

/// An environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentInfo {
    /// The name.
    pub name: String,
    /// The version.
    pub version: u32,
    /// The content hash.
    pub hash: String,
    /// What it is for.
    pub description: String,
    /// Versions of Python it is locked for; none where it is an image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub python: String,
    /// Default variables.
    pub env: BTreeMap<String, String>,
    /// The container image by its digest, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Words before a job's `run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<String>,
    /// What to use instead, where it is not to be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<String>,
    /// The lock, as text; only where one environment is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<String>,
    /// Whether it is built and ready here.
    pub ready: bool,
}

/// Use of the pool over a period. The rows sum to the capacity exactly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The first millisecond.
    pub from: i64,
    /// The millisecond after the last.
    pub to: i64,
    /// What the rows are by: `user`, `queue`, `job` or `state`.
    pub by: String,
    /// GPU-milliseconds that there were.
    pub capacity: i64,
    /// One row for each value; GPU time that nobody held is in the row named `-`.
    pub rows: Vec<UsageRow>,
}

/// A row of a usage report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UsageRow {
    /// The user, queue, job or state.
    pub key: String,
    /// GPU-milliseconds by ledger state.
    pub states: BTreeMap<String, i64>,
    /// Their sum.
    pub total: i64,
}

/// Jobs that were submitted in a period and ran: a history that can be replayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobHistory {
    /// The first millisecond.
    pub from: i64,
    /// The millisecond after the last.
    pub to: i64,
    /// The jobs, in the order of their submission.
    pub jobs: Vec<PastJob>,
    /// Jobs that were submitted in the period and have not ended: how long they will have run is not known.
    pub unfinished: u64,
    /// Jobs that were submitted in the period and ended without ever running.
    pub never_ran: u64,
}

/// A job that ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PastJob {
    /// The name.
    pub name: String,
    /// When it was submitted.
    pub submitted: i64,
    /// Who submitted it.
    pub user: String,
    /// The queue.
    pub queue: String,
    /// The priority, as a number.
    pub priority: i32,
    /// Nodes that it asked for at least.
    pub nodes: u32,
    /// GPUs on each.
    pub gpus_per_node: u32,
    /// The accelerator type that it would rather have; none if any would do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_type: Option<String>,
    /// Milliseconds in Running, over all attempts.
    pub ran: i64,
    /// Its time limit in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<i64>,
    /// Whether it might be preempted.
    pub preemptible: bool,
    /// The level of the topology of which one domain had to hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require: Option<String>,
}

/// An agent that is connected to this control plane, or was started by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentInfo {
    /// The job.
    pub job: String,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
    /// Its process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Whether its connection stands.
    pub connected: bool,
}

/// An object of the content store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObjectInfo {
    /// Its SHA-256, hexadecimal.
    pub sha256: String,
    /// Its bytes.
    pub bytes: u64,
}
