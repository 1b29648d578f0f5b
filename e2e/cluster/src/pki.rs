//! Certificates and kubeconfigs, made by openssl with keys on P-256, which take milliseconds.

use crate::run::output;
use anyhow::{Context as _, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// A certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// The cluster's certificate authority, and the folder of what it signed.
#[derive(Debug)]
pub(crate) struct Authority {
    folder: PathBuf,
    own: Pair,
    /// Held while a kubeconfig is made: two nodes that start at once have the same one for kube-proxy.
    making: Mutex<()>,
}

impl Authority {
    /// Makes a new one.
    pub(crate) fn make(folder: &Path) -> Result<Authority> {
        fs::create_dir_all(folder)?;
        let own = sign(folder, "ca", "/CN=aviflow-testcluster", "basicConstraints=critical,CA:TRUE", None)?;
        Ok(Authority { folder: folder.to_owned(), own, making: Mutex::default() })
    }

    /// The authority's certificate.
    pub(crate) fn certificate(&self) -> &Path {
        &self.own.certificate
    }

    /// A certificate for a server at these addresses (`IP:…` or `DNS:…`).
    pub(crate) fn server(&self, name: &str, addresses: &[String]) -> Result<Pair> {
        let extensions = format!(
            "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\nsubjectAltName={}",
            addresses.join(",")
        );
        sign(&self.folder, &format!("{name}-server"), &format!("/CN={}", escape(name)), &extensions, Some(&self.own))
    }

    /// A certificate for a user of these groups.
    pub(crate) fn client(&self, file: &str, user: &str, groups: &[&str]) -> Result<Pair> {
        let mut subject: String = groups.iter().map(|group| format!("/O={}", escape(group))).collect();
        subject += &format!("/CN={}", escape(user));
        let extensions = "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=clientAuth";
        sign(&self.folder, file, &subject, extensions, Some(&self.own))
    }

    /// The key that signs service accounts' tokens, and its public half.
    pub(crate) fn service_account_key(&self) -> Result<(PathBuf, PathBuf)> {
        let (key, public) = (self.folder.join("service-account.key"), self.folder.join("service-account.pub"));
        let mut make = Command::new("openssl");
        make.args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"]).arg(&key);
        output(&mut make)?;
        output(Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(&key).arg("-out").arg(&public))?;
        Ok((key, public))
    }

    /// A kubeconfig for a user of these groups.
    pub(crate) fn kubeconfig(&self, server: &str, user: &str, groups: &[&str]) -> Result<PathBuf> {
        let name: String = user.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        // The same user may be of other groups in another file.
        let file = format!("{name}-{}", &crate::oci::hex(&Sha256::digest(format!("{user:?}{groups:?}")))[..8]);
        let path = self.folder.join(format!("{file}.kubeconfig"));
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if path.exists() {
            return Ok(path);
        }
        let pair = self.client(&format!("{file}-client"), user, groups)?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {
                "server": server, "certificate-authority": self.certificate(),
            }}],
            "users": [{"name": user, "user": {"client-certificate": pair.certificate, "client-key": pair.key}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        });
        fs::write(&path, format!("{config:#}")).with_context(|| format!("{} cannot be written", path.display()))?;
        Ok(path)
    }
}

/// Makes a key and a certificate for it, signed by an authority or, without one, by itself.
fn sign(folder: &Path, file: &str, subject: &str, extensions: &str, by: Option<&Pair>) -> Result<Pair> {
    let config = folder.join(format!("{file}.cnf"));
    fs::write(&config, format!("[req]\ndistinguished_name=dn\nx509_extensions=ext\n[dn]\n[ext]\n{extensions}\n"))?;
    let pair = Pair { certificate: folder.join(format!("{file}.crt")), key: folder.join(format!("{file}.key")) };
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-utf8"]);
    openssl.args(["-days", "30", "-subj", subject, "-config"]).arg(&config);
    openssl.arg("-out").arg(&pair.certificate).arg("-keyout").arg(&pair.key);
    if let Some(by) = by {
        openssl.arg("-CA").arg(&by.certificate).arg("-CAkey").arg(&by.key);
    }
    output(&mut openssl).with_context(|| format!("the certificate {file} could not be made"))?;
    Ok(pair)
}

/// A name as part of a subject.
fn escape(name: &str) -> String {
    name.chars().fold(String::new(), |mut escaped, c| {
        if matches!(c, '/' | '\\' | '+') {
            escaped.push('\\');
        }
        escaped.push(c);
        escaped
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_end_early() {
        let check = |name: &str, expected: &str| assert_eq!(escape(name), expected);
        check("system:node:hgx0", "system:node:hgx0");
        check("eva/b+c", r"eva\/b\+c");
        check(r"a\b", r"a\\b");
    }
}
