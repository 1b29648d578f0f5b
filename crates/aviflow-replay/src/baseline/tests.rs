//! Schedules that are worked out by hand.

use crate::cluster::Cluster;
use crate::run::{Policy, Scenario};
use crate::trace::{Limits, Trace, TraceJob};
use aviflow_core::time::{Span, Time};

/// Jobs as (submitted, nodes, GPUs on each, run), in hours, and when each should start.
fn check(policy: Policy, cluster: (u32, u32), jobs: &[(i64, u32, u32, i64)], starts: &[i64]) {
    let hour = 3_600_000;
    let job = |(n, (submitted, nodes, gpus, run)): (usize, &(i64, u32, u32, i64))| TraceJob {
        line: 0,
        name: format!("job-{n}"),
        submitted: Time(submitted * hour),
        user: "user".to_owned(),
        queue: None,
        priority: 0,
        nodes: *nodes,
        gpus_per_node: *gpus,
        gpu_type: None,
        run: Span(run * hour),
        time_limit: None,
        preemptible: true,
        require: None,
    };
    let trace = Trace::new("by hand", jobs.iter().enumerate().map(job).collect());
    let mut scenario = Scenario::new(trace, Cluster::new(cluster.0, cluster.1));
    scenario.limits = Limits::Exact;
    let played = scenario.play(policy, false).expect("a schedule");
    let got: Vec<i64> = played.outcomes.iter().map(|o| o.started.0 / hour).collect();
    assert_eq!(got, starts, "{policy:?} {jobs:?}");
}

#[test]
fn whole_nodes() {
    // Two nodes run until 10 and two until 6; the third job wants all four and is first in the queue.
    let jobs = [
        (0, 2, 8, 10),
        (0, 2, 8, 6),
        (1, 4, 8, 1),
        (2, 2, 8, 4), // fits beside the first from 6 to 10
        (2, 2, 8, 5), // would delay the third by an hour
        (3, 1, 8, 1),
    ];
    check(Policy::Fifo, (4, 8), &jobs, &[0, 0, 10, 11, 11, 15]);
    check(Policy::Easy, (4, 8), &jobs, &[0, 0, 10, 6, 11, 11]);
    // Who takes whatever fits lets the third wait for as long as others come in between.
    let jobs = [(0, 2, 8, 10), (0, 2, 8, 6), (1, 4, 8, 1), (2, 2, 8, 5), (2, 2, 8, 5), (3, 1, 8, 1)];
    check(Policy::Greedy, (4, 8), &jobs, &[0, 0, 15, 6, 10, 11]);
    check(Policy::Easy, (4, 8), &jobs, &[0, 0, 10, 11, 11, 6]);
}

#[test]
fn nodes_that_the_first_job_leaves_over_are_used_by_long_jobs() {
    // At 5 the second gets three of the four nodes; one is left over for as long as anybody likes.
    let jobs = [(0, 3, 8, 5), (0, 3, 8, 5), (1, 1, 8, 100), (1, 1, 8, 100)];
    check(Policy::Easy, (4, 8), &jobs, &[0, 5, 1, 10]);
}

#[test]
fn parts_of_nodes() {
    // One node of 8: 5 GPUs until 4. The second wants the whole node then; small jobs go beside the first.
    let jobs = [(0, 1, 5, 4), (0, 1, 8, 2), (1, 1, 2, 3), (1, 1, 2, 4), (1, 1, 1, 2)];
    check(Policy::Easy, (1, 8), &jobs, &[0, 4, 1, 6, 1]);
    check(Policy::Greedy, (1, 8), &jobs, &[0, 4, 1, 6, 1]);
    // The same with a second node that is not in the way: long jobs go there.
    let jobs = [(0, 1, 5, 4), (0, 1, 4, 9), (0, 1, 8, 2), (1, 1, 2, 30), (1, 1, 2, 30), (1, 1, 1, 30)];
    check(Policy::Easy, (2, 8), &jobs, &[0, 0, 4, 1, 1, 6]);
}

#[test]
fn small_jobs_fill_broken_nodes_first() {
    // Best fit: the second goes beside the first, so that the third has a whole node.
    check(Policy::Fifo, (2, 8), &[(0, 1, 4, 5), (1, 1, 2, 5), (2, 1, 8, 1)], &[0, 1, 2]);
}

#[test]
fn ends_come_before_arrivals_of_the_same_instant() {
    check(Policy::Fifo, (1, 8), &[(0, 1, 8, 1), (1, 1, 8, 1)], &[0, 1]);
}
