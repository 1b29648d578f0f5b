//! The thread around the engine: it waits for inputs, takes turns, answers
//! those who asked once the answer is durable, and hands orders to the cluster.

mod follow;
mod watching;

pub use follow::{Changes, Follower};
pub use watching::{Feed, Watching};

use crate::engine::{Answer, Engine, Input, Submission, Turn};
use crate::meter::Meter;
use crate::ports::{Cluster, JobRecord, Stamped, Store, StoreError, TakeStacks};
use crate::watcher::Watcher;
use aviflow_core::model::{JobId, Snapshot, Term};
use aviflow_core::schedule::Plan;
use aviflow_core::time::{Span, Time};
use follow::Followers;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use watching::{Rounds, Teller};

/// Inputs taken in one turn at most, so that a flood still commits in steps.
const TURN_INPUTS: usize = 1024;

/// The least time between the beginnings of two turns. A turn costs the same for one input as for many, so that under
/// load the time that inputs wait here is given back several times.
const TURN_SPACING: Duration = Duration::from_millis(10);

/// The pause before a store that failed is opened again.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

type Query = Box<dyn FnOnce(Result<&View<'_>, &StoreError>) + Send>;

/// Called once an input is durable.
pub type Durable = Box<dyn FnOnce() + Send>;

#[expect(clippy::large_enum_variant, reason = "nearly every message is an input")]
enum Message {
    Input { input: Input, reply: Option<Sender<Result<Answer, StoreError>>>, durable: Option<Durable> },
    Query(Query),
    Stop,
}

/// The state between two turns.
#[derive(Debug)]
pub struct View<'a> {
    /// Nodes, queues, live jobs, open ledger.
    pub snapshot: &'a Snapshot,
    /// The current plan's verdicts.
    pub plan: &'a Plan,
    /// Records of the live jobs.
    pub records: &'a BTreeMap<JobId, Arc<JobRecord>>,
    /// The engine's time, now.
    pub now: Time,
    /// The term.
    pub term: Term,
    /// The number of the last commit.
    pub generation: u64,
}

/// What others hold of a running engine. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    sender: Sender<Message>,
    changed: watch::Receiver<u64>,
    followers: Followers,
    meter: Meter,
    feed: Feed,
}

/// The engine is stopping or has failed for good.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// It does not run any more.
    #[error("the control plane is stopping; try again in a moment")]
    Stopped,
    /// The store refused; nothing was changed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Handle {
    /// Gives an input and waits until it is durable or refused. Blocks.
    ///
    /// # Errors
    /// If the engine has stopped or the store failed; then nothing was changed.
    pub fn ask(&self, input: Input) -> Result<Answer, HandleError> {
        let (reply, answer) = channel();
        let message = Message::Input { input, reply: Some(reply), durable: None };
        self.sender.send(message).map_err(|_| HandleError::Stopped)?;
        Ok(answer.recv().map_err(|_| HandleError::Stopped)??)
    }

    /// Submits a job and waits until it is durable. Blocks.
    ///
    /// # Errors
    /// As [`Handle::ask`].
    pub fn submit(&self, submission: Submission) -> Result<Answer, HandleError> {
        self.ask(Input::Submit(Box::new(submission)))
    }

    /// Reports an observation; `durable` is called once it cannot be lost any more.
    pub fn observe(&self, observation: crate::ports::Observation, durable: Option<Durable>) {
        let message = Message::Input { input: Input::Observe(observation), reply: None, durable };
        // An engine that has stopped hears nothing: its body tells the next one again.
        let _ = self.sender.send(message);
    }

    /// Reads the state between two turns. Blocks for at most a turn; the closure should be quick.
    ///
    /// # Errors
    /// If the engine has stopped, or waits for a store that failed.
    pub fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&View<'_>) -> T + Send + 'static,
    ) -> Result<T, HandleError> {
        let (reply, answer) = channel();
        let query = Box::new(move |view: Result<&View<'_>, &StoreError>| {
            let _ = reply.send(view.map(read).map_err(StoreError::clone));
        });
        self.sender.send(Message::Query(query)).map_err(|_| HandleError::Stopped)?;
        Ok(answer.recv().map_err(|_| HandleError::Stopped)??)
    }

    /// What is counted of the engine's work.
    #[must_use]
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Where what is noticed of running gangs is told.
    #[must_use]
    pub fn feed(&self) -> &Feed {
        &self.feed
    }

    /// The number of the last commit, to wait for the next one.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }

    /// Ends the driver after the inputs given so far.
    pub fn stop(&self) {
        let _ = self.sender.send(Message::Stop);
    }
}

/// The wall clock in whole milliseconds.
#[must_use]
pub fn wall_clock() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// The engine's clock: it begins with the wall clock, or with the store's last
/// stamp if that is later, and then only counts, whatever the wall clock does.
#[derive(Clone, Copy, Debug)]
struct Clock {
    base: Time,
    since: Instant,
}

impl Clock {
    fn starting_at(base: Time) -> Clock {
        Clock { base, since: Instant::now() }
    }

    fn now(self) -> Time {
        self.base + Span(i64::try_from(self.since.elapsed().as_millis()).unwrap_or(i64::MAX))
    }
}

/// A handle before its engine: what it is told meanwhile is taken in the first turn.
pub struct Starter {
    handle: Handle,
    receiver: Receiver<Message>,
    generation: watch::Sender<u64>,
    watcher: Option<(Watcher, Box<dyn TakeStacks>)>,
}

impl Default for Starter {
    fn default() -> Starter {
        let (sender, receiver) = channel();
        let (generation, changed) = watch::channel(0);
        let (followers, meter, feed) = Default::default();
        let handle = Handle { sender, changed, followers, meter, feed };
        Starter { handle, receiver, generation, watcher: None }
    }
}

impl Starter {
    /// The handle of the engine to come, for the cluster that it needs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Running gangs are watched, in a thread of its own. Without this, what is noticed of them is forgotten.
    #[must_use]
    pub fn watched(mut self, watcher: Watcher, stacks: Box<dyn TakeStacks>) -> Starter {
        self.watcher = Some((watcher, stacks));
        self
    }

    /// Takes the store and starts the thread. `fenced` is called if another
    /// control plane took the store; the engine has ended then.
    ///
    /// # Errors
    /// If the store cannot be taken.
    pub fn start<S, C>(
        self,
        store: S,
        mut cluster: C,
        on_end: impl FnOnce(Option<StoreError>) + Send + 'static,
    ) -> Result<(Handle, JoinHandle<()>), StoreError>
    where
        S: Store + Send + 'static,
        C: Cluster + Send + 'static,
    {
        let (mut engine, orders) = Engine::open(store, wall_clock())?;
        engine.stopwatch = Some(Instant::now);
        let clock = Clock::starting_at(engine.now());
        let mut teller = Teller::new(self.handle.feed.clone());
        if let Some((watcher, stacks)) = self.watcher {
            let rounds = Rounds::new(self.handle.feed.clone(), watcher, stacks, self.handle.clone(), clock);
            spawn("watch", move || rounds.run())?;
        }
        // Before agents are heard.
        teller.all(engine.snapshot(), true);
        cluster.apply(&orders);
        let (followers, meter) = (self.handle.followers.clone(), self.handle.meter.clone());
        let driver = Driver {
            engine,
            cluster,
            receiver: self.receiver,
            generation: self.generation,
            followers,
            meter,
            clock,
            turned: None,
            teller,
        };
        let thread = spawn("engine", move || on_end(driver.run()))?;
        Ok((self.handle, thread))
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|e| StoreError::Failed(format!("the thread of the {name} could not be started: {e}")))
}

struct Driver<S, C> {
    engine: Engine<S>,
    cluster: C,
    receiver: Receiver<Message>,
    generation: watch::Sender<u64>,
    followers: Followers,
    meter: Meter,
    clock: Clock,
    /// When the last turn began.
    turned: Option<Instant>,
    /// Who tells the watch what runs.
    teller: Teller,
}

impl<S, C> Drop for Driver<S, C> {
    fn drop(&mut self) {
        self.teller.stop();
    }
}

#[derive(Default)]
struct Mail {
    inputs: Vec<Input>,
    replies: Vec<Option<Sender<Result<Answer, StoreError>>>>,
    durable: Vec<Option<Durable>>,
    queries: Vec<Query>,
    stop: bool,
}

impl Mail {
    fn put(&mut self, message: Message) {
        match message {
            Message::Input { input, reply, durable } => {
                self.inputs.push(input);
                self.replies.push(reply);
                self.durable.push(durable);
            }
            Message::Query(query) => self.queries.push(query),
            Message::Stop => self.stop = true,
        }
    }
}

impl<S: Store, C: Cluster> Driver<S, C> {
    /// Runs until it is stopped (`None`) or fenced.
    fn run(mut self) -> Option<StoreError> {
        loop {
            let mut mail = self.collect();
            if let Err(error) = self.serve(&mut mail) {
                return Some(error);
            }
            if mail.stop {
                return None;
            }
        }
    }

    /// Waits for the first message or the next deadline, then takes what else is there.
    fn collect(&self) -> Mail {
        let mut mail = Mail::default();
        let wake = self.engine.next_wake();
        let first = match wake {
            None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => {
                let wait = u64::try_from(at.since(self.clock.now()).0).unwrap_or(0);
                self.receiver.recv_timeout(Duration::from_millis(wait))
            }
        };
        match first {
            Ok(message) => mail.put(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => mail.stop = true,
        }
        while mail.inputs.len() < TURN_INPUTS && !mail.stop {
            // A query alone is answered at once; one that came after an input is to see what comes of it.
            let wait = match self.turned {
                Some(turned) if !mail.inputs.is_empty() => TURN_SPACING.saturating_sub(turned.elapsed()),
                _ => Duration::ZERO,
            };
            let Ok(message) = self.receiver.recv_timeout(wait) else { break };
            mail.put(message);
        }
        mail
    }

    fn serve(&mut self, mail: &mut Mail) -> Result<(), StoreError> {
        // A query alone changes nothing; only inputs and deadlines are worth a turn.
        let due = self.engine.next_wake().is_some_and(|t| t <= self.clock.now());
        if due || !mail.inputs.is_empty() {
            self.turned = Some(Instant::now());
            self.turn(mail)?;
        }
        let engine = &self.engine;
        let view = View {
            snapshot: engine.snapshot(),
            plan: engine.plan(),
            records: engine.records(),
            now: engine.now().max(self.clock.now()),
            term: engine.term(),
            generation: engine.generation(),
        };
        for query in std::mem::take(&mut mail.queries) {
            query(Ok(&view));
        }
        Ok(())
    }

    fn turn(&mut self, mail: &mut Mail) -> Result<(), StoreError> {
        loop {
            let begun = Instant::now();
            match self.engine.turn(&mail.inputs, self.clock.now()) {
                Ok(turn) => {
                    self.measure(&turn, begun.elapsed());
                    let generation = self.engine.generation();
                    self.followers.turned(&turn, self.engine.now());
                    self.teller.turned(&mail.inputs, &turn, self.engine.snapshot());
                    for (reply, answer) in mail.replies.iter_mut().zip(turn.answers) {
                        if let Some(reply) = reply.take() {
                            let _ = reply.send(Ok(answer));
                        }
                    }
                    for durable in mail.durable.iter_mut().filter_map(Option::take) {
                        durable();
                    }
                    if turn.written {
                        self.generation.send_replace(generation);
                    }
                    // Last: nobody who asked waits for the body.
                    self.cluster.apply(&turn.orders);
                    return Ok(());
                }
                Err(error @ (StoreError::Fenced { .. } | StoreError::Newer { .. })) => {
                    refuse(mail, &error);
                    return Err(error);
                }
                Err(error) => {
                    self.meter.store_failed();
                    // What people asked is refused, so that they know; what was
                    // observed is kept and tried again: the world will not repeat it.
                    refuse(mail, &error);
                    let Some(orders) = self.reopen(mail)? else { return Ok(()) };
                    self.followers.reopened();
                    self.teller.all(self.engine.snapshot(), false);
                    self.cluster.apply(&orders);
                }
            }
        }
    }

    fn measure(&self, turn: &Turn, took: Duration) {
        if let Some(planned) = turn.planned {
            self.meter.planned(planned);
        }
        let jobs = &self.engine.snapshot().jobs;
        self.meter.turned(took, &turn.moments, &turn.ended, |id| jobs.get(&id));
    }

    /// Opens the store again until it works: the decisions of the failed turn are void. `None` if
    /// this is stopped before; the store then says to the next one what is true.
    ///
    /// Whoever asks meanwhile is told why nothing is done, and does not wait for it.
    fn reopen(&mut self, mail: &mut Mail) -> Result<Option<Vec<Stamped>>, StoreError> {
        loop {
            // Also before the first try: what failed a moment ago fails again.
            std::thread::sleep(REOPEN_PAUSE);
            let error = match self.engine.reopen(self.clock.now()) {
                Ok(orders) => return Ok(Some(orders)),
                Err(error @ (StoreError::Fenced { .. } | StoreError::Newer { .. })) => return Err(error),
                Err(error @ (StoreError::Full(_) | StoreError::Failed(_))) => error,
            };
            while let Ok(message) = self.receiver.try_recv() {
                mail.put(message);
            }
            refuse(mail, &error);
            for query in std::mem::take(&mut mail.queries) {
                query(Err(&error));
            }
            if mail.stop {
                return Ok(None);
            }
        }
    }
}

/// Tells those who asked that nothing was done, and forgets what they asked.
fn refuse(mail: &mut Mail, error: &StoreError) {
    let inputs = std::mem::take(&mut mail.inputs);
    let replies = std::mem::take(&mut mail.replies);
    let durable = std::mem::take(&mut mail.durable);
    for ((input, reply), durable) in inputs.into_iter().zip(replies).zip(durable) {
        match reply {
            Some(reply) => {
                let _ = reply.send(Err(error.clone()));
            }
            None => {
                mail.inputs.push(input);
                mail.replies.push(None);
                mail.durable.push(durable);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryStore;
    use crate::ports::{Batch, Known, Loaded, Observation};
    use aviflow_core::model::JobKey;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Idle;

    impl Cluster for Idle {
        fn apply(&mut self, _: &[Stamped]) {}
    }

    /// A store that can go away.
    struct Away(MemoryStore, Arc<AtomicBool>);

    impl Away {
        fn here(&mut self) -> Result<&mut MemoryStore, StoreError> {
            if self.1.load(Ordering::SeqCst) { Err(StoreError::Failed("it is away".into())) } else { Ok(&mut self.0) }
        }
    }

    impl Store for Away {
        fn acquire(&mut self) -> Result<Loaded, StoreError> {
            self.here()?.acquire()
        }
        fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
            self.here()?.commit(batch)
        }
        fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
            self.0.named(key)
        }
        fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
            self.0.latest(namespace, work, user)
        }
    }

    fn pause() -> Input {
        Input::Pause { on: true, by: "ada".into(), reason: None }
    }

    #[test]
    fn while_the_store_is_away_who_asks_is_told_and_what_was_seen_is_kept() {
        let (store, away) = (MemoryStore::new(), Arc::new(AtomicBool::new(false)));
        let (handle, thread) = Starter::default().start(Away(store.handle(), away.clone()), Idle, |_| {}).unwrap();
        away.store(true, Ordering::SeqCst);
        let (name, pool, gpu_type) = ("n".to_owned(), "p".into(), "H100".into());
        handle.observe(Observation::NodeSeen { name: name.clone(), pool, gpu_type, gpus: 8, path: Vec::new() }, None);
        // The first is refused by the turn, or by the attempt after it; the second by one of those that follow.
        for _ in 0..2 {
            let refused = handle.ask(pause()).unwrap_err().to_string();
            assert_eq!(refused, "the store failed: it is away");
        }
        let refused = handle.read(|_| ()).unwrap_err().to_string();
        assert_eq!(refused, "the store failed: it is away");
        away.store(false, Ordering::SeqCst);
        handle.ask(pause()).unwrap();
        let seen = handle.read(move |view| view.snapshot.nodes.values().any(|n| n.name == name)).unwrap();
        assert!(seen, "the observation was kept");
        handle.stop();
        thread.join().unwrap();
    }

    #[test]
    fn it_can_be_stopped_while_the_store_is_away() {
        let away = Arc::new(AtomicBool::new(false));
        let store = Away(MemoryStore::new(), away.clone());
        let (ended, end) = channel();
        let (handle, thread) = Starter::default().start(store, Idle, move |error| drop(ended.send(error))).unwrap();
        away.store(true, Ordering::SeqCst);
        assert!(handle.ask(pause()).is_err());
        handle.stop();
        assert_eq!(end.recv().unwrap(), None);
        thread.join().unwrap();
    }
}
