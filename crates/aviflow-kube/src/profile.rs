//! What a pool's document says of Kubernetes, and what a node says of itself.

use aviflow_api::admin::kubernetes::{KubernetesSpec, Toleration, TolerationOperator};
use k8s_openapi::api::core::v1::{Node, Taint};
use std::collections::BTreeMap;

/// How a pool appears in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The pool.
    pub pool: String,
    /// What its document says.
    pub kubernetes: KubernetesSpec,
}

impl Profile {
    /// A pool of all nodes that have `nvidia.com/gpu`.
    #[must_use]
    pub fn nvidia(pool: &str) -> Profile {
        Profile { pool: pool.to_owned(), kubernetes: KubernetesSpec::default() }
    }

    /// Whether a node belongs to the pool.
    #[must_use]
    pub fn has(&self, labels: &BTreeMap<String, String>) -> bool {
        self.kubernetes.node_selector.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// The accelerator type of a node with these labels: what the pool calls it, else what the label says, else
    /// the resource's name.
    #[must_use]
    pub fn gpu_type(&self, labels: &BTreeMap<String, String>) -> String {
        let value = labels.get(&self.kubernetes.gpu_type_label).unwrap_or(&self.kubernetes.gpu_resource);
        self.kubernetes.gpu_type(value).to_owned()
    }

    /// The domains of a node with these labels, smallest first; empty unless it has all of the labels.
    #[must_use]
    pub fn path(&self, labels: &BTreeMap<String, String>) -> Vec<String> {
        let keys = &self.kubernetes.topology_keys;
        let path: Option<Vec<String>> = keys.iter().map(|key| labels.get(key).cloned()).collect();
        path.unwrap_or_default()
    }
}

/// What counts of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// Its accelerator type.
    pub gpu_type: String,
    /// GPUs that its device plugin registered, whole or broken.
    pub capacity: u32,
    /// Those that the plugin calls healthy.
    pub allocatable: u32,
    /// Its domains.
    pub path: Vec<String>,
    /// Whether its kubelet is heard of.
    pub ready: bool,
    /// Why new work may not start there, if so.
    pub closed: Option<String>,
    /// Whether others want it empty.
    pub vacate: bool,
    /// Its operating system and architecture, as `linux/amd64`.
    pub platform: String,
}

impl NodeFacts {
    /// Reads a node; none where it belongs to no pool.
    #[must_use]
    pub fn of(node: &Node, profiles: &[Profile]) -> Option<NodeFacts> {
        let name = node.metadata.name.clone()?;
        let none = BTreeMap::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&none);
        let profile = profiles.iter().find(|p| p.has(labels))?;
        let status = node.status.as_ref()?;
        let count = |of: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>| {
            let quantity = of?.get(&profile.kubernetes.gpu_resource)?;
            quantity.0.parse::<u32>().ok()
        };
        let capacity = count(status.capacity.as_ref()).unwrap_or(0).min(64);
        let allocatable = count(status.allocatable.as_ref()).unwrap_or(0).min(capacity);
        let condition = |kind: &str| status.conditions.iter().flatten().find(|c| c.type_ == kind);
        let ready = condition("Ready").is_some_and(|c| c.status == "True");
        let upgrade = upgrade(labels);
        let info = status.node_info.as_ref();
        Some(NodeFacts {
            name,
            pool: profile.pool.clone(),
            gpu_type: profile.gpu_type(labels),
            capacity,
            allocatable,
            path: profile.path(labels),
            ready,
            platform: info.map(|i| format!("{}/{}", i.operating_system, i.architecture)).unwrap_or_default(),
            vacate: upgrade.as_ref().is_some_and(|u| u.vacate),
            closed: upgrade.map(|u| u.reason).or_else(|| closed(node, profile)),
        })
    }
}

/// The label in which NVIDIA's GPU Operator says how far the upgrade of a node's driver is.
pub const DRIVER_UPGRADE: &str = "nvidia.com/gpu-driver-upgrade-state";

/// What an upgrade of the driver means for a node.
struct Upgrade {
    reason: String,
    vacate: bool,
}

/// Reads [`DRIVER_UPGRADE`]; its states are those of NVIDIA's `k8s-operator-libs` (`pkg/upgrade/consts.go`).
///
/// Until the operator cordons a node nothing changes; then it waits for jobs, deletes or drains pods, and restarts
/// its driver. Jobs that may be suspended leave from the first of these on, by their next checkpoint, so that
/// the operator finds none; a job that may not is what it waits for.
fn upgrade(labels: &BTreeMap<String, String>) -> Option<Upgrade> {
    let state = labels.get(DRIVER_UPGRADE)?.as_str();
    let vacate = match state {
        "cordon-required"
        | "wait-for-jobs-required"
        | "pod-deletion-required"
        | "drain-required"
        | "node-maintenance-required" => true,
        "post-maintenance-required"
        | "pod-restart-required"
        | "validation-required"
        | "uncordon-required"
        | "upgrade-failed" => false,
        // None is under way: `upgrade-required`, `upgrade-done`, or a word of a later version, with which it cordons.
        _ => return None,
    };
    Some(Upgrade { reason: format!("the GPU Operator upgrades its driver ({state})"), vacate })
}

/// Taints of Kubernetes' own that say nothing that a condition does not say.
const CONDITIONS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// Why pods of a pool cannot come to a node now, as an administrator reads it.
fn closed(node: &Node, profile: &Profile) -> Option<String> {
    let spec = node.spec.as_ref()?;
    if spec.unschedulable == Some(true) {
        return Some("cordoned in Kubernetes (`kubectl uncordon` opens it)".to_owned());
    }
    let bars = |taint: &&Taint| {
        taint.effect != "PreferNoSchedule"
            && taint.key != crate::names::KEEP_TAINT
            && !CONDITIONS.contains(&taint.key.as_str())
            && !profile.kubernetes.tolerations.iter().any(|t| tolerates(t, taint))
    };
    let taint = spec.taints.iter().flatten().find(bars)?;
    let value = taint.value.as_deref().map_or(String::new(), |v| format!("={v}"));
    Some(format!("tainted {}{value}:{}; the pool has no toleration for it", taint.key, taint.effect))
}

/// Kubernetes' own rule (`ToleratesTaint`).
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.is_none_or(|e| format!("{e:?}") == taint.effect);
    let key = toleration.key.as_deref().is_none_or(|k| k == taint.key);
    let value = match toleration.operator {
        TolerationOperator::Exists => true,
        TolerationOperator::Equal => toleration.value.as_deref().unwrap_or("") == taint.value.as_deref().unwrap_or(""),
    };
    effect && key && value
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(spec: Value, status: Value) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": "hgx0", "labels": {
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                "fabric.topograph.run/tier-0": "leaf-3",
                "fabric.topograph.run/tier-1": "spine-1",
            }},
            "spec": spec,
            "status": status,
        }))
        .expect("a node")
    }

    fn h100() -> Profile {
        let mut profile = Profile::nvidia("main");
        profile.kubernetes.gpu_types = [("H100".to_owned(), vec!["NVIDIA-H100-80GB-HBM3".to_owned()])].into();
        profile.kubernetes.topology_keys =
            vec!["fabric.topograph.run/tier-0".into(), "fabric.topograph.run/tier-1".into()];
        profile
    }

    fn status(allocatable: &str, ready: &str) -> Value {
        json!({
            "capacity": {"nvidia.com/gpu": "8", "cpu": "64"},
            "allocatable": {"nvidia.com/gpu": allocatable},
            "conditions": [{"type": "Ready", "status": ready}],
        })
    }

    #[test]
    fn a_node_is_what_its_pool_makes_of_it() {
        let facts = NodeFacts::of(&node(json!({}), status("7", "True")), &[h100()]).expect("facts");
        let path = vec!["leaf-3".to_owned(), "spine-1".to_owned()];
        assert_eq!(
            facts,
            NodeFacts {
                name: "hgx0".into(),
                pool: "main".into(),
                gpu_type: "H100".into(),
                capacity: 8,
                allocatable: 7,
                path,
                ready: true,
                closed: None,
                vacate: false,
                platform: String::new(),
            }
        );
        let unknown = NodeFacts::of(&node(json!({}), status("8", "Unknown")), &[Profile::nvidia("all")]);
        let unknown = unknown.expect("facts");
        assert!(!unknown.ready && unknown.gpu_type == "NVIDIA-H100-80GB-HBM3" && unknown.path.is_empty());
        let mut elsewhere = h100();
        elsewhere.kubernetes.node_selector = [("a".to_owned(), "b".to_owned())].into();
        assert_eq!(NodeFacts::of(&node(json!({}), status("8", "True")), &[elsewhere]), None);
    }

    #[test]
    fn the_gpu_operator_says_when_a_node_is_to_be_empty() {
        #[track_caller]
        fn check(state: &str, expected: Option<bool>) {
            let mut of = node(json!({}), status("8", "True"));
            of.metadata.labels.get_or_insert_default().insert(DRIVER_UPGRADE.to_owned(), state.to_owned());
            let facts = NodeFacts::of(&of, &[h100()]).expect("facts");
            assert_eq!(facts.closed.as_ref().map(|_| facts.vacate), expected, "{state}");
            assert!(facts.closed.is_none_or(|reason| reason.contains(state)));
        }
        check("upgrade-required", None);
        check("cordon-required", Some(true));
        check("wait-for-jobs-required", Some(true));
        check("drain-required", Some(true));
        check("pod-restart-required", Some(false));
        check("upgrade-failed", Some(false));
        check("upgrade-done", None);
        check("", None);
    }

    #[test]
    fn a_node_is_closed_by_others_alone() {
        #[track_caller]
        fn check(spec: Value, expected: Option<&str>) {
            let toleration = serde_json::from_value(json!({"key": "nvidia.com/gpu", "operator": "Exists"}));
            let mut profile = h100();
            profile.kubernetes.tolerations = vec![toleration.expect("a toleration")];
            let facts = NodeFacts::of(&node(spec, status("8", "True")), &[profile]).expect("facts");
            assert_eq!(facts.closed.as_deref().map(|c| c.split(';').next().unwrap_or(c)), expected);
        }
        let taint = |key: &str, effect: &str| json!({"taints": [{"key": key, "value": "v", "effect": effect}]});
        check(json!({"unschedulable": true}), Some("cordoned in Kubernetes (`kubectl uncordon` opens it)"));
        check(taint("nvidia.com/gpu", "NoSchedule"), None);
        check(taint("mine", "NoSchedule"), Some("tainted mine=v:NoSchedule"));
        check(taint("mine", "PreferNoSchedule"), None);
        check(taint("aviflow.dev/keep", "NoSchedule"), None);
        check(taint("node.kubernetes.io/unreachable", "NoExecute"), None);
    }
}
