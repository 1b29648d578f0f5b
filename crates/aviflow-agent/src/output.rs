//! Progress in the usual output of training programs. Pure.
//!
//! Used for ranks that no hook speaks for. One file for each tool:
//!
//! | file | whose lines |
//! |---|---|
//! | `torchtitan` | torchtitan, forge |
//! | `megatron` | Megatron-LM, Megatron-Bridge, Megatron-DeepSpeed, NeMo |
//! | `trainer` | transformers' Trainer, TRL, LLaMA-Factory |
//! | `json` | one JSON object a line |
//! | `plain` | nanoGPT, litgpt, llm.c, and scripts that name a step and a loss |
//! | [`names`] | the one name and unit of each value |
//!
//! Invariants: an evaluation's loss is never the training's; a line without a step and a loss is no progress, so that
//! data loading, bars of downloads and configuration are none; the time for a line grows with its length, and lines
//! over [`LONGEST`] bytes are not read.

mod json;
mod megatron;
pub mod names;
mod plain;
mod scan;
mod torchtitan;
mod trainer;

use crate::protocol::Progress;
use names::Values;

/// The longest line that is read, in bytes, except for JSON.
pub const LONGEST: usize = 2000;

/// What a line tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// A step with its values.
    Step(Progress),
    /// Tokens so far and values of a step that a bar names (Trainer's dictionaries name none).
    Values(Option<u64>, Values),
    /// Values of an evaluation, and the step that it is of where the line says so. No step by itself.
    Evaluation(Option<u64>, Values),
    /// A bar: the step and how many there are. No progress by itself.
    Bar(u64, u64),
}

/// What a line tells, and which of several processes behind one pipe said it.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The number in a prefix such as `[rank3]:`, as torchrun's `--tee` writes it; none without.
    pub speaker: Option<u32>,
    /// What it tells.
    pub seen: Seen,
}

/// Reads one line, which has no control characters ([`crate::log::plain`]).
#[must_use]
pub fn read(line: &str) -> Option<Line> {
    let bytes = line.as_bytes();
    // Most lines end here: cheap before clever.
    let json = bytes.first() == Some(&b'{') && bytes.get(1) != Some(&b'\'');
    let bar = !json && bytes[..bytes.len().min(32)].windows(2).any(|pair| pair == b"%|");
    if !bar && !scan::holds(bytes, b"loss") && !json || bytes.len() > LONGEST && !json {
        return None;
    }
    // Logs in JSON are many, and few of them are a training's.
    if json && !scan::holds(bytes, b"step") && !scan::holds(bytes, b"iter") {
        return None;
    }
    if json {
        return json::read(line).map(|seen| Line { speaker: None, seen });
    }
    let (speaker, line) = speaker(line);
    if line.starts_with("{\"") {
        return json::read(line).map(|seen| Line { speaker, seen });
    }
    let seen = trainer::bar(line).or_else(|| trainer::read(line)).or_else(|| {
        let lower = line.to_ascii_lowercase();
        // A dictionary that is no report has no other reading.
        if lower.trim_start().starts_with("{'") || !lower.contains("loss") {
            return None;
        }
        match () {
            () if torchtitan::is_of(&lower) => torchtitan::read(&lower),
            () if megatron::is_of(&lower) => megatron::read(&lower),
            () => plain::read(&lower),
        }
    })?;
    Some(Line { speaker, seen })
}

/// The number of `[rank3]:` or `[default3]:`, and the rest.
fn speaker(line: &str) -> (Option<u32>, &str) {
    let number = || {
        let (prefix, rest) = line.strip_prefix('[')?.split_once("]:")?;
        let digits = prefix.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '_');
        (digits.len() < prefix.len()).then(|| digits.parse().ok()).flatten().map(|number| (number, rest.trim_start()))
    };
    match number() {
        Some((number, rest)) => (Some(number), rest),
        None => (None, line),
    }
}

#[cfg(test)]
mod tests;
