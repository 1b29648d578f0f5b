//! Megatron's checkpoints, of every format: `iter_0000100/` beside `latest_checkpointed_iteration.txt`.
//!
//! `training/checkpointing.py` writes the tracker after a barrier that follows the last byte of all ranks, or, where
//! it saves in the background, when all have finished; its loader believes the tracker, and so does this.

use super::{Around, Found, Node, State};

/// The file that names the latest complete iteration.
pub(super) const TRACKER: &str = "latest_checkpointed_iteration.txt";

pub(super) fn read(node: &Node, around: &Around<'_>) -> Option<Found> {
    let digits = node.name.strip_prefix("iter_").filter(|rest| rest.len() >= 7)?;
    let step: u64 = digits.parse().ok()?;
    node.inside.as_ref()?;
    let text = around.sibling(TRACKER).and_then(|tracker| tracker.text.as_ref());
    let latest: Option<u64> = text.and_then(|(text, _)| std::str::from_utf8(text).ok()?.trim().parse().ok());
    let state = match latest {
        Some(latest) if latest == step => State::Complete,
        Some(latest) if latest > step => State::Superseded,
        Some(_) | None => State::Partial,
    };
    Some(Found { step, state })
}
