//! The store's tables, in a schema of their own (`aviflow`), and their version: the number of the last migration.
//!
//! A store is brought to this version only by whoever takes it, in the transaction that
//! takes it: a control plane that merely waits changes nothing under the one that works.

use super::connect::{Session, Trouble};
use crate::convert::failed;
use aviflow_engine::ports::StoreError;

/// One after the other, never changed once released.
const MIGRATIONS: &[&str] = &[include_str!("../../migrations/postgres/0001_initial.sql")];

/// The version that this program writes.
pub(super) const VERSION: u32 = 1;

const _: () = assert!(MIGRATIONS.len() == VERSION as usize);

/// The version of the store that is there.
pub(super) async fn version(session: &Session) -> Result<u32, Trouble> {
    known(&session.simple("SELECT version FROM aviflow.meta").await?[0])
}

/// A version, unless it is a later one.
pub(super) fn known(text: &str) -> Result<u32, Trouble> {
    match text.parse::<u32>() {
        Ok(found) if found <= VERSION => Ok(found),
        Ok(found) => Err(StoreError::Newer { found, known: VERSION }.into()),
        Err(_) => Err(failed(format!("the store has the version {text:?}; restore a backup")).into()),
    }
}

/// Whether readers of this version can read it.
pub(super) fn current(version: Option<u32>) -> Result<(), StoreError> {
    match version {
        Some(VERSION) => Ok(()),
        Some(found) => {
            Err(failed(format!("the store has version {found}; start the control plane once to bring it up to date")))
        }
        None => Err(failed("it holds no store yet; start the control plane once to make one")),
    }
}

/// Brings the store to this version, or makes one, within the caller's transaction.
pub(super) async fn update(session: &Session) -> Result<(), Trouble> {
    // Two that make a store at the same time would fail in each other's way.
    let lock = "SELECT pg_advisory_xact_lock(4707200108476)";
    session.simple(lock).await?;
    let there = "SELECT to_regnamespace('aviflow') IS NOT NULL, to_regclass('aviflow.meta') IS NOT NULL";
    let there = session.simple(there).await?;
    if there[0] != "t" {
        session.client.batch_execute("CREATE SCHEMA aviflow").await?;
    }
    let found = if there[1] == "t" { version(session).await? } else { 0 };
    for (number, text) in (1..).zip(MIGRATIONS).skip(found as usize) {
        session.client.batch_execute(text).await.map_err(|e| match Trouble::from(e) {
            Trouble::Refused(StoreError::Failed(why)) => failed(format!("migration {number} failed: {why}")).into(),
            other => other,
        })?;
        session.client.batch_execute(&format!("UPDATE meta SET version = {number}")).await?;
    }
    Ok(())
}
