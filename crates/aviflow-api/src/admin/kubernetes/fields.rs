//! The keys of a pool's part for Kubernetes, as data.

use crate::file::fields::field;
use crate::file::formats::{self as f, text};
use crate::file::shape::Shape::{Bool, Choice, List, Map, Object as Keys, Text, Whole};
use crate::file::shape::{Fault, Object, Text as Form};

/// Greatest number of levels, and so of their labels.
const MAX_LEVELS: usize = crate::admin::fields::MAX_LEVELS;

const LABEL_KEY: Form = Form {
    most: 317,
    ..text(
        "the key of a label",
        Some("^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$"),
        label_key,
    )
};
const LABEL_VALUE: Form = Form {
    literal: true,
    most: 63,
    ..text("the value of a label", Some("^([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?$"), |t| {
        if t.is_empty() { Ok(()) } else { f::word(t).map_err(|fault| fault.instead("write it as the node has it")) }
    })
};
const BUCKET: Form = text("the address of a bucket", Some("^[a-z][-+.a-z0-9]*://[^/\\s]+(/[^\\s]*)?$"), bucket);
/// A GPU type as a node's label tells it: never empty.
const TYPE_VALUE: Form = Form { what: "the value of a label", ..f::GPU_TYPE };
const RESOURCE: Form = Form { what: "the name of a resource", ..LABEL_KEY };
const OBJECT_NAME: Form =
    Form { most: 253, ..text("the name of an object", Some("^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$"), object_name) };
const CAPABILITY: Form = Form { most: 63, ..text("a capability", Some("^[A-Z][A-Z_]*$"), capability) };

fn label_key(t: &str) -> Result<(), Fault> {
    let (prefix, name) = t.rsplit_once('/').map_or((None, t), |(prefix, name)| (Some(prefix), name));
    if prefix.is_none_or(|prefix| object_name(prefix).is_ok()) && f::word(name).is_ok() {
        return Ok(());
    }
    Err(Fault::new(format!("`{t}` is no key of a label or resource"), "write for example `nvidia.com/gpu.product`"))
}

fn object_name(t: &str) -> Result<(), Fault> {
    let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let good = t.len() <= 253
        && t.starts_with(ends)
        && t.ends_with(ends)
        && t.chars().all(|c| ends(c) || matches!(c, '-' | '.'));
    if good {
        return Ok(());
    }
    Err(Fault::new(
        format!("`{t}` is no name of an object"),
        "write lowercase letters, digits, `-` and `.`, such as `nvidia`",
    ))
}

fn bucket(t: &str) -> Result<(), Fault> {
    let scheme = |s: &str| {
        s.starts_with(|c: char| c.is_ascii_lowercase())
            && s.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '+' | '.'))
    };
    let whole = |rest: &str| !rest.is_empty() && !rest.starts_with('/') && !rest.contains(char::is_whitespace);
    if t.split_once("://").is_some_and(|(before, rest)| scheme(before) && whole(rest)) {
        return Ok(());
    }
    Err(Fault::new(format!("`{t}` is no address of a bucket"), "write for example `s3://corpora`"))
}

fn capability(t: &str) -> Result<(), Fault> {
    if let Some(name) = t.strip_prefix("CAP_") {
        return Err(Fault::new("capabilities are named without `CAP_` here", format!("write `{name}`")));
    }
    if t.starts_with(|c: char| c.is_ascii_uppercase()) && t.chars().all(|c| c.is_ascii_uppercase() || c == '_') {
        return Ok(());
    }
    Err(Fault::new(format!("`{t}` is no capability"), "write for example `IPC_LOCK`"))
}

/// A pool's part for Kubernetes.
pub static KUBERNETES: Object = Object {
    what: "a pool's part for Kubernetes",
    fields: &[
        field("nodeSelector", Map(&LABEL_KEY, &Text(&LABEL_VALUE)), "Labels that its nodes have, all of them. Without it, every node with GPUs is in the pool.")
            .eg(&["{\"node.example/pool\": \"hgx\"}"])
            .most(32),
        field("gpuResource", Text(&RESOURCE), "The extended resource that stands for a GPU.").default("\"nvidia.com/gpu\"").eg(&["\"nvidia.com/gpu\""]),
        field("gpuTypeLabel", Text(&LABEL_KEY), "The label of a node that tells its accelerator.")
            .default("\"nvidia.com/gpu.product\"")
            .eg(&["\"nvidia.com/gpu.product\""]),
        field("gpuTypes", Map(&f::GPU_TYPE, &List(&Text(&TYPE_VALUE), 1)), "GPU types by the names that jobs and quotas use, with the values of `gpuTypeLabel` that mean them. A value that stands nowhere is its own name.")
            .eg(&["{\"H100\": [\"NVIDIA-H100-80GB-HBM3\"]}"])
            .most(32),
        field("topologyKeys", List(&Text(&LABEL_KEY), 1), "The labels that name a node's domain of each level of `topology.levels`, the smallest first. They stand instead of `topology.domains`.")
            .eg(&["[\"fabric.topograph.run/tier-0\", \"fabric.topograph.run/tier-1\"]"])
            .most(MAX_LEVELS),
        field("fabric", Keys(&FABRIC), "What pods need to use the network between the nodes."),
        field("runtimeClass", Text(&OBJECT_NAME), "The RuntimeClass of pods.").eg(&["\"nvidia\""]),
        field("tolerations", List(&Keys(&TOLERATION), 0), "Taints that pods tolerate.").most(32),
        field("priorityClass", Text(&OBJECT_NAME), "The PriorityClass of pods.").eg(&["\"aviflow-jobs\""]),
        field("shared", Bool, "Whether other workloads may use GPUs of its nodes, too: then what is promised to a job is kept from them, on whole nodes by a taint, else by a pod that holds it.").default("true"),
        field("hostPaths", List(&Text(&f::ABSOLUTE), 0), "Folders of the nodes that jobs may mount as data, with what is below them. Without it, none.")
            .eg(&["[\"/mnt/datasets\"]"])
            .most(64),
        field("buckets", Map(&BUCKET, &Text(&OBJECT_NAME)), "Buckets by their addresses, each with the PersistentVolumeClaim of a job's namespace that has it, as a CSI driver mounts it. Data that a job names below an address is mounted from there.")
            .eg(&["{\"s3://corpora\": \"corpora\"}"])
            .most(64),
        field("storage", Keys(&STORAGE), "Where checkpoints, outputs and caches of jobs are."),
        field("imagePullSecrets", List(&Text(&OBJECT_NAME), 0), "Secrets of a job's namespace with which images are pulled.")
            .eg(&["[\"registry\"]"])
            .most(16),
        field("cpuPerGpu", Whole(1, 1024), "CPUs for each GPU of a job that does not say it.").eg(&["12"]),
        field("memoryPerGpu", Text(&f::QUANTITY), "Memory for each GPU of a job that does not say it.").eg(&["\"200Gi\""]),
    ],
    synonyms: &[
        ("selector", "nodeSelector"),
        ("labels", "nodeSelector"),
        ("nodeLabels", "nodeSelector"),
        ("resource", "gpuResource"),
        ("gpuType", "gpuTypes"),
        ("types", "gpuTypes"),
        ("levels", "topologyKeys"),
        ("topologyLabels", "topologyKeys"),
        ("network", "fabric"),
        ("rdma", "fabric.rdmaResources"),
        ("nccl", "fabric.env"),
        ("hostNetwork", "fabric.hostNetwork"),
        ("capabilities", "fabric.capabilities"),
        ("runtimeClassName", "runtimeClass"),
        ("priorityClassName", "priorityClass"),
        ("taints", "tolerations"),
        ("claim", "storage.claim"),
        ("hostPath", "hostPaths"),
        ("pullSecrets", "imagePullSecrets"),
        ("cpu", "cpuPerGpu"),
        ("memory", "memoryPerGpu"),
    ],
};

static FABRIC: Object = Object {
    what: "a fabric",
    fields: &[
        field(
            "rdmaResources",
            Map(&RESOURCE, &Whole(1, 64)),
            "Extended resources of network devices, with how many the pod of a whole node asks for; a job that shares a node gets its share, at least one.",
        )
        .eg(&["{\"rdma/ib\": 8}"])
        .most(16),
        field("annotations", Map(&LABEL_KEY, &Text(&f::FREE)), "Annotations of pods, such as those by which networks are attached.")
            .eg(&["{\"k8s.v1.cni.cncf.io/networks\": \"rail-0,rail-1\"}"])
            .most(64),
        field("env", Map(&f::VARIABLE, &Text(&f::FREE)), "Variables, such as NCCL's; what a job declares wins.")
            .eg(&["{\"NCCL_IB_HCA\": \"mlx5\"}"])
            .most(128),
        field("hostNetwork", Bool, "Whether pods use the node's own network.").default("false"),
        field("capabilities", List(&Text(&CAPABILITY), 0), "Linux capabilities of pods beyond none.").eg(&["[\"IPC_LOCK\"]"]).most(16),
    ],
    synonyms: &[
        ("resources", "rdmaResources"),
        ("rdma", "rdmaResources"),
        ("devices", "rdmaResources"),
        ("networks", "annotations"),
        ("nccl", "env"),
        ("variables", "env"),
        ("caps", "capabilities"),
    ],
};

static TOLERATION: Object = Object {
    what: "a toleration",
    fields: &[
        field("key", Text(&LABEL_KEY), "The taint's key. Without it, any.").eg(&["\"nvidia.com/gpu\""]),
        field(
            "operator",
            Choice(&[("Equal", "the value must be this"), ("Exists", "the value may be any")]),
            "Whether the value counts.",
        )
        .default("\"Equal\""),
        field("value", Text(&LABEL_VALUE), "The taint's value."),
        field(
            "effect",
            Choice(&[
                ("NoSchedule", "no new pods"),
                ("PreferNoSchedule", "new pods only if need be"),
                ("NoExecute", "no pods"),
            ]),
            "The taint's effect. Without it, any.",
        ),
    ],
    synonyms: &[("taint", "key"), ("name", "key"), ("op", "operator")],
};

static STORAGE: Object = Object {
    what: "a place for what jobs keep",
    fields: &[
        field(
            "claim",
            Text(&OBJECT_NAME),
            "A PersistentVolumeClaim of each job's namespace that many nodes may write.",
        )
        .eg(&["\"aviflow-jobs\""]),
        field(
            "hostPath",
            Text(&f::ABSOLUTE),
            "A folder that is the same on every node, such as a parallel file system's.",
        )
        .eg(&["\"/mnt/shared/aviflow\""]),
    ],
    synonyms: &[("pvc", "claim"), ("claimName", "claim"), ("persistentVolumeClaim", "claim"), ("path", "hostPath")],
};
