//! TLS to the database, as libpq has it: `sslmode` and `sslrootcert` of the address.
//!
//! | `sslmode` | encrypted | the server's certificate |
//! |---|---|---|
//! | `disable` | never | |
//! | `allow`, `prefer`, or nothing | where both can, and the server lets him in so | is not looked at |
//! | `require` | always | as `verify-ca` where there are root certificates; else it is not looked at |
//! | `verify-ca` | always | must be of one of the root certificates |
//! | `verify-full` | always | must besides be for the host that the address names |
//!
//! Over a Unix socket nothing of it counts.

use crate::convert::failed;
use aviflow_engine::ports::StoreError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres_rustls::MakeRustlsConnect;

/// What an address says of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Asked {
    mode: Option<String>,
    root: Option<String>,
}

/// Takes what is of TLS out of an address, as tokio-postgres knows little of it.
pub(super) fn taken(url: &str) -> (String, Asked) {
    let mut asked = Asked { mode: None, root: None };
    let Some((rest, query)) = url.split_once('?') else { return (url.to_owned(), asked) };
    let mut left = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("sslmode", value)) => asked.mode = Some(decoded(value)),
            Some(("sslrootcert", value)) => asked.root = Some(decoded(value)),
            _ => left.push(pair),
        }
    }
    let query = if left.is_empty() { String::new() } else { format!("?{}", left.join("&")) };
    (format!("{rest}{query}"), asked)
}

/// A value of an address, whose escapes are taken for what they stand for.
fn decoded(value: &str) -> String {
    let bytes = value.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let escaped = value.get(at + 1..at + 3).filter(|_| *byte == b'%').and_then(|h| u8::from_str_radix(h, 16).ok());
        plain.push(escaped.unwrap_or(*byte));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// Whether a connection failed for its being encrypted, so that one without TLS may be had: TLS did not come about,
/// or the server has no rule by which this user comes in so.
pub(super) fn is_in_the_way(error: &tokio_postgres::Error) -> bool {
    if let Some(code) = error.code() {
        return *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION;
    }
    let io = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    io.is_some_and(|io| {
        io.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
            || matches!(io.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
    })
}

/// Whose certificates are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// Anybody's.
    Anybody,
    /// Those of the roots, for whatever host.
    Roots,
    /// Those of the roots, for the host of the address.
    RootsAndHost,
}

/// How to connect, and whether that is with TLS. `home` is the user's folder, where libpq has root certificates that
/// the address does not name.
///
/// # Errors
/// If what is asked for cannot be had.
pub(super) fn connector(asked: &Asked, home: Option<&Path>) -> Result<(SslMode, MakeRustlsConnect), StoreError> {
    let system = asked.root.as_deref() == Some("system");
    let mode = asked.mode.as_deref().unwrap_or(if system { "verify-full" } else { "prefer" });
    let (ssl, trust) = match mode {
        "disable" => (SslMode::Disable, Trust::Anybody),
        "allow" | "prefer" => (SslMode::Prefer, Trust::Anybody),
        "require" => (SslMode::Require, Trust::Anybody),
        "verify-ca" => (SslMode::Require, Trust::Roots),
        "verify-full" => (SslMode::Require, Trust::RootsAndHost),
        // It may be anything, also a password that went astray.
        _ => {
            return Err(failed(
                "the database's address has an unknown sslmode; write disable, prefer, require, verify-ca or \
                 verify-full",
            ));
        }
    };
    if system && trust != Trust::RootsAndHost {
        return Err(failed(
            "the database's address says sslrootcert=system, whose authorities vouch for everybody's hosts; say \
             sslmode=verify-full with it",
        ));
    }
    let file = match &asked.root {
        Some(_) if system => None,
        Some(file) => Some(PathBuf::from(file)),
        None => home.map(|home| home.join(".postgresql/root.crt")).filter(|file| file.exists()),
    };
    let trust = if ssl == SslMode::Require && trust == Trust::Anybody && file.is_some() { Trust::Roots } else { trust };
    let roots = match (trust, file) {
        (Trust::Anybody, _) => RootCertStore::empty(),
        (_, Some(file)) => of_file(&file)?,
        (_, None) if system => of_system()?,
        (_, None) => {
            return Err(failed(format!(
                "the database's address asks for sslmode={mode} and names no certificates that vouch for the server; \
                 name a file of them with sslrootcert=FILE, or those of the system with sslrootcert=system"
            )));
        }
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(Verifier { trust, roots, provider: provider.clone() });
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|e| failed(format!("TLS cannot be spoken: {e}")))?;
    let config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    Ok((ssl, MakeRustlsConnect::new(config)))
}

fn of_file(file: &Path) -> Result<RootCertStore, StoreError> {
    let unusable = |why: String| {
        failed(format!("the certificates that vouch for the database, {}, cannot be used: {why}", file.display()))
    };
    let mut roots = RootCertStore::empty();
    let pem = std::fs::read(file).map_err(|e| unusable(e.to_string()))?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|e| unusable(e.to_string()))?;
        roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
    }
    if roots.is_empty() { Err(unusable("there is none in PEM".to_owned())) } else { Ok(roots) }
}

fn of_system() -> Result<RootCertStore, StoreError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(failed("this system has no certificates of authorities; name a file with sslrootcert=FILE"));
    }
    Ok(roots)
}

/// Verifies as much as the address asks for; that the server has the key of its certificate, always.
#[derive(Debug)]
struct Verifier {
    trust: Trust,
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if self.trust != Trust::Anybody {
            let parsed = ParsedCertificate::try_from(certificate)?;
            let algorithms = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, above, now, algorithms)?;
            if self.trust == Trust::RootsAndHost {
                verify_server_name(&parsed, host)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
