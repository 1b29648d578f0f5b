//! The thread around the [`Watcher`]: it takes what is noticed, asks again when that is due, and hands on what is found.
//!
//! Facts come through a [`Feed`] from anywhere. What it cannot hold is dropped and counted: who notices something never
//! waits for the watch. Which gangs run comes from the driver after each turn, and is never dropped.

use super::{Clock, Handle};
use crate::engine::{Input, Turn};
use crate::ports::{Observation, TakeStacks};
use crate::telemetry::{BuildProgress, Point, Sign, StreamKey, Telemetry};
use crate::watcher::{Notice, Run, Said, Share, Watcher, of_observation, of_point};
use aviflow_core::health::News;
use aviflow_core::model::{Job, JobId, Phase, Snapshot};
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Notices that wait for the watch: eight seconds of a gang with 8,192 ranks that make a step a second.
const WAITING: usize = 65_536;

/// The least time between the beginnings of two rounds, so that many facts are taken at once.
const SPACING: Duration = Duration::from_millis(20);

/// What the driver says of gangs.
#[derive(Debug)]
enum Control {
    Runs(JobId, Box<Run>),
    Stops(JobId),
    Ended(JobId),
}

/// A notice with when it came, and how long ago it had happened then.
type Noticed = (Instant, Span, Notice);

#[derive(Debug, Default)]
struct Queue {
    control: Vec<Control>,
    notices: Vec<Noticed>,
    /// Whether somebody watches.
    open: bool,
    stop: bool,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    dropped: AtomicU64,
}

/// Takes what is noticed of running gangs. Cheap to clone; never blocks for long.
#[derive(Clone, Debug, Default)]
pub struct Feed(Arc<Shared>);

impl Feed {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was noticed, which happened so long ago. Where nobody watches it is forgotten.
    pub fn notice(&self, notice: Notice, ago: Span) {
        let mut queue = self.lock();
        if !queue.open {
            return;
        }
        if queue.notices.len() >= WAITING {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.notices.push((Instant::now(), ago, notice));
        let first = queue.notices.len() == 1;
        drop(queue);
        if first {
            self.0.changed.notify_one();
        }
    }

    /// How many notices could not be taken, since this process began.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    fn control(&self, control: Control) {
        let mut queue = self.lock();
        if queue.open {
            queue.control.push(control);
            drop(queue);
            self.0.changed.notify_one();
        }
    }

    fn stop(&self) {
        self.lock().stop = true;
        self.0.changed.notify_one();
    }

    /// Waits until something came or `wait` is over, and takes it; none once it is stopped.
    fn take(&self, wait: Option<Duration>) -> Option<(Vec<Control>, Vec<Noticed>)> {
        let idle = |queue: &mut Queue| !queue.stop && queue.control.is_empty() && queue.notices.is_empty();
        let queue = self.lock();
        let mut queue = match wait {
            None => self.0.changed.wait_while(queue, idle).unwrap_or_else(PoisonError::into_inner),
            Some(wait) => {
                self.0.changed.wait_timeout_while(queue, wait, idle).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        (!queue.stop).then(|| (std::mem::take(&mut queue.control), std::mem::take(&mut queue.notices)))
    }

    /// Waits for a moment, or until it is stopped.
    fn pause(&self, time: Duration) {
        drop(self.0.changed.wait_timeout_while(self.lock(), time, |queue| !queue.stop));
    }
}

/// What agents ship, for whom it is kept by and for the watch.
pub struct Watching<T> {
    kept: T,
    feed: Feed,
}

impl<T: Telemetry> Watching<T> {
    /// Hands on to `kept`, and tells the watch.
    pub fn new(kept: T, feed: Feed) -> Watching<T> {
        Watching { kept, feed }
    }
}

impl<T: Telemetry> Telemetry for Watching<T> {
    fn log_have(&self, stream: StreamKey) -> u64 {
        self.kept.log_have(stream)
    }

    fn log_append(&self, stream: StreamKey, offset: u64, text: &str) -> std::io::Result<u64> {
        self.kept.log_append(stream, offset, text)
    }

    fn progress(&self, job: JobId, point: Point) {
        let ago = super::wall_clock().since(point.at);
        let (attempt, fact) = (point.attempt, of_point(&point));
        self.feed.notice(Notice::Fact { job, attempt, epoch: None, fact }, ago);
        self.kept.progress(job, point);
    }

    fn build(&self, progress: BuildProgress) {
        self.kept.build(progress);
    }

    fn forget_build(&self, hash: &str) {
        self.kept.forget_build(hash);
    }

    fn sign(&self, key: StreamKey, epoch: u32, ago: Span, sign: Sign) {
        self.feed.notice(Notice::Sign { key, epoch, sign: sign.clone() }, ago);
        self.kept.sign(key, epoch, ago, sign);
    }

    fn heard(&self, key: StreamKey, heard: bool) {
        self.feed.notice(Notice::Heard { key, heard }, Span(0));
        self.kept.heard(key, heard);
    }
}

/// What the driver tells the watch after its turns.
#[derive(Debug)]
pub(super) struct Teller {
    feed: Feed,
    /// The epochs that the watch knows to run.
    told: BTreeMap<JobId, (u32, u32)>,
}

impl Teller {
    pub(super) fn new(feed: Feed) -> Teller {
        Teller { feed, told: BTreeMap::new() }
    }

    /// All that runs, as for one who looks for the first time, or after the store was read anew.
    pub(super) fn all(&mut self, snapshot: &Snapshot, begins: bool) {
        let gone: Vec<JobId> = self.told.keys().filter(|job| !snapshot.jobs.contains_key(job)).copied().collect();
        for job in gone {
            self.ended(job);
        }
        for job in snapshot.jobs.values() {
            self.job(job, snapshot, begins);
        }
    }

    /// What a turn has changed, and what it was told.
    pub(super) fn turned(&mut self, inputs: &[Input], turn: &Turn, snapshot: &Snapshot) {
        for job in turn.changed.iter().filter_map(|id| snapshot.jobs.get(id)) {
            self.job(job, snapshot, false);
        }
        for job in &turn.ended {
            self.ended(job.id);
        }
        for input in inputs {
            if let Input::Observe(observation) = input
                && let Some((notice, ago)) = of_observation(observation, snapshot)
            {
                self.feed.notice(notice, ago);
            }
        }
    }

    pub(super) fn stop(&self) {
        self.feed.stop();
    }

    fn ended(&mut self, job: JobId) {
        self.told.remove(&job);
        self.feed.control(Control::Ended(job));
    }

    fn job(&mut self, job: &Job, snapshot: &Snapshot, begins: bool) {
        let Phase::Running(gang) = &job.phase else {
            if self.told.remove(&job.id).is_some() {
                self.feed.control(Control::Stops(job.id));
            }
            return;
        };
        let epoch = (gang.attempt, gang.epoch);
        if self.told.insert(job.id, epoch) == Some(epoch) {
            return;
        }
        let whole = |node, slots| snapshot.nodes.get(&node).is_some_and(|node| node.gpus == slots);
        let share =
            |w: &aviflow_core::model::Worker| Share { node: w.node, slots: w.slots, whole: whole(w.node, w.slots) };
        let run = Run {
            attempt: gang.attempt,
            epoch: gang.epoch,
            workers: gang.workers.iter().map(share).collect(),
            per_worker: job.request.ranks_per_node,
            since: gang.up.unwrap_or(gang.placed),
            tells_steps: job.best_step.is_some(),
            resumed: begins.then_some(gang.stepped),
        };
        self.feed.control(Control::Runs(job.id, Box::new(run)));
    }
}

/// The thread's own.
pub(super) struct Rounds {
    feed: Feed,
    watcher: Watcher,
    stacks: Box<dyn TakeStacks>,
    engine: Handle,
    clock: Clock,
}

impl Rounds {
    /// What is told from now on is kept for it.
    pub(super) fn new(
        feed: Feed,
        watcher: Watcher,
        stacks: Box<dyn TakeStacks>,
        engine: Handle,
        clock: Clock,
    ) -> Rounds {
        feed.lock().open = true;
        Rounds { feed, watcher, stacks, engine, clock }
    }

    /// Runs until it is stopped.
    pub(super) fn run(mut self) {
        loop {
            let wait = self.watcher.next_deadline().map(|due| {
                let wait = u64::try_from(due.since(self.clock.now()).0).unwrap_or(0);
                // The clock counts whole milliseconds.
                Duration::from_millis(wait) + Duration::from_millis(1)
            });
            let Some((control, notices)) = self.feed.take(wait) else { return };
            self.round(control, notices);
            self.feed.pause(SPACING);
        }
    }

    fn round(&mut self, control: Vec<Control>, notices: Vec<Noticed>) {
        let now = self.clock.now();
        for control in control {
            match control {
                Control::Runs(job, run) => self.watcher.runs(job, *run, now),
                Control::Stops(job) => self.watcher.stops(job),
                Control::Ended(job) => self.watcher.forget(job),
            }
        }
        for (came, ago, notice) in notices {
            let said = self.watcher.notice(notice, self.clock.at(came) - ago, now);
            self.hand_on(said);
        }
        let said = self.watcher.tick(now);
        self.hand_on(said);
    }

    fn hand_on(&self, said: Vec<Said>) {
        for said in said {
            if said.news == News::TakeStacks {
                self.stacks.take(&said);
                continue;
            }
            let Said { job, attempt, epoch, news, workers: _ } = said;
            self.engine.observe(Observation::Found { job, attempt, epoch, news }, None);
        }
    }
}

impl Clock {
    /// The time at an instant.
    fn at(self, instant: Instant) -> Time {
        let span = |time: Duration| Span(i64::try_from(time.as_millis()).unwrap_or(i64::MAX));
        let before = self.since.saturating_duration_since(instant);
        self.base - span(before) + span(instant.saturating_duration_since(self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::health::Fact;

    fn active() -> Notice {
        Notice::Fact { job: JobId(1), attempt: 1, epoch: None, fact: Fact::Active }
    }

    #[test]
    fn what_the_feed_cannot_hold_is_dropped_and_counted() {
        let feed = Feed::default();
        feed.notice(active(), Span(0));
        assert_eq!((feed.lock().notices.len(), feed.dropped()), (0, 0), "nobody watches");
        feed.lock().open = true;
        (0..WAITING + 3).for_each(|_| feed.notice(active(), Span(0)));
        assert_eq!(feed.dropped(), 3);
        // What the driver says is never dropped.
        feed.control(Control::Stops(JobId(1)));
        let (control, notices) = feed.take(None).expect("it is not stopped");
        assert_eq!((control.len(), notices.len()), (1, WAITING));
        feed.notice(active(), Span(0));
        assert_eq!(feed.take(None).expect("it is not stopped").1.len(), 1, "there is room again");
        assert!(feed.take(Some(Duration::ZERO)).expect("it is not stopped").1.is_empty(), "it waits no longer");
        feed.stop();
        assert!(feed.take(None).is_none());
    }

    #[test]
    fn an_instant_is_a_time_of_the_engine() {
        let clock = Clock::starting_at(Time(1_000_000));
        assert_eq!(clock.at(clock.since), Time(1_000_000));
        assert_eq!(clock.at(clock.since + Duration::from_millis(1500)), Time(1_001_500));
    }
}
