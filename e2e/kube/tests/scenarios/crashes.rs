//! The control plane and the apiserver may be away; trainings go on, and nothing is done twice.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;

/// Where a control plane is killed: as soon as a job's object or pods show it.
const POINTS: [&str; 6] = ["applied", "finalizer", "submitted", "pod", "running", "ended"];

pub fn a_control_plane_may_die_at_any_time(world: &mut World) -> Result<()> {
    for (n, point) in POINTS.iter().enumerate() {
        let name = format!("crash-{n}");
        world.cluster.apply(&world.job(&name, 2, 8, "echo one; sleep 3; echo two").to_string())?;
        until(&format!("{point} of {name}"), LONGEST, || {
            let object = world.cluster.object(&name)?;
            let pods = world.cluster.pods()?.len();
            let phase = object["status"]["phase"].as_str().unwrap_or_default();
            let there = match *point {
                "applied" => true,
                "finalizer" => !object["metadata"]["finalizers"].is_null(),
                "submitted" => object["status"]["jobId"].is_u64(),
                "pod" => pods > 0,
                "running" => phase == "Running",
                _ => phase == "Succeeded",
            };
            Ok(there.then_some(()))
        })?;
        world.plane.kill()?;
        world.plane.run()?;
        let object = world.cluster.phase(&name, "Succeeded")?;
        ensure!(object["status"]["attempt"] == 1, "killed at {point}: {}", object["status"]);
        let log = world.plane.ok(&["logs", &name])?;
        ensure!(log.matches("two").count() == 2, "killed at {point}, each rank ran once: {log}");
    }
    until("nothing is left of them", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    let jobs = world.plane.json(&["ls", "--all"])?;
    let ours = jobs.as_array().map_or(0, |list| {
        list.iter().filter(|job| job["name"].as_str().is_some_and(|name| name.starts_with("crash-"))).count()
    });
    ensure!(ours == POINTS.len(), "each was submitted once: {jobs}");
    balanced(world)
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
