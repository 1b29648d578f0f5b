//! Random lives of a machine, and the invariants that each must keep.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::collections::VecDeque;

/// A step of a random life; ranks and terms are small so that they meet.
#[derive(Clone, Debug)]
enum Step {
    Open,
    Close,
    Welcome(u64),
    Start(u64, u32),
    Stop(u64, u64),
    Exit(u32, i32),
    Wait(u64),
    Ack(u64),
    Spawn(bool),
    Leftover(u8),
    Terminate,
    Unknown,
    Release,
    Metrics(u64),
    Fact(u64),
    Asked(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Open),
        1 => Just(Step::Close),
        3 => (1u64..4).prop_map(Step::Welcome),
        4 => (1u64..4, 1u32..5).prop_map(|(t, e)| Step::Start(t, e)),
        1 => (1u64..4, 0u64..3000).prop_map(|(t, g)| Step::Stop(t, g)),
        4 => (2u32..4, prop_oneof![Just(0), Just(1), Just(137)]).prop_map(|(r, c)| Step::Exit(r, c)),
        4 => (0u64..3000).prop_map(Step::Wait),
        2 => (0u64..12).prop_map(Step::Ack),
        6 => prop::bool::weighted(0.8).prop_map(Step::Spawn),
        1 => (0u8..3).prop_map(Step::Leftover),
        1 => Just(Step::Terminate),
        1 => Just(Step::Unknown),
        1 => Just(Step::Release),
        2 => (0u64..50).prop_map(Step::Metrics),
        2 => (0u64..5).prop_map(Step::Fact),
        3 => prop::bool::ANY.prop_map(Step::Asked),
    ]
}

/// The world around a machine: it carries out what comes out, and watches the invariants.
struct World {
    machine: Machine,
    now: u64,
    open: bool,
    welcomed: bool,
    term: u64,
    /// Epochs of accepted starts, and those that were begun.
    allowed: BTreeSet<u32>,
    begun: Vec<u32>,
    /// Of those, the ones of which no rank was started.
    cancelled: BTreeSet<u32>,
    spawning: Option<u32>,
    live: BTreeMap<u32, (Option<u64>, bool)>,
    exits: BTreeSet<(u32, u32)>,
    reported: BTreeMap<(u32, u32), u64>,
    leftover: u8,
    sent: BTreeMap<u64, Event>,
    acked: u64,
    last_sent: u64,
    ended_written: bool,
    gone: bool,
    grace: u64,
    /// When the questions were asked that were not answered yet.
    asked: Option<u64>,
    /// When anybody was reached last.
    reached: u64,
}

/// Of the fence.
const AFTER: u64 = 4000;

impl World {
    fn new() -> Self {
        Self {
            machine: Machine::new(WorkerSpec { fence_after_ms: Some(AFTER), ..two_ranks() }, 1),
            now: 0,
            open: false,
            welcomed: false,
            term: 0,
            allowed: BTreeSet::new(),
            begun: vec![],
            cancelled: BTreeSet::new(),
            spawning: None,
            live: BTreeMap::new(),
            exits: BTreeSet::new(),
            reported: BTreeMap::new(),
            leftover: 0,
            sent: BTreeMap::new(),
            acked: 0,
            last_sent: 0,
            ended_written: false,
            gone: false,
            grace: 5000,
            asked: None,
            reached: 0,
        }
    }

    fn feed(&mut self, input: Input) {
        let mut queue = VecDeque::from([input]);
        while let Some(input) = queue.pop_front() {
            for output in self.machine.on(input, self.now) {
                assert!(!self.gone, "{output:?} after the exit");
                self.carry_out(output, &mut queue);
            }
        }
    }

    fn carry_out(&mut self, output: Output, queue: &mut VecDeque<Input>) {
        match output {
            Output::Send(FromAgent::Event { seq, event, .. }) => {
                assert!(self.open && self.welcomed);
                assert_eq!(
                    seq,
                    self.last_sent + 1,
                    "events are sent in order, from the first that is not acknowledged"
                );
                self.last_sent = seq;
                let first = self.sent.entry(seq).or_insert_with(|| event.clone());
                assert_eq!(*first, event, "a number names one event for ever");
            }
            Output::Send(FromAgent::Hello { .. }) => assert!(self.open),
            Output::Send(_) => assert!(self.welcomed),
            Output::Disconnect => {
                self.open = false;
                self.lost();
                queue.push_back(Input::Closed);
            }
            Output::Ask { .. } => {
                assert!(!self.welcomed && self.asked.is_none());
                self.asked = Some(self.now);
            }
            Output::Spawn(launch) => {
                assert!(self.allowed.contains(&launch.epoch), "epoch {} without a start", launch.epoch);
                assert!(self.begun.iter().all(|e| *e < launch.epoch), "epochs only go up");
                assert!(self.live.is_empty() && self.spawning.is_none());
                assert!(!self.ended_written);
                self.begun.push(launch.epoch);
                self.spawning = Some(launch.epoch);
            }
            Output::Signal { rank, signal } => {
                let Some((term_at, killed)) = self.live.get_mut(&rank) else { panic!("rank {rank} is gone") };
                match signal {
                    Signal::Term => *term_at = Some(self.now),
                    Signal::Kill => *killed = true,
                }
            }
            Output::Sweep(signal) => {
                assert!(self.live.is_empty(), "a sweep while ranks live");
                if signal == Some(Signal::Kill) {
                    self.leftover = self.leftover.saturating_sub(1);
                }
                queue.push_back(swept(usize::from(self.leftover)));
            }
            Output::WriteEnded(_) => {
                assert!(self.live.is_empty() && self.leftover == 0 && self.spawning.is_none());
                self.ended_written = true;
            }
            Output::RemoveEnded => self.ended_written = false,
            Output::Exit { .. } => {
                assert!(self.live.is_empty() && self.ended_written);
                self.gone = true;
            }
            Output::TellHooks(_)
            | Output::Note(_)
            | Output::ShipFrom(_)
            | Output::LogDurable(_)
            | Output::Exec { .. }
            | Output::ExecKill(_)
            | Output::Open { .. }
            | Output::Put { .. }
            | Output::ExecKillAll => {}
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Open if !self.open && !self.gone => {
                self.open = true;
                self.feed(opened());
            }
            Step::Close if self.open => {
                self.open = false;
                self.lost();
                self.feed(Input::Closed);
            }
            Step::Welcome(term) if self.open => {
                if term >= self.term {
                    self.term = term;
                    self.welcomed = true;
                    self.last_sent = self.acked;
                }
                self.feed(welcome(term));
            }
            Step::Start(term, epoch) if self.open => {
                if self.welcomed && term >= self.term {
                    self.allowed.insert(epoch);
                }
                self.feed(start_with(term, epoch, vec![(0, SocketAddr::from(([10, 0, 0, 1], 4000)))]));
                self.raise(term);
            }
            Step::Stop(term, grace) if self.open => {
                self.feed(stop(term, grace));
                self.raise(term);
            }
            Step::Exit(rank, code) => {
                if self.live.remove(&rank).is_some() {
                    let epoch = *self.begun.last().expect("an epoch");
                    self.exits.insert((epoch, rank));
                    self.feed(exited(rank, code));
                }
            }
            Step::Wait(ms) => self.wait(ms),
            Step::Ack(seq) if self.welcomed => {
                let seq = seq.min(self.last_sent);
                self.acked = self.acked.max(seq);
                self.feed(Input::Message(ToAgent::Ack { seq }));
            }
            Step::Spawn(works) => {
                if self.spawning.take().is_some() {
                    if !works && !self.machine.wants_ranks() {
                        self.cancelled.extend(self.begun.last());
                        self.feed(Input::NotSpawned);
                    } else if works {
                        self.live = [(2, (None, false)), (3, (None, false))].into();
                        self.feed(Input::Spawned);
                    } else {
                        self.feed(Input::SpawnFailed { reason: "no".into() });
                    }
                }
            }
            Step::Leftover(n) if !self.live.is_empty() => self.leftover = n,
            Step::Terminate => self.feed(Input::Terminated),
            Step::Unknown if self.open => self.feed(Input::Message(ToAgent::Unknown { reason: "no".into() })),
            Step::Release if self.open => self.feed(Input::Message(ToAgent::Release)),
            Step::Metrics(step) => self.feed(Input::Hook {
                rank: 2,
                message: Message::Metrics { step, values: BTreeMap::new(), total_steps: None, tokens: None },
            }),
            Step::Fact(n) => self
                .feed(Input::Hook { rank: 2, message: Message::Facts { values: [("n".to_owned(), n.into())].into() } }),
            Step::Asked(all) => {
                if let Some(began) = self.asked.take() {
                    self.reached = self.reached.max(if all { began } else { 0 });
                    self.feed(Input::Asked { missing: (!all).then(|| "worker 0".to_owned()) });
                }
            }
            Step::Open
            | Step::Close
            | Step::Welcome(_)
            | Step::Start(..)
            | Step::Stop(..)
            | Step::Ack(_)
            | Step::Leftover(_)
            | Step::Unknown
            | Step::Release => {}
        }
    }

    /// The connection is gone.
    fn lost(&mut self) {
        if std::mem::take(&mut self.welcomed) {
            self.reached = self.now;
        }
    }

    /// A newer term in a command counts as the current one; an agent that ended takes none.
    fn raise(&mut self, term: u64) {
        if self.welcomed {
            self.term = self.term.max(term).min(self.machine.term.max(self.term));
        }
    }

    fn wait(&mut self, ms: u64) {
        let until = self.now + ms;
        while let Some(at) = self.machine.next_timer().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            self.feed(Input::Timer);
        }
        self.now = until;
        self.feed(Input::Timer);
        for (rank, (term_at, killed)) in &self.live {
            let late = term_at.is_some_and(|at| self.now >= at + self.grace);
            assert!(*killed || !late, "rank {rank} was not killed after the grace");
            let fenced = !self.welcomed && self.now >= self.reached + AFTER;
            assert!(!fenced || term_at.is_some(), "rank {rank} runs on, and nobody is reached");
            let late = !self.welcomed && self.now >= self.reached + AFTER + BROKEN_GRACE_MS;
            assert!(!late || *killed, "rank {rank} lives on, and nobody is reached");
        }
    }

    /// Lets everything come to its end.
    fn finish(&mut self) {
        self.take(Step::Spawn(true));
        self.feed(Input::Terminated);
        self.take(Step::Spawn(true));
        for _ in 0..4 {
            self.wait(6000);
            for rank in [2, 3] {
                self.take(Step::Exit(rank, 137));
            }
        }
        self.wait(60_000);
        assert!(self.ended_written, "it never ended: {:?}", self.machine);
        assert!(self.live.is_empty());
        if !self.gone {
            self.take(Step::Open);
            self.take(Step::Welcome(self.term.max(self.machine.term)));
            assert!(matches!(self.sent.last_key_value(), Some((_, Event::Ended { .. }))));
            let seqs: Vec<u64> = self.sent.keys().copied().collect();
            assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>(), "no gap");
            let mut epochs = self.begun.iter().filter(|epoch| !self.cancelled.contains(epoch));
            let mut epoch = 0;
            for event in self.sent.values() {
                match event {
                    Event::Up | Event::LaunchFailed { .. } => epoch = *epochs.next().expect("an epoch for each start"),
                    Event::RankExited { rank, .. } => *self.reported.entry((epoch, *rank)).or_default() += 1,
                    _ => {}
                }
            }
            assert!(self.reported.values().all(|n| *n == 1), "an exit was reported twice: {:?}", self.reported);
            assert_eq!(self.reported.keys().copied().collect::<BTreeSet<_>>(), self.exits, "every exit is reported");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    #[test]
    fn any_life_keeps_the_invariants(steps in prop::collection::vec(step(), 0..60)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
        }
        world.finish();
    }

    #[test]
    fn the_same_inputs_give_the_same_outputs(steps in prop::collection::vec(step(), 0..30)) {
        let (mut one, mut two) = (World::new(), World::new());
        for step in steps {
            one.take(step.clone());
            two.take(step);
            prop_assert_eq!(format!("{:?}", one.machine), format!("{:?}", two.machine));
        }
    }
}
