use super::support::{World, gone, spec, submission};
use crate::body::BodyAgent;
use crate::metrics::families;
use aviflow_api::file::Defaults;
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::driver::wall_clock;
use aviflow_engine::engine::Submission;
use aviflow_engine::ports::Observation;
use aviflow_engine::telemetry::{Point, StreamKey, Telemetry};
use aviflow_metrics::exposition::{Family, Kind};
use aviflow_metrics::gpu::{Reading, Sample};
use aviflow_metrics::text;
use axum::body::{Body, to_bytes};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A submission to the engine itself.
fn engine_submission(name: &str) -> Submission {
    let spec = spec(name);
    let request = aviflow_api::convert::to_request(&spec, &Defaults::default().priorities);
    let (namespace, user) = ("default".into(), "ada".into());
    Submission { namespace, user, spec, provenance: Default::default(), request }
}

async fn scrape(world: &World) -> String {
    let response = world.send(world.request("GET", "/metrics").body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

/// The value of a series as it is written; none if there is none.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(line.parse().unwrap())
}

fn point(step: u64, at: Time, values: &[(&str, f64)]) -> Point {
    let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    Point { at, attempt: 1, rank: 0, step, total_steps: Some(100), tokens: None, values, odd: BTreeMap::new() }
}

/// A job that runs and reports, on GPUs that do.
async fn busy() -> World {
    let world = World::new();
    world.submit(&submission("train")).await;
    world.until_phase(1, "Running").await;
    let now = wall_clock();
    world.telemetry.progress(JobId(1), point(10, Time(now.0 - 4000), &[("loss", 3.0)]));
    let values = [("loss", 2.5), ("tokens_per_second", 12_000.0), ("mfu", 0.41)];
    world.telemetry.progress(JobId(1), point(20, now, &values));
    let key =
        BodyAgent { job: JobId(1), attempt: 1, worker: 0, pid: None, connected: true, gpus: vec!["GPU-a".into()] };
    world.body.agents.lock().unwrap().push(key);
    let gpu = |uuid: &str, utilization, xid| Reading {
        uuid: uuid.into(),
        sample: Sample { utilization: Some(utilization), power: Some(500.0), ..Sample::default() },
        xid: Some(xid),
        ..Reading::default()
    };
    for xid in [0, 79] {
        let node = world.get("/v1/jobs/train").await["workers"][0]["node"].as_str().unwrap().to_owned();
        let at = wall_clock().0;
        world.gpus.read(&node, at, vec![gpu("GPU-a", 0.75, xid), gpu("GPU-b", 0.0, 0)]);
    }
    world
}

#[tokio::test]
async fn a_job_is_shown_with_its_training_and_its_own_gpus() {
    let world = busy().await;
    let text = scrape(&world).await;
    let job = "{namespace=\"default\",job=\"train\",attempt=\"1\"";
    let check =
        |name: &str, expected: Option<f64>| assert_eq!(value(&text, &format!("{name}{job}}}")), expected, "{text}");
    check("aviflow_job_gpus", Some(2.0));
    check("aviflow_job_step", Some(20.0));
    check("aviflow_job_steps_planned", Some(100.0));
    check("aviflow_job_step_seconds", Some(0.4));
    check("aviflow_job_loss", Some(2.5));
    check("aviflow_job_tokens_per_second", Some(12_000.0));
    check("aviflow_job_mfu_ratio", Some(0.41));
    // Of the two GPUs of the node that report, one is its own.
    check("aviflow_job_gpus_observed", Some(1.0));
    check("aviflow_job_gpu_utilization_ratio", Some(0.75));
    check("aviflow_job_gpu_power_watts", Some(500.0));
    // Nothing said it, and it is not 0.
    check("aviflow_job_gpu_sm_active_ratio", None);
    check("aviflow_job_gpu_memory_used_bytes", None);
    check("aviflow_job_checkpoint_timestamp_seconds", None);
    let info =
        "aviflow_job_info{namespace=\"default\",job=\"train\",attempt=\"1\",queue=\"default\",phase=\"Running\"}";
    assert_eq!(value(&text, info), Some(1.0));
    world.tell(1, gone(0, &[]));
    world.until_ended(1).await;
    let text = scrape(&world).await;
    assert!(!text.contains("job=\"train\""), "only live jobs have series: {text}");
    assert_eq!(value(&text, "aviflow_jobs_ended_total{queue=\"default\",phase=\"Succeeded\"}"), Some(1.0));
    assert_eq!(value(&text, "aviflow_job_wait_seconds_count{gpus=\"2-3\"}"), Some(1.0));
}

#[tokio::test]
async fn the_platform_is_shown() {
    let world = busy().await;
    world.until(|view| view.snapshot.nodes.len() == 2).await;
    let text = scrape(&world).await;
    let check = |series: &str, expected: f64| assert_eq!(value(&text, series), Some(expected), "{series}: {text}");
    check("aviflow_engine_up", 1.0);
    check("aviflow_jobs{queue=\"default\",phase=\"Running\"}", 1.0);
    check("aviflow_jobs{queue=\"default\",phase=\"Queued\"}", 0.0);
    check("aviflow_gpus{pool=\"main\",gpu_type=\"H100\",state=\"free\"}", 14.0);
    check("aviflow_gpus{pool=\"main\",gpu_type=\"H100\",state=\"hung\"}", 0.0);
    check("aviflow_nodes{pool=\"main\",gpu_type=\"H100\",condition=\"Ready\"}", 2.0);
    check("aviflow_agents{state=\"connected\"}", 1.0);
    check("aviflow_gpu_sources{state=\"fresh\"}", 1.0);
    check("aviflow_job_restarts_total{cause=\"failure\"}", 0.0);
    assert!(text.contains("aviflow_gpu_xid_errors_total{node=\"node-"), "{text}");
    assert!(value(&text, "aviflow_turn_duration_seconds_count") > Some(0.0));
    assert!(value(&text, "aviflow_plan_duration_seconds_count") > Some(0.0));
    assert!(value(&text, "aviflow_store_size_bytes") > Some(0.0));
    assert!(value(&text, "aviflow_commits_total") > Some(0.0));
    assert!(value(&text, "process_resident_memory_bytes") > Some(0.0));
}

#[tokio::test]
async fn dropped_output_is_counted() {
    let world = busy().await;
    let stream = StreamKey { job: JobId(1), attempt: 1, worker: 0 };
    world.telemetry.log_append(stream, 100, "1 0 o line\n").unwrap();
    assert_eq!(value(&scrape(&world).await, "aviflow_log_dropped_bytes_total"), Some(100.0));
}

#[tokio::test]
async fn while_the_engine_ends_the_rest_is_shown() {
    let world = busy().await;
    world.handle.stop();
    while world.handle.read(|_| ()).is_ok() {
        tokio::task::yield_now().await;
    }
    let text = scrape(&world).await;
    assert_eq!(value(&text, "aviflow_engine_up"), Some(0.0));
    assert_eq!(value(&text, "aviflow_store_failures_total"), Some(0.0));
    assert!(!text.contains("aviflow_gpus{"), "{text}");
}

#[tokio::test]
async fn what_is_shown_is_what_the_catalogue_says() {
    let world = busy().await;
    let hostile = Observation::NodeSeen {
        name: "n\"o\\de\n".into(),
        pool: "p\"}\n# TYPE x counter\nx 1".into(),
        gpu_type: "{}".into(),
        gpus: 1,
        path: Vec::new(),
    };
    world.handle.observe(hostile, None);
    world.until(|view| view.snapshot.nodes.len() == 3).await;
    let text = scrape(&world).await;
    let known: BTreeMap<&str, &Family> = families::ALL.iter().map(|f| (f.name, *f)).collect();
    let mut begun = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        assert_eq!(known.get(name).map(|f| f.kind.name()), Some(kind), "{line}");
        assert!(begun.insert(name.to_owned()), "{name} is there twice");
    }
    let mut series = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let read: Vec<_> = text::samples(line).collect();
        assert_eq!(read.len(), 1, "{line}");
        let end = |suffix| read[0].name.strip_suffix(suffix).filter(|name| begun.contains(*name));
        let name = ["_bucket", "_sum", "_count"].iter().find_map(end).unwrap_or(read[0].name);
        assert!(begun.contains(name), "{line}");
        for label in known[name].labels {
            assert!(read[0].label(label).is_some(), "{line} has no label {label}");
        }
        let (name, _) = line.rsplit_once(' ').unwrap();
        assert!(series.insert(name.to_owned()), "{name} is there twice");
    }
    // The apiserver is of no local control plane.
    let silent: Vec<_> = known.keys().filter(|name| !begun.contains(**name)).copied().collect();
    assert_eq!(silent, ["aviflow_apiserver_requests_total"]);
}

/// How long it takes, and for how long the engine is held up: read by a person, as machines differ.
#[tokio::test]
#[ignore = "a measurement of a minute"]
async fn a_large_pool_is_shown() {
    const NODES: usize = 1000;
    const JOBS: usize = 10_000;
    let world = World::new();
    for n in 0..NODES {
        let (pool, gpu_type) = ("main".into(), "H100".into());
        let name = format!("gpu-{n}");
        world.handle.observe(Observation::NodeSeen { name, pool, gpu_type, gpus: 8, path: Vec::new() }, None);
    }
    std::thread::scope(|scope| {
        for part in 0..100 {
            let handle = &world.handle;
            scope.spawn(move || {
                for n in 0..JOBS / 100 {
                    handle.submit(engine_submission(&format!("job-{part}-{n}"))).unwrap();
                }
            });
        }
    });
    let now = wall_clock();
    for job in 1..=JOBS as u64 {
        let values = [("loss", 2.5), ("tokens_per_second", 12_000.0), ("mfu", 0.41)];
        world.telemetry.progress(JobId(job), point(10, Time(now.0 - 4000), &values));
        world.telemetry.progress(JobId(job), point(20, now, &values));
    }
    let gpu = |n: u32| Reading {
        uuid: format!("GPU-{n}"),
        index: Some(n),
        sample: Sample { utilization: Some(0.5), power: Some(500.0), memory_used: Some(1e9), ..Sample::default() },
        ..Reading::default()
    };
    for n in 0..NODES {
        world.gpus.read(&format!("gpu-{n}"), wall_clock().0, (0..8).map(gpu).collect());
    }
    let app = world.server.app.clone();
    let text = move || {
        let begun = std::time::Instant::now();
        let text = crate::metrics::text(&app);
        (text, begun.elapsed())
    };
    let held_up = {
        let begun = std::time::Instant::now();
        world.handle.read(crate::metrics::gathered).unwrap();
        begun.elapsed()
    };
    for _ in 0..3 {
        let (text, took) = text();
        println!("{} bytes, {} lines in {took:?}; the engine {held_up:?}", text.len(), text.lines().count());
        assert!(text.lines().filter(|line| line.starts_with("aviflow_job_step{")).count() > 3000);
    }
}

#[test]
fn names_are_those_that_prometheus_expects() {
    for Family { name, kind, labels, help } in families::ALL {
        let plain = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        assert!(plain(name) && (name.starts_with("aviflow_") || name.starts_with("process_")), "{name}");
        assert!(labels.iter().all(|label| plain(label) && *label != "le"), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
        assert!(!name.ends_with("_count") && !name.ends_with("_bucket") && !name.ends_with("_sum"), "{name}");
        for unit in ["milliseconds", "_ms", "megabytes", "_mb", "percent", "minutes"] {
            assert!(!name.contains(unit), "{name} has no base unit");
        }
        assert!(help.ends_with('.'), "{name}: {help}");
    }
}

/// The table of `docs/admin/monitoring.md`.
#[test]
fn every_metric_is_documented() {
    let mut table = "| name | kind | labels | what it says |\n|---|---|---|---|\n".to_owned();
    for Family { name, kind, labels, help } in families::ALL {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(table, "| `{name}` | {} | {} | {help} |", kind.name(), labels.join(", "));
    }
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/admin/monitoring.md")).unwrap();
    assert!(page.contains(&table), "docs/admin/monitoring.md lacks this table of all metrics:\n{table}");
}
