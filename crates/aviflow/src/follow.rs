//! Following a job: events in, lines and a status out.
//!
//! [`Follower`] is pure and knows what to say; [`screen`] puts it on a terminal
//! with a bar at the bottom, or writes plain lines.

pub mod screen;

use crate::render::jobs::{self, reason};
use crate::render::number::{clock, span, value};
use crate::render::style::{self, Style, Styled, clean};
use aviflow_api::rest::{JobEvent, JobSummary, LogLine, ProgressPoint, TimelineEntry};
use std::collections::{BTreeMap, VecDeque};

/// Without a terminal, progress is told again after this time,
const TELL_AFTER: i64 = 10_000;
/// or after this part of all steps, in percent.
const TELL_PERCENT: u64 = 5;
/// Points from which the pace is taken.
const PACE_POINTS: usize = 20;

/// What is known of a job that is being followed.
#[derive(Debug)]
pub struct Follower {
    style: Style,
    bars: bool,
    job: Option<JobSummary>,
    point: Option<ProgressPoint>,
    pace: VecDeque<(i64, u64)>,
    said: String,
    waiting: String,
    told: Option<(i64, u64)>,
    timeline: usize,
    timeline_skip: usize,
    lines: BTreeMap<(u32, u32, u32), u64>,
    skip: BTreeMap<(u32, u32, u32), u64>,
    end: Option<i32>,
}

/// What a bar shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The text beside the bar.
    pub text: String,
    /// Steps done and in all, if that is known.
    pub steps: Option<(u64, u64)>,
}

impl Follower {
    /// Nothing is known yet. With `bars`, what a bar shows is not told in lines.
    pub fn new(style: Style, bars: bool) -> Follower {
        Follower {
            style,
            bars,
            job: None,
            point: None,
            pace: VecDeque::new(),
            said: String::new(),
            waiting: String::new(),
            told: None,
            timeline: 0,
            timeline_skip: 0,
            lines: BTreeMap::new(),
            skip: BTreeMap::new(),
            end: None,
        }
    }

    /// The stream broke and begins again: what was shown is not shown twice.
    pub fn again(&mut self) {
        self.timeline_skip = self.timeline;
        self.timeline = 0;
        self.skip = std::mem::take(&mut self.lines);
    }

    /// The exit code, once the job has ended.
    pub fn end(&self) -> Option<i32> {
        self.end
    }

    /// The lines that an event is worth.
    pub fn on(&mut self, event: JobEvent, now: i64) -> Vec<String> {
        match event {
            JobEvent::Job { job } => self.job(*job),
            JobEvent::Timeline { entry } => self.entry(&entry).into_iter().collect(),
            JobEvent::Progress { point } => self.progress(point, now).into_iter().collect(),
            JobEvent::Log { lines } => lines.iter().filter_map(|l| self.line(l)).collect(),
            JobEvent::End { exit_code } => {
                self.end = Some(exit_code);
                Vec::new()
            }
        }
    }

    fn job(&mut self, job: JobSummary) -> Vec<String> {
        let text = match &job.verdict {
            Some(verdict) => {
                // A build's sentence says itself that it waits, and a bar has one line for it.
                let waits = if verdict.build.is_some() { "" } else { "waits, " };
                format!("{waits}place {} of {}: {}", verdict.place, verdict.waiting, reason(verdict))
            }
            None => String::new(),
        };
        // Each step of a build is worth a bar's change, each part of it a line.
        let told = job.verdict.as_ref().map_or_else(String::new, |v| {
            let part = v.build.as_ref().map(|b| (&b.name, b.done));
            format!("{} {} {} {part:?}", v.place, v.waiting, v.reason)
        });
        let new = !text.is_empty() && told != self.waiting && !self.bars;
        let line = new.then(|| format!("-- {text}").style(self.style, "33"));
        self.said = text;
        self.waiting = told;
        self.job = Some(job);
        line.into_iter().collect()
    }

    fn entry(&mut self, entry: &TimelineEntry) -> Option<String> {
        self.timeline += 1;
        if self.timeline <= self.timeline_skip {
            return None;
        }
        let colour = match entry.kind.as_str() {
            "failing" | "failed" | "neverReady" | "checkpointFailed" => "31",
            "succeeded" => "32",
            _ => "2",
        };
        Some(format!("-- {}", clean(&entry.text, Style::plain())).style(self.style, colour))
    }

    fn progress(&mut self, point: ProgressPoint, now: i64) -> Option<String> {
        // Ranks report the same steps; one of them is enough.
        if self.point.as_ref().is_some_and(|p| p.attempt == point.attempt && p.rank < point.rank) {
            return None;
        }
        let attempt = self.point.as_ref().map(|p| p.attempt);
        if attempt != Some(point.attempt) || self.pace.back().is_some_and(|(_, step)| *step > point.step) {
            self.pace.clear();
        }
        self.pace.push_back((point.at, point.step));
        if self.pace.len() > PACE_POINTS {
            self.pace.pop_front();
        }
        let step = point.step;
        let total = point.total_steps;
        self.point = Some(point);
        if self.bars {
            return None;
        }
        let due = match self.told {
            None => true,
            Some((at, told)) => {
                let part = total.is_some_and(|total| step.abs_diff(told) * 100 >= total * TELL_PERCENT);
                let last = Some(step) == total;
                step != told && (now - at >= TELL_AFTER || part || last)
            }
        };
        if !due {
            return None;
        }
        self.told = Some((now, step));
        Some(format!("-- {}", self.progress_text()).style(self.style, "36"))
    }

    /// `step 120/400  loss 2.1346  12.3k tokens/s  ETA 3m 20s`.
    fn progress_text(&self) -> String {
        let Some(point) = &self.point else { return String::new() };
        let mut parts = vec![format!("step {}", jobs::step(point))];
        match (point.values.get("loss"), point.odd.get("loss")) {
            (Some(loss), _) => parts.push(format!("loss {}", value(*loss))),
            (None, Some(odd)) => parts.push(format!("loss {odd}")),
            (None, None) => {}
        }
        let speed =
            ["tokens_per_second", "tokensPerSecond", "tokens_per_sec"].iter().find_map(|n| point.values.get(*n));
        parts.extend(speed.map(|s| format!("{} tokens/s", value(*s))));
        parts.extend(self.eta().map(|ms| format!("ETA {}", span(ms))));
        parts.join("  ")
    }

    /// Milliseconds to the last step at the present pace.
    fn eta(&self) -> Option<i64> {
        let point = self.point.as_ref()?;
        let left = point.total_steps?.checked_sub(point.step)?;
        let ((t0, s0), (t1, s1)) = (self.pace.front()?, self.pace.back()?);
        let steps = i64::try_from(s1.checked_sub(*s0)?).ok().filter(|s| *s > 0)?;
        Some((t1 - t0).max(0).saturating_mul(i64::try_from(left).ok()?) / steps).filter(|_| left > 0)
    }

    /// A line of output with its rank, unless it was shown before the stream broke.
    fn line(&mut self, line: &LogLine) -> Option<String> {
        let key = (line.attempt, line.worker, line.rank);
        let count = self.lines.entry(key).or_default();
        *count += 1;
        if *count <= self.skip.get(&key).copied().unwrap_or(0) {
            return None;
        }
        Some(log_line(line, false, self.style))
    }

    /// What the bar shows.
    pub fn status(&self) -> Status {
        let phase = self.job.as_ref().map_or("", |j| j.phase.as_str());
        let name = self.job.as_ref().map(jobs::name).unwrap_or_default();
        let steps = self.point.as_ref().and_then(|p| Some((p.step, p.total_steps?))).filter(|_| phase == "Running");
        let rest = match phase {
            "Running" => self.progress_text(),
            _ => self.said.clone(),
        };
        let text = [name.as_str(), phase, rest.as_str()]
            .iter()
            .filter(|t| !t.is_empty())
            .copied()
            .collect::<Vec<_>>()
            .join("  ");
        Status { text, steps }
    }
}

/// A line of output: `[r0] text`, or `[agent 0] text` for what the supervisor says.
pub fn log_line(line: &LogLine, timestamps: bool, style: Style) -> String {
    let (prefix, colour) = match line.stream.as_str() {
        "agent" => (format!("[agent {}]", line.worker), "2"),
        _ => (format!("[r{}]", line.rank), style::rank(line.rank)),
    };
    let at = if timestamps { format!("{} ", clock(line.at)) } else { String::new() };
    let text = clean(&line.text, style);
    format!("{at}{} {text}", prefix.style(style, colour)).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples::{self, NOW};

    fn log(rank: u32, text: &str) -> LogLine {
        let stream = if text.starts_with("agent:") { "agent" } else { "stdout" };
        LogLine { at: NOW, attempt: 1, worker: rank, rank, stream: stream.into(), text: text.into() }
    }

    fn entry(kind: &str, text: &str) -> JobEvent {
        JobEvent::Timeline { entry: TimelineEntry { at: NOW, attempt: 1, kind: kind.into(), text: text.into() } }
    }

    fn job(job: JobSummary) -> JobEvent {
        JobEvent::Job { job: Box::new(job) }
    }

    fn story() -> Vec<JobEvent> {
        let mut events = vec![
            job(samples::queued()),
            entry("submitted", "submitted by ada"),
            job(samples::queued()),
            job(samples::building()),
            job(samples::running()),
            entry("placed", "attempt 1 got 16 GPUs on local-0, local-1"),
            JobEvent::Log {
                lines: vec![log(0, "hello"), log(1, "\x1b[2Jhello\ttoo"), log(0, "agent: rank 0 started"), log(1, "")],
            },
        ];
        // Half a percent a second: told at the first step, then every tenth.
        for step in 0..=50 {
            let mut point = samples::point(2 * step, NOW + i64::try_from(step).expect("small") * 1000);
            events.push(JobEvent::Progress { point: point.clone() });
            point.rank = 1;
            events.push(JobEvent::Progress { point });
        }
        events.push(entry("succeeded", "succeeded"));
        events.push(JobEvent::End { exit_code: 0 });
        events
    }

    fn tell(follower: &mut Follower, events: Vec<JobEvent>) -> String {
        let mut out = String::new();
        let mut now = NOW;
        for event in events {
            if let JobEvent::Progress { point } = &event {
                now = point.at;
            }
            for line in follower.on(event, now) {
                out.push_str(&line);
                out.push('\n');
            }
        }
        out
    }

    #[test]
    fn without_a_terminal_everything_is_a_plain_line() {
        let mut follower = Follower::new(Style::plain(), false);
        let text = tell(&mut follower, story());
        assert_eq!(follower.end(), Some(0));
        assert!(!text.contains('\x1b'));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn on_a_terminal_the_bar_says_what_changes() {
        let mut follower = Follower::new(Style::plain(), true);
        let mut shown = String::new();
        for event in story() {
            let lines = follower.on(event, NOW);
            let status = follower.status();
            let text = format!("{} {:?}", status.text, status.steps);
            if !shown.ends_with(&format!("bar: {text}\n")) || !lines.is_empty() {
                lines.iter().for_each(|l| shown.push_str(&format!("{l}\n")));
                shown.push_str(&format!("bar: {text}\n"));
            }
        }
        let bars: Vec<&str> = shown.lines().filter(|l| l.starts_with("bar:")).collect();
        insta::assert_snapshot!(format!("{}\n...\n{}", bars[..6].join("\n"), bars[bars.len() - 1]));
    }

    #[test]
    fn nothing_is_shown_twice_and_nothing_is_lost_when_the_stream_breaks() {
        let lines =
            |from: usize, to: usize| JobEvent::Log { lines: (from..to).map(|n| log(0, &n.to_string())).collect() };
        let mut follower = Follower::new(Style::plain(), false);
        let mut text = tell(&mut follower, vec![entry("submitted", "a"), lines(0, 3)]);
        follower.again();
        text += &tell(&mut follower, vec![entry("submitted", "a"), entry("placed", "b"), lines(0, 5)]);
        follower.again();
        text += &tell(&mut follower, vec![entry("submitted", "a"), entry("placed", "b"), lines(0, 6)]);
        assert_eq!(text, "-- a\n[r0] 0\n[r0] 1\n[r0] 2\n-- b\n[r0] 3\n[r0] 4\n[r0] 5\n");
    }

    #[test]
    fn a_loss_that_is_no_number_is_seen() {
        let mut follower = Follower::new(Style::plain(), false);
        let mut point = samples::point(7, NOW);
        point.values.clear();
        point.odd.insert("loss".into(), "NaN".into());
        assert_eq!(tell(&mut follower, vec![JobEvent::Progress { point }]), "-- step 7/400  loss NaN\n");
    }
}
