//! Kueue on the same workload: its own scheduler process and its own runner, as its project measures them.
//!
//! Both are built of the published module. The runner makes the objects, marks a workload finished when its time is
//! over, and writes a summary; the scheduler (`minimalkueue`) has its own limit of 50 requests a second in its source.
//! Neither is changed. What the runner would start by itself, an apiserver and the scheduler, is started here, so that
//! both sides have the same apiserver, and processes are measured in the same way.

use crate::measured::{self, Measured};
use crate::module;
use crate::report::Side;
use crate::workload::{self, Scenario};
use anyhow::{Context as _, Result, bail, ensure};
use aviflow_testcluster::binaries::Binary;
use aviflow_testcluster::{Cluster, until, versions};
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the whole may take.
const LONGEST: Duration = Duration::from_secs(1200);

/// Runs the workload.
///
/// # Errors
/// If a part does not start or fails.
pub fn run(cluster: &Cluster, scenario: &Scenario, folder: &Path) -> Result<Side> {
    let (scheduler, runner) = (Binary::MinimalKueue.path()?, Binary::KueueRunner.path()?);
    // The runner reads files of it.
    let module = module::folder("sigs.k8s.io/kueue", versions::KUEUE)?;
    let generator = if scenario.topology {
        let file = folder.join("generator.yaml");
        fs::write(&file, scenario.generator().to_string())?;
        file
    } else {
        let file = module.join("test/performance/scheduler/configs/baseline/generator.yaml");
        workload::check(&file)?;
        file
    };
    let definitions = module.join("config/components/crd/bases");
    cluster.kubectl_ok(&["apply", "--server-side", "-f", &definitions.display().to_string()])?;
    cluster.kubectl_ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;

    // Free now; the scheduler takes it at once.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = measured::program(scheduler);
    command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["--metricsPort", &port.to_string()]);
    if scenario.topology {
        command.arg("--enableTAS");
    }
    let mut scheduler = Measured::start("minimalkueue", &mut command, &folder.join("minimalkueue.log"))?;
    until("Kueue's scheduler answers", Duration::from_secs(60), || {
        scheduler.check()?;
        Ok(metrics(port).ok().map(|_| ()))
    })?;
    let before = scheduler.used()?;
    let requests = metrics(port)?;
    let mut command = measured::program(runner);
    command.current_dir(&module).env("KUBECONFIG", cluster.kubeconfig());
    // As its project runs it where it starts no apiserver itself; with its own, it has the same limits.
    command.args(["--qps=1000", "--burst=2000", "--timeout=20m"]);
    command.arg("--generatorConfig").arg(&generator).arg("--o").arg(folder);
    if scenario.topology {
        command.arg("--enableTAS=true");
    }
    let mut runner = Measured::start("Kueue's runner", &mut command, &folder.join("runner.log"))?;
    let (begun, mut said) = (Instant::now(), Instant::now());
    // The summary is written when all workloads have finished; what comes after it deletes objects.
    let summary = folder.join("wlStates.csv");
    while !summary.exists() {
        std::thread::sleep(Duration::from_millis(200));
        scheduler.check()?;
        if begun.elapsed() > LONGEST {
            bail!("Kueue's runner has not ended after {} s", LONGEST.as_secs());
        }
        if !summary.exists() {
            runner.check()?;
        }
        if said.elapsed() > Duration::from_secs(30) {
            said = Instant::now();
            println!("  {:.0} s", begun.elapsed().as_secs_f64());
        }
    }
    let after = scheduler.used()?;
    let requests = metrics(port)? - requests;
    // The file is there before it is whole.
    let (waits, interrupted) = until("the runner has written its summary", Duration::from_secs(60), || {
        Ok(workloads(&fs::read_to_string(&summary)?, scenario).ok())
    })?;
    let wall = wall(&fs::read_to_string(folder.join("summary.yaml"))?)?;
    Ok(Side { wall, decided: None, waits, cpu: after.cpu - before.cpu, memory: after.memory, requests, interrupted })
}

/// Requests that the scheduler has sent, by its own count; watches are among them when they begin.
fn metrics(port: u16) -> Result<u64> {
    let text = ureq::get(format!("http://127.0.0.1:{port}/metrics")).call()?.body_mut().read_to_string()?;
    let counts = text.lines().filter(|line| line.starts_with("rest_client_requests_total{"));
    let counts = counts.map(|line| line.rsplit_once(' ').and_then(|(_, n)| n.parse::<f64>().ok()));
    Ok(counts.sum::<Option<f64>>().context("a metric without a value")? as u64)
}

/// Mean waits by class, and how many workloads were evicted: from the runner's table.
fn workloads(text: &str, scenario: &Scenario) -> Result<(BTreeMap<&'static str, f64>, usize)> {
    let mut rows = text.lines();
    let header: Vec<&str> = rows.next().unwrap_or_default().split(',').collect();
    let column = |name: &str| header.iter().position(|h| *h == name).with_context(|| format!("no column `{name}`"));
    let (class, admitted, finished) = (column("class name")?, column("ms to admitted")?, column("ms to finish")?);
    let evictions = column("num evictions")?;
    let mut sums: BTreeMap<&'static str, (f64, usize)> = BTreeMap::new();
    let (mut count, mut interrupted) = (0, 0);
    for row in rows {
        let row: Vec<&str> = row.split(',').collect();
        ensure!(row.len() == header.len(), "a row is not whole");
        let class = scenario.classes.iter().find(|c| c.name == row[class]).context("a class that is not known")?;
        ensure!(row[finished].parse::<i64>()? > 0, "a workload did not finish: {row:?}");
        let (sum, n) = sums.entry(class.name).or_default();
        *sum += row[admitted].parse::<f64>()? / 1000.0;
        *n += 1;
        count += 1;
        interrupted += usize::from(row[evictions].parse::<u32>()? > 0);
    }
    ensure!(count == scenario.jobs(), "{count} workloads of {}", scenario.jobs());
    Ok((sums.into_iter().map(|(class, (sum, n))| (class, sum / n as f64)).collect(), interrupted))
}

/// From the first event of a queue to the last, in the runner's summary.
fn wall(text: &str) -> Result<Duration> {
    let time = |field: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(field)).context("no such field")?;
        seconds(line.trim_start_matches(':').trim().trim_matches('"')).with_context(|| format!("{field}{line}"))
    };
    Ok(Duration::from_secs_f64(time("lastEventTime")? - time("firstEventTime")?))
}

/// Seconds of a day's time in RFC 3339, such as `2026-01-01T00:00:01.5Z`; a run does not go past midnight twice.
fn seconds(text: &str) -> Option<f64> {
    let (date, time) = text.split_once('T')?;
    let day: f64 = date.rsplit('-').next()?.parse().ok()?;
    let time = time.split(['Z', '+']).next()?;
    let mut parts = time.split(':');
    let mut next = || parts.next()?.parse::<f64>().ok();
    Some(((day * 24.0 + next()?) * 60.0 + next()?) * 60.0 + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_s_times_are_read() {
        let text = "clusterQueueClasses:\n  cq:\n    firstEventTime: \"2026-03-01T10:00:59.5Z\"\n    \
                    lastEventTime: \"2026-03-01T10:07:00.25+00:00\"\n";
        assert_eq!(wall(text).expect("times"), Duration::from_millis(360_750));
        assert!(wall("cq: {}").is_err());
    }

    #[test]
    fn a_table_that_is_not_whole_is_refused() {
        let header = "id,class name,namespace,name,ms to admitted,ms to finish,num evictions\n";
        assert!(workloads(&format!("{header}0,small,a,b,10,210,0\n"), &workload::BASELINE).is_err());
        assert!(workloads(header, &workload::BASELINE).is_err());
    }
}
