//! Checkpoints that are written under a temporary name and renamed, as good scripts, Orbax and others do.
//!
//! That a file or folder was renamed after its last write shows in two ways: it was seen under the other name; or its
//! status changed after its content, which a rename does and a write does not (both times are the same then).
//! A file that is written in place shows neither and is none.

use super::{Around, Found, Node, SETTLE_MS, State, all, name};

/// How files of weights end; folders may have any name with a step.
const FILES: [&str; 9] = [".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".msgpack", ".tar", ".pkl"];

pub(super) fn read(node: &Node, around: &Around<'_>) -> Option<Found> {
    let temporary = name::is_temporary(&node.name);
    let lower = node.name.to_ascii_lowercase();
    let like =
        node.inside.is_some() || FILES.iter().any(|end| lower.ends_with(end) || temporary && lower.contains(end));
    if !like {
        return None;
    }
    let step = name::step(&node.name)?;
    if temporary {
        return Some(Found { step, state: State::Partial });
    }
    let (mut newest, mut bytes) = (node.modified, 0);
    all(node, &mut |inside| {
        newest = newest.max(inside.modified);
        bytes += inside.size;
    });
    let renamed = around.renamed.contains(&node.inode) || node.changed > node.modified;
    (renamed && bytes > 0 && newest <= node.changed).then_some(Found { step, state: State::Settling(SETTLE_MS) })
}
