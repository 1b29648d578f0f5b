//! What `run` says at the end: how it ended, why, what it cost, what to do next.

use super::job::{Pairs, attempts, gpu_states, last_lines, results, times};
use super::style::{self, Styled};
use super::{View, jobs};
use aviflow_api::rest::JobDetail;

/// The summary of a job that has ended.
pub fn summary(job: &JobDetail, view: View) -> String {
    let s = &job.summary;
    let name = jobs::name(s);
    let code = match s.exit_code {
        Some(code) if code != 0 => format!(", exit code {code}"),
        _ => String::new(),
    };
    let mut out =
        format!("\n{} {}{code}\n", name.style(view.style, "1"), s.phase.style(view.style, style::phase(&s.phase)));
    let mut pairs = Pairs::default();
    pairs.put("why", s.failure.clone().unwrap_or_default());
    out.push_str(&pairs.render(view));
    out.push_str(&last_lines(job, view));
    let mut pairs = Pairs::default();
    pairs.put("results", results(job));
    pairs.put("time", times(job, view.now));
    pairs.put("attempts", attempts(job));
    pairs.put("GPU time", gpu_states(&job.gpu_time));
    if let Some(checkpoint) = &job.checkpoint {
        pairs.put("checkpoint", format!("step {}\naviflow cp {name}:{} .", checkpoint.step, checkpoint.path));
    }
    let outputs: Vec<String> = job.spec.outputs.iter().map(|path| format!("aviflow cp {name}:{path} .")).collect();
    pairs.put("outputs", outputs.join("\n"));
    pairs.put("again", format!("aviflow rerun {name}"));
    out.push_str(&pairs.render(view));
    out
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, NOW, view};
    use super::*;

    #[test]
    fn success() {
        let mut job = samples::running();
        job.phase = "Succeeded".into();
        job.ended = Some(NOW - 1000);
        job.exit_code = Some(0);
        insta::assert_snapshot!(summary(&samples::detail(job), view()));
    }

    #[test]
    fn failure() {
        let mut detail = samples::detail(samples::failed());
        detail.last_lines = vec!["Traceback (most recent call last):".into(), "\x1b[31mValueError\x1b[0m: no".into()];
        detail.facts.clear();
        detail.checkpoint = None;
        detail.spec.outputs.clear();
        insta::assert_snapshot!(summary(&detail, view()));
    }
}
