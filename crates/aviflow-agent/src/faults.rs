//! Why a rank ended, by what it left: its last lines, torchrun's error file, its exit. Pure.
//!
//! [`classify`] goes by one table of what programs really print (`table`). It tells a cause from what may only be
//! the effect of another rank's end: a collective that a dead peer broke fails on every other rank, and often first
//! there. It judges one rank and knows nothing of the others; who puts their faults together decides.
//!
//! Invariant: a rank that ended with 0 has no fault.

mod table;

use crate::sys::Exit;
use serde::{Deserialize, Serialize};

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Class {
    /// The memory of a GPU was full.
    GpuOutOfMemory,
    /// A GPU or its links failed: an ECC error, a fault of NVLink, a GPU that is gone or not initialized.
    GpuHardware,
    /// A kernel on a GPU failed: an illegal access, a launch that failed.
    GpuError,
    /// An assertion in a kernel, such as an index out of range.
    GpuAssert,
    /// A collective operation did not end in time.
    CollectiveTimeout,
    /// The library of collective operations failed, and says nothing of a peer.
    CollectiveError,
    /// A peer closed its connection or could not be reached.
    PeerGone,
    /// The fabric failed under a transfer.
    FabricError,
    /// The host's memory was full.
    HostOutOfMemory,
    /// A disk was full, or a quota of it.
    DiskFull,
    /// `/dev/shm` was full.
    SharedMemoryFull,
    /// The loss or a gradient is not a number.
    NotANumber,
    /// A module or a library is missing or does not fit.
    ImportFailed,
    /// Somebody refused who asked: a gated model, a key that is wrong or missing.
    AccessDenied,
    /// Something on the network, such as a hub of models, was not reached.
    NetworkError,
    /// A port was taken.
    AddressInUse,
    /// A checkpoint or a file of weights could not be read as one.
    DamagedCheckpoint,
    /// SIGSEGV.
    SegmentationFault,
    /// SIGILL: a program for another processor.
    IllegalInstruction,
    /// SIGBUS, where nothing says that `/dev/shm` was full.
    BusError,
    /// SIGABRT: an assertion or an exception that nobody caught.
    Aborted,
    /// SIGKILL by somebody else than the agent.
    Killed,
    /// It was asked to end.
    Stopped,
    /// An exception that nobody caught, of no kind above.
    Exception,
}

/// Who has to do something about it, where that is evident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Whose {
    /// The training: its code, its settings, what it asked for.
    Application,
    /// The node: its GPUs, its links.
    Node,
}

/// Why a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// Of what kind.
    pub class: Class,
    /// Whose it is, where that is evident.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whose: Option<Whose>,
    /// Whether it may only be the effect of another rank's end, or of the agent's stop.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub consequence: bool,
    /// The process that failed first, by its rank in the framework's world, where torchrun names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torch_rank: Option<u32>,
    /// The line that tells, at most [`LONGEST_LINE`] bytes; empty if no line does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub line: String,
}

/// The longest line that a fault keeps, in bytes.
pub const LONGEST_LINE: usize = 500;

/// Lines between a telling error and an exception that followed from it: a traceback or two.
const NEAR: usize = 60;

/// What a rank left.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// How it ended.
    pub exit: Exit,
    /// Its last lines of output, oldest first, without control characters.
    pub lines: &'a [&'a str],
    /// What torchrun left in its error file: the exception of the process that failed first.
    pub error: &'a [String],
    /// Whether the kernel killed a process of the worker's memory group for lack of memory, since the rank started.
    pub oom_kill: bool,
    /// Whether the agent had begun to stop the ranks.
    pub stopping: bool,
}

/// The fault that a rank ended by; none if it ended with 0.
#[must_use]
pub fn classify(evidence: &Evidence<'_>) -> Option<Fault> {
    let Evidence { exit, lines, error, oom_kill, stopping } = *evidence;
    if exit.code == 0 {
        return None;
    }
    let told: Vec<&str> = error.iter().map(String::as_str).collect();
    let signal = exit.signal.or_else(|| torchrun_signal(lines));
    let killed = signal == Some(libc::SIGKILL);
    let mut fault = if killed && oom_kill {
        of(Class::HostOutOfMemory, Some(Whose::Application), false, "")
    } else {
        // torchrun's file is of the process that failed first; the lines are of all of them.
        let (first, then) = (read(&told), read(lines));
        let cause = first.clone().filter(|f| !f.consequence && f.class != Class::Exception);
        let cause = cause.or_else(|| then.clone().filter(|f| !f.consequence && f.class != Class::Exception));
        let cause = cause.or_else(|| first.clone().filter(|f| !f.consequence));
        let by_signal = signal.map(|signal| of_signal(signal, stopping));
        // A signal says more than an exception that somebody else raised about it.
        let by_signal = by_signal.filter(|f| f.class != Class::Stopped && f.class != Class::Aborted);
        cause
            .or(by_signal)
            .or_else(|| then.clone().filter(|f| !f.consequence))
            .or(first)
            .or(then)
            .or_else(|| signal.map(|signal| of_signal(signal, stopping)))?
    };
    fault.torch_rank = root_cause(lines);
    // What happens after a stop began may be its effect, whatever it looks like.
    fault.consequence |= stopping;
    Some(fault)
}

fn of(class: Class, whose: Option<Whose>, consequence: bool, line: &str) -> Fault {
    let mut end = line.len().min(LONGEST_LINE);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    Fault { class, whose, consequence, torch_rank: None, line: line[..end].trim().to_owned() }
}

fn of_signal(signal: i32, stopping: bool) -> Fault {
    let (class, whose) = match signal {
        libc::SIGSEGV => (Class::SegmentationFault, None),
        libc::SIGILL => (Class::IllegalInstruction, Some(Whose::Application)),
        libc::SIGBUS => (Class::BusError, None),
        libc::SIGABRT => (Class::Aborted, None),
        libc::SIGKILL if !stopping => (Class::Killed, None),
        _ => (Class::Stopped, None),
    };
    of(class, whose, class == Class::Stopped, "")
}

/// The fault that lines tell: the last cause, or the last effect if there is no cause.
fn read(lines: &[&str]) -> Option<Fault> {
    let mut cause: Option<(usize, Fault)> = None;
    let mut exception: Option<(usize, Fault)> = None;
    let mut effect = None;
    for (at, line) in lines.iter().enumerate() {
        if let Some((class, whose, consequence)) = table::find(line) {
            let fault = of(class, whose, consequence, line);
            if consequence { effect = Some(fault) } else { cause = Some((at, fault)) }
        } else if is_exception(line) {
            exception = Some((at, of(Class::Exception, Some(Whose::Application), false, line)));
        }
    }
    match (cause, exception) {
        // Long before the exception, it was dealt with.
        (Some((at, _)), Some((then, exception))) if then > at + NEAR => Some(exception),
        (Some((_, cause)), _) => Some(cause),
        // An exception that is raised about a peer's end does not name it in its last line.
        (None, Some((_, exception))) => Some(effect.unwrap_or(exception)),
        (None, None) => effect,
    }
}

/// The last line of a Python traceback: `package.SomeError: message`, also behind `[rank3]:`.
fn is_exception(line: &str) -> bool {
    let line = match line.split_once("]: ") {
        Some((prefix, rest)) if prefix.starts_with('[') && prefix.len() < 20 => rest,
        _ => line,
    };
    let name = line.split_once(':').map_or(line, |(name, _)| name);
    let last = name.rsplit('.').next().unwrap_or_default();
    let known = ["Error", "Exception", "Interrupt", "Exit", "Warning"].iter().any(|end| last.ends_with(end));
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'.';
    known
        && !last.ends_with("Warning")
        && line.len() > name.len()
        && last.starts_with(|c: char| c.is_ascii_uppercase())
        && name.bytes().all(word)
}

/// The signal of the process that failed first, as torchrun tells it: `exitcode  : -11 (pid: 4242)`.
fn torchrun_signal(lines: &[&str]) -> Option<i32> {
    lines.iter().rev().find_map(|line| {
        let rest = line.trim_start().strip_prefix("exitcode")?.trim_start().strip_prefix(':')?;
        let digits = rest.trim_start().strip_prefix('-')?;
        digits.split_once(' ').map_or(digits, |(digits, _)| digits).parse().ok()
    })
}

/// The rank of the process that failed first: `rank      : 3 (local_rank: 3)`, below `Root Cause`.
fn root_cause(lines: &[&str]) -> Option<u32> {
    let at = lines.iter().rposition(|line| line.starts_with("Root Cause"))?;
    lines[at..].iter().find_map(|line| {
        let rest = line.trim_start().strip_prefix("rank")?.trim_start().strip_prefix(':')?.trim_start();
        rest.split_once(' ').map_or(rest, |(digits, _)| digits).parse().ok()
    })
}

#[cfg(test)]
mod tests;
