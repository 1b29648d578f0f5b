//! A store that is lost beside jobs.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// The jobs that have objects when the store is lost.
const NAMES: [&str; 6] = ["lost-ended", "lost-broken", "lost-runs", "lost-waits", "lost-train", "lost-train-2"];

/// What a person sees of each job that must be the same after as before.
fn jobs(world: &World) -> Result<BTreeMap<String, Value>> {
    let all = world.plane.json(&["ls", "--all"])?;
    let rows = all.as_array().cloned().unwrap_or_default();
    let same = |row: &Value| {
        // An object tells instants in seconds.
        let submitted = row["submitted"].as_i64().map(|ms| ms / 1000);
        serde_json::json!({
            "id": row["id"], "user": row["user"], "queue": row["queue"], "phase": row["phase"], "submitted": submitted,
        })
    };
    let ours = rows.iter().filter(|row| NAMES.iter().any(|name| row["name"] == *name));
    Ok(ours.filter_map(|row| Some((row["name"].as_str()?.to_owned(), same(row)))).collect())
}

fn uids(world: &World) -> Result<BTreeSet<String>> {
    let pods = world.cluster.pods()?;
    Ok(pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str()).map(str::to_owned).collect())
}

pub fn a_lost_store_is_rebuilt(world: &mut World) -> Result<()> {
    super::sweep_jobs(world)?;
    world.cluster.apply(&world.job("lost-ended", 1, 1, "true").to_string())?;
    world.cluster.phase("lost-ended", "Succeeded")?;
    world.cluster.apply(&world.job("lost-broken", 1, 1, "exit 3").to_string())?;
    until("it fails", LONGEST, || {
        Ok((world.cluster.object("lost-broken")?["status"]["phase"] == "Failed").then_some(()))
    })?;
    let script = "for i in $(seq 40); do echo line $i of $NODE_RANK; sleep 1; done; echo over";
    world.cluster.apply(&world.job("lost-runs", 2, 8, script).to_string())?;
    world.cluster.phase("lost-runs", "Running")?;
    world.cluster.apply(&world.job("lost-waits", 1, 8, "echo it came to its turn").to_string())?;
    // The second of a name has another in Aviflow than in its document.
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("train.yaml");
    fs::write(&file, format!("name: lost-train\nimage: {}\ngpusPerNode: 1\nrun: echo trained\n", world.image))?;
    let file = file.display().to_string();
    for _ in 0..2 {
        world.plane.ok(&["run", "--detach", &file])?;
    }
    until("all that waits has its object", LONGEST, || {
        let waits = |name| Ok::<_, anyhow::Error>(world.cluster.object(name)?["status"]["phase"] == "Queued");
        Ok((waits("lost-waits")? && waits("lost-train")? && waits("lost-train-2")?).then_some(()))
    })?;
    world.plane.ok(&["hold", "lost-train-2"])?;
    until("its object says who holds it", LONGEST, || {
        Ok(world.cluster.object("lost-train-2")?["status"]["held"].is_string().then_some(()))
    })?;
    let (before, pods) = (jobs(world)?, uids(world)?);
    ensure!(before.len() == NAMES.len() && pods.len() == 2, "{before:?} {pods:?}");
    world.plane.kill()?;
    fs::remove_dir_all(world.plane.home().join("home"))?;
    world.plane.run()?;

    let said = world.plane.log();
    ensure!(
        said.contains("it was rebuilt from their objects, 1 that hold GPUs, 3 that wait and 2 that have ended"),
        "{said}"
    );
    ensure!(said.contains("not recovered: the ledger and all use until now"), "{said}");
    let after = jobs(world)?;
    ensure!(after == before, "before: {before:?}\nafter: {after:?}");
    ensure!(uids(world)? == pods, "the pods are those of before");
    let shown = world.plane.ok(&["show", "lost-runs"])?;
    ensure!(shown.contains("taken over from its object, as the store was lost"), "{shown}");
    let shown = world.plane.ok(&["show", "lost-broken"])?;
    ensure!(shown.contains("rank 0") && shown.contains("more was in a store that is lost"), "{shown}");
    // A bare name means the latest of the work, as before.
    let shown = world.plane.json(&["show", "lost-train"])?;
    ensure!(shown["name"] == "lost-train-2" && shown["spec"]["name"] == "lost-train", "{shown}");

    let object = world.cluster.phase("lost-runs", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let log = world.plane.ok(&["logs", "lost-runs"])?;
    let ends = log.lines().filter(|line| line.ends_with("line 40 of 0") || line.ends_with("line 40 of 1")).count();
    ensure!(ends == 2 && log.matches("over").count() == 2, "each rank ran once, and to its end: {log}");
    for name in ["lost-waits", "lost-train"] {
        let object = world.cluster.phase(name, "Succeeded")?;
        ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    }
    let held = world.plane.json(&["show", "lost-train-2"])?;
    ensure!(held["phase"] == "Queued", "who held it has not let it go: {held}");
    world.plane.ok(&["release", "lost-train-2"])?;
    world.cluster.phase("lost-train-2", "Succeeded")?;
    world.plane.ok(&["run", "--detach", &file])?;
    let new = world.cluster.phase("lost-train-3", "Succeeded")?;
    let number = new["status"]["jobId"].as_u64().context("it has no number")?;
    let highest = before.values().filter_map(|job| job["id"].as_u64()).max().context("jobs have numbers")?;
    ensure!(number > highest + 1_000_000, "{number} follows {highest}");
    until("nothing is left of them", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}
