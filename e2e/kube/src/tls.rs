//! The control plane's TLS as others see it: with openssl, which is none of this project's.

use crate::chart::NAMESPACE;
use anyhow::{Context as _, Result, ensure};
use aviflow_testcluster::Cluster;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// The certificate of the control plane's authority, as the cluster publishes it.
///
/// # Errors
/// If it is not published.
pub fn authority(cluster: &Cluster) -> Result<tempfile::NamedTempFile> {
    let map = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/configmaps/aviflow-ca"))?;
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(map["data"]["ca.crt"].as_str().context("it has no ca.crt")?.as_bytes())?;
    Ok(file)
}

/// openssl, connected to an address whose certificate has a name and is of an authority. What it is to send, and what
/// it hears.
///
/// # Errors
/// If the certificate is not taken; the error quotes it.
fn connected(address: &str, authority: &Path, name: &str, further: &[&str], sends: &str) -> Result<String> {
    let mut openssl = Command::new("openssl");
    openssl.args(["s_client", "-quiet", "-connect", address, "-servername", name, "-verify_hostname", name]);
    openssl.arg("-verify_return_error").arg("-CAfile").arg(authority).args(further);
    let mut child = openssl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("it reads")?.write_all(sends.as_bytes())?;
    let out = child.wait_with_output()?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(!error.contains("verify error") && !error.contains("errno"), "{address}: {error}");
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// What the API answers at a path: the status and the body.
///
/// # Errors
/// If it is not who it is to be.
pub fn get(
    address: &str,
    authority: &Path,
    certificate: Option<(&Path, &Path)>,
    token: Option<&str>,
    path: &str,
) -> Result<(u16, String)> {
    let shown = certificate.map(|(certificate, key)| [certificate.display().to_string(), key.display().to_string()]);
    let further: Vec<&str> = shown.iter().flat_map(|[c, k]| ["-cert", c.as_str(), "-key", k.as_str()]).collect();
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n{token}\r\n");
    let answer = connected(address, authority, "localhost", &further, &request)?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no answer: {answer}"))?;
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).with_context(|| format!("no status: {head}"))?;
    Ok((status, body.to_owned()))
}

/// What the agents' port says to somebody within TLS who says a line.
///
/// # Errors
/// If it is not who it is to be.
pub fn agents(address: &str, authority: &Path, line: &str) -> Result<String> {
    connected(address, authority, "control-plane.aviflow.internal", &[], line)
}
