//! The mix `lingjun`: trainings on whole nodes that each need one leaf or one group of leaves, for the
//! question of how full a tree of switches can be kept.
//!
//! It is a mix that is stated here, and fitted to no trace: the tree of Lingjun was published, its
//! jobs were not.
//!
//! - Sizes: see [`SIZES`]. A job that the largest leaf holds requires one leaf, the tree's smallest
//!   level; any other requires one domain of the level above. Sizes beyond half of the largest such
//!   domain are left out.
//! - Run times: log-normal with a median of [`MEDIAN_HOURS`] and a deviation of the logarithm of
//!   [`DEVIATION`], and between [`SHORTEST_HOURS`] and [`LONGEST_HOURS`].
//! - Arrivals: at random (exponential gaps) over [`DAYS`], with [`LOAD`] times the GPU-hours that the
//!   cluster has in this time, so that work always waits.

use super::choose;
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::rng::Rng;
use crate::trace::{Trace, TraceJob};
use aviflow_core::time::{Span, Time};

/// Nodes of a job, and how many of 100 jobs have as many.
pub const SIZES: [(u32, f64); 7] = [(1, 25.0), (2, 20.0), (4, 20.0), (8, 20.0), (16, 9.0), (32, 4.0), (64, 2.0)];
/// Half of the jobs run for less.
pub const MEDIAN_HOURS: f64 = 2.0;
/// The deviation of the logarithm of a run time.
pub const DEVIATION: f64 = 1.2;
/// No job runs for less.
pub const SHORTEST_HOURS: f64 = 0.1;
/// No job runs for longer.
pub const LONGEST_HOURS: f64 = 48.0;
/// How long jobs are submitted for.
pub const DAYS: f64 = 7.0;
/// The work that is submitted, in parts of what the cluster can do in this time.
pub const LOAD: f64 = 1.5;

/// The mix for a cluster with a topology.
///
/// # Errors
/// If the cluster has none.
pub fn lingjun(seed: u64, cluster: &Cluster) -> Result<Trace> {
    let levels = cluster.topology.as_ref().map(|topology| topology.levels.as_slice());
    let Some([leaf, above @ ..]) = levels else {
        let help = "give --topology FILE: a header, and for each node its name and its domains, the largest first";
        return Err(Error::options("jobs that need one leaf need a topology", help));
    };
    let group = above.first().unwrap_or(leaf);
    let (in_leaf, in_group) = (cluster.largest(leaf).unwrap_or(0), cluster.largest(group).unwrap_or(0));
    let sizes: Vec<(u32, f64)> = SIZES.into_iter().filter(|(nodes, _)| *nodes <= in_leaf.max(in_group / 2)).collect();
    let weights: Vec<f64> = sizes.iter().map(|(_, weight)| *weight).collect();
    let mut rng = Rng::new(seed, "lingjun");
    let (hours, work) = (DAYS * 24.0, LOAD * DAYS * 24.0 * f64::from(cluster.nodes));
    let mut jobs = Vec::new();
    let mut submitted = 0.0;
    while submitted < work {
        let nodes = sizes[choose(&weights, &mut rng)].0;
        let run = MEDIAN_HOURS * (DEVIATION * rng.normal()).exp();
        let run = run.clamp(SHORTEST_HOURS, LONGEST_HOURS);
        submitted += f64::from(nodes) * run;
        jobs.push(TraceJob {
            line: 0,
            name: format!("lingjun-{}", jobs.len()),
            submitted: Time(0),
            user: "lingjun".to_owned(),
            queue: None,
            priority: 0,
            nodes,
            gpus_per_node: cluster.gpus_per_node,
            gpu_type: None,
            run: millis(run),
            time_limit: None,
            preemptible: true,
            require: Some(if nodes <= in_leaf { leaf } else { group }.clone()),
        });
    }
    let gaps: Vec<f64> = jobs.iter().map(|_| -(1.0 - rng.unit()).ln()).collect();
    let (mut at, whole) = (0.0, gaps.iter().sum::<f64>().max(f64::MIN_POSITIVE));
    for (job, gap) in jobs.iter_mut().zip(gaps) {
        job.submitted = Time(millis(at / whole * hours).0);
        at += gap;
    }
    Ok(Trace::new(&format!("generated as a mix for Lingjun's tree, seed {seed}"), jobs))
}

fn millis(hours: f64) -> Span {
    Span((hours * 3_600_000.0) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Topology;

    #[test]
    fn the_mix_is_the_stated_one() {
        let error = lingjun(1, &Cluster::new(200, 8)).expect_err("no topology");
        assert_eq!(error.to_string(), "jobs that need one leaf need a topology");
        // 2 groups of 20 leaves of 5 nodes.
        let node = |n: u32| format!("n{n},{},{}\n", n / 100, n / 5);
        let text: String = std::iter::once("node,group,leaf\n".to_owned()).chain((0..200).map(node)).collect();
        let topology = Topology::parse("t.csv", &text).expect("a topology");
        let cluster = Cluster { topology: Some(topology), ..Cluster::new(200, 8) };
        let trace = lingjun(1, &cluster).expect("a trace");
        assert_eq!(trace, lingjun(1, &cluster).expect("a trace"));
        assert_ne!(trace, lingjun(2, &cluster).expect("a trace"));
        assert_eq!(trace.check(&cluster), Ok(()));
        let (mut sizes, n) = (std::collections::BTreeMap::new(), trace.jobs.len() as f64);
        for job in &trace.jobs {
            *sizes.entry((job.nodes, job.require.as_deref().unwrap_or_default())).or_insert(0.0) += 100.0 / n;
        }
        let known = [(1, "leaf"), (2, "leaf"), (4, "leaf"), (8, "group"), (16, "group"), (32, "group")];
        assert!(sizes.keys().copied().eq(known), "{sizes:?}");
        let whole: f64 = SIZES[..6].iter().map(|(_, weight)| weight).sum();
        for ((_, weight), share) in SIZES.iter().zip(sizes.values()) {
            assert!((share - weight * 100.0 / whole).abs() < 3.0, "{sizes:?}");
        }
        let load = trace.gpu_hours() / (1600.0 * DAYS * 24.0);
        assert!((load / LOAD - 1.0).abs() < 0.05, "{load}");
        assert!((trace.span().0 as f64 / (DAYS * 86_400_000.0) - 1.0).abs() < 0.05, "{:?}", trace.span());
    }
}
