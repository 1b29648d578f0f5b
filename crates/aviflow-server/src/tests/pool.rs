use super::support::{LOCK, Script, Streamed, World, gone, stable, submission, with_environment};
use crate::app::ServerConfig;
use crate::body::{BodyAgent, ExecTarget};
use aviflow_core::model::JobId;
use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};

#[tokio::test]
async fn nodes_are_shown_gpu_by_gpu_and_cordoned() {
    let world = World::new();
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let nodes = world.get("/v1/nodes").await;
    assert_eq!(nodes.as_array().unwrap().len(), 2);
    let node = world.get("/v1/nodes/node-1").await;
    assert_eq!(node, nodes[0]);
    assert_eq!(node["gpus"].as_array().unwrap().len(), 8);
    insta::assert_snapshot!(
        "node",
        stable(json!({ "node": node["name"], "first": node["gpus"][0], "last": node["gpus"][7] }))
    );
    let act =
        async |action: &str| world.call("POST", "/v1/nodes/node-2/actions", Some(json!({ "action": action }))).await.1;
    assert_eq!(act("cordon").await["condition"], "Cordoned");
    assert_eq!(world.get("/v1/pools").await[0]["free"], 6);
    assert_eq!(act("uncordon").await["condition"], "Ready");
    insta::assert_snapshot!("pools", stable(world.get("/v1/pools").await));
    insta::assert_snapshot!(world.refused("GET", "/v1/nodes/nod-1", None).await);
    insta::assert_snapshot!(world.refused("POST", "/v1/nodes/x/actions", Some(json!({ "action": "cordon" }))).await);
}

#[tokio::test]
async fn a_node_is_opened_by_a_check_that_it_passes_and_by_no_other() {
    let world = World::new();
    let condition = async || world.get("/v1/nodes/node-2").await["condition"].clone();
    let check = async |body: Value| {
        let request = world.request("POST", "/v1/nodes/node-2/check").body(Body::from(body.to_string())).unwrap();
        Streamed::lines(world.send(request).await).rest().await
    };
    let failed = check(json!({ "run": ["3"] })).await;
    assert_eq!(failed.last(), Some(&json!({ "type": "exit", "code": 3 })), "{failed:?}");
    assert_eq!(condition().await, "Cordoned", "it did not pass");
    check(json!({ "run": ["0"], "keepCordoned": true })).await;
    assert_eq!(condition().await, "Cordoned", "nobody wanted it open");
    let passed = check(json!({ "run": ["0"] })).await;
    assert_eq!(passed.last(), Some(&json!({ "type": "exit", "code": 0 })), "{passed:?}");
    assert_eq!(condition().await, "Ready");
    let acts = world.get("/v1/acts").await;
    assert!(acts.to_string().contains("uncordoned node node-2"), "{acts}");

    // Where a job is, nothing is tested, and the node is left as it was.
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let nodes = world.get("/v1/nodes").await;
    let used = nodes.as_array().unwrap().iter().find(|n| n["gpus"].to_string().contains("train")).unwrap();
    let path = format!("/v1/nodes/{}/check", used["name"].as_str().unwrap());
    insta::assert_snapshot!(world.refused("POST", &path, Some(json!({}))).await);
    assert_eq!(world.get("/v1/nodes").await, nodes);
    insta::assert_snapshot!(world.refused("POST", "/v1/nodes/x/check", Some(json!({}))).await);
}

#[tokio::test]
async fn queues_and_the_server_count_jobs() {
    let world = World::new();
    assert_eq!(world.get("/v1/queues").await[0]["name"], "default");
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let (_, info) = world.call("POST", "/v1/server/actions", Some(json!({ "action": "pause" }))).await;
    assert_eq!(info["paused"], "ada");
    world.submit(&submission("train")).await;
    insta::assert_snapshot!("queues", stable(world.get("/v1/queues").await));
    let mut server = world.get("/v1/server").await;
    server["generation"] = "[n]".into();
    insta::assert_snapshot!("server", stable(server));
    assert_eq!(
        world.get("/v1/jobs?waiting=true").await["jobs"][0]["verdict"]["reason"],
        "all starts are paused by ada"
    );
    world.call("POST", "/v1/server/actions", Some(json!({ "action": "resume" }))).await;
    world.until_phase(2, "Running").await;
}

#[tokio::test]
async fn environments_are_found_by_name_and_version() {
    let world = World::new();
    let all = world.get("/v1/environments").await;
    assert_eq!((all.as_array().unwrap().len(), all[0].get("lock")), (2, None));
    assert_eq!(world.get("/v1/environments/minimal").await["version"], 2);
    insta::assert_snapshot!("environment", stable(world.get("/v1/environments/minimal@1").await));
    insta::assert_snapshot!(world.refused("GET", "/v1/environments/minimal@7", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/environments/minimum", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/environments/minimal@x", None).await);
}

#[tokio::test]
async fn commands_run_beside_a_rank() {
    let world = World::new();
    let mut submit = submission("train");
    submit.spec.nodes = aviflow_api::spec::Nodes { min: 2, max: 2 };
    world.submit(&submit).await;
    world.until_phase(1, "Running").await;
    let body = json!({ "argv": ["nvidia-smi"], "rank": 1 });
    let request = world.request("POST", "/v1/jobs/train/exec").body(Body::from(body.to_string())).unwrap();
    let frames = Streamed::lines(world.send(request).await).rest().await;
    assert_eq!(frames, [json!({ "type": "stdout", "data": "aGk=" }), json!({ "type": "exit", "code": 3 })]);
    let (target, exec) = world.body.execs.lock().unwrap()[0].clone();
    assert_eq!(target, ExecTarget { job: JobId(1), attempt: 1, worker: 1 });
    assert_eq!(exec.rank, Some(1));
    let refused = async |body: Value| world.refused("POST", "/v1/jobs/train/exec", Some(body)).await;
    insta::assert_snapshot!(refused(json!({ "argv": [] })).await);
    insta::assert_snapshot!(refused(json!({ "argv": ["x"], "rank": 2 })).await);
    insta::assert_snapshot!(refused(json!({ "argv": ["refused"] })).await);
    world.call("POST", "/v1/jobs/train/actions", Some(json!({ "action": "cancel" }))).await;
    world.until_ended(1).await;
    insta::assert_snapshot!(refused(json!({ "argv": ["x"] })).await);
}

#[tokio::test]
async fn agents_are_shown() {
    let world = World::new();
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let agent =
        |job| BodyAgent { job: JobId(job), attempt: 1, worker: 0, pid: Some(7), connected: job == 1, gpus: Vec::new() };
    world.body.agents.lock().unwrap().extend([agent(1), agent(9)]);
    insta::assert_snapshot!("agents", stable(world.get("/v1/agents").await));
}

#[tokio::test]
async fn usage_sums_to_the_capacity() {
    let world = World::new();
    for name in ["a", "b"] {
        let id = world.submit(&submission(name)).await.summary.id;
        world.until_phase(id, "Running").await;
    }
    world.tell(1, gone(0, &[]));
    world.until_ended(1).await;
    for by in ["user", "queue", "job", "state"] {
        let usage = world.get(&format!("/v1/usage?from=1h&by={by}")).await;
        let rows = usage["rows"].as_array().unwrap();
        let total = |row: &Value| row["total"].as_i64().unwrap();
        let states =
            |row: &Value| row["states"].as_object().unwrap().values().map(|v| v.as_i64().unwrap()).sum::<i64>();
        assert!(rows.iter().all(|row| total(row) == states(row)), "{usage}");
        assert_eq!(rows.iter().map(total).sum::<i64>(), usage["capacity"].as_i64().unwrap(), "{by}");
        // 16 GPUs since they were first seen.
        assert_eq!(usage["capacity"].as_i64().unwrap() % 8, 0);
        let keys: Vec<&str> = rows.iter().map(|row| row["key"].as_str().unwrap()).collect();
        match by {
            "user" => assert!(keys.iter().all(|k| ["-", "ada"].contains(k)), "{keys:?}"),
            "job" => assert!(keys.iter().all(|k| ["-", "default/a", "default/b"].contains(k)), "{keys:?}"),
            _ => {}
        }
    }
    let (status, _) = world.call("GET", "/v1/usage?from=0&to=0", None).await;
    assert_eq!(status, StatusCode::OK);
    insta::assert_snapshot!(world.refused("GET", "/v1/usage?by=colour", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/usage?from=2&to=1", None).await);
    insta::assert_snapshot!(world.refused("GET", "/v1/usage?from=then", None).await);
}

#[tokio::test]
async fn the_history_has_what_ran_and_says_what_is_left_out() {
    let world = World::with(Script { prepares: false, ..Script::default() }, ServerConfig::default());
    world.objects.put(LOCK.as_bytes()).unwrap();
    for name in ["ended", "live"] {
        world.submit(&submission(name)).await;
    }
    let never = world.submit(&with_environment()).await.summary;
    let cancel = json!({ "action": "cancel" });
    world.call("POST", &format!("/v1/jobs/{}/actions", never.name), Some(cancel)).await;
    world.until_phase(2, "Running").await;
    world.tell(1, gone(0, &[]));
    world.until_ended(1).await;
    let history = world.get("/v1/history?from=1h").await;
    let names: Vec<&str> = history["jobs"].as_array().unwrap().iter().map(|j| j["name"].as_str().unwrap()).collect();
    let left_out = (&history["unfinished"], &history["neverRan"]);
    assert_eq!((names, left_out), (vec!["ended"], (&json!(1), &json!(1))), "{history}");
    insta::assert_snapshot!("history", stable(history["jobs"][0].clone()));
    assert_eq!(world.get("/v1/history?from=0&to=1").await["jobs"], json!([]));
    insta::assert_snapshot!(world.refused("GET", "/v1/history?by=user", None).await);
}
