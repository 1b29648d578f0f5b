//! TLS of the control plane: its own authority, what it shows to whom, and whom it believes.
//!
//! It knows certificates and connections, and nothing of Kubernetes, of jobs or of files: who keeps an authority
//! and where is for others to say.
//!
//! | module | what it is |
//! |---|---|
//! | [`authority`] | an authority that signs the control plane's own certificates |
//! | [`pem`] | certificates and keys as people write them |
//! | [`shown`] | which certificate a client sees |
//! | [`people`] | whose a client's certificate is |
//! | [`listener`] | connections with and without TLS on one port |
//!
//! Invariants: a key is never shown, not in errors either; a certificate that is no good is refused with why, and
//! never taken for none; TLS below 1.2 is not spoken.

pub mod authority;
pub mod listener;
pub mod pem;
pub mod people;
pub mod shown;

pub use authority::Authority;
pub use listener::{Connection, Listener, Plain, Stream};
pub use people::{Authorities, Person};
pub use rustls::pki_types::{CertificateDer, ServerName};
pub use shown::Shown;

use rustls::crypto::CryptoProvider;
use std::sync::Arc;

/// The one cryptography that is used: no process-wide default is looked for.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
