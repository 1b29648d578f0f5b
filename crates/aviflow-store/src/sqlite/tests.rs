use super::*;
use crate::contract::{Harness, Rng, World, assert_same, check};
use crate::read::{ActFilter, Filter, Keeper, Reader, Which};
use crate::usage::{By, UsageRow};
use aviflow_core::gpus::{GpuSet, Slots};
use aviflow_core::ledger::{Entry, GpuState, Ledger, Owner, Posting};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, JobId, Node, NodeId, Phase, Queue, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, ActKind, JobRecord};
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

struct Sqlite {
    folder: TempDir,
    store: Option<SqliteStore>,
}

impl Sqlite {
    fn new() -> Sqlite {
        let folder = TempDir::new().unwrap();
        let store = Some(SqliteStore::open(folder.path()).unwrap());
        Sqlite { folder, store }
    }
}

impl Harness for Sqlite {
    fn store(&mut self) -> &mut dyn Store {
        self.store.as_mut().unwrap()
    }
    fn reopen(&mut self) {
        self.store = None;
        self.store = Some(SqliteStore::open(self.folder.path()).unwrap());
    }
    fn rival(&self) -> Box<dyn Store + Send> {
        Box::new(SqliteStore::open_unlocked(self.folder.path()).unwrap())
    }
    fn starve(&mut self, on: bool) {
        let conn = &self.store.as_ref().unwrap().conn;
        let pages: i64 = conn.pragma_query_value(None, "page_count", |r| r.get(0)).unwrap();
        let bound = if on { pages + 20 } else { i64::from(u32::MAX - 1) };
        // The pragma answers with the bound that now holds.
        conn.query_row(&format!("PRAGMA max_page_count = {bound}"), [], |_| Ok(())).unwrap();
    }
    fn job(&self, id: JobId) -> Option<(Job, JobRecord, Option<Time>)> {
        let (kept, record) = self.store.as_ref().unwrap().reader().unwrap().job(id).unwrap()?;
        Some((kept.job, record, kept.ended))
    }
    fn moments(&self, id: JobId) -> Vec<Moment> {
        let rows = self.store.as_ref().unwrap().reader().unwrap().moments(id, 0, u32::MAX).unwrap();
        rows.into_iter().map(|r| r.moment).collect()
    }
    fn acts(&self) -> Vec<Act> {
        all_acts(&self.store.as_ref().unwrap().reader().unwrap())
    }

    fn term(&self) -> Term {
        self.store.as_ref().unwrap().reader().unwrap().term().unwrap()
    }
}

/// Newest first.
pub(super) fn all_acts(reader: &dyn Reader) -> Vec<Act> {
    let filter = ActFilter { limit: u32::MAX, ..ActFilter::default() };
    reader.acts(&filter).unwrap().into_iter().map(|r| r.act).collect()
}

#[test]
fn the_store_on_sqlite_keeps_the_contract() {
    check(|| Box::new(Sqlite::new()));
}

/// A store with random content, its world, and its folder.
fn filled(batches: u64) -> (TempDir, SqliteStore, World) {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    for seed in 0..batches {
        store.commit(&world.batch(&mut Rng(seed))).unwrap();
    }
    (folder, store, world)
}

#[test]
fn a_folder_has_one_holder_and_says_who() {
    let (folder, store, _) = filled(1);
    let e = SqliteStore::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains(&format!("process {} holds the store", std::process::id())), "{e}");
    drop(store);
    SqliteStore::open(folder.path()).unwrap();
}

#[test]
fn the_files_are_the_owners_alone() {
    let (folder, _store, _) = filled(1);
    for name in ["store.db", "store.db-wal", "store.db-shm", "store.lock"] {
        let mode = std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn an_older_program_refuses_a_newer_store() {
    let (folder, store, _) = filled(1);
    store.conn.pragma_update(None, "user_version", 99).unwrap();
    drop(store);
    let newer = StoreError::Newer { found: 99, known: 2 };
    assert_eq!(SqliteStore::open(folder.path()).unwrap_err(), newer);
    assert_eq!(SqliteReader::open(folder.path()).unwrap_err(), newer);
}

#[test]
fn a_file_that_is_no_store_is_named_with_the_way_out() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(FILE);
    std::fs::write(&path, "this is text, and long enough to be read as a header of a database file".repeat(99))
        .unwrap();
    let e = SqliteStore::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains("store.db") && e.contains("restore a backup"), "{e}");
    std::fs::remove_file(&path).unwrap();
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE mine (x)").unwrap();
    let e = SqliteStore::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains("something else"), "{e}");
}

#[test]
fn a_damaged_store_is_said_to_be_damaged() {
    let (folder, store, _) = filled(30);
    drop(store);
    let path = folder.path().join(FILE);
    let mut bytes = std::fs::read(&path).unwrap();
    // Everything after the schema's page.
    bytes[4096..].fill(0x5a);
    std::fs::write(&path, bytes).unwrap();
    let e = SqliteStore::open(folder.path()).unwrap().acquire().unwrap_err().to_string();
    assert!(e.contains("restore a backup"), "{e}");
}

#[test]
fn lists_are_filtered_and_paged_newest_first() {
    let (_folder, store, world) = filled(60);
    let reader = store.reader().unwrap();
    let every = Filter { limit: 10_000, ..Filter::default() };
    let list = |f: Filter| reader.jobs(&f).unwrap().into_iter().map(|k| k.job.id).collect::<Vec<_>>();
    let expected = |keep: &dyn Fn(&Job, bool) -> bool| {
        let jobs = world.all.values().rev();
        jobs.filter(|(j, _, ended)| keep(j, ended.is_some())).map(|(j, _, _)| j.id).collect::<Vec<_>>()
    };
    assert_eq!(list(every.clone()), expected(&|_, _| true));
    assert_eq!(list(Filter { which: Which::Live, ..every.clone() }), expected(&|_, ended| !ended));
    assert_eq!(list(Filter { which: Which::Ended, ..every.clone() }), expected(&|_, ended| ended));
    assert_eq!(list(Filter { user: Some("ada".into()), ..every.clone() }), expected(&|j, _| j.user == "ada"));
    assert_eq!(
        list(Filter { queue: Some("main".into()), phases: vec!["Queued".into(), "Failed".into()], ..every.clone() }),
        expected(&|j, _| j.request.queue == "main" && matches!(j.phase, Phase::Queued | Phase::Failed(_)))
    );
    assert_eq!(
        list(Filter { name_prefix: Some("train-1".into()), ..every.clone() }),
        expected(&|j, _| j.key.name.starts_with("train-1"))
    );
    assert_eq!(list(Filter { name_prefix: Some("train_".into()), ..every.clone() }), []);
    let mut paged = Vec::new();
    let mut page = Filter { limit: 7, ..Filter::default() };
    loop {
        let ids = list(page.clone());
        let Some(last) = ids.last() else { break };
        page.after = Some(*last);
        paged.extend(ids);
    }
    assert_eq!(paged, expected(&|_, _| true));
    let phases = reader.phases().unwrap();
    assert_eq!(phases.values().sum::<u64>(), world.all.len() as u64);
    assert_eq!(reader.objects().unwrap().len(), world.all.len() + 2);
}

#[test]
fn a_job_is_found_by_name_and_the_latest_by_its_work() {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    let mut ids = Vec::new();
    for (name, user) in [("gpt", "ada"), ("gpt-2", "grace"), ("gpt-3", "ada"), ("gpt-xl", "ada")] {
        let (mut job, mut batch) = world.submit(&mut Rng(1));
        job.key.name = name.into();
        job.user = user.into();
        let mut record = (*batch.records[0]).clone();
        record.key = job.key.clone();
        record.spec.name = if name == "gpt-xl" { name } else { "gpt" }.into();
        batch.records = vec![record.into()];
        ids.push(job.id);
        batch.jobs = vec![job];
        store.commit(&batch).unwrap();
    }
    let reader = store.reader().unwrap();
    let key = |name: &str| JobKey { namespace: "default".into(), name: name.into() };
    assert_eq!(reader.find(&key("gpt-2")).unwrap(), Some(ids[1]));
    assert_eq!(reader.find(&key("gpt-9")).unwrap(), None);
    assert_eq!(reader.latest_of("default", "gpt", None).unwrap(), Some(ids[2]));
    assert_eq!(reader.latest_of("default", "gpt", Some("grace")).unwrap(), Some(ids[1]));
    assert_eq!(reader.latest_of("default", "gpt-2", None).unwrap(), None);
    assert_eq!(reader.latest_of("other", "gpt", None).unwrap(), None);
}

#[test]
fn moments_are_followed_from_a_row() {
    let (_folder, store, world) = filled(60);
    let reader = store.reader().unwrap();
    for id in world.all.keys() {
        let expected: Vec<_> = world.moments.iter().filter(|m| m.job == *id).cloned().collect();
        let mut followed = Vec::new();
        let mut row = 0;
        while let Some(next) = reader.moments(*id, row, 1).unwrap().pop() {
            row = next.row;
            followed.push(next.moment);
        }
        assert_eq!(followed, expected);
    }
}

#[test]
fn retention_takes_jobs_with_their_moments_and_leaves_the_account() {
    let (_folder, mut store, world) = filled(60);
    let reader = store.reader().unwrap();
    let before = Time(world.model.clock.0 / 2);
    let gone: Vec<JobId> =
        world.all.iter().filter(|(_, (_, _, e))| e.is_some_and(|e| e < before)).map(|(id, _)| *id).collect();
    assert!(!gone.is_empty());
    let time: Vec<_> = gone.iter().map(|id| reader.job_time(*id).unwrap()).collect();
    let mut keeper = store.keeper().unwrap();
    assert_eq!(keeper.ended_before(before, None).unwrap(), gone);
    assert_eq!(keeper.ended_before(before, Some(gone[0])).unwrap(), gone[1..]);
    // One that is live stays, whoever asks.
    let live: Vec<JobId> = world.model.snapshot.jobs.keys().copied().collect();
    let moments = |id: &JobId| reader.moments(*id, 0, 9).unwrap();
    let told: Vec<_> = live.iter().map(moments).collect();
    keeper.forget(&[&gone[..], &live].concat()).unwrap();
    assert_eq!(live.iter().map(moments).collect::<Vec<_>>(), told);
    assert_eq!(keeper.ended_before(before, None).unwrap(), []);
    for (id, time) in gone.iter().zip(time) {
        assert_eq!(reader.job(*id).unwrap(), None);
        assert_eq!(reader.moments(*id, 0, 9).unwrap(), []);
        assert_eq!(reader.job_time(*id).unwrap(), time);
    }
    assert!(keeper.trim_journal(before).unwrap() > 0);
    assert!(reader.journal(0, 1_000).unwrap().iter().all(|(_, at, _)| *at >= before));
    // What is live is untouched, and numbers go on.
    let mut again = World::new(store.acquire().unwrap());
    assert_eq!(again.model.snapshot, world.model.snapshot);
    assert_eq!(again.submit(&mut Rng(1)).0.id.0, world.model.last_job + 1);
}

#[test]
fn acts_are_found_by_what_they_were_done_to_and_paged_newest_first() {
    let (_folder, store, world) = filled(60);
    let reader = store.reader().unwrap();
    let list = |f: ActFilter| reader.acts(&f).unwrap();
    let acts = |f: ActFilter| list(f).into_iter().map(|r| r.act).collect::<Vec<_>>();
    let expected =
        |keep: &dyn Fn(&Act) -> bool| world.acts.iter().rev().filter(|a| keep(a)).cloned().collect::<Vec<_>>();
    let every = ActFilter { limit: 10_000, ..ActFilter::default() };
    assert_eq!(acts(every.clone()), expected(&|_| true));
    for kind in ActKind::ALL {
        assert_eq!(acts(ActFilter { kind: Some(kind), ..every.clone() }), expected(&|a| a.kind == kind));
        let filter = ActFilter { kind: Some(kind), name: Some("a".into()), ..every.clone() };
        assert_eq!(acts(filter), expected(&|a| a.kind == kind && a.name == "a"));
    }
    assert_eq!(acts(ActFilter { by: Some("a".into()), ..every.clone() }), expected(&|a| a.by == "a"));
    let (mut paged, mut page) = (Vec::new(), ActFilter { limit: 7, ..ActFilter::default() });
    loop {
        let rows = list(page.clone());
        let Some(last) = rows.last() else { break };
        page.before = Some(last.row);
        paged.extend(rows.into_iter().map(|r| r.act));
    }
    assert_eq!(paged, expected(&|_| true));
    // Retention.
    let before = Time(world.model.clock.0 / 2);
    let gone = store.keeper().unwrap().trim_acts(before).unwrap();
    assert!(gone > 0);
    assert_eq!(acts(every), expected(&|a| a.at >= before));
}

#[test]
fn a_store_of_the_first_version_is_brought_up_to_date() {
    let folder = TempDir::new().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let conn = schema::of_version(&folder.path().join(FILE), 1);
    // As the first version wrote them: a node, a queue, a job that waits and its document.
    let node = r#"{"id":1,"name":"n1","pool":"local","gpu_type":"virtual","gpus":255,"held":0,"unhealthy":0,"condition":"ready"}"#;
    let queue = r#"{"name":"default","parent":null,"state":"open"}"#;
    let job = r#"{"id":1,"key":{"namespace":"default","name":"old"},"user":"ada","request":{"queue":"default","priority":0,
        "nodes":{"min":1,"max":1},"gpus_per_node":2,"gpu_types":[],"ranks_per_node":1,"time_limit":null,"preemptible":true,
        "failures_allowed":0,"grace":30000},"environment":null,"submitted":5,"phase":"queued","attempts":0,
        "counters":{"failures":0,"nodeFailures":0,"suspensions":0,"unready":0},"ran":0,"best_step":null,
        "checkpoint":null,"not_before":null}"#;
    let mut world = World::new(Loaded { term: Term(1), ..Loaded::default() });
    let (_, batch) = world.submit(&mut Rng(1));
    let record = serde_json::to_string(&*batch.records[0]).unwrap();
    conn.execute("INSERT INTO nodes VALUES (1, 'n1', ?1)", [node]).unwrap();
    conn.execute("INSERT INTO queues VALUES ('default', ?1)", [queue]).unwrap();
    let text = "INSERT INTO jobs VALUES (1, 'default', 'old', 'old', 'ada', 'default', 'Queued', 5, NULL, ?1, ?2)";
    conn.execute(text, [job, &record]).unwrap();
    conn.execute("UPDATE meta SET term = 4, generation = 9, last_job = 1, last_node = 1", []).unwrap();
    let old = folder.path().join("old.db");
    conn.execute("VACUUM INTO ?1", [old.to_str().unwrap()]).unwrap();
    drop(conn);
    let e = SqliteReader::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains("start the control plane once"), "{e}");
    let check = |folder: &Path| {
        let loaded = SqliteStore::open(folder).unwrap().acquire().unwrap();
        assert_eq!((loaded.generation, loaded.last_job, loaded.last_drain % 1_000_000), (9, loaded.last_job, 0));
        assert_eq!(loaded.snapshot.nodes[&NodeId(1)], Node::new(NodeId(1), "n1", "local", "virtual", Slots::first(8)));
        assert_eq!(loaded.snapshot.queues["default"], Queue::open("default"));
        assert!(loaded.snapshot.waiting.contains(&JobId(1)) && loaded.snapshot.jobs[&JobId(1)].after.is_empty());
    };
    // A backup of the first version comes back into a store of this one, into one of the first, and into none.
    let none = TempDir::new().unwrap();
    restore(&old, none.path()).unwrap();
    check(none.path());
    restore(&old, folder.path()).unwrap();
    check(folder.path());
    restore(&old, folder.path()).unwrap();
    check(folder.path());
}

#[test]
fn a_job_that_moves_is_charged_to_each_queue_for_its_time_there() {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    let (mut job, batch) = world.submit(&mut Rng(1));
    store.commit(&batch).unwrap();
    let gpus = GpuSet::of(NodeId(1), Slots::first(8));
    let owner = Some(Owner { job: job.id, attempt: 1 });
    let entry =
        |from, to| Entry { gpus: gpus.clone(), state: GpuState::Productive, owner, from: Time(from), to: Time(to) };
    let mut commit = |jobs: Vec<Job>, entries| {
        let generation = world.model.generation + 1;
        world.model.generation = generation;
        store.commit(&Batch { term: Term(1), generation, at: Time(1), jobs, entries, ..Batch::default() }).unwrap();
    };
    job.request.queue = "a".into();
    commit(vec![job.clone()], vec![]);
    job.request.queue = "b".into();
    commit(vec![job.clone()], vec![entry(0, 1000)]);
    commit(vec![job], vec![entry(1000, 1500)]);
    let usage = store.reader().unwrap().usage(Time(0), Time(2000), Time(2000), By::Queue).unwrap();
    let rows: Vec<_> = usage.rows.iter().map(|r| (r.key.as_deref(), r.total())).collect();
    assert_eq!(rows, [(Some("a"), 8000), (Some("b"), 4000)]);
}

#[test]
fn the_journal_is_bounded() {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap().with_journal_rows(10);
    let term = store.acquire().unwrap().term;
    for generation in 1..=20 {
        let journal = vec![format!("first of {generation}"), format!("second of {generation}")];
        store.commit(&Batch { term, generation, at: Time(1), journal, ..Batch::default() }).unwrap();
    }
    let rows = store.reader().unwrap().journal(0, 100).unwrap();
    assert_eq!(rows.len(), 10);
    assert_eq!((rows[0].0, rows[9].2.as_str()), (16, "second of 20"));
}

#[test]
fn a_backup_is_a_store_and_comes_back() {
    let (folder, mut store, mut world) = filled(20);
    let backup = folder.path().join("backup.db");
    let saved = world.clone();
    store.backup(&backup).unwrap();
    assert_eq!(std::fs::metadata(&backup).unwrap().permissions().mode() & 0o777, 0o600);
    let e = store.backup(&backup).unwrap_err().to_string();
    assert!(e.contains("exists"), "{e}");
    store.acquire().unwrap();
    world.model.term.0 = 2;
    store.commit(&world.batch(&mut Rng(1000))).unwrap();
    let e = restore(&backup, folder.path()).unwrap_err().to_string();
    assert!(e.contains("holds the store"), "{e}");
    drop(store);
    restore(&backup, folder.path()).unwrap();
    // The state is the backup's, the numbers go on from what was replaced.
    let loaded = SqliteStore::open(folder.path()).unwrap().acquire().unwrap();
    let mut expected = saved.model.clone();
    (expected.term, expected.last_job, expected.last_node) = (Term(3), world.model.last_job, world.model.last_node);
    expected.last_drain = world.model.last_drain;
    assert_same(&loaded, &expected);
    // And what was replaced is whole beside it.
    let other = TempDir::new().unwrap();
    std::fs::rename(folder.path().join("store.db.replaced"), other.path().join(FILE)).unwrap();
    world.model.term.0 = 3;
    assert_same(&SqliteStore::open(other.path()).unwrap().acquire().unwrap(), &world.model);
}

#[test]
fn a_backup_into_an_empty_folder_leaves_a_gap_in_the_numbers() {
    let (folder, store, world) = filled(5);
    let backup = folder.path().join("backup.db");
    store.backup(&backup).unwrap();
    let other = TempDir::new().unwrap();
    restore(&backup, other.path()).unwrap();
    let loaded = SqliteStore::open(other.path()).unwrap().acquire().unwrap();
    assert_eq!(loaded.snapshot, world.model.snapshot);
    assert!(loaded.last_job >= world.model.last_job + 1_000_000 && loaded.term > Term(1_000_000));
}

#[test]
fn what_is_no_backup_is_refused_and_replaces_nothing() {
    let (folder, store, world) = filled(5);
    let backup = folder.path().join("backup.db");
    store.backup(&backup).unwrap();
    drop(store);
    let refused = |bytes: &[u8], why: &str| {
        let bad = folder.path().join("bad.db");
        std::fs::write(&bad, bytes).unwrap();
        let e = restore(&bad, folder.path()).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    let mut damaged = std::fs::read(&backup).unwrap();
    refused(b"", "no backup");
    refused(&b"text".repeat(999), "restore a backup");
    refused(&damaged[..damaged.len() / 2], "damaged");
    damaged[8192..].fill(1);
    refused(&damaged, "damaged");
    let missing = restore(&folder.path().join("none.db"), folder.path()).unwrap_err().to_string();
    assert!(missing.contains("none.db"), "{missing}");
    let mut model = world.model;
    model.term.0 = 2;
    assert_same(&SqliteStore::open(folder.path()).unwrap().acquire().unwrap(), &model);
}

#[test]
fn readers_see_commits_while_the_writer_goes_on() {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap();
    let reader = store.reader().unwrap();
    let mut world = World::new(store.acquire().unwrap());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let reader = reader.clone();
                scope.spawn(move || {
                    let mut seen = 0;
                    loop {
                        let last = reader.journal(200, 1).unwrap().len() == 1;
                        let jobs = reader.jobs(&Filter { limit: 10_000, ..Filter::default() }).unwrap();
                        assert!(jobs.len() >= seen, "jobs that were seen are gone");
                        seen = jobs.len();
                        if last {
                            return seen;
                        }
                    }
                })
            })
            .collect();
        for seed in 0..200 {
            let mut batch = world.batch(&mut Rng(seed));
            batch.journal = vec!["turn".into()];
            store.commit(&batch).unwrap();
        }
        for thread in threads {
            assert_eq!(thread.join().unwrap(), world.all.len());
        }
    });
}

fn node(id: u32) -> Node {
    Node::new(NodeId(id), &format!("n{id}"), "p", "H100", Slots::first(8))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_report_sums_to_the_capacity(
        posts in prop::collection::vec((1u32..4, 0u64..256, 0usize..15, 0i64..10_000, 0u64..4), 0..40),
        per_batch in 1usize..6,
        (from, length) in (-100i64..12_000, 0i64..12_000),
    ) {
        let folder = TempDir::new().unwrap();
        let mut store = SqliteStore::open(folder.path()).unwrap();
        let mut world = World::new(store.acquire().unwrap());
        for _ in 0..3 {
            let (_, batch) = world.submit(&mut Rng(world.model.last_job));
            store.commit(&batch).unwrap();
        }
        let mut ledger = Ledger::default();
        // Node 3 joins later than the others.
        let began = [0, 0, 700];
        let mut batch = Batch { term: Term(1), generation: 4, at: Time(700), ..Batch::default() };
        for id in 1..4u32 {
            batch.nodes.push(node(id));
            ledger.open_node(&node(id), Time(began[id as usize - 1]));
            batch.open.push((NodeId(id), ledger.node(NodeId(id)).to_vec()));
        }
        store.commit(&batch).unwrap();
        let mut entries: Vec<Entry> = Vec::new();
        for (generation, posts) in (5..).zip(posts.chunks(per_batch)) {
            let mut batch = Batch { term: Term(1), generation, at: Time(10_000), ..Batch::default() };
            for (id, mask, state, at, job) in posts {
                let owner = (*job > 0).then_some(Owner { job: JobId(*job), attempt: 1 });
                let gpus = GpuSet::of(NodeId(*id), Slots(*mask));
                batch.entries.extend(ledger.post(&Posting { gpus, state: GpuState::ALL[*state], owner, at: Time(*at) }));
            }
            batch.open = (1..4).map(|id| (NodeId(id), ledger.node(NodeId(id)).to_vec())).collect();
            entries.extend(batch.entries.clone());
            store.commit(&batch).unwrap();
        }
        let (from, to, now) = (Time(from), Time(from + length), Time(11_000));
        let end = to.0.min(now.0).max(from.0);
        let capacity: i128 = began.iter().map(|b| i128::from(8 * (end - from.0.max(*b)).max(0))).sum();
        let reader = store.reader().unwrap();
        for by in [By::User, By::Queue, By::Job, By::State, By::Node] {
            let usage = reader.usage(from, to, now, by).unwrap();
            prop_assert_eq!(usage.capacity, capacity);
            prop_assert_eq!(usage.rows.iter().map(UsageRow::total).sum::<i128>(), capacity);
        }
        let users = reader.usage(from, to, now, By::User).unwrap();
        prop_assert!(users.rows.iter().all(|r| r.key.is_none() || world.all.values().any(|(j, _, _)| Some(&j.user) == r.key.as_ref())));
        for job in 1..4 {
            let expected: i128 = entries.iter().filter(|e| e.owner.is_some_and(|o| o.job == JobId(job))).map(Entry::gpu_ms).sum();
            prop_assert_eq!(reader.job_time(JobId(job)).unwrap().values().sum::<i128>(), expected);
            prop_assert_eq!(reader.entries(JobId(job)).unwrap().iter().map(Entry::gpu_ms).sum::<i128>(), expected);
        }
    }
}

#[test]
fn a_node_that_changes_its_size_still_sums_to_the_capacity() {
    let folder = TempDir::new().unwrap();
    let mut store = SqliteStore::open(folder.path()).unwrap();
    let _ = store.acquire().unwrap();
    let mut ledger = Ledger::default();
    let mut size = |generation, at, gpus| {
        let node = Node { gpus: Slots::first(gpus), ..node(1) };
        let entries = match generation {
            1 => {
                ledger.open_node(&node, Time(at));
                vec![]
            }
            _ => ledger.resize_node(NodeId(1), node.gpus, Time(at)),
        };
        let open = vec![(NodeId(1), ledger.node(NodeId(1)).to_vec())];
        let batch =
            Batch { term: Term(1), generation, at: Time(at), nodes: vec![node], open, entries, ..Batch::default() };
        store.commit(&batch).unwrap();
    };
    size(1, 1000, 8);
    size(2, 2000, 4);
    size(3, 3000, 0);
    size(4, 5000, 2);
    let reader = store.reader().unwrap();
    for (from, to, expected) in [(0, 6000, 8000 + 4000 + 2000), (1500, 2500, 4000 + 2000), (3000, 5000, 0)] {
        let usage = reader.usage(Time(from), Time(to), Time(9000), By::State).unwrap();
        assert_eq!(usage.capacity, expected);
        assert_eq!(usage.rows.iter().map(UsageRow::total).sum::<i128>(), expected);
    }
}

#[test]
#[ignore = "prints what a commit and a load cost; for people"]
fn cost() {
    let (folder, mut store, mut world) = filled(0);
    let mut batch = Batch { term: Term(1), generation: 1, at: Time(1), ..Batch::default() };
    for i in 0..10_000 {
        let (job, one) = world.submit(&mut Rng(i));
        batch.jobs.push(job);
        batch.records.extend(one.records);
    }
    let start = std::time::Instant::now();
    store.commit(&batch).unwrap();
    eprintln!("one commit of 10,000 new jobs: {:?}", start.elapsed());
    let start = std::time::Instant::now();
    for generation in 2..1002 {
        let job = world.all[&JobId(generation)].0.clone();
        let batch = Batch { term: Term(1), generation, at: Time(1), jobs: vec![job], ..Batch::default() };
        store.commit(&batch).unwrap();
    }
    eprintln!("a commit of one job, of 1,000: {:?}", start.elapsed() / 1000);
    drop(store);
    let start = std::time::Instant::now();
    let loaded = SqliteStore::open(folder.path()).unwrap().acquire().unwrap();
    eprintln!("open and load of {} jobs: {:?}", loaded.snapshot.jobs.len(), start.elapsed());
    let reader = SqliteReader::open(folder.path()).unwrap();
    let start = std::time::Instant::now();
    let n = reader.jobs(&Filter::default()).unwrap().len();
    eprintln!("a list of {n} jobs: {:?}", start.elapsed());
}
