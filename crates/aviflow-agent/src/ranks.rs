//! The ranks' processes and their pipes.
//!
//! Pipes are always drained, whatever becomes of the lines. When a rank ends,
//! what it wrote is read before its end is told; a pipe that a child of its
//! holds is read on until the epoch is over.

use crate::log::{self, Source, Splitter};
use crate::process::{PIPE, Started};
use crate::sys::{Pid, Poll};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

const BUFFER: usize = 64 << 10;

#[derive(Debug)]
struct Stream {
    pipe: Option<File>,
    splitter: Splitter,
    source: Source,
    place: usize,
}

#[derive(Debug)]
struct Rank {
    pid: Pid,
    ended: bool,
    streams: [Stream; 2],
}

/// The ranks of an epoch.
#[derive(Debug, Default)]
pub struct Ranks {
    ranks: BTreeMap<u32, Rank>,
}

/// Lines for the log, as they are, and for the machine.
#[derive(Debug, Default)]
pub struct Lines {
    /// For the log.
    pub log: String,
    /// The rank and the text, for the machine.
    pub texts: Vec<(u32, String)>,
}

impl Lines {
    /// Adds a line.
    pub fn add(&mut self, unix_ms: i64, rank: u32, source: Source, text: String) {
        self.log.push_str(&log::format(unix_ms, rank, source, &text));
        if source != Source::Agent {
            self.texts.push((rank, text));
        }
    }
}

/// The time: of the monotonic clock, and of the node.
pub type Now = (u64, i64);

impl Ranks {
    /// Takes over a rank that was started.
    pub fn add(&mut self, rank: u32, started: Started) {
        let stream =
            |pipe, source| Stream { pipe: Some(pipe), splitter: Splitter::default(), source, place: usize::MAX };
        let streams = [stream(started.out, Source::Out), stream(started.err, Source::Err)];
        self.ranks.insert(rank, Rank { pid: started.pid, ended: false, streams });
    }

    /// The process of a rank that lives.
    #[must_use]
    pub fn pid(&self, rank: u32) -> Option<Pid> {
        self.ranks.get(&rank).filter(|r| !r.ended).map(|r| r.pid)
    }

    /// Whether a process group is a rank's, also of one that ended.
    #[must_use]
    pub fn is_group(&self, group: Pid) -> bool {
        self.ranks.values().any(|r| r.pid == group)
    }

    /// Adds the pipes to what is waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        for stream in self.ranks.values_mut().flat_map(|r| &mut r.streams) {
            stream.place = stream.pipe.as_ref().map_or(usize::MAX, |pipe| poll.add(pipe, true, false));
        }
    }

    /// When a progress bar that stands still is due.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.ranks.values().flat_map(|r| &r.streams).filter_map(|s| s.splitter.due()).min()
    }

    /// Reads from the pipes that are ready.
    pub fn read(&mut self, poll: &Poll, now: Now, lines: &mut Lines) {
        for (rank, state) in &mut self.ranks {
            for stream in &mut state.streams {
                stream.splitter.flush(now.0, |text| lines.add(now.1, *rank, stream.source, text));
                if poll.ready(stream.place) {
                    stream.drain(*rank, 4 * BUFFER, now, lines);
                }
            }
        }
    }

    /// A child ended: the rank that it was, after its output was read.
    pub fn reaped(&mut self, pid: Pid, now: Now, lines: &mut Lines) -> Option<u32> {
        let (rank, state) = self.ranks.iter_mut().find(|(_, r)| r.pid == pid && !r.ended)?;
        state.ended = true;
        for stream in &mut state.streams {
            // What the dead wrote fits in its pipe; a child of its may write for ever.
            stream.drain(*rank, PIPE as usize + BUFFER, now, lines);
            stream.splitter.finish(|text| lines.add(now.1, *rank, stream.source, text));
        }
        Some(*rank)
    }

    /// The epoch is over and nobody writes any more: reads what is left, closes everything.
    pub fn finish(&mut self, now: Now, lines: &mut Lines) {
        for (rank, mut state) in std::mem::take(&mut self.ranks) {
            for stream in &mut state.streams {
                stream.drain(rank, PIPE as usize + BUFFER, now, lines);
                stream.splitter.finish(|text| lines.add(now.1, rank, stream.source, text));
            }
        }
    }
}

impl Stream {
    fn drain(&mut self, rank: u32, limit: usize, now: Now, lines: &mut Lines) {
        let mut buffer = vec![0; BUFFER];
        let mut taken = 0;
        while taken < limit {
            let Some(pipe) = &mut self.pipe else { return };
            match pipe.read(&mut buffer) {
                Ok(n) if n > 0 => {
                    taken += n;
                    self.splitter.push(&buffer[..n], now.0, |text| lines.add(now.1, rank, self.source, text));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Ok(_) | Err(_) => {
                    self.pipe = None;
                    self.splitter.finish(|text| lines.add(now.1, rank, self.source, text));
                }
            }
        }
    }
}
