//! The folder of a published Go module.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// Where Go keeps it, fetched if it is not there.
///
/// # Errors
/// If there is no Go, or it cannot be fetched.
pub fn folder(module: &str, version: &str) -> Result<PathBuf> {
    let mut go = Command::new("go");
    go.args(["mod", "download", "-json", &format!("{module}@v{version}")]);
    let out = go.env("GOWORK", "off").current_dir(std::env::temp_dir()).output().context("there is no `go`")?;
    ensure!(out.status.success(), "`go mod download`: {}", String::from_utf8_lossy(&out.stderr).trim());
    let said: Value = serde_json::from_slice(&out.stdout)?;
    Ok(PathBuf::from(said["Dir"].as_str().context("`go mod download` names no folder")?))
}
