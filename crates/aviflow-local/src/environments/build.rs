//! Makes a venv and installs what a lock names.

use super::Job;
use super::pip::Progress;
use super::python::Python;
use aviflow_api::environment::PIP_INSTALL;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Lock files with the packages they pin.
pub(super) type Locks = [(PathBuf, Vec<String>)];

const SCRIPT: &str = include_str!("build.py");

/// Variables of pip by which packages would end up in another place, or others with them.
const ELSEWHERE: [&str; 6] = ["PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIREMENT", "PIP_CONSTRAINT"];

/// How much of a program is searched for the interpreter: its first lines.
const HEAD: usize = 1024;

pub(super) struct Builder<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) python: &'a Python,
    pub(super) variables: &'a [(OsString, OsString)],
}

impl Builder<'_> {
    /// A venv with the packages of the locks.
    pub(super) fn plain(&self, folder: &Path, locks: &Locks) -> Result<(), String> {
        self.venv(folder)?;
        self.install(folder, locks)
    }

    /// A venv upon another one, with the packages of further locks.
    pub(super) fn layered(&self, folder: &Path, base: &Path, locks: &Locks) -> Result<(), String> {
        self.venv(folder)?;
        let cannot = |e: io::Error| format!("{} cannot be written: {e}", folder.display());
        let (own, lower) = (site_packages(folder).map_err(cannot)?, site_packages(base).map_err(cannot)?);
        // As a call and not as a path, so that the .pth files of the lower packages count too.
        let lower = lower.to_string_lossy().replace('\\', "\\\\").replace('\'', "\\'");
        let line = format!("import site; site.addsitedir('{lower}')\n");
        fs::write(own.join("_aviflow_base.pth"), line).map_err(cannot)?;
        self.install(folder, locks)?;
        lift_programs(base, folder).map_err(cannot)
    }

    fn venv(&self, folder: &Path) -> Result<(), String> {
        self.job.tell("making the virtual environment", 0, 0);
        let mut lines = Vec::new();
        let ended = self.run(&self.python.program, "venv", [folder], |line| lines.push(line))?;
        if ended {
            return Ok(());
        }
        let said = lines.iter().rev().find(|l| !l.trim().is_empty()).map_or("it said nothing", |l| l.trim());
        let program = self.python.program.display();
        let advice = if lines.iter().any(|l| l.contains("No module named")) {
            "; on Debian and Ubuntu install the package python3-venv"
        } else if said.contains("No space left") {
            "; free some space on the disk"
        } else {
            ""
        };
        Err(format!("{program} could not make a virtual environment: {said}{advice}"))
    }

    fn install(&self, folder: &Path, locks: &Locks) -> Result<(), String> {
        let total: usize = locks.iter().map(|(_, pinned)| pinned.len()).sum();
        if total == 0 {
            return Ok(());
        }
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let mut arguments: Vec<&OsStr> = PIP_INSTALL.iter().map(OsStr::new).collect();
        for (path, pinned) in locks {
            if !pinned.is_empty() {
                arguments.extend([OsStr::new("--requirement"), path.as_os_str()]);
            }
        }
        let mut progress = Progress::default();
        self.job.tell("looking for packages", 0, total);
        let ended = self.run(&folder.join("bin/python"), "pip", arguments, |line| {
            if let Some(step) = progress.line(&line) {
                self.job.tell(&step, progress.done().min(total), total);
            }
        })?;
        if ended { Ok(()) } else { Err(progress.failure()) }
    }

    /// Runs a step, with every process of it ending at the latest with this one; gives its lines.
    fn run<A: AsRef<OsStr>>(
        &self,
        python: &Path,
        step: &str,
        arguments: impl IntoIterator<Item = A>,
        mut line: impl FnMut(String),
    ) -> Result<bool, String> {
        let failed = |e: io::Error| format!("{} cannot be run: {e}", python.display());
        let mut command = Command::new(python);
        command.args(["-I", "-u", "-c", SCRIPT, step]).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        // What a person set for installations of their own must not lead elsewhere.
        for name in ELSEWHERE {
            command.env_remove(name);
        }
        // What the control plane is told by variables may hold the password of its database, and is nothing to pip.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"AVIFLOW_")) {
            command.env_remove(name);
        }
        command.env("PIP_ROOT_USER_ACTION", "ignore").envs(self.variables.iter().map(|(n, v)| (n, v)));
        let mut child = command.spawn().map_err(failed)?;
        let held = self.job.cancel.hold(child.stdin.take());
        if let Some(output) = child.stdout.take() {
            let mut output = BufReader::new(output);
            let mut bytes = Vec::new();
            while output.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                line(String::from_utf8_lossy(&bytes).trim_end().to_owned());
                bytes.clear();
            }
        }
        let ended = child.wait();
        self.job.cancel.release(held);
        ended.map(|status| status.success()).map_err(failed)
    }
}

fn site_packages(venv: &Path) -> io::Result<PathBuf> {
    for entry in fs::read_dir(venv.join("lib"))? {
        let path = entry?.path().join("site-packages");
        if path.is_dir() {
            return Ok(path);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "it has no site-packages"))
}

/// Gives a layered environment the programs of the one beneath it, run by its own interpreter.
fn lift_programs(base: &Path, folder: &Path) -> io::Result<()> {
    let (from, to) = (base.join("bin"), folder.join("bin"));
    let (lower, own) = (from.as_os_str().as_bytes(), to.as_os_str().as_bytes());
    for entry in fs::read_dir(&from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let data = entry.metadata()?;
        if !data.is_file() || data.permissions().mode() & 0o111 == 0 || target.exists() {
            continue;
        }
        let text = fs::read(entry.path())?;
        let (head, rest) = text.split_at(text.len().min(HEAD));
        if head.starts_with(b"#!") {
            fs::write(&target, [&replaced(head, lower, own), rest].concat())?;
            fs::set_permissions(&target, data.permissions())?;
        } else {
            std::os::unix::fs::symlink(entry.path(), &target)?;
        }
    }
    Ok(())
}

fn replaced(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.first() {
        if rest.starts_with(from) {
            result.extend_from_slice(to);
            rest = &rest[from.len()..];
        } else {
            result.push(*first);
            rest = &rest[1..];
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_run_by_the_upper_interpreter() {
        assert_eq!(
            replaced(b"#!/c/base/bin/python\n/c/base/x", b"/c/base/bin", b"/c/h/bin"),
            b"#!/c/h/bin/python\n/c/base/x"
        );
    }
}
