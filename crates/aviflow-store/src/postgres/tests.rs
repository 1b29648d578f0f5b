use super::*;
use crate::contract::server::Server;
use crate::contract::{Harness, Rng, World, assert_same, check};
use crate::read::{ActFilter, Filter, Keeper, Reader, Which};
use crate::sqlite::SqliteStore;
use crate::usage::By;
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, ActKind, JobRecord};
use proptest::prelude::*;
use std::fmt::Debug;
use std::thread;
use tempfile::TempDir;

/// A store on a database of its own.
pub(super) struct Postgres {
    pub(super) url: String,
    store: PostgresStore,
}

impl Postgres {
    pub(super) fn new() -> Postgres {
        let url = Server::shared().database();
        let store = PostgresStore::open(&url).unwrap();
        Postgres { url, store }
    }

    pub(super) fn psql(&self, text: &str) -> String {
        Server::shared().psql(&self.url, text)
    }

    /// The name of the database.
    pub(super) fn name(&self) -> &str {
        self.url.split(['/', '?']).nth(3).unwrap()
    }
}

impl Harness for Postgres {
    fn store(&mut self) -> &mut dyn Store {
        &mut self.store
    }
    fn reopen(&mut self) {
        self.store = PostgresStore::open(&self.url).unwrap();
    }
    fn rival(&self) -> Box<dyn Store + Send> {
        Box::new(PostgresStore::open(&self.url).unwrap())
    }
    fn starve(&mut self, on: bool) {
        // As a server says it whose disk is full, in the middle of a transaction.
        self.psql(if on {
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'No space left on device' USING ERRCODE = 'disk_full'; END $$;
             CREATE TRIGGER starve BEFORE INSERT ON aviflow.journal FOR EACH STATEMENT EXECUTE FUNCTION full_disk()"
        } else {
            "DROP TRIGGER starve ON aviflow.journal; DROP FUNCTION full_disk"
        });
    }
    fn job(&self, id: JobId) -> Option<(Job, JobRecord, Option<Time>)> {
        let (kept, record) = self.store.reader().job(id).unwrap()?;
        Some((kept.job, record, kept.ended))
    }
    fn moments(&self, id: JobId) -> Vec<Moment> {
        self.store.reader().moments(id, 0, u32::MAX).unwrap().into_iter().map(|r| r.moment).collect()
    }
    fn acts(&self) -> Vec<Act> {
        let filter = ActFilter { limit: u32::MAX, ..ActFilter::default() };
        self.store.reader().acts(&filter).unwrap().into_iter().map(|r| r.act).collect()
    }
    fn term(&self) -> Term {
        self.store.reader().term().unwrap()
    }
}

#[test]
fn the_store_on_postgresql_keeps_the_contract() {
    check(|| Box::new(Postgres::new()));
}

/// Everything that can be asked of a store, as text.
fn answers(reader: &dyn Reader, keeper: &mut dyn Keeper, world: &World) -> Vec<String> {
    let mut out = Vec::new();
    let mut put = |what: String, answer: &dyn Debug| out.push(format!("{what}: {answer:?}"));
    let every = Filter { limit: 1000, ..Filter::default() };
    let some = |text: &str| Some(text.to_owned());
    let filters = [
        Filter::default(),
        Filter { which: Which::Live, ..every.clone() },
        Filter { which: Which::Ended, user: some("ünal"), ..every.clone() },
        Filter { phases: vec!["Queued".into(), "Failed".into()], queue: some("main"), ..every.clone() },
        Filter { phases: vec!["None".into()], ..every.clone() },
        Filter { namespaces: Some(vec!["other".into()]), ..every.clone() },
        Filter { namespaces: Some(vec!["other".into(), "default".into()]), ..every.clone() },
        Filter { namespaces: Some(Vec::new()), ..every.clone() },
        Filter { name_prefix: some("train-1"), after: Some(JobId(15)), limit: 3, ..Filter::default() },
        Filter { name_prefix: some("train_"), ..every },
    ];
    for filter in filters {
        put(format!("{filter:?}"), &reader.jobs(&filter).unwrap());
    }
    put("phases".into(), &reader.phases().unwrap());
    put("namespaces".into(), &reader.namespaces().unwrap());
    put("nodes".into(), &reader.nodes().unwrap());
    put("objects".into(), &reader.objects().unwrap());
    put("journal".into(), &reader.journal(3, 10).unwrap());
    for id in (1..=world.model.last_job + 1).map(JobId) {
        let key = JobKey { namespace: "default".into(), name: format!("train-{}", id.0) };
        put(format!("job {}", id.0), &reader.job(id).unwrap());
        put("find".into(), &reader.find(&key).unwrap());
        put("latest".into(), &reader.latest_of("default", &key.name, Some("ada")).unwrap());
        put("moments".into(), &reader.moments(id, 2, 3).unwrap());
        put("entries".into(), &reader.entries(id).unwrap());
        put("time".into(), &reader.job_time(id).unwrap());
    }
    let names = world.acts.iter().map(|a| Some(a.name.clone())).chain([None]);
    for (name, kind) in names.flat_map(|name| ActKind::ALL.map(|kind| (name.clone(), kind))) {
        let filter = ActFilter { kind: Some(kind), name, ..ActFilter::default() };
        put(format!("{filter:?}"), &reader.acts(&filter).unwrap());
    }
    let filter = ActFilter { by: some("\u{0}nul"), before: Some(9), limit: 2, ..ActFilter::default() };
    put(format!("{filter:?}"), &reader.acts(&filter).unwrap());
    for by in [By::User, By::Queue, By::Job, By::State, By::Node] {
        for (from, to) in [(0, 1 << 42), (1 << 39, 1 << 40), (1 << 40, 1 << 39)] {
            // Random nodes may have an account and no size, which both refuse.
            put(format!("{by:?} {from} {to}"), &reader.usage(Time(from), Time(to), Time(1 << 41), by));
        }
    }
    put("ended".into(), &keeper.ended_before(Time(i64::MAX), None).unwrap());
    put("ended".into(), &keeper.ended_before(Time(10_000), Some(JobId(2))).unwrap());
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_stores_give_the_same_answers(seeds in prop::collection::vec(any::<u64>(), 1..25), old in 0i64..30) {
        let folder = TempDir::new().unwrap();
        let mut sqlite = SqliteStore::open(folder.path()).unwrap().with_journal_rows(20);
        let mut postgres = Postgres::new().store.with_journal_rows(20);
        let mut world = World::new(sqlite.acquire().unwrap());
        assert_same(&postgres.acquire().unwrap(), &world.model);
        for seed in seeds {
            let batch = world.batch(&mut Rng(seed));
            sqlite.commit(&batch).unwrap();
            postgres.commit(&batch).unwrap();
        }
        let mut keepers: [Box<dyn Keeper>; 2] = [Box::new(sqlite.keeper().unwrap()), Box::new(postgres.keeper())];
        let readers: [Box<dyn Reader>; 2] = [Box::new(sqlite.reader().unwrap()), Box::new(postgres.reader())];
        let [first, second] = [0, 1].map(|i| answers(readers[i].as_ref(), keepers[i].as_mut(), &world));
        for (first, second) in first.iter().zip(&second) {
            // The names of the databases are in front of what they refuse.
            prop_assert_eq!(first, &second.replace(&format!("{}: ", postgres.shown()), ""));
        }
        // And after what is old has gone.
        let before = Time(old * 1_234);
        let removed = keepers.each_mut().map(|keeper| {
            let jobs = keeper.ended_before(before, None).unwrap();
            keeper.forget(&jobs).unwrap();
            (jobs, keeper.trim_acts(before).unwrap(), keeper.trim_journal(before).unwrap())
        });
        prop_assert_eq!(&removed[0], &removed[1]);
        let [first, second] = [0, 1].map(|i| answers(readers[i].as_ref(), keepers[i].as_mut(), &world));
        for (first, second) in first.iter().zip(&second) {
            prop_assert_eq!(first, &second.replace(&format!("{}: ", postgres.shown()), ""));
        }
        let loaded = sqlite.acquire().unwrap();
        assert_same(&postgres.acquire().unwrap(), &loaded);
    }
}

#[test]
fn who_was_fenced_takes_the_store_no_more() {
    let mut first = Postgres::new();
    let mut world = World::new(first.store.acquire().unwrap());
    first.store.commit(&world.batch(&mut Rng(1))).unwrap();
    // After a failure it may take its own store again.
    assert_eq!(first.store.acquire().unwrap().term, Term(2));
    let mut second = PostgresStore::open(&first.url).unwrap().called("aviflow-1");
    assert_eq!(second.acquire().unwrap().term, Term(3));
    let fenced = StoreError::Fenced { ours: 2, held: 3, by: Some("aviflow-1".to_owned()) };
    assert_eq!(first.store.acquire().unwrap_err(), fenced);
    assert!(
        fenced.to_string().starts_with("another control plane, aviflow-1, took over the store (term 3"),
        "{fenced}"
    );
    world.model.term = Term(2);
    assert_eq!(first.store.commit(&world.clone().batch(&mut Rng(2))), Err(fenced));
    world.model.term = Term(3);
    second.commit(&world.batch(&mut Rng(2))).unwrap();
    // A new process may, whoever held it: somebody has decided that it should.
    world.model.term = Term(4);
    assert_same(&PostgresStore::open(&first.url).unwrap().acquire().unwrap(), &world.model);
}

#[test]
fn an_older_program_refuses_a_newer_store_also_while_it_holds_it() {
    let mut postgres = Postgres::new();
    let mut world = World::new(postgres.store.acquire().unwrap());
    postgres.psql("UPDATE aviflow.meta SET version = 99");
    let newer = StoreError::Newer { found: 99, known: schema::VERSION };
    assert_eq!(postgres.store.commit(&world.batch(&mut Rng(1))), Err(newer.clone()));
    assert_eq!(postgres.store.acquire().unwrap_err(), newer);
    assert_eq!(PostgresStore::open(&postgres.url).unwrap_err(), newer);
    assert_eq!(postgres.store.reader().phases().unwrap_err(), newer);
    assert_eq!(postgres.psql("SELECT term, generation FROM aviflow.meta"), "1|0");
}

#[test]
fn who_only_opens_a_store_changes_nothing_there() {
    let postgres = Postgres::new();
    let e = postgres.store.reader().phases().unwrap_err().to_string();
    assert!(e.contains("holds no store yet; start the control plane once"), "{e}");
    assert_eq!(postgres.psql("SELECT to_regnamespace('aviflow') IS NULL"), "t");
}

#[test]
fn two_that_make_the_store_at_once_both_succeed() {
    for _ in 0..8 {
        let url = Server::shared().database();
        let stores = [(); 2].map(|()| PostgresStore::open(&url).unwrap());
        let mut terms = thread::scope(|scope| {
            let threads = stores.map(|mut store| scope.spawn(move || store.acquire().unwrap().term));
            threads.map(|thread| thread.join().unwrap())
        });
        terms.sort();
        assert_eq!(terms, [Term(1), Term(2)]);
    }
}

#[test]
fn a_database_that_cannot_hold_a_store_is_named_with_the_way_out() {
    let server = Server::shared();
    server.psql("postgres", "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0");
    server.psql("postgres", "CREATE ROLE guest LOGIN");
    let database = Postgres::new();
    let missing = server.url("missing");
    let guest = database.url.replace("user=aviflow", "user=guest&password=s3cret");
    let nowhere = "postgres://ada:s3cret@127.0.0.1:1/flow".to_owned();
    for (url, expected) in [
        (server.url("latin"), "create the database with ENCODING 'UTF8'"),
        (missing, "\"missing\" does not exist"),
        (guest, "permission denied for database"),
        (nowhere, "cannot connect to postgres://ada@127.0.0.1:1/flow"),
    ] {
        let e = PostgresStore::open(&url).and_then(|mut store| store.acquire()).unwrap_err().to_string();
        assert!(e.contains(expected) && !e.contains("s3cret"), "{e}");
    }
}

#[test]
fn what_the_server_would_forget_is_asked_to_be_kept() {
    let postgres = Postgres::new();
    postgres.psql(&format!("ALTER DATABASE {} SET synchronous_commit = off", postgres.name()));
    let store = PostgresStore::open(&postgres.url).unwrap();
    let session = store.session.as_ref().unwrap();
    let found = store.database.wait(session.simple("SHOW synchronous_commit")).unwrap().unwrap();
    assert_eq!(found, ["on"]);
}

#[test]
fn a_dump_comes_back_and_its_numbers_are_raised() {
    let mut postgres = Postgres::new();
    let mut world = World::new(postgres.store.acquire().unwrap());
    for seed in 0..10 {
        postgres.store.commit(&world.batch(&mut Rng(seed))).unwrap();
    }
    let server = Server::shared();
    let dump = server.program("pg_dump").args(["--no-owner", "--schema=aviflow"]).arg(&postgres.url).output().unwrap();
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    let url = server.database();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("store-backup.sql");
    std::fs::write(&file, dump.stdout).unwrap();
    let restored = server.program("psql").args(["-Xq", "-v", "ON_ERROR_STOP=1", "-f"]).arg(&file).arg(&url).output();
    assert!(restored.unwrap().status.success());
    server.psql(&url, RAISE);
    let loaded = PostgresStore::open(&url).unwrap().acquire().unwrap();
    assert_eq!(loaded.snapshot, world.model.snapshot);
    assert_eq!((loaded.term, loaded.last_job), (Term(1_000_002), world.model.last_job + 1_000_000));
    // The page of the documents says the same.
    let page = include_str!("../../../../docs/admin/backup.md");
    assert!(RAISE.lines().all(|line| page.contains(line.trim())), "backup.md does not say {RAISE}");
}

/// What an administrator runs after a restore.
const RAISE: &str = "UPDATE aviflow.meta SET term = term + 1000000, last_job = last_job + 1000000,
    last_node = last_node + 1000000, last_drain = last_drain + 1000000;";

#[test]
fn the_database_may_be_away_for_a_while() {
    let folder = TempDir::new().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let server = Server::start(folder.path(), false);
    let mut store = PostgresStore::open(&server.database()).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    let reader = store.reader();
    store.commit(&world.batch(&mut Rng(1))).unwrap();
    assert_eq!(reader.phases().unwrap().values().sum::<u64>(), world.all.len() as u64);
    drop(server);
    let e = store.commit(&world.clone().batch(&mut Rng(2))).unwrap_err().to_string();
    assert!(e.contains("cannot connect to postgres://aviflow@"), "{e}");
    assert!(reader.phases().unwrap_err().to_string().contains("cannot connect"));
    assert!(store.acquire().unwrap_err().to_string().contains("cannot connect"));
    let _server = Server::start(folder.path(), false);
    // It lost its connections and nothing else.
    store.commit(&world.batch(&mut Rng(2))).unwrap();
    assert_eq!(reader.phases().unwrap().values().sum::<u64>(), world.all.len() as u64);
    world.model.term = Term(2);
    assert_same(&store.acquire().unwrap(), &world.model);
}

#[test]
fn a_client_that_vanished_holds_up_nobody_for_long() {
    let mut postgres = Postgres::new();
    let mut world = World::new(postgres.store.acquire().unwrap());
    // One that locked the store and is never heard again; its connection stays.
    let vanished = PostgresStore::open(&postgres.url).unwrap();
    let session = vanished.session.as_ref().unwrap();
    let lock = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '300ms'; SELECT term FROM meta FOR UPDATE";
    vanished.database.wait(session.simple(lock)).unwrap().unwrap();
    postgres.store.commit(&world.batch(&mut Rng(1))).unwrap();
    let timeout = "SHOW idle_in_transaction_session_timeout";
    let fresh = PostgresStore::open(&postgres.url).unwrap();
    let shown = fresh.database.wait(fresh.session.as_ref().unwrap().simple(timeout)).unwrap().unwrap();
    assert_eq!(shown, ["10s"], "and the bound is there by itself");
}

#[test]
#[ignore = "prints what a commit and a load cost; for people"]
fn cost() {
    let mut postgres = Postgres::new();
    let store = &mut postgres.store;
    let mut world = World::new(store.acquire().unwrap());
    let mut batch = Batch { term: Term(1), generation: 1, at: Time(1), ..Batch::default() };
    for i in 0..10_000 {
        let (job, one) = world.submit(&mut Rng(i));
        batch.jobs.push(job);
        batch.records.extend(one.records);
    }
    let start = Instant::now();
    store.commit(&batch).unwrap();
    eprintln!("one commit of 10,000 new jobs: {:?}", start.elapsed());
    let start = Instant::now();
    for generation in 2..1002 {
        let job = world.all[&JobId(generation)].0.clone();
        let batch = Batch { term: Term(1), generation, at: Time(1), jobs: vec![job], ..Batch::default() };
        store.commit(&batch).unwrap();
    }
    eprintln!("a commit of one job, of 1,000: {:?}", start.elapsed() / 1000);
    let start = Instant::now();
    let loaded = PostgresStore::open(&postgres.url).unwrap().acquire().unwrap();
    eprintln!("open and load of {} jobs: {:?}", loaded.snapshot.jobs.len(), start.elapsed());
    let start = Instant::now();
    let n = postgres.store.reader().jobs(&Filter::default()).unwrap().len();
    eprintln!("a list of {n} jobs: {:?}", start.elapsed());
}
