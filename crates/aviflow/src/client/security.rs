//! What a client trusts, and what it shows of itself, where TLS is spoken.

use crate::error::{Failure, Result};
use aviflow_kube::reach::Certificate;
use std::path::{Path, PathBuf};
use ureq::tls::{Certificate as Der, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Whom to trust, and what to show.
#[derive(Default)]
pub struct Security {
    /// The certificates in PEM that alone vouch for the control plane, and where they are from; the system's if none.
    authority: Option<(String, Vec<u8>)>,
    /// The client's own.
    certificate: Option<Certificate>,
}

impl Security {
    /// Trusts certificates that are known already.
    pub fn known(self, whose: &str, pem: &str) -> Security {
        Security { authority: Some((whose.to_owned(), pem.as_bytes().to_vec())), ..self }
    }

    /// Trusts those of a file, if one is named.
    pub fn file(self, path: Option<&PathBuf>) -> Result<Security> {
        let Some(path) = path else { return Ok(self) };
        let pem = std::fs::read(path).map_err(|e| unreadable(path, &e.to_string()))?;
        Ok(Security { authority: Some((path.display().to_string(), pem)), ..self })
    }

    /// Shows a certificate.
    pub fn shows(self, certificate: Option<Certificate>) -> Security {
        Security { certificate, ..self }
    }

    /// The same for ureq.
    pub fn config(&self) -> Result<TlsConfig> {
        let roots = match &self.authority {
            None => RootCerts::PlatformVerifier,
            Some((whose, pem)) => {
                let known = certificates(pem).map_err(|why| unreadable(Path::new(whose), &why))?;
                RootCerts::new_with_certs(&known)
            }
        };
        let own = self.certificate.as_ref().map(|own| {
            let wrong = |why: String| {
                Failure::usage(format!("the client certificate of the kubeconfig cannot be shown: {why}"))
                    .help("`kubectl config view --minify` shows where it is from")
            };
            let chain = certificates(&own.chain).map_err(wrong)?;
            // What the parser says of a key might quote it.
            let key = PrivateKey::from_pem(&own.key).map_err(|_| wrong("its key is none in PEM".to_owned()))?;
            Ok(ClientCert::new_with_certs(&chain, key))
        });
        Ok(TlsConfig::builder().root_certs(roots).client_cert(own.transpose()?).build())
    }
}

fn certificates(pem: &[u8]) -> std::result::Result<Vec<Der<'static>>, String> {
    let mut all = Vec::new();
    for item in parse_pem(pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| e.to_string())? {
            all.push(certificate);
        }
    }
    if all.is_empty() { Err("there is no certificate in PEM".to_owned()) } else { Ok(all) }
}

/// Whether a connection failed because of who answers, and not for want of an answer.
pub fn distrusts(error: &ureq::Error) -> bool {
    let of = |error: &rustls::Error| matches!(error, rustls::Error::InvalidCertificate(_));
    match error {
        ureq::Error::Rustls(error) => of(error),
        ureq::Error::Io(e) => e.get_ref().and_then(|e| e.downcast_ref()).is_some_and(of),
        _ => false,
    }
}

fn unreadable(path: &Path, why: &str) -> Failure {
    Failure::usage(format!(
        "the certificates {}, which are to vouch for the control plane, cannot be read: {why}",
        path.display()
    ))
    .help("name a file of certificates in PEM with --certificate-authority")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::CertificateError;

    #[test]
    fn what_cannot_vouch_is_refused_and_named() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("ca.crt");
        let refused = |security: Result<Security>| security.and_then(|s| s.config()).expect_err("no use").message;
        assert!(refused(Security::default().file(Some(&path))).contains("ca.crt, which are to vouch"));
        std::fs::write(&path, "nothing").expect("written");
        assert!(refused(Security::default().file(Some(&path))).contains("no certificate in PEM"));
        let own = Certificate { chain: b"nothing".to_vec(), key: b"s3cret".to_vec() };
        let message = refused(Ok(Security::default().shows(Some(own))));
        assert!(
            message.contains("the client certificate of the kubeconfig") && !message.contains("s3cret"),
            "{message}"
        );
        assert!(Security::default().file(None).and_then(|s| s.config()).is_ok(), "the system's");
    }

    #[test]
    fn who_is_not_trusted_is_told_apart_from_who_is_away() {
        let unknown = || rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert!(distrusts(&ureq::Error::Rustls(unknown())));
        assert!(distrusts(&ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::InvalidData, unknown()))));
        assert!(!distrusts(&ureq::Error::Io(std::io::ErrorKind::ConnectionRefused.into())));
    }
}
