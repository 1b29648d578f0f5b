//! The policies to compare with, as honest as they can be made: strict FIFO, greedy, and EASY
//! backfill (Lifka 1995). None of them preempts or shares time.
//!
//! All take jobs by priority, then by submission, and place part of a node where it fits best, so
//! that whole nodes stay whole. For whole nodes they only count.
//!
//! - `fifo` starts the first job or nothing;
//! - `greedy` starts whatever fits, in order;
//! - `easy` starts whatever fits and does not delay the first job that does not, by what the time
//!   limits promise: either it ends before that job's start, or it leaves enough for it. It is
//!   given the best of chances: a job that would be in the way on one node is tried on the others.

mod nodes;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::sim::{Act, Estimated, Index, Scheduler};
use crate::trace::{Trace, TraceJob};
use aviflow_core::time::Time;
use nodes::{Nodes, Shadow};
use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Strict first come, first served.
    Fifo,
    /// Whatever fits.
    Greedy,
    /// EASY backfill.
    Easy,
}

/// The place in the order.
type Key = (Reverse<i32>, Time, Index);

/// A job that waits.
#[derive(Clone, Copy)]
struct Entry {
    key: Key,
    /// Its time limit in milliseconds; without one it may run for ever.
    limit: i64,
}

/// Waiting jobs of one shape, in order.
struct Lane {
    nodes: u32,
    gpus: u32,
    jobs: VecDeque<Entry>,
    /// The next to be looked at in this pass, and whether none of them can start in it.
    cursor: usize,
    closed: bool,
    /// Whether only jobs that end before the first one's start are worth a look.
    short_only: bool,
}

/// One of the policies at work.
pub struct Baseline<'a> {
    rule: Rule,
    jobs: &'a [TraceJob],
    nodes: Nodes,
    lanes: Vec<Lane>,
    /// What runs, by when it must have ended.
    running: BTreeSet<(i64, Index)>,
    places: Vec<(i64, Vec<(u32, u32)>)>,
    passes: Vec<u32>,
}

const FOREVER: i64 = i64::MAX;

impl<'a> Baseline<'a> {
    /// A policy on an empty cluster.
    #[must_use]
    pub fn new(rule: Rule, trace: &'a Trace, cluster: &Cluster) -> Baseline<'a> {
        Baseline {
            rule,
            jobs: &trace.jobs,
            nodes: Nodes::new(cluster.nodes, cluster.gpus_per_node),
            lanes: Vec::new(),
            running: BTreeSet::new(),
            places: vec![(0, Vec::new()); trace.jobs.len()],
            passes: Vec::new(),
        }
    }

    /// The lane whose next job is first in order, of those that are open.
    fn first(&self) -> Option<usize> {
        let next = |(i, lane): (usize, &Lane)| Some((lane.jobs.get(lane.cursor)?.key, i));
        self.lanes.iter().enumerate().filter(|(_, l)| !l.closed).filter_map(next).min().map(|(_, i)| i)
    }

    /// Starts the next job of a lane there.
    fn start(&mut self, lane: usize, place: Vec<(u32, u32)>, now: Time, acts: &mut Vec<Act>) {
        let lane = &mut self.lanes[lane];
        let Some(entry) = lane.jobs.remove(lane.cursor) else { return };
        let job = entry.key.2;
        for (node, gpus) in &place {
            self.nodes.take(*node, *gpus);
        }
        let end = now.0.saturating_add(entry.limit);
        self.running.insert((end, job));
        self.places[job as usize] = (end, place.clone());
        acts.push(Act::Start { job, place });
    }

    /// In order until the first job that does not fit; its lane, if there is one.
    fn in_order(&mut self, now: Time, acts: &mut Vec<Act>) -> Option<usize> {
        loop {
            let lane = self.first()?;
            let Some(place) = self.nodes.place(self.lanes[lane].nodes, self.lanes[lane].gpus) else {
                return Some(lane);
            };
            self.start(lane, place, now, acts);
        }
    }

    fn greedy(&mut self, now: Time, acts: &mut Vec<Act>) {
        while let Some(lane) = self.in_order(now, acts) {
            // A pass only takes GPUs, so that what did not fit does not fit later in it.
            self.lanes[lane].closed = true;
        }
    }

    fn easy(&mut self, now: Time, acts: &mut Vec<Act>) {
        let Some(head) = self.in_order(now, acts) else { return };
        if self.nodes.is_full() {
            return;
        }
        let (at, mut shadow) = self.shadow(head);
        self.lanes[head].cursor = 1;
        while let Some(lane) = self.first() {
            let Lane { nodes, gpus, cursor, .. } = self.lanes[lane];
            if !self.nodes.fits(nodes, gpus) {
                self.lanes[lane].closed = true;
                continue;
            }
            let limit = self.lanes[lane].jobs[cursor].limit;
            if now.0.saturating_add(limit) <= at {
                if let Some(place) = self.nodes.place(nodes, gpus) {
                    self.start(lane, place, now, acts);
                    continue;
                }
            } else if !self.lanes[lane].short_only {
                if let Some(place) = self.nodes.place_beside(nodes, gpus, &shadow) {
                    shadow.take(&place);
                    self.start(lane, place, now, acts);
                    continue;
                }
                // What is left beside the first job only becomes less.
                self.lanes[lane].short_only = true;
            }
            let lane = &mut self.lanes[lane];
            let short = |entry: &Entry| now.0.saturating_add(entry.limit) <= at;
            let next = lane.jobs.iter().skip(lane.cursor + 1).position(|e| !lane.short_only || short(e));
            match next {
                Some(further) => lane.cursor += 1 + further,
                None => lane.closed = true,
            }
        }
    }

    /// When the first job of a lane can start at the latest, and what is free then.
    fn shadow(&self, head: usize) -> (i64, Shadow) {
        let Lane { nodes, gpus, .. } = self.lanes[head];
        let mut shadow = self.nodes.shadow(nodes, gpus);
        let mut at = None;
        for (end, job) in &self.running {
            if at.is_some_and(|at| *end > at) {
                break;
            }
            shadow.give(&self.places[*job as usize].1);
            if at.is_none() && shadow.fits() {
                at = Some(*end);
            }
        }
        (at.unwrap_or(FOREVER), shadow)
    }
}

impl Scheduler for Baseline<'_> {
    fn submit(&mut self, job: Index, _now: Time) {
        let spec = &self.jobs[job as usize];
        let (nodes, gpus) = (spec.nodes, spec.gpus_per_node);
        let found = self.lanes.iter().position(|lane| (lane.nodes, lane.gpus) == (nodes, gpus));
        let lane = found.unwrap_or_else(|| {
            let jobs = VecDeque::new();
            self.lanes.push(Lane { nodes, gpus, jobs, cursor: 0, closed: false, short_only: false });
            self.lanes.len() - 1
        });
        let entry = Entry {
            key: (Reverse(spec.priority), spec.submitted, job),
            limit: spec.time_limit.map_or(FOREVER, |limit| limit.0),
        };
        let lane = &mut self.lanes[lane].jobs;
        let at = lane.partition_point(|other| other.key < entry.key);
        lane.insert(at, entry);
    }

    fn ended(&mut self, job: Index, _now: Time) {
        let (end, place) = std::mem::take(&mut self.places[job as usize]);
        self.running.remove(&(end, job));
        for (node, gpus) in place {
            self.nodes.give(node, gpus);
        }
    }

    fn pass(&mut self, now: Time, acts: &mut Vec<Act>) -> Result<bool> {
        let begun = Instant::now();
        for lane in &mut self.lanes {
            (lane.cursor, lane.closed, lane.short_only) = (0, false, false);
        }
        match self.rule {
            Rule::Fifo => _ = self.in_order(now, acts),
            Rule::Greedy => self.greedy(now, acts),
            Rule::Easy => self.easy(now, acts),
        }
        self.passes.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        Ok(false)
    }

    fn wake(&self) -> Option<Time> {
        None
    }

    fn passes(&self) -> &[u32] {
        &self.passes
    }

    fn estimates(&self) -> &[Estimated] {
        &[]
    }
}

#[cfg(test)]
mod tests;
