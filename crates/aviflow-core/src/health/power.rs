//! GPUs that report full utilization at the power of idle ones.
//!
//! A kernel that only waits, such as that of a collective, counts as full utilization and needs little power. All
//! healthy ranks of a gang do so for a moment in each step; where most of them do so for long and no step comes, one
//! rank is not where the others wait for it.

use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// What counts as waiting, and for how long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// Utilization from which on a GPU is fully used, in percent.
    pub utilization: u32,
    /// Power up to which it only waits, in percent of the board's limit: an H100 of 700 W is idle below 120 W and waits
    /// in NCCL below 210 W.
    pub power: u32,
    /// How long most of the ranks wait before it is told, without a step.
    pub wait: Span,
}

impl Limits {
    /// What is waited where nothing else is said.
    #[must_use]
    pub const fn standard() -> Limits {
        Limits { utilization: 95, power: 30, wait: Span::seconds(60) }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::standard()
    }
}

/// The watch over the GPUs of one gang. One byte a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Power {
    /// By rank, whether it waits; none where nothing was heard.
    ranks: Vec<Option<bool>>,
    heard: usize,
    waiting: usize,
    since: Option<Time>,
}

impl Power {
    /// Ranks start anew.
    pub fn started(&mut self) {
        *self = Power::default();
    }

    /// A sample of the GPU of one of `ranks` ranks, both in percent, the power of its limit. What is missing is no
    /// sample.
    pub fn sample(&mut self, rank: u32, ranks: u32, utilization: u32, power: u32, at: Time, limits: &Limits) {
        if rank >= ranks {
            return;
        }
        if self.ranks.len() < ranks as usize {
            self.ranks.resize(ranks as usize, None);
        }
        let waits = utilization >= limits.utilization && power <= limits.power;
        let before = self.ranks[rank as usize].replace(waits);
        self.heard += usize::from(before.is_none());
        self.waiting += usize::from(waits);
        self.waiting -= usize::from(before == Some(true));
        if 2 * self.waiting > self.heard {
            self.since.get_or_insert(at);
        } else {
            self.since = None;
        }
    }

    /// A step ended, or something else explains that GPUs wait.
    pub fn step(&mut self, at: Time) {
        self.since = self.since.map(|since| since.max(at));
    }

    /// When it is told if nothing changes.
    #[must_use]
    pub fn due(&self, limits: &Limits) -> Option<Time> {
        self.since.map(|since| since + limits.wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_must_wait_for_long_and_without_a_step() {
        let limits = Limits::default();
        let mut power = Power::default();
        assert_eq!(power.due(&limits), None);
        let sample = |power: &mut Power, rank, busy, watts, s: i64| {
            power.sample(rank, 4, busy, watts, Time(s * 1000), &limits);
            power.due(&limits).map(|at| at.0 / 1000)
        };
        assert_eq!(sample(&mut power, 0, 100, 90, 0), None, "it computes");
        assert_eq!(sample(&mut power, 1, 0, 10, 0), None, "it does nothing");
        assert_eq!(sample(&mut power, 2, 100, 20, 1), None);
        assert_eq!(sample(&mut power, 3, 100, 20, 2), None, "half of them");
        assert_eq!(sample(&mut power, 1, 100, 25, 3), Some(63));
        assert_eq!(sample(&mut power, 1, 100, 25, 30), Some(63), "the same again");
        power.step(Time(40_000));
        assert_eq!(sample(&mut power, 0, 100, 90, 41), Some(100));
        assert_eq!(sample(&mut power, 2, 100, 80, 42), None);
        assert_eq!(sample(&mut power, 9, 100, 20, 42), None, "no such rank");
    }
}
