//! What goes wrong with pods and nodes, and what comes of it: the reason each time, and no retry that is not owed.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::oci::{FileEntry, Image};
use aviflow_testcluster::until;
use serde_json::{Value, json};

/// What ended attempts of a job.
pub(super) fn counters(world: &World, name: &str) -> Result<Value> {
    Ok(world.plane.json(&["show", name])?["counters"].clone())
}

/// Waits until the output of a job's attempt has a word so often; it may come after the job's next state.
pub(super) fn logged(world: &World, job: &str, attempt: &str, word: &str, times: usize) -> Result<()> {
    until(&format!("{word} is in the output of {job}"), LONGEST, || {
        let log = world.plane.ok(&["logs", job, "--attempt", attempt])?;
        Ok((log.matches(word).count() == times).then_some(()))
    })
}

/// The name of the pod of a job's worker 0.
fn pod(world: &World, job: &str) -> Result<String> {
    until(&format!("{job} has a pod"), LONGEST, || {
        let pods = world.cluster.pods()?;
        let ours = |p: &&Value| {
            p["metadata"]["labels"]["aviflow.dev/name"] == job && p["metadata"]["deletionTimestamp"].is_null()
        };
        Ok(pods.iter().find(ours).and_then(|p| p["metadata"]["name"].as_str()).map(str::to_owned))
    })
}

/// Ends what a test left, and waits until nothing of it is left.
pub(super) fn over(world: &mut World, job: &str) -> Result<()> {
    world.cluster.kubectl_ok(&["delete", "trainingjob", job])?;
    until("nothing is left of it", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}

pub fn a_missing_image_spends_no_retry(world: &mut World) -> Result<()> {
    let (repository, _) = world.image.split_once('@').unwrap_or_default();
    let image = format!("{repository}@sha256:{}", "0".repeat(64));
    let mut job = world.job("imageless", 1, 1, "true");
    job["spec"]["image"] = json!(image);
    world.cluster.apply(&job.to_string())?;
    let reason = until("it says why", LONGEST, || {
        // It may not be submitted yet.
        let shown = String::from_utf8(world.plane.aviflow(&["show", "imageless"])?.stdout)?;
        Ok(shown.contains("its image cannot be pulled").then_some(shown))
    })?;
    ensure!(reason.contains(repository), "the image is named: {reason}");
    let counters = counters(world, "imageless")?;
    ensure!(counters["failures"] == 0, "{counters}");
    over(world, "imageless")
}

pub fn a_deleted_pod_is_no_failure(world: &mut World) -> Result<()> {
    let script = "trap 'echo saved; exit 0' TERM; echo ready $AVIFLOW_ATTEMPT; sleep 600 & wait";
    world.cluster.apply(&world.job("robbed", 2, 2, script).to_string())?;
    world.cluster.phase("robbed", "Running")?;
    logged(world, "robbed", "1", "ready", 2)?;
    let name = pod(world, "robbed")?;
    world.cluster.kubectl_ok(&["delete", "pod", &name, "--wait=false"])?;
    until("it runs again", LONGEST, || {
        let object = world.cluster.object("robbed")?;
        Ok((object["status"]["attempt"] == 2 && object["status"]["phase"] == "Running").then_some(()))
    })?;
    let counters = counters(world, "robbed")?;
    ensure!(counters["failures"] == 0, "{counters}");
    let shown = world.plane.ok(&["show", "robbed"])?;
    // Its agent may say that it was asked to end before the apiserver says by whom.
    ensure!(shown.contains("somebody deleted its pod") || shown.contains("asked to end (SIGTERM)"), "{shown}");
    // A checkpoint needs all of them: the other worker was asked to save as well, before either ended.
    logged(world, "robbed", "1", "saved", 2)?;
    over(world, "robbed")
}

pub fn a_drained_node_is_left_with_a_checkpoint(world: &mut World) -> Result<()> {
    let script = "trap 'echo saved; exit 0' TERM; echo ready; sleep 600 & wait";
    world.cluster.apply(&world.job("moved", 1, 8, script).to_string())?;
    let before = world.cluster.phase("moved", "Running")?["status"]["on"][0].as_str().unwrap_or_default().to_owned();
    logged(world, "moved", "1", "ready", 1)?;
    world.cluster.kubectl_ok(&[
        "drain",
        &before,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=90s",
    ])?;
    let after = until("it runs elsewhere", LONGEST, || {
        let object = world.cluster.object("moved")?;
        let on = object["status"]["on"][0].as_str().unwrap_or_default().to_owned();
        Ok((object["status"]["phase"] == "Running" && object["status"]["attempt"] == 2).then_some(on))
    })?;
    ensure!(after != before, "{after}");
    logged(world, "moved", "1", "saved", 1)?;
    let counters = counters(world, "moved")?;
    ensure!(counters["failures"] == 0, "{counters}");
    world.cluster.kubectl_ok(&["uncordon", &before])?;
    over(world, "moved")
}

pub fn a_worker_that_takes_too_much_memory_says_so(world: &mut World) -> Result<()> {
    let mut job = world.job("fat", 1, 1, "exec python3 -c 'x = bytearray(1 << 30)'");
    job["spec"]["resources"] = json!({"memoryPerGpu": "200Mi"});
    world.cluster.apply(&job.to_string())?;
    until("it fails", LONGEST, || {
        let object = world.cluster.object("fat")?;
        Ok((object["status"]["phase"] == "Failed").then_some(()))
    })?;
    let shown = world.plane.ok(&["show", "fat"])?;
    ensure!(shown.contains("memory") || shown.contains("signal 9"), "{shown}");
    ensure!(counters(world, "fat")?["failures"] == 1, "{shown}");
    over(world, "fat")
}

pub fn an_image_without_a_shell_runs_as_anybody(world: &mut World) -> Result<()> {
    // One static program, and a user who may write nowhere.
    let content = std::fs::read(std::env::var("AVIFLOW_AGENT_BIN")?)?;
    let folder = tempfile::tempdir()?;
    let archive = folder.path().join("bare.tar");
    let file = FileEntry { path: "/bare".to_owned(), content, mode: 0o755 };
    Image::scratch().files(&[file])?.user("1234:1234").write("bare", &archive)?;
    let image = world.cluster.registry().push(&archive, "bare")?;
    let mut job = world.job("bare", 1, 1, "");
    job["spec"]["image"] = json!(image);
    // It says how it is used, and ends with 2.
    job["spec"]["run"] = json!(["/bare"]);
    world.cluster.apply(&job.to_string())?;
    until("it fails", LONGEST, || {
        let object = world.cluster.object("bare")?;
        Ok((object["status"]["phase"] == "Failed").then_some(()))
    })?;
    let shown = world.plane.ok(&["show", "bare"])?;
    ensure!(shown.contains("usage: aviflow-agent"), "the program's own words: {shown}");
    over(world, "bare")
}

pub fn a_broken_device_is_left_alone(world: &mut World) -> Result<()> {
    world.cluster.node("hgx1").set_gpu_health(3, false)?;
    until("the control plane knows it", LONGEST, || {
        let node = world.plane.json(&["node", "show", "hgx1"])?;
        let gpus = node["gpus"].as_array().cloned().unwrap_or_default();
        Ok((gpus.iter().filter(|gpu| gpu["unhealthy"] == true).count() == 1).then_some(()))
    })?;
    world.cluster.apply(&world.job("whole", 2, 8, "true").to_string())?;
    world.cluster.apply(&world.job("seven", 2, 7, "true").to_string())?;
    world.cluster.phase("seven", "Succeeded")?;
    let whole = world.cluster.object("whole")?;
    ensure!(whole["status"]["attempt"].as_u64().unwrap_or(0) == 0, "{}", whole["status"]);
    world.cluster.node("hgx1").set_gpu_health(3, true)?;
    world.cluster.phase("whole", "Succeeded")?;
    balanced(world)
}
