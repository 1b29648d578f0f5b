//! The project's own tasks. `cargo xtask` lists them.
//!
//! This program depends on none of the crates it drives: it knows them by their
//! commands, as a person at a terminal does.

mod bench;
mod control;
mod demo;
mod docs;
mod image;
mod kube;
mod picture;
mod proc;
mod setup;
mod suite;
mod tidy;

use anyhow::{Context as _, Result, bail};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  demo [--exit] [--home DIR]   this machine as a pool of 2 virtual HGX nodes, and a training on it
      --exit                   stop the control plane after the training; end with its exit code
      --home DIR               where the control plane keeps its state (default: target/demo/home)
  test [PART…]                 what CI runs, or some of it: unit, sim, local, frameworks, monitoring, kube, docs; full adds
                               a long soak and an upgrade of an earlier commit
  tidy                         the rules that the compiler does not check
  soak N [--seed S]            N histories in the simulator
  bench [--write]              measure; --write puts the figures into docs/performance.md
  bench plan [--write]         the same for the time that a plan takes, and how it grows
  bench replay [--write]       the same for traces of jobs, replayed through the plan
  bench kueue [--scenario baseline|leaves] [--only aviflow|kueue] [--requests-per-second N]
                               Kueue's own performance test, on Kueue and as jobs on Aviflow; root, Go
  bench scale                  a gang of 512 and 2,000 waiting jobs on 1,000 simulated nodes; root, Go
  kube up|down|status          a real Kubernetes on this machine, with two nodes and 16 GPUs that are not there
  kube binaries                build the programs that it needs
  deploy                       write the definitions, and deploy/aviflow.yaml of the chart; needs helm
  image [--push REGISTRY/NAME:TAG] [--output FILE.tar|DIR] [--debug]
                               the image of the control plane and the agent, without Docker
  picture                      run a session in a terminal and draw it: docs/images/demo.svg
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(1)
        }
    }
}

/// Runs one task and returns the exit code.
fn run(args: &[String]) -> Result<u8> {
    std::env::set_current_dir(root()).context("the project's folder is gone")?;
    let (task, rest) = args.split_first().map_or(("help", &[][..]), |(task, rest)| (task.as_str(), rest));
    match task {
        "demo" => {
            let mut options = demo::Options::default();
            let mut rest = rest.iter();
            while let Some(arg) = rest.next() {
                match arg.as_str() {
                    "--exit" => options.exit = true,
                    "--home" => options.home = Some(rest.next().context("--home needs a folder")?.into()),
                    other => bail!("unknown argument `{other}`\n\n{USAGE}"),
                }
            }
            demo::run(&options)
        }
        "test" => suite::run(rest),
        "tidy" => tidy::run(),
        "soak" => suite::soak(rest),
        "bench" => match rest {
            [] => bench::run(false),
            [write] if write == "--write" => bench::run(true),
            [what] if what == "plan" => bench::plan::run(false),
            [what, write] if what == "plan" && write == "--write" => bench::plan::run(true),
            [what, rest @ ..] if what == "kueue" || what == "scale" => bench::kube::run(what, rest),
            [what] if what == "replay" => bench::replay::run(false),
            [what, write] if what == "replay" && write == "--write" => bench::replay::run(true),
            other => bail!("unknown arguments {other:?}\n\n{USAGE}"),
        },
        "kube" => kube::run(rest),
        "deploy" => deploy(),
        "image" => image::run(rest),
        "picture" => picture::run(),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(if args.is_empty() { 2 } else { 0 })
        }
        other => bail!("unknown task `{other}`\n\n{USAGE}"),
    }
}

/// Writes what the tests of `deploy/` compare.
fn deploy() -> Result<u8> {
    let mut tests = proc::cargo();
    tests.args(["test", "--workspace", "--test", "deploy", "--", "--include-ignored"]);
    let status = tests.env("UPDATE_SCHEMA", "1").status().context("cargo")?;
    Ok(u8::from(!status.success()))
}

/// The project's folder.
fn root() -> std::path::PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
