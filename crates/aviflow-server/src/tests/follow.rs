use super::support::{LOCK, Script, Streamed, World, gone, minimal, stable, submission};
use crate::app::ServerConfig;
use aviflow_core::model::{EnvironmentHash, JobId};
use aviflow_core::time::Time;
use aviflow_engine::ports::Observation;
use aviflow_engine::telemetry::{BuildProgress, Point, Telemetry};
use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::collections::BTreeMap;

async fn events(world: &World, path: &str) -> Streamed {
    Streamed::events(world.send(world.request("GET", path).body(Body::empty()).unwrap()).await)
}

async fn lines(world: &World, path: &str) -> Streamed {
    Streamed::lines(world.send(world.request("GET", path).body(Body::empty()).unwrap()).await)
}

fn texts(lines: &[Value]) -> Vec<String> {
    lines.iter().map(|l| l["text"].as_str().unwrap().to_owned()).collect()
}

fn point(step: u64) -> Point {
    let values = BTreeMap::from([("loss".to_owned(), 2.5)]);
    Point { at: Time(5), attempt: 1, rank: 0, step, total_steps: Some(9), tokens: None, values, odd: BTreeMap::new() }
}

#[tokio::test]
async fn following_from_submission_to_the_end_misses_nothing_and_repeats_nothing() {
    let world = World::with(Script::default(), ServerConfig::default());
    let id = world.submit(&submission("train")).await.summary.id;
    world.log(id, 0, "1 0 o line 0\n2 0 o line 1\n");
    let mut stream = events(&world, "/v1/jobs/train/events").await;
    let first = stream.next().await.unwrap();
    assert_eq!((&first["type"], &first["job"]["name"]), (&json!("job"), &json!("train")));
    let mut all = vec![first];
    // Output comes in between everything else, at whatever speed.
    for n in 2..500 {
        world.log(id, 0, &format!("{n} 0 o line {n}\n"));
        if n % 97 == 0 {
            world.telemetry.progress(JobId(id), point(n));
        }
        if n == 100 {
            world.until_phase(id, "Running").await;
        }
        if n == 300 {
            world.body.drained.send_replace(false);
            world.tell(id, gone(7, &["line 299"]));
            world.until_ended(id).await;
            // The end of the job is known, and output still comes.
            loop {
                let event = stream.next().await.unwrap();
                let failed = event["job"]["phase"] == "Failed";
                all.push(event);
                if failed {
                    break;
                }
            }
        }
    }
    world.body.drained.send_replace(true);
    all.extend(stream.rest().await);
    let logged: Vec<Value> =
        all.iter().filter(|e| e["type"] == "log").flat_map(|e| e["lines"].as_array().unwrap().clone()).collect();
    let expected: Vec<String> = (0..500).map(|n| format!("line {n}")).collect();
    assert_eq!(texts(&logged), expected);
    let kinds: Vec<&str> = all.iter().filter_map(|e| e["entry"]["kind"].as_str()).collect();
    assert_eq!(kinds, ["submitted", "placed", "running", "failing", "decided", "failed"]);
    let last_point = all.iter().rev().find(|e| e["type"] == "progress").unwrap();
    assert_eq!(last_point["point"]["step"], 485);
    assert_eq!(all.last().unwrap(), &json!({ "type": "end", "exitCode": 7 }));
    assert_eq!(all.iter().filter(|e| e["type"] == "end").count(), 1);
    // Who comes later is told the same.
    let again = events(&world, "/v1/jobs/train/events").await.rest().await;
    let logged: Vec<Value> =
        again.iter().filter(|e| e["type"] == "log").flat_map(|e| e["lines"].as_array().unwrap().clone()).collect();
    assert_eq!(texts(&logged), expected);
    let short = events(&world, "/v1/jobs/train/events?tail=1").await.rest().await;
    insta::assert_snapshot!("ended", stable(Value::Array(short)));
    let silent = events(&world, "/v1/jobs/train/events?logs=false").await.rest().await;
    assert!(silent.iter().all(|e| e["type"] != "log"));
}

#[tokio::test]
async fn whoever_follows_a_job_that_waits_for_its_environment_is_told_of_its_build() {
    let script = Script { prepares: false, ..Script::default() };
    let world = World::with(script, ServerConfig::default());
    world.objects.put(LOCK.as_bytes()).unwrap();
    let mut submit = submission("train");
    submit.spec.environment = Some("minimal@1".into());
    submit.provenance.environment = Some(minimal());
    let id = world.submit(&submit).await.summary.id;
    let mut stream = events(&world, "/v1/jobs/train/events").await;
    let first = stream.until(|e| e["type"] == "job").await;
    assert_eq!(first["job"]["verdict"].get("build"), None);
    let hash = minimal().hash;
    let build = |hash: &str, step: &str, done| {
        let (hash, name, step) = (hash.to_owned(), "minimal@1".to_owned(), step.to_owned());
        world.telemetry.build(BuildProgress { hash, name, step, done, total: 2 });
    };
    build("another", "collecting numpy", 0);
    for (done, step) in [(0, "collecting jax"), (1, "installing jax")] {
        build(&hash, step, done);
        let told = stream.until(|e| e["job"]["verdict"]["build"].is_object()).await;
        let expected = json!({ "name": "minimal@1", "step": step, "done": done, "total": 2 });
        assert_eq!(told["job"]["verdict"]["build"], expected);
    }
    world.handle.observe(Observation::EnvironmentReady { hash: EnvironmentHash(hash) }, None);
    stream.until(|e| e["job"]["phase"] == "Running").await;
    world.tell(id, gone(0, &[]));
    assert_eq!(stream.rest().await.last().unwrap()["type"], "end");
}

#[tokio::test]
async fn logs_are_chosen_and_followed() {
    let world = World::new();
    let id = world.submit(&submission("train")).await.summary.id;
    world.until_phase(id, "Running").await;
    world.log(id, 0, "10 0 o a\n20 1 e b\n30 0 a stopping\n");
    world.log(id, 1, "15 2 o c a\n");
    let read = async |query: &str| texts(&lines(&world, &format!("/v1/jobs/train/logs{query}")).await.rest().await);
    assert_eq!(read("").await, ["a", "c a", "b", "stopping"]);
    assert_eq!(read("?rank=0,2").await, ["a", "c a", "stopping"]);
    assert_eq!(read("?since=20").await, ["b", "stopping"]);
    assert_eq!(read("?grep=a").await, ["a", "c a"]);
    assert_eq!(read("?tail=2").await, ["b", "stopping"]);
    assert_eq!(read("?tail=0").await, Vec::<String>::new());
    assert_eq!(read("?attempt=2").await, Vec::<String>::new());
    let one = lines(&world, "/v1/jobs/train/logs?tail=1").await.rest().await;
    insta::assert_snapshot!(one[0].to_string());
    for wrong in ["?rank=x", "?since=soon", "?follow=maybe"] {
        let (status, _) = world.call("GET", &format!("/v1/jobs/train/logs{wrong}"), None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{wrong}");
    }
    let mut followed = lines(&world, "/v1/jobs/train/logs?follow&tail=0").await;
    world.log(id, 0, "40 0 o d\n");
    assert_eq!(followed.next().await.unwrap()["text"], "d");
    world.log(id, 0, "50 0 o e\n");
    world.tell(id, gone(0, &[]));
    assert_eq!(texts(&followed.rest().await), ["e"]);
}

#[tokio::test]
async fn a_series_is_numbered_and_thinned() {
    let world = World::new();
    let id = world.submit(&submission("train")).await.summary.id;
    for step in 1..=20 {
        world.telemetry.progress(JobId(id), point(step));
    }
    let all = world.get("/v1/jobs/train/series").await;
    assert_eq!(all.as_array().unwrap().len(), 20);
    insta::assert_snapshot!(all[19].to_string());
    let after = world.get("/v1/jobs/train/series?after=18").await;
    assert_eq!(after.as_array().unwrap().len(), 2);
    let few = world.get("/v1/jobs/train/series?max=5").await;
    assert!(few.as_array().unwrap().len() <= 5);
    let summary = world.get("/v1/jobs").await;
    assert_eq!(summary["jobs"][0]["progress"]["step"], 20);
}

#[tokio::test]
async fn the_pool_is_watched_as_a_whole() {
    let world = World::new();
    world.submit(&submission("first")).await;
    world.until_phase(1, "Running").await;
    let mut stream = events(&world, "/v1/events").await;
    let mut present = Vec::new();
    loop {
        let event = stream.next().await.unwrap();
        if event["type"] == "ready" {
            break;
        }
        present.push(event);
    }
    let names: Vec<&str> =
        present.iter().map(|e| e["node"]["name"].as_str().or(e["job"]["name"].as_str()).unwrap()).collect();
    assert_eq!(names, ["node-1", "node-2", "first"]);
    world.submit(&submission("second")).await;
    stream.until(|e| e["job"]["name"] == "second" && e["job"]["phase"] == "Running").await;
    world.tell(1, gone(0, &[]));
    let ended = stream.until(|e| e["job"]["name"] == "first").await;
    assert_eq!(ended["job"]["phase"], "Succeeded");
    world.call("POST", "/v1/nodes/node-2/actions", Some(json!({ "action": "cordon" }))).await;
    stream.until(|e| e["node"]["name"] == "node-2" && e["node"]["condition"] == "Cordoned").await;
}
