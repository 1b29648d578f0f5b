//! The world as it really is: nodes, agents, ranks, and what each of them saw.
//!
//! The engine hears of it through observations that come late, twice and in
//! another order; the checks compare what it concluded with this truth.

mod agents;
mod shared;

pub(super) use shared::Said;

use super::hash;
use super::people::{GPU_TYPE, POOL};
use super::script::{Item, JobScript, Outcome, QueueScript, Script};
use crate::ports::{Observation, Order, Stamped, WorkerEvent};
use aviflow_core::gpus::Slots;
use aviflow_core::model::{EnvironmentHash, JobId, NodeId, Term};
use aviflow_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// GPUs of each node.
const GPUS: u32 = 8;

/// A worker of an attempt of a job.
pub(super) type Key = (JobId, u32, u32);

/// What is known, by the world, of an attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Truth {
    /// The first rank that failed by itself, and when.
    pub(super) first_failure: Option<(Time, u32)>,
    /// Whether reports of the attempt were lost with an agent or a node.
    pub(super) disturbed: bool,
    /// Whether an agent or a node was lost, or evicted its worker.
    pub(super) lost: bool,
    /// Whether an agent never said that it is ready.
    pub(super) never_ready: bool,
    /// Whether ranks could not be started.
    pub(super) launch_failed: bool,
    /// Whether the cluster refused a worker.
    pub(super) refused: bool,
    /// Whether it would have refused it anywhere.
    pub(super) impossible: bool,
    /// The epoch that was begun last, and how many of those before failed or lost a worker.
    pub(super) epoch: u32,
    pub(super) failed_before: usize,
    pub(super) lost_before: usize,
    /// Ranks that ended with 0, by rank.
    pub(super) finished: BTreeSet<u32>,
    /// Ranks there are.
    pub(super) ranks: u32,
}

/// How a rank ended: when, with what, and whether its agent was stopping it.
#[derive(Clone, Copy, Debug)]
struct End {
    at: Time,
    code: i32,
    stopping: bool,
}

#[derive(Clone, Debug)]
struct Worker {
    name: String,
    node: NodeId,
    slots: Slots,
    first_rank: u32,
    /// `None` as long as the rank runs; empty before the start.
    ranks: Vec<Option<End>>,
    agent: bool,
    connects: bool,
    gone: bool,
    /// The epoch that it was told to start last; 0 before the first.
    epoch: u32,
    /// Whether its agent waits for another one.
    waits: bool,
    stopping: bool,
    started: bool,
    /// When its ranks began, and what they had done before.
    began: Option<(Time, i64)>,
    outbox: BTreeMap<u64, (Time, u32, WorkerEvent)>,
    sent: u64,
    /// Whether the node had no room for it.
    shut_out: bool,
    /// Whether its node died before the control plane knew: nothing was started.
    hello: bool,
}

impl Worker {
    fn runs(&self) -> bool {
        self.ranks.iter().any(Option::is_none)
    }
}

/// An epoch of a worker.
type Epoch = (Key, u32);

#[derive(Clone, Debug)]
enum Happening {
    Script(usize),
    Restart,
    Hello(Key),
    Up(Key),
    Step { key: Key, event: WorkerEvent },
    Save { key: Key, number: u64, complete: bool },
    RankEnds { key: Key, rank: u32, code: i32, by_agent: bool },
    Empty(Key, Option<String>),
    LostSeen(Key, Time),
    Deliver { key: Key, seq: u64, occurred: Time, epoch: u32, event: WorkerEvent },
    Say(Observation),
    NodeBack(u32),
    Stop(Key, i64),
    Refuse(Key, bool),
    AskToLeave(Key),
}

/// An observation on its way, and what it acknowledges.
#[derive(Clone, Debug)]
pub(super) struct Delivered {
    pub(super) observation: Observation,
    event: Option<(Key, u64)>,
}

/// What happened at an instant.
#[derive(Default)]
pub(super) struct Happened {
    pub(super) items: Vec<usize>,
    pub(super) restart: bool,
    pub(super) observations: Vec<Delivered>,
}

pub(super) struct World {
    pub(super) now: Time,
    /// Wall clock minus true time.
    pub(super) skew: Span,
    pub(super) wrong: Vec<String>,
    pub(super) disturbed: u32,
    pub(super) truth: BTreeMap<(JobId, u32), Truth>,
    seed: u64,
    steady: bool,
    scripts: BTreeMap<String, JobScript>,
    items: Vec<Item>,
    /// What is to happen, and of which epoch of a worker it is.
    agenda: BTreeMap<(Time, u64), (Happening, Option<Epoch>)>,
    next_number: u64,
    up: bool,
    term: Term,
    workers: BTreeMap<Key, Worker>,
    removed: BTreeSet<Key>,
    /// What each job has saved: milliseconds of training.
    saved: BTreeMap<JobId, i64>,
    dead_nodes: BTreeSet<u32>,
    broken: BTreeMap<u32, Vec<u32>>,
    /// What others do, by node.
    sites: BTreeMap<u32, shared::Site>,
    nodes: u32,
    tries: BTreeMap<String, u64>,
}

impl World {
    pub(super) fn new(script: &Script, begin: Time) -> World {
        let mut world = World {
            now: begin,
            skew: Span(0),
            wrong: Vec::new(),
            disturbed: 0,
            truth: BTreeMap::new(),
            seed: script.seed,
            steady: script.steady_clock(),
            scripts: script.jobs().map(|j| (j.name.clone(), j.clone())).collect(),
            items: script.items.iter().map(|s| s.item.clone()).collect(),
            agenda: BTreeMap::new(),
            next_number: 0,
            up: false,
            term: Term(0),
            workers: BTreeMap::new(),
            removed: BTreeSet::new(),
            saved: BTreeMap::new(),
            dead_nodes: BTreeSet::new(),
            broken: BTreeMap::new(),
            sites: BTreeMap::new(),
            nodes: script.nodes,
            tries: BTreeMap::new(),
        };
        for (index, step) in script.items.iter().enumerate() {
            world.at(begin + Span(step.at + 1000), Happening::Script(index));
        }
        let last = begin + Span(script.items.iter().map(|s| s.at).max().unwrap_or(0) + 14_400_000);
        for (n, item) in (0..).zip(finally(script)) {
            // Drains and queues first, and one after the other: each needs a control plane that answers.
            world.at(last + Span(10_000 * n), Happening::Script(world.items.len()));
            world.items.push(item);
        }
        world
    }

    pub(super) fn wall(&self) -> Time {
        self.now + self.skew
    }

    pub(super) fn next(&self) -> Option<Time> {
        self.agenda.first_key_value().map(|((t, _), _)| *t)
    }

    pub(super) fn item(&self, index: usize) -> Option<Item> {
        self.items.get(index).cloned()
    }

    fn at(&mut self, time: Time, happening: Happening) {
        self.next_number += 1;
        let of = match &happening {
            Happening::Up(key)
            | Happening::Step { key, .. }
            | Happening::Save { key, .. }
            | Happening::RankEnds { key, .. }
            | Happening::Empty(key, _)
            | Happening::Stop(key, _)
            | Happening::AskToLeave(key) => self.workers.get(key).map(|w| (*key, w.epoch.max(1))),
            Happening::Script(_)
            | Happening::Restart
            | Happening::Hello(_)
            | Happening::LostSeen(..)
            | Happening::Deliver { .. }
            | Happening::Say(_)
            | Happening::NodeBack(_)
            | Happening::Refuse(..) => None,
        };
        self.agenda.insert((time.max(self.now), self.next_number), (happening, of));
    }

    fn draw(&self, key: Key, what: u64, below: u64) -> i64 {
        let number = hash(&[self.seed, key.0.0, u64::from(key.1), u64::from(key.2), what]) % below.max(1);
        i64::try_from(number).unwrap_or(0)
    }

    fn after(&mut self, key: Key, what: u64, least: i64, spread: u64, happening: Happening) {
        // Coarse delays make things happen at the same instant.
        let delay = (least + self.draw(key, what, spread)) / 10 * 10;
        self.at(self.now + Span(delay), happening);
    }

    /// A person tries an item again, once the control plane answers.
    pub(super) fn later(&mut self, index: usize) {
        let tries = self.tries.entry(index.to_string()).or_default();
        *tries += 1;
        let wait = 500 * i64::try_from((*tries).min(20)).unwrap_or(20);
        self.at(self.now + Span(wait), Happening::Script(index));
    }

    /// An item comes again.
    pub(super) fn again(&mut self, index: usize, after: Span) {
        self.at(self.now + after, Happening::Script(index));
    }

    /// Everything that happens now.
    pub(super) fn happen(&mut self) -> Happened {
        let mut out = Happened::default();
        while let Some((at, number)) = self.agenda.first_key_value().map(|(k, _)| *k) {
            if at > self.now {
                break;
            }
            let Some((happening, of)) = self.agenda.remove(&(at, number)) else { break };
            // What an earlier epoch would have done does not come to it.
            if of.is_none_or(|(key, epoch)| self.workers.get(&key).is_none_or(|w| w.epoch.max(1) == epoch)) {
                self.one(happening, &mut out);
            }
        }
        out
    }

    fn one(&mut self, happening: Happening, out: &mut Happened) {
        match happening {
            Happening::Script(index) => self.script_item(index, out),
            Happening::Restart => out.restart = true,
            Happening::Hello(key) => self.hello(key),
            Happening::Up(key) => self.ranks_up(key),
            Happening::Step { key, event } => {
                if self.workers.get(&key).is_some_and(|w| w.agent && w.runs()) {
                    self.event(key, self.now, event);
                }
            }
            Happening::Save { key, number, complete } => self.save(key, number, complete),
            Happening::RankEnds { key, rank, code, by_agent } => self.rank_ends(key, rank, code, by_agent),
            Happening::Empty(key, reason) => self.empty(key, reason),
            Happening::LostSeen(key, at) => {
                let reason = "its agent is gone".to_owned();
                self.event_at(key, at, WorkerEvent::Lost { reason });
            }
            // On its way it survives whoever sent it.
            Happening::Deliver { key, seq, occurred, epoch, event } => {
                if self.up {
                    let (job, attempt, worker) = key;
                    let ago = self.now.since(occurred);
                    let observation = Observation::Worker { job, attempt, epoch, worker, ago, event };
                    out.observations.push(Delivered { observation, event: Some((key, seq)) });
                }
            }
            Happening::Say(observation) => {
                if self.up {
                    out.observations.push(Delivered { observation, event: None });
                }
            }
            Happening::NodeBack(node) => {
                self.dead_nodes.remove(&node);
                self.say_node(node, 50);
            }
            Happening::Stop(key, grace) => self.stop(key, grace),
            Happening::Refuse(key, lasting) => self.refuse(key, lasting),
            Happening::AskToLeave(key) => self.ask_to_leave(key),
        }
    }

    fn script_item(&mut self, index: usize, out: &mut Happened) {
        match self.items.get(index).cloned() {
            Some(Item::KillRank { pick }) => {
                let running: Vec<(Key, u32)> = self.running().collect();
                if let Some((key, rank)) = pick_one(&running, pick) {
                    self.rank_ends(key, rank, 137, false);
                }
            }
            Some(Item::KillAgent { pick }) => {
                let living: Vec<Key> = self.workers.iter().filter(|(_, w)| w.agent).map(|(k, _)| *k).collect();
                if let Some(key) = pick_one(&living, pick) {
                    self.agent_dies(key);
                }
            }
            Some(Item::LoseNode { node, for_ms }) => {
                self.dead_nodes.insert(node);
                let there: Vec<Key> =
                    self.workers.iter().filter(|(_, w)| w.node.0 == node && w.agent).map(|(k, _)| *k).collect();
                for key in there {
                    self.agent_dies(key);
                }
                let name = format!("n{node}");
                self.at(self.now + Span(200), Happening::Say(Observation::NodeGone { name }));
                self.at(self.now + Span(for_ms), Happening::NodeBack(node));
            }
            Some(Item::Break { node, slots }) => {
                self.broken.insert(node, slots.clone());
                let name = format!("n{node}");
                self.at(self.now, Happening::Say(Observation::NodeHealth { name, broken: slots }));
            }
            Some(Item::Others { node, gpus }) => self.others_want(node, gpus),
            Some(Item::Close { node, on }) => {
                self.site(node).closed = on;
                self.say_node(node, 50);
            }
            Some(Item::Label { node, path }) => {
                self.site(node).path = path;
                self.say_node(node, 50);
            }
            Some(
                Item::Submit(_)
                | Item::Cancel { .. }
                | Item::Suspend { .. }
                | Item::Hold { .. }
                | Item::Release { .. }
                | Item::Update { .. }
                | Item::Queue(_)
                | Item::DropQueue { .. }
                | Item::Pool { .. }
                | Item::DropPool
                | Item::Policy { .. }
                | Item::Pause { .. }
                | Item::Cordon { .. }
                | Item::Drain { .. }
                | Item::CancelDrain { .. }
                | Item::Clear,
            ) => out.items.push(index),
            Some(Item::Fault(_) | Item::CancelWhen { .. }) | None => {}
        }
    }

    fn running(&self) -> impl Iterator<Item = (Key, u32)> + '_ {
        self.workers.iter().flat_map(|(key, w)| {
            (w.first_rank..).zip(&w.ranks).filter(|(_, end)| end.is_none()).map(|(rank, _)| (*key, rank))
        })
    }

    // ---- the control plane ----

    pub(super) fn control_plane_died(&mut self, count: u32) {
        self.up = false;
        let wait = hash(&[self.seed, 77, u64::from(count)]) % 40_000;
        // Mostly seconds; sometimes it stays away longer than any deadline.
        let long = hash(&[self.seed, 79, u64::from(count)]).is_multiple_of(8);
        let wait = i64::try_from(wait.saturating_sub(10_000)).unwrap_or(0) * if long { 40 } else { 1 };
        self.at(self.now + Span(wait), Happening::Restart);
    }

    /// The wall clock may have been set while no control plane ran; one that runs
    /// does not follow it.
    pub(super) fn step_clock(&mut self) {
        if !self.steady {
            let step = hash(&[self.seed, 78, self.next_number]) % 20_000;
            self.skew = Span(i64::try_from(step).unwrap_or(0) - 10_000);
        }
    }

    pub(super) fn control_plane_is_up(&mut self) {
        self.up = true;
        for node in 1..=self.nodes {
            self.say_node(node, 0);
        }
        let keys: Vec<Key> = self.workers.keys().copied().collect();
        for key in keys {
            let Some(w) = self.workers.get(&key) else { continue };
            let waiting = w.outbox.clone();
            if w.agent && w.connects && !w.gone {
                self.after(key, 300 + self.next_number, 0, 600, Happening::Hello(key));
            }
            for (seq, (occurred, epoch, event)) in waiting {
                let deliver = Happening::Deliver { key, seq, occurred, epoch, event };
                self.after(key, 400 + self.next_number, 0, 600, deliver);
            }
        }
    }

    fn say_node(&mut self, node: u32, delay: i64) {
        let name = format!("n{node}");
        let seen = if self.dead_nodes.contains(&node) {
            Observation::NodeGone { name: name.clone() }
        } else {
            let path = self.site(node).path.clone();
            let (pool, gpu_type) = (POOL.to_owned(), GPU_TYPE.to_owned());
            Observation::NodeSeen { name: name.clone(), pool, gpu_type, gpus: GPUS, path }
        };
        self.at(self.now + Span(delay), Happening::Say(seen));
        let broken = self.broken.get(&node).cloned().unwrap_or_default();
        self.at(self.now + Span(delay), Happening::Say(Observation::NodeHealth { name, broken }));
        for said in self.site_seen(node) {
            self.at(self.now + Span(delay), Happening::Say(said));
        }
    }

    /// The observation is durable: its agent may forget it.
    pub(super) fn acknowledge(&mut self, delivered: &Delivered) {
        if let Some((key, seq)) = delivered.event
            && let Some(worker) = self.workers.get_mut(&key)
        {
            // What an agent said last is kept until the worker is removed, as its file is.
            if !worker.gone {
                worker.outbox.remove(&seq);
            }
        }
    }

    // ---- orders ----

    pub(super) fn apply(&mut self, orders: &[Stamped]) {
        self.keep(orders);
        for stamped in orders {
            if stamped.term < self.term {
                continue;
            }
            self.term = stamped.term;
            self.order(&stamped.order);
        }
    }

    fn order(&mut self, order: &Order) {
        match order {
            Order::Reconcile { live } => {
                let strays: Vec<Key> = self.workers.keys().filter(|k| !live.contains(&(k.0, k.1))).copied().collect();
                for key in strays {
                    self.workers.remove(&key);
                    self.removed.insert(key);
                }
            }
            Order::Prepare { record } => {
                let Some(hash) = record.provenance.made_first() else { return };
                let hash = EnvironmentHash(hash.to_owned());
                let roll = super::hash(&[self.seed, 55, self.next_number]) % 8;
                let answer = if roll == 0 {
                    Observation::EnvironmentFailed { hash, reason: "no such package".to_owned() }
                } else {
                    Observation::EnvironmentReady { hash }
                };
                let delay = i64::try_from(roll * 700).unwrap_or(0);
                self.at(self.now + Span(delay), Happening::Say(answer));
            }
            Order::Launch { record, attempt, placement, .. } => {
                let script = self.scripts.get(&record.spec.name).cloned();
                let Some(script) = script else { return };
                let truth = self.truth.entry((record.id, *attempt)).or_default();
                truth.ranks = script.ranks_per_node * u32::try_from(placement.0.len()).unwrap_or(0);
                for ((node, slots), worker) in placement.0.iter().zip(0u32..) {
                    self.launch((record.id, *attempt, worker), *node, *slots, &script);
                }
            }
            Order::Confirm { job, attempt, epoch, best_step, .. } => {
                let keys = self.of_attempt(*job, *attempt);
                for key in keys {
                    self.confirm(key, *epoch, *best_step);
                }
            }
            Order::Stop { job, attempt, epoch, grace, .. } => {
                for key in self.of_attempt(*job, *attempt) {
                    // One that never heard of the epoch ends it all the same.
                    if *epoch > 1 {
                        self.begins(key, *epoch);
                    }
                    self.after(key, 20, 0, 50, Happening::Stop(key, grace.0));
                }
            }
            // What was under way may be told all the same.
            Order::Abandon { .. } => {}
            // As a whole, see `keep`.
            Order::Keep { .. } => {}
            Order::Remove { job, attempt } => {
                for key in self.of_attempt(*job, *attempt) {
                    if self.workers.get(&key).is_some_and(Worker::runs) {
                        self.wrong.push(format!("{key:?} is removed while its ranks run"));
                    }
                    self.workers.remove(&key);
                    self.removed.insert(key);
                }
            }
        }
    }

    fn of_attempt(&self, job: JobId, attempt: u32) -> Vec<Key> {
        self.workers.keys().filter(|k| (k.0, k.1) == (job, attempt)).copied().collect()
    }

    fn confirm(&mut self, key: Key, epoch: u32, best_step: Option<u64>) {
        if !self.begins(key, epoch) {
            return;
        }
        let Some(w) = self.workers.get_mut(&key) else { return };
        w.started = true;
        let (name, hello) = (w.name.clone(), w.hello);
        if !hello {
            self.wrong.push(format!("{key:?} is confirmed and was never ready"));
        }
        let script = self.scripts[&name].clone();
        let chosen = self.draw((key.0, key.1, 0), 33, u64::from(script.nodes)) == i64::from(key.2);
        if self.outcome(key) == Outcome::LaunchFails && chosen {
            self.truth.entry((key.0, key.1)).or_default().launch_failed = true;
            self.event(key, self.now, WorkerEvent::LaunchFailed { reason: "no such program".to_owned() });
            self.after(key, 34, 5, 20, Happening::Empty(key, Some("its ranks could not be started".to_owned())));
            return;
        }
        self.after(key, 35, 10, 400, Happening::Up(key));
        let run = self.left(key);
        let step = 10 + u64::from(key.1);
        self.after(key, 36, 450 + run / 5, 10, Happening::Step { key, event: WorkerEvent::FirstStep { step } });
        if best_step.is_some() {
            self.after(key, 37, 450 + run / 4, 10, Happening::Step { key, event: WorkerEvent::CaughtUp { step } });
        }
        match script.saves_every {
            None => self.after(key, 38, 450 + run / 3, 10, Happening::Save { key, number: 1, complete: false }),
            // One rank of the gang says it for all.
            Some(every) if key.2 == 0 => {
                self.after(key, 38, 450 + every.0, 10, Happening::Save { key, number: 1, complete: false });
            }
            Some(_) => {}
        }
    }

    /// What should not be there once everything has ended.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let say = |(key, w): (&Key, &Worker)| format!("{key:?} of {} is left behind, runs: {}", w.name, w.runs());
        let kept = self.sites.iter().filter(|(_, s)| s.kept.0 > 0);
        let kept = kept.map(|(node, s)| format!("{:?} of node {node} is kept for nobody", s.kept));
        self.workers.iter().map(say).chain(kept).collect()
    }
}

/// In the end nothing is left paused, broken, held or drained, or the jobs could not end.
fn finally(script: &Script) -> Vec<Item> {
    let mut queues: Vec<&QueueScript> =
        script.items.iter().filter_map(|s| if let Item::Queue(q) = &s.item { Some(q) } else { None }).collect();
    queues.sort_by_key(|q| (q.parent.is_some(), &q.name));
    queues.dedup_by_key(|q| &q.name);
    let open = |q: &QueueScript| Item::Queue(QueueScript { name: q.name.clone(), ..QueueScript::default() });
    let mut items = vec![Item::Pause { on: false }, Item::CancelDrain { node: None }, Item::CancelDrain { node: None }];
    // Without its own guarantee a parent takes any child, and is none in the end.
    items.extend(queues.iter().rev().map(|q| open(q)));
    for node in 1..=script.nodes {
        items.push(Item::CancelDrain { node: Some(node) });
        items.push(Item::Cordon { node, on: false });
        items.push(Item::Break { node, slots: Vec::new() });
        items.push(Item::Others { node, gpus: 0 });
        items.push(Item::Close { node, on: false });
    }
    items.extend(script.jobs().map(|j| Item::Release { job: j.name.clone() }));
    items.push(Item::Clear);
    items
}

fn pick_one<T: Copy>(list: &[T], pick: u64) -> Option<T> {
    let len = u64::try_from(list.len()).ok().filter(|n| *n > 0)?;
    list.get(usize::try_from(pick % len).ok()?).copied()
}
