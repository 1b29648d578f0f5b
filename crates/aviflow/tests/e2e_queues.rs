//! Queues, people and maintenance, through the real binary.

mod world;

use serde_json::Value;
use world::{Follow, Gate, World};

/// One node of 8 GPUs, all guaranteed to `product`; `research` borrows.
const QUEUES: &str = "kind: Queue\nname: product\nquotas:\n  virtual: {guarantee: 8}\n---\n\
    kind: Queue\nname: research\nquotas:\n  virtual: {guarantee: 0}\n";

fn queues(world: &World) {
    let file = world.document("queues", QUEUES);
    let said = world.run(&["apply", "-f", &file, "--reason", "a quarter of its own"]);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{said:?}");
    assert_eq!(said.out, "queue product created\nqueue research created\n");
}

/// A job that holds so many GPUs of a node until its gate is opened; it has begun.
fn holds(world: &World, name: &str, gpus: u32, options: &[&str]) -> (Follow, Gate) {
    let gate = world.gate(name);
    let script = format!("echo begun; cat {}", gate.path().display());
    let gpus = gpus.to_string();
    let job = ["run", "--name", name, "--gpus-per-node", &gpus];
    let mut run = world.follow(&[&job[..], options, &["--", "sh", "-c", &script]].concat());
    run.until("[r0] begun");
    (run, gate)
}

fn waits(world: &World, name: &str) -> String {
    world.json(&["show", name])["verdict"]["reason"].as_str().unwrap_or("does not wait").to_owned()
}

#[test]
fn a_queue_takes_back_what_it_lent_and_the_borrower_goes_on_afterwards() {
    let world = World::with_pool(1, 8);
    queues(&world);
    let (mut lent, again) = holds(&world, "lent", 8, &["--queue", "research"]);
    let plan = world.document("own", "name: own\nqueue: product\ngpusPerNode: 8\nrun: echo mine\n");
    let would = world.ok(&["plan", &plan]);
    assert!(would.contains("lent"), "it says who would leave: {would}");

    // It has begun just now: a guarantee comes back all the same.
    let own = world.run(&["run", &plan]);
    assert_eq!(own.code, 0, "{own:?}");
    assert!(own.out.contains("[r0] mine"), "{own:?}");
    lent.until("[r0] begun");
    again.open();
    assert_eq!(lent.end(), 0, "{}", lent.text());

    let detail = world.json(&["show", "lent"]);
    assert_eq!((&detail["counters"]["suspensions"], &detail["attempts"]), (&1.into(), &2.into()), "{detail}");
    assert_eq!(detail["counters"]["failures"], 0, "no retry is spent");
    let text = world.ok(&["show", "lent"]);
    assert!(text.contains("own") && text.contains("guarantee"), "it says for whom and why: {text}");
}

#[test]
fn a_limit_and_a_priority_are_kept_with_the_numbers() {
    let world = World::with_pool(1, 8);
    let file = world.document(
        "q",
        "kind: Queue\nname: small\nhighestPriority: normal\nquotas:\n  virtual: {guarantee: 0, limit: 2}\n",
    );
    world.ok(&["apply", "-f", &file]);
    let (mut first, gate) = holds(&world, "first", 2, &["--queue", "small"]);
    world.ok(&["run", "--detach", "--name", "second", "--queue", "small", "--", "true"]);
    let why = waits(&world, "second");
    assert!(why.contains("small") && why.contains("limit") && why.contains('2'), "{why}");
    let refused = world.run(&["run", "--priority", "urgent", "--queue", "small", "--", "true"]);
    assert!(refused.code != 0 && refused.err.contains("normal"), "{refused:?}");
    // A higher limit starts it at once.
    let file = world.document("q", "kind: Queue\nname: small\nquotas:\n  virtual: {guarantee: 0, limit: 3}\n");
    world.ok(&["apply", "-f", &file, "--reason", "one more"]);
    world.ok(&["logs", "-f", "second"]);
    gate.open();
    assert_eq!(first.end(), 0);
    let log = world.json(&["log", "--kind", "queue"]);
    let whys: Vec<&Value> = log.as_array().expect("acts").iter().map(|act| &act["reason"]).collect();
    assert!(whys.contains(&&Value::from("one more")), "{log}");
}

#[test]
fn people_hold_release_update_and_chain_their_jobs() {
    let world = World::with_pool(1, 1);
    let (mut busy, gate) = holds(&world, "busy", 1, &[]);
    for name in ["a", "b"] {
        world.ok(&["run", "--detach", "--name", name, "--", "true"]);
    }
    let chain = world.document("chain", "name: chain\nafter: [{job: a, on: succeeded}]\nrun: echo chained\n");
    world.ok(&["run", "--detach", &chain]);
    let dead = world.document("dead", "name: dead\nafter: [{job: a, on: failed}]\nrun: 'true'\n");
    world.ok(&["run", "--detach", &dead]);
    assert_eq!(waits(&world, "chain"), "waits for a to succeed");

    world.ok(&["hold", "a", "--reason", "wait for the data"]);
    assert!(waits(&world, "a").contains("held by ada"), "{}", waits(&world, "a"));
    world.ok(&["update", "b", "--priority", "high", "--time-limit", "1h"]);
    let list = world.json(&["ls", "--waiting"]);
    let names: Vec<&Value> = list.as_array().expect("jobs").iter().map(|job| &job["name"]).collect();
    assert_eq!(names[0], "b", "{names:?}");
    assert!(world.ok(&["ls", "--waiting", "--factors"]).contains("high"));

    gate.open();
    assert_eq!(busy.end(), 0);
    world.ok(&["logs", "-f", "b"]);
    world.ok(&["release", "a"]);
    assert!(world.ok(&["logs", "-f", "chain"]).contains("chained"));
    let why = waits(&world, "dead");
    assert!(why.contains("never") && why.contains("a "), "{why}");
    world.ok(&["cancel", "dead"]);
}

#[test]
fn a_pause_and_a_drain_start_nothing_and_are_called_off() {
    let world = World::with_pool(1, 1);
    world.ok(&["pause", "--reason", "the storage is full"]);
    let mut job = world.follow(&["run", "--name", "job", "--", "true"]);
    job.until("paused by ada");
    world.ok(&["node", "drain", "local-0", "--reason", "a fan is broken"]);
    assert!(world.ok(&["node", "drains"]).contains("a fan is broken"));
    world.ok(&["unpause"]);
    job.until("waits");
    assert!(world.ok(&["node", "ls"]).contains("local-0"), "{}", waits(&world, "job"));
    world.ok(&["node", "undrain", "local-0"]);
    assert_eq!(job.end(), 0, "{}", job.text());
}

#[test]
fn what_is_wrong_with_documents_is_told_at_once_and_changes_nothing() {
    let world = World::with_pool(1, 8);
    queues(&world);
    let before = world.ok(&["queue", "show", "product", "-o", "yaml"]);
    let wrong = world.document(
        "wrong",
        "kind: Queue\nname: product\nquotas:\n  virtual: {guarantee: 4}\n---\n\
         kind: Queue\nname: child\nparent: nobody\n---\nkind: Queue\nname: greedy\nhighestPriority: huge\n",
    );
    let said = world.run(&["apply", "-f", &wrong]);
    assert_eq!(said.code, 2, "{said:?}");
    for part in ["`huge`", "wrong.yaml:"] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    let wrong = world
        .document("wrong", &format!("{}---\nkind: Queue\nname: child\nparent: nobody\n", QUEUES.replace('8', "4")));
    let said = world.run(&["apply", "-f", &wrong]);
    assert!(said.code == 2 && said.err.contains("nobody"), "{said:?}");
    assert_eq!(world.ok(&["queue", "show", "product", "-o", "yaml"]), before);

    let (mut job, gate) = holds(&world, "job", 1, &["--queue", "research"]);
    let refused = world.run(&["queue", "delete", "research"]);
    assert!(refused.code != 0 && refused.err.contains("--move-to"), "{refused:?}");
    world.ok(&["queue", "delete", "research", "--move-to", "default", "--reason", "moved"]);
    assert_eq!(world.json(&["show", "job"])["queue"], "default");
    gate.open();
    assert_eq!(job.end(), 0);
}

#[test]
fn a_node_is_checked_before_it_takes_work_again() {
    let world = World::with_pool(2, 8);
    let said = world.run(&["node", "check", "local-1"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.out.contains("8 virtual GPUs") && said.out.contains("read again"), "{said:?}");
    assert!(said.out.ends_with("local-1 passed its check and takes work again\n"), "{said:?}");
    let script = "echo broken fan on $AVIFLOW_NODE; exit 3";
    let said = world.run(&["node", "check", "local-1", "--", "sh", "-c", script]);
    assert_eq!((said.code, said.out.as_str()), (1, "broken fan on local-1\n"), "{said:?}");
    assert!(said.err.contains("did not pass its check (exit code 3), and stays cordoned"), "{said:?}");
    let shown = world.ok(&["node", "show", "local-1", "-o", "json"]);
    assert!(shown.contains(r#""condition": "Cordoned""#), "{shown}");
    let (mut job, gate) = holds(&world, "there", 1, &[]);
    let said = world.run(&["node", "check", "local-0"]);
    assert!(said.code == 1 && said.err.contains("default/there") && said.err.contains("node drain"), "{said:?}");
    gate.open();
    assert_eq!(job.end(), 0, "{}", job.text());
}
