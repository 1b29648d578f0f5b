//! DeepSpeed's checkpoints: `global_step100/` or another tag, beside `latest`, which names the newest.
//!
//! `runtime/engine.py`, `save_checkpoint`: each rank writes its parts, and rank 0 writes `latest` after its own
//! without waiting for the others. So `latest` alone says little: every rank's part of the optimizer must be there, each
//! up to its end, and the folder must have settled.

use super::{Around, DOUBT_MS, Found, Node, SETTLE_MS, State, name};
use std::collections::BTreeMap;

/// The file that names the newest checkpoint.
pub(super) const LATEST: &str = "latest";

pub(super) fn read(node: &Node, around: &Around<'_>) -> Option<Found> {
    let inside = node.inside.as_ref()?;
    if !inside.iter().any(|file| is_part(&file.name)) && !node.name.starts_with("global_step") {
        return None;
    }
    let step = name::step(&node.name)?;
    let latest = around.sibling(LATEST).and_then(|latest| latest.text.as_ref());
    let latest = latest.and_then(|(text, _)| std::str::from_utf8(text).ok()).map(str::trim);
    let state = match latest {
        Some(latest) if latest == node.name => parts(inside, around.gpus),
        Some(latest) if name::step(latest).is_some_and(|latest| latest > step) => State::Superseded,
        Some(_) | None => State::Partial,
    };
    Some(Found { step, state })
}

pub(super) fn is_part(name: &str) -> bool {
    name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt")
}

/// How far the parts are: for each part of the model those of all ranks that share it, from 0 on without a gap.
fn parts(inside: &[Node], gpus: u32) -> State {
    let mut ranks: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut models = false;
    for file in inside.iter().filter(|file| is_part(&file.name)) {
        // Whoever writes it may have died in the midst of it.
        if !file.is_whole_archive() {
            return State::Partial;
        }
        models |= file.name.ends_with("_model_states.pt");
        if file.name.ends_with("_optim_states.pt")
            && let Some(rank) = number(&file.name, "pp_rank_")
        {
            ranks.entry(number(&file.name, "mp_rank_").unwrap_or(0)).or_default().push(rank);
        }
    }
    let mut counts = ranks.values_mut().map(|ranks| {
        ranks.sort_unstable();
        (0..).zip(ranks.iter()).all(|(n, rank)| n == *rank).then_some(ranks.len())
    });
    let first = counts.next().unwrap_or(Some(0));
    let even = first.is_some() && counts.all(|count| count == first);
    let parts = first.unwrap_or(0) * ranks.len();
    match (models && even, parts, gpus as usize) {
        (false, ..) => State::Partial,
        // Without partitions of the optimizer, the first rank of each part of the model writes it. How many parts there
        // are does not show.
        (true, 0, gpus) => State::Settling(if gpus == 1 { SETTLE_MS } else { DOUBT_MS }),
        (true, _, 0) => State::Settling(DOUBT_MS),
        (true, parts, gpus) if parts == gpus => State::Settling(SETTLE_MS),
        (true, ..) => State::Partial,
    }
}

fn number(name: &str, after: &str) -> Option<u32> {
    let rest = &name[name.find(after)? + after.len()..];
    rest[..rest.bytes().take_while(u8::is_ascii_digit).count()].parse().ok()
}
