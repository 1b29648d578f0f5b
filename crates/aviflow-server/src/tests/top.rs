use super::support::{World, gone, submission};
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::driver::wall_clock;
use aviflow_engine::telemetry::{Point, Telemetry};
use aviflow_metrics::gpu::{Reading, Sample};
use std::collections::BTreeMap;

/// A job on the first two of the GPUs of a node, of which all report.
async fn watched(uuids: &[&str]) -> World {
    let world = World::new();
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let now = wall_clock();
    for (step, at) in [(10, Time(now.0 - 4000)), (20, now)] {
        let values = BTreeMap::from([("loss".to_owned(), 2.5), ("mfu".to_owned(), 33.7)]);
        let (total_steps, tokens, odd) = (Some(100), None, BTreeMap::new());
        world.telemetry.progress(JobId(1), Point { at, attempt: 1, rank: 0, step, total_steps, tokens, values, odd });
    }
    world.log(1, 0, "5 0 o loss 2.5 key=sk-abcdefghijklmnopqrstuvwxyz0123456789ABCD\n");
    let agent = crate::body::BodyAgent {
        job: JobId(1),
        attempt: 1,
        worker: 0,
        pid: None,
        connected: true,
        gpus: uuids.iter().map(|uuid| (*uuid).to_owned()).collect(),
    };
    world.body.agents.lock().unwrap().push(agent);
    let node = world.get("/v1/jobs/train").await["workers"][0]["node"].as_str().unwrap().to_owned();
    let gpu = |n: u32| Reading {
        uuid: format!("GPU-{n}"),
        index: Some(n),
        sample: Sample { utilization: Some(0.5), memory_used: Some(1024.0), ..Sample::default() },
        xid: Some(if n == 7 { 79 } else { 0 }),
        ..Reading::default()
    };
    world.gpus.read(&node, wall_clock().0, (0..8).map(gpu).collect());
    world.gpus.failed("node-2", "http://10.0.0.2:9400/metrics gives no figures: connection refused".into());
    world
}

#[tokio::test]
async fn what_runs_is_shown_with_its_own_gpus_and_nodes_with_all() {
    let world = watched(&["GPU-2", "GPU-5"]).await;
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    let top = world.get("/v1/top").await;
    let job = &top["jobs"][0];
    assert_eq!((&job["step"], &job["totalSteps"], &job["stepMs"]), (&20.into(), &100.into(), &400.0.into()), "{job}");
    assert_eq!((&job["loss"], &job["mfu"]), (&2.5.into(), &0.337.into()), "a percentage is a part: {job}");
    let load = &job["load"];
    assert_eq!((&load["gpus"], &load["utilization"], &load["memoryUsed"]), (&2.into(), &0.5.into(), &2048.0.into()));
    assert!(load.get("smActive").is_none() && load.get("power").is_none(), "what is not known is absent: {load}");
    let nodes = top["nodes"].as_array().unwrap();
    let held = nodes.iter().find(|node| node["held"] == 2).unwrap();
    assert_eq!((&held["load"]["gpus"], &held["xids"]), (&8.into(), &serde_json::json!([79])), "{held}");
    let other = nodes.iter().find(|node| node["name"] == "node-2").unwrap();
    assert_eq!(other["trouble"], "http://10.0.0.2:9400/metrics gives no figures: connection refused");
}

#[tokio::test]
async fn of_a_shared_node_nobody_guesses() {
    let world = watched(&[]).await;
    let top = world.get("/v1/top").await;
    assert_eq!(top["jobs"][0]["load"], serde_json::json!({ "gpus": 0 }), "{top}");
}

#[tokio::test]
async fn ranks_are_shown_with_their_last_lines() {
    let world = watched(&["GPU-2", "GPU-5"]).await;
    let ranks = world.get("/v1/jobs/train/ranks").await;
    assert_eq!(ranks["ranks"].as_array().unwrap().len(), 1);
    let rank = &ranks["ranks"][0];
    assert_eq!((&rank["step"], &rank["stepMs"], &rank["load"]["gpus"]), (&20.into(), &400.0.into(), &2.into()));
    let line = rank["line"].as_str().unwrap();
    assert!(line.starts_with("loss 2.5 ") && !line.contains("sk-abcdef"), "keys are masked: {line}");
    world.tell(1, gone(0, &[]));
    world.until_ended(1).await;
    let ranks = world.get("/v1/jobs/train/ranks").await;
    assert_eq!((&ranks["job"]["phase"], &ranks["ranks"]), (&"Succeeded".into(), &serde_json::json!([])));
    assert_eq!(world.get("/v1/top").await["jobs"], serde_json::json!([]));
    assert!(world.refused("GET", "/v1/jobs/tran/ranks", None).await.contains("did you mean `train`"));
}

#[tokio::test]
async fn a_gang_is_as_busy_as_its_busiest_gpu_if_all_are_known() {
    let world = watched(&["GPU-2", "GPU-5"]).await;
    let looks = world.server.looks();
    assert_eq!(looks.busiest().unwrap(), BTreeMap::from([((JobId(1), 1), 0.5)]));
    // Of the one that is not known it may be that it works.
    let world = watched(&["GPU-2", "GPU-99"]).await;
    assert_eq!(world.server.looks().busiest().unwrap(), BTreeMap::new());
}
