//! Asks exporters, a few at a time.
//!
//! Each is asked once in an interval, spread over it. One that does not answer is asked less and less often, so that
//! dead ones hold up no others: it costs its place in the queue for as long as [`ANSWER`], and a mark on the board.

use crate::board::Board;
use crate::dcgm;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use ureq::Agent;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(1);
/// How long an answer may take in all.
const ANSWER: Duration = Duration::from_secs(4);
/// Bytes of an answer: a node of 8 GPUs has about 60 KiB.
const BYTES: u64 = 4 << 20;
/// The longest time between two tries of one that does not answer.
const LONGEST: Duration = Duration::from_secs(300);
/// How often it is looked whether there are others to be asked.
const LOOK: Duration = Duration::from_secs(5);

/// Who is asked for the GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The node.
    pub node: String,
    /// Where its exporter answers, as `http://10.0.0.7:9400/metrics`.
    pub url: String,
}

/// Asks; what comes is the text of the answer, or why there is none.
pub type Ask = Box<dyn Fn(&str) -> Result<String, String> + Send + Sync>;

/// Asks over HTTP. A redirection is not followed: it would lead out of what was configured.
#[must_use]
pub fn http() -> Ask {
    let config = Agent::config_builder()
        .timeout_connect(Some(CONNECT))
        .timeout_global(Some(ANSWER))
        .max_redirects(0)
        .user_agent("aviflow");
    let agent = Agent::new_with_config(config.build());
    Box::new(move |url| {
        let mut answer = agent.get(url).call().map_err(|e| e.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("it answers {}", answer.status()));
        }
        answer.body_mut().with_config().limit(BYTES).read_to_string().map_err(|e| e.to_string())
    })
}

/// Who is asked when. Pure: instants come from outside.
#[derive(Debug)]
struct Rota {
    every: Duration,
    due: BTreeSet<(Instant, String)>,
    turns: BTreeMap<String, Turn>,
}

#[derive(Debug)]
struct Turn {
    url: String,
    due: Instant,
    failures: u32,
}

impl Rota {
    fn new(every: Duration) -> Rota {
        Rota { every, due: BTreeSet::new(), turns: BTreeMap::new() }
    }

    /// Whom to ask from now on. New ones are spread over the interval; one with another address is asked at once.
    fn set(&mut self, targets: &BTreeSet<Target>, now: Instant) {
        if self.turns.len() == targets.len() && targets.iter().all(|t| self.has(t)) {
            return;
        }
        let asked: BTreeSet<&str> = targets.iter().map(|t| t.node.as_str()).collect();
        let leave: Vec<String> = self.turns.keys().filter(|node| !asked.contains(node.as_str())).cloned().collect();
        for node in leave {
            if let Some(turn) = self.turns.remove(&node) {
                self.due.remove(&(turn.due, node));
            }
        }
        let new: Vec<&Target> = targets.iter().filter(|t| !self.has(t)).collect();
        let parts = u32::try_from(new.len()).unwrap_or(u32::MAX).max(1);
        for (n, target) in (0u32..).zip(new) {
            let due = now + self.every * n / parts;
            let turn = Turn { url: target.url.clone(), due, failures: 0 };
            if let Some(before) = self.turns.insert(target.node.clone(), turn) {
                self.due.remove(&(before.due, target.node.clone()));
            }
            self.due.insert((due, target.node.clone()));
        }
    }

    fn has(&self, target: &Target) -> bool {
        self.turns.get(&target.node).is_some_and(|turn| turn.url == target.url)
    }

    /// Whom to ask now; who is being asked is not due.
    fn next(&mut self, now: Instant) -> Option<Target> {
        if self.due.first().is_none_or(|(due, _)| *due > now) {
            return None;
        }
        let (_, node) = self.due.pop_first()?;
        let url = self.turns.get(&node)?.url.clone();
        Some(Target { node, url })
    }

    /// That somebody was asked. Whether he is still to be.
    fn done(&mut self, target: &Target, answered: bool, now: Instant) -> bool {
        let every = self.every;
        let Some(turn) = self.turns.get_mut(&target.node).filter(|turn| turn.url == target.url) else { return false };
        turn.failures = if answered { 0 } else { turn.failures.saturating_add(1) };
        let longer = every * 2u32.saturating_pow(turn.failures.min(8));
        turn.due = if answered { (turn.due + every).max(now) } else { now + longer.min(LONGEST.max(every)) };
        self.due.insert((turn.due, target.node.clone()));
        true
    }
}

/// What the threads share.
struct Shared {
    rota: Mutex<(Rota, Option<Instant>)>,
    wake: Condvar,
    targets: Box<dyn Fn() -> BTreeSet<Target> + Send + Sync>,
    ask: Ask,
    clock: fn() -> i64,
    board: Arc<Board>,
}

/// Starts `at_once` threads that ask whomever `targets` names, each once in `every`, and put what they learn on the
/// board with the instant of `clock`. They end with the process.
///
/// # Errors
/// If a thread cannot be started.
pub fn start(
    targets: impl Fn() -> BTreeSet<Target> + Send + Sync + 'static,
    ask: Ask,
    (every, at_once): (Duration, usize),
    clock: fn() -> i64,
    board: Arc<Board>,
) -> io::Result<()> {
    let rota = Mutex::new((Rota::new(every), None));
    let shared = Arc::new(Shared { rota, wake: Condvar::new(), targets: Box::new(targets), ask, clock, board });
    for n in 0..at_once.max(1) {
        let shared = shared.clone();
        let thread = std::thread::Builder::new().name(format!("gpu-metrics-{n}"));
        thread.spawn(move || {
            loop {
                shared.ask(&shared.wait());
            }
        })?;
    }
    Ok(())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, (Rota, Option<Instant>)> {
        self.rota.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until somebody is to be asked.
    fn wait(&self) -> Target {
        let mut rota = self.lock();
        loop {
            let now = Instant::now();
            let (turns, looked) = &mut *rota;
            if looked.is_none_or(|at| now >= at + LOOK) {
                *looked = Some(now);
                let targets = (self.targets)();
                turns.set(&targets, now);
                self.board.retain(|node| turns.turns.contains_key(node));
            }
            if let Some(target) = turns.next(now) {
                return target;
            }
            let next = turns.due.first().map_or(now + LOOK, |(due, _)| (*due).min(now + LOOK));
            let waited = self.wake.wait_timeout(rota, next.saturating_duration_since(now));
            rota = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn ask(&self, target: &Target) {
        let answer = (self.ask)(&target.url).map(|text| dcgm::readings(&text)).and_then(|readings| {
            let none = || "it says nothing of GPUs".to_owned();
            if readings.is_empty() { Err(none()) } else { Ok(readings) }
        });
        // Under the lock, so that a node that is not asked any more does not come back to the board.
        let mut rota = self.lock();
        if rota.0.done(target, answer.is_ok(), Instant::now()) {
            match answer {
                Ok(readings) => self.board.read(&target.node, (self.clock)(), readings),
                Err(why) => self.board.failed(&target.node, format!("{} gives no figures: {why}", target.url)),
            }
        }
        drop(rota);
        self.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const EVERY: Duration = Duration::from_secs(15);

    fn target(node: &str, url: &str) -> Target {
        Target { node: node.into(), url: url.into() }
    }

    fn nodes(n: usize) -> BTreeSet<Target> {
        (0..n).map(|n| target(&format!("n{n:04}"), "u")).collect()
    }

    /// Whom a rota asks from `from` for a time, if dead ones do not answer.
    fn asked(rota: &mut Rota, from: Instant, time: Duration, dead: impl Fn(&str) -> bool) -> BTreeMap<String, usize> {
        let mut asked = BTreeMap::new();
        let mut now = from;
        while now < from + time {
            while let Some(target) = rota.next(now) {
                *asked.entry(target.node.clone()).or_default() += 1;
                assert!(rota.done(&target, !dead(&target.node), now));
            }
            now += Duration::from_millis(100);
        }
        asked
    }

    #[test]
    fn each_is_asked_once_in_an_interval_and_dead_ones_less_often() {
        let mut rota = Rota::new(EVERY);
        let begin = Instant::now();
        rota.set(&nodes(1000), begin);
        // They are spread.
        let first = asked(&mut rota, begin, EVERY / 3, |_| false).len();
        assert!((300..=350).contains(&first), "{first}");
        let mut rota = Rota::new(EVERY);
        rota.set(&nodes(10), begin);
        let counts = asked(&mut rota, begin, Duration::from_secs(3600), |node| node == "n0003");
        for (node, n) in counts {
            let expected = if node == "n0003" { 12..=20 } else { 239..=241 };
            assert!(expected.contains(&n), "{node}: {n}");
        }
    }

    #[test]
    fn who_is_gone_is_asked_no_more_and_who_moved_at_once() {
        let mut rota = Rota::new(EVERY);
        let now = Instant::now();
        rota.set(&[target("a", "u1"), target("b", "u1")].into(), now);
        let a = rota.next(now).unwrap();
        assert_eq!(a, target("a", "u1"));
        assert_eq!(rota.next(now), None, "who is being asked is not asked again");
        rota.set(&[target("a", "u2")].into(), now);
        assert!(!rota.done(&a, true, now), "what the old address says is of no use");
        assert_eq!(rota.next(now), Some(target("a", "u2")));
        rota.set(&BTreeSet::new(), now);
        assert_eq!(rota.next(now + EVERY * 100), None);
        assert!(rota.due.is_empty() && rota.turns.is_empty());
    }

    /// Answers each connection with a text, and tells the last request.
    fn server(answer: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut request = [0; 1024];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        format!("http://{address}/metrics")
    }

    fn response(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
    }

    #[test]
    fn exporters_are_asked_over_http() {
        let ask = http();
        let check = |answer: String, expected: Result<&str, &str>| {
            let said = ask(&server(answer));
            match (&said, expected) {
                (Ok(text), Ok(part)) => assert_eq!(text, part),
                (Err(why), Err(part)) => assert!(why.contains(part), "{why}"),
                _ => panic!("{said:?} instead of {expected:?}"),
            }
        };
        check(response("200 OK", "up 1\n"), Ok("up 1\n"));
        check(response("503 Service Unavailable", ""), Err("503"));
        check("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".into(), Err("302"));
        check("what?\r\n\r\n".into(), Err(""));
        let endless = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_owned() + &"x".repeat(5 << 20);
        check(endless, Err("limit"));
    }

    #[test]
    fn what_is_read_comes_to_the_board() {
        let alive = server(response("200 OK", "DCGM_FI_DEV_GPU_UTIL{gpu=\"0\",UUID=\"GPU-a\"} 50\n"));
        let empty = server(response("200 OK", "up 1\n"));
        let targets = BTreeSet::from([target("n1", &alive), target("n2", &empty)]);
        let board = Arc::new(Board::new(60_000));
        start(move || targets.clone(), http(), (Duration::from_millis(20), 2), || 7, board.clone()).unwrap();
        while board.node("n1", 7).is_empty() || board.trouble("n2").is_none() {
            std::thread::yield_now();
        }
        assert_eq!(board.node("n1", 7)[0].sample.utilization, Some(0.5));
        assert_eq!(board.trouble("n2"), Some(format!("{empty} gives no figures: it says nothing of GPUs")));
    }
}
