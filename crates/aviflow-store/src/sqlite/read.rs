//! Reading beside the writer: lists, single jobs, timelines.
//!
//! A reader sees the state of the last commit before its query began.

use super::convert::from_json;
use super::schema::{self, sql};
use super::{FILE, acts, load, usage};
use crate::convert::{gpu_state, int, uint};
use crate::read::{ActFilter, ActRow, Filter, Kept, MomentRow, NAMESPACES, PAGE, Reader, Which};
use crate::usage::{By, Report, Usage};
use aviflow_core::gpus::GpuSet;
use aviflow_core::ledger::{Entry, GpuState, Owner};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{JobId, JobKey, Node, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{JobRecord, StoreError};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Connections that wait for the next query; more are opened while more run at once.
const IDLE_CONNECTIONS: usize = 8;

/// Reads a store beside its writer. Clones share their connections; every call
/// may block on the disk.
#[derive(Clone, Debug)]
pub struct SqliteReader {
    path: PathBuf,
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl SqliteReader {
    /// Opens the store in `folder` for reading.
    ///
    /// # Errors
    /// If there is none, if it is of another version, or damaged.
    pub fn open(folder: &Path) -> Result<SqliteReader, StoreError> {
        let path = folder.join(FILE);
        let conn = schema::open_reader(&path)?;
        Ok(SqliteReader { path, idle: Arc::new(Mutex::new(vec![conn])) })
    }

    /// Runs a query on a connection of its own.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Connection) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut conn = match idle {
            Some(conn) => conn,
            None => schema::open_reader(&self.path)?,
        };
        let out = f(&mut conn);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_CONNECTIONS {
            idle.push(conn);
        }
        out
    }

    fn id_of(&self, text: &str, params: impl rusqlite::Params) -> Result<Option<JobId>, StoreError> {
        self.with(|conn| {
            let id: Option<i64> = conn
                .prepare_cached(text)
                .and_then(|mut q| q.query_row(params, |r| r.get(0)).optional())
                .map_err(sql)?;
            Ok(id.map(|id| JobId(uint(id))))
        })
    }
}

impl Reader for SqliteReader {
    fn term(&self) -> Result<Term, StoreError> {
        self.with(|conn| {
            let term: i64 = conn.query_row("SELECT term FROM meta", [], |r| r.get(0)).map_err(sql)?;
            Ok(Term(uint(term)))
        })
    }

    fn size(&self) -> Result<u64, StoreError> {
        self.with(|conn| {
            let number = |name| conn.pragma_query_value(None, name, |r| r.get::<_, i64>(0)).map_err(sql);
            Ok(uint(number("page_count")?) * uint(number("page_size")?))
        })
    }

    fn jobs(&self, filter: &Filter) -> Result<Vec<Kept>, StoreError> {
        let (text, params) = list_query(filter);
        self.with(|conn| {
            let mut query = conn.prepare_cached(&text).map_err(sql)?;
            let rows = query.query_map(params_from_iter(params), kept).map_err(sql)?;
            rows.collect::<Result<_, _>>().map_err(sql)
        })
    }

    fn phases(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        self.with(|conn| {
            let mut out = BTreeMap::new();
            load::each(conn, "SELECT phase, count(*) FROM jobs GROUP BY phase", |r| {
                out.insert(r.get(0)?, uint(r.get(1)?));
                Ok(())
            })?;
            Ok(out)
        })
    }

    fn namespaces(&self) -> Result<Vec<String>, StoreError> {
        self.with(|conn| {
            let mut out = Vec::new();
            load::each(conn, NAMESPACES, |r| {
                out.push(r.get(0)?);
                Ok(())
            })?;
            Ok(out)
        })
    }

    fn find(&self, key: &JobKey) -> Result<Option<JobId>, StoreError> {
        self.id_of("SELECT id FROM jobs WHERE namespace = ?1 AND name = ?2", (&key.namespace, &key.name))
    }

    fn latest_of(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<JobId>, StoreError> {
        let text = "SELECT id FROM jobs WHERE namespace = ?1 AND work = ?2 AND (?3 IS NULL OR user = ?3)
                    ORDER BY id DESC LIMIT 1";
        self.id_of(text, (namespace, work, user))
    }

    fn job(&self, id: JobId) -> Result<Option<(Kept, JobRecord)>, StoreError> {
        self.with(|conn| {
            conn.prepare_cached("SELECT job, ended, record FROM jobs WHERE id = ?1")
                .and_then(|mut q| {
                    q.query_row([int(id.0)], |r| Ok((kept(r)?, from_json(r.get_ref(2)?.as_str()?)?))).optional()
                })
                .map_err(sql)
        })
    }

    fn moments(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<MomentRow>, StoreError> {
        self.with(|conn| {
            let text = "SELECT id, at, attempt, kind FROM moments WHERE job = ?1 AND id > ?2 ORDER BY id LIMIT ?3";
            let mut query = conn.prepare_cached(text).map_err(sql)?;
            let rows = query
                .query_map((int(job.0), int(after), limit), |r| {
                    let kind = from_json(r.get_ref(3)?.as_str()?)?;
                    let moment = Moment { job, at: Time(r.get(1)?), attempt: r.get(2)?, kind };
                    Ok(MomentRow { row: uint(r.get(0)?), moment })
                })
                .map_err(sql)?;
            rows.collect::<Result<_, _>>().map_err(sql)
        })
    }

    fn entries(&self, job: JobId) -> Result<Vec<Entry>, StoreError> {
        self.with(|conn| {
            let text = "SELECT state, from_ms, to_ms, slots, attempt FROM ledger WHERE job = ?1 ORDER BY from_ms, id";
            let mut query = conn.prepare_cached(text).map_err(sql)?;
            let mut rows = query.query([int(job.0)]).map_err(sql)?;
            let mut out = Vec::new();
            while let Some(r) = rows.next().map_err(sql)? {
                let state = gpu_state(r.get_ref(0).map_err(sql)?.as_str().map_err(|e| sql(e.into()))?)?;
                out.push(entry(r, job, state).map_err(sql)?);
            }
            Ok(out)
        })
    }

    fn job_time(&self, job: JobId) -> Result<BTreeMap<GpuState, i128>, StoreError> {
        self.with(|conn| {
            let text = "SELECT state, sum(gpus * (to_ms - from_ms)) FROM ledger WHERE job = ?1 GROUP BY state";
            let mut query = conn.prepare_cached(text).map_err(sql)?;
            let mut rows = query.query([int(job.0)]).map_err(sql)?;
            let mut out = BTreeMap::new();
            while let Some(r) = rows.next().map_err(sql)? {
                let state = gpu_state(r.get_ref(0).map_err(sql)?.as_str().map_err(|e| sql(e.into()))?)?;
                out.insert(state, i128::from(r.get::<_, i64>(1).map_err(sql)?));
            }
            Ok(out)
        })
    }

    fn nodes(&self) -> Result<Vec<Node>, StoreError> {
        self.with(|conn| {
            let mut out = Vec::new();
            load::each(conn, "SELECT node FROM nodes ORDER BY id", |r| {
                out.push(from_json(r.get_ref(0)?.as_str()?)?);
                Ok(())
            })?;
            Ok(out)
        })
    }

    fn journal(&self, from: u64, limit: u32) -> Result<Vec<(u64, Time, String)>, StoreError> {
        self.with(|conn| {
            let text = "SELECT generation, at, text FROM journal WHERE generation >= ?1 ORDER BY id LIMIT ?2";
            let mut query = conn.prepare_cached(text).map_err(sql)?;
            let rows = query
                .query_map((int(from), limit), |r| Ok((uint(r.get(0)?), Time(r.get(1)?), r.get(2)?)))
                .map_err(sql)?;
            rows.collect::<Result<_, _>>().map_err(sql)
        })
    }

    fn objects(&self) -> Result<BTreeSet<String>, StoreError> {
        self.with(|conn| {
            let mut out = BTreeSet::new();
            load::each(conn, "SELECT record FROM jobs", |r| {
                let record: JobRecord = from_json(r.get_ref(0)?.as_str()?)?;
                out.extend(record.provenance.objects().cloned());
                Ok(())
            })?;
            Ok(out)
        })
    }

    fn acts(&self, filter: &ActFilter) -> Result<Vec<ActRow>, StoreError> {
        self.with(|conn| acts::read(conn, filter))
    }

    fn usage(&self, from: Time, to: Time, now: Time, by: By) -> Result<Usage, StoreError> {
        self.with(|conn| {
            let tx = conn.transaction().map_err(sql)?;
            usage::usage(&tx, Report::new(from, to, now, by))
        })
    }
}

fn kept(r: &Row<'_>) -> rusqlite::Result<Kept> {
    let job = from_json(r.get_ref(0)?.as_str()?)?;
    Ok(Kept { job, ended: r.get::<_, Option<i64>>(1)?.map(Time) })
}

fn entry(r: &Row<'_>, job: JobId, state: GpuState) -> rusqlite::Result<Entry> {
    let gpus: GpuSet = from_json(r.get_ref(3)?.as_str()?)?;
    let owner = Some(Owner { job, attempt: r.get(4)? });
    Ok(Entry { gpus, state, owner, from: Time(r.get(1)?), to: Time(r.get(2)?) })
}

/// The text depends only on which filters are set, so the statement stays cached.
fn list_query(filter: &Filter) -> (String, Vec<Value>) {
    let mut text = String::from("SELECT job, ended FROM jobs WHERE true");
    let mut params: Vec<Value> = Vec::new();
    match filter.which {
        Which::All => {}
        Which::Live => text.push_str(" AND ended IS NULL"),
        Which::Ended => text.push_str(" AND ended IS NOT NULL"),
    }
    if !filter.phases.is_empty() {
        let marks = vec!["?"; filter.phases.len()].join(", ");
        text.push_str(&format!(" AND phase IN ({marks})"));
        params.extend(filter.phases.iter().cloned().map(Value::Text));
    }
    if let Some(namespaces) = &filter.namespaces {
        let marks = vec!["?"; namespaces.len()].join(", ");
        text.push_str(&format!(" AND namespace IN ({marks})"));
        params.extend(namespaces.iter().cloned().map(Value::Text));
    }
    let equal = [("user", &filter.user), ("queue", &filter.queue)];
    for (column, wanted) in equal {
        if let Some(wanted) = wanted {
            text.push_str(&format!(" AND {column} = ?"));
            params.push(Value::Text(wanted.clone()));
        }
    }
    if let Some(prefix) = &filter.name_prefix {
        text.push_str(" AND substr(name, 1, length(?)) = ?");
        params.extend([Value::Text(prefix.clone()), Value::Text(prefix.clone())]);
    }
    if let Some(after) = filter.after {
        text.push_str(" AND id < ?");
        params.push(Value::Integer(int(after.0)));
    }
    text.push_str(" ORDER BY id DESC LIMIT ?");
    params.push(Value::Integer(if filter.limit == 0 { i64::from(PAGE) } else { i64::from(filter.limit) }));
    (text, params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Rng, World};
    use crate::sqlite::SqliteStore;
    use aviflow_engine::ports::Store as _;
    use tempfile::TempDir;

    #[test]
    fn namespaces_are_known_and_filtered_by() {
        let folder = TempDir::new().unwrap();
        let mut store = SqliteStore::open(folder.path()).unwrap();
        let reader = store.reader().unwrap();
        assert_eq!(reader.namespaces().unwrap(), Vec::<String>::new());
        let mut world = World::new(store.acquire().unwrap());
        let mut ids = Vec::new();
        for namespace in ["vision", "nlp", "vision"] {
            let (mut job, mut batch) = world.submit(&mut Rng(1));
            job.key.namespace = namespace.into();
            let mut record = (*batch.records[0]).clone();
            record.key = job.key.clone();
            batch.records = vec![record.into()];
            ids.push(job.id);
            batch.jobs = vec![job];
            store.commit(&batch).unwrap();
        }
        assert_eq!(reader.namespaces().unwrap(), ["nlp", "vision"]);
        let listed = |namespaces: &[&str]| {
            let namespaces = Some(namespaces.iter().map(|n| (*n).to_owned()).collect());
            let found = reader.jobs(&Filter { namespaces, ..Filter::default() }).unwrap();
            found.iter().map(|kept| kept.job.id).collect::<Vec<_>>()
        };
        assert_eq!(listed(&["vision"]), [ids[2], ids[0]]);
        assert_eq!(listed(&["vision", "nlp"]), [ids[2], ids[1], ids[0]]);
        assert_eq!(listed(&[]), []);
    }
}
