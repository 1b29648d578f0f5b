//! Environments that jobs may name: those of the cluster's objects, or those that this program brings along.

use crate::app::{App, blocking};
use crate::body::CatalogueEntry;
use crate::error::Failure;
use crate::params::Name;
use aviflow_api::environment::{Candidate, choose};
use aviflow_api::rest::EnvironmentInfo;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::sync::Arc;

fn info(app: &App, entry: &CatalogueEntry) -> EnvironmentInfo {
    EnvironmentInfo {
        name: entry.name.clone(),
        version: entry.version,
        hash: entry.hash.clone(),
        description: entry.description.clone(),
        python: entry.python.clone(),
        env: entry.env.clone(),
        image: None,
        prefix: Vec::new(),
        deprecated: None,
        lock: Some(entry.lock.clone()),
        ready: app.parts.body.environment_ready(&entry.hash),
    }
}

/// All of them.
fn all(app: &App) -> Result<Vec<EnvironmentInfo>, Failure> {
    match app.parts.body.environments() {
        Some(Ok(kept)) => Ok(kept),
        Some(Err(why)) => {
            let message = format!("the cluster's environments cannot be read: {why}");
            Err(Failure::new(StatusCode::BAD_GATEWAY, "clusterUnreachable", message))
        }
        None => Ok(app.parts.environments.iter().map(|e| info(app, e)).collect()),
    }
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<Vec<EnvironmentInfo>>, Failure> {
    blocking(move || {
        let without_lock = |e| EnvironmentInfo { lock: None, ..e };
        Ok(Json(all(&app)?.into_iter().map(without_lock).collect()))
    })
    .await
}

pub(crate) async fn one(State(app): State<Arc<App>>, Name(wanted): Name) -> Result<Json<EnvironmentInfo>, Failure> {
    blocking(move || {
        let all = all(&app)?;
        let found = choose(&all, &wanted, candidate).map_err(Failure::of_choice)?;
        Ok(Json(found.clone()))
    })
    .await
}

fn candidate(environment: &EnvironmentInfo) -> Candidate<'_> {
    let EnvironmentInfo { name, version, deprecated, .. } = environment;
    Candidate { name, version: *version, deprecated: deprecated.as_deref() }
}
