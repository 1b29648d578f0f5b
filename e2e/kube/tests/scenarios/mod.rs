//! What is tested.

mod doctor;
mod documents;
mod life;
mod observe;

use crate::World;
use anyhow::Result;
use aviflow_testcluster::{Cluster, until};
use std::time::Duration;

/// A test on a cluster that others use after it.
pub type Test = fn(&mut World) -> Result<()>;

/// All of them, in this order: those that harm nodes come last.
pub const ALL: &[(&str, Test)] = &[
    ("an_applied_job_runs_on_two_nodes", life::an_applied_job_runs_on_two_nodes),
    ("a_failing_job_says_why", life::a_failing_job_says_why),
    ("a_gang_that_does_not_fit_makes_no_pod", life::a_gang_that_does_not_fit_makes_no_pod),
    ("a_deleted_object_is_a_graceful_stop", life::a_deleted_object_is_a_graceful_stop),
    ("a_job_of_the_command_line_has_its_object", life::a_job_of_the_command_line_has_its_object),
    ("queues_are_applied_by_either_hand", documents::queues_are_applied_by_either_hand),
    ("a_queue_with_jobs_is_deleted_after_them", documents::a_queue_with_jobs_is_deleted_after_them),
    ("a_pool_says_what_it_has", documents::a_pool_says_what_it_has),
    ("a_cluster_is_checked", doctor::a_cluster_is_checked),
    ("a_control_plane_that_observes_changes_nothing", observe::a_control_plane_that_observes_changes_nothing),
];

/// Installs what an administrator would; but for the Deployment, as tests run the control plane where they can
/// kill it.
pub fn install(cluster: &Cluster) -> Result<()> {
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/aviflow.yaml"))?;
    let ours = |document: &&str| !document.contains("\nkind: Deployment\n");
    let documents: Vec<&str> = manifest.split("\n---\n").filter(ours).collect();
    cluster.kubectl_with(&["apply", "--server-side", "-f", "-"], &documents.join("\n---\n"))?;
    cluster.kubectl_ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
    // An apiserver takes no object of a new kind in the first seconds, though it is established.
    let job = aviflow_e2e_kube::job(&format!("none@sha256:{}", "0".repeat(64)), "first", 1, 1, "true").to_string();
    until("objects are taken", Duration::from_secs(60), || {
        Ok(cluster.kubectl_with(&["create", "--dry-run=server", "-f", "-"], &job).is_ok().then_some(()))
    })
}
