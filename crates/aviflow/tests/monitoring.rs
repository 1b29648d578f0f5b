//! A real Prometheus scrapes a real control plane: every expression of the dashboard and of the rules is asked, and
//! answers. What GPUs do comes from an exporter that serves what dcgm-exporter writes.
//!
//! It needs Debian's package `prometheus`; `cargo xtask test monitoring` installs it.

mod world;

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use world::World;

/// Between two looks at Prometheus, which says nothing by itself.
const LOOK: Duration = Duration::from_millis(100);

/// What of the repository is tested.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// An exporter of one GPU, whose XID error can change.
struct Exporter {
    url: String,
    xid: Arc<AtomicU32>,
}

impl Exporter {
    fn start() -> Exporter {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/metrics", listener.local_addr().expect("an address"));
        let xid = Arc::<AtomicU32>::default();
        let said = xid.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut request = [0; 2048];
                let _ = stream.read(&mut request);
                let body = gpus(said.load(Ordering::SeqCst));
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = stream.write_all((head + &body).as_bytes());
            }
        });
        Exporter { url, xid }
    }
}

fn gpus(xid: u32) -> String {
    let values = [
        ("DCGM_FI_DEV_GPU_UTIL", "97".to_owned()),
        ("DCGM_FI_DEV_POWER_USAGE", "655.2".to_owned()),
        ("DCGM_FI_DEV_FB_USED", "70123".to_owned()),
        ("DCGM_FI_DEV_FB_FREE", "11000".to_owned()),
        ("DCGM_FI_PROF_SM_ACTIVE", "0.91".to_owned()),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.42".to_owned()),
        ("DCGM_FI_PROF_DRAM_ACTIVE", "0.31".to_owned()),
        ("DCGM_FI_DEV_XID_ERRORS", xid.to_string()),
    ];
    let mut text = String::new();
    for (name, value) in values {
        for gpu in 0..4 {
            text += &format!(
                "{name}{{gpu=\"{gpu}\",UUID=\"GPU-0000000{gpu}-0000-0000-0000-000000000000\",device=\"nvidia{gpu}\",\
                 modelName=\"NVIDIA H100 80GB HBM3\",hostname=\"here\"}} {value}\n"
            );
        }
    }
    text
}

/// A Prometheus that scrapes a world's control plane each second. Dropping it ends it.
struct Prometheus {
    child: Child,
    address: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(world: &World) -> Prometheus {
        let text = fs::read(world.home().join("server.json")).expect("server.json");
        let server: Value = serde_json::from_slice(&text).expect("JSON");
        let target = server["url"].as_str().expect("an address").trim_start_matches("http://").to_owned();
        // The port is free again at once; nobody else of this test takes one.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
        let folder = world.work().join("prometheus");
        fs::create_dir(&folder).expect("folder");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{}]\n\
             scrape_configs:\n\
             - job_name: aviflow\n  honor_labels: true\n  authorization: {{credentials_file: {}}}\n  \
             static_configs: [{{targets: ['{target}']}}]\n",
            file("deploy/helm/aviflow/files/monitoring/rules.yaml").display(),
            world.home().join("token").display(),
        );
        fs::write(folder.join("prometheus.yml"), config).expect("write");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={port}"))
            .args(["--log.level=error", "--web.enable-lifecycle"])
            .stdin(Stdio::null())
            .spawn()
            .expect("Debian's package `prometheus` has it");
        Prometheus { child, address: port.to_string() }
    }

    /// An answer of its API; none while it does not answer.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: prometheus\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            chunks(body)
        } else {
            body.to_owned()
        };
        serde_json::from_str(&body).ok()
    }

    /// How many series an expression has.
    fn series(&self, expression: &str) -> usize {
        let answer = self.get(&format!("/api/v1/query?query={}", encoded(expression)));
        let answer = answer.unwrap_or_default();
        if answer.is_null() {
            return 0;
        }
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().map_or(0, Vec::len)
    }

    fn until(&self, expression: &str) {
        while self.series(expression) == 0 {
            // sleep: Prometheus tells nobody that it has scraped.
            std::thread::sleep(LOOK);
        }
    }
}

fn chunks(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        if size == 0 || rest.len() < size {
            break;
        }
        whole += &rest[..size];
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

fn encoded(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// The expressions of the dashboard by the titles of their panels, as Grafana asks them with all jobs chosen.
fn dashboard() -> Vec<(String, String)> {
    let text = fs::read(file("deploy/helm/aviflow/files/monitoring/dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_slice(&text).expect("JSON");
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().expect("an expression");
            let filled = ["$queue", "$namespace", "$job"].iter().fold(expression.to_owned(), |e, v| e.replace(v, ".*"));
            let filled = filled.replace("$__rate_interval", "1m");
            assert!(!filled.contains('$'), "{filled}: a variable that is not filled in");
            found.push((panel["title"].as_str().expect("a title").to_owned(), filled));
        }
    }
    found
}

fn promtool(args: &[&str], path: &str) {
    let output = Command::new("promtool").args(args).arg(file(path)).output();
    let output = output.expect("Debian's package `prometheus` has promtool");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
#[ignore = "needs Prometheus: `cargo xtask test monitoring`"]
fn the_rules_hold_and_fire_when_they_should() {
    promtool(&["check", "rules", "--lint-fatal"], "deploy/helm/aviflow/files/monitoring/rules.yaml");
    promtool(&["test", "rules"], "crates/aviflow/tests/monitoring/rules.test.yaml");
}

#[test]
#[ignore = "needs Prometheus: `cargo xtask test monitoring`"]
fn prometheus_finds_all_that_the_dashboard_and_the_rules_ask() {
    let exporter = Exporter::start();
    let world = World::new();
    let mut start = world.command(&["server", "start", "--nodes", "2", "--gpus-per-node", "4"]);
    start.env("AVIFLOW_GPU_METRICS_URL", &exporter.url).env("AVIFLOW_GPU_METRICS_EVERY", "1");
    assert!(start.status().expect("the binary runs").success());
    let queue = "kind: Queue\nname: nlp\nquotas:\n  virtual: {guarantee: 4, limit: 8}\n";
    let queue = world.document("queue", queue);
    world.ok(&["apply", &queue]);
    let gate = world.gate("gate");
    let run = |name: &str, script: &str| {
        let lines: String = script.lines().map(|line| format!("  {line}\n")).collect();
        world.document(name, &format!("name: {name}\nqueue: nlp\nnodes: 1\ngpusPerNode: 4\ncheckpoint: {{path: /checkpoints}}\nrun: |\n{lines}"))
    };
    // One that ends, one that fails and starts again, and one that trains.
    let done = run("done", "true");
    world.ok(&["run", &done]);
    let train = "cd $AVIFLOW_CHECKPOINT_DIR; mkdir part; echo 1 > part/weights; mv part step-4
for step in 1 2 3 4; do echo \"step $step/100 loss 2.5 tps 1200 mfu 0.41\"; sleep 0.3; done; cat GATE";
    let train = run("train", &train.replace("GATE", &gate.path().display().to_string()));
    let mut follow = world.follow(&["run", &train]);
    follow.until("loss");
    let prometheus = Prometheus::start(&world);
    prometheus.until("aviflow_job_step_seconds and aviflow_job_gpu_tensor_active_ratio");
    exporter.xid.store(79, Ordering::SeqCst);
    // Rates need two scrapes, and the recorded rules an evaluation.
    prometheus.until("increase(aviflow_gpu_xid_errors_total{xid=\"79\"}[1m])");
    prometheus.until("rate(aviflow_commits_total[1m]) and on (instance) aviflow_build_info");
    prometheus.until("aviflow:gpus_held:ratio");
    prometheus.until("aviflow_job_checkpoint_timestamp_seconds");
    let asked = dashboard();
    assert!(asked.len() > 40, "{asked:?}");
    let empty: BTreeSet<&str> =
        asked.iter().filter(|(_, e)| prometheus.series(e) == 0).map(|(title, _)| title.as_str()).collect();
    // There is no apiserver here.
    assert_eq!(empty, BTreeSet::from(["Requests to the apiserver"]));
    names_of_rules_exist(&prometheus);
    let rules = prometheus.get("/api/v1/rules").expect("an answer");
    let groups = rules["data"]["groups"].as_array().expect("groups");
    for rule in groups.iter().flat_map(|group| group["rules"].as_array().expect("rules")) {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    let target = prometheus.get("/api/v1/targets").expect("an answer");
    assert_eq!(target["data"]["activeTargets"][0]["lastError"], "", "{target}");
    // `top` shows the same.
    let top = world.json(&["top", "--once"]);
    let job = &top["jobs"][0];
    assert_eq!((&job["name"], &job["step"], &job["load"]["gpus"]), (&"train".into(), &4.into(), &4.into()), "{top}");
    let ranks = world.json(&["top", "train", "--once"]);
    assert_eq!(ranks["ranks"][0]["line"], "step 4/100 loss 2.5 tps 1200 mfu 0.41", "{ranks}");
    gate.open();
}

/// Every metric that a rule names is there: an alert that does not fire has no series, and so would one that cannot.
fn names_of_rules_exist(prometheus: &Prometheus) {
    let text = fs::read_to_string(file("deploy/helm/aviflow/files/monitoring/rules.yaml")).expect("the rules");
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c: char| !plain(c)).filter(|word| word.starts_with("aviflow_"));
    let names: BTreeMap<&str, usize> = words.map(|name| (name, prometheus.series(name))).collect();
    assert!(names.len() > 15, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|(_, n)| **n == 0).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
