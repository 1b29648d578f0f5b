//! The control plane and the apiserver may be away; trainings go on, and nothing is done twice.

use super::LONGEST;
use super::life::balanced;
use super::trouble::over;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::{Phase as _, Side, Writes};
use aviflow_testcluster::{Cluster, until};
use serde_json::json;

/// What gives the control plane its rights.
const BINDING: &str = "aviflow-control-plane";

/// Says that each write is tried, and not a few of them.
const FULL: &str = "AVIFLOW_TEST_FULL";

pub fn a_control_plane_may_die_at_any_write(world: &mut World) -> Result<()> {
    let direct = world.plane.kubeconfig().to_owned();
    let writes = Writes::open(&direct)?;
    world.plane.kill()?;
    world.plane.reach_at(writes.address())?;
    world.plane.run()?;
    let died = die(world, &writes, std::env::var_os(FULL).is_some());
    world.plane.set_kubeconfig(direct);
    world.plane.kill()?;
    world.plane.run()?;
    println!("\nkilled {}", died?.join("\n       "));
    balanced(world)
}

/// Says at which writes control planes died.
fn die(world: &mut World, writes: &Writes, full: bool) -> Result<Vec<String>> {
    let mut died = Vec::new();
    for (side, first) in [(Side::Before, 1), (Side::After, 3)] {
        let (first, step) = if full { (1, 1) } else { (first, 6) };
        // How many there are differs by what is asked for twice; so the last one has a life of its own.
        for n in (first..).step_by(step) {
            let Some(write) = life(world, writes, side, Some(n))? else { break };
            died.push(format!("{side:?} {n}: {write}"));
        }
        let last = life(world, writes, side, None)?;
        died.push(format!("{side:?} the last: {}", last.context("the finalizer is taken off")?));
    }
    ensure!(died.len() >= if full { 20 } else { 6 }, "of the writes of a life: {died:?}");
    Ok(died)
}

/// The life of a job, from its submission to the deletion of its object, with a control plane that dies at the `n`th
/// write, or at the one that lets the object go: it says which that was, or nothing if there are fewer.
fn life(world: &mut World, writes: &Writes, side: Side, n: Option<u64>) -> Result<Option<String>> {
    let name = format!("crash-{side:?}-{}", n.map_or_else(|| "last".to_owned(), |n| n.to_string())).to_lowercase();
    let of = if n.is_some() { String::new() } else { format!("/trainingjobs/{name}?") };
    let process = world.plane.process()?.context("the control plane runs")?;
    writes.kill_at(process, n.unwrap_or(1), &of, side);
    world.cluster.apply(&world.job(&name, 2, 8, "echo one; sleep 2; echo two").to_string())?;
    through(world, &format!("{name} succeeds"), |cluster| {
        let object = cluster.object(&name)?;
        let phase = object["status"]["phase"].as_str().unwrap_or_default();
        ensure!(!matches!(phase, "Failed" | "Cancelled"), "{name}: {}", object["status"]);
        Ok(phase == "Succeeded" && cluster.pods()?.is_empty())
    })?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", &name, "--wait=false"])?;
    through(world, &format!("nothing is left of {name}"), |cluster| {
        let left = cluster.kubectl_ok(&["get", "trainingjobs,pods,secrets", "-o", "name"])?;
        Ok(!left.contains(&name))
    })?;
    let died = writes.disarm();
    // It may have died of its last write, when nothing was left to wait for.
    if died.is_some() && world.plane.process()?.is_none_or(|now| now == process) {
        world.plane.kill()?;
        world.plane.run()?;
    }
    let at = died.as_deref().unwrap_or("no write");
    let job = world.plane.json(&["show", &name])?;
    ensure!(job["phase"] == "Succeeded" && job["attempts"] == 1, "died {side:?} {at}: {job}");
    let log = world.plane.ok(&["logs", &name])?;
    ensure!(log.matches("two").count() == 2, "died {side:?} {at}, and each rank ran once: {log}");
    Ok(died)
}

/// Waits for something of the cluster, with a control plane that is started again where it dies.
fn through(world: &mut World, what: &str, there: impl Fn(&Cluster) -> Result<bool>) -> Result<()> {
    until(what, LONGEST, || {
        if world.plane.process()?.is_none() {
            world.plane.run()?;
        }
        Ok(there(&world.cluster)?.then_some(()))
    })
}

pub fn the_apiserver_may_be_away(world: &mut World) -> Result<()> {
    world.cluster.apply(&world.job("lasting", 2, 4, "for i in 1 2 3 4 5 6; do echo $i; sleep 2; done").to_string())?;
    world.cluster.phase("lasting", "Running")?;
    world.cluster.stop_apiserver()?;
    // It ends while the apiserver is away, and the control plane hears it from the agents.
    until("it has ended", LONGEST, || {
        let job = world.plane.json(&["show", "lasting"])?;
        Ok((job["phase"] == "Succeeded").then_some(()))
    })?;
    world.cluster.start_apiserver()?;
    aviflow_e2e_kube::knows_the_kinds(&world.cluster)?;
    let object = world.cluster.phase("lasting", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    until("nothing is left of it", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    balanced(world)
}

pub fn rights_may_be_missing_for_a_moment(world: &mut World) -> Result<()> {
    let binding = world.cluster.kubectl_ok(&["get", "clusterrolebinding", BINDING, "-o", "json"])?;
    world.cluster.apply(&world.job("rightless", 2, 4, "sleep 4").to_string())?;
    world.cluster.phase("rightless", "Running")?;
    // So an apiserver answers that has just started, until it has read who may do what.
    world.cluster.kubectl_ok(&["delete", "clusterrolebinding", BINDING])?;
    let ended = until("it has ended", LONGEST, || {
        let jobs = world.plane.json(&["ls", "--all"])?;
        let ours = jobs.as_array().into_iter().flatten().find(|job| job["name"] == "rightless");
        Ok(ours.is_some_and(|job| job["phase"] == "Succeeded").then_some(()))
    });
    let mut binding: serde_json::Value = serde_json::from_str(&binding)?;
    binding["metadata"] = json!({"name": BINDING, "labels": binding["metadata"]["labels"]});
    world.cluster.apply(&binding.to_string())?;
    ended?;
    world.cluster.phase("rightless", "Succeeded")?;
    over(world, "rightless")
}
