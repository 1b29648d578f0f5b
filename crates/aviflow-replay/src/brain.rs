//! The policy `aviflow`: the real [`plan`] over a real snapshot, with its decisions carried out at once.
//!
//! This stands where the engine and the lifecycle stand in the product, and is lighter: workers
//! are up when they are placed, and a suspended job is gone in the same instant. What `plan` reads
//! is as the lifecycle would leave it; [`lint`] agrees, and runs after every pass when asked to.
//! The ledger stays empty, for no decision depends on it.
//!
//! Jobs save themselves when they are asked to stop, so that an eviction is due at once and loses
//! nothing but the restart. During a restart a gang already counts as running, and is `up` when
//! the restart is over: what ran is what got on.

mod carry;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::sim::{Act, Estimated, Index, Scheduler};
use crate::trace::{Trace, TraceJob};
use aviflow_core::gpus::Slots;
use aviflow_core::lint::lint;
use aviflow_core::model::{
    Job, JobId, JobKey, Node, NodeId, NodeRange, Pool, Queue, Request, Snapshot, TimeSharing, Topology,
};
use aviflow_core::schedule::{Memo, Plan, estimate, plan};
use aviflow_core::time::{Span, Time};
use std::time::Instant;

/// The pool and the queue of jobs that name none.
const DEFAULT: &str = "default";

/// What the policy may do and knows.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Whether it may suspend jobs, and shares time.
    pub preemption: bool,
    /// What a restart costs.
    pub restart: Span,
    /// Queues; with none, each queue of the trace is open and has no quota.
    pub queues: Vec<Queue>,
    /// About how many jobs to estimate the wait of, if they wait when they are submitted: each, or every second,
    /// third, …. Estimates decide nothing, and cost far more than a pass.
    pub estimates: u32,
    /// Whether to check the invariants after every pass.
    pub check: bool,
}

/// The policy at work.
pub struct Brain<'a> {
    jobs: &'a [TraceJob],
    settings: Settings,
    snapshot: Snapshot,
    memo: Memo,
    /// Jobs submitted since the last pass.
    fresh: Vec<JobId>,
    wake: Option<Time>,
    passes: Vec<u32>,
    estimates: Vec<Estimated>,
}

impl<'a> Brain<'a> {
    /// The policy on an empty cluster.
    ///
    /// # Errors
    /// If the trace names a queue that is not among those given.
    pub fn new(trace: &'a Trace, cluster: &Cluster, settings: Settings) -> Result<Brain<'a>> {
        let mut snapshot = Snapshot::default();
        snapshot.policy.preemption = settings.preemption;
        snapshot.policy.restart = settings.restart;
        let levels = cluster.topology.as_ref().map(|t| t.levels.clone()).unwrap_or_default();
        let time_sharing = settings.preemption.then(TimeSharing::on);
        let mut pool = Pool { name: DEFAULT.to_owned(), levels, time_sharing, ..Pool::default() };
        for id in 0..cluster.nodes {
            let name = format!("node-{id}");
            let gpus = Slots::first(cluster.gpus_per_node);
            let mut node = Node::new(NodeId(id), &name, DEFAULT, &cluster.gpu_type, gpus);
            if let Some(topology) = &cluster.topology {
                node.path.clone_from(&topology.paths[id as usize]);
                pool.domains.insert(name, node.path.clone());
            }
            snapshot.nodes.insert(NodeId(id), node);
        }
        snapshot.pools.insert(DEFAULT.to_owned(), pool);
        for queue in queues(trace, &settings.queues)? {
            snapshot.queues.insert(queue.name.clone(), queue);
        }
        Ok(Brain {
            jobs: &trace.jobs,
            settings,
            snapshot,
            memo: Memo::default(),
            fresh: Vec::new(),
            wake: None,
            passes: Vec::new(),
            estimates: Vec::new(),
        })
    }

    /// Estimates the waits of the jobs that have just been submitted and wait.
    fn estimate(&mut self, plan: &Plan, now: Time) {
        let every = u32::try_from(self.jobs.len()).unwrap_or(u32::MAX).div_ceil(self.settings.estimates.max(1)).max(1);
        for id in std::mem::take(&mut self.fresh) {
            let wanted = index(id).is_multiple_of(every) && self.settings.estimates > 0;
            if !wanted || !self.snapshot.waiting.contains(&id) {
                continue;
            }
            let Some(estimate) = estimate(&self.snapshot, &mut self.memo, plan, id, now) else { continue };
            self.estimates.push(Estimated {
                job: index(id),
                p50: estimate.p50.since(now),
                p90: estimate.p90.since(now),
            });
            if let Some(job) = self.snapshot.jobs.get_mut(&id) {
                job.estimate = Some(estimate);
                self.memo.touch(id);
            }
        }
    }

    fn lint(&self) -> Result<()> {
        // The ledger is not kept.
        let wrong = lint(&self.snapshot).into_iter().find(|w| !w.starts_with("ledger"));
        wrong.map_or(Ok(()), |what| Err(fault(what)))
    }
}

/// A decision that cannot be carried out.
fn fault(what: String) -> Error {
    Error::Policy { policy: "aviflow".to_owned(), what }
}

/// The queues of a replay: those given, or an open one for each that the trace names.
fn queues(trace: &Trace, given: &[Queue]) -> Result<Vec<Queue>> {
    let mut out = given.to_vec();
    for job in &trace.jobs {
        let name = job.queue.as_deref().unwrap_or(DEFAULT);
        if out.iter().any(|queue| queue.name == name) {
            continue;
        }
        // Traces without queues go through a queue of their own beside those given.
        if !given.is_empty() && job.queue.is_some() {
            let what = format!("{} is in the queue {name}, and --queues has no such queue", job.name);
            let help =
                format!("add it; there are {}", given.iter().map(|q| q.name.as_str()).collect::<Vec<_>>().join(", "));
            return Err(match job.line {
                0 => Error::options(what, help),
                line => Error::Line { file: trace.origin.clone(), line, what, help },
            });
        }
        out.push(Queue::open(name));
    }
    Ok(out)
}

fn id(job: Index) -> JobId {
    JobId(u64::from(job) + 1)
}

fn index(job: JobId) -> Index {
    u32::try_from(job.0.saturating_sub(1)).unwrap_or(u32::MAX)
}

impl Scheduler for Brain<'_> {
    fn submit(&mut self, job: Index, now: Time) {
        let spec = &self.jobs[job as usize];
        let request = Request {
            queue: spec.queue.clone().unwrap_or_else(|| DEFAULT.to_owned()),
            priority: spec.priority,
            nodes: NodeRange { min: spec.nodes, max: spec.nodes },
            gpus_per_node: spec.gpus_per_node,
            gpu_types: Vec::new(),
            ranks_per_node: 1,
            time_limit: spec.time_limit,
            preemptible: spec.preemptible,
            failures_allowed: 0,
            grace: Span(0),
            checkpoint_every: None,
            topology: Topology { require: spec.require.clone(), ..Topology::default() },
            keep_on_failure: None,
        };
        let key = JobKey { namespace: DEFAULT.to_owned(), name: spec.name.clone() };
        let id = id(job);
        let mut job = Job::submitted(id, key, spec.user.clone(), request, None, now);
        job.saves_on_request = true;
        self.snapshot.jobs.insert(id, job);
        self.snapshot.waiting.insert(id);
        self.memo.touch(id);
        self.fresh.push(id);
    }

    fn ended(&mut self, job: Index, now: Time) {
        carry::end(&mut self.snapshot, id(job), now);
        self.memo.touch(id(job));
    }

    fn pass(&mut self, now: Time, acts: &mut Vec<Act>) -> Result<bool> {
        let begun = Instant::now();
        let plan = plan(&self.snapshot, &mut self.memo, now);
        self.passes.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        self.wake = plan.next_wake;
        let mut again = false;
        for decision in &plan.decisions {
            let done = carry::out(&mut self.snapshot, decision, self.settings.restart, now).map_err(fault)?;
            self.memo.touch(done.job);
            // After starts alone the same plan would come out again; whoever left makes room.
            again |= !matches!(done.act, Some(Act::Start { .. }));
            acts.extend(done.act);
        }
        if self.settings.check {
            self.lint()?;
        }
        if !again {
            self.estimate(&plan, now);
        }
        Ok(again)
    }

    fn wake(&self) -> Option<Time> {
        self.wake
    }

    fn passes(&self) -> &[u32] {
        &self.passes
    }

    fn estimates(&self) -> &[Estimated] {
        &self.estimates
    }
}

#[cfg(test)]
mod tests;
