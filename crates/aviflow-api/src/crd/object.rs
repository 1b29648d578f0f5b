//! Between a job's document and its object.
//!
//! Both have the same fields under the same names, but for two: the name is the object's, and a folder
//! of code is `{folder: PATH}`, since one key of an object has one type.

use super::{GROUP, VERSION};
use crate::spec::{JobSpec, Provenance};
use serde_json::{Value as Json, json};

/// Why an object is no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// It has not what every object has.
    #[error("the object has no {0}")]
    Missing(&'static str),
    /// Its spec is none; only an object that no definition checked can be so.
    #[error("the spec is not a job's: {0}; upgrade the definitions by `kubectl apply` of the manifest")]
    Spec(String),
}

/// The object of a job. Its name is given: another than the document's where that is taken.
#[must_use]
pub fn to_object(namespace: &str, name: &str, spec: &JobSpec, provenance: &Provenance) -> Json {
    let mut fields = serde_json::to_value(spec).unwrap_or_default();
    if let Some(fields) = fields.as_object_mut() {
        fields.remove("name");
        if let Some(code) = fields.get_mut("code").filter(|code| code.is_string()) {
            *code = json!({"folder": code});
        }
        fields.insert("provenance".to_owned(), json!(provenance));
    }
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "TrainingJob",
        "metadata": {"namespace": namespace, "name": name},
        "spec": fields,
    })
}

/// The job of an object as the API server gives it, with `queue` where it names none, and what was
/// submitted with it through Aviflow's API, if it was.
///
/// # Errors
/// If its spec is no job's.
pub fn from_object(object: &Json, queue: &str) -> Result<(JobSpec, Option<Provenance>), ObjectError> {
    let name = object.pointer("/metadata/name").ok_or(ObjectError::Missing("metadata.name"))?;
    let mut fields = object.get("spec").and_then(Json::as_object).cloned().ok_or(ObjectError::Missing("spec"))?;
    let told = |e: serde_json::Error| ObjectError::Spec(e.to_string());
    let provenance = fields.remove("provenance").map(serde_json::from_value).transpose().map_err(told)?;
    fields.insert("name".to_owned(), name.clone());
    fields.entry("queue").or_insert_with(|| json!(queue));
    if let Some(folder) = fields.get("code").and_then(|code| code.get("folder")).cloned() {
        fields.insert("code".to_owned(), folder);
    }
    let spec = serde_json::from_value(Json::Object(fields)).map_err(told)?;
    Ok((spec, provenance))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{Defaults, parse_job};
    use crate::spec::CodeSnapshot;

    #[test]
    fn a_job_is_read_from_its_object_as_it_was() {
        for (text, queue) in [
            ("name: a\nrun: x\ncode: .\n", "default"),
            ("name: a\nrun: x\ncode: {git: g, ref: r}\nqueue: nlp\n", "nlp"),
        ] {
            let spec = parse_job("job.yaml", text.as_bytes(), &Defaults::default()).unwrap().spec;
            let code = CodeSnapshot { sha256: "0".into(), bytes: 1, files: 1, commit: None, dirty: false };
            let provenance = Provenance { code: Some(code), ..Provenance::default() };
            let object = to_object("team", "a", &spec, &provenance);
            assert_eq!(object.pointer("/spec/name"), None);
            assert_eq!(from_object(&object, "other"), Ok((spec.clone(), Some(provenance))));
            assert_eq!(spec.queue, queue);
        }
    }

    #[test]
    fn an_object_without_a_queue_goes_to_the_default_one() {
        let spec = json!({"run": ["x"], "priority": "normal", "nodes": {"min": 1, "max": 1}, "gpusPerNode": 1,
            "processes": "perNode", "preemptible": true, "retry": {"failures": 0}});
        let object = json!({"metadata": {"name": "a"}, "spec": spec});
        let (spec, provenance) = from_object(&object, "research").unwrap();
        assert_eq!((spec.name.as_str(), spec.queue.as_str(), provenance), ("a", "research", None));
        let told = from_object(&json!({"metadata": {"name": "a"}, "spec": {"run": 1}}), "q").unwrap_err().to_string();
        assert!(told.contains("the spec is not a job's"), "{told}");
    }
}
