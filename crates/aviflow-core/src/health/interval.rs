//! How often to write a checkpoint, and how much of the time then trains.
//!
//! With the mean time to failure M = 1 / (nodes · r_f) of a job, a checkpoint that costs w to write, and a restart
//! that costs u₀ (arXiv 2410.18124):
//! - the best interval is about √(2·M·w) (Young, Daly);
//! - the expected effective training time ratio is (1 − nodes·r_f·(u₀ + Δt/2)) / (1 + w/Δt).
//!
//! All in whole milliseconds and millionths.

use crate::time::Span;
use serde::{Deserialize, Serialize};

/// Failures of 1,000 node-days before any were seen here, in tenths: 6.5 (arXiv 2410.18124).
pub const PRIOR: u32 = 65;

/// How many failures' worth of observation the prior counts as.
const PRIOR_FAILURES: u64 = 2;

const DAY_MS: u64 = 86_400_000;

/// What was observed of failures of nodes, in a pool or of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Observed {
    /// Failures that ended attempts and that were not the application's.
    pub failures: u64,
    /// Milliseconds that nodes ran for, summed over the nodes.
    pub node_time: u64,
}

impl Observed {
    /// Takes in that so many nodes ran for so long and failed so often.
    pub fn add(&mut self, nodes: u32, ran: Span, failures: u64) {
        let time = u64::from(nodes).saturating_mul(ran.0.max(0).unsigned_abs());
        self.node_time = self.node_time.saturating_add(time);
        self.failures = self.failures.saturating_add(failures);
    }

    /// The mean time to failure of a job of so many nodes: the posterior mean of the rate under a gamma prior.
    #[must_use]
    pub fn mttf(&self, nodes: u32) -> Span {
        // (prior node-time + observed) / (prior failures + observed) / nodes.
        let prior = u128::from(PRIOR_FAILURES) * 10_000 * u128::from(DAY_MS) / u128::from(PRIOR);
        let failures = u128::from(PRIOR_FAILURES) + u128::from(self.failures);
        let each = (prior + u128::from(self.node_time)) / failures;
        span(each / u128::from(nodes.max(1)))
    }
}

/// What a job's checkpoints and restarts cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Costs {
    /// For how long the training stands still for a checkpoint.
    pub write: Span,
    /// From a failure until it trains again, without what it does again.
    pub restart: Span,
}

/// The checkpoint interval that loses least, √(2·MTTF·w): at least twice as long as a checkpoint takes, and a second.
#[must_use]
pub fn best(mttf: Span, write: Span) -> Span {
    let root = (2 * ms(mttf) * ms(write)).isqrt();
    span(root).max(span(2 * ms(write))).max(Span::seconds(1))
}

/// The expected share of the time that trains, in millionths, with a checkpoint after each `interval` of training.
#[must_use]
pub fn effective_ppm(mttf: Span, costs: Costs, interval: Span) -> u32 {
    const ONE: u128 = 1_000_000;
    let (mttf, interval) = (ms(mttf).max(1), ms(interval).max(1));
    let lost = ONE * (2 * ms(costs.restart) + interval) / (2 * mttf);
    let kept = ONE.saturating_sub(lost) * interval / (interval + ms(costs.write));
    u32::try_from(kept).unwrap_or(0)
}

/// What is recommended to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Advice {
    /// The mean time to failure that it follows from.
    pub mttf: Span,
    /// The interval between checkpoints.
    pub every: Span,
    /// The share of the time that would train, in millionths.
    pub effective_ppm: u32,
    /// The share with the interval that the job has, if it has one.
    pub present_ppm: Option<u32>,
}

/// Recommends an interval to a job of so many nodes. None while it is not known what a checkpoint costs it.
#[must_use]
pub fn advise(
    observed: &Observed,
    nodes: u32,
    write: Option<Span>,
    restart: Span,
    present: Option<Span>,
) -> Option<Advice> {
    let mttf = observed.mttf(nodes);
    let costs = Costs { write: write?, restart };
    let every = best(mttf, costs.write);
    let present_ppm = present.map(|interval| effective_ppm(mttf, costs, interval));
    Some(Advice { mttf, every, effective_ppm: effective_ppm(mttf, costs, every), present_ppm })
}

fn ms(span: Span) -> u128 {
    u128::from(span.0.max(0).unsigned_abs())
}

fn span(ms: u128) -> Span {
    Span(i64::try_from(ms).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::chance::Chance;

    /// FACTS' costs: 5 s to write, 90 s to restart.
    const COSTS: Costs = Costs { write: Span::seconds(5), restart: Span::seconds(90) };

    /// By simulation: failures with exponential gaps, at any time, also while a checkpoint is written or the job
    /// restarts. Training since the last complete checkpoint is lost.
    fn simulated_ppm(mttf: Span, every: Span, failures: u32, seed: u64) -> u32 {
        let mut chance = Chance::new(seed);
        let (mut useful, mut all) = (0i64, 0i64);
        let cycle = every.0 + COSTS.write.0;
        for _ in 0..failures {
            let gap = (chance.exponential() * mttf.0 as f64) as i64;
            all += gap;
            // First the restart, then training and checkpoints in turn.
            useful += (gap - COSTS.restart.0).max(0) / cycle * every.0;
        }
        (useful / (all / 1_000_000)) as u32
    }

    #[test]
    fn the_figures_are_reached() {
        for (gpus, least) in [(1024, 985_000), (16_384, 940_000)] {
            let advice = advise(&Observed::default(), gpus / 8, Some(COSTS.write), COSTS.restart, None).expect("some");
            assert!(advice.effective_ppm >= least, "{gpus}: {advice:?}");
            let simulated = simulated_ppm(advice.mttf, advice.every, 200_000, 1);
            assert!(simulated >= least, "{gpus}: {simulated} simulated");
            assert!(simulated.abs_diff(advice.effective_ppm) < 3000, "{gpus}: {simulated} {advice:?}");
        }
    }

    #[test]
    fn the_formula_is_that_of_the_paper() {
        // 128 nodes: 1 / (128 · 6.5/1000) = 1.2019 days; √(2 · 103,846 s · 5 s) = 1,019 s.
        let mttf = Observed::default().mttf(128);
        assert!((mttf.0 - 103_846_154).abs() < 1000, "{}", mttf.0);
        assert!((best(mttf, COSTS.write).0 - 1_019_000).abs() < 1000);
        let exact = |nodes: f64, dt: f64| (1.0 - nodes * 6.5e-3 / 86_400.0 * (90.0 + dt / 2.0)) / (1.0 + 5.0 / dt);
        for (nodes, seconds) in [(1, 3600), (128, 1019), (2048, 254), (2048, 3600)] {
            let got = effective_ppm(Observed::default().mttf(nodes), COSTS, Span::seconds(seconds));
            let want = exact(f64::from(nodes), seconds as f64) * 1e6;
            assert!((f64::from(got) - want).abs() < 5.0, "{nodes} {seconds}: {got} {want}");
        }
    }

    #[test]
    fn no_other_interval_is_better() {
        for nodes in [16, 128, 2048] {
            let mttf = Observed::default().mttf(nodes);
            let every = best(mttf, COSTS.write);
            let at = |percent: i64| simulated_ppm(mttf, Span(every.0 * percent / 100), 200_000, 2);
            assert!(at(100) > at(40) && at(100) > at(250), "{nodes}");
        }
    }

    #[test]
    fn what_was_seen_outweighs_the_prior_in_time() {
        let mut seen = Observed::default();
        let prior = seen.mttf(100);
        // Ten times the rate of the prior.
        seen.add(100, Span::minutes(24 * 60), 7);
        assert!(seen.mttf(100) < prior);
        seen.add(100, Span::minutes(100 * 24 * 60), 650);
        assert!((seen.mttf(1).0 / 86_400_000).abs_diff(15) <= 1, "1,000 / 65 days");
        let mut good = Observed::default();
        good.add(100, Span::minutes(100 * 24 * 60), 0);
        assert!(good.mttf(100) > prior);
    }

    #[test]
    fn the_absurd_has_an_answer() {
        let none = Observed::default();
        assert_eq!(advise(&none, 4, None, COSTS.restart, None), None);
        assert_eq!(none.mttf(0), none.mttf(1));
        assert_eq!(best(Span(0), Span(0)), Span::seconds(1));
        assert!(best(Span(i64::MAX), Span(i64::MAX)) > Span(0));
        assert_eq!(effective_ppm(Span(1), COSTS, Span::seconds(10)), 0, "it never gets anywhere");
        assert_eq!(effective_ppm(Span(-5), Costs { write: Span(-1), restart: Span(-1) }, Span(-1)), 500_000);
        let slow = best(Span::seconds(60), Span::seconds(100));
        assert_eq!(slow, Span::seconds(200), "at least twice what it costs");
    }
}
