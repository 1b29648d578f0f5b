use super::*;
use crate::authority::Authority;
use crate::people::tests::Cluster;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::time::SystemTime;
use tokio::io::AsyncReadExt as _;
use tokio_rustls::TlsConnector;

const NAME: &str = "control-plane.test";

/// A listener, its address, and the authority by which it is known.
async fn listens(speech: impl FnOnce(Arc<Shown>) -> Result<Speech, String>) -> (Listener, SocketAddr, String) {
    let now = SystemTime::now();
    let kept = Authority::make(now).unwrap();
    let shown = Shown::new(Authority::read(&kept, now).unwrap(), vec![NAME.to_owned()], Vec::new()).unwrap();
    let tcp = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let at = tcp.local_addr().unwrap();
    (Listener::new(tcp, Some(speech(Arc::new(shown)).unwrap())), at, kept.certificate)
}

/// A client that knows one authority, and shows a certificate if it is given one.
async fn connect(
    at: SocketAddr,
    authority: &str,
    shows: Option<(CertificateDer<'static>, String)>,
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(crate::pem::certificates(authority.as_bytes()).unwrap().remove(0)).unwrap();
    let config = ClientConfig::builder_with_provider(crate::provider()).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots);
    let config = match shows {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(ServerName::try_from(NAME).unwrap(), TcpStream::connect(at).await?).await
}

#[tokio::test]
async fn agents_with_and_without_tls_come_by_one_port() {
    let (listener, at, authority) = listens(Speech::to_agents).await;
    // One that says nothing holds up nobody.
    let silent = TcpStream::connect(at).await.unwrap();
    let client = tokio::spawn(async move {
        let mut with = connect(at, &authority, None).await.unwrap();
        with.write_all(b"{with}").await.unwrap();
        with
    });
    let mut said = [0; 6];
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.read_exact(&mut said).await.unwrap();
    assert!(matches!(stream, Stream::Tls(_)) && &said == b"{with}");
    let mut without = TcpStream::connect(at).await.unwrap();
    without.write_all(b"{none}").await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.read_exact(&mut said).await.unwrap();
    assert!(matches!(stream, Stream::Plain(_)) && &said == b"{none}");
    drop((silent, client.await.unwrap()));
}

/// A connection that the listener has taken in, and that has said nothing.
async fn comes(listener: &Listener, at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).await.unwrap();
    let accepted = listener.tcp.accept().await.unwrap();
    listener.coming.lock().await.take(accepted, listener.speech.clone().unwrap(), listener.limits);
    stream
}

/// Waits until the other end has closed a connection.
async fn closed(mut stream: TcpStream) {
    // Whether it says so or resets it, depends on what had been said.
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn who_is_silent_longest_makes_room_for_who_comes() {
    let (mut listener, at, authority) = listens(Speech::to_agents).await;
    let hour = Duration::from_secs(60 * 60);
    listener.limits = Limits { first_byte: hour, handshake: hour, at_once: 3 };
    let mut slow = comes(&listener, at).await;
    slow.write_all(&[HANDSHAKE]).await.unwrap();
    // It has begun to shake hands, and so is not asked to leave before those that are silent.
    while listener.coming.lock().await.has_room(1) {
        tokio::task::yield_now().await;
    }
    let (oldest, mut newest) = (comes(&listener, at).await, comes(&listener, at).await);
    let serves = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"!").await.unwrap();
        (listener, stream)
    });
    let mut agent = connect(at, &authority, None).await.unwrap();
    agent.read_exact(&mut [0]).await.unwrap();
    closed(oldest).await;
    let (listener, served) = serves.await.unwrap();
    assert!(matches!(served, Stream::Tls(_)));
    newest.write_all(b"{none}").await.unwrap();
    assert!(matches!(listener.accept().await.unwrap().0, Stream::Plain(_)), "it was kept");
    drop(slow);
}

#[tokio::test]
async fn who_has_said_something_is_not_asked_to_leave() {
    let (mut listener, at, _) = listens(Speech::to_agents).await;
    let hour = Duration::from_secs(60 * 60);
    listener.limits = Limits { first_byte: hour, handshake: hour, at_once: 1 };
    let mut slow = comes(&listener, at).await;
    assert!(listener.coming.lock().await.has_room(1), "it is silent");
    slow.write_all(&[HANDSHAKE]).await.unwrap();
    while listener.coming.lock().await.has_room(1) {
        tokio::task::yield_now().await;
    }
    assert_eq!(listener.coming.lock().await.all.len(), 1, "others wait for it");
}

#[tokio::test]
async fn a_client_that_takes_its_time_is_left() {
    let (hour, moment) = (Duration::from_secs(60 * 60), Duration::from_millis(20));
    for (first_byte, handshake, says) in [(moment, hour, &[][..]), (hour, moment, &[HANDSHAKE][..])] {
        let (mut listener, at, _) = listens(Speech::to_agents).await;
        listener.limits = Limits { first_byte, handshake, at_once: 1 };
        let accepts = tokio::spawn(async move { listener.accept().await.map(|_| ()) });
        let mut slow = TcpStream::connect(at).await.unwrap();
        slow.write_all(says).await.unwrap();
        closed(slow).await;
        assert!(!accepts.is_finished(), "it was no connection");
        accepts.abort();
    }
}

#[tokio::test]
async fn a_client_that_knows_another_authority_says_nothing() {
    let (listener, at, _) = listens(Speech::to_agents).await;
    let other = Authority::make(SystemTime::now()).unwrap();
    let accepts = tokio::spawn(async move { listener.accept().await.map(|_| ()) });
    let error = connect(at, &other.certificate, None).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    assert!(!accepts.is_finished(), "it was no connection");
    accepts.abort();
}

#[tokio::test]
async fn people_show_their_certificates_and_who_speaks_plainly_is_told() {
    let (listener, at, authority) = listens(Speech::to_people).await;
    let serves = tokio::spawn(async move {
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            seen.push(stream.certificates());
            stream.write_all(b"!").await.unwrap();
        }
        seen
    });
    let mut plain = TcpStream::connect(at).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 400") && answer.contains("ask for https://"), "{answer}");
    // Of whichever authority: whose it is, is asked with each request.
    let (certificate, key) = Cluster::new().issue(|_| {});
    let ann = certificate.der().clone();
    for shows in [None, Some((ann.clone(), key.serialize_pem()))] {
        let mut stream = connect(at, &authority, shows).await.unwrap();
        stream.read_exact(&mut [0]).await.unwrap();
    }
    let seen = serves.await.unwrap();
    assert_eq!(seen.iter().map(|s| s.to_vec()).collect::<Vec<_>>(), [Vec::new(), vec![ann]]);
}

#[tokio::test]
async fn a_certificate_without_its_key_is_refused() {
    let (listener, at, authority) = listens(Speech::to_people).await;
    let accepts = tokio::spawn(async move { listener.accept().await.map(|_| ()) });
    let cluster = Cluster::new();
    let (ann, other) = (cluster.issue(|_| {}).0.der().clone(), cluster.issue(|_| {}).1);
    // rustls will not show a pair that does not match; a resolver that does stands for a thief.
    let key = PrivateKeyDer::from_pem_slice(other.serialize_pem().as_bytes()).unwrap();
    let key = crate::provider().key_provider.load_private_key(key).unwrap();
    let thief = rustls::sign::SingleCertAndKey::from(rustls::sign::CertifiedKey::new(vec![ann], key));
    let mut roots = RootCertStore::empty();
    roots.add(crate::pem::certificates(authority.as_bytes()).unwrap().remove(0)).unwrap();
    let config = ClientConfig::builder_with_provider(crate::provider()).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_client_cert_resolver(Arc::new(thief));
    let connector = TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(at).await.unwrap();
    let connected = connector.connect(ServerName::try_from(NAME).unwrap(), stream).await;
    // In TLS 1.3 the client is done before the server has looked; it learns of it with the first byte.
    let refused = match connected {
        Ok(mut stream) => stream.read_exact(&mut [0]).await.map(drop),
        Err(e) => Err(e),
    };
    assert!(refused.unwrap_err().to_string().contains("alert"));
    assert!(!accepts.is_finished(), "it was no connection");
    accepts.abort();
}
