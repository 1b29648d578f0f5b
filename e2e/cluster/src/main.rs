//! A cluster to try things on, and the programs that it needs. `cargo xtask kube` runs this.

use anyhow::{Context as _, Result, bail};
use aviflow_testcluster::binaries::{Binary, cache};
use aviflow_testcluster::{Cluster, Options, check_machine, images, until};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{self, TryLockError};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

const USAGE: &str = "\
usage: cargo xtask kube TASK

  up [--background]   start a cluster of two nodes with 8 GPUs each; it ends with Ctrl-C, or with `down`
  down                end it
  status              whether it runs, and how to use it
  binaries [--all]    build the programs of a cluster, and say where they are; with --all also helm and kwok
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["up"] => up(),
        ["up", "--background"] => up_in_background(),
        ["down"] => down(),
        ["status"] => status(),
        ["binaries"] => binaries(&Binary::CLUSTER),
        ["binaries", "--all"] => binaries(&[&Binary::CLUSTER[..], &Binary::TOOLS].concat()),
        [] => {
            print!("{USAGE}");
            Ok(())
        }
        _ => bail!("unknown arguments {args:?}\n\n{USAGE}"),
    }
}

/// What is known of the cluster that runs: its process, and its kubeconfig.
struct Running {
    process: Pid,
    kubeconfig: PathBuf,
}

/// The file that says it. The process of the cluster holds a lock on it, so that what the file says of a process
/// that has ended is nothing.
fn state() -> Result<PathBuf> {
    Ok(cache()?.join("up"))
}

/// The cluster that runs, once it is ready.
fn running() -> Result<Option<Running>> {
    let Ok(file) = fs::File::open(state()?) else { return Ok(None) };
    if !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        return Ok(None);
    }
    let text = fs::read_to_string(state()?)?;
    let Some((process, kubeconfig)) = text.trim_end().split_once('\n') else { return Ok(None) };
    let process = process.parse().ok().and_then(Pid::from_raw).context("the state names no process")?;
    Ok(Some(Running { process, kubeconfig: kubeconfig.into() }))
}

fn say(running: &Running) {
    println!("export KUBECONFIG={}", running.kubeconfig.display());
}

fn up() -> Result<()> {
    check_machine()?;
    let mut state = fs::File::options().create(true).append(true).open(state()?)?;
    match state.try_lock() {
        Ok(()) => state.set_len(0)?,
        Err(TryLockError::WouldBlock) => bail!("a cluster is already up, see `cargo xtask kube status`"),
        Err(TryLockError::Error(error)) => return Err(error).context("the lock of the state"),
    }
    // Before anything is there that would have to be removed.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let cluster = Cluster::start(Options { images: vec![images::minimal_python()?], ..Options::default() })?;
    let running = Running { process: rustix::process::getpid(), kubeconfig: cluster.kubeconfig().to_owned() };
    // At once: who reads finds all or nothing.
    let line = format!("{}\n{}\n", running.process.as_raw_nonzero(), running.kubeconfig.display());
    state.write_all(line.as_bytes())?;
    println!("the cluster is up; its image for pods is {}", images::PYTHON);
    say(&running);
    let _ = signals.forever().next();
    println!("ending it");
    drop(cluster);
    Ok(())
}

fn up_in_background() -> Result<()> {
    check_machine()?;
    if running()?.is_some() {
        bail!("a cluster is already up, see `cargo xtask kube status`");
    }
    let log = cache()?.join("up.log");
    let file = fs::File::create(&log)?;
    let mut up = Command::new(std::env::current_exe()?);
    up.arg("up").stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
    let mut child = up.spawn()?;
    // The first time, programs are built, which takes a quarter of an hour.
    let running = until("the cluster is up", Duration::from_secs(3600), || {
        if let Some(status) = child.try_wait()? {
            bail!("it did not start ({status}): {}", fs::read_to_string(&log)?.trim());
        }
        running()
    })?;
    say(&running);
    Ok(())
}

fn down() -> Result<()> {
    let Some(running) = running()? else {
        println!("no cluster is up");
        return Ok(());
    };
    kill_process(running.process, Signal::TERM)?;
    until("the cluster has ended", Duration::from_secs(60), || Ok(self::running()?.is_none().then_some(())))
}

fn status() -> Result<()> {
    match running()? {
        Some(running) => say(&running),
        None => println!("no cluster is up"),
    }
    Ok(())
}

fn binaries(which: &[Binary]) -> Result<()> {
    for binary in which {
        println!("{}", binary.path()?.display());
    }
    Ok(())
}
