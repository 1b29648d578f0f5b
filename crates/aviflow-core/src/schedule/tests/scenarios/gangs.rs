//! Gangs: whole or not at all, nobody leaves for nothing, and no place is overlooked.

use super::{cluster, see};
use crate::gpus::Slots;
use crate::schedule::tests::histories::config;
use crate::schedule::tests::spec::{Spec, gang, job};
use crate::schedule::tests::world::World;
use crate::schedule::{Constraint, Decision};
use crate::time::Span;
use proptest::prelude::*;

#[test]
fn gangs_that_do_not_fit_together_never_deadlock() {
    for (nodes, each, gpus) in [(1, 1, 8), (2, 2, 8), (3, 2, 8), (5, 3, 5), (5, 5, 5), (100, 100, 8), (100, 51, 8)] {
        for (gangs, starts_in, limit) in [(2, 0, true), (2, 90, false), (4, 90, true)] {
            let mut w = cluster(nodes, &[]);
            w.checks = nodes < 100;
            let names: Vec<String> = (0..gangs).map(|i| format!("g{i}")).collect();
            for name in &names {
                let spec = gang(name, each, gpus).starts_in(starts_in).runs(20);
                w.add(if limit { spec.limit(20) } else { spec });
            }
            w.turn();
            // One after the other, in their order, each whole.
            for (done, name) in names.iter().enumerate() {
                w.minutes(5);
                for (i, other) in names.iter().enumerate() {
                    let holds = w.place(other).len();
                    assert_eq!(
                        holds,
                        if other == name { each as usize } else { 0 },
                        "{other}, after {done} have ended"
                    );
                    assert!(i < done || w.job(other).claim.is_none());
                }
                w.minutes(15).seconds(starts_in);
                see(&mut w, &format!("{name} succeeded"));
            }
        }
    }
}

#[test]
fn of_gangs_that_could_each_take_what_is_lent_only_one_does() {
    for nodes in 1..=4 {
        for each in [8, 4] {
            let mut w = cluster(nodes, &[("a", 8 * nodes), ("b", 0)]);
            super::fill(&mut w, nodes, each, |s| s.queue("b").grace(60));
            w.add(gang("a1", nodes, 8).queue("a"));
            w.add(gang("a2", nodes, 8).queue("a"));
            w.turn();
            assert!(matches!(w.why("a1"), Constraint::Claimed { .. }));
            w.minutes(60);
            see(&mut w, "a1 runs, a2 waits");
            assert_eq!((w.claim("a2"), w.evictions("a1")), (None, 0));
            assert_eq!(w.all_evictions(None), (nodes * 8 / each) as usize, "each borrower once");
        }
    }
}

/// A gang on the given nodes (with so many GPUs each), and how long it runs before the higher one comes.
type Holder = (Spec, &'static [(u32, u32)]);

/// Who leaves for a gang of priority 5 on three nodes.
fn check(what: &str, holders: &[Holder], asks: Spec, expected: &[&str]) {
    let mut w = cluster(3, &[]);
    for (spec, on) in holders {
        let place: Vec<(u32, Slots)> = on.iter().map(|(n, gpus)| (*n, free_of(&w, *n, *gpus))).collect();
        w.put(spec.clone(), &place);
    }
    // Long enough for every minimum run, and with something to lose.
    w.minutes(35).submit(asks.priority(5)).settle();
    let mut told: Vec<&str> = w.names.keys().map(String::as_str).filter(|name| w.evictions(name) > 0).collect();
    told.sort_unstable();
    assert_eq!(told, expected, "{what}");
    for name in w.names.keys().filter(|n| w.evictions(n) > 0) {
        let leaves = w.phase(name) == "Suspending" || w.job(name).eviction.is_some();
        assert!(leaves, "{what}: the whole gang of {name}");
    }
    // Those that save themselves may do so once more.
    w.minutes(20);
    for name in expected {
        assert!(w.place(name).is_empty() && w.evictions(name) == 1, "{what}: nothing of {name} is left behind");
    }
    if !expected.is_empty() {
        see(&mut w, "asks runs");
    }
}

fn free_of(w: &World, node: u32, gpus: u32) -> Slots {
    w.s.nodes[&crate::model::NodeId(node)].free().lowest(gpus).unwrap()
}

#[test]
fn nobody_leaves_if_the_gang_would_still_not_fit() {
    let low = || gang("low", 1, 8);
    let three = |of: Spec| {
        let on: &[(u32, u32)] = if of.request.gpus_per_node == 1 { &[(2, 1)] } else { &[(2, 8)] };
        check("three nodes", &[(low(), &[(1, 8)]), (of, on)], gang("asks", 3, 8), &[]);
    };
    three(gang("fixed", 1, 8).fixed());
    three(gang("equal", 1, 8).priority(5));
    three(gang("higher", 1, 8).priority(6));
    three(gang("of_another", 1, 8).queue("other"));
    three(gang("small", 1, 1).fixed());
    // And leaves where it would.
    check("three nodes", &[(low(), &[(1, 8)])], gang("asks", 3, 8), &["low"]);
    let share = |gpus| (gang("low", 1, 4), gang("fixed", 1, gpus).fixed());
    let (low, fixed) = share(3);
    check(
        "shares",
        &[(low, &[(1, 4)]), (fixed, &[(1, 3)]), (gang("f2", 2, 8).fixed(), &[(2, 8), (3, 8)])],
        job("asks", 6),
        &[],
    );
    let (low, fixed) = share(2);
    check(
        "shares",
        &[(low, &[(1, 4)]), (fixed, &[(1, 2)]), (gang("f2", 2, 8).fixed(), &[(2, 8), (3, 8)])],
        job("asks", 6),
        &["low"],
    );
}

#[test]
fn the_whole_gang_leaves_and_nobody_beside_it() {
    let all: &[(u32, u32)] = &[(1, 8), (2, 8), (3, 8)];
    for nodes in 1..=3 {
        for gpus in [1, 4, 8] {
            check("one over all", &[(gang("low", 3, 8), all)], gang("asks", nodes, gpus), &["low"]);
        }
    }
    let one = |name: &str| gang(name, 1, 8);
    check("what is free is taken first", &[(one("a"), &[(1, 8)]), (one("b"), &[(2, 8)])], job("asks", 8), &[]);
    check(
        "two on a node, none of another",
        &[(gang("a", 1, 4), &[(1, 4)]), (gang("b", 1, 4), &[(1, 4)]), (gang("c", 2, 8), &[(2, 8), (3, 8)])],
        job("asks", 8),
        &["a", "b"],
    );
    check(
        "a part that is free already counts",
        &[(gang("a", 1, 4), &[(1, 4)]), (gang("b", 1, 8), &[(2, 8)]), (gang("c", 1, 8), &[(3, 8)])],
        job("asks", 8),
        &["a"],
    );
    check(
        "one that spans both is needed, and no other",
        &[(gang("a", 2, 4), &[(1, 4), (2, 4)]), (gang("b", 1, 8), &[(3, 8)])],
        gang("asks", 2, 8),
        &["a"],
    );
}

#[test]
fn nobody_leaves_while_enough_is_given_back_of_another_type() {
    for types in [&["H200", "H100"][..], &["H100", "H200"], &[]] {
        let mut w = cluster(1, &[]);
        w.node("H200", 8, &[]);
        w.submit(job("low", 8).types(&["H100"])).submit(job("goes", 8).types(&["H200"]).grace(60)).minutes(30);
        w.cancel("goes").submit(job("asks", 8).types(types).priority(5)).seconds(59);
        see(&mut w, "low runs, goes stops, asks waits");
        w.seconds(1);
        see(&mut w, "low runs, asks runs");
        assert_eq!(w.all_evictions(None), 0);
    }
}

#[test]
fn where_the_queue_of_a_victim_keeps_what_it_gives_others_leave_too() {
    for needed in [5, 4] {
        let mut w = cluster(2, &[("a", 12), ("b", 0), ("keeps", 4)]);
        w.with_queue("keeps", |q| q.lend = false);
        w.put(job("k1", 8).queue("keeps"), &[(1, Slots::first(8))]);
        w.put(job("a1", 3).queue("a").fixed(), &[(2, Slots::first(3))]);
        w.put(job("b1", needed).queue("b"), &[(2, Slots(0xF8).lowest(needed).unwrap())]);
        // Only the first node can be empty; of its eight GPUs four are kept.
        w.submit(job("asks", 8).queue("a")).minutes(1);
        see(&mut w, "k1 waits, a1 runs, b1 waits, asks runs");
    }
}

#[test]
fn of_those_who_could_leave_the_cheapest_does() {
    let one = |name: &str| gang(name, 1, 8);
    // The others have lost 35 minutes by then, and a restart costs five.
    check(
        "saved itself lately",
        &[(one("a"), &[(1, 8)]), (one("b").saves_every(16), &[(2, 8)]), (one("c"), &[(3, 8)])],
        job("asks", 8),
        &["b"],
    );
    check(
        "the fewest GPUs",
        &[(one("a"), &[(1, 8)]), (gang("b", 1, 7), &[(2, 7)]), (one("c"), &[(3, 8)])],
        job("asks", 8),
        &["b"],
    );
    check(
        "two cheap ones before a dear one",
        &[
            (gang("a", 1, 4).saves_every(11), &[(1, 4)]),
            (gang("b", 1, 4).saves_every(11), &[(1, 4)]),
            (gang("c", 2, 8), &[(2, 8), (3, 8)]),
        ],
        job("asks", 8),
        &["a", "b"],
    );
    check(
        "one large before many that lose more",
        &[(gang("a", 2, 8).saves_every(34), &[(1, 8), (2, 8)]), (gang("b", 1, 8), &[(3, 8)])],
        gang("asks", 1, 8),
        &["a"],
    );
}

#[test]
fn who_was_preempted_before_is_spared() {
    for nodes in 2..=3 {
        let mut w = cluster(nodes, &[]);
        let names: Vec<String> = (0..nodes).map(|i| format!("low{i}")).collect();
        for name in &names {
            w.submit(job(name, 8));
        }
        // Each time the same: all began at once, and only the times before tell them apart.
        for round in 0..2 * nodes {
            w.minutes(30).submit(job(&format!("high{round}"), 8).priority(5)).seconds(30);
            let gone = w.cancel(&format!("high{round}")).seconds(30).all_evictions(None);
            assert_eq!(gone, round as usize + 1);
            for name in &names {
                let often = w.evictions(name);
                assert!(often <= round as usize / nodes as usize + 1, "{name} was sent away {often} times");
            }
            // Again on equal terms.
            for name in &names {
                w.event(name, &crate::lifecycle::Event::Suspend { by: "ann".into(), hold: false, turned_out: None });
            }
            w.minutes(10);
        }
    }
}

/// How a set of shares is handed in.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for shorter in orders(n - 1) {
        for at in 0..n {
            let mut longer = shorter.clone();
            longer.insert(at, n - 1);
            all.push(longer);
        }
    }
    all
}

/// Nodes with so many free GPUs, and jobs handed in in each order, at once and one by one: all run.
fn all_are_placed(free: &[u32], jobs: &[u32]) {
    for order in orders(jobs.len()) {
        for at_once in [true, false] {
            let mut w = cluster(free.len().try_into().unwrap(), &[]);
            w.s.policy.reservations = 0;
            for (n, free) in (1u32..).zip(free).filter(|(_, free)| **free < 8) {
                w.put(gang(&format!("f{n}"), 1, 8 - free), &[(n, Slots::first(8 - free))]);
            }
            for i in &order {
                w.add(job(&format!("j{i}"), jobs[*i]));
                if !at_once {
                    w.turn();
                }
            }
            w.turn().settle();
            for i in &order {
                assert_eq!(w.phase(&format!("j{i}")), "Running", "{order:?} of {jobs:?} on {free:?}, {:?}", w.plan);
            }
        }
    }
}

#[test]
fn placement_is_not_greedy_blind_in_any_order() {
    all_are_placed(&[8, 4], &[4, 8]);
    all_are_placed(&[4, 8], &[4, 8]);
    all_are_placed(&[8, 8, 4], &[16, 4]);
    all_are_placed(&[3, 8, 5], &[5, 3, 8]);
    all_are_placed(&[8, 8], &[4, 8, 4]);
    all_are_placed(&[8, 8, 8], &[2, 16, 2, 4]);
}

proptest! {
    #![proptest_config(config(40))]

    /// As many shares as there are gaps, each as large as one of them.
    #[test]
    fn what_fits_exactly_is_placed_in_any_order(free in prop::collection::vec(1u32..=8, 1..5)) {
        let mut jobs = free.clone();
        jobs.reverse();
        all_are_placed(&free, &jobs);
    }

    /// Halves, quarters and eighths leave no gap that another of them could not use.
    #[test]
    fn halves_and_quarters_are_placed_in_any_order(
        free in prop::collection::vec(0u32..4, 1..4),
        cuts in prop::collection::vec(any::<bool>(), 8),
    ) {
        let free: Vec<u32> = free.iter().map(|f| 1 << f).collect();
        let mut jobs = free.clone();
        for (i, cut) in cuts.into_iter().enumerate() {
            let at = i % jobs.len();
            if cut && jobs[at] > 1 && jobs.len() < 5 {
                jobs[at] /= 2;
                jobs.push(jobs[at]);
            }
        }
        all_are_placed(&free, &jobs);
    }
}

#[test]
fn a_gang_that_is_slow_to_leave_is_waited_for_whole() {
    for stops_in in [1, 30, 120] {
        let mut w = cluster(2, &[("a", 16), ("b", 0)]);
        w.submit(gang("low", 2, 8).queue("b").grace(stops_in)).submit(gang("own", 2, 8).queue("a"));
        w.until(w.now + Span::seconds(stops_in) - Span(1));
        see(&mut w, "low leaves, own waits");
        w.seconds(1);
        see(&mut w, "low waits, own runs");
        let starts = w.log.iter().filter(|(_, d)| matches!(d, Decision::Start { .. })).count();
        assert_eq!(starts, 2);
    }
}
