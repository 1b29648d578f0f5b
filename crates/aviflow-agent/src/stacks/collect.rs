//! Collects stacks beside the agent's loop.
//!
//! One look at a time: a second one would take away what processes answered to the first. Who asks for the same
//! meanwhile gets the same answer, and who asks for something else waits. A look has [`DEADLINE_MS`], then who asked
//! hears that it is still at it; a byte on a socket wakes the loop.

use super::careful::Hanging;
use super::{Dump, LOOK_MS};
use crate::protocol::stacks::WorkerStacks;
use crate::sweep::Process;
use crate::sys::Poll;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How long a look is waited for, in milliseconds: more than processes have, and more than reading takes.
pub const DEADLINE_MS: u64 = 10_000;

/// What is answered where a look does not come back.
const STILL: &str = "an earlier look at what the processes here do does not come back, as one of them hangs in the \
                     kernel: see its state and `dmesg` on the node";

/// The look that is under way.
struct Look {
    rank: Option<u32>,
    told: Receiver<WorkerStacks>,
    wake: UnixStream,
    place: usize,
    until: u64,
    /// Nobody waits for it any more, but it is not over.
    late: bool,
}

/// The channels that wait for stacks, and the look that is under way.
#[derive(Default)]
pub struct Collector {
    look: Option<Look>,
    /// Of which rank alone, by channel.
    asked: BTreeMap<u64, Option<u32>>,
    hanging: Hanging,
}

impl Collector {
    /// Whether a channel waits for stacks.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.asked.contains_key(&id)
    }

    /// A channel asks for the stacks of all ranks, or of one.
    ///
    /// # Errors
    /// With the reason if there is nothing to wait for.
    pub fn ask(&mut self, id: u64, rank: Option<u32>) -> Result<(), String> {
        if self.look.as_ref().is_some_and(|look| look.late) {
            return Err(STILL.to_owned());
        }
        self.asked.insert(id, rank);
        Ok(())
    }

    /// A channel does not wait any more.
    pub fn forget(&mut self, id: u64) {
        self.asked.remove(&id);
    }

    /// No channel waits any more: those that did.
    pub fn forget_all(&mut self) -> impl Iterator<Item = u64> + use<> {
        std::mem::take(&mut self.asked).into_keys()
    }

    /// Begins the next look, if one is asked for and none is under way. `find` finds the processes, and is called in
    /// the look's own thread.
    ///
    /// # Errors
    /// If there can be no thread: with those who asked.
    pub fn begin(
        &mut self,
        folder: &Path,
        now: u64,
        find: impl FnOnce() -> Vec<Process> + Send + 'static,
    ) -> Result<(), (Vec<u64>, io::Error)> {
        let (None, Some((_, rank))) = (&self.look, self.asked.first_key_value()) else { return Ok(()) };
        let rank = *rank;
        let begun = start(rank, folder.to_owned(), self.hanging.clone(), find);
        let until = now + DEADLINE_MS;
        match begun {
            Ok((told, wake)) => {
                self.look = Some(Look { rank, told, wake, place: usize::MAX, until, late: false });
                Ok(())
            }
            Err(e) => Err((self.take(rank), e)),
        }
    }

    /// When the look is late.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.look.as_ref().filter(|look| !look.late).map(|look| look.until)
    }

    /// Adds what is to be waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        if let Some(look) = &mut self.look {
            look.place = poll.add(&look.wake, true, false);
        }
    }

    /// Takes the answer of the look that is under way: for whom it is, and what it is, or why there is none.
    pub fn read(&mut self, poll: &Poll, now: u64) -> Option<(Vec<u64>, Result<WorkerStacks, String>)> {
        let look = self.look.as_mut()?;
        if poll.ready(look.place) {
            let _ = look.wake.read(&mut [0; 8]);
        }
        let rank = look.rank;
        match look.told.try_recv() {
            Ok(stacks) => {
                self.look = None;
                Some((self.take(rank), Ok(stacks)))
            }
            Err(TryRecvError::Disconnected) => {
                self.look = None;
                Some((self.take(rank), Err("the look at what the processes here do has failed; try again".to_owned())))
            }
            Err(TryRecvError::Empty) if now >= look.until && !look.late => {
                look.late = true;
                // All of them, as no other look can begin.
                Some((self.forget_all().collect(), Err(STILL.to_owned())))
            }
            Err(TryRecvError::Empty) => None,
        }
    }

    /// Those who asked for this, and do not wait any more.
    fn take(&mut self, rank: Option<u32>) -> Vec<u64> {
        let ids: Vec<u64> = self.asked.iter().filter(|(_, of)| **of == rank).map(|(id, _)| *id).collect();
        self.asked.retain(|_, of| *of != rank);
        ids
    }
}

fn start(
    rank: Option<u32>,
    folder: PathBuf,
    hanging: Hanging,
    find: impl FnOnce() -> Vec<Process> + Send + 'static,
) -> io::Result<(Receiver<WorkerStacks>, UnixStream)> {
    let (tell, told) = mpsc::channel();
    let (wake, mut waker) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    let look = move || {
        let began = Instant::now();
        let now = || u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut dump = Dump::begin(&find(), rank, &folder, &hanging, now());
        let stacks = loop {
            if let Some(stacks) = dump.look(now()) {
                break stacks;
            }
            // Nothing tells when a file has grown that another process writes to.
            std::thread::sleep(Duration::from_millis(LOOK_MS));
        };
        let _ = tell.send(stacks);
        let _ = waker.write(&[0]);
    };
    Builder::new().name("stacks".to_owned()).spawn(look)?;
    Ok((told, wake))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for the answer of the look that is under way.
    fn answer(collector: &mut Collector, now: u64) -> (Vec<u64>, Result<WorkerStacks, String>) {
        loop {
            let mut poll = Poll::default();
            collector.watch(&mut poll);
            poll.wait(None);
            if let Some(answer) = collector.read(&poll, now) {
                return answer;
            }
        }
    }

    #[test]
    fn who_asks_for_the_same_shares_one_look_and_others_wait_for_theirs() {
        let mut collector = Collector::default();
        let (release, gate) = mpsc::channel::<()>();
        let begin = |collector: &mut Collector, gate: Option<Receiver<()>>| {
            let find = move || {
                gate.map(|gate| gate.recv());
                vec![]
            };
            collector.begin(Path::new("/"), 0, find).expect("a thread");
        };
        for (id, rank) in [(1, None), (2, Some(3)), (4, None), (5, None)] {
            collector.ask(id, rank).expect("it may");
        }
        begin(&mut collector, Some(gate));
        // While one is under way no other begins.
        begin(&mut collector, None);
        collector.ask(6, None).expect("it may");
        collector.forget(5);
        assert!(collector.contains(6) && !collector.contains(5));
        drop(release);
        assert_eq!(answer(&mut collector, 0), (vec![1, 4, 6], Ok(WorkerStacks::default())));
        begin(&mut collector, None);
        assert_eq!(answer(&mut collector, 0), (vec![2], Ok(WorkerStacks::default())));
        begin(&mut collector, None);
        assert!(collector.look.is_none(), "nobody asks");
    }

    #[test]
    fn a_look_that_does_not_come_back_is_told_at_its_deadline() {
        let mut collector = Collector::default();
        let (release, gate) = mpsc::channel::<()>();
        for id in [1, 2] {
            collector.ask(id, Some(id as u32)).expect("it may");
        }
        let find = move || {
            let _ = gate.recv();
            vec![]
        };
        collector.begin(Path::new("/"), 0, find).expect("a thread");
        let nothing = Poll::default();
        assert_eq!(collector.read(&nothing, DEADLINE_MS - 1), None);
        assert_eq!(collector.due(), Some(DEADLINE_MS));
        let late = Err(STILL.to_owned());
        assert_eq!(collector.read(&nothing, DEADLINE_MS), Some((vec![1, 2], late.clone())));
        assert_eq!((collector.due(), collector.ask(3, None)), (None, late.map(drop)));
        drop(release);
        assert_eq!(answer(&mut collector, DEADLINE_MS), (vec![], Ok(WorkerStacks::default())));
        assert_eq!(collector.ask(3, None), Ok(()));
    }
}
