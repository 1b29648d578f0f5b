//! What the engine is told, and what it answers.

use crate::ports::{JobRecord, Observation};
use aviflow_api::spec::{JobSpec, Provenance};
use aviflow_core::lifecycle::Change;
use aviflow_core::model::{Ending, JobId, Policy, Pool, Queue, Request};
use aviflow_core::time::{Span, Time};
use serde::Serialize;
use std::sync::Arc;

/// What the engine is told.
///
/// What a person says is idempotent: said again, it changes nothing and is not recorded again.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "input")]
pub enum Input {
    /// The cluster saw something.
    Observe(Observation),
    /// A person submits a job.
    Submit(Box<Submission>),
    /// A person ends a job.
    Cancel {
        /// Which.
        job: JobId,
        /// Who.
        by: String,
    },
    /// A person takes a job's GPUs; it waits until it is released. One that waits is held.
    Suspend {
        /// Which.
        job: JobId,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person keeps a job that waits from starting.
    Hold {
        /// Which.
        job: JobId,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person lets a held or suspended job start again.
    Release {
        /// Which.
        job: JobId,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person changes what may be changed of a job.
    Update {
        /// Which.
        job: JobId,
        /// What.
        change: Change,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person makes or changes a queue.
    ApplyQueue {
        /// The whole queue, as it is from now on.
        queue: Queue,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person deletes a queue.
    DeleteQueue {
        /// Its name.
        name: String,
        /// What becomes of its jobs.
        jobs: QueueJobs,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person says how the nodes of a pool are joined, and whether its jobs take turns.
    ApplyPool {
        /// The whole document, as it is from now on. Nodes that it names and that are not there yet get
        /// their path when they come.
        pool: Pool,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person takes a pool's document away. Its nodes and what runs there stay.
    DeletePool {
        /// Its name.
        name: String,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person says how the platform decides.
    SetPolicy {
        /// The whole policy, as it is from now on.
        policy: Policy,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person pauses all starts, or lets them go on.
    Pause {
        /// Whether they are paused.
        on: bool,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person says whether a node takes new work. Uncordoning also ends a drain that is in effect.
    Cordon {
        /// The node's name.
        node: String,
        /// Whether it is cordoned.
        cordoned: bool,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A node passed its check: what was kept from work since it failed takes work again.
    Passed {
        /// The node's name.
        node: String,
        /// Who had it checked.
        by: String,
        /// Why.
        reason: Option<String>,
    },
    /// A person wants nodes to be empty.
    Drain(DrainOrder),
    /// A person calls a drain off.
    CancelDrain {
        /// Which.
        drain: DrainName,
        /// Who.
        by: String,
        /// Why.
        reason: Option<String>,
    },
}

/// A checked and resolved submission.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Submission {
    /// The namespace.
    pub namespace: String,
    /// Who.
    pub user: String,
    /// The document. The names in its `after` are resolved by the engine.
    pub spec: JobSpec,
    /// What it was resolved to.
    pub provenance: Provenance,
    /// What decisions need of it.
    pub request: Request,
}

/// What becomes of the live jobs of a queue that is deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum QueueJobs {
    /// There must be none.
    Refuse,
    /// They go to another queue.
    Move {
        /// Its name.
        to: String,
    },
    /// They stay: what runs goes on, on borrowed GPUs; what waits starts nothing until it is moved.
    Leave,
}

/// Nodes that are to be empty: all at once, in a window, or a few at a time.
///
/// With `max_unavailable` or `by_when` the drain is rolling: each node is taken at the cheapest moment
/// that is left, and has a number by which it can be cancelled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainOrder {
    /// Their names.
    pub nodes: Vec<String>,
    /// When it begins; none means now. By then the nodes are to be empty.
    pub at: Option<Time>,
    /// How long each node is away; none until somebody uncordons it.
    pub length: Option<Span>,
    /// How many may be away at once; with `by_when` alone, all.
    pub max_unavailable: Option<u32>,
    /// When all must have been taken; with `max_unavailable` alone each is taken when it is empty.
    pub by_when: Option<Time>,
    /// Who.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
}

/// Which drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum DrainName {
    /// That of a node, begun or to come.
    Node(String),
    /// A rolling one: it takes no more nodes; those that are away come back as planned.
    Rolling(u64),
}

/// What became of an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Done, durably.
    Done,
    /// Done, durably, with what the person should know of it.
    DoneWith(Vec<String>),
    /// A rolling drain goes on under this number, durably.
    Rolling {
        /// The number.
        drain: u64,
        /// What the person should know of it.
        warnings: Vec<String>,
    },
    /// The job was accepted under this record, durably.
    Submitted(Arc<JobRecord>),
    /// It was not done, and nothing was changed.
    Refused(Refusal),
}

impl Answer {
    /// Done, with warnings if there are any.
    pub(super) fn done(warnings: Vec<String>) -> Answer {
        if warnings.is_empty() { Answer::Done } else { Answer::DoneWith(warnings) }
    }
}

/// Why an input was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such live job.
    #[error("the job has ended or does not exist")]
    NoSuchJob,
    /// No such node.
    #[error("there is no node `{0}`")]
    NoSuchNode(String),
    /// No such queue.
    #[error("there is no queue `{queue}`; there are: {known}")]
    NoSuchQueue {
        /// The name.
        queue: String,
        /// What there is.
        known: String,
    },
    /// No such pool.
    #[error("pool `{0}` has no document")]
    NoSuchPool(String),
    /// No such rolling drain.
    #[error("there is no drain {0}; it is over, or was cancelled")]
    NoSuchDrain(u64),
    /// The node is not drained.
    #[error("node `{0}` is not drained")]
    NotDrained(String),
    /// The queue takes no jobs.
    #[error("queue `{0}` is draining and takes no new jobs; submit to another with `--queue`")]
    QueueDraining(String),
    /// The queue is not for this user.
    #[error("{user} may not submit to queue `{queue}`; use another, or have {user} added to its submitters")]
    NotSubmitter {
        /// The queue.
        queue: String,
        /// Who.
        user: String,
    },
    /// The queue allows no such priority.
    #[error("queue `{queue}` allows priorities up to {highest}, and {asked} was asked; ask for a lower one")]
    PriorityTooHigh {
        /// The queue.
        queue: String,
        /// The highest it allows.
        highest: i32,
        /// What was asked.
        asked: i32,
    },
    /// The pool can never hold it.
    #[error("the job can never start: it {0}; ask for less")]
    NeverFits(String),
    /// A job to wait for does not exist.
    #[error("`after` names the job `{0}`, which does not exist; submit that one first")]
    NoSuchDependency(String),
    /// A job to wait for has ended otherwise.
    #[error("the job can never start: it waits for `{name}` {}, which ended otherwise; run `{name}` again first", to_end(*.on))]
    DependencyFailed {
        /// Its name.
        name: String,
        /// How it should have ended.
        on: Ending,
    },
    /// The job runs, so nothing can be kept from starting.
    #[error("`{job}` is {phase} already; `aviflow suspend` takes its GPUs and keeps it from starting again")]
    NotWaiting {
        /// Its name.
        job: String,
        /// Its phase.
        phase: &'static str,
    },
    /// The time limit would be over already.
    #[error("`{job}` has run for {ran} already, which is more than {limit}; set more, or cancel it")]
    TimeLimitPassed {
        /// Its name.
        job: String,
        /// How long it ran.
        ran: Span,
        /// The limit that was asked.
        limit: Span,
    },
    /// The parent does not exist.
    #[error("queue `{queue}` is to be below `{parent}`, which does not exist; make that one first")]
    NoSuchParent {
        /// The queue.
        queue: String,
        /// The parent.
        parent: String,
    },
    /// The tree would have a cycle.
    #[error("queue `{queue}` cannot be below `{parent}`, which is below `{queue}` itself; name another parent")]
    QueueCycle {
        /// The queue.
        queue: String,
        /// The parent.
        parent: String,
    },
    /// The limit is below the guarantee.
    #[error(
        "queue `{queue}` has a limit of {limit} GPUs of {gpu_type}, below its guarantee of {guarantee}; raise the limit, or lower the guarantee"
    )]
    LimitBelowGuarantee {
        /// The queue.
        queue: String,
        /// The accelerator type.
        gpu_type: String,
        /// The limit.
        limit: u32,
        /// The guarantee.
        guarantee: u32,
    },
    /// The queues below one are guaranteed more than itself.
    #[error(
        "the queues below `{parent}` would be guaranteed {children} GPUs of {gpu_type}, and `{parent}` itself only {guarantee}; raise that, or lower theirs"
    )]
    GuaranteeAboveParent {
        /// The queue above.
        parent: String,
        /// The accelerator type.
        gpu_type: String,
        /// Its guarantee.
        guarantee: u32,
        /// That of those below it, added up.
        children: u64,
    },
    /// The queues below one are guaranteed more than it may use.
    #[error(
        "the queues below `{parent}` would be guaranteed {children} GPUs of {gpu_type}, above its limit of {limit}; raise the limit, or lower theirs"
    )]
    GuaranteeAboveLimit {
        /// The queue above.
        parent: String,
        /// The accelerator type.
        gpu_type: String,
        /// Its limit.
        limit: u32,
        /// The guarantee of those below it, added up.
        children: u64,
    },
    /// The queue has others below it.
    #[error("queue `{queue}` has others below it ({}); delete them first, or give them another parent", .children.join(", "))]
    QueueHasChildren {
        /// The queue.
        queue: String,
        /// Those below it.
        children: Vec<String>,
    },
    /// The queue has live jobs.
    #[error(
        "queue `{queue}` has {total} jobs that have not ended ({}); move them with `--move-to QUEUE`, or leave them with `--leave`: what runs goes on, what waits stays",
        shown(.jobs, *.total)
    )]
    QueueHasJobs {
        /// The queue.
        queue: String,
        /// Names of the first of them, those that run before those that wait.
        jobs: Vec<String>,
        /// How many there are.
        total: usize,
    },
    /// There must be a queue.
    #[error("`{0}` is the only queue; make another first")]
    LastQueue(String),
    /// The document says something impossible.
    #[error("{object}: {why}")]
    BadDocument {
        /// Which, such as `queue nlp`.
        object: String,
        /// What, and what to do.
        why: String,
    },
    /// The drain asks for something impossible.
    #[error("{0}")]
    BadDrain(String),
    /// The node is part of a rolling drain.
    #[error(
        "node `{node}` is part of drain {drain}; cancel that first, or cordon the node to keep new work away at once"
    )]
    InDrain {
        /// The node.
        node: String,
        /// The drain.
        drain: u64,
    },
}

fn to_end(on: Ending) -> &'static str {
    match on {
        Ending::Succeeded => "to succeed",
        Ending::Failed => "to fail",
        Ending::Ended => "to end",
    }
}

fn shown(jobs: &[String], total: usize) -> String {
    let more = total.saturating_sub(jobs.len());
    let list = jobs.join(", ");
    if more == 0 { list } else { format!("{list} and {more} more") }
}
