//! A control plane, driven by its own commands.

use crate::proc::{built, capture, cargo, command, must, target};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The profile to build with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// The one that tests build too, so that whoever does both compiles once. Dependencies are optimised in it.
    Dev,
    /// The one that is measured.
    Release,
}

/// Builds the binary and returns its path.
pub fn build(profile: Profile) -> Result<PathBuf> {
    match profile {
        Profile::Dev => built("--bin", "aviflow", &[]),
        Profile::Release => {
            must(cargo().args(["build", "--package", "aviflow", "--bins", "--release"]))?;
            Ok(target()?.join("release/aviflow"))
        }
    }
}

/// The home folder that tests and the picture share, for the sake of its environments.
pub fn tested_home() -> Result<PathBuf> {
    Ok(target()?.join("demo/tested"))
}

/// A control plane by its binary and its home folder.
#[derive(Clone, Debug)]
pub struct Control {
    /// The binary.
    pub binary: PathBuf,
    /// `AVIFLOW_HOME`.
    pub home: PathBuf,
}

impl Control {
    /// The binary with a home folder, which is made.
    pub fn new(binary: PathBuf, home: &Path) -> Result<Control> {
        std::fs::create_dir_all(home).with_context(|| format!("cannot make {}", home.display()))?;
        let home = home.canonicalize()?;
        Ok(Control { binary, home })
    }

    /// The same with a folder that is emptied first, but for its environments, which take minutes to
    /// make, and its cache.
    pub fn fresh(binary: PathBuf, home: &Path) -> Result<Control> {
        let control = Control::new(binary, home)?;
        if control.runs() {
            capture(&mut control.cli(["server", "stop"]))?;
        }
        for entry in std::fs::read_dir(&control.home)? {
            let path = entry?.path();
            match path.file_name().and_then(|name| name.to_str()) {
                Some("environments" | "cache") => {}
                _ if path.is_dir() => std::fs::remove_dir_all(&path)?,
                _ => std::fs::remove_file(&path)?,
            }
        }
        Ok(control)
    }

    /// A command of the binary that speaks to this control plane and no other.
    pub fn cli<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(&self, args: I) -> Command {
        let mut cli = command(&self.binary);
        cli.args(args).env("AVIFLOW_HOME", &self.home).env_remove("AVIFLOW_CONTEXT");
        cli
    }

    /// What a command answers in JSON.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let text = capture(self.cli(args).args(["-o", "json"]))?;
        serde_json::from_str(&text).with_context(|| format!("`aviflow {}` answered no JSON", args.join(" ")))
    }

    /// Whether it runs.
    pub fn runs(&self) -> bool {
        // The exit code alone would do; the field guards against a status of something that has stopped.
        self.json(&["server", "status"]).is_ok_and(|status| find(&status, "pid").is_some_and(|pid| !pid.is_null()))
    }

    /// Starts it.
    pub fn start(&self, nodes: u32) -> Result<()> {
        must(&mut self.cli(["server", "start", "--nodes", &nodes.to_string()]))
    }

    /// Stops it; trainings go on.
    pub fn stop(&self) -> Result<()> {
        must(&mut self.cli(["server", "stop"]))
    }

    /// All jobs, in no order.
    pub fn jobs(&self) -> Result<Vec<Value>> {
        let list = self.json(&["ls", "--all"])?;
        let jobs = if list.is_array() { &list } else { &list["jobs"] };
        Ok(jobs.as_array().cloned().unwrap_or_default())
    }

    /// The job that was submitted last.
    pub fn latest(&self) -> Result<Option<Value>> {
        Ok(self.jobs()?.into_iter().max_by_key(|job| job["id"].as_u64()))
    }

    /// Where it listens, as host and port.
    pub fn address(&self) -> Result<String> {
        let file = self.home.join("server.json");
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let json: Value = serde_json::from_str(&text)?;
        let url = ["address", "url", "listen"].iter().find_map(|key| find(&json, key)?.as_str());
        let url = url.with_context(|| format!("{} names no address", file.display()))?;
        Ok(url.trim_start_matches("http://").trim_end_matches('/').to_owned())
    }

    /// Its process.
    pub fn pid(&self) -> Result<u64> {
        let status = self.json(&["server", "status"])?;
        find(&status, "pid").and_then(Value::as_u64).context("`aviflow server status` names no process")
    }

    /// The token of this user.
    pub fn token(&self) -> Result<String> {
        let file = self.home.join("token");
        let token = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(token.trim().to_owned())
    }
}

/// The first field of this name, at any depth.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(fields) => fields.get(key).or_else(|| fields.values().find_map(|v| find(v, key))),
        Value::Array(values) => values.iter().find_map(|v| find(v, key)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

/// A control plane for one test or measurement: stopped at the end, whatever happens, its jobs too.
pub struct Scratch(pub Control);

impl Scratch {
    /// Starts one.
    pub fn start(control: Control, nodes: u32) -> Result<Scratch> {
        control.start(nodes)?;
        Ok(Scratch(control))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let live = |job: &Value| !matches!(job["phase"].as_str(), Some("Succeeded" | "Failed" | "Cancelled"));
        let jobs = self.0.jobs().unwrap_or_default();
        let names: Vec<&str> = jobs.iter().filter(|job| live(job)).filter_map(|job| job["name"].as_str()).collect();
        if !names.is_empty() {
            capture(self.0.cli(["cancel"]).args(names)).ok();
        }
        if let Err(error) = capture(&mut self.0.cli(["server", "stop"])) {
            eprintln!("the control plane in {} was not stopped: {error:#}", self.0.home.display());
        }
    }
}
