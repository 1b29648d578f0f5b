//! Which workers there are, and what each was told last.

use crate::channel::Channels;
use crate::exec::Execs;
use aviflow_agent::faults::{Class, Fault};
use aviflow_agent::protocol::{Ended, FromAgent, OLDER, PROTOCOL, ToAgent};
use aviflow_core::health::Kind;
use aviflow_core::lifecycle::{RankEnd, WorkerEvent};
use aviflow_core::model::{Address, JobId, Term, Why};
use aviflow_core::time::Span;
use aviflow_engine::ports::Observation;
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};

/// Called once an observation is durable.
pub type Durable = Box<dyn FnOnce() + Send>;

/// Takes observations; must not block.
pub type Report = Box<dyn Fn(Observation, Option<Durable>) + Send + Sync>;

/// Messages to an agent, in order.
pub(crate) type Sender = mpsc::UnboundedSender<ToAgent>;

/// What a body adds: who an agent is, and what it left behind.
pub trait Site: Send + Sync + 'static {
    /// What the body keeps of a worker beside what is common.
    type Own: Default + Send;
    /// Who an agent proved to be.
    type Proof: Send;

    /// Checks what an agent brings to prove who it is; none if that is worth nothing.
    fn prove(&self, hello: &Hello) -> impl Future<Output = Option<Self::Proof>> + Send;

    /// Whether the proof is that of this worker; none while the body does not know yet.
    fn is(&self, worker: &Self::Own, proof: &Self::Proof) -> Option<bool>;

    /// Whether this control plane still decides, as of now and under this term: else an attempt that it does not know
    /// may be another's.
    fn decides(&self, _: Term) -> impl Future<Output = bool> + Send {
        std::future::ready(true)
    }

    /// How a worker ended, where the body can read what its agent wrote down.
    ///
    /// # Errors
    /// With `InvalidData` if what is there is no end; otherwise if it cannot be read now.
    fn ended(&self, key: StreamKey) -> io::Result<Option<Ended>>;

    /// A path as the job's document would name it.
    fn named(&self, job: JobId, path: &str) -> String;

    /// Where a worker is, for people: what the body has made for it.
    fn place(&self, worker: &Self::Own) -> Option<String> {
        let _ = worker;
        None
    }

    /// Tells whoever runs the control plane of what he should act on.
    fn warn(&self, text: &str) {
        // Where standard error is closed nobody listens.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

/// The most GPUs and MIG instances of a worker.
const MOST_GPUS: usize = 128;

/// The longest UUID of one, in bytes.
const LONGEST_UUID: usize = 80;

/// What an agent says first.
#[derive(Clone, Debug)]
pub struct Hello {
    /// The version of its protocol.
    pub protocol: u32,
    /// Which worker it says to be.
    pub key: StreamKey,
    /// What proves it.
    pub token: String,
    /// Its process.
    pub pid: u32,
    /// Where rank 0 could listen.
    pub address: Address,
    /// Where it answers its peers.
    pub peer: Option<SocketAddr>,
    /// The epoch whose ranks are up, or were.
    pub up: Option<u32>,
    /// UUIDs of the GPUs that its container got, where it knows them.
    pub gpus: Vec<String>,
}

impl Hello {
    /// The hello among what an agent may say first; none of anything else.
    pub(crate) fn of(message: FromAgent) -> Option<Hello> {
        match message {
            FromAgent::Hello {
                protocol,
                job_id,
                attempt,
                worker,
                token,
                pid,
                host,
                port,
                peer_port,
                epoch,
                up,
                mut gpus,
                ..
            } => {
                // It speaks for itself alone, and not for as long as it likes.
                gpus.truncate(MOST_GPUS);
                gpus.retain(|uuid| uuid.len() <= LONGEST_UUID);
                let key = StreamKey { job: JobId(job_id), attempt, worker };
                let peer = host.parse::<IpAddr>().ok().filter(|_| peer_port > 0);
                let peer = peer.map(|ip| SocketAddr::new(ip, peer_port));
                let up = up.then_some(epoch);
                Some(Hello { protocol, key, token, pid, address: Address { host, port }, peer, up, gpus })
            }
            _ => None,
        }
    }

    /// Why an agent of another version is refused, for people; `place` is where it is.
    pub(crate) fn refusal(&self, place: Option<&str>) -> String {
        let StreamKey { job, attempt, worker } = self.key;
        let place = place.map_or_else(String::new, |place| format!(", {place}"));
        let (theirs, oldest) = (self.protocol, PROTOCOL.saturating_sub(OLDER).max(1));
        let (age, there) = if theirs > PROTOCOL {
            ("newer", "upgrade the control plane to that version again")
        } else {
            ("more than two minor versions older", "go back to a version in between until the job has ended")
        };
        format!(
            "worker {worker} of job {} (attempt {attempt}{place}) is left alone: its agent speaks version {theirs} of the \
             protocol, and this control plane {oldest} to {PROTOCOL}. Its Aviflow is {age}: {there}, or end the worker \
             where it runs (a pod by `kubectl delete pod`), and the job starts again with an agent of this version",
            job.0
        )
    }
}

/// An agent that is connected. Dropping it closes the connection.
pub struct Link {
    pub(crate) id: u64,
    pub(crate) sender: Sender,
    /// Its process.
    pub pid: u32,
    /// Since when.
    pub since: SystemTime,
    /// While it answered pings, see [`Link::witnessed`].
    pub(crate) witness: Option<(Instant, Instant)>,
    /// The version of its protocol.
    pub(crate) protocol: u32,
    pub(crate) execs: Arc<Execs>,
    pub(crate) channels: Arc<Channels>,
    pub(crate) _open: oneshot::Sender<()>,
}

impl Link {
    /// Between these instants the agent certainly knew that this connection is open, and said so to every peer that
    /// asked: from when its first pong arrived to when the last ping was sent that it answered. None where there are
    /// no pings, or an agent that does not number its pongs.
    #[must_use]
    pub fn witnessed(&self) -> Option<(Instant, Instant)> {
        self.witness
    }

    pub(crate) fn send(&self, message: ToAgent) {
        // A connection that just ended will come again, and get what counts then.
        let _ = self.sender.send(message);
    }
}

/// What is known of a worker.
pub struct Worker<O> {
    /// What the body keeps.
    pub own: O,
    /// Its connection.
    pub link: Option<Link>,
    /// When its last connection ended, as far as it was seen here. Until then its agent may have been heard.
    pub heard_until: Option<Instant>,
    /// Where its agent answers its peers.
    pub peer: Option<SocketAddr>,
    /// UUIDs of the GPUs that it got, as its agent says.
    pub gpus: Vec<String>,
    /// The newest word to start, for a connection to come; without peers, which are added when it is said.
    pub start: Option<ToAgent>,
    /// The newest word to stop; there is no start after it.
    pub stop: Option<ToAgent>,
    /// The epoch whose end is durable.
    pub gone: Option<u32>,
    /// One past the last byte of log, once the worker has ended.
    pub log_end: Option<u64>,
    /// The offset up to which the log is kept.
    pub log_have: u64,
    /// Its attempt is over: what is left is removed.
    pub remove: bool,
    /// Nobody wants it: it is not reported, and told to end.
    pub stray: bool,
    /// Nothing of it runs, and its end was reported.
    pub over: bool,
    /// The version for which its agent was refused last.
    pub refused: Option<u32>,
}

impl<O> Worker<O> {
    pub(crate) fn send(&self, message: ToAgent) {
        if let Some(link) = &self.link {
            link.send(message);
        }
    }

    /// Closes its connection, if there is one.
    pub fn hang_up(&mut self) {
        if self.link.take().is_some() {
            self.heard_until = Some(Instant::now());
        }
    }

    /// Lets the agent go where its attempt is over and its log complete.
    pub fn release(&self) {
        if self.remove && self.logged() {
            self.send(ToAgent::Release);
        }
    }

    /// An epoch is to begin or to end: what ended an earlier one was not the last. False where nothing of it is left to
    /// hear that.
    fn renew(&mut self, epoch: u32) -> bool {
        self.gone = self.gone.filter(|gone| *gone >= epoch);
        let begun = matches!(self.start, Some(ToAgent::Start { epoch: begun, .. }) if begun >= epoch);
        if !begun {
            self.log_end = self.log_end.filter(|_| self.gone.is_some());
        }
        !self.over || self.gone.is_some()
    }

    /// Whether it has ended and all of its log is kept.
    #[must_use]
    pub fn logged(&self) -> bool {
        self.log_end.is_some_and(|end| end <= self.log_have)
    }
}

/// What is guarded by the lock.
pub struct State<O> {
    /// The highest term of an order.
    pub term: Term,
    /// Live attempts that were not launched yet since the last `Reconcile`; `None` before the first.
    pub awaited: Option<BTreeSet<(JobId, u32)>>,
    /// The workers.
    pub workers: BTreeMap<StreamKey, Worker<O>>,
    pub(crate) connections: u64,
}

impl<O> State<O> {
    /// The workers of an attempt.
    pub fn of_attempt(&mut self, job: JobId, attempt: u32) -> impl Iterator<Item = (&StreamKey, &mut Worker<O>)> {
        let key = |worker| StreamKey { job, attempt, worker };
        self.workers.range_mut(key(0)..=key(u32::MAX))
    }

    /// Where the agents of an attempt answer their peers, as far as it is known.
    pub(crate) fn peers(&mut self, job: JobId, attempt: u32) -> Vec<(u32, SocketAddr)> {
        self.of_attempt(job, attempt).filter_map(|(key, worker)| Some((key.worker, worker.peer?))).collect()
    }
}

/// The workers of a body, shared by what starts them and what talks to them.
pub struct Workers<S: Site> {
    /// What the body adds.
    pub site: S,
    /// Who keeps what agents ship.
    pub telemetry: Arc<dyn Telemetry>,
    report: Report,
    closed: AtomicBool,
    state: Mutex<State<S::Own>>,
    /// Counts changes of the state, for connections that wait for one.
    pub(crate) changed: watch::Sender<u64>,
}

impl<S: Site> Workers<S> {
    /// No workers yet. Before the first [`Workers::reconcile`], no agent is answered.
    pub fn new(site: S, telemetry: Arc<dyn Telemetry>, report: Report) -> Workers<S> {
        let state = State { term: Term(0), awaited: None, workers: BTreeMap::new(), connections: 0 };
        let (closed, state) = (AtomicBool::new(false), Mutex::new(state));
        Workers { site, telemetry, report, closed, state, changed: watch::Sender::new(0) }
    }

    /// The state. To be held for a moment only.
    pub fn lock(&self) -> MutexGuard<'_, State<S::Own>> {
        // A panic elsewhere leaves no half-made change: every change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a worker, if it is known.
    pub fn with<T>(&self, key: StreamKey, change: impl FnOnce(&mut Worker<S::Own>) -> T) -> Option<T> {
        self.lock().workers.get_mut(&key).map(change)
    }

    /// Reports nothing any more, and closes every connection.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for worker in self.lock().workers.values_mut() {
            worker.hang_up();
        }
    }

    /// Hands on what was seen.
    pub fn report(&self, observation: Observation, durable: Option<Durable>) {
        if !self.closed.load(Ordering::SeqCst) {
            (self.report)(observation, durable);
        }
    }

    /// Hands on what happened to a worker.
    pub fn report_worker(&self, key: StreamKey, epoch: u32, ago: Span, event: WorkerEvent, durable: Option<Durable>) {
        let StreamKey { job, attempt, worker } = key;
        self.report(Observation::Worker { job, attempt, epoch, worker, ago, event }, durable);
    }

    /// Hands on a worker that could not be started, of which no process runs.
    pub fn report_not_started(&self, key: StreamKey, reason: &str) {
        let event = WorkerEvent::LaunchFailed { reason: reason.to_owned() };
        self.report_worker(key, 0, Span(0), event, None);
        let event = WorkerEvent::Gone {
            ranks: BTreeMap::new(),
            reason: Some(reason.to_owned()),
            last_step: None,
            next_port: None,
        };
        self.report_worker(key, 0, Span(0), event, None);
    }

    /// Wakes connections that wait for a worker to become known.
    pub fn notify(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Whether orders of this term are to be obeyed: none higher was seen.
    pub fn obeys(&self, term: Term) -> bool {
        let mut state = self.lock();
        if term < state.term {
            return false;
        }
        state.term = term;
        true
    }

    /// Begins a term: these attempts live. Whoever is connected has to come again and is told anew
    /// what to do. Gives the workers that nobody wants, marked as strays: those that were known, and
    /// those of `found` that were not.
    pub fn reconcile(&self, live: &[(JobId, u32)], found: Vec<StreamKey>) -> (Vec<StreamKey>, Vec<StreamKey>) {
        let live: BTreeSet<(JobId, u32)> = live.iter().copied().collect();
        let wanted = |key: &StreamKey| live.contains(&(key.job, key.attempt));
        let mut state = self.lock();
        let launched: BTreeSet<(JobId, u32)> = state.workers.keys().map(|k| (k.job, k.attempt)).collect();
        for worker in state.workers.values_mut() {
            // What was said to an earlier term may be lost: agents connect
            // again and repeat it, and are told anew what to do.
            worker.hang_up();
            worker.start = None;
            worker.stop = None;
        }
        let known: Vec<StreamKey> = state.workers.keys().filter(|k| !wanted(k)).copied().collect();
        let new: Vec<StreamKey> = found.into_iter().filter(|k| !wanted(k) && !state.workers.contains_key(k)).collect();
        for key in known.iter().chain(&new) {
            let worker = state.workers.entry(*key).or_default();
            worker.remove = true;
            worker.stray = true;
        }
        // Last: from now on an agent whose worker is not known is told to go.
        state.awaited = Some(live.difference(&launched).copied().collect());
        (known, new)
    }

    /// An attempt that was waited for since the last reconciliation is known now, or over.
    pub fn settled(&self, job: JobId, attempt: u32) {
        if let Some(awaited) = &mut self.lock().awaited {
            awaited.remove(&(job, attempt));
        }
    }

    /// Tells an attempt's workers to start the ranks of an epoch; `each` hears of those that were told to stop an
    /// earlier one before. A worker of which nothing is left is reported as lost.
    pub fn start(
        &self,
        term: Term,
        (job, attempt, epoch): (JobId, u32, u32),
        rank0: &Address,
        best_step: Option<u64>,
        mut each: impl FnMut(&mut Worker<S::Own>),
    ) {
        let mut lost = Vec::new();
        let mut state = self.lock();
        let peers = state.peers(job, attempt);
        for (key, worker) in state.of_attempt(job, attempt) {
            match &worker.stop {
                // 0 means whatever runs.
                Some(ToAgent::Stop { epoch: stopped, .. }) if *stopped != 0 && *stopped < epoch => {
                    worker.stop = None;
                    each(worker);
                }
                Some(_) => continue,
                None => {}
            }
            if !worker.renew(epoch) {
                lost.push(*key);
                continue;
            }
            let start = ToAgent::Start {
                term: term.0,
                epoch,
                master_host: rank0.host.clone(),
                master_port: rank0.port,
                best_step,
                peers: Vec::new(),
            };
            worker.send(with_peers(start.clone(), &peers));
            worker.start = Some(start);
        }
        drop(state);
        lost.into_iter().for_each(|key| self.report_not_again(key));
    }

    /// Hands on that nothing is left of a worker that could begin another epoch; one that was to begin none has ended.
    pub fn report_not_again(&self, key: StreamKey) {
        let reason = "its agent ended before the ranks could start again".to_owned();
        self.report_worker(key, 0, Span(0), WorkerEvent::Lost { reason }, None);
    }

    /// Tells an attempt's workers to stop the ranks of an epoch; `each` sees to it that they do.
    pub fn stop(
        &self,
        term: Term,
        (job, attempt, epoch): (JobId, u32, u32),
        grace: Span,
        reason: &str,
        mut each: impl FnMut(StreamKey, &mut Worker<S::Own>),
    ) {
        let mut lost = Vec::new();
        for (key, worker) in self.lock().of_attempt(job, attempt) {
            let grace_ms = u64::try_from(grace.0).unwrap_or(0);
            let stop = ToAgent::Stop { term: term.0, grace_ms, reason: reason.to_owned(), epoch };
            // One that ended an earlier epoch has not said that it ends this one.
            if epoch > 1 && !worker.renew(epoch) {
                lost.push(*key);
            }
            worker.send(stop.clone());
            worker.stop = Some(stop);
            each(*key, worker);
        }
        lost.into_iter().for_each(|key| self.report_not_again(key));
    }
}

/// A word as it is said: one to start names the peers. They are not kept with it, as each worker of a large gang
/// would hold all of them.
pub(crate) fn with_peers(mut word: ToAgent, all: &[(u32, SocketAddr)]) -> ToAgent {
    if let ToAgent::Start { peers, .. } = &mut word {
        *peers = all.to_vec();
    }
    word
}

impl<O: Default> Default for Worker<O> {
    fn default() -> Worker<O> {
        Worker {
            own: O::default(),
            link: None,
            heard_until: None,
            peer: None,
            gpus: Vec::new(),
            start: None,
            stop: None,
            gone: None,
            log_end: None,
            log_have: 0,
            remove: false,
            stray: false,
            over: false,
            refused: None,
        }
    }
}

/// How the protocol's rank ends read in the core.
#[must_use]
pub fn rank_ends(ranks: BTreeMap<u32, aviflow_agent::protocol::RankEnd>) -> BTreeMap<u32, RankEnd> {
    let convert = |end: aviflow_agent::protocol::RankEnd| RankEnd {
        code: end.code,
        signal: end.signal,
        stopping: end.stopping,
        before: Span(i64::try_from(end.before_ms).unwrap_or(i64::MAX)),
        last_lines: end.last_lines,
        why: why(end.fault),
    };
    ranks.into_iter().map(|(rank, end)| (rank, convert(end))).collect()
}

/// How the agent's reading of an end reads in the core.
#[must_use]
pub fn why(fault: Option<Fault>) -> Option<Why> {
    let fault = fault?;
    let kind = match fault.class {
        Class::GpuOutOfMemory => Kind::GpuOutOfMemory,
        Class::GpuHardware => Kind::DeviceUnhealthy,
        Class::GpuError => Kind::Cuda,
        Class::CollectiveTimeout => Kind::NcclTimeout,
        Class::CollectiveError | Class::FabricError => Kind::Nccl,
        Class::PeerGone => Kind::PeerLost,
        Class::HostOutOfMemory => Kind::HostOutOfMemory,
        Class::DiskFull => Kind::DiskFull,
        Class::NotANumber => Kind::NotANumber,
        Class::SegmentationFault
        | Class::IllegalInstruction
        | Class::BusError
        | Class::Aborted
        | Class::Killed
        | Class::Stopped => Kind::Signal,
        Class::GpuAssert
        | Class::SharedMemoryFull
        | Class::ImportFailed
        | Class::AccessDenied
        | Class::NetworkError
        | Class::AddressInUse
        | Class::DamagedCheckpoint
        | Class::Exception => Kind::Exit,
    };
    Some(Why { kind, consequence: fault.consequence, line: fault.line })
}
