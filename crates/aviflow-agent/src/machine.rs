//! The agent's one state machine: what happened goes in, what is to be done comes out.
//!
//! It has no clock, no process and no socket: [`crate::driver`] feeds it and
//! carries out its outputs in order. The same inputs give the same outputs.
//!
//! ```text
//! Idle ─Start─▶ Spawning ─▶ Running ─Stop, a failing rank─▶ Stopping
//!   │              │           └─all ranks ended─┐              │ all ranks ended
//!   └─Stop─────────┴─cannot start───────────────▶ Clearing ◀────┘
//!                                        nobody left │ └─a newer Start─▶ Spawning
//!                                                  Ended ─Release─▶ Gone
//! ```
//!
//! Invariants (each is a property test):
//! - ranks start only after a `Start` of the current term, once an epoch, and
//!   epochs only go up;
//! - the exit of every rank is reported once;
//! - SIGTERM is followed by SIGKILL after the grace, for those that are left;
//! - `Ended` is said only after the last process is gone;
//! - an event is kept until it is acknowledged, and sent again, in order and
//!   with its number, after every reconnection (`events` says what is merged or
//!   forgotten before it was ever sent);
//! - ranks of a gang do not run on where neither the control plane nor all
//!   peers are reached (`fence` says when, and why that is safe).

use crate::faults::{self, Evidence, Fault};
use crate::protocol::{Ended, Event, FromAgent, RankEnd, WorkerSpec};
use crate::sys::Exit;
use crate::training::Training;
use crate::wiring::Launch;
use std::collections::BTreeMap;

mod commands;
mod control;
mod events;
mod fence;
mod io;
mod leave;
mod tail;
mod told;
use events::Events;
use fence::Fence;
use io::how;
pub use io::{Input, LAST_LINES, Output, Signal};
use tail::Tail;

/// The longest grace for the rest of a gang that is broken, in milliseconds: it cannot save anything any more.
pub const BROKEN_GRACE_MS: u64 = 2000;

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    /// No epoch was started.
    Idle,
    /// The driver is at it; of a stop that came in between, when its grace ends.
    Spawning { kill_at: Option<u64> },
    /// Ranks run.
    Running,
    /// Ranks were asked to end.
    Stopping { kill_at: u64, killed: bool },
    /// The ranks are gone; what they left behind may not be.
    Clearing { kill_at: u64, asked: bool, look_at: Option<u64>, looks: u32 },
    /// Everything is gone and said.
    Ended,
    /// The agent was told to end.
    Gone,
}

#[derive(Debug, Default)]
struct Rank {
    tail: Tail,
    end: Option<End>,
}

#[derive(Debug)]
struct End {
    exit: Exit,
    at: u64,
    stopping: bool,
    last_lines: Vec<String>,
    fault: Option<Fault>,
}

/// The state of one agent.
#[derive(Debug)]
pub struct Machine {
    spec: WorkerSpec,
    pid: u32,
    gpus: Vec<String>,
    phase: Phase,
    term: u64,
    welcomed: bool,
    epoch: u32,
    up: bool,
    ranks: BTreeMap<u32, Rank>,
    /// A newer epoch, begun once the present one is gone.
    next: Option<Launch>,
    /// What was said of the last end.
    last_end: Option<Ended>,
    /// Why the agent stopped the ranks, or could not start them.
    reason: Option<String>,
    hooks_told: bool,
    /// No epoch may start any more.
    closing: bool,
    /// The agent was asked to end, and said so: when it stops its ranks without being told.
    leave_at: Option<u64>,
    /// Nobody knows the attempt: end without waiting for a release.
    unknown: bool,
    /// Why a control plane refused this agent last.
    refused: Option<String>,
    training: Training,
    unsent: BTreeMap<u32, (u64, u32, crate::protocol::Progress)>,
    /// When it was said last that the training does something that is no step.
    active_at: Option<u64>,
    events: Events,
    fence: Fence,
    /// The ranks of this epoch were stopped as nobody was reached.
    fenced: bool,
}

impl Machine {
    /// The machine of a worker; `pid` is the agent's.
    #[must_use]
    pub fn new(spec: WorkerSpec, pid: u32) -> Self {
        let fence = Fence::new(&spec);
        Self {
            spec,
            pid,
            gpus: Vec::new(),
            phase: Phase::Idle,
            term: 0,
            welcomed: false,
            epoch: 0,
            up: false,
            ranks: BTreeMap::new(),
            next: None,
            last_end: None,
            reason: None,
            hooks_told: false,
            closing: false,
            leave_at: None,
            unknown: false,
            refused: None,
            training: Training::default(),
            unsent: BTreeMap::new(),
            active_at: None,
            events: Events::default(),
            fence,
            fenced: false,
        }
    }

    /// That its container got these GPUs, by their UUIDs.
    #[must_use]
    pub fn with_gpus(self, gpus: Vec<String>) -> Self {
        Self { gpus, ..self }
    }

    /// From now on this proves to the control plane who the agent is.
    pub fn set_token(&mut self, token: String) {
        self.spec.token = token;
    }

    /// When [`Input::Timer`] is due, if nothing else happens.
    #[must_use]
    pub fn next_timer(&self) -> Option<u64> {
        let phase = match self.phase {
            Phase::Stopping { kill_at, killed: false } => Some(kill_at),
            Phase::Clearing { look_at, .. } => look_at,
            Phase::Idle
            | Phase::Spawning { .. }
            | Phase::Running
            | Phase::Stopping { killed: true, .. }
            | Phase::Ended
            | Phase::Gone => None,
        };
        if self.phase == Phase::Gone {
            return None;
        }
        let silent = self.fence.silent_at().filter(|_| self.welcomed);
        [phase, self.training.due(), self.fence_at(), self.ask_at(), self.leave_at(), silent]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the ranks must stop, if nobody is reached by then.
    fn fence_at(&self) -> Option<u64> {
        self.fence.at(self.welcomed).filter(|_| self.holds_ranks() && !self.fenced)
    }

    fn ask_at(&self) -> Option<u64> {
        self.fence.ask_at().filter(|_| self.holds_ranks() && !self.fenced && !self.welcomed)
    }

    /// Whether ranks run, or are about to.
    fn holds_ranks(&self) -> bool {
        self.has_ranks() || matches!(self.phase, Phase::Spawning { .. })
    }

    /// Whether the control plane has welcomed this agent on a connection that is open.
    #[must_use]
    pub const fn is_welcomed(&self) -> bool {
        self.welcomed
    }

    /// Whether ranks that are being started are still wanted: no stop came in between.
    #[must_use]
    pub const fn wants_ranks(&self) -> bool {
        matches!(self.phase, Phase::Spawning { kill_at: None })
    }

    /// Whether a newer epoch begins once the present one is gone.
    #[must_use]
    pub const fn has_next(&self) -> bool {
        self.next.is_some()
    }

    /// Whether the agent should show that it is alive: until everything is gone and said.
    #[must_use]
    pub const fn shows_life(&self) -> bool {
        !matches!(self.phase, Phase::Ended | Phase::Gone)
    }

    /// Whether ranks run.
    #[must_use]
    pub fn has_ranks(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Stopping { .. } | Phase::Clearing { .. })
    }

    /// Takes what happened at `now`, in milliseconds of a monotonic clock.
    pub fn on(&mut self, input: Input, now: u64) -> Vec<Output> {
        let mut out = Vec::new();
        if self.phase == Phase::Gone {
            return out;
        }
        // First: after a sleep of this process nothing that waited is taken up as if no time had passed.
        if self.fence_at().is_some_and(|at| at <= now) {
            self.fence(now, &mut out);
        }
        match input {
            Input::Opened { port, peer_port, log } => {
                self.fence.hello(now);
                self.hello(port, peer_port, log, &mut out);
            }
            Input::Closed => {
                if std::mem::take(&mut self.welcomed) {
                    self.fence.closed(now);
                }
                // Their numbers are of the connection: nobody waits for these commands.
                out.push(Output::ExecKillAll);
            }
            Input::Message(message) => self.message(message, now, &mut out),
            Input::Spawned => self.spawned(now, &mut out),
            Input::NotSpawned => self.not_spawned(now, &mut out),
            Input::SpawnFailed { reason } => self.spawn_failed(reason, now, &mut out),
            Input::Exited { rank, exit, error, oom_kill } => {
                self.exited(rank, exit, &error, oom_kill, now, &mut out);
            }
            Input::Swept { left, unix_ms, log_end, port } => self.swept(left, (unix_ms, log_end, port), now, &mut out),
            Input::Noticed { sign, ago_ms } => self.sign(sign, ago_ms, &mut out),
            Input::Hook { rank, message } => self.told(now, &mut out, |t, said| t.hook(rank, message, now, said)),
            Input::Sighted { sighting, ago_ms } => {
                self.told(now, &mut out, |t, said| t.sighted(sighting, now.saturating_sub(ago_ms), said));
            }
            Input::Scalars { rank, step, values, ago_ms } => {
                self.told(now, &mut out, |t, said| t.scalars(rank, step, values, now.saturating_sub(ago_ms), said));
            }
            Input::Line { rank, text } => self.line(rank, &text, now, &mut out),
            Input::Exec { id, output } => self.send(FromAgent::Exec { id, output }, &mut out),
            Input::Channel { id, output } => self.send(FromAgent::Channel { id, output }, &mut out),
            Input::Terminated => self.terminated(now, &mut out),
            Input::Asked { missing } => self.fence.asked(missing),
            Input::Timer => {}
        }
        self.settle(now, &mut out);
        out
    }

    fn start(&mut self, term: u64, launch: Launch, now: u64, out: &mut Vec<Output>) {
        let asked = self.next.as_ref().map_or(self.epoch, |next| next.epoch);
        if launch.epoch <= asked || !self.accepts(term, "start", out) {
            return;
        }
        if self.closing {
            out.push(Output::Note(format!("refused to start epoch {}: the agent is ending", launch.epoch)));
            return;
        }
        match self.phase {
            Phase::Idle => self.spawn(launch, out),
            Phase::Ended => {
                out.push(Output::RemoveEnded);
                self.spawn(launch, out);
            }
            Phase::Spawning { .. } | Phase::Running | Phase::Stopping { .. } | Phase::Clearing { .. } => {
                let reason = format!("epoch {} begins", launch.epoch);
                self.stop(self.spec.grace_ms.min(BROKEN_GRACE_MS), reason, false, now, out);
                self.next = Some(launch);
            }
            Phase::Gone => {}
        }
    }

    fn spawn(&mut self, launch: Launch, out: &mut Vec<Output>) {
        self.epoch = launch.epoch;
        self.up = false;
        self.fenced = false;
        self.reason = None;
        self.ranks.clear();
        let gpus = self.spec.workers.saturating_mul(self.spec.gpus_per_node);
        self.training = Training::new(launch.best_step, gpus);
        if std::mem::take(&mut self.hooks_told) {
            out.push(Output::TellHooks(None));
        }
        self.phase = Phase::Spawning { kill_at: None };
        out.push(Output::Spawn(launch));
    }

    fn spawned(&mut self, now: u64, out: &mut Vec<Output>) {
        let Phase::Spawning { kill_at } = self.phase else { return };
        self.ranks = (0..self.spec.ranks).map(|n| (self.spec.first_rank + n, Rank::default())).collect();
        self.phase = Phase::Running;
        self.up = true;
        self.emit(Event::Up, now, out);
        if !self.spec.facts.is_empty() {
            self.emit(Event::Facts { values: self.spec.facts.clone() }, now, out);
        }
        if let Some(kill_at) = kill_at {
            self.begin_stop(kill_at.saturating_sub(now), now, out);
        } else if self.ranks.is_empty() {
            self.clear(now, false, out);
        }
    }

    /// A stop came before the first rank was started: there is nothing to be stopped.
    fn not_spawned(&mut self, now: u64, out: &mut Vec<Output>) {
        if matches!(self.phase, Phase::Spawning { .. }) {
            self.clear(now, false, out);
        }
    }

    fn spawn_failed(&mut self, reason: String, now: u64, out: &mut Vec<Output>) {
        let Phase::Spawning { .. } = self.phase else { return };
        out.push(Output::Note(reason.clone()));
        self.emit(Event::LaunchFailed { reason: reason.clone() }, now, out);
        self.reason.get_or_insert(reason);
        self.clear(now, false, out);
    }

    fn exited(&mut self, rank: u32, exit: Exit, error: &[String], oom_kill: bool, now: u64, out: &mut Vec<Output>) {
        let running = self.phase == Phase::Running;
        let Some(state) = self.ranks.get_mut(&rank).filter(|state| state.end.is_none()) else { return };
        let stopping = !running;
        let tail = std::mem::take(&mut state.tail);
        let fault = faults::classify(&Evidence { exit, lines: &tail.all(), error, oom_kill, stopping });
        let last_lines = tail.report(error);
        let (told, why) = (last_lines.clone(), fault.clone());
        state.end = Some(End { exit, at: now, stopping, last_lines: told, fault: why });
        // What it reported last must not come after its end.
        self.flush(now, true, out);
        self.emit(
            Event::RankExited {
                rank,
                code: exit.code,
                signal: exit.signal,
                stopping,
                last_lines,
                last_step: self.training.last_step(rank),
                fault,
            },
            now,
            out,
        );
        if exit.code != 0 || !running {
            let hint = match exit.signal {
                Some(libc::SIGKILL) if running => {
                    " (SIGKILL that the agent did not send: often the node ran out of memory)"
                }
                _ => "",
            };
            out.push(Output::Note(format!("rank {rank} {}{hint}", how(exit))));
        }
        if self.ranks.values().all(|state| state.end.is_some()) {
            let asked = !running;
            if running && exit.code != 0 {
                self.reason.get_or_insert_with(|| format!("rank {rank} {}", how(exit)));
            }
            self.clear(now, asked, out);
        } else if running && exit.code != 0 {
            let reason = format!("rank {rank} {}", how(exit));
            self.stop(self.spec.grace_ms.min(BROKEN_GRACE_MS), reason, false, now, out);
        }
    }

    /// Nobody was reached for too long: the worker's share may be given away soon.
    fn fence(&mut self, now: u64, out: &mut Vec<Output>) {
        self.fenced = true;
        self.stop(self.spec.grace_ms.min(BROKEN_GRACE_MS), self.fence.reason(), true, now, out);
    }

    /// Ends the present epoch; with `tell`, the training hears of it and no other epoch follows.
    fn stop(&mut self, grace: u64, reason: String, tell: bool, now: u64, out: &mut Vec<Output>) {
        if matches!(self.phase, Phase::Ended | Phase::Gone) {
            return;
        }
        if tell {
            self.next = None;
            if !std::mem::replace(&mut self.hooks_told, true) {
                out.push(Output::TellHooks(Some(reason.clone())));
            }
        }
        if self.reason.is_none() {
            out.push(Output::Note(format!("stopping: {reason}")));
            self.reason = Some(reason);
        }
        self.begin_stop(grace, now, out);
    }

    fn begin_stop(&mut self, grace: u64, now: u64, out: &mut Vec<Output>) {
        let at = now.saturating_add(grace);
        match &mut self.phase {
            Phase::Idle => self.clear(now, false, out),
            Phase::Spawning { kill_at } => *kill_at = Some(kill_at.map_or(at, |kill_at| kill_at.min(at))),
            Phase::Running => {
                self.phase = Phase::Stopping { kill_at: at, killed: false };
                self.signal(Signal::Term, out);
            }
            Phase::Stopping { kill_at, .. } => *kill_at = at.min(*kill_at),
            Phase::Clearing { kill_at, look_at, .. } => {
                *kill_at = at.min(*kill_at);
                *look_at = look_at.map(|look| look.min(*kill_at));
            }
            Phase::Ended | Phase::Gone => {}
        }
    }

    fn signal(&self, signal: Signal, out: &mut Vec<Output>) {
        for (rank, _) in self.ranks.iter().filter(|(_, state)| state.end.is_none()) {
            out.push(Output::Signal { rank: *rank, signal });
        }
    }

    /// All ranks are gone. After a stop, what they left behind has the rest of the grace: a script's
    /// shell ends at once where its training still saves. Otherwise nothing has a claim to go on.
    fn clear(&mut self, now: u64, stopped: bool, out: &mut Vec<Output>) {
        let kill_at = match self.phase {
            Phase::Stopping { kill_at, .. } if stopped => kill_at,
            _ => now,
        };
        self.phase = Phase::Clearing { kill_at, asked: false, look_at: Some(now), looks: 0 };
        out.push(Output::ExecKillAll);
    }

    fn swept(&mut self, left: usize, told: (i64, u64, u16), now: u64, out: &mut Vec<Output>) {
        let Phase::Clearing { kill_at, look_at, looks, .. } = &mut self.phase else { return };
        if left > 0 {
            // 2, 4, 8 … 64 ms: most are gone at once, some are never.
            let pause = 2 << (*looks).min(5);
            let look = now + pause;
            *look_at = Some(if *kill_at > now { look.min(*kill_at) } else { look });
            *looks += 1;
            if *looks == 500 {
                out.push(Output::Note(format!("{left} processes do not end; look for state D in `ps`")));
            }
            return;
        }
        self.flush(now, true, out);
        if let Some(launch) = self.next.take() {
            self.spawn(launch, out);
            return;
        }
        let ended = self.end(told, now);
        self.phase = Phase::Ended;
        self.last_end = Some(ended.clone());
        out.push(Output::WriteEnded(ended.clone()));
        self.emit(Event::Ended { ended }, now, out);
        if self.unknown {
            self.exit(true, out);
        }
    }

    /// Ends an epoch of which no word to start came: nothing of it ever ran.
    fn skip(&mut self, epoch: u32, reason: &str, now: u64, out: &mut Vec<Output>) {
        let Some(before) = self.last_end.take() else { return };
        self.epoch = epoch;
        self.up = false;
        self.ranks.clear();
        let ended = Ended { epoch, ranks: BTreeMap::new(), reason: Some(reason.to_owned()), ..before };
        self.last_end = Some(ended.clone());
        out.push(Output::WriteEnded(ended.clone()));
        self.emit(Event::Ended { ended }, now, out);
    }

    fn end(&self, (at_unix_ms, log_end, port): (i64, u64, u16), now: u64) -> Ended {
        let ranks = self.ranks.iter().filter_map(|(rank, state)| {
            let end = state.end.as_ref()?;
            let told = RankEnd {
                code: end.exit.code,
                signal: end.exit.signal,
                stopping: end.stopping,
                before_ms: now.saturating_sub(end.at),
                last_lines: end.last_lines.clone(),
                fault: end.fault.clone(),
            };
            Some((*rank, told))
        });
        Ended {
            epoch: self.epoch,
            at_unix_ms,
            ranks: ranks.collect(),
            reason: self.reason.clone(),
            last_step: self.training.highest_step(),
            log_end,
            // One that is on its way out starts no other.
            port: if self.closing { 0 } else { port },
        }
    }

    fn exit(&mut self, clean: bool, out: &mut Vec<Output>) {
        self.phase = Phase::Gone;
        out.push(Output::Exit { clean });
    }

    fn send_events(&mut self, now: u64, out: &mut Vec<Output>) {
        while self.welcomed
            && let Some(message) = self.events.next(now)
        {
            out.push(Output::Send(message));
        }
    }

    fn send(&self, message: FromAgent, out: &mut Vec<Output>) {
        if self.welcomed {
            out.push(Output::Send(message));
        }
    }

    /// What is due by the clock alone.
    fn settle(&mut self, now: u64, out: &mut Vec<Output>) {
        match &mut self.phase {
            Phase::Stopping { kill_at, killed } if *kill_at <= now && !*killed => {
                *killed = true;
                out.push(Output::Note("the grace is over: SIGKILL".to_owned()));
                self.signal(Signal::Kill, out);
            }
            Phase::Clearing { kill_at, asked, look_at, .. } if look_at.is_some_and(|at| at <= now) => {
                *look_at = None;
                out.push(Output::Sweep(if *kill_at <= now {
                    Some(Signal::Kill)
                } else {
                    (!std::mem::replace(asked, true)).then_some(Signal::Term)
                }));
            }
            Phase::Idle
            | Phase::Spawning { .. }
            | Phase::Running
            | Phase::Stopping { .. }
            | Phase::Clearing { .. }
            | Phase::Ended
            | Phase::Gone => {}
        }
        if self.leave_at().is_some_and(|at| at <= now) {
            self.leave(now, out);
        }
        if self.training.due().is_some_and(|due| due <= now) {
            self.flush(now, false, out);
        }
        if self.ask_at().is_some_and(|at| at <= now) {
            let (peers, within_ms) = self.fence.ask(now);
            out.push(Output::Ask { peers, within_ms });
        }
        if self.welcomed && self.fence.silent_at().is_some_and(|at| at <= now) {
            // Said once: the driver answers with `Closed`.
            self.fence.heard(now);
            out.push(Output::Disconnect);
        }
    }
}

#[cfg(test)]
mod tests;
