//! Packages of a job's own: made into a layer once, in a pod of its own, and never at run time.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::{Index, Phase as _};
use aviflow_testcluster::{images, until};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

/// What all of these tests need.
struct Ground {
    index: Index,
    folder: tempfile::TempDir,
}

impl Ground {
    /// A control plane that takes packages from an index, and an environment whose Python has a pip.
    fn new(world: &mut World) -> Result<Ground> {
        let index = Index::start(&world.cluster.host_ip())?;
        let variables = index.variables();
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        world.plane.kill()?;
        world.plane.set_variables(&variables);
        world.plane.run()?;
        let image = world.cluster.registry().push(&images::python_with_pip()?, "python-with-pip")?;
        world.cluster.apply(&environment("packed", &image))?;
        Ok(Ground { index, folder: tempfile::tempdir()? })
    }

    /// The file of a job, with the lock beside it.
    fn job(&self, name: &str, more: &str, lock: &str, script: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("extra.lock"), lock)?;
        let file = folder.join("job.yaml");
        let text = format!("name: {name}\nrequirements: extra.lock\n{more}\nrun: |\n  {script}\n");
        fs::write(&file, text)?;
        Ok(file)
    }

    fn end(self, world: &mut World) -> Result<()> {
        // A job may begin before the pod is gone that made its layer.
        until("no pod is left", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
        world.cluster.kubectl_ok(&["delete", "environment", "packed-1"])?;
        world.plane.kill()?;
        world.plane.set_variables(&[]);
        world.plane.run()?;
        balanced(world)
    }
}

fn environment(name: &str, image: &str) -> String {
    json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Environment", "metadata": {"name": format!("{name}-1")},
        "spec": {"name": name, "version": 1, "image": image},
    })
    .to_string()
}

/// The pods that make layers.
fn builds(world: &World) -> Result<Vec<Value>> {
    let mut pods = world.cluster.pods()?;
    pods.retain(|pod| pod["metadata"]["labels"]["aviflow.dev/layer"].is_string());
    Ok(pods)
}

/// Layers in the object store.
fn layers(world: &World) -> Result<usize> {
    Ok(fs::read_dir(world.plane.home().join("home/objects/layers"))?.count())
}

pub fn packages_of_a_job_are_layered_once(world: &mut World) -> Result<()> {
    let ground = Ground::new(world)?;
    let before = layers(world)?;
    let lock = ground.index.wheel("tinywords")?;
    let script = "python3 -c 'import json, tinywords; print(\"beside\", tinywords.__file__)' && run-tinywords";
    let file = ground.job("layered", "environment: packed\nnodes: 2\ngpusPerNode: 1", &lock, script)?;
    let file = file.display().to_string();
    let plan = world.plane.ok(&["plan", &file])?;
    ensure!(plan.contains("extra.lock, will be built first"), "{plan}");
    world.plane.ok(&["run", &file])?;
    let log = world.plane.ok(&["logs", "layered"])?;
    for words in ["beside /aviflow/layer/site/tinywords.py", "the program of tinywords"] {
        ensure!(log.matches(words).count() == 2, "{words}, on each node: {log}");
    }
    ensure!(ground.index.asked("tinywords") == 1 && layers(world)? == before + 1, "it was made once");
    let shown = world.plane.json(&["show", "layered"])?;
    ensure!(shown["facts"]["aviflow.layer"].as_str().is_some_and(|hash| hash.len() == 64), "{}", shown["facts"]);
    let hash = shown["provenance"]["layer"]["hash"].clone();
    ensure!(hash.as_str().is_some_and(|hash| hash.len() == 64), "{}", shown["provenance"]);

    // The same again, and others with the same lock, also under a control plane that was started again.
    let plan = world.plane.ok(&["plan", &file])?;
    ensure!(plan.contains("extra.lock, ready"), "{plan}");
    world.plane.ok(&["rerun", "layered"])?;
    world.plane.kill()?;
    world.plane.run()?;
    let other = ground.job("also-layered", "environment: packed\ngpusPerNode: 1", &lock, "run-tinywords")?;
    world.plane.ok(&["run", &other.display().to_string()])?;
    ensure!(ground.index.asked("tinywords") == 1 && layers(world)? == before + 1, "nothing is made again");
    let again = world.plane.json(&["show", "also-layered"])?["provenance"]["layer"]["hash"].clone();
    ensure!(again == hash, "{again} is not {hash}");

    // Two at once need one pod.
    ground.index.hold(true);
    let lock = ground.index.wheel("tinypair")?;
    for name in ["first", "second"] {
        let file = ground.job(name, "environment: packed\ngpusPerNode: 1", &lock, "run-tinypair")?;
        world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    }
    until("pip asks for the package", LONGEST, || Ok((ground.index.asked("tinypair") > 0).then_some(())))?;
    ensure!(builds(world)?.len() == 1, "one pod for both");
    ground.index.hold(false);
    for name in ["first", "second"] {
        world.cluster.phase(name, "Succeeded")?;
    }
    ensure!(ground.index.asked("tinypair") == 1 && layers(world)? == before + 2, "one layer for both");
    world.cluster.kubectl_ok(&["delete", "trainingjobs", "--all", "--timeout=90s"])?;
    ground.end(world)
}

/// Waits until a job has failed; its reason, and that it cost no retry.
fn refused(world: &World, name: &str) -> Result<String> {
    let shown = until(&format!("{name} fails"), LONGEST, || {
        let shown = world.plane.json(&["show", name])?;
        Ok((shown["phase"] == "Failed").then_some(shown))
    })?;
    ensure!(shown["counters"]["failures"] == 0, "{}", shown["counters"]);
    until("its pod is gone", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    shown["failure"].as_str().map(str::to_owned).with_context(|| format!("{shown}"))
}

pub fn packages_that_cannot_be_layered_say_why(world: &mut World) -> Result<()> {
    let ground = Ground::new(world)?;
    let before = layers(world)?;
    // What the index has is not what was locked.
    ground.index.wheel("tinywrong")?;
    let lock = format!("tinywrong==1.0 --hash=sha256:{}\n", "0".repeat(64));
    let file = ground.job("wrong-hash", "environment: packed\ngpusPerNode: 8", &lock, "true")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    let why = refused(world, "wrong-hash")?;
    for words in ["packed@1 with extra.lock", "package tinywrong==1.0", "is not what was locked", "Expected sha256 000"]
    {
        ensure!(why.contains(words), "{words}: {why}");
    }
    let lock = format!("tinynone==1.0 --hash=sha256:{}\n", "0".repeat(64));
    let file = ground.job("no-such-package", "environment: packed\ngpusPerNode: 8", &lock, "true")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    let why = refused(world, "no-such-package")?;
    ensure!(why.contains("package tinynone==1.0 is not to be had"), "{why}");

    // An image without pip, and one without Python.
    world.cluster.apply(&environment("bare", &world.image))?;
    let file = ground.job("no-pip", "environment: bare\ngpusPerNode: 8", &lock, "true")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    let why = refused(world, "no-pip")?;
    ensure!(why.contains("has no pip") && why.contains("python3-pip"), "{why}");
    ensure!(layers(world)? == before, "nothing is kept of what failed");
    // By hand there is no lock to take along.
    let mut job = world.job("by-hand", 1, 1, "true");
    if let Some(spec) = job["spec"].as_object_mut() {
        spec.remove("image");
        spec.insert("environment".to_owned(), json!("packed"));
        spec.insert("requirements".to_owned(), json!("extra.lock"));
    }
    let refused = world.cluster.kubectl_with(&["create", "-f", "-"], &job.to_string());
    let refused = refused.err().map(|e| format!("{e:#}")).unwrap_or_default();
    ensure!(refused.contains("`extra.lock` is a file on your machine"), "{refused}");
    world.cluster.kubectl_ok(&["delete", "trainingjobs", "--all", "--timeout=90s"])?;
    world.cluster.kubectl_ok(&["delete", "environment", "bare-1"])?;
    ground.end(world)
}

pub fn a_layer_in_the_making_holds_nothing_up(world: &mut World) -> Result<()> {
    let ground = Ground::new(world)?;
    let before = layers(world)?;
    ground.index.hold(true);
    let lock = ground.index.wheel("tinyheld")?;
    let file =
        ground.job("waits-for-its-layer", "environment: packed\nnodes: 2\ngpusPerNode: 8", &lock, "run-tinyheld")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    until("pip asks for the package", LONGEST, || Ok((ground.index.asked("tinyheld") > 0).then_some(())))?;
    let shown = until("it says what is being done", LONGEST, || {
        let shown = world.plane.json(&["show", "waits-for-its-layer"])?;
        Ok((shown["verdict"]["build"]["step"] == "installing packages").then_some(shown))
    })?;
    ensure!(shown["verdict"]["build"]["name"] == "packed@1 with extra.lock", "{}", shown["verdict"]);
    ensure!(shown["verdict"]["reason"] == "its environment is being prepared", "{}", shown["verdict"]);
    // All GPUs are there for who comes after it.
    world.cluster.apply(&world.job("passes", 2, 8, "true").to_string())?;
    world.cluster.phase("passes", "Succeeded")?;

    // The next control plane goes on with the same pod.
    let pod = builds(world)?.first().context("a pod makes the layer")?["metadata"]["uid"].clone();
    world.plane.kill()?;
    world.plane.run()?;
    ground.index.hold(false);
    world.cluster.phase("waits-for-its-layer", "Succeeded")?;
    ensure!(ground.index.asked("tinyheld") == 1, "the pod {pod} was not made anew");
    ensure!(layers(world)? == before + 1, "it was kept");

    // Who is cancelled leaves nothing.
    ground.index.hold(true);
    let lock = ground.index.wheel("tinyvain")?;
    let file = ground.job("in-vain", "environment: packed\ngpusPerNode: 1", &lock, "run-tinyvain")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    until("pip asks for the package", LONGEST, || Ok((ground.index.asked("tinyvain") > 0).then_some(())))?;
    world.plane.ok(&["cancel", "in-vain"])?;
    world.cluster.phase("in-vain", "Cancelled")?;
    until("its pod is gone", LONGEST, || Ok(builds(world)?.is_empty().then_some(())))?;
    ensure!(layers(world)? == before + 1, "nothing is kept");
    ground.index.hold(false);

    // Who comes back at once has a pod of his own, which the end of the first one leaves alone.
    ground.index.hold(true);
    let lock = ground.index.wheel("tinyback")?;
    let file = ground.job("back", "environment: packed\ngpusPerNode: 1", &lock, "run-tinyback")?;
    let file = file.display().to_string();
    world.plane.ok(&["run", "--detach", &file])?;
    until("pip asks for the package", LONGEST, || Ok((ground.index.asked("tinyback") > 0).then_some(())))?;
    world.plane.ok(&["cancel", "back"])?;
    world.plane.ok(&["run", "--detach", &file])?;
    until("pip asks again", LONGEST, || Ok((ground.index.asked("tinyback") > 1).then_some(())))?;
    ground.index.hold(false);
    world.cluster.phase("back-2", "Succeeded")?;
    ensure!(ground.index.asked("tinyback") == 2, "the second pod was made once");
    world.cluster.kubectl_ok(&["delete", "trainingjobs", "--all", "--timeout=90s"])?;
    ground.end(world)
}

pub fn a_layer_is_made_elsewhere_where_a_node_is_down(world: &mut World) -> Result<()> {
    let ground = Ground::new(world)?;
    ground.index.hold(true);
    let lock = ground.index.wheel("tinylost")?;
    let file = ground.job("lost-build", "environment: packed\ngpusPerNode: 1", &lock, "run-tinylost")?;
    world.plane.ok(&["run", "--detach", &file.display().to_string()])?;
    until("pip asks for the package", LONGEST, || Ok((ground.index.asked("tinylost") > 0).then_some(())))?;
    let first = builds(world)?.first().cloned().context("a pod makes the layer")?;
    let of = |pod: &Value, at: &str| pod.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (name, uid, node) = (of(&first, "/metadata/name"), of(&first, "/metadata/uid"), of(&first, "/spec/nodeName"));
    world.cluster.node(&node).stop_kubelet()?;
    // As the cluster's own controllers do after some minutes.
    world.cluster.kubectl_ok(&["delete", "pod", &name, "--wait=false"])?;
    let second = until("another pod makes it", LONGEST, || {
        Ok(builds(world)?.into_iter().find(|pod| of(pod, "/metadata/uid") != uid))
    })?;
    ground.index.hold(false);
    world.cluster.phase("lost-build", "Succeeded")?;
    ensure!(of(&second, "/metadata/name") == name, "{second}");
    world.cluster.node(&node).start_kubelet()?;
    until("the node is back", LONGEST, || Ok(world.cluster.node(&node).ready()?.then_some(())))?;
    world.cluster.kubectl_ok(&["delete", "trainingjobs", "--all", "--timeout=90s"])?;
    ground.end(world)
}
