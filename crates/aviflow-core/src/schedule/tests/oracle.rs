//! Exhaustive oracles on small clusters: a gang is placed exactly if some choice of nodes holds it, and victims are
//! told exactly if some set of those that may be told makes room, at about the least price of any such set.

use super::super::memo::Memo;
use super::super::pass::Pass;
use super::super::preempt;
use super::check::{self, domain};
use super::histories::config;
use super::spec::{Spec, gang};
use super::world::World;
use crate::gpus::Slots;
use crate::lifecycle::Event;
use crate::model::{Checkpoint, Claim, Job, JobId, NODE_LEVEL, Node, NodeId, Placement, Quota, Request};
use crate::schedule::{Decision, plan};
use crate::time::{Span, Time};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// A node: its GPUs, those that are broken, whether it is of the other type, and its leaf and spine.
#[derive(Clone, Debug)]
struct Machine {
    gpus: u32,
    broken: u64,
    other: bool,
    leaf: u8,
}

fn arb_machines() -> impl Strategy<Value = Vec<Machine>> {
    let broken = prop_oneof![2 => Just(0u64), 1 => 0u64..256];
    let node = (prop_oneof![4 => Just(8u32), 1 => 1u32..8], broken, prop::bool::weighted(0.2), 0u8..4)
        .prop_map(|(gpus, broken, other, leaf)| Machine { gpus, broken, other, leaf });
    prop::collection::vec(node, 1..7)
}

fn world(machines: &[Machine], levels: usize) -> World {
    let mut w = World::new();
    w.checks = false;
    w.s.policy.reservations = 0;
    w.pool("p", &["leaf", "spine"][..levels]);
    for b in machines {
        // Leaves of the same name under different spines are different ones.
        let path = [format!("l{}", b.leaf % 2), format!("s{}", b.leaf / 2)];
        let path: Vec<&str> = path.iter().take(levels).map(String::as_str).collect();
        w.node(if b.other { "H200" } else { "H100" }, b.gpus, &path);
    }
    w
}

fn break_some(w: &mut World, machines: &[Machine]) {
    for (n, b) in (1u32..).zip(machines) {
        w.set(NodeId(n), |n| n.unhealthy = Slots(b.broken).and(n.gpus));
    }
}

fn with_types(spec: Spec, types: u8) -> Spec {
    match types {
        0 => spec.types(&["H100"]),
        1 => spec.types(&["H200", "H100"]),
        2 => spec.types(&["H100", "H200"]),
        _ => spec,
    }
}

fn with_topology(spec: Spec, topology: u8, waited: bool) -> Spec {
    let wait = if waited { 0 } else { 600 };
    match topology {
        0 => spec.require("leaf"),
        1 => spec.require("spine"),
        2 => spec.require(NODE_LEVEL),
        3 => spec.prefer("leaf", wait),
        4 => spec.require("spine").prefer("leaf", wait),
        5 => spec.prefer("spine", wait),
        _ => spec,
    }
}

/// Each choice of nodes on which the gang could be, with its size, in one domain of a level.
fn choices(w: &World, free: &BTreeMap<NodeId, Slots>, request: &Request, t: &str, level: Option<&str>) -> Vec<u32> {
    let room = |n: &&Node| n.gpu_type == t && free[&n.id].count() >= request.gpus_per_node;
    let nodes: Vec<&Node> = w.s.nodes.values().filter(room).collect();
    let in_one = |set: u32| {
        let of: BTreeSet<Option<Vec<String>>> =
            nodes.iter().zip(0..).filter(|(_, i)| set >> i & 1 == 1).map(|(n, _)| domain(&w.s, n, level)).collect();
        of.len() == 1 && !of.contains(&None)
    };
    let sizes = request.nodes.min..=request.nodes.max;
    let sets = (1u32..1 << nodes.len()).filter(|set| sizes.contains(&set.count_ones()) && in_one(*set));
    sets.map(u32::count_ones).collect()
}

/// The levels of the pool from the smallest on, then none.
fn levels(w: &World) -> Vec<Option<String>> {
    let of_pool = w.s.pools["p"].levels.iter().cloned();
    std::iter::once(NODE_LEVEL.to_owned()).chain(of_pool).map(Some).chain([None]).collect()
}

/// The smaller of what is required and, as long as the job insists, preferred; none if the pool has not what is required.
fn level_for(w: &World, job: &Job) -> Option<Option<String>> {
    let all = levels(w);
    let at = |name: &String| all.iter().position(|l| l.as_ref() == Some(name));
    let topology = &job.request.topology;
    let required = match &topology.require {
        Some(name) => at(name)?,
        None => all.len() - 1,
    };
    let insists = topology.max_wait.is_some_and(|wait| w.now < job.submitted + wait);
    let preferred = topology.prefer.as_ref().filter(|_| insists).and_then(at);
    Some(all[preferred.map_or(required, |p| p.min(required))].clone())
}

/// What a job of a sequence gets: the type, how many nodes, and the smallest level of which one domain holds as many.
fn expected(w: &World, free: &BTreeMap<NodeId, Slots>, job: &Job) -> Option<(String, u32, Option<String>)> {
    let level = level_for(w, job)?;
    let types = match job.request.gpu_types.as_slice() {
        [] => vec!["H100".to_owned(), "H200".to_owned()],
        some => some.to_vec(),
    };
    types.into_iter().find_map(|t| {
        let of = |level: &Option<String>| choices(w, free, &job.request, &t, level.as_deref());
        let most = of(&level).into_iter().max()?;
        let smallest = levels(w).into_iter().find(|l| of(l).contains(&most))?;
        Some((t, most, smallest))
    })
}

type Wish = (u32, u32, u32, u8, u8, bool);

fn arb_wish() -> impl Strategy<Value = Wish> {
    (1u32..5, 0u32..3, prop_oneof![1 => Just(8u32), 2 => 1u32..8], 0u8..5, 0u8..9, any::<bool>())
}

proptest! {
    #![proptest_config(config(1500))]

    /// A sequence of gangs, each of which gets what is left by those before it.
    #[test]
    fn a_gang_is_placed_exactly_if_a_place_exists(
        machines in arb_machines(),
        depth in 1usize..=2,
        wishes in prop::collection::vec(arb_wish(), 1..7),
    ) {
        let mut w = world(&machines, depth);
        break_some(&mut w, &machines);
        for (i, (nodes, more, gpus, types, topology, waited)) in wishes.into_iter().enumerate() {
            let spec = gang(&format!("j{i}"), nodes, gpus).up_to(nodes + more);
            w.add(with_topology(with_types(spec, types), topology, waited));
        }
        let made = plan(&w.s, &mut Memo::default(), w.now);
        check::decisions(&w.s, &made, w.now);
        let mut free: BTreeMap<NodeId, Slots> = w.s.nodes.values().map(|n| (n.id, n.free())).collect();
        for job in w.s.jobs.values() {
            let got = made.decisions.iter().find_map(|d| match d {
                Decision::Start { job: j, placement } if *j == job.id => Some(placement),
                _ => None,
            });
            let expected = expected(&w, &free, job);
            let in_words = got.map(|Placement(all)| {
                let on: Vec<&Node> = all.iter().map(|(n, _)| &w.s.nodes[n]).collect();
                let one = |l: &Option<String>| {
                    on.iter().all(|n| domain(&w.s, n, l.as_deref()) == domain(&w.s, on[0], l.as_deref()))
                };
                (on[0].gpu_type.clone(), u32::try_from(on.len()).unwrap(), levels(&w).into_iter().find(one).unwrap())
            });
            prop_assert_eq!(in_words, expected, "{} of {:?} on {:?}", job.key.name, made.decisions, free);
            for (node, slots) in got.iter().flat_map(|p| &p.0) {
                free.insert(*node, free[node].without(*slots));
            }
        }
    }
}

/// A gang that holds GPUs, and what makes it dear.
#[derive(Clone, Debug)]
struct Holds {
    nodes: u32,
    gpus: u32,
    at: usize,
    queue: usize,
    priority: i32,
    ran: i64,
    saved: Option<i64>,
    on_request: bool,
    startup: Option<i64>,
    preempted: u32,
    fixed: bool,
    leaves: bool,
}

/// A cluster that others hold, and a gang that wants some of it.
#[derive(Clone, Debug)]
struct Case {
    machines: Vec<Machine>,
    holders: Vec<Holds>,
    /// Guarantee and limit of each queue in units of 4 GPUs, and whether it lends; none where nothing is managed.
    quotas: Option<Vec<(u32, Option<u32>, bool)>>,
    wish: Wish,
    queue: usize,
    priority: i32,
}

const QUEUES: [&str; 4] = ["a", "b", "c", "d"];

/// Most are of one queue, so that there is somebody to tell.
fn arb_queue() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(1usize), 1 => 0usize..4]
}

/// A few large gangs on nodes of all kinds, or many small ones on whole nodes, so that the sets become many.
fn arb_case(many: bool) -> impl Strategy<Value = Case> {
    let (holders, largest, least_run) = if many { (16..28, 3u32, 5i64) } else { (4..11, 8, 0) };
    let whole = (3usize..7).prop_flat_map(|n| {
        let node = (0u8..4).prop_map(|leaf| Machine { gpus: 8, broken: 0, other: false, leaf });
        prop::collection::vec(node, n)
    });
    let machines = if many { whole.boxed() } else { arb_machines().boxed() };
    let nodes = if many { 1u32..3 } else { 1..4 };
    let shape = (nodes, 1..=largest, 0usize..6, arb_queue(), 0i32..3, least_run..120);
    let price = (
        prop::option::of(0i64..60),
        prop::bool::weighted(0.2),
        prop::option::of(1i64..900),
        prop_oneof![2 => Just(0u32), 1 => 1u32..4],
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.07),
    );
    let holder = (shape, price).prop_map(
        |((nodes, gpus, at, queue, priority, ran), (saved, on_request, startup, preempted, fixed, leaves))| Holds {
            nodes,
            gpus,
            at,
            queue,
            priority,
            ran,
            saved,
            on_request,
            startup,
            preempted,
            fixed,
            leaves,
        },
    );
    let quota = (0u32..7, prop::option::weighted(0.3, 1u32..10), prop::bool::weighted(0.85));
    let wish = (1u32..5, Just(0u32), prop_oneof![1 => Just(8u32), 1 => 3u32..8], 0u8..12, 0u8..12, Just(true));
    (
        machines,
        prop::collection::vec(holder, holders),
        prop::option::weighted(0.4, prop::collection::vec(quota, 4)),
        wish,
        arb_queue(),
        if many { 2i32..4 } else { 1..4 },
    )
        .prop_map(|(machines, holders, quotas, wish, queue, priority)| Case {
            machines,
            holders,
            quotas,
            wish,
            queue,
            priority,
        })
}

/// The world of a case just before the plan, and the job that wants something.
fn stage(case: &Case) -> (World, JobId) {
    let mut w = world(&case.machines, 2);
    let managed = case.quotas.as_ref();
    for (i, name) in QUEUES.into_iter().enumerate() {
        // Two below another, where there are quotas at all.
        w.queue(name, (managed.is_some() && (1..3).contains(&i)).then_some("a"));
        if let Some((guarantee, limit, lend)) = managed.map(|q| q[i]) {
            let quota = Quota { guarantee: guarantee * 4, limit: limit.map(|l| l * 4), weight: 1 };
            w.with_queue(name, |q| {
                q.quotas.insert("H100".into(), quota);
                q.lend = lend;
            });
        }
    }
    let mut holders: Vec<(usize, &Holds)> = case.holders.iter().enumerate().collect();
    holders.sort_by_key(|(i, h)| (-h.ran, *i));
    let end = Time(0) + Span::minutes(200);
    for (i, h) in holders {
        w.now = end - Span::minutes(h.ran);
        let fitting = |n: &&Node| n.free().count() >= h.gpus;
        let start = u32::try_from(h.at % case.machines.len()).unwrap() + 1;
        let around = w.s.nodes.range(NodeId(start)..).chain(w.s.nodes.range(..NodeId(start))).map(|(_, n)| n);
        let Some(first) = around.clone().find(fitting) else { continue };
        let like = around.filter(|n| n.gpu_type == first.gpu_type).filter(fitting);
        let on: Vec<(u32, Slots)> =
            like.take(h.nodes as usize).map(|n| (n.id.0, n.free().lowest(h.gpus).unwrap())).collect();
        let mut spec = gang(&format!("h{i}"), on.len().try_into().unwrap(), h.gpus).queue(QUEUES[h.queue]);
        spec = spec.priority(h.priority).grace(60);
        if h.fixed {
            spec = spec.fixed();
        }
        let id = w.put(spec, &on);
        let job = w.s.jobs.get_mut(&id).unwrap();
        (job.saves_on_request, job.preempted, job.startup) = (h.on_request, h.preempted, h.startup.map(Span::seconds));
        let at = h.saved.map(|ago| end - Span::minutes(ago.min(h.ran)));
        job.checkpoint = at.map(|at| Checkpoint { step: 1, path: "c".into(), at, attempt: 1 });
    }
    w.now = end;
    break_some(&mut w, &case.machines);
    for (i, _) in case.holders.iter().enumerate().filter(|(_, h)| h.leaves) {
        if let Some(id) = w.names.get(&format!("h{i}")).copied() {
            w.advance(id, &Event::Suspend { by: "ann".into(), hold: true, turned_out: None });
        }
    }
    let (nodes, _, gpus, types, topology, _) = case.wish;
    let spec = gang("asks", nodes, gpus).queue(QUEUES[case.queue]).priority(case.priority);
    let spec = with_types(spec, types.min(3));
    let id = w.add(if topology < 3 { with_topology(spec, topology, true) } else { spec });
    (w, id)
}

/// The search for the least price on one type, over all sets of those that may be told to leave.
struct Search {
    /// Who may be told, and the price of each.
    who: Vec<(JobId, u64)>,
    /// Free GPUs of each node, and what each of them would give there: a byte a node.
    free: u64,
    gives: Vec<u64>,
    /// The nodes of each domain that would do.
    domains: Vec<u8>,
    nodes: u32,
    gpus: u32,
}

impl Search {
    fn new(w: &World, job: &Job, t: &str, price: &BTreeMap<JobId, u64>) -> Search {
        let nodes: Vec<&Node> = w.s.nodes.values().filter(|n| n.gpu_type == t).collect();
        let packed = |of: &dyn Fn(&Node) -> Slots| {
            nodes.iter().zip(0..).map(|(n, i)| u64::from(of(n).and(n.usable()).count()) << (8 * i)).sum::<u64>()
        };
        let on = |job: &Job, node: &Node| {
            let workers = job.phase.gang().into_iter().flat_map(|g| &g.workers).filter(|w| w.node == node.id);
            workers.fold(Slots::NONE, |all, w| all.or(w.slots))
        };
        let leaving: Vec<&Job> = w.s.jobs.values().filter(|j| j.phase.name() == "Suspending").collect();
        let mut domains: BTreeMap<Vec<String>, u8> = BTreeMap::new();
        for (n, i) in nodes.iter().zip(0..) {
            if let Some(domain) = domain(&w.s, n, job.request.topology.require.as_deref()) {
                *domains.entry(domain).or_default() |= 1 << i;
            }
        }
        let who: Vec<JobId> = check::may_leave(&w.s, job, t, w.now).into_iter().collect();
        Search {
            free: packed(&|n| leaving.iter().fold(n.free(), |free, j| free.or(on(j, n)))),
            gives: who.iter().map(|id| packed(&|n| on(&w.s.jobs[id], n))).collect(),
            who: who.into_iter().map(|id| (id, price[&id])).collect(),
            domains: domains.into_values().collect(),
            nodes: job.request.nodes.min,
            gpus: job.request.gpus_per_node,
        }
    }

    fn fits(&self, free: u64) -> bool {
        let room = (0..8).filter(|i| free >> (8 * i) & 0xff >= u64::from(self.gpus)).fold(0u8, |all, i| all | 1 << i);
        self.domains.iter().any(|d| (d & room).count_ones() >= self.nodes)
    }

    fn of(&self, set: u32) -> BTreeSet<JobId> {
        self.who.iter().zip(0..).filter(|(_, i)| set >> i & 1 == 1).map(|((id, _), _)| *id).collect()
    }

    /// The least price of a set that makes room, and that set.
    fn cheapest(&self, quota: &dyn Fn(&BTreeSet<JobId>) -> bool) -> Option<(u64, u32)> {
        let sets = 1usize << self.who.len();
        let (mut price, mut free) = (vec![0u64; sets], vec![self.free; sets]);
        let mut best: Option<(u64, u32)> = None;
        for set in 0..sets {
            if set > 0 {
                let (rest, one) = (set & (set - 1), set.trailing_zeros() as usize);
                (price[set], free[set]) = (price[rest] + self.who[one].1, free[rest] + self.gives[one]);
            }
            let set = u32::try_from(set).unwrap();
            let cheaper = best.is_none_or(|(p, _)| price[set as usize] < p);
            if cheaper && self.fits(free[set as usize]) && quota(&self.of(set)) {
                best = Some((price[set as usize], set));
            }
        }
        best
    }
}

/// Of more candidates than this the sets are too many for a test.
const MOST: usize = 15;

/// How the price of the victims compares with the least, in thousandths, and among how many they were.
type Ratio = (usize, u64);

/// Plans a case and compares; none where nobody had to leave, or nobody could.
fn compare(case: &Case) -> Option<Ratio> {
    let (w, id) = stage(case);
    let job = &w.s.jobs[&id];
    let mut memo = Memo::default();
    memo.refresh(&w.s);
    let pass = Pass::new(&w.s, &memo, w.now);
    let price: BTreeMap<JobId, u64> = w.s.jobs.values().map(|j| (j.id, preempt::price(&pass, j))).collect();
    let made = plan(&w.s, &mut Memo::default(), w.now);
    check::decisions(&w.s, &made, w.now);
    let told = made.decisions.iter().find_map(|d| match d {
        Decision::Claim { claim, .. } => Some(claim),
        _ => None,
    });
    if made.decisions.iter().any(|d| matches!(d, Decision::Start { .. })) {
        assert!(told.is_none(), "it starts, and others leave");
        return None;
    }
    // Types that it likes equally well are one choice.
    let groups: Vec<Vec<String>> = match job.request.gpu_types.as_slice() {
        [] => vec![vec!["H100".into(), "H200".into()]],
        some => some.iter().map(|t| vec![t.clone()]).collect(),
    };
    let beyond_node = job.request.topology.require.as_deref() == Some(NODE_LEVEL) && job.request.nodes.min > 1;
    let among = |t: &String| check::may_leave(&w.s, job, t, w.now).len();
    if groups.iter().flatten().any(|t| among(t) > MOST) {
        return None;
    }
    // The least price on each type, the set, and among how many.
    let on = |t: &String| {
        let search = Search::new(&w, job, t, &price);
        let quota = |gone: &BTreeSet<JobId>| check::quota_holds_after(&w.s, job, t, gone, w.now);
        let (price, set) = search.cheapest(&quota).filter(|_| !beyond_node)?;
        Some((price, set, search.who.len()))
    };
    let found: Vec<Vec<(u64, u32, usize)>> = groups.iter().map(|types| types.iter().filter_map(on).collect()).collect();
    if found.iter().flatten().any(|(_, set, _)| *set == 0) {
        assert!(told.is_none(), "enough is given back already, and {told:?}");
        return None;
    }
    let Some((least, _, among)) = found.into_iter().find_map(|of_group| of_group.into_iter().min()) else {
        assert!(told.is_none(), "nobody's leaving would make room, and {told:?}");
        return None;
    };
    let Some(Claim { victims, placement, .. }) = told else { panic!("{least} would do, and {made:?}") };
    let gone = victims.iter().map(|v| v.0).collect();
    let t = &w.s.nodes[&placement.0[0].0].gpu_type;
    assert!(check::quota_holds_after(&w.s, job, t, &gone, w.now), "quota does not allow it after {victims:?}");
    let paid: u64 = victims.iter().map(|(v, _)| price[v]).sum();
    assert!(paid >= least, "the oracle missed a set: {victims:?}");
    Some((among, paid.saturating_mul(1000) / least))
}

/// Compares so many cases; tells how many had victims, how many of those at the least price, and the worst ratio.
fn measure(cases: u32, strategy: impl Strategy<Value = Case>) -> (usize, usize, u64) {
    let ratios: RefCell<Vec<Ratio>> = RefCell::default();
    let ran = TestRunner::new(config(cases)).run(&strategy, |case| {
        ratios.borrow_mut().extend(compare(&case));
        Ok(())
    });
    match ran {
        Err(TestError::Fail(why, case)) => panic!("{why}: {case:?}"),
        Err(TestError::Abort(why)) => panic!("{why}"),
        Ok(()) => {}
    }
    let ratios = ratios.into_inner();
    assert!(ratios.len() > 20, "too few cases in which anybody had to leave");
    let least = ratios.iter().filter(|(_, ratio)| *ratio == 1000).count();
    (ratios.len(), least, ratios.iter().map(|(_, ratio)| *ratio).max().unwrap_or(0))
}

/// Up to ten candidates every set is looked at, here and there.
#[test]
fn a_few_victims_are_the_cheapest() {
    let (cases, least, worst) = measure(1500, arb_case(false));
    assert_eq!((least, worst), (cases, 1000));
}

/// The most that the victims cost, in thousandths of the least price, where there are too many to try every set. Of
/// 22,502 cases with victims 22,450 had the least price, of 4,503 among more than ten candidates 4,451; the worst was
/// 1,738. `PROPTEST_CASES=64000` looks at as many again.
const FACTOR: u64 = 2000;

#[test]
fn of_many_victims_the_price_is_near_the_least() {
    let (cases, least, worst) = measure(400, arb_case(true));
    assert!(worst <= FACTOR, "{worst}");
    assert!(least * 100 >= cases * 97, "{least} of {cases} at the least price");
}
