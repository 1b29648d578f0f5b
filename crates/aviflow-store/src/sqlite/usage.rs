//! Reports of GPU time. Whole GPU-milliseconds, no rounding: over any period the
//! rows sum to the capacity exactly, which is the ledger's own invariant.

use super::convert::{from_json, gpu_state, int, uint};
use super::read::Reader;
use super::schema::{failed, sql};
use aviflow_core::gpus::GpuSet;
use aviflow_core::ledger::{GpuState, Open};
use aviflow_core::model::{JobId, Node, NodeId};
use aviflow_core::time::Time;
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, OptionalExtension};
use std::collections::BTreeMap;

/// By what a report adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Who submitted the job.
    User,
    /// The queue it was in at the time.
    Queue,
    /// The job.
    Job,
    /// Nothing but the state.
    State,
    /// The node.
    Node,
}

/// A line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageRow {
    /// The user, queue, `namespace/name` of the job, state, or node; `None` is
    /// time that belonged to nobody.
    pub key: Option<String>,
    /// The job, in a report by job. Two jobs may have had one name, one after the other.
    pub job: Option<JobId>,
    /// GPU-milliseconds by state.
    pub gpu_ms: BTreeMap<GpuState, i128>,
}

impl UsageRow {
    /// GPU-milliseconds in all states.
    #[must_use]
    pub fn total(&self) -> i128 {
        self.gpu_ms.values().sum()
    }
}

/// A report over `[from, to)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The first millisecond.
    pub from: Time,
    /// The millisecond after the last, at most the present.
    pub to: Time,
    /// Lines by key.
    pub rows: Vec<UsageRow>,
    /// GPU-milliseconds that there were: for each node the GPUs it had, over the
    /// part of the period since its account began. The rows sum to it.
    pub capacity: i128,
}

type Sums = BTreeMap<(Option<JobId>, Option<String>), BTreeMap<GpuState, i128>>;

impl Reader {
    /// Adds up GPU time over `[from, to)`, open intervals included up to `now`.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn usage(&self, from: Time, to: Time, now: Time, by: By) -> Result<Usage, StoreError> {
        let to = Time(to.0.min(now.0)).max(from);
        self.with(|conn| {
            // One snapshot for closed and open intervals, so that none is in both or in neither.
            let tx = conn.transaction().map_err(sql)?;
            let mut sums = Sums::new();
            let nodes = nodes(&tx)?;
            match by {
                By::Node => closed_by_node(&tx, from, to, &nodes, &mut sums)?,
                By::User | By::Queue | By::Job | By::State => closed(&tx, from, to, by, &mut sums)?,
            }
            open(&tx, from, to, by, &nodes, &mut sums)?;
            let capacity = capacity(&tx, from, to)?;
            let rows = sums.into_iter().map(|((job, key), gpu_ms)| UsageRow { key, job, gpu_ms }).collect();
            Ok(Usage { from, to, rows, capacity })
        })
    }
}

fn nodes(conn: &Connection) -> Result<BTreeMap<NodeId, Node>, StoreError> {
    let mut out = BTreeMap::new();
    super::load::each(conn, "SELECT node FROM nodes", |r| {
        let node: Node = from_json(r.get_ref(0)?.as_str()?)?;
        out.insert(node.id, node);
        Ok(())
    })?;
    Ok(out)
}

fn node_name(nodes: &BTreeMap<NodeId, Node>, node: NodeId) -> String {
    nodes.get(&node).map_or_else(|| format!("node {}", node.0), |n| n.name.clone())
}

fn add(sums: &mut Sums, job: Option<JobId>, key: Option<String>, state: GpuState, gpu_ms: i128) {
    if gpu_ms != 0 {
        *sums.entry((job, key)).or_default().entry(state).or_default() += gpu_ms;
    }
}

/// SQLite adds integers exactly or fails; it never falls back to floating point in `sum` of integers.
fn closed(conn: &Connection, from: Time, to: Time, by: By, sums: &mut Sums) -> Result<(), StoreError> {
    let (job, key) = match by {
        By::User => ("NULL", "user"),
        By::Queue => ("NULL", "queue"),
        By::Job => ("job", "name"),
        By::State | By::Node => ("NULL", "state"),
    };
    let text = format!(
        "SELECT {job}, {key}, state, sum(gpus * (min(to_ms, ?2) - max(from_ms, ?1)))
         FROM ledger WHERE to_ms > ?1 AND from_ms < ?2 GROUP BY 1, 2, 3"
    );
    let mut query = conn.prepare_cached(&text).map_err(sql)?;
    let mut rows = query.query([from.0, to.0]).map_err(sql)?;
    while let Some(r) = rows.next().map_err(sql)? {
        let state: String = r.get(2).map_err(sql)?;
        let job = r.get::<_, Option<i64>>(0).map_err(sql)?.map(|id| JobId(uint(id)));
        let gpu_ms: i64 = r.get(3).map_err(sql)?;
        add(sums, job, r.get(1).map_err(sql)?, gpu_state(&state)?, i128::from(gpu_ms));
    }
    Ok(())
}

/// Entries may span nodes, so their masks are read one by one.
fn closed_by_node(
    conn: &Connection,
    from: Time,
    to: Time,
    nodes: &BTreeMap<NodeId, Node>,
    sums: &mut Sums,
) -> Result<(), StoreError> {
    let text = "SELECT state, min(to_ms, ?2) - max(from_ms, ?1), slots
                FROM ledger WHERE to_ms > ?1 AND from_ms < ?2";
    let mut query = conn.prepare_cached(text).map_err(sql)?;
    let mut rows = query.query([from.0, to.0]).map_err(sql)?;
    while let Some(r) = rows.next().map_err(sql)? {
        let state = gpu_state(&r.get::<_, String>(0).map_err(sql)?)?;
        let ms: i64 = r.get(1).map_err(sql)?;
        let gpus: GpuSet = from_json(&r.get::<_, String>(2).map_err(sql)?).map_err(sql)?;
        for (node, slots) in gpus.iter() {
            let gpu_ms = i128::from(slots.count()) * i128::from(ms);
            add(sums, None, Some(node_name(nodes, node)), state, gpu_ms);
        }
    }
    Ok(())
}

/// Name, user and queue of a job.
type Owner = (String, String, String);

fn owner_of(conn: &Connection, job: JobId) -> Result<Option<Owner>, StoreError> {
    conn.prepare_cached("SELECT namespace || '/' || name, user, queue FROM jobs WHERE id = ?1")
        .and_then(|mut q| q.query_row([int(job.0)], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).optional())
        .map_err(sql)
}

fn open(
    conn: &Connection,
    from: Time,
    to: Time,
    by: By,
    nodes: &BTreeMap<NodeId, Node>,
    sums: &mut Sums,
) -> Result<(), StoreError> {
    let mut intervals: Vec<(NodeId, Open)> = Vec::new();
    super::load::each(conn, "SELECT node, intervals FROM accounts", |r| {
        let node = NodeId(r.get(0)?);
        let open: Vec<Open> = from_json(r.get_ref(1)?.as_str()?)?;
        intervals.extend(open.into_iter().map(|o| (node, o)));
        Ok(())
    })?;
    let mut owners: BTreeMap<JobId, Option<Owner>> = BTreeMap::new();
    for (node, o) in intervals {
        let ms = to.since(Time(o.from.0.max(from.0))).0;
        let job = o.owner.map(|owner| owner.job);
        if let Some(job) = job
            && !owners.contains_key(&job)
        {
            owners.insert(job, owner_of(conn, job)?);
        }
        let owner = job.and_then(|job| owners.get(&job)).and_then(Option::as_ref);
        let key = match by {
            By::User => owner.map(|(_, user, _)| user.clone()),
            By::Queue => owner.map(|(_, _, queue)| queue.clone()),
            By::Job => owner.map(|(name, _, _)| name.clone()),
            By::State => Some(o.state.name().to_owned()),
            By::Node => Some(node_name(nodes, node)),
        };
        let job = job.filter(|_| by == By::Job);
        add(sums, job, key, o.state, i128::from(o.slots.count()) * i128::from(ms));
    }
    Ok(())
}

/// GPUs that there were, over the part of the period since each account began.
fn capacity(conn: &Connection, from: Time, to: Time) -> Result<i128, StoreError> {
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
    let mut capacity = 0;
    for (node, began) in began {
        let Some(sizes) = sizes.get(&node) else {
            return Err(failed(format!("node {node} has an account and was never stored; restore a backup")));
        };
        for (index, (since, gpus)) in sizes.iter().enumerate() {
            let first = if index == 0 { began } else { (*since).max(began) };
            let last = sizes.get(index + 1).map_or(to, |next| next.0.max(began));
            let ms = last.min(to).since(first.max(from));
            capacity += i128::from(*gpus) * i128::from(ms.0);
        }
    }
    Ok(capacity)
}
