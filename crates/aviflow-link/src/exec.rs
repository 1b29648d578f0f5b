//! Commands inside workers, and their output.

use crate::numbered::{LOST, Numbered};
use crate::roster::{Site, Workers};
use aviflow_agent::protocol::{ExecOutput, MAX_LINE, ToAgent, wire};
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use base64::Engine;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// Leaves room in a message for what is around a command and its standard input.
const EXEC_INPUT: usize = MAX_LINE - 1024;

/// Bytes of a command's output that wait for their reader.
const EXEC_QUEUE: usize = 64 << 20;

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
    /// Its agent is of a version without channels.
    #[error(
        "the agent of worker {worker} of job {} is older than this control plane and knows neither terminals nor \
         forwarding nor stacks; a job that starts from now on does", job.0
    )]
    TooOld {
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
    /// The command itself does not fit into a message.
    #[error(
        "the command has {bytes} bytes with its arguments; at most {most} can be sent to a worker: put what is long \
         into a file there, or into standard input"
    )]
    CommandTooLong {
        /// Bytes of its arguments.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Nothing to run.
    #[error("no command was given")]
    NoCommand,
}

/// Bytes of a command's arguments, each with an end. Whatever is in them, JSON makes six times as many of them at most,
/// which a message holds beside a standard input.
const COMMAND: usize = 128 << 10;

/// Whether a command fits into a message.
pub(crate) fn fits<'a>(argv: impl IntoIterator<Item = &'a String>) -> Result<(), ExecError> {
    let bytes = argv.into_iter().map(|word| word.len() + 1).sum();
    if bytes > COMMAND { Err(ExecError::CommandTooLong { bytes, most: COMMAND }) } else { Ok(()) }
}

impl<S: Site> Workers<S> {
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
        fits(&argv)?;
        let StreamKey { job, attempt, worker } = key;
        let (output, receiver) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let stdin = base64::engine::general_purpose::STANDARD.encode(stdin);
        let bytes = stdin.len() + wire::line(&argv).len();
        if bytes > EXEC_INPUT {
            return Err(ExecError::TooLarge { bytes, most: EXEC_INPUT });
        }
        let begun = self.with(key, |found| {
            let link = found.link.as_ref()?;
            let id = link.execs.begin(Sink { output, waiting: waiting.clone() })?;
            link.send(ToAgent::Exec { id, rank, argv, stdin });
            Some((id, link.execs.clone(), link.sender.downgrade()))
        });
        let (id, execs, agent) = begun
            .ok_or(ExecError::NoWorker { job, attempt, worker })?
            .ok_or(ExecError::NotConnected { job, worker })?;
        Ok(ExecStream { agent, id, execs, receiver, waiting })
    }
}

/// Output of a command inside a worker. Dropping it ends the command.
pub struct ExecStream {
    /// Of no use once the connection has ended, and with it the command.
    agent: mpsc::WeakUnboundedSender<ToAgent>,
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
        if self.execs.forget(self.id)
            && let Some(agent) = self.agent.upgrade()
        {
            let _ = agent.send(ToAgent::ExecKill { id: self.id });
        }
    }
}

/// Commands that run inside a worker.
pub(crate) type Execs = Numbered<Sink>;

/// Where a command's output goes.
pub(crate) struct Sink {
    output: mpsc::UnboundedSender<ExecOutput>,
    /// Bytes that were not read yet.
    waiting: Arc<AtomicUsize>,
}

impl Sink {
    /// The connection is gone, and with it the command.
    pub(crate) fn lost(self) {
        let _ = self.output.send(ExecOutput::Failed(LOST.to_owned()));
    }
}

impl Numbered<Sink> {
    /// Hands on output; false if nobody wants it any more.
    pub(crate) fn put(&self, id: u64, output: ExecOutput) -> bool {
        let mut running = self.lock();
        let Some(sink) = running.sinks.get(&id) else {
            // The end of a command that was killed on behalf of its reader.
            return matches!(output, ExecOutput::Exit(_) | ExecOutput::Failed(_));
        };
        let (bytes, last) = match &output {
            ExecOutput::Stdout(text) | ExecOutput::Stderr(text) => (text.len(), false),
            ExecOutput::Exit(_) | ExecOutput::Failed(_) => (0, true),
        };
        let waiting = sink.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if waiting > EXEC_QUEUE {
            let reason = format!("the command was ended: {} MiB of its output were not read", waiting >> 20);
            let _ = sink.output.send(ExecOutput::Failed(reason));
            running.sinks.remove(&id);
            return false;
        }
        let wanted = sink.output.send(output).is_ok();
        if last || !wanted {
            running.sinks.remove(&id);
        }
        wanted || last
    }
}
