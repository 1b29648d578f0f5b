//! Between PostgreSQL's values and the core's.
//!
//! PostgreSQL's text cannot hold the character NUL, and people's words may. It is
//! written as `\u{1}0`, and `\u{1}` itself as `\u{1}1`: what is equal stays equal.
//! JSON has both escaped already, so it is stored as it is.

use crate::convert::failed;
use aviflow_engine::ports::StoreError;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};

/// A parameter of a statement. Lists become arrays, of which `unnest` makes rows.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Int(i64),
    Text(Option<String>),
    Ints(Vec<i64>),
    OptInts(Vec<Option<i64>>),
    Texts(Vec<String>),
    OptTexts(Vec<Option<String>>),
}

impl Value {
    pub(super) fn text(text: &str) -> Value {
        Value::Text(Some(escape(text).into_owned()))
    }

    pub(super) fn opt_text(text: Option<&str>) -> Value {
        Value::Text(text.map(|t| escape(t).into_owned()))
    }

    pub(super) fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
        Value::Texts(texts.into_iter().map(|t| escape(t).into_owned()).collect())
    }

    pub(super) fn opt_texts<'a>(texts: impl IntoIterator<Item = Option<&'a str>>) -> Value {
        Value::OptTexts(texts.into_iter().map(|t| Some(escape(t?).into_owned())).collect())
    }

    fn sql(&self) -> (&(dyn ToSql + Sync), Type) {
        match self {
            Value::Int(v) => (v, Type::INT8),
            Value::Text(v) => (v, Type::TEXT),
            Value::Ints(v) => (v, Type::INT8_ARRAY),
            Value::OptInts(v) => (v, Type::INT8_ARRAY),
            Value::Texts(v) => (v, Type::TEXT_ARRAY),
            Value::OptTexts(v) => (v, Type::TEXT_ARRAY),
        }
    }
}

/// As tokio-postgres takes parameters.
pub(super) fn params(values: &[Value]) -> Vec<(&(dyn ToSql + Sync), Type)> {
    values.iter().map(Value::sql).collect()
}

fn escape(text: &str) -> Cow<'_, str> {
    if text.contains(['\u{0}', '\u{1}']) {
        Cow::Owned(text.replace('\u{1}', "\u{1}1").replace('\u{0}', "\u{1}0"))
    } else {
        Cow::Borrowed(text)
    }
}

fn unescape(text: &str) -> String {
    text.replace("\u{1}0", "\u{0}").replace("\u{1}1", "\u{1}")
}

/// A column of a row.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, StoreError> {
    row.try_get(index).map_err(|e| failed(format!("a row of the store cannot be read ({e}); restore a backup")))
}

pub(super) fn text(row: &Row, index: usize) -> Result<String, StoreError> {
    Ok(unescape(get(row, index)?))
}

pub(super) fn opt_text(row: &Row, index: usize) -> Result<Option<String>, StoreError> {
    Ok(get::<Option<&str>>(row, index)?.map(unescape))
}

pub(super) fn json<T: DeserializeOwned>(row: &Row, index: usize) -> Result<T, StoreError> {
    serde_json::from_str(get(row, index)?).map_err(unreadable)
}

pub(super) fn unreadable(e: serde_json::Error) -> StoreError {
    failed(format!("a document of the store cannot be read ({e}); restore a backup"))
}

/// A number that is stored as `int8` and is 32 bits wide.
pub(super) fn small(row: &Row, index: usize) -> Result<u32, StoreError> {
    let number: i64 = get(row, index)?;
    u32::try_from(number).map_err(|_| failed(format!("the store has the number {number}; restore a backup")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_comes_back_and_no_two_become_one() {
        let odd = ["", "a", "\u{0}", "\u{1}", "\u{1}0", "\u{1}1", "\u{0}\u{1}", "\u{1}\u{0}", "\u{1}\u{1}0", "ü\u{0}0"];
        let mut seen = std::collections::BTreeSet::new();
        for text in odd {
            let stored = escape(text).into_owned();
            assert!(!stored.contains('\u{0}'), "{text:?}");
            assert_eq!(unescape(&stored), text, "{stored:?}");
            assert!(seen.insert(stored), "{text:?}");
        }
    }
}
