//! Listing a folder of checkpoints.

use crate::checkpoints::{Node, RECENT_MS, Wanted, wanted};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
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

/// A folder that file systems keep for themselves, and let nobody else read.
const LOST: &str = "lost+found";

/// Everything below a folder but links; none if it cannot be looked at wholly now, or holds too much. One that is not
/// there is empty.
///
/// Half of what is there would be worse than nothing: what a passing error hides would seem to be gone, and then new.
pub(super) fn list(folder: &Path) -> Option<Vec<Node>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let since = i64::try_from(now).unwrap_or(i64::MAX).saturating_sub(RECENT_MS * 1_000_000);
    let mut left = MOST;
    there(inside(folder, DEPTH, &mut left, since)).ok().map(Option::unwrap_or_default)
}

/// What was read, or that it is not there; it may have gone since it was listed.
fn there<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn inside(folder: &Path, depth: usize, left: &mut usize, since: i64) -> io::Result<Vec<Node>> {
    let mut nodes = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        *left = left.checked_sub(1).ok_or(ErrorKind::FileTooLarge)?;
        // A link is what it leads to, which is elsewhere.
        let Some(metadata) = there(fs::symlink_metadata(entry.path()))? else { continue };
        let Ok(name) = entry.file_name().into_string() else { continue };
        let mut node = node(name, &metadata);
        if metadata.is_dir() {
            let looks = depth > 0 && node.name != LOST;
            let Some(nodes) =
                (if looks { there(inside(&entry.path(), depth - 1, left, since))? } else { Some(vec![]) })
            else {
                continue;
            };
            node.inside = Some(nodes);
        } else if metadata.is_file() {
            node.size = metadata.len();
            let first = match wanted(&node.name) {
                Some(Wanted::Both) => Some(FIRST),
                Some(Wanted::End) if node.modified >= since => Some(0),
                Some(Wanted::End) | None => None,
            };
            if let Some(first) = first {
                let Some(text) = there(text(&entry.path(), first))? else { continue };
                node.text = Some(text);
            }
        } else {
            continue;
        }
        nodes.push(node);
    }
    nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(nodes)
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

fn text(path: &Path, first: usize) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    Ok((piece(&file, 0, first)?, piece(&file, length.saturating_sub(LAST as u64), LAST)?))
}

fn piece(file: &File, at: u64, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let read = file.read_at(&mut bytes, at)?;
    bytes.truncate(read);
    Ok(bytes)
}
