//! The workload as TrainingJob objects, against the program that is shipped.
//!
//! Aviflow runs with its store, its ledger and its verdicts, with the rights of its own account, on an apiserver with
//! the definitions and the admission policies of `deploy/`. One thing is pretended, the workers: see
//! `aviflow_kube::pretend`. A unit is a GPU.

use crate::apiserver;
use crate::measured::{self, Measured};
use crate::report::Side;
use crate::workload::{Class, Scenario};
use anyhow::{Context as _, Result, bail, ensure};
use aviflow_testcluster::{Cluster, until};
use futures_util::StreamExt as _;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, PostParams, WatchParams};
use kube::core::{NotUsed, Object, WatchEvent};
use kube::{Client, config};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The label of a node's leaf.
const LEAF: &str = "bench.test/leaf";

/// How long the whole may take.
const LONGEST: Duration = Duration::from_secs(1200);

/// How long anything else may take.
const PATIENCE: Duration = Duration::from_secs(90);

/// A control plane of a cluster, as a process of this machine.
pub struct Plane {
    pub process: Measured,
    home: PathBuf,
    program: PathBuf,
}

impl Plane {
    /// Starts one with the rights of Aviflow's own account, and waits until it answers.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(cluster: &Cluster, program: &Path, folder: &Path, extra: &[&str]) -> Result<Plane> {
        let home = folder.join("home");
        std::fs::create_dir_all(&home)?;
        let token = cluster.kubectl_ok(&["create", "token", "aviflow", "-n", "aviflow-system", "--duration=24h"])?;
        let kubeconfig = folder.join("aviflow.kubeconfig");
        std::fs::write(&kubeconfig, cluster.kubeconfig_with("bench", "aviflow", token.trim()))?;
        let address = cluster.host_ip();
        let mut serve = measured::program(program);
        serve.env("AVIFLOW_HOME", &home).env("KUBECONFIG", &kubeconfig);
        serve.args(["serve", "--kube", "--advertise", &address]);
        serve.args(["--agents", &format!("{address}:0"), "--depot", &format!("{address}:0")]).args(extra);
        let mut process = Measured::start("aviflow", &mut serve, &folder.join("aviflow.log"))?;
        let ready = home.join("server.json");
        until("the control plane answers", PATIENCE, || {
            process.check()?;
            Ok(ready.exists().then_some(()))
        })?;
        Ok(Plane { process, home, program: program.to_owned() })
    }

    /// What a command of Aviflow's says as JSON.
    ///
    /// # Errors
    /// If it fails; the error quotes what it said.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let mut command = Command::new(&self.program);
        let out = command.env("AVIFLOW_HOME", &self.home).args(args).args(["-o", "json"]).output()?;
        ensure!(out.status.success(), "aviflow {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim());
        Ok(serde_json::from_slice(&out.stdout)?)
    }
}

/// What objects of a kind of Aviflow's are called.
pub fn resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("aviflow.dev", "v1alpha1", kind), plural)
}

/// A client with an administrator's rights.
///
/// # Errors
/// If its kubeconfig cannot be read.
pub async fn client(cluster: &Cluster) -> Result<Client> {
    let file = config::Kubeconfig::read_from(cluster.kubeconfig())?;
    let config = kube::Config::from_custom_kubeconfig(file, &config::KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Applies what an administrator would, but for the Deployment, and waits until the apiserver takes jobs.
///
/// # Errors
/// If the apiserver refuses it.
pub fn install(cluster: &Cluster) -> Result<()> {
    let manifest = include_str!("../../../deploy/aviflow.yaml");
    let ours = |document: &&str| !document.contains("\nkind: Deployment\n");
    let documents: Vec<&str> = manifest.split("\n---\n").filter(ours).collect();
    cluster.kubectl_with(&["apply", "--server-side", "-f", "-"], &documents.join("\n---\n"))?;
    cluster.kubectl_ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
    let try_out = job("try-out", "default", &crate::workload::BASELINE.classes[0], false).to_string();
    until("the admission policies know the kind", PATIENCE, || {
        let taken = cluster.kubectl_with(&["create", "--dry-run=server", "-o", "json", "-f", "-"], &try_out);
        // Before they do, nothing is stamped.
        Ok(taken.ok().filter(|object| object.contains("aviflow.dev/submitter")).map(|_| ()))
    })
}

/// A node without a kubelet.
fn node(cluster: &Cluster, name: &str, leaf: usize, gpus: u32) -> Result<()> {
    let labels = json!({"nvidia.com/gpu.product": "H100", LEAF: format!("leaf-{leaf}")});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    cluster.apply(&node.to_string())?;
    let gpus = json!({"nvidia.com/gpu": gpus.to_string(), "pods": "110"});
    let ready = json!([{"type": "Ready", "status": "True", "reason": "Bench", "message": ""}]);
    let status = json!({"status": {"capacity": gpus, "allocatable": gpus, "conditions": ready}}).to_string();
    cluster.kubectl_ok(&["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status])?;
    // Admission taints every node until something says that it is ready.
    cluster.kubectl_ok(&["patch", "node", name, "--type=merge", "-p", r#"{"spec":{"taints":null}}"#])?;
    Ok(())
}

/// The documents of an administrator: queues, and a pool.
fn documents(scenario: &Scenario) -> Vec<Value> {
    let object = |kind: &str, name: &str, spec: Value| json!({"apiVersion": "aviflow.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    let mut all = Vec::new();
    for cohort in 0..scenario.cohorts {
        let whole = scenario.guarantee * scenario.queues as u32;
        let quotas = json!({"H100": {"guarantee": whole, "limit": whole}});
        all.push(object("Queue", &format!("cohort-{cohort}"), json!({"quotas": quotas})));
    }
    for (queue, parent) in scenario.names() {
        let quotas = json!({"H100": {"guarantee": scenario.guarantee, "limit": scenario.limit}});
        all.push(object("Queue", &queue, json!({"parent": parent, "quotas": quotas})));
    }
    // Nobody else uses the nodes, and Kueue keeps nothing from others either.
    let spec = match scenario.topology {
        true => json!({"topology": {"levels": ["leaf"]}, "kubernetes": {"topologyKeys": [LEAF], "shared": false}}),
        false => json!({"kubernetes": {"shared": false}}),
    };
    all.push(object("Pool", "hgx", spec));
    all
}

fn job(name: &str, queue: &str, class: &Class, topology: bool) -> Value {
    let mut spec = json!({
        "queue": queue,
        "priority": class.priority,
        "image": format!("bench.test/nothing@sha256:{}", "0".repeat(64)),
        "nodes": {"min": class.nodes, "max": class.nodes},
        "gpusPerNode": class.units,
        "run": ["sleep", class.time.as_secs_f64().to_string()],
    });
    if topology {
        spec["topology"] = json!({"require": "leaf"});
    }
    json!({"apiVersion": "aviflow.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec})
}

/// What a run is.
pub struct Options<'a> {
    /// The program.
    pub program: &'a Path,
    /// Where it writes.
    pub folder: &'a Path,
    /// The most requests of Aviflow's a second, where they are limited.
    pub requests_per_second: Option<u32>,
}

/// Runs the workload.
///
/// # Errors
/// If a part does not start, or a job does not succeed.
pub fn run(cluster: &Cluster, scenario: &Scenario, options: &Options<'_>) -> Result<Side> {
    install(cluster)?;
    let nodes: Vec<(String, usize)> = (0..scenario.leaves)
        .flat_map(|leaf| (0..scenario.nodes).map(move |n| (format!("node-{leaf}-{n}"), leaf)))
        .collect();
    for (name, leaf) in &nodes {
        node(cluster, name, *leaf, scenario.node_units)?;
    }
    for (queue, _) in scenario.names() {
        cluster.kubectl_ok(&["create", "namespace", &queue])?;
    }
    let list = json!({"apiVersion": "v1", "kind": "List", "items": documents(scenario)});
    cluster.apply(&list.to_string())?;
    let limit = options.requests_per_second.map(|n| n.to_string());
    let mut extra = vec!["--pretend-workers"];
    if let Some(limit) = &limit {
        extra.extend(["--requests-per-second", limit]);
    }
    let mut plane = Plane::start(cluster, options.program, options.folder, &extra)?;
    until("all queues and nodes are known", PATIENCE, || {
        let queues = plane.json(&["queue", "ls"])?.to_string();
        let known = plane.json(&["node", "ls"])?.to_string();
        let there = scenario.names().all(|(queue, _)| queues.contains(&format!("\"{queue}\"")));
        Ok((there && nodes.iter().all(|(node, _)| known.contains(&format!("\"{node}\"")))).then_some(()))
    })?;
    let before = plane.process.used()?;
    let requests = apiserver::requests(cluster)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ran = runtime.block_on(submit_and_watch(cluster, scenario, &mut plane))?;
    let after = plane.process.used()?;
    let made = scenario.jobs() as u64;
    let requests = apiserver::requests(cluster)?.since(&requests).all().saturating_sub(made);
    let jobs = plane.json(&["ls", "--all"])?;
    let jobs = jobs.as_array().or_else(|| jobs["jobs"].as_array()).context("`aviflow ls` lists no jobs")?;
    let mut waits: BTreeMap<&'static str, (f64, usize)> = BTreeMap::new();
    let (mut last, mut interrupted) = (0, 0);
    for job in jobs {
        let text = |field: &str| job[field].as_str().unwrap_or_default();
        let number = |field: &str| job[field].as_i64().with_context(|| format!("a job without `{field}`: {job}"));
        ensure!(text("phase") == "Succeeded", "{} is {}: {job}", text("name"), text("phase"));
        let key = (text("namespace").to_owned(), text("name").to_owned());
        let created = ran.created.get(&key).with_context(|| format!("nobody made {key:?}"))?;
        let class = scenario.classes.iter().find(|c| text("name").starts_with(c.name)).context("a job of no class")?;
        let (waited, of) = waits.entry(class.name).or_default();
        *waited += (number("ended")? - created - number("ran")?) as f64 / 1000.0;
        *of += 1;
        last = last.max(number("ended")?);
        interrupted += usize::from(number("attempts")? > 1);
    }
    ensure!(jobs.len() == scenario.jobs(), "{} jobs are kept of {}", jobs.len(), scenario.jobs());
    let first = ran.created.values().min().copied().unwrap_or_default();
    Ok(Side {
        wall: ran.wall,
        decided: Some(Duration::from_millis(u64::try_from(last - first)?)),
        waits: waits.into_iter().map(|(class, (sum, n))| (class, sum / n as f64)).collect(),
        cpu: after.cpu - before.cpu,
        memory: after.memory,
        requests,
        interrupted,
    })
}

/// Of an object what is looked at: this program runs beside what it measures.
type Seen = Object<NotUsed, Status>;

#[derive(Clone, Debug, Default, Deserialize)]
struct Status {
    phase: Option<String>,
}

/// What was seen from outside.
struct Ran {
    /// When each object was made, in milliseconds since 1970.
    created: BTreeMap<(String, String), i64>,
    /// From the first object to the last that says that its job has succeeded.
    wall: Duration,
}

async fn submit_and_watch(cluster: &Cluster, scenario: &Scenario, plane: &mut Plane) -> Result<Ran> {
    let client = client(cluster).await?;
    let begun = Instant::now();
    let (sender, mut made) = tokio::sync::mpsc::unbounded_channel();
    let mut series = Vec::new();
    for (queue, _) in scenario.names() {
        for class in scenario.classes {
            let (client, sender, queue) = (client.clone(), sender.clone(), queue.clone());
            series.push(tokio::spawn(submit(client, queue, *class, scenario.topology, sender)));
        }
    }
    drop(sender);
    let all: Api<Seen> = Api::all_with(client, &resource("TrainingJob", "trainingjobs"));
    let mut version = "0".to_owned();
    let mut events = all.watch(&WatchParams::default().timeout(290), &version).await?.boxed();
    let (mut created, mut over) = (BTreeMap::new(), BTreeSet::new());
    let mut said = Instant::now();
    while over.len() < scenario.jobs() {
        if begun.elapsed() > LONGEST {
            bail!("{} of {} jobs have ended after {} s", over.len(), scenario.jobs(), LONGEST.as_secs());
        }
        if said.elapsed() > Duration::from_secs(10) {
            said = Instant::now();
            plane.process.check()?;
            println!("  {:.0} s: {} made, {} ended", begun.elapsed().as_secs_f64(), created.len(), over.len());
        }
        tokio::select! {
            Some((key, at)) = made.recv() => {
                created.insert(key, at);
            }
            event = events.next() => match event {
                Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                    version = object.metadata.resource_version.clone().unwrap_or_default();
                    let phase = object.status.unwrap_or_default().phase.unwrap_or_default();
                    match phase.as_str() {
                        "Succeeded" => {
                            over.insert((object.metadata.namespace, object.metadata.name));
                        }
                        "Failed" | "Cancelled" => bail!("{:?} is {phase}", object.metadata.name),
                        _ => {}
                    }
                }
                Some(Ok(WatchEvent::Deleted(object))) => bail!("an object was deleted: {:?}", object.metadata.name),
                Some(Ok(WatchEvent::Bookmark(_))) => {}
                Some(Ok(WatchEvent::Error(error))) => bail!("the watch: {error:?}"),
                Some(Err(error)) => return Err(error.into()),
                // The apiserver ends each after its time.
                None => events = all.watch(&WatchParams::default().timeout(290), &version).await?.boxed(),
            },
            // Looks at the time and at the control plane also when nothing happens.
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
    let wall = begun.elapsed();
    for task in series {
        task.await??;
    }
    while let Some((key, at)) = made.recv().await {
        created.insert(key, at);
    }
    Ok(Ran { created, wall })
}

type Made = tokio::sync::mpsc::UnboundedSender<((String, String), i64)>;

/// Makes the jobs of a series, as Kueue's generator does: a pause, an object, and again.
async fn submit(client: Client, queue: String, class: Class, topology: bool, made: Made) -> Result<()> {
    let api: Api<DynamicObject> = Api::namespaced_with(client, &queue, &resource("TrainingJob", "trainingjobs"));
    for n in 0..class.count {
        tokio::time::sleep(class.every).await;
        let name = format!("{}-{n}", class.name);
        let object: DynamicObject = serde_json::from_value(job(&name, &queue, &class, topology))?;
        let at = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        api.create(&PostParams::default(), &object).await.with_context(|| format!("{queue}/{name}"))?;
        let _ = made.send(((queue.clone(), name), i64::try_from(at)?));
    }
    Ok(())
}
