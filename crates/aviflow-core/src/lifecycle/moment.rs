//! What happened to a job, for its timeline.

use super::Change;
use crate::health::News;
use crate::health::decide::Decision;
use crate::model::{Ending, EvictionCause, Failure, JobId, JobKey, NodeId};
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An entry of a job's timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The job.
    pub job: JobId,
    /// When.
    pub at: Time,
    /// The attempt it belongs to; 0 before the first.
    pub attempt: u32,
    /// What.
    pub kind: MomentKind,
}

/// What happened, in a job's timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "moment")]
#[expect(missing_docs, reason = "the names say it; explain.rs has the sentences")]
pub enum MomentKind {
    Submitted { by: String },
    Rebuilt,
    Placed { nodes: Vec<NodeId>, gpus: u32 },
    Running { ranks: u32 },
    FirstStep { step: u64 },
    CaughtUp { step: u64 },
    CheckpointComplete { step: u64, path: String },
    CheckpointFailed { step: u64 },
    Facts { values: BTreeMap<String, String> },
    Failing { failure: Failure },
    Suspending { by: String },
    Claimed { gpus: u32, victims: u32, cause: EvictionCause },
    Unclaimed { reason: String },
    Evicting { cause: EvictionCause, beneficiary: Option<JobKey>, deadline: Time },
    Spared,
    Held { by: String },
    Released { by: String },
    Updated { by: String, reason: Option<String>, change: Change },
    DependencyMet { job: JobId, name: String },
    DependencyFailed { job: JobId, name: String, on: Ending },
    Cancelling { by: String },
    TimeLimitReached,
    NeverReady { missing: Vec<u32> },
    Refused { worker: u32, node: NodeId, reason: String },
    AskedToLeave { worker: u32, node: NodeId, reason: String },
    RequeueAsked { rank: u32 },
    Found { news: News },
    Decided { decision: Decision },
    Again { epoch: u32 },
    Kept { until: Time },
    Quarantined { node: NodeId, gpu: Option<u32>, reason: String },
    NotQuarantined { node: NodeId, reason: String },
    QueuedAgain { not_before: Option<Time> },
    Succeeded,
    Failed { failure: Failure },
    Cancelled { by: String },
}
