//! What is tested.

mod behaviours;
mod care;
mod crashes;
mod cut;
mod doctor;
mod documents;
mod images;
mod layers;
mod life;
mod lost;
mod observe;
mod others;
mod secured;
mod teams;
mod told;
mod training;
mod trouble;
mod two;
mod volumes;

use crate::World;
use anyhow::Result;
use aviflow_e2e_kube::Phase as _;
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
    ("an_environment_is_resolved_once", images::an_environment_is_resolved_once),
    ("a_tag_stands_for_what_it_was_at_submission", images::a_tag_stands_for_what_it_was_at_submission),
    ("an_image_that_cannot_be_resolved_says_why", images::an_image_that_cannot_be_resolved_says_why),
    ("packages_of_a_job_are_layered_once", layers::packages_of_a_job_are_layered_once),
    ("packages_that_cannot_be_layered_say_why", layers::packages_that_cannot_be_layered_say_why),
    ("a_layer_in_the_making_holds_nothing_up", layers::a_layer_in_the_making_holds_nothing_up),
    ("a_layer_is_made_elsewhere_where_a_node_is_down", layers::a_layer_is_made_elsewhere_where_a_node_is_down),
    ("data_on_a_claim_is_mounted", volumes::data_on_a_claim_is_mounted),
    ("a_volume_that_cannot_be_mounted_says_why", volumes::a_volume_that_cannot_be_mounted_says_why),
    ("a_missing_secret_is_waited_for_and_named", volumes::a_missing_secret_is_waited_for_and_named),
    ("a_description_tells_the_story_once", told::a_description_tells_the_story_once),
    (
        "a_suspended_gang_is_charged_until_its_last_pod_ends",
        behaviours::a_suspended_gang_is_charged_until_its_last_pod_ends,
    ),
    (
        "what_never_began_is_charged_nothing_once_it_is_gone",
        behaviours::what_never_began_is_charged_nothing_once_it_is_gone,
    ),
    ("a_rank_that_ends_well_ends_no_gang", behaviours::a_rank_that_ends_well_ends_no_gang),
    ("a_state_that_cannot_be_read_is_no_failure", behaviours::a_state_that_cannot_be_read_is_no_failure),
    (
        "the_longest_name_runs_and_a_longer_one_is_refused",
        behaviours::the_longest_name_runs_and_a_longer_one_is_refused,
    ),
    ("the_example_trains_as_on_this_machine", training::the_example_trains_as_on_this_machine),
    ("each_team_uses_its_queue_and_sees_its_jobs", teams::each_team_uses_its_queue_and_sees_its_jobs),
    ("queues_are_applied_by_either_hand", documents::queues_are_applied_by_either_hand),
    ("a_queue_with_jobs_is_deleted_after_them", documents::a_queue_with_jobs_is_deleted_after_them),
    ("a_pool_says_what_it_has", documents::a_pool_says_what_it_has),
    ("a_cluster_is_checked", doctor::a_cluster_is_checked),
    ("a_control_plane_that_observes_changes_nothing", observe::a_control_plane_that_observes_changes_nothing),
    ("gpus_of_others_are_respected", others::gpus_of_others_are_respected),
    ("a_claim_holds_against_others", others::a_claim_holds_against_others),
    ("a_cordoned_node_takes_no_job", others::a_cordoned_node_takes_no_job),
    ("a_missing_image_spends_no_retry", trouble::a_missing_image_spends_no_retry),
    ("a_deleted_pod_is_no_failure", trouble::a_deleted_pod_is_no_failure),
    ("a_drained_node_is_left_with_a_checkpoint", trouble::a_drained_node_is_left_with_a_checkpoint),
    ("a_worker_that_takes_too_much_memory_says_so", trouble::a_worker_that_takes_too_much_memory_says_so),
    ("an_image_without_a_shell_runs_as_anybody", trouble::an_image_without_a_shell_runs_as_anybody),
    ("a_broken_device_is_left_alone", trouble::a_broken_device_is_left_alone),
    ("a_job_that_may_not_be_suspended_holds_a_drain_up", care::a_job_that_may_not_be_suspended_holds_a_drain_up),
    ("a_new_driver_finds_a_node_empty", care::a_new_driver_finds_a_node_empty),
    ("a_pod_of_higher_priority_takes_a_workers_place", care::a_pod_of_higher_priority_takes_a_workers_place),
    ("a_node_that_is_removed_comes_back", care::a_node_that_is_removed_comes_back),
    ("a_node_is_checked_before_it_takes_work_again", care::a_node_is_checked_before_it_takes_work_again),
    ("a_control_plane_may_die_at_any_write", crashes::a_control_plane_may_die_at_any_write),
    ("agents_say_nothing_without_tls", secured::agents_say_nothing_without_tls),
    ("the_apiserver_may_be_away", crashes::the_apiserver_may_be_away),
    ("rights_may_be_missing_for_a_moment", crashes::rights_may_be_missing_for_a_moment),
    ("a_lost_store_is_rebuilt", lost::a_lost_store_is_rebuilt),
    ("the_second_control_plane_takes_over", two::the_second_control_plane_takes_over),
    ("two_control_planes_by_mistake", two::two_control_planes_by_mistake),
    ("a_node_that_is_cut_off_runs_nothing_twice", cut::a_node_that_is_cut_off_runs_nothing_twice),
];

/// How long anything may take. Seconds are usual; this is for a busy machine.
pub const LONGEST: Duration = Duration::from_secs(120);

/// Installs what an administrator would; but for the Deployment, as tests run the control plane where they can
/// kill it.
pub fn install(cluster: &Cluster) -> Result<()> {
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/aviflow.yaml"))?;
    let ours = |document: &&str| !document.contains("\nkind: Deployment\n");
    let documents: Vec<&str> = manifest.split("\n---\n").filter(ours).collect();
    cluster.kubectl_with(&["apply", "--server-side", "-f", "-"], &documents.join("\n---\n"))?;
    cluster.kubectl_ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
    aviflow_e2e_kube::knows_the_kinds(cluster)
}

/// Deletes all jobs while a control plane looks after them, and waits until nothing is left of them.
pub fn sweep_jobs(world: &World) -> Result<()> {
    world.cluster.kubectl_ok(&["delete", "trainingjobs", "--all", "--timeout=90s"])?;
    until("no pod is left", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))
}

/// What a test that failed may have left, so that the next does not fail of it.
pub fn sweep(world: &mut World) {
    let _ = world.plane.run_if_killed();
    for node in world.cluster.nodes() {
        let _ = node.heal();
        for gpu in 0..8 {
            let _ = node.set_gpu_health(gpu, true);
        }
        let _ = world.cluster.kubectl(&["uncordon", node.name()]);
        let _ = world.cluster.kubectl(&["taint", "node", node.name(), "repaired-"]);
        let _ = world.cluster.kubectl(&["label", "node", node.name(), "nvidia.com/gpu-driver-upgrade-state-"]);
        let _ = world.plane.aviflow(&["node", "uncordon", node.name()]);
    }
    for kind in ["trainingjobs", "deployments"] {
        let _ = world.cluster.kubectl(&["delete", kind, "--all", "--timeout=90s"]);
    }
}
