//! `cargo xtask bench kueue` and `cargo xtask bench scale`: what Aviflow costs on a real apiserver.
//!
//! Nothing is estimated: a figure that could not be measured is an error.

mod apiserver;
mod aviflow;
mod kueue;
mod measured;
mod module;
mod report;
mod scale;
mod workload;

use anyhow::{Context as _, Result, bail};
use aviflow_testcluster::{Cluster, Options};
use report::Side;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
use workload::Scenario;

const USAGE: &str = "\
usage: aviflow-bench-kube kueue PROGRAM FOLDER [--scenario baseline|leaves] [--only aviflow|kueue] [--requests-per-second N]
       aviflow-bench-kube scale PROGRAM FOLDER";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let [what, program, folder, rest @ ..] = args else { bail!("{USAGE}") };
    // What is started has other working directories.
    let (program, folder) = (std::path::absolute(program)?, std::path::absolute(folder)?);
    match what.as_str() {
        "kueue" => {
            let (mut only, mut limit, mut scenario) = (None, None, &workload::BASELINE);
            let mut rest = rest.iter();
            while let Some(flag) = rest.next() {
                let value = rest.next().with_context(|| format!("{flag} lacks its value\n{USAGE}"))?;
                match (flag.as_str(), value.as_str()) {
                    ("--only", "aviflow" | "kueue") => only = Some(value.as_str()),
                    ("--requests-per-second", n) => limit = Some(n.parse().context("--requests-per-second")?),
                    ("--scenario", name) => {
                        let all = [&workload::BASELINE, &workload::LEAVES];
                        scenario = all.into_iter().find(|s| s.name == name).context("baseline or leaves")?;
                    }
                    _ => bail!("unknown: {flag} {value}\n{USAGE}"),
                }
            }
            peers(scenario, &program, &folder, only, limit)
        }
        "scale" if rest.is_empty() => scale::run(&program, &folder),
        other => bail!("unknown: {other}\n{USAGE}"),
    }
}

/// An apiserver that nobody has used yet, with the flags of Kueue's own test.
fn apiserver() -> Result<Cluster> {
    let apiserver_args = ["--max-requests-inflight=800", "--max-mutating-requests-inflight=400"].map(str::to_owned);
    Cluster::start(Options {
        nodes: Vec::new(),
        controllers: false,
        apiserver_args: apiserver_args.into(),
        ..Options::default()
    })
}

/// Both sides, one after the other.
fn peers(scenario: &Scenario, program: &Path, folder: &Path, only: Option<&str>, limit: Option<u32>) -> Result<()> {
    let wants = |side: &str| only.is_none_or(|only| only == side);
    let side = |name: &str, of: &dyn Fn(&Cluster, &Path) -> Result<Side>| -> Result<Option<Side>> {
        if !wants(name) {
            return Ok(None);
        }
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder)?;
        println!("{name}: {} jobs on a fresh apiserver; it writes to {}", scenario.jobs(), folder.display());
        let begun = Instant::now();
        let side = of(&apiserver()?, &folder).with_context(|| name.to_owned())?;
        println!("{name}: done in {:.0} s", begun.elapsed().as_secs_f64());
        side.lines(name, scenario).iter().for_each(|line| println!("{line}"));
        Ok(Some(side))
    };
    let ours = side("aviflow", &|cluster, folder| {
        aviflow::run(cluster, scenario, &aviflow::Options { program, folder, requests_per_second: limit })
    })?;
    let theirs = side("kueue", &|cluster, folder| kueue::run(cluster, scenario, folder))?;
    if let (Some(ours), Some(theirs)) = (ours, theirs) {
        report::ratios(&ours, &theirs).iter().for_each(|line| println!("{line}"));
    }
    Ok(())
}
