//! The platform on a real cluster, end to end. Needs root: `cargo xtask test kube` runs it.
//!
//! The tests run one after the other on one cluster, which each leaves as it found it. They are marked as ignored,
//! so that `cargo test --workspace` starts no cluster.

mod scenarios;

use aviflow_e2e_kube::Plane;
use aviflow_testcluster::{Cluster, Options, images};
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What most tests share. It starts with the first that needs it.
pub struct World {
    /// Before the cluster: it goes first.
    pub plane: Plane,
    /// The cluster.
    pub cluster: Cluster,
    /// An image with a shell and Python, by its digest in the cluster's registry.
    pub image: String,
    /// The archives of its images: a node that is added again gets them from there.
    _images: tempfile::TempDir,
}

impl World {
    /// A job's object: `nodes` nodes of `gpus` GPUs that run a script.
    pub fn job(&self, name: &str, nodes: u32, gpus: u32, script: &str) -> serde_json::Value {
        aviflow_e2e_kube::job(&self.image, name, nodes, gpus, script)
    }
}

type Shared = Arc<Mutex<Option<World>>>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let shared = Shared::default();
    let times = Arc::new(Mutex::new(Vec::new()));
    let trials = scenarios::ALL.iter().map(|(name, test)| {
        let (shared, times) = (Arc::clone(&shared), Arc::clone(&times));
        let (name, test) = (*name, *test);
        let run = move || {
            let begun = Instant::now();
            let ran = on_shared(&shared, test).map_err(|e| Failed::from(format!("{e:#}")));
            times.lock().map_err(|_| "a test panicked")?.push((begun.elapsed(), name));
            ran
        };
        Trial::test(name, run).with_ignored_flag(true)
    });
    let trials = trials.collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Ok(mut times) = times.lock() {
        times.sort_unstable_by(|a, b| b.cmp(a));
        let longest = times.iter().take(8).map(|(time, name)| format!("{name} {:.0} s", time.as_secs_f64()));
        eprintln!("the longest: {}", longest.collect::<Vec<_>>().join(", "));
    }
    if conclusion.has_failed()
        && let Ok(shared) = shared.lock()
        && let Some(world) = shared.as_ref()
    {
        eprintln!("the logs of the cluster are in {}", world.cluster.keep_logs().display());
        eprintln!("the control plane said:\n{}", world.plane.log());
    }
    // Leaving by `exit` would drop nothing, and leave the cluster to the next start.
    drop(shared);
    conclusion.exit_code()
}

fn on_shared(shared: &Shared, test: scenarios::Test) -> anyhow::Result<()> {
    let mut world = shared.lock().map_err(|_| anyhow::anyhow!("an earlier test panicked on this cluster"))?;
    if world.is_none() {
        let folder = tempfile::tempdir()?;
        let images = vec![Plane::image(folder.path())?];
        let cluster = Cluster::start(Options { images, ..Options::default() })?;
        scenarios::install(&cluster)?;
        let image = cluster.registry().push(&images::minimal_python()?, "python")?;
        *world = Some(World { plane: Plane::start(&cluster)?, cluster, image, _images: folder });
    }
    let Some(world) = world.as_mut() else { return Ok(()) };
    test(world).inspect_err(|_| scenarios::sweep(world))
}
