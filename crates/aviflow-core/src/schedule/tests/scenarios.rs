//! Behaviours that users of such systems found wrong elsewhere, each as its whole kind: queues, quota and
//! preemption here, the rest in the modules below. Every turn is checked by [`super::check`] too.

mod gangs;
mod lives;
mod quotas;
mod shared;

use super::histories::config;
use super::spec::{Spec, gang, job};
use super::world::World;
use crate::explain;
use crate::gpus::Slots;
use crate::model::{Ending, EvictionCause, JobId, NODE_LEVEL, NodeId, Placement, QueueState};
use crate::schedule::{Constraint, Decision, QuotaUse, queues};
use crate::time::{Span, Time};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// So many nodes of eight GPUs, and queues with their guarantees.
fn cluster(nodes: u32, guarantees: &[(&str, u32)]) -> World {
    let mut w = World::new();
    w.nodes(nodes);
    for (queue, guarantee) in guarantees {
        w.queue(queue, None).quota(queue, "H100", *guarantee, None);
    }
    w
}

/// What is to be seen of the jobs once all that is due has happened: `A1 runs, B1 waits`.
fn see(w: &mut World, expected: &str) {
    w.settle();
    for clause in expected.split(", ") {
        let (name, does) = clause.split_once(' ').unwrap();
        let phase = match does {
            "runs" => "Running",
            "starts" => "Starting",
            "waits" => "Queued",
            "leaves" => "Suspending",
            "stops" => "Stopping",
            "succeeded" => "Succeeded",
            "failed" => "Failed",
            other => panic!("nobody {other}"),
        };
        assert_eq!(w.phase(name), phase, "{clause} at {:?}: {:?}", w.now, w.plan);
    }
}

/// Submits jobs `b0`, `b1`, … of so many GPUs each until so many nodes are full, and tells their names.
fn fill(w: &mut World, nodes: u32, each: u32, of: impl Fn(Spec) -> Spec) -> Vec<String> {
    let names: Vec<String> = (0..nodes * 8 / each).map(|i| format!("b{i}")).collect();
    for name in &names {
        w.submit(of(job(name, each)));
        see(w, &format!("{name} runs"));
    }
    names
}

fn report(w: &World, queue: &str) -> QuotaUse {
    queues(&w.s, w.now)[queue].quotas["H100"]
}

/// GPUs that are charged to a queue and held, beside those that are only promised.
fn charged(w: &World, queue: &str) -> u32 {
    let claims = w.s.jobs.values().filter(|j| j.request.queue == queue).filter_map(|j| j.claim.as_ref());
    report(w, queue).used - claims.map(|c| c.placement.gpus().count()).sum::<u32>()
}

/// Requests that the empty pool of [`leaves`] could not hold.
fn too_large(nodes: u32) -> Vec<Spec> {
    let mut all = vec![
        gang("never", nodes + 1, 8),
        gang("never", nodes + 3, 1),
        gang("never", 1, 9),
        gang("never", 1, 8).types(&["H200"]),
        gang("never", 2, 4).require(NODE_LEVEL),
    ];
    if nodes > 1 {
        all.push(gang("never", nodes, 8).require("leaf"));
    }
    all
}

/// The nodes of [`cluster`], under two leaves by turns.
fn leaves(nodes: u32, guarantees: &[(&str, u32)]) -> World {
    let mut w = cluster(0, guarantees);
    w.pool("p", &["leaf"]);
    for n in 0..nodes {
        w.node("H100", 8, &[if n % 2 == 0 { "l0" } else { "l1" }]);
    }
    w
}

#[test]
fn what_can_never_fit_takes_from_nobody_and_stops_nobody() {
    for nodes in 1..=4 {
        for each in [8 * nodes, 8, 4] {
            for (never, first) in too_large(nodes).into_iter().flat_map(|s| [(s.clone(), true), (s, false)]) {
                let mut w = leaves(nodes, &[("a", 8 * nodes), ("b", 0)]);
                let borrowers = fill(&mut w, nodes, each, |s| s.queue("b"));
                let never = never.queue("a").priority(9);
                let mut both = [never, gang("fits", nodes, 8).queue("a")];
                both.rotate_left(usize::from(!first));
                for spec in both {
                    w.submit(spec);
                }
                w.minutes(600);
                see(&mut w, "fits runs, never waits");
                let why = w.why("never");
                assert!(matches!(why, Constraint::Never { .. }), "{why:?}");
                assert!(explain::constraint(&why, w.now).starts_with("can never start"));
                assert_eq!((w.claim("never"), w.evictions("fits")), (None, 0));
                for b in &borrowers {
                    see(&mut w, &format!("{b} waits"));
                    assert_eq!(w.evictions(b), 1, "{b} of {borrowers:?} on {nodes} nodes");
                }
            }
        }
    }
}

#[test]
fn what_quota_never_allows_takes_from_nobody_and_stops_nobody() {
    // Beyond the limit, and not preemptible beyond the guarantee.
    for (limit, fixed) in [(Some(16), false), (None, true)] {
        for each in [24, 8, 4] {
            let mut w = cluster(3, &[("a", 0), ("b", 0)]);
            w.quota("a", "H100", 16, limit);
            let borrowers = fill(&mut w, 3, each, |s| s.queue("b"));
            let never = gang("never", 3, 8).queue("a").priority(9);
            w.submit(if fixed { never.fixed() } else { never }).submit(job("fits", 16).queue("a")).minutes(600);
            see(&mut w, "fits runs, never waits");
            assert_eq!(w.claim("never"), None);
            let left: usize = borrowers.iter().map(|b| w.evictions(b)).sum();
            assert_eq!(left, 16usize.div_ceil(each as usize), "as many as are needed, once each");
        }
    }
}

#[test]
fn what_a_blocked_head_cannot_use_yet_is_lent_and_comes_back() {
    for (nodes, first) in [(2, 1), (3, 1), (3, 2), (4, 3)] {
        for each in [8, 4, 1] {
            for (reservations, known) in [(0, false), (0, true), (1, false), (1, true), (2, true)] {
                let mut w = cluster(nodes, &[("g", 8 * nodes), ("be", 0)]);
                w.s.policy.reservations = reservations;
                let g1 = job("g1", 8 * first).queue("g");
                w.submit(if known { g1.exactly(60) } else { g1.runs(60) });
                w.submit(job("g2", 8 * nodes).queue("g").exactly(30));
                see(&mut w, "g1 runs, g2 waits");
                let borrowers = fill(&mut w, nodes - first, each, |s| s.queue("be"));
                w.minutes(59);
                assert_eq!(w.all_evictions(None), 0, "nobody leaves while it would help nobody");
                w.minutes(2);
                see(&mut w, "g1 succeeded, g2 runs");
                // The borrowers are told as the first ends, and need five seconds.
                assert_eq!(w.started("g2"), Some(Time(0) + Span::minutes(60) + Span::seconds(5)));
                assert_eq!(w.all_evictions(Some(EvictionCause::Reclaim)), borrowers.len());
                for b in &borrowers {
                    see(&mut w, &format!("{b} waits"));
                    assert_eq!(w.evictions(b), 1);
                }
                w.minutes(35);
                see(&mut w, "g2 succeeded");
                borrowers.iter().for_each(|b| see(&mut w, &format!("{b} runs")));
            }
        }
    }
}

/// What is done before the head comes.
type Before = fn(&mut World);

#[test]
fn a_head_that_is_kept_by_anything_but_gpus_stops_nobody() {
    let head = || job("head", 16).queue("a").priority(9);
    let worlds: [(&str, Before, Spec); 4] = [
        ("its environment", |_| {}, head().environment("h")),
        (
            "a job before it",
            |w| {
                w.submit(job("other", 1).queue("b"));
            },
            head().after("other", Ending::Succeeded),
        ),
        (
            "its limit",
            |w| {
                w.quota("a", "H100", 0, Some(8));
            },
            head(),
        ),
        (
            "its queue",
            |w| {
                w.with_queue("a", |q| q.state = QueueState::Held);
            },
            head(),
        ),
    ];
    for (what, before, head) in worlds {
        let mut w = cluster(3, &[("a", 16), ("b", 0)]);
        before(&mut w);
        w.submit(head).submit(job("behind", 8).queue("b"));
        see(&mut w, "head waits, behind runs");
        assert!(w.plan.reservations.is_empty(), "{what} has no end that is known");
    }
}

/// Nodes of three types; of one of them some are in use for ever.
#[test]
fn a_job_that_waits_for_one_type_stops_nobody_who_wants_another() {
    const TYPES: [&str; 3] = ["H100", "H200", "B200"];
    for (t, blocked) in TYPES.into_iter().enumerate() {
        for (busy, gpus) in [(1, 8), (2, 8), (3, 8), (1, 4), (3, 1)] {
            for (queue, reservations) in [("a", 0), ("a", 1), ("b", 1)] {
                let mut w = cluster(0, &[]);
                w.queue("a", None).queue("b", None);
                w.s.policy.reservations = reservations;
                for t in TYPES.iter().cycle().take(9) {
                    w.node(t, 8, &[]);
                }
                w.submit(gang("holds", busy, 8).queue("a").types(&[blocked]).fixed());
                w.submit(gang("head", 3, gpus).queue("a").priority(100).types(&[blocked]));
                let others: Vec<&str> = (1..3).map(|i| TYPES[(t + i) % 3]).collect();
                for other in &others {
                    w.submit(gang(other, 3, 8).queue(queue).types(&[other]));
                }
                see(&mut w, &format!("head waits, {} runs, {} runs", others[0], others[1]));
                let why = w.why("head");
                let Constraint::Capacity { needs_nodes, nodes_with_room, gpu_types, .. } = &why else {
                    panic!("{why:?}")
                };
                assert_eq!(
                    (gpu_types.as_slice(), needs_nodes - nodes_with_room),
                    ([blocked.to_owned()].as_slice(), busy)
                );
                let said = explain::constraint(&why, w.now);
                assert!(said.contains(blocked) && others.iter().all(|o| !said.contains(o)), "{said}");
            }
        }
    }
}

#[test]
fn a_limit_of_one_type_is_none_of_another() {
    for (full, open) in [("H100", "H200"), ("H200", "H100")] {
        let mut w = World::new();
        w.queue("q", None).quota("q", full, 0, Some(8)).quota("q", open, 0, None);
        for t in [full, open, full, open] {
            w.node(t, 8, &[]);
        }
        w.submit(job("first", 8).queue("q").types(&[full]))
            .submit(job("head", 8).queue("q").types(&[full]).priority(9));
        w.submit(gang("other", 2, 8).queue("q").types(&[open]));
        see(&mut w, "first runs, head waits, other runs");
        let why = w.why("head");
        assert!(matches!(&why, Constraint::QueueLimit { gpu_type, .. } if gpu_type == full), "{why:?}");
        // Who would take either type takes the one that is left.
        w.cancel("other").submit(gang("either", 1, 8).queue("q").types(&[full, open])).minutes(1);
        see(&mut w, "head waits, either runs");
    }
}

/// No job starts on what was promised to another meanwhile.
fn nobody_took_what_was_promised(w: &World) {
    let mut promised: BTreeMap<JobId, Placement> = BTreeMap::new();
    for (at, decision) in &w.log {
        match decision {
            Decision::Claim { job, claim } => {
                promised.insert(*job, claim.placement.clone());
            }
            Decision::Unclaim { job, .. } => {
                promised.remove(job);
            }
            Decision::Start { job, placement } => {
                promised.remove(job);
                for (other, theirs) in &promised {
                    let of_both = |(n, slots): &(NodeId, Slots)| !theirs.gpus().on(*n).and(*slots).is_empty();
                    assert!(!placement.0.iter().any(of_both), "{job:?} takes what is {other:?}'s, at {at:?}");
                }
            }
            _ => {}
        }
    }
}

#[test]
fn a_borrower_that_left_does_not_come_back_before_whom_it_left_for() {
    // The borrower of a third queue, and a job that itself has more than its queue's guarantee.
    for (large, small) in [(40, 8), (40, 16), (32, 8), (24, 8)] {
        for large_first in [true, false] {
            let mut w = cluster(6, &[("a", 24), ("b", 24), ("be", 0)]);
            let mut both = [job("a1", large).queue("a"), job("be1", 8).queue("be")];
            both.rotate_left(usize::from(!large_first));
            for spec in both {
                w.submit(spec);
            }
            see(&mut w, "a1 runs, be1 runs");
            w.submit(job("a2", small).queue("a").priority(9)).minutes(24 * 60);
            see(&mut w, "a2 runs, be1 runs");
            assert_eq!((w.evictions("a2"), w.evictions("be1")), (0, 0), "it was not in its way");
            assert!(w.evictions("a1") <= 1, "{large} and {small}");
            w.submit(job("b1", 24).queue("b")).minutes(24 * 60);
            see(&mut w, "a2 runs, b1 runs");
            assert!(w.evictions("be1") <= 1 && w.evictions("a1") <= 1, "{:?}", w.log);
            nobody_took_what_was_promised(&w);
        }
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// The borrowers leave one after the other; whoever comes meanwhile gets nothing of what they give.
    #[test]
    fn freed_gpus_belong_to_whom_they_were_freed_for(
        nodes in 2u32..6,
        whole in 1u32..6,
        each in prop_oneof![Just(8u32), Just(4), Just(2)],
        graces in prop::collection::vec(0i64..120, 1..24),
        later in prop::collection::vec((0i64..30, 1u32..=8, 0i32..9, 0i64..300), 0..6),
    ) {
        let whole = whole.min(nodes);
        let mut w = cluster(nodes, &[("a", 8 * nodes), ("be", 0)]);
        let mut grace = graces.iter().cycle();
        let names: Vec<String> = (0..nodes * 8 / each).map(|i| format!("b{i}")).collect();
        for name in &names {
            w.submit(job(name, each).queue("be").grace(*grace.next().unwrap()));
        }
        w.settle().submit(gang("owner", whole, 8).queue("a"));
        let (promised, victims) = w.claim("owner").unwrap();
        prop_assert_eq!(u32::try_from(victims.len()).unwrap(), whole * 8 / each, "as many as are needed");
        for (i, (pause, gpus, priority, limit)) in later.iter().enumerate() {
            let intruder = job(&format!("later{i}"), *gpus).queue("be").priority(*priority);
            w.submit(if *limit == 0 { intruder } else { intruder.limit(*limit) }).seconds(*pause);
        }
        w.minutes(3);
        see(&mut w, "owner runs");
        let place: Vec<u32> = promised.0.iter().map(|(n, _)| n.0).collect();
        prop_assert_eq!(w.place("owner").iter().map(|p| p.0).collect::<Vec<_>>(), place);
        w.minutes(24 * 60);
        see(&mut w, "owner runs");
        nobody_took_what_was_promised(&w);
        prop_assert_eq!(w.evictions("owner"), 0);
        for name in &names {
            // Those of higher priority may take from those that stayed, by their own right, each once.
            let of_owner = usize::from(victims.contains(&w.id(name)));
            prop_assert!(w.evictions(name) <= of_owner + later.len(), "{} is sent to and fro", name);
        }
    }
}

proptest! {
    #![proptest_config(config(120))]

    #[test]
    fn fragmentation_is_seen_before_admission(
        free in prop::collection::vec(0u32..8, 2..6),
        nodes in 1u32..4,
        gpus in 2u32..=8,
    ) {
        let count = u32::try_from(free.iter().filter(|f| **f >= gpus).count()).unwrap();
        let sum: u32 = free.iter().sum();
        // Enough in all, and too few on too many nodes.
        prop_assume!(count < nodes && sum >= nodes * gpus && nodes as usize <= free.len());
        let mut w = cluster(free.len().try_into().unwrap(), &[("q", 8 * 8)]);
        w.s.policy.reservations = 0;
        for (n, free) in (1u32..).zip(&free) {
            w.put(gang(&format!("f{n}"), 1, 8 - free).queue("q").fixed(), &[(n, Slots::first(8 - free))]);
        }
        let before = report(&w, "q").used;
        w.submit(gang("x", nodes, gpus).queue("q").priority(9));
        let Constraint::Capacity { nodes_with_room, free_gpus, most_free_on_a_node, .. } = w.why("x") else {
            panic!("{:?}", w.plan)
        };
        prop_assert_eq!((nodes_with_room, free_gpus), (count, sum));
        prop_assert_eq!(most_free_on_a_node, *free.iter().max().unwrap());
        prop_assert_eq!(report(&w, "q").used, before, "who waits is charged nothing");
        w.submit(job("y", 1).queue("q"));
        see(&mut w, "x waits, y runs");
        prop_assert_eq!(report(&w, "q").used, before + 1);
    }
}

#[test]
fn fragmentation_is_said_in_words() {
    let mut w = cluster(2, &[("q", 16)]);
    for n in [1, 2] {
        w.put(job(&format!("f{n}"), 4).queue("q"), &[(n, Slots::first(4))]);
    }
    w.submit(job("x", 8).queue("q"));
    let said = explain::constraint(&w.why("x"), w.now);
    assert_eq!(said, "needs 1 node with 8 GPUs free; 8 free, at most 4 on one node");
    // One node is promised to it, the other is lent.
    w.submit(job("y", 1).queue("q"));
    see(&mut w, "x waits, y runs");
}
