//! What Aviflow keeps on disk.
//!
//! - [`sqlite`]: the store port: states, ledger, moments and journal in one SQLite file
//! - [`objects`]: code snapshots and locks, by their content
//! - [`telemetry`]: logs and series, as files beside the store
//! - [`contract`]: what every store must do, as tests
//!
//! Nothing here decides anything, and nothing here reads the clock, except for
//! the age of objects, which is the file system's.

#[cfg(any(test, feature = "contract"))]
pub mod contract;
pub mod objects;
pub mod sqlite;
pub mod telemetry;

pub use objects::Objects;
pub use sqlite::{Keeper, Reader, SqliteStore};
pub use telemetry::FileTelemetry;
