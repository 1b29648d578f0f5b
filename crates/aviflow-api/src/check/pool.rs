//! What a pool can never give, so that such a job is refused and does not wait for ever.

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::spec::JobSpec;
use crate::suggest::{count, nearest, one_of};
use aviflow_core::model::Node;
use std::collections::BTreeMap;

/// Nodes of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeKind {
    /// The accelerator type.
    pub gpu_type: String,
    /// GPUs of each node.
    pub gpus: u32,
    /// How many nodes.
    pub nodes: u32,
}

/// What there is at most, whoever uses it now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolFacts(pub Vec<NodeKind>);

impl PoolFacts {
    /// The facts of nodes given as accelerator type and number of GPUs.
    pub fn count<'a>(nodes: impl IntoIterator<Item = (&'a str, u32)>) -> PoolFacts {
        let mut kinds: BTreeMap<(String, u32), u32> = BTreeMap::new();
        for (gpu_type, gpus) in nodes {
            *kinds.entry((gpu_type.to_owned(), gpus)).or_default() += 1;
        }
        PoolFacts(kinds.into_iter().map(|((gpu_type, gpus), nodes)| NodeKind { gpu_type, gpus, nodes }).collect())
    }

    /// The facts of nodes, cordoned and lost ones included: they may come back.
    pub fn of<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> PoolFacts {
        PoolFacts::count(nodes.into_iter().map(|n| (n.gpu_type.as_str(), n.gpus.count())))
    }
}

/// Reports a request that these nodes could never meet, also if nothing else ran on them.
///
/// A gang is of one accelerator type. The errors have no place; the fields are named.
#[must_use]
pub fn check_pool(spec: &JobSpec, pool: &PoolFacts) -> Vec<Diagnostic> {
    let never = |field: &str, message: String, help: String| {
        Diagnostic::error(DiagnosticCode::NeverFits, message).help(help).field(field)
    };
    if pool.0.is_empty() {
        return vec![never(
            "nodes",
            "there are no nodes".to_owned(),
            "add nodes; `aviflow node ls` shows them".to_owned(),
        )];
    }
    let mut types: Vec<&str> = pool.0.iter().map(|k| k.gpu_type.as_str()).collect();
    types.sort_unstable();
    types.dedup();
    let mut problems = Vec::new();
    for wanted in spec.gpu_type.iter().filter(|t| !types.contains(&t.as_str())) {
        let help = match nearest(wanted, types.iter().copied()) {
            Some(near) => format!("write `{near}`"),
            None => format!("write {}", one_of(types.iter().copied())),
        };
        let d = never("gpuType", format!("no node has GPUs of type `{wanted}`"), help);
        // Another type of the list may be there: then this one is only of no use.
        let usable = spec.gpu_type.iter().any(|t| types.contains(&t.as_str()));
        problems.push(if usable { Diagnostic { severity: crate::diagnostic::Severity::Warning, ..d } } else { d });
    }
    if problems.iter().any(Diagnostic::is_error) {
        return problems;
    }
    let usable = || pool.0.iter().filter(|k| spec.gpu_type.is_empty() || spec.gpu_type.contains(&k.gpu_type));
    let of = if spec.gpu_type.is_empty() {
        String::new()
    } else {
        format!(" of type {}", one_of(spec.gpu_type.iter().map(String::as_str)))
    };
    let most = usable().map(|k| k.gpus).max().unwrap_or_default();
    if spec.gpus_per_node > most {
        let total = u64::from(spec.gpus_per_node) * u64::from(spec.nodes.min);
        let nodes = total.div_ceil(u64::from(most.max(1)));
        problems.push(never(
            "gpusPerNode",
            format!("no node{of} has {} GPUs; the most is {most}", spec.gpus_per_node),
            format!("write `gpusPerNode: {most}` and `nodes: {nodes}` for at least as many GPUs"),
        ));
        return problems;
    }
    // Nodes of one type that are large enough, for the type that has most of them.
    let mut fitting: BTreeMap<&str, u32> = BTreeMap::new();
    for kind in usable().filter(|k| k.gpus >= spec.gpus_per_node) {
        *fitting.entry(&kind.gpu_type).or_default() += kind.nodes;
    }
    let one_type = if fitting.len() > 1 { "at most " } else { "" };
    let there = fitting.values().copied().max().unwrap_or_default();
    if spec.nodes.min > there {
        let gpus = spec.gpus_per_node;
        let help = if gpus < most {
            let total = u64::from(gpus) * u64::from(spec.nodes.min);
            format!(
                "write `nodes: {there}`; or `gpusPerNode: {most}` and `nodes: {}` for at least as many GPUs",
                total.div_ceil(u64::from(most))
            )
        } else {
            format!("write `nodes: {there}`")
        };
        problems.push(never(
            "nodes",
            format!(
                "the job needs {} with {} each, and there are {one_type}{there}{}",
                count(spec.nodes.min.into(), "node"),
                count(gpus.into(), "GPU"),
                if one_type.is_empty() { of } else { " of one type".to_owned() },
            ),
            help,
        ));
    } else if spec.nodes.max > there {
        let mut d = Diagnostic::warning(
            DiagnosticCode::NeverFits,
            format!("the job would take up to {} nodes, and there are {one_type}{there}{of}", spec.nodes.max),
        );
        d = d.help(format!("write `max: {there}`")).field("nodes");
        problems.push(d);
    }
    problems
}
