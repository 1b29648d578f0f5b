//! `cargo xtask bench`: the control plane's figures, measured on this machine.
//!
//! It drives the release binary from outside, over the REST API and the command
//! line. Nothing is estimated: a figure that could not be measured is an error.

mod http;
pub mod kube;
pub mod plan;
pub mod replay;

use crate::control::{self, Control, Profile, Scratch};
use crate::proc::{capture, command, target};
use anyhow::{Context as _, Result, bail};
use http::Http;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where the figures are written.
const PAGE: &str = "docs/performance.md";
/// The lines around the table.
const MARKS: [&str; 2] = ["<!-- figures: cargo xtask bench --write -->", "<!-- end of figures -->"];

const SUBMISSIONS: usize = 50;
const SMALL_JOBS: usize = 500;
const FINISHED_JOBS: usize = 10_000;
const WAITING_JOBS: usize = 1_000;
const IDLE: Duration = Duration::from_secs(10);

/// One measured figure.
struct Figure {
    what: String,
    measured: String,
    target: &'static str,
}

/// Measures; with `write`, puts the table into the page.
pub fn run(write: bool) -> Result<u8> {
    let binary = control::build(Profile::Release)?;
    let folder = target()?.join("bench");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    let mut figures = Vec::new();
    figures.extend(idle(&binary, &folder.join("idle"))?);
    figures.extend(submission(&binary, &folder.join("submission"))?);
    figures.extend(small_jobs(&binary, &folder.join("small"))?);
    figures.extend(many_jobs(&binary, &folder.join("many"))?);
    let table = table(&figures)?;
    finish(&table, MARKS, write)
}

/// Prints a table; with `write`, puts it between its marks.
fn finish(table: &str, marks: [&str; 2], write: bool) -> Result<u8> {
    println!("\n{table}");
    if write {
        let page = std::fs::read_to_string(PAGE).with_context(|| PAGE.to_owned())?;
        std::fs::write(PAGE, replaced(&page, table, marks)?)?;
        println!("wrote {PAGE}");
    }
    Ok(0)
}

/// CPU time of a control plane that has nothing to do.
fn idle(binary: &Path, home: &Path) -> Result<Vec<Figure>> {
    println!("idle: {} s with nothing to do", IDLE.as_secs());
    let scratch = Scratch::start(Control::new(binary.to_owned(), home)?, 2)?;
    let pid = scratch.0.pid()?;
    let resident = resident(pid)?;
    let before = cpu_ticks(pid)?;
    std::thread::sleep(IDLE);
    let ticks = cpu_ticks(pid)? - before;
    let per_second: f64 = capture(command("getconf").arg("CLK_TCK"))?.trim().parse()?;
    let share = ticks as f64 / per_second / IDLE.as_secs_f64() * 100.0;
    Ok(vec![
        Figure {
            what: format!("processor time of the idle control plane, over {} s", IDLE.as_secs()),
            measured: format!("{share:.2}% of one core ({ticks} ticks of {:.0} ms)", 1000.0 / per_second),
            target: "not measurable",
        },
        Figure { what: "resident memory, empty store".into(), measured: megabytes(resident), target: "" },
    ])
}

/// From a submission to the first instruction of the job's process.
fn submission(binary: &Path, home: &Path) -> Result<Vec<Figure>> {
    println!(
        "submission: {SUBMISSIONS} jobs over REST, {SUBMISSIONS} by the command line, {SUBMISSIONS} without the platform"
    );
    let scratch = Scratch::start(Control::new(binary.to_owned(), home)?, 1)?;
    let mut http = Http::connect(&scratch.0.address()?, &scratch.0.token()?)?;
    let stamp = |name: String| -> (PathBuf, String) {
        let file = home.join(name);
        let script = format!("date +%s%N > '{0}.new' && mv '{0}.new' '{0}'", file.display());
        (file, script)
    };
    let (mut direct, mut rest, mut cli) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..SUBMISSIONS {
        let (file, script) = stamp(format!("direct-{n}"));
        let begun = unix_nanos()?;
        let mut child = command("sh").args(["-c", &script]).spawn()?;
        direct.push(written(&file)? - begun);
        child.wait()?;

        let (file, script) = stamp(format!("rest-{n}"));
        let body = submit(&format!("rest-{n}"), &["sh", "-c", &script]);
        let begun = unix_nanos()?;
        http.post("/v1/jobs", &body)?;
        rest.push(written(&file)? - begun);
        settled(&mut http, 0)?;

        let (file, script) = stamp(format!("cli-{n}"));
        let name = format!("cli-{n}");
        let begun = unix_nanos()?;
        capture(&mut scratch.0.cli(["run", "--detach", "--name", &name, "--", "sh", "-c", &script]))?;
        cli.push(written(&file)? - begun);
        settled(&mut http, 0)?;
    }
    let (direct, rest, cli) = (median(direct), median(rest), median(cli));
    Ok(vec![
        Figure {
            what: format!(
                "submission over REST to the job's first process, beyond the process's own start; median of {SUBMISSIONS}"
            ),
            measured: format!(
                "{:.1} ms ({:.1} ms in all, {:.1} ms without the platform)",
                millis(rest - direct),
                millis(rest),
                millis(direct)
            ),
            target: "under 150 ms",
        },
        Figure {
            what: format!("the same from the start of `aviflow run --detach`; median of {SUBMISSIONS}"),
            measured: format!("{:.1} ms", millis(cli - direct)),
            target: "",
        },
    ])
}

/// Many jobs that do nothing, one after another on eight GPUs.
fn small_jobs(binary: &Path, home: &Path) -> Result<Vec<Figure>> {
    println!("small jobs: {SMALL_JOBS} that run `true`, on one node of 8");
    let scratch = Scratch::start(Control::new(binary.to_owned(), home)?, 1)?;
    let mut http = Http::connect(&scratch.0.address()?, &scratch.0.token()?)?;
    let begun = Instant::now();
    for n in 0..SMALL_JOBS {
        http.post("/v1/jobs", &submit(&format!("small-{n}"), &["true"]))?;
    }
    let submitted = begun.elapsed();
    settled(&mut http, 0)?;
    let all = begun.elapsed();
    let succeeded = scratch.0.jobs()?.iter().filter(|job| job["phase"] == "Succeeded").count();
    if succeeded != SMALL_JOBS {
        bail!("{succeeded} of {SMALL_JOBS} small jobs succeeded");
    }
    Ok(vec![Figure {
        what: format!("{SMALL_JOBS} jobs of 1 GPU that run `true` on 8 GPUs, first submission to last end"),
        measured: format!(
            "{:.1} s ({:.0} jobs/s; submitted in {:.1} s)",
            all.as_secs_f64(),
            SMALL_JOBS as f64 / all.as_secs_f64(),
            submitted.as_secs_f64()
        ),
        target: "under 15 s (Slurm: 61 s)",
    }])
}

/// Memory with a history and a long queue. The finished jobs were cancelled while they waited.
fn many_jobs(binary: &Path, home: &Path) -> Result<Vec<Figure>> {
    println!("many jobs: {FINISHED_JOBS} that ended and {WAITING_JOBS} that wait");
    let scratch = Scratch::start(Control::new(binary.to_owned(), home)?, 1)?;
    let nodes = capture(&mut scratch.0.cli(["node", "ls", "-o", "json"]))?;
    let nodes: Value = serde_json::from_str(&nodes)?;
    let list = if nodes.is_array() { &nodes } else { &nodes["nodes"] };
    for node in list.as_array().context("no nodes")? {
        let name = node["name"].as_str().context("a node without a name")?;
        capture(&mut scratch.0.cli(["node", "cordon", name]))?;
    }
    let pid = scratch.0.pid()?;
    let mut http = Http::connect(&scratch.0.address()?, &scratch.0.token()?)?;
    let begun = Instant::now();
    for n in 0..FINISHED_JOBS {
        let name = format!("ended-{n}");
        http.post("/v1/jobs", &submit(&name, &["true"]))?;
        http.post(&format!("/v1/jobs/{name}/actions"), &json!({"action": "cancel"}))?;
    }
    for n in 0..WAITING_JOBS {
        http.post("/v1/jobs", &submit(&format!("waiting-{n}"), &["true"]))?;
    }
    let took = begun.elapsed();
    let waiting = live(&http.get("/v1/server")?)?;
    if waiting != WAITING_JOBS as u64 {
        bail!("{waiting} of {WAITING_JOBS} jobs wait");
    }
    let memory = resident(pid)?;
    Ok(vec![Figure {
        what: format!("resident memory with {FINISHED_JOBS} ended and {WAITING_JOBS} waiting jobs"),
        measured: format!("{} (made in {:.0} s)", megabytes(memory), took.as_secs_f64()),
        target: "under 100 MB",
    }])
}

/// A submission of one GPU.
fn submit(name: &str, run: &[&str]) -> Value {
    json!({"spec": {
        "name": name, "queue": "default", "priority": "normal", "nodes": {"min": 1, "max": 1}, "gpusPerNode": 1,
        "run": run, "processes": "perNode", "preemptible": true, "retry": {"failures": 0},
    }})
}

/// Waits until no more than so many jobs are live.
fn settled(http: &mut Http, most: u64) -> Result<()> {
    let begun = Instant::now();
    while live(&http.get("/v1/server")?)? > most {
        if begun.elapsed() > Duration::from_secs(600) {
            bail!("jobs did not end within ten minutes");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Live jobs, by what the control plane says of itself.
fn live(server: &Value) -> Result<u64> {
    let phases = server["jobs"].as_object().context("the control plane counts no jobs")?;
    Ok(phases.values().filter_map(Value::as_u64).sum())
}

/// The instant in a file, once it is there.
fn written(file: &Path) -> Result<i128> {
    let begun = Instant::now();
    while !file.exists() {
        if begun.elapsed() > Duration::from_secs(30) {
            bail!("{} was not written within 30 s", file.display());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(std::fs::read_to_string(file)?.trim().parse()?)
}

fn unix_nanos() -> Result<i128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos().cast_signed())
}

fn median(mut values: Vec<i128>) -> i128 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn millis(nanos: i128) -> f64 {
    nanos as f64 / 1e6
}

fn megabytes(kilobytes: u64) -> String {
    format!("{:.1} MB", kilobytes as f64 * 1024.0 / 1e6)
}

/// Kilobytes resident.
fn resident(pid: u64) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Ticks of processor time, user and system.
fn cpu_ticks(pid: u64) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may hold anything.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields).context("/proc/PID/stat")?;
    let field = |n: usize| fields.split_whitespace().nth(n - 3).and_then(|f| f.parse::<u64>().ok());
    Ok(field(14).context("utime")? + field(15).context("stime")?)
}

fn machine() -> Result<String> {
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown processor");
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let kilobytes: f64 = memory.split_whitespace().nth(1).context("/proc/meminfo")?.parse()?;
    let cores = std::thread::available_parallelism()?;
    let model = model.trim_start_matches([' ', '\t', ':']);
    Ok(format!("{cores} cores ({model}), {:.0} GB of memory, Linux", kilobytes * 1024.0 / 1e9))
}

fn table(figures: &[Figure]) -> Result<String> {
    let mut out = format!("Measured on {}.\n\n| what | measured | target |\n|---|---|---|\n", machine()?);
    for Figure { what, measured, target } in figures {
        let target = if target.is_empty() { "none" } else { target };
        out += &format!("| {what} | {measured} | {target} |\n");
    }
    Ok(out)
}

/// The page with another table between its marks.
fn replaced(page: &str, table: &str, marks: [&str; 2]) -> Result<String> {
    let (head, rest) = page.split_once(marks[0]).with_context(|| format!("{PAGE} lacks the line {}", marks[0]))?;
    let (_, tail) = rest.split_once(marks[1]).with_context(|| format!("{PAGE} lacks the line {}", marks[1]))?;
    Ok(format!("{head}{}\n{table}{}{tail}", marks[0], marks[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_takes_the_old_one_s_place() -> Result<()> {
        let page = format!("# Page\n{}\nold\n{}\nend\n", MARKS[0], MARKS[1]);
        let new = replaced(&page, "new\n", MARKS)?;
        assert_eq!(new, format!("# Page\n{}\nnew\n{}\nend\n", MARKS[0], MARKS[1]));
        assert_eq!(replaced(&new, "new\n", MARKS)?, new);
        assert!(replaced("# Page\n", "new\n", MARKS).is_err());
        Ok(())
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3, 1, 2]), 2);
    }
}
