//! Agents of earlier versions are talked to as they expect it, and others are told why they are not.
//!
//! `versions/N.jsonl` is what an agent of version N of the protocol and a control plane of its time have said to each
//! other, line by line, as it was recorded; a new version adds a file, and none is ever changed.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use aviflow_agent::protocol::{CHANNELS, Channel, ChannelOutput, Ended, ExecOutput, OLDER, PROTOCOL};
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::{Address, JobId, Term};
use aviflow_engine::ports::Observation;
use aviflow_engine::telemetry::{BuildProgress, Point, StreamKey, Telemetry};
use aviflow_link::{ChannelReader, ExecError, ExecStream, Hello, Listener, Said, Site, Worker, Workers, listen};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const KEY: StreamKey = StreamKey { job: JobId(7), attempt: 2, worker: 0 };

const RECORDED: [(u32, &str); 3] = [
    (1, include_str!("versions/1.jsonl")),
    (2, include_str!("versions/2.jsonl")),
    (3, include_str!("versions/3.jsonl")),
];

/// What the control plane has heard.
#[derive(Default)]
struct Heard {
    log: Mutex<String>,
    steps: Mutex<Vec<u64>>,
    events: Mutex<Vec<WorkerEvent>>,
    warnings: Mutex<Vec<String>>,
}

struct Keeper(Arc<Heard>);

impl Telemetry for Keeper {
    fn log_have(&self, _: StreamKey) -> u64 {
        self.0.log.lock().unwrap().len() as u64
    }
    fn log_append(&self, _: StreamKey, offset: u64, text: &str) -> io::Result<u64> {
        let mut log = self.0.log.lock().unwrap();
        assert_eq!(log.len() as u64, offset, "a gap, or twice the same");
        log.push_str(text);
        Ok(log.len() as u64)
    }
    fn progress(&self, _: JobId, point: Point) {
        self.0.steps.lock().unwrap().push(point.step);
    }
    fn build(&self, _: BuildProgress) {}
    fn forget_build(&self, _: &str) {}
}

struct Place(Arc<Heard>);

impl Site for Place {
    type Own = ();
    type Proof = bool;
    async fn prove(&self, hello: &Hello) -> Option<bool> {
        Some(hello.token == "t")
    }
    fn is(&self, (): &(), proof: &bool) -> Option<bool> {
        Some(*proof)
    }
    fn ended(&self, _: StreamKey) -> io::Result<Option<Ended>> {
        Ok(None)
    }
    fn named(&self, _: JobId, path: &str) -> String {
        path.to_owned()
    }
    fn place(&self, (): &()) -> Option<String> {
        Some("pod default/train-2-0".to_owned())
    }
    fn warn(&self, text: &str) {
        self.0.warnings.lock().unwrap().push(text.to_owned());
    }
}

/// As across a network, but for the time between pings.
struct Network(TcpListener);

impl Listener for Network {
    type Stream = TcpStream;
    const PING: Option<Duration> = Some(Duration::from_secs(1));
    async fn accept(&self) -> io::Result<TcpStream> {
        Ok(self.0.accept().await?.0)
    }
}

/// A control plane that expects one worker.
struct Control {
    workers: Arc<Workers<Place>>,
    heard: Arc<Heard>,
    at: SocketAddr,
}

impl Control {
    async fn new() -> Control {
        let heard = Arc::<Heard>::default();
        let to = heard.clone();
        let report = move |observation: Observation, durable: Option<Box<dyn FnOnce() + Send>>| {
            if let Observation::Worker { event, .. } = observation {
                to.events.lock().unwrap().push(event);
            }
            if let Some(durable) = durable {
                durable();
            }
        };
        let workers = Arc::new(Workers::new(Place(heard.clone()), Arc::new(Keeper(heard.clone())), Box::new(report)));
        assert!(workers.obeys(Term(1)));
        workers.reconcile(&[(KEY.job, KEY.attempt)], Vec::new());
        workers.lock().workers.insert(KEY, Worker::default());
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(listen(workers.clone(), Network(listener)));
        Control { workers, heard, at }
    }
}

/// The agent's end, and what it has heard by the way.
struct Agent(BufReader<TcpStream>, Vec<Value>);

impl Agent {
    async fn connect(at: SocketAddr) -> Agent {
        Agent(BufReader::new(TcpStream::connect(at).await.unwrap()), Vec::new())
    }

    async fn say(&mut self, message: &Value) {
        self.0.get_mut().write_all(format!("{message}\n").as_bytes()).await.unwrap();
    }

    /// The next message; none once the other end has hung up.
    async fn hear(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
        Some(serde_json::from_str(&line).unwrap())
    }

    /// Waits for what was said when this was recorded. Signs of life and acknowledgements come when they come, and the
    /// word to start comes again with each connection.
    async fn hear_like(&mut self, recorded: &Value) {
        while !self.1.iter().any(|heard| is_like(heard, recorded)) {
            let heard = self.hear().await.unwrap_or_else(|| panic!("hung up on, instead of {recorded}"));
            let by_the_way = ["ping", "ack", "logAck", "start"].map(Value::from).contains(&heard["type"]);
            assert!(by_the_way || is_like(&heard, recorded), "{heard}, not {recorded}");
            self.1.push(heard);
        }
    }
}

/// Whether a message says what the recorded one does: each of its fields, but for how often the control plane asks for
/// a sign of life, which is its own affair; or acknowledges more at once.
fn is_like(heard: &Value, recorded: &Value) -> bool {
    recorded.as_object().unwrap().iter().all(|(field, value)| match field.as_str() {
        "pingMs" => heard[field].is_u64(),
        "seq" | "offset" => heard[field].as_u64() >= value.as_u64(),
        _ => heard[field] == *value,
    })
}

/// Lets an agent say what it said when the conversation was recorded, and expects the same answers.
async fn replay(version: u32, recorded: &str) {
    let control = Control::new().await;
    let mut agent = None;
    let mut exec: Option<ExecStream> = None;
    let mut channel: Option<ChannelReader> = None;
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if line["note"] == "the agent connects" {
            agent = Some(Agent::connect(control.at).await);
            continue;
        }
        let agent = agent.as_mut().unwrap();
        if line["agent"].is_object() {
            agent.say(&line["agent"]).await;
            if line["agent"]["type"] == "exec" {
                let output: ExecOutput = serde_json::from_value(line["agent"]["output"].clone()).unwrap();
                assert_eq!(exec.as_mut().unwrap().next().await, Some(output), "version {version}");
            }
            if line["agent"]["type"] == "channel" {
                let output: ChannelOutput = serde_json::from_value(line["agent"]["output"].clone()).unwrap();
                let expected = match output {
                    ChannelOutput::Opened => Said::Opened,
                    ChannelOutput::Data(text) => Said::Data(STANDARD.decode(text).unwrap()),
                    ChannelOutput::End => Said::End,
                    ChannelOutput::Exit(code) => Said::Exit(code),
                    other => panic!("{other:?}"),
                };
                assert_eq!(channel.as_mut().unwrap().next().await, Some(expected), "version {version}");
            }
            continue;
        }
        let answer = &line["control"];
        match answer["type"].as_str().unwrap() {
            "start" => {
                let rank0 = Address { host: "127.0.0.1".into(), port: 20_000 };
                control.workers.start(Term(1), (KEY.job, KEY.attempt, 1), &rank0, None, |_| {});
            }
            "exec" => {
                let argv = vec!["echo".to_owned(), "inside".to_owned()];
                exec = Some(control.workers.exec(KEY, Some(0), argv, b"").unwrap());
            }
            "open" => {
                let (_, reader) = control.workers.open(KEY, Some(0), Channel::Port { port: 6006 }).unwrap();
                channel = Some(reader);
            }
            "release" => control
                .workers
                .with(KEY, |worker| {
                    worker.remove = true;
                    worker.release();
                })
                .unwrap(),
            _ => {}
        }
        agent.hear_like(answer).await;
    }
    assert!(exec.is_some(), "version {version}");
    assert_eq!(channel.is_some(), version >= CHANNELS, "version {version}");
    let log = control.heard.log.lock().unwrap();
    let lines: Vec<&str> = log.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect();
    assert_eq!(lines, ["begun", r#"{"step": 4, "loss": 1.5}"#, "done", "rank 0 ended with 3"], "version {version}");
    assert_eq!(*control.heard.steps.lock().unwrap(), [4], "version {version}");
    let events = control.heard.events.lock().unwrap();
    let names: Vec<String> =
        events.iter().map(|event| format!("{event:?}").split([' ', '{']).next().unwrap().to_owned()).collect();
    assert_eq!(names, ["Ready", "Up", "Facts", "Ready", "FirstStep", "RankExited", "Gone"], "version {version}");
    let WorkerEvent::Gone { ranks, last_step, .. } = events.last().unwrap() else { panic!("{events:?}") };
    assert_eq!((ranks[&0].code, *last_step), (3, Some(4)), "version {version}");
}

#[tokio::test]
async fn conversations_of_all_versions_that_are_understood_go_on_as_they_did() {
    let oldest = PROTOCOL.saturating_sub(OLDER).max(1);
    let versions: Vec<u32> = RECORDED.iter().map(|(version, _)| *version).filter(|v| *v >= oldest).collect();
    assert_eq!(versions, (oldest..=PROTOCOL).collect::<Vec<_>>(), "each version has a recorded conversation");
    for (version, recorded) in RECORDED.iter().filter(|(version, _)| *version >= oldest) {
        let hello: Value = serde_json::from_str(recorded.lines().nth(1).unwrap()).unwrap();
        assert_eq!(hello["agent"]["protocol"], json!(version));
        replay(*version, recorded).await;
    }
}

/// The hello of an agent of a version.
fn hello(version: u32, token: &str) -> Value {
    json!({
        "type": "hello", "protocol": version, "jobId": 7, "attempt": 2, "worker": 0, "token": token, "pid": 1,
        "epoch": 1, "host": "10.0.0.1", "port": 20000, "up": true, "log": [0, 0], "later": true,
    })
}

#[tokio::test]
async fn an_agent_of_another_version_is_told_why_it_is_left_alone() {
    let control = Control::new().await;
    for _ in 0..2 {
        let mut agent = Agent::connect(control.at).await;
        agent.say(&hello(PROTOCOL + 1, "t")).await;
        let refused = agent.hear().await.unwrap();
        let reason = refused["reason"].as_str().unwrap();
        assert_eq!(refused["type"], "refused");
        let words = format!(
            "worker 0 of job 7 (attempt 2, pod default/train-2-0) is left alone: its agent speaks version \
                             {} of the protocol, and this control plane 1 to {PROTOCOL}",
            PROTOCOL + 1
        );
        assert!(reason.starts_with(&words), "{reason}");
        assert!(reason.contains("Its Aviflow is newer: upgrade the control plane"), "{reason}");
        // Whoever runs the control plane is told the same, once.
        assert_eq!(*control.heard.warnings.lock().unwrap(), [reason]);
        assert!(control.workers.with(KEY, |worker| worker.link.is_none()).unwrap());
    }
    // Who proves nothing hears nothing.
    let mut stranger = Agent::connect(control.at).await;
    stranger.say(&hello(PROTOCOL + 1, "guessed")).await;
    assert_eq!(stranger.hear().await, None);
    // Of a version that is too old; there is none yet that can be known.
    let mut agent = Agent::connect(control.at).await;
    agent.say(&hello(0, "t")).await;
    let reason = agent.hear().await.unwrap()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("more than two minor versions older"), "{reason}");
    // One that is understood again is welcomed.
    let mut agent = Agent::connect(control.at).await;
    agent.say(&hello(PROTOCOL, "t")).await;
    assert_eq!(agent.hear().await.unwrap()["type"], "welcome");
    assert_eq!(control.heard.warnings.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn an_agent_without_channels_is_never_asked_for_one() {
    let control = Control::new().await;
    let mut agent = Agent::connect(control.at).await;
    agent.say(&hello(CHANNELS - 1, "t")).await;
    assert_eq!(agent.hear().await.unwrap()["type"], "welcome");
    let refused = control.workers.open(KEY, None, Channel::Port { port: 6006 }).err();
    assert_eq!(refused, Some(ExecError::TooOld { job: KEY.job, worker: KEY.worker }));
    assert!(refused.unwrap().to_string().contains("older than this control plane"));
}
