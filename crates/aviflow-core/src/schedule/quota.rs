//! The quota tree with what it is charged: limits, guarantees, who may take
//! back from whom, and the order of queues.

use super::grid::Grid;
use super::report::QuotaUse;
use crate::gpus::Slots;
use crate::model::{JobId, Node, Queue, QueueState, Quota, Snapshot};
use crate::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// In the order of queues and users, GPUs held now count as so much decayed use: a
/// queue that has just begun must not get everything before its use begins to show.
pub(super) const PRESENT: Span = Span::minutes(60);

/// A queue in the tree.
#[derive(Clone, Debug)]
pub(super) struct Branch {
    pub(super) name: String,
    pub(super) state: QueueState,
    /// From the root to itself.
    pub(super) path: Vec<usize>,
    lend: bool,
    borrow: bool,
    pub(super) reclaim: bool,
    /// Whether it stands for the jobs of a queue that has others below it.
    pub(super) own: bool,
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
    /// Of both what leaves: it is still in use, and nobody needs to give it again.
    leaving: Vec<u32>,
    leaving_fixed: Vec<u32>,
    /// The guarantee that the real capacity allows; by queue and type.
    guarantee: Vec<u32>,
    /// Whether any queue has a quota of the type.
    pub(super) managed: Vec<bool>,
    /// Real capacity by type.
    pub(super) capacity: Vec<u32>,
    /// Decayed GPU-milliseconds of a queue and all below it.
    decayed: Vec<u64>,
}

/// A gang, as far as quota needs it.
pub(super) struct Held {
    pub(super) job: JobId,
    pub(super) queue: usize,
    pub(super) t: usize,
    pub(super) gpus: u32,
    pub(super) preemptible: bool,
    pub(super) placed: Time,
}

/// Who borrows.
#[derive(Debug, Default)]
pub(super) struct Borrowed {
    /// By borrower: the accelerator type, and the topmost level at which it is borrowed.
    pub(super) levels: BTreeMap<JobId, (usize, usize)>,
    /// GPUs of the guarantee of each queue that are filled.
    filled: Vec<u32>,
    types: usize,
}

impl Borrowed {
    pub(super) fn filled(&self, queue: usize, t: usize) -> u32 {
        self.filled[queue * self.types + t]
    }
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
    /// `usable` tells the GPUs of a node that gangs may have now or later.
    pub(super) fn new(snapshot: &Snapshot, grid: &Grid, now: Time, usable: &dyn Fn(&Node) -> Slots) -> Quotas {
        let types = grid.types.len();
        let mut tree = Quotas {
            branches: Vec::with_capacity(snapshot.queues.len()),
            index: BTreeMap::new(),
            types,
            used: Vec::new(),
            fixed: Vec::new(),
            leaving: Vec::new(),
            leaving_fixed: Vec::new(),
            guarantee: Vec::new(),
            managed: vec![false; types],
            capacity: vec![0; types],
            decayed: Vec::new(),
        };
        // What is held on a node that is silent is charged, and so it is there.
        for node in snapshot.nodes.values() {
            let gpus = usable(node).or(node.held);
            if let Ok(t) = grid.types.binary_search(&node.gpu_type) {
                tree.capacity[t] += gpus.count();
            }
        }
        for name in snapshot.queues.keys() {
            tree.branch(snapshot, grid, name, 0);
        }
        tree.own_branches();
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
        self.branches.push(Branch { name: name.to_owned(), state, path, lend, borrow, reclaim, own: false, quotas });
        self.index.insert(name.to_owned(), id);
        self.resize();
        id
    }

    /// The jobs of a queue that has others below it are beside those, not above them: they have what its children
    /// leave of its guarantee.
    fn own_branches(&mut self) {
        let parents: BTreeSet<usize> =
            self.branches.iter().filter_map(|b| b.path.len().checked_sub(2).map(|i| b.path[i])).collect();
        for parent in parents {
            let Branch { name, state, mut path, reclaim, .. } = self.branches[parent].clone();
            let id = self.branches.len();
            path.push(id);
            let quotas = vec![Quota { guarantee: 0, limit: None, weight: 1 }; self.types];
            self.index.insert(name.clone(), id);
            self.branches.push(Branch { name, state, path, lend: true, borrow: true, reclaim, own: true, quotas });
            self.resize();
        }
    }

    fn resize(&mut self) {
        for book in [&mut self.used, &mut self.fixed, &mut self.leaving, &mut self.leaving_fixed, &mut self.guarantee] {
            book.resize(self.branches.len() * self.types, 0);
        }
        self.decayed.resize(self.branches.len(), 0);
    }

    /// The branches of queues, made for those that do not exist any more; in an order that depends on their names alone.
    pub(super) fn all_of(&mut self, snapshot: &Snapshot, grid: &Grid, names: &[String]) -> Vec<usize> {
        let mut sorted: Vec<&String> = names.iter().collect();
        sorted.sort_unstable();
        for name in sorted {
            self.branch(snapshot, grid, name, 0);
        }
        names.iter().map(|n| self.index[n]).collect()
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
                let branch = &self.branches[b];
                if branch.own {
                    continue;
                }
                let own = branch.quotas[t].guarantee.max(sums[b]);
                self.guarantee[b * self.types + t] = own;
                match branch.path.len().checked_sub(2) {
                    Some(above) => sums[branch.path[above]] += own,
                    None => total += u64::from(own),
                }
            }
            for (b, branch) in self.branches.iter().enumerate().filter(|(_, b)| b.own) {
                let parent = branch.path[branch.path.len() - 2];
                self.guarantee[b * self.types + t] = self.guarantee[parent * self.types + t] - sums[parent];
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

    /// What of it stays: what leaves is given back without anybody's doing.
    pub(super) fn staying(&self, queue: usize, t: usize) -> u32 {
        let at = queue * self.types + t;
        self.used[at].saturating_sub(self.leaving[at])
    }

    /// Charges GPUs to a queue and those above it, or takes the charge back.
    pub(super) fn charge(&mut self, queue: usize, t: usize, gpus: u32, preemptible: bool, more: bool) {
        let books = [(&mut self.used, true), (&mut self.fixed, !preemptible)];
        note(books, &self.branches[queue].path, self.types, t, gpus, more);
    }

    /// Notes that GPUs which are charged leave, or that they stay after all.
    pub(super) fn leave(&mut self, queue: usize, t: usize, gpus: u32, preemptible: bool, leaves: bool) {
        let books = [(&mut self.leaving, true), (&mut self.leaving_fixed, !preemptible)];
        note(books, &self.branches[queue].path, self.types, t, gpus, leaves);
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
        self.short_beside(queue, t, gpus, preemptible, &BTreeMap::new())
    }

    /// The same if others get what they were promised, by queue.
    pub(super) fn short_beside(
        &self,
        queue: usize,
        t: usize,
        gpus: u32,
        preemptible: bool,
        promised: &BTreeMap<usize, u32>,
    ) -> Option<Short> {
        let fixed = self.fixed[queue * self.types + t];
        let used = |q: usize| self.used(q, t).saturating_add(promised.get(&q).copied().unwrap_or(0));
        // What is not lent is kept also from the moment at which it is given back.
        self.short_limit(queue, t, gpus, &used)
            .or_else(|| self.short_guarantee(queue, t, gpus, (!preemptible).then_some(fixed)))
            .or_else(|| self.short_kept(queue, t, gpus, &|q| self.used(q, t)))
            .or_else(|| self.short_kept(queue, t, gpus, &|q| self.staying(q, t)))
    }

    /// Adds GPUs to a queue and to all above it.
    pub(super) fn add(&self, to: &mut BTreeMap<usize, u32>, queue: usize, gpus: u32) {
        for above in &self.branches[queue].path {
            *to.entry(*above).or_insert(0) += gpus;
        }
    }

    /// What would keep it once everything that leaves is gone, and `given` by queue beside.
    pub(super) fn short_after(
        &self,
        queue: usize,
        t: usize,
        gpus: u32,
        preemptible: bool,
        given: &BTreeMap<usize, u32>,
    ) -> Option<Short> {
        let at = queue * self.types + t;
        let fixed = self.fixed[at].saturating_sub(self.leaving_fixed[at]);
        let used = |q: usize| self.staying(q, t).saturating_sub(given.get(&q).copied().unwrap_or(0));
        self.short_limit(queue, t, gpus, &used)
            .or_else(|| self.short_guarantee(queue, t, gpus, (!preemptible).then_some(fixed)))
            .or_else(|| self.short_kept(queue, t, gpus, &used))
    }

    fn short_limit(&self, queue: usize, t: usize, gpus: u32, used_of: &dyn Fn(usize) -> u32) -> Option<Short> {
        self.branches[queue].path.iter().find_map(|above| {
            let (used, limit) = (used_of(*above), self.limit(*above, t)?);
            (used.saturating_add(gpus) > limit).then_some(Short::Limit { queue: *above, limit, used })
        })
    }

    fn short_guarantee(&self, queue: usize, t: usize, gpus: u32, fixed: Option<u32>) -> Option<Short> {
        let (used, guarantee) = (fixed.filter(|_| self.managed[t])?, self.guarantee(queue, t));
        (used.saturating_add(gpus) > guarantee).then_some(Short::Guarantee { queue, guarantee, used })
    }

    fn short_kept(&self, queue: usize, t: usize, gpus: u32, used_of: &dyn Fn(usize) -> u32) -> Option<Short> {
        let kept = self.kept(queue, t, used_of);
        let all = || self.roots().map(used_of).sum::<u32>();
        let free = || self.capacity[t].saturating_sub(all());
        (kept > 0 && free() < gpus.saturating_add(kept)).then(|| Short::Kept { free: free(), kept })
    }

    fn roots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.branches.len()).filter(|b| self.branches[*b].path.len() == 1)
    }

    /// Unused guarantees of queues that do not lend, as far as they are not this queue's own.
    fn kept(&self, queue: usize, t: usize, used_of: &dyn Fn(usize) -> u32) -> u32 {
        if !self.managed[t] || self.all_lend() {
            return 0;
        }
        let own = &self.branches[queue].path;
        let topmost = |b: &usize| {
            let branch = &self.branches[*b];
            !branch.lend
                && !own.contains(b)
                && branch.path[..branch.path.len() - 1].iter().all(|a| self.branches[*a].lend)
        };
        (0..self.branches.len()).filter(topmost).map(|b| self.guarantee(b, t).saturating_sub(used_of(b))).sum()
    }

    /// Whether nobody keeps what he does not use.
    pub(super) fn all_lend(&self) -> bool {
        self.branches.iter().all(|b| b.lend)
    }

    /// Whether a queue that needs so many GPUs may take back what another borrowed, and at which level that must
    /// be borrowed: where their paths part, the one that takes must be within its guarantee with them.
    pub(super) fn takes_back(&self, by: usize, from: usize, t: usize, gpus: u32) -> Option<usize> {
        if !self.managed[t] || !self.branches[by].reclaim {
            return None;
        }
        let (taker, level) = self.part(by, from)?;
        let within = self.staying(taker, t).saturating_add(gpus) <= self.guarantee(taker, t);
        within.then_some(level)
    }

    /// The queue at or above the first one at which its path parts from that of the other, and the level.
    pub(super) fn part(&self, ours: usize, theirs: usize) -> Option<(usize, usize)> {
        let (ours, theirs) = (&self.branches[ours].path, &self.branches[theirs].path);
        let level = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        (level < theirs.len()).then_some((*ours.get(level)?, level))
    }

    /// What is borrowed: gangs fill the guarantee of their queue in the order in which they got their GPUs,
    /// those that are not preemptible first; whatever finds no room there is borrowed. The same at each
    /// level above, where those that are borrowed below come last. So what is borrowed from a queue is
    /// borrowed from all below it, and no gang becomes a borrower because another starts.
    pub(super) fn borrowed(&self, mut gangs: Vec<Held>) -> Borrowed {
        gangs.sort_by_key(|g| (g.preemptible, g.placed, g.job));
        let mut filled = vec![0u32; self.branches.len() * self.types];
        let path = |g: &Held| &self.branches[g.queue].path;
        let mut from: Vec<usize> = gangs.iter().map(|g| path(g).len()).collect();
        for level in (0..from.iter().copied().max().unwrap_or(0)).rev() {
            for borrowed_below in [false, true] {
                for (i, gang) in gangs.iter().enumerate() {
                    let below = from[i] == level + 1 && path(gang).len() > level + 1;
                    let Some(queue) = path(gang).get(level).filter(|_| below == borrowed_below) else { continue };
                    let sum = &mut filled[queue * self.types + gang.t];
                    if sum.saturating_add(gang.gpus) <= self.guarantee(*queue, gang.t) {
                        *sum += gang.gpus;
                    } else {
                        from[i] = level;
                    }
                }
            }
        }
        let borrowed = gangs.iter().zip(from).filter(|(g, level)| *level < path(g).len());
        Borrowed { levels: borrowed.map(|(g, level)| (g.job, (g.t, level))).collect(), filled, types: self.types }
    }

    /// The levels, a bit for each from the root on, at which a queue is within its guarantee with so many GPUs
    /// more of a type, or of all.
    pub(super) fn within(&self, queue: usize, t: Option<usize>, gpus: u32) -> u64 {
        let level = |(level, above): (u32, &usize)| {
            let (used, guarantee) = self.of_types(*above, t);
            u64::from(used + u64::from(gpus) <= guarantee) << level.min(63)
        };
        (0u32..).zip(&self.branches[queue].path).map(level).fold(0, |a, b| a | b)
    }

    fn of_types(&self, queue: usize, t: Option<usize>) -> (u64, u64) {
        let all = t.map_or(0..self.types, |t| t..t + 1);
        let guarantee = all.clone().filter(|t| self.managed[*t]).map(|t| u64::from(self.guarantee(queue, t))).sum();
        (all.map(|t| u64::from(self.used(queue, t))).sum(), guarantee)
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
        let mut headroom =
            self.capacity[t].saturating_sub(all).saturating_sub(self.kept(queue, t, &|q| self.used(q, t)));
        for above in &self.branches[queue].path {
            if let Some(limit) = self.limit(*above, t) {
                headroom = headroom.min(limit.saturating_sub(self.used(*above, t)));
            }
        }
        let below: u32 = (0..self.branches.len())
            .filter(|b| !self.branches[*b].own && self.branches[*b].path.iter().rev().nth(1) == Some(&queue))
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
    pub(super) fn key(&self, queue: usize, t: Option<usize>, within: u64) -> Vec<(bool, u64, usize)> {
        let at = |(level, above): (u32, &usize)| {
            let (used, guarantee) = self.of_types(*above, t);
            if within >> level.min(63) & 1 == 1 {
                return (false, used * 1_000_000 / guarantee.max(1), *above);
            }
            let all = t.map_or(0..self.types, |t| t..t + 1);
            let weight = all.map(|t| self.branches[*above].quotas[t].weight).max().unwrap_or(1).max(1);
            let had = self.decayed[*above].saturating_add(used.saturating_mul(PRESENT.0.unsigned_abs()));
            (true, had / u64::from(weight), *above)
        };
        (0u32..).zip(&self.branches[queue].path).map(at).collect()
    }
}

fn note(books: [(&mut Vec<u32>, bool); 2], path: &[usize], types: usize, t: usize, gpus: u32, more: bool) {
    for (book, _) in books.into_iter().filter(|(_, counts)| *counts) {
        for above in path {
            let at = &mut book[above * types + t];
            *at = if more { at.saturating_add(gpus) } else { at.saturating_sub(gpus) };
        }
    }
}
