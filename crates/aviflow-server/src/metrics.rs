//! `/metrics`: the control plane and its jobs in the Prometheus text format.
//!
//! The engine is asked once, and only for what it alone knows; the text is made outside of its thread. What nobody
//! knows has no sample.

pub(crate) mod families;
mod gather;
mod process;

use crate::app::{App, blocking};
use crate::error::Failure;
use crate::notified::Outcome;
use crate::watched::{Gang, Holders, TOKENS_PER_SECOND, mfu, reported};
use aviflow_core::ledger::GpuState;
use aviflow_core::model::EvictionCause;
use aviflow_core::time::Time;
use aviflow_engine::meter::{Histogram, Measured, RestartCause};
use aviflow_engine::telemetry::Point;
use aviflow_metrics::exposition::{CONTENT_TYPE, Exposition, Family};
use aviflow_metrics::gpu::{Sample, rounded};
use axum::extract::State;
use axum::http::{HeaderName, header};
use families as f;
use gather::{CONDITIONS, Facts, PHASES};
use std::sync::Arc;

/// The text and its media type.
type Text = ([(HeaderName, &'static str); 1], String);

pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Text, Failure> {
    let text = blocking(move || Ok(text(&app))).await?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text))
}

/// How many gangs there are, as it is asked of the engine.
#[cfg(test)]
pub(crate) fn gathered(view: &aviflow_engine::driver::View<'_>) -> usize {
    Facts::of(view).gangs.len()
}

pub(crate) fn text(app: &App) -> String {
    let agents = app.parts.body.agents();
    // An engine that cannot be asked is itself worth a sample.
    let facts = app.view(Facts::of).ok();
    let jobs = facts.as_ref().map_or(0, |facts| facts.gangs.len());
    let mut out = Exposition::with_capacity((64 << 10) + jobs * (2 << 10));
    platform(app, facts.as_ref(), &mut out);
    lives(&app.parts.engine.meter().measured(), &mut out);
    let connected = agents.iter().filter(|agent| agent.connected).count();
    let mut samples = out.family(&f::AGENTS);
    samples.add(&["connected"], connected as f64);
    samples.add(&["silent"], (agents.len() - connected) as f64);
    telemetry(app, &mut out);
    if let Some(facts) = &facts {
        pool(facts, &mut out);
        let holders = Holders::new(app, agents);
        gangs(&facts.gangs.iter().map(|gang| Row::of(app, &holders, gang)).collect::<Vec<_>>(), &mut out);
    }
    out.finish()
}

fn platform(app: &App, facts: Option<&Facts>, out: &mut Exposition) {
    let info = &app.parts.info;
    out.family(&f::BUILD).add(&[&info.version, app.parts.body.name()], 1.0);
    out.family(&f::ENGINE).add(&[], f64::from(u8::from(facts.is_some())));
    out.family(&f::START).add(&[], info.started as f64 / 1000.0);
    let process = process::read();
    out.family(&f::CPU).add_if(&[], process.cpu_seconds);
    out.family(&f::MEMORY).add_if(&[], process.resident_bytes);
    out.family(&f::FILES).add_if(&[], process.open_files);
    out.family(&f::STORE_SIZE).add_if(&[], app.parts.reader.size().ok().map(|bytes| bytes as f64));
    if let Some(facts) = facts {
        out.family(&f::COMMITS).add(&[], facts.commits as f64);
        out.family(&f::PAUSED).add(&[], f64::from(u8::from(facts.paused)));
    }
}

/// What happened to jobs and how long turns took, since this process began.
fn lives(measured: &Measured, out: &mut Exposition) {
    out.family(&f::STORE_FAILURES).add(&[], measured.store_failures as f64);
    histogram(out, &f::TURN, [(&[][..], &measured.turns)]);
    histogram(out, &f::PLAN, [(&[][..], &measured.plans)]);
    let classes: Vec<(String, &Histogram)> =
        measured.waits.iter().map(|(class, waits)| (gpus_of(*class), waits)).collect();
    let labels: Vec<[&str; 1]> = classes.iter().map(|(name, _)| [name.as_str()]).collect();
    histogram(out, &f::WAITS, labels.iter().zip(&classes).map(|(label, (_, waits))| (&label[..], *waits)));
    let mut samples = out.family(&f::RESTARTS);
    for cause in RestartCause::ALL {
        samples.add(&[cause.name()], measured.restarts.get(&cause).copied().unwrap_or(0) as f64);
    }
    let mut samples = out.family(&f::PREEMPTIONS);
    for cause in [EvictionCause::Reclaim, EvictionCause::Priority, EvictionCause::Turn, EvictionCause::Drain] {
        samples.add(&[cause.name()], measured.preemptions.get(&cause).copied().unwrap_or(0) as f64);
    }
    let mut samples = out.family(&f::ENDED);
    for ((queue, phase), n) in &measured.ended {
        samples.add(&[queue, phase], *n as f64);
    }
}

fn histogram<'a>(out: &mut Exposition, family: &Family, all: impl IntoIterator<Item = (&'a [&'a str], &'a Histogram)>) {
    let mut samples = out.family(family);
    for (labels, Histogram { bounds, counts, sum }) in all {
        let bounds: Vec<f64> = bounds.iter().map(|micros| *micros as f64 / 1e6).collect();
        samples.histogram(labels, &bounds, counts, *sum as f64 / 1e6);
    }
}

/// A size class as the GPUs that it has: `1`, `2-3`, `4-7`, ….
fn gpus_of(class: u32) -> String {
    match class {
        0 => "1".to_owned(),
        _ => {
            let first = 1u64 << class.min(32);
            format!("{first}-{}", 2 * first - 1)
        }
    }
}

fn telemetry(app: &App, out: &mut Exposition) {
    let telemetry = &app.parts.telemetry;
    out.family(&f::DROPPED_LOGS).add(&[], telemetry.missing_bytes() as f64);
    out.family(&f::DROPPED_POINTS).add(&[], telemetry.dropped_points() as f64);
    out.family(&f::DROPPED_NOTICES).add(&[], app.parts.engine.feed().dropped() as f64);
    let mut samples = out.family(&f::NOTIFICATIONS);
    for outcome in Outcome::ALL {
        samples.add(&[outcome.name()], app.parts.notified.of(outcome) as f64);
    }
    let requests = app.parts.body.requests();
    if !requests.is_empty() {
        let mut samples = out.family(&f::APISERVER);
        requests.iter().for_each(|(code, n)| samples.add(&[code], *n as f64));
    }
    let board = &app.parts.gpus;
    let sources = board.sources(aviflow_engine::driver::wall_clock().0);
    let mut samples = out.family(&f::SOURCES);
    samples.add(&["fresh"], sources.fresh as f64);
    samples.add(&["stale"], sources.stale as f64);
    let mut samples = out.family(&f::XIDS);
    for ((node, xid), n) in board.xids() {
        samples.add(&[&node, &xid.to_string()], n as f64);
    }
}

fn pool(facts: &Facts, out: &mut Exposition) {
    let mut samples = out.family(&f::JOBS);
    for (queue, phases) in &facts.jobs {
        for (phase, n) in PHASES.iter().zip(phases) {
            samples.add(&[queue, phase], f64::from(*n));
        }
    }
    let mut samples = out.family(&f::GPUS);
    for ((pool, gpu_type), states) in &facts.gpus {
        // All states, so that a series that falls to 0 does not vanish.
        for state in GpuState::ALL {
            samples.add(&[pool, gpu_type, state.name()], f64::from(states.get(&state).copied().unwrap_or(0)));
        }
    }
    let mut samples = out.family(&f::NODES);
    for ((pool, gpu_type), conditions) in &facts.nodes {
        for (condition, n) in CONDITIONS.iter().zip(conditions) {
            samples.add(&[pool, gpu_type, condition], f64::from(*n));
        }
    }
    let mut quotas = |family: &Family, value: fn(&gather::Quota) -> Option<u32>| {
        let mut samples = out.family(family);
        for ((queue, gpu_type), quota) in &facts.quotas {
            samples.add_if(&[queue, gpu_type], value(quota).map(f64::from));
        }
    };
    quotas(&f::GUARANTEE, |q| Some(q.guarantee));
    quotas(&f::LIMIT, |q| q.limit);
    quotas(&f::USED, |q| Some(q.used));
    quotas(&f::BORROWED, |q| Some(q.borrowed));
    quotas(&f::LENT, |q| Some(q.lent));
    let mut samples = out.family(&f::WAITING);
    for (queue, gpus) in &facts.waiting {
        samples.add(&[queue], f64::from(*gpus));
    }
}

/// A gang with what is known of it.
struct Row<'a> {
    gang: &'a Gang,
    attempt: String,
    progress: Option<Point>,
    step_ms: Option<f64>,
    gpus: Vec<Sample>,
    mean: Sample,
}

impl<'a> Row<'a> {
    fn of(app: &App, holders: &Holders, gang: &'a Gang) -> Row<'a> {
        let gpus = holders.gang(app, gang);
        Row {
            gang,
            attempt: gang.attempt.to_string(),
            progress: gang.progress(app),
            step_ms: app.parts.telemetry.step_ms(gang.job, gang.attempt),
            mean: Sample::mean(&gpus),
            gpus,
        }
    }

    fn reported(&self, names: &[&str]) -> Option<f64> {
        reported(self.progress.as_ref()?, names)
    }
}

fn gangs(rows: &[Row<'_>], out: &mut Exposition) {
    let mut samples = out.family(&f::INFO);
    for Row { gang, attempt, .. } in rows {
        samples.add(&[&gang.namespace, &gang.name, attempt, &gang.queue, gang.phase], 1.0);
    }
    let mut each = |family: &Family, value: &dyn Fn(&Row<'_>) -> Option<f64>| {
        let mut samples = out.family(family);
        for row in rows {
            samples.add_if(&[&row.gang.namespace, &row.gang.name, &row.attempt], value(row));
        }
    };
    let seconds = |at: Time| at.0 as f64 / 1000.0;
    each(&f::JOB_GPUS, &|row| Some(f64::from(row.gang.gpus)));
    each(&f::RUNNING_SINCE, &|row| row.gang.up.map(seconds));
    each(&f::PROGRESS, &|row| row.progress.as_ref().map(|point| seconds(point.at)));
    each(&f::CHECKPOINT, &|row| row.gang.checkpoint.map(seconds));
    each(&f::STEP, &|row| row.progress.as_ref().map(|point| point.step as f64));
    each(&f::STEPS, &|row| row.progress.as_ref()?.total_steps.map(|steps| steps as f64));
    each(&f::STEP_TIME, &|row| row.step_ms.map(|ms| ms / 1000.0));
    each(&f::LOSS, &|row| row.reported(&["loss"]));
    each(&f::TOKENS, &|row| row.reported(&TOKENS_PER_SECOND));
    each(&f::JOB_MFU, &|row| row.progress.as_ref().and_then(mfu));
    each(&f::OBSERVED, &|row| Some(row.gpus.len() as f64));
    each(&f::UTILIZATION, &|row| row.mean.utilization.map(rounded));
    each(&f::SM_ACTIVE, &|row| row.mean.sm_active.map(rounded));
    each(&f::TENSOR_ACTIVE, &|row| row.mean.tensor_active.map(rounded));
    each(&f::DRAM_ACTIVE, &|row| row.mean.dram_active.map(rounded));
    each(&f::JOB_MEMORY, &|row| Sample::sum(&row.gpus, |s| s.memory_used));
    each(&f::POWER, &|row| Sample::sum(&row.gpus, |s| s.power));
}
