//! What a training's words mean: progress, events, and the highest step. Pure.
//!
//! Invariants: `FirstStep` and `CaughtUp` are said once an epoch; a checkpoint
//! once for each step and phase, however many ranks announce it; a fact again
//! only when its value changed; at most one progress per [`PROGRESS_MS`] and
//! rank, and the newest is never lost to that limit.
//!
//! A rank may be heard of in several ways. The best of them counts, and from
//! then on no other: the hooks, then its output, then the event files that it
//! writes ([`crate::tensorboard`]). Checkpoints that are seen on disk
//! ([`crate::checkpoints`]) count until a hook speaks of one; what a training does meanwhile: `saves`.

use crate::hooks::{Message, Phase};
use crate::output::names::{Values, put};
use crate::output::{Line, Seen};
use crate::protocol::{Event, OWN_FACTS, Progress, Sign, Value};
use std::collections::{BTreeMap, BTreeSet};

mod saves;
mod signs;
use saves::Saves;
pub use saves::{BACKGROUND_MS, STANDS_STILL_MS};
use signs::Signs;

/// Between two progress messages of a rank, in milliseconds.
pub const PROGRESS_MS: u64 = 100;

/// Between two events with facts, in milliseconds.
pub const FACTS_MS: u64 = 1000;

/// How long values whose step a bar names wait for it, in milliseconds: tqdm draws its bar again after each line that
/// is written through it, but to another stream.
pub const BAR_WAIT_MS: u64 = 1000;

/// How long they wait for the bar of the very next step, in milliseconds: a bar is ended by the one after it, so that
/// the first that comes may be of the step before. Where steps are shorter than this, the first is right.
pub const NEXT_BAR_MS: u64 = 250;

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
    /// The same, of something that happened before, at that time.
    Earlier(u64, Event),
    /// For the log.
    Note(String),
    /// For the present alone: when it happened, and what.
    Sign(u64, Sign),
}

/// How a rank was heard of, of which a greater one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    #[default]
    None,
    EventFiles,
    Output,
    Hooks,
}

#[derive(Debug, Default)]
struct Rank {
    last_step: Option<u64>,
    source: Source,
    /// Whose lines count, where several processes write to the rank's output: the lowest number that told a step.
    speaker: Option<u32>,
    /// The latest bar: done, and of how many.
    bar: Option<(u64, u64)>,
    /// How many steps the bar of the training has, as its dictionaries came with it. Others are of evaluations.
    bar_of: Option<u64>,
    /// Values that wait for their bar.
    waiting: Option<Waiting>,
    sent_at: Option<u64>,
    pending: Option<(u64, Progress)>,
}

/// Values whose step a bar names.
#[derive(Debug)]
struct Waiting {
    /// Until when.
    until: u64,
    tokens: Option<u64>,
    values: Values,
    /// A bar came: done, and of how many.
    bar: Option<(u64, u64)>,
}

/// The training of one epoch, as far as this worker sees it.
#[derive(Debug, Default)]
pub struct Training {
    best_step: Option<u64>,
    /// GPUs of the whole gang.
    gpus: u32,
    first: bool,
    caught_up: bool,
    saves: Saves,
    checkpoints: BTreeSet<(u64, Phase)>,
    facts: BTreeMap<String, String>,
    /// Bytes of these.
    facts_bytes: usize,
    /// Names of facts that changed since they were told.
    changed: BTreeSet<String>,
    facts_told_at: Option<u64>,
    facts_refused: bool,
    ranks: BTreeMap<u32, Rank>,
    signs: Signs,
}

impl Training {
    /// A new epoch; `best_step` is the highest step of all earlier attempts, `gpus` how many the whole gang has.
    #[must_use]
    pub fn new(best_step: Option<u64>, gpus: u32) -> Self {
        Self { best_step, gpus, ..Self::default() }
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
            Message::Role { role } => self.signs.role(rank, role, now, said),
            Message::Collective { number } => self.signs.collective(rank, number, now, said),
            Message::Metrics { step, values, total_steps, tokens } => {
                self.ranks.entry(rank).or_default().source = Source::Hooks;
                self.step(rank, Progress { step, total_steps, tokens, values }, now, said);
            }
            Message::Checkpoint { phase, step, path } => {
                self.told_save(phase, step, path, now, said);
            }
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
    pub fn output(&mut self, rank: u32, line: Line, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        if state.source > Source::Output || line.speaker > state.speaker && state.speaker.is_some() {
            return;
        }
        match line.seen {
            Seen::Step(progress) => {
                state.speaker = line.speaker;
                self.told(rank, progress, now, said);
            }
            Seen::Evaluation(step, values) => self.evaluated(rank, step, values, now, said),
            Seen::Bar(step, total) => {
                state.bar = Some((step, total));
                let Some(waiting) = &mut state.waiting else {
                    if state.bar_of == Some(total) && state.last_step.is_none_or(|last| step > last) {
                        let progress = Progress { step, total_steps: Some(total), ..Progress::default() };
                        self.told(rank, progress, now, said);
                    }
                    return;
                };
                match waiting.bar {
                    // No step has been done yet, so that the values are of another.
                    None if step == 0 => {}
                    None => (waiting.bar, waiting.until) = (Some((step, total)), now + NEXT_BAR_MS),
                    Some((first, of)) => {
                        let next = step == first + 1 && total == of;
                        waiting.bar = Some(if next { (step, total) } else { (first, of) });
                        self.settle_values(rank, now, said);
                    }
                }
            }
            Seen::Values(tokens, values) => {
                self.settle_values(rank, now, said);
                let waiting = Waiting { until: now + BAR_WAIT_MS, tokens, values, bar: None };
                self.ranks.entry(rank).or_default().waiting = Some(waiting);
            }
        }
    }

    /// Gives values that waited the step of the bar that came, or of the latest one.
    fn settle_values(&mut self, rank: u32, now: u64, said: &mut Vec<Said>) {
        let Some(state) = self.ranks.get_mut(&rank) else { return };
        let Some(Waiting { tokens, values, bar, .. }) = state.waiting.take() else { return };
        let before = state.bar.filter(|(step, total)| *step > 0 && state.bar_of.is_none_or(|of| of == *total));
        if let Some((step, total)) = bar.or(before) {
            state.bar_of = Some(total);
            self.told(rank, Progress { step, total_steps: Some(total), tokens, values }, now, said);
        }
    }

    /// An event file that a rank writes has values of a step, written at `at`. Who follows the file says not too many.
    pub fn scalars(&mut self, rank: u32, step: u64, values: Values, at: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        if state.source > Source::EventFiles {
            return;
        }
        let evaluation = values.contains_key("eval_loss") && !values.contains_key("loss");
        let mut progress = Progress { step, values, ..Progress::default() };
        self.for_the_job(&mut progress);
        said.push(Said::Progress(rank, at, progress));
        if !evaluation {
            self.ranks.entry(rank).or_default().source = Source::EventFiles;
            self.reached(rank, step, at, said);
        }
    }

    /// A step that the output told.
    fn told(&mut self, rank: u32, mut progress: Progress, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        state.source = Source::Output;
        self.for_the_job(&mut progress);
        self.step(rank, progress, now, said);
    }

    /// Adds the whole job's rate where that of one GPU is known.
    fn for_the_job(&self, progress: &mut Progress) {
        if let Some(Value::Number(rate)) = progress.values.get("tokens_per_second_per_gpu")
            && self.gpus > 0
            && !progress.values.contains_key("tokens_per_second")
        {
            let whole = rate * f64::from(self.gpus);
            put(&mut progress.values, "tokens_per_second", whole);
        }
    }

    /// An evaluation is shown at its step, or at the latest; it is no step of the training.
    fn evaluated(&mut self, rank: u32, step: Option<u64>, values: Values, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        let Some(step) = step.or(state.last_step) else { return };
        match &mut state.pending {
            Some((_, pending)) if pending.step == step => {
                pending.values.extend(values);
                return;
            }
            pending => {
                if let Some((at, progress)) = pending.take() {
                    said.push(Said::Progress(rank, at, progress));
                }
            }
        }
        self.show(rank, Progress { step, values, ..Progress::default() }, now, said);
    }

    fn step(&mut self, rank: u32, progress: Progress, now: u64, said: &mut Vec<Said>) {
        let step = progress.step;
        self.show(rank, progress, now, said);
        self.signs.step(rank, now, said);
        self.reached(rank, step, now, said);
    }

    fn reached(&mut self, rank: u32, step: u64, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        state.last_step = state.last_step.max(Some(step));
        self.went_on(step, now, said);
        if !self.first {
            self.first = true;
            said.push(Said::Event(Event::FirstStep { step }));
        }
        if !self.caught_up && self.best_step.is_some_and(|best| step > best) {
            self.caught_up = true;
            said.push(Said::Event(Event::CaughtUp { step }));
        }
    }

    fn show(&mut self, rank: u32, progress: Progress, now: u64, said: &mut Vec<Said>) {
        let state = self.ranks.entry(rank).or_default();
        if state.sent_at.is_none_or(|sent| now >= sent + PROGRESS_MS) {
            state.sent_at = Some(now);
            state.pending = None;
            said.push(Said::Progress(rank, now, progress));
        } else {
            // What only a bar told must not hide the values of the step before it.
            if progress.values.is_empty()
                && let Some((at, earlier)) = state.pending.take_if(|(_, earlier)| !earlier.values.is_empty())
            {
                said.push(Said::Progress(rank, at, earlier));
            }
            state.pending = Some((now, progress));
        }
    }

    /// Whether this was not told of a checkpoint yet; remembers that it is now.
    fn is_new(&mut self, phase: Phase, step: u64) -> bool {
        let new = self.checkpoints.insert((step, phase));
        if self.checkpoints.len() > CHECKPOINTS_KEPT {
            self.checkpoints.pop_first();
        }
        new
    }

    fn checkpoint(&mut self, phase: Phase, step: u64, path: String, said: &mut Vec<Said>) {
        if !self.is_new(phase, step) {
            return;
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
        let waiting = self.ranks.values().filter_map(|r| r.waiting.as_ref().map(|w| w.until));
        self.ranks
            .values()
            .filter_map(due)
            .chain(facts)
            .chain(waiting)
            .chain(self.save_due())
            .chain(self.signs.due())
            .min()
    }

    /// Says the newest progress and facts that were held back; all of them, or what is due.
    pub fn flush(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        self.tell_changed(now, all, said);
        self.settle_save(now, all, said);
        self.signs.flush(now, all, said);
        let over = |r: &Rank| r.waiting.as_ref().is_some_and(|w| all || now >= w.until);
        let over: Vec<u32> = self.ranks.iter().filter(|(_, state)| over(state)).map(|(rank, _)| *rank).collect();
        for rank in over {
            self.settle_values(rank, now, said);
        }
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
mod tests;
