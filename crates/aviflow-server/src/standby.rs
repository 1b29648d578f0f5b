//! What a control plane answers that waits for its turn: that it lives, and who decides.
//!
//! It knows nothing of jobs, so every request but that for its health is told so, whoever asks.

use crate::error::Failure;
use aviflow_tls::Listener;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::future::Future;
use tokio::sync::watch;

/// Answers on a listener until `end` completes. `why` says why it waits, as a sentence goes on after
/// `this control plane `.
///
/// # Errors
/// If the listener fails.
pub async fn standby(
    listener: Listener,
    why: watch::Receiver<String>,
    end: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    axum::serve(listener, router(why)).with_graceful_shutdown(end).await
}

fn router(why: watch::Receiver<String>) -> Router {
    let health = async || ([(header::CONTENT_TYPE, "text/plain")], "ok\n");
    Router::new().route("/healthz", get(health)).fallback(waits).with_state(why)
}

async fn waits(State(why): State<watch::Receiver<String>>) -> impl IntoResponse {
    let message = format!("this control plane {}", *why.borrow());
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "standby", message)
        .help("ask the one that decides: where there is a Service, it leads there; or ask again in a moment")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt as _;

    #[tokio::test]
    async fn who_waits_lives_and_says_who_decides() {
        let (says, why) = watch::channel("looks".to_owned());
        let ask = async |path: &str| {
            let request = Request::get(path).body(Body::empty()).expect("a request");
            let response = router(why.clone()).oneshot(request).await.expect("an answer");
            let status = response.status().as_u16();
            let body = to_bytes(response.into_body(), 1 << 16).await.expect("a body");
            (status, String::from_utf8_lossy(&body).into_owned())
        };
        assert_eq!(ask("/healthz").await, (200, "ok\n".to_owned()));
        says.send_replace("waits: aviflow-1 holds the lease aviflow-system/aviflow".to_owned());
        for path in ["/readyz", "/v1/jobs", "/metrics", "/nowhere"] {
            let (status, body) = ask(path).await;
            let said = body.contains("this control plane waits: aviflow-1 holds the lease aviflow-system/aviflow");
            assert!(status == 503 && said && body.contains("\"standby\""), "{path}: {status} {body}");
        }
    }
}
