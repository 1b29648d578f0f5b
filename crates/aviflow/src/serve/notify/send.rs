//! Posts to receivers, each in a line of its own.
//!
//! Nobody waits for a receiver: what it does not take is tried again after a pause, a few times, and then given up;
//! what has no room in its line is dropped. Of one receiver the notes come in their order, and of one host only a few
//! at once, so that one that hangs holds up no other.
//!
//! Invariant: each note that was put ends in exactly one outcome, which is counted, unless the process ends before.

use aviflow_api::webhook;
use aviflow_core::model::JobId;
use aviflow_server::{Outcome, Outcomes};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

/// Notes that are posted at once.
const THREADS: usize = 16;

/// Notes that are posted at once to one host.
const OF_A_HOST: usize = 4;

/// Something to be posted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The job that it is about.
    pub job: JobId,
    /// Which of its `notify`.
    pub entry: usize,
    /// The row of the job's timeline; none if it is about no moment of it.
    pub row: Option<u64>,
    /// Where to.
    pub address: String,
    /// What.
    pub body: String,
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For an answer.
    pub answer: Duration,
    /// The pauses between tries; there is one try more than there are pauses.
    pub pauses: [Duration; 2],
    /// Notes that wait for one receiver.
    pub room: usize,
}

impl Default for Patience {
    fn default() -> Patience {
        let pauses = [Duration::from_secs(2), Duration::from_secs(15)];
        Patience { answer: Duration::from_secs(10), pauses, room: 100 }
    }
}

/// Where notes may go.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The hosts; any if there are none. `*.example.com` means all names below.
    pub hosts: Vec<String>,
    /// Whether this machine itself may be meant.
    pub loopback: bool,
}

impl Rules {
    fn lists(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        self.hosts.iter().map(|listed| listed.to_ascii_lowercase()).any(|listed| match listed.strip_prefix('*') {
            Some(end) => end.starts_with('.') && host.len() > end.len() && host.ends_with(end),
            None => listed == host,
        })
    }

    fn refuse_host(&self, host: &str) -> Result<(), Forbidden> {
        match self.hosts.is_empty() || self.lists(host) {
            true => Ok(()),
            false => Err(Forbidden(format!("{host} is not among the hosts of `--notify-hosts`"))),
        }
    }

    /// An address that a host has turned out to have.
    fn refuse(&self, host: &str, ip: IpAddr) -> Result<(), Forbidden> {
        let why = webhook::refused(ip, self.loopback || self.lists(host));
        why.map_or(Ok(()), |why| Err(Forbidden(format!("{host} is at {ip}: {why}"))))
    }
}

/// An address to which nothing is posted, and why.
#[derive(Debug)]
struct Forbidden(String);

impl std::fmt::Display for Forbidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Forbidden {}

/// Finds the addresses of hosts, but for those that are forbidden. What was found is what is connected to: a name that
/// changes between two questions leads nowhere else.
#[derive(Debug)]
struct Careful(DefaultResolver, Rules);

impl Resolver for Careful {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let other = |why: Forbidden| Error::Other(Box::new(why));
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        self.1.refuse_host(host).map_err(other)?;
        let found = self.0.resolve(uri, config, timeout)?;
        let mut allowed = self.empty();
        let mut refused = None;
        for address in &found {
            match self.1.refuse(host, address.ip()) {
                Ok(()) => allowed.push(*address),
                Err(why) => refused = Some(why),
            }
        }
        match refused {
            Some(why) if allowed.is_empty() => Err(other(why)),
            _ => Ok(allowed),
        }
    }
}

/// Why a note was not taken.
#[derive(Debug)]
enum Trouble {
    /// It never will be.
    Never(Outcome, String),
    /// It may be later.
    Later(String),
}

fn agent(rules: Rules, patience: Patience) -> Agent {
    let config = Agent::config_builder()
        .timeout_global(Some(patience.answer))
        // A redirection would lead out of what was checked, and so would a proxy.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(None)
        .http_status_as_error(false)
        .max_idle_connections(0)
        .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
        .user_agent("aviflow");
    Agent::with_parts(config.build(), DefaultConnector::default(), Careful(DefaultResolver::default(), rules))
}

fn post(agent: &Agent, note: &Note) -> Result<(), Trouble> {
    let sent = agent.post(&note.address).header("content-type", "application/json").send(note.body.as_str());
    match sent {
        Ok(answer) if answer.status().is_success() => Ok(()),
        Ok(answer) => {
            let (status, said) = (answer.status(), format!("it answers {}", answer.status()));
            let later = status.is_server_error() || [408, 425, 429].contains(&status.as_u16());
            Err(if later { Trouble::Later(said) } else { Trouble::Never(Outcome::Failed, said) })
        }
        Err(Error::Other(why)) if why.is::<Forbidden>() => Err(Trouble::Never(Outcome::Refused, why.to_string())),
        Err(Error::BadUri(_)) => Err(Trouble::Never(Outcome::Failed, "it is no web address".to_owned())),
        Err(error) => Err(Trouble::Later(error.to_string().replace(&note.address, "its address"))),
    }
}

/// Called with each note that has come to its end.
pub type Done = Box<dyn Fn(&Note, Outcome, &str) + Send + Sync>;

/// Posts notes. Whoever drops it lets what is being posted end, and no more.
pub struct Post(Arc<Shared>);

struct Shared {
    lines: Mutex<Lines>,
    wake: Condvar,
    agent: Agent,
    patience: Patience,
    outcomes: Arc<Outcomes>,
    done: Done,
}

#[derive(Default)]
struct Lines {
    by_address: BTreeMap<String, Line>,
    threads: usize,
    /// Threads that wait for something to do.
    free: usize,
    over: bool,
}

/// What one receiver is to get.
struct Line {
    notes: VecDeque<Note>,
    busy: bool,
    due: Instant,
    tries: usize,
}

impl Lines {
    /// The line that is due longest, or when the first will be.
    fn next(&self, now: Instant) -> Result<String, Option<Instant>> {
        let mut busy: BTreeMap<&str, usize> = BTreeMap::new();
        for (address, _) in self.by_address.iter().filter(|(_, line)| line.busy) {
            *busy.entry(webhook::host(address)).or_default() += 1;
        }
        let has_room = |address: &str| busy.get(webhook::host(address)).is_none_or(|n| *n < OF_A_HOST);
        let free = self.by_address.iter().filter(|(address, line)| !line.busy && has_room(address));
        match free.min_by_key(|(_, line)| line.due) {
            Some((address, line)) if line.due <= now => Ok(address.clone()),
            Some((_, line)) => Err(Some(line.due)),
            None => Err(None),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, note: &Note, outcome: Outcome, why: &str) {
        self.outcomes.count(outcome);
        (self.done)(note, outcome, why);
    }

    /// Takes the next note when it is due; none once nothing shall be posted any more.
    fn take(&self) -> Option<Note> {
        let mut lines = self.lock();
        loop {
            if lines.over {
                return None;
            }
            let now = Instant::now();
            match lines.next(now) {
                Ok(address) => {
                    let line = lines.by_address.get_mut(&address)?;
                    line.busy = true;
                    return line.notes.front().cloned();
                }
                Err(due) => {
                    lines.free += 1;
                    lines = match due {
                        Some(due) => {
                            let waited = self.wake.wait_timeout(lines, due.saturating_duration_since(now));
                            waited.unwrap_or_else(PoisonError::into_inner).0
                        }
                        None => self.wake.wait(lines).unwrap_or_else(PoisonError::into_inner),
                    };
                    lines.free -= 1;
                }
            }
        }
    }

    fn work(&self) {
        while let Some(note) = self.take() {
            let posted = post(&self.agent, &note);
            let ended = {
                let mut lines = self.lock();
                let Some(line) = lines.by_address.get_mut(&note.address) else { continue };
                line.busy = false;
                let ended = match posted {
                    Ok(()) => Some((Outcome::Delivered, String::new())),
                    Err(Trouble::Never(outcome, why)) => Some((outcome, why)),
                    Err(Trouble::Later(why)) => match self.patience.pauses.get(line.tries) {
                        Some(pause) => {
                            line.tries += 1;
                            line.due = Instant::now() + *pause;
                            None
                        }
                        None => Some((Outcome::Failed, why)),
                    },
                };
                if ended.is_some() {
                    line.notes.pop_front();
                    line.tries = 0;
                    line.due = Instant::now();
                    if line.notes.is_empty() {
                        lines.by_address.remove(&note.address);
                    }
                }
                ended
            };
            self.wake.notify_all();
            if let Some((outcome, why)) = ended {
                self.end(&note, outcome, &why);
            }
        }
    }
}

impl Post {
    /// Posts nothing yet.
    pub fn new(rules: Rules, patience: Patience, outcomes: Arc<Outcomes>, done: Done) -> Post {
        let (lines, wake) = (Mutex::default(), Condvar::new());
        Post(Arc::new(Shared { lines, wake, agent: agent(rules, patience), patience, outcomes, done }))
    }

    /// Posts a note behind those for the same receiver.
    pub fn put(&self, note: Note) {
        let mut lines = self.0.lock();
        let line = lines.by_address.entry(note.address.clone()).or_insert_with(|| Line {
            notes: VecDeque::new(),
            busy: false,
            due: Instant::now(),
            tries: 0,
        });
        if line.notes.len() >= self.0.patience.room {
            drop(lines);
            self.0.end(&note, Outcome::Dropped, "too many wait for it already");
            return;
        }
        line.notes.push_back(note);
        if lines.free == 0 && lines.threads < THREADS {
            let shared = self.0.clone();
            let thread = std::thread::Builder::new().name("notify".to_owned()).spawn(move || shared.work());
            lines.threads += usize::from(thread.is_ok());
        }
        drop(lines);
        self.0.wake.notify_one();
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.wake.notify_all();
    }
}

#[cfg(test)]
pub mod tests;
