//! The driver loop of Aviflow, its ports, and the simulator.
//!
//! - [`ports`]: what the engine needs: a cluster and a store
//! - [`telemetry`]: logs and metrics, which stay outside of the loop
//! - [`engine`]: inputs in, one transaction, orders out; no thread and no clock
//! - [`driver`]: the thread around it, and the handle that others hold
//! - [`meter`]: what is counted of it for monitoring
//! - [`watcher`]: the watch over running gangs; no thread and no clock either
//! - [`memory`]: the store port in memory
//! - [`sim`]: the engine on a virtual clock with a cluster that fails

pub mod driver;
pub mod engine;
pub mod memory;
pub mod meter;
pub mod ports;
pub mod sim;
pub mod telemetry;
pub mod watcher;
