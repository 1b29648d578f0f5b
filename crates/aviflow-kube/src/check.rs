//! A short test on a node before it takes work again: one pod with all of its GPUs.
//!
//! The pod comes past whatever keeps work away from the node, since that is when a node is checked. It is no
//! worker, belongs to no job, and is known to the books as Aviflow's own. Whoever asked sees its output, and ends it by
//! going away; one whose control plane died is ended by kubelet, and replaced by the next check of its node.

use crate::api::{persist, watch};
use crate::body::reference;
use crate::fate::{self, Fate};
use crate::names;
use crate::pod::Site;
use crate::profile::Profile;
use crate::remove::{KUBELETS, remove};
use crate::site::PodRef;
use aviflow_api::rest::ExecFrame;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{AsyncReadExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{LogParams, PostParams};
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::mpsc;

/// Label of a pod that checks a node: the node.
pub const CHECK: &str = "aviflow.dev/check";

/// How long a check may take, its image's pull included.
const LONGEST: Duration = Duration::from_secs(30 * 60);

/// The user as which a test runs, whatever its image says.
const USER: i64 = 65532;

/// Bytes of output at a time.
const CHUNK: usize = 32 << 10;

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The node.
    pub node: String,
    /// The image; Aviflow's own if none.
    pub image: Option<String>,
    /// The command; Aviflow's own test if empty.
    pub run: Vec<String>,
}

/// Where a check runs.
#[derive(Clone, Debug)]
pub(crate) struct Ground {
    pub(crate) profile: Profile,
    /// The GPUs that the node's plugin calls healthy.
    pub(crate) gpus: u32,
}

/// Runs a check, and leaves nothing of it.
pub(crate) async fn run(
    client: Client,
    namespace: &str,
    site: &Site,
    check: &Check,
    ground: &Ground,
    to: mpsc::Sender<ExecFrame>,
) {
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let name = pod_name(&check.node);
    let mut made = None;
    let ended = tokio::select! {
        ended = follow((&client, &api), &name, pod(&name, site, check, ground), &mut made, &to) => ended,
        () = to.closed() => None,
    };
    if let Some(said) = ended {
        // Who went away at the last moment does not want to know.
        let _ = to.send(said).await;
    }
    // Nobody waits for what a node that is down may hold up.
    drop(to);
    match made {
        Some(made) => remove(&client, &made, KUBELETS).await,
        // Whoever asked went away while it was being made, or it was not.
        None => clear(&client, &api, &name).await,
    }
}

/// Removes what an earlier check of the node has left.
async fn clear(client: &Client, api: &Api<Pod>, name: &str) {
    if let Ok(Some(left)) = persist(|| async { api.get_opt(name).await }).await
        && let Some(left) = reference(&left)
    {
        remove(client, &left, KUBELETS).await;
    }
}

fn pod_name(node: &str) -> String {
    format!("aviflow-check-{node}")
}

/// The pod of a check.
fn pod(name: &str, site: &Site, check: &Check, ground: &Ground) -> Result<Pod, String> {
    let kubernetes = &ground.profile.kubernetes;
    let mut limits = serde_json::Map::new();
    if ground.gpus > 0 {
        limits.insert(kubernetes.gpu_resource.clone(), json!(ground.gpus.to_string()));
    }
    for (resource, count) in &kubernetes.fabric.rdma_resources {
        limits.insert(resource.clone(), json!(count.to_string()));
    }
    let gpus = ground.gpus.to_string();
    let own = [
        "aviflow",
        "node-probe",
        "--gpus",
        &gpus,
        "--reach",
        &site.agents,
        "--reach",
        site.depot.split_once("://").map_or(site.depot.as_str(), |(_, address)| address),
    ];
    let run: Vec<&str> =
        if check.run.is_empty() { own.to_vec() } else { check.run.iter().map(String::as_str).collect() };
    let pull = kubernetes.image_pull_secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
    let mut pod = json!({
        "metadata": {
            "name": name,
            "labels": {names::MANAGED_BY: names::AVIFLOW, CHECK: check.node},
            "annotations": kubernetes.fabric.annotations,
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 1,
            "activeDeadlineSeconds": LONGEST.as_secs(),
            // Aviflow's own namespace takes nothing that asks for more, and a test of GPUs needs no more.
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [check.node]},
                ]}],
            }}},
            "tolerations": [{"operator": "Exists"}],
            "imagePullSecrets": pull,
            // An image need not have a folder where everybody may write.
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [{
                "name": fate::MAIN,
                "image": check.image.as_ref().unwrap_or(&site.image),
                "command": run,
                "env": kubernetes.fabric.env.iter().map(|(name, value)| json!({"name": name, "value": value})).collect::<Vec<Value>>(),
                "resources": {"limits": limits},
                "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    });
    if let Some(class) = &kubernetes.runtime_class {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    serde_json::from_value(pod).map_err(|e| format!("its pod cannot be written: {e}; please report this"))
}

/// Makes the pod, hands its output on, and tells how it ended; none if whoever asked has gone.
async fn follow(
    (client, api): (&Client, &Api<Pod>),
    name: &str,
    pod: Result<Pod, String>,
    made: &mut Option<PodRef>,
    to: &mpsc::Sender<ExecFrame>,
) -> Option<ExecFrame> {
    let pod = match pod {
        Ok(pod) => pod,
        Err(reason) => return Some(ExecFrame::Failed { reason }),
    };
    clear(client, api, name).await;
    match persist(|| async { api.create(&PostParams::default(), &pod).await }).await {
        Ok(pod) => *made = reference(&pod),
        Err(refused) => {
            return Some(ExecFrame::Failed {
                reason: format!("its pod was refused by the apiserver: {}", refused.message),
            });
        }
    }
    let mut events = watch(api.clone(), Some(name));
    let mut shown = false;
    while let Some(event) = events.next().await {
        let pod = match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => pod,
            Ok(Event::Delete(_)) => return Some(ExecFrame::Failed { reason: "somebody deleted its pod".to_owned() }),
            Ok(Event::Init | Event::InitDone) | Err(_) => continue,
        };
        let began = container(&pod).is_some_and(|c| c.0);
        if began && !shown {
            shown = true;
            output(api, name, to).await?;
        }
        if let Some((_, Some(code))) = container(&pod) {
            return Some(ExecFrame::Exit { code });
        }
        match fate::fate(&pod) {
            Fate::Alive => {}
            Fate::Unschedulable { reason }
            | Fate::Stuck { reason, .. }
            | Fate::Leaving { reason, .. }
            | Fate::OutOfMemory { reason }
            | Fate::Over { reason, .. } => {
                return Some(ExecFrame::Failed { reason });
            }
        }
    }
    Some(ExecFrame::Failed { reason: "the watch of its pod ended".to_owned() })
}

/// Whether the container has begun, and its exit code once it has ended.
fn container(pod: &Pod) -> Option<(bool, Option<i32>)> {
    let state = pod.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?;
    let code = state.terminated.as_ref().map(|t| t.exit_code);
    Some((state.running.is_some() || code.is_some(), code))
}

/// Hands on what the pod writes until it ends; none if nobody wants it any more.
async fn output(api: &Api<Pod>, name: &str, to: &mpsc::Sender<ExecFrame>) -> Option<()> {
    let how = LogParams { follow: true, ..LogParams::default() };
    // A log that cannot be read is missed, and how the check ended is still told.
    let Ok(mut log) = api.log_stream(name, &how).await else { return Some(()) };
    let mut chunk = vec![0; CHUNK];
    while let Ok(read) = log.read(&mut chunk).await {
        if read == 0 {
            break;
        }
        to.send(ExecFrame::Stdout { data: STANDARD.encode(&chunk[..read]) }).await.ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_has_the_node_to_itself_whatever_keeps_others_away() {
        let site = Site {
            agents: "10.0.0.1:8081".into(),
            depot: "https://10.0.0.1:8082".into(),
            authority: None,
            image: "aviflow".into(),
            priority_class: "aviflow-jobs".into(),
            log_buffer: 0,
            fence_after: aviflow_core::time::Span(0),
        };
        let mut profile = Profile::nvidia("main");
        profile.kubernetes.fabric.rdma_resources = [("rdma/ib".to_owned(), 8)].into();
        let check = Check { node: "hgx0".into(), image: None, run: Vec::new() };
        let made = pod("aviflow-check-hgx0", &site, &check, &Ground { profile, gpus: 7 }).expect("a pod");
        let spec = made.spec.expect("a spec");
        let limits = spec.containers[0].resources.as_ref().and_then(|r| r.limits.clone()).unwrap_or_default();
        let limits: Vec<String> = limits.iter().map(|(name, n)| format!("{name} {}", n.0)).collect();
        assert_eq!(limits, ["nvidia.com/gpu 7", "rdma/ib 8"]);
        assert_eq!(spec.tolerations.map(|t| t.len()), Some(1), "all taints");
        assert_eq!(spec.containers[0].command.as_ref().map(|c| c[1].clone()).as_deref(), Some("node-probe"));
        assert_eq!(spec.automount_service_account_token, Some(false));
    }
}
