use super::*;
use crate::contract::server::Server;
use crate::postgres::connect::Database;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use tempfile::TempDir;

#[test]
fn what_is_of_tls_is_taken_out_of_an_address() {
    let check = |url: &str, rest: &str, mode: Option<&str>, root: Option<&str>| {
        let (mode, root) = (mode.map(str::to_owned), root.map(str::to_owned));
        assert_eq!(taken(url), (rest.to_owned(), Asked { mode, root }), "{url}");
    };
    check("postgres://ada@db/flow", "postgres://ada@db/flow", None, None);
    check("postgres://ada@db/flow?sslmode=require", "postgres://ada@db/flow", Some("require"), None);
    check(
        "postgres://db/flow?sslrootcert=/etc/my%20ca.crt&user=ada&sslmode=verify-ca",
        "postgres://db/flow?user=ada",
        Some("verify-ca"),
        Some("/etc/my ca.crt"),
    );
    check("postgres://db?sslrootcert=100%", "postgres://db", None, Some("100%"));
}

#[test]
fn what_cannot_be_had_is_refused_and_not_weakened() {
    let home = TempDir::new().unwrap();
    let check = |mode: Option<&str>, root: Option<&str>, expected: &str| {
        let asked = Asked { mode: mode.map(str::to_owned), root: root.map(str::to_owned) };
        let error = connector(&asked, Some(home.path())).map(drop).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(Some("verify-full"), None, "sslmode=verify-full and names no certificates");
    check(Some("verify-ca"), None, "sslmode=verify-ca and names no certificates");
    check(Some("verify-ca"), Some("system"), "say sslmode=verify-full with it");
    check(Some("verify-ca"), Some("/nowhere.crt"), "/nowhere.crt, cannot be used: No such file");
    // A file that is named counts where certificates would else not be looked at.
    check(Some("require"), Some("/nowhere.crt"), "/nowhere.crt, cannot be used");
    check(Some("s3cret"), None, "unknown sslmode; write disable");
    std::fs::create_dir(home.path().join(".postgresql")).unwrap();
    std::fs::write(home.path().join(".postgresql/root.crt"), "nothing").unwrap();
    check(Some("require"), None, "root.crt, cannot be used: there is none in PEM");
}

/// An authority's certificate as a file, and one that it signs.
fn authority(folder: &Path, name: &str) -> (String, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let file = folder.join(format!("{name}.crt"));
    std::fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
    (file.display().to_string(), Issuer::new(params, key))
}

/// A server that lets people in only with TLS, at an address of this machine that is its own.
struct Secured {
    server: Server,
    address: Ipv4Addr,
    folder: TempDir,
    authority: String,
}

impl Secured {
    fn new() -> Secured {
        let folder = TempDir::new().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let address = Ipv4Addr::new(127, 99, high, low.clamp(1, 254));
        let (authority, issuer) = authority(folder.path(), "ours");
        let home = folder.path().join("server");
        let server = Server::start(&home, false);
        let data = home.join("data");
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["db.example".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(address)));
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        let owner = std::fs::metadata(&data).unwrap();
        for (name, text) in [("server.crt", certificate), ("server.key", key.serialize_pem())] {
            let path = data.join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&path, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        std::fs::write(data.join("pg_hba.conf"), "local all all trust\nhostssl all all 127.0.0.0/8 trust\n").unwrap();
        server.psql("postgres", &format!("ALTER SYSTEM SET listen_addresses = '{address}'"));
        server.psql("postgres", "ALTER SYSTEM SET ssl = on");
        drop(server);
        Secured { server: Server::start(&home, false), address, folder, authority }
    }

    /// Connects with these parameters to a host, which is where it listens.
    fn connect(&self, host: &str, parameters: &str) -> Result<(), String> {
        let address = self.address;
        let url = format!("postgres://aviflow@{host}/postgres?hostaddr={address}&{parameters}");
        let database = Database::at(&url).map_err(|e| e.to_string())?;
        database.wait(database.connect()).unwrap().map(drop).map_err(|e| e.to_string())
    }
}

#[test]
fn a_server_is_taken_for_who_it_is_as_far_as_the_address_asks() {
    let secured = Secured::new();
    let (other, _) = authority(secured.folder.path(), "other");
    let (ours, ip) = (&secured.authority, secured.address.to_string());
    let taken = |host: &str, parameters: &str| {
        assert_eq!(secured.connect(host, parameters), Ok(()), "{host} {parameters}");
    };
    let refused = |host: &str, parameters: &str, expected: &str| {
        let error = secured.connect(host, parameters).unwrap_err();
        assert!(error.contains(expected), "{host} {parameters}: {error}");
    };
    refused("db.example", "sslmode=disable", "no encryption");
    for parameters in ["user=aviflow", "sslmode=prefer", "sslmode=require"] {
        taken("elsewhere.example", parameters);
    }
    taken("db.example", &format!("sslmode=verify-full&sslrootcert={ours}"));
    taken(&ip, &format!("sslmode=verify-full&sslrootcert={ours}"));
    taken("elsewhere.example", &format!("sslmode=verify-ca&sslrootcert={ours}"));
    refused("elsewhere.example", &format!("sslmode=verify-full&sslrootcert={ours}"), "not valid for name");
    for mode in ["require", "verify-ca", "verify-full"] {
        refused("db.example", &format!("sslmode={mode}&sslrootcert={other}"), "UnknownIssuer");
    }
    secured.server.psql("postgres", "ALTER SYSTEM SET ssl = off");
    secured.server.psql("postgres", "SELECT pg_reload_conf()");
    let mut refusals = std::iter::repeat_with(|| secured.connect("db.example", "sslmode=require"));
    // The server's main process takes the change up by itself, a moment later.
    let refusal = refusals.find_map(Result::err).unwrap();
    assert!(refusal.contains("server does not support TLS"), "{refusal}");
}
