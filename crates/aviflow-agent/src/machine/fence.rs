//! When ranks must stop because nobody was reached.
//!
//! A control plane that hears nothing of a worker must at some time give its share away. It
//! cannot know whether the worker's ranks still run; so the worker sees to it that they do not.
//! Both measure from instants of which one is never later than the other:
//!
//! - The agent counts from the latest instant at which it *sent* something of which it is proven
//!   that the control plane read it: the hello that was answered by a welcome, or a pong that a
//!   later ping names. The control plane has heard of the agent then or later, and counts from
//!   there. What arrives late, after a cut or while this process was frozen, proves nothing new.
//! - Without the control plane, a round counts from its beginning in which every peer answered and
//!   none is itself in touch with the control plane. Whoever is, is the control plane's witness:
//!   it may write workers off that are silent while it hears a witness, and those only. A gang of
//!   which it hears nobody may be well, and goes on.
//!
//! The kernel's clock counts while the machine sleeps, and after a sleep this comes before all that waited.
//!
//! So ranks stop at the latest `fence_after` and [`super::BROKEN_GRACE_MS`] after the control plane
//! heard of the worker last, or began to hear a witness, whichever is later.
//! `aviflow_kube::fence` waits for longer.
//!
//! A gang of one has no witness: it never stops by itself, and its share is given away only once
//! its node's end is certain.

use super::WorkerSpec;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

/// Pings on a connection that are missed before it is closed.
const MISSED: u64 = 3;

/// Pongs of which it is not known whether they arrived.
const PONGS: usize = 16;

#[derive(Debug)]
pub(super) struct Fence {
    /// None: never.
    after: Option<u64>,
    worker: u32,
    workers: u32,
    peers: BTreeMap<u32, SocketAddr>,
    /// The latest instant that counts, see above.
    reached: u64,
    /// When the hello of the present connection was sent.
    hello_at: u64,
    /// Time between the pings of the present connection.
    ping: Option<u64>,
    /// When something came on it last.
    heard: u64,
    /// Numbers of pongs and when they were sent.
    pongs: VecDeque<(u64, u64)>,
    /// When the round that is under way began.
    round: Option<u64>,
    next_round: u64,
    /// Why the last round did not count.
    missing: Option<String>,
}

impl Fence {
    pub(super) fn new(spec: &WorkerSpec) -> Self {
        Self {
            after: spec.fence_after_ms.filter(|_| spec.workers > 1),
            worker: spec.worker,
            workers: spec.workers,
            peers: BTreeMap::new(),
            reached: 0,
            hello_at: 0,
            ping: None,
            heard: 0,
            pongs: VecDeque::new(),
            round: None,
            next_round: 0,
            missing: None,
        }
    }

    pub(super) fn hello(&mut self, now: u64) {
        self.hello_at = now;
        self.ping = None;
        self.pongs.clear();
    }

    pub(super) fn welcomed(&mut self, ping_ms: u64) {
        self.ping = (ping_ms > 0).then_some(ping_ms);
        self.reached = self.reached.max(self.hello_at);
    }

    /// The connection is gone, which was welcomed.
    pub(super) fn closed(&mut self, now: u64) {
        if self.ping.is_none() {
            // On one machine a connection that is open is in touch; so must one count that is never tried.
            self.reached = now;
        }
        // Most control planes that go away are back at once: then nobody needs to be asked.
        self.next_round = now + self.after.unwrap_or(0) / 8;
    }

    pub(super) fn heard(&mut self, now: u64) {
        self.heard = now;
    }

    pub(super) fn ping(&mut self, n: u64, heard: u64, now: u64) {
        if n == 0 {
            return;
        }
        while let Some((_, at)) = self.pongs.front().copied().filter(|(pong, _)| *pong <= heard) {
            self.reached = self.reached.max(at);
            self.pongs.pop_front();
        }
        self.pongs.push_back((n, now));
        if self.pongs.len() > PONGS {
            self.pongs.pop_front();
        }
    }

    pub(super) fn add(&mut self, peers: Vec<(u32, SocketAddr)>) {
        // Where a worker answers never changes; a control plane that was started again may not know all of them yet.
        self.peers.extend(peers.into_iter().filter(|(worker, _)| *worker != self.worker));
    }

    /// When ranks must stop, in the state of the connection; none if they need not.
    pub(super) fn at(&self, welcomed: bool) -> Option<u64> {
        let counts = !welcomed || self.ping.is_some();
        self.after.filter(|_| counts).map(|after| self.reached.saturating_add(after))
    }

    /// When a connection that was welcomed has been silent for too long: a cable that was cut says nothing.
    pub(super) fn silent_at(&self) -> Option<u64> {
        self.ping.map(|ping| self.heard.saturating_add(MISSED * ping))
    }

    /// When peers are to be asked, while there is no control plane.
    pub(super) fn ask_at(&self) -> Option<u64> {
        // Where some are not known, all are never reached.
        let known = self.peers.len() as u64 + 1 == u64::from(self.workers);
        (self.after.is_some() && known && self.round.is_none()).then_some(self.next_round)
    }

    /// Begins a round; gives who is to be asked, and for how long.
    pub(super) fn ask(&mut self, now: u64) -> (Vec<(u32, SocketAddr)>, u64) {
        let after = self.after.unwrap_or(0);
        self.round = Some(now);
        self.next_round = now + (after / 12).max(1);
        (self.peers.iter().map(|(worker, address)| (*worker, *address)).collect(), after / 24)
    }

    /// A round is over: who was not reached, if anybody.
    pub(super) fn asked(&mut self, missing: Option<String>) {
        let began = self.round.take();
        if missing.is_none() {
            self.reached = self.reached.max(began.unwrap_or(0));
        }
        self.missing = missing;
    }

    /// Why the ranks are stopped.
    pub(super) fn reason(&self) -> String {
        let seconds = self.after.unwrap_or(0).div_ceil(1000);
        let last = match &self.missing {
            Some(missing) => format!(" ({missing})"),
            None if self.peers.len() as u64 + 1 < u64::from(self.workers) => " (not all peers are known)".to_owned(),
            None => String::new(),
        };
        format!("fenced: neither the control plane nor all peers were reached for {seconds} s{last}")
    }
}
