//! How many GPUs could be in use at once, where jobs must be inside one domain of the topology.
//!
//! The bound of an instant is about the jobs that are there in it, those that run and those that wait:
//! no policy, even one that could move everything at once, could have more GPUs in use with them.
//! What a domain can have in use are the numbers of GPUs that
//! - are sums of what its parts can have in use and of jobs that require a domain of its level,
//! - taking each job at most once within a domain, and
//! - do not exceed what it has;
//!
//! and what the cluster can have in use is the largest such number. In each domain any job may be
//! used, whether or not the domain beside it used it too; that, and only that, makes it a bound and no
//! packing. So that few small jobs are not taken to fill every gap of every leaf, it is the least of
//! what comes out if the smallest sizes, from none of them to all of them, are counted once and in
//! full, and the others by their sums. Where jobs have parts of nodes, a node has no more than the
//! largest sum of such parts.

use crate::cluster::Cluster;
use crate::trace::{Trace, TraceJob};
use aviflow_core::model::NODE_LEVEL;
use std::collections::HashMap;
use std::ops::Range;

/// Jobs that are alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    gpus: u32,
    gpus_per_node: u32,
    /// The level of which one domain must hold them; the last is the whole cluster.
    level: usize,
}

/// Computes the bound as jobs come and go.
#[derive(Clone, Debug)]
pub struct Bound {
    /// All numbers of GPUs are multiples of it.
    unit: u32,
    gpus_per_node: u32,
    /// The nodes of each domain by level, smallest first; the last level is the whole cluster.
    levels: Vec<Vec<Range<u32>>>,
    /// By size, the smallest first.
    kinds: Vec<Kind>,
    kind_of: Vec<usize>,
    /// Jobs of each kind that run or wait.
    there: Vec<u32>,
    /// Of each kind, as many as the largest of its domains holds: more of them make no more sums.
    enough: Vec<u32>,
    /// The largest sum with so many of each kind, as far as it was computed.
    known: HashMap<Vec<u32>, u64>,
}

/// Enough for any replay whose sizes are few, and little memory where they are many.
const MOST_KNOWN: usize = 100_000;

impl Bound {
    /// For the jobs of a trace, none of which is there yet; none if none of them requires a domain.
    #[must_use]
    pub fn new(trace: &Trace, cluster: &Cluster) -> Option<Bound> {
        let inside = |job: &TraceJob| job.require.as_ref().is_some_and(|level| level != NODE_LEVEL);
        if !trace.jobs.iter().any(inside) {
            return None;
        }
        let names = cluster.topology.as_ref().map(|t| t.levels.as_slice()).unwrap_or_default();
        let mut levels: Vec<Vec<Range<u32>>> = names.iter().filter_map(|name| cluster.domains(name)).collect();
        levels.push(std::iter::once(0..cluster.nodes).collect());
        let kind = |job: &TraceJob| {
            let named = |name: &String| names.iter().position(|n| n == name);
            // One node is in one leaf.
            let node = |name: &String| (name == NODE_LEVEL).then_some(0);
            let level = job.require.as_ref().and_then(|name| node(name).or_else(|| named(name)));
            Kind { gpus: job.gpus(), gpus_per_node: job.gpus_per_node, level: level.unwrap_or(names.len()) }
        };
        let mut kinds: Vec<Kind> = trace.jobs.iter().map(kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let kind_of = trace.jobs.iter().map(|job| kinds.binary_search(&kind(job)).unwrap_or(0)).collect();
        let unit = kinds.iter().fold(cluster.gpus_per_node, |unit, kind| gcd(unit, kind.gpus));
        let unit = kinds.iter().fold(unit, |unit, kind| gcd(unit, kind.gpus_per_node));
        let there = vec![0; kinds.len()];
        let largest = |level: usize| levels[level].iter().map(|domain| domain.end - domain.start).max().unwrap_or(0);
        let enough = |kind: &Kind| largest(kind.level).saturating_mul(cluster.gpus_per_node) / kind.gpus.max(1);
        let enough = kinds.iter().map(enough).collect();
        let gpus_per_node = cluster.gpus_per_node;
        Some(Bound { unit, gpus_per_node, levels, kinds, kind_of, there, enough, known: HashMap::new() })
    }

    /// A job comes or has ended.
    pub(crate) fn change(&mut self, job: usize, comes: bool) {
        let there = &mut self.there[self.kind_of[job]];
        *there = if comes { *there + 1 } else { *there - 1 };
    }

    /// GPUs that could be in use at once.
    pub(crate) fn now(&mut self) -> u64 {
        let all = self.kinds.iter().zip(&self.there);
        let mut least: u64 = all.map(|(kind, there)| u64::from(kind.gpus) * u64::from(*there)).sum();
        let mut counts: Vec<u32> = self.there.iter().zip(&self.enough).map(|(n, enough)| *n.min(enough)).collect();
        let mut full = 0;
        for kind in 0..self.kinds.len() {
            least = least.min(full + self.most(&counts));
            full += u64::from(self.kinds[kind].gpus) * u64::from(self.there[kind]);
            if full >= least {
                break;
            }
            counts[kind] = 0;
        }
        least
    }

    /// The largest number that the cluster can have in use, with so many jobs of each kind; known ones are
    /// not computed again.
    fn most(&mut self, counts: &[u32]) -> u64 {
        if let Some(known) = self.known.get(counts) {
            return *known;
        }
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        let most = self.sums(counts);
        self.known.insert(counts.to_vec(), most);
        most
    }

    /// Computes it, from the smallest domains up.
    fn sums(&self, counts: &[u32]) -> u64 {
        let each = u64::from(self.node(counts));
        let mut below: Vec<Sums> = Vec::new();
        for (level, domains) in self.levels.iter().enumerate() {
            let mine =
                |(kind, n): (&Kind, &u32)| (kind.level == level && *n > 0).then_some((kind.gpus / self.unit, *n));
            let mine: Vec<(u32, u32)> = self.kinds.iter().zip(counts).filter_map(mine).collect();
            let mut parts = below.into_iter().peekable();
            let mut here: Vec<Sums> = Vec::with_capacity(domains.len());
            for domain in domains {
                let most = u64::from(domain.end - domain.start) * each / u64::from(self.unit);
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                // Leaves of one size can do the same.
                if level == 0
                    && let Some(same) = here.iter().find(|sums| sums.most == most)
                {
                    here.push(Sums { end: domain.end, ..same.clone() });
                    continue;
                }
                let mut sums = Sums::nothing(domain.end, most);
                while let Some(part) = parts.next_if(|part| part.end <= domain.end) {
                    sums.beside(&part);
                }
                for (gpus, n) in &mine {
                    sums.add(*gpus as usize, *n as usize);
                }
                here.push(sums);
            }
            below = here;
        }
        below.last().map_or(0, |sums| sums.largest() as u64 * u64::from(self.unit))
    }

    /// The most GPUs of one node that can be in use.
    fn node(&self, counts: &[u32]) -> u32 {
        let mut sums = Sums::nothing(0, (self.gpus_per_node / self.unit) as usize);
        for (kind, n) in self.kinds.iter().zip(counts) {
            sums.add((kind.gpus_per_node / self.unit) as usize, *n as usize);
        }
        sums.largest() as u32 * self.unit
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

/// Numbers from 0 to `most` that can be reached, as bits.
#[derive(Clone)]
struct Sums {
    /// The node after the domain's last.
    end: u32,
    most: usize,
    bits: Vec<u64>,
}

impl Sums {
    fn nothing(end: u32, most: usize) -> Sums {
        let mut bits = vec![0; most / 64 + 1];
        bits[0] = 1;
        Sums { end, most, bits }
    }

    /// Adds one number or not, `n` times.
    fn add(&mut self, number: usize, n: usize) {
        let mut left = n.min(self.most / number.max(1));
        let mut step = 1;
        // 1, 2, 4, … and the rest: their sums are all numbers up to n.
        while left > 0 && number > 0 {
            let now = step.min(left);
            let before = self.bits.clone();
            self.or(&before, number * now);
            left -= now;
            step *= 2;
        }
    }

    /// Each number that can be reached with each that a part can reach.
    fn beside(&mut self, part: &Sums) {
        let before = self.bits.clone();
        let can = |n: usize| part.bits[n / 64] >> (n % 64) & 1 == 1;
        let mut from = 0;
        while from <= part.most {
            // Numbers in a row at once: the first, and up to so many more.
            let row = (from..=part.most).take_while(|n| can(*n)).count();
            if let Some(more) = row.checked_sub(1) {
                let mut sums = Sums { end: 0, most: self.most, bits: vec![0; before.len()] };
                sums.or(&before, from);
                sums.add(1, more);
                self.or(&sums.bits, 0);
            }
            from += row + 1;
        }
    }

    fn or(&mut self, other: &[u64], by: usize) {
        let (words, rest) = (by / 64, by % 64);
        for i in (words..self.bits.len()).rev() {
            let low = other[i - words] << rest;
            let high = if rest > 0 && i > words { other[i - words - 1] >> (64 - rest) } else { 0 };
            self.bits[i] |= low | high;
        }
        // Beyond the most is nothing.
        let kept = self.most % 64;
        if let Some(last) = self.bits.last_mut().filter(|_| kept < 63) {
            *last &= (1 << (kept + 1)) - 1;
        }
    }

    fn largest(&self) -> usize {
        let word = self.bits.iter().rposition(|word| *word != 0).unwrap_or(0);
        word * 64 + 63 - (self.bits[word] | 1).leading_zeros() as usize
    }
}

#[cfg(test)]
mod tests;
