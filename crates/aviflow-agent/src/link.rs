//! The connection to the control plane: bytes in and out, never waiting.
//!
//! It is tried again for ever, after 50 ms, then twice as long, up to 2 s. A
//! TCP connection counts as open while it is being made; if it fails, it is
//! lost like any other.

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
    stream: Option<File>,
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
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            stream: None,
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
        match opened {
            Ok(stream) => self.stream = Some(File::from(stream)),
            Err(_) => self.close(now),
        }
        self.is_open()
    }

    /// Closes it, to be tried again after the pause.
    pub fn close(&mut self, now: u64) {
        self.stream = None;
        self.read.clear();
        self.write.clear();
        self.written = 0;
        self.retry_at = now + self.pause;
        self.pause = (self.pause * 2).min(LAST_PAUSE_MS);
    }

    /// Adds it to what is waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        self.place = match &self.stream {
            Some(stream) => poll.add(stream, true, self.waiting() > 0),
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
        for _ in 0..64 {
            match stream.read(&mut buffer) {
                Ok(0) => open = false,
                Ok(n) => {
                    self.read.extend_from_slice(&buffer[..n]);
                    // It answers: the next loss begins with a short pause again.
                    self.pause = FIRST_PAUSE_MS;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => open = false,
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
