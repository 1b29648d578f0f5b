//! Between rows and the core's types. Rows hold JSON in the core's own form.

use super::schema::failed;
use aviflow_core::ledger::GpuState;
use aviflow_core::model::{Job, Phase};
use aviflow_engine::ports::StoreError;
use rusqlite::types::Type;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

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

/// Reads a job.
///
/// Phases are tagged inside, and serde reads a tagged enum through a buffer in
/// which the keys of maps are text, so the ranks of `exits` would be refused.
/// The phase is therefore taken out and read by itself, without the buffer.
pub(super) fn job_from_json(text: &str) -> rusqlite::Result<Job> {
    let mut value: Value = from_json(text)?;
    let queued = serde_json::json!({ "phase": "queued" });
    let phase = value.get_mut("phase").map(|p| std::mem::replace(p, queued)).unwrap_or_default();
    let mut job: Job = serde_json::from_value(value).map_err(unreadable)?;
    job.phase = phase_from_value(phase).map_err(unreadable)?;
    Ok(job)
}

fn phase_from_value(value: Value) -> serde_json::Result<Phase> {
    let tag = value.get("phase").and_then(Value::as_str).unwrap_or_default();
    Ok(match tag {
        "starting" => Phase::Starting(serde_json::from_value(value)?),
        "running" => Phase::Running(serde_json::from_value(value)?),
        "suspending" => Phase::Suspending(serde_json::from_value(value)?),
        "stopping" => Phase::Stopping(serde_json::from_value(value)?),
        // These hold no gang.
        _ => serde_json::from_value(value)?,
    })
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
