//! A real Kubernetes on this machine: the tests' own, by its command.

use crate::proc::{cargo, show};
use crate::setup;
use anyhow::{Result, bail};

/// `cargo xtask kube TASK`.
pub fn run(args: &[String]) -> Result<u8> {
    if args.first().is_some_and(|task| task == "up") {
        if let Some(why) = setup::no_kube() {
            bail!("{why}");
        }
        setup::check_kube()?;
    }
    let mut cluster = cargo();
    cluster.args(["run", "--quiet", "--package", "aviflow-testcluster", "--"]).args(args);
    Ok(show(&mut cluster)?.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)))
}
