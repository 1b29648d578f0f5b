//! Terminals and connections into running jobs.
//!
//! What comes out of a channel is the answer to the request that opens it; what goes in comes in requests of its own.
//! So it needs nothing that a proxy on the way may lack, and each side waits until the other has room.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Opens a channel beside a rank of a running job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OpenChannel {
    /// The rank beside which it leads; 0 if none is said.
    #[serde(default)]
    pub rank: Option<u32>,
    /// Where to.
    pub to: ChannelTo,
}

/// Where a channel leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "kind", deny_unknown_fields)]
pub enum ChannelTo {
    /// A command on a terminal of its own, with the rank's variables and folder.
    Terminal {
        /// The command and its arguments.
        argv: Vec<String>,
        /// The terminal's size.
        size: TerminalSize,
        /// The kind of terminal, for `TERM`.
        #[serde(default)]
        term: Option<String>,
    },
    /// A TCP port of the loopback address where the rank runs.
    Port {
        /// The port.
        port: u16,
    },
}

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TerminalSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// What comes out of a channel; a stream of these is newline-delimited JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum ChannelFrame {
    /// It is open. The first, unless it failed.
    Opened {
        /// Its name, for what is put into it.
        channel: String,
    },
    /// Bytes, base64.
    Data {
        /// The bytes.
        data: String,
    },
    /// There will be no more bytes.
    End,
    /// A sign of life, every 20 seconds.
    Alive,
    /// It has ended, a command with this code. The last.
    Exit {
        /// The exit code.
        code: i32,
    },
    /// It could not be opened, or broke. The last.
    Failed {
        /// Why.
        reason: String,
    },
}

/// What is put into a channel. Nothing at all is a sign of life, which a client gives every 15 seconds: without one
/// for a minute, the channel is closed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChannelInput {
    /// Bytes, base64; at most 256 KiB of them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub data: String,
    /// Whether there will be no more bytes after these.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end: bool,
    /// Whether nobody is there any more: the channel is closed at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub close: bool,
    /// The terminal's new size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
}
