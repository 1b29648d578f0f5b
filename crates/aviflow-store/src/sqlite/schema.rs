//! Opening the file, its versions, and SQLite's errors in the port's words.
//!
//! The version is SQLite's `user_version`: the number of the last migration.

use crate::convert::failed;
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// One after the other, never changed once released.
const MIGRATIONS: &[&str] =
    &[include_str!("../../migrations/0001_initial.sql"), include_str!("../../migrations/0002_queues_pools_acts.sql")];

/// Marks the file as a store (`Avfl`), so that somebody else's SQLite file is never taken for one.
const APPLICATION_ID: i32 = 0x4176_666c;

/// Statements that a commit and a reader keep prepared.
const CACHED_STATEMENTS: usize = 64;

/// How long to wait for a lock of SQLite's own: a checkpoint or a fenced writer's last commit.
const BUSY: Duration = Duration::from_secs(10);

/// An error of SQLite.
pub(super) fn sql(e: rusqlite::Error) -> StoreError {
    match e.sqlite_error() {
        Some(code) if code.code == ErrorCode::DiskFull => StoreError::Full(e.to_string()),
        // The shared memory of the WAL could not grow: no space, under another name.
        Some(code) if code.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE => StoreError::Full(e.to_string()),
        Some(code) if matches!(code.code, ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            failed(format!("{e}; the file is damaged or is no store, restore a backup"))
        }
        _ => failed(e),
    }
}

/// Opens the file for writing, makes it if it is missing, and brings it to this version.
pub(super) fn open_writer(path: &Path) -> Result<Connection, StoreError> {
    // SQLite gives the WAL the mode of the file, so the file comes first.
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| failed(format!("cannot open {}: {e}", path.display())))?;
    let named = |e: StoreError| at_path(e, path);
    let mut conn =
        Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)
            .map_err(sql)
            .map_err(named)?;
    (|| {
        conn.busy_timeout(BUSY).map_err(sql)?;
        let found = check(&conn, MIGRATIONS.len())?;
        conn.pragma_update(None, "journal_mode", "WAL").map_err(sql)?;
        conn.pragma_update(None, "synchronous", "FULL").map_err(sql)?;
        conn.pragma_update(None, "foreign_keys", true).map_err(sql)?;
        // A large commit leaves a large WAL; it shrinks at the next checkpoint.
        conn.pragma_update(None, "journal_size_limit", 64 << 20).map_err(sql)?;
        conn.set_prepared_statement_cache_capacity(CACHED_STATEMENTS);
        migrate(&mut conn, found, MIGRATIONS)
    })()
    .map_err(named)?;
    Ok(conn)
}

/// Opens the file for reading only.
pub(super) fn open_reader(path: &Path) -> Result<Connection, StoreError> {
    let named = |e: StoreError| at_path(e, path);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(sql).map_err(named)?;
    conn.busy_timeout(BUSY).map_err(sql).map_err(named)?;
    let found = check(&conn, MIGRATIONS.len()).map_err(named)?;
    if found < MIGRATIONS.len() {
        return Err(named(failed(format!(
            "it has version {found}; start the control plane once to bring it up to date"
        ))));
    }
    conn.set_prepared_statement_cache_capacity(CACHED_STATEMENTS);
    Ok(conn)
}

/// Whether the file is a store that this version knows; returns its version.
pub(super) fn check(conn: &Connection, known: usize) -> Result<usize, StoreError> {
    let int = |pragma: &str| conn.pragma_query_value(None, pragma, |r| r.get::<_, i64>(0)).map_err(sql);
    let (application, version) = (int("application_id")?, int("user_version")?);
    let tables: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0)).map_err(sql)?;
    if application != i64::from(APPLICATION_ID) && tables > 0 {
        return Err(failed("it is an SQLite file of something else; use another folder, or restore a backup"));
    }
    match usize::try_from(version) {
        Ok(found) if found <= known => Ok(found),
        Ok(_) | Err(_) => Err(StoreError::Newer {
            found: u32::try_from(version).unwrap_or(u32::MAX),
            known: u32::try_from(known).unwrap_or(u32::MAX),
        }),
    }
}

/// The version that this program writes.
pub(super) fn version() -> usize {
    MIGRATIONS.len()
}

/// Brings a store that nobody else has to this version.
pub(super) fn update(conn: &mut Connection) -> Result<(), StoreError> {
    let found = check(conn, MIGRATIONS.len())?;
    migrate(conn, found, MIGRATIONS)
}

/// A store of an earlier version, for the test that it is brought up to date.
#[cfg(test)]
pub(super) fn of_version(path: &Path, version: usize) -> Connection {
    let mut conn = Connection::open(path).unwrap();
    migrate(&mut conn, 0, &MIGRATIONS[..version]).unwrap();
    conn
}

/// Brings the file from version `found` to the last one, one transaction for each step.
fn migrate(conn: &mut Connection, found: usize, migrations: &[&str]) -> Result<(), StoreError> {
    for (number, text) in (1i64..).zip(migrations).skip(found) {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        // Another process may have been faster between the check and here.
        let now: i64 = tx.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(sql)?;
        if now >= number {
            continue;
        }
        tx.execute_batch(text).map_err(|e| match sql(e) {
            StoreError::Failed(why) => failed(format!("migration {number} failed: {why}")),
            other => other,
        })?;
        tx.pragma_update(None, "application_id", APPLICATION_ID).map_err(sql)?;
        tx.pragma_update(None, "user_version", number).map_err(sql)?;
        tx.commit().map_err(sql)?;
    }
    Ok(())
}

/// Says which file an error is about.
pub(super) fn at_path(e: StoreError, path: &Path) -> StoreError {
    match e {
        StoreError::Failed(why) => StoreError::Failed(format!("{}: {why}", path.display())),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_run_once_each_and_in_order() {
        let mut conn = Connection::open_in_memory().unwrap();
        let steps = ["CREATE TABLE a (x); INSERT INTO a VALUES (1)", "UPDATE a SET x = x + 1"];
        migrate(&mut conn, 0, &steps[..1]).unwrap();
        let found = check(&conn, 2).unwrap();
        assert_eq!(found, 1);
        migrate(&mut conn, found, &steps).unwrap();
        let found = check(&conn, 2).unwrap();
        migrate(&mut conn, found, &steps).unwrap();
        let x: i64 = conn.query_row("SELECT x FROM a", [], |r| r.get(0)).unwrap();
        assert_eq!(x, 2);
        assert_eq!(check(&conn, 1), Err(StoreError::Newer { found: 2, known: 1 }));
    }

    #[test]
    fn a_migration_that_fails_leaves_the_version_before() {
        let mut conn = Connection::open_in_memory().unwrap();
        let steps = ["CREATE TABLE a (x)", "CREATE TABLE b (x); INSERT INTO nowhere VALUES (1)"];
        let e = migrate(&mut conn, 0, &steps).unwrap_err();
        assert!(e.to_string().contains("migration 2 failed"), "{e}");
        assert_eq!(check(&conn, 2).unwrap(), 1);
        assert!(conn.query_row("SELECT * FROM b", [], |_| Ok(())).is_err());
    }
}
