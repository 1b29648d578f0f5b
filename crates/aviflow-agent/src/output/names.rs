//! One name for each value, whatever a tool calls it, and one unit. Pure.
//!
//! | name | what, and its unit |
//! |---|---|
//! | `loss` | of the training, at this step or averaged since the last report |
//! | `eval_loss` | on data that is held out |
//! | `learning_rate` | of the first parameter group |
//! | `grad_norm` | norm of the whole gradient before it is clipped |
//! | `tokens_per_second` | of the whole job |
//! | `tokens_per_second_per_gpu` | of one GPU, as torchtitan has it; [`crate::training`] derives the former from it |
//! | `samples_per_second` | of the whole job |
//! | `iteration_ms` | time of a step, in milliseconds |
//! | `mfu` | model FLOPs utilization, as a fraction |
//! | `tflops_per_gpu` | model TFLOP/s of one GPU |
//! | `memory_gib` | memory that the allocator reserves on a GPU, in GiB |
//! | `epoch` | passes over the data, with fractions |
//! | `skipped_iterations`, `nan_iterations` | of Megatron, since its last report |

use crate::protocol::Value;
use std::collections::BTreeMap;

/// Named values of a step.
pub type Values = BTreeMap<String, Value>;

/// Spellings in keys of JSON, of Python's dictionaries and in tags of event files; the name, and a factor into its
/// unit. A key is compared in lower case and without a leading `train/`, `training/` or `metrics/`.
///
/// Sources: torchtitan `components/metrics.py`, Megatron-LM `training/training.py`, NeMo's and litgpt's loggers,
/// transformers `trainer.py`, LLaMA-Factory `train/callbacks.py`, and the hooks of this project.
const KEYS: &[(&str, &str, f64)] = &[
    ("loss", "loss", 1.0),
    ("train_loss", "loss", 1.0),
    ("training_loss", "loss", 1.0),
    ("train loss", "loss", 1.0),
    ("lm loss", "loss", 1.0),
    ("lm-loss", "loss", 1.0),
    ("reduced_train_loss", "loss", 1.0),
    ("loss/train", "loss", 1.0),
    ("loss_metrics/global_avg_loss", "loss", 1.0),
    ("eval_loss", "eval_loss", 1.0),
    ("eval/loss", "eval_loss", 1.0),
    ("val_loss", "eval_loss", 1.0),
    ("val/loss", "eval_loss", 1.0),
    ("valid_loss", "eval_loss", 1.0),
    ("valid/loss", "eval_loss", 1.0),
    ("validation_loss", "eval_loss", 1.0),
    ("validation/loss", "eval_loss", 1.0),
    ("validation_metrics/loss", "eval_loss", 1.0),
    ("lm loss validation", "eval_loss", 1.0),
    ("loss/val", "eval_loss", 1.0),
    ("learning_rate", "learning_rate", 1.0),
    ("learning-rate", "learning_rate", 1.0),
    ("learning rate", "learning_rate", 1.0),
    ("lr", "learning_rate", 1.0),
    ("grad_norm", "grad_norm", 1.0),
    ("grad-norm", "grad_norm", 1.0),
    ("grad norm", "grad_norm", 1.0),
    ("gradient_norm", "grad_norm", 1.0),
    ("global_grad_norm", "grad_norm", 1.0),
    ("gnorm", "grad_norm", 1.0),
    ("tokens_per_second", "tokens_per_second", 1.0),
    ("tokens_per_sec", "tokens_per_second", 1.0),
    ("tokens/s", "tokens_per_second", 1.0),
    ("tokens/sec", "tokens_per_second", 1.0),
    ("tok/s", "tokens_per_second", 1.0),
    ("tokens_per_second_per_gpu", "tokens_per_second_per_gpu", 1.0),
    ("throughput(tps)", "tokens_per_second_per_gpu", 1.0),
    ("tps", "tokens_per_second", 1.0),
    ("wps", "tokens_per_second", 1.0),
    ("samples_per_second", "samples_per_second", 1.0),
    ("samples_per_sec", "samples_per_second", 1.0),
    ("samples/s", "samples_per_second", 1.0),
    ("iteration_ms", "iteration_ms", 1.0),
    ("step_time_ms", "iteration_ms", 1.0),
    ("iter_time_ms", "iteration_ms", 1.0),
    ("time_ms", "iteration_ms", 1.0),
    ("step_time", "iteration_ms", 1000.0),
    ("iter_time", "iteration_ms", 1000.0),
    ("iteration-time", "iteration_ms", 1000.0),
    ("train_step_timing in s", "iteration_ms", 1000.0),
    ("time_metrics/end_to_end(s)", "iteration_ms", 1000.0),
    ("mfu", "mfu", 1.0),
    ("mfu(%)", "mfu", 0.01),
    ("mfu_pct", "mfu", 0.01),
    ("tflops", "tflops_per_gpu", 1.0),
    ("tflops_per_gpu", "tflops_per_gpu", 1.0),
    ("memory_gib", "memory_gib", 1.0),
    ("memory/max_reserved(gib)", "memory_gib", 1.0),
    ("vram_reserved", "memory_gib", 1.0),
    ("mem-reserved-bytes", "memory_gib", 1.0 / (1u64 << 30) as f64),
    ("epoch", "epoch", 1.0),
];

/// Keys of a step's number, of which the first that is there counts.
pub const STEP_KEYS: [&str; 7] =
    ["global_step", "step", "current_steps", "iteration", "iter", "train/global_step", "trainer/global_step"];

/// Keys of how many steps there will be.
pub const TOTAL_KEYS: [&str; 4] = ["total_steps", "max_steps", "train_iters", "max_iters"];

/// Keys of the tokens that the training has seen so far.
pub const TOKEN_KEYS: [&str; 5] = ["tokens", "total_tokens", "num_tokens", "num_input_tokens_seen", "consumed_tokens"];

/// The longest key that is looked at, in bytes.
const LONGEST: usize = 64;

/// The platform's name of a key's value and the value in its unit; none if the key is not known.
#[must_use]
pub fn named(key: &str, value: f64) -> Option<(&'static str, f64)> {
    if key.len() > LONGEST {
        return None;
    }
    let lower = key.to_ascii_lowercase();
    let bare = ["train/", "training/", "metrics/"].iter().find_map(|prefix| lower.strip_prefix(prefix));
    // The average over a whole run, which transformers writes at its end.
    if lower == "train/train_loss" {
        return None;
    }
    let bare = bare.unwrap_or(&lower);
    let (_, name, factor) = KEYS.iter().find(|(spelling, ..)| *spelling == bare)?;
    let value = value * factor;
    // No utilization is above 1: such a number is a percentage.
    let value = if *name == "mfu" && value > 1.0 { value / 100.0 } else { value };
    // A rate of nothing yet: nanoGPT begins with -1.
    (*name != "mfu" || value >= 0.0).then_some((name, value))
}

/// Adds a value under its name.
pub fn put(values: &mut Values, name: &str, number: f64) {
    let value = if number.is_finite() { Value::Number(number) } else { Value::Text(text_of(number).to_owned()) };
    values.insert(name.to_owned(), value);
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
