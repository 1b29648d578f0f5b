//! A program whose processor time and memory are measured.

use anyhow::{Context as _, Result, bail};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A running program. Dropping it kills it.
pub struct Measured {
    name: String,
    child: Child,
    log: PathBuf,
}

/// What a program used.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// Processor time, of user and system.
    pub cpu: Duration,
    /// The most memory that was resident at once, in bytes.
    pub memory: u64,
}

/// A program that ends with this one, however that ends.
pub fn program(path: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(path);
    command
}

impl Measured {
    /// Starts a [`program`]; what it says goes to a file.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Measured> {
        let file = File::create(log).with_context(|| format!("{}", log.display()))?;
        let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn();
        let child = child.with_context(|| format!("{name} could not be started"))?;
        Ok(Measured { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails if it has ended, with the end of what it said.
    ///
    /// # Errors
    /// If it has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let text = fs::read_to_string(&self.log).unwrap_or_default();
            let from = text.len().saturating_sub(2000);
            bail!(
                "{} ended ({status}); the end of {}:\n{}",
                self.name,
                self.log.display(),
                text.get(from..).unwrap_or("")
            );
        }
        Ok(())
    }

    /// What it used until now.
    ///
    /// # Errors
    /// If it has ended.
    pub fn used(&mut self) -> Result<Used> {
        self.check()?;
        let memory = status(self.pid(), "VmHWM:")?;
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        // The second field is the name in parentheses, which may hold anything.
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields).context("/proc/PID/stat")?;
        let ticks = |n: usize| fields.split_whitespace().nth(n - 3).and_then(|f| f.parse::<u64>().ok());
        let ticks = ticks(14).context("utime")? + ticks(15).context("stime")?;
        // Linux counts in hundredths of a second on every machine of today.
        Ok(Used { cpu: Duration::from_millis(ticks * 10), memory })
    }
}

impl Measured {
    /// Memory that is resident now, in bytes.
    ///
    /// # Errors
    /// If it has ended.
    pub fn resident(&mut self) -> Result<u64> {
        self.check()?;
        status(self.pid(), "VmRSS:")
    }
}

/// A number of bytes in `/proc/PID/status`.
fn status(pid: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(field)).with_context(|| format!("no {field}"))?;
    Ok(value.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

impl Drop for Measured {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
