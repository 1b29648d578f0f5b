//! `usage`.

use super::App;
use crate::cli::{Format, UsageArgs};
use crate::client::ago;
use crate::error::{Failure, Result};
use crate::output::{self, now};
use crate::render::number::{count, parse_instant};
use crate::render::usage as render;
use aviflow_api::rest::PastJob;
use aviflow_core::time::{Span, Time};
use aviflow_replay::Trace;
use aviflow_replay::trace::{TraceJob, write_csv, write_jsonl};

/// `aviflow usage`
pub fn usage(app: &App, args: &UsageArgs) -> Result<()> {
    let (from, to) = period(args)?;
    if args.trace {
        return trace(app, args.output.format, from, to);
    }
    let usage = app.client()?.usage(args.by.word(), from, to)?;
    app.output.answer(args.output.format, &usage, |view| render::usage(&usage, view))
}

/// Prints what was submitted and ran, and says what is missing.
fn trace(app: &App, format: Format, from: i64, to: i64) -> Result<()> {
    let history = app.client()?.history(from, to)?;
    for (n, what) in [(history.unfinished, "not ended yet"), (history.never_ran, "ended without ever running")] {
        if n > 0 {
            let have = if n == 1 { "has" } else { "have" };
            output::note(&format!("note: left out: {} that {have} {what}", count(n, "job")));
        }
    }
    let trace = Trace { origin: "history".to_owned(), jobs: history.jobs.iter().map(traced).collect() };
    match format {
        Format::Table => output::print(&write_csv(&trace)),
        // One object a line, which is what a replay reads.
        Format::Json => output::print(&write_jsonl(&trace)),
        Format::Yaml => app.output.answer(format, &history, |_| String::new())?,
    }
    Ok(())
}

fn traced(job: &PastJob) -> TraceJob {
    TraceJob {
        line: 0,
        name: job.name.clone(),
        submitted: Time(job.submitted),
        user: job.user.clone(),
        queue: Some(job.queue.clone()),
        priority: job.priority,
        nodes: job.nodes,
        gpus_per_node: job.gpus_per_node,
        gpu_type: job.gpu_type.clone(),
        run: Span(job.ran),
        time_limit: job.time_limit.map(Span),
        preemptible: job.preemptible,
        require: job.require.clone(),
    }
}

fn period(args: &UsageArgs) -> Result<(i64, i64)> {
    let instant = |text: &String| {
        parse_instant(text).ok_or_else(|| {
            Failure::usage(format!("`{text}` is no time")).help(
                "write a date (2026-03-01), a date and time in UTC (2026-03-01T12:00), or milliseconds since 1970",
            )
        })
    };
    let to = args.to.as_ref().map(instant).transpose()?.unwrap_or_else(now);
    let from = match &args.from {
        Some(from) => instant(from)?,
        None => {
            let span = now() - ago(&args.since)?;
            to - span
        }
    };
    if from >= to {
        return Err(Failure::usage("the period ends before it begins").help("give --from before --to"));
    }
    Ok((from, to))
}
