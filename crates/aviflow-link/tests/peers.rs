//! What agents across a network are told of each other, and what their pongs prove.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use aviflow_agent::protocol::{Ended, Event, FromAgent, PROTOCOL, ToAgent, wire};
use aviflow_core::model::{Address, JobId, Term};
use aviflow_engine::ports::{Observation, WorkerEvent};
use aviflow_engine::telemetry::{BuildProgress, Point, StreamKey, Telemetry};
use aviflow_link::{Hello, Listener, Site, Worker, Workers, listen};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const JOB: JobId = JobId(7);

struct Nothing;

impl Telemetry for Nothing {
    fn log_have(&self, _: StreamKey) -> u64 {
        0
    }
    fn log_append(&self, _: StreamKey, offset: u64, text: &str) -> io::Result<u64> {
        Ok(offset + text.len() as u64)
    }
    fn progress(&self, _: JobId, _: Point) {}
    fn build(&self, _: BuildProgress) {}
    fn forget_build(&self, _: &str) {}
}

/// Believes everybody.
struct Anybody;

impl Site for Anybody {
    type Own = ();
    type Proof = ();
    async fn prove(&self, _: &Hello) -> Option<()> {
        Some(())
    }
    fn is(&self, (): &(), (): &()) -> Option<bool> {
        Some(true)
    }
    fn ended(&self, _: StreamKey) -> io::Result<Option<Ended>> {
        Ok(None)
    }
    fn named(&self, _: JobId, path: &str) -> String {
        path.to_owned()
    }
}

/// As across a network, in a hurry.
struct Fast(TcpListener);

impl Listener for Fast {
    type Stream = TcpStream;
    const PING: Option<Duration> = Some(Duration::from_millis(100));
    async fn accept(&self) -> io::Result<TcpStream> {
        Ok(self.0.accept().await?.0)
    }
}

struct Agent(BufReader<TcpStream>);

impl Agent {
    async fn connect(at: SocketAddr, worker: u32, peer_port: u16) -> Agent {
        Agent::connect_up(at, worker, peer_port, None).await
    }

    /// One whose ranks of an epoch are up.
    async fn connect_up(at: SocketAddr, worker: u32, peer_port: u16, up: Option<u32>) -> Agent {
        let mut agent = Agent(BufReader::new(TcpStream::connect(at).await.unwrap()));
        let hello = FromAgent::Hello {
            protocol: PROTOCOL,
            job_id: JOB.0,
            attempt: 1,
            worker,
            token: String::new(),
            pid: 1,
            epoch: up.unwrap_or_default(),
            host: format!("10.0.0.{worker}"),
            port: 20_000,
            up: up.is_some(),
            log: (0, 0),
            peer_port,
            gpus: Vec::new(),
        };
        agent.say(&hello).await;
        assert_eq!(agent.next().await, Some(ToAgent::Welcome { term: 1, log_have: 0, ping_ms: 100 }));
        agent
    }

    async fn say(&mut self, message: &FromAgent) {
        self.0.get_mut().write_all(&wire::line(message)).await.unwrap();
    }

    async fn next(&mut self) -> Option<ToAgent> {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).await.ok()?;
        line.pop()?;
        Some(wire::parse(&line).unwrap())
    }

    async fn start(&mut self) -> Vec<(u32, SocketAddr)> {
        loop {
            if let ToAgent::Start { peers, .. } = self.next().await.unwrap() {
                return peers;
            }
        }
    }

    async fn ping(&mut self) -> Option<(u64, u64)> {
        loop {
            if let ToAgent::Ping { n, heard } = self.next().await? {
                return Some((n, heard));
            }
        }
    }
}

fn key(worker: u32) -> StreamKey {
    StreamKey { job: JOB, attempt: 1, worker }
}

/// A control plane with an attempt of three workers, and where it listens.
async fn control() -> (Arc<Workers<Anybody>>, SocketAddr) {
    control_told(|_| {}).await
}

/// The same, with what it tells the engine.
async fn control_told(tell: impl Fn(Observation) + Send + Sync + 'static) -> (Arc<Workers<Anybody>>, SocketAddr) {
    let report = Box::new(move |observation, _| tell(observation));
    let workers = Arc::new(Workers::new(Anybody, Arc::new(Nothing), report));
    assert!(workers.obeys(Term(1)));
    workers.reconcile(&[(JOB, 1)], Vec::new());
    for worker in 0..3 {
        workers.lock().workers.insert(key(worker), Worker::default());
    }
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(listen(workers.clone(), Fast(listener)));
    (workers, at)
}

fn witnessed(workers: &Workers<Anybody>, worker: u32) -> Option<(Instant, Instant)> {
    workers.with(key(worker), |w| w.link.as_ref().and_then(|link| link.witnessed())).unwrap()
}

#[tokio::test]
async fn a_start_names_those_that_answer_their_peers() {
    let (workers, at) = control().await;
    let mut agents = [Agent::connect(at, 0, 4000).await, Agent::connect(at, 1, 4001).await];
    let _old = Agent::connect(at, 2, 0).await;
    let rank0 = Address { host: "10.0.0.0".into(), port: 20_000 };
    workers.start(Term(1), (JOB, 1, 1), &rank0, None, |_| {});
    let peer = |worker: u8, port| (u32::from(worker), SocketAddr::from(([10, 0, 0, worker], port)));
    for agent in &mut agents {
        assert_eq!(agent.start().await, [peer(0, 4000), peer(1, 4001)]);
    }
    // Said again to one that comes back, with what is known by then.
    let mut again = Agent::connect(at, 2, 4002).await;
    assert_eq!(again.start().await, [peer(0, 4000), peer(1, 4001), peer(2, 4002)]);
}

#[tokio::test]
async fn that_ranks_are_up_is_told_after_what_an_agent_says_again() {
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let (_workers, at) = control_told(move |observation| drop(tell.send(observation))).await;
    let mut agent = Agent::connect_up(at, 0, 4000, Some(3)).await;
    let (n, _) = agent.ping().await.unwrap();
    let event = Event::FirstStep { step: 7 };
    agent.say(&FromAgent::Event { seq: 1, ago_ms: 0, epoch: 3, event }).await;
    agent.say(&FromAgent::Pong { n }).await;
    let mut events = Vec::new();
    while events.len() < 3 {
        if let Some(Observation::Worker { epoch, event, .. }) = told.recv().await {
            events.push((epoch, event));
        }
    }
    assert!(matches!(events[0], (0, WorkerEvent::Ready { .. })), "{events:?}");
    assert_eq!(events[1..], [(3, WorkerEvent::FirstStep { step: 7 }), (3, WorkerEvent::Up)]);
}

#[tokio::test]
async fn an_agent_is_a_witness_while_it_answers() {
    let (workers, at) = control().await;
    let begin = Instant::now();
    let mut agent = Agent::connect(at, 0, 4000).await;
    assert_eq!(agent.ping().await, Some((1, 0)));
    assert_eq!(witnessed(&workers, 0), None, "nothing was answered");
    agent.say(&FromAgent::Pong { n: 1 }).await;
    while agent.ping().await.unwrap().1 < 1 {}
    let (from, to) = witnessed(&workers, 0).unwrap();
    assert!(begin < to && to < from, "the ping was sent before its answer came");
    let mut last = 0;
    while witnessed(&workers, 0).unwrap().1 <= from {
        last = agent.ping().await.unwrap().0;
        agent.say(&FromAgent::Pong { n: last }).await;
    }
    let (same, later) = witnessed(&workers, 0).unwrap();
    assert!(same == from && later <= Instant::now());
    // An agent of an earlier version does not count, and so proves nothing more; its connection stays.
    for _ in 0..6 {
        assert!(agent.ping().await.unwrap().1 <= last);
        agent.say(&FromAgent::Pong { n: 0 }).await;
    }
    assert_eq!(witnessed(&workers, 0).unwrap().0, from);
    // One that says nothing is left, and is no witness any more.
    while agent.ping().await.is_some() {}
    assert_eq!(witnessed(&workers, 0), None);
    let until = workers.with(key(0), |w| w.heard_until).unwrap();
    assert!(until > Some(later), "until then it may have been heard");
}
