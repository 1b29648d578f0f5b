//! A job's file: from text to the canonical [`JobSpec`], with every problem at once.
//!
//! Three stages, each of which reports all that it finds: the text becomes a tree
//! ([`crate::yaml`]), the tree is read by its description ([`fields`] and [`shape`]) and
//! shorthand is resolved, and the result is checked for what cannot be together
//! ([`crate::check`]). Options of the command line are put into the tree before that, so
//! they are checked by the same rules. Nothing here reads a file.
//!
//! Defaults: `queue` and `priority` from [`Defaults`], one node, one GPU on it, one process a
//! node, preemptible, no retry. `gpusPerNode` is 1 and not a whole node because a job that
//! says nothing should take the least; with several nodes that is seldom meant, so it is told.

mod conform;
pub mod fields;
pub mod formats;
pub(crate) mod report;
mod run;
mod set;
pub mod shape;

pub(crate) use conform::{found, read as read_object, unique};
pub use report::Places;
pub use run::BASH;
pub use set::Options;

use crate::diagnostic::{Diagnostic, DiagnosticCode, sort};
use crate::source::Sources;
use crate::spec::JobSpec;
use crate::suggest::{nearest, one_of};
use crate::yaml::{self, Node};
use report::Report;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// Priorities by name; a higher number goes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Priorities(pub BTreeMap<String, i32>);

/// The priorities that are always there.
pub const PRIORITIES: [(&str, i32); 4] = [("low", -100), ("normal", 0), ("high", 100), ("urgent", 200)];

impl Default for Priorities {
    fn default() -> Priorities {
        Priorities(PRIORITIES.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect())
    }
}

impl Priorities {
    /// The number of a priority.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<i32> {
        self.0.get(name).copied()
    }

    /// The names, the lowest first.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<(i32, &str)> = self.0.iter().map(|(name, n)| (*n, name.as_str())).collect();
        names.sort_unstable();
        names.into_iter().map(|(_, name)| name).collect()
    }
}

/// What a document need not say, because the configuration does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// The queue.
    pub queue: String,
    /// The priority.
    pub priority: String,
    /// All priorities.
    pub priorities: Priorities,
}

impl Default for Defaults {
    fn default() -> Defaults {
        Defaults { queue: "default".to_owned(), priority: "normal".to_owned(), priorities: Priorities::default() }
    }
}

/// A document that was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// The job.
    pub spec: JobSpec,
    /// What is probably not meant.
    pub warnings: Vec<Diagnostic>,
    /// Where each field stands; fields that are defaults stand nowhere.
    pub places: Places,
}

/// Reads a job's file. The same as [`Document::parse`] and [`Document::read`].
///
/// # Errors
/// Everything that is wrong with it, in the order of the text, warnings included.
pub fn parse_job(name: &str, bytes: &[u8], defaults: &Defaults) -> Result<Parsed, Vec<Diagnostic>> {
    Document::parse(name, bytes).map_err(|(_, diagnostics)| diagnostics)?.read(defaults)
}

/// Checks a canonical document that did not come as a file, by the same rules.
///
/// # Errors
/// Everything that is wrong with it. Places count in the document as indented JSON.
pub fn check_spec(spec: &JobSpec, defaults: &Defaults) -> Result<Vec<Diagnostic>, Vec<Diagnostic>> {
    let text = serde_json::to_string_pretty(spec)
        .map_err(|e| vec![Diagnostic::error(DiagnosticCode::Internal, e.to_string())])?;
    parse_job("request", text.as_bytes(), defaults).map(|parsed| parsed.warnings)
}

/// A job's document before it is understood: its texts and the tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    sources: Sources,
    root: Node,
}

impl Document {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// Why it is no tree, with the texts to show it in.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Document, (Sources, Vec<Diagnostic>)> {
        let mut sources = Sources::default();
        match yaml::parse_bytes(&mut sources, name, bytes) {
            Ok(root) if root.is_null() => {
                let d = Diagnostic::error(DiagnosticCode::Empty, format!("{name} is empty"))
                    .help("a job needs at least two lines: `name: my-training` and `run: python train.py`");
                Err((sources, vec![d]))
            }
            Ok(root) => Ok(Document { sources, root }),
            Err(diagnostics) => Err((sources, diagnostics)),
        }
    }

    /// The texts, to render problems in.
    #[must_use]
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The tree, options included.
    #[must_use]
    pub fn root(&self) -> &Node {
        &self.root
    }

    /// The job that it declares.
    ///
    /// # Errors
    /// Everything that is wrong with it, in the order of the text, warnings included.
    pub fn read(&self, defaults: &Defaults) -> Result<Parsed, Vec<Diagnostic>> {
        let mut report = Report::new(&self.sources);
        let json = conform::read(&mut report, &self.root, &fields::JOB);
        let spec = canonical(&mut report, &self.root, json, defaults);
        if let Some(spec) = &spec {
            crate::check::combinations(&mut report, spec, self.root.get("run"));
        }
        crate::check::literals(&mut report);
        sort(&mut report.list, &self.sources);
        let refused = report.list.iter().any(Diagnostic::is_error);
        match spec {
            Some(spec) if !refused => Ok(Parsed { spec, warnings: report.list, places: report.places }),
            _ => Err(report.list),
        }
    }
}

/// Resolves shorthand and defaults. What is missing or wrong was told and gets a stand-in,
/// so that the rest can still be checked.
fn canonical(
    report: &mut Report<'_>,
    root: &Node,
    mut json: Map<String, Json>,
    defaults: &Defaults,
) -> Option<JobSpec> {
    let default = |json: &mut Map<String, Json>, key: &str, value: Json| {
        json.entry(key).or_insert(value);
    };
    if json.contains_key("run") {
        json.remove("run");
        if let Some(words) = root.get("run").and_then(|node| run::command(report, node)) {
            json.insert("run".to_owned(), Json::from(words));
        }
    }
    default(&mut json, "run", json!(["true"]));
    default(&mut json, "name", json!("unnamed"));
    priority(report, &mut json, defaults);
    default(&mut json, "queue", json!(defaults.queue));
    default(&mut json, "nodes", json!(1));
    nodes(&mut json);
    if !report.places.has("gpusPerNode") {
        several_nodes_of_one_gpu(report, &json);
    }
    default(&mut json, "gpusPerNode", json!(1));
    if let Some(Json::String(one)) = json.get("gpuType") {
        let list = json!([one]);
        json.insert("gpuType".to_owned(), list);
    }
    default(&mut json, "processes", json!("perNode"));
    default(&mut json, "preemptible", json!(true));
    default(&mut json, "retry", json!({}));
    if let Some(Json::Object(retry)) = json.get_mut("retry") {
        default(retry, "failures", json!(0));
    }
    if let Some(Json::Array(after)) = json.get_mut("after") {
        for after in after.iter_mut().filter_map(Json::as_object_mut) {
            default(after, "on", json!("succeeded"));
        }
    }
    if report.list.iter().any(Diagnostic::is_error) {
        drop_incomplete(&mut json);
    }
    match serde_json::from_value(Json::Object(json)) {
        Ok(spec) => Some(spec),
        // Only without an error before it would this be a mistake of the descriptions.
        Err(_) if report.list.iter().any(Diagnostic::is_error) => None,
        Err(e) => {
            report
                .list
                .push(Diagnostic::error(DiagnosticCode::Internal, e.to_string()).help("please report this document"));
            None
        }
    }
}

fn priority(report: &mut Report<'_>, json: &mut Map<String, Json>, defaults: &Defaults) {
    let names = defaults.priorities.names();
    match json.get("priority").and_then(Json::as_str) {
        Some(name) => {
            let known = check_priority(report, "priority", name, &defaults.priorities);
            json.retain(|key, _| known || key != "priority");
        }
        None if !report.places.has("priority") && !names.contains(&defaults.priority.as_str()) => {
            let message = format!("the configuration's default priority `{}` is not defined", defaults.priority);
            let help = format!("add `priority:` with {}", one_of(names.iter().copied()));
            report.error_at(DiagnosticCode::UnknownChoice, "priority", message, help);
        }
        None => {}
    }
    json.entry("priority").or_insert_with(|| json!(defaults.priority));
}

/// Reports a priority that there is not.
pub(crate) fn check_priority(report: &mut Report<'_>, path: &str, name: &str, priorities: &Priorities) -> bool {
    let names = priorities.names();
    if names.contains(&name) {
        return true;
    }
    let message = format!("there is no priority `{name}`");
    let number = name.parse::<i32>().ok();
    let numbered = || names.iter().copied().find(|n| number.is_some() && priorities.get(n) == number);
    let help = match nearest(name, names.iter().copied()).or_else(numbered) {
        Some(near) => format!("write `{near}`"),
        None => format!("write {}", one_of(names.iter().copied())),
    };
    report.error_at(DiagnosticCode::UnknownChoice, path, message, help);
    false
}

/// `nodes: 4` is from 4 to 4.
fn nodes(json: &mut Map<String, Json>) {
    let (min, max) = match json.get("nodes") {
        Some(Json::Object(range)) => (range.get("min"), range.get("max")),
        n => (n, n),
    };
    // One end that was wrong is taken from the other.
    let one = json!(1);
    let (min, max) = (min.or(max).unwrap_or(&one).clone(), max.or(min).unwrap_or(&one).clone());
    json.insert("nodes".to_owned(), json!({"min": min, "max": max}));
}

/// Warns of what is seldom meant. On the command line it is: there one tries things out.
fn several_nodes_of_one_gpu(report: &mut Report<'_>, json: &Map<String, Json>) {
    let max = json.get("nodes").and_then(|n| n.get("max")).and_then(Json::as_u64).unwrap_or(1);
    let in_file = report.places.value("nodes").is_some_and(|s| s.source.0 == 0);
    let file = report.sources.get(crate::source::SourceId(0)).is_some_and(|s| !s.name.starts_with("--"));
    if max > 1 && in_file && file {
        report.warning_at(
            DiagnosticCode::Default,
            "nodes",
            format!("each of the {max} nodes gives one GPU, as `gpusPerNode` is not given"),
            "write `gpusPerNode: 8` for whole nodes, or `gpusPerNode: 1` if this is meant",
        );
    }
}

/// Parts of lists and mappings from which a required key is missing cannot be read.
fn drop_incomplete(json: &mut Map<String, Json>) {
    let lists = [("data", &["name", "source"][..]), ("after", &["job"]), ("notify", &["webhook", "on"])];
    for (key, required) in lists {
        if let Some(Json::Array(items)) = json.get_mut(key) {
            items.retain(|item| required.iter().all(|r| item.get(r).is_some()));
        }
    }
    let has = |json: &Map<String, Json>, key: &str, inner: &str| json.get(key).is_none_or(|v| v.get(inner).is_some());
    if !has(json, "checkpoint", "path") {
        json.remove("checkpoint");
    }
    let incomplete = |code: &Json| code.is_object() && (code.get("git").is_none() || code.get("ref").is_none());
    if json.get("code").is_some_and(incomplete) {
        json.remove("code");
    }
}
