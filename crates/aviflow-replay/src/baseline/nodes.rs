//! Nodes by their free GPUs, now and at the start that the first waiting job is promised.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

/// Free GPUs of each node, and for each number of them the nodes that have it.
pub(super) struct Nodes {
    free: Vec<u32>,
    buckets: Vec<BTreeSet<u32>>,
}

/// What a job wants: nodes, and GPUs on each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub nodes: u32,
    pub gpus: u32,
    /// The domains of which one must hold it, if it requires one; else all nodes as one domain.
    pub domains: Rc<[Range<u32>]>,
}

impl Nodes {
    pub fn new(nodes: u32, gpus: u32) -> Nodes {
        let mut buckets = vec![BTreeSet::new(); gpus as usize + 1];
        buckets[gpus as usize] = (0..nodes).collect();
        Nodes { free: vec![gpus; nodes as usize], buckets }
    }

    pub fn is_full(&self) -> bool {
        self.buckets.iter().skip(1).all(BTreeSet::is_empty)
    }

    pub fn take(&mut self, node: u32, gpus: u32) {
        self.set(node, self.free[node as usize] - gpus);
    }

    pub fn give(&mut self, node: u32, gpus: u32) {
        self.set(node, self.free[node as usize] + gpus);
    }

    fn set(&mut self, node: u32, free: u32) {
        self.buckets[self.free[node as usize] as usize].remove(&node);
        self.buckets[free as usize].insert(node);
        self.free[node as usize] = free;
    }

    /// Whether a domain has room for a job.
    pub fn fits(&self, shape: &Shape) -> bool {
        shape.domains.iter().any(|domain| self.room(domain, shape.gpus) >= shape.nodes as usize)
    }

    /// Nodes of a domain that have so many free GPUs.
    fn room(&self, domain: &Range<u32>, gpus: u32) -> usize {
        let all = &self.buckets[gpus as usize..];
        if domain.len() == self.free.len() {
            return all.iter().map(BTreeSet::len).sum();
        }
        self.free[domain.start as usize..domain.end as usize].iter().filter(|free| **free >= gpus).count()
    }

    /// The domains that have room for a job, the one with the least room first.
    fn rooms<'a>(&self, shape: &'a Shape) -> Vec<&'a Range<u32>> {
        let room = |domain: &'a Range<u32>| (self.room(domain, shape.gpus), domain.start, domain);
        let mut rooms: Vec<_> = shape.domains.iter().map(room).filter(|r| r.0 >= shape.nodes as usize).collect();
        rooms.sort_unstable_by_key(|(room, start, _)| (*room, *start));
        rooms.into_iter().map(|(_, _, domain)| domain).collect()
    }

    /// Nodes of a domain that have so many free GPUs, the fullest first; among equals the first.
    fn fitting(&self, domain: &Range<u32>, gpus: u32) -> impl Iterator<Item = &u32> {
        self.buckets[gpus as usize..].iter().flat_map(move |bucket| bucket.range(domain.clone()))
    }

    /// The fullest nodes that have room, of the domain that has the least.
    pub fn place(&self, shape: &Shape) -> Option<Vec<(u32, u32)>> {
        let domain = *self.rooms(shape).first()?;
        let fitting = self.fitting(domain, shape.gpus);
        Some(fitting.take(shape.nodes as usize).map(|node| (*node, shape.gpus)).collect())
    }

    /// The same among nodes that leave the job of the shadow its place.
    pub fn place_beside(&self, shape: &Shape, shadow: &Shadow) -> Option<Vec<(u32, u32)>> {
        self.rooms(shape).into_iter().find_map(|domain| self.beside(shape, domain, shadow))
    }

    fn beside(&self, shape: &Shape, domain: &Range<u32>, shadow: &Shadow) -> Option<Vec<(u32, u32)>> {
        let mut spare = shadow.fitting[shadow.domain].saturating_sub(shadow.shape.nodes);
        let mut place = Vec::with_capacity(shape.nodes as usize);
        for node in self.fitting(domain, shape.gpus) {
            let left = shadow.free[*node as usize];
            let wanted = shadow.shape.gpus;
            let inside = shadow.shape.domains[shadow.domain].contains(node);
            let hurts = inside && left >= wanted && left < wanted + shape.gpus;
            if hurts && spare == 0 {
                continue;
            }
            spare -= u32::from(hurts);
            place.push((*node, shape.gpus));
            if place.len() == shape.nodes as usize {
                return Some(place);
            }
        }
        None
    }

    /// What is free, as seen by a job that waits.
    pub fn shadow(&self, shape: &Shape) -> Shadow {
        let room = |domain| u32::try_from(self.room(domain, shape.gpus)).unwrap_or(u32::MAX);
        let fitting = shape.domains.iter().map(room).collect();
        Shadow { free: self.free.clone(), shape: shape.clone(), fitting, domain: 0 }
    }
}

/// What will be free when the first waiting job is to start.
pub(super) struct Shadow {
    free: Vec<u32>,
    /// What it wants.
    shape: Shape,
    /// Nodes of each domain that have as many GPUs.
    fitting: Vec<u32>,
    /// The domain that it will have.
    domain: usize,
}

impl Shadow {
    /// Whether the job has a place; the first domain that has one is the job's.
    pub fn fits(&mut self) -> bool {
        let first = self.fitting.iter().position(|fitting| *fitting >= self.shape.nodes);
        self.domain = first.unwrap_or(0);
        first.is_some()
    }

    /// Something will have ended by then.
    pub fn give(&mut self, place: &[(u32, u32)]) {
        for (node, gpus) in place {
            let free = &mut self.free[*node as usize];
            let before = *free >= self.shape.gpus;
            *free += gpus;
            if !before && *free >= self.shape.gpus {
                *self.fitting_at(*node) += 1;
            }
        }
    }

    /// Something will still run then.
    pub fn take(&mut self, place: &[(u32, u32)]) {
        for (node, gpus) in place {
            let free = &mut self.free[*node as usize];
            let before = *free >= self.shape.gpus;
            *free -= gpus;
            if before && *free < self.shape.gpus {
                *self.fitting_at(*node) -= 1;
            }
        }
    }

    /// What the domain of a node has. The domains are in order, and each node is in one.
    fn fitting_at(&mut self, node: u32) -> &mut u32 {
        let domain = self.shape.domains.partition_point(|domain| domain.end <= node);
        &mut self.fitting[domain]
    }
}
