//! The control plane's end of the agents' connections, the same for every body.
//!
//! A body starts workers and sees them end; in between, their agents connect here, whatever the
//! transport. This crate knows which workers there are, what each was told last, and says it again to
//! an agent that comes back; it hands on what agents report and acknowledges what is durable. It starts
//! nothing, ends nothing, and decides nothing.
//!
//! | module | what it is |
//! |---|---|
//! | [`roster`] | the workers, what was told them, and what the body adds ([`Site`]) |
//! | [`conversation`] | one connection, from hello to its end |
//! | `pings` | signs of life, and what they prove |
//! | [`exec`] | commands inside workers |
//! | [`channel`] | terminals, TCP connections and stacks of workers |
//! | `numbered` | what these two share: what goes on over a connection, by its number |
//!
//! Invariant: one lock guards the roster; it is never held while something is reported, written or
//! waited for.

pub mod channel;
pub mod conversation;
pub mod exec;
mod numbered;
mod pings;
pub mod roster;

pub use channel::{ChannelReader, ChannelWriter, Said};
pub use conversation::{ACROSS_A_NETWORK, Listener, listen};
pub use exec::{ExecError, ExecStream};
pub use roster::{Durable, Hello, Link, Site, State, Worker, Workers};

/// The wall clock in whole milliseconds since the Unix epoch.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
