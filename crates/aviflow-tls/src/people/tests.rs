use super::*;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// Whether a client that knows one authority takes a server's certificate for a name.
pub(crate) fn verify_server(
    authority: &str,
    server: &CertifiedKey,
    name: &str,
    at: SystemTime,
) -> Result<(), rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(crate::pem::certificates(authority.as_bytes()).unwrap().remove(0)).unwrap();
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), crate::provider()).build().unwrap();
    let (leaf, above) = server.cert.split_first().unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    verifier.verify_server_cert(leaf, above, &name, &[], unix(at)).map(drop)
}

fn unix(at: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).unwrap())
}

/// An authority as that of a cluster.
pub(crate) struct Cluster {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Cluster {
    pub(crate) fn new() -> Cluster {
        Cluster::made(|_| {})
    }

    /// One whose certificate is as usual but for what `change` changes.
    fn made(change: impl FnOnce(&mut CertificateParams)) -> Cluster {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        // All of them are called alike, so that only the key tells them apart.
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "kubernetes");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        change(&mut params);
        let pem = params.self_signed(&key).unwrap().pem();
        Cluster { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate, as a person would have it but for what `change` changes.
    pub(crate) fn issue(&self, change: impl FnOnce(&mut CertificateParams)) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "team-nlp");
        params.distinguished_name.push(DnType::CommonName, "ann");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }
}

fn who(known: &Cluster, shown: &(rcgen::Certificate, KeyPair), at: SystemTime) -> Result<Person, String> {
    Authorities::read(known.pem.as_bytes()).unwrap().who_at(&[shown.0.der().clone()], unix(at))
}

#[test]
fn the_common_name_is_the_user_and_organizations_are_groups() {
    let (cluster, now) = (Cluster::new(), SystemTime::now());
    let ann = cluster.issue(|_| {});
    let person = who(&cluster, &ann, now).unwrap();
    assert_eq!((person.user.as_str(), person.groups.as_slice()), ("ann", ["team-nlp".to_owned()].as_slice()));
    assert_eq!(person.fingerprint, <[u8; 32]>::from(Sha256::digest(ann.0.der())));
    // All organizations, and the last common name.
    let several = cluster.issue(|p| {
        for (kind, name) in [(10, "team-speech"), (3, "last")] {
            p.distinguished_name.push(DnType::CustomDnType(vec![2, 5, 4, kind]), name);
        }
    });
    let person = who(&cluster, &several, now).unwrap();
    assert_eq!(person.user, "last");
    assert_eq!(person.groups, ["team-nlp", "team-speech"]);
    // One without extended key usage is for everything, as it is for the API server.
    assert!(who(&cluster, &cluster.issue(|p| p.extended_key_usages.clear()), now).is_ok());
    let alone = cluster.issue(|p| {
        p.distinguished_name.remove(DnType::OrganizationName);
    });
    assert_eq!(who(&cluster, &alone, now).unwrap().groups, [] as [String; 0]);
}

#[test]
fn what_does_not_hold_names_nobody_and_says_why() {
    let (cluster, other, now) = (Cluster::new(), Cluster::new(), SystemTime::now());
    let check = |shown: (rcgen::Certificate, KeyPair), expected: &str| {
        let error = who(&cluster, &shown, now).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    let day = Duration::from_secs(24 * 60 * 60);
    check(other.issue(|_| {}), "was not issued by an authority of this cluster's users, but by `CN=kubernetes`");
    check(cluster.issue(|p| p.not_after = OffsetDateTime::from(now - day)), "has expired; it was valid until");
    check(cluster.issue(|p| p.not_before = OffsetDateTime::from(now + day)), "is not valid before");
    check(cluster.issue(|p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]), "clientAuth");
    check(
        cluster.issue(|p| {
            p.distinguished_name.remove(DnType::CommonName);
        }),
        "no common name",
    );
    check(cluster.issue(|p| p.distinguished_name.push(DnType::CommonName, "")), "no common name");
    let authorities = Authorities::read(cluster.pem.as_bytes()).unwrap();
    assert!(authorities.who_at(&[], unix(now)).is_err());
    assert!(
        authorities.who_at(&[CertificateDer::from(vec![1, 2, 3])], unix(now)).unwrap_err().contains("cannot be read")
    );
}

#[test]
fn of_several_authorities_each_vouches() {
    let (one, two, now) = (Cluster::new(), Cluster::new(), SystemTime::now());
    let both = Authorities::read(format!("{}\n{}", one.pem, two.pem).as_bytes()).unwrap();
    for cluster in [&one, &two] {
        assert!(both.who_at(&[cluster.issue(|_| {}).0.der().clone()], unix(now)).is_ok());
    }
    assert!(Authorities::read(b"").unwrap_err().contains("holds no certificate"));
}

#[test]
fn an_authority_vouches_while_it_is_valid_and_no_longer() {
    let (now, day) = (SystemTime::now(), Duration::from_secs(24 * 60 * 60));
    let named = |name: &str, from: SystemTime, until: SystemTime| {
        Cluster::made(|p| {
            p.distinguished_name.push(DnType::CommonName, name);
            (p.not_before, p.not_after) = (OffsetDateTime::from(from), OffsetDateTime::from(until));
        })
    };
    let old = named("old", now - 2 * day, now - day);
    let new = named("new", now - day, now + day);
    let next = named("next", now + day, now + 2 * day);
    let all = Authorities::read([&old, &new, &next].map(|c| c.pem.as_str()).concat().as_bytes()).unwrap();
    let who = |cluster: &Cluster, at| all.who_at(&[cluster.issue(|_| {}).0.der().clone()], unix(at)).map(drop);
    assert_eq!(who(&new, now), Ok(()));
    let error = who(&old, now).unwrap_err();
    assert!(error.contains("the authority `CN=old` that has issued it has expired"), "{error}");
    let error = who(&next, now).unwrap_err();
    assert!(error.contains("the authority `CN=next` that has issued it is not valid before"), "{error}");
    for (cluster, then) in [(&old, now - day - day / 2), (&next, now + day + day / 2)] {
        assert_eq!(who(cluster, then), Ok(()), "while it was, or will be");
    }
    // The same key in a certificate that was renewed vouches for what the old one had signed.
    let old_key = old.issue(|_| {});
    let (mut params, key) = (CertificateParams::default(), old.issuer.key());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "old");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let renewed = params.self_signed(key).unwrap().pem();
    let both = Authorities::read(format!("{}{renewed}", old.pem).as_bytes()).unwrap();
    assert!(both.who_at(&[old_key.0.der().clone()], unix(now)).is_ok());
}
