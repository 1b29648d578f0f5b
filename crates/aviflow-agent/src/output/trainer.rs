//! The Trainer of transformers and what is built on it (TRL, LLaMA-Factory): dictionaries, and the bar of tqdm.
//!
//! ```text
//!  10%|█         | 50/500 [00:10<01:30,  5.00it/s]
//! {'loss': 2.5613, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.01}
//! {'eval_loss': 2.1, 'eval_runtime': 3.2, 'epoch': 1.0}
//! {'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_loss': 2.1, 'epoch': 1.0}
//! [INFO|2026-01-01 10:00:00] llamafactory.train.callbacks:143 >> {'loss': 0.5, 'learning_rate': 4.9e-05, …}
//! ```
//!
//! The dictionaries name no step: it is the bar's, which [`crate::training`] puts together. Newer versions write
//! numbers as text. The last of these lines of a run, with `train_runtime`, has averages over the whole of it and is
//! no step.

use super::names::{self, Values, put};
use super::{Seen, scan};
use crate::protocol::Progress;

/// `  5%|▌   | 25/500 [00:10<03:10, 2.50it/s]`, without a description: those with one count other things.
pub(super) fn bar(line: &str) -> Option<Seen> {
    let (percent, rest) = line.trim_start().split_once("%|")?;
    percent.parse::<u8>().ok()?;
    let (_, counts) = rest.split_once('|')?;
    let (counts, _) = counts.split_once('[')?;
    let (done, total) = counts.trim().split_once('/')?;
    Some(Seen::Bar(done.parse().ok()?, total.parse().ok()?))
}

/// Reads a dictionary that a line ends with.
pub(super) fn read(line: &str) -> Option<Seen> {
    let line = line.trim();
    let at = line.find("{'")?;
    // At the start, after a logger's `>> `, or after a bar on the same line.
    if at > 0 && !line[..at].ends_with(' ') && !line[..at].ends_with(']') {
        return None;
    }
    let inner = line[at + 1..].strip_suffix('}')?;
    let mut values = Values::new();
    let (mut step, mut tokens, mut evaluated, mut loss) = (None, None, false, false);
    for (key, number) in pairs(inner) {
        match key {
            "train_runtime" => return None,
            "step" | "global_step" => step = whole(number),
            "throughput" => put(&mut values, "tokens_per_second", number),
            _ if names::TOKEN_KEYS.contains(&key) => tokens = whole(number),
            _ => {
                evaluated |= key.starts_with("eval_");
                loss |= key == "loss";
                if let Some((name, number)) = names::named(key, number) {
                    put(&mut values, name, number);
                }
            }
        }
    }
    match (loss, evaluated, step) {
        (true, _, Some(step)) => Some(Seen::Step(Progress { step, total_steps: None, tokens, values })),
        (true, ..) => Some(Seen::Values(tokens, values)),
        (false, true, step) if values.contains_key("eval_loss") => Some(Seen::Evaluation(step, values)),
        _ => None,
    }
}

/// The numbers of `'key': value, 'key': 'value'`.
fn pairs(mut inner: &str) -> impl Iterator<Item = (&str, f64)> {
    std::iter::from_fn(move || {
        loop {
            inner = &inner[inner.find('\'')? + 1..];
            let (key, rest) = inner.split_once('\'')?;
            inner = rest;
            let Some(value) = rest.strip_prefix(':').map(str::trim_start) else { continue };
            let end = value.find(", '").unwrap_or(value.len());
            // The quote that ends a text is not taken for the one that begins the next key.
            inner = &value[end..];
            let value = value[..end].trim_matches('\'');
            if let Some(number) = scan::number(value) {
                return Some((key, number));
            }
        }
    })
}

/// A number as a count.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
pub(super) fn whole(number: f64) -> Option<u64> {
    (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64)
}
