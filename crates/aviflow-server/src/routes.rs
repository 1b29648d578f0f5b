//! Which function answers which route, and what a route needs.

use crate::access::{Caller, check_namespace, guard};
use crate::app::App;
use crate::error::Failure;
use crate::list::{ListQuery, list};
use crate::params::Values;
use crate::{
    changes, channels, check, documents, drains, environments, exec, files, follow, history, jobs, logs, metrics,
    objects, observed, pool, stacks, submit, top, usage,
};
use aviflow_api::openapi;
use aviflow_api::rest::JobList;
use aviflow_api::rights::{Part, Verb};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get, head, post, put};
use axum::{Json, Router};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// What a request needs of who is known by an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// To be known.
    Known,
    /// A right on all things of a kind.
    On(Verb, &'static str),
    /// A right on the thing that the path names.
    Named(Verb, &'static str),
    /// A right on jobs of the namespace of the path's job, or else of the caller's.
    Jobs(Verb),
    /// A right on a part of them.
    Part(Verb, Part),
    /// What following a job needs.
    Told,
    /// What depends on what the request says: the function asks it itself.
    Asked,
}

/// One path with its methods.
pub(crate) type Handled = (&'static str, &'static [(&'static str, Needs)], MethodRouter<Arc<App>>);

const GET: &str = "GET";
const POST: &str = "POST";
const PUT: &str = "PUT";
const HEAD: &str = "HEAD";

/// The routes that need a token.
pub(crate) fn closed() -> Vec<Handled> {
    use Needs::{Asked, Jobs, Known, Named, On, Told};
    use Verb::{Create, Delete, Get, List, Update};
    const SUBMIT: Needs = Jobs(Create);
    const PLATFORM: Needs = On(Update, "platform");
    vec![
        ("/v1/server", &[(GET, Known)], get(pool::server)),
        ("/v1/server/stop", &[(POST, PLATFORM)], post(pool::stop)),
        ("/v1/server/actions", &[(POST, PLATFORM)], post(pool::server_action)),
        // Whose jobs are listed, and which queue is used, is asked there.
        ("/v1/jobs", &[(GET, Asked), (POST, SUBMIT)], get(jobs_list).post(submit::submit)),
        ("/v1/plan", &[(POST, SUBMIT)], post(submit::what_if)),
        ("/v1/jobs/{name}", &[(GET, Jobs(Get))], get(jobs::get)),
        ("/v1/jobs/{name}/logs", &[(GET, Needs::Part(Get, Part::Log))], get(logs::logs)),
        ("/v1/jobs/{name}/series", &[(GET, Jobs(Get))], get(jobs::series)),
        ("/v1/jobs/{name}/timeline", &[(GET, Jobs(Get))], get(jobs::timeline)),
        ("/v1/jobs/{name}/events", &[(GET, Told)], get(follow::events)),
        // It has lines of output in it.
        ("/v1/jobs/{name}/ranks", &[(GET, Told)], get(top::ranks)),
        ("/v1/jobs/{name}/files", &[(GET, Needs::Part(Get, Part::Files))], get(files::files)),
        // To end one is another right than to change one, and a queue is used.
        ("/v1/jobs/{name}/actions", &[(POST, Asked)], post(jobs::act)),
        ("/v1/jobs/{name}/exec", &[(POST, Needs::Part(Create, Part::Exec))], post(exec::exec)),
        ("/v1/jobs/{name}/channels", &[(POST, Needs::Part(Create, Part::Exec))], post(channels::open)),
        ("/v1/jobs/{name}/channels/{channel}", &[(POST, Needs::Part(Create, Part::Exec))], post(channels::put)),
        // To take them interrupts the processes for a moment; those that were taken are like the log.
        (
            "/v1/jobs/{name}/stacks",
            &[(GET, Needs::Part(Get, Part::Log)), (POST, Needs::Part(Create, Part::Exec))],
            get(stacks::last).post(stacks::stacks),
        ),
        ("/v1/objects/{sha256}", &[(HEAD, SUBMIT), (PUT, SUBMIT)], head(objects::head).merge(put(objects::put))),
        // Each has the jobs of the namespaces that are seen.
        ("/v1/top", &[(GET, Asked)], get(top::top)),
        ("/v1/observed", &[(GET, On(List, "nodes"))], get(observed::observed)),
        ("/v1/nodes", &[(GET, On(List, "nodes"))], get(pool::nodes)),
        ("/v1/nodes/{name}", &[(GET, Named(Get, "nodes"))], get(pool::node)),
        ("/v1/nodes/{name}/actions", &[(POST, Named(Update, "nodes"))], post(pool::node_action)),
        ("/v1/nodes/{name}/check", &[(POST, Named(Update, "nodes"))], post(check::check)),
        ("/v1/queues", &[(GET, On(List, "queues"))], get(pool::queues)),
        (
            "/v1/queues/{name}",
            &[(GET, Named(Get, "queues")), (PUT, Named(Update, "queues"))],
            get(documents::queue).put(documents::put_queue),
        ),
        // To delete one is another right than to change one.
        ("/v1/queues/{name}/actions", &[(POST, Asked)], post(documents::queue_action)),
        ("/v1/pools", &[(GET, On(List, "pools"))], get(pool::pools)),
        (
            "/v1/pools/{name}",
            &[(GET, Named(Get, "pools")), (PUT, Named(Update, "pools"))],
            get(documents::pool).put(documents::put_pool),
        ),
        ("/v1/pools/{name}/actions", &[(POST, Named(Delete, "pools"))], post(documents::pool_action)),
        ("/v1/policy", &[(GET, Known), (PUT, PLATFORM)], get(documents::policy).put(documents::put_policy)),
        (
            "/v1/drains",
            &[(GET, On(List, "nodes")), (POST, On(Update, "nodes"))],
            get(drains::drains).post(drains::drain),
        ),
        ("/v1/drains/{name}/actions", &[(POST, On(Update, "nodes"))], post(drains::drain_action)),
        ("/v1/acts", &[(GET, On(Get, "platform"))], get(drains::acts)),
        ("/v1/environments", &[(GET, On(List, "environments"))], get(environments::list)),
        ("/v1/environments/{name}", &[(GET, On(Get, "environments"))], get(environments::one)),
        ("/v1/usage", &[(GET, On(Get, "usage"))], get(usage::usage)),
        // Each has the jobs of the namespaces that are seen.
        ("/v1/history", &[(GET, Asked)], get(history::history)),
        ("/v1/events", &[(GET, On(List, "nodes"))], get(changes::events)),
        ("/v1/agents", &[(GET, On(Get, "platform"))], get(pool::agents)),
        ("/metrics", &[(GET, On(Get, "metrics"))], get(metrics::metrics)),
    ]
}

/// The routes that anybody who reaches the control plane may ask.
pub(crate) fn open() -> Vec<Handled> {
    use Needs::Known;
    vec![
        ("/openapi.json", &[(GET, Known)], get(document)),
        ("/healthz", &[(GET, Known)], get(health)),
        ("/readyz", &[(GET, Known)], get(ready)),
    ]
}

/// What a method of a path that needs a token needs; none if it is not served.
pub(crate) fn needs(path: &str, method: &Method) -> Option<Needs> {
    static TABLE: LazyLock<BTreeMap<(&'static str, &'static str), Needs>> = LazyLock::new(|| {
        let each = |(path, methods, _): Handled| methods.iter().map(move |(method, needs)| ((path, *method), *needs));
        closed().into_iter().flat_map(each).collect()
    });
    let served = |method| TABLE.get(&(path, method)).copied();
    // What is answered to GET is answered to HEAD too, without its body.
    served(method.as_str()).or_else(|| served(GET).filter(|_| method == Method::HEAD))
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
    not_allowed(request.uri(), request.method())
}

pub(crate) fn not_allowed(uri: &Uri, method: &Method) -> Failure {
    let message = format!("`{}` cannot be asked with {method}", uri.path());
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "methodNotAllowed", message)
        .help("GET /openapi.json describes what there is")
}

async fn jobs_list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Values(query): Values<ListQuery>,
) -> Result<Json<JobList>, Failure> {
    if let Some(namespace) = &query.namespace {
        check_namespace(&app, namespace)?;
    }
    let visible = app.visible(&caller, query.namespace.clone()).await?;
    crate::app::blocking(move || list(&app, &query, visible).map(Json)).await
}

async fn document() -> impl IntoResponse {
    Json(openapi::document())
}

async fn health(State(app): State<Arc<App>>) -> Result<impl IntoResponse, Failure> {
    // An engine that does not answer is not healthy.
    crate::app::blocking(move || app.view(|_| ())).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain")], "ok\n"))
}

/// Alive may also be who waits for the store that another one writes; requests are for who decides.
async fn ready(State(app): State<Arc<App>>) -> Result<impl IntoResponse, Failure> {
    crate::app::blocking(move || {
        let not = |why: String| Failure::new(StatusCode::SERVICE_UNAVAILABLE, "notReady", why);
        // It answers only between two turns, and not while the store fails.
        app.view(|_| ()).map_err(|failure| not(format!("the engine takes no turns: {}", failure.error.message)))?;
        app.parts.body.ready().map_err(not)
    })
    .await?;
    Ok(([(header::CONTENT_TYPE, "text/plain")], "ok\n"))
}
