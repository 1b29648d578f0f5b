//! Progress in the usual output of training programs. Pure.
//!
//! Used for ranks that no hook speaks for. It recognises torchtitan,
//! Megatron-LM, the dictionaries and the bar of Hugging Face's Trainer, and
//! lines like `step 120/300 loss 2.31` or `iter 10: loss 3.2, time 12ms`. A line
//! counts only if it names a step and a loss, so that data loading, bars of
//! downloads and configuration are no progress.

use crate::protocol::{Progress, Value};
use std::collections::BTreeMap;

/// What a line tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// A step with its values.
    Step(Progress),
    /// Values of a step that another line names (Trainer's dictionaries have none).
    Values(BTreeMap<String, Value>),
    /// A bar: the step and how many there are. No progress by itself.
    Bar(u64, u64),
}

/// Spellings of a step's number; the longer first.
const STEPS: [&str; 4] = ["iteration", "global_step", "step", "iter"];

/// Spellings of values and their names on the platform; the first that is found wins.
const VALUES: [(&str, &str); 19] = [
    ("lm loss", "loss"),
    ("train loss", "loss"),
    ("train_loss", "loss"),
    ("loss", "loss"),
    ("val loss", "val_loss"),
    ("val_loss", "val_loss"),
    ("eval_loss", "eval_loss"),
    ("grad norm", "grad_norm"),
    ("grad_norm", "grad_norm"),
    ("gnorm", "grad_norm"),
    ("learning rate", "learning_rate"),
    ("learning_rate", "learning_rate"),
    ("lr", "learning_rate"),
    ("tokens_per_second", "tokens_per_second"),
    ("tok/s", "tokens_per_second"),
    ("tps", "tokens_per_second"),
    ("wps", "tokens_per_second"),
    ("mfu", "mfu"),
    ("epoch", "epoch"),
];

/// Reads one line, which has no control characters ([`crate::log::plain`]).
#[must_use]
pub fn read(line: &str) -> Option<Seen> {
    // Most lines end here: cheap before clever.
    if line.len() > 2000 || !line.bytes().any(|b| b.is_ascii_digit()) {
        return None;
    }
    if let Some(bar) = bar(line) {
        return Some(bar);
    }
    let lower = line.to_ascii_lowercase();
    if !lower.contains("loss") {
        return None;
    }
    let values = values(&lower);
    if !values.keys().any(|name| name.ends_with("loss")) {
        return None;
    }
    if lower.trim_start().starts_with("{'") {
        return Some(Seen::Values(values));
    }
    let (step, total_steps) = step(&lower)?;
    let tokens = after_name(&lower, "consumed tokens").and_then(number).map(|n| n as u64);
    Some(Seen::Step(Progress { step, total_steps, tokens, values }))
}

/// `  5%|▌   | 25/500 [00:10<03:10, 2.50it/s]`, without a description: those with one count other things.
fn bar(line: &str) -> Option<Seen> {
    let (percent, rest) = line.trim_start().split_once("%|")?;
    percent.parse::<u8>().ok()?;
    let (_, counts) = rest.split_once('|')?;
    let (counts, _) = counts.split_once('[')?;
    let (done, total) = counts.trim().split_once('/')?;
    Some(Seen::Bar(done.parse().ok()?, total.parse().ok()?))
}

fn step(line: &str) -> Option<(u64, Option<u64>)> {
    STEPS.iter().find_map(|name| {
        let rest = after_name(line, name)?;
        let digits = rest.bytes().take_while(|b| b.is_ascii_digit() || *b == b',').count();
        let step = whole(&rest[..digits])?;
        let rest = rest[digits..].trim_start();
        let total = rest.strip_prefix('/').or_else(|| rest.strip_prefix("of ")).and_then(|rest| {
            let rest = rest.trim_start();
            let digits = rest.bytes().take_while(|b| b.is_ascii_digit() || *b == b',').count();
            whole(&rest[..digits])
        });
        Some((step, total))
    })
}

/// A whole number with or without thousands; a comma at its end is punctuation.
fn whole(text: &str) -> Option<u64> {
    text.trim_end_matches(',').replace(',', "").parse().ok()
}

fn values(line: &str) -> BTreeMap<String, Value> {
    let mut values = BTreeMap::new();
    for (spelling, name) in VALUES {
        if values.contains_key(name) {
            continue;
        }
        let Some(rest) = after_name(line, spelling) else { continue };
        if let Some(n) = number(rest) {
            let value = if n.is_finite() { Value::Number(n) } else { Value::Text(text_of(n).to_owned()) };
            values.insert(name.to_owned(), value);
        }
    }
    values
}

/// A number that JSON cannot hold, as text.
#[must_use]
pub fn text_of(n: f64) -> &'static str {
    match n {
        _ if n.is_nan() => "NaN",
        _ if n > 0.0 => "Infinity",
        _ => "-Infinity",
    }
}

/// What follows a name and its punctuation, if the name stands as a word of its own.
fn after_name<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = line[from..].find(name) {
        let start = from + at;
        let end = start + name.len();
        let apart = !line[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '/');
        // `val loss` is not `loss`, and `train loss` is found first.
        let other = name == "loss" && (line[..start].ends_with("val ") || line[..start].ends_with("eval "));
        let rest = line[end..].trim_start_matches(['\'', '"']);
        let value = rest.trim_start_matches([' ', ':', '=']);
        if apart && !other && value.len() < rest.len() {
            let value = value.trim_start_matches(['\'', '"']);
            if value.starts_with(|c: char| c.is_ascii_digit() || "-+.ni".contains(c)) {
                return Some(value);
            }
        }
        from = end;
    }
    None
}

/// The number at the start of a text, in any usual spelling; a percentage becomes a fraction.
fn number(text: &str) -> Option<f64> {
    for (spelling, value) in [("nan", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)] {
        if text.starts_with(spelling) {
            return Some(value);
        }
    }
    let bytes = text.as_bytes();
    let mut end = 0;
    while let Some(&b) = bytes.get(end) {
        let next_is_digit = bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        match b {
            b'0'..=b'9' => {}
            b'.' | b',' if next_is_digit => {}
            b'-' | b'+' if end == 0 || matches!(bytes[end - 1], b'e') => {}
            b'e' if end > 0 && (next_is_digit || matches!(bytes.get(end + 1), Some(b'-' | b'+'))) => {}
            _ => break,
        }
        end += 1;
    }
    let mut digits = text[..end].replace(',', "");
    if text[end..].starts_with('%') {
        // Exact, as a division by 100 would not be.
        digits.push_str("e-2");
    }
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: &str) {
        let got = match read(line) {
            None => "-".to_owned(),
            Some(Seen::Bar(step, total)) => format!("bar {step}/{total}"),
            Some(Seen::Values(values)) => render(&values),
            Some(Seen::Step(p)) => {
                let total = p.total_steps.map(|t| format!("/{t}")).unwrap_or_default();
                format!("{}{total} {}", p.step, render(&p.values))
            }
        };
        assert_eq!(got, expected, "{line}");
    }

    fn render(values: &BTreeMap<String, Value>) -> String {
        let show = |(name, value): (&String, &Value)| match value {
            Value::Number(n) => format!("{name}={n}"),
            Value::Text(t) => format!("{name}={t}"),
        };
        values.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn torchtitan() {
        check(
            "[rank0]:[titan] 2025-02-07 10:00:00,123 - root - INFO - step: 10  loss: 12.2721  grad_norm:  3.15  \
             memory: 40.43GiB(51.04%)  tps: 1,215  tflops: 7.04  mfu: 0.75%",
            "10 grad_norm=3.15 loss=12.2721 mfu=0.0075 tokens_per_second=1215",
        );
        check(
            "[rank0]:2024-06-03 19:50:01,520 - root - INFO - step:  1  loss: 10.9124  memory:  9.75GiB(12.31%)  wps: 3,218  mfu: 8.31%",
            "1 loss=10.9124 mfu=0.0831 tokens_per_second=3218",
        );
    }

    #[test]
    fn megatron() {
        check(
            " [2024-05-01 10:00:00] iteration       10/  500000 | consumed samples:         2560 | elapsed time per \
             iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.500000E-06 | \
             global batch size:   256 | lm loss: 1.082110E+01 | loss scale: 1.0 | grad norm: 5.126 | \
             number of skipped iterations:   0 | number of nan iterations:   0 |",
            "10/500000 grad_norm=5.126 learning_rate=0.0000015 loss=10.8211",
        );
        check(
            " iteration      100/    2000 | consumed samples: 800 | elapsed time per iteration (ms): 90.1 | \
             learning rate: 1.0E-04 | lm loss: nan | loss scale: 1.0 |",
            "100/2000 learning_rate=0.0001 loss=NaN",
        );
    }

    #[test]
    fn trainer() {
        check(
            "{'loss': 2.5613, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.01}",
            "epoch=0.01 grad_norm=1.2 learning_rate=0.000049 loss=2.5613",
        );
        check("{'loss': '0.41', 'grad_norm': '0.7', 'epoch': '1'}", "epoch=1 grad_norm=0.7 loss=0.41");
        check("{'eval_loss': 2.1, 'eval_runtime': 3.2, 'epoch': 1.0}", "epoch=1 eval_loss=2.1");
        check(" 10%|█         | 50/500 [00:10<01:30,  5.00it/s]", "bar 50/500");
        check("Map:  10%|█         | 50/500 [00:10<01:30,  5.00it/s]", "-");
    }

    #[test]
    fn plain_loops() {
        check("step 120/300 loss 2.31", "120/300 loss=2.31");
        check("iter 10: loss 3.2000, time 12.10ms, mfu 3.20%", "10 loss=3.2 mfu=0.032");
        check("step 0: train loss 4.2, val loss 4.4", "0 loss=4.2 val_loss=4.4");
        check("step=1,200 loss=0.5 lr=1e-3", "1200 learning_rate=0.001 loss=0.5");
        check(
            "step    12/19560 | loss 7.312345 (+1.2z)| norm 2.1 (+0.1z)| lr 1.0e-05 | 123.4 ms",
            "12/19560 learning_rate=0.00001 loss=7.312345",
        );
        check("Step 5 | loss: inf", "5 loss=Infinity");
    }

    #[test]
    fn other_lines_are_no_progress() {
        for line in [
            "loading step 5 of the pipeline",
            "using cross entropy loss",
            "loss function: mse, steps: 100",
            "step 4: saving checkpoint",
            "footstep 4 gloss 3",
            "100%|██████████| x/y [",
            "loss: 3.2",
            "",
            "ünïcödé 5 stép löss",
        ] {
            check(line, "-");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_read_without_a_fault(line in "(step|iter|loss|[ :=/%|'{,.0-9e+-]|\\PC){0,40}") {
            let _ = read(&line);
        }
    }
}
