//! `cargo xtask bench replay`: traces replayed through the plan, beside what others do.
//!
//! The traces are those of `../shared/traces` where they are at hand, else generated ones, which
//! the table then says. Everything is asked of `aviflow simulate --json`, as anybody could.

use super::{finish, machine};
use crate::control::{self, Profile};
use crate::proc::{capture, command};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

/// The lines around the tables.
const MARKS: [&str; 2] = ["<!-- replays: cargo xtask bench replay --write -->", "<!-- end of replays -->"];
/// How many perturbed traces.
const TRACES: &str = "20";

const KALOS: &[&str] = &["--compress", "4", "--whole-nodes", "--nodes", "128"];

/// What is replayed: the format, words for it, options, and the policies.
const REPLAYS: [(&str, &str, &[&[&str]], &str); 7] = [
    ("kalos", "Kalos × 4 on 128 whole nodes, exact limits", &[KALOS], "fifo,greedy,easy,aviflow"),
    ("kalos", "the same, limits 1 to 5 times too long", &[KALOS, &["--limits", "over:1-5"]], "easy,aviflow"),
    ("kalos", "the same, no limits and time sharing", &[KALOS, &["--preemption", "on"]], "aviflow"),
    ("philly", "Philly on 320 nodes", &[&["--nodes", "320"]], "easy,aviflow"),
    ("philly", "Philly on 48 nodes", &[&["--nodes", "48"]], "easy,aviflow"),
    ("lingjun", "jobs that need one leaf or group, on the tree of Lingjun", &[], "fifo,greedy,easy,aviflow"),
    ("lingjun", "the same, limits 1 to 5 times too long", &[&["--limits", "over:1-5"]], "easy,aviflow"),
];

/// Measures; with `write`, puts the tables into the page.
pub fn run(write: bool) -> Result<u8> {
    let binary = control::build(Profile::Release)?;
    let mut out = format!("Measured on {}.\n\n", machine()?);
    out += "| trace | policy | 128 nodes and more | 64 to 127 | 8 to 63 | under 8 | all | longest | lost | in use | \
            plan p50, p99, max | replay |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for (format, words, options, policies) in REPLAYS {
        // The mix is made up, but not the tree.
        if format == "lingjun" && traces(format).is_none() {
            continue;
        }
        for (i, policy) in policies.split(',').enumerate() {
            println!("{words}: {policy}");
            let begun = Instant::now();
            let report = simulate(&binary, format, options, &["--policy", policy])?;
            let took = begun.elapsed().as_secs_f64();
            let figures = &report["policies"][policy];
            let words = if i == 0 { words } else { "" };
            out += &format!("| {words} | {policy} | {} | {took:.2} s |\n", row(figures));
        }
    }
    out += "\nWaits in hours, means and the longest: completion − submission − run time.";
    out += if traces("kalos").is_some() { "\n" } else { " The traces are generated ones.\n" };
    if traces("lingjun").is_some() {
        out += "\nJobs on the tree of Lingjun (847 hosts on 119 leaves in 3 groups) are \
                [a stated mix](admin/simulate.md#jobs-that-need-one-leaf), and their use is also told in parts \
                of [what could be in use at most](admin/simulate.md#the-bound).\n";
    }
    out += &format!(
        "\nOver {TRACES} perturbed traces of Kalos × 4, as ratios to EASY with exact limits on the same trace, \
        mean ± deviation:\n\n| policy | 128 nodes and more | 64 to 127 | 8 to 63 | under 8 | all |\n|---|---|---|---|---|---|\n"
    );
    for (words, mode) in [("aviflow, exact limits", "off"), ("aviflow, no limits and time sharing", "on")] {
        println!("{TRACES} perturbed traces: {words}");
        let options: &[&[&str]] = &[KALOS, &["--preemption", mode, "--perturb", TRACES]];
        let report = simulate(&binary, "kalos", options, &["--policy", "easy,aviflow"])?;
        let figures = &report["perturbed"]["policies"]["aviflow"];
        let ratio = |class: &str| {
            let easy = &figures[format!("wait_hours.{class}.mean")]["to_easy"];
            format!("{} ± {}", number(&easy["mean"]), number(&easy["deviation"]))
        };
        out += &format!("| {words} | {} |\n", ["ge128", "n64_127", "n8_63", "lt8", "all"].map(ratio).join(" | "));
    }
    finish(&out, MARKS, write)
}

/// A trace of a format, or its topology, where it is at hand.
fn traces(format: &str) -> Option<String> {
    let name = match format {
        "kalos" => "kalos-2023.csv",
        "lingjun" => "lingjun-2023-topology.csv",
        _ => "philly-2017.csv",
    };
    let path = format!("../shared/traces/{name}");
    Path::new(&path).exists().then_some(path)
}

fn simulate(binary: &Path, format: &str, options: &[&[&str]], more: &[&str]) -> Result<Value> {
    let mut simulate = command(binary);
    simulate.args(["simulate", "--json", "--format", format]).args(options.concat()).args(more);
    if let Some(file) = traces(format) {
        simulate.args([if format == "lingjun" { "--topology" } else { "--trace" }, &file]);
    }
    serde_json::from_str(&capture(&mut simulate)?).context("aviflow simulate --json")
}

fn row(figures: &Value) -> String {
    let waits = &figures["wait_hours"];
    let mut cells: Vec<String> =
        ["ge128", "n64_127", "n8_63", "lt8", "all"].iter().map(|class| number(&waits[class]["mean"])).collect();
    let percent = |v: &Value| v.as_f64().map_or("none".to_owned(), |v| format!("{:.2}%", v * 100.0));
    cells.push(number(&waits["all"]["max"]));
    cells.push(percent(&figures["lost_share"]));
    let of_bound = &figures["use_of_bound"];
    let of_bound = if of_bound.is_null() { String::new() } else { format!(", {} of the bound", percent(of_bound)) };
    cells.push(percent(&figures["gpu_use_while_waiting"]) + &of_bound);
    let plan = ["p50", "p99", "max"].map(|q| figures["plan_ms"][q].as_f64().unwrap_or_default());
    cells.push(format!("{:.3}, {:.2}, {:.1} ms", plan[0], plan[1], plan[2]));
    cells.join(" | ")
}

/// A figure with three digits; none where there is none.
fn number(value: &Value) -> String {
    match value.as_f64() {
        None => "none".to_owned(),
        Some(v) if v >= 99.95 => format!("{v:.0}"),
        Some(v) if v >= 9.995 => format!("{v:.1}"),
        Some(v) => format!("{v:.2}"),
    }
}
