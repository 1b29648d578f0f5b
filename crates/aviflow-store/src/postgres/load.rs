//! Reading the whole live state, once, when the store is taken.

use super::connect::{Session, Trouble};
use super::convert::{get, json, opt_text, small, text, unreadable};
use crate::convert::{failed, uint};
use crate::settings;
use aviflow_core::ledger::Open;
use aviflow_core::model::{
    EnvironmentHash, EnvironmentState, Job, JobId, Node, NodeId, Phase, Pool, Queue, Snapshot, Term,
};
use aviflow_core::time::Time;
use aviflow_engine::ports::{JobRecord, Loaded};
use std::sync::Arc;

/// The live state, in the transaction that took the term.
pub(super) async fn load(session: &Session) -> Result<Loaded, Trouble> {
    let mut loaded = meta(session).await?;
    let snapshot = &mut loaded.snapshot;
    let each = async |text, f: &mut dyn FnMut(&tokio_postgres::Row) -> _| session.each(text, &[], f).await;
    each("SELECT node FROM nodes", &mut |r| {
        let node: Node = json(r, 0)?;
        snapshot.nodes.insert(node.id, node);
        Ok(())
    })
    .await?;
    each("SELECT queue FROM queues", &mut |r| {
        let queue: Queue = json(r, 0)?;
        snapshot.queues.insert(queue.name.clone(), queue);
        Ok(())
    })
    .await?;
    each("SELECT pool FROM pools", &mut |r| {
        let pool: Pool = json(r, 0)?;
        snapshot.pools.insert(pool.name.clone(), pool);
        Ok(())
    })
    .await?;
    each("SELECT queue, \"user\", value FROM decayed", &mut |r| {
        snapshot.usage.insert((text(r, 0)?, text(r, 1)?), json(r, 2)?);
        Ok(())
    })
    .await?;
    each("SELECT name, value FROM settings", &mut |r| {
        settings::put(snapshot, get(r, 0)?, get(r, 1)?).map_err(unreadable)
    })
    .await?;
    each("SELECT hash, state FROM environments", &mut |r| {
        let state: EnvironmentState = json(r, 1)?;
        snapshot.environments.insert(EnvironmentHash(text(r, 0)?), state);
        Ok(())
    })
    .await?;
    each("SELECT node, intervals FROM accounts", &mut |r| {
        let open: Vec<Open> = json(r, 1)?;
        snapshot.ledger.restore(NodeId(small(r, 0)?), open);
        Ok(())
    })
    .await?;
    let records = &mut loaded.records;
    each("SELECT id, job, record FROM jobs WHERE ended IS NULL ORDER BY id", &mut |r| {
        let id = JobId(uint(get(r, 0)?));
        let job: Job = json(r, 1)?;
        if job.phase == Phase::Queued {
            snapshot.waiting.insert(id);
        }
        snapshot.jobs.insert(id, job);
        let record: JobRecord = json(r, 2)?;
        records.insert(id, Arc::new(record));
        Ok(())
    })
    .await?;
    Ok(loaded)
}

async fn meta(session: &Session) -> Result<Loaded, Trouble> {
    let text = "SELECT term, generation, clock, last_job, last_node, last_drain, paused FROM meta";
    let rows = session.query(text, &[]).await?;
    let [r] = &rows[..] else { return Err(failed("the store has lost its first row; restore a backup").into()) };
    Ok(Loaded {
        term: Term(uint(get(r, 0)?)),
        generation: uint(get(r, 1)?),
        clock: Time(get(r, 2)?),
        last_job: uint(get(r, 3)?),
        last_node: small(r, 4)?,
        last_drain: uint(get(r, 5)?),
        snapshot: Snapshot { paused: opt_text(r, 6)?, ..Snapshot::default() },
        ..Loaded::default()
    })
}
