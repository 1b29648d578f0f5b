//! A control plane that a test plays, an agent, and ways to see processes end.
//!
//! Nothing in here sleeps: tests block on sockets, on a FIFO that every process
//! of a worker holds open, and on the end of children. A watchdog ends the test
//! program if one of these never comes.

#![allow(dead_code, reason = "each test file uses its part, all of them everything")]

use aviflow_agent::Alive;
use aviflow_agent::protocol::{Ended, Endpoint, Event, FromAgent, Sign, ToAgent, WorkerSpec, files, wire};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Once;
use std::time::Duration;
use tempfile::TempDir;

/// A training that leaves everything that can be left: children in the background, in sessions of their own, without an environment, ignoring signals.
pub const MESSY: &str = r#"
exec 9>"$FIFO"
sleep 1000 &
setsid sleep 1000 &
(setsid bash -c 'trap "" TERM HUP INT; sleep 1000 & wait' &)
env -i sleep 1000 &
(trap "" TERM; sleep 1000) &
echo messy
"#;

static WATCHDOG: Once = Once::new();

fn watchdog() {
    WATCHDOG.call_once(|| {
        std::thread::spawn(|| {
            // sleep: only a test that hangs ever sees its end
            std::thread::sleep(Duration::from_secs(300));
            eprintln!("watchdog: something that a test waits for never came");
            std::process::abort();
        });
    });
}

/// Waits until a condition holds.
pub fn until(mut condition: impl FnMut() -> bool) {
    watchdog();
    while !condition() {
        std::thread::yield_now();
    }
}

pub struct World {
    pub folder: TempDir,
    pub spec: WorkerSpec,
    listener: UnixListener,
    /// The process that was started: the agent is its child.
    pub guardian: Child,
    connection: Option<BufReader<UnixStream>>,
    /// The log so far, from offset 0 unless something was dropped.
    pub log: String,
    pub log_end: u64,
    pub acknowledge: bool,
    pub last_seq: u64,
    /// Where the agent answers its peers, as it said; and who they are, for the next start.
    pub peer_port: u16,
    /// The port for rank 0, as it said.
    pub port: u16,
    pub peers: Vec<(u32, SocketAddr)>,
}

pub fn spec(folder: &Path, script: &str) -> WorkerSpec {
    WorkerSpec {
        job_id: 7,
        job: "default/test".into(),
        attempt: 1,
        worker: 0,
        workers: 1,
        node: "n1".into(),
        // The folder makes the mark differ between tests that run at the same time.
        token: folder.display().to_string(),
        control: Endpoint::Unix(folder.join("control.sock")),
        authority: None,
        host: "127.0.0.1".into(),
        run: vec!["bash".into(), "-c".into(), script.into()],
        cwd: folder.to_owned(),
        env: BTreeMap::from([("FIFO".into(), folder.join("fifo").display().to_string())]),
        ranks: 1,
        first_rank: 0,
        world_size: 1,
        per_gpu: true,
        gpus_per_node: 2,
        slots: vec![0, 1],
        grace_ms: 60_000,
        log_buffer: 64 << 20,
        facts: BTreeMap::new(),
        token_file: None,
        inherit: false,
        prepend: BTreeMap::new(),
        fence_after_ms: None,
    }
}

impl World {
    /// An agent for a script, connected and welcomed.
    pub fn new(script: &str) -> Self {
        Self::with(script, |_| {})
    }

    pub fn with(script: &str, change: impl FnOnce(&mut WorkerSpec)) -> Self {
        Self::launched_by(script, change, |folder| Command::new(agent()).arg(folder).spawn().expect("the agent"))
    }

    pub fn launched_by(
        script: &str,
        change: impl FnOnce(&mut WorkerSpec),
        launch: impl FnOnce(&Path) -> Child,
    ) -> Self {
        watchdog();
        let folder = tempfile::tempdir().expect("a folder");
        let mut spec = spec(folder.path(), script);
        change(&mut spec);
        fs::write(folder.path().join(files::SPEC), serde_json::to_vec(&spec).expect("json")).expect("written");
        assert!(Command::new("mkfifo").arg(folder.path().join("fifo")).status().expect("mkfifo").success());
        let listener = UnixListener::bind(folder.path().join("control.sock")).expect("a socket");
        let guardian = launch(folder.path());
        let mut world = Self {
            folder,
            spec,
            listener,
            guardian,
            connection: None,
            log: String::new(),
            log_end: 0,
            acknowledge: true,
            last_seq: 0,
            peer_port: 0,
            port: 0,
            peers: Vec::new(),
        };
        world.accept();
        world.welcome();
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits for a connection; gives its greeting.
    pub fn accept(&mut self) -> FromAgent {
        let (stream, _) = self.listener.accept().expect("a connection");
        self.connection = Some(BufReader::new(stream));
        let hello = self.next().expect("a greeting");
        let FromAgent::Hello { peer_port, port, .. } = hello else { panic!("{hello:?}") };
        (self.peer_port, self.port) = (peer_port, port);
        hello
    }

    pub fn hang_up(&mut self) {
        self.connection = None;
    }

    pub fn send(&mut self, message: &ToAgent) {
        let connection = self.connection.as_mut().expect("a connection");
        connection.get_mut().write_all(&wire::line(message)).expect("sent");
    }

    /// Says several things at once.
    pub fn send_all(&mut self, messages: &[ToAgent]) {
        let lines: Vec<u8> = messages.iter().flat_map(wire::line).collect();
        let connection = self.connection.as_mut().expect("a connection");
        connection.get_mut().write_all(&lines).expect("sent");
    }

    pub fn welcome(&mut self) {
        let log_have = self.log_end;
        self.send(&ToAgent::Welcome { term: 1, log_have, ping_ms: 0 });
    }

    pub fn start(&mut self, epoch: u32) {
        self.send(&ToAgent::Start {
            term: 1,
            epoch,
            master_host: "127.0.0.1".into(),
            master_port: 20_000,
            best_step: Some(1),
            peers: self.peers.clone(),
        });
    }

    pub fn stop(&mut self, grace_ms: u64) {
        self.send(&ToAgent::Stop { term: 1, grace_ms, reason: "a person".into(), epoch: 0 });
    }

    /// The next message; none at the end of the connection.
    pub fn next(&mut self) -> Option<FromAgent> {
        let mut line = Vec::new();
        self.connection.as_mut().expect("a connection").read_until(b'\n', &mut line).ok()?;
        line.pop()?;
        let message = wire::parse(&line).expect("a message");
        if let FromAgent::Log { offset, text } = &message {
            if self.log_end > 0 {
                assert!(*offset >= self.log_end, "log came twice: {offset} < {}", self.log_end);
            }
            self.log_end = offset + text.len() as u64;
            self.log += text;
            let offset = self.log_end;
            self.send(&ToAgent::LogAck { offset });
        }
        if let FromAgent::Event { seq, .. } = &message {
            self.last_seq = *seq;
            if self.acknowledge {
                self.send(&ToAgent::Ack { seq: *seq });
            }
        }
        Some(message)
    }

    /// The next sign, but that there was output.
    pub fn sign(&mut self) -> Sign {
        loop {
            match self.next().expect("a sign") {
                FromAgent::Sign { sign: Sign::Active, .. } => {}
                FromAgent::Sign { sign, .. } => return sign,
                _ => {}
            }
        }
    }

    /// The next event.
    pub fn event(&mut self) -> Event {
        loop {
            if let FromAgent::Event { event, .. } = self.next().expect("an event") {
                return event;
            }
        }
    }

    pub fn up(&mut self, epoch: u32) {
        self.start(epoch);
        assert_eq!(self.event(), Event::Up);
    }

    /// Reads until the log holds a text.
    pub fn log_has(&mut self, text: &str) {
        while !self.log.contains(text) {
            self.next().expect("more log");
        }
    }

    /// Reads until the worker's end, and its whole log.
    pub fn ended(&mut self) -> Ended {
        loop {
            if let Event::Ended { ended } = self.event() {
                self.whole_log(&ended);
                return ended;
            }
        }
    }

    pub fn whole_log(&mut self, ended: &Ended) {
        while self.log_end < ended.log_end {
            self.next().expect("more log");
        }
    }

    /// The texts of a rank's lines from a source (`o`, `e`, `a`).
    pub fn lines(&self, rank: u32, source: char) -> Vec<&str> {
        let of = |line| {
            let mut parts = str::splitn(line, 4, ' ');
            let (at, by, from) = (parts.next()?, parts.next()?, parts.next()?);
            assert!(at.parse::<i64>().is_ok(), "no stamp: {line}");
            (by == rank.to_string() && from == source.to_string()).then(|| parts.next().unwrap_or_default())
        };
        self.log.lines().filter_map(of).collect()
    }

    /// Releases the agent and waits for its end.
    pub fn release(&mut self) {
        self.send(&ToAgent::Release);
        assert!(self.guardian.wait().expect("an end").success());
        assert!(!self.path(files::LOG).exists() && !self.path(files::HOOKS).exists());
        assert!(self.path(files::ENDED).exists());
    }

    /// The reading end of the FIFO that every process of the script holds. Waits until one does.
    pub fn fifo(&self) -> File {
        File::open(self.path("fifo")).expect("the fifo")
    }

    /// The agent as it named itself.
    pub fn agent(&self) -> Alive {
        Alive::read(self.folder.path()).expect("an agent")
    }

    /// Kills the agent; its guardian cleans up and ends as it did.
    pub fn kill_agent(&mut self) {
        signal(self.agent().pid, "KILL");
        assert_eq!(self.guardian.wait().expect("an end").signal(), Some(9));
    }

    pub fn kill_guardian(&mut self) {
        self.guardian.kill().expect("killed");
        assert_eq!(self.guardian.wait().expect("an end").signal(), Some(9));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Also after a failed test nothing is left: the agent cleans up without its guardian.
        let _ = self.guardian.kill();
        let _ = self.guardian.wait();
        if let Some(agent) = Alive::read(self.folder.path()) {
            until(|| !agent.lives());
        }
        while aviflow_agent::sweep(&aviflow_agent::mark(&self.spec)) > 0 {}
    }
}

pub fn agent() -> &'static str {
    env!("CARGO_BIN_EXE_aviflow-agent")
}

pub fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().expect("kill").success());
}

/// Waits until nobody holds the FIFO any more.
pub fn gone(mut fifo: File) {
    let mut rest = Vec::new();
    fifo.read_to_end(&mut rest).expect("the end");
}
