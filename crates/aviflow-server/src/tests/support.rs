//! A whole control plane in a temporary folder, but for the processes.

use crate::access::Identities;
use crate::app::{Info, Parts, Server, ServerConfig};
use crate::auth::Token;
use crate::body::{Body, BodyAgent, CatalogueEntry, ExecRefusal, ExecTarget, NodeTest, Opening, Telling};
use aviflow_api::environment::{self, Description};
use aviflow_api::file::{Defaults, parse_job};
use aviflow_api::rest::{
    ChannelFrame, ChannelInput, ChannelTo, Exec, ExecFrame, JobDetail, Observed, ProcessStacks, Submit, WorkerStacks,
};
use aviflow_api::spec::{JobSpec, Provenance, ResolvedEnvironment};
use aviflow_core::lifecycle::{RankEnd, WorkerEvent};
use aviflow_core::model::{Address, EnvironmentHash, JobId};
use aviflow_core::time::Span;
use aviflow_engine::driver::{Handle, Starter, View};
use aviflow_engine::ports::{Batch, Cluster, Known, Loaded, Observation, Order, Stamped, Store, StoreError};
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use aviflow_metrics::board::Board;
use aviflow_store::{FileTelemetry, Objects, SqliteStore};
use aviflow_tls::Connection;
use axum::Router;
use axum::body::{Body as HttpBody, BodyDataStream, to_bytes};
use axum::extract::ConnectInfo;
use axum::http::{Request, Response, StatusCode};
use serde_json::Value;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tower::ServiceExt;

/// A job of one worker with two GPUs.
pub(crate) fn spec(name: &str) -> JobSpec {
    let text = format!("name: {name}\nnodes: 1\ngpusPerNode: 2\nrun: python train.py\n");
    parse_job("job.yaml", text.as_bytes(), &Defaults::default()).unwrap().spec
}

/// A submission without anything to resolve.
pub(crate) fn submission(name: &str) -> Submit {
    Submit { spec: spec(name), provenance: Provenance::default() }
}

/// A submission of `train` that waits for its environment.
pub(crate) fn with_environment() -> Submit {
    let mut submit = submission("train");
    submit.spec.environment = Some("minimal@1".into());
    submit.provenance.environment = Some(minimal());
    submit
}

/// The store, until the disk is full.
struct FullableStore {
    inner: SqliteStore,
    full: Arc<AtomicBool>,
}

impl Store for FullableStore {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        self.inner.acquire()
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        // Once, so that the engine can open it again.
        if self.full.swap(false, Ordering::SeqCst) {
            return Err(StoreError::Full("no space left".into()));
        }
        self.inner.commit(batch)
    }

    fn named(&self, key: &aviflow_core::model::JobKey) -> Result<Option<Known>, StoreError> {
        self.inner.named(key)
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        self.inner.latest(namespace, work, user)
    }
}

/// What the cluster does by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    /// Whether environments become ready.
    pub(crate) prepares: bool,
    /// Whether workers and ranks come up.
    pub(crate) starts: bool,
    /// Whether ranks end when they are told to.
    pub(crate) stops: bool,
}

impl Default for Script {
    fn default() -> Script {
        Script { prepares: true, starts: true, stops: true }
    }
}

struct FakeCluster {
    handle: Handle,
    script: Script,
    workers: BTreeMap<(JobId, u32), u32>,
}

impl FakeCluster {
    fn tell(&self, job: JobId, attempt: u32, epoch: u32, worker: u32, event: WorkerEvent) {
        let observation = Observation::Worker { job, attempt, epoch, worker, ago: Span(0), event };
        self.handle.observe(observation, None);
    }

    fn carry_out(&mut self, order: &Order) {
        match order {
            Order::Prepare { record } if self.script.prepares => {
                let environment = record.provenance.environment.as_ref().expect("it wants one");
                let hash = EnvironmentHash(environment.hash.clone());
                self.handle.observe(Observation::EnvironmentReady { hash }, None);
            }
            Order::Launch { record, attempt, placement, .. } if self.script.starts => {
                let workers = u32::try_from(placement.0.len()).expect("few");
                self.workers.insert((record.id, *attempt), workers);
                for worker in 0..workers {
                    let address = Address { host: "127.0.0.1".into(), port: 4000 };
                    self.tell(record.id, *attempt, 0, worker, WorkerEvent::Ready { address });
                }
            }
            Order::Confirm { job, attempt, epoch, .. } => {
                for worker in 0..self.workers[&(*job, *attempt)] {
                    self.tell(*job, *attempt, *epoch, worker, WorkerEvent::Up);
                }
            }
            Order::Stop { job, attempt, .. } if self.script.stops => {
                for worker in 0..self.workers.get(&(*job, *attempt)).copied().unwrap_or(0) {
                    self.tell(*job, *attempt, 0, worker, gone(143, &[]));
                }
            }
            _ => {}
        }
    }
}

impl Cluster for FakeCluster {
    fn apply(&mut self, orders: &[Stamped]) {
        orders.iter().for_each(|stamped| self.carry_out(&stamped.order));
    }
}

/// The last word of a worker with one rank.
pub(crate) fn gone(code: i32, last_lines: &[&str]) -> WorkerEvent {
    let last_lines = last_lines.iter().map(|l| (*l).to_owned()).collect();
    let end = RankEnd { code, signal: None, stopping: code == 143, before: Span(0), last_lines, why: None };
    WorkerEvent::Gone { ranks: BTreeMap::from([(0, end)]), reason: None, last_step: None, next_port: None }
}

/// A machine without processes.
pub(crate) struct FakeBody {
    folder: PathBuf,
    pub(crate) ready: AtomicBool,
    pub(crate) observes: AtomicBool,
    pub(crate) agents: Mutex<Vec<BodyAgent>>,
    pub(crate) drained: watch::Sender<bool>,
    pub(crate) execs: Mutex<Vec<(ExecTarget, Exec)>>,
    pub(crate) checks: Mutex<Vec<mpsc::Sender<ExecFrame>>>,
    pub(crate) opened: Mutex<Vec<(ExecTarget, ChannelTo)>>,
}

impl Body for FakeBody {
    fn name(&self) -> &'static str {
        "local"
    }

    fn exec(&self, target: ExecTarget, exec: Exec) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        if exec.argv == ["refused"] {
            return Err(ExecRefusal("the agent is not connected; try again in a moment".into()));
        }
        let (sender, receiver) = mpsc::channel(2);
        sender.try_send(ExecFrame::Stdout { data: "aGk=".into() }).expect("room");
        sender.try_send(ExecFrame::Exit { code: 3 }).expect("room");
        self.execs.lock().expect("lock").push((target, exec));
        Ok(receiver)
    }

    /// Says what is put in; port 1 is refused.
    fn open(&self, target: ExecTarget, _: Option<u32>, to: ChannelTo) -> Result<Opening, ExecRefusal> {
        if to == (ChannelTo::Port { port: 1 }) {
            return Err(ExecRefusal("the agent is not connected; try again in a moment".into()));
        }
        let (input, mut inputs) = mpsc::channel::<ChannelInput>(1);
        let (sender, output) = mpsc::channel(4);
        self.opened.lock().expect("lock").push((target, to));
        tokio::runtime::Handle::current().spawn(async move {
            let _ = sender.send(ChannelFrame::Opened { channel: String::new() }).await;
            while let Some(input) = inputs.recv().await {
                let _ = sender.send(ChannelFrame::Data { data: input.data }).await;
                if input.end {
                    let _ = sender.send(ChannelFrame::Exit { code: 5 }).await;
                }
            }
        });
        Ok(Opening { input, output })
    }

    /// Of rank 0 at worker 0, and nothing of the others.
    fn stacks(&self, target: ExecTarget, rank: Option<u32>) -> Telling {
        let process = ProcessStacks { rank: Some(0), main: true, note: Some("no Python".into()), ..Default::default() };
        let found = target.worker == 0 && rank.is_none_or(|rank| rank == 0);
        let processes = Vec::from_iter(found.then_some(process));
        let told = match target.worker {
            0 => Ok(WorkerStacks { processes, ..Default::default() }),
            _ if rank.is_some() => Ok(WorkerStacks::default()),
            _ => Err(ExecRefusal("the agent of worker 1 is not connected".into())),
        };
        Box::pin(std::future::ready(told))
    }

    /// Ends as the first word of its command says; with another, it never does.
    fn check(&self, test: NodeTest) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        let (sender, receiver) = mpsc::channel(2);
        sender.try_send(ExecFrame::Stdout { data: "aGk=".into() }).expect("room");
        if let Some(code) = test.run.first().and_then(|code| code.parse().ok()) {
            sender.try_send(ExecFrame::Exit { code }).expect("room");
        } else {
            self.checks.lock().expect("lock").push(sender);
        }
        Ok(receiver)
    }

    fn volumes(&self, job: JobId) -> PathBuf {
        self.folder.join(job.0.to_string())
    }

    fn agents(&self) -> Vec<BodyAgent> {
        self.agents.lock().expect("lock").clone()
    }

    fn observes(&self) -> bool {
        self.observes.load(Ordering::SeqCst)
    }

    fn observed(&self) -> Option<Observed> {
        self.observes().then(|| Observed { observing: true, ..Observed::default() })
    }

    fn environment_ready(&self, _: &str) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    fn drained(&self, _: JobId) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut drained = self.drained.subscribe();
        Box::pin(async move {
            let _ = drained.wait_for(|drained| *drained).await;
        })
    }
}

/// A control plane with two nodes of eight GPUs.
pub(crate) struct World {
    pub(crate) gpus: Arc<Board>,
    pub(crate) folder: TempDir,
    pub(crate) handle: Handle,
    pub(crate) server: Server,
    pub(crate) telemetry: Arc<FileTelemetry>,
    pub(crate) objects: Arc<Objects>,
    pub(crate) body: Arc<FakeBody>,
    pub(crate) full: Arc<AtomicBool>,
    token: Token,
    offsets: Mutex<BTreeMap<StreamKey, u64>>,
}

/// A lock that installs nothing.
pub(crate) const LOCK: &str = "# nothing\n";

/// The environment `minimal@1` as a client resolves it.
pub(crate) fn minimal() -> ResolvedEnvironment {
    let description = Description {
        name: "minimal".into(),
        version: 1,
        description: String::new(),
        owner: None,
        python: ">=3.11".into(),
        requirements: String::new(),
        env: BTreeMap::new(),
    };
    let hash = environment::hash(&description, &[LOCK.as_bytes()]);
    let locks = vec![sha256(LOCK.as_bytes())];
    ResolvedEnvironment {
        name: "minimal".into(),
        version: 1,
        hash,
        python: ">=3.11".into(),
        locks,
        env: BTreeMap::new(),
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    environment::hex(&sha2::Sha256::digest(bytes))
}

impl World {
    /// Everything comes up by itself.
    pub(crate) fn new() -> World {
        World::with(Script::default(), ServerConfig::default())
    }

    pub(crate) fn with(script: Script, config: ServerConfig) -> World {
        World::of(script, config, None)
    }

    /// The token of its folder.
    pub(crate) fn token(&self) -> String {
        self.token.reveal().to_owned()
    }

    /// One to which others come with tokens of their own.
    pub(crate) fn shared(identities: Arc<dyn Identities>) -> World {
        World::of(Script::default(), ServerConfig::default(), Some(identities))
    }

    fn of(script: Script, config: ServerConfig, identities: Option<Arc<dyn Identities>>) -> World {
        let folder = TempDir::new().unwrap();
        let store = SqliteStore::open(&folder.path().join("store")).unwrap();
        let reader = Arc::new(store.reader().unwrap());
        let full = Arc::new(AtomicBool::new(false));
        let starter = Starter::default();
        let cluster = FakeCluster { handle: starter.handle(), script, workers: BTreeMap::new() };
        let store = FullableStore { inner: store, full: full.clone() };
        let (handle, _) = starter.start(store, cluster, |_| {}).unwrap();
        for name in ["node-1", "node-2"] {
            let (pool, gpu_type) = ("main".into(), "H100".into());
            handle
                .observe(Observation::NodeSeen { name: name.into(), pool, gpu_type, gpus: 8, path: Vec::new() }, None);
        }
        let telemetry = Arc::new(FileTelemetry::open(folder.path()).unwrap());
        let objects = Arc::new(Objects::open(folder.path()).unwrap());
        let body = Arc::new(FakeBody {
            folder: folder.path().join("volumes"),
            ready: AtomicBool::new(true),
            observes: AtomicBool::new(false),
            agents: Mutex::default(),
            drained: watch::Sender::new(true),
            execs: Mutex::default(),
            opened: Mutex::default(),
            checks: Mutex::default(),
        });
        let gpus = Arc::new(Board::new(60_000));
        let token = Token::load_or_create(&folder.path().join("token")).unwrap();
        let resolved = minimal();
        let entry = |version| CatalogueEntry {
            name: "minimal".into(),
            version,
            hash: resolved.hash.clone(),
            description: "for tests".into(),
            python: resolved.python.clone(),
            env: BTreeMap::new(),
            lock: LOCK.into(),
        };
        let server = Server::new(Parts {
            engine: handle.clone(),
            reader,
            objects: objects.clone(),
            telemetry: telemetry.clone(),
            gpus: gpus.clone(),
            body: body.clone(),
            environments: vec![entry(1), entry(2)],
            defaults: Defaults::default(),
            notified: Default::default(),
            token: token.clone(),
            identities,
            info: Info { version: "0.0.0".into(), home: "home".into(), started: 1_700_000_000_000 },
            config,
        });
        World { gpus, folder, handle, server, telemetry, objects, body, full, token, offsets: Mutex::default() }
    }

    pub(crate) fn router(&self) -> Router {
        self.server.router()
    }

    /// A request of `ada` from this machine.
    pub(crate) fn request(&self, method: &str, path: &str) -> axum::http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost:7000")
            .header("authorization", format!("Bearer {}", self.token.reveal()))
            .header("x-aviflow-user", "ada")
            .extension(ConnectInfo(Connection::from(SocketAddr::from(([127, 0, 0, 1], 5000)))))
    }

    pub(crate) async fn send(&self, request: Request<HttpBody>) -> Response<HttpBody> {
        self.router().oneshot(request).await.unwrap()
    }

    /// Sends and reads JSON.
    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let request = self.request(method, path);
        let body = body.map_or_else(HttpBody::empty, |b| HttpBody::from(b.to_string()));
        json(self.send(request.body(body).unwrap()).await).await
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let (status, value) = self.call("GET", path, None).await;
        assert_eq!(status, StatusCode::OK, "{path}: {value}");
        value
    }

    /// What is refused, as `status code: message (help)`.
    pub(crate) async fn refused(&self, method: &str, path: &str, body: Option<Value>) -> String {
        let (status, value) = self.call(method, path, body).await;
        refusal(status, &value)
    }

    pub(crate) async fn submit(&self, submit: &Submit) -> JobDetail {
        let (status, value) = self.call("POST", "/v1/jobs", Some(serde_json::to_value(submit).unwrap())).await;
        assert_eq!(status, StatusCode::CREATED, "{value}");
        serde_json::from_value(value).unwrap()
    }

    /// Waits until the engine's state is so.
    pub(crate) async fn until(&self, is: impl Fn(&View<'_>) -> bool + Clone + Send + 'static) {
        let mut changed = self.handle.changed();
        loop {
            changed.borrow_and_update();
            if self.handle.read(is.clone()).unwrap() {
                return;
            }
            changed.changed().await.unwrap();
        }
    }

    pub(crate) async fn until_phase(&self, job: u64, phase: &'static str) {
        self.until(move |view| view.snapshot.jobs.get(&JobId(job)).is_some_and(|j| j.phase.name() == phase)).await;
    }

    pub(crate) async fn until_ended(&self, job: u64) {
        // A number that was given out and is not live has ended.
        self.until(move |view| !view.snapshot.jobs.contains_key(&JobId(job))).await;
    }

    pub(crate) fn tell(&self, job: u64, event: WorkerEvent) {
        let (job, attempt, worker, ago) = (JobId(job), 1, 0, Span(0));
        self.handle.observe(Observation::Worker { job, attempt, epoch: 1, worker, ago, event }, None);
    }

    /// Lines of a worker of the first attempt; each is `TIME RANK SOURCE TEXT`.
    pub(crate) fn log(&self, job: u64, worker: u32, lines: &str) {
        let stream = StreamKey { job: JobId(job), attempt: 1, worker };
        let mut offsets = self.offsets.lock().unwrap();
        let offset = offsets.entry(stream).or_default();
        *offset = self.telemetry.log_append(stream, *offset, lines).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.handle.stop();
    }
}

pub(crate) fn refusal(status: StatusCode, value: &Value) -> String {
    assert!(status.is_client_error() || status.is_server_error(), "{status} {value}");
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    format!("{} {}: {} ({})", status.as_u16(), text("code"), text("message"), text("help"))
}

pub(crate) async fn json(response: Response<HttpBody>) -> (StatusCode, Value) {
    let status = response.status();
    let bytes = to_bytes(response.into_body(), 64 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

/// A stream of server-sent events or of lines.
pub(crate) struct Streamed {
    stream: BodyDataStream,
    buffer: String,
    prefix: &'static str,
}

impl Streamed {
    pub(crate) fn events(response: Response<HttpBody>) -> Streamed {
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Streamed { stream: response.into_body().into_data_stream(), buffer: String::new(), prefix: "data: " }
    }

    pub(crate) fn lines(response: Response<HttpBody>) -> Streamed {
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        Streamed { stream: response.into_body().into_data_stream(), buffer: String::new(), prefix: "" }
    }

    /// The next value; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some(end) = self.buffer.find('\n') {
                let line: String = self.buffer.drain(..=end).collect();
                if let Some(data) = line.trim_end().strip_prefix(self.prefix)
                    && !data.is_empty()
                {
                    return Some(serde_json::from_str(data).unwrap());
                }
            }
            let piece = self.stream.next().await?.unwrap();
            self.buffer.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    pub(crate) async fn rest(&mut self) -> Vec<Value> {
        let mut all = Vec::new();
        while let Some(value) = self.next().await {
            all.push(value);
        }
        all
    }

    /// Reads until a value is so.
    pub(crate) async fn until(&mut self, is: impl Fn(&Value) -> bool) -> Value {
        loop {
            let value = self.next().await.expect("the stream ended early");
            if is(&value) {
                return value;
            }
        }
    }
}

/// JSON for a snapshot: instants, spans and what differs by machine are replaced.
pub(crate) fn stable(mut value: Value) -> String {
    redact(&mut value, "");
    serde_json::to_string_pretty(&value).unwrap()
}

fn redact(value: &mut Value, key: &str) {
    let spans = ["ran", "total", "capacity", "useOverWeight", "userUse", "decayedUse"];
    match value {
        Value::Number(n) if n.as_i64().is_some_and(|n| n > 1_600_000_000_000) => *value = "[time]".into(),
        Value::Number(_) if spans.contains(&key) => *value = "[ms]".into(),
        Value::Number(_) if key == "pid" => *value = "[pid]".into(),
        Value::Array(items) => items.iter_mut().for_each(|item| redact(item, key)),
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                // Which states took a millisecond differs too.
                if name == "gpuTime" {
                    *field = "[ms by state]".into();
                }
                redact(field, name);
            }
        }
        _ => {}
    }
}
