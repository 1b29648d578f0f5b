//! Whether a training stands still while it saves itself.
//!
//! That a checkpoint begins, as a hook tells or as shows on disk, does not say it: many are written in the background
//! while steps go on (`torch.distributed.checkpoint.async_save`, Megatron-LM's `--async-save`, Orbax). So it is told
//! once it is known, and as of then: when the checkpoint is complete and no step came meanwhile, or after
//! [`STANDS_STILL_MS`] without one. If steps go on after that, as after the part of a save that nothing can be computed
//! beside, or where a save is never heard of again, [`Event::CheckpointGoesOn`] says that the training does. That a
//! checkpoint failed is said where a hook says so, where it is gone from the disk, or where one that stood still is
//! followed by the next without having become complete.

use super::{Said, Training};
use crate::checkpoints::Sighting;
use crate::hooks::Phase;
use crate::protocol::Event;

/// How long a checkpoint that began must stand alone, without a step, until it is told, in milliseconds.
pub const STANDS_STILL_MS: u64 = 10_000;

/// A step that comes so shortly before a checkpoint is complete may be printed after it, in milliseconds.
const MOMENT_MS: u64 = 1000;

/// How long after a step a checkpoint that goes on is one that is saved in the background, in milliseconds: what is
/// seen on disk is seen a little late.
pub const BACKGROUND_MS: u64 = 6000;

/// Steps after which a training that was told to stand still does not: of one that does, another rank may still print
/// the step before, and the one after may be printed before the end of the save.
const STEPS: u32 = 3;

/// What is known of a training's saves.
#[derive(Debug, Default)]
pub(super) struct Saves {
    /// A hook spoke of checkpoints.
    hooked: bool,
    begun: Option<Begun>,
    /// Checkpoints that are seen on disk are saved in the background: it does not stand still.
    background: bool,
    /// The highest step, when it came, and how long after the one before.
    last: Option<(u64, u64, u64)>,
}

/// A checkpoint that began.
#[derive(Debug)]
struct Begun {
    step: u64,
    at: u64,
    told: bool,
    /// The highest step at that time, and how many came since.
    highest: Option<u64>,
    steps: u32,
    /// Since when the training goes on, at the latest, and when that was seen first.
    went_on: Option<(u64, u64)>,
    /// That was said.
    goes_on: bool,
}

impl Training {
    /// A hook told of a checkpoint.
    pub(super) fn told_save(&mut self, phase: Phase, step: u64, path: String, now: u64, said: &mut Vec<Said>) {
        if !std::mem::replace(&mut self.saves.hooked, true) {
            // What was seen on disk is told by the hooks from now on.
            self.saves.begun = None;
        }
        match phase {
            // Every rank tells it, and the last of them maybe when others are done.
            Phase::Begin if self.checkpoints.contains(&(step, Phase::Complete)) || !self.is_new(phase, step) => {}
            Phase::Begin => {
                self.end_of_begun(now, said);
                self.begin(step, now);
            }
            Phase::Complete | Phase::Failed => {
                if self.saves.begun.as_ref().is_some_and(|begun| begun.step == step) {
                    self.end_of_begun(now, said);
                }
                self.checkpoint(phase, step, path, said);
            }
        }
    }

    /// A checkpoint was seen on disk; what made it so happened at `at`.
    pub fn sighted(&mut self, sighting: Sighting, at: u64, said: &mut Vec<Said>) {
        let Sighting { phase, step, path, changed: _ } = sighting;
        if self.saves.hooked {
            return;
        }
        match phase {
            Phase::Begin => {
                // One whose steps went on is still written, or was; it is not known which.
                let given_up = |begun: &Begun| begun.told && begun.went_on.is_none() && begun.step != step;
                if let Some(given_up) = self.saves.begun.take().filter(given_up) {
                    self.checkpoint(Phase::Failed, given_up.step, String::new(), said);
                }
                if !self.saves.background {
                    self.begin(step, at);
                }
            }
            Phase::Complete => {
                if let Some(begun) = self.saves.begun.take_if(|begun| begun.step == step) {
                    self.saves.background |= begun.went_on_before(at);
                    if !begun.told && !self.saves.background {
                        self.stands_still(begun.step, begun.at, said);
                    }
                }
                if self.is_new(phase, step) {
                    said.push(Said::Earlier(at, Event::CheckpointComplete { step, path }));
                }
            }
            Phase::Failed => {
                self.saves.begun.take_if(|begun| begun.step == step);
                self.checkpoint(phase, step, path, said);
            }
        }
    }

    fn begin(&mut self, step: u64, at: u64) {
        let highest = self.highest_step();
        self.saves.begun = Some(Begun { step, at, told: false, highest, steps: 0, went_on: None, goes_on: false });
    }

    /// The one that a hook told is over, or another begins: that the training stood still for it is known now.
    fn end_of_begun(&mut self, now: u64, said: &mut Vec<Said>) {
        if let Some(begun) = self.saves.begun.take()
            && !begun.told
            && !begun.went_on_before(now)
        {
            said.push(Said::Earlier(begun.at, Event::CheckpointBegun { step: begun.step }));
        }
    }

    fn stands_still(&mut self, step: u64, at: u64, said: &mut Vec<Said>) {
        // Of those that a hook tells, it is known already that they are new.
        if self.saves.hooked || self.is_new(Phase::Begin, step) {
            said.push(Said::Earlier(at, Event::CheckpointBegun { step }));
        }
    }

    /// A rank reached a step.
    pub(super) fn went_on(&mut self, step: u64, now: u64, said: &mut Vec<Said>) {
        let Saves { begun, last, .. } = &mut self.saves;
        let took = match *last {
            Some((highest, _, _)) if step <= highest => return,
            Some((_, at, took)) => {
                *last = Some((step, now, now.saturating_sub(at)));
                took
            }
            None => {
                *last = Some((step, now, 0));
                0
            }
        };
        let Some(begun) = begun.as_mut().filter(|begun| Some(step) > begun.highest) else { return };
        begun.steps += 1;
        // The step that has ended was begun as long ago as the one before took.
        begun.went_on.get_or_insert((now.saturating_sub(took).max(begun.at), now));
        if begun.steps >= STEPS {
            self.goes_on(said);
        }
    }

    /// Says that the training does not stand still, if it was said that it does.
    fn goes_on(&mut self, said: &mut Vec<Said>) {
        if let Some(begun) = self.saves.begun.as_mut().filter(|begun| begun.told && !begun.goes_on)
            && let Some((since, _)) = begun.went_on
        {
            begun.goes_on = true;
            said.push(Said::Earlier(since, Event::CheckpointGoesOn { step: begun.step }));
        }
    }

    /// When more is known of the checkpoint that began.
    pub(super) fn save_due(&self) -> Option<u64> {
        let begun = self.saves.begun.as_ref()?;
        match begun.went_on {
            Some((_, seen)) => (!self.saves.background && !self.saves.hooked).then_some(seen + BACKGROUND_MS),
            None => (!begun.told).then_some(begun.at + STANDS_STILL_MS),
        }
    }

    /// Says what is known by now; with `all`, nobody may be left to tell more.
    pub(super) fn settle_save(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        if !all && self.save_due().is_none_or(|due| now < due) {
            return;
        }
        let Some(begun) = &mut self.saves.begun else { return };
        if begun.went_on.is_none() {
            if !std::mem::replace(&mut begun.told, true) {
                let (step, at) = (begun.step, begun.at);
                self.stands_still(step, at, said);
            }
        } else if self.save_due().is_some_and(|due| now >= due) {
            self.saves.background = true;
            self.goes_on(said);
            self.saves.begun.take_if(|begun| !begun.told);
        }
    }
}

impl Begun {
    /// Whether steps went on for long enough before a time to say that the training did not stand still.
    fn went_on_before(&self, at: u64) -> bool {
        self.went_on.is_some_and(|(_, seen)| seen + MOMENT_MS < at)
    }
}
