//! Logs and metrics: what never enters the loop or its transactions.
//!
//! A body hands over what agents ship; whoever keeps it may drop and must count.

use aviflow_core::health::xid::Asks;
use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
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

/// Names under which losses on data that is held out are reported.
const EVALUATIONS: [&str; 6] = ["eval_loss", "val_loss", "valid_loss", "validation_loss", "eval/loss", "val/loss"];

impl Point {
    /// Whether it tells an evaluation's loss and none of the training's: then it is no step.
    #[must_use]
    pub fn is_evaluation(&self) -> bool {
        let told = |name: &str| self.values.contains_key(name) || self.odd.contains_key(name);
        !told("loss") && EVALUATIONS.iter().any(|name| told(name))
    }
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

/// What an agent noticed of its training or its node, and does not judge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The training said or did something that is no step.
    Active,
    /// What a rank does in the training, as a number that is equal for equal work.
    Role {
        /// The rank.
        rank: u32,
        /// The number.
        role: u16,
    },
    /// A rank entered a collective.
    Collective {
        /// The rank.
        rank: u32,
        /// Its number, as the process group counts.
        number: u64,
    },
    /// The kernel log of the node has an XID.
    Xid {
        /// The number.
        number: u32,
        /// The number of the GPU on the node, where it is known.
        gpu: Option<u32>,
        /// What the driver itself asks for.
        verdict: Option<Asks>,
    },
    /// The counters of a port of the fabric, since the driver was loaded.
    Port {
        /// Its name on the node, as `mlx5_0/1`.
        port: String,
        /// How often the link went down.
        downed: u64,
        /// Its symbol errors.
        symbol_errors: u64,
    },
    /// A folder that the job writes to has no space left.
    DiskFull,
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

    /// Takes what an agent noticed so long ago, in an epoch. Never blocks; may drop.
    fn sign(&self, key: StreamKey, epoch: u32, ago: Span, sign: Sign) {
        let _ = (key, epoch, ago, sign);
    }

    /// Notes whether an agent is connected. Never blocks; may drop.
    fn heard(&self, key: StreamKey, heard: bool) {
        let _ = (key, heard);
    }
}

impl<T: Telemetry + ?Sized> Telemetry for std::sync::Arc<T> {
    fn log_have(&self, stream: StreamKey) -> u64 {
        (**self).log_have(stream)
    }

    fn log_append(&self, stream: StreamKey, offset: u64, text: &str) -> std::io::Result<u64> {
        (**self).log_append(stream, offset, text)
    }

    fn progress(&self, job: JobId, point: Point) {
        (**self).progress(job, point);
    }

    fn build(&self, progress: BuildProgress) {
        (**self).build(progress);
    }

    fn forget_build(&self, hash: &str) {
        (**self).forget_build(hash);
    }

    fn sign(&self, key: StreamKey, epoch: u32, ago: Span, sign: Sign) {
        (**self).sign(key, epoch, ago, sign);
    }

    fn heard(&self, key: StreamKey, heard: bool) {
        (**self).heard(key, heard);
    }
}
