//! What each part of the suite does.

use super::Outcome;
use super::count::{Count, failures};
use crate::control::{self, Control, Profile};
use crate::image::static_agent;
use crate::proc::{Ran, built, cargo, command, must, target, tee, tee_unless_silent, which};
use crate::{docs, setup};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Histories that the simulator runs on each test, and on a full one.
const HISTORIES: [&str; 2] = ["200", "20000"];

/// A program that is one test.
fn whole(command: &mut Command) -> Result<Outcome> {
    Ok(Outcome::Ran(Count::one(tee(command)?.ok)))
}

/// How long a runner of tests may say nothing. It says after a minute that a test still runs, and then nothing
/// more: whatever is silent for so long hangs.
const SILENCE: Duration = Duration::from_secs(900);

/// A runner that counts its tests.
pub fn counted(command: &mut Command) -> Result<Outcome> {
    let Ran { ok, output } = tee_unless_silent(command, SILENCE)?;
    let count = Count::read(&output, ok);
    Ok(if count.failed == 0 { Outcome::Ran(count) } else { Outcome::Failed(count, failures(&output)) })
}

pub fn fmt() -> Result<Outcome> {
    whole(cargo().args(["fmt", "--all", "--", "--check"]))
}

pub fn clippy() -> Result<Outcome> {
    whole(cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"]))
}

pub fn tidy() -> Result<Outcome> {
    Ok(Outcome::Ran(Count::one(crate::tidy::run()? == 0)))
}

pub fn deny() -> Result<Outcome> {
    if which("cargo-deny").is_none() {
        return Ok(Outcome::Skipped("cargo-deny is not installed (`cargo install cargo-deny`)".to_owned()));
    }
    whole(cargo().args(["deny", "--workspace", "check", "bans", "licenses", "sources"]))
}

pub fn compile() -> Result<Outcome> {
    whole(cargo().args(["test", "--workspace", "--locked", "--no-run", "--quiet"]))
}

pub fn cargo_test() -> Result<Outcome> {
    counted(cargo().args(["test", "--workspace", "--locked", "--no-fail-fast"]))
}

pub fn end_to_end() -> Result<Outcome> {
    counted(cargo().args(["test", "--package", "aviflow", "--locked", "--no-fail-fast", "--test", "*"]))
}

/// The hooks' own tests, which need nothing but Python.
pub fn hooks() -> Result<Outcome> {
    let python = setup::python().context("no Python")?;
    counted(unittest(&python, Path::new("python/aviflow")).env("PYTHONPATH", "src"))
}

/// The example's tests, in the environment that the demo made for it.
pub fn example() -> Result<Outcome> {
    let example = Path::new("examples/tiny-gpt");
    if !example.join("tests").is_dir() {
        return Ok(Outcome::Skipped("the example has no tests".to_owned()));
    }
    let python = environment()?;
    let hooks = std::fs::canonicalize("python/aviflow/src")?;
    let mut tests = unittest(&python, example);
    counted(
        tests
            .env("PYTHONPATH", std::env::join_paths([hooks, std::fs::canonicalize(example)?])?)
            .env("JAX_PLATFORMS", "cpu"),
    )
}

fn unittest(python: &Path, folder: &Path) -> Command {
    let mut tests = command(python);
    tests.args(["-W", "error::ResourceWarning", "-m", "unittest", "discover", "-s", "tests"]).current_dir(folder);
    tests
}

/// An interpreter with JAX: the one that the tested demo made, or else one made once for each lock.
fn environment() -> Result<PathBuf> {
    let made = std::fs::read_dir(control::tested_home()?.join("environments")).into_iter().flatten().flatten();
    let has_jax =
        |python: &PathBuf| command(python).args(["-c", "import jax"]).output().is_ok_and(|out| out.status.success());
    if let Some(python) = made.map(|folder| folder.path().join("bin/python")).find(has_jax) {
        return Ok(python);
    }
    let lock = "environments/jax-cpu/requirements.lock";
    let hash = fingerprint(&std::fs::read(lock)?);
    let folder = target()?.join("venvs").join(format!("{hash:016x}"));
    let python = folder.join("bin/python");
    let complete = folder.join("complete");
    if complete.exists() {
        return Ok(python);
    }
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    must(command(setup::python().context("no Python")?).args(["-m", "venv"]).arg(&folder))?;
    let mut install = command(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]);
    must(install.args(["--only-binary", ":all:", "-r", lock]))?;
    std::fs::write(complete, "")?;
    Ok(python)
}

/// FNV-1a: a name for a folder, not a proof of anything.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

pub fn simulator() -> Result<Outcome> {
    histories(HISTORIES[0])
}

pub fn long_soak() -> Result<Outcome> {
    histories(HISTORIES[1])
}

fn histories(number: &str) -> Result<Outcome> {
    if !Path::new("crates/aviflow-engine/examples/soak.rs").exists() {
        return Ok(Outcome::Skipped("the engine has no example `soak`".to_owned()));
    }
    whole(command(built("--example", "soak", &["--quiet", "--locked"])?).arg(number))
}

/// The demo as a person starts it: its last lines are the training's results, and it has learned.
pub fn demo() -> Result<Outcome> {
    let control = Control::fresh(control::build(Profile::Dev)?, &control::tested_home()?)?;
    let this = std::env::current_exe()?;
    let Ran { ok, output } = tee(command(this).args(["demo", "--exit", "--home"]).arg(&control.home))?;
    let lines: Vec<&str> = output.trim_end().lines().collect();
    let value = |from_end: usize, name: &str| -> Option<f64> {
        let line = lines.get(lines.len().checked_sub(from_end)?)?;
        line.strip_prefix(name)?.trim().parse().ok()
    };
    let learned = match (value(2, "validation loss:"), value(1, "byte-bigram entropy:")) {
        (Some(loss), Some(entropy)) if loss < entropy => true,
        (Some(loss), Some(entropy)) => {
            println!("the training has not learned: its loss {loss} is not below the entropy {entropy}");
            false
        }
        (None, _) | (_, None) => {
            println!("the demo's last two lines are not the training's results");
            false
        }
    };
    Ok(Outcome::Ran(Count::one(ok && learned)))
}

/// Metrics, rules and the dashboard before a real Prometheus.
pub fn monitoring() -> Result<Outcome> {
    setup::check_monitoring()?;
    counted(cargo().args(["test", "--workspace", "--locked", "--test", "monitoring", "--", "--ignored"]))
}

/// What the packages of an environment take at most, in MB, so that a disk is not filled by them.
const TORCH_MB: u64 = 8_000;

/// Where environments are kept that are too large to be made anew for each clone: a folder for what is locked now, and
/// those of before are removed.
fn kept_environments() -> Result<PathBuf> {
    let mut locked = Vec::new();
    for file in ["environment.yaml", "requirements.lock"] {
        for environment in ["jax-cpu", "torch"] {
            locked.extend(std::fs::read(Path::new("environments").join(environment).join(file))?);
        }
    }
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")));
    let cache = cache.context("neither $XDG_CACHE_HOME nor $HOME says where a cache may be")?;
    let all = cache.join("aviflow-frameworks");
    let name = format!("{:016x}", fingerprint(&locked));
    for old in std::fs::read_dir(&all).into_iter().flatten().flatten().filter(|e| e.file_name() != name.as_str()) {
        std::fs::remove_dir_all(old.path())?;
    }
    let folder = all.join(name);
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// PyTorch and JAX with scripts that know nothing of the platform; the first only where its packages can be.
pub fn frameworks() -> Result<Outcome> {
    let folder = kept_environments()?;
    let free = crate::proc::capture(command("df").arg("-Pm").arg(&folder))?;
    let free = free.lines().last().and_then(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok()).unwrap_or(0);
    let made = std::fs::read_dir(&folder)?.flatten().any(|e| e.path().join("bin/torchrun").exists());
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--locked", "--no-fail-fast", "--test", "frameworks", "--", "--ignored"]);
    // Each takes both cores.
    tests.args(["--test-threads", "1"]).env("AVIFLOW_TEST_ENVIRONMENTS", &folder);
    let without = if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        Some("it is locked for Linux on x86_64".to_owned())
    } else if !made && free < TORCH_MB {
        Some(format!("its packages need {TORCH_MB} MB, and {} has {free} MB free", folder.display()))
    } else {
        None
    };
    if let Some(why) = without {
        println!("without PyTorch: {why}");
        tests.arg("jax_");
    }
    counted(&mut tests)
}

/// The tests on real clusters, or with their programs, which are marked as ignored.
const ON_CLUSTERS: [&str; 5] = ["deploy", "kubernetes", "cluster", "kube", "chart"];

/// The tests on real clusters, one after the other.
pub fn kube() -> Result<Outcome> {
    on_clusters(false)
}

/// The same, with each of the control plane's writes as a moment to die, and not a few of them.
pub fn kube_full() -> Result<Outcome> {
    on_clusters(true)
}

fn on_clusters(full: bool) -> Result<Outcome> {
    if let Some(why) = setup::no_kube() {
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let mut tests = kube_tests()?;
    if full {
        tests.env("AVIFLOW_TEST_FULL", "1");
    }
    tests.args(ON_CLUSTERS.iter().flat_map(|test| ["--test", test]));
    counted(tests.args(["--", "--ignored"]))
}

/// A runner of such tests, which lacks but their names: all that they need is there.
pub fn kube_tests() -> Result<Command> {
    setup::check_kube()?;
    let mut tests = cargo();
    tests.env("AVIFLOW_KUBE_BIN", programs()?);
    tests.env("AVIFLOW_BIN", control::build(Profile::Dev)?).env("AVIFLOW_AGENT_BIN", static_agent(Profile::Dev)?);
    // Of the whole workspace, so that nothing is compiled with other features.
    tests.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
    Ok(tests)
}

/// A folder with the programs of a cluster. The first time, this builds Kubernetes and says so; a test could say
/// nothing meanwhile.
fn programs() -> Result<PathBuf> {
    let Ran { ok, output } = tee(&mut crate::kube::command(&["binaries", "--all"])?)?;
    if !ok {
        bail!("the programs of a cluster could not be built");
    }
    let folder = target()?.join("kube-bin");
    std::fs::create_dir_all(&folder)?;
    for program in output.lines().map(Path::new).filter(|line| line.is_absolute() && line.is_file()) {
        let link = folder.join(program.file_name().context("a program has a name")?);
        // That of another version may be there.
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(program, &link)?;
    }
    Ok(folder)
}

/// The commands in the documents do what the documents say.
pub fn docs() -> Result<Outcome> {
    let binary = control::build(Profile::Dev)?;
    Ok(Outcome::Ran(docs::run(&binary)?))
}
