//! What the facts of a cluster mean for jobs.

use super::{Facts, KUBELET_SKEW, NamespaceFact, NodeFact, OLDEST_MINOR, POLICIES, Place, Right, Seen};
use crate::certified;
use crate::profile::Profile;
use aviflow_api::crd::{VERSION, definitions};
use serde_json::Value;
use std::collections::BTreeSet;

/// Things that a finding names.
const NAMED: usize = 5;
/// Capabilities that pods may add under the level `baseline`.
const BASELINE: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// As it should be.
    Good,
    /// Jobs run, though less well than they could, or not all of them.
    Doubtful,
    /// Jobs do not run.
    Broken,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub name: &'static str,
    /// How it is.
    pub health: Health,
    /// What was found.
    pub found: String,
    /// What to do.
    pub remedy: Option<String>,
}

fn good(name: &'static str, found: impl Into<String>) -> Finding {
    Finding { name, health: Health::Good, found: found.into(), remedy: None }
}

fn doubtful(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { name, health: Health::Doubtful, found: found.into(), remedy: Some(remedy.into()) }
}

fn broken(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { name, health: Health::Broken, found: found.into(), remedy: Some(remedy.into()) }
}

/// Everything that was looked at, in order; what is as it should be too.
#[must_use]
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut out = Vec::new();
    version(facts, &mut out);
    with(&facts.definitions, "definitions", &mut out, |installed, out| {
        let found = definitions().into_iter().filter_map(|(_, definition)| outdated(&definition, installed));
        let found: Vec<String> = found.collect();
        out.push(match found.is_empty() {
            true => good("definitions", format!("all kinds in {VERSION}")),
            false => broken("definitions", found.join("; "), "apply the manifest or upgrade the chart of this version"),
        });
    });
    with(&facts.policies, "admission", &mut out, |there, out| {
        let missing: Vec<&str> = POLICIES.iter().copied().filter(|p| !there.contains(*p)).collect();
        out.push(match missing.is_empty() {
            true => good("admission", "who submits is stamped, and queues ask for the verb `use`"),
            false => broken(
                "admission",
                format!("missing: {}", missing.join(", ")),
                "apply the manifest or upgrade the chart: without them anybody could submit in another's name",
            ),
        });
    });
    with(&facts.rights, "rights", &mut out, |rights, out| rights_held(rights, &facts.namespace, out));
    match (&facts.pools, &facts.nodes) {
        (Ok(pools), Ok(nodes)) => pools_on(facts, pools, nodes, &mut out),
        (Err(why), _) | (_, Err(why)) => out.push(unseen("pools", why)),
    }
    out
}

/// Judges what could be seen; what could not is a finding by itself.
fn with<T>(seen: &Seen<T>, name: &'static str, out: &mut Vec<Finding>, judge: impl FnOnce(&T, &mut Vec<Finding>)) {
    match seen {
        Ok(seen) => judge(seen, out),
        Err(why) => out.push(unseen(name, why)),
    }
}

fn unseen(name: &'static str, why: &str) -> Finding {
    broken(name, format!("not to be seen: {why}"), "run it as somebody who may look at the whole cluster")
}

/// The first names, and how many more.
fn some<T: AsRef<str>>(names: &[T]) -> String {
    let first: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Whether the control plane's account has what it is to have.
fn rights_held(rights: &[(Right, bool)], namespace: &str, out: &mut Vec<Finding>) {
    let account = format!("the account {namespace}/{}", super::CONTROL_PLANE);
    let (system, rights): (Vec<_>, Vec<_>) = rights.iter().partition(|(right, _)| right.place == Place::System);
    let missing: Vec<&Right> = rights.iter().filter(|(_, held)| !held).map(|(right, _)| right).collect();
    let list = |missing: &[&Right]| some(&missing.iter().map(|right| format!("`{right}`")).collect::<Vec<_>>());
    let only_looks = missing.iter().all(|right| !right.observe)
        && missing.len() == rights.iter().filter(|(right, _)| !right.observe).count();
    out.push(if missing.is_empty() {
        good("rights", format!("{account} may do all that it does"))
    } else if only_looks {
        doubtful("rights", format!("{account} may only look: it can observe"), "set the chart's `mode: schedule`")
    } else {
        let remedy = "apply the roles `aviflow-control-plane` of the manifest, with their bindings; the chart's \
                      `tls.secret` is in one of them";
        broken("rights", format!("{account} may not {}", list(&missing)), remedy)
    });
    let missing: Vec<&Right> = system.iter().filter(|(_, held)| !held).map(|(right, _)| right).collect();
    if !missing.is_empty() {
        let (place, binding) = (certified::PUBLISHED.0, certified::BINDING);
        out.push(doubtful(
            "client certificates",
            format!("{account} may not {} in {place}: people come in with tokens alone", list(&missing)),
            format!("apply the RoleBinding `{binding}` of the manifest, in {place}"),
        ));
    } else if !system.is_empty() {
        out.push(good("client certificates", "the authorities of the cluster's people may be read"));
    }
}

/// The minor version of Kubernetes 1.
fn minor(version: &str) -> Option<u32> {
    let mut parts = version.trim_start_matches('v').split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    let digits: String = minor.chars().take_while(char::is_ascii_digit).collect();
    (major == "1").then(|| digits.parse().ok())?
}

fn version(facts: &Facts, out: &mut Vec<Finding>) {
    with(&facts.version, "kubernetes", out, |version, out| {
        let known = minor(version);
        out.push(match known {
            Some(minor) if minor >= OLDEST_MINOR => good("kubernetes", version.clone()),
            _ => broken(
                "kubernetes",
                format!("{version}; who submitted is stamped by policies that are stable from 1.{OLDEST_MINOR} on"),
                format!("upgrade the control plane of Kubernetes to 1.{OLDEST_MINOR} or newer"),
            ),
        });
        let (Some(server), Ok(nodes)) = (known, &facts.nodes) else { return };
        let skewed = |n: &&NodeFact| minor(&n.kubelet).is_none_or(|m| m > server || m + KUBELET_SKEW < server);
        let skewed: Vec<String> =
            nodes.iter().filter(skewed).map(|n| format!("{} has {}", n.name, n.kubelet)).collect();
        out.push(match skewed.is_empty() {
            true => good("kubelets", format!("{} nodes, each within what this apiserver serves", nodes.len())),
            false => broken(
                "kubelets",
                format!("outside of what Kubernetes {version} serves: {}", some(&skewed)),
                format!("a kubelet is no newer than its apiserver and at most {KUBELET_SKEW} minor versions older; upgrade it"),
            ),
        });
    });
}

/// What of a kind is not installed as this version has it.
fn outdated(definition: &Value, installed: &std::collections::BTreeMap<String, Option<Value>>) -> Option<String> {
    let plural = definition["spec"]["names"]["plural"].as_str()?;
    match installed.get(plural) {
        None => Some(format!("{plural} are not there")),
        Some(None) => Some(format!("{plural} are not served in {VERSION}")),
        Some(Some(schema)) => {
            let mut missing = Vec::new();
            lacks(&definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"], schema, "", &mut missing);
            (!missing.is_empty()).then(|| format!("{plural} are of another version: no {}", some(&missing)))
        }
    }
}

/// The fields of a schema that another lacks.
fn lacks(ours: &Value, theirs: &Value, path: &str, missing: &mut Vec<String>) {
    for (key, inner) in ours["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match theirs["properties"].get(key) {
            Some(there) => lacks(inner, there, &path, missing),
            None => missing.push(format!("`{path}`")),
        }
    }
    for part in ["items", "additionalProperties"] {
        if let (Some(ours), Some(theirs)) = (ours.get(part), theirs.get(part)) {
            lacks(ours, theirs, path, missing);
        }
    }
}

fn pools_on(facts: &Facts, pools: &[Profile], nodes: &[NodeFact], out: &mut Vec<Finding>) {
    for pool in pools {
        let here: Vec<&NodeFact> = nodes.iter().filter(|n| pool.has(&n.labels)).collect();
        devices(pool, &here, out);
        labels(pool, &here, out);
        fabric(pool, &here, out);
        classes(facts, pool, out);
    }
    with(&facts.namespaces, "namespaces", out, |namespaces, out| {
        for pool in pools {
            claims(pool, namespaces, out);
        }
        security(pools, namespaces, out);
    });
}

fn names(nodes: &[&NodeFact]) -> String {
    some(&nodes.iter().map(|n| n.name.as_str()).collect::<Vec<_>>())
}

/// Whether the nodes of a pool have GPUs.
fn devices(pool: &Profile, here: &[&NodeFact], out: &mut Vec<Finding>) {
    let (name, resource) = (&pool.pool, &pool.kubernetes.gpu_resource);
    if here.is_empty() {
        let selector = &pool.kubernetes.node_selector;
        let labels: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let found = format!("pool {name} has no node: none has the labels {}", labels.join(","));
        return out.push(broken("GPUs", found, "label the nodes, or correct `kubernetes.nodeSelector` of the pool"));
    }
    let gpus = |n: &NodeFact| n.capacity.get(resource).copied().unwrap_or(0);
    let total: u32 = here.iter().map(|n| gpus(n)).sum();
    let bare: Vec<&NodeFact> = here.iter().copied().filter(|n| gpus(n) == 0).collect();
    let plugin = format!("see whether the device plugin of {resource} runs there: `kubectl get pods -A -o wide`");
    if total == 0 {
        return out.push(broken("GPUs", format!("pool {name}: no node has {resource}"), plugin));
    }
    let sound = |n: &NodeFact| n.allocatable.get(resource).copied().unwrap_or(0);
    let worn: Vec<String> = here
        .iter()
        .filter(|n| sound(n) < gpus(n))
        .map(|n| format!("{} has {} of {} healthy", n.name, sound(n), gpus(n)))
        .collect();
    out.push(good("GPUs", format!("pool {name}: {total} on {} nodes", here.len() - bare.len())));
    // Without a selector every node is of the pool, also those for the cluster's own work.
    if !bare.is_empty() && !pool.kubernetes.node_selector.is_empty() {
        out.push(broken("GPUs", format!("pool {name}: no {resource} on {}", names(&bare)), plugin));
    }
    if !worn.is_empty() {
        let remedy = "the device plugin calls the others broken; its log there says why";
        out.push(doubtful("GPUs", format!("pool {name}: {}", some(&worn)), remedy));
    }
}

/// Whether nodes with GPUs have the labels that the pool reads.
fn labels(pool: &Profile, here: &[&NodeFact], out: &mut Vec<Finding>) {
    let name = &pool.pool;
    let with_gpus = |n: &&&NodeFact| n.capacity.get(&pool.kubernetes.gpu_resource).is_some_and(|n| *n > 0);
    let here: Vec<&NodeFact> = here.iter().filter(with_gpus).copied().collect();
    let lacking =
        |key: &str| -> Vec<&NodeFact> { here.iter().copied().filter(|n| !n.labels.contains_key(key)).collect() };
    let key = &pool.kubernetes.gpu_type_label;
    let bare = lacking(key);
    let mut sound = true;
    if !bare.is_empty() {
        sound = false;
        let found = format!(
            "pool {name}: no label {key} on {}; jobs find their GPUs as `{}`",
            names(&bare),
            pool.kubernetes.gpu_resource
        );
        out.push(doubtful(
            "labels",
            found,
            "install GPU Feature Discovery, or name another label in `kubernetes.gpuTypeLabel`",
        ));
    }
    for key in &pool.kubernetes.topology_keys {
        let bare = lacking(key);
        if !bare.is_empty() {
            sound = false;
            let found = format!("pool {name}: no label {key} on {}; each counts as far from every other", names(&bare));
            out.push(doubtful(
                "labels",
                found,
                "label them with their domain; a gang may be spread over switches until then",
            ));
        }
    }
    if sound && !here.is_empty() {
        let keys = 1 + pool.kubernetes.topology_keys.len();
        out.push(good("labels", format!("pool {name}: each node has the {keys} that the pool reads")));
    }
}

/// Whether nodes have the network devices that a whole node's pod asks for.
fn fabric(pool: &Profile, here: &[&NodeFact], out: &mut Vec<Finding>) {
    let (name, resources) = (&pool.pool, &pool.kubernetes.fabric.rdma_resources);
    let with_gpus = |n: &&&NodeFact| n.capacity.get(&pool.kubernetes.gpu_resource).is_some_and(|n| *n > 0);
    for (resource, count) in resources {
        let has = |n: &NodeFact| n.allocatable.get(resource).copied().unwrap_or(0);
        let short: Vec<String> = here
            .iter()
            .filter(with_gpus)
            .filter(|n| has(n) < *count)
            .map(|n| format!("{} has {}", n.name, has(n)))
            .collect();
        out.push(match short.is_empty() {
            true => good("fabric", format!("pool {name}: {count} of {resource} on each node")),
            false => broken(
                "fabric",
                format!("pool {name} asks for {count} of {resource}: {}", some(&short)),
                "see whether the device plugin of the network runs there, or correct `kubernetes.fabric.rdmaResources`",
            ),
        });
    }
}

fn classes(facts: &Facts, pool: &Profile, out: &mut Vec<Finding>) {
    let name = &pool.pool;
    if let Some(class) = &pool.kubernetes.runtime_class {
        with(&facts.runtime_classes, "runtime class", out, |there, out| {
            out.push(match there.contains(class) {
                true => good("runtime class", format!("pool {name}: {class}")),
                false => broken(
                    "runtime class",
                    format!("pool {name} names {class}, and there is none"),
                    "install the container toolkit's RuntimeClass, or take `kubernetes.runtimeClass` away",
                ),
            });
        });
    }
    let class = pool.kubernetes.priority_class.as_ref().unwrap_or(&facts.priority_class);
    with(&facts.priority_classes, "priority class", out, |there, out| {
        out.push(match there.contains(class) {
            true => good("priority class", format!("pool {name}: {class}")),
            false => broken(
                "priority class",
                format!("pods of pool {name} have the class {class}, and there is none"),
                "the chart's `jobs.priorityClass.create` makes it; or correct `kubernetes.priorityClass`",
            ),
        });
    });
}

/// Whether the claim of a pool is in each namespace with jobs, and many nodes may write it.
fn claims(pool: &Profile, namespaces: &[NamespaceFact], out: &mut Vec<Finding>) {
    let name = &pool.pool;
    let storage = pool.kubernetes.storage.clone().unwrap_or_default();
    let Some(claim) = storage.claim else {
        return out.push(match storage.host_path {
            Some(path) => good("storage", format!("pool {name}: {path} of each node")),
            None => doubtful(
                "storage",
                format!("pool {name} has none: jobs with a checkpoint or outputs do not start there"),
                "name a claim or a folder in `kubernetes.storage` of the pool",
            ),
        });
    };
    let mut sound = 0;
    for namespace in namespaces {
        let at = format!("{}/{claim}", namespace.name);
        match namespace.claims.get(&claim) {
            None => out.push(broken(
                "storage",
                format!("pool {name}: there is no claim {at}"),
                format!("make a PersistentVolumeClaim `{claim}` with ReadWriteMany in namespace {}", namespace.name),
            )),
            Some((_, modes)) if !modes.iter().any(|m| m == "ReadWriteMany") => out.push(broken(
                "storage",
                format!("pool {name}: the claim {at} is {}", modes.join(", ")),
                "workers on several nodes write it: make it anew with ReadWriteMany",
            )),
            Some((false, _)) => out.push(doubtful(
                "storage",
                format!("pool {name}: the claim {at} is not bound"),
                format!(
                    "`kubectl -n {} describe pvc {claim}` says why; a class may wait for the first pod",
                    namespace.name
                ),
            )),
            Some((true, _)) => sound += 1,
        }
    }
    if sound > 0 {
        out.push(good("storage", format!("pool {name}: the claim {claim} in {sound} namespaces")));
    }
}

/// What of the pools' pods is above the level `baseline`.
fn above_baseline(pool: &Profile) -> Vec<String> {
    let spec = &pool.kubernetes;
    let mut needs = Vec::new();
    if spec.fabric.host_network {
        needs.push("the node's network".to_owned());
    }
    let beyond = |c: &&String| !BASELINE.contains(&c.trim_start_matches("CAP_"));
    needs.extend(spec.fabric.capabilities.iter().filter(beyond).cloned());
    if !spec.host_paths.is_empty() || spec.storage.as_ref().is_some_and(|s| s.host_path.is_some()) {
        needs.push("folders of the node".to_owned());
    }
    needs
}

fn security(pools: &[Profile], namespaces: &[NamespaceFact], out: &mut Vec<Finding>) {
    let needs: BTreeSet<String> = pools.iter().flat_map(above_baseline).collect();
    let needs: Vec<String> = needs.into_iter().collect();
    let mut sound = 0;
    for namespace in namespaces {
        let label = |level: &str| {
            format!("kubectl label namespace {} --overwrite pod-security.kubernetes.io/enforce={level}", namespace.name)
        };
        match namespace.level.as_deref() {
            Some("restricted") => {
                let level = if needs.is_empty() { "baseline" } else { "privileged" };
                let found = format!("namespace {} enforces `restricted`, which refuses every job pod", namespace.name);
                out.push(broken("pod security", found, label(level)));
            }
            Some("baseline") if !needs.is_empty() => {
                let found =
                    format!("namespace {} enforces `baseline`, and pods may need {}", namespace.name, needs.join(", "));
                out.push(broken("pod security", found, label("privileged")));
            }
            _ => sound += 1,
        }
    }
    if sound > 0 {
        out.push(good("pod security", format!("{sound} namespaces with jobs let their pods in")));
    }
}

#[cfg(test)]
mod tests;
