//! A Kubernetes cluster as the body.

use super::Ground;
use super::tls::Tls;
use crate::cli::KubeArgs;
use crate::error::{Failure, Result, While};
use crate::output::note;
use aviflow_agent::protocol::Channel;
use aviflow_api::admin::PoolSpec;
use aviflow_api::file::Defaults;
use aviflow_api::rest::{ApiError, ChannelTo, EnvironmentInfo, Exec, ExecFrame, Observed};
use aviflow_api::rights::{Identity, Right};
use aviflow_api::spec::JobSpec;
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::driver::Handle;
use aviflow_engine::ports::{ActKind, Cluster, Observation};
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use aviflow_kube::api;
use aviflow_kube::certified::{BINDING, Uncertified};
use aviflow_kube::check::Check;
use aviflow_kube::depot::Objects;
use aviflow_kube::documents::{self, Documents, Journal};
use aviflow_kube::events;
use aviflow_kube::exporters::{Exporters, PORT};
use aviflow_kube::fence::FENCE_AFTER;
use aviflow_kube::identity::Reviews;
use aviflow_kube::lease::Lease;
use aviflow_kube::mirror::{self, Ended, Mirror};
use aviflow_kube::own;
use aviflow_kube::pod::Site;
use aviflow_kube::pretend::{self, Pretended, Report};
use aviflow_kube::registry::Registries;
use aviflow_kube::resolve::{self, Resolver};
use aviflow_kube::{Client, KubeCluster, KubeConfig, KubeHandle, Listeners};
use aviflow_link::Durable;
use aviflow_server::{
    Applied, Applies, Asked, Body, BodyAgent, ExecRefusal, ExecTarget, Identities, NodeTest, NotTaken, Opening,
    Resolving, Settling, Telling, Unavailable, Unresolved,
};
use aviflow_store::read::{ActFilter, Reader};
use aviflow_tls::{CertificateDer, Listener};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::{Handle as Threads, Runtime};
use tokio::sync::mpsc;

/// The image where none is named, of a control plane outside of the cluster: that of this version.
const IMAGE: &str = concat!("ghcr.io/aviflow/aviflow:", env!("CARGO_PKG_VERSION"));

/// Bytes of log that an agent keeps in its pod while the control plane is away.
const LOG_BUFFER: u64 = 256 << 20;

/// How often a worker is looked at that ships its last lines.
const LOOK: Duration = Duration::from_millis(20);

/// The cluster of this pod or of a kubeconfig, which answers.
pub fn connect(args: &KubeArgs, runtime: &Runtime) -> Result<Client> {
    let client = runtime.block_on(api::connect(args.requests_per_second)).map_err(|e| {
        Failure::new(format!("no Kubernetes cluster can be found: {e}"))
            .help("run it in a pod of the cluster, or set KUBECONFIG")
    })?;
    let version = runtime.block_on(client.apiserver_version()).map_err(|e| {
        Failure::new(format!("the apiserver does not answer: {e}"))
            .help("`kubectl version` shows whether it can be reached")
    })?;
    note(&format!("the pool is a cluster of Kubernetes {}", version.git_version));
    Ok(client)
}

/// The lease under which this control plane may decide; none where it only looks, with a store of its own.
pub fn lease(args: &KubeArgs, client: Option<&Client>, shares: bool, me: &str) -> Option<Lease> {
    let client = client.filter(|_| shares || !observes(args))?;
    Some(Lease::new(client.clone(), &args.kube_namespace, &args.lease, me))
}

/// The cluster as it is asked for.
pub fn ground(
    (args, tls, exporters): (&KubeArgs, Option<&Tls>, Exporters),
    (client, reader): (Client, Arc<dyn Reader>),
    home: PathBuf,
    objects: Arc<dyn Objects>,
    telemetry: Arc<dyn Telemetry>,
    report: impl Fn(Observation, Option<Durable>) + Send + Sync + 'static,
    runtime: &Runtime,
) -> Result<Ground> {
    let listen = |address: SocketAddr| {
        runtime.block_on(TcpListener::bind(address)).map_err(|e| {
            Failure::new(format!("the control plane cannot listen on {address}: {e}"))
                .help("choose other addresses with --agents and --depot")
        })
    };
    let any = |port| SocketAddr::from(([0, 0, 0, 0], port));
    let listen = |address| Ok::<_, Failure>(Listener::new(listen(address)?, tls.map(|tls| tls.agents.clone())));
    let listeners = Listeners {
        agents: listen(args.agents.unwrap_or(any(8081)))?,
        depot: listen(args.depot.unwrap_or(any(8082)))?,
    };
    let bound = |listener: &Listener| listener.local_addr().or_fail(|| "a listener has no address".to_owned());
    let (agents, depot) = (bound(&listeners.agents)?, bound(&listeners.depot)?);
    let ip = advertised(args, agents.ip())?;
    let site = Site {
        agents: SocketAddr::new(ip, agents.port()).to_string(),
        depot: format!("{}://{}", if tls.is_some() { "https" } else { "http" }, SocketAddr::new(ip, depot.port())),
        authority: tls.map(|tls| tls.authority.clone()),
        image: image(&client, args, runtime)?,
        priority_class: args.priority_class.clone(),
        log_buffer: LOG_BUFFER,
        fence_after: args.fence_after.map_or(FENCE_AFTER, Span::seconds),
    };
    note(&format!("agents reach this at {}", site.agents));
    let config = KubeConfig {
        client: client.clone(),
        namespace: args.kube_namespace.clone(),
        observe: observes(args),
        site,
        exporters,
        objects: objects.clone(),
        pip: pip(std::env::vars_os()),
        held: Arc::new(move || reader.term().ok()),
    };
    let resolver = Resolver::new(client.clone(), registries(args)?);
    let report = Arc::new(report);
    let reports = report.clone();
    let report_durable = move |observation, durable| reports(observation, durable);
    let cluster = KubeCluster::start(config, listeners, telemetry, report_durable, runtime.handle());
    let handle = cluster.handle();
    let cluster: Box<dyn Cluster + Send> = if args.pretend_workers {
        pretended(&client, cluster, Arc::new(move |observation| report(observation, None)), runtime)?
    } else {
        Box::new(cluster)
    };
    let volumes = args.volumes.clone().unwrap_or_else(|| home.join("volumes"));
    let body = Arc::new(Kube { client, handle, resolver, objects, runtime: runtime.handle().clone(), volumes });
    Ok(Ground { cluster, body, nodes: None })
}

/// The cluster with workers that are only pretended.
fn pretended(
    client: &Client,
    cluster: KubeCluster,
    report: Report,
    runtime: &Runtime,
) -> Result<Box<dyn Cluster + Send>> {
    runtime.block_on(pretend::check(client)).map_err(|why| {
        Failure::usage(format!("--pretend-workers is for benchmarks, and {why}")).help("leave it out")
    })?;
    note("no job runs here: workers are pretended, for a benchmark");
    Ok(Box::new(Pretended::new(cluster, report, runtime.handle().clone())))
}

/// The image with which job pods are prepared.
fn image(client: &Client, args: &KubeArgs, runtime: &Runtime) -> Result<String> {
    match (&args.image, &args.pod) {
        (Some(image), _) => Ok(image.clone()),
        (None, Some(pod)) => runtime.block_on(own::image(client, &args.kube_namespace, pod)).map_err(|e| {
            Failure::new(format!("the image that job pods are prepared with is not known: {e}"))
                .help("let the control plane's account get pods, or name the image with --image")
        }),
        (None, None) => Ok(IMAGE.to_owned()),
    }
}

/// Where GPUs report what they do, if the administrator says it.
pub fn exporters(args: &KubeArgs) -> Option<Exporters> {
    let selector = args.gpu_metrics_selector.clone()?;
    Some(Exporters::new(Some((selector, args.gpu_metrics_port.unwrap_or(PORT)))))
}

/// Registries as the administrator has them.
fn registries(args: &KubeArgs) -> Result<Registries> {
    let roots = match &args.registry_ca {
        Some(file) => Some(std::fs::read(file).map_err(|e| {
            Failure::usage(format!("the certificates {} cannot be read: {e}", file.display()))
                .help("name a file of certificates in PEM with --registry-ca")
        })?),
        None => None,
    };
    Registries::new(args.plain_registry.iter().cloned(), roots.as_deref())
        .map_err(|why| Failure::usage(format!("the certificates of --registry-ca are of no use: {why}")))
}

/// Variables of pip, which hold where layers are made as they do where environments of one machine are.
fn pip(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<(String, String)> {
    let text = all.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut found: Vec<_> = text.filter(|(name, _)| name.starts_with("PIP_")).collect();
    found.sort_unstable();
    found
}

/// The one platform that a job's packages are to be made for.
fn one_platform(found: &BTreeSet<String>) -> std::result::Result<String, Unresolved> {
    let all: Vec<&str> = found.iter().map(String::as_str).filter(|platform| !platform.is_empty()).collect();
    match all.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => {
            let message = "the cluster has no node that the job may be on, so it is not known for which platform its `requirements` are to be made";
            let error = ApiError::new("noPlatform", message).help("submit it again once there is one");
            Err(Unresolved { error, passing: true })
        }
        [..] => {
            let message = format!(
                "its `requirements` are made for one platform, and nodes that the job may be on have {}",
                all.join(" and ")
            );
            let error =
                ApiError::new("severalPlatforms", message).help("name the accelerators of one of them by `gpuType`");
            Err(Unresolved { error, passing: false })
        }
    }
}

/// Whether the cluster is only looked at.
pub fn observes(args: &KubeArgs) -> bool {
    args.mode == "observe"
}

/// Refuses to only look where there are jobs that somebody must look after.
pub fn check_mode(engine: &Handle, args: &KubeArgs) -> Result<()> {
    if !observes(args) {
        return Ok(());
    }
    let jobs = engine.read(|view| view.snapshot.jobs.len()).map_err(|e| Failure::platform(e.to_string()))?;
    if jobs == 0 {
        return Ok(());
    }
    Err(Failure::usage(format!("the store has {jobs} jobs that have not ended, and nobody would look after them"))
        .help("start it with --mode schedule; observe once they have ended or were cancelled"))
}

/// The address under which pods reach this.
pub fn advertised(args: &KubeArgs, bound: IpAddr) -> Result<IpAddr> {
    match args.advertise {
        Some(ip) => Ok(ip),
        None if bound.is_unspecified() || bound.is_loopback() => Err(Failure::usage(format!(
            "pods cannot reach {bound}, and no other address of this control plane is known"
        ))
        .help("name it with --advertise: the Service's address, or this machine's")),
        None => Ok(bound),
    }
}

/// Keeps objects alike to jobs, queues and pools, from now on.
pub fn mirror(
    client: Client,
    engine: Handle,
    applies: Applies,
    reader: Arc<dyn Reader>,
    args: &KubeArgs,
    runtime: &Runtime,
) {
    let documents =
        Documents::run(client.clone(), engine.clone(), Arc::new(Rows(reader)), Defaults::default().priorities);
    runtime.spawn(documents);
    runtime.spawn(Mirror::run(client, engine, Arc::new(Submits(applies)), args.default_queue.clone()));
}

struct Rows(Arc<dyn Reader>);

impl Journal for Rows {
    fn last(&self, of: Option<(ActKind, &str)>) -> Option<u64> {
        let filter = ActFilter {
            kind: of.map(|(kind, _)| kind),
            name: of.map(|(_, name)| name.to_owned()),
            limit: 1,
            ..ActFilter::default()
        };
        Some(self.0.acts(&filter).ok()?.first()?.row)
    }
}

struct Submits(Applies);

impl mirror::Jobs for Submits {
    fn submit(&self, applied: mirror::Applied) -> mirror::Submitting {
        let mirror::Applied { namespace, user, spec, provenance } = applied;
        let applies = self.0.clone();
        Box::pin(async move {
            let taken = applies.submit(Applied { namespace, user, spec, provenance }).await;
            taken.map_err(|NotTaken { reason, message }| mirror::NotTaken { reason, message })
        })
    }

    fn ended(&self, job: JobId) -> Option<Ended> {
        let (job, at, record) = self.0.ended(job)?;
        Some(Ended { job, at, image: record.provenance.image })
    }

    fn timeline(&self, job: JobId, after: u64) -> Vec<events::Entry> {
        let entry = |(row, moment, text): (u64, Moment, String)| {
            let Moment { at, attempt, kind, .. } = moment;
            events::Entry { row, at, attempt, kind, text }
        };
        self.0.timeline(job, after).into_iter().map(entry).collect()
    }
}

/// People and their rights, as the server asks for them.
pub fn identities(client: Client, tls: Option<&Tls>) -> Arc<dyn Identities> {
    Arc::new(People(Reviews::new(client, tls.and_then(|tls| tls.clients.clone()))))
}

struct People(Reviews);

impl Identities for People {
    fn authenticate<'a>(&'a self, token: &'a str) -> Asked<'a, Option<Arc<Identity>>> {
        Box::pin(async move { self.0.authenticate(token).await.map_err(Unavailable::from) })
    }

    fn certified<'a>(
        &'a self,
        chain: &'a [CertificateDer<'static>],
    ) -> Asked<'a, std::result::Result<Arc<Identity>, String>> {
        let identity = match self.0.certified(chain) {
            Ok(identity) => Ok(Ok(identity)),
            Err(Uncertified::Refused(why)) => Ok(Err(why)),
            Err(Uncertified::Unknown(why)) => Err(why.into()),
            Err(Uncertified::Forbidden(why)) => Err(Unavailable {
                why,
                help: Some(format!(
                    "come with a token; an administrator of the cluster gives the control plane the right by the \
                     RoleBinding `{BINDING}` of the manifest, in `kube-system`"
                )),
            }),
        };
        Box::pin(async move { identity })
    }

    fn may<'a>(&'a self, identity: &'a Arc<Identity>, right: &'a Right) -> Asked<'a, bool> {
        Box::pin(async move { self.0.may(identity, right).await.map_err(Unavailable::from) })
    }
}

/// The body, as the server asks for it.
struct Kube {
    client: Client,
    handle: KubeHandle,
    resolver: Resolver,
    objects: Arc<dyn Objects>,
    runtime: Threads,
    volumes: PathBuf,
}

impl Body for Kube {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    fn exec(&self, target: ExecTarget, exec: Exec) -> std::result::Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        let key = super::body::key(target);
        let stdin = super::body::stdin(&exec)?;
        let stream = self.handle.exec(key, exec.rank, exec.argv, &stdin);
        Ok(super::body::frames(stream.map_err(|e| ExecRefusal(e.to_string()))?, &self.runtime))
    }

    fn open(&self, target: ExecTarget, rank: Option<u32>, to: ChannelTo) -> std::result::Result<Opening, ExecRefusal> {
        super::channel::opening(self.handle.open(super::body::key(target), rank, super::channel::to(to)), &self.runtime)
    }

    fn stacks(&self, target: ExecTarget, rank: Option<u32>) -> Telling {
        super::channel::stacks(self.handle.open(super::body::key(target), None, Channel::Stacks { rank }))
    }

    fn check(&self, test: NodeTest) -> std::result::Result<mpsc::Receiver<ExecFrame>, ExecRefusal> {
        let NodeTest { node, image, run, gpus: _ } = test;
        Ok(self.handle.check(Check { node, image, run }))
    }

    fn volumes(&self, job: JobId) -> PathBuf {
        self.volumes.join("jobs").join(job.0.to_string()).join("volumes")
    }

    fn agents(&self) -> Vec<BodyAgent> {
        let agent = |(key, connected, gpus): (StreamKey, bool, Vec<String>)| BodyAgent {
            job: key.job,
            attempt: key.attempt,
            worker: key.worker,
            pid: None,
            connected,
            gpus,
        };
        self.handle.gpus().into_iter().map(agent).collect()
    }

    fn requests(&self) -> BTreeMap<&'static str, u64> {
        api::requests()
    }

    fn environment_ready(&self, hash: &str) -> bool {
        // Images are pulled where they are needed: what is made is a layer.
        self.objects.layer(hash).is_ok_and(|found| found.is_some())
    }

    fn environments(&self) -> Option<std::result::Result<Vec<EnvironmentInfo>, String>> {
        let all = self.runtime.block_on(self.resolver.environments());
        Some(all.map(|all| all.into_iter().map(resolve::shown).collect()))
    }

    fn resolve<'a>(&'a self, namespace: &'a str, spec: &'a JobSpec) -> Resolving<'a> {
        Box::pin(async move {
            let resolved = self.resolver.resolve(namespace, spec).await;
            resolved.map_err(|resolve::Unresolved { error, passing }| Unresolved { error, passing })
        })
    }

    fn platform<'a>(&'a self, spec: &'a JobSpec) -> Settling<'a> {
        Box::pin(async move { one_platform(&self.handle.platforms(spec.gpu_type.clone()).await) })
    }

    fn ready(&self) -> std::result::Result<(), String> {
        self.handle.ready()
    }

    fn observed(&self) -> Option<Observed> {
        self.handle.observed()
    }

    fn observes(&self) -> bool {
        self.handle.observes()
    }

    fn describe_pool(&self, pool: &PoolSpec) -> std::result::Result<(), String> {
        self.runtime.block_on(documents::describe(&self.client, pool))
    }

    fn drained(&self, job: JobId) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let handle = self.handle.clone();
        Box::pin(async move {
            while handle.workers().iter().any(|(key, connected)| key.job == job && *connected) {
                tokio::time::sleep(LOOK).await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_is_told_what_is_its_own() {
        let all = [
            ("PIP_INDEX_URL", "https://index.example/simple"),
            ("AVIFLOW_STORE", "postgres://aviflow:secret@db/aviflow"),
            ("PATH", "/bin"),
        ];
        let told = pip(all.into_iter().map(|(name, value)| (name.into(), value.into())));
        assert_eq!(told, [("PIP_INDEX_URL".to_owned(), "https://index.example/simple".to_owned())]);
    }

    #[test]
    fn packages_are_made_for_one_platform() {
        let of = |all: &[&str]| {
            let found = one_platform(&all.iter().map(|p| (*p).to_owned()).collect());
            found.map_err(|unresolved| (unresolved.error.code, unresolved.passing))
        };
        assert_eq!(of(&["linux/arm64"]), Ok("linux/arm64".to_owned()));
        assert_eq!(of(&[""]), Err(("noPlatform".to_owned(), true)));
        assert_eq!(of(&["linux/amd64", "linux/arm64"]), Err(("severalPlatforms".to_owned(), false)));
    }
}
