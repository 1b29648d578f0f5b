//! What is said to the control plane, and written to the log.

use super::{Driver, complain};
use crate::log::Source;
use crate::protocol::{FromAgent, LOG_CHUNK};

/// Bytes on their way to a slow control plane from which on no log is added, but as much as others added.
const LOG_WAITS: usize = 256 << 10;

impl Driver {
    pub(super) fn send(&mut self, message: &FromAgent) {
        let before = self.link.waiting();
        self.link.send(message);
        if let FromAgent::Exec { .. } | FromAgent::Channel { .. } = message {
            // Whoever fills the line does not keep the log out of it.
            self.log_share = (self.log_share + self.link.waiting().saturating_sub(before)).min(LOG_WAITS);
        }
    }

    pub(super) fn note(&mut self, text: String) {
        if self.ended {
            complain(&text);
        } else {
            let unix = self.now().1;
            self.lines.add(unix, self.spec.first_rank, Source::Agent, text);
        }
    }

    pub(super) fn write_log(&mut self) {
        if !self.lines.log.is_empty() {
            let unix = self.now().1;
            self.spool.append(&std::mem::take(&mut self.lines.log), unix);
        }
    }

    pub(super) fn ship_log(&mut self) {
        while self.link.is_open() && (self.link.waiting() < LOG_WAITS || self.log_share > 0) {
            let Some((offset, text)) = self.ship.and_then(|from| self.spool.read(from, LOG_CHUNK)) else { break };
            self.ship = Some(offset + text.len() as u64);
            self.log_share = self.log_share.saturating_sub(text.len());
            self.link.send(&FromAgent::Log { offset, text });
            if !self.link.flush() {
                break;
            }
        }
    }
}
