//! Rows for reports of GPU time.

use super::convert::from_json;
use super::schema::sql;
use crate::convert::{gpu_state, int, uint};
use crate::usage::{By, Owner, Report, Usage};
use aviflow_core::gpus::GpuSet;
use aviflow_core::ledger::Open;
use aviflow_core::model::{JobId, NodeId};
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, OptionalExtension};
use std::collections::BTreeMap;

/// A report from one snapshot.
pub(super) fn usage(conn: &Connection, mut report: Report) -> Result<Usage, StoreError> {
    let mut nodes = Vec::new();
    super::load::each(conn, "SELECT node FROM nodes", |r| {
        nodes.push(from_json(r.get_ref(0)?.as_str()?)?);
        Ok(())
    })?;
    report.nodes(nodes);
    match report.by {
        By::Node => closed_by_node(conn, &mut report)?,
        By::User | By::Queue | By::Job | By::State => closed(conn, &mut report)?,
    }
    open(conn, &mut report)?;
    let mut began: BTreeMap<u32, Time> = BTreeMap::new();
    super::load::each(conn, "SELECT node, began FROM accounts", |r| {
        began.insert(r.get(0)?, Time(r.get(1)?));
        Ok(())
    })?;
    let mut sizes: BTreeMap<u32, Vec<(Time, u32)>> = BTreeMap::new();
    super::load::each(conn, "SELECT node, since, gpus FROM capacity ORDER BY node, since", |r| {
        sizes.entry(r.get(0)?).or_default().push((Time(r.get(1)?), r.get(2)?));
        Ok(())
    })?;
    report.finish(&began, &sizes)
}

/// SQLite adds integers exactly or fails; it never falls back to floating point in `sum` of integers.
fn closed(conn: &Connection, report: &mut Report) -> Result<(), StoreError> {
    let (job, key) = report.columns();
    let text = format!(
        "SELECT {job}, {key}, state, sum(gpus * (min(to_ms, ?2) - max(from_ms, ?1)))
         FROM ledger WHERE to_ms > ?1 AND from_ms < ?2 GROUP BY 1, 2, 3"
    );
    let mut query = conn.prepare_cached(&text).map_err(sql)?;
    let mut rows = query.query([report.from.0, report.to.0]).map_err(sql)?;
    while let Some(r) = rows.next().map_err(sql)? {
        let state: String = r.get(2).map_err(sql)?;
        let job = r.get::<_, Option<i64>>(0).map_err(sql)?.map(|id| JobId(uint(id)));
        let gpu_ms: i64 = r.get(3).map_err(sql)?;
        report.add(job, r.get(1).map_err(sql)?, gpu_state(&state)?, i128::from(gpu_ms));
    }
    Ok(())
}

/// Entries may span nodes, so their masks are read one by one.
fn closed_by_node(conn: &Connection, report: &mut Report) -> Result<(), StoreError> {
    let text = "SELECT state, min(to_ms, ?2) - max(from_ms, ?1), slots
                FROM ledger WHERE to_ms > ?1 AND from_ms < ?2";
    let mut query = conn.prepare_cached(text).map_err(sql)?;
    let mut rows = query.query([report.from.0, report.to.0]).map_err(sql)?;
    while let Some(r) = rows.next().map_err(sql)? {
        let state = gpu_state(&r.get::<_, String>(0).map_err(sql)?)?;
        let ms: i64 = r.get(1).map_err(sql)?;
        let gpus: GpuSet = from_json(&r.get::<_, String>(2).map_err(sql)?).map_err(sql)?;
        report.add_to_nodes(state, ms, &gpus);
    }
    Ok(())
}

fn owner_of(conn: &Connection, job: JobId) -> Result<Option<Owner>, StoreError> {
    conn.prepare_cached("SELECT namespace || '/' || name, user, queue FROM jobs WHERE id = ?1")
        .and_then(|mut q| {
            q.query_row([int(job.0)], |r| Ok(Owner { name: r.get(0)?, user: r.get(1)?, queue: r.get(2)? })).optional()
        })
        .map_err(sql)
}

fn open(conn: &Connection, report: &mut Report) -> Result<(), StoreError> {
    let mut intervals: Vec<(NodeId, Open)> = Vec::new();
    super::load::each(conn, "SELECT node, intervals FROM accounts", |r| {
        let node = NodeId(r.get(0)?);
        let open: Vec<Open> = from_json(r.get_ref(1)?.as_str()?)?;
        intervals.extend(open.into_iter().map(|o| (node, o)));
        Ok(())
    })?;
    let mut owners: BTreeMap<JobId, Owner> = BTreeMap::new();
    for job in intervals.iter().filter_map(|(_, o)| Some(o.owner?.job)) {
        if !owners.contains_key(&job)
            && let Some(owner) = owner_of(conn, job)?
        {
            owners.insert(job, owner);
        }
    }
    report.add_open(&intervals, &owners);
    Ok(())
}
