//! Quantiles of durations in bounded memory: counts in classes that grow by a constant factor.
//!
//! What is new counts more: once the counts stand for [`KEPT`] observations, all are halved, so that a training whose
//! steps become longer or shorter is judged by what it does now.

use crate::fixed;
use crate::time::Span;
use serde::{Deserialize, Serialize};

/// Classes to a doubling: the ends of a class are 2^(1/8), 9%, apart.
pub const PER_DOUBLING: usize = 8;

/// Classes: from one millisecond to 2^30 of them, twelve days.
const CLASSES: usize = 30 * PER_DOUBLING;

/// What one observation counts, so that halving loses nothing of the few in the tail.
const WEIGHT: u32 = 256;

/// Observations from which on all are halved.
pub const KEPT: u32 = 1024;

/// Counts by class. 976 bytes, whatever it has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sketch {
    /// Empty before the first observation.
    counts: Vec<u32>,
    total: u32,
}

impl Sketch {
    /// The class of a span.
    #[must_use]
    pub fn class(span: Span) -> usize {
        let log = fixed::log2_256(u64::try_from(span.0).unwrap_or(0));
        usize::try_from(log / (256 / 8)).unwrap_or(0).min(CLASSES - 1)
    }

    /// The upper end of a class, rounded up.
    #[must_use]
    pub fn end(class: usize) -> Span {
        // A 256th more, as logarithms are rounded down.
        Span((power(class.min(CLASSES - 1) + 1, 1) + 0xFFFF) >> 16)
    }

    /// The lower end of a class, rounded down.
    #[must_use]
    pub fn start(class: usize) -> Span {
        if class == 0 { Span(0) } else { Span(power(class.min(CLASSES - 1), 0) >> 16) }
    }

    /// Adds an observation.
    pub fn add(&mut self, span: Span) {
        if self.counts.is_empty() {
            self.counts = vec![0; CLASSES];
        }
        self.counts[Sketch::class(span)] += WEIGHT;
        self.total += WEIGHT;
        if self.total >= KEPT * WEIGHT {
            self.counts.iter_mut().for_each(|n| *n /= 2);
            self.total = self.counts.iter().sum();
        }
    }

    /// For how many observations the counts stand; at most [`KEPT`].
    #[must_use]
    pub fn len(&self) -> u32 {
        self.total.div_ceil(WEIGHT)
    }

    /// Whether nothing was seen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// The class at or below which so many thousandths of the observations lie; of fewer than it takes to tell, that
    /// of the longest. None without any.
    #[must_use]
    pub fn quantile(&self, thousandths: u32) -> Option<usize> {
        let want = (u64::from(self.total) * u64::from(thousandths)).div_ceil(1000).max(1);
        let mut seen = 0;
        self.counts.iter().position(|n| {
            seen += u64::from(*n);
            seen >= want
        })
    }
}

/// 2^(classes/8 + more/256), with 16 bits after the point, as the first classes are narrower than a millisecond.
fn power(classes: usize, more: i64) -> i64 {
    let classes = i64::try_from(classes).unwrap_or(0);
    i64::try_from(fixed::scale_256(1 << 16, classes * (256 / 8) + more)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_lies_in_its_class() {
        for ms in (1..100_000).chain([1 << 20, 1 << 29, (1 << 30) - 1]) {
            let class = Sketch::class(Span(ms));
            assert!((Sketch::start(class).0..=Sketch::end(class).0).contains(&ms), "{ms}");
            // No more than one class above it, with the next whole millisecond.
            assert!(Sketch::end(class).0 * 1000 <= ms * 1100 + 1000, "{ms}: {}", Sketch::end(class));
        }
        for odd in [i64::MIN, -1, 0, i64::MAX] {
            assert!(Sketch::class(Span(odd)) < CLASSES);
        }
    }

    #[test]
    fn quantiles_are_those_of_what_was_seen() {
        let mut sketch = Sketch::default();
        assert_eq!(sketch.quantile(500), None);
        (1..=1000).for_each(|n| sketch.add(Span(n * 10)));
        for (thousandths, exact) in [(500, 5000), (900, 9000), (990, 9900)] {
            let got = Sketch::end(sketch.quantile(thousandths).expect("some")).0;
            assert!(got >= exact && got * 100 <= exact * 110, "{thousandths}: {got}");
        }
        let mut few = Sketch::default();
        for ms in [1000, 1000, 7000] {
            few.add(Span(ms));
        }
        assert_eq!(few.quantile(990), Some(Sketch::class(Span(7000))), "of few, the longest");
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut sketch = Sketch::default();
        (0..10_000).for_each(|_| sketch.add(Span(60_000)));
        assert!(sketch.len() <= KEPT);
        (0..50).for_each(|_| sketch.add(Span(120_000)));
        assert_eq!(sketch.quantile(990), Some(Sketch::class(Span(120_000))), "longer steps count soon");
        (0..8 * KEPT).for_each(|_| sketch.add(Span(1000)));
        assert_eq!(sketch.quantile(990), Some(Sketch::class(Span(1000))), "and long ones are forgotten");
    }
}
