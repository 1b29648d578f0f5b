//! Lists of jobs. Live ones are what the engine holds; ended ones are read from
//! the store, a page at a time.

use crate::app::App;
use crate::error::Failure;
use crate::params::flag;
use crate::view::{Names, Seen, places};
use aviflow_api::rest::{JobList, JobSummary};
use aviflow_core::model::{Job, JobId};
use aviflow_core::schedule;
use aviflow_store::read::{Filter, Which};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

const PHASES: [&str; 8] =
    ["Queued", "Starting", "Running", "Suspending", "Stopping", "Succeeded", "Failed", "Cancelled"];

/// The phases of jobs that ended.
const ENDED: [&str; 3] = ["Succeeded", "Failed", "Cancelled"];

/// Jobs of a page, where the client does not say.
const PAGE: u32 = 100;

/// Jobs of a page at most.
const MAX_PAGE: u32 = 1000;

/// What a list has.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ListQuery {
    /// With the list of waiting jobs: what their places follow from.
    #[serde(default, deserialize_with = "flag")]
    pub(crate) factors: Option<bool>,
    pub(crate) phase: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) queue: Option<String>,
    pub(crate) namespace: Option<String>,
    #[serde(default, deserialize_with = "flag")]
    pub(crate) waiting: Option<bool>,
    pub(crate) limit: Option<u32>,
    pub(crate) after: Option<u64>,
}

/// A query that was understood.
#[derive(Clone, Debug)]
struct Wanted {
    live: bool,
    ended: bool,
    phase: Option<&'static str>,
    user: Option<String>,
    queue: Option<String>,
    /// Of these namespaces; of all if none is said.
    namespaces: Option<Vec<String>>,
    limit: usize,
}

impl Wanted {
    fn takes(&self, job: &Job) -> bool {
        self.phase.is_none_or(|p| p == job.phase.name())
            && self.user.as_ref().is_none_or(|u| *u == job.user)
            && self.queue.as_ref().is_none_or(|q| *q == job.request.queue)
            && self.namespaces.as_ref().is_none_or(|seen| seen.contains(&job.key.namespace))
    }
}

fn wanted(query: &ListQuery, namespaces: Option<Vec<String>>) -> Result<Wanted, Failure> {
    let phase = query.phase.as_deref().map(str::to_ascii_lowercase);
    let (live, ended, phase) = match phase.as_deref() {
        None | Some("all") => (true, true, None),
        Some("live") => (true, false, None),
        Some("ended") => (false, true, None),
        Some(name) => match PHASES.into_iter().find(|p| p.eq_ignore_ascii_case(name)) {
            Some(phase) => (!ENDED.contains(&phase), ENDED.contains(&phase), Some(phase)),
            None => {
                return Err(Failure::bad(format!("there is no phase `{name}`"))
                    .help(format!("write `live`, `ended`, or one of: {}", PHASES.join(", "))));
            }
        },
    };
    let limit = query.limit.unwrap_or(PAGE).clamp(1, MAX_PAGE) as usize;
    Ok(Wanted { live, ended, phase, user: query.user.clone(), queue: query.queue.clone(), namespaces, limit })
}

/// Answers a list, of some namespaces or of all.
pub(crate) fn list(app: &App, query: &ListQuery, namespaces: Option<Vec<String>>) -> Result<JobList, Failure> {
    let wanted = wanted(query, namespaces)?;
    if query.waiting == Some(true) {
        return waiting(app, wanted, query.after.unwrap_or(0), query.factors == Some(true));
    }
    // The live ones first: a job that ends in between is then in both and in
    // the list once, as it ended.
    let mut found: BTreeMap<JobId, Seen> = BTreeMap::new();
    if wanted.live {
        found = live(app, wanted.clone(), query.after)?;
    }
    if wanted.ended {
        ended(app, &wanted, query.after, &mut found)?;
    }
    let more = found.len() > wanted.limit;
    let summary = |seen: &Seen| if seen.ended.is_some() { seen.brief(app) } else { seen.summary(app) };
    let jobs: Vec<JobSummary> = found.values().rev().take(wanted.limit).map(summary).collect();
    let next = jobs.last().filter(|_| more).map(|job| job.id);
    Ok(JobList { jobs, next })
}

/// One more than a page of live jobs, older than `after`.
fn live(app: &App, wanted: Wanted, after: Option<u64>) -> Result<BTreeMap<JobId, Seen>, Failure> {
    app.view(move |view| {
        let end = after.map_or(Bound::Unbounded, |id| Bound::Excluded(JobId(id)));
        let jobs = view.snapshot.jobs.range((Bound::Unbounded, end)).rev().map(|(_, job)| job);
        let mut places = places(view.plan);
        jobs.filter(|job| wanted.takes(job))
            .take(wanted.limit + 1)
            .map(|job| (job.id, Seen::live(view, job, places.remove(&job.id))))
            .collect()
    })
}

fn ended(app: &App, wanted: &Wanted, after: Option<u64>, found: &mut BTreeMap<JobId, Seen>) -> Result<(), Failure> {
    let filter = Filter {
        which: Which::Ended,
        phases: wanted.phase.iter().map(|p| (*p).to_owned()).collect(),
        user: wanted.user.clone(),
        queue: wanted.queue.clone(),
        namespaces: wanted.namespaces.clone(),
        after: after.map(JobId),
        limit: u32::try_from(wanted.limit + 1).unwrap_or(MAX_PAGE + 1),
        ..Filter::default()
    };
    let kept = app.parts.reader.jobs(&filter)?;
    let (names, now) = app.view(|view| (Arc::new(Names::of(view.snapshot)), view.now))?;
    for kept in kept {
        let (id, names) = (kept.job.id, names.clone());
        found.insert(id, Seen { job: kept.job, ended: kept.ended, waits: None, names, now });
    }
    Ok(())
}

/// Jobs that wait, in the order of the plan; `after` is a place in it.
fn waiting(app: &App, wanted: Wanted, after: u64, factors: bool) -> Result<JobList, Failure> {
    let limit = wanted.limit;
    let found: Vec<Seen> = app.view(move |view| {
        let mut places = places(view.plan);
        let jobs = view.plan.waiting.iter().skip(usize::try_from(after).unwrap_or(usize::MAX));
        jobs.filter_map(|w| view.snapshot.jobs.get(&w.job))
            .filter(|job| wanted.takes(job))
            .take(wanted.limit + 1)
            .map(|job| Seen::live(view, job, places.remove(&job.id)))
            .collect()
    })?;
    let mut jobs: Vec<JobSummary> = found.iter().take(limit).map(|seen| seen.summary(app)).collect();
    if factors {
        let (snapshot, now) = app.view(|view| (view.snapshot.clone(), view.now))?;
        let ids: Vec<JobId> = jobs.iter().map(|job| JobId(job.id)).collect();
        let mut all = schedule::factors(&snapshot, &ids, now);
        for job in &mut jobs {
            if let Some(verdict) = &mut job.verdict {
                verdict.factors = all.remove(&JobId(job.id)).map(crate::verdict::factors);
            }
        }
    }
    let last = jobs.last().and_then(|job| job.verdict.as_ref()).map(|v| u64::from(v.place));
    Ok(JobList { next: last.filter(|_| found.len() > limit), jobs })
}
