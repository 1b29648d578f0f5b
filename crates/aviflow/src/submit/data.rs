//! Data sources: where they are, and what they are by content.
//!
//! Data is not copied. Its fingerprint is recorded, so that a rerun can tell
//! whether it is still the same.

use crate::error::{Failure, Result, While};
use aviflow_api::environment::hex;
use aviflow_api::spec::Data;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Above this, reading everything at each submission would take longer than people wait.
const HASHED: u64 = 1_000_000_000;

/// The mark of fingerprints that are of sizes and times, not of content.
pub const LISTING: &str = "listing:";

/// Makes local sources absolute and takes their fingerprints.
pub fn resolve(data: &mut [Data], base: &Path, fingerprints: &mut BTreeMap<String, String>) -> Result<()> {
    for (i, item) in data.iter_mut().enumerate() {
        let Some(path) = local(&item.source) else { continue };
        let path = base.join(path);
        let real = fs::canonicalize(&path).map_err(|e| {
            Failure::usage(format!("data[{i}].source: the data `{}` is not there: {} ({e})", item.name, path.display()))
                .help("correct `source`; it is relative to the document")
        })?;
        fingerprints.insert(item.name.clone(), fingerprint(&real)?);
        item.source = real.to_str().map(str::to_owned).ok_or_else(|| {
            Failure::usage(format!("data[{i}].source: the path {} is no text", real.display())).help("rename it")
        })?;
    }
    Ok(())
}

/// The path of a local source.
pub fn local(source: &str) -> Option<&str> {
    match source.split_once("://") {
        Some(("file", path)) => Some(path),
        Some(_) => None,
        None => Some(source),
    }
}

/// SHA-256 of a file, or over a folder's files and names. What is large is identified by
/// names, sizes and times instead.
pub fn fingerprint(path: &Path) -> Result<String> {
    let wrong = || format!("data {} cannot be read", path.display());
    let mut files = Vec::new();
    list(path, &mut files).or_fail(wrong)?;
    files.sort();
    let total: u64 = files.iter().map(|f| f.1).sum();
    let folder = path.is_dir();
    let mut hasher = Sha256::new();
    if total > HASHED {
        for (file, size, modified) in &files {
            hasher.update(format!("{size}  {modified}  ").as_bytes());
            hasher.update(relative(file, path));
            hasher.update(b"\n");
        }
        return Ok(format!("{LISTING}{}", hex(&hasher.finalize())));
    }
    // The same as `aviflow.log_data` of the Python hooks computes.
    for (file, ..) in &files {
        let digest = hash_file(file).or_fail(wrong)?;
        if !folder {
            return Ok(digest);
        }
        hasher.update(format!("{digest}  ").as_bytes());
        hasher.update(relative(file, path));
        hasher.update(b"\n");
    }
    Ok(hex(&hasher.finalize()))
}

fn relative<'a>(file: &'a Path, root: &Path) -> &'a [u8] {
    file.strip_prefix(root).unwrap_or(file).as_os_str().as_bytes()
}

/// Files with size and modification time in nanoseconds.
fn list(path: &Path, files: &mut Vec<(PathBuf, u64, i128)>) -> std::io::Result<()> {
    let meta = fs::metadata(path)?;
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            // A link to a folder is not entered: it could lead in circles.
            let link = entry.file_type()?.is_symlink();
            let path = entry.path();
            if !link || path.is_file() {
                list(&path, files)?;
            }
        }
    } else if meta.is_file() {
        files.push((
            path.to_owned(),
            meta.len(),
            i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
        ));
    }
    Ok(())
}

fn hash_file(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(source: &str) -> Data {
        Data { name: "corpus".into(), source: source.into(), mount: None, read_only: true }
    }

    #[test]
    fn paths_become_absolute_and_content_is_what_counts() {
        let folder = tempfile::tempdir().expect("folder");
        let base = fs::canonicalize(folder.path()).expect("path");
        fs::write(base.join("a.txt"), "abc").expect("write");
        fs::create_dir(base.join("d")).expect("folder");
        fs::write(base.join("d/b"), "1").expect("write");
        let mut prints = BTreeMap::new();
        let mut items = [data("a.txt"), data("s3://bucket/x")];
        resolve(&mut items, &base, &mut prints).expect("resolved");
        assert_eq!(items[0].source, base.join("a.txt").display().to_string());
        assert_eq!(items[1].source, "s3://bucket/x");
        assert_eq!(prints["corpus"], "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let one = fingerprint(&base.join("d")).expect("print");
        fs::write(base.join("d/b"), "1").expect("write");
        assert_eq!(fingerprint(&base.join("d")).expect("print"), one, "times do not count");
        fs::rename(base.join("d/b"), base.join("d/c")).expect("rename");
        assert_ne!(fingerprint(&base.join("d")).expect("print"), one, "names do");
    }

    #[test]
    fn missing_data_is_named_with_its_place() {
        let failure = resolve(&mut [data("gone")], Path::new("/"), &mut BTreeMap::new()).expect_err("missing");
        assert_eq!(failure.code, 2);
        assert!(
            failure.message.starts_with("data[0].source: the data `corpus` is not there: /gone"),
            "{}",
            failure.message
        );
    }
}
