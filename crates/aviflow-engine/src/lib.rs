//! The driver loop of Aviflow, its ports, and the simulator.
//!
//! - [`ports`]: what the engine needs: a cluster and a store
//! - [`telemetry`]: logs and metrics, which stay outside of the loop

pub mod ports;
pub mod telemetry;
