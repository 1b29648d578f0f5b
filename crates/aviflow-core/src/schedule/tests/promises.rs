//! What is promised is kept: nodes from an instant on, and guarantees.

use super::histories::config;
use super::spec::{gang, job};
use super::world::World;
use crate::time::{Span, Time};
use proptest::prelude::*;

/// Jobs by nodes, GPUs on each, minutes that they run, minutes that their limit is longer, minutes until the next.
fn arb_jobs() -> impl Strategy<Value = Vec<(u32, u32, i64, i64, i64)>> {
    let size = prop_oneof![(Just(1u32), 1u32..=8), (1u32..=6, Just(8u32))];
    let job = (size, 1i64..300, 0i64..300, 0i64..60);
    prop::collection::vec(job.prop_map(|((nodes, gpus), runs, longer, next)| (nodes, gpus, runs, longer, next)), 2..30)
}

proptest! {
    #![proptest_config(config(300))]

    /// Jobs that come later fill gaps and delay no promise, neither as they are placed nor as they end.
    #[test]
    fn no_promise_is_delayed_by_who_came_later(nodes in 2u32..=6, reservations in 1u32..=3, jobs in arb_jobs()) {
        let mut w = World::new();
        w.nodes(nodes);
        w.s.policy.reservations = reservations;
        w.s.policy.preemption = false;
        for (n, (wide, gpus, runs, longer, next)) in jobs.iter().enumerate() {
            w.submit(gang(&format!("j{n}"), (*wide).min(nodes), *gpus).runs(*runs).limit(runs + longer));
            w.minutes(*next);
        }
        w.minutes(600 * 30);
        for n in 0..jobs.len() {
            let name = format!("j{n}");
            let started = w.started(&name);
            prop_assert!(started.is_some(), "{name} never started");
            if let Some(promised) = w.promised.get(&w.id(&name)) {
                prop_assert!(started <= Some(*promised), "{name} was promised {promised:?} and started {started:?}");
            }
        }
    }

    /// Whatever borrows is gone once its patience and its grace are over, however it is spread over the nodes.
    #[test]
    fn a_guarantee_comes_back_in_bounded_time(
        nodes in 2u32..=8,
        grace in 1i64..120,
        lent in prop::collection::vec((1u32..=4, 1u32..=8, any::<bool>(), any::<bool>()), 1..12),
        own in prop::collection::vec(1u32..=4, 1..5),
    ) {
        let mut w = World::new();
        w.nodes(nodes).queue("own", None).queue("lent", None).quota("own", "H100", nodes * 8, None);
        w.quota("lent", "H100", 0, None);
        for (n, (wide, gpus, saves, asked)) in lent.iter().enumerate() {
            let borrower = gang(&format!("b{n}"), (*wide).min(nodes), *gpus).queue("lent").grace(grace);
            let borrower = if *saves { borrower.saves_every(10) } else { borrower };
            w.submit(if *asked { borrower.saves_on_request() } else { borrower });
        }
        w.minutes(7);
        let mut left = nodes;
        for (n, wide) in own.iter().enumerate().filter(|(_, wide)| **wide <= nodes) {
            if *wide <= left {
                left -= wide;
                w.submit(gang(&format!("a{n}"), *wide, 8).queue("own").fixed());
            }
        }
        let asked = w.now;
        // As long as a checkpoint may be waited for, then the grace; and as processes end one after the other.
        let most = w.s.policy.patience + Span::seconds(grace) + Span::seconds(10);
        w.until(asked + most);
        let all: Vec<String> = w.names.keys().filter(|n| n.starts_with('a')).cloned().collect();
        for name in all {
            let started = w.started(&name);
            prop_assert!(started.is_some_and(|at| at <= asked + most), "{name}: {:?}", w.phase(&name));
        }
    }
}

#[test]
fn a_gap_is_filled_by_who_ends_before_the_promise_and_by_nobody_else() {
    let mut w = World::new();
    w.nodes(2);
    w.s.policy.preemption = false;
    w.submit(job("long", 8).exactly(100)).submit(job("large", 16).exactly(10));
    assert_eq!(w.promised[&w.id("large")], Time(0) + Span::minutes(100));
    w.submit(job("too long", 8).exactly(101)).submit(job("fits", 8).exactly(100));
    assert_eq!((w.started("too long"), w.started("fits")), (None, Some(Time(0))));
}
