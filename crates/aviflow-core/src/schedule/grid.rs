//! The nodes as the pass sees them: in the order of the topology, so that every
//! domain is a range, with counts of free GPUs by domain, so that whether a gang
//! fits is answered without looking at nodes.

use crate::gpus::Slots;
use crate::model::{Node, NodeId, Placement, Snapshot};
use std::collections::BTreeMap;
use std::ops::Range;

/// Nodes of one pool and one accelerator type. A gang never spans two.
#[derive(Debug, PartialEq)]
pub(super) struct Segment {
    pub(super) gpu_type: usize,
    /// Levels above the node, smallest first.
    pub(super) levels: Vec<String>,
    /// Domains by level, smallest first; the last level is the segment itself.
    pub(super) domains: Vec<Vec<Domain>>,
    pub(super) nodes: Range<usize>,
    pub(super) pool: String,
    /// The most GPUs of one of its nodes.
    pub(super) widest: u32,
}

/// Nodes below one switch.
#[derive(Debug, PartialEq)]
pub(super) struct Domain {
    pub(super) id: usize,
    pub(super) nodes: Range<usize>,
}

impl Segment {
    /// The index of a level; the number of levels above the node is the whole segment's.
    pub(super) fn level(&self, name: &str) -> Option<usize> {
        self.levels.iter().position(|l| l == name)
    }

    /// The index of the level that is the segment itself.
    pub(super) fn top(&self) -> usize {
        self.domains.len() - 1
    }
}

/// What does not change as long as no node comes, goes or moves.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Grid {
    pub(super) ids: Vec<NodeId>,
    pub(super) index: BTreeMap<NodeId, usize>,
    pub(super) segments: Vec<Segment>,
    pub(super) types: Vec<String>,
    /// The segment of each node.
    pub(super) segment_of: Vec<usize>,
    /// For each node its domains, smallest first; a stride of `depth`.
    domains_of: Vec<usize>,
    depth: usize,
    pub(super) domain_count: usize,
    /// One more than the most GPUs of a node.
    pub(super) stride: usize,
    /// One more than the highest slot number of a node.
    pub(super) bits: usize,
    seen: Vec<(String, String, Vec<String>, Slots)>,
}

impl Grid {
    /// Whether it still describes the nodes of the snapshot.
    pub(super) fn describes(&self, snapshot: &Snapshot) -> bool {
        self.seen.len() == snapshot.nodes.len()
            && self.segments.iter().all(|s| levels(snapshot, &s.pool) == s.levels)
            && snapshot.nodes.values().zip(&self.seen).all(|(n, (pool, gpu_type, path, gpus))| {
                n.pool == *pool && n.gpu_type == *gpu_type && n.path == *path && n.gpus == *gpus
            })
            && snapshot.nodes.keys().eq(self.index.keys())
    }

    pub(super) fn new(snapshot: &Snapshot) -> Grid {
        let mut nodes: Vec<&Node> = snapshot.nodes.values().collect();
        nodes.sort_by(|a, b| {
            (&a.pool, &a.gpu_type)
                .cmp(&(&b.pool, &b.gpu_type))
                .then_with(|| a.path.iter().rev().cmp(b.path.iter().rev()))
                .then(a.id.cmp(&b.id))
        });
        let mut types: Vec<String> = nodes.iter().map(|n| n.gpu_type.clone()).collect();
        types.sort_unstable();
        types.dedup();
        let depth = 1 + snapshot.pools.values().map(|p| p.levels.len()).max().unwrap_or(0);
        let mut grid = Grid {
            ids: nodes.iter().map(|n| n.id).collect(),
            index: nodes.iter().enumerate().map(|(i, n)| (n.id, i)).collect(),
            types,
            segment_of: vec![0; nodes.len()],
            domains_of: vec![usize::MAX; nodes.len() * depth],
            depth,
            stride: 1 + nodes.iter().map(|n| n.gpus.count() as usize).max().unwrap_or(0),
            bits: nodes.iter().map(|n| 64 - n.gpus.0.leading_zeros() as usize).max().unwrap_or(0),
            seen: snapshot
                .nodes
                .values()
                .map(|n| (n.pool.clone(), n.gpu_type.clone(), n.path.clone(), n.gpus))
                .collect(),
            ..Grid::default()
        };
        let mut from = 0;
        while from < nodes.len() {
            let same = |n: &&Node| n.pool == nodes[from].pool && n.gpu_type == nodes[from].gpu_type;
            let to = from + nodes[from..].iter().take_while(|n| same(n)).count();
            grid.segment(snapshot, &nodes, from..to);
            from = to;
        }
        grid
    }

    fn segment(&mut self, snapshot: &Snapshot, nodes: &[&Node], range: Range<usize>) {
        let first = nodes[range.start];
        let levels = levels(snapshot, &first.pool).to_vec();
        let mut domains = Vec::with_capacity(levels.len() + 1);
        for level in 0..=levels.len() {
            let mut list: Vec<Domain> = Vec::new();
            let mut from = range.start;
            while from < range.end {
                // Names of small domains may repeat below different large ones: the whole path counts.
                let above = |n: &Node| n.path.get(level..).map(<[String]>::to_vec).unwrap_or_default();
                let key = above(nodes[from]);
                let to = from
                    + nodes[from..range.end].iter().take_while(|n| level == levels.len() || above(n) == key).count();
                let id = self.domain_count;
                self.domain_count += 1;
                for node in from..to {
                    self.domains_of[node * self.depth + level] = id;
                }
                list.push(Domain { id, nodes: from..to });
                from = to;
            }
            domains.push(list);
        }
        let segment = self.segments.len();
        self.segment_of[range.clone()].fill(segment);
        let gpu_type = self.types.binary_search(&first.gpu_type).unwrap_or(0);
        let widest = nodes[range.clone()].iter().map(|n| n.gpus.count()).max().unwrap_or(0);
        self.segments.push(Segment { gpu_type, levels, domains, nodes: range, pool: first.pool.clone(), widest });
    }

    /// The domains of a node, smallest first.
    pub(super) fn domains_of(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        let all = &self.domains_of[node * self.depth..(node + 1) * self.depth];
        all.iter().copied().take_while(|d| *d != usize::MAX)
    }

    /// Segments in the order of a request's preferences.
    pub(super) fn candidates(&self, gpu_types: &[String]) -> Vec<usize> {
        if gpu_types.is_empty() {
            return (0..self.segments.len()).collect();
        }
        let of = |t: &String| {
            let wanted = self.types.binary_search(t).ok();
            (0..self.segments.len()).filter(move |s| Some(self.segments[*s].gpu_type) == wanted)
        };
        gpu_types.iter().flat_map(of).collect()
    }
}

fn levels<'a>(snapshot: &'a Snapshot, pool: &str) -> &'a [String] {
    snapshot.pools.get(pool).map_or(&[], |p| &p.levels)
}

/// Free GPUs, by node and counted by domain.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) free: Vec<Slots>,
    /// For each domain, how many of its nodes have at least so many free GPUs.
    counts: Vec<u32>,
}

impl View {
    pub(super) fn new(grid: &Grid, free: Vec<Slots>) -> View {
        let mut view = View { free, counts: vec![0; grid.domain_count * grid.stride] };
        for node in 0..view.free.len() {
            let free = view.free[node].count() as usize;
            for domain in grid.domains_of(node) {
                view.counts[domain * grid.stride..][..=free].iter_mut().for_each(|nodes| *nodes += 1);
            }
        }
        view
    }

    /// Nodes of a domain with at least so many free GPUs.
    pub(super) fn fits(&self, grid: &Grid, domain: usize, gpus: u32) -> u32 {
        if gpus as usize >= grid.stride { 0 } else { self.counts[domain * grid.stride + gpus as usize] }
    }

    /// Free GPUs of a domain, and the most on one of its nodes.
    pub(super) fn free_in(&self, grid: &Grid, domain: usize) -> (u32, u32) {
        let all = &self.counts[domain * grid.stride..(domain + 1) * grid.stride];
        let sum = all.iter().skip(1).sum();
        let most = (0u32..).zip(all).filter(|(_, nodes)| **nodes > 0).map(|(free, _)| free).last().unwrap_or(0);
        (sum, most)
    }

    pub(super) fn set(&mut self, grid: &Grid, node: usize, free: Slots) {
        let (before, after) = (self.free[node].count() as usize, free.count() as usize);
        self.free[node] = free;
        if before != after {
            for domain in grid.domains_of(node) {
                let counts = &mut self.counts[domain * grid.stride..];
                if after < before {
                    counts[after + 1..=before].iter_mut().for_each(|nodes| *nodes -= 1);
                } else {
                    counts[before + 1..=after].iter_mut().for_each(|nodes| *nodes += 1);
                }
            }
        }
    }

    pub(super) fn take(&mut self, grid: &Grid, placement: &Placement) {
        for (id, slots) in &placement.0 {
            if let Some(node) = grid.index.get(id) {
                self.set(grid, *node, self.free[*node].without(*slots));
            }
        }
    }
}
