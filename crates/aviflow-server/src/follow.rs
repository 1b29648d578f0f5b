//! Following one job to its end, as server-sent events.
//!
//! A stream sleeps until the engine commits or telemetry grows. It ends once the
//! job has ended, its workers have shipped what they had, and that was sent:
//! whoever follows has then seen every line, each once.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::jobs;
use crate::logs::Lines;
use crate::names::resolve;
use crate::params::{Name, Values, flag, ranks};
use crate::view;
use aviflow_api::rest::{JobEvent, JobSummary, ProgressPoint};
use aviflow_api::rights::{Part, Right, Verb};
use aviflow_core::lifecycle::PLATFORM_CODE;
use aviflow_core::model::JobId;
use aviflow_store::telemetry::Query;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// How long a stream waits for the last output of a job that has ended: an
/// agent whose machine is unreachable must not hold it open for ever.
const PATIENCE: Duration = Duration::from_secs(15);

/// A comment this often shows that a silent stream is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Moments read at once.
const MOMENTS: u32 = 500;

/// A stream of server-sent events.
pub(crate) fn sse<T: Serialize + Send + Sync + 'static>(receiver: mpsc::Receiver<Arc<T>>) -> Response {
    let events = ReceiverStream::new(receiver).map(|event| {
        let event = Event::default().json_data(&*event);
        // Types of the API have string keys only, so they can be written.
        Ok::<Event, Infallible>(event.unwrap_or_default())
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("")).into_response()
}

/// What wakes the stream of a job. Marked before reading, so that nothing falls between.
pub(crate) struct Signals {
    engine: watch::Receiver<u64>,
    /// Waiting for the engine marks it as seen, so that is remembered until the next look.
    woken: bool,
    output: watch::Receiver<u64>,
    builds: watch::Receiver<u64>,
}

impl Signals {
    pub(crate) fn new(app: &App, job: JobId) -> Signals {
        Signals {
            engine: app.parts.engine.changed(),
            woken: true,
            output: app.parts.telemetry.changed_of(job),
            builds: app.parts.telemetry.builds_changed(),
        }
    }

    /// What is there now is about to be read; says whether the engine committed since the last time.
    pub(crate) fn mark(&mut self) -> bool {
        self.output.borrow_and_update();
        self.builds.borrow_and_update();
        let committed = std::mem::take(&mut self.woken) | self.engine.has_changed().unwrap_or(true);
        self.engine.borrow_and_update();
        committed
    }

    /// Waits for the next change, one of a build only if the job is `building`;
    /// `false` if none can come any more.
    pub(crate) async fn changed(&mut self, building: bool) -> bool {
        tokio::select! {
            changed = self.engine.changed() => {
                self.woken = true;
                changed.is_ok()
            }
            changed = self.output.changed() => changed.is_ok(),
            changed = self.builds.changed(), if building => changed.is_ok(),
        }
    }
}

/// Where a followed job stands on its way to the end.
#[derive(Default)]
pub(crate) enum Ending {
    /// It is live.
    #[default]
    Live,
    /// It has ended, and its workers may still ship output.
    Draining(Pin<Box<dyn Future<Output = ()> + Send>>),
    /// What there is will not become more.
    Over,
}

impl Ending {
    /// Whether nothing comes any more.
    pub(crate) fn over(&self) -> bool {
        matches!(self, Ending::Over)
    }

    /// Notes that the job has ended.
    fn ended(&mut self, app: &App, job: JobId) {
        if matches!(self, Ending::Live) {
            let drained = app.parts.body.drained(job);
            *self = Ending::Draining(Box::pin(async move {
                // Either way the stream ends with what has come.
                let _ = tokio::time::timeout(PATIENCE, drained).await;
            }));
        }
    }

    /// Asks whether the job has ended.
    pub(crate) async fn look(&mut self, app: &Arc<App>, job: JobId) -> Result<(), Failure> {
        if matches!(self, Ending::Live) {
            let state = app.clone();
            let live = blocking(move || state.view(move |view| view.snapshot.jobs.contains_key(&job))).await?;
            if !live {
                self.ended(app, job);
            }
        }
        Ok(())
    }

    /// Waits until nothing comes any more; never, while the job is live.
    pub(crate) async fn wait(&mut self) {
        match self {
            Ending::Live => std::future::pending().await,
            Ending::Draining(drained) => {
                drained.await;
                *self = Ending::Over;
            }
            Ending::Over => {}
        }
    }
}

/// What a stream has.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct EventsQuery {
    #[serde(default, deserialize_with = "flag")]
    logs: Option<bool>,
    rank: Option<String>,
    tail: Option<usize>,
}

/// What was told of a job.
struct Told {
    id: JobId,
    lines: Option<Lines>,
    job: Option<JobSummary>,
    moment: u64,
    progress: Option<ProgressPoint>,
    exit_code: Option<i32>,
}

impl Told {
    /// What is new. Reads the job only if the engine committed, or while it waits
    /// for its environment, whose build is told by telemetry.
    fn step(&mut self, app: &App, committed: bool) -> Result<Vec<JobEvent>, Failure> {
        let mut events = Vec::new();
        if committed || self.building() || self.job.is_none() {
            self.job(app, &mut events)?;
        }
        let point = app.parts.telemetry.latest(self.id).map_err(|e| Failure::io("the series cannot be read", &e))?;
        let point = point.as_ref().map(view::point);
        if let Some(point) = &point
            && self.progress.as_ref() != Some(point)
        {
            events.push(JobEvent::Progress { point: point.clone() });
        }
        self.progress = point.or(self.progress.take());
        Ok(events)
    }

    /// Whether the job waits for its environment.
    fn building(&self) -> bool {
        let verdict = self.job.as_ref().and_then(|j| j.verdict.as_ref());
        verdict.is_some_and(|v| v.constraint.kind == "environment")
    }

    fn job(&mut self, app: &App, events: &mut Vec<JobEvent>) -> Result<(), Failure> {
        let seen = jobs::seen(app, self.id)?;
        let job = seen.summary(app);
        self.exit_code = job.exit_code;
        if self.job.as_ref().is_none_or(|before| differ(before, &job)) {
            events.push(JobEvent::Job { job: Box::new(job.clone()) });
            self.job = Some(job);
        }
        let mut names = None;
        loop {
            let rows = app.parts.reader.moments(self.id, self.moment, MOMENTS)?;
            let Some(last) = rows.last() else { return Ok(()) };
            self.moment = last.row;
            let names = match &mut names {
                Some(names) => names,
                none => none.insert(app.names()?),
            };
            let entry = |row: &aviflow_store::read::MomentRow| view::timeline_entry(&row.moment, names);
            events.extend(rows.iter().map(entry).map(|entry| JobEvent::Timeline { entry }));
        }
    }
}

/// Whether something changed but time, and progress, which is told apart.
fn differ(before: &JobSummary, now: &JobSummary) -> bool {
    let still = |job: &JobSummary| {
        let mut job = job.clone();
        job.progress = None;
        job.ran = 0;
        if let Some(verdict) = &mut job.verdict {
            // How long a pause still lasts is part of the sentence.
            verdict.reason.clear();
        }
        job
    };
    still(before) != still(now)
}

/// The rights that following a job needs: its output is part of what is told.
pub(crate) fn rights(namespace: &str) -> Vec<Right> {
    vec![Right::jobs(Verb::Get, Some(namespace)), Right::part(Verb::Get, Part::Log, namespace)]
}

pub(crate) async fn events(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Values(query): Values<EventsQuery>,
) -> Result<Response, Failure> {
    let state = app.clone();
    let (told, signals) = blocking(move || {
        let id = resolve(&state, &name, &caller)?;
        let signals = Signals::new(&state, id);
        let ranks = query.rank.as_deref().map(ranks).transpose()?;
        let lines = match query.logs {
            Some(false) => None,
            _ => Some(Lines::new(&state, id, Query { ranks, tail: query.tail, ..Query::default() })?),
        };
        Ok((Told { id, lines, job: None, moment: 0, progress: None, exit_code: None }, signals))
    })
    .await?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        // A stream that fails ends without `End`: the client connects again and is told why.
        let _ = send(app, told, signals, &sender).await;
    });
    Ok(sse(receiver))
}

async fn send(
    app: Arc<App>,
    mut told: Told,
    mut signals: Signals,
    sender: &mpsc::Sender<Arc<JobEvent>>,
) -> Result<(), Failure> {
    let mut ending = Ending::default();
    loop {
        let committed = signals.mark();
        let over = ending.over();
        let state = app.clone();
        let mut events;
        (told, events) = blocking(move || {
            let events = told.step(&state, committed)?;
            Ok((told, events))
        })
        .await?;
        loop {
            for event in events.drain(..) {
                if sender.send(Arc::new(event)).await.is_err() {
                    return Ok(());
                }
            }
            let Some(mut lines) = told.lines.take() else { break };
            let batch;
            (lines, batch) = blocking(move || {
                let batch = lines.next()?;
                Ok((lines, batch))
            })
            .await?;
            told.lines = Some(lines);
            if batch.is_empty() || *app.stopping.borrow() {
                break;
            }
            events.push(JobEvent::Log { lines: batch });
        }
        if over {
            let exit_code = told.exit_code.unwrap_or(PLATFORM_CODE);
            let _ = sender.send(Arc::new(JobEvent::End { exit_code })).await;
            return Ok(());
        }
        if told.exit_code.is_some() {
            ending.ended(&app, told.id);
        }
        tokio::select! {
            alive = signals.changed(told.building()) => if !alive { return Ok(()) },
            () = ending.wait() => {}
            () = sender.closed() => return Ok(()),
            () = app.stopped() => return Ok(()),
        }
    }
}
