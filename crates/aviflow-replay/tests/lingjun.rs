//! How full a tree of switches is kept with jobs that each need one leaf or one group of leaves.

use aviflow_replay::{Cluster, Figures, Limits, Policy, Scenario, Topology, generate};

/// A quarter of Lingjun's tree with its shape: three groups of unlike sizes, with leaves of at most 8 nodes of
/// which a little more than half are full.
const GROUPS: [&[u32]; 3] =
    [&[8, 8, 8, 8, 8, 8, 8, 8, 8, 7, 7, 6], &[8, 8, 8, 8, 8, 8, 8, 7, 7, 6, 2], &[8, 7, 7, 6, 6, 5, 4]];

fn scenario(seed: u64) -> Scenario {
    let mut text = "node,dsw,psw,asw\n".to_owned();
    for (group, leaves) in GROUPS.iter().enumerate() {
        for (leaf, nodes) in leaves.iter().enumerate() {
            text += &format!("n,g,p{group},s{leaf}\n").repeat(*nodes as usize);
        }
    }
    let topology = Topology::parse("tree.csv", &text).expect("a topology");
    let nodes = u32::try_from(topology.paths.len()).expect("few");
    let cluster = Cluster { topology: Some(topology), ..Cluster::new(nodes, 8) };
    let mut scenario = Scenario::new(generate::lingjun(seed, &cluster).expect("a trace"), cluster);
    scenario.seed = seed;
    scenario.estimates = 0;
    scenario
}

fn check(scenario: &Scenario, policy: Policy, least: f64) {
    let Figures { gpu_use_while_waiting, use_bound, use_of_bound, .. } = scenario.figures(policy).expect("a replay");
    let figures = [gpu_use_while_waiting, use_bound, use_of_bound].map(Option::unwrap_or_default);
    let [used, bound, ratio] = figures;
    assert!(used <= bound && bound <= 1.0 && bound > 0.9, "{policy:?}: {figures:?}");
    assert!(ratio >= least, "{policy:?}: {figures:?}");
}

#[test]
fn the_tree_is_kept_full_while_work_waits() {
    for seed in 0..2 {
        let mut scenario = scenario(seed);
        check(&scenario, Policy::Aviflow, 0.97);
        // Limits that are too long keep nodes free for nothing, the longer the fewer small jobs are left.
        scenario.limits = Limits::Over(1.0, 5.0);
        check(&scenario, Policy::Aviflow, 0.96);
    }
}

#[test]
fn the_others_respect_what_jobs_require_too() {
    let scenario = scenario(0);
    check(&scenario, Policy::Easy, 0.97);
    check(&scenario, Policy::Greedy, 0.96);
    // It would be no figure worth reaching if strict order reached it.
    let fifo = scenario.figures(Policy::Fifo).expect("a replay").use_of_bound;
    assert!(fifo.is_some_and(|ratio| ratio < 0.97), "{fifo:?}");
}
