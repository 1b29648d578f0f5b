//! Aviflow's kinds in Kubernetes: definitions made from the descriptions by which files are read.
//!
//! A kind's `spec` is the canonical document without its name, which is the object's. Keys, texts,
//! bounds, patterns and defaults come from [`crate::file::fields`] and [`crate::admin::fields`], what a
//! control plane writes (`status`, `spec.provenance`) from its types; there is no second list of
//! fields. What cannot be together, which [`crate::check`] tells of a file, stands here once more as
//! rules that the API server evaluates, as far as its language and budget reach: a control plane
//! checks every object again, with all it knows.
//!
//! Invariants: the API server takes every definition as it is, without a warning. What it takes of a
//! job the reader of files takes as well, except what only a control plane can know.

mod environment;
mod kinds;
mod object;
mod rules;
mod schema;
mod status;

pub use environment::{EnvironmentSpec, Launcher};
pub use kinds::{environment, pool, queue, training_job};
pub use object::{ObjectError, from_object, to_object};
pub use status::*;

use crate::yaml::to_yaml;
use serde_json::Value as Json;

/// The group of all kinds.
pub const GROUP: &str = "aviflow.dev";
/// The version of all kinds.
pub const VERSION: &str = "v1alpha1";
/// The annotation that says who submitted a job. Written at admission, by nobody else, and never changed.
pub const SUBMITTER: &str = "aviflow.dev/submitter";
/// The label of a job's pods that names the job. Only the control plane makes pods with it.
pub const JOB_LABEL: &str = "aviflow.dev/job";
/// The ServiceAccount of a job's pods, in each namespace that has jobs: it may do nothing.
pub const JOB_SERVICE_ACCOUNT: &str = "aviflow-job";
/// The verb on a queue that submitting to it needs.
pub const USE: &str = "use";
/// The verb on `trainingjobs`, in all namespaces, that stamping another's name and a provenance needs.
pub const SUBMIT_AS: &str = "submit-as";

/// The definitions, each with the name of its file.
#[must_use]
pub fn definitions() -> Vec<(&'static str, Json)> {
    vec![
        ("trainingjobs.yaml", training_job()),
        ("queues.yaml", queue()),
        ("pools.yaml", pool()),
        ("environments.yaml", environment()),
    ]
}

/// A definition as its file has it.
#[must_use]
pub fn text(definition: &Json) -> String {
    format!("# Generated from the descriptions in crates/aviflow-api by `cargo xtask deploy`.\n{}", to_yaml(definition))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goes through a schema, with the path of each part.
    fn walk(schema: &Json, path: &str, visit: &mut impl FnMut(&str, &Json)) {
        visit(path, schema);
        for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
            walk(inner, &format!("{path}.{key}"), visit);
        }
        for (key, mark) in [("items", "[]"), ("additionalProperties", "{}")] {
            if let Some(inner) = schema.get(key) {
                walk(inner, &format!("{path}{mark}"), visit);
            }
        }
    }

    /// What a person may write is bounded, as the cost of rules is reckoned from it, and explained.
    #[test]
    fn every_key_of_a_spec_is_bounded_and_explained() {
        let mut seen = 0;
        for (name, definition) in definitions() {
            let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            walk(schema, "", &mut |path, part| {
                let whole = ["", ".metadata", ".metadata.name"].contains(&path);
                let inner = path.ends_with("[]") || path.ends_with("{}");
                assert!(whole || inner || part["description"].is_string(), "{name}{path} has no description");
                for rule in part["x-kubernetes-validations"].as_array().into_iter().flatten() {
                    assert_eq!(rule.get("message").is_some(), rule.get("messageExpression").is_none(), "{name}{path}");
                }
                if !path.starts_with(".spec") || path.starts_with(".spec.provenance") {
                    return;
                }
                seen += 1;
                let text = part["type"] == "string" && part.get("enum").is_none();
                assert!(!text || part["maxLength"].is_u64(), "{name}{path} has no maxLength");
                assert!(part["type"] != "array" || part["maxItems"].is_u64(), "{name}{path} has no maxItems");
                let map = part.get("additionalProperties").is_some();
                assert!(!map || part["maxProperties"].is_u64(), "{name}{path} has no maxProperties");
            });
        }
        assert!(seen > 100, "{seen}");
    }

    /// The defaults of an object are those of a file.
    #[test]
    fn what_a_job_does_not_say_is_as_in_a_file() {
        let job = training_job();
        let spec = &job["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        assert_eq!(spec["nodes"]["default"], serde_json::json!({"min": 1, "max": 1}));
        assert_eq!(spec["retry"]["default"], serde_json::json!({"failures": 0}));
        assert_eq!(spec["priority"]["default"], "normal");
        // Which queue it is, only the configuration knows.
        assert_eq!(spec["queue"].get("default"), None);
        assert_eq!(spec.get("name"), None);
    }
}
