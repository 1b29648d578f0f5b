//! Reading requests: JSON bodies and values of a query, with errors that name the place.

use crate::error::Failure;
use aviflow_api::duration::Duration;
use aviflow_core::time::Time;
use axum::body::{Body, to_bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;

/// The largest JSON body. A document has at most 1 MiB; what comes beside it is small.
const MAX_JSON: usize = 4 << 20;

/// A JSON body.
pub(crate) struct Input<T>(pub(crate) T);

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Input<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Input<T>, Failure> {
        let bytes = read(request.into_body(), MAX_JSON).await?;
        json(&bytes).map(Input)
    }
}

async fn read(body: Body, limit: usize) -> Result<axum::body::Bytes, Failure> {
    to_bytes(body, limit).await.map_err(|e| {
        use std::error::Error;
        let over = e.source().is_some_and(|s| s.to_string().contains("length limit"));
        if over {
            Failure::too_large(format!("the request has more than {limit} bytes, which is the limit"))
                .help("code and data are no part of it: upload them as objects")
        } else {
            Failure::bad(format!("the request ended early: {e}"))
        }
    })
}

fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        // A text that ends early or is no JSON has no path.
        let place = if path == "." || path.contains('?') { String::new() } else { format!("at `{path}`: ") };
        Failure::bad(format!("the request cannot be read: {place}{}", e.inner()))
            .help("GET /openapi.json describes what is expected")
    })?;
    reader.end().map_err(|e| Failure::bad(format!("after the request's JSON value there is more: {e}")))?;
    Ok(value)
}

/// The values of a query. What is not known is an error, so that a typing mistake is no silent default.
pub(crate) struct Values<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Values<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Values<T>, Failure> {
        let rejected = |e: QueryRejection| Failure::bad(format!("the query cannot be read: {}", e.body_text()));
        let Query(values) = Query::<T>::from_request_parts(parts, state).await.map_err(rejected)?;
        Ok(Values(values))
    }
}

/// The one parameter of a path.
pub(crate) struct Name(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Name, Failure> {
        let rejected = |e: PathRejection| Failure::bad(format!("the path cannot be read: {}", e.body_text()));
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(rejected)?;
        Ok(Name(name))
    }
}

/// An instant in milliseconds, or a duration ago.
pub(crate) fn instant(field: &str, text: &str, now: Time) -> Result<Time, Failure> {
    if let Ok(ms) = text.parse::<i64>() {
        return Ok(Time(ms));
    }
    match text.parse::<Duration>() {
        Ok(Duration(span)) => Ok(now - span),
        Err(_) => Err(Failure::bad(format!("`{field}={text}` is no time"))
            .help("give milliseconds since the Unix epoch, or a duration ago such as `10m` or `7d`")),
    }
}

/// Numbers and ranges of them: `0,3-5`.
pub(crate) fn ranks(text: &str) -> Result<BTreeSet<u32>, Failure> {
    const MOST: u32 = 1 << 20;
    let wrong = || {
        Failure::bad(format!("`rank={text}` names no ranks")).help("write numbers and ranges of them, such as `0,3-5`")
    };
    let mut all = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |n: &str| n.trim().parse::<u32>().ok().filter(|n| *n < MOST).ok_or_else(wrong);
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong());
        }
        all.extend(first..=last);
    }
    Ok(all)
}

/// `true` and `false`, and a bare word as `true`: `?follow`.
pub(crate) fn flag<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.as_str() {
        "" | "true" | "1" => Ok(Some(true)),
        "false" | "0" => Ok(Some(false)),
        _ => Err(serde::de::Error::custom(format!("`{text}` is neither `true` nor `false`"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_instants_are_read_and_refused() {
        assert_eq!(ranks("0,3-5").unwrap(), BTreeSet::from([0, 3, 4, 5]));
        for wrong in ["", "a", "5-3", "0,", "-1", "0-99999999"] {
            assert!(ranks(wrong).is_err(), "{wrong}");
        }
        let now = Time(1_000_000);
        assert_eq!(instant("since", "10m", now).unwrap(), Time(400_000));
        assert_eq!(instant("since", "17", now).unwrap(), Time(17));
        assert!(instant("since", "soon", now).is_err());
    }

    #[test]
    fn an_error_in_json_names_its_place() {
        #[derive(Debug, Deserialize)]
        struct Inner {
            #[serde(rename = "n")]
            _n: u32,
        }
        #[derive(Debug, Deserialize)]
        struct Outer {
            #[serde(rename = "inner")]
            _inner: Inner,
        }
        let message = |text: &str| json::<Outer>(text.as_bytes()).unwrap_err().error.message;
        insta::assert_snapshot!(message("{\"inner\": {\"n\": \"x\"}}"));
        insta::assert_snapshot!(message("{\"inner\": {\"n\": 1}"));
        insta::assert_snapshot!(message("{\"inner\": {\"n\": 1}} x"));
    }
}
