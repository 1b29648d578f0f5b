//! `cargo xtask test`: everything that CI runs, part by part.
//!
//! A part that fails does not hide the rest; only what does not compile stops
//! the parts that need it. Tests are counted from what their runners print.

mod count;
mod older;
mod parts;

use crate::proc::{cargo, must};
use anyhow::{Context as _, Result, bail};
pub use count::Count;
use std::time::{Duration, Instant};

/// How a part went.
enum Outcome {
    /// It ran; by the tests of its runner, or as one test of its own.
    Ran(Count),
    /// It ran and tests failed, and this is what their runner said of them.
    Failed(Count, String),
    /// It did not run, and why.
    Skipped(String),
}

/// A part of the suite.
struct Part {
    /// Its name in the table.
    name: &'static str,
    /// Whether it needs the workspace compiled.
    compiled: bool,
    /// What it does.
    run: fn() -> Result<Outcome>,
}

const fn part(name: &'static str, compiled: bool, run: fn() -> Result<Outcome>) -> Part {
    Part { name, compiled, run }
}

/// The part after which parts that need the workspace compiled may run.
const COMPILE: &str = "compile";

const FMT: Part = part("fmt", false, parts::fmt);
const TIDY: Part = part("tidy", false, parts::tidy);
const DENY: Part = part("deny", false, parts::deny);
const CLIPPY: Part = part("clippy", false, parts::clippy);
const BUILD: Part = part(COMPILE, false, parts::compile);
const CARGO: Part = part("cargo test", true, parts::cargo_test);
const HOOKS: Part = part("python hooks", false, parts::hooks);
const EXAMPLE: Part = part("tiny-gpt", true, parts::example);
const SIM: Part = part("simulator", true, parts::simulator);
const SOAK: Part = part("soak", true, parts::long_soak);
const END_TO_END: Part = part("end to end", true, parts::end_to_end);
const DEMO: Part = part("demo", true, parts::demo);
const MONITORING: Part = part("monitoring", true, parts::monitoring);
const FRAMEWORKS: Part = part("frameworks", true, parts::frameworks);
const KUBE: Part = part("kube", true, parts::kube);
const KUBE_FULL: Part = part("kube", true, parts::kube_full);
const OLDER: Part = part("older agents", true, older::older);
const DOCS: Part = part("docs", true, parts::docs);

/// What each word of the command line means. Cheap parts come first.
fn chosen(words: &[String]) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    if words.is_empty() {
        return Ok(vec![
            FMT, TIDY, DENY, BUILD, CLIPPY, CARGO, HOOKS, SIM, DEMO, EXAMPLE, FRAMEWORKS, MONITORING, KUBE, DOCS,
        ]);
    }
    for word in words {
        parts.extend(match word.as_str() {
            "unit" => vec![FMT, TIDY, BUILD, CLIPPY, CARGO, HOOKS],
            "sim" => vec![BUILD, SIM],
            "local" => vec![BUILD, END_TO_END, DEMO, EXAMPLE],
            "frameworks" => vec![BUILD, FRAMEWORKS],
            "monitoring" => vec![BUILD, MONITORING],
            "kube" => vec![KUBE],
            "docs" => vec![TIDY, DOCS],
            "full" => vec![
                FMT, TIDY, DENY, BUILD, CLIPPY, CARGO, HOOKS, SOAK, DEMO, EXAMPLE, FRAMEWORKS, MONITORING, KUBE_FULL,
                OLDER, DOCS,
            ],
            other => bail!(
                "there is no part `{other}`; there are unit, sim, local, frameworks, monitoring, kube, docs and full"
            ),
        });
    }
    Ok(parts)
}

/// Runs the parts that were asked for. The exit code is 0 if none failed.
pub fn run(words: &[String]) -> Result<u8> {
    let parts = chosen(words)?;
    crate::setup::check(crate::setup::Task::Test)?;
    let mut rows: Vec<(&str, Result<Outcome>, Duration)> = Vec::new();
    let mut compiles = true;
    for part in parts {
        println!("\n──── {} ────", part.name);
        let begun = Instant::now();
        let outcome = match part.compiled && !compiles {
            true => Ok(Outcome::Skipped("the workspace does not compile".to_owned())),
            false => (part.run)(),
        };
        let failed = !matches!(&outcome, Ok(Outcome::Ran(count)) if count.failed == 0) && !is_skip(&outcome);
        compiles &= !(failed && part.name == COMPILE);
        match &outcome {
            Ok(Outcome::Skipped(why)) => println!("skipped: {why}"),
            Ok(Outcome::Ran(_) | Outcome::Failed(..)) => {}
            Err(error) => println!("{} failed: {error:#}", part.name),
        }
        println!("──── {}: {} in {} ────", part.name, word(&outcome), seconds(begun.elapsed()));
        rows.push((part.name, outcome, begun.elapsed()));
    }
    Ok(report(&rows))
}

fn is_skip(outcome: &Result<Outcome>) -> bool {
    matches!(outcome, Ok(Outcome::Skipped(_)))
}

fn word(outcome: &Result<Outcome>) -> &'static str {
    match outcome {
        Ok(Outcome::Ran(count)) if count.failed == 0 => "passed",
        Ok(Outcome::Skipped(_)) => "skipped",
        Ok(Outcome::Ran(_) | Outcome::Failed(..)) | Err(_) => "FAILED",
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// Prints what failed once more, as a long output hides it, the table and the sum; returns the exit code.
fn report(rows: &[(&str, Result<Outcome>, Duration)]) -> u8 {
    for (name, outcome, _) in rows {
        match outcome {
            Ok(Outcome::Failed(_, why)) => println!("\n──── what failed of {name} ────\n{why}"),
            Ok(Outcome::Ran(_) | Outcome::Skipped(_)) => {}
            Err(error) => println!("\n──── what failed of {name} ────\n{error:#}"),
        }
    }
    println!("\n{:<14} {:<8} {:>7} {:>7} {:>9}", "part", "result", "passed", "failed", "time");
    let mut all = Count::default();
    for (name, outcome, duration) in rows {
        let count = match outcome {
            Ok(Outcome::Ran(count) | Outcome::Failed(count, _)) => *count,
            Ok(Outcome::Skipped(_)) => Count { skipped: 1, ..Count::default() },
            Err(_) => Count { failed: 1, ..Count::default() },
        };
        println!("{name:<14} {:<8} {:>7} {:>7} {:>9}", word(outcome), count.passed, count.failed, seconds(*duration));
        all += count;
    }
    println!("\n{} passed, {} failed, {} skipped", all.passed, all.failed, all.skipped);
    u8::from(all.failed > 0)
}

/// `cargo xtask soak N [--seed S]`.
pub fn soak(args: &[String]) -> Result<u8> {
    let histories = args.first().context("how many histories? `cargo xtask soak 1000`")?;
    histories.parse::<u64>().with_context(|| format!("`{histories}` is no number of histories"))?;
    must(cargo().args(["run", "--release", "--package", "aviflow-engine", "--example", "soak", "--"]).args(args))?;
    Ok(0)
}
