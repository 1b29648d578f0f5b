//! Ends workers that do not end in time.
//!
//! An agent that was told to stop, and whose end is not known some time after
//! the grace, hangs or is frozen: it is killed, and with it its ranks, by its
//! guardian and by whoever waits for its lock. One that nobody wants is treated
//! likewise. A watch is a task, and ends with the worker.

use crate::cluster::{Shared, Worker};
use aviflow_agent::{Alive, find_ended};
use aviflow_engine::telemetry::StreamKey;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// What an agent has that ended, to say so and to ship its log.
pub(crate) const ENDED_GRACE: Duration = Duration::from_secs(60);

/// The pause before one is killed again, as it may have been impossible to find it.
const AGAIN: Duration = Duration::from_secs(30);

/// A watch over a worker. Dropping it ends it.
pub(crate) struct Watch {
    at: Instant,
    task: AbortHandle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Watches a worker, unless it is watched for an earlier time already.
pub(crate) fn watch(shared: &Arc<Shared>, key: StreamKey, worker: &mut Worker, grace: Duration) {
    let Some(at) = Instant::now().checked_add(grace) else { return };
    if worker.over || worker.own.watch.as_ref().is_some_and(|watch| watch.at <= at) {
        return;
    }
    let task = shared.site.runtime.spawn(hurry(Arc::downgrade(shared), key, at)).abort_handle();
    worker.own.watch = Some(Watch { at, task });
}

async fn hurry(shared: Weak<Shared>, key: StreamKey, mut at: Instant) {
    let mut spared = false;
    loop {
        tokio::time::sleep_until(at).await;
        let Some(shared) = shared.upgrade() else { return };
        let folder = shared.site.worker_folder(key);
        // What cannot be read may be there.
        let written = !matches!(find_ended(&folder), Ok(None));
        let Some((stray, said, known)) = shared.with(key, |w| (w.stray, w.gone.is_some(), w.log_end.is_some())) else {
            return;
        };
        if said && !stray {
            return;
        }
        if !stray && !spared && (written || known) {
            spared = true;
            at = Instant::now() + ENDED_GRACE;
            continue;
        }
        if kill(&folder) {
            shared.with(key, |worker| worker.own.killed = true);
        }
        at = Instant::now() + AGAIN;
    }
}

/// Kills a worker's agent, if it lives. Whoever waits for its lock finds its ranks.
fn kill(folder: &Path) -> bool {
    let agent = Alive::read(folder).filter(Alive::lives);
    let pid = agent.and_then(|agent| Pid::from_raw(i32::try_from(agent.pid).ok()?));
    pid.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok())
}
