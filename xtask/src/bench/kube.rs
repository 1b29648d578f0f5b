//! `cargo xtask bench kueue` and `cargo xtask bench scale`: what is measured on a real apiserver.

use crate::proc::{cargo, command, must, show, target};
use crate::setup;
use anyhow::{Result, bail};

/// Measures one thing; the further arguments are its own.
pub fn run(what: &str, args: &[String]) -> Result<u8> {
    if let Some(why) = setup::no_kube() {
        bail!("{why}");
    }
    setup::check_kube()?;
    println!("building aviflow and the benchmark, release");
    let mut build = cargo();
    // Both at once, so that what they share is compiled once.
    must(build.args(["build", "--release", "--package", "aviflow", "--package", "aviflow-bench-kube"]))?;
    let release = target()?.join("release");
    let folder = target()?.join("bench").join(what);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let mut bench = command(release.join("aviflow-bench-kube"));
    bench.arg(what).arg(release.join("aviflow")).arg(folder).args(args);
    Ok(show(&mut bench)?.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)))
}
