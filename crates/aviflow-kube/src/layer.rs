//! The pod that makes a layer: packages of a job's own, installed by the job's image once, and kept in the object
//! store for every pod that needs them.
//!
//! Three containers, one after the other, share a volume of the pod. The first, of Aviflow's own image, fetches the
//! lock and lays out the script that installs. The second is the job's image, with the variables and the prefix of
//! its environment as the job itself has them, so that it is the same Python: that and its pip install what the lock
//! names with its hash, as wheels, and nothing of a package is run. The third archives what came of it and hands it up
//! to the depot. No GPUs, no right that the pod-security level `restricted` refuses, and no token but the one by which
//! the depot knows the pod, which the image's container does not get.

pub(crate) mod build;

use crate::fate::{self, LASTING};
use crate::names;
use crate::pod::{DEPOT, HOME, Site, TOKEN};
use crate::profile::Profile;
use aviflow_api::environment::PIP_INSTALL;
use aviflow_api::spec::{Layer, ResolvedImage};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
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
/// What installs, there.
pub const SCRIPT: &str = "install.py";
/// The same: it is written by Aviflow's own container, since not every launcher takes a text of several lines.
pub const TEXT: &str = include_str!("layer/build.py");
/// The folder there with what is archived: `site` with packages, `bin` with programs, and what else packages bring.
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
/// What the pod may take of its node's disk: that, and its logs.
const DISK: &str = "33Gi";

/// What pip is told beside what it is told everywhere: nothing is written that differs between two installations.
const SAME: [&str; 2] = ["--no-compile", "--no-cache-dir"];

/// The command that installs the packages of the lock in a folder, where [`SCRIPT`] lies too, and makes the layer
/// there.
#[must_use]
pub fn installs(folder: &str) -> Vec<String> {
    let own = ["python3".to_owned(), "-I".to_owned(), format!("{folder}/{SCRIPT}"), folder.to_owned()];
    own.into_iter().chain(PIP_INSTALL.into_iter().chain(SAME).map(str::to_owned)).collect()
}

/// A text as it stands, where kubelet would put variables into it.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
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
    /// The image, with what its environment sets.
    pub(crate) image: ResolvedImage,
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
            "resources": {
                "requests": {"cpu": "100m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
                "limits": {"cpu": "2", "memory": "512Mi", "ephemeral-storage": DISK},
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": security,
            "volumeMounts": [volume, {"name": "token", "mountPath": "/var/run/aviflow", "readOnly": true}],
        })
    };
    let home = format!("{HOME}/home");
    // The later ones count: where it may write, and which index it asks, is not the environment's to say.
    let mut env: BTreeMap<&str, &str> = ground.image.env.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    env.extend([("HOME", home.as_str()), ("TMPDIR", home.as_str()), ("PYTHONDONTWRITEBYTECODE", "1")]);
    env.extend(ground.pip.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let env: Vec<Value> = env.into_iter().map(|(name, value)| json!({"name": name, "value": literal(value)})).collect();
    let installs: Vec<String> = ground.image.prefix.iter().map(|word| literal(word)).chain(installs(HOME)).collect();
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
            // Not that of jobs: a build is no reason to put off what others run. The cluster's default.
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": elsewhere(&ground.profiles)}},
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
                "image": ground.image.pinned,
                "command": installs,
                "env": env,
                "resources": {
                    "requests": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "2Gi"},
                    "limits": {"cpu": "4", "memory": MEMORY, "ephemeral-storage": DISK},
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

/// Nodes without GPUs are preferred, which those of pools tell by a label: there the pod is in nobody's way.
fn elsewhere(profiles: &[Profile]) -> Vec<Value> {
    let labels: BTreeSet<&String> = profiles.iter().map(|profile| &profile.kubernetes.gpu_type_label).collect();
    let without = |label| json!({"weight": 100, "preference": {"matchExpressions": [{"key": label, "operator": "DoesNotExist"}]}});
    labels.into_iter().map(without).collect()
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
        let (step, installs) = under_way(steps);
        let reason = format!("it was not done after {minutes} minutes: {step} took too long");
        // Of all steps this alone depends on the lock.
        return match installs {
            true => lasting(format!("{reason}; see that the index is near, or put large packages into the image")),
            false => Stage::Failed { reason, lasting: false },
        };
    }
    // What kubelet says of a pod that took more than its own share; a node without room for others is another matter.
    let too_much = ["EmptyDir", "Pod ephemeral local storage", "local ephemeral storage limit"];
    if let Some(why) = why.as_ref().filter(|why| too_much.iter().any(|words| why.contains(words))) {
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

/// What a pod was at when its time was over, and whether that was installing.
fn under_way(steps: &[(&str, Option<&ContainerStatus>)]) -> (&'static str, bool) {
    let state = |c: &Option<&ContainerStatus>| c.and_then(|c| c.state.clone()).unwrap_or_default();
    let done = |c: &Option<&ContainerStatus>| state(c).terminated.is_some_and(|end| end.exit_code == 0);
    match steps.iter().find(|(_, container)| !done(container)) {
        Some((FETCH, _)) => ("fetching the lock", false),
        Some((INSTALL, container)) => match state(container) {
            state if state.running.is_some() || state.terminated.is_some() => ("installing packages", true),
            _ => ("pulling the image", false),
        },
        Some(_) | None => ("storing the layer", false),
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
            "user {USER} cannot run `python3` in the image, with the PATH and the launcher of its environment ({said}); use an image where he can, or install the packages where it is built"
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
        let image = ResolvedImage {
            pinned: "r/train@sha256:ab".to_owned(),
            env: [("PATH", "/opt/conda/bin:/bin"), ("PS1", "$(x) "), ("HOME", "/root")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            prefix: vec!["/opt/$entry.sh".to_owned()],
            ..ResolvedImage::default()
        };
        Ground {
            namespace: "nlp".to_owned(),
            layer: Layer::new("nlp", &image, &"1".repeat(64), "linux/arm64"),
            image,
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
        assert_eq!(spec.priority_class_name, None, "it puts off nothing that others run");
        let affinity = spec.affinity.and_then(|a| a.node_affinity).expect("set");
        assert!(affinity.required_during_scheduling_ignored_during_execution.is_none());
        let preferred = affinity.preferred_during_scheduling_ignored_during_execution.unwrap_or_default();
        let preferred: Vec<_> =
            preferred.iter().flat_map(|p| p.preference.match_expressions.iter().flatten()).collect();
        let [away] = preferred[..] else { panic!("{preferred:?}") };
        assert_eq!((away.key.as_str(), away.operator.as_str()), ("nvidia.com/gpu.product", "DoesNotExist"));
        let security = spec.security_context.expect("set");
        assert_eq!((security.run_as_non_root, security.run_as_user), (Some(true), Some(USER)));
        let init = spec.init_containers.expect("two");
        for container in init.iter().chain(&spec.containers) {
            let limits = container.resources.as_ref().and_then(|r| r.limits.clone()).unwrap_or_default();
            assert_eq!(limits.keys().collect::<Vec<_>>(), ["cpu", "ephemeral-storage", "memory"], "{}", container.name);
            let security = container.security_context.as_ref().expect("set");
            assert_eq!(security.allow_privilege_escalation, Some(false), "{}", container.name);
        }
        let install = &init[1];
        assert_eq!(install.image.as_deref(), Some("r/train@sha256:ab"));
        let mounts: Vec<_> = install.volume_mounts.iter().flatten().map(|m| m.name.as_str()).collect();
        assert_eq!(mounts, ["aviflow"], "the token is not for the image");
        let env: BTreeMap<_, _> =
            install.env.iter().flatten().map(|e| (e.name.as_str(), e.value.as_deref().unwrap_or_default())).collect();
        assert_eq!(env.len(), install.env.as_ref().map_or(0, Vec::len), "each once");
        assert_eq!(env["PIP_INDEX_URL"], "https://index.example/simple");
        assert_eq!((env["PATH"], env["PS1"]), ("/opt/conda/bin:/bin", "$$(x) "), "those of the job itself");
        assert_eq!(env["HOME"], "/aviflow/home", "where it may write");
        let command = install.command.as_deref().unwrap_or_default();
        assert_eq!(command[..4], ["/opt/$$entry.sh", "python3", "-I", "/aviflow/install.py"]);
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
        let expected = "user 65532 cannot run `python3` in the image, with the PATH and the launcher of its environment (exec: \"python3\": not found); use an image where he can, or install the packages where it is built";
        check(json!({}), failed(INSTALL, none), &lasting(expected));
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory."});
        check(json!({}), evicted, &passing("Evicted: low on memory"));
        let gone = "Usage of EmptyDir volume \"aviflow\" exceeds the limit \"32Gi\".";
        let large = json!({"phase": "Failed", "reason": "Evicted", "message": gone});
        let expected = format!(
            "its packages take more than 32Gi (Evicted: {}); put large packages into the image",
            gone.trim_end_matches('.')
        );
        check(json!({}), large, &lasting(&expected));
        let full = "The node was low on resource: ephemeral-storage.";
        let full = json!({"phase": "Failed", "reason": "Evicted", "message": full});
        check(json!({}), full, &passing("Evicted: The node was low on resource: ephemeral-storage"));
        let pull = json!({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}});
        let status = json!({"phase": "Pending", "initContainerStatuses": [step(INSTALL, pull)]});
        check(json!({}), status, &passing("its image cannot be pulled: no such image"));
    }

    #[test]
    fn a_build_that_was_not_done_in_time_says_what_it_was_at() {
        let late = |init: Value, main: Value| {
            json!({"phase": "Failed", "reason": "DeadlineExceeded", "message": "too long",
                "initContainerStatuses": init, "containerStatuses": main})
        };
        let (done, waits) = (json!({"terminated": {"exitCode": 0}}), json!({"waiting": {}}));
        let killed = json!({"terminated": {"exitCode": 137}});
        let is = |step: &str| format!("it was not done after 60 minutes: {step} took too long");
        let passing = |step: &str| Stage::Failed { reason: is(step), lasting: false };
        let never = json!([step(STORE, waits.clone())]);
        let init = json!([step(FETCH, killed.clone()), step(INSTALL, waits.clone())]);
        check(json!({}), late(init, never.clone()), &passing("fetching the lock"));
        let init = json!([step(FETCH, done.clone()), step(INSTALL, waits)]);
        check(json!({}), late(init, never.clone()), &passing("pulling the image"));
        let init = json!([step(FETCH, done.clone()), step(INSTALL, killed.clone())]);
        let reason =
            format!("{}; see that the index is near, or put large packages into the image", is("installing packages"));
        check(json!({}), late(init, never), &Stage::Failed { reason, lasting: true });
        let init = json!([step(FETCH, done.clone()), step(INSTALL, done)]);
        check(json!({}), late(init, json!([step(STORE, killed)])), &passing("storing the layer"));
    }
}
