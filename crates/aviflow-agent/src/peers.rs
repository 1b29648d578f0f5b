//! What the agents of a gang ask each other while the control plane is away.
//!
//! A TCP connection, one line each way, and no more: the job and attempt, and whether whoever answers
//! is itself in touch with the control plane. Only the same job and attempt is answered. Nothing
//! secret is said, and nothing is believed but that the peer's agent is there: whoever forges an answer
//! must already receive what is sent to the pod of a worker.
//!
//! Nothing in here waits; what an answer means is decided in [`crate::machine`].

use crate::protocol::{WorkerSpec, wire};
use crate::sys::{self, Poll};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

/// The longest line.
const MAX_LINE: usize = 1024;

/// Those that are answered at one time: a gang has no more, and whoever is left out asks again.
const MAX_CALLERS: usize = 4096;

/// The time that a caller has to ask, in milliseconds.
const CALLER_MS: u64 = 5000;

/// The pause after a caller could not be accepted, in milliseconds: it would be ready again at once.
const ACCEPT_PAUSE_MS: u64 = 100;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Question {
    job_id: u64,
    job: String,
    attempt: u32,
    /// Who is meant.
    worker: u32,
    /// Repeated in the answer.
    nonce: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    worker: u32,
    nonce: u64,
    /// Whether it is in touch with the control plane.
    control: bool,
}

struct Caller {
    stream: TcpStream,
    read: Vec<u8>,
    until: u64,
    place: usize,
}

struct Call {
    worker: u32,
    address: SocketAddr,
    stream: File,
    asked: bool,
    read: Vec<u8>,
    place: usize,
}

/// What came of a look at a stream.
enum Got {
    Line,
    More,
    End,
}

/// Both ends of it: answers, and the round of questions that is under way.
pub struct Peers {
    job_id: u64,
    job: String,
    attempt: u32,
    worker: u32,
    listener: Option<TcpListener>,
    port: u16,
    place: usize,
    /// Nobody is accepted before this time.
    pause_until: Option<u64>,
    callers: Vec<Caller>,
    calls: Vec<Call>,
    /// Until when the round may take.
    until: Option<u64>,
    nonce: u64,
}

impl Peers {
    /// Answers on a port that the kernel chooses, where the worker has peers that may ask.
    ///
    /// # Errors
    /// If no port can be had. Then [`Peers::silent`] is left.
    pub fn listen(spec: &WorkerSpec) -> Result<Self, String> {
        let mut peers = Self::silent(spec);
        if spec.fence_after_ms.is_some() && spec.workers > 1 {
            let host: IpAddr = spec.host.parse().map_err(|_| format!("`{}` is no address", spec.host))?;
            let listener = TcpListener::bind((host, 0)).map_err(|e| format!("no port of {host} can be had: {e}"))?;
            listener.set_nonblocking(true).map_err(|e| e.to_string())?;
            peers.port = listener.local_addr().map_err(|e| e.to_string())?.port();
            peers.listener = Some(listener);
        }
        Ok(peers)
    }

    /// Answers nobody.
    #[must_use]
    pub fn silent(spec: &WorkerSpec) -> Self {
        Self {
            job_id: spec.job_id,
            job: spec.job.clone(),
            attempt: spec.attempt,
            worker: spec.worker,
            listener: None,
            port: 0,
            place: usize::MAX,
            pause_until: None,
            callers: Vec::new(),
            calls: Vec::new(),
            until: None,
            nonce: 0,
        }
    }

    /// The port on which it answers, 0 if it does not.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// When to read again, if nothing arrives.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.callers.iter().map(|caller| caller.until).chain(self.until).chain(self.pause_until).min()
    }

    /// Begins to ask; what comes of it is told by [`Peers::read`].
    ///
    /// # Errors
    /// With who cannot be reached, if that is certain at once.
    pub fn ask(&mut self, peers: Vec<(u32, SocketAddr)>, within_ms: u64, now: u64) -> Result<(), String> {
        let call = |(worker, address)| {
            let stream = sys::connect_tcp(address).map_err(|e| unreached(worker, address, &e.to_string()))?;
            let (stream, read, place) = (File::from(stream), Vec::new(), usize::MAX);
            Ok(Call { worker, address, stream, asked: false, read, place })
        };
        self.calls = peers.into_iter().map(call).collect::<Result<_, String>>()?;
        self.nonce += 1;
        self.until = Some(now + within_ms);
        Ok(())
    }

    /// Adds what is to be waited for.
    pub fn watch(&mut self, poll: &mut Poll, now: u64) {
        self.pause_until = self.pause_until.filter(|until| *until > now);
        self.place = match &self.listener {
            Some(listener) if self.callers.len() < MAX_CALLERS && self.pause_until.is_none() => {
                poll.add(listener, true, false)
            }
            _ => usize::MAX,
        };
        for caller in &mut self.callers {
            caller.place = poll.add(&caller.stream, true, false);
        }
        for call in &mut self.calls {
            call.place = poll.add(&call.stream, call.asked, !call.asked);
        }
    }

    /// Answers with `control`, and goes on with the round; gives its result once it is over: who was not reached,
    /// or is in touch with the control plane; none if there is nobody like that.
    pub fn read(&mut self, poll: &Poll, control: bool, now: u64) -> Option<Option<String>> {
        self.answer(poll, control, now);
        if poll.ready(self.place) {
            self.accept(now);
        }
        let until = self.until?;
        let mut left = Vec::new();
        let mut missing = None;
        for mut call in self.calls.drain(..) {
            if !poll.ready(call.place) {
                left.push(call);
                continue;
            }
            match call.go_on(self.nonce, (self.job_id, &self.job, self.attempt)) {
                Ok(true) => {}
                Ok(false) => left.push(call),
                Err(why) => missing = missing.or(Some(why)),
            }
        }
        if missing.is_none() && until <= now {
            missing = left.first().map(|call| unreached(call.worker, call.address, "no answer in time"));
        }
        if missing.is_none() && !left.is_empty() {
            self.calls = left;
            return None;
        }
        self.until = None;
        Some(missing)
    }

    fn accept(&mut self, now: u64) {
        let Some(listener) = &self.listener else { return };
        while self.callers.len() < MAX_CALLERS {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // Too many open files, for example.
                Err(_) => {
                    self.pause_until = Some(now + ACCEPT_PAUSE_MS);
                    return;
                }
            };
            if stream.set_nonblocking(true).is_ok() {
                self.callers.push(Caller { stream, read: Vec::new(), until: now + CALLER_MS, place: usize::MAX });
            }
        }
    }

    fn answer(&mut self, poll: &Poll, control: bool, now: u64) {
        let (job_id, job, attempt, worker) = (self.job_id, &self.job, self.attempt, self.worker);
        self.callers.retain_mut(|caller| {
            let got = if poll.ready(caller.place) { take(&mut caller.stream, &mut caller.read) } else { Got::More };
            match got {
                Got::More => caller.until > now,
                Got::End => false,
                Got::Line => {
                    let question = wire::parse::<Question>(caller.read.trim_ascii_end());
                    if let Ok(asked) = question
                        && (asked.job_id, &asked.job, asked.attempt, asked.worker) == (job_id, job, attempt, worker)
                    {
                        // One short line into an empty buffer is taken whole, or the caller asks again.
                        let answer = Answer { worker, nonce: asked.nonce, control };
                        let _ = caller.stream.write(&wire::line(&answer));
                    }
                    false
                }
            }
        });
    }
}

impl Call {
    /// Asks, or takes the answer; whether that was all.
    fn go_on(&mut self, nonce: u64, (job_id, job, attempt): (u64, &str, u32)) -> Result<bool, String> {
        let unreached = |why: &str| unreached(self.worker, self.address, why);
        if !self.asked {
            let question = Question { job_id, job: job.to_owned(), attempt, worker: self.worker, nonce };
            let line = wire::line(&question);
            return match self.stream.write(&line) {
                Ok(n) if n == line.len() => {
                    self.asked = true;
                    Ok(false)
                }
                Ok(_) => Err(unreached("the question was cut off")),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
                Err(e) => Err(unreached(&e.to_string())),
            };
        }
        match take(&mut self.stream, &mut self.read) {
            Got::More => Ok(false),
            Got::End => Err(unreached("it does not answer")),
            Got::Line => match wire::parse::<Answer>(self.read.trim_ascii_end()) {
                Ok(answer) if (answer.worker, answer.nonce) != (self.worker, nonce) => {
                    Err(unreached("somebody else answers"))
                }
                Ok(Answer { control: true, .. }) => Err(format!(
                    "worker {} is in touch with the control plane, and this one is not: look at the network between",
                    self.worker
                )),
                Ok(_) => Ok(true),
                Err(e) => Err(unreached(&format!("its answer is not understood: {e}"))),
            },
        }
    }
}

fn unreached(worker: u32, address: SocketAddr, why: &str) -> String {
    format!("worker {worker} at {address}: {why}")
}

/// Reads what is there of one line.
fn take(stream: &mut impl Read, line: &mut Vec<u8>) -> Got {
    let mut buffer = [0; MAX_LINE];
    match stream.read(&mut buffer) {
        Ok(0) => Got::End,
        Ok(n) => {
            line.extend_from_slice(&buffer[..n]);
            match line.iter().position(|b| *b == b'\n') {
                Some(_) => Got::Line,
                None if line.len() > MAX_LINE => Got::End,
                None => Got::More,
            }
        }
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Got::More,
        Err(_) => Got::End,
    }
}
