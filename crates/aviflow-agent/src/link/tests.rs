use super::*;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ServerConfig, ServerConnection};
use std::io::BufRead;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

/// An authority in PEM, and how a control plane of a name shows one of its certificates.
fn control_plane(name: &str) -> (String, Arc<ServerConfig>) {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let authority = params.self_signed(&key).expect("signed").pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().expect("a key");
    let certificate = CertificateParams::new([name.to_owned()]).expect("a name").signed_by(&key, &issuer);
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("TLS");
    let chain = vec![certificate.expect("signed").der().clone()];
    (authority, Arc::new(config.with_no_client_auth().with_single_cert(chain, key).expect("a pair")))
}

/// A listener that does something with its first connection.
fn listens<T: Send + 'static>(serve: impl FnOnce(TcpStream) -> T + Send + 'static) -> (Endpoint, JoinHandle<T>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let endpoint = Endpoint::Tcp(listener.local_addr().expect("an address").to_string());
    (endpoint, std::thread::spawn(move || serve(listener.accept().expect("a connection").0)))
}

/// Says a pong and hears until a message comes or the connection is lost; returns what came.
fn speak(link: &mut Link) -> Vec<ToAgent> {
    assert!(link.open(0), "it is open");
    link.send(&FromAgent::Pong { n: 7 });
    let (mut heard, mut poll) = (Vec::new(), Poll::default());
    loop {
        if !link.flush() {
            return heard;
        }
        poll.clear();
        link.watch(&mut poll);
        poll.wait(None);
        let open = link.receive(|message| heard.push(message));
        if !open || !heard.is_empty() {
            return heard;
        }
    }
}

fn pinned(authority: &str) -> Option<Pinned> {
    Some(Pinned::to(authority).expect("an authority"))
}

#[test]
fn within_tls_it_speaks_with_who_has_a_certificate_of_the_authority() {
    let (authority, config) = control_plane(crate::protocol::CONTROL_PLANE);
    let (endpoint, served) = listens(move |stream| {
        let tls = ServerConnection::new(config).expect("TLS");
        let mut stream = io::BufReader::new(rustls::StreamOwned::new(tls, stream));
        let mut line = String::new();
        stream.read_line(&mut line).expect("a line");
        stream.get_mut().write_all(&wire::line(&ToAgent::Ack { seq: 9 })).expect("written");
        line
    });
    let mut link = Link::new(endpoint, pinned(&authority));
    assert_eq!(speak(&mut link), [ToAgent::Ack { seq: 9 }]);
    assert_eq!(served.join().expect("served").as_bytes(), wire::line(&FromAgent::Pong { n: 7 }));
}

#[test]
fn it_says_nothing_to_who_has_none() {
    let (authority, _) = control_plane(crate::protocol::CONTROL_PLANE);
    for (name, another) in [(crate::protocol::CONTROL_PLANE, true), ("other.internal", false)] {
        let (theirs, config) = control_plane(name);
        let (endpoint, served) = listens(move |mut stream| {
            let mut tls = ServerConnection::new(config).expect("TLS");
            // The handshake fails, as the agent ends it.
            tls.complete_io(&mut stream).expect_err("it was taken").to_string()
        });
        let mut link = Link::new(endpoint, pinned(if another { &authority } else { &theirs }));
        assert_eq!(speak(&mut link), []);
        let refusal = link.refusal().expect("it says why");
        assert!(refusal.contains("certificate"), "{refusal}");
        assert_eq!(link.refusal(), None, "once");
        link.close(0);
        drop(served.join());
    }
}

#[test]
fn it_never_speaks_without_tls_where_it_is_to_speak_with() {
    let (authority, _) = control_plane(crate::protocol::CONTROL_PLANE);
    let (endpoint, served) = listens(|mut stream| {
        // As one of a version before TLS, or of nobody's, would answer.
        stream.write_all(&wire::line(&ToAgent::Ack { seq: 9 })).expect("written");
        let mut heard = Vec::new();
        // It ends as the agent does.
        let _ = stream.read_to_end(&mut heard);
        heard
    });
    let mut link = Link::new(endpoint, pinned(&authority));
    assert_eq!(speak(&mut link), []);
    link.close(0);
    let heard = served.join().expect("served");
    let said = heard.windows(6).any(|bytes| bytes == b"\"type\"");
    assert!(heard.first() == Some(&0x16) && !said, "a handshake, and nothing of the agent's");
}
