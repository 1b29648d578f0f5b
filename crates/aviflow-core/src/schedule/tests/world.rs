//! A small world: a snapshot, a clock, and trainings that start, save themselves, end and die. Plans
//! are carried out as the engine carries them out, and every turn is checked.

use super::check;
use super::spec::Spec;
use crate::gpus::Slots;
use crate::lifecycle::{self, Action, Advance, Event, RankEnd, WorkerEvent};
use crate::model::{
    Address, Ending, EvictionCause, Job, JobId, JobKey, Node, NodeCondition, NodeId, Phase, Placement, Pool, Queue,
    Quota, Snapshot, TimeSharing,
};
use crate::schedule::{Constraint, Decision, Memo, Plan, plan};
use crate::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// What a training has done.
struct Work {
    spec: Spec,
    /// Saved.
    done: Span,
    /// Since when this attempt trains what is not saved.
    since: Option<Time>,
    /// When it was asked to stop.
    until: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Ready,
    Up,
    Save,
    End,
    Gone,
}

/// The world.
pub(super) struct World {
    pub(super) s: Snapshot,
    pub(super) now: Time,
    pub(super) memo: Memo,
    pub(super) plan: Plan,
    /// Every decision with its time.
    pub(super) log: Vec<(Time, Decision)>,
    pub(super) ended: BTreeMap<JobId, Job>,
    pub(super) names: BTreeMap<String, JobId>,
    /// When each job was first promised nodes for, if it was.
    pub(super) promised: BTreeMap<JobId, Time>,
    /// Whether each turn is checked; off where a test looks at something else, over a long time.
    pub(super) checks: bool,
    work: BTreeMap<JobId, Work>,
    events: BTreeSet<(Time, JobId, u32, Kind)>,
    /// Nodes whose workers do not answer.
    silent: BTreeSet<NodeId>,
    next_job: u64,
}

impl World {
    pub(super) fn new() -> World {
        World {
            s: Snapshot::default(),
            now: Time(0),
            memo: Memo::default(),
            plan: Plan::default(),
            log: Vec::new(),
            ended: BTreeMap::new(),
            promised: BTreeMap::new(),
            names: BTreeMap::new(),
            checks: true,
            work: BTreeMap::new(),
            events: BTreeSet::new(),
            silent: BTreeSet::new(),
            next_job: 1,
        }
    }

    pub(super) fn pool(&mut self, name: &str, levels: &[&str]) -> &mut World {
        let levels = levels.iter().map(|l| (*l).to_owned()).collect();
        self.s.pools.insert(name.to_owned(), Pool { name: name.to_owned(), levels, ..Pool::default() });
        self
    }

    /// A node of eight GPUs of pool `p`, at the given path.
    pub(super) fn node(&mut self, gpu_type: &str, gpus: u32, path: &[&str]) -> NodeId {
        self.node_in("p", gpu_type, gpus, path)
    }

    pub(super) fn node_in(&mut self, pool: &str, gpu_type: &str, gpus: u32, path: &[&str]) -> NodeId {
        let id = NodeId(u32::try_from(self.s.nodes.len()).unwrap() + 1);
        let mut node = Node::new(id, &format!("n{}", id.0), pool, gpu_type, Slots::first(gpus));
        node.path = path.iter().map(|p| (*p).to_owned()).collect();
        self.s.ledger.open_node(&node, self.now);
        self.s.nodes.insert(id, node);
        id
    }

    pub(super) fn nodes(&mut self, n: u32) -> &mut World {
        for _ in 0..n {
            self.node("H100", 8, &[]);
        }
        self
    }

    pub(super) fn queue(&mut self, name: &str, parent: Option<&str>) -> &mut World {
        let parent = parent.map(str::to_owned);
        self.s.queues.insert(name.to_owned(), Queue { parent, ..Queue::open(name) });
        self
    }

    pub(super) fn quota(&mut self, name: &str, gpu_type: &str, guarantee: u32, limit: Option<u32>) -> &mut World {
        let queue = self.s.queues.get_mut(name).unwrap();
        queue.quotas.insert(gpu_type.to_owned(), Quota { guarantee, limit, weight: 1 });
        self
    }

    pub(super) fn with_queue(&mut self, name: &str, change: impl FnOnce(&mut Queue)) -> &mut World {
        change(self.s.queues.get_mut(name).unwrap());
        self
    }

    /// Jobs of the pool take turns of so many minutes.
    pub(super) fn shares_time(&mut self, minutes: i64) -> &mut World {
        let sharing = TimeSharing { minimum_run: Span::minutes(minutes), ..TimeSharing::on() };
        let pool = self.s.pools.entry("p".to_owned()).or_insert(Pool { name: "p".to_owned(), ..Pool::default() });
        pool.time_sharing = Some(sharing);
        self
    }

    /// Submits without a turn.
    pub(super) fn add(&mut self, spec: Spec) -> JobId {
        let id = JobId(self.next_job);
        self.next_job += 1;
        let key = JobKey { namespace: "default".into(), name: spec.name.clone() };
        let mut job =
            Job::submitted(id, key, spec.user.clone(), spec.request.clone(), spec.environment.clone(), self.now);
        for (name, on) in &spec.after {
            let other = self.names[name];
            job.after.push(crate::model::Dependency { job: other, name: name.clone(), on: *on, met: None });
        }
        self.names.insert(spec.name.clone(), id);
        self.s.waiting.insert(id);
        self.s.jobs.insert(id, job);
        self.memo.touch(id);
        self.work.insert(id, Work { spec, done: Span(0), since: None, until: None });
        id
    }

    pub(super) fn submit(&mut self, spec: Spec) -> &mut World {
        self.add(spec);
        self.turn()
    }

    /// A job that runs where the test wants it.
    pub(super) fn put(&mut self, spec: Spec, on: &[(u32, Slots)]) -> JobId {
        let id = self.add(spec);
        let placement = Placement(on.iter().map(|(n, slots)| (NodeId(*n), *slots)).collect());
        self.advance(id, &Event::Place { placement });
        self.settle();
        id
    }

    pub(super) fn id(&self, name: &str) -> JobId {
        *self.names.get(name).unwrap_or_else(|| panic!("no job is called {name}"))
    }

    /// A job, also one that has ended.
    pub(super) fn job(&self, name: &str) -> &Job {
        let id = self.id(name);
        self.s.jobs.get(&id).unwrap_or_else(|| &self.ended[&id])
    }

    /// An event for a job, and a turn.
    pub(super) fn event(&mut self, name: &str, event: &Event) -> &mut World {
        let id = self.id(name);
        self.advance(id, event);
        self.turn()
    }

    pub(super) fn cancel(&mut self, name: &str) -> &mut World {
        self.event(name, &Event::Cancel { by: "ann".into() })
    }

    /// A rank ends with a code of its own.
    pub(super) fn exit(&mut self, name: &str, worker: u32, code: i32) -> &mut World {
        let id = self.id(name);
        let attempt = self.s.jobs[&id].attempts;
        let exit = WorkerEvent::RankExited {
            rank: worker,
            code,
            signal: None,
            stopping: false,
            last_lines: vec![format!("last words of {worker}")],
            last_step: None,
            why: None,
        };
        self.advance(id, &Event::Worker { attempt, epoch: 0, worker, event: exit });
        let gone = WorkerEvent::Gone { ranks: BTreeMap::new(), reason: None, last_step: None, next_port: None };
        self.advance(id, &Event::Worker { attempt, epoch: 0, worker, event: gone });
        self.turn()
    }

    pub(super) fn advance(&mut self, id: JobId, event: &Event) {
        let out = lifecycle::advance(&mut self.s, id, event, self.now, self.now);
        self.memo.touch(id);
        self.follow(id, out);
    }

    fn follow(&mut self, id: JobId, out: Advance) {
        for action in out.actions {
            let Some(work) = self.work.get_mut(&id) else { continue };
            match action {
                Action::Launch { attempt, .. } => {
                    self.events.insert((self.now + work.spec.starts_in, id, attempt, Kind::Ready));
                }
                Action::Confirm { attempt, .. } => {
                    self.events.insert((self.now, id, attempt, Kind::Up));
                }
                Action::Stop { attempt, grace, .. } => {
                    let stops_in = work.spec.stops_in.min(grace);
                    work.until = Some(self.now);
                    if work.spec.saves {
                        self.events.insert((self.now + Span(stops_in.0 / 2), id, attempt, Kind::Save));
                    }
                    self.events.insert((self.now + stops_in, id, attempt, Kind::Gone));
                }
                Action::Remove { .. } => {}
            }
        }
        let Some(job) = out.job else { return };
        let work = self.work.get_mut(&id).unwrap();
        match &job.phase {
            Phase::Running(gang) if work.since.is_none() => {
                work.since = Some(self.now);
                self.events.insert((self.now + work.spec.runs - work.done, id, gang.attempt, Kind::End));
                if let Some(every) = work.spec.request.checkpoint_every {
                    self.events.insert((self.now + every, id, gang.attempt, Kind::Save));
                }
            }
            Phase::Queued => (work.since, work.until) = (None, None),
            _ => {}
        }
        if job.phase.is_terminal() {
            let ending = if job.phase == Phase::Succeeded { Ending::Succeeded } else { Ending::Failed };
            self.ended.insert(id, job);
            let others: Vec<JobId> =
                self.s.jobs.values().filter(|j| j.after.iter().any(|d| d.job == id)).map(|j| j.id).collect();
            for other in others {
                self.advance(other, &Event::DependencyEnded { job: id, ending });
            }
        }
    }

    /// Something that was due in a training.
    fn happen(&mut self, id: JobId, attempt: u32, kind: Kind) {
        let Some(job) = self.s.jobs.get(&id) else { return };
        let Some(gang) = job.phase.gang().filter(|g| g.attempt == attempt) else { return };
        let running = matches!(job.phase, Phase::Running(_));
        let workers: Vec<(u32, NodeId)> = (0u32..).zip(gang.workers.iter().map(|w| w.node)).collect();
        let epoch = gang.epoch;
        let worker = |worker, event| Event::Worker { attempt, epoch, worker, event };
        match kind {
            Kind::Ready => {
                for (w, node) in workers {
                    if !self.silent.contains(&node) {
                        let address = Address { host: "10.0.0.1".into(), port: 1 };
                        self.advance(id, &worker(w, WorkerEvent::Ready { address }));
                    }
                }
            }
            Kind::Up => {
                for (w, _) in workers {
                    self.advance(id, &worker(w, WorkerEvent::Up));
                }
            }
            Kind::Save => {
                let work = self.work.get_mut(&id).unwrap();
                let Some(since) = work.since else { return };
                if running || work.spec.saves {
                    // Everything up to now, as nothing of it was saved since.
                    let trained = work.until.unwrap_or(self.now);
                    work.done += trained.since(since);
                    work.since = Some(trained);
                    let step = work.done.0.unsigned_abs();
                    if let (true, Some(every)) = (running, work.spec.request.checkpoint_every) {
                        self.events.insert((self.now + every, id, attempt, Kind::Save));
                    }
                    self.advance(id, &worker(0, WorkerEvent::CheckpointComplete { step, path: "c".into() }));
                }
            }
            Kind::End if running => {
                for (w, _) in workers {
                    let end = RankEnd {
                        code: 0,
                        signal: None,
                        stopping: false,
                        before: Span(0),
                        last_lines: Vec::new(),
                        why: None,
                    };
                    let ranks = BTreeMap::from([(w, end)]);
                    self.advance(
                        id,
                        &worker(w, WorkerEvent::Gone { ranks, reason: None, last_step: None, next_port: None }),
                    );
                }
            }
            Kind::End => {}
            Kind::Gone => {
                for (w, node) in workers {
                    if !self.silent.contains(&node) {
                        let gone = WorkerEvent::Gone {
                            ranks: BTreeMap::new(),
                            reason: None,
                            last_step: None,
                            next_port: None,
                        };
                        self.advance(id, &worker(w, gone));
                    }
                }
            }
        }
    }

    /// A node dies with what runs on it.
    pub(super) fn kill(&mut self, node: NodeId) -> &mut World {
        self.set(node, |n| n.condition = NodeCondition::Gone);
        for id in self.holders_of(node) {
            let gang = self.s.jobs[&id].phase.gang().unwrap().clone();
            for (w, worker) in (0u32..).zip(&gang.workers) {
                if worker.node == node {
                    let lost = WorkerEvent::Lost { reason: "the node is dead".into() };
                    self.advance(id, &Event::Worker { attempt: gang.attempt, epoch: 0, worker: w, event: lost });
                }
            }
        }
        self.turn()
    }

    pub(super) fn revive(&mut self, node: NodeId) -> &mut World {
        if self.silent.remove(&node) {
            for id in self.holders_of(node) {
                let job = &self.s.jobs[&id];
                // What was not heard is heard now.
                let kind = match &job.phase {
                    Phase::Starting(_) => Kind::Ready,
                    Phase::Suspending(_) | Phase::Stopping(_) => Kind::Gone,
                    _ => continue,
                };
                self.events.insert((self.now, id, job.attempts, kind));
            }
        }
        let condition = |n: &Node| if n.shut() { NodeCondition::Cordoned } else { NodeCondition::Ready };
        self.set(node, |n| n.condition = condition(n));
        self.turn()
    }

    /// A node is not heard of, and what runs there goes on.
    pub(super) fn silence(&mut self, node: NodeId) -> &mut World {
        self.silent.insert(node);
        self.set(node, |n| n.condition = NodeCondition::Gone);
        self.turn()
    }

    pub(super) fn set(&mut self, node: NodeId, change: impl FnOnce(&mut Node)) {
        let _ = lifecycle::set_condition(&mut self.s, node, change, self.now);
    }

    /// Jobs that hold GPUs of a node.
    pub(super) fn holders_of(&self, node: NodeId) -> Vec<JobId> {
        let on = |j: &&Job| j.phase.gang().is_some_and(|g| g.nodes().any(|n| n == node));
        self.s.jobs.values().filter(on).map(|j| j.id).collect()
    }

    /// Decides, checks what was decided, and carries it out.
    pub(super) fn turn(&mut self) -> &mut World {
        let made = plan(&self.s, &mut self.memo, self.now);
        if self.checks {
            let fresh = plan(&self.s, &mut Memo::default(), self.now);
            assert_eq!(made, fresh, "with the memo and without");
            check::decisions(&self.s, &made, self.now);
        }
        self.carry_out(&made);
        for reservation in &made.reservations {
            self.promised.entry(reservation.job).or_insert(reservation.start);
        }
        self.plan = made;
        if self.checks {
            assert_eq!(crate::lint::lint(&self.s), Vec::<String>::new(), "at {:?} after {:?}", self.now, self.plan);
            let again = plan(&self.s, &mut self.memo, self.now);
            assert!(
                again.decisions.is_empty(),
                "a plan on its own result, at {:?}: {again:?} after {:?}",
                self.now,
                self.plan
            );
        }
        self
    }

    fn carry_out(&mut self, made: &Plan) {
        for decision in &made.decisions {
            self.log.push((self.now, decision.clone()));
            match decision.clone() {
                Decision::Start { job, placement } => self.advance(job, &Event::Place { placement }),
                Decision::Claim { job, claim } => self.advance(job, &Event::Claim { claim }),
                Decision::Unclaim { job, reason } => self.advance(job, &Event::Unclaim { reason }),
                Decision::Evict { job, eviction } => self.advance(job, &Event::Evict { eviction }),
                Decision::Spare { job } => self.advance(job, &Event::Spare),
                Decision::Suspend { job, turned_out } => {
                    self.advance(job, &Event::Suspend { by: "plan".into(), hold: false, turned_out: Some(turned_out) });
                }
                Decision::Window { node, closed } => self.window(node, closed),
                Decision::Take { drain, node, window } => {
                    let of = self.s.drains.iter_mut().find(|d| d.id == drain).unwrap();
                    of.nodes.retain(|n| *n != node);
                    of.taken.push(node);
                    self.set(node, |n| n.drain = Some(window));
                }
            }
        }
    }

    fn window(&mut self, node: NodeId, closed: bool) {
        self.set(node, |n| {
            if closed {
                if n.condition == NodeCondition::Ready {
                    n.condition = NodeCondition::Cordoned;
                }
            } else {
                n.drain = None;
                if n.condition == NodeCondition::Cordoned && !n.shut() {
                    n.condition = NodeCondition::Ready;
                }
            }
        });
        if !closed {
            self.s.drains.iter_mut().for_each(|d| d.taken.retain(|n| *n != node));
            self.s.drains.retain(|d| !d.nodes.is_empty() || !d.taken.is_empty());
        }
    }

    /// When something is due.
    pub(super) fn next(&self) -> Option<Time> {
        let deadline = self.s.jobs.values().filter_map(lifecycle::deadline).min();
        let event = self.events.first().map(|e| e.0);
        [deadline, event, self.plan.next_wake].into_iter().flatten().min().map(|t| t.max(self.now))
    }

    /// Lets time pass until an instant, with everything that is due up to it.
    pub(super) fn until(&mut self, end: Time) -> &mut World {
        let mut turns_now = 0;
        while let Some(next) = self.next().filter(|t| *t <= end) {
            turns_now = if next > self.now { 0 } else { turns_now + 1 };
            assert!(turns_now < 100, "does not settle at {:?}: {:?}", self.now, self.plan);
            self.now = next;
            while let Some(due) = self.events.first().copied().filter(|e| e.0 <= self.now) {
                self.events.remove(&due);
                self.happen(due.1, due.2, due.3);
            }
            let due = |j: &&Job| lifecycle::deadline(j).is_some_and(|d| d <= self.now);
            let due: Vec<JobId> = self.s.jobs.values().filter(due).map(|j| j.id).collect();
            for id in due {
                self.advance(id, &Event::Deadline);
            }
            if self.plan.next_wake.is_some_and(|w| w <= self.now) {
                self.plan.next_wake = None;
            }
            self.turn();
        }
        self.now = self.now.max(end);
        self
    }

    pub(super) fn minutes(&mut self, minutes: i64) -> &mut World {
        self.until(self.now + Span::minutes(minutes))
    }

    pub(super) fn seconds(&mut self, seconds: i64) -> &mut World {
        self.until(self.now + Span::seconds(seconds))
    }

    /// What is due at this instant.
    pub(super) fn settle(&mut self) -> &mut World {
        self.until(self.now)
    }

    // What is known of the world.

    pub(super) fn phase(&self, name: &str) -> &'static str {
        self.job(name).phase.name()
    }

    /// The nodes of a job in the order of its ranks, and its GPUs on each.
    pub(super) fn place(&self, name: &str) -> Vec<(u32, u32)> {
        let gang = self.job(name).phase.gang();
        gang.map_or(Vec::new(), |g| g.workers.iter().map(|w| (w.node.0, w.slots.count())).collect())
    }

    pub(super) fn why(&self, name: &str) -> Constraint {
        let id = self.id(name);
        self.plan.verdict(id).unwrap_or_else(|| panic!("{name} is {}", self.phase(name))).0.clone()
    }

    /// How often a job was told to leave.
    pub(super) fn evictions(&self, name: &str) -> usize {
        let id = self.id(name);
        self.log.iter().filter(|(_, d)| matches!(d, Decision::Evict { job, .. } if *job == id)).count()
    }

    /// How often any job was told to leave for another, by cause.
    pub(super) fn all_evictions(&self, cause: Option<EvictionCause>) -> usize {
        let of = |d: &Decision| match d {
            Decision::Evict { eviction, .. } => cause.is_none_or(|c| c == eviction.cause),
            _ => false,
        };
        self.log.iter().filter(|(_, d)| of(d)).count()
    }

    /// When a job was started for the first time.
    pub(super) fn started(&self, name: &str) -> Option<Time> {
        let id = self.id(name);
        let start = |d: &Decision| matches!(d, Decision::Start { job, .. } if *job == id);
        self.log.iter().find(|(_, d)| start(d)).map(|(t, _)| *t)
    }

    /// The claim that was last decided for a job.
    pub(super) fn claim(&self, name: &str) -> Option<(Placement, Vec<JobId>)> {
        let id = self.id(name);
        self.log.iter().rev().find_map(|(_, d)| match d {
            Decision::Claim { job, claim } if *job == id => {
                Some((claim.placement.clone(), claim.victims.iter().map(|v| v.0).collect()))
            }
            _ => None,
        })
    }
}
