//! Traces for where the real ones are not at hand: made up, and fitted to their statistics.
//!
//! For each size of job the run times follow the quantiles of the real trace, drawn one from each
//! of as many equal parts as there are jobs, so that also a short trace has the long runs that
//! decide; then the runs above the median are stretched until the size has the GPU-hours it should.
//! Gaps between arrivals are drawn likewise. Jobs of Kalos come in series of one size, close
//! together, as people there submit them. What a real trace has beyond that is not in it.

mod lingjun;

pub use lingjun::lingjun;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::rng::Rng;
use crate::trace::{Format, Trace, TraceJob};
use aviflow_core::time::{Span, Time};

/// Jobs of one size.
struct Size {
    nodes: u32,
    gpus: u32,
    jobs: usize,
    /// The sum of their run times.
    hours: f64,
    /// Run times in seconds at the parts of [`PARTS`].
    seconds: [f64; 9],
}

/// Where the quantiles are taken.
const PARTS: [f64; 9] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0];

const fn size(nodes: u32, gpus: u32, jobs: usize, hours: f64, seconds: [f64; 9]) -> Size {
    Size { nodes, gpus, jobs, hours, seconds }
}

const KALOS: [Size; 11] = [
    size(1, 1, 29, 11.6, [20., 22., 24., 28., 138., 656., 2_382., 36_000., 36_459.]),
    size(1, 2, 41, 2.1, [14., 18., 37., 191., 324., 371., 374., 404., 404.]),
    size(1, 8, 19, 1.25, [18., 19., 28., 40., 258., 678., 1_953., 1_953., 1_953.]),
    size(2, 8, 11, 3.4, [224., 252., 273., 351., 3_242., 3_262., 3_346., 3_346., 3_346.]),
    size(4, 8, 14, 34.2, [17., 17., 19., 21., 22., 39_059., 83_779., 83_779., 83_779.]),
    size(8, 8, 22, 259.7, [78., 104., 333., 808., 75_709., 161_288., 215_225., 232_821., 232_821.]),
    size(16, 8, 8, 40.1, [63., 63., 68., 120., 340., 143_113., 143_113., 143_113., 143_113.]),
    size(32, 8, 52, 445.1, [20., 31., 70., 367., 27_652., 89_307., 217_412., 275_690., 275_690.]),
    size(64, 8, 84, 506.6, [31., 63., 124., 800., 10_000., 60_000., 122_714., 625_740., 625_740.]),
    size(127, 8, 1, 0.06, [221., 221., 221., 221., 221., 221., 221., 221., 221.]),
    size(128, 8, 38, 62.5, [22., 24., 38., 108., 419., 3_595., 94_612., 96_162., 96_162.]),
];

/// Seconds between arrivals.
const KALOS_GAPS: [f64; 9] = [1., 138., 305., 1_964., 16_204., 70_984., 118_783., 300_000., 578_009.];
const KALOS_SECONDS: f64 = 7_779_474.0;
/// How likely a job is of the size of the one before.
const KALOS_SERIES: f64 = 0.75;
/// How much longer gaps are before a series than in it, in parts of all gaps.
const KALOS_APART: f64 = 0.35;

const PHILLY: [Size; 10] = [
    size(1, 1, 76_627, 176_690.0, [1., 62., 122., 1_117., 2_716., 8_512., 19_137., 135_404., 3_256_045.]),
    size(1, 2, 1_818, 15_625.7, [2., 11., 16., 21., 76., 73_625., 197_392., 526_030., 2_582_803.]),
    size(1, 4, 1_870, 40_912.5, [3., 138., 772., 17_431., 89_422., 184_519., 274_339., 908_661., 2_750_674.]),
    size(1, 8, 1_643, 59_227.8, [1., 216., 1_871., 23_683., 173_288., 352_409., 525_631., 1_066_894., 4_628_226.]),
    size(2, 6, 7, 2.5, [289., 289., 556., 589., 1_571., 4_196., 4_196., 4_196., 4_196.]),
    size(2, 8, 199, 7_020.1, [2., 51., 380., 52_548., 167_367., 341_346., 511_238., 1_369_876., 1_710_643.]),
    size(3, 8, 7, 59.9, [265., 265., 314., 345., 686., 213_302., 213_302., 213_302., 213_302.]),
    size(4, 8, 67, 556.8, [2., 812., 1_182., 14_262., 53_301., 64_338., 78_004., 128_924., 128_924.]),
    size(8, 8, 6, 9.8, [1., 1., 4., 3_071., 3_173., 28_475., 28_475., 28_475., 28_475.]),
    size(16, 8, 3, 3.3, [4., 4., 4., 4_322., 7_673., 7_673., 7_673., 7_673., 7_673.]),
];

/// Jobs a day, at [`PARTS`]. The first 19 days of the trace have next to none.
const PHILLY_DAYS: [f64; 9] = [6., 160., 280., 567., 1_280., 2_280., 2_850., 3_600., 3_712.];
const PHILLY_QUIET: usize = 19;
const PHILLY_ALL_DAYS: usize = 109;
/// How the day's jobs are spread over its hours.
const PHILLY_HOURS: [f64; 24] = [
    44., 34., 38., 38., 24., 40., 57., 72., 38., 34., 35., 30., 26., 24., 22., 22., 30., 23., 27., 25., 35., 31., 39.,
    35.,
];
/// Jobs of each virtual cluster, in hundreds.
const PHILLY_USERS: [f64; 11] = [412., 161., 100., 74., 19., 15., 14., 11., 7., 4., 4.];

/// A trace with the statistics of a format's usual one, for a cluster; none for [`Format::Aviflow`], which
/// has none.
///
/// # Errors
/// If the cluster lacks the topology that the jobs would need.
pub fn like(format: Format, seed: u64, cluster: &Cluster) -> Result<Option<Trace>> {
    match format {
        Format::Kalos => Ok(Some(kalos(seed))),
        Format::Philly => Ok(Some(philly(seed, cluster.gpus_per_node))),
        Format::Lingjun => lingjun(seed, cluster).map(Some),
        Format::Aviflow => Ok(None),
    }
}

/// 319 LLM jobs of 90 days, as of Kalos.
#[must_use]
pub fn kalos(seed: u64) -> Trace {
    let mut rng = Rng::new(seed, "kalos");
    let mut jobs = series(sizes(&KALOS, &mut rng), &mut rng);
    let mut gaps = spread(jobs.len(), &KALOS_GAPS, &mut rng);
    gaps.sort_unstable_by(f64::total_cmp);
    // The longer gaps are rather before a series than in it.
    let mut ranks: Vec<(f64, usize)> = Vec::with_capacity(jobs.len());
    for i in 0..jobs.len() {
        let begins = i == 0 || jobs[i].nodes != jobs[i - 1].nodes;
        ranks.push((rng.unit() + if begins { KALOS_APART } else { 0.0 }, i));
    }
    ranks.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let mut before = vec![0.0; jobs.len()];
    for ((_, i), gap) in ranks.into_iter().zip(gaps) {
        before[i] = if i == 0 { 0.0 } else { gap };
    }
    let whole: f64 = before.iter().sum();
    let mut at = 0.0;
    for (i, (job, gap)) in jobs.iter_mut().zip(before).enumerate() {
        at += gap * KALOS_SECONDS / whole;
        job.submitted = Time((at * 1000.0) as i64);
        job.name = format!("kalos-{i}");
        job.user = "kalos".to_owned();
    }
    Trace::new(&format!("generated as Kalos, seed {seed}"), jobs)
}

/// 82,247 jobs of 109 days, as of Philly.
#[must_use]
pub fn philly(seed: u64, gpus_per_node: u32) -> Trace {
    let mut rng = Rng::new(seed, "philly");
    let mut jobs = sizes(&PHILLY, &mut rng);
    let mut days = vec![0.4; PHILLY_QUIET];
    days.extend(spread(PHILLY_ALL_DAYS - PHILLY_QUIET, &PHILLY_DAYS, &mut rng).iter().map(|n| n / 10.0));
    // The first job came at the very beginning of the quiet days.
    let mut arrivals = vec![0.0];
    while arrivals.len() < jobs.len() {
        let hour = 24 * choose(&days, &mut rng) + choose(&PHILLY_HOURS, &mut rng);
        let mut at = hour as f64 * 3600.0 + rng.between(0.0, 3600.0);
        // Several at once, a few seconds apart.
        loop {
            arrivals.push(at);
            at += -4.0 * (1.0 - rng.unit()).ln();
            if rng.unit() < 0.2 || arrivals.len() == jobs.len() {
                break;
            }
        }
    }
    arrivals.sort_unstable_by(f64::total_cmp);
    for (i, (job, at)) in jobs.iter_mut().zip(arrivals).enumerate() {
        job.submitted = Time((at * 1000.0) as i64);
        job.name = format!("philly-{i}");
        job.user = format!("vc-{}", 1 + choose(&PHILLY_USERS, &mut rng));
        let gpus = if job.nodes == 2 && job.gpus_per_node == 6 { 12 } else { job.gpus() };
        (job.nodes, job.gpus_per_node) = crate::trace::spread(gpus, gpus_per_node);
    }
    Trace::new(&format!("generated as Philly, seed {seed}"), jobs)
}

/// Jobs of these sizes, in a random order and without names or arrivals.
fn sizes(sizes: &[Size], rng: &mut Rng) -> Vec<TraceJob> {
    let mut jobs = Vec::new();
    for size in sizes {
        let mut seconds = spread(size.jobs, &size.seconds, rng);
        stretch(&mut seconds, size.hours * 3600.0);
        jobs.extend(seconds.into_iter().map(|s| TraceJob {
            line: 0,
            name: String::new(),
            submitted: Time(0),
            user: String::new(),
            queue: None,
            priority: 0,
            nodes: size.nodes,
            gpus_per_node: size.gpus,
            gpu_type: None,
            run: Span(((s * 1000.0) as i64).max(1)),
            time_limit: None,
            preemptible: true,
            require: None,
        }));
    }
    rng.shuffle(&mut jobs);
    jobs
}

/// The same jobs in series of one size, in a random order.
fn series(mut jobs: Vec<TraceJob>, rng: &mut Rng) -> Vec<TraceJob> {
    jobs.sort_by_key(TraceJob::gpus);
    let mut series: Vec<Vec<TraceJob>> = Vec::new();
    for job in jobs {
        match series.last_mut() {
            Some(last) if last[0].gpus() == job.gpus() && rng.unit() < KALOS_SERIES => last.push(job),
            Some(_) | None => series.push(vec![job]),
        }
    }
    rng.shuffle(&mut series);
    series.concat()
}

/// So many values with these quantiles, one from each of as many equal parts, in a random order.
fn spread(n: usize, quantiles: &[f64; 9], rng: &mut Rng) -> Vec<f64> {
    let mut out: Vec<f64> = (0..n).map(|i| at_part((i as f64 + rng.unit()) / n as f64, quantiles)).collect();
    rng.shuffle(&mut out);
    out
}

/// The value at a part, between the quantiles on a logarithmic scale.
fn at_part(part: f64, quantiles: &[f64; 9]) -> f64 {
    let upper = PARTS.iter().position(|p| part <= *p).unwrap_or(PARTS.len() - 1).max(1);
    let (low, high) = (quantiles[upper - 1].max(0.001), quantiles[upper].max(0.001));
    let along = (part - PARTS[upper - 1]) / (PARTS[upper] - PARTS[upper - 1]);
    low * (high / low).powf(along)
}

/// Stretches the values above the median so that the sum is right.
fn stretch(values: &mut [f64], sum: f64) {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let Some(median) = sorted.get(sorted.len() / 2).copied() else { return };
    let upper: f64 = sorted.iter().filter(|v| **v >= median).sum();
    let lower: f64 = sorted.iter().filter(|v| **v < median).sum();
    let factor = ((sum - lower) / upper).clamp(0.5, 2.0);
    values.iter_mut().filter(|v| **v >= median).for_each(|v| *v = (*v * factor).max(median));
}

/// An index, as likely as its weight says.
fn choose(weights: &[f64], rng: &mut Rng) -> usize {
    let mut at = rng.unit() * weights.iter().sum::<f64>();
    weights
        .iter()
        .position(|w| {
            at -= w;
            at < 0.0
        })
        .unwrap_or(weights.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantile_of_runs(trace: &Trace, part: f64) -> f64 {
        let mut runs: Vec<f64> = trace.jobs.iter().map(|j| j.run.0 as f64 / 1000.0).collect();
        runs.sort_unstable_by(f64::total_cmp);
        runs[((runs.len() - 1) as f64 * part) as usize]
    }

    fn near(value: f64, expected: f64, tolerance: f64, what: &str) {
        assert!((value / expected - 1.0).abs() <= tolerance, "{what}: {value}, expected {expected}");
    }

    #[test]
    fn kalos_has_its_statistics() {
        for seed in 0..5 {
            let trace = kalos(seed);
            let count =
                |nodes: std::ops::RangeInclusive<u32>| trace.jobs.iter().filter(|j| nodes.contains(&j.nodes)).count();
            assert_eq!(trace.jobs.len(), 319);
            assert_eq!(
                [count(1..=1), count(8..=8), count(32..=32), count(62..=64), count(128..=128)],
                [89, 22, 52, 84, 38]
            );
            near(trace.gpu_hours(), 456_843.0, 0.1, "GPU-hours");
            near(quantile_of_runs(&trace, 0.5), 310.0, 0.3, "median");
            near(quantile_of_runs(&trace, 0.9) / 3600.0, 10.8, 0.3, "p90");
            near(quantile_of_runs(&trace, 1.0) / 3600.0, 174.0, 0.35, "longest");
            near(trace.span().0 as f64 / 86_400_000.0, 90.0, 0.01, "days");
        }
    }

    #[test]
    fn philly_has_its_statistics() {
        let trace = philly(1, 8);
        assert_eq!(trace.jobs.len(), 82_247);
        near(trace.gpu_hours(), 978_078.0, 0.05, "GPU-hours");
        near(quantile_of_runs(&trace, 0.5), 1_144.0, 0.1, "median");
        near(trace.span().0 as f64 / 86_400_000.0, 109.0, 0.05, "days");
        let large: Vec<&TraceJob> = trace.jobs.iter().filter(|j| j.gpus() >= 8).collect();
        near(large.len() as f64 / 82_247.0, 0.023, 0.05, "large jobs");
        let hours: f64 = large.iter().map(|j| f64::from(j.gpus()) * j.run.0 as f64 / 3_600_000.0).sum();
        near(hours / trace.gpu_hours(), 0.62, 0.05, "their GPU-hours");
    }

    #[test]
    fn equal_seeds_give_equal_traces() {
        assert_eq!(kalos(3), kalos(3));
        assert_ne!(kalos(3), kalos(4));
        assert_eq!(like(Format::Aviflow, 1, &Cluster::new(1, 8)), Ok(None));
    }
}
