//! Files of processes that may hang.
//!
//! The kernel reads `environ` and `cmdline` out of a process's memory, for which it waits until nobody changes what is
//! mapped there. A thread that hangs in a driver (state D) may do just that for ever, and then whoever reads does, too.
//! So a thread of its own reads, and is left behind where it does not come back.

use crate::sys::Pid;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// How long a process is waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// Threads that may have been left behind: when there are so many, no further process is waited for.
const MOST: usize = 8;

/// Processes that could not be read, each with the thread that is still at it.
#[derive(Clone, Debug, Default)]
pub(super) struct Hanging(Arc<Mutex<BTreeMap<Pid, JoinHandle<()>>>>);

impl Hanging {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Pid, JoinHandle<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what `read` does of each process; those are left out whose turn does not end.
    pub(super) fn read<T: Send + 'static>(
        &self,
        pids: Vec<Pid>,
        read: impl Fn(Pid) -> T + Clone + Send + 'static,
    ) -> BTreeMap<Pid, T> {
        let mut known = BTreeMap::new();
        let mut left = self.lock();
        left.retain(|_, thread| !thread.is_finished());
        let mut rest: VecDeque<Pid> = pids.into_iter().filter(|pid| !left.contains_key(pid)).collect();
        while !rest.is_empty() && left.len() < MOST {
            let (tell, told) = mpsc::channel();
            let (pids, read) = (rest.clone(), read.clone());
            let work = move || pids.into_iter().all(|pid| tell.send((pid, read(pid))).is_ok());
            let Ok(thread) = Builder::new().name("stacks-read".to_owned()).spawn(move || {
                let _ = work();
            }) else {
                break;
            };
            while let Some(pid) = rest.pop_front() {
                match told.recv_timeout(PATIENCE) {
                    Ok((pid, what)) => drop(known.insert(pid, what)),
                    Err(RecvTimeoutError::Timeout) => {
                        left.insert(pid, thread);
                        break;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_hangs_keeps_nobody_from_the_others() {
        let hanging = Hanging::default();
        let (release, gate) = mpsc::channel::<()>();
        let (told, asked) = mpsc::channel();
        let gate = Arc::new(Mutex::new(gate));
        let read = move |pid: Pid| {
            let _ = told.send(pid);
            if pid == 2 {
                let _ = gate.lock().unwrap_or_else(PoisonError::into_inner).recv();
            }
            pid * 10
        };
        let others = || [(1, 10), (3, 30)].into();
        assert_eq!(hanging.read(vec![1, 2, 3], read.clone()), others());
        // It is not tried again while it hangs.
        assert_eq!(hanging.read(vec![1, 2, 3], read.clone()), others());
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), [1, 2, 3, 1, 3]);
        drop(release);
        while hanging.lock().values().any(|thread| !thread.is_finished()) {
            std::thread::yield_now();
        }
        assert_eq!(hanging.read(vec![1, 2], read), [(1, 10), (2, 20)].into());
    }
}
