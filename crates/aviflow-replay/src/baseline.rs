//! The policies to compare with, as honest as they can be made: strict FIFO, greedy, and EASY
//! backfill (Lifka 1995). None of them preempts or shares time.
//!
//! All take jobs by priority, then by submission, and place part of a node where it fits best, so
//! that whole nodes stay whole. For whole nodes they only count. A job that must be inside one domain of
//! the topology goes into the one with the least room that holds it; nothing else is known of the topology.
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
use aviflow_core::model::NODE_LEVEL;
use aviflow_core::time::Time;
use nodes::{Nodes, Shadow, Shape};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
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
    shape: Shape,
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
    /// The domains of each level that a job may require.
    domains: BTreeMap<Option<&'a str>, Rc<[Range<u32>]>>,
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
        let mut domains: BTreeMap<Option<&str>, Rc<[Range<u32>]>> = BTreeMap::new();
        for job in &trace.jobs {
            // What has one node is inside one.
            let level = job.require.as_deref().filter(|level| *level != NODE_LEVEL);
            let known = || level.and_then(|level| cluster.domains(level));
            let all = || std::iter::once(0..cluster.nodes).collect();
            domains.entry(level).or_insert_with(|| known().unwrap_or_else(all).into());
        }
        Baseline {
            rule,
            jobs: &trace.jobs,
            nodes: Nodes::new(cluster.nodes, cluster.gpus_per_node),
            domains,
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
            let Some(place) = self.nodes.place(&self.lanes[lane].shape) else {
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
            let Lane { shape, cursor, .. } = &self.lanes[lane];
            let cursor = *cursor;
            if !self.nodes.fits(shape) {
                self.lanes[lane].closed = true;
                continue;
            }
            let limit = self.lanes[lane].jobs[cursor].limit;
            if now.0.saturating_add(limit) <= at {
                if let Some(place) = self.nodes.place(shape) {
                    self.start(lane, place, now, acts);
                    continue;
                }
            } else if !self.lanes[lane].short_only {
                if let Some(place) = self.nodes.place_beside(shape, &shadow) {
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
        let mut shadow = self.nodes.shadow(&self.lanes[head].shape);
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
        let level = spec.require.as_deref().filter(|level| *level != NODE_LEVEL);
        let domains = self.domains.get(&level).cloned().unwrap_or_default();
        let shape = Shape { nodes: spec.nodes, gpus: spec.gpus_per_node, domains };
        let found = self.lanes.iter().position(|lane| lane.shape == shape);
        let lane = found.unwrap_or_else(|| {
            let jobs = VecDeque::new();
            self.lanes.push(Lane { shape, jobs, cursor: 0, closed: false, short_only: false });
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
