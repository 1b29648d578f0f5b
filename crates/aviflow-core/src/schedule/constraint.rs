//! What keeps each waiting job, found at the end of the pass: the numbers are
//! those of the plan as it stands.

use super::grid::{Segment, View};
use super::memo::Class;
use super::pass::{Ask, Pass, environment_ready, held_queue, within};
use super::quota::Short;
use super::reserve::Promise;
use super::{Constraint, place};
use crate::explain::NodeNames as _;
use crate::gpus::Slots;
use crate::model::{EvictionCause, Job, JobId, NODE_LEVEL, NodeCondition, Request, Snapshot};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// What keeps the job whatever is free.
pub(super) fn gate(pass: &mut Pass<'_>, ask: &Ask<'_>) -> Option<Constraint> {
    if let Some(until) = ask.job.not_before.filter(|t| *t > pass.now) {
        pass.wake(until);
    }
    gate_of(pass, ask)
}

fn gate_of(pass: &Pass<'_>, ask: &Ask<'_>) -> Option<Constraint> {
    let job = ask.job;
    if let Some(by) = &job.held {
        return Some(Constraint::Held { by: by.clone() });
    }
    let open = |met: Option<bool>| job.after.iter().find(|d| d.met == met).cloned();
    if let Some(d) = open(Some(false)).or_else(|| open(None)) {
        return Some(Constraint::After { job: d.job, name: d.name, on: d.on, impossible: d.met.is_some() });
    }
    if !environment_ready(pass.snapshot, job) {
        return job.environment.clone().map(|hash| Constraint::Environment { hash });
    }
    let until = job.not_before.filter(|t| *t > pass.now)?;
    let (node, refused) = job.refused.as_ref().map(|r| (pass.snapshot.node_name(r.node), r.reason.clone())).unzip();
    Some(Constraint::BackOff { until, node, refused })
}

/// Fills in the constraint of each waiting job; jobs of one class share theirs.
pub(super) fn explain(pass: &mut Pass<'_>) {
    let mut known: BTreeMap<Constraint, usize> = BTreeMap::new();
    // By class: whether it insists, the promises before its end, the constraint.
    let mut of_class: Vec<Vec<(bool, usize, usize)>> = vec![Vec::new(); pass.index.classes.len()];
    let mut waiting = std::mem::take(&mut pass.out.waiting);
    let paused = pass.snapshot.paused.is_some();
    for (entry, waiter) in waiting.iter_mut().zip(std::mem::take(&mut pass.waiters)) {
        let special = paused || waiter.gated || waiter.claims || pass.promised.contains(&entry.job);
        if special
            && let Some(ask) = pass.ask(entry.job, waiter)
            && let Some(own) = own(pass, &ask)
        {
            entry.constraint = intern(pass, &mut known, own);
            continue;
        }
        let before = pass.promises.partition_point(|p| p.start < pass.end(waiter));
        let insists = pass.insists(waiter);
        let known_of = &of_class[waiter.class as usize];
        if let Some((.., index)) = known_of.iter().find(|(i, b, _)| (*i, *b) == (insists, before)) {
            entry.constraint = *index;
            continue;
        }
        let Some(ask) = pass.ask(entry.job, waiter) else { continue };
        let constraint = of(pass, &ask);
        entry.constraint = intern(pass, &mut known, constraint);
        of_class[waiter.class as usize].push((insists, before, entry.constraint));
    }
    pass.out.waiting = waiting;
}

fn intern(pass: &mut Pass<'_>, known: &mut BTreeMap<Constraint, usize>, constraint: Constraint) -> usize {
    if let Some(index) = known.get(&constraint) {
        return *index;
    }
    let index = pass.out.constraints.len();
    pass.out.constraints.push(constraint.clone());
    known.insert(constraint, index);
    index
}

/// What keeps this job and not all of its class.
fn own(pass: &Pass<'_>, ask: &Ask<'_>) -> Option<Constraint> {
    if let Some(by) = &pass.snapshot.paused {
        return Some(Constraint::Paused { by: by.clone() });
    }
    if pass.promised.contains(&ask.id) {
        return Some(claimed(pass, ask.id, ask.job));
    }
    if let Some(gate) = gate_of(pass, ask) {
        return Some(gate);
    }
    let claims = ask.job.claim.is_some() && !pass.dropped.contains(&ask.id);
    claims.then(|| claimed(pass, ask.id, ask.job))
}

fn claimed(pass: &Pass<'_>, id: JobId, job: &Job) -> Constraint {
    let now = pass.out.decisions.iter().find_map(|d| match d {
        super::Decision::Claim { job, claim } if *job == id => Some(claim),
        super::Decision::Claim { .. }
        | super::Decision::Start { .. }
        | super::Decision::Unclaim { .. }
        | super::Decision::Evict { .. }
        | super::Decision::Spare { .. }
        | super::Decision::Suspend { .. }
        | super::Decision::Window { .. }
        | super::Decision::Take { .. } => None,
    });
    let claim = now.or(job.claim.as_ref());
    let victims = claim.map_or(&[][..], |c| &c.victims).iter().map(|(id, _)| *id).collect();
    Constraint::Claimed { victims, cause: claim.map_or(EvictionCause::Turn, |c| c.cause) }
}

fn of(pass: &mut Pass<'_>, ask: &Ask<'_>) -> Constraint {
    let class = ask.class;
    if let Some(queue) = held_queue(pass, ask.queue) {
        let gone = !pass.snapshot.queues.contains_key(&queue) && !pass.snapshot.queues.is_empty();
        return if gone { Constraint::QueueGone { queue } } else { Constraint::QueueHeld { queue } };
    }
    if !could_fit(pass, ask)
        && let Some(never) = never_fits(pass.snapshot, &class_request(class))
    {
        return never;
    }
    let mut short = None;
    for s in pass.segments(ask).iter().copied() {
        let t = pass.grid.segments[s].gpu_type;
        match pass.quotas.short(ask.queue, t, class.gpus(), class.preemptible) {
            Some(why) => short = short.or(Some((why, t))),
            None => return capacity(pass, ask),
        }
    }
    let Some((why, t)) = short else { return capacity(pass, ask) };
    let (gpu_type, needs) = (pass.grid.types[t].clone(), class.gpus());
    let name = |q: usize| pass.quotas.branches[q].name.clone();
    match why {
        Short::Limit { queue, limit, used } => {
            Constraint::QueueLimit { queue: name(queue), gpu_type, limit, used, needs }
        }
        Short::Guarantee { queue, guarantee, used } => {
            Constraint::QueueGuarantee { queue: name(queue), gpu_type, guarantee, used, needs }
        }
        Short::Kept { free, kept } => Constraint::Kept { gpu_type, free, kept, needs },
    }
}

/// Whether the pool, empty, could hold the gang, by counts alone.
fn could_fit(pass: &mut Pass<'_>, ask: &Ask<'_>) -> bool {
    if pass.whole.is_none() {
        let healthy = |id| {
            let there = pass.snapshot.nodes.get(id).filter(|n| n.condition != NodeCondition::Gone);
            there.map_or(Slots::NONE, |n| n.gpus.without(n.broken()))
        };
        pass.whole = Some(View::new(pass.grid, pass.grid.ids.iter().map(healthy).collect()));
    }
    let Some(whole) = &pass.whole else { return false };
    pass.segments(ask).iter().any(|s| {
        let segment = &pass.grid.segments[*s];
        within(segment, ask.class, false).is_some_and(|level| {
            let room = place::room(pass.grid, segment, whole, ask.class.gpus_per_node, level);
            room >= ask.class.nodes.min && (level > 0 || ask.class.topology.require.as_deref() != Some(NODE_LEVEL))
        })
    })
}

/// Too few nodes have room, or those that have are promised to others, or not where the gang wants to be.
fn capacity(pass: &mut Pass<'_>, ask: &Ask<'_>) -> Constraint {
    let class = ask.class;
    let view = &pass.views[0];
    let gpus = class.gpus_per_node;
    let mut best: Option<(u32, u32, u32, usize)> = None;
    for s in pass.segments(ask).iter().copied() {
        let segment = &pass.grid.segments[s];
        let quota = pass.quotas.short(ask.queue, segment.gpu_type, class.gpus(), class.preemptible).is_some();
        let Some(level) = within(segment, class, ask.insists).filter(|_| !quota) else { continue };
        let room = place::room(pass.grid, segment, view, gpus, level);
        if room >= class.nodes.min
            && let Some(p) = promised(pass, ask, s, level)
        {
            let name = |id: JobId| pass.snapshot.jobs.get(&id).map(|j| j.key.name.clone());
            let job = p.owner.as_ref().and_then(|o| name(o.job));
            return Constraint::Promised { job, start: p.start };
        }
        let anywhere = within(segment, class, false).map_or(0, |l| place::room(pass.grid, segment, view, gpus, l));
        if ask.insists
            && room < class.nodes.min
            && anywhere >= class.nodes.min
            && let (Some(level), Some(wait)) = (&class.topology.prefer, class.topology.max_wait)
        {
            let until = ask.job.submitted + wait;
            return Constraint::Preference { level: level.clone(), needs_nodes: class.nodes.min, best: room, until };
        }
        // Where there is too little anyhow, it is not what it would rather have that keeps it.
        let room = anywhere;
        let whole = &segment.domains[segment.top()][0];
        let (free, most) = view.free_in(pass.grid, whole.id);
        // The type that comes nearest is the one to name.
        if best.is_none_or(|b| (room, free, most) > (b.0, b.1, b.2)) {
            best = Some((room, free, most, s));
        }
    }
    let (room, free, most, _) = best.unwrap_or_default();
    let (foreign, closed) = taken_otherwise(pass, ask);
    Constraint::Capacity {
        needs_nodes: class.nodes.min,
        gpus_per_node: gpus,
        gpu_types: class.gpu_types.clone(),
        nodes_with_room: room,
        free_gpus: free,
        most_free_on_a_node: most,
        foreign_gpus: foreign,
        closed_nodes: closed,
        level: class.topology.require.clone().filter(|l| l != NODE_LEVEL),
    }
}

/// GPUs of the types that a job may have which others use, and nodes of them that are there and take no new work.
fn taken_otherwise(pass: &mut Pass<'_>, ask: &Ask<'_>) -> (u32, u32) {
    let of_segments = pass.otherwise.take().unwrap_or_else(|| {
        let count = |segment: &Segment| {
            let nodes = pass.grid.ids[segment.nodes.clone()].iter().filter_map(|id| pass.snapshot.nodes.get(id));
            let there = nodes.filter(|n| n.condition != NodeCondition::Gone);
            there.fold((0, 0), |(foreign, closed), node| {
                (foreign + node.foreign.count(), closed + u32::from(pass.takes_none(node)))
            })
        };
        pass.grid.segments.iter().map(count).collect()
    });
    let all = pass.segments(ask).iter().fold((0, 0), |all, s| (all.0 + of_segments[*s].0, all.1 + of_segments[*s].1));
    pass.otherwise = Some(of_segments);
    all
}

/// The first promise that leaves the job no room, or no quota. If it ended before, it could start.
fn promised<'p>(pass: &'p Pass<'_>, ask: &Ask<'_>, segment: usize, level: usize) -> Option<&'p Promise> {
    let (class, s) = (ask.class, &pass.grid.segments[segment]);
    let before = pass.promises.partition_point(|p| p.start < ask.end);
    let mut beside: BTreeMap<usize, u32> = BTreeMap::new();
    // What is kept for the job itself is there for it.
    let mut own: Vec<(usize, Slots)> = Vec::new();
    for (i, promise) in pass.promises[..before].iter().enumerate() {
        if promise.owner.as_ref().is_some_and(|o| o.job == ask.id) {
            own.clone_from(&promise.slots);
            continue;
        }
        for (node, slots) in &promise.slots {
            own.iter_mut().filter(|(n, _)| n == node).for_each(|(_, own)| *own = own.without(*slots));
        }
        let owner = promise.owner.as_ref().filter(|o| o.gpu_type == s.gpu_type && !promise.yields_to(pass, ask));
        if let Some(owner) = owner {
            pass.quotas.add(&mut beside, owner.queue, owner.gpus);
        }
        let quota = pass.quotas.short_beside(ask.queue, s.gpu_type, class.gpus(), class.preemptible, &beside);
        let mut view = Cow::Borrowed(&pass.views[i + 1]);
        for (node, slots) in &own {
            let free = view.free[*node].or(*slots);
            view.to_mut().set(pass.grid, *node, free);
        }
        let room = place::room(pass.grid, s, &view, class.gpus_per_node, level);
        if quota.is_some() || promise.segment == segment && room < class.nodes.min {
            return Some(promise);
        }
    }
    None
}

fn class_request(class: &Class) -> Request {
    Request {
        nodes: class.nodes,
        gpu_types: class.gpu_types.clone(),
        topology: class.topology.clone(),
        ..Request::of(class.nodes.min, class.gpus_per_node)
    }
}

/// Whether the pool, empty, could hold the request; `None` if it could, else the constraint that says why not.
#[must_use]
pub fn never_fits(snapshot: &Snapshot, request: &Request) -> Option<Constraint> {
    // For each pool and type the nodes that are large enough, by the domain that must hold the gang.
    let mut capable: BTreeMap<(&str, &str, Vec<String>), u32> = BTreeMap::new();
    let require = request.topology.require.as_deref();
    for node in snapshot.nodes.values().filter(|n| n.condition != NodeCondition::Gone) {
        if !request.gpu_types.is_empty() && !request.gpu_types.contains(&node.gpu_type) {
            continue;
        }
        if node.gpus.without(node.broken()).count() < request.gpus_per_node {
            continue;
        }
        let domain = match require {
            None => Vec::new(),
            Some(NODE_LEVEL) => vec![node.name.clone()],
            Some(name) => {
                let levels = snapshot.pools.get(&node.pool).map_or(&[][..], |p| &p.levels);
                let Some(level) = levels.iter().position(|l| l == name) else { continue };
                node.path.get(level..).map(<[String]>::to_vec).unwrap_or_default()
            }
        };
        *capable.entry((&node.pool, &node.gpu_type, domain)).or_default() += 1;
    }
    let most = capable.into_values().max().unwrap_or(0);
    (most < request.nodes.min).then(|| Constraint::Never {
        needs_nodes: request.nodes.min,
        gpus_per_node: request.gpus_per_node,
        gpu_types: request.gpu_types.clone(),
        capable_nodes: most,
        level: request.topology.require.clone(),
    })
}
