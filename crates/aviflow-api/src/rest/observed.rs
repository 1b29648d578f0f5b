//! A cluster as it is: who holds its GPUs, what waits, how the free ones lie. Whoever it belongs to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the control plane sees of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Observed {
    /// When it was asked.
    pub at: i64,
    /// Whether the control plane only looks (`--mode observe`), and schedules nothing.
    pub observing: bool,
    /// Whether figures come with how busy the GPUs are. There are none yet: a GPU that is held may idle.
    pub metrics: bool,
    /// Nodes with GPUs, by name.
    pub nodes: Vec<ObservedNode>,
    /// Namespaces that hold GPUs or wait for some; who holds most comes first.
    pub namespaces: Vec<ObservedNamespace>,
    /// Pods that ask for GPUs and are on no node, the longest first.
    pub pending: Vec<PendingPod>,
    /// How the free GPUs lie, by type.
    pub free: Vec<FreeGpus>,
}

/// A node with its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObservedNode {
    /// Its name.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// Its accelerator type.
    pub gpu_type: String,
    /// Its GPUs.
    pub gpus: u32,
    /// Those of them that its device plugin calls broken.
    pub broken: u32,
    /// GPUs that no pod holds, broken ones left out.
    pub free: u32,
    /// Whether its kubelet is heard of.
    pub ready: bool,
    /// Why nothing new can start there, if so; its free GPUs are then of no use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<String>,
    /// The pods that hold its GPUs, the longest first.
    pub pods: Vec<HoldingPod>,
}

/// A pod that holds GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HoldingPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// What made it, such as `Job/train`; none where a person did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// GPUs that it holds.
    pub gpus: u32,
    /// Since when.
    pub since: i64,
}

/// What a namespace holds and waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObservedNamespace {
    /// Its name.
    pub namespace: String,
    /// GPUs that its pods hold.
    pub gpus: u32,
    /// Those pods.
    pub pods: u32,
    /// Nodes that they are on.
    pub nodes: u32,
    /// Since when the oldest of them holds its GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// GPU-milliseconds that its pods have held so far.
    pub gpu_ms: i64,
    /// GPUs that its pods wait for.
    pub pending: u32,
}

/// A pod that waits for GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PendingPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// What made it, such as `Job/train`; none where a person did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// GPUs that it asks for.
    pub gpus: u32,
    /// Since when it is there.
    pub since: i64,
    /// Why it waits, in the words of kube-scheduler; empty where it has said nothing yet.
    pub reason: String,
}

/// How the free GPUs of a type lie, on nodes that take new work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FreeGpus {
    /// The type.
    pub gpu_type: String,
    /// All GPUs of the type, whoever holds them.
    pub gpus: u32,
    /// GPUs that are free.
    pub free: u32,
    /// Nodes of which all GPUs are free.
    pub whole_nodes: u32,
    /// GPUs that are free on nodes of which others are held.
    pub scattered: u32,
    /// The most that are free on one node.
    pub largest: u32,
}
