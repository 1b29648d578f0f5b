//! torchtitan, `components/metrics.py`: `MetricsProcessor.log` and `log_validation`, and forge's console line.
//!
//! ```text
//! step:  1  loss: 12.27  grad_norm: 3.15  memory: 40.43GiB(51.04%)  tps: 1,215  tflops: 7.04  mfu: 0.75%
//! validate step: 10  loss: 11.1  memory: 40.43GiB(51.04%)  tps: 1,215
//! ```
//!
//! Versions of 2024 said `wps` for `tps`. Both are tokens a second and GPU; `mfu` is `N/A` under quantization.

use super::names::{Values, put};
use super::{Seen, scan};
use crate::protocol::Progress;

/// Whether a line in lower case is of this kind.
pub(super) fn is_of(line: &str) -> bool {
    line.contains("loss:") && (line.contains("tps:") || line.contains("wps:"))
}

/// Reads a line in lower case.
pub(super) fn read(line: &str) -> Option<Seen> {
    let (step, _) = scan::count(line, "step")?;
    let loss = scan::value(line, "loss")?;
    // A stage of a pipeline that is not the last has none.
    if loss == -1.0 {
        return None;
    }
    let mut values = Values::new();
    if line.contains("validate step:") {
        put(&mut values, "eval_loss", loss);
        return Some(Seen::Evaluation(Some(step), values));
    }
    put(&mut values, "loss", loss);
    for (spelling, name) in [
        ("grad_norm", "grad_norm"),
        ("memory", "memory_gib"),
        ("tps", "tokens_per_second_per_gpu"),
        ("wps", "tokens_per_second_per_gpu"),
        ("tflops", "tflops_per_gpu"),
        ("mfu", "mfu"),
    ] {
        if let Some(n) = scan::value(line, spelling) {
            put(&mut values, name, n);
        }
    }
    Some(Seen::Step(Progress { step, total_steps: None, tokens: None, values }))
}
