//! Scripts of facts in virtual time.

use super::*;
use aviflow_core::health::{Kind, hang};
use aviflow_core::time::Span;
use std::collections::BTreeMap;
use std::time::Instant;

const JOB: JobId = JobId(1);

/// A watch, what it has said, and when.
struct World {
    watcher: Watcher,
    now: Time,
    said: Vec<(Time, Said)>,
}

fn share(node: u32) -> Share {
    Share { node: NodeId(node), slots: Slots::first(8), whole: true }
}

fn run(nodes: &[u32]) -> Run {
    Run {
        attempt: 1,
        epoch: 1,
        workers: nodes.iter().map(|node| share(*node)).collect(),
        per_worker: 8,
        since: Time(0),
        tells_steps: true,
        resumed: None,
    }
}

fn step(rank: u32, step: u64) -> Fact {
    Fact::Step { rank, step, total: None, loss: None, own_micros: None }
}

impl World {
    /// A gang of two nodes that has made 400 steps of a second.
    fn new() -> World {
        let mut w = World::idle(Settings::all());
        w.watcher.runs(JOB, run(&[0, 1]), w.now);
        w.steps(1..=400);
        assert_eq!(w.said, [], "healthy");
        w
    }

    fn idle(settings: Settings) -> World {
        World { watcher: Watcher::new(settings, true), now: Time(0), said: Vec::new() }
    }

    fn notice(&mut self, notice: Notice) {
        self.late(notice, 0);
    }

    /// What happened some milliseconds ago.
    fn late(&mut self, notice: Notice, ago: i64) {
        let said = self.watcher.notice(notice, self.now - Span(ago), self.now);
        self.said.extend(said.into_iter().map(|said| (self.now, said)));
    }

    fn fact(&mut self, fact: Fact) {
        self.notice(Notice::Fact { job: JOB, attempt: 1, epoch: None, fact });
    }

    fn sign(&mut self, job: JobId, worker: u32, sign: Sign) {
        self.notice(Notice::Sign { key: StreamKey { job, attempt: 1, worker }, epoch: 1, sign });
    }

    fn steps(&mut self, steps: impl IntoIterator<Item = u64>) {
        for n in steps {
            self.pass(1000);
            (0..16).for_each(|rank| self.fact(step(rank, n)));
        }
    }

    fn pass(&mut self, ms: i64) {
        let until = self.now + Span(ms);
        let mut asked = 0;
        while let Some(at) = self.watcher.next_deadline().filter(|at| *at <= until) {
            asked += 1;
            assert!(asked < 100, "it is asked again and again at {at:?}");
            self.now = at;
            let said = self.watcher.tick(at);
            self.said.extend(said.into_iter().map(|said| (at, said)));
        }
        self.now = until;
    }

    /// What was said since an instant: seconds after it, in which epoch, and a word for it.
    fn heard(&self, since: Time) -> Vec<(i64, u32, String)> {
        let word = |said: &Said| match &said.news {
            News::TakeStacks => "stacks".to_owned(),
            News::Suspected(f) => format!("suspected {} {:?}", f.kind, f.rank),
            News::Found(f) => format!("{} {:?}", f.kind, f.rank),
            News::Over(kind) => format!("{kind} is over"),
        };
        self.said.iter().map(|(at, said)| (at.since(since).0 / 1000, said.epoch, word(said))).collect()
    }

    #[track_caller]
    fn check(&mut self, since: Time, expected: &[(i64, &str)]) {
        let heard = self.heard(since);
        let heard: Vec<(i64, &str)> = heard.iter().map(|(s, _, word)| (*s, word.as_str())).collect();
        assert_eq!(heard, expected);
        self.said.clear();
    }
}

#[test]
fn a_hang_names_the_rank_whose_stack_differs() {
    let mut w = World::new();
    let last = w.now;
    w.pass(21_000);
    w.check(last, &[(20, "stacks")]);
    (0..16).for_each(|rank| w.fact(Fact::Stack { worker: rank / 8, rank, stack: u64::from(rank == 11) }));
    w.pass(60_000);
    let News::Found(found) = &w.said[0].1.news else { panic!("{:?}", w.said) };
    assert_eq!((w.said[0].1.attempt, w.said[0].1.workers, found.node), (1, 2, Some(NodeId(1))));
    w.check(last, &[(30, "hang Some(11)")]);
    assert_eq!(w.watcher.next_deadline(), None, "it is not asked for ever");
    w.steps([401]);
    w.check(w.now, &[(0, "hang is over")]);
}

#[test]
fn what_explains_that_no_step_comes_is_waited_for() {
    let mut w = World::new();
    let last = w.now;
    // An evaluation, as its losses or its output show it.
    let values = BTreeMap::from([("val_loss".to_owned(), 2.5)]);
    let point = crate::telemetry::Point {
        at: last,
        attempt: 1,
        rank: 0,
        step: 400,
        total_steps: None,
        tokens: None,
        values,
        odd: BTreeMap::new(),
    };
    assert_eq!(of_point(&point), Fact::Active);
    w.fact(of_point(&point));
    w.pass(199_000);
    w.check(last, &[]);
    w.sign(JOB, 1, Sign::Active);
    w.pass(290_000);
    w.check(last, &[(332, "stacks")]);
    w.steps([401]);
    // A checkpoint.
    let begun = w.now;
    w.fact(Fact::CheckpointBegun);
    w.pass(300_000);
    w.check(begun, &[]);
    w.fact(Fact::CheckpointOver { complete: true });
    let over = w.now;
    w.pass(40_000);
    w.check(over, &[(20, "stacks"), (30, "hang None")]);
    // Loading and compiling, in the next epoch.
    w.watcher.runs(JOB, Run { epoch: 2, since: w.now, ..run(&[0, 1]) }, w.now);
    let started = w.now;
    w.pass(1_000_000);
    w.check(started, &[]);
    w.notice(Notice::Fact { job: JOB, attempt: 1, epoch: Some(2), fact: Fact::FirstStep { step: 401 } });
    let first = w.now;
    w.pass(700_000);
    // The hang before had no culprit, and a checkpoint has come since: but not after it.
    w.check(first, &[(400, "stacks"), (600, "hang None")]);
}

#[test]
fn losses_and_slow_ranks_are_seen_in_reports() {
    let mut w = World::new();
    let point = |step: u64, rank, values: &[(&str, f64)], odd: &[(&str, &str)]| crate::telemetry::Point {
        at: Time(0),
        attempt: 1,
        rank,
        step,
        total_steps: None,
        tokens: None,
        values: values.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
        odd: odd.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
    };
    for n in 401..410 {
        w.pass(1000);
        let point = if n < 405 { point(n, 0, &[("loss", 2.5)], &[]) } else { point(n, 0, &[], &[("loss", "NaN")]) };
        w.fact(of_point(&point));
    }
    w.check(w.now, &[(0, "loss is not a number Some(0)")]);
    for n in 512..1024 {
        w.pass(1000);
        for rank in 0..16 {
            let own = if rank == 5 { 0.9 } else { 0.6 + f64::from(rank) * 1e-4 };
            w.fact(of_point(&point(n, rank, &[("own_seconds", own)], &[])));
        }
    }
    let heard = w.heard(w.now);
    assert!(heard.iter().any(|(_, _, word)| word == "straggler Some(5)"), "{heard:?}");
    assert!(heard.iter().all(|(_, _, word)| !word.starts_with("hang")), "{heard:?}");
}

#[test]
fn gpus_that_only_wait_are_no_fault_before_a_step_is_missed() {
    let mut w = World::idle(Settings { off: [Kind::Hang].into(), ..Settings::all() });
    w.watcher.runs(JOB, run(&[0, 1]), w.now);
    // Steps of ten minutes, in which GPUs wait for data.
    for n in 1..=20 {
        w.pass(600_000);
        w.fact(step(0, n));
    }
    let last = w.now;
    (0..16).for_each(|rank| w.fact(Fact::Gpu { rank, utilization: 100, power: 15 }));
    w.pass(1_600_000);
    w.check(last, &[]);
    w.pass(6_000_000);
    assert_eq!(w.heard(last).len(), 1, "{:?}", w.heard(last));
    assert!(w.heard(last)[0].2.starts_with("full utilization"), "{:?}", w.heard(last));
}

#[test]
fn an_xid_goes_to_whoever_holds_the_gpu() {
    let half = |node, from: u32| {
        let slots = Slots(0b1111 << from);
        Run { workers: vec![Share { node: NodeId(node), slots, whole: false }], per_worker: 4, ..run(&[]) }
    };
    let two = || {
        let mut w = World::idle(Settings::all());
        w.watcher.runs(JobId(1), half(0, 0), w.now);
        w.watcher.runs(JobId(2), half(0, 4), w.now);
        w.pass(1000);
        w
    };
    let xid = |number, gpu| Sign::Xid { number, gpu, verdict: None };
    let found = |w: &World| -> Vec<(u64, Option<u32>, Option<Asks>)> {
        let of = |said: &Said| match &said.news {
            News::Found(f) => Some((said.job.0, f.gpu, f.asks)),
            News::TakeStacks | News::Suspected(_) | News::Over(_) => None,
        };
        w.said.iter().filter_map(|(_, said)| of(said)).collect()
    };
    // Both agents read the same log.
    let mut w = two();
    for job in [1, 2] {
        w.sign(JobId(job), 0, xid(79, Some(5)));
    }
    assert_eq!(found(&w), [(2, Some(5), Some(Asks::RestartNode))]);
    // What is older than the epoch is of another.
    let key = StreamKey { job: JobId(1), attempt: 1, worker: 0 };
    w.late(Notice::Sign { key, epoch: 1, sign: xid(48, Some(1)) }, 2000);
    assert_eq!(found(&w).len(), 1);
    // Where it is not known whose it is, it is shown and asks for nothing.
    let mut w = two();
    w.sign(JobId(1), 0, xid(79, None));
    w.watcher.numbered = false;
    w.sign(JobId(1), 0, xid(48, Some(2)));
    assert_eq!(found(&w), [(1, None, Some(Asks::Watch)), (1, None, Some(Asks::Watch))]);
    // All GPUs of the node are the gang's: whichever it is.
    let mut w = World::new();
    w.sign(JOB, 1, xid(48, None));
    assert_eq!(found(&w), [(1, None, Some(Asks::Cordon))]);
    // A page fault that comes again is the GPU's, and one event of many lines does not come again.
    let mut w = World::new();
    w.sign(JOB, 1, xid(31, Some(3)));
    (0..20).for_each(|_| w.sign(JOB, 1, xid(31, Some(3))));
    assert_eq!(found(&w), [(1, Some(3), Some(Asks::RestartApplication))]);
}

#[test]
fn a_port_matters_to_gangs_across_nodes() {
    let mut w = World::new();
    w.watcher.runs(JobId(2), Run { since: w.now, ..run(&[7]) }, w.now);
    let port = |downed| Sign::Port { port: "mlx5_0/1".into(), downed, symbol_errors: 0 };
    w.sign(JobId(2), 0, port(1));
    w.sign(JobId(2), 0, port(2));
    w.sign(JOB, 1, port(7));
    w.check(w.now, &[]);
    w.sign(JOB, 1, port(8));
    w.check(w.now, &[(0, "link down None")]);
    // A device that the cluster says is broken, by who holds it.
    w.notice(Notice::Broken { node: NodeId(0), slots: vec![2, 63] });
    w.notice(Notice::Broken { node: NodeId(99), slots: vec![2] });
    w.check(w.now, &[(0, "unhealthy device None")]);
}

#[test]
fn only_what_is_of_the_present_epoch_counts() {
    let mut w = World::new();
    w.watcher.stops(JOB);
    w.pass(600_000);
    w.check(w.now, &[]);
    assert_eq!((w.watcher.running(), w.watcher.next_deadline()), (0, None));
    w.steps(401..410);
    let up = w.now;
    w.watcher.runs(JOB, Run { epoch: 2, since: up, ..run(&[0, 3]) }, up);
    // A report of the epoch before arrives late; one of another attempt, too.
    w.pass(1000);
    w.late(Notice::Fact { job: JOB, attempt: 1, epoch: None, fact: step(3, 5000) }, 5000);
    w.notice(Notice::Fact { job: JOB, attempt: 2, epoch: None, fact: step(3, 5000) });
    w.notice(Notice::Fact { job: JOB, attempt: 1, epoch: Some(1), fact: Fact::Ended { rank: 0, ok: false } });
    w.steps(300..310);
    let last = w.now;
    w.pass(40_000);
    let heard = w.heard(last);
    assert_eq!(heard, [(20, 2, "stacks".to_owned()), (30, 2, "hang None".to_owned())], "steps stay known");
    // On its old node nothing concerns it any more.
    w.said.clear();
    w.notice(Notice::Broken { node: NodeId(1), slots: vec![2] });
    w.check(last, &[]);
    w.watcher.forget(JOB);
    w.fact(step(0, 1));
    assert!(w.watcher.jobs.is_empty() && w.watcher.nodes.is_empty() && w.watcher.deadlines.is_empty());
}

#[test]
fn ends_are_judged_elsewhere() {
    let mut w = World::new();
    w.fact(Fact::Ended { rank: 3, ok: false });
    w.pass(600_000);
    w.check(w.now, &[]);
    let mut w = World::new();
    w.fact(Fact::Ended { rank: 3, ok: true });
    w.pass(600_000);
    w.check(w.now, &[]);
}

#[test]
fn a_control_plane_that_begins_looks_for_a_while_first() {
    let mut w = World::idle(Settings::all());
    w.now = Time(3_600_000);
    let begun = w.now;
    w.watcher.runs(JOB, Run { resumed: Some(true), ..run(&[0, 1]) }, begun);
    w.watcher.runs(JobId(2), Run { resumed: Some(false), ..run(&[2]) }, begun);
    w.pass(600_000);
    w.check(begun, &[]);
    // Its agents come again; only then it is heard whether it makes steps.
    for worker in [0, 1] {
        w.notice(Notice::Heard { key: StreamKey { job: JOB, attempt: 1, worker }, heard: true });
    }
    let heard = w.now;
    w.pass(400_000);
    w.check(heard, &[(200, "stacks"), (300, "hang None")]);
    // One that had made none has as long as any other, from now on.
    w.notice(Notice::Heard { key: StreamKey { job: JobId(2), attempt: 1, worker: 0 }, heard: true });
    let heard = w.now;
    w.pass(2_000_000);
    w.check(heard, &[(1200, "stacks"), (1800, "hang None")]);
}

#[test]
fn who_is_not_heard_does_not_hang() {
    let mut w = World::new();
    let key = StreamKey { job: JOB, attempt: 1, worker: 1 };
    w.notice(Notice::Heard { key, heard: false });
    w.pass(600_000);
    w.check(w.now, &[]);
    w.notice(Notice::Heard { key, heard: true });
    let back = w.now;
    w.pass(40_000);
    w.check(back, &[(20, "stacks"), (30, "hang None")]);
}

#[test]
fn limits_may_be_shorter() {
    let limits = hang::Limits::within(Span::seconds(1));
    assert_eq!((limits.floor, limits.warm_up, limits.factor), (Span::seconds(1), Span::seconds(10), 3));
    assert_eq!(hang::Limits::within(Span::seconds(60)).warm_up, hang::Limits::standard().warm_up, "never longer");
    assert_eq!(hang::Limits::within(Span::seconds(30)), hang::Limits::standard());
}

/// 8,192 ranks that make a step a second need a few percent of a core. Run with `--release --ignored --nocapture`
/// for a figure that counts.
#[test]
#[ignore = "a measurement"]
fn a_large_gang_costs_little() {
    const NODES: u32 = 1024;
    let mut w = World::idle(Settings::all());
    w.watcher.runs(JOB, run(&(0..NODES).collect::<Vec<_>>()), w.now);
    let seconds = 300;
    let begun = Instant::now();
    for n in 1..=seconds {
        w.now = w.now + Span(1000);
        for rank in 0..NODES * 8 {
            let own_micros = Some(600_000 + u64::from(rank % 100));
            let loss = Some(aviflow_core::health::numbers::Reading::Micro(2_000_000));
            w.fact(Fact::Step { rank, step: n, total: None, loss, own_micros });
        }
        w.watcher.tick(w.now);
    }
    let spent = begun.elapsed();
    let facts = u128::from(seconds) * u128::from(NODES) * 8;
    println!("{} ns a fact, {:.1} % of a core", spent.as_nanos() / facts, spent.as_secs_f64() / seconds as f64 * 100.0);
    assert!(w.said.is_empty());
}
