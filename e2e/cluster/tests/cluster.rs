//! The harness does what it promises, on real clusters. Needs root: `cargo xtask test kube` runs it.
//!
//! The tests run one after the other on one cluster, which each leaves as it found it. They are marked as ignored,
//! so that `cargo test --workspace` starts no cluster.

mod scenarios;

use aviflow_testcluster::Cluster;
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// The cluster of most tests. It starts with the first that needs it.
type Shared = Arc<Mutex<Option<Cluster>>>;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some(scenarios::CHILD) {
        return scenarios::hold_a_cluster();
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let shared = Shared::default();
    let mut trials = vec![Trial::test("a_killed_cluster_is_removed_by_the_next_start", || {
        scenarios::a_killed_cluster_is_removed_by_the_next_start().map_err(failed)
    })];
    trials.extend(scenarios::ON_ONE_CLUSTER.map(|(name, test)| {
        let shared = Arc::clone(&shared);
        Trial::test(name, move || on_shared(&shared, test).map_err(failed))
    }));
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed()
        && let Ok(shared) = shared.lock()
        && let Some(cluster) = shared.as_ref()
    {
        eprintln!("the logs of the cluster are in {}", cluster.keep_logs().display());
    }
    // Leaving by `exit` would drop nothing, and leave the cluster to the next start.
    drop(shared);
    conclusion.exit_code()
}

fn on_shared(shared: &Shared, test: scenarios::Test) -> anyhow::Result<()> {
    let mut cluster = shared.lock().map_err(|_| anyhow::anyhow!("an earlier test panicked on this cluster"))?;
    if cluster.is_none() {
        *cluster = Some(Cluster::start(scenarios::options()?)?);
    }
    cluster.as_ref().map_or(Ok(()), test)
}

fn failed(error: anyhow::Error) -> Failed {
    format!("{error:#}").into()
}
