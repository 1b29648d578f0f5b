//! Connections with and without TLS on one port, told apart by their first byte.
//!
//! A handshake that is slow, or never comes, holds up nobody else: where there are too many, those that have said
//! nothing make room for who comes.

use crate::people::AnyCertificate;
use crate::shown::Shown;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The first byte of a handshake. No request of HTTP and no message of an agent begins with it.
const HANDSHAKE: u8 = 0x16;

/// What a connection of which it is not known yet what it is may take.
#[derive(Clone, Copy)]
struct Limits {
    /// Until its first byte.
    first_byte: Duration,
    /// Until it has shaken hands.
    handshake: Duration,
    /// How many there are at a time. Who comes then takes the place of the one that is silent longest; where all
    /// have said something, he waits in the kernel's queue.
    at_once: usize,
}

const LIMITS: Limits = Limits { first_byte: Duration::from_secs(5), handshake: Duration::from_secs(10), at_once: 512 };

/// What is said to who speaks HTTP where TLS is spoken.
const REFUSAL: &[u8] = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n\
    this port speaks TLS: ask for https:// instead of http://\n";

/// What comes of a connection without TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// It is served: its client is of a version that knows no TLS.
    Served,
    /// It is told to come again with TLS.
    Refused,
}

/// How a listener speaks TLS.
#[derive(Clone)]
pub struct Speech {
    acceptor: TlsAcceptor,
    plain: Plain,
}

impl Speech {
    /// For clients that show no certificate, such as agents.
    ///
    /// # Errors
    /// If the protocol's versions and the cryptography do not go together.
    pub fn to_agents(shown: Arc<Shown>) -> Result<Speech, String> {
        let config = config()?.with_no_client_auth().with_cert_resolver(shown);
        Ok(Speech { acceptor: TlsAcceptor::from(Arc::new(config)), plain: Plain::Served })
    }

    /// For people, who may show a certificate.
    ///
    /// # Errors
    /// If the protocol's versions and the cryptography do not go together.
    pub fn to_people(shown: Arc<Shown>) -> Result<Speech, String> {
        let mut config = config()?.with_client_cert_verifier(Arc::new(AnyCertificate)).with_cert_resolver(shown);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Speech { acceptor: TlsAcceptor::from(Arc::new(config)), plain: Plain::Refused })
    }
}

fn config() -> Result<rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier>, String> {
    let builder = ServerConfig::builder_with_provider(crate::provider()).with_safe_default_protocol_versions();
    builder.map_err(|e| format!("TLS cannot be spoken: {e}"))
}

/// A listener. Without a [`Speech`] all its connections are plain.
pub struct Listener {
    tcp: TcpListener,
    speech: Option<Speech>,
    limits: Limits,
    coming: Mutex<Coming>,
}

/// Connections of which it is not known yet what they are.
#[derive(Default)]
struct Coming {
    all: JoinSet<Option<(Stream, SocketAddr)>>,
    /// Those that have said nothing, in the order in which they came. Whoever has, holds its `()` no more.
    silent: VecDeque<(AbortHandle, Weak<()>)>,
}

impl Coming {
    /// Whether another may come.
    fn has_room(&mut self, at_once: usize) -> bool {
        self.silent.retain(|(_, silent)| silent.strong_count() > 0);
        self.all.len() < at_once || !self.silent.is_empty()
    }

    /// Takes another in; one that says nothing makes room for it, if there is none.
    fn take(&mut self, (stream, peer): (TcpStream, SocketAddr), speech: Speech, limits: Limits) {
        if self.has_room(limits.at_once)
            && self.all.len() >= limits.at_once
            && let Some((oldest, _)) = self.silent.pop_front()
        {
            oldest.abort();
        }
        let silent = Arc::new(());
        let still = Arc::downgrade(&silent);
        let task = self.all.spawn(async move {
            let begun = Instant::now();
            let first = tokio::time::timeout(limits.first_byte, first_byte(&stream)).await.ok()??;
            drop(silent);
            let rest = limits.handshake.saturating_sub(begun.elapsed());
            let stream = tokio::time::timeout(rest, speech.begin(stream, first)).await.ok()??;
            Some((stream, peer))
        });
        self.silent.push_back((task, still));
    }
}

/// What a client says first, which is left to be read; none if it is gone.
async fn first_byte(stream: &TcpStream) -> Option<u8> {
    let mut first = [0];
    (stream.peek(&mut first).await.ok()? > 0).then_some(first[0])
}

impl Listener {
    /// Listens with TLS where it is said how.
    #[must_use]
    pub fn new(tcp: TcpListener, speech: Option<Speech>) -> Listener {
        Listener { tcp, speech, limits: LIMITS, coming: Mutex::default() }
    }

    /// Its address.
    ///
    /// # Errors
    /// If it has none.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// The next connection, ready to be spoken over. Dropped before it completes, it loses none.
    ///
    /// # Errors
    /// If there can be none now, such as for want of files.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let mut coming = self.coming.lock().await;
        loop {
            let room = coming.has_room(self.limits.at_once);
            tokio::select! {
                accepted = self.tcp.accept(), if room => {
                    let (stream, peer) = accepted?;
                    let Some(speech) = self.speech.clone() else { return Ok((Stream::Plain(stream), peer)) };
                    coming.take((stream, peer), speech, self.limits);
                }
                Some(done) = coming.all.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return Ok(connection);
                    }
                }
            }
        }
    }
}

impl Speech {
    /// What a connection turns out to be that begins with this byte; none if it is over.
    async fn begin(self, mut stream: TcpStream, first: u8) -> Option<Stream> {
        stream.set_nodelay(true).ok()?;
        if first == HANDSHAKE {
            let stream = self.acceptor.accept(stream).await.ok()?;
            return Some(Stream::Tls(Box::new(stream)));
        }
        match self.plain {
            Plain::Served => Some(Stream::Plain(stream)),
            Plain::Refused => {
                // What he has said is read, as otherwise the answer might not reach him.
                let _ = stream.try_read(&mut [0; 4096]);
                let _ = stream.write_all(REFUSAL).await;
                let _ = stream.shutdown().await;
                None
            }
        }
    }
}

impl From<TcpListener> for Listener {
    fn from(tcp: TcpListener) -> Listener {
        Listener::new(tcp, None)
    }
}

impl axum::serve::Listener for Listener {
    type Io = Stream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Stream, SocketAddr) {
        loop {
            match Listener::accept(self).await {
                Ok(accepted) => return accepted,
                // Too many open files, for example: those that wait stay in the queue.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Listener::local_addr(self)
    }
}

/// What a request's connection is.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Where it comes from.
    pub peer: SocketAddr,
    /// The client's certificate with those above it, whose key it has proven to have, and nothing else; empty where
    /// it showed none.
    pub certificates: Arc<[CertificateDer<'static>]>,
}

impl From<SocketAddr> for Connection {
    /// One without a certificate.
    fn from(peer: SocketAddr) -> Connection {
        Connection { peer, certificates: Arc::default() }
    }
}

impl Connected<IncomingStream<'_, Listener>> for Connection {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Connection {
        Connection { peer: *stream.remote_addr(), certificates: stream.io().certificates() }
    }
}

/// A connection.
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// With it.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn certificates(&self) -> Arc<[CertificateDer<'static>]> {
        match self {
            Stream::Plain(_) => Arc::default(),
            Stream::Tls(stream) => stream.get_ref().1.peer_certificates().unwrap_or_default().into(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests;
