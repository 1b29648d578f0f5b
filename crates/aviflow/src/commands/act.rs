//! What is done to jobs: `cancel`, `suspend`, `resume`, `hold`, `release` and `update`.

use super::App;
use crate::cli::{JobsArgs, SuspendArgs, UpdateArgs};
use crate::error::{Failure, Result};
use crate::output::print;
use aviflow_api::duration::Duration;
use aviflow_api::rest::{JobAction, JobSummary, JobUpdate};

/// `aviflow cancel`
pub fn cancel(app: &App, jobs: &[String]) -> Result<()> {
    each(app, jobs, &JobAction::Cancel, |job| match job.phase.as_str() {
        "Cancelled" => "cancelled",
        "Succeeded" | "Failed" => "had ended already:",
        _ => "cancelling",
    })
}

/// `aviflow suspend`
pub fn suspend(app: &App, args: SuspendArgs) -> Result<()> {
    each(app, &args.jobs, &JobAction::Suspend { reason: args.why.reason }, |job| match job.phase.as_str() {
        "Queued" => "suspended",
        _ => "suspending",
    })
}

/// `aviflow resume`
pub fn resume(app: &App, args: JobsArgs) -> Result<()> {
    each(app, &args.jobs, &JobAction::Resume { reason: args.why.reason }, |_| "resumed")
}

/// `aviflow hold`
pub fn hold(app: &App, args: JobsArgs) -> Result<()> {
    each(app, &args.jobs, &JobAction::Hold { reason: args.why.reason }, |_| "held")
}

/// `aviflow release`
pub fn release(app: &App, args: JobsArgs) -> Result<()> {
    each(app, &args.jobs, &JobAction::Release { reason: args.why.reason }, |_| "released")
}

/// `aviflow update`
pub fn update(app: &App, args: UpdateArgs) -> Result<()> {
    let time_limit = args.time_limit.as_deref().map(limit).transpose()?;
    let update = JobUpdate { priority: args.priority, time_limit, queue: args.queue, reason: args.why.reason };
    each(app, &args.jobs, &JobAction::Update(update), |_| "updated")
}

/// A time limit, or none.
fn limit(text: &str) -> Result<Option<Duration>> {
    if text == "none" {
        return Ok(None);
    }
    let limit: Duration = text
        .parse()
        .map_err(|e| Failure::usage(format!("--time-limit: {e}")).help("`--time-limit none` takes the limit away"))?;
    Ok(Some(limit))
}

/// Does it to every job, also where one of them fails, and says what was done to which.
fn each(app: &App, jobs: &[String], action: &JobAction, word: impl Fn(&JobSummary) -> &'static str) -> Result<()> {
    let client = app.client()?;
    let mut failed: Vec<Failure> = Vec::new();
    for job in jobs {
        match client.act(job, action) {
            Ok(job) => print(&format!("{} {}/{} on {}\n", word(&job), job.namespace, job.name, client.context())),
            Err(failure) => failed.push(failure),
        }
    }
    let Some(last) = failed.pop() else { return Ok(()) };
    for failure in &failed {
        eprint!("{}", failure.render(app.output.error_style));
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_may_be_none() {
        assert_eq!(limit("none"), Ok(None));
        assert_eq!(limit("2h").map(|l| l.map(|d| d.0.0)), Ok(Some(7_200_000)));
        let failure = limit("2").expect_err("no unit");
        assert_eq!(failure.code, crate::error::USAGE);
        assert_eq!(failure.message, "--time-limit: `2` has no unit; write `2s`, `2m` or `2h`");
    }
}
