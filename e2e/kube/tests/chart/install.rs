//! What is installed works, with no more rights than it is given.

use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::chart::{self, NAMESPACE, deploy, helm};
use aviflow_e2e_kube::{LONGEST, Phase as _};
use aviflow_testcluster::until;
use serde_json::Value;
use std::fs;

/// Nothing that the control plane asked the apiserver for was refused to it, and it has not been restarted.
pub fn untroubled(world: &World) -> Result<()> {
    let pods = chart::pods(&world.cluster)?;
    let pod = pods.first().context("the control plane has no pod")?;
    let status = &pod["status"]["containerStatuses"][0];
    ensure!(status["ready"] == true && status["restartCount"] == 0, "{status}");
    let since = pod["metadata"]["creationTimestamp"].as_str().context("it was never created")?;
    let asked = world.audit.since(since)?;
    ensure!(asked.iter().any(|request| request["objectRef"]["resource"] == "pods"), "nothing was noted: {asked:?}");
    let refused: Vec<&Value> = asked.iter().filter(|request| request["responseStatus"]["code"] == 403).collect();
    ensure!(refused.is_empty(), "its rights are not enough: {refused:?}");
    Ok(())
}

/// A job through the command line, and one as an object: both run to the end.
fn runs_trainings(world: &World, name: &str) -> Result<()> {
    let World { person, cluster, image, .. } = world;
    let code = person.folder().join(name);
    fs::create_dir_all(&code)?;
    fs::write(code.join("hello.py"), "import os; print('rank', os.environ['NODE_RANK'], 'from the snapshot')\n")?;
    let document = format!("name: {name}-cli\nimage: {image}\ncode: .\nnodes: 2\nrun: python3 hello.py\n");
    fs::write(code.join("job.yaml"), document)?;
    let said = person.ok(&["run", &code.join("job.yaml").display().to_string()])?;
    ensure!(said.contains("rank 0 from the snapshot") && said.contains("rank 1 from the snapshot"), "{said}");
    let object = cluster.phase(&format!("{name}-cli"), "Succeeded")?;
    let submitter = &object["metadata"]["annotations"]["aviflow.dev/submitter"];
    ensure!(submitter == "system:serviceaccount:default:ann", "{object}");

    let name = format!("{name}-object");
    cluster.apply(&world.job(&name, 2, 8, "echo rank $NODE_RANK of $NNODES").to_string())?;
    cluster.phase(&name, "Succeeded")?;
    let log = person.ok(&["logs", &name])?;
    ensure!(log.contains("rank 0 of 2") && log.contains("rank 1 of 2"), "{log}");
    until("the pods of both are removed", LONGEST, || Ok(cluster.pods()?.is_empty().then_some(())))?;
    person.balanced()
}

pub fn the_chart_runs_trainings(world: &World) -> Result<()> {
    // The level is in force: the control plane has got past it, and this pod does not.
    let run = ["run", "root", "--image=x", "-n", NAMESPACE, "--dry-run=server"];
    let refused = world.cluster.kubectl(&run)?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && error.contains("restricted"), "{error}");
    runs_trainings(world, "chart")?;
    // Agents are of the image that the control plane itself runs.
    world.cluster.apply(&world.job("which", 1, 1, "sleep 600").to_string())?;
    world.cluster.phase("which", "Running")?;
    let pods = world.cluster.pods()?;
    let prepared = &pods.first().context("no pod")?["spec"]["initContainers"][0]["image"];
    ensure!(*prepared == world.versions[0].as_str(), "{prepared}");
    world.person.ok(&["cancel", "which"])?;
    until("it is gone", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    untroubled(world)
}

pub fn the_manifest_takes_over_from_the_chart(world: &World) -> Result<()> {
    let cluster = &world.cluster;
    helm(cluster, &["uninstall", "aviflow", "--wait"])?;
    // As the document says: only the image has to be named. What the chart kept is helm's until it is taken over.
    let manifest = fs::read_to_string(deploy("aviflow.yaml"))?;
    let named = manifest.replace("image: aviflow:0.1.0\n", &format!("image: {}\n", world.versions[1]));
    ensure!(named != manifest, "the manifest names no image of this version");
    cluster.kubectl_with(&["apply", "--server-side", "--force-conflicts", "-f", "-"], &named)?;
    chart::rolled_out(cluster)?;
    runs_trainings(world, "manifest")?;
    untroubled(world)?;
    // Once more, as an upgrade: it is its own manager.
    cluster.kubectl_with(&["apply", "--server-side", "-f", "-"], &named)?;
    chart::rolled_out(cluster)
}

pub fn a_pod_that_observes_may_only_read(world: &World) -> Result<()> {
    let World { cluster, person, .. } = world;
    chart::install(cluster, &world.versions[1], &["mode=observe"])?;
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:aviflow");
    for verb in ["create", "delete", "patch"] {
        for thing in ["pods", "nodes", "trainingjobs.aviflow.dev", "queues.aviflow.dev", "networkpolicies"] {
            let may = cluster.kubectl(&["auth", "can-i", verb, thing, &account])?;
            ensure!(!may.status.success(), "it may {verb} {thing}");
        }
    }
    let holder = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook"},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [{
            "name": "main", "image": world.image, "command": ["sleep", "600"],
            "resources": {"limits": {"nvidia.com/gpu": "3"}},
        }]},
    });
    cluster.apply(&holder.to_string())?;
    let seen: Value = until("the pod is seen", LONGEST, || {
        let seen = person.json(&["observed"])?;
        Ok((seen["namespaces"][0]["gpus"] == 3).then_some(seen))
    })?;
    ensure!(seen["observing"] == true && seen["free"][0]["free"] == 13, "{seen}");
    cluster.kubectl_ok(&["delete", "pod", "notebook"])?;
    untroubled(world)
}
