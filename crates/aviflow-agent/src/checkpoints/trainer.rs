//! Checkpoints of transformers' Trainer: `checkpoint-500/`.
//!
//! The main process writes weights, then optimizer, scheduler and its random state, then `trainer_state.json`; the
//! other processes write their random states meanwhile, and nobody waits for them (`trainer.py`, `_save_checkpoint`).
//! Some versions write to `tmp-checkpoint-500` and rename. Resuming reads all of these, so that half a random state
//! would break it: the folder must have settled, and for longer while some processes have not written theirs.

use super::{Around, DOUBT_MS, Found, Node, SETTLE_MS, State};

/// Written last by the main process.
pub(super) const STATE: &str = "trainer_state.json";

pub(super) fn read(node: &Node, around: &Around<'_>) -> Option<Found> {
    let inside = node.inside.as_ref()?;
    let (temporary, digits) = match node.name.strip_prefix("tmp-checkpoint-") {
        Some(digits) => (true, digits),
        None => (false, node.name.strip_prefix("checkpoint-")?),
    };
    let step: u64 = digits.parse().ok()?;
    let weights = inside.iter().any(is_weights);
    let state = inside.iter().find(|file| file.name == STATE);
    // Others call their folders so, too.
    if !weights && state.is_none() && !temporary && !inside.is_empty() {
        return None;
    }
    let whole = state.is_some_and(|file| is_whole(file, step));
    // One for each process; a job of one process has `rng_state.pth` instead.
    let random: Vec<&Node> = inside.iter().filter(|file| is_random_state(&file.name)).collect();
    let whole = whole && random.iter().all(|file| file.is_whole_archive());
    let all = random.is_empty() || random.len() == around.gpus as usize;
    let state = match whole && weights && !temporary {
        true if all => State::Settling(SETTLE_MS),
        true => State::Settling(DOUBT_MS),
        false => State::Partial,
    };
    Some(Found { step, state })
}

/// The random state of one of several processes.
pub(super) fn is_random_state(name: &str) -> bool {
    name.starts_with("rng_state_") && name.ends_with(".pth")
}

fn is_weights(node: &Node) -> bool {
    let name = node.name.as_str();
    let model = ["model", "pytorch_model", "adapter_model", "consolidated"].iter().any(|p| name.starts_with(p));
    let file = node.size > 0 && [".safetensors", ".bin", ".pt", ".pth", ".msgpack"].iter().any(|s| name.ends_with(s));
    // Of FSDP and of DeepSpeed, whose savers return when all ranks have written.
    let folder = node.inside.is_some() && (name.starts_with("pytorch_model_fsdp") || name.starts_with("global_step"));
    model && file || folder
}

/// Whether the JSON, which has sorted keys and is indented, names the step and is there up to its last bracket.
fn is_whole(file: &Node, step: u64) -> bool {
    let Some((first, last)) = &file.text else { return false };
    let key = format!("\"global_step\": {step},");
    first.windows(key.len()).any(|window| window == key.as_bytes()) && last.ends_with(b"\n}\n")
}
