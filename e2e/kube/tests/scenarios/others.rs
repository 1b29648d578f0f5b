//! Other workloads on the same nodes.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::{Cluster, until};
use serde_json::{Value, json};

/// A Deployment of another team: pods of `gpus` GPUs on a node.
fn deployment(world: &World, name: &str, node: &str, gpus: u32) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "nodeSelector": {"kubernetes.io/hostname": node},
                    "containers": [{
                        "name": "serve", "image": world.image, "args": ["exec sleep 3600"],
                        "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
                    }],
                },
            },
        },
    })
}

fn running(cluster: &Cluster, app: &str, wanted: usize) -> Result<()> {
    until(&format!("{wanted} pods of {app} run"), LONGEST, || {
        let list = cluster.get(&format!("/api/v1/namespaces/default/pods?labelSelector=app%3D{app}"))?;
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        let run = pods.iter().filter(|p| p["status"]["phase"] == "Running").count();
        Ok((run == wanted && pods.len() == wanted).then_some(()))
    })
}

/// GPUs of a node that others use, as the control plane knows it.
fn foreign(world: &World, node: &str, wanted: usize) -> Result<()> {
    until(&format!("others use {wanted} GPUs of {node}"), LONGEST, || {
        let node = world.plane.json(&["node", "show", node])?;
        let gpus = node["gpus"].as_array().cloned().unwrap_or_default();
        Ok((gpus.iter().filter(|gpu| gpu["state"] == "foreign").count() == wanted).then_some(()))
    })
}

pub fn gpus_of_others_are_respected(world: &mut World) -> Result<()> {
    world.cluster.apply(&deployment(world, "serving", "hgx0", 4).to_string())?;
    running(&world.cluster, "serving", 1)?;
    foreign(world, "hgx0", 4)?;
    world.cluster.apply(&world.job("wide", 2, 8, "true").to_string())?;
    world.cluster.apply(&world.job("narrow", 2, 4, "true").to_string())?;
    // What fits beside the others runs; what does not, waits without a pod.
    world.cluster.phase("narrow", "Succeeded")?;
    let wide = world.cluster.object("wide")?;
    ensure!(wide["status"]["phase"] == "Queued" && wide["status"]["attempt"] == 0, "{}", wide["status"]);
    // Their going wakes it.
    world.cluster.kubectl_ok(&["delete", "deployment", "serving"])?;
    world.cluster.phase("wide", "Succeeded")?;
    foreign(world, "hgx0", 0)?;
    balanced(world)
}

pub fn a_claim_holds_against_others(world: &mut World) -> Result<()> {
    // Without, a job could not be turned out before it has run for ten minutes.
    let folder = tempfile::tempdir()?;
    let policy = folder.path().join("policy.yaml");
    std::fs::write(&policy, "kind: Policy\nminimumRun: 1s\n")?;
    world.plane.ok(&["apply", "-f", &policy.display().to_string()])?;
    // A job of a higher priority turns one out that takes its time: meanwhile the GPUs are claimed.
    let script = "trap 'sleep 8; exit 0' TERM; sleep 600 & wait";
    let mut low = world.job("low", 1, 8, script);
    low["spec"]["priority"] = json!("low");
    world.cluster.apply(&low.to_string())?;
    world.cluster.phase("low", "Running")?;
    let node = world.cluster.object("low")?["status"]["on"][0].as_str().unwrap_or_default().to_owned();
    let other = if node == "hgx0" { "hgx1" } else { "hgx0" };
    let mut beside = world.job("beside", 1, 8, "sleep 600");
    beside["spec"]["priority"] = json!("high");
    world.cluster.apply(&beside.to_string())?;
    world.cluster.phase("beside", "Running")?;
    let mut high = world.job("high", 1, 8, "echo mine; sleep 600");
    high["spec"]["priority"] = json!("high");
    world.cluster.apply(&high.to_string())?;
    until("its GPUs are kept for it", LONGEST, || {
        let object = world.cluster.get(&format!("/api/v1/nodes/{node}"))?;
        Ok(object["spec"]["taints"].to_string().contains("aviflow.dev/keep").then_some(()))
    })?;
    // Another team scales up onto the node at the worst moment.
    world.cluster.apply(&deployment(world, "greedy", &node, 2).to_string())?;
    let object = world.cluster.phase("high", "Running")?;
    let shown = || ["low", "beside", "high"].map(|job| world.plane.ok(&["show", job]).unwrap_or_default()).join("\n");
    ensure!(object["status"]["on"][0] == node.as_str(), "it was promised {node}: {}", shown());
    until("the node is open again", LONGEST, || {
        let object = world.cluster.get(&format!("/api/v1/nodes/{node}"))?;
        Ok((!object["spec"]["taints"].to_string().contains("aviflow.dev/keep")).then_some(()))
    })?;
    world.cluster.kubectl_ok(&["delete", "deployment", "greedy"])?;
    world.plane.ok(&["cancel", "high", "beside", "low"])?;
    until("nothing is left of them", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    foreign(world, other, 0)?;
    balanced(world)
}

pub fn a_cordoned_node_takes_no_job(world: &mut World) -> Result<()> {
    world.cluster.kubectl_ok(&["cordon", "hgx0"])?;
    until("the control plane knows it", LONGEST, || {
        Ok(world.plane.ok(&["node", "ls"])?.contains("cordoned in Kubernetes").then_some(()))
    })?;
    world.cluster.apply(&world.job("elsewhere", 1, 8, "sleep 2").to_string())?;
    world.cluster.apply(&world.job("both", 2, 8, "true").to_string())?;
    let object = world.cluster.phase("elsewhere", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let both = world.cluster.object("both")?;
    ensure!(both["status"]["phase"] == "Queued", "{}", both["status"]);
    world.cluster.kubectl_ok(&["uncordon", "hgx0"])?;
    world.cluster.phase("both", "Succeeded")?;
    balanced(world)
}
