//! A connection that is lost at any point of a commit neither loses a batch nor writes it twice.
//!
//! Between store and server stands a relay that ends connections: after so many bytes,
//! by cutting or by having the server terminate its side; or just before or after a
//! COMMIT has passed. Cut on the way back, the COMMIT was carried out and its answer is lost.

use super::tests::Postgres;
use super::*;
use crate::contract::server::Server;
use crate::contract::{Harness, Rng, World, assert_same};
use aviflow_core::model::Term;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;
use std::thread;
use tempfile::TempDir;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// To the server.
    There,
    /// From it.
    Back,
}

/// What happens to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// Nothing.
    Pass,
    /// After so many bytes the next one is cut, or terminated by the server.
    Lose { way: Way, bytes: usize, terminate: bool },
    /// All are cut at the next COMMIT, which arrives or not, and nobody can connect from then on.
    Vanish { arrives: bool },
    /// Nobody can connect.
    Gone,
}

/// A relay in front of the shared server.
struct Relay {
    folder: TempDir,
    plan: Arc<Mutex<Plan>>,
}

impl Relay {
    /// In front of a database, of which connections are terminated.
    fn start(database: &str) -> Relay {
        let folder = TempDir::new().unwrap();
        let listener = UnixListener::bind(folder.path().join(".s.PGSQL.5432")).unwrap();
        let plan = Arc::new(Mutex::new(Plan::Pass));
        let (shared, database) = (Arc::clone(&plan), database.to_owned());
        // Ends with the process.
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                if *shared.lock().unwrap() == Plan::Gone {
                    continue;
                }
                let server = UnixStream::connect(Server::shared().folder().join(".s.PGSQL.5432")).unwrap();
                for (from, to, way) in [(&client, &server, Way::There), (&server, &client, Way::Back)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (plan, database) = (Arc::clone(&shared), database.clone());
                    thread::spawn(move || pass(from, to, way, &plan, &database));
                }
            }
        });
        Relay { folder, plan }
    }

    fn url(&self, database: &str) -> String {
        format!("postgres:///{database}?host={}&user=aviflow", self.folder.path().display())
    }

    fn set(&self, plan: Plan) {
        *self.plan.lock().unwrap() = plan;
    }
}

/// Passes bytes on until an end, or what the plan says.
fn pass(mut from: UnixStream, mut to: UnixStream, way: Way, plan: &Mutex<Plan>, database: &str) {
    let mut buffer = [0; 4096];
    loop {
        let read = from.read(&mut buffer).unwrap_or(0);
        let mut end = read == 0;
        let mut passed = read;
        let mut terminated = false;
        {
            let mut plan = plan.lock().unwrap();
            match *plan {
                Plan::Lose { way: there, bytes, terminate } if there == way && read > 0 => {
                    passed = read.min(bytes);
                    end = read > bytes;
                    terminated = end && terminate;
                    *plan = if end { Plan::Pass } else { Plan::Lose { way, bytes: bytes - read, terminate } };
                }
                Plan::Vanish { arrives } if way == Way::There && buffer[..read].ends_with(b"COMMIT\0") => {
                    passed = if arrives { read } else { 0 };
                    end = true;
                    *plan = Plan::Gone;
                }
                // Answers to what has just arrived.
                Plan::Gone => (passed, end) = (0, true),
                _ => {}
            }
        }
        // Nobody hears of a side that is gone but by the other's end.
        let _ = to.write_all(&buffer[..passed]);
        if terminated {
            let text = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname";
            Server::shared().psql("postgres", &format!("{text} = '{database}'"));
        }
        if end {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// Bytes of a commit at most, each way, so that some limits lie behind its end.
const LONGEST: [(Way, u64); 2] = [(Way::There, 60_000), (Way::Back, 1_200)];

#[test]
fn a_lost_connection_neither_loses_a_batch_nor_writes_it_twice() {
    let direct = Postgres::new();
    let relay = Relay::start(direct.name());
    let mut store = PostgresStore::open(&relay.url(direct.name())).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    let mut rng = Rng(0xc07);
    let (mut lost, mut entries) = ([0, 0], 0);
    for round in 0..120 {
        let batch = world.batch(&mut Rng(round));
        let index = usize::try_from(rng.below(2)).unwrap();
        let (way, most) = LONGEST[index];
        let bytes = usize::try_from(rng.below(most)).unwrap();
        relay.set(Plan::Lose { way, bytes, terminate: rng.below(3) == 0 });
        // One loss is made good within the commit.
        store.commit(&batch).unwrap_or_else(|e| panic!("round {round}, {bytes} bytes {way:?}: {e}"));
        lost[index] += u32::from(*relay.plan.lock().unwrap() == Plan::Pass);
        relay.set(Plan::Pass);
        entries += batch.entries.len();
        if round % 10 == 9 {
            world.model.term = Term(world.model.term.0 + 1);
            assert_same(&store.acquire().unwrap(), &world.model);
        }
        let told: usize = world.all.keys().map(|id| direct.moments(*id).len()).sum();
        assert_eq!(told, world.moments.len(), "round {round}, {bytes} bytes {way:?}");
    }
    assert!(lost[0] > 10 && lost[1] > 10, "of 120 connections only {lost:?} were lost on the way");
    assert_eq!(direct.acts(), world.acts.iter().rev().cloned().collect::<Vec<_>>());
    assert_eq!(direct.psql("SELECT count(*) FROM aviflow.ledger"), entries.to_string());
    for (id, (job, record, ended)) in &world.all {
        assert_eq!(direct.job(*id), Some((job.clone(), record.as_ref().clone(), *ended)));
    }
}

/// A store whose database vanished at the COMMIT of the batch, and the world with and without that.
fn vanished(arrives: bool) -> (Postgres, Relay, PostgresStore, Batch, [World; 2]) {
    let direct = Postgres::new();
    let relay = Relay::start(direct.name());
    let mut store = PostgresStore::open(&relay.url(direct.name())).unwrap();
    store.settle = Duration::ZERO;
    let mut world = World::new(store.acquire().unwrap());
    store.commit(&world.batch(&mut Rng(1))).unwrap();
    let before = world.clone();
    let batch = world.batch(&mut Rng(2));
    relay.set(Plan::Vanish { arrives });
    let e = store.commit(&batch).unwrap_err().to_string();
    assert!(e.contains("whether that commit was written is found out when the database answers again"), "{e}");
    (direct, relay, store, batch, [before, world])
}

#[test]
fn what_became_of_a_commit_is_found_out_when_the_database_is_back() {
    for arrives in [false, true] {
        let (_direct, relay, mut store, _, worlds) = vanished(arrives);
        assert!(store.acquire().unwrap_err().to_string().contains("cannot connect"));
        relay.set(Plan::Pass);
        let mut model = worlds[usize::from(arrives)].model.clone();
        model.term = Term(2);
        assert_same(&store.acquire().unwrap(), &model);
    }
}

#[test]
fn what_became_of_a_commit_is_known_also_after_others_took_over() {
    for arrives in [false, true] {
        let (direct, relay, mut store, batch, mut worlds) = vanished(arrives);
        let world = &mut worlds[usize::from(arrives)];
        for term in 2..4 {
            let mut rival = PostgresStore::open(&direct.url).unwrap();
            world.model.term = Term(term);
            assert_same(&rival.acquire().unwrap(), &world.model);
            rival.commit(&world.batch(&mut Rng(term))).unwrap();
        }
        relay.set(Plan::Pass);
        // Others have written commits of the same number since.
        let database = Arc::clone(&store.database);
        assert_eq!(database.wait(store.settle(&batch, "for a test")).unwrap(), Ok(arrives));
        assert_eq!(store.commit(&batch), Err(StoreError::Fenced { ours: 1, held: 3, by: None }));
        assert_eq!(store.acquire().unwrap_err(), StoreError::Fenced { ours: 1, held: 3, by: None });
    }
}

#[test]
fn who_took_the_store_without_hearing_so_may_take_it_again() {
    let direct = Postgres::new();
    let relay = Relay::start(direct.name());
    let mut store = PostgresStore::open(&relay.url(direct.name())).unwrap();
    store.acquire().unwrap();
    relay.set(Plan::Vanish { arrives: true });
    assert!(store.acquire().is_err());
    relay.set(Plan::Pass);
    assert_eq!(store.acquire().unwrap().term, Term(3));
}
