//! What an earlier commit has started, and the present one looks after: an upgrade beneath a running training.
//!
//! It costs a build of that commit and needs the repository's history, so only `cargo xtask test full` does it.

use super::Outcome;
use super::parts::{counted, kube_tests};
use crate::image::static_agent_of;
use crate::proc::{capture, cargo, command, must, target};
use crate::setup;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The commit, of version 1 of the agents' protocol. A later one takes its place when that is not spoken any more.
const COMMIT: &str = "9ccb11018b5d7c411db3dc2cf2d377d832857153";

/// Installs the earlier commit's chart with its programs, and upgrades it to what is here.
pub fn older() -> Result<Outcome> {
    if let Some(why) = setup::no_kube() {
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let known = command("git").args(["cat-file", "-e", &format!("{COMMIT}^{{commit}}")]).stderr(Stdio::null()).status();
    if !known.context("git could not be started")?.success() {
        return Ok(Outcome::Skipped(format!(
            "this clone has not the commit {COMMIT}; `git fetch --unshallow` gets it"
        )));
    }
    let older = build()?;
    let mut tests = kube_tests()?;
    tests.env("AVIFLOW_OLDER", older).args(["--test", "chart"]);
    counted(tests.args(["--", "--ignored", "an_older_version"]))
}

/// Its source, and its programs beside it, in the target folder: built once.
fn build() -> Result<PathBuf> {
    let folder = target()?.join("older").join(COMMIT);
    let source = folder.join("source");
    let built = folder.join("built");
    if built.exists() {
        return Ok(folder);
    }
    std::fs::create_dir_all(&source)?;
    let archive = folder.join("source.tar");
    must(command("git").args(["archive", "--output"]).arg(&archive).arg(COMMIT))?;
    must(command("tar").arg("-xf").arg(&archive).arg("-C").arg(&source))?;
    let own = folder.join("target");
    let build = |name: &str| {
        let mut build = cargo();
        build.current_dir(&source).env("CARGO_TARGET_DIR", &own).args(["build", "--locked", "--package", name]);
        build
    };
    must(build("aviflow").arg("--bins"))?;
    let agent = static_agent_of(build("aviflow-agent"))?;
    copy(&own.join("debug/aviflow"), &folder.join("aviflow"))?;
    copy(&own.join(agent), &folder.join("aviflow-agent"))?;
    std::fs::write(&built, capture(command("git").args(["rev-parse", COMMIT]))?)?;
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).with_context(|| format!("{} cannot be copied", from.display()))?;
    Ok(())
}
