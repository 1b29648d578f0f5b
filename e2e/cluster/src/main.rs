//! A cluster to try things on, and the programs that it needs. `cargo xtask kube` runs this.

use anyhow::{Context as _, Result, bail};
use aviflow_testcluster::binaries::{Binary, cache};
use aviflow_testcluster::{Cluster, Options, check_machine, images, until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

const USAGE: &str = "\
usage: cargo xtask kube TASK

  up [--background]   start a cluster of two nodes with 8 GPUs each; it ends with Ctrl-C, or with `down`
  down                end it
  status              whether it runs, and how to use it
  binaries            build the programs that clusters and their tests need, and say where they are
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
        ["binaries"] => binaries(),
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

/// The file that says it.
fn state() -> Result<PathBuf> {
    Ok(cache()?.join("up"))
}

/// The cluster that runs. What a file says of a process that has ended is nothing.
fn running() -> Result<Option<Running>> {
    let Ok(text) = fs::read_to_string(state()?) else { return Ok(None) };
    let mut lines = text.lines();
    let (Some(process), Some(born), Some(kubeconfig)) = (lines.next(), lines.next(), lines.next()) else {
        return Ok(None);
    };
    let process = process.parse().ok().and_then(Pid::from_raw).context("the state names no process")?;
    let alive = test_kill_process(process).is_ok() && start_time(process) == born;
    Ok(alive.then(|| Running { process, kubeconfig: kubeconfig.into() }))
}

/// When a process started, which tells it from a later one of the same id.
fn start_time(process: Pid) -> String {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).unwrap_or_default();
    // Field 22; the name before it, in parentheses, may have spaces.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().nth(19).unwrap_or_default().to_owned()
}

fn say(running: &Running) {
    println!("export KUBECONFIG={}", running.kubeconfig.display());
}

fn up() -> Result<()> {
    if let Some(running) = running()? {
        say(&running);
        bail!("a cluster is already up; end it with `cargo xtask kube down`");
    }
    // Before anything is there that would have to be removed.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let cluster = Cluster::start(Options { images: vec![images::minimal_python()?], ..Options::default() })?;
    let process = rustix::process::getpid();
    let running = Running { process, kubeconfig: cluster.kubeconfig().to_owned() };
    let (id, born) = (process.as_raw_nonzero(), start_time(process));
    fs::write(state()?, format!("{id}\n{born}\n{}\n", running.kubeconfig.display()))?;
    println!("the cluster is up; its image for pods is {}", images::PYTHON);
    say(&running);
    let _ = signals.forever().next();
    drop(cluster);
    fs::remove_file(state()?)?;
    Ok(())
}

fn up_in_background() -> Result<()> {
    check_machine()?;
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
    until("the cluster has ended", Duration::from_secs(60), || {
        Ok(test_kill_process(running.process).is_err().then_some(()))
    })
}

fn status() -> Result<()> {
    match running()? {
        Some(running) => say(&running),
        None => println!("no cluster is up"),
    }
    Ok(())
}

fn binaries() -> Result<()> {
    for binary in Binary::CLUSTER.into_iter().chain(Binary::TOOLS) {
        println!("{}", binary.path()?.display());
    }
    Ok(())
}
