use super::support::{LOCK, Script, World, gone, sha256, spec, stable, submission, with_environment};
use crate::app::ServerConfig;
use aviflow_api::rest::Submit;
use aviflow_api::spec::{CodeSnapshot, Provenance};
use aviflow_core::lifecycle::WorkerEvent;
use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

fn to_json(submit: &Submit) -> Option<Value> {
    Some(serde_json::to_value(submit).unwrap())
}

fn names(list: &Value) -> Vec<&str> {
    list["jobs"].as_array().unwrap().iter().map(|j| j["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_job_from_submission_to_its_end() {
    let world = World::new();
    let (status, job) = world.call("POST", "/v1/jobs", to_json(&submission("train"))).await;
    assert_eq!(status, StatusCode::CREATED);
    let hash = job["hash"].clone();
    world.until_phase(1, "Running").await;
    let values = BTreeMap::from([("result.loss".into(), "2.5".into()), ("data.corpus".into(), "ab".into())]);
    world.tell(1, WorkerEvent::Facts { values });
    world.tell(1, WorkerEvent::FirstStep { step: 1 });
    world.tell(1, WorkerEvent::CheckpointComplete { step: 10, path: "/ckpt/10".into() });
    world.until(|view| view.snapshot.jobs.values().any(|j| j.checkpoint.is_some())).await;
    let running = world.get("/v1/jobs/train").await;
    insta::assert_snapshot!("running", stable(running));
    world.tell(1, gone(3, &["Traceback", "ValueError: loss is NaN"]));
    world.until_ended(1).await;
    let ended = world.get("/v1/jobs/train").await;
    assert_eq!(ended["hash"], hash, "one hash, whatever happened");
    let total: i64 = ended["gpuTime"].as_object().unwrap().values().map(|v| v.as_i64().unwrap()).sum();
    assert!(total <= 2 * (ended["ended"].as_i64().unwrap() - ended["submitted"].as_i64().unwrap()));
    assert_eq!(world.get("/v1/jobs/train/timeline").await, ended["timeline"]);
    insta::assert_snapshot!("failed", stable(ended));
    insta::assert_snapshot!(
        world.refused("POST", "/v1/jobs/train/actions", Some(json!({ "action": "cancel" }))).await,
        @"409 jobEnded: the job has ended or does not exist (`train` is Failed; `aviflow rerun` makes a new job of it)"
    );
}

#[tokio::test]
async fn a_cancelled_job_ends_with_130_and_a_suspended_one_waits_until_it_is_resumed() {
    let world = World::new();
    world.submit(&submission("one")).await;
    world.until_phase(1, "Running").await;
    let (status, _) = world.call("POST", "/v1/jobs/one/actions", Some(json!({ "action": "suspend" }))).await;
    assert_eq!(status, StatusCode::OK);
    world.until_phase(1, "Queued").await;
    assert_eq!(world.get("/v1/jobs/one").await["held"], "ada");
    let (status, _) = world.call("POST", "/v1/jobs/one/actions", Some(json!({ "action": "resume" }))).await;
    assert_eq!(status, StatusCode::OK);
    world.until(|view| view.snapshot.jobs.values().any(|j| j.attempts == 2)).await;
    assert_eq!(world.get("/v1/jobs/one").await["counters"]["suspensions"], 1);
    world.until_phase(1, "Running").await;
    let (_, summary) = world.call("POST", "/v1/jobs/one/actions", Some(json!({ "action": "cancel" }))).await;
    assert!(matches!(summary["phase"].as_str().unwrap(), "Stopping" | "Cancelled"), "{summary}");
    world.until_ended(1).await;
    let ended = world.get("/v1/jobs/default%2Fone").await;
    assert_eq!((&ended["phase"], &ended["exitCode"]), (&json!("Cancelled"), &json!(130)));
}

#[tokio::test]
async fn what_cannot_be_suspended_is_refused_with_the_way_on() {
    let world = World::with(Script { prepares: false, stops: false, ..Script::default() }, ServerConfig::default());
    world.objects.put(LOCK.as_bytes()).unwrap();
    world.submit(&with_environment()).await;
    let suspend = async |name: &str| {
        let path = format!("/v1/jobs/{name}/actions");
        world.refused("POST", &path, Some(json!({ "action": "suspend" }))).await
    };
    // One that waits is held.
    let (status, _) = world.call("POST", "/v1/jobs/train/actions", Some(json!({ "action": "suspend" }))).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(world.get("/v1/jobs/train").await["held"], "ada");
    let id = world.submit(&submission("other")).await.summary.id;
    world.until_phase(id, "Running").await;
    world.call("POST", "/v1/jobs/other/actions", Some(json!({ "action": "cancel" }))).await;
    world.until_phase(id, "Stopping").await;
    insta::assert_snapshot!(
        suspend("other").await,
        @"409 stopping: `other` is being stopped already (`aviflow show other` says why and how it goes on)"
    );
    world.tell(id, gone(143, &[]));
    world.until_ended(id).await;
    insta::assert_snapshot!(
        suspend("other").await,
        @"409 jobEnded: the job has ended or does not exist (`other` is Cancelled; `aviflow rerun` makes a new job of it)"
    );
}

#[tokio::test]
async fn a_name_is_ones_own_latest_or_exactly_that_one() {
    let world = World::new();
    for _ in 0..3 {
        world.submit(&submission("tiny-gpt")).await;
    }
    let mut request = world
        .request("POST", "/v1/jobs")
        .body(Body::from(to_json(&submission("tiny-gpt")).unwrap().to_string()))
        .unwrap();
    request.headers_mut().insert("x-aviflow-user", "bob".parse().unwrap());
    assert_eq!(world.send(request).await.status(), StatusCode::CREATED);
    for (name, id) in [("tiny-gpt", 3), ("tiny-gpt-2", 2), ("default%2Ftiny-gpt", 1), ("tiny-gpt-4", 4)] {
        assert_eq!(world.get(&format!("/v1/jobs/{name}")).await["id"], id, "{name}");
    }
    insta::assert_snapshot!(world.refused("GET", "/v1/jobs/tiny-gtp", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/jobs/other%2Ftiny-gpt", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/jobs/nothing-like-it", None).await);
}

#[tokio::test]
async fn lists_are_filtered_paged_and_newest_first() {
    let world = World::with(Script::default(), ServerConfig::default());
    for name in ["a", "b", "c"] {
        let id = world.submit(&submission(name)).await.summary.id;
        world.until_phase(id, "Running").await;
    }
    for id in [1, 2] {
        world.tell(id, gone(0, &[]));
        world.until_ended(id).await;
    }
    let mut large = submission("large");
    large.spec.nodes = aviflow_api::spec::Nodes { min: 2, max: 2 };
    large.spec.gpus_per_node = 8;
    for priority in ["normal", "high"] {
        large.spec.priority = priority.into();
        world.submit(&large).await;
    }
    let list = async |query: &str| world.get(&format!("/v1/jobs{query}")).await;
    assert_eq!(names(&list("").await), ["large-2", "large", "c", "b", "a"]);
    assert_eq!(names(&list("?phase=live").await), ["large-2", "large", "c"]);
    assert_eq!(names(&list("?phase=ended").await), ["b", "a"]);
    assert_eq!(names(&list("?phase=running").await), ["c"]);
    assert_eq!(names(&list("?phase=Succeeded&limit=1").await), ["b"]);
    assert_eq!(names(&list("?user=bob").await), Vec::<&str>::new());
    assert_eq!(names(&list("?user=ada&queue=default&limit=2").await), ["large-2", "large"]);
    let mut pages = Vec::new();
    let mut query = "?limit=2".to_owned();
    loop {
        let page = list(&query).await;
        pages.extend(names(&page).into_iter().map(str::to_owned));
        let Some(next) = page["next"].as_u64() else { break };
        query = format!("?limit=2&after={next}");
    }
    assert_eq!(pages, ["large-2", "large", "c", "b", "a"]);
    let waiting = list("?waiting=true").await;
    assert_eq!(names(&waiting), ["large-2", "large"], "the higher priority is first");
    let first = list("?waiting&limit=1").await;
    assert_eq!((names(&first), &first["next"]), (vec!["large-2"], &json!(1)));
    assert_eq!(names(&list("?waiting=true&limit=1&after=1").await), ["large"]);
    insta::assert_snapshot!("waiting", stable(waiting));
}

#[tokio::test]
async fn a_plan_changes_nothing_and_says_what_would_happen() {
    let world = World::with(Script { starts: false, ..Script::default() }, ServerConfig::default());
    world.submit(&submission("train")).await;
    world.until_phase(1, "Starting").await;
    let before = world.handle.read(|view| (view.snapshot.clone(), view.generation)).unwrap();
    let (status, answer) = world.call("POST", "/v1/plan", to_json(&submission("train"))).await;
    assert_eq!(status, StatusCode::OK);
    insta::assert_snapshot!("fits", stable(answer));
    let mut large = submission("large");
    large.spec.nodes = aviflow_api::spec::Nodes { min: 2, max: 2 };
    large.spec.gpus_per_node = 8;
    let (_, answer) = world.call("POST", "/v1/plan", to_json(&large)).await;
    insta::assert_snapshot!("waits", stable(answer["verdict"].clone()));
    large.spec.nodes = aviflow_api::spec::Nodes { min: 3, max: 3 };
    let (_, answer) = world.call("POST", "/v1/plan", to_json(&large)).await;
    insta::assert_snapshot!("never", stable(answer["verdict"].clone()));
    world.body.ready.store(false, Ordering::SeqCst);
    let (_, answer) = world.call("POST", "/v1/plan", to_json(&with_environment())).await;
    assert_eq!((&answer["environmentReady"], &answer["startsNow"]), (&json!(false), &json!(false)));
    large.spec.queue = "nlp".into();
    insta::assert_snapshot!(world.refused("POST", "/v1/plan", to_json(&large)).await);
    assert_eq!(world.handle.read(|view| (view.snapshot.clone(), view.generation)).unwrap(), before);
}

#[tokio::test]
async fn a_submission_is_checked_again() {
    let world = World::new();
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    let refused = async |change: &dyn Fn(&mut Submit)| {
        let mut submit = with_environment();
        change(&mut submit);
        world.refused("POST", "/v1/jobs", to_json(&submit)).await
    };
    insta::assert_snapshot!(refused(&|s| s.spec.name = "x".repeat(41)).await);
    insta::assert_snapshot!(refused(&|s| s.spec.nodes = aviflow_api::spec::Nodes { min: 9, max: 9 }).await);
    insta::assert_snapshot!(refused(&|s| s.provenance.environment = None).await);
    insta::assert_snapshot!(refused(&|s| s.spec.environment = Some("minimal@2".into())).await);
    insta::assert_snapshot!(refused(&|s| s.provenance.environment.as_mut().unwrap().locks[0] = "../x".into()).await);
    let (status, value) = world.call("POST", "/v1/jobs", to_json(&with_environment())).await;
    assert_eq!((status, &value["code"]), (StatusCode::CONFLICT, &json!("missingObjects")));
    assert_eq!(value["missing"], json!([sha256(LOCK.as_bytes())]));
    world.objects.put(LOCK.as_bytes()).unwrap();
    insta::assert_snapshot!(refused(&|s| s.provenance.environment.as_mut().unwrap().hash = "ab".repeat(32)).await);
    insta::assert_snapshot!(refused(&|s| s.spec.queue = "nlp".into()).await);
    let code = CodeSnapshot { sha256: sha256(b"code"), bytes: 4, files: 1, commit: None, dirty: false };
    let mut submit = with_environment();
    submit.provenance.code = Some(code);
    let (_, value) = world.call("POST", "/v1/jobs", to_json(&submit)).await;
    assert_eq!(value["missing"], json!([sha256(b"code")]));
    world.objects.put(&b"code"[..]).unwrap();
    let job = world.submit(&submit).await;
    world.until_phase(job.summary.id, "Running").await;
}

#[tokio::test]
async fn secrets_are_masked_and_a_repetition_has_them_again() {
    let world = World::new();
    let key = ["hf_", &"a1".repeat(17)].concat();
    let mut first = submission("train");
    first.spec.env.insert("TOKENS".into(), key.clone());
    let first = world.submit(&first).await;
    let text = serde_json::to_string(&first).unwrap();
    assert!(!text.contains(&key), "{text}");
    let rerun_of = Some("default/train".to_owned());
    let again = Submit { spec: first.spec.clone(), provenance: Provenance { rerun_of, ..Provenance::default() } };
    let again = world.submit(&again).await;
    assert_eq!(again.hash, first.hash);
    let kept = world.handle.read(|view| view.records.values().last().unwrap().spec.clone()).unwrap();
    assert_eq!(kept.env["TOKENS"], key);
    world.until_phase(1, "Running").await;
    world.tell(1, gone(1, &[&format!("bad token {key}")]));
    world.until_ended(1).await;
    let ended = world.get("/v1/jobs/default%2Ftrain").await.to_string();
    assert!(ended.contains("bad token hf_***") && !ended.contains(&key), "{ended}");
    assert_eq!(spec("train").env.len(), 0);
}
