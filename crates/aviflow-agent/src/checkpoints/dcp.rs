//! Checkpoints of `torch.distributed.checkpoint`: a folder with a step in its name, in which (or in whose folders)
//! ranks write `__RANK_N.distcp` and the coordinator, once all have, `.metadata`.
//!
//! `filesystem.py`, `finish`: the metadata is written to `.metadata.tmp`, synced, and renamed; versions before 2.3
//! wrote it in place, so that its last byte must be the one that ends a pickle. Where a folder is written again, the
//! metadata of before is there until then, and is older than the parts.

use super::{Found, Node, SETTLE_MS, State, all, name};

/// Written last.
pub(super) const METADATA: &str = ".metadata";

/// Clocks of nodes that write to one file system may differ by so much, in nanoseconds: some keep the writer's time.
const SKEW_NS: i64 = 2_000_000_000;

/// The end of a pickle.
const STOP: u8 = b'.';

pub(super) fn read(node: &Node) -> Option<Found> {
    node.inside.as_ref()?;
    let mut states = Vec::new();
    all(node, &mut |folder| states.extend(folder.inside.as_ref().and_then(|inside| of_folder(inside))));
    if states.is_empty() {
        return None;
    }
    let step = name::step(&node.name)?;
    let partial = name::is_temporary(&node.name) || states.contains(&State::Partial);
    let settling = states.iter().find(|state| matches!(state, State::Settling(_)));
    let state = if partial { State::Partial } else { *settling.unwrap_or(&State::Complete) };
    Some(Found { step, state })
}

/// How far one folder is; none if it is no such checkpoint.
fn of_folder(inside: &[Node]) -> Option<State> {
    let parts = || inside.iter().filter(|file| file.name.ends_with(".distcp"));
    let begun = inside.iter().any(|file| file.name == ".metadata.tmp");
    let metadata = inside.iter().find(|file| file.name == METADATA);
    let Some(metadata) = metadata.filter(|_| !begun) else {
        return (begun || parts().next().is_some()).then_some(State::Partial);
    };
    let whole = metadata.text.as_ref().is_some_and(|(_, last)| last.last() == Some(&STOP));
    let newest = parts().map(|part| part.modified).max().unwrap_or(i64::MIN);
    Some(if !whole || newest > metadata.modified.saturating_add(SKEW_NS) {
        State::Partial
    } else if newest > metadata.modified {
        State::Settling(SETTLE_MS)
    } else {
        State::Complete
    })
}
