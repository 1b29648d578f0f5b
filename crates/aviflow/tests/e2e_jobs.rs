//! Jobs from submission to their end, through the real binary.

mod world;

use serde_json::Value;
use std::fs;
use world::World;

#[test]
fn a_job_runs_and_everything_about_it_can_be_seen() {
    let world = World::new();
    let file = world.document(
        "hello",
        "name: hello\noutputs: [/out]\nrun: |\n  echo hello from $AVIFLOW_JOB\n  echo oops >&2\n  mkdir -p \"$AVIFLOW_OUTPUT_DIR\"\n  echo 42 > \"$AVIFLOW_OUTPUT_DIR/answer\"\n",
    );
    let said = world.run(&["run", &file]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("started the control plane of this machine at http://127.0.0.1:"), "{said:?}");
    for part in [
        "submitted default/hello to local",
        "[r0] hello from",
        "[r0] oops",
        "hello Succeeded",
        "aviflow cp hello:/out .",
    ] {
        assert!(said.out.contains(part), "{part}: {said:?}");
    }
    assert!(!said.out.contains('\x1b'), "no colours without a terminal");

    let list = world.json(&["ls"]);
    assert_eq!(
        (&list[0]["name"], &list[0]["phase"], &list[0]["user"]),
        (&"hello".into(), &"Succeeded".into(), &"ada".into())
    );
    assert!(world.ok(&["ls"]).starts_with("JOB "));
    assert_eq!(world.ok(&["ls", "-q"]), "default/hello\n");
    let detail = world.json(&["show", "hello"]);
    assert_eq!(detail["exitCode"], 0);
    assert!(detail["spec"]["seed"].is_u64(), "a seed is drawn and recorded");
    assert_eq!(world.ok(&["logs", "hello", "--grep", "hello"]).lines().count(), 1);
    assert_eq!(world.ok(&["node", "ls"]).lines().count(), 3);
    assert!(world.ok(&["queue", "ls"]).contains("default"));
    assert!(world.ok(&["env", "ls"]).contains("jax-cpu@"));

    let copied = world.ok(&["cp", "hello:/out", "."]);
    assert!(copied.starts_with("copied hello:/out from local to ./out (1 file"), "{copied}");
    assert_eq!(fs::read_to_string(world.work().join("out/answer")).expect("answer"), "42\n");

    for by in ["user", "queue", "job", "state"] {
        let usage = world.json(&["usage", "--by", by, "--since", "1h"]);
        let rows: i64 =
            usage["rows"].as_array().expect("rows").iter().map(|r| r["total"].as_i64().expect("total")).sum();
        assert_eq!(Some(rows), usage["capacity"].as_i64(), "by {by}: {usage}");
    }

    let again = world.ok(&["rerun", "hello", "--exact"]);
    assert!(again.contains("submitted default/hello-2 to local") && again.contains("hello-2 Succeeded"), "{again}");
    assert_eq!(world.json(&["show", "hello-2"])["hash"], detail["hash"]);

    let document = world.ok(&["show", "hello", "--file"]);
    let file = world.document("again", &document);
    assert!(world.ok(&["plan", &file]).starts_with("hello-3 would start now"));
}

#[test]
fn a_failing_rank_is_named_and_its_code_passed_on() {
    let world = World::with_pool(2, 2);
    let gate = world.gate("never");
    let script =
        format!("if [ \"$NODE_RANK\" = 1 ]; then echo boom; exit 7; fi\necho waiting; cat {}", gate.path().display());
    let said =
        world.run(&["run", "--name", "broken", "--nodes", "2", "--gpus-per-node", "1", "--", "sh", "-c", &script]);
    assert_eq!(said.code, 7, "{said:?}");
    for part in ["broken Failed, exit code 7", "rank 1 ", "exited with 7", "| boom", "aviflow rerun broken"] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
}

#[test]
fn code_is_what_was_submitted_and_not_what_is_there_later() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    fs::write(world.work().join("value"), "before").expect("write");
    let text = format!(
        "name: code\ncode: .\nrun: |\n  echo begun\n  cat {} > /dev/null\n  echo value $(cat value)\n",
        gate.path().display()
    );
    let file = world.document("job", &text);
    let mut run = world.follow(&["run", &file]);
    run.until("[r0] begun");
    fs::write(world.work().join("value"), "after").expect("write");
    gate.open();
    assert_eq!(run.end(), 0);
    assert!(run.text().contains("[r0] value before"), "{}", run.text());
}

#[test]
fn a_running_job_can_be_entered_left_and_cancelled() {
    let world = World::with_pool(1, 2);
    let gate = world.gate("gate");
    let script = format!("echo begun; cat {}", gate.path().display());
    let mut run = world.follow(&["run", "--name", "long", "--", "sh", "-c", &script]);
    run.until("[r0] begun");
    let inside = world.run(&["exec", "long", "--", "sh", "-c", "echo $AVIFLOW_JOB; exit 3"]);
    assert_eq!(inside.code, 3, "{inside:?}");
    assert!(inside.out.contains("long"), "{inside:?}");

    // Ctrl-C leaves the job alone and is no failure.
    let interrupted = std::process::Command::new("kill").args(["-INT", &run.pid()]).status().expect("kill");
    assert!(interrupted.success());
    assert_eq!(run.end(), 0);
    assert!(
        run.text().contains("aviflow cancel default/long") || run.text().contains("aviflow cancel long"),
        "{}",
        run.text()
    );
    assert_eq!(world.json(&["show", "long"])["phase"], "Running");

    let mut logs = world.follow(&["logs", "-f", "long"]);
    logs.until("[r0] begun");
    let cancelled = world.ok(&["cancel", "long"]);
    assert!(cancelled.starts_with("cancelling default/long on local"), "{cancelled}");
    logs.end();
    assert_eq!(world.json(&["show", "long"])["phase"], "Cancelled");
}

#[test]
fn a_job_waits_with_a_reason_while_the_pool_is_full() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!("echo begun; cat {}", gate.path().display());
    let mut first = world.follow(&["run", "--name", "first", "--", "sh", "-c", &script]);
    first.until("[r0] begun");
    let plan = world.json(&["plan", "--name", "second", "--", "true"]);
    assert_eq!(plan["startsNow"], false, "{plan}");
    let mut second = world.follow(&["run", "--name", "second", "--", "true"]);
    second.until("waits, place 1 of 1: needs 1 node with 1 GPU free; 0 free, at most 0 on one node");
    let waiting = world.json(&["ls", "--waiting"]);
    assert_eq!(waiting.as_array().map(Vec::len), Some(1));
    assert_eq!(waiting[0]["verdict"]["constraint"]["kind"], Value::from("capacity"));
    gate.open();
    assert_eq!((first.end(), second.end()), (0, 0));
}

#[test]
fn what_cannot_be_done_is_said_with_its_exit_code() {
    let world = World::new();
    let no_server = world.run(&["ls"]);
    assert_eq!(no_server.code, 1, "{no_server:?}");
    assert!(no_server.err.contains("aviflow server start"), "{no_server:?}");
    assert_eq!(world.run(&["frobnicate"]).code, 2);
    world.ok(&["server", "start", "--nodes", "1", "--gpus-per-node", "2"]);

    let wrong = world.document("wrong", "name: Wrong_Name\nrun: 'true'\ngpus_per_node: 8\n");
    let said = world.run(&["run", &wrong]);
    assert_eq!(said.code, 2, "{said:?}");
    assert!(said.err.contains("wrong.yaml:1:7") && said.err.contains("gpusPerNode"), "{said:?}");
    assert_eq!(world.run(&["run", "gone.yaml"]).code, 2);
    let large = world.run(&["run", "--gpus-per-node", "9", "--name", "large", "--", "true"]);
    assert_eq!(large.code, 2, "{large:?}");
    assert!(large.err.contains("9 GPUs"), "{large:?}");

    world.ok(&["run", "--name", "tiny-gpt", "--", "true"]);
    let unknown = world.run(&["show", "tiny-gtp"]);
    assert_eq!(unknown.code, 1, "{unknown:?}");
    assert!(unknown.err.contains("tiny-gpt"), "{unknown:?}");
    assert_eq!(world.run(&["--context", "nowhere", "ls"]).code, 2);
    world.ok(&["-n", "default", "show", "tiny-gpt"]);
    for command in [&["-n", "nlp", "ls"][..], &["show", "tiny-gpt", "--namespace", "nlp"]] {
        let elsewhere = world.run(command);
        assert!(elsewhere.err.contains("jobs of one machine are all in `default`"), "{elsewhere:?}");
    }
}
