//! The agents' connections.
//!
//! A connection begins with a `Hello` whose proof must be that of the worker; it is answered once it
//! is clear whether the worker is known. Events are handed on and acknowledged up to the first that
//! is not durable. Log goes to the keeper of logs by a task of its own, so that a full disk holds up
//! no event.

use crate::channel::{self, Channels};
use crate::exec::{self, Execs};
use crate::pings::{Pings, next_ping};
use crate::roster::{Durable, Hello, Link, Sender, Site, Worker, Workers, rank_ends, why, with_peers};
use crate::unix_ms;
use aviflow_agent::protocol::{self, ChannelInput, Event, FromAgent, MAX_LINE, ToAgent, wire};
use aviflow_core::health::xid;
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::time::{Span, Time};
use aviflow_engine::telemetry::{Point, Sign, StreamKey};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The time that a connection has to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(10);

/// The time that the last messages of a closing connection have.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

/// How long the connection of a refused agent is held: it has been answered, and would come again at once.
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// The pause after the log could not be written.
const LOG_PAUSE: Duration = Duration::from_secs(1);

/// Pieces of log that wait for the disk.
const LOG_QUEUE: usize = 32;

/// How often an agent across a network is asked whether it is still there: [`Listener::PING`] of one.
pub const ACROSS_A_NETWORK: Option<Duration> = Some(Duration::from_secs(5));

/// Where agents connect.
pub trait Listener: Send + Sync + 'static {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// How often the other end is asked for a sign of life; never on one machine. Of one that gives
    /// none three times, the connection is closed: a network that was cut says nothing by itself.
    const PING: Option<Duration>;
    /// The next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for UnixListener {
    type Stream = UnixStream;
    const PING: Option<Duration> = None;

    async fn accept(&self) -> io::Result<UnixStream> {
        Ok(UnixListener::accept(self).await?.0)
    }
}

/// Accepts connections until the task is aborted, which ends them too.
pub async fn listen<S: Site, L: Listener>(workers: Arc<Workers<S>>, listener: L) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(stream) => {
                    connections.spawn(serve(workers.clone(), stream, L::PING));
                }
                // Too many open files, for example: those that wait stay in the queue.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve<S: Site, T: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    shared: Arc<Workers<S>>,
    stream: T,
    ping: Option<Duration>,
) {
    let (read, write) = tokio::io::split(stream);
    let mut lines = Lines::new(read);
    let Ok(Ok(Some(hello))) = timeout(HELLO_LIMIT, lines.next()).await else { return };
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut writer = tokio::spawn(write_all(write, receiver));
    if let Some(hello) = Hello::of(hello) {
        match admit(&shared, &hello, &sender, ping).await {
            Ok(Admitted { id, closed, execs, channels, .. }) => {
                shared.telemetry.heard(hello.key, true);
                let ping = ping.map(|every| Pings::new(id, every));
                converse(&shared, (hello.key, hello.up), &mut lines, sender, closed, (&execs, &channels, ping)).await;
                leave(&shared, hello.key, id);
                execs.end(exec::Sink::lost);
                channels.end(channel::Sink::lost);
            }
            // It comes again, to whoever decides.
            Err(Refusal::Unknown(_)) if !decides(&shared).await => drop(sender),
            Err(Refusal::Unknown(reason)) => {
                let _ = sender.send(ToAgent::Unknown { reason });
                drop(sender);
            }
            Err(Refusal::Version(reason)) => {
                let _ = sender.send(ToAgent::Refused { reason });
                let _ = timeout(REFUSED_FOR, async { while let Ok(Some(_)) = lines.next().await {} }).await;
                drop(sender);
            }
            // Whoever has no valid token is told nothing.
            Err(Refusal::Impostor) => drop(sender),
        }
    } else {
        drop(sender);
    }
    if timeout(FLUSH_LIMIT, &mut writer).await.is_err() {
        writer.abort();
    }
}

async fn decides<S: Site>(shared: &Workers<S>) -> bool {
    let term = shared.lock().term;
    shared.site.decides(term).await
}

enum Refusal {
    Unknown(String),
    Version(String),
    Impostor,
}

/// Welcomes an agent as soon as it is clear whether its attempt lives.
async fn admit<S: Site>(
    shared: &Arc<Workers<S>>,
    hello: &Hello,
    sender: &Sender,
    ping: Option<Duration>,
) -> Result<Admitted, Refusal> {
    let proof = shared.site.prove(hello).await.ok_or(Refusal::Impostor)?;
    let mut changes = shared.changed.subscribe();
    loop {
        changes.mark_unchanged();
        if let Some(answer) = try_admit(shared, hello, &proof, sender, ping) {
            let admitted = answer?;
            if let Some(epoch) = admitted.ready {
                let event = WorkerEvent::Ready { address: hello.address.clone() };
                shared.report_worker(hello.key, epoch, Span(0), event, None);
            }
            return Ok(admitted);
        }
        if changes.changed().await.is_err() {
            return Err(Refusal::Impostor);
        }
    }
}

struct Admitted {
    id: u64,
    /// Resolves once the connection was replaced or is not wanted any more.
    closed: oneshot::Receiver<()>,
    execs: Arc<Execs>,
    channels: Arc<Channels>,
    /// Of which epoch it may wait for the word to start; 0 for whichever.
    ready: Option<u32>,
}

fn try_admit<S: Site>(
    shared: &Arc<Workers<S>>,
    hello: &Hello,
    proof: &S::Proof,
    sender: &Sender,
    ping: Option<Duration>,
) -> Option<Result<Admitted, Refusal>> {
    let key = hello.key;
    let ended = match shared.site.ended(key) {
        Ok(ended) => ended,
        Err(e) if e.kind() == io::ErrorKind::InvalidData => None,
        // It comes again, and then it may be known whether it has ended.
        Err(_) => return Some(Err(Refusal::Impostor)),
    };
    // Outside of the lock, as it may read a file.
    let log_have = shared.telemetry.log_have(key);
    let mut state = shared.lock();
    let term = state.term.0;
    let awaited = state.awaited.as_ref()?.contains(&(key.job, key.attempt));
    state.connections += 1;
    let id = state.connections;
    let Some(worker) = state.workers.get_mut(&key) else {
        return (!awaited).then(|| Err(Refusal::Unknown("its attempt is over or belongs to another store".to_owned())));
    };
    if !shared.site.is(&worker.own, proof)? {
        return Some(Err(Refusal::Impostor));
    }
    if worker.stray && ended.is_none() {
        return Some(Err(Refusal::Unknown("its attempt is over".to_owned())));
    }
    if !protocol::understood(hello.protocol) {
        let reason = hello.refusal(shared.site.place(&worker.own).as_deref());
        let first = worker.refused.replace(hello.protocol) != Some(hello.protocol);
        drop(state);
        if first {
            shared.site.warn(&reason);
        }
        return Some(Err(Refusal::Version(reason)));
    }
    worker.refused = None;
    worker.log_have = log_have;
    worker.peer = hello.peer;
    worker.gpus.clone_from(&hello.gpus);
    if let Some(ended) = &ended {
        worker.log_end = Some(ended.log_end);
    }
    let _ = sender.send(ToAgent::Welcome { term, log_have, ping_ms: ping.map_or(0, millis) });
    let (open, closed) = oneshot::channel();
    let (execs, channels) = (Arc::<Execs>::default(), Arc::<Channels>::default());
    worker.link = Some(Link {
        id,
        sender: sender.clone(),
        pid: hello.pid,
        since: SystemTime::now(),
        witness: None,
        protocol: hello.protocol,
        execs: execs.clone(),
        channels: channels.clone(),
        _open: open,
    });
    let word = worker.stop.clone().or_else(|| worker.start.clone());
    if let Some(word) = word {
        let peers = state.peers(key.job, key.attempt);
        let _ = sender.send(with_peers(word, &peers));
    }
    if let Some(worker) = state.workers.get(&key) {
        worker.release();
    }
    // One that ended waits for the epoch after it, or for nothing any more where it never began one.
    let ready = ended.map_or(Some(0), |ended| (ended.epoch > 0).then_some(ended.epoch + 1));
    Some(Ok(Admitted { id, closed, execs, channels, ready }))
}

/// Forgets a connection, unless a newer one has taken its place.
fn leave<S: Site>(shared: &Workers<S>, key: StreamKey, id: u64) {
    let gone = shared.with(key, |worker| {
        // One that was hung up on from here has none any more.
        let gone = worker.link.as_ref().is_none_or(|link| link.id == id);
        if gone {
            worker.hang_up();
        }
        gone
    });
    if gone == Some(true) {
        shared.telemetry.heard(key, false);
    }
}

/// Messages, one a line.
struct Lines<T> {
    reader: BufReader<ReadHalf<T>>,
    line: Vec<u8>,
    /// Whether `line` was handed on.
    taken: bool,
}

impl<T: AsyncRead> Lines<T> {
    fn new(read: ReadHalf<T>) -> Lines<T> {
        Lines { reader: BufReader::with_capacity(64 << 10, read), line: Vec::new(), taken: false }
    }

    /// The next message; `None` at the end. It may be dropped before it is ready: what was read of a
    /// message stays in `line`.
    async fn next(&mut self) -> io::Result<Option<FromAgent>> {
        if std::mem::take(&mut self.taken) {
            self.line.clear();
        }
        let limit = (MAX_LINE + 1).saturating_sub(self.line.len()) as u64;
        let read = (&mut self.reader).take(limit).read_until(b'\n', &mut self.line).await?;
        if read == 0 && self.line.is_empty() {
            return Ok(None);
        }
        self.taken = true;
        let invalid = |e: String| io::Error::new(io::ErrorKind::InvalidData, e);
        let line =
            self.line.strip_suffix(b"\n").ok_or_else(|| invalid("a message that is too long or cut off".into()))?;
        wire::parse(line).map(Some).map_err(invalid)
    }
}

async fn write_all<T: AsyncWrite>(mut write: WriteHalf<T>, mut receiver: mpsc::UnboundedReceiver<ToAgent>) {
    let mut batch = Vec::new();
    while let Some(message) = receiver.recv().await {
        batch.extend(wire::line(&message));
        while let Ok(message) = receiver.try_recv() {
            batch.extend(wire::line(&message));
        }
        // TLS holds back what the network does not take at once.
        if write.write_all(&batch).await.is_err() || write.flush().await.is_err() {
            return;
        }
        batch.clear();
    }
    let _ = write.shutdown().await;
}

/// Hands on what the agent says until the connection ends or is replaced.
async fn converse<S: Site, T: AsyncRead>(
    shared: &Arc<Workers<S>>,
    (key, mut up): (StreamKey, Option<u32>),
    lines: &mut Lines<T>,
    sender: Sender,
    mut closed: oneshot::Receiver<()>,
    (execs, channels, mut pings): (&Execs, &Channels, Option<Pings>),
) {
    let (log, pieces) = mpsc::channel(LOG_QUEUE);
    let dropped = Arc::new(AtomicBool::new(false));
    let mut keeper = tokio::spawn(keep_log(shared.clone(), key, pieces, sender.clone(), dropped.clone()));
    let acks = Arc::new(Acks::new(sender));
    loop {
        let message = tokio::select! {
            message = lines.next() => message,
            ping = next_ping(&mut pings) => match ping {
                Some(ping) => {
                    acks.send(ping);
                    continue;
                }
                None => break,
            },
            _ = &mut closed => break,
            // The keeper ends where the stream must begin again from what is kept.
            _ = &mut keeper => break,
        };
        if let Some(pings) = &mut pings {
            pings.said_something();
        }
        match message {
            Ok(Some(FromAgent::Event { seq, ago_ms, epoch, event })) => {
                take_event(shared, key, &acks, seq, ago_ms, epoch, event);
            }
            Ok(Some(FromAgent::Progress { ago_ms, rank, progress, .. })) => {
                shared.telemetry.progress(key.job, point(key.attempt, ago_ms, rank, progress));
            }
            Ok(Some(FromAgent::Log { offset, text })) => {
                // A disk that stands still must hold up no event: then log is
                // passed over, and asked for again by beginning anew.
                if !dropped.load(Ordering::Relaxed)
                    && log.send_timeout((offset, text), Duration::from_secs(2)).await.is_err()
                {
                    dropped.store(true, Ordering::Relaxed);
                }
            }
            Ok(Some(FromAgent::Sign { ago_ms, epoch, sign })) => {
                shared.telemetry.sign(key, epoch, span(ago_ms), noticed(sign));
            }
            Ok(Some(FromAgent::Exec { id, output })) => {
                if !execs.put(id, output) {
                    acks.send(ToAgent::ExecKill { id });
                }
            }
            Ok(Some(FromAgent::Channel { id, output })) => {
                if !channels.put(id, output) {
                    acks.send(ToAgent::Put { id, input: ChannelInput::Close });
                }
            }
            Ok(Some(FromAgent::Pong { n })) => {
                if let Some(pings) = &mut pings {
                    pings.answered(shared, key, n);
                }
                // A store that was lost may have been told that its ranks are up, and nobody says it again. What is
                // said again, with the right time, came before the first answer to a ping.
                if let Some(epoch) = up.take() {
                    shared.report_worker(key, epoch, Span(0), WorkerEvent::Up, None);
                }
            }
            // A second hello, or what is no message of this protocol.
            Ok(Some(FromAgent::Hello { .. })) | Ok(None) | Err(_) => break,
        }
    }
    drop(log);
    keeper.abort();
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn take_event<S: Site>(
    shared: &Arc<Workers<S>>,
    key: StreamKey,
    acks: &Arc<Acks>,
    seq: u64,
    ago_ms: u64,
    epoch: u32,
    event: Event,
) {
    acks.begin(seq);
    let ended = match &event {
        Event::Ended { ended } => Some((ended.epoch, ended.log_end)),
        _ => None,
    };
    if let Some((_, log_end)) = ended {
        shared.with(key, |worker| {
            worker.log_end = Some(log_end);
            worker.release();
        });
    }
    let (acks, weak) = (acks.clone(), Arc::downgrade(shared));
    let durable: Durable = Box::new(move || {
        if let (Some((epoch, _)), Some(shared)) = (ended, weak.upgrade()) {
            shared.with(key, |worker: &mut Worker<S::Own>| worker.gone = Some(epoch));
        }
        acks.done(seq);
    });
    let ago = span(ago_ms);
    let mut event = worker_event(event);
    if let WorkerEvent::CheckpointComplete { path, .. } = &mut event {
        *path = shared.site.named(key.job, path);
    }
    shared.report_worker(key, epoch, ago, event, Some(durable));
}

fn worker_event(event: Event) -> WorkerEvent {
    match event {
        Event::Up => WorkerEvent::Up,
        Event::LaunchFailed { reason } => WorkerEvent::LaunchFailed { reason },
        Event::RankExited { rank, code, signal, stopping, last_lines, last_step, fault } => {
            WorkerEvent::RankExited { rank, code, signal, stopping, last_lines, last_step, why: why(fault) }
        }
        Event::FirstStep { step } => WorkerEvent::FirstStep { step },
        Event::CaughtUp { step } => WorkerEvent::CaughtUp { step },
        Event::CheckpointBegun { step } => WorkerEvent::CheckpointBegun { step },
        Event::CheckpointGoesOn { step } => WorkerEvent::CheckpointGoesOn { step },
        Event::CheckpointComplete { step, path } => WorkerEvent::CheckpointComplete { step, path },
        Event::CheckpointFailed { step } => WorkerEvent::CheckpointFailed { step },
        Event::Facts { values } => WorkerEvent::Facts { values },
        Event::Leaving { within_ms } => {
            let within = Some(span(within_ms));
            WorkerEvent::Leaving { reason: "its agent was asked to end (SIGTERM)".to_owned(), within }
        }
        Event::Ended { ended } => WorkerEvent::Gone {
            ranks: rank_ends(ended.ranks),
            reason: ended.reason,
            last_step: ended.last_step,
            next_port: Some(ended.port).filter(|port| *port > 0),
        },
    }
}

fn span(ms: u64) -> Span {
    Span(i64::try_from(ms).unwrap_or(i64::MAX))
}

/// The longest name of a port, in bytes.
const LONGEST_PORT: usize = 80;

fn noticed(sign: protocol::Sign) -> Sign {
    match sign {
        protocol::Sign::Active => Sign::Active,
        protocol::Sign::Role { rank, role } => Sign::Role { rank, role },
        protocol::Sign::Collective { rank, number } => Sign::Collective { rank, number },
        protocol::Sign::Xid { number, gpu, text } => {
            let verdict = (number == xid::VERDICT).then(|| xid::verdict(&text)).flatten();
            Sign::Xid { number, gpu, verdict }
        }
        protocol::Sign::Port { device, port, active: _, downed, symbol_errors } => {
            let port = format!("{device}/{port}").chars().take(LONGEST_PORT).collect();
            Sign::Port { port, downed, symbol_errors }
        }
        protocol::Sign::DiskFull { path: _ } => Sign::DiskFull,
    }
}

fn point(attempt: u32, ago_ms: u64, rank: u32, progress: protocol::Progress) -> Point {
    let (mut values, mut odd) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in progress.values {
        match value {
            protocol::Value::Number(n) => {
                values.insert(name, n);
            }
            protocol::Value::Text(text) => {
                odd.insert(name, text);
            }
        }
    }
    let at = Time(unix_ms()) - span(ago_ms);
    let protocol::Progress { step, total_steps, tokens, .. } = progress;
    Point { at, attempt, rank, step, total_steps, tokens, values, odd }
}

/// Keeps log and acknowledges it, for as long as nothing of it was passed over.
async fn keep_log<S: Site>(
    shared: Arc<Workers<S>>,
    key: StreamKey,
    mut pieces: mpsc::Receiver<(u64, String)>,
    sender: Sender,
    dropped: Arc<AtomicBool>,
) {
    while let Some((offset, text)) = pieces.recv().await {
        let text: Arc<str> = text.into();
        let offset = loop {
            let (keep, piece) = (shared.clone(), text.clone());
            // Writing may wait for a disk, which a connection's task must not.
            let kept = tokio::task::spawn_blocking(move || keep.telemetry.log_append(key, offset, &piece)).await;
            match kept {
                Ok(Ok(have)) => break have,
                Ok(Err(_)) => tokio::time::sleep(LOG_PAUSE).await,
                Err(_) => return,
            }
        };
        let _ = sender.send(ToAgent::LogAck { offset });
        shared.with(key, |worker| {
            worker.log_have = worker.log_have.max(offset);
            worker.release();
        });
        if dropped.load(Ordering::Relaxed) && pieces.is_empty() {
            return;
        }
    }
}

/// Which events of a connection are durable. Acknowledgements name the last of
/// those without a gap before them.
struct Acks {
    sender: Sender,
    durable: Mutex<Sequence>,
}

#[derive(Default)]
struct Sequence {
    /// Everything before this number is durable, or was before the connection.
    next: Option<u64>,
    later: BTreeSet<u64>,
}

impl Sequence {
    fn begin(&mut self, seq: u64) {
        self.next.get_or_insert(seq);
    }

    /// The number to acknowledge, if it grew.
    fn done(&mut self, seq: u64) -> Option<u64> {
        let next = self.next.get_or_insert(seq);
        let before = *next;
        self.later.insert(seq);
        while self.later.remove(next) {
            *next += 1;
        }
        (*next > before).then(|| *next - 1)
    }
}

impl Acks {
    fn new(sender: Sender) -> Acks {
        Acks { sender, durable: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Sequence> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, seq: u64) {
        self.lock().begin(seq);
    }

    fn done(&self, seq: u64) {
        let mut sequence = self.lock();
        if let Some(seq) = sequence.done(seq) {
            self.send(ToAgent::Ack { seq });
        }
    }

    fn send(&self, message: ToAgent) {
        let _ = self.sender.send(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_events_without_a_gap_before_them_are_acknowledged() {
        let mut sequence = Sequence::default();
        for seq in 3..=6 {
            sequence.begin(seq);
        }
        assert_eq!(sequence.done(5), None);
        assert_eq!(sequence.done(4), None);
        assert_eq!(sequence.done(3), Some(5));
        assert_eq!(sequence.done(3), None, "said twice");
        assert_eq!(sequence.done(6), Some(6));
    }
}
