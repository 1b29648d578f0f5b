//! `ls` and `show`.

use super::App;
use crate::cli::{LsArgs, ShowArgs};
use crate::client::JobFilter;
use crate::error::Result;
use crate::output::{note, now, print};
use crate::render::{job, jobs, waiting};
use aviflow_api::rest::JobSummary;
use aviflow_api::yaml::to_yaml;

/// Jobs that ended within this time are recent.
const RECENT: i64 = 24 * 3_600_000;
/// Jobs that ended are looked through up to this number.
const RECENT_JOBS: u32 = 200;

/// `aviflow ls`
pub fn ls(app: &App, args: &LsArgs) -> Result<()> {
    let client = app.client()?;
    let (user, queue, namespace) = (args.user.clone(), args.queue.clone(), app.namespace.clone());
    let filter = JobFilter { user, queue, namespace, ..JobFilter::default() };
    let list = if args.waiting {
        client.jobs(&JobFilter { waiting: true, factors: args.factors, ..filter })?
    } else if args.all {
        client.jobs(&filter)?
    } else {
        let live = client.jobs(&JobFilter { phase: Some("live".into()), ..filter.clone() })?;
        let ended = client.jobs(&JobFilter { phase: Some("ended".into()), limit: Some(RECENT_JOBS), ..filter })?;
        recent(live, ended, now())
    };
    if args.quiet {
        print(&jobs::names(&list));
        return Ok(());
    }
    let empty = list.is_empty() && args.output.format == crate::cli::Format::Table;
    if empty {
        note(
            match (args.waiting, args.all || args.user.is_some() || args.queue.is_some() || app.namespace.is_some()) {
                (true, _) => "no job waits",
                (false, true) => "no such jobs",
                (false, false) => "no jobs; `aviflow run FILE` submits one, `aviflow ls --all` shows older ones",
            },
        );
        return Ok(());
    }
    app.output.answer(args.output.format, &list, |view| match (args.waiting, args.factors) {
        (false, _) => jobs::list(&list, view),
        (true, false) => waiting::list(&list, view),
        (true, true) => format!("{}{}", waiting::list(&list, view), waiting::factors(&list, view)),
    })
}

/// Live jobs, then those that ended lately. A job may have ended between the two answers.
fn recent(live: Vec<JobSummary>, ended: Vec<JobSummary>, now: i64) -> Vec<JobSummary> {
    let ids: std::collections::BTreeSet<u64> = ended.iter().map(|j| j.id).collect();
    let mut list: Vec<JobSummary> = live.into_iter().filter(|j| !ids.contains(&j.id)).collect();
    list.extend(ended.into_iter().filter(|j| j.ended.is_none_or(|at| now - at <= RECENT)));
    list
}

/// `aviflow show`
pub fn show(app: &App, args: &ShowArgs) -> Result<()> {
    let client = app.client()?;
    let detail = client.job(&args.job)?;
    if args.file {
        let spec = serde_json::to_value(&detail.spec).unwrap_or_default();
        print(&to_yaml(&spec));
        return Ok(());
    }
    // Who may not read output sees the rest.
    let wanted = !detail.workers.is_empty() && args.output.format == crate::cli::Format::Table;
    let ranks = if wanted { client.ranks(&args.job).map(|of| of.ranks).unwrap_or_default() } else { Vec::new() };
    app.output.answer(args.output.format, &detail, |view| job::show(&detail, &ranks, view))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples::{self, NOW};

    #[test]
    fn each_job_is_there_once_and_old_ones_are_not() {
        let mut both = samples::running();
        let live = vec![both.clone(), samples::queued()];
        both.phase = "Succeeded".into();
        both.ended = Some(NOW);
        let mut old = samples::failed();
        old.id = 3;
        old.ended = Some(NOW - 2 * RECENT);
        let list = recent(live, vec![both, old], NOW);
        let seen: Vec<(u64, &str)> = list.iter().map(|j| (j.id, j.phase.as_str())).collect();
        assert_eq!(seen, [(8, "Queued"), (7, "Succeeded")]);
    }

    /// What `show --file` prints is a document that can be submitted.
    #[test]
    fn the_printed_document_is_read_as_it_was() {
        let spec = samples::spec();
        let yaml = to_yaml(&serde_json::to_value(&spec).expect("json"));
        match aviflow_api::file::parse_job("again.yaml", yaml.as_bytes(), &aviflow_api::file::Defaults::default()) {
            Ok(parsed) => assert_eq!(parsed.spec, spec),
            Err(errors) => panic!("{errors:?}\n{yaml}"),
        }
    }
}
