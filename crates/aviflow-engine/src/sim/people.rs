//! What people do, in the engine's words.

use super::script::{Item, JobScript, QueueScript};
use super::{Sim, SimStore};
use crate::engine::{DrainName, DrainOrder, Engine, Input, QueueJobs, Submission};
use aviflow_api::spec::{After, Ending, JobSpec, Nodes, Processes, Provenance, ResolvedEnvironment, Retry};
use aviflow_core::lifecycle::Change;
use aviflow_core::model::{JobId, Policy, Pool, Queue, QueueState, Quota, Request, TimeSharing, Topology};
use aviflow_core::schedule::Constraint;
use aviflow_core::time::Span;
use std::collections::BTreeMap;

/// The pool of all nodes.
pub(super) const POOL: &str = "sim";

/// The accelerator type of all nodes.
pub(super) const GPU_TYPE: &str = "H100";

pub(super) fn ops() -> String {
    "ops".to_owned()
}

/// What the engine is told of an item; nothing where it is no person's, or there is nothing to do it to.
pub(super) fn input(item: &Item, sim: &Sim<'_>) -> Option<Input> {
    let job = |name: &String| sim.acknowledged.get(name).copied();
    let (by, reason, now) = (ops(), None, sim.world.wall());
    Some(match item {
        Item::Submit(script) => Input::Submit(Box::new(submission(script))),
        Item::Cancel { job: name } => Input::Cancel { job: job(name)?, by: "ann".to_owned() },
        Item::Suspend { job: name } => Input::Suspend { job: job(name)?, by, reason },
        Item::Hold { job: name } => Input::Hold { job: job(name)?, by, reason },
        Item::Release { job: name } => Input::Release { job: job(name)?, by, reason },
        Item::Update { job: name, priority, queue, time_limit } => {
            let change = Change { priority: *priority, queue: queue.clone(), time_limit: time_limit.map(Some) };
            Input::Update { job: job(name)?, change, by, reason }
        }
        Item::Queue(script) => Input::ApplyQueue { queue: queue(script), by, reason },
        Item::DropQueue { name, to, leave } => {
            let jobs = match to {
                Some(to) => QueueJobs::Move { to: to.clone() },
                None if *leave => QueueJobs::Leave,
                None => QueueJobs::Refuse,
            };
            Input::DeleteQueue { name: name.clone(), jobs, by, reason }
        }
        Item::Pool { levels, sharing } => {
            Input::ApplyPool { pool: pool(sim.script.nodes, *levels, *sharing), by, reason }
        }
        Item::DropPool => Input::DeletePool { name: POOL.to_owned(), by, reason },
        Item::Policy { preemption, minimum_run, patience } => {
            let policy = Policy {
                preemption: *preemption,
                minimum_run: *minimum_run,
                patience: *patience,
                half_life: Span::minutes(2),
                ..Policy::default()
            };
            Input::SetPolicy { policy, by, reason }
        }
        Item::Pause { on } => Input::Pause { on: *on, by, reason },
        Item::Cordon { node, on } => Input::Cordon { node: format!("n{node}"), cordoned: *on, by, reason },
        Item::Drain { nodes, ahead, length, at_once, within } => Input::Drain(DrainOrder {
            nodes: nodes.iter().map(|n| format!("n{n}")).collect(),
            at: ahead.map(|a| now + a),
            length: *length,
            max_unavailable: *at_once,
            by_when: within.map(|w| now + w),
            by,
            reason,
        }),
        Item::CancelDrain { node: Some(node) } => {
            Input::CancelDrain { drain: DrainName::Node(format!("n{node}")), by, reason }
        }
        Item::CancelDrain { node: None } => {
            let first = sim.engine.as_ref()?.snapshot().drains.first()?.id;
            Input::CancelDrain { drain: DrainName::Rolling(first), by, reason }
        }
        Item::CancelWhen { .. }
        | Item::KillRank { .. }
        | Item::KillAgent { .. }
        | Item::LoseNode { .. }
        | Item::Break { .. }
        | Item::Others { .. }
        | Item::Close { .. }
        | Item::Label { .. }
        | Item::Clear
        | Item::Fault(_) => return None,
    })
}

/// Jobs that wait for what cannot be, whatever ends.
pub(super) fn hopeless(engine: &Engine<SimStore>) -> Vec<JobId> {
    let plan = engine.plan();
    let never = |c: &Constraint| match c {
        Constraint::Never { .. } | Constraint::After { impossible: true, .. } => true,
        Constraint::After { .. }
        | Constraint::Paused { .. }
        | Constraint::QueueHeld { .. }
        | Constraint::QueueGone { .. }
        | Constraint::Held { .. }
        | Constraint::Claimed { .. }
        | Constraint::Promised { .. }
        | Constraint::Preference { .. }
        | Constraint::QueueLimit { .. }
        | Constraint::QueueGuarantee { .. }
        | Constraint::Kept { .. }
        | Constraint::Environment { .. }
        | Constraint::BackOff { .. }
        | Constraint::Capacity { .. } => false,
    };
    plan.waiting.iter().filter(|w| never(&plan.constraints[w.constraint])).map(|w| w.job).collect()
}

fn sharing() -> TimeSharing {
    TimeSharing { enabled: true, minimum_run: Span::seconds(10), level: Span::seconds(5), ageing: Span::minutes(20) }
}

fn queue(script: &QueueScript) -> Queue {
    let quota = Quota { guarantee: script.guarantee, limit: script.limit, weight: 1 };
    let quotas = if script.guarantee == 0 && script.limit.is_none() {
        BTreeMap::new()
    } else {
        BTreeMap::from([(GPU_TYPE.to_owned(), quota)])
    };
    Queue {
        parent: script.parent.clone(),
        state: if script.held { QueueState::Held } else { QueueState::Open },
        quotas,
        lend: !script.keeps,
        borrow: !script.modest,
        reclaim: !script.patient,
        highest_priority: script.highest,
        time_sharing: script.sharing.then(sharing),
        ..Queue::open(&script.name)
    }
}

fn pool(nodes: u32, levels: bool, shares: bool) -> Pool {
    let path = |n: u32| vec![format!("l{}", (n - 1) / 2), format!("s{}", (n - 1) / 4)];
    let names = || ["leaf", "spine"].map(str::to_owned).to_vec();
    Pool {
        name: POOL.to_owned(),
        levels: if levels { names() } else { Vec::new() },
        time_sharing: shares.then(sharing),
        // The last node is nowhere.
        domains: if levels { (1..nodes).map(|n| (format!("n{n}"), path(n))).collect() } else { BTreeMap::new() },
    }
}

fn submission(job: &JobScript) -> Submission {
    let environment = job.environment.map(|e| ResolvedEnvironment {
        name: format!("env{e}"),
        version: 1,
        hash: format!("hash{e}"),
        python: String::new(),
        locks: Vec::new(),
        env: BTreeMap::new(),
    });
    let after = job.after.iter().map(|(name, on)| After {
        job: name.clone(),
        on: match on.as_str() {
            "succeeded" => Ending::Succeeded,
            "failed" => Ending::Failed,
            _ => Ending::Ended,
        },
    });
    Submission {
        namespace: "default".to_owned(),
        user: job.user.clone(),
        request: Request {
            queue: job.queue.clone(),
            priority: job.priority,
            ranks_per_node: job.ranks_per_node,
            time_limit: job.time_limit,
            preemptible: job.preemptible,
            failures_allowed: job.failures_allowed,
            checkpoint_every: job.saves_every,
            topology: Topology {
                require: job.require.clone(),
                prefer: job.prefer.clone(),
                max_wait: job.prefer.as_ref().map(|_| Span::seconds(20)),
            },
            ..Request::of(job.nodes, job.gpus_per_node)
        },
        provenance: Provenance { environment, ..Provenance::default() },
        spec: JobSpec {
            name: job.name.clone(),
            queue: job.queue.clone(),
            priority: "normal".to_owned(),
            environment: None,
            image: None,
            requirements: None,
            code: None,
            nodes: Nodes { min: job.nodes, max: job.nodes },
            gpus_per_node: job.gpus_per_node,
            gpu_type: Vec::new(),
            run: vec!["true".to_owned()],
            processes: Processes::PerNode,
            env: BTreeMap::new(),
            secrets: BTreeMap::new(),
            data: Vec::new(),
            outputs: Vec::new(),
            checkpoint: None,
            resources: None,
            topology: None,
            time_limit: None,
            preemptible: job.preemptible,
            retry: Retry { failures: job.failures_allowed },
            keep_on_failure: None,
            after: after.collect(),
            seed: None,
            notify: Vec::new(),
        },
    }
}
