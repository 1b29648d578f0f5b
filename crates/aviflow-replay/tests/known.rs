//! Replays with known answers, on the real traces where they are at hand (`../shared/traces` beside
//! the project) and else on generated ones, where less is known.

use aviflow_replay::{Cluster, Figures, Format, Limits, Policy, Scenario, Trace, generate};
use std::path::PathBuf;

fn real(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces").join(name);
    path.exists().then_some(path)
}

/// Kalos on 128 whole nodes, four times as dense, and whether it is the real one.
fn kalos() -> (Scenario, bool) {
    let path = real("kalos-2023.csv");
    let mut trace = match &path {
        Some(path) => Trace::read(path, Format::Kalos, 8).expect("the trace"),
        None => generate::kalos(1),
    };
    trace.whole_nodes(8);
    trace.compress(4.0);
    (Scenario::new(trace, Cluster::new(128, 8)), path.is_some())
}

/// Mean waits in hours of jobs of 128 nodes, under 8 nodes, and all.
fn means(scenario: &Scenario, policy: Policy) -> [f64; 3] {
    let figures = scenario.figures(policy).expect("a replay");
    let Figures { wait_hours: waits, .. } = figures;
    [waits.ge128.mean, waits.lt8.mean, waits.all.mean].map(|mean| mean.expect("jobs of the class"))
}

fn near(what: &str, got: [f64; 3], expected: [f64; 3]) {
    for (got, expected) in got.iter().zip(expected) {
        assert!((got / expected - 1.0).abs() < 0.02, "{what}: {got:.2}, expected {expected}");
    }
}

#[test]
fn waits_on_kalos_are_the_known_ones() {
    let (mut scenario, real) = kalos();
    let fifo = means(&scenario, Policy::Fifo);
    let easy = means(&scenario, Policy::Easy);
    let greedy = means(&scenario, Policy::Greedy);
    if real {
        near("fifo", fifo, [123.0, 39.9, 40.8]);
        near("easy", easy, [117.0, 14.9, 30.0]);
        near("greedy", greedy, [150.0, 13.5, 31.6]);
    }
    assert!(easy[1] < fifo[1] && easy[2] < fifo[2], "backfill helps the small: {easy:?} {fifo:?}");
    assert!(greedy[0] > easy[0], "without reservations the large wait: {greedy:?} {easy:?}");

    // One draw of the limits is not another: the range over draws is what is known.
    scenario.limits = Limits::Over(1.0, 5.0);
    let mut draws = Vec::new();
    for seed in 0..12 {
        scenario.seed = seed;
        draws.push(means(&scenario, Policy::Easy));
    }
    if real {
        let within = |i: usize, low: f64, high: f64| draws.iter().all(|d| d[i] > low * 0.98 && d[i] < high * 1.02);
        assert!(within(0, 112.0, 120.0), "128 nodes: {draws:?}");
        assert!(within(1, 14.1, 18.3), "under 8 nodes: {draws:?}");
    }
    assert!(draws.iter().any(|draw| draw != &draws[0]), "seeds differ");
    scenario.seed = 0;
    assert_eq!(means(&scenario, Policy::Easy), draws[0], "equal seeds do not");
}

#[test]
fn aviflow_replays_kalos_to_its_end() {
    let (scenario, _) = kalos();
    let figures = scenario.figures(Policy::Aviflow).expect("a replay");
    assert_eq!((figures.turns, figures.preemptions), (0, 0));
    assert!(figures.gpu_use_while_waiting.is_some_and(|used| used > 0.5 && used <= 1.0), "{figures:?}");
}

#[test]
fn the_topology_of_lingjun_is_read() {
    let Some(path) = real("lingjun-2023-topology.csv") else { return };
    let topology = aviflow_replay::Topology::read(&path).expect("the topology");
    let leaves: std::collections::BTreeSet<&String> = topology.paths.iter().map(|path| &path[0]).collect();
    assert_eq!((topology.paths.len(), leaves.len(), topology.levels.len()), (847, 119, 3));
}
