//! Structural schemas, as the API server wants them: from descriptions, and from types.
//!
//! Everything has a bound, from which the API server reckons what a rule may cost. Patterns are rules
//! and not `pattern`, whose message is the expression alone.

use super::rules;
use crate::file::shape::{Field, Object, Shape, Text};
use crate::file::unique;
use crate::schema::meanings;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value as Json, json};
use std::fmt::Write as _;

/// Whole numbers beyond are not exact in a schema, whose bounds are floating point.
const EXACT: u64 = 1 << 53;

/// Lists whose order says something, so that what two people apply to one object is never merged.
const ORDERED: [&str; 3] = ["gpuType", "levels", "topologyKeys"];

/// The schema of known keys, those of `without` left out.
pub(super) fn object(of: &'static Object, without: &[&str]) -> Json {
    let fields = || of.fields.iter().filter(|f| !without.contains(&f.key));
    let properties: Map<String, Json> = fields().map(|f| (f.key.to_owned(), field(f))).collect();
    let required: Vec<&str> = fields().filter(|f| f.required).map(|f| f.key).collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    rules::add(&mut schema, rules::of_object(of));
    schema
}

/// The schema of one key.
pub(super) fn field(field: &'static Field) -> Json {
    let canonical = field.shape.canonical();
    let example = field.examples.iter().find_map(|e| example(canonical, &serde_json::from_str(e).ok()?));
    let mut schema = shape(canonical, field.most, example.as_deref());
    if ORDERED.contains(&field.key) {
        schema["x-kubernetes-list-type"] = json!("atomic");
        rules::add(&mut schema, vec![rules::none_twice()]);
    }
    let mut doc = field.doc.to_owned();
    if let Shape::Choice(words) = canonical {
        doc.push_str(&meanings(words));
    }
    if let Shape::Text(text) = canonical
        && rules::is_amount(text)
    {
        let _ =
            write!(doc, " A text, such as `{}`; a bare number is refused.", example.as_deref().unwrap_or(text.what));
    }
    schema["description"] = json!(doc);
    if let Some(default) = field.default.and_then(|d| serde_json::from_str::<Json>(d).ok())
        && fits(canonical, &default)
    {
        schema["default"] = default;
    }
    schema
}

/// One text of an example, to be shown where another is wrong.
fn example(of: &Shape, example: &Json) -> Option<String> {
    match (of, example) {
        (Shape::Text(_), Json::String(text)) => Some(text.clone()),
        (Shape::List(..), Json::Array(list)) => list.first()?.as_str().map(str::to_owned),
        (Shape::Map(..), Json::Object(map)) => map.values().next()?.as_str().map(str::to_owned),
        _ => None,
    }
}

/// Whether a default is of the canonical form; a shorthand's is told by who makes the kind.
fn fits(of: &Shape, default: &Json) -> bool {
    match of {
        Shape::Object(_) | Shape::Map(..) => default.is_object(),
        Shape::List(..) => default.is_array(),
        _ => true,
    }
}

fn shape(of: &'static Shape, most: usize, example: Option<&str>) -> Json {
    match of {
        Shape::Text(text) => of_text(text, example),
        Shape::Whole(least, greatest) => {
            let mut schema = json!({"type": "integer", "format": "int64", "minimum": least});
            if *greatest <= EXACT {
                schema["maximum"] = json!(greatest);
            }
            schema
        }
        Shape::Above(bound) => {
            json!({"type": "number", "minimum": bound, "exclusiveMinimum": true, "maximum": 1_000_000})
        }
        Shape::Bool => json!({"type": "boolean"}),
        Shape::Choice(words) => json!({"type": "string", "enum": words.iter().map(|w| w.0).collect::<Vec<_>>()}),
        Shape::List(of, least) => list(of, *least, most, example),
        Shape::Map(keys, of) => {
            let values = shape(of, 64, example);
            let mut schema = json!({"type": "object", "additionalProperties": values, "maxProperties": most});
            rules::add(&mut schema, rules::of_keys(keys));
            schema
        }
        // As deep as one likes, which no structural schema can say: the control plane checks it.
        Shape::Tree(..) => json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
        Shape::Object(of) => object(of, &[]),
        Shape::Either(_) => shape(of.canonical(), most, example),
    }
}

fn list(of: &'static Shape, least: usize, most: usize, example: Option<&str>) -> Json {
    let most = match of {
        Shape::Choice(words) => words.len(),
        _ => most,
    };
    let mut schema = json!({"type": "array", "items": shape(of, 256, example), "maxItems": most});
    if least > 0 {
        schema["minItems"] = json!(least);
    }
    let key = match of {
        Shape::Object(of) => of.fields.iter().find(|f| f.required && matches!(f.key, "name" | "job")),
        _ => None,
    };
    schema["x-kubernetes-list-type"] = match key {
        Some(key) => {
            schema["x-kubernetes-list-map-keys"] = json!([key.key]);
            json!("map")
        }
        None if unique(of) => json!("set"),
        None => json!("atomic"),
    };
    schema
}

fn of_text(text: &'static Text, example: Option<&str>) -> Json {
    // A bare number is told by a rule that it has no unit, and not only that it is no text.
    let mut schema = match rules::is_amount(text) {
        true => json!({"x-kubernetes-int-or-string": true}),
        false => json!({"type": "string"}),
    };
    schema["maxLength"] = json!(text.most);
    rules::add(&mut schema, rules::of_text(text, example));
    schema
}

/// The schema of a type.
pub(super) fn of_type<T: JsonSchema>() -> Json {
    let generator = SchemaSettings::draft2020_12().with(|s| s.inline_subschemas = true).into_generator();
    let mut schema = generator.into_root_schema_for::<T>().to_value();
    tidy(&mut schema);
    schema
}

/// Leaves out what structural schemas do not have, and says what is left as they say it.
fn tidy(schema: &mut Json) {
    let Json::Object(map) = schema else { return };
    for key in ["$schema", "title", "examples", "default", "pattern"] {
        map.remove(key);
    }
    // A value or nothing: absent is nothing enough.
    if let Some(Json::Array(types)) = map.get("type") {
        let one = types.iter().find(|t| *t != "null").cloned();
        map.insert("type".to_owned(), one.unwrap_or_default());
    }
    if let Some(Json::Array(any)) = map.remove("anyOf")
        && let Some(Json::Object(one)) = any.into_iter().find(|of| of["type"] != "null")
    {
        for (key, value) in one {
            map.entry(key).or_insert(value);
        }
    }
    if let Some(Json::Array(words)) = map.remove("oneOf") {
        let words: Vec<&Json> =
            words.iter().flat_map(|w| w["enum"].as_array().into_iter().flatten().chain(w.get("const"))).collect();
        map.insert("enum".to_owned(), json!(words));
        map.insert("type".to_owned(), json!("string"));
    }
    if let Some(Json::Array(words)) = map.get_mut("enum") {
        words.retain(|word| !word.is_null());
    }
    if map.get("format").and_then(Json::as_str).is_some_and(|f| f.starts_with("uint") || f == "double") {
        map.remove("format");
    }
    if map.get("additionalProperties") == Some(&json!(false)) {
        map.remove("additionalProperties");
    }
    if let Some(Json::Object(properties)) = map.get_mut("properties") {
        properties.values_mut().for_each(tidy);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = map.get_mut(key) {
            tidy(inner);
        }
    }
}
