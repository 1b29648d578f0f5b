//! This machine, as the server asks for it.

use aviflow_agent::protocol::ExecOutput;
use aviflow_api::rest::{Exec, ExecFrame};
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::ExecStream;
use aviflow_local::LocalHandle;
use aviflow_server::{Body, BodyAgent, ExecRefusal, ExecTarget};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Frames that wait for a slow client.
const FRAMES: usize = 64;
/// How often a worker is looked at that ships its last lines.
const LOOK: Duration = Duration::from_millis(20);

/// The local body.
pub struct Local {
    handle: LocalHandle,
    runtime: Handle,
}

impl Local {
    pub fn new(handle: LocalHandle, runtime: Handle) -> Local {
        Local { handle, runtime }
    }
}

impl Body for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn exec(&self, target: ExecTarget, exec: Exec) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        let key = StreamKey { job: target.job, attempt: target.attempt, worker: target.worker };
        let stdin = stdin(&exec)?;
        let stream = self.handle.exec(key, exec.rank, exec.argv, &stdin);
        Ok(frames(stream.map_err(|e| ExecRefusal(e.to_string()))?, &self.runtime))
    }

    fn volumes(&self, job: JobId) -> PathBuf {
        self.handle.volumes(job)
    }

    fn agents(&self) -> Vec<BodyAgent> {
        let workers = self.handle.workers();
        let agent = |w: &aviflow_local::WorkerInfo| BodyAgent {
            job: w.key.job,
            attempt: w.key.attempt,
            worker: w.key.worker,
            pid: w.connected.map(|(pid, _)| pid),
            connected: w.connected.is_some(),
        };
        workers.iter().filter(|w| !w.over).map(agent).collect()
    }

    fn environment_ready(&self, hash: &str) -> bool {
        self.handle.environments().iter().any(|e| e.complete && e.hash == hash)
    }

    fn drained(&self, job: JobId) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let handle = self.handle.clone();
        // An agent ends only once everything it had to ship was acknowledged.
        Box::pin(async move {
            while handle.workers().iter().any(|w| w.key.job == job && !w.over) {
                tokio::time::sleep(LOOK).await;
            }
        })
    }
}

/// Standard input of a command.
pub(super) fn stdin(exec: &Exec) -> Result<Vec<u8>, ExecRefusal> {
    STANDARD.decode(&exec.stdin).map_err(|e| ExecRefusal(format!("standard input is no base64: {e}")))
}

/// Output of a command as the server hands it on.
pub(super) fn frames(mut stream: ExecStream, runtime: &Handle) -> mpsc::Receiver<ExecFrame> {
    let (sender, receiver) = mpsc::channel(FRAMES);
    runtime.spawn(async move {
        loop {
            // Somebody who went away ends the command: dropping the stream kills it.
            let output = tokio::select! {
                output = stream.next() => output,
                () = sender.closed() => None,
            };
            let Some(output) = output else { break };
            if sender.send(frame(output)).await.is_err() {
                break;
            }
        }
    });
    receiver
}

fn frame(output: ExecOutput) -> ExecFrame {
    match output {
        ExecOutput::Stdout(data) => ExecFrame::Stdout { data },
        ExecOutput::Stderr(data) => ExecFrame::Stderr { data },
        ExecOutput::Exit(code) => ExecFrame::Exit { code },
        ExecOutput::Failed(reason) => ExecFrame::Failed { reason },
    }
}
