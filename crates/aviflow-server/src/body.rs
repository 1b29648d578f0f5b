//! What the server asks of the machine or cluster beside the loop.

use aviflow_api::admin::PoolSpec;
use aviflow_api::rest::{
    ApiError, ChannelFrame, ChannelInput, ChannelTo, EnvironmentInfo, Exec, ExecFrame, Observed, WorkerStacks,
};
use aviflow_api::spec::{JobSpec, ResolvedImage};
use aviflow_core::model::JobId;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use tokio::sync::mpsc;

/// The body as the server sees it. Its calls may read the disk, but never wait for a job.
pub trait Body: Send + Sync {
    /// `local` or `kubernetes`.
    fn name(&self) -> &'static str;

    /// Runs a command inside a worker. The last frame is `Exit` or `Failed`;
    /// dropping the receiver ends the command.
    ///
    /// # Errors
    /// If the command could not be handed to the worker.
    fn exec(&self, target: ExecTarget, exec: Exec) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal>;

    /// Opens a channel into a worker, beside a rank (its first if none).
    ///
    /// # Errors
    /// If it could not be handed to the worker.
    fn open(&self, target: ExecTarget, rank: Option<u32>, to: ChannelTo) -> Result<Opening, ExecRefusal>;

    /// What the processes of a worker are doing, of one rank alone if one is named.
    fn stacks(&self, target: ExecTarget, rank: Option<u32>) -> Telling;

    /// Runs a test on a node on which nothing runs. The last frame is `Exit` or `Failed`; dropping the receiver
    /// ends the test.
    ///
    /// # Errors
    /// If it could not be begun.
    fn check(&self, test: NodeTest) -> Result<mpsc::Receiver<ExecFrame>, ExecRefusal>;

    /// The folder of everything that a job keeps: a path `/out/x` of its document is `out/x` there.
    fn volumes(&self, job: JobId) -> PathBuf;

    /// Agents that are connected, or were started from here.
    fn agents(&self) -> Vec<BodyAgent>;

    /// Whether the slots of its nodes are the numbers of the devices there.
    fn numbers_gpus(&self) -> bool {
        false
    }

    /// Requests to the apiserver since this process began, by how they were answered; empty where there is none.
    fn requests(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }

    /// Whether an environment of this hash is complete here.
    fn environment_ready(&self, hash: &str) -> bool;

    /// The environments that the body keeps itself, where it does; else those count that come with the program.
    ///
    /// # Errors
    /// If they cannot be read now, with the reason.
    fn environments(&self) -> Option<Result<Vec<EnvironmentInfo>, String>> {
        None
    }

    /// What the containers of a job are to run: the image or environment that its document names, by content. None
    /// where it runs no containers. Others may be asked for it, which takes seconds at most.
    fn resolve<'a>(&'a self, _namespace: &'a str, _spec: &'a JobSpec) -> Resolving<'a> {
        Box::pin(async { Ok(None) })
    }

    /// The platform of the nodes that a job may be on, as `linux/amd64`, for which packages of its own are made.
    fn platform<'a>(&'a self, _spec: &'a JobSpec) -> Settling<'a> {
        Box::pin(async { Ok(format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH)) })
    }

    /// Who holds the GPUs, and what waits, where others than the control plane start things, too.
    fn observed(&self) -> Option<Observed> {
        None
    }

    /// Whether the control plane only looks, and takes nothing that would change something.
    fn observes(&self) -> bool {
        false
    }

    /// Keeps what of a pool's document the control plane does not: its part for Kubernetes.
    ///
    /// # Errors
    /// If it cannot be kept, with the reason.
    fn describe_pool(&self, _: &PoolSpec) -> Result<(), String> {
        Ok(())
    }

    /// Completes once no worker of a job that has ended has output left to ship.
    fn drained(&self, job: JobId) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Whether it knows what there is to place jobs on.
    ///
    /// # Errors
    /// With what it waits for.
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
}

/// An answer of [`Body::resolve`].
pub type Resolving<'a> = Pin<Box<dyn Future<Output = Result<Option<ResolvedImage>, Unresolved>> + Send + 'a>>;

/// An answer of [`Body::platform`].
pub type Settling<'a> = Pin<Box<dyn Future<Output = Result<String, Unresolved>> + Send + 'a>>;

/// Why it is not known what a job is to run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{error}")]
pub struct Unresolved {
    /// What happened, and what to do.
    pub error: ApiError,
    /// Whether that lies in who was asked, and another try may help.
    pub passing: bool,
}

/// An answer of [`Body::stacks`].
pub type Telling = Pin<Box<dyn Future<Output = Result<WorkerStacks, ExecRefusal>> + Send>>;

/// A channel that is being opened.
pub struct Opening {
    /// What is put into it; each waits until there is room. Dropping this puts in nothing more, and closes nothing.
    pub input: mpsc::Sender<ChannelInput>,
    /// What comes out: `Opened` without a name, and `Exit` or `Failed` last. Dropping this closes the channel.
    pub output: mpsc::Receiver<ChannelFrame>,
}

/// Where a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecTarget {
    /// The job.
    pub job: JobId,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
}

/// A test of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTest {
    /// The node.
    pub node: String,
    /// How many GPUs it should find.
    pub gpus: usize,
    /// The image to run it in; Aviflow's own if none.
    pub image: Option<String>,
    /// The command; Aviflow's own test if empty.
    pub run: Vec<String>,
}

/// Why a command was not begun, and what to do, as a person reads it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ExecRefusal(pub String);

/// An agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyAgent {
    /// The job.
    pub job: JobId,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
    /// Its process, if it is on this machine.
    pub pid: Option<u32>,
    /// Whether its connection stands.
    pub connected: bool,
    /// UUIDs of the GPUs that its container got, where it knows them.
    pub gpus: Vec<String>,
}

/// An environment that jobs may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogueEntry {
    /// The name.
    pub name: String,
    /// The version.
    pub version: u32,
    /// The content hash.
    pub hash: String,
    /// What it is for.
    pub description: String,
    /// Versions of Python it is locked for.
    pub python: String,
    /// Default variables.
    pub env: BTreeMap<String, String>,
    /// The lock, as text.
    pub lock: String,
}
