//! One job: everything about it, its timeline and series, and what a person does to it.

use crate::access::{Caller, namespace_of};
use crate::app::{App, blocking};
use crate::attempts::hashes;
use crate::error::Failure;
use crate::names::resolve;
use crate::params::{Input, Name, Values};
use crate::secret::{masked, shown};
use crate::view::{self, Names, Seen};
use aviflow_api::convert::{claim_info, to_change};
use aviflow_api::identity::{HASH_FACT, job_hash};
use aviflow_api::rest::{JobAction, JobDetail, JobSummary, JobUpdate, NumberedPoint, TimelineEntry};
use aviflow_api::rights::{Right, Verb};
use aviflow_core::explain::NodeNames;
use aviflow_core::ledger::GpuState;
use aviflow_core::lifecycle::{Moment, MomentKind};
use aviflow_core::model::{JobId, Phase};
use aviflow_engine::engine::{Answer, Input as EngineInput, Refusal};
use aviflow_engine::ports::JobRecord;
use aviflow_store::read::MomentRow;
use aviflow_store::telemetry::SeriesPoint;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Moments read at once.
const MOMENTS: u32 = 1000;

/// How often the account of a job that changes all the time is read anew.
const TRIES: u32 = 5;

/// Points of a series, where the client does not say.
const POINTS: usize = 1000;

/// Points of a series at most.
const MAX_POINTS: usize = 20_000;

/// GPU-milliseconds by state.
type GpuTime = BTreeMap<GpuState, i128>;

/// A job as it is now, live or ended.
pub(crate) fn seen(app: &App, id: JobId) -> Result<Seen, Failure> {
    if let Some(seen) = app.view(move |view| Seen::one(view, id))? {
        return Ok(seen);
    }
    let (names, now) = app.view(|view| (Arc::new(Names::of(view.snapshot)), view.now))?;
    match app.parts.reader.job(id)? {
        Some((kept, _)) => Ok(Seen { job: kept.job, ended: kept.ended, waits: None, names, now }),
        // Deleted by the retention since its name was resolved.
        None => Err(Failure::not_found("noSuchJob", "the job is not kept any more")),
    }
}

/// The document of a job, ended or not.
pub(crate) fn record(app: &App, id: JobId) -> Result<Arc<JobRecord>, Failure> {
    if let Some(record) = app.view(move |view| view.records.get(&id).cloned())? {
        return Ok(record);
    }
    match app.parts.reader.job(id)? {
        Some((_, record)) => Ok(Arc::new(record)),
        None => Err(Failure::not_found("noSuchJob", "the job is not kept any more")),
    }
}

/// Everything about a job.
pub(crate) fn detail(app: &App, id: JobId) -> Result<JobDetail, Failure> {
    let (seen, gpu_time) = account(app, id)?;
    let record = record(app, id)?;
    let names = app.names()?;
    let moments = moments(app, id, 0)?;
    let hash = job_hash(&record.spec, &record.provenance);
    let failure = view::failure(&seen.job.phase).or_else(|| last_failure(&seen.job.phase, &moments));
    let claim = match seen.job.claim.clone() {
        Some(claim) => Some(app.view(move |view| claim_info(&claim, view.snapshot))?),
        None => None,
    };
    let mut summary = seen.summary(app);
    if let (Some(waits), Some(verdict)) = (&seen.waits, &mut summary.verdict) {
        let (snapshot, now) = app.view(|view| (view.snapshot.clone(), view.now))?;
        crate::verdict::complete(verdict, &snapshot, id, &waits.constraint, now);
    }
    let expected_back = seen.job.turned_out.as_ref().filter(|_| seen.job.phase == Phase::Queued);
    let expected_back = expected_back.and_then(|_| Some(summary.verdict.as_ref()?.estimate?.p50));
    Ok(JobDetail {
        summary,
        spec: shown(&record.spec),
        provenance: record.provenance.clone(),
        counters: view::counters(&seen.job),
        workers: view::workers(&seen.job, &names),
        checkpoint: view::checkpoint(&seen.job),
        held: seen.job.held.clone(),
        after: seen.job.after.iter().map(Into::into).collect(),
        claim,
        eviction: seen.job.eviction.as_ref().map(Into::into),
        turned_out: seen.job.turned_out.as_ref().map(Into::into),
        expected_back,
        gpu_time: gpu_time.iter().map(|(state, ms)| (state.name().to_owned(), ms_of(*ms))).collect(),
        facts: facts(&moments),
        last_lines: failure.map(view::last_lines).unwrap_or_default(),
        timeline: timeline_of(&moments, &names),
        attempt_hashes: hashes(&moments, &hash),
        hash,
    })
}

/// The failure that a job which goes on has behind it.
fn last_failure<'a>(phase: &Phase, moments: &'a [Moment]) -> Option<&'a aviflow_core::model::Failure> {
    if phase.is_terminal() {
        return None;
    }
    moments.iter().rev().find_map(|m| match &m.kind {
        MomentKind::Failing { failure } => Some(failure),
        _ => None,
    })
}

/// The job with its GPU time. Closed intervals are the store's and open ones the
/// engine's; if a commit came between, one could be in both or in neither, so
/// both are read again.
fn account(app: &App, id: JobId) -> Result<(Seen, GpuTime), Failure> {
    let mut tries = 0;
    loop {
        tries += 1;
        let live = app.view(move |view| {
            let seen = Seen::one(view, id)?;
            let mut open = GpuTime::new();
            for (_, o) in view.snapshot.ledger.iter().filter(|(_, o)| o.owner.is_some_and(|w| w.job == id)) {
                let ms = i128::from(o.slots.count()) * i128::from(view.now.since(o.from).0);
                *open.entry(o.state).or_default() += ms;
            }
            Some((seen, open, view.generation))
        })?;
        let closed = app.parts.reader.job_time(id)?;
        let Some((job, mut time, before)) = live else {
            return Ok((seen(app, id)?, closed));
        };
        // A turn that has written and not yet ended holds this back until its number is known.
        let after = app.view(|view| view.generation)?;
        if before == after || tries == TRIES {
            for (state, ms) in closed {
                *time.entry(state).or_default() += ms;
            }
            return Ok((job, time));
        }
    }
}

/// GPU-milliseconds as REST has them; 2^63 of them are 30,000 years of 10,000 GPUs.
pub(crate) fn ms_of(ms: i128) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// All moments of a job after a row of its timeline.
fn moments(app: &App, id: JobId, after: u64) -> Result<Vec<Moment>, Failure> {
    Ok(rows(app, id, after)?.into_iter().map(|row| row.moment).collect())
}

fn rows(app: &App, id: JobId, mut after: u64) -> Result<Vec<MomentRow>, Failure> {
    let mut all = Vec::new();
    loop {
        let rows = app.parts.reader.moments(id, after, MOMENTS)?;
        let whole = rows.len() < MOMENTS as usize;
        after = rows.last().map_or(after, |row| row.row);
        all.extend(rows);
        if whole {
            return Ok(all);
        }
    }
}

/// The timeline after a row, in words.
pub(crate) fn told(app: &App, id: JobId, after: u64) -> Result<Vec<(u64, Moment, String)>, Failure> {
    let names = app.names()?;
    let rows = rows(app, id, after)?;
    Ok(rows.into_iter().map(|r| (r.row, r.moment.clone(), view::timeline_entry(&r.moment, &names).text)).collect())
}

fn timeline_of(moments: &[Moment], names: &dyn NodeNames) -> Vec<TimelineEntry> {
    moments.iter().map(|m| view::timeline_entry(m, names)).collect()
}

/// What the training reported; the last word on each name holds.
fn facts(moments: &[Moment]) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    for moment in moments {
        if let MomentKind::Facts { values } = &moment.kind {
            let told = values.iter().filter(|(name, _)| *name != HASH_FACT);
            facts.extend(told.map(|(name, value)| (name.clone(), masked(value))));
        }
    }
    facts
}

pub(crate) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<JobDetail>, Failure> {
    blocking(move || {
        let id = resolve(&app, &name, &caller)?;
        detail(&app, id).map(Json)
    })
    .await
}

pub(crate) async fn timeline(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Vec<TimelineEntry>>, Failure> {
    blocking(move || {
        let id = resolve(&app, &name, &caller)?;
        Ok(Json(timeline_of(&moments(&app, id, 0)?, &app.names()?)))
    })
    .await
}

/// Which points of a series.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SeriesQuery {
    after: Option<u64>,
    max: Option<usize>,
}

pub(crate) async fn series(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Values(query): Values<SeriesQuery>,
) -> Result<Json<Vec<NumberedPoint>>, Failure> {
    blocking(move || {
        let id = resolve(&app, &name, &caller)?;
        let max = query.max.unwrap_or(POINTS).clamp(1, MAX_POINTS);
        let series = app.parts.telemetry.points(id, query.after.unwrap_or(0), max);
        let series = series.map_err(|e| Failure::io("the series cannot be read", &e))?;
        let numbered = |p: &SeriesPoint| NumberedPoint { number: p.number, point: view::point(&p.point) };
        Ok(Json(series.points.iter().map(numbered).collect()))
    })
    .await
}

pub(crate) async fn act(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(action): Input<JobAction>,
) -> Result<Json<JobSummary>, Failure> {
    let verb = if action == JobAction::Cancel { Verb::Delete } else { Verb::Update };
    app.needs(&caller, &Right::jobs(verb, Some(namespace_of(Some(&name), &caller)))).await?;
    if let JobAction::Update(JobUpdate { queue: Some(queue), .. }) = &action {
        app.needs(&caller, &Right::use_queue(queue)).await?;
    }
    blocking(move || {
        let job = resolve(&app, &name, &caller)?;
        let by = caller.user;
        let input = match action {
            JobAction::Cancel => EngineInput::Cancel { job, by },
            JobAction::Suspend { reason } => {
                let name = name.clone();
                if matches!(seen(&app, job)?.job.phase, Phase::Stopping(_)) {
                    return Err(Failure::conflict("stopping", format!("`{name}` is being stopped already"))
                        .help(format!("`aviflow show {name}` says why and how it goes on")));
                }
                EngineInput::Suspend { job, by, reason }
            }
            JobAction::Hold { reason } => EngineInput::Hold { job, by, reason },
            JobAction::Resume { reason } | JobAction::Release { reason } => EngineInput::Release { job, by, reason },
            JobAction::Update(update) => {
                let change = to_change(&update, &app.parts.defaults.priorities).map_err(Failure::of)?;
                EngineInput::Update { job, change, by, reason: update.reason }
            }
        };
        let answer = app.parts.engine.ask(input)?;
        match answer {
            Answer::Refused(refusal) if refusal != Refusal::NoSuchJob => Err(refusal.into()),
            Answer::Refused(refusal) => {
                let ended = seen(&app, job)?.job;
                let help =
                    format!("`{}` is {}; `aviflow rerun` makes a new job of it", ended.key.name, ended.phase.name());
                Err(Failure::from(refusal).help(help))
            }
            Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } | Answer::Submitted(_) => {
                Ok(Json(seen(&app, job)?.summary(&app)))
            }
        }
    })
    .await
}
