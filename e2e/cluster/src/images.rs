//! Images for pods, made on this machine: of given files alone, or of a Debian file system by mmdebstrap.
//!
//! Each is kept in the cache of [`crate::binaries::cache`] under a name that follows from what it is made of, and
//! put there in one step.

use crate::binaries::{Binary, cache, fresh};
use crate::node::PAUSE;
use crate::oci::{FileEntry, Image, hex};
use crate::run::{output, which};
use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The image of [`minimal_python`].
pub const PYTHON: &str = "aviflow.test/python:1";

/// What programs do without, below `/usr/share`: a fifth of a file system that each node has to unpack.
const LEFT_OUT: [&str; 5] = ["doc", "i18n", "info", "locale", "man"];

/// An image of given files alone, without a shell, as an archive in the cache.
///
/// # Errors
/// If it cannot be written.
pub fn scratch(reference: &str, files: &[FileEntry], entrypoint: &[&str]) -> Result<PathBuf> {
    let mut hash = Sha256::new();
    hash.update(format!("{reference}{entrypoint:?}{}", std::env::consts::ARCH));
    for file in files {
        hash.update(format!("{}{}{}", file.path, file.mode, file.content.len()));
        hash.update(&file.content);
    }
    kept(&format!("scratch-{}.tar", &hex(&hash.finalize())[..16]), |archive| {
        Image::scratch().files(files)?.entrypoint(entrypoint).write(reference, archive)?;
        Ok(())
    })
}

/// The image of pods' sandboxes: one static program that does nothing.
///
/// # Errors
/// If it cannot be built.
pub fn pause() -> Result<PathBuf> {
    let content = fs::read(Binary::Pause.path()?)?;
    scratch(PAUSE, &[FileEntry { path: "/pause".to_owned(), content, mode: 0o755 }], &["/pause"])
}

/// An image with Debian's essential programs (a shell, coreutils) and a small Python, called [`PYTHON`].
///
/// # Errors
/// If mmdebstrap is missing or fails.
pub fn minimal_python() -> Result<PathBuf> {
    python(&["python3-minimal", "libpython3-stdlib"])
}

/// The same, whose Python has a pip that it could make environments with, and no pip of its own.
///
/// # Errors
/// If mmdebstrap is missing or fails.
pub fn python_with_pip() -> Result<PathBuf> {
    python(&["python3-minimal", "libpython3-stdlib", "python3-pip-whl"])
}

fn python(packages: &[&str]) -> Result<PathBuf> {
    let layer = debian(packages)?;
    let name = layer.file_stem().context("the layer has no name")?.to_string_lossy().into_owned();
    kept(&format!("python-{name}.tar"), |archive| {
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        Image::scratch().layer(&layer).env(&[path]).entrypoint(&["/bin/sh", "-c"]).write(PYTHON, archive)?;
        Ok(())
    })
}

/// A Debian file system of the release of this machine with these packages, as a layer for [`Image::layer`].
///
/// # Errors
/// If this is no Debian, or mmdebstrap is missing or fails.
pub fn debian(packages: &[&str]) -> Result<PathBuf> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let value = |name: &str| release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let Some(suite) = value("VERSION_CODENAME") else { bail!("/etc/os-release names no release of Debian") };
    let hash = hex(&Sha256::digest(format!("{packages:?}{LEFT_OUT:?}{}", std::env::consts::ARCH)));
    kept(&format!("debian-{suite}-{}.tar", &hash[..12]), |tar| {
        if which("mmdebstrap").is_none() {
            bail!("no `mmdebstrap`: `apt-get install mmdebstrap`");
        }
        let mut make = Command::new("mmdebstrap");
        make.args(["--quiet", "--variant=essential", "--format=tar"]);
        for folder in LEFT_OUT {
            make.arg(format!("--dpkgopt=path-exclude=/usr/share/{folder}/*"));
        }
        make.arg(format!("--include={}", packages.join(","))).arg(suite).arg(tar);
        output(&mut make)?;
        Ok(())
    })
}

/// A file in the cache: made beside its place and moved there, under a lock.
fn kept(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let folder = cache()?.join("images");
    fs::create_dir_all(&folder)?;
    let place = folder.join(name);
    if place.exists() {
        return Ok(place);
    }
    let lock = fs::File::create(folder.join(format!("{name}.lock")))?;
    lock.lock()?;
    // Another process may have made it while this one waited.
    if !place.exists() {
        let begun = Instant::now();
        let new = fresh(&folder, &format!(".making-{name}"))?;
        make(&new).with_context(|| format!("the image {name} could not be made"))?;
        fs::rename(&new, &place)?;
        eprintln!("made {} in {:.0} s", place.display(), begun.elapsed().as_secs_f64());
    }
    Ok(place)
}
