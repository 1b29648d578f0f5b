//! Aviflow's own format: one job a line, as CSV with a header or as JSON objects.
//!
//! | column | what | if absent |
//! |---|---|---|
//! | `submitted` | seconds since any beginning, or a time such as `2026-03-01T12:00:00Z` | required |
//! | `nodes` | nodes, from 1 | required |
//! | `gpus_per_node` | GPUs on each node, from 1 | required |
//! | `run_s` | seconds it ran for, over all attempts | required |
//! | `name` | the job's name | `job-LINE` |
//! | `user` | who submitted it | `user` |
//! | `queue` | the queue's name | `default` |
//! | `priority` | a whole number; higher goes first | 0 |
//! | `gpu_type` | the accelerator type | any |
//! | `time_limit_s` | its time limit in seconds | none |
//! | `preemptible` | `true` or `false` | `true` |
//! | `require` | the level of the topology of which one domain must hold it | none |
//!
//! An empty cell is an absent value. An unknown column is refused: it may be a misspelt one.

use super::csv::{Rows, quote};
use super::values::Place;
use super::{Trace, TraceJob};
use crate::error::{Error, Result};
use aviflow_core::time::Span;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// The columns in the order in which they are written.
pub const COLUMNS: [&str; 12] = [
    "submitted",
    "name",
    "user",
    "queue",
    "priority",
    "nodes",
    "gpus_per_node",
    "gpu_type",
    "run_s",
    "time_limit_s",
    "preemptible",
    "require",
];

/// The columns without which a job is none.
const REQUIRED: [&str; 4] = ["submitted", "nodes", "gpus_per_node", "run_s"];

pub(super) fn read(file: &str, text: &str) -> Result<Vec<TraceJob>> {
    if text.trim_start_matches('\u{feff}').trim_start().starts_with('{') { lines(file, text) } else { csv(file, text) }
}

fn csv(file: &str, text: &str) -> Result<Vec<TraceJob>> {
    let rows = Rows::new(file, text)?;
    rows.columns(REQUIRED, "aviflow")?;
    let mut order = Vec::new();
    for name in rows.names() {
        order.push(column(file, 1, name)?);
    }
    let mut jobs = Vec::new();
    for row in rows {
        let row = row?;
        let mut cells = [const { String::new() }; COLUMNS.len()];
        for (index, cell) in order.iter().zip(row.cells) {
            cells[*index] = cell;
        }
        jobs.push(job(file, row.line, &cells)?);
    }
    Ok(jobs)
}

fn lines(file: &str, text: &str) -> Result<Vec<TraceJob>> {
    let mut jobs = Vec::new();
    for (number, text) in (1u32..).zip(text.trim_start_matches('\u{feff}').lines()) {
        if text.trim().is_empty() {
            continue;
        }
        let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
            let what = format!("not a JSON object: {e}");
            wrong(file, number, what, "each line is one JSON object, such as {\"submitted\": 0, \"nodes\": 1, …}")
        })?;
        let mut cells = [const { String::new() }; COLUMNS.len()];
        for (name, value) in object {
            cells[column(file, number, &name)?] = match value {
                Value::Null => String::new(),
                Value::String(text) => text,
                Value::Bool(_) | Value::Number(_) => value.to_string(),
                Value::Array(_) | Value::Object(_) => {
                    let what = format!("`{name}` is neither text, a number, true nor false");
                    return Err(wrong(file, number, what, "write one value for each name"));
                }
            };
        }
        jobs.push(job(file, number, &cells)?);
    }
    Ok(jobs)
}

fn wrong(file: &str, line: u32, what: String, help: &str) -> Error {
    Error::Line { file: file.to_owned(), line, what, help: help.to_owned() }
}

fn column(file: &str, line: u32, name: &str) -> Result<usize> {
    COLUMNS.iter().position(|known| *known == name).ok_or_else(|| {
        let help = format!("the format `aviflow` has {}", COLUMNS.join(", "));
        Error::Line { file: file.to_owned(), line, what: format!("`{name}` is no column"), help }
    })
}

fn job(file: &str, line: u32, cells: &[String; COLUMNS.len()]) -> Result<TraceJob> {
    let [submitted, name, user, queue, priority, nodes, gpus, gpu_type, run, limit, preemptible, require] = cells;
    let at = |column| Place { file, line, column };
    let some = |text: &String| Some(text.clone()).filter(|t| !t.is_empty());
    Ok(TraceJob {
        line,
        name: some(name).unwrap_or_else(|| format!("job-{line}")),
        submitted: at("submitted").instant(submitted)?,
        user: some(user).unwrap_or_else(|| "user".to_owned()),
        queue: some(queue),
        priority: some(priority).map_or(Ok(0), |text| at("priority").whole(&text))?,
        nodes: at("nodes").count(nodes)?,
        gpus_per_node: at("gpus_per_node").count(gpus)?,
        gpu_type: some(gpu_type),
        run: at("run_s").run(run)?,
        time_limit: some(limit).map(|text| at("time_limit_s").run(&text)).transpose()?,
        preemptible: some(preemptible).map_or(Ok(true), |text| at("preemptible").yes_or_no(&text))?,
        require: some(require),
    })
}

/// The trace as CSV, with every column.
#[must_use]
pub fn write_csv(trace: &Trace) -> String {
    let mut out = COLUMNS.join(",") + "\n";
    for job in &trace.jobs {
        let limit = job.time_limit.map(seconds).unwrap_or_default();
        let _ = writeln!(
            out,
            "{},{},{},{},{},{},{},{},{},{limit},{},{}",
            seconds(Span(job.submitted.0)),
            quote(&job.name),
            quote(&job.user),
            quote(job.queue.as_deref().unwrap_or_default()),
            job.priority,
            job.nodes,
            job.gpus_per_node,
            quote(job.gpu_type.as_deref().unwrap_or_default()),
            seconds(job.run),
            job.preemptible,
            quote(job.require.as_deref().unwrap_or_default()),
        );
    }
    out
}

/// The trace as JSON objects, one a line; what a job does not have is left out.
#[must_use]
pub fn write_jsonl(trace: &Trace) -> String {
    let mut out = String::new();
    for job in &trace.jobs {
        let number = |span: Span| span.0 as f64 / 1000.0;
        let mut line = json!({
            "submitted": number(Span(job.submitted.0)), "name": job.name, "user": job.user, "queue": job.queue,
            "priority": job.priority, "nodes": job.nodes, "gpus_per_node": job.gpus_per_node,
            "gpu_type": job.gpu_type, "run_s": number(job.run), "time_limit_s": job.time_limit.map(number),
            "preemptible": job.preemptible, "require": job.require,
        });
        if let Some(object) = line.as_object_mut() {
            object.retain(|_, value| !value.is_null());
        }
        let _ = writeln!(out, "{line}");
    }
    out
}

/// Seconds with as many decimals as are needed.
fn seconds(span: Span) -> String {
    let (whole, rest) = (span.0.div_euclid(1000), span.0.rem_euclid(1000));
    if rest == 0 { whole.to_string() } else { format!("{whole}.{rest:03}").trim_end_matches('0').to_owned() }
}
