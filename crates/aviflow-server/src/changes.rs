//! Everything that changes, coarse, for those who watch the whole pool.
//!
//! One task compares the engine's state with the one before, for all streams
//! together, and only while there are any. Of each job and node it remembers a
//! fingerprint.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::follow::sse;
use crate::jobs;
use crate::pool::node_info;
use crate::view::{Seen, places};
use aviflow_api::rest::{ChangeEvent, NodeInfo};
use aviflow_core::model::{Job, JobId, Node, NodeId, Snapshot};
use aviflow_engine::driver::View;
use aviflow_store::read::Filter;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc, watch};

/// Changes that wait for a slow client; one that is slower begins anew.
const BUFFER: usize = 1024;

/// Changes within this time are compared once.
const TOGETHER: Duration = Duration::from_millis(100);

/// Jobs looked through at once for those that came and ended unseen.
const UNSEEN: u32 = 100;

/// The streams that are open.
#[derive(Default)]
pub(crate) struct Hub {
    open: Mutex<Option<Open>>,
}

/// The task that runs.
struct Open {
    sender: broadcast::Sender<Arc<ChangeEvent>>,
    /// Whether it has seen what it compares with: it tells what changes from then on.
    looked: watch::Receiver<bool>,
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
        (node.condition as u8, &node.closed, node.gpus, node.unhealthy).hash(h);
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
            Err(failure) if failure.status == StatusCode::NOT_FOUND => {}
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
    /// What changes from now on; starts the task if it does not run. Returns once
    /// the task has looked: a change before that is in the present alone, so
    /// whoever reads the present afterwards misses none.
    async fn subscribe(app: &Arc<App>) -> Result<broadcast::Receiver<Arc<ChangeEvent>>, Failure> {
        let (receiver, mut looked) = {
            let mut open = app.changes.open.lock().unwrap_or_else(PoisonError::into_inner);
            let open = open.get_or_insert_with(|| {
                let (sender, _) = broadcast::channel(BUFFER);
                let (look, looked) = watch::channel(false);
                tokio::spawn(follow(app.clone(), sender.clone(), look));
                Open { sender, looked }
            });
            (open.sender.subscribe(), open.looked.clone())
        };
        // The task ends without a look only if the state cannot be read.
        match looked.wait_for(|looked| *looked).await {
            Ok(_) => Ok(receiver),
            Err(_) => Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "noChanges", "the state cannot be watched")
                .help("try again in a moment; the control plane's log may say more")),
        }
    }

    /// Ends the task if nobody listens any more.
    fn idle(&self) -> bool {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = open.as_ref().is_none_or(|o| o.sender.receiver_count() == 0);
        if idle {
            *open = None;
        }
        idle
    }
}

async fn follow(app: Arc<App>, sender: broadcast::Sender<Arc<ChangeEvent>>, looked: watch::Sender<bool>) {
    let mut engine = app.parts.engine.changed();
    let mut known = Known::default();
    loop {
        engine.borrow_and_update();
        let state = app.clone();
        match blocking(move || changes(&state, known)).await {
            Ok((now, events)) => {
                known = now;
                // Whoever listens reads what the first look found as the present.
                if looked.send_replace(true) {
                    for event in events {
                        // Nobody listens: that is found out below.
                        let _ = sender.send(Arc::new(event));
                    }
                }
            }
            Err(_) => break,
        }
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
    *app.changes.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Whether a caller is told of a change. Asked for each, as a stream may outlive a right.
async fn told(app: &App, caller: &Caller, event: &ChangeEvent) -> bool {
    match event {
        ChangeEvent::Job { job } => app.sees(caller, &job.namespace).await.unwrap_or(false),
        ChangeEvent::Node { .. } | ChangeEvent::Ready => true,
    }
}

pub(crate) async fn events(State(app): State<Arc<App>>, caller: Caller) -> Result<Response, Failure> {
    let (sender, receiver) = mpsc::channel(1);
    // First the changes, then the present: what happens in between is then told twice and not lost.
    let mut changes = Hub::subscribe(&app).await?;
    let state = app.clone();
    let present = blocking(move || {
        let look = state.view(|view| look(view, Known::default()))?;
        let nodes = look.nodes.into_iter().map(|node| ChangeEvent::Node { node: Box::new(node) });
        Ok(nodes.chain(look.jobs.iter().map(|seen| job_event(&state, seen))).collect::<Vec<_>>())
    })
    .await?;
    tokio::spawn(async move {
        for event in present.into_iter().chain([ChangeEvent::Ready]) {
            if told(&app, &caller, &event).await && sender.send(Arc::new(event)).await.is_err() {
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
            if told(&app, &caller, &event).await && sender.send(event).await.is_err() {
                return;
            }
        }
    });
    Ok(sse(receiver))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::World;
    use aviflow_engine::ports::Observation;

    #[tokio::test]
    async fn whatever_changes_once_one_is_subscribed_is_told() {
        let world = World::new();
        world.until(|view| view.snapshot.nodes.len() == 2).await;
        let app = &world.server.app;
        let mut changes = Hub::subscribe(app).await.ok().unwrap();
        // Before anything else gets a turn on this thread.
        let seen = Observation::NodeSeen {
            name: "late".into(),
            pool: "main".into(),
            gpu_type: "H100".into(),
            gpus: 8,
            path: Vec::new(),
        };
        world.handle.observe(seen, None);
        world.handle.read(|view| assert_eq!(view.snapshot.nodes.len(), 3)).unwrap();
        let event = changes.recv().await.unwrap();
        let ChangeEvent::Node { node } = &*event else { panic!("{event:?}") };
        assert_eq!(node.name, "late");
    }
}
