//! What people do, and what comes of it.

mod chains;
mod decisions;
mod layers;
mod nodes;
mod people;
mod queues;
mod shared;

use super::*;
use crate::memory::MemoryStore;
use crate::ports::Observation;
use aviflow_api::spec::{JobSpec, Nodes, Processes, Provenance, Retry};
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::lint::lint;
use aviflow_core::model::{Address, Node, Quota, Request};

/// Nodes of 8 GPUs, and an engine on a store in memory.
struct World {
    store: MemoryStore,
    engine: Engine<MemoryStore>,
    now: Time,
}

fn ops() -> String {
    "ops".to_owned()
}

impl World {
    fn new() -> World {
        World::with_nodes(2)
    }

    fn with_nodes(nodes: u32) -> World {
        let store = MemoryStore::new();
        let (engine, _) = Engine::open(store.handle(), Time(1_000)).expect("a store in memory opens");
        let mut world = World { store, engine, now: Time(1_000) };
        for n in 1..=nodes {
            world.see(n);
        }
        world
    }

    fn see(&mut self, n: u32) {
        let seen = Observation::NodeSeen {
            name: format!("n{n}"),
            pool: "p".into(),
            gpu_type: "H100".into(),
            gpus: 8,
            path: Vec::new(),
        };
        self.turn(&[Input::Observe(seen)]);
    }

    /// A turn, after which nothing may be wrong and everything is durable.
    fn turn(&mut self, inputs: &[Input]) -> Turn {
        let turn = self.engine.turn(inputs, self.now).expect("a turn");
        assert_eq!(lint(self.engine.snapshot()), Vec::<String>::new());
        self.is_durable();
        turn
    }

    fn is_durable(&self) {
        let loaded = self.store.clone().acquire().expect("it can be read");
        let environments = self.engine.snapshot().environments.clone();
        let durable = Snapshot { environments, ..loaded.snapshot };
        assert_eq!(&durable, self.engine.snapshot(), "what is in memory is durable");
    }

    fn ask(&mut self, input: Input) -> Answer {
        self.turn(&[input]).answers.remove(0)
    }

    /// Gives an input that must change nothing.
    fn nothing(&mut self, input: Input) -> Answer {
        let (before, acts) = (self.engine.snapshot().clone(), self.store.acts().len());
        let answer = self.ask(input);
        assert_eq!(self.engine.snapshot(), &before);
        assert_eq!(self.store.acts().len(), acts, "what changes nothing is not recorded");
        answer
    }

    /// What a refused input says.
    #[track_caller]
    fn refused(&mut self, input: Input) -> String {
        match self.nothing(input) {
            Answer::Refused(refusal) => refusal.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn later(&mut self, seconds: i64) -> &mut World {
        self.now = self.now + Span::seconds(seconds);
        self
    }

    /// The control plane dies, and another begins.
    fn restart(&mut self) {
        let (engine, _) = Engine::open(self.store.handle(), self.now).expect("it opens again");
        self.engine = engine;
    }

    /// The newest act: who, to what, what, and why.
    fn act(&self) -> String {
        let act = self.store.acts().remove(0);
        let reason = act.reason.map(|r| format!(" ({r})")).unwrap_or_default();
        format!("{} on {} {}: {}{reason}", act.by, act.kind, act.name, act.what)
    }

    #[track_caller]
    fn submit(&mut self, submission: Submission) -> JobId {
        match self.ask(Input::Submit(Box::new(submission))) {
            Answer::Submitted(record) => record.id,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn job(&self, id: JobId) -> &Job {
        self.engine.snapshot().jobs.get(&id).expect("it lives")
    }

    #[track_caller]
    fn phase(&self, id: JobId) -> &'static str {
        self.job(id).phase.name()
    }

    fn node(&self, name: &str) -> &Node {
        self.engine.snapshot().nodes.values().find(|n| n.name == name).expect("it is there")
    }

    fn queue(&mut self, queue: Queue) -> Answer {
        self.ask(apply(queue))
    }

    fn workers(&self, job: JobId) -> (u32, u32) {
        let workers = self.job(job).phase.gang().map_or(0, |g| g.workers.len());
        (self.job(job).attempts, u32::try_from(workers).unwrap_or(0))
    }

    fn tell(&mut self, job: JobId, event: &WorkerEvent) {
        let (attempt, workers) = self.workers(job);
        let epoch = u32::from(!matches!(event, WorkerEvent::Ready { .. }));
        for worker in 0..workers {
            let event = event.clone();
            let seen = Observation::Worker { job, attempt, epoch, worker, ago: Span(0), event };
            self.turn(&[Input::Observe(seen)]);
        }
    }

    /// Its ranks come up.
    #[track_caller]
    fn run(&mut self, job: JobId) {
        self.tell(job, &WorkerEvent::Ready { address: Address { host: "h".into(), port: 1 } });
        self.tell(job, &WorkerEvent::Up);
        assert_eq!(self.phase(job), "Running");
    }

    /// Its ranks end by themselves with 0, or as they were told to.
    fn end(&mut self, job: JobId, stopping: bool) {
        let (attempt, workers) = self.workers(job);
        for worker in 0..workers {
            let event = gone(worker, stopping);
            let seen = Observation::Worker { job, attempt, epoch: 1, worker, ago: Span(0), event };
            self.turn(&[Input::Observe(seen)]);
        }
    }
}

/// The last report of a worker with one rank.
fn gone(worker: u32, stopping: bool) -> WorkerEvent {
    let code = if stopping { 143 } else { 0 };
    let end = lifecycle::RankEnd { code, signal: None, stopping, before: Span(0), last_lines: Vec::new(), why: None };
    WorkerEvent::Gone { ranks: [(worker, end)].into(), reason: None, last_step: None, next_port: None }
}

fn apply(queue: Queue) -> Input {
    Input::ApplyQueue { queue, by: ops(), reason: Some("growth".into()) }
}

/// A queue with a guarantee and perhaps a limit of H100.
fn quota(name: &str, guarantee: u32, limit: Option<u32>) -> Queue {
    let quotas = [("H100".to_owned(), Quota { guarantee, limit, weight: 1 })].into();
    Queue { quotas, ..Queue::open(name) }
}

/// A job of `nodes` nodes with `gpus` on each.
fn submission(name: &str, nodes: u32, gpus: u32) -> Submission {
    Submission {
        namespace: "default".to_owned(),
        user: "ada".to_owned(),
        request: Request::of(nodes, gpus),
        provenance: Provenance::default(),
        spec: JobSpec {
            name: name.to_owned(),
            queue: "default".to_owned(),
            priority: "normal".to_owned(),
            environment: None,
            image: None,
            requirements: None,
            code: None,
            nodes: Nodes { min: nodes, max: nodes },
            gpus_per_node: gpus,
            gpu_type: Vec::new(),
            run: vec!["true".to_owned()],
            processes: Processes::PerNode,
            env: BTreeMap::new(),
            secrets: BTreeMap::new(),
            data: Vec::new(),
            outputs: Vec::new(),
            checkpoint: None,
            resources: None,
            topology: None,
            time_limit: None,
            preemptible: true,
            retry: Retry { failures: 0 },
            keep_on_failure: None,
            after: Vec::new(),
            seed: None,
            notify: Vec::new(),
        },
    }
}

/// The same in a queue.
fn in_queue(name: &str, queue: &str, nodes: u32, gpus: u32) -> Submission {
    let mut submission = submission(name, nodes, gpus);
    submission.request.queue = queue.to_owned();
    submission
}
