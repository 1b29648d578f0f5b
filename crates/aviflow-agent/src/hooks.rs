//! The socket on which a training tells how it goes.
//!
//! A Unix stream socket in the worker's folder, its path in `AVIFLOW_SOCKET`.
//! Processes send JSON, one message a line ([`Message`]), at most [`MAX_LINE`]
//! bytes; the agent answers `stop?` with `{"id", "stop", "reason"}` and tells
//! every connection `{"stop": true, "reason"}` when a stop begins.
//!
//! A training never fails or waits because of what happens here: a line that
//! is not understood is counted and skipped, and a process that does not read
//! loses its connection. What messages mean is decided in [`crate::training`].

use crate::protocol::Value;
use crate::sys::Poll;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The longest line in bytes, its newline included.
pub const MAX_LINE: usize = 64 << 10;

/// Connections at one time; more wait until one ends.
const MAX_CONNECTIONS: usize = 256;

/// The pause after a connection could not be accepted, in milliseconds: it would be ready again at once.
const ACCEPT_PAUSE_MS: u64 = 100;

/// What a process says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Message {
    /// Who speaks on this connection.
    Hello {
        /// The process.
        pid: u32,
        /// Its rank of the gang.
        rank: u32,
    },
    /// A step ended.
    Metrics {
        /// The step.
        step: u64,
        /// Named values.
        #[serde(default)]
        values: BTreeMap<String, Value>,
        /// How many steps there will be.
        #[serde(default)]
        total_steps: Option<u64>,
        /// Tokens so far.
        #[serde(default)]
        tokens: Option<u64>,
    },
    /// A checkpoint begins or ends.
    Checkpoint {
        /// Which of these.
        phase: Phase,
        /// The step.
        step: u64,
        /// The path as the training names it.
        #[serde(default)]
        path: String,
    },
    /// Data that the training uses.
    Data {
        /// Its name.
        name: String,
        /// Its hash, in hexadecimal.
        sha256: String,
        /// Its size.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// What describes the run.
    Facts {
        /// Names and plain values.
        values: BTreeMap<String, serde_json::Value>,
    },
    /// The final results.
    Summary {
        /// Names and plain values.
        values: BTreeMap<String, serde_json::Value>,
    },
    /// What the process does in the training.
    Role {
        /// A number that is equal for equal work, such as the stage of a pipeline.
        role: u16,
    },
    /// The process entered a collective.
    Collective {
        /// Its number, as the process group counts.
        number: u64,
    },
    /// Whether to stop.
    #[serde(rename = "stop?")]
    Stop {
        /// For the answer.
        id: u64,
    },
}

/// A part of a checkpoint's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The training stands still for it.
    Begin,
    /// It may be used.
    Complete,
    /// It will not be complete.
    Failed,
}

/// Bytes of one connection on their way to messages.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    skipping: bool,
    /// Lines that were not understood.
    pub malformed: u64,
}

impl Lines {
    /// Takes bytes, gives whole messages.
    pub fn push(&mut self, mut bytes: &[u8], mut message: impl FnMut(Message)) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            let (part, rest) = (&bytes[..end], &bytes[end + 1..]);
            bytes = rest;
            if self.skipping || self.partial.len() + part.len() >= MAX_LINE {
                self.malformed += u64::from(!self.skipping);
                self.skipping = false;
            } else {
                self.partial.extend_from_slice(part);
                match serde_json::from_slice(&self.partial) {
                    Ok(parsed) => message(parsed),
                    Err(_) => self.malformed += 1,
                }
            }
            self.partial.clear();
        }
        if self.partial.len() + bytes.len() >= MAX_LINE {
            self.malformed += u64::from(!self.skipping);
            self.skipping = true;
            self.partial.clear();
        } else if !self.skipping {
            self.partial.extend_from_slice(bytes);
        }
    }
}

struct Connection {
    stream: UnixStream,
    lines: Lines,
    rank: Option<u32>,
    out: Vec<u8>,
    place: usize,
}

/// The socket and its connections.
pub struct Hooks {
    listener: UnixListener,
    path: PathBuf,
    place: usize,
    connections: Vec<Connection>,
    /// No connection is accepted before this time.
    pause_until: Option<u64>,
    stop: Option<String>,
    malformed: u64,
    ranks: std::ops::Range<u32>,
}

impl Hooks {
    /// Listens at `path`, or at a shorter one if a socket's address cannot hold it.
    ///
    /// `ranks` are those of this worker; who names another counts as the first.
    ///
    /// # Errors
    /// If no socket can be made there.
    pub fn listen(path: &Path, mark: &str, ranks: std::ops::Range<u32>) -> io::Result<Self> {
        let path = if path.as_os_str().len() > 107 {
            let name: String = mark.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
            std::env::temp_dir().join(format!("aviflow-{name}.sock"))
        } else {
            path.to_owned()
        };
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        let (place, connections) = (usize::MAX, Vec::new());
        Ok(Self { listener, path, place, connections, pause_until: None, stop: None, malformed: 0, ranks })
    }

    /// The socket's path, for `AVIFLOW_SOCKET`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lines that nobody understood.
    #[must_use]
    pub fn malformed(&self) -> u64 {
        self.malformed + self.connections.iter().map(|c| c.lines.malformed).sum::<u64>()
    }

    /// When connections are accepted again, if not now.
    #[must_use]
    pub const fn due(&self) -> Option<u64> {
        self.pause_until
    }

    fn accepts(&self, now: u64) -> bool {
        self.connections.len() < MAX_CONNECTIONS && self.pause_until.is_none_or(|until| until <= now)
    }

    /// Adds what is to be waited for.
    pub fn watch(&mut self, poll: &mut Poll, now: u64) {
        self.place = usize::MAX;
        if self.accepts(now) {
            self.pause_until = None;
            self.place = poll.add(&self.listener, true, false);
        }
        for connection in &mut self.connections {
            connection.place = poll.add(&connection.stream, true, !connection.out.is_empty());
        }
    }

    /// Reads what arrived; from every connection, or only from those that are ready.
    pub fn read(&mut self, ready: Option<&Poll>, now: u64, mut said: impl FnMut(u32, Message)) {
        let mut gone = Vec::new();
        for (index, connection) in self.connections.iter_mut().enumerate() {
            if ready.is_some_and(|poll| !poll.ready(connection.place)) {
                continue;
            }
            let open = receive(connection, &self.ranks, self.stop.as_ref(), &mut said);
            if !open || !flush(connection) {
                gone.push(index);
            }
        }
        for index in gone.into_iter().rev() {
            self.malformed += self.connections.swap_remove(index).lines.malformed;
        }
        if ready.is_none_or(|poll| poll.ready(self.place)) {
            while self.accepts(now) {
                let accepted = self.listener.accept().map(|(stream, _)| stream);
                if !self.take(accepted, now, &mut said) {
                    break;
                }
            }
        }
    }

    /// Takes a new connection; whether another may wait.
    fn take(&mut self, accepted: io::Result<UnixStream>, now: u64, said: &mut impl FnMut(u32, Message)) -> bool {
        let stream = match accepted {
            Ok(stream) => stream,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return true,
            // Too many open files, for example.
            Err(_) => {
                self.pause_until = Some(now + ACCEPT_PAUSE_MS);
                return false;
            }
        };
        if stream.set_nonblocking(true).is_err() {
            return true;
        }
        let mut connection =
            Connection { stream, lines: Lines::default(), rank: None, out: Vec::new(), place: usize::MAX };
        // A short-lived process may have said everything already.
        if receive(&mut connection, &self.ranks, self.stop.as_ref(), said) && flush(&mut connection) {
            self.connections.push(connection);
        } else {
            self.malformed += connection.lines.malformed;
        }
        true
    }

    /// Tells every process that a stop began, or, with none, forgets it for the next epoch.
    pub fn set_stop(&mut self, reason: Option<String>) {
        if let Some(reason) = &reason {
            let line = serde_json::json!({"stop": true, "reason": reason}).to_string() + "\n";
            self.connections.retain_mut(|connection| {
                connection.out.extend_from_slice(line.as_bytes());
                flush(connection)
            });
        }
        self.stop = reason;
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reads from one connection; whether it is still open.
fn receive(
    connection: &mut Connection,
    ranks: &std::ops::Range<u32>,
    stop: Option<&String>,
    said: &mut impl FnMut(u32, Message),
) -> bool {
    let mut buffer = [0; 16 << 10];
    // A bound on the work for one that never pauses; the rest is read the next time.
    for _ in 0..8 {
        let n = match connection.stream.read(&mut buffer) {
            Ok(0) => return false,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return false,
        };
        let (rank, out) = (&mut connection.rank, &mut connection.out);
        connection.lines.push(&buffer[..n], |message| match message {
            Message::Hello { rank: of, .. } => *rank = ranks.contains(&of).then_some(of),
            Message::Stop { id } => {
                let answer = serde_json::json!({"id": id, "stop": stop.is_some(), "reason": stop});
                out.extend_from_slice((answer.to_string() + "\n").as_bytes());
            }
            message => said(rank.unwrap_or(ranks.start), message),
        });
    }
    true
}

/// Sends what waits; false if the process does not read or is gone.
fn flush(connection: &mut Connection) -> bool {
    while !connection.out.is_empty() {
        match connection.stream.write(&connection.out) {
            Ok(0) => return false,
            Ok(n) => drop(connection.out.drain(..n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return connection.out.len() <= MAX_LINE,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;

    fn parse(bytes: &[u8], cut: usize) -> (Vec<Message>, u64) {
        let mut lines = Lines::default();
        let mut messages = Vec::new();
        for piece in bytes.chunks(cut.max(1)) {
            lines.push(piece, |m| messages.push(m));
        }
        (messages, lines.malformed)
    }

    #[test]
    fn messages_are_understood_and_others_counted() {
        let text = br#"{"type":"hello","pid":7,"rank":2}
{"type":"metrics","step":3,"values":{"loss":"NaN","lr":0.1},"total_steps":null,"tokens":9}
not json
{"type":"checkpoint","phase":"complete","step":3,"path":"/c/3"}
{"type":"data","name":"corpus","sha256":"ab","bytes":null}
{"type":"facts","values":{"params":8,"dtype":"bf16"}}
{"type":"newer"}
{"type":"stop?","id":4}
"#;
        for cut in [1, 7, 4096] {
            let (messages, malformed) = parse(text, cut);
            assert_eq!((messages.len(), malformed), (6, 2), "cut {cut}");
            assert_eq!(messages[0], Message::Hello { pid: 7, rank: 2 });
            assert_eq!(messages[5], Message::Stop { id: 4 });
        }
    }

    #[test]
    fn an_endless_line_is_skipped() {
        let mut text = vec![b'x'; 3 * MAX_LINE];
        text.extend_from_slice(b"\n{\"type\":\"stop?\",\"id\":1}\n");
        for cut in [1000, 1 << 20] {
            assert_eq!(parse(&text, cut), (vec![Message::Stop { id: 1 }], 1));
        }
    }

    #[test]
    fn a_process_learns_of_a_stop() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut hooks = Hooks::listen(&folder.path().join("s"), "m", 4..8).expect("a socket");
        let mut client = UnixStream::connect(hooks.path()).expect("a connection");
        let mut reader = io::BufReader::new(client.try_clone().expect("a clone"));
        let mut line = String::new();
        let mut said = Vec::new();
        client
            .write_all(b"{\"type\":\"hello\",\"pid\":1,\"rank\":5}\n{\"type\":\"stop?\",\"id\":1}\n{\"type\":\"metrics\",\"step\":1}\n")
            .expect("sent");
        hooks.read(None, 0, |rank, message| said.push((rank, message)));
        assert!(matches!(said[..], [(5, Message::Metrics { step: 1, .. })]), "{said:?}");
        reader.read_line(&mut line).expect("an answer");
        assert_eq!(line, "{\"id\":1,\"reason\":null,\"stop\":false}\n");
        hooks.set_stop(Some("preempted".into()));
        line.clear();
        reader.read_line(&mut line).expect("a push");
        assert_eq!(line, "{\"reason\":\"preempted\",\"stop\":true}\n");
        client.write_all(b"{\"type\":\"stop?\",\"id\":2}\n").expect("sent");
        hooks.read(None, 0, |_, _| {});
        line.clear();
        reader.read_line(&mut line).expect("an answer");
        assert_eq!(line, "{\"id\":2,\"reason\":\"preempted\",\"stop\":true}\n");
    }

    /// Whether a connection that waits would be noticed.
    fn noticed(hooks: &mut Hooks, now: u64) -> bool {
        let mut poll = Poll::default();
        hooks.watch(&mut poll, now);
        poll.wait(Some(0));
        poll.ready(hooks.place)
    }

    #[test]
    fn at_the_bound_connections_wait() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut hooks = Hooks::listen(&folder.path().join("s"), "m", 0..1).expect("a socket");
        let connect = |hooks: &Hooks| UnixStream::connect(hooks.path()).expect("a connection");
        let mut clients = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            clients.push(connect(&hooks));
            hooks.read(None, 0, |_, _| {});
        }
        let mut late = connect(&hooks);
        late.write_all(b"{\"type\":\"metrics\",\"step\":1}\n").expect("sent");
        assert!(!noticed(&mut hooks, 0));
        hooks.read(None, 0, |_, _| panic!("no room"));
        clients.pop();
        let mut said = 0;
        hooks.read(None, 0, |_, _| said += 1);
        assert_eq!((said, hooks.connections.len()), (1, MAX_CONNECTIONS));
    }

    #[test]
    fn after_a_failed_accept_there_is_a_pause() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut hooks = Hooks::listen(&folder.path().join("s"), "m", 0..1).expect("a socket");
        let _waiting = UnixStream::connect(hooks.path()).expect("a connection");
        assert!(noticed(&mut hooks, 1000));
        assert!(!hooks.take(Err(io::Error::from_raw_os_error(libc::EMFILE)), 1000, &mut |_, _| {}));
        assert!(!noticed(&mut hooks, 1099));
        assert_eq!(hooks.due(), Some(1100));
        assert!(noticed(&mut hooks, 1100));
        assert_eq!(hooks.due(), None);
    }

    #[test]
    fn a_long_path_gets_a_short_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let long = folder.path().join("x".repeat(120));
        std::fs::create_dir(&long).expect("a folder");
        let hooks = Hooks::listen(&long.join("s"), &format!("1.1.0@{}", std::process::id()), 0..1).expect("a socket");
        assert!(UnixStream::connect(hooks.path()).is_ok());
    }
}
