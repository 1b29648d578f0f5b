//! Who holds the GPUs of a cluster, and what waits for them: every pod, whoever made it.

use crate::books::{self, Books};
use aviflow_api::rest::{FreeGpus, HoldingPod, Observed, ObservedNamespace, ObservedNode, PendingPod};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A pod that asks for GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sighting {
    namespace: String,
    pod: String,
    owner: Option<String>,
    /// Where it is; none while it waits.
    node: Option<String>,
    gpus: u32,
    /// Since when it is there, or has its node.
    since: i64,
    reason: String,
}

/// All pods that ask for GPUs, by their uid.
#[derive(Debug, Default)]
pub struct Sightings(BTreeMap<String, Sighting>);

impl Sightings {
    /// A pod as it is now.
    pub fn pod(&mut self, pod: &Pod, books: &Books) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        match sighting(pod, books) {
            Some(sighting) => self.0.insert(uid, sighting),
            None => self.0.remove(&uid),
        };
    }

    /// A pod that is no more.
    pub fn gone(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// After a list of all pods: those that are not in it are no more.
    pub fn listed(&mut self, uids: &BTreeSet<String>) {
        self.0.retain(|uid, _| uids.contains(uid));
    }

    /// The cluster as it is now.
    #[must_use]
    pub fn observed(&self, books: &Books, observing: bool, now: i64) -> Observed {
        let mut nodes: BTreeMap<&str, ObservedNode> = books.nodes().map(|n| (n.name.as_str(), node(n))).collect();
        let mut namespaces: BTreeMap<&str, ObservedNamespace> = BTreeMap::new();
        let mut places: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut pending = Vec::new();
        for s in self.0.values() {
            let (namespace, pod, owner) = (s.namespace.clone(), s.pod.clone(), s.owner.clone());
            let of = namespaces.entry(&s.namespace).or_default();
            of.namespace.clone_from(&s.namespace);
            let Some(name) = &s.node else {
                of.pending += s.gpus;
                pending.push(PendingPod {
                    namespace,
                    pod,
                    owner,
                    gpus: s.gpus,
                    since: s.since,
                    reason: s.reason.clone(),
                });
                continue;
            };
            of.gpus += s.gpus;
            of.pods += 1;
            of.since = Some(of.since.map_or(s.since, |since| since.min(s.since)));
            of.gpu_ms += i64::from(s.gpus) * (now - s.since).max(0);
            places.entry(&s.namespace).or_default().insert(name);
            if let Some(node) = nodes.get_mut(name.as_str()) {
                node.free = node.free.saturating_sub(s.gpus);
                node.pods.push(HoldingPod { namespace, pod, owner, gpus: s.gpus, since: s.since });
            }
        }
        for (namespace, on) in places {
            if let Some(of) = namespaces.get_mut(namespace) {
                of.nodes = u32::try_from(on.len()).unwrap_or(u32::MAX);
            }
        }
        let mut nodes: Vec<ObservedNode> = nodes.into_values().collect();
        nodes.iter_mut().for_each(|n| n.pods.sort_by(|a, b| (a.since, &a.pod).cmp(&(b.since, &b.pod))));
        let mut namespaces: Vec<ObservedNamespace> = namespaces.into_values().collect();
        namespaces.sort_by(|a, b| (Reverse(a.gpus), &a.namespace).cmp(&(Reverse(b.gpus), &b.namespace)));
        pending.sort_by(|a, b| (a.since, &a.namespace, &a.pod).cmp(&(b.since, &b.namespace, &b.pod)));
        Observed { at: now, observing, metrics: false, free: free(&nodes), nodes, namespaces, pending }
    }
}

fn node(facts: &crate::profile::NodeFacts) -> ObservedNode {
    ObservedNode {
        name: facts.name.clone(),
        pool: facts.pool.clone(),
        gpu_type: facts.gpu_type.clone(),
        gpus: facts.capacity,
        broken: facts.capacity - facts.allocatable,
        free: facts.allocatable,
        ready: facts.ready,
        closed: facts.closed.clone(),
        pods: Vec::new(),
    }
}

/// Only what can be had: on nodes that are heard of and open.
fn free(nodes: &[ObservedNode]) -> Vec<FreeGpus> {
    let mut types: BTreeMap<&str, FreeGpus> = BTreeMap::new();
    for node in nodes {
        let of = types.entry(&node.gpu_type).or_default();
        of.gpu_type.clone_from(&node.gpu_type);
        of.gpus += node.gpus;
        if !node.ready || node.closed.is_some() {
            continue;
        }
        of.free += node.free;
        of.largest = of.largest.max(node.free);
        if node.free > 0 && node.free == node.gpus {
            of.whole_nodes += 1;
        } else {
            of.scattered += node.free;
        }
    }
    types.into_values().collect()
}

fn sighting(pod: &Pod, books: &Books) -> Option<Sighting> {
    if books::is_over(pod) {
        return None;
    }
    let metadata = &pod.metadata;
    let node = pod.spec.as_ref().and_then(|s| s.node_name.clone());
    let profile = node.as_ref().and_then(|n| books.profile_of(n));
    // One that waits may ask for any pool's.
    let resources = profile.map_or_else(|| books.profiles().iter().collect::<Vec<_>>(), |p| vec![p]);
    let gpus = resources.into_iter().map(|p| books::gpus(pod, &p.kubernetes.gpu_resource)).max().unwrap_or(0);
    if gpus == 0 {
        return None;
    }
    let status = pod.status.as_ref();
    let scheduled = status.and_then(|s| s.conditions.as_ref()?.iter().find(|c| c.type_ == "PodScheduled"));
    let since = match &node {
        Some(_) => scheduled
            .and_then(|c| c.last_transition_time.as_ref())
            .or_else(|| status?.start_time.as_ref())
            .or(metadata.creation_timestamp.as_ref()),
        None => metadata.creation_timestamp.as_ref(),
    };
    let reason = scheduled.filter(|c| c.status == "False").map(|c| match (&c.message, &c.reason) {
        (Some(message), _) if !message.is_empty() => message.clone(),
        (_, reason) => reason.clone().unwrap_or_default(),
    });
    let owners = metadata.owner_references.iter().flatten();
    let owner = owners.filter(|o| o.controller == Some(true)).map(|o| format!("{}/{}", o.kind, o.name)).next();
    Some(Sighting {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        pod: metadata.name.clone().unwrap_or_default(),
        owner,
        gpus,
        since: since.map_or(0, millis),
        reason: reason.filter(|_| node.is_none()).unwrap_or_default(),
        node,
    })
}

fn millis(time: &Time) -> i64 {
    time.0.as_millisecond()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use k8s_openapi::api::core::v1::Node;
    use serde_json::{Value, json};

    fn node(name: &str, healthy: u32, more: Value) -> Node {
        let mut node = json!({
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "H100"}},
            "status": {
                "capacity": {"nvidia.com/gpu": "8"},
                "allocatable": {"nvidia.com/gpu": healthy.to_string()},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        node["spec"] = more;
        serde_json::from_value(node).expect("a node")
    }

    fn pod(uid: &str, namespace: &str, node: Option<&str>, gpus: u32, phase: &str) -> Pod {
        let scheduled = match node {
            Some(_) => json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": "1970-01-01T00:00:02Z"}),
            None => json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}),
        };
        serde_json::from_value(json!({
            "metadata": {
                "uid": uid, "name": format!("pod-{uid}"), "namespace": namespace,
                "creationTimestamp": "1970-01-01T00:00:01Z",
                "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u", "controller": true}],
            },
            "spec": {"nodeName": node, "containers": [
                {"name": "a", "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}}},
            ]},
            "status": {"phase": phase, "conditions": [scheduled]},
        }))
        .expect("a pod")
    }

    fn books(nodes: &[Node]) -> Books {
        let mut books = Books::new(vec![Profile::nvidia("main")]);
        nodes.iter().for_each(|n| drop(books.node(n)));
        books
    }

    #[test]
    fn who_holds_what_and_how_long() {
        let books = books(&[node("a", 8, json!({})), node("b", 7, json!({})), node("c", 8, json!({}))]);
        let mut seen = Sightings::default();
        for pod in [
            pod("1", "nlp", Some("a"), 2, "Running"),
            pod("2", "nlp", Some("b"), 4, "Running"),
            pod("3", "vision", Some("a"), 1, "Pending"),
            pod("4", "vision", None, 8, "Pending"),
            pod("5", "web", Some("a"), 0, "Running"),
            pod("6", "nlp", Some("c"), 8, "Succeeded"),
        ] {
            seen.pod(&pod, &books);
        }
        let observed = seen.observed(&books, true, 12_000);
        assert_eq!((observed.observing, observed.metrics), (true, false));
        let nlp = ObservedNamespace {
            namespace: "nlp".into(),
            gpus: 6,
            pods: 2,
            nodes: 2,
            since: Some(2000),
            gpu_ms: 60_000,
            pending: 0,
        };
        let vision = ObservedNamespace {
            namespace: "vision".into(),
            gpus: 1,
            pods: 1,
            nodes: 1,
            since: Some(2000),
            gpu_ms: 10_000,
            pending: 8,
        };
        assert_eq!(observed.namespaces, [nlp, vision], "who holds most comes first; without GPUs there is none");
        let pending = &observed.pending[0];
        assert_eq!((pending.pod.as_str(), pending.gpus, pending.since), ("pod-4", 8, 1000));
        assert!(pending.reason.contains("Insufficient"), "{pending:?}");
        assert_eq!(pending.owner.as_deref(), Some("Job/train"));
        let free: Vec<(u32, u32, usize)> = observed.nodes.iter().map(|n| (n.free, n.broken, n.pods.len())).collect();
        assert_eq!(free, [(5, 0, 2), (3, 1, 1), (8, 0, 0)]);
        let lie = FreeGpus { gpu_type: "H100".into(), gpus: 24, free: 16, whole_nodes: 1, scattered: 8, largest: 8 };
        assert_eq!(observed.free, [lie]);
    }

    #[test]
    fn what_is_gone_is_seen_no_more() {
        let books = books(&[node("a", 8, json!({}))]);
        let mut seen = Sightings::default();
        seen.pod(&pod("1", "nlp", None, 8, "Pending"), &books);
        seen.pod(&pod("1", "nlp", Some("a"), 8, "Running"), &books);
        let held = seen.observed(&books, false, 5000);
        assert_eq!((held.pending.len(), held.nodes[0].free, held.namespaces[0].pending), (0, 0, 0));
        seen.pod(&pod("2", "nlp", Some("a"), 1, "Running"), &books);
        seen.listed(&["2".to_owned()].into());
        assert_eq!(seen.observed(&books, false, 5000).nodes[0].free, 7);
        seen.gone("2");
        let empty = seen.observed(&books, false, 5000);
        assert_eq!((empty.nodes[0].free, empty.namespaces.len()), (8, 0));
    }

    #[test]
    fn what_nobody_can_have_is_not_free() {
        let books = books(&[node("a", 8, json!({"unschedulable": true})), node("b", 0, json!({}))]);
        let observed = Sightings::default().observed(&books, true, 0);
        assert_eq!((observed.free[0].gpus, observed.free[0].free, observed.free[0].whole_nodes), (16, 0, 0));
        assert!(observed.nodes[0].closed.is_some() && observed.nodes[0].free == 8);
    }
}
