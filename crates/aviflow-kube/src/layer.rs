//! The pod that makes a layer: packages of a job's own, installed by the job's image once, and kept in the object
//! store for every pod that needs them.
//!
//! Three containers, one after the other, share a volume of the pod. The first, of Aviflow's own image, fetches the
//! lock. The second is the job's image: its Python and pip install what the lock names with its hash, as wheels,
//! and nothing of a package is run. The third archives what came of it and hands it up to the depot. No GPUs, no
//! right that the pod-security level `restricted` refuses, and no token but the one by which the depot knows the pod,
//! which the image's container does not get.

pub(crate) mod build;

use crate::fate::{self, LASTING};
use crate::names;
use crate::pod::{DEPOT, HOME, Site, TOKEN};
use crate::profile::Profile;
use aviflow_api::spec::Layer;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// The variable with the layer, for the containers of Aviflow's image.
pub const LAYER: &str = "AVIFLOW_LAYER";
/// The variable with the certificate in PEM of the authority by which the control plane is known; none without TLS.
pub const AUTHORITY: &str = "AVIFLOW_AUTHORITY";
/// The lock, in the volume of the pod.
pub const LOCK: &str = "lock.txt";
/// What pip said, there.
pub const SAID: &str = "said";
/// Whether it did what it should, which `0` means, there.
pub const ENDED: &str = "ended";
/// The folder there with what is archived: `site` with packages, `bin` with programs.
pub const FOLDER: &str = "layer";
/// The largest archive of a layer: every pod fetches it from the control plane.
pub const LARGEST: u64 = 4 << 30;

/// The steps of a build, each a container.
const FETCH: &str = "fetch";
const INSTALL: &str = "install";
const STORE: &str = "store";

/// How long a build may take from its pod's start on, the image's pull included.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// The user as which it runs, whatever its image says.
const USER: i64 = 65532;
/// What installing gets at most.
const MEMORY: &str = "8Gi";
/// What the volume holds at most: packages as they are downloaded, unpacked and archived.
const VOLUME: &str = "32Gi";

const SCRIPT: &str = include_str!("layer/build.py");

/// What pip is told beside the lock. What the lock does not name with its hash is never installed, and nothing is
/// written that differs between two installations.
const PIP: [&str; 15] = [
    "install",
    "--require-hashes",
    "--only-binary",
    ":all:",
    "--no-input",
    "--progress-bar",
    "off",
    "--disable-pip-version-check",
    "--no-warn-script-location",
    "--retries",
    "2",
    "--no-color",
    "--no-user",
    "--no-compile",
    "--no-cache-dir",
];

/// The command that installs the packages of the lock in a folder, and makes the layer there.
#[must_use]
pub fn installs(folder: &str) -> Vec<&str> {
    [&["python3", "-I", "-c", SCRIPT, folder][..], &PIP[..]].concat()
}

/// The name of a layer's pod.
#[must_use]
pub fn pod_name(hash: &str) -> String {
    format!("aviflow-layer-{}", tag(hash))
}

/// As much of a hash as a label holds.
pub(crate) fn tag(hash: &str) -> &str {
    hash.get(..40).unwrap_or(hash)
}

/// Where a layer is made, and for whom.
#[derive(Clone, Debug)]
pub(crate) struct Ground {
    pub(crate) namespace: String,
    pub(crate) layer: Layer,
    /// The image, by its digest.
    pub(crate) image: String,
    /// All pools: which one the job will be in is not known yet.
    pub(crate) profiles: Vec<Profile>,
    /// Secrets with which images are pulled, of the namespace's accounts.
    pub(crate) pull_secrets: BTreeSet<String>,
    /// Variables of pip, as the administrator has them.
    pub(crate) pip: Vec<(String, String)>,
}

/// The pod that makes a layer.
pub(crate) fn pod(ground: &Ground, site: &Site) -> Result<Pod, String> {
    let text = serde_json::to_string(&ground.layer).map_err(|e| e.to_string())?;
    let mut secrets = ground.pull_secrets.clone();
    let mut tolerations: Vec<Value> = Vec::new();
    for profile in &ground.profiles {
        secrets.extend(profile.kubernetes.image_pull_secrets.iter().cloned());
        for toleration in &profile.kubernetes.tolerations {
            let toleration = json!(toleration);
            if !tolerations.contains(&toleration) {
                tolerations.push(toleration);
            }
        }
    }
    let (os, architecture) = ground.layer.platform.split_once('/').unwrap_or(("linux", &ground.layer.platform));
    let security = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let volume = json!({"name": "aviflow", "mountPath": HOME});
    let mut told = vec![json!({"name": LAYER, "value": text}), json!({"name": DEPOT, "value": site.depot})];
    told.extend(site.authority.iter().map(|pem| json!({"name": AUTHORITY, "value": pem})));
    let own = |name: &str, command: &str| {
        json!({
            "name": name,
            "image": site.image,
            "command": ["aviflow", command, HOME],
            "env": told,
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": security,
            "volumeMounts": [volume, {"name": "token", "mountPath": "/var/run/aviflow", "readOnly": true}],
        })
    };
    let home = format!("{HOME}/home");
    let mut env = vec![
        json!({"name": "HOME", "value": home}),
        json!({"name": "TMPDIR", "value": home}),
        json!({"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}),
    ];
    env.extend(ground.pip.iter().map(|(name, value)| json!({"name": name, "value": value})));
    let pod = json!({
        "metadata": {
            "name": pod_name(&ground.layer.hash),
            "namespace": ground.namespace,
            "labels": {names::MANAGED_BY: names::AVIFLOW, names::LAYER: tag(&ground.layer.hash)},
        },
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": names::JOB_ACCOUNT,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 1,
            "activeDeadlineSeconds": LONGEST.as_secs(),
            "priorityClassName": site.priority_class,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": {"kubernetes.io/os": os, "kubernetes.io/arch": architecture},
            "tolerations": tolerations,
            "imagePullSecrets": secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>(),
            "initContainers": [own(FETCH, "layer-fetch"), {
                "name": INSTALL,
                "image": ground.image,
                "command": installs(HOME),
                "env": env,
                "resources": {
                    "requests": {"cpu": "500m", "memory": "512Mi"},
                    "limits": {"cpu": "4", "memory": MEMORY},
                },
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": security,
                "volumeMounts": [volume],
            }],
            "containers": [own(STORE, "layer-store")],
            "volumes": [
                {"name": "aviflow", "emptyDir": {"sizeLimit": VOLUME}},
                {"name": "token", "projected": {"sources": [{"serviceAccountToken": {
                    "path": TOKEN.rsplit('/').next(), "audience": names::AUDIENCE, "expirationSeconds": 3600,
                }}]}},
            ],
        },
    });
    serde_json::from_value(pod).map_err(|e| format!("its pod cannot be written: {e}; please report this"))
}

/// How far a build's pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It goes on: what it does now.
    Going(String),
    /// It handed the layer up.
    Done,
    /// It will not.
    Failed {
        /// Why, and what to do.
        reason: String,
        /// Whether another try would end in the same way.
        lasting: bool,
    },
}

/// Reads the pod of a build.
pub(crate) fn stage(pod: &Pod) -> Stage {
    let Some(status) = &pod.status else { return Stage::Going("making its pod".to_owned()) };
    let (init, main) = (status.init_container_statuses.as_deref(), status.container_statuses.as_deref());
    let steps = [FETCH, INSTALL, STORE].map(|name| {
        let found = init.into_iter().chain(main).flatten().find(|c| c.name == name);
        (name, found)
    });
    match status.phase.as_deref() {
        Some("Succeeded") => return Stage::Done,
        Some("Failed") => return failed(pod, &steps),
        _ => {}
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Stage::Going("removing its pod".to_owned());
    }
    if let Some(stuck) = steps.iter().find_map(|(_, container)| fate::hindered((*container)?)) {
        return Stage::Failed { reason: stuck, lasting: false };
    }
    if let Some(reason) = fate::unschedulable(pod) {
        return Stage::Going(format!("waiting for a node: {}", reason.trim_end_matches('.')));
    }
    let running = |c: &ContainerStatus| c.state.as_ref().is_some_and(|s| s.running.is_some());
    let ended = |c: &ContainerStatus| c.state.as_ref().is_some_and(|s| s.terminated.is_some());
    let now = steps.iter().rev().find(|(_, c)| c.is_some_and(|c| running(c) || ended(c)));
    let step = match now {
        Some((STORE, _)) => "storing the layer",
        Some((INSTALL, Some(c))) if running(c) => "installing packages",
        Some((INSTALL, _)) => "storing the layer",
        Some((_, Some(c))) if ended(c) => "pulling the image",
        Some(_) => "fetching the lock",
        None => "starting its pod",
    };
    Stage::Going(step.to_owned())
}

fn failed(pod: &Pod, steps: &[(&str, Option<&ContainerStatus>)]) -> Stage {
    let lasting = |reason: String| Stage::Failed { reason, lasting: true };
    let status = pod.status.as_ref();
    let why = fate::pod_reason(pod);
    if status.is_some_and(|s| s.reason.as_deref() == Some("DeadlineExceeded")) {
        let minutes = LONGEST.as_secs() / 60;
        return lasting(format!(
            "it was not done after {minutes} minutes; see that the index is near, or put large packages into the image"
        ));
    }
    if let Some(why) = why.as_ref().filter(|why| why.contains("EmptyDir")) {
        return lasting(format!("its packages take more than {VOLUME} ({why}); put large packages into the image"));
    }
    let end = |c: &ContainerStatus| c.state.as_ref()?.terminated.clone().filter(|end| end.exit_code != 0);
    let first = steps.iter().find_map(|(name, c)| Some((*name, end((*c)?)?)));
    match first {
        Some((INSTALL, end)) => lasting(not_installed(&end)),
        Some((_, end)) => {
            let reason = last_line(&end).unwrap_or_else(|| format!("exit code {}", end.exit_code));
            Stage::Failed { reason, lasting: end.exit_code == LASTING }
        }
        None => Stage::Failed { reason: why.unwrap_or_else(|| "kubelet ended its pod".to_owned()), lasting: false },
    }
}

/// Why the image's container did not even write down how pip ended.
fn not_installed(end: &ContainerStateTerminated) -> String {
    let said = last_line(end).unwrap_or_else(|| format!("exit code {}", end.exit_code));
    match end.reason.as_deref() {
        Some("OOMKilled") => {
            format!("pip was killed for want of memory (limit {MEMORY}); put large packages into the image")
        }
        Some("StartError" | "ContainerCannotRun") => format!(
            "the image has no `python3` on its PATH that user {USER} can run ({said}); use an image that has, or install the packages where it is built"
        ),
        _ => format!("the image's python3 could not install packages: {said}"),
    }
}

fn last_line(end: &ContainerStateTerminated) -> Option<String> {
    let line = end.message.as_deref()?.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ground() -> Ground {
        let mut profile = Profile::nvidia("main");
        profile.kubernetes.image_pull_secrets = vec!["pull".to_owned()];
        let toleration = serde_json::from_value(json!({"key": "nvidia.com/gpu", "operator": "Exists"}));
        profile.kubernetes.tolerations = vec![toleration.expect("a toleration")];
        Ground {
            namespace: "nlp".to_owned(),
            layer: Layer::new("nlp", "r/train@sha256:ab", &"1".repeat(64), "linux/arm64"),
            image: "r/train@sha256:ab".to_owned(),
            profiles: vec![profile.clone(), profile],
            pull_secrets: ["own".to_owned()].into(),
            pip: vec![("PIP_INDEX_URL".to_owned(), "https://index.example/simple".to_owned())],
        }
    }

    fn site() -> Site {
        Site {
            agents: "10.0.0.1:8081".into(),
            depot: "http://10.0.0.1:8082".into(),
            authority: None,
            image: "aviflow".into(),
            priority_class: "aviflow-jobs".into(),
            log_buffer: 0,
            fence_after: aviflow_core::time::Span(0),
        }
    }

    #[test]
    fn the_pod_asks_for_no_gpu_and_no_right() {
        let made = pod(&ground(), &site()).expect("a pod");
        assert_eq!(made.metadata.namespace.as_deref(), Some("nlp"));
        let labels = made.metadata.labels.clone().unwrap_or_default();
        assert!(names::worker(&labels).is_none() && labels[names::LAYER].len() <= 63);
        assert!(made.metadata.name.is_some_and(|name| name.len() <= 63));
        let spec = made.spec.expect("a spec");
        let selector = spec.node_selector.unwrap_or_default();
        assert_eq!(selector["kubernetes.io/arch"], "arm64");
        let secrets: Vec<_> = spec.image_pull_secrets.iter().flatten().map(|s| s.name.as_str()).collect();
        assert_eq!((secrets, spec.tolerations.map(|t| t.len())), (vec!["own", "pull"], Some(1)));
        assert_eq!(spec.automount_service_account_token, Some(false));
        let security = spec.security_context.expect("set");
        assert_eq!((security.run_as_non_root, security.run_as_user), (Some(true), Some(USER)));
        let init = spec.init_containers.expect("two");
        for container in init.iter().chain(&spec.containers) {
            let limits = container.resources.as_ref().and_then(|r| r.limits.clone()).unwrap_or_default();
            assert_eq!(limits.keys().collect::<Vec<_>>(), ["cpu", "memory"], "{}", container.name);
            let security = container.security_context.as_ref().expect("set");
            assert_eq!(security.allow_privilege_escalation, Some(false), "{}", container.name);
        }
        let install = &init[1];
        assert_eq!(install.image.as_deref(), Some("r/train@sha256:ab"));
        let mounts: Vec<_> = install.volume_mounts.iter().flatten().map(|m| m.name.as_str()).collect();
        assert_eq!(mounts, ["aviflow"], "the token is not for the image");
        let env: Vec<_> = install.env.iter().flatten().map(|e| e.name.as_str()).collect();
        assert!(env.contains(&"PIP_INDEX_URL"), "{env:?}");
        let command = install.command.as_deref().unwrap_or_default();
        for word in ["--require-hashes", "--only-binary", ":all:"] {
            assert!(command.iter().any(|c| c == word), "{word}");
        }
    }

    #[track_caller]
    fn check(metadata: Value, status: Value, expected: &Stage) {
        let pod = json!({"metadata": metadata, "spec": {"containers": []}, "status": status});
        assert_eq!(stage(&serde_json::from_value(pod).expect("a pod")), *expected);
    }

    fn step(name: &str, state: Value) -> Value {
        json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state})
    }

    fn going(step: &str) -> Stage {
        Stage::Going(step.to_owned())
    }

    #[test]
    fn each_step_is_told() {
        let (done, runs) = (json!({"terminated": {"exitCode": 0}}), json!({"running": {}}));
        let waits = json!({"waiting": {"reason": "PodInitializing"}});
        let pending = |init: Value, main: Value| json!({"phase": "Pending", "initContainerStatuses": init, "containerStatuses": main});
        check(json!({}), json!({"phase": "Pending"}), &going("starting its pod"));
        let init = json!([step(FETCH, runs.clone()), step(INSTALL, waits.clone())]);
        check(json!({}), pending(init, json!([step(STORE, waits.clone())])), &going("fetching the lock"));
        let init = json!([step(FETCH, done.clone()), step(INSTALL, waits.clone())]);
        check(json!({}), pending(init, json!([step(STORE, waits.clone())])), &going("pulling the image"));
        let init = json!([step(FETCH, done.clone()), step(INSTALL, runs.clone())]);
        check(json!({}), pending(init, json!([step(STORE, waits)])), &going("installing packages"));
        let init = json!([step(FETCH, done.clone()), step(INSTALL, done)]);
        check(json!({}), pending(init, json!([step(STORE, runs)])), &going("storing the layer"));
        check(json!({}), json!({"phase": "Succeeded"}), &Stage::Done);
        let conditions = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: cpu."}]);
        let expected = going("waiting for a node: 0/2 nodes: cpu");
        check(json!({}), json!({"phase": "Pending", "conditions": conditions}), &expected);
        let leaving = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        check(leaving, json!({"phase": "Running"}), &going("removing its pod"));
    }

    #[test]
    fn a_failure_says_whether_another_try_helps() {
        let failed = |name: &str, end: Value| {
            let key = if name == STORE { "containerStatuses" } else { "initContainerStatuses" };
            json!({"phase": "Failed", key: [step(name, json!({"terminated": end}))]})
        };
        let lasting = |reason: &str| Stage::Failed { reason: reason.to_owned(), lasting: true };
        let passing = |reason: &str| Stage::Failed { reason: reason.to_owned(), lasting: false };
        let said = json!({"exitCode": LASTING, "message": "noise\npackage x is not what was locked\n"});
        check(json!({}), failed(STORE, said), &lasting("package x is not what was locked"));
        let away = json!({"exitCode": 1, "message": "the control plane cannot be reached"});
        check(json!({}), failed(FETCH, away), &passing("the control plane cannot be reached"));
        let killed = json!({"exitCode": 137, "reason": "OOMKilled"});
        let expected = "pip was killed for want of memory (limit 8Gi); put large packages into the image";
        check(json!({}), failed(INSTALL, killed), &lasting(expected));
        let none = json!({"exitCode": 128, "reason": "StartError", "message": "exec: \"python3\": not found"});
        let expected = "the image has no `python3` on its PATH that user 65532 can run (exec: \"python3\": not found); use an image that has, or install the packages where it is built";
        check(json!({}), failed(INSTALL, none), &lasting(expected));
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory."});
        check(json!({}), evicted, &passing("Evicted: low on memory"));
        let late = json!({"phase": "Failed", "reason": "DeadlineExceeded", "message": "too long"});
        let expected =
            "it was not done after 60 minutes; see that the index is near, or put large packages into the image";
        check(json!({}), late, &lasting(expected));
        let pull = json!({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}});
        let status = json!({"phase": "Pending", "initContainerStatuses": [step(INSTALL, pull)]});
        check(json!({}), status, &passing("its image cannot be pulled: no such image"));
    }
}
