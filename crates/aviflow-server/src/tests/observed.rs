use super::support::{World, submission};
use serde_json::json;
use std::sync::atomic::Ordering;

#[tokio::test]
async fn who_only_looks_takes_nothing() {
    let world = World::new();
    insta::assert_snapshot!(world.refused("GET", "/v1/observed", None).await);
    world.body.observes.store(true, Ordering::SeqCst);
    assert_eq!(world.get("/v1/observed").await["observing"], true);
    world.get("/v1/nodes").await;
    let job = json!(submission("train"));
    insta::assert_snapshot!(world.refused("POST", "/v1/jobs", Some(job.clone())).await);
    let cordon = Some(json!({ "action": "cordon" }));
    for (method, path, body) in [
        ("POST", "/v1/nodes/node-1/actions", cordon),
        ("PUT", "/v1/queues/nlp", Some(json!({}))),
        ("POST", "/v1/server/actions", Some(json!({ "action": "pause" }))),
    ] {
        let refused = world.refused(method, path, body).await;
        assert!(refused.contains("observing"), "{method} {path}: {refused}");
    }
    // A question what would happen changes nothing.
    let (status, answer) = world.call("POST", "/v1/plan", Some(job)).await;
    assert!(status.is_success(), "{answer}");
    world.body.observes.store(false, Ordering::SeqCst);
    world.submit(&submission("train")).await;
}
