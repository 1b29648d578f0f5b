//! What a training's words mean: progress, events, and the highest step. Pure.
//!
//! Invariants: `FirstStep` and `CaughtUp` are said once an epoch; a checkpoint
//! once for each step and phase, however many ranks announce it; a fact again
//! only when its value changed; at most one progress per [`PROGRESS_MS`] and
//! rank, and the newest is never lost to that limit.

use crate::hooks::{Message, Phase};
use crate::output::Seen;
use crate::protocol::{Event, OWN_FACTS, Progress};
use std::collections::{BTreeMap, BTreeSet};

/// Between two progress messages of a rank, in milliseconds.
pub const PROGRESS_MS: u64 = 100;

/// Between two events with facts, in milliseconds.
pub const FACTS_MS: u64 = 1000;

/// Bytes of the names and values of all facts of an epoch: they fit into one message however they are escaped.
pub const MAX_FACTS: usize = 128 << 10;

/// Steps whose checkpoints are remembered.
const CHECKPOINTS_KEPT: usize = 1024;

/// What is to be said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// For people: the rank, when it happened, and what.
    Progress(u32, u64, Progress),
    /// To be made durable.
    Event(Event),
    /// For the log.
    Note(String),
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
    /// Bytes of these.
    facts_bytes: usize,
    /// Names of facts that changed since they were told.
    changed: BTreeSet<String>,
    facts_told_at: Option<u64>,
    facts_refused: bool,
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
                self.tell([(format!("data.{name}"), sha256)].into(), now, said);
            }
            Message::Facts { values } => {
                self.tell(values.into_iter().map(|(name, value)| (name, text(value))).collect(), now, said);
            }
            Message::Summary { values } => {
                let values = values.into_iter().map(|(name, value)| (format!("result.{name}"), text(value)));
                self.tell(values.collect(), now, said);
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

    fn tell(&mut self, values: BTreeMap<String, String>, now: u64, said: &mut Vec<Said>) {
        for (name, value) in values {
            let before = self.facts.get(&name);
            if before == Some(&value) || name.starts_with(OWN_FACTS) {
                continue;
            }
            let less = before.map_or(0, |before| name.len() + before.len());
            let bytes = self.facts_bytes - less + name.len() + value.len();
            if bytes > MAX_FACTS {
                if !std::mem::replace(&mut self.facts_refused, true) {
                    said.push(Said::Note(format!(
                        "facts and results of more than {} KiB are not kept, from `{}` on; write them to a file",
                        MAX_FACTS >> 10,
                        name.chars().take(80).collect::<String>(),
                    )));
                }
                continue;
            }
            self.facts_bytes = bytes;
            self.changed.insert(name.clone());
            self.facts.insert(name, value);
        }
        self.tell_changed(now, false, said);
    }

    fn tell_changed(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        if self.changed.is_empty() || !all && self.facts_told_at.is_some_and(|told| now < told + FACTS_MS) {
            return;
        }
        self.facts_told_at = Some(now);
        let changed = std::mem::take(&mut self.changed).into_iter();
        let values = changed.filter_map(|name| self.facts.get(&name).cloned().map(|value| (name, value))).collect();
        said.push(Said::Event(Event::Facts { values }));
    }

    /// When progress or facts that were held back are due.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        let due = |r: &Rank| r.pending.as_ref().map(|_| r.sent_at.map_or(0, |sent| sent + PROGRESS_MS));
        let facts = (!self.changed.is_empty()).then(|| self.facts_told_at.map_or(0, |told| told + FACTS_MS));
        self.ranks.values().filter_map(due).chain(facts).min()
    }

    /// Says the newest progress and facts that were held back; all of them, or what is due.
    pub fn flush(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        self.tell_changed(now, all, said);
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
                Said::Note(text) => text.clone(),
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

    fn facts<const N: usize>(values: [(&str, &str); N]) -> Said {
        Said::Event(Event::Facts { values: values.map(|(n, v)| (n.to_owned(), v.to_owned())).into() })
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
        training.flush(1, true, &mut said);
        let complete = Said::Event(Event::CheckpointComplete { step: 5, path: "/c".into() });
        assert_eq!(said, [complete, facts([("data.d", "a")]), facts([("result.loss", "2.5")])]);
    }

    #[test]
    fn facts_that_change_at_every_step_are_said_once_a_second_and_the_newest_kept() {
        let mut training = Training::default();
        let mut said = Vec::new();
        for now in 0..=2500 {
            training.flush(now, false, &mut said);
            let values = [("step".to_owned(), now.into()), (format!("at.{}", now / 1000), now.into())].into();
            training.hook(0, Message::Facts { values }, now, &mut said);
        }
        assert_eq!(training.due(), Some(3000));
        training.flush(2501, true, &mut said);
        assert_eq!(training.due(), None);
        let expected = [
            facts([("at.0", "0"), ("step", "0")]),
            facts([("at.0", "999"), ("step", "999")]),
            facts([("at.1", "1999"), ("step", "1999")]),
            facts([("at.2", "2500"), ("step", "2500")]),
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn the_platform_s_own_facts_are_not_the_training_s_to_tell() {
        let mut training = Training::default();
        let mut said = Vec::new();
        let values = [(format!("{OWN_FACTS}hash"), "00".into()), ("own".to_owned(), "1".into())].into();
        training.hook(0, Message::Facts { values }, 0, &mut said);
        assert_eq!(said, [facts([("own", "1")])]);
    }

    #[test]
    fn facts_without_end_are_refused_with_a_word() {
        let mut training = Training::default();
        let mut said = Vec::new();
        for n in 0..10_000 {
            let values = [(format!("name.{n}"), "\u{1}".repeat(1000).into())].into();
            training.hook(0, Message::Facts { values }, 0, &mut said);
        }
        training.hook(0, Message::Facts { values: [("name.0".to_owned(), "short".into())].into() }, 0, &mut said);
        training.flush(0, true, &mut said);
        let notes = said.iter().filter(|s| matches!(s, Said::Note(_))).count();
        assert_eq!((notes, said.len()), (1, 3));
        let Some(Said::Event(event @ Event::Facts { values })) = said.last() else { panic!("{said:?}") };
        assert_eq!(values["name.0"], "short", "a known fact may still change");
        assert!(serde_json::to_vec(event).is_ok_and(|bytes| bytes.len() < crate::protocol::MAX_LINE - 1024));
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
