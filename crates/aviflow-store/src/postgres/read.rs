//! Reading beside the writer: lists, single jobs, timelines, reports.
//!
//! A query sees the state of the last commit before it began.

use super::connect::{Database, Session, Trouble};
use super::convert::{Value, get, json, opt_text, small, text};
use crate::convert::{act_kind, failed, gpu_state, int, uint};
use crate::read::{ActFilter, ActRow, Filter, Kept, MomentRow, NAMESPACES, PAGE, Reader, Which};
use crate::usage::{By, Owner, Report, Usage};
use aviflow_core::ledger::{self, Entry, GpuState, Open};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{JobId, JobKey, Node, NodeId, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, JobRecord, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio_postgres::Row;

/// Reads a store beside its writer. Clones share their connections.
#[derive(Clone, Debug)]
pub struct PostgresReader {
    database: Arc<Database>,
}

impl PostgresReader {
    pub(super) fn new(database: Arc<Database>) -> PostgresReader {
        PostgresReader { database }
    }

    /// The rows of one query, each as `f` makes it.
    fn rows<T>(
        &self,
        text: &str,
        values: &[Value],
        f: impl Fn(&Row) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        self.database.read(async |session| {
            let mut out = Vec::new();
            session
                .each(text, values, |row| {
                    out.push(f(row)?);
                    Ok(())
                })
                .await?;
            Ok(out)
        })
    }

    fn one<T>(
        &self,
        text: &str,
        values: &[Value],
        f: impl Fn(&Row) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.rows(text, values, f)?.pop())
    }
}

impl Reader for PostgresReader {
    fn term(&self) -> Result<Term, StoreError> {
        let term = self.one("SELECT term FROM meta", &[], |r| get(r, 0))?;
        Ok(Term(term.map_or(0, uint)))
    }

    fn size(&self) -> Result<u64, StoreError> {
        let size = self.one("SELECT pg_database_size(current_database())", &[], |r| get(r, 0))?;
        Ok(size.map_or(0, uint))
    }

    fn jobs(&self, filter: &Filter) -> Result<Vec<Kept>, StoreError> {
        let (text, values) = list_query(filter);
        self.rows(&text, &values, kept)
    }

    fn phases(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        let text = "SELECT phase, count(*) FROM jobs GROUP BY phase";
        Ok(self.rows(text, &[], |r| Ok((get(r, 0)?, uint(get(r, 1)?))))?.into_iter().collect())
    }

    fn namespaces(&self) -> Result<Vec<String>, StoreError> {
        self.rows(NAMESPACES, &[], |r| get(r, 0))
    }

    fn find(&self, key: &JobKey) -> Result<Option<JobId>, StoreError> {
        let values = [Value::text(&key.namespace), Value::text(&key.name)];
        self.one("SELECT id FROM jobs WHERE namespace = $1 AND name = $2", &values, job_id)
    }

    fn latest_of(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<JobId>, StoreError> {
        let text = "SELECT id FROM jobs WHERE namespace = $1 AND work = $2 AND ($3 IS NULL OR \"user\" = $3)
                    ORDER BY id DESC LIMIT 1";
        self.one(text, &[Value::text(namespace), Value::text(work), Value::opt_text(user)], job_id)
    }

    fn job(&self, id: JobId) -> Result<Option<(Kept, JobRecord)>, StoreError> {
        let text = "SELECT job, ended, record FROM jobs WHERE id = $1";
        self.one(text, &[Value::Int(int(id.0))], |r| Ok((kept(r)?, json(r, 2)?)))
    }

    fn moments(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<MomentRow>, StoreError> {
        let text = "SELECT id, at, attempt, kind FROM moments WHERE job = $1 AND id > $2 ORDER BY id LIMIT $3";
        let values = [Value::Int(int(job.0)), Value::Int(int(after)), Value::Int(i64::from(limit))];
        self.rows(text, &values, |r| {
            let moment = Moment { job, at: Time(get(r, 1)?), attempt: small(r, 2)?, kind: json(r, 3)? };
            Ok(MomentRow { row: uint(get(r, 0)?), moment })
        })
    }

    fn acts(&self, filter: &ActFilter) -> Result<Vec<ActRow>, StoreError> {
        let mut query = Query::new("SELECT id, at, by, what, kind, name, reason FROM acts");
        query.equal("kind", filter.kind.map(|k| k.name()));
        query.equal("name", filter.name.as_deref());
        query.equal("by", filter.by.as_deref());
        let (text, values) = query.newest_first(filter.before, filter.limit);
        self.rows(&text, &values, |r| {
            let act = Act {
                at: Time(get(r, 1)?),
                by: self::text(r, 2)?,
                what: self::text(r, 3)?,
                kind: act_kind(get(r, 4)?)?,
                name: self::text(r, 5)?,
                reason: opt_text(r, 6)?,
            };
            Ok(ActRow { row: uint(get(r, 0)?), act })
        })
    }

    fn entries(&self, job: JobId) -> Result<Vec<Entry>, StoreError> {
        let text = "SELECT state, from_ms, to_ms, slots, attempt FROM ledger WHERE job = $1 ORDER BY from_ms, id";
        self.rows(text, &[Value::Int(int(job.0))], |r| {
            let owner = Some(ledger::Owner { job, attempt: small(r, 4)? });
            let (from, to) = (Time(get(r, 1)?), Time(get(r, 2)?));
            Ok(Entry { gpus: json(r, 3)?, state: gpu_state(get(r, 0)?)?, owner, from, to })
        })
    }

    fn job_time(&self, job: JobId) -> Result<BTreeMap<GpuState, i128>, StoreError> {
        let text = "SELECT state, sum(gpus * (to_ms - from_ms))::text FROM ledger WHERE job = $1 GROUP BY state";
        let rows = self.rows(text, &[Value::Int(int(job.0))], |r| Ok((gpu_state(get(r, 0)?)?, sum(r, 1)?)))?;
        Ok(rows.into_iter().collect())
    }

    fn usage(&self, from: Time, to: Time, now: Time, by: By) -> Result<Usage, StoreError> {
        self.database.read(async |session| {
            // One snapshot for closed and open intervals, so that none is in both or in neither.
            session.client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
            let usage = usage(session, Report::new(from, to, now, by)).await?;
            session.client.batch_execute("COMMIT").await?;
            Ok(usage)
        })
    }

    fn nodes(&self) -> Result<Vec<Node>, StoreError> {
        self.rows("SELECT node FROM nodes ORDER BY id", &[], |r| json(r, 0))
    }

    fn journal(&self, from: u64, limit: u32) -> Result<Vec<(u64, Time, String)>, StoreError> {
        let text = "SELECT generation, at, text FROM journal WHERE generation >= $1 ORDER BY id LIMIT $2";
        let values = [Value::Int(int(from)), Value::Int(i64::from(limit))];
        self.rows(text, &values, |r| Ok((uint(get(r, 0)?), Time(get(r, 1)?), self::text(r, 2)?)))
    }

    fn objects(&self) -> Result<BTreeSet<String>, StoreError> {
        let records = self.rows("SELECT record FROM jobs", &[], |r| {
            let record: JobRecord = json(r, 0)?;
            Ok(record.provenance.objects().cloned().collect::<Vec<_>>())
        })?;
        Ok(records.into_iter().flatten().collect())
    }
}

fn job_id(row: &Row) -> Result<JobId, StoreError> {
    Ok(JobId(uint(get(row, 0)?)))
}

fn kept(row: &Row) -> Result<Kept, StoreError> {
    Ok(Kept { job: json(row, 0)?, ended: get::<Option<i64>>(row, 1)?.map(Time) })
}

/// PostgreSQL adds into numbers of any size; they come as text.
fn sum(row: &Row, index: usize) -> Result<i128, StoreError> {
    let text: &str = get(row, index)?;
    text.parse().map_err(|_| failed(format!("the ledger's sum {text:?} is no whole number; restore a backup")))
}

/// A list's query: conditions, then pages from the newest row on.
struct Query {
    text: String,
    values: Vec<Value>,
}

impl Query {
    fn new(select: &str) -> Query {
        Query { text: format!("{select} WHERE true"), values: Vec::new() }
    }

    /// Adds a condition; `$` in it stands for the value.
    fn and(&mut self, condition: &str, value: Value) {
        self.values.push(value);
        self.text.push_str(&format!(" AND {}", condition.replace('$', &format!("${}", self.values.len()))));
    }

    fn equal(&mut self, column: &str, wanted: Option<&str>) {
        if let Some(wanted) = wanted {
            self.and(&format!("{column} = $"), Value::text(wanted));
        }
    }

    fn newest_first(mut self, before: Option<u64>, limit: u32) -> (String, Vec<Value>) {
        if let Some(before) = before {
            self.and("id < $", Value::Int(int(before)));
        }
        self.values.push(Value::Int(i64::from(if limit == 0 { PAGE } else { limit })));
        self.text.push_str(&format!(" ORDER BY id DESC LIMIT ${}", self.values.len()));
        (self.text, self.values)
    }
}

fn list_query(filter: &Filter) -> (String, Vec<Value>) {
    let mut query = Query::new("SELECT job, ended FROM jobs");
    match filter.which {
        Which::All => {}
        Which::Live => query.text.push_str(" AND ended IS NULL"),
        Which::Ended => query.text.push_str(" AND ended IS NOT NULL"),
    }
    if !filter.phases.is_empty() {
        query.and("phase = ANY ($)", Value::texts(filter.phases.iter().map(String::as_str)));
    }
    if let Some(namespaces) = &filter.namespaces {
        query.and("namespace = ANY ($)", Value::texts(namespaces.iter().map(String::as_str)));
    }
    query.equal("\"user\"", filter.user.as_deref());
    query.equal("queue", filter.queue.as_deref());
    if let Some(prefix) = &filter.name_prefix {
        query.and("starts_with(name, $)", Value::text(prefix));
    }
    query.newest_first(filter.after.map(|id| id.0), filter.limit)
}

async fn usage(session: &Session, mut report: Report) -> Result<Usage, Trouble> {
    let mut nodes = Vec::new();
    session
        .each("SELECT node FROM nodes", &[], |r| {
            nodes.push(json(r, 0)?);
            Ok(())
        })
        .await?;
    report.nodes(nodes);
    let period = [Value::Int(report.from.0), Value::Int(report.to.0)];
    match report.by {
        By::Node => {
            // Entries may span nodes, so their masks are read one by one.
            let text = "SELECT state, least(to_ms, $2) - greatest(from_ms, $1), slots
                        FROM ledger WHERE to_ms > $1 AND from_ms < $2";
            let add = |r: &Row| {
                report.add_to_nodes(gpu_state(get(r, 0)?)?, get(r, 1)?, &json(r, 2)?);
                Ok(())
            };
            session.each(text, &period, add).await?;
        }
        By::User | By::Queue | By::Job | By::State => {
            let (job, key) = report.columns();
            let text = format!(
                "SELECT {job}::int8, {key}, state, sum(gpus * (least(to_ms, $2) - greatest(from_ms, $1)))::text
                 FROM ledger WHERE to_ms > $1 AND from_ms < $2 GROUP BY 1, 2, 3"
            );
            let add = |r: &Row| {
                let job = get::<Option<i64>>(r, 0)?.map(|id| JobId(uint(id)));
                report.add(job, opt_text(r, 1)?, gpu_state(get(r, 2)?)?, sum(r, 3)?);
                Ok(())
            };
            session.each(&text, &period, add).await?;
        }
    }
    let mut began: BTreeMap<u32, Time> = BTreeMap::new();
    let mut intervals: Vec<(NodeId, Open)> = Vec::new();
    session
        .each("SELECT node, began, intervals FROM accounts", &[], |r| {
            let node = small(r, 0)?;
            began.insert(node, Time(get(r, 1)?));
            let open: Vec<Open> = json(r, 2)?;
            intervals.extend(open.into_iter().map(|o| (NodeId(node), o)));
            Ok(())
        })
        .await?;
    report.add_open(&intervals, &owners(session, &intervals).await?);
    let mut sizes: BTreeMap<u32, Vec<(Time, u32)>> = BTreeMap::new();
    session
        .each("SELECT node, since, gpus FROM capacity ORDER BY node, since", &[], |r| {
            sizes.entry(small(r, 0)?).or_default().push((Time(get(r, 1)?), small(r, 2)?));
            Ok(())
        })
        .await?;
    Ok(report.finish(&began, &sizes)?)
}

/// Whose the open intervals are.
async fn owners(session: &Session, open: &[(NodeId, Open)]) -> Result<BTreeMap<JobId, Owner>, Trouble> {
    let jobs: BTreeSet<i64> = open.iter().filter_map(|(_, o)| Some(int(o.owner?.job.0))).collect();
    let mut out = BTreeMap::new();
    let query = "SELECT id, namespace || '/' || name, \"user\", queue FROM jobs WHERE id = ANY ($1)";
    session
        .each(query, &[Value::Ints(jobs.into_iter().collect())], |r| {
            out.insert(job_id(r)?, Owner { name: text(r, 1)?, user: text(r, 2)?, queue: text(r, 3)? });
            Ok(())
        })
        .await?;
    Ok(out)
}
