//! A space: namespaces of processes, network, mounts and host name, held by a process 1 of their own.
//!
//! The control plane is one space and each node is one, as if each were a machine.
//!
//! Invariant: a space ends with the process that opened it, however that ends. Its process 1 ends when a pipe
//! does whose other end is held here; with process 1 the kernel kills every process of the space, and with the
//! last process the mounts, the network devices and the addresses are gone too.

use crate::cgroup::Group;
use crate::run::{tail, until};
use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// What is opened.
pub(crate) struct Plan<'a> {
    /// Its host name.
    pub(crate) name: &'a str,
    /// The control group of its processes.
    pub(crate) group: Group,
    /// The program that becomes its process 1.
    pub(crate) pause: &'a Path,
    /// Lines of a shell, run inside before anything else: mounts and the like.
    pub(crate) setup: &'a str,
    /// Where its processes write what they say, a file each.
    pub(crate) logs: &'a Path,
}

/// An open space.
pub(crate) struct Space {
    name: String,
    unshare: Child,
    /// While this is open, so is the space.
    hold: Option<ChildStdin>,
    init: Pid,
    group: Group,
    logs: PathBuf,
}

impl Space {
    /// Opens a space and runs its setup.
    pub(crate) fn open(plan: &Plan<'_>) -> Result<Space> {
        plan.group.make()?;
        let log = plan.logs.join("setup.log");
        let setup = format!("set -e\nhostname {}\n{}\nexec {} -hold", plan.name, plan.setup, plan.pause.display());
        let mut unshare = joined(&plan.group, "unshare")
            .args(["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"])
            .args(["--", "sh", "-c", &setup])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .context("`unshare` could not be started")?;
        let hold = unshare.stdin.take();
        let stdout = unshare.stdout.take().context("unshare has no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != "ready" {
            unshare.wait()?;
            bail!("the namespaces of {} could not be set up: {line}{}", plan.name, tail(&log));
        }
        let init = child_of(&unshare).context("unshare has no child")?;
        let (name, group, logs) = (plan.name.to_owned(), plan.group.clone(), plan.logs.to_owned());
        Ok(Space { name, unshare, hold, init, group, logs })
    }

    /// The process that holds it, as this process sees it.
    pub(crate) fn init(&self) -> Pid {
        self.init
    }

    /// A program that will run inside.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = joined(&self.group, "nsenter");
        command.args(["--target", &self.init.as_raw_nonzero().to_string()]);
        command.args(["--mount", "--net", "--pid", "--uts", "--ipc", "--"]).arg(program);
        command
    }

    /// Starts a program inside that stays; its output goes to `NAME.log`.
    pub(crate) fn spawn(&self, name: &str, program: &Path, args: &[String]) -> Result<Process> {
        let path = self.logs.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path)?;
        let child = self
            .command(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{name} of {} could not be started", self.name))?;
        Ok(Process { name: name.to_owned(), child, log: path })
    }

    /// Ends it: returns when all its processes are gone.
    pub(crate) fn end(&mut self) {
        self.hold = None;
        // Only while unshare runs is the id still that of its child.
        if let Ok(None) = self.unshare.try_wait() {
            let _ = kill_process(self.init, Signal::KILL);
            let _ = self.unshare.wait();
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.end();
    }
}

/// A program that joins a group before it becomes what it is, in a process group of its own: Ctrl-C in a
/// terminal is for the harness, which then ends everything in order.
fn joined(group: &Group, program: &str) -> Command {
    let doors: Vec<String> = group.doors().iter().map(|door| format!("'{}'", door.display())).collect();
    let script = format!("for door in {}; do echo 0 > \"$door\" || exit 1; done; exec \"$@\"", doors.join(" "));
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", program]).process_group(0);
    command
}

/// A program inside a space.
pub(crate) struct Process {
    name: String,
    /// nsenter, whose child is the program.
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Fails if it has ended, with the end of what it said.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended ({status}); the end of {}:\n{}", self.name, self.log.display(), tail(&self.log));
        }
        Ok(())
    }

    /// Kills it, as a crash would, and waits until it is gone.
    pub(crate) fn kill(&mut self) -> Result<()> {
        until(&format!("{} has ended", self.name), Duration::from_secs(30), || {
            if let Some(program) = child_of(&self.child) {
                let _ = kill_process(program, Signal::KILL);
            }
            Ok(self.child.try_wait()?.map(|_| ()))
        })
    }
}

/// The only child of a process.
fn child_of(parent: &Child) -> Option<Pid> {
    let id = parent.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
}
