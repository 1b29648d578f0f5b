//! What follows when ranks fail: restarts in place, and GPUs that are kept for somebody to look around.

mod world;

use world::World;
use world::training::{gpu_time, sentences};

#[test]
fn a_gang_that_failed_starts_again_where_it_is() {
    let world = World::with_pool(2, 1);
    let agents = "ps -o ppid= -p $$ >> ../agents";
    // Each worker notes its parent; the first epoch fails on one of two, while the other would go on.
    let script = format!(
        "{agents}; echo epoch $AVIFLOW_EPOCH of attempt $AVIFLOW_ATTEMPT at $MASTER_PORT; \
         if [ $AVIFLOW_EPOCH = 1 ]; then [ $NODE_RANK = 0 ] && exec sleep 1000; exit 3; fi; cat ../agents"
    );
    let run = ["run", "--name", "again", "--nodes", "2", "--gpus-per-node", "1", "--set", "retry.failures=1"];
    let said = world.run(&[&run[..], &["--", "sh", "-c", &script]].concat());
    assert_eq!(said.code, 0, "{said:?}");
    let detail = world.json(&["show", "again"]);
    assert_eq!((&detail["phase"], &detail["attempts"]), (&"Succeeded".into(), &1.into()), "{detail}");
    assert_eq!(detail["counters"]["failures"], 1, "{detail}");
    let decided = sentences(&detail, "decided");
    assert_eq!(decided.len(), 1, "{detail}");
    assert!(decided[0].starts_with("process exit on rank 1 (node local-"), "{decided:?}");
    assert!(decided[0].contains("the ranks start again where they are"), "{decided:?}");
    assert_eq!(sentences(&detail, "again").len(), 1, "{detail}");
    let logs = world.ok(&["logs", "again"]);
    assert!(logs.contains("epoch 1 of attempt 1") && logs.contains("epoch 2 of attempt 1"), "{logs}");
    // The same agents started both, and rank 0 had a port of its own each time.
    let of = |worker: &str| {
        let lines = logs.lines().filter(|line| line.contains(worker));
        let parents: Vec<&str> = lines.filter_map(|line| line.rsplit(' ').next()).collect();
        parents.iter().filter_map(|word| word.parse::<u32>().ok()).collect::<Vec<_>>()
    };
    let numbers = of("r0]");
    assert_eq!(numbers.len(), 4, "two ports and two parents: {logs}");
    assert_ne!(numbers[0], numbers[1], "{logs}");
    assert_eq!(numbers[2], numbers[3], "{logs}");
    gpu_time(&detail);
}

#[test]
fn a_gang_that_fails_again_and_again_stops_and_says_what_happened() {
    let world = World::with_pool(1, 1);
    let said = world.run(&["run", "--name", "loop", "--set", "retry.failures=9", "--", "sh", "-c", "echo no; exit 5"]);
    assert_eq!(said.code, 5, "{said:?}");
    let detail = world.json(&["show", "loop"]);
    assert_eq!((&detail["phase"], &detail["counters"]["failures"]), (&"Failed".into(), &3.into()), "{detail}");
    let decided = sentences(&detail, "decided");
    assert_eq!(decided.len(), 3, "{detail}");
    assert!(decided[2].contains("failed 3 times in a row without a new complete checkpoint, it stops"), "{decided:?}");
    assert!(decided[2].contains("(before: process exit of rank 0"), "{decided:?}");
}

#[test]
fn the_gpus_of_a_job_that_failed_are_kept_for_who_asked_for_it() {
    let world = World::with_pool(1, 2);
    let run = ["run", "--name", "kept", "--gpus-per-node", "2", "--keep-on-failure", "1h"];
    let mut follow = world.follow(&[&run[..], &["--", "sh", "-c", "echo mark > left; exit 7"]].concat());
    follow.until("the GPUs are kept for 1h");
    assert_eq!(world.ok(&["exec", "kept", "--", "cat", "left"]), "mark\n");
    let detail = world.json(&["show", "kept"]);
    assert_eq!(detail["phase"], "Stopping", "{detail}");
    let nodes = world.ok(&["node", "ls"]);
    assert!(nodes.contains("2/2") || nodes.contains("0 free") || !nodes.contains("2 free"), "{nodes}");
    world.ok(&["cancel", "kept"]);
    assert_eq!(follow.end(), 7, "{}", follow.text());
    let detail = world.json(&["show", "kept"]);
    assert_eq!(detail["phase"], "Failed", "it failed before somebody was done with it: {detail}");
    assert!(gpu_time(&detail)["idle"] > 0, "{detail}");
    assert!(world.processes("mark").is_empty());
}
