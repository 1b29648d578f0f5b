//! What there is one of, kept as JSON under a name: the policy, what is remembered of ended jobs, the drains.

use crate::convert::to_json;
use aviflow_core::model::Snapshot;
use aviflow_engine::ports::{Batch, StoreError};

const POLICY: &str = "policy";
const HISTORY: &str = "history";
const DRAINS: &str = "drains";
const QUARANTINES: &str = "quarantines";

/// Those that a batch changes.
pub(crate) fn changed(batch: &Batch) -> Result<Vec<(&'static str, String)>, StoreError> {
    let all = [
        (POLICY, batch.policy.as_ref().map(to_json)),
        (HISTORY, batch.history.as_ref().map(to_json)),
        (DRAINS, batch.drains.as_ref().map(to_json)),
        (QUARANTINES, batch.quarantines.as_ref().map(to_json)),
    ];
    all.into_iter().filter_map(|(name, value)| Some(value?.map(|value| (name, value)))).collect()
}

/// Puts one where it belongs.
pub(crate) fn put(snapshot: &mut Snapshot, name: &str, value: &str) -> serde_json::Result<()> {
    match name {
        POLICY => snapshot.policy = serde_json::from_str(value)?,
        HISTORY => snapshot.history = serde_json::from_str(value)?,
        DRAINS => snapshot.drains = serde_json::from_str(value)?,
        QUARANTINES => snapshot.quarantines = serde_json::from_str(value)?,
        // Of a later version, which this one would have refused.
        _ => {}
    }
    Ok(())
}
