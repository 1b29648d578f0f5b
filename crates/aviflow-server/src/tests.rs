//! The server on a real engine, store and telemetry, with a cluster that does what a test says.

mod access;
mod channels;
mod content;
mod follow;
mod jobs;
mod metrics;
mod observed;
mod pool;
mod rights;
pub(crate) mod support;
mod top;
