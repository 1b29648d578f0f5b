//! What `kubectl describe` tells of a job.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The Events of a job's object: how many there are of each reason.
fn reasons(world: &World, job: &str) -> Result<BTreeMap<String, usize>> {
    let list = world.cluster.get("/apis/events.k8s.io/v1/namespaces/default/events")?;
    let mut found = BTreeMap::new();
    let ours = |e: &&Value| e["regarding"]["kind"] == "TrainingJob" && e["regarding"]["name"] == job;
    for event in list["items"].as_array().into_iter().flatten().filter(ours) {
        let reason = event["reason"].as_str().context("an event has a reason")?;
        *found.entry(reason.to_owned()).or_default() += 1;
    }
    Ok(found)
}

/// Waits until there are so many Events of each reason, and no others.
fn are(world: &World, job: &str, expected: &[(&str, usize)]) -> Result<()> {
    let expected: BTreeMap<String, usize> = expected.iter().map(|(r, n)| ((*r).to_owned(), *n)).collect();
    let mut last = BTreeMap::new();
    let waited = until("the Events are there", LONGEST, || {
        last = reasons(world, job)?;
        Ok((last == expected).then_some(()))
    });
    waited.with_context(|| format!("there are {last:?}, and not {expected:?}"))
}

pub fn a_description_tells_the_story_once(world: &mut World) -> Result<()> {
    let script = "trap 'exit 0' TERM; [ $AVIFLOW_ATTEMPT = 3 ] && exit 5; sleep 600 & wait";
    world.cluster.apply(&world.job("told", 2, 1, script).to_string())?;
    world.cluster.phase("told", "Running")?;
    are(world, "told", &[("Queued", 1), ("Starting", 1), ("Started", 1)])?;
    world.plane.ok(&["suspend", "told"])?;
    until("it waits", LONGEST, || Ok((world.cluster.object("told")?["status"]["phase"] == "Queued").then_some(())))?;
    // Another control plane reads the same timeline, and writes none of it again.
    world.plane.kill()?;
    world.plane.run()?;
    world.plane.ok(&["resume", "told"])?;
    until("it runs again", LONGEST, || {
        let object = world.cluster.object("told")?;
        Ok((object["status"]["attempt"] == 2 && object["status"]["phase"] == "Running").then_some(()))
    })?;
    let again =
        [("Queued", 1), ("Starting", 2), ("Started", 1), ("Suspended", 1), ("QueuedAgain", 1), ("Restarted", 1)];
    are(world, "told", &again)?;
    world.plane.ok(&["suspend", "told"])?;
    until("it waits", LONGEST, || Ok((world.cluster.object("told")?["status"]["phase"] == "Queued").then_some(())))?;
    world.plane.ok(&["resume", "told"])?;
    until("it fails", LONGEST, || Ok((world.cluster.object("told")?["status"]["phase"] == "Failed").then_some(())))?;
    let found = until("the end is told", LONGEST, || {
        let found = reasons(world, "told")?;
        Ok(found.contains_key("Failed").then_some(found))
    })?;
    ensure!(found["Failed"] == 1 && found["Suspended"] == 2 && found["Queued"] == 1, "{found:?}");
    let described = world.cluster.kubectl_ok(&["describe", "trainingjob", "told"])?;
    ensure!(described.contains("Events:") && described.contains("exited with 5 in attempt 3"), "{described}");

    // An object that is not taken says so too, once.
    let mut job = world.job("refused", 1, 1, "true");
    job["spec"]["queue"] = json!("nowhere");
    world.cluster.apply(&job.to_string())?;
    are(world, "refused", &[("NoSuchQueue", 1)])?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "told", "refused"])?;
    balanced(world)
}
