//! What is remembered of the past: decayed use, and how long jobs ran.

use crate::fixed;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// GPU-time that counts less the longer it is ago: half after each half-life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decayed {
    /// GPU-milliseconds, as of `at`.
    pub value: u64,
    /// The instant of `value`.
    pub at: Time,
    /// GPUs held since then.
    pub gpus: u32,
}

impl Decayed {
    /// The decayed GPU-milliseconds at `now`.
    ///
    /// d(v)/dt = gpus − v·ln 2/half-life, whose solution is v·2^(−t/h) + gpus·h/ln 2·(1 − 2^(−t/h)).
    #[must_use]
    pub fn at(&self, now: Time, half_life: Span) -> u64 {
        let past = now.since(self.at).0.unsigned_abs();
        let half_life = half_life.0.max(1).unsigned_abs();
        let left = fixed::half_to(past, half_life);
        let full = u128::from(self.gpus) * u128::from(half_life) * u128::from(fixed::ONE) / u128::from(fixed::LN_2);
        let kept = u128::from(self.value) * u128::from(left) / u128::from(fixed::ONE);
        let gained = full * u128::from(fixed::ONE - left) / u128::from(fixed::ONE);
        u64::try_from(kept + gained).unwrap_or(u64::MAX)
    }

    /// From `now` on, `gpus` are held.
    #[must_use]
    pub fn hold(&self, gpus: u32, now: Time, half_life: Span) -> Decayed {
        Decayed { value: self.at(now, half_life), at: now.max(self.at), gpus }
    }
}

/// How long jobs ran, and how good the estimates of their starts were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Run times of jobs that succeeded, by the class of [`size_class`].
    pub runs: BTreeMap<u32, Histogram>,
}

/// The class of a job's size: 0 for one GPU, and one more for each doubling.
#[must_use]
pub fn size_class(gpus: u32) -> u32 {
    gpus.max(1).ilog2()
}

/// Counts in classes of a ratio of √2, from one second on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Histogram(pub Vec<u32>);

/// The count from which on everything is halved, so that a histogram follows changes.
const FULL: u32 = 4096;

impl Histogram {
    /// The class of a span: two for each doubling of the seconds.
    #[must_use]
    pub fn class(span: Span) -> usize {
        let s = (span.0 / 1000).max(1).unsigned_abs();
        let octave = s.ilog2();
        // Whether the span is in the upper half of its octave, by s² ≥ 2^(2·octave+1).
        let upper = u128::from(s) * u128::from(s) >= 1u128 << (2 * octave + 1);
        (2 * octave as usize) + usize::from(upper)
    }

    /// The upper end of a class.
    #[must_use]
    pub fn end(class: usize) -> Span {
        let whole = 1_000i64 << ((class + 1) / 2).min(40);
        // √2 < 1.4143.
        Span(if class % 2 == 0 { whole / 1000 * 14_143 / 10 } else { whole })
    }

    /// Adds a span.
    pub fn add(&mut self, span: Span) {
        let class = Histogram::class(span);
        if self.0.len() <= class {
            self.0.resize(class + 1, 0);
        }
        self.0[class] += 1;
        if self.total() >= FULL {
            self.0.iter_mut().for_each(|n| *n /= 2);
        }
    }

    /// How many spans it holds.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.0.iter().sum()
    }

    /// The upper end of the class below which `percent` of the spans longer than `past` lie; none without any.
    #[must_use]
    pub fn quantile_beyond(&self, past: Span, percent: u32) -> Option<Span> {
        let first = if past.0 <= 0 { 0 } else { Histogram::class(past) + 1 };
        let longer: u32 = self.0.iter().skip(first).sum();
        if longer == 0 {
            return None;
        }
        let want = (u64::from(longer) * u64::from(percent)).div_ceil(100);
        let mut seen = 0u64;
        for (class, n) in self.0.iter().enumerate().skip(first) {
            seen += u64::from(*n);
            if seen >= want {
                return Some(Histogram::end(class));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEEK: Span = Span::minutes(7 * 24 * 60);

    #[test]
    fn use_halves_in_a_half_life_and_grows_towards_its_limit() {
        let d = Decayed { value: 1_000_000, at: Time(0), gpus: 0 };
        assert_eq!(d.at(Time(WEEK.0), WEEK), 500_000);
        assert_eq!(d.at(Time(2 * WEEK.0), WEEK), 250_000);
        let d = Decayed { value: 0, at: Time(0), gpus: 8 };
        let hour = d.at(Time(3_600_000), WEEK);
        assert!((28_700_000..=28_800_000).contains(&hour), "{hour}");
        // In the long run: 8 · week / ln 2.
        let forever = d.at(Time(100 * WEEK.0), WEEK);
        let limit = (8.0 * WEEK.0 as f64 / std::f64::consts::LN_2) as u64;
        assert!(forever.abs_diff(limit) < limit / 1000, "{forever} {limit}");
    }

    #[test]
    fn a_histogram_finds_quantiles_of_what_is_left() {
        let mut h = Histogram::default();
        for minutes in 1..=100 {
            h.add(Span::minutes(minutes));
        }
        let median = h.quantile_beyond(Span(0), 50).expect("some");
        assert!((50..=72).contains(&(median.0 / 60_000)), "{median}");
        let later = h.quantile_beyond(Span::minutes(60), 50).expect("some");
        assert!(later >= Span::minutes(80), "{later}");
        assert_eq!(h.quantile_beyond(Span::minutes(500), 50), None);
    }

    #[test]
    fn classes_are_in_order() {
        let mut last = 0;
        for s in 1..100_000 {
            let class = Histogram::class(Span::seconds(s));
            assert!(class >= last, "{s}");
            assert!(Histogram::end(class) >= Span::seconds(s), "{s} {:?}", Histogram::end(class));
            last = class;
        }
    }
}
