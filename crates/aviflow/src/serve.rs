//! `serve`: the control plane put together, from store to listener.
//!
//! It ends on SIGTERM and SIGINT: nothing new is taken, the engine commits its
//! last turn, and agents go on with their trainings. The next one takes them up.

mod body;
mod channel;
mod gpus;
mod housekeeping;
mod kube;
mod notify;
mod rebuild;
mod seat;
mod shelf;
mod shipped;
pub mod store;
mod tls;
mod watch;

pub use shipped::write_hooks;

use crate::cli::{KubeArgs, ServeArgs, StartArgs};
use crate::commands::goes_on;
use crate::error::{Failure, Result, While};
use crate::home::{Home, PoolFile, ServerFile};
use crate::output::{Output, note, now, print};
use aviflow_api::environment::hex;
use aviflow_api::file::Defaults;
use aviflow_core::gpus::Slots;
use aviflow_core::model::Phase;
use aviflow_engine::driver::{Handle, Starter, Watching};
use aviflow_engine::ports::{Cluster, Observation, StoreError};
use aviflow_engine::telemetry::Telemetry;
use aviflow_engine::watcher::Watcher;
use aviflow_kube::Client;
use aviflow_link::Durable;
use aviflow_local::Objects as Find;
use aviflow_local::{LocalCluster, LocalConfig, NodeConfig};
use aviflow_server::{Body, Info, Outcomes, Parts, Server, ServerConfig, Token};
use aviflow_store::{FileTelemetry, Objects};
use aviflow_tls::Listener;
use aviflow_tls::listener::Speech;
use housekeeping::Housekeeping;
use seat::{Seat, Stop};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shelf::Shelf;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use store::Stores;
use tls::Tls;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Threads that may wait for the disk or the engine.
const BLOCKING_THREADS: usize = 32;

/// What a control plane in the background says, once, on its standard output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Announcement {
    /// It answers.
    Ready(ServerFile),
    /// It could not start.
    Failed {
        /// What happened.
        message: String,
        /// What to do.
        help: Option<String>,
        /// The exit code.
        code: u8,
    },
}

/// `aviflow serve`
pub fn serve(args: ServeArgs, output: Output) -> Result<()> {
    if args.background {
        // Ctrl-C in the shell that started it must not reach it. It fails only for the leader of a
        // group, which is what a session of its own would make of this process.
        let _ = rustix::process::setsid();
    }
    let mut announce = |announcement: Announcement| {
        if args.background {
            print(&format!("{}\n", serde_json::to_string(&announcement).unwrap_or_default()));
        } else if let Announcement::Ready(file) = announcement {
            print(&format!("the control plane serves at {} (process {}); Ctrl-C ends it\n", file.url, file.pid));
        }
    };
    let result = run(&args, &mut announce);
    if let Err(failure) = &result {
        let Failure { message, help, code, .. } = failure.clone();
        if args.background {
            note(&failure.render(output.error_style));
            announce(Announcement::Failed { message, help, code });
        }
    }
    result
}

fn run(args: &ServeArgs, announce: &mut dyn FnMut(Announcement)) -> Result<()> {
    let home = match &args.home {
        Some(path) => Home::at(path)?,
        None => Home::find()?,
    };
    home.create()?;
    let store = store::choose(&home, args.store.as_ref().map(|store| store.0.as_str()))?;
    // Of several on one database the term says who writes, and a lease who shall; they may share a home folder.
    let shares = args.kube.kube && store.is_shared();
    let mut lock = if shares { None } else { Some(home.lock_server()?) };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .or_fail(|| "threads cannot be started".to_owned())?;
    let client = args.kube.kube.then(|| kube::connect(&args.kube, &runtime)).transpose()?;
    let listener = runtime.block_on(listen(args.pool.listen.as_deref(), args.kube.kube))?;
    let tls = Tls::begin(&args.kube, client.as_ref(), local_address(&listener)?.ip(), &runtime)?;
    let mut stop = runtime.block_on(async { Stop::listen() })?;
    let me = called(&args.kube, &home, shares);
    let seat = match kube::lease(&args.kube, client.as_ref(), shares, &me) {
        Some(lease) => match runtime.block_on(Seat::wait(lease, (&listener, people(&tls)), &mut stop))? {
            Some(seat) => Some(seat),
            None => return Ok(()),
        },
        None => None,
    };
    if lock.is_none() {
        // One that is being replaced, or whose machine is gone, may have it a little longer. It says nothing here.
        lock = home.try_lock_server()?;
    }
    // Of one that was killed; nobody may take it for this one's.
    let _ = std::fs::remove_file(home.join("server.json"));
    let pool = pool(&home, &args.pool)?;
    let stores = store.open(&home, &me)?;
    let plane = Plane::start(&home, &pool, args, (client, tls), stores, seat, &runtime)?;
    let served = runtime.block_on(plane.serve(&home, listener, stop, announce));
    drop(lock);
    served
}

/// How people are spoken to.
fn people(tls: &Option<Tls>) -> Option<Speech> {
    tls.as_ref()?.people.clone()
}

/// What this control plane calls itself before others. Nobody else does while it runs.
fn called(args: &KubeArgs, home: &Home, shares: bool) -> String {
    if let Some(pod) = &args.pod {
        return pod.clone();
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if shares {
        return format!("{host}_{}_{}", std::process::id(), now());
    }
    // Who has the lock of the folder is the only one of it, so that the next need not wait for the one before.
    let mut folder = hex(&Sha256::digest(home.path().as_os_str().as_encoded_bytes()));
    folder.truncate(8);
    format!("{host}_{folder}")
}

/// Listens where it is asked to.
async fn listen(address: Option<&str>, anywhere: bool) -> Result<TcpListener> {
    let address = address.unwrap_or("127.0.0.1:0");
    let listener = TcpListener::bind(address).await.map_err(|e| {
        Failure::new(format!("the control plane cannot listen on {address}: {e}"))
            .help("choose another address with --listen")
    })?;
    let bound = local_address(&listener)?;
    if !bound.ip().is_loopback() && !anywhere {
        return Err(Failure::usage(format!(
            "other machines could reach {bound}, and whoever has the token can run commands here"
        ))
        .help("listen on 127.0.0.1; from another machine, come in through `ssh -L`"));
    }
    Ok(listener)
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().or_fail(|| "the listener has no address".to_owned())
}

/// The pool as it is asked for, else as it was, else the default.
fn pool(home: &Home, args: &StartArgs) -> Result<PoolFile> {
    let before = home.pool();
    let pool = PoolFile {
        nodes: args.nodes.unwrap_or(before.nodes),
        gpus_per_node: args.gpus_per_node.unwrap_or(before.gpus_per_node),
        gpu_type: args.gpu_type.clone().unwrap_or(before.gpu_type),
    };
    let bytes = serde_json::to_vec_pretty(&pool).or_fail(|| "the pool cannot be written".to_owned())?;
    home.write("pool.json", &bytes)?;
    Ok(pool)
}

/// Everything that runs.
struct Plane {
    engine: Handle,
    thread: std::thread::JoinHandle<()>,
    ended: oneshot::Receiver<Option<StoreError>>,
    server: Server,
    started: i64,
    tls: Option<Tls>,
    /// Where there may be several, of which this one decides.
    seat: Option<Seat>,
}

impl Plane {
    fn start(
        home: &Home,
        pool: &PoolFile,
        args: &ServeArgs,
        (client, tls): (Option<Client>, Option<Tls>),
        stores: Stores,
        seat: Option<Seat>,
        runtime: &Runtime,
    ) -> Result<Plane> {
        let (started, kube) = (now(), &args.kube);
        let folder = home.path();
        let token = Token::load_or_create(&home.join("token")).map_err(|e| Failure::new(e.to_string()))?;
        let Stores { mut store, reader, keeper } = stores;
        let disk = |what: &'static str| move || format!("{what} in {} cannot be opened", folder.display());
        let objects = Arc::new(Objects::open(folder).or_fail(disk("objects"))?);
        let telemetry = Arc::new(FileTelemetry::open(folder).or_fail(disk("logs"))?);
        let environments = shipped::environments()?;
        if let Some(client) = client.as_ref().filter(|_| !kube::observes(kube)) {
            rebuild::where_lost(&mut store, reader.as_ref(), client, &kube.default_queue, &objects, runtime)?;
        }

        let starter = Starter::default();
        let (handle, feed) = (starter.handle(), starter.handle().feed().clone());
        let builds = telemetry.clone();
        let report = move |observation, durable| {
            forget_build(&builds, &observation);
            handle.observe(observation, durable);
        };
        let exporters = kube::exporters(kube);
        let shipped: Arc<dyn Telemetry> = Arc::new(Watching::new(telemetry.clone(), feed.clone()));
        let ground = match &client {
            Some(client) => {
                let cluster = (client.clone(), reader.clone());
                let shelf =
                    Shelf { objects: objects.clone(), find: finder(home, objects.clone()), folder: folder.to_owned() };
                let shelf = Arc::new(shelf);
                kube::ground(
                    (kube, tls.as_ref(), exporters.clone().unwrap_or_default()),
                    cluster,
                    folder.to_owned(),
                    shelf,
                    shipped,
                    report,
                    runtime,
                )?
            }
            None => this_machine(config(home, pool, objects.clone())?, shipped, report, runtime)?,
        };
        let Ground { cluster, body, nodes } = ground;
        let gpus = gpus::ask(args, nodes.as_ref(), exporters)?;
        let (end, ended) = oneshot::channel();
        let stacks = watch::Taker {
            body: body.clone(),
            telemetry: telemetry.clone(),
            feed: feed.clone(),
            runtime: runtime.handle().clone(),
        };
        let (engine, thread) = starter
            .watched(Watcher::new(watch::settings(args), body.numbers_gpus()), Box::new(stacks))
            .start(store, cluster, move |error| {
                // Nobody waits any more when the control plane is being stopped.
                let _ = end.send(error);
            })
            .map_err(store_failure)?;
        watch::sample(engine.clone(), body.clone(), gpus.clone(), feed)?;
        if let Some(nodes) = nodes {
            forget_nodes(&engine, nodes)?;
        }
        if let Some(seat) = &seat {
            let term = engine.read(|view| view.term).map_err(|e| Failure::platform(e.to_string()))?;
            seat.took(reader.clone(), term);
        }
        Housekeeping {
            keeper,
            reader: reader.clone(),
            objects: objects.clone(),
            telemetry: telemetry.clone(),
            folder: Box::new({
                let body = body.clone();
                move |job| {
                    let volumes = body.volumes(job);
                    volumes.parent().unwrap_or(&volumes).to_owned()
                }
            }),
        }
        .start()?;

        let notified = Arc::new(Outcomes::default());
        let server = Server::new(Parts {
            notified: notified.clone(),
            engine: engine.clone(),
            reader: reader.clone(),
            objects,
            telemetry,
            gpus,
            body,
            environments,
            defaults: Defaults::default(),
            token,
            identities: client.clone().map(|client| kube::identities(client, tls.as_ref())),
            info: Info { version: env!("CARGO_PKG_VERSION").to_owned(), home: folder.display().to_string(), started },
            // On a cluster each request says whose it is, so it may come from anywhere.
            config: ServerConfig { allow_remote: kube.kube, ..ServerConfig::default() },
        });
        if let Err(refused) = kube::check_mode(&engine, kube) {
            engine.stop();
            return Err(refused);
        }
        if !kube::observes(kube) {
            let rules = notify::Rules { hosts: args.notify_hosts.clone(), loopback: !kube.kube };
            notify::start(home, &engine, server.looks(), rules, notified, runtime)?;
        }
        if let Some(client) = client.filter(|_| !kube::observes(kube)) {
            kube::mirror(client, engine.clone(), server.applies(), reader, kube, runtime);
        }
        Ok(Plane { engine, thread, ended, server, started, tls, seat })
    }

    async fn serve(
        mut self,
        home: &Home,
        listener: TcpListener,
        mut stop: Stop,
        announce: &mut dyn FnMut(Announcement),
    ) -> Result<()> {
        let speech = people(&self.tls);
        let scheme = if speech.is_some() { "https" } else { "http" };
        let file = ServerFile {
            pid: std::process::id(),
            url: format!("{scheme}://{}", reached_here(local_address(&listener)?)),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: self.started,
            authority: self.tls.as_ref().filter(|_| speech.is_some()).map(|tls| tls.authority.clone()),
        };
        // Ready means that the engine has taken a first turn and the listener is bound.
        let engine = self.engine.clone();
        let asked = tokio::task::spawn_blocking(move || engine.read(|_| ())).await;
        asked.or_fail(|| "the engine does not answer".to_owned())?.map_err(|e| Failure::platform(e.to_string()))?;
        let bytes = serde_json::to_vec_pretty(&file).or_fail(|| "server.json cannot be written".to_owned())?;
        home.write("server.json", &bytes)?;
        note(&format!("serving at {} as process {}", file.url, file.pid));
        announce(Announcement::Ready(file.clone()));

        let lost: Pin<Box<dyn Future<Output = Failure> + Send>> = match &mut self.seat {
            Some(seat) => {
                seat.opens().await;
                Box::pin(seat.lost())
            }
            None => Box::pin(std::future::pending()),
        };
        let Plane { engine, thread, mut ended, server, seat, .. } = self;
        let (failed, mut reason) = oneshot::channel();
        let shutdown = async move {
            let failure = tokio::select! {
                () = stop.asked() => return,
                error = &mut ended => match error.ok().flatten() {
                    Some(error) => store_failure(error),
                    None => Failure::platform("the engine ended by itself"),
                },
                failure = lost => failure,
            };
            // Received below, also if nothing waits there.
            let _ = failed.send(failure);
        };
        let served = server.serve(Listener::new(listener, speech), shutdown).await;
        // First of all: a client that looks now must not come here.
        home.forget_server(&file);
        let left = {
            let engine = engine.clone();
            tokio::task::spawn_blocking(move || left_behind(&engine)).await.unwrap_or_default()
        };
        engine.stop();
        tokio::task::spawn_blocking(move || thread.join()).await.ok();
        // Last: whoever has it next finds everything written.
        if let Some(seat) = seat {
            seat.release().await;
        }
        note(&format!("stopped\n{}", goes_on(&left.0, left.1)));
        served.map_err(|e| Failure::new(e.to_string()))?;
        match reason.try_recv() {
            Ok(failure) => Err(failure),
            Err(_) => Ok(()),
        }
    }
}

/// An address of a listener from its own machine.
fn reached_here(bound: SocketAddr) -> SocketAddr {
    match bound.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), bound.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), bound.port()),
        _ => bound,
    }
}

fn store_failure(error: StoreError) -> Failure {
    Failure::platform(error.to_string())
}

/// What jobs run on.
struct Ground {
    cluster: Box<dyn Cluster + Send>,
    body: Arc<dyn Body>,
    /// All nodes that there are, where that is known from the start.
    nodes: Option<BTreeSet<String>>,
}

/// This machine's processes as the body.
fn this_machine(
    config: LocalConfig,
    telemetry: Arc<dyn Telemetry>,
    report: impl Fn(Observation, Option<Durable>) + Send + Sync + 'static,
    runtime: &Runtime,
) -> Result<Ground> {
    let nodes = Some(config.nodes.iter().map(|n| n.name.clone()).collect());
    let cluster = LocalCluster::start(config, telemetry, report, runtime.handle().clone())
        .map_err(|e| Failure::new(e.to_string()))?;
    let body = Arc::new(body::Local::new(cluster.handle(), runtime.handle().clone()));
    Ok(Ground { cluster: Box::new(cluster), body, nodes })
}

/// Finds objects by their content.
fn finder(home: &Home, objects: Arc<Objects>) -> Find {
    let root = home.path().to_owned();
    Arc::new(move |hash: &str| {
        // Read to its end, where it fails if the content is not what its hash says.
        std::io::copy(&mut objects.get(hash)?, &mut std::io::sink())?;
        let (first, rest) = hash.split_at(2);
        Ok(root.join("objects/sha256").join(first).join(rest))
    })
}

fn config(home: &Home, pool: &PoolFile, objects: Arc<Objects>) -> Result<LocalConfig> {
    let program = std::env::current_exe().or_fail(|| "this program cannot be found".to_owned())?;
    let agent = vec![program.into_os_string(), "agent".into()];
    let mut config = LocalConfig::new(home.path().to_owned(), agent, finder(home, objects));
    config.nodes =
        (0..pool.nodes).map(|n| NodeConfig { name: format!("local-{n}"), gpus: pool.gpus_per_node }).collect();
    config.gpu_type.clone_from(&pool.gpu_type);
    config.python_hooks = Some(shipped::hooks(home)?);
    Ok(config)
}

/// How far a build is ends to be news with the build.
fn forget_build(telemetry: &FileTelemetry, observation: &Observation) {
    if let Observation::EnvironmentReady { hash } | Observation::EnvironmentFailed { hash, .. } = observation {
        telemetry.forget_build(&hash.0);
    }
}

/// Nodes that the store knows and the pool no longer has are gone, and no part
/// of its capacity any more.
fn forget_nodes(engine: &Handle, configured: BTreeSet<String>) -> Result<()> {
    let known = engine.read(|view| {
        let there = view.snapshot.nodes.values().filter(|n| n.gpus != Slots::NONE);
        there.map(|n| (n.name.clone(), n.pool.clone(), n.gpu_type.clone())).collect::<Vec<_>>()
    });
    for (name, pool, gpu_type) in known.map_err(|e| Failure::platform(e.to_string()))? {
        if !configured.contains(&name) {
            engine
                .observe(Observation::NodeSeen { name: name.clone(), pool, gpu_type, gpus: 0, path: Vec::new() }, None);
            engine.observe(Observation::NodeGone { name }, None);
        }
    }
    Ok(())
}

/// Jobs that hold GPUs, and how many wait.
fn left_behind(engine: &Handle) -> (Vec<String>, u32) {
    let read = engine.read(|view| {
        let mut holding = Vec::new();
        let mut waiting = 0;
        for job in view.snapshot.jobs.values() {
            match &job.phase {
                Phase::Queued => waiting += 1,
                phase if !phase.is_terminal() => holding.push(format!("{}/{}", job.key.namespace, job.key.name)),
                _ => {}
            }
        }
        (holding, waiting)
    });
    // An engine that has ended knows nothing any more.
    read.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::EnvironmentHash;
    use aviflow_engine::telemetry::BuildProgress;

    #[test]
    fn a_build_that_is_over_is_no_longer_told() {
        let folder = tempfile::TempDir::new().unwrap();
        let telemetry = FileTelemetry::open(folder.path()).unwrap();
        for hash in ["a", "b"] {
            let (name, step) = ("jax-cpu@1".to_owned(), "collecting jax".to_owned());
            telemetry.build(BuildProgress { hash: hash.to_owned(), name, step, done: 1, total: 6 });
        }
        let hash = |hash: &str| EnvironmentHash(hash.to_owned());
        forget_build(&telemetry, &Observation::NodeGone { name: "b".into() });
        forget_build(&telemetry, &Observation::EnvironmentReady { hash: hash("a") });
        assert_eq!(telemetry.builds().iter().map(|b| b.hash.as_str()).collect::<Vec<_>>(), ["b"]);
        forget_build(&telemetry, &Observation::EnvironmentFailed { hash: hash("b"), reason: "no network".into() });
        assert_eq!(telemetry.builds(), []);
    }
}
