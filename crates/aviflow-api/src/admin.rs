//! Documents of administrators: queues, pools and the policy, several in one file, separated by `---`.
//!
//! Each is one flat mapping whose `kind` says what it is. They are read like a job's file
//! ([`crate::file`]): by a description that is data ([`fields`]), every problem at once, with its
//! place. [`AdminFile::check`] compares what was understood with what there is: other queues, nodes.
//! What comes without a file goes through [`check_document`].
//!
//! - [`AdminDocument`] and what is in it: the canonical form, the same in REST and in the store
//! - [`to_queue`], [`to_pool`], [`to_policy`] and back: what the core decides by
//! - [`print()`]: a file that can be applied again
//! - [`kubernetes`]: a pool's part for Kubernetes
//! - [`ranges`][]: `node-[1-8]`

mod check;
mod convert;
mod defaults;
pub mod fields;
pub mod kubernetes;
mod present;
mod print;
pub mod ranges;
mod spec;

pub use convert::{from_policy, from_pool, from_queue, to_policy, to_pool, to_queue};
pub use defaults::{apply_queue_defaults, check_queue};
pub use present::{Present, PresentNode, check_present};
pub use print::print;
pub use spec::*;

use crate::diagnostic::{Diagnostic, DiagnosticCode, sort};
use crate::file::report::Report;
use crate::file::shape::Object;
use crate::file::{Places, Priorities, found, read_object};
use crate::source::{Sources, Span};
use crate::suggest::{nearest, one_of};
use crate::yaml::{self, Node, Value};
use aviflow_core::model::{Policy, TimeSharing};
use serde_json::{Map, Value as Json, json};

/// A file that was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct AdminFile {
    /// The text, to render problems in.
    pub sources: Sources,
    /// The documents in the order of the text.
    pub documents: Vec<ParsedAdmin>,
    /// What is probably not meant.
    pub warnings: Vec<Diagnostic>,
}

/// A document of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedAdmin {
    /// What it says.
    pub document: AdminDocument,
    /// Where each field stands; fields that are defaults stand nowhere.
    pub places: Places,
}

impl AdminFile {
    /// The documents in an order in which each can be applied by itself, where there is one: parents
    /// before their children, but who gives a guarantee up before who gets it.
    #[must_use]
    pub fn ordered(&self, present: &Present) -> Vec<&AdminDocument> {
        let documents: Vec<&AdminDocument> = self.documents.iter().map(|d| &d.document).collect();
        present::ordered(&documents, &present.queues)
    }

    /// Compares the documents with what there is.
    ///
    /// # Errors
    /// What is wrong, warnings included, in the order of the text; where nothing is, the warnings.
    pub fn check(&self, present: &Present) -> Result<Vec<Diagnostic>, Vec<Diagnostic>> {
        let documents: Vec<&AdminDocument> = self.documents.iter().map(|d| &d.document).collect();
        let placed = check_present(&documents, present).into_iter().map(|(index, problem)| {
            let places = self.documents.get(index).map(|d| &d.places);
            places.map_or(problem.clone(), |places| places.place(problem, &self.sources))
        });
        let mut list: Vec<Diagnostic> = placed.collect();
        sort(&mut list, &self.sources);
        if list.iter().any(Diagnostic::is_error) { Err(list) } else { Ok(list) }
    }
}

/// Reads a file of documents.
///
/// # Errors
/// Everything that is wrong with it, in the order of the text, warnings included; with the text
/// to render it in.
pub fn parse_admin(name: &str, bytes: &[u8], priorities: &Priorities) -> Result<AdminFile, (Sources, Vec<Diagnostic>)> {
    let mut sources = Sources::default();
    let roots = match yaml::parse_stream(&mut sources, name, bytes) {
        Ok(roots) => roots,
        Err(list) => return Err((sources, list)),
    };
    if roots.is_empty() {
        let d = Diagnostic::error(DiagnosticCode::Empty, format!("{name} is empty"))
            .help("a queue needs two lines: `kind: Queue` and `name: research`");
        return Err((sources, vec![d]));
    }
    let (documents, mut list) = read_all(&sources, &roots, priorities);
    sort(&mut list, &sources);
    if list.iter().any(Diagnostic::is_error) {
        return Err((sources, list));
    }
    Ok(AdminFile { sources, documents, warnings: list })
}

/// Checks a document that did not come as a file, by the same rules.
///
/// # Errors
/// Everything that is wrong with it. Places count in the document as indented JSON.
pub fn check_document(document: &AdminDocument, priorities: &Priorities) -> Result<Vec<Diagnostic>, Vec<Diagnostic>> {
    let text = serde_json::to_string_pretty(document)
        .map_err(|e| vec![Diagnostic::error(DiagnosticCode::Internal, e.to_string())])?;
    match parse_admin("request", text.as_bytes(), priorities) {
        Ok(file) => Ok(file.warnings),
        Err((_, list)) => Err(list),
    }
}

/// All documents, and all that is to say about them.
fn read_all(sources: &Sources, roots: &[Node], priorities: &Priorities) -> (Vec<ParsedAdmin>, Vec<Diagnostic>) {
    let mut documents = Vec::new();
    let mut seen: Vec<(&str, Option<&str>, Span)> = Vec::new();
    let mut all = Report::new(sources);
    for root in roots {
        let mut report = Report::new(sources);
        if let Some((kind, object)) = kind(&mut report, root) {
            twice(&mut report, root, kind, &mut seen);
            if let Some(document) = read_one(&mut report, root, kind, object, priorities) {
                documents.push(ParsedAdmin { document, places: std::mem::take(&mut report.places) });
            }
        }
        all.list.append(&mut report.list);
    }
    for (index, problem) in present::cycles(&documents.iter().map(|d| &d.document).collect::<Vec<_>>(), &[]) {
        all.list.extend(documents.get(index).map(|d| d.places.place(problem, sources)));
    }
    crate::check::literals(&mut all);
    (documents, all.list)
}

/// Reports a document whose kind and name an earlier one has too.
fn twice<'n>(
    report: &mut Report<'_>,
    root: &'n Node,
    kind: &'static str,
    seen: &mut Vec<(&'n str, Option<&'n str>, Span)>,
) {
    let name = root.get("name").and_then(Node::text);
    let at = root.get("name").or_else(|| root.get("kind")).map_or(root.span, |node| node.span);
    if kind != "Policy" && name.is_none() {
        return;
    }
    if let Some((.., first)) = seen.iter().find(|(k, n, _)| (*k, *n) == (kind, name)) {
        let line = report.sources.place(*first).line;
        let what = name.map_or("a policy".to_owned(), |name| format!("the {} `{name}`", kind.to_lowercase()));
        let message = format!("{what} is in this file twice, first in line {line}");
        let d = Diagnostic::error(DiagnosticCode::Duplicate, message)
            .help("keep one of them; the last one would silently win")
            .field(if name.is_some() { "name" } else { "kind" })
            .at(report.sources, at)
            .other(report.sources, *first);
        report.list.push(d);
        return;
    }
    seen.push((kind, name, at));
}

/// Which kind a document is of.
fn kind(report: &mut Report<'_>, root: &Node) -> Option<(&'static str, &'static Object)> {
    let Value::Map(entries) = &root.value else {
        let message = format!("a document is a mapping of keys to values; this is {}", found(root));
        report.error(
            DiagnosticCode::WrongType,
            "",
            root.span,
            message,
            "begin with `kind: Queue` and `name: research`",
        );
        return None;
    };
    if let (Some(spec), true) = (entries.iter().find(|e| e.key == "spec"), root.get("metadata").is_some()) {
        report.error(
            DiagnosticCode::Unsupported,
            "spec",
            spec.key_span,
            "in a file the fields stand flat; `metadata` and `spec` belong to objects of Kubernetes",
            "write `name` and what is in `spec` beside `kind`, and leave `apiVersion` out",
        );
        return None;
    }
    let kinds = || fields::KINDS.iter().map(|(name, _)| *name);
    let Some(entry) = entries.iter().find(|e| e.key == "kind") else {
        let at = entries.first().map_or(root.span, |e| e.key_span);
        let help = if root.get("run").is_some() {
            "this is a job; `aviflow run FILE` submits it".to_owned()
        } else {
            let hit = |kind: &str| entries.iter().filter(|e| fields::kinds_with(&e.key).any(|k| k == kind)).count();
            let mut hits: Vec<(usize, &str)> = kinds().map(|k| (hit(k), k)).collect();
            hits.sort_unstable();
            match hits.as_slice() {
                [.., (second, _), (first, kind)] if first > second => format!("add `kind: {kind}`"),
                _ => format!("add `kind:` with {}", one_of(kinds())),
            }
        };
        report.error(DiagnosticCode::MissingKey, "kind", at, "a document says by `kind` what it is", help);
        return None;
    };
    report.places.put("kind", Some(entry.key_span), entry.value.span);
    let told = entry.value.text().unwrap_or_default();
    if let Some(known) = fields::KINDS.iter().find(|(name, _)| *name == told) {
        return Some((known.0, known.1));
    }
    let (message, help) = if entry.value.is_null() || entry.value.text().is_none() {
        ("`kind` has no value".to_owned(), format!("write {}", one_of(kinds())))
    } else {
        let lower = told.to_lowercase();
        let means = [("job", ""), ("queue", "Queue"), ("pool", "Pool"), ("topology", "Pool"), ("policy", "Policy")];
        let meant = nearest(told, kinds()).or_else(|| means.iter().find(|(w, _)| lower.contains(w)).map(|(_, k)| *k));
        let help = match meant {
            Some("") => "a job has no `kind`; `aviflow run FILE` submits it".to_owned(),
            Some(kind) => format!("write `{kind}`"),
            None => format!("write {}", one_of(kinds())),
        };
        (format!("there is no kind `{told}`"), help)
    };
    report.error(DiagnosticCode::UnknownChoice, "kind", entry.value.span, message, help);
    None
}

fn read_one(
    report: &mut Report<'_>,
    root: &Node,
    kind: &'static str,
    object: &'static Object,
    priorities: &Priorities,
) -> Option<AdminDocument> {
    let mut json = read_object(report, root, object);
    match kind {
        "Queue" => {
            check::queue(report, &json, priorities);
            fill_queue(&mut json);
        }
        "Pool" => check::pool(report, root, &json),
        _ => fill_policy(&mut json),
    }
    fill_time_sharing(&mut json);
    if report.list.iter().any(Diagnostic::is_error) {
        return None;
    }
    match serde_json::from_value(Json::Object(json)) {
        Ok(document) => Some(document),
        Err(e) => {
            let d = Diagnostic::error(DiagnosticCode::Internal, e.to_string()).help("please report this document");
            report.list.push(d);
            None
        }
    }
}

fn fill(json: &mut Map<String, Json>, defaults: impl Into<Json>) {
    if let Json::Object(defaults) = defaults.into() {
        for (key, value) in defaults {
            json.entry(key).or_insert(value);
        }
    }
}

fn fill_queue(json: &mut Map<String, Json>) {
    fill(json, json!({"state": "open", "lend": true, "borrow": true, "reclaim": true}));
    let quotas = json.get_mut("quotas").and_then(Json::as_object_mut);
    for quota in quotas.into_iter().flatten().filter_map(|(_, quota)| quota.as_object_mut()) {
        fill(quota, json!({"guarantee": 0, "weight": 1}));
    }
}

fn fill_policy(json: &mut Map<String, Json>) {
    fill(json, serde_json::to_value(from_policy(&Policy::default())).unwrap_or_default());
}

/// `on` and `off` are the usual figures with or without effect.
fn fill_time_sharing(json: &mut Map<String, Json>) {
    let usual = |enabled| {
        let sharing = TimeSharingSpec { enabled, ..TimeSharingSpec::from(TimeSharing::on()) };
        serde_json::to_value(sharing).unwrap_or_default()
    };
    match json.get_mut("timeSharing") {
        Some(Json::Object(sharing)) => fill(sharing, usual(true)),
        Some(word) => *word = usual(word.as_str() == Some("on")),
        None => {}
    }
}
