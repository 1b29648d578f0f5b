//! What a replay came to, in figures. Programs read the names; they are not changed.
//!
//! A wait is the time from a job's submission to its end in which it did not get on: completion −
//! submission − its own run time. Quantiles are by nearest rank.

use crate::sim::Played;
use crate::trace::{Trace, TraceJob, hours};
use aviflow_core::time::{Span, Time};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Classes of jobs by their nodes: the name in JSON, words for people, and from how many nodes on.
pub const CLASSES: [(&str, &str, u32); 4] = [
    ("lt8", "under 8 nodes", 1),
    ("n8_63", "8 to 63", 8),
    ("n64_127", "64 to 127", 64),
    ("ge128", "128 and more", 128),
];

/// The class of a job's size, an index into [`CLASSES`].
#[must_use]
pub fn class(nodes: u32) -> usize {
    CLASSES.iter().rposition(|(_, _, from)| nodes >= *from).unwrap_or(0)
}

/// A wait above which an estimate of it is judged.
const JUDGED: Span = Span::minutes(10);

/// The figures of several policies on one trace, and of the same with other nodes or perturbed traces.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// By policy, in the order in which they were asked for.
    #[serde(serialize_with = "as_map")]
    pub policies: Vec<(String, Figures)>,
    /// The same on more nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Compare>,
    /// The same on perturbed traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perturbed: Option<crate::perturb::Perturbed>,
}

/// The same on another number of nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compare {
    /// The nodes.
    pub nodes: u32,
    /// By policy.
    #[serde(serialize_with = "as_map")]
    pub policies: Vec<(String, Figures)>,
}

pub(crate) fn as_map<S: Serializer, T: Serialize>(list: &[(String, T)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(list.len()))?;
    for (name, value) in list {
        map.serialize_entry(name, value)?;
    }
    map.end()
}

/// The figures of one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Waits in hours.
    pub wait_hours: Waits,
    /// The share of the GPUs that was held, over the time in which jobs waited; none if none ever did.
    pub gpu_use_while_waiting: Option<f64>,
    /// The share of the GPUs that could at most have been held over this time, where jobs must be inside one
    /// domain of the topology; see [`bound`](crate::bound).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_bound: Option<f64>,
    /// The use in parts of this bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_of_bound: Option<f64>,
    /// From the first submission to the last end.
    pub makespan_hours: f64,
    /// Jobs that were stopped for others.
    pub preemptions: u64,
    /// Turns that ended under time sharing.
    pub turns: u64,
    /// GPU-hours held by restarts.
    pub lost_gpu_hours: f64,
    /// Their share of all GPU-hours held.
    pub lost_share: f64,
    /// The share of the GPUs that was free on nodes of which others were held, over the time in which jobs
    /// waited for whole nodes; none if none ever did.
    pub fragmentation: Option<f64>,
    /// How good the estimates of waits were.
    pub eta: Eta,
    /// How long the policy took to decide, in milliseconds of this machine.
    pub plan_ms: PlanMs,
}

/// Waits by class of size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Waits {
    /// Of all jobs.
    pub all: Stats,
    /// Under 8 nodes.
    pub lt8: Stats,
    /// 8 to 63 nodes.
    pub n8_63: Stats,
    /// 64 to 127 nodes.
    pub n64_127: Stats,
    /// 128 nodes and more.
    pub ge128: Stats,
}

impl Waits {
    /// The classes with their words, all first.
    #[must_use]
    pub fn classes(&self) -> [(&'static str, &'static str, &Stats); 5] {
        let of = |i: usize, stats| (CLASSES[i].0, CLASSES[i].1, stats);
        [("all", "all", &self.all), of(0, &self.lt8), of(1, &self.n8_63), of(2, &self.n64_127), of(3, &self.ge128)]
    }
}

/// Some values; none of anything if there are none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// How many.
    #[serde(skip)]
    pub n: usize,
    /// Their mean.
    pub mean: Option<f64>,
    /// Half are at most this.
    pub p50: Option<f64>,
    /// 90 of 100 are.
    pub p90: Option<f64>,
    /// 99 of 100 are.
    pub p99: Option<f64>,
    /// All are.
    pub max: Option<f64>,
}

impl Stats {
    /// Of these values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Stats {
        values.sort_unstable_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Stats {
            n: values.len(),
            mean: (!values.is_empty()).then(|| rounded(mean)),
            p50: quantile(&values, 0.5).map(rounded),
            p90: quantile(&values, 0.9).map(rounded),
            p99: quantile(&values, 0.99).map(rounded),
            max: values.last().copied().map(rounded),
        }
    }
}

/// How good the estimates of waits were, over jobs that waited for more than ten minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Eta {
    /// Jobs that had an estimate.
    pub n: usize,
    /// The share that started by the p90 they were told; 0.9 would be perfect.
    pub p90_coverage: Option<f64>,
    /// The median of |p50 − wait| / wait.
    pub p50_median_relative_error: Option<f64>,
}

/// How long the policy took to decide.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PlanMs {
    /// Half of the passes took at most this.
    pub p50: f64,
    /// 99 of 100 did.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Figures {
    /// The figures of a replay of this trace on so many GPUs.
    #[must_use]
    pub fn of(trace: &Trace, played: &Played, gpus: u32) -> Figures {
        let gpus = f64::from(gpus);
        let share = |part: i64, time: i64| (time > 0).then(|| rounded(part as f64 / (gpus * time as f64)));
        let meter = &played.meter;
        let begin = trace.jobs.first().map_or(Time(0), |job| job.submitted);
        let end = played.outcomes.iter().map(|o| o.ended).max().unwrap_or(begin);
        Figures {
            wait_hours: waits(trace, played),
            gpu_use_while_waiting: share(meter.used_while_waiting, meter.waiting_ms),
            use_bound: meter.bound_while_waiting.and_then(|bound| share(bound, meter.waiting_ms)),
            use_of_bound: meter
                .bound_while_waiting
                .filter(|bound| *bound > 0)
                .map(|bound| rounded(meter.used_while_waiting as f64 / bound as f64)),
            makespan_hours: rounded(hours(end.since(begin))),
            preemptions: played.preemptions,
            turns: played.turns,
            lost_gpu_hours: rounded(hours(Span(played.lost))),
            lost_share: rounded(played.lost as f64 / (meter.held as f64).max(1.0)),
            fragmentation: share(meter.broken_while_waiting, meter.waiting_whole_ms),
            eta: eta(trace, played),
            plan_ms: plan_ms(played.passes.clone()),
        }
    }

    /// The figures as a flat list, for means over several replays. The run time of the policy is not among
    /// them: it is no property of the trace.
    #[must_use]
    pub fn flat(&self) -> Vec<(String, Option<f64>)> {
        let mut out = Vec::new();
        for (class, _, stats) in self.wait_hours.classes() {
            let values =
                [("mean", stats.mean), ("p50", stats.p50), ("p90", stats.p90), ("p99", stats.p99), ("max", stats.max)];
            out.extend(values.map(|(name, value)| (format!("wait_hours.{class}.{name}"), value)));
        }
        let rest = [
            ("gpu_use_while_waiting", self.gpu_use_while_waiting),
            ("use_bound", self.use_bound),
            ("use_of_bound", self.use_of_bound),
            ("makespan_hours", Some(self.makespan_hours)),
            ("preemptions", Some(self.preemptions as f64)),
            ("turns", Some(self.turns as f64)),
            ("lost_gpu_hours", Some(self.lost_gpu_hours)),
            ("lost_share", Some(self.lost_share)),
            ("fragmentation", self.fragmentation),
            ("eta.p90_coverage", self.eta.p90_coverage),
            ("eta.p50_median_relative_error", self.eta.p50_median_relative_error),
        ];
        out.extend(rest.map(|(name, value)| (name.to_owned(), value)));
        out
    }
}

fn waits(trace: &Trace, played: &Played) -> Waits {
    let mut by_class: [Vec<f64>; 4] = Default::default();
    for (job, outcome) in trace.jobs.iter().zip(&played.outcomes) {
        by_class[class(job.nodes)].push(hours(wait(job, outcome.ended)));
    }
    let all = Stats::of(by_class.concat());
    let [lt8, n8_63, n64_127, ge128] = by_class.map(Stats::of);
    Waits { all, lt8, n8_63, n64_127, ge128 }
}

/// Completion − submission − its own run time.
fn wait(job: &TraceJob, ended: Time) -> Span {
    Span(ended.since(job.submitted).0 - job.run.0)
}

fn eta(trace: &Trace, played: &Played) -> Eta {
    let (mut covered, mut errors) = (0, Vec::new());
    for estimate in &played.estimates {
        let job = estimate.job as usize;
        let waited = played.outcomes[job].started.since(trace.jobs[job].submitted);
        if waited <= JUDGED {
            continue;
        }
        covered += usize::from(waited <= estimate.p90);
        errors.push((estimate.p50.0 - waited.0).abs() as f64 / waited.0 as f64);
    }
    errors.sort_unstable_by(f64::total_cmp);
    let n = errors.len();
    Eta {
        n,
        p90_coverage: (n > 0).then(|| rounded(covered as f64 / n as f64)),
        p50_median_relative_error: quantile(&errors, 0.5).map(rounded),
    }
}

fn plan_ms(mut passes: Vec<u32>) -> PlanMs {
    passes.sort_unstable();
    let passes: Vec<f64> = passes.into_iter().map(|nanos| f64::from(nanos) / 1e6).collect();
    let at = |q| quantile(&passes, q).map_or(0.0, rounded);
    PlanMs { p50: at(0.5), p99: at(0.99), max: at(1.0) }
}

/// The value of sorted ones that so large a part of them does not exceed.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// To six decimals: what is behind them is noise and only makes the output long.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_by_nearest_rank() {
        let stats = Stats::of((1..=100).map(f64::from).collect());
        assert_eq!(
            (stats.mean, stats.p50, stats.p90, stats.p99, stats.max),
            (Some(50.5), Some(50.0), Some(90.0), Some(99.0), Some(100.0))
        );
        let one = Stats::of(vec![3.0]);
        assert_eq!((one.n, one.p50, one.max), (1, Some(3.0), Some(3.0)));
        assert_eq!(Stats::of(Vec::new()), Stats::default());
    }

    #[test]
    fn classes_are_those_of_the_names() {
        let cases = [(1, "lt8"), (7, "lt8"), (8, "n8_63"), (63, "n8_63"), (64, "n64_127"), (127, "n64_127")];
        for (nodes, name) in cases.into_iter().chain([(128, "ge128"), (4000, "ge128")]) {
            assert_eq!(CLASSES[class(nodes)].0, name, "{nodes}");
        }
    }
}
