//! The connection to the control plane: bytes in and out, never waiting.
//!
//! It is tried again for ever, after 50 ms, then twice as long, up to 2 s. A
//! TCP connection counts as open while it is being made; if it fails, it is
//! lost like any other.
//!
//! Where the worker's spec has the certificate of an authority, nothing is said or heard but within TLS, with who
//! has a certificate of that authority.

use crate::pinned::{Pinned, Secured};
use crate::protocol::{Endpoint, FromAgent, MAX_LINE, ToAgent, wire};
use crate::sys::{self, Poll};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;

const FIRST_PAUSE_MS: u64 = 50;
const LAST_PAUSE_MS: u64 = 2000;

/// Bytes that wait for a slow control plane before the connection is given up.
const MAX_WAITING: usize = 16 << 20;

/// The connection.
#[derive(Debug)]
pub struct Link {
    endpoint: Endpoint,
    /// By what the control plane is known, where it must prove who it is.
    pinned: Option<Pinned>,
    stream: Option<File>,
    /// What is said within the stream, where it is within TLS.
    secured: Option<Secured>,
    /// Why the last one was no good, until somebody asks.
    refusal: Option<String>,
    read: Vec<u8>,
    write: Vec<u8>,
    written: usize,
    retry_at: u64,
    pause: u64,
    place: usize,
}

impl Link {
    /// A connection that is not open yet.
    #[must_use]
    pub fn new(endpoint: Endpoint, pinned: Option<Pinned>) -> Self {
        Self {
            endpoint,
            pinned,
            stream: None,
            secured: None,
            refusal: None,
            read: Vec::new(),
            write: Vec::new(),
            written: 0,
            retry_at: 0,
            pause: FIRST_PAUSE_MS,
            place: usize::MAX,
        }
    }

    /// Whether it is open.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// When to call [`Link::open`].
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.stream.is_none().then_some(self.retry_at)
    }

    /// Opens it if it is due; whether it is newly open.
    pub fn open(&mut self, now: u64) -> bool {
        if self.is_open() || now < self.retry_at {
            return false;
        }
        let opened = match &self.endpoint {
            Endpoint::Unix(path) => sys::connect_unix(path),
            // An address, never a name: looking one up may take half a minute.
            Endpoint::Tcp(address) => match address.parse::<SocketAddr>() {
                Ok(address) => sys::connect_tcp(address),
                Err(_) => {
                    Err(io::Error::other(format!("`{address}` is no address with a port, such as 10.0.0.1:7070")))
                }
            },
        };
        let secured = self.pinned.as_ref().map(Pinned::begin).transpose();
        match (opened, secured) {
            (Ok(stream), Ok(secured)) => {
                self.stream = Some(File::from(stream));
                self.secured = secured;
            }
            (_, Err(why)) => {
                self.refusal = Some(why);
                self.close(now);
            }
            (Err(_), _) => self.close(now),
        }
        self.is_open()
    }

    /// Closes it, to be tried again after the pause.
    pub fn close(&mut self, now: u64) {
        self.stream = None;
        self.secured = None;
        self.read.clear();
        self.write.clear();
        self.written = 0;
        self.retry_at = now + self.pause;
        self.pause = (self.pause * 2).min(LAST_PAUSE_MS);
    }

    /// Why the control plane was not taken for the one that it is to be, once.
    pub fn refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    /// Adds it to what is waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        // What TLS holds back until the other end has answered must not wake anybody.
        let writes = self.secured.as_ref().map_or(self.waiting() > 0, Secured::writes);
        self.place = match &self.stream {
            Some(stream) => poll.add(stream, true, writes),
            None => usize::MAX,
        };
    }

    /// Whether it has something to read, or was closed.
    #[must_use]
    pub fn ready(&self, poll: &Poll) -> bool {
        self.is_open() && poll.ready(self.place)
    }

    /// Bytes that were not written yet.
    #[must_use]
    pub const fn waiting(&self) -> usize {
        self.write.len() - self.written
    }

    /// Puts a message in the line.
    pub fn send(&mut self, message: &FromAgent) {
        if self.is_open() {
            self.write.extend_from_slice(&wire::line(message));
        }
    }

    /// Writes what can be written; false if the connection is lost.
    pub fn flush(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return true };
        if let Some(secured) = &mut self.secured {
            match secured.flush(stream, &self.write[self.written..]) {
                Ok(taken) => self.written += taken,
                Err(_) => return false,
            }
            self.write.drain(..self.written);
            self.written = 0;
            return self.write.len() <= MAX_WAITING;
        }
        while self.written < self.write.len() {
            match stream.write(&self.write[self.written..]) {
                Ok(0) => return false,
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        self.write.drain(..self.written);
        self.written = 0;
        self.write.len() <= MAX_WAITING
    }

    /// Reads messages; false if the connection is lost.
    pub fn receive(&mut self, mut message: impl FnMut(ToAgent)) -> bool {
        let Some(stream) = &mut self.stream else { return true };
        let mut buffer = [0; 16 << 10];
        let mut open = true;
        for round in 0.. {
            // What TLS has taken from the network wakes nobody.
            if round >= 64 && !self.secured.as_ref().is_some_and(Secured::holds) {
                break;
            }
            let read = match &mut self.secured {
                Some(secured) => secured.read(stream, &mut buffer),
                None => stream.read(&mut buffer),
            };
            match read {
                Ok(0) => open = false,
                Ok(n) => {
                    self.read.extend_from_slice(&buffer[..n]);
                    // It answers: the next loss begins with a short pause again.
                    self.pause = FIRST_PAUSE_MS;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    self.refusal = self.secured.is_some().then(|| e.to_string()).filter(|_| is_refusal(&e));
                    open = false;
                }
            }
            break;
        }
        let mut from = 0;
        while let Some(end) = self.read[from..].iter().position(|b| *b == b'\n') {
            // What is not understood is of a newer control plane.
            if let Ok(parsed) = wire::parse(&self.read[from..from + end]) {
                message(parsed);
            }
            from += end + 1;
        }
        self.read.drain(..from);
        open && self.read.len() <= MAX_LINE
    }
}

/// Whether a connection ended because of what the other end is, and not of the network.
fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

#[cfg(test)]
mod tests;
