//! Every verdict is exact: with the jobs in front of it gone, lifting just what it names lets the job start, or
//! shows what keeps it beside that; one GPU, node or millisecond less changes nothing.

use super::check::{domain, guarantee, segments};
use super::histories::{History, apply, arb_history, arb_ops, build, config};
use super::spec::{gang, job};
use super::world::World;
use crate::gpus::Slots;
use crate::model::{Ending, EnvironmentState, JobId, NODE_LEVEL, Node, NodeId, Queue, QueueState, Quota, Snapshot};
use crate::schedule::{Constraint, Decision, Memo, plan};
use crate::time::{Span, Time};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// What a plan has for a job.
#[derive(Clone, Debug, PartialEq)]
enum Fate {
    Starts,
    Waits(Constraint),
}

fn fate(s: &Snapshot, id: JobId, now: Time) -> Fate {
    let made = plan(s, &mut Memo::default(), now);
    match made.verdict(id) {
        Some((constraint, _)) => Fate::Waits(constraint.clone()),
        None => Fate::Starts,
    }
}

/// The snapshot without the jobs that wait beside one.
fn alone(s: &Snapshot, id: JobId) -> Snapshot {
    let mut s = s.clone();
    let others: Vec<JobId> = s.waiting.iter().copied().filter(|j| *j != id).collect();
    for other in others {
        s.jobs.remove(&other);
        s.waiting.remove(&other);
    }
    s
}

/// A node of so many GPUs beside those of a domain.
fn add_node(s: &mut Snapshot, like: &Node, gpus: u32) {
    let id = NodeId(s.nodes.keys().last().map_or(1, |n| n.0 + 1));
    let mut node = Node::new(id, &format!("n{}", id.0), &like.pool, &like.gpu_type, Slots::first(gpus));
    node.path.clone_from(&like.path);
    s.nodes.insert(id, node);
}

/// One node of each domain in which the gang could be.
fn domains(s: &Snapshot, id: JobId, level: Option<&str>) -> Vec<Node> {
    let request = &s.jobs[&id].request;
    let kinds = segments(s, request);
    let mut seen = BTreeSet::new();
    // And one that nobody has heard of, of each type.
    let of_none = |t: &String| {
        let mut node = Node::new(NodeId(0), "new", "p", t, Slots::NONE);
        node.path = s.pools.get("p").map_or(Vec::new(), |p| p.levels.iter().map(|l| format!("new-{l}")).collect());
        node
    };
    let mut found: Vec<Node> = request.gpu_types.iter().map(of_none).collect();
    for node in s.nodes.values().filter(|n| kinds.contains(&(n.pool.clone(), n.gpu_type.clone()))) {
        let Some(domain) = domain(s, node, level) else { continue };
        if seen.insert((node.pool.clone(), node.gpu_type.clone(), domain)) {
            found.push(node.clone());
        }
    }
    found
}

/// What is there, and when.
type Worlds = Vec<(Snapshot, Time)>;

/// The worlds in which what a constraint names is lifted, and those in which it is not quite; with their times.
fn lift(s: &Snapshot, id: JobId, constraint: &Constraint, now: Time) -> (Worlds, Worlds) {
    let mut all = Vec::new();
    let mut almost = Vec::new();
    let mut with = |change: &dyn Fn(&mut Snapshot)| {
        let mut other = s.clone();
        change(&mut other);
        all.push((other, now));
    };
    match constraint {
        Constraint::Paused { .. } => with(&|s| s.paused = None),
        Constraint::QueueHeld { queue } => with(&|s| s.queues.get_mut(queue).unwrap().state = QueueState::Open),
        Constraint::QueueGone { queue } => with(&|s| {
            s.queues.insert(queue.clone(), Queue::open(queue));
        }),
        Constraint::Held { .. } => with(&|s| s.jobs.get_mut(&id).unwrap().held = None),
        Constraint::After { job, .. } => with(&|s| {
            let after = &mut s.jobs.get_mut(&id).unwrap().after;
            after.iter_mut().filter(|d| d.job == *job).for_each(|d| d.met = Some(true));
        }),
        Constraint::Environment { hash } => with(&|s| {
            s.environments.insert(hash.clone(), EnvironmentState::Ready);
        }),
        Constraint::BackOff { until, .. } => {
            all.push((s.clone(), *until));
            almost.push((s.clone(), *until - Span(1)));
        }
        // Not by waiting until then: more than that may change meanwhile.
        Constraint::Preference { .. } => {
            for (more, list) in [(Span(0), &mut all), (Span(1), &mut almost)] {
                let mut other = s.clone();
                let job = other.jobs.get_mut(&id).unwrap();
                job.request.topology.max_wait = Some(now.since(job.submitted) + more);
                list.push((other, now));
            }
        }
        Constraint::QueueLimit { queue, gpu_type, used, needs, .. } => {
            for (more, list) in [(0, &mut all), (1, &mut almost)] {
                let mut other = s.clone();
                let q = other.queues.get_mut(queue).unwrap();
                // Without borrowing the guarantee is the limit.
                q.borrow = true;
                q.quotas.get_mut(gpu_type).unwrap().limit = Some(used + needs - more);
                list.push((other, now));
            }
        }
        Constraint::QueueGuarantee { .. } => with(&|s| s.jobs.get_mut(&id).unwrap().request.preemptible = true),
        Constraint::Kept { .. } => with(&|s| s.queues.values_mut().for_each(|q| q.lend = true)),
        Constraint::Capacity { needs_nodes, gpus_per_node, nodes_with_room: room, level, .. }
        | Constraint::Never { needs_nodes, gpus_per_node, capable_nodes: room, level, .. } => {
            let missing = needs_nodes - room;
            for like in domains(s, id, level.as_deref()) {
                for (less, list) in [(0, &mut all), (1, &mut almost)] {
                    let mut other = s.clone();
                    (0..missing - less).for_each(|_| add_node(&mut other, &like, *gpus_per_node));
                    list.push((other, now));
                }
            }
        }
        Constraint::Claimed { .. } | Constraint::Promised { .. } => {}
    }
    (all, almost)
}

fn kind(constraint: &Constraint) -> std::mem::Discriminant<Constraint> {
    std::mem::discriminant(constraint)
}

/// Lifts what keeps a job, one thing after the other, until it starts.
fn exact(s: &Snapshot, id: JobId, now: Time, lifted: usize) {
    let Fate::Waits(why) = fate(s, id, now) else { return };
    // By no fault of its own; that it starts in the end is checked elsewhere.
    if matches!(why, Constraint::Claimed { .. }) || matches!(why, Constraint::After { impossible: true, .. }) {
        return;
    }
    if let Constraint::Promised { job, .. } = &why {
        assert!(job.is_none(), "{why:?} and nobody waits");
        return;
    }
    assert!(lifted < 12, "{why:?} still keeps it");
    let (all, almost) = lift(s, id, &why, now);
    // By itself: with others that must leave for it, less may be enough.
    let too_little = |(less, at): &(Snapshot, Time)| {
        let mut less = less.clone();
        less.policy.preemption = false;
        fate(&less, id, *at) != Fate::Starts
    };
    let of_one_type = s.jobs[&id].request.gpu_types.len() == 1;
    for less in almost.iter().filter(|_| of_one_type) {
        assert!(too_little(less), "with a little less than {why:?}: {:?}", fate(&less.0, id, less.1));
    }
    // The type or the domain that comes nearest is meant: one of them.
    let after: Vec<Fate> = all.iter().map(|(s, at)| fate(s, id, *at)).collect();
    let next = after.iter().position(|f| *f == Fate::Starts);
    let next = next.or_else(|| after.iter().position(|f| !matches!(f, Fate::Waits(then) if same(then, &why))));
    let Some(next) = next else { panic!("{why:?} is lifted, and then {after:?}") };
    // Where any type would do, the one that is meant is not named, and more of another may help otherwise.
    assert!(almost.is_empty() || almost.iter().any(too_little), "with a little less than {why:?} it starts");
    exact(&all[next].0, id, all[next].1, lifted + 1);
}

/// Whether two constraints name the same thing.
fn same(a: &Constraint, b: &Constraint) -> bool {
    match (a, b) {
        (
            Constraint::QueueLimit { queue: a, gpu_type: s, .. },
            Constraint::QueueLimit { queue: b, gpu_type: t, .. },
        )
        | (
            Constraint::QueueGuarantee { queue: a, gpu_type: s, .. },
            Constraint::QueueGuarantee { queue: b, gpu_type: t, .. },
        ) => (a, s) == (b, t),
        (Constraint::Kept { gpu_type: s, .. }, Constraint::Kept { gpu_type: t, .. }) => s == t,
        (Constraint::After { job: a, .. }, Constraint::After { job: b, .. }) => a == b,
        _ => kind(a) == kind(b),
    }
}

/// A job that waits for a promise to others starts with a time limit that ends before, and with none that is longer.
fn promise_is_exact(s: &Snapshot, id: JobId, now: Time) {
    let Fate::Waits(Constraint::Promised { start, .. }) = fate(s, id, now) else { return };
    let limit = start.since(now);
    for (more, fits) in [(Span(0), true), (Span(1), false)] {
        let mut other = s.clone();
        let job = other.jobs.get_mut(&id).unwrap();
        job.request.time_limit = Some(job.ran + limit + more);
        let fate = fate(&other, id, now);
        assert_eq!(fate == Fate::Starts, fits, "with {limit:?} + {more:?}: {fate:?}");
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn a_verdict_is_exact(History(c, ops) in arb_history(arb_ops())) {
        let mut w = build(&c);
        w.checks = false;
        for (n, op) in ops.iter().enumerate() {
            apply(&mut w, &c, n, op);
        }
        w.settle();
        for waiting in &w.plan.waiting {
            promise_is_exact(&w.s, waiting.job, w.now);
            // Who was promised something takes it, or what is free instead, before or behind the job.
            if w.s.jobs.values().any(|j| j.id != waiting.job && j.claim.is_some()) {
                continue;
            }
            exact(&alone(&w.s, waiting.job), waiting.job, w.now, 0);
        }
    }
}

/// One job that waits, for one reason.
fn check(w: &World, name: &str, expected: &Constraint) {
    assert_eq!(w.why(name), *expected);
    exact(&alone(&w.s, w.id(name)), w.id(name), w.now, 0);
}

#[test]
fn gates_are_named() {
    let mut w = World::new();
    w.nodes(1).queue("q", None);
    w.submit(job("first", 8).queue("q").runs(60));
    w.submit(job("after", 8).queue("q").after("first", Ending::Succeeded));
    let first = w.id("first");
    let on = Ending::Succeeded;
    check(&w, "after", &Constraint::After { job: first, name: "first".into(), on, impossible: false });
    w.submit(job("built", 8).queue("q").environment("h"));
    let hash = crate::model::EnvironmentHash("h".into());
    check(&w, "built", &Constraint::Environment { hash });
    w.with_queue("q", |q| q.state = QueueState::Held).submit(job("held", 8).queue("q"));
    check(&w, "held", &Constraint::QueueHeld { queue: "q".into() });
    w.s.paused = Some("ops".into());
    w.turn();
    check(&w, "held", &Constraint::Paused { by: "ops".into() });
}

#[test]
fn a_child_that_is_held_by_the_parent_s_limit_names_the_parent() {
    let mut w = World::new();
    w.nodes(4).queue("top", None).quota("top", "H100", 0, Some(16)).queue("a", Some("top")).queue("b", Some("top"));
    w.submit(job("one", 16).queue("a"));
    w.submit(job("two", 8).queue("b"));
    let limit = Constraint::QueueLimit { queue: "top".into(), gpu_type: "H100".into(), limit: 16, used: 16, needs: 8 };
    check(&w, "two", &limit);
}

#[test]
fn the_best_domain_is_named() {
    let mut w = World::new();
    w.pool("p", &["leaf"]);
    for leaf in ["a", "a", "a", "b", "b"] {
        w.node("H100", 8, &[leaf]);
    }
    w.submit(gang("b", 2, 8).require("leaf")).submit(job("a", 8)).submit(gang("two", 3, 8).require("leaf"));
    let Constraint::Capacity { needs_nodes, nodes_with_room, level, .. } = w.why("two") else { panic!("{:?}", w.plan) };
    assert_eq!((needs_nodes, nodes_with_room, level.as_deref()), (3, 3 - 1, Some("leaf")));
    w.submit(gang("never", 2, 8).require(NODE_LEVEL));
    assert!(matches!(w.why("never"), Constraint::Never { capable_nodes: 1, .. }), "{:?}", w.why("never"));
}

#[test]
fn what_is_kept_is_not_lent() {
    let mut w = World::new();
    w.nodes(3).queue("a", None).queue("b", None);
    w.quota("a", "H100", 16, None).quota("b", "H100", 0, None).with_queue("a", |q| q.lend = false);
    w.submit(job("one", 8).queue("b")).submit(job("two", 8).queue("b"));
    check(&w, "two", &Constraint::Kept { gpu_type: "H100".into(), free: 16, kept: 16, needs: 8 });
    assert_eq!(guarantee(&w.s, "a", "H100", w.now), 16);
    let quota = Quota { guarantee: 16, limit: None, weight: 1 };
    assert_eq!(w.s.queues["a"].quotas["H100"], quota);
}

#[test]
fn a_claim_names_who_leaves() {
    let mut w = World::new();
    w.nodes(1).queue("a", None).queue("b", None).quota("a", "H100", 8, None);
    w.submit(job("b1", 8).queue("b").grace(60)).submit(job("a1", 8).queue("a"));
    let Constraint::Claimed { victims, .. } = w.why("a1") else { panic!("{:?}", w.plan) };
    assert_eq!(victims, [w.id("b1")]);
    w.seconds(60);
    assert_eq!((w.phase("a1"), w.phase("b1")), ("Running", "Queued"));
    assert!(w.log.iter().any(|(_, d)| matches!(d, Decision::Claim { .. })));
}
