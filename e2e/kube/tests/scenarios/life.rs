//! Jobs from beginning to end.

use super::LONGEST;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::{Phase as _, Plane};
use aviflow_testcluster::until;
use serde_json::json;

pub fn an_applied_job_runs_on_two_nodes(world: &mut World) -> Result<()> {
    let script = "echo rank $NODE_RANK of $NNODES on $AVIFLOW_NODE, gpus $NVIDIA_VISIBLE_DEVICES";
    world.cluster.apply(&world.job("two", 2, 8, script).to_string())?;
    let object = world.cluster.phase("two", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let log = world.plane.ok(&["logs", "two"])?;
    for rank in 0..2 {
        ensure!(log.contains(&format!("rank {rank} of 2 on hgx")), "{log}");
    }
    ensure!(log.contains("on hgx0") && log.contains("on hgx1"), "{log}");
    ensure!(log.matches("GPU-").count() == 16, "every rank sees its 8 GPUs: {log}");
    until("its pods are removed", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}

pub fn a_failing_job_says_why(world: &mut World) -> Result<()> {
    let mut failing = world.job("bad", 2, 1, "echo about to fail; [ $NODE_RANK = 0 ] || exit 3; sleep 600");
    failing["spec"]["retry"] = json!({"failures": 1});
    world.cluster.apply(&failing.to_string())?;
    let object = until("it fails", LONGEST, || {
        let object = world.cluster.object("bad")?;
        Ok((object["status"]["phase"] == "Failed").then_some(object))
    })?;
    ensure!(object["status"]["attempt"] == 1, "its ranks start again in the same pods: {}", object["status"]);
    let reason = object["status"]["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("rank 1") && reason.contains('3'), "{reason}");
    let shown = world.plane.ok(&["show", "bad"])?;
    ensure!(shown.contains("about to fail"), "the last lines of the rank that failed: {shown}");
    ensure!(shown.contains("the ranks start again where they are (epoch 2)"), "one retry was allowed: {shown}");
    ensure!(shown.contains("no retry is left"), "and no more: {shown}");
    balanced(world)
}

pub fn a_gang_that_does_not_fit_makes_no_pod(world: &mut World) -> Result<()> {
    let refused = world.job("three", 3, 8, "true");
    world.cluster.apply(&refused.to_string())?;
    let object = until("it is refused with a reason", LONGEST, || {
        let object = world.cluster.object("three")?;
        let reason = object["status"]["conditions"][0]["message"].as_str().unwrap_or_default().to_owned();
        Ok((!reason.is_empty()).then_some(reason))
    })?;
    ensure!(object.contains("can never start"), "{object}");
    world.cluster.apply(&world.job("holder", 1, 8, "sleep 600").to_string())?;
    world.cluster.phase("holder", "Running")?;
    world.cluster.apply(&world.job("waits", 2, 8, "true").to_string())?;
    let reason = until("it waits with a reason", LONGEST, || {
        let object = world.cluster.object("waits")?;
        Ok(object["status"]["reason"].as_str().filter(|r| !r.is_empty()).map(str::to_owned))
    })?;
    ensure!(reason.contains('8'), "{reason}");
    let pods = world.cluster.pods()?;
    ensure!(pods.len() == 1, "only the holder has a pod: {pods:?}");
    world.plane.ok(&["cancel", "holder"])?;
    world.cluster.phase("waits", "Succeeded")?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "three"])?;
    balanced(world)
}

pub fn a_deleted_object_is_a_graceful_stop(world: &mut World) -> Result<()> {
    let script = "trap 'echo saved; exit 0' TERM; echo ready; sleep 600 & wait";
    world.cluster.apply(&world.job("gone", 1, 4, script).to_string())?;
    world.cluster.phase("gone", "Running")?;
    until("it is ready", LONGEST, || Ok(world.plane.ok(&["logs", "gone"])?.contains("ready").then_some(())))?;
    // Comes back once the finalizer is gone.
    world.cluster.kubectl_ok(&["delete", "trainingjob", "gone"])?;
    let log = world.plane.ok(&["logs", "gone"])?;
    ensure!(log.contains("saved"), "its ranks were asked to end: {log}");
    let job = world.plane.json(&["show", "gone"])?;
    ensure!(job["phase"] == "cancelled" || job["phase"] == "Cancelled", "{job}");
    until("its pods are removed", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}

pub fn a_job_of_the_command_line_has_its_object(world: &mut World) -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("hello.py"), "print('from the snapshot')\n")?;
    let document = format!("name: shipped\nimage: {}\ncode: .\nrun: python3 hello.py\n", world.image);
    let file = folder.path().join("job.yaml");
    std::fs::write(&file, document)?;
    let said = world.plane.ok(&["run", &file.display().to_string()])?;
    ensure!(said.contains("from the snapshot"), "{said}");
    let object = world.cluster.phase("shipped", "Succeeded")?;
    ensure!(object["spec"]["provenance"]["code"]["sha256"].is_string(), "{object}");
    let job = world.plane.json(&["show", "shipped"])?;
    let ran = &job["attemptHashes"][0];
    ensure!(ran["hash"] == job["hash"] && ran["differs"] == false, "the attempt ran what was submitted: {job}");
    balanced(world)
}

/// The ledger sums to the capacity, to the millisecond.
pub fn balanced(world: &mut World) -> Result<()> {
    partitions(&world.plane)
}

/// The ledger of a control plane partitions all GPU time.
pub fn partitions(plane: &Plane) -> Result<()> {
    aviflow_e2e_kube::partitions(&plane.json(&aviflow_e2e_kube::BY_STATE)?)
}
