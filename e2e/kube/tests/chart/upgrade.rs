//! What is changed around a running training does not reach it.

use crate::World;
use crate::install::untroubled;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::chart::{self, NAMESPACE, helm};
use aviflow_e2e_kube::{LONGEST, Phase as _};
use aviflow_testcluster::until;
use serde_json::Value;
use std::path::Path;

/// Counts until it is told to end.
const COUNT: &str = "n=0; until [ -e /tmp/end ]; do n=$((n+1)); echo count $n; sleep 0.2; done; echo ended at $n";

/// A training of two workers that runs, and its pods.
struct Training<'a> {
    world: &'a World,
    name: &'a str,
    pods: Vec<Value>,
}

/// What tells two pods apart, and whether its containers were started again.
fn identity(pod: &Value) -> (String, String) {
    let started = &pod["status"]["containerStatuses"][0]["containerID"];
    (pod["metadata"]["uid"].to_string(), started.to_string())
}

impl<'a> Training<'a> {
    /// Starts one of as many workers as there are nodes.
    fn start(world: &'a World, name: &'a str) -> Result<Training<'a>> {
        world.cluster.apply(&world.job(name, 2, 4, COUNT).to_string())?;
        world.cluster.phase(name, "Running")?;
        let training = Training { world, name, pods: world.cluster.pods()? };
        training.counts_to(5)?;
        Ok(training)
    }

    /// The highest number of each worker that the control plane has.
    fn counted(&self) -> Result<[u64; 2]> {
        let mut counted = [0; 2];
        for (worker, highest) in counted.iter_mut().enumerate() {
            let log = self.log(worker)?;
            let numbers = log.lines().filter_map(|line| line.rsplit_once("count ")?.1.trim().parse().ok());
            *highest = numbers.max().unwrap_or(0);
        }
        Ok(counted)
    }

    fn log(&self, worker: usize) -> Result<String> {
        self.world.person.ok(&["logs", self.name, "--rank", &worker.to_string()])
    }

    fn counts_to(&self, number: u64) -> Result<()> {
        until(&format!("{} counts to {number}", self.name), LONGEST, || {
            Ok(self.counted()?.iter().all(|n| *n >= number).then_some(()))
        })
    }

    /// It goes on in the same containers, and the control plane hears it.
    fn goes_on(&self) -> Result<()> {
        let before = self.counted()?.into_iter().max().unwrap_or(0);
        self.counts_to(before + 5)?;
        let now = self.world.cluster.pods()?;
        let identities = |pods: &[Value]| pods.iter().map(identity).collect::<std::collections::BTreeSet<_>>();
        ensure!(identities(&now) == identities(&self.pods), "other pods than before: {now:?}\n{:?}", self.pods);
        Ok(())
    }

    /// Ends it, and looks at all that is left of it: one attempt, a log without a gap, and a ledger that sums up.
    fn end(self) -> Result<()> {
        let World { person, cluster, .. } = self.world;
        for worker in ["0", "1"] {
            person.ok(&["exec", self.name, "--rank", worker, "--", "touch", "/tmp/end"])?;
        }
        let object = cluster.phase(self.name, "Succeeded")?;
        ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
        for worker in 0..2 {
            let log = self.log(worker)?;
            let last = log.lines().find_map(|line| line.rsplit_once("ended at ")?.1.trim().parse::<u64>().ok());
            let last = last.with_context(|| format!("worker {worker} has not said its last: {log}"))?;
            let numbers: Vec<u64> =
                log.lines().filter_map(|line| line.rsplit_once("count ")?.1.trim().parse().ok()).collect();
            ensure!(numbers == (1..=last).collect::<Vec<_>>(), "the log of worker {worker} has a gap: {log}");
        }
        until("its pods are removed", LONGEST, || Ok(cluster.pods()?.is_empty().then_some(())))?;
        person.balanced()
    }
}

/// The pod of the control plane.
fn plane(world: &World) -> Result<Value> {
    let pods = chart::pods(&world.cluster)?;
    ensure!(pods.len() == 1, "{pods:?}");
    pods.into_iter().next().context("it has no pod")
}

pub fn an_upgrade_leaves_a_running_training_alone(world: &World) -> Result<()> {
    let training = Training::start(world, "upgraded")?;
    let before = plane(world)?;
    // Another image and another value.
    chart::install(&world.cluster, &world.versions[1], &["resources.requests.cpu=100m"])?;
    let after = plane(world)?;
    ensure!(before["metadata"]["uid"] != after["metadata"]["uid"], "the pod was not replaced");
    let ran = after["status"]["containerStatuses"][0]["imageID"].as_str().unwrap_or_default();
    ensure!(ran == world.versions[1], "{ran} runs, not {}", world.versions[1]);
    training.goes_on()?;
    training.end()?;
    untroubled(world)
}

pub fn a_training_outlives_an_uninstalled_chart(world: &World) -> Result<()> {
    let World { cluster, .. } = world;
    let training = Training::start(world, "orphaned")?;
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/aviflow");
    let address = cluster.get(&service)?["spec"]["clusterIP"].clone();
    let counted = training.counted()?;
    helm(cluster, &["uninstall", "aviflow", "--wait"])?;
    until("the control plane is gone", LONGEST, || Ok(chart::pods(cluster)?.is_empty().then_some(())))?;
    ensure!(cluster.get(&service)?["spec"]["clusterIP"] == address, "agents would look for it in vain");
    let objects = cluster.kubectl_ok(&["get", "trainingjobs", "--all-namespaces", "-o", "name"])?;
    ensure!(objects.contains("/orphaned"), "{objects}");
    // Nobody is there to ask; the ranks themselves say that they go on.
    let pod = training.pods[0]["metadata"]["name"].as_str().context("a name")?;
    let alive = ["exec", pod, "-c", "worker", "--", "sh", "-c", "kill -0 1 && cat /proc/*/cmdline | tr '\\0' ' '"];
    let running = cluster.kubectl_ok(&alive)?;
    ensure!(running.contains("count"), "its ranks are gone: {running}");
    chart::install(cluster, &world.versions[1], &[])?;
    // Adopted, with all that it has said meanwhile.
    training.counts_to(counted.into_iter().max().unwrap_or(0) + 5)?;
    training.goes_on()?;
    training.end()?;
    untroubled(world)
}

/// `older` has programs and source of an earlier commit, whose agents speak an earlier version of the protocol.
pub fn an_older_version_is_upgraded_beneath_a_training(older: &Path) -> Result<()> {
    let world = World::installed(|cluster, _| {
        let programs = (older.join("aviflow"), older.join("aviflow-agent"));
        let image = chart::push_programs(cluster, "older", &programs.0, &programs.1)?;
        chart::install_chart(cluster, &older.join("source/deploy/helm/aviflow"), &image, &[])
    })?;
    let training = Training::start(&world, "older")?;
    let before = plane(&world)?;
    chart::install(&world.cluster, &world.versions[0], &[])?;
    ensure!(before["metadata"]["uid"] != plane(&world)?["metadata"]["uid"], "the pod was not replaced");
    training.goes_on()?;
    training.end()?;
    untroubled(&world)?;
    // What comes now has agents of the present version.
    world.cluster.apply(&world.job("newer", 1, 1, "echo new").to_string())?;
    world.cluster.phase("newer", "Succeeded")?;
    Ok(())
}
