//! Objects become jobs, and jobs have objects.
//!
//! A TrainingJob that somebody applies is submitted once, whatever crashes; deleting it is a graceful stop. A job that
//! came through the API gets its object. The state belongs to the store; the object's status shows it.
//!
//! A status is written some time after its job has changed, as it is then: so a job that comes, runs and ends at once
//! costs one write or two, and where the apiserver is slow, fewer. Nothing is looked at that did not change, but for
//! the words with which jobs wait, which are few and looked at seldom.
//!
//! Invariants: an object is submitted only after it carries the finalizer, so that no job is left without one; the
//! finalizer goes only when nothing of the job runs any more. A job whose object may not show its last state is due,
//! or its object is being written and becomes due after that.

mod due;
mod jobs;
mod requests;
mod seen;
mod status;

pub use jobs::{Applied, Ended, Jobs, NotTaken, Submitting};
pub use requests::ensure;

use crate::api::{Refused, insist, persist, watch};
use crate::events::{self, Regarding, Tell};
use crate::object;
use aviflow_api::crd::TrainingJobStatus;
use aviflow_core::model::{Job, JobId, JobKey};
use aviflow_core::time::Time;
use aviflow_engine::driver::{Changes, Handle};
use aviflow_engine::engine::Input;
use due::Due;
use futures_util::StreamExt;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use requests::{Write, mark, version, write_status};
use seen::Seen;
use serde::Deserialize;
use serde_json::json;
use status::{Shown, Written};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// How long after a change its status is written: what follows at once is in the same write.
const SETTLE: Duration = Duration::from_millis(300);
/// How often a status is written of which only words and figures changed.
const WORDS: Duration = Duration::from_secs(20);
/// Objects that are written each time when only the words changed with which their jobs wait, of all that are.
const WORDS_AT_ONCE: usize = 200;
/// Statuses that are written at a time.
const WRITES: usize = 16;
/// The pause before an object that was refused is submitted again: its queue may have been made since. It doubles with
/// each time.
const AGAIN: Duration = Duration::from_secs(20);
/// The longest.
const AT_LAST: Duration = Duration::from_secs(160);

/// What is known of an object. It is little, as there may be tens of thousands.
#[derive(Clone, Debug)]
struct Known {
    uid: String,
    /// Its version as it was seen or written last. What the watch tells of earlier ones is old.
    version: u64,
    job: Option<JobId>,
    deleting: bool,
    /// The generation of the spec.
    generation: Option<i64>,
    /// The status as it is.
    status: Written,
    /// The words that it waits with, as [`seen::words`] has them.
    words: u64,
    written: Option<Instant>,
    /// When it was refused last, and how often it was.
    refused: Option<(Instant, u32)>,
}

/// Namespace and name.
type Name = (String, String);

/// Keeps objects and jobs alike until it is dropped.
pub struct Mirror {
    client: Client,
    engine: Handle,
    jobs: Arc<dyn Jobs>,
    /// The queue of an object that names none.
    default_queue: String,
    objects: BTreeMap<Name, Known>,
    by_job: BTreeMap<JobId, Name>,
    listed: bool,
    /// Jobs whose objects may not show their state.
    due: Due,
    /// Jobs that ended, and of which that is not written.
    ended: BTreeMap<JobId, (Job, Time)>,
    /// Statuses that are being written.
    writing: usize,
    writes: Arc<Semaphore>,
    /// Objects that are being written, and are left alone until that is done.
    busy: BTreeSet<Name>,
    done: tokio::sync::mpsc::UnboundedSender<Done>,
    /// Who writes Events.
    events: tokio::sync::mpsc::UnboundedSender<Tell>,
}

/// What a task of the mirror's brings back.
enum Done {
    /// A status was written, and the object has this version; none where it could not be.
    Shown(Name, Option<u64>),
    /// The object of a job was made, or could not be.
    Made(Name, JobId, bool),
    Written(Name),
    Submitted(Name, Result<(JobId, JobKey), NotTaken>),
}

impl Mirror {
    /// Runs until the task is aborted.
    pub async fn run(client: Client, engine: Handle, jobs: Arc<dyn Jobs>, default_queue: String) {
        let (done, mut finished) = tokio::sync::mpsc::unbounded_channel();
        let (events, tells) = tokio::sync::mpsc::unbounded_channel();
        let events_of = events::write(client.clone(), jobs.clone(), tells);
        let mut mirror = Mirror {
            client: client.clone(),
            engine: engine.clone(),
            jobs,
            default_queue,
            objects: BTreeMap::new(),
            by_job: BTreeMap::new(),
            listed: false,
            due: Due::default(),
            ended: BTreeMap::new(),
            writing: 0,
            writes: Arc::new(Semaphore::new(WRITES)),
            busy: BTreeSet::new(),
            done,
            events,
        };
        // It ends with the mirror, which alone tells it what to write.
        tokio::spawn(events_of);
        let api = Api::<DynamicObject>::all_with(client, &object::resource());
        let mut events = watch(api, None);
        let mut follower = engine.follow();
        let mut list = BTreeSet::new();
        let mut again = tokio::time::interval(AGAIN);
        loop {
            let wake = mirror.due.first().filter(|_| mirror.listed && mirror.writing < WRITES);
            tokio::select! {
                Some(event) = events.next() => {
                    if mirror.event(event, &mut list) {
                        mirror.look_at_all().await;
                    }
                }
                Some(done) = finished.recv() => mirror.finish(done),
                true = follower.changed() => {
                    if mirror.changed(follower.take()) {
                        mirror.look_at_all().await;
                    }
                }
                _ = again.tick() => {
                    mirror.retry();
                    mirror.look_at_words().await;
                }
                () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                    mirror.write_due().await;
                }
            }
        }
    }

    /// Takes what the watch says; whether all objects were listed by now.
    fn event(&mut self, event: watcher::Result<Event<DynamicObject>>, list: &mut BTreeSet<Name>) -> bool {
        match event {
            Ok(Event::Init) => list.clear(),
            Ok(Event::InitApply(object)) => {
                list.extend(name_of(&object));
                self.seen(object);
            }
            Ok(Event::InitDone) => {
                let gone: Vec<Name> = self.objects.keys().filter(|n| !list.contains(*n)).cloned().collect();
                for name in gone {
                    self.deleted(&name);
                }
                list.clear();
                self.listed = true;
                return true;
            }
            Ok(Event::Apply(object)) => self.seen(object),
            Ok(Event::Delete(object)) => {
                if let Some(name) = name_of(&object) {
                    self.deleted(&name);
                }
            }
            // The watch begins again by itself, after a pause.
            Err(_) => {}
        }
        false
    }

    fn seen(&mut self, object: DynamicObject) {
        let (Some(name), Some(uid)) = (name_of(&object), object.metadata.uid.clone()) else { return };
        let version = version(object.metadata.resource_version.as_deref());
        let before = self.objects.get(&name).filter(|k| k.uid == uid);
        let (deleting, generation) = (object.metadata.deletion_timestamp.is_some(), object.metadata.generation);
        // An answer to a write may be here before the watch tells of it, and of what was before it.
        let same = |k: &Known| (k.version, k.deleting, k.generation) == (version, deleting, generation);
        if before.is_some_and(|k| version > 0 && (k.version > version || same(k))) {
            return;
        }
        let status = object.data.get("status").and_then(|s| TrainingJobStatus::deserialize(s).ok());
        let status = status.unwrap_or_default();
        let job = object::made_for(&object).or(status.job_id).map(JobId);
        // What is being written replaces whatever was seen before.
        let shown = match before {
            Some(before) if self.busy.contains(&name) => before.status.clone(),
            _ => Written::of(&status),
        };
        let known = Known {
            uid,
            version,
            job: job.or(before.and_then(|k| k.job)),
            deleting,
            generation,
            status: shown,
            words: before.map(|k| k.words).unwrap_or_default(),
            written: before.and_then(|k| k.written),
            refused: before.and_then(|k| k.refused),
        };
        let other = before.is_none_or(|k| k.status != known.status || k.generation != known.generation);
        if let Some(job) = known.job {
            self.by_job.insert(job, name.clone());
            if other && !known.status.is_over() {
                self.due.at(job, Instant::now() + SETTLE);
            }
        }
        let (submit, again) = (known.job.is_none() && !deleting, known.refused.is_some());
        self.objects.insert(name.clone(), known);
        if submit && !again {
            self.submit(name, object);
        } else if deleting {
            self.end(&name);
        }
    }

    /// An object that is gone: with it the intent.
    fn deleted(&mut self, name: &Name) {
        let Some(known) = self.objects.remove(name) else { return };
        self.busy.remove(name);
        if let Some(job) = known.job {
            self.by_job.remove(&job);
            if !known.status.is_over() {
                self.cancel(job);
            }
            let _ = self.events.send(Tell::Forget(job));
        }
    }

    fn cancel(&self, job: JobId) {
        let engine = self.engine.clone();
        tokio::task::spawn_blocking(move || {
            let by = "the deletion of its object".to_owned();
            // One that has ended already is no error.
            let _ = engine.ask(Input::Cancel { job, by });
        });
    }

    /// An object that is being deleted: its job is stopped, and then it may go.
    fn end(&mut self, name: &Name) {
        let Some(known) = self.objects.get(name) else { return };
        match known.job.filter(|_| !known.status.is_over()) {
            None => self.release(name),
            Some(job) => {
                self.cancel(job);
                // It may have ended long ago, and nothing be heard of it any more.
                self.due.at(job, Instant::now() + SETTLE);
            }
        }
    }

    /// Lets an object go of which nothing runs.
    fn release(&mut self, name: &Name) {
        if !self.busy.insert(name.clone()) {
            // Once that is done.
            let job = self.objects.get(name).and_then(|k| k.job);
            job.into_iter().for_each(|job| self.due.at(job, Instant::now() + SETTLE));
            return;
        }
        let (api, writes, done, name) = (self.api(&name.0), self.writes.clone(), self.done.clone(), name.clone());
        tokio::spawn(async move {
            let _turn = writes.acquire().await;
            let finalizers = json!({"metadata": {"finalizers": null}});
            let (how, patch) = (PatchParams::default(), Patch::Merge(&finalizers));
            // What is refused for good is an object that is gone.
            let _ = insist(|| async { api.patch(&name.1, &how, &patch).await.map(|_| ()) }).await;
            let _ = done.send(Done::Written(name));
        });
    }

    fn api(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &object::resource())
    }

    fn submit(&mut self, name: Name, object: DynamicObject) {
        if !self.busy.insert(name.clone()) {
            return;
        }
        let (api, jobs, done) = (self.api(&name.0), self.jobs.clone(), self.done.clone());
        let (queue, writes) = (self.default_queue.clone(), self.writes.clone());
        tokio::spawn(async move {
            let answer = match mark(&api, &object, &writes).await {
                Err(Refused { message, .. }) => {
                    Err(NotTaken::refused(format!("its finalizer could not be set: {message}")))
                }
                Ok(()) => jobs::submit(&*jobs, &name.0, object, &queue).await,
            };
            let _ = done.send(Done::Submitted(name, answer));
        });
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Written(name) => {
                self.busy.remove(&name);
            }
            Done::Shown(name, version) => {
                self.busy.remove(&name);
                self.writing -= 1;
                if let Some(known) = self.objects.get_mut(&name) {
                    known.version = known.version.max(version.unwrap_or_default());
                }
            }
            Done::Made(name, job, made) => {
                self.busy.remove(&name);
                if !made {
                    self.due.at(job, Instant::now() + AGAIN);
                }
            }
            Done::Submitted(name, answer) => {
                self.busy.remove(&name);
                let Some(known) = self.objects.get_mut(&name) else {
                    if let Ok((job, _)) = answer {
                        self.cancel(job);
                    }
                    return;
                };
                match answer {
                    Ok((job, _)) => {
                        known.job = Some(job);
                        known.refused = None;
                        let _ = self.events.send(Tell::Changed(job, regarding(&name, known)));
                        self.by_job.insert(job, name);
                        self.due.at(job, Instant::now() + SETTLE);
                    }
                    Err(NotTaken { reason, message }) => {
                        let times = known.refused.map_or(0, |(_, times)| times);
                        known.refused = Some((Instant::now(), times.saturating_add(1)));
                        let status = known.status.refused(known.generation, &reason, &message);
                        let written = Written::of(&status);
                        // It is tried again and again, and told once.
                        if known.status != written {
                            let _ = self.events.send(Tell::NotTaken(regarding(&name, known), reason, message));
                        }
                        self.write(&name, status, written);
                    }
                }
            }
        }
    }

    /// Writes a status, if it is new, to an object that is not being written.
    fn write(&mut self, name: &Name, status: TrainingJobStatus, written: Written) {
        let Some(known) = self.objects.get_mut(name) else { return };
        if known.status == written {
            return;
        }
        let write = Write { status, first: known.status.is_nothing().then_some(known.version) };
        known.status = written;
        known.written = Some(Instant::now());
        self.busy.insert(name.clone());
        self.writing += 1;
        let (client, writes, done) = (self.client.clone(), self.writes.clone(), self.done.clone());
        let name = name.clone();
        tokio::spawn(async move {
            let _turn = writes.acquire().await;
            // What is refused for good is an object that is gone.
            let version = write_status(&client, &name, &write).await.ok();
            let _ = done.send(Done::Shown(name, version));
        });
    }

    /// Looks again at objects that were refused: what was missing may be there.
    fn retry(&mut self) {
        // At the look nearest to the end of its pause.
        let due = |(at, times): (Instant, u32)| {
            at.elapsed() + AGAIN / 2 >= (AGAIN * (1 << times.saturating_sub(1).min(8))).min(AT_LAST)
        };
        let refused = |k: &Known| k.refused.is_some_and(due) && k.job.is_none() && !k.deleting;
        let names: Vec<Name> = self.objects.iter().filter(|(_, k)| refused(k)).map(|(n, _)| n.clone()).collect();
        for name in names {
            let (api, done, jobs) = (self.api(&name.0), self.done.clone(), self.jobs.clone());
            let queue = self.default_queue.clone();
            if !self.busy.insert(name.clone()) {
                continue;
            }
            tokio::spawn(async move {
                let answer = match persist(|| async { api.get(&name.1).await }).await {
                    Err(refused) => Err(NotTaken::refused(refused.message)),
                    Ok(object) => jobs::submit(&*jobs, &name.0, object, &queue).await,
                };
                let _ = done.send(Done::Submitted(name, answer));
            });
        }
    }

    /// Takes what changed; whether that may be anything.
    fn changed(&mut self, changes: Changes) -> bool {
        let Changes { all, live, ended } = changes;
        let at = Instant::now() + SETTLE;
        for job in live.into_iter().chain(ended.keys().copied()) {
            self.due.at(job, at);
        }
        self.ended.extend(ended);
        all
    }

    /// Every job that lives, and every object that does not say that its job has ended, is to be looked at.
    async fn look_at_all(&mut self) {
        let engine = self.engine.clone();
        let read = move || engine.read(|view| view.snapshot.jobs.keys().copied().collect::<Vec<_>>());
        let Ok(Ok(live)) = tokio::task::spawn_blocking(read).await else { return };
        let shown = self.objects.values().filter(|k| !k.status.is_over() || k.deleting).filter_map(|k| k.job);
        let now = Instant::now();
        let all: BTreeSet<JobId> = live.into_iter().chain(shown).collect();
        all.into_iter().for_each(|job| self.due.at(job, now));
    }

    /// Looks for jobs that wait with other words than their objects show, where there is little else to write.
    async fn look_at_words(&mut self) {
        if self.due.len() > WRITES {
            return;
        }
        let engine = self.engine.clone();
        let read = move || engine.read(seen::all_words);
        let Ok(Ok(words)) = tokio::task::spawn_blocking(read).await else { return };
        let other = |(job, words): (JobId, u64)| {
            let known = self.objects.get(self.by_job.get(&job)?)?;
            (known.words != words).then_some((known.written, job))
        };
        let mut others: Vec<_> = words.into_iter().filter_map(other).collect();
        // Those first that were not written for the longest time.
        others.sort_unstable();
        let now = Instant::now();
        others.into_iter().take(WORDS_AT_ONCE).for_each(|(_, job)| self.due.at(job, now));
    }

    /// Writes the states of jobs that are due into their objects, and makes those that are missing.
    async fn write_due(&mut self) {
        let ids = self.due.take(Instant::now(), WRITES.saturating_sub(self.writing));
        // What never was written before says more than what is at hand of a job that has ended.
        let fresh = |id: &JobId| {
            self.by_job.get(id).and_then(|n| self.objects.get(n)).is_some_and(|k| k.status.phase.is_none())
        };
        let at_hand = |id: &JobId| self.ended.contains_key(id) && !fresh(id);
        let (ended, asked): (Vec<JobId>, Vec<JobId>) = ids.into_iter().partition(at_hand);
        for id in ended {
            let kept = self.ended.get(&id).cloned();
            self.show_ended(id, kept.map(|(job, at)| Ended { job, at: Some(at), image: None }));
        }
        if asked.is_empty() {
            return;
        }
        let (engine, jobs, ids) = (self.engine.clone(), self.jobs.clone(), asked.clone());
        let read = move || {
            let wanted = ids.clone();
            let live = engine.read(move |view| seen::seen(view, &wanted)).ok()?;
            let over = ids.into_iter().filter(|id| !live.contains_key(id)).map(|id| (id, jobs.ended(id)));
            let over: Vec<_> = over.collect();
            Some((live, over))
        };
        let Ok(Some((live, over))) = tokio::task::spawn_blocking(read).await else {
            // Its store is away, or it is stopping.
            asked.into_iter().for_each(|id| self.due.at(id, Instant::now() + AGAIN));
            return;
        };
        for (id, seen) in &live {
            match self.by_job.get(id).cloned() {
                Some(name) => {
                    self.show(&name, &seen.shown(), seen.words);
                }
                None => self.make(seen),
            }
        }
        for (id, kept) in over {
            self.show_ended(id, kept);
        }
    }

    /// Shows a job that has ended; of one that is not kept any more nothing is known.
    fn show_ended(&mut self, id: JobId, kept: Option<Ended>) {
        let Some(name) = self.by_job.get(&id).cloned() else {
            // Its object is gone. Or it is not known yet that it is this job's: then it is due again.
            self.ended.remove(&id);
            return;
        };
        if self.objects.get(&name).is_some_and(|k| k.deleting) {
            self.ended.remove(&id);
            self.release(&name);
        } else if let Some(Ended { job, at, image }) = kept
            && self.show(&name, &Shown { job: &job, reason: None, nodes: &[], image: image.as_ref(), ended: at }, 0)
        {
            self.ended.remove(&id);
        }
    }

    /// The object of a job that came through the API.
    fn make(&mut self, seen: &Seen) {
        let record = seen.record.clone();
        if let Some(object) = &record.provenance.object {
            // Its object is gone, and with it the intent; or it has just become a job, which is heard of later.
            let name = (record.key.namespace.clone(), object.name.clone());
            if !self.busy.contains(&name) && self.objects.get(&name).is_none_or(|k| k.uid != object.uid) {
                self.cancel(record.id);
            }
            return;
        }
        let name = (record.key.namespace.clone(), record.key.name.clone());
        if !self.busy.insert(name.clone()) {
            self.due.at(record.id, Instant::now() + SETTLE);
            return;
        }
        let (client, writes, done) = (self.client.clone(), self.writes.clone(), self.done.clone());
        tokio::spawn(async move {
            let _turn = writes.acquire().await;
            let made = ensure(&client, &record).await.is_ok();
            let _ = done.send(Done::Made(name, record.id, made));
        });
    }

    /// Writes what is to be shown of a job, if it is new; false where that is left for later.
    fn show(&mut self, name: &Name, shown: &Shown<'_>, words: u64) -> bool {
        let Some(known) = self.objects.get_mut(name) else { return true };
        if self.busy.contains(name) {
            self.due.at(shown.job.id, Instant::now() + SETTLE);
            return false;
        }
        let status = known.status.next(shown, &name.1, known.generation);
        let written = Written::of(&status);
        let words_only = known.status.differs_in_words(&written);
        if let Some(at) = known.written.filter(|at| words_only && at.elapsed() < WORDS) {
            self.due.at(shown.job.id, at + WORDS);
            return false;
        }
        known.words = words;
        if (known.status.phase, known.status.attempt) != (written.phase, written.attempt) {
            let _ = self.events.send(Tell::Changed(shown.job.id, regarding(name, known)));
        }
        self.write(name, status, written);
        true
    }
}

fn regarding(name: &Name, known: &Known) -> Regarding {
    Regarding { namespace: name.0.clone(), name: name.1.clone(), uid: known.uid.clone() }
}

fn name_of(object: &DynamicObject) -> Option<Name> {
    Some((object.metadata.namespace.clone()?, object.metadata.name.clone()?))
}
