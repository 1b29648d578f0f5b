//! The thread around the engine: it waits for inputs, takes turns, answers
//! those who asked once the answer is durable, and hands orders to the cluster.

use crate::engine::{Answer, Engine, Input, Submission};
use crate::ports::{Cluster, JobRecord, Stamped, Store, StoreError};
use aviflow_core::model::{JobId, Snapshot, Term};
use aviflow_core::schedule::Plan;
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Inputs taken in one turn at most, so that a flood still commits in steps.
const TURN_INPUTS: usize = 1024;

/// The pause before a store that failed is opened again.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

type Query = Box<dyn FnOnce(&View<'_>) + Send>;

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
    /// If the engine has stopped.
    pub fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&View<'_>) -> T + Send + 'static,
    ) -> Result<T, HandleError> {
        let (reply, answer) = channel();
        let query = Box::new(move |view: &View<'_>| {
            let _ = reply.send(read(view));
        });
        self.sender.send(Message::Query(query)).map_err(|_| HandleError::Stopped)?;
        answer.recv().map_err(|_| HandleError::Stopped)
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
}

impl Default for Starter {
    fn default() -> Starter {
        let (sender, receiver) = channel();
        let (generation, changed) = watch::channel(0);
        Starter { handle: Handle { sender, changed }, receiver, generation }
    }
}

impl Starter {
    /// The handle of the engine to come, for the cluster that it needs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
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
        let (engine, orders) = Engine::open(store, wall_clock())?;
        cluster.apply(&orders);
        let clock = Clock::starting_at(engine.now());
        let driver = Driver { engine, cluster, receiver: self.receiver, generation: self.generation, clock };
        let spawn = std::thread::Builder::new().name("engine".to_owned());
        let thread = spawn
            .spawn(move || on_end(driver.run()))
            .map_err(|e| StoreError::Failed(format!("the engine's thread could not be started: {e}")))?;
        Ok((self.handle, thread))
    }
}

struct Driver<S, C> {
    engine: Engine<S>,
    cluster: C,
    receiver: Receiver<Message>,
    generation: watch::Sender<u64>,
    clock: Clock,
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
            let mail = self.collect();
            let stop = mail.stop;
            if let Err(error) = self.serve(mail) {
                return Some(error);
            }
            if stop {
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
            let Ok(message) = self.receiver.try_recv() else { break };
            mail.put(message);
        }
        mail
    }

    fn serve(&mut self, mut mail: Mail) -> Result<(), StoreError> {
        // A query alone changes nothing; only inputs and deadlines are worth a turn.
        let due = self.engine.next_wake().is_some_and(|t| t <= self.clock.now());
        if due || !mail.inputs.is_empty() {
            self.turn(&mut mail)?;
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
        for query in mail.queries {
            query(&view);
        }
        Ok(())
    }

    fn turn(&mut self, mail: &mut Mail) -> Result<(), StoreError> {
        loop {
            match self.engine.turn(&mail.inputs, self.clock.now()) {
                Ok(turn) => {
                    let generation = self.engine.generation();
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
                    // What people asked is refused, so that they know; what was
                    // observed is kept and tried again: the world will not repeat it.
                    refuse(mail, &error);
                    let orders = self.reopen()?;
                    self.cluster.apply(&orders);
                }
            }
        }
    }

    /// Opens the store again until it works: the decisions of the failed turn are void.
    fn reopen(&mut self) -> Result<Vec<Stamped>, StoreError> {
        loop {
            // Also before the first try: what failed a moment ago fails again.
            std::thread::sleep(REOPEN_PAUSE);
            match self.engine.reopen(self.clock.now()) {
                Ok(orders) => return Ok(orders),
                Err(error @ (StoreError::Fenced { .. } | StoreError::Newer { .. })) => return Err(error),
                Err(StoreError::Full(_) | StoreError::Failed(_)) => {}
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
