//! The classes of faults, as one table: whose fault each is as a rule, how bad, and what to do next.
//!
//! The table says what is true of a class. What is done about one fault, with what came before it, is in
//! [`super::decide`].

use serde::{Deserialize, Serialize};
use std::fmt;

/// A class of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// A rank ended with a code that is not 0.
    Exit,
    /// A signal that the platform did not send ended a rank.
    Signal,
    /// The memory of the node, or of the container, was full.
    HostOutOfMemory,
    /// The memory of a GPU was full.
    GpuOutOfMemory,
    /// An error of CUDA or of a library on it.
    Cuda,
    /// An error of NCCL that is not only a peer's death.
    Nccl,
    /// A collective did not end in the time that its process group allows.
    NcclTimeout,
    /// A rank ended since another did: never a cause.
    PeerLost,
    /// No step for longer than the steps explain.
    Hang,
    /// GPUs report full utilization at the power of idle ones: they wait in a kernel, mostly of a collective.
    BusyIdle,
    /// The loss is no number.
    NotANumber,
    /// The loss rose far above its noise, and stayed there.
    LossSpike,
    /// A rank needs longer for its own share of a step than the others.
    Straggler,
    /// A disk is full, or a quota on it.
    DiskFull,
    /// A line of the NVIDIA driver in the kernel's log, see [`super::xid`].
    Xid,
    /// A port of the fabric went down.
    LinkDown,
    /// A port of the fabric has too many symbol errors.
    LinkErrors,
    /// A node, or the agent on it, is gone.
    NodeLost,
    /// A device is reported as broken, or lost its memory's integrity.
    DeviceUnhealthy,
    /// It fails again and again before it gets anywhere.
    CrashLoop,
}

/// Whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Blame {
    /// The training's: its code, its configuration or its data.
    Application,
    /// A node's.
    Node,
    /// A GPU's.
    Gpu,
    /// The network's between nodes.
    Network,
    /// The platform's, or of what it relies on.
    Platform,
    /// Nobody can tell from this alone. The node is not blamed.
    Unknown,
}

impl Blame {
    /// The word for it, after "blames".
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Blame::Application => "the application",
            Blame::Node => "the node",
            Blame::Gpu => "the GPU",
            Blame::Network => "the network",
            Blame::Platform => "the platform",
            Blame::Unknown => "nobody",
        }
    }

    /// Whether a machine is blamed, and no person's work.
    #[must_use]
    pub fn is_hardware(self) -> bool {
        match self {
            Blame::Node | Blame::Gpu | Blame::Network => true,
            Blame::Application | Blame::Platform | Blame::Unknown => false,
        }
    }
}

/// How bad a fault is for the gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// It goes on, as well as before.
    Notice,
    /// It goes on, worse than it should.
    Degraded,
    /// The gang cannot go on as it is.
    Fatal,
}

/// What mends a fault of a class when it is the first one, where that can be said of the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Remedy {
    /// Nothing is done; people see it.
    Watch,
    /// To run again; more is changed each time that it did not help.
    Restart,
    /// To run elsewhere: what is at fault is not used again until it was checked.
    Elsewhere,
    /// Running again would fail in the same way: a person is needed.
    Person,
}

/// What is known of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The class.
    pub kind: Kind,
    /// Its name, as people read it.
    pub name: &'static str,
    /// Whose fault it is, as long as nothing else is known.
    pub blame: Blame,
    /// How bad it is.
    pub severity: Severity,
    /// What mends it.
    pub remedy: Remedy,
    /// What a person may do next, in one sentence.
    pub next: &'static str,
}

/// All classes, in the order of [`Kind`].
///
/// An error of CUDA blames nobody: above 2,000 GPUs, 41 of 62 illegal memory accesses came from the user's code
/// (`ByteRobust`, SOSP 2025).
pub const FAULTS: [Fault; 20] = [
    row(
        Kind::Exit,
        "process exit",
        Blame::Application,
        Severity::Fatal,
        Remedy::Restart,
        "read the last lines of the rank that failed first",
    ),
    row(
        Kind::Signal,
        "signal",
        Blame::Application,
        Severity::Fatal,
        Remedy::Restart,
        "look for what sent the signal: a crash in native code (SIGSEGV, SIGABRT), or another person or program",
    ),
    row(
        Kind::HostOutOfMemory,
        "host out of memory",
        Blame::Application,
        Severity::Fatal,
        Remedy::Restart,
        "raise resources.memoryPerGpu, or let fewer data loader workers hold less",
    ),
    row(
        Kind::GpuOutOfMemory,
        "GPU out of memory",
        Blame::Application,
        Severity::Fatal,
        Remedy::Restart,
        "take a smaller micro-batch, more recomputation or more sharding",
    ),
    row(
        Kind::Cuda,
        "CUDA error",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "if it comes again on other nodes, run with CUDA_LAUNCH_BLOCKING=1 to see which kernel fails",
    ),
    row(
        Kind::Nccl,
        "NCCL error",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "run with NCCL_DEBUG=INFO and look at the network of the rank that is named",
    ),
    row(
        Kind::NcclTimeout,
        "NCCL timeout",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "look at the rank that did not enter the collective: `aviflow stacks JOB --last` shows what it did",
    ),
    row(
        Kind::PeerLost,
        "lost its peer",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "look at the rank that failed first: this one only noticed",
    ),
    row(
        Kind::Hang,
        "hang",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "compare the stacks of the ranks: `aviflow stacks JOB --last` shows them",
    ),
    row(
        Kind::BusyIdle,
        "full utilization at idle power",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Restart,
        "compare the stacks of the ranks: one of them is not in the collective for which the others wait",
    ),
    row(
        Kind::NotANumber,
        "loss is not a number",
        Blame::Application,
        Severity::Degraded,
        Remedy::Person,
        "go on from a checkpoint before the first such step, with a lower learning rate or without that batch",
    ),
    row(
        Kind::LossSpike,
        "loss spike",
        Blame::Application,
        Severity::Notice,
        Remedy::Watch,
        "if it does not come down, go on from a checkpoint before it and skip the batches",
    ),
    row(
        Kind::Straggler,
        "straggler",
        Blame::Unknown,
        Severity::Degraded,
        Remedy::Watch,
        "check the node of that rank with `aviflow node check` when the job has ended",
    ),
    row(
        Kind::DiskFull,
        "disk full",
        Blame::Unknown,
        Severity::Fatal,
        Remedy::Person,
        "free some space or keep fewer checkpoints, then run it again: it goes on from the last complete one",
    ),
    row(
        Kind::Xid,
        "XID",
        Blame::Unknown,
        Severity::Notice,
        Remedy::Watch,
        "look the number up in NVIDIA's XID catalogue",
    ),
    row(
        Kind::LinkDown,
        "link down",
        Blame::Network,
        Severity::Fatal,
        Remedy::Elsewhere,
        "check cable, transceiver and switch port of that adapter",
    ),
    row(
        Kind::LinkErrors,
        "link errors",
        Blame::Network,
        Severity::Fatal,
        Remedy::Elsewhere,
        "clean or replace the cable or transceiver of that adapter",
    ),
    row(
        Kind::NodeLost,
        "lost node",
        Blame::Node,
        Severity::Fatal,
        Remedy::Elsewhere,
        "look at the node's console or its management controller",
    ),
    row(
        Kind::DeviceUnhealthy,
        "unhealthy device",
        Blame::Gpu,
        Severity::Fatal,
        Remedy::Elsewhere,
        "run `aviflow node check` on the node once it is empty",
    ),
    row(
        Kind::CrashLoop,
        "crash loop",
        Blame::Application,
        Severity::Fatal,
        Remedy::Person,
        "compare the failures of the last attempts, mend the first of them, and submit it again",
    ),
];

const fn row(
    kind: Kind,
    name: &'static str,
    blame: Blame,
    severity: Severity,
    remedy: Remedy,
    next: &'static str,
) -> Fault {
    Fault { kind, name, blame, severity, remedy, next }
}

impl Kind {
    /// What is known of the class.
    #[must_use]
    pub fn fault(self) -> &'static Fault {
        &FAULTS[self as usize]
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.fault().name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_class_has_its_row() {
        for (i, fault) in FAULTS.iter().enumerate() {
            assert_eq!(fault.kind as usize, i, "{}", fault.name);
            assert_eq!(fault.kind.fault(), fault);
            assert!(!fault.next.ends_with('.') && fault.next.len() > 20, "{}", fault.name);
        }
        assert_eq!(FAULTS.iter().map(|f| f.name).collect::<BTreeSet<_>>().len(), FAULTS.len());
    }

    #[test]
    fn only_hardware_is_left_for_elsewhere_and_it_never_is_the_application() {
        for fault in &FAULTS {
            assert_eq!(fault.remedy == Remedy::Elsewhere, fault.blame.is_hardware(), "{}", fault.name);
        }
    }
}
