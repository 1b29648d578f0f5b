//! What would happen to a submission.

use super::job::{Pairs, command};
use super::style::Styled;
use super::{View, jobs, waiting};
use aviflow_api::rest::PlanAnswer;
use aviflow_api::spec::Provenance;

/// `aviflow plan`.
pub fn plan(answer: &PlanAnswer, provenance: &Provenance, view: View) -> String {
    let spec = &answer.spec;
    let never = answer.verdict.as_ref().is_some_and(|v| v.constraint.kind == "never");
    let (word, colour) = match (answer.starts_now, never) {
        (true, _) => ("would start now", "32"),
        (false, false) => ("would wait", "33"),
        (false, true) => ("would be refused", "31"),
    };
    let mut out = format!("{} {}\n", answer.name.style(view.style, "1"), word.style(view.style, colour));
    let mut pairs = Pairs::default();
    if let Some(verdict) = &answer.verdict {
        pairs.put("because", jobs::reason(verdict));
        if !never {
            pairs.put("place", format!("{} of {}", verdict.place, verdict.waiting));
            pairs.put("in front", waiting::some(&verdict.front));
            let starts = verdict.estimate.map(|e| waiting::estimate(e, view.now));
            pairs.put("starts", starts.unwrap_or_default());
        }
        pairs.put("sooner", verdict.sooner.clone().unwrap_or_default());
    }
    pairs.put("moves", waiting::moves(&answer.moves));
    pairs.put("on", answer.on.join(", "));
    let nodes = if spec.nodes.min == spec.nodes.max {
        spec.nodes.min.to_string()
    } else {
        format!("{} to {}", spec.nodes.min, spec.nodes.max)
    };
    let types = if spec.gpu_type.is_empty() { String::new() } else { format!(", {}", spec.gpu_type.join(" or ")) };
    pairs.put("asks for", format!("{nodes} × {} GPUs{types}", spec.gpus_per_node));
    pairs.put("queue", format!("{}, priority {}", spec.queue, spec.priority));
    let ready = if answer.environment_ready { "ready" } else { "will be built first" };
    if let Some(environment) = &provenance.environment {
        pairs.put("environment", format!("{}@{}, {ready}", environment.name, environment.version));
    }
    if let Some(lock) = spec.requirements.as_ref().filter(|_| provenance.layer.is_some()) {
        pairs.put("requirements", format!("{lock}, {ready}"));
    }
    if let Some(code) = &provenance.code {
        pairs.put(
            "code",
            format!("{} in {}", super::number::bytes(code.bytes), super::number::count(code.files, "file")),
        );
    }
    pairs.put("run", command(&spec.run));
    out.push_str(&pairs.render(view));
    out
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, view};
    use super::*;
    use aviflow_api::rest::MoveInfo;

    #[test]
    fn a_plan_that_waits_and_one_that_starts() {
        let detail = samples::detail(samples::queued());
        let mut answer = PlanAnswer {
            name: "tiny-gpt-3".into(),
            starts_now: false,
            on: vec![],
            verdict: samples::queued().verdict,
            moves: vec![],
            environment_ready: false,
            spec: detail.spec,
        };
        let waits = plan(&answer, &detail.provenance, view());
        answer.verdict = None;
        answer.starts_now = true;
        answer.environment_ready = true;
        answer.on = vec!["local-0".into(), "local-1".into()];
        insta::assert_snapshot!(format!("{waits}\n{}", plan(&answer, &detail.provenance, view())));
    }

    #[test]
    fn a_plan_that_moves_others() {
        let move_of = |job: &str, cause: &str, gpus| MoveInfo { job: job.into(), cause: cause.into(), gpus };
        let detail = samples::detail(samples::behind());
        let answer = PlanAnswer {
            name: "tiny-gpt-3".into(),
            starts_now: false,
            on: vec![],
            verdict: samples::behind().verdict,
            moves: vec![move_of("default/tiny-gpt", "reclaim", 16), move_of("nlp/one", "turn", 1)],
            environment_ready: true,
            spec: detail.spec,
        };
        insta::assert_snapshot!(plan(&answer, &detail.provenance, view()));
    }
}
