//! What the processes of a running job are doing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Asks what the processes of a job are doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AskStacks {
    /// Of this rank's processes alone.
    #[serde(default)]
    pub rank: Option<u32>,
}

/// What the processes of a job are doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stacks {
    /// The attempt.
    pub attempt: u32,
    /// Ranks that do the same together: the fewest first, as the odd one out is often why the others wait.
    pub groups: Vec<StackGroup>,
    /// All processes, by worker.
    pub workers: Vec<WorkerStacks>,
    /// Workers that could not be asked.
    pub missing: Vec<MissingStacks>,
}

/// What the processes of a job were doing when it stood still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TakenStacks {
    /// When they were taken.
    pub at: i64,
    /// The epoch of the attempt.
    pub epoch: u32,
    /// The stacks.
    pub stacks: Stacks,
}

/// Ranks that do the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackGroup {
    /// The ranks, in order.
    pub ranks: Vec<u32>,
    /// The signature that their main threads have in common; none without Python.
    pub signature: Option<String>,
    /// The frames of Python's main thread, the most recent call first.
    pub frames: Vec<StackFrame>,
    /// The main thread as the kernel sees it, of the first of the ranks.
    pub thread: Option<StackThreads>,
    /// Why something is missing, of the first of the ranks.
    pub note: Option<String>,
}

/// A worker that could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingStacks {
    /// The worker.
    pub worker: u32,
    /// Why.
    pub reason: String,
}

/// The processes of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerStacks {
    /// The worker.
    #[serde(default)]
    pub worker: u32,
    /// By process id.
    pub processes: Vec<ProcessStacks>,
    /// Processes that were left out as there are too many.
    pub omitted: usize,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStacks {
    /// Its id, as its own container counts.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// The rank that it belongs to; none of a launcher.
    pub rank: Option<u32>,
    /// Whether it is the rank itself, and not a process that the rank started.
    pub main: bool,
    /// The beginning of its command line.
    pub command: String,
    /// The stack of its Python's main thread.
    pub python: Vec<StackPython>,
    /// 16 hexadecimal digits that are the same for all whose main thread does the same: of the SHA-256 of its frames,
    /// each as `FILE:LINE FUNCTION` and a newline.
    pub signature: Option<String>,
    /// Its threads as the kernel sees them, those that do the same together: the main thread's first, then most first.
    pub threads: Vec<StackThreads>,
    /// Why something is missing.
    pub note: Option<String>,
}

/// The stack of a thread of Python.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackPython {
    /// `threading.get_ident()`, in hexadecimal.
    pub id: String,
    /// Its name, where the version of Python says it.
    pub name: Option<String>,
    /// Whether it is the main thread.
    pub main: bool,
    /// Its frames, the most recent call first.
    pub frames: Vec<StackFrame>,
    /// Whether there are more frames.
    pub cut: bool,
}

/// A frame of Python.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackFrame {
    /// The file, relative to the job's folder where it is below that.
    pub file: String,
    /// The line; 0 if Python does not know it.
    pub line: u32,
    /// The function.
    pub function: String,
}

/// Threads that the kernel sees doing the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackThreads {
    /// How many.
    pub count: usize,
    /// The name of one of them, the main thread's if that is among them.
    pub name: String,
    /// Whether the main thread is among them.
    pub main: bool,
    /// R runs, S sleeps, D waits for a device and cannot be killed, T is stopped; others as in proc(5).
    pub state: String,
    /// The system call that they are in, by name or number; none if they run, or it may not be seen.
    pub call: Option<String>,
    /// The function of the kernel in which they wait; none if they run, or it may not be seen.
    pub wait: Option<String>,
    /// The kernel's stack, the most recent call first; empty where the agent is not root.
    pub kernel: Vec<String>,
}
