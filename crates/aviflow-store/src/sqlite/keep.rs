//! Retention: what is old goes, beside the writer and in short transactions.

use super::convert::{int, uint};
use super::schema::{self, sql};
use super::write::execute;
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, TransactionBehavior};
use std::path::Path;

/// Jobs that one transaction deletes, so that no commit waits long for it.
const CHUNK: i64 = 200;

/// Deletes what is old, on a connection of its own, while the engine has the store.
///
/// It needs no term: it touches only what ended and can never change again, so
/// one that was fenced does what its successor would do.
#[derive(Debug)]
pub struct Keeper {
    conn: Connection,
}

impl Keeper {
    pub(super) fn open(path: &Path) -> Result<Keeper, StoreError> {
        Ok(Keeper { conn: schema::open_writer(path)? })
    }

    /// Jobs that ended before `before`, a few at a time: those after `after`, by
    /// number. Nothing is deleted: what else is kept of them goes first, as
    /// nobody could find it without them.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn ended_before(&self, before: Time, after: Option<JobId>) -> Result<Vec<JobId>, StoreError> {
        let text = "SELECT id FROM jobs WHERE ended IS NOT NULL AND ended < ?1 AND id > ?2 ORDER BY id LIMIT ?3";
        let mut query = self.conn.prepare_cached(text).map_err(sql)?;
        let after = after.map_or(-1, |job| int(job.0));
        let ids = query.query_map([before.0, after, CHUNK], |r| r.get::<_, i64>(0)).map_err(sql)?;
        ids.map(|id| Ok(JobId(uint(id.map_err(sql)?)))).collect()
    }

    /// Deletes jobs that have ended, with their moments. Ledger entries stay: the
    /// account outlives the jobs. One call is one transaction.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn forget(&mut self, jobs: &[JobId]) -> Result<(), StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        for job in jobs {
            let text = "DELETE FROM moments WHERE job = (SELECT id FROM jobs WHERE id = ?1 AND ended IS NOT NULL)";
            execute(&tx, text, [int(job.0)])?;
            execute(&tx, "DELETE FROM jobs WHERE id = ?1 AND ended IS NOT NULL", [int(job.0)])?;
        }
        tx.commit().map_err(sql)
    }

    /// Deletes what people did before `before`; returns how many acts.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn trim_acts(&mut self, before: Time) -> Result<u64, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        // Times grow with row numbers, as in the journal.
        let text = "DELETE FROM acts WHERE id < coalesce(
                        (SELECT id FROM acts WHERE at >= ?1 ORDER BY id LIMIT 1), 9223372036854775807)";
        let rows = execute(&tx, text, [before.0])? as u64;
        tx.commit().map_err(sql)?;
        Ok(rows)
    }

    /// Deletes journal rows of before `before`; returns how many.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn trim_journal(&mut self, before: Time) -> Result<u64, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        // Times grow with row numbers, so the rows to go are the lowest ones.
        let text = "DELETE FROM journal WHERE id < coalesce(
                        (SELECT id FROM journal WHERE at >= ?1 ORDER BY id LIMIT 1), 9223372036854775807)";
        let rows = execute(&tx, text, [before.0])? as u64;
        tx.commit().map_err(sql)?;
        Ok(rows)
    }
}
