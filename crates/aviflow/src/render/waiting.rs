//! Why jobs wait and when they will probably start; what they lost, and what they are promised.

use super::View;
use super::jobs::{gang, name, note};
use super::number::{ago, count, gpu_time, moment, percent, short, until};
use super::style::Styled;
use super::table::{Align, Table};
use aviflow_api::rest::{
    AfterInfo, ClaimInfo, Estimate, EvictionInfo, Factors, JobDetail, JobSummary, MoveInfo, QueueFactor,
};

/// So many names are shown of a list.
const NAMES: usize = 5;

/// `aviflow ls --waiting`: what waits, in the order of the plan, and why.
pub fn list(jobs: &[JobSummary], view: View) -> String {
    let mut table = Table::new(&[
        ("place", Align::Right),
        ("job", Align::Left),
        ("queue", Align::Left),
        ("priority", Align::Left),
        ("user", Align::Left),
        ("gpus", Align::Right),
        ("waits", Align::Right),
        ("starts", Align::Left),
        ("because", Align::Left),
    ]);
    for job in jobs {
        let estimate = job.verdict.as_ref().and_then(|v| v.estimate);
        table.row([
            job.verdict.as_ref().map_or(String::new(), |v| v.place.to_string()).into(),
            name(job).into(),
            job.queue.as_str().into(),
            job.priority.as_str().into(),
            job.user.as_str().into(),
            gang(job).into(),
            short((view.now - job.submitted).max(0)).into(),
            estimate.map_or(String::new(), |e| short_estimate(e, view.now)).into(),
            note(job).into(),
        ]);
    }
    table.render(view.width, view.style)
}

/// `aviflow ls --waiting --factors`: what the places follow from.
pub fn factors(jobs: &[JobSummary], view: View) -> String {
    let mut table = Table::new(&[
        ("place", Align::Right),
        ("job", Align::Left),
        ("queues", Align::Left),
        ("priority", Align::Right),
        ("level", Align::Right),
        ("user's use", Align::Right),
        ("submitted", Align::Right),
    ]);
    let mut any = false;
    for job in jobs {
        let Some((place, f)) = job.verdict.as_ref().and_then(|v| Some((v.place, v.factors.as_ref()?))) else {
            continue;
        };
        any = true;
        table.row([
            place.to_string().into(),
            name(job).into(),
            f.queues.iter().map(queue_factor).collect::<Vec<_>>().join(" / ").into(),
            f.priority.to_string().into(),
            f.level.map_or(String::new(), |l| l.to_string()).into(),
            f.user_use.map_or(String::new(), gpu_time).into(),
            ago(f.submitted, view.now).into(),
        ]);
    }
    if !any {
        return String::new();
    }
    let heading = "What the places follow from, compared from left to right".style(view.style, "1");
    let legend = "A queue that uses less of its guarantee goes first, then one with less use by its weight.";
    format!("\n{heading}\n{}{}\n", table.render(view.width, view.style), legend.style(view.style, "2"))
}

/// `nlp 50.0% of its guarantee`, or `nlp 12.0h of use by its weight`.
fn queue_factor(f: &QueueFactor) -> String {
    match f.guarantee_used {
        Some(used) => format!("{} {} of its guarantee", f.queue, percent(used, 1_000_000)),
        None => format!("{} {} of use by its weight", f.queue, gpu_time(f.use_over_weight)),
    }
}

/// `in 20m to 1h`.
fn short_estimate(estimate: Estimate, now: i64) -> String {
    let (early, late) = (until(estimate.p50, now), until(estimate.p90, now));
    if early == late { early } else { format!("{early} to {}", late.trim_start_matches("in ")) }
}

/// `probably in 20m (12:20 UTC), nine times in ten before 13:30 UTC`.
pub fn estimate(estimate: Estimate, now: i64) -> String {
    let (early, late) = (until(estimate.p50, now), moment(estimate.p90, now));
    let at = moment(estimate.p50, now);
    let late = if at == late { String::new() } else { format!(", nine times in ten before {late}") };
    format!("probably {early} ({at}){late}")
}

/// The first names of a list, and how many more there are.
pub fn some(names: &[String]) -> String {
    let shown = names.iter().take(NAMES).map(|name| bare(name)).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The name as a person would type it.
pub fn bare(name: &str) -> &str {
    name.strip_prefix("default/").unwrap_or(name)
}

/// By what right somebody leaves for another.
pub fn cause(word: &str) -> &str {
    match word {
        "reclaim" => "a guarantee is taken back",
        "priority" => "higher priority",
        "turn" => "jobs take turns",
        "drain" => "the node is drained",
        other => other,
    }
}

/// For whom, and by what right.
fn for_whom(beneficiary: Option<&String>, word: &str) -> String {
    match beneficiary {
        Some(job) => format!("for {}: {}", bare(job), cause(word)),
        None => cause(word).to_owned(),
    }
}

/// What `show` says of a job's waiting, its promises and its losses, name and value.
pub fn details(job: &JobDetail, view: View) -> Vec<(&'static str, String)> {
    let mut out = Vec::new();
    if let Some(v) = &job.summary.verdict {
        out.push(("in front", some(&v.front)));
        out.push(("starts", v.estimate.map(|e| estimate(e, view.now)).unwrap_or_default()));
        out.push(("sooner", v.sooner.clone().unwrap_or_default()));
        out.push(("place by", v.factors.as_ref().map(|f| one(f, view)).unwrap_or_default()));
    }
    out.push(("held by", job.held.clone().unwrap_or_default()));
    out.push(("after", job.after.iter().map(after).collect::<Vec<_>>().join("\n")));
    out.push(("promised", job.claim.as_ref().map(|c| claim(c, view)).unwrap_or_default()));
    out.push(("must leave", job.eviction.as_ref().map(|e| eviction(e, view)).unwrap_or_default()));
    if let Some(t) = &job.turned_out {
        out.push(("suspended", format!("{} {}", ago(t.at, view.now), for_whom(t.beneficiary.as_ref(), &t.cause))));
    }
    if let Some(at) = job.expected_back {
        out.push(("back", format!("probably {} ({})", until(at, view.now), moment(at, view.now))));
    }
    out
}

/// What a place follows from, a line each.
fn one(f: &Factors, view: View) -> String {
    let mut lines: Vec<String> = f.queues.iter().map(|q| format!("queue {}", queue_factor(q))).collect();
    lines.push(format!("priority {}", f.priority));
    lines.extend(f.level.map(|level| format!("level {level}")));
    lines.extend(f.user_use.map(|used| format!("its user's use {}", gpu_time(used))));
    lines.push(format!("submitted {}", ago(f.submitted, view.now)));
    lines.join(", ")
}

/// `prepare to succeed: it waits`.
fn after(a: &AfterInfo) -> String {
    let how = match a.on.as_str() {
        "succeeded" => "to succeed",
        "failed" => "to fail",
        _ => "to end",
    };
    let state = match a.state.as_str() {
        "met" => "it did",
        "failed" => "it ended otherwise",
        _ => "not yet",
    };
    format!("{} {how}: {state}", bare(&a.job))
}

fn claim(c: &ClaimInfo, view: View) -> String {
    let on = c.on.join(", ");
    let leaving = if c.victims.is_empty() { String::new() } else { format!("\nleaving: {}", some(&c.victims)) };
    let gpus = count(c.gpus.into(), "GPU");
    format!("{gpus} on {on}, {}: {}{leaving}", ago(c.since, view.now), cause(&c.cause))
}

fn eviction(e: &EvictionInfo, view: View) -> String {
    let whom = for_whom(e.beneficiary.as_ref(), &e.cause);
    let (latest, at) = (until(e.deadline, view.now), moment(e.deadline, view.now));
    format!("after its next checkpoint, at the latest {latest} ({at}), {whom}")
}

/// Jobs that would be moved, a line each.
pub fn moves(moves: &[MoveInfo]) -> String {
    let one = |m: &MoveInfo| format!("{} ({}): {}", bare(&m.job), count(m.gpus.into(), "GPU"), cause(&m.cause));
    moves.iter().map(one).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, NOW, view};
    use super::*;

    #[test]
    fn jobs_that_wait() {
        insta::assert_snapshot!(list(&[samples::queued(), samples::building()], view()));
    }

    #[test]
    fn jobs_that_wait_with_estimates_and_factors() {
        let mut never = samples::building();
        never.name = "third".into();
        let jobs = [samples::behind(), never];
        insta::assert_snapshot!(format!("{}{}", list(&jobs, view()), factors(&jobs, view())));
        assert_eq!(factors(&[samples::queued()], view()), "");
    }

    #[test]
    fn a_start_that_is_certain_is_said_once() {
        let minute = Estimate { p50: NOW + 60_000, p90: NOW + 60_000 };
        assert_eq!(estimate(minute, NOW), "probably in 1m (12:01 UTC)");
        assert_eq!(short_estimate(minute, NOW), "in 1m");
    }
}
