//! Whether a cluster has what jobs need, and if not, what to do.
//!
//! [`collect`] asks the apiserver and judges nothing; [`judge`] is a pure function of what it found.

pub mod collect;
pub mod judge;

use crate::authority;
use crate::certified;
use crate::lease;
use crate::profile::Profile;
use aviflow_api::crd::GROUP;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The first minor version of Kubernetes 1 whose admission policies stamp who submitted.
pub const OLDEST_MINOR: u32 = 36;
/// How many minor versions a kubelet may be behind its apiserver, by Kubernetes' own rule.
pub const KUBELET_SKEW: u32 = 3;

/// The account and the Deployment of a control plane, as the chart calls them.
const CONTROL_PLANE: &str = "aviflow";

/// What was asked for, or why it could not be seen.
pub type Seen<T> = Result<T, String>;

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The version of the apiserver, such as `v1.36.3`.
    pub version: Seen<String>,
    /// The definitions that are installed: by plural name the schema of our version, if it is served.
    pub definitions: Seen<BTreeMap<String, Option<serde_json::Value>>>,
    /// Admission policies and their bindings, as `KIND NAME`.
    pub policies: Seen<BTreeSet<String>>,
    /// Aviflow's own namespace.
    pub namespace: String,
    /// The rights that the control plane's account is to have, and whether it has each.
    pub rights: Seen<Vec<(Right, bool)>>,
    /// The pools: those with an object, else that of all nodes with GPUs.
    pub pools: Seen<Vec<Profile>>,
    /// All nodes.
    pub nodes: Seen<Vec<NodeFact>>,
    /// RuntimeClasses.
    pub runtime_classes: Seen<BTreeSet<String>>,
    /// PriorityClasses.
    pub priority_classes: Seen<BTreeSet<String>>,
    /// Namespaces that have or had jobs, with what of them counts.
    pub namespaces: Seen<Vec<NamespaceFact>>,
    /// The PriorityClass of job pods whose pool names none.
    pub priority_class: String,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFact {
    /// Its name.
    pub name: String,
    /// The version of its kubelet.
    pub kubelet: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whole amounts of its extended resources, as its device plugins registered them.
    pub capacity: BTreeMap<String, u32>,
    /// Those of them that are healthy.
    pub allocatable: BTreeMap<String, u32>,
}

/// A namespace with jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceFact {
    /// Its name.
    pub name: String,
    /// The pod-security level that is enforced there, if one is.
    pub level: Option<String>,
    /// Its claims: whether each is bound, and its access modes.
    pub claims: BTreeMap<String, (bool, Vec<String>)>,
}

/// What of a control plane's Deployment says which rights it needs. One that is not in the cluster has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deployed {
    /// Whether people are spoken to with TLS.
    pub tls: bool,
    /// The Secret with the administrator's certificate.
    pub tls_secret: Option<String>,
}

/// Where a right holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In the whole cluster.
    Cluster,
    /// In Aviflow's own namespace alone.
    Own,
    /// In `kube-system`, by a role of Kubernetes itself.
    System,
}

/// One right of the control plane.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    /// The verb.
    pub verb: &'static str,
    /// The API group; empty for the core.
    pub group: &'static str,
    /// The resource, with its subresource behind a `/`.
    pub resource: &'static str,
    /// The one thing of the kind, where the right is on no other.
    pub name: Option<Cow<'static, str>>,
    /// Where.
    pub place: Place,
    /// Whether it is needed to observe, too.
    pub observe: bool,
}

/// As `kubectl auth can-i` takes it.
impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.group {
            "" => write!(f, "{} {}", self.verb, self.resource)?,
            group => write!(f, "{} {}.{group}", self.verb, self.resource)?,
        }
        // After a blank, as a subresource stands before the group.
        self.name.as_ref().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

const LOOK: &[&str] = &["get", "list", "watch"];

/// What the ClusterRole of the control plane has: groups, resources, verbs, and whether to observe needs it.
const ROLE: &[(&str, &[&str], &[&str], bool)] = &[
    ("", &["nodes"], LOOK, true),
    ("", &["pods"], LOOK, true),
    ("", &["namespaces", "resourcequotas"], LOOK, true),
    (GROUP, &["trainingjobs", "queues", "pools", "environments"], LOOK, true),
    ("authentication.k8s.io", &["tokenreviews"], &["create"], true),
    ("authorization.k8s.io", &["subjectaccessreviews"], &["create"], true),
    ("", &["pods"], &["create", "delete", "patch"], false),
    ("", &["nodes"], &["patch"], false),
    ("", &["events"], &["list"], false),
    ("events.k8s.io", &["events"], &["create"], false),
    ("", &["serviceaccounts"], &["get", "create"], false),
    ("networking.k8s.io", &["networkpolicies"], &["get", "list", "watch", "create", "patch"], false),
    ("policy", &["poddisruptionbudgets"], &["create"], false),
    ("scheduling.k8s.io", &["priorityclasses"], &["get"], false),
    ("node.k8s.io", &["runtimeclasses"], &["get"], false),
    (GROUP, &["trainingjobs"], &["create", "patch", "delete", "submit-as"], false),
    (GROUP, &["queues"], &["use"], false),
    (GROUP, &["queues", "pools"], &["create", "update", "patch", "delete"], false),
    (
        GROUP,
        &["trainingjobs/status", "queues/status", "pools/status", "environments/status"],
        &["patch", "update"],
        false,
    ),
    (GROUP, &["trainingjobs/finalizers"], &["update"], false),
];

/// A right of its Role in its own namespace: a group, a resource, verbs, and the one object, where it is one alone.
type OwnRight = (&'static str, &'static str, &'static [&'static str], Option<&'static str>);

/// What its Role in its own namespace has.
const OWN_ROLE: &[OwnRight] = &[
    ("coordination.k8s.io", "leases", &["create"], None),
    ("coordination.k8s.io", "leases", &["get", "update"], Some(lease::NAME)),
    ("", "pods/log", &["get"], None),
];

/// What the same Role has for the control plane's own authority. One that only looks needs it to speak TLS to people;
/// agents it has none.
const AUTHORITY_ROLE: &[OwnRight] = &[
    ("", "secrets", &["create"], None),
    ("", "configmaps", &["create"], None),
    ("", "secrets", &["get"], Some(authority::SECRET)),
    ("", "configmaps", &["get", "update"], Some(authority::CONFIG_MAP)),
];

/// All rights of a control plane.
#[must_use]
pub fn rights(deployed: &Deployed) -> Vec<Right> {
    let of = |&(group, resources, verbs, observe): &(_, &'static [&'static str], &'static [&'static str], bool)| {
        let right = move |resource| {
            let right = move |verb| Right { verb, group, resource, name: None, place: Place::Cluster, observe };
            verbs.iter().copied().map(right)
        };
        resources.iter().copied().flat_map(right).collect::<Vec<_>>()
    };
    let own = |observe| {
        move |&(group, resource, verbs, name): &OwnRight| {
            let name = name.map(Cow::Borrowed);
            let right = move |verb| Right { verb, group, resource, name: name.clone(), place: Place::Own, observe };
            verbs.iter().copied().map(right)
        }
    };
    let get =
        |resource, name, place| Right { verb: "get", group: "", resource, name: Some(name), place, observe: true };
    let clients = deployed.tls.then(|| get("configmaps", Cow::Borrowed(certified::PUBLISHED.1), Place::System));
    let given = deployed.tls_secret.as_ref().map(|name| get("secrets", Cow::Owned(name.clone()), Place::Own));
    let roles = ROLE.iter().flat_map(of).chain(OWN_ROLE.iter().flat_map(own(true)));
    roles.chain(AUTHORITY_ROLE.iter().flat_map(own(deployed.tls))).chain(clients).chain(given).collect()
}

/// The admission policies and their bindings, as `KIND NAME`.
pub const POLICIES: &[&str] = &[
    "MutatingAdmissionPolicy aviflow-trainingjobs",
    "MutatingAdmissionPolicyBinding aviflow-trainingjobs",
    "ValidatingAdmissionPolicy aviflow-trainingjobs",
    "ValidatingAdmissionPolicyBinding aviflow-trainingjobs",
    "ValidatingAdmissionPolicy aviflow-pods",
    "ValidatingAdmissionPolicyBinding aviflow-pods",
];

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = include_str!("../../../deploy/aviflow.yaml");

    fn documents() -> Vec<&'static str> {
        MANIFEST.split("\n---\n").collect()
    }

    /// The words of a flow list, or of one in block form.
    fn list(lines: &[&str], key: &str) -> Vec<String> {
        let Some(at) = lines.iter().position(|l| l.trim_start_matches("- ").trim().starts_with(key)) else {
            return Vec::new();
        };
        let (_, inline) = lines[at].split_once(':').expect("a key");
        let inline = inline.trim().trim_start_matches('[').trim_end_matches(']');
        let words: Vec<String> = inline.split(',').map(|w| w.trim().trim_matches('"').to_owned()).collect();
        words
    }

    #[test]
    fn what_is_asked_for_is_what_the_manifest_gives() {
        let of_kind = |kind: &str| {
            let is =
                |d: &&str| d.contains(&format!("\nkind: {kind}\n")) && d.contains("\n  name: aviflow-control-plane\n");
            let role = documents().into_iter().find(is).expect("the role");
            role.split("\nrules:\n").nth(1).expect("rules").split("  - apiGroups").skip(1).collect::<Vec<_>>()
        };
        let rules = of_kind("ClusterRole").into_iter().map(|rule| (rule, Place::Cluster));
        let rules = rules.chain(of_kind("Role").into_iter().map(|rule| (rule, Place::Own)));
        let mut given = BTreeSet::new();
        for (rule, place) in rules {
            let text = format!("apiGroups{rule}");
            let lines: Vec<&str> = text.lines().filter(|l| !l.trim().starts_with('#')).map(str::trim).collect();
            let name = list(&lines, "resourceNames").pop();
            for group in list(&lines, "apiGroups") {
                for resource in list(&lines, "resources:") {
                    for verb in list(&lines, "verbs") {
                        given.insert((group.clone(), resource.clone(), verb, name.clone(), place));
                    }
                }
            }
        }
        // With TLS, as in the manifest. What a role of Kubernetes gives is bound there, and not written out.
        let deployed = Deployed { tls: true, tls_secret: None };
        let (system, asked): (Vec<Right>, Vec<Right>) =
            rights(&deployed).into_iter().partition(|right| right.place == Place::System);
        let own = |s: &str| s.to_owned();
        let asked: BTreeSet<_> = asked
            .iter()
            .map(|r| (own(r.group), own(r.resource), own(r.verb), r.name.as_deref().map(own), r.place))
            .collect();
        assert!(asked.len() > 50, "{}", asked.len());
        assert_eq!(asked, given);
        let binding = format!("\n  name: {}\n  namespace: {}\n", certified::BINDING, certified::PUBLISHED.0);
        let is = |d: &&str| d.contains("\nkind: RoleBinding\n") && d.contains(&binding);
        let binding = documents().into_iter().find(is).expect("the binding");
        assert!(binding.contains("\n  name: extension-apiserver-authentication-reader\n"), "{binding}");
        assert_eq!(system.len(), 1);
    }

    #[test]
    fn rights_of_tls_are_asked_for_where_it_is_spoken() {
        let names = |deployed: &Deployed| -> Vec<String> {
            let named = rights(deployed).into_iter().filter(|right| right.name.is_some() && right.observe);
            named.map(|right| right.to_string()).collect()
        };
        let lease = ["get leases.coordination.k8s.io aviflow", "update leases.coordination.k8s.io aviflow"];
        assert_eq!(names(&Deployed::default()), lease, "to observe without TLS needs no authority");
        let deployed = Deployed { tls: true, tls_secret: Some("web".to_owned()) };
        let expected = [
            "get secrets aviflow-authority",
            "get configmaps aviflow-ca",
            "update configmaps aviflow-ca",
            "get configmaps extension-apiserver-authentication",
            "get secrets web",
        ];
        assert_eq!(names(&deployed), [&lease[..], &expected[..]].concat());
    }

    #[test]
    fn the_policies_are_those_of_the_manifest() {
        let word = |document: &str, key: &str| {
            document.lines().find_map(|l| l.strip_prefix(key)).map(str::trim).map(str::to_owned)
        };
        let policies = documents().into_iter().filter_map(|d| {
            let kind = word(d, "kind:").filter(|kind| kind.contains("AdmissionPolicy"))?;
            Some(format!("{kind} {}", word(d, "  name:")?))
        });
        let policies: BTreeSet<String> = policies.collect();
        assert_eq!(policies, POLICIES.iter().map(|p| (*p).to_owned()).collect());
    }
}
