//! Volumes and secrets: mounted where they are there, and where they are not, the reason, the remedy, and no retry
//! spent.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Phase as _;
use aviflow_testcluster::until;
use serde_json::{Value, json};
use std::fs;

/// Waits until what is shown of a job has some words.
fn says(world: &World, job: &str, words: &[&str]) -> Result<String> {
    until(&format!("{job} says {words:?}"), LONGEST, || {
        // It may not be submitted yet.
        let shown = String::from_utf8(world.plane.aviflow(&["show", job])?.stdout)?;
        let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(words.iter().all(|word| shown.contains(word)).then_some(shown))
    })
}

/// That nothing but starts was spent on a job.
fn no_retry_spent(world: &World, job: &str) -> Result<()> {
    let counters = world.plane.json(&["show", job])?["counters"].clone();
    ensure!(counters["failures"] == 0, "{counters}");
    Ok(())
}

fn claim(name: &str, volume: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": volume,
            "resources": {"requests": {"storage": "1Mi"}},
        },
    })
}

pub fn data_on_a_claim_is_mounted(world: &mut World) -> Result<()> {
    let folder = world.cluster.folder().join("claimed");
    fs::create_dir_all(folder.join("part"))?;
    fs::write(folder.join("part/words"), "to read\n")?;
    // A bucket is what a CSI driver would mount; here it is the same volume.
    let pool = json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "main"},
        "spec": {"kubernetes": {"buckets": {"s3://corpora": "corpus"}}},
    });
    world.cluster.apply(&pool.to_string())?;
    let script =
        "cat $AVIFLOW_DATA_CORPUS/words $AVIFLOW_DATA_STORED/words; touch /corpus/new || echo cannot be written";
    let mut job = world.job("claimed", 2, 1, script);
    job["spec"]["data"] = json!([
        {"name": "corpus", "source": "pvc://corpus/part", "mount": "/corpus", "readOnly": true},
        {"name": "stored", "source": "s3://corpora/part", "readOnly": true},
    ]);
    let mut elsewhere = job.clone();
    elsewhere["metadata"]["name"] = json!("elsewhere");
    elsewhere["spec"]["data"] = json!([{"name": "corpus", "source": "s3://other/part"}]);
    world.cluster.apply(&elsewhere.to_string())?;
    until("no pool has the bucket", LONGEST, || {
        let condition = world.cluster.object("elsewhere")?["status"]["conditions"][0].clone();
        Ok((condition["status"] == "False" && condition["reason"] == "NoSuchBucket").then_some(()))
    })?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "elsewhere"])?;
    world.cluster.apply(&job.to_string())?;
    // Nobody has made the claim: a want of room anywhere else would be no better.
    says(world, "claimed", &["persistentvolumeclaim \"corpus\" not found", "make the claim in the job's namespace"])?;
    no_retry_spent(world, "claimed")?;
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "corpus"},
        "spec": {
            "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": folder.display().to_string()},
        },
    });
    world.cluster.apply(&volume.to_string())?;
    world.cluster.apply(&claim("corpus", "corpus").to_string())?;
    world.cluster.phase("claimed", "Succeeded")?;
    let log = world.plane.ok(&["logs", "claimed"])?;
    ensure!(log.matches("to read").count() == 4 && log.matches("cannot be written").count() == 2, "{log}");
    no_retry_spent(world, "claimed")?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "claimed"])?;
    world.cluster.kubectl_ok(&["delete", "pvc", "corpus", "--timeout=60s"])?;
    world.cluster.kubectl_ok(&["delete", "pv", "corpus", "--timeout=60s"])?;
    world.cluster.kubectl_ok(&["delete", "pool", "main", "--timeout=60s"])?;
    balanced(world)
}

pub fn a_volume_that_cannot_be_mounted_says_why(world: &mut World) -> Result<()> {
    let folder = world.cluster.folder().join("datasets");
    fs::create_dir_all(&folder)?;
    let pool = json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "main"},
        "spec": {"kubernetes": {"hostPaths": [folder.display().to_string()]}},
    });
    world.cluster.apply(&pool.to_string())?;
    let missing = folder.join("missing").display().to_string();
    let mut job = world.job("unmounted", 2, 1, "true");
    job["spec"]["data"] = json!([{"name": "corpus", "source": missing, "mount": "/corpus"}]);
    job["spec"]["retry"] = json!({"failures": 3});
    world.cluster.apply(&job.to_string())?;
    says(
        world,
        "unmounted",
        &["a volume cannot be mounted on hgx", "\"data-corpus\"", "is not a directory", "put it right"],
    )?;
    // Before the starts are used up.
    fs::create_dir(folder.join("missing"))?;
    world.cluster.phase("unmounted", "Succeeded")?;
    no_retry_spent(world, "unmounted")?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "unmounted"])?;
    world.cluster.kubectl_ok(&["delete", "pool", "main", "--timeout=60s"])?;
    balanced(world)
}

pub fn a_missing_secret_is_waited_for_and_named(world: &mut World) -> Result<()> {
    let mut job = world.job("keyed", 1, 1, "[ \"$HF_TOKEN\" = hidden ] && echo it has it");
    job["spec"]["secrets"] = json!({"HF_TOKEN": "hf/token"});
    world.cluster.apply(&job.to_string())?;
    says(world, "keyed", &["secret \"hf\" not found", "kubectl create secret generic"])?;
    no_retry_spent(world, "keyed")?;
    // The Secret without the key; and then with it, before the starts are used up.
    world.cluster.kubectl_ok(&["create", "secret", "generic", "hf", "--from-literal=other=x"])?;
    says(world, "keyed", &["couldn't find key token in Secret default/hf"])?;
    let patch = json!({"stringData": {"token": "hidden"}}).to_string();
    world.cluster.kubectl_ok(&["patch", "secret", "hf", "-p", &patch])?;
    world.cluster.phase("keyed", "Succeeded")?;
    ensure!(world.plane.ok(&["logs", "keyed"])?.contains("it has it"), "the value reaches the rank");
    no_retry_spent(world, "keyed")?;
    world.cluster.kubectl_ok(&["delete", "secret", "hf"])?;
    world.cluster.kubectl_ok(&["delete", "trainingjob", "keyed"])?;
    balanced(world)
}
