//! What cannot be together in a document whose parts are right.

use super::kubernetes;
use super::ranges::expand;
use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::file::report::{Report, join};
use crate::file::{PRIORITIES, Priorities, check_priority};
use crate::source::Span;
use crate::yaml::{Entry, Node, Value};
use aviflow_core::model::NODE_LEVEL;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

pub(super) fn queue(report: &mut Report<'_>, json: &Map<String, Json>, priorities: &Priorities) {
    let text = |key: &str| json.get(key).and_then(Json::as_str);
    if let (Some(name), Some(parent)) = (text("name"), text("parent"))
        && name == parent
    {
        report.error_at(
            DiagnosticCode::Conflict,
            "parent",
            "a queue cannot be its own parent",
            "name the queue above it, or remove the line for a root",
        );
    }
    let quotas = || json.get("quotas").and_then(Json::as_object).into_iter().flatten();
    let number = |quota: &Json, key: &str| quota.get(key).and_then(Json::as_u64);
    for (gpu_type, quota) in quotas() {
        let guarantee = number(quota, "guarantee").unwrap_or(0);
        if let Some(limit) = number(quota, "limit")
            && limit < guarantee
        {
            report.error_at(
                DiagnosticCode::Conflict,
                &format!("quotas.{gpu_type}.limit"),
                format!("the limit of {limit} is below the guarantee of {guarantee}"),
                format!("write `limit: {guarantee}` or more, or lower `guarantee`"),
            );
        }
    }
    let default = json.get("defaults");
    let preemptible = default.and_then(|d| d.get("preemptible")).and_then(Json::as_bool);
    if preemptible == Some(false)
        && quotas().next().is_some()
        && quotas().all(|(_, q)| number(q, "guarantee").unwrap_or(0) == 0)
    {
        report.warning_at(
            DiagnosticCode::Conflict,
            "defaults.preemptible",
            "a job that may not be suspended runs only within the guarantee, and this queue has none",
            "add a `guarantee`, or remove the line",
        );
    }
    let highest = text("highestPriority").filter(|name| check_priority(report, "highestPriority", name, priorities));
    let usual = default.and_then(|d| d.get("priority")).and_then(Json::as_str);
    let usual = usual.filter(|name| check_priority(report, "defaults.priority", name, priorities));
    let Some((highest, most)) = highest.and_then(|name| Some((name, priorities.get(name)?))) else { return };
    match usual {
        Some(name) if priorities.get(name) > Some(most) => report.error_at(
            DiagnosticCode::Conflict,
            "defaults.priority",
            format!("the default `{name}` is above the highest priority of this queue, `{highest}`"),
            format!("write `{highest}` or a lower one, or raise `highestPriority`"),
        ),
        Some(_) => {}
        None if report.places.has("defaults.priority") => {}
        None => {
            let normal = PRIORITIES.iter().find(|(name, n)| *name == "normal" && *n > most);
            if let Some((normal, _)) = normal {
                report.warning_at(
                    DiagnosticCode::Default,
                    "highestPriority",
                    format!("a job that says no priority has `{normal}`, which this queue does not take"),
                    format!("add `defaults: {{priority: {highest}}}`"),
                );
            }
        }
    }
}

pub(super) fn pool(report: &mut Report<'_>, root: &Node, json: &Map<String, Json>) {
    kubernetes::check(report, json);
    let Some(topology) = json.get("topology") else { return };
    let written = topology.get("levels").and_then(Json::as_array);
    let levels: Vec<&str> = written.into_iter().flatten().filter_map(Json::as_str).collect();
    for (i, level) in levels.iter().enumerate() {
        if level.eq_ignore_ascii_case(NODE_LEVEL) {
            let help = "remove it; name what is above the node, such as `leaf`";
            let message = "`node` is a level of every pool, and is not named";
            report.error_at(DiagnosticCode::Conflict, &format!("topology.levels[{i}]"), message, help);
        }
    }
    // Where a level was wrong, depths cannot be compared.
    let whole = root.get("topology").and_then(|t| t.get("levels")).is_some_and(
        |node| matches!(&node.value, Value::List(items) if !items.is_empty() && items.len() == levels.len()),
    );
    let domains = root.get("topology").and_then(|t| t.get("domains"));
    let labels = root.get("kubernetes").is_some_and(|k| k.get("topologyKeys").is_some());
    if domains.is_none() && !labels {
        report.error_at(
            DiagnosticCode::MissingKey,
            "topology",
            "a topology needs `domains`",
            "add `domains: {leaf-1: node-[1-8]}`, or on Kubernetes the labels that tell them: `kubernetes: {topologyKeys: […]}`",
        );
    }
    if let (true, Some(domains)) = (whole, domains) {
        Tree { report, levels: &levels, domains: BTreeMap::new(), nodes: BTreeMap::new() }.root(domains);
    }
}

/// The switch tree as it is walked.
struct Tree<'t, 'r, 'a> {
    report: &'r mut Report<'a>,
    levels: &'t [&'t str],
    /// Domains by level and name.
    domains: BTreeMap<(usize, &'t str), Span>,
    /// Nodes, with where they stand and in which domain.
    nodes: BTreeMap<String, (Span, &'t str)>,
}

impl<'t> Tree<'t, '_, '_> {
    fn root(&mut self, domains: &'t Node) {
        const PATH: &str = "topology.domains";
        let top = self.levels.len() - 1;
        match &domains.value {
            Value::Map(entries) => self.domains(entries, top, domains.span, PATH),
            Value::List(_) | Value::Scalar { .. } if domains.is_null() => {}
            Value::List(_) | Value::Scalar { .. } => {
                let level = self.levels.get(top).copied().unwrap_or_default();
                self.report.error(
                    DiagnosticCode::WrongType,
                    PATH,
                    domains.span,
                    format!("here stand the domains of the level `{level}` by name, not nodes"),
                    format!("write `{level}-1: {}`", domains.text().unwrap_or("node-[1-8]")),
                );
            }
        }
    }

    fn domains(&mut self, entries: &'t [Entry], level: usize, span: Span, path: &str) {
        let of = self.levels.get(level).copied().unwrap_or_default();
        if entries.is_empty() {
            let help = format!("write `{of}-1: …`, or remove the line");
            self.report.error(DiagnosticCode::NoValue, path, span, format!("no domain of the level `{of}`"), help);
        }
        for entry in entries {
            let (name, path) = (entry.key.as_str(), join(path, &entry.key));
            if let Some(first) = self.domains.insert((level, name), entry.key_span) {
                let line = self.report.sources.place(first).line;
                let message =
                    format!("there are two domains `{name}` of the level `{of}`; the first is in line {line}");
                let d = Diagnostic::error(DiagnosticCode::Duplicate, message)
                    .help("give each domain of a level a name of its own")
                    .field(&path)
                    .at(self.report.sources, entry.key_span)
                    .other(self.report.sources, first);
                self.report.list.push(d);
            }
            self.domain(entry, level, of, &path);
        }
    }

    fn domain(&mut self, entry: &'t Entry, level: usize, of: &str, path: &str) {
        let name = entry.key.as_str();
        let below = level.checked_sub(1).and_then(|l| Some((l, *self.levels.get(l)?)));
        match (&entry.value.value, below) {
            (Value::Map(entries), Some((level, _))) => self.domains(entries, level, entry.value.span, path),
            (Value::Map(_), None) => self.report.error(
                DiagnosticCode::Conflict,
                path,
                entry.key_span,
                format!("`{name}` is of the smallest level, `{of}`, and has domains in it"),
                format!("write its nodes: `{name}: node-[1-8]`; or add the level that is missing to `levels`"),
            ),
            (Value::Scalar { .. } | Value::List(_), _) if entry.value.is_null() => {}
            (Value::Scalar { .. } | Value::List(_), Some((_, below))) => self.report.error(
                DiagnosticCode::Conflict,
                path,
                entry.key_span,
                format!("`{name}` is of the level `{of}`, in which are domains of `{below}`, and here are nodes"),
                format!("write `{name}: {{{below}-1: …}}`; or remove a level from `levels`"),
            ),
            (Value::List(items), None) => {
                for (i, item) in items.iter().enumerate() {
                    // The same text twice was told.
                    if !items.iter().take(i).any(|other| other.text() == item.text()) {
                        self.names(item, name, &format!("{path}[{i}]"));
                    }
                }
            }
            (Value::Scalar { .. }, None) => self.names(&entry.value, name, path),
        }
    }

    /// Nodes of a domain. A node is in one domain of each level.
    fn names(&mut self, node: &Node, domain: &'t str, path: &str) {
        let mut again: Vec<(String, Span, &str)> = Vec::new();
        for name in node.text().and_then(|text| expand(text).ok()).unwrap_or_default() {
            match self.nodes.get(&name) {
                Some((span, other)) => again.push((name, *span, other)),
                None => {
                    self.nodes.insert(name, (node.span, domain));
                }
            }
        }
        let Some((name, first, other)) = again.first() else { return };
        let more = match again.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let verb = if more.is_empty() { "is" } else { "are" };
        let message = if *other == domain {
            format!("`{name}`{more} {verb} in `{domain}` twice")
        } else {
            format!("`{name}`{more} {verb} in `{other}` and in `{domain}`")
        };
        let d = Diagnostic::error(DiagnosticCode::Duplicate, message)
            .help("a node is in one domain of each level; remove it from the other")
            .field(path)
            .at(self.report.sources, node.span)
            .other(self.report.sources, *first);
        self.report.list.push(d);
    }
}
