//! Cases in one line each, and the plan's properties over small clusters.

use super::super::*;
use crate::explain;
use crate::gpus::Slots;
use crate::lifecycle::{self, Event};
use crate::model::{Job, JobKey, Node, NodeRange, Phase, Request};
use proptest::prelude::*;
use std::cmp::Reverse;

fn node(id: u32, gpu_type: &str, free: u32) -> Node {
    // What is not free is broken: it needs no job to hold it.
    Node {
        unhealthy: Slots::first(8 - free),
        ..Node::new(NodeId(id), &format!("n{id}"), "p", gpu_type, Slots::first(8))
    }
}

fn job(id: u64, nodes: u32, gpus: u32, priority: i32) -> Job {
    let request = Request { priority, ..Request::of(nodes, gpus) };
    let key = JobKey { namespace: "default".into(), name: format!("j{id}") };
    Job::submitted(JobId(id), key, "ann".into(), request, None, Time(i64::try_from(id).unwrap()))
}

fn snapshot(nodes: Vec<Node>, jobs: Vec<Job>) -> Snapshot {
    let mut s = Snapshot::default();
    for n in nodes {
        let id = n.id;
        s.ledger.open_node(&n, Time(0));
        s.nodes.insert(id, n);
        // Books what is broken as such.
        let _ = lifecycle::set_condition(&mut s, id, |_| {}, Time(0));
    }
    for j in jobs {
        s.waiting.insert(j.id);
        s.jobs.insert(j.id, j);
    }
    s
}

/// The plan as text: what starts where, and why the rest waits.
fn check(s: &Snapshot, expected: &[&str]) {
    let plan = plan(s, &mut Memo::default(), Time(1000));
    let mut lines: Vec<String> = Vec::new();
    for decision in &plan.decisions {
        let Decision::Start { job, placement } = decision else { panic!("{decision:?}") };
        let on: Vec<String> = placement.0.iter().map(|(n, slots)| format!("n{}:{}", n.0, slots.count())).collect();
        lines.push(format!("j{} starts on {}", job.0, on.join(" ")));
    }
    for w in &plan.waiting {
        lines.push(format!("j{} waits: {}", w.job.0, explain::constraint(&plan.constraints[w.constraint], Time(1000))));
    }
    assert_eq!(lines, expected);
}

#[test]
fn a_node_with_broken_gpus_is_no_whole_node() {
    let s = snapshot(vec![node(1, "H100", 4), node(2, "H100", 4)], vec![job(1, 1, 8, 0), job(2, 1, 1, 0)]);
    // The nodes have four broken GPUs each, so a whole one can never be had.
    check(
        &s,
        &[
            "j2 starts on n1:1",
            "j1 waits: can never start: needs 1 node with 8 GPUs, and the pool has no node that large; cancel it or ask for less",
        ],
    );
}

#[test]
fn types_are_taken_in_the_order_of_preference() {
    let mut j = job(1, 1, 8, 0);
    j.request.gpu_types = vec!["H200".into(), "H100".into()];
    let nodes = vec![node(1, "H100", 8), node(2, "H200", 8)];
    check(&snapshot(nodes, vec![j.clone()]), &["j1 starts on n2:8"]);
    check(&snapshot(vec![node(1, "H100", 8), node(2, "H200", 4)], vec![j]), &["j1 starts on n1:8"]);
}

#[test]
fn a_gang_never_spans_types() {
    let s = snapshot(vec![node(1, "H100", 8), node(2, "H200", 8)], vec![job(1, 2, 8, 0)]);
    check(
        &s,
        &[
            "j1 waits: can never start: needs 2 nodes with 8 GPUs, and the pool has only 1 node that large; cancel it or ask for less",
        ],
    );
}

#[test]
fn a_range_takes_as_many_nodes_as_there_are() {
    let mut j = job(1, 1, 8, 0);
    j.request.nodes = NodeRange { min: 1, max: 8 };
    check(&snapshot(vec![node(1, "H100", 8), node(2, "H100", 8)], vec![j]), &["j1 starts on n1:8 n2:8"]);
}

#[test]
fn a_range_that_must_be_on_one_node_is_one_node() {
    let mut j = job(1, 1, 4, 0);
    j.request.nodes = NodeRange { min: 1, max: 8 };
    j.request.topology.require = Some("node".into());
    check(&snapshot(vec![node(1, "H100", 8), node(2, "H100", 8)], vec![j]), &["j1 starts on n1:4"]);
}

#[test]
fn gates_name_themselves_and_wake_in_time() {
    let mut backing = job(1, 1, 1, 0);
    backing.not_before = Some(Time(5000));
    let mut building = job(2, 1, 1, 0);
    building.environment = Some(EnvironmentHash("h".into()));
    let s = snapshot(vec![node(1, "H100", 8)], vec![backing, building]);
    check(&s, &["j1 waits: pauses 4s after its last attempt", "j2 waits: its environment is being prepared"]);
    assert_eq!(plan(&s, &mut Memo::default(), Time(1000)).next_wake, Some(Time(5000)));
    let mut paused = snapshot(vec![node(1, "H100", 8)], vec![job(1, 1, 1, 0)]);
    paused.paused = Some("ops".into());
    check(&paused, &["j1 waits: all starts are paused by ops"]);
}

fn arb_nodes() -> impl Strategy<Value = Vec<(u32, bool)>> {
    prop::collection::vec((0u32..=8, any::<bool>()), 1..7)
}

fn arb_jobs() -> impl Strategy<Value = Vec<(u32, u32, i32)>> {
    prop::collection::vec((1u32..4, 1u32..=8, 0i32..3), 1..12)
}

fn build(nodes: &[(u32, bool)], jobs: &[(u32, u32, i32)]) -> Snapshot {
    let kind = |k: bool| if k { "H200" } else { "H100" };
    let nodes = (1u32..).zip(nodes).map(|(id, (free, k))| node(id, kind(*k), *free)).collect();
    let jobs = (1u64..).zip(jobs).map(|(id, (n, g, p))| job(id, *n, *g, *p)).collect();
    snapshot(nodes, jobs)
}

/// Carries the plan out, as the engine does.
fn carry_out(s: &mut Snapshot, plan: &Plan, now: Time) {
    for decision in &plan.decisions {
        let Decision::Start { job, placement } = decision else { panic!("{decision:?}") };
        let event = Event::Place { placement: placement.clone() };
        let _ = lifecycle::advance(s, *job, &event, now, now);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_plan_keeps_its_properties(nodes in arb_nodes(), jobs in arb_jobs()) {
        let mut s = build(&nodes, &jobs);
        let mut memo = Memo::default();
        let first = plan(&s, &mut memo, Time(0));
        prop_assert_eq!(&first, &plan(&s, &mut memo, Time(0)), "with and without the memo");
        // Every job either starts or waits with a reason, and waiting is in order.
        prop_assert_eq!(first.decisions.len() + first.waiting.len(), jobs.len());
        let order: Vec<(Reverse<i32>, JobId)> =
            first.waiting.iter().map(|w| (Reverse(s.jobs[&w.job].request.priority), w.job)).collect();
        prop_assert!(order.is_sorted());
        carry_out(&mut s, &first, Time(0));
        prop_assert_eq!(crate::lint::lint(&s), Vec::<String>::new());
        let again = plan(&s, &mut memo, Time(0));
        prop_assert!(again.decisions.is_empty(), "planning on the result decides nothing");
        prop_assert_eq!(&again.waiting, &first.waiting);
        prop_assert_eq!(&again.constraints, &first.constraints);
    }

    #[test]
    fn a_verdict_is_exact(nodes in arb_nodes(), jobs in arb_jobs()) {
        let mut s = build(&nodes, &jobs);
        let first = plan(&s, &mut Memo::default(), Time(0));
        carry_out(&mut s, &first, Time(0));
        let now = plan(&s, &mut Memo::default(), Time(0));
        for w in &now.waiting {
            let Constraint::Capacity { needs_nodes, gpus_per_node, nodes_with_room, .. } = &now.constraints[w.constraint]
            else { continue };
            let missing = needs_nodes - nodes_with_room;
            // The type that was named is the one that comes nearest.
            let kind = ["H100", "H200"].into_iter().max_by_key(|k| {
                s.nodes.values().filter(|n| n.gpu_type == *k && n.free().count() >= *gpus_per_node).count()
            }).unwrap();
            for (added, starts) in [(missing, true), (missing - 1, false)] {
                let mut more = s.clone();
                more.jobs.retain(|id, j| *id == w.job || j.phase != Phase::Queued);
                more.waiting.retain(|id| *id == w.job);
                for i in 0..added {
                    let mut n = node(100 + i, kind, 8);
                    n.unhealthy = n.gpus.without(n.gpus.lowest(*gpus_per_node).unwrap());
                    more.nodes.insert(n.id, n);
                }
                let answer = plan(&more, &mut Memo::default(), Time(0));
                prop_assert_eq!(answer.decisions.len() == 1, starts, "{} nodes added", added);
            }
        }
    }
}
