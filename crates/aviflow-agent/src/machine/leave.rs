//! The agent itself is asked to end, as kubelet asks a container whose pod is deleted or evicted.
//!
//! A checkpoint needs every rank of the gang, and only this worker was asked. So the agent says so first, and the
//! control plane stops the whole gang; it does not answer if the gang ends anyhow, or if it is away, and then this
//! worker ends alone. Who asks twice does not want to wait.

use super::{Event, Machine, Output, Phase};

/// Milliseconds that the control plane has to stop the gang, at most; of a short grace it has a quarter.
///
/// What passes meanwhile is taken from what the ranks have to save themselves, so it is little beside the graces
/// that are usual (30 s and more), and much beside the 10 ms that an answer takes.
const LEAVE_MS: u64 = 5000;

impl Machine {
    pub(super) fn terminated(&mut self, now: u64, out: &mut Vec<Output>) {
        let again = std::mem::replace(&mut self.closing, true);
        if self.phase == Phase::Ended {
            // Who comes later finds everything on disk.
            self.exit(false, out);
        } else if again || !self.welcomed || self.phase != Phase::Running {
            self.leave(now, out);
        } else {
            let within_ms = self.spec.grace_ms;
            self.leave_at = Some(now + LEAVE_MS.min(within_ms / 4));
            self.emit(Event::Leaving { within_ms }, now, out);
        }
    }

    /// When the ranks are stopped if the control plane does not do it.
    pub(super) fn leave_at(&self) -> Option<u64> {
        self.leave_at.filter(|_| self.phase == Phase::Running)
    }

    /// Ends without the others.
    pub(super) fn leave(&mut self, now: u64, out: &mut Vec<Output>) {
        self.stop(self.spec.grace_ms, "the agent was asked to end (SIGTERM)".to_owned(), true, now, out);
    }
}
