//! A worker's folder, its agent's process, and certainty that it is gone.
//!
//! One thread for each worker launches or adopts the agent, waits until the
//! locks of the agent and of its guardian are free, and reports the end. What it
//! starts is the guardian, which ends as the agent did. Agents are in a session of
//! their own and outlive the control plane; what tells whether one lives is the
//! lock that it inherited, never a process id.
//!
//! Invariants: an agent is started only in a folder where none ever was; an end
//! is reported only after no process with the worker's mark is left; a folder is
//! removed only after that.

use crate::cluster::Shared;
use crate::hurry::{self, ENDED_GRACE};
use crate::spec::{self, Share};
use crate::{archive, code, private_folder};
use aviflow_agent::protocol::{Ended, LOG_CHUNK, WorkerSpec, files};
use aviflow_agent::spool::{Folder, Spool};
use aviflow_agent::{GUARDIAN_LOST, find_ended};
use aviflow_api::identity::{HASH_FACT, job_hash};
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::ports::JobRecord;
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::roster::rank_ends;
use aviflow_link::unix_ms;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Why the worker could not be started, so that it is not tried again.
const REFUSED: &str = "refused.txt";

/// What a worker that nobody wants has to end by itself.
const STRAY_GRACE: Duration = Duration::from_secs(5);

/// The pause before something is tried again that must not be taken for absent.
const PAUSE: Duration = Duration::from_secs(1);

/// Starts the agent's guardian with the lock as descriptor 9.
///
/// The lock comes as standard input, the only way to hand a descriptor to one
/// child and to no other that is started at the same moment. A terminal that
/// is closed must not end agents.
const SCRIPT: &str = r#"trap '' HUP; exec 9<&0 </dev/null; exec "$@""#;
const LOCK_FD: &str = "9";

/// What launching or adopting found.
enum Begun {
    /// The agent lives; the file is for waiting until it does not, the child is its guardian.
    Alive(File, Option<Child>),
    /// It is dead, and the lock is ours.
    Dead(File),
}

/// Launches a worker, or adopts it if its agent lives, in a thread of its own.
pub(crate) fn start(shared: &Arc<Shared>, key: StreamKey, record: Arc<JobRecord>, share: Share) {
    thread(shared, key, move |shared, folder| begin(shared, key, folder, Some((&record, &share))));
}

/// Ends and removes a worker that nobody wants any more, and that is marked so.
pub(crate) fn leave(shared: &Arc<Shared>, key: StreamKey) {
    let ended = shared.site.worker_folder(key).join(files::ENDED).exists();
    let grace = if ended { ENDED_GRACE } else { STRAY_GRACE };
    let over = {
        let mut state = shared.lock();
        let Some(worker) = state.workers.get_mut(&key) else { return };
        // A stop may have left it more time.
        worker.own.watch = None;
        hurry::watch(shared, key, worker, grace);
        let over = worker.over;
        if over {
            state.workers.remove(&key);
        }
        over
    };
    if over {
        remove(shared, key);
    }
}

/// The same for one that was only found on disk.
pub(crate) fn adopt_stray(shared: &Arc<Shared>, key: StreamKey) {
    thread(shared, key, move |shared, folder| begin(shared, key, folder, None));
    leave(shared, key);
}

/// Removes the folder of a worker whose agent is gone, in a thread of its own.
pub(crate) fn remove(shared: &Arc<Shared>, key: StreamKey) {
    let shared = shared.clone();
    let _ = std::thread::Builder::new().name("remove".to_owned()).spawn(move || clear(&shared, key));
}

/// The workers that have a folder.
pub(crate) fn on_disk(shared: &Shared) -> Vec<StreamKey> {
    let parse = |name: &str| {
        let mut parts = name.split('.');
        let key = StreamKey {
            job: JobId(parts.next()?.parse().ok()?),
            attempt: parts.next()?.parse().ok()?,
            worker: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(key)
    };
    let folder = shared.site.workers_folder();
    let list = || fs::read_dir(&folder)?.map(|e| Ok(e?.file_name())).collect::<io::Result<Vec<_>>>();
    let names = patiently(shared, &folder, || if_there(list())).flatten().unwrap_or_default();
    let mut keys: Vec<StreamKey> = names.iter().filter_map(|name| parse(name.to_str()?)).collect();
    keys.sort_unstable();
    keys
}

/// Reads what was written for the agent.
pub(crate) fn read_spec(folder: &Path) -> io::Result<WorkerSpec> {
    Ok(serde_json::from_slice(&fs::read(folder.join(files::SPEC))?)?)
}

fn thread(
    shared: &Arc<Shared>,
    key: StreamKey,
    begin: impl FnOnce(&Shared, &Path) -> Result<Begun, String> + Send + 'static,
) {
    let weak = Arc::downgrade(shared);
    let life = move || life(&weak, key, begin);
    let named = std::thread::Builder::new().name(format!("worker {}.{}.{}", key.job.0, key.attempt, key.worker));
    if let Err(e) = named.spawn(life) {
        shared.report_not_started(key, &format!("no thread for the worker: {e}; the machine has too many processes"));
        over(shared, key);
    }
}

fn life(weak: &Weak<Shared>, key: StreamKey, begin: impl FnOnce(&Shared, &Path) -> Result<Begun, String>) {
    let Some(shared) = weak.upgrade() else { return };
    let folder = shared.site.worker_folder(key);
    let begun = begin(&shared, &folder);
    if shared.site.cancel.is_cancelled() && begun.is_err() {
        return;
    }
    let (lock, child, watched) = match begun {
        Ok(Begun::Dead(lock)) => (lock, None, false),
        Ok(Begun::Alive(lock, child)) => (lock, child, true),
        Err(reason) => {
            if !shared.with(key, |w| w.stray).unwrap_or(true) {
                let _ = fs::write(folder.join(REFUSED), &reason);
                shared.report_not_started(key, &reason);
            }
            over(&shared, key);
            return;
        }
    };
    // Whoever waits for an agent must not keep a dropped cluster.
    drop(shared);
    if watched {
        wait_for(&lock);
    }
    let Some(shared) = weak.upgrade() else { return };
    let path = folder.join(files::KEEPER_LOCK);
    let guardian = patiently(&shared, &path, || if_there(OpenOptions::new().read(true).write(true).open(&path)));
    drop(shared);
    // The agent's guardian knows processes that nobody else finds.
    if let Some(Some(guardian)) = guardian {
        if let Some(child) = &child {
            // One that somebody froze would never end.
            let _ = kill_process(Pid::from_child(child), Signal::CONT);
        }
        wait_for(&guardian);
    }
    if let Some(shared) = weak.upgrade().filter(|s| !s.site.cancel.is_cancelled()) {
        finish(&shared, key, &folder, child, watched);
    }
}

/// What is there; only what certainly is not counts as absent.
fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Tries until it works; none once the cluster is dropped.
///
/// Too many open files pass, and rights can be repaired: meanwhile nothing may
/// be concluded from what cannot be read.
fn patiently<T>(shared: &Shared, path: &Path, mut attempt: impl FnMut() -> io::Result<T>) -> Option<T> {
    let mut said = false;
    loop {
        match attempt() {
            Ok(done) => return Some(done),
            Err(_) if shared.site.cancel.is_cancelled() => return None,
            Err(e) if !said => {
                said = true;
                let path = path.display();
                // Standard error may be gone: nothing depends on it.
                let _ = writeln!(io::stderr(), "aviflow: {path} cannot be used: {e}; it is tried again every second");
            }
            Err(_) => {}
        }
        std::thread::sleep(PAUSE);
    }
}

/// Adopts the worker or, given what to start, starts it.
fn begin(shared: &Shared, key: StreamKey, folder: &Path, what: Option<(&JobRecord, &Share)>) -> Result<Begun, String> {
    let cannot = |e: io::Error| format!("the worker's folder {} cannot be used: {e}", folder.display());
    let dropped = || "the control plane ends".to_owned();
    let path = folder.join(files::LOCK);
    let take = || {
        let lock = match private_folder(folder).and_then(|()| open_lock(folder)) {
            Ok(lock) => lock,
            // No agent ever ran here.
            Err(e) if matches!(path.try_exists(), Ok(false)) => return Ok(Err(cannot(e))),
            Err(e) => return Err(e),
        };
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Ok((lock, true))),
            Err(Errno::WOULDBLOCK) => Ok(Ok((lock, false))),
            Err(e) => Err(e.into()),
        }
    };
    let (lock, taken) = patiently(shared, &path, take).ok_or_else(dropped)??;
    if !taken {
        let path = folder.join(files::SPEC);
        let spec = patiently(shared, &path, || if_there(read_spec(folder))).ok_or_else(dropped)?;
        // Without one the agent cannot be talked to; what counts is that it lives.
        if let Some(spec) = spec {
            meet(shared, key, folder, spec.token);
        }
        return Ok(Begun::Alive(lock, None));
    }
    let path = folder.join(REFUSED);
    let refused = patiently(shared, &path, || if_there(fs::read_to_string(&path))).ok_or_else(dropped)?;
    if let Some(reason) = refused {
        return Err(reason);
    }
    let ran = || Ok(folder.join(files::ALIVE).try_exists()? || folder.join(files::ENDED).try_exists()?);
    let ran = patiently(shared, folder, ran).ok_or_else(dropped)?;
    let Some((record, share)) = what.filter(|_| !ran) else { return Ok(Begun::Dead(lock)) };
    let token = token().map_err(|e| format!("there are no random numbers for a token: {e}"))?;
    let cwd = lay_out(shared, record, folder)?;
    let hash = found_hash(record, &cwd)?;
    let mut spec = spec::worker_spec(&shared.site.site(), record, share, cwd, token.clone())?;
    // Worker 0 speaks for all, unless one found something else than what was submitted.
    if share.worker == 0 || hash != job_hash(&record.spec, &record.provenance) {
        spec.facts.insert(HASH_FACT.to_owned(), hash);
    }
    write_spec(folder, &spec).map_err(cannot)?;
    meet(shared, key, folder, token);
    let watched = open_lock(folder).map_err(cannot)?;
    let child = spawn(shared, folder, lock)?;
    Ok(Begun::Alive(watched, Some(child)))
}

/// The end that an agent wrote down; none once the cluster is dropped.
fn ended(shared: &Shared, folder: &Path) -> Option<Option<Ended>> {
    patiently(shared, &folder.join(files::ENDED), || match find_ended(folder) {
        // What is no end never becomes one.
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Ok(None),
        found => found,
    })
}

/// From now on the agent may connect.
fn meet(shared: &Shared, key: StreamKey, folder: &Path, token: String) {
    let log_end = ended(shared, folder).flatten().map(|e| e.log_end);
    shared.with(key, |worker| {
        worker.own.token = Some(token);
        worker.log_end = log_end;
    });
    shared.notify();
}

/// Unpacks the code, and says where ranks start.
fn lay_out(shared: &Shared, record: &JobRecord, folder: &Path) -> Result<PathBuf, String> {
    let (code_folder, work) = (folder.join("code"), folder.join("work"));
    if let Some(snapshot) = &record.provenance.code {
        // A control plane that died in the middle of this may have left a part.
        match fs::remove_dir_all(&code_folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(format!("{} cannot be replaced: {e}", code_folder.display()));
            }
            _ => {}
        }
        let archive = (shared.site.config.objects)(&snapshot.sha256).map_err(|e| {
            format!("the code snapshot {} is not in the store: {e}; submit the job again", snapshot.sha256)
        })?;
        code::unpack("code snapshot", &archive, &code_folder)?;
        return Ok(code_folder);
    }
    fs::create_dir_all(&work).map_err(|e| format!("{} cannot be made: {e}", work.display()))?;
    Ok(work)
}

/// The job's hash, with the code's taken of what was unpacked into `cwd`.
fn found_hash(record: &JobRecord, cwd: &Path) -> Result<String, String> {
    let mut found = record.provenance.clone();
    if let Some(code) = &mut found.code {
        code.sha256 = archive::hash(cwd).map_err(|e| format!("{} cannot be read again: {e}", cwd.display()))?;
    }
    Ok(job_hash(&record.spec, &found))
}

fn write_spec(folder: &Path, spec: &WorkerSpec) -> io::Result<()> {
    // It holds the token and the values of secrets.
    let (path, new) = (folder.join(files::SPEC), folder.join("worker.json.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(spec)?)?;
    // Whoever finds it finds all of it.
    fs::rename(new, path)
}

fn open_lock(folder: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(folder.join(files::LOCK))
}

/// 256 random bits, hexadecimal.
fn token() -> io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

fn spawn(shared: &Shared, folder: &Path, lock: File) -> Result<Child, String> {
    let agent = &shared.site.config.agent;
    let program = Path::new(&agent[0]);
    let failed = |e: io::Error| format!("the agent {} cannot be started: {e}", program.display());
    if program.components().count() > 1 {
        fs::metadata(program).map_err(failed)?;
    }
    let said = OpenOptions::new().create(true).append(true).mode(0o600).open(folder.join(files::AGENT_LOG));
    let mut command = Command::new("/bin/sh");
    command.args(["-c", SCRIPT, "aviflow-agent"]).args(agent).arg(folder);
    command.stdin(Stdio::from(lock)).stdout(Stdio::null()).stderr(said.map_err(failed)?);
    // Variables of the control plane's own, tokens among them, are not for jobs.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AVIFLOW_") {
            command.env_remove(name);
        }
    }
    command.env(aviflow_agent::LOCK_FD, LOCK_FD);
    // The terminal's Ctrl-C is not for agents, also before they have a session of their own.
    command.current_dir("/").process_group(0);
    // The command owns our descriptor of the lock, and is dropped here.
    command.spawn().map_err(failed)
}

/// Waits until nobody else holds the lock.
fn wait_for(lock: &File) {
    while let Err(e) = rustix::fs::flock(lock, FlockOperation::LockExclusive) {
        if e != Errno::INTR {
            std::thread::sleep(PAUSE);
        }
    }
}

/// The agent is dead: makes sure that nothing of it runs, keeps its log, reports its end.
fn finish(shared: &Arc<Shared>, key: StreamKey, folder: &Path, child: Option<Child>, watched: bool) {
    let exit = child.and_then(|mut child| child.wait().ok());
    let lives = folder.join(files::ALIVE);
    let path = folder.join(files::SPEC);
    let spec = patiently(shared, &path, || match if_there(read_spec(folder)) {
        // A part of one, from which no agent ever came to life.
        Err(_) if matches!(lives.try_exists(), Ok(false)) => Ok(None),
        found => found,
    });
    let Some(spec) = spec else { return };
    if let Some(spec) = spec {
        sweep(&spec);
    }
    // What cannot be kept now is tried again before the folder is removed.
    let _ = keep_log(shared, key, folder);
    let Some(ended) = ended(shared, folder) else { return };
    let Some(lived) = patiently(shared, &lives, || lives.try_exists()) else { return };
    // A full disk may have kept the agent from writing its end down, which it said all the same.
    let known =
        shared.with(key, |w| w.stray || w.gone.is_some_and(|gone| ended.as_ref().is_none_or(|e| e.epoch == gone)));
    if known == Some(false) {
        match ended {
            Some(ended) => {
                let ago = Span((unix_ms() - ended.at_unix_ms).max(0));
                let event = WorkerEvent::Gone {
                    ranks: rank_ends(ended.ranks),
                    reason: ended.reason,
                    last_step: ended.last_step,
                    next_port: None,
                };
                shared.report_worker(key, ended.epoch, ago, event, None);
                // Another epoch may have been decided that it never heard of; else this says nothing new.
                shared.report_not_again(key);
            }
            None if !lived => {
                let reason = format!("the agent did not start: it {}", last_words(folder, exit));
                let _ = fs::write(folder.join(REFUSED), &reason);
                shared.report_not_started(key, &reason);
            }
            None => {
                let ago = if watched { Span(0) } else { silent_for(folder) };
                let killed = shared.with(key, |worker| worker.own.killed).unwrap_or(false);
                let why = if killed { "was told to stop, did not end in time and " } else { "" };
                let reason = format!("its agent {why}{}", last_words(folder, exit));
                shared.report_worker(key, 0, ago, WorkerEvent::Lost { reason }, None);
            }
        }
    }
    over(shared, key);
}

/// The worker's thread ends; removes the worker if that was already ordered.
fn over(shared: &Arc<Shared>, key: StreamKey) {
    let remove = {
        let mut state = shared.lock();
        let remove = state.workers.get_mut(&key).is_some_and(|worker| {
            worker.over = true;
            worker.link = None;
            worker.own.watch = None;
            worker.remove
        });
        if remove {
            state.workers.remove(&key);
        }
        remove
    };
    if remove {
        clear(shared, key);
    }
}

/// Removes the folder of a dead worker. What fails is found again by the next reconciliation.
fn clear(shared: &Shared, key: StreamKey) {
    let folder = shared.site.worker_folder(key);
    if keep_log(shared, key, &folder).is_ok() {
        let _ = fs::remove_dir_all(folder);
    }
}

/// Takes over the log that a dead agent could not ship.
fn keep_log(shared: &Shared, key: StreamKey, folder: &Path) -> io::Result<()> {
    // A folder that cannot be listed must not count as empty.
    let Some(_) = if_there(fs::read_dir(folder.join(files::LOG)))? else { return Ok(()) };
    let mut spool = Spool::open(Folder::new(folder.join(files::LOG)), u64::MAX, 0);
    let mut from = shared.telemetry.log_have(key);
    while let Some((offset, text)) = spool.read(from, LOG_CHUNK) {
        let end = offset + text.len() as u64;
        from = shared.telemetry.log_append(key, offset, &text)?.max(end);
    }
    Ok(())
}

/// Time since the agent's last sign of life.
fn silent_for(folder: &Path) -> Span {
    let age = fs::metadata(folder.join(files::ALIVE)).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
    Span(age.map_or(0, |age| i64::try_from(age.as_millis()).unwrap_or(i64::MAX)))
}

/// How the agent ended, as far as that is known.
fn last_words(folder: &Path, exit: Option<ExitStatus>) -> String {
    let how = match exit {
        Some(exit) => match (exit.code(), exit.signal()) {
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        None => "ended while the control plane was away or had been started again".to_owned(),
    };
    let said = fs::read(folder.join(files::AGENT_LOG)).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    match said.lines().rev().find(|l| !l.trim().is_empty()) {
        // What ended was not the agent.
        Some(line) if line.ends_with(GUARDIAN_LOST) => format!("lost its guardian, which {how}"),
        Some(line) => format!("{how}; its last words: {}", line.trim()),
        None => format!("{how} without a word"),
    }
}

/// Kills every process of a dead agent until there is none.
fn sweep(spec: &WorkerSpec) {
    let mark = aviflow_agent::mark(spec);
    let mut pause = Duration::from_millis(1);
    while aviflow_agent::sweep(&mark) > 0 {
        // A process may take a while to die, above all in the middle of writing.
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}
