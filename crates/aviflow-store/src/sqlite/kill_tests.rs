//! A writer that is killed at any point has lost nothing that it acknowledged.

use super::*;
use crate::contract::{Rng, World, assert_same};
use crate::read::Reader;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Tells the test binary that it is the writer, and where.
const FOLDER: &str = "AVIFLOW_STORE_KILLED_WRITER";

/// Not a test of its own: the process that the test below kills.
#[test]
fn writer() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let mut store = SqliteStore::open(Path::new(&folder)).unwrap();
    let mut world = World::new(store.acquire().unwrap());
    let mut out = std::io::stdout();
    loop {
        // The batch depends on nothing but the state and its number, so the parent can say what it was.
        let batch = world.batch(&mut Rng(world.model.generation + 1));
        store.commit(&batch).unwrap();
        writeln!(out, "\nack {}", batch.generation).unwrap();
    }
}

fn spawn(folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sqlite::kill_tests::writer", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Kills the writer after so many acknowledgements, and returns the last one that got out.
fn run_and_kill(folder: &Path, acks: u64) -> u64 {
    let mut child = spawn(folder);
    let mut last = 0;
    let mut seen = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let Some(ack) = line.as_deref().ok().and_then(|l| l.strip_prefix("ack ")?.parse().ok()) else { continue };
        last = ack;
        seen += 1;
        if seen == acks {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(seen >= acks, "the writer ended by itself after {seen} commits");
    last
}

#[test]
fn nothing_acknowledged_is_lost_by_a_kill() {
    let folder = TempDir::new().unwrap();
    let mut rng = Rng(0xa71f);
    let mut world = World::new(SqliteStore::open(folder.path()).unwrap().acquire().unwrap());
    for round in 0..8 {
        let acked = run_and_kill(folder.path(), 1 + rng.below(60));
        let loaded = SqliteStore::open(folder.path()).unwrap().acquire().unwrap();
        // The last commit may be durable and its acknowledgement lost with the writer.
        assert!(
            loaded.generation == acked || loaded.generation == acked + 1,
            "round {round}: {} after {acked} was acknowledged",
            loaded.generation
        );
        while world.model.generation < loaded.generation {
            world.batch(&mut Rng(world.model.generation + 1));
        }
        world.model.term = loaded.term;
        assert_same(&loaded, &world.model);
        let reader = SqliteReader::open(folder.path()).unwrap();
        for (id, (job, record, ended)) in &world.all {
            let (kept, document) = reader.job(*id).unwrap().unwrap();
            assert_eq!((&kept.job, &document, kept.ended), (job, record.as_ref(), *ended));
        }
        let moments: usize = world.all.keys().map(|id| reader.moments(*id, 0, u32::MAX).unwrap().len()).sum();
        assert_eq!(moments, world.moments.len());
        assert_eq!(tests::all_acts(&reader), world.acts.iter().rev().cloned().collect::<Vec<_>>());
    }
}
