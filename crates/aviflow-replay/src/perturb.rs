//! The same replay over many traces that differ a little, so that a figure is told with its spread.
//!
//! One trace is one draw: a policy that is better on it by luck is not better. Each perturbed trace has
//! the same jobs with
//! - gaps between arrivals times a log-normal factor of deviation 0.5, the whole span kept;
//! - run times times a log-normal factor of deviation 0.3, the GPU-hours kept;
//! - every tenth job of the next size up or down among the sizes of the trace.

use crate::error::Result;
use crate::report::{as_map, rounded};
use crate::rng::Rng;
use crate::run::{Policy, Scenario};
use crate::trace::{Trace, TraceJob};
use aviflow_core::time::Span;
use serde::Serialize;
use std::collections::BTreeMap;

/// The deviation of the logarithm of a gap's factor.
const GAPS: f64 = 0.5;
/// The same for a run time.
const RUNS: f64 = 0.3;
/// The share of the jobs whose size changes.
const SIZES: f64 = 0.1;

/// A perturbed trace. Equal seeds give equal traces.
#[must_use]
pub fn perturb(trace: &Trace, seed: u64) -> Trace {
    let mut rng = Rng::new(seed, "perturb");
    let mut out = trace.clone();
    out.origin = format!("{}, perturbed with seed {seed}", trace.origin);
    let before = trace.gpu_hours();
    // With what they require: a larger job may need a larger domain.
    let size = |j: &TraceJob| (j.gpus(), j.nodes, j.gpus_per_node, j.require.clone());
    let mut sizes: Vec<(u32, u32, u32, Option<String>)> = trace.jobs.iter().map(size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut at = 0.0;
    let mut last = trace.jobs.first().map(|job| job.submitted).unwrap_or_default();
    let mut arrivals = Vec::with_capacity(trace.jobs.len());
    for job in &mut out.jobs {
        at += job.submitted.since(last).0 as f64 * (GAPS * rng.normal()).exp();
        last = job.submitted;
        arrivals.push(at);
        job.run = Span(((job.run.0 as f64 * (RUNS * rng.normal()).exp()) as i64).max(1));
        if rng.unit() < SIZES {
            let here = sizes.binary_search(&size(job)).unwrap_or(0);
            let next = if rng.unit() < 0.5 { here.saturating_sub(1) } else { (here + 1).min(sizes.len() - 1) };
            (_, job.nodes, job.gpus_per_node, job.require) = sizes[next].clone();
        }
    }
    let (span, begin) = (trace.span().0 as f64, trace.jobs.first().map(|job| job.submitted).unwrap_or_default());
    let (work, length) = (before / out.gpu_hours().max(f64::MIN_POSITIVE), span / at.max(1.0));
    for (job, at) in out.jobs.iter_mut().zip(arrivals) {
        job.submitted = begin + Span((at * length) as i64);
        job.run = Span(((job.run.0 as f64 * work) as i64).max(1));
    }
    out
}

/// Figures over several perturbed traces.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Perturbed {
    /// How many.
    pub traces: u64,
    /// By policy: each figure by its path, as `wait_hours.all.mean`.
    #[serde(serialize_with = "as_map")]
    pub policies: Vec<(String, BTreeMap<String, Over>)>,
}

/// One figure over several traces. A figure that a trace does not have is left out there.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Over {
    /// The mean.
    pub mean: f64,
    /// The standard deviation between traces.
    pub deviation: f64,
    /// Its ratio to that of EASY backfill on the same trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_easy: Option<Ratio>,
}

/// A ratio over several traces.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ratio {
    /// The mean of the ratios.
    pub mean: f64,
    /// Their standard deviation.
    pub deviation: f64,
    /// The largest.
    pub max: f64,
}

impl Perturbed {
    /// One figure of one policy.
    #[must_use]
    pub fn get(&self, policy: &str, figure: &str) -> Option<&Over> {
        self.policies.iter().find(|(name, _)| name == policy)?.1.get(figure)
    }
}

/// Replays so many perturbed traces under each policy.
///
/// # Errors
/// If the scenario makes no sense, or a policy decides something impossible.
pub fn over(scenario: &Scenario, policies: &[Policy], traces: u64) -> Result<Perturbed> {
    // For each policy and figure its value on each trace.
    let mut values: Vec<BTreeMap<String, Vec<Option<f64>>>> = vec![BTreeMap::new(); policies.len()];
    for n in 0..traces {
        let seed = scenario.seed.wrapping_add(n);
        let one = Scenario { trace: perturb(&scenario.trace, seed), seed, ..scenario.clone() };
        one.check(policies)?;
        for (policy, values) in policies.iter().zip(&mut values) {
            for (name, value) in one.figures(*policy)?.flat() {
                values.entry(name).or_default().push(value);
            }
        }
    }
    let easy = policies.iter().position(|p| *p == Policy::Easy).map(|i| values[i].clone());
    let mut out = Vec::new();
    for (policy, values) in policies.iter().zip(values) {
        let mut figures = BTreeMap::new();
        for (name, list) in values {
            let there: Vec<f64> = list.iter().copied().flatten().collect();
            if there.is_empty() {
                continue;
            }
            let to_easy = easy.as_ref().and_then(|easy| ratio(&list, easy.get(&name)?));
            let (mean, deviation) = moments(&there);
            figures.insert(name, Over { mean, deviation, to_easy });
        }
        out.push((policy.name().to_owned(), figures));
    }
    Ok(Perturbed { traces, policies: out })
}

fn ratio(list: &[Option<f64>], easy: &[Option<f64>]) -> Option<Ratio> {
    let one = |(a, b): (&Option<f64>, &Option<f64>)| Some((*a)? / (*b).filter(|b| *b > 0.0)?);
    let ratios: Vec<f64> = list.iter().zip(easy).filter_map(one).collect();
    let (mean, deviation) = moments(&ratios);
    let max = ratios.iter().copied().max_by(f64::total_cmp)?;
    Some(Ratio { mean, deviation, max: rounded(max) })
}

/// Mean and standard deviation.
fn moments(list: &[f64]) -> (f64, f64) {
    let n = list.len().max(1) as f64;
    let mean = list.iter().sum::<f64>() / n;
    let square = list.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
    (rounded(mean), rounded((square / (n - 1.0).max(1.0)).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::generate;

    #[test]
    fn a_perturbed_trace_is_another_with_the_same_work() {
        let trace = generate::kalos(1);
        let (a, b) = (perturb(&trace, 1), perturb(&trace, 2));
        assert_ne!(a, b);
        assert_eq!(a, perturb(&trace, 1));
        for other in [&a, &b] {
            assert_eq!(other.jobs.len(), trace.jobs.len());
            assert!((other.gpu_hours() / trace.gpu_hours() - 1.0).abs() < 1e-4);
            assert!(other.span().0.abs_diff(trace.span().0) < 10, "{:?} {:?}", other.span(), trace.span());
            let moved = other.jobs.iter().zip(&trace.jobs).filter(|(a, b)| a.nodes != b.nodes).count();
            assert!((5..80).contains(&moved), "{moved} of {}", trace.jobs.len());
            assert!(other.jobs.is_sorted_by_key(|job| job.submitted));
        }
    }

    #[test]
    fn figures_have_a_mean_a_spread_and_a_ratio() {
        let mut trace = generate::kalos(1);
        trace.whole_nodes(8);
        trace.compress(4.0);
        let scenario = Scenario::new(trace, Cluster::new(128, 8));
        let over = over(&scenario, &[Policy::Fifo, Policy::Easy], 3).expect("figures");
        let easy = over.get("easy", "wait_hours.all.mean").expect("a figure");
        assert_eq!(easy.to_easy.as_ref().map(|r| (r.mean, r.deviation)), Some((1.0, 0.0)));
        assert!(easy.deviation > 0.0);
        let fifo = over.get("fifo", "wait_hours.all.mean").expect("a figure");
        assert!(fifo.to_easy.as_ref().is_some_and(|r| r.mean > 1.0), "{fifo:?}");
    }
}
