//! A job: what it asks for and what is known of it.

use super::{EnvironmentHash, Estimate, JobId, JobKey, NodeId, Phase, Placement, Refusal};
use crate::health::decide::Past;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// What a job asks for, as far as decisions need it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The queue.
    pub queue: String,
    /// The priority; higher goes first.
    pub priority: i32,
    /// Workers, one a node.
    pub nodes: NodeRange,
    /// GPUs on each node, at least 1.
    pub gpus_per_node: u32,
    /// Accelerator types in order of preference; empty means any.
    pub gpu_types: Vec<String>,
    /// Ranks that each worker starts.
    pub ranks_per_node: u32,
    /// The greatest time in Running, over all attempts.
    pub time_limit: Option<Span>,
    /// Whether the plan may suspend it.
    pub preemptible: bool,
    /// Application failures after which it is still run again.
    pub failures_allowed: u32,
    /// Time between SIGTERM and SIGKILL at a graceful stop.
    pub grace: Span,
    /// How often it saves itself, as far as it says so.
    #[serde(default)]
    pub checkpoint_every: Option<Span>,
    /// Where in the topology the gang may be.
    #[serde(default)]
    pub topology: Topology,
    /// How long its GPUs are kept after it failed, for somebody to look around; not at all if none.
    #[serde(default)]
    pub keep_on_failure: Option<Span>,
}

/// Where in the topology a gang may be. Levels are those of the pool, or `node`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Topology {
    /// The level of which one domain must hold the whole gang.
    pub require: Option<String>,
    /// The level of which one domain should.
    pub prefer: Option<String>,
    /// How long to wait for what is preferred; none means not at all.
    pub max_wait: Option<Span>,
}

/// The level of a single node, which every pool has.
pub const NODE_LEVEL: &str = "node";

/// How many nodes a gang may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeRange {
    /// The least number, at least 1.
    pub min: u32,
    /// The greatest number.
    pub max: u32,
}

/// What jobs have in common that wait for the same reason. Jobs of one shape share one verdict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// GPUs on each node.
    pub gpus_per_node: u32,
    /// Workers.
    pub nodes: NodeRange,
    /// Accelerator types in order of preference.
    pub gpu_types: Vec<String>,
    /// Where in the topology.
    pub topology: Topology,
}

impl Request {
    /// A plain request of the default queue: so many nodes with so many GPUs each, preemptible, one rank a node.
    #[must_use]
    pub fn of(nodes: u32, gpus_per_node: u32) -> Request {
        Request {
            queue: "default".to_owned(),
            priority: 0,
            nodes: NodeRange { min: nodes, max: nodes },
            gpus_per_node,
            gpu_types: Vec::new(),
            ranks_per_node: 1,
            time_limit: None,
            preemptible: true,
            failures_allowed: 0,
            grace: Span::seconds(30),
            checkpoint_every: None,
            topology: Topology::default(),
            keep_on_failure: None,
        }
    }

    /// GPUs of the smallest gang.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.nodes.min.saturating_mul(self.gpus_per_node)
    }

    /// The shape of the request.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape {
            gpus_per_node: self.gpus_per_node,
            nodes: self.nodes,
            gpu_types: self.gpu_types.clone(),
            topology: self.topology.clone(),
        }
    }
}

/// A job that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The job's number.
    pub id: JobId,
    /// The job's name.
    pub key: JobKey,
    /// Who submitted it.
    pub user: String,
    /// What it asks for.
    pub request: Request,
    /// The environment it runs in, if it needs one made ready.
    pub environment: Option<EnvironmentHash>,
    /// When it was submitted; its place in the order, kept through every suspension.
    pub submitted: Time,
    /// Where it stands.
    pub phase: Phase,
    /// How many attempts have begun.
    pub attempts: u32,
    /// What ended earlier attempts, counted apart; only `failures` spends retries.
    pub counters: Counters,
    /// Time in Running, over the attempts that ended.
    pub ran: Span,
    /// The highest training step ever reached.
    pub best_step: Option<u64>,
    /// The last complete checkpoint that was seen.
    pub checkpoint: Option<Checkpoint>,
    /// Not to be started before this instant (back-off).
    pub not_before: Option<Time>,
    /// What refused its last start, if that is why it waits again.
    #[serde(default)]
    pub refused: Option<Refusal>,
    /// Starts since it ran last that were refused for what it asks for, see [`Refusal`].
    #[serde(default)]
    pub refusals: u32,
    /// Who keeps it from starting, if a person does.
    #[serde(default)]
    pub held: Option<String>,
    /// Jobs that must have ended before.
    #[serde(default)]
    pub after: Vec<Dependency>,
    /// GPUs promised to it while their holders leave.
    #[serde(default)]
    pub claim: Option<Claim>,
    /// That it is to give its GPUs up, and by when.
    #[serde(default)]
    pub eviction: Option<Eviction>,
    /// For whom it was suspended last.
    #[serde(default)]
    pub turned_out: Option<TurnedOut>,
    /// How often the plan took its GPUs, turns not counted.
    #[serde(default)]
    pub preempted: u32,
    /// GPU-time of the attempts that ended.
    #[serde(default)]
    pub gpu_time: Span,
    /// Whether it was seen to save itself when it was asked to stop.
    #[serde(default)]
    pub saves_on_request: bool,
    /// The last time from its placement to its first step, or to all ranks being up.
    #[serde(default)]
    pub startup: Option<Span>,
    /// When it was expected to start, at its submission, if it had to wait.
    #[serde(default)]
    pub estimate: Option<Estimate>,
    /// The nodes of its last attempt by worker, so that the next one keeps ranks where they were.
    #[serde(default)]
    pub last_nodes: Vec<NodeId>,
    /// What happened since its last new complete checkpoint, for what is done about the next fault.
    #[serde(default)]
    pub past: Past,
    /// Nodes that it leaves where others have room: it failed there since its last new checkpoint.
    #[serde(default)]
    pub avoid: Vec<NodeId>,
}

/// A job that must have ended before another may start.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Dependency {
    /// Which.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// How it must end.
    pub on: Ending,
    /// Whether it ended so; none while it lives.
    pub met: Option<bool>,
}

/// How a job may be asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ending {
    /// Every rank ended with 0.
    Succeeded,
    /// It failed or was cancelled.
    Failed,
    /// It ended in any way.
    Ended,
}

/// GPUs promised to a job while their present holders leave. Nobody else gets them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Which GPUs.
    pub placement: Placement,
    /// The jobs that leave for it, with the attempts that held GPUs of it.
    pub victims: Vec<(JobId, u32)>,
    /// By what right.
    pub cause: EvictionCause,
    /// Since when.
    pub since: Time,
}

/// Why a job must give its GPUs up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EvictionCause {
    /// A queue takes its guarantee back.
    Reclaim,
    /// A job of the same queue has a higher priority.
    Priority,
    /// Its turn is over.
    Turn,
    /// Its node is drained.
    Drain,
}

impl EvictionCause {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EvictionCause::Reclaim => "reclaim",
            EvictionCause::Priority => "priority",
            EvictionCause::Turn => "turn",
            EvictionCause::Drain => "drain",
        }
    }
}

/// That a running job is to give its GPUs up: after its next checkpoint, at the latest at the deadline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Eviction {
    /// Why.
    pub cause: EvictionCause,
    /// For which job; none for a drain.
    pub beneficiary: Option<Beneficiary>,
    /// Since when.
    pub since: Time,
    /// The latest moment.
    pub deadline: Time,
}

impl Eviction {
    /// Whether the job must leave now: it has saved itself since, saves itself when it is asked to stop, or had its time.
    #[must_use]
    pub fn is_due(&self, job: &Job, now: Time) -> bool {
        job.saves_on_request
            || self.deadline <= now
            || job.checkpoint.as_ref().is_some_and(|c| c.attempt == job.attempts && c.at >= self.since)
            || matches!(job.phase, Phase::Starting(_))
    }
}

/// A job that gets what another gives up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beneficiary {
    /// Its number.
    pub job: JobId,
    /// Its name.
    pub key: JobKey,
}

/// For whom a job was suspended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TurnedOut {
    /// Why.
    pub cause: EvictionCause,
    /// For which job; none for a drain.
    pub beneficiary: Option<JobKey>,
    /// When.
    pub at: Time,
}

impl Job {
    /// A job as it is submitted at `now`.
    #[must_use]
    pub fn submitted(
        id: JobId,
        key: JobKey,
        user: String,
        request: Request,
        environment: Option<EnvironmentHash>,
        now: Time,
    ) -> Job {
        Job {
            id,
            key,
            user,
            request,
            environment,
            submitted: now,
            phase: Phase::Queued,
            attempts: 0,
            counters: Counters::default(),
            ran: Span(0),
            best_step: None,
            checkpoint: None,
            not_before: None,
            refused: None,
            refusals: 0,
            held: None,
            after: Vec::new(),
            claim: None,
            eviction: None,
            turned_out: None,
            preempted: 0,
            gpu_time: Span(0),
            saves_on_request: false,
            startup: None,
            estimate: None,
            last_nodes: Vec::new(),
            past: Past::default(),
            avoid: Vec::new(),
        }
    }

    /// GPU-time that it had so far, over all attempts.
    #[must_use]
    pub fn attained(&self, now: Time) -> Span {
        let holds = self.phase.gang().map_or(0, |g| i64::from(g.gpu_count()) * now.since(g.placed).0);
        self.gpu_time + Span(holds)
    }
}

/// Four separate counters of how attempts ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counters {
    /// Failures of the application.
    pub failures: u32,
    /// Failures of nodes and agents.
    pub node_failures: u32,
    /// Suspensions by the plan or a person, and requeues the job asked for.
    pub suspensions: u32,
    /// Starts that never became ready.
    pub unready: u32,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The training step it holds.
    pub step: u64,
    /// Where it is, as the job named it.
    pub path: String,
    /// When it was complete.
    pub at: Time,
    /// The attempt that wrote it.
    pub attempt: u32,
}
