//! Who may take GPUs from whom, what it costs, and the cheapest set of whole
//! gangs that makes room for another.
//!
//! - A queue takes its guarantee back from those above theirs.
//! - Priority takes within one queue, after a minimum run.
//! - Where jobs take turns, a lower level takes from a higher one after the shortest turn.
//!
//! No one else takes, so nobody can take back what was taken from him. Nobody
//! is evicted if the gang would still not fit, and no victim is superfluous.

use super::grid::View;
use super::memo::Holder;
use super::pass::{Ask, Pass, held_for};
use super::place;
use super::{Decision, claims, turns};
use crate::gpus::Slots;
use crate::model::{Claim, EvictionCause, Job, JobId, Phase, Placement};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Up to so many candidates every set of them is looked at.
const EXACT: usize = 10;

/// Whom it is worth asking: the preemptible holders by queue, and those of queues above their guarantees.
#[derive(Debug, Default)]
pub(super) struct Rights {
    /// By queue: its holders, and the lowest priority of them.
    of_queue: BTreeMap<usize, (i32, Vec<JobId>)>,
    /// Holders of queues above their guarantee, by type.
    above: BTreeMap<usize, Vec<JobId>>,
}

impl Rights {
    fn new(pass: &Pass<'_>) -> Rights {
        let mut rights = Rights::default();
        for (id, holder) in &pass.index.holders {
            if !holder.preemptible || holder.leaving || holder.evicting || pass.leaving.contains(id) {
                continue;
            }
            let queue = pass.branch[holder.queue as usize];
            let (lowest, list) = rights.of_queue.entry(queue).or_insert((i32::MAX, Vec::new()));
            *lowest = holder.priority.min(*lowest);
            list.push(*id);
            let t = holder.gpu_type;
            if pass.quotas.managed[t] && pass.quotas.used(queue, t) > pass.quotas.guarantee(queue, t) {
                rights.above.entry(t).or_default().push(*id);
            }
        }
        rights
    }
}

/// A gang that may be asked to leave.
pub(super) struct Candidate {
    pub(super) job: JobId,
    cause: EvictionCause,
    queue: usize,
    pub(super) gpus: u32,
    price: u64,
    pub(super) slots: Vec<(usize, Slots)>,
}

impl Candidate {
    pub(super) fn new(pass: &Pass<'_>, job: &Job, holder: &Holder, queue: usize, cause: EvictionCause) -> Candidate {
        let slots = job.phase.gang().into_iter().flat_map(|g| &g.workers).filter_map(|w| {
            let node = pass.snapshot.nodes.get(&w.node)?;
            Some((*pass.grid.index.get(&w.node)?, w.slots.and(pass.usable(node)).without(node.claimed)))
        });
        Candidate { job: job.id, cause, queue, gpus: holder.gpus, price: price(pass, job), slots: slots.collect() }
    }
}

/// What it costs to suspend a job, in GPU-milliseconds: the work since its last checkpoint, which is lost
/// unless it saves itself when asked, and a restart; times how often it was preempted before.
pub(super) fn price(pass: &Pass<'_>, job: &Job) -> u64 {
    let Some(gang) = job.phase.gang() else { return 0 };
    let saved = job.checkpoint.as_ref().filter(|c| c.attempt == gang.attempt).map_or(gang.placed, |c| c.at);
    let lost =
        if job.saves_on_request || matches!(job.phase, Phase::Starting(_)) { 0 } else { pass.now.since(saved).0 };
    let restart = job.startup.unwrap_or(pass.snapshot.policy.restart).0.max(1000);
    let each = u64::try_from(lost.saturating_add(restart)).unwrap_or(0);
    each.saturating_mul(u64::from(gang.gpu_count())).saturating_mul(1 + u64::from(job.preempted))
}

/// Promises the job GPUs that others give up for it, if it has a right to any that help.
/// Tells how many GPUs.
pub(super) fn claim(pass: &mut Pass<'_>, ask: &Ask<'_>) -> Option<u32> {
    if !pass.snapshot.policy.preemption || !may_take(pass, ask) {
        return None;
    }
    for segment in pass.segments(ask).to_vec() {
        let found = search(pass, ask, segment);
        let Some((victims, placement)) = found.or_else(|| take_turn(pass, ask, segment)) else { continue };
        let cause = victims.iter().map(|v| v.cause).min().unwrap_or(EvictionCause::Turn);
        let attempt = |id: &JobId| pass.snapshot.jobs.get(id).map_or(0, |j| j.attempts);
        let named = victims.iter().map(|v| (v.job, attempt(&v.job))).collect();
        let claim = Claim { placement: placement.clone(), victims: named, cause, since: pass.now };
        pass.out.decisions.push(Decision::Claim { job: ask.id, claim });
        pass.take(segment, &placement, ask.queue, ask.class.preemptible);
        let snapshot = pass.snapshot;
        for victim in victims {
            if let Some(job) = snapshot.jobs.get(&victim.job) {
                claims::evict(pass, job, victim.cause, Some(ask.job));
            }
        }
        return Some(placement.gpus().count());
    }
    None
}

/// Whether there is any right at all to look for victims by.
fn may_take(pass: &mut Pass<'_>, ask: &Ask<'_>) -> bool {
    if pass.rights.is_none() {
        pass.rights = Some(Rights::new(pass));
    }
    if ask.sharing.is_some() {
        return true;
    }
    let Some(rights) = &pass.rights else { return false };
    rights.of_queue.get(&ask.queue).is_some_and(|(lowest, _)| *lowest < ask.class.priority)
        || pass.segments(ask).iter().any(|s| by_guarantee(pass, rights, ask, *s))
}

/// Whether the queue, or one above it, would be within its guarantee, and somebody is above his.
fn by_guarantee(pass: &Pass<'_>, rights: &Rights, ask: &Ask<'_>, segment: usize) -> bool {
    let t = pass.grid.segments[segment].gpu_type;
    let gpus = ask.class.gpus();
    let within = |q: &usize| pass.quotas.used(*q, t).saturating_add(gpus) <= pass.quotas.guarantee(*q, t);
    rights.above.contains_key(&t) && pass.quotas.branches[ask.queue].path.iter().any(within)
}

/// By what right a job may take a holder's GPUs.
fn right(pass: &Pass<'_>, ask: &Ask<'_>, victim: &Job, queue: usize, t: usize) -> Option<EvictionCause> {
    if pass.quotas.may_reclaim(queue, ask.queue, t, ask.class.gpus(), &BTreeMap::new()) {
        return Some(EvictionCause::Reclaim);
    }
    let ran = held_for(victim, pass.now);
    if queue == ask.queue && victim.request.priority < ask.class.priority {
        return (ran >= pass.snapshot.policy.minimum_run).then_some(EvictionCause::Priority);
    }
    None
}

fn candidates(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize) -> Vec<Candidate> {
    let t = pass.grid.segments[segment].gpu_type;
    let mut found = Vec::new();
    let Some(rights) = &pass.rights else { return found };
    let mut worth: BTreeSet<JobId> = BTreeSet::new();
    if let Some((_, list)) = rights.of_queue.get(&ask.queue).filter(|(lowest, _)| *lowest < ask.class.priority) {
        worth.extend(list);
    }
    if by_guarantee(pass, rights, ask, segment) {
        worth.extend(rights.above.get(&t).into_iter().flatten());
    }
    for id in worth {
        let Some(holder) = pass.index.holders.get(&id).filter(|h| h.segment == segment) else { continue };
        let Some(job) = pass.snapshot.jobs.get(&id).filter(|_| !pass.leaving.contains(&id)) else { continue };
        let queue = pass.branch[holder.queue as usize];
        let Some(cause) = right(pass, ask, job, queue, t) else { continue };
        found.push(Candidate::new(pass, job, holder, queue, cause));
    }
    found.sort_by_key(|c| (c.price, Reverse(c.job)));
    found
}

/// The cheapest victims that were found and the place that they make.
fn search(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize) -> Option<(Vec<Candidate>, Placement)> {
    let s = &pass.grid.segments[segment];
    let t = s.gpu_type;
    let gpus = ask.class.gpus();
    let over = pass.quotas.over_limits(ask.queue, t, gpus);
    if over.is_empty() && pass.quotas.short(ask.queue, t, gpus, ask.class.preemptible).is_some() {
        return None;
    }
    let wanted = pass.wanted(ask, segment, false)?;
    let all = candidates(pass, ask, segment);
    if all.is_empty() {
        return None;
    }
    let mut base = pass.view_for(ask, segment).clone();
    for (node, slots) in claims::free_soon(pass) {
        let free = base.free[node].or(slots);
        base.set(pass.grid, node, free);
    }
    let room = |view: &View| place::room(pass.grid, s, view, wanted.gpus_per_node, wanted.within);
    if over.is_empty() && room(&base) >= wanted.nodes.0 {
        // Enough is being given back already: nobody else needs to leave.
        return None;
    }
    let mut everything = base.clone();
    add(pass, &mut everything, all.iter());
    if room(&everything) < wanted.nodes.0 {
        return None;
    }
    let domains = &s.domains[wanted.within.min(s.top())];
    let mut best: Option<(u64, usize, BTreeSet<usize>)> = None;
    for (i, domain) in domains.iter().enumerate() {
        if everything.fits(pass.grid, domain.id, wanted.gpus_per_node) < wanted.nodes.0 {
            continue;
        }
        let mut task = Task {
            pass,
            ask,
            t,
            need: wanted.nodes.0,
            gpus: wanted.gpus_per_node,
            base: &base,
            nodes: domain.nodes.clone(),
            all: &all,
            over: &over,
            by_node: BTreeMap::new(),
        };
        for (c, candidate) in all.iter().enumerate() {
            for (node, slots) in &candidate.slots {
                if domain.nodes.contains(node) {
                    task.by_node.entry(*node).or_default().push((c, *slots));
                }
            }
        }
        if let Some((price, set)) = task.solve()
            && best.as_ref().is_none_or(|(p, ..)| price < *p)
        {
            best = Some((price, i, set));
        }
    }
    let (_, _, set) = best?;
    let victims: Vec<Candidate> =
        all.into_iter().enumerate().filter(|(i, _)| set.contains(i)).map(|(_, c)| c).collect();
    let placement = place_after(pass, ask, segment, &victims)?;
    Some((victims, placement))
}

/// The job's turn, if it is.
fn take_turn(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize) -> Option<(Vec<Candidate>, Placement)> {
    let victims = turns::displace(pass, ask, segment)?;
    let placement = place_after(pass, ask, segment, &victims)?;
    Some((victims, placement))
}

/// The place of the gang once the victims are gone.
fn place_after(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize, victims: &[Candidate]) -> Option<Placement> {
    let wanted = pass.wanted(ask, segment, false)?;
    let mut after = pass.view_for(ask, segment).clone();
    for (node, slots) in claims::free_soon(pass) {
        let free = after.free[node].or(slots);
        after.set(pass.grid, node, free);
    }
    add(pass, &mut after, victims.iter());
    place::place(pass.grid, &pass.grid.segments[segment], &after, &wanted)
}

/// Adds what the gangs would give up.
pub(super) fn add<'c>(pass: &Pass<'_>, view: &mut View, candidates: impl Iterator<Item = &'c Candidate>) {
    for candidate in candidates {
        for (node, slots) in &candidate.slots {
            let free = view.free[*node].or(*slots);
            view.set(pass.grid, *node, free);
        }
    }
}

/// The search within one domain.
struct Task<'t, 'p> {
    pass: &'t Pass<'p>,
    ask: &'t Ask<'t>,
    t: usize,
    need: u32,
    gpus: u32,
    base: &'t View,
    nodes: std::ops::Range<usize>,
    all: &'t [Candidate],
    over: &'t [(usize, u32)],
    by_node: BTreeMap<usize, Vec<(usize, Slots)>>,
}

impl Task<'_, '_> {
    fn solve(&self) -> Option<(u64, BTreeSet<usize>)> {
        let mut relevant: BTreeSet<usize> = self.by_node.values().flatten().map(|(c, _)| *c).collect();
        if !self.over.is_empty() {
            relevant = (0..self.all.len()).collect();
        }
        if relevant.len() <= EXACT {
            return self.every_set(&relevant.into_iter().collect::<Vec<_>>());
        }
        let mut chosen = self.within_limits()?;
        self.make_room(&mut chosen)?;
        self.prune(&mut chosen);
        Some((self.price(&chosen), chosen))
    }

    fn price(&self, set: &BTreeSet<usize>) -> u64 {
        set.iter().map(|c| self.all[*c].price).fold(0, u64::saturating_add)
    }

    fn every_set(&self, list: &[usize]) -> Option<(u64, BTreeSet<usize>)> {
        let mut best: Option<(u64, u32)> = None;
        for mask in 1u32..1 << list.len() {
            let price = list.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, c)| self.all[*c].price);
            let price = price.fold(0, u64::saturating_add);
            if best.is_some_and(|(p, _)| p <= price) {
                continue;
            }
            let set = members(list, mask);
            if self.enough(&set) && self.allowed(&set) {
                best = Some((price, mask));
            }
        }
        best.map(|(price, mask)| (price, members(list, mask)))
    }

    /// Whether the gang fits once the set is gone, by nodes and by limits.
    fn enough(&self, set: &BTreeSet<usize>) -> bool {
        let mut fits = 0;
        for node in self.nodes.clone() {
            fits += u32::from(self.free(node, set).count() >= self.gpus);
            if fits >= self.need {
                return self.limits_hold(set);
            }
        }
        false
    }

    fn free(&self, node: usize, set: &BTreeSet<usize>) -> Slots {
        let given = self.by_node.get(&node).into_iter().flatten().filter(|(c, _)| set.contains(c));
        given.fold(self.base.free[node], |free, (_, slots)| free.or(*slots))
    }

    fn limits_hold(&self, set: &BTreeSet<usize>) -> bool {
        self.over.iter().all(|(queue, over)| {
            let below = |c: &&usize| self.pass.quotas.branches[self.all[**c].queue].path.contains(queue);
            set.iter().filter(below).map(|c| self.all[*c].gpus).sum::<u32>() >= *over
        })
    }

    /// Whether each of the set is still above its guarantee when it is its turn to leave, the smallest first.
    fn allowed(&self, set: &BTreeSet<usize>) -> bool {
        let mut order: Vec<&Candidate> =
            set.iter().map(|c| &self.all[*c]).filter(|c| c.cause == EvictionCause::Reclaim).collect();
        order.sort_by_key(|c| (c.gpus, c.job));
        let mut given = BTreeMap::new();
        order.into_iter().all(|c| {
            let may = self.pass.quotas.may_reclaim(c.queue, self.ask.queue, self.t, self.ask.class.gpus(), &given);
            for above in &self.pass.quotas.branches[c.queue].path {
                *given.entry(*above).or_insert(0) += c.gpus;
            }
            may
        })
    }

    /// Where a limit is in the way, the cheapest below it.
    fn within_limits(&self) -> Option<BTreeSet<usize>> {
        let mut chosen = BTreeSet::new();
        for (c, _) in self.all.iter().enumerate() {
            if self.limits_hold(&chosen) {
                break;
            }
            chosen.insert(c);
            if !self.allowed(&chosen) {
                chosen.remove(&c);
            }
        }
        self.limits_hold(&chosen).then_some(chosen)
    }

    /// Empties the nodes that cost least, one after the other, until there are enough.
    fn make_room(&self, chosen: &mut BTreeSet<usize>) -> Option<()> {
        let mut fits: u32 = 0;
        let mut heap = BinaryHeap::new();
        for node in self.nodes.clone() {
            if self.free(node, chosen).count() >= self.gpus {
                fits += 1;
            } else if let Some((cost, _)) = self.bundle(node, chosen) {
                heap.push(Reverse((cost, node)));
            }
        }
        while fits < self.need {
            let Reverse((cost, node)) = heap.pop()?;
            if self.free(node, chosen).count() >= self.gpus {
                continue;
            }
            let Some((now, bundle)) = self.bundle(node, chosen) else { continue };
            if now > cost {
                heap.push(Reverse((now, node)));
                continue;
            }
            let mut with = chosen.clone();
            with.extend(bundle.iter().copied());
            if !self.allowed(&with) {
                continue;
            }
            let touched: BTreeSet<usize> = bundle
                .iter()
                .flat_map(|c| &self.all[*c].slots)
                .map(|(n, _)| *n)
                .filter(|n| self.nodes.contains(n))
                .collect();
            for n in touched {
                let before = self.free(n, chosen).count() >= self.gpus;
                let after = self.free(n, &with).count() >= self.gpus;
                fits += u32::from(after && !before);
                if !after && let Some((cost, _)) = self.bundle(n, &with) {
                    heap.push(Reverse((cost, n)));
                }
            }
            *chosen = with;
        }
        Some(())
    }

    /// The cheapest gangs whose leaving makes room on a node, beside those chosen already.
    fn bundle(&self, node: usize, chosen: &BTreeSet<usize>) -> Option<(u64, Vec<usize>)> {
        let mut free = self.free(node, chosen);
        let mut here: Vec<(u64, usize, Slots)> = self
            .by_node
            .get(&node)?
            .iter()
            .filter(|(c, _)| !chosen.contains(c))
            .map(|(c, slots)| (self.all[*c].price / u64::from(slots.count().max(1)), *c, *slots))
            .collect();
        here.sort_unstable();
        let mut bundle: Vec<(usize, Slots)> = Vec::new();
        for (_, c, slots) in here {
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
        let cost = bundle.iter().map(|(c, _)| self.all[*c].price).fold(0, u64::saturating_add);
        Some((cost, bundle.into_iter().map(|(c, _)| c).collect()))
    }

    /// Leaves out whoever is not needed, the dearest first.
    fn prune(&self, chosen: &mut BTreeSet<usize>) {
        let mut order: Vec<usize> = chosen.iter().copied().collect();
        order.sort_by_key(|c| (Reverse(self.all[*c].price), *c));
        let mut fits: u32 = self.nodes.clone().map(|n| u32::from(self.free(n, chosen).count() >= self.gpus)).sum();
        for c in order {
            let nodes = self.all[c].slots.iter().map(|(n, _)| *n).filter(|n| self.nodes.contains(n));
            let nodes: Vec<usize> = nodes.collect();
            let with: u32 = nodes.iter().map(|n| u32::from(self.free(*n, chosen).count() >= self.gpus)).sum();
            chosen.remove(&c);
            let without: u32 = nodes.iter().map(|n| u32::from(self.free(*n, chosen).count() >= self.gpus)).sum();
            let left = fits + without - with;
            if left >= self.need && self.limits_hold(chosen) {
                fits = left;
            } else {
                chosen.insert(c);
            }
        }
    }
}

fn members(list: &[usize], mask: u32) -> BTreeSet<usize> {
    list.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, c)| *c).collect()
}
