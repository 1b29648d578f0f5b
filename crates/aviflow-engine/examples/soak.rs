//! Runs as many simulated histories as asked: `soak N [--seed S]`.
//!
//! The first history that fails is made minimal and printed as a script;
//! `soak --replay FILE` runs such a script again.

use aviflow_engine::sim::{self, Script};
use std::collections::BTreeMap;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1));
    if let Some(file) = value("--replay") {
        return replay(file);
    }
    let Some(histories) = args.first().and_then(|n| n.parse::<u64>().ok()) else {
        eprintln!("usage: soak HISTORIES [--seed FIRST] | soak --replay FILE");
        return ExitCode::from(2);
    };
    let first: u64 = value("--seed").and_then(|s| s.parse().ok()).unwrap_or(0);
    let mut ended: BTreeMap<String, u64> = BTreeMap::new();
    let (mut turns, mut crashes, mut restless) = (0, 0u64, 0u64);
    for seed in first..first.saturating_add(histories) {
        match sim::run(seed) {
            Ok(stats) => {
                turns += stats.turns;
                crashes += u64::from(stats.crashes);
                for what in stats.restless {
                    restless += 1;
                    println!("seed {seed}: {what}");
                }
                for (phase, count) in stats.ended {
                    *ended.entry(phase).or_default() += u64::from(count);
                }
            }
            Err(violation) => {
                println!("seed {seed} at {} ms:", violation.at.0);
                violation.what.iter().for_each(|w| println!("  {w}"));
                let small = sim::minimal(&Script::generate(seed));
                println!("smallest script; keep it in a file and run `soak --replay FILE`:");
                println!("{}", serde_json::to_string(&small).unwrap_or_default());
                return ExitCode::FAILURE;
            }
        }
        if (seed + 1 - first).is_multiple_of(10_000) {
            println!("{} histories, {turns} turns, {crashes} crashes", seed + 1 - first);
        }
    }
    println!(
        "{histories} histories hold: {turns} turns, {crashes} crashes, {restless} restless plans, ended: {ended:?}"
    );
    ExitCode::SUCCESS
}

fn replay(file: &str) -> ExitCode {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{file} cannot be read: {error}");
            return ExitCode::from(2);
        }
    };
    let script: Script = match serde_json::from_str(&text) {
        Ok(script) => script,
        Err(error) => {
            eprintln!("{file} is no script: {error}");
            return ExitCode::from(2);
        }
    };
    match sim::replay(&script) {
        Ok(stats) => {
            println!("holds: {} turns, {} crashes", stats.turns, stats.crashes);
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("at {} ms:", violation.at.0);
            violation.what.iter().for_each(|w| println!("  {w}"));
            ExitCode::FAILURE
        }
    }
}
