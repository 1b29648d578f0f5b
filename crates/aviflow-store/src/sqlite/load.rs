//! Reading the whole live state, once, when the store is taken.

use super::convert::{from_json, unreadable};
use super::schema::sql;
use crate::convert::uint;
use crate::settings;
use aviflow_core::ledger::Open;
use aviflow_core::model::{
    EnvironmentHash, EnvironmentState, Job, JobId, Node, NodeId, Phase, Pool, Queue, Snapshot, Term,
};
use aviflow_core::time::Time;
use aviflow_engine::ports::{JobRecord, Loaded, StoreError};
use rusqlite::{Connection, Row};
use std::sync::Arc;

pub(super) fn load(conn: &Connection) -> Result<Loaded, StoreError> {
    let mut loaded = meta(conn)?;
    let snapshot = &mut loaded.snapshot;
    each(conn, "SELECT node FROM nodes", |r| {
        let node: Node = from_json(r.get_ref(0)?.as_str()?)?;
        snapshot.nodes.insert(node.id, node);
        Ok(())
    })?;
    each(conn, "SELECT queue FROM queues", |r| {
        let queue: Queue = from_json(r.get_ref(0)?.as_str()?)?;
        snapshot.queues.insert(queue.name.clone(), queue);
        Ok(())
    })?;
    each(conn, "SELECT pool FROM pools", |r| {
        let pool: Pool = from_json(r.get_ref(0)?.as_str()?)?;
        snapshot.pools.insert(pool.name.clone(), pool);
        Ok(())
    })?;
    each(conn, "SELECT queue, user, value FROM decayed", |r| {
        snapshot.usage.insert((r.get(0)?, r.get(1)?), from_json(r.get_ref(2)?.as_str()?)?);
        Ok(())
    })?;
    each(conn, "SELECT name, value FROM settings", |r| {
        settings::put(snapshot, r.get_ref(0)?.as_str()?, r.get_ref(1)?.as_str()?).map_err(unreadable)
    })?;
    each(conn, "SELECT hash, state FROM environments", |r| {
        let state: EnvironmentState = from_json(r.get_ref(1)?.as_str()?)?;
        snapshot.environments.insert(EnvironmentHash(r.get(0)?), state);
        Ok(())
    })?;
    each(conn, "SELECT node, intervals FROM accounts", |r| {
        let open: Vec<Open> = from_json(r.get_ref(1)?.as_str()?)?;
        snapshot.ledger.restore(NodeId(r.get(0)?), open);
        Ok(())
    })?;
    let records = &mut loaded.records;
    each(conn, "SELECT id, job, record FROM jobs WHERE ended IS NULL ORDER BY id", |r| {
        let id = JobId(uint(r.get(0)?));
        let job: Job = from_json(r.get_ref(1)?.as_str()?)?;
        if job.phase == Phase::Queued {
            snapshot.waiting.insert(id);
        }
        snapshot.jobs.insert(id, job);
        let record: JobRecord = from_json(r.get_ref(2)?.as_str()?)?;
        records.insert(id, Arc::new(record));
        Ok(())
    })?;
    Ok(loaded)
}

fn meta(conn: &Connection) -> Result<Loaded, StoreError> {
    conn.query_row("SELECT term, generation, clock, last_job, last_node, paused, last_drain FROM meta", [], |r| {
        Ok(Loaded {
            term: Term(uint(r.get(0)?)),
            generation: uint(r.get(1)?),
            clock: Time(r.get(2)?),
            last_job: uint(r.get(3)?),
            last_node: r.get(4)?,
            last_drain: uint(r.get(6)?),
            snapshot: Snapshot { paused: r.get(5)?, ..Snapshot::default() },
            ..Loaded::default()
        })
    })
    .map_err(sql)
}

/// Calls `f` for each row.
pub(super) fn each(
    conn: &Connection,
    text: &str,
    mut f: impl FnMut(&Row<'_>) -> rusqlite::Result<()>,
) -> Result<(), StoreError> {
    let mut query = conn.prepare(text).map_err(sql)?;
    let mut rows = query.query([]).map_err(sql)?;
    while let Some(row) = rows.next().map_err(sql)? {
        f(row).map_err(sql)?;
    }
    Ok(())
}
