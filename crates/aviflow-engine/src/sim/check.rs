//! What must hold after every turn and at the end, beyond the core's lint.

use super::people::GPU_TYPE;
use super::store::SimStore;
use super::world::World;
use crate::engine::Engine;
use aviflow_core::health::decide;
use aviflow_core::ledger::Entry;
use aviflow_core::lifecycle::REFUSALS;
use aviflow_core::model::{Cause, Job, JobId, NodeCondition, NodeId, Phase, Queue, Snapshot, Stopping, Suspending};
use aviflow_core::schedule::{Memo, plan};
use aviflow_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// The longest grace, and the control plane's absences meanwhile.
const STOP_LIMIT: Span = Span::minutes(8);

/// What a claim may take beyond its victims' patience and graces: ends that are heard late, and the turns between.
const CLAIM_LIMIT: Span = Span::minutes(5);

/// Preemptions of one job: it is moved a few times, and not for ever.
const PREEMPTIONS: u32 = 40;

#[derive(Debug, Default)]
pub(super) struct Checker {
    acknowledged: BTreeSet<JobId>,
    /// Since when a gang is being stopped.
    stopping: BTreeMap<(JobId, u32), Time>,
    /// Since when GPUs are promised to a job that could use them.
    claimed: BTreeMap<(JobId, Time), Time>,
    /// Plans that decided again on their own result.
    pub(super) restless: Vec<String>,
    /// For each GPU, up to when its time is in closed intervals.
    accounted: BTreeMap<(NodeId, u32), Time>,
}

impl Checker {
    pub(super) fn acknowledged(&mut self, job: JobId) {
        self.acknowledged.insert(job);
    }

    /// A control plane is there again: what it missed is not its delay.
    pub(super) fn opened(&mut self) {
        self.stopping.clear();
        self.claimed.clear();
    }

    pub(super) fn after_turn(&mut self, engine: &Engine<SimStore>, store: &SimStore) -> Vec<String> {
        let mut wrong = store.wrong();
        if !store.agrees(engine.snapshot()) {
            wrong.push("what is in memory is not what is durable".to_owned());
        }
        for entry in store.fresh_entries() {
            self.entry(&entry, &mut wrong);
        }
        for (node, open) in engine.snapshot().ledger.iter() {
            for slot in open.slots.iter() {
                let begin = *self.accounted.entry((node, slot)).or_insert(open.from);
                if begin != open.from {
                    wrong.push(format!(
                        "GPU {slot} of node {} is accounted to {begin:?} and open since {:?}",
                        node.0, open.from
                    ));
                }
            }
        }
        self.stops_end(engine, &mut wrong);
        self.claims_end(engine, &mut wrong);
        limits_hold(engine, &mut wrong);
        preemptions_end(engine.snapshot(), &mut wrong);
        if engine.next_wake().is_none_or(|t| t > engine.now()) {
            let fresh = plan(engine.snapshot(), &mut Memo::default(), engine.now());
            if !fresh.decisions.is_empty() {
                let first = engine.audit.as_ref().map(|a| &a.decided);
                self.restless
                    .push(format!("a plan made on its own result decides {:?} after {first:?}", fresh.decisions));
            }
            conditions(engine, &mut wrong);
        }
        wrong.extend(self.acknowledged.iter().filter(|j| !store.has(**j)).map(|j| format!("job {} is lost", j.0)));
        wrong
    }

    /// A gang that is being stopped is gone soon, whatever the control plane went through.
    fn stops_end(&mut self, engine: &Engine<SimStore>, wrong: &mut Vec<String>) {
        let jobs = &engine.snapshot().jobs;
        let of = |j: &Job| match &j.phase {
            Phase::Stopping(Stopping { gang, .. }) | Phase::Suspending(Suspending { gang, .. }) => {
                Some((j.id, gang.attempt))
            }
            Phase::Queued | Phase::Starting(_) | Phase::Running(_) => None,
            Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => None,
        };
        let now: BTreeSet<(JobId, u32)> = jobs.values().filter_map(of).collect();
        self.stopping.retain(|key, _| now.contains(key));
        for key in now {
            let since = *self.stopping.entry(key).or_insert(engine.now());
            if engine.now().since(since) > STOP_LIMIT {
                wrong.push(format!("job {} is being stopped since {}", key.0.0, engine.now().since(since)));
            }
        }
    }

    /// A claim comes to an end: its victims leave, or it is taken back.
    fn claims_end(&mut self, engine: &Engine<SimStore>, wrong: &mut Vec<String>) {
        let snapshot = engine.snapshot();
        // Who cannot start now may keep what was promised until then.
        let free = |j: &&Job| snapshot.paused.is_none() && j.environment.is_none();
        let of = |j: &Job| Some((j.id, j.claim.as_ref()?.since));
        let now: BTreeSet<(JobId, Time)> = snapshot.jobs.values().filter(free).filter_map(of).collect();
        self.claimed.retain(|key, _| now.contains(key));
        for key in now {
            let since = *self.claimed.entry(key).or_insert(engine.now());
            let age = engine.now().since(since);
            let grace = Span::seconds(30);
            if age > snapshot.policy.patience + grace + grace + CLAIM_LIMIT {
                wrong.push(format!("GPUs are promised to job {} since {age}", key.0.0));
            }
        }
    }

    /// Each closed interval begins where the one before ended: no overlap, no gap.
    fn entry(&mut self, entry: &Entry, wrong: &mut Vec<String>) {
        for (node, slots) in entry.gpus.iter() {
            for slot in slots.iter() {
                let end = self.accounted.entry((node, slot)).or_insert(entry.from);
                if *end != entry.from || entry.to <= entry.from {
                    wrong.push(format!(
                        "GPU {slot} of node {} is accounted to {end:?}, and again from {:?} to {:?}",
                        node.0, entry.from, entry.to
                    ));
                }
                *end = entry.to;
            }
        }
    }

    pub(super) fn at_end(&self, store: &SimStore, world: &World, steady_clock: bool) -> Vec<String> {
        let mut wrong = Vec::new();
        let ended = store.ended();
        for id in &self.acknowledged {
            if !ended.contains_key(id) {
                wrong.push(format!("job {} has not ended", id.0));
            }
        }
        for job in ended.values() {
            wrong.extend(
                ended_rightly(job, world, steady_clock).into_iter().map(|w| format!("job {}: {w}", job.key.name)),
            );
        }
        wrong
    }
}

/// No start exceeds a limit of its queue, or of one above.
fn limits_hold(engine: &Engine<SimStore>, wrong: &mut Vec<String>) {
    let snapshot = engine.snapshot();
    for job in snapshot.jobs.values() {
        let started = matches!(&job.phase, Phase::Starting(gang) if gang.placed == engine.now());
        if !started {
            continue;
        }
        let mut above = snapshot.queues.get(&job.request.queue);
        while let Some(queue) = above {
            let quota = queue.quotas.get(GPU_TYPE);
            // One that does not borrow has its guarantee, and those of the queues below it.
            let own = quota.filter(|_| !queue.borrow).map(|_| guarantee(snapshot, queue));
            for limit in [quota.and_then(|q| q.limit), own].into_iter().flatten() {
                let used = used(snapshot, &queue.name);
                if used > limit {
                    let name = &job.key.name;
                    wrong.push(format!("{name} started, and queue {} uses {used} of {limit}", queue.name));
                }
            }
            above = queue.parent.as_ref().and_then(|p| snapshot.queues.get(p));
        }
    }
}

fn guarantee(snapshot: &Snapshot, queue: &Queue) -> u32 {
    let own = queue.quotas.get(GPU_TYPE).map_or(0, |q| q.guarantee);
    let below = snapshot.queues.values().filter(|q| q.parent.as_deref() == Some(&queue.name));
    own.max(below.map(|q| guarantee(snapshot, q)).sum())
}

/// GPUs held by jobs of a queue and of all below it.
fn used(snapshot: &Snapshot, name: &str) -> u32 {
    let own = snapshot.jobs.values().filter(|j| j.request.queue == name);
    let held: u32 = own.filter_map(|j| j.phase.gang()).map(|g| g.gpu_count()).sum();
    let below = snapshot.queues.values().filter(|q| q.parent.as_deref() == Some(name));
    held + below.map(|q| used(snapshot, &q.name)).sum::<u32>()
}

/// Nobody is turned out again and again.
fn preemptions_end(snapshot: &Snapshot, wrong: &mut Vec<String>) {
    for job in snapshot.jobs.values() {
        if job.preempted > PREEMPTIONS || job.counters.suspensions > 10 * PREEMPTIONS {
            let name = &job.key.name;
            wrong.push(format!("{name} was preempted {} times, {:?}", job.preempted, job.counters));
        }
    }
}

/// Whether a node takes work follows from what people said and when it is.
fn conditions(engine: &Engine<SimStore>, wrong: &mut Vec<String>) {
    for node in engine.snapshot().nodes.values() {
        let closed = node.shut() || node.drained(engine.now());
        if node.condition != NodeCondition::Gone && (node.condition == NodeCondition::Cordoned) != closed {
            wrong.push(format!("node {} is {:?} with {:?}", node.name, node.condition, node.drain));
        }
        if node.drain.as_ref().is_some_and(|d| d.over(engine.now())) {
            wrong.push(format!("the drain of node {} is over and is kept", node.name));
        }
    }
}

/// Whether the end of a job agrees with what really happened.
fn ended_rightly(job: &Job, world: &World, steady_clock: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    let c = job.counters;
    let counted = c.failures + c.node_failures + c.suspensions + c.unready;
    let attempts = || (1..=job.attempts).map(|a| world.truth.get(&(job.id, a)).cloned().unwrap_or_default());
    let again: u32 = attempts().map(|t| t.epoch.saturating_sub(1)).sum();
    let last_uncounted = match &job.phase {
        Phase::Succeeded => true,
        Phase::Failed(f) => matches!(f.cause, Cause::TimeLimit { .. }),
        // Cancelled while it ran, or while it waited.
        Phase::Cancelled { .. } => counted < job.attempts + again,
        Phase::Queued | Phase::Starting(_) | Phase::Running(_) | Phase::Suspending(_) | Phase::Stopping(_) => {
            return vec![format!("is {} at the end", job.phase.name())];
        }
    };
    // A restart in place that no agent lived to hear of was counted, too.
    let (had, most) = (counted + u32::from(last_uncounted), job.attempts + again);
    let unheard = attempts().any(|t| t.disturbed);
    if had < most || (had > most && !unheard) {
        wrong.push(format!("{} attempts, {again} times again, and {c:?} as {}", job.attempts, job.phase.name()));
    }
    let count = |failed: usize, now: bool| failed + usize::from(now);
    let failed: usize = attempts().map(|t| count(t.failed_before, t.first_failure.is_some() || t.launch_failed)).sum();
    if c.failures as usize > failed {
        wrong.push(format!("{} retries were spent on {failed} failures of the application", c.failures));
    }
    // A worker's last report may overtake the one that says why it never started.
    let lost: usize = attempts().map(|t| count(t.lost_before, t.lost || t.launch_failed || t.refused)).sum();
    if c.node_failures as usize > lost {
        wrong.push(format!("{} node failures were counted of {lost}", c.node_failures));
    }
    let mute = attempts().filter(|t| t.never_ready || t.disturbed || t.refused).count();
    if c.unready as usize > mute {
        wrong.push(format!("{} starts were given up of {mute} that could not become ready", c.unready));
    }
    match &job.phase {
        Phase::Succeeded => {
            let truth = attempts().next_back().unwrap_or_default();
            if truth.finished.len() != truth.ranks as usize {
                wrong.push(format!("succeeded with {} of {} ranks", truth.finished.len(), truth.ranks));
            }
        }
        Phase::Failed(failure) => {
            let truth = attempts().next_back().unwrap_or_default();
            if matches!(failure.cause, Cause::TimeLimit { .. }) && truth.finished.len() == truth.ranks as usize {
                wrong.push("every rank had finished, and the time limit failed it".to_owned());
            }
            let last = attempts().next_back().unwrap_or_default();
            let impossible = attempts().filter(|t| t.impossible).count();
            if let Cause::Launch { reason, .. } = &failure.cause
                && !last.launch_failed
                && impossible < REFUSALS as usize
            {
                wrong.push(format!("failed after {impossible} refusals: {reason}"));
            }
            if let Cause::Rank { attempt, rank, .. } = &failure.cause {
                let truth = world.truth.get(&(job.id, *attempt)).cloned().unwrap_or_default();
                if steady_clock && !truth.disturbed && truth.first_failure.map(|f| f.1) != Some(*rank) {
                    wrong.push(format!("rank {rank} is named, and {:?} failed first", truth.first_failure));
                }
                let (allowed, loop_) = (job.request.failures_allowed, decide::FAILURES);
                if c.failures != allowed + 1 && !(loop_..=allowed).contains(&c.failures) {
                    wrong.push(format!("failed after {} failures, {allowed} allowed", c.failures));
                }
            }
        }
        Phase::Cancelled { .. } => {}
        Phase::Queued | Phase::Starting(_) | Phase::Running(_) | Phase::Suspending(_) | Phase::Stopping(_) => {}
    }
    wrong
}
