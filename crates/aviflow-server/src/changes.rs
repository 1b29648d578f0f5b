//! Everything that changes, coarse, for those who watch the whole pool.
//!
//! One task compares the engine's state with the one before, for all streams
//! together, and only while there are any. Of each job and node it remembers a
//! fingerprint.

use crate::app::{App, blocking};
use crate::error::Failure;
use crate::follow::sse;
use crate::jobs;
use crate::pool::node_info;
use crate::view::{Seen, places};
use aviflow_api::rest::{ChangeEvent, NodeInfo};
use aviflow_core::model::{Job, JobId, Node, NodeId, Snapshot};
use aviflow_engine::driver::View;
use aviflow_store::sqlite::Filter;
use axum::extract::State;
use axum::response::Response;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};

/// Changes that wait for a slow client; one that is slower begins anew.
const BUFFER: usize = 1024;

/// Changes within this time are compared once.
const TOGETHER: Duration = Duration::from_millis(100);

/// Jobs looked through at once for those that came and ended unseen.
const UNSEEN: u32 = 100;

/// The streams that are open.
#[derive(Default)]
pub(crate) struct Hub {
    sender: Mutex<Option<broadcast::Sender<Arc<ChangeEvent>>>>,
}

/// What was seen last.
#[derive(Default)]
struct Known {
    jobs: BTreeMap<JobId, u64>,
    nodes: BTreeMap<NodeId, u64>,
    newest: Option<JobId>,
}

/// What one look found.
struct Look {
    known: Known,
    jobs: Vec<Seen>,
    nodes: Vec<NodeInfo>,
    /// Jobs that are no longer live.
    gone: Vec<JobId>,
}

fn fingerprint(thing: impl FnOnce(&mut DefaultHasher)) -> u64 {
    let mut hasher = DefaultHasher::new();
    thing(&mut hasher);
    hasher.finish()
}

/// The place in the queue is left out: each start would change it for all that wait.
fn job_fingerprint(job: &Job) -> u64 {
    fingerprint(|h| {
        (job.phase.name(), job.attempts, job.best_step.is_some(), job.not_before, &job.request.queue).hash(h);
        job.checkpoint.as_ref().map(|c| (c.step, c.at)).hash(h);
        if let Some(gang) = job.phase.gang() {
            (gang.attempt, gang.epoch, gang.up).hash(h);
            gang.workers.iter().for_each(|w| (w.state as u8, w.exits.len()).hash(h));
        }
    })
}

fn node_fingerprint(snapshot: &Snapshot, node: &Node) -> u64 {
    fingerprint(|h| {
        (node.condition as u8, node.gpus, node.unhealthy).hash(h);
        snapshot.ledger.node(node.id).iter().for_each(|o| (o.slots, o.state, o.owner).hash(h));
    })
}

/// Compares the present with what was seen last.
fn look(view: &View<'_>, mut before: Known) -> Look {
    let mut look = Look { known: Known::default(), jobs: Vec::new(), nodes: Vec::new(), gone: Vec::new() };
    let mut places = None;
    for (id, job) in &view.snapshot.jobs {
        let now = job_fingerprint(job);
        if before.jobs.remove(id) != Some(now) {
            let places = places.get_or_insert_with(|| self::places(view.plan));
            look.jobs.push(Seen::live(view, job, places.remove(id)));
        }
        look.known.jobs.insert(*id, now);
    }
    for (id, node) in &view.snapshot.nodes {
        let now = node_fingerprint(view.snapshot, node);
        if before.nodes.remove(id) != Some(now) {
            look.nodes.push(node_info(view.snapshot, node));
        }
        look.known.nodes.insert(*id, now);
    }
    look.gone = before.jobs.into_keys().collect();
    look.known.newest = before.newest.max(view.snapshot.jobs.keys().next_back().copied());
    look
}

/// What changed since, as events.
fn changes(app: &App, known: Known) -> Result<(Known, Vec<ChangeEvent>), Failure> {
    let newest = known.newest;
    let look = app.view(move |view| look(view, known))?;
    let mut known = look.known;
    let mut gone = look.gone;
    // A job may come and end between two looks.
    let mut filter = Filter { limit: UNSEEN, ..Filter::default() };
    'pages: loop {
        let page = app.parts.reader.jobs(&filter)?;
        for kept in &page {
            if Some(kept.job.id) <= newest {
                break 'pages;
            }
            known.newest = known.newest.max(Some(kept.job.id));
            if kept.ended.is_some() && !known.jobs.contains_key(&kept.job.id) {
                gone.push(kept.job.id);
            }
        }
        match page.last() {
            Some(last) if page.len() == UNSEEN as usize && newest.is_some() => filter.after = Some(last.job.id),
            _ => break,
        }
    }
    let mut events: Vec<ChangeEvent> =
        look.nodes.into_iter().map(|node| ChangeEvent::Node { node: Box::new(node) }).collect();
    gone.sort_unstable();
    gone.dedup();
    for id in gone {
        match jobs::seen(app, id) {
            Ok(seen) => events.push(job_event(app, &seen)),
            // Deleted by the retention.
            Err(failure) if failure.status == axum::http::StatusCode::NOT_FOUND => {}
            Err(failure) => return Err(failure),
        }
    }
    events.extend(look.jobs.iter().map(|seen| job_event(app, seen)));
    Ok((known, events))
}

fn job_event(app: &App, seen: &Seen) -> ChangeEvent {
    ChangeEvent::Job { job: Box::new(seen.summary(app)) }
}

impl Hub {
    /// What changes from now on; starts the task if it does not run.
    fn subscribe(app: &Arc<App>) -> broadcast::Receiver<Arc<ChangeEvent>> {
        let mut sender = app.changes.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*sender {
            return sender.subscribe();
        }
        let (new, receiver) = broadcast::channel(BUFFER);
        tokio::spawn(watch(app.clone(), new.clone()));
        *sender = Some(new);
        receiver
    }

    /// Ends the task if nobody listens any more.
    fn idle(&self) -> bool {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = sender.as_ref().is_none_or(|s| s.receiver_count() == 0);
        if idle {
            *sender = None;
        }
        idle
    }
}

async fn watch(app: Arc<App>, sender: broadcast::Sender<Arc<ChangeEvent>>) {
    let mut engine = app.parts.engine.changed();
    let mut known = Known::default();
    let mut first = true;
    loop {
        engine.borrow_and_update();
        let state = app.clone();
        match blocking(move || changes(&state, known)).await {
            Ok((now, events)) => {
                known = now;
                // Whoever listens has read the present already.
                if !first {
                    for event in events {
                        // Nobody listens: that is found out below.
                        let _ = sender.send(Arc::new(event));
                    }
                }
            }
            Err(_) => break,
        }
        first = false;
        tokio::select! {
            changed = engine.changed() => if changed.is_err() { break },
            () = app.stopped() => break,
        }
        tokio::time::sleep(TOGETHER).await;
        if app.changes.idle() {
            return;
        }
    }
    // The streams end with the last sender.
    *app.changes.sender.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

pub(crate) async fn events(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let (sender, receiver) = mpsc::channel(1);
    // First the changes, then the present: what happens in between is then told twice and not lost.
    let mut changes = Hub::subscribe(&app);
    let state = app.clone();
    let present = blocking(move || {
        let look = state.view(|view| look(view, Known::default()))?;
        let nodes = look.nodes.into_iter().map(|node| ChangeEvent::Node { node: Box::new(node) });
        Ok(nodes.chain(look.jobs.iter().map(|seen| job_event(&state, seen))).collect::<Vec<_>>())
    })
    .await?;
    tokio::spawn(async move {
        for event in present.into_iter().chain([ChangeEvent::Ready]) {
            if sender.send(Arc::new(event)).await.is_err() {
                return;
            }
        }
        loop {
            let event = tokio::select! {
                event = changes.recv() => event,
                () = sender.closed() => return,
                () = app.stopped() => return,
            };
            // A client that is too slow has lost changes: it connects again and begins with the present.
            let Ok(event) = event else { return };
            if sender.send(event).await.is_err() {
                return;
            }
        }
    });
    Ok(sse(receiver))
}
