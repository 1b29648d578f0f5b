//! Why a job waits, and what it waits for; what it lost, and what it is promised.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why a job waits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    /// Its place among all that wait, from 1.
    pub place: u32,
    /// How many wait.
    pub waiting: u32,
    /// The binding constraint, for programs.
    pub constraint: ConstraintInfo,
    /// The same in words, one sentence.
    pub reason: String,
    /// Progress of what it waits for, such as an environment's build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<Build>,
    /// The jobs that stand in the way, as namespace/name, the nearest first: those that go before it and
    /// want the same, and those whose end it waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub front: Vec<String>,
    /// When it will probably start; none where that cannot be said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// The cheapest change with which it would start sooner, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sooner: Option<String>,
    /// What its place follows from; only in the list of waiting jobs and where one job is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<Factors>,
}

/// What keeps a job from starting: lifting just what it names lets the job start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConstraintInfo {
    /// A stable word, such as `capacity`, `queueLimit` or `after`.
    pub kind: String,
    /// Its figures by name, such as `needsNodes`, `freeGpus` or `limit`; instants are milliseconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, i64>,
    /// What it names, such as `queue`, `level` or `job`; several are separated by `, `.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
}

/// When something will probably be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Estimate {
    /// As likely before as after this instant.
    pub p50: i64,
    /// Before this instant nine times in ten.
    pub p90: i64,
}

/// What the place of a waiting job follows from, in the order in which it is compared: the queues from
/// the root down, the priority, the level or the use, the submission.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Factors {
    /// Its queue and those above it, the root first.
    pub queues: Vec<QueueFactor>,
    /// The priority's number; a higher one goes first.
    pub priority: i32,
    /// Where jobs take turns: the level of the service it had, less what waiting took off. A lower one goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<i64>,
    /// Where they do not: decayed GPU-milliseconds of its user in its queue. Less goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_use: Option<i64>,
    /// When it was submitted; the earlier goes first.
    pub submitted: i64,
}

/// What the place of a queue follows from, for the accelerator type that the job wants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueFactor {
    /// The queue.
    pub queue: String,
    /// The part of its guarantee that it uses, in millionths; none when it uses all of it. A queue with
    /// less goes first, and one that lacks something before all that do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee_used: Option<i64>,
    /// Decayed GPU-milliseconds over its weight; compared among queues that lack nothing. Less goes first.
    pub use_over_weight: i64,
}

/// Progress of an environment's build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Build {
    /// The environment's name and version.
    pub name: String,
    /// What is being done.
    pub step: String,
    /// Parts done.
    pub done: u32,
    /// Parts in all; 0 while that is not known.
    pub total: u32,
}

/// A job that must have ended before another may start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AfterInfo {
    /// Its name.
    pub job: String,
    /// How it must end: `succeeded`, `failed` or `ended`.
    pub on: String,
    /// `waiting` while it lives, `met` if it ended so, `failed` if it ended otherwise.
    pub state: String,
}

/// That a job was suspended by the plan, and for whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TurnedOutInfo {
    /// The job that got its GPUs, as namespace/name; none where its node was drained.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub beneficiary: Option<String>,
    /// `reclaim`, `priority`, `turn` or `drain`.
    pub cause: String,
    /// When.
    pub at: i64,
}

/// GPUs that are promised to a job while their holders leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimInfo {
    /// How many.
    pub gpus: u32,
    /// On which nodes.
    pub on: Vec<String>,
    /// The jobs that leave for it, as namespace/name.
    pub victims: Vec<String>,
    /// By what right: `reclaim`, `priority` or `turn`.
    pub cause: String,
    /// Since when.
    pub since: i64,
}

/// That a running job is to give its GPUs up after its next checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvictionInfo {
    /// The job that is to get them, as namespace/name; none for a drain.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub beneficiary: Option<String>,
    /// `reclaim`, `priority`, `turn` or `drain`.
    pub cause: String,
    /// Since when.
    pub since: i64,
    /// The latest moment.
    pub deadline: i64,
}

/// A job that would be moved for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MoveInfo {
    /// Which, as namespace/name.
    pub job: String,
    /// By what right: `reclaim`, `priority` or `turn`.
    pub cause: String,
    /// GPUs that it holds.
    pub gpus: u32,
}
