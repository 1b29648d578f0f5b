//! Quota: charged as long as processes live, and lent only where it is.

use super::{charged, cluster, fill, report, see};
use crate::lifecycle::{Event, WorkerEvent};
use crate::model::NodeId;
use crate::schedule::tests::check;
use crate::schedule::tests::histories::{History, apply, arb_history, arb_ops, build, config};
use crate::schedule::tests::spec::{Spec, gang, job};
use crate::schedule::tests::world::World;
use crate::schedule::{Constraint, QuotaUse, queues};
use crate::time::Span;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// How a gang is brought to its end, when, and how long its last process takes then.
type End = (&'static str, fn(Spec) -> Spec, fn(&mut World), i64, i64);

#[test]
fn quota_is_charged_until_the_last_process_is_gone_and_not_longer() {
    let ends: [End; 7] = [
        ("never becomes ready", |s| s.starts_in(3600), |_| {}, 600, 2),
        (
            "is cancelled",
            |s| s,
            |w| {
                w.cancel("j");
            },
            60,
            120,
        ),
        (
            "is suspended by a person",
            |s| s,
            |w| {
                w.event("j", &hold());
            },
            60,
            120,
        ),
        (
            "makes room for a higher priority",
            |s| s,
            |w| {
                w.seconds(540);
            },
            60,
            120,
        ),
        ("reaches its time limit", |s| s.limit(10), |_| {}, 600, 120),
        (
            "fails",
            |s| s,
            |w| {
                w.exit("j", 0, 1);
            },
            60,
            2,
        ),
        (
            "asks to be queued again",
            |s| s,
            |w| {
                w.exit("j", 0, 75);
            },
            30,
            2,
        ),
    ];
    for (what, of, end, at, takes) in ends {
        for nodes in 2..=4 {
            let mut w = cluster(nodes, &[("q", 8 * nodes)]);
            let higher = i32::from(what.contains("priority"));
            w.submit(of(gang("j", nodes, 8).queue("q").grace(120)));
            w.submit(gang("next", nodes, 8).queue("q").priority(higher)).seconds(at);
            end(&mut w);
            let begun = w.now;
            assert!(matches!(w.phase("j"), "Stopping" | "Suspending"), "{what}: {}", w.phase("j"));
            let attempt = w.job("j").attempts;
            for worker in 0..nodes - 1 {
                let event =
                    WorkerEvent::Gone { ranks: BTreeMap::new(), reason: None, last_step: None, next_port: None };
                w.event("j", &Event::Worker { attempt, epoch: 0, worker, event });
            }
            w.until(begun + Span::seconds(takes) - Span(1));
            assert_eq!((charged(&w, "q"), w.phase("next")), (8 * nodes, "Queued"), "{what}: one still lives");
            w.until(begun + Span::seconds(takes));
            assert_eq!(w.started("next"), Some(w.now), "{what}, {nodes} nodes");
            assert_eq!(charged(&w, "q"), 8 * nodes, "{what}: of the next one alone");
        }
    }
}

fn hold() -> Event {
    Event::Suspend { by: "ann".into(), hold: true, turned_out: None }
}

#[test]
fn a_worker_on_a_node_that_is_silent_is_charged_until_it_is_written_off_or_heard_of() {
    for (nodes, dies) in [(2, true), (2, false), (3, true), (3, false)] {
        for begun in [true, false] {
            let mut w = cluster(nodes, &[("q", 8 * nodes)]);
            w.submit(gang("j", nodes, 8).queue("q").grace(30)).submit(gang("next", nodes - 1, 8).queue("q")).settle();
            let stop = |w: &mut World| {
                w.event("j", &hold());
            };
            // The stop is ordered before the node falls silent, or behind.
            if begun {
                stop(&mut w);
            }
            w.silence(NodeId(1));
            if !begun {
                stop(&mut w);
            }
            w.minutes(8 * 60);
            see(&mut w, "j leaves, next waits");
            assert_eq!(charged(&w, "q"), 8 * nodes);
            if dies {
                w.kill(NodeId(1))
            } else {
                w.revive(NodeId(1))
            };
            see(&mut w, "j waits, next runs");
            assert_eq!(charged(&w, "q"), 8 * (nodes - 1));
        }
    }
}

#[test]
fn a_queue_that_was_deleted_or_shrunk_lends_no_more_than_it_has() {
    let world = || {
        let mut w = cluster(3, &[("l", 24), ("b", 0)]);
        fill(&mut w, 3, 8, |s| s.queue("b"));
        assert_eq!((report(&w, "l").lent, report(&w, "b").headroom), (24, 0));
        w
    };
    for guarantee in [0, 8, 16] {
        let mut w = world();
        w.quota("l", "H100", guarantee, None).turn();
        assert_eq!((report(&w, "l").lent, report(&w, "l").headroom), (guarantee, 0));
        assert_eq!(w.all_evictions(None), 0);
        w.submit(job("more", 24).queue("l")).minutes(60);
        see(&mut w, "more waits");
        assert_eq!(w.all_evictions(None), 0, "it has no right to more than its guarantee");
    }
    let mut w = world();
    w.submit(job("own", 8).queue("l")).minutes(1);
    see(&mut w, "own runs");
    w.s.queues.remove("l");
    w.submit(job("late", 8).queue("l")).minutes(60);
    // What runs goes on and has no guarantee; what waits says why.
    see(&mut w, "own runs, late waits");
    assert_eq!(w.why("late"), Constraint::QueueGone { queue: "l".into() });
    assert_eq!(report(&w, "l"), QuotaUse { weight: 1, used: 8, ..QuotaUse::default() });
    w.quota("b", "H100", 24, None).turn().minutes(60);
    assert_eq!((w.evictions("own"), charged(&w, "b"), charged(&w, "l")), (1, 24, 0), "a borrower like any other");
}

#[test]
fn what_a_deleted_queue_kept_for_itself_is_free() {
    for gone in [true, false] {
        let mut w = cluster(3, &[("l", 16), ("b", 0)]);
        w.with_queue("l", |q| q.lend = false).submit(job("b1", 16).queue("b"));
        assert!(matches!(w.why("b1"), Constraint::Kept { kept: 16, .. }), "{:?}", w.why("b1"));
        if gone {
            w.s.queues.remove("l");
        } else {
            w.quota("l", "H100", 8, None);
        }
        w.turn();
        see(&mut w, "b1 runs");
    }
}

proptest! {
    #![proptest_config(config(100))]

    /// Whatever was done to queues, jobs and nodes: the reports are those of the jobs and nodes that there are.
    #[test]
    fn a_report_of_quota_adds_up(History(c, ops) in arb_history(arb_ops())) {
        let mut w = build(&c);
        w.checks = false;
        for (n, op) in ops.iter().enumerate() {
            apply(&mut w, &c, n, op);
            let (t, now) = ("H100", w.now);
            let capacity = check::capacity(&w.s, t, now);
            let mut used = check::in_use(&w.s, |_| true);
            for job in w.s.jobs.values() {
                let Some(claim) = &job.claim else { continue };
                for q in check::path(&w.s, &job.request.queue) {
                    let key = (q, w.s.nodes[&claim.placement.0[0].0].gpu_type.clone());
                    *used.entry(key).or_default() += claim.placement.gpus().count();
                }
            }
            let used = |q: &str| used.get(&(q.to_owned(), t.to_owned())).copied().unwrap_or(0);
            let reports = queues(&w.s, now);
            let of = |q: &str| reports[q].quotas.get(t).copied().unwrap_or_default();
            let roots: Vec<&String> =
                reports.keys().filter(|q| w.s.queues.get(*q).is_none_or(|q| q.parent.is_none())).collect();
            let all: u32 = roots.iter().map(|q| used(q)).sum();
            prop_assert!(roots.iter().map(|q| of(q).effective).sum::<u32>() <= capacity);
            for name in reports.keys().filter(|q| reports[*q].quotas.contains_key(t)) {
                let r = of(name);
                prop_assert_eq!((r.used, r.effective), (used(name), check::guarantee(&w.s, name, t, now)), "{}", name);
                prop_assert!(r.lent <= r.effective.saturating_sub(r.used), "{} lends {:?}", name, r);
                prop_assert!(r.lent <= all - r.used, "{} lends more than others have: {:?}", name, r);
                prop_assert!(r.headroom <= capacity.saturating_sub(all), "{}: {:?}", name, r);
                prop_assert!(r.limit.is_none_or(|l| r.headroom <= l.saturating_sub(r.used)), "{}: {:?}", name, r);
                let there = w.s.queues.contains_key(name);
                prop_assert!(there || (r.guarantee, r.effective, r.lent, r.limit) == (0, 0, 0, None), "{}", name);
            }
        }
    }
}

/// To stop it would take as long as to let it end.
#[test]
fn who_ends_within_his_grace_is_not_interrupted() {
    for (at, ends) in [(540, false), (590, true)] {
        let mut w = cluster(1, &[("a", 8), ("b", 0)]);
        w.submit(job("b1", 8).queue("b").exactly(10).grace(30)).seconds(at);
        w.submit(job("a1", 8).queue("a"));
        assert_eq!((w.evictions("b1"), w.phase("b1")), (1, if ends { "Running" } else { "Suspending" }), "at {at} s");
        w.minutes(2);
        see(&mut w, if ends { "a1 runs, b1 succeeded" } else { "a1 runs, b1 waits" });
    }
    // It was expected to end, and does not: its grace is all that it gets.
    let mut w = cluster(1, &[("a", 8), ("b", 0)]);
    (0..20).for_each(|_| w.s.history.ran(8, Span::seconds(20), None));
    w.submit(job("b1", 8).queue("b").grace(30)).seconds(10);
    w.submit(job("a1", 8).queue("a")).seconds(29);
    assert_eq!(w.phase("b1"), "Running");
    w.seconds(2);
    assert_eq!(w.phase("b1"), "Suspending");
}
