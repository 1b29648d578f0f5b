//! What goes through a channel into a worker: a terminal, a TCP connection, the stacks of its processes.
//!
//! The control plane opens a channel with a number of its own ([`super::ToAgent::Open`]) and puts something into it
//! ([`super::ToAgent::Put`]); the agent answers with [`super::FromAgent::Channel`]. Nothing of it is durable: a
//! channel ends with the connection, and at the latest with the worker.
//!
//! Each side has room for [`WINDOW`] bytes of a channel at first, and says when it has room again, as the channels of
//! SSH do (RFC 4254, section 5.2): whoever does not read slows down whoever writes, and nobody else.

use serde::{Deserialize, Serialize};

/// The bytes of a channel that each side has room for, before encoding.
pub const WINDOW: usize = 256 << 10;

/// Bytes of a channel in one message at most, before encoding.
pub const CHUNK: usize = 32 << 10;

/// The first version whose agents know channels.
pub const CHANNELS: u32 = 3;

/// What a channel leads to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Channel {
    /// A command on a terminal of its own, with the variables and in the folder of the rank.
    #[serde(rename_all = "camelCase")]
    Terminal {
        /// The command.
        argv: Vec<String>,
        /// The terminal's size.
        size: Size,
        /// The kind of terminal, for `TERM`.
        #[serde(default)]
        term: Option<String>,
    },
    /// A TCP connection to a port of the loopback address, where the rank runs.
    #[serde(rename_all = "camelCase")]
    Port {
        /// The port.
        port: u16,
    },
    /// One JSON value, a [`super::stacks::WorkerStacks`].
    #[serde(rename_all = "camelCase")]
    Stacks {
        /// Of this rank's processes alone.
        #[serde(default)]
        rank: Option<u32>,
    },
}

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Size {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// What is put into a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChannelInput {
    /// Bytes, base64.
    Data(String),
    /// There will be no more bytes.
    End,
    /// The terminal has another size.
    Size(Size),
    /// There is room for so many more bytes of output.
    Room(usize),
    /// Nobody is at the other end any more.
    Close,
}

/// What comes out of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChannelOutput {
    /// It is open: the command runs, or the connection stands.
    Opened,
    /// Bytes, base64.
    Data(String),
    /// There will be no more bytes.
    End,
    /// There is room for so many more bytes of input.
    Room(usize),
    /// It has ended, a command with this code. The last of a channel.
    Exit(i32),
    /// It could not be opened, or broke. The last of a channel.
    Failed(String),
}
