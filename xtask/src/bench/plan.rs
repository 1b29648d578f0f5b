//! `cargo xtask bench plan`: what a plan costs, and how that grows with nodes, waiting jobs and queues.

use super::{finish, machine};
use crate::proc::{capture, cargo};
use anyhow::{Context as _, Result};
use serde_json::Value;

/// The lines around the table.
const MARKS: [&str; 2] = ["<!-- plans: cargo xtask bench plan --write -->", "<!-- end of plans -->"];

/// Measures; with `write`, puts the table into the page.
pub fn run(write: bool) -> Result<u8> {
    let mut example = cargo();
    example.args(["run", "--release", "--locked", "--quiet", "--package", "aviflow-core", "--example", "plan_time"]);
    println!("a plan of nine pools, and of a gang of 512 nodes");
    let lines = capture(&mut example)?;
    let mut table = format!(
        "Measured on {}, on one core.\n\n| nodes | running jobs | waiting jobs | queues | empty memo | one event, warm memo \
         | target |\n|---|---|---|---|---|---|---|\n",
        machine()?
    );
    let mut gang = String::new();
    for line in lines.lines() {
        let figures: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let ms = |name: &str| figures[name].as_f64().map_or("none".to_owned(), |v| format!("{v:.1} ms"));
        let number = |name: &str| figures[name].as_u64().unwrap_or_default();
        if figures["gang_ms"].is_number() {
            gang = format!(
                "\nThat a gang of {} nodes cannot start on {} nodes is known after {} (target: 10 ms); if it might \
                 take GPUs by priority, and there are too few, after {}.\n",
                number("gang"),
                number("nodes"),
                ms("gang_ms"),
                ms("taking_ms")
            );
            continue;
        }
        let shape = ["nodes", "running", "waiting", "queues"].map(number);
        let target = match shape {
            [2_000, 1_000, 10_000, 8] => "50 and 5 ms",
            [10_000, _, 100_000, _] => "500 ms",
            _ => "",
        };
        let shape = shape.map(|n| n.to_string()).join(" | ");
        table += &format!("| {shape} | {} | {} | {target} |\n", ms("empty_ms"), ms("warm_ms"));
    }
    table += &gang;
    finish(&table, MARKS, write)
}
