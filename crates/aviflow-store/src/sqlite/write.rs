//! Writing a batch.

use super::acts;
use super::schema::sql;
use crate::convert::{failed, int, to_json, uint};
use crate::settings;
use aviflow_core::ledger::{Entry, Open};
use aviflow_core::model::{Job, JobId, Node, NodeId, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Batch, JobRecord, StoreError};
use rusqlite::{Connection, OptionalExtension};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn check_term(conn: &Connection, ours: Term) -> Result<(), StoreError> {
    let held: i64 = query_one(conn, "SELECT term FROM meta")?;
    if uint(held) == ours.0 { Ok(()) } else { Err(StoreError::Fenced { ours: ours.0, held: uint(held), by: None }) }
}

fn query_one(conn: &Connection, text: &str) -> Result<i64, StoreError> {
    conn.prepare_cached(text).and_then(|mut q| q.query_row([], |r| r.get(0))).map_err(sql)
}

pub(super) fn execute(conn: &Connection, text: &str, params: impl rusqlite::Params) -> Result<usize, StoreError> {
    conn.prepare_cached(text).and_then(|mut s| s.execute(params)).map_err(sql)
}

/// Writes a batch within the caller's transaction.
pub(super) fn batch(conn: &Connection, batch: &Batch, journal_rows: u64) -> Result<(), StoreError> {
    let last = uint(query_one(conn, "SELECT generation FROM meta")?);
    if batch.generation != last + 1 {
        return Err(failed(format!(
            "commit {} does not follow commit {last}; start the control plane again so that it reads the store",
            batch.generation
        )));
    }
    let before = queues_before(conn, batch)?;
    jobs(conn, batch)?;
    for node in &batch.nodes {
        let text = "INSERT INTO nodes (id, name, node) VALUES (?1, ?2, ?3)
                    ON CONFLICT (id) DO UPDATE SET name = ?2, node = ?3";
        execute(conn, text, (node.id.0, &node.name, to_json(node)?))?;
        capacity(conn, node, batch.at)?;
    }
    documents(conn, batch)?;
    for (hash, state) in &batch.environments {
        match state {
            Some(state) => {
                let text = "INSERT INTO environments (hash, state) VALUES (?1, ?2)
                            ON CONFLICT (hash) DO UPDATE SET state = ?2";
                execute(conn, text, (&hash.0, to_json(state)?))?;
            }
            None => {
                execute(conn, "DELETE FROM environments WHERE hash = ?1", [&hash.0])?;
            }
        }
    }
    entries(conn, &batch.entries, &before)?;
    for (node, open) in &batch.open {
        account(conn, *node, open, &batch.entries, batch.at)?;
    }
    for moment in &batch.moments {
        let text = "INSERT INTO moments (job, at, attempt, kind) VALUES (?1, ?2, ?3, ?4)";
        execute(conn, text, (int(moment.job.0), moment.at.0, moment.attempt, to_json(&moment.kind)?))?;
    }
    acts::write(conn, &batch.acts)?;
    journal(conn, batch, journal_rows)?;
    meta(conn, batch)
}

/// Queues, pools, settings and decayed use.
fn documents(conn: &Connection, batch: &Batch) -> Result<(), StoreError> {
    for (name, queue) in &batch.queues {
        match queue {
            Some(queue) => {
                let text =
                    "INSERT INTO queues (name, queue) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET queue = ?2";
                execute(conn, text, (name, to_json(queue)?))?
            }
            None => execute(conn, "DELETE FROM queues WHERE name = ?1", [name])?,
        };
    }
    for (name, pool) in &batch.pools {
        match pool {
            Some(pool) => {
                let text = "INSERT INTO pools (name, pool) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET pool = ?2";
                execute(conn, text, (name, to_json(pool)?))?
            }
            None => execute(conn, "DELETE FROM pools WHERE name = ?1", [name])?,
        };
    }
    for ((queue, user), usage) in &batch.usage {
        match usage {
            Some(usage) => {
                let text = "INSERT INTO decayed (queue, user, value) VALUES (?1, ?2, ?3)
                            ON CONFLICT (queue, user) DO UPDATE SET value = ?3";
                execute(conn, text, (queue, user, to_json(usage)?))?
            }
            None => execute(conn, "DELETE FROM decayed WHERE queue = ?1 AND user = ?2", [queue, user])?,
        };
    }
    for (name, value) in settings::changed(batch)? {
        let text = "INSERT INTO settings (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2";
        execute(conn, text, (name, value))?;
    }
    Ok(())
}

/// Notes how many GPUs a node has, where that changed.
fn capacity(conn: &Connection, node: &Node, at: Time) -> Result<(), StoreError> {
    let last = "SELECT gpus FROM capacity WHERE node = ?1 ORDER BY since DESC LIMIT 1";
    let had: Option<u32> =
        conn.prepare_cached(last).and_then(|mut q| q.query_row([node.id.0], |r| r.get(0)).optional()).map_err(sql)?;
    if had == Some(node.gpus.count()) {
        return Ok(());
    }
    let text = "INSERT INTO capacity (node, since, gpus) VALUES (?1, ?2, ?3)
                ON CONFLICT (node, since) DO UPDATE SET gpus = ?3";
    execute(conn, text, (node.id.0, at.0, node.gpus.count())).map(|_| ())
}

fn jobs(conn: &Connection, batch: &Batch) -> Result<(), StoreError> {
    let mut records: BTreeMap<JobId, &JobRecord> = batch.records.iter().map(|r| (r.id, r.as_ref())).collect();
    for job in &batch.jobs {
        let at = batch.ended.get(&job.id).copied().unwrap_or(batch.at);
        let ended = job.phase.is_terminal().then_some(at.0);
        match records.remove(&job.id) {
            Some(record) => insert(conn, job, record, ended)?,
            None => update(conn, job, ended)?,
        }
    }
    match records.keys().next() {
        Some(id) => Err(failed(format!("job {} came with a document and no state", id.0))),
        None => Ok(()),
    }
}

fn insert(conn: &Connection, job: &Job, record: &JobRecord, ended: Option<i64>) -> Result<(), StoreError> {
    let text = "INSERT INTO jobs (id, namespace, name, work, user, queue, phase, submitted, ended, job, record)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";
    let row = (
        int(job.id.0),
        &job.key.namespace,
        &job.key.name,
        &record.spec.name,
        &job.user,
        &job.request.queue,
        job.phase.name(),
        job.submitted.0,
        ended,
        to_json(job)?,
        to_json(record)?,
    );
    execute(conn, text, row).map(|_| ())
}

/// A job ends once: the first end stays.
fn update(conn: &Connection, job: &Job, ended: Option<i64>) -> Result<(), StoreError> {
    let text = "UPDATE jobs SET queue = ?2, phase = ?3, ended = coalesce(ended, ?4), job = ?5 WHERE id = ?1";
    let row = (int(job.id.0), &job.request.queue, job.phase.name(), ended, to_json(job)?);
    match execute(conn, text, row)? {
        1 => Ok(()),
        _ => Err(failed(format!("job {} changed and its document was never stored", job.id.0))),
    }
}

/// Whose an entry is, as the job's row says in this transaction.
type Whose = Option<(String, String, String)>;

/// Whose the entries are of jobs that this batch moves to another queue: their intervals end with the
/// move, so all that the batch closes of them was before it.
fn queues_before(conn: &Connection, batch: &Batch) -> Result<BTreeMap<JobId, Whose>, StoreError> {
    let owners: BTreeSet<JobId> = batch.entries.iter().filter_map(|e| Some(e.owner?.job)).collect();
    let mut out = BTreeMap::new();
    for job in batch.jobs.iter().filter(|j| owners.contains(&j.id)) {
        if let Some(before) = whose(conn, job.id)?.filter(|(_, _, queue)| *queue != job.request.queue) {
            out.insert(job.id, Some(before));
        }
    }
    Ok(out)
}

fn entries(conn: &Connection, entries: &[Entry], moved: &BTreeMap<JobId, Whose>) -> Result<(), StoreError> {
    let mut known = moved.clone();
    for entry in entries {
        let whose = match entry.owner {
            None => None,
            Some(owner) => match known.get(&owner.job) {
                Some(whose) => whose.clone(),
                None => {
                    let whose = whose(conn, owner.job)?;
                    known.insert(owner.job, whose.clone());
                    whose
                }
            },
        };
        let (name, user, queue) = whose.map_or((None, None, None), |(n, u, q)| (Some(n), Some(u), Some(q)));
        let text = "INSERT INTO ledger (job, name, attempt, user, queue, state, from_ms, to_ms, gpus, slots)
                    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
        let row = (
            entry.owner.map(|o| int(o.job.0)),
            name,
            entry.owner.map(|o| o.attempt),
            user,
            queue,
            entry.state.name(),
            entry.from.0,
            entry.to.0,
            entry.gpus.count(),
            to_json(&entry.gpus)?,
        );
        execute(conn, text, row)?;
    }
    Ok(())
}

fn whose(conn: &Connection, job: JobId) -> Result<Whose, StoreError> {
    conn.prepare_cached("SELECT namespace || '/' || name, user, queue FROM jobs WHERE id = ?1")
        .and_then(|mut q| q.query_row([int(job.0)], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).optional())
        .map_err(sql)
}

/// Writes the open intervals of a node. Its account begins with the first of
/// them, or with an entry of the same batch that is older still.
fn account(conn: &Connection, node: NodeId, open: &[Open], entries: &[Entry], at: Time) -> Result<(), StoreError> {
    let json = to_json(&open)?;
    let text = "UPDATE accounts SET intervals = ?2 WHERE node = ?1";
    if execute(conn, text, (node.0, &json))? == 1 {
        return Ok(());
    }
    let closed = entries.iter().filter(|e| !e.gpus.on(node).is_empty()).map(|e| e.from);
    let began = open.iter().map(|o| o.from).chain(closed).min().unwrap_or(at);
    let text = "INSERT INTO accounts (node, began, intervals) VALUES (?1, ?2, ?3)";
    execute(conn, text, (node.0, began.0, json)).map(|_| ())
}

/// Row numbers only grow, so the bound is one range at the low end.
fn journal(conn: &Connection, batch: &Batch, keep: u64) -> Result<(), StoreError> {
    if batch.journal.is_empty() {
        return Ok(());
    }
    for text in &batch.journal {
        let insert = "INSERT INTO journal (generation, at, text) VALUES (?1, ?2, ?3)";
        execute(conn, insert, (int(batch.generation), batch.at.0, text))?;
    }
    let bound = conn.last_insert_rowid().saturating_sub(int(keep));
    execute(conn, "DELETE FROM journal WHERE id <= ?1", [bound]).map(|_| ())
}

fn meta(conn: &Connection, batch: &Batch) -> Result<(), StoreError> {
    let last_job = batch.jobs.iter().map(|j| j.id.0).max().unwrap_or(0);
    let last_node = batch.nodes.iter().map(|n| n.id.0).max().unwrap_or(0);
    let last_drain = batch.drains.iter().flatten().map(|d| d.id).max().unwrap_or(0);
    let text = "UPDATE meta SET generation = ?1, clock = max(clock, ?2),
                last_job = max(last_job, ?3), last_node = max(last_node, ?4), last_drain = max(last_drain, ?5)";
    execute(conn, text, (int(batch.generation), batch.at.0, int(last_job), last_node, int(last_drain)))?;
    if let Some(paused) = &batch.paused {
        execute(conn, "UPDATE meta SET paused = ?1", [paused])?;
    }
    if let Some(beyond) = batch.beyond {
        let text = "UPDATE meta SET term = max(term, ?1), last_job = max(last_job, ?2)";
        execute(conn, text, (int(beyond.term), int(beyond.job)))?;
    }
    Ok(())
}
