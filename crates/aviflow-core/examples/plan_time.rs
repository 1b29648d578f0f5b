//! How long `plan` takes, and how that grows: prints JSON lines for `cargo xtask bench`.

use aviflow_core::gpus::Slots;
use aviflow_core::lifecycle::{self, Event};
use aviflow_core::model::{
    Job, JobId, JobKey, Node, NodeId, NodeRange, Phase, Placement, Pool, Queue, Quota, Request, Snapshot, Topology,
    WorkerState,
};
use aviflow_core::schedule::{Decision, Memo, plan};
use aviflow_core::time::{Span, Time};
use std::time::Instant;

/// A small generator, so that every run sees the same pool.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn key(id: u64) -> JobKey {
    JobKey { namespace: "default".into(), name: format!("j{id}") }
}

/// A pool with so many nodes below leaves of 8 and spines of 128, so many running and waiting jobs in so many queues.
fn pool(nodes: u32, running: u64, waiting: u64, queues: u64) -> Snapshot {
    let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
    let mut s = Snapshot::default();
    let levels = vec!["leaf".to_owned(), "spine".to_owned()];
    s.pools.insert("p".into(), Pool { name: "p".into(), levels, time_sharing: None, ..Pool::default() });
    for i in 0..nodes {
        let mut node = Node::new(NodeId(i), &format!("n{i}"), "p", "H100", Slots::first(8));
        node.path = vec![format!("l{}", i / 8), format!("s{}", i / 128)];
        s.ledger.open_node(&node, Time(0));
        s.nodes.insert(node.id, node);
    }
    for q in 0..queues {
        let mut queue = Queue::open(&format!("q{q}"));
        let guarantee = u32::try_from(u64::from(nodes) * 8 / queues).unwrap_or(0);
        queue.quotas.insert("H100".into(), Quota { guarantee, limit: None, weight: 1 });
        s.queues.insert(queue.name.clone(), queue);
    }
    let mut next = 0u32;
    for id in 0..running + waiting {
        let queue = format!("q{}", rng.below(queues));
        let (n, g) = match rng.below(10) {
            0..=3 => (1, 1 + u32::try_from(rng.below(8)).unwrap_or(0)),
            4..=7 => (1 + u32::try_from(rng.below(4)).unwrap_or(0), 8),
            8 => (8, 8),
            _ => (32, 8),
        };
        let (n, g) = if id < running { (2, 8) } else { (n, g) };
        let mut request = Request { queue, nodes: NodeRange { min: n, max: n }, ..Request::of(n, g) };
        request.time_limit = Some(Span::minutes(10 + i64::try_from(rng.below(5000)).unwrap_or(0)));
        request.topology =
            Topology { require: (rng.below(4) == 0 && n <= 8).then(|| "leaf".to_owned()), ..Topology::default() };
        let user = format!("u{}", rng.below(50));
        let job = Job::submitted(JobId(id), key(id), user, request, None, Time(i64::try_from(id).unwrap_or(0)));
        s.waiting.insert(job.id);
        s.jobs.insert(job.id, job);
        if id < running && next + 1 < nodes {
            let place = vec![(NodeId(next), Slots::first(8)), (NodeId(next + 1), Slots::first(8))];
            next += 2;
            run(&mut s, JobId(id), Placement(place), Time(1000));
        }
    }
    // What the running ones do not fill is as good as held.
    for i in next..nodes.saturating_sub(nodes / 50) {
        if let Some(n) = s.nodes.get_mut(&NodeId(i)) {
            n.unhealthy = Slots::first(8);
        }
    }
    s
}

fn run(s: &mut Snapshot, id: JobId, placement: Placement, now: Time) {
    let _ = lifecycle::advance(s, id, &Event::Place { placement }, now, now);
    if let Some(job) = s.jobs.get_mut(&id)
        && let Phase::Starting(gang) = &mut job.phase
    {
        gang.up = Some(now);
        gang.workers.iter_mut().for_each(|w| w.state = WorkerState::Up);
        job.phase = Phase::Running(gang.clone());
    }
}

fn ms(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64() * 1000.0
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Carries out what is decided until nothing is, so that the pool is as the engine would leave it.
fn settle(s: &mut Snapshot, memo: &mut Memo, now: Time) -> usize {
    let mut starts = 0;
    loop {
        let decisions = plan(s, memo, now).decisions;
        if decisions.is_empty() {
            return starts;
        }
        for decision in decisions {
            match decision {
                Decision::Start { job, placement } => {
                    run(s, job, placement, now);
                    memo.touch(job);
                    starts += 1;
                }
                Decision::Claim { job, claim } => {
                    let _ = lifecycle::advance(s, job, &Event::Claim { claim }, now, now);
                    memo.touch(job);
                }
                Decision::Suspend { job, .. } => {
                    let gpus = s.jobs.get(&job).and_then(|j| j.phase.gang()).map(|g| g.gpus()).unwrap_or_default();
                    for (node, slots) in gpus.iter() {
                        if let Some(n) = s.nodes.get_mut(&node) {
                            n.held = n.held.without(slots);
                        }
                    }
                    if let Some(j) = s.jobs.get_mut(&job) {
                        j.phase = Phase::Queued;
                        s.waiting.insert(job);
                    }
                    memo.touch(job);
                }
                Decision::Evict { .. }
                | Decision::Unclaim { .. }
                | Decision::Spare { .. }
                | Decision::Window { .. }
                | Decision::Take { .. } => {}
            }
        }
    }
}

fn case(nodes: u32, running: u64, waiting: u64, queues: u64) {
    let mut s = pool(nodes, running, waiting, queues);
    let now = Time(3_600_000);
    let mut memo = Memo::default();
    let started = settle(&mut s, &mut memo, now);
    let empty = median((0..9).map(|_| ms(|| drop(plan(&s, &mut Memo::default(), now)))).collect());
    let mut memo = Memo::default();
    drop(plan(&s, &mut memo, now));
    let mut id = 10_000_000;
    let warm = median(
        (0..std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(101i64))
            .map(|i| {
                id += 1;
                let mut request = Request::of(64, 8);
                request.queue = "q0".into();
                let now = Time(now.0 + i);
                let job = Job::submitted(JobId(id), key(id), "u0".into(), request, None, now);
                s.waiting.insert(job.id);
                s.jobs.insert(job.id, job);
                memo.touch(JobId(id));
                ms(|| drop(plan(&s, &mut memo, now)))
            })
            .collect(),
    );
    println!(
        r#"{{"nodes": {nodes}, "running": {running}, "waiting": {waiting}, "queues": {queues}, "started": {started}, "empty_ms": {empty:.2}, "warm_ms": {warm:.2}}}"#
    );
}

/// How long it takes to know that a gang of 512 nodes cannot start: where it may take nobody's GPUs, and where it may
/// take those of a lower priority, and not enough of them.
fn gang() {
    let now = Time(3_600_000);
    let time = |priority: i32| {
        let mut s = pool(2_000, 1_000, 0, 1);
        // One in five may be asked to leave: 400 nodes.
        for job in s.jobs.values_mut() {
            job.request.preemptible = job.id.0 % 5 == 0;
        }
        let id = JobId(10_000_000);
        let request = Request { queue: "q0".into(), priority, ..Request::of(512, 8) };
        s.jobs.insert(id, Job::submitted(id, key(id.0), "u0".into(), request, None, now));
        s.waiting.insert(id);
        let waits = plan(&s, &mut Memo::default(), now);
        assert!(waits.decisions.is_empty() && waits.waiting.len() == 1, "it waits");
        median((0..9).map(|_| ms(|| drop(plan(&s, &mut Memo::default(), now)))).collect())
    };
    println!(r#"{{"nodes": 2000, "gang": 512, "gang_ms": {:.2}, "taking_ms": {:.2}}}"#, time(0), time(100));
}

fn main() {
    let only: Option<usize> = std::env::args().nth(1).and_then(|a| a.parse().ok());
    for (i, (nodes, running, waiting, queues)) in [
        (200, 100, 1_000, 4),
        (2_000, 100, 10_000, 8),
        (2_000, 1_000, 1_000, 8),
        (2_000, 1_000, 10_000, 1),
        (2_000, 1_000, 10_000, 8),
        (2_000, 1_000, 10_000, 64),
        (2_000, 1_000, 10_000, 512),
        (10_000, 5_000, 10_000, 8),
        (10_000, 5_000, 100_000, 8),
    ]
    .into_iter()
    .enumerate()
    {
        if only.is_none_or(|o| o == i) {
            case(nodes, running, waiting, queues);
        }
    }
    if only.is_none() {
        gang();
    }
}
