//! Lists of jobs.

use super::View;
use super::number::{ago, short};
use super::style;
use super::table::{Align, Cell, Table};
use aviflow_api::rest::{JobSummary, ProgressPoint};

/// The list for people.
pub fn list(jobs: &[JobSummary], view: View) -> String {
    let mut table = Table::new(&[
        ("job", Align::Left),
        ("phase", Align::Left),
        ("queue", Align::Left),
        ("user", Align::Left),
        ("gpus", Align::Right),
        ("submitted", Align::Right),
        ("ran", Align::Right),
        ("step", Align::Right),
        ("note", Align::Left),
    ]);
    for job in jobs {
        table.row([
            name(job).into(),
            Cell::coloured(&job.phase, style::phase(&job.phase)),
            job.queue.as_str().into(),
            job.user.as_str().into(),
            gang(job).into(),
            ago(job.submitted, view.now).into(),
            if job.ran > 0 { short(job.ran).into() } else { "".into() },
            job.progress.as_ref().map_or(String::new(), step).into(),
            note(job).into(),
        ]);
    }
    table.render(view.width, view.style)
}

/// Names alone, for other commands. With the namespace, as a bare name means the latest job of a document.
pub fn names(jobs: &[JobSummary]) -> String {
    jobs.iter().map(|j| format!("{}/{}\n", j.namespace, j.name)).collect()
}

/// The name as a person would type it: without the namespace where that is the usual one.
pub fn name(job: &JobSummary) -> String {
    if job.namespace == "default" { job.name.clone() } else { format!("{}/{}", job.namespace, job.name) }
}

/// `2x8`, or `8` on one node.
pub fn gang(job: &JobSummary) -> String {
    if job.nodes == 1 { job.gpus_per_node.to_string() } else { format!("{}x{}", job.nodes, job.gpus_per_node) }
}

/// `120/400`.
pub fn step(point: &ProgressPoint) -> String {
    match point.total_steps {
        Some(total) => format!("{}/{total}", point.step),
        None => point.step.to_string(),
    }
}

/// Why it waits, why it failed, or where it runs.
pub fn note(job: &JobSummary) -> String {
    match (&job.verdict, &job.failure) {
        (Some(verdict), _) => reason(verdict),
        (None, Some(failure)) => failure.clone(),
        (None, None) => job.on.join(","),
    }
}

/// Why it waits; while its environment is built, how far that is.
pub fn reason(verdict: &aviflow_api::rest::Verdict) -> String {
    match &verdict.build {
        Some(build) => format!("preparing {}", build_text(build)),
        None => verdict.reason.clone(),
    }
}

/// `jax-cpu@1: installing jaxlib 0.7.2 (3 of 7)`.
pub fn build_text(build: &aviflow_api::rest::Build) -> String {
    match build.total {
        0 => format!("{}: {}", build.name, build.step),
        total => format!("{}: {} ({} of {total})", build.name, build.step, build.done),
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, view};
    use super::*;

    #[test]
    fn jobs_in_a_list() {
        let jobs = [samples::running(), samples::queued(), samples::failed()];
        insta::assert_snapshot!(list(&jobs, view()));
    }

    #[test]
    fn names_mean_exactly_one_job() {
        let mut other = samples::queued();
        other.namespace = "nlp".into();
        assert_eq!(names(&[samples::running(), other]), "default/tiny-gpt-2\nnlp/big-sft\n");
    }
}
