//! What the processes of a worker are doing, as [`super::Channel::Stacks`] tells it.

use serde::{Deserialize, Serialize};

/// The processes of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerStacks {
    /// By process id.
    pub processes: Vec<ProcessStacks>,
    /// Processes that were left out as there are too many.
    pub omitted: usize,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStacks {
    /// Its id, as its own container counts.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// The rank that it belongs to: its variable `RANK`, or that of the process that the agent started where no process
    /// of the worker has this variable. None of a launcher.
    pub rank: Option<u32>,
    /// Whether it is the rank itself, and not a process that the rank started.
    pub main: bool,
    /// Its command line, cut at a few hundred bytes.
    pub command: String,
    /// The stack of its Python's main thread; none if it has none, or did not answer (`note` says which).
    pub python: Vec<PythonThread>,
    /// A short hash of what the main thread of Python is doing, the same wherever it does the same.
    pub signature: Option<String>,
    /// Its threads as the kernel sees them, those that do the same together, most first.
    pub threads: Vec<Threads>,
    /// Why something is missing.
    pub note: Option<String>,
}

/// The stack of a thread of Python.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PythonThread {
    /// `threading.get_ident()`, in hexadecimal.
    pub id: String,
    /// Its name, where the version of Python says it.
    pub name: Option<String>,
    /// Whether it is the main thread.
    pub main: bool,
    /// Its frames, the most recent call first.
    pub frames: Vec<Frame>,
    /// Whether there are more frames, which Python did not say.
    pub cut: bool,
}

/// A frame of Python.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Frame {
    /// The file, relative to the worker's folder where it is below that.
    pub file: String,
    /// The line; 0 if Python does not know it.
    pub line: u32,
    /// The function.
    pub function: String,
}

/// Threads that the kernel sees doing the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Threads {
    /// How many.
    pub count: usize,
    /// The name of one of them, the main thread's if that is among them.
    pub name: String,
    /// Whether the main thread is among them.
    pub main: bool,
    /// The state as in `/proc/PID/stat`: R runs, S sleeps, D waits for a device and cannot be killed, T is stopped.
    pub state: String,
    /// The system call that they are in, by name or number; none if they run, or it may not be seen.
    pub call: Option<String>,
    /// The function of the kernel in which they wait; none if they run, or it may not be seen.
    pub wait: Option<String>,
    /// The kernel's stack, the most recent call first; empty where the agent is not root.
    pub kernel: Vec<String>,
}
