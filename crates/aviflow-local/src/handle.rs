//! What the server asks of this machine beside the loop: commands inside
//! workers, folders, and what is there.

use crate::Volumes;
use crate::cluster::Shared;
pub use crate::environments::EnvironmentInfo;
use aviflow_agent::protocol::Channel;
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
pub use aviflow_link::{ChannelReader, ChannelWriter, ExecError, ExecStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// A way to ask a [`crate::LocalCluster`]. Cheap to clone; of no use once the cluster is dropped.
#[derive(Clone)]
pub struct LocalHandle {
    shared: Arc<Shared>,
}

/// A worker as this machine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Which.
    pub key: StreamKey,
    /// Its agent's process and since when it is connected; `None` while it is not.
    pub connected: Option<(u32, SystemTime)>,
    /// Whether its agent is dead.
    pub over: bool,
}

impl LocalHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> LocalHandle {
        LocalHandle { shared }
    }

    /// Runs a command inside a worker, with the variables of a rank (the worker's first if none).
    ///
    /// # Errors
    /// If there is no such worker, or its agent is not connected.
    pub fn exec(
        &self,
        key: StreamKey,
        rank: Option<u32>,
        argv: Vec<String>,
        stdin: &[u8],
    ) -> Result<ExecStream, ExecError> {
        self.shared.exec(key, rank, argv, stdin)
    }

    /// Opens a channel into a worker, beside a rank (the worker's first if none).
    ///
    /// # Errors
    /// If there is no such worker, or its agent is not connected or knows no channels.
    pub fn open(
        &self,
        key: StreamKey,
        rank: Option<u32>,
        channel: Channel,
    ) -> Result<(ChannelWriter, ChannelReader), ExecError> {
        self.shared.open(key, rank, channel)
    }

    /// The folder of everything that a job keeps: its checkpoints and outputs.
    #[must_use]
    pub fn volumes(&self, job: JobId) -> PathBuf {
        self.shared.site.volumes.root(job)
    }

    /// The folder behind a path of the job's document.
    ///
    /// # Errors
    /// If the path is not absolute or leads upwards.
    pub fn volume(&self, job: JobId, path: &str) -> Result<PathBuf, String> {
        self.shared.site.volumes.path(job, path)
    }

    /// Where jobs keep what outlives them.
    #[must_use]
    pub fn all_volumes(&self) -> &Volumes {
        &self.shared.site.volumes
    }

    /// The workers of this machine whose attempts are not over.
    #[must_use]
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let state = self.shared.lock();
        let info = |(key, worker): (&StreamKey, &crate::cluster::Worker)| WorkerInfo {
            key: *key,
            connected: worker.link.as_ref().map(|link| (link.pid, link.since)),
            over: worker.over,
        };
        state.workers.iter().map(info).collect()
    }

    /// What the cache of environments holds. Reads the disk.
    #[must_use]
    pub fn environments(&self) -> Vec<EnvironmentInfo> {
        self.shared.site.environments.list()
    }
}
