//! What is run: queues, and series of jobs that come into them, each one job after another with a pause before each.
//!
//! [`BASELINE`] is Kueue's own configuration of its scheduler's performance test, `configs/baseline/generator.yaml`.
//! Kueue's runner reads that file itself; here it stands as a table, and [`check`] compares. [`LEAVES`] is ours, for
//! both sides: HGX servers below leaves of eight, and gangs of whole nodes of which each needs one leaf, at 95% of
//! what there is. Kueue's runner gets it as a file that [`Scenario::generator`] writes.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::time::Duration;

/// A workload and what it runs on.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Cohorts; in Aviflow the queues' parents.
    pub cohorts: usize,
    /// Queues of each.
    pub queues: usize,
    /// What is each queue's own: the nominal quota.
    pub guarantee: u32,
    /// The most that a queue may use: the nominal quota and the borrowing limit.
    pub limit: u32,
    /// Leaves.
    pub leaves: usize,
    /// Nodes of each.
    pub nodes: usize,
    /// Units of a node.
    pub node_units: u32,
    /// Whether each job needs one leaf.
    pub topology: bool,
    /// The series of each queue.
    pub classes: &'static [Class],
}

/// One series of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// Its name.
    pub name: &'static str,
    /// How many jobs.
    pub count: usize,
    /// The pause before each.
    pub every: Duration,
    /// How long each runs.
    pub time: Duration,
    /// Aviflow's priority. Kueue's are 50, 100 and 200; what counts is the order.
    pub priority: &'static str,
    /// Workers of each job.
    pub nodes: u32,
    /// Units of each worker.
    pub units: u32,
}

impl Class {
    const fn new(name: &'static str, count: usize, every: u64, time: u64, nodes: u32, units: u32) -> Class {
        let (every, time) = (Duration::from_millis(every), Duration::from_millis(time));
        Class { name, count, every, time, priority: "normal", nodes, units }
    }

    const fn of_priority(self, priority: &'static str) -> Class {
        Class { priority, ..self }
    }
}

/// Kueue's own: 15,000 jobs in 30 queues. A unit is a GPU, and a node has as many as a large job, so that a job is one
/// worker, as a workload of Kueue's is one pod, and nothing is lost by how jobs fit on nodes, of which it knows nothing.
pub const BASELINE: Scenario = Scenario {
    name: "baseline",
    cohorts: 5,
    queues: 6,
    guarantee: 20,
    limit: 120,
    leaves: 1,
    nodes: 30,
    node_units: 20,
    topology: false,
    classes: &[
        Class::new("small", 350, 100, 200, 1, 1).of_priority("low"),
        Class::new("medium", 100, 500, 500, 1, 5),
        Class::new("large", 50, 1200, 1000, 1, 20).of_priority("high"),
    ],
};

/// Gangs of whole nodes, each in one leaf. Those of six and of five nodes need all eight leaves at a time, so that a
/// small one in the wrong leaf keeps a large one waiting.
pub const LEAVES: Scenario = Scenario {
    name: "leaves",
    cohorts: 1,
    queues: 1,
    guarantee: 512,
    limit: 512,
    leaves: 8,
    nodes: 8,
    node_units: 8,
    topology: true,
    classes: &[
        Class::new("one", 150, 800, 4000, 1, 8),
        Class::new("two", 60, 2000, 6000, 2, 8),
        Class::new("three", 30, 4000, 8000, 3, 8),
        Class::new("five", 48, 2500, 10_000, 5, 8),
        Class::new("six", 40, 3000, 12_000, 6, 8),
    ],
};

/// Of the file that [`BASELINE`] is taken from.
const SHA256: &str = "23a18fe3f49e42614684dffc1360577d02322da1b7a329ff47b967d3c2792ca6";

impl Scenario {
    /// All jobs.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.cohorts * self.queues * self.classes.iter().map(|c| c.count).sum::<usize>()
    }

    /// All work, in unit-seconds.
    #[must_use]
    pub fn work(&self) -> f64 {
        let of = |c: &Class| c.count as f64 * f64::from(c.nodes * c.units) * c.time.as_secs_f64();
        (self.cohorts * self.queues) as f64 * self.classes.iter().map(of).sum::<f64>()
    }

    /// All units.
    #[must_use]
    pub fn units(&self) -> u32 {
        (self.leaves * self.nodes) as u32 * self.node_units
    }

    /// The names of the queues with those of their parents.
    pub fn names(&self) -> impl Iterator<Item = (String, String)> {
        let (cohorts, queues) = (self.cohorts, self.queues);
        (0..cohorts).flat_map(move |c| (0..queues).map(move |q| (format!("cq-{q}-cohort-{c}"), format!("cohort-{c}"))))
    }

    /// The same for Kueue's runner: its configuration, JSON being YAML.
    #[must_use]
    pub fn generator(&self) -> Value {
        let leaf = "cloud.provider.com/topology-rack";
        let series = self.classes.iter().map(|class| {
            json!({
                "count": class.count,
                "creationIntervalMs": class.every.as_millis(),
                "workloads": [{
                    "className": class.name,
                    "runtimeMs": class.time.as_millis(),
                    "priority": 100,
                    "request": class.units.to_string(),
                    "podCount": class.nodes,
                    "tasConstraint": "required",
                    "tasLevel": leaf,
                }],
            })
        });
        let capacity = json!({"cpu": self.node_units.to_string(), "memory": "256Gi"});
        json!({
            "topology": {"name": "default-topology", "levels": [
                {"name": "rack", "count": self.leaves, "nodeLabel": leaf},
                {"name": "node", "count": self.nodes, "nodeLabel": "kubernetes.io/hostname", "capacity": capacity},
            ]},
            "resourceFlavor": {"name": "tas-flavor", "nodeLabel": "tas-node-group", "topologyName": "default-topology"},
            "cohorts": [{"className": "cohort", "count": self.cohorts, "queuesSets": [{
                "className": "cq",
                "count": self.queues,
                "nominalQuota": self.guarantee.to_string(),
                "borrowingLimit": (self.limit - self.guarantee).to_string(),
                "reclaimWithinCohort": "Any",
                "withinClusterQueue": "LowerPriority",
                "workloadsSets": series.collect::<Vec<_>>(),
            }]}],
        })
    }
}

/// Compares the table of [`BASELINE`] with Kueue's file.
///
/// # Errors
/// If the file is another than the one that this was taken from.
pub fn check(file: &Path) -> Result<()> {
    let text = std::fs::read(file).with_context(|| format!("{}", file.display()))?;
    let hash: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(
        hash == SHA256,
        "{} is not what the table in e2e/bench/src/workload.rs was taken from ({hash}); compare them",
        file.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_bound_is_66_seconds() {
        assert_eq!((BASELINE.jobs(), BASELINE.units()), (15_000, 600));
        assert!((BASELINE.work() / f64::from(BASELINE.units()) - 66.0).abs() < 1e-9);
        assert_eq!(BASELINE.units(), BASELINE.guarantee * BASELINE.names().count() as u32);
    }

    #[test]
    fn the_leaves_are_asked_for_by_95_percent() {
        let load: f64 =
            LEAVES.classes.iter().map(|c| f64::from(c.nodes) * c.time.as_secs_f64() / c.every.as_secs_f64()).sum();
        assert!((load / 64.0 - 0.953).abs() < 0.001, "{load}");
        assert_eq!(LEAVES.units(), LEAVES.guarantee);
        // All series last as long.
        assert!(LEAVES.classes.iter().all(|c| c.every * c.count as u32 == Duration::from_secs(120)));
    }
}
