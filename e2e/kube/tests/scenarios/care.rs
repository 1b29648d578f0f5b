//! Care for nodes: what may not be suspended holds a drain up, a new driver finds a node empty, pods of others with a
//! higher priority take a worker's place, and nodes come and go.

use super::LONGEST;
use super::life::balanced;
use super::trouble::{counters, logged, over};
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;
use serde_json::json;

/// The first node that a job runs on.
fn node_of(world: &World, job: &str) -> Result<String> {
    Ok(world.cluster.phase(job, "Running")?["status"]["on"][0].as_str().unwrap_or_default().to_owned())
}

pub fn a_job_that_may_not_be_suspended_holds_a_drain_up(world: &mut World) -> Result<()> {
    let mut job = world.job("fixed", 1, 4, "echo ready; sleep 600");
    job["spec"]["preemptible"] = json!(false);
    world.cluster.apply(&job.to_string())?;
    let node = node_of(world, "fixed")?;
    let drain = |time: &str| {
        let timeout = format!("--timeout={time}");
        let args = ["drain", &node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", &timeout];
        world.cluster.kubectl(&args)
    };
    // kubectl tries again every five seconds, until it gives up.
    let refused = drain("7s")?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("disruption budget"), "{said}");
    let object = world.cluster.object("fixed")?;
    ensure!(object["status"]["phase"] == "Running" && object["status"]["attempt"] == 1, "{}", object["status"]);
    world.plane.ok(&["cancel", "fixed"])?;
    let done = drain("90s")?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    world.cluster.kubectl_ok(&["uncordon", &node])?;
    over(world, "fixed")
}

pub fn a_new_driver_finds_a_node_empty(world: &mut World) -> Result<()> {
    let script = "trap 'echo saved; exit 0' TERM; echo ready; sleep 600 & wait";
    world.cluster.apply(&world.job("upgraded", 1, 8, script).to_string())?;
    let node = node_of(world, "upgraded")?;
    logged(world, "upgraded", "1", "ready", 1)?;
    // As the GPU Operator does it: first it says so, then it waits until nothing uses the driver.
    let say = |state: &str| {
        let label = format!("nvidia.com/gpu-driver-upgrade-state={state}");
        world.cluster.kubectl_ok(&["label", "--overwrite", "node", &node, &label])
    };
    let folder = tempfile::tempdir()?;
    let policy = folder.path().join("policy.yaml");
    // As it never saves by itself, it would be waited for.
    std::fs::write(&policy, "kind: Policy\npatience: 1s\n")?;
    world.plane.ok(&["apply", "-f", &policy.display().to_string()])?;
    say("upgrade-required")?;
    ensure!(!world.plane.ok(&["node", "ls"])?.contains("upgrades its driver"), "nothing has begun");
    say("wait-for-jobs-required")?;
    let after = until("it runs elsewhere", LONGEST, || {
        let object = world.cluster.object("upgraded")?;
        let on = object["status"]["on"][0].as_str().unwrap_or_default().to_owned();
        Ok((object["status"]["phase"] == "Running" && object["status"]["attempt"] == 2).then_some(on))
    })?;
    ensure!(after != node, "{after}");
    logged(world, "upgraded", "1", "saved", 1)?;
    ensure!(counters(world, "upgraded")?["failures"] == 0, "it was no fault of the job");
    say("pod-restart-required")?;
    world.cluster.apply(&world.job("both-drivers", 2, 1, "true").to_string())?;
    until("the node takes no work meanwhile", LONGEST, || {
        let shown = world.plane.ok(&["node", "ls"])?;
        Ok(shown.contains("the GPU Operator upgrades its driver (pod-restart-required)").then_some(()))
    })?;
    world.plane.ok(&["cancel", "upgraded"])?;
    world.cluster.phase("both-drivers", "Queued")?;
    say("upgrade-done")?;
    world.cluster.phase("both-drivers", "Succeeded")?;
    world.cluster.kubectl_ok(&["label", "node", &node, "nvidia.com/gpu-driver-upgrade-state-"])?;
    over(world, "upgraded")
}

pub fn a_pod_of_higher_priority_takes_a_workers_place(world: &mut World) -> Result<()> {
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent-serving"},
        "value": 1_000_000,
    });
    world.cluster.apply(&class.to_string())?;
    let script = "trap 'echo saved; exit 0' TERM; echo ready; sleep 600 & wait";
    world.cluster.apply(&world.job("displaced", 2, 8, script).to_string())?;
    world.cluster.phase("displaced", "Running")?;
    logged(world, "displaced", "1", "ready", 2)?;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": "urgent-serving",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "serve", "image": world.image, "args": ["exec sleep 3600"],
                "resources": {"limits": {"nvidia.com/gpu": "2"}},
            }],
        },
    });
    world.cluster.apply(&pod.to_string())?;
    until("the whole gang has made room", LONGEST, || {
        let object = world.cluster.object("displaced")?;
        let urgent = world.cluster.get("/api/v1/namespaces/default/pods/urgent")?;
        let left = object["status"]["phase"] == "Queued" && world.cluster.pods()?.is_empty();
        Ok((left && urgent["status"]["phase"] == "Running").then_some(()))
    })?;
    logged(world, "displaced", "1", "saved", 2)?;
    let shown = world.plane.ok(&["show", "displaced"])?;
    ensure!(shown.contains("preempt"), "why, as kube-scheduler says it: {shown}");
    ensure!(counters(world, "displaced")?["failures"] == 0, "{shown}");
    world.cluster.kubectl_ok(&["delete", "pod", "urgent"])?;
    until("it runs again", LONGEST, || {
        let object = world.cluster.object("displaced")?;
        Ok((object["status"]["phase"] == "Running" && object["status"]["attempt"] == 2).then_some(()))
    })?;
    world.cluster.kubectl_ok(&["delete", "priorityclass", "urgent-serving"])?;
    over(world, "displaced")
}

pub fn a_node_that_is_removed_comes_back(world: &mut World) -> Result<()> {
    let capacity = |world: &World| -> Result<u64> {
        let nodes = world.plane.json(&["node", "ls"])?;
        let nodes = nodes.as_array().cloned().unwrap_or_default();
        Ok(nodes.iter().map(|n| n["gpus"].as_array().map_or(0, |g| g.len() as u64)).sum())
    };
    let whole = capacity(world)?;
    world.cluster.apply(&world.job("there", 1, 8, "echo ready; sleep 600").to_string())?;
    let node = node_of(world, "there")?;
    let other = if node == "hgx0" { "hgx1" } else { "hgx0" };
    // An empty node is removed: the job on the other goes on, and what asks for both waits.
    world.cluster.node(other).remove()?;
    until("it is no part of the pool", LONGEST, || Ok((capacity(world)? < whole).then_some(())))?;
    world.cluster.apply(&world.job("pair", 2, 4, "true").to_string())?;
    world.cluster.node(other).add()?;
    until("it is whole again", LONGEST, || Ok((capacity(world)? == whole).then_some(())))?;
    let object = world.cluster.object("there")?;
    ensure!(object["status"]["phase"] == "Running" && object["status"]["attempt"] == 1, "{}", object["status"]);
    world.plane.ok(&["cancel", "there"])?;
    world.cluster.phase("pair", "Succeeded")?;
    over(world, "there")
}

pub fn a_node_is_checked_before_it_takes_work_again(world: &mut World) -> Result<()> {
    world.cluster.kubectl_ok(&["taint", "node", "hgx1", "repaired=true:NoSchedule"])?;
    // Nobody else's pod could come there.
    let passed = world.plane.aviflow(&["node", "check", "hgx1"])?;
    let said = String::from_utf8_lossy(&passed.stdout).into_owned();
    ensure!(passed.status.success(), "{said}{}", String::from_utf8_lossy(&passed.stderr));
    ensure!(said.contains("✓ 8 of 8 GPUs are seen") && said.contains("the control plane is reached"), "{said}");
    ensure!(said.contains("stays closed to new work by the cluster"), "{said}");
    world.cluster.kubectl_ok(&["taint", "node", "hgx1", "repaired-"])?;
    let failed = world.plane.aviflow(&[
        "node",
        "check",
        "hgx1",
        "--image",
        &world.image,
        "--",
        "/bin/sh",
        "-c",
        "echo no link; exit 4",
    ])?;
    let (out, err) = (String::from_utf8_lossy(&failed.stdout), String::from_utf8_lossy(&failed.stderr));
    ensure!(out.contains("no link") && err.contains("exit code 4"), "{out}{err}");
    let missing = format!("{}@sha256:{}", world.image.split_once('@').unwrap_or_default().0, "0".repeat(64));
    let failed = world.plane.aviflow(&["node", "check", "hgx1", "--image", &missing, "--", "true"])?;
    let err = String::from_utf8_lossy(&failed.stderr);
    ensure!(err.contains("its image cannot be pulled"), "{err}");
    ensure!(world.plane.json(&["node", "show", "hgx1"])?["condition"] == "Cordoned", "it did not pass");
    world.plane.ok(&["node", "check", "hgx1"])?;
    world.cluster.apply(&world.job("both-again", 2, 8, "true").to_string())?;
    world.cluster.phase("both-again", "Succeeded")?;
    let system = world.cluster.get("/api/v1/namespaces/aviflow-system/pods")?;
    ensure!(!system.to_string().contains("aviflow-check-"), "nothing of it is left: {system}");
    balanced(world)
}
