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
    #[serde(default)]
    pub runs: BTreeMap<u32, Histogram>,
    /// Which part of its time limit a job used, in 32 parts; newer ones count more.
    #[serde(default)]
    pub parts: Vec<u32>,
    /// How good the estimates of starts were.
    #[serde(default)]
    pub calibration: Calibration,
}

/// What one observation weighs in a histogram that forgets.
const WEIGHT: u32 = 1 << 10;

/// Parts of a time limit that are told apart.
const PARTS: usize = 32;

impl History {
    /// A job of so many GPUs has succeeded after so long.
    pub fn ran(&mut self, gpus: u32, ran: Span, limit: Option<Span>) {
        self.runs.entry(size_class(gpus)).or_default().add(ran);
        let Some(limit) = limit.filter(|l| l.0 > 0) else { return };
        if self.parts.len() < PARTS {
            self.parts = vec![0; PARTS];
            self.parts[PARTS - 1] = WEIGHT;
        }
        self.parts.iter_mut().for_each(|n| *n -= n.div_ceil(256));
        let part = (ran.0.max(1).saturating_mul(32) - 1) / limit.0;
        self.parts[usize::try_from(part).unwrap_or(0).min(PARTS - 1)] += WEIGHT;
    }

    /// How long a job with a limit is expected to run in all, that ran for `past` already.
    #[must_use]
    pub fn total(&self, past: Span, limit: Span) -> Span {
        let (past, limit) = (past.0.max(0), limit.0.max(1));
        if self.parts.is_empty() {
            return Span(limit.max(past + 1000));
        }
        let first = usize::try_from(past.saturating_mul(32) / limit).unwrap_or(PARTS).min(PARTS - 1);
        let (mut weight, mut sum) = (0i128, 0i128);
        for (i, n) in self.parts.iter().enumerate().skip(first) {
            // In 64ths of the limit: the middle of the part that is left; the last part is the whole limit.
            let middle = if i == PARTS - 1 { 64 } else { 2 * i.max(first) + 1 };
            weight += i128::from(*n);
            sum += i128::from(*n) * i128::try_from(middle).unwrap_or(64);
        }
        let least = i128::from(WEIGHT / 2);
        if weight < least {
            sum += (least - weight) * i128::try_from(first + PARTS).unwrap_or(64);
            weight = least;
        }
        let total = i128::from(limit) * sum / (64 * weight);
        Span(i64::try_from(total).unwrap_or(i64::MAX).max(past + 1000))
    }

    /// How much longer a job without a limit is expected to run: the median of what jobs of its size still ran
    /// that had run as long; those of other sizes count a tenth.
    #[must_use]
    pub fn left(&self, gpus: u32, past: Span) -> Span {
        let first = if past.0 <= 0 { 0 } else { Histogram::class(past) };
        let own = self.runs.get(&size_class(gpus));
        let most = self.runs.values().map(|h| h.0.len()).max().unwrap_or(0).max(PRIOR.1);
        let at = |class: usize| {
            let all: u64 = self.runs.values().filter_map(|h| h.0.get(class)).map(|n| u64::from(*n)).sum();
            let own = own.and_then(|h| h.0.get(class)).map_or(0, |n| u64::from(*n));
            10 * own + all + u64::from((PRIOR.0..PRIOR.1).contains(&class))
        };
        let weights: Vec<u64> = (first..most).map(at).collect();
        let all: u64 = weights.iter().sum();
        if all == 0 {
            return past.max(Span::minutes(60));
        }
        let mut seen = 0;
        for (i, weight) in weights.iter().enumerate() {
            seen += weight;
            if 2 * seen >= all {
                let class = first + i;
                let middle = Span((Histogram::end(class).0 + Histogram::end(class.saturating_sub(1)).0) / 2);
                return Span((middle.0 - past.0).max(past.0 / 8).max(1000));
            }
        }
        past.max(Span::minutes(60))
    }
}

/// Classes of run times that count a little before anything is known: from a minute to three days.
const PRIOR: (usize, usize) = (12, 36);

/// An estimate of a start, made at a job's submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Estimate {
    /// When it was made.
    pub made: Time,
    /// The wait that the forecast came to, before it was calibrated.
    pub base: Span,
    /// The size class and the magnitude of the base, see [`Calibration::class`].
    pub class: u32,
    /// As likely before as after.
    pub p50: Time,
    /// Nine of ten start before.
    pub p90: Time,
}

/// How waits compared with their forecasts: what makes of a forecast a median and a ninetieth percentile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Calibration {
    /// All of them.
    all: Ratios,
    /// By class.
    by_class: BTreeMap<u32, Ratios>,
    /// What is added to the ninetieth percentile, in 256ths of a doubling: more after a miss, less after a hit.
    offset: i64,
    /// How many waits it has seen.
    seen: u32,
}

/// Ratios of waits and forecasts, on a logarithmic scale, newer ones counting more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct Ratios(Vec<u32>);

/// Classes of ratios: eight for each doubling, from 2^−8 to 2^8.
const RATIOS: usize = 128;

/// Waits shorter than this are not learned from: whoever waits so little asks for no estimate.
const SHORT: Span = Span::minutes(10);

/// Added to both sides of a ratio, so that a forecast of nothing has one.
const FLOOR: u64 = 60_000;

impl Ratios {
    fn add(&mut self, ratio: i64) {
        if self.0.len() < RATIOS {
            self.0 = vec![0; RATIOS];
        }
        self.0.iter_mut().for_each(|n| *n -= n.div_ceil(128));
        // The middle of a class is a whole eighth, so that a forecast that comes true is in the middle of one.
        let class = usize::try_from((ratio + 16).div_euclid(32) + 64).unwrap_or(0).min(RATIOS - 1);
        self.0[class] += WEIGHT;
    }
}

/// What the p90 is above what was seen, in 256ths of a doubling: who waits yet, and is late, was not seen.
const MARGIN: i64 = 32;

impl Calibration {
    /// The class of a forecast: the size of the job, and the magnitude of the wait.
    #[must_use]
    pub fn class(gpus: u32, base: Span) -> u32 {
        let size = match gpus {
            0 | 1 => 0,
            2..=7 => 1,
            8 => 2,
            _ => 3,
        };
        let minutes = u64::try_from(base.0 / 60_000).unwrap_or(0) + 1;
        (size << 8) | (minutes.ilog2() / 2)
    }

    /// The median and the ninetieth percentile of a wait, from its forecast.
    #[must_use]
    pub fn quantiles(&self, base: Span, class: u32) -> (Span, Span) {
        let mut mix = vec![0u64; RATIOS];
        // Before anything is known: most likely as forecast, or half or twice as long.
        for (class, weight) in [(56, 1), (60, 1), (64, 3), (68, 1), (72, 1)] {
            mix[class] = weight * u64::from(WEIGHT) / 7;
        }
        let prior = mix.clone();
        for ratios in [Some(&self.all), self.by_class.get(&class)].into_iter().flatten() {
            if ratios.0.is_empty() {
                continue;
            }
            // What is known more generally counts like four observations.
            let have: u64 = mix.iter().sum();
            let four = 4 * u64::from(WEIGHT);
            if have > four {
                mix.iter_mut().for_each(|n| *n = *n * four / have);
            }
            mix.iter_mut().zip(&ratios.0).for_each(|(m, n)| *m += u64::from(*n));
        }
        let doubt = 32 * 128 / (128 + u64::from(self.seen));
        mix.iter_mut().zip(prior).for_each(|(m, p)| *m += p * doubt);
        let p50 = quantile(&mix, 450);
        // Less than half a class above the median is not told apart from it.
        let p90 = (quantile(&mix, 900) + MARGIN + self.offset).max(p50 + 16);
        let at = |e: i64| {
            let ms = fixed::scale_256(u64::try_from(base.0).unwrap_or(0) + FLOOR, e).saturating_sub(FLOOR);
            Span(i64::try_from(ms).unwrap_or(i64::MAX >> 2))
        };
        (at(p50), at(p90))
    }

    /// Learns from a job that has started.
    pub fn learn(&mut self, estimate: &Estimate, started: Time) {
        let wait = started.since(estimate.made);
        if wait <= SHORT {
            return;
        }
        let log = |span: Span| fixed::log2_256(u64::try_from(span.0).unwrap_or(0) + FLOOR);
        let ratio = log(wait) - log(estimate.base);
        self.all.add(ratio);
        self.by_class.entry(estimate.class).or_default().add(ratio);
        self.seen = self.seen.saturating_add(1);
        // 24 up and 1.3 down balance at one miss in twenty: late starts are heard of late.
        let down = i64::from(self.seen % 4 != 3) + i64::from(self.seen.is_multiple_of(2));
        let step = if started > estimate.p90 { 24 } else { -down };
        self.offset = (self.offset + step).clamp(-512, 6 * 256);
    }
}

/// The class, in 256ths of a doubling, below which so many thousandths lie; within a class it is interpolated.
fn quantile(mix: &[u64], thousandths: u64) -> i64 {
    let all: u64 = mix.iter().sum();
    let want = all * thousandths / 1000;
    let mut seen = 0;
    for (class, n) in mix.iter().enumerate() {
        if seen + n > want {
            let inside = i64::try_from((want - seen) * 32 / n).unwrap_or(0);
            return (i64::try_from(class).unwrap_or(0) - 64) * 32 - 16 + inside;
        }
        seen += n;
    }
    0
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
        let whole = 1_000i64 << class.div_ceil(2).min(40);
        // √2 < 1.4143.
        Span(if class.is_multiple_of(2) { whole / 1000 * 14_143 / 10 } else { whole })
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
