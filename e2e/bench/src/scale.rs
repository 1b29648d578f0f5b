//! Scale with simulated nodes: a thousand of kwok's, a gang of 512, and two thousand jobs that wait.
//!
//! etcd, the apiserver and kube-scheduler are real, and so is Aviflow, with pods; kwok stands for the kubelets, and
//! says that each pod runs. No agent speaks, so a gang stays `Starting`: what is measured ends where kubelets begin.

use crate::apiserver;
use crate::aviflow::{Plane, client, install, resource};
use crate::measured::{self, Measured};
use crate::module;
use anyhow::{Context as _, Result, bail, ensure};
use aviflow_testcluster::binaries::Binary;
use aviflow_testcluster::{Cluster, Options, until, versions};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::Client;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams, WatchParams,
};
use kube::core::WatchEvent;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Simulated nodes, of 8 GPUs each.
const NODES: usize = 1000;
/// Nodes of the gang.
const GANG: usize = 512;
/// Jobs that wait.
const WAITING: usize = 2000;
/// kube-scheduler's limit of requests a second, and its burst. Its own defaults are 50 and 100.
const SCHEDULER_LIMIT: [u32; 2] = [1000, 2000];
/// How long anything may take.
const LONGEST: Duration = Duration::from_secs(300);

/// Measures, and prints a line for each figure.
///
/// # Errors
/// If a part does not start, or a figure cannot be measured.
pub fn run(program: &Path, folder: &Path) -> Result<()> {
    let cluster = Cluster::start(Options {
        nodes: Vec::new(),
        scheduler_args: vec![
            format!("--kube-api-qps={}", SCHEDULER_LIMIT[0]),
            format!("--kube-api-burst={}", SCHEDULER_LIMIT[1]),
        ],
        // Nodes say once that they are ready, and never again.
        node_grace: Duration::from_secs(24 * 3600),
        ..Options::default()
    })?;
    install(&cluster)?;
    let stages = folder.join("stages.yaml");
    std::fs::write(&stages, self::stages()?)?;
    let mut kwok = measured::program(Binary::Kwok.path()?);
    kwok.arg("--kubeconfig").arg(cluster.kubeconfig());
    kwok.args(["--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]);
    kwok.arg("--node-lease-duration-seconds=0").arg("--config").arg(&stages);
    let mut kwok = Measured::start("kwok", &mut kwok, &folder.join("kwok.log"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    println!("{NODES} simulated nodes of 8 GPUs");
    let client = runtime.block_on(client(&cluster))?;
    runtime.block_on(nodes(&client))?;
    // kwok says that a node is ready before the node controller has seen it, which then leaves its taint on some.
    runtime.block_on(untaint(&client))?;
    kwok.check()?;
    let mut plane = Plane::start(&cluster, program, folder, &[])?;
    until("all nodes are known", LONGEST, || {
        let nodes = plane.json(&["node", "ls"])?;
        let nodes = nodes.as_array().or_else(|| nodes["nodes"].as_array()).context("no nodes")?;
        let free = |node: &Value| {
            let gpus = node["gpus"].as_array().into_iter().flatten();
            node["condition"] == "Ready" && gpus.filter(|gpu| gpu["state"] == "free").count() == 8
        };
        Ok((nodes.iter().filter(|node| free(node)).count() == NODES).then_some(()))
    })?;
    let empty = plane.process.resident()?;
    println!(
        "client limits: kube-scheduler {} requests/s, burst {}; Aviflow none, at most 64 requests for pods at a time",
        SCHEDULER_LIMIT[0], SCHEDULER_LIMIT[1]
    );
    let before = plane.process.used()?;
    let bound = runtime.block_on(gang(&client))?;
    let after = plane.process.used()?;
    println!("gang of {GANG} nodes, submission to the last pod made: {:.1} s", bound.made.as_secs_f64());
    println!("gang of {GANG} nodes, submission to all pods bound: {:.1} s", bound.bound.as_secs_f64());
    println!("gang of {GANG} nodes, processor time: {:.2} s", (after.cpu - before.cpu).as_secs_f64());

    // What the gang's start still asks for is over when nothing more is asked.
    let quiet = settled(&cluster)?;
    let (cpu, begun) = (plane.process.used()?.cpu, Instant::now());
    runtime.block_on(waiting(&client))?;
    let submitted = begun.elapsed();
    let all = until("all jobs wait, and their objects say why", LONGEST, || {
        plane.process.check()?;
        Ok((runtime.block_on(said(&client))? == WAITING).then(|| begun.elapsed()))
    })?;
    let after = plane.process.used()?;
    let requests = settled(&cluster)?.since(&quiet).of_group("aviflow.dev").saturating_sub(WAITING as u64);
    // Of which this program's own lists are a few.
    println!("{WAITING} jobs that wait: submitted in {:.1} s", submitted.as_secs_f64());
    println!("{WAITING} jobs that wait: all objects say why after {:.1} s", all.as_secs_f64());
    println!("{WAITING} jobs that wait, requests a job: {:.2}", requests as f64 / WAITING as f64);
    println!("{WAITING} jobs that wait, cpu a job: {:.2} ms", (after.cpu - cpu).as_secs_f64() * 1e3 / WAITING as f64);
    let mb = |bytes: u64| bytes as f64 / 1e6;
    println!("resident memory: {:.0} MB with {NODES} nodes and no job", mb(empty));
    println!("resident memory: {:.0} MB with the gang and {WAITING} waiting jobs", mb(plane.process.resident()?));
    println!("resident memory, at most: {:.0} MB", mb(after.memory));
    Ok(())
}

/// What kwok does with nodes and pods, by files of its own: they are ready, and go when they are deleted.
fn stages() -> Result<String> {
    let module = module::folder("sigs.k8s.io/kwok", versions::KWOK)?.join("kustomize/stage");
    let files = ["node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml"];
    let texts = files.map(|file| std::fs::read_to_string(module.join(file)).with_context(|| file.to_owned()));
    Ok(texts.into_iter().collect::<Result<Vec<_>>>()?.join("\n---\n"))
}

/// Makes the nodes; kwok says that they are ready.
async fn nodes(client: &Client) -> Result<()> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &core("Node", "nodes"));
    let node = |n: usize| {
        let name = format!("kwok-{n:04}");
        let gpus = json!({"cpu": "192", "memory": "2Ti", "pods": "110", "nvidia.com/gpu": "8"});
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "nvidia.com/gpu.product": "H100"},
            },
            "status": {"capacity": gpus, "allocatable": gpus},
        });
        let api = api.clone();
        async move { api.create(&PostParams::default(), &serde_json::from_value(node)?).await.map_err(anyhow::Error::from) }
    };
    stream::iter((0..NODES).map(node)).buffer_unordered(16).try_collect::<Vec<_>>().await?;
    Ok(())
}

/// Takes the taint off that every node has until it is ready.
async fn untaint(client: &Client) -> Result<()> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &core("Node", "nodes"));
    let begun = Instant::now();
    loop {
        let nodes = api.list(&ListParams::default()).await?.items;
        let tainted = nodes.into_iter().filter(|node| !node.data["spec"]["taints"].is_null());
        let names: Vec<String> = tainted.filter_map(|node| node.metadata.name).collect();
        if names.is_empty() {
            return Ok(());
        }
        ensure!(begun.elapsed() < LONGEST, "{} nodes are still tainted", names.len());
        for name in names {
            let none = Patch::Merge(json!({"spec": {"taints": null}}));
            api.patch(&name, &PatchParams::default(), &none).await?;
        }
    }
}

fn core(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural)
}

fn job(name: &str, nodes: usize) -> Result<DynamicObject> {
    let job = json!({
        "apiVersion": "aviflow.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "queue": "default",
            "image": format!("bench.test/nothing@sha256:{}", "0".repeat(64)),
            "nodes": {"min": nodes, "max": nodes},
            "gpusPerNode": 8,
            "run": ["sleep", "3600"],
        },
    });
    Ok(serde_json::from_value(job)?)
}

fn jobs(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), "default", &resource("TrainingJob", "trainingjobs"))
}

struct Bound {
    made: Duration,
    bound: Duration,
}

/// Submits the gang and waits until kube-scheduler has bound all of its pods.
async fn gang(client: &Client) -> Result<Bound> {
    let pods: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &core("Pod", "pods"));
    let params = WatchParams::default().labels("app.kubernetes.io/managed-by=aviflow").timeout(290);
    let mut version = pods.list(&ListParams::default()).await?.metadata.resource_version.unwrap_or_default();
    let mut events = pods.watch(&params, &version).await?.boxed();
    let begun = Instant::now();
    jobs(client).create(&PostParams::default(), &job("gang", GANG)?).await?;
    let (mut there, mut bound, mut made) = (BTreeSet::new(), BTreeSet::new(), Duration::ZERO);
    while bound.len() < GANG {
        let event = tokio::time::timeout(LONGEST, events.next()).await;
        let event = event.with_context(|| format!("{} pods made and {} bound", there.len(), bound.len()))?;
        let Some(event) = event else {
            // The apiserver ends one that it thinks slow.
            events = pods.watch(&params, &version).await?.boxed();
            continue;
        };
        match event? {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                version = pod.metadata.resource_version.clone().unwrap_or(version);
                if there.insert(pod.metadata.name.clone()) {
                    made = begun.elapsed();
                }
                if pod.data["spec"]["nodeName"].is_string() {
                    bound.insert(pod.metadata.name);
                }
            }
            WatchEvent::Deleted(pod) => bail!("the pod {:?} was deleted", pod.metadata.name),
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(error) => bail!("the watch: {error:?}"),
        }
    }
    Ok(Bound { made, bound: begun.elapsed() })
}

/// Submits jobs for which there is no room.
async fn waiting(client: &Client) -> Result<()> {
    let api = jobs(client);
    let one = |n: usize| {
        let api = api.clone();
        async move {
            api.create(&PostParams::default(), &job(&format!("waits-{n}"), GANG)?).await.map_err(anyhow::Error::from)
        }
    };
    let made: Vec<_> = stream::iter((0..WAITING).map(one)).buffer_unordered(8).try_collect().await?;
    ensure!(made.len() == WAITING, "{} jobs were made", made.len());
    Ok(())
}

/// How many objects say why their jobs wait.
async fn said(client: &Client) -> Result<usize> {
    let list = jobs(client).list(&ListParams::default()).await?;
    let says = |object: &&DynamicObject| {
        let status: &Value = &object.data["status"];
        status["phase"] == "Queued" && status["reason"].is_string()
    };
    Ok(list.items.iter().filter(says).count())
}

/// The apiserver's count, once nothing more is asked of it about Aviflow's objects.
fn settled(cluster: &Cluster) -> Result<apiserver::Requests> {
    let mut last = apiserver::requests(cluster)?;
    until("nothing more is written", LONGEST, || {
        // sleep: what is looked for is that nothing happens for a while.
        std::thread::sleep(Duration::from_secs(2));
        let now = apiserver::requests(cluster)?;
        let more = now.since(&last).of_group("aviflow.dev");
        last = now;
        Ok((more == 0).then(|| last.clone()))
    })
}
