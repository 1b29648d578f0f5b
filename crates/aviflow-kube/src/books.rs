//! Nodes and pods as last seen; what changed of them, as observations.
//!
//! A pod is kept as five small facts, so that a cluster with many other workloads costs little.
//!
//! Invariant: what is reported of a node follows from the nodes and pods that are there now, never from the order
//! in which they were seen.

use crate::names;
use crate::profile::{NodeFacts, Profile};
use aviflow_engine::ports::Observation;
use aviflow_engine::telemetry::StreamKey;
use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::{BTreeMap, BTreeSet};

/// What counts of a pod for the books of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PodFacts {
    node: String,
    gpus: u32,
    ours: bool,
}

/// What is known of the cluster.
#[derive(Debug, Default)]
pub struct Books {
    profiles: Vec<Profile>,
    nodes: BTreeMap<String, NodeFacts>,
    /// What was last said of each node.
    said: BTreeMap<String, Said>,
    /// Pods that hold GPUs of a node, by their uid.
    pods: BTreeMap<String, PodFacts>,
    foreign: BTreeMap<String, u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    facts: Option<NodeFacts>,
    foreign: u32,
}

impl Books {
    /// Empty books of these pools.
    #[must_use]
    pub fn new(profiles: Vec<Profile>) -> Books {
        Books { profiles, ..Books::default() }
    }

    /// Other pools from now on. What nodes are follows when they are seen again.
    pub fn set_profiles(&mut self, profiles: Vec<Profile>) {
        self.profiles = profiles;
    }

    /// The pools.
    #[must_use]
    pub fn profiles(&self) -> &[Profile] {
        &self.profiles
    }

    /// The pool's profile of a node that is there.
    #[must_use]
    pub fn profile_of(&self, node: &str) -> Option<&Profile> {
        let pool = &self.nodes.get(node)?.pool;
        self.profiles.iter().find(|p| p.pool == *pool)
    }

    /// The nodes that are there.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.nodes.keys().cloned().collect()
    }

    /// What is known of each.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeFacts> {
        self.nodes.values()
    }

    /// What is known of a node that is there.
    #[must_use]
    pub fn node_of(&self, node: &str) -> Option<&NodeFacts> {
        self.nodes.get(node)
    }

    /// All GPUs of a node that is there.
    #[must_use]
    pub fn gpus_of(&self, node: &str) -> u32 {
        self.nodes.get(node).map_or(0, |n| n.capacity)
    }

    /// Whether the node is there and its kubelet heard of.
    #[must_use]
    pub fn is_ready(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|n| n.ready)
    }

    /// Whether the node is there.
    #[must_use]
    pub fn is_there(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// A node as it is now.
    pub fn node(&mut self, node: &Node) -> Vec<Observation> {
        let Some(name) = node.metadata.name.clone() else { return Vec::new() };
        match NodeFacts::of(node, &self.profiles) {
            Some(facts) if facts.capacity > 0 => {
                self.nodes.insert(name.clone(), facts);
            }
            // A kubelet that starts anew has no devices until their plugin has registered again. What runs, goes on.
            Some(_) => {
                if let Some(known) = self.nodes.get_mut(&name) {
                    known.ready = false;
                }
            }
            None => {
                self.nodes.remove(&name);
            }
        }
        self.say(&name)
    }

    /// A node that is no more.
    pub fn node_deleted(&mut self, name: &str) -> Vec<Observation> {
        self.nodes.remove(name);
        self.say(name)
    }

    /// Begins a list of all nodes: those that are not in it are no more.
    pub fn nodes_listed(&mut self, names: &BTreeSet<String>) -> Vec<Observation> {
        let gone: Vec<String> = self.nodes.keys().filter(|n| !names.contains(*n)).cloned().collect();
        gone.iter().flat_map(|name| self.node_deleted(name)).collect()
    }

    /// A pod as it is now. `ours` says whether it belongs to a live attempt; what is left of others, and what
    /// keeps GPUs for a gang, is neither ours nor foreign until it is gone.
    pub fn pod(&mut self, pod: &Pod, ours: impl Fn(StreamKey) -> bool) -> Vec<Observation> {
        let Some(uid) = pod.metadata.uid.clone() else { return Vec::new() };
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let mine = names::worker(&labels).is_some_and(ours)
            || labels.get(names::MANAGED_BY).map(String::as_str) == Some(names::AVIFLOW);
        let facts = pod.spec.as_ref().and_then(|s| s.node_name.clone()).filter(|_| !is_over(pod)).and_then(|node| {
            let profile = self.nodes.get(&node).and_then(|n| self.profiles.iter().find(|p| p.pool == n.pool));
            let resource = profile.or(self.profiles.first()).map(|p| p.kubernetes.gpu_resource.as_str())?;
            let gpus = gpus(pod, resource);
            (gpus > 0).then_some(PodFacts { node, gpus, ours: mine })
        });
        self.replace(uid, facts)
    }

    /// A pod that is no more.
    pub fn pod_deleted(&mut self, uid: &str) -> Vec<Observation> {
        self.replace(uid.to_owned(), None)
    }

    /// After a list of all pods: those that are not in it are no more.
    pub fn pods_listed(&mut self, uids: &BTreeSet<String>) -> Vec<Observation> {
        let gone: Vec<String> = self.pods.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        gone.iter().flat_map(|uid| self.pod_deleted(uid)).collect()
    }

    fn replace(&mut self, uid: String, facts: Option<PodFacts>) -> Vec<Observation> {
        let before = match facts.clone() {
            Some(facts) => self.pods.insert(uid, facts),
            None => self.pods.remove(&uid),
        };
        if before == facts {
            return Vec::new();
        }
        let mut nodes = BTreeSet::new();
        for (facts, sign) in [(before, false), (facts, true)] {
            let Some(PodFacts { node, gpus, ours: false }) = facts else { continue };
            let count = self.foreign.entry(node.clone()).or_default();
            *count = if sign { *count + gpus } else { count.saturating_sub(gpus) };
            if *count == 0 {
                self.foreign.remove(&node);
            }
            nodes.insert(node);
        }
        nodes.iter().flat_map(|node| self.say(node)).collect()
    }

    /// What is new of a node.
    fn say(&mut self, name: &str) -> Vec<Observation> {
        let facts = self.nodes.get(name).cloned();
        let now =
            Said { foreign: if facts.is_some() { self.foreign.get(name).copied().unwrap_or(0) } else { 0 }, facts };
        let before = self.said.get(name).cloned().unwrap_or_default();
        if now == before {
            return Vec::new();
        }
        let said = observations(name, &before, &now);
        if now.facts.is_some() {
            self.said.insert(name.to_owned(), now);
        } else {
            self.said.remove(name);
        }
        said
    }
}

fn observations(name: &str, before: &Said, now: &Said) -> Vec<Observation> {
    let name = name.to_owned();
    let mut said = Vec::new();
    let Some(facts) = &now.facts else {
        if let Some(was) = &before.facts {
            let NodeFacts { pool, gpu_type, path, .. } = was.clone();
            said.push(Observation::NodeSeen { name: name.clone(), pool, gpu_type, gpus: 0, path });
            said.push(Observation::NodeGone { name });
        }
        return said;
    };
    let new = before.facts.is_none();
    let was = before.facts.as_ref().unwrap_or(facts);
    let same = (&was.pool, &was.gpu_type, was.capacity, &was.path)
        == (&facts.pool, &facts.gpu_type, facts.capacity, &facts.path);
    if new || !same || (facts.ready && !was.ready) {
        let NodeFacts { pool, gpu_type, capacity: gpus, path, .. } = facts.clone();
        said.push(Observation::NodeSeen { name: name.clone(), pool, gpu_type, gpus, path });
    }
    if new || (&was.closed, was.vacate) != (&facts.closed, facts.vacate) {
        let (reason, vacate) = (facts.closed.clone(), facts.vacate);
        said.push(Observation::NodeClosed { name: name.clone(), reason, vacate });
    }
    if new || was.capacity - was.allocatable != facts.capacity - facts.allocatable {
        // Kubernetes counts broken devices and does not say which: the last ones, so that the others keep their numbers.
        let broken = (facts.allocatable..facts.capacity).collect();
        said.push(Observation::NodeHealth { name: name.clone(), broken });
    }
    if new || before.foreign != now.foreign {
        said.push(Observation::NodeForeign { name: name.clone(), gpus: now.foreign });
    }
    if !facts.ready && (new || was.ready) {
        said.push(Observation::NodeGone { name });
    }
    said
}

/// Whether a pod has ended and holds no devices any more.
#[must_use]
pub fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// GPUs that a pod holds: what its containers ask for together, or more where one that runs before them asks for
/// more; containers that go on beside them (`restartPolicy: Always`) count with both. This is kube-scheduler's rule.
#[must_use]
pub fn gpus(pod: &Pod, resource: &str) -> u32 {
    let Some(spec) = &pod.spec else { return 0 };
    let of = |c: &k8s_openapi::api::core::v1::Container| -> u32 {
        let resources = c.resources.as_ref();
        let limit = resources.and_then(|r| r.limits.as_ref()?.get(resource));
        let quantity = limit.or_else(|| resources.and_then(|r| r.requests.as_ref()?.get(resource)));
        quantity.and_then(|q| q.0.parse().ok()).unwrap_or(0)
    };
    let mut beside = 0;
    let mut most = 0;
    for container in spec.init_containers.iter().flatten() {
        if container.restart_policy.as_deref() == Some("Always") {
            beside += of(container);
            most = most.max(beside);
        } else {
            most = most.max(beside + of(container));
        }
    }
    most.max(beside + spec.containers.iter().map(of).sum::<u32>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(name: &str, allocatable: u32, ready: bool) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name},
            "status": {
                "capacity": {"nvidia.com/gpu": "8"},
                "allocatable": {"nvidia.com/gpu": allocatable.to_string()},
                "conditions": [{"type": "Ready", "status": if ready { "True" } else { "Unknown" }}],
            },
        }))
        .expect("a node")
    }

    fn pod(uid: &str, node: Option<&str>, gpus: u32, phase: &str, labels: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"uid": uid, "labels": labels},
            "spec": {"nodeName": node, "containers": [
                {"name": "a", "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}}},
            ]},
            "status": {"phase": phase},
        }))
        .expect("a pod")
    }

    fn foreign(name: &str, gpus: u32) -> Observation {
        Observation::NodeForeign { name: name.into(), gpus }
    }

    fn books() -> Books {
        Books::new(vec![Profile::nvidia("main")])
    }

    #[test]
    fn every_pod_counts_until_it_is_gone() {
        let mut books = books();
        let none = json!({});
        // Seen before its node: counted once that is there.
        assert_eq!(books.pod(&pod("1", Some("a"), 2, "Running", none.clone()), |_| false), []);
        let first = books.node(&node("a", 8, true));
        assert!(first.contains(&foreign("a", 2)), "{first:?}");
        assert_eq!(books.node(&node("a", 8, true)), [], "nothing new");
        assert_eq!(books.pod(&pod("2", Some("a"), 4, "Pending", none.clone()), |_| false), [foreign("a", 6)]);
        assert_eq!(books.pod(&pod("2", Some("a"), 4, "Running", none.clone()), |_| false), []);
        assert_eq!(books.pod(&pod("3", None, 8, "Pending", none.clone()), |_| false), [], "on no node yet");
        assert_eq!(books.pod(&pod("1", Some("a"), 2, "Succeeded", none), |_| false), [foreign("a", 4)]);
        assert_eq!(books.pod_deleted("2"), [foreign("a", 0)]);
        assert_eq!(books.pod_deleted("2"), []);
    }

    #[test]
    fn our_own_are_not_foreign() {
        let mut books = books();
        books.node(&node("a", 8, true));
        let labels =
            json!({names::MANAGED_BY: names::AVIFLOW, names::JOB: "1", names::ATTEMPT: "1", names::WORKER: "0"});
        assert_eq!(books.pod(&pod("1", Some("a"), 8, "Running", labels.clone()), |_| true), []);
        assert_eq!(books.pod(&pod("1", Some("a"), 8, "Running", labels), |_| false), [], "left over");
        let placeholder = json!({names::MANAGED_BY: names::AVIFLOW, names::PLACEHOLDER: "true"});
        assert_eq!(books.pod(&pod("2", Some("a"), 2, "Running", placeholder), |_| true), []);
    }

    #[test]
    fn what_is_not_listed_again_is_gone() {
        let mut books = books();
        books.node(&node("a", 8, true));
        books.node(&node("b", 8, true));
        books.pod(&pod("1", Some("a"), 3, "Running", json!({})), |_| false);
        assert_eq!(books.pods_listed(&BTreeSet::new()), [foreign("a", 0)]);
        let gone = books.nodes_listed(&["a".to_owned()].into());
        assert_eq!(gone.last(), Some(&Observation::NodeGone { name: "b".into() }));
        assert!(matches!(&gone[0], Observation::NodeSeen { gpus: 0, name, .. } if name == "b"));
    }

    #[test]
    fn devices_break_and_nodes_fall_silent() {
        let mut books = books();
        books.node(&node("a", 8, true));
        let broken = books.node(&node("a", 6, true));
        assert_eq!(broken, [Observation::NodeHealth { name: "a".into(), broken: vec![6, 7] }]);
        assert_eq!(books.node(&node("a", 6, false)), [Observation::NodeGone { name: "a".into() }]);
        let back = books.node(&node("a", 8, true));
        assert!(matches!(&back[0], Observation::NodeSeen { gpus: 8, .. }), "{back:?}");
        assert_eq!(back[1], Observation::NodeHealth { name: "a".into(), broken: vec![] });
    }

    #[test]
    fn a_kubelet_that_starts_anew_takes_no_gpus_away() {
        let mut books = books();
        let bare = |labels: Value| -> Node {
            serde_json::from_value(json!({"metadata": {"name": "a", "labels": labels}, "status": {}})).expect("a node")
        };
        assert_eq!(books.node(&bare(json!({}))), [], "no GPUs, no node");
        books.node(&node("a", 8, true));
        assert_eq!(books.node(&bare(json!({}))), [Observation::NodeGone { name: "a".into() }]);
        assert!(matches!(&books.node(&node("a", 8, true))[..], [Observation::NodeSeen { gpus: 8, .. }]));
    }

    #[test]
    fn a_pod_holds_what_kube_scheduler_says() {
        let container = |gpus: u32, more: Value| {
            let mut c = json!({"name": "c", "resources": {"requests": {"nvidia.com/gpu": gpus.to_string()}}});
            c.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
            c
        };
        let sidecar = json!({"restartPolicy": "Always"});
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [container(1, sidecar), container(4, json!({}))],
            "containers": [container(2, json!({})), container(1, json!({}))],
        }}))
        .expect("a pod");
        assert_eq!(gpus(&pod, "nvidia.com/gpu"), 5);
        assert_eq!(gpus(&pod, "amd.com/gpu"), 0);
    }
}
