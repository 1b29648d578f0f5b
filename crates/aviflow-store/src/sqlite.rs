//! The store port on SQLite: one file, `store.db`, in a folder of its own.
//!
//! One writer ([`SqliteStore`]) and any number of readers ([`SqliteReader`]), which
//! never wait for each other (WAL); a [`SqliteKeeper`] deletes what is old in between.
//! A commit is one transaction and one fsync.
//!
//! Invariants:
//! - what was acknowledged survives `kill -9` and the loss of power;
//! - a commit checks the term within its transaction, so a writer that was
//!   fenced changes nothing;
//! - numbers of jobs and nodes are never handed out twice, not even after a
//!   restore or once the job is deleted.

mod acts;
mod backup;
mod convert;
mod keep;
mod load;
mod lock;
mod read;
mod schema;
mod usage;
mod write;

#[cfg(test)]
mod kill_tests;
#[cfg(test)]
mod tests;

pub use backup::restore;
pub use keep::SqliteKeeper;
pub use read::SqliteReader;

use crate::convert::uint;
use aviflow_core::model::{Ending, JobId, JobKey};
use aviflow_engine::ports::{Batch, Known, Loaded, Store, StoreError};
use lock::FolderLock;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior};
use schema::sql;
use std::path::{Path, PathBuf};

/// The file's name in the store's folder.
pub const FILE: &str = "store.db";

/// Rows of the journal that are kept.
pub const JOURNAL_ROWS: u64 = 200_000;

/// The writer.
#[derive(Debug)]
pub struct SqliteStore {
    conn: Connection,
    folder: PathBuf,
    journal_rows: u64,
    /// Held for as long as the store is open.
    _lock: Option<FolderLock>,
}

impl SqliteStore {
    /// Opens the store in `folder`, or makes one there, and brings it to this version.
    ///
    /// # Errors
    /// If another process has it open, if it was written by a newer version, or
    /// if the file is not a store or damaged.
    pub fn open(folder: &Path) -> Result<SqliteStore, StoreError> {
        lock::make_folder(folder)?;
        let lock = FolderLock::take(folder)?;
        SqliteStore::open_with(folder, Some(lock))
    }

    /// Opens the store without the folder's lock: only the term protects it then,
    /// which is what the tests of the term need.
    #[cfg(test)]
    pub(crate) fn open_unlocked(folder: &Path) -> Result<SqliteStore, StoreError> {
        SqliteStore::open_with(folder, None)
    }

    fn open_with(folder: &Path, lock: Option<FolderLock>) -> Result<SqliteStore, StoreError> {
        let conn = schema::open_writer(&folder.join(FILE))?;
        Ok(SqliteStore { conn, folder: folder.to_owned(), journal_rows: JOURNAL_ROWS, _lock: lock })
    }

    /// Keeps this many rows of the journal instead of [`JOURNAL_ROWS`].
    #[must_use]
    pub fn with_journal_rows(mut self, rows: u64) -> SqliteStore {
        self.journal_rows = rows;
        self
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What keeps the store from growing, on a connection of its own.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn keeper(&self) -> Result<SqliteKeeper, StoreError> {
        SqliteKeeper::open(&self.folder.join(FILE))
    }

    /// A reader of the same store.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn reader(&self) -> Result<SqliteReader, StoreError> {
        SqliteReader::open(&self.folder)
    }
}

impl Store for SqliteStore {
    fn acquire(&mut self) -> Result<Loaded, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        tx.execute("UPDATE meta SET term = term + 1", []).map_err(sql)?;
        let loaded = load::load(&tx)?;
        tx.commit().map_err(sql)?;
        Ok(loaded)
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        write::check_term(&tx, batch.term)?;
        write::batch(&tx, batch, self.journal_rows)?;
        tx.commit().map_err(sql)
    }

    fn named(&self, key: &JobKey) -> Result<Option<Known>, StoreError> {
        self.conn
            .prepare_cached("SELECT id, namespace, name, phase FROM jobs WHERE namespace = ?1 AND name = ?2")
            .and_then(|mut q| q.query_row((&key.namespace, &key.name), known).optional())
            .map_err(sql)
    }

    fn latest(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<Known>, StoreError> {
        let text = "SELECT id, namespace, name, phase FROM jobs
                    WHERE namespace = ?1 AND work = ?2 AND (?3 IS NULL OR user = ?3) ORDER BY id DESC LIMIT 1";
        self.conn
            .prepare_cached(text)
            .and_then(|mut q| q.query_row((namespace, work, user), known).optional())
            .map_err(sql)
    }
}

fn known(r: &Row<'_>) -> rusqlite::Result<Known> {
    let ended = match r.get_ref(3)?.as_str()? {
        "Succeeded" => Some(Ending::Succeeded),
        "Failed" | "Cancelled" => Some(Ending::Failed),
        _ => None,
    };
    Ok(Known { id: JobId(uint(r.get(0)?)), key: JobKey { namespace: r.get(1)?, name: r.get(2)? }, ended })
}
