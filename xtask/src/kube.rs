//! A real Kubernetes on this machine: the tests' own, by its command.

use crate::proc::{self, built, show};
use crate::setup;
use anyhow::{Result, bail};
use std::ffi::OsStr;
use std::process::Command;

/// `cargo xtask kube TASK`.
pub fn run(args: &[String]) -> Result<u8> {
    if args.first().is_some_and(|task| task == "up") {
        if let Some(why) = setup::no_kube() {
            bail!("{why}");
        }
        setup::check_kube()?;
    }
    Ok(show(&mut command(args)?)?.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)))
}

/// The tests' own command.
pub fn command(args: &[impl AsRef<OsStr>]) -> Result<Command> {
    let mut cluster = proc::command(built("--bin", "aviflow-testcluster", &["--quiet", "--locked"])?);
    cluster.args(args);
    Ok(cluster)
}
