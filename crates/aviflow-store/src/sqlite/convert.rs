//! JSON of SQLite's rows.

use rusqlite::types::Type;
use serde::de::DeserializeOwned;

/// Reads JSON within a row's closure.
pub(super) fn from_json<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    serde_json::from_str(text).map_err(unreadable)
}

/// JSON that is not what it should be.
pub(super) fn unreadable(e: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(e))
}
