//! What a training's words mean: progress, events, and the highest step. Pure.
//!
//! Invariants: `FirstStep` and `CaughtUp` are said once an epoch; a checkpoint
//! once for each step and phase, however many ranks announce it; a fact again
//! only when its value changed; at most one progress per [`PROGRESS_MS`] and
//! rank, and the newest is never lost to that limit.

use crate::hooks::{Message, Phase};
use crate::output::Seen;
use crate::protocol::{Event, Progress};
use std::collections::{BTreeMap, BTreeSet};

/// Between two progress messages of a rank, in milliseconds.
pub const PROGRESS_MS: u64 = 100;

/// Steps whose checkpoints are remembered.
const CHECKPOINTS_KEPT: usize = 1024;

/// What is to be said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// For people: the rank, when it happened, and what.
    Progress(u32, u64, Progress),
    /// To be made durable.
    Event(Event),
}

#[derive(Debug, Default)]
struct Rank {
    last_step: Option<u64>,
    /// A hook spoke for it: its output is not read any more.
    hooked: bool,
    bar: Option<(u64, u64)>,
    sent_at: Option<u64>,
    pending: Option<(u64, Progress)>,
}

/// The training of one epoch, as far as this worker sees it.
#[derive(Debug, Default)]
pub struct Training {
    best_step: Option<u64>,
    first: bool,
    caught_up: bool,
    checkpoints: BTreeSet<(u64, Phase)>,
    facts: BTreeMap<String, String>,
    ranks: BTreeMap<u32, Rank>,
}

impl Training {
    /// A new epoch; `best_step` is the highest step of all earlier attempts.
    #[must_use]
    pub fn new(best_step: Option<u64>) -> Self {
        Self { best_step, ..Self::default() }
    }

    /// The highest step of a rank.
    #[must_use]
    pub fn last_step(&self, rank: u32) -> Option<u64> {
        self.ranks.get(&rank).and_then(|r| r.last_step)
    }

    /// The highest step of any rank.
    #[must_use]
    pub fn highest_step(&self) -> Option<u64> {
        self.ranks.values().filter_map(|r| r.last_step).max()
    }

    /// A hook spoke.
    pub fn hook(&mut self, rank: u32, message: Message, now: u64, said: &mut Vec<Said>) {
        match message {
            Message::Hello { .. } | Message::Stop { .. } => {}
            Message::Metrics { step, values, total_steps, tokens } => {
                self.ranks.entry(rank).or_default().hooked = true;
                self.step(rank, Progress { step, total_steps, tokens, values }, now, said);
            }
            Message::Checkpoint { phase, step, path } => self.checkpoint(phase, step, path, said),
            Message::Data { name, sha256, bytes: _ } => {
                self.tell([(format!("data.{name}"), sha256)].into(), said);
            }
            Message::Facts { values } => {
                self.tell(values.into_iter().map(|(name, value)| (name, text(value))).collect(), said);
            }
            Message::Summary { values } => {
                let values = values.into_iter().map(|(name, value)| (format!("result.{name}"), text(value)));
                self.tell(values.collect(), said);
            }
        }
    }

    /// A line of output told something.
    pub fn output(&mut self, rank: u32, seen: Seen, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        if state.hooked {
            return;
        }
        match seen {
            Seen::Step(progress) => self.step(rank, progress, now, said),
            Seen::Bar(step, total) => state.bar = Some((step, total)),
            Seen::Values(values) => {
                if let Some((step, total)) = state.bar {
                    self.step(rank, Progress { step, total_steps: Some(total), tokens: None, values }, now, said);
                }
            }
        }
    }

    fn step(&mut self, rank: u32, progress: Progress, now: u64, said: &mut Vec<Said>) {
        let step = progress.step;
        let state = self.ranks.entry(rank).or_default();
        state.last_step = state.last_step.max(Some(step));
        if state.sent_at.is_none_or(|sent| now >= sent + PROGRESS_MS) {
            state.sent_at = Some(now);
            state.pending = None;
            said.push(Said::Progress(rank, now, progress));
        } else {
            state.pending = Some((now, progress));
        }
        if !self.first {
            self.first = true;
            said.push(Said::Event(Event::FirstStep { step }));
        }
        if !self.caught_up && self.best_step.is_some_and(|best| step > best) {
            self.caught_up = true;
            said.push(Said::Event(Event::CaughtUp { step }));
        }
    }

    fn checkpoint(&mut self, phase: Phase, step: u64, path: String, said: &mut Vec<Said>) {
        if !self.checkpoints.insert((step, phase)) {
            return;
        }
        if self.checkpoints.len() > CHECKPOINTS_KEPT {
            self.checkpoints.pop_first();
        }
        said.push(Said::Event(match phase {
            Phase::Begin => Event::CheckpointBegun { step },
            Phase::Complete => Event::CheckpointComplete { step, path },
            Phase::Failed => Event::CheckpointFailed { step },
        }));
    }

    fn tell(&mut self, mut values: BTreeMap<String, String>, said: &mut Vec<Said>) {
        values.retain(|name, value| self.facts.get(name) != Some(value));
        if !values.is_empty() {
            self.facts.extend(values.clone());
            said.push(Said::Event(Event::Facts { values }));
        }
    }

    /// When progress that was held back is due.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        let due = |r: &Rank| r.pending.as_ref().map(|_| r.sent_at.map_or(0, |sent| sent + PROGRESS_MS));
        self.ranks.values().filter_map(due).min()
    }

    /// Says the newest progress that was held back; all of it, or what is due.
    pub fn flush(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        for (rank, state) in &mut self.ranks {
            if !all && state.sent_at.is_some_and(|sent| now < sent + PROGRESS_MS) {
                continue;
            }
            if let Some((at, progress)) = state.pending.take() {
                state.sent_at = Some(now);
                said.push(Said::Progress(*rank, at, progress));
            }
        }
    }
}

/// A plain value as people write it.
fn text(value: serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text,
        serde_json::Value::Null => String::new(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64) -> Message {
        Message::Metrics { step, values: BTreeMap::new(), total_steps: None, tokens: None }
    }

    /// Steps as (time, rank, step) and what is said, as short text.
    fn check(best: Option<u64>, steps: &[(u64, u32, u64)], expected: &str) {
        let mut training = Training::new(best);
        let mut said = Vec::new();
        for (now, rank, step) in steps {
            training.flush(*now, false, &mut said);
            training.hook(*rank, metrics(*step), *now, &mut said);
        }
        training.flush(u64::MAX, true, &mut said);
        let words: Vec<String> = said
            .iter()
            .map(|s| match s {
                Said::Progress(rank, at, p) => format!("{rank}:{}@{at}", p.step),
                Said::Event(Event::FirstStep { step }) => format!("first {step}"),
                Said::Event(Event::CaughtUp { step }) => format!("caught {step}"),
                Said::Event(other) => format!("{other:?}"),
            })
            .collect();
        assert_eq!(words.join(", "), expected);
    }

    #[test]
    fn first_step_and_catching_up_are_said_once() {
        check(None, &[(0, 0, 1), (500, 0, 2)], "0:1@0, first 1, 0:2@500");
        check(Some(2), &[(0, 0, 1), (500, 0, 2), (900, 0, 3)], "0:1@0, first 1, 0:2@500, 0:3@900, caught 3");
        check(Some(2), &[(0, 0, 9), (500, 1, 10)], "0:9@0, first 9, caught 9, 1:10@500");
    }

    #[test]
    fn progress_is_limited_and_the_newest_kept() {
        check(None, &[(0, 0, 1), (10, 0, 2), (20, 0, 3), (20, 1, 3)], "0:1@0, first 1, 1:3@20, 0:3@20");
        check(None, &[(0, 0, 1), (10, 0, 2), (110, 0, 3)], "0:1@0, first 1, 0:2@10, 0:3@110");
    }

    #[test]
    fn a_checkpoint_and_a_fact_are_said_once() {
        let mut training = Training::default();
        let mut said = Vec::new();
        for _rank in 0..8 {
            let message = Message::Checkpoint { phase: Phase::Complete, step: 5, path: "/c".into() };
            training.hook(0, message, 0, &mut said);
            training.hook(0, Message::Data { name: "d".into(), sha256: "a".into(), bytes: None }, 0, &mut said);
            training.hook(0, Message::Summary { values: [("loss".to_owned(), 2.5.into())].into() }, 0, &mut said);
        }
        assert_eq!(
            said,
            [
                Said::Event(Event::CheckpointComplete { step: 5, path: "/c".into() }),
                Said::Event(Event::Facts { values: [("data.d".to_owned(), "a".to_owned())].into() }),
                Said::Event(Event::Facts { values: [("result.loss".to_owned(), "2.5".to_owned())].into() }),
            ]
        );
    }

    #[test]
    fn output_is_read_until_a_hook_speaks() {
        let mut training = Training::default();
        let mut said = Vec::new();
        let values = || Seen::Values(BTreeMap::new());
        training.output(0, values(), 0, &mut said);
        assert_eq!(said, []);
        training.output(0, Seen::Bar(50, 500), 0, &mut said);
        training.output(0, values(), 0, &mut said);
        assert_eq!(training.last_step(0), Some(50));
        training.hook(0, metrics(60), 0, &mut said);
        training.output(0, Seen::Step(Progress { step: 99, ..Progress::default() }), 0, &mut said);
        assert_eq!(training.highest_step(), Some(60));
    }
}
