//! Commands inside a worker ([`crate::protocol::ToAgent::Exec`]).
//!
//! A command has a rank's variables and folder, a process group of its own, and
//! its input in memory. Its output is read only as fast as the control plane
//! takes it. It ends at the latest with the worker.

use crate::process::Started;
use crate::protocol::ExecOutput;
use crate::sys::{self, Exit, Pid, Poll};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

/// Bytes of output in one message.
const FRAME: usize = 32 << 10;

#[derive(Debug)]
struct Running {
    started: Started,
    places: [usize; 2],
    open: [bool; 2],
}

/// The commands that run.
#[derive(Debug, Default)]
pub struct Commands {
    running: BTreeMap<u64, Running>,
}

/// The bytes of a base64 text.
///
/// # Errors
/// If it is none.
pub fn decode(text: &str) -> Result<Vec<u8>, String> {
    STANDARD.decode(text).map_err(|e| format!("standard input is no base64: {e}"))
}

impl Commands {
    /// Whether a number is taken.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.running.contains_key(&id)
    }

    /// The sessions of commands.
    pub fn sessions(&self) -> impl Iterator<Item = Pid> {
        self.running.values().map(|running| running.started.pid)
    }

    /// Takes over a command that was started.
    pub fn add(&mut self, id: u64, started: Started) {
        self.running.insert(id, Running { started, places: [usize::MAX; 2], open: [true; 2] });
    }

    /// Adds their output to what is waited for; with `paused`, nothing is read for now.
    pub fn watch(&mut self, poll: &mut Poll, paused: bool) {
        for running in self.running.values_mut() {
            running.places = [usize::MAX; 2];
            if paused {
                continue;
            }
            for (index, pipe) in [&running.started.out, &running.started.err].into_iter().enumerate() {
                if running.open[index] {
                    running.places[index] = poll.add(pipe, true, false);
                }
            }
        }
    }

    /// Reads one frame of each that is ready.
    pub fn read(&mut self, poll: &Poll, mut said: impl FnMut(u64, ExecOutput)) {
        for (id, running) in &mut self.running {
            for index in 0..2 {
                if poll.ready(running.places[index]) {
                    running.frame(index, |output| said(*id, output));
                }
            }
        }
    }

    /// A child ended; whether it was a command.
    pub fn reaped(&mut self, pid: Pid, exit: Exit, mut said: impl FnMut(u64, ExecOutput)) -> bool {
        let Some(id) = self.running.iter().find(|(_, r)| r.started.pid == pid).map(|(id, _)| *id) else {
            return false;
        };
        if let Some(mut running) = self.running.remove(&id) {
            // All it wrote fits in its pipes; what others still write there is not its output.
            for index in 0..2 {
                for _ in 0..=(crate::process::PIPE as usize / FRAME) {
                    if !running.open[index] || !running.frame(index, |output| said(id, output)) {
                        break;
                    }
                }
            }
            said(id, ExecOutput::Exit(exit.code));
        }
        true
    }

    /// Kills one, or all.
    pub fn kill(&self, id: Option<u64>) {
        for (_, running) in self.running.iter().filter(|(of, _)| id.is_none_or(|id| id == **of)) {
            sys::kill(-running.started.pid, libc::SIGKILL);
        }
    }
}

impl Running {
    /// Reads a frame; whether there was one.
    fn frame(&mut self, index: usize, mut said: impl FnMut(ExecOutput)) -> bool {
        let pipe: &mut File = if index == 0 { &mut self.started.out } else { &mut self.started.err };
        let mut buffer = vec![0; FRAME];
        match pipe.read(&mut buffer) {
            Ok(0) => self.open[index] = false,
            Ok(n) => {
                let text = STANDARD.encode(&buffer[..n]);
                said(if index == 0 { ExecOutput::Stdout(text) } else { ExecOutput::Stderr(text) });
                return true;
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.open[index] = false,
        }
        false
    }
}
