//! A replay from its settings to its figures.

use crate::baseline::{Baseline, Rule};
use crate::brain::{Brain, Settings};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::report::{Compare, Figures, Report};
use crate::sim::{Played, play};
use crate::svg;
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
    /// About how many waits `aviflow` estimates, which decides nothing and costs time.
    pub estimates: u32,
    /// Whether to check the core's invariants after every pass; slow.
    pub check: bool,
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
            estimates: 500,
            check: false,
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
            let what = format!("limits of {low} to {high} times the run time cannot be");
            return Err(Error::options(what, "give `--limits over:LOW-HIGH` with 1 ≤ LOW ≤ HIGH ≤ 1000, as over:1-5"));
        }
        let none = match self.limits {
            Limits::None => true,
            Limits::Trace => self.trace.jobs.iter().all(|job| job.time_limit.is_none()),
            Limits::Exact | Limits::Over(..) => false,
        };
        if policies.contains(&Policy::Easy) && none {
            let help = "give `--limits exact` or `--limits over:1-5`, or leave easy out of --policy";
            return Err(Error::options("EASY backfill lives on time limits, and the jobs have none", help));
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
                    estimates: self.estimates,
                    check: self.check,
                };
                let mut brain = Brain::new(&trace, &self.cluster, settings)?;
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

    /// The figures of several policies, and where asked those with more nodes and a drawing.
    ///
    /// # Errors
    /// If the scenario makes no sense, or a policy decides something impossible.
    pub fn report(&self, policies: &[Policy], more_nodes: Option<u32>, draw: bool) -> Result<(Report, Option<String>)> {
        self.check(policies)?;
        let more = more_nodes.map(|more| self.with_more_nodes(more));
        if let Some(more) = &more {
            more.check(policies)?;
        }
        let mut report = Report { policies: Vec::new(), compare: None, perturbed: None };
        let mut drawn = Vec::new();
        for policy in policies {
            let played = self.play(*policy, draw)?;
            let figures = Figures::of(&self.trace, &played, self.cluster.gpus());
            report.policies.push((policy.name().to_owned(), figures));
            drawn.extend(draw.then_some(played));
        }
        if let Some(more) = more {
            let mut compare = Compare { nodes: more.cluster.nodes, policies: Vec::new() };
            for policy in policies {
                compare.policies.push((policy.name().to_owned(), more.figures(*policy)?));
            }
            report.compare = Some(compare);
        }
        Ok((report, draw.then(|| svg::draw(&self.trace, &self.cluster, &drawn))))
    }
}
