//! Retention: what is old goes, beside the writer and in short transactions.

use super::schema::{self, sql};
use super::write::execute;
use crate::convert::{int, uint};
use crate::read::{CHUNK, Keeper};
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, TransactionBehavior};
use std::path::Path;

/// Deletes what is old, on a connection of its own.
#[derive(Debug)]
pub struct SqliteKeeper {
    conn: Connection,
}

impl SqliteKeeper {
    pub(super) fn open(path: &Path) -> Result<SqliteKeeper, StoreError> {
        Ok(SqliteKeeper { conn: schema::open_writer(path)? })
    }
}

impl Keeper for SqliteKeeper {
    fn ended_before(&mut self, before: Time, after: Option<JobId>) -> Result<Vec<JobId>, StoreError> {
        let text = "SELECT id FROM jobs WHERE ended IS NOT NULL AND ended < ?1 AND id > ?2 ORDER BY id LIMIT ?3";
        let mut query = self.conn.prepare_cached(text).map_err(sql)?;
        let after = after.map_or(-1, |job| int(job.0));
        let ids = query.query_map([before.0, after, CHUNK], |r| r.get::<_, i64>(0)).map_err(sql)?;
        ids.map(|id| Ok(JobId(uint(id.map_err(sql)?)))).collect()
    }

    fn forget(&mut self, jobs: &[JobId]) -> Result<(), StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        for job in jobs {
            let text = "DELETE FROM moments WHERE job = (SELECT id FROM jobs WHERE id = ?1 AND ended IS NOT NULL)";
            execute(&tx, text, [int(job.0)])?;
            execute(&tx, "DELETE FROM jobs WHERE id = ?1 AND ended IS NOT NULL", [int(job.0)])?;
        }
        tx.commit().map_err(sql)
    }

    fn trim_acts(&mut self, before: Time) -> Result<u64, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        // Times grow with row numbers, as in the journal.
        let text = "DELETE FROM acts WHERE id < coalesce(
                        (SELECT id FROM acts WHERE at >= ?1 ORDER BY id LIMIT 1), 9223372036854775807)";
        let rows = execute(&tx, text, [before.0])? as u64;
        tx.commit().map_err(sql)?;
        Ok(rows)
    }

    fn trim_journal(&mut self, before: Time) -> Result<u64, StoreError> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        // Times grow with row numbers, so the rows to go are the lowest ones.
        let text = "DELETE FROM journal WHERE id < coalesce(
                        (SELECT id FROM journal WHERE at >= ?1 ORDER BY id LIMIT 1), 9223372036854775807)";
        let rows = execute(&tx, text, [before.0])? as u64;
        tx.commit().map_err(sql)?;
        Ok(rows)
    }
}
