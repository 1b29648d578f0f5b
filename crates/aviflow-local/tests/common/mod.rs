//! A body with everything around it in memory, and an agent played by the test.

#![allow(dead_code, reason = "each test file uses its part, one of them all")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use aviflow_agent::protocol::{Event, FromAgent, ToAgent, WorkerSpec, files, wire};
use aviflow_core::gpus::Slots;
use aviflow_core::model::{JobId, JobKey, NodeId, Placement, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Cluster, JobRecord, Observation, Order, Stamped, WorkerEvent};
use aviflow_engine::telemetry::{BuildProgress, Point, StreamKey, Telemetry};
use aviflow_local::{LocalCluster, LocalConfig, NodeConfig};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// After this long a test that waits gives up: nothing depends on it otherwise.
const LIMIT: Duration = Duration::from_secs(120);

/// Something shared that tests wait for.
pub struct Watched<T>(Mutex<T>, Condvar);

impl<T: Default> Default for Watched<T> {
    fn default() -> Self {
        Watched(Mutex::default(), Condvar::new())
    }
}

impl<T: std::fmt::Debug> Watched<T> {
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.0.lock().unwrap());
        self.1.notify_all();
        result
    }

    pub fn wait<R>(&self, what: &str, mut find: impl FnMut(&mut T) -> Option<R>) -> R {
        let until = Instant::now() + LIMIT;
        let mut value = self.0.lock().unwrap();
        loop {
            if let Some(found) = find(&mut value) {
                return found;
            }
            let left = until.checked_duration_since(Instant::now());
            let left = left.unwrap_or_else(|| panic!("never saw {what}; there is {value:?}"));
            value = self.1.wait_timeout(value, left).unwrap().0;
        }
    }
}

/// Waits for something on the disk or among the processes.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < until, "it never came that {what}");
        std::thread::yield_now();
    }
}

#[derive(Debug, Default)]
pub struct Kept {
    pub logs: BTreeMap<StreamKey, String>,
    pub points: Vec<Point>,
    pub builds: Vec<BuildProgress>,
    /// Whether the disk takes no log.
    pub full: bool,
    pub refused: usize,
}

#[derive(Default)]
pub struct Memory(pub Watched<Kept>);

impl Telemetry for Memory {
    fn log_have(&self, stream: StreamKey) -> u64 {
        self.0.change(|kept| kept.logs.get(&stream).map_or(0, |log| log.len() as u64))
    }

    fn log_append(&self, stream: StreamKey, offset: u64, text: &str) -> std::io::Result<u64> {
        self.0.change(|kept| {
            if kept.full {
                kept.refused += 1;
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            let log = kept.logs.entry(stream).or_default();
            let have = log.len().saturating_sub(usize::try_from(offset).unwrap());
            log.push_str(text.get(have..).unwrap_or_default());
            Ok(log.len() as u64)
        })
    }

    fn progress(&self, _: JobId, point: Point) {
        self.0.change(|kept| kept.points.push(point));
    }

    fn build(&self, progress: BuildProgress) {
        self.0.change(|kept| kept.builds.push(progress));
    }

    fn forget_build(&self, _: &str) {}
}

pub type Durable = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct Reports {
    pub seen: Vec<Observation>,
    /// What was reported and is not durable yet.
    pub pending: Vec<Durable>,
    /// Whether reports wait in `pending`.
    pub hold: bool,
}

impl std::fmt::Debug for Reports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#?}", self.seen)
    }
}

pub struct Body {
    pub home: PathBuf,
    pub cluster: LocalCluster,
    pub reports: Arc<Watched<Reports>>,
    pub telemetry: Arc<Memory>,
    pub term: u64,
    runtime: tokio::runtime::Runtime,
}

/// An agent that only holds its lock; its words are the test's.
pub fn silent_agent() -> Vec<OsString> {
    [
        "/bin/sh",
        "-c",
        r#"echo "{\"pid\": $$, \"startTime\": $(cut -d " " -f 22 /proc/$$/stat)}" > "$0/alive.json"; exec sleep 3600"#,
    ]
    .map(OsString::from)
    .to_vec()
}

pub fn config(home: &Path) -> LocalConfig {
    let objects = home.join("objects");
    let find = move |sha256: &str| {
        let path = objects.join(sha256);
        path.metadata().map(|_| path.clone())
    };
    let mut config = LocalConfig::new(home.to_owned(), silent_agent(), Arc::new(find));
    config.nodes = ["n0", "n1"].map(|name| NodeConfig { name: name.to_owned(), gpus: 8 }).to_vec();
    config
}

/// With agents that are real.
pub fn real(home: &Path) -> LocalConfig {
    let mut config = config(home);
    config.agent = [env!("CARGO_BIN_EXE_aviflow-local-helper"), "agent"].map(Into::into).to_vec();
    config
}

impl Body {
    pub fn start(config: LocalConfig, term: u64) -> Body {
        Body::start_with(config, term, Arc::default())
    }

    pub fn start_with(config: LocalConfig, term: u64, telemetry: Arc<Memory>) -> Body {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let reports: Arc<Watched<Reports>> = Arc::default();
        let into = reports.clone();
        let report = move |observation, durable: Option<Durable>| {
            let now = into.change(|reports| {
                reports.seen.push(observation);
                let durable = durable?;
                if reports.hold {
                    reports.pending.push(durable);
                    return None;
                }
                Some(durable)
            });
            if let Some(durable) = now {
                durable();
            }
        };
        let home = config.home.clone();
        let cluster = LocalCluster::start(config, telemetry.clone(), report, runtime.handle().clone()).unwrap();
        Body { home, cluster, reports, telemetry, term, runtime }
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn order(&mut self, order: Order) {
        self.cluster.apply(&[Stamped { term: Term(self.term), generation: 1, order }]);
    }

    pub fn reconcile(&mut self, live: &[(JobId, u32)]) {
        self.order(Order::Reconcile { live: live.to_vec() });
    }

    pub fn launch(&mut self, record: &Arc<JobRecord>, nodes: &[&str]) {
        let placement = Placement((0..nodes.len()).map(|n| (NodeId(n as u32 + 1), Slots(1))).collect());
        let nodes = nodes.iter().map(|&n| n.to_owned()).collect();
        self.order(Order::Launch { record: record.clone(), attempt: 1, placement, nodes, heard: BTreeSet::new() });
    }

    pub fn confirm(&mut self, job: JobId, epoch: u32) {
        let rank0 = aviflow_core::model::Address { host: "127.0.0.1".to_owned(), port: 20_000 };
        self.order(Order::Confirm { job, attempt: 1, epoch, rank0, best_step: None });
    }

    /// Waits for an event of worker 0 of the job, and gives it with its age.
    pub fn wait_event<R>(&self, job: JobId, what: &str, mut find: impl FnMut(&WorkerEvent, i64) -> Option<R>) -> R {
        self.reports.wait(what, |reports| {
            reports.seen.iter().find_map(|o| match o {
                Observation::Worker { job: of, worker: 0, event, ago, .. } if *of == job => find(event, ago.0),
                _ => None,
            })
        })
    }

    pub fn wait_ready(&self, job: JobId) {
        self.wait_event(job, "ready", |e, _| matches!(e, WorkerEvent::Ready { .. }).then_some(()));
    }

    pub fn wait_refused(&self, job: JobId) -> String {
        let reason = self.wait_event(job, "a failed launch", |e, _| match e {
            WorkerEvent::LaunchFailed { reason } => Some(reason.clone()),
            _ => None,
        });
        self.wait_event(job, "its end", |e, _| matches!(e, WorkerEvent::Gone { .. }).then_some(()));
        reason
    }

    pub fn wait_lost(&self, job: JobId) -> (String, i64) {
        self.wait_event(job, "lost", |e, ago| match e {
            WorkerEvent::Lost { reason } => Some((reason.clone(), ago)),
            _ => None,
        })
    }

    pub fn folder(&self, job: JobId, worker: u32) -> PathBuf {
        self.home.join(format!("workers/{}.1.{worker}", job.0))
    }

    /// Waits for the agent's process, and connects in its place.
    pub fn agent(&self, job: JobId, worker: u32) -> Agent {
        let folder = self.folder(job, worker);
        wait_until("the agent runs", || folder.join(files::ALIVE).exists());
        Agent::connect(&folder)
    }

    /// A control plane that dies: nothing is said to anybody.
    pub fn crash(self) -> (Arc<Memory>, u64) {
        drop(self.cluster);
        self.runtime.shutdown_background();
        (self.telemetry, self.term)
    }
}

pub fn record(id: u64, change: Value) -> Arc<JobRecord> {
    record_with(id, change, json!({}))
}

pub fn record_with(id: u64, change: Value, provenance: Value) -> Arc<JobRecord> {
    let mut spec = json!({
        "name": "job", "queue": "q", "priority": "normal", "nodes": {"min": 1, "max": 1}, "gpusPerNode": 1,
        "run": ["true"], "processes": "perNode", "preemptible": true, "retry": {"failures": 0},
    });
    for (name, value) in change.as_object().unwrap() {
        spec[name] = value.clone();
    }
    Arc::new(JobRecord {
        id: JobId(id),
        key: JobKey { namespace: "default".to_owned(), name: "job".to_owned() },
        user: "ana".to_owned(),
        submitted: Time(0),
        spec: serde_json::from_value(spec).unwrap(),
        provenance: serde_json::from_value(provenance).unwrap(),
    })
}

/// The test in the place of an agent.
pub struct Agent {
    pub spec: WorkerSpec,
    read: BufReader<UnixStream>,
    write: UnixStream,
}

impl Agent {
    pub fn connect(folder: &Path) -> Agent {
        let spec: WorkerSpec = serde_json::from_slice(&std::fs::read(folder.join(files::SPEC)).unwrap()).unwrap();
        let token = spec.token.clone();
        Agent::connect_with(folder, &token)
    }

    pub fn connect_with(folder: &Path, token: &str) -> Agent {
        let spec: WorkerSpec = serde_json::from_slice(&std::fs::read(folder.join(files::SPEC)).unwrap()).unwrap();
        let aviflow_agent::protocol::Endpoint::Unix(path) = &spec.control else { panic!("no Unix socket") };
        let write = UnixStream::connect(path).unwrap();
        let read = BufReader::new(write.try_clone().unwrap());
        let mut agent = Agent { read, write, spec };
        agent.say(&FromAgent::Hello {
            protocol: aviflow_agent::protocol::PROTOCOL,
            job_id: agent.spec.job_id,
            attempt: agent.spec.attempt,
            worker: agent.spec.worker,
            token: token.to_owned(),
            pid: 1,
            epoch: 0,
            host: "127.0.0.1".to_owned(),
            port: 20_000,
            up: false,
            log: (0, 0),
            peer_port: 0,
            gpus: Vec::new(),
        });
        agent
    }

    pub fn say(&mut self, message: &FromAgent) {
        self.write.write_all(&wire::line(message)).unwrap();
    }

    pub fn event(&mut self, seq: u64, event: Event) {
        self.say(&FromAgent::Event { seq, ago_ms: 0, epoch: 1, event });
    }

    pub fn log(&mut self, offset: u64, text: &str) {
        self.say(&FromAgent::Log { offset, text: text.to_owned() });
    }

    /// The next message; none once the connection is closed.
    pub fn hear(&mut self) -> Option<ToAgent> {
        let mut line = String::new();
        match self.read.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(wire::parse(line.trim_end().as_bytes()).unwrap()),
        }
    }

    /// Waits for the connection's end.
    pub fn expect_closed(&mut self) {
        while self.hear().is_some() {}
    }

    pub fn expect<R>(&mut self, what: &str, mut find: impl FnMut(ToAgent) -> Option<R>) -> R {
        loop {
            let message = self.hear().unwrap_or_else(|| panic!("the connection ended before {what}"));
            if let Some(found) = find(message) {
                return found;
            }
        }
    }
}

/// Processes that hold a worker's lock as agents do.
pub fn holders_of(lock: &Path) -> Vec<i32> {
    let lock = lock.canonicalize().unwrap_or_else(|_| lock.to_owned());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let own = u32::try_from(pid) == Ok(std::process::id());
        if !own && std::fs::read_link(entry.path().join("fd/9")).is_ok_and(|link| link == lock) {
            found.push(pid);
        }
    }
    found
}

pub fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}
