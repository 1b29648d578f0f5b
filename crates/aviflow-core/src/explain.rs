//! The words for verdicts, failures and moments. One sentence each, with numbers.

use crate::health::decide::Decision;
use crate::health::{Finding, News};
use crate::lifecycle::{Moment, MomentKind};
use crate::model::{Cause, Ending, EvictionCause, Failure, NODE_LEVEL, NodeId, Snapshot, TurnedOut};
use crate::schedule::{Constraint, Sooner};
use crate::time::Time;

/// Names of nodes, for sentences about them.
pub trait NodeNames {
    /// The node's name, or something that identifies it.
    fn node_name(&self, id: NodeId) -> String;
}

impl NodeNames for Snapshot {
    fn node_name(&self, id: NodeId) -> String {
        self.nodes.get(&id).map_or_else(|| format!("node {}", id.0), |n| n.name.clone())
    }
}

fn plural(n: u32, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

fn of_types(types: &[String]) -> String {
    if types.is_empty() { String::new() } else { format!(" of {}", types.join(" or ")) }
}

/// Why a job waits.
#[must_use]
pub fn constraint(constraint: &Constraint, now: Time) -> String {
    match constraint {
        Constraint::Paused { by } => format!("all starts are paused by {by}"),
        Constraint::QueueHeld { queue } => format!("queue {queue} is held"),
        Constraint::QueueGone { queue } => {
            format!("queue {queue} does not exist any more; move it with `aviflow update JOB --queue QUEUE`")
        }
        Constraint::Held { by } => format!("held by {by}; `aviflow release JOB` lets it start"),
        Constraint::After { name, on, impossible, .. } => {
            let how = match on {
                Ending::Succeeded => "to succeed",
                Ending::Failed => "to fail",
                Ending::Ended => "to end",
            };
            if *impossible {
                format!("can never start: it waits for {name} {how}, which ended otherwise; cancel it")
            } else {
                format!("waits for {name} {how}")
            }
        }
        Constraint::Claimed { victims, cause } => {
            let n = u32::try_from(victims.len()).unwrap_or(u32::MAX);
            match n {
                0 => "GPUs are promised to it and become free".to_owned(),
                n => format!("GPUs are promised to it ({}); {} leaving", cause.name(), plural(n, "job")),
            }
        }
        Constraint::Promised { job, start } => {
            let whom = job.as_ref().map_or("a drain of the nodes".to_owned(), |j| format!("{j}, which is in front"));
            format!(
                "there is room for {} only, then it is promised to {whom}; a shorter time limit would fit",
                start.since(now)
            )
        }
        Constraint::Preference { level, needs_nodes, best, until } => format!(
            "prefers {} under one {level}; the best {level} has {best} free; takes any place in {}",
            plural(*needs_nodes, "node"),
            until.since(now)
        ),
        Constraint::QueueLimit { queue, gpu_type, limit, used, needs } => {
            format!("needs {} of {gpu_type}; queue {queue} uses {used} of its limit of {limit}", plural(*needs, "GPU"))
        }
        Constraint::QueueGuarantee { queue, gpu_type, guarantee, used, needs } => format!(
            "needs {} of {gpu_type} that nobody may take back; queue {queue} uses {used} of its guarantee of {guarantee} so; \
             with `preemptible: true` it could borrow",
            plural(*needs, "GPU")
        ),
        Constraint::Kept { gpu_type, free, kept, needs } => format!(
            "needs {} of {gpu_type}; of {free} free, {kept} are kept for queues that do not lend",
            plural(*needs, "GPU")
        ),
        Constraint::Environment { .. } => "its environment is being prepared".to_owned(),
        Constraint::BackOff { until, node, refused } => match (node, refused) {
            (Some(node), Some(reason)) => {
                format!("was refused by node {node}: {reason}; tried again in {}", until.since(now))
            }
            _ => format!("pauses {} after its last attempt", until.since(now)),
        },
        Constraint::Capacity {
            needs_nodes,
            gpus_per_node,
            gpu_types,
            nodes_with_room,
            free_gpus,
            most_free_on_a_node,
            foreign_gpus,
            closed_nodes,
            level,
        } => {
            let need = format!(
                "needs {} with {} free{}",
                plural(*needs_nodes, "node"),
                plural(*gpus_per_node, "GPU"),
                of_types(gpu_types)
            );
            let mut beside = String::new();
            if *foreign_gpus > 0 {
                beside.push_str(&format!(", {foreign_gpus} used by others"));
            }
            if *closed_nodes > 0 {
                beside.push_str(&format!(", {} closed to new work", plural(*closed_nodes, "node")));
            }
            if let Some(level) = level {
                return format!("{need} under one {level}; the best {level} has {nodes_with_room}{beside}");
            }
            let have = match nodes_with_room {
                0 => format!("{free_gpus} free, at most {most_free_on_a_node} on one node"),
                1 => format!("1 node has room, {free_gpus} GPUs free"),
                n => format!("{n} nodes have room, {free_gpus} GPUs free"),
            };
            format!("{need}; {have}{beside}")
        }
        Constraint::Never { .. } => {
            let why = never(constraint).unwrap_or_default();
            format!("can never start: {why}; cancel it or ask for less")
        }
    }
}

/// A change with which a job would start now.
#[must_use]
pub fn sooner(change: &Sooner) -> String {
    let with = match change {
        Sooner::Prefer { level } => format!("`prefer: {level}` instead of `require: {level}`"),
        Sooner::Anywhere { level } => format!("`prefer: {level}` and no `maxWait`"),
        Sooner::TimeLimit { limit } => format!("`timeLimit: {}m`", limit.0 / 60_000),
        Sooner::GpuType { gpu_type } => format!("{gpu_type} added to `gpuType`"),
        Sooner::Preemptible => "`preemptible: true`".to_owned(),
        Sooner::Nodes { nodes } => format!("`nodes: {nodes}`"),
        Sooner::Queue { queue } => format!("`queue: {queue}`"),
    };
    format!("with {with} it starts now")
}

/// What the pool cannot give.
#[must_use]
pub fn never(constraint: &Constraint) -> Option<String> {
    let Constraint::Never { needs_nodes, gpus_per_node, gpu_types, capable_nodes, level } = constraint else {
        return None;
    };
    let (whole, under) = match level {
        Some(level) if level != NODE_LEVEL => (format!("no {level} has more than"), format!(" under one {level}")),
        _ => ("the pool has only".to_owned(), String::new()),
    };
    let have = match (capable_nodes, level) {
        (0, _) => "the pool has no node that large".to_owned(),
        (n, _) => format!("{whole} {} that large", plural(*n, "node")),
    };
    Some(format!(
        "needs {} with {}{}{under}, and {have}",
        plural(*needs_nodes, "node"),
        plural(*gpus_per_node, "GPU"),
        of_types(gpu_types),
    ))
}

/// Who suspends a job, as its timeline says it.
#[must_use]
pub fn suspended_by(turned_out: &TurnedOut) -> String {
    let whom = turned_out.beneficiary.as_ref().map_or(String::new(), |k| format!(" for {}", k.name));
    match turned_out.cause {
        EvictionCause::Reclaim => format!("the plan{whom}, whose queue takes its guarantee back"),
        EvictionCause::Priority => format!("the plan{whom}, which has a higher priority"),
        EvictionCause::Turn => format!("the plan{whom}, as its turn is over"),
        EvictionCause::Drain => "the plan, as its node is drained".to_owned(),
    }
}

/// How a process ended, in the words of a shell.
#[must_use]
pub fn exit(code: i32, signal: Option<i32>) -> String {
    match signal {
        Some(signal) => format!("was ended by {}", signal_name(signal)),
        None => format!("exited with {code}"),
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        other => return format!("signal {other}"),
    };
    format!("{name} (signal {signal})")
}

/// A failure in a few words, without node names.
#[must_use]
pub fn failure_short(failure: &Failure) -> String {
    match &failure.cause {
        Cause::Rank { rank, exit: e, .. } => format!("rank {rank} {}", exit(e.code, e.signal)),
        Cause::WorkerLost { worker, .. } => format!("worker {worker} is lost"),
        Cause::Launch { worker, .. } => format!("worker {worker} could not start"),
        Cause::TimeLimit { limit } => format!("the time limit of {limit} is reached"),
        Cause::Environment { .. } => "the environment could not be made".to_owned(),
        Cause::Found { finding, .. } => what_was_found(finding),
        Cause::Recorded { reason } => reason.clone(),
    }
}

/// A failure in one sentence: what, which rank, which node, why.
#[must_use]
pub fn failure(failure: &Failure, names: &dyn NodeNames) -> String {
    match &failure.cause {
        Cause::Rank { attempt, rank, worker, node, exit: e } => format!(
            "rank {rank} (worker {worker} on {}) {} in attempt {attempt}",
            names.node_name(*node),
            exit(e.code, e.signal)
        ),
        Cause::WorkerLost { attempt, worker, node, reason } => {
            format!("worker {worker} on {} is lost in attempt {attempt}: {reason}", names.node_name(*node))
        }
        Cause::Launch { attempt, worker, node, reason } => {
            format!("worker {worker} on {} could not start in attempt {attempt}: {reason}", names.node_name(*node))
        }
        Cause::TimeLimit { limit } => {
            format!(
                "the time limit of {limit} is reached; raise `timeLimit` and run it again, it resumes from its checkpoint"
            )
        }
        Cause::Environment { reason } => format!("the environment could not be made: {reason}"),
        Cause::Found { attempt, finding } => format!("attempt {attempt} was ended: {}", what_was_found(finding)),
        Cause::Recorded { reason } => format!("{reason}; more was in a store that is lost"),
    }
}

/// An entry of the timeline in one sentence.
#[must_use]
pub fn moment(moment: &Moment, names: &dyn NodeNames) -> String {
    match &moment.kind {
        MomentKind::Submitted { by } => format!("submitted by {by}"),
        MomentKind::Placed { nodes, gpus } => {
            let list: Vec<String> = nodes.iter().map(|n| names.node_name(*n)).collect();
            format!("attempt {} got {} on {}", moment.attempt, plural(*gpus, "GPU"), list.join(", "))
        }
        MomentKind::Running { ranks } => {
            if *ranks == 1 {
                "its rank is up".to_owned()
            } else {
                format!("all {ranks} ranks are up")
            }
        }
        MomentKind::FirstStep { step } => format!("first step: {step}"),
        MomentKind::CaughtUp { step } => format!("caught up with the attempts before at step {step}"),
        MomentKind::CheckpointComplete { step, path } => format!("checkpoint of step {step} complete: {path}"),
        MomentKind::CheckpointFailed { step } => format!("checkpoint of step {step} was not completed"),
        MomentKind::Facts { values } => {
            let list: Vec<String> = values.iter().map(|(k, v)| format!("{k}={v}")).collect();
            format!("reported {}", list.join(", "))
        }
        MomentKind::Failing { failure: f } => failure(f, names),
        MomentKind::Suspending { by } => format!("being suspended by {by}"),
        MomentKind::Claimed { gpus, victims, cause } => {
            let from = match victims {
                0 => String::new(),
                n => format!(", for which {} must leave", plural(*n, "job")),
            };
            format!("{} promised ({}){from}", plural(*gpus, "GPU"), cause.name())
        }
        MomentKind::Unclaimed { reason } => format!("the promised GPUs were given back: {reason}"),
        MomentKind::Evicting { cause, beneficiary, deadline } => {
            let whom = beneficiary.as_ref().map_or(String::new(), |k| format!(" for {}", k.name));
            format!(
                "is to give its GPUs up{whom} ({}) after its next checkpoint, within {}",
                cause.name(),
                deadline.since(moment.at)
            )
        }
        MomentKind::Rebuilt => "taken over from its object, as the store was lost; its timeline, GPU time and steps \
             until now are not known any more"
            .to_owned(),
        MomentKind::Spared => "may keep its GPUs after all".to_owned(),
        MomentKind::Held { by } => format!("held by {by}"),
        MomentKind::Released { by } => format!("released by {by}"),
        MomentKind::Updated { by, reason, change } => {
            let mut what = Vec::new();
            what.extend(change.priority.map(|p| format!("priority {p}")));
            what.extend(change.queue.as_ref().map(|q| format!("queue {q}")));
            what.extend(change.time_limit.map(|l| match l {
                Some(limit) => format!("time limit {limit}"),
                None => "no time limit".to_owned(),
            }));
            let why = reason.as_ref().map_or(String::new(), |r| format!(": {r}"));
            format!("{} set by {by}{why}", what.join(", "))
        }
        MomentKind::DependencyMet { name, .. } => format!("{name}, which it waited for, has ended as asked"),
        MomentKind::DependencyFailed { name, .. } => {
            format!("{name}, which it waits for, has ended otherwise than asked: it can never start")
        }
        MomentKind::Cancelling { by } => format!("being cancelled by {by}"),
        MomentKind::TimeLimitReached => "the time limit is reached".to_owned(),
        MomentKind::NeverReady { missing } => {
            let list: Vec<String> = missing.iter().map(u32::to_string).collect();
            format!("not every worker was ready in time; missing: {}", list.join(", "))
        }
        MomentKind::Refused { worker, node, reason } => {
            format!("worker {worker} was refused by node {}: {reason}", names.node_name(*node))
        }
        MomentKind::AskedToLeave { worker, node, reason } => {
            let node = names.node_name(*node);
            format!("the cluster asks worker {worker} on {node} to leave: {reason}; the gang is suspended")
        }
        MomentKind::Found { news } => found(news),
        MomentKind::Decided { decision } => decided(decision, names),
        MomentKind::Again { epoch } => format!("the ranks start again where they are (epoch {epoch})"),
        MomentKind::Kept { until } => format!(
            "the GPUs are kept for {}, for somebody to look around with `aviflow exec`; `aviflow cancel` gives them back",
            until.since(moment.at)
        ),
        MomentKind::Quarantined { node, gpu, reason } => {
            let what = gpu.map_or(String::new(), |gpu| format!("GPU {gpu} of "));
            format!(
                "{what}{} takes nothing new until it passed a check: {reason}; run `aviflow node check`",
                names.node_name(*node)
            )
        }
        MomentKind::NotQuarantined { node, reason } => {
            format!("{} should be checked: {reason}", names.node_name(*node))
        }
        MomentKind::RequeueAsked { rank } => format!("rank {rank} asked to be queued again (exit code 75)"),
        MomentKind::QueuedAgain { not_before } => match not_before {
            Some(t) => format!("queued again, not before {} from now", t.since(moment.at)),
            None => "queued again in its old place".to_owned(),
        },
        MomentKind::Succeeded => "succeeded".to_owned(),
        MomentKind::Failed { failure: f } => format!("failed: {}", failure(f, names)),
        MomentKind::Cancelled { by } => format!("cancelled by {by}"),
    }
}

/// What is done about a fault: `CUDA error on rank 3 (node gpu-7, GPU 2): …; next …`.
fn decided(decision: &Decision, names: &dyn NodeNames) -> String {
    let rank = decision.place.rank.map(|rank| format!(" on rank {rank}")).unwrap_or_default();
    let mut place = Vec::new();
    place.extend(decision.place.node.map(|node| format!("node {}", names.node_name(node))));
    place.extend(decision.place.gpu.map(|gpu| format!("GPU {gpu}")));
    let place = if place.is_empty() { String::new() } else { format!(" ({})", place.join(", ")) };
    format!("{}{rank}{place}: {}; {}", decision.kind, decision.reason, decision.next)
}

/// A finding: what, of which rank, and what tells.
fn what_was_found(finding: &Finding) -> String {
    let rank = finding.rank.map(|rank| format!(" of rank {rank}")).unwrap_or_default();
    let because = finding.because.map(|because| format!(" ({})", because.words())).unwrap_or_default();
    let detail = if finding.detail.is_empty() { String::new() } else { format!(": {}", finding.detail) };
    format!("{}{rank}{because}{detail}", finding.kind)
}

/// What the watch over a gang says.
fn found(news: &News) -> String {
    match news {
        News::TakeStacks => "stacks of all ranks are taken".to_owned(),
        News::Suspected(finding) => format!("suspected {}", what_was_found(finding)),
        News::Found(finding) => format!("found {}", what_was_found(finding)),
        News::Over(kind) => format!("{kind} is over"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constraint_says_what_is_missing() {
        let capacity = |room, free, most| Constraint::Capacity {
            needs_nodes: 2,
            gpus_per_node: 8,
            gpu_types: vec!["H100".into()],
            nodes_with_room: room,
            free_gpus: free,
            most_free_on_a_node: most,
            foreign_gpus: 0,
            closed_nodes: 0,
            level: None,
        };
        let say = |c: &Constraint| constraint(c, Time(0));
        assert_eq!(say(&capacity(0, 8, 4)), "needs 2 nodes with 8 GPUs free of H100; 8 free, at most 4 on one node");
        assert_eq!(say(&capacity(1, 11, 8)), "needs 2 nodes with 8 GPUs free of H100; 1 node has room, 11 GPUs free");
        assert_eq!(
            say(&Constraint::BackOff { until: Time(4000), node: None, refused: None }),
            "pauses 4s after its last attempt"
        );
        let never =
            Constraint::Never { needs_nodes: 9, gpus_per_node: 8, gpu_types: vec![], capable_nodes: 2, level: None };
        assert_eq!(
            say(&never),
            "can never start: needs 9 nodes with 8 GPUs, and the pool has only 2 nodes that large; cancel it or ask for less"
        );
    }

    #[test]
    fn ends_read_as_a_shell_says_them() {
        assert_eq!(exit(1, None), "exited with 1");
        assert_eq!(exit(137, Some(9)), "was ended by SIGKILL (signal 9)");
        assert_eq!(exit(162, Some(34)), "was ended by signal 34");
    }
}
