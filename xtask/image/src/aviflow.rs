//! The image of the control plane and the agent: what is in it, and why.
//!
//! It holds the two programs, the shared libraries that the control plane is linked to with their linker, the
//! certificates of public authorities, and nothing else: no shell, no package manager. It runs as a user who owns
//! nothing.
//!
//! - `aviflow` is linked to the C library of the machine that built it, which comes along. So what runs in a cluster
//!   is what all tests ran, name lookup and allocator included. A program linked statically to musl would be another
//!   one: every dependency compiled a second time, SQLite among them, for a C library that no test has seen. And one
//!   linked statically to glibc looks up no name without its libraries.
//! - `aviflow-agent` is static: it is copied into the containers of jobs, of whose libraries nothing is known. It
//!   looks up no name.
//!
//! Files are found as the linker of this machine finds them, so the image is for this machine's architecture.

use crate::libraries;
use crate::oci::{FileEntry, Image};
use anyhow::{Context as _, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The user and group: no name, no home, and not root.
pub const USER: u32 = 65532;

/// Where the certificates of public authorities are, by distribution.
const CERTIFICATES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Where programs look for them.
const CERTIFICATES_IN_IMAGE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// What the image is made of.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    /// The control plane and command line, `aviflow`.
    pub aviflow: &'a Path,
    /// The static agent, `aviflow-agent`.
    pub agent: &'a Path,
    /// The version, as a label.
    pub version: &'a str,
    /// The commit it is built of, as a label.
    pub revision: Option<&'a str>,
    /// Whether names of functions are left out too: most of a program that is not optimised.
    pub small: bool,
}

/// The image of these parts.
///
/// # Errors
/// If a part cannot be read, a library is not found, or the agent is not static.
pub fn image(parts: &Parts<'_>) -> Result<Image> {
    ensure!(
        libraries::of(parts.agent)?.is_empty(),
        "{} needs libraries, which the image of a job may not have; build it with \
         RUSTFLAGS='-C target-feature=+crt-static' and --target",
        parts.agent.display()
    );
    let mut libraries = Vec::new();
    for path in libraries::of(parts.aviflow)? {
        libraries.push(file(&path.display().to_string(), &path, 0o755)?);
    }
    let certificates = CERTIFICATES.iter().map(Path::new).find(|path| path.is_file());
    let certificates = certificates.with_context(|| {
        format!("there are no certificates at {}; install ca-certificates", CERTIFICATES.join(" or "))
    })?;
    libraries.push(file(CERTIFICATES_IN_IMAGE, certificates, 0o644)?);
    let text = |path: &str, text: String| FileEntry { path: path.to_owned(), content: text.into_bytes(), mode: 0o644 };
    // Some libraries want a name for the user; and without the other file, glibc asks for hosts elsewhere first.
    libraries.push(text("/etc/passwd", format!("aviflow:x:{USER}:{USER}:Aviflow:/nonexistent:/sbin/nologin\n")));
    libraries.push(text("/etc/group", format!("aviflow:x:{USER}:\n")));
    libraries.push(text("/etc/nsswitch.conf", "hosts: files dns\n".to_owned()));
    let program = |name: &str, from: &Path| -> Result<FileEntry> {
        let content = stripped(from, parts.small)?;
        Ok(FileEntry { path: format!("/usr/bin/{name}"), content, mode: 0o755 })
    };
    let programs = [program("aviflow", parts.aviflow)?, program("aviflow-agent", parts.agent)?];
    let mut labels = vec![
        ("org.opencontainers.image.title", "aviflow"),
        ("org.opencontainers.image.description", "Control plane and agent of Aviflow"),
        ("org.opencontainers.image.licenses", "Apache-2.0"),
        ("org.opencontainers.image.version", parts.version),
    ];
    labels.extend(parts.revision.map(|revision| ("org.opencontainers.image.revision", revision)));
    // What changes seldom is below, so that a node fetches it once.
    let image = Image::scratch().files(&libraries)?.files(&programs)?;
    Ok(image
        .env(&["PATH=/usr/bin"])
        .user(&format!("{USER}:{USER}"))
        .workdir("/")
        .entrypoint(&["/usr/bin/aviflow"])
        .labels(&labels))
}

fn file(path: &str, from: &Path, mode: u32) -> Result<FileEntry> {
    let content = fs::read(from).with_context(|| format!("{} cannot be read", from.display()))?;
    Ok(FileEntry { path: path.to_owned(), content, mode })
}

/// A program without what only a debugger needs; with `small`, without symbols too.
fn stripped(program: &Path, small: bool) -> Result<Vec<u8>> {
    let to = PathBuf::from(format!("{}.stripped-{}", program.display(), std::process::id()));
    let mut strip = Command::new("strip");
    strip.arg(if small { "--strip-all" } else { "--strip-debug" }).arg("-o").arg(&to).arg(program);
    let out = strip.output().context("`strip` could not be started; it is part of binutils")?;
    if !out.status.success() {
        bail!("`strip {}` failed: {}", program.display(), String::from_utf8_lossy(&out.stderr).trim());
    }
    let content = fs::read(&to).with_context(|| format!("{} cannot be read", to.display()))?;
    fs::remove_file(&to)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_with_libraries_is_refused() {
        let own = std::env::current_exe().unwrap();
        let parts = Parts { aviflow: &own, agent: &own, version: "1", revision: None, small: true };
        let error = image(&parts).unwrap_err().to_string();
        assert!(error.contains("needs libraries") && error.contains("crt-static"), "{error}");
    }
}
