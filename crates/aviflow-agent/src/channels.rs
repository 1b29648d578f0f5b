//! Channels into a worker ([`crate::protocol::channel`]): terminals, TCP connections, and answers.
//!
//! What comes from the control plane waits here for whoever reads it, at most a window; what goes there is read
//! only as fast as the control plane has room. A terminal that is closed hangs up on its programs (SIGHUP), as one
//! of SSH does; what ignores that ends with the worker.

use crate::protocol::ChannelOutput;
use crate::protocol::channel::{CHUNK, ChannelInput, WINDOW};
use crate::sys::{self, Exit, Pid, Poll};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};

/// What the key Ctrl-D sends.
const END_OF_TEXT: u8 = 4;

/// Bytes that all channels say in one turn, before encoding; the last of them may say a window more. The others go
/// first in the next one.
const TURN: usize = 1 << 20;

/// Why a channel ends with the ranks.
pub const OVER: &str = "the ranks here have ended";

/// What a channel leads to.
enum Target {
    Terminal {
        pid: Pid,
        shown: File,
        exit: Option<i32>,
    },
    Port {
        stream: TcpStream,
        port: u16,
        /// The address that is tried next, while the connection is being made.
        begun: Option<Option<SocketAddr>>,
    },
    /// Nothing but what waits to be told.
    Answer,
}

struct Open {
    target: Target,
    /// On its way to the target.
    input: VecDeque<u8>,
    input_ended: bool,
    /// On its way to the control plane, beyond what the target holds back.
    output: VecDeque<u8>,
    output_ended: bool,
    /// Bytes that the control plane has room for.
    room: usize,
    place: usize,
}

/// The channels that are open.
#[derive(Default)]
pub struct Channels {
    open: BTreeMap<u64, Open>,
    /// Whose turn it is first.
    first: u64,
}

impl Channels {
    /// Whether a number is taken.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    /// How many terminals are open.
    #[must_use]
    pub fn terminals(&self) -> usize {
        self.open.values().filter(|open| matches!(open.target, Target::Terminal { exit: None, .. })).count()
    }

    /// The sessions of terminals.
    pub fn sessions(&self) -> impl Iterator<Item = Pid> {
        self.open.values().filter_map(|open| match open.target {
            Target::Terminal { pid, .. } => Some(pid),
            Target::Port { .. } | Target::Answer => None,
        })
    }

    /// Takes over a terminal with its command.
    pub fn add_terminal(&mut self, id: u64, pid: Pid, shown: File, mut said: impl FnMut(u64, ChannelOutput)) {
        self.open.insert(id, Open::new(Target::Terminal { pid, shown, exit: None }));
        said(id, ChannelOutput::Opened);
    }

    /// Begins to connect to a port of the loopback address, of IPv4 or else of IPv6.
    pub fn add_port(&mut self, id: u64, port: u16, mut said: impl FnMut(u64, ChannelOutput)) {
        let first = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let second = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        match connect(first, Some(second)) {
            Ok((stream, next)) => {
                self.open.insert(id, Open::new(Target::Port { stream, port, begun: Some(next) }));
            }
            Err(e) => said(id, ChannelOutput::Failed(refused(port, &e))),
        }
    }

    /// Tells an answer, as fast as it is taken.
    pub fn add_answer(&mut self, id: u64, answer: Vec<u8>) {
        let mut open = Open::new(Target::Answer);
        open.output = answer.into();
        self.open.insert(id, open);
    }

    /// Adds them to what is waited for; with `paused`, nothing is read for now.
    pub fn watch(&mut self, poll: &mut Poll, paused: bool) {
        for open in self.open.values_mut() {
            let read = !paused && open.room > 0 && !open.output_ended;
            let write = !open.input.is_empty();
            open.place = match &open.target {
                Target::Terminal { shown, .. } if read || write => poll.add(shown, read, write),
                Target::Port { stream, begun: Some(_), .. } => poll.add(stream, false, true),
                Target::Port { stream, .. } if read || write => poll.add(stream, read, write),
                Target::Terminal { .. } | Target::Port { .. } | Target::Answer => usize::MAX,
            };
        }
    }

    /// Tells what there is room for.
    pub fn answer(&mut self, said: impl FnMut(u64, ChannelOutput)) {
        self.each(|open| matches!(open.target, Target::Answer), said);
    }

    /// Reads and writes what is ready.
    pub fn turn(&mut self, poll: &Poll, said: impl FnMut(u64, ChannelOutput)) {
        self.each(|open| poll.ready(open.place), said);
    }

    fn each(&mut self, wanted: impl Fn(&Open) -> bool, mut said: impl FnMut(u64, ChannelOutput)) {
        let from_first = self.open.range(self.first..).chain(self.open.range(..self.first));
        let ids: Vec<u64> = from_first.filter(|(_, open)| wanted(open)).map(|(id, _)| *id).collect();
        let mut spent = 0;
        for id in ids {
            if spent >= TURN {
                self.first = id;
                return;
            }
            let Some(open) = self.open.get_mut(&id) else { continue };
            let room = open.room;
            let over = open.turn(|output| said(id, output));
            spent += room.saturating_sub(open.room);
            if over {
                self.open.remove(&id);
            }
        }
    }

    /// Takes what was put into a channel.
    pub fn put(&mut self, id: u64, input: ChannelInput, mut said: impl FnMut(u64, ChannelOutput)) {
        // What is said after a channel's end crosses it on the way.
        let Some(open) = self.open.get_mut(&id) else { return };
        match input {
            ChannelInput::Data(text) => match STANDARD.decode(&text) {
                Ok(bytes) if open.input.len() + bytes.len() <= WINDOW => {
                    if !open.input_ended {
                        open.input.extend(bytes);
                    }
                }
                Ok(_) => return self.fail(id, "more was sent than there is room for", said),
                Err(e) => return self.fail(id, &format!("what was sent is no base64: {e}"), said),
            },
            ChannelInput::End => {
                if let (false, Target::Terminal { .. }) = (open.input_ended, &open.target) {
                    open.input.push_back(END_OF_TEXT);
                }
                open.input_ended = true;
            }
            ChannelInput::Size(size) => {
                if let Target::Terminal { shown, .. } = &open.target {
                    sys::resize_terminal(shown, size.columns, size.rows);
                }
            }
            ChannelInput::Room(bytes) => {
                open.room = open.room.saturating_add(bytes).min(WINDOW);
                // What there is to read is read in the channel's turn.
                if !matches!(open.target, Target::Answer) {
                    return;
                }
            }
            ChannelInput::Close => {
                self.open.remove(&id);
                return;
            }
        }
        if open.turn(|output| said(id, output)) {
            self.open.remove(&id);
        }
    }

    fn fail(&mut self, id: u64, why: &str, mut said: impl FnMut(u64, ChannelOutput)) {
        self.open.remove(&id);
        said(id, ChannelOutput::Failed(why.to_owned()));
    }

    /// A child ended; whether it was a terminal's command.
    pub fn reaped(&mut self, pid: Pid, ended: Exit, said: impl FnMut(u64, ChannelOutput)) -> bool {
        let mut found = false;
        for open in self.open.values_mut() {
            if let Target::Terminal { pid: of, exit, .. } = &mut open.target
                && *of == pid
            {
                *exit = Some(ended.code);
                found = true;
            }
        }
        if found {
            self.each(|open| matches!(open.target, Target::Terminal { exit: Some(_), .. }), said);
        }
        found
    }

    /// Closes all, and says so.
    pub fn close(&mut self, mut said: impl FnMut(u64, ChannelOutput)) {
        for id in std::mem::take(&mut self.open).into_keys() {
            said(id, ChannelOutput::Failed(OVER.to_owned()));
        }
    }
}

impl Open {
    fn new(target: Target) -> Open {
        let (input, output) = (VecDeque::new(), VecDeque::new());
        Open { target, input, input_ended: false, output, output_ended: false, room: WINDOW, place: usize::MAX }
    }

    /// Does what can be done without waiting; whether this was the last of it.
    fn turn(&mut self, mut said: impl FnMut(ChannelOutput)) -> bool {
        match self.connected() {
            Ok(false) => return false,
            Ok(true) => {}
            Err(why) => {
                said(ChannelOutput::Failed(why));
                return true;
            }
        }
        if let Target::Port { begun, .. } = &mut self.target
            && begun.take().is_some()
        {
            said(ChannelOutput::Opened);
        }
        self.write(&mut said);
        self.read(&mut said);
        let exit = match &self.target {
            Target::Terminal { exit, .. } => exit.filter(|_| self.output_ended),
            Target::Port { .. } => (self.output_ended && self.input_ended && self.input.is_empty()).then_some(0),
            Target::Answer => self.output.is_empty().then_some(0),
        };
        if let Some(code) = exit {
            said(ChannelOutput::Exit(code));
        }
        exit.is_some()
    }

    /// Whether what the channel leads to is there, or why not.
    fn connected(&mut self) -> Result<bool, String> {
        let Target::Port { stream, port, begun: begun @ Some(_) } = &mut self.target else { return Ok(true) };
        let error = match stream.take_error() {
            Ok(None) => match stream.peer_addr() {
                Ok(_) => return Ok(true),
                Err(e) if e.kind() == io::ErrorKind::NotConnected => return Ok(false),
                Err(e) => e,
            },
            Ok(Some(e)) | Err(e) => e,
        };
        let Some(next) = begun.take().flatten() else { return Err(refused(*port, &error)) };
        let (other, _) = connect(next, None).map_err(|_| refused(*port, &error))?;
        *stream = other;
        *begun = Some(None);
        Ok(false)
    }

    fn write(&mut self, said: &mut impl FnMut(ChannelOutput)) {
        let mut taken = 0;
        while !self.input.is_empty() {
            let (front, _) = self.input.as_slices();
            let written = match &mut self.target {
                Target::Terminal { shown, .. } => shown.write(front),
                Target::Port { stream, .. } => stream.write(front),
                Target::Answer => Ok(front.len()),
            };
            match written {
                Ok(n) if n > 0 => {
                    self.input.drain(..n);
                    taken += n;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // Nobody reads it any more: it is passed over, and its end shows in what is read.
                Ok(_) | Err(_) => {
                    taken += self.input.len();
                    self.input.clear();
                }
            }
        }
        if taken > 0 {
            said(ChannelOutput::Room(taken));
        }
        if let Target::Port { stream, .. } = &self.target
            && self.input_ended
            && self.input.is_empty()
        {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }

    fn read(&mut self, said: &mut impl FnMut(ChannelOutput)) {
        let mut buffer = [0; CHUNK];
        while self.room > 0 && !self.output_ended {
            let most = self.room.min(CHUNK);
            let read = match &mut self.target {
                Target::Terminal { shown, .. } => shown.read(&mut buffer[..most]),
                Target::Port { stream, .. } => stream.read(&mut buffer[..most]),
                Target::Answer => self.output.read(&mut buffer[..most]),
            };
            match read {
                Ok(n) if n > 0 => {
                    self.room -= n;
                    said(ChannelOutput::Data(STANDARD.encode(&buffer[..n])));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // A command has ended and all it wrote is read; what others still write there is not its output.
                    self.output_ended = matches!(self.target, Target::Terminal { exit: Some(_), .. });
                    break;
                }
                // A terminal on which no program is left gives EIO. What is left of the end comes with its command's.
                Ok(_) | Err(_) => {
                    self.output_ended = true;
                    if let Target::Port { .. } = self.target {
                        said(ChannelOutput::End);
                    }
                }
            }
        }
    }
}

fn connect(to: SocketAddr, next: Option<SocketAddr>) -> io::Result<(TcpStream, Option<SocketAddr>)> {
    match (sys::connect_tcp(to), next) {
        (Ok(stream), _) => Ok((TcpStream::from(stream), next)),
        (Err(_), Some(next)) => Ok((TcpStream::from(sys::connect_tcp(next)?), None)),
        (Err(e), None) => Err(e),
    }
}

/// Why a port cannot be used, for people.
fn refused(port: u16, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("nothing listens on port {port} there: start the program first, and have it listen on localhost")
        }
        _ => format!("port {port} cannot be reached there: {error}"),
    }
}

#[cfg(test)]
mod tests;
