//! Megatron-LM (`training/training.py`: `training_log`, `evaluate_and_print_results`), Megatron-Bridge, which has the
//! same line, Megatron-DeepSpeed, which adds tokens, and NeMo 2 (`MegatronProgressPrinter`).
//!
//! ```text
//!  [2026-01-01 10:00:00.123] iteration       10/    500 | consumed samples: 2560 | elapsed time per iteration (ms): …
//!  validation loss at iteration 1000 on validation set | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 |
//! Training epoch 0, iteration 28/99 | lr: 5.6e-06 | global_step: 28 | reduced_train_loss: 2.778 | …
//! ```

use super::names::{Values, put};
use super::{Seen, scan};
use crate::protocol::Progress;

/// Whether a line in lower case is of this kind.
pub(super) fn is_of(line: &str) -> bool {
    line.contains('|') && (is_evaluation(line) || [ITERATION, NEMO].iter().any(|mark| line.contains(mark)))
}

const ITERATION: &str = "elapsed time per iteration";
const NEMO: &str = "reduced_train_loss";

fn is_evaluation(line: &str) -> bool {
    line.contains("loss at ") && line.contains(" value")
}

/// Reads a line in lower case.
pub(super) fn read(line: &str) -> Option<Seen> {
    match () {
        () if line.contains(ITERATION) => iteration(line),
        () if line.contains(NEMO) => nemo(line),
        () => evaluation(line),
    }
}

/// A line counts also without a loss: an iteration whose loss is not a number has none in some versions.
fn iteration(line: &str) -> Option<Seen> {
    let (step, total_steps) = scan::count(line, "iteration")?;
    let mut values = Values::new();
    for (spelling, name) in [
        ("loss", "loss"),
        ("lm loss", "loss"),
        ("learning rate", "learning_rate"),
        ("grad norm", "grad_norm"),
        ("elapsed time per iteration (ms)", "iteration_ms"),
        ("tflops", "tflops_per_gpu"),
        ("throughput per gpu (tflop/s/gpu)", "tflops_per_gpu"),
    ] {
        if let Some(n) = scan::value(line, spelling) {
            put(&mut values, name, n);
        }
    }
    for (spelling, name) in
        [("number of skipped iterations", "skipped_iterations"), ("number of nan iterations", "nan_iterations")]
    {
        if let Some(n) = scan::value(line, spelling).filter(|n| *n > 0.0) {
            put(&mut values, name, n);
        }
    }
    let time = scan::value(line, "elapsed time per iteration (ms)").filter(|ms| *ms > 0.0);
    if let (Some(samples), Some(ms)) = (scan::value(line, "global batch size"), time) {
        put(&mut values, "samples_per_second", samples * 1000.0 / ms);
    }
    let tokens = scan::count(line, "consumed tokens").map(|(tokens, _)| tokens);
    Some(Seen::Step(Progress { step, total_steps, tokens, values }))
}

/// The loss of the validation set; the test set's is no part of the training.
fn evaluation(line: &str) -> Option<Seen> {
    if line.contains("test set") || line.contains("test data") {
        return None;
    }
    let loss = scan::value(line, "loss value")?;
    let mut values = Values::new();
    put(&mut values, "eval_loss", loss);
    Some(Seen::Evaluation(scan::count(line, "iteration").map(|(step, _)| step), values))
}

/// Its `iteration` counts within an epoch, so that only `global_step` is the step.
fn nemo(line: &str) -> Option<Seen> {
    let (step, _) = scan::count(line, "global_step")?;
    let mut values = Values::new();
    put(&mut values, "loss", scan::value(line, "reduced_train_loss")?);
    for (spelling, name) in [("lr", "learning_rate"), ("grad_norm", "grad_norm"), ("val_loss", "eval_loss")] {
        if let Some(n) = scan::value(line, spelling) {
            put(&mut values, name, n);
        }
    }
    if let Some(seconds) = scan::value(line, "train_step_timing in s").filter(|s| *s > 0.0) {
        put(&mut values, "iteration_ms", seconds * 1000.0);
        if let Some(samples) = scan::value(line, "global_batch_size") {
            put(&mut values, "samples_per_second", samples / seconds);
        }
    }
    Some(Seen::Step(Progress { step, total_steps: None, tokens: None, values }))
}
