//! Writing a batch: one statement for each kind of thing, over arrays.
//!
//! All statements are sent at once and their answers read together, so that a
//! batch costs one round trip however much there is in it.

use super::connect::{Session, Trouble};
use super::convert::{Value, get, params};
use crate::convert::{failed, int, to_json};
use crate::settings;
use aviflow_core::ledger::{Entry, Open};
use aviflow_core::model::{Job, JobId, NodeId};
use aviflow_engine::ports::{Batch, JobRecord, StoreError};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// The last numbers of rows, as the store has them before the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    pub(super) entry: i64,
    pub(super) moment: i64,
    pub(super) act: i64,
    pub(super) journal: i64,
}

/// A statement with its parameters.
struct Write {
    text: &'static str,
    values: Vec<Value>,
}

/// Writes a batch within the caller's transaction.
pub(super) async fn batch(session: &Session, batch: &Batch, last: Numbers, journal_rows: u64) -> Result<(), Trouble> {
    let (inserted, updated) = split(batch)?;
    let mut writes = Vec::new();
    if !inserted.is_empty() {
        writes.push(insert(&inserted, batch)?);
    }
    // Between the two: what a job's time was spent on belongs to the queue that it was in
    // until this batch, and to the first one if it is new.
    entries(&batch.entries, last.entry, &mut writes)?;
    let update_at = writes.len();
    if !updated.is_empty() {
        writes.push(update(&updated, batch)?);
    }
    nodes(batch, &mut writes)?;
    documents(batch, &mut writes)?;
    accounts(batch, &mut writes)?;
    told(batch, last, journal_rows, &mut writes)?;
    writes.push(meta(batch));
    if let Some(paused) = &batch.paused {
        writes.push(Write { text: "UPDATE meta SET paused = $1", values: vec![Value::opt_text(paused.as_deref())] });
    }
    if let Some(beyond) = batch.beyond {
        let text = "UPDATE meta SET term = greatest(term, $1), last_job = greatest(last_job, $2)";
        writes.push(Write { text, values: vec![Value::Int(int(beyond.term)), Value::Int(int(beyond.job))] });
    }
    let changed = pipeline(session, &writes).await?;
    if !updated.is_empty() && changed[update_at] != updated.len() as u64 {
        return Err(unknown_job(session, &updated).await?.into());
    }
    Ok(())
}

/// Sends all, then waits for all. The first error is the one that counts: what follows it fails because of it.
async fn pipeline(session: &Session, writes: &[Write]) -> Result<Vec<u64>, Trouble> {
    type Answer<'a> = Pin<Box<dyn Future<Output = Result<u64, tokio_postgres::Error>> + Send + 'a>>;
    let values: Vec<_> = writes.iter().map(|write| params(&write.values)).collect();
    // A statement is sent when its answer is first polled.
    let mut answers: Vec<Answer<'_>> = Vec::with_capacity(writes.len());
    for (write, values) in writes.iter().zip(&values) {
        answers.push(Box::pin(session.client.execute_typed(write.text, values)));
    }
    let mut results: Vec<Option<Result<u64, tokio_postgres::Error>>> = writes.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut done = true;
        for (answer, result) in answers.iter_mut().zip(&mut results) {
            if result.is_none() {
                match answer.as_mut().poll(cx) {
                    Poll::Ready(ready) => *result = Some(ready),
                    Poll::Pending => done = false,
                }
            }
        }
        if done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().map(|result| result.map_err(Trouble::from)).collect()
}

/// A job with its document.
type New<'a> = (&'a Job, &'a JobRecord);

/// New jobs with their documents, and jobs that changed; of each the last state that the batch has.
fn split(batch: &Batch) -> Result<(Vec<New<'_>>, Vec<&Job>), StoreError> {
    let mut records: BTreeMap<JobId, &JobRecord> = batch.records.iter().map(|r| (r.id, r.as_ref())).collect();
    let jobs: BTreeMap<JobId, &Job> = batch.jobs.iter().map(|j| (j.id, j)).collect();
    let (mut inserted, mut updated) = (Vec::new(), Vec::new());
    for (id, job) in jobs {
        match records.remove(&id) {
            Some(record) => inserted.push((job, record)),
            None => updated.push(job),
        }
    }
    match records.keys().next() {
        Some(id) => Err(failed(format!("job {} came with a document and no state", id.0))),
        None => Ok((inserted, updated)),
    }
}

fn ended(job: &Job, batch: &Batch) -> Option<i64> {
    let at = batch.ended.get(&job.id).copied().unwrap_or(batch.at);
    job.phase.is_terminal().then_some(at.0)
}

fn insert(jobs: &[New<'_>], batch: &Batch) -> Result<Write, StoreError> {
    fn texts<'a>(jobs: &'a [New<'a>], f: impl Fn(&New<'a>) -> &'a str) -> Value {
        Value::texts(jobs.iter().map(f))
    }
    Ok(Write {
        text: "INSERT INTO jobs (id, namespace, name, work, \"user\", queue, phase, submitted, ended, job, record)
               SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        values: vec![
            Value::Ints(jobs.iter().map(|(j, _)| int(j.id.0)).collect()),
            texts(jobs, |(j, _)| &j.key.namespace),
            texts(jobs, |(j, _)| &j.key.name),
            texts(jobs, |(_, r)| &r.spec.name),
            texts(jobs, |(j, _)| &j.user),
            texts(jobs, |(j, _)| &j.request.queue),
            texts(jobs, |(j, _)| j.phase.name()),
            Value::Ints(jobs.iter().map(|(j, _)| j.submitted.0).collect()),
            Value::OptInts(jobs.iter().map(|(j, _)| ended(j, batch)).collect()),
            jsons(jobs.iter().map(|(j, _)| *j))?,
            jsons(jobs.iter().map(|(_, r)| *r))?,
        ],
    })
}

/// A job ends once: the first end stays.
fn update(jobs: &[&Job], batch: &Batch) -> Result<Write, StoreError> {
    Ok(Write {
        text: "UPDATE jobs SET queue = n.queue, phase = n.phase, ended = coalesce(jobs.ended, n.ended), job = n.job
               FROM unnest($1, $2, $3, $4, $5) AS n (id, queue, phase, ended, job) WHERE jobs.id = n.id",
        values: vec![
            Value::Ints(jobs.iter().map(|j| int(j.id.0)).collect()),
            Value::texts(jobs.iter().map(|j| j.request.queue.as_str())),
            Value::texts(jobs.iter().map(|j| j.phase.name())),
            Value::OptInts(jobs.iter().map(|j| ended(j, batch)).collect()),
            jsons(jobs.iter().copied())?,
        ],
    })
}

/// Which of the jobs is not there.
async fn unknown_job(session: &Session, jobs: &[&Job]) -> Result<StoreError, Trouble> {
    let text = "SELECT min(n.id) FROM unnest($1) AS n (id) WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.id = n.id)";
    let rows = session.query(text, &[Value::Ints(jobs.iter().map(|j| int(j.id.0)).collect())]).await?;
    let id: Option<i64> = rows.first().map(|r| get(r, 0)).transpose()?.flatten();
    Ok(failed(format!("job {} changed and its document was never stored", id.unwrap_or_default())))
}

fn jsons<'a, T: serde::Serialize + 'a>(values: impl IntoIterator<Item = &'a T>) -> Result<Value, StoreError> {
    Ok(Value::Texts(values.into_iter().map(to_json).collect::<Result<_, _>>()?))
}

/// Closed intervals, each with whose it was.
fn entries(entries: &[Entry], last: i64, writes: &mut Vec<Write>) -> Result<(), StoreError> {
    if entries.is_empty() {
        return Ok(());
    }
    writes.push(Write {
        text: "INSERT INTO ledger (id, job, name, attempt, \"user\", queue, state, from_ms, to_ms, gpus, slots)
               SELECT n.id, n.job, jobs.namespace || '/' || jobs.name, n.attempt, jobs.\"user\", jobs.queue,
                      n.state, n.from_ms, n.to_ms, n.gpus, n.slots
               FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) AS n (id, job, attempt, state, from_ms, to_ms, gpus, slots)
               LEFT JOIN jobs ON jobs.id = n.job",
        values: vec![
            numbered(entries, last),
            Value::OptInts(entries.iter().map(|e| Some(int(e.owner?.job.0))).collect()),
            Value::OptInts(entries.iter().map(|e| Some(i64::from(e.owner?.attempt))).collect()),
            Value::texts(entries.iter().map(|e| e.state.name())),
            Value::Ints(entries.iter().map(|e| e.from.0).collect()),
            Value::Ints(entries.iter().map(|e| e.to.0).collect()),
            Value::Ints(entries.iter().map(|e| i64::from(e.gpus.count())).collect()),
            jsons(entries.iter().map(|e| &e.gpus))?,
        ],
    });
    Ok(())
}

/// The numbers of new rows.
fn numbered<T>(rows: &[T], last: i64) -> Value {
    Value::Ints((last + 1..).zip(rows).map(|(number, _)| number).collect())
}

/// Nodes, and how many GPUs each has, where that changed.
fn nodes(batch: &Batch, writes: &mut Vec<Write>) -> Result<(), StoreError> {
    let nodes: BTreeMap<NodeId, _> = batch.nodes.iter().map(|n| (n.id, n)).collect();
    if nodes.is_empty() {
        return Ok(());
    }
    let ids = || Value::Ints(nodes.keys().map(|id| i64::from(id.0)).collect());
    writes.push(Write {
        text: "INSERT INTO nodes (id, name, node) SELECT * FROM unnest($1, $2, $3)
               ON CONFLICT (id) DO UPDATE SET name = excluded.name, node = excluded.node",
        values: vec![ids(), Value::texts(nodes.values().map(|n| n.name.as_str())), jsons(nodes.values().copied())?],
    });
    writes.push(Write {
        text: "INSERT INTO capacity (node, since, gpus)
               SELECT n.node, $3, n.gpus FROM unnest($1, $2) AS n (node, gpus)
               WHERE n.gpus IS DISTINCT FROM
                   (SELECT c.gpus FROM capacity c WHERE c.node = n.node ORDER BY c.since DESC LIMIT 1)
               ON CONFLICT (node, since) DO UPDATE SET gpus = excluded.gpus",
        values: vec![
            ids(),
            Value::Ints(nodes.values().map(|n| i64::from(n.gpus.count())).collect()),
            Value::Int(batch.at.0),
        ],
    });
    Ok(())
}

/// Queues, pools, environments, decayed use and settings.
fn documents(batch: &Batch, writes: &mut Vec<Write>) -> Result<(), StoreError> {
    keyed(
        &batch.queues,
        "INSERT INTO queues (name, queue) SELECT * FROM unnest($1, $2)
         ON CONFLICT (name) DO UPDATE SET queue = excluded.queue",
        "DELETE FROM queues WHERE name = ANY ($1)",
        |name| vec![name],
        writes,
    )?;
    keyed(
        &batch.pools,
        "INSERT INTO pools (name, pool) SELECT * FROM unnest($1, $2)
         ON CONFLICT (name) DO UPDATE SET pool = excluded.pool",
        "DELETE FROM pools WHERE name = ANY ($1)",
        |name| vec![name],
        writes,
    )?;
    keyed(
        &batch.environments,
        "INSERT INTO environments (hash, state) SELECT * FROM unnest($1, $2)
         ON CONFLICT (hash) DO UPDATE SET state = excluded.state",
        "DELETE FROM environments WHERE hash = ANY ($1)",
        |hash| vec![&hash.0],
        writes,
    )?;
    keyed(
        &batch.usage,
        "INSERT INTO decayed (queue, \"user\", value) SELECT * FROM unnest($1, $2, $3)
         ON CONFLICT (queue, \"user\") DO UPDATE SET value = excluded.value",
        "DELETE FROM decayed USING unnest($1, $2) AS n (queue, \"user\")
         WHERE decayed.queue = n.queue AND decayed.\"user\" = n.\"user\"",
        |(queue, user)| vec![queue, user],
        writes,
    )?;
    let settings = settings::changed(batch)?;
    if !settings.is_empty() {
        let (names, values): (Vec<_>, Vec<_>) = settings.into_iter().unzip();
        writes.push(Write {
            text: "INSERT INTO settings (name, value) SELECT * FROM unnest($1, $2)
                   ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            values: vec![Value::texts(names), Value::Texts(values)],
        });
    }
    Ok(())
}

/// What there is under a key: put where there is a value, deleted where there is none. The last word counts.
fn keyed<K: Ord, V: serde::Serialize>(
    changes: &[(K, Option<V>)],
    put: &'static str,
    delete: &'static str,
    columns: impl Fn(&K) -> Vec<&String>,
    writes: &mut Vec<Write>,
) -> Result<(), StoreError> {
    let last: BTreeMap<&K, &Option<V>> = changes.iter().map(|(key, value)| (key, value)).collect();
    let there: Vec<(&K, &V)> = last.iter().filter_map(|(key, value)| Some((*key, value.as_ref()?))).collect();
    let gone: Vec<&K> = last.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| *key).collect();
    let keys = |keys: Vec<&K>| -> Vec<Value> {
        let rows: Vec<Vec<&String>> = keys.into_iter().map(&columns).collect();
        let width = rows.first().map_or(0, Vec::len);
        (0..width).map(|column| Value::texts(rows.iter().map(|row| row[column].as_str()))).collect()
    };
    if !there.is_empty() {
        let mut values = keys(there.iter().map(|(key, _)| *key).collect());
        values.push(jsons(there.iter().map(|(_, value)| *value))?);
        writes.push(Write { text: put, values });
    }
    if !gone.is_empty() {
        writes.push(Write { text: delete, values: keys(gone) });
    }
    Ok(())
}

/// The open intervals of nodes. A node's account begins with the first of them, or with an
/// entry of the same batch that is older still.
fn accounts(batch: &Batch, writes: &mut Vec<Write>) -> Result<(), StoreError> {
    let open: BTreeMap<NodeId, &Vec<Open>> = batch.open.iter().map(|(node, open)| (*node, open)).collect();
    if open.is_empty() {
        return Ok(());
    }
    let began = |(node, open): (&NodeId, &&Vec<Open>)| {
        let closed = batch.entries.iter().filter(|e| !e.gpus.on(*node).is_empty()).map(|e| e.from);
        open.iter().map(|o| o.from).chain(closed).min().unwrap_or(batch.at).0
    };
    writes.push(Write {
        text: "INSERT INTO accounts (node, began, intervals) SELECT * FROM unnest($1, $2, $3)
               ON CONFLICT (node) DO UPDATE SET intervals = excluded.intervals",
        values: vec![
            Value::Ints(open.keys().map(|node| i64::from(node.0)).collect()),
            Value::Ints(open.iter().map(began).collect()),
            jsons(open.values().copied())?,
        ],
    });
    Ok(())
}

/// Moments, acts and the journal.
fn told(batch: &Batch, last: Numbers, journal_rows: u64, writes: &mut Vec<Write>) -> Result<(), StoreError> {
    let (moments, acts) = (&batch.moments, &batch.acts);
    if !moments.is_empty() {
        writes.push(Write {
            text: "INSERT INTO moments (id, job, at, attempt, kind) SELECT * FROM unnest($1, $2, $3, $4, $5)",
            values: vec![
                numbered(moments, last.moment),
                Value::Ints(moments.iter().map(|m| int(m.job.0)).collect()),
                Value::Ints(moments.iter().map(|m| m.at.0).collect()),
                Value::Ints(moments.iter().map(|m| i64::from(m.attempt)).collect()),
                jsons(moments.iter().map(|m| &m.kind))?,
            ],
        });
    }
    if !acts.is_empty() {
        writes.push(Write {
            text: "INSERT INTO acts (id, at, by, what, kind, name, reason)
                   SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7)",
            values: vec![
                numbered(acts, last.act),
                Value::Ints(acts.iter().map(|a| a.at.0).collect()),
                Value::texts(acts.iter().map(|a| a.by.as_str())),
                Value::texts(acts.iter().map(|a| a.what.as_str())),
                Value::texts(acts.iter().map(|a| a.kind.name())),
                Value::texts(acts.iter().map(|a| a.name.as_str())),
                Value::opt_texts(acts.iter().map(|a| a.reason.as_deref())),
            ],
        });
    }
    if !batch.journal.is_empty() {
        writes.push(Write {
            text: "INSERT INTO journal (id, generation, at, text)
                   SELECT n.id, $3, $4, n.text FROM unnest($1, $2) AS n (id, text)",
            values: vec![
                numbered(&batch.journal, last.journal),
                Value::texts(batch.journal.iter().map(String::as_str)),
                Value::Int(int(batch.generation)),
                Value::Int(batch.at.0),
            ],
        });
        // Row numbers only grow, so the bound is one range at the low end.
        let bound = last.journal.saturating_add(length(&batch.journal)).saturating_sub(int(journal_rows));
        writes.push(Write { text: "DELETE FROM journal WHERE id <= $1", values: vec![Value::Int(bound)] });
    }
    Ok(())
}

fn length<T>(rows: &[T]) -> i64 {
    int(rows.len() as u64)
}

fn meta(batch: &Batch) -> Write {
    let last_job = batch.jobs.iter().map(|j| j.id.0).max().unwrap_or(0);
    let last_node = batch.nodes.iter().map(|n| n.id.0).max().unwrap_or(0);
    let last_drain = batch.drains.iter().flatten().map(|d| d.id).max().unwrap_or(0);
    Write {
        text: "UPDATE meta SET generation = $1, clock = greatest(clock, $2), last_job = greatest(last_job, $3),
                   last_node = greatest(last_node, $4), last_drain = greatest(last_drain, $5),
                   last_entry = last_entry + $6, last_moment = last_moment + $7, last_act = last_act + $8,
                   last_journal = last_journal + $9",
        values: vec![
            Value::Int(int(batch.generation)),
            Value::Int(batch.at.0),
            Value::Int(int(last_job)),
            Value::Int(i64::from(last_node)),
            Value::Int(int(last_drain)),
            Value::Int(length(&batch.entries)),
            Value::Int(length(&batch.moments)),
            Value::Int(length(&batch.acts)),
            Value::Int(length(&batch.journal)),
        ],
    }
}
