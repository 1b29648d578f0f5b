//! What REST speaks. The command line, the page, Python and Kubernetes' objects
//! show the same fields under the same names.
//!
//! Instants are milliseconds since the Unix epoch, spans are milliseconds, GPU
//! time is GPU-milliseconds; all are integers.

mod actions;
mod channel;
mod drain;
mod observed;
mod pool;
mod queue;
mod stacks;
mod top;
mod waiting;

pub use actions::*;
pub use channel::*;
pub use drain::*;
pub use observed::*;
pub use pool::*;
pub use queue::*;
pub use stacks::*;
pub use top::*;
pub use waiting::*;

use crate::spec::{JobSpec, Provenance};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A submission, or a question what would happen (`/v1/plan`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Submit {
    /// The canonical document.
    pub spec: JobSpec,
    /// What the client resolved it to.
    #[serde(default)]
    pub provenance: Provenance,
}

/// An error: what happened, and what to do next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("{message}")]
pub struct ApiError {
    /// A stable word for programs, such as `noSuchJob`.
    pub code: String,
    /// What happened.
    pub message: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

impl ApiError {
    /// An error without help.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>) -> ApiError {
        ApiError { code: code.to_owned(), message: message.into(), help: None }
    }

    /// The same with what to do next.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> ApiError {
        self.help = Some(help.into());
        self
    }
}

/// The error `missingObjects`: upload these, then submit again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingObjects {
    /// As for every error.
    #[serde(flatten)]
    pub error: ApiError,
    /// SHA-256 of each object that is not there.
    pub missing: Vec<String>,
}

/// What serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServerInfo {
    /// The version of the program.
    pub version: String,
    /// `local` or `kubernetes`.
    pub body: String,
    /// The process, on its own machine.
    pub pid: u32,
    /// When it started.
    pub started: i64,
    /// The term under which it holds the store.
    pub term: u64,
    /// The number of the last commit.
    pub generation: u64,
    /// Where its state lives.
    pub home: String,
    /// Nodes of the pool.
    pub nodes: u32,
    /// GPUs of the pool.
    pub gpus: u32,
    /// Live jobs by phase.
    pub jobs: BTreeMap<String, u32>,
    /// Who paused all starts, if somebody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
}

/// The answer to a stop: the control plane ends, trainings do not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StopAnswer {
    /// Jobs that hold GPUs and go on, as namespace/name.
    pub running: Vec<String>,
    /// Jobs that wait, and wait on until a control plane is there again.
    pub waiting: u32,
}

/// The name of a phase.
pub type PhaseName = String;

/// A job in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobSummary {
    /// The number.
    pub id: u64,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// Who submitted it.
    pub user: String,
    /// The queue.
    pub queue: String,
    /// The priority's name.
    pub priority: String,
    /// Queued, Starting, Running, Suspending, Stopping, Succeeded, Failed or Cancelled.
    pub phase: PhaseName,
    /// How many attempts have begun.
    pub attempts: u32,
    /// Nodes it has, or asks for at least.
    pub nodes: u32,
    /// GPUs on each node.
    pub gpus_per_node: u32,
    /// Names of the nodes it holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on: Vec<String>,
    /// When it was submitted.
    pub submitted: i64,
    /// When its present attempt's ranks were up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_since: Option<i64>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<i64>,
    /// Time in Running so far, over all attempts.
    pub ran: i64,
    /// Why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// The last reported progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<ProgressPoint>,
    /// Why it failed, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The exit code that `aviflow run` ends with, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

/// A list of jobs, newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobList {
    /// The jobs.
    pub jobs: Vec<JobSummary>,
    /// Give this as `after` for the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// Everything about one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobDetail {
    /// As in the list.
    #[serde(flatten)]
    pub summary: JobSummary,
    /// The document as submitted.
    pub spec: JobSpec,
    /// What it was resolved to.
    pub provenance: Provenance,
    /// What ended earlier attempts.
    pub counters: JobCounters,
    /// The gang it has now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WorkerInfo>,
    /// The last complete checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointInfo>,
    /// Who keeps it from starting, if a person does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<String>,
    /// The jobs that it waits for or waited for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<AfterInfo>,
    /// GPUs that are promised to it while their holders leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimInfo>,
    /// That it is to give its GPUs up, and by when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionInfo>,
    /// For whom the plan suspended it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turned_out: Option<TurnedOutInfo>,
    /// Where it was turned out and waits: when it will probably run again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_back: Option<i64>,
    /// GPU-milliseconds by ledger state, up to now.
    pub gpu_time: BTreeMap<String, i64>,
    /// What the training reported: data hashes, framework, results (`result.NAME`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub facts: BTreeMap<String, String>,
    /// The last lines of the rank that failed first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_lines: Vec<String>,
    /// What happened.
    pub timeline: Vec<TimelineEntry>,
    /// One hash over everything that was submitted; every attempt reports the same.
    pub hash: String,
    /// What the attempts reported, in order: the same hash, with the code's taken of what each had unpacked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempt_hashes: Vec<AttemptHash>,
}

/// The hash of what an attempt ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptHash {
    /// The attempt.
    pub attempt: u32,
    /// The hash. An attempt has more than one only if its workers found different things.
    pub hash: String,
    /// Whether it is another one than the first attempt's.
    pub differs: bool,
}

/// What ended earlier attempts; only `failures` spends retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobCounters {
    /// Failures of the application.
    pub failures: u32,
    /// Nodes or agents that were lost.
    pub node_failures: u32,
    /// Suspensions by the plan or a person.
    pub suspensions: u32,
    /// Starts at which not every worker was ready in time.
    pub unready: u32,
}

/// One worker of a gang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerInfo {
    /// Its number.
    pub worker: u32,
    /// Its node.
    pub node: String,
    /// Its GPU slots there.
    pub slots: Vec<u32>,
    /// launched, ready, up or gone.
    pub state: String,
    /// Its ranks.
    pub ranks: Vec<u32>,
    /// Ranks that ended, with their exit codes.
    pub exits: BTreeMap<u32, i32>,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointInfo {
    /// The step.
    pub step: u64,
    /// Where, as the training named it.
    pub path: String,
    /// When it was complete.
    pub at: i64,
    /// The attempt that wrote it.
    pub attempt: u32,
}

/// An entry of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    /// When.
    pub at: i64,
    /// The attempt; 0 before the first.
    pub attempt: u32,
    /// A word for programs, such as `placed`.
    pub kind: String,
    /// The sentence.
    pub text: String,
}

/// A point of progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProgressPoint {
    /// When.
    pub at: i64,
    /// The attempt.
    pub attempt: u32,
    /// The rank.
    pub rank: u32,
    /// The step.
    pub step: u64,
    /// How many steps there will be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Named values; absent is not zero.
    pub values: BTreeMap<String, f64>,
    /// Values that were no finite number, as text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub odd: BTreeMap<String, String>,
}

/// A point of a series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NumberedPoint {
    /// Its number, from 1 in the order in which points came; numbers are left out where points were thinned.
    pub number: u64,
    /// The point.
    #[serde(flatten)]
    pub point: ProgressPoint,
}

/// A line of output; a stream of these is newline-delimited JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LogLine {
    /// When.
    pub at: i64,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
    /// The rank.
    pub rank: u32,
    /// `stdout`, `stderr` or `agent`.
    pub stream: String,
    /// The text, without its newline; what looks like a key is masked.
    pub text: String,
}

/// What follows a job: server-sent events, each with this as its data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "type")]
pub enum JobEvent {
    /// The job as it is now; sent first and whenever it changed.
    Job {
        /// The job.
        job: Box<JobSummary>,
    },
    /// Something was added to the timeline; those from before are sent first.
    Timeline {
        /// What.
        entry: TimelineEntry,
    },
    /// Progress.
    Progress {
        /// The point.
        point: ProgressPoint,
    },
    /// Lines of output, in the order of time.
    Log {
        /// The lines.
        lines: Vec<LogLine>,
    },
    /// The job has ended and everything before was sent; the stream ends.
    End {
        /// The exit code for `aviflow run`.
        exit_code: i32,
    },
}

/// Something that changed anywhere: server-sent events, each with this as its data. A new stream begins with
/// everything live.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum ChangeEvent {
    /// A job is new, or in another phase, attempt or state than before.
    Job {
        /// The job as it is now.
        job: Box<JobSummary>,
    },
    /// GPUs of a node changed hands, or the node takes or refuses work.
    Node {
        /// The node as it is now.
        node: Box<NodeInfo>,
    },
    /// Everything that was there when the stream began has been sent.
    Ready,
}

/// A command to run inside a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Exec {
    /// The command and its arguments.
    pub argv: Vec<String>,
    /// The rank whose variables and node it gets; 0 if none is said.
    #[serde(default)]
    pub rank: Option<u32>,
    /// Standard input, base64.
    #[serde(default)]
    pub stdin: String,
}

/// Output of a command; a stream of these is newline-delimited JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum ExecFrame {
    /// Standard output, base64.
    Stdout {
        /// The bytes.
        data: String,
    },
    /// Standard error, base64.
    Stderr {
        /// The bytes.
        data: String,
    },
    /// The end.
    Exit {
        /// The exit code.
        code: i32,
    },
    /// It could not be run.
    Failed {
        /// Why.
        reason: String,
    },
}

/// What would happen to a submission.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlanAnswer {
    /// The name it would get.
    pub name: String,
    /// Whether it would start at once.
    pub starts_now: bool,
    /// On which nodes, if so.
    pub on: Vec<String>,
    /// Why not, if not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Jobs that would be moved for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<MoveInfo>,
    /// Whether its environment is ready.
    pub environment_ready: bool,
    /// The document with every default filled in.
    pub spec: JobSpec,
}
