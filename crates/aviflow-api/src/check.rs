//! What cannot be together, what defeats the platform's wiring, and what a pool can never give.
//!
//! Every rule says which keys it is about, and what to do about it.

mod launcher;
mod pool;
mod support;

pub use pool::{NodeKind, PoolFacts, check_pool};
pub use support::{LOCAL, check_support, levels_of};

use crate::diagnostic::DiagnosticCode;
use crate::file::report::Report;
use crate::quantity::Quantity;
use crate::secrets;
use crate::source::{SourceId, Span};
use crate::spec::JobSpec;
use crate::yaml::Node;
use aviflow_core::model::NODE_LEVEL;

/// Variables that the platform sets, and that nobody else may.
pub const RESERVED: [&str; 15] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "NNODES",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_LOCAL_DEVICE_IDS",
    "CUDA_VISIBLE_DEVICES",
    "TORCHELASTIC_ERROR_FILE",
];

/// What variables begin with that the platform sets, and that nobody else may.
pub const PREFIXES: [&str; 2] = ["PET_", "AVIFLOW_"];

/// Whether a variable belongs to the platform.
#[must_use]
pub fn is_reserved(variable: &str) -> bool {
    RESERVED.contains(&variable) || PREFIXES.iter().any(|prefix| variable.starts_with(prefix))
}

/// Reports what cannot be together in a job whose parts are right.
pub(crate) fn combinations(report: &mut Report<'_>, spec: &JobSpec, run: Option<&Node>) {
    place_to_run(report);
    numbers(report, spec);
    levels(report, spec);
    variables(report, spec);
    waiting(report, spec);
    data_names(report, spec);
    paths(report, spec);
    memory(report, spec);
    if let Some(run) = run {
        launcher::check(report, spec, run);
    }
}

fn place_to_run(report: &mut Report<'_>) {
    use DiagnosticCode::{Conflict, Needs};
    let has = |report: &Report<'_>, key: &str| report.places.has(key);
    let image = has(report, "image");
    if image && has(report, "environment") {
        report.error_at_key(
            Conflict,
            "image",
            "a job runs in an image or in an environment, not in both",
            "remove `image` or `environment`",
        );
    }
    if has(report, "requirements") {
        if image {
            report.error_at_key(
                Conflict,
                "requirements",
                "requirements are layered onto an environment; an image is complete",
                "install them when the image is built, or write `environment` instead of `image`",
            );
        } else if !has(report, "environment") {
            report.error_at_key(
                Needs,
                "requirements",
                "requirements are layered onto an environment, and none is named",
                "add `environment: minimal`, or another; `aviflow environments` lists them",
            );
        }
    }
    if has(report, "topology.maxWait") && !has(report, "topology.prefer") {
        report.error_at_key(
            Needs,
            "topology.maxWait",
            "`maxWait` is how long to wait for what is preferred, and nothing is",
            "add `prefer: leaf`, or another level; what is required is waited for without end",
        );
    }
}

fn numbers(report: &mut Report<'_>, spec: &JobSpec) {
    let nodes = spec.nodes;
    if nodes.min > nodes.max {
        let message = format!("the least number of nodes, {}, is above the greatest, {}", nodes.min, nodes.max);
        let help = format!("write `nodes: {{min: {}, max: {}}}`", nodes.max, nodes.min);
        report.error_at(DiagnosticCode::Conflict, "nodes.min", message, help);
    }
    let every = spec.checkpoint.as_ref().and_then(|c| c.every);
    if let (Some(every), Some(limit)) = (every, spec.time_limit)
        && every >= limit
    {
        report.warning_at(
            DiagnosticCode::Conflict,
            "checkpoint.every",
            format!("the job would end by its time limit of {limit} before it saves"),
            "save more often, or raise `timeLimit`",
        );
    }
}

/// Several nodes are never in one node.
fn levels(report: &mut Report<'_>, spec: &JobSpec) {
    let Some(topology) = spec.topology.as_ref().filter(|_| spec.nodes.min > 1) else { return };
    let is_node = |level: &Option<String>| level.as_deref() == Some(NODE_LEVEL);
    let message = format!("{} nodes are never in one node", spec.nodes.min);
    if is_node(&topology.require) {
        let help = "name a level above the node, or write `nodes: 1`";
        report.error_at(DiagnosticCode::Conflict, "topology.require", &message, help);
    }
    if is_node(&topology.prefer) {
        let help = "name a level above the node, or remove the line";
        report.warning_at(DiagnosticCode::Conflict, "topology.prefer", &message, help);
    }
}

fn variables(report: &mut Report<'_>, spec: &JobSpec) {
    for variable in spec.env.keys() {
        if spec.secrets.contains_key(variable) {
            let path = format!("env.{variable}");
            let message = format!("`{variable}` is in `env` and in `secrets`");
            report.error_at_key(DiagnosticCode::Conflict, &path, message, "keep one of them");
        }
    }
    for (field, variables) in [("env", spec.env.keys()), ("secrets", spec.secrets.keys())] {
        for variable in variables.filter(|v| is_reserved(v)) {
            let path = format!("{field}.{variable}");
            let message = format!("`{variable}` is set by the platform, from where the job is placed");
            let help = match variable.as_str() {
                "PET_NPROC_PER_NODE" => "remove it; `gpusPerNode` says how many processes torchrun starts".to_owned(),
                "NNODES" | "WORLD_SIZE" | "PET_NNODES" => "remove it; `nodes` and `gpusPerNode` decide".to_owned(),
                v if v.starts_with("AVIFLOW_") => "choose a name that does not begin with `AVIFLOW_`".to_owned(),
                _ => "remove it; torchrun, accelerate and JAX find it by themselves".to_owned(),
            };
            report.error_at_key(DiagnosticCode::ReservedVariable, &path, message, help);
        }
    }
}

fn waiting(report: &mut Report<'_>, spec: &JobSpec) {
    for (i, after) in spec.after.iter().enumerate() {
        if after.job == spec.name {
            report.error_at(
                DiagnosticCode::WaitsForItself,
                &format!("after[{i}].job"),
                "the job would wait for itself, without end",
                "name the job that must end before; one of the same name is `name-2`",
            );
        } else if spec.after.iter().take(i).any(|a| a.job == after.job) {
            let message = format!("`{}` is waited for twice", after.job);
            report.error_at(DiagnosticCode::Duplicate, &format!("after[{i}].job"), message, "keep one of them");
        }
    }
}

fn data_names(report: &mut Report<'_>, spec: &JobSpec) {
    for (i, data) in spec.data.iter().enumerate() {
        if spec.data.iter().take(i).any(|d| d.name == data.name) {
            let message = format!("two data volumes are called `{}`", data.name);
            report.error_at(DiagnosticCode::Duplicate, &format!("data[{i}].name"), message, "give one another name");
        }
    }
}

/// Folders of the job may not hide each other.
fn paths(report: &mut Report<'_>, spec: &JobSpec) {
    let mounts =
        spec.data.iter().enumerate().filter_map(|(i, d)| d.mount.as_deref().map(|m| (format!("data[{i}].mount"), m)));
    let outputs = spec.outputs.iter().enumerate().map(|(i, o)| (format!("outputs[{i}]"), o.as_str()));
    let checkpoint = spec.checkpoint.iter().map(|c| ("checkpoint.path".to_owned(), c.path.as_str()));
    let all: Vec<(String, &str)> = mounts.chain(outputs).chain(checkpoint).collect();
    for (i, (field, path)) in all.iter().enumerate() {
        let Some((other, hidden)) = all.iter().take(i).find(|(_, p)| within(p, path) || within(path, p)) else {
            continue;
        };
        let message = if parts(path).eq(parts(hidden)) {
            format!("`{path}` is also `{other}`")
        } else {
            format!("`{path}` and `{hidden}` of `{other}` lie in each other")
        };
        report.error_at(DiagnosticCode::Collision, field, message, "give each a folder of its own, side by side");
    }
}

fn parts(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|p| !p.is_empty())
}

fn within(inner: &str, outer: &str) -> bool {
    let mut inner = parts(inner);
    parts(outer).all(|part| inner.next() == Some(part))
}

/// `/dev/shm` counts as memory, so it must fit in it.
fn memory(report: &mut Report<'_>, spec: &JobSpec) {
    let amount = |text: &Option<String>| text.as_ref().and_then(|t| t.parse::<Quantity>().ok());
    let Some(resources) = &spec.resources else { return };
    let (Some(shm), Some(memory)) = (amount(&resources.shm), amount(&resources.memory_per_gpu)) else { return };
    let whole = u128::from(memory.0) * u128::from(spec.gpus_per_node);
    if u128::from(shm.0) >= whole {
        let text = resources.memory_per_gpu.as_deref().unwrap_or_default();
        let message =
            format!("shared memory counts as memory, and a node's share has only {} × {text}", spec.gpus_per_node);
        report.error_at(DiagnosticCode::Conflict, "resources.shm", message, "lower `shm`, or raise `memoryPerGpu`");
    }
}

/// Reports every literal in the texts that looks like a secret, comments included.
pub(crate) fn literals(report: &mut Report<'_>) {
    let sources = report.sources;
    let mut id = SourceId(0);
    while let Some(source) = sources.get(id) {
        for found in secrets::find(&source.text) {
            let span = Span::new(id, found.range);
            let place = sources.place(span);
            let told = report.list.iter().any(|d| {
                d.code == DiagnosticCode::SecretLiteral
                    && d.place.as_ref().is_some_and(|p| p.source == place.source && p.line == place.line)
            });
            if told {
                continue;
            }
            let field = report.places.covering(span).unwrap_or_default().to_owned();
            let message = format!("this looks like {}, and everybody can read the document", found.kind);
            let help = "make a secret of it, write `secrets: {NAME: secret/key}`, and replace it by a new one";
            report.warning(DiagnosticCode::SecretLiteral, &field, span, message, help);
        }
        id = SourceId(id.0 + 1);
    }
}
