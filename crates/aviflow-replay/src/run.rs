//! A replay from its settings to its figures.

use crate::baseline::{Baseline, Rule};
use crate::brain::{Brain, Estimator, Settings, Silent};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::report::{Compare, Figures, Report};
use crate::sim::{Played, play};
use crate::trace::{Limits, Trace};
use aviflow_core::model::Queue;
use aviflow_core::time::Span;

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Strict first come, first served.
    Fifo,
    /// Whatever fits, in order.
    Greedy,
    /// EASY backfill.
    Easy,
    /// Aviflow's own.
    Aviflow,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 4] = [Policy::Fifo, Policy::Greedy, Policy::Easy, Policy::Aviflow];

    /// The name that people type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Policy::Fifo => "fifo",
            Policy::Greedy => "greedy",
            Policy::Easy => "easy",
            Policy::Aviflow => "aviflow",
        }
    }
}

/// What is replayed, and how.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The jobs.
    pub trace: Trace,
    /// The nodes.
    pub cluster: Cluster,
    /// Which time limits the policies are told. With preemption, `aviflow` is told none.
    pub limits: Limits,
    /// Whether `aviflow` may suspend jobs, and shares time.
    pub preemption: bool,
    /// What a restart costs.
    pub restart: Span,
    /// The queues of `aviflow`; with none, each queue of the trace is open.
    pub queues: Vec<Queue>,
    /// The seed of everything random.
    pub seed: u64,
    /// Whether to check the core's invariants after every pass; slow.
    pub check: bool,
    /// Makes whoever estimates the waits for `aviflow`.
    pub estimator: fn() -> Box<dyn Estimator>,
}

impl Scenario {
    /// A plain scenario: exact limits, no preemption, restarts of 5 minutes.
    #[must_use]
    pub fn new(trace: Trace, cluster: Cluster) -> Scenario {
        Scenario {
            trace,
            cluster,
            limits: Limits::Exact,
            preemption: false,
            restart: Span::minutes(5),
            queues: Vec::new(),
            seed: 0,
            check: false,
            estimator: || Box::new(Silent),
        }
    }

    /// Checks what can be checked before anything is replayed.
    ///
    /// # Errors
    /// If the cluster is none, or a job of the trace does not fit it.
    pub fn check(&self, policies: &[Policy]) -> Result<()> {
        self.cluster.check()?;
        self.trace.check(&self.cluster)?;
        if let Limits::Over(low, high) = self.limits
            && !(low >= 1.0 && high >= low && high <= 1000.0)
        {
            let what = format!("limits {low} to {high} times the run time");
            return Err(Error::options(what, "give `--limits over:LOW-HIGH` with 1 ≤ LOW ≤ HIGH ≤ 1000, as over:1-5"));
        }
        if policies.contains(&Policy::Easy) && self.limits == Limits::None {
            let help = "give `--limits exact` or `--limits over:1-5`, or leave easy out of --policy";
            return Err(Error::options("EASY backfill lives on time limits, and `--limits none` gives it none", help));
        }
        Ok(())
    }

    /// Replays the trace under one policy. With a record, what a drawing needs is kept.
    ///
    /// # Errors
    /// If the policy decides something impossible.
    pub fn play(&self, policy: Policy, record: bool) -> Result<Played> {
        let mut trace = self.trace.clone();
        let unknown = policy == Policy::Aviflow && self.preemption;
        trace.limit(if unknown { Limits::None } else { self.limits }, self.seed);
        let baseline = |rule| Baseline::new(rule, &trace, &self.cluster);
        let rule = match policy {
            Policy::Fifo => Rule::Fifo,
            Policy::Greedy => Rule::Greedy,
            Policy::Easy => Rule::Easy,
            Policy::Aviflow => {
                let settings = Settings {
                    preemption: self.preemption,
                    restart: self.restart,
                    queues: self.queues.clone(),
                    check: self.check,
                };
                let mut brain = Brain::new(&trace, &self.cluster, settings, (self.estimator)())?;
                return play(policy.name(), &mut brain, &trace, &self.cluster, self.restart, record);
            }
        };
        play(policy.name(), &mut baseline(rule), &trace, &self.cluster, self.restart, record)
    }

    /// The figures of one policy.
    ///
    /// # Errors
    /// If the policy decides something impossible.
    pub fn figures(&self, policy: Policy) -> Result<Figures> {
        let played = self.play(policy, false)?;
        Ok(Figures::of(&self.trace, &played, self.cluster.gpus()))
    }

    /// The same with more nodes.
    #[must_use]
    pub fn with_more_nodes(&self, more: u32) -> Scenario {
        let mut scenario = self.clone();
        scenario.cluster.nodes = scenario.cluster.nodes.saturating_add(more);
        scenario
    }

    /// The figures of several policies, and where asked for those with more nodes.
    ///
    /// # Errors
    /// If the scenario makes no sense, or a policy decides something impossible.
    pub fn report(&self, policies: &[Policy], more_nodes: Option<u32>) -> Result<Report> {
        let all = |scenario: &Scenario| -> Result<Vec<(String, Figures)>> {
            scenario.check(policies)?;
            policies.iter().map(|p| Ok((p.name().to_owned(), scenario.figures(*p)?))).collect()
        };
        let compare = match more_nodes {
            Some(more) => {
                let more = self.with_more_nodes(more);
                more.check(policies)?;
                Some(Compare { nodes: more.cluster.nodes, policies: all(&more)? })
            }
            None => None,
        };
        Ok(Report { policies: all(self)?, compare, perturbed: None })
    }
}
