//! What was submitted is what every attempt runs, and each says so by a hash that it took itself.

mod world;

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use world::World;

/// The code of a job that tells its version, waits at `gate` in its first attempt, and fails there, also when it is
/// started again in place.
fn write_code(folder: &Path, gate: &Path, version: u32) {
    let script = format!(
        "echo version {version} and $V in attempt $AVIFLOW_ATTEMPT\n\
         if [ $AVIFLOW_ATTEMPT = 1 ]; then [ $AVIFLOW_EPOCH = 2 ] || cat {}; exit 1; fi\n",
        gate.display()
    );
    fs::write(folder.join("train.sh"), script).expect("write");
}

fn write_document(folder: &Path, variable: u32) -> String {
    let text = format!("name: same\ncode: .\nrun: sh train.sh\nenv: {{V: '{variable}'}}\nretry: {{failures: 2}}\n");
    let path = folder.join("same.yaml");
    fs::write(&path, text).expect("write");
    path.display().to_string()
}

/// The hashes that attempts reported, and whether each differs from the first.
fn told(detail: &Value) -> Vec<(u64, String, bool)> {
    let hashes = detail["attemptHashes"].as_array().expect("hashes");
    let one = |h: &Value| {
        let hash = h["hash"].as_str().expect("a hash").to_owned();
        (h["attempt"].as_u64().expect("an attempt"), hash, h["differs"].as_bool().expect("whether"))
    };
    hashes.iter().map(one).collect()
}

/// A job whose code and document are edited while it waits, and after its first attempt began; `tamper` comes
/// between its attempts. Gives what `show` says at its end, as JSON and as text.
fn check(tamper: impl FnOnce(&World)) -> (String, Value, String) {
    let world = World::with_pool(1, 1);
    let (room, gate) = (world.gate("room"), world.gate("gate"));
    let code = world.work().join("code");
    fs::create_dir(&code).expect("a folder");
    world.ok(&["run", "--detach", "--name", "first", "--", "cat", &room.path().display().to_string()]);
    write_code(&code, gate.path(), 1);
    let file = write_document(&code, 1);
    let mut run = world.follow(&["run", &file]);
    run.until("waits, place 1 of 1");
    write_code(&code, gate.path(), 2);
    write_document(&code, 2);
    room.open();
    run.until("version 1 and 1 in attempt 1");
    write_code(&code, gate.path(), 3);
    write_document(&code, 3);
    tamper(&world);
    gate.open();
    assert_eq!(run.end(), 0, "{}", run.text());
    (run.text(), world.json(&["show", "same"]), world.ok(&["show", "same"]))
}

#[test]
fn every_attempt_runs_and_reports_what_was_submitted() {
    let (output, detail, shown) = check(|_| {});
    assert!(output.contains("version 1 and 1 in attempt 2"), "{output}");
    let hash = detail["hash"].as_str().expect("a hash").to_owned();
    assert_eq!(detail["spec"]["env"]["V"], "1");
    assert_eq!(told(&detail), [(1, hash.clone(), false), (2, hash.clone(), false)]);
    assert!(shown.contains(&format!("{} in attempts 1-2", &hash[..12])), "{shown}");
    assert!(!shown.contains("DIFFERS") && detail["facts"]["aviflow.hash"].is_null(), "{shown}");
}

#[test]
fn an_attempt_that_ran_something_else_is_pointed_at() {
    // The document in the store is changed behind the control plane's back.
    let change = |world: &World| {
        world.ok(&["server", "stop"]);
        let program = "import sqlite3, sys\n\
                       with sqlite3.connect(sys.argv[1]) as store:\n\
                       \x20   change = 'UPDATE jobs SET record = replace(record, ?, ?) WHERE name = ?'\n\
                       \x20   print(store.execute(change, ('\"V\":\"1\"', '\"V\":\"9\"', 'same')).rowcount)\n";
        let mut python = Command::new("python3");
        let output = python.args(["-c", program]).arg(world.home().join("store.db")).output().expect("python3");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{output:?}");
        world.ok(&["server", "start"]);
    };
    let (output, detail, shown) = check(change);
    assert!(output.contains("version 1 and 9 in attempt 2"), "{output}");
    let told = told(&detail);
    assert!(told[0].0 == 1 && !told[0].2, "{told:?}");
    assert!(told.len() == 2 && told[1].0 == 2 && told[1].1 != told[0].1 && told[1].2, "{told:?}");
    assert!(shown.contains("DIFFERS") && shown.contains("attempt 2 ran something else than was submitted"), "{shown}");
}

/// The id of a job's run at a tracking service, of each attempt that it had.
fn runs(world: &World, file: &str) -> Vec<String> {
    let said = world.ok(&["run", file]);
    let line = |l: &str| l.strip_prefix("[r0] run ").map(str::to_owned);
    said.lines().filter_map(line).collect()
}

#[test]
fn all_attempts_of_a_job_are_one_run_for_who_tracks_them() {
    let world = World::with_pool(1, 1);
    let script = "run: |\n  echo run $AVIFLOW_RUN_ID $WANDB_RUN_ID ${WANDB_RESUME:-}\n  [ $AVIFLOW_ATTEMPT = 2 ]\n";
    let text = format!("name: tracked\nretry: {{failures: 2}}\n{script}");
    let (one, two) =
        (world.document("one", &text), world.document("two", &format!("{text}env: {{WANDB_RUN_ID: mine}}\n")));
    let first = runs(&world, &one);
    let words: Vec<&str> = first[0].split(' ').collect();
    assert!(first.len() == 3 && first.iter().all(|run| *run == first[0]), "{first:?}");
    assert!(words.len() == 3 && words[0] == words[1] && words[0].len() == 20 && words[2] == "allow", "{first:?}");
    let other = runs(&world, &one);
    assert_ne!(other[0], first[0], "another job is another run");
    let own = runs(&world, &two);
    assert!(own[0] == own[1] && own[0].ends_with(" mine"), "what the job says wins: {own:?}");
}
