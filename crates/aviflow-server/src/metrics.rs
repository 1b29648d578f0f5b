//! A few figures in the Prometheus text format.

use crate::app::{App, blocking};
use crate::error::Failure;
use crate::pool::phases;
use aviflow_core::ledger::GpuState;
use axum::extract::State;
use axum::http::{HeaderName, header};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

/// The text and its media type.
type Text = ([(HeaderName, &'static str); 1], String);

pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Text, Failure> {
    let text = blocking(move || {
        app.view(|view| {
            let mut gpus: BTreeMap<GpuState, u32> = BTreeMap::new();
            for (_, open) in view.snapshot.ledger.iter() {
                *gpus.entry(open.state).or_default() += open.slots.count();
            }
            // All states, so that a series that falls to 0 does not vanish.
            let gpus = GpuState::ALL.into_iter().map(|s| (s.name(), gpus.get(&s).copied().unwrap_or(0)));
            let jobs = phases(view);
            let live = ["Queued", "Starting", "Running", "Suspending", "Stopping"];
            let jobs = live.into_iter().map(|phase| (phase, jobs.get(phase).copied().unwrap_or(0)));
            let mut text = String::new();
            gauge(&mut text, "aviflow_jobs", "Live jobs by phase.", "phase", jobs);
            gauge(&mut text, "aviflow_gpus", "GPUs by ledger state.", "state", gpus);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP aviflow_commits_total Commits of the store.");
            let _ = writeln!(text, "# TYPE aviflow_commits_total counter\naviflow_commits_total {}", view.generation);
            text
        })
    })
    .await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text))
}

fn gauge<'a>(text: &mut String, name: &str, help: &str, label: &str, values: impl Iterator<Item = (&'a str, u32)>) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
    for (value, n) in values {
        let _ = writeln!(text, "{name}{{{label}=\"{value}\"}} {n}");
    }
}
