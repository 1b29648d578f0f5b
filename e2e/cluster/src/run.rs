//! Running other programs, and waiting for what they do.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How often a condition is looked at. What is waited for takes seconds; each look costs a system call or a
/// request, at most a start of kubectl.
const INTERVAL: Duration = Duration::from_millis(100);

/// Runs a program to its end and returns its standard output.
///
/// # Errors
/// If it cannot be started or ends with another code than 0; the error quotes its standard error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let out = command.stdin(Stdio::null()).output().with_context(|| format!("`{program}` could not be started"))?;
    if !out.status.success() {
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        let error = String::from_utf8_lossy(&out.stderr);
        bail!("`{program} {}` failed ({}): {}", args.join(" "), out.status, error.trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Waits until a condition gives something.
///
/// # Errors
/// If the condition fails, or gives nothing for so long; the error then says what was waited for.
pub fn until<T>(what: &str, longest: Duration, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = condition().with_context(|| format!("while waiting until {what}"))? {
            return Ok(value);
        }
        if begun.elapsed() > longest {
            bail!("waited {} s in vain until {what}", longest.as_secs());
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Where a program is, by `PATH`.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Root's PATH has these; that of a build may not.
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The last lines of a log, for an error.
pub(crate) fn tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
