//! The control plane in a pod, as the chart and the manifest install it. Needs root: `cargo xtask test kube` runs it.
//!
//! The tests run one after the other on one cluster of their own, and the later ones need the earlier: what is
//! installed is upgraded, taken away, and installed again. They are marked as ignored, so that
//! `cargo test --workspace` starts no cluster.

mod certificates;
mod install;
mod upgrade;

use anyhow::Result;
use aviflow_e2e_kube::chart::{self, Audit, NAMESPACE, Person};
use aviflow_testcluster::{Cluster, Options, images};
use libtest_mimic::{Arguments, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// What the tests share. It starts with the first that needs it.
pub struct World {
    /// Who uses it. Before the cluster: he goes first.
    pub person: Person,
    /// The cluster, with the chart installed.
    pub cluster: Cluster,
    /// An image with a shell and Python, by its digest in the cluster's registry.
    pub image: String,
    /// This project's image as two versions of it, by their digests.
    pub versions: [String; 2],
    /// What the apiserver has noted of the control plane's requests.
    pub audit: Audit,
}

impl World {
    /// A cluster as an administrator has prepared it, and the chart installed for the first time.
    fn new() -> Result<World> {
        World::installed(|cluster, versions| chart::install(cluster, &versions[0], &[]))
    }

    /// The same, installed in another way.
    fn installed(install: impl FnOnce(&Cluster, &[String; 2]) -> Result<()>) -> Result<World> {
        let audit = Audit::new()?;
        let cluster = Cluster::start(Options { apiserver_args: audit.arguments(), ..Options::default() })?;
        let image = cluster.registry().push(&images::minimal_python()?, "python")?;
        let versions = [chart::push(&cluster, "0.1.0-one")?, chart::push(&cluster, "0.1.0-two")?];
        cluster.kubectl_ok(&["create", "namespace", NAMESPACE])?;
        let level = "pod-security.kubernetes.io/enforce=restricted";
        cluster.kubectl_ok(&["label", "namespace", NAMESPACE, level])?;
        chart::volume(&cluster)?;
        install(&cluster, &versions)?;
        aviflow_e2e_kube::knows_the_kinds(&cluster)?;
        Ok(World { person: Person::new(&cluster, "ann")?, cluster, image, versions, audit })
    }

    /// A job's object: `nodes` nodes of `gpus` GPUs that run a script.
    pub fn job(&self, name: &str, nodes: u32, gpus: u32, script: &str) -> serde_json::Value {
        aviflow_e2e_kube::job(&self.image, name, nodes, gpus, script)
    }
}

type Test = fn(&World) -> Result<()>;

/// All of them, in this order.
const ALL: &[(&str, Test)] = &[
    ("the_chart_runs_trainings", install::the_chart_runs_trainings),
    ("people_come_with_certificates_of_the_cluster", certificates::people_come_with_certificates_of_the_cluster),
    ("a_certificate_of_another_authority_is_refused", certificates::a_certificate_of_another_authority_is_refused),
    ("an_upgrade_leaves_a_running_training_alone", upgrade::an_upgrade_leaves_a_running_training_alone),
    ("a_training_outlives_an_uninstalled_chart", upgrade::a_training_outlives_an_uninstalled_chart),
    ("a_pod_that_observes_may_only_read", install::a_pod_that_observes_may_only_read),
    ("the_manifest_takes_over_from_the_chart", install::the_manifest_takes_over_from_the_chart),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let shared = Arc::<Mutex<Option<World>>>::default();
    let trials = ALL.iter().map(|(name, test)| {
        let shared = Arc::clone(&shared);
        let run = move || {
            let mut world = shared.lock().map_err(|_| anyhow::anyhow!("an earlier test panicked on this cluster"))?;
            if world.is_none() {
                *world = Some(World::new()?);
            }
            world.as_ref().map_or(Ok(()), *test)
        };
        Trial::test(*name, move || run().map_err(|e| Failed::from(format!("{e:#}")))).with_ignored_flag(true)
    });
    let mut trials: Vec<Trial> = trials.collect();
    // What it needs is made by `cargo xtask test full` alone. Last: it has a cluster of its own.
    if let Some(older) = std::env::var_os("AVIFLOW_OLDER") {
        let test = move || upgrade::an_older_version_is_upgraded_beneath_a_training(Path::new(&older));
        let test = move || test().map_err(|e| Failed::from(format!("{e:#}")));
        trials.push(Trial::test("an_older_version_is_upgraded_beneath_a_training", test).with_ignored_flag(true));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed()
        && let Ok(shared) = shared.lock()
        && let Some(world) = shared.as_ref()
    {
        eprintln!("the logs of the cluster are in {}", world.cluster.keep_logs().display());
        eprintln!("the control plane said:\n{}", chart::log(&world.cluster).unwrap_or_default());
    }
    // Leaving by `exit` would drop nothing, and leave the cluster to the next start.
    drop(shared);
    conclusion.exit_code()
}
