//! The virtual cluster: jobs arrive, run for as long as the trace says, and end; a [`Scheduler`]
//! says which start and stop. It chooses nothing itself, and believes nothing: a GPU that is given
//! twice, a job that starts twice, never or outside of the domain it requires, is an error.
//!
//! What happens in one instant is taken together: first ends, then arrivals, then the scheduler
//! until it has nothing more to say. A job that was stopped keeps its progress, and its next start
//! costs the restart: it holds its GPUs for that long without getting on.

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::meter::{Meter, Record};
use crate::trace::Trace;
use aviflow_core::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

/// A job of the trace, by its place in it.
pub type Index = u32;

/// What a scheduler wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Start a job.
    Start {
        /// Which.
        job: Index,
        /// On which nodes, with so many GPUs on each.
        place: Vec<(u32, u32)>,
    },
    /// Stop a job; it waits again, with its progress.
    Stop {
        /// Which.
        job: Index,
        /// Whether its turn is over; else it is preempted.
        turn: bool,
    },
}

/// Whoever decides.
pub trait Scheduler {
    /// A job arrives.
    fn submit(&mut self, job: Index, now: Time);
    /// A job has ended.
    fn ended(&mut self, job: Index, now: Time);
    /// Decides, and says whether it wants to be asked again in the same instant.
    ///
    /// # Errors
    /// If what it decides cannot be done.
    fn pass(&mut self, now: Time, acts: &mut Vec<Act>) -> Result<bool>;
    /// When it wants to be asked again though nothing happens.
    fn wake(&self) -> Option<Time>;
    /// How long each pass took, in nanoseconds.
    fn passes(&self) -> &[u32];
    /// The estimates it gave at submission.
    fn estimates(&self) -> &[Estimated];
}

/// How long a job was said to wait, when it was submitted and could not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimated {
    /// Which job.
    pub job: Index,
    /// As likely longer as shorter.
    pub p50: Span,
    /// Longer in one of ten cases.
    pub p90: Span,
}

/// What became of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// When it first started.
    pub started: Time,
    /// When it ended.
    pub ended: Time,
}

/// A replay that is over.
#[derive(Clone, Debug)]
pub struct Played {
    /// The policy.
    pub policy: String,
    /// What became of each job, in the order of the trace.
    pub outcomes: Vec<Outcome>,
    /// Jobs that were stopped for others.
    pub preemptions: u64,
    /// Turns that ended.
    pub turns: u64,
    /// GPU-milliseconds held without getting on: restarts.
    pub lost: i64,
    /// Integrals over time.
    pub meter: Meter,
    /// How long each pass took, in nanoseconds.
    pub passes: Vec<u32>,
    /// The estimates that were given.
    pub estimates: Vec<Estimated>,
}

/// Asked so often in one instant, a scheduler will never come to rest.
const RESTLESS: u32 = 10_000;

/// A job on its nodes.
struct Attempt {
    placed: Time,
    /// From when on it gets on.
    up: Time,
    place: Vec<(u32, u32)>,
}

struct State {
    left: Span,
    started: Option<Time>,
    ended: Option<Time>,
    running: Option<Attempt>,
    /// How often it started, which tells a real end from one that a stop has undone.
    starts: u32,
}

struct Sim<'a> {
    policy: &'a str,
    trace: &'a Trace,
    cluster: &'a Cluster,
    restart: Span,
    free: Vec<u32>,
    states: Vec<State>,
    ends: BinaryHeap<Reverse<(Time, Index, u32)>>,
    /// The domains of each level that a job requires.
    domains: BTreeMap<&'a str, Vec<Range<u32>>>,
    meter: Meter,
    preemptions: u64,
    turns: u64,
    lost: i64,
}

/// Replays a trace. With a record, also what a drawing needs is kept.
///
/// # Errors
/// If the scheduler decides something impossible, or leaves jobs waiting for ever.
pub fn play(
    policy: &str,
    scheduler: &mut dyn Scheduler,
    trace: &Trace,
    cluster: &Cluster,
    restart: Span,
    record: bool,
) -> Result<Played> {
    let fresh = |run| State { left: run, started: None, ended: None, running: None, starts: 0 };
    let begin = trace.jobs.first().map_or(Time(0), |job| job.submitted);
    let mut sim = Sim {
        policy,
        trace,
        cluster,
        restart,
        free: vec![cluster.gpus_per_node; cluster.nodes as usize],
        states: trace.jobs.iter().map(|job| fresh(job.run)).collect(),
        ends: BinaryHeap::new(),
        domains: domains(trace, cluster),
        meter: Meter::new(begin, trace, cluster, record.then(Record::default)),
        preemptions: 0,
        turns: 0,
        lost: 0,
    };
    let mut acts = Vec::new();
    let mut next = 0;
    while let Some(now) = sim.next_instant(next, scheduler.wake()) {
        sim.meter.advance(now);
        sim.end_jobs(scheduler, now);
        while let Some(job) = trace.jobs.get(next).filter(|job| job.submitted <= now) {
            sim.meter.comes(next as Index, true);
            sim.meter.waits(job, true);
            scheduler.submit(next as Index, now);
            next += 1;
        }
        let mut asked = 0;
        loop {
            let again = scheduler.pass(now, &mut acts)?;
            for act in acts.drain(..) {
                sim.act(act, now)?;
            }
            if !again {
                break;
            }
            asked += 1;
            if asked > RESTLESS {
                return Err(sim.fault(format!("it does not come to rest at {} ms", now.0)));
            }
        }
        if scheduler.wake().is_some_and(|wake| wake <= now) {
            return Err(sim.fault("it wants to be woken in the past".to_owned()));
        }
    }
    sim.result(scheduler)
}

/// The domains of each level that a job requires.
fn domains<'a>(trace: &'a Trace, cluster: &Cluster) -> BTreeMap<&'a str, Vec<Range<u32>>> {
    let mut domains = BTreeMap::new();
    for level in trace.jobs.iter().filter_map(|job| job.require.as_deref()) {
        domains.entry(level).or_insert_with(|| cluster.domains(level).unwrap_or_default());
    }
    domains
}

impl Sim<'_> {
    fn fault(&self, what: String) -> Error {
        Error::Policy { policy: self.policy.to_owned(), what }
    }

    fn next_instant(&mut self, next: usize, wake: Option<Time>) -> Option<Time> {
        while let Some(Reverse((_, job, start))) = self.ends.peek()
            && !self.is_real(*job, *start)
        {
            self.ends.pop();
        }
        let end = self.ends.peek().map(|Reverse((at, _, _))| *at);
        let arrival = self.trace.jobs.get(next).map(|job| job.submitted);
        // When nothing can happen any more, a wake alone changes nothing that a person would wait for.
        let wake = wake.filter(|_| end.is_some() || arrival.is_some() || self.meter.waiting() > 0);
        [end, arrival, wake].into_iter().flatten().min()
    }

    fn is_real(&self, job: Index, start: u32) -> bool {
        let state = &self.states[job as usize];
        state.starts == start && state.running.is_some()
    }

    fn end_jobs(&mut self, scheduler: &mut dyn Scheduler, now: Time) {
        while let Some(Reverse((at, job, start))) = self.ends.peek().copied()
            && at <= now
        {
            self.ends.pop();
            if !self.is_real(job, start) {
                continue;
            }
            self.release(job, now);
            self.meter.comes(job, false);
            let state = &mut self.states[job as usize];
            state.left = Span(0);
            state.ended = Some(now);
            scheduler.ended(job, now);
        }
    }

    /// Takes a running job from its nodes, and says for how long it got on.
    fn release(&mut self, job: Index, now: Time) -> Option<Span> {
        let Attempt { placed, up, place } = self.states[job as usize].running.take()?;
        for (node, gpus) in &place {
            self.free[*node as usize] += gpus;
            self.meter.change(self.free[*node as usize] - gpus, self.free[*node as usize]);
        }
        let spec = &self.trace.jobs[job as usize];
        self.lost += i64::from(spec.gpus()) * up.min(now).since(placed).0;
        self.meter.ran(job, placed, now, place);
        Some(now.since(up))
    }

    fn act(&mut self, act: Act, now: Time) -> Result<()> {
        match act {
            Act::Start { job, place } => self.start(job, place, now),
            Act::Stop { job, turn } => {
                let Some(ran) = self.release(job, now) else {
                    return Err(self.fault(format!("it stops {}, which does not run", self.name(job))));
                };
                let state = &mut self.states[job as usize];
                state.left = Span(state.left.0 - ran.0);
                self.meter.waits(&self.trace.jobs[job as usize], true);
                if turn {
                    self.turns += 1
                } else {
                    self.preemptions += 1
                }
                Ok(())
            }
        }
    }

    fn start(&mut self, job: Index, place: Vec<(u32, u32)>, now: Time) -> Result<()> {
        let Some(spec) = self.trace.jobs.get(job as usize).filter(|spec| spec.submitted <= now) else {
            return Err(self.fault(format!("it starts job {job}, which was not submitted")));
        };
        let state = &self.states[job as usize];
        if state.running.is_some() || state.ended.is_some() {
            return Err(self.fault(format!("it starts {}, which does not wait", self.name(job))));
        }
        let whole = place.len() == spec.nodes as usize && place.iter().all(|(_, gpus)| *gpus == spec.gpus_per_node);
        if !whole {
            return Err(self.fault(format!("it starts a part of the gang of {}", self.name(job))));
        }
        if let Some(level) = &spec.require {
            let domains = self.domains.get(level.as_str()).map(Vec::as_slice).unwrap_or_default();
            if !domains.iter().any(|domain| place.iter().all(|(node, _)| domain.contains(node))) {
                return Err(self.fault(format!("it starts {} outside of one {level}", self.name(job))));
            }
        }
        for (node, gpus) in &place {
            let Some(free) = self.free.get(*node as usize).copied().filter(|free| free >= gpus) else {
                return Err(
                    self.fault(format!("it starts {} on GPUs of node {node} that are not free", self.name(job)))
                );
            };
            self.free[*node as usize] = free - gpus;
            self.meter.change(free, free - gpus);
        }
        self.meter.waits(spec, false);
        let state = &mut self.states[job as usize];
        let up = if state.starts == 0 { now } else { now + self.restart };
        state.starts += 1;
        state.started.get_or_insert(now);
        state.running = Some(Attempt { placed: now, up, place });
        self.ends.push(Reverse((up + state.left, job, state.starts)));
        Ok(())
    }

    fn name(&self, job: Index) -> &str {
        &self.trace.jobs[job as usize].name
    }

    fn result(self, scheduler: &dyn Scheduler) -> Result<Played> {
        let mut outcomes = Vec::with_capacity(self.states.len());
        for (state, job) in self.states.iter().zip(&self.trace.jobs) {
            let (Some(started), Some(ended)) = (state.started, state.ended) else {
                let left = self.states.iter().filter(|s| s.ended.is_none()).count();
                return Err(self.fault(format!(
                    "it leaves {left} jobs waiting for ever on {} nodes, such as {}",
                    self.cluster.nodes, job.name
                )));
            };
            outcomes.push(Outcome { started, ended });
        }
        Ok(Played {
            policy: self.policy.to_owned(),
            outcomes,
            preemptions: self.preemptions,
            turns: self.turns,
            lost: self.lost,
            meter: self.meter,
            passes: scheduler.passes().to_vec(),
            estimates: scheduler.estimates().to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Topology;
    use crate::trace::Format;

    /// Starts the only job on these nodes.
    struct On(Vec<u32>);

    impl Scheduler for On {
        fn submit(&mut self, _job: Index, _now: Time) {}
        fn ended(&mut self, _job: Index, _now: Time) {}
        fn pass(&mut self, _now: Time, acts: &mut Vec<Act>) -> Result<bool> {
            let place: Vec<(u32, u32)> = self.0.drain(..).map(|node| (node, 8)).collect();
            acts.extend((!place.is_empty()).then_some(Act::Start { job: 0, place }));
            Ok(false)
        }
        fn wake(&self) -> Option<Time> {
            None
        }
        fn passes(&self) -> &[u32] {
            &[]
        }
        fn estimates(&self) -> &[Estimated] {
            &[]
        }
    }

    #[test]
    fn a_place_outside_of_the_domain_that_a_job_requires_is_refused() {
        let trace = "submitted,name,nodes,gpus_per_node,run_s,require\n0,a,2,8,60,leaf\n";
        let trace = Trace::parse("t.csv", trace, Format::Aviflow, 8).expect("a trace");
        let tree = Topology::parse("t.csv", "node,leaf\nx,1\ny,1\nz,2\n").expect("a topology");
        let cluster = Cluster { topology: Some(tree), ..Cluster::new(3, 8) };
        let played = |nodes: Vec<u32>| play("test", &mut On(nodes), &trace, &cluster, Span(0), false).map(|_| ());
        assert_eq!(played(vec![0, 1]), Ok(()));
        let error = played(vec![1, 2]).expect_err("two leaves").to_string();
        assert_eq!(error, "the policy test cannot be followed: it starts a outside of one leaf");
    }
}
