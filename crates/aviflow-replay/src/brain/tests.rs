//! The policy `aviflow` on small traces, with the core's invariants checked after every pass.

use crate::cluster::{Cluster, Topology};
use crate::generate;
use crate::report::Figures;
use crate::run::{Policy, Scenario};
use crate::trace::Trace;

fn kalos(jobs: usize) -> Scenario {
    let mut trace = generate::kalos(1);
    trace.jobs.truncate(jobs);
    trace.whole_nodes(8);
    trace.compress(4.0);
    let mut scenario = Scenario::new(trace, Cluster::new(128, 8));
    scenario.check = true;
    scenario
}

#[test]
fn whole_nodes_without_preemption() {
    let scenario = kalos(319);
    let played = scenario.play(Policy::Aviflow, false).expect("a replay");
    assert_eq!((played.preemptions, played.turns, played.lost), (0, 0, 0));
    assert!(played.outcomes.iter().zip(&scenario.trace.jobs).all(|(o, j)| o.ended.0 - o.started.0 == j.run.0));
}

#[test]
fn what_is_held_is_the_run_and_the_restarts() {
    let mut scenario = kalos(319);
    scenario.preemption = true;
    let played = scenario.play(Policy::Aviflow, false).expect("a replay");
    let figures = Figures::of(&scenario.trace, &played, 1024);
    let held = played.meter.held as f64 / 3_600_000.0;
    let expected = scenario.trace.gpu_hours() + figures.lost_gpu_hours;
    assert!((held - expected).abs() < 1.0, "{held} {expected}");
}

#[test]
fn parts_of_nodes_and_queues_of_the_trace() {
    let mut trace = generate::philly(1, 8);
    trace.jobs.truncate(1_000);
    for (i, job) in trace.jobs.iter_mut().enumerate() {
        job.queue = Some(if i % 2 == 0 { "even" } else { "odd" }.to_owned());
    }
    let trace = Trace::new("a part of Philly", trace.jobs);
    let mut scenario = Scenario::new(trace, Cluster::new(16, 8));
    scenario.check = true;
    scenario.play(Policy::Aviflow, false).expect("a replay");
    scenario.queues = vec![aviflow_core::model::Queue::open("even")];
    let error = scenario.play(Policy::Aviflow, false).expect_err("no such queue");
    assert!(error.to_string().contains("is in the queue odd, and --queues has no such queue"), "{error}");
}

#[test]
fn jobs_that_require_a_domain() {
    let node = |n: u32| format!("n{n},{},{}\n", n / 32, n / 8);
    let text: String = std::iter::once("node,group,leaf\n".to_owned()).chain((0..64).map(node)).collect();
    let topology = Topology::parse("t.csv", &text).expect("a topology");
    let cluster = Cluster { topology: Some(topology), ..Cluster::new(64, 8) };
    let mut trace = generate::lingjun(1, &cluster).expect("a trace");
    trace.jobs.truncate(300);
    let mut scenario = Scenario::new(trace, cluster);
    scenario.check = true;
    for policy in Policy::ALL {
        let figures = scenario.figures(policy).expect("a replay");
        assert!(figures.use_of_bound.is_some_and(|ratio| ratio > 0.5 && ratio <= 1.0), "{policy:?}: {figures:?}");
    }
    scenario.preemption = true;
    scenario.play(Policy::Aviflow, false).expect("a replay");
}
