//! What every store must do, whatever it is made of.
//!
//! A store's own tests call [`check`] with a [`Harness`] around it.

mod documents;
pub mod server;
mod world;

use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Ending, Job, JobId, JobKey, Phase, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, Batch, Beyond, JobRecord, Known, Loaded, Store, StoreError};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::mpsc;
use std::thread;
pub use world::{Rng, World};

/// A store on durable state of its own, empty at first.
pub trait Harness {
    /// The store, as the control plane has it.
    fn store(&mut self) -> &mut dyn Store;
    /// Ends the process and opens the same durable state again.
    fn reopen(&mut self);
    /// A second control plane on the same durable state.
    fn rival(&self) -> Box<dyn Store + Send>;
    /// Takes away the space that a commit needs, or gives it back.
    fn starve(&mut self, on: bool);
    /// A job as it is kept, and when it ended.
    fn job(&self, id: JobId) -> Option<(Job, JobRecord, Option<Time>)>;
    /// The moments of a job.
    fn moments(&self, id: JobId) -> Vec<Moment>;
    /// What people did, newest first.
    fn acts(&self) -> Vec<Act>;
    /// The term under which the store is held, as one reads it who does not hold it.
    fn term(&self) -> Term;
}

/// Runs the whole suite; panics at the first thing that is wrong.
pub fn check(make: impl Fn() -> Box<dyn Harness>) {
    an_empty_store_loads_as_nothing(make().as_mut());
    an_earlier_term_is_fenced(make().as_mut());
    a_takeover_in_the_middle_loses_nothing(make().as_mut());
    a_gap_in_the_commits_is_refused(make().as_mut());
    a_name_is_taken_once_and_for_all(make().as_mut());
    a_name_means_the_latest(make().as_mut());
    documents_and_states_come_together(make().as_mut());
    a_commit_without_space_changes_nothing(make().as_mut());
    numbers_go_on_beyond_those_of_a_store_that_was_lost(make().as_mut());
    what_was_committed_is_read_again(&make);
}

fn take(harness: &mut dyn Harness) -> Loaded {
    harness.store().acquire().expect("the store can be taken")
}

fn an_empty_store_loads_as_nothing(harness: &mut dyn Harness) {
    let loaded = take(harness);
    assert_same(&loaded, &Loaded { term: Term(1), ..Loaded::default() });
    assert_eq!(take(harness).term, Term(2), "each holder has a term of its own");
}

fn an_earlier_term_is_fenced(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    let first = world.batch(&mut Rng(1));
    harness.store().commit(&first).expect("the holder commits");
    let mut rival = harness.rival();
    let loaded = rival.acquire().expect("a rival may take the store");
    world.model.term = Term(2);
    assert_same(&loaded, &world.model);
    assert_eq!(harness.term(), Term(2));
    let mut late = world.clone().batch(&mut Rng(2));
    late.term = Term(1);
    assert_eq!(harness.store().commit(&late), Err(StoreError::Fenced { ours: 1, held: 2, by: None }));
    let second = world.batch(&mut Rng(3));
    rival.commit(&second).expect("the rival commits");
    drop(rival);
    harness.reopen();
    world.model.term = Term(3);
    assert_same(&take(harness), &world.model);
}

/// What comes into a store as it was elsewhere: when jobs ended, and which numbers were handed out.
fn numbers_go_on_beyond_those_of_a_store_that_was_lost(harness: &mut dyn Harness) {
    let world = World::new(take(harness));
    let batches = (1..).map(|seed| world.clone().batch(&mut Rng(seed)));
    let has_ended = |batch: &Batch| batch.jobs.iter().any(|job| job.phase.is_terminal());
    let mut batch = { batches }.find(has_ended).expect("a job that has ended");
    let ended: Vec<JobId> = batch.jobs.iter().filter(|job| job.phase.is_terminal()).map(|job| job.id).collect();
    batch.ended = ended.iter().map(|id| (*id, Time(5))).collect();
    batch.beyond = Some(Beyond { term: 500, job: 10_000 });
    harness.store().commit(&batch).expect("the holder commits");
    for id in ended {
        assert_eq!(harness.job(id).expect("it is kept").2, Some(Time(5)));
    }
    let loaded = take(harness);
    assert_eq!((loaded.term, loaded.last_job, loaded.generation), (Term(501), 10_000, 1));
}

/// Two writers at once, one after the other in the role of who is taken over.
fn a_takeover_in_the_middle_loses_nothing(harness: &mut dyn Harness) {
    let mut holder = harness.rival();
    let mut world = World::new(holder.acquire().expect("the store can be taken"));
    for round in 0..8 {
        let mut next = harness.rival();
        let (acknowledged, seen) = mpsc::channel();
        let (loaded, after) = thread::scope(|scope| {
            let writer = scope.spawn(move || {
                loop {
                    // What was refused is in no store.
                    let mut after = world.clone();
                    match holder.commit(&after.batch(&mut Rng(after.model.generation))) {
                        Ok(()) => world = after,
                        Err(StoreError::Fenced { ours, held, .. }) => {
                            assert_eq!((ours, held), (world.model.term.0, world.model.term.0 + 1));
                            return world;
                        }
                        Err(other) => panic!("a commit beside a takeover gave {other}"),
                    }
                    // Nobody counts any more once there were enough.
                    let _ = acknowledged.send(());
                }
            });
            for _ in 0..round {
                seen.recv().expect("the holder commits");
            }
            let loaded = next.acquire().expect("another may take the store");
            (loaded, writer.join().expect("the writer was fenced"))
        });
        world = after;
        world.model.term.0 += 1;
        assert_same(&loaded, &world.model);
        holder = next;
    }
}

fn a_gap_in_the_commits_is_refused(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    let before = world.model.clone();
    let good = world.batch(&mut Rng(1));
    for wrong in [0, 2, 7] {
        let bad = Batch { generation: wrong, ..good.clone() };
        assert!(matches!(harness.store().commit(&bad), Err(StoreError::Failed(_))), "commit {wrong} after 0");
    }
    assert_same(&take(harness), &Loaded { term: Term(2), ..before });
    let good = Batch { term: Term(2), ..good };
    harness.store().commit(&good).expect("the next commit is taken");
    assert!(harness.store().commit(&good).is_err(), "and is taken once");
}

fn a_name_is_taken_once_and_for_all(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    let (job, batch) = world.submit(&mut Rng(1));
    assert_eq!(harness.store().name_taken(&job.key), Ok(false));
    harness.store().commit(&batch).expect("a submission is taken");
    assert_eq!(harness.store().name_taken(&job.key), Ok(true));
    let (other, mut batch) = world.clone().submit(&mut Rng(2));
    batch.jobs[0].key = job.key.clone();
    assert!(harness.store().commit(&batch).is_err(), "two jobs have the name {}", other.key.name);
    let ended = Job { phase: Phase::Succeeded, ..job.clone() };
    let batch = world.change(ended.clone());
    harness.store().commit(&batch).expect("a job may end");
    harness.reopen();
    let loaded = take(harness);
    assert!(loaded.snapshot.jobs.is_empty() && loaded.records.is_empty(), "an ended job is not live");
    assert_eq!(harness.store().name_taken(&job.key), Ok(true), "an ended job keeps its name");
    let (kept, record, at) = harness.job(job.id).expect("an ended job is kept");
    assert_eq!((kept, record.id, at), (ended, job.id, Some(batch.at)));
}

fn a_name_means_the_latest(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    let mut jobs = Vec::new();
    for (name, user) in [("gpt", "ada"), ("gpt-2", "grace"), ("gpt-3", "ada")] {
        let (mut job, mut batch) = world.submit(&mut Rng(1));
        job.key.name = name.into();
        job.user = user.into();
        let mut record = (*batch.records[0]).clone();
        (record.key, record.spec.name) = (job.key.clone(), "gpt".into());
        (batch.records, batch.jobs) = (vec![record.into()], vec![job.clone()]);
        harness.store().commit(&batch).expect("a submission is taken");
        jobs.push(job);
    }
    let known = |job: &Job, ended| Ok(Some(Known { id: job.id, key: job.key.clone(), ended }));
    let store = harness.store();
    assert_eq!(store.latest("default", "gpt", None), known(&jobs[2], None));
    assert_eq!(store.latest("default", "gpt", Some("grace")), known(&jobs[1], None));
    assert_eq!(store.latest("default", "gpt-2", None), Ok(None), "no document has this name");
    assert_eq!(store.latest("other", "gpt", None), Ok(None));
    let key = |name: &str| JobKey { namespace: "default".into(), name: name.into() };
    assert_eq!(store.named(&key("gpt-2")), known(&jobs[1], None));
    assert_eq!(store.named(&key("gpt-9")), Ok(None));
    // They end.
    let by = || "ada".to_owned();
    for (index, phase, ended) in
        [(0, Phase::Succeeded, Ending::Succeeded), (2, Phase::Cancelled { by: by() }, Ending::Failed)]
    {
        let batch = world.change(Job { phase, ..jobs[index].clone() });
        harness.store().commit(&batch).expect("a job may end");
        assert_eq!(harness.store().named(&jobs[index].key), known(&jobs[index], Some(ended)));
    }
    assert_eq!(harness.store().latest("default", "gpt", None), known(&jobs[2], Some(Ending::Failed)));
}

fn documents_and_states_come_together(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    let (job, batch) = world.submit(&mut Rng(1));
    let alone = Batch { jobs: Vec::new(), ..batch.clone() };
    assert!(harness.store().commit(&alone).is_err(), "a document without a state");
    let alone = Batch { records: Vec::new(), ..batch.clone() };
    assert!(harness.store().commit(&alone).is_err(), "a state without a document");
    assert_eq!(harness.store().name_taken(&job.key), Ok(false), "nothing of it was written");
    harness.store().commit(&batch).expect("both together are taken");
}

fn a_commit_without_space_changes_nothing(harness: &mut dyn Harness) {
    let mut world = World::new(take(harness));
    for seed in 0..20 {
        let batch = world.batch(&mut Rng(seed));
        harness.store().commit(&batch).expect("there is space");
    }
    harness.starve(true);
    let mut big = world.clone().batch(&mut Rng(99));
    // Names of new jobs and states of old ones come first, and the end of it does not fit.
    big.journal.extend((0..500).map(|i| format!("{i} {}", "x".repeat(2000))));
    let refused = harness.store().commit(&big);
    assert!(matches!(refused, Err(StoreError::Full(_))), "a commit without space gave {refused:?}");
    harness.starve(false);
    let batch = world.batch(&mut Rng(7));
    harness.store().commit(&batch).expect("the store is usable afterwards");
    harness.reopen();
    world.model.term = Term(2);
    assert_same(&take(harness), &world.model);
}

fn what_was_committed_is_read_again(make: &impl Fn() -> Box<dyn Harness>) {
    let mut runner = TestRunner::new(Config { cases: 32, failure_persistence: None, ..Config::default() });
    let turns = prop::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..25);
    let outcome = runner.run(&turns, |turns| {
        let mut harness = make();
        let mut world = World::new(take(harness.as_mut()));
        for (seed, crash) in turns {
            let batch = world.batch(&mut Rng(seed));
            harness.store().commit(&batch).expect("a good batch is taken");
            if crash {
                harness.reopen();
                world.model.term.0 += 1;
                assert_same(&take(harness.as_mut()), &world.model);
            }
        }
        for (id, (job, record, ended)) in &world.all {
            let (kept, document, at) = harness.job(*id).expect("a job is kept");
            prop_assert_eq!((&kept, &document, at), (job, record.as_ref(), *ended));
            let moments: Vec<Moment> = world.moments.iter().filter(|m| m.job == *id).cloned().collect();
            prop_assert_eq!(harness.moments(*id), moments);
        }
        let acts: Vec<Act> = world.acts.iter().rev().cloned().collect();
        prop_assert_eq!(harness.acts(), acts);
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
}

/// [`Loaded`] has no equality of its own; this names the part that differs.
#[track_caller]
pub fn assert_same(found: &Loaded, expected: &Loaded) {
    let numbers = |l: &Loaded| (l.term, l.generation, l.clock, l.last_job, l.last_node, l.last_drain);
    assert_eq!(numbers(found), numbers(expected), "term, generation, clock, last job, last node, last drain");
    assert_eq!(found.snapshot, expected.snapshot, "snapshot");
    assert_eq!(found.records, expected.records, "records");
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_engine::memory::MemoryStore;

    struct Memory(MemoryStore);

    impl Harness for Memory {
        fn store(&mut self) -> &mut dyn Store {
            &mut self.0
        }
        fn reopen(&mut self) {
            self.0 = self.0.clone();
        }
        fn rival(&self) -> Box<dyn Store + Send> {
            Box::new(self.0.handle())
        }
        fn starve(&mut self, on: bool) {
            self.0.refuse(on.then(|| StoreError::Full("no space".into())));
        }
        fn job(&self, id: JobId) -> Option<(Job, JobRecord, Option<Time>)> {
            let (job, record) = self.0.job(id)?;
            Some((job, record.as_ref().clone(), self.0.ended(id)))
        }
        fn moments(&self, id: JobId) -> Vec<Moment> {
            self.0.moments(id)
        }
        fn acts(&self) -> Vec<Act> {
            self.0.acts()
        }
        fn term(&self) -> Term {
            self.0.term()
        }
    }

    #[test]
    fn the_store_in_memory_keeps_the_contract() {
        check(|| Box::new(Memory(MemoryStore::new())));
    }

    #[test]
    fn a_clone_goes_its_own_way() {
        let mut store = MemoryStore::new();
        let mut world = World::new(store.acquire().unwrap());
        store.commit(&world.batch(&mut Rng(1))).unwrap();
        let mut before = world.clone();
        let mut copy = store.clone();
        store.commit(&world.batch(&mut Rng(2))).unwrap();
        before.model.term = Term(2);
        assert_same(&copy.acquire().unwrap(), &before.model);
        world.model.term = Term(2);
        assert_same(&store.acquire().unwrap(), &world.model);
    }
}
