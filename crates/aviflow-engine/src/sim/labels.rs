//! Which kinds of transitions a write holds, by name: what the coverage counts,
//! and what faults are aimed at.

use crate::ports::{ActKind, Batch};
use aviflow_core::lifecycle::MomentKind;
use aviflow_core::model::{Intent, Job, Node, NodeCondition, Phase, Snapshot};
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// A phase, with what is decided to follow it.
pub(super) fn phase(phase: &Phase) -> String {
    match phase {
        Phase::Stopping(s) => format!(
            "Stopping/{}",
            match s.intent {
                Intent::Cancel { .. } => "cancel",
                Intent::TimeLimit => "time limit",
                Intent::Failure(_) => "failure",
                Intent::NodeFailure(_) => "node failure",
                Intent::Requeue => "requeue",
                Intent::Unready { .. } => "unready",
                Intent::Refused { .. } => "refused",
            }
        ),
        other => other.name().to_owned(),
    }
}

/// Everything that a batch does to what is durable.
pub(super) fn of(batch: &Batch, before: &Snapshot) -> BTreeSet<String> {
    let mut out: BTreeSet<String> = batch.jobs.iter().map(|j| job(before.jobs.get(&j.id), j)).collect();
    for moment in &batch.moments {
        out.extend(what(&moment.kind));
    }
    for j in &batch.jobs {
        let was = before.jobs.get(&j.id).and_then(|b| b.turned_out.as_ref());
        if let Some(now) = j.turned_out.as_ref().filter(|t| was != Some(t)) {
            out.insert(format!("turned out/{}", now.cause.name()));
        }
    }
    for n in &batch.nodes {
        out.extend(before.nodes.get(&n.id).into_iter().flat_map(|b| node(b, n, batch)));
    }
    for (name, queue) in &batch.queues {
        let label = match (before.queues.contains_key(name), queue.is_some()) {
            (false, _) => "queue made",
            (true, true) => "queue changed",
            (true, false) => "queue deleted",
        };
        out.insert(label.to_owned());
    }
    for (_, pool) in &batch.pools {
        out.insert(if pool.is_some() { "pool described" } else { "pool not described" }.to_owned());
    }
    if batch.policy.is_some() {
        out.insert("policy".to_owned());
    }
    if let Some(paused) = &batch.paused {
        out.insert(if paused.is_some() { "paused" } else { "not paused" }.to_owned());
    }
    if let Some(drains) = &batch.drains {
        let id = |d: &aviflow_core::model::RollingDrain| d.id;
        let (old, new): (BTreeSet<u64>, BTreeSet<u64>) =
            (before.drains.iter().map(id).collect(), drains.iter().map(id).collect());
        let called_off = batch.acts.iter().any(|a| a.kind == ActKind::Drain && a.what.starts_with("called off"));
        if new.difference(&old).next().is_some() {
            out.insert("drain rolls".to_owned());
        }
        if old.difference(&new).next().is_some() {
            out.insert(if called_off { "drain called off" } else { "drain done" }.to_owned());
        }
        let taken = |list: &[aviflow_core::model::RollingDrain]| list.iter().map(|d| d.taken.len()).sum::<usize>();
        if taken(drains) > taken(&before.drains) {
            out.insert("drain takes".to_owned());
        }
    }
    out
}

fn job(before: Option<&Job>, after: &Job) -> String {
    let from = before.map_or_else(|| "new".to_owned(), |j| phase(&j.phase));
    let to = phase(&after.phase);
    if from == to { format!("within {to}") } else { format!("{from} → {to}") }
}

fn what(kind: &MomentKind) -> Option<String> {
    Some(match kind {
        MomentKind::Claimed { cause, .. } => format!("claim/{}", cause.name()),
        MomentKind::Unclaimed { .. } => "unclaim".to_owned(),
        MomentKind::Evicting { cause, .. } => format!("evict/{}", cause.name()),
        MomentKind::Spared => "spare".to_owned(),
        MomentKind::Held { .. } => "hold".to_owned(),
        MomentKind::Released { .. } => "release".to_owned(),
        MomentKind::Updated { .. } => "update".to_owned(),
        MomentKind::DependencyMet { .. } => "dependency met".to_owned(),
        MomentKind::DependencyFailed { .. } => "dependency failed".to_owned(),
        MomentKind::AskedToLeave { .. } => "asked to leave".to_owned(),
        MomentKind::Again { .. } => "again in place".to_owned(),
        MomentKind::Kept { .. } => "kept after a failure".to_owned(),
        MomentKind::Quarantined { .. } => "quarantine".to_owned(),
        MomentKind::Submitted { .. }
        | MomentKind::Rebuilt
        | MomentKind::Placed { .. }
        | MomentKind::Running { .. }
        | MomentKind::FirstStep { .. }
        | MomentKind::CaughtUp { .. }
        | MomentKind::CheckpointComplete { .. }
        | MomentKind::CheckpointFailed { .. }
        | MomentKind::Facts { .. }
        | MomentKind::Failing { .. }
        | MomentKind::Suspending { .. }
        | MomentKind::Cancelling { .. }
        | MomentKind::TimeLimitReached
        | MomentKind::NeverReady { .. }
        | MomentKind::Refused { .. }
        | MomentKind::RequeueAsked { .. }
        | MomentKind::Found { .. }
        | MomentKind::Decided { .. }
        | MomentKind::NotQuarantined { .. }
        | MomentKind::QueuedAgain { .. }
        | MomentKind::Succeeded
        | MomentKind::Failed { .. }
        | MomentKind::Cancelled { .. } => return None,
    })
}

fn node(before: &Node, after: &Node, batch: &Batch) -> Vec<String> {
    let mut out = Vec::new();
    let by_person = batch.acts.iter().any(|a| a.kind == ActKind::Node && a.name == after.name);
    let mut note = |label: &str| out.push(label.to_owned());
    match (&before.drain, &after.drain) {
        (None, Some(drain)) if drain.from > batch.at => note("drain planned"),
        (None, Some(_)) => note("drain begins at once"),
        (Some(_), None) => note(if by_person { "drain ended by a person" } else { "drain over" }),
        (Some(_), Some(_)) => {
            if before.condition == NodeCondition::Ready && after.condition == NodeCondition::Cordoned {
                note("window begins");
            }
        }
        (None, None) => {}
    }
    match after.others.cmp(&before.others) {
        Ordering::Less => note("others leave"),
        Ordering::Greater => note("others come"),
        Ordering::Equal => {}
    }
    match (before.closed.is_some(), after.closed.is_some()) {
        (false, true) => note("closed by others"),
        (true, false) => note("opened by others"),
        (true, true) | (false, false) => {}
    }
    if before.vacate.is_none() && after.vacate.is_some() {
        note("wanted empty by others");
    }
    if before.path != after.path && before.reported != after.reported {
        note("moved");
    }
    match (before.cordoned, after.cordoned) {
        (false, true) => note("cordoned"),
        (true, false) => note("uncordoned"),
        (true, true) | (false, false) => {}
    }
    out
}
