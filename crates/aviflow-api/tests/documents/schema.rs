//! The JSON Schema says what the reader says, as far as a schema can.

use crate::cases::GROUPS;
use crate::good::GOOD;
use crate::said;
use aviflow_api::admin::fields::KINDS;
use aviflow_api::diagnostic::{Diagnostic, DiagnosticCode as Code};
use aviflow_api::file::{
    Document,
    fields::{ENVIRONMENT, JOB},
    shape::{Object, Shape},
};
use aviflow_api::{schema, spec::JobSpec};
use serde_json::Value as Json;
use std::path::Path;

fn valid(text: &str) -> Option<Result<(), String>> {
    let json = Document::parse("job.yaml", text.as_bytes()).ok()?.root().to_json();
    let schema = schema::job();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(&json).map(|e| format!("{}: {e}", e.instance_path())).collect();
    Some(if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) })
}

/// Whether a schema can see such a problem.
fn structural(d: &Diagnostic) -> bool {
    let by_schema = matches!(
        d.code,
        Code::UnknownKey
            | Code::MissingKey
            | Code::NoValue
            | Code::WrongType
            | Code::OutOfRange
            | Code::Unit
            | Code::TooLong
            | Code::NotPinned
    );
    // A duration of zero and one of a century have the right form.
    let number = d.text.parse::<f64>().is_ok() || d.code != Code::OutOfRange;
    let choice = d.code == Code::UnknownChoice && d.field != "priority";
    d.is_error() && ((by_schema && number) || choice)
}

#[test]
fn the_committed_schemas_are_the_generated_ones() {
    for (name, generated) in
        [("job", schema::job()), ("environment", schema::environment()), ("admin", schema::admin())]
    {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("schemas/{name}.schema.json"));
        let text = schema::text(&generated);
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{} is old: run the tests with UPDATE_SCHEMA=1", path.display());
        assert!(jsonschema::meta::is_valid(&generated));
    }
}

#[test]
fn good_documents_pass() {
    for (name, text) in GOOD {
        assert_eq!(valid(text), Some(Ok(())), "{name}");
    }
}

#[test]
fn structural_errors_fail() {
    let mut seen = 0;
    for (group, cases) in GROUPS {
        for (name, text) in *cases {
            let Some(valid) = valid(text) else { continue };
            let (diagnostics, _) = said(text.as_bytes());
            if diagnostics.iter().any(structural) {
                seen += 1;
                assert!(valid.is_err(), "{group}, {name}: the schema takes it");
            }
            // Never stricter than the reader.
            if !diagnostics.iter().any(Diagnostic::is_error) {
                assert_eq!(valid, Ok(()), "{group}, {name}");
            }
        }
    }
    assert!(seen > 25, "{seen}");
}

#[test]
fn examples_and_defaults_are_valid() {
    fn walk(schema: &Json) {
        let Some(object) = schema.as_object() else { return };
        let examples = object.get("examples").and_then(Json::as_array).into_iter().flatten();
        for example in examples.chain(object.get("default")) {
            assert!(jsonschema::is_valid(schema, example), "{example} in {schema:#}");
        }
        for child in object.get("properties").and_then(Json::as_object).into_iter().flatten() {
            walk(child.1);
        }
        for child in object.get("anyOf").and_then(Json::as_array).into_iter().flatten() {
            walk(child);
        }
        object.get("items").into_iter().for_each(walk);
    }
    walk(&schema::job());
    walk(&schema::environment());
    // Trees refer to the whole, which a part of it has not; they have no examples.
    for kind in schema::admin()["allOf"].as_array().unwrap() {
        walk(&kind["then"]);
    }
}

#[test]
fn every_field_of_the_canonical_document_is_in_the_file_and_documented() {
    fn keys(object: &Object) -> Vec<&str> {
        let mut keys: Vec<&str> = object.fields.iter().map(|f| f.key).collect();
        keys.sort_unstable();
        keys
    }
    fn synonyms(object: &'static Object) {
        for (synonym, key) in object.synonyms {
            let (outer, inner) = key.split_once('.').unwrap_or((key, ""));
            let field =
                object.field(outer).unwrap_or_else(|| panic!("{synonym} means {key}, which {} has not", object.what));
            assert!(object.field(synonym).is_none(), "{synonym} is a key");
            if let (Shape::Object(object), false) = (field.shape, inner.is_empty()) {
                assert!(object.field(inner).is_some(), "{key}");
            }
        }
        for field in object.fields {
            assert!(field.doc.len() > 5 && !field.doc.starts_with(' '), "{}", field.key);
            match field.shape {
                Shape::Object(inner) => synonyms(inner),
                Shape::List(Shape::Object(inner), _) | Shape::Map(_, Shape::Object(inner)) => synonyms(inner),
                Shape::Either(shapes) => shapes.iter().for_each(|shape| {
                    if let Shape::Object(inner) = shape {
                        synonyms(inner);
                    }
                }),
                _ => {}
            }
        }
    }
    synonyms(&JOB);
    synonyms(&ENVIRONMENT);
    KINDS.iter().for_each(|(_, object)| synonyms(object));
    let canonical = serde_json::to_value(schemars::schema_for!(JobSpec)).unwrap();
    let mut known: Vec<&str> = canonical["properties"].as_object().unwrap().keys().map(String::as_str).collect();
    known.sort_unstable();
    assert_eq!(keys(&JOB), known);
}
