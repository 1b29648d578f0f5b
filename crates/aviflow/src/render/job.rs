//! Everything about one job.

use super::number::{ago, bytes, count, gpu_time, instant, percent, span, value};
use super::style::{self, Styled, clean};
use super::table::{Align, Table};
use super::{View, jobs, top, waiting};
use aviflow_api::rest::{JobDetail, ProgressPoint, RankInfo};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Names and values below each other.
#[derive(Debug, Default)]
pub struct Pairs(Vec<(String, String)>);

impl Pairs {
    /// Adds one; an empty value says nothing and is left out.
    pub fn put(&mut self, name: impl Into<String>, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            self.0.push((name.into(), value));
        }
    }

    /// The text, indented by two.
    pub fn render(&self, view: View) -> String {
        let width = self.0.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
        let mut out = String::new();
        for (name, value) in &self.0 {
            let mut lines = value.lines();
            let padded = format!("{name:width$}");
            let _ = writeln!(out, "  {}  {}", padded.style(view.style, "2"), lines.next().unwrap_or_default());
            for line in lines {
                let _ = writeln!(out, "  {:width$}  {line}", "");
            }
        }
        out
    }
}

fn heading(text: &str, view: View) -> String {
    format!("\n{}\n", text.style(view.style, "1"))
}

/// Ranks that are shown beside everything else.
const RANKS: usize = 64;

/// `aviflow show`, with the ranks of a job that holds GPUs.
pub fn show(job: &JobDetail, ranks: &[RankInfo], view: View) -> String {
    let s = &job.summary;
    let mut out = format!(
        "{}  {}\n",
        format!("{}/{}", s.namespace, s.name).style(view.style, "1"),
        s.phase.style(view.style, style::phase(&s.phase))
    );
    let mut pairs = Pairs::default();
    if let Some(verdict) = &s.verdict {
        pairs.put("waits", format!("place {} of {}: {}", verdict.place, verdict.waiting, jobs::reason(verdict)));
    }
    for (name, value) in waiting::details(job, view) {
        pairs.put(name, value);
    }
    pairs.put("DIFFERS", differs(job).style(view.style, "1;31"));
    pairs.put("why", s.failure.clone().unwrap_or_default());
    pairs.put("submitted", format!("{} by {}", ago(s.submitted, view.now), s.user));
    pairs.put("queue", format!("{}, priority {}", s.queue, s.priority));
    pairs.put("gang", gang(job));
    pairs.put("time", times(job, view.now));
    pairs.put("attempts", attempts(job));
    pairs.put("ran", ran(job).join("\n"));
    pairs.put("progress", s.progress.as_ref().map(|p| progress(p, view.now)).unwrap_or_default());
    pairs.put("checkpoint", checkpoint(job, view.now));
    pairs.put("GPU time", gpu_states(&job.gpu_time));
    pairs.put("results", results(job));
    pairs.put("run", command(&job.spec.run));
    out.push_str(&pairs.render(view));
    out.push_str(&last_lines(job, view));
    if !job.workers.is_empty() {
        out.push_str(&heading("Workers", view));
        out.push_str(&workers(job, view));
    }
    if !ranks.is_empty() {
        let (shown, more) = ranks.split_at(ranks.len().min(RANKS));
        let inner = View { width: view.width.map(|w| w.saturating_sub(2)), ..view };
        out.push_str(&heading("Ranks", view));
        out.push_str(&indent(&top::rank_table(shown, view.now, inner)));
        if !more.is_empty() {
            let _ = writeln!(out, "  … {} more; `aviflow top {}` has all", more.len(), s.name);
        }
    }
    out.push_str(&heading("Timeline (UTC)", view));
    out.push_str(&timeline(job, view));
    out.push_str(&heading("To run it again", view));
    out.push_str(&record(job, view));
    out
}

/// `2 nodes of 8 GPUs: local-0, local-1`.
fn gang(job: &JobDetail) -> String {
    let s = &job.summary;
    let (nodes, gpus) = (count(s.nodes.into(), "node"), count(s.gpus_per_node.into(), "GPU"));
    let on = if s.on.is_empty() { String::new() } else { format!(": {}", s.on.join(", ")) };
    format!("{nodes} of {gpus}{on}")
}

/// How long it waited and ran.
pub fn times(job: &JobDetail, now: i64) -> String {
    let s = &job.summary;
    let whole = (s.ended.unwrap_or(now) - s.submitted).max(0);
    let waited = (whole - s.ran).max(0);
    format!("waited {}, ran {}", span(waited), span(s.ran))
}

/// How many attempts, and what ended those before; empty for a plain first one.
pub fn attempts(job: &JobDetail) -> String {
    let c = job.counters;
    let counts = [
        (c.failures, "failure", "failures"),
        (c.node_failures, "node failure", "node failures"),
        (c.suspensions, "suspension", "suspensions"),
        (c.unready, "start that was never ready", "starts that were never ready"),
    ];
    let parts: Vec<String> = counts
        .iter()
        .filter(|c| c.0 > 0)
        .map(|(n, one, many)| format!("{n} {}", if *n == 1 { one } else { many }))
        .collect();
    match (job.summary.attempts, parts.is_empty()) {
        (0 | 1, true) => String::new(),
        (n, true) => n.to_string(),
        (n, false) => format!("{n} ({})", parts.join(", ")),
    }
}

/// What the attempts ran, each hash with its attempts: `eeeeeeeeeeee in attempts 1-3`.
fn ran(job: &JobDetail) -> Vec<String> {
    let mut by_hash: Vec<(&str, Vec<u32>)> = Vec::new();
    for told in &job.attempt_hashes {
        match by_hash.iter_mut().find(|(hash, _)| *hash == told.hash) {
            Some((_, attempts)) => attempts.push(told.attempt),
            None => by_hash.push((&told.hash, vec![told.attempt])),
        }
    }
    let say = |(hash, attempts): &(&str, Vec<u32>)| {
        let word = if attempts.len() == 1 { "attempt" } else { "attempts" };
        format!("{} in {word} {}", hash.get(..12).unwrap_or(hash), ranges(attempts))
    };
    by_hash.iter().map(say).collect()
}

/// Attempts that ran something else than the first; empty if there is none.
fn differs(job: &JobDetail) -> String {
    let mut attempts: Vec<u32> = job.attempt_hashes.iter().filter(|h| h.differs).map(|h| h.attempt).collect();
    attempts.dedup();
    if attempts.is_empty() {
        return String::new();
    }
    let word = if attempts.len() == 1 { "attempt" } else { "attempts" };
    format!("{word} {} ran something else than was submitted: somebody changed it; submit it again", ranges(&attempts))
}

/// The last reported progress.
fn progress(point: &ProgressPoint, now: i64) -> String {
    let mut parts = vec![format!("step {}", jobs::step(point))];
    parts.extend(point.values.iter().map(|(name, v)| format!("{name} {}", value(*v))));
    parts.extend(point.odd.iter().map(|(name, v)| format!("{name} {v}")));
    format!("{}  ({})", parts.join("  "), ago(point.at, now))
}

fn checkpoint(job: &JobDetail, now: i64) -> String {
    job.checkpoint.as_ref().map_or(String::new(), |c| format!("step {} at {} ({})", c.step, c.path, ago(c.at, now)))
}

/// GPU time by state, the largest first, each with its share.
pub fn gpu_states(states: &BTreeMap<String, i64>) -> String {
    let total: i64 = states.values().sum();
    let mut sorted: Vec<(&String, i64)> = states.iter().map(|(n, t)| (n, *t)).filter(|(_, t)| *t > 0).collect();
    sorted.sort_by_key(|(name, t)| (-t, name.as_str()));
    if sorted.is_empty() {
        return String::new();
    }
    let parts: Vec<String> =
        sorted.iter().map(|(n, t)| format!("{n} {} {}", gpu_time(*t), percent(*t, total))).collect();
    format!("{} in all: {}", gpu_time(total), parts.join(", "))
}

/// What the training reported as its result.
pub fn results(job: &JobDetail) -> String {
    let results: Vec<String> =
        job.facts.iter().filter_map(|(k, v)| Some(format!("{} {}", k.strip_prefix("result.")?, short(v)))).collect();
    results.join(", ")
}

/// A result as people read it; `-o json` has all of its digits.
fn short(value: &str) -> String {
    let digits = value.split_once('.').map_or(0, |(_, d)| d.len());
    match value.parse::<f64>() {
        Ok(number) if digits > 4 && number.abs() >= 0.001 => format!("{number:.4}"),
        _ => value.to_owned(),
    }
}

/// The last lines of the rank that failed first.
pub fn last_lines(job: &JobDetail, view: View) -> String {
    let mut out = String::new();
    if job.last_lines.is_empty() {
        return out;
    }
    let _ = writeln!(out, "  {}", "its last lines".style(view.style, "2"));
    for line in &job.last_lines {
        let _ = writeln!(out, "  {} {}", "|".style(view.style, "31"), clean(line, view.style));
    }
    out
}

fn workers(job: &JobDetail, view: View) -> String {
    let mut table = Table::new(&[
        ("worker", Align::Right),
        ("node", Align::Left),
        ("gpus", Align::Left),
        ("state", Align::Left),
        ("ranks", Align::Left),
        ("exits", Align::Left),
    ]);
    for w in &job.workers {
        table.row([
            w.worker.to_string().into(),
            w.node.as_str().into(),
            ranges(&w.slots).into(),
            w.state.as_str().into(),
            ranges(&w.ranks).into(),
            w.exits.iter().map(|(rank, code)| format!("r{rank}={code}")).collect::<Vec<_>>().join(" ").into(),
        ]);
    }
    indent(&table.render(view.width.map(|w| w.saturating_sub(2)), view.style))
}

fn timeline(job: &JobDetail, view: View) -> String {
    let mut table = Table::new(&[("at", Align::Left), ("attempt", Align::Right), ("what", Align::Left)]);
    for entry in &job.timeline {
        let attempt = if entry.attempt == 0 { String::new() } else { entry.attempt.to_string() };
        table.row([instant(entry.at).into(), attempt.into(), entry.text.as_str().into()]);
    }
    indent(&table.render(view.width.map(|w| w.saturating_sub(2)), view.style))
}

/// What the job was, by content.
fn record(job: &JobDetail, view: View) -> String {
    let p = &job.provenance;
    let mut pairs = Pairs::default();
    pairs.put("hash", job.hash.clone());
    pairs.put("file", p.file.clone().unwrap_or_default());
    pairs.put("rerun of", p.rerun_of.clone().unwrap_or_default());
    if let Some(code) = &p.code {
        let files = count(code.files, "file");
        pairs.put("code", format!("{} ({files}, {})", code.sha256, bytes(code.bytes)));
        if let Some(commit) = &code.commit {
            pairs.put("commit", format!("{commit}{}", if code.dirty { ", with uncommitted changes" } else { "" }));
        }
    }
    if let Some(environment) = &p.environment {
        pairs.put("environment", format!("{}@{}\n{}", environment.name, environment.version, environment.hash));
    }
    if let Some(image) = &p.image {
        let environment = image.environment.clone().unwrap_or_default();
        let deprecated = image.deprecated.as_ref().map_or_else(String::new, |why| format!(", deprecated: {why}"));
        pairs.put("environment", format!("{environment}{deprecated}"));
        let written = image.reference != image.pinned && environment.is_empty();
        let reference = if written { format!("{}\n", image.reference) } else { String::new() };
        pairs.put("image", format!("{reference}{}", image.pinned));
        pairs.put("launcher", image.prefix.join(" "));
    }
    if let Some(layer) = &p.layer {
        let lock = job.spec.requirements.as_deref().unwrap_or_default();
        pairs.put("requirements", format!("{lock} for {}\n{}", layer.platform, layer.lock));
    }
    for (name, hash) in &p.data {
        pairs.put(format!("data {name}"), hash.clone());
    }
    pairs.put("seed", job.spec.seed.map(|s| s.to_string()).unwrap_or_default());
    let client: Vec<String> = p.client.iter().map(|(k, v)| format!("{k} {v}")).collect();
    pairs.put("submitted on", client.join(", "));
    for (name, fact) in job.facts.iter().filter(|(k, _)| !k.starts_with("result.")) {
        pairs.put(name.clone(), fact.clone());
    }
    pairs.put("again", format!("aviflow rerun {} --exact", jobs::name(&job.summary)));
    pairs.render(view)
}

fn indent(text: &str) -> String {
    text.lines().map(|l| format!("  {l}\n")).collect()
}

/// `0-3,5`.
pub fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &n in numbers {
        match parts.last_mut() {
            Some((_, end)) if n == *end + 1 => *end = n,
            _ => parts.push((n, n)),
        }
    }
    let text: Vec<String> =
        parts.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    text.join(",")
}

/// A command as a shell would read it; a script of several lines by its first.
pub fn command(run: &[String]) -> String {
    if let Some(script) = run.last().filter(|s| s.contains('\n')) {
        let lines = script.trim_end().lines().count();
        return format!("{} … ({lines} lines)", script.lines().find(|l| !l.trim().is_empty()).unwrap_or_default());
    }
    run.iter().map(|w| quote(w)).collect::<Vec<_>>().join(" ")
}

fn quote(word: &str) -> String {
    let plain = !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./=:,@+%".contains(&b));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, view};
    use super::*;
    use aviflow_api::rest::AttemptHash;

    #[test]
    fn a_running_job() {
        insta::assert_snapshot!(show(&samples::detail(samples::running()), &[], view()));
    }

    #[test]
    fn a_job_that_waits() {
        let mut detail = samples::detail(samples::queued());
        detail.gpu_time.clear();
        detail.facts.clear();
        detail.checkpoint = None;
        detail.attempt_hashes.clear();
        insta::assert_snapshot!(show(&detail, &[], view()));
    }

    /// Everything that may be said of a job's waiting, its promises and its losses.
    #[test]
    fn a_job_that_was_moved_for_others() {
        let view = view();
        let whole = show(&samples::turned_out(), &[], view);
        let waits = whole.split("\n\n").next().unwrap_or_default();
        let whole = show(&samples::leaving(), &[], view);
        let runs = whole.split("\n\n").next().unwrap_or_default();
        insta::assert_snapshot!(format!("{waits}\n\n{runs}\n"));
    }

    #[test]
    fn an_attempt_that_ran_something_else_is_pointed_at() {
        let mut detail = samples::detail(samples::running());
        let told = |attempt, hash: &str, differs| AttemptHash { attempt, hash: hash.repeat(64), differs };
        detail.attempt_hashes.push(told(2, "e", false));
        assert_eq!((ran(&detail), differs(&detail).as_str()), (vec!["eeeeeeeeeeee in attempts 1-2".to_owned()], ""));
        detail.attempt_hashes.extend([told(3, "f", true), told(3, "0", true), told(4, "e", false)]);
        let shown = show(&detail, &[], view());
        let lines: Vec<&str> = shown.lines().filter(|l| l.contains("DIFFERS") || l.contains(" in attempt")).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
          DIFFERS     attempt 3 ran something else than was submitted: somebody changed it; submit it again
          ran         eeeeeeeeeeee in attempts 1-2,4
                      ffffffffffff in attempt 3
                      000000000000 in attempt 3
        ");
    }

    #[test]
    fn commands_can_be_typed_again() {
        let run = |words: &[&str]| command(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        assert_eq!(run(&["python", "train.py", "a b", "it's"]), r"python train.py 'a b' 'it'\''s'");
        assert_eq!(run(&["bash", "-c", "\necho a\necho b\n"]), "echo a … (3 lines)");
        assert_eq!(ranges(&[0, 1, 2, 3, 5, 7, 8]), "0-3,5,7-8");
    }
}
