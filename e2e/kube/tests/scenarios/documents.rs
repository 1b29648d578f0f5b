//! Queues and pools, by `kubectl` and by the command line.

use crate::World;
use anyhow::{Result, ensure};
use aviflow_testcluster::until;
use serde_json::{Value, json};
use std::time::Duration;

const LONGEST: Duration = Duration::from_secs(90);

fn queue(name: &str, spec: &Value) -> String {
    json!({"apiVersion": "aviflow.dev/v1alpha1", "kind": "Queue", "metadata": {"name": name}, "spec": spec}).to_string()
}

fn object(world: &World, plural: &str, name: &str) -> Result<Value> {
    world.cluster.get(&format!("/apis/aviflow.dev/v1alpha1/{plural}/{name}"))
}

/// Waits until an object says something about itself.
fn accepted(world: &World, plural: &str, name: &str, status: &str) -> Result<Value> {
    until(&format!("{plural}/{name} is Accepted={status}"), LONGEST, || {
        let object = object(world, plural, name)?;
        let condition = &object["status"]["conditions"][0];
        let current = object["status"]["observedGeneration"] == object["metadata"]["generation"];
        Ok((condition["type"] == "Accepted" && condition["status"] == status && current).then_some(object))
    })
}

fn guarantee(world: &World, name: &str) -> Result<u64> {
    let queue = world.plane.json(&["queue", "show", name])?;
    Ok(queue["document"]["quotas"]["H100"]["guarantee"].as_u64().unwrap_or_default())
}

pub fn queues_are_applied_by_either_hand(world: &mut World) -> Result<()> {
    // Before its parent: refused with the reason, and taken once that is there.
    world.cluster.apply(&queue("nlp", &json!({"parent": "research", "quotas": {"H100": {"guarantee": 4}}})))?;
    let refused = accepted(world, "queues", "nlp", "False")?;
    let why = refused["status"]["conditions"][0]["message"].as_str().unwrap_or_default();
    ensure!(why.contains("research"), "{why}");
    world.cluster.apply(&queue("research", &json!({})))?;
    let taken = accepted(world, "queues", "nlp", "True")?;
    ensure!(taken["status"]["path"] == "research/nlp", "{}", taken["status"]);
    ensure!(guarantee(world, "nlp")? == 4, "as the object says");

    // A change of the object, and who made it.
    let patch = json!({"spec": {"quotas": {"H100": {"guarantee": 6}}}}).to_string();
    world.cluster.kubectl_ok(&["patch", "queue", "nlp", "--type=merge", "-p", &patch, "--field-manager=ann-tool"])?;
    until("the change is taken", LONGEST, || Ok((guarantee(world, "nlp")? == 6).then_some(())))?;
    let acts = world.plane.ok(&["log", "--kind", "queue", "--name", "nlp"])?;
    ensure!(acts.contains("ann-tool"), "the log names who changed it: {acts}");

    // A change through the API is written into the object, and stays.
    let file = world.plane.home().join("queues.yaml");
    let documents = "kind: Queue\nname: nlp\nparent: research\nquotas: {H100: {guarantee: 8}}\n---\nkind: Queue\nname: vision\nparent: research\n";
    std::fs::write(&file, documents)?;
    world.plane.ok(&["apply", "-f", &file.display().to_string()])?;
    until("the object says what the file says", LONGEST, || {
        let object = object(world, "queues", "nlp")?;
        Ok((object["spec"]["quotas"]["H100"]["guarantee"] == 8).then_some(()))
    })?;
    accepted(world, "queues", "nlp", "True")?;
    accepted(world, "queues", "vision", "True")?;
    ensure!(guarantee(world, "nlp")? == 8, "it was not taken back");

    // While the control plane is away, one is changed and one deleted.
    world.plane.kill()?;
    let patch = json!({"spec": {"quotas": {"H100": {"guarantee": 2}}}}).to_string();
    world.cluster.kubectl_ok(&["patch", "queue", "nlp", "--type=merge", "-p", &patch])?;
    world.cluster.kubectl_ok(&["delete", "queue", "vision", "--wait=false"])?;
    world.plane.run()?;
    until("both were heard of", LONGEST, || {
        let gone = object(world, "queues", "vision").is_err();
        Ok((gone && guarantee(world, "nlp")? == 2).then_some(()))
    })?;
    ensure!(world.plane.ok(&["queue", "show", "vision"]).is_err(), "its document went with the object");

    // A deletion through the API deletes the object, children first.
    world.plane.ok(&["queue", "delete", "nlp"])?;
    until("the object is gone", LONGEST, || Ok(object(world, "queues", "nlp").is_err().then_some(())))?;
    world.cluster.kubectl_ok(&["delete", "queue", "research", "--timeout=60s"])?;
    Ok(())
}

pub fn a_queue_with_jobs_is_deleted_after_them(world: &mut World) -> Result<()> {
    world.cluster.apply(&queue("busy", &json!({})))?;
    accepted(world, "queues", "busy", "True")?;
    let mut job = world.job("in-busy", 1, 1, "sleep 600");
    job["spec"]["queue"] = json!("busy");
    world.cluster.apply(&job.to_string())?;
    aviflow_e2e_kube::Phase::phase(&world.cluster, "in-busy", "Running")?;
    let shown = until("it counts the job", LONGEST, || {
        let object = object(world, "queues", "busy")?;
        Ok((object["status"]["running"] == 1).then_some(object))
    })?;
    ensure!(shown["status"]["waiting"] == 0, "{}", shown["status"]);
    world.cluster.kubectl_ok(&["delete", "queue", "busy", "--wait=false"])?;
    let held = accepted(world, "queues", "busy", "False")?;
    let why = held["status"]["conditions"][0]["message"].as_str().unwrap_or_default();
    ensure!(why.contains("in-busy"), "{why}");
    world.plane.ok(&["cancel", "in-busy"])?;
    until("the object is gone", LONGEST, || Ok(object(world, "queues", "busy").is_err().then_some(())))
}

pub fn a_pool_says_what_it_has(world: &mut World) -> Result<()> {
    let pool = json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "main"},
        "spec": {"topology": {"levels": ["leaf"], "domains": {"leaf-1": ["hgx0", "hgx1"]}}},
    });
    world.cluster.apply(&pool.to_string())?;
    let object = until("it counts its nodes", LONGEST, || {
        let object = accepted(world, "pools", "main", "True")?;
        Ok((object["status"]["nodes"] == 2).then_some(object))
    })?;
    ensure!(object["status"]["gpus"] == 16 && object["status"]["free"] == 16, "{}", object["status"]);
    let node = world.plane.json(&["node", "show", "hgx0"])?;
    ensure!(node["domains"].to_string().contains("leaf-1"), "{node}");
    world.cluster.kubectl_ok(&["delete", "pool", "main", "--timeout=60s"])?;
    Ok(())
}
