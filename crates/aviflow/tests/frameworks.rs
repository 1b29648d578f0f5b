//! PyTorch and JAX as they are, and scripts that know nothing of the platform, through the real binary.
//!
//! Their environments are large, so they are built once and kept in `$AVIFLOW_TEST_ENVIRONMENTS`; `cargo xtask test
//! frameworks` names a folder that outlives the clone. GPUs are virtual here, and processes meet over gloo.

mod world;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use world::training::{sentences, stamps};
use world::{Follow, World};

/// Steps of a training, samples of a rank in a step, and steps between two checkpoints, as the script has them.
const STEPS: u64 = 20;
const BATCH: u64 = 4;
const SAVE_EVERY: u64 = 5;

/// A world with the scripts, and a pool of two nodes with two GPUs each.
fn world() -> World {
    let world = World::new();
    let kept = std::env::var_os("AVIFLOW_TEST_ENVIRONMENTS").map(PathBuf::from);
    let kept = kept.unwrap_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("frameworks"));
    fs::create_dir_all(&kept).expect("folder");
    symlink(kept, world.home().join("environments")).expect("link");
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/trainings");
    let copy = world.work().join("trainings");
    fs::create_dir(&copy).expect("folder");
    for entry in fs::read_dir(scripts).expect("the scripts").flatten() {
        fs::copy(entry.path(), copy.join(entry.file_name())).expect("copy");
    }
    // Wheels of gigabytes are not to be there twice.
    let start = ["server", "start", "--nodes", "2", "--gpus-per-node", "2"];
    let started = world.command(&start).env("PIP_NO_CACHE_DIR", "1").output().expect("the binary runs");
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    world
}

fn document(world: &World, name: &str, environment: &str, more: &str) -> String {
    let text = format!(
        "name: {name}\nenvironment: {environment}\ncode: trainings\nnodes: 2\nseed: 3\n\
         checkpoint: {{path: /checkpoints}}\n{more}"
    );
    world.document(name, &text)
}

/// Lines of an attempt, of all its processes.
fn lines(world: &World, job: &str, attempt: u32) -> Vec<String> {
    let text = world.ok(&["logs", "-o", "json", job, "--attempt", &attempt.to_string()]);
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).expect("JSON"));
    lines.map(|l| l["text"].as_str().expect("text").to_owned()).collect()
}

/// The samples that were taken, by step.
fn taken(lines: &[String]) -> BTreeMap<u64, Vec<u64>> {
    let mut taken: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for line in lines {
        let Some((step, numbers)) = line.strip_prefix("took in step ").and_then(|rest| rest.split_once(": ")) else {
            continue;
        };
        let numbers: Vec<u64> = serde_json::from_str(numbers).expect("numbers");
        taken.entry(step.parse().expect("a step")).or_default().extend(numbers);
    }
    taken
}

/// That all samples of all steps were taken, each once, by this many processes.
fn each_once(steps: impl Iterator<Item = Vec<u64>>, processes: u64) {
    let mut all: Vec<u64> = steps.flatten().collect();
    all.sort_unstable();
    assert_eq!(all, (0..STEPS * processes * BATCH).collect::<Vec<_>>());
}

/// The processes of a world that torchrun has given a rank.
fn process_of(world: &World, rank: u32) -> i32 {
    let home = world.home().display().to_string();
    let wanted = format!("RANK={rank}");
    let has = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut ranked = false;
        let mut ours = false;
        for word in environment.split(|b| *b == 0).map(String::from_utf8_lossy) {
            ranked |= word == wanted;
            ours |= word.strip_prefix("AVIFLOW_SOCKET=").is_some_and(|socket| socket.starts_with(&home));
        }
        ranked && ours
    };
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.find(has).unwrap_or_else(|| panic!("no process has rank {rank}"))
}

/// Reads up to a line that may have come already.
fn seen(run: &mut Follow, text: &str) {
    if !run.text().contains(text) {
        run.until(text);
    }
}

/// A training under torchrun that is killed between two checkpoints and goes on from the last one that is whole.
fn interrupted(parallel: &str) {
    let world = world();
    let gate = world.gate("gate");
    let more = format!(
        "gpusPerNode: 2\nretry: {{failures: 1}}\nenv: {{HOLD: '1:8', GATE: {}}}\n\
         run: torchrun torch_train.py --parallel {parallel}\n",
        gate.path().display()
    );
    let mut run = world.follow(&["run", &document(&world, parallel, "torch", &more)]);
    run.until("held after step 8");
    seen(&mut run, "checkpoint of step 5 complete");

    // As a crash leaves it: the parts are there and the metadata is not.
    let checkpoints = world.home().join("jobs/1/volumes/checkpoints");
    fs::create_dir(checkpoints.join("step-8")).expect("folder");
    for rank in 0..4 {
        let part = format!("__{rank}_0.distcp");
        fs::copy(checkpoints.join("step-5").join(&part), checkpoints.join("step-8").join(&part)).expect("copy");
    }
    World::kill(process_of(&world, 3));
    run.until("goes on after step 5");
    assert_eq!(run.end(), 0, "{}", run.text());
    assert!(run.text().contains("learned: loss "), "{}", run.text());

    let detail = world.json(&["show", parallel]);
    assert_eq!((&detail["attempts"], &detail["counters"]["failures"]), (&1.into(), &1.into()), "{detail}");
    assert_eq!(detail["checkpoint"]["step"], STEPS, "{detail}");
    assert_eq!(detail["progress"]["step"], STEPS, "{detail}");
    let complete: Vec<String> = sentences(&detail, "checkpointComplete");
    let steps: Vec<u64> = (1..=STEPS / SAVE_EVERY).map(|n| n * SAVE_EVERY).collect();
    let said =
        |step: &u64| complete.iter().any(|text| text.starts_with(&format!("checkpoint of step {step} complete")));
    assert!(complete.len() == steps.len() && steps.iter().all(said), "{complete:?}");
    assert_eq!(stamps(&detail, &["running"]).len(), 2, "{detail}");

    // What was taken after the checkpoint was lost with the model that had learned it, and all of it comes again.
    let lines = lines(&world, parallel, 1);
    let begins = lines.iter().position(|line| line.contains("goes on after step 5")).expect("the second start");
    let (mut first, second) = (taken(&lines[..begins]), taken(&lines[begins..]));
    assert_eq!(second.keys().copied().collect::<Vec<_>>(), (6..=STEPS).collect::<Vec<_>>());
    first.retain(|step, _| *step <= 5);
    each_once(first.into_values().chain(second.into_values()), 4);
}

#[test]
#[ignore = "needs the packages of environments/torch"]
fn torch_ddp_under_torchrun_goes_on_from_its_last_whole_checkpoint() {
    interrupted("ddp");
}

#[test]
#[ignore = "needs the packages of environments/torch"]
fn torch_fsdp2_under_torchrun_goes_on_from_its_last_whole_checkpoint() {
    interrupted("fsdp");
}

#[test]
#[ignore = "needs the packages of environments/torch"]
fn torch_needs_no_launcher_where_each_gpu_has_a_process() {
    let world = world();
    let more = "gpusPerNode: 2\nprocesses: perGpu\nrun: python torch_train.py --parallel ddp\n";
    let said = world.ok(&["run", &document(&world, "each", "torch", more)]);
    assert!(said.contains("learned: loss "), "{said}");
    each_once(taken(&lines(&world, "each", 1)).into_values(), 4);
}

#[test]
#[ignore = "needs the packages of environments/torch"]
fn torch_says_why_a_rank_failed_though_torchrun_flattens_its_end() {
    let world = world();
    let file = document(&world, "wrong", "torch", "gpusPerNode: 1\nrun: torchrun torch_error.py\n");
    let said = world.run(&["run", &file]);
    assert_eq!(said.code, 1, "{said:?}");
    let detail = world.json(&["show", "wrong"]);
    let last = detail["lastLines"].as_array().expect("lines").last().and_then(Value::as_str).unwrap_or_default();
    assert!(last.contains("ValueError: the third sample is no text"), "{detail}");
}

#[test]
#[ignore = "needs the packages of environments/jax-cpu"]
fn jax_finds_its_processes_without_an_argument() {
    let world = world();
    let said = world.ok(&["run", &document(&world, "jax", "jax-cpu", "gpusPerNode: 1\nrun: python jax_train.py\n")]);
    assert!(said.contains("learned: loss ") && said.contains("2 processes"), "{said}");
    let detail = world.json(&["show", "jax"]);
    assert_eq!(detail["progress"]["step"], 40, "{detail}");
    let each = "gpusPerNode: 2\nprocesses: perGpu\nrun: python jax_train.py\n";
    let said = world.ok(&["run", &document(&world, "each", "jax-cpu", each)]);
    assert!(said.contains("learned: loss ") && said.contains("4 processes"), "{said}");
}
