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
use super::memo::{Class, Holder};
use super::pass::{Ask, Pass, Started, held_for};
use super::quota::{Borrowed, Held, Short};
use super::victims::Task;
use super::{Decision, claims, place, turns};
use crate::gpus::Slots;
use crate::model::{Claim, EvictionCause, Job, JobId, Phase, Placement};
use crate::time::Time;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Whom it is worth asking.
#[derive(Debug, Default)]
pub(super) struct Rights {
    /// By queue: its preemptible holders, and the lowest priority of them.
    of_queue: BTreeMap<usize, (i32, Vec<JobId>)>,
    /// Who borrows, also of those that this pass started.
    borrowed: Borrowed,
}

impl Rights {
    fn new(pass: &Pass<'_>) -> Rights {
        let mut rights = Rights::default();
        let mut held = Vec::with_capacity(pass.index.holders.len());
        for (id, holder) in pass.index.holders.iter().filter(|(id, _)| !pass.leaving.contains_key(id)) {
            let queue = pass.branch[holder.queue as usize];
            let Holder { gpu_type: t, gpus, preemptible, placed, .. } = *holder;
            held.push(Held { job: *id, queue, t, gpus, preemptible, placed });
            if preemptible {
                let (lowest, list) = rights.of_queue.entry(queue).or_insert((i32::MAX, Vec::new()));
                *lowest = holder.priority.min(*lowest);
                list.push(*id);
            }
        }
        for (id, started) in &pass.started {
            let Started { queue, gpus, preemptible, .. } = *started;
            let t = pass.grid.segments[started.segment].gpu_type;
            held.push(Held { job: *id, queue, t, gpus, preemptible, placed: pass.now });
        }
        rights.borrowed = pass.quotas.borrowed(held);
        rights
    }

    /// Whether a job borrows at the level at which its path parts from another's.
    pub(super) fn borrows(&self, job: JobId, level: usize) -> bool {
        self.borrowed.levels.get(&job).is_some_and(|(_, from)| *from <= level)
    }
}

/// What the holders are to each other.
pub(super) fn rights<'r>(pass: &'r mut Pass<'_>) -> &'r Rights {
    if pass.rights.is_none() {
        pass.rights = Some(Rights::new(pass));
    }
    pass.rights.get_or_insert_default()
}

/// A gang that may be asked to leave.
pub(super) struct Candidate {
    pub(super) job: JobId,
    pub(super) cause: EvictionCause,
    pub(super) queue: usize,
    pub(super) gpus: u32,
    pub(super) price: u64,
    pub(super) slots: Vec<(usize, Slots)>,
}

impl Candidate {
    pub(super) fn new(
        pass: &Pass<'_>,
        ask: &Ask<'_>,
        job: &Job,
        holder: &Holder,
        queue: usize,
        cause: EvictionCause,
    ) -> Candidate {
        let slots = job.phase.gang().into_iter().flat_map(|g| &g.workers).filter_map(|w| {
            let node = *pass.grid.index.get(&w.node)?;
            Some((node, claims::given(pass, ask, node, w.slots)))
        });
        let slots = slots.filter(|(_, slots)| !slots.is_empty()).collect();
        Candidate { job: job.id, cause, queue, gpus: holder.gpus, price: price(pass, job), slots }
    }

    /// A job that this pass started, and has not told anybody.
    fn started(pass: &Pass<'_>, ask: &Ask<'_>, id: JobId, started: &Started) -> Candidate {
        let placement = pass.out.decisions.iter().find_map(|d| match d {
            Decision::Start { job, placement } if *job == id => Some(placement),
            _ => None,
        });
        let slots = placement.into_iter().flat_map(|p| &p.0).filter_map(|(n, slots)| {
            let node = *pass.grid.index.get(n)?;
            Some((node, claims::given(pass, ask, node, *slots)))
        });
        let slots = slots.filter(|(_, slots)| !slots.is_empty()).collect();
        let cause = EvictionCause::Reclaim;
        Candidate { job: id, cause, queue: started.queue, gpus: started.gpus, price: 1, slots }
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

/// Who leaves for a job, what that costs, and the place that they make.
struct Found {
    segment: usize,
    price: u64,
    victims: Vec<Candidate>,
    placement: Placement,
}

/// Promises the job GPUs that others give up for it, if it has a right to any that help.
/// Tells where, and whether it must wait for them.
pub(super) fn claim(pass: &mut Pass<'_>, ask: &Ask<'_>) -> Option<(usize, Placement, bool)> {
    if !pass.snapshot.policy.preemption {
        return None;
    }
    let by_right = may_take(pass, ask.queue, ask.class_id);
    if !by_right && ask.sharing.is_none() {
        return None;
    }
    let Found { segment, placement, victims, .. } = find(pass, ask, by_right)?;
    let (undone, victims): (Vec<Candidate>, Vec<Candidate>) =
        victims.into_iter().partition(|v| pass.started.contains_key(&v.job));
    undone.iter().for_each(|v| claims::undo(pass, v.job));
    let held = |(n, slots): &(_, Slots)| pass.snapshot.nodes.get(n).is_none_or(|n| !n.held.and(*slots).is_empty());
    let t = pass.grid.segments[segment].gpu_type;
    let gpus = placement.gpus().count();
    let at_once = victims.is_empty() && !placement.0.iter().any(held);
    if at_once && pass.quotas.short(ask.queue, t, gpus, ask.class.preemptible).is_none() {
        return Some((segment, placement, false));
    }
    let cause = victims.iter().map(|v| v.cause).min().unwrap_or(EvictionCause::Reclaim);
    let attempt = |id: &JobId| pass.snapshot.jobs.get(id).map_or(0, |j| j.attempts);
    let named = victims.iter().map(|v| (v.job, attempt(&v.job))).collect();
    let claim = Claim { placement: placement.clone(), victims: named, cause, since: pass.now };
    pass.out.decisions.push(Decision::Claim { job: ask.id, claim });
    pass.take(segment, &placement, ask.queue, ask.class.preemptible);
    for (id, slots) in &placement.0 {
        if let Some(i) = pass.grid.index.get(id) {
            pass.claimed[*i] = pass.claimed[*i].or(*slots);
        }
    }
    let snapshot = pass.snapshot;
    for victim in victims {
        if let Some(job) = snapshot.jobs.get(&victim.job) {
            claims::evict(pass, job, victim.cause, Some(ask.job));
        }
    }
    Some((segment, placement, true))
}

/// The cheapest of the segments that the job likes equally well, in the order of its preferences: by right, if it
/// has any, or as its turn.
fn find(pass: &mut Pass<'_>, ask: &Ask<'_>, by_right: bool) -> Option<Found> {
    let segments = pass.segments(ask).to_vec();
    // Cheaper than to look at everybody who might be asked.
    let searches = by_right && !segments.iter().any(|s| enough_leaves(pass, ask, *s));
    let types: Vec<usize> = segments.iter().map(|s| pass.grid.segments[*s].gpu_type).collect();
    let mut from = 0;
    while from < segments.len() {
        let alike = |t: &&usize| ask.class.gpu_types.is_empty() || **t == types[from];
        let to = from + types[from..].iter().take_while(alike).count();
        let mut best: Option<Found> = None;
        for s in &segments[from..to] {
            if searches
                && let Some(found) = search(pass, ask, *s)
                && best.as_ref().is_none_or(|b| found.price < b.price)
            {
                best = Some(found);
            }
        }
        for s in &segments[from..to] {
            best = best.or_else(|| take_turn(pass, ask, *s));
        }
        if best.is_some() {
            return best;
        }
        from = to;
    }
    None
}

/// Whether enough is being given back already: then nobody else needs to leave, also not on another segment.
fn enough_leaves(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize) -> bool {
    let s = &pass.grid.segments[segment];
    let (gpus, preemptible) = (ask.class.gpus(), ask.class.preemptible);
    let short = pass.quotas.short_after(ask.queue, s.gpu_type, gpus, preemptible, &BTreeMap::new());
    short.is_none()
        && pass.wanted(ask, segment, false).is_some_and(|wanted| {
            let soon = claims::free_soon(pass, ask, segment, true);
            place::room(pass.grid, s, &soon, wanted.gpus_per_node, wanted.within) >= wanted.nodes.0
        })
}

/// Whether a class of a queue has any right at all to look for victims by, where it does not take turns.
pub(super) fn may_take(pass: &mut Pass<'_>, queue: usize, class: usize) -> bool {
    rights(pass);
    let Some(rights) = &pass.rights else { return false };
    let Class { priority, .. } = pass.index.classes[class];
    let gpus = pass.index.classes[class].gpus();
    rights.of_queue.get(&queue).is_some_and(|(lowest, _)| *lowest < priority)
        || !rights.borrowed.levels.is_empty()
            && pass.segments[class].iter().any(|s| by_guarantee(pass, queue, gpus, *s))
}

/// Whether the queue, or one above it, would be within its guarantee with so many GPUs more.
fn by_guarantee(pass: &Pass<'_>, queue: usize, gpus: u32, segment: usize) -> bool {
    let t = pass.grid.segments[segment].gpu_type;
    let within = |q: &usize| pass.quotas.staying(*q, t).saturating_add(gpus) <= pass.quotas.guarantee(*q, t);
    pass.quotas.managed[t] && pass.quotas.branches[queue].path.iter().any(within)
}

/// By what right a job may take the GPUs of another, which is of the given queue.
fn right(pass: &Pass<'_>, rights: &Rights, ask: &Ask<'_>, id: JobId, queue: usize, t: usize) -> Option<EvictionCause> {
    let level = pass.quotas.takes_back(ask.queue, queue, t, ask.class.gpus());
    if level.is_some_and(|level| rights.borrows(id, level)) {
        return Some(EvictionCause::Reclaim);
    }
    let job = pass.snapshot.jobs.get(&id).filter(|_| !pass.started.contains_key(&id))?;
    let lower = queue == ask.queue && job.request.priority < ask.class.priority;
    (lower && may_leave_at(pass, job) <= pass.now).then_some(EvictionCause::Priority)
}

/// When a job has had its minimum run.
fn may_leave_at(pass: &Pass<'_>, job: &Job) -> Time {
    pass.now + pass.snapshot.policy.minimum_run - held_for(job, pass.now)
}

fn candidates(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize) -> Vec<Candidate> {
    let t = pass.grid.segments[segment].gpu_type;
    let mut found = Vec::new();
    rights(pass);
    let Some(rights) = &pass.rights else { return found };
    let mut worth: BTreeSet<JobId> = BTreeSet::new();
    if let Some((_, list)) = rights.of_queue.get(&ask.queue).filter(|(lowest, _)| *lowest < ask.class.priority) {
        worth.extend(list);
    }
    if by_guarantee(pass, ask.queue, ask.class.gpus(), segment) {
        worth.extend(rights.borrowed.levels.iter().filter(|(_, (of, _))| *of == t).map(|(id, _)| id));
    }
    let mut later: Option<Time> = None;
    for id in worth {
        if let Some(started) = pass.started.get(&id).filter(|s| s.segment == segment && s.preemptible) {
            if right(pass, rights, ask, id, started.queue, t).is_some() {
                found.push(Candidate::started(pass, ask, id, started));
            }
            continue;
        }
        let Some(holder) = pass.index.holders.get(&id).filter(|h| h.segment == segment && h.preemptible) else {
            continue;
        };
        let Some(job) = pass.snapshot.jobs.get(&id) else { continue };
        let queue = pass.branch[holder.queue as usize];
        match right(pass, rights, ask, id, queue, t) {
            Some(cause) => found.push(Candidate::new(pass, ask, job, holder, queue, cause)),
            None if queue == ask.queue && holder.priority < ask.class.priority => {
                let at = may_leave_at(pass, job);
                later = Some(later.map_or(at, |l| l.min(at)));
            }
            None => {}
        }
    }
    if let Some(at) = later {
        pass.wake(at);
    }
    found.sort_by_key(|c| (c.price, Reverse(c.job)));
    found
}

/// The cheapest victims that were found and the place that they make.
fn search(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize) -> Option<Found> {
    let t = pass.grid.segments[segment].gpu_type;
    let short = pass.quotas.short_after(ask.queue, t, ask.class.gpus(), ask.class.preemptible, &BTreeMap::new());
    if matches!(short, Some(Short::Guarantee { .. })) {
        return None;
    }
    let promised = pass.promised_beside(ask, t);
    if !promised.is_empty()
        && pass.quotas.short_beside(ask.queue, t, ask.class.gpus(), ask.class.preemptible, &promised).is_some()
        && pass.quotas.short(ask.queue, t, ask.class.gpus(), ask.class.preemptible).is_none()
    {
        return None;
    }
    let wanted = pass.wanted(ask, segment, false)?;
    let all = candidates(pass, ask, segment);
    if all.is_empty() {
        return None;
    }
    let pass = &*pass;
    let base = claims::free_soon(pass, ask, segment, false);
    let s = &pass.grid.segments[segment];
    let room = |view: &View| place::room(pass.grid, s, view, wanted.gpus_per_node, wanted.within);
    let mut everything = base.clone();
    add(pass, &mut everything, all.iter());
    if room(&everything) < wanted.nodes.0 {
        return None;
    }
    // What a queue does not lend it keeps also of what its own jobs give.
    let quota = short.is_some() || !pass.quotas.all_lend();
    let mut best: Option<(u64, BTreeSet<usize>)> = None;
    for domain in &s.domains[wanted.within.min(s.top())] {
        if everything.fits(pass.grid, domain.id, wanted.gpus_per_node) < wanted.nodes.0 {
            continue;
        }
        let task = Task::new(pass, ask, t, &wanted, &base, domain.nodes.clone(), &all, quota);
        if let Some((price, set)) = task.solve()
            && best.as_ref().is_none_or(|(p, _)| price < *p)
        {
            best = Some((price, set));
        }
    }
    let (price, set) = best?;
    let victims: Vec<Candidate> =
        all.into_iter().enumerate().filter(|(i, _)| set.contains(i)).map(|(_, c)| c).collect();
    let placement = place_after(pass, ask, segment, &victims)?;
    // Nobody leaves only because the job would rather be somewhere else: then it waits for that.
    let anywhere = pass.wanted(&Ask { insists: false, ..*ask }, segment, false)?;
    let superfluous = |victim: &Candidate| {
        let others = || victims.iter().filter(|v| v.job != victim.job);
        let mut without = base.clone();
        add(pass, &mut without, others());
        let given = given(pass, others());
        place::room(pass.grid, s, &without, anywhere.gpus_per_node, anywhere.within) >= anywhere.nodes.0
            && pass.quotas.short_after(ask.queue, t, ask.class.gpus(), ask.class.preemptible, &given).is_none()
    };
    if ask.insists && victims.iter().any(superfluous) {
        return None;
    }
    Some(Found { segment, price, victims, placement })
}

/// The job's turn, if it is.
fn take_turn(pass: &mut Pass<'_>, ask: &Ask<'_>, segment: usize) -> Option<Found> {
    let victims = turns::displace(pass, ask, segment)?;
    let placement = place_after(pass, ask, segment, &victims)?;
    let price = victims.iter().map(|v| v.price).fold(0, u64::saturating_add);
    Some(Found { segment, price, victims, placement })
}

/// The place of the gang once the victims are gone.
fn place_after(pass: &Pass<'_>, ask: &Ask<'_>, segment: usize, victims: &[Candidate]) -> Option<Placement> {
    let wanted = pass.wanted(ask, segment, false)?;
    let mut after = claims::free_soon(pass, ask, segment, false);
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

/// GPUs that they give, by queue.
pub(super) fn given<'c>(pass: &Pass<'_>, candidates: impl Iterator<Item = &'c Candidate>) -> BTreeMap<usize, u32> {
    let mut given = BTreeMap::new();
    for candidate in candidates {
        pass.quotas.add(&mut given, candidate.queue, candidate.gpus);
    }
    given
}
