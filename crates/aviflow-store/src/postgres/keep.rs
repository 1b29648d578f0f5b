//! Retention: what is old goes, beside the writer and in short transactions.

use super::connect::{Database, Session, Trouble};
use super::convert::{Value, get};
use super::schema;
use crate::convert::{int, uint};
use crate::read::{CHUNK, Keeper};
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use std::sync::Arc;

/// Deletes what is old.
#[derive(Debug)]
pub struct PostgresKeeper {
    database: Arc<Database>,
}

impl PostgresKeeper {
    pub(super) fn new(database: Arc<Database>) -> PostgresKeeper {
        PostgresKeeper { database }
    }

    /// On a session of its own: this is once an hour. What is lost on the way is done next time.
    fn with<T>(&self, work: impl AsyncFn(&Session) -> Result<T, Trouble>) -> Result<T, StoreError> {
        self.database.wait(async {
            let session = self.database.connect().await?;
            schema::current(session.version)?;
            work(&session).await.map_err(|trouble| self.database.error(trouble))
        })?
    }
}

impl Keeper for PostgresKeeper {
    fn ended_before(&mut self, before: Time, after: Option<JobId>) -> Result<Vec<JobId>, StoreError> {
        let text = "SELECT id FROM jobs WHERE ended < $1 AND id > $2 ORDER BY id LIMIT $3";
        let after = after.map_or(-1, |job| int(job.0));
        let values = [Value::Int(before.0), Value::Int(after), Value::Int(CHUNK)];
        self.with(async |session| {
            let rows = session.query(text, &values).await?;
            rows.iter().map(|r| Ok(JobId(uint(get(r, 0)?)))).collect()
        })
    }

    fn forget(&mut self, jobs: &[JobId]) -> Result<(), StoreError> {
        let ids = [Value::Ints(jobs.iter().map(|job| int(job.0)).collect())];
        // One statement is one transaction.
        let text = "WITH gone AS (DELETE FROM jobs WHERE id = ANY ($1) AND ended IS NOT NULL RETURNING id)
                    DELETE FROM moments USING gone WHERE moments.job = gone.id";
        self.with(async |session| session.execute(text, &ids).await.map(|_| ()))
    }

    fn trim_acts(&mut self, before: Time) -> Result<u64, StoreError> {
        // Times grow with row numbers, as in the journal.
        let text = "DELETE FROM acts WHERE id < coalesce(
                        (SELECT id FROM acts WHERE at >= $1 ORDER BY id LIMIT 1), 9223372036854775807)";
        self.with(async |session| session.execute(text, &[Value::Int(before.0)]).await)
    }

    fn trim_journal(&mut self, before: Time) -> Result<u64, StoreError> {
        // Times grow with row numbers, so the rows to go are the lowest ones.
        let text = "DELETE FROM journal WHERE id < coalesce(
                        (SELECT id FROM journal WHERE at >= $1 ORDER BY id LIMIT 1), 9223372036854775807)";
        self.with(async |session| session.execute(text, &[Value::Int(before.0)]).await)
    }
}
