//! `cancel` and `suspend`.

use super::App;
use crate::error::{Failure, Result};
use crate::output::print;
use aviflow_api::rest::{JobAction, JobSummary};

/// `aviflow cancel`
pub fn cancel(app: &App, jobs: &[String]) -> Result<()> {
    each(app, jobs, &JobAction::Cancel, |job| match job.phase.as_str() {
        "Cancelled" => "cancelled",
        "Succeeded" | "Failed" => "had ended already:",
        _ => "cancelling",
    })
}

/// `aviflow suspend`
pub fn suspend(app: &App, jobs: &[String]) -> Result<()> {
    each(app, jobs, &JobAction::Suspend { reason: None }, |job| match job.phase.as_str() {
        "Queued" => "suspended",
        _ => "suspending",
    })
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
