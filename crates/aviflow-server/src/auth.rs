//! Who may ask: whoever holds the token, from this machine unless more was allowed.
//!
//! The token is a file that only its owner can read. Whoever can read it could
//! read the store too, so locally its holder is believed about the user's name.

use crate::app::App;
use crate::error::Failure;
use axum::extract::{ConnectInfo, FromRequestParts, Request, State};
use axum::http::request::Parts as RequestParts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Names the user on whose behalf a client asks.
const USER_HEADER: &str = "x-aviflow-user";

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
    fn is(&self, other: &str) -> bool {
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

/// The user on whose behalf a client asks.
#[derive(Clone, Debug)]
pub(crate) struct User(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut RequestParts, _: &S) -> Result<User, Failure> {
        let Some(value) = parts.headers.get(USER_HEADER) else { return Ok(User("unknown".to_owned())) };
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-+@".contains(&b);
        match value.to_str() {
            Ok(name) if !name.is_empty() && name.len() <= 64 && name.bytes().all(plain) => Ok(User(name.to_owned())),
            _ => Err(Failure::bad(format!("the header {USER_HEADER} holds no user name"))
                .help("a user name has at most 64 letters, digits and `._-+@`")),
        }
    }
}

/// Whether the request comes from this machine.
pub(crate) struct Loopback(pub(crate) bool);

impl<S: Sync> FromRequestParts<S> for Loopback {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut RequestParts, _: &S) -> Result<Loopback, Failure> {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
        Ok(Loopback(peer.is_some_and(|ConnectInfo(peer)| peer.ip().is_loopback())))
    }
}

/// Lets through what carries the token and was meant for this host.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let checked = host(&app, request.headers()).and_then(|()| bearer(&app, request.headers()));
    match checked {
        Ok(()) => next.run(request).await,
        Err(failure) => {
            let challenge = failure.status == StatusCode::UNAUTHORIZED;
            let mut response = failure.into_response();
            if challenge {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
            }
            response
        }
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

fn bearer(app: &App, headers: &HeaderMap) -> Result<(), Failure> {
    let given = headers.get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
    let token = given.and_then(|h| {
        let (scheme, token) = h.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let message = match token {
        Some(token) if app.parts.token.is(token) => return Ok(()),
        Some(_) => "the token is not the one of this control plane",
        None => "the request carries no token",
    };
    Err(Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", message).help("log in with `aviflow login`"))
}
