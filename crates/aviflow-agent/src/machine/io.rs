//! What goes into the machine, and what comes out.

use crate::checkpoints::Sighting;
use crate::hooks::Message;
use crate::output::names::Values;
use crate::protocol::{Channel, ChannelInput, ChannelOutput, Ended, ExecOutput, FromAgent, Sign, ToAgent};
use crate::sys::Exit;
use crate::wiring::Launch;
use std::net::SocketAddr;

/// Lines of output that are told with a rank's end.
pub const LAST_LINES: usize = 20;

/// The longest of the lines that are told with a rank's end, in bytes.
const LAST_LINE_BYTES: usize = 1024;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A connection to the control plane is open; a port that is free here, and the log that is on disk.
    Opened {
        /// For rank 0.
        port: u16,
        /// On which peers are answered; 0 if they are not.
        peer_port: u16,
        /// From the first byte to one past the last.
        log: (u64, u64),
    },
    /// The connection is gone.
    Closed,
    /// The control plane said something.
    Message(ToAgent),
    /// The ranks were started.
    Spawned,
    /// They were not, as [`super::Machine::wants_ranks`] was false by then.
    NotSpawned,
    /// They were not, and none is left.
    SpawnFailed {
        /// Why.
        reason: String,
    },
    /// A rank ended, and its output has been read.
    Exited {
        /// Which.
        rank: u32,
        /// How.
        exit: Exit,
        /// What torchrun left in the error file.
        error: Vec<String>,
        /// Whether the kernel killed a process of the worker's memory group since the ranks started.
        oom_kill: bool,
    },
    /// Answer to [`Output::Sweep`].
    Swept {
        /// Processes that were still there.
        left: usize,
        /// The node's clock.
        unix_ms: i64,
        /// One past the last byte of log.
        log_end: u64,
        /// A port that is free here, for rank 0 of another epoch; 0 where there is none.
        port: u16,
    },
    /// Something was noticed that the machine does not judge.
    Noticed {
        /// What.
        sign: Sign,
        /// How long ago, in milliseconds.
        ago_ms: u64,
    },
    /// A hook spoke.
    Hook {
        /// For this rank.
        rank: u32,
        /// What.
        message: Message,
    },
    /// A checkpoint was seen on disk.
    Sighted {
        /// What was seen.
        sighting: Sighting,
        /// How long ago it came to be so, in milliseconds.
        ago_ms: u64,
    },
    /// An event file of a rank has values of a step.
    Scalars {
        /// The rank.
        rank: u32,
        /// The step.
        step: u64,
        /// The values.
        values: Values,
        /// How long ago they were written, in milliseconds.
        ago_ms: u64,
    },
    /// A rank wrote a line.
    Line {
        /// Which.
        rank: u32,
        /// The line.
        text: String,
    },
    /// A command said something.
    Exec {
        /// Which.
        id: u64,
        /// What.
        output: ExecOutput,
    },
    /// Something came out of a channel.
    Channel {
        /// Which.
        id: u64,
        /// What.
        output: ChannelOutput,
    },
    /// Answer to [`Output::Ask`].
    Asked {
        /// Who did not answer, or is in touch with the control plane; none if all answered and nobody is.
        missing: Option<String>,
    },
    /// Somebody asked the agent to end (SIGTERM, SIGINT).
    Terminated,
    /// The time of [`super::Machine::next_timer`] came.
    Timer,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send to the control plane.
    Send(FromAgent),
    /// Close the connection, and try again later.
    Disconnect,
    /// Ask all these peers, see [`crate::peers`]; answered by [`Input::Asked`].
    Ask {
        /// By worker.
        peers: Vec<(u32, SocketAddr)>,
        /// How long they have, in milliseconds.
        within_ms: u64,
    },
    /// Start all ranks; answered by [`Input::Spawned`] or [`Input::SpawnFailed`].
    Spawn(Launch),
    /// Signal a rank's process group.
    Signal {
        /// Which.
        rank: u32,
        /// SIGTERM or SIGKILL.
        signal: Signal,
    },
    /// Signal every process of the worker that no rank's process group holds, and count all that live; answered by [`Input::Swept`].
    Sweep(Option<Signal>),
    /// Tell the hooks that a stop began, or that there is none.
    TellHooks(Option<String>),
    /// A line of the agent in the log.
    Note(String),
    /// Ship the log from this offset on.
    ShipFrom(u64),
    /// Log before this offset may go.
    LogDurable(u64),
    /// Run a command with a rank's variables.
    Exec {
        /// Its number.
        id: u64,
        /// The rank.
        rank: u32,
        /// The command.
        argv: Vec<String>,
        /// Its input, base64.
        stdin: String,
    },
    /// End a command.
    ExecKill(u64),
    /// Open a channel beside a rank.
    Open {
        /// Its number.
        id: u64,
        /// The rank.
        rank: u32,
        /// Where to.
        channel: Channel,
    },
    /// Put something into a channel.
    Put {
        /// Which.
        id: u64,
        /// What.
        input: ChannelInput,
    },
    /// End all commands and channels.
    ExecKillAll,
    /// Write `ended.json`.
    WriteEnded(Ended),
    /// Remove it: a newer epoch begins.
    RemoveEnded,
    /// End the agent; with `clean`, remove the log and the socket before.
    Exit {
        /// Whether nobody needs what is on disk any more.
        clean: bool,
    },
}

/// A signal that ends processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Politely.
    Term,
    /// At once.
    Kill,
}

/// How a process ended, for the log.
pub(super) fn how(exit: Exit) -> String {
    match exit.signal {
        Some(signal) => format!("was ended by signal {signal}"),
        None => format!("ended with {}", exit.code),
    }
}

/// The beginning of a line, as far as a report keeps it.
pub(super) fn tail_line(text: &str) -> String {
    let mut end = text.len().min(LAST_LINE_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
