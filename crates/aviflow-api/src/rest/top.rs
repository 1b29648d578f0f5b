//! What gangs and GPUs do now. What is not known is absent, which is not zero.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What GPUs do, as they reported of late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuLoad {
    /// GPUs of which there are figures.
    pub gpus: u32,
    /// Part of the time, 0 to 1, in which SMs had work; the mean over the GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_active: Option<f64>,
    /// Part of the cycles, 0 to 1, in which tensor cores were active; the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_active: Option<f64>,
    /// Part of the cycles, 0 to 1, in which device memory moved data; the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram_active: Option<f64>,
    /// Part of the time, 0 to 1, in which any kernel ran; the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
    /// Bytes of device memory in use, all together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used: Option<f64>,
    /// Bytes of device memory in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_total: Option<f64>,
    /// Watts, all together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
}

/// What runs now, and how the nodes are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Top {
    /// When.
    pub at: i64,
    /// The jobs that hold GPUs.
    pub jobs: Vec<TopJob>,
    /// The nodes; empty for who may not list them.
    pub nodes: Vec<TopNode>,
}

/// A job that holds GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TopJob {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The queue.
    pub queue: String,
    /// Starting, Running, Suspending or Stopping.
    pub phase: String,
    /// The attempt.
    pub attempt: u32,
    /// GPUs that it holds.
    pub gpus: u32,
    /// The step that its training reported last in this attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// How many there will be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// When it reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_at: Option<i64>,
    /// Milliseconds of a step, of late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<f64>,
    /// The loss that it reported last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Its speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// The part of the GPUs' peak that it uses, as it reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// What its GPUs do.
    pub load: GpuLoad,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TopNode {
    /// The name.
    pub name: String,
    /// The pool.
    pub pool: String,
    /// The accelerator type.
    pub gpu_type: String,
    /// As of [`super::NodeInfo::condition`].
    pub condition: String,
    /// Its GPUs.
    pub gpus: u32,
    /// Those that jobs hold.
    pub held: u32,
    /// Those that are known to be broken.
    pub unhealthy: u32,
    /// What its GPUs do, whoever holds them.
    pub load: GpuLoad,
    /// The last XID errors that its GPUs had at any time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<u32>,
    /// GPUs with rows of memory that could not be remapped.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub row_remap_failures: u32,
    /// Why its GPUs give no figures, if they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// The ranks of a job's present attempt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobRanks {
    /// When.
    pub at: i64,
    /// The job.
    pub job: TopJob,
    /// Its ranks; none where it holds no GPUs.
    pub ranks: Vec<RankInfo>,
}

/// A rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RankInfo {
    /// Its number.
    pub rank: u32,
    /// Its worker.
    pub worker: u32,
    /// Its node.
    pub node: String,
    /// Its last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// When it reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_at: Option<i64>,
    /// Milliseconds of a step, of late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<f64>,
    /// Its last line of output; what looks like a key is masked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    /// When that was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line_at: Option<i64>,
    /// What its GPUs do: its own where it has one, those of its worker where there is one process a node.
    pub load: GpuLoad,
}
