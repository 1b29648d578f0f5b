//! What containers run: settled once, at submission, whatever moves or vanishes afterwards.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::oci::{FileEntry, Image};
use aviflow_testcluster::until;
use serde_json::{Value, json};

/// A version of the environment `tool`, in the image of the tests.
fn environment(world: &World, version: u32, more: &Value) -> String {
    let mut spec = json!({
        "name": "tool", "version": version, "image": world.image,
        "env": {"TOOL": format!("version {version}")},
        "launcher": {"prefix": ["/usr/bin/env", format!("PREFIX=of {version}")]},
    });
    if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
        spec.extend(more.clone());
    }
    let name = format!("tool-{version}");
    json!({"apiVersion": "aviflow.dev/v1alpha1", "kind": "Environment", "metadata": {"name": name}, "spec": spec})
        .to_string()
}

/// A job in an environment.
fn in_environment(world: &World, name: &str, environment: &str) -> String {
    let mut job = world.job(name, 1, 1, "echo it has $TOOL, $PREFIX");
    if let Some(spec) = job["spec"].as_object_mut() {
        spec.remove("image");
    }
    job["spec"]["environment"] = json!(environment);
    job.to_string()
}

/// Waits until an object is refused; its reason and message.
fn refused(world: &World, name: &str) -> Result<(String, String)> {
    until(&format!("{name} is refused"), LONGEST, || {
        let object = world.cluster.object(name)?;
        let condition = &object["status"]["conditions"][0];
        let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
        Ok((condition["type"] == "Accepted" && condition["status"] == "False")
            .then(|| (text("reason"), text("message"))))
    })
}

pub fn an_environment_is_resolved_once(world: &mut World) -> Result<()> {
    world.cluster.apply(&environment(world, 1, &json!({})))?;
    world.cluster.apply(&environment(world, 2, &json!({"deprecated": "it computes wrong sums"})))?;
    let listed = world.plane.ok(&["env", "ls"])?;
    ensure!(listed.contains("tool@1") && listed.contains("it computes wrong sums"), "{listed}");

    world.cluster.apply(&in_environment(world, "newest", "tool"))?;
    let object = world.cluster.phase("newest", "Succeeded")?;
    let image = &object["status"]["image"];
    ensure!(image["environment"] == "tool@1" && image["pinned"] == world.image.as_str(), "{image}");
    let log = world.plane.ok(&["logs", "newest"])?;
    ensure!(log.contains("it has version 1, of 1"), "its variables, and its words before the command: {log}");

    // Named, also one that is deprecated may be used; who names it by a file is warned.
    let file = world.plane.home().join("deprecated.yaml");
    std::fs::write(&file, "name: deprecated\nenvironment: tool@2\nrun: /bin/sh -c 'echo it has $TOOL, $PREFIX'\n")?;
    let out = world.plane.aviflow(&["run", &file.display().to_string()])?;
    let (said, told) = (String::from_utf8(out.stdout)?, String::from_utf8(out.stderr)?);
    ensure!(said.contains("it has version 2, of 2"), "{said}{told}");
    ensure!(told.contains("environment tool@2 is deprecated: it computes wrong sums"), "{told}");
    let object = world.cluster.object("deprecated")?;
    let accepted = &object["status"]["conditions"][0];
    let warned = accepted["message"].as_str().is_some_and(|m| m.contains("it computes wrong sums"));
    ensure!(accepted["status"] == "True" && warned, "who looks at the object is warned: {accepted}");
    let shown = world.plane.ok(&["show", "deprecated"])?;
    ensure!(shown.contains("tool@2") && shown.contains(&world.image), "{shown}");

    // One that is not there: with those that there are, by either way in.
    world.cluster.apply(&in_environment(world, "nowhere", "tool@7"))?;
    let (reason, message) = refused(world, "nowhere")?;
    ensure!(reason == "NoSuchEnvironment" && message.contains("`tool@1`, `tool@2`"), "{reason}: {message}");
    std::fs::write(&file, "name: typo\nenvironment: tol\nrun: 'true'\n")?;
    let out = world.plane.aviflow(&["run", &file.display().to_string()])?;
    let told = String::from_utf8(out.stderr)?;
    ensure!(!out.status.success() && told.contains("did you mean `tool`?"), "{told}");

    // It vanishes: its jobs stay what they were, and run again as they ran.
    world.cluster.kubectl_ok(&["delete", "environments", "tool-1", "tool-2"])?;
    let again = world.plane.ok(&["rerun", "newest"])?;
    ensure!(again.contains("it has version 1, of 1"), "{again}");
    ensure!(world.plane.ok(&["show", "newest"])?.contains("tool@1"), "its record is kept");
    world.cluster.kubectl_ok(&["delete", "trainingjob", "nowhere"])?;
    balanced(world)
}

pub fn a_tag_stands_for_what_it_was_at_submission(world: &mut World) -> Result<()> {
    let registry = world.cluster.registry();
    let tag = registry.tag(&world.image, "moving")?;
    let mut job = world.job("pinned", 1, 1, "trap 'exit 0' TERM; echo attempt $AVIFLOW_ATTEMPT here; sleep 600 & wait");
    job["spec"]["image"] = json!(tag);
    world.cluster.apply(&job.to_string())?;
    let object = world.cluster.phase("pinned", "Running")?;
    ensure!(object["status"]["image"]["pinned"] == world.image.as_str(), "{}", object["status"]);
    ensure!(object["status"]["image"]["reference"] == tag.as_str(), "{}", object["status"]);

    // Another image gets the tag, which has no shell; and the first attempt ends.
    let folder = tempfile::tempdir()?;
    let archive = folder.path().join("other.tar");
    let file = FileEntry { path: "/other".to_owned(), content: b"nothing to run".to_vec(), mode: 0o644 };
    Image::scratch().files(&[file])?.write("other", &archive)?;
    let other = registry.push(&archive, "python")?;
    registry.tag(&other, "moving")?;
    let pods = world.cluster.pods()?;
    let name = pods[0]["metadata"]["name"].as_str().context("it has a pod")?;
    world.cluster.kubectl_ok(&["delete", "pod", name, "--wait=false"])?;
    until("it runs again", LONGEST, || {
        let object = world.cluster.object("pinned")?;
        Ok((object["status"]["attempt"] == 2 && object["status"]["phase"] == "Running").then_some(()))
    })?;
    let pods = world.cluster.pods()?;
    let image = pods.iter().find(|p| p["metadata"]["labels"]["aviflow.dev/attempt"] == "2");
    let image = image.context("the second attempt has a pod")?["spec"]["containers"][0]["image"].clone();
    ensure!(image == world.image.as_str(), "the same content: {image}");
    until("the second attempt speaks", LONGEST, || {
        Ok(world.plane.ok(&["logs", "pinned"])?.contains("attempt 2 here").then_some(()))
    })?;
    let shown = world.plane.ok(&["show", "pinned"])?;
    ensure!(shown.contains(&tag) && shown.contains(&world.image), "what was written, and what runs: {shown}");
    world.plane.ok(&["cancel", "pinned"])?;

    // A submission by the tag means the other image from now on.
    let (_, digest) = other.split_once('@').context("pushed by digest")?;
    let mut job = world.job("moved-on", 1, 1, "true");
    job["spec"]["image"] = json!(tag);
    world.cluster.apply(&job.to_string())?;
    until("it is resolved", LONGEST, || {
        let object = world.cluster.object("moved-on")?;
        let pinned = object["status"]["image"]["pinned"].as_str().unwrap_or_default();
        Ok(pinned.ends_with(digest).then_some(()))
    })?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "moved-on", "pinned"])?;
    balanced(world)
}

pub fn an_image_that_cannot_be_resolved_says_why(world: &mut World) -> Result<()> {
    let registry = world.cluster.registry();
    let (repository, _) = world.image.split_once('@').context("by digest")?;
    let mut job = world.job("later", 1, 1, "echo there now");
    job["spec"]["image"] = json!(format!("{repository}:later"));
    world.cluster.apply(&job.to_string())?;
    let (reason, message) = refused(world, "later")?;
    ensure!(reason == "NoSuchImage" && message.contains(&format!("{repository}:later")), "{reason}: {message}");
    ensure!(message.contains(registry.address()), "the registry is named: {message}");
    // It is asked again by itself.
    registry.tag(&world.image, "later")?;
    world.cluster.phase("later", "Succeeded")?;

    // Nobody listens there, and nobody said that it speaks plain HTTP.
    let away = format!("{}:9/team/train:v1", world.cluster.host_ip());
    let mut job = world.job("away", 1, 1, "true");
    job["spec"]["image"] = json!(away);
    world.cluster.apply(&job.to_string())?;
    let (reason, message) = refused(world, "away")?;
    ensure!(reason == "RegistryUnreachable" && message.contains(&away), "{reason}: {message}");
    ensure!(message.contains("by its digest"), "the way out: {message}");
    let file = world.plane.home().join("away.yaml");
    std::fs::write(&file, format!("name: away-too\nimage: {away}\nrun: 'true'\n"))?;
    let out = world.plane.aviflow(&["run", &file.display().to_string()])?;
    let told = String::from_utf8(out.stderr)?;
    ensure!(!out.status.success() && told.contains(&away) && told.contains("by its digest"), "{told}");
    ensure!(world.plane.aviflow(&["show", "away-too"])?.status.code() != Some(0), "it was not submitted");
    world.cluster.kubectl_ok(&["delete", "trainingjob", "away", "later"])?;
    balanced(world)
}
