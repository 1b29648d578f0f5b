use super::*;
use crate::health::fault::{Blame, FAULTS};
use crate::health::xid::Xids;

/// A gang of `nodes` nodes with 8 ranks each that has made 400 steps of one second, and what is told of it.
struct World {
    watch: Watch,
    settings: Settings,
    now: Time,
    step: u64,
    news: Vec<(Time, News)>,
}

impl World {
    fn new(nodes: u32, settings: Settings) -> World {
        let mut w = World { watch: Watch::default(), settings, now: Time(0), step: 0, news: Vec::new() };
        w.watch.started((0..nodes).map(NodeId).collect(), 8, false, w.now);
        w.steps(400);
        assert_eq!(w.news, [], "healthy");
        w
    }

    fn fact(&mut self, fact: Fact) {
        let news = self.watch.fact(&fact, self.now, self.now, &self.settings);
        self.news.extend(news.into_iter().map(|n| (self.now, n)));
    }

    fn pass(&mut self, ms: i64) {
        let until = self.now + Span(ms);
        while let Some(at) = self.watch.next_deadline(&self.settings).filter(|at| *at <= until) {
            self.now = at;
            let news = self.watch.tick(at, &self.settings);
            assert!(!news.is_empty(), "woken for nothing");
            self.news.extend(news.into_iter().map(|n| (at, n)));
        }
        self.now = until;
    }

    fn steps(&mut self, n: u64) {
        for _ in 0..n {
            self.pass(1000);
            self.step += 1;
            for rank in 0..self.watch.size() {
                self.fact(step(rank, self.step));
            }
        }
    }

    /// What was found: the kind, the rank, and the seconds since `since`.
    fn found(&self, since: Time) -> Vec<(Kind, Option<u32>, i64)> {
        let found = self.news.iter().filter_map(|(at, news)| match news {
            News::Found(f) => Some((f.kind, f.rank, at.since(since).0 / 1000)),
            News::TakeStacks | News::Suspected(_) | News::Over(_) => None,
        });
        found.collect()
    }
}

fn step(rank: u32, step: u64) -> Fact {
    Fact::Step { rank, step, total: None, loss: None, own_micros: None }
}

#[test]
fn a_hang_names_the_rank_whose_stack_differs() {
    let mut w = World::new(2, Settings::default());
    let last = w.now;
    w.pass(21_000);
    assert_eq!(w.news, [(last + Span::seconds(20), News::TakeStacks)], "before it is a hang");
    for rank in 0..16 {
        w.fact(Fact::Stack { worker: rank / 8, rank, stack: u64::from(rank == 11) });
    }
    w.pass(60_000);
    assert_eq!(w.found(last), [(Kind::Hang, Some(11), 30)]);
    let Some((_, News::Found(hang))) = w.news.last() else { panic!() };
    assert_eq!((hang.node, hang.because, hang.at), (Some(NodeId(1)), Some(Because::OtherStack), last));
    assert_eq!(hang.detail, "no step for 30s: 99 of 100 steps take at most 1s, and 30s is waited");
    assert_eq!(w.watch.next_deadline(&w.settings), None, "it is not asked for ever");
    w.steps(1);
    assert_eq!(w.news.last().expect("one").1, News::Over(Kind::Hang), "nobody acted, and it went on");
}

#[test]
fn ranks_of_a_launcher_are_named_as_it_counts_them() {
    let mut watch = Watch::default();
    let settings = Settings::default();
    watch.started((0..2).map(NodeId).collect(), 1, true, Time(0));
    for rank in 0..16 {
        let fact = Fact::Stack { worker: rank / 8, rank, stack: u64::from(rank == 11) };
        watch.fact(&fact, Time(0), Time(0), &settings);
    }
    let named = watch.culprit().map(|c| (c.rank, c.node, c.because));
    assert_eq!(named, Some((11, NodeId(1), Because::OtherStack)));
    watch.fact(&step(0, 1), Time(1), Time(1), &settings);
    assert_eq!(watch.culprit(), None, "it goes on");
}

#[test]
fn who_is_stopped_has_not_failed_and_who_is_done_does_not_hang() {
    let mut w = World::new(1, Settings::default());
    w.fact(Fact::Stopping);
    w.pass(10_000_000);
    assert_eq!(w.news, []);
    let mut w = World::new(1, Settings::default());
    w.fact(Fact::Ended { rank: 3, ok: false });
    w.steps(1);
    w.pass(10_000_000);
    assert_eq!(w.news, [], "the lifecycle judges ends, and steps of the others are no life of a gang");
    let mut w = World::new(1, Settings::default());
    w.fact(Fact::Ended { rank: 0, ok: true });
    w.pass(600_000);
    assert_eq!(w.news, [], "the others end when they end");
    let mut w = World::new(1, Settings::default());
    w.fact(Fact::Step { rank: 0, step: 401, total: Some(401), loss: None, own_micros: None });
    w.pass(600_000);
    assert_eq!(w.news, [], "results are saved after the last step");
}

#[test]
fn an_xid_is_told_once_and_only_of_the_gang_s_nodes() {
    let mut w = World::new(2, Settings { off: [Kind::Hang].into(), ..Settings::default() });
    let xid = Xid { number: 48, node: NodeId(1), gpu: Some(2), verdict: None };
    let judged = Xids::default().judge(&xid, w.now, &BTreeSet::new());
    w.fact(Fact::Xid { xid, judged });
    w.fact(Fact::Xid { xid, judged });
    w.fact(Fact::Xid { xid: Xid { node: NodeId(7), ..xid }, judged });
    let [(_, News::Found(found))] = &w.news[..] else { panic!("{:?}", w.news) };
    assert_eq!((found.kind, found.asks, found.gpu), (Kind::Xid, Some(Asks::Cordon), Some(2)));
    assert_eq!(found.detail, "XID 48, double bit ECC error: cordon the node and check it");
    assert_eq!(judged.blame, Blame::Node);
}

/// Lets it hang until that is acted on, and starts it again; after how many seconds it was found.
fn hangs_again(w: &mut World) -> i64 {
    let last = w.now;
    w.pass(600_000);
    let (_, _, after) = *w.found(last).last().expect("a hang");
    w.watch.stopped();
    w.watch.started((0..2).map(NodeId).collect(), 8, true, w.now);
    w.news.clear();
    w.steps(400);
    after
}

#[test]
fn the_next_hang_is_waited_for_longer_where_nobody_was_the_culprit() {
    let mut w = World::new(2, Settings::default());
    assert_eq!([hangs_again(&mut w), hangs_again(&mut w), hangs_again(&mut w)], [30, 60, 120]);
    w.fact(Fact::CheckpointOver { complete: false });
    assert_eq!(hangs_again(&mut w), 240);
    w.fact(Fact::CheckpointOver { complete: true });
    assert_eq!(hangs_again(&mut w), 30, "it gets on");
    w.fact(Fact::CheckpointOver { complete: true });
    // One with a culprit leaves no doubt, nor does one that was none.
    w.pass(21_000);
    (0..16).for_each(|rank| w.fact(Fact::Stack { worker: rank / 8, rank, stack: u64::from(rank == 11) }));
    assert_eq!(hangs_again(&mut w), 9);
    w.pass(60_000);
    w.steps(400);
    w.watch.started((0..2).map(NodeId).collect(), 8, true, w.now);
    w.steps(400);
    assert_eq!(hangs_again(&mut w), 30);
}

#[test]
fn who_is_not_heard_does_not_hang() {
    let mut w = World::new(2, Settings::default());
    w.fact(Fact::Heard { worker: 1, heard: false });
    w.pass(600_000);
    w.fact(Fact::Heard { worker: 9, heard: true });
    w.pass(600_000);
    assert_eq!(w.news, []);
    let back = w.now;
    w.fact(Fact::Heard { worker: 1, heard: true });
    w.pass(29_000);
    assert_eq!(w.found(back), []);
    w.pass(600_000);
    assert_eq!(w.found(back), [(Kind::Hang, None, 30)]);
}

#[test]
fn a_training_that_counts_its_steps_anew_does_not_hang() {
    let mut w = World::new(1, Settings::default());
    for _ in 0..3 {
        for n in 1..=50 {
            w.pass(1000);
            // One rank is behind the others, and its last step before comes after their first.
            (0..7).for_each(|rank| w.fact(step(rank, n)));
            let behind = if n == 1 { 50 } else { n - 1 };
            w.fact(step(7, behind));
        }
    }
    let last = w.now;
    assert_eq!(w.news, []);
    w.pass(60_000);
    assert_eq!(w.found(last).first().map(|f| (f.0, f.2)), Some((Kind::Hang, 30)));
}

/// Makes a gang have a fault of a class; none for those that are no fault of a gang by themselves.
fn inject(w: &mut World, kind: Kind) -> Option<()> {
    let loss = |step, loss| Fact::Step { rank: 0, step, total: None, loss: Some(loss), own_micros: None };
    match kind {
        Kind::Hang => w.pass(60_000),
        Kind::BusyIdle => {
            w.pass(9_000);
            (0..8).for_each(|rank| w.fact(Fact::Gpu { rank, utilization: 100, power: 20 }));
            w.pass(100_000);
        }
        Kind::NotANumber => {
            w.fact(loss(1000, Reading::Micro(1)));
            (1001..1010).for_each(|s| w.fact(loss(s, Reading::NotFinite)));
        }
        Kind::LossSpike => {
            (1000..1100).for_each(|s| w.fact(loss(s, Reading::Micro(2_000_000))));
            (1100..1110).for_each(|s| w.fact(loss(s, Reading::Micro(9_000_000))));
        }
        Kind::Straggler => {
            for step in 1000..1600 {
                for rank in 0..16 {
                    let own_micros = Some(if rank == 3 { 1_200_000 } else { 1_000_000 + u64::from(rank) });
                    w.fact(Fact::Step { rank, step, total: None, loss: None, own_micros });
                }
            }
        }
        Kind::DiskFull => w.fact(Fact::DiskFull { worker: 0 }),
        Kind::Xid => {
            let xid = Xid { number: 79, node: NodeId(0), gpu: Some(1), verdict: None };
            let judged = Xids::default().judge(&xid, w.now, &BTreeSet::new());
            w.fact(Fact::Xid { xid, judged });
        }
        Kind::LinkDown | Kind::LinkErrors => w.fact(Fact::Link { node: NodeId(0), kind }),
        Kind::DeviceUnhealthy => w.fact(Fact::DeviceUnhealthy { node: NodeId(0), gpu: Some(3) }),
        // Ends are judged once the gang is gone, see `culprit` and `decide`.
        Kind::Exit
        | Kind::Signal
        | Kind::HostOutOfMemory
        | Kind::GpuOutOfMemory
        | Kind::Cuda
        | Kind::Nccl
        | Kind::NcclTimeout
        | Kind::PeerLost
        | Kind::NodeLost
        | Kind::CrashLoop => return None,
    }
    w.pass(5000);
    Some(())
}

#[test]
fn each_detector_finds_its_fault_and_none_does_without_it() {
    for fault in &FAULTS {
        let finds = |off: &[Kind]| {
            let settings = Settings { off: off.iter().copied().collect(), ..Settings::default() };
            let mut w = World::new(2, settings);
            inject(&mut w, fault.kind)?;
            Some(w.found(w.now).iter().any(|(kind, _, _)| *kind == fault.kind))
        };
        assert_eq!(finds(&[]), finds(&[]).map(|_| true), "{} is found", fault.name);
        assert_eq!(finds(&[fault.kind]), finds(&[]).map(|_| false), "{} is not, switched off", fault.name);
    }
}

#[test]
fn full_utilization_at_idle_power_confirms_that_a_step_is_missed() {
    let mut w = World::new(1, Settings::default());
    // Steps of a minute from now on, some of which take two: they would be waited for longer than three.
    for n in 0..1200 {
        w.pass(if n % 15 == 0 { 120_000 } else { 60_000 });
        w.step += 1;
        w.fact(step(0, w.step));
    }
    w.news.clear();
    let last = w.now;
    let (told, acted) = w.watch.hang.limits(&w.settings.hang);
    assert!(told > Span::seconds(330) && acted > told, "{told} {acted}");
    (0..8).for_each(|rank| w.fact(Fact::Gpu { rank, utilization: 100, power: 20 }));
    w.pass(told.0 - 1);
    assert_eq!(w.found(last), [], "in a long step they may wait for data");
    w.pass(10_000);
    let found: Vec<_> = w.found(last).iter().map(|f| (f.0, f.2)).collect();
    assert_eq!(found, [(Kind::BusyIdle, told.0 / 1000), (Kind::Hang, told.0 / 1000)]);
    // An evaluation, of which lines tell, explains it.
    w.steps(1);
    w.news.clear();
    w.fact(Fact::Active);
    (0..8).for_each(|rank| w.fact(Fact::Gpu { rank, utilization: 100, power: 20 }));
    w.pass(100_000);
    assert_eq!(w.news, []);
}

#[test]
fn a_watch_is_small_survives_and_forgets_nothing_that_it_needs() {
    assert!(size_of::<RankFacts>() <= 64, "{}", size_of::<RankFacts>());
    let mut w = World::new(2, Settings::default());
    let text = serde_json::to_string(&w.watch).expect("writes");
    let read: Watch = serde_json::from_str(&text).expect("reads");
    assert_eq!(read, w.watch);
    w.watch = read;
    let last = w.now;
    w.pass(60_000);
    assert_eq!(w.found(last), [(Kind::Hang, None, 30)]);
    assert_eq!(serde_json::from_str::<Watch>("{}").expect("reads"), Watch::default());
}

#[test]
fn what_fits_nothing_is_harmless() {
    let mut w = World::new(1, Settings::default());
    let before = w.watch.clone();
    w.fact(step(99, 5_000));
    w.fact(Fact::Stack { worker: 9, rank: 3, stack: 1 });
    w.fact(Fact::Collective { rank: 99, number: 1 });
    w.fact(Fact::Link { node: NodeId(99), kind: Kind::LinkDown });
    w.fact(Fact::DeviceUnhealthy { node: NodeId(99), gpu: Some(u32::MAX) });
    w.fact(Fact::Heard { worker: 99, heard: false });
    w.fact(Fact::Gpu { rank: 99, utilization: u32::MAX, power: 0 });
    assert_eq!((&w.watch, &w.news[..]), (&before, &[][..]));
    let mut none = Watch::default();
    none.fact(&step(0, 1), Time(0), Time(0), &w.settings);
    assert_eq!((none.next_deadline(&w.settings), none.culprit()), (None, None));
}
