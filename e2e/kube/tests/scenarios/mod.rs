//! What is tested.

mod life;
mod teams;

use crate::World;
use anyhow::Result;
use aviflow_testcluster::Cluster;

/// A test on a cluster that others use after it.
pub type Test = fn(&mut World) -> Result<()>;

/// All of them, in this order: those that harm nodes come last.
pub const ALL: &[(&str, Test)] = &[
    ("an_applied_job_runs_on_two_nodes", life::an_applied_job_runs_on_two_nodes),
    ("a_failing_job_says_why", life::a_failing_job_says_why),
    ("a_gang_that_does_not_fit_makes_no_pod", life::a_gang_that_does_not_fit_makes_no_pod),
    ("a_deleted_object_is_a_graceful_stop", life::a_deleted_object_is_a_graceful_stop),
    ("a_job_of_the_command_line_has_its_object", life::a_job_of_the_command_line_has_its_object),
    ("each_team_uses_its_queue_and_sees_its_jobs", teams::each_team_uses_its_queue_and_sees_its_jobs),
];

/// Installs what an administrator would; but for the Deployment, as tests run the control plane where they can
/// kill it.
pub fn install(cluster: &Cluster) -> Result<()> {
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/aviflow.yaml"))?;
    let ours = |document: &&str| !document.contains("\nkind: Deployment\n");
    let documents: Vec<&str> = manifest.split("\n---\n").filter(ours).collect();
    cluster.kubectl_with(&["apply", "--server-side", "-f", "-"], &documents.join("\n---\n"))?;
    cluster.kubectl_ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
    Ok(())
}
