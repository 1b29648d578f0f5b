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

/// What [`Keeper::retain`] deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retained {
    /// The jobs; their logs and series may go too.
    pub jobs: Vec<JobId>,
    /// Rows of the journal.
    pub journal: u64,
    /// Whether more is left to delete: call again.
    pub more: bool,
}

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

    /// Deletes jobs that ended before `before` with their moments, and journal
    /// rows of before `journal_before`. Ledger entries stay: the account
    /// outlives the jobs. One call is one short transaction; call again while
    /// [`Retained::more`] says so.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn retain(&mut self, before: Time, journal_before: Time) -> Result<Retained, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        let mut retained = Retained::default();
        {
            let text = "SELECT id FROM jobs WHERE ended IS NOT NULL AND ended < ?1 ORDER BY ended, id LIMIT ?2";
            let mut query = tx.prepare_cached(text).map_err(sql)?;
            let ids = query.query_map([before.0, CHUNK + 1], |r| r.get::<_, i64>(0)).map_err(sql)?;
            for id in ids {
                retained.jobs.push(JobId(uint(id.map_err(sql)?)));
            }
        }
        let limit = usize::try_from(CHUNK).unwrap_or(usize::MAX);
        retained.more = retained.jobs.len() > limit;
        retained.jobs.truncate(limit);
        for job in &retained.jobs {
            execute(&tx, "DELETE FROM moments WHERE job = ?1", [int(job.0)])?;
            execute(&tx, "DELETE FROM jobs WHERE id = ?1", [int(job.0)])?;
        }
        // Times grow with row numbers, so the rows to go are the lowest ones.
        let text = "DELETE FROM journal WHERE id < coalesce(
                        (SELECT id FROM journal WHERE at >= ?1 ORDER BY id LIMIT 1), 9223372036854775807)";
        retained.journal = execute(&tx, text, [journal_before.0])? as u64;
        tx.commit().map_err(sql)?;
        Ok(retained)
    }
}
