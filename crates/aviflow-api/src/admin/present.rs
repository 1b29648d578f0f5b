//! What documents say, compared with what there is: other queues of the tree, and nodes.

use super::ranges::expand;
use super::spec::{AdminDocument, Domain, PoolSpec, QueueSpec, QuotaSpec};
use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::file::report::join;
use crate::suggest::{count, nearest, one_of};
use std::collections::{BTreeMap, BTreeSet};

/// What there is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// All queues.
    pub queues: Vec<QueueSpec>,
    /// All nodes.
    pub nodes: Vec<PresentNode>,
}

/// A node that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentNode {
    /// Its name.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// Its accelerator type.
    pub gpu_type: String,
    /// How many GPUs it has.
    pub gpus: u32,
}

/// Reports what does not go together with what there is, each with the index of its document.
///
/// The documents are taken together, as if all were applied: a parent may stand behind its child.
/// The problems have no place; the fields are named.
#[must_use]
pub fn check_present(documents: &[&AdminDocument], present: &Present) -> Vec<(usize, Diagnostic)> {
    let mut problems = cycles(documents, &present.queues);
    let tree = Tree::new(documents, &present.queues);
    for (index, document) in documents.iter().enumerate() {
        let found = match document {
            AdminDocument::Queue(queue) => tree.queue(queue, &present.nodes),
            AdminDocument::Pool(pool) => of_pool(pool, &present.nodes),
            AdminDocument::Policy(_) => Vec::new(),
        };
        problems.extend(found.into_iter().map(|problem| (index, problem)));
    }
    problems
}

/// The documents so that a queue comes after its parent; other kinds come first.
pub(super) fn ordered<'d>(documents: &[&'d AdminDocument]) -> Vec<&'d AdminDocument> {
    let tree = Tree::new(documents, &[]);
    let mut list = documents.to_vec();
    // Stable, and a cycle ends at its length.
    list.sort_by_key(|document| match document {
        AdminDocument::Queue(queue) => tree.above(queue).len() + 1,
        AdminDocument::Pool(_) | AdminDocument::Policy(_) => 0,
    });
    list
}

/// Queues that would be above themselves; each cycle once.
pub(super) fn cycles(documents: &[&AdminDocument], present: &[QueueSpec]) -> Vec<(usize, Diagnostic)> {
    let tree = Tree::new(documents, present);
    let mut told: BTreeSet<&str> = BTreeSet::new();
    let mut problems = Vec::new();
    for (index, document) in documents.iter().enumerate() {
        let AdminDocument::Queue(queue) = document else { continue };
        let above = tree.above(queue);
        let names: Vec<&str> = above.iter().map(|q| q.name.as_str()).collect();
        if names.len() < 2 || names.last() != Some(&queue.name.as_str()) || told.contains(queue.name.as_str()) {
            continue;
        }
        told.extend(&names);
        let way = names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", whose parent is ");
        let message = format!("`{}` would be above itself: its parent is {way}", queue.name);
        problems.push((
            index,
            Diagnostic::error(DiagnosticCode::Conflict, message)
                .field("parent")
                .help("name another parent, or remove the line for a root"),
        ));
    }
    problems
}

/// The quota tree as it would be.
struct Tree<'q> {
    queues: BTreeMap<&'q str, &'q QueueSpec>,
}

impl<'q> Tree<'q> {
    fn new(documents: &[&'q AdminDocument], present: &'q [QueueSpec]) -> Tree<'q> {
        let new = documents.iter().filter_map(|document| match document {
            AdminDocument::Queue(queue) => Some(queue),
            AdminDocument::Pool(_) | AdminDocument::Policy(_) => None,
        });
        Tree { queues: present.iter().chain(new).map(|queue| (queue.name.as_str(), queue)).collect() }
    }

    /// The queues above one, the nearest first; in a cycle up to the queue itself.
    fn above(&self, queue: &QueueSpec) -> Vec<&'q QueueSpec> {
        let mut above: Vec<&QueueSpec> = Vec::new();
        let mut next = queue.parent.as_deref();
        while let Some(parent) = next.and_then(|name| self.queues.get(name).copied()) {
            let again = above.iter().any(|q| q.name == parent.name);
            if again {
                break;
            }
            above.push(parent);
            next = if parent.name == queue.name { None } else { parent.parent.as_deref() };
        }
        above
    }

    fn queue(&self, queue: &QueueSpec, nodes: &[PresentNode]) -> Vec<Diagnostic> {
        let mut problems = Vec::new();
        if let Some(parent) = queue.parent.as_deref().filter(|p| *p != queue.name && !self.queues.contains_key(p)) {
            let names = || self.queues.keys().copied().filter(|name| *name != queue.name);
            let help = match nearest(parent, names()) {
                Some(near) => format!("write `{near}`"),
                None => "declare it too, or remove the line for a root".to_owned(),
            };
            let d = Diagnostic::error(DiagnosticCode::NotThere, format!("there is no queue `{parent}`"));
            problems.push(d.field("parent").help(help));
        }
        for (gpu_type, quota) in &queue.quotas {
            problems.extend(no_such_type(gpu_type, nodes));
            problems.extend(self.too_much(queue, gpu_type, quota, nodes));
        }
        problems
    }

    /// Guarantees and limits that can never be had in full.
    fn too_much(&self, queue: &QueueSpec, gpu_type: &str, quota: &QuotaSpec, nodes: &[PresentNode]) -> Vec<Diagnostic> {
        let mut problems = Vec::new();
        let mut warn = |key: &str, message: String, help: &str| {
            let field = format!("quotas.{gpu_type}.{key}");
            problems.push(Diagnostic::warning(DiagnosticCode::NeverFits, message).field(field).help(help));
        };
        let above = self.above(queue);
        let bound = above.iter().filter_map(|q| Some((q, q.quotas.get(gpu_type)?.limit?))).min_by_key(|(_, l)| *l);
        if let Some((parent, bound)) = bound {
            if quota.guarantee > bound {
                let message =
                    format!("the guarantee of {} is above the limit of `{}`, {bound}", quota.guarantee, parent.name);
                warn("guarantee", message, "lower it, or raise that limit");
            } else if let Some(limit) = quota.limit.filter(|limit| *limit > bound) {
                let message = format!("the limit of {limit} is never reached: `{}` has {bound}", parent.name);
                warn("limit", message, "lower it, or raise that limit");
            }
        }
        let there: u64 = nodes.iter().filter(|n| n.gpu_type == gpu_type).map(|n| u64::from(n.gpus)).sum();
        let roots = self.queues.values().filter(|q| q.parent.is_none());
        let sum: u64 = roots.map(|q| self.guarantee(q, gpu_type, 0)).sum();
        if quota.guarantee > 0 && there > 0 && sum > there {
            let message = format!("{sum} GPUs of {gpu_type} are guaranteed to all queues, and there are {there}");
            warn(
                "guarantee",
                message,
                "lower guarantees; until then each queue is sure only of its part of what there is",
            );
        }
        problems
    }

    /// A queue guarantees what those below it do, or more.
    fn guarantee(&self, queue: &QueueSpec, gpu_type: &str, depth: usize) -> u64 {
        let own = queue.quotas.get(gpu_type).map_or(0, |quota| u64::from(quota.guarantee));
        let below = self.queues.values().filter(|q| q.parent.as_deref() == Some(&queue.name));
        // In a cycle, which is told elsewhere, this must end too.
        let sum = if depth < 64 { below.map(|q| self.guarantee(q, gpu_type, depth + 1)).sum() } else { 0 };
        own.max(sum)
    }
}

fn no_such_type(gpu_type: &str, nodes: &[PresentNode]) -> Option<Diagnostic> {
    if nodes.is_empty() || nodes.iter().any(|n| n.gpu_type == gpu_type) {
        return None;
    }
    let types: BTreeSet<&str> = nodes.iter().map(|n| n.gpu_type.as_str()).collect();
    let help = match nearest(gpu_type, types.iter().copied()) {
        Some(near) => format!("write `{near}`"),
        None => format!("there are {}", one_of(types)),
    };
    let message = format!("no node has GPUs of type `{gpu_type}`");
    let field = format!("quotas.{gpu_type}");
    Some(Diagnostic::warning(DiagnosticCode::NotThere, message).field(field).help(help))
}

fn of_pool(pool: &PoolSpec, nodes: &[PresentNode]) -> Vec<Diagnostic> {
    let warning = |field: &str, message: String, help: String| {
        Diagnostic::warning(DiagnosticCode::NotThere, message).field(field).help(help)
    };
    if nodes.is_empty() {
        return Vec::new();
    }
    let own: BTreeSet<&str> = nodes.iter().filter(|n| n.pool == pool.name).map(|n| n.name.as_str()).collect();
    let pools: BTreeSet<&str> = nodes.iter().map(|n| n.pool.as_str()).collect();
    if own.is_empty() {
        let help = match nearest(&pool.name, pools.iter().copied()) {
            Some(near) => format!("write `{near}`"),
            None => format!("the nodes there are belong to {}", one_of(pools)),
        };
        return vec![warning("name", format!("no node belongs to a pool `{}`", pool.name), help)];
    }
    let Some(topology) = &pool.topology else { return Vec::new() };
    let mut named: Vec<(String, String)> = Vec::new();
    for (name, domain) in &topology.domains {
        names(domain, &join("topology.domains", name), &mut named);
    }
    let mut problems = Vec::new();
    let mut gone: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (field, name) in named.iter().filter(|(_, name)| !own.contains(name.as_str())) {
        gone.entry(field).or_default().push(name);
    }
    for (field, names) in gone {
        let first = names.first().copied().unwrap_or_default();
        let more = names.len() - 1;
        let message = match nodes.iter().find(|n| n.name == first) {
            Some(other) => format!("node `{first}` belongs to the pool `{}`", other.pool),
            None => format!("there is no node `{first}`"),
        };
        let more = if more == 0 { String::new() } else { format!("; the same holds for {more} more of these") };
        let message = format!("{message}{more}");
        let help = match nearest(first, own.iter().copied()) {
            Some(near) => format!("write `{near}`, or leave it: it counts from when it comes"),
            None => "`aviflow node ls` lists the nodes; one that is yet to come may stand here".to_owned(),
        };
        problems.push(warning(field, message, help));
    }
    let placed: BTreeSet<&str> = named.iter().map(|(_, name)| name.as_str()).collect();
    let missing: Vec<&str> = own.iter().copied().filter(|name| !placed.contains(name)).collect();
    if !missing.is_empty() {
        let message = format!(
            "{} of the pool {} in no domain: {}",
            count(missing.len() as u64, "node"),
            if missing.len() == 1 { "is" } else { "are" },
            super::ranges::compress(missing).join(", ")
        );
        let help = "add them; until then each is as far from every other as can be".to_owned();
        problems.push(warning("topology.domains", message, help));
    }
    problems
}

/// The nodes of a domain, each with the field that names it.
fn names(domain: &Domain, path: &str, out: &mut Vec<(String, String)>) {
    match domain {
        Domain::Nodes(texts) => {
            for (i, text) in texts.iter().enumerate() {
                let nodes = expand(text).unwrap_or_default();
                out.extend(nodes.into_iter().map(|node| (format!("{path}[{i}]"), node)));
            }
        }
        Domain::Domains(inner) => inner.iter().for_each(|(name, domain)| names(domain, &join(path, name), out)),
    }
}
