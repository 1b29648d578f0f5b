//! Listing a folder of checkpoints.

use crate::checkpoints::{Node, RECENT_MS, Wanted, wanted};
use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Files and folders of a listing; a folder with more is not looked at.
pub(super) const MOST: usize = 20_000;

/// Folders within folders.
const DEPTH: usize = 6;

/// Bytes at the start of a file whose text is wanted.
const FIRST: usize = 4096;

/// Bytes at its end.
const LAST: usize = 64;

/// Everything below a folder but links; none if it cannot be read or holds too much. One that is not there is empty.
pub(super) fn list(folder: &Path) -> Option<Vec<Node>> {
    if matches!(fs::symlink_metadata(folder), Err(e) if e.kind() == std::io::ErrorKind::NotFound) {
        return Some(Vec::new());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let since = i64::try_from(now).unwrap_or(i64::MAX).saturating_sub(RECENT_MS * 1_000_000);
    let mut left = MOST;
    inside(folder, DEPTH, &mut left, since)
}

fn inside(folder: &Path, depth: usize, left: &mut usize, since: i64) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    for entry in fs::read_dir(folder).ok()?.flatten() {
        *left = left.checked_sub(1)?;
        // One that went away meanwhile is not there; a link is what it leads to, which is elsewhere.
        let Ok(metadata) = fs::symlink_metadata(entry.path()) else { continue };
        let Ok(name) = entry.file_name().into_string() else { continue };
        let mut node = node(name, &metadata);
        if metadata.is_dir() {
            let empty = || Some(Vec::new());
            node.inside = if depth > 0 && *left > 0 {
                inside(&entry.path(), depth - 1, left, since).or_else(empty)
            } else {
                empty()
            };
            if *left == 0 {
                return None;
            }
        } else if metadata.is_file() {
            node.size = metadata.len();
            node.text = match wanted(&node.name) {
                Some(Wanted::Both) => text(&entry.path(), FIRST),
                Some(Wanted::End) if node.modified >= since => text(&entry.path(), 0),
                Some(Wanted::End) | None => None,
            };
        } else {
            continue;
        }
        nodes.push(node);
    }
    nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Some(nodes)
}

fn node(name: String, metadata: &Metadata) -> Node {
    let time = |seconds: i64, nanoseconds: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
    Node {
        name,
        modified: time(metadata.mtime(), metadata.mtime_nsec()),
        changed: time(metadata.ctime(), metadata.ctime_nsec()),
        inode: metadata.ino(),
        ..Node::default()
    }
}

fn text(path: &Path, first: usize) -> Option<(Vec<u8>, Vec<u8>)> {
    let file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    Some((piece(&file, 0, first)?, piece(&file, length.saturating_sub(LAST as u64), LAST)?))
}

fn piece(file: &File, at: u64, most: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; most];
    let read = file.read_at(&mut bytes, at).ok()?;
    bytes.truncate(read);
    Some(bytes)
}
