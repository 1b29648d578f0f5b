//! Environments that jobs may name.

use crate::app::{App, blocking};
use crate::body::CatalogueEntry;
use crate::error::Failure;
use crate::params::Name;
use aviflow_api::rest::EnvironmentInfo;
use aviflow_api::suggest::nearest;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;

fn info(app: &App, entry: &CatalogueEntry, with_lock: bool) -> EnvironmentInfo {
    EnvironmentInfo {
        name: entry.name.clone(),
        version: entry.version,
        hash: entry.hash.clone(),
        description: entry.description.clone(),
        python: entry.python.clone(),
        env: entry.env.clone(),
        lock: with_lock.then(|| entry.lock.clone()),
        ready: app.parts.body.environment_ready(&entry.hash),
    }
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<Vec<EnvironmentInfo>>, Failure> {
    blocking(move || Ok(Json(app.parts.environments.iter().map(|e| info(&app, e, false)).collect()))).await
}

pub(crate) async fn one(State(app): State<Arc<App>>, Name(wanted): Name) -> Result<Json<EnvironmentInfo>, Failure> {
    blocking(move || {
        let entry = find(&app.parts.environments, &wanted)?;
        Ok(Json(info(&app, entry, true)))
    })
    .await
}

/// `name@version`, or the newest version of `name`.
fn find<'a>(catalogue: &'a [CatalogueEntry], wanted: &str) -> Result<&'a CatalogueEntry, Failure> {
    let (name, version) = match wanted.split_once('@') {
        None => (wanted, None),
        Some((name, version)) => match version.parse::<u32>() {
            Ok(version) => (name, Some(version)),
            Err(_) => return Err(Failure::bad(format!("`{version}` is no version; write `{name}@1`"))),
        },
    };
    let named = || catalogue.iter().filter(|e| e.name == name);
    let found = named().filter(|e| version.is_none_or(|v| v == e.version)).max_by_key(|e| e.version);
    found.ok_or_else(|| {
        let versions: Vec<String> = named().map(|e| format!("`{name}@{}`", e.version)).collect();
        let failure = Failure::not_found("noSuchEnvironment", format!("there is no environment `{wanted}`"));
        match nearest(name, catalogue.iter().map(|e| e.name.as_str())) {
            Some(_) if !versions.is_empty() => failure.help(format!("there are: {}", versions.join(", "))),
            Some(similar) => failure.help(format!("did you mean `{similar}`? `aviflow env ls` lists all")),
            None => failure.help("`aviflow env ls` lists all"),
        }
    })
}
