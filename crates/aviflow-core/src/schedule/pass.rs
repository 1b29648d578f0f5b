//! One pass: the state it works on, and the walk over the waiting jobs in their order.

use super::grid::{Grid, View};
use super::memo::{Class, Index, Memo, Waiter};
use super::order::Walk;
use super::place::{self, Wanted};
use super::preempt::Rights;
use super::quota::Quotas;
use super::reserve::Promise;
use super::{Decision, Plan, Waiting, claims, constraint, drains, preempt, reserve, turns};
use crate::gpus::Slots;
use crate::model::{
    EnvironmentState, Job, JobId, NODE_LEVEL, Node, NodeCondition, NodeId, Phase, Placement, QueueState, Snapshot,
    TimeSharing,
};
use crate::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// What the pass knows and has decided so far.
pub(super) struct Pass<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Time,
    pub(super) grid: &'a Grid,
    pub(super) index: &'a Index,
    pub(super) quotas: Quotas,
    /// The branch of each interned queue.
    pub(super) branch: Vec<usize>,
    /// What is free for a job that ends after the promise before it begins; the first is all that is free.
    /// One more than `promises`, which are in the order of their beginnings.
    pub(super) views: Vec<View>,
    pub(super) promises: Vec<Promise>,
    /// How the jobs of each branch take turns, as far as it or one above it says so.
    share_of_branch: Vec<Option<TimeSharing>>,
    /// How the pool of each segment says so.
    share_of_segment: Vec<Option<TimeSharing>>,
    /// The segments of each class, in the order of its preferences.
    pub(super) segments: Vec<Vec<usize>>,
    /// All healthy GPUs of nodes that are there, as if nobody held any.
    pub(super) whole: Option<View>,
    /// By class: the shortest that found no place, with what is preferred and without.
    blocked: Vec<[Option<Time>; 2]>,
    /// By class: whether nothing is promised to its jobs any more.
    reserved: Vec<bool>,
    /// Shapes for which the free GPUs have no room: where they may have what they prefer, and where not.
    pub(super) full: Vec<[bool; 2]>,
    /// Jobs that leave or are told to, with when their GPUs are expected back.
    pub(super) leaving: BTreeMap<JobId, Time>,
    /// GPUs promised by claims, by node.
    pub(super) claimed: Vec<Slots>,
    /// Jobs that leave for certain, by a decision of this pass.
    pub(super) suspended: BTreeSet<JobId>,
    /// Jobs that this pass starts.
    pub(super) started: BTreeMap<JobId, Started>,
    /// Whether a start was taken back.
    pub(super) undone: bool,
    /// Claimers whose claims this pass takes back.
    pub(super) dropped: BTreeSet<JobId>,
    /// Jobs that this pass promises GPUs.
    pub(super) promised: BTreeSet<JobId>,
    /// Nodes that this pass gives to a rolling drain, and until when.
    pub(super) taken: BTreeMap<NodeId, Option<Time>>,
    /// Whether a job waits for its turn, and when the first of them gets a lower level.
    pub(super) turn: Option<Time>,
    /// The job for which what is free is kept until others have had their shortest turns.
    pub(super) held: Option<JobId>,
    /// GPUs that this pass gave to the users of a queue, by the queue's and the user's index.
    pub(super) charged: BTreeMap<(usize, u32), u32>,
    /// What the holders are to each other, computed when first asked for.
    pub(super) rights: Option<Rights>,
    /// When each GPU of each node will be free, computed when first asked for.
    pub(super) ends: Option<Vec<Time>>,
    /// Of each segment GPUs that others use, and nodes that take no work, counted at the end of the pass.
    pub(super) otherwise: Option<Vec<(u32, u32)>>,
    pub(super) out: Plan,
    /// What is known of each of the waiting in the plan.
    pub(super) waiters: Vec<&'a Waiter>,
}

/// A job that the pass starts.
#[derive(Clone, Copy)]
pub(super) struct Started {
    pub(super) segment: usize,
    pub(super) queue: usize,
    pub(super) gpus: u32,
    pub(super) preemptible: bool,
    /// The queue and the user, as the index knows them.
    pub(super) user: (usize, u32),
}

/// What a job wants, in the terms of the pass.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub(super) id: JobId,
    pub(super) job: &'a Job,
    pub(super) class: &'a Class,
    pub(super) class_id: usize,
    pub(super) queue: usize,
    /// When it ends at the latest if it starts now.
    pub(super) end: Time,
    /// Whether it still insists on what it prefers.
    pub(super) insists: bool,
    pub(super) sharing: Option<TimeSharing>,
}

/// Rounds of a pass at most. Far more than are ever needed.
const ROUNDS: usize = 1000;

/// Whether a node takes no new work.
fn takes_none(node: &Node, now: Time) -> bool {
    let drained = node.drain.as_ref().is_some_and(|d| d.covers(now));
    match node.condition {
        NodeCondition::Gone => true,
        NodeCondition::Cordoned => node.shut() || node.drain.is_none() || drained,
        NodeCondition::Ready => drained,
    }
}

/// GPUs of a node that gangs may have now or later.
fn usable(node: &Node, now: Time) -> Slots {
    if takes_none(node, now) { Slots::NONE } else { node.workable() }
}

/// The quota tree with what is charged to it, and the branch of each interned queue.
fn charged(snapshot: &Snapshot, memo: &Memo, now: Time, usable: &dyn Fn(&Node) -> Slots) -> (Quotas, Vec<usize>) {
    let mut quotas = Quotas::new(snapshot, &memo.grid, now, usable);
    let branch = quotas.all_of(snapshot, &memo.grid, &memo.index.queues);
    for holder in memo.index.holders.values() {
        quotas.charge(branch[holder.queue as usize], holder.gpu_type, holder.gpus, holder.preemptible, true);
    }
    (quotas, branch)
}

impl<'a> Pass<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, memo: &'a Memo, now: Time) -> Pass<'a> {
        let (grid, index) = (&memo.grid, &memo.index);
        let mut free = vec![Slots::NONE; grid.ids.len()];
        for (id, node) in &snapshot.nodes {
            if let Some(i) = grid.index.get(id) {
                free[*i] = usable(node, now).without(node.held).without(node.claimed);
            }
        }
        let claimed = grid.ids.iter().map(|id| snapshot.nodes.get(id).map_or(Slots::NONE, |n| n.claimed)).collect();
        let (quotas, branch) = charged(snapshot, memo, now, &|node| usable(node, now));
        let share_of = |b: &usize| snapshot.queues.get(&quotas.branches[*b].name)?.time_sharing;
        let share_of_branch = quotas.branches.iter().map(|b| b.path.iter().rev().find_map(share_of)).collect();
        let share_of_segment = grid.segments.iter().map(|s| snapshot.pools.get(&s.pool)?.time_sharing).collect();
        Pass {
            share_of_branch,
            share_of_segment,
            segments: index.classes.iter().map(|c| grid.candidates(&c.gpu_types)).collect(),
            whole: None,
            snapshot,
            now,
            grid,
            index,
            quotas,
            branch,
            views: vec![View::new(grid, free)],
            promises: Vec::new(),
            blocked: vec![[None; 2]; index.classes.len()],
            reserved: vec![false; index.classes.len()],
            full: vec![[false; 2]; index.shapes.len()],
            leaving: BTreeMap::new(),
            claimed,
            suspended: BTreeSet::new(),
            started: BTreeMap::new(),
            undone: false,
            dropped: BTreeSet::new(),
            taken: BTreeMap::new(),
            promised: BTreeSet::new(),
            turn: None,
            held: None,
            charged: BTreeMap::new(),
            rights: None,
            ends: None,
            otherwise: None,
            out: Plan::default(),
            waiters: Vec::new(),
        }
    }

    /// Charges what is promised, for those who only look.
    pub(super) fn charge_claims(&mut self) {
        for id in &self.index.claimers {
            let (Some(job), Some(waiter)) = (self.snapshot.jobs.get(id), self.index.waiter(*id)) else { continue };
            let Some(claim) = &job.claim else { continue };
            let first = claim.placement.0.first().and_then(|(n, _)| self.grid.index.get(n));
            let Some(segment) = first.map(|n| self.grid.segment_of[*n]) else { continue };
            let (queue, t) = (self.branch[waiter.queue as usize], self.grid.segments[segment].gpu_type);
            self.quotas.charge(queue, t, claim.placement.gpus().count(), job.request.preemptible, true);
        }
    }

    /// GPUs of a node that gangs may have now or later.
    pub(super) fn usable(&self, node: &Node) -> Slots {
        if self.takes_none(node) { Slots::NONE } else { node.workable() }
    }

    /// Whether a node takes no new work.
    pub(super) fn takes_none(&self, node: &Node) -> bool {
        self.taken.contains_key(&node.id) || takes_none(node, self.now)
    }

    /// From when on a node is to be empty, if it is.
    pub(super) fn drained_from(&self, node: &Node) -> Option<Time> {
        self.drain(node).map(|(from, _)| from)
    }

    /// The beginning and the end of a node's drain, if it is to be empty, which may be never.
    pub(super) fn drain(&self, node: &Node) -> Option<(Time, Time)> {
        let never = Time(i64::MAX);
        if let Some(until) = self.taken.get(&node.id) {
            return Some((self.now, until.unwrap_or(never)));
        }
        let drain = node.drain.as_ref().filter(|d| !d.over(self.now)).map(|d| (d.from, d.until.unwrap_or(never)));
        // Nobody knows when others are done.
        let vacated = node.vacate.map(|since| (since, never));
        drain.into_iter().chain(vacated).min_by_key(|(from, _)| *from)
    }

    pub(super) fn wake(&mut self, at: Time) {
        if at > self.now {
            self.out.next_wake = Some(self.out.next_wake.map_or(at, |w| w.min(at)));
        }
    }

    pub(super) fn ask(&self, id: JobId, waiter: &Waiter) -> Option<Ask<'a>> {
        let job = self.snapshot.jobs.get(&id)?;
        let class = &self.index.classes[waiter.class as usize];
        let queue = self.branch[class.queue as usize];
        let sharing = if class.preemptible { self.sharing(queue, &self.segments[waiter.class as usize]) } else { None };
        let (end, insists) = (self.end(waiter), self.insists(waiter));
        Some(Ask { id, job, class, class_id: waiter.class as usize, queue, end, insists, sharing })
    }

    /// When a job ends at the latest if it starts now.
    pub(super) fn end(&self, waiter: &Waiter) -> Time {
        waiter.left.map_or(Time(i64::MAX), |left| self.now + left)
    }

    /// Whether a job still insists on what it prefers.
    pub(super) fn insists(&self, waiter: &Waiter) -> bool {
        let topology = &self.index.classes[waiter.class as usize].topology;
        topology.prefer.is_some() && topology.max_wait.is_some_and(|wait| self.now < waiter.submitted + wait)
    }

    /// The segments that a job may use, in the order of its preferences.
    pub(super) fn segments(&self, ask: &Ask<'_>) -> &[usize] {
        &self.segments[ask.class_id]
    }

    /// Whether jobs of a queue take turns, by its own word, that of a queue above, or the pool's.
    pub(super) fn sharing(&self, queue: usize, segments: &[usize]) -> Option<TimeSharing> {
        let of_pool = || segments.iter().find_map(|s| self.share_of_segment[*s]);
        let sharing = self.share_of_branch[queue].or_else(of_pool);
        sharing.filter(|s| s.enabled && self.snapshot.policy.preemption)
    }

    /// Whether any job of a queue takes turns, on any segment.
    pub(super) fn shares(&self, queue: usize) -> Option<TimeSharing> {
        let of_pool = || self.share_of_segment.iter().flatten().next().copied();
        let sharing = self.share_of_branch[queue].or_else(of_pool);
        sharing.filter(|s| s.enabled && self.snapshot.policy.preemption)
    }

    fn walk(&mut self) {
        let mut walk = Walk::new(self);
        while let Some((id, waiter)) = walk.next(self) {
            if self.started.contains_key(&id) {
                continue;
            }
            let claims = waiter.claims && !self.dropped.contains(&id);
            if (claims || self.promised.contains(&id))
                && let Some(ask) = self.ask(id, waiter)
                && let Some(got) = claims::elsewhere(self, &ask, (waiter.queue as usize, waiter.user))
            {
                walk.done(self, got);
                continue;
            }
            if self.snapshot.paused.is_some() || claims || self.promised.contains(&id) {
                self.wait(id, waiter);
                continue;
            }
            let mode = usize::from(self.insists(waiter));
            let class = waiter.class as usize;
            let blocked = |shortest| self.end(waiter) >= shortest;
            let known = self.reserved[class] && self.blocked[class][mode].is_some_and(blocked);
            if known || self.is_hopeless(waiter, mode) {
                self.wait(id, waiter);
                if let Some(until) = waiter.not_before {
                    self.wake(until);
                }
                continue;
            }
            let Some(ask) = self.ask(id, waiter) else { continue };
            let got = self.visit(&ask, waiter);
            walk.done(self, got);
        }
    }

    /// Whether a job finds no place, may take nobody's and is promised none: seen from its shape and its queue,
    /// without a look at the job.
    fn is_hopeless(&mut self, waiter: &Waiter, mode: usize) -> bool {
        let (id, queue) = (waiter.class as usize, self.branch[waiter.queue as usize]);
        if !self.full[self.index.shapes[id] as usize][mode] {
            return false;
        }
        let class = &self.index.classes[id];
        let shares = class.preemptible && self.sharing(queue, &self.segments[id]).is_some();
        if shares || self.segments[id].iter().any(|s| reserve::open(self, *s)) {
            return false;
        }
        !self.snapshot.policy.preemption || !preempt::may_take(self, queue, id)
    }

    /// Notes whether the free GPUs have no room for its shape, whatever is promised to whom.
    fn note_full(&mut self, ask: &Ask<'_>) {
        let full = self.segments(ask).iter().all(|s| {
            let segment = &self.grid.segments[*s];
            let room = |level| place::room(self.grid, segment, &self.views[0], ask.class.gpus_per_node, level);
            within(segment, ask.class, ask.insists).is_none_or(|level| room(level) < ask.class.nodes.min)
        });
        self.full[self.index.shapes[ask.class_id] as usize][usize::from(ask.insists)] = full;
    }

    /// Whether one of its class that is no longer found no place.
    pub(super) fn is_blocked(&self, ask: &Ask<'_>) -> bool {
        self.blocked[ask.class_id][usize::from(ask.insists)].is_some_and(|shortest| ask.end >= shortest)
    }

    /// Notes that it found no place.
    pub(super) fn block(&mut self, ask: &Ask<'_>) {
        self.blocked[ask.class_id][usize::from(ask.insists)] = Some(ask.end);
    }

    /// Forgets what was promised and what found no place.
    pub(super) fn forget(&mut self) {
        self.views.truncate(1);
        self.promises.clear();
        self.blocked.fill([None; 2]);
        self.reserved.fill(false);
        self.full.fill([false; 2]);
        self.ends = None;
    }

    /// What was promised in the last round was promised without knowing what starts beside it: with that known
    /// there may be room for more. Forgets the promises, keeps what was decided.
    fn again(&mut self) {
        self.forget();
        (self.turn, self.held) = (None, None);
        self.out.waiting.clear();
        self.waiters.clear();
        self.out.reservations.clear();
        drains::coming(self);
    }

    fn wait(&mut self, id: JobId, waiter: &'a Waiter) {
        if let Some(wait) = self.index.classes[waiter.class as usize].topology.max_wait {
            // From then on it takes any place.
            self.wake(waiter.submitted + wait);
        }
        self.out.waiting.push(Waiting { job: id, constraint: usize::MAX });
        self.waiters.push(waiter);
    }

    /// Starts the job, or has it wait; tells the GPUs that it got or was promised.
    fn visit(&mut self, ask: &Ask<'a>, waiter: &'a Waiter) -> u32 {
        if waiter.gated && constraint::gate(self, ask).is_some() {
            self.wait(ask.id, waiter);
            return 0;
        }
        if held_queue(self, ask.queue).is_none() {
            let user = (waiter.queue as usize, waiter.user);
            if let Some((segment, placement)) = self.place_free(ask) {
                return self.start(ask, user, segment, placement);
            }
            // Nobody leaves only because the job would rather be somewhere else.
            let anywhere = Ask { insists: false, ..*ask };
            if !(ask.insists && self.place_free(&anywhere).is_some())
                && let Some((segment, placement, claimed)) = preempt::claim(self, ask)
            {
                if !claimed {
                    return self.start(ask, user, segment, placement);
                }
                let gpus = placement.gpus().count();
                *self.charged.entry(user).or_default() += gpus;
                self.promised.insert(ask.id);
                self.wait(ask.id, waiter);
                return gpus;
            }
            self.reserved[ask.class_id] = !reserve::reserve(self, ask);
            turns::note(self, ask);
        } else {
            self.reserved[ask.class_id] = true;
        }
        self.block(ask);
        self.note_full(ask);
        self.wait(ask.id, waiter);
        0
    }

    /// Starts the job. Tells how many GPUs it got.
    pub(super) fn start(&mut self, ask: &Ask<'_>, user: (usize, u32), segment: usize, placement: Placement) -> u32 {
        let gpus = placement.gpus().count();
        let preemptible = ask.class.preemptible;
        self.take(segment, &placement, ask.queue, preemptible);
        self.started.insert(ask.id, Started { segment, queue: ask.queue, gpus, preemptible, user });
        *self.charged.entry(user).or_default() += gpus;
        self.out.decisions.push(Decision::Start { job: ask.id, placement });
        gpus
    }

    /// The first accelerator type in order of preference, and the best place there.
    pub(super) fn place_free(&self, ask: &Ask<'a>) -> Option<(usize, Placement)> {
        self.segments(ask).iter().copied().find_map(|s| {
            let view = self.view_for(ask, s);
            let wanted = self.wanted(ask, s, true)?;
            place::place(self.grid, &self.grid.segments[s], view, &wanted).map(|p| (s, p))
        })
    }

    /// What a job wants of a segment; none if the topology or the quota there cannot give it.
    pub(super) fn wanted(&self, ask: &Ask<'a>, segment: usize, as_many: bool) -> Option<Wanted<'a>> {
        let class = ask.class;
        let s = &self.grid.segments[segment];
        let within = within(s, class, ask.insists)?;
        let on_one = class.topology.require.as_deref() == Some(NODE_LEVEL);
        if on_one && class.nodes.min > 1 {
            return None;
        }
        let promised = if as_many { self.promised_beside(ask, s.gpu_type) } else { BTreeMap::new() };
        let fits = |n: u32| {
            let gpus = n.saturating_mul(class.gpus_per_node);
            self.quotas.short_beside(ask.queue, s.gpu_type, gpus, class.preemptible, &promised).is_none()
        };
        if as_many && !fits(class.nodes.min) {
            return None;
        }
        let mut most = if as_many && !on_one { class.nodes.max } else { class.nodes.min };
        while most > class.nodes.min && !fits(most) {
            most -= 1;
        }
        let nodes = (class.nodes.min, most);
        Some(Wanted {
            nodes,
            gpus_per_node: class.gpus_per_node,
            within,
            last: &ask.job.last_nodes,
            avoid: &ask.job.avoid,
        })
    }

    /// GPUs of a type that others were promised before the job would end, by queue.
    pub(super) fn promised_beside(&self, ask: &Ask<'a>, t: usize) -> BTreeMap<usize, u32> {
        let mut promised = BTreeMap::new();
        for promise in self.promises.iter().filter(|p| p.start < ask.end && !p.yields_to(self, ask)) {
            let Some(owner) = promise.owner.as_ref().filter(|o| o.gpu_type == t) else { continue };
            self.quotas.add(&mut promised, owner.queue, owner.gpus);
        }
        promised
    }

    /// What is free for the job: not what is promised to others before it would end, unless they could take it back.
    pub(super) fn view_for(&self, ask: &Ask<'a>, segment: usize) -> &View {
        let before = self.promises.partition_point(|p| p.start < ask.end);
        let mine = |p: &&Promise| p.segment == segment;
        if self.promises[..before].iter().filter(mine).all(|p| p.yields_to(self, ask)) {
            return &self.views[0];
        }
        &self.views[before]
    }

    pub(super) fn take(&mut self, segment: usize, placement: &Placement, queue: usize, preemptible: bool) {
        for view in &mut self.views {
            view.take(self.grid, placement);
        }
        let t = self.grid.segments[segment].gpu_type;
        self.quotas.charge(queue, t, placement.gpus().count(), preemptible, true);
        // Whoever holds them from now on is not in the lists.
        self.ends = None;
        self.rights = None;
    }
}

/// The index of the largest level of which one domain must hold the gang; none if the pool does not have it.
pub(super) fn within(segment: &super::grid::Segment, class: &Class, insists: bool) -> Option<usize> {
    let level = |name: &String| if name == NODE_LEVEL { Some(0) } else { segment.level(name) };
    let required = match &class.topology.require {
        Some(name) => level(name)?,
        None => segment.top(),
    };
    // A level that the pool does not have cannot be preferred in it.
    let preferred = class.topology.prefer.as_ref().filter(|_| insists).and_then(level);
    Some(preferred.map_or(required, |p| p.min(required)))
}

/// Decides; see the module above.
pub(super) fn run(snapshot: &Snapshot, memo: &mut Memo, now: Time) -> Plan {
    memo.refresh(snapshot);
    let mut pass = Pass::new(snapshot, memo, now);
    drains::windows(&mut pass);
    drains::roll(&mut pass);
    if !pass.taken.is_empty() {
        (pass.quotas, pass.branch) = charged(snapshot, memo, now, &|node| pass.usable(node));
    }
    drains::coming(&mut pass);
    claims::leaving(&mut pass);
    claims::keep(&mut pass);
    claims::evictions(&mut pass);
    drains::move_away(&mut pass);
    for _ in 0..ROUNDS {
        let before = pass.started.len() + pass.out.decisions.len();
        pass.undone = false;
        pass.walk();
        let decided = pass.started.len() + pass.out.decisions.len() != before && !pass.out.waiting.is_empty();
        if !decided && !pass.undone {
            break;
        }
        pass.again();
    }
    turns::wake(&mut pass);
    constraint::explain(&mut pass);
    pass.out
}

/// Whether something beside GPUs and quota keeps a queue's jobs.
pub(super) fn held_queue(pass: &Pass<'_>, queue: usize) -> Option<String> {
    let held = |b: &&usize| pass.quotas.branches[**b].state == QueueState::Held;
    pass.quotas.branches[queue].path.iter().find(held).map(|b| pass.quotas.branches[*b].name.clone())
}

/// Whether an environment can be used.
pub(super) fn environment_ready(snapshot: &Snapshot, job: &Job) -> bool {
    job.environment.as_ref().is_none_or(|hash| snapshot.environments.get(hash) == Some(&EnvironmentState::Ready))
}

/// How long a gang has held its GPUs.
pub(super) fn held_for(job: &Job, now: Time) -> Span {
    match &job.phase {
        Phase::Starting(g) | Phase::Running(g) => now.since(g.placed),
        Phase::Queued
        | Phase::Suspending(_)
        | Phase::Stopping(_)
        | Phase::Succeeded
        | Phase::Failed(_)
        | Phase::Cancelled { .. } => Span(0),
    }
}
