//! The pod of a worker.
//!
//! One container with agent and ranks, after one that lays out the agent, the code and the worker's spec in a
//! volume of the pod; so any image works, also without a shell. Nothing secret stands in the pod: secrets are
//! references, and what proves who the worker is comes from kubelet, bound to this pod and of no use to the
//! apiserver.

use crate::fate::{MAIN, PREPARE};
use crate::layer;
use crate::names;
use crate::profile::Profile;
use aviflow_agent::protocol::{Endpoint, WorkerSpec};
use aviflow_api::identity::tracking;
use aviflow_api::quantity::{Quantity, QuantityError};
use aviflow_api::spec::{JobSpec, Processes, Provenance};
use aviflow_core::time::Span;
use aviflow_engine::ports::JobRecord;
use aviflow_engine::telemetry::StreamKey;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Where the pod's own volume is mounted.
pub const HOME: &str = "/aviflow";
/// The worker's folder.
pub const FOLDER: &str = "/aviflow/worker";
/// The code.
pub const CODE: &str = "/aviflow/code";
/// The token that proves who the worker is.
pub const TOKEN: &str = "/var/run/aviflow/token";
/// The variable with the worker's spec, for the container that prepares.
pub const SPEC: &str = "AVIFLOW_WORKER";
/// The variable with document and provenance of the job, of which its hash is taken.
pub const DOCUMENT: &str = "AVIFLOW_DOCUMENT";
/// The variable with the address of the control plane's depot, where code comes from.
pub const DEPOT: &str = "AVIFLOW_DEPOT";

/// What holds for all pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Host and port where agents connect.
    pub agents: String,
    /// `https://` (`http://` without an authority), host and port where code and layers come from.
    pub depot: String,
    /// The certificate in PEM of the authority by which the control plane is known at both.
    pub authority: Option<String>,
    /// The image with this program.
    pub image: String,
    /// The priority class of pods whose pool names none.
    pub priority_class: String,
    /// Bytes of log that an agent keeps while the control plane is away.
    pub log_buffer: u64,
    /// Time after which the agents of a gang stop their ranks if they reach nobody, see [`mod@crate::fence`].
    pub fence_after: Span,
}

/// One worker's share of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which.
    pub key: StreamKey,
    /// Workers of the gang.
    pub workers: u32,
    /// Its node.
    pub node: String,
    /// Its GPUs there.
    pub slots: Vec<u32>,
    /// All GPUs of the node.
    pub node_gpus: u32,
    /// The grace of the job.
    pub grace: Span,
}

/// The pod of a worker. `owner` is the uid of the job's object.
///
/// # Errors
/// With what the job asks for and cannot have, and what to do.
pub fn pod(record: &JobRecord, share: &Share, profile: &Profile, site: &Site, owner: &Owner) -> Result<Pod, String> {
    let spec = &record.spec;
    let key = share.key;
    let image = image(record)?;
    let worker = worker_spec(record, share, profile, site)?;
    let (volumes, mounts) = volumes(record, profile)?;
    let gpus = share.slots.len();
    let fabric = &profile.kubernetes.fabric;
    let mut resources: Map<String, Value> = Map::new();
    resources.insert(profile.kubernetes.gpu_resource.clone(), json!(gpus.to_string()));
    if gpus as u32 == share.node_gpus {
        for (name, count) in &fabric.rdma_resources {
            resources.insert(name.clone(), json!(count.to_string()));
        }
    }
    let asked = spec.resources.clone().unwrap_or_default();
    let cpus = asked.cpu_per_gpu.or(profile.kubernetes.cpu_per_gpu.map(f64::from));
    let memory = asked.memory_per_gpu.as_ref().or(profile.kubernetes.memory_per_gpu.as_ref());
    let mut requests = resources.clone();
    if let Some(cpus) = cpus {
        requests.insert("cpu".into(), json!(format!("{}m", (cpus * gpus as f64 * 1000.0).ceil())));
    }
    if let Some(memory) = memory {
        let bytes: Quantity = memory.parse().map_err(|e: QuantityError| format!("resources.memoryPerGpu: {e}"))?;
        let memory = json!(bytes.0.saturating_mul(gpus as u64).to_string());
        requests.insert("memory".into(), memory.clone());
        resources.insert("memory".into(), memory);
    }
    let mut env = vec![
        json!({"name": "AVIFLOW_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}),
        json!({"name": "AVIFLOW_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}),
    ];
    let mut prepare_env = env.clone();
    let text = serde_json::to_string(&worker).map_err(|e| e.to_string())?;
    prepare_env.push(json!({"name": SPEC, "value": text}));
    prepare_env.push(json!({"name": DEPOT, "value": site.depot}));
    let text = serde_json::to_string(&Document { spec: spec.clone(), provenance: record.provenance.clone() });
    prepare_env.push(json!({"name": DOCUMENT, "value": text.map_err(|e| e.to_string())?}));
    for (variable, reference) in &spec.secrets {
        let (name, field) = reference
            .split_once('/')
            .ok_or_else(|| format!("secrets.{variable}: `{reference}` is no reference; write the Secret's name/key"))?;
        env.push(json!({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": field}}}));
    }
    // The kubelet's patience: the grace, what the agent takes to end what did not, and to ship its log.
    let patience = (share.grace.0 / 1000).max(1) + 30;
    let mut labels = names::labels(key, &record.key.name);
    if !spec.preemptible {
        labels.insert(names::PREEMPTIBLE.to_owned(), "false".to_owned());
    }
    let mut capabilities = json!({"drop": ["ALL"]});
    if !fabric.capabilities.is_empty() {
        capabilities["add"] = json!(fabric.capabilities);
    }
    let security = json!({"allowPrivilegeEscalation": false, "capabilities": capabilities});
    let mut pod = json!({
        "metadata": {
            "name": names::pod(&record.key.name, key.attempt, key.worker),
            "namespace": record.key.namespace,
            "labels": labels,
            "annotations": fabric.annotations,
            "ownerReferences": [{
                "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
                "kind": "TrainingJob",
                "name": owner.name,
                "uid": owner.uid,
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": names::JOB_ACCOUNT,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": patience,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                // kube-scheduler looks at this one node, and at all that it has to say.
                "nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [share.node]},
                ]}],
            }}},
            "tolerations": tolerations(profile),
            "imagePullSecrets": profile.kubernetes.image_pull_secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>(),
            "initContainers": [{
                "name": PREPARE,
                "image": site.image,
                "command": ["aviflow", "worker-prepare", HOME],
                "env": prepare_env,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": security,
                "volumeMounts": [
                    {"name": "aviflow", "mountPath": HOME},
                    {"name": "token", "mountPath": "/var/run/aviflow", "readOnly": true},
                ],
            }],
            "containers": [{
                "name": MAIN,
                "image": image,
                "command": [format!("{HOME}/bin/aviflow-agent"), FOLDER],
                "env": env,
                "resources": {"limits": resources, "requests": requests},
                "securityContext": security,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": mounts,
            }],
            "volumes": volumes,
        },
    });
    pod["spec"]["priorityClassName"] =
        json!(profile.kubernetes.priority_class.as_ref().unwrap_or(&site.priority_class));
    if let Some(class) = &profile.kubernetes.runtime_class {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    if fabric.host_network {
        pod["spec"]["hostNetwork"] = json!(true);
        pod["spec"]["dnsPolicy"] = json!("ClusterFirstWithHostNet");
    }
    serde_json::from_value(pod).map_err(|e| format!("its pod cannot be written: {e}; please report this"))
}

/// What a job was submitted as.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Document {
    /// The document.
    pub spec: JobSpec,
    /// What it was resolved to.
    pub provenance: Provenance,
}

/// The object that owns the pods of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What it was resolved to at submission. A job of an earlier version was not, and then has an image by its digest.
fn image(record: &JobRecord) -> Result<String, String> {
    let resolved = record.provenance.image.as_ref().map(|image| &image.pinned);
    resolved.or(record.spec.image.as_ref()).cloned().ok_or_else(|| {
        "the job was submitted without an image; submit it again, with an `image` or an `environment`".to_owned()
    })
}

/// The pool's tolerations; and those by which only Aviflow decides when a worker on a silent node is given up.
fn tolerations(profile: &Profile) -> Vec<Value> {
    let mut all: Vec<Value> = profile.kubernetes.tolerations.iter().map(|t| json!(t)).collect();
    all.push(json!({"key": names::KEEP_TAINT, "operator": "Exists"}));
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        all.push(json!({"key": key, "operator": "Exists", "effect": "NoExecute"}));
    }
    all
}

fn worker_spec(record: &JobRecord, share: &Share, profile: &Profile, site: &Site) -> Result<WorkerSpec, String> {
    let spec: &JobSpec = &record.spec;
    if spec.run.is_empty() {
        return Err("`run` is empty; give the program to run".to_owned());
    }
    let key = share.key;
    let per_gpu = spec.processes == Processes::PerGpu;
    let ranks = if per_gpu { spec.gpus_per_node.max(1) } else { 1 };
    let mut env = BTreeMap::from([("PYTHONUNBUFFERED".to_owned(), "1".to_owned())]);
    let tracked = tracking(spec, &record.key, record.id.0, record.submitted.0);
    env.extend(tracked.into_iter().map(|(name, value)| (name.to_owned(), value)));
    env.extend(profile.kubernetes.fabric.env.clone());
    let image = record.provenance.image.as_ref();
    env.extend(image.map(|i| i.env.clone()).unwrap_or_default());
    env.extend(spec.env.clone());
    if let Some(checkpoint) = &spec.checkpoint {
        env.insert("AVIFLOW_CHECKPOINT_DIR".to_owned(), checkpoint.path.clone());
    }
    for (n, output) in spec.outputs.iter().enumerate() {
        if n == 0 {
            env.insert("AVIFLOW_OUTPUT_DIR".to_owned(), output.clone());
        }
        env.insert(format!("AVIFLOW_OUTPUT_{n}"), output.clone());
    }
    for data in &spec.data {
        let name: String =
            data.name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect();
        env.insert(format!("AVIFLOW_DATA_{name}"), mount_of(data));
    }
    if let Some(seed) = spec.seed {
        env.insert("AVIFLOW_SEED".to_owned(), seed.to_string());
    }
    Ok(WorkerSpec {
        job_id: key.job.0,
        job: format!("{}/{}", record.key.namespace, record.key.name),
        attempt: key.attempt,
        worker: key.worker,
        workers: share.workers,
        node: share.node.clone(),
        // What is not known before the pod is there is filled in by the container that prepares.
        token: String::new(),
        token_file: Some(PathBuf::from(TOKEN)),
        control: Endpoint::Tcp(site.agents.clone()),
        authority: site.authority.clone(),
        host: String::new(),
        run: image.iter().flat_map(|i| &i.prefix).chain(&spec.run).cloned().collect(),
        cwd: PathBuf::from(CODE),
        env,
        inherit: true,
        prepend: prepended(record),
        ranks,
        first_rank: key.worker * ranks,
        world_size: share.workers * ranks,
        per_gpu,
        gpus_per_node: spec.gpus_per_node,
        // The container has been given its devices; which, is between it and kubelet.
        slots: Vec::new(),
        grace_ms: u64::try_from(share.grace.0).unwrap_or(0),
        log_buffer: site.log_buffer,
        facts: BTreeMap::new(),
        // Nobody is there to see a lone worker's ranks stopped, or to take its place.
        fence_after_ms: u64::try_from(site.fence_after.0).ok().filter(|_| share.workers > 1),
    })
}

/// What stands before the image's own: the hooks, and a layer with the job's packages.
fn prepended(record: &JobRecord) -> BTreeMap<String, String> {
    let mut prepend = BTreeMap::from([("PYTHONPATH".to_owned(), format!("{HOME}/python"))]);
    if record.provenance.layer.is_some() {
        let layer = format!("{HOME}/{}", layer::FOLDER);
        prepend.insert("PYTHONPATH".to_owned(), format!("{HOME}/python:{layer}/site"));
        prepend.insert("PATH".to_owned(), format!("{layer}/bin"));
    }
    prepend
}

fn mount_of(data: &aviflow_api::spec::Data) -> String {
    data.mount.clone().unwrap_or_else(|| format!("/data/{}", data.name))
}

fn volumes(record: &JobRecord, profile: &Profile) -> Result<(Vec<Value>, Vec<Value>), String> {
    let spec = &record.spec;
    let mut volumes = vec![
        json!({"name": "aviflow", "emptyDir": {}}),
        json!({"name": "token", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "audience": names::AUDIENCE, "expirationSeconds": 3600}},
        ]}}),
    ];
    let mut mounts = vec![
        json!({"name": "aviflow", "mountPath": HOME}),
        json!({"name": "token", "mountPath": "/var/run/aviflow", "readOnly": true}),
    ];
    let mut shm = json!({"medium": "Memory"});
    if let Some(size) = spec.resources.as_ref().and_then(|r| r.shm.clone()) {
        shm["sizeLimit"] = json!(size);
    }
    volumes.push(json!({"name": "shm", "emptyDir": shm}));
    mounts.push(json!({"name": "shm", "mountPath": "/dev/shm"}));
    let kept: Vec<&String> = spec.checkpoint.iter().map(|c| &c.path).chain(&spec.outputs).collect();
    if !kept.is_empty() {
        let below = format!("jobs/{}/volumes", record.id.0);
        let storage = profile.kubernetes.storage.clone().unwrap_or_default();
        match (storage.claim, storage.host_path) {
            (Some(claim), _) => {
                volumes.push(json!({"name": "kept", "persistentVolumeClaim": {"claimName": claim}}));
            }
            (None, Some(path)) => {
                volumes.push(json!({"name": "kept", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}));
            }
            (None, None) => {
                return Err(format!(
                    "pool {} has no storage, and the job keeps {}; name a claim in the pool's `kubernetes.storage`",
                    profile.pool, kept[0]
                ));
            }
        }
        for path in kept {
            let sub = format!("{below}/{}", path.trim_start_matches('/'));
            mounts.push(json!({"name": "kept", "mountPath": path, "subPath": sub}));
        }
    }
    for data in &spec.data {
        // What kubelet says of a volume names it by this.
        let name = format!("data-{}", data.name);
        let mut on_claim = |(claim, sub): (&str, &str)| {
            let mut mount = json!({"name": name, "mountPath": mount_of(data), "readOnly": data.read_only});
            if !sub.is_empty() {
                mount["subPath"] = json!(sub);
            }
            mounts.push(mount);
            json!({"persistentVolumeClaim": {"claimName": claim, "readOnly": data.read_only}})
        };
        let source = match data.source.split_once("://") {
            Some(("pvc", rest)) => on_claim(rest.split_once('/').unwrap_or((rest, ""))),
            None | Some(("file", _)) => {
                let path = data.source.strip_prefix("file://").unwrap_or(&data.source);
                let below = |prefix: &String| {
                    let prefix = prefix.trim_end_matches('/');
                    path == prefix || path.starts_with(&format!("{prefix}/"))
                };
                let leads_up = path.split('/').any(|part| part == "..");
                if leads_up || !profile.kubernetes.host_paths.iter().any(below) {
                    let may = match profile.kubernetes.host_paths.as_slice() {
                        [] => "none".to_owned(),
                        paths => paths.join(", "),
                    };
                    return Err(format!(
                        "data `{}`: pool {} does not allow the host path {path} (allowed: {may}); use pvc://CLAIM/PATH, or ask an administrator",
                        data.name, profile.pool
                    ));
                }
                mounts.push(json!({"name": name, "mountPath": mount_of(data), "readOnly": data.read_only}));
                // Without the type, one that is not there would be made, and be empty.
                json!({"hostPath": {"path": path, "type": "Directory"}})
            }
            Some(_) => match profile.kubernetes.bucket(&data.source) {
                Some(found) => on_claim(found),
                None => {
                    return Err(format!(
                        "data `{}`: pool {} has no claim for {}; name one in its `kubernetes.buckets`, or write pvc://CLAIM/PATH",
                        data.name, profile.pool, data.source
                    ));
                }
            },
        };
        let mut volume = source;
        volume["name"] = json!(name);
        volumes.push(volume);
    }
    Ok((volumes, mounts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_api::file::{Defaults, parse_job};
    use aviflow_core::model::{JobId, JobKey};
    use aviflow_core::time::Time;

    fn record(more: &str) -> JobRecord {
        let file = format!("name: a\nimage: i@sha256:{}\nrun: train\n{more}", "0".repeat(64));
        let spec = parse_job("job.yaml", file.as_bytes(), &Defaults::default()).expect("a document").spec;
        let key = JobKey { namespace: "nlp".into(), name: "a".into() };
        let provenance = Provenance::default();
        JobRecord { id: JobId(7), key, user: "ann".into(), submitted: Time(0), spec, provenance }
    }

    #[test]
    fn data_loaders_have_the_memory_of_the_node() {
        let check = |more: &str, expected: Value| {
            let (volumes, mounts) = volumes(&record(more), &Profile::nvidia("main")).expect("volumes");
            let shm = volumes.iter().find(|volume| volume["name"] == "shm");
            assert_eq!(shm.map(|volume| &volume["emptyDir"]), Some(&expected), "{more}");
            assert!(mounts.contains(&json!({"name": "shm", "mountPath": "/dev/shm"})), "{mounts:?}");
        };
        // A container's own has 64 MB.
        check("", json!({"medium": "Memory"}));
        check("resources: {shm: 64Gi}", json!({"medium": "Memory", "sizeLimit": "64Gi"}));
    }
}
