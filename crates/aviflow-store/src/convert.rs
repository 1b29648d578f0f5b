//! Between rows and the core's types, as every store has them. Rows hold JSON in the core's own form.

use aviflow_core::ledger::GpuState;
use aviflow_engine::ports::{ActKind, StoreError};
use serde::Serialize;

pub(crate) fn failed(e: impl ToString) -> StoreError {
    StoreError::Failed(e.to_string())
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(failed)
}

/// The state of a name in the ledger's rows.
pub(crate) fn gpu_state(name: &str) -> Result<GpuState, StoreError> {
    GpuState::ALL
        .into_iter()
        .find(|s| s.name() == name)
        .ok_or_else(|| failed(format!("the ledger has the unknown state {name:?}; restore a backup")))
}

/// The kind of a name in the rows of acts.
pub(crate) fn act_kind(name: &str) -> Result<ActKind, StoreError> {
    ActKind::ALL
        .into_iter()
        .find(|k| k.name() == name)
        .ok_or_else(|| failed(format!("an act is of the unknown kind {name:?}; restore a backup")))
}

/// SQL's integers are signed; numbers of jobs and commits never get that far.
pub(crate) fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// And back.
pub(crate) fn uint(n: i64) -> u64 {
    u64::try_from(n).unwrap_or_default()
}
