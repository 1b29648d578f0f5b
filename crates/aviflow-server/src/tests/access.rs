use super::support::{Script, World, json, refusal, sha256, submission};
use crate::app::{ServerConfig, ServerError};
use crate::auth::{Token, TokenError};
use crate::routes;
use aviflow_api::openapi::ROUTES;
use aviflow_tls::Connection;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;
use tokio::net::TcpListener;

#[test]
fn a_token_is_made_once_and_only_its_owner_can_read_it() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("token");
    let token = Token::load_or_create(&path).unwrap();
    assert_eq!(token.reveal().len(), 64);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(Token::load_or_create(&path).unwrap().reveal(), token.reveal());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(!format!("{token:?}").contains(token.reveal()));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(matches!(Token::load_or_create(&path), Err(TokenError::Open { mode: 0o640, .. })));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&path, "\n").unwrap();
    assert!(matches!(Token::load_or_create(&path), Err(TokenError::Empty { .. })));
}

#[tokio::test]
async fn every_route_of_the_table_is_served_and_no_other() {
    let table: BTreeSet<(&str, &str, bool)> = ROUTES.iter().map(|r| (r.path, r.method, r.open)).collect();
    let each = |routes: Vec<routes::Handled>, open: bool| {
        let methods =
            routes.into_iter().flat_map(move |(path, methods, _)| methods.iter().map(move |(m, _)| (path, *m, open)));
        methods.collect::<Vec<_>>()
    };
    let served: BTreeSet<_> = each(routes::closed(), false).into_iter().chain(each(routes::open(), true)).collect();
    assert_eq!(table, served);
    // The methods that the list names are those that are answered.
    let world = World::new();
    for (path, method, _) in served {
        let path = path.replace("{name}", "x").replace("{sha256}", "x");
        let response = world.send(world.request(method, &path).body(Body::empty()).unwrap()).await;
        assert_ne!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        // Streams never end by themselves, and every other error has its own code.
        if response.headers().get("content-type").is_some_and(|t| t == "application/json") && method != "HEAD" {
            let (_, body) = json(response).await;
            assert_ne!(body["code"], "noSuchRoute", "{method} {path}");
        }
        if path == "/v1/server/stop" {
            continue;
        }
        for other in ["DELETE", "PATCH"] {
            let response = world.send(world.request(other, &path).body(Body::empty()).unwrap()).await;
            assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{other} {path}");
        }
    }
}

#[tokio::test]
async fn who_has_no_token_or_means_another_host_is_refused() {
    let world = World::new();
    let ask = async |headers: &[(&str, &str)]| {
        let mut request = Request::builder().uri("/v1/server");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = world.send(request.body(Body::empty()).unwrap()).await;
        let challenge = response.headers().get("www-authenticate").cloned();
        let (status, value) = json(response).await;
        assert_eq!(challenge.is_some(), status == StatusCode::UNAUTHORIZED);
        refusal(status, &value)
    };
    let wrong = format!("Bearer {}", "0".repeat(64));
    insta::assert_snapshot!(ask(&[("host", "localhost")]).await);
    insta::assert_snapshot!(ask(&[("host", "127.0.0.1:7000"), ("authorization", &wrong)]).await);
    insta::assert_snapshot!(ask(&[("host", "evil.example:7000"), ("authorization", &wrong)]).await);
    insta::assert_snapshot!(ask(&[]).await);
    for open in ["/healthz", "/readyz", "/openapi.json"] {
        let request = Request::builder().uri(open).body(Body::empty()).unwrap();
        assert_eq!(world.send(request).await.status(), StatusCode::OK);
    }
    let request = world.request("GET", "/v1/server").header("x-aviflow-user", "a b").body(Body::empty()).unwrap();
    assert_eq!(world.send(request).await.status(), StatusCode::OK, "the first of two headers counts");
    let mut request = world.request("GET", "/v1/jobs/x").body(Body::empty()).unwrap();
    request.headers_mut().insert("x-aviflow-user", "a b".parse().unwrap());
    assert_eq!(world.send(request).await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn names_that_are_allowed_are_hosts() {
    let config = ServerConfig { allow_remote: true, hosts: vec!["Train.Example".into()], ..ServerConfig::default() };
    let world = World::with(Script::default(), config);
    for (host, status) in [("train.example:80", 200), ("localhost", 200), ("[::1]:80", 200), ("other", 403)] {
        let mut request = world.request("GET", "/v1/server").body(Body::empty()).unwrap();
        request.headers_mut().insert("host", host.parse().unwrap());
        assert_eq!(world.send(request).await.status().as_u16(), status, "{host}");
    }
}

#[tokio::test]
async fn requests_that_cannot_be_read_say_where() {
    let world = World::new();
    let send = async |method: &str, path: &str, body: String| {
        let (status, value) = json(world.send(world.request(method, path).body(Body::from(body)).unwrap()).await).await;
        refusal(status, &value)
    };
    insta::assert_snapshot!(send("POST", "/v1/jobs", "{".into()).await);
    let mut submit = serde_json::to_value(submission("a")).unwrap();
    submit["spec"]["nodes"]["min"] = json!("two");
    insta::assert_snapshot!(send("POST", "/v1/jobs", submit.to_string()).await);
    insta::assert_snapshot!(send("POST", "/v1/jobs", format!("\"{}\"", "x".repeat(5 << 20))).await);
    insta::assert_snapshot!(send("POST", "/v1/nodes/node-1/actions", "{\"action\": \"explode\"}".into()).await);
    insta::assert_snapshot!(send("GET", "/v1/jobs?fase=live", String::new()).await);
    insta::assert_snapshot!(send("GET", "/v1/jobs?phase=sleeping", String::new()).await);
    insta::assert_snapshot!(send("GET", "/v1/job", String::new()).await);
    insta::assert_snapshot!(send("DELETE", "/v1/jobs", String::new()).await);
}

#[tokio::test]
async fn a_full_disk_and_a_stopped_engine_say_so() {
    let world = World::new();
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    world.full.store(true, std::sync::atomic::Ordering::SeqCst);
    let body = serde_json::to_value(submission("train")).unwrap();
    insta::assert_snapshot!(world.refused("POST", "/v1/jobs", Some(body.clone())).await);
    // Nothing of it was kept, and the next one is taken.
    assert_eq!(world.submit(&submission("train")).await.summary.name, "train");
    world.handle.stop();
    let mut changed = world.handle.changed();
    while changed.changed().await.is_ok() {}
    insta::assert_snapshot!(world.refused("POST", "/v1/jobs", Some(body)).await);
    insta::assert_snapshot!(world.refused("GET", "/healthz", None).await);
    insta::assert_snapshot!(world.refused("GET", "/readyz", None).await);
}

#[tokio::test]
async fn it_listens_only_here_and_ends_when_it_is_asked_to() {
    let world = World::new();
    let job = world.submit(&submission("train")).await;
    world.until_phase(job.summary.id, "Running").await;
    let open = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let error = world.server.clone().serve(open, std::future::pending()).await.unwrap_err();
    assert!(matches!(error, ServerError::Remote(_)) && error.to_string().contains("allowRemote"), "{error}");
    let remote = ConnectInfo(Connection::from(SocketAddr::from(([10, 0, 0, 7], 5000))));
    let mut request = world.request("POST", "/v1/server/stop").body(Body::empty()).unwrap();
    request.extensions_mut().insert(remote);
    let (status, value) = json(world.send(request).await).await;
    insta::assert_snapshot!(refusal(status, &value));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let served = tokio::spawn(world.server.clone().serve(listener, std::future::pending()));
    // A stream that is open does not hold it up.
    let mut events = super::support::Streamed::events(
        world.send(world.request("GET", "/v1/jobs/train/events").body(Body::empty()).unwrap()).await,
    );
    let (status, value) = world.call("POST", "/v1/server/stop", None).await;
    assert_eq!((status, value), (StatusCode::OK, json!({ "running": ["default/train"], "waiting": 0 })));
    events.rest().await;
    served.await.unwrap().unwrap();
    // The trainings' engine is not the server's to end.
    world.until_phase(job.summary.id, "Running").await;
}

#[test]
fn hashes_name_contents() {
    assert_eq!(sha256(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}
