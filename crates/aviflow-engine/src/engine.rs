//! One turn of the engine: inputs in, one transaction, orders out.
//!
//! The engine holds the snapshot in memory and the store holds it durably; a
//! turn that could not be committed leaves an engine that must be opened again.
//! Nothing is ordered before the decision behind it is durable.
//!
//! It has no thread and reads no clock, so the simulator runs it as it is.

mod carry;
mod drains;
mod input;
mod intake;
mod jobs;
mod keep;
mod pools;
mod queues;
mod submit;
#[cfg(test)]
mod tests;

pub use input::{Answer, DrainName, DrainOrder, Input, QueueJobs, Refusal, Submission};
pub use submit::refusal;

use crate::ports::{Act, ActKind, Batch, JobRecord, Order, Stamped, Store, StoreError, ending};
#[cfg(test)]
use crate::sim::planted::Planted;
use aviflow_core::ledger::Entry;
use aviflow_core::lifecycle::{self, Action, Event, Moment};
use aviflow_core::model::{
    EnvironmentHash, EnvironmentState, Job, JobId, JobKey, NodeId, Phase, Placement, Queue, Snapshot, Term, WorkerState,
};
use aviflow_core::schedule::{self, Decision, Memo, Plan};
use aviflow_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a new control plane listens before it keeps deadlines. Agents try
/// to connect again at least every two seconds.
const LISTEN: Span = Span::seconds(10);

/// What a turn brought.
#[derive(Debug, Default, PartialEq)]
pub struct Turn {
    /// An answer for each input, in their order.
    pub answers: Vec<Answer>,
    /// For the cluster.
    pub orders: Vec<Stamped>,
    /// Jobs that changed.
    pub changed: Vec<JobId>,
    /// Those of them that ended, which are forgotten here.
    pub ended: Vec<Job>,
    /// What happened to jobs.
    pub moments: Vec<Moment>,
    /// How long the plan took, where there is a stopwatch.
    pub planned: Option<Duration>,
    /// Whether anything was written.
    pub written: bool,
}

/// Submissions of a second for which an estimate is kept: enough to judge by, and no flood of them, as one costs as
/// much as a plan.
const ESTIMATES: usize = 8;

/// The state of a control plane that holds its store.
#[derive(Debug)]
pub struct Engine<S> {
    store: S,
    term: Term,
    generation: u64,
    now: Time,
    last_job: u64,
    last_node: u32,
    last_drain: u64,
    snapshot: Snapshot,
    records: BTreeMap<JobId, Arc<JobRecord>>,
    plan: Plan,
    memo: Memo,
    deadlines: BTreeSet<(Time, JobId)>,
    /// Since when estimates are counted, and how many there were.
    estimates: (Time, usize),
    /// No deadline is kept before this instant: first the agents must have had
    /// the time to say what happened while nobody listened.
    listen_until: Time,
    /// For names that were taken, the suffix to try first.
    suffixes: BTreeMap<JobKey, u32>,
    /// For live jobs that others wait for, who does.
    dependants: BTreeMap<JobId, BTreeSet<JobId>>,
    /// GPUs that the cluster keeps others away from, as it was last told.
    kept: BTreeMap<NodeId, keep::Level>,
    /// What the time is, for whoever measures; no decision reads it.
    pub(crate) stopwatch: Option<fn() -> Instant>,
    /// What whoever looks on wants to know of each plan.
    pub(crate) audit: Option<Audit>,
    /// A bug that the simulator must find.
    #[cfg(test)]
    pub(crate) planted: Planted,
}

/// What is noted of plans for whoever looks on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Audit {
    /// Where a plan came out otherwise with an empty memo.
    pub(crate) wrong: Vec<String>,
    /// What the last plan decided.
    pub(crate) decided: Vec<Decision>,
}

/// What changed in a turn, before it is a batch.
#[derive(Default)]
struct Work {
    jobs: BTreeMap<JobId, Job>,
    nodes: BTreeSet<NodeId>,
    queues: BTreeSet<String>,
    pools: BTreeSet<String>,
    policy: bool,
    usage: BTreeSet<(String, String)>,
    history: bool,
    drains: bool,
    quarantines: bool,
    environments: BTreeSet<EnvironmentHash>,
    paused: bool,
    records: Vec<Arc<JobRecord>>,
    entries: Vec<Entry>,
    moments: Vec<Moment>,
    acts: Vec<Act>,
    orders: Vec<Order>,
    journal: Vec<String>,
}

impl<S: Store> Engine<S> {
    /// Takes the store under a new term and says what the cluster must be told
    /// again: what was decided before a crash may not have been done.
    ///
    /// # Errors
    /// If the store cannot be taken or read.
    pub fn open(store: S, wall: Time) -> Result<(Engine<S>, Vec<Stamped>), StoreError> {
        let mut engine = Engine {
            store,
            term: Term(0),
            generation: 0,
            now: Time(0),
            last_job: 0,
            last_node: 0,
            last_drain: 0,
            snapshot: Snapshot::default(),
            records: BTreeMap::new(),
            plan: Plan::default(),
            memo: Memo::default(),
            deadlines: BTreeSet::new(),
            estimates: (Time(0), 0),
            listen_until: Time(0),
            suffixes: BTreeMap::new(),
            dependants: BTreeMap::new(),
            kept: BTreeMap::new(),
            stopwatch: None,
            audit: None,
            #[cfg(test)]
            planted: Planted::default(),
        };
        let orders = engine.reopen(wall)?;
        Ok((engine, orders))
    }

    /// Takes the store again, under a new term, and forgets what was not durable.
    ///
    /// # Errors
    /// If the store cannot be taken or read; this may be called again then.
    pub fn reopen(&mut self, wall: Time) -> Result<Vec<Stamped>, StoreError> {
        let loaded = self.store.acquire()?;
        self.term = loaded.term;
        self.generation = loaded.generation;
        self.now = loaded.clock.max(wall);
        self.last_job = loaded.last_job;
        self.last_node = loaded.last_node;
        self.last_drain = loaded.last_drain;
        self.snapshot = loaded.snapshot;
        self.records = loaded.records;
        self.suffixes.clear();
        self.memo.reset();
        self.dependants.clear();
        for job in self.snapshot.jobs.values() {
            for dependency in job.after.iter().filter(|d| d.met.is_none()) {
                self.dependants.entry(dependency.job).or_default().insert(job.id);
            }
        }
        // Caches may be gone since: ask again. What is there is found at once.
        for state in self.snapshot.environments.values_mut() {
            *state = EnvironmentState::Preparing;
        }
        let due = |j: &Job| Some((lifecycle::deadline(j)?, j.id));
        self.deadlines = self.snapshot.jobs.values().filter_map(due).collect();
        self.listen_until = self.now + LISTEN;
        self.kept = self.kept_now();
        let orders = self.recover();
        self.plan = schedule::plan(&self.snapshot, &mut self.memo, self.now);
        // Decisions are made by turns, which write them down; the first is due at once.
        self.plan.decisions.clear();
        self.plan.next_wake = Some(self.now);
        Ok(self.stamp(orders))
    }

    /// Orders that make the cluster agree with the store.
    fn recover(&self) -> Vec<Order> {
        let gangs = || self.snapshot.jobs.values().filter_map(|j| Some((j, j.phase.gang()?)));
        let mut orders = vec![Order::Reconcile { live: gangs().map(|(j, g)| (j.id, g.attempt)).collect() }];
        orders.extend(self.keep_all());
        for hash in self.snapshot.environments.keys() {
            orders.extend(self.prepare(hash));
        }
        for (job, gang) in gangs() {
            let placement = Placement(gang.workers.iter().map(|w| (w.node, w.slots)).collect());
            let (attempt, epoch) = (gang.attempt, gang.epoch);
            orders.extend(self.order(job.id, Action::Launch { attempt, placement }));
            let grace = job.request.grace;
            match &job.phase {
                Phase::Suspending(s) => {
                    let reason = format!("suspended by {}", s.by);
                    orders.push(Order::Stop { job: job.id, attempt, epoch, grace, reason });
                }
                Phase::Stopping(_) => {
                    let reason = "being stopped".to_owned();
                    orders.push(Order::Stop { job: job.id, attempt, epoch, grace, reason });
                }
                // Agents that wait for another epoch may have been told nothing of it, and have nothing to report.
                Phase::Starting(gang) if gang.epoch > 1 => {
                    let action = lifecycle::confirm_again(job);
                    orders.extend(action.and_then(|action| self.order(job.id, action)));
                }
                Phase::Queued
                | Phase::Starting(_)
                | Phase::Running(_)
                | Phase::Succeeded
                | Phase::Failed(_)
                | Phase::Cancelled { .. } => {}
            }
        }
        orders
    }

    /// Takes inputs, decides, and makes all of it durable in one transaction.
    ///
    /// # Errors
    /// If the store refused the batch. Then nothing of it happened, and this
    /// engine must be dropped and opened again.
    pub fn turn(&mut self, inputs: &[Input], wall: Time) -> Result<Turn, StoreError> {
        self.now = self.now.max(wall);
        let mut work = Work::default();
        let mut answers = Vec::with_capacity(inputs.len());
        for input in inputs {
            let answer = self.take(input, &mut work)?;
            answers.push(answer);
        }
        while let Some((due, job)) = self.deadlines.first().copied().filter(|(t, _)| self.kept_at(*t) <= self.now) {
            self.deadlines.remove(&(due, job));
            self.advance(job, &Event::Deadline, self.now, &mut work);
        }
        let planned = self.timed(Engine::make_plan);
        for decision in std::mem::take(&mut self.plan.decisions) {
            work.journal.push(serde_json::to_string(&decision).unwrap_or_default());
            self.carry_out(decision, &mut work);
        }
        self.tidy_drains(&mut work);
        self.note_estimates(&mut work);
        self.drop_unwanted_environments(&mut work);
        self.keep(&mut work);
        let changed: Vec<JobId> = work.jobs.keys().copied().collect();
        let orders = std::mem::take(&mut work.orders);
        let batch = self.batch(work);
        #[cfg(test)]
        let (batch, orders) = self.planted.turn(batch, orders);
        let written = !batch.is_empty();
        if written {
            self.store.commit(&batch)?;
            self.generation = batch.generation;
        }
        let Batch { jobs, moments, .. } = batch;
        let ended = jobs.into_iter().filter(|job| job.phase.is_terminal()).collect();
        Ok(Turn { answers, orders: self.stamp(orders), changed, ended, moments, planned, written })
    }

    /// Does something, and says how long it took if there is a stopwatch.
    fn timed(&mut self, work: impl FnOnce(&mut Self)) -> Option<Duration> {
        let begun = self.stopwatch.map(|now| now());
        work(self);
        Some(self.stopwatch?().saturating_duration_since(begun?))
    }

    fn make_plan(&mut self) {
        #[cfg(test)]
        if !self.planted.sees() {
            self.plan = schedule::plan(&self.planted.planned(&self.snapshot), &mut Memo::default(), self.now);
            return;
        }
        if let Some(audit) = &mut self.audit {
            let fresh = schedule::plan(&self.snapshot, &mut Memo::default(), self.now);
            self.plan = schedule::plan(&self.snapshot, &mut self.memo, self.now);
            if fresh != self.plan {
                audit
                    .wrong
                    .push(format!("with an empty memo the plan is {fresh:?}, with the engine's {:?}", self.plan));
            }
            audit.decided.clone_from(&self.plan.decisions);
        } else {
            self.plan = schedule::plan(&self.snapshot, &mut self.memo, self.now);
        }
        #[cfg(test)]
        self.planted.decisions(&mut self.plan.decisions);
    }

    /// Notes when new jobs that wait are expected to start, so that estimates are judged by what comes of them.
    fn note_estimates(&mut self, work: &mut Work) {
        if self.now.since(self.estimates.0) >= Span::seconds(1) {
            self.estimates = (self.now, 0);
        }
        for record in &work.records {
            let id = record.id;
            if self.estimates.1 >= ESTIMATES {
                return;
            }
            if !self.snapshot.waiting.contains(&id) {
                continue;
            }
            self.estimates.1 += 1;
            let estimate = schedule::estimate(&self.snapshot, &mut self.memo, &self.plan, id, self.now);
            if let (Some(_), Some(job)) = (estimate, self.snapshot.jobs.get_mut(&id)) {
                job.estimate = estimate;
                work.jobs.insert(id, job.clone());
            }
        }
    }

    /// When a turn is due though nothing is heard.
    #[must_use]
    pub fn next_wake(&self) -> Option<Time> {
        let deadline = self.deadlines.first().map(|(t, _)| self.kept_at(*t));
        [deadline, self.plan.next_wake].into_iter().flatten().min()
    }

    /// When a deadline is kept: not before agents could have been heard.
    fn kept_at(&self, deadline: Time) -> Time {
        deadline.max(self.listen_until)
    }

    /// The state as of the last turn.
    #[must_use]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The plan of the last turn; its decisions are carried out and gone.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The records of the live jobs.
    #[must_use]
    pub fn records(&self) -> &BTreeMap<JobId, Arc<JobRecord>> {
        &self.records
    }

    /// The engine's time: monotonic, never before the last commit.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// The term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// The number of the last commit.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Gives the store back, for example to open it again.
    pub fn into_store(self) -> S {
        self.store
    }

    fn stamp(&self, orders: Vec<Order>) -> Vec<Stamped> {
        let stamp = |order| Stamped { term: self.term, generation: self.generation, order };
        orders.into_iter().map(stamp).collect()
    }

    fn advance(&mut self, job: JobId, event: &Event, at: Time, work: &mut Work) {
        if let Some(before) = self.snapshot.jobs.get(&job).and_then(lifecycle::deadline) {
            self.deadlines.remove(&(before, job));
        }
        #[cfg(test)]
        let event = &self.planted.before(event, &self.snapshot, job);
        let out = lifecycle::advance(&mut self.snapshot, job, event, at, self.now);
        #[cfg(test)]
        let out = self.planted.after(out, &mut self.snapshot, job);
        #[cfg(test)]
        let touch = self.planted.touches();
        #[cfg(not(test))]
        let touch = true;
        if touch {
            self.memo.touch(job);
        }
        if let Some(deadline) = self.snapshot.jobs.get(&job).and_then(lifecycle::deadline) {
            self.deadlines.insert((deadline, job));
        }
        work.nodes.extend(out.nodes);
        work.entries.extend(out.entries);
        work.moments.extend(out.moments);
        work.usage.extend(out.usage);
        work.quarantines |= out.quarantines;
        work.history |= out.history;
        for action in out.actions {
            work.orders.extend(self.order(job, action));
        }
        if let Some(after) = out.job {
            // Its environment may have been given up while it ran.
            if let (Phase::Queued, Some(hash)) = (&after.phase, &after.environment) {
                self.want_environment(hash, work);
            }
            let ended = ending(&after.phase);
            if ended.is_some() {
                self.records.remove(&job);
                for dependency in &after.after {
                    if let Some(others) = self.dependants.get_mut(&dependency.job) {
                        others.remove(&job);
                    }
                }
            }
            work.jobs.insert(job, after);
            if let Some(ending) = ended {
                // In the same transaction, so that nobody can go on waiting for what has ended.
                for other in self.dependants.remove(&job).unwrap_or_default() {
                    self.advance(other, &Event::DependencyEnded { job, ending }, self.now, work);
                }
            }
        }
    }

    /// Switches a bug on.
    #[cfg(test)]
    pub(crate) fn plant(&mut self, planted: Planted) {
        self.planted = planted;
        planted.opened(&mut self.snapshot);
    }

    /// Notes what a person did.
    fn act(&self, kind: ActKind, name: &str, what: String, whose: (&str, Option<&String>), work: &mut Work) {
        let (by, reason) = (whose.0.to_owned(), whose.1.cloned());
        work.acts.push(Act { at: self.now, by, what, kind, name: name.to_owned(), reason });
    }

    fn order(&self, job: JobId, action: Action) -> Option<Order> {
        Some(match action {
            Action::Launch { attempt, placement } => {
                let name =
                    |(n, _): &(NodeId, _)| self.snapshot.nodes.get(n).map(|n| n.name.clone()).unwrap_or_default();
                let nodes = placement.0.iter().map(name).collect();
                let gang = self.snapshot.jobs.get(&job).and_then(|j| j.phase.gang());
                let workers = gang.map_or(&[][..], |g| &g.workers);
                let heard = (0u32..).zip(workers).filter(|(_, w)| w.state > WorkerState::Launched).map(|(n, _)| n);
                let record = self.records.get(&job)?.clone();
                Order::Launch { record, attempt, placement, nodes, heard: heard.collect() }
            }
            Action::Confirm { attempt, epoch, rank0, best_step } => {
                Order::Confirm { job, attempt, epoch, rank0, best_step }
            }
            Action::Stop { attempt, epoch, grace, reason } => Order::Stop { job, attempt, epoch, grace, reason },
            Action::Remove { attempt } => Order::Remove { job, attempt },
        })
    }

    fn prepare(&self, hash: &EnvironmentHash) -> Option<Order> {
        let wants = |j: &&Job| j.environment.as_ref() == Some(hash);
        let job = self.snapshot.jobs.values().find(wants)?;
        Some(Order::Prepare { record: self.records.get(&job.id)?.clone() })
    }

    fn want_environment(&mut self, hash: &EnvironmentHash, work: &mut Work) {
        if !self.snapshot.environments.contains_key(hash) {
            self.snapshot.environments.insert(hash.clone(), EnvironmentState::Preparing);
            work.environments.insert(hash.clone());
            work.orders.extend(self.prepare(hash));
        }
    }

    /// Environments are watched only as long as a live job wants them.
    fn drop_unwanted_environments(&mut self, work: &mut Work) {
        let ended = |j: &Job| j.phase.is_terminal().then(|| j.environment.clone()).flatten();
        let candidates: BTreeSet<EnvironmentHash> = work.jobs.values().filter_map(ended).collect();
        for hash in candidates {
            if !self.snapshot.jobs.values().any(|j| j.environment.as_ref() == Some(&hash)) {
                if self.snapshot.environments.remove(&hash) == Some(EnvironmentState::Preparing) {
                    work.orders.push(Order::Abandon { hash: hash.clone() });
                }
                work.environments.insert(hash);
            }
        }
    }

    fn batch(&self, work: Work) -> Batch {
        let snapshot = &self.snapshot;
        Batch {
            term: self.term,
            generation: self.generation + 1,
            at: self.now,
            records: work.records,
            jobs: work.jobs.into_values().collect(),
            nodes: work.nodes.iter().filter_map(|id| snapshot.nodes.get(id).cloned()).collect(),
            queues: changed(work.queues, &snapshot.queues),
            pools: changed(work.pools, &snapshot.pools),
            policy: work.policy.then(|| snapshot.policy.clone()),
            usage: changed(work.usage, &snapshot.usage),
            history: work.history.then(|| snapshot.history.clone()),
            drains: work.drains.then(|| snapshot.drains.clone()),
            quarantines: work.quarantines.then(|| snapshot.quarantines.clone()),
            environments: changed(work.environments, &snapshot.environments),
            paused: work.paused.then(|| snapshot.paused.clone()),
            entries: work.entries,
            open: work.nodes.iter().map(|id| (*id, snapshot.ledger.node(*id).to_vec())).collect(),
            moments: work.moments,
            acts: work.acts,
            journal: work.journal,
            ended: BTreeMap::new(),
            beyond: None,
        }
    }
}

/// What there is of what changed.
fn changed<K: Ord, V: Clone>(keys: BTreeSet<K>, map: &BTreeMap<K, V>) -> Vec<(K, Option<V>)> {
    let row = |key: K| {
        let value = map.get(&key).cloned();
        (key, value)
    };
    keys.into_iter().map(row).collect()
}

/// The queue that exists from the beginning.
#[must_use]
pub fn default_queue() -> Queue {
    Queue::open("default")
}
