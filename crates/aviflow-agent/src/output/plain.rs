//! Scripts that print a step and a loss in their own words, as nanoGPT, litgpt, llm.c, torchtune and MaxText do.
//!
//! ```text
//! iter 10: loss 3.2000, time 12.10ms, mfu 3.20%
//! step 250: train loss 2.1, val loss 2.3
//! Epoch 1 | iter 80 step 20 | loss train: 2.345, val: n/a | iter time: 123.45 ms (step) remaining time: 0:10:00
//! iter 80: val loss 2.3456, val time: 123.45 ms
//! step 120/300 loss 2.31 lr 1e-3 tokens/s 1200
//! Step 5 | loss:1.25 lr:0.0003 tokens_per_second_per_gpu:1234.5
//! completed step: 7, seconds: 1.234, TFLOP/s/device: 123.4, Tokens/s/device: 4567.8, total_weights: 65536, loss: 7.654
//! Epoch [2/5], Step [100/600], Loss: 0.2345
//! ```

use super::names::{Values, put};
use super::{Seen, scan};
use crate::protocol::Progress;

/// Spellings of a step's number; the first that is there counts, as `iter` may count micro-batches.
const STEPS: [&str; 4] = ["iteration", "global_step", "step", "iter"];

/// Spellings of values and their names; the first that is found wins.
const VALUES: [(&str, &str); 33] = [
    ("lm loss", "loss"),
    ("train loss", "loss"),
    ("training loss", "loss"),
    ("train_loss", "loss"),
    ("loss train", "loss"),
    ("loss", "loss"),
    ("val loss", "eval_loss"),
    ("val_loss", "eval_loss"),
    ("valid loss", "eval_loss"),
    ("validation loss", "eval_loss"),
    ("eval loss", "eval_loss"),
    ("eval_loss", "eval_loss"),
    ("grad norm", "grad_norm"),
    ("grad_norm", "grad_norm"),
    ("gnorm", "grad_norm"),
    ("| norm", "grad_norm"),
    ("learning rate", "learning_rate"),
    ("learning_rate", "learning_rate"),
    ("lr", "learning_rate"),
    ("tokens_per_second_per_gpu", "tokens_per_second_per_gpu"),
    ("tokens/s/device", "tokens_per_second_per_gpu"),
    ("tflop/s/device", "tflops_per_gpu"),
    ("tokens_per_second", "tokens_per_second"),
    ("tokens/s", "tokens_per_second"),
    ("tokens/sec", "tokens_per_second"),
    ("tok/s", "tokens_per_second"),
    ("tok/sec", "tokens_per_second"),
    ("tps", "tokens_per_second"),
    ("wps", "tokens_per_second"),
    ("samples/s", "samples_per_second"),
    ("samples_per_second", "samples_per_second"),
    ("mfu", "mfu"),
    ("epoch", "epoch"),
];

/// Spellings of the time of a step.
const TIMES: [&str; 5] = ["iter time", "step time", "step_time", "time", "dt"];

/// Reads a line in lower case.
pub(super) fn read(line: &str) -> Option<Seen> {
    let mut values = Values::new();
    for (spelling, name) in VALUES {
        if values.contains_key(name) {
            continue;
        }
        if let Some(n) = scan::value(line, spelling) {
            // A utilization below 0 says that there is none yet.
            if name != "mfu" || n >= 0.0 {
                put(&mut values, name, n);
            }
        }
    }
    let step = STEPS.iter().find_map(|name| scan::count(line, name));
    let both = values.contains_key("loss") && values.contains_key("eval_loss");
    let estimate = both && line.trim_start().starts_with("step ") && line.contains(": train loss ");
    if estimate || held_out(line) && !both {
        // Of nanoGPT: an estimate over many batches, before the step is done.
        let loss = values.remove("loss");
        if let Some(loss) = loss.filter(|_| !estimate) {
            values.entry("eval_loss".to_owned()).or_insert(loss);
        }
    }
    if !values.contains_key("loss") {
        values.retain(|name, _| name == "eval_loss");
        // litgpt counts micro-batches there.
        let step = step.filter(|_| !line.contains("val time")).map(|(step, _)| step);
        return (!values.is_empty()).then_some(Seen::Evaluation(step, values));
    }
    let (mut step, mut total_steps) = step?;
    let time = || TIMES.iter().find_map(|name| scan::after(line, name).and_then(milliseconds));
    // MaxText says the unit alone.
    let seconds = || scan::value(line, "seconds").filter(|_| line.contains("completed step")).map(|s| s * 1000.0);
    if let Some(ms) = time().or_else(seconds) {
        put(&mut values, "iteration_ms", ms);
    }
    if let (Some((epoch, Some(epochs))), Some(steps)) = (scan::count(line, "epoch"), total_steps) {
        // Steps that begin anew in each epoch, of which the first is 1 where the last is how many there are.
        values.remove("epoch");
        if (1..=epochs).contains(&epoch) && step <= steps {
            step = step.saturating_add((epoch - 1).saturating_mul(steps));
            total_steps = Some(steps.saturating_mul(epochs));
        }
    }
    Some(Seen::Step(Progress { step, total_steps, tokens: None, values }))
}

/// Whether a line says, before its loss, that it is about data that is held out. A part of a longer word, such as a
/// job's name, does not say so.
fn held_out(line: &str) -> bool {
    let Some(loss) = line.find("loss") else { return false };
    let mut words = line[..loss].split(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '/' | '-' | '.'));
    words.any(|word| word != "dev" && scan::HELD_OUT.contains(&word))
}

/// `12.10ms`, `123 ms`, `1.5s`: none without a unit, as it may be anything.
fn milliseconds(text: &str) -> Option<f64> {
    let number = scan::number(text)?;
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || ".,e+-".contains(c)).trim_start();
    let word = unit.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    match word {
        "ms" => Some(number),
        "s" | "sec" | "secs" | "seconds" => Some(number * 1000.0),
        _ => None,
    }
}
