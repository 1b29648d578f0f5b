//! A line that is one JSON object and names a step: `{"step": 10, "loss": 2.5}`.
//!
//! Keys of the step: [`names::STEP_KEYS`], of which the first that is there counts; of how many there will be:
//! [`names::TOTAL_KEYS`]; of tokens so far: [`names::TOKEN_KEYS`]. Values are those of [`names::named`], as numbers,
//! or as text where JSON has none (`"NaN"`, or bare as Python writes it); others are passed over. An object counts only with a step and at least one
//! of `loss`, `eval_loss`, `grad_norm`, a rate or a time of a step, so that a log in JSON is no progress. One that has
//! an evaluation's loss and none of the training is an evaluation.

use super::names::{self, Values, put};
use super::trainer::whole;
use super::{Seen, scan};
use crate::protocol::Progress;
use serde_json::Value as Json;

/// The longest object, in bytes.
const LONGEST: usize = 16 << 10;

/// What makes a line one of a training.
const TELLING: [&str; 7] = [
    "loss",
    "eval_loss",
    "grad_norm",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "samples_per_second",
    "iteration_ms",
];

/// Reads a line that begins with `{"`.
pub(super) fn read(line: &str) -> Option<Seen> {
    if line.len() > LONGEST {
        return None;
    }
    let parsed = serde_json::from_str(line).or_else(|e| match quoted(line) {
        Some(quoted) => serde_json::from_str(&quoted),
        None => Err(e),
    });
    let Ok(Json::Object(object)) = parsed else { return None };
    let first = |keys: &[&str]| keys.iter().find_map(|key| object.get(*key)).and_then(number).and_then(whole);
    let step = first(&names::STEP_KEYS)?;
    let mut values = Values::new();
    for (key, value) in &object {
        if let Some((name, number)) = number(value).and_then(|n| names::named(key, n)) {
            put(&mut values, name, number);
        }
    }
    // LLaMA-Factory's log, whose rate is of tokens.
    if let Some(rate) = object.get("throughput").and_then(number).filter(|_| object.contains_key("current_steps")) {
        put(&mut values, "tokens_per_second", rate);
    }
    if !TELLING.iter().any(|name| values.contains_key(*name)) {
        return None;
    }
    if values.contains_key("eval_loss") && !values.contains_key("loss") {
        values.retain(|name, _| matches!(name.as_str(), "eval_loss" | "epoch"));
        return Some(Seen::Evaluation(Some(step), values));
    }
    let (total_steps, tokens) = (first(&names::TOTAL_KEYS), first(&names::TOKEN_KEYS));
    Some(Seen::Step(Progress { step, total_steps, tokens, values }))
}

/// The line with quotes around the numbers that Python writes and JSON has not: `NaN`, `Infinity`, `-Infinity`.
fn quoted(line: &str) -> Option<String> {
    if !line.contains("NaN") && !line.contains("Infinity") {
        return None;
    }
    let (mut quoted, mut text, mut escaped) = (String::with_capacity(line.len() + 16), false, false);
    let mut rest = line;
    while let Some(c) = rest.chars().next() {
        let word =
            (!text).then(|| ["NaN", "Infinity", "-Infinity"].iter().find(|word| rest.starts_with(**word))).flatten();
        if let Some(word) = word {
            quoted.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        text ^= c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        quoted.push(c);
        rest = &rest[c.len_utf8()..];
    }
    Some(quoted)
}

fn number(value: &Json) -> Option<f64> {
    match value {
        Json::Number(n) => n.as_f64(),
        Json::String(text) if text.len() < 32 => scan::number(text),
        _ => None,
    }
}
