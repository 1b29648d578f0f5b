//! How a worker and its ranks ended.

use super::is_zero;
use crate::faults::Fault;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How a worker ended; also the content of `ended.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    /// The epoch.
    pub epoch: u32,
    /// Milliseconds since the Unix epoch, by the node's clock.
    pub at_unix_ms: i64,
    /// By rank: the code, the signal, and milliseconds between its end and the worker's.
    #[serde(deserialize_with = "ranks_from_text")]
    pub ranks: BTreeMap<u32, RankEnd>,
    /// Why the ranks were stopped or never started, if the agent did it.
    pub reason: Option<String>,
    /// The highest step of any rank.
    pub last_step: Option<u64>,
    /// The offset one past the last byte of log.
    pub log_end: u64,
    /// A port that was free here a moment ago, for rank 0 of another epoch; 0 where none was looked for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub port: u16,
}

/// JSON's keys are text, and serde does not turn them back into numbers inside a tagged message.
fn ranks_from_text<'de, D: serde::Deserializer<'de>>(from: D) -> Result<BTreeMap<u32, RankEnd>, D::Error> {
    let ranks = BTreeMap::<String, RankEnd>::deserialize(from)?;
    let number = |(rank, end): (String, RankEnd)| Ok((rank.parse().map_err(serde::de::Error::custom)?, end));
    ranks.into_iter().map(number).collect()
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RankEnd {
    /// The exit code, or 128 + the signal.
    pub code: i32,
    /// The signal.
    pub signal: Option<i32>,
    /// Whether the agent had begun to stop the ranks before it ended.
    #[serde(default)]
    pub stopping: bool,
    /// Milliseconds before the worker's end.
    pub before_ms: u64,
    /// Its last lines of output.
    pub last_lines: Vec<String>,
    /// Why, as far as it told; none if it ended with 0, or of an agent that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}
