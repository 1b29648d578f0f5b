//! What git knows of a folder. Without git, or outside of a repository, nothing.

use crate::error::{Failure, Result, While};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The commit beneath a folder, and whether it has changes that are not committed.
pub fn state(folder: &Path) -> Option<(String, bool)> {
    let commit = String::from_utf8(run(folder, &["rev-parse", "HEAD"])?).ok()?;
    let changes = run(folder, &["status", "--porcelain", "--", "."])?;
    Some((commit.trim().to_owned(), !changes.is_empty()))
}

/// Files that are committed although `.gitignore` names them; relative to the folder.
pub fn tracked_but_ignored(folder: &Path) -> Vec<PathBuf> {
    let list = run(folder, &["ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]).unwrap_or_default();
    list.split(|b| *b == 0).filter(|p| !p.is_empty()).map(|p| PathBuf::from(OsStr::from_bytes(p))).collect()
}

fn run(folder: &Path, args: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(args)
        // No lock, no prompt: this only looks.
        .env("GIT_OPTIONAL_LOCKS", "0")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then_some(output.stdout)
}

/// A commit of a repository, checked out.
#[derive(Debug)]
pub struct Checkout {
    /// Where; removed when this is dropped.
    pub folder: tempfile::TempDir,
    /// The commit.
    pub commit: String,
}

/// Fetches one commit.
pub fn checkout(url: &str, reference: &str) -> Result<Checkout> {
    if url.starts_with('-') || reference.starts_with('-') {
        return Err(Failure::usage(format!("`{url}` at `{reference}` is no repository and commit")));
    }
    let folder = tempfile::tempdir().or_fail(|| "a temporary folder cannot be made".to_owned())?;
    let git = |args: &[&str]| -> Result<String> {
        let output = Command::new("git")
            .arg("-C")
            .arg(folder.path())
            .args(args)
            .env("GIT_TERMINAL_PROMPT", "0")
            .stdin(Stdio::null())
            .output();
        let output = output
            .map_err(|e| Failure::new(format!("git cannot be run: {e}")).help("install git, or use `code: .`"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().last().unwrap_or("it gave no reason").to_owned();
        Err(Failure::new(format!("`{reference}` of {url} cannot be fetched: {said}"))
            .help("see that the address and `ref` are right and that git may read them"))
    };
    git(&["init", "--quiet"])?;
    git(&["fetch", "--quiet", "--depth", "1", url, reference])?;
    git(&["checkout", "--quiet", "--detach", "FETCH_HEAD"])?;
    let commit = git(&["rev-parse", "HEAD"])?;
    Ok(Checkout { folder, commit })
}
