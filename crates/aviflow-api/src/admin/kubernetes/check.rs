//! What cannot be together in a pool's part for Kubernetes.

use crate::diagnostic::DiagnosticCode;
use crate::file::report::Report;
use crate::suggest::count;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

/// Checks the part; `pool` is the whole document.
pub(in crate::admin) fn check(report: &mut Report<'_>, pool: &Map<String, Json>) {
    let Some(part) = pool.get("kubernetes").and_then(Json::as_object) else { return };
    topology(report, pool.get("topology"), part);
    gpu_types(report, part);
    let fabric = part.get("fabric").and_then(|fabric| fabric.get("env")).and_then(Json::as_object);
    for variable in fabric.into_iter().flat_map(Map::keys).filter(|v| crate::check::is_reserved(v)) {
        report.error_at_key(
            DiagnosticCode::ReservedVariable,
            &format!("kubernetes.fabric.env.{variable}"),
            format!("`{variable}` is set by the platform, from where a job is placed"),
            "remove it",
        );
    }
    if let Some(storage) = part.get("storage").and_then(Json::as_object) {
        let message = match (storage.contains_key("claim"), storage.contains_key("hostPath")) {
            (true, true) => "storage is a claim or a folder of the nodes, not both",
            (false, false) => "storage is a claim or a folder of the nodes, and neither is named",
            _ => return tolerations(report, part),
        };
        let help = "write `storage: {claim: NAME}` or `storage: {hostPath: /FOLDER}`";
        report.error_at(DiagnosticCode::Conflict, "kubernetes.storage", message, help);
    }
    tolerations(report, part);
}

/// Levels get their domains from labels or from the document, one label for each.
fn topology(report: &mut Report<'_>, topology: Option<&Json>, part: &Map<String, Json>) {
    let Some(keys) = part.get("topologyKeys").and_then(Json::as_array) else { return };
    let path = "kubernetes.topologyKeys";
    let part_of = |key: &str| topology.and_then(|t| t.get(key));
    let levels = part_of("levels").and_then(Json::as_array).map_or(0, Vec::len);
    if levels != keys.len() {
        let message = format!("{} for {}", count(keys.len() as u64, "label"), count(levels as u64, "level"));
        let help = "write one label for each of `topology.levels`, the smallest first";
        report.error_at(DiagnosticCode::Conflict, path, message, help);
    }
    if part_of("domains").is_some() {
        let message = "domains come from labels or from `topology.domains`, not from both";
        report.error_at_key(DiagnosticCode::Conflict, path, message, "remove `topology.domains` or `topologyKeys`");
    }
}

/// A value of the label means one type.
fn gpu_types(report: &mut Report<'_>, part: &Map<String, Json>) {
    let types = part.get("gpuTypes").and_then(Json::as_object).into_iter().flatten();
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, values) in types {
        for (i, value) in values.as_array().into_iter().flatten().enumerate() {
            let value = value.as_str().unwrap_or_default();
            if let Some(other) = seen.insert(value, name) {
                let message = format!("`{value}` is `{other}` and `{name}`");
                let path = format!("kubernetes.gpuTypes.{name}[{i}]");
                report.error_at(DiagnosticCode::Duplicate, &path, message, "keep it at one of them");
            }
        }
    }
}

fn tolerations(report: &mut Report<'_>, part: &Map<String, Json>) {
    for (i, toleration) in part.get("tolerations").and_then(Json::as_array).into_iter().flatten().enumerate() {
        let exists = toleration.get("operator").and_then(Json::as_str) == Some("Exists");
        let path = format!("kubernetes.tolerations[{i}]");
        if exists && toleration.get("value").is_some() {
            let message = "`Exists` takes any value, and one is given";
            report.error_at(
                DiagnosticCode::Conflict,
                &format!("{path}.value"),
                message,
                "remove `value`, or write `operator: Equal`",
            );
        }
        if !exists && toleration.get("key").is_none() {
            let message = "a toleration without a key is one of every taint";
            report.error_at(DiagnosticCode::Needs, &path, message, "add `key`, or write `operator: Exists`");
        }
    }
}
