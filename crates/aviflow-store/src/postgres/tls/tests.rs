use super::*;
use crate::contract::server::Server;
use crate::postgres::connect::Database;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
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
        let secured = Secured { server, address, folder, authority };
        secured.rules("hostssl all all 127.0.0.0/8 trust");
        let server = &secured.server;
        server.psql("postgres", &format!("ALTER SYSTEM SET listen_addresses = '{address}'"));
        server.psql("postgres", "ALTER SYSTEM SET ssl = on");
        let Secured { server, folder, authority, .. } = secured;
        drop(server);
        Secured { server: Server::start(&home, false), address, folder, authority }
    }

    /// Who is let in across the network, in the words of `pg_hba.conf`.
    fn rules(&self, rule: &str) {
        let file = self.folder.path().join("server/data/pg_hba.conf");
        std::fs::write(file, format!("local all all trust\n{rule}\n")).unwrap();
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
    // Without a name, the certificate is to be for the IP address.
    for parameters in ["sslmode=prefer", "sslmode=require", &format!("sslmode=verify-full&sslrootcert={ours}")] {
        taken("", parameters);
    }
    refused("elsewhere.example", &format!("sslmode=verify-full&sslrootcert={ours}"), "not valid for name");
    for mode in ["require", "verify-ca", "verify-full"] {
        refused("db.example", &format!("sslmode={mode}&sslrootcert={other}"), "UnknownIssuer");
    }
    let reloaded = |expected: &str| {
        secured.server.psql("postgres", "SELECT pg_reload_conf()");
        let mut refusals = std::iter::repeat_with(|| secured.connect("db.example", "sslmode=require"));
        // The server's main process takes the change up by itself, a moment later.
        let refusal = refusals.find_map(Result::err).unwrap();
        assert!(refusal.contains(expected), "{refusal}");
    };
    secured.rules("hostnossl all all 127.0.0.0/8 trust");
    reloaded("no pg_hba.conf entry");
    taken("db.example", "sslmode=prefer");
    secured.server.psql("postgres", "ALTER SYSTEM SET ssl = off");
    reloaded("server does not support TLS");
    taken("db.example", "sslmode=prefer");
}

/// What a server reads of each connection that is made with a mode, where it says that it speaks TLS and then does not.
fn connections_to_a_liar(mode: &str) -> (String, Vec<i32>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = format!("postgres://ada@localhost:{port}/flow?hostaddr=127.0.0.1&sslmode={mode}");
    let database = Database::at(&url).unwrap();
    let connects = std::thread::spawn(move || {
        let error = database.wait(database.connect()).unwrap().map(drop).unwrap_err();
        // It waits for no other: its next connection says that the last was made.
        drop(TcpStream::connect(("127.0.0.1", port)).unwrap());
        error.to_string()
    });
    let mut asked = Vec::new();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut first = [0; 8];
        if stream.read_exact(&mut first).is_err() {
            break;
        }
        let [_, _, _, _, code @ ..] = first;
        asked.push(i32::from_be_bytes(code));
        let _ = stream.write_all(b"Snothing of TLS");
    }
    (connects.join().unwrap(), asked)
}

#[test]
fn without_tls_only_where_the_address_lets_it_be() {
    // As PostgreSQL numbers them: a request for TLS, and a plain beginning.
    let (tls, plain) = (80_877_103, 196_608);
    let (error, asked) = connections_to_a_liar("prefer");
    assert_eq!(asked, [tls, plain]);
    assert!(error.contains("TLS handshake") && error.contains("; without TLS: "), "{error}");
    let (error, asked) = connections_to_a_liar("require");
    assert_eq!(asked, [tls]);
    assert!(error.contains("TLS handshake") && !error.contains("without TLS"), "{error}");
}
