//! Orders in, observations out.
//!
//! One lock guards what is known of each worker; it is never held while
//! something is reported, written or waited for. Work that takes time is done by
//! one thread for each worker (`worker`) and each build (`environments`).

use crate::environments::{Cancel, Environments, Outcome};
use crate::hurry::{self, Watch};
use crate::link::Link;
use crate::spec::{Share, Site};
use crate::{LocalConfig, LocalError, LocalHandle, Volumes, devices, link, private_folder, worker};
use aviflow_agent::protocol::ToAgent;
use aviflow_core::lifecycle::RankEnd;
use aviflow_core::model::{Address, EnvironmentHash, JobId, Placement, Term};
use aviflow_core::time::Span;
use aviflow_engine::ports::{Cluster, JobRecord, Observation, Order, Stamped, WorkerEvent};
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use rustix::fs::FlockOperation;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Called once an observation is durable.
pub(crate) type Durable = Box<dyn FnOnce() + Send>;

type Report = Box<dyn Fn(Observation, Option<Durable>) + Send + Sync>;

/// The longest path of a Unix socket, without the zero at its end.
const SOCKET_PATH: usize = 107;

/// This machine as a cluster. Dropping it ends what belongs to the control
/// plane and leaves agents and ranks alone.
pub struct LocalCluster {
    shared: Arc<Shared>,
    listening: tokio::task::AbortHandle,
    _only: File,
}

/// What threads, connections and handles share.
pub(crate) struct Shared {
    pub(crate) config: LocalConfig,
    pub(crate) telemetry: Arc<dyn Telemetry>,
    report: Report,
    pub(crate) environments: Environments,
    pub(crate) volumes: Volumes,
    pub(crate) socket: PathBuf,
    pub(crate) runtime: tokio::runtime::Handle,
    /// Ends builds when the cluster is dropped, and says that it was.
    pub(crate) cancel: Arc<Cancel>,
    state: Mutex<State>,
    /// Counts changes of the state, for connections that wait for one.
    pub(crate) changed: watch::Sender<u64>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) term: Term,
    /// Live attempts that were not launched yet since the last `Reconcile`; `None` before the first.
    pub(crate) awaited: Option<BTreeSet<(JobId, u32)>>,
    pub(crate) workers: BTreeMap<StreamKey, Worker>,
    building: BTreeSet<String>,
    pub(crate) connections: u64,
}

/// What is known of a worker.
#[derive(Default)]
pub(crate) struct Worker {
    /// The token, once the worker's folder has one.
    pub(crate) token: Option<String>,
    pub(crate) link: Option<Link>,
    /// The newest word to start, for a connection to come.
    pub(crate) start: Option<ToAgent>,
    /// The newest word to stop; there is no start after it.
    pub(crate) stop: Option<ToAgent>,
    /// The epoch whose end is durable.
    pub(crate) gone: Option<u32>,
    /// One past the last byte of log, once the worker has ended.
    pub(crate) log_end: Option<u64>,
    /// The offset up to which the log is kept.
    pub(crate) log_have: u64,
    /// Its attempt is over: what is left is removed.
    pub(crate) remove: bool,
    /// Nobody wants it: it is not reported, and told to end.
    pub(crate) stray: bool,
    /// Its agent is dead and its end was reported.
    pub(crate) over: bool,
    /// Sees to it that it ends in time.
    pub(crate) watch: Option<Watch>,
    /// Its agent did not end in time and was killed.
    pub(crate) killed: bool,
}

impl Worker {
    pub(crate) fn send(&self, message: ToAgent) {
        if let Some(link) = &self.link {
            link.send(message);
        }
    }

    /// Lets the agent go where its attempt is over and its log complete.
    pub(crate) fn release(&self) {
        if self.remove && self.log_end.is_some_and(|end| end <= self.log_have) {
            self.send(ToAgent::Release);
        }
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves no half-made change: every change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a worker, if it is known.
    pub(crate) fn with<T>(&self, key: StreamKey, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        self.lock().workers.get_mut(&key).map(change)
    }

    pub(crate) fn report(&self, observation: Observation, durable: Option<Durable>) {
        if !self.cancel.is_cancelled() {
            (self.report)(observation, durable);
        }
    }

    pub(crate) fn report_worker(
        &self,
        key: StreamKey,
        epoch: u32,
        ago: Span,
        event: WorkerEvent,
        durable: Option<Durable>,
    ) {
        let StreamKey { job, attempt, worker } = key;
        self.report(Observation::Worker { job, attempt, epoch, worker, ago, event }, durable);
    }

    /// Reports a worker that could not be started, of which no process runs.
    pub(crate) fn report_not_started(&self, key: StreamKey, reason: &str) {
        let event = WorkerEvent::LaunchFailed { reason: reason.to_owned() };
        self.report_worker(key, 0, Span(0), event, None);
        let event = WorkerEvent::Gone { ranks: BTreeMap::new(), reason: Some(reason.to_owned()), last_step: None };
        self.report_worker(key, 0, Span(0), event, None);
    }

    pub(crate) fn report_ready(&self, key: StreamKey, address: Address) {
        self.report_worker(key, 0, Span(0), WorkerEvent::Ready { address }, None);
    }

    pub(crate) fn site(&self) -> Site<'_> {
        Site { config: &self.config, volumes: &self.volumes, environments: &self.environments, socket: &self.socket }
    }

    pub(crate) fn workers_folder(&self) -> PathBuf {
        self.config.home.join("workers")
    }

    pub(crate) fn worker_folder(&self, key: StreamKey) -> PathBuf {
        self.workers_folder().join(format!("{}.{}.{}", key.job.0, key.attempt, key.worker))
    }

    /// Wakes connections that wait for a worker to become known.
    pub(crate) fn notify(&self) {
        self.changed.send_modify(|n| *n += 1);
    }
}

/// How the protocol's rank ends read in the core.
pub(crate) fn rank_ends(ranks: BTreeMap<u32, aviflow_agent::protocol::RankEnd>) -> BTreeMap<u32, RankEnd> {
    let convert = |end: aviflow_agent::protocol::RankEnd| RankEnd {
        code: end.code,
        signal: end.signal,
        stopping: end.stopping,
        before: Span(i64::try_from(end.before_ms).unwrap_or(i64::MAX)),
        last_lines: end.last_lines,
    };
    ranks.into_iter().map(|(rank, end)| (rank, convert(end))).collect()
}

impl LocalCluster {
    /// Takes the home folder, listens for agents and reports the nodes.
    ///
    /// `report` must not block; its second argument is called once the
    /// observation is durable. It may be called from any thread.
    ///
    /// # Errors
    /// If another control plane uses the folder, it cannot be written, or the configuration cannot work.
    pub fn start(
        config: LocalConfig,
        telemetry: Arc<dyn Telemetry>,
        report: impl Fn(Observation, Option<Box<dyn FnOnce() + Send>>) + Send + Sync + 'static,
        runtime: tokio::runtime::Handle,
    ) -> Result<LocalCluster, LocalError> {
        devices::check(&config.nodes)?;
        if config.agent.is_empty() {
            return Err(LocalError::Config("no program is given that starts agents".to_owned()));
        }
        aviflow_agent::sys::raise_file_limit();
        let home = &config.home;
        private_folder(home).map_err(LocalError::io(home))?;
        let home = std::fs::canonicalize(home).map_err(LocalError::io(home))?;
        let config = LocalConfig { home: home.clone(), ..config };
        let only = take(&home)?;
        let cancel = Arc::new(Cancel::default());
        let environments = Environments::new(&config);
        for folder in [home.join("workers"), home.join("jobs"), home.join("secrets"), home.join("cache")] {
            private_folder(&folder).map_err(LocalError::io(&folder))?;
        }
        let socket = home.join("agents.sock");
        let listener = listen(&socket).map_err(LocalError::io(&socket))?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::UnixListener::from_std(listener).map_err(LocalError::io(&socket))?
        };
        let shared = Arc::new(Shared {
            volumes: Volumes::new(&home),
            environments,
            config,
            telemetry,
            report: Box::new(report),
            socket,
            runtime: runtime.clone(),
            cancel,
            state: Mutex::default(),
            changed: watch::Sender::new(0),
        });
        let listening = runtime.spawn(link::listen(shared.clone(), listener)).abort_handle();
        for node in devices::seen(&shared.config) {
            shared.report(node, None);
        }
        Ok(LocalCluster { shared, listening, _only: only })
    }

    /// What the server asks beside the loop.
    #[must_use]
    pub fn handle(&self) -> LocalHandle {
        LocalHandle::new(self.shared.clone())
    }

    fn launch(&self, record: &Arc<JobRecord>, attempt: u32, placement: &Placement, nodes: &[String]) {
        let workers = u32::try_from(placement.0.len()).unwrap_or(u32::MAX);
        for (worker, (_, slots)) in (0..workers).zip(&placement.0) {
            let key = StreamKey { job: record.id, attempt, worker };
            let node = nodes.get(worker as usize).cloned().unwrap_or_default();
            let here = self.shared.config.nodes.iter().any(|n| n.name == node);
            {
                let mut state = self.shared.lock();
                if let Some(known) = state.workers.get_mut(&key) {
                    if !known.over || known.remove {
                        continue;
                    }
                    // Said again, as the report of its end may have been lost.
                    known.over = false;
                } else if here || self.shared.worker_folder(key).exists() {
                    state.workers.insert(key, Worker::default());
                } else {
                    drop(state);
                    // Nothing was ever started for it, so nothing of it can run.
                    let names: Vec<&str> = self.shared.config.nodes.iter().map(|n| n.name.as_str()).collect();
                    let reason =
                        format!("node `{node}` is not part of this machine any more (it has {})", names.join(", "));
                    self.shared.report_worker(key, 0, Span(0), WorkerEvent::Lost { reason }, None);
                    continue;
                }
            }
            let share = Share { attempt, worker, workers, node, slots: slots.iter().collect() };
            worker::start(&self.shared, key, record.clone(), share);
        }
        if let Some(awaited) = &mut self.shared.lock().awaited {
            awaited.remove(&(record.id, attempt));
        }
    }

    fn tell(&self, job: JobId, attempt: u32, mut tell: impl FnMut(StreamKey, &mut Worker)) {
        for (key, worker) in of_attempt(&mut self.shared.lock(), job, attempt) {
            tell(*key, worker);
        }
    }

    fn remove(&self, job: JobId, attempt: u32) {
        let mut state = self.shared.lock();
        if let Some(awaited) = &mut state.awaited {
            awaited.remove(&(job, attempt));
        }
        let mut over = Vec::new();
        for (key, worker) in of_attempt(&mut state, job, attempt) {
            worker.remove = true;
            worker.release();
            if worker.over {
                over.push(*key);
            }
        }
        for key in over {
            state.workers.remove(&key);
            worker::remove(&self.shared, key);
        }
    }

    fn reconcile(&self, live: &[(JobId, u32)]) {
        let live: BTreeSet<(JobId, u32)> = live.iter().copied().collect();
        let wanted = |key: &StreamKey| live.contains(&(key.job, key.attempt));
        let on_disk = worker::on_disk(&self.shared);
        let mut state = self.shared.lock();
        let launched: BTreeSet<(JobId, u32)> = state.workers.keys().map(|k| (k.job, k.attempt)).collect();
        for worker in state.workers.values_mut() {
            // What was said to an earlier term may be lost: agents connect
            // again and repeat it, and are told anew what to do.
            worker.link = None;
            worker.start = None;
            worker.stop = None;
        }
        let known: Vec<StreamKey> = state.workers.keys().filter(|k| !wanted(k)).copied().collect();
        let new: Vec<StreamKey> =
            on_disk.into_iter().filter(|k| !wanted(k) && !state.workers.contains_key(k)).collect();
        for key in known.iter().chain(&new) {
            let worker = state.workers.entry(*key).or_default();
            worker.remove = true;
            worker.stray = true;
        }
        // Last: from now on an agent whose worker is not known is told to go.
        state.awaited = Some(live.difference(&launched).copied().collect());
        drop(state);
        for key in known {
            worker::leave(&self.shared, key);
        }
        for key in new {
            worker::adopt_stray(&self.shared, key);
        }
    }

    fn prepare(&self, record: &Arc<JobRecord>) {
        let Some(environment) = record.provenance.environment.clone() else { return };
        let hash = EnvironmentHash(environment.hash.clone());
        if self.shared.environments.find(&environment.hash).is_some() {
            self.shared.report(Observation::EnvironmentReady { hash }, None);
            return;
        }
        if !self.shared.lock().building.insert(environment.hash.clone()) {
            return;
        }
        let shared = self.shared.clone();
        let failed = hash.clone();
        let build = move || {
            let progress = |p| shared.telemetry.build(p);
            let result = shared.environments.build(&environment, &shared.cancel, &progress);
            shared.lock().building.remove(&environment.hash);
            shared.report(
                match result {
                    Ok(Outcome::Built | Outcome::Found) => Observation::EnvironmentReady { hash },
                    Err(e) => Observation::EnvironmentFailed { hash, reason: e.to_string() },
                },
                None,
            );
        };
        if let Err(e) = std::thread::Builder::new().name("environment".to_owned()).spawn(build) {
            self.shared.lock().building.remove(&failed.0);
            let reason = format!("the environment's build could not be started: {e}");
            self.shared.report(Observation::EnvironmentFailed { hash: failed, reason }, None);
        }
    }
}

fn of_attempt(state: &mut State, job: JobId, attempt: u32) -> impl Iterator<Item = (&StreamKey, &mut Worker)> {
    let key = |worker| StreamKey { job, attempt, worker };
    state.workers.range_mut(key(0)..=key(u32::MAX))
}

impl Cluster for LocalCluster {
    fn apply(&mut self, orders: &[Stamped]) {
        for Stamped { term, order, .. } in orders {
            {
                let mut state = self.shared.lock();
                if *term < state.term {
                    continue;
                }
                state.term = *term;
            }
            let term = term.0;
            match order {
                Order::Reconcile { live } => self.reconcile(live),
                Order::Prepare { record } => self.prepare(record),
                Order::Launch { record, attempt, placement, nodes } => self.launch(record, *attempt, placement, nodes),
                Order::Confirm { job, attempt, epoch, rank0, best_step } => self.tell(*job, *attempt, |_, worker| {
                    if worker.stop.is_some() {
                        return;
                    }
                    if worker.gone.is_some_and(|gone| gone < *epoch) {
                        // Another epoch begins: the end that was reported was not the last.
                        worker.gone = None;
                        worker.log_end = None;
                    }
                    let start = ToAgent::Start {
                        term,
                        epoch: *epoch,
                        master_host: rank0.host.clone(),
                        master_port: rank0.port,
                        best_step: *best_step,
                    };
                    worker.send(start.clone());
                    worker.start = Some(start);
                }),
                Order::Stop { job, attempt, grace, reason } => self.tell(*job, *attempt, |key, worker| {
                    let grace_ms = u64::try_from(grace.0).unwrap_or(0);
                    let stop = ToAgent::Stop { term, grace_ms, reason: reason.clone() };
                    worker.send(stop.clone());
                    worker.stop = Some(stop);
                    let slack = u64::try_from(self.shared.config.stop_slack.0).unwrap_or(0);
                    hurry::watch(&self.shared, key, worker, Duration::from_millis(grace_ms.saturating_add(slack)));
                }),
                Order::Remove { job, attempt } => self.remove(*job, *attempt),
                // Nobody else is on this machine's virtual nodes.
                Order::Keep { .. } => {}
            }
        }
        self.shared.notify();
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        self.shared.cancel.cancel();
        self.listening.abort();
        for worker in self.shared.lock().workers.values_mut() {
            worker.link = None;
            worker.watch = None;
        }
    }
}

/// Takes the home folder for this process alone, until the file is closed.
fn take(home: &Path) -> Result<File, LocalError> {
    let path = home.join("control.lock");
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = open.map_err(LocalError::io(&path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            return Err(LocalError::Busy { home: home.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(e) => return Err(LocalError::io(&path)(e.into())),
    }
    file.rewind()
        .and_then(|()| file.set_len(0))
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(LocalError::io(&path))?;
    Ok(file)
}

/// Listens on a path of any length; a socket that nobody listens on any more is replaced.
///
/// The address of a socket holds 107 bytes. A longer path is reached through
/// the open folder, as agents do, so that the socket is always in its place.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = if path.as_os_str().len() <= SOCKET_PATH {
        UnixListener::bind(path)?
    } else {
        let folder = File::open(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().unwrap_or_default();
        UnixListener::bind(Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name))?
    };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
