//! Keeping others away from GPUs that are promised to a gang: by a taint where all of a node's are, else by a pod
//! that holds them in the gang's stead. Where an administrator says that nobody else uses a pool's GPUs, nothing needs
//! to be kept.
//!
//! A placeholder goes when the gang's pods are there already: of all that wait, kube-scheduler takes those of the
//! highest priority first, and job pods are above what has none. Invariant: what is kept of a node is a level; it is
//! compared with what the watches say, and changed where it differs.

use crate::api::{insist, persist};
use crate::body::Body;
use crate::names;
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What is kept of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    gpus: u32,
    whole: bool,
}

/// The taints of a node.
#[derive(Clone, Debug, Default)]
struct Taints {
    /// Whether ours is among them, or is about to be.
    ours: bool,
    /// All, as of this version of the node.
    all: Vec<Taint>,
    version: Option<String>,
}

impl Taints {
    fn of(node: &Node) -> Taints {
        let all = node.spec.as_ref().and_then(|s| s.taints.clone()).unwrap_or_default();
        let version = node.metadata.resource_version.clone();
        Taints { ours: all.iter().any(|t| t.key == names::KEEP_TAINT), all, version }
    }
}

/// What is kept, and what is there to keep it.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    said: BTreeMap<String, Kept>,
    tainted: BTreeMap<String, Taints>,
    /// GPUs of the placeholder of each node.
    holders: BTreeMap<String, u32>,
    /// Nothing is undone before the first word of a term.
    told: bool,
}

impl Keeping {
    /// A term begins: nothing is kept but what is said now.
    pub(crate) fn begin(&mut self) {
        self.said.clear();
        self.told = true;
    }

    /// Says what is kept of a node.
    pub(crate) fn set(&mut self, node: &str, gpus: u32, whole: bool) {
        if gpus == 0 {
            self.said.remove(node);
        } else {
            self.said.insert(node.to_owned(), Kept { gpus, whole });
        }
    }

    /// What is to be kept of a node that is shared with others, or is not.
    fn wanted(&self, node: &str, shared: bool) -> Option<&Kept> {
        self.said.get(node).filter(|_| shared)
    }

    /// Whether a node must get the taint, or lose it.
    fn taint(&self, node: &str, shared: bool) -> Option<bool> {
        let wanted = self.wanted(node, shared).is_some_and(|k| k.whole);
        let is = self.tainted.get(node)?.ours;
        (self.told && wanted != is).then_some(wanted)
    }

    /// Whether a placeholder is on the node, or on its way out.
    pub(crate) fn holds(&self, node: &str) -> bool {
        self.holders.contains_key(node)
    }

    /// How many GPUs the placeholder of a node must hold, if another number than it does.
    fn holder(&self, node: &str, shared: bool) -> Option<u32> {
        let wanted = self.wanted(node, shared).filter(|k| !k.whole).map_or(0, |k| k.gpus);
        let is = self.holders.get(node).copied().unwrap_or(0);
        (self.told && wanted != is).then_some(wanted)
    }
}

/// The name of a node's placeholder.
fn holder_name(node: &str) -> String {
    format!("aviflow-keep-{node}")
}

/// Puts the taint on a node or takes it off, and leaves those of others, which are known as they were a moment ago.
async fn put_taint(api: &Api<Node>, name: &str, taint: bool, known: Taints) {
    let mut taints = known;
    loop {
        taints.all.retain(|t| t.key != names::KEEP_TAINT);
        let mut all = json!(taints.all);
        if let Some(all) = all.as_array_mut().filter(|_| taint) {
            all.push(json!({"key": names::KEEP_TAINT, "value": "claimed", "effect": "NoSchedule"}));
        }
        // The list is one value: it is written only over the one that was read.
        let patch = Patch::Merge(json!({"metadata": {"resourceVersion": taints.version}, "spec": {"taints": all}}));
        match insist(|| async { api.patch(name, &PatchParams::default(), &patch).await.map(|_| ()) }).await {
            Err(refused) if refused.is_conflict() => {}
            _ => return,
        }
        // A node that is gone needs none.
        let Ok(node) = insist(|| async { api.get(name).await }).await else { return };
        taints = Taints::of(&node);
    }
}

impl Body {
    /// Sees whether a node is tainted.
    pub(crate) fn kept_node(&mut self, node: &Node) {
        let Some(name) = node.metadata.name.clone() else { return };
        self.keeping.tainted.insert(name.clone(), Taints::of(node));
        self.keep(&name);
    }

    /// Sees a placeholder, or its end.
    pub(crate) fn kept_pod(&mut self, pod: &Pod, there: bool) {
        let node = pod.metadata.labels.as_ref().and_then(|l| l.get(names::PLACEHOLDER).cloned());
        let Some(node) = node else { return };
        let resource = self.books.profile_of(&node).map(|p| p.kubernetes.gpu_resource.clone());
        let gpus = resource.map_or(0, |r| crate::books::gpus(pod, &r));
        if there && pod.metadata.deletion_timestamp.is_none() {
            self.keeping.holders.insert(node.clone(), gpus);
        } else {
            self.keeping.holders.remove(&node);
        }
        self.keep(&node);
    }

    /// Changes what differs from what is wanted.
    pub(crate) fn keep(&mut self, node: &str) {
        let shared = self.books.profile_of(node).is_none_or(|p| p.kubernetes.shared);
        if let Some(taint) = self.keeping.taint(node, shared) {
            let Some(known) = self.keeping.tainted.get_mut(node) else { return };
            known.ours = taint;
            let (api, name) = (Api::<Node>::all(self.config.client.clone()), node.to_owned());
            let known = known.clone();
            tokio::spawn(async move { put_taint(&api, &name, taint, known).await });
        }
        if let Some(gpus) = self.keeping.holder(node, shared) {
            let Some(resource) = self.books.profile_of(node).map(|p| p.kubernetes.gpu_resource.clone()) else { return };
            let there = self.keeping.holders.contains_key(node);
            self.keeping.holders.insert(node.to_owned(), gpus);
            let api = Api::<Pod>::namespaced(self.config.client.clone(), &self.config.namespace);
            let (name, pod) = (holder_name(node), self.placeholder(node, &resource, gpus));
            tokio::spawn(async move {
                if there || gpus == 0 {
                    let _ = insist(|| async { api.delete(&name, &DeleteParams::default()).await.map(|_| ()) }).await;
                }
                // Its deletion, which takes a moment, wakes this again where another is wanted.
                if !there && gpus > 0 {
                    let _ = persist(|| async { api.create(&PostParams::default(), &pod).await.map(|_| ()) }).await;
                }
            });
        }
    }

    fn placeholder(&self, node: &str, resource: &str, gpus: u32) -> Pod {
        let security: Value = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
        let pod = json!({
            "metadata": {
                "name": holder_name(node),
                "labels": {names::MANAGED_BY: names::AVIFLOW, names::PLACEHOLDER: node},
            },
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "priorityClassName": self.config.site.priority_class,
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": [node]},
                    ]}],
                }}},
                "containers": [{
                    "name": "placeholder",
                    "image": self.config.site.image,
                    "command": ["aviflow", "placeholder"],
                    "securityContext": security,
                    "resources": {"limits": {resource: gpus.to_string()}},
                }],
            },
        });
        serde_json::from_value(pod).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_a_level() {
        let mut keeping = Keeping::default();
        keeping.tainted.insert("a".into(), Taints { ours: true, ..Taints::default() });
        assert_eq!(keeping.taint("a", true), None, "of an earlier term, until this one has spoken");
        keeping.begin();
        assert_eq!(keeping.taint("a", true), Some(false));
        keeping.set("a", 8, true);
        assert_eq!((keeping.taint("a", true), keeping.holder("a", true)), (None, None));
        keeping.set("a", 3, false);
        assert_eq!((keeping.taint("a", true), keeping.holder("a", true)), (Some(false), Some(3)));
        assert_eq!(
            (keeping.taint("a", false), keeping.holder("a", false)),
            (Some(false), None),
            "nobody else is there"
        );
        keeping.holders.insert("a".into(), 3);
        assert_eq!(keeping.holder("a", false), Some(0), "nobody else is there any more");
        assert_eq!(keeping.holder("a", true), None);
        keeping.set("a", 0, false);
        assert_eq!(keeping.holder("a", true), Some(0));
        assert_eq!(keeping.taint("b", true), None, "a node that is not there");
    }
}
