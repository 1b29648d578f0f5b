//! A pool's part for Kubernetes: which nodes it has, what its GPUs are called there, and what a
//! job's pods get on its nodes.
//!
//! Names of labels, resources and network devices differ from site to site, so all of them are
//! configuration and none is a constant of the program. Other bodies take this part and leave it alone.

mod check;
pub mod fields;

pub(super) use check::check;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The extended resource of NVIDIA's device plugin.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
/// The label by which GPU Feature Discovery tells a node's accelerator.
pub const GPU_TYPE_LABEL: &str = "nvidia.com/gpu.product";

/// A pool's part for Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KubernetesSpec {
    /// Labels that its nodes have, all of them; empty means every node with GPUs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// The extended resource that stands for a GPU.
    pub gpu_resource: String,
    /// The label of a node that tells its accelerator.
    pub gpu_type_label: String,
    /// Accelerator types by the names that jobs and quotas use, with the values of the label that
    /// mean them. A value that stands nowhere is its own name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu_types: BTreeMap<String, Vec<String>>,
    /// The labels that name a node's domain of each level of `topology.levels`, smallest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology_keys: Vec<String>,
    /// What pods need to use the network between the nodes.
    #[serde(skip_serializing_if = "FabricSpec::is_empty")]
    pub fabric: FabricSpec,
    /// The RuntimeClass of pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class: Option<String>,
    /// Taints that pods tolerate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// The PriorityClass of pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class: Option<String>,
    /// Whether other workloads may use GPUs of its nodes: then what is promised to a job is kept from them, on whole
    /// nodes by a taint, else by a pod that holds it.
    pub shared: bool,
    /// Folders of the nodes that jobs may mount as data, with what is below them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_paths: Vec<String>,
    /// Buckets by their addresses, each with the PersistentVolumeClaim of a job's namespace that has it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub buckets: BTreeMap<String, String>,
    /// Where checkpoints, outputs and caches of jobs are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageSpec>,
    /// Secrets of a job's namespace with which images are pulled.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<String>,
    /// CPUs for each GPU of a job that does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_per_gpu: Option<u32>,
    /// Memory for each GPU of a job that does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_per_gpu: Option<String>,
}

impl Default for KubernetesSpec {
    fn default() -> KubernetesSpec {
        KubernetesSpec {
            node_selector: BTreeMap::new(),
            gpu_resource: GPU_RESOURCE.to_owned(),
            gpu_type_label: GPU_TYPE_LABEL.to_owned(),
            gpu_types: BTreeMap::new(),
            topology_keys: Vec::new(),
            fabric: FabricSpec::default(),
            runtime_class: None,
            tolerations: Vec::new(),
            priority_class: None,
            shared: true,
            host_paths: Vec::new(),
            buckets: BTreeMap::new(),
            storage: None,
            image_pull_secrets: Vec::new(),
            cpu_per_gpu: None,
            memory_per_gpu: None,
        }
    }
}

impl KubernetesSpec {
    /// The accelerator type that a value of the label means.
    #[must_use]
    pub fn gpu_type<'a>(&'a self, value: &'a str) -> &'a str {
        let named = self.gpu_types.iter().find(|(_, values)| values.iter().any(|v| v == value));
        named.map_or(value, |(name, _)| name)
    }
}

impl KubernetesSpec {
    /// The claim that has a source of data in a bucket, and the path in it, by the longest address that fits.
    #[must_use]
    pub fn bucket<'a>(&'a self, source: &'a str) -> Option<(&'a str, &'a str)> {
        let below = |(address, claim): (&'a String, &'a String)| {
            let rest = source.strip_prefix(address.trim_end_matches('/'))?;
            let path = if rest.is_empty() { rest } else { rest.strip_prefix('/')? };
            Some((address.len(), claim.as_str(), path.trim_end_matches('/')))
        };
        self.buckets.iter().filter_map(below).max_by_key(|(length, ..)| *length).map(|(_, claim, path)| (claim, path))
    }
}

/// What pods need to use the network between the nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FabricSpec {
    /// Extended resources of network devices, with how many a whole node's pod asks for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rdma_resources: BTreeMap<String, u32>,
    /// Annotations of pods, such as those by which Multus attaches networks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Variables, such as NCCL's; what a job declares wins.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Whether pods use the node's own network.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub host_network: bool,
    /// Linux capabilities of pods beyond none, such as `IPC_LOCK`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
}

impl FabricSpec {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == FabricSpec::default()
    }
}

/// A taint that pods tolerate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Toleration {
    /// The taint's key; none means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Whether the value counts.
    #[serde(default)]
    pub operator: TolerationOperator,
    /// The taint's value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The taint's effect; none means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<TaintEffect>,
}

/// Whether a taint's value counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TolerationOperator {
    /// It must be this.
    #[default]
    Equal,
    /// It may be any.
    Exists,
}

/// What a taint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "as in Kubernetes")]
pub enum TaintEffect {
    NoSchedule,
    PreferNoSchedule,
    NoExecute,
}

/// Where checkpoints, outputs and caches of jobs are: one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StorageSpec {
    /// A PersistentVolumeClaim of each job's namespace that many nodes may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// A folder that is the same on every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_that_stands_nowhere_is_its_own_type() {
        let gpu_types = BTreeMap::from([("H100".to_owned(), vec!["NVIDIA-H100-80GB-HBM3".to_owned()])]);
        let spec = KubernetesSpec { gpu_types, ..KubernetesSpec::default() };
        assert_eq!(spec.gpu_type("NVIDIA-H100-80GB-HBM3"), "H100");
        assert_eq!(spec.gpu_type("NVIDIA-L40S"), "NVIDIA-L40S");
    }

    #[test]
    fn a_bucket_has_what_lies_below_its_address() {
        let buckets = [("s3://corpora", "corpora"), ("s3://corpora/private/", "private"), ("gs://a", "a")];
        let buckets = buckets.map(|(address, claim)| (address.to_owned(), claim.to_owned())).into();
        let spec = KubernetesSpec { buckets, ..KubernetesSpec::default() };
        assert_eq!(spec.bucket("s3://corpora/c4/en/"), Some(("corpora", "c4/en")));
        assert_eq!(spec.bucket("s3://corpora"), Some(("corpora", "")));
        assert_eq!(spec.bucket("s3://corpora/private/x"), Some(("private", "x")));
        assert_eq!(spec.bucket("s3://corpora-2/x"), None, "another bucket");
    }

    /// What an empty document is filled with is what its description says.
    #[test]
    fn the_defaults_are_those_that_are_described() {
        let filled = serde_json::to_value(KubernetesSpec::default()).unwrap();
        let described = fields::KUBERNETES.fields.iter().filter_map(|f| Some((f.key.to_owned(), f.default?)));
        let described: serde_json::Map<_, _> =
            described.map(|(key, default)| (key, serde_json::from_str(default).unwrap())).collect();
        assert_eq!(filled, serde_json::Value::Object(described));
    }
}
