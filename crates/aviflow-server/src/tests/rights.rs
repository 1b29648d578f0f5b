//! Who may do what, where others than the holder of the token come.

use super::support::{World, json, refusal, submission};
use crate::access::{Asked, Identities, Unavailable};
use crate::routes;
use aviflow_api::rights::{Identity, Part, Right, Verb};
use aviflow_tls::{CertificateDer, Connection};
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// A cluster whose tokens are the names of people.
#[derive(Default)]
struct People {
    rights: Mutex<BTreeMap<String, BTreeSet<Right>>>,
}

impl People {
    fn give(&self, user: &str, rights: impl IntoIterator<Item = Right>) {
        self.rights.lock().unwrap().entry(user.to_owned()).or_default().extend(rights);
    }
}

impl Identities for People {
    fn authenticate<'a>(&'a self, token: &'a str) -> Asked<'a, Option<Arc<Identity>>> {
        let known = self.rights.lock().unwrap().contains_key(token);
        let identity = known.then(|| Arc::new(Identity { user: token.to_owned(), ..Identity::default() }));
        let away = token == "away";
        Box::pin(async move { if away { Err(Unavailable::from("it is away".to_owned())) } else { Ok(identity) } })
    }

    /// Certificates are the names of people too; one of `mallory` does not hold.
    fn certified<'a>(&'a self, chain: &'a [CertificateDer<'static>]) -> Asked<'a, Result<Arc<Identity>, String>> {
        let user = String::from_utf8(chain[0].to_vec()).unwrap();
        let identity = match user.as_str() {
            "mallory" => Err("it has expired".to_owned()),
            _ => Ok(Arc::new(Identity { user: user.clone(), ..Identity::default() })),
        };
        Box::pin(async move {
            match user.as_str() {
                "away" => Err(Unavailable::from("it is away".to_owned())),
                "unread" => Err(Unavailable { why: "it is not shown".into(), help: Some("bind the role".into()) }),
                _ => Ok(identity),
            }
        })
    }

    fn may<'a>(&'a self, identity: &'a Arc<Identity>, right: &'a Right) -> Asked<'a, bool> {
        let may = self.rights.lock().unwrap()[&identity.user].contains(right);
        Box::pin(async move { Ok(may) })
    }
}

/// A request of a person from anywhere.
fn of(user: &str, namespace: &str, method: &str, path: &str, body: Option<&Value>) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .header("authorization", format!("Bearer {user}"))
        // Who comes with an identity is not believed about his name.
        .header("x-aviflow-user", "root")
        .header("x-aviflow-namespace", namespace)
        .extension(ConnectInfo(Connection::from(SocketAddr::from(([10, 0, 0, 7], 5000)))))
        .body(body.map_or_else(Body::empty, |b| Body::from(b.to_string())))
        .unwrap()
}

async fn ask(world: &World, user: &str, method: &str, path: &str, body: Option<&Value>) -> (StatusCode, Value) {
    json(world.send(of(user, "nlp", method, path, body)).await).await
}

/// What a method of a route needs, and a body that is understood.
type Needed = (Vec<Right>, Option<Value>);

/// The rights that each method of each route needs, and a body that is understood. A request that needs several
/// is refused for the first that is missing.
fn table() -> BTreeMap<(&'static str, &'static str), Needed> {
    use Verb::{Create, Delete, Get, List, Update};
    let on = |verb, resource: &'static str| Right::on(verb, resource, None);
    let x = |verb, resource: &'static str| Right::on(verb, resource, Some("x".to_owned()));
    let jobs = |verb| Right::jobs(verb, Some("nlp"));
    let part = |verb, part| Right::part(verb, part, "nlp");
    let submit = serde_json::to_value(submission("train")).unwrap();
    let reason = |action: &str| Some(json!({"action": action, "reason": "test"}));
    let queue = json!({"queue": {"name": "x"}});
    let pool = json!({"pool": {"name": "x"}});
    let list: &[(&'static str, &'static str, Vec<Right>, Option<Value>)] = &[
        ("GET", "/v1/server", vec![], None),
        ("POST", "/v1/server/stop", vec![on(Update, "platform")], None),
        ("POST", "/v1/server/actions", vec![on(Update, "platform")], reason("pause")),
        // Lists have what may be seen, which may be nothing.
        ("GET", "/v1/jobs", vec![], None),
        ("POST", "/v1/jobs", vec![jobs(Create), Right::use_queue("default")], Some(submit.clone())),
        ("POST", "/v1/plan", vec![jobs(Create), Right::use_queue("default")], Some(submit)),
        ("GET", "/v1/jobs/{name}", vec![jobs(Get)], None),
        ("GET", "/v1/jobs/{name}/logs", vec![part(Get, Part::Log)], None),
        ("GET", "/v1/jobs/{name}/series", vec![jobs(Get)], None),
        ("GET", "/v1/jobs/{name}/timeline", vec![jobs(Get)], None),
        ("GET", "/v1/jobs/{name}/events", vec![jobs(Get), part(Get, Part::Log)], None),
        ("GET", "/v1/jobs/{name}/ranks", vec![jobs(Get), part(Get, Part::Log)], None),
        ("GET", "/v1/jobs/{name}/files", vec![part(Get, Part::Files)], None),
        ("POST", "/v1/jobs/{name}/actions", vec![jobs(Delete)], reason("cancel")),
        ("POST", "/v1/jobs/{name}/exec", vec![part(Create, Part::Exec)], Some(json!({"argv": ["true"]}))),
        (
            "POST",
            "/v1/jobs/{name}/channels",
            vec![part(Create, Part::Exec)],
            Some(json!({"to": {"kind": "port", "port": 1}})),
        ),
        ("POST", "/v1/jobs/{name}/channels/{channel}", vec![part(Create, Part::Exec)], Some(json!({}))),
        ("GET", "/v1/jobs/{name}/stacks", vec![part(Get, Part::Log)], None),
        ("POST", "/v1/jobs/{name}/stacks", vec![part(Create, Part::Exec)], Some(json!({}))),
        ("HEAD", "/v1/objects/{sha256}", vec![jobs(Create)], None),
        ("PUT", "/v1/objects/{sha256}", vec![jobs(Create)], None),
        ("GET", "/v1/top", vec![], None),
        ("GET", "/v1/observed", vec![on(List, "nodes")], None),
        ("GET", "/v1/nodes", vec![on(List, "nodes")], None),
        ("GET", "/v1/nodes/{name}", vec![x(Get, "nodes")], None),
        ("POST", "/v1/nodes/{name}/actions", vec![x(Update, "nodes")], reason("cordon")),
        ("POST", "/v1/nodes/{name}/check", vec![x(Update, "nodes")], Some(json!({}))),
        ("GET", "/v1/queues", vec![on(List, "queues")], None),
        ("GET", "/v1/queues/{name}", vec![x(Get, "queues")], None),
        ("PUT", "/v1/queues/{name}", vec![x(Update, "queues")], Some(queue)),
        ("POST", "/v1/queues/{name}/actions", vec![x(Update, "queues")], reason("hold")),
        ("GET", "/v1/pools", vec![on(List, "pools")], None),
        ("GET", "/v1/pools/{name}", vec![x(Get, "pools")], None),
        ("PUT", "/v1/pools/{name}", vec![x(Update, "pools")], Some(pool)),
        ("POST", "/v1/pools/{name}/actions", vec![x(Delete, "pools")], reason("delete")),
        ("GET", "/v1/policy", vec![], None),
        ("PUT", "/v1/policy", vec![on(Update, "platform")], Some(json!({"policy": {}}))),
        ("GET", "/v1/drains", vec![on(List, "nodes")], None),
        ("POST", "/v1/drains", vec![on(Update, "nodes")], Some(json!({"nodes": ["node-1"], "reason": "test"}))),
        ("POST", "/v1/drains/{name}/actions", vec![on(Update, "nodes")], reason("cancel")),
        ("GET", "/v1/acts", vec![on(Get, "platform")], None),
        ("GET", "/v1/environments", vec![on(List, "environments")], None),
        ("GET", "/v1/environments/{name}", vec![on(Get, "environments")], None),
        ("GET", "/v1/usage", vec![on(Get, "usage")], None),
        ("GET", "/v1/history", vec![], None),
        ("GET", "/v1/events", vec![on(List, "nodes")], None),
        ("GET", "/v1/agents", vec![on(Get, "platform")], None),
        ("GET", "/metrics", vec![on(Get, "metrics")], None),
    ];
    list.iter().cloned().map(|(method, path, rights, body)| ((path, method), (rights, body))).collect()
}

#[tokio::test]
async fn every_route_needs_its_rights_and_no_others() {
    let people = Arc::new(People::default());
    let world = World::shared(people.clone());
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    let table = table();
    let served: BTreeSet<_> =
        routes::closed().iter().flat_map(|(path, methods, _)| methods.iter().map(|(m, _)| (*path, *m))).collect();
    assert_eq!(served, table.keys().copied().collect(), "each route is in the table of rights");
    people.give("nobody", []);
    for ((path, method), (rights, body)) in &table {
        let url = path.replace("{name}", "x").replace("{sha256}", "x").replace("{channel}", "x");
        // All but one right are not enough, and the one that is missing is named.
        for (i, missing) in rights.iter().enumerate() {
            let user = format!("{method}{path}{i}");
            people.give(&user, rights.iter().filter(|r| *r != missing).cloned());
            let response = world.send(of(&user, "nlp", method, &url, body.as_ref())).await;
            let (status, said) = json(response).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{method} {path} without `{missing}`: {said}");
            if *method != "HEAD" {
                assert!(said["message"].as_str().unwrap().contains(&missing.to_string()), "{said}");
            }
        }
        let user = format!("{method}{path}");
        people.give(&user, rights.iter().cloned());
        let response = world.send(of(&user, "nlp", method, &url, body.as_ref())).await;
        let status = response.status();
        assert_ne!(status, StatusCode::UNAUTHORIZED, "{method} {path}");
        if *path == "/v1/server/stop" {
            // It is also asked from this machine alone.
            assert_eq!(json(response).await.1["code"], "onlyHere");
        } else {
            assert_ne!(status, StatusCode::FORBIDDEN, "{method} {path}");
        }
        if rights.is_empty() {
            let response = world.send(of("nobody", "nlp", method, &url, body.as_ref())).await;
            assert!(response.status().is_success(), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn actions_need_the_right_of_what_they_do() {
    let people = Arc::new(People::default());
    let world = World::shared(people.clone());
    people.give("ann", []);
    let cases = [
        ("/v1/jobs/x/actions", json!({"action": "cancel"}), Right::jobs(Verb::Delete, Some("nlp"))),
        ("/v1/jobs/vision%2Fx/actions", json!({"action": "cancel"}), Right::jobs(Verb::Delete, Some("vision"))),
        ("/v1/jobs/x/actions", json!({"action": "suspend"}), Right::jobs(Verb::Update, Some("nlp"))),
        ("/v1/jobs/x/actions", json!({"action": "update", "queue": "fast"}), Right::use_queue("fast")),
        ("/v1/queues/x/actions", json!({"action": "hold"}), Right::on(Verb::Update, "queues", Some("x".into()))),
        (
            "/v1/queues/x/actions",
            json!({"action": "delete", "jobs": "refuse"}),
            Right::on(Verb::Delete, "queues", Some("x".into())),
        ),
    ];
    for (path, body, right) in cases {
        let (status, said) = ask(&world, "ann", "POST", path, Some(&body)).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path} {body}: {said}");
        assert!(said["message"].as_str().unwrap().contains(&right.to_string()), "{body}: {said} and not {right}");
        people.give("ann", [right]);
    }
    let (status, said) = ask(&world, "ann", "POST", "/v1/jobs/x/actions", Some(&json!({"action": "cancel"}))).await;
    assert_eq!((status, &said["code"]), (StatusCode::NOT_FOUND, &json!("noSuchJob")));
}

#[tokio::test]
async fn each_sees_the_jobs_of_his_namespaces() {
    let people = Arc::new(People::default());
    let world = World::shared(people.clone());
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    let team = |namespace: &str| {
        let own = [Verb::Get, Verb::List, Verb::Create].map(|verb| Right::jobs(verb, Some(namespace)));
        own.into_iter().chain([Right::use_queue("default"), Right::on(Verb::List, "nodes", None)])
    };
    people.give("ann", team("nlp"));
    people.give("ben", team("vision"));
    people.give("eve", []);
    people.give("root", [Right::jobs(Verb::List, None)]);
    let mut body = serde_json::to_value(submission("train")).unwrap();
    // Which object it came from is no client's to say.
    body["provenance"]["object"] = json!({"name": "other", "uid": "7"});
    for (user, namespace) in [("ann", "nlp"), ("ben", "vision")] {
        let (status, said) = json(world.send(of(user, namespace, "POST", "/v1/jobs", Some(&body))).await).await;
        assert_eq!(status, StatusCode::CREATED, "{said}");
        assert_eq!((&said["namespace"], &said["user"]), (&json!(namespace), &json!(user)));
        assert_eq!(said["provenance"].get("object"), None, "{said}");
    }
    let (status, said) = json(world.send(of("ben", "nlp", "POST", "/v1/jobs", Some(&body))).await).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{said}");
    let listed = async |user: &str, path: &str| {
        let (status, said) = ask(&world, user, "GET", path, None).await;
        assert_eq!(status, StatusCode::OK, "{said}");
        let jobs = said["jobs"].as_array().unwrap();
        jobs.iter()
            .map(|job| format!("{}/{}", job["namespace"].as_str().unwrap(), job["name"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(listed("ann", "/v1/jobs").await, ["nlp/train"]);
    assert_eq!(listed("ben", "/v1/jobs").await, ["vision/train"]);
    assert_eq!(listed("eve", "/v1/jobs").await, Vec::<String>::new());
    assert_eq!(listed("root", "/v1/jobs").await, ["vision/train", "nlp/train"]);
    assert_eq!(listed("root", "/v1/jobs?namespace=nlp").await, ["nlp/train"]);
    let (status, said) = ask(&world, "ann", "GET", "/v1/jobs?namespace=vision", None).await;
    insta::assert_snapshot!(refusal(status, &said));
    // A bare name is looked up in one's namespace, and a full one is another's.
    let (status, said) = ask(&world, "ann", "GET", "/v1/jobs/train", None).await;
    assert_eq!((status, &said["namespace"]), (StatusCode::OK, &json!("nlp")));
    let (status, _) = ask(&world, "ann", "GET", "/v1/jobs/vision%2Ftrain", None).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let (status, said) = json(world.send(of("ben", "vision", "GET", "/v1/jobs/train", None)).await).await;
    assert_eq!((status, &said["namespace"]), (StatusCode::OK, &json!("vision")));
    // What changes is told to who may see it.
    let response = world.send(of("ann", "nlp", "GET", "/v1/events", None)).await;
    let mut events = super::support::Streamed::events(response);
    let mut names = BTreeSet::new();
    loop {
        let event = events.next().await.expect("the stream goes on");
        if let Some(job) = event.get("job") {
            names.insert(job["namespace"].as_str().unwrap().to_owned());
        }
        if event["type"] == "ready" {
            break;
        }
    }
    assert_eq!(names, BTreeSet::from(["nlp".to_owned()]));
}

#[tokio::test]
async fn who_is_nobody_is_refused_and_who_cannot_be_asked_is_told() {
    let people = Arc::new(People::default());
    let world = World::shared(people.clone());
    for user in ["job-pod", "away"] {
        let (status, said) = ask(&world, user, "GET", "/v1/server", None).await;
        insta::assert_snapshot!(refusal(status, &said));
    }
    // The token of the folder is good on its own machine, in every namespace, and nowhere else.
    let request = |from: [u8; 4]| {
        let mut request = world.request("GET", "/v1/jobs/x").header("x-aviflow-namespace", "nlp");
        request = request.extension(ConnectInfo(Connection::from(SocketAddr::from((from, 5000)))));
        request.body(Body::empty()).unwrap()
    };
    assert_eq!(world.send(request([127, 0, 0, 1])).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(world.send(request([10, 0, 0, 7])).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn one_machine_has_one_namespace() {
    let world = World::new();
    let ask = async |namespace: &str| {
        let request = world.request("GET", "/v1/jobs").header("x-aviflow-namespace", namespace);
        let (status, said) = json(world.send(request.body(Body::empty()).unwrap()).await).await;
        (status, said)
    };
    assert_eq!(ask("default").await.0, StatusCode::OK);
    for namespace in ["nlp", "Nlp"] {
        let (status, said) = ask(namespace).await;
        insta::assert_snapshot!(refusal(status, &said));
    }
    insta::assert_snapshot!(world.refused("GET", "/v1/jobs?namespace=nlp", None).await);
}

#[tokio::test]
async fn who_shows_a_certificate_is_whom_it_names_or_nobody() {
    let people = Arc::new(People::default());
    people.give("ann", []);
    people.give("ben", [Right::on(Verb::Get, "usage", None)]);
    let world = World::shared(people);
    let ask = async |certificate: Option<&str>, token: Option<&str>, from: [u8; 4]| {
        let certificates = certificate.map(|name| CertificateDer::from(name.as_bytes().to_vec()));
        let connection =
            Connection { peer: SocketAddr::from((from, 5000)), certificates: certificates.into_iter().collect() };
        let mut request = Request::get("/v1/usage").header("host", "localhost").extension(ConnectInfo(connection));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let (status, body) = json(world.send(request.body(Body::empty()).unwrap()).await).await;
        let help = if status == 503 { body["help"].as_str() } else { None };
        (status.as_u16(), help.or(body["message"].as_str()).unwrap_or_default().to_owned())
    };
    let (there, here) = ([10, 0, 0, 7], [127, 0, 0, 1]);
    assert_eq!(ask(Some("ben"), None, there).await.0, 200);
    assert_eq!(ask(None, None, there).await.0, 401);
    let (status, message) = ask(Some("ann"), None, there).await;
    assert!(status == 403 && message.starts_with("`ann` may not"), "{message}");
    // What a certificate says is not made better by a token, whosever it is.
    let own = world.token();
    for (token, from) in [(None, there), (Some("ben"), there), (Some(own.as_str()), here)] {
        let (status, message) = ask(Some("mallory"), token, from).await;
        assert_eq!((status, message.as_str()), (401, "the client certificate is refused: it has expired"));
        assert_eq!(ask(Some("ann"), token, from).await.0, 403);
    }
    assert_eq!(ask(Some("away"), Some("ben"), there).await, (503, "try again in a moment".to_owned()));
    assert_eq!(ask(Some("unread"), Some("ben"), there).await, (503, "bind the role".to_owned()));
}
