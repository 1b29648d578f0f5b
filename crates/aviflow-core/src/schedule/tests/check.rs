//! What must hold of every plan, found from the snapshot alone and in another way than the plan finds it.

use crate::gpus::Slots;
use crate::model::{
    Claim, EvictionCause, Job, JobId, NODE_LEVEL, Node, NodeCondition, NodeId, Phase, Placement, Queue, QueueState,
    Request, Snapshot,
};
use crate::schedule::{Decision, Plan};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// GPUs in use below each queue, by queue and type.
pub(super) type Use = BTreeMap<(String, String), u32>;

/// Gangs with when they got their GPUs, and how many.
type Gangs<'a> = Vec<(&'a Job, Time, u32)>;

/// The books while the decisions are carried out one after the other.
struct Books<'a> {
    s: &'a Snapshot,
    now: Time,
    free: BTreeMap<NodeId, Slots>,
    claimed: BTreeMap<NodeId, Slots>,
    used: Use,
    fixed: Use,
    /// Jobs that are leaving, or are told to.
    leaving: BTreeSet<JobId>,
}

/// Checks the decisions of a plan.
pub(super) fn decisions(s: &Snapshot, plan: &Plan, now: Time) {
    let mut with_drains = s.clone();
    for decision in &plan.decisions {
        if let Decision::Take { node, window, .. } = decision {
            with_drains.nodes.get_mut(node).unwrap().drain = Some(window.clone());
        }
    }
    let s = &with_drains;
    let mut books = Books::new(s, now);
    let mut claimed: BTreeMap<JobId, Claim> = s.jobs.values().filter_map(|j| Some((j.id, j.claim.clone()?))).collect();
    let mut evicted: BTreeMap<JobId, BTreeSet<JobId>> = BTreeMap::new();
    let before = Books::new(s, now);
    for decision in &plan.decisions {
        match decision {
            Decision::Start { job, placement } => {
                if let Some(claim) = claimed.remove(job) {
                    books.give_back(&claim);
                }
                books.start(&s.jobs[job], placement);
            }
            Decision::Claim { job, claim } => {
                assert!(!claimed.contains_key(job), "claims twice");
                books.claim(&s.jobs[job], claim);
                claimed.insert(*job, claim.clone());
                evicted.insert(*job, BTreeSet::new());
            }
            Decision::Unclaim { job, .. } => {
                let claim = claimed.remove(job).expect("has no claim");
                books.give_back(&claim);
            }
            Decision::Evict { job, eviction } => {
                let victim = &s.jobs[job];
                assert!(matches!(victim.phase, Phase::Starting(_) | Phase::Running(_)), "evicts who holds nothing");
                assert!(victim.request.preemptible && s.policy.preemption, "{} may not be suspended", victim.key.name);
                let spared = |d: &Decision| matches!(d, Decision::Spare { job: j } if j == job);
                assert!(victim.eviction.is_none() || plan.decisions.iter().any(spared), "evicts twice");
                assert!(eviction.deadline >= now && eviction.deadline <= now + s.policy.patience, "{eviction:?}");
                books.leaving.insert(*job);
                match &eviction.beneficiary {
                    None => assert_eq!(eviction.cause, EvictionCause::Drain),
                    Some(b) => {
                        let names = |c: &Claim| c.victims.contains(&(*job, victim.attempts));
                        assert!(claimed.get(&b.job).is_some_and(names), "nobody claims what {} gives", victim.key.name);
                        evicted.entry(b.job).or_default().insert(*job);
                    }
                }
            }
            Decision::Spare { job } => {
                assert!(s.jobs[job].eviction.is_some(), "spares who need not leave");
                books.leaving.remove(job);
            }
            Decision::Suspend { job, .. } => {
                assert!(
                    matches!(s.jobs[job].phase, Phase::Starting(_) | Phase::Running(_)),
                    "suspends who holds nothing"
                );
                let told = plan.decisions.iter().find_map(|d| match d {
                    Decision::Evict { job: j, eviction } if j == job => Some(eviction),
                    _ => None,
                });
                let eviction = told.or(s.jobs[job].eviction.as_ref()).expect("was never told to leave");
                assert!(eviction.is_due(&s.jobs[job], now), "suspended before its time");
            }
            Decision::Window { .. } | Decision::Take { .. } => {}
        }
    }
    for (job, victims) in evicted {
        let claim = &claimed[&job];
        let named: BTreeSet<JobId> = claim.victims.iter().map(|v| v.0).collect();
        assert_eq!(named, victims, "who is named is told, and nobody else");
        before.rights(&s.jobs[&job], claim, plan);
        before.no_victim_is_superfluous(&s.jobs[&job], claim, plan);
    }
}

/// Who may be told to leave a type for a job, where nothing is decided yet.
pub(super) fn may_leave(s: &Snapshot, job: &Job, t: &str, now: Time) -> BTreeSet<JobId> {
    let books = Books::new(s, now);
    let mut gangs = books.staying(t, &books.leaving);
    let all: Vec<&Job> = gangs.iter().map(|(j, ..)| *j).filter(|j| j.request.preemptible).collect();
    all.into_iter().filter(|victim| books.has_right(job, victim, t, &mut gangs)).map(|j| j.id).collect()
}

/// Whether quota lets a job start on a type once those that leave anyhow and the given ones are gone.
pub(super) fn quota_holds_after(s: &Snapshot, job: &Job, t: &str, gone: &BTreeSet<JobId>, now: Time) -> bool {
    let books = Books::new(s, now);
    let stays = in_use(s, |j| !gone.contains(&j.id) && !books.leaving.contains(&j.id));
    books.quota_allows(&job.request.queue, t, job.request.gpus(), &|q| of(&stays, q, t))
}

/// The path of a queue, itself first. The jobs of a queue `q` that has others below it are in one of their own, `*q`.
pub(super) fn path(s: &Snapshot, name: &str) -> Vec<String> {
    let mut out = vec![name.to_owned()];
    let mut at = name;
    if s.queues.values().any(|q| q.parent.as_deref() == Some(name)) {
        out.insert(0, format!("*{name}"));
    }
    while let Some(parent) = s.queues.get(at).and_then(|q| q.parent.as_deref()) {
        out.push(parent.to_owned());
        at = parent;
    }
    out
}

/// Whether some queue has a quota of the type.
fn managed(s: &Snapshot, gpu_type: &str) -> bool {
    s.queues.values().any(|q| q.quotas.contains_key(gpu_type))
}

fn usable(node: &Node, now: Time) -> Slots {
    let drained = node.drain.as_ref().is_some_and(|d| d.covers(now));
    let over = node.drain.as_ref().is_some_and(|d| d.over(now));
    let open = match node.condition {
        NodeCondition::Ready => !drained,
        NodeCondition::Cordoned => over && !node.shut(),
        NodeCondition::Gone => false,
    };
    // What others use is not there, and nothing is where they use more than jobs leave them.
    let room = node.gpus.without(node.held).without(node.leaving).count();
    if !open || node.others > room {
        return Slots::NONE;
    }
    node.gpus.without(node.unhealthy).without(node.leaving).without(node.foreign)
}

/// What may be used, and what is in use, also on a node that is silent.
pub(super) fn capacity(s: &Snapshot, gpu_type: &str, now: Time) -> u32 {
    s.nodes.values().filter(|n| n.gpu_type == gpu_type).map(|n| usable(n, now).or(n.held).count()).sum()
}

/// The guarantee of a queue, as far as the capacity allows.
pub(super) fn guarantee(s: &Snapshot, queue: &str, gpu_type: &str, now: Time) -> u32 {
    fn below(s: &Snapshot, q: &Queue, t: &str) -> u64 {
        s.queues.values().filter(|c| c.parent.as_ref() == Some(&q.name)).map(|c| own(s, c, t)).sum()
    }
    fn own(s: &Snapshot, q: &Queue, t: &str) -> u64 {
        q.quotas.get(t).map_or(0, |q| u64::from(q.guarantee)).max(below(s, q, t))
    }
    let Some(q) = s.queues.get(queue.strip_prefix('*').unwrap_or(queue)) else { return 0 };
    let total: u64 = s.queues.values().filter(|q| q.parent.is_none()).map(|q| own(s, q, gpu_type)).sum();
    let capacity = u64::from(capacity(s, gpu_type, now));
    let mine = own(s, q, gpu_type) - if queue == q.name { 0 } else { below(s, q, gpu_type) };
    u32::try_from(if total > capacity { mine * capacity / total } else { mine }).unwrap()
}

/// GPUs of live attempts below each queue; of those that are not preemptible alone, and of all.
pub(super) fn in_use(s: &Snapshot, only: impl Fn(&Job) -> bool) -> Use {
    let mut used = Use::new();
    for job in s.jobs.values().filter(|j| only(j)) {
        let Some(gang) = job.phase.gang() else { continue };
        let t = &s.nodes[&gang.workers[0].node].gpu_type;
        for q in path(s, &job.request.queue) {
            *used.entry((q.clone(), t.clone())).or_default() += gang.gpu_count();
        }
    }
    used
}

fn of(used: &Use, queue: &str, gpu_type: &str) -> u32 {
    used.get(&(queue.to_owned(), gpu_type.to_owned())).copied().unwrap_or(0)
}

/// Whether a gang has a place on so many GPUs of each node, and on how many nodes of one domain at most.
pub(super) fn room(s: &Snapshot, free: &BTreeMap<NodeId, Slots>, request: &Request, pool_type: (&str, &str)) -> u32 {
    let mut domains: BTreeMap<Vec<String>, u32> = BTreeMap::new();
    for (id, slots) in free {
        let node = &s.nodes[id];
        if (node.pool.as_str(), node.gpu_type.as_str()) != pool_type || slots.count() < request.gpus_per_node {
            continue;
        }
        let Some(domain) = domain(s, node, request.topology.require.as_deref()) else { continue };
        *domains.entry(domain).or_default() += 1;
    }
    domains.into_values().max().unwrap_or(0)
}

/// The domain of a level that a node is in, with all above it.
pub(super) fn domain(s: &Snapshot, node: &Node, level: Option<&str>) -> Option<Vec<String>> {
    match level {
        None => Some(Vec::new()),
        Some(NODE_LEVEL) => Some(vec![node.name.clone()]),
        Some(name) => {
            let at = s.pools.get(&node.pool)?.levels.iter().position(|l| l == name)?;
            Some(node.path[at..].to_vec())
        }
    }
}

/// Pools and types that a request may have.
pub(super) fn segments(s: &Snapshot, request: &Request) -> BTreeSet<(String, String)> {
    let may = |n: &&Node| request.gpu_types.is_empty() || request.gpu_types.contains(&n.gpu_type);
    s.nodes.values().filter(may).map(|n| (n.pool.clone(), n.gpu_type.clone())).collect()
}

impl<'a> Books<'a> {
    fn new(s: &'a Snapshot, now: Time) -> Books<'a> {
        let free = s.nodes.values().map(|n| (n.id, usable(n, now).without(n.held).without(n.claimed))).collect();
        let going = |j: &&Job| j.eviction.is_some() || matches!(j.phase, Phase::Suspending(_) | Phase::Stopping(_));
        Books {
            s,
            now,
            free,
            claimed: s.nodes.values().map(|n| (n.id, n.claimed)).collect(),
            used: in_use(s, |_| true),
            fixed: in_use(s, |j| !j.request.preemptible),
            leaving: s.jobs.values().filter(going).map(|j| j.id).collect(),
        }
    }

    fn place(&self, job: &Job, placement: &Placement) -> (String, String) {
        let (request, name) = (&job.request, &job.key.name);
        let n = u32::try_from(placement.0.len()).unwrap();
        assert!(request.nodes.min <= n && n <= request.nodes.max, "{name} gets {n} nodes");
        let first = &self.s.nodes[&placement.0[0].0];
        let mut seen = BTreeSet::new();
        let at = domain(self.s, first, request.topology.require.as_deref());
        assert!(at.is_some(), "{name} requires a level that the pool does not have");
        for (id, slots) in &placement.0 {
            let node = &self.s.nodes[id];
            assert!(seen.insert(*id), "{name} has two workers on one node");
            assert_eq!((&node.pool, &node.gpu_type), (&first.pool, &first.gpu_type), "{name} spans two");
            assert!(request.gpu_types.is_empty() || request.gpu_types.contains(&node.gpu_type));
            assert_eq!(slots.count(), request.gpus_per_node);
            assert!(slots.without(usable(node, self.now)).is_empty(), "{name} gets GPUs of a node without work");
            assert_eq!(domain(self.s, node, request.topology.require.as_deref()), at, "{name} spans two domains");
        }
        (first.pool.clone(), first.gpu_type.clone())
    }

    fn give_back(&mut self, claim: &Claim) {
        for (id, slots) in &claim.placement.0 {
            let Some(node) = self.s.nodes.get(id) else { continue };
            let free = slots.and(usable(node, self.now)).without(node.held);
            self.claimed.insert(*id, self.claimed[id].without(*slots));
            *self.free.get_mut(id).unwrap() = self.free[id].or(free);
        }
    }

    fn start(&mut self, job: &Job, placement: &Placement) {
        let name = &job.key.name;
        let (_, t) = self.place(job, placement);
        for (id, slots) in &placement.0 {
            assert!(slots.without(self.free[id]).is_empty(), "{name} gets GPUs that are not free");
            self.free.insert(*id, self.free[id].without(*slots));
        }
        assert!(job.held.is_none() && job.not_before.is_none_or(|t| t <= self.now), "{name} starts though it is held");
        assert!(job.after.iter().all(|d| d.met == Some(true)), "{name} starts before another has ended");
        assert!(self.s.paused.is_none(), "{name} starts though all is paused");
        let gpus = placement.gpus().count();
        for q in path(self.s, &job.request.queue) {
            *self.used.entry((q.clone(), t.clone())).or_default() += gpus;
            if !job.request.preemptible {
                *self.fixed.entry((q.clone(), t.clone())).or_default() += gpus;
            }
            let queue = self.s.queues.get(&q);
            let open = q.starts_with('*') || queue.is_some_and(|q| q.state != QueueState::Held);
            assert!(self.s.queues.is_empty() || open, "{q} is held");
            let Some(queue) = queue else { continue };
            let used = of(&self.used, &q, &t);
            let limit = queue.quotas.get(&t).and_then(|q| q.limit);
            assert!(limit.is_none_or(|l| used <= l), "{name}: queue {q} uses {used} of its limit {limit:?}");
            if managed(self.s, &t) && !queue.borrow {
                let most = guarantee(self.s, &q, &t, self.now);
                assert!(used <= most, "{name}: queue {q} uses {used} of {most} and does not borrow");
            }
        }
        if managed(self.s, &t) && !job.request.preemptible {
            let q = &path(self.s, &job.request.queue)[0];
            let (used, most) = (of(&self.fixed, q, &t), guarantee(self.s, q, &t, self.now));
            assert!(used <= most, "{name}: {used} not preemptible in {q}, which has {most}");
        }
    }

    fn claim(&mut self, job: &Job, claim: &Claim) {
        let name = &job.key.name;
        self.place(job, &claim.placement);
        let victims: BTreeSet<JobId> = claim.victims.iter().map(|v| v.0).collect();
        assert_eq!(victims.len(), claim.victims.len());
        for (id, slots) in &claim.placement.0 {
            let mut missing = slots.without(self.free[id]);
            for other in self.s.jobs.values() {
                let gone = victims.contains(&other.id) || self.leaving.contains(&other.id);
                for worker in other.phase.gang().iter().filter(|_| gone).flat_map(|g| &g.workers) {
                    if worker.node == *id {
                        missing = missing.without(worker.slots);
                    }
                }
            }
            assert!(missing.is_empty(), "{name} claims GPUs of node {} that nobody gives", id.0);
            assert!(slots.and(self.claimed[id]).is_empty(), "{name} claims what another claims");
            self.claimed.insert(*id, self.claimed[id].or(*slots));
            self.free.insert(*id, self.free[id].without(*slots));
        }
    }

    /// Whether limits hold, and what others do not lend is left to them, if a queue gets so many GPUs more.
    fn quota_allows(&self, queue: &str, t: &str, gpus: u32, used: &dyn Fn(&str) -> u32) -> bool {
        let guarantee = |q: &str| guarantee(self.s, q, t, self.now);
        let own = path(self.s, queue);
        let limit = |q: &String| {
            let Some(queue) = self.s.queues.get(q) else { return true };
            let limit = queue.quotas.get(t).and_then(|q| q.limit).unwrap_or(u32::MAX);
            let limit = if queue.borrow || !managed(self.s, t) { limit } else { limit.min(guarantee(q)) };
            used(q) + gpus <= limit
        };
        let keeps = |q: &&Queue| {
            !q.lend
                && !own.contains(&q.name)
                && path(self.s, &q.name).iter().all(|a| *a == q.name || self.s.queues.get(a).is_none_or(|q| q.lend))
        };
        let kept: u32 =
            self.s.queues.values().filter(keeps).map(|q| guarantee(&q.name).saturating_sub(used(&q.name))).sum();
        // Also of queues that do not exist any more.
        let mut names: BTreeSet<&str> = self.s.jobs.values().map(|j| j.request.queue.as_str()).collect();
        names.extend(self.s.queues.keys().map(String::as_str));
        let root = |q: &&str| self.s.queues.get(*q).is_none_or(|q| q.parent.is_none());
        let all: u32 = names.into_iter().filter(root).map(used).sum();
        let free = capacity(self.s, t, self.now).saturating_sub(all);
        own.iter().all(limit) && (kept == 0 || !managed(self.s, t) || free >= gpus + kept)
    }

    /// Those that were leaving before a job's claim was made.
    fn leaving_before(&self, plan: &Plan, claimer: JobId) -> Vec<&'a Job> {
        let mine = |d: &&Decision| !matches!(d, Decision::Claim { job, .. } if *job == claimer);
        let mut all = self.leaving.clone();
        for decision in plan.decisions.iter().take_while(mine) {
            match decision {
                Decision::Evict { job, .. } | Decision::Suspend { job, .. } => all.insert(*job),
                Decision::Spare { job } => all.remove(job),
                _ => continue,
            };
        }
        all.iter().map(|id| &self.s.jobs[id]).collect()
    }

    /// Who holds GPUs of a type and stays.
    fn staying(&self, t: &str, going: &BTreeSet<JobId>) -> Gangs<'a> {
        let stays = self.s.jobs.values().filter(|j| !going.contains(&j.id));
        let held = stays.filter_map(|j| Some((j, j.phase.gang()?)));
        let of_type = held.filter(|(_, gang)| self.s.nodes[&gang.workers[0].node].gpu_type == *t);
        of_type.map(|(j, gang)| (j, gang.placed, gang.gpu_count())).collect()
    }

    /// Victims leave by right.
    fn rights(&self, job: &Job, claim: &Claim, plan: &Plan) {
        let t = &self.s.nodes[&claim.placement.0[0].0].gpu_type;
        let going: BTreeSet<JobId> = self.leaving_before(plan, job.id).iter().map(|j| j.id).collect();
        let mut gangs = self.staying(t, &going);
        let mine = |d: &&Decision| !matches!(d, Decision::Claim { job: j, .. } if *j == job.id);
        for decision in plan.decisions.iter().take_while(mine) {
            if let Decision::Start { job, placement } = decision
                && self.s.nodes[&placement.0[0].0].gpu_type == *t
            {
                gangs.push((&self.s.jobs[job], self.now, placement.gpus().count()));
            }
        }
        for (victim, _) in &claim.victims {
            let victim = &self.s.jobs[victim];
            assert!(
                self.has_right(job, victim, t, &mut gangs),
                "{} leaves {} without a right",
                victim.key.name,
                job.key.name
            );
        }
    }

    /// Whether a job may take the GPUs of another: by priority, by its queue's guarantee, or as it is its turn.
    fn has_right(&self, job: &Job, victim: &Job, t: &str, gangs: &mut Gangs<'a>) -> bool {
        gangs.sort_by_key(|(j, placed, _)| (j.request.preemptible, *placed, j.id));
        let ran = self.now.since(victim.phase.gang().unwrap().placed);
        let (ours, theirs) = (path(self.s, &job.request.queue), path(self.s, &victim.request.queue));
        let by_priority = victim.request.queue == job.request.queue
            && victim.request.priority < job.request.priority
            && ran >= self.s.policy.minimum_run;
        let common = ours.iter().rev().zip(theirs.iter().rev()).take_while(|(a, b)| a == b).count();
        let by_guarantee = common < ours.len() && common < theirs.len() && managed(self.s, t) && {
            let taker = &ours[ours.len() - 1 - common];
            let of_taker = gangs.iter().filter(|(j, ..)| path(self.s, &j.request.queue).contains(taker));
            let used: u32 = of_taker.map(|(_, _, gpus)| gpus).sum();
            let within = used + job.request.gpus() <= guarantee(self.s, taker, t, self.now);
            let lender = &theirs[theirs.len() - 1 - common];
            let takes_back = self.s.queues.get(&job.request.queue).is_some_and(|q| q.reclaim);
            takes_back && within && self.borrowers(lender, t, gangs).contains(&victim.id)
        };
        let sharing = theirs.iter().find_map(|q| self.s.queues.get(q)?.time_sharing);
        let sharing = sharing.or_else(|| self.s.pools.values().find_map(|p| p.time_sharing));
        let by_turn = sharing.is_some_and(|s| s.enabled && ran >= s.minimum_run)
            && victim.request.priority == job.request.priority;
        by_priority || by_guarantee || by_turn
    }

    /// Who borrows from a queue: gangs in their order that find no room in its guarantee, after those that find
    /// room in the guarantees below.
    fn borrowers(&self, queue: &str, t: &str, gangs: &[(&Job, Time, u32)]) -> BTreeSet<JobId> {
        let below = self.s.queues.values().filter(|q| q.parent.as_deref() == Some(queue)).map(|q| q.name.clone());
        let mut below: Vec<String> = below.collect();
        if !below.is_empty() {
            below.push(format!("*{queue}"));
        }
        let mut late = BTreeSet::new();
        for child in below {
            late.extend(self.borrowers(&child, t, gangs));
        }
        let of_queue = gangs.iter().filter(|(j, ..)| path(self.s, &j.request.queue).iter().any(|q| q == queue));
        let (first, last): (Vec<_>, Vec<_>) = of_queue.partition(|(j, ..)| !late.contains(&j.id));
        let mut left = guarantee(self.s, queue, t, self.now);
        let mut out = BTreeSet::new();
        for (job, _, gpus) in first.into_iter().chain(last) {
            if gpus <= left {
                left -= gpus;
            } else {
                out.insert(job.id);
            }
        }
        out
    }

    /// Without any one of the victims the gang would not fit, or a limit would not hold.
    fn no_victim_is_superfluous(&self, job: &Job, claim: &Claim, plan: &Plan) {
        let first = &self.s.nodes[&claim.placement.0[0].0];
        let t = &first.gpu_type;
        let mut free = self.free.clone();
        let gives = |free: &mut BTreeMap<NodeId, Slots>, victim: &Job| {
            for w in victim.phase.gang().iter().flat_map(|g| &g.workers) {
                let slots =
                    w.slots.and(usable(&self.s.nodes[&w.node], self.now)).without(self.s.nodes[&w.node].claimed);
                *free.get_mut(&w.node).unwrap() = free[&w.node].or(slots);
            }
        };
        let mut given = Use::new();
        let of_type = |j: &Job| j.phase.gang().is_some_and(|g| self.s.nodes[&g.workers[0].node].gpu_type == *t);
        let leaves = |given: &mut Use, job: &Job| {
            for q in path(self.s, &job.request.queue) {
                *given.entry((q.clone(), t.clone())).or_default() += job.phase.gang().map_or(0, |g| g.gpu_count());
            }
        };
        // Whoever leaves anyhow gives enough first.
        for other in self.leaving_before(plan, job.id).into_iter().filter(|j| of_type(j)) {
            gives(&mut free, other);
            leaves(&mut given, other);
        }
        // What was given to others, or promised, is not there.
        for decision in &plan.decisions {
            match decision {
                Decision::Start { placement, .. } => take(&mut free, placement),
                Decision::Claim { job: other, claim } if *other != job.id => take(&mut free, &claim.placement),
                _ => {}
            }
        }
        for reservation in plan.reservations.iter().filter(|r| r.job != job.id) {
            take(&mut free, &reservation.placement);
        }
        let mut used = self.used.clone();
        let mut charge = |job: JobId, placement: &Placement| {
            if self.s.nodes.get(&placement.0[0].0).is_some_and(|n| n.gpu_type == *t) {
                for q in path(self.s, &self.s.jobs[&job].request.queue) {
                    *used.entry((q.clone(), t.clone())).or_default() += placement.gpus().count();
                }
            }
        };
        for other in self.s.jobs.values().filter(|j| j.id != job.id) {
            other.claim.iter().for_each(|c| charge(other.id, &c.placement));
        }
        for decision in &plan.decisions {
            match decision {
                Decision::Start { job, placement } => charge(*job, placement),
                Decision::Claim { job: other, claim } if *other != job.id => charge(*other, &claim.placement),
                _ => {}
            }
        }
        for victim in &claim.victims {
            let mut with = free.clone();
            let mut given = given.clone();
            for other in claim.victims.iter().filter(|v| *v != victim) {
                let other = &self.s.jobs[&other.0];
                gives(&mut with, other);
                leaves(&mut given, other);
            }
            let rest = |q: &str| of(&used, q, t) - of(&given, q, t);
            let short = !self.quota_allows(&job.request.queue, t, job.request.gpus(), &rest);
            with.retain(|id, _| self.s.nodes[id].drain.as_ref().is_none_or(|d| d.over(self.now)));
            // Promises that were in its way may have been made anew since: then only that each gives something.
            let gives_some = |w: &crate::model::Worker| {
                claim.placement.0.iter().any(|(n, slots)| *n == w.node && !slots.and(w.slots).is_empty())
            };
            let gives = self.s.jobs[&victim.0].phase.gang().is_some_and(|g| g.workers.iter().any(gives_some));
            if self.s.policy.reservations > 0 && gives {
                continue;
            }
            let fits = room(self.s, &with, &job.request, (&first.pool, t)) >= job.request.nodes.min;
            let name = &self.s.jobs[&victim.0].key.name;
            assert!(!fits || short, "{name} leaves for {} for nothing: {claim:?} {free:?}", job.key.name);
        }
    }
}

fn take(free: &mut BTreeMap<NodeId, Slots>, placement: &Placement) {
    for (id, slots) in &placement.0 {
        free.insert(*id, free[id].without(*slots));
    }
}
