//! The engine on a virtual clock, with a cluster and a control plane that fail.
//!
//! A history is a [`Script`]: what people do, what breaks, and at which write
//! the control plane dies. Everything else follows from its seed by hashing
//! names, never by drawing in sequence, so that a script with an item removed
//! still tells the same story: that is how a failing history is made minimal.
//!
//! After every turn the invariants of [`aviflow_core::lint`] and those of
//! [`check`](self::check) must hold; at the end every job must have ended, and
//! the world must agree with what the store says of it.

mod check;
mod generate;
mod labels;
mod people;
#[cfg(test)]
pub(crate) mod planted;
mod script;
mod shrink;
mod store;
mod world;

pub use script::{Fault, FaultAt, Item, JobScript, Outcome, QueueScript, Script, Step, Write};
pub use shrink::minimal;

use crate::engine::{Answer, Audit, Engine, Input};
use crate::ports::StoreError;
use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};
use store::{SimStore, WriteEnd};
use world::{Said, World};

/// Why a history is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The virtual time.
    pub at: Time,
    /// What is wrong.
    pub what: Vec<String>,
}

/// What a history covered: for each kind of transition and each fault at its write, how often.
pub type Coverage = BTreeMap<(String, String), u32>;

/// What a history was like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Turns taken.
    pub turns: u64,
    /// Times that the control plane died.
    pub crashes: u32,
    /// Transitions with faults.
    pub coverage: Coverage,
    /// How jobs ended, by phase.
    pub ended: BTreeMap<String, u32>,
    /// Plans that decided again on their own result.
    pub restless: Vec<String>,
    /// Observations that were delivered twice or out of order.
    pub disturbed: u32,
}

/// A good hash for small keys (splitmix64), so that every choice is a function of the seed and names.
pub(crate) fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9E37_79B9_7F4A_7C15, |state, part| {
        let mut z = (state ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// Runs the history of a seed.
///
/// # Errors
/// The first violation.
pub fn run(seed: u64) -> Result<Stats, Violation> {
    replay(&Script::generate(seed))
}

/// Runs a script.
///
/// # Errors
/// The first violation.
pub fn replay(script: &Script) -> Result<Stats, Violation> {
    Sim::new(script, Setup::default()).run()
}

/// What a test changes about the engine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setup {
    #[cfg(test)]
    pub(crate) bug: Option<planted::Bug>,
}

/// Virtual time after which a history that has not come to an end is stuck.
const HORIZON: Span = Span(14 * 86_400_000);

/// Where virtual time begins.
const BEGIN: Time = Time(1_000_000);

struct Sim<'a> {
    script: &'a Script,
    #[cfg(test)]
    setup: Setup,
    world: World,
    store: SimStore,
    engine: Option<Engine<SimStore>>,
    checker: check::Checker,
    stats: Stats,
    /// Jobs by the name of their script, once they were acknowledged.
    acknowledged: BTreeMap<String, JobId>,
    /// Jobs that were refused, since the pool could never hold them.
    refused: BTreeSet<String>,
    /// Phases in which the next job seen is cancelled.
    cancel_when: Vec<String>,
}

impl<'a> Sim<'a> {
    fn new(script: &'a Script, setup: Setup) -> Sim<'a> {
        #[cfg(not(test))]
        let Setup {} = setup;
        let store = SimStore::new(script.faults());
        Sim {
            script,
            #[cfg(test)]
            setup,
            world: World::new(script, BEGIN),
            store,
            engine: None,
            checker: check::Checker::default(),
            stats: Stats::default(),
            acknowledged: BTreeMap::new(),
            refused: BTreeSet::new(),
            cancel_when: script.cancel_when(),
        }
    }

    fn run(mut self) -> Result<Stats, Violation> {
        self.open()?;
        while let Some(next) = self.next_time() {
            if next > BEGIN + HORIZON {
                return Err(self.wrong(vec![format!("the history does not end: {}", self.unfinished())]));
            }
            self.world.now = self.world.now.max(next);
            self.instant()?;
        }
        self.end()
    }

    /// The next time at which something happens: in the world, or by the engine's own clock.
    fn next_time(&self) -> Option<Time> {
        let wake = self.engine.as_ref().and_then(Engine::next_wake).map(|t| t - self.world.skew);
        [self.world.next(), wake].into_iter().flatten().min()
    }

    /// Everything that happens at one instant, and the turn that follows.
    fn instant(&mut self) -> Result<(), Violation> {
        let happened = self.world.happen();
        if happened.restart && self.engine.is_none() {
            self.open()?;
        }
        for index in happened.items {
            self.item(index)?;
        }
        if self.engine.is_none() {
            return self.world_is_right();
        }
        let inputs: Vec<Input> = happened.observations.iter().map(|o| Input::Observe(o.observation.clone())).collect();
        let due = self.engine.as_ref().and_then(Engine::next_wake).is_some_and(|t| t <= self.world.wall());
        if (!inputs.is_empty() || due) && self.turn(&inputs)?.is_some() {
            let mut said = Said::default();
            for o in &happened.observations {
                self.world.acknowledge(o);
                said.hear(&o.observation);
            }
            let snapshot = self.engine.as_ref().map(Engine::snapshot);
            let what = snapshot.map(|s| World::believed(&said, s)).unwrap_or_default();
            if !what.is_empty() {
                return Err(self.wrong(what));
            }
        }
        self.cancel_what_is_seen()?;
        self.world_is_right()
    }

    fn cancel_what_is_seen(&mut self) -> Result<(), Violation> {
        for index in (0..self.cancel_when.len()).rev() {
            if self.engine.is_some()
                && let Some(job) = self.store.first_in(&self.cancel_when[index])
            {
                self.cancel_when.remove(index);
                self.turn(&[Input::Cancel { job, by: "ann".to_owned() }])?;
            }
        }
        Ok(())
    }

    /// Something that a person does.
    fn item(&mut self, index: usize) -> Result<(), Violation> {
        let Some(item) = self.world.item(index) else { return Ok(()) };
        if let Item::Clear = item {
            return self.clear(index);
        }
        let Some(input) = people::input(&item, self) else { return Ok(()) };
        if self.engine.is_none() {
            // Nobody answers; a person tries again later.
            self.world.later(index);
            return Ok(());
        }
        let answers = self.turn(&[input])?;
        match answers.as_ref().and_then(|a| a.first()) {
            None => self.world.later(index),
            Some(Answer::Submitted(record)) => {
                if let Item::Submit(job) = &item {
                    self.acknowledged.insert(job.name.clone(), record.id);
                    self.checker.acknowledged(record.id);
                }
            }
            Some(Answer::Refused(_)) => {
                if let Item::Submit(job) = &item {
                    self.refused.insert(job.name.clone());
                }
            }
            Some(Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. }) => {}
        }
        Ok(())
    }

    /// Cancels jobs that can never start.
    fn clear(&mut self, index: usize) -> Result<(), Violation> {
        let Some(engine) = &self.engine else {
            self.world.later(index);
            return Ok(());
        };
        let cancel = |job| Input::Cancel { job, by: people::ops() };
        let inputs: Vec<Input> = people::hopeless(engine).into_iter().map(cancel).collect();
        if !inputs.is_empty() && self.turn(&inputs)?.is_none() {
            self.world.later(index);
        } else if !self.store.loaded().snapshot.jobs.is_empty() {
            // Those that still run may leave others without hope.
            self.world.again(index, Span::minutes(30));
        }
        Ok(())
    }

    /// A turn of the engine; `None` if nobody answered, whether it became durable or not.
    fn turn(&mut self, inputs: &[Input]) -> Result<Option<Vec<Answer>>, Violation> {
        let wall = self.world.wall();
        let Some(engine) = self.engine.as_mut() else { return Ok(None) };
        self.stats.turns += 1;
        let result = engine.turn(inputs, wall);
        let end = self.store.end_of_write();
        self.count(&end);
        match (result, end.fault) {
            (Ok(turn), None | Some(Fault::StoreFull)) => {
                self.world.apply(&turn.orders);
                self.engine_is_right()?;
                Ok(Some(turn.answers))
            }
            (Ok(turn), Some(Fault::CrashAfter { orders })) => {
                // The commit is durable; of the orders only the first came out.
                let some = turn.orders.len().min(orders as usize);
                self.world.apply(&turn.orders[..some]);
                self.crash();
                Ok(None)
            }
            (Err(StoreError::Full(_)), Some(Fault::StoreFull)) => {
                // As the driver does: nothing of the turn happened; open again, and
                // take the observations again (they are not acknowledged).
                self.reopen()?;
                Ok(None)
            }
            (_, Some(Fault::CrashBefore | Fault::CrashAfter { .. })) => {
                self.crash();
                Ok(None)
            }
            (Err(error), _) => Err(self.wrong(vec![format!("a turn failed: {error}")])),
        }
    }

    fn count(&mut self, end: &WriteEnd) {
        let fault = end.fault.map_or("none", |f| f.name());
        for transition in &end.transitions {
            *self.stats.coverage.entry((transition.clone(), fault.to_owned())).or_default() += 1;
        }
    }

    fn crash(&mut self) {
        self.engine = None;
        self.stats.crashes += 1;
        self.world.control_plane_died(self.stats.crashes);
    }

    fn open(&mut self) -> Result<(), Violation> {
        self.world.step_clock();
        match Engine::open(self.store.clone(), self.world.wall()) {
            Ok((engine, orders)) => self.opened(engine, &orders),
            Err(error) => Err(self.wrong(vec![format!("the store cannot be opened: {error}")])),
        }
    }

    fn opened(&mut self, mut engine: Engine<SimStore>, orders: &[crate::ports::Stamped]) -> Result<(), Violation> {
        engine.audit = Some(Audit::default());
        #[cfg(test)]
        engine.plant(planted::Planted(self.setup.bug));
        let orders = orders.to_vec();
        #[cfg(test)]
        let orders = engine.planted.recovery(orders);
        self.engine = Some(engine);
        self.world.control_plane_is_up();
        self.checker.opened();
        self.world.apply(&orders);
        self.engine_is_right()
    }

    fn reopen(&mut self) -> Result<(), Violation> {
        self.engine = None;
        self.world.control_plane_died(self.stats.crashes);
        self.open()
    }

    fn engine_is_right(&mut self) -> Result<(), Violation> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let audited = engine.audit.as_mut().map(|a| std::mem::take(&mut a.wrong)).unwrap_or_default();
        let mut what = aviflow_core::lint::lint(engine.snapshot());
        what.extend(self.checker.after_turn(engine, &self.store));
        what.extend(self.world.keeps(engine.snapshot()));
        what.extend(audited);
        if what.is_empty() { Ok(()) } else { Err(self.wrong(what)) }
    }

    fn world_is_right(&mut self) -> Result<(), Violation> {
        let what = std::mem::take(&mut self.world.wrong);
        if what.is_empty() { Ok(()) } else { Err(self.wrong(what)) }
    }

    fn unfinished(&self) -> String {
        let live = self.store.loaded().snapshot.jobs;
        let say = |j: &aviflow_core::model::Job| format!("{} is {}", j.key.name, j.phase.name());
        live.values().map(say).collect::<Vec<_>>().join(", ")
    }

    fn end(mut self) -> Result<Stats, Violation> {
        let mut what = self.checker.at_end(&self.store, &self.world, self.script.steady_clock());
        let waiting: BTreeSet<&str> = self.script.jobs().map(|j| j.name.as_str()).collect();
        for name in waiting {
            if !self.acknowledged.contains_key(name) && !self.refused.contains(name) {
                what.push(format!("job {name} was never acknowledged"));
            }
        }
        what.extend(self.world.leftovers());
        for (_, job) in self.store.ended() {
            *self.stats.ended.entry(job.phase.name().to_owned()).or_default() += 1;
        }
        self.stats.restless = std::mem::take(&mut self.checker.restless);
        self.stats.disturbed = self.world.disturbed;
        if what.is_empty() { Ok(self.stats) } else { Err(self.wrong(what)) }
    }

    fn wrong(&self, what: Vec<String>) -> Violation {
        Violation { at: self.world.now, what }
    }
}

#[cfg(test)]
mod tests;
