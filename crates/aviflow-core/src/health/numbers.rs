//! Whether the loss is still a number, and whether it has jumped.
//!
//! Losses come as [`Reading`]s in millionths: who reads them from a training's words rounds them. One watch follows
//! one rank's losses, the lowest that tells any; where all ranks log, the others tell the same or only their share.
//!
//! A spike is a loss above the median of the last 64 by more than eight standard deviations, estimated from
//! their median absolute deviation, and by more than a fifth of the median, in [`SPIKE`] readings in a row. So neither
//! the falling loss of a warm-up nor a loss that always was noisy is one, nor a single odd batch. A loss that stays
//! there for a whole window is the new one.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A loss, as far as it is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reading {
    /// In millionths.
    Micro(i64),
    /// NaN or infinite.
    NotFinite,
}

/// Readings in a row that are no numbers, after which it is told: loss scaling of FP16 skips single steps so.
pub const NOT_FINITE: u32 = 3;

/// Readings in a row that are far above the others, after which it is told.
pub const SPIKE: u32 = 5;

/// Readings that a loss is compared with.
const WINDOW: usize = 64;

/// Readings before which nothing is a spike.
const LEAST: usize = 32;

/// What a reading showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Shows {
    /// The loss is no number any more.
    NotANumber {
        /// The first step of which it was none.
        step: u64,
    },
    /// The loss has jumped. In millionths.
    Spike {
        /// The first step of the spike.
        step: u64,
        /// The median before it.
        before: i64,
        /// The loss now.
        loss: i64,
    },
    /// It is a number again, or near where it was.
    Over,
}

/// The watch over the losses of one gang. At most 0.7 kB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Numbers {
    rank: Option<u32>,
    step: Option<u64>,
    /// Whether its loss was a number before: some ranks have none by design.
    was_finite: bool,
    recent: VecDeque<i64>,
    /// The first step and how many in a row: not finite; too high.
    not_finite: Option<(u64, u32)>,
    high: Option<(u64, u32)>,
}

impl Numbers {
    /// Ranks start anew: what is in a row ends. What losses were stays known as long as steps go on from where they
    /// were.
    pub fn started(&mut self) {
        (self.rank, self.not_finite, self.high) = (None, None, None);
        self.was_finite = false;
    }

    /// A rank told the loss of a step.
    pub fn loss(&mut self, rank: u32, step: u64, reading: Reading) -> Option<Shows> {
        if self.rank.is_some_and(|r| r < rank) || (self.rank == Some(rank) && self.step == Some(step)) {
            return None;
        }
        let mut anew = false;
        // Of a rank that was followed, or the first of an epoch: it counts from an earlier step on, as of an older
        // checkpoint, where the loss was another.
        if self.rank.is_none_or(|r| r == rank) && self.step.is_some_and(|last| step <= last) {
            self.recent.clear();
            anew = self.high.take().is_some_and(|(_, n)| n >= SPIKE);
        }
        self.was_finite &= self.rank == Some(rank);
        (self.rank, self.step) = (Some(rank), Some(step));
        match reading {
            Reading::NotFinite if !self.was_finite => None,
            Reading::NotFinite => {
                let (first, n) = self.not_finite.map_or((step, 1), |(first, n)| (first, n.saturating_add(1)));
                self.not_finite = Some((first, n));
                (n == NOT_FINITE).then_some(Shows::NotANumber { step: first })
            }
            Reading::Micro(loss) => {
                self.was_finite = true;
                let was = self.not_finite.take().is_some_and(|(_, n)| n >= NOT_FINITE);
                self.finite(step, loss).or((was || anew).then_some(Shows::Over))
            }
        }
    }

    fn finite(&mut self, step: u64, loss: i64) -> Option<Shows> {
        let Some((median, far)) = self.far() else {
            self.recent.push_back(loss);
            return None;
        };
        if i128::from(loss) > i128::from(median) + far {
            let (first, n) = self.high.map_or((step, 1), |(first, n)| (first, n.saturating_add(1)));
            self.high = Some((first, n));
            if n as usize >= WINDOW {
                // It stays here.
                self.recent.clear();
                self.high = None;
            }
            return (n == SPIKE).then_some(Shows::Spike { step: first, before: median, loss });
        }
        if self.recent.len() >= WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(loss);
        self.high.take().filter(|(_, n)| *n >= SPIKE).map(|_| Shows::Over)
    }

    /// The median of the recent losses, and how far above it is too far.
    fn far(&self) -> Option<(i64, i128)> {
        if self.recent.len() < LEAST {
            return None;
        }
        let mut values: Vec<i64> = self.recent.iter().copied().collect();
        let at = values.len() / 2;
        let median = *values.select_nth_unstable(at).1;
        let mut distances: Vec<u64> = values.iter().map(|v| v.abs_diff(median)).collect();
        let mad = *distances.select_nth_unstable(at).1;
        // 8 · 1.4826 · MAD.
        let noise = i128::from(mad) * 11_861 / 1000;
        Some((median, noise.max(i128::from(median.unsigned_abs()) / 5)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::chance::Chance;

    /// Reads losses of steps from 0 on; what was shown, by the step at which it was.
    fn shown(losses: impl IntoIterator<Item = f64>) -> Vec<(u64, Shows)> {
        let mut numbers = Numbers::default();
        let read = |loss: f64| if loss.is_finite() { Reading::Micro((loss * 1e6) as i64) } else { Reading::NotFinite };
        (0..).zip(losses).filter_map(|(step, loss)| Some((step, numbers.loss(0, step, read(loss))?))).collect()
    }

    /// A loss that falls from 11 to 2 as that of a language model does, with noise.
    fn falling(n: u64, noise: f64, seed: u64) -> Vec<f64> {
        let mut chance = Chance::new(seed);
        (0..n).map(|s| 2.0 + 9.0 / (1.0 + s as f64 / 50.0) + noise * chance.normal()).collect()
    }

    #[test]
    fn a_loss_that_is_no_number_is_told_once_it_stays_so() {
        let nan = f64::NAN;
        assert_eq!(shown([2.0, nan, nan, 2.0, f64::INFINITY, 2.0]), []);
        let told = shown([2.0, nan, f64::NEG_INFINITY, nan, nan, nan, 2.0, 2.0]);
        assert_eq!(told, [(3, Shows::NotANumber { step: 1 }), (6, Shows::Over)]);
        assert_eq!(shown([nan; 100]), [], "it never had one");
    }

    #[test]
    fn warming_up_and_noise_are_no_spikes() {
        for (seed, noise) in [(1, 0.0), (2, 0.02), (3, 0.3), (4, 2.0)] {
            assert_eq!(shown(falling(20_000, noise, seed)), [], "noise of {noise}");
        }
        let mut odd = falling(5000, 0.05, 5);
        (100..5000).step_by(97).for_each(|i| odd[i] = 30.0);
        assert_eq!(shown(odd), [], "single batches");
        let mut chance = Chance::new(6);
        let rewards = (0..5000).map(|_| 0.01 * chance.normal());
        assert_eq!(shown(rewards), [], "a loss around zero");
    }

    #[test]
    fn a_jump_is_told_and_its_end_too() {
        let mut losses = falling(2000, 0.05, 7);
        losses[1500..1540].iter_mut().for_each(|l| *l += 2.0);
        let told = shown(losses.clone());
        assert!(matches!(told[0], (1504, Shows::Spike { step: 1500, .. })), "{told:?}");
        assert_eq!(told[1..], [(1540, Shows::Over)]);
        losses[1500..].iter_mut().for_each(|l| *l += 2.0);
        assert_eq!(shown(losses).len(), 1, "one that stays is told once");
    }

    #[test]
    fn a_resume_from_an_older_checkpoint_is_no_spike() {
        let mut numbers = Numbers::default();
        let mut read = |step: u64, loss: f64| numbers.loss(0, step, Reading::Micro((loss * 1e6) as i64));
        let loss = |step: u64| 2.0 + 9.0 / (1.0 + step as f64 / 50.0);
        assert!((0..500).all(|step| read(step, loss(step)).is_none()));
        // In the same epoch, as the training itself went back.
        assert!((20..500).all(|step| read(step, loss(step)).is_none()), "steps count anew");
        numbers.started();
        let mut read = |step: u64, loss: f64| numbers.loss(0, step, Reading::Micro((loss * 1e6) as i64));
        assert!((10..500).all(|step| read(step, loss(step)).is_none()), "and in another epoch");
        // Where it goes on from where it was, what was known still counts.
        numbers.started();
        let mut read = |step: u64, loss: f64| numbers.loss(0, step, Reading::Micro((loss * 1e6) as i64));
        assert!((500..510).any(|step| matches!(read(step, 9.0), Some(Shows::Spike { .. }))));
    }

    #[test]
    fn one_rank_is_followed() {
        let mut numbers = Numbers::default();
        for step in 0..3 {
            assert_eq!(numbers.loss(4, step, Reading::Micro(1)), None);
        }
        assert_eq!(numbers.loss(0, 1, Reading::Micro(1)), None, "a lower one is heard");
        assert_eq!(numbers.loss(0, 2, Reading::NotFinite), None);
        assert_eq!(numbers.loss(4, 3, Reading::NotFinite), None, "and then no other");
        assert_eq!(numbers.loss(0, 2, Reading::NotFinite), None, "what comes twice counts once");
        assert_eq!(numbers.loss(0, 3, Reading::NotFinite), None);
        assert!(numbers.loss(0, 4, Reading::NotFinite).is_some());
        let mut wild = Numbers::default();
        for step in 0..1000 {
            wild.loss(0, step, Reading::Micro(if step % 2 == 0 { i64::MIN } else { i64::MAX }));
        }
    }
}
