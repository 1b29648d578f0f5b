//! Commands about the platform: nodes, environments, use, the control plane.

use super::Output;
use super::admin::{DrainArgs, Why};
use aviflow_kube::exporters::Selector;
use aviflow_kube::fence::SHORTEST;
use aviflow_tls::ServerName;
use clap::{Args, Subcommand, ValueEnum};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;

/// `node`
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List nodes and what holds their GPUs
    #[command(alias = "list")]
    Ls {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Show a node, GPU by GPU
    #[command(alias = "describe")]
    Show {
        /// The node
        node: String,
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Give a node no new work; what runs goes on
    Cordon {
        /// The nodes
        #[arg(required = true, value_name = "NODE")]
        nodes: Vec<String>,
        /// Why
        #[command(flatten)]
        why: Why,
    },
    /// Give a node new work again; ends a drain of it too
    Uncordon {
        /// The nodes
        #[arg(required = true, value_name = "NODE")]
        nodes: Vec<String>,
        /// Why
        #[command(flatten)]
        why: Why,
    },
    /// Test an empty node, and let it take work again if it passes
    #[command(after_help = "\
Examples:
  aviflow node check node-3
  aviflow node check node-3 --image registry/nccl-tests@sha256:… -- all_reduce_perf -g 8")]
    Check(CheckArgs),
    /// Empty nodes: at an instant, or a few at a time
    Drain(DrainArgs),
    /// List drains that go on or are to come
    Drains {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Call a drain off; nodes that are away come back as planned
    #[command(after_help = "\
Examples:
  aviflow node drains
  aviflow node undrain 7
  aviflow node undrain node-3")]
    Undrain {
        /// The number of a rolling drain, or the nodes: node-3, node-[1-8]
        #[arg(value_name = "NUMBER|NODES")]
        drain: String,
        /// Why
        #[command(flatten)]
        why: Why,
    },
}

/// `node check`
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The node
    pub node: String,
    /// The image to test it in, on Kubernetes [default: Aviflow's own]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Leave it cordoned also if it passes
    #[arg(long)]
    pub keep_cordoned: bool,
    /// Why
    #[command(flatten)]
    pub why: Why,
    /// The test, which passes with exit code 0 [default: GPUs, memory, disk, and the way to the control plane]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// `env`
#[derive(Debug, Subcommand)]
pub enum EnvCommand {
    /// List environments
    #[command(alias = "list")]
    Ls {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Show an environment and its locked packages
    #[command(alias = "describe")]
    Show {
        /// The environment, as NAME or NAME@VERSION
        environment: String,
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
}

/// What the rows of a usage report are by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UsageBy {
    User,
    Queue,
    Job,
    State,
}

impl UsageBy {
    /// The word of the REST API.
    pub fn word(self) -> &'static str {
        match self {
            UsageBy::User => "user",
            UsageBy::Queue => "queue",
            UsageBy::Job => "job",
            UsageBy::State => "state",
        }
    }
}

/// `usage`
#[derive(Args, Debug)]
#[command(after_help = "\
The rows sum to the capacity exactly. Times are DATE (2026-03-01), DATE and time
(2026-03-01T12:00, UTC), or milliseconds since 1970.

Examples:
  aviflow usage
  aviflow usage --by state --since 24h
  aviflow usage --by queue --from 2026-03-01 --to 2026-04-01 -o json")]
pub struct UsageArgs {
    /// One row for each user, queue, job or state
    #[arg(long, value_name = "WHAT", default_value = "user", hide_possible_values = true, hide_default_value = true)]
    pub by: UsageBy,

    /// The jobs that were submitted in the period and ran, as `aviflow simulate --trace` reads them
    #[arg(long, conflicts_with = "by")]
    pub trace: bool,

    /// The period up to now
    #[arg(long, value_name = "DURATION", default_value = "7d", conflicts_with_all = ["from", "to"])]
    pub since: String,

    /// The first instant of the period
    #[arg(long, value_name = "TIME")]
    pub from: Option<String>,

    /// The instant after its last
    #[arg(long, value_name = "TIME")]
    pub to: Option<String>,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `server`
#[derive(Debug, Subcommand)]
pub enum ServerCommand {
    /// Start the control plane of this machine in the background
    Start(StartArgs),
    /// Stop it; trainings go on, and are taken up by the next start
    Stop,
    /// Say whether it runs, where, and with what
    Status {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
}

/// `server start`
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(after_help = "\
Examples:
  aviflow server start
  aviflow server start --nodes 4 --gpus-per-node 8 --gpu-type H100")]
pub struct StartArgs {
    /// Virtual nodes of the local pool [default: as before, or 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub nodes: Option<u32>,

    /// GPUs on each of them [default: as before, or 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus_per_node: Option<u32>,

    /// Their accelerator type [default: as before, or virtual]
    #[arg(long, value_name = "TYPE")]
    pub gpu_type: Option<String>,

    /// Where to listen [default: a free port of 127.0.0.1]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<String>,
}

/// `serve`
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = "\
Writes its address to server.json and its token to `token` in the home folder, for this user
alone. SIGTERM ends it; trainings go on.

A database's address is best given as AVIFLOW_STORE: arguments are seen by everybody on the machine.

Examples:
  aviflow serve --nodes 2 --gpus-per-node 8
  AVIFLOW_STORE=postgres://aviflow:PASSWORD@db.example.com/aviflow aviflow serve")]
pub struct ServeArgs {
    /// Where state lives [default: $AVIFLOW_HOME, or aviflow in the user's state folder]
    #[arg(long, value_name = "FOLDER")]
    pub home: Option<PathBuf>,

    /// The store: `sqlite`, a file in the home folder, or the address of a PostgreSQL database,
    /// postgres://USER:PASSWORD@HOST:PORT/DATABASE [default: $AVIFLOW_STORE, or sqlite]
    #[arg(long, value_name = "STORE", env = "AVIFLOW_STORE", hide_env = true)]
    pub store: Option<StoreAddress>,

    /// The pool and the address
    #[command(flatten)]
    pub pool: StartArgs,

    /// Run jobs in a Kubernetes cluster
    #[command(flatten)]
    pub kube: KubeArgs,

    /// Where dcgm-exporter says what this machine's GPUs do, as http://127.0.0.1:9400/metrics [default: nvidia-smi
    /// is asked, if there is one]
    #[arg(long, env = "AVIFLOW_GPU_METRICS_URL", value_name = "URL", conflicts_with = "kube")]
    pub gpu_metrics_url: Option<String>,

    /// Seconds between two figures of a GPU [default: 15]
    #[arg(
        long,
        env = "AVIFLOW_GPU_METRICS_EVERY",
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..=3600)
    )]
    pub gpu_metrics_every: Option<u32>,

    /// Seconds that are waited for a step of a training, at least, before it is taken to hang; it is waited longer where
    /// its steps take longer. All other waits are shorter in proportion, so that less than 30 is for tests [default: 30]
    #[arg(
        long,
        env = "AVIFLOW_HANG_AFTER",
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..=86_400)
    )]
    pub hang_after: Option<u32>,

    /// The hosts that notifications of jobs may be posted to, as chat.example or *.corp.example; several with commas
    /// [default: any, but link-local addresses, and with --kube this machine]
    #[arg(long, env = "AVIFLOW_NOTIFY_HOSTS", value_name = "HOST", value_delimiter = ',')]
    pub notify_hosts: Vec<String>,

    /// In a session of its own; says on standard output, in one line of JSON, that it serves
    #[arg(long, hide = true)]
    pub background: bool,
}

/// `doctor`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow doctor
  aviflow doctor --kube --kubeconfig admin.conf")]
pub struct DoctorArgs {
    /// Check a Kubernetes cluster: versions, definitions, rights, GPUs, labels, storage, classes, network devices
    #[arg(long)]
    pub kube: bool,

    /// The cluster's kubeconfig [default: $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE", requires = "kube")]
    pub kubeconfig: Option<PathBuf>,

    /// Aviflow's own namespace
    #[arg(long, env = "AVIFLOW_NAMESPACE", value_name = "NAME", default_value = "aviflow-system", requires = "kube")]
    pub kube_namespace: String,

    /// The PriorityClass of job pods of pools that name none
    #[arg(
        long,
        env = "AVIFLOW_PRIORITY_CLASS",
        value_name = "NAME",
        default_value = "aviflow-jobs",
        requires = "kube"
    )]
    pub priority_class: String,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `serve --kube`
#[derive(Args, Clone, Debug, Default)]
pub struct KubeArgs {
    /// The pool is a Kubernetes cluster: that of this pod, or of $KUBECONFIG
    #[arg(long, env = "AVIFLOW_KUBE")]
    pub kube: bool,

    /// `schedule`: it places and runs jobs; `observe`: it changes nothing, and reports who uses which GPUs
    #[arg(
        long,
        env = "AVIFLOW_MODE",
        value_name = "MODE",
        default_value = "schedule",
        value_parser = ["schedule", "observe"],
        requires = "kube"
    )]
    pub mode: String,

    /// Where agents connect [default: 0.0.0.0:8081]
    #[arg(long, env = "AVIFLOW_AGENTS", value_name = "ADDRESS", requires = "kube")]
    pub agents: Option<SocketAddr>,

    /// Where pods fetch code [default: 0.0.0.0:8082]
    #[arg(long, env = "AVIFLOW_DEPOT", value_name = "ADDRESS", requires = "kube")]
    pub depot: Option<SocketAddr>,

    /// The address under which pods reach both: an address, as names may take long to be known
    #[arg(long, env = "AVIFLOW_ADVERTISE", value_name = "IP", requires = "kube")]
    pub advertise: Option<IpAddr>,

    /// The image with this program, which prepares job pods [default: that of this pod]
    #[arg(long, env = "AVIFLOW_IMAGE", value_name = "IMAGE", requires = "kube")]
    pub image: Option<String>,

    /// Aviflow's own namespace
    #[arg(long, env = "AVIFLOW_NAMESPACE", value_name = "NAME", default_value = "aviflow-system", requires = "kube")]
    pub kube_namespace: String,

    /// The Lease there under which one of several control planes decides
    #[arg(long, env = "AVIFLOW_LEASE", value_name = "NAME", default_value = aviflow_kube::lease::NAME, requires = "kube")]
    pub lease: String,

    /// The pod that this runs in, whose name the lease then has
    #[arg(long, env = "AVIFLOW_POD", hide = true, value_name = "NAME", requires = "kube")]
    pub pod: Option<String>,

    /// The queue of an object that names none
    #[arg(long, env = "AVIFLOW_DEFAULT_QUEUE", value_name = "NAME", default_value = "default", requires = "kube")]
    pub default_queue: String,

    /// The PriorityClass of job pods of pools that name none
    #[arg(
        long,
        env = "AVIFLOW_PRIORITY_CLASS",
        value_name = "NAME",
        default_value = "aviflow-jobs",
        requires = "kube"
    )]
    pub priority_class: String,

    /// Where the job volumes of the pools are mounted here, for `aviflow cp`
    #[arg(long, env = "AVIFLOW_VOLUMES", value_name = "FOLDER", requires = "kube")]
    pub volumes: Option<PathBuf>,

    /// A registry that is asked for digests without TLS, as HOST:PORT; several with commas
    #[arg(long, env = "AVIFLOW_PLAIN_REGISTRY", value_name = "HOST", value_delimiter = ',', requires = "kube")]
    pub plain_registry: Vec<String>,

    /// Certificates in PEM that vouch for registries, instead of the public ones
    #[arg(long, env = "AVIFLOW_REGISTRY_CA", value_name = "FILE", requires = "kube")]
    pub registry_ca: Option<PathBuf>,

    /// The pods of dcgm-exporter, which say what GPUs do, as NAMESPACE/LABEL=VALUE,… [default: none is asked]
    #[arg(long, env = "AVIFLOW_GPU_METRICS_SELECTOR", value_name = "SELECTOR", requires = "kube")]
    pub gpu_metrics_selector: Option<Selector>,

    /// Their port [default: 9400]
    #[arg(long, env = "AVIFLOW_GPU_METRICS_PORT", value_name = "PORT", requires = "gpu_metrics_selector")]
    pub gpu_metrics_port: Option<u16>,

    /// Speak TLS where people come, and take client certificates of the cluster
    #[arg(long, env = "AVIFLOW_TLS", requires = "kube")]
    pub tls: bool,

    /// The Secret in Aviflow's namespace with the certificate for names of its own, in the form of cert-manager
    /// [default: only that of Aviflow's own authority]
    #[arg(long, env = "AVIFLOW_TLS_SECRET", value_name = "NAME", requires = "tls")]
    pub tls_secret: Option<String>,

    /// A name or an IP address by which people come besides those of the Service, for the certificate of Aviflow's own
    /// authority; several with commas
    #[arg(
        long,
        env = "AVIFLOW_TLS_NAME",
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = server_name,
        requires = "tls"
    )]
    pub tls_name: Vec<ServerName<'static>>,

    /// The most requests a second to the apiserver [default: as many as there are]
    #[arg(long, hide = true, env = "AVIFLOW_REQUESTS_PER_SECOND", value_name = "N", requires = "kube")]
    pub requests_per_second: Option<NonZeroU32>,

    /// Make no pods, and take jobs for ended after the seconds that their `sleep` is told: for benchmarks alone
    #[arg(long, hide = true, requires = "kube")]
    pub pretend_workers: bool,

    /// Seconds after which the agents of a gang stop its ranks if they reach nobody
    #[arg(
        long,
        hide = true,
        value_name = "SECONDS",
        requires = "kube",
        value_parser = clap::value_parser!(i64).range(SHORTEST.0 / 1000..=3600)
    )]
    pub fence_after: Option<i64>,
}

fn server_name(text: &str) -> Result<ServerName<'static>, &'static str> {
    ServerName::try_from(text.to_owned()).map_err(|_| "it is neither a name in DNS nor an IP address")
}

/// Where the store is; it may have a password in it, which is shown nowhere.
#[derive(Clone)]
pub struct StoreAddress(pub String);

impl From<&str> for StoreAddress {
    fn from(text: &str) -> StoreAddress {
        StoreAddress(text.to_owned())
    }
}

impl std::fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreAddress")
    }
}

/// `store`
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Copy the store to a file, also while it is in use
    Backup {
        /// The file; must not exist
        file: PathBuf,
    },
    /// Put a backup in the store's place; the control plane must be stopped
    Restore {
        /// The file
        file: PathBuf,
    },
}

/// `login`
#[derive(Args, Debug)]
#[command(after_help = "\
A token is never an argument: arguments are seen by everybody on the machine.

Examples:
  aviflow login https://aviflow.example.com --token-file token.txt
  pass show aviflow | aviflow login https://aviflow.example.com --token-file - --name work")]
pub struct LoginArgs {
    /// The control plane's address
    pub url: String,

    /// The file with the token; `-` reads it from standard input
    #[arg(long, value_name = "FILE", required = true)]
    pub token_file: PathBuf,

    /// What to call it here [default: the host's name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Certificates in PEM that vouch for it [default: the system's]
    #[arg(long, value_name = "FILE")]
    pub certificate_authority: Option<PathBuf>,
}

/// `context`
#[derive(Debug, Subcommand)]
pub enum ContextCommand {
    /// List them
    #[command(alias = "list")]
    Ls {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Use another one from now on
    Use {
        /// Its name; `local` is this machine
        name: String,
    },
    /// Add or change one
    Set(SetArgs),
    /// Show the one in use
    Show {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Forget one
    #[command(alias = "delete")]
    Rm {
        /// Its name
        name: String,
    },
}

/// `context set`
#[derive(Args, Debug)]
#[command(after_help = "\
With --kube the way is that of kubectl: through the apiserver, to the pod behind the Service. The
token is the kubeconfig's too, unless a file of one is named.

Examples:
  aviflow context set prod --kube --kube-context prod -n nlp
  aviflow context set ci --url https://aviflow.example.com --token-file ci.token -n nlp")]
pub struct SetArgs {
    /// Its name
    pub name: String,

    /// The address
    #[arg(long, value_name = "URL", required_unless_present = "kube", conflicts_with = "kube")]
    pub url: Option<String>,

    /// The way without an address
    #[command(flatten)]
    pub kube: KubeWayArgs,

    /// The file with the token
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// Certificates in PEM that vouch for it [default: the system's; with --kube those that its cluster has]
    #[arg(long, value_name = "FILE")]
    pub certificate_authority: Option<PathBuf>,
}

/// `context set --kube`
#[derive(Args, Debug)]
pub struct KubeWayArgs {
    /// Go through the apiserver of its cluster
    #[arg(long)]
    pub kube: bool,

    /// The kubeconfig [default: that of $KUBECONFIG]
    #[arg(long, value_name = "FILE", requires = "kube")]
    pub kubeconfig: Option<PathBuf>,

    /// The context in the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME", requires = "kube")]
    pub kube_context: Option<String>,

    /// The Service of the control plane
    #[arg(long, value_name = "NAMESPACE/NAME", default_value = "aviflow-system/aviflow", requires = "kube")]
    pub service: String,
}
