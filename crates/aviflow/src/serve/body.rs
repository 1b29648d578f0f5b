//! This machine, as the server asks for it.

use aviflow_agent::protocol::{Channel, ExecOutput};
use aviflow_api::rest::{ChannelTo, Exec, ExecFrame};
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::ExecStream;
use aviflow_local::LocalHandle;
use aviflow_server::{Body, BodyAgent, ExecRefusal, ExecTarget, NodeTest, Opening, Telling};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::future::Future;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
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
        let key = key(target);
        let stdin = stdin(&exec)?;
        let stream = self.handle.exec(key, exec.rank, exec.argv, &stdin);
        Ok(frames(stream.map_err(|e| ExecRefusal(e.to_string()))?, &self.runtime))
    }

    fn open(&self, target: ExecTarget, rank: Option<u32>, to: ChannelTo) -> Result<Opening, ExecRefusal> {
        super::channel::opening(self.handle.open(key(target), rank, super::channel::to(to)), &self.runtime)
    }

    fn stacks(&self, target: ExecTarget, rank: Option<u32>) -> Telling {
        super::channel::stacks(self.handle.open(key(target), None, Channel::Stacks { rank }))
    }

    fn check(&self, test: NodeTest) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        let mut command = match test.run.split_first() {
            Some((program, args)) => {
                let mut command = Command::new(program);
                command.args(args);
                command
            }
            None => {
                let own =
                    std::env::current_exe().map_err(|e| ExecRefusal(format!("this program cannot be found: {e}")))?;
                let mut command = Command::new(own);
                command.args(["node-probe", "--virtual", "--gpus", &test.gpus.to_string()]);
                command
            }
        };
        command.env("AVIFLOW_NODE", &test.node).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Whoever goes away ends the test.
        command.kill_on_drop(true);
        let _context = self.runtime.enter();
        let child = command.spawn();
        let child = child.map_err(|e| ExecRefusal(format!("the test of {} cannot be started: {e}", test.node)))?;
        let (sender, receiver) = mpsc::channel(FRAMES);
        self.runtime.spawn(async move {
            let tested = run_test(child, sender.clone());
            tokio::select! {
                () = tested => {}
                () = sender.closed() => {}
            }
        });
        Ok(receiver)
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
            gpus: Vec::new(),
        };
        workers.iter().filter(|w| !w.over).map(agent).collect()
    }

    fn numbers_gpus(&self) -> bool {
        true
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

/// Hands on what a test writes, and how it ends.
async fn run_test(mut child: Child, to: mpsc::Sender<ExecFrame>) {
    let (out, err) = (child.stdout.take(), child.stderr.take());
    tokio::join!(
        hand_on(out, &to, |data| ExecFrame::Stdout { data }),
        hand_on(err, &to, |data| ExecFrame::Stderr { data })
    );
    let end = match child.wait().await {
        Ok(status) => ExecFrame::Exit { code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)) },
        Err(e) => ExecFrame::Failed { reason: format!("how it ended cannot be told: {e}") },
    };
    let _ = to.send(end).await;
}

async fn hand_on(from: Option<impl AsyncRead + Unpin>, to: &mpsc::Sender<ExecFrame>, frame: fn(String) -> ExecFrame) {
    let Some(mut from) = from else { return };
    let mut chunk = vec![0; 32 << 10];
    while let Ok(read) = from.read(&mut chunk).await {
        if read == 0 || to.send(frame(STANDARD.encode(&chunk[..read]))).await.is_err() {
            return;
        }
    }
}

/// The worker of a target.
pub(super) fn key(target: ExecTarget) -> StreamKey {
    StreamKey { job: target.job, attempt: target.attempt, worker: target.worker }
}

/// Standard input of a command.
pub(super) fn stdin(exec: &Exec) -> Result<Vec<u8>, ExecRefusal> {
    STANDARD.decode(&exec.stdin).map_err(|e| ExecRefusal(format!("standard input is no base64: {e}")))
}

/// Output of a command as the server hands it on.
pub(super) fn frames(mut stream: ExecStream, runtime: &Handle) -> mpsc::Receiver<ExecFrame> {
    let (sender, receiver) = mpsc::channel(FRAMES);
    runtime.spawn(hand_over(async move || stream.next().await.map(frame), sender));
    receiver
}

/// Hands on what comes until there is no more of it. Somebody who went away ends what it comes of: that is dropped
/// then.
pub(super) async fn hand_over<T>(mut next: impl AsyncFnMut() -> Option<T>, to: mpsc::Sender<T>) {
    loop {
        let one = tokio::select! {
            one = next() => one,
            () = to.closed() => None,
        };
        let Some(one) = one else { break };
        if to.send(one).await.is_err() {
            break;
        }
    }
}

fn frame(output: ExecOutput) -> ExecFrame {
    match output {
        ExecOutput::Stdout(data) => ExecFrame::Stdout { data },
        ExecOutput::Stderr(data) => ExecFrame::Stderr { data },
        ExecOutput::Exit(code) => ExecFrame::Exit { code },
        ExecOutput::Failed(reason) => ExecFrame::Failed { reason },
    }
}
