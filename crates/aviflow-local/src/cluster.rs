//! Orders in, observations out.
//!
//! One lock guards what is known of each worker; it is never held while
//! something is reported, written or waited for. Work that takes time is done by
//! one thread for each worker (`worker`) and each build (`environments`).

use crate::environments::{Cancel, Environments, Outcome};
use crate::hurry::{self, Watch};
use crate::spec::{Share, Site};
use crate::{LocalConfig, LocalError, LocalHandle, Volumes, devices, private_folder, worker};
use aviflow_agent::protocol::Ended;
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::{EnvironmentHash, JobId, Placement};
use aviflow_core::time::Span;
use aviflow_engine::ports::{Cluster, JobRecord, Observation, Order, Stamped};
use aviflow_engine::telemetry::{StreamKey, Telemetry};
use aviflow_link::Hello;
use rustix::fs::FlockOperation;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What threads, connections and handles share.
pub(crate) type Shared = aviflow_link::Workers<Machine>;
pub(crate) type Worker = aviflow_link::Worker<Own>;

/// The longest path of a Unix socket, without the zero at its end.
const SOCKET_PATH: usize = 107;

/// This machine as a cluster. Dropping it ends what belongs to the control
/// plane and leaves agents and ranks alone.
pub struct LocalCluster {
    shared: Arc<Shared>,
    listening: tokio::task::AbortHandle,
    _only: File,
}

/// This machine, as the agents' connections ask for it.
pub(crate) struct Machine {
    pub(crate) config: LocalConfig,
    pub(crate) environments: Environments,
    pub(crate) volumes: Volumes,
    pub(crate) socket: PathBuf,
    pub(crate) runtime: tokio::runtime::Handle,
    /// Ends builds when the cluster is dropped, and says that it was.
    pub(crate) cancel: Arc<Cancel>,
    building: Mutex<BTreeSet<String>>,
}

/// What is known here of a worker beside what is told to its agent.
#[derive(Default)]
pub(crate) struct Own {
    /// The token, once the worker's folder has one.
    pub(crate) token: Option<String>,
    /// Sees to it that it ends in time.
    pub(crate) watch: Option<Watch>,
    /// Its agent did not end in time and was killed.
    pub(crate) killed: bool,
}

impl Machine {
    pub(crate) fn site(&self) -> Site<'_> {
        Site { config: &self.config, volumes: &self.volumes, environments: &self.environments, socket: &self.socket }
    }

    pub(crate) fn workers_folder(&self) -> PathBuf {
        self.config.home.join("workers")
    }

    pub(crate) fn worker_folder(&self, key: StreamKey) -> PathBuf {
        self.workers_folder().join(format!("{}.{}.{}", key.job.0, key.attempt, key.worker))
    }

    fn building(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        // Whoever panicked left a whole set.
        self.building.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl aviflow_link::Site for Machine {
    type Own = Own;
    type Proof = String;

    async fn prove(&self, hello: &Hello) -> Option<String> {
        Some(hello.token.clone())
    }

    fn is(&self, worker: &Own, token: &String) -> Option<bool> {
        Some(same(worker.token.as_ref()?, token))
    }

    fn ended(&self, key: StreamKey) -> std::io::Result<Option<Ended>> {
        aviflow_agent::find_ended(&self.worker_folder(key))
    }

    fn named(&self, job: JobId, path: &str) -> String {
        self.volumes.named(job, path)
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

impl LocalCluster {
    /// Takes the home folder, listens for agents and reports the nodes.
    ///
    /// `report` must not block; its second argument is called once the
    /// observation is durable. It may be called from any thread.
    ///
    /// # Errors
    /// If another control plane uses the folder, it cannot be written, or the configuration cannot work.
    pub fn start(
        config: LocalConfig,
        telemetry: Arc<dyn Telemetry>,
        report: impl Fn(Observation, Option<aviflow_link::Durable>) + Send + Sync + 'static,
        runtime: tokio::runtime::Handle,
    ) -> Result<LocalCluster, LocalError> {
        devices::check(&config.nodes)?;
        if config.agent.is_empty() {
            return Err(LocalError::Config("no program is given that starts agents".to_owned()));
        }
        aviflow_agent::sys::raise_file_limit();
        let home = &config.home;
        private_folder(home).map_err(LocalError::io(home))?;
        let home = std::fs::canonicalize(home).map_err(LocalError::io(home))?;
        let config = LocalConfig { home: home.clone(), ..config };
        let only = take(&home)?;
        let cancel = Arc::new(Cancel::default());
        let environments = Environments::new(&config);
        for folder in [home.join("workers"), home.join("jobs"), home.join("secrets"), home.join("cache")] {
            private_folder(&folder).map_err(LocalError::io(&folder))?;
        }
        let socket = home.join("agents.sock");
        let listener = listen(&socket).map_err(LocalError::io(&socket))?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::UnixListener::from_std(listener).map_err(LocalError::io(&socket))?
        };
        let machine = Machine {
            volumes: Volumes::new(&home),
            environments,
            config,
            socket,
            runtime: runtime.clone(),
            cancel,
            building: Mutex::default(),
        };
        let shared = Arc::new(Shared::new(machine, telemetry, Box::new(report)));
        let listening = runtime.spawn(aviflow_link::listen(shared.clone(), listener)).abort_handle();
        for node in devices::seen(&shared.site.config) {
            shared.report(node, None);
        }
        Ok(LocalCluster { shared, listening, _only: only })
    }

    /// What the server asks beside the loop.
    #[must_use]
    pub fn handle(&self) -> LocalHandle {
        LocalHandle::new(self.shared.clone())
    }

    fn launch(&self, record: &Arc<JobRecord>, attempt: u32, placement: &Placement, nodes: &[String]) {
        let workers = u32::try_from(placement.0.len()).unwrap_or(u32::MAX);
        for (worker, (_, slots)) in (0..workers).zip(&placement.0) {
            let key = StreamKey { job: record.id, attempt, worker };
            let node = nodes.get(worker as usize).cloned().unwrap_or_default();
            let here = self.shared.site.config.nodes.iter().any(|n| n.name == node);
            {
                let mut state = self.shared.lock();
                if let Some(known) = state.workers.get_mut(&key) {
                    if !known.over || known.remove {
                        continue;
                    }
                    // Said again, as the report of its end may have been lost.
                    known.over = false;
                } else if here || self.shared.site.worker_folder(key).exists() {
                    state.workers.insert(key, Worker::default());
                } else {
                    drop(state);
                    // Nothing was ever started for it, so nothing of it can run.
                    let names: Vec<&str> = self.shared.site.config.nodes.iter().map(|n| n.name.as_str()).collect();
                    let reason =
                        format!("node `{node}` is not part of this machine any more (it has {})", names.join(", "));
                    self.shared.report_worker(key, 0, Span(0), WorkerEvent::Lost { reason }, None);
                    continue;
                }
            }
            let share = Share { attempt, worker, workers, node, slots: slots.iter().collect() };
            worker::start(&self.shared, key, record.clone(), share);
        }
        self.shared.settled(record.id, attempt);
    }

    fn remove(&self, job: JobId, attempt: u32) {
        self.shared.settled(job, attempt);
        let mut state = self.shared.lock();
        let mut over = Vec::new();
        for (key, worker) in state.of_attempt(job, attempt) {
            worker.remove = true;
            worker.release();
            if worker.over {
                over.push(*key);
            }
        }
        for key in over {
            state.workers.remove(&key);
            worker::remove(&self.shared, key);
        }
    }

    fn reconcile(&self, live: &[(JobId, u32)]) {
        let (known, new) = self.shared.reconcile(live, worker::on_disk(&self.shared));
        for key in known {
            worker::leave(&self.shared, key);
        }
        for key in new {
            worker::adopt_stray(&self.shared, key);
        }
    }

    fn prepare(&self, record: &Arc<JobRecord>) {
        let Some(environment) = record.provenance.environment.clone() else { return };
        let hash = EnvironmentHash(environment.hash.clone());
        if self.shared.site.environments.find(&environment.hash).is_some() {
            self.shared.report(Observation::EnvironmentReady { hash }, None);
            return;
        }
        if !self.shared.site.building().insert(environment.hash.clone()) {
            return;
        }
        let shared = self.shared.clone();
        let failed = hash.clone();
        let build = move || {
            let progress = |p| shared.telemetry.build(p);
            let result = shared.site.environments.build(&environment, &shared.site.cancel, &progress);
            shared.site.building().remove(&environment.hash);
            shared.report(
                match result {
                    Ok(Outcome::Built | Outcome::Found) => Observation::EnvironmentReady { hash },
                    Err(e) => Observation::EnvironmentFailed { hash, reason: e.to_string() },
                },
                None,
            );
        };
        if let Err(e) = std::thread::Builder::new().name("environment".to_owned()).spawn(build) {
            self.shared.site.building().remove(&failed.0);
            let reason = format!("the environment's build could not be started: {e}");
            self.shared.report(Observation::EnvironmentFailed { hash: failed, reason }, None);
        }
    }
}

impl Cluster for LocalCluster {
    fn apply(&mut self, orders: &[Stamped]) {
        for Stamped { term, order, .. } in orders {
            if !self.shared.obeys(*term) {
                continue;
            }
            match order {
                Order::Reconcile { live } => self.reconcile(live),
                Order::Prepare { record } => self.prepare(record),
                Order::Launch { record, attempt, placement, nodes, .. } => {
                    self.launch(record, *attempt, placement, nodes)
                }
                Order::Confirm { job, attempt, epoch, rank0, best_step } => {
                    // Whoever was watched for an end that came begins anew.
                    let each = |worker: &mut Worker| worker.own.watch = None;
                    self.shared.start(*term, (*job, *attempt, *epoch), rank0, *best_step, each);
                }
                Order::Stop { job, attempt, epoch, grace, reason } => {
                    let slack = self.shared.site.config.stop_slack;
                    let within = u64::try_from((*grace + slack).0).unwrap_or(0);
                    self.shared.stop(*term, (*job, *attempt, *epoch), *grace, reason, |key, worker| {
                        hurry::watch(&self.shared, key, worker, Duration::from_millis(within));
                    });
                }
                Order::Remove { job, attempt } => self.remove(*job, *attempt),
                // A build goes on to its end: it takes nothing that somebody waits for, and is kept.
                Order::Abandon { .. } => {}
                // Nobody else is on this machine's virtual nodes.
                Order::Keep { .. } => {}
            }
        }
        self.shared.notify();
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        self.shared.site.cancel.cancel();
        self.listening.abort();
        self.shared.close();
        for worker in self.shared.lock().workers.values_mut() {
            worker.own.watch = None;
        }
    }
}

/// Takes the home folder for this process alone, until the file is closed.
fn take(home: &Path) -> Result<File, LocalError> {
    let path = home.join("control.lock");
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = open.map_err(LocalError::io(&path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            return Err(LocalError::Busy { home: home.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(e) => return Err(LocalError::io(&path)(e.into())),
    }
    file.rewind()
        .and_then(|()| file.set_len(0))
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(LocalError::io(&path))?;
    Ok(file)
}

/// Listens on a path of any length; a socket that nobody listens on any more is replaced.
///
/// The address of a socket holds 107 bytes. A longer path is reached through
/// the open folder, as agents do, so that the socket is always in its place.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = if path.as_os_str().len() <= SOCKET_PATH {
        UnixListener::bind(path)?
    } else {
        let folder = File::open(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().unwrap_or_default();
        UnixListener::bind(Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name))?
    };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_compared_as_a_whole() {
        assert!(same("abc", "abc"));
        assert!(!same("abc", "abd") && !same("abc", "ab") && !same("", "a"));
    }
}
