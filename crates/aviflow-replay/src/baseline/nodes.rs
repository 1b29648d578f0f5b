//! Nodes by their free GPUs, now and at the start that the first waiting job is promised.

use std::collections::BTreeSet;

/// Free GPUs of each node, and for each number of them the nodes that have it.
pub(super) struct Nodes {
    free: Vec<u32>,
    buckets: Vec<BTreeSet<u32>>,
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

    /// Whether so many nodes have so many free GPUs each.
    pub fn fits(&self, nodes: u32, gpus: u32) -> bool {
        self.buckets[gpus as usize..].iter().map(BTreeSet::len).sum::<usize>() >= nodes as usize
    }

    /// The fullest nodes that have room; among equals the first.
    pub fn place(&self, nodes: u32, gpus: u32) -> Option<Vec<(u32, u32)>> {
        if !self.fits(nodes, gpus) {
            return None;
        }
        let fitting = self.buckets[gpus as usize..].iter().flatten();
        Some(fitting.take(nodes as usize).map(|node| (*node, gpus)).collect())
    }

    /// The same among nodes that leave the job of the shadow its place.
    pub fn place_beside(&self, nodes: u32, gpus: u32, shadow: &Shadow) -> Option<Vec<(u32, u32)>> {
        let mut spare = shadow.fitting.saturating_sub(shadow.nodes);
        let mut place = Vec::with_capacity(nodes as usize);
        for node in self.buckets[gpus as usize..].iter().flatten() {
            let left = shadow.free[*node as usize];
            let hurts = left >= shadow.gpus && left < shadow.gpus + gpus;
            if hurts && spare == 0 {
                continue;
            }
            spare -= u32::from(hurts);
            place.push((*node, gpus));
            if place.len() == nodes as usize {
                return Some(place);
            }
        }
        None
    }

    /// What is free, as seen by a job that waits for so many nodes with so many GPUs.
    pub fn shadow(&self, nodes: u32, gpus: u32) -> Shadow {
        let fitting = self.buckets[gpus as usize..].iter().map(BTreeSet::len).sum::<usize>();
        Shadow { free: self.free.clone(), nodes, gpus, fitting: u32::try_from(fitting).unwrap_or(u32::MAX) }
    }
}

/// What will be free when the first waiting job is to start.
pub(super) struct Shadow {
    free: Vec<u32>,
    /// Nodes it needs, and GPUs on each.
    nodes: u32,
    gpus: u32,
    /// Nodes that have as many.
    fitting: u32,
}

impl Shadow {
    /// Whether the job has a place.
    pub fn fits(&self) -> bool {
        self.fitting >= self.nodes
    }

    /// Something will have ended by then.
    pub fn give(&mut self, place: &[(u32, u32)]) {
        for (node, gpus) in place {
            let free = &mut self.free[*node as usize];
            let before = *free >= self.gpus;
            *free += gpus;
            self.fitting += u32::from(!before && *free >= self.gpus);
        }
    }

    /// Something will still run then.
    pub fn take(&mut self, place: &[(u32, u32)]) {
        for (node, gpus) in place {
            let free = &mut self.free[*node as usize];
            let before = *free >= self.gpus;
            *free -= gpus;
            self.fitting -= u32::from(before && *free < self.gpus);
        }
    }
}
