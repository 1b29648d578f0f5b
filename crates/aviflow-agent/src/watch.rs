//! Looks at the folders of a training for checkpoints and event files.
//!
//! A thread of its own, as a file system may hang and the agent's loop may not. It looks every [`PERIOD_MS`], and less
//! often where looking takes long, so that at most a fiftieth of its time goes into it. What it sees comes over a
//! channel; a byte on a socket wakes the loop. What the files mean is decided in [`crate::checkpoints`],
//! [`crate::tensorboard`] and [`crate::training`].

mod disks;
mod events;
mod list;

use crate::checkpoints::{Checkpoints, Sighting};
use crate::output::names::Values;
use crate::protocol::WorkerSpec;
use crate::sys::{Pid, Poll};
use disks::Disks;
use events::EventFiles;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Between two looks, in milliseconds.
pub const PERIOD_MS: u64 = 2000;

/// How long the start of an epoch waits for the first look, in milliseconds.
pub const FIRST_LOOK_MS: u64 = 1000;

/// How long its end waits for the last one, in milliseconds.
pub const LAST_LOOK_MS: u64 = 3000;

/// The least pause, as a multiple of the time that a look took.
const PAUSE: u32 = 50;

/// Where to look in an epoch.
#[derive(Clone, Debug)]
pub struct Places {
    /// The epoch.
    pub epoch: u32,
    /// The folder of checkpoints, for the worker that looks there.
    pub checkpoints: Option<PathBuf>,
    /// Folders below which event files may be.
    pub events: Vec<PathBuf>,
    /// Folders that must have space left.
    pub disks: Vec<PathBuf>,
    /// The mark of the worker's processes, and its first rank.
    pub mark: (String, u32),
    /// Whether no other worker writes to these folders.
    pub alone: bool,
    /// Processes of the whole gang, one for each GPU.
    pub gpus: u32,
}

/// Variables that name folders of event files.
const EVENT_FOLDERS: [&str; 4] =
    ["TENSORBOARD_LOGGING_DIR", "TENSORBOARD_LOG_DIR", "TENSORBOARD_DIR", "AVIFLOW_OUTPUT_DIR"];

impl Places {
    /// The places of a worker's epoch, by the variables that its ranks get.
    #[must_use]
    pub fn of(spec: &WorkerSpec, epoch: u32, mark: &str, environment: &BTreeMap<OsString, OsString>) -> Self {
        let folder = |name: &str| {
            let value = environment.get(OsStr::new(name)).filter(|value| !value.is_empty());
            value.map(|value| spec.cwd.join(value))
        };
        let outputs: Vec<PathBuf> = (0..8).filter_map(|n| folder(&format!("AVIFLOW_OUTPUT_{n}"))).collect();
        let written = folder("AVIFLOW_CHECKPOINT_DIR").into_iter().chain(outputs.clone());
        let disks = written.chain([PathBuf::from("/dev/shm")]).collect();
        let mut events: Vec<PathBuf> = EVENT_FOLDERS.iter().filter_map(|name| folder(name)).collect();
        events.extend(outputs.into_iter().chain([spec.cwd.clone()]).chain(folder("AVIFLOW_CHECKPOINT_DIR")));
        let mut known = BTreeSet::new();
        events.retain(|place| known.insert(place.clone()));
        Self {
            epoch,
            checkpoints: folder("AVIFLOW_CHECKPOINT_DIR").filter(|_| spec.worker == 0),
            events,
            disks,
            mark: (mark.to_owned(), spec.first_rank),
            alone: spec.workers <= 1,
            gpus: spec.workers.saturating_mul(spec.gpus_per_node).max(spec.world_size),
        }
    }
}

/// What was seen.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// What was there before the epoch is known: it may begin.
    Ready,
    /// Of a checkpoint; its path is whole.
    Checkpoint(Sighting),
    /// Values in an event file of a rank, written at a time of the node's clock.
    Scalars {
        /// The rank that writes the file.
        rank: u32,
        /// The step.
        step: u64,
        /// When, in milliseconds since 1970.
        unix_ms: i64,
        /// The values.
        values: Values,
    },
    /// A folder has no space left.
    DiskFull(String),
    /// The last look of the epoch is over.
    Last,
}

enum Order {
    Begin(Places),
    Started(Vec<(u32, Pid)>),
    LastLook,
}

/// The loop's end.
#[derive(Debug)]
pub struct Watch {
    orders: Sender<Order>,
    seen: Receiver<(u32, Seen)>,
    wake: UnixStream,
    place: usize,
    epoch: Option<u32>,
}

impl Watch {
    /// Starts the thread. Signals must be blocked by now, so that it gets none.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start() -> io::Result<Self> {
        let (orders, taken) = mpsc::channel();
        let (said, seen) = mpsc::channel();
        let (wake, waker) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        let watcher = Watcher {
            said,
            waker,
            epoch: 0,
            now: Instant::now(),
            checkpoints: None,
            events: None,
            disks: Disks::default(),
            alone: false,
        };
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || watcher.run(&taken))?;
        Ok(Self { orders, seen, wake, place: usize::MAX, epoch: None })
    }

    /// An epoch is about to begin: what is there until [`Seen::Ready`] was there before.
    pub fn begin(&mut self, places: Places) {
        self.epoch = Some(places.epoch);
        let _ = self.orders.send(Order::Begin(places));
    }

    /// The ranks of the epoch are these processes.
    pub fn started(&mut self, ranks: Vec<(u32, Pid)>) {
        let _ = self.orders.send(Order::Started(ranks));
    }

    /// No process is left: asks for a last look, answered by [`Seen::Last`]; false if there is none to come.
    pub fn last_look(&mut self) -> bool {
        self.epoch.is_some() && self.orders.send(Order::LastLook).is_ok()
    }

    /// The epoch is over: nothing of it is heard any more.
    pub fn end(&mut self) {
        self.epoch = None;
    }

    /// Adds what is to be waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        self.place = poll.add(&self.wake, true, false);
    }

    /// Takes what was seen since the last time.
    pub fn read(&mut self, poll: &Poll, mut seen: impl FnMut(Seen)) {
        if !poll.ready(self.place) {
            return;
        }
        let mut buffer = [0; 256];
        while matches!(self.wake.read(&mut buffer), Ok(n) if n == buffer.len()) {}
        for (epoch, one) in self.seen.try_iter() {
            if self.epoch == Some(epoch) {
                seen(one);
            }
        }
    }
}

/// The thread.
struct Watcher {
    said: Sender<(u32, Seen)>,
    waker: UnixStream,
    epoch: u32,
    now: Instant,
    checkpoints: Option<(PathBuf, Checkpoints)>,
    events: Option<EventFiles>,
    disks: Disks,
    alone: bool,
}

impl Watcher {
    fn run(mut self, orders: &Receiver<Order>) {
        // When to look at the files, and at the disks: a look at many files is seldom, and disks fill up in between.
        let mut next: Option<(Instant, Instant)> = None;
        loop {
            let order = match next {
                Some((files, disks)) => orders.recv_timeout(files.min(disks).saturating_duration_since(Instant::now())),
                None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let began = Instant::now();
            let files_after = |began: Instant| {
                let took = began.elapsed();
                Instant::now() + (took * PAUSE).max(Duration::from_millis(PERIOD_MS))
            };
            match order {
                Ok(Order::Begin(places)) => {
                    self.begin(places);
                    next = Some((files_after(began), Instant::now()));
                }
                Ok(Order::Started(ranks)) => {
                    if let Some(events) = &mut self.events {
                        events.add(ranks);
                    }
                }
                Ok(Order::LastLook) => {
                    self.last_look();
                    next = None;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let Some((files, disks)) = &mut next else { continue };
                    if *disks <= began {
                        self.look_at_disks();
                        *disks = Instant::now() + Duration::from_millis(disks::PERIOD_MS);
                    }
                    if *files <= began {
                        let began = Instant::now();
                        self.look(false);
                        *files = files_after(began);
                    }
                }
                // The agent ends.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn begin(&mut self, places: Places) {
        self.epoch = places.epoch;
        self.alone = places.alone;
        self.checkpoints = places.checkpoints.map(|folder| (folder, Checkpoints::new(places.gpus)));
        self.events = Some(EventFiles::new(places.events, places.mark.0, places.mark.1));
        self.disks = Disks::new(places.disks);
        self.look(false);
        self.say(Seen::Ready);
    }

    fn last_look(&mut self) {
        if let Some(events) = &mut self.events {
            events.search_soon();
        }
        if self.look(self.alone) {
            // Others may write to this folder: they have a moment.
            std::thread::sleep(Duration::from_millis(crate::checkpoints::SETTLE_MS + 50));
            self.look(self.alone);
        }
        (self.checkpoints, self.events) = (None, None);
        self.say(Seen::Last);
    }

    fn look_at_disks(&mut self) {
        let mut full = Vec::new();
        self.disks.look(|folder| full.push(folder));
        full.into_iter().for_each(|folder| self.say(Seen::DiskFull(folder)));
    }

    /// Whether a checkpoint would be complete if nothing changed for a moment.
    fn look(&mut self, quiet: bool) -> bool {
        let mut seen = Vec::new();
        let now = u64::try_from(self.now.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut settling = false;
        if let Some((folder, checkpoints)) = &mut self.checkpoints
            && let Some(listing) = list::list(folder)
        {
            for mut sighting in checkpoints.look(&listing, now, quiet) {
                sighting.path = whole(folder, &sighting.path);
                seen.push(Seen::Checkpoint(sighting));
            }
            settling = checkpoints.is_settling();
        }
        if let Some(events) = &mut self.events {
            events.look(now, |one| seen.push(one));
        }
        seen.into_iter().for_each(|one| self.say(one));
        settling
    }

    fn say(&mut self, seen: Seen) {
        if self.said.send((self.epoch, seen)).is_ok() {
            // A full socket wakes as well.
            let _ = self.waker.write(&[0]);
        }
    }
}

fn whole(folder: &Path, path: &str) -> String {
    folder.join(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
