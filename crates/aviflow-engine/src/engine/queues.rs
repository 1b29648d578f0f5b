//! Queues: made, changed and deleted by people, as long as the tree makes sense.

use super::jobs::{Whose, name_of};
use super::submit::{entry_refusal, no_such_queue};
use super::{Answer, Engine, QueueJobs, Refusal, Work, default_queue};
use crate::ports::{ActKind, Store};
use aviflow_core::lifecycle::{Change, Event};
use aviflow_core::model::{Job, JobId, NodeCondition, Queue, QueueState, Quota, Snapshot, TimeSharing};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs that a refusal names.
const NAMED: usize = 5;

impl<S: Store> Engine<S> {
    pub(super) fn apply_queue(&mut self, queue: &Queue, whose: Whose<'_>, work: &mut Work) -> Answer {
        if let Some(refusal) = queue_refusal(&self.snapshot.queues, queue) {
            return Answer::Refused(refusal);
        }
        let first = default_queue();
        let none = self.snapshot.queues.is_empty();
        let before = self.snapshot.queues.get(&queue.name).cloned();
        let before = before.or_else(|| (none && queue.name == first.name).then_some(first));
        if before.as_ref() != Some(queue) {
            if none && before.is_none() {
                // The one that was there from the beginning stays until somebody deletes it.
                self.make_default_queue(work);
            }
            self.snapshot.queues.insert(queue.name.clone(), queue.clone());
            work.queues.insert(queue.name.clone());
            let what = match &before {
                None => format!("made queue {}", queue.name),
                Some(before) => format!("changed queue {}: {}", queue.name, difference(before, queue)),
            };
            self.act(ActKind::Queue, &queue.name, what, whose, work);
        }
        Answer::done(warnings(&self.snapshot, queue))
    }

    pub(super) fn delete_queue(&mut self, name: &str, jobs: &QueueJobs, whose: Whose<'_>, work: &mut Work) -> Answer {
        let live: Vec<&Job> = self.snapshot.jobs.values().filter(|j| j.request.queue == name).collect();
        if let Some(refusal) = delete_refusal(&self.snapshot, name, jobs, &live) {
            return Answer::Refused(refusal);
        }
        let n = live.len();
        let ids: Vec<JobId> = live.iter().map(|j| j.id).collect();
        let plural = if n == 1 { "job" } else { "jobs" };
        let mut what = format!("deleted queue {name}");
        let mut warnings = Vec::new();
        match jobs {
            QueueJobs::Move { to } => {
                let change = Change { queue: Some(to.clone()), ..Change::default() };
                let event = Event::Update { change, by: whose.0.to_owned(), reason: whose.1.cloned() };
                ids.into_iter().for_each(|id| self.advance(id, &event, self.now, work));
                if n > 0 {
                    what.push_str(&format!(" and moved its {n} {plural} to {to}"));
                }
            }
            QueueJobs::Refuse | QueueJobs::Leave => {
                if n > 0 {
                    what.push_str(&format!(", and left {n} {plural} without one"));
                    warnings.push(format!(
                        "{n} {plural} have no queue now: what runs goes on, what waits starts when it is moved with `aviflow update JOB --queue QUEUE`"
                    ));
                }
            }
        }
        self.snapshot.queues.remove(name);
        work.queues.insert(name.to_owned());
        // Of one that comes again under this name nothing is to be remembered.
        let over: Vec<(String, String)> =
            self.snapshot.usage.iter().filter(|((q, _), u)| q == name && u.gpus == 0).map(|(k, _)| k.clone()).collect();
        for key in over {
            self.snapshot.usage.remove(&key);
            work.usage.insert(key);
        }
        self.act(ActKind::Queue, name, what, whose, work);
        Answer::done(warnings)
    }
}

fn delete_refusal(snapshot: &Snapshot, name: &str, jobs: &QueueJobs, live: &[&Job]) -> Option<Refusal> {
    let queues = &snapshot.queues;
    if !queues.contains_key(name) {
        return Some(no_such_queue(snapshot, name));
    }
    let below = queues.values().filter(|q| q.parent.as_deref() == Some(name));
    let children: Vec<String> = below.map(|q| q.name.clone()).collect();
    if !children.is_empty() {
        return Some(Refusal::QueueHasChildren { queue: name.to_owned(), children });
    }
    if queues.len() == 1 {
        return Some(Refusal::LastQueue(name.to_owned()));
    }
    match jobs {
        QueueJobs::Leave => None,
        QueueJobs::Refuse => {
            let (mut names, waiting): (Vec<&&Job>, Vec<&&Job>) = live.iter().partition(|j| j.phase.gang().is_some());
            names.extend(waiting);
            let first: Vec<String> = names.iter().take(NAMED).map(|j| name_of(j)).collect();
            let (queue, total) = (name.to_owned(), live.len());
            (total > 0).then_some(Refusal::QueueHasJobs { queue, jobs: first, total })
        }
        QueueJobs::Move { to } => match queues.get(to).filter(|q| q.name != name) {
            None => Some(no_such_queue(snapshot, to)),
            Some(queue) => live.iter().find_map(|j| entry_refusal(queue, &j.user, j.request.priority)),
        },
    }
}

/// Why the tree would make no sense with the queue in it.
fn queue_refusal(queues: &BTreeMap<String, Queue>, queue: &Queue) -> Option<Refusal> {
    if let Some(why) = nonsense(queue) {
        return Some(Refusal::BadDocument { object: format!("queue {}", queue.name), why });
    }
    for (gpu_type, quota) in &queue.quotas {
        if let Some(limit) = quota.limit.filter(|l| *l < quota.guarantee) {
            let (queue, gpu_type, guarantee) = (queue.name.clone(), gpu_type.clone(), quota.guarantee);
            return Some(Refusal::LimitBelowGuarantee { queue, gpu_type, limit, guarantee });
        }
    }
    let mut tree: BTreeMap<&str, &Queue> = queues.iter().map(|(name, q)| (name.as_str(), q)).collect();
    tree.insert(&queue.name, queue);
    if let Some(parent) = &queue.parent {
        let first = default_queue();
        let there = tree.contains_key(parent.as_str()) || (queues.is_empty() && *parent == first.name);
        if !there {
            return Some(Refusal::NoSuchParent { queue: queue.name.clone(), parent: parent.clone() });
        }
        let mut above = tree.get(parent.as_str());
        while let Some(q) = above {
            if q.name == queue.name {
                return Some(Refusal::QueueCycle { queue: queue.name.clone(), parent: parent.clone() });
            }
            above = q.parent.as_ref().and_then(|p| tree.get(p.as_str()));
        }
    }
    let types: BTreeSet<&String> = tree.values().flat_map(|q| q.quotas.keys()).collect();
    let mut line = Some(queue);
    while let Some(q) = line {
        for gpu_type in &types {
            if let Some(refusal) = children_refusal(&tree, q, gpu_type) {
                return Some(refusal);
            }
        }
        line = q.parent.as_ref().and_then(|p| tree.get(p.as_str()).copied());
    }
    None
}

/// Why the guarantees below a queue do not fit into it. One that says nothing guarantees what they do.
fn children_refusal(tree: &BTreeMap<&str, &Queue>, queue: &Queue, gpu_type: &str) -> Option<Refusal> {
    let quota = queue.quotas.get(gpu_type)?;
    let children = below(tree, queue, gpu_type);
    let (parent, gpu_type) = (queue.name.clone(), gpu_type.to_owned());
    if quota.guarantee > 0 && children > u64::from(quota.guarantee) {
        let guarantee = quota.guarantee;
        return Some(Refusal::GuaranteeAboveParent { parent, gpu_type, guarantee, children });
    }
    let limit = quota.limit.filter(|limit| children > u64::from(*limit))?;
    Some(Refusal::GuaranteeAboveLimit { parent, gpu_type, limit, children })
}

/// What the queues below one guarantee, added up. The tree has no cycle.
fn below(tree: &BTreeMap<&str, &Queue>, queue: &Queue, gpu_type: &str) -> u64 {
    let children = tree.values().filter(|q| q.parent.as_deref() == Some(&queue.name));
    children.map(|q| guarantee(tree, q, gpu_type)).sum()
}

fn guarantee(tree: &BTreeMap<&str, &Queue>, queue: &Queue, gpu_type: &str) -> u64 {
    let own = queue.quotas.get(gpu_type).map_or(0, |q| u64::from(q.guarantee));
    own.max(below(tree, queue, gpu_type))
}

/// What a queue must not say by itself.
fn nonsense(queue: &Queue) -> Option<String> {
    if queue.name.is_empty() {
        return Some("a queue needs a name".to_owned());
    }
    if let Some((gpu_type, _)) = queue.quotas.iter().find(|(_, q)| q.weight == 0) {
        return Some(format!("the weight for {gpu_type} is 0; a weight is at least 1"));
    }
    if queue.defaults.time_limit.is_some_and(|limit| limit.0 <= 0) {
        return Some("the default time limit is not positive; leave it out for none".to_owned());
    }
    queue.time_sharing.as_ref().and_then(bad_sharing)
}

/// What time sharing must not say.
pub(super) fn bad_sharing(sharing: &TimeSharing) -> Option<String> {
    let spans = [("minimum run", sharing.minimum_run), ("level", sharing.level), ("ageing", sharing.ageing)];
    let (name, _) = spans.into_iter().find(|(_, span)| span.0 <= 0)?;
    Some(format!("the {name} of time sharing is not positive; say how long it is"))
}

/// What is allowed, and probably not meant.
fn warnings(snapshot: &Snapshot, queue: &Queue) -> Vec<String> {
    let mut out = Vec::new();
    let tree: BTreeMap<&str, &Queue> = snapshot.queues.iter().map(|(name, q)| (name.as_str(), q)).collect();
    let mut there: BTreeMap<&str, u64> = BTreeMap::new();
    for node in snapshot.nodes.values() {
        let gpus = match node.condition {
            NodeCondition::Ready | NodeCondition::Cordoned => node.gpus.without(node.broken()).count(),
            NodeCondition::Gone => 0,
        };
        *there.entry(&node.gpu_type).or_default() += u64::from(gpus);
    }
    for (gpu_type, quota) in &queue.quotas {
        let capacity = there.get(gpu_type.as_str()).copied();
        let roots = tree.values().filter(|q| q.parent.is_none());
        let sum: u64 = roots.map(|q| guarantee(&tree, q, gpu_type)).sum();
        match capacity {
            None if there.is_empty() => {}
            None => {
                let types: Vec<&str> = there.keys().copied().collect();
                out.push(format!("no node has GPUs of type {gpu_type}; there are {}", types.join(", ")));
            }
            Some(capacity) if quota.guarantee > 0 && sum > capacity => out.push(format!(
                "the queues are guaranteed {sum} GPUs of {gpu_type}, and {capacity} work; each guarantee counts in proportion"
            )),
            Some(_) => {}
        }
        let used = used(snapshot, queue, gpu_type);
        if let Some(limit) = quota.limit.filter(|limit| used > *limit) {
            out.push(format!(
                "queue {} uses {used} GPUs of {gpu_type}, above its limit of {limit}; nothing is stopped for it, and nothing starts until it is below",
                queue.name
            ));
        }
    }
    if let Some(highest) = queue.highest_priority {
        let above = |j: &&Job| j.request.queue == queue.name && j.request.priority > highest;
        match snapshot.jobs.values().filter(above).count() {
            0 => {}
            n => out.push(format!("{n} jobs in it have a higher priority than {highest}, and keep it")),
        }
    }
    out
}

/// GPUs of a type that a queue and all below it hold.
fn used(snapshot: &Snapshot, queue: &Queue, gpu_type: &str) -> u32 {
    let inside = |name: &str| {
        let mut at = snapshot.queues.get(name);
        while let Some(q) = at {
            if q.name == queue.name {
                return true;
            }
            at = q.parent.as_ref().and_then(|p| snapshot.queues.get(p));
        }
        false
    };
    let of_type = |job: &Job| {
        let workers = job.phase.gang().into_iter().flat_map(|g| &g.workers);
        let here = workers.filter(|w| snapshot.nodes.get(&w.node).is_some_and(|n| n.gpu_type == gpu_type));
        here.map(|w| w.slots.count()).sum::<u32>()
    };
    snapshot.jobs.values().filter(|j| inside(&j.request.queue)).map(of_type).sum()
}

/// What of a queue became another, in words.
fn difference(before: &Queue, after: &Queue) -> String {
    let mut out = Vec::new();
    let mut note = |what: &str, a: String, b: String| {
        if a != b {
            out.push(format!("{what} {a} → {b}"));
        }
    };
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    note("parent", or_none(before.parent.clone()), or_none(after.parent.clone()));
    note("state", state(before.state).to_owned(), state(after.state).to_owned());
    let types: BTreeSet<&String> = before.quotas.keys().chain(after.quotas.keys()).collect();
    for gpu_type in types {
        let (a, b) = (before.quotas.get(gpu_type), after.quotas.get(gpu_type));
        let number = |f: fn(&Quota) -> u32, q: Option<&Quota>| or_none(q.map(|q| f(q).to_string()));
        note(&format!("guarantee of {gpu_type}"), number(|q| q.guarantee, a), number(|q| q.guarantee, b));
        note(&format!("weight for {gpu_type}"), number(|q| q.weight, a), number(|q| q.weight, b));
        let limit = |q: Option<&Quota>| or_none(q.and_then(|q| q.limit).map(|l| l.to_string()));
        note(&format!("limit of {gpu_type}"), limit(a), limit(b));
    }
    let yes = |on: bool| if on { "yes" } else { "no" }.to_owned();
    note("lend", yes(before.lend), yes(after.lend));
    note("borrow", yes(before.borrow), yes(after.borrow));
    note("reclaim", yes(before.reclaim), yes(after.reclaim));
    let defaults = |q: &Queue| {
        let d = &q.defaults;
        let parts = [
            d.time_limit.map(|l| format!("time limit {l}")),
            d.priority.as_ref().map(|p| format!("priority {p}")),
            d.preemptible.map(|p| format!("preemptible {}", yes(p))),
        ];
        let list: Vec<String> = parts.into_iter().flatten().collect();
        if list.is_empty() { "none".to_owned() } else { list.join(" and ") }
    };
    note("defaults", defaults(before), defaults(after));
    let highest = |q: &Queue| or_none(q.highest_priority.map(|p| p.to_string()));
    note("highest priority", highest(before), highest(after));
    let who = |q: &Queue| {
        if q.submitters.is_empty() {
            "everybody".to_owned()
        } else {
            q.submitters.iter().cloned().collect::<Vec<_>>().join(" and ")
        }
    };
    note("submitters", who(before), who(after));
    note("time sharing", sharing_words(before.time_sharing), sharing_words(after.time_sharing));
    out.join(", ")
}

pub(super) fn sharing_words(sharing: Option<TimeSharing>) -> String {
    match sharing {
        None => "not said".to_owned(),
        Some(s) if !s.enabled => "off".to_owned(),
        Some(s) => format!("turns of {} with levels of {} and {} of ageing", s.minimum_run, s.level, s.ageing),
    }
}

fn state(state: QueueState) -> &'static str {
    match state {
        QueueState::Open => "open",
        QueueState::Held => "held",
        QueueState::Draining => "draining",
    }
}
