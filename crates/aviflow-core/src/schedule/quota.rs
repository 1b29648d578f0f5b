//! The quota tree with what it is charged: limits, guarantees, who may take
//! back from whom, and the order of queues.

use super::grid::Grid;
use super::report::QuotaUse;
use crate::model::{NodeCondition, Queue, QueueState, Quota, Snapshot};
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// In the order of queues and users, GPUs held now count as so much decayed use: a
/// queue that has just begun must not get everything before its use begins to show.
pub(super) const PRESENT: Span = Span::minutes(60);

/// A queue in the tree.
#[derive(Debug)]
pub(super) struct Branch {
    pub(super) name: String,
    pub(super) state: QueueState,
    /// From the root to itself.
    pub(super) path: Vec<usize>,
    lend: bool,
    borrow: bool,
    pub(super) reclaim: bool,
    /// By accelerator type, a stride of the number of types.
    quotas: Vec<Quota>,
}

/// The tree, with its charges.
#[derive(Debug)]
pub(super) struct Quotas {
    pub(super) branches: Vec<Branch>,
    index: BTreeMap<String, usize>,
    types: usize,
    /// GPUs charged to a queue and all below it, live attempts and claims; by queue and type.
    used: Vec<u32>,
    /// The same for jobs that are not preemptible.
    fixed: Vec<u32>,
    /// The guarantee that the real capacity allows; by queue and type.
    guarantee: Vec<u32>,
    /// Whether any queue has a quota of the type.
    pub(super) managed: Vec<bool>,
    /// Real capacity by type.
    pub(super) capacity: Vec<u32>,
    /// Decayed GPU-milliseconds of a queue and all below it.
    decayed: Vec<u64>,
}

/// Why quota keeps a gang from starting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// A limit of the queue or of one above it.
    Limit { queue: usize, limit: u32, used: u32 },
    /// Not preemptible, and above the queue's guarantee.
    Guarantee { queue: usize, guarantee: u32, used: u32 },
    /// The rest is the guarantee of queues that do not lend.
    Kept { free: u32, kept: u32 },
}

impl Quotas {
    pub(super) fn new(snapshot: &Snapshot, grid: &Grid, now: Time) -> Quotas {
        let types = grid.types.len();
        let mut tree = Quotas {
            branches: Vec::with_capacity(snapshot.queues.len()),
            index: BTreeMap::new(),
            types,
            used: Vec::new(),
            fixed: Vec::new(),
            guarantee: Vec::new(),
            managed: vec![false; types],
            capacity: vec![0; types],
            decayed: Vec::new(),
        };
        for node in snapshot.nodes.values() {
            let gpus = match node.condition {
                NodeCondition::Ready => node.usable().or(node.held),
                NodeCondition::Cordoned => node.held,
                NodeCondition::Gone => continue,
            };
            if let Ok(t) = grid.types.binary_search(&node.gpu_type) {
                tree.capacity[t] += gpus.count();
            }
        }
        for name in snapshot.queues.keys() {
            tree.branch(snapshot, grid, name, 0);
        }
        tree.guarantees();
        for ((queue, _), usage) in &snapshot.usage {
            let value = usage.at(now, snapshot.policy.half_life);
            let Some(q) = tree.index.get(queue) else { continue };
            for above in tree.branches[*q].path.clone() {
                tree.decayed[above] = tree.decayed[above].saturating_add(value);
            }
        }
        tree
    }

    fn branch(&mut self, snapshot: &Snapshot, grid: &Grid, name: &str, depth: usize) -> usize {
        if let Some(found) = self.index.get(name) {
            return *found;
        }
        // A queue that is not there any more, for jobs that run on: no guarantee, lends nothing, takes nothing.
        let state = if snapshot.queues.is_empty() { QueueState::Open } else { QueueState::Held };
        let gone = Queue { state, ..Queue::open(name) };
        let queue = snapshot.queues.get(name).unwrap_or(&gone);
        // A tree deeper than this has a cycle, which no document may make.
        let parent = queue.parent.as_ref().filter(|p| depth < 64 && snapshot.queues.contains_key(*p));
        let above = parent.map(|p| self.branch(snapshot, grid, p, depth + 1));
        let id = self.branches.len();
        let mut path = above.map_or(Vec::new(), |a| self.branches[a].path.clone());
        path.push(id);
        let mut quotas = vec![Quota { guarantee: 0, limit: None, weight: 1 }; self.types];
        for (t, name) in grid.types.iter().enumerate() {
            if let Some(quota) = queue.quotas.get(name) {
                quotas[t] = *quota;
                self.managed[t] = true;
            }
        }
        let (lend, borrow, reclaim, state) = (queue.lend, queue.borrow, queue.reclaim, queue.state);
        self.branches.push(Branch { name: name.to_owned(), state, path, lend, borrow, reclaim, quotas });
        self.index.insert(name.to_owned(), id);
        self.used.resize(self.branches.len() * self.types, 0);
        self.fixed.resize(self.branches.len() * self.types, 0);
        self.guarantee.resize(self.branches.len() * self.types, 0);
        self.decayed.resize(self.branches.len(), 0);
        id
    }

    /// The branch of a queue, made for one that does not exist any more.
    pub(super) fn of(&mut self, snapshot: &Snapshot, grid: &Grid, name: &str) -> usize {
        match self.index.get(name) {
            Some(found) => *found,
            None => self.branch(snapshot, grid, name, 0),
        }
    }

    /// A parent guarantees what its children do, or more; all together no more than there is.
    fn guarantees(&mut self) {
        for t in 0..self.types {
            let mut sums = vec![0u32; self.branches.len()];
            let mut total = 0u64;
            // Children are not always after their parents: deepest first.
            let mut order: Vec<usize> = (0..self.branches.len()).collect();
            order.sort_by_key(|b| std::cmp::Reverse(self.branches[*b].path.len()));
            for b in order {
                let own = self.branches[b].quotas[t].guarantee.max(sums[b]);
                self.guarantee[b * self.types + t] = own;
                match self.branches[b].path.len().checked_sub(2) {
                    Some(above) => sums[self.branches[b].path[above]] += own,
                    None => total += u64::from(own),
                }
            }
            let capacity = u64::from(self.capacity[t]);
            if total > capacity {
                for b in 0..self.branches.len() {
                    let g = &mut self.guarantee[b * self.types + t];
                    *g = u32::try_from(u64::from(*g) * capacity / total).unwrap_or(0);
                }
            }
        }
    }

    pub(super) fn guarantee(&self, queue: usize, t: usize) -> u32 {
        if self.managed[t] { self.guarantee[queue * self.types + t] } else { u32::MAX }
    }

    pub(super) fn used(&self, queue: usize, t: usize) -> u32 {
        self.used[queue * self.types + t]
    }

    /// Charges GPUs to a queue and those above it, or takes the charge back.
    pub(super) fn charge(&mut self, queue: usize, t: usize, gpus: u32, preemptible: bool, more: bool) {
        for above in self.branches[queue].path.clone() {
            let at = above * self.types + t;
            for (book, counts) in [(&mut self.used, true), (&mut self.fixed, !preemptible)] {
                if counts {
                    book[at] = if more { book[at].saturating_add(gpus) } else { book[at].saturating_sub(gpus) };
                }
            }
        }
    }

    fn limit(&self, queue: usize, t: usize) -> Option<u32> {
        let branch = &self.branches[queue];
        let own = branch.quotas[t].limit;
        if branch.borrow || !self.managed[t] {
            return own;
        }
        let guarantee = self.guarantee(queue, t);
        Some(own.map_or(guarantee, |l| l.min(guarantee)))
    }

    /// What keeps a queue from using so many GPUs more.
    pub(super) fn short(&self, queue: usize, t: usize, gpus: u32, preemptible: bool) -> Option<Short> {
        for above in &self.branches[queue].path {
            let used = self.used(*above, t);
            if let Some(limit) = self.limit(*above, t)
                && used.saturating_add(gpus) > limit
            {
                return Some(Short::Limit { queue: *above, limit, used });
            }
        }
        if !preemptible && self.managed[t] {
            let (guarantee, used) = (self.guarantee(queue, t), self.fixed[queue * self.types + t]);
            if used.saturating_add(gpus) > guarantee {
                return Some(Short::Guarantee { queue, guarantee, used });
            }
        }
        let kept = self.kept(queue, t);
        if kept > 0 {
            let all: u32 = self.roots().map(|r| self.used(r, t)).sum();
            let free = self.capacity[t].saturating_sub(all);
            if free < gpus.saturating_add(kept) {
                return Some(Short::Kept { free, kept });
            }
        }
        None
    }

    fn roots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.branches.len()).filter(|b| self.branches[*b].path.len() == 1)
    }

    /// Unused guarantees of queues that do not lend, as far as they are not this queue's own.
    fn kept(&self, queue: usize, t: usize) -> u32 {
        if !self.managed[t] || self.branches.iter().all(|b| b.lend) {
            return 0;
        }
        let own = &self.branches[queue].path;
        let topmost = |b: &usize| {
            let branch = &self.branches[*b];
            !branch.lend
                && !own.contains(b)
                && branch.path[..branch.path.len() - 1].iter().all(|a| self.branches[*a].lend)
        };
        (0..self.branches.len()).filter(topmost).map(|b| self.guarantee(b, t).saturating_sub(self.used(b, t))).sum()
    }

    /// GPUs by which each queue on the path would exceed its limit: victims below it must give as many.
    pub(super) fn over_limits(&self, queue: usize, t: usize, gpus: u32) -> Vec<(usize, u32)> {
        let over = |above: &usize| {
            let over = self.used(*above, t).saturating_add(gpus).saturating_sub(self.limit(*above, t)?);
            (over > 0).then_some((*above, over))
        };
        self.branches[queue].path.iter().filter_map(over).collect()
    }

    /// Whether a queue that needs so many GPUs may take them back from another, of which `given`
    /// (by queue) are given up already.
    ///
    /// Where their paths part, the one that takes must be within its guarantee with them, and the
    /// other above its own, at each level down to itself.
    pub(super) fn may_reclaim(
        &self,
        from: usize,
        by: usize,
        t: usize,
        gpus: u32,
        given: &BTreeMap<usize, u32>,
    ) -> bool {
        if !self.managed[t] || !self.branches[by].reclaim {
            return false;
        }
        let (ours, theirs) = (&self.branches[by].path, &self.branches[from].path);
        let common = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        let Some(taker) = ours.get(common) else { return false };
        let within = self.used(*taker, t).saturating_add(gpus) <= self.guarantee(*taker, t);
        let above =
            |q: &usize| self.used(*q, t).saturating_sub(given.get(q).copied().unwrap_or(0)) > self.guarantee(*q, t);
        within && common < theirs.len() && theirs[common..].iter().all(above)
    }

    /// The decayed GPU-milliseconds of a queue and all below it.
    pub(super) fn decayed(&self, queue: usize) -> u64 {
        self.decayed[queue]
    }

    /// What people see of a queue's quota.
    pub(super) fn report(&self, queue: usize, t: usize) -> QuotaUse {
        let quota = self.branches[queue].quotas[t];
        let used = self.used(queue, t);
        let all: u32 = self.roots().map(|r| self.used(r, t)).sum();
        let mut headroom = self.capacity[t].saturating_sub(all).saturating_sub(self.kept(queue, t));
        for above in &self.branches[queue].path {
            if let Some(limit) = self.limit(*above, t) {
                headroom = headroom.min(limit.saturating_sub(self.used(*above, t)));
            }
        }
        let below: u32 = (0..self.branches.len())
            .filter(|b| self.branches[*b].path.iter().rev().nth(1) == Some(&queue))
            .map(|b| self.report(b, t).guarantee)
            .sum();
        // Whatever of its unused guarantee is not free is with others.
        let unused = self.guarantee(queue, t).saturating_sub(used);
        let lent = unused.saturating_sub(self.capacity[t].saturating_sub(all));
        QuotaUse {
            lent,
            guarantee: quota.guarantee.max(below),
            effective: self.guarantee(queue, t),
            limit: quota.limit,
            weight: quota.weight,
            used,
            headroom,
        }
    }

    /// The place of a queue in the order, for a type or for all: compared level by level from the root.
    pub(super) fn key(&self, queue: usize, t: Option<usize>) -> Vec<(bool, u64, usize)> {
        let all = t.map_or(0..self.types, |t| t..t + 1);
        let at = |above: &usize| {
            let managed = all.clone().filter(|t| self.managed[*t]);
            let guarantee: u64 = managed.map(|t| u64::from(self.guarantee(*above, t))).sum();
            let used: u64 = all.clone().map(|t| u64::from(self.used(*above, t))).sum();
            if used < guarantee {
                return (false, used * 1_000_000 / guarantee, *above);
            }
            let weight = all.clone().map(|t| self.branches[*above].quotas[t].weight).max().unwrap_or(1).max(1);
            let had = self.decayed[*above].saturating_add(used.saturating_mul(PRESENT.0.unsigned_abs()));
            (true, had / u64::from(weight), *above)
        };
        self.branches[queue].path.iter().map(at).collect()
    }
}
