//! Random batches that a store must take, and a model of what it then holds.

use super::documents;
use aviflow_core::gpus::{GpuSet, Slots};
use aviflow_core::health::culprit::Because;
use aviflow_core::health::xid::Asks;
use aviflow_core::health::{Finding, Kind};
use aviflow_core::ledger::{Entry, GpuState, Open, Owner};
use aviflow_core::lifecycle::{Moment, MomentKind};
use aviflow_core::model::{
    Address, Beneficiary, Cause, Checkpoint, Claim, Counters, Dependency, Ending, EnvironmentHash, EnvironmentState,
    Eviction, EvictionCause, Exit, Failure, Gang, Intent, Job, JobId, JobKey, Node, NodeCondition, NodeId, NodeRange,
    Phase, Placement, Refusal, Request, Stopping, Suspending, Topology, TurnedOut, Why, Worker, WorkerState, XidSeen,
};
use aviflow_core::time::{Span, Time};
use aviflow_engine::ports::{Act, Batch, JobRecord, Loaded};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers that look random and come out the same each time (`SplitMix64`).
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// Any number, the next one.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.number() % n
    }

    pub(super) fn index(&mut self, n: u64) -> usize {
        usize::try_from(self.below(n)).unwrap_or(0)
    }

    pub(super) fn small(&mut self, n: u32) -> u32 {
        u32::try_from(self.below(u64::from(n))).unwrap_or(0)
    }

    pub(super) fn time(&mut self) -> Time {
        Time(i64::try_from(self.below(1 << 41)).unwrap_or(0))
    }

    pub(super) fn chance(&mut self) -> bool {
        self.below(2) == 0
    }

    pub(super) fn text(&mut self) -> String {
        let odd = ["", "a", "it's \"quoted\"", "line\nbreak", "ünïcödé ✓", "%_; DROP TABLE jobs", "\u{0}nul"];
        odd[usize::try_from(self.below(odd.len() as u64)).unwrap_or(0)].to_owned()
    }
}

/// A job with its document and its end.
pub type Whole = (Job, Arc<JobRecord>, Option<Time>);

/// What a store should hold after the batches that came from here.
#[derive(Clone, Debug)]
pub struct World {
    /// What it should load.
    pub model: Loaded,
    /// Every job there ever was.
    pub all: BTreeMap<JobId, Whole>,
    /// Every moment.
    pub moments: Vec<Moment>,
    /// Every act.
    pub acts: Vec<Act>,
}

impl World {
    /// The world of a store that holds nothing.
    #[must_use]
    pub fn new(model: Loaded) -> World {
        World { model, all: BTreeMap::new(), moments: Vec::new(), acts: Vec::new() }
    }

    /// The next batch, with everything in it that may be in one.
    pub fn batch(&mut self, rng: &mut Rng) -> Batch {
        let mut batch = self.next_batch();
        for _ in 0..rng.below(3) {
            let job = random_job(rng, JobId(self.model.last_job + 1 + batch.records.len() as u64));
            batch.records.push(record(&job));
            batch.jobs.push(job);
        }
        let live: Vec<Job> = self.model.snapshot.jobs.values().cloned().collect();
        for job in live {
            if rng.below(3) == 0 {
                let changed = random_job(rng, job.id);
                batch.jobs.push(Job { key: job.key, user: job.user, submitted: job.submitted, ..changed });
            }
        }
        for id in 1..5 {
            if rng.chance() {
                batch.nodes.push(random_node(rng, NodeId(id)));
            }
            if rng.chance() {
                batch.open.push((NodeId(id), (0..rng.below(4)).map(|_| random_open(rng)).collect()));
            }
        }
        if rng.chance() {
            batch.queues.push(documents::queue(rng));
        }
        if rng.chance() {
            batch.pools.push(documents::pool(rng));
        }
        batch.policy = (rng.below(4) == 0).then(|| documents::policy(rng));
        if rng.chance() {
            batch.usage.push(documents::usage(rng));
        }
        batch.history = (rng.below(4) == 0).then(|| documents::history(rng));
        batch.drains = (rng.below(3) == 0).then(|| documents::drains(rng, self.model.last_drain));
        batch.quarantines = (rng.below(4) == 0).then(|| documents::quarantines(rng));
        batch.acts = (0..rng.below(3)).map(|_| documents::act(rng, batch.at)).collect();
        if rng.chance() {
            let state = match rng.below(3) {
                0 => None,
                1 => Some(EnvironmentState::Preparing),
                _ => Some(EnvironmentState::Ready),
            };
            batch.environments.push((EnvironmentHash(format!("{:064x}", rng.below(3))), state));
        }
        batch.paused = match rng.below(4) {
            0 => Some(None),
            1 => Some(Some(rng.text())),
            _ => None,
        };
        batch.entries = (0..rng.below(4)).map(|_| random_entry(rng)).collect();
        batch.moments = batch.jobs.iter().map(|j| random_moment(rng, j.id)).collect();
        batch.journal = (0..rng.below(3)).map(|_| rng.text()).collect();
        self.apply(&batch);
        batch
    }

    /// A batch that submits one job.
    pub fn submit(&mut self, rng: &mut Rng) -> (Job, Batch) {
        let mut batch = self.next_batch();
        let job = Job { phase: Phase::Queued, ..random_job(rng, JobId(self.model.last_job + 1)) };
        batch.records.push(record(&job));
        batch.jobs.push(job.clone());
        self.apply(&batch);
        (job, batch)
    }

    /// A batch that changes one job.
    pub fn change(&mut self, job: Job) -> Batch {
        let mut batch = self.next_batch();
        batch.jobs.push(job);
        self.apply(&batch);
        batch
    }

    fn next_batch(&self) -> Batch {
        Batch {
            term: self.model.term,
            generation: self.model.generation + 1,
            at: self.model.clock + Span(1_234),
            ..Batch::default()
        }
    }

    /// Says what a store holds after a batch, in other words than any store does.
    fn apply(&mut self, batch: &Batch) {
        let model = &mut self.model;
        model.generation = batch.generation;
        model.clock = batch.at;
        for r in &batch.records {
            model.records.insert(r.id, Arc::clone(r));
        }
        for job in &batch.jobs {
            model.last_job = model.last_job.max(job.id.0);
            let record = Arc::clone(&model.records[&job.id]);
            model.snapshot.waiting.remove(&job.id);
            let ended = job.phase.is_terminal().then_some(batch.at);
            self.all.insert(job.id, (job.clone(), record, ended));
            if ended.is_some() {
                model.snapshot.jobs.remove(&job.id);
                model.records.remove(&job.id);
                continue;
            }
            if job.phase == Phase::Queued {
                model.snapshot.waiting.insert(job.id);
            }
            model.snapshot.jobs.insert(job.id, job.clone());
        }
        for node in &batch.nodes {
            model.last_node = model.last_node.max(node.id.0);
            model.snapshot.nodes.insert(node.id, node.clone());
        }
        replace(&mut model.snapshot.queues, &batch.queues);
        replace(&mut model.snapshot.pools, &batch.pools);
        replace(&mut model.snapshot.usage, &batch.usage);
        replace(&mut model.snapshot.environments, &batch.environments);
        if let Some(policy) = &batch.policy {
            model.snapshot.policy = policy.clone();
        }
        if let Some(history) = &batch.history {
            model.snapshot.history = history.clone();
        }
        if let Some(drains) = &batch.drains {
            model.last_drain = drains.iter().map(|d| d.id).fold(model.last_drain, u64::max);
            model.snapshot.drains.clone_from(drains);
        }
        if let Some(quarantines) = &batch.quarantines {
            model.snapshot.quarantines.clone_from(quarantines);
        }
        for (node, open) in &batch.open {
            model.snapshot.ledger.restore(*node, open.clone());
        }
        if let Some(paused) = &batch.paused {
            model.snapshot.paused.clone_from(paused);
        }
        self.moments.extend(batch.moments.iter().cloned());
        self.acts.extend(batch.acts.iter().cloned());
    }
}

fn replace<K: Ord + Clone, V: Clone>(map: &mut BTreeMap<K, V>, changes: &[(K, Option<V>)]) {
    for (key, value) in changes {
        map.remove(key);
        map.extend(value.iter().map(|v| (key.clone(), v.clone())));
    }
}

/// The document of a job.
#[must_use]
pub fn record(job: &Job) -> Arc<JobRecord> {
    let document = json!({
        "id": job.id, "key": job.key, "user": job.user, "submitted": job.submitted,
        "spec": {
            "name": job.key.name, "queue": job.request.queue, "priority": "normal",
            "nodes": { "min": 1, "max": 2 }, "gpusPerNode": 8, "run": ["python", "train.py", "--lr=3e-4"],
            "processes": "perNode", "env": { "A": "b" }, "resources": { "cpuPerGpu": 0.1 },
            "preemptible": true, "retry": { "failures": 3 },
        },
        "provenance": {
            "code": { "sha256": format!("{:064x}", job.id.0), "bytes": 7, "files": 1 },
            "environment": { "name": "e", "version": 1, "hash": "h", "python": ">=3.11", "locks": ["l1", "l2"] },
        },
    });
    Arc::new(serde_json::from_value(document).expect("the document has the form of a record"))
}

fn random_job(rng: &mut Rng, id: JobId) -> Job {
    let key = JobKey { namespace: "default".into(), name: format!("train-{}", id.0) };
    let user = ["ada", "grace", "ünal"][usize::try_from(rng.below(3)).unwrap_or(0)].to_owned();
    let request = Request {
        queue: ["main", "research"][usize::try_from(rng.below(2)).unwrap_or(0)].into(),
        priority: 1 - i32::try_from(rng.below(3)).unwrap_or(0),
        nodes: NodeRange { min: 1, max: 1 + rng.small(64) },
        gpus_per_node: 1 + rng.small(8),
        gpu_types: if rng.chance() { vec!["H100".into(), "A100".into()] } else { Vec::new() },
        ranks_per_node: 1,
        time_limit: rng.chance().then(|| Span(rng.time().0)),
        preemptible: rng.chance(),
        failures_allowed: rng.small(5),
        grace: Span::seconds(30),
        checkpoint_every: rng.chance().then(|| Span(rng.time().0)),
        topology: Topology { require: rng.chance().then(|| rng.text()), ..Topology::default() },
        keep_on_failure: rng.chance().then(|| Span(rng.time().0)),
    };
    let environment = rng.chance().then(|| EnvironmentHash(format!("{:064x}", rng.below(3))));
    Job {
        phase: random_phase(rng),
        attempts: rng.small(9),
        counters: Counters {
            failures: rng.small(9),
            node_failures: rng.small(9),
            suspensions: rng.small(9),
            unready: rng.small(9),
        },
        ran: Span(rng.time().0),
        best_step: rng.chance().then(|| rng.below(1 << 40)),
        checkpoint: rng.chance().then(|| Checkpoint {
            step: rng.below(1 << 40),
            path: rng.text(),
            at: rng.time(),
            attempt: rng.small(9),
        }),
        not_before: rng.chance().then(|| rng.time()),
        refused: rng.chance().then(|| random_refusal(rng)),
        refusals: rng.small(5),
        held: rng.chance().then(|| rng.text()),
        claim: rng.chance().then(|| Claim {
            placement: Placement(vec![(NodeId(rng.small(9)), Slots(rng.number()))]),
            victims: vec![(JobId(rng.below(9)), rng.small(9))],
            cause: EvictionCause::Reclaim,
            since: rng.time(),
        }),
        after: (0..rng.below(3)).map(|n| random_dependency(rng, n)).collect(),
        eviction: rng.chance().then(|| Eviction {
            cause: EvictionCause::Turn,
            beneficiary: rng
                .chance()
                .then(|| Beneficiary { job: JobId(7), key: JobKey { namespace: "a".into(), name: rng.text() } }),
            since: rng.time(),
            deadline: rng.time(),
        }),
        turned_out: rng.chance().then(|| TurnedOut { cause: EvictionCause::Drain, beneficiary: None, at: rng.time() }),
        estimate: rng.chance().then(|| documents::estimate(rng)),
        startup: rng.chance().then(|| Span(rng.time().0)),
        preempted: rng.small(9),
        gpu_time: Span(rng.time().0),
        saves_on_request: rng.chance(),
        last_nodes: vec![NodeId(rng.small(9))],
        avoid: vec![NodeId(rng.small(9))],
        ..Job::submitted(id, key, user, request, environment, rng.time())
    }
}

fn random_dependency(rng: &mut Rng, n: u64) -> Dependency {
    let on = [Ending::Succeeded, Ending::Failed, Ending::Ended][rng.index(3)];
    Dependency { job: JobId(n), name: rng.text(), on, met: [None, Some(false), Some(true)][rng.index(3)] }
}

fn random_phase(rng: &mut Rng) -> Phase {
    match rng.below(9) {
        0 | 1 => Phase::Queued,
        2 => Phase::Starting(random_gang(rng)),
        3 => Phase::Running(random_gang(rng)),
        4 => Phase::Suspending(Suspending { gang: random_gang(rng), by: rng.text(), asked: rng.chance() }),
        5 => Phase::Stopping(Stopping {
            gang: random_gang(rng),
            intent: random_intent(rng),
            kept_until: rng.chance().then(|| rng.time()),
        }),
        6 => Phase::Succeeded,
        7 => Phase::Failed(random_failure(rng)),
        _ => Phase::Cancelled { by: rng.text() },
    }
}

fn random_intent(rng: &mut Rng) -> Intent {
    match rng.below(7) {
        0 => Intent::Cancel { by: rng.text() },
        1 => Intent::TimeLimit,
        2 => Intent::Failure(random_failure(rng)),
        3 => Intent::NodeFailure(random_failure(rng)),
        4 => Intent::Requeue,
        5 => Intent::Refused { refusal: random_refusal(rng), lasting: rng.chance() },
        _ => Intent::Unready { missing: vec![0, 3] },
    }
}

fn random_refusal(rng: &mut Rng) -> Refusal {
    Refusal { attempt: rng.small(9), worker: rng.small(9), node: NodeId(rng.small(9)), reason: rng.text() }
}

fn random_failure(rng: &mut Rng) -> Failure {
    let (attempt, worker, node) = (rng.small(9), rng.small(9), NodeId(rng.small(9)));
    let cause = match rng.below(6) {
        0 => Cause::Rank { attempt, rank: rng.small(9), worker, node, exit: random_exit(rng) },
        1 => Cause::WorkerLost { attempt, worker, node, reason: rng.text() },
        2 => Cause::Launch { attempt, worker, node, reason: rng.text() },
        3 => Cause::TimeLimit { limit: Span(7) },
        4 => {
            let (rank, node, gpu) = (Some(3), Some(node), Some(1));
            let (because, asks) = (Some(Because::OtherStack), Some(Asks::Cordon));
            let finding =
                Finding { kind: Kind::Hang, at: rng.time(), rank, node, gpu, because, asks, detail: rng.text() };
            Cause::Found { attempt, finding }
        }
        _ => Cause::Environment { reason: rng.text() },
    };
    Failure { cause, exit_code: 125, at: rng.time() }
}

fn random_exit(rng: &mut Rng) -> Exit {
    let last_lines = (0..rng.below(3)).map(|_| rng.text()).collect();
    let why = rng.chance().then(|| Why { kind: Kind::Cuda, consequence: rng.chance(), line: rng.text() });
    Exit { code: 137, signal: rng.chance().then_some(9), at: rng.time(), last_lines, stopping: rng.chance(), why }
}

fn random_gang(rng: &mut Rng) -> Gang {
    let states = [WorkerState::Launched, WorkerState::Ready, WorkerState::Up, WorkerState::Gone];
    let workers = (0..1 + rng.small(3))
        .map(|i| Worker {
            node: NodeId(i + 1),
            slots: Slots(rng.number()),
            state: states[usize::try_from(rng.below(4)).unwrap_or(0)],
            address: rng.chance().then(|| Address { host: "10.0.0.1".into(), port: 29_500 }),
            ended: rng.chance().then(|| rng.time()),
            next_port: rng.chance().then_some(29_501),
            exits: (0..rng.small(3)).map(|rank| (rank * 8, random_exit(rng))).collect(),
        })
        .collect();
    Gang {
        attempt: 1 + rng.small(9),
        epoch: 1 + rng.small(9),
        placed: rng.time(),
        up: rng.chance().then(|| rng.time()),
        workers,
        stepped: rng.chance(),
        repeating: rng.chance(),
        again: rng.chance().then(|| rng.time()),
        xids: vec![XidSeen { at: rng.time(), node: NodeId(1), gpu: Some(3), asks: Asks::ResetGpu }],
    }
}

fn random_node(rng: &mut Rng, id: NodeId) -> Node {
    let conditions = [NodeCondition::Ready, NodeCondition::Cordoned, NodeCondition::Gone];
    let (pool, gpus) = (rng.text(), Slots(rng.number()));
    Node {
        held: Slots(rng.number()),
        unhealthy: Slots(rng.number()),
        quarantined: Slots(rng.number()),
        quarantine: rng.chance().then(|| rng.text()),
        leaving: Slots::NONE,
        others: rng.small(9),
        foreign: Slots(rng.number()),
        cordoned: rng.chance(),
        closed: rng.chance().then(|| rng.text()),
        reported: (0..rng.below(3)).map(|_| rng.text()).collect(),
        claimed: Slots(rng.number()),
        path: (0..rng.below(3)).map(|_| rng.text()).collect(),
        drain: rng.chance().then(|| documents::drain(rng)),
        condition: conditions[usize::try_from(rng.below(3)).unwrap_or(0)],
        ..Node::new(id, &format!("n{}", id.0), &pool, "H100", gpus)
    }
}

fn random_state(rng: &mut Rng) -> GpuState {
    GpuState::ALL[usize::try_from(rng.below(15)).unwrap_or(0)]
}

fn random_owner(rng: &mut Rng) -> Option<Owner> {
    rng.chance().then(|| Owner { job: JobId(1 + rng.below(9)), attempt: 1 })
}

fn random_open(rng: &mut Rng) -> Open {
    Open { slots: Slots(rng.number()), state: random_state(rng), owner: random_owner(rng), from: rng.time() }
}

fn random_entry(rng: &mut Rng) -> Entry {
    let from = rng.time();
    let gpus: GpuSet = (1..4).map(|n| (NodeId(n), Slots(rng.number()))).collect();
    Entry { gpus, state: random_state(rng), owner: random_owner(rng), from, to: from + Span(1 + rng.time().0) }
}

fn random_moment(rng: &mut Rng, job: JobId) -> Moment {
    let kind = match rng.below(5) {
        0 => MomentKind::Submitted { by: rng.text() },
        1 => MomentKind::Failed { failure: random_failure(rng) },
        2 => MomentKind::Facts { values: BTreeMap::from([(rng.text(), rng.text())]) },
        3 => MomentKind::QueuedAgain { not_before: Some(rng.time()) },
        _ => MomentKind::TimeLimitReached,
    };
    Moment { job, at: rng.time(), attempt: rng.small(4), kind }
}
