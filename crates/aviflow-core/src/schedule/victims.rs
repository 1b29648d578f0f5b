//! The cheapest set of gangs that must leave so that another fits into one domain.
//!
//! - Few candidates: every set is looked at.
//! - Else the candidates fall into parts that share no node. For each part it is known what it costs to
//!   empty one node, two, …; a table over the parts gives the cheapest way to empty as many as are needed.
//!   That is exact as long as no part is large.
//! - Where that is not enough, because of limits or large parts: nodes are emptied one after the
//!   other, those first that cost least for what they give; then each victim is exchanged for others as long
//!   as that is cheaper.

use super::grid::View;
use super::pass::{Ask, Pass};
use super::place::Wanted;
use super::preempt::{Candidate, given};
use super::quota::Short;
use crate::gpus::Slots;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Up to so many candidates every set of them is looked at.
const EXACT: usize = 10;

/// The same within a part.
const PART: usize = 8;

/// The most steps for the table over the parts.
const TABLE: usize = 4_000_000;

/// The most steps for exchanging victims.
const EXCHANGE: usize = 200_000;

type Set = BTreeSet<usize>;

/// The search within one domain.
pub(super) struct Task<'t, 'p> {
    pass: &'t Pass<'p>,
    ask: &'t Ask<'t>,
    t: usize,
    need: u32,
    gpus: u32,
    base: &'t View,
    nodes: Range<usize>,
    all: &'t [Candidate],
    /// Whether quota may be in the way, beside room.
    quota: bool,
    /// By node of the domain: who is there, with what he would give.
    by_node: Vec<Vec<(usize, Slots)>>,
}

/// The cheapest that was found for making room on so many nodes of a part.
struct Point {
    gain: u32,
    price: u64,
    set: Vec<usize>,
}

impl<'t, 'p> Task<'t, 'p> {
    #[expect(clippy::too_many_arguments, reason = "what the caller has found out about the segment")]
    pub(super) fn new(
        pass: &'t Pass<'p>,
        ask: &'t Ask<'t>,
        t: usize,
        wanted: &Wanted<'_>,
        base: &'t View,
        nodes: Range<usize>,
        all: &'t [Candidate],
        quota: bool,
    ) -> Task<'t, 'p> {
        let mut by_node = vec![Vec::new(); nodes.len()];
        for (c, candidate) in all.iter().enumerate() {
            for (node, slots) in candidate.slots.iter().filter(|(n, _)| nodes.contains(n)) {
                by_node[node - nodes.start].push((c, *slots));
            }
        }
        Task { pass, ask, t, need: wanted.nodes.0, gpus: wanted.gpus_per_node, base, nodes, all, quota, by_node }
    }

    /// What they cost, and who they are.
    pub(super) fn solve(&self) -> Option<(u64, Set)> {
        let mut relevant: Set = self.by_node.iter().flatten().map(|(c, _)| *c).collect();
        if self.quota {
            relevant = (0..self.all.len()).collect();
        }
        if relevant.len() <= EXACT {
            return self.every_set(&relevant.into_iter().collect::<Vec<_>>());
        }
        let mut best: Option<Set> = None;
        if let Some((set, exact)) = self.by_parts(&relevant)
            && self.fits(&set)
            && self.quota_holds(&set)
        {
            let mut set = set;
            self.prune(&mut set);
            // The cheapest that makes room, and quota allows it too.
            if exact {
                return Some((self.price(&set), set));
            }
            best = Some(set);
        }
        for limits_first in [true, false] {
            let mut set = Set::new();
            if self.complete(&mut set, None, limits_first) {
                self.prune(&mut set);
                if best.as_ref().is_none_or(|b| self.price(&set) < self.price(b)) {
                    best = Some(set);
                }
            }
            if !self.quota {
                break;
            }
        }
        let set = self.exchange(best?);
        Some((self.price(&set), set))
    }

    fn price<'s>(&self, set: impl IntoIterator<Item = &'s usize>) -> u64 {
        set.into_iter().map(|c| self.all[*c].price).fold(0, u64::saturating_add)
    }

    fn every_set(&self, list: &[usize]) -> Option<(u64, Set)> {
        let members = |mask: u32| list.iter().enumerate().filter(move |(i, _)| mask >> i & 1 == 1).map(|(_, c)| c);
        let mut best: Option<(u64, Set)> = None;
        for mask in 1u32..1 << list.len() {
            let price = self.price(members(mask));
            if best.as_ref().is_some_and(|(p, _)| *p <= price) {
                continue;
            }
            let set: Set = members(mask).copied().collect();
            if self.fits(&set) && self.quota_holds(&set) {
                best = Some((price, set));
            }
        }
        best
    }

    /// Free GPUs of a node of the domain once the set is gone.
    fn free(&self, node: usize, set: &Set) -> Slots {
        let given = self.by_node[node].iter().filter(|(c, _)| set.contains(c));
        given.fold(self.base.free[self.nodes.start + node], |free, (_, slots)| free.or(*slots))
    }

    /// Whether the gang fits once the set is gone.
    fn fits(&self, set: &Set) -> bool {
        let fitting = (0..self.nodes.len()).filter(|n| self.free(*n, set).count() >= self.gpus);
        fitting.take(self.need as usize).count() == self.need as usize
    }

    fn short_after(&self, set: &Set) -> Option<Short> {
        let class = self.ask.class;
        let given = given(self.pass, set.iter().map(|c| &self.all[*c]));
        self.pass.quotas.short_after(self.ask.queue, self.t, class.gpus(), class.preemptible, &given)
    }

    /// Whether the quota allows the gang once the set is gone.
    fn quota_holds(&self, set: &Set) -> bool {
        !self.quota || self.short_after(set).is_none()
    }

    /// The cheapest sets of each part, put together; and whether no cheaper one exists.
    fn by_parts(&self, relevant: &Set) -> Option<(Set, bool)> {
        let nobody = Set::new();
        let room: Vec<bool> = (0..self.nodes.len()).map(|n| self.free(n, &nobody).count() >= self.gpus).collect();
        let fit = u32::try_from(room.iter().filter(|r| **r).count()).unwrap_or(u32::MAX);
        let missing = self.need.saturating_sub(fit) as usize;
        let (parts, mut exact) = (self.parts(relevant), true);
        let mut best = vec![u64::MAX; missing + 1];
        best[0] = 0;
        let mut curves: Vec<(Vec<Point>, Vec<u16>)> = Vec::with_capacity(parts.len());
        let mut steps = 0;
        for (candidates, nodes) in parts {
            exact &= candidates.len() <= PART;
            let curve = self.curve(&candidates, &nodes, &room);
            steps += curve.len() * missing;
            if steps > TABLE {
                return None;
            }
            let mut picks = vec![0u16; missing + 1];
            for k in (1..=missing).rev() {
                for (point, index) in curve.iter().zip(1u16..) {
                    let price = best[k.saturating_sub(point.gain as usize)].saturating_add(point.price);
                    if price < best[k] {
                        (best[k], picks[k]) = (price, index);
                    }
                }
            }
            curves.push((curve, picks));
        }
        if best[missing] == u64::MAX {
            return None;
        }
        let mut set = Set::new();
        let mut k = missing;
        for (curve, picks) in curves.iter().rev() {
            if let Some(point) = picks[k].checked_sub(1).map(|i| &curve[usize::from(i)]) {
                set.extend(&point.set);
                k = k.saturating_sub(point.gain as usize);
            }
        }
        Some((set, exact))
    }

    /// Candidates that share no node with others, and their nodes.
    fn parts(&self, relevant: &Set) -> Vec<(Vec<usize>, Vec<usize>)> {
        let mut above: BTreeMap<usize, usize> = relevant.iter().map(|c| (*c, *c)).collect();
        fn root(above: &mut BTreeMap<usize, usize>, mut c: usize) -> usize {
            while above[&c] != c {
                let up = above[&above[&c]];
                above.insert(c, up);
                c = up;
            }
            c
        }
        for list in &self.by_node {
            for pair in list.windows(2) {
                let (a, b) = (root(&mut above, pair[0].0), root(&mut above, pair[1].0));
                above.insert(a.max(b), a.min(b));
            }
        }
        let mut parts: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        for c in relevant {
            parts.entry(root(&mut above, *c)).or_default().0.push(*c);
        }
        for (node, list) in self.by_node.iter().enumerate() {
            if let Some((c, _)) = list.first() {
                parts.entry(root(&mut above, *c)).or_default().1.push(node);
            }
        }
        parts.into_values().collect()
    }

    /// What it costs to make room on one node of a part, on two, ….
    fn curve(&self, candidates: &[usize], nodes: &[usize], room: &[bool]) -> Vec<Point> {
        let mut best: BTreeMap<u32, (u64, Vec<usize>)> = BTreeMap::new();
        let mut note = |set: Vec<usize>, gain: u32| {
            let price = self.price(&set);
            if gain > 0 && best.get(&gain).is_none_or(|(p, _)| price < *p) {
                best.insert(gain, (price, set));
            }
        };
        if candidates.len() <= PART {
            for mask in 1u32..1 << candidates.len() {
                let members = || candidates.iter().zip(0..).filter(|(_, i)| mask >> i & 1 == 1).map(|(c, _)| *c);
                let gone = |c: &usize| members().any(|m| m == *c);
                let gain = nodes.iter().filter(|n| {
                    let given = self.by_node[**n].iter().filter(|(c, _)| gone(c));
                    let free = self.base.free[self.nodes.start + **n];
                    !room[**n] && given.fold(free, |f, (_, s)| f.or(*s)).count() >= self.gpus
                });
                let gain = u32::try_from(gain.count()).unwrap_or(u32::MAX);
                note(members().collect(), gain);
            }
        } else {
            let mut set = Set::new();
            let mut gain = 0;
            let mut bundles = Bundles::new(self, &set, None, nodes.to_vec());
            while let Some((more, bundle)) = bundles.cheapest(u32::MAX) {
                gain += more;
                set.extend(&bundle);
                bundles.gone(self, &set, &bundle);
                note(set.iter().copied().collect(), gain);
            }
        }
        // Only those that no other beats.
        let mut points: Vec<Point> = Vec::new();
        for (gain, (price, set)) in best.into_iter().rev() {
            if points.last().is_none_or(|p| price < p.price) {
                points.push(Point { gain, price, set });
            }
        }
        points
    }

    /// Adds who must leave, those first that cost least for what they give. Tells whether that was enough.
    fn complete(&self, set: &mut Set, banned: Option<usize>, limits_first: bool) -> bool {
        if limits_first && self.quota && !self.meet_quota(set, banned) {
            return false;
        }
        let mut fits = (0..self.nodes.len()).filter(|n| self.free(*n, set).count() >= self.gpus).count();
        let mut bundles = Bundles::new(self, set, banned, (0..self.nodes.len()).collect());
        while fits < self.need as usize {
            let missing = self.need - u32::try_from(fits).unwrap_or(0);
            let Some((gain, bundle)) = bundles.cheapest(missing) else { return false };
            fits += gain as usize;
            set.extend(&bundle);
            bundles.gone(self, set, &bundle);
        }
        self.quota_holds(set) || self.quota && self.meet_quota(set, banned) && self.quota_holds(set)
    }

    /// Where a limit is in the way, adds the cheapest below it.
    fn meet_quota(&self, set: &mut Set, banned: Option<usize>) -> bool {
        let mut order: Vec<usize> = (0..self.all.len()).filter(|c| !set.contains(c) && banned != Some(*c)).collect();
        order.sort_by(|a, b| {
            let (a, b) = (&self.all[*a], &self.all[*b]);
            let each = |x: &Candidate, y: &Candidate| u128::from(x.price) * u128::from(y.gpus);
            each(a, b).cmp(&each(b, a)).then(a.job.cmp(&b.job))
        });
        for c in order {
            let helps = match self.short_after(set) {
                None => return true,
                Some(Short::Guarantee { .. }) => return false,
                Some(Short::Kept { .. }) => true,
                Some(Short::Limit { queue, .. }) => self.pass.quotas.branches[self.all[c].queue].path.contains(&queue),
            };
            if helps {
                set.insert(c);
            }
        }
        self.short_after(set).is_none()
    }

    /// The cheapest gangs whose leaving makes room on a node, beside those of the set.
    fn bundle(&self, node: usize, set: &Set, banned: Option<usize>) -> Option<Vec<usize>> {
        let mut free = self.free(node, set);
        let here = self.by_node[node].iter().filter(|(c, _)| !set.contains(c) && banned != Some(*c));
        let mut here: Vec<(usize, Slots)> = here.copied().collect();
        here.sort_by_key(|(c, slots)| (self.all[*c].price / u64::from(slots.count().max(1)), *c));
        let mut bundle: Vec<(usize, Slots)> = Vec::new();
        for (c, slots) in here {
            if free.count() >= self.gpus {
                break;
            }
            free = free.or(slots);
            bundle.push((c, slots));
        }
        if free.count() < self.gpus {
            return None;
        }
        // What came first may not be needed any more.
        bundle.sort_by_key(|(c, _)| Reverse(self.all[*c].price));
        let mut i = 0;
        while i < bundle.len() {
            let without = free.without(bundle[i].1);
            if without.count() >= self.gpus {
                free = without;
                bundle.remove(i);
            } else {
                i += 1;
            }
        }
        Some(bundle.into_iter().map(|(c, _)| c).collect())
    }

    /// Nodes of the domain on which the gangs are.
    fn nodes_of<'s>(&'s self, gangs: &'s [usize]) -> Set {
        let all = gangs.iter().flat_map(|c| &self.all[*c].slots).map(|(n, _)| *n);
        all.filter(|n| self.nodes.contains(n)).map(|n| n - self.nodes.start).collect()
    }

    /// On how many nodes the gangs would make room, beside those of the set.
    fn gain(&self, set: &Set, gangs: &[usize]) -> u32 {
        let mut with = set.clone();
        with.extend(gangs);
        let new = |n: &usize| self.free(*n, set).count() < self.gpus && self.free(*n, &with).count() >= self.gpus;
        u32::try_from(self.nodes_of(gangs).iter().filter(|n| new(n)).count()).unwrap_or(u32::MAX)
    }

    /// Leaves out whoever is not needed, the dearest first.
    fn prune(&self, set: &mut Set) {
        let mut order: Vec<usize> = set.iter().copied().collect();
        order.sort_by_key(|c| (Reverse(self.all[*c].price), *c));
        let mut fits = (0..self.nodes.len()).filter(|n| self.free(*n, set).count() >= self.gpus).count();
        for c in order {
            let nodes = self.nodes_of(&[c]);
            let fit = |set: &Set| nodes.iter().filter(|n| self.free(**n, set).count() >= self.gpus).count();
            let with = fit(set);
            set.remove(&c);
            let left = fits + fit(set) - with;
            if left >= self.need as usize && self.quota_holds(set) {
                fits = left;
            } else {
                set.insert(c);
            }
        }
    }

    /// Exchanges each victim for others as long as that is cheaper.
    fn exchange(&self, mut set: Set) -> Set {
        let mut tries = EXCHANGE / (self.nodes.len() + self.all.len()).max(1);
        let mut again = true;
        while again {
            again = false;
            let mut order: Vec<usize> = set.iter().copied().collect();
            order.sort_by_key(|c| (Reverse(self.all[*c].price), *c));
            for c in order {
                if tries == 0 {
                    return set;
                }
                tries -= 1;
                let mut other = set.clone();
                other.remove(&c);
                if self.complete(&mut other, Some(c), true) {
                    self.prune(&mut other);
                    if self.price(&other) < self.price(&set) {
                        set = other;
                        again = true;
                        break;
                    }
                }
            }
        }
        set
    }
}

/// For each node without room, the cheapest gangs that would make room there.
struct Bundles {
    banned: Option<usize>,
    list: Vec<(usize, Option<Bundle>)>,
}

/// Gangs that make room together.
struct Bundle {
    price: u64,
    /// On how many nodes there is room then.
    gain: u32,
    gangs: Vec<usize>,
}

impl Bundles {
    fn new(task: &Task<'_, '_>, set: &Set, banned: Option<usize>, nodes: Vec<usize>) -> Bundles {
        let mut new = Bundles { banned, list: nodes.into_iter().map(|n| (n, None)).collect() };
        for at in 0..new.list.len() {
            new.renew(task, set, at);
        }
        new
    }

    fn renew(&mut self, task: &Task<'_, '_>, set: &Set, at: usize) {
        let node = self.list[at].0;
        let has_room = task.free(node, set).count() >= task.gpus;
        let gangs = if has_room { None } else { task.bundle(node, set, self.banned) };
        self.list[at].1 = gangs.map(|gangs| Bundle { price: task.price(&gangs), gain: task.gain(set, &gangs), gangs });
    }

    /// The gangs that cost least for what is missing, and on how many nodes they make room.
    fn cheapest(&self, missing: u32) -> Option<(u32, Vec<usize>)> {
        let each = |a: &Bundle, b: &Bundle| u128::from(a.price) * u128::from(b.gain.min(missing));
        let all = self.list.iter().filter_map(|(_, bundle)| bundle.as_ref());
        let best = all.reduce(|old, new| if each(new, old) < each(old, new) { new } else { old });
        best.map(|b| (b.gain, b.gangs.clone()))
    }

    /// Looks again at the nodes for which something changed.
    fn gone(&mut self, task: &Task<'_, '_>, set: &Set, gangs: &[usize]) {
        let touched = task.nodes_of(gangs);
        let beside: Vec<usize> = touched.iter().flat_map(|n| &task.by_node[*n]).map(|(c, _)| *c).collect();
        let touched = task.nodes_of(&beside);
        for at in 0..self.list.len() {
            if touched.contains(&self.list[at].0) {
                self.renew(task, set, at);
            }
        }
    }
}
