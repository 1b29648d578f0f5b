//! What a cluster that others use does to the plan: their GPUs, and nodes that they close.

use super::{cluster, see};
use crate::explain;
use crate::gpus::Slots;
use crate::ledger::GpuState;
use crate::model::{NodeCondition, NodeId};
use crate::schedule::tests::histories::config;
use crate::schedule::tests::spec::{gang, job};
use crate::schedule::tests::world::World;
use crate::schedule::{Constraint, estimate, never_fits};
use proptest::prelude::*;

fn others(w: &mut World, node: u32, gpus: u32) {
    w.set(NodeId(node), |n| n.others = gpus);
    w.turn();
}

fn close(w: &mut World, node: u32, why: Option<&str>) {
    w.set(NodeId(node), |n| {
        n.closed = why.map(str::to_owned);
        n.condition = if n.shut() { NodeCondition::Cordoned } else { NodeCondition::Ready };
    });
    w.turn();
}

fn says(w: &World, name: &str) -> String {
    explain::constraint(&w.why(name), w.now)
}

/// GPUs of a node in a state.
fn booked(w: &World, node: u32, state: GpuState) -> u32 {
    w.s.ledger.node(NodeId(node)).iter().filter(|o| o.state == state).map(|o| o.slots.count()).sum()
}

#[test]
fn what_others_use_is_named_and_what_they_give_back_is_used_at_once() {
    let mut w = cluster(2, &[]);
    others(&mut w, 1, 4);
    w.submit(gang("j", 2, 8).limit(60));
    assert_eq!(says(&w, "j"), "needs 2 nodes with 8 GPUs free; 1 node has room, 12 GPUs free, 4 used by others",);
    assert_eq!((booked(&w, 1, GpuState::Foreign), booked(&w, 1, GpuState::Free)), (4, 4));
    // Nobody knows when others leave: no promise, no estimate, and what fits beside them goes on.
    assert!(w.plan.reservations.is_empty());
    let id = w.id("j");
    let plan = w.plan.clone();
    assert_eq!(estimate(&w.s, &mut w.memo, &plan, id, w.now), None);
    w.submit(job("small", 4));
    see(&mut w, "small runs, j waits");
    assert_eq!(w.place("small"), [(1, 4)], "where others are already, so that the whole node stays whole");
    w.cancel("small").minutes(1);
    others(&mut w, 1, 0);
    see(&mut w, "j runs");
}

#[test]
fn others_never_make_a_job_impossible() {
    let mut w = cluster(2, &[("q", 16)]);
    others(&mut w, 1, 8);
    others(&mut w, 2, 8);
    w.submit(gang("j", 2, 8).queue("q"));
    let Constraint::Capacity { free_gpus, foreign_gpus, closed_nodes, .. } = w.why("j") else {
        panic!("{:?}", w.why("j"))
    };
    assert_eq!((free_gpus, foreign_gpus, closed_nodes), (0, 16, 0));
    assert_eq!(never_fits(&w.s, &w.job("j").request), None);
    for (node, free) in [(1, "j waits"), (2, "j runs")] {
        others(&mut w, node, 0);
        see(&mut w, free);
    }
}

#[test]
fn a_node_that_others_close_takes_no_new_work_and_what_runs_goes_on() {
    let mut w = cluster(2, &[]);
    w.put(job("there", 4), &[(1, Slots::first(4))]);
    close(&mut w, 1, Some("cordoned by kubectl"));
    w.submit(gang("j", 2, 4));
    see(&mut w, "there runs, j waits");
    assert_eq!(
        says(&w, "j"),
        "needs 2 nodes with 4 GPUs free; 1 node has room, 8 GPUs free, 1 node closed to new work"
    );
    assert_eq!((booked(&w, 1, GpuState::Draining), w.evictions("there")), (4, 0));
    close(&mut w, 1, None);
    see(&mut w, "there runs, j runs");
}

/// As in a drain that has begun: after the next checkpoint, or when patience is over; what may not be suspended stays.
#[test]
fn a_node_that_others_want_empty_is_left_after_a_checkpoint() {
    for wanted in [true, false] {
        let mut w = cluster(1, &[]);
        w.put(job("stays", 2).fixed(), &[(1, Slots(0x03))]);
        w.put(job("leaves", 4).saves_every(10), &[(1, Slots(0x3C))]);
        w.minutes(33);
        let now = w.now;
        w.set(NodeId(1), |n| n.vacate = Some(now));
        close(&mut w, 1, Some("a new driver"));
        assert_eq!((w.evictions("leaves"), w.evictions("stays")), (1, 0));
        see(&mut w, "leaves runs, stays runs");
        if !wanted {
            // Called off before anybody had to leave.
            w.set(NodeId(1), |n| n.vacate = None);
            close(&mut w, 1, None);
        }
        w.minutes(20);
        see(&mut w, if wanted { "leaves waits, stays runs" } else { "leaves runs, stays runs" });
    }
}

/// Whatever a victim gave up would be others' at once: nobody is turned out for that.
#[test]
fn nobody_leaves_for_gpus_that_others_would_have() {
    for (theirs, leaves) in [(3, false), (0, true)] {
        let mut w = cluster(2, &[("a", 16), ("b", 0)]);
        w.submit(job("b1", 8).queue("b")).submit(job("b2", 8).queue("b")).minutes(30);
        let node = w.place("b1")[0].0;
        others(&mut w, node, theirs);
        assert_eq!(w.s.nodes[&NodeId(node)].overrun(), theirs);
        w.submit(gang("a1", 2, 8).queue("a")).minutes(1);
        assert_eq!((w.evictions("b1"), w.evictions("b2")), (usize::from(leaves), usize::from(leaves)));
        see(&mut w, if leaves { "a1 runs, b1 waits, b2 waits" } else { "a1 waits, b1 runs, b2 runs" });
        if !leaves {
            // One node can be had, and is.
            w.submit(job("a2", 8).queue("a")).minutes(1);
            see(&mut w, "a2 runs, b1 runs, b2 waits");
        }
    }
}

#[test]
fn a_claim_is_kept_beside_others_and_given_up_where_they_were_faster() {
    for (theirs, kept) in [(2, true), (6, false)] {
        let mut w = cluster(1, &[("a", 8), ("b", 0)]);
        w.put(job("b1", 4).queue("b").saves_every(10).grace(300), &[(1, Slots(0x0F))]);
        w.minutes(33).submit(job("a1", 6).queue("a"));
        assert_eq!(w.s.nodes[&NodeId(1)].claimed.count(), 6, "four that leave and two that are free");
        others(&mut w, 1, theirs);
        let claim = w.job("a1").claim.is_some();
        assert_eq!(claim, kept, "{theirs} of 8: {:?}", w.plan);
        if kept {
            w.minutes(20);
            see(&mut w, "a1 runs, b1 waits");
        } else {
            see(&mut w, "a1 waits, b1 runs");
            assert_eq!(w.s.nodes[&NodeId(1)].claimed, Slots::NONE);
        }
    }
}

proptest! {
    #![proptest_config(config(200))]

    /// Who holds what, what is broken and what others use are three books, and the ledger has each GPU once.
    #[test]
    fn held_broken_and_others_are_separate_books(
        held in 0u32..=8, broken in any::<u8>(), theirs in prop::collection::vec(0u32..10, 1..5),
    ) {
        let mut w = cluster(1, &[]);
        if held > 0 {
            w.submit(job("j", held));
            see(&mut w, "j runs");
        }
        w.set(NodeId(1), |n| n.unhealthy = Slots(broken.into()));
        let mut before = Slots::NONE;
        for gpus in &theirs {
            others(&mut w, 1, *gpus);
            let node = &w.s.nodes[&NodeId(1)];
            let (loose, whole) = (8 - held, node.gpus.without(node.held).without(node.unhealthy).count());
            prop_assert_eq!(node.foreign.count(), loose.min(*gpus));
            prop_assert_eq!(node.free().count(), whole.saturating_sub(*gpus), "whole ones first");
            prop_assert_eq!(node.overrun(), gpus.saturating_sub(loose));
            let foreign = node.foreign.without(node.unhealthy);
            let kept = foreign.and(before).count();
            prop_assert_eq!(kept, before.count().min(foreign.count()), "those that were theirs stay it");
            before = foreign;
            for state in [GpuState::Foreign, GpuState::Free] {
                let said = if state == GpuState::Foreign { node.foreign } else { node.free() };
                prop_assert_eq!(booked(&w, 1, state), said.count());
            }
        }
        if held > 0 {
            // What they use beyond what there was is theirs at once, without another word.
            w.cancel("j").minutes(1);
            let node = &w.s.nodes[&NodeId(1)];
            let last = theirs.last().copied().unwrap_or(0);
            prop_assert_eq!(node.foreign.count(), last.min(8));
            prop_assert_eq!(booked(&w, 1, GpuState::Foreign), last.min(8));
        }
    }
}
