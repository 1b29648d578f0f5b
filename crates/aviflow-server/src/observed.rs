//! A cluster as it is; and a control plane that only looks at it.

use crate::app::{App, blocking};
use crate::error::Failure;
use aviflow_api::rest::Observed;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Who holds the GPUs of the cluster, and what waits.
pub(crate) async fn observed(State(app): State<Arc<App>>) -> Result<Json<Observed>, Failure> {
    blocking(move || {
        let seen = app.parts.body.observed().map(Json);
        seen.ok_or_else(|| {
            Failure::not_found("notObserved", "the pool of this control plane is no cluster that others use, too")
                .help("`aviflow node ls` shows who holds its GPUs")
        })
    })
    .await
}

/// What is asked, and not done, of a control plane that only looks; and its own end.
const ALLOWED: [&str; 2] = ["/v1/plan", "/v1/server/stop"];

/// Bytes of a refused request that are read: more than a document has.
const READ: usize = 1 << 20;

/// Refuses what would change something, where the control plane only looks.
pub(crate) async fn looking(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let looks = matches!(*request.method(), Method::GET | Method::HEAD) || ALLOWED.contains(&request.uri().path());
    if looks || !app.parts.body.observes() {
        return next.run(request).await;
    }
    // Who is still sending when the connection closes sees that alone, and not the answer.
    let _ = axum::body::to_bytes(request.into_body(), READ).await;
    Failure::refused("observing", "this control plane only observes the cluster: it takes no jobs and changes nothing")
        .help("start it with `--mode schedule` (the chart's value `mode`) to run jobs; `aviflow observed` shows who uses which GPUs")
        .into_response()
}
