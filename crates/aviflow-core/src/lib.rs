//! The decisions of Aviflow as pure functions.
//!
//! This crate answers who runs where, what an event does to a job, what is wrong
//! with a gang, who owned each GPU at each millisecond, and why a job waits. It never does anything:
//! no input or output, no clock, no threads, no randomness, no logging. Time
//! and money are integers, maps are ordered, ties are broken explicitly, so the
//! same snapshot gives the same answer on every machine.
//!
//! - [`model`]: nodes, queues, jobs, gangs, and the [`Snapshot`](model::Snapshot) they form
//! - [`lifecycle`]: `step(job, event) -> (job, effects)`
//! - [`schedule`]: `plan(&snapshot, &mut memo, now) -> Plan`
//! - [`health`]: what is wrong with a running gang, who is the culprit, and what is done about it
//! - [`ledger`]: the account of GPU time
//! - [`explain`]: the words for verdicts, failures and moments
//! - [`lint`]: the invariants, checked over a snapshot

pub mod explain;
pub mod fixed;
pub mod gpus;
pub mod health;
pub mod ledger;
pub mod lifecycle;
pub mod lint;
pub mod model;
pub mod schedule;
pub mod time;
