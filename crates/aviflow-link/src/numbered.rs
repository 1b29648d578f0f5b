//! What goes on over one connection, by its number.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is said of everything that goes on over a connection when that is lost.
pub(crate) const LOST: &str = "the connection to the worker was lost; try again";

/// Commands or channels, with where what comes of each goes.
pub(crate) struct Numbered<S>(Mutex<Open<S>>);

pub(crate) struct Open<S> {
    last: u64,
    ended: bool,
    pub(crate) sinks: BTreeMap<u64, S>,
}

impl<S> Default for Numbered<S> {
    fn default() -> Numbered<S> {
        Numbered(Mutex::new(Open { last: 0, ended: false, sinks: BTreeMap::new() }))
    }
}

impl<S> Numbered<S> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Open<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for another one; `None` if the connection has ended.
    pub(crate) fn begin(&self, sink: S) -> Option<u64> {
        let mut open = self.lock();
        if open.ended {
            return None;
        }
        open.last += 1;
        let id = open.last;
        open.sinks.insert(id, sink);
        Some(id)
    }

    /// Forgets one; whether it was still open.
    pub(crate) fn forget(&self, id: u64) -> bool {
        self.lock().sinks.remove(&id).is_some()
    }

    /// The connection is gone: none begins any more, and each that was open is told.
    pub(crate) fn end(&self, tell: impl Fn(S)) {
        let mut open = self.lock();
        open.ended = true;
        std::mem::take(&mut open.sinks).into_values().for_each(tell);
    }
}
