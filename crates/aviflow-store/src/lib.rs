//! What Aviflow keeps.
//!
//! - [`sqlite`]: the store port: states, ledger, moments and journal in one SQLite file
//! - [`postgres`]: the same in a PostgreSQL database
//! - [`read`], [`usage`]: what is read beside the writer, the same for both
//! - [`objects`]: code snapshots and locks, by their content
//! - [`telemetry`]: logs and series, as files beside the store
//! - [`contract`]: what every store must do, as tests
//!
//! Nothing here decides anything, and nothing here reads the clock, except for
//! the age of objects, which is the file system's.

#[cfg(any(test, feature = "contract"))]
pub mod contract;
mod convert;
pub mod objects;
pub mod postgres;
pub mod read;
mod settings;
pub mod sqlite;
pub mod telemetry;
pub mod usage;

pub use objects::Objects;
pub use postgres::PostgresStore;
pub use read::{Keeper, Reader};
pub use sqlite::SqliteStore;
pub use telemetry::{FileTelemetry, RankSeen};
