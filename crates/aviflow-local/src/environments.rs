//! The cache of environments: venvs made from hash-locked requirements.
//!
//! An environment is a folder named after its hash. It is built in place, since
//! a venv cannot be moved, by one builder at a time over all processes, and
//! complete only once its marker is there: what a crash left half-built is
//! removed and built again, never used.
//!
//! A job's own requirements are layered: their venv sees the packages of the
//! environment beneath it, which is built once and shared. Programs of the lower
//! environment are there again with the upper interpreter, so that `torchrun`
//! finds the packages of both.

mod build;
mod pip;
mod python;

use crate::{LocalConfig, Objects, plain_component, private_folder};
use aviflow_api::spec::ResolvedEnvironment;
use aviflow_engine::telemetry::BuildProgress;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Present, and synced, once an environment is complete.
const MARKER: &str = "complete.json";

/// The cache.
#[derive(Clone)]
pub struct Environments {
    root: PathBuf,
    python: Option<PathBuf>,
    variables: Vec<(OsString, OsString)>,
    objects: Objects,
}

/// Whether there was anything to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was built.
    Built,
    /// It was there, or another builder made it meanwhile.
    Found,
}

/// Why an environment could not be made, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("environment {environment} could not be built: {reason}")]
pub struct BuildError {
    /// Name and version.
    pub environment: String,
    /// The reason.
    pub reason: String,
}

/// An environment in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentInfo {
    /// The folder's name: the hash, or `base-…` where several share it.
    pub hash: String,
    /// Name and version, once that is known.
    pub name: Option<String>,
    /// Bytes on disk.
    pub bytes: u64,
    /// Whether it can be used.
    pub complete: bool,
}

/// What the marker says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Complete {
    name: String,
    python: String,
    bytes: u64,
    /// The content as far as others may build upon it, see [`layer_key`].
    layer: Option<String>,
    /// The folder beneath it in the cache.
    base: Option<String>,
}

/// Ends builds that run.
#[derive(Debug, Default)]
pub struct Cancel(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    cancelled: bool,
    last: u64,
    /// Held open for the children of builds, which end with them.
    children: BTreeMap<u64, ChildStdin>,
}

impl Cancel {
    fn lock(&self) -> MutexGuard<'_, Running> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every build that runs, with all of its processes, and lets none begin.
    pub fn cancel(&self) {
        let mut running = self.lock();
        running.cancelled = true;
        running.children.clear();
    }

    /// Whether that was done.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.lock().cancelled
    }

    /// Keeps a child alive until [`Cancel::release`]; if all was cancelled, it ends at once.
    fn hold(&self, stdin: Option<ChildStdin>) -> u64 {
        let mut running = self.lock();
        running.last += 1;
        let id = running.last;
        if let Some(stdin) = stdin.filter(|_| !running.cancelled) {
            running.children.insert(id, stdin);
        }
        id
    }

    fn release(&self, id: u64) {
        self.lock().children.remove(&id);
    }
}

/// Everything that a build needs beside the cache.
struct Job<'a> {
    environment: &'a ResolvedEnvironment,
    cancel: &'a Cancel,
    progress: &'a dyn Fn(BuildProgress),
}

impl Job<'_> {
    fn name(&self) -> String {
        format!("{}@{}", self.environment.name, self.environment.version)
    }

    fn tell(&self, step: &str, done: u32, total: u32) {
        let hash = self.environment.hash.clone();
        (self.progress)(BuildProgress { hash, name: self.name(), step: step.to_owned(), done, total });
    }
}

impl Environments {
    /// The cache of a home folder.
    #[must_use]
    pub fn new(config: &LocalConfig) -> Environments {
        // A venv holds its own path: where several homes share one cache by a link, that must not be the link's.
        let root = config.home.join("environments");
        Environments {
            root: root.canonicalize().unwrap_or(root),
            python: config.python.clone(),
            variables: config.build_env.clone(),
            objects: config.objects.clone(),
        }
    }

    /// The folder of an environment, if it is complete.
    #[must_use]
    pub fn find(&self, hash: &str) -> Option<PathBuf> {
        self.complete(hash).map(|_| self.root.join(hash))
    }

    fn complete(&self, hash: &str) -> Option<Complete> {
        if !plain_component(hash) {
            return None;
        }
        let folder = self.root.join(hash);
        let complete: Complete = serde_json::from_slice(&fs::read(folder.join(MARKER)).ok()?).ok()?;
        // The interpreter is a link to the machine's own, which may have been replaced or removed.
        fs::metadata(folder.join("bin/python")).ok()?;
        match &complete.base {
            Some(base) => self.complete(base).map(|_| complete),
            None => Some(complete),
        }
    }

    /// Makes an environment usable. Blocks until it is.
    ///
    /// # Errors
    /// With the package it failed at and what to do. A later call tries again.
    pub fn build(
        &self,
        environment: &ResolvedEnvironment,
        cancel: &Cancel,
        progress: &dyn Fn(BuildProgress),
    ) -> Result<Outcome, BuildError> {
        let job = Job { environment, cancel, progress };
        self.build_checked(&job).map_err(|reason| {
            let reason = if cancel.is_cancelled() { "the control plane stopped".to_owned() } else { reason };
            BuildError { environment: job.name(), reason }
        })
    }

    fn build_checked(&self, job: &Job<'_>) -> Result<Outcome, String> {
        let hash = &job.environment.hash;
        if !plain_component(hash) || hash.starts_with("base-") {
            return Err(format!("`{hash}` is no hash; submit the job again"));
        }
        self.once(job, hash, |folder| {
            let python = python::choose(self.python.as_deref(), &job.environment.python)?;
            let mut locks = Vec::new();
            for sha256 in &job.environment.locks {
                let missing =
                    |e: io::Error| format!("the lock {sha256} is not in the store: {e}; submit the job again");
                let path = (self.objects)(sha256).map_err(missing)?;
                let text = fs::read_to_string(&path).map_err(missing)?;
                locks.push((path, pip::pinned(&text)));
            }
            let builder = build::Builder { job, python: &python, variables: &self.variables };
            let layer = layer_key(&python, job.environment.locks.first().map_or("", String::as_str));
            let (layer, base) = if let Some((own, extra)) = locks.split_first().filter(|(_, extra)| !extra.is_empty()) {
                let base = self.base(job, &builder, &layer, own)?;
                builder.layered(folder, &self.root.join(&base), extra)?;
                (None, Some(base))
            } else {
                builder.plain(folder, &locks)?;
                (Some(layer), None)
            };
            let python = python::shown(python.version);
            Ok(Complete { name: job.name(), python, bytes: size(folder), layer, base })
        })
    }

    /// The environment beneath a layered one: any that has the same content, or one made for that.
    fn base(
        &self,
        job: &Job<'_>,
        builder: &build::Builder<'_>,
        layer: &str,
        lock: &(PathBuf, Vec<String>),
    ) -> Result<String, String> {
        for name in self.names() {
            if self.complete(&name).is_some_and(|c| c.layer.as_deref() == Some(layer)) {
                return Ok(name);
            }
        }
        let name = format!("base-{layer}");
        self.once(job, &name, |folder| {
            builder.plain(folder, std::slice::from_ref(lock))?;
            let python = python::shown(builder.python.version);
            let layer = Some(layer.to_owned());
            Ok(Complete { name: job.name(), python, bytes: size(folder), layer, base: None })
        })?;
        Ok(name)
    }

    /// Builds a folder unless it is complete, as the only builder of it on this machine.
    fn once(
        &self,
        job: &Job<'_>,
        name: &str,
        build: impl FnOnce(&Path) -> Result<Complete, String>,
    ) -> Result<Outcome, String> {
        if self.complete(name).is_some() {
            return Ok(Outcome::Found);
        }
        let cannot = |e: io::Error| format!("the cache {} cannot be written: {e}", self.root.display());
        private_folder(&self.root).map_err(cannot)?;
        let lock = self.root.join(format!("{name}.lock"));
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(lock);
        let lock = open.map_err(cannot)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            job.tell("waiting for another build of it", 0, 0);
            loop {
                match rustix::fs::flock(&lock, FlockOperation::LockExclusive) {
                    Ok(()) => break,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(cannot(e.into())),
                }
            }
            if self.complete(name).is_some() {
                return Ok(Outcome::Found);
            }
        } else if self.complete(name).is_some() {
            return Ok(Outcome::Found);
        }
        if job.cancel.is_cancelled() {
            return Err(String::new());
        }
        let folder = self.root.join(name);
        remove(&folder).map_err(cannot)?;
        let built = build(&folder).and_then(|complete| mark(&folder, &complete).map_err(cannot));
        if built.is_err() {
            let _ = remove(&folder);
        }
        built.map(|()| Outcome::Built)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let folders = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let mut names: Vec<String> = folders.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// What the cache holds.
    #[must_use]
    pub fn list(&self) -> Vec<EnvironmentInfo> {
        let info = |hash: String| match self.complete(&hash) {
            Some(found) => EnvironmentInfo { hash, name: Some(found.name), bytes: found.bytes, complete: true },
            None => EnvironmentInfo { bytes: size(&self.root.join(&hash)), hash, name: None, complete: false },
        };
        self.names().into_iter().map(info).collect()
    }
}

/// Why pip failed that said this, with the package and what to do.
#[must_use]
pub fn pip_failure(said: &str) -> String {
    let mut progress = pip::Progress::default();
    for line in said.lines() {
        progress.line(line);
    }
    progress.failure()
}

/// Names what is installed: the interpreter's version and the lock.
fn layer_key(python: &python::Python, lock: &str) -> String {
    let [major, minor, _] = python.version;
    let digest = Sha256::digest(format!("{major}.{minor}\n{}\n{lock}", python.program.display()));
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Says that a folder is complete, once everything in it would survive a loss of power.
fn mark(folder: &Path, complete: &Complete) -> io::Result<()> {
    rustix::fs::syncfs(File::open(folder)?)?;
    let partial = folder.join(format!("{MARKER}.partial"));
    let mut file = File::create(&partial)?;
    file.write_all(&serde_json::to_vec_pretty(complete)?)?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(MARKER))?;
    File::open(folder)?.sync_all()
}

fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => size(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}
