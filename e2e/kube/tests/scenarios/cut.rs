//! Nodes that cannot be reached.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::{Phase as _, Plane};
use aviflow_testcluster::until;
use std::time::Duration;

/// An agent's patience here, in seconds: the least that there may be.
const FENCE_AFTER: &str = "45";

/// A fence, a write-off and another start, on a busy machine.
const FENCED: Duration = Duration::from_secs(240);

pub fn a_node_that_is_cut_off_runs_nothing_twice(world: &mut World) -> Result<()> {
    world.plane.kill()?;
    world.plane = Plane::start_with(&world.cluster, &["--fence-after", FENCE_AFTER])?;
    // Two nodes of three GPUs: cut off, half of it must stop by itself before all of it starts on the other node.
    let script = "while true; do echo tick $NODE_RANK $AVIFLOW_ATTEMPT; sleep 1; done";
    let job = world.job("cut", 2, 3, script);
    world.cluster.apply(&world.job("filler", 2, 4, "sleep 600").to_string())?;
    world.cluster.phase("filler", "Running")?;
    world.cluster.apply(&job.to_string())?;
    let object = world.cluster.phase("cut", "Running")?;
    ensure!(object["status"]["on"].as_array().is_some_and(|on| on.len() == 2), "{}", object["status"]);
    // Shorter than the patience: nothing moves.
    world.cluster.node("hgx1").cut()?;
    until("the node is not heard of", LONGEST, || Ok((!world.cluster.node("hgx1").ready()?).then_some(())))?;
    world.cluster.node("hgx1").heal()?;
    until("the node is heard of", LONGEST, || Ok(world.cluster.node("hgx1").ready()?.then_some(())))?;
    let object = world.cluster.object("cut")?;
    ensure!(object["status"]["attempt"] == 1 && object["status"]["phase"] == "Running", "{}", object["status"]);
    // Longer: the worker there is written off, and the gang waits for GPUs that can be reached.
    world.cluster.node("hgx1").cut()?;
    until("the worker is written off", FENCED, || {
        let shown = world.plane.ok(&["show", "cut"])?;
        Ok(shown.contains("has not been heard of").then_some(()))
    })?;
    let job = world.plane.json(&["show", "cut"])?;
    ensure!(job["counters"]["failures"] == 0 && job["counters"]["nodeFailures"] == 1, "{job}");
    world.cluster.node("hgx1").heal()?;
    until("it runs again", FENCED, || {
        let object = world.cluster.object("cut")?;
        Ok((object["status"]["phase"] == "Running" && object["status"]["attempt"] == 2).then_some(()))
    })?;
    let pods = world.cluster.pods()?;
    let of_first = |p: &&serde_json::Value| {
        let labels = &p["metadata"]["labels"];
        labels["aviflow.dev/name"] == "cut" && labels["aviflow.dev/attempt"] == "1"
    };
    until("nothing of the first attempt is left", FENCED, || {
        Ok((!world.cluster.pods()?.iter().any(|p| of_first(&p))).then_some(()))
    })?;
    ensure!(pods.len() >= 2, "{pods:?}");
    world.cluster.kubectl_ok(&["delete", "trainingjob", "cut", "filler"])?;
    until("nothing is left of them", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}
