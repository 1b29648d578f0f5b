//! The environment that a document names, by content.
//!
//! `environments/NAME/` beside the document or in a folder above it comes first,
//! so that a team can keep its own in its repository; then the server's catalogue.

use crate::client::Client;
use crate::error::{Failure, Result};
use crate::render::style::Style;
use crate::submit::draw;
use aviflow_api::environment::{Description, REQUIREMENTS, check_lock, hash, hex, parse_environment};
use aviflow_api::rest::EnvironmentInfo;
use aviflow_api::source::Sources;
use aviflow_api::spec::ResolvedEnvironment;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// An environment and its locks.
#[derive(Debug)]
pub struct Found {
    /// By content.
    pub resolved: ResolvedEnvironment,
    /// The locks' bytes, in the order of `resolved.locks`.
    pub locks: Vec<Vec<u8>>,
}

/// Resolves `NAME` or `NAME@VERSION`, with a job's own lock layered onto it.
pub fn resolve(asked: &str, extra: Option<&Path>, base: &Path, client: &Client, style: Style) -> Result<Found> {
    let (name, version) = match asked.split_once('@') {
        Some((name, version)) => (name, version.parse::<u32>().ok()),
        None => (asked, None),
    };
    let local = find_local(name, base).map(|file| read_local(&file, name, style)).transpose()?;
    let local = local.filter(|(d, _)| version.is_none_or(|v| v == d.version));
    let (description, lock) = match local {
        Some(found) => found,
        None => from_catalogue(client.environment(asked)?)?,
    };
    let mut locks = vec![lock];
    if let Some(extra) = extra {
        locks.push(read_lock(extra, style)?);
    }
    Ok(found(description, locks))
}

fn found(description: Description, locks: Vec<Vec<u8>>) -> Found {
    let bytes: Vec<&[u8]> = locks.iter().map(Vec::as_slice).collect();
    let resolved = ResolvedEnvironment {
        hash: hash(&description, &bytes),
        locks: locks.iter().map(|l| hex(&Sha256::digest(l))).collect(),
        name: description.name,
        version: description.version,
        python: description.python,
        env: description.env,
    };
    Found { resolved, locks }
}

/// The description nearest to the document.
fn find_local(name: &str, base: &Path) -> Option<PathBuf> {
    base.ancestors()
        .map(|folder| folder.join("environments").join(name).join("environment.yaml"))
        .find(|file| file.is_file())
}

fn read_local(file: &Path, name: &str, style: Style) -> Result<(Description, Vec<u8>)> {
    let shown = file.display().to_string();
    let bytes = std::fs::read(file).map_err(|e| Failure::usage(format!("{shown} cannot be read: {e}")))?;
    let parsed = parse_environment(&shown, &bytes, Some(name))
        .map_err(|d| Failure::document(draw(&d, &Sources::single(&shown, &bytes), style)))?;
    let lock = file.with_file_name(&parsed.description.requirements);
    Ok((parsed.description, read_lock(&lock, style)?))
}

/// Reads a lock, which must be one.
pub fn read_lock(file: &Path, style: Style) -> Result<Vec<u8>> {
    let shown = file.display().to_string();
    let bytes = std::fs::read(file).map_err(|e| Failure::usage(format!("the lock {shown} cannot be read: {e}")))?;
    let wrong = check_lock(&shown, &bytes);
    if wrong.is_empty() {
        Ok(bytes)
    } else {
        Err(Failure::document(draw(&wrong, &Sources::single(&shown, &bytes), style)))
    }
}

fn from_catalogue(info: EnvironmentInfo) -> Result<(Description, Vec<u8>)> {
    let lock = info.lock.ok_or_else(|| {
        Failure::platform(format!("the control plane sent environment {}@{} without its lock", info.name, info.version))
            .help("use the same version of this program on both sides")
    })?;
    let description = Description {
        name: info.name,
        version: info.version,
        description: info.description,
        owner: None,
        python: info.python,
        requirements: REQUIREMENTS.to_owned(),
        env: info.env,
    };
    Ok((description, lock.into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn client() -> Client {
        // Nothing listens there: who is asked although the answer is beside the document, fails.
        Client::new("test", "http://127.0.0.1:1", None)
    }

    fn environment(root: &Path, name: &str, version: u32) {
        let folder = root.join("environments").join(name);
        fs::create_dir_all(&folder).expect("folder");
        let text = format!("name: {name}\nversion: {version}\ndescription: for tests\npython: '>=3.11'\n");
        fs::write(folder.join("environment.yaml"), text).expect("write");
        fs::write(folder.join("requirements.lock"), "# nothing\n").expect("write");
    }

    #[test]
    fn the_nearest_one_is_taken() {
        let root = tempfile::tempdir().expect("folder");
        let deep = root.path().join("a/b");
        fs::create_dir_all(&deep).expect("folder");
        environment(root.path(), "ours", 1);
        environment(&root.path().join("a"), "ours", 2);
        let found = resolve("ours", None, &deep, &client(), Style::plain()).expect("found");
        assert_eq!((found.resolved.version, found.locks.len(), found.resolved.locks.len()), (2, 1, 1));
        let other = resolve("ours@1", None, &deep, &client(), Style::plain())
            .expect_err("another version is asked of the server");
        assert_eq!(other.code, 125);
    }

    #[test]
    fn a_jobs_own_lock_is_layered_on_and_must_be_one() {
        let root = tempfile::tempdir().expect("folder");
        environment(root.path(), "ours", 1);
        let plain = resolve("ours", None, root.path(), &client(), Style::plain()).expect("found");
        let extra = root.path().join("extra.lock");
        let hash = "a".repeat(64);
        fs::write(&extra, format!("x==1 --hash=sha256:{hash}\n")).expect("write");
        let layered = resolve("ours", Some(&extra), root.path(), &client(), Style::plain()).expect("found");
        assert_eq!(layered.resolved.locks.len(), 2);
        assert_ne!(layered.resolved.hash, plain.resolved.hash);
        fs::write(&extra, "x\n").expect("write");
        let refused = resolve("ours", Some(&extra), root.path(), &client(), Style::plain()).expect_err("no lock");
        assert_eq!(refused.code, 2);
        assert!(refused.rendered.contains("extra.lock:1:1"), "{}", refused.rendered);
    }
}
