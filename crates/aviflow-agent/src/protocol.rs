//! What an agent and the control plane say to each other.
//!
//! One outbound stream of the agent (a Unix socket on one machine, TCP in a
//! cluster, there within TLS); JSON, one message a line, at most [`MAX_LINE`] bytes. The agent
//! begins with [`FromAgent::Hello`]; nothing else is read before
//! [`ToAgent::Welcome`]. Everything may be said again after a reconnection:
//! events are numbered and kept by the agent until they are acknowledged, log
//! bytes are named by their offset in the worker's stream.
//!
//! A rank starts only after [`ToAgent::Start`] of the current term. An agent
//! refuses every command of a term lower than the highest it has seen.
//!
//! # Versions
//!
//! Agents outlive the control plane that started them, so an upgraded one finds agents of the version before. The
//! hello names the agent's version, [`PROTOCOL`]; the control plane goes on with its own and the [`OLDER`] before,
//! and refuses others, see [`understood`]. The number grows with the first minor version of Aviflow whose messages
//! differ from those of the one before, and with no patch: so agents that are two minor versions old are talked to.
//!
//! What a new version may change:
//! - A field is added, with a default that means what its absence meant before. Each side passes over fields that it
//!   does not know, and takes those that are missing for what their documentation says.
//! - A message is added. The control plane may say it only to agents whose hello names a version that knows it; an
//!   agent passes over messages that it does not know. An agent may say it to everybody: a control plane that is
//!   older than the agent refuses it.
//! - Nothing else: no field or message changes its meaning or goes away while an agent that needs it is talked to.
//!   The hello keeps all fields that it has, so that even an agent of a distant version can be told who it is.
//!
//! | version | added |
//! |---|---|
//! | 1 | all but the following |
//! | 2 | [`ToAgent::Refused`], [`Event::Leaving`] |
//! | 3 | [`ToAgent::Open`], [`ToAgent::Put`], [`FromAgent::Channel`], [`FromAgent::Sign`], [`Event::CheckpointGoesOn`], [`RankEnd::fault`] and that of [`Event::RankExited`], the GPUs of the hello, [`Ended::port`], [`ToAgent::Stop`]'s epoch |
//!
//! TLS is beneath all this and of no version: agents that were launched with an authority speak within it, those of
//! before without, and the control plane takes both on one port.
//!
//! The tests hold lines of each version, and the control plane's end replays whole conversations of them.

use crate::faults::Fault;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

pub mod channel;
mod end;
pub mod sign;
pub mod stacks;
pub use channel::{CHANNELS, Channel, ChannelInput, ChannelOutput};
pub use end::{Ended, RankEnd};
pub use sign::Sign;

/// The version of this protocol.
pub const PROTOCOL: u32 = 3;

/// How many versions before its own a control plane understands.
pub const OLDER: u32 = 2;

/// Whether a control plane goes on with an agent of a version.
#[must_use]
pub const fn understood(version: u32) -> bool {
    version >= 1 && version <= PROTOCOL && version + OLDER >= PROTOCOL
}

/// The longest message, in bytes without its newline.
pub const MAX_LINE: usize = 1 << 20;

/// Log bytes in one message at most, before encoding.
pub const LOG_CHUNK: usize = 64 << 10;

/// The name of a control plane in its certificate, by which agents ask for it whatever its address is.
pub const CONTROL_PLANE: &str = "control-plane.aviflow.internal";

/// Files in a worker's folder, written by the control plane (`worker.json`) and the agent (the rest).
pub mod files {
    /// The [`super::WorkerSpec`].
    pub const SPEC: &str = "worker.json";
    /// Locked (`flock`) as long as the agent lives. The control plane opens and locks it, the agent inherits it.
    pub const LOCK: &str = "agent.lock";
    /// Locked (`flock`) as long as the agent's guardian lives: after the agent's death it is free once nothing of
    /// the worker is left. Absent where no guardian ever ran.
    pub const KEEPER_LOCK: &str = "keeper.lock";
    /// Present once an agent ran here, with its pid and start time; its age is the agent's last sign of life.
    pub const ALIVE: &str = "alive.json";
    /// The [`super::Ended`] of the worker, complete and synced, once its last process is gone.
    pub const ENDED: &str = "ended.json";
    /// Folder of log segments that were not acknowledged yet; a segment's name is the offset of its first byte.
    pub const LOG: &str = "log";
    /// The socket of the hooks (`AVIFLOW_SOCKET`).
    pub const HOOKS: &str = "hooks.sock";
    /// How many terminals are open beside the ranks, as text (`AVIFLOW_TERMINALS`).
    pub const TERMINALS: &str = "terminals";
    /// What the agent itself has to say (its standard error).
    pub const AGENT_LOG: &str = "agent.log";
}

/// The variable that marks every process of a worker, so that none is ever left behind: its value is `JOBID.ATTEMPT.WORKER@TOKENHASH`.
pub const MARK: &str = "AVIFLOW_WORKER_MARK";

/// How the names of [`WorkerSpec::facts`] begin. A training's own facts of such names are not taken.
pub const OWN_FACTS: &str = "aviflow.";

/// Everything that a worker needs, fixed for the attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerSpec {
    /// The job's number.
    pub job_id: u64,
    /// The job as namespace/name.
    pub job: String,
    /// The attempt.
    pub attempt: u32,
    /// This worker's number, which is the node's rank.
    pub worker: u32,
    /// Workers of the gang.
    pub workers: u32,
    /// The node's name.
    pub node: String,
    /// The secret bound to job, attempt and node.
    pub token: String,
    /// A file with what proves to the control plane who this is, read for each connection as it is replaced from
    /// time to time; none where the token itself does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Where the control plane listens.
    pub control: Endpoint,
    /// The certificate in PEM of the authority by which it is known there, and by nothing else; none where TLS is not
    /// spoken, as on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// The address under which the other workers of the gang reach this node.
    pub host: String,
    /// The program and its arguments.
    pub run: Vec<String>,
    /// The working directory.
    pub cwd: PathBuf,
    /// Variables from the job, the environment and the body; the wiring is added by the agent and wins.
    pub env: BTreeMap<String, String>,
    /// Whether ranks get all variables of the agent, which are those of its container, beneath [`WorkerSpec::env`].
    /// Otherwise they get a few, such as `PATH`.
    #[serde(default)]
    pub inherit: bool,
    /// Lists of paths to be put in front of those that ranks would have otherwise, such as `PYTHONPATH`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prepend: BTreeMap<String, String>,
    /// Ranks that this worker starts: 1, or one for each GPU.
    pub ranks: u32,
    /// The first of them.
    pub first_rank: u32,
    /// Ranks of the whole gang.
    pub world_size: u32,
    /// Whether the platform starts one process for each GPU (`perGpu`) or one a node.
    pub per_gpu: bool,
    /// GPUs on each node.
    pub gpus_per_node: u32,
    /// The slots on this node.
    pub slots: Vec<u32>,
    /// Time between SIGTERM and SIGKILL where a command does not say.
    pub grace_ms: u64,
    /// Bytes of log kept on disk while the control plane is away; the oldest go first, and are counted.
    pub log_buffer: u64,
    /// Time after which the ranks of a gang are stopped if neither the control plane nor all peers were reached; never
    /// if none. Whoever writes silent workers off waits for longer, see [`crate::machine`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_after_ms: Option<u64>,
    /// What is known of the worker before ranks start: reported as a fact once they are up.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub facts: BTreeMap<String, String>,
}

/// Where the control plane listens for agents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host and port.
    Tcp(String),
}

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum FromAgent {
    /// First on every connection.
    #[serde(rename_all = "camelCase")]
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// The job's number.
        job_id: u64,
        /// The attempt.
        attempt: u32,
        /// The worker.
        worker: u32,
        /// The token of the spec.
        token: String,
        /// The agent's process.
        pid: u32,
        /// The epoch that it started, 0 before the first `Start`.
        epoch: u32,
        /// A host and port that were free here a moment ago, for rank 0.
        host: String,
        /// The port.
        port: u16,
        /// Whether the ranks of `epoch` are up (or were).
        up: bool,
        /// Offsets of the log stream that are still on disk: from the first to one past the last.
        log: (u64, u64),
        /// The port on which the agent answers its peers, see [`crate::peers`]; 0 if it does not.
        #[serde(default, skip_serializing_if = "is_zero")]
        peer_port: u16,
        /// UUIDs of the GPUs that its container got, see [`crate::devices`]; empty where it does not know them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        gpus: Vec<String>,
    },
    /// Something the control plane must make durable.
    #[serde(rename_all = "camelCase")]
    Event {
        /// The number, from 1, without gaps over the life of the agent.
        seq: u64,
        /// Milliseconds since it happened, by the agent's monotonic clock, at the moment of sending.
        ago_ms: u64,
        /// The epoch it belongs to.
        epoch: u32,
        /// What happened.
        event: Event,
    },
    /// Progress for people; may be dropped.
    #[serde(rename_all = "camelCase")]
    Progress {
        /// Milliseconds since it happened, at the moment of sending.
        ago_ms: u64,
        /// The epoch.
        epoch: u32,
        /// The rank.
        rank: u32,
        /// What the hooks or the output said.
        progress: Progress,
    },
    /// What the agent noticed of its training or its node; may be dropped.
    #[serde(rename_all = "camelCase")]
    Sign {
        /// Milliseconds since it happened, at the moment of sending.
        ago_ms: u64,
        /// The epoch.
        epoch: u32,
        /// What.
        sign: Sign,
    },
    /// A piece of the log stream, as text: always whole lines.
    #[serde(rename_all = "camelCase")]
    Log {
        /// Offset of the first byte.
        offset: u64,
        /// Whole lines, see [`crate::log`].
        text: String,
    },
    /// Output of a command run by [`ToAgent::Exec`].
    #[serde(rename_all = "camelCase")]
    Exec {
        /// Which.
        id: u64,
        /// What it said, or how it ended.
        output: ExecOutput,
    },
    /// What came out of a channel of [`ToAgent::Open`].
    #[serde(rename_all = "camelCase")]
    Channel {
        /// Which.
        id: u64,
        /// What.
        output: ChannelOutput,
    },
    /// Answer to [`ToAgent::Ping`].
    Pong {
        /// The number of the ping; 0 from an agent that does not know it.
        #[serde(default)]
        n: u64,
    },
}

/// Events that the control plane makes durable before it acknowledges them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Event {
    /// Every rank of the epoch has started.
    Up,
    /// The ranks could not be started.
    #[serde(rename_all = "camelCase")]
    LaunchFailed {
        /// Why, with the program or folder that it is about.
        reason: String,
    },
    /// A rank ended.
    #[serde(rename_all = "camelCase")]
    RankExited {
        /// The rank (of the gang).
        rank: u32,
        /// The exit code, or 128 + the signal.
        code: i32,
        /// The signal, if one ended it.
        signal: Option<i32>,
        /// Whether the agent itself had begun to stop the ranks before.
        stopping: bool,
        /// Its last lines of output, oldest first, at most 20.
        last_lines: Vec<String>,
        /// The highest step it reported.
        last_step: Option<u64>,
        /// Why, as far as it told; none if it ended with 0, or of an agent that does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<Fault>,
    },
    /// The first training step of the epoch was reported.
    #[serde(rename_all = "camelCase")]
    FirstStep {
        /// The step.
        step: u64,
    },
    /// The training passed the highest step of all earlier attempts.
    #[serde(rename_all = "camelCase")]
    CaughtUp {
        /// The step.
        step: u64,
    },
    /// The training stands still for a checkpoint.
    #[serde(rename_all = "camelCase")]
    CheckpointBegun {
        /// The step.
        step: u64,
    },
    /// The training goes on while the checkpoint is still written, or was given up; it is not known which.
    #[serde(rename_all = "camelCase")]
    CheckpointGoesOn {
        /// The step.
        step: u64,
    },
    /// A checkpoint is complete.
    #[serde(rename_all = "camelCase")]
    CheckpointComplete {
        /// The step.
        step: u64,
        /// The path as the training named it.
        path: String,
    },
    /// A checkpoint was begun and will not be complete.
    #[serde(rename_all = "camelCase")]
    CheckpointFailed {
        /// The step.
        step: u64,
    },
    /// The training named data or facts that reproduce it.
    #[serde(rename_all = "camelCase")]
    Facts {
        /// Names and values; data as `data.NAME` with its SHA-256, results as `result.NAME`.
        values: BTreeMap<String, String>,
    },
    /// The agent was asked to end (SIGTERM), and waits a moment for the control plane to stop the whole gang.
    #[serde(rename_all = "camelCase")]
    Leaving {
        /// Milliseconds that its ranks have.
        within_ms: u64,
    },
    /// The last process of the worker is gone; the last event of an agent.
    #[serde(rename_all = "camelCase")]
    Ended {
        /// How each rank of the last epoch ended.
        ended: Ended,
    },
}

/// Progress for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// The step.
    pub step: u64,
    /// How many steps there will be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Tokens so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Named values: `loss`, `tokens_per_second`, … Those that are no finite number are text: `NaN`, `Infinity`.
    pub values: BTreeMap<String, Value>,
}

/// A metric's value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A finite number.
    Number(f64),
    /// `NaN`, `Infinity` or `-Infinity`.
    Text(String),
}

/// Output of a command inside a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ExecOutput {
    /// Bytes of standard output, base64.
    Stdout(String),
    /// Bytes of standard error, base64.
    Stderr(String),
    /// It ended with this code.
    Exit(i32),
    /// It could not be started.
    Failed(String),
}

/// What the control plane says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum ToAgent {
    /// Answer to `Hello`.
    #[serde(rename_all = "camelCase")]
    Welcome {
        /// The term of the control plane.
        term: u64,
        /// The offset up to which it has the log; the agent goes on from there.
        log_have: u64,
        /// Milliseconds between two pings on this connection; 0 if there are none, or they have no numbers.
        #[serde(default, skip_serializing_if = "is_zero")]
        ping_ms: u64,
    },
    /// The attempt is not known any more: stop and remove everything, then exit. An agent whose worker has
    /// ended exits at once and leaves its log, as the control plane may still want it.
    #[serde(rename_all = "camelCase")]
    Unknown {
        /// Why, for the agent's log.
        reason: String,
    },
    /// The control plane does not speak the agent's version: it is left alone, and tries again later. This is no sign
    /// that somebody looks after the worker. Said to agents of any version, as those that do not know it pass over it.
    #[serde(rename_all = "camelCase")]
    Refused {
        /// Why, and what to do, for the agent's log.
        reason: String,
    },
    /// Start the ranks of an epoch. Repeated for an epoch that was started, it changes nothing.
    #[serde(rename_all = "camelCase")]
    Start {
        /// The term.
        term: u64,
        /// The epoch.
        epoch: u32,
        /// Address of rank 0.
        master_host: String,
        /// Its port.
        master_port: u16,
        /// The highest step of all earlier attempts.
        best_step: Option<u64>,
        /// The workers of the gang that answer their peers, and where; this one may be among them.
        ///
        /// Each agent gets all of them, as a gang may go on without the control plane only where each reaches
        /// every other. 25 bytes each: 13 KB for one of 512 workers, 7 MB for all of them, once an epoch.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        peers: Vec<(u32, SocketAddr)>,
    },
    /// Stop the ranks: SIGTERM, SIGKILL after the grace.
    #[serde(rename_all = "camelCase")]
    Stop {
        /// The term.
        term: u64,
        /// The grace.
        grace_ms: u64,
        /// Why.
        reason: String,
        /// The epoch whose ranks are to end: those of a later one are not meant. 0 from a control plane that means
        /// whatever runs.
        #[serde(default, skip_serializing_if = "is_zero")]
        epoch: u32,
    },
    /// Every event up to and with this number is durable.
    #[serde(rename_all = "camelCase")]
    Ack {
        /// The number.
        seq: u64,
    },
    /// Log bytes before this offset are durable.
    #[serde(rename_all = "camelCase")]
    LogAck {
        /// The offset.
        offset: u64,
    },
    /// Run a command inside the worker.
    #[serde(rename_all = "camelCase")]
    Exec {
        /// A number of the control plane's, for the answers.
        id: u64,
        /// The rank whose variables it gets; the worker's first if none.
        rank: Option<u32>,
        /// The command.
        argv: Vec<String>,
        /// Standard input, base64; it ends there.
        stdin: String,
    },
    /// End a command that was begun.
    #[serde(rename_all = "camelCase")]
    ExecKill {
        /// Which.
        id: u64,
    },
    /// Open a channel into the worker. Only for agents that say version [`CHANNELS`] or newer.
    #[serde(rename_all = "camelCase")]
    Open {
        /// A number of the control plane's, on this connection.
        id: u64,
        /// The rank beside which it leads; the worker's first if none.
        rank: Option<u32>,
        /// Where to.
        channel: Channel,
    },
    /// Put something into a channel that was opened.
    #[serde(rename_all = "camelCase")]
    Put {
        /// Which.
        id: u64,
        /// What.
        input: ChannelInput,
    },
    /// The worker's end is durable and its log is complete: exit.
    Release,
    /// Still there?
    Ping {
        /// Its number on this connection, from 1; 0 from a control plane that does not count.
        #[serde(default)]
        n: u64,
        /// The highest number of a [`FromAgent::Pong`] that had come before this was sent.
        #[serde(default)]
        heard: u64,
    },
}

/// Whether a number says nothing, and is left out.
fn is_zero<T: Copy + Into<u64>>(n: &T) -> bool {
    (*n).into() == 0
}

/// Reading and writing messages.
pub mod wire {
    use super::MAX_LINE;
    use serde::{Serialize, de::DeserializeOwned};

    /// A message as a line with its newline.
    ///
    /// # Panics
    /// Never: the protocol's types have string keys only.
    #[must_use]
    pub fn line<T: Serialize>(message: &T) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(message).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// A message from a line without its newline.
    ///
    /// # Errors
    /// If the line is too long or is no such message.
    pub fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T, String> {
        if line.len() > MAX_LINE {
            return Err(format!("a message of {} bytes; the limit is {MAX_LINE}", line.len()));
        }
        serde_json::from_slice(line).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests;
