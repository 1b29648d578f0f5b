//! An authority that signs the control plane's own certificates, and nothing else.
//!
//! Whoever holds its certificate knows a control plane by it, wherever that listens: agents are given it with their
//! launch, people read it in the cluster. What it signs is for servers, and lives in the memory of one process.
//!
//! Invariant: it can sign no authority, and no client.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// For how long an authority lasts: agents that know it must find its certificates until their training ends.
const YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// For how long a certificate of a server lasts; who has it asks for a new one in good time.
const LEAF: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// How far clocks may be apart.
const SKEW: Duration = Duration::from_secs(60 * 60);

/// The authority, with its key.
pub struct Authority {
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// An authority as it is kept.
pub struct Kept {
    /// Its certificate in PEM.
    pub certificate: String,
    /// Its key in PEM.
    pub key: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority(…)")
    }
}

impl Authority {
    /// Makes a new one, as it is to be kept.
    ///
    /// # Errors
    /// If the machine gives no random numbers.
    pub fn make(now: SystemTime) -> Result<Kept, String> {
        let failed = |e: rcgen::Error| format!("an authority cannot be made: {e}");
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = params(now, YEARS);
        params.distinguished_name.push(DnType::CommonName, "aviflow");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).map_err(failed)?;
        Ok(Kept { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// One that was kept.
    ///
    /// # Errors
    /// If it is none, or over.
    pub fn read(kept: &Kept, now: SystemTime) -> Result<Authority, String> {
        let mut all = crate::pem::certificates(kept.certificate.as_bytes())?;
        let certificate = all.swap_remove(0);
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate)
            .map_err(|e| format!("its certificate cannot be read: {e}"))?;
        let now = i64::try_from(unix(now).as_secs()).unwrap_or(i64::MAX);
        if parsed.validity.not_after.timestamp() <= now {
            return Err(format!("its certificate is over since {}", parsed.validity.not_after));
        }
        // What the parser says of a key might quote it.
        let key = KeyPair::from_pem(&kept.key).map_err(|_| "its key cannot be read".to_owned())?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err("its key is not that of its certificate".to_owned());
        }
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(|e| format!("it cannot sign: {e}"))?;
        Ok(Authority { certificate, certificate_pem: kept.certificate.clone(), issuer })
    }

    /// Its certificate in PEM, which is no secret.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate_pem
    }

    /// A new certificate for a server of these names and addresses.
    ///
    /// # Errors
    /// If one of the names is none.
    pub fn server(&self, names: &[String], addresses: &[IpAddr], now: SystemTime) -> Result<CertifiedKey, String> {
        let failed = |e: rcgen::Error| format!("a certificate cannot be signed: {e}");
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = params(now, LEAF);
        params.distinguished_name.push(DnType::CommonName, "aviflow control plane");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        for name in names {
            params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into().map_err(failed)?));
        }
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())
            .map_err(|_| "the new key cannot be read".to_owned())?;
        let chain = vec![certificate.der().clone(), self.certificate.clone()];
        CertifiedKey::from_der(chain, key, &crate::provider()).map_err(|e| format!("the new key is of no use: {e}"))
    }
}

fn params(now: SystemTime, lasts: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.not_before = OffsetDateTime::from(now - SKEW);
    params.not_after = OffsetDateTime::from(now + lasts);
    params
}

fn unix(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "control-plane.test";
    use crate::people::tests::verify_server;

    #[test]
    fn what_it_signs_is_known_by_its_certificate_alone() {
        let now = SystemTime::now();
        let kept = Authority::make(now).unwrap();
        let authority = Authority::read(&kept, now).unwrap();
        let names = [NAME, "aviflow.aviflow-system.svc"].map(str::to_owned);
        let server = authority.server(&names, &["10.96.0.7".parse().unwrap()], now).unwrap();
        let known = |pem: &str, name: &str, at| verify_server(pem, &server, name, at);
        for name in [NAME, "aviflow.aviflow-system.svc", "10.96.0.7"] {
            assert_eq!(known(&kept.certificate, name, now), Ok(()), "{name}");
        }
        assert!(known(&kept.certificate, "10.96.0.8", now).is_err(), "of another address");
        assert!(known(&kept.certificate, NAME, now + LEAF + SKEW).is_err(), "over");
        let other = Authority::make(now).unwrap();
        assert!(known(&other.certificate, NAME, now).is_err(), "of another authority of the same name");
    }

    #[test]
    fn what_is_no_authority_is_not_taken_for_one() {
        let now = SystemTime::now();
        let (kept, other) = (Authority::make(now).unwrap(), Authority::make(now).unwrap());
        let check = |certificate: &str, key: &str, at: SystemTime, expected: &str| {
            let kept = Kept { certificate: certificate.to_owned(), key: key.to_owned() };
            let error = Authority::read(&kept, at).unwrap_err();
            assert!(error.contains(expected) && !error.contains("MI"), "{error}");
        };
        check(&kept.certificate, &other.key, now, "is not that of its certificate");
        check(&kept.certificate, "nothing", now, "its key cannot be read");
        check("nothing", &kept.key, now, "holds no certificate");
        check(&kept.certificate, &kept.key, now + YEARS + SKEW, "is over since");
    }
}
