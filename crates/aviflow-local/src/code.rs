//! Unpacks a code snapshot, or a layer of packages, into a worker's folder.
//!
//! An archive may come from anybody who may submit, so nothing of it leaves the
//! folder. Invariants: every parent of an entry is a real folder that was made
//! here; a link points, by leading `..` only, at most as far up as its own depth,
//! so that following links from inside never leads outside.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use tar::EntryType;

/// Unpacks the archive, which is an uncompressed tar, into a new folder; `what` names it where something is wrong.
///
/// # Errors
/// With a sentence about the archive, the entry that it refuses, or the disk.
pub fn unpack(what: &str, archive: &Path, folder: &Path) -> Result<(), String> {
    let file = fs::File::open(archive).map_err(|e| format!("the {what} cannot be read: {e}"))?;
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(128 << 10, file));
    fs::create_dir(folder).map_err(|e| cannot_write(folder, &e))?;
    let mut folders = HashSet::from([PathBuf::new()]);
    let broken = |e: io::Error| format!("the {what} is damaged: {e}; submit the job again");
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let named = entry.path().map_err(broken)?.into_owned();
        let refuse = |why: &str| format!("the {what} is refused: `{}` {why}", named.display());
        let path = inside(&named).ok_or_else(|| refuse("would be written outside of its folder"))?;
        let kind = entry.header().entry_type();
        if path.as_os_str().is_empty() {
            continue;
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        make_folders(folder, parent, &mut folders).map_err(|e| cannot_write(&folder.join(parent), &e))?;
        let target = folder.join(&path);
        match kind {
            EntryType::Directory => {
                make_folders(folder, &path, &mut folders).map_err(|e| cannot_write(&target, &e))?;
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let executable = entry.header().mode().map_err(broken)? & 0o111 != 0;
                let mode = if executable { 0o755 } else { 0o644 };
                // Exclusive creation neither follows a link nor writes over an entry of the same name.
                let open = OpenOptions::new().write(true).create_new(true).mode(mode).open(&target);
                let mut file = open.map_err(|e| cannot_write(&target, &e))?;
                io::copy(&mut entry, &mut file).map_err(|e| cannot_write(&target, &e))?;
                if executable {
                    file.set_permissions(fs::Permissions::from_mode(mode)).map_err(|e| cannot_write(&target, &e))?;
                }
            }
            EntryType::Symlink => {
                let to = entry.link_name().map_err(broken)?.ok_or_else(|| refuse("is a link to nothing"))?;
                if !link_stays_inside(parent, &to) {
                    return Err(refuse(&format!("is a link out of its folder, to `{}`", to.display())));
                }
                std::os::unix::fs::symlink(&to, &target).map_err(|e| cannot_write(&target, &e))?;
            }
            EntryType::XGlobalHeader => {}
            _ => return Err(refuse("is neither a file, a folder nor a symbolic link")),
        }
    }
    Ok(())
}

fn cannot_write(path: &Path, error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free some space on the disk",
        _ => "",
    };
    format!("{} cannot be written: {error}{advice}", path.display())
}

/// The path without `.`; `None` if it is absolute or leads upwards.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut kept = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => kept.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(kept)
}

fn link_stays_inside(parent: &Path, to: &Path) -> bool {
    let mut left = parent.components().count();
    let mut downwards = false;
    for component in to.components() {
        match component {
            Component::ParentDir if downwards || left == 0 => return false,
            Component::ParentDir => left -= 1,
            Component::Normal(_) => downwards = true,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    true
}

/// Makes a folder and its parents one by one; a link or file in the way is an error.
fn make_folders(root: &Path, path: &Path, made: &mut HashSet<PathBuf>) -> io::Result<()> {
    if made.contains(path) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_folders(root, parent, made)?;
    }
    fs::create_dir(root.join(path))?;
    made.insert(path.to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Entry<'a> {
        File(&'a str, u32),
        Link(&'a str, &'a str),
        Hard(&'a str, &'a str),
    }

    fn archive(at: &Path, entries: &[Entry<'_>]) {
        let mut tar = tar::Builder::new(fs::File::create(at).expect("file"));
        for entry in entries {
            let mut header = tar::Header::new_ustar();
            let (name, kind, to, mode, data) = match entry {
                Entry::File(name, mode) => (name, EntryType::Regular, None, *mode, b"text".as_slice()),
                Entry::Link(name, to) => (name, EntryType::Symlink, Some(to), 0o777, b"".as_slice()),
                Entry::Hard(name, to) => (name, EntryType::Link, Some(to), 0o777, b"".as_slice()),
            };
            // Written by hand, as the builder itself refuses some of these names.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            if let Some(to) = to {
                header.as_mut_bytes()[157..157 + to.len()].copy_from_slice(to.as_bytes());
            }
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_size(data.len() as u64);
            header.set_cksum();
            tar.append(&header, data).expect("append");
        }
        tar.finish().expect("finish");
    }

    fn check(entries: &[Entry<'_>]) -> (tempfile::TempDir, Result<(), String>) {
        let folder = tempfile::tempdir().expect("folder");
        archive(&folder.path().join("code.tar"), entries);
        let result = unpack("code snapshot", &folder.path().join("code.tar"), &folder.path().join("code"));
        (folder, result)
    }

    #[test]
    fn files_links_and_exec_bits_are_kept() {
        use Entry::{File, Link};
        let (folder, result) =
            check(&[File("a/b/run.sh", 0o755), File("./train.py", 0o600), Link("a/b/up", "../../train.py")]);
        assert_eq!(result, Ok(()));
        let code = folder.path().join("code");
        let mode = |p: &str| fs::metadata(code.join(p)).expect("file").permissions().mode() & 0o111;
        assert_eq!((mode("a/b/run.sh"), mode("train.py")), (0o111, 0));
        assert_eq!(fs::read_to_string(code.join("a/b/up")).expect("link"), "text");
    }

    #[test]
    fn nothing_leaves_the_folder() {
        use Entry::{File, Hard, Link};
        let cases: [&[Entry<'_>]; 9] = [
            &[File("/etc/x", 0o644)],
            &[File("../x", 0o644)],
            &[File("a/../../x", 0o644)],
            &[Link("l", "/etc")],
            &[Link("l", "../x")],
            &[Link("a/l", "b/../../../x")],
            // Through a folder link that itself would be fine.
            &[Link("a/b/l", "../.."), File("a/b/l/x", 0o644)],
            &[Link("x", "a/y"), File("x", 0o644)],
            &[Hard("x", "/etc/passwd")],
        ];
        for (n, case) in cases.iter().enumerate() {
            let (folder, result) = check(case);
            assert!(result.is_err(), "case {n}");
            assert!(!folder.path().join("x").exists(), "case {n}");
        }
    }
}
