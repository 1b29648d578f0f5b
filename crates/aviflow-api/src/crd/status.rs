//! What the control plane writes into objects: a mirror of its store, small and of bounded size.
//!
//! Nothing grows with the gang: per-rank detail stays in the store. Instants are texts of RFC 3339, as
//! everywhere in Kubernetes; elsewhere they are milliseconds.

use crate::duration::Duration;
use crate::rest::JobCounters;
use crate::spec::ResolvedImage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most names of nodes in a status.
pub const MOST_NODES: usize = 512;
/// Most characters of a reason.
pub const MOST_REASON: usize = 1024;

/// What a training does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingJobStatus {
    /// The generation of the object that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Where it is in its life.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<PhaseWord>,
    /// Why it waits, or how it ended, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub reason: Option<String>,
    /// The queue that it is in now: the default one where it named none, another after `aviflow update`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Its priority as a number, as it is now; higher goes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Its time limit, as it is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<Duration>,
    /// Who keeps it from starting, if somebody does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<String>,
    /// How many attempts have begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// How often the ranks of this attempt were started, in the same workers; absent where it was once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
    /// What ended earlier attempts; absent where nothing did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<JobCounters>,
    /// Milliseconds in Running, over the attempts that ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran: Option<i64>,
    /// The nodes that it holds, in the order of its workers; the first 512.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 512), extend("x-kubernetes-list-type" = "atomic"))]
    pub on: Vec<String>,
    /// Its name in Aviflow, where it is another than the object's: that was taken by an earlier job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,
    /// Its number in Aviflow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<u64>,
    /// What its image was resolved to at submission, and what every attempt runs; absent where its document names an
    /// image by its content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ResolvedImage>,
    /// Who submitted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub submitted_by: Option<String>,
    /// When it was submitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub submitted: Option<String>,
    /// When its first attempt's ranks were up.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub started: Option<String>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub ended: Option<String>,
    /// When it will probably start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_start: Option<EstimatedStart>,
    /// The last step that was reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The last complete checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_checkpoint: Option<LastCheckpoint>,
    /// What holds of it, for `kubectl wait`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// The phases, by the names of [`aviflow_core::model::Phase`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "as in the core's Phase")]
pub enum PhaseWord {
    Queued,
    Starting,
    Running,
    Suspending,
    Stopping,
    Succeeded,
    Failed,
    Cancelled,
}

impl From<&aviflow_core::model::Phase> for PhaseWord {
    fn from(phase: &aviflow_core::model::Phase) -> PhaseWord {
        use aviflow_core::model::Phase;
        match phase {
            Phase::Queued => PhaseWord::Queued,
            Phase::Starting(_) => PhaseWord::Starting,
            Phase::Running(_) => PhaseWord::Running,
            Phase::Suspending(_) => PhaseWord::Suspending,
            Phase::Stopping(_) => PhaseWord::Stopping,
            Phase::Succeeded => PhaseWord::Succeeded,
            Phase::Failed(_) => PhaseWord::Failed,
            Phase::Cancelled { .. } => PhaseWord::Cancelled,
        }
    }
}

/// When a job will probably start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EstimatedStart {
    /// As likely before as after.
    #[schemars(extend("format" = "date-time"))]
    pub p50: String,
    /// Nine times of ten before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub p90: Option<String>,
}

/// The last complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LastCheckpoint {
    /// The step.
    pub step: u64,
    /// When it was complete.
    #[schemars(extend("format" = "date-time"))]
    pub at: String,
}

/// What holds of an object, in Kubernetes' own form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What; of a TrainingJob one of [`ConditionType`].
    #[serde(rename = "type")]
    #[schemars(length(max = 316))]
    pub kind: String,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, as a word for programs.
    #[schemars(length(max = 1024))]
    pub reason: String,
    /// Why, as a sentence.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// Since when.
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: String,
    /// The generation of the object that this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "as in Kubernetes")]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

/// The conditions of a TrainingJob. While it lives, `Succeeded` and `Failed` are false; one of them is
/// true at its end, and then nothing else but `Accepted` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionType {
    /// The control plane took it. False, with why, where its queue or pool refuses it.
    Accepted,
    /// It waits for the plan, and holds nothing.
    Queued,
    /// It holds its GPUs, and every rank is up.
    Running,
    /// It was sent back to the queue, with its progress, and has not run again since.
    Suspended,
    /// Every rank ended with 0.
    Succeeded,
    /// It ended otherwise; the reason tells a failure, the time limit and a cancellation apart.
    Failed,
}

/// What a queue has and uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueStatus {
    /// The generation of the object that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The names from the root down to it, separated by `/`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Jobs that wait in it; those of queues below are theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Jobs in it that hold GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// GPUs in use, of those guaranteed, by type: `H100 12/32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// The same with all queues below it, by type.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub quotas: BTreeMap<String, QuotaStatus>,
    /// What holds of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// What a queue has and uses of one type, with all queues below it, in GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaStatus {
    /// In use, those that are promised included.
    pub used: u32,
    /// Its own whenever it wants them.
    pub guarantee: u32,
    /// Never exceeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// What a pool has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// The generation of the object that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Nodes that it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// GPUs that it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    /// GPUs that nobody holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<u32>,
    /// GPUs by type, as jobs and quotas name it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu_types: BTreeMap<String, u32>,
    /// What holds of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// What holds of an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EnvironmentStatus {
    /// The generation of the object that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What holds of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
