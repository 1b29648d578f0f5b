//! Logs and metrics: what never enters the loop or its transactions.
//!
//! A body hands over what agents ship; whoever keeps it may drop and must count.

use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One worker of one attempt: the owner of a log stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StreamKey {
    /// The job.
    pub job: JobId,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
}

/// One report of progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Point {
    /// When, by the engine's wall clock.
    pub at: Time,
    /// The attempt.
    pub attempt: u32,
    /// The rank.
    pub rank: u32,
    /// The step.
    pub step: u64,
    /// How many steps there will be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Tokens so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Named values; what is no finite number is absent here and named in `odd`.
    pub values: BTreeMap<String, f64>,
    /// Names of values that were `NaN` or infinite, with what they were.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub odd: BTreeMap<String, String>,
}

/// Progress of making an environment usable, for people who wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildProgress {
    /// The hash of the environment.
    pub hash: String,
    /// Its name and version.
    pub name: String,
    /// What is being done, such as `installing jaxlib 0.7.2`.
    pub step: String,
    /// Parts done.
    pub done: u32,
    /// Parts in all; 0 while that is not known.
    pub total: u32,
}

/// Keeps what agents ship.
pub trait Telemetry: Send + Sync {
    /// The offset up to which a stream is kept.
    fn log_have(&self, stream: StreamKey) -> u64;

    /// Appends whole lines at `offset` and returns the offset now kept.
    ///
    /// Bytes that are kept already are skipped. A gap (`offset` beyond what is
    /// kept) means that the agent had to drop: it is closed with a line that
    /// says how many bytes are missing, and offsets go on.
    ///
    /// # Errors
    /// If nothing could be written; the agent keeps the bytes and sends them again.
    fn log_append(&self, stream: StreamKey, offset: u64, text: &str) -> std::io::Result<u64>;

    /// Notes progress. Never blocks; may drop.
    fn progress(&self, job: JobId, point: Point);

    /// Notes the progress of a build. Never blocks; may drop.
    fn build(&self, progress: BuildProgress);

    /// Forgets a build that is over, or that nobody wants any more.
    fn forget_build(&self, hash: &str);
}
