//! The same on this machine's processes, to compare with.

use crate::plane::program;
use crate::said::printed;
use anyhow::{Context as _, Result};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A control plane of this machine. Dropping it stops it.
pub struct Local {
    home: PathBuf,
}

impl Local {
    /// Starts one with so many nodes of so many GPUs. What is built in its folder is built once.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(home: PathBuf, nodes: u32, gpus: u32) -> Result<Local> {
        let local = Local { home };
        fs::create_dir_all(&local.home)?;
        local.ok(&["server", "start", "--nodes", &nodes.to_string(), "--gpus-per-node", &gpus.to_string()])?;
        Ok(local)
    }

    /// Runs a command that is to succeed, and returns what it printed.
    ///
    /// # Errors
    /// If it fails; the error quotes it.
    pub fn ok(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program("AVIFLOW_BIN")?);
        command.env("AVIFLOW_HOME", &self.home).env("AVIFLOW_CONFIG", self.home.join("config.yaml"));
        printed(args, &command.args(args).stdin(Stdio::null()).output()?)
    }

    /// The losses that the newest training of a name left.
    ///
    /// # Errors
    /// If there are none.
    pub fn losses(&self, job: &str) -> Result<String> {
        let folder = tempfile::tempdir()?;
        let to = folder.path().join("losses.jsonl");
        self.ok(&["cp", &format!("{job}:/out/losses.jsonl"), &to.display().to_string()])?;
        Ok(fs::read_to_string(to)?)
    }

    /// The packages of the environment that was built.
    ///
    /// # Errors
    /// If there is none.
    pub fn packages(&self) -> Result<PathBuf> {
        let built = fs::read_dir(self.home.join("environments"))?.flatten();
        let lib = |entry: fs::DirEntry| {
            let versions = fs::read_dir(entry.path().join("lib")).ok()?.flatten();
            versions.map(|v| v.path().join("site-packages")).find(|packages| packages.join("jax").is_dir())
        };
        built.into_iter().find_map(lib).context("no environment with JAX was built")
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let _ = self.ok(&["server", "stop"]);
    }
}
