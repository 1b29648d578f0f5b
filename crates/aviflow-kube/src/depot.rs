//! Where pods fetch their code: one small HTTP route, for pods alone.
//!
//! A pod proves who it is by the token that is bound to it, and gets the snapshot of its own job and nothing else.

use crate::site::{self, Pods};
use aviflow_link::Workers;
use aviflow_tls::Listener;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::path::PathBuf;
use std::sync::Arc;
use tokio_util::io::ReaderStream;

/// Finds an object (a code archive) by its SHA-256.
pub type Objects = Arc<dyn Fn(&str) -> std::io::Result<PathBuf> + Send + Sync>;

struct Depot {
    workers: Arc<Workers<Pods>>,
    objects: Objects,
}

/// Serves until the task is aborted.
pub(crate) async fn serve(workers: Arc<Workers<Pods>>, objects: Objects, listener: Listener) {
    let router = Router::new().route("/code/{sha256}", get(code)).with_state(Arc::new(Depot { workers, objects }));
    // It ends with the listener alone.
    let _ = axum::serve(listener, router).await;
}

async fn code(State(depot): State<Arc<Depot>>, Path(sha256): Path<String>, headers: HeaderMap) -> Response {
    let refuse = |status: StatusCode, why: &str| (status, format!("{why}\n")).into_response();
    let token = headers.get(header::AUTHORIZATION).and_then(|h| h.to_str().ok()?.strip_prefix("Bearer "));
    let pod = match token {
        Some(token) => site::review(&depot.workers.site.client, token).await,
        None => None,
    };
    let Some(pod) = pod else {
        return refuse(StatusCode::UNAUTHORIZED, "the token is not one of a pod of this cluster");
    };
    let mine = |depot: &Depot| {
        let state = depot.workers.lock();
        let worker = state.workers.values().find(|w| w.own.pod.as_ref() == Some(&pod));
        worker.map(|w| w.own.code.as_deref() == Some(sha256.as_str()))
    };
    match mine(&depot) {
        Some(true) => {}
        Some(false) => return refuse(StatusCode::FORBIDDEN, "this is not the code of the pod's job"),
        // The pod may be faster than the answer to its creation: it asks again.
        None => return refuse(StatusCode::NOT_FOUND, "the pod is not known yet"),
    }
    let objects = depot.objects.clone();
    let found = tokio::task::spawn_blocking(move || std::fs::File::open(objects(&sha256)?)).await;
    match found {
        Ok(Ok(file)) => Body::from_stream(ReaderStream::new(tokio::fs::File::from_std(file))).into_response(),
        Ok(Err(e)) if e.kind() == std::io::ErrorKind::NotFound => {
            refuse(StatusCode::GONE, "the code snapshot is not in the store any more; submit the job again")
        }
        Ok(Err(e)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &format!("the code snapshot cannot be read: {e}")),
        Err(_) => refuse(StatusCode::SERVICE_UNAVAILABLE, "the control plane is stopping"),
    }
}
