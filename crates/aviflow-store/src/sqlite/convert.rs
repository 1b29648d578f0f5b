//! Between rows and the core's types. Rows hold JSON in the core's own form.

use super::schema::failed;
use aviflow_core::ledger::GpuState;
use aviflow_engine::ports::StoreError;
use rusqlite::types::Type;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(super) fn to_json<T: Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(failed)
}

/// Reads JSON within a row's closure.
pub(super) fn from_json<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    serde_json::from_str(text).map_err(unreadable)
}

fn unreadable(e: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(e))
}

/// The state of a name in the ledger's rows.
pub(super) fn gpu_state(name: &str) -> Result<GpuState, StoreError> {
    GpuState::ALL
        .into_iter()
        .find(|s| s.name() == name)
        .ok_or_else(|| failed(format!("the ledger has the unknown state {name:?}; restore a backup")))
}

/// SQLite's integers are signed; numbers of jobs and commits never get that far.
pub(super) fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// And back.
pub(super) fn uint(n: i64) -> u64 {
    u64::try_from(n).unwrap_or_default()
}
