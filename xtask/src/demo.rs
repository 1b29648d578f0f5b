//! `cargo xtask demo`: a clone becomes a pool with a training on it.

use crate::control::{self, Control, Profile};
use crate::proc::{show, target};
use crate::setup;
use anyhow::{Context as _, Result};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Nodes of the demo's pool; each is an HGX server with 8 GPUs.
const NODES: u32 = 2;

/// The training.
const EXAMPLE: &str = "examples/tiny-gpt";

/// Results of the training that end the demo's output.
const RESULTS: [&str; 2] = ["validation loss", "byte-bigram entropy"];

/// The exit code after Ctrl-C, as a shell reports it.
const INTERRUPTED: u8 = 130;

/// What the demo is asked.
#[derive(Debug, Default)]
pub struct Options {
    /// Stop the control plane after the training.
    pub exit: bool,
    /// Where its state lives.
    pub home: Option<PathBuf>,
}

/// Runs the demo and returns the job's exit code.
pub fn run(options: &Options) -> Result<u8> {
    setup::check(setup::Task::Demo)?;
    println!("Building aviflow (the first time, this takes a few minutes).");
    let binary = control::build(Profile::Dev)?;
    let home = options.home.clone().map_or_else(|| target().map(|t| t.join("demo/home")), Ok)?;
    let control = Control::new(binary, &home)?;

    // From here on, Ctrl-C ends the training's display and then this program, in order.
    let asked_to_end = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&asked_to_end))?;
    }

    let ran_before = control.runs();
    if ran_before {
        println!("A control plane runs in {}; this demo uses it.", control.home.display());
    } else {
        println!("Starting a control plane: this machine as a pool of {NODES} virtual HGX nodes with 8 GPUs each.");
        control.start(NODES)?;
    }
    let outcome = train(&control, options, &asked_to_end);
    if ran_before {
        println!("The control plane was there before, so it stays.");
    } else {
        stop(&control)?;
    }
    let (code, results) = outcome?;
    if options.exit && !results.is_empty() {
        println!("{}", results.join("\n"));
    }
    Ok(code)
}

/// Runs the training; without `--exit`, then waits for Ctrl-C. Returns the exit code and the lines of results.
fn train(control: &Control, options: &Options, asked_to_end: &AtomicBool) -> Result<(u8, Vec<String>)> {
    println!("$ aviflow run {EXAMPLE}");
    let status = show(&mut control.cli(["run", EXAMPLE]))?;
    let code = status.code().map_or(1, |code| code.clamp(0, 255)) as u8;
    let results = results(control).unwrap_or_default();
    if asked_to_end.load(Ordering::Relaxed) {
        // `aviflow run` ended by leaving the job, whose outcome is not known.
        return Ok((INTERRUPTED, results));
    }
    if !options.exit {
        println!(
            "\nThe control plane stays up until Ctrl-C. To use it from another terminal:\n\
             \n  export AVIFLOW_HOME={home}\n  alias aviflow={binary}\n\
             \n  aviflow ls\n  aviflow show {name}\n  aviflow logs {name} --rank 0 --tail 20\n  aviflow usage --by state\n",
            home = control.home.display(),
            binary = control.binary.display(),
            name = control.latest()?.map_or_else(|| "tiny-gpt".into(), |job| text(&job["name"])),
        );
        println!("{}", results.join("\n"));
        while !asked_to_end.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
        println!();
    }
    Ok((code, results))
}

/// The results that the training reported, as lines.
fn results(control: &Control) -> Result<Vec<String>> {
    let job = control.latest()?.context("no job was submitted")?;
    let shown = control.json(&["show", &text(&job["name"])])?;
    let facts = &shown["facts"];
    let line = |name: &&str| facts[format!("result.{name}")].as_str().map(|value| format!("{name}: {}", short(value)));
    Ok(RESULTS.iter().filter_map(line).collect())
}

/// A number with as many digits as the training prints.
fn short(value: &str) -> String {
    value.parse::<f64>().map_or_else(|_| value.to_owned(), |number| format!("{number:.4}"))
}

/// Stops the control plane and says what goes on without it.
fn stop(control: &Control) -> Result<()> {
    let jobs = control.jobs().unwrap_or_default();
    let runs = |job: &&Value| matches!(job["phase"].as_str(), Some("Starting" | "Running" | "Suspending" | "Stopping"));
    let running: Vec<String> = jobs.iter().filter(runs).map(|job| text(&job["name"])).collect();
    control.stop()?;
    if !running.is_empty() {
        println!(
            "Still running, without a control plane: {list}. Another `cargo xtask demo` takes it up again. To end it:\n\
             \n  export AVIFLOW_HOME={home}\n  {binary} server start\n  {binary} cancel {names}\n",
            list = running.join(", "),
            names = running.join(" "),
            home = control.home.display(),
            binary = control.binary.display(),
        );
    }
    Ok(())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
