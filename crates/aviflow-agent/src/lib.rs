//! The rank supervisor of Aviflow: in every worker an agent, and its guardian as process 1.
//!
//! | module | what it is |
//! |---|---|
//! | [`protocol`] | what an agent and the control plane say to each other |
//! | [`machine`] | the one state machine: inputs to outputs, no clock, no process, no socket |
//! | [`training`] | what a training's words mean: progress, events, the highest step |
//! | [`wiring`] | the variables that tie a rank to its gang |
//! | [`output`] | progress in the usual output of training programs |
//! | [`log`], [`spool`] | the stream of stamped lines, and how it waits on disk |
//! | [`driver`] | carries out what the machine says, in one poll loop |
//! | [`link`], [`peers`], [`hooks`], [`ranks`], [`exec`] | what the loop waits for: the control plane, peers, the hooks, ranks, commands |
//! | [`process`], [`mod@sweep`], [`guardian`] | starting processes, and leaving none behind |
//! | [`folder`] | the files of a worker, and a port |
//! | [`devices`] | which GPUs its container got |
//! | [`sys`] | system calls; the only unsafe code |
//!
//! The first six decide and are pure; the others act and decide nothing.
//! Invariant: nothing in this crate knows of jobs, queues or plans.

pub mod devices;
pub mod driver;
pub mod exec;
pub mod folder;
pub mod guardian;
pub mod hooks;
pub mod link;
pub mod log;
pub mod machine;
pub mod output;
pub mod peers;
pub mod pinned;
pub mod process;
pub mod protocol;
pub mod ranks;
pub mod spool;
pub mod sweep;
pub mod sys;
pub mod training;
pub mod wiring;

pub use folder::{Alive, LOCK_FD, find_ended, read_ended};
pub use guardian::{LOST as GUARDIAN_LOST, run};
pub use spool::left_behind;
pub use sweep::{mark, sweep};
pub use wiring::RESERVED;
