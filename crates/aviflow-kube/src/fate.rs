//! What became of a worker's pod, read from the pod alone.
//!
//! Kubernetes has no one field for it: kube-scheduler, kubelet and whoever deletes a pod each say it elsewhere.

use aviflow_core::time::Span;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

/// The container that holds agent and ranks.
pub const MAIN: &str = "worker";
/// The container that lays out code and agent before.
pub const PREPARE: &str = "prepare";
/// The exit code of [`PREPARE`] where another time or place will not help.
pub const LASTING: i32 = 3;

/// Where a worker's pod stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// On its way, or at work.
    Alive,
    /// kube-scheduler found that it cannot be where the plan wanted it.
    Unschedulable {
        /// Why, as kube-scheduler says it.
        reason: String,
    },
    /// It cannot start.
    Stuck {
        /// Why.
        reason: String,
        /// Whether that lies in what the job asks for.
        lasting: bool,
    },
    /// Somebody asks it to leave.
    Leaving {
        /// Who or what.
        reason: String,
        /// How long it has.
        within: Span,
    },
    /// It was killed for using more memory than its limit.
    OutOfMemory {
        /// In words.
        reason: String,
    },
    /// All its processes are gone.
    Over {
        /// Why, as far as Kubernetes knows.
        reason: String,
        /// Whether its container ever ran.
        ran: bool,
    },
}

/// Reads a pod.
#[must_use]
pub fn fate(pod: &Pod) -> Fate {
    let Some(status) = &pod.status else { return Fate::Alive };
    let main = container(status.container_statuses.as_deref(), MAIN);
    let prepare = container(status.init_container_statuses.as_deref(), PREPARE);
    let ran = main.is_some_and(started);
    if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        return ended(pod, main, prepare, ran);
    }
    if pod.metadata.deletion_timestamp.is_some() {
        let seconds = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
        return Fate::Leaving { reason: disruption(pod), within: Span::seconds(seconds) };
    }
    if let Some(reason) = unschedulable(pod) {
        return Fate::Unschedulable { reason };
    }
    [prepare, main].into_iter().flatten().find_map(stuck).unwrap_or(Fate::Alive)
}

/// What is wrong with a volume claim, where kube-scheduler says so of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// There is none of that name.
    Missing,
    /// It has no volume yet.
    Unbound,
}

impl Claim {
    /// What to do about it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Claim::Missing => "; make the claim in the job's namespace, or name another",
            Claim::Unbound => "; `kubectl describe pvc` in the job's namespace says why it has no volume",
        }
    }
}

/// Whether kube-scheduler finds no place because of a volume claim: then no other place is better.
#[must_use]
pub fn claim(message: &str) -> Option<Claim> {
    if message.contains("persistentvolumeclaim \"") {
        return Some(Claim::Missing);
    }
    message.contains("unbound immediate PersistentVolumeClaims").then_some(Claim::Unbound)
}

/// Whether a pod is on its node, and kubelet has made neither its volumes nor its sandbox, which comes after them.
#[must_use]
pub fn prepares(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let bound = pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
    let made = status.conditions.iter().flatten().any(|c| c.type_ == "PodReadyToStartContainers" && c.status == "True");
    let begun = container(status.init_container_statuses.as_deref(), PREPARE).is_some_and(started);
    bound && !made && !begun && status.phase.as_deref() == Some("Pending") && pod.metadata.deletion_timestamp.is_none()
}

/// Whether nothing of a pod runs that was deleted: it ended, or never began, as kubelet said last.
#[must_use]
pub fn quiet(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return true };
    if pod.spec.as_ref().is_none_or(|s| s.node_name.is_none()) {
        return true;
    }
    let all = [&status.init_container_statuses, &status.container_statuses];
    all.into_iter().flatten().flatten().all(|c| c.state.as_ref().is_none_or(|s| s.running.is_none()))
}

fn container<'a>(of: Option<&'a [ContainerStatus]>, name: &str) -> Option<&'a ContainerStatus> {
    of?.iter().find(|c| c.name == name)
}

fn started(container: &ContainerStatus) -> bool {
    container.state.as_ref().is_some_and(|s| s.running.is_some() || s.terminated.is_some())
}

fn ended(pod: &Pod, main: Option<&ContainerStatus>, prepare: Option<&ContainerStatus>, ran: bool) -> Fate {
    let terminated = |c: Option<&ContainerStatus>| c?.state.as_ref()?.terminated.clone();
    if let Some(end) = terminated(prepare).filter(|end| end.exit_code != 0 && !ran) {
        let said = end.message.as_deref().and_then(|m| m.lines().rev().find(|l| !l.trim().is_empty()));
        let reason = said.map_or_else(
            || format!("the worker could not be prepared: exit code {}", end.exit_code),
            |said| said.trim().to_owned(),
        );
        return Fate::Stuck { reason, lasting: end.exit_code == LASTING };
    }
    if let Some(end) = terminated(main) {
        if end.reason.as_deref() == Some("OOMKilled") {
            let limit = pod.spec.as_ref().and_then(|s| {
                let limits = s.containers.iter().find(|c| c.name == MAIN)?.resources.as_ref()?.limits.as_ref()?;
                limits.get("memory").map(|q| q.0.clone())
            });
            let limit = limit.map_or_else(|| "of the node".to_owned(), |limit| format!("limit {limit}"));
            return Fate::OutOfMemory { reason: format!("killed for want of memory ({limit})") };
        }
        // kubelet writes 255 where it lost sight of the container, as after the node was started again.
        let lost = end.exit_code == 255 && matches!(end.reason.as_deref(), Some("Unknown" | "ContainerStatusUnknown"));
        let said = pod_reason(pod).or_else(|| end.message.clone().filter(|m| !m.trim().is_empty()));
        let how = if lost { "its node was started again".to_owned() } else { format!("exit code {}", end.exit_code) };
        let reason = said.map_or_else(|| format!("its container ended: {how}"), |said| format!("{said} ({how})"));
        return Fate::Over { reason, ran };
    }
    Fate::Over { reason: pod_reason(pod).unwrap_or_else(|| "kubelet ended its pod".to_owned()), ran }
}

/// What kubelet says of a pod that it ended or would not take.
pub(crate) fn pod_reason(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    match (status.reason.as_deref(), status.message.as_deref()) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {}", message.trim().trim_end_matches('.'))),
        (Some(reason), None) => Some(reason.to_owned()),
        (None, Some(message)) => Some(message.trim().trim_end_matches('.').to_owned()),
        (None, None) => None,
    }
}

/// Who asks a pod to leave: the condition that eviction and preemption leave behind, else somebody who deleted it.
fn disruption(pod: &Pod) -> String {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    let target = conditions.into_iter().flatten().find(|c| c.type_ == "DisruptionTarget" && c.status == "True");
    let Some(target) = target else { return "somebody deleted its pod".to_owned() };
    let message = target.message.as_deref().unwrap_or("").trim().trim_end_matches('.');
    let what = match target.reason.as_deref() {
        Some("EvictionByEvictionAPI") => "its pod was evicted, as `kubectl drain` does",
        Some("PreemptionByScheduler") => "a pod of higher priority took its place",
        Some("DeletionByTaintManager") => "its node was tainted",
        Some("DeletionByPodGC") => "its node is no more",
        Some("TerminationByKubelet") => "kubelet ended it for want of resources",
        _ => "its pod was disrupted",
    };
    if message.is_empty() { what.to_owned() } else { format!("{what}: {message}") }
}

/// Why kube-scheduler finds no node for a pod, if so.
pub(crate) fn unschedulable(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|c| c.type_ == "PodScheduled")?;
    if scheduled.status != "False" || scheduled.reason.as_deref() == Some("SchedulingGated") {
        return None;
    }
    Some(scheduled.message.clone().unwrap_or_else(|| "kube-scheduler finds no place".to_owned()))
}

/// Why a container waits that will not stop waiting.
fn stuck(container: &ContainerStatus) -> Option<Fate> {
    hindered(container).map(|reason| Fate::Stuck { reason, lasting: container.name == MAIN })
}

/// The same, in words.
pub(crate) fn hindered(container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let what = match waiting.reason.as_deref()? {
        // The first failure may pass; kubelet backs off after the second.
        "ImagePullBackOff" => "its image cannot be pulled",
        "InvalidImageName" => "its image has no valid name",
        "ErrImageNeverPull" => "its image is not on the node and may not be pulled",
        "CreateContainerConfigError" => "its container cannot be configured",
        "CreateContainerError" | "RunContainerError" => "its container cannot be started",
        _ => return None,
    };
    let message = waiting.message.as_deref().unwrap_or("").trim();
    let mut reason = if message.is_empty() { what.to_owned() } else { format!("{what}: {message}") };
    // `secret "hf" not found`, `couldn't find key token in Secret nlp/hf`
    if message.starts_with("secret \"") || message.contains(" in Secret ") {
        reason.push_str("; `kubectl create secret generic NAME --from-literal=KEY=…` in the job's namespace makes one");
    }
    Some(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[track_caller]
    fn check(metadata: Value, status: Value, expected: &Fate) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": metadata,
            "spec": {"nodeName": "hgx0", "containers": [
                {"name": MAIN, "resources": {"limits": {"memory": "1Gi"}}},
            ]},
            "status": status,
        }))
        .expect("a pod");
        assert_eq!(fate(&pod), *expected);
    }

    fn main(state: Value) -> Value {
        json!([{"name": MAIN, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}])
    }

    #[test]
    fn a_pod_on_its_way_is_alive() {
        let waiting = main(json!({"waiting": {"reason": "ContainerCreating"}}));
        check(json!({}), json!({"phase": "Pending", "containerStatuses": waiting}), &Fate::Alive);
        let pulling = main(json!({"waiting": {"reason": "ErrImagePull"}}));
        check(json!({}), json!({"phase": "Pending", "containerStatuses": pulling}), &Fate::Alive);
        let running = main(json!({"running": {}}));
        check(json!({}), json!({"phase": "Running", "containerStatuses": running}), &Fate::Alive);
    }

    #[test]
    fn what_keeps_it_from_starting_is_told() {
        let message = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu.";
        let condition =
            json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]);
        let expected = Fate::Unschedulable { reason: message.into() };
        check(json!({}), json!({"phase": "Pending", "conditions": condition}), &expected);
        let pull = main(json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image \"x\""}}));
        let reason = "its image cannot be pulled: Back-off pulling image \"x\"".to_owned();
        let expected = Fate::Stuck { reason, lasting: true };
        check(json!({}), json!({"phase": "Pending", "containerStatuses": pull}), &expected);
        let refused =
            json!({"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Node didn't have enough."});
        let expected = Fate::Over { reason: "OutOfnvidia.com/gpu: Node didn't have enough".into(), ran: false };
        check(json!({}), refused, &expected);
        let init = json!([{"name": PREPARE, "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": LASTING, "message": "noise\nno such snapshot\n"}}}]);
        let expected = Fate::Stuck { reason: "no such snapshot".into(), lasting: true };
        check(json!({}), json!({"phase": "Failed", "initContainerStatuses": init}), &expected);
    }

    #[test]
    fn a_secret_that_is_missing_is_told_with_what_makes_it() {
        for message in ["secret \"hf\" not found", "couldn't find key token in Secret nlp/hf"] {
            let state = main(json!({"waiting": {"reason": "CreateContainerConfigError", "message": message}}));
            let remedy = "`kubectl create secret generic NAME --from-literal=KEY=…` in the job's namespace makes one";
            let reason = format!("its container cannot be configured: {message}; {remedy}");
            let expected = Fate::Stuck { reason, lasting: true };
            check(json!({}), json!({"phase": "Pending", "containerStatuses": state}), &expected);
        }
    }

    #[test]
    fn a_claim_without_a_volume_is_no_want_of_room() {
        let missing = "0/2 nodes are available: persistentvolumeclaim \"corpus\" not found. not found";
        assert_eq!(claim(missing), Some(Claim::Missing));
        assert_eq!(claim("pod has unbound immediate PersistentVolumeClaims."), Some(Claim::Unbound));
        assert_eq!(claim("0/2 nodes are available: 1 Insufficient nvidia.com/gpu."), None);
    }

    #[test]
    fn a_pod_prepares_until_its_sandbox_is_made() {
        let prepares = |ready: &str, node: Value, phase: &str| {
            let condition = json!([{"type": "PodReadyToStartContainers", "status": ready}]);
            let pod = json!({"spec": {"nodeName": node, "containers": []}, "status": {"phase": phase, "conditions": condition}});
            prepares(&serde_json::from_value(pod).expect("a pod"))
        };
        assert!(prepares("False", json!("hgx0"), "Pending"));
        assert!(!prepares("True", json!("hgx0"), "Pending"), "its image is being pulled");
        assert!(!prepares("False", Value::Null, "Pending"), "it has no node");
        assert!(!prepares("False", json!("hgx0"), "Failed"), "it is over");
    }

    #[test]
    fn who_asks_it_to_leave_is_told() {
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 90});
        let expected = Fate::Leaving { reason: "somebody deleted its pod".into(), within: Span::seconds(90) };
        check(deleted.clone(), json!({"phase": "Running"}), &expected);
        let target = |reason: &str| {
            json!({"phase": "Running", "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "by x."}]})
        };
        let reason = "a pod of higher priority took its place: by x".to_owned();
        let expected = Fate::Leaving { reason, within: Span::seconds(90) };
        check(deleted.clone(), target("PreemptionByScheduler"), &expected);
        let reason = "its pod was evicted, as `kubectl drain` does: by x".to_owned();
        let expected = Fate::Leaving { reason, within: Span::seconds(90) };
        check(deleted, target("EvictionByEvictionAPI"), &expected);
    }

    #[test]
    fn ends_are_told_apart() {
        let end = |code: i32, reason: &str| main(json!({"terminated": {"exitCode": code, "reason": reason}}));
        let expected = Fate::OutOfMemory { reason: "killed for want of memory (limit 1Gi)".into() };
        check(json!({}), json!({"phase": "Failed", "containerStatuses": end(137, "OOMKilled")}), &expected);
        let expected = Fate::Over { reason: "its container ended: exit code 0".into(), ran: true };
        check(json!({}), json!({"phase": "Succeeded", "containerStatuses": end(0, "Completed")}), &expected);
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "low on resource: memory. ",
            "containerStatuses": end(137, "Error")});
        let expected = Fate::Over { reason: "Evicted: low on resource: memory (exit code 137)".into(), ran: true };
        check(json!({}), evicted, &expected);
    }

    #[test]
    fn a_deleted_pod_is_quiet_once_kubelet_said_so() {
        let pod = |node: Value, state: Value| -> Pod {
            serde_json::from_value(json!({
                "spec": {"nodeName": node, "containers": []},
                "status": {"containerStatuses": main(state)},
            }))
            .expect("a pod")
        };
        assert!(quiet(&pod(json!("a"), json!({"terminated": {"exitCode": 0}}))));
        assert!(quiet(&pod(json!("a"), json!({"waiting": {}}))));
        assert!(!quiet(&pod(json!("a"), json!({"running": {}}))), "deleted by force");
        assert!(quiet(&pod(Value::Null, json!({"waiting": {}}))));
    }
}
