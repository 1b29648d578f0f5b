//! What the server asks of this machine beside the loop: commands inside
//! workers, folders, and what is there.

use crate::Volumes;
use crate::cluster::Shared;
pub use crate::environments::EnvironmentInfo;
use crate::link::{Execs, Sink};
use aviflow_agent::protocol::{ExecOutput, MAX_LINE, ToAgent};
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use base64::Engine;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;
use tokio::sync::mpsc;

/// Leaves room in a message for what JSON adds.
const EXEC_INPUT: usize = MAX_LINE / 2;

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

/// Why a command could not be begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// The attempt has no such worker here.
    #[error("job {} has no worker {worker} in attempt {attempt}; it may have ended", job.0)]
    NoWorker {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The worker.
        worker: u32,
    },
    /// Its agent is not connected.
    #[error("the agent of worker {worker} of job {} is not connected; try again in a moment", job.0)]
    NotConnected {
        /// The job.
        job: JobId,
        /// The worker.
        worker: u32,
    },
    /// Its standard input does not fit into a message.
    #[error("the command with its standard input has {bytes} bytes; at most {most} can be sent to a worker")]
    TooLarge {
        /// Encoded bytes.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Nothing to run.
    #[error("no command was given")]
    NoCommand,
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
        if argv.is_empty() {
            return Err(ExecError::NoCommand);
        }
        let StreamKey { job, attempt, worker } = key;
        let (output, receiver) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let stdin = base64::engine::general_purpose::STANDARD.encode(stdin);
        let bytes = stdin.len() + argv.iter().map(String::len).sum::<usize>();
        if bytes > EXEC_INPUT {
            return Err(ExecError::TooLarge { bytes, most: EXEC_INPUT });
        }
        let begun = self.shared.with(key, |found| {
            let link = found.link.as_ref()?;
            let id = link.execs.begin(Sink { output, waiting: waiting.clone() })?;
            link.send(ToAgent::Exec { id, rank, argv, stdin });
            Some((id, link.execs.clone()))
        });
        let (id, execs) = begun
            .ok_or(ExecError::NoWorker { job, attempt, worker })?
            .ok_or(ExecError::NotConnected { job, worker })?;
        Ok(ExecStream { shared: self.shared.clone(), key, id, execs, receiver, waiting })
    }

    /// The folder of everything that a job keeps: its checkpoints and outputs.
    #[must_use]
    pub fn volumes(&self, job: JobId) -> PathBuf {
        self.shared.volumes.root(job)
    }

    /// The folder behind a path of the job's document.
    ///
    /// # Errors
    /// If the path is not absolute or leads upwards.
    pub fn volume(&self, job: JobId, path: &str) -> Result<PathBuf, String> {
        self.shared.volumes.path(job, path)
    }

    /// Where jobs keep what outlives them.
    #[must_use]
    pub fn all_volumes(&self) -> &Volumes {
        &self.shared.volumes
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
        self.shared.environments.list()
    }
}

/// Output of a command inside a worker. Dropping it ends the command.
pub struct ExecStream {
    shared: Arc<Shared>,
    key: StreamKey,
    id: u64,
    execs: Arc<Execs>,
    receiver: mpsc::UnboundedReceiver<ExecOutput>,
    waiting: Arc<AtomicUsize>,
}

impl ExecStream {
    /// The next piece; `None` after the last, which is `Exit` or `Failed`.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        let output = self.receiver.recv().await?;
        if let ExecOutput::Stdout(text) | ExecOutput::Stderr(text) = &output {
            self.waiting.fetch_sub(text.len(), Ordering::Relaxed);
        }
        Some(output)
    }
}

impl Drop for ExecStream {
    fn drop(&mut self) {
        if self.execs.forget(self.id) {
            self.shared.with(self.key, |worker| worker.send(ToAgent::ExecKill { id: self.id }));
        }
    }
}
