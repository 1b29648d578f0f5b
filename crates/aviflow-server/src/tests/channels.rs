//! Terminals, connections and stacks.

use super::support::{Streamed, World, submission};
use crate::body::ExecTarget;
use aviflow_core::model::JobId;
use axum::body::Body;
use serde_json::{Value, json};

/// A world in which `train` runs on two nodes.
async fn running() -> World {
    let world = World::new();
    let mut submit = submission("train");
    submit.spec.nodes = aviflow_api::spec::Nodes { min: 2, max: 2 };
    world.submit(&submit).await;
    world.until_phase(1, "Running").await;
    world
}

fn port(port: u16) -> Value {
    json!({ "rank": 1, "to": { "kind": "port", "port": port } })
}

#[tokio::test]
async fn what_is_put_into_a_channel_comes_out_where_it_was_opened() {
    let world = running().await;
    let request = world.request("POST", "/v1/jobs/train/channels").body(Body::from(port(6006).to_string())).unwrap();
    let mut frames = Streamed::lines(world.send(request).await);
    let opened = frames.next().await.unwrap();
    assert_eq!(opened["type"], "opened");
    let target = ExecTarget { job: JobId(1), attempt: 1, worker: 1 };
    assert_eq!(world.body.opened.lock().unwrap()[0].0, target);
    let path = format!("/v1/jobs/train/channels/{}", opened["channel"].as_str().unwrap());
    let put = async |body: Value| {
        let request = world.request("POST", &path).body(Body::from(body.to_string())).unwrap();
        world.send(request).await.status().as_u16()
    };
    // A sign of life says nothing there.
    assert_eq!(put(json!({})).await, 204);
    assert_eq!(put(json!({ "data": "aGk=" })).await, 204);
    assert_eq!(put(json!({ "data": "eW91", "end": true })).await, 204);
    let rest = frames.rest().await;
    let data = |data: &str| json!({ "type": "data", "data": data });
    assert_eq!(rest, [data("aGk="), data("eW91"), json!({ "type": "exit", "code": 5 })]);
    assert_eq!(put(json!({ "data": "aGk=" })).await, 404, "it has ended");
    assert_eq!(put(json!({ "data": "x".repeat(400_000) })).await, 413);
}

#[tokio::test]
async fn channels_are_refused_with_the_reason() {
    let world = running().await;
    let refused = async |body: Value| world.refused("POST", "/v1/jobs/train/channels", Some(body)).await;
    insta::assert_snapshot!(refused(port(0)).await);
    insta::assert_snapshot!(refused(port(1)).await);
    insta::assert_snapshot!(refused(json!({ "rank": 2, "to": { "kind": "port", "port": 80 } })).await);
    let size = json!({ "columns": 80, "rows": 24 });
    insta::assert_snapshot!(refused(json!({ "to": { "kind": "terminal", "argv": [], "size": size } })).await);
    world.call("POST", "/v1/jobs/train/actions", Some(json!({ "action": "cancel" }))).await;
    world.until_ended(1).await;
    insta::assert_snapshot!(refused(port(80)).await);
}

#[tokio::test]
async fn stacks_are_of_all_workers_that_answer() {
    let world = running().await;
    let (_, stacks) = world.call("POST", "/v1/jobs/train/stacks", Some(json!({}))).await;
    assert_eq!(stacks["groups"][0]["ranks"], json!([0]));
    assert_eq!(stacks["missing"], json!([{ "worker": 1, "reason": "the agent of worker 1 is not connected" }]));
    let (_, of) = world.call("POST", "/v1/jobs/train/stacks", Some(json!({ "rank": 0 }))).await;
    assert_eq!(of["workers"][0]["processes"].as_array().map(Vec::len), Some(1));
    insta::assert_snapshot!(world.refused("POST", "/v1/jobs/train/stacks", Some(json!({ "rank": 9 }))).await);
}
