//! Which function answers which route.

use crate::app::App;
use crate::auth::guard;
use crate::error::Failure;
use crate::list::{ListQuery, list};
use crate::params::Values;
use crate::{
    changes, documents, drains, environments, exec, files, follow, history, jobs, logs, metrics, objects, observed,
    pool, submit, usage,
};
use aviflow_api::openapi;
use aviflow_api::rest::JobList;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get, head, post, put};
use axum::{Json, Router};
use std::sync::Arc;

/// One path with its methods.
pub(crate) type Handled = (&'static str, &'static [&'static str], MethodRouter<Arc<App>>);

/// The routes that need a token.
pub(crate) fn closed() -> Vec<Handled> {
    vec![
        ("/v1/server", &["GET"], get(pool::server)),
        ("/v1/server/stop", &["POST"], post(pool::stop)),
        ("/v1/server/actions", &["POST"], post(pool::server_action)),
        ("/v1/jobs", &["GET", "POST"], get(jobs_list).post(submit::submit)),
        ("/v1/plan", &["POST"], post(submit::what_if)),
        ("/v1/jobs/{name}", &["GET"], get(jobs::get)),
        ("/v1/jobs/{name}/logs", &["GET"], get(logs::logs)),
        ("/v1/jobs/{name}/series", &["GET"], get(jobs::series)),
        ("/v1/jobs/{name}/timeline", &["GET"], get(jobs::timeline)),
        ("/v1/jobs/{name}/events", &["GET"], get(follow::events)),
        ("/v1/jobs/{name}/files", &["GET"], get(files::files)),
        ("/v1/jobs/{name}/actions", &["POST"], post(jobs::act)),
        ("/v1/jobs/{name}/exec", &["POST"], post(exec::exec)),
        ("/v1/objects/{sha256}", &["HEAD", "PUT"], head(objects::head).merge(put(objects::put))),
        ("/v1/observed", &["GET"], get(observed::observed)),
        ("/v1/nodes", &["GET"], get(pool::nodes)),
        ("/v1/nodes/{name}", &["GET"], get(pool::node)),
        ("/v1/nodes/{name}/actions", &["POST"], post(pool::node_action)),
        ("/v1/queues", &["GET"], get(pool::queues)),
        ("/v1/queues/{name}", &["GET", "PUT"], get(documents::queue).put(documents::put_queue)),
        ("/v1/queues/{name}/actions", &["POST"], post(documents::queue_action)),
        ("/v1/pools", &["GET"], get(pool::pools)),
        ("/v1/pools/{name}", &["GET", "PUT"], get(documents::pool).put(documents::put_pool)),
        ("/v1/pools/{name}/actions", &["POST"], post(documents::pool_action)),
        ("/v1/policy", &["GET", "PUT"], get(documents::policy).put(documents::put_policy)),
        ("/v1/drains", &["GET", "POST"], get(drains::drains).post(drains::drain)),
        ("/v1/drains/{name}/actions", &["POST"], post(drains::drain_action)),
        ("/v1/acts", &["GET"], get(drains::acts)),
        ("/v1/environments", &["GET"], get(environments::list)),
        ("/v1/environments/{name}", &["GET"], get(environments::one)),
        ("/v1/usage", &["GET"], get(usage::usage)),
        ("/v1/history", &["GET"], get(history::history)),
        ("/v1/events", &["GET"], get(changes::events)),
        ("/v1/agents", &["GET"], get(pool::agents)),
        ("/metrics", &["GET"], get(metrics::metrics)),
    ]
}

/// The routes that anybody on this machine may ask.
pub(crate) fn open() -> Vec<Handled> {
    vec![("/openapi.json", &["GET"], get(document)), ("/healthz", &["GET"], get(health))]
}

pub(crate) fn router(app: &Arc<App>) -> Router {
    let all = |routes: Vec<Handled>| {
        let add = |router: Router<Arc<App>>, (path, _, methods)| router.route(path, methods);
        routes.into_iter().fold(Router::new(), add)
    };
    all(closed())
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), observed::looking))
        .layer(from_fn_with_state(app.clone(), guard))
        .merge(all(open()))
        // Bodies are limited where they are read, each by what it may be.
        .layer(DefaultBodyLimit::disable())
        .with_state(app.clone())
}

async fn nowhere(request: Request) -> Failure {
    Failure::not_found("noSuchRoute", format!("there is nothing at `{}`", request.uri().path()))
        .help("GET /openapi.json describes what there is")
}

async fn wrong_method(request: Request) -> Failure {
    let message = format!("`{}` cannot be asked with {}", request.uri().path(), request.method());
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "methodNotAllowed", message)
        .help("GET /openapi.json describes what there is")
}

async fn jobs_list(State(app): State<Arc<App>>, Values(query): Values<ListQuery>) -> Result<Json<JobList>, Failure> {
    crate::app::blocking(move || list(&app, &query).map(Json)).await
}

async fn document() -> impl IntoResponse {
    Json(openapi::document())
}

async fn health(State(app): State<Arc<App>>) -> Result<impl IntoResponse, Failure> {
    // An engine that does not answer is not healthy.
    crate::app::blocking(move || app.view(|_| ())).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain")], "ok\n"))
}
