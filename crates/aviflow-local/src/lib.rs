//! The cluster port on this machine's processes.
//!
//! The same engine with this machine as the pool: nodes are virtual, a worker is
//! an agent process with its ranks beneath it, an environment is a venv that is
//! cached by its hash. This crate does what it is told, may be told twice, and
//! chooses nothing.
//!
//! - [`LocalCluster`] (`cluster`): orders in, observations out;
//! - `worker`: a worker's folder, its agent's process, and certainty that it is gone;
//! - `hurry`: ends workers that do not end in time;
//! - `spec`, `code`, `volumes`: what a worker finds when it starts;
//! - [`archive`]: the one form of code, by which it is hashed;
//! - `link`: the agents' connections;
//! - [`environments`]: the cache of environments, and how they are built;
//! - `devices`: what this machine offers as nodes;
//! - [`LocalHandle`] (`handle`): what the server asks beside the loop.
//!
//! Everything lives below one folder:
//!
//! ```text
//! agents.sock                          where agents connect
//! workers/JOB.ATTEMPT.WORKER/          a worker, removed when its attempt is over
//! jobs/JOB/volumes/                    checkpoints and outputs, kept
//! environments/HASH/                   a venv, with HASH.lock beside it
//! secrets/NAME/KEY                     written by people
//! cache/                               shared by all jobs (AVIFLOW_CACHE_DIR)
//! ```
//!
//! Invariants: agents and ranks outlive this process; a worker is reported as
//! gone or lost only when none of its processes runs; an event is acknowledged
//! only once it is durable.

pub mod archive;
mod cluster;
pub mod code;
mod devices;
pub mod environments;
mod handle;
mod hurry;
mod spec;
mod volumes;
mod worker;

pub use cluster::LocalCluster;
pub use devices::NodeConfig;
pub use handle::{EnvironmentInfo, ExecError, ExecStream, LocalHandle, WorkerInfo};
pub use volumes::Volumes;

use aviflow_core::time::Span;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Finds an object (a code archive, a lock file) by its SHA-256.
pub type Objects = Arc<dyn Fn(&str) -> std::io::Result<PathBuf> + Send + Sync>;

/// What the body must know of this machine.
#[derive(Clone)]
pub struct LocalConfig {
    /// The folder below which everything lives.
    pub home: PathBuf,
    /// The virtual nodes.
    pub nodes: Vec<NodeConfig>,
    /// The pool's name.
    pub pool: String,
    /// The accelerator type of every node.
    pub gpu_type: String,
    /// Program and arguments that start an agent; the worker's folder is appended.
    pub agent: Vec<OsString>,
    /// A folder put in front of `PYTHONPATH` of every rank.
    pub python_hooks: Option<PathBuf>,
    /// Where objects are.
    pub objects: Objects,
    /// The interpreter that environments are built with; otherwise one on `PATH` is chosen.
    pub python: Option<PathBuf>,
    /// Variables for builds, such as `PIP_INDEX_URL`, beside this process's own.
    pub build_env: Vec<(OsString, OsString)>,
    /// Bytes of log that an agent keeps while the control plane is away.
    pub log_buffer: u64,
    /// Time between SIGTERM and SIGKILL where an order does not say.
    pub grace: Span,
    /// Time after the grace of a stop from which on an agent that did not end counts as frozen, and is killed.
    pub stop_slack: Span,
}

impl LocalConfig {
    /// A configuration without nodes and with the usual limits.
    #[must_use]
    pub fn new(home: PathBuf, agent: Vec<OsString>, objects: Objects) -> LocalConfig {
        LocalConfig {
            home,
            nodes: Vec::new(),
            pool: "local".to_owned(),
            gpu_type: "virtual".to_owned(),
            agent,
            python_hooks: None,
            objects,
            python: None,
            build_env: Vec::new(),
            log_buffer: 256 << 20,
            grace: Span::seconds(30),
            stop_slack: Span::seconds(30),
        }
    }
}

/// Why the body could not start.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// Another control plane uses the folder.
    #[error("{} is in use by another control plane (process {pid}); stop it first", home.display())]
    Busy {
        /// The folder.
        home: PathBuf,
        /// The other's process, as it wrote it down.
        pid: String,
    },
    /// A folder, file or socket could not be made.
    #[error("{} could not be prepared: {error}; see that this user may write there and that the disk is not full", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        error: std::io::Error,
    },
    /// A configuration that cannot work.
    #[error("{0}")]
    Config(String),
}

impl LocalError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> LocalError {
        let path = path.to_owned();
        move |error| LocalError::Io { path, error }
    }
}

/// Whether a text may be one component of a path: no separator, nothing that leads elsewhere.
pub(crate) fn plain_component(text: &str) -> bool {
    !text.is_empty() && text != "." && text != ".." && !text.contains(['/', '\0'])
}

/// A folder that only this user may enter, with its parents.
pub(crate) fn private_folder(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
