//! Orders in, observations out.
//!
//! One task holds the books and looks at the workers' pods; requests to the apiserver are made by tasks
//! of their own, at most [`REQUESTS`] at a time, and come back to it. Nothing is asked of the
//! apiserver that the watches have told already.

use crate::body::Body;
use crate::books::Books;
use crate::check::Check;
use crate::depot::{self, Builds, Objects};
use crate::exporters::Exporters;
use crate::keep::Keeping;
use crate::layer::build::Making;
use crate::mounts::Trouble;
use crate::observe::Sightings;
use crate::pod;
use crate::site::{Agents, Held, PodRef, Pods};
use aviflow_agent::protocol::Channel;
use aviflow_api::rest::{ExecFrame, Observed};
use aviflow_engine::ports::{Cluster, Observation, Stamped};
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use aviflow_link::{ChannelReader, ChannelWriter, Durable, ExecError, ExecStream, Workers};
use aviflow_tls::Listener;
use kube::Client;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

/// Pieces of a check's output that wait for a slow reader.
const FRAMES: usize = 64;

/// Requests to the apiserver at a time.
pub const REQUESTS: usize = 64;

/// What the body must know of the cluster.
pub struct KubeConfig {
    /// The apiserver.
    pub client: Client,
    /// Aviflow's own namespace, for placeholders.
    pub namespace: String,
    /// Whether it is only looked at: then nothing in it is made, changed or deleted.
    pub observe: bool,
    /// What holds for all pods.
    pub site: pod::Site,
    /// Pods that report what GPUs do.
    pub exporters: Exporters,
    /// Where code snapshots, locks and layers are.
    pub objects: Arc<dyn Objects>,
    /// Variables of pip, where it makes layers.
    pub pip: Vec<(String, String)>,
    /// The term under which the store is held now; none where the store does not answer. It may wait for that.
    pub held: Held,
}

/// Where pods reach the control plane.
pub struct Listeners {
    /// For agents.
    pub agents: Listener,
    /// For code and layers.
    pub depot: Listener,
}

/// A Kubernetes cluster. Dropping it ends what belongs to the control plane and leaves pods alone.
pub struct KubeCluster {
    workers: Arc<Workers<Pods>>,
    listed: Arc<Listed>,
    orders: mpsc::UnboundedSender<Message>,
    observe: bool,
    tasks: Vec<AbortHandle>,
}

/// A way to ask a [`KubeCluster`]. Cheap to clone; of no use once the cluster is dropped.
#[derive(Clone)]
pub struct KubeHandle {
    workers: Arc<Workers<Pods>>,
    listed: Arc<Listed>,
    orders: mpsc::UnboundedSender<Message>,
    observe: bool,
}

/// What was listed whole, once.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    pub(crate) nodes: AtomicBool,
    pub(crate) pods: AtomicBool,
}

impl Listed {
    /// Whether both were.
    pub(crate) fn all(&self) -> bool {
        self.nodes.load(Ordering::Acquire) && self.pods.load(Ordering::Acquire)
    }
}

/// What the one task is told.
pub(crate) enum Message {
    Orders(Vec<Stamped>),
    /// A worker's pod is there.
    Created(StreamKey, PodRef),
    /// A worker's pod cannot be made.
    NotCreated(StreamKey, String),
    /// A worker's pod is on its node and does not begin.
    NotBegun(StreamKey, PodRef, Trouble),
    /// A layer is there, or cannot be made.
    Made(String, u64, Result<(), String>),
    /// Somebody asks which platforms the nodes have that a job may be on, by the accelerator types that it takes.
    Platforms(Vec<String>, oneshot::Sender<BTreeSet<String>>),
    /// Somebody asks who holds the GPUs.
    Observe(oneshot::Sender<Observed>),
    /// A node is to be checked.
    Check(Check, mpsc::Sender<ExecFrame>),
}

impl KubeCluster {
    /// Begins to watch nodes and pods, and listens for agents.
    ///
    /// `report` must not block; its second argument is called once the observation is durable. It may be
    /// called from any thread.
    pub fn start(
        config: KubeConfig,
        listeners: Listeners,
        telemetry: Arc<dyn Telemetry>,
        report: impl Fn(Observation, Option<Durable>) + Send + Sync + 'static,
        runtime: &tokio::runtime::Handle,
    ) -> KubeCluster {
        let pods = Pods { client: config.client.clone(), held: config.held.clone() };
        let workers = Arc::new(Workers::new(pods, telemetry, Box::new(report)));
        let (orders, messages) = mpsc::unbounded_channel();
        let (objects, observe) = (config.objects.clone(), config.observe);
        let listed = Arc::<Listed>::default();
        let builds = Builds::default();
        let body = Body {
            making: Making::default(),
            builds: builds.clone(),
            workers: workers.clone(),
            books: Books::new(Vec::new()),
            sightings: Sightings::default(),
            exporters: config.exporters.clone(),
            requests: Arc::new(Semaphore::new(REQUESTS)),
            messages: orders.clone(),
            namespaces: Arc::default(),
            keeping: Keeping::default(),
            pools: BTreeMap::new(),
            listed: listed.clone(),
            held: Vec::new(),
            unseen: BTreeMap::new(),
            config,
        };
        let tasks = vec![
            runtime.spawn(aviflow_link::listen(workers.clone(), Agents(listeners.agents))).abort_handle(),
            runtime.spawn(depot::serve(workers.clone(), objects, builds, listeners.depot)).abort_handle(),
            runtime.spawn(body.run(messages)).abort_handle(),
        ];
        KubeCluster { workers, listed, orders, observe, tasks }
    }

    /// What the server asks beside the loop.
    #[must_use]
    pub fn handle(&self) -> KubeHandle {
        let (workers, listed) = (self.workers.clone(), self.listed.clone());
        KubeHandle { workers, listed, orders: self.orders.clone(), observe: self.observe }
    }
}

impl Cluster for KubeCluster {
    fn apply(&mut self, orders: &[Stamped]) {
        // Without orders the body makes, changes and deletes nothing.
        if self.observe {
            return;
        }
        let obeyed: Vec<Stamped> = orders.iter().filter(|o| self.workers.obeys(o.term)).cloned().collect();
        // The task ends with the cluster alone.
        let _ = self.orders.send(Message::Orders(obeyed));
    }
}

impl Drop for KubeCluster {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.workers.close();
    }
}

impl KubeHandle {
    /// Whether the cluster is only looked at.
    #[must_use]
    pub fn observes(&self) -> bool {
        self.observe
    }

    /// Who holds the GPUs of the cluster, and what waits; none once the cluster is dropped. Blocks.
    #[must_use]
    pub fn observed(&self) -> Option<Observed> {
        let (answer, asked) = oneshot::channel();
        self.orders.send(Message::Observe(answer)).ok()?;
        asked.blocking_recv().ok()
    }

    /// The platforms of the nodes with these accelerator types, or of all nodes if none is given; none once the cluster
    /// is dropped.
    pub async fn platforms(&self, gpu_types: Vec<String>) -> BTreeSet<String> {
        let (answer, asked) = oneshot::channel();
        // Once the cluster is dropped nobody answers.
        let _ = self.orders.send(Message::Platforms(gpu_types, answer));
        asked.await.unwrap_or_default()
    }

    /// Checks a node that nothing of ours runs on, see [`mod@crate::check`]. The last frame is `Exit` or `Failed`;
    /// dropping the receiver ends the check.
    #[must_use]
    pub fn check(&self, check: Check) -> mpsc::Receiver<ExecFrame> {
        let (sender, said) = mpsc::channel(FRAMES);
        // Once the cluster is dropped nothing is said.
        let _ = self.orders.send(Message::Check(check, sender));
        said
    }

    /// Runs a command inside a worker, with the variables of a rank (the worker's first if none).
    ///
    /// # Errors
    /// If there is no such worker, or its agent is not connected.
    pub fn exec(
        &self,
        key: StreamKey,
        rank: Option<u32>,
        argv: Vec<String>,
        stdin: &[u8],
    ) -> Result<ExecStream, ExecError> {
        self.workers.exec(key, rank, argv, stdin)
    }

    /// Opens a channel into a worker, beside a rank (the worker's first if none).
    ///
    /// # Errors
    /// If there is no such worker, or its agent is not connected or knows no channels.
    pub fn open(
        &self,
        key: StreamKey,
        rank: Option<u32>,
        channel: Channel,
    ) -> Result<(ChannelWriter, ChannelReader), ExecError> {
        self.workers.open(key, rank, channel)
    }

    /// Whether all nodes and pods of the cluster were listed once: before, jobs wait for nodes that are there.
    ///
    /// # Errors
    /// With what is not listed yet.
    pub fn ready(&self) -> Result<(), String> {
        let missing = |what: &str| Err(format!("the cluster's {what} are being listed"));
        match (self.listed.nodes.load(Ordering::Acquire), self.listed.pods.load(Ordering::Acquire)) {
            (true, true) => Ok(()),
            (false, _) => missing("nodes"),
            (true, false) => missing("pods"),
        }
    }

    /// The workers whose attempts are not over, and whether the agent of each is connected.
    #[must_use]
    pub fn workers(&self) -> Vec<(StreamKey, bool)> {
        let state = self.workers.lock();
        state.workers.iter().filter(|(_, w)| !w.over).map(|(key, w)| (*key, w.link.is_some())).collect()
    }

    /// The same with the UUIDs of the GPUs that each got, where its agent knows them.
    #[must_use]
    pub fn gpus(&self) -> Vec<(StreamKey, bool, Vec<String>)> {
        let state = self.workers.lock();
        let live = state.workers.iter().filter(|(_, w)| !w.over);
        live.map(|(key, w)| (*key, w.link.is_some(), w.gpus.clone())).collect()
    }
}
