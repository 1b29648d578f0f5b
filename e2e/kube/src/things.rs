//! Documents, and waiting for what becomes of them.

use crate::plane::LONGEST;
use anyhow::{Result, bail};
use aviflow_testcluster::{Cluster, until};
use serde_json::{Value, json};

/// A job's object of an image: `nodes` nodes of `gpus` GPUs that run a script.
pub fn job(image: &str, name: &str, nodes: u32, gpus: u32, script: &str) -> Value {
    json!({
        "apiVersion": "aviflow.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "queue": "default",
            "image": image,
            "nodes": {"min": nodes, "max": nodes},
            "gpusPerNode": gpus,
            "run": ["bash", "-c", script],
        },
    })
}

/// Waits until the apiserver takes jobs: its policies learn of kinds every half minute, also after it was started
/// again.
///
/// # Errors
/// If it never does.
pub fn knows_the_kinds(cluster: &Cluster) -> Result<()> {
    let try_out = job(&format!("x@sha256:{}", "0".repeat(64)), "try-out", 1, 1, "true").to_string();
    until("the admission policies know the kind", LONGEST, || {
        let taken = cluster.kubectl_with(&["create", "--dry-run=server", "-f", "-"], &try_out);
        Ok(taken.ok().map(|_| ()))
    })
}

/// Waiting for the phases of jobs.
pub trait Phase {
    /// Waits until a job is in a phase; one that ends otherwise is an error.
    ///
    /// # Errors
    /// If it ends otherwise, or in vain.
    fn phase(&self, name: &str, phase: &str) -> Result<Value>;

    /// The object of a job.
    ///
    /// # Errors
    /// If it cannot be read.
    fn object(&self, name: &str) -> Result<Value>;

    /// The pods of jobs, by their names.
    ///
    /// # Errors
    /// If they cannot be read.
    fn pods(&self) -> Result<Vec<Value>>;
}

impl Phase for Cluster {
    fn phase(&self, name: &str, phase: &str) -> Result<Value> {
        until(&format!("the job {name} is {phase}"), LONGEST, || {
            let object = self.object(name)?;
            let now = object["status"]["phase"].as_str().unwrap_or("");
            if now != phase && matches!(now, "Succeeded" | "Failed" | "Cancelled") {
                bail!("{name} is {now}: {}", object["status"]);
            }
            Ok((now == phase).then_some(object))
        })
    }

    fn object(&self, name: &str) -> Result<Value> {
        self.get(&format!("/apis/aviflow.dev/v1alpha1/namespaces/default/trainingjobs/{name}"))
    }

    fn pods(&self) -> Result<Vec<Value>> {
        let list =
            self.get("/api/v1/namespaces/default/pods?labelSelector=app.kubernetes.io%2Fmanaged-by%3Daviflow")?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }
}
