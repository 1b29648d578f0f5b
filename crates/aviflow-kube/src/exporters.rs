//! The exporters of GPU figures, as the watch of pods sees them.
//!
//! Which pods they are is the administrator's to say, by namespace and labels: a pod of another namespace with the
//! same labels is asked for nothing.

use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The port of dcgm-exporter.
pub const PORT: u16 = 9400;

/// Which pods they are, as `NAMESPACE/LABEL=VALUE,…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    namespace: String,
    labels: BTreeMap<String, String>,
}

impl FromStr for Selector {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Selector, &'static str> {
        const FORM: &str = "write NAMESPACE/LABEL=VALUE, such as `gpu-operator/app=nvidia-dcgm-exporter`";
        let (namespace, labels) = text.split_once('/').ok_or(FORM)?;
        let label = |part: &str| {
            let (name, value) = part.split_once('=')?;
            let whole = !name.is_empty() && !value.is_empty() && !value.contains('=');
            whole.then(|| (name.trim().to_owned(), value.trim().to_owned()))
        };
        let labels: Option<BTreeMap<String, String>> = labels.split(',').map(label).collect();
        match labels {
            Some(labels) if !namespace.is_empty() => Ok(Selector { namespace: namespace.to_owned(), labels }),
            _ => Err(FORM),
        }
    }
}

impl Selector {
    fn takes(&self, pod: &Pod) -> bool {
        let none = BTreeMap::new();
        let labels = pod.metadata.labels.as_ref().unwrap_or(&none);
        pod.metadata.namespace.as_deref() == Some(&self.namespace)
            && self.labels.iter().all(|(name, value)| labels.get(name) == Some(value))
    }
}

/// Where the exporters answer. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Exporters {
    selector: Option<(Selector, u16)>,
    /// By pod: its node, and its address.
    pods: Arc<Mutex<BTreeMap<String, (String, SocketAddr)>>>,
}

impl Exporters {
    /// Those of a selector, on a port; none without one.
    #[must_use]
    pub fn new(selector: Option<(Selector, u16)>) -> Exporters {
        Exporters { selector, pods: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (String, SocketAddr)>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod as it is now.
    pub(crate) fn pod(&self, pod: &Pod) {
        let Some((selector, port)) = &self.selector else { return };
        let Some(uid) = &pod.metadata.uid else { return };
        if selector.takes(pod) {
            match place(pod, *port) {
                Some(place) => self.lock().insert(uid.clone(), place),
                None => self.lock().remove(uid),
            };
        }
    }

    /// A pod that is no more.
    pub(crate) fn gone(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// After a list of all pods: those that are not in it are no more.
    pub(crate) fn listed(&self, uids: &BTreeSet<String>) {
        self.lock().retain(|uid, _| uids.contains(uid));
    }

    /// The node of each, and where its figures are.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, String> {
        let pods = self.lock();
        pods.values().map(|(node, address)| (node.clone(), format!("http://{address}/metrics"))).collect()
    }
}

/// Where a pod that runs answers.
fn place(pod: &Pod, port: u16) -> Option<(String, SocketAddr)> {
    let status = pod.status.as_ref().filter(|status| status.phase.as_deref() == Some("Running"))?;
    let ip: IpAddr = status.pod_ip.as_ref()?.parse().ok()?;
    Some((pod.spec.as_ref()?.node_name.clone()?, SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, namespace: &str, node: &str, phase: &str, ip: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"uid": uid, "namespace": namespace, "labels": {"app": "nvidia-dcgm-exporter", "x": "y"}},
            "spec": {"nodeName": node, "containers": []},
            "status": {"phase": phase, "podIP": ip},
        }))
        .expect("a pod")
    }

    #[test]
    fn exporters_are_what_the_administrator_says() {
        let selector = "gpu-operator/app=nvidia-dcgm-exporter".parse().expect("a selector");
        let exporters = Exporters::new(Some((selector, PORT)));
        for pod in [
            pod("1", "gpu-operator", "n1", "Running", "10.0.0.1"),
            pod("2", "gpu-operator", "n2", "Running", "fd00::2"),
            pod("3", "somebody", "n3", "Running", "10.0.0.3"),
            pod("4", "gpu-operator", "n4", "Pending", ""),
        ] {
            exporters.pod(&pod);
        }
        let all = |pairs: &[(&str, &str)]| pairs.iter().map(|(n, u)| ((*n).into(), (*u).into())).collect();
        let two = all(&[("n1", "http://10.0.0.1:9400/metrics"), ("n2", "http://[fd00::2]:9400/metrics")]);
        assert_eq!(exporters.all(), two);
        exporters.pod(&pod("1", "gpu-operator", "n1", "Failed", "10.0.0.1"));
        exporters.listed(&["2".to_owned()].into());
        assert_eq!(exporters.all().len(), 1);
        exporters.gone("2");
        assert_eq!(exporters.all(), BTreeMap::new());
    }

    #[test]
    fn a_selector_names_a_namespace_and_labels() {
        let check = |text: &str, good: bool| assert_eq!(text.parse::<Selector>().is_ok(), good, "{text}");
        check("gpu-operator/app=nvidia-dcgm-exporter", true);
        check("monitoring/app.kubernetes.io/name=dcgm-exporter,x=y", true);
        for bad in ["", "app=x", "/app=x", "ns/", "ns/app", "ns/app=", "ns/=x", "ns/app=x,", "ns/app==x"] {
            check(bad, false);
        }
    }
}
