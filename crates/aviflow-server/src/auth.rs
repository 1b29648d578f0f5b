//! The token of the control plane's own folder, and which hosts it answers for.
//!
//! The token is a file that only its owner can read.

use crate::app::App;
use crate::error::Failure;
use aviflow_tls::{CertificateDer, Connection};
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request::Parts as RequestParts;
use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The bearer token. Shows nothing of itself.
#[derive(Clone)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file could not be read or made.
    #[error("the token file {} cannot be used: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        error: std::io::Error,
    },
    /// Others can read it.
    #[error(
        "the token file {} can be read by others (mode {mode:o}); delete it, so that a new one is made, and log in again",
        path.display()
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Nothing in it.
    #[error("the token file {} holds no token; delete it, so that a new one is made", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
    },
}

impl Token {
    /// The token of a file, which is made with a random one if it is not there.
    ///
    /// # Errors
    /// If the file cannot be used, or if others can read it.
    pub fn load_or_create(path: &Path) -> Result<Token, TokenError> {
        let io = |error| TokenError::Io { path: path.to_owned(), error };
        match Token::load(path) {
            Err(TokenError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {
                create(path).map_err(io)?;
                Token::load(path)
            }
            other => other,
        }
    }

    /// The token of a file that is there.
    ///
    /// # Errors
    /// If the file cannot be read, or if others can read it.
    pub fn load(path: &Path) -> Result<Token, TokenError> {
        let io = |error| TokenError::Io { path: path.to_owned(), error };
        let mut file = File::open(path).map_err(io)?;
        let mode = file.metadata().map_err(io)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Open { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(io)?;
        let text = text.trim();
        if text.len() < 16 {
            return Err(TokenError::Empty { path: path.to_owned() });
        }
        Ok(Token(text.to_owned()))
    }

    /// The token itself, for a client on the same machine.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compares hashes, whose bytes say nothing of the token, and all of them.
    pub(crate) fn is(&self, other: &str) -> bool {
        let (ours, theirs) = (Sha256::digest(&self.0), Sha256::digest(other));
        ours.iter().zip(theirs.iter()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

/// Written whole under another name and linked, so that of two that do this at
/// once both read one token, and nobody reads half of one.
fn create(path: &Path) -> std::io::Result<()> {
    let mut random = [0u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    let text = format!("{}\n", aviflow_api::environment::hex(&random));
    let temporary = path.with_extension(format!("{}.new", std::process::id()));
    // Left behind by a process of the same number that died here.
    let _ = std::fs::remove_file(&temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let made = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let linked = made.and_then(|()| std::fs::hard_link(&temporary, path));
    std::fs::remove_file(&temporary)?;
    match linked {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Where a request comes from.
pub(crate) struct Origin {
    /// Whether it comes from this machine.
    pub(crate) here: bool,
    /// What the client has shown of itself.
    pub(crate) certificates: Arc<[CertificateDer<'static>]>,
}

impl<S: Sync> FromRequestParts<S> for Origin {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut RequestParts, _: &S) -> Result<Origin, Failure> {
        Ok(match parts.extensions.get::<ConnectInfo<Connection>>() {
            Some(ConnectInfo(Connection { peer, certificates })) => {
                Origin { here: peer.ip().is_loopback(), certificates: certificates.clone() }
            }
            None => Origin { here: false, certificates: Arc::default() },
        })
    }
}

/// A page in a browser can make any name point to this machine; the browser then says that name.
pub(crate) fn host(app: &App, headers: &HeaderMap) -> Result<(), Failure> {
    let config = &app.parts.config;
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.is_empty() => name,
        _ => host,
    };
    let loopback = matches!(name, "localhost" | "127.0.0.1" | "[::1]");
    let any = config.allow_remote && config.hosts.is_empty();
    if loopback || any || config.hosts.iter().any(|h| h.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    let message = format!("this control plane is not called `{name}`");
    Err(Failure::new(StatusCode::FORBIDDEN, "wrongHost", message)
        .help("ask for `localhost` or 127.0.0.1, or add the name to `hosts` in the server's configuration"))
}
