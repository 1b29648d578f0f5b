//! The JSON Schema (draft 2020-12) of files, for editors.
//!
//! Written from the same description by which files are read ([`crate::file::fields`]). It is
//! weaker than the reader where a schema cannot say it (words of a command, keys that exclude
//! each other), and never stricter: what the reader takes, the schema takes.

use crate::admin::fields::KINDS;
use crate::file::fields::{ENVIRONMENT, JOB};
use crate::file::shape::{Field, Object, Shape, Text};
use crate::file::unique;
use serde_json::{Map, Value as Json, json};

/// The schema of a job's file.
#[must_use]
pub fn job() -> Json {
    document(&JOB, "job.schema.json", "Aviflow job")
}

/// The schema of an environment's file.
#[must_use]
pub fn environment() -> Json {
    document(&ENVIRONMENT, "environment.schema.json", "Aviflow environment")
}

/// The schema of administrators' files, for each document of one: its `kind` says which part holds.
#[must_use]
pub fn admin() -> Json {
    let kinds: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
    let each = KINDS.iter().map(|(kind, of)| {
        json!({
            "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
            "then": object(of),
        })
    });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://aviflow.dev/schemas/admin.schema.json",
        "title": "Aviflow queue, pool or policy",
        "type": "object",
        "properties": {"kind": {"enum": kinds, "description": "What this document is."}},
        "required": ["kind"],
        "allOf": each.collect::<Vec<_>>(),
        "$defs": tree(KINDS.iter().map(|(_, of)| *of)),
    })
}

/// The trees of these objects: a mapping of names to the same again, a list, or one of its values.
fn tree(of: impl Iterator<Item = &'static Object>) -> Map<String, Json> {
    let mut trees = Map::new();
    let mut rest: Vec<&Object> = of.collect();
    while let Some(object) = rest.pop() {
        for field in object.fields {
            match &field.shape {
                Shape::Object(inner) => rest.push(inner),
                Shape::Tree(keys, leaf) => {
                    let again = json!({"$ref": "#/$defs/domains"});
                    let map = json!({
                        "type": "object",
                        "patternProperties": {keys.pattern.unwrap_or(""): again},
                        "additionalProperties": false,
                        "minProperties": 1,
                    });
                    let any = json!({"anyOf": [map, shape(&Shape::List(leaf, 1)), shape(leaf)]});
                    trees.insert("domains".to_owned(), any);
                }
                _ => {}
            }
        }
    }
    trees
}

/// The schema as it is committed: indented, keys in order.
#[must_use]
pub fn text(schema: &Json) -> String {
    format!("{schema:#}\n")
}

fn document(of: &Object, id: &str, title: &str) -> Json {
    let mut schema = object(of);
    schema.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
    schema.insert("$id".to_owned(), json!(format!("https://aviflow.dev/schemas/{id}")));
    schema.insert("title".to_owned(), json!(title));
    Json::Object(schema)
}

fn object(of: &Object) -> Map<String, Json> {
    let properties: Map<String, Json> = of.fields.iter().map(|f| (f.key.to_owned(), field(f))).collect();
    let required: Vec<&str> = of.fields.iter().filter(|f| f.required).map(|f| f.key).collect();
    let mut schema = Map::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), Json::Object(properties));
    schema.insert("additionalProperties".to_owned(), json!(false));
    if !required.is_empty() {
        schema.insert("required".to_owned(), json!(required));
    }
    schema
}

fn field(field: &Field) -> Json {
    let mut schema = shape(&field.shape);
    bound(&mut schema, &field.shape, field.most);
    let mut doc = field.doc.to_owned();
    if let Shape::Choice(words) = field.shape {
        doc.push_str(&meanings(words));
    }
    schema.insert("description".to_owned(), json!(doc));
    let examples: Vec<Json> = field.examples.iter().filter_map(|e| serde_json::from_str(e).ok()).collect();
    if !examples.is_empty() {
        schema.insert("examples".to_owned(), Json::Array(examples));
    }
    if let Some(default) = field.default.and_then(|d| serde_json::from_str::<Json>(d).ok()) {
        schema.insert("default".to_owned(), default);
    }
    Json::Object(schema)
}

/// Most entries of lists and of mappings with free keys.
fn bound(schema: &mut Map<String, Json>, of: &Shape, most: usize) {
    match of {
        Shape::List(..) => {
            schema.insert("maxItems".to_owned(), json!(most));
        }
        Shape::Map(..) => {
            schema.insert("maxProperties".to_owned(), json!(most));
        }
        Shape::Either(shapes) => {
            let forms = schema.get_mut("anyOf").and_then(Json::as_array_mut).into_iter().flatten();
            for (form, of) in forms.zip(*shapes) {
                form.as_object_mut().into_iter().for_each(|form| bound(form, of, most));
            }
        }
        _ => {}
    }
}

/// What the words of a choice mean, to stand behind the description.
pub(crate) fn meanings(words: &[(&str, &str)]) -> String {
    words.iter().map(|(word, doc)| format!(" `{word}`: {doc}.")).collect()
}

fn shape(of: &Shape) -> Map<String, Json> {
    let schema = match of {
        Shape::Text(text) => return of_text(text),
        Shape::Whole(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
        Shape::Above(bound) => json!({"type": "number", "exclusiveMinimum": bound, "exclusiveMaximum": 1_000_000}),
        Shape::Bool => json!({"type": "boolean"}),
        Shape::Choice(words) => json!({"type": "string", "enum": words.iter().map(|w| w.0).collect::<Vec<_>>()}),
        Shape::List(of, least) => {
            let mut list = json!({"type": "array", "items": shape(of)});
            if *least > 0 {
                list["minItems"] = json!(least);
            }
            if unique(of) {
                list["uniqueItems"] = json!(true);
            }
            list
        }
        Shape::Map(keys, of) => json!({
            "type": "object",
            "patternProperties": {keys.pattern.unwrap_or(""): shape(of)},
            "additionalProperties": false,
        }),
        // Described once for all depths, see [`tree`].
        Shape::Tree(..) => json!({"$ref": "#/$defs/domains"}),
        Shape::Object(of) => return object(of),
        Shape::Either(shapes) => json!({"anyOf": shapes.iter().map(shape).collect::<Vec<_>>()}),
    };
    match schema {
        Json::Object(schema) => schema,
        _ => Map::new(),
    }
}

fn of_text(text: &Text) -> Map<String, Json> {
    let mut schema = Map::new();
    let types = if text.literal { json!(["string", "number", "boolean"]) } else { json!("string") };
    schema.insert("type".to_owned(), types);
    if let Some(pattern) = text.pattern {
        schema.insert("pattern".to_owned(), json!(pattern));
    }
    schema.insert("maxLength".to_owned(), json!(text.most));
    schema
}
