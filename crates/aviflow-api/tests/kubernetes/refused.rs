//! What the API server says about objects that cannot be: where, what it found, and what to write.

use crate::cluster::Cluster;
use aviflow_api::file::{Defaults, parse_job};
use aviflow_api::yaml::to_yaml;
use serde_json::{Value as Json, json};
use std::fmt::Write as _;

/// A smallest object of a kind, with other fields put over its spec.
pub fn object(kind: &str, name: &str, spec: &Json) -> String {
    let mut fields = if kind == "TrainingJob" { json!({"run": ["python", "train.py"]}) } else { json!({}) };
    for (key, value) in spec.as_object().unwrap() {
        fields[key] = value.clone();
    }
    to_yaml(&json!({"apiVersion": "aviflow.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": fields}))
}

/// What is said, without what is the same in every message.
fn told(cluster: &Cluster, object: &str) -> String {
    let said = cluster.kubectl("admin", "create --dry-run=server -f -", object);
    if said.ok {
        return format!("taken{}", if said.err.is_empty() { "" } else { &said.err });
    }
    let said = said.err.trim().replace("Error from server (Invalid): error when creating \"STDIN\": ", "");
    // Several are told in any order.
    let mut lines: Vec<&str> = said.lines().collect();
    let first = lines.iter().position(|line| line.starts_with("* ")).unwrap_or(lines.len());
    lines[first..].sort_by_key(|line| (line.contains("<nil>"), *line));
    lines.join("\n")
}

fn table(cluster: &Cluster, name: &str, kind: &str, cases: &[(&str, Json)]) {
    let mut shown = String::new();
    for (object_name, spec) in cases {
        let said = told(cluster, &object(kind, object_name, spec));
        writeln!(shown, "{object_name}: {spec}\n  {}\n", said.replace('\n', "\n  ")).unwrap();
    }
    crate::shown::snapshot(name, &shown);
}

const SHA: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Jobs, each with one thing wrong, and a few that are right.
pub fn jobs(cluster: &Cluster) {
    let long = "a".repeat(41);
    let image = format!("registry.example/train@sha256:{SHA}");
    let cases: Vec<(&str, Json)> = vec![
        ("good", json!({})),
        (
            "good",
            json!({
                "queue": "nlp", "priority": "high", "environment": "torch-2.9@3", "code": {"git": "https://git.example/a", "ref": "main"},
                "nodes": {"min": 4, "max": 4}, "gpusPerNode": 8, "gpuType": ["H100", "H200"], "env": {"A": "1"}, "secrets": {"HF_TOKEN": "hf-token/token"},
                "data": [{"name": "corpus", "source": "s3://b/c", "mount": "/data"}], "outputs": ["/out"],
                "checkpoint": {"path": "/checkpoints", "every": "15m", "keep": 3}, "resources": {"cpuPerGpu": 12, "memoryPerGpu": "200Gi", "shm": "64Gi"},
                "topology": {"require": "spine", "prefer": "leaf", "maxWait": "20m"}, "timeLimit": "1-00:00:00", "retry": {"failures": 3},
                "after": [{"job": "tokenize"}], "seed": 42, "notify": [{"webhook": "https://chat.example/h", "on": ["failed"]}],
            }),
        ),
        (&long, json!({})),
        ("a.b", json!({})),
        ("nodes", json!({"nodes": {"min": 8, "max": 2}})),
        ("nodes", json!({"nodes": {"min": 2}})),
        ("nodes", json!({"nodes": {"min": 0, "max": 1}})),
        ("nodes", json!({"nodes": 4})),
        ("gpus", json!({"gpusPerNode": 100})),
        ("type", json!({"gpuType": ["H100", "H100"]})),
        ("type", json!({"gpuType": ["H 100"]})),
        ("run", json!({"run": []})),
        ("run", json!({"run": "python train.py"})),
        ("key", json!({"gpus": 8})),
        ("queue", json!({"queue": "research/nlp"})),
        ("environment", json!({"environment": "Torch"})),
        ("environment", json!({"environment": "torch@1", "image": image})),
        ("good", json!({"image": "registry.example:5000/team/train:v1.2"})),
        ("image", json!({"image": "https://registry.example/train:latest"})),
        ("image", json!({"image": "registry.example/train:a b"})),
        ("image", json!({"image": "registry.example/train@sha256:abc"})),
        ("requirements", json!({"requirements": "extra.lock"})),
        ("requirements", json!({"environment": "torch", "requirements": "extra.lock"})),
        ("code", json!({"code": "."})),
        ("code", json!({"code": {"git": "https://git.example/a"}})),
        ("processes", json!({"processes": "perGPU"})),
        ("processes", json!({"processes": "perGpu", "run": ["torchrun", "train.py"], "gpusPerNode": 8})),
        (
            "processes",
            json!({"processes": "perGpu", "run": ["python", "-m", "torch.distributed.run", "train.py"], "gpusPerNode": 8}),
        ),
        ("env", json!({"env": {"MASTER_ADDR": "10.0.0.1"}})),
        ("env", json!({"env": {"PET_NNODES": "2"}})),
        ("env", json!({"env": {"1A": "2"}})),
        ("env", json!({"env": {"A": 1}})),
        ("env", json!({"env": {"A": "1"}, "secrets": {"A": "a/b"}})),
        ("secrets", json!({"secrets": {"HF_TOKEN": "no-reference"}})),
        ("secrets", json!({"secrets": {"RANK": "a/b"}})),
        ("data", json!({"data": [{"name": "a", "source": "/a"}, {"name": "a", "source": "/b"}]})),
        ("data", json!({"data": [{"name": "a", "source": " "}]})),
        ("outputs", json!({"outputs": ["out"]})),
        ("outputs", json!({"outputs": ["/a/../b"]})),
        ("outputs", json!({"outputs": ["/proc/1"]})),
        ("outputs", json!({"outputs": ["/a"], "checkpoint": {"path": "/a/b/"}})),
        ("outputs", json!({"outputs": ["/a", "/ab"], "checkpoint": {"path": "/b"}})),
        ("checkpoint", json!({"checkpoint": {"path": "c", "every": "15"}})),
        ("resources", json!({"resources": {"memoryPerGpu": "200GB"}})),
        ("resources", json!({"resources": {"memoryPerGpu": 200}})),
        ("resources", json!({"resources": {"memoryPerGpu": "1Gi", "shm": "8Gi"}, "gpusPerNode": 8})),
        ("resources", json!({"resources": {"memoryPerGpu": "2Gi", "shm": "8Gi"}, "gpusPerNode": 8})),
        ("resources", json!({"resources": {"cpuPerGpu": 0}})),
        ("topology", json!({"topology": {"maxWait": "5m"}})),
        ("topology", json!({"topology": {"require": "node"}, "nodes": {"min": 2, "max": 2}})),
        ("limit", json!({"timeLimit": 3600})),
        ("limit", json!({"timeLimit": "60"})),
        ("limit", json!({"timeLimit": "1.5h"})),
        ("limit", json!({"timeLimit": "0s"})),
        ("after", json!({"after": [{"job": "after"}]})),
        ("after", json!({"after": [{"job": "a", "on": "success"}]})),
        ("notify", json!({"notify": [{"webhook": "chat.example", "on": ["failed"]}]})),
    ];
    table(cluster, "jobs", "TrainingJob", &cases);
    // What is refused of a file is refused of an object.
    for (name, spec) in &cases {
        let mut fields = json!({"run": ["python", "train.py"]});
        fields.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        fields["name"] = json!(name);
        let refused = parse_job("job", fields.to_string().as_bytes(), &Defaults::default()).is_err();
        let taken = told(cluster, &object("TrainingJob", name, spec)) == "taken";
        assert!(!(refused && taken), "{name}: {spec}");
    }
}

/// Queues, pools and environments.
pub fn administrators(cluster: &Cluster) {
    let queues: Vec<(&str, Json)> = vec![
        ("good", json!({})),
        (
            "good",
            json!({"parent": "research", "team": "nlp", "quotas": {"H100": {"guarantee": 16, "limit": 64, "weight": 2}}, "defaults": {"timeLimit": "24h"}}),
        ),
        ("limit", json!({"quotas": {"H100": {"guarantee": 16, "limit": 8}}})),
        ("parent", json!({"parent": "parent"})),
        ("a.b", json!({})),
        ("state", json!({"state": "closed"})),
        ("defaults", json!({"defaults": {"timeLimit": 24}})),
        ("submitters", json!({"submitters": ["ann", "ben x"]})),
    ];
    table(cluster, "queues", "Queue", &queues);
    let kubernetes = |part: Json| json!({"kubernetes": part});
    let keys = json!({"topologyKeys": ["example.com/leaf", "example.com/spine"]});
    let pools: Vec<(&str, Json)> = vec![
        ("good", json!({})),
        (
            "good",
            json!({
                "topology": {"levels": ["leaf", "spine"]},
                "kubernetes": {
                    "nodeSelector": {"example.com/pool": "hgx"},
                    "gpuTypes": {"H100": ["NVIDIA-H100-80GB-HBM3"], "H200": ["NVIDIA-H200"]},
                    "topologyKeys": ["example.com/leaf", "example.com/spine"],
                    "fabric": {"rdmaResources": {"rdma/ib": 8}, "env": {"NCCL_IB_HCA": "mlx5"}, "capabilities": ["IPC_LOCK"]},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "hostPaths": ["/mnt/datasets"], "storage": {"claim": "jobs"}, "memoryPerGpu": "200Gi",
                },
            }),
        ),
        ("good", json!({"topology": {"levels": ["leaf"], "domains": {"leaf-1": ["node-[1-8]"]}}})),
        ("levels", json!({"topology": {"levels": ["leaf"]}, "kubernetes": keys})),
        ("levels", kubernetes(keys.clone())),
        ("levels", json!({"topology": {"levels": ["node"], "domains": {"a": ["b"]}}})),
        ("domains", json!({"topology": {"levels": ["leaf"]}})),
        (
            "domains",
            json!({"topology": {"levels": ["leaf"], "domains": {"a": ["b"]}}, "kubernetes": {"topologyKeys": ["a"]}}),
        ),
        ("types", kubernetes(json!({"gpuTypes": {"H100": ["A"], "H200": ["B", "A"]}}))),
        ("storage", kubernetes(json!({"storage": {}}))),
        ("storage", kubernetes(json!({"storage": {"claim": "a", "hostPath": "/b"}}))),
        ("tolerations", kubernetes(json!({"tolerations": [{"operator": "Exists", "value": "a"}, {"value": "a"}]}))),
        ("fabric", kubernetes(json!({"fabric": {"env": {"RANK": "0"}}}))),
        ("fabric", kubernetes(json!({"fabric": {"rdmaResources": {"rdma/ib": 0}, "capabilities": ["ipc"]}}))),
        ("paths", kubernetes(json!({"hostPaths": ["mnt"]}))),
        ("labels", kubernetes(json!({"nodeSelector": {"a b": "c"}}))),
    ];
    table(cluster, "pools", "Pool", &pools);
    let image = format!("registry.example/torch@sha256:{SHA}");
    let environment = |name: &str, version: u32| json!({"name": name, "version": version, "image": image});
    let environments: Vec<(&str, Json)> = vec![
        ("torch-2.9-3", environment("torch-2.9", 3)),
        ("torch", environment("torch-2.9", 3)),
        ("a-0", environment("a", 0)),
        ("a-1", json!({"name": "a", "version": 1})),
        ("a-1", json!({"name": "a", "version": 1, "image": "torch:latest"})),
        ("a-2", json!({"name": "a", "version": 2, "image": image, "deprecated": "use b"})),
    ];
    table(cluster, "environments", "Environment", &environments);
}

/// A submitted job stays as it is, an environment too; what is beside the spec may change.
pub fn changes(cluster: &Cluster) {
    cluster.must("admin", "create -f -", &object("TrainingJob", "kept", &json!({"queue": "nlp"})));
    let image = |digit: &str| format!("a@sha256:{}", digit.repeat(64));
    let environment = |spec: Json| object("Environment", "a-1", &spec);
    cluster.must("admin", "create -f -", &environment(json!({"name": "a", "version": 1, "image": image("0")})));
    let mut shown = String::new();
    for (what, arguments) in [
        ("priority", r#"patch tj kept --type=merge -p {"spec":{"priority":"high"}}"#),
        ("seed", r#"patch tj kept --type=merge -p {"spec":{"seed":1}}"#),
        ("label", "label tj kept team=nlp"),
        ("annotation", "annotate tj kept note=fine"),
        ("image", &format!(r#"patch avenv a-1 --type=merge -p {{"spec":{{"image":"{}"}}}}"#, image("1"))),
        ("variables", r#"patch avenv a-1 --type=merge -p {"spec":{"env":{"A":"1"}}}"#),
        ("description", r#"patch avenv a-1 --type=merge -p {"spec":{"description":"better"}}"#),
        ("phase", r#"patch tj kept --subresource=status --type=merge -p {"status":{"phase":"Runing"}}"#),
    ] {
        let said = cluster.kubectl("admin", arguments, "");
        writeln!(shown, "{what}\n  {}{}", said.out, said.err).unwrap();
    }
    crate::shown::snapshot("changes", &shown);
    let spec = &cluster.get("tj kept")["spec"];
    let filled = json!({
        "queue": "nlp", "run": ["python", "train.py"], "priority": "normal", "nodes": {"min": 1, "max": 1}, "gpusPerNode": 1,
        "processes": "perNode", "preemptible": true, "retry": {"failures": 0},
    });
    assert_eq!(*spec, filled, "every default is filled in");
}
