//! Certificates and keys as people write them.

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

/// The certificates of a text in PEM, in its order; what else is in it is passed over.
///
/// # Errors
/// If there is none, or one that is cut off.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|e| format!("it is no PEM: {e}"))?;
    if all.is_empty() { Err("it holds no certificate in PEM".to_owned()) } else { Ok(all) }
}

/// A certificate with those above it, and its key.
///
/// # Errors
/// If either cannot be read, or they do not belong together.
pub fn pair(certificates: &[u8], key: &[u8]) -> Result<CertifiedKey, String> {
    let chain = self::certificates(certificates)?;
    // What the parser says of a key might quote it.
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| "it holds no private key in PEM".to_owned())?;
    CertifiedKey::from_der(chain, key, &crate::provider())
        .map_err(|e| format!("the certificate and its key are of no use: {e}"))
}
