//! Whether a gang hangs: no step for longer than its own steps explain. A state machine without a clock.
//!
//! A gang that trains synchronously stands still as one, so the gang's highest step is watched, not that of each rank.
//! What is measured is the time between two reports of a higher step, whatever number of steps lies between them.
//!
//! The stages, in the order in which they come when nothing is heard:
//! - [`Stage::Quiet`], two thirds into the next: stacks are worth taking, so that they are there when they are needed;
//! - [`Stage::Suspected`], no step within max(`floor`, 3 × p99): told to people;
//! - [`Stage::Hung`]: acted on. As a rule this is the same instant. It is later, by at most twice, only where steps
//!   vary so much that healthy ones reach 3 × p99: of log-normal durations with σ = 0.5, three in 10⁶ do, since
//!   P(x > 3·p99) = Q(2.33 + ln 3 / 0.5) = 3·10⁻⁶. Evidence of another kind ([`Hang::confirm`]) makes a suspicion a
//!   hang at once.
//!
//! What extends the wait:
//! - before the first steps, loading and compiling. A training of which no step was ever seen may be one that tells
//!   none: it is suspected, and no more;
//! - a checkpoint that was begun, until it is over;
//! - after the last step that was announced, or once a rank has ended as it should: no step is to come;
//! - a hang of this job for which nobody was the culprit, and that ended in a restart ([`Hang::doubt`]);
//! - a line of output that tells no step. Where such lines are rare, one means that something else than a step goes on,
//!   as an evaluation; where they are usual, each is a sign of life like any other. Lines extend to a bound.
//!
//! Invariants: a call is O(1); what is heard late or twice never makes a gang look more alive than it was; it never
//! asks to be asked again once it has told a hang.

use super::sketch::{PER_DOUBLING, Sketch};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// How long a gang may be quiet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// The least that is waited for a step.
    pub floor: Span,
    /// How many times the p99 of the steps is waited for one.
    pub factor: i64,
    /// From the start to the first step, or to the next sign of life: loading of data and weights, compilation.
    pub first_step: Span,
    /// From the start to the first step at most, whatever is printed.
    pub setup: Span,
    /// For each of the first steps, some of which are compiled again.
    pub warm_up: Span,
    /// After a line that is unusual among steps, as at the beginning of an evaluation.
    pub evaluation: Span,
    /// For a checkpoint, from its beginning.
    pub checkpoint: Span,
    /// From the last step on, however much is printed.
    pub printing: Span,
}

impl Limits {
    /// What is waited where nothing else is said.
    #[must_use]
    pub const fn standard() -> Limits {
        Limits {
            floor: Span::seconds(30),
            factor: 3,
            first_step: Span::minutes(30),
            setup: Span::minutes(120),
            warm_up: Span::minutes(5),
            evaluation: Span::minutes(5),
            checkpoint: Span::minutes(10),
            printing: Span::minutes(30),
        }
    }

    /// The standard ones with another least wait for a step; where that is shorter, all others are as much shorter.
    #[must_use]
    pub fn within(floor: Span) -> Limits {
        let all = Limits::standard();
        let shorter = |wait: Span| if floor < all.floor { Span(wait.0 * floor.0 / all.floor.0) } else { wait };
        Limits {
            floor,
            factor: all.factor,
            first_step: shorter(all.first_step),
            setup: shorter(all.setup),
            warm_up: shorter(all.warm_up),
            evaluation: shorter(all.evaluation),
            checkpoint: shorter(all.checkpoint),
            printing: shorter(all.printing),
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::standard()
    }
}

/// How sure it is that the gang hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Not at all.
    #[default]
    Fine,
    /// It is quiet: stacks are worth taking.
    Quiet,
    /// Quieter than 3 × p99: told, and not acted on yet.
    Suspected,
    /// It hangs.
    Hung,
}

/// Steps of an epoch that count as its first.
const FIRST: u32 = 3;

/// Steps from which on their median means something.
const SOME: u32 = 5;

/// Steps from which on their p99 means something; before, it counts as at least four times the median.
const MANY: u32 = 300;

/// By how many times the distance of p99 to the median, in classes, healthy steps may exceed the median: 5/2 × 2.33σ
/// = 5.8σ, which one in 3·10⁸ log-normal durations exceeds.
const TAIL: (usize, usize) = (5, 2);

/// How often the wait is doubled at most.
const DOUBTS: u8 = 3;

/// Lines are usual if a larger share of the steps comes with one: one in twenty, of 65,536.
const USUAL: u32 = 65_536 / 20;

/// The longest evaluation that is expected from its first line on, in medians of the steps.
const EVALUATION: i64 = 25;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum State {
    /// No rank runs.
    #[default]
    Stopped,
    /// Ranks run, no step was seen.
    Loading,
    /// Steps were seen.
    Training,
    /// No step is to come: results are evaluated, saved, sent away.
    Finishing,
}

/// The watch over one gang's steps. About 1.1 kB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hang {
    state: State,
    /// The start, the last higher step, or the end of the last checkpoint.
    since: Time,
    /// The last line or other sign of life after `since`.
    active: Option<Time>,
    /// Whether the present interval is no pure step: it is no observation.
    disturbed: bool,
    checkpoint: Option<Time>,
    step: Option<u64>,
    /// Steps of this epoch.
    seen: u32,
    /// Time between reports of higher steps; kept over epochs.
    steps: Sketch,
    /// The share of steps that came with other lines, of 65,536.
    lines: u32,
    /// The longest pause that a healthy training made for something else than a step.
    longest_pause: Span,
    longest_checkpoint: Span,
    /// Whether a step of this job was ever seen: then one is missed before the first, too.
    tells_steps: bool,
    /// While it is not heard whether steps are made, nothing is told.
    deaf: bool,
    /// How often the wait was doubled, see [`Hang::doubt`].
    #[serde(default)]
    doubt: u8,
    stage: Stage,
}

impl Hang {
    /// The ranks of an epoch have started.
    pub fn started(&mut self, at: Time) {
        self.state = State::Loading;
        self.since = at;
        self.active = None;
        self.disturbed = false;
        self.checkpoint = None;
        self.step = None;
        self.seen = 0;
        self.stage = Stage::Fine;
    }

    /// The ranks had made steps before anybody looked, as after a restart of the control plane.
    pub fn resumed(&mut self, at: Time) {
        self.started(at);
        self.state = State::Training;
        self.tells_steps = true;
        self.disturbed = true;
    }

    /// The job is known to tell its steps, from an earlier attempt.
    pub fn tells_steps(&mut self) {
        self.tells_steps = true;
    }

    /// The ranks are being stopped, or are gone.
    pub fn stopped(&mut self) {
        self.state = State::Stopped;
        self.stage = Stage::Fine;
    }

    /// A rank reported a step. Returns whether it was a higher one than any before.
    pub fn step(&mut self, step: u64, at: Time) -> bool {
        if self.state == State::Stopped || self.step.is_some_and(|last| step <= last) {
            return false;
        }
        self.step = Some(step);
        self.tells_steps = true;
        let at = at.max(self.since);
        if self.state == State::Training && self.seen >= 1 && !self.disturbed {
            let took = at.since(self.since);
            let other = self.active.is_some();
            let usual = self.lines > USUAL;
            self.lines = self.lines - self.lines / 64 + if other { 65_536 / 64 } else { 0 };
            if other && !usual {
                self.longest_pause = self.longest_pause.max(took);
            } else {
                self.steps.add(took);
            }
        }
        self.seen = self.seen.saturating_add(1);
        self.state = State::Training;
        self.begin(at);
        self.disturbed = false;
        // A step after its beginning: the training does not stand still for it.
        self.checkpoint = None;
        true
    }

    /// A rank counts its steps anew, as some trainings do in each epoch of their data: lower ones than before follow.
    pub fn counts_anew(&mut self, at: Time) {
        self.step = None;
        self.disturbed = true;
        self.active(at);
    }

    /// The last step was made, or a rank has ended as it should.
    pub fn finishing(&mut self, at: Time) {
        if matches!(self.state, State::Loading | State::Training) {
            self.state = State::Finishing;
            self.begin(at.max(self.since));
        }
    }

    /// A line of output that tells no step, or another sign that something goes on: data is loaded, an evaluation runs.
    /// Where there are many, one a second is enough.
    pub fn active(&mut self, at: Time) {
        if self.state != State::Stopped && at >= self.since {
            self.active = self.active.max(Some(at));
            self.stage = Stage::Fine;
        }
    }

    /// The training stands still for a checkpoint.
    pub fn checkpoint_begun(&mut self, at: Time) {
        if self.state == State::Training {
            self.checkpoint = Some(at);
            self.disturbed = true;
            self.stage = Stage::Fine;
        }
    }

    /// The checkpoint is complete, or will not be.
    pub fn checkpoint_over(&mut self, at: Time) {
        if let Some(begun) = self.checkpoint.take() {
            self.longest_checkpoint = self.longest_checkpoint.max(at.since(begun));
            self.begin(at.max(self.since));
            self.disturbed = true;
        }
    }

    /// A hang of which nobody was the culprit ended in a restart. It may have been none, but a phase that is slow each
    /// time: so the next is waited for twice as long, until a checkpoint shows that the training gets on.
    pub fn doubt(&mut self) {
        self.doubt = (self.doubt + 1).min(DOUBTS);
    }

    /// The training gets on: what is waited is what its steps explain.
    pub fn trust(&mut self) {
        self.doubt = 0;
    }

    /// When a step is missed, where one is to come.
    #[must_use]
    pub fn missed(&self, limits: &Limits) -> Option<Time> {
        self.between_steps().then(|| self.since + self.doubled(self.limits(limits).0))
    }

    /// A wait, doubled as often as it is doubted.
    #[must_use]
    pub fn doubled(&self, wait: Span) -> Span {
        times(wait, 1 << self.doubt)
    }

    /// Whether it is heard what the gang does. Once it is again, the wait begins anew.
    pub fn heard(&mut self, heard: bool, at: Time) {
        if heard && self.deaf {
            self.begin(self.since.max(at));
            self.disturbed = true;
            self.checkpoint = self.checkpoint.map(|begun| begun.max(at));
        }
        self.deaf = !heard;
    }

    /// There is evidence of another kind: what was suspected is a hang. Returns whether it was.
    pub fn confirm(&mut self) -> bool {
        let was = self.stage == Stage::Suspected;
        if was {
            self.stage = Stage::Hung;
        }
        was
    }

    /// The stage at an instant; it rises as time passes, and what is heard brings it back.
    pub fn ask(&mut self, now: Time, limits: &Limits) -> Stage {
        for (stage, at) in self.instants(limits).into_iter().flatten() {
            if at.is_some_and(|at| at <= now) {
                self.stage = self.stage.max(stage);
            }
        }
        self.stage
    }

    /// The stage as it was told last, or as what was heard since brought it back.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The next instant at which [`Hang::ask`] would say more than it has.
    #[must_use]
    pub fn next(&self, limits: &Limits) -> Option<Time> {
        self.instants(limits)?.into_iter().filter(|(stage, _)| *stage > self.stage).filter_map(|(_, at)| at).min()
    }

    /// How long no higher step was seen.
    #[must_use]
    pub fn quiet(&self, now: Time) -> Span {
        now.since(self.since)
    }

    /// Whether steps were seen in this epoch, and neither a checkpoint nor an evaluation explains that none comes.
    #[must_use]
    pub fn between_steps(&self) -> bool {
        let alone = self.active.is_none() || self.lines > USUAL;
        self.state == State::Training && self.checkpoint.is_none() && alone && !self.deaf
    }

    /// The p99 of the time between two reports of steps, at most 9% too high; none before there are some.
    #[must_use]
    pub fn p99(&self) -> Option<Span> {
        self.classes().map(|(_, p99)| Sketch::end(p99))
    }

    /// How long is waited for a step, until it is told and until it is acted on, where it is not doubted.
    #[must_use]
    pub fn limits(&self, limits: &Limits) -> (Span, Span) {
        let Some((p50, p99)) = self.classes().filter(|_| self.seen >= FIRST) else {
            let longest = self.steps.quantile(1000).map_or(Span(0), Sketch::end);
            let wait = limits.floor.max(limits.warm_up).max(times(longest, limits.factor));
            return (wait, wait);
        };
        // From the lower end, so that no hang is told later than it should be.
        let steps = times(Sketch::start(p99), limits.factor);
        let told = limits.floor.max(steps);
        let tail = Sketch::end(p50 + (p99 - p50) * TAIL.0 / TAIL.1);
        (told, told.max(tail.min(times(steps, 2))))
    }

    fn classes(&self) -> Option<(usize, usize)> {
        let (p50, p99) = (self.steps.quantile(500)?, self.steps.quantile(990)?);
        match self.steps.len() {
            0..SOME => None,
            SOME..MANY => Some((p50, p99.max(p50 + 2 * PER_DOUBLING))),
            _ => Some((p50, p99)),
        }
    }

    fn begin(&mut self, at: Time) {
        self.since = at;
        self.active = None;
        self.stage = Stage::Fine;
    }

    /// When each stage is reached if nothing more is heard.
    fn instants(&self, limits: &Limits) -> Option<[(Stage, Option<Time>); 3]> {
        if self.deaf {
            return None;
        }
        let (told, acted) = match self.state {
            State::Stopped => return None,
            State::Loading => {
                let until = self.active.unwrap_or(self.since) + limits.first_step;
                let until = until.min(self.since + limits.setup.max(limits.first_step));
                (until, until)
            }
            State::Finishing => {
                let until = self.active.unwrap_or(self.since) + limits.first_step;
                (until, until)
            }
            State::Training => match self.checkpoint {
                Some(begun) => {
                    let until = begun + limits.checkpoint.max(times(self.longest_checkpoint, limits.factor));
                    (until, until)
                }
                None => self.after_step(limits),
            },
        };
        let [told, acted] = [told, acted].map(|at| self.since + self.doubled(at.since(self.since)));
        let quiet = self.since + Span(told.since(self.since).0 / 3 * 2);
        let acted = self.tells_steps.then_some(acted);
        Some([(Stage::Quiet, Some(quiet)), (Stage::Suspected, Some(told)), (Stage::Hung, acted)])
    }

    fn after_step(&self, limits: &Limits) -> (Time, Time) {
        let (told, acted) = self.limits(limits);
        let Some(active) = self.active else { return (self.since + told, self.since + acted) };
        let pause = times(self.longest_pause, limits.factor);
        let bound = self.since + limits.printing.max(pause).max(acted);
        let until = |limit: Span| {
            let after = if self.lines > USUAL {
                limit
            } else {
                let median = self.steps.quantile(500).map_or(Span(0), Sketch::end);
                limit.max(limits.evaluation).max(times(median, EVALUATION)).max(Span(self.longest_pause.0 / 2 * 3))
            };
            (active + after).max(self.since + limit).min(bound)
        };
        (until(told), until(acted))
    }
}

fn times(span: Span, n: i64) -> Span {
    Span(span.0.saturating_mul(n))
}

#[cfg(test)]
mod tests;
