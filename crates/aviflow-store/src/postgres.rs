//! The store port on PostgreSQL, for control planes on several machines.
//!
//! One writer ([`PostgresStore`]) and any number of readers ([`PostgresReader`]); a
//! [`PostgresKeeper`] deletes what is old. A commit is one transaction in three
//! round trips: lock and look, write everything, commit.
//!
//! Whoever writes first locks the one row of `meta`, so writers come one after the
//! other, and what a commit finds there (version, term, generation) holds until it
//! ends. COMMIT is sent only once everything else was answered. So where a connection
//! is lost before, nothing was written; and where it is lost after, the transaction
//! holds the lock until it has ended one way or the other, and whoever gets the lock
//! next can see which.
//!
//! Invariants:
//! - what was acknowledged survives a crash of the database;
//! - a writer that was fenced changes nothing, and takes the store no more: of two
//!   control planes that each think they hold it, one ends;
//! - a batch is written once or not at all, and reported as what it was, unless the
//!   database stays away: then the error says that nobody knows;
//! - numbers of rows, jobs and nodes are never handed out twice.

mod connect;
mod convert;
mod keep;
mod load;
mod read;
mod schema;
mod tls;
mod write;

#[cfg(test)]
mod cut_tests;
#[cfg(test)]
mod tests;

pub use keep::PostgresKeeper;
pub use read::PostgresReader;

use crate::convert::{failed, int, uint};
use crate::sqlite::JOURNAL_ROWS;
use aviflow_core::model::{Ending, JobId, JobKey};
use aviflow_engine::ports::{Batch, Known, Loaded, Store, StoreError};
use connect::{Database, Session, Trouble};
use convert::{Value, get, text};
use std::sync::Arc;
use std::time::{Duration, Instant};
use write::Numbers;

/// How long a commit whose outcome is unknown waits for the database to come back.
const SETTLE: Duration = Duration::from_secs(10);

/// Between two attempts to find out.
const SETTLE_PAUSE: Duration = Duration::from_millis(200);

/// Terms that are remembered, so that who was fenced finds what became of its last commit.
const TERMS: i64 = 1000;

/// The writer.
pub struct PostgresStore {
    database: Arc<Database>,
    session: Option<Session>,
    journal_rows: u64,
    /// What this writer is called in the list of terms, `NAME IDENTITY`: nobody else ever is.
    holder: String,
    /// The last term that it took.
    term: Option<u64>,
    /// As [`SETTLE`].
    settle: Duration,
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresStore").field("database", &self.database).field("term", &self.term).finish()
    }
}

/// Why a commit is not known to be written.
enum Unwritten {
    /// It is not: the store refused it.
    Refused(StoreError),
    /// It is not: the connection was lost before it could be.
    Before(String),
    /// The connection was lost while it was: nobody knows.
    During(String),
}

impl Unwritten {
    fn before(trouble: Trouble, database: &Database) -> Unwritten {
        match trouble {
            Trouble::Lost(why) => Unwritten::Before(why),
            refused @ Trouble::Refused(_) => Unwritten::Refused(database.error(refused)),
        }
    }
}

impl PostgresStore {
    /// Connects to the database of an address, `postgres://USER:PASSWORD@HOST:PORT/DATABASE`.
    /// Nothing is changed there before the store is taken.
    ///
    /// # Errors
    /// If the address cannot be understood, the database does not answer, or its store was
    /// written by a newer version.
    pub fn open(url: &str) -> Result<PostgresStore, StoreError> {
        let database = Database::at(url)?;
        let session = database.wait(database.connect())??;
        let name = "SELECT gen_random_uuid()::text";
        let holder = database.wait(session.simple(name))?.map_err(|trouble| database.error(trouble))?;
        let holder = format!(" {}", holder.first().map_or("", String::as_str));
        Ok(PostgresStore {
            database,
            session: Some(session),
            journal_rows: JOURNAL_ROWS,
            holder,
            term: None,
            settle: SETTLE,
        })
    }

    /// Is called so where it took the store from another.
    #[must_use]
    pub fn called(mut self, name: &str) -> PostgresStore {
        let (_, identity) = self.holder.rsplit_once(' ').unwrap_or_default();
        self.holder = format!("{name} {identity}");
        self
    }

    /// Keeps this many rows of the journal instead of [`JOURNAL_ROWS`].
    #[must_use]
    pub fn with_journal_rows(mut self, rows: u64) -> PostgresStore {
        self.journal_rows = rows;
        self
    }

    /// The address, without its password.
    #[must_use]
    pub fn shown(&self) -> &str {
        self.database.shown()
    }

    /// What keeps the store from growing.
    #[must_use]
    pub fn keeper(&self) -> PostgresKeeper {
        PostgresKeeper::new(Arc::clone(&self.database))
    }

    /// A reader of the same store.
    #[must_use]
    pub fn reader(&self) -> PostgresReader {
        PostgresReader::new(Arc::clone(&self.database))
    }

    /// The session, or a new one where it is gone.
    async fn session(&mut self) -> Result<Session, StoreError> {
        match self.session.take() {
            Some(session) if !session.client.is_closed() => Ok(session),
            _ => self.database.connect().await,
        }
    }

    async fn take(&mut self) -> Result<Loaded, StoreError> {
        let session = self.session().await?;
        match self.take_on(&session).await {
            Ok(loaded) => {
                self.term = Some(loaded.term.0);
                self.session = Some(session);
                Ok(loaded)
            }
            // With the session its transaction ends.
            Err(trouble) => Err(self.database.error(trouble)),
        }
    }

    async fn take_on(&self, session: &Session) -> Result<Loaded, Trouble> {
        session.client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
        schema::update(session).await?;
        let held = session.simple("SELECT term FROM meta FOR UPDATE").await?;
        if let Some(ours) = self.term {
            // The term may be one that this writer took without ever hearing so.
            let holder = holder(session).await?;
            if holder != self.holder {
                let held = held[0].parse().unwrap_or_default();
                return Err(StoreError::Fenced { ours, held, by: name(&holder) }.into());
            }
        }
        session.client.batch_execute("UPDATE meta SET term = term + 1").await?;
        let text = "INSERT INTO terms (term, holder, generation) SELECT term, $1, generation FROM meta";
        session.execute(text, &[Value::text(&self.holder)]).await?;
        let text = "DELETE FROM terms WHERE term <= (SELECT term FROM meta) - $1";
        session.execute(text, &[Value::Int(TERMS)]).await?;
        let loaded = load::load(session).await?;
        session.client.batch_execute("COMMIT").await?;
        Ok(loaded)
    }

    async fn put(&mut self, batch: &Batch) -> Result<(), Unwritten> {
        let session = self.session().await.map_err(Unwritten::Refused)?;
        let result = self.put_on(&session, batch).await;
        // Where it was refused the transaction is still open; with the session it ends.
        if result.is_ok() {
            self.session = Some(session);
        }
        result
    }

    async fn put_on(&self, session: &Session, batch: &Batch) -> Result<(), Unwritten> {
        let before = |trouble| Unwritten::before(trouble, &self.database);
        let numbers = begin(session, batch).await.map_err(before)?;
        write::batch(session, batch, numbers, self.journal_rows).await.map_err(before)?;
        session.client.batch_execute("COMMIT").await.map_err(|e| match Trouble::from(e) {
            Trouble::Lost(why) => Unwritten::During(why),
            // Whatever it was, the store knows whether it is written.
            Trouble::Refused(error) => Unwritten::During(error.to_string()),
        })
    }

    /// Whether a batch was written whose COMMIT was sent and not answered. Waits until the
    /// transaction that had it is over.
    async fn settle(&mut self, batch: &Batch, why: &str) -> Result<bool, StoreError> {
        let until = Instant::now() + self.settle;
        loop {
            let looked = match self.session().await {
                Ok(session) => {
                    let looked = written(&session, batch).await;
                    if looked.is_ok() {
                        self.session = Some(session);
                    }
                    looked.map_err(|trouble| self.database.error(trouble))
                }
                Err(error) => Err(error),
            };
            match looked {
                Err(StoreError::Failed(_)) if Instant::now() < until => tokio::time::sleep(SETTLE_PAUSE).await,
                Err(StoreError::Failed(error)) => {
                    return Err(failed(format!(
                        "the connection was lost during a commit ({why}), and then {error}; whether that commit was \
                         written is found out when the database answers again"
                    )));
                }
                other => return other,
            }
        }
    }
}

/// Who took the store last.
async fn holder(session: &Session) -> Result<String, Trouble> {
    let found = session.simple("SELECT holder FROM aviflow.terms ORDER BY term DESC LIMIT 1").await?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// What a holder calls itself, if it does. An earlier version had no names.
fn name(holder: &str) -> Option<String> {
    holder.rsplit_once(' ').map(|(name, _)| name.to_owned()).filter(|name| !name.is_empty())
}

/// Begins the transaction of a commit, and checks that it may be one.
async fn begin(session: &Session, batch: &Batch) -> Result<Numbers, Trouble> {
    let text = "BEGIN ISOLATION LEVEL READ COMMITTED;
        SELECT version, term, generation, last_entry, last_moment, last_act, last_journal FROM meta FOR UPDATE";
    let found = session.simple(text).await?;
    schema::current(Some(schema::known(&found[0])?))?;
    let number = |index: usize| found[index].parse::<i64>().unwrap_or_default();
    let (held, last) = (uint(number(1)), uint(number(2)));
    if held != batch.term.0 {
        return Err(StoreError::Fenced { ours: batch.term.0, held, by: name(&holder(session).await?) }.into());
    }
    if batch.generation != last + 1 {
        return Err(failed(format!(
            "commit {} does not follow commit {last}; start the control plane again so that it reads the store",
            batch.generation
        ))
        .into());
    }
    Ok(Numbers { entry: number(3), moment: number(4), act: number(5), journal: number(6) })
}

/// Whether the batch is in the store, once no transaction is under way.
async fn written(session: &Session, batch: &Batch) -> Result<bool, Trouble> {
    // Two statements: the second sees what was committed while the first waited.
    let lock = "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT generation FROM meta FOR UPDATE";
    let last = session.simple(lock).await?[0].parse::<u64>().unwrap_or_default();
    let after = "SELECT generation FROM terms WHERE term > $1 ORDER BY term LIMIT 1";
    let after = session.query(after, &[Value::Int(int(batch.term.0))]).await?;
    // Commits up to the next term's first were of this term or of one before.
    let last = after.first().map(|row| get(row, 0).map(uint)).transpose()?.unwrap_or(last);
    session.client.batch_execute("COMMIT").await?;
    Ok(last >= batch.generation)
}

impl Store for PostgresStore {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        let database = Arc::clone(&self.database);
        database.wait(self.take())?
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        let database = Arc::clone(&self.database);
        database.wait(async {
            let mut again = true;
            loop {
                let why = match self.put(batch).await {
                    Ok(()) => return Ok(()),
                    Err(Unwritten::Refused(error)) => return Err(error),
                    Err(Unwritten::Before(why)) => why,
                    Err(Unwritten::During(why)) if self.settle(batch, &why).await? => return Ok(()),
                    Err(Unwritten::During(why)) => why,
                };
                // An idle connection is often closed by others: one more, on a new one.
                if !std::mem::take(&mut again) {
                    let lost = self.database.error(Trouble::Lost(why));
                    return Err(failed(format!("{lost}; nothing of the commit was written")));
                }
            }
        })?
    }

    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
        let text = "SELECT id, namespace, name, phase FROM jobs WHERE namespace = $1 AND name = $2";
        self.known(text, &[Value::text(&key.namespace), Value::text(&key.name)])
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        let text = "SELECT id, namespace, name, phase FROM jobs
                    WHERE namespace = $1 AND work = $2 AND ($3 IS NULL OR \"user\" = $3) ORDER BY id DESC LIMIT 1";
        self.known(text, &[Value::text(namespace), Value::text(work), Value::opt_text(user)])
    }
}

impl PostgresStore {
    fn known(&self, query: &str, values: &[Value]) -> Result<Option<Known>, StoreError> {
        let rows = self.database.read(async |session| session.query(query, values).await)?;
        let Some(row) = rows.first() else { return Ok(None) };
        let ended = match get(row, 3)? {
            "Succeeded" => Some(Ending::Succeeded),
            "Failed" | "Cancelled" => Some(Ending::Failed),
            _ => None,
        };
        let key = JobKey { namespace: text(row, 1)?, name: text(row, 2)? };
        Ok(Some(Known { id: JobId(uint(get(row, 0)?)), key, ended }))
    }
}
