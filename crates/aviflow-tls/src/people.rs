//! Whose a client's certificate is, as Kubernetes' API server reads it: the common name is the user, the
//! organizations are his groups.
//!
//! The TLS layer takes any certificate whose key the client proves to have; whose it is, and whether it still holds,
//! is asked here for each request. So a certificate that is no good is refused in words and not by an alert, and one
//! that expires does not outlive itself in a connection.
//!
//! Invariant: nobody is made of what does not verify, or of what an authority has signed that is over.

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use x509_parser::certificate::{Validity, X509Certificate};

/// Who a certificate names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// The common name.
    pub user: String,
    /// The organizations.
    pub groups: Vec<String>,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
}

/// The authorities whose certificates name people.
#[derive(Debug)]
pub struct Authorities(Vec<Root>);

/// One of them. That it vouches at an instant is asked of it apart from what it has signed: what rustls keeps of a
/// root is its name and its key.
#[derive(Debug)]
struct Root {
    verifier: Arc<dyn ClientCertVerifier>,
    name: String,
    validity: Validity,
}

impl Authorities {
    /// Those of a text in PEM.
    ///
    /// # Errors
    /// If there is none that can be used.
    pub fn read(pem: &[u8]) -> Result<Authorities, String> {
        let all = crate::pem::certificates(pem)?;
        // One that cannot be read vouches for nobody, and takes nothing from the others.
        let roots: Vec<Root> = all.iter().filter_map(Root::read).collect();
        match roots.is_empty() {
            true => Err(format!("none of its {} certificates can be read", all.len())),
            false => Ok(Authorities(roots)),
        }
    }

    /// Who shows this certificate, which is the first, with those above it.
    ///
    /// # Errors
    /// With why it names nobody, as a sentence about the client's certificate.
    pub fn who(&self, chain: &[CertificateDer<'_>]) -> Result<Person, String> {
        self.who_at(chain, UnixTime::now())
    }

    fn who_at(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<Person, String> {
        let (leaf, above) = chain.split_first().ok_or("it is missing")?;
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf).map_err(|_| "it cannot be read".to_owned())?;
        self.verify(leaf, above, &parsed, now)?;
        let subject = parsed.subject();
        let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
            attribute.as_str().map(str::to_owned).map_err(|_| "its subject has a name that is no text".to_owned())
        };
        // Of several the last counts, as for the API server.
        let user = subject.iter_common_name().last().map(text).transpose()?.filter(|name| !name.is_empty());
        let user = user.ok_or("its subject has no common name, which would be the user's")?;
        let groups = subject.iter_organization().map(text).collect::<Result<_, _>>()?;
        Ok(Person { user, groups, fingerprint: Sha256::digest(leaf).into() })
    }

    /// Whether one of them vouches for a certificate; else what the one says that has signed it.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        parsed: &X509Certificate<'_>,
        now: UnixTime,
    ) -> Result<(), String> {
        let mut told = None;
        for root in &self.0 {
            match root.verifier.verify_client_cert(leaf, above, now) {
                Ok(_) => match root.is_over(now) {
                    None => return Ok(()),
                    over => told = told.or(over),
                },
                Err(rustls::Error::InvalidCertificate(
                    CertificateError::UnknownIssuer | CertificateError::BadSignature,
                )) => {}
                Err(error) => told = told.or_else(|| Some(why(&error, parsed))),
            }
        }
        Err(told.unwrap_or_else(|| {
            format!("it was not issued by an authority of this cluster's users, but by `{}`", parsed.issuer())
        }))
    }
}

impl Root {
    fn read(certificate: &CertificateDer<'_>) -> Option<Root> {
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).ok()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crate::provider()).build().ok()?;
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        Some(Root { verifier, name: parsed.subject().to_string(), validity: parsed.validity.clone() })
    }

    /// Why it does not vouch at an instant, as a sentence about what it has signed.
    fn is_over(&self, now: UnixTime) -> Option<String> {
        let Root { name, validity, .. } = self;
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if now > validity.not_after.timestamp() {
            return Some(format!(
                "the authority `{name}` that has issued it has expired; it was valid until {}",
                validity.not_after
            ));
        }
        (now < validity.not_before.timestamp())
            .then(|| format!("the authority `{name}` that has issued it is not valid before {}", validity.not_before))
    }
}

/// Why a certificate does not verify.
fn why(error: &rustls::Error, certificate: &X509Certificate<'_>) -> String {
    let rustls::Error::InvalidCertificate(error) = error else { return format!("it cannot be verified: {error}") };
    let validity = &certificate.validity;
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("it, or an authority above it, has expired; it was valid until {}", validity.not_after)
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("it is not valid before {}", validity.not_before)
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "it is not for clients: its extended key usage does not name clientAuth".to_owned()
        }
        other => format!("it does not verify: {other}"),
    }
}

/// Takes any certificate whose key is proven, and none. What it is good for, [`Authorities::who`] says.
#[derive(Debug)]
pub(crate) struct AnyCertificate;

impl ClientCertVerifier for AnyCertificate {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Whoever has one is to show it, so that he is told why it is no good.
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = crate::provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = crate::provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        crate::provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
pub(crate) mod tests;
