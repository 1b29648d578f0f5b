//! Commands inside workers.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::body::{ExecRefusal, ExecTarget};
use crate::error::Failure;
use crate::logs::ndjson;
use crate::names::resolve;
use crate::params::{Input, Name};
use crate::view::count;
use aviflow_api::rest::{Exec, ExecFrame};
use aviflow_core::model::{JobId, Phase};
use axum::extract::State;
use axum::response::Response;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Frames that wait for a slow client.
const FRAMES: usize = 64;

pub(crate) async fn exec(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(exec): Input<Exec>,
) -> Result<Response, Failure> {
    let state = app.clone();
    let frames = blocking(move || begin(&state, &name, &caller, exec)).await?;
    Ok(hand_on(app, frames, std::future::ready))
}

/// Hands output on to the client, up to its last frame, which is told as `last` makes it.
///
/// Dropping `frames`, because the client is gone or the server stops, ends the command.
pub(crate) fn hand_on<F>(
    app: Arc<App>,
    mut frames: mpsc::Receiver<ExecFrame>,
    last: impl FnOnce(ExecFrame) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ExecFrame> + Send,
{
    let (sender, receiver) = mpsc::channel(FRAMES);
    tokio::spawn(async move {
        loop {
            let frame = tokio::select! {
                frame = frames.recv() => frame,
                () = sender.closed() => return,
                () = app.stopped() => {
                    Some(ExecFrame::Failed { reason: "the control plane is stopping; try again in a moment".into() })
                }
            };
            let Some(frame) = frame else { return };
            if matches!(frame, ExecFrame::Exit { .. } | ExecFrame::Failed { .. }) {
                // Who went away at the last moment does not want to know.
                let _ = sender.send(last(frame).await).await;
                return;
            }
            if sender.send(frame).await.is_err() {
                return;
            }
        }
    });
    ndjson(receiver)
}

fn begin(app: &App, name: &str, caller: &Caller, mut exec: Exec) -> Result<mpsc::Receiver<ExecFrame>, Failure> {
    if exec.argv.is_empty() {
        return Err(Failure::bad("no command was given").help("put it in `argv`"));
    }
    let rank = exec.rank.unwrap_or(0);
    let target = gang(app, name, caller, "no worker can run a command")?.beside(rank)?;
    exec.rank = Some(rank);
    app.parts.body.exec(target, exec).map_err(refused)
}

pub(crate) fn refused(refusal: ExecRefusal) -> Failure {
    Failure::conflict("execRefused", refusal.0)
}

/// A gang that holds its GPUs.
pub(crate) struct Gang {
    pub(crate) job: JobId,
    pub(crate) attempt: u32,
    pub(crate) workers: u32,
    ranks_per_node: u32,
}

impl Gang {
    /// Where a rank runs.
    pub(crate) fn beside(&self, rank: u32) -> Result<ExecTarget, Failure> {
        let worker = rank / self.ranks_per_node;
        if worker >= self.workers {
            let ranks = self.workers * self.ranks_per_node;
            let message = format!("there is no rank {rank}; the job has {ranks} of them");
            return Err(Failure::bad(message).help("ranks are counted from 0"));
        }
        Ok(ExecTarget { job: self.job, attempt: self.attempt, worker })
    }
}

/// The gang of a job that runs; `not` says what cannot be done where it does not.
pub(crate) fn gang(app: &App, name: &str, caller: &Caller, not: &str) -> Result<Gang, Failure> {
    let job = resolve(app, name, caller)?;
    let found = app.view(move |view| {
        let job = view.snapshot.jobs.get(&job)?;
        let each = job.request.ranks_per_node.max(1);
        let target = match &job.phase {
            Phase::Running(gang) | Phase::Starting(gang) => Some((gang.attempt, count(gang.workers.len()))),
            // It failed, and its GPUs are kept for this.
            Phase::Stopping(stopping) if stopping.kept_until.is_some() => {
                Some((stopping.gang.attempt, count(stopping.gang.workers.len())))
            }
            _ => None,
        };
        Some((target, each, job.phase.name()))
    })?;
    let (target, ranks_per_node, phase) = found.unwrap_or((None, 1, "not live"));
    let Some((attempt, workers)) = target else {
        return Err(Failure::conflict("notRunning", format!("the job is {phase}, so {not}"))
            .help("wait until it runs; `aviflow show` says what it waits for"));
    };
    Ok(Gang { job, attempt, workers, ranks_per_node })
}
