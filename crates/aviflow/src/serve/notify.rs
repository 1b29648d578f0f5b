//! Tells people of their jobs, as `notify` asks for it: an adapter beside the engine, which waits for nothing here.
//!
//! What happened is read of jobs' timelines, behind the commits: so a note is of something durable. Where GPUs do
//! nothing or a start moves away, no moment says it, and it is looked at now and then.
//!
//! Invariants: a moment is told at least once to each receiver that takes it, and after a restart of the control
//! plane only those are told again that no receiver had answered by then; nothing that is told here comes back to the
//! engine.

mod cursor;
mod message;
mod send;
mod story;
mod watch;

use crate::error::{Failure, Result};
use crate::home::Home;
use crate::output::note;
use aviflow_api::convert::full_name;
use aviflow_api::spec::NotifyOn;
use aviflow_api::webhook;
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, JobId, Phase};
use aviflow_core::schedule::{self, Memo};
use aviflow_core::time::{Span, Time};
use aviflow_engine::driver::{Changes, Handle};
use aviflow_engine::ports::JobRecord;
use aviflow_server::{Looks, Outcome, Outcomes};
use cursor::{Cursor, CursorFile};
use message::Message;
pub use send::Rules;
use send::{Done, Note, Patience, Post};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use story::Story;
use tokio::runtime::Runtime;
use tokio::sync::Notify as Wake;
use watch::{Expected, Idle};

/// Commits within this time are looked at once.
const TOGETHER: Duration = Duration::from_millis(100);

/// How often it is looked whether GPUs do anything.
const ROUND: Duration = Duration::from_secs(60);

/// How often starts are worked out anew, in rounds.
const ESTIMATES: u32 = 5;

/// Starts that are worked out at once: each costs a look ahead.
const ESTIMATED: usize = 50;

/// Jobs that ended while nobody looked, and are looked at after a restart.
const UNSEEN: u64 = 10_000;

/// How much of the time before it began a control plane tells that does not know what was told.
const RECENT: Span = Span(30_000);

/// Notes that are on their way, by job and by its `notify`: their rows.
type OnTheWay = Arc<Mutex<BTreeMap<(JobId, usize), BTreeSet<u64>>>>;

/// What is read of jobs.
trait Sight: Send {
    fn timeline(&self, job: JobId, after: u64) -> Sighted<Vec<(u64, Moment, String)>>;
    fn job(&self, job: JobId) -> Sighted<Option<(Job, JobRecord)>>;
    fn newest(&self) -> Sighted<Option<JobId>>;
    fn busiest(&self) -> Sighted<BTreeMap<(JobId, u32), f32>>;
}

type Sighted<T> = std::result::Result<T, String>;

impl Sight for Looks {
    fn timeline(&self, job: JobId, after: u64) -> Sighted<Vec<(u64, Moment, String)>> {
        Looks::timeline(self, job, after)
    }

    fn job(&self, job: JobId) -> Sighted<Option<(Job, JobRecord)>> {
        Looks::job(self, job)
    }

    fn newest(&self) -> Sighted<Option<JobId>> {
        Looks::newest(self)
    }

    fn busiest(&self) -> Sighted<BTreeMap<(JobId, u32), f32>> {
        Looks::busiest(self)
    }
}

/// Starts telling, until the engine ends.
pub fn start(
    home: &Home,
    engine: &Handle,
    looks: Looks,
    rules: Rules,
    outcomes: Arc<Outcomes>,
    runtime: &Runtime,
) -> Result<()> {
    let wake = Arc::new(Wake::new());
    let post =
        |on_the_way: &OnTheWay| Post::new(rules, Patience::default(), outcomes, done(on_the_way.clone(), wake.clone()));
    let teller = Teller::new(home, engine, Box::new(looks), post)?;
    runtime.spawn(run(teller, engine.clone(), wake));
    Ok(())
}

/// What happens with notes that have come to their end.
fn done(on_the_way: OnTheWay, wake: Arc<Wake>) -> Done {
    Box::new(move |ended: &Note, outcome, why| {
        if outcome != Outcome::Delivered {
            let host = webhook::host(&ended.address);
            note(&format!("a notification of job {} to {host} was not delivered: {why}", ended.job.0));
        }
        let Some(row) = ended.row else { return };
        let mut all = on_the_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = all.get_mut(&(ended.job, ended.entry)) {
            rows.remove(&row);
            if rows.is_empty() {
                all.remove(&(ended.job, ended.entry));
            }
        }
        drop(all);
        wake.notify_one();
    })
}

/// What is to be done.
enum Work {
    Look(Changes),
    Round,
    Keep,
}

async fn run(mut teller: Teller, engine: Handle, wake: Arc<Wake>) {
    let mut follower = engine.follow();
    let mut rounds = tokio::time::interval(ROUND);
    loop {
        let work = tokio::select! {
            alive = follower.changed() => {
                if !alive {
                    return;
                }
                tokio::time::sleep(TOGETHER).await;
                Work::Look(follower.take())
            }
            _ = rounds.tick() => Work::Round,
            () = wake.notified() => {
                tokio::time::sleep(TOGETHER).await;
                Work::Keep
            }
        };
        let worked = tokio::task::spawn_blocking(move || {
            match work {
                Work::Look(changes) => teller.changed(changes),
                Work::Round => teller.round(),
                Work::Keep => teller.keep(),
            }
            teller
        });
        match worked.await {
            Ok(back) => teller = back,
            Err(_) => return,
        }
    }
}

/// A job that tells somebody.
struct Told {
    record: Arc<JobRecord>,
    queue: String,
    attempt: u32,
    story: Story,
    /// Whether it was looked at since it ended: nothing is heard of it any more.
    gone: bool,
    /// How far its timeline was read.
    read: u64,
    /// Up to which row each of its `notify` was told before this control plane began.
    before: Vec<u64>,
    /// What happened earlier is not told.
    since: Time,
    expected: Option<Expected>,
}

/// A live job as it is looked at.
type Live = (Arc<JobRecord>, Job);

struct Teller {
    engine: Handle,
    looks: Box<dyn Sight>,
    post: Post,
    file: CursorFile,
    begun: Time,
    term: u64,
    newest: Option<JobId>,
    /// How far people were told by the control plane before this one, where that is known.
    before: Option<Cursor>,
    on_the_way: OnTheWay,
    jobs: BTreeMap<JobId, Told>,
    /// Live jobs that tell nobody.
    silent: BTreeSet<JobId>,
    /// Jobs that were found ended before they were told of as such.
    over: BTreeSet<JobId>,
    /// Jobs that could not be read, and whether they had ended.
    again: BTreeMap<JobId, bool>,
    /// Jobs that ended while the engine could not be asked: all is looked at then, once it can.
    kept: Option<BTreeSet<JobId>>,
    idle: Idle,
    rounds: u32,
}

impl Teller {
    /// Has told nothing yet; `post` makes what posts.
    fn new(
        home: &Home,
        engine: &Handle,
        looks: Box<dyn Sight>,
        post: impl FnOnce(&OnTheWay) -> Post,
    ) -> Result<Teller> {
        let read = engine.read(|view| (view.term.0, view.now));
        let (term, begun) = read.map_err(|e| Failure::platform(e.to_string()))?;
        let (file, before) = CursorFile::open(home.join("notified.json"), term);
        let on_the_way = OnTheWay::default();
        Ok(Teller {
            engine: engine.clone(),
            looks,
            post: post(&on_the_way),
            file,
            begun,
            term,
            newest: before.as_ref().and_then(|cursor| cursor.newest),
            before,
            on_the_way,
            jobs: BTreeMap::new(),
            silent: BTreeSet::new(),
            over: BTreeSet::new(),
            again: BTreeMap::new(),
            kept: None,
            idle: Idle::default(),
            rounds: 0,
        })
    }

    /// Looks at jobs that changed.
    fn changed(&mut self, changes: Changes) {
        let Changes { all, live: changed, ended } = changes;
        let kept = self.kept.take();
        let all = all || kept.is_some();
        let mut ended: BTreeSet<JobId> = ended.into_keys().collect();
        ended.extend(kept.into_iter().flatten());
        let read = self.engine.read(move |view| {
            let pick = |id: &JobId| {
                let record = view.records.get(id)?;
                let job = view.snapshot.jobs.get(id)?;
                Some((*id, (!record.spec.notify.is_empty()).then(|| (record.clone(), job.clone()))))
            };
            let picked: Vec<(JobId, Option<Live>)> = match all {
                true => view.records.keys().filter_map(pick).collect(),
                false => changed.iter().filter_map(pick).collect(),
            };
            (view.term.0, picked)
        });
        let Ok((term, picked)) = read else {
            self.kept = Some(ended);
            return;
        };
        self.term = term;
        let newest = picked.iter().map(|(id, _)| *id).chain(ended.iter().copied()).max();
        let mut live = BTreeSet::new();
        for (id, job) in picked {
            live.insert(id);
            match job {
                Some(job) => self.look(id, Some(job), false),
                None => drop(self.silent.insert(id)),
            }
        }
        let mut gone: BTreeSet<JobId> = ended.into_iter().filter(|id| !self.over.remove(id)).collect();
        if all {
            gone.extend(self.jobs.keys().filter(|id| !live.contains(id)));
            let unseen = self.unseen(&live);
            // They may have ended since the changes were taken: then they are told of once more.
            self.over.extend(unseen.iter().filter(|id| !gone.contains(id)));
            gone.extend(unseen);
        }
        for id in gone {
            if !self.silent.remove(&id) {
                self.look(id, None, true);
            }
        }
        self.newest = self.newest.max(newest);
        self.before = None;
        self.keep();
    }

    /// Jobs that may have ended between the last look of the control plane before and the first of this one.
    fn unseen(&self, live: &BTreeSet<JobId>) -> Vec<JobId> {
        let Some(before) = &self.before else { return Vec::new() };
        let number = |id: Option<JobId>| id.map_or(0, |id| id.0);
        let newest = number(self.looks.newest().ok().flatten());
        let since = (number(before.newest) + 1).max(newest.saturating_sub(UNSEEN));
        let new = (since..=newest).map(JobId);
        before.jobs.keys().copied().chain(new).filter(|id| !live.contains(id)).collect()
    }

    /// Looks at one job. Of one that is gone, nothing is heard any more.
    fn look(&mut self, id: JobId, live: Option<Live>, gone: bool) {
        let (record, job) = match (live, self.jobs.get(&id)) {
            (Some((record, job)), _) => (record, Some(job)),
            (None, Some(told)) => (told.record.clone(), None),
            (None, None) => match self.looks.job(id) {
                Ok(Some((job, record))) if !record.spec.notify.is_empty() => (Arc::new(record), Some(job)),
                Ok(_) => return,
                Err(_) => {
                    self.again.insert(id, gone);
                    return;
                }
            },
        };
        let begun = self.begin(id, &record, job.as_ref());
        let told = self.jobs.entry(id).or_insert(begun);
        told.gone |= gone;
        if let Some(job) = &job {
            told.queue.clone_from(&job.request.queue);
            told.attempt = job.attempts;
        }
        let Ok(rows) = self.looks.timeline(id, told.read) else {
            self.again.insert(id, gone);
            return;
        };
        for (row, moment, sentence) in rows {
            told.read = row;
            told.attempt = moment.attempt;
            let Some(happened) = told.story.next(&moment, &sentence) else { continue };
            if moment.at < told.since {
                continue;
            }
            let again = happened.on == NotifyOn::Restarted;
            let what = if again { format!("{sentence} again") } else { sentence };
            let at = (moment.at, happened.phase);
            tell(&self.post, &self.on_the_way, told, Some(row), (happened.on, at), what, happened.reason);
        }
    }

    /// What is known of a job that is looked at for the first time.
    fn begin(&self, id: JobId, record: &Arc<JobRecord>, job: Option<&Job>) -> Told {
        let entries = record.spec.notify.len();
        let nothing = || vec![0; entries];
        let (before, since) = match &self.before {
            Some(cursor) => match cursor.jobs.get(&id) {
                Some(rows) => (rows.clone(), Time(0)),
                None if Some(id) > cursor.newest => (nothing(), Time(0)),
                None => (nothing(), self.begun - RECENT),
            },
            None => (nothing(), self.begun - RECENT),
        };
        // What was expected of those that were there is worked out before it can slip.
        let expected = job.and_then(|job| job.estimate).filter(|estimate| estimate.made >= self.begun);
        Told {
            record: record.clone(),
            queue: record.spec.queue.clone(),
            attempt: 0,
            story: Story::default(),
            gone: false,
            read: 0,
            before,
            since,
            expected: expected.map(|estimate| Expected { start: estimate.p50, said: estimate.made }),
        }
    }

    /// Writes how far people were told, and forgets jobs of which all is told.
    fn keep(&mut self) {
        let on_the_way = self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner);
        let first = |id: JobId, entry: usize| on_the_way.get(&(id, entry)).and_then(|rows| rows.first().copied());
        let mut jobs = BTreeMap::new();
        self.jobs.retain(|id, told| {
            let entries = 0..told.record.spec.notify.len();
            let rows: Vec<Option<u64>> = entries.map(|entry| first(*id, entry)).collect();
            let all_told = told.gone && told.story.is_over() && rows.iter().all(Option::is_none);
            if !all_told {
                let told_to = rows.iter().zip(&told.before).map(|(row, before)| match row {
                    Some(row) => row - 1,
                    None => told.read.max(*before),
                });
                jobs.insert(*id, told_to.collect());
            }
            !all_told
        });
        drop(on_the_way);
        self.file.write(Cursor { term: self.term, newest: self.newest, jobs });
    }

    /// Looks at what no moment says.
    fn round(&mut self) {
        for (id, gone) in std::mem::take(&mut self.again) {
            self.look(id, None, gone);
        }
        // Nobody says that the engine can be asked again.
        if self.kept.is_some() {
            self.changed(Changes::default());
        }
        if let Ok(now) = self.engine.read(|view| view.now) {
            self.idleness(now);
        }
        if self.rounds.is_multiple_of(ESTIMATES) {
            self.estimates();
        }
        self.rounds = self.rounds.wrapping_add(1);
        self.keep();
    }

    /// Looks whether GPUs do anything, for jobs that tell of it.
    fn idleness(&mut self, now: Time) {
        if !self.jobs.values().any(|told| told.wants(NotifyOn::Idle)) {
            return;
        }
        let Ok(busiest) = self.looks.busiest() else { return };
        for (id, attempt) in self.idle.look(&busiest, now) {
            let Some(told) = self.jobs.get_mut(&id) else { continue };
            told.attempt = attempt;
            let what = format!("its GPUs have done nothing for {}", watch::IDLE);
            let happened = (NotifyOn::Idle, (now, "Running"));
            tell(&self.post, &self.on_the_way, told, None, happened, what, None);
        }
    }

    /// Works out anew when jobs will start that tell of it; those first of which it was said longest ago.
    fn estimates(&mut self) {
        let wanting = self.jobs.iter().filter(|(_, told)| told.wants(NotifyOn::EstimateSlipped));
        let mut wanting: Vec<(Option<Time>, JobId)> =
            wanting.map(|(id, told)| (told.expected.map(|e| e.said), *id)).collect();
        wanting.sort_unstable();
        wanting.truncate(ESTIMATED);
        if wanting.is_empty() {
            return;
        }
        let Ok((snapshot, now)) = self.engine.read(|view| (view.snapshot.clone(), view.now)) else { return };
        let mut memo = Memo::default();
        let plan = schedule::plan(&snapshot, &mut memo, now);
        for (_, id) in wanting {
            let waits = snapshot.jobs.get(&id).is_some_and(|job| job.phase == Phase::Queued);
            let estimate = if waits { schedule::estimate(&snapshot, &mut memo, &plan, id, now) } else { None };
            let Some(told) = self.jobs.get_mut(&id) else { continue };
            let Some(estimate) = estimate else {
                told.expected = None;
                continue;
            };
            let expected = Expected { start: estimate.p50, said: now };
            match told.expected {
                Some(before) if watch::slipped(before, estimate.p50) => {
                    let later = estimate.p50.since(before.start);
                    let what = format!(
                        "it will probably start in {}, {later} later than was expected",
                        estimate.p50.since(now)
                    );
                    let reason =
                        plan.verdict(id).map(|(constraint, _)| aviflow_core::explain::constraint(constraint, now));
                    told.expected = Some(expected);
                    let happened = (NotifyOn::EstimateSlipped, (now, "Queued"));
                    tell(&self.post, &self.on_the_way, told, None, happened, what, reason);
                }
                Some(_) => {}
                None => told.expected = Some(expected),
            }
        }
    }
}

impl Told {
    fn wants(&self, on: NotifyOn) -> bool {
        self.record.spec.notify.iter().any(|notify| notify.on.contains(&on))
    }
}

/// Posts what happened to each who asked for it and was not told.
fn tell(
    post: &Post,
    on_the_way: &OnTheWay,
    told: &Told,
    row: Option<u64>,
    (on, (at, phase)): (NotifyOn, (Time, &str)),
    what: String,
    reason: Option<String>,
) {
    let record = &told.record;
    let name = full_name(&record.key);
    let message = Message {
        id: format!("{}-{}", record.id.0, row.map_or_else(|| format!("at-{}", at.0), |row| row.to_string())),
        event: on,
        at: at.0,
        job: record.key.name.clone(),
        namespace: record.key.namespace.clone(),
        user: record.user.clone(),
        queue: told.queue.clone(),
        phase: phase.to_owned(),
        attempt: told.attempt,
        what,
        reason,
        next: Message::next(on, &name, record.spec.outputs.first().map(String::as_str)),
        look: format!("aviflow show {name}"),
    };
    for (entry, notify) in record.spec.notify.iter().enumerate().filter(|(_, notify)| notify.on.contains(&on)) {
        if row.is_some_and(|row| told.before.get(entry).is_some_and(|before| row <= *before)) {
            continue;
        }
        if let Some(row) = row {
            let mut all = on_the_way.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry((record.id, entry)).or_default().insert(row);
        }
        let (address, body) = (notify.webhook.clone(), message.body(notify));
        post.put(Note { job: record.id, entry, row, address, body });
    }
}

#[cfg(test)]
mod tests;
