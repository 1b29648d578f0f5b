//! Carries out what the [`Machine`] says, with real processes.
//!
//! One thread, one poll loop: signals, the control plane, the hooks, the pipes
//! of ranks and commands. It decides nothing but when to read and to write.
//! Nothing in the loop waits for anybody else, so the pipes are always drained.

use crate::channels::{Channels, OVER};
use crate::exec::Commands;
use crate::guardian::Post;
use crate::hooks::{Hooks, Phase};
use crate::link::Link;
use crate::machine::{Input, Machine, Output, Signal};
use crate::notice::{self, Notice};
use crate::peers::Peers;
use crate::pinned::Pinned;
use crate::protocol::{ChannelInput, FromAgent, Sign, WorkerSpec, files};
use crate::ranks::{Lines, Now, Ranks};
use crate::spool::{self, Spool};
use crate::stacks::collect::Collector;
use crate::sys::{self, Poll, Signals};
use crate::watch::{self, Places, Watch};
use crate::wiring::{self, Launch};
use crate::{cgroup, devices, folder, guardian, process, sweep};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

mod inside;
mod tell;

/// Between two signs of life, in milliseconds; so also the longest time for which the loop waits while ranks run.
pub const ALIVE_MS: u64 = 10_000;

/// Files whose times say that something is older than this, in milliseconds, are not believed: it is new.
const OLDEST_MS: u64 = 600_000;

/// Bytes from which on progress is dropped and commands wait.
const PROGRESS_WAITS: usize = 1 << 20;

/// Runs the agent of a worker until it is released. Errors go to standard error.
#[must_use]
pub fn run(post: Post) -> ExitCode {
    match Driver::new(post).and_then(Driver::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            complain(&reason);
            ExitCode::from(125)
        }
    }
}

/// Standard error may be gone or full: nothing depends on it.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "aviflow-agent: {text}");
}

struct Driver {
    spec: WorkerSpec,
    folder: PathBuf,
    mark: String,
    guardian: File,
    signals: Signals,
    link: Link,
    /// Why the control plane was refused last; said once.
    refused: Option<String>,
    hooks: Hooks,
    peers: Peers,
    machine: Machine,
    ranks: Ranks,
    commands: Commands,
    channels: Channels,
    /// Stacks that are being collected, and the channels that they are for.
    stacks: Collector,
    /// As many terminals as the ranks were told of.
    terminals: usize,
    spool: Spool<spool::Folder>,
    /// Lines of this turn of the loop.
    lines: Lines,
    inputs: VecDeque<Input>,
    /// The next byte of log to ship; none before a welcome.
    ship: Option<u64>,
    /// Bytes of log that may be shipped although others fill the line: as many as those put into it.
    log_share: usize,
    port: Option<folder::Port>,
    last_port: u16,
    launch: Option<Launch>,
    /// On the clock that counts while the machine sleeps: then the fence counts too.
    started: u64,
    touched: u64,
    /// The log is closed: its end has been told.
    ended: bool,
    exit: Option<bool>,
    /// Kills for lack of memory before the ranks started.
    oom_kills: Option<u64>,
    /// None if there can be no thread.
    watch: Option<Watch>,
    /// The same.
    notice: Option<Notice>,
    /// An epoch is to begin once the first look is over, or then.
    first_look: Option<(u64, Launch)>,
    /// Nobody is left, and the last look is waited for until then.
    last_look: Option<u64>,
}

impl Driver {
    fn new(post: Post) -> Result<Self, String> {
        let Post { folder, spec, mark, guardian } = post;
        sys::leave_terminal();
        sys::raise_file_limit();
        if folder::Alive::read(&folder).is_some() {
            // An agent died here: what it left must not meet what comes.
            while sweep(&mark) > 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        sys::become_subreaper().map_err(|e| format!("orphans cannot be adopted: {e}"))?;
        let signals = Signals::new().map_err(|e| format!("signals cannot be read: {e}"))?;
        let pid = std::process::id();
        folder::write_alive(&folder, pid)
            .map_err(|e| format!("{} cannot be written to: {e}; free some space", folder.display()))?;
        let ranks = spec.first_rank..spec.first_rank + spec.ranks.max(1);
        let hooks = Hooks::listen(&folder.join(files::HOOKS), &mark, ranks)
            .map_err(|e| format!("the socket of the hooks cannot be made in {}: {e}", folder.display()))?;
        let peers = Peers::listen(&spec).unwrap_or_else(|e| {
            complain(&format!("peers cannot ask this agent: {e}; without the control plane the gang will stop"));
            Peers::silent(&spec)
        });
        let pinned = spec.authority.as_deref().map(Pinned::to).transpose();
        let pinned =
            pinned.map_err(|e| format!("the control plane's authority in the worker's spec is of no use: {e}"))?;
        let watch = Watch::start();
        if let Err(e) = &watch {
            complain(&format!("checkpoints and event files are not looked for: {e}"));
        }
        let notice = Notice::start(notice::Places::of(|name| std::env::var_os(name)));
        if let Err(e) = &notice {
            complain(&format!("what the kernel says is not looked at: {e}"));
        }
        let spool = Spool::open(spool::Folder::new(folder.join(files::LOG)), spec.log_buffer, spec.first_rank);
        Ok(Self {
            link: Link::new(spec.control.clone(), pinned),
            refused: None,
            machine: Machine::new(spec.clone(), pid).with_gpus(devices::uuids()),
            spec,
            folder,
            mark,
            guardian,
            signals,
            hooks,
            peers,
            ranks: Ranks::default(),
            commands: Commands::default(),
            channels: Channels::default(),
            stacks: Collector::default(),
            terminals: 0,
            spool,
            lines: Lines::default(),
            inputs: VecDeque::new(),
            ship: None,
            log_share: 0,
            port: None,
            last_port: 0,
            launch: None,
            started: sys::uptime_ms(),
            touched: 0,
            ended: false,
            exit: None,
            oom_kills: None,
            watch: watch.ok(),
            notice: notice.ok(),
            first_look: None,
            last_look: None,
        })
    }

    fn now(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (sys::uptime_ms().saturating_sub(self.started), unix.as_millis() as i64)
    }

    fn run(mut self) -> Result<(), String> {
        let mut poll = Poll::default();
        while self.exit.is_none() {
            self.connect();
            self.work();
            if self.exit.is_some() {
                break;
            }
            let (signalled, guarded) = self.watch(&mut poll);
            poll.wait(self.timeout());
            if poll.ready(guarded) {
                return Err(self.abandoned());
            }
            self.read(&poll, signalled);
            self.work();
        }
        self.link.flush();
        if self.exit == Some(true) {
            self.spool.clear();
            let _ = std::fs::remove_dir(self.folder.join(files::LOG));
        }
        Ok(())
    }

    /// The guardian is dead: ends all that runs, and says why.
    fn abandoned(&mut self) -> String {
        sweep::end_children(&self.mark);
        self.ranks.finish(self.now(), &mut self.lines);
        self.write_log();
        guardian::LOST.to_owned()
    }

    fn connect(&mut self) {
        let now = self.now().0;
        if self.link.open(now) {
            let port = self.offer_port();
            // Read each time: kubelet replaces it before it expires.
            let token = self.spec.token_file.as_ref().map(std::fs::read_to_string);
            match token {
                Some(Ok(token)) => self.machine.set_token(token.trim().to_owned()),
                Some(Err(e)) => complain(&format!("the token cannot be read: {e}; the one before is used")),
                None => {}
            }
            let log = self.spool.range();
            self.inputs.push_back(Input::Opened { port, peer_port: self.peers.port(), log });
        }
    }

    fn offer_port(&mut self) -> u16 {
        if self.port.as_ref().is_none_or(folder::Port::is_handed_over) && !self.machine.has_ranks() {
            self.port = folder::free_port(&self.spec, self.launch.as_ref().map_or(0, |l| l.epoch));
        }
        if let Some(port) = &self.port {
            self.last_port = port.number;
        }
        self.last_port
    }

    /// A port for another epoch, at which nobody looks for the one that ended; 0 where there is none.
    fn fresh_port(&mut self) -> u16 {
        if self.machine.has_next() {
            // Who asked for it has named a port already, which may be the one that is kept for it.
            return 0;
        }
        // The one before is kept until there is another, which so has another number.
        let fresh = folder::free_port(&self.spec, self.launch.as_ref().map_or(0, |launch| launch.epoch));
        let Some(fresh) = fresh else { return 0 };
        self.last_port = fresh.number;
        self.port = Some(fresh);
        self.last_port
    }

    /// Adds everything to the poll set; gives the places of the signals and of the guardian.
    fn watch(&mut self, poll: &mut Poll) -> (usize, usize) {
        poll.clear();
        let places = (poll.add(&self.signals, true, false), poll.add(&self.guardian, true, false));
        self.link.watch(poll);
        let now = self.now().0;
        self.hooks.watch(poll, now);
        self.peers.watch(poll, now);
        self.ranks.watch(poll);
        let slow = self.link.waiting() > PROGRESS_WAITS;
        self.commands.watch(poll, slow);
        self.channels.watch(poll, slow);
        self.stacks.watch(poll);
        if let Some(watch) = &mut self.watch {
            watch.watch(poll);
        }
        if let Some(notice) = &mut self.notice {
            notice.watch(poll);
        }
        places
    }

    fn timeout(&self) -> Option<u64> {
        let alive = self.machine.shows_life().then_some(self.touched + ALIVE_MS);
        let (ranks, hooks, peers) = (self.ranks.due(), self.hooks.due(), self.peers.due());
        let first_look = self.first_look.as_ref().map(|(until, _)| *until);
        let looks = [first_look, self.last_look, self.stacks.due()];
        let timers = [self.machine.next_timer(), self.link.due(), ranks, hooks, peers, alive];
        let timers = timers.into_iter().chain(looks);
        let next = timers.flatten().min()?;
        Some(next.saturating_sub(self.now().0))
    }

    fn read(&mut self, poll: &Poll, signals: usize) {
        let now = self.now();
        self.ranks.read(poll, now, &mut self.lines);
        self.take_lines();
        self.hooks.read(Some(poll), now.0, |rank, message| self.inputs.push_back(Input::Hook { rank, message }));
        self.look(poll);
        if let Some(notice) = &mut self.notice {
            notice.read(poll, |sign, ago_ms| self.inputs.push_back(Input::Noticed { sign, ago_ms }));
        }
        self.commands.read(poll, |id, output| self.inputs.push_back(Input::Exec { id, output }));
        self.channels.turn(poll, |id, output| self.inputs.push_back(Input::Channel { id, output }));
        self.tell_stacks(poll);
        if self.link.ready(poll) && !self.link.receive(|message| self.inputs.push_back(Input::Message(message))) {
            self.disconnect();
        }
        if let Some(missing) = self.peers.read(poll, self.machine.is_welcomed(), now.0) {
            self.inputs.push_back(Input::Asked { missing });
        }
        if poll.ready(signals) {
            while let Some(signal) = self.signals.take() {
                if signal == libc::SIGCHLD {
                    self.reap();
                } else {
                    self.inputs.push_back(Input::Terminated);
                }
            }
        }
        if self.machine.next_timer().is_some_and(|at| at <= now.0) {
            self.inputs.push_back(Input::Timer);
        }
        if self.machine.shows_life() && now.0 >= self.touched + ALIVE_MS {
            self.touched = now.0;
            folder::touch_alive(&self.folder);
        }
    }

    /// Takes what was seen in the training's folders.
    fn look(&mut self, poll: &Poll) {
        let (now, unix) = self.now();
        let mut first = self.first_look.as_ref().is_some_and(|(until, _)| *until <= now);
        let mut last = self.last_look.is_some_and(|until| until <= now);
        if let Some(watch) = &mut self.watch {
            // A clock that is wrong by much is not believed.
            let ago = |at_ms: i64| u64::try_from(unix.saturating_sub(at_ms)).ok().filter(|ago| *ago < OLDEST_MS);
            watch.read(poll, |seen| match seen {
                watch::Seen::Checkpoint(sighting) => {
                    // Only its end shows in the files; that it began is known now.
                    let complete = sighting.phase == Phase::Complete;
                    let ago_ms = ago(sighting.changed / 1_000_000).filter(|_| complete).unwrap_or(0);
                    self.inputs.push_back(Input::Sighted { sighting, ago_ms });
                }
                watch::Seen::Scalars { rank, step, unix_ms, values } => {
                    self.inputs.push_back(Input::Scalars { rank, step, values, ago_ms: ago(unix_ms).unwrap_or(0) });
                }
                watch::Seen::DiskFull(path) => {
                    self.inputs.push_back(Input::Noticed { sign: Sign::DiskFull { path }, ago_ms: 0 });
                }
                watch::Seen::Ready => first = true,
                watch::Seen::Last => last = true,
            });
        }
        // A stop came meanwhile: nobody waits for the look then.
        first |= !self.machine.wants_ranks();
        if first && let Some((_, launch)) = self.first_look.take() {
            if self.machine.wants_ranks() {
                self.start(launch);
            } else {
                self.inputs.push_back(Input::NotSpawned);
            }
        }
        if last && self.last_look.take().is_some() {
            self.swept(0);
        }
    }

    /// Tells that so many processes are left.
    fn swept(&mut self, left: usize) {
        if left == 0
            && let Some(watch) = &mut self.watch
        {
            watch.end();
        }
        let port = if left == 0 { self.fresh_port() } else { 0 };
        let unix_ms = self.now().1;
        self.inputs.push_back(Input::Swept { left, unix_ms, log_end: self.spool.range().1, port });
    }

    fn take_lines(&mut self) {
        for (rank, text) in self.lines.texts.drain(..) {
            self.inputs.push_back(Input::Line { rank, text });
        }
    }

    fn disconnect(&mut self) {
        if self.link.is_open() {
            let now = self.now().0;
            self.link.close(now);
            if let Some(why) = self.link.refusal().filter(|why| self.refused.as_ref() != Some(why)) {
                complain(&format!("what answers in the control plane's place is not taken for it: {why}"));
                self.refused = Some(why);
            }
            self.ship = None;
            self.log_share = 0;
            self.inputs.push_back(Input::Closed);
        }
    }

    /// Collects children that ended: ranks, commands, orphans.
    fn reap(&mut self) {
        let now = self.now();
        while let Some((pid, exit)) = sys::reap() {
            let inputs = &mut self.inputs;
            if self.commands.reaped(pid, exit, |id, output| inputs.push_back(Input::Exec { id, output })) {
                continue;
            }
            if self.channels.reaped(pid, exit, |id, output| inputs.push_back(Input::Channel { id, output })) {
                continue;
            }
            if let Some(rank) = self.ranks.reaped(pid, now, &mut self.lines) {
                self.take_lines();
                // What it told before its end must not come after it.
                self.hooks.read(None, now.0, |rank, message| self.inputs.push_back(Input::Hook { rank, message }));
                let epoch = self.launch.as_ref().map_or(0, |launch| launch.epoch);
                let error = process::torch_error(&wiring::error_file(&self.folder, epoch, rank));
                let oom_kill = oom_kills().is_some_and(|kills| self.oom_kills.is_some_and(|before| kills > before));
                self.inputs.push_back(Input::Exited { rank, exit, error, oom_kill });
            }
        }
    }

    /// Feeds the machine until nothing is left to be said, then writes what came of it.
    fn work(&mut self) {
        while let Some(input) = self.inputs.pop_front() {
            let known = self.machine.is_welcomed();
            for output in self.machine.on(input, self.now().0) {
                self.carry_out(output);
            }
            if let (false, true, Some(notice)) = (known, self.machine.is_welcomed(), &self.notice) {
                notice.again();
            }
        }
        self.tell_terminals();
        self.write_log();
        self.ship_log();
        if !self.link.flush() {
            self.disconnect();
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Send(FromAgent::Progress { .. } | FromAgent::Sign { .. })
                if self.link.waiting() > PROGRESS_WAITS => {}
            Output::Send(message) => self.send(&message),
            Output::Disconnect => self.disconnect(),
            Output::Ask { peers, within_ms } => {
                if let Err(missing) = self.peers.ask(peers, within_ms, self.now().0) {
                    self.inputs.push_back(Input::Asked { missing: Some(missing) });
                }
            }
            Output::Spawn(launch) => self.spawn(launch),
            Output::Signal { rank, signal } => {
                if let Some(pid) = self.ranks.pid(rank) {
                    sys::kill(-pid, number(signal));
                }
            }
            Output::Sweep(signal) => self.sweep(signal),
            Output::TellHooks(reason) => self.hooks.set_stop(reason),
            Output::Note(text) => self.note(text),
            Output::ShipFrom(offset) => self.ship = Some(offset),
            Output::LogDurable(offset) => self.spool.acknowledge(offset),
            Output::Exec { id, rank, argv, stdin } => self.exec(id, rank, &argv, &stdin),
            Output::ExecKill(id) => self.commands.kill(Some(id)),
            Output::ExecKillAll => {
                self.commands.kill(None);
                let inputs = &mut self.inputs;
                self.channels.close(|id, output| inputs.push_back(Input::Channel { id, output }));
                for id in self.stacks.forget_all() {
                    self.refuse(id, OVER.to_owned());
                }
            }
            Output::Open { id, rank, channel } => self.open(id, rank, channel),
            Output::Put { id, input } => {
                if matches!(input, ChannelInput::Close) {
                    self.stacks.forget(id);
                }
                self.channels.put(id, input, |id, output| self.inputs.push_back(Input::Channel { id, output }));
            }
            Output::WriteEnded(ended) => {
                self.ended = true;
                if let Err(e) = folder::write_ended(&self.folder, &ended) {
                    complain(&format!(
                        "{} cannot be written: {e}; only the control plane will know the end",
                        files::ENDED
                    ));
                }
            }
            Output::RemoveEnded => {
                self.ended = false;
                let _ = std::fs::remove_file(self.folder.join(files::ENDED));
            }
            Output::Exit { clean } => self.exit = Some(clean),
        }
    }

    /// Starts the ranks, once it is known what their folders held before.
    fn spawn(&mut self, launch: Launch) {
        let Some(watch) = &mut self.watch else { return self.start(launch) };
        let wiring = wiring::variables(&self.spec, &launch, self.spec.first_rank, &self.folder, self.hooks.path());
        let environment = process::environment(std::env::vars_os(), &self.spec, &wiring, &self.mark);
        watch.begin(Places::of(&self.spec, launch.epoch, &self.mark, &environment));
        self.first_look = Some((self.now().0 + watch::FIRST_LOOK_MS, launch));
    }

    fn start(&mut self, launch: Launch) {
        if let Some(port) = &mut self.port {
            port.hand_over();
        }
        self.oom_kills = oom_kills();
        let mut started = Vec::new();
        let mut failure = None;
        for rank in self.spec.first_rank..self.spec.first_rank + self.spec.ranks {
            let _ = std::fs::remove_file(wiring::error_file(&self.folder, launch.epoch, rank));
            match process::start(&self.spec.run, &self.spec.cwd, &self.environment(&launch, rank), None) {
                Ok(one) => started.push((rank, one)),
                Err(reason) => {
                    failure = Some(reason);
                    break;
                }
            }
        }
        self.launch = Some(launch);
        if let Some(reason) = failure {
            for (_, one) in started {
                sys::kill(-one.pid, libc::SIGKILL);
                let _ = sys::reap_one(one.pid);
            }
            self.inputs.push_back(Input::SpawnFailed { reason });
            return;
        }
        if let Some(watch) = &mut self.watch {
            watch.started(started.iter().map(|(rank, one)| (*rank, one.pid)).collect());
        }
        for (rank, one) in started {
            self.ranks.add(rank, one);
        }
        self.inputs.push_back(Input::Spawned);
    }

    fn environment(&self, launch: &Launch, rank: u32) -> BTreeMap<std::ffi::OsString, std::ffi::OsString> {
        let wiring = wiring::variables(&self.spec, launch, rank, &self.folder, self.hooks.path());
        process::environment(std::env::vars_os(), &self.spec, &wiring, &self.mark)
    }

    fn sweep(&mut self, signal: Option<Signal>) {
        self.reap();
        let me = sys::getpid();
        let (mut found, mut unsure) = sweep::below(me);
        if found.is_empty() && !unsure {
            // One may have forked while it was looked for. The memory of those that hang must not be read; now none is left.
            (found, unsure) = sweep::look(&self.mark, &[me], &[me]);
        }
        for process in &found {
            match signal {
                // Groups of ranks have had theirs; twice means "at once" to many programs.
                Some(Signal::Term) if self.ranks.is_group(process.group) => {}
                Some(signal) => sys::kill(process.pid, number(signal)),
                None => {}
            }
        }
        let now = self.now();
        let left = found.len() + usize::from(unsure);
        if left == 0 {
            self.ranks.finish(now, &mut self.lines);
            self.lines.texts.clear();
            self.write_log();
            self.spool.settle(now.1);
            if self.watch.as_mut().is_some_and(Watch::last_look) {
                self.last_look = Some(now.0 + watch::LAST_LOOK_MS);
                return;
            }
        }
        self.swept(left);
    }
}

fn oom_kills() -> Option<u64> {
    cgroup::oom_kills(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))
}

const fn number(signal: Signal) -> i32 {
    match signal {
        Signal::Term => libc::SIGTERM,
        Signal::Kill => libc::SIGKILL,
    }
}
