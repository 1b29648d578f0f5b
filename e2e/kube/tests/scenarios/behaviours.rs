//! Behaviours that hold for every kind of cluster, on this one: what is charged and until when, what is a failure and
//! what is not, which names there may be.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;
use serde_json::{Value, json};

/// GPUs that the queue of these jobs is charged.
fn charged(world: &World) -> Result<u64> {
    world.plane.json(&["queue", "show", "default"])?["gpus"].as_u64().context("a queue says what it has")
}

/// GPU-milliseconds of a job, in whatever state.
fn spent(world: &World, job: &str) -> Result<i64> {
    let time = world.plane.json(&["show", job])?["gpuTime"].clone();
    Ok(time.as_object().into_iter().flatten().filter_map(|(_, ms)| ms.as_i64()).sum())
}

/// The pod of a worker of a job, while there is one.
fn pod(world: &World, job: &str, worker: &str) -> Result<Option<Value>> {
    let ours = |p: &Value| {
        let labels = &p["metadata"]["labels"];
        labels["aviflow.dev/name"] == job && labels["aviflow.dev/worker"] == worker
    };
    Ok(world.cluster.pods()?.into_iter().find(ours))
}

/// Runs a job on the whole pool, from beginning to end.
fn fill(world: &World, name: &str) -> Result<()> {
    world.cluster.apply(&world.job(name, 2, 8, "true").to_string())?;
    world.cluster.phase(name, "Succeeded")?;
    Ok(())
}

pub fn a_suspended_gang_is_charged_until_its_last_pod_ends(world: &mut World) -> Result<()> {
    // One of the two takes as long to save itself as it is let.
    let save = "[ $NODE_RANK = 0 ] && exit 0; until [ -e /tmp/go ]; do sleep 0.1; done; exit 0";
    let script = format!("trap '{save}' TERM; echo ready; sleep 600 & wait");
    world.cluster.apply(&world.job("slow", 2, 8, &script).to_string())?;
    world.cluster.phase("slow", "Running")?;
    until("both are ready", LONGEST, || {
        Ok((world.plane.ok(&["logs", "slow"])?.matches("ready").count() == 2).then_some(()))
    })?;
    world.cluster.apply(&world.job("next", 1, 8, "true").to_string())?;
    world.plane.ok(&["suspend", "slow"])?;
    until("the first of its ranks has ended", LONGEST, || {
        let workers = world.plane.json(&["show", "slow"])?["workers"].clone();
        Ok((workers[0]["exits"]["0"] == 0).then_some(()))
    })?;
    let second = pod(world, "slow", "1")?.context("the other saves itself")?;
    ensure!(charged(world)? == 16, "the whole gang is charged, and so nothing started on the first node");
    ensure!(pod(world, "next", "0")?.is_none(), "it waits for the node that the gang still holds");
    let name = second["metadata"]["name"].as_str().context("a pod has a name")?;
    world.cluster.kubectl_ok(&["exec", name, "-c", "worker", "--", "touch", "/tmp/go"])?;
    world.cluster.phase("next", "Succeeded")?;
    until("its pods are gone", LONGEST, || Ok(pod(world, "slow", "1")?.is_none().then_some(())))?;
    let before = spent(world, "slow")?;
    fill(world, "filler-of-slow")?;
    ensure!(spent(world, "slow")? == before, "it is charged nothing while it waits");
    let counters = world.plane.json(&["show", "slow"])?["counters"].clone();
    ensure!(counters["suspensions"] == 1 && counters["failures"] == 0, "{counters}");
    world.plane.ok(&["cancel", "slow"])?;
    balanced(world)
}

pub fn what_never_began_is_charged_nothing_once_it_is_gone(world: &mut World) -> Result<()> {
    let (repository, _) = world.image.split_once('@').context("an image by its digest")?;
    let mut job = world.job("unready", 2, 8, "true");
    job["spec"]["image"] = json!(format!("{repository}@sha256:{}", "1".repeat(64)));
    world.cluster.apply(&job.to_string())?;
    until("it has begun", LONGEST, || {
        Ok((world.cluster.object("unready")?["status"]["attempt"].as_u64() >= Some(1)).then_some(()))
    })?;
    // Only what waits can be held: it has given its GPUs back by itself, and stays away from then on.
    until("it waits", LONGEST, || Ok(world.plane.aviflow(&["hold", "unready"])?.status.success().then_some(())))?;
    until("its pods are gone", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    ensure!(charged(world)? == 0, "nobody is charged anything");
    let before = spent(world, "unready")?;
    ensure!(before > 0, "while its pods were there, it was");
    fill(world, "filler-of-unready")?;
    ensure!(spent(world, "unready")? == before, "and nothing since");
    let counters = world.plane.json(&["show", "unready"])?["counters"].clone();
    ensure!(counters["failures"] == 0, "{counters}");
    world.plane.ok(&["cancel", "unready"])?;
    balanced(world)
}

pub fn a_rank_that_ends_well_ends_no_gang(world: &mut World) -> Result<()> {
    // The one ends at once, and the other when it is told to.
    let script = "[ $NODE_RANK = 1 ] && exit 0; until [ -e /tmp/go ]; do sleep 0.1; done; echo the last";
    world.cluster.apply(&world.job("uneven", 2, 1, script).to_string())?;
    world.cluster.phase("uneven", "Running")?;
    until("the one has ended", LONGEST, || {
        let workers = world.plane.json(&["show", "uneven"])?["workers"].clone();
        Ok((workers[1]["exits"]["1"] == 0).then_some(()))
    })?;
    let object = world.cluster.object("uneven")?;
    ensure!(object["status"]["phase"] == "Running", "the attempt goes on: {}", object["status"]);
    let first = pod(world, "uneven", "0")?.context("the other runs")?;
    let name = first["metadata"]["name"].as_str().context("a pod has a name")?;
    world.cluster.kubectl_ok(&["exec", name, "-c", "worker", "--", "touch", "/tmp/go"])?;
    let object = world.cluster.phase("uneven", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    ensure!(world.plane.ok(&["logs", "uneven"])?.contains("the last"), "it came to its end");

    // Of two that fail, the first is named, with its code and its last words; the rest of the gang is ended.
    let script = "[ $NODE_RANK = 0 ] && { trap 'exit 9' TERM; sleep 600 & wait; }; echo no more sums; exit 7";
    world.cluster.apply(&world.job("broken", 2, 1, script).to_string())?;
    until("it fails", LONGEST, || Ok((world.cluster.object("broken")?["status"]["phase"] == "Failed").then_some(())))?;
    let object = world.cluster.object("broken")?;
    ensure!(object["status"]["reason"] == "rank 1 exited with 7", "{}", object["status"]);
    let shown = world.plane.ok(&["show", "broken"])?;
    ensure!(shown.contains("no more sums"), "{shown}");
    until("nothing is left of it", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}

pub fn a_state_that_cannot_be_read_is_no_failure(world: &mut World) -> Result<()> {
    let script = "until [ -e /tmp/go ]; do sleep 0.1; done";
    world.cluster.apply(&world.job("unread", 2, 2, script).to_string())?;
    world.cluster.phase("unread", "Running")?;
    let of = |pods: Vec<Value>| -> Vec<Value> { pods.iter().map(|p| p["metadata"]["uid"].clone()).collect() };
    let before = of(world.cluster.pods()?);
    for _ in 0..2 {
        world.cluster.stop_apiserver()?;
        let job = world.plane.json(&["show", "unread"])?;
        ensure!(job["phase"] == "Running", "{job}");
        world.cluster.start_apiserver()?;
        aviflow_e2e_kube::knows_the_kinds(&world.cluster)?;
    }
    ensure!(of(world.cluster.pods()?) == before, "the same pods");
    for pod in world.cluster.pods()? {
        let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
        world.cluster.kubectl_ok(&["exec", name, "-c", "worker", "--", "touch", "/tmp/go"])?;
    }
    let object = world.cluster.phase("unread", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let counters = world.plane.json(&["show", "unread"])?["counters"].clone();
    ensure!(counters == json!({"failures": 0, "nodeFailures": 0, "suspensions": 0, "unready": 0}), "{counters}");
    balanced(world)
}

pub fn the_longest_name_runs_and_a_longer_one_is_refused(world: &mut World) -> Result<()> {
    let longest = "n".repeat(40);
    let file = world.plane.home().join("named.yaml");
    let document = |name: &str| format!("name: {name}\nimage: {}\nnodes: 2\nrun: 'true'\n", world.image);
    std::fs::write(&file, document(&longest))?;
    let file = file.display().to_string();
    // The second finds its name taken, and gets a number behind it.
    for name in [longest.clone(), format!("{longest}-2")] {
        world.plane.ok(&["run", &file])?;
        world.cluster.phase(&name, "Succeeded")?;
    }
    let longer = "n".repeat(41);
    std::fs::write(&file, document(&longer))?;
    let out = world.plane.aviflow(&["run", &file])?;
    let told = String::from_utf8(out.stderr)?.split_whitespace().collect::<Vec<_>>().join(" ");
    ensure!(!out.status.success() && told.contains("40 is the most"), "{told}");
    let out = world.cluster.kubectl_with(&["apply", "-f", "-"], &world.job(&longer, 1, 1, "true").to_string());
    let told = format!("{:#}", out.err().context("it is refused at admission")?);
    ensure!(told.contains("40 is the most") && told.contains("Kubernetes allows 63"), "{told}");
    balanced(world)
}
