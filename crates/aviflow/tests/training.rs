//! The real example through the real binary, undisturbed and disturbed in every way.
//!
//! Most cases end with the same question: are the losses, to the last bit, those
//! of a run that nobody disturbed? If they are, no sample was skipped or seen twice.

mod world;

use serde_json::Value;
use std::fs;
use std::net::IpAddr;
use world::training::{Process, STEPS, Training, gpu_time, sentences, stamps, undisturbed};
use world::{Follow, World};

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// The steps in a file of losses.
fn steps(losses: &str) -> Vec<u64> {
    let number = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["step"].as_u64().expect("step");
    losses.lines().map(number).collect()
}

/// The steps that the example prints: the first of an attempt and every tenth.
fn printed(lines: &[String]) -> Vec<u32> {
    let step = |l: &String| l.strip_prefix("step ")?.split_once('/')?.0.parse().ok();
    lines.iter().filter_map(step).collect()
}

fn counters(detail: &Value) -> [i64; 4] {
    ["failures", "nodeFailures", "suspensions", "unready"].map(|n| detail["counters"][n].as_i64().expect("counter"))
}

#[test]
fn an_environment_is_built_once_for_all_who_want_it() {
    let (first, second) = (World::new(), World::new());
    // One cache for two control planes; pip keeps a log of each time that it installs.
    fs::create_dir(first.home().join("environments")).expect("folder");
    std::os::unix::fs::symlink(first.home().join("environments"), second.home().join("environments")).expect("link");
    let log = first.work().join("pip.log");
    let lock = world::wheel(&first.work(), "needed");
    let mut jobs = Vec::new();
    for world in [&first, &second] {
        let started = world
            .command(&["server", "start", "--nodes", "2", "--gpus-per-node", "1"])
            .envs([("PIP_LOG", log.as_os_str()), ("PIP_FIND_LINKS", first.work().as_os_str())])
            .env("PIP_NO_INDEX", "1")
            .status()
            .expect("the binary runs");
        assert!(started.success());
        fs::write(world.work().join("needed.lock"), &lock).expect("write");
        let file = world.document(
            "job",
            "name: job\nenvironment: minimal\nrequirements: needed.lock\ngpusPerNode: 1\nrun: python -c 'import needed'\n",
        );
        jobs.extend([world.follow(&["run", &file]), world.follow(&["run", &file])]);
    }
    for job in &mut jobs {
        assert_eq!(job.end(), 0, "{}", job.text());
    }
    let log = fs::read_to_string(log).expect("pip's log");
    assert_eq!(log.matches("Successfully installed needed-1.0").count(), 1, "{log}");
}

#[test]
fn a_seed_gives_one_series_of_losses_to_the_last_bit() {
    let training = Training::new();
    let world = &training.world;
    world.ok(&words(&training.command("", STEPS, &["--name", "one"])));
    let one = training.losses("one");
    assert_eq!(steps(&one), (1..=u64::from(STEPS)).collect::<Vec<_>>());
    assert_eq!(one, undisturbed());

    let again = world.ok(&["rerun", "one", "--exact"]);
    assert!(again.contains("submitted default/one-2 to local"), "{again}");
    assert_eq!(training.losses("one-2"), one);
    assert_eq!(world.json(&["show", "one-2"])["hash"], world.json(&["show", "one"])["hash"]);

    world.ok(&["rerun", "one", "--set", "seed=7"]);
    let other = training.losses("one-3");
    assert_eq!(steps(&other), steps(&one));
    assert_ne!(other, one);
}

#[test]
fn a_killed_rank_costs_the_steps_since_the_checkpoint_and_changes_no_loss() {
    let training = Training::new();
    let world = &training.world;
    let _gates = [training.gate(15), training.gate(25)];
    let mut run = world.follow(&words(&training.command("1:15 2:25", STEPS, &["--name", "hit"])));
    run.until("held after step 15");
    let hash = world.json(&["show", "hit"])["hash"].clone();
    // Once a rank that waits for others, once the one that the others wait for, which is where they meet.
    for (rank, resumed, held) in [(1, 11, Some(25)), (0, 21, None)] {
        let ranks = training.ranks();
        assert_eq!(ranks.len(), 2, "{ranks:?}");
        // What is changed now is not what was submitted.
        fs::write(training.code().join("train.py"), "raise SystemExit('edited')\n").expect("write");
        World::kill(ranks[&rank].pid);
        run.until(&format!("rank {rank} (worker {rank} on local-"));
        assert!(run.seen.last().is_some_and(|l| l.contains("SIGKILL")), "{}", run.text());
        run.until(&format!("step {resumed} of {STEPS} comes next"));
        assert!(ranks.values().all(|r| !r.lives()), "{ranks:?}");
        if let Some(step) = held {
            run.until(&format!("held after step {step}"));
        }
    }
    assert_eq!(run.end(), 0, "{}", run.text());
    assert_eq!(training.losses("hit"), undisturbed());

    let detail = world.json(&["show", "hit"]);
    assert_eq!((&detail["attempts"], counters(&detail)), (&1.into(), [2, 0, 0, 0]), "{detail}");
    assert_eq!(detail["hash"], hash);
    let failing = stamps(&detail, &["failing"]);
    let left = stamps(&detail, &["again"]);
    assert_eq!((failing.len(), left.len()), (2, 2), "the rank that failed first is the one to be named: {detail}");
    for (failing, left) in failing.iter().zip(left) {
        assert!(left - failing <= 5000, "the rest of the gang was gone {} ms later: {detail}", left - failing);
    }
    assert!(gpu_time(&detail)["repeating"] > 0, "{detail}");
    assert_eq!(printed(&training.lines("hit", 1, 0)), [1, 10, 11, 20, 21, 30]);
}

#[test]
fn a_rank_killed_without_a_retry_left_is_reported_with_its_last_words() {
    let world = World::with_pool(2, 1);
    let script = "if [ $NODE_RANK = 1 ]; then echo last words; kill -9 $$; fi; exec sleep 1000";
    let said = world.run(&["run", "--name", "hit", "--nodes", "2", "--gpus-per-node", "1", "--", "sh", "-c", script]);
    assert_eq!(said.code, 137, "{said:?}");
    for part in ["rank 1 (worker 1 on local-", "SIGKILL", "| last words"] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    let detail = world.json(&["show", "hit"]);
    assert_eq!(detail["lastLines"], serde_json::json!(["last words"]), "{detail}");
    gpu_time(&detail);
}

#[test]
fn a_training_does_not_notice_that_the_control_plane_was_killed() {
    let training = Training::new();
    let world = &training.world;
    let gates = [training.gate(15), training.gate(25)];
    world.ok(&words(&training.command("1:15 1:25", STEPS, &["--name", "long", "--detach"])));
    world.follow(&["logs", "-f", "long"]).until("held after step 15");
    let before = world.json(&["usage", "--by", "state", "--since", "1h"]);
    let ranks = training.ranks();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    World::kill(world.server_pid());
    world.wait_gone();
    // It trains on with nobody there: the second gate opens once it has come that far.
    gates[0].open();
    gates[1].open();
    world.ok(&["server", "start"]);
    let text = world.ok(&["logs", "-f", "long"]);
    assert!(text.contains("validation loss"), "{text}");

    let detail = world.json(&["show", "long"]);
    assert_eq!((&detail["phase"], &detail["attempts"]), (&"Succeeded".into(), &1.into()), "{detail}");
    assert_eq!(counters(&detail), [0; 4]);
    assert_eq!(printed(&training.lines("long", 1, 0)), [1, 10, 20, 30]);
    assert_eq!(training.losses("long"), undisturbed());
    assert_eq!(sentences(&detail, "checkpointComplete").len(), 3, "{detail}");
    let states = gpu_time(&detail);
    assert!(!states.contains_key("unknown"), "{states:?}");

    let after = world.json(&["usage", "--by", "state", "--since", "1h"]);
    let number = |usage: &Value, name: &str| usage[name].as_i64().expect("number");
    let rows: i64 = after["rows"].as_array().expect("rows").iter().map(|r| number(r, "total")).sum();
    assert_eq!(rows, number(&after, "capacity"), "{after}");
    // Two GPUs all the time, that without a control plane too.
    let passed = number(&after, "to") - number(&before, "to");
    assert_eq!(number(&after, "capacity") - number(&before, "capacity"), 2 * passed, "{before} {after}");
    assert!(after["rows"].as_array().expect("rows").iter().all(|r| r["key"] != "unknown"), "{after}");
}

#[test]
fn nothing_survives_an_agent_that_is_killed_and_no_retry_is_spent() {
    let training = Training::new();
    let world = &training.world;
    let _gate = training.gate(15);
    // A child of a rank that knows nothing of the platform, in a session of its own.
    let stray = "import subprocess\n\
                 stray = subprocess.Popen(['env', '-i', 'sleep', '1000'], start_new_session=True)\n\
                 print('stray', stray.pid, flush=True)\n";
    let held = fs::read_to_string(training.code().join("held.py")).expect("read");
    fs::write(training.code().join("held.py"), format!("{stray}{held}")).expect("write");
    let mut run =
        world.follow(&words(&training.command("1:15", STEPS, &["--name", "hit", "--set", "retry.failures=0"])));
    run.until("held after step 15");
    let pids = run.seen.iter().filter_map(|l| l.split("stray ").nth(1)?.parse().ok());
    let strays: Vec<Process> = pids.filter_map(Process::find).collect();
    let ranks = training.ranks();
    assert_eq!((strays.len(), ranks.len()), (2, 2), "{}", run.text());
    World::kill(world.agents()[0]);
    run.until(&format!("step 11 of {STEPS} comes next"));
    assert!(ranks.values().chain(&strays).all(|p| !p.lives()), "{ranks:?} {strays:?}");
    assert_eq!(run.end(), 0, "{}", run.text());
    assert_eq!(training.losses("hit"), undisturbed());
    let detail = world.json(&["show", "hit"]);
    assert_eq!((&detail["attempts"], counters(&detail)), (&2.into(), [0, 1, 0, 0]), "{detail}");
    gpu_time(&detail);
}

#[test]
fn a_damaged_checkpoint_is_left_out() {
    let training = Training::new();
    let world = &training.world;
    let _gate = training.gate(25);
    let mut run = world.follow(&words(&training.command("1:25", STEPS, &["--name", "torn"])));
    run.until("held after step 25");
    let detail = world.json(&["show", "torn"]);
    let path = detail["checkpoint"]["path"].as_str().expect("a checkpoint");
    assert!(path.starts_with("/checkpoints/step-00000020-"), "{path}");
    let path = world.home().join(format!("jobs/1/volumes{path}"));
    let file = fs::OpenOptions::new().write(true).open(path).expect("the checkpoint");
    file.set_len(file.metadata().expect("size").len() / 2).expect("truncate");
    World::kill(training.ranks()[&1].pid);
    run.until(&format!("step 11 of {STEPS} comes next"));
    assert_eq!(run.end(), 0, "{}", run.text());
    assert!(run.text().contains("is damaged and left out; an older one is tried"), "{}", run.text());
    assert_eq!(training.losses("torn"), undisturbed());
    assert!(gpu_time(&world.json(&["show", "torn"]))["repeating"] > 0);
}

/// Waits for a line `stopped after step N, saved` and gives N.
fn saved_at(run: &mut Follow) -> u64 {
    run.until("stopped after step ");
    let line = run.seen.last().expect("a line");
    let number = line.split("stopped after step ").nth(1).and_then(|l| l.split_once(", saved"));
    number.and_then(|(n, _)| n.parse().ok()).expect("a step")
}

#[test]
fn a_training_saves_on_request_and_goes_on_from_there() {
    let training = Training::new();
    let world = &training.world;
    // It would go on for hours, and save by itself once in a while.
    let command = training.command("", 1_000_000, &["--name", "long", "--set", "retry.failures=0"]);
    let mut run = world.follow(&words(&[&command[..], &["--checkpoint-every".into(), "900000".into()]].concat()));
    run.until("step 10/");
    world.ok(&["suspend", "long"]);
    let first = saved_at(&mut run);
    // Whoever suspends a job holds it, also once its GPUs are free.
    world.ok(&["resume", "long"]);
    run.until(&format!("step {} of 1000000 comes next", first + 1));
    run.until(&format!("step {}/", (first / 10 + 2) * 10));
    world.ok(&["cancel", "long"]);
    let second = saved_at(&mut run);
    run.end();
    assert!(second > first);

    let detail = world.json(&["show", "long"]);
    assert_eq!((&detail["phase"], &detail["attempts"]), (&"Cancelled".into(), &2.into()), "{detail}");
    assert_eq!(counters(&detail), [0, 0, 1, 0], "{detail}");
    assert_eq!(detail["checkpoint"]["step"], second, "{detail}");
    assert_eq!(steps(&training.losses("long")), (1..=second).collect::<Vec<_>>());
    let states = gpu_time(&detail);
    assert!(states["stopping"] > 0 && !states.contains_key("repeating"), "nothing was lost: {states:?}");
}

#[test]
fn code_edited_while_a_job_waits_changes_nothing() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let mut first = world.follow(&["run", "--name", "first", "--", "cat", &gate.path().display().to_string()]);
    first.until("its rank is up");
    fs::write(world.work().join("value"), "as submitted").expect("write");
    let file = world.document(
        "second",
        "name: second\ncode: .\nretry: {failures: 2}\nrun: |\n  [ $AVIFLOW_EPOCH = 1 ]\n  cat value > said; sha256sum value; cat said; rm value\n  exit $((2 - $AVIFLOW_ATTEMPT))\n",
    );
    let mut second = world.follow(&["run", &file]);
    second.until("waits, place 1 of 1");
    let hash = world.json(&["show", "second"])["hash"].clone();
    fs::write(world.work().join("value"), "edited").expect("write");
    fs::remove_file(&file).expect("remove");
    gate.open();
    assert_eq!((first.end(), second.end()), (0, 0), "{}", second.text());
    let lines: Vec<String> = second.seen.iter().filter(|l| l.starts_with("[r0] ")).cloned().collect();
    assert_eq!(lines.len(), 4, "{}", second.text());
    assert_eq!((&lines[0], lines[1].as_str()), (&lines[2], "[r0] as submitted"), "each attempt has its own copy");
    assert_eq!(world.json(&["show", "second"])["hash"], hash);
}

/// What the processes of a job were given, by rank.
fn variables(world: &World, job: &str) -> Vec<std::collections::BTreeMap<String, String>> {
    let text = |rank: &str| world.ok(&["logs", "-o", "json", job, "--rank", rank]);
    let lines = |text: String| -> Vec<Value> { text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect() };
    let pair = |line: &Value| {
        let (name, value) = line["text"].as_str()?.split_once('=')?;
        (line["stream"] == "stdout").then(|| (name.to_owned(), value.to_owned()))
    };
    ["0", "1"].map(|rank| lines(text(rank)).iter().filter_map(pair).collect()).into()
}

#[test]
fn processes_of_nodes_find_each_other_and_no_other_job() {
    let world = World::with_pool(2, 4);
    let gates = [world.gate("a"), world.gate("b")];
    let mut jobs = Vec::new();
    for (name, gate) in ["a", "b"].iter().zip(&gates) {
        // Every rank tells what it was given; the first then waits for the other job.
        let script = format!("env; echo told; [ $NODE_RANK = 1 ] || cat {}", gate.path().display());
        let options = ["run", "--name", name, "--nodes", "2", "--gpus-per-node", "2", "--", "sh", "-c", &script];
        let mut job = world.follow(&options);
        job.until("[r0] told");
        jobs.push(job);
    }
    for (job, gate) in jobs.iter_mut().zip(&gates) {
        gate.open();
        assert_eq!(job.end(), 0, "{}", job.text());
    }
    let mut ports = Vec::new();
    for job in ["a", "b"] {
        let ranks = variables(&world, job);
        for (n, rank) in ranks.iter().enumerate() {
            let value = |name: &str| rank.get(name).unwrap_or_else(|| panic!("{name}: {rank:?}")).as_str();
            let address = value("MASTER_ADDR");
            assert!(address.parse::<IpAddr>().is_ok(), "an address that is the same everywhere, no name: {address}");
            let (port, number) = (value("MASTER_PORT"), n.to_string());
            assert_eq!(value("JAX_COORDINATOR_ADDRESS"), format!("{address}:{port}"));
            let given = [
                ("PET_MASTER_ADDR", address),
                ("PET_MASTER_PORT", port),
                ("PET_NNODES", "2"),
                ("PET_NPROC_PER_NODE", "2"),
                ("PET_NODE_RANK", &number),
                ("PET_RDZV_BACKEND", "static"),
                ("NNODES", "2"),
                ("NODE_RANK", &number),
                ("JAX_NUM_PROCESSES", "2"),
                ("JAX_PROCESS_ID", &number),
            ];
            for (name, expected) in given {
                assert_eq!(value(name), expected, "{name} of rank {n} of {job}");
            }
            for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
                assert!(!rank.contains_key(name), "{name} is the launcher's to set");
            }
            assert_eq!(rank["PET_RDZV_ID"], ranks[0]["PET_RDZV_ID"]);
        }
        ports.push((ranks[0]["MASTER_PORT"].clone(), ranks[0]["PET_RDZV_ID"].clone()));
    }
    assert!(ports[0].0 != ports[1].0 && ports[0].1 != ports[1].1, "{ports:?}");
    for name in aviflow_agent::wiring::RESERVED {
        let refused = world.run(&["plan", "--env", &format!("{name}=1"), "--", "true"]);
        assert_eq!(refused.code, 2, "{name}: {refused:?}");
        assert!(refused.err.contains(name), "{name}: {refused:?}");
    }
}

#[test]
fn jobs_of_two_control_planes_meet_at_different_ports() {
    // Both jobs are their control plane's first, and neither listens yet, as while a framework is loaded.
    let worlds = [World::with_pool(1, 1), World::with_pool(1, 1)];
    let mut ports = Vec::new();
    let mut jobs = Vec::new();
    for world in &worlds {
        let gate = world.gate("gate");
        let script = format!("echo port $MASTER_PORT; cat {}", gate.path().display());
        let mut job = world.follow(&["run", "--name", "one", "--", "sh", "-c", &script]);
        job.until("[r0] port ");
        ports.push(job.seen.last().cloned());
        jobs.push((job, gate));
    }
    for (job, gate) in &mut jobs {
        gate.open();
        assert_eq!(job.end(), 0, "{}", job.text());
    }
    assert_ne!(ports[0], ports[1]);
}

/// A training of the standard library's, which saves when it is asked to stop.
const HOOKS: &str = r#"import hashlib, sys
import aviflow

assert aviflow.enabled() and aviflow.attempt() == 1 and aviflow.seed() == 5
aviflow.install_sigterm_handler()
aviflow.log_facts(framework="none")
step = 0
while not aviflow.should_stop():
    step += 1
    aviflow.log(step, loss=1 / step, total_steps=10**9)
    if step == 3:
        path = aviflow.checkpoint_dir() / "state"
        with aviflow.checkpoint(step, path), aviflow.atomic_write(path, "w") as file:
            file.write("three")
    hashlib.sha256(bytes(10**7)).digest()
(aviflow.output_dir() / "why").write_text(aviflow.stop_reason())
aviflow.log_summary(last=step)
sys.exit(aviflow.REQUEUE)
"#;

#[test]
fn the_hooks_need_nothing_but_python() {
    let training = Training::new();
    let world = &training.world;
    fs::create_dir(world.work().join("hooks")).expect("folder");
    fs::write(world.work().join("hooks/train.py"), HOOKS).expect("write");
    for (name, environment) in [("venv", "environment: minimal\n"), ("bare", "")] {
        let text = format!(
            "name: {name}\n{environment}code: hooks\nseed: 5\ngpusPerNode: 1\noutputs: [/out]\n\
             checkpoint: {{path: /checkpoints}}\nrun: python3 train.py\n"
        );
        let file = world.document(name, &text);
        let mut run = world.follow(&["run", &file]);
        run.until("checkpoint of step 3 complete");
        let detail = world.json(&["show", name]);
        assert_eq!(detail["checkpoint"]["step"], 3, "{detail}");
        assert_eq!(detail["facts"]["framework"], "none", "{detail}");
        let progress = &detail["progress"];
        let step = progress["step"].as_u64().expect("a step");
        assert_eq!(progress["totalSteps"], 1_000_000_000_u64, "{detail}");
        let loss = progress["values"]["loss"].as_f64().expect("a loss");
        assert!((loss * f64::from(u32::try_from(step).expect("small")) - 1.0).abs() < 1e-9, "{detail}");
        world.ok(&["cancel", name]);
        run.end();
        let detail = world.json(&["show", name]);
        assert_eq!(detail["phase"], "Cancelled", "{detail}");
        assert_eq!(detail["facts"]["result.last"], detail["progress"]["step"].to_string(), "{detail}");
        world.ok(&["cp", &format!("{name}:/out/why"), &format!("why-{name}")]);
        let why = fs::read_to_string(world.work().join(format!("why-{name}"))).expect("read");
        assert_eq!(why, "cancelled by ada");
    }
}
