//! Connections: the address, what a session is set to, and what its errors mean.
//!
//! Calls block; the connections themselves are driven by a thread of their own, so
//! that they may be used from any thread that may block.

use super::convert::{Value, params};
use super::{schema, tls};
use crate::convert::failed;
use aviflow_engine::ports::StoreError;
use std::future::Future;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{Client, Config, Row, SimpleQueryMessage};
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_stream::StreamExt;

/// Sessions that wait for the next query; more are opened while more run at once.
const IDLE_SESSIONS: usize = 8;

/// How long one attempt to connect may take, where the address does not say.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a server may be silent on the network before it counts as gone, where the address does not say.
const SILENCE: Duration = Duration::from_secs(15);

/// What tokio-postgres has where the address does not say.
const UNSET_KEEPALIVE: Duration = Duration::from_secs(2 * 60 * 60);

/// Of all sessions. A transaction whose client is gone gives its locks back after ten seconds.
const SETTINGS: &str = "SET search_path = aviflow, pg_catalog;
    SET idle_in_transaction_session_timeout = '10s';
    SET client_min_messages = warning;";

/// What a session must know of its server.
const FACTS: &str = "SELECT current_setting('server_version_num')::int8, current_setting('server_encoding'),
    current_setting('synchronous_commit'), to_regclass('aviflow.meta') IS NOT NULL";

/// A statement failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The connection is gone, for this reason.
    Lost(String),
    /// The server is there and refused.
    Refused(StoreError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Trouble {
        Trouble::Refused(error)
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Trouble {
        let io = std::error::Error::source(&error).is_some_and(|s| s.is::<std::io::Error>());
        let fatal = |severity| matches!(severity, Some(Severity::Fatal | Severity::Panic));
        match error.as_db_error() {
            Some(db) if fatal(db.parsed_severity()) => Trouble::Lost(db.message().to_owned()),
            Some(db) if *db.code() == SqlState::DISK_FULL => {
                Trouble::Refused(StoreError::Full(db.message().to_owned()))
            }
            Some(db) => Trouble::Refused(failed(format!("{} ({})", db.message(), db.code().code()))),
            None if io || error.is_closed() => Trouble::Lost(words(&error)),
            None => Trouble::Refused(failed(words(&error))),
        }
    }
}

/// An error with what is behind it, as tokio-postgres says little by itself.
fn words(error: &tokio_postgres::Error) -> String {
    let mut out = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        out.push_str(&format!(": {error}"));
        source = error.source();
    }
    out
}

/// What a server said that lets nobody in, or why it could not be asked.
fn said(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| words(error), |db| db.message().to_owned())
}

/// Where the database is, and sessions that wait for a query.
pub(super) struct Database {
    runtime: Option<Runtime>,
    config: Config,
    tls: MakeRustlsConnect,
    /// The address without its password.
    shown: String,
    idle: Mutex<Vec<Session>>,
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Database").field(&self.shown).finish()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // Nothing is under way any more, and this may be a thread that must not wait.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A connection that is set up.
pub(super) struct Session {
    pub(super) client: Client,
    /// The version of the store that was there when it connected.
    pub(super) version: Option<u32>,
}

impl Database {
    /// Understands the address; connects to nothing yet.
    pub(super) fn at(url: &str) -> Result<Arc<Database>, StoreError> {
        let (config, tls) = config(url)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("postgres").enable_all().build();
        let runtime = runtime.map_err(|e| failed(format!("threads cannot be started: {e}")))?;
        let shown = shown(&config);
        Ok(Arc::new(Database { runtime: Some(runtime), config, tls, shown, idle: Mutex::default() }))
    }

    /// The address without its password.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Waits for it; not to be called where waiting is forbidden.
    pub(super) fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T, StoreError> {
        // It is there until this is dropped.
        let runtime = self.runtime.as_ref().ok_or_else(|| failed("the database is closed"))?;
        Ok(runtime.block_on(work))
    }

    /// A new session.
    pub(super) async fn connect(&self) -> Result<Session, StoreError> {
        let (client, connection) = match self.config.connect(self.tls.clone()).await {
            Err(e) if self.config.get_ssl_mode() == SslMode::Prefer && tls::is_in_the_way(&e) => {
                let mut plain = self.config.clone();
                plain.ssl_mode(SslMode::Disable);
                let connected = plain.connect(self.tls.clone()).await;
                connected.map_err(|plain| self.unreachable(&format!("{}; without TLS: {}", said(&e), said(&plain))))?
            }
            connected => connected.map_err(|e| self.unreachable(&said(&e)))?,
        };
        // Its errors reach whoever waits for an answer.
        tokio::spawn(async move { drop(connection.await) });
        Session::set_up(client).await.map_err(|trouble| self.error(trouble))
    }

    fn unreachable(&self, why: &str) -> StoreError {
        failed(format!("cannot connect to {}: {why}; see that it runs and lets this user in", self.shown))
    }

    /// What to say of a statement that failed.
    pub(super) fn error(&self, trouble: Trouble) -> StoreError {
        match trouble {
            Trouble::Lost(why) => failed(format!("the connection to {} was lost ({why})", self.shown)),
            Trouble::Refused(StoreError::Failed(why)) => failed(format!("{}: {why}", self.shown)),
            Trouble::Refused(other) => other,
        }
    }

    /// Runs queries that change nothing, on a session of their own. One that waited may have
    /// been closed since; then they run again on a new one.
    pub(super) fn read<T>(&self, query: impl AsyncFn(&Session) -> Result<T, Trouble>) -> Result<T, StoreError> {
        self.wait(async {
            let waiting = || self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            while let Some(session) = waiting() {
                match query(&session).await {
                    Err(Trouble::Lost(_)) => {}
                    other => return self.keep(session, other),
                }
            }
            let session = self.connect().await?;
            schema::current(session.version).map_err(|e| self.error(e.into()))?;
            let result = query(&session).await;
            self.keep(session, result)
        })?
    }

    fn keep<T>(&self, session: Session, result: Result<T, Trouble>) -> Result<T, StoreError> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if result.is_ok() && idle.len() < IDLE_SESSIONS {
            idle.push(session);
        }
        result.map_err(|trouble| self.error(trouble))
    }
}

impl Session {
    async fn set_up(client: Client) -> Result<Session, Trouble> {
        client.batch_execute(SETTINGS).await?;
        let mut session = Session { client, version: None };
        let facts = session.simple(FACTS).await?;
        let fact = |index: usize| facts.get(index).map_or("", String::as_str);
        if fact(0).parse().unwrap_or(0) < 130_000 {
            return Err(failed("it is older than PostgreSQL 13; upgrade it first").into());
        }
        if fact(1) != "UTF8" {
            let why = format!("its encoding is {}; create the database with ENCODING 'UTF8'", fact(1));
            return Err(failed(why).into());
        }
        if fact(2) == "off" {
            // What was acknowledged must survive a loss of power.
            session.client.batch_execute("SET synchronous_commit = on").await?;
        }
        if fact(3) == "t" {
            session.version = Some(schema::version(&session).await?);
        }
        Ok(session)
    }

    /// The first row of the last statement of `text`, as text; NULL is empty. One round trip.
    pub(super) async fn simple(&self, text: &str) -> Result<Vec<String>, Trouble> {
        let answer = self.client.simple_query(text).await?;
        let row = answer.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let Some(row) = row else { return Err(failed("the store has lost its first row; restore a backup").into()) };
        Ok((0..row.len()).map(|i| row.get(i).unwrap_or_default().to_owned()).collect())
    }

    /// The rows of a query.
    pub(super) async fn query(&self, text: &str, values: &[Value]) -> Result<Vec<Row>, Trouble> {
        Ok(self.client.query_typed(text, &params(values)).await?)
    }

    /// Calls `f` with each row as it arrives, so that not all are held at once.
    pub(super) async fn each(
        &self,
        text: &str,
        values: &[Value],
        mut f: impl FnMut(&Row) -> Result<(), StoreError>,
    ) -> Result<(), Trouble> {
        let mut rows = pin!(self.client.query_typed_raw(text, params(values)).await?);
        while let Some(row) = rows.next().await {
            f(&row?)?;
        }
        Ok(())
    }

    /// Runs a statement; returns how many rows it changed.
    pub(super) async fn execute(&self, text: &str, values: &[Value]) -> Result<u64, Trouble> {
        Ok(self.client.execute_typed(text, &params(values)).await?)
    }
}

/// Understands an address and refuses what would not be as it says.
fn config(url: &str) -> Result<(Config, MakeRustlsConnect), StoreError> {
    let what = "write postgres://USER:PASSWORD@HOST:PORT/DATABASE";
    let (url, asked) = tls::taken(url);
    let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
        // It never quotes a value, only the name of what it does not know.
        failed(format!("the database's address cannot be read: {}; {what}", words(&e)))
    })?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let (mode, tls) = tls::connector(&asked, home.as_deref())?;
    let sockets = config.get_hosts().iter().filter(|host| matches!(host, Host::Unix(_))).count();
    if sockets > 0 && !config.get_hostaddrs().is_empty() {
        // It is the IP address that would be connected to, and nothing would say whose certificate is meant.
        return Err(failed(
            "the database's address names the folder of a socket and an IP address, hostaddr, at once; leave \
             hostaddr out, or name the host that its certificate is for instead of the folder",
        ));
    }
    let local = sockets > 0 && sockets == config.get_hosts().len();
    config.ssl_mode(if local { SslMode::Disable } else { mode });
    if config.get_hosts().is_empty() {
        if config.get_hostaddrs().is_empty() {
            return Err(failed(format!("the database's address names no host; {what}")));
        }
        // Without a name, an IP address is one: that its certificate is to be for.
        for address in config.get_hostaddrs().to_vec() {
            config.host(address.to_string());
        }
    }
    if config.get_application_name().is_none() {
        config.application_name("aviflow");
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(SILENCE);
    }
    if config.get_keepalives_idle() == UNSET_KEEPALIVE {
        config.keepalives_idle(SILENCE / 3).keepalives_interval(SILENCE / 3).keepalives_retries(2);
    }
    // Of several hosts, the one that writes: a standby is behind the last commit.
    config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    Ok((config, tls))
}

/// The address for people: never its password.
fn shown(config: &Config) -> String {
    let port = |index: usize| {
        let ports = config.get_ports();
        ports.get(index).or(ports.first()).copied().unwrap_or(5432)
    };
    let named = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        Host::Unix(folder) => folder.display().to_string(),
    });
    let hosts: Vec<String> = named.enumerate().map(|(i, host)| format!("{host}:{}", port(i))).collect();
    let user = config.get_user().map_or(String::new(), |user| format!("{user}@"));
    let name = config.get_dbname().or(config.get_user()).unwrap_or_default();
    format!("postgres://{user}{}/{name}", hosts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_password() {
        let cases = [
            ("postgres://ada:s3cret@db:6000/flow", "postgres://ada@db:6000/flow"),
            ("postgresql://ada:s3cret@db,other/flow?sslmode=prefer", "postgres://ada@db:5432,other:5432/flow"),
            ("postgres://ada@db?password=s3cret", "postgres://ada@db:5432/ada"),
            ("postgres:///flow?host=/run/postgresql&user=ada", "postgres://ada@/run/postgresql:5432/flow"),
            (
                "postgres:///flow?hostaddr=192.0.2.7,2001:db8::7&user=ada",
                "postgres://ada@192.0.2.7:5432,2001:db8::7:5432/flow",
            ),
        ];
        for (url, expected) in cases {
            let database = Database::at(url).unwrap();
            assert_eq!(database.shown(), expected);
            assert!(!format!("{database:?}").contains("s3cret"));
        }
    }

    #[test]
    fn an_address_that_cannot_be_kept_is_refused_and_its_password_not_said() {
        let cases = [
            ("postgres://ada:s3cret@db/flow?sslmode=verify-full", "names no certificates"),
            ("postgres://ada:s3cret@db/flow?sslmode=s3cret", "sslmode"),
            ("postgres://ada:s3cret@db:s3cret/flow", "port"),
            ("postgres://ada:s3cret@db/flow?sslcert=s3cret", "sslcert"),
            ("postgres:///flow", "names no host"),
            ("postgres:///flow?host=/run&hostaddr=192.0.2.7&password=s3cret", "a socket and an IP address"),
        ];
        for (url, expected) in cases {
            let e = Database::at(url).unwrap_err().to_string();
            assert!(e.contains(expected) && !e.contains("s3cret"), "{e}");
        }
    }
}
