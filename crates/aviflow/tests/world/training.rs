//! Worlds in which the real example trains, small enough for a test.
//!
//! The environment is built once and kept for later runs of the tests, below
//! Cargo's own folder for them. The example is run unchanged, by a script that
//! can hold it after a step: so a test breaks it at a place that it knows.

use crate::world::{Gate, World};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Runs train.py; stands still where HOLDS, such as `1:15 2:25`, says so: the number of the start, whether a new attempt
/// or in place, and the step.
const HELD: &str = r#"import os, runpy
import aviflow

log = aviflow.log

def held(step, **values):
    log(step, **values)
    hold = f"{aviflow.attempt() + int(os.environ['AVIFLOW_EPOCH']) - 1}:{step}"
    if aviflow.rank() == 0 and hold in os.environ["HOLDS"].split():
        aviflow.flush()
        print(f"held after step {step}", flush=True)
        open(os.path.join(os.environ["GATES"], f"after-{step}")).read()

aviflow.log = held
runpy.run_path("train.py", run_name="__main__")
"#;

/// Steps of a run, unless a test says otherwise.
pub const STEPS: u32 = 30;

/// Everything the example is started with here: one layer, and a checkpoint every ten steps.
const ARGUMENTS: [&str; 6] = ["--layers", "1", "--batch", "4", "--checkpoint-every", "10"];

/// A world and a copy of the example in it.
pub struct Training {
    pub world: World,
}

/// A rank's process, for good: a number may be given again, a start time with it not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    started: u64,
}

impl Process {
    pub fn find(pid: i32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit(')').next()?.split_whitespace();
        let alive = !matches!(fields.next()?, "Z" | "X");
        alive.then_some(Process { pid, started: fields.nth(18)?.parse().ok()? })
    }

    pub fn lives(self) -> bool {
        Process::find(self.pid) == Some(self)
    }
}

impl Training {
    /// A pool of two nodes with one GPU each.
    pub fn new() -> Training {
        let world = World::new();
        let shared = Path::new(env!("CARGO_TARGET_TMPDIR")).join("training");
        for name in ["environments", "cache"] {
            fs::create_dir_all(shared.join(name)).expect("folder");
            symlink(shared.join(name), world.home().join(name)).expect("link");
        }
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-gpt");
        let copy = world.work().join("tiny-gpt");
        fs::create_dir(&copy).expect("folder");
        // The example's own source is text enough.
        let mut corpus = Vec::new();
        for entry in fs::read_dir(example).expect("the example").map(|e| e.expect("entry")) {
            if entry.file_type().expect("type").is_file() {
                let bytes = fs::read(entry.path()).expect("read");
                fs::write(copy.join(entry.file_name()), &bytes).expect("write");
                corpus.push((entry.file_name(), bytes));
            }
        }
        corpus.sort();
        let corpus: Vec<u8> = corpus.into_iter().flat_map(|(_, bytes)| bytes).collect();
        fs::write(world.work().join("corpus.bin"), corpus).expect("write");
        fs::write(copy.join("held.py"), HELD).expect("write");
        world.ok(&["server", "start", "--nodes", "2", "--gpus-per-node", "1"]);
        Training { world }
    }

    /// The gate at which the example is held after a step; to be made before it gets there.
    pub fn gate(&self, step: u32) -> Gate {
        self.world.gate(&format!("after-{step}"))
    }

    /// The folder of the code.
    pub fn code(&self) -> PathBuf {
        self.world.work().join("tiny-gpt")
    }

    /// What starts the example, held where `holds` says, with more options and arguments.
    pub fn command(&self, holds: &str, steps: u32, options: &[&str]) -> Vec<String> {
        let data = format!("data=[{{name: corpus, source: {}}}]", self.world.work().join("corpus.bin").display());
        let gates = self.world.home().parent().expect("a folder").display().to_string();
        let variables = [format!("HOLDS={holds}"), format!("GATES={gates}")];
        let mut words: Vec<String> =
            ["run", "tiny-gpt", "--set", "gpusPerNode=1", "--set", "run=python held.py"].map(str::to_owned).to_vec();
        words.extend(["--set".to_owned(), data]);
        words.extend(variables.into_iter().flat_map(|variable| ["--env".to_owned(), variable]));
        words.extend(options.iter().map(|&o| o.to_owned()));
        words.extend(["--".to_owned(), "--steps".to_owned(), steps.to_string()]);
        words.extend(ARGUMENTS.map(str::to_owned));
        words
    }

    /// The file of losses that a job left.
    pub fn losses(&self, job: &str) -> String {
        let to = format!("losses-of-{job}");
        self.world.ok(&["cp", &format!("{job}:/out/losses.jsonl"), &to]);
        fs::read_to_string(self.world.work().join(to)).expect("losses")
    }

    /// The text of a rank's lines in an attempt, as they were written.
    pub fn lines(&self, job: &str, attempt: u32, rank: u32) -> Vec<String> {
        let (attempt, rank) = (attempt.to_string(), rank.to_string());
        let text = self.world.ok(&["logs", "-o", "json", job, "--attempt", &attempt, "--rank", &rank]);
        let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).expect("JSON"));
        lines.filter(|l| l["stream"] != "agent").map(|l| l["text"].as_str().expect("text").to_owned()).collect()
    }

    /// The processes of ranks that live, by rank.
    pub fn ranks(&self) -> BTreeMap<u32, Process> {
        let home = self.world.home().display().to_string();
        let mut found = BTreeMap::new();
        for entry in fs::read_dir("/proc").expect("/proc").flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|n| n.parse().ok()).and_then(Process::find) else {
                continue;
            };
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            let value = |name: &str| {
                let mut words = environment.split(|b| *b == 0).map(String::from_utf8_lossy);
                words.find_map(|w| w.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
            };
            let Some(rank) = value("AVIFLOW_RANK").and_then(|r| r.parse().ok()) else { continue };
            if value("AVIFLOW_SOCKET").is_some_and(|socket| socket.starts_with(&home)) {
                // A rank comes before its children.
                let first = found.entry(rank).or_insert(process);
                if process.started < first.started {
                    *first = process;
                }
            }
        }
        found
    }
}

/// The losses of a run that nobody disturbed.
pub fn undisturbed() -> &'static str {
    static LOSSES: OnceLock<String> = OnceLock::new();
    LOSSES.get_or_init(|| {
        let training = Training::new();
        let words = training.command("", STEPS, &[]);
        training.world.ok(&words.iter().map(String::as_str).collect::<Vec<_>>());
        training.losses("tiny-gpt")
    })
}

/// When entries of a kind were written into a job's timeline, by the engine's clock.
pub fn stamps(detail: &Value, kinds: &[&str]) -> Vec<i64> {
    let entries = detail["timeline"].as_array().expect("timeline").iter();
    entries.filter(|e| kinds.iter().any(|k| e["kind"] == *k)).map(|e| e["at"].as_i64().expect("at")).collect()
}

/// Sentences of a kind in a job's timeline.
pub fn sentences(detail: &Value, kind: &str) -> Vec<String> {
    let entries = detail["timeline"].as_array().expect("timeline").iter();
    entries.filter(|e| e["kind"] == kind).map(|e| e["text"].as_str().expect("text").to_owned()).collect()
}

/// GPU time by state; checked against the time between each placement and its end, on all GPUs.
pub fn gpu_time(detail: &Value) -> BTreeMap<String, i64> {
    let states: BTreeMap<String, i64> = serde_json::from_value(detail["gpuTime"].clone()).expect("GPU time");
    let gpus = detail["nodes"].as_i64().expect("nodes") * detail["gpusPerNode"].as_i64().expect("GPUs");
    let placed = stamps(detail, &["placed"]);
    let left = stamps(detail, &["queuedAgain", "succeeded", "failed", "cancelled"]);
    assert_eq!(placed.len(), left.len(), "{detail}");
    let held: i64 = placed.iter().zip(&left).map(|(from, to)| (to - from) * gpus).sum();
    assert_eq!(states.values().sum::<i64>(), held, "{detail}");
    states
}
