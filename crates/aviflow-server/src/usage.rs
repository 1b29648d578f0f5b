//! Reports of GPU time.

use crate::app::{App, blocking};
use crate::error::Failure;
use crate::jobs::ms_of;
use crate::params::{Values, instant};
use aviflow_api::rest::{Usage, UsageRow};
use aviflow_core::time::{Span, Time};
use aviflow_store::usage::By;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The period, where the client does not say.
const PERIOD: Span = Span::minutes(24 * 60);

/// What a report is of.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct UsageQuery {
    from: Option<String>,
    to: Option<String>,
    by: Option<String>,
}

pub(crate) async fn usage(
    State(app): State<Arc<App>>,
    Values(query): Values<UsageQuery>,
) -> Result<Json<Usage>, Failure> {
    blocking(move || report(&app, &query).map(Json)).await
}

/// The period that a query says.
pub(crate) fn period(from: &Option<String>, to: &Option<String>, now: Time) -> Result<(Time, Time), Failure> {
    let at = |field: &str, value: &Option<String>, default: Time| {
        value.as_deref().map_or(Ok(default), |text| instant(field, text, now))
    };
    let (from, to) = (at("from", from, now - PERIOD)?, at("to", to, now)?);
    if from > to {
        return Err(Failure::bad("`from` is later than `to`"));
    }
    Ok((from, to))
}

fn report(app: &App, query: &UsageQuery) -> Result<Usage, Failure> {
    let now = app.view(|view| view.now)?;
    let (from, to) = period(&query.from, &query.to, now)?;
    let by = query.by.as_deref().unwrap_or("user");
    let wanted = match by {
        "user" => By::User,
        "queue" => By::Queue,
        "job" => By::Job,
        "state" => By::State,
        _ => {
            return Err(
                Failure::bad(format!("there is no report by `{by}`")).help("write `user`, `queue`, `job` or `state`")
            );
        }
    };
    // Closed and open intervals come from one transaction of the store: every
    // GPU is then in exactly one of them at every instant.
    let usage = app.parts.reader.usage(from, to, now, wanted)?;
    let mut rows: BTreeMap<String, BTreeMap<String, i128>> = BTreeMap::new();
    for row in usage.rows {
        let states = rows.entry(row.key.unwrap_or_else(|| "-".to_owned())).or_default();
        for (state, ms) in row.gpu_ms {
            *states.entry(state.name().to_owned()).or_default() += ms;
        }
    }
    let row = |(key, states): (String, BTreeMap<String, i128>)| UsageRow {
        key,
        total: ms_of(states.values().sum()),
        states: states.into_iter().map(|(state, ms)| (state, ms_of(ms))).collect(),
    };
    Ok(Usage {
        from: usage.from.0,
        to: usage.to.0,
        by: by.to_owned(),
        capacity: ms_of(usage.capacity),
        rows: rows.into_iter().map(row).collect(),
    })
}
