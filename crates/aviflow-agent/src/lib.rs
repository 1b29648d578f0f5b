//! The rank supervisor of Aviflow: in every worker an agent, and its guardian as process 1.
//!
//! | module | what it is |
//! |---|---|
//! | [`protocol`] | what an agent and the control plane say to each other |
//! | [`machine`] | the one state machine: inputs to outputs, no clock, no process, no socket |
//! | [`training`] | what a training's words mean: progress, events, the highest step |
//! | [`wiring`] | the variables that tie a rank to its gang |
//! | [`output`] | progress in the usual output of training programs |
//! | [`tensorboard`] | scalars in event files |
//! | [`checkpoints`] | checkpoints that are recognised on disk |
//! | [`faults`] | why a rank ended |
//! | [`log`], [`spool`] | the stream of stamped lines, and how it waits on disk |
//! | [`driver`] | carries out what the machine says, in one poll loop |
//! | [`link`], [`peers`], [`hooks`], [`ranks`], [`exec`] | what the loop waits for: the control plane, peers, the hooks, ranks, commands |
//! | [`watch`] | looks at the folders of a training, in a thread |
//! | [`notice`] | looks at what the kernel says, in another thread |
//! | [`kernel`], [`infiniband`], [`cgroup`] | what the kernel says of GPUs, links and memory |
//! | [`channels`] | terminals and TCP connections into the worker |
//! | [`stacks`] | what every process is doing: Python's stacks and the kernel's view |
//! | [`process`], [`mod@sweep`], [`guardian`] | starting processes, and leaving none behind |
//! | [`folder`] | the files of a worker, and a port |
//! | [`devices`] | which GPUs its container got |
//! | [`sys`] | system calls; the only unsafe code |
//!
//! Those before [`driver`] decide, and are pure but for the spool's folder; the others act and decide nothing.
//! Invariant: nothing in this crate knows of jobs, queues or plans.

pub mod cgroup;
pub mod channels;
pub mod checkpoints;
pub mod devices;
pub mod driver;
pub mod exec;
pub mod faults;
pub mod folder;
pub mod guardian;
pub mod hooks;
pub mod infiniband;
pub mod kernel;
pub mod link;
pub mod log;
pub mod machine;
pub mod notice;
pub mod output;
pub mod peers;
pub mod pinned;
pub mod process;
pub mod protocol;
pub mod ranks;
pub mod spool;
pub mod stacks;
pub mod sweep;
pub mod sys;
pub mod tensorboard;
pub mod training;
pub mod watch;
pub mod wiring;

pub use folder::{Alive, LOCK_FD, find_ended, read_ended};
pub use guardian::{LOST as GUARDIAN_LOST, run};
pub use spool::left_behind;
pub use sweep::{mark, sweep};
pub use wiring::RESERVED;
