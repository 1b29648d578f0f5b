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
    /// Whether the pool is of a Kubernetes cluster.
    pub kubernetes: bool,
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
    problems.extend(tree.guarantees(documents));
    for (index, document) in documents.iter().enumerate() {
        let found = match document {
            AdminDocument::Queue(queue) => tree.queue(queue, &present.nodes),
            AdminDocument::Pool(pool) => {
                let mut found = of_pool(pool, &present.nodes);
                found.extend(ignored(pool).filter(|_| !present.kubernetes));
                found
            }
            AdminDocument::Policy(_) => Vec::new(),
        };
        problems.extend(found.into_iter().map(|problem| (index, problem)));
    }
    problems
}

/// The documents in an order in which each goes together with those before it and with what there
/// is, as far as there is one: pools and the policy, then parents before children, but who gives a
/// guarantee up before who gets it.
pub(super) fn ordered<'d>(documents: &[&'d AdminDocument], present: &[QueueSpec]) -> Vec<&'d AdminDocument> {
    let whole = Tree::new(documents, present);
    let mut done: Vec<&AdminDocument> = Vec::new();
    let mut rest: Vec<(&AdminDocument, &QueueSpec)> = Vec::new();
    for document in documents {
        match document {
            AdminDocument::Queue(queue) => rest.push((document, queue)),
            AdminDocument::Pool(_) | AdminDocument::Policy(_) => done.push(document),
        }
    }
    rest.sort_by_key(|(_, queue)| whole.above(queue).len());
    while !rest.is_empty() {
        let fits = |(document, queue): &(&AdminDocument, &QueueSpec)| {
            let so_far: Vec<&AdminDocument> = done.iter().copied().chain([*document]).collect();
            let tree = Tree::new(&so_far, present);
            let there = queue.parent.as_deref().is_none_or(|parent| tree.queues.contains_key(parent));
            there && tree.line(queue).into_iter().all(|q| tree.below(q).is_empty())
        };
        let next = rest.iter().position(fits).unwrap_or(0);
        done.push(rest.remove(next).0);
    }
    done
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
    children: BTreeMap<&'q str, Vec<&'q QueueSpec>>,
}

/// A guarantee or limit that is too small for the guarantees below it.
struct TooSmall {
    gpu_type: String,
    key: &'static str,
    has: u32,
    children: u64,
}

impl<'q> Tree<'q> {
    fn new(documents: &[&'q AdminDocument], present: &'q [QueueSpec]) -> Tree<'q> {
        let new = documents.iter().filter_map(|document| match document {
            AdminDocument::Queue(queue) => Some(queue),
            AdminDocument::Pool(_) | AdminDocument::Policy(_) => None,
        });
        let queues: BTreeMap<&str, &QueueSpec> =
            present.iter().chain(new).map(|queue| (queue.name.as_str(), queue)).collect();
        let mut children: BTreeMap<&str, Vec<&QueueSpec>> = BTreeMap::new();
        for queue in queues.values() {
            if let Some(parent) = &queue.parent {
                children.entry(parent).or_default().push(queue);
            }
        }
        Tree { queues, children }
    }

    /// A queue, and those above it.
    fn line(&self, queue: &'q QueueSpec) -> Vec<&'q QueueSpec> {
        let above = self.above(queue).into_iter().filter(|q| q.name != queue.name);
        std::iter::once(queue).chain(above).collect()
    }

    /// What of a queue is too small for the guarantees below it. One that says nothing guarantees what they do.
    fn below(&self, queue: &QueueSpec) -> Vec<TooSmall> {
        let mut found = Vec::new();
        for (gpu_type, quota) in &queue.quotas {
            let below = self.children.get(queue.name.as_str()).into_iter().flatten();
            let children: u64 = below.map(|q| self.guarantee(q, gpu_type, 0)).sum();
            let bounds = [("guarantee", Some(quota.guarantee).filter(|g| *g > 0)), ("limit", quota.limit)];
            let too_small = bounds.into_iter().find_map(|(key, bound)| {
                let has = bound.filter(|bound| children > u64::from(*bound))?;
                Some(TooSmall { gpu_type: gpu_type.clone(), key, has, children })
            });
            found.extend(too_small);
        }
        found
    }

    /// Guarantees that do not fit into those above them, each at the document that says most of it.
    fn guarantees(&self, documents: &[&'q AdminDocument]) -> Vec<(usize, Diagnostic)> {
        let queue = |document: &&'q AdminDocument| match document {
            AdminDocument::Queue(queue) => Some(queue),
            AdminDocument::Pool(_) | AdminDocument::Policy(_) => None,
        };
        let own: BTreeMap<&str, usize> =
            (0..).zip(documents).filter_map(|(i, d)| Some((queue(d)?.name.as_str(), i))).collect();
        let mut told: BTreeSet<(&str, String)> = BTreeSet::new();
        let mut problems = Vec::new();
        for (index, changed) in (0..).zip(documents).filter_map(|(i, d)| Some((i, queue(d)?))) {
            for above in self.line(changed) {
                for TooSmall { gpu_type, key, has, children } in self.below(above) {
                    // At the queue itself, if it is among the documents; else at the first that says anything of the type.
                    let at = own.get(above.name.as_str()).copied().unwrap_or(index);
                    let itself = above.name == changed.name;
                    let says = itself || changed.quotas.contains_key(&gpu_type);
                    if at != index || !says || !told.insert((&above.name, gpu_type.clone())) {
                        continue;
                    }
                    let message = format!(
                        "the queues below `{}` are guaranteed {children} GPUs of {gpu_type} together, and its own {key} is {has}",
                        above.name
                    );
                    let field = if itself {
                        format!("quotas.{gpu_type}.{key}")
                    } else {
                        format!("quotas.{gpu_type}.guarantee")
                    };
                    let d = Diagnostic::error(DiagnosticCode::NeverFits, message)
                        .field(field)
                        .help(format!("raise the {key} of `{}`, or lower the guarantees below it", above.name));
                    problems.push((index, d));
                }
            }
        }
        problems
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
        if let Some((parent, bound)) = bound
            && let Some(limit) = quota.limit.filter(|limit| *limit > bound)
        {
            let message = format!("the limit of {limit} is never reached: `{}` has {bound}", parent.name);
            warn("limit", message, "lower it, or raise that limit");
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
        let below = self.children.get(queue.name.as_str()).into_iter().flatten();
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

/// That a pool's part for Kubernetes means nothing here.
fn ignored(pool: &PoolSpec) -> Option<Diagnostic> {
    pool.kubernetes.as_ref()?;
    let message = "this control plane's pool is not of Kubernetes; what stands here is left aside";
    let help = "nothing is wrong if the file serves both; else name the cluster's control plane by `--context`";
    Some(Diagnostic::warning(DiagnosticCode::Unsupported, message).field("kubernetes").help(help))
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
    let by_labels = pool.kubernetes.as_ref().is_some_and(|k| !k.topology_keys.is_empty());
    if !missing.is_empty() && !by_labels {
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
