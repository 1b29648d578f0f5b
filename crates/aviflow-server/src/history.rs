//! What was submitted and how long it ran, as `aviflow simulate` replays it.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::params::Values;
use crate::usage::period;
use aviflow_api::rest::{JobHistory, PastJob};
use aviflow_core::model::Job;
use aviflow_core::time::Time;
use aviflow_store::read::{Filter, Which};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::sync::Arc;

/// Jobs that are read at once.
const PAGE: u32 = 1000;

/// Which period.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct HistoryQuery {
    from: Option<String>,
    to: Option<String>,
}

pub(crate) async fn history(
    State(app): State<Arc<App>>,
    caller: Caller,
    Values(query): Values<HistoryQuery>,
) -> Result<Json<JobHistory>, Failure> {
    let visible = app.visible(&caller, None).await?;
    blocking(move || read(&app, &query, visible).map(Json)).await
}

/// Of some namespaces, or of all.
fn read(app: &App, query: &HistoryQuery, namespaces: Option<Vec<String>>) -> Result<JobHistory, Failure> {
    let now = app.view(|view| view.now)?;
    let (from, to) = period(&query.from, &query.to, now)?;
    let within = move |job: &Job| from <= job.submitted && job.submitted < to;
    let mut history = JobHistory { from: from.0, to: to.0, jobs: Vec::new(), unfinished: 0, never_ran: 0 };
    // The live ones first, by number: whoever ends in between is counted twice rather than lost, and found out below.
    let seen = namespaces.clone();
    let sees = move |job: &Job| seen.as_ref().is_none_or(|seen| seen.contains(&job.key.namespace));
    let live: Vec<_> =
        app.view(move |view| view.snapshot.jobs.values().filter(|j| within(j) && sees(j)).map(|j| j.id).collect())?;
    history.unfinished = live.len() as u64;
    let mut after = None;
    loop {
        let filter =
            Filter { which: Which::Ended, namespaces: namespaces.clone(), after, limit: PAGE, ..Filter::default() };
        let page = app.parts.reader.jobs(&filter)?;
        let Some(last) = page.last() else { break };
        // Newest first: numbers are in the order of submission.
        let over = page.len() < PAGE as usize || last.job.submitted < from;
        after = Some(last.job.id);
        for kept in page.iter().filter(|kept| within(&kept.job)) {
            history.unfinished -= u64::from(live.binary_search(&kept.job.id).is_ok());
            match kept.job.attempts {
                0 => history.never_ran += 1,
                _ => history.jobs.push(past(&kept.job)),
            }
        }
        if over {
            break;
        }
    }
    history.jobs.reverse();
    Ok(history)
}

fn past(job: &Job) -> PastJob {
    let Time(submitted) = job.submitted;
    PastJob {
        name: job.key.name.clone(),
        submitted,
        user: job.user.clone(),
        queue: job.request.queue.clone(),
        priority: job.request.priority,
        nodes: job.request.nodes.min,
        gpus_per_node: job.request.gpus_per_node,
        gpu_type: job.request.gpu_types.first().cloned(),
        ran: job.ran.0,
        time_limit: job.request.time_limit.map(|limit| limit.0),
        preemptible: job.request.preemptible,
        require: job.request.topology.require.clone(),
    }
}
