use super::*;
use axum::Router;
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, Method};
use axum::response::IntoResponse;
use axum::routing::get;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn name(text: &str) -> ImageName {
    ImageName::parse(text).unwrap()
}

async fn serve(router: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// A registry that shows `team/open:v1` to everybody with a token and `team/closed:v1` to `ann` alone, by tokens that
/// it gives itself.
async fn registry() -> (SocketAddr, Arc<AtomicU32>) {
    let asked = Arc::new(AtomicU32::new(0));
    let counts = asked.clone();
    let manifest = move |method: Method, Path((repository, tag)): Path<(String, String)>, headers: HeaderMap| {
        counts.fetch_add(1, Ordering::SeqCst);
        async move {
            let host = headers["host"].to_str().unwrap().to_owned();
            let token = headers.get("authorization").and_then(|v| v.to_str().ok()).unwrap_or_default();
            let scope = format!("repository:team/{repository}:pull");
            if token != format!("Bearer for {scope}") {
                let realm = format!("Bearer realm=\"http://{host}/token\",service=\"reg\",scope=\"{scope}\"");
                return (StatusCode::UNAUTHORIZED, [("WWW-Authenticate", realm)]).into_response();
            }
            let index = headers["accept"].to_str().unwrap().contains("image.index");
            match (tag.as_str(), index) {
                ("v1", true) => [("Docker-Content-Digest", DIGEST)].into_response(),
                // One that leaves the digest to the client.
                ("old", true) => if method == Method::GET { "{}" } else { "" }.into_response(),
                ("ill", true) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                _ => StatusCode::NOT_FOUND.into_response(),
            }
        }
    };
    let token = |Query(query): Query<BTreeMap<String, String>>, headers: HeaderMap| async move {
        let ann = format!("Basic {}", STANDARD.encode("ann:secret"));
        let known = headers.get("authorization").is_some_and(|v| v.to_str().is_ok_and(|v| v == ann));
        if query["service"] != "reg" || query["scope"].contains("closed") && !known {
            return StatusCode::UNAUTHORIZED.into_response();
        }
        axum::Json(json!({"access_token": format!("for {}", query["scope"])})).into_response()
    };
    let router =
        Router::new().route("/v2/team/{repository}/manifests/{tag}", get(manifest)).route("/token", get(token));
    (serve(router).await, asked)
}

async fn digest(plain: Vec<String>, image: String, login: Option<Login>) -> Result<String, RegistryError> {
    let registries = Registries::new(plain, None).unwrap();
    tokio::task::spawn_blocking(move || registries.digest(&name(&image), login.as_ref())).await.unwrap()
}

#[tokio::test]
async fn a_tag_is_resolved_with_a_token_that_the_registry_names() {
    let (address, _) = registry().await;
    let ask = |image: &str, login| digest(vec![address.to_string()], format!("{address}/{image}"), login);
    let registry = address.to_string();
    assert_eq!(ask("team/open:v1", None).await, Ok(DIGEST.to_owned()));
    let content = format!("sha256:{}", hex(&Sha256::digest("{}")));
    assert_eq!(ask("team/open:old", None).await, Ok(content), "of the content, where it is not told");
    let image = format!("{address}/team/open:v2");
    assert_eq!(ask("team/open:v2", None).await, Err(RegistryError::NotFound { image, registry: registry.clone() }));
    let image = format!("{address}/team/open");
    let none = ask("team/open", None).await;
    assert_eq!(none, Err(RegistryError::NotFound { image, registry: registry.clone() }), "there is no `latest`");
    let login = |password: &str| Login { secret: "pull".into(), user: "ann".into(), password: password.into() };
    assert_eq!(ask("team/closed:v1", Some(login("secret"))).await, Ok(DIGEST.to_owned()));
    for (login, who) in [(None, "everybody"), (Some(login("wrong")), "the login of Secret `pull`")] {
        let image = format!("{address}/team/closed:v1");
        let expected = RegistryError::Denied { image, registry: registry.clone(), who: who.to_owned() };
        assert_eq!(ask("team/closed:v1", login).await, Err(expected));
    }
}

#[tokio::test]
async fn plain_http_is_spoken_where_an_administrator_says_so() {
    let (address, asked) = registry().await;
    let told = digest(Vec::new(), format!("{address}/team/open:v1"), None).await.unwrap_err();
    assert!(matches!(&told, RegistryError::Unreachable { .. }), "{told}");
    assert_eq!(asked.load(Ordering::SeqCst), 0, "nothing came through without TLS");
}

#[tokio::test]
async fn a_registry_that_does_not_answer_is_left_alone_for_a_while() {
    let (address, asked) = registry().await;
    let registries = Arc::new(Registries::new([address.to_string()], None).unwrap());
    let ask = |image: String| {
        let registries = registries.clone();
        tokio::task::spawn_blocking(move || registries.digest(&name(&image), None))
    };
    let ill = ask(format!("{address}/team/open:ill")).await.unwrap().unwrap_err().to_string();
    assert!(ill.contains("it answered 503") && ill.contains("team/open:ill"), "{ill}");
    let before = asked.load(Ordering::SeqCst);
    let other = ask(format!("{address}/team/open:v1")).await.unwrap().unwrap_err().to_string();
    assert!(other.contains("it answered 503") && other.contains("team/open:v1"), "{other}");
    assert_eq!(asked.load(Ordering::SeqCst), before, "nobody asked");
}

#[test]
fn challenges_are_read() {
    let read = |text: &str| {
        let challenge = Challenge::parse(text).unwrap();
        let realm = challenge.get("realm").map(str::to_owned);
        (challenge.scheme.clone(), realm, challenge.get("scope").map(str::to_owned))
    };
    let some = |text: &str| Some(text.to_owned());
    let hub =
        r#"Bearer realm="https://auth.docker.io/token", service="registry.docker.io",scope="repository:a/b:pull,push""#;
    assert_eq!(read(hub), ("bearer".into(), some("https://auth.docker.io/token"), some("repository:a/b:pull,push")));
    assert_eq!(read("Basic realm=x"), ("basic".into(), some("x"), None));
    assert_eq!(read("Negotiate"), ("negotiate".into(), None, None));
}

#[test]
fn a_pull_secret_has_logins_for_its_registries_alone() {
    let auth = STANDARD.encode("ann:se:cret");
    let config = json!({"auths": {
        "https://index.docker.io/v1/": {"auth": auth},
        "registry.example:5000": {"username": "bob", "password": "b"},
        "registry.example:5000/team": {"username": "team", "password": "t"},
    }});
    let data = BTreeMap::from([(".dockerconfigjson".to_owned(), config.to_string().into_bytes())]);
    let users = |image: &str| -> Vec<String> {
        logins("pull", &data, &name(image)).into_iter().map(|l| format!("{} {}", l.user, l.password)).collect()
    };
    assert_eq!(users("python:3.12"), ["ann se:cret"]);
    assert_eq!(users("registry.example:5000/team/a:1"), ["bob b", "team t"]);
    assert_eq!(users("registry.example:5000/teams/a:1"), ["bob b"]);
    assert_eq!(users("registry.example/team/a:1"), [""; 0], "another port is another registry");
    let old =
        BTreeMap::from([(".dockercfg".to_owned(), json!({"a.example": {"auth": auth}}).to_string().into_bytes())]);
    assert_eq!(logins("pull", &old, &name("a.example/b")).len(), 1);
    assert_eq!(format!("{:?}", logins("pull", &old, &name("a.example/b"))), "[Login { secret: \"pull\", .. }]");
}
