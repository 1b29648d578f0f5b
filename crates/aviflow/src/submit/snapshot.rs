//! The code snapshot: a folder as one archive, the same bytes for the same content.
//!
//! Taken is what a person would expect of `git add`: everything but what
//! `.gitignore` and `.aviflowignore` name (also outside of a repository), with
//! uncommitted changes and new files, and what is committed although ignored.
//! Never taken: `.git`, sockets, pipes, devices.
//!
//! The form of the archive is [`aviflow_local::archive`]'s, by which a worker hashes what it unpacked.

use super::git;
use crate::error::{Failure, Result, While};
use crate::render::number::bytes as amount;
use aviflow_api::spec::CodeSnapshot;
use aviflow_local::archive::{Archive, Entry};
use ignore::WalkBuilder;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

/// How many of the largest paths are named where a snapshot is too large.
const NAMED: usize = 5;

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Taken {
    /// The archive; removed when this is dropped.
    pub archive: tempfile::NamedTempFile,
    /// What it is.
    pub snapshot: CodeSnapshot,
    /// What was left out.
    pub warnings: Vec<String>,
}

/// Takes a snapshot of a folder of at most `limit` bytes, if there is a limit.
pub fn take(folder: &Path, limit: Option<u64>) -> Result<Taken> {
    let root = fs::canonicalize(folder).map_err(|e| {
        Failure::usage(format!("the code folder {} cannot be read: {e}", folder.display()))
            .help("correct `code`; it is relative to the document")
    })?;
    if !root.is_dir() {
        return Err(
            Failure::usage(format!("the code {} is no folder", folder.display())).help("name the folder that holds it")
        );
    }
    let mut warnings = Vec::new();
    let entries = collect(&root, &mut warnings)?;
    let total = entries.values().map(size).sum();
    if let Some(limit) = limit.filter(|l| total > *l) {
        return Err(too_large(folder, &entries, total, limit));
    }
    let mut archive = tempfile::NamedTempFile::new().or_fail(|| "a temporary file cannot be made".to_owned())?;
    let (sha256, bytes) = write(&root, &entries, archive.as_file_mut())?;
    let (commit, dirty) = git::state(&root).map_or((None, false), |(commit, dirty)| (Some(commit), dirty));
    let snapshot = CodeSnapshot { sha256, bytes, files: entries.len() as u64, commit, dirty };
    Ok(Taken { archive, snapshot, warnings })
}

fn size(kind: &Entry) -> u64 {
    match kind {
        Entry::File { size, .. } => *size,
        Entry::Link(_) => 0,
    }
}

/// Files and links by their path in the folder.
fn collect(root: &Path, warnings: &mut Vec<String>) -> Result<BTreeMap<PathBuf, Entry>> {
    let walk = WalkBuilder::new(root)
        .standard_filters(false)
        .parents(true)
        .git_ignore(true)
        .git_exclude(true)
        .git_global(true)
        .require_git(false)
        .add_custom_ignore_filename(".aviflowignore")
        .filter_entry(|entry| entry.file_name() != ".git")
        .build();
    let mut paths = BTreeSet::new();
    for entry in walk {
        let entry = entry.or_fail(|| "the code folder cannot be read".to_owned())?;
        if entry.depth() > 0 {
            paths.insert(entry.into_path());
        }
    }
    paths.extend(
        git::tracked_but_ignored(root).into_iter().map(|p| root.join(p)).filter(|p| p.symlink_metadata().is_ok()),
    );
    let mut entries = BTreeMap::new();
    for path in paths {
        let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
        let meta = path.symlink_metadata().or_fail(|| format!("{} cannot be read", path.display()))?;
        let kind = meta.file_type();
        if kind.is_file() {
            entries.insert(name, Entry::File { size: meta.len(), executable: meta.permissions().mode() & 0o111 != 0 });
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).or_fail(|| format!("{} cannot be read", path.display()))?;
            let inside = stays_inside(root, &name, &target).ok_or_else(|| {
                Failure::usage(format!("{} is a link out of the code folder, to {}", name.display(), target.display()))
                    .help("copy what it leads to into the folder, declare it as `data`, or name the link in .aviflowignore")
            })?;
            entries.insert(name, Entry::Link(inside));
        } else if !kind.is_dir() {
            warnings.push(format!(
                "warning: {} is neither a file, a folder nor a link; it is not in the snapshot",
                name.display()
            ));
        }
    }
    Ok(entries)
}

/// The target relative to the link, by leading `..` only, if it is in the folder.
fn stays_inside(root: &Path, link: &Path, target: &Path) -> Option<PathBuf> {
    let parent = link.parent().unwrap_or(Path::new(""));
    let target = if target.is_absolute() { target.strip_prefix(root).ok()?.to_owned() } else { parent.join(target) };
    let mut parts: Vec<&std::ffi::OsStr> = Vec::new();
    for component in target.components() {
        match component {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    let from: Vec<&std::ffi::OsStr> = parent.iter().collect();
    let common = from.iter().zip(&parts).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(std::ffi::OsStr::new(".."), from.len() - common);
    let relative: PathBuf = up.chain(parts[common..].iter().copied()).collect();
    Some(if relative.as_os_str().is_empty() { PathBuf::from(".") } else { relative })
}

fn write(root: &Path, entries: &BTreeMap<PathBuf, Entry>, file: &mut File) -> Result<(String, u64)> {
    let mut archive = Archive::new(io::BufWriter::with_capacity(1 << 17, file));
    for (name, entry) in entries {
        let added = archive.add(root, name, entry);
        added.or_fail(|| format!("{} cannot be put into the snapshot", name.display()))?;
    }
    archive.finish().or_fail(|| "the snapshot cannot be written".to_owned())
}

fn too_large(folder: &Path, entries: &BTreeMap<PathBuf, Entry>, total: u64, limit: u64) -> Failure {
    let mut failure = Failure::usage(format!(
        "the code in {} is {}, more than {}; the largest parts:",
        folder.display(),
        amount(total),
        amount(limit)
    ));
    for (path, bytes) in largest(entries) {
        failure = failure.why(format!("{:>9}  {path}", amount(bytes)));
    }
    failure.help(format!(
        "name what is no code in .gitignore or .aviflowignore, declare data as `data`, or allow it with `--max-snapshot {}MB`",
        total.div_ceil(1_000_000)
    ))
}

/// The largest paths: a folder, unless one thing in it is most of it.
fn largest(entries: &BTreeMap<PathBuf, Entry>) -> Vec<(String, u64)> {
    let mut sizes: BTreeMap<&Path, u64> = BTreeMap::new();
    for (path, kind) in entries {
        for part in path.ancestors() {
            *sizes.entry(part).or_default() += size(kind);
        }
    }
    let children = |of: &Path| -> Vec<(&Path, u64)> {
        let mut list: Vec<(&Path, u64)> =
            sizes.iter().filter(|(p, _)| p.parent() == Some(of)).map(|(p, s)| (*p, *s)).collect();
        list.sort_by_key(|(path, bytes)| (std::cmp::Reverse(*bytes), *path));
        list
    };
    let mut named = children(Path::new(""));
    named.truncate(NAMED);
    for (path, bytes) in &mut named {
        while let Some((child, most)) = children(path).first().copied().filter(|(_, most)| most * 2 > *bytes) {
            (*path, *bytes) = (child, most);
        }
    }
    named.sort_by_key(|(path, bytes)| (std::cmp::Reverse(*bytes), *path));
    let folder = |path: &Path| !entries.contains_key(path);
    named.into_iter().map(|(p, b)| (format!("{}{}", p.display(), if folder(p) { "/" } else { "" }), b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            fs::write(path, text).expect("write");
        }
        folder
    }

    fn names(taken: &Taken) -> Vec<String> {
        let mut archive = tar::Archive::new(File::open(taken.archive.path()).expect("archive"));
        archive
            .entries()
            .expect("entries")
            .map(|e| e.expect("entry").path().expect("path").display().to_string())
            .collect()
    }

    fn check(folder: &tempfile::TempDir) -> Taken {
        take(folder.path(), Some(1_000_000)).expect("snapshot")
    }

    #[test]
    fn the_same_content_is_the_same_archive() {
        let files = [("b.py", "1"), ("a/c.py", "2"), (".hidden", "3")];
        let (one, two) = (folder(&files), folder(&files));
        fs::create_dir(two.path().join("empty")).expect("folder");
        File::open(two.path().join("b.py")).expect("file").set_modified(std::time::UNIX_EPOCH).expect("time");
        fs::set_permissions(two.path().join("b.py"), fs::Permissions::from_mode(0o600)).expect("mode");
        let (one, two) = (check(&one), check(&two));
        assert_eq!(one.snapshot, two.snapshot);
        assert_eq!(names(&one), [".hidden", "a/c.py", "b.py"]);
        assert_eq!(
            (one.snapshot.files, one.snapshot.bytes),
            (3, fs::metadata(one.archive.path()).expect("file").len())
        );
        // Fixed: recorded runs are found by it.
        insta::assert_snapshot!(one.snapshot.sha256);
    }

    #[test]
    fn what_counts_is_seen() {
        let base = check(&folder(&[("a", "1")])).snapshot.sha256;
        assert_ne!(check(&folder(&[("a", "2")])).snapshot.sha256, base);
        assert_ne!(check(&folder(&[("b", "1")])).snapshot.sha256, base);
        let executable = folder(&[("a", "1")]);
        fs::set_permissions(executable.path().join("a"), fs::Permissions::from_mode(0o700)).expect("mode");
        assert_ne!(check(&executable).snapshot.sha256, base);
    }

    #[test]
    fn ignored_files_stay_out_also_without_a_repository() {
        let folder = folder(&[
            (".gitignore", "*.bin\n/out/\n"),
            ("a.py", ""),
            ("big.bin", ""),
            ("out/x", ""),
            ("sub/.gitignore", "local\n"),
            ("sub/local", ""),
            ("sub/kept", ""),
            (".git/config", ""),
            (".aviflowignore", "notes.md\n"),
            ("notes.md", ""),
        ]);
        assert_eq!(names(&check(&folder)), [".aviflowignore", ".gitignore", "a.py", "sub/.gitignore", "sub/kept"]);
    }

    #[test]
    fn git_is_asked_for_the_commit_and_for_what_is_committed_though_ignored() {
        let folder = folder(&[(".gitignore", "*.bin\n"), ("kept.bin", ""), ("other.bin", ""), ("a.py", "")]);
        let git = |args: &[&str]| {
            let status = Command::new("git")
                .arg("-C")
                .arg(folder.path())
                .args(["-c", "user.name=t", "-c", "user.email=t@example.com"])
                .args(args)
                .output()
                .expect("git")
                .status;
            assert!(status.success(), "{args:?}");
        };
        git(&["init", "-q"]);
        git(&["add", "-f", "kept.bin", "a.py", ".gitignore"]);
        git(&["commit", "-qm", "one"]);
        let clean = check(&folder);
        assert_eq!(names(&clean), [".gitignore", "a.py", "kept.bin"]);
        assert_eq!((clean.snapshot.commit.as_ref().map(String::len), clean.snapshot.dirty), (Some(40), false));
        fs::write(folder.path().join("new.py"), "").expect("write");
        let dirty = check(&folder);
        assert_eq!((names(&dirty).len(), dirty.snapshot.dirty), (4, true));
    }

    #[test]
    fn links_that_stay_inside_are_kept_and_others_are_named() {
        let folder = folder(&[("a/b/x", "1"), ("y", "2")]);
        let link = |to: &Path, at: &str| std::os::unix::fs::symlink(to, folder.path().join(at)).expect("link");
        link(Path::new("../../y"), "a/b/up");
        link(Path::new("b/../b/x"), "a/crooked");
        link(&fs::canonicalize(folder.path()).expect("path").join("a/b"), "absolute");
        let taken = check(&folder);
        let mut archive = tar::Archive::new(File::open(taken.archive.path()).expect("archive"));
        let links: Vec<(String, String)> = archive
            .entries()
            .expect("entries")
            .filter_map(|e| {
                let e = e.expect("entry");
                let to = e.link_name().expect("link")?.display().to_string();
                Some((e.path().expect("path").display().to_string(), to))
            })
            .collect();
        let expected = [("a/b/up", "../../y"), ("a/crooked", "b/x"), ("absolute", "a/b")];
        assert_eq!(links, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
        for outside in ["/etc/passwd", "../outside"] {
            link(Path::new(outside), "wrong");
            let failure = take(folder.path(), None).expect_err("refused");
            assert!(failure.message.starts_with("wrong is a link out of the code folder"), "{}", failure.message);
            fs::remove_file(folder.path().join("wrong")).expect("remove");
        }
    }

    #[test]
    fn sockets_and_pipes_are_left_out_with_a_warning() {
        let folder = folder(&[("a", "")]);
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("s")).expect("socket");
        let taken = check(&folder);
        assert_eq!((names(&taken), taken.warnings.len()), (vec!["a".to_owned()], 1));
    }

    #[test]
    fn too_much_is_refused_with_its_largest_parts() {
        let text = |n: usize| "x".repeat(n);
        let files = [
            ("data/train.bin", text(600_000)),
            ("data/readme", text(10)),
            ("logs/1", text(90_000)),
            ("logs/2", text(90_000)),
            ("logs/3", text(90_000)),
            ("a.py", text(100)),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(n, t)| (*n, t.as_str())).collect();
        let failure = take(folder(&files).path(), Some(500_000)).expect_err("refused");
        assert_eq!(failure.code, 2);
        assert_eq!(failure.why, [" 600.0 kB  data/train.bin", " 270.0 kB  logs/", "    100 B  a.py"]);
        assert!(failure.help.expect("help").contains("--max-snapshot 1MB"));
    }

    #[test]
    fn long_names_are_kept() {
        let long = format!("{}/{}", "d".repeat(120), "f".repeat(120));
        assert_eq!(names(&check(&folder(&[(&long, "1")]))), [long]);
    }
}
