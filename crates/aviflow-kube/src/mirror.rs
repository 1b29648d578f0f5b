//! Objects become jobs, and jobs have objects.
//!
//! A TrainingJob that somebody applies is submitted once, whatever crashes; deleting it is a graceful stop. A job that
//! came through the API gets its object. The state belongs to the store; the object's status shows it.
//!
//! Invariant: an object is submitted only after it carries the finalizer, so that no job is left without one; the
//! finalizer goes only when nothing of the job runs any more.

mod jobs;

pub use jobs::{Applied, Jobs, NotTaken, Submitting};

use crate::api::{Refused, persist};
use crate::events::{self, Regarding, Tell};
use crate::names;
use crate::object::{self, condition};
use crate::pod::Owner;
use aviflow_api::crd::{
    ConditionType, EstimatedStart, LastCheckpoint, MOST_NODES, MOST_REASON, PhaseWord, TrainingJobStatus,
};
use aviflow_api::spec::{ObjectRef, ResolvedImage};
use aviflow_core::explain;
use aviflow_core::model::{Cause, Ending, Job, JobId, JobKey, NodeId, Phase};
use aviflow_core::schedule::Waiting;
use aviflow_core::time::Time;
use aviflow_engine::driver::{Handle, View};
use aviflow_engine::engine::Input;
use aviflow_engine::ports::{JobRecord, ending};
use futures_util::StreamExt;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How often states are looked at, at most.
const LOOK: Duration = Duration::from_millis(500);
/// How often states are looked at that could not be written when they changed.
const LATE: Duration = Duration::from_secs(1);
/// How often a status is written of which only the words for waiting changed.
const WORDS: Duration = Duration::from_secs(20);
/// Statuses and objects that are written at a time.
const WRITES: usize = 16;
/// The pause before an object that was refused is submitted again: its queue may have been made since. It doubles with
/// each time.
const AGAIN: Duration = Duration::from_secs(20);
/// The longest.
const AT_LAST: Duration = Duration::from_secs(160);

/// What is known of an object.
#[derive(Clone, Debug)]
struct Known {
    uid: String,
    job: Option<JobId>,
    deleting: bool,
    /// The status as it is, or as it was written last.
    status: TrainingJobStatus,
    /// The generation of the spec.
    generation: Option<i64>,
    written: Option<Instant>,
    /// When it was refused last, and how often it was.
    refused: Option<(Instant, u32)>,
}

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
    /// Something was not written, as it was being written or had just been.
    late: bool,
    writes: Arc<Semaphore>,
    /// Objects that are being written, and are left alone until that is done.
    busy: BTreeSet<Name>,
    done: tokio::sync::mpsc::UnboundedSender<Done>,
    /// Who writes Events.
    events: tokio::sync::mpsc::UnboundedSender<Tell>,
}

/// What a task of the mirror's brings back.
enum Done {
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
            late: false,
            writes: Arc::new(Semaphore::new(WRITES)),
            busy: BTreeSet::new(),
            done,
            events,
        };
        // It ends with the mirror, which alone tells it what to write.
        tokio::spawn(events_of);
        let api = Api::<DynamicObject>::all_with(client, &object::resource());
        let mut events = watcher::watcher(api, watcher::Config::default().timeout(200)).boxed();
        let mut changed = engine.changed();
        let mut list = BTreeSet::new();
        let mut again = tokio::time::interval(AGAIN);
        let mut late = tokio::time::interval(LATE);
        loop {
            tokio::select! {
                Some(event) = events.next() => mirror.event(event, &mut list),
                Some(done) = finished.recv() => mirror.finish(done),
                _ = again.tick() => {
                    mirror.retry();
                    // Words that were held back are written also where nothing happens any more.
                    mirror.look().await;
                }
                _ = late.tick() => {
                    if std::mem::take(&mut mirror.late) {
                        mirror.look().await;
                    }
                }
                Ok(()) = changed.changed() => {
                    changed.mark_unchanged();
                    mirror.look().await;
                    // Many turns may follow each other: one look serves all that came meanwhile.
                    tokio::time::sleep(LOOK).await;
                }
            }
        }
    }

    fn event(&mut self, event: watcher::Result<Event<DynamicObject>>, list: &mut BTreeSet<Name>) {
        match event {
            Ok(Event::Init) => list.clear(),
            Ok(Event::InitApply(object)) => {
                list.extend(name_of(&object));
                self.seen(&object);
            }
            Ok(Event::InitDone) => {
                let gone: Vec<Name> = self.objects.keys().filter(|n| !list.contains(*n)).cloned().collect();
                for name in gone {
                    self.deleted(&name);
                }
                self.listed = true;
            }
            Ok(Event::Apply(object)) => self.seen(&object),
            Ok(Event::Delete(object)) => {
                if let Some(name) = name_of(&object) {
                    self.deleted(&name);
                }
            }
            // The watch begins again by itself, after a pause.
            Err(_) => {}
        }
    }

    fn seen(&mut self, object: &DynamicObject) {
        let (Some(name), Some(uid)) = (name_of(object), object.metadata.uid.clone()) else { return };
        let status = object.data.get("status").cloned().and_then(|s| serde_json::from_value(s).ok());
        let status: TrainingJobStatus = status.unwrap_or_default();
        let job = object::made_for(object).or(status.job_id).map(JobId);
        let deleting = object.metadata.deletion_timestamp.is_some();
        let before = self.objects.get(&name).filter(|k| k.uid == uid).cloned();
        let known = Known {
            uid,
            job: job.or(before.as_ref().and_then(|k| k.job)),
            deleting,
            status,
            generation: object.metadata.generation,
            written: before.as_ref().and_then(|k| k.written),
            refused: before.as_ref().and_then(|k| k.refused),
        };
        if let Some(job) = known.job {
            self.by_job.insert(job, name.clone());
        }
        let (submit, again) = (known.job.is_none() && !deleting, known.refused.is_some());
        self.objects.insert(name.clone(), known);
        if submit && !again {
            self.submit(name, object.clone());
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
            self.cancel(job);
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
        let Some(known) = self.objects.get(name).cloned() else { return };
        if let Some(job) = known.job {
            let live = self.engine.read(move |view| view.snapshot.jobs.contains_key(&job)).unwrap_or(true);
            if live {
                self.cancel(job);
                return;
            }
        }
        self.patch(name, json!({"metadata": {"finalizers": null}}), false);
    }

    /// Writes to an object, unless it is being written: then the next look does.
    fn patch(&mut self, name: &Name, patch: Value, status: bool) {
        if !self.busy.insert(name.clone()) {
            self.late = true;
            return;
        }
        let (api, writes, done, name) = (self.api(&name.0), self.writes.clone(), self.done.clone(), name.clone());
        tokio::spawn(async move {
            let _turn = writes.acquire().await;
            let (how, patch) = (PatchParams::default(), Patch::Merge(&patch));
            // What is refused for good is an object that is gone.
            let _ = if status {
                persist(|| async { api.patch_status(&name.1, &how, &patch).await.map(|_| ()) }).await
            } else {
                persist(|| async { api.patch(&name.1, &how, &patch).await.map(|_| ()) }).await
            };
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
        let queue = self.default_queue.clone();
        tokio::spawn(async move {
            let finalizers = json!({"metadata": {"finalizers": [names::FINALIZER]}});
            let patch = Patch::Merge(&finalizers);
            let marked = persist(|| async { api.patch(&name.1, &PatchParams::default(), &patch).await }).await;
            let answer = match marked {
                Err(Refused { message, .. }) => {
                    Err(NotTaken::refused(format!("its finalizer could not be set: {message}")))
                }
                Ok(_) => jobs::submit(&*jobs, &name.0, &object, &queue).await,
            };
            let _ = done.send(Done::Submitted(name, answer));
        });
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Written(name) => {
                self.busy.remove(&name);
            }
            Done::Submitted(name, answer) => {
                self.busy.remove(&name);
                // What became of it meanwhile was not seen, as nobody knew whose it was.
                self.late = true;
                let Some(known) = self.objects.get_mut(&name) else {
                    if let Ok((job, _)) = answer {
                        self.cancel(job);
                    }
                    return;
                };
                let before = known.status.clone();
                let mut status = before.clone();
                status.observed_generation = known.generation;
                match answer {
                    Ok((job, key)) => {
                        known.job = Some(job);
                        known.refused = None;
                        self.by_job.insert(job, name.clone());
                        status.job_id = Some(job.0);
                        status.job_name = Some(key.name);
                        status.phase = Some(PhaseWord::Queued);
                        let _ = self.events.send(Tell::Changed(job, regarding(&name, known)));
                    }
                    Err(NotTaken { reason, message }) => {
                        let again = before.reason.as_ref() == Some(&bounded(message.clone()));
                        if !again {
                            let tell = Tell::NotTaken(regarding(&name, known), reason.clone(), message.clone());
                            let _ = self.events.send(tell);
                        }
                        let times = known.refused.map_or(0, |(_, times)| times);
                        known.refused = Some((Instant::now(), times.saturating_add(1)));
                        let refused = condition(ConditionType::Accepted, false, &reason, &message, &now());
                        status.conditions = object::conditions(&before.conditions, vec![refused]);
                        status.reason = Some(bounded(message));
                    }
                }
                self.write(&name, status);
            }
        }
    }

    /// Writes a status, if it is new.
    fn write(&mut self, name: &Name, status: TrainingJobStatus) {
        let Some(known) = self.objects.get_mut(name).filter(|k| k.status != status) else { return };
        if self.busy.contains(name) {
            self.late = true;
            return;
        }
        // What is not there any more must be said to be absent, in a merge.
        let (mut patch, old) = (json!(status), json!(known.status));
        if let (Some(old), Some(new)) = (old.as_object(), patch.as_object_mut()) {
            for field in old.keys() {
                new.entry(field.clone()).or_insert(Value::Null);
            }
        }
        known.status = status;
        known.written = Some(Instant::now());
        self.patch(&name.clone(), json!({"status": patch}), true);
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
                    Ok(object) => jobs::submit(&*jobs, &name.0, &object, &queue).await,
                };
                let _ = done.send(Done::Submitted(name, answer));
            });
        }
    }

    /// Writes the states of jobs into their objects, and makes those that are missing.
    async fn look(&mut self) {
        if !self.listed {
            return;
        }
        let engine = self.engine.clone();
        let read = move || engine.read(seen);
        let Ok(Ok(live)) = tokio::task::spawn_blocking(read).await else { return };
        let live: BTreeMap<JobId, Seen> = live;
        for (id, seen) in &live {
            match self.by_job.get(id).cloned() {
                Some(name) => self.show(&name, &seen.shown()),
                None => self.make(seen),
            }
        }
        let over: Vec<(JobId, Name)> =
            self.by_job.iter().filter(|(id, _)| !live.contains_key(id)).map(|(id, n)| (*id, n.clone())).collect();
        for (id, name) in over {
            let Some(known) = self.objects.get(&name) else { continue };
            if known.deleting {
                self.end(&name);
                continue;
            }
            if matches!(known.status.phase, Some(PhaseWord::Succeeded | PhaseWord::Failed | PhaseWord::Cancelled)) {
                continue;
            }
            let jobs = self.jobs.clone();
            if let Ok(Some((job, at))) = tokio::task::spawn_blocking(move || jobs.ended(id)).await {
                self.show(&name, &Shown { job: &job, reason: None, nodes: &[], image: None, ended: at });
            }
        }
    }

    /// The object of a job that came through the API.
    fn make(&mut self, seen: &Seen) {
        let record = seen.record.clone();
        if let Some(object) = &record.provenance.object {
            // Its object is gone, and with it the intent.
            let name = (record.key.namespace.clone(), object.name.clone());
            if !self.busy.contains(&name) && !self.objects.contains_key(&name) {
                self.cancel(record.id);
            }
            return;
        }
        let name = (record.key.namespace.clone(), record.key.name.clone());
        if !self.busy.insert(name.clone()) {
            return;
        }
        let (client, writes, done) = (self.client.clone(), self.writes.clone(), self.done.clone());
        tokio::spawn(async move {
            let _turn = writes.acquire().await;
            let _ = ensure(&client, &record).await;
            let _ = done.send(Done::Written(name));
        });
    }

    fn show(&mut self, name: &Name, seen: &Shown<'_>) {
        let Some(known) = self.objects.get(name) else { return };
        let status = status_of(seen, known);
        let words_only = known.status.phase == status.phase && known.status.attempt == status.attempt;
        let said = known.status.reason.is_some();
        if words_only && said && known.written.is_some_and(|at| at.elapsed() < WORDS) {
            self.late |= known.status != status;
            return;
        }
        if !words_only {
            let _ = self.events.send(Tell::Changed(seen.job.id, regarding(name, known)));
        }
        self.write(name, status);
    }
}

/// What is shown of a job.
struct Shown<'a> {
    job: &'a Job,
    reason: Option<&'a str>,
    nodes: &'a [String],
    image: Option<&'a ResolvedImage>,
    ended: Option<Time>,
}

/// A live job as the mirror needs it.
struct Seen {
    job: Job,
    record: Arc<JobRecord>,
    reason: Option<String>,
    nodes: Vec<String>,
}

impl Seen {
    fn shown(&self) -> Shown<'_> {
        let image = self.record.provenance.image.as_ref();
        Shown { job: &self.job, reason: self.reason.as_deref(), nodes: &self.nodes, image, ended: None }
    }
}

/// All live jobs.
fn seen(view: &View<'_>) -> BTreeMap<JobId, Seen> {
    let why = |w: &Waiting| explain::constraint(&view.plan.constraints[w.constraint], view.now);
    let mut reasons: BTreeMap<JobId, String> = view.plan.waiting.iter().map(|w| (w.job, why(w))).collect();
    let name = |id: &NodeId| view.snapshot.nodes.get(id).map(|n| n.name.clone());
    let one = |(id, job): (&JobId, &Job)| {
        let nodes = job.phase.gang().into_iter().flat_map(|g| &g.workers).filter_map(|w| name(&w.node)).collect();
        let record = view.records.get(id)?.clone();
        Some((*id, Seen { record, reason: reasons.remove(id), nodes, job: job.clone() }))
    };
    view.snapshot.jobs.iter().filter_map(one).collect()
}

fn regarding(name: &Name, known: &Known) -> Regarding {
    Regarding { namespace: name.0.clone(), name: name.1.clone(), uid: known.uid.clone() }
}

fn name_of(object: &DynamicObject) -> Option<Name> {
    Some((object.metadata.namespace.clone()?, object.metadata.name.clone()?))
}

fn now() -> String {
    k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn timestamp(at: Time) -> String {
    let at = k8s_openapi::jiff::Timestamp::from_millisecond(at.0).unwrap_or(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A reason that the definition takes.
fn bounded(text: String) -> String {
    match text.char_indices().nth(MOST_REASON) {
        Some(_) => text.chars().take(MOST_REASON - 1).chain(['…']).collect(),
        None => text,
    }
}

/// The status of a job's object.
fn status_of(shown: &Shown<'_>, known: &Known) -> TrainingJobStatus {
    let Shown { job, reason, nodes, image, ended } = shown;
    let reason = reason.map(str::to_owned).or_else(|| match &job.phase {
        Phase::Failed(failure) => Some(match &failure.cause {
            // Nothing else in the cluster says it any more.
            Cause::Launch { reason, .. } => bounded(format!("{}: {reason}", explain::failure_short(failure))),
            Cause::Rank { .. } | Cause::WorkerLost { .. } | Cause::TimeLimit { .. } | Cause::Environment { .. } => {
                explain::failure_short(failure)
            }
        }),
        Phase::Cancelled { by } => Some(format!("cancelled by {by}")),
        _ => None,
    });
    let said = reason.clone().unwrap_or_default();
    let (now, word) = (now(), job.phase.name());
    let end = ending(&job.phase);
    let image = image.cloned().or_else(|| known.status.image.clone());
    let deprecated = image.as_ref().and_then(|i| i.environment.as_ref().zip(i.deprecated.as_ref()));
    let warning = deprecated.map_or_else(String::new, |(name, why)| format!("environment {name} is deprecated: {why}"));
    let estimate = job.estimate.filter(|_| matches!(job.phase, Phase::Queued));
    let suspended = matches!(job.phase, Phase::Queued) && job.attempts > 0;
    let conditions = [
        (ConditionType::Accepted, true),
        (ConditionType::Queued, matches!(job.phase, Phase::Queued)),
        (ConditionType::Running, matches!(job.phase, Phase::Running(_))),
        (ConditionType::Suspended, suspended || matches!(job.phase, Phase::Suspending(_))),
        (ConditionType::Succeeded, end == Some(Ending::Succeeded)),
        (ConditionType::Failed, end.is_some_and(|end| end != Ending::Succeeded)),
    ];
    let conditions = conditions.map(|(kind, holds)| match kind {
        ConditionType::Accepted => condition(kind, holds, "Accepted", &warning, &now),
        _ => condition(kind, holds, word, if holds { said.as_str() } else { "" }, &now),
    });
    TrainingJobStatus {
        observed_generation: known.generation,
        phase: Some(PhaseWord::from(&job.phase)),
        reason,
        queue: Some(job.request.queue.clone()),
        attempt: Some(job.attempts),
        counters: None,
        on: nodes.iter().take(MOST_NODES).cloned().collect(),
        job_name: Some(job.key.name.clone()),
        job_id: Some(job.id.0),
        image,
        submitted_by: Some(job.user.clone()),
        submitted: Some(timestamp(job.submitted)),
        started: known.status.started.clone().or_else(|| Some(timestamp(job.phase.gang()?.up?))),
        ended: ended.map(timestamp),
        estimated_start: estimate
            .as_ref()
            .map(|e| EstimatedStart { p50: timestamp(e.p50), p90: Some(timestamp(e.p90)) }),
        step: job.best_step,
        last_checkpoint: job.checkpoint.as_ref().map(|c| LastCheckpoint { step: c.step, at: timestamp(c.at) }),
        conditions: object::conditions(&known.status.conditions, conditions.into()),
    }
}

/// The object that owns the pods of a job; made where it is missing.
///
/// # Errors
/// If it cannot be made, with the reason.
pub async fn ensure(client: &Client, record: &JobRecord) -> Result<Owner, String> {
    if let Some(ObjectRef { name, uid }) = &record.provenance.object {
        return Ok(Owner { name: name.clone(), uid: uid.clone() });
    }
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &record.key.namespace, &object::resource());
    let plain = record.key.name.clone();
    for name in [plain.clone(), format!("{plain}-{}", record.id.0)] {
        let wanted = object::of_job(record, &name);
        let made = match persist(|| async { api.create(&PostParams::default(), &wanted).await }).await {
            Err(refused) if refused.is_conflict() => persist(|| async { api.get(&name).await }).await,
            other => other,
        };
        let object = made.map_err(|e| format!("its object {name} could not be made: {}", e.message))?;
        if object::made_for(&object) == Some(record.id.0) {
            let uid = object.metadata.uid.ok_or_else(|| format!("its object {name} has no uid"))?;
            return Ok(Owner { name, uid });
        }
    }
    Err(format!("there are objects {plain} and {plain}-{} of other jobs already; delete one", record.id.0))
}
