//! The parent of the agent, which outlives it until nothing of the worker is left.
//!
//! ```text
//! control plane, or a pod's start
//!  └ guardian: holds keeper.lock
//!     └ agent: holds agent.lock
//!        └ ranks, commands, and all that these start
//! ```
//!
//! The two watch each other, and the end of either is the end of the worker. The
//! guardian waits for the agent's end; the agent sees the end of a pipe that only
//! its guardian holds. The survivor kills all that descends from it, and then ends:
//! the guardian as the agent did, so that whoever started it learns the truth; the
//! agent with 125.
//!
//! Invariants: the agent's lock is the agent's alone before anything else of it
//! is; the guardian holds its own lock until its last child is gone; it never
//! ends before the agent by itself.

use crate::protocol::{WorkerSpec, files};
use crate::sys::{self, Exit, Pid, Poll, Signals};
use crate::{driver, folder, sweep};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The last words of an agent whose guardian was killed.
pub const LOST: &str = "its guardian was ended by somebody";

/// What an agent begins with.
#[derive(Debug)]
pub struct Post {
    /// The worker's folder.
    pub folder: PathBuf,
    /// What the worker is.
    pub spec: WorkerSpec,
    /// The mark of its processes.
    pub mark: String,
    /// At its end as soon as the guardian is gone.
    pub guardian: File,
}

/// Runs the agent of the worker in `folder` as a child of this process, which becomes its guardian.
///
/// Returns in both of them, each with what it has to end with. The process must have no other thread: it
/// forks. Errors go to standard error.
#[must_use]
pub fn run(folder: &Path) -> ExitCode {
    match begin(folder) {
        Ok(Side::Agent(post, lock)) => {
            let code = driver::run(*post);
            // Only now: whoever finds the lock free reads the last words.
            drop(lock);
            code
        }
        Ok(Side::Guardian(guardian)) => guardian.guard(),
        Err(reason) => {
            driver::complain(&reason);
            ExitCode::from(125)
        }
    }
}

enum Side {
    Agent(Box<Post>, OwnedFd),
    Guardian(Guardian),
}

struct Guardian {
    agent: Pid,
    mark: String,
    signals: Signals,
    _lock: File,
    _pipe: File,
}

fn begin(path: &Path) -> Result<Side, String> {
    let folder = std::path::absolute(path).map_err(|e| format!("{} is no folder: {e}", path.display()))?;
    let spec = folder::spec(&folder)?;
    let lock = folder::lock(&folder, std::env::var(folder::LOCK_FD).ok().as_deref())?;
    let own = folder.join(files::KEEPER_LOCK);
    // Taken before there is an agent: whoever finds that dead must find this taken. An earlier guardian still kills.
    let own = File::options().write(true).create(true).truncate(false).open(&own).and_then(|f| f.lock().map(|()| f));
    let own = own.map_err(|e| format!("{} cannot be taken in {}: {e}", files::KEEPER_LOCK, folder.display()))?;
    sys::leave_terminal();
    sys::become_subreaper().map_err(|e| format!("orphans cannot be adopted: {e}"))?;
    // Blocked before there is an agent, so that none is lost that is meant for it.
    let signals = Signals::new().map_err(|e| format!("signals cannot be read: {e}"))?;
    let (mut guardian, mut pipe) = sys::pipe().map_err(|e| format!("no pipe can be made: {e}"))?;
    let mark = sweep::mark(&spec);
    let Some(agent) = sys::fork().map_err(|e| format!("no process can be made: {e}"))? else {
        drop((own, signals, pipe));
        sys::wake_without_parent();
        // Nobody but this process may hold its lock once it can be seen.
        guardian.read_exact(&mut [0]).map_err(|_| LOST.to_owned())?;
        return Ok(Side::Agent(Box::new(Post { folder, spec, mark, guardian }), lock));
    };
    sys::set_name(c"aviflow-guard");
    drop((lock, guardian));
    // If it is gone, this is found out soon enough.
    let _ = pipe.write_all(&[1]);
    Ok(Side::Guardian(Guardian { agent, mark, signals, _lock: own, _pipe: pipe }))
}

impl Guardian {
    fn guard(mut self) -> ExitCode {
        let exit = self.wait();
        sweep::end_children(&self.mark);
        ExitCode::from(sys::end_like(exit))
    }

    /// Waits for the agent's end; hands it the signals that came for it.
    fn wait(&mut self) -> Exit {
        let mut poll = Poll::default();
        loop {
            while let Some(signal) = self.signals.take() {
                if signal != libc::SIGCHLD {
                    sys::kill(self.agent, signal);
                }
            }
            // Others are reaped too: process 1 of a container gets children of whom it never heard.
            while let Some((pid, exit)) = sys::reap() {
                if pid == self.agent {
                    return exit;
                }
            }
            poll.clear();
            poll.add(&self.signals, true, false);
            poll.wait(None);
        }
    }
}
