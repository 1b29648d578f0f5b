//! TLS with one control plane, which is known by the certificate of its authority and by nothing else.
//!
//! Bytes in and out, never waiting. No other authority is believed, whatever the machine or the image trusts; and
//! nothing is said before the other end has proven who it is.

use crate::protocol::CONTROL_PLANE;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// By what the control plane is known.
#[derive(Clone, Debug)]
pub struct Pinned(Arc<ClientConfig>);

impl Pinned {
    /// By the certificate of its authority in PEM.
    ///
    /// # Errors
    /// If it is none.
    pub fn to(authority: &str) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
            let certificate = certificate.map_err(|e| format!("it is no PEM: {e}"))?;
            roots.add(certificate).map_err(|e| format!("it is no certificate of an authority: {e}"))?;
        }
        if roots.is_empty() {
            return Err("it holds no certificate in PEM".to_owned());
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
        let builder = builder.map_err(|e| e.to_string())?;
        Ok(Self(Arc::new(builder.with_root_certificates(roots).with_no_client_auth())))
    }

    /// What is to be said within a new stream.
    ///
    /// # Errors
    /// If the machine gives no random numbers.
    pub fn begin(&self) -> Result<Secured, String> {
        let name = ServerName::try_from(CONTROL_PLANE).map_err(|e| e.to_string())?;
        let connection = ClientConnection::new(self.0.clone(), name).map_err(|e| e.to_string())?;
        Ok(Secured { connection, holds: false })
    }
}

/// What is said within one stream.
#[derive(Debug)]
pub struct Secured {
    connection: ClientConnection,
    holds: bool,
}

impl Secured {
    /// Whether something waits that the stream may take.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.connection.wants_write()
    }

    /// Whether there may be more to read that the stream does not tell of.
    #[must_use]
    pub const fn holds(&self) -> bool {
        self.holds
    }

    /// Takes of `bytes` what there is room for, and writes what the stream takes; returns how many were taken.
    ///
    /// # Errors
    /// If the stream is lost.
    pub fn flush(&mut self, stream: &mut impl Write, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        loop {
            taken += self.connection.writer().write(&bytes[taken..])?;
            if !self.connection.wants_write() {
                return Ok(taken);
            }
            match self.connection.write_tls(stream) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(taken),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads what was said within the stream; 0 at its end.
    ///
    /// # Errors
    /// As the stream's, and with `InvalidData` if the other end is not who it is to be.
    pub fn read(&mut self, stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.connection.reader().read(buffer);
            self.holds = matches!(read, Ok(n) if n == buffer.len());
            match read {
                // Nothing is left of what was read from the stream.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            if self.connection.read_tls(stream)? == 0 {
                return Ok(0);
            }
            self.connection.process_new_packets().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        }
    }
}
