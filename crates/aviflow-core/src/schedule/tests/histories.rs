//! Random clusters and what happens on them. Every turn is checked by [`super::check`] and by the lint; here
//! is what must hold over the whole of a history.

use super::spec::{Spec, gang};
use super::world::World;
use crate::gpus::Slots;
use crate::lifecycle::{Change, Event};
use crate::model::{Drain, JobId, Node, NodeCondition, NodeId, Phase, QueueState, Quota, RollingDrain};
use crate::schedule::{Constraint, Memo, plan};
use crate::time::Span;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::fmt;

const QUEUES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// A queue: its parent if it has one, guarantee and limit in units of 4 GPUs, and what it does not do.
#[derive(Clone, Debug)]
struct Branch {
    below: Option<usize>,
    guarantee: u32,
    limit: Option<u32>,
    weight: u32,
    lend: bool,
    borrow: bool,
    reclaim: bool,
}

#[derive(Clone)]
pub(super) struct Cluster {
    /// For each node its type, its GPUs and whether the next one is below another leaf.
    nodes: Vec<(bool, u32, bool)>,
    queues: Vec<Branch>,
    reservations: u32,
    preemption: bool,
    sharing: Option<i64>,
}

#[derive(Clone, Debug)]
struct Shape {
    nodes: u32,
    more: u32,
    gpus: u32,
    types: u8,
    topology: u8,
}

#[derive(Clone)]
pub(super) struct Training {
    queue: usize,
    user: bool,
    shape: Shape,
    priority: i32,
    runs: i64,
    limit: u8,
    fixed: bool,
    saves: u8,
    grace: i64,
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    Submit(Training),
    Pass(i64),
    Cancel(usize),
    Hold(usize, bool),
    Suspend(usize),
    Update(usize, u8, i64),
    Kill(usize),
    Revive(usize),
    Silence(usize),
    Break(usize, u32),
    Cordon(usize, bool),
    Close(usize, bool),
    Others(usize, u32),
    Drain(usize, i64, i64),
    Roll(usize, u32, i64),
    Queue(usize, u8),
    Pause(bool),
}

// Short, since a failing case is to be read.
impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nodes {:?} reservations {} preemption {}", self.nodes, self.reservations, self.preemption)?;
        write!(f, " sharing {:?}", self.sharing)?;
        self.queues.iter().zip(QUEUES).try_for_each(|(b, name)| write!(f, "\n  {name}: {b:?}"))
    }
}

impl fmt::Debug for Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Training { queue, user, shape, priority, runs, limit, fixed, saves, grace } = self;
        write!(f, "queue {queue} user {user} {shape:?} priority {priority} runs {runs} limit {limit} ")?;
        write!(f, "fixed {fixed} saves {saves} grace {grace}")
    }
}

pub(super) fn arb_cluster() -> impl Strategy<Value = Cluster> {
    let branch = (
        prop::option::weighted(0.4, 0usize..3),
        0u32..7,
        prop::option::weighted(0.25, 1u32..10),
        1u32..3,
        prop::bool::weighted(0.85),
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.9),
    )
        .prop_map(|(below, guarantee, limit, weight, lend, borrow, reclaim)| Branch {
            below,
            guarantee,
            limit,
            weight,
            lend,
            borrow,
            reclaim,
        });
    (
        prop::collection::vec(
            (prop::bool::weighted(0.2), prop_oneof![4 => Just(8u32), 1 => Just(4u32)], any::<bool>()),
            1..7,
        ),
        prop::collection::vec(branch, 1..6),
        0u32..3,
        prop::bool::weighted(0.9),
        prop::option::weighted(0.2, 5i64..60),
    )
        .prop_map(|(nodes, queues, reservations, preemption, sharing)| Cluster {
            nodes,
            queues,
            reservations,
            preemption,
            sharing,
        })
}

fn arb_training() -> impl Strategy<Value = Training> {
    let shape = (
        1u32..4,
        prop_oneof![4 => Just(0u32), 1 => 1u32..3],
        prop_oneof![3 => Just(8u32), 1 => 1u32..8],
        0u8..6,
        0u8..8,
    )
        .prop_map(|(nodes, more, gpus, types, topology)| Shape { nodes, more, gpus, types, topology });
    (0usize..5, any::<bool>(), shape, 0i32..3, 1i64..200, 0u8..4, prop::bool::weighted(0.15), 0u8..4, 0i64..60)
        .prop_map(|(queue, user, shape, priority, runs, limit, fixed, saves, grace)| Training {
            queue,
            user,
            shape,
            priority,
            runs,
            limit,
            fixed,
            saves,
            grace,
        })
}

/// What people submit, and that time passes.
pub(super) fn arb_quiet() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![3 => arb_training().prop_map(Op::Submit), 2 => (0i64..90).prop_map(Op::Pass)];
    prop::collection::vec(op, 1..20)
}

/// And everything else that may happen.
pub(super) fn arb_ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        12 => arb_training().prop_map(Op::Submit),
        8 => (0i64..90).prop_map(Op::Pass),
        1 => (0usize..20).prop_map(Op::Cancel),
        1 => (0usize..20, any::<bool>()).prop_map(|(j, on)| Op::Hold(j, on)),
        1 => (0usize..20).prop_map(Op::Suspend),
        1 => (0usize..20, 0u8..3, 0i64..5).prop_map(|(j, what, to)| Op::Update(j, what, to)),
        1 => (0usize..6).prop_map(Op::Kill),
        1 => (0usize..6).prop_map(Op::Revive),
        1 => (0usize..6).prop_map(Op::Silence),
        1 => (0usize..6, 0u32..8).prop_map(|(n, gpu)| Op::Break(n, gpu)),
        1 => (0usize..6, any::<bool>()).prop_map(|(n, on)| Op::Cordon(n, on)),
        1 => (0usize..6, any::<bool>()).prop_map(|(n, on)| Op::Close(n, on)),
        2 => (0usize..6, 0u32..9).prop_map(|(n, gpus)| Op::Others(n, gpus)),
        1 => (0usize..6, 0i64..120, 1i64..120).prop_map(|(n, from, long)| Op::Drain(n, from, long)),
        1 => (1usize..6, 1u32..3, 0i64..300).prop_map(|(n, most, by)| Op::Roll(n, most, by)),
        1 => (0usize..5, 0u8..8).prop_map(|(q, what)| Op::Queue(q, what)),
        1 => any::<bool>().prop_map(Op::Pause),
    ];
    prop::collection::vec(op, 1..30)
}

#[derive(Clone)]
pub(super) struct History(pub(super) Cluster, pub(super) Vec<Op>);

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)?;
        self.1.iter().enumerate().try_for_each(|(n, op)| write!(f, "\n  {n}: {op:?}"))
    }
}

pub(super) fn arb_history(ops: impl Strategy<Value = Vec<Op>>) -> impl Strategy<Value = History> {
    (arb_cluster(), ops).prop_map(|(c, ops)| History(c, ops))
}

pub(super) fn build(c: &Cluster) -> World {
    let mut w = World::new();
    w.pool("p", &["leaf", "spine"]);
    w.s.policy.reservations = c.reservations;
    w.s.policy.preemption = c.preemption;
    let (mut leaf, mut spine) = (0, 0);
    for (i, (other, gpus, next)) in c.nodes.iter().enumerate() {
        let t = if *other { "H200" } else { "H100" };
        w.node(t, *gpus, &[&format!("l{leaf}"), &format!("s{spine}")]);
        leaf += u32::from(*next);
        spine += u32::from(*next && i % 2 == 1);
    }
    for (i, b) in c.queues.iter().enumerate() {
        let parent = b.below.filter(|p| *p < i).map(|p| QUEUES[p]);
        w.queue(QUEUES[i], parent);
        w.with_queue(QUEUES[i], |q| {
            let quota = Quota { guarantee: b.guarantee * 4, limit: b.limit.map(|l| l * 4), weight: b.weight };
            q.quotas.insert("H100".into(), quota);
            (q.lend, q.borrow, q.reclaim) = (b.lend, b.borrow, b.reclaim);
        });
    }
    if let Some(minutes) = c.sharing {
        w.shares_time(minutes);
    }
    w
}

pub(super) fn spec(c: &Cluster, n: usize, t: &Training) -> Spec {
    let queue = QUEUES[t.queue % c.queues.len()];
    let mut s = gang(&format!("j{n}"), t.shape.nodes, t.shape.gpus).queue(queue).priority(t.priority).grace(t.grace);
    s = s.up_to(t.shape.nodes + t.shape.more).user(if t.user { "ann" } else { "bob" });
    s = match t.limit {
        0 => s.runs(t.runs),
        1 => s.runs(t.runs).limit(t.runs * 2),
        _ => s.exactly(t.runs),
    };
    s = match t.saves {
        0 => s.saves_every(10),
        1 => s.saves_on_request(),
        _ => s,
    };
    s = match t.shape.types {
        0 => s.types(&["H100", "H200"]),
        1 => s.types(&["H200"]),
        2 => s,
        _ => s.types(&["H100"]),
    };
    s = match t.shape.topology {
        0 => s.require("leaf"),
        1 => s.require("spine"),
        2 => s.prefer("leaf", 30),
        3 => s.require("spine").prefer("leaf", 30),
        _ => s,
    };
    if t.fixed { s.fixed() } else { s }
}

pub(super) fn apply(w: &mut World, c: &Cluster, n: usize, op: &Op) {
    let node = |i: &usize| NodeId(u32::try_from(i % c.nodes.len()).unwrap() + 1);
    let name = |j: &usize| w.names.keys().nth(j % w.names.len().max(1)).cloned();
    match op {
        Op::Submit(t) => {
            w.submit(spec(c, n, t));
        }
        Op::Pass(minutes) => {
            w.minutes(*minutes);
        }
        Op::Cancel(j) => {
            name(j).map(|j| w.cancel(&j));
        }
        Op::Hold(j, true) => {
            let by = "ann".to_owned();
            if let Some(j) = name(j) {
                let waits = w.job(&j).phase == Phase::Queued;
                let suspend = Event::Suspend { by: by.clone(), hold: true, turned_out: None };
                w.event(&j, &if waits { Event::Hold { by } } else { suspend });
            }
        }
        Op::Hold(j, false) => {
            name(j).map(|j| w.event(&j, &Event::Release { by: "ann".into() }));
        }
        Op::Suspend(j) => {
            name(j).map(|j| w.event(&j, &Event::Suspend { by: "ann".into(), hold: false, turned_out: None }));
        }
        Op::Update(j, what, to) => {
            let mut change = Change::default();
            match what {
                0 => change.priority = Some(i32::try_from(*to).unwrap()),
                1 => change.time_limit = Some(Some(Span::minutes(60 * to))),
                _ => change.queue = Some(QUEUES[usize::try_from(*to).unwrap() % c.queues.len()].into()),
            }
            name(j).map(|j| w.event(&j, &Event::Update { change, by: "ann".into(), reason: None }));
        }
        Op::Kill(i) => {
            w.kill(node(i));
        }
        Op::Revive(i) => {
            w.revive(node(i));
        }
        Op::Silence(i) => {
            w.silence(node(i));
        }
        Op::Break(i, gpu) => {
            w.set(node(i), |n| n.unhealthy = Slots(1 << gpu).and(n.gpus));
            w.turn();
        }
        Op::Cordon(i, on) => {
            w.set(node(i), |n| {
                n.cordoned = *on;
                n.condition = condition(n);
            });
            w.turn();
        }
        Op::Close(i, on) => {
            // Every other node for something that needs it empty.
            let now = w.now;
            w.set(node(i), |n| {
                n.closed = on.then(|| "cordoned by kubectl".to_owned());
                n.vacate = (*on && n.id.0.is_multiple_of(2)).then_some(now);
                n.condition = condition(n);
            });
            w.turn();
        }
        Op::Others(i, gpus) => {
            w.set(node(i), |n| n.others = *gpus);
            w.turn();
        }
        Op::Drain(i, from, long) => {
            let id = node(i);
            if w.s.drains.iter().any(|d| d.taken.contains(&id)) {
                return;
            }
            let from = w.now + Span::minutes(*from);
            let drain = Drain { from, until: Some(from + Span::minutes(*long)), by: "ops".into(), reason: "r".into() };
            w.set(id, |n| {
                n.drain = Some(drain);
                if n.condition == NodeCondition::Cordoned && !n.shut() {
                    n.condition = NodeCondition::Ready;
                }
            });
            w.turn();
        }
        Op::Roll(i, max_unavailable, by) => {
            let free = |n: &NodeId| !w.s.drains.iter().any(|d| d.nodes.contains(n) || d.taken.contains(n));
            let nodes: Vec<NodeId> =
                w.s.nodes.values().filter(|n| n.drain.is_none()).map(|n| n.id).filter(free).take(*i).collect();
            if !nodes.is_empty() {
                w.s.drains.push(RollingDrain {
                    id: u64::try_from(n).unwrap(),
                    nodes,
                    taken: Vec::new(),
                    max_unavailable: *max_unavailable,
                    by: Some(w.now + Span::minutes(*by)),
                    each: Some(Span::minutes(20)),
                    ordered_by: "ops".into(),
                    reason: "r".into(),
                });
                w.turn();
            }
        }
        Op::Queue(i, what) => {
            let name = QUEUES[i % c.queues.len()];
            if what == &7 && !w.s.queues.values().any(|q| q.parent.as_deref() == Some(name)) && w.s.queues.len() > 1 {
                w.s.queues.remove(name);
            } else if let Some(queue) = w.s.queues.get_mut(name) {
                let quota = queue.quotas.get_mut("H100").unwrap();
                match what {
                    0 => queue.state = QueueState::Held,
                    1 => queue.state = QueueState::Open,
                    2 => quota.limit = Some(8),
                    3 => quota.limit = None,
                    4 => quota.guarantee = 0,
                    5 => quota.guarantee = 16,
                    _ => queue.state = QueueState::Draining,
                }
            }
            w.turn();
        }
        Op::Pause(on) => {
            w.s.paused = on.then(|| "ops".to_owned());
            w.turn();
        }
    }
}

fn condition(n: &Node) -> NodeCondition {
    match n.condition {
        NodeCondition::Gone => NodeCondition::Gone,
        NodeCondition::Ready | NodeCondition::Cordoned if n.shut() => NodeCondition::Cordoned,
        NodeCondition::Ready | NodeCondition::Cordoned => NodeCondition::Ready,
    }
}

/// The same cases in every run; more with `PROPTEST_CASES` above 256, and others with `PROPTEST_RNG_SEED`.
pub(super) fn config(cases: u32) -> ProptestConfig {
    let said = ProptestConfig::default();
    ProptestConfig {
        cases: (cases * said.cases).div_ceil(256),
        rng_seed: if said.rng_seed == RngSeed::Random { RngSeed::Fixed(1) } else { said.rng_seed },
        failure_persistence: None,
        max_shrink_iters: 4000,
        max_global_rejects: 1 << 20,
        ..ProptestConfig::default()
    }
}

/// Everything is as it was on the first day, and nobody submits any more.
pub(super) fn calm(w: &mut World, c: &Cluster) {
    w.s.paused = None;
    let fresh = build(c);
    w.s.queues = fresh.s.queues;
    w.s.drains.clear();
    for id in fresh.s.nodes.keys() {
        w.set(*id, |n| {
            n.unhealthy = Slots::NONE;
            n.drain = None;
            n.cordoned = false;
            n.closed = None;
            n.vacate = None;
            n.others = 0;
            n.condition = if n.condition == NodeCondition::Gone { n.condition } else { NodeCondition::Ready };
        });
    }
    for id in fresh.s.nodes.keys() {
        w.revive(*id);
    }
    let held: Vec<JobId> = w.s.jobs.values().filter(|j| j.held.is_some()).map(|j| j.id).collect();
    for id in held {
        w.advance(id, &Event::Release { by: "ann".into() });
    }
    w.turn();
}

/// Whether a job that goes on waiting could never run, by what the plan itself says.
fn hopeless(w: &World, id: JobId) -> bool {
    let mut alone = w.s.clone();
    alone.jobs.retain(|j, _| *j == id);
    alone.waiting.retain(|j| *j == id);
    alone.usage.clear();
    for node in alone.nodes.values_mut() {
        (node.held, node.claimed) = (Slots::NONE, Slots::NONE);
    }
    if let Some(job) = alone.jobs.get_mut(&id) {
        (job.claim, job.not_before) = (None, None);
    }
    let later = w.now + Span::minutes(60);
    let made = plan(&alone, &mut Memo::default(), later);
    let why = made.verdict(id).map(|v| v.0.clone());
    match why {
        None => false,
        Some(
            Constraint::Never { .. }
            | Constraint::QueueLimit { .. }
            | Constraint::QueueGuarantee { .. }
            | Constraint::Kept { .. }
            | Constraint::QueueGone { .. },
        ) => true,
        // Of one type there is too little, and the quota of the other is too small.
        Some(Constraint::Capacity { gpu_types, .. }) if gpu_types.len() != 1 => true,
        Some(other) => panic!("{other:?} keeps the only job there is"),
    }
}

/// Nothing more comes: everything that can run, runs, and nobody is asked to leave for ever.
fn ends(w: &mut World) {
    let before = w.all_evictions(None);
    let total: i64 = w.s.jobs.len().try_into().unwrap_or(i64::MAX);
    // Each may run 400 minutes and be moved about now and then.
    w.minutes(600 * (total + 1));
    if let Some(left) = w.s.jobs.values().find(|j| !hopeless(w, j.id)) {
        assert!(left.phase != Phase::Queued, "{} still waits: {:?}", left.key.name, w.why(&left.key.name));
        panic!("{} is still {}", left.key.name, left.phase.name());
    }
    let evictions = w.all_evictions(None) - before;
    let jobs = w.names.len();
    assert!(evictions <= jobs * (jobs + 1), "{evictions} evictions of {jobs} jobs");
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn whatever_happens_every_turn_is_right(History(c, ops) in arb_history(arb_ops())) {
        let mut w = build(&c);
        for (n, op) in ops.iter().enumerate() {
            apply(&mut w, &c, n, op);
        }
        calm(&mut w, &c);
        ends(&mut w);
    }

    #[test]
    fn without_disturbance_everything_that_can_run_runs(History(c, ops) in arb_history(arb_quiet())) {
        let mut w = build(&c);
        for (n, op) in ops.iter().enumerate() {
            apply(&mut w, &c, n, op);
        }
        ends(&mut w);
    }
}
