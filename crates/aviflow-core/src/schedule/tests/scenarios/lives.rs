//! What happens to a gang while it runs: ends, dead and silent nodes, broken GPUs, preemptions and failures.

use super::{charged, cluster, report, see};
use crate::gpus::Slots;
use crate::health::decide::FAILURES;
use crate::model::{Counters, NodeId};
use crate::schedule::tests::histories::config;
use crate::schedule::tests::spec::{gang, job};
use crate::schedule::tests::world::World;
use crate::schedule::{Constraint, Decision};
use crate::time::{Span, Time};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn finishing_is_not_failing(
        ends in prop::collection::vec(1i64..100, 1..6),
        dies in prop::option::of(0usize..6),
        retries in 0u32..2,
    ) {
        let nodes = u32::try_from(ends.len()).unwrap();
        let mut w = cluster(nodes, &[("q", 8 * nodes)]);
        w.submit(gang("j", nodes, 8).queue("q").retries(retries)).submit(gang("next", nodes, 8).queue("q")).settle();
        let mut order: Vec<(i64, u32)> = ends.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let last = Time(0) + Span::seconds(order.last().unwrap().0);
        for (i, (at, worker)) in order.iter().enumerate() {
            see(&mut w, "j runs, next waits");
            prop_assert_eq!(charged(&w, "q"), 8 * nodes, "the gang holds its GPUs until its last worker has ended");
            w.until(Time(0) + Span::seconds(*at)).exit("j", *worker, 0);
            // What happens to a node whose worker is done is none of the gang's.
            if dies == Some(i) && i + 1 < order.len() {
                let node = w.job("j").phase.gang().unwrap().workers[*worker as usize].node;
                w.kill(node).revive(node);
            }
        }
        see(&mut w, "j succeeded, next runs");
        prop_assert_eq!(w.started("next"), Some(last));
        prop_assert_eq!((w.job("j").attempts, w.job("j").counters), (1, Counters::default()));
        prop_assert_eq!(w.all_evictions(None), 0);
    }
}

/// A gang behind some spare nodes; those in the mask die. Others wait for what it leaves.
fn ranks_after(nodes: u32, spare: u32, dead: u32, gpus: u32) {
    let mut w = cluster(nodes + spare, &[]);
    let place = |w: &World| -> Vec<u32> { w.place("j").iter().map(|p| p.0).collect() };
    // In an order and on nodes that nobody would choose first.
    let on: Vec<(u32, Slots)> = (spare + 1..=spare + nodes).rev().map(|n| (n, Slots::first(gpus))).collect();
    w.put(gang("j", nodes, gpus), &on);
    let before = place(&w);
    w.submit(gang("next", nodes + spare, 8)).minutes(30);
    let dies = |rank: usize| dead >> rank & 1 == 1;
    for (_, node) in before.iter().enumerate().filter(|(rank, _)| dies(*rank)) {
        w.kill(NodeId(*node));
    }
    w.minutes(5);
    see(&mut w, "j runs, next waits");
    let after = place(&w);
    for (rank, (old, new)) in before.iter().zip(&after).enumerate() {
        if dies(rank) {
            assert!(!before.contains(new), "rank {rank} of {before:?} is on {after:?}");
        } else {
            assert_eq!(old, new, "rank {rank} of {before:?} is on {after:?}");
        }
    }
    assert_eq!((w.job("j").counters.node_failures, w.job("j").counters.failures), (1, 0));
}

#[test]
fn whoever_lost_no_node_keeps_his_rank() {
    for nodes in 1..=4 {
        for spare in 1..=3 {
            for dead in (1u32..1 << nodes).filter(|dead| dead.count_ones() <= spare) {
                for gpus in [8, 5] {
                    ranks_after(nodes, spare, dead, gpus);
                }
            }
        }
    }
}

#[test]
fn the_node_that_replaces_another_is_near_the_rest() {
    for dead in 0..3 {
        let mut w = cluster(0, &[]);
        w.pool("p", &["leaf"]);
        for leaf in ["far", "near", "near", "far", "near", "near", "far"] {
            w.node("H100", 8, &[leaf]);
        }
        w.put(gang("j", 3, 8), &[(2, Slots::first(8)), (5, Slots::first(8)), (3, Slots::first(8))]);
        w.minutes(30);
        let mut expected = w.place("j");
        w.kill(NodeId(expected[dead].0)).minutes(5);
        expected[dead].0 = 6;
        assert_eq!(w.place("j"), expected);
    }
}

/// Neither what runs there nor what waits nor what borrows elsewhere is moved.
#[test]
fn a_flapping_node_is_not_a_dead_node() {
    for nodes in 1..=3 {
        for (starts_in, away) in [(0, 1), (0, 600), (120, 5)] {
            for at in 1..=nodes {
                let mut w = cluster(nodes + 1, &[("a", 8 * nodes), ("b", 8)]);
                w.submit(gang("j", nodes, 8).queue("a").starts_in(starts_in)).seconds(starts_in + 1);
                see(&mut w, "j runs");
                let place = w.place("j");
                // One that waits would like what is silent, and one that borrows holds what is not.
                w.submit(job("b1", 8).queue("b")).submit(job("more", 8).queue("b")).submit(job("own", 8).queue("a"));
                for _ in 0..5 {
                    w.silence(NodeId(at)).seconds(away);
                    see(&mut w, "j runs, b1 runs, more waits, own waits");
                    assert_eq!((w.place("j"), charged(&w, "a")), (place.clone(), 8 * nodes));
                    w.revive(NodeId(at)).seconds(1);
                    see(&mut w, "j runs, b1 runs, more waits, own waits");
                }
                assert_eq!((w.job("j").attempts, w.job("j").counters), (1, Counters::default()));
                assert!(!w.log.iter().any(|(_, d)| !matches!(d, Decision::Start { .. })), "{:?}", w.log);
            }
        }
    }
}

#[test]
fn what_runs_on_a_silent_node_still_counts_for_the_guarantees() {
    // All that is there is guaranteed; one borrows from the fourth, who comes back while another's node is silent.
    for silent in 1..=2 {
        for gpus in [1, 4, 8] {
            let mut w = cluster(4, &[("a", 16), ("b", 8), ("c", 8), ("be", 0)]);
            w.put(gang("a1", 2, 8).queue("a").saves_every(1), &[(1, Slots::first(8)), (2, Slots::first(8))]);
            w.put(job("b1", 8).queue("b").saves_every(1), &[(3, Slots::first(8))]);
            w.put(job("be1", 8).queue("be"), &[(4, Slots::first(8))]);
            w.minutes(60).silence(NodeId(silent)).submit(job("c1", gpus).queue("c")).minutes(1);
            see(&mut w, "a1 runs, b1 runs, be1 waits, c1 runs");
            w.revive(NodeId(silent)).minutes(60);
            assert_eq!((w.evictions("a1"), w.evictions("b1"), w.evictions("be1")), (0, 0, 1));
        }
    }
}

#[test]
fn a_silent_node_takes_no_work_until_it_is_heard_again() {
    for free in [8, 4] {
        let mut w = cluster(1, &[]);
        if free < 8 {
            w.submit(job("there", 8 - free)).settle();
        }
        w.silence(NodeId(1)).submit(job("j", free)).minutes(60);
        see(&mut w, "j waits");
        w.revive(NodeId(1));
        see(&mut w, "j runs");
        assert_eq!(w.job("j").attempts, 1);
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn health_and_allocation_are_separate_books(held in 0u32..=8, broken in any::<u8>(), more in any::<u8>()) {
        let mut w = cluster(1, &[("q", 8)]);
        if held > 0 {
            w.submit(job("j", held).queue("q"));
            see(&mut w, "j runs");
        }
        for broken in [Slots(broken.into()), Slots(more.into())] {
            w.set(NodeId(1), |n| n.unhealthy = broken);
            w.turn();
            let both = Slots::first(held).or(broken);
            let free = 8 - both.count();
            prop_assert_eq!(w.s.nodes[&NodeId(1)].free().count(), free);
            prop_assert_eq!((report(&w, "q").used, report(&w, "q").headroom), (held, free));
            // What is free can be had, and not one more.
            let less = |n: u32| job(&format!("asks{n}"), n).queue("q").fixed();
            if (1..8 - held).contains(&free) {
                w.submit(less(free + 1));
                let why = w.why(&format!("asks{}", free + 1));
                let (Constraint::Capacity { free_gpus: said, .. } | Constraint::Never { capable_nodes: said, .. }) = why
                else { panic!("{why:?}") };
                prop_assert_eq!(said, if broken.count() + free + 1 > 8 { 0 } else { free });
                w.cancel(&format!("asks{}", free + 1));
            }
            if free > 0 {
                w.submit(less(free));
                see(&mut w, &format!("asks{free} runs"));
                w.cancel(&format!("asks{free}")).minutes(1);
            }
            if held > 0 {
                see(&mut w, "j runs");
                prop_assert_eq!(w.job("j").attempts, 1);
            }
        }
        if held > 0 {
            w.cancel("j").minutes(1);
        }
        prop_assert_eq!(w.s.nodes[&NodeId(1)].free().count(), 8 - more.count_ones());
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Blow {
    Preempted,
    Fails(i32),
    NodeDies,
    AsksAgain,
}

fn arb_blow() -> impl Strategy<Value = Blow> {
    prop_oneof![
        3 => Just(Blow::Preempted),
        3 => prop::sample::select(vec![1, 2, 134, 137]).prop_map(Blow::Fails),
        1 => Just(Blow::NodeDies),
        1 => Just(Blow::AsksAgain),
    ]
}

/// A job that borrows two of three nodes with so many retries, and what befalls it.
fn strike(retries: u32, blows: &[Blow]) {
    let mut w = cluster(3, &[("a", 24), ("b", 0)]);
    w.submit(gang("j", 2, 8).queue("b").retries(retries)).minutes(30);
    let submitted = w.job("j").submitted;
    let mut expected = Counters::default();
    for (i, blow) in blows.iter().enumerate() {
        see(&mut w, "j runs");
        match blow {
            Blow::Preempted => {
                let (owner, later) = (format!("owner{i}"), format!("later{i}"));
                w.submit(gang(&owner, 3, 8).queue("a").runs(20)).minutes(1);
                w.submit(gang(&later, 2, 8).queue("b"));
                see(&mut w, &format!("j waits, {owner} runs, {later} waits"));
                let place = |w: &World, name: &str| w.plan.verdict(w.id(name)).unwrap().1;
                assert!(place(&w, "j") < place(&w, &later), "its place is the one it had");
                w.cancel(&later).minutes(30);
                expected.suspensions += 1;
            }
            Blow::Fails(code) => {
                w.exit("j", u32::try_from(i % 2).unwrap(), *code).minutes(30);
                expected.failures += 1;
            }
            Blow::NodeDies => {
                let node = w.job("j").phase.gang().unwrap().workers[i % 2].node;
                w.kill(node).minutes(30).revive(node);
                expected.node_failures += 1;
            }
            Blow::AsksAgain => {
                w.exit("j", u32::try_from(i % 2).unwrap(), 75).minutes(30);
                expected.suspensions += 1;
            }
        }
        assert_eq!((w.job("j").counters, w.job("j").submitted), (expected, submitted), "after {blow:?}");
        // Without a new checkpoint in between the third is the last.
        if expected.failures > retries.min(FAILURES - 1) {
            see(&mut w, "j failed");
            return;
        }
    }
    see(&mut w, "j runs");
    assert_eq!(w.job("j").attempts as usize, 1 + blows.len());
}

#[test]
fn preemption_costs_no_retry() {
    use Blow::{Fails, Preempted};
    strike(1, &[Preempted, Preempted, Preempted, Fails(1), Fails(1)]);
    strike(0, &[Preempted, Preempted, Fails(1)]);
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn only_failures_of_its_own_cost_a_retry(retries in 0u32..4, blows in prop::collection::vec(arb_blow(), 1..8)) {
        strike(retries, &blows);
    }
}
