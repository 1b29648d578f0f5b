//! Queues as they are now.

use crate::admin::{QueueSpec, QueueState, TimeSharingSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueInfo {
    /// The name.
    pub name: String,
    /// Its parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The names from the root down to it, separated by `/`.
    pub path: String,
    /// The team it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// open, held or draining.
    pub state: String,
    /// Jobs that wait in it; those of queues below are theirs.
    pub waiting: u32,
    /// GPUs that they ask for at least.
    pub waiting_gpus: u32,
    /// Jobs in it that hold GPUs.
    pub running: u32,
    /// GPUs that they hold.
    pub gpus: u32,
    /// What it has of each accelerator type that is managed, and what of it is in use.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quotas: BTreeMap<String, QuotaInfo>,
    /// Decayed GPU-milliseconds of the queue and all below it.
    pub decayed_use: i64,
    /// How its jobs take turns, as it, those above it or the pool say; none where they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_sharing: Option<TimeSharingSpec>,
    /// The document, as it can be applied again.
    pub document: QueueSpec,
}

impl QueueInfo {
    /// A queue in which nothing happens, at the root of the tree as far as its document tells.
    #[must_use]
    pub fn of(document: QueueSpec) -> QueueInfo {
        let state = match document.state {
            QueueState::Open => "open",
            QueueState::Held => "held",
            QueueState::Draining => "draining",
        };
        QueueInfo {
            name: document.name.clone(),
            parent: document.parent.clone(),
            path: document.name.clone(),
            team: document.team.clone(),
            state: state.to_owned(),
            waiting: 0,
            waiting_gpus: 0,
            running: 0,
            gpus: 0,
            quotas: BTreeMap::new(),
            decayed_use: 0,
            time_sharing: None,
            document,
        }
    }
}

/// The quota of a queue, with all queues below it, in GPUs. None of the figures is ever negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaInfo {
    /// GPUs that are its own whenever it wants them: as it says, or what those below it are guaranteed.
    pub guarantee: u32,
    /// What the guarantee is worth now: less where all guarantees together exceed the GPUs there are.
    pub effective_guarantee: u32,
    /// GPUs that it never exceeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Its share of what is above the guarantees, relative to its siblings.
    pub weight: u32,
    /// GPUs in use, those that are promised included.
    pub used: u32,
    /// GPUs of them that are above its effective guarantee.
    pub borrowed: u32,
    /// GPUs of its effective guarantee that others use.
    pub lent: u32,
    /// GPUs that it may still use: up to its limit and those above it, and to what there is.
    pub headroom: u32,
}
