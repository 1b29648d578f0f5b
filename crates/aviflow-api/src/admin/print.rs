//! Documents as files: what is printed can be applied again.

use super::fields::of_kind;
use super::spec::AdminDocument;
use crate::file::shape::{Object, Shape};
use crate::source::{SourceId, Span};
use crate::yaml::{Meaning, Node, Style};
use serde_json::Value as Json;

/// Most characters of a mapping or list in one line.
const WIDTH: usize = 90;

/// The documents as YAML, separated by `---`, keys in the order in which they are described.
#[must_use]
pub fn print<'a>(documents: impl IntoIterator<Item = &'a AdminDocument>) -> String {
    let mut out = String::new();
    for document in documents {
        if !out.is_empty() {
            out.push_str("---\n");
        }
        let json = serde_json::to_value(document).unwrap_or_default();
        if let Some(object) = of_kind(document.kind()) {
            entries(&json, &Shape::Object(object), 0, &mut out);
        }
    }
    out
}

/// The entries of a mapping, those of known keys in the order of their description.
fn items<'j>(json: &'j Json, shape: &Shape) -> Vec<(&'j str, &'j Json, Shape)> {
    let Json::Object(map) = json else { return Vec::new() };
    let of_object = |object: &'static Object| {
        let there = object.fields.iter().filter_map(|f| Some((map.get_key_value(f.key)?, f.shape)));
        there.map(|((key, value), shape)| (key.as_str(), value, shape)).collect()
    };
    match shape {
        Shape::Object(object) => of_object(object),
        Shape::Either(shapes) => shapes
            .iter()
            .find_map(|s| match s {
                Shape::Object(object) => Some(of_object(object)),
                _ => None,
            })
            .unwrap_or_default(),
        Shape::Map(_, of) => map.iter().map(|(key, value)| (key.as_str(), value, **of)).collect(),
        tree => map.iter().map(|(key, value)| (key.as_str(), value, *tree)).collect(),
    }
}

fn entries(json: &Json, shape: &Shape, depth: usize, out: &mut String) {
    for (key, value, shape) in items(json, shape) {
        out.push_str(&"  ".repeat(depth));
        out.push_str(&word(key, false));
        out.push(':');
        let block = match value {
            Json::Object(map) => {
                // Names that people chose stand below each other.
                let free = matches!(shape, Shape::Map(..) | Shape::Tree(..));
                !map.is_empty() && (free || map.values().any(|v| v.is_object()) || flow(value, &shape).len() > WIDTH)
            }
            _ => false,
        };
        if block {
            out.push('\n');
            entries(value, &shape, depth + 1, out);
            continue;
        }
        let text = match (value, &shape) {
            // One text stands without its list.
            (Json::Array(list), Shape::Tree(..)) if list.len() == 1 => scalar(list.first().unwrap_or(value), false),
            (Json::Array(_) | Json::Object(_), _) => flow(value, &shape),
            (value, _) => scalar(value, false),
        };
        out.push(' ');
        out.push_str(&text);
        out.push('\n');
    }
}

/// In one line.
fn flow(json: &Json, shape: &Shape) -> String {
    match json {
        Json::Array(list) => {
            let of = match shape {
                Shape::List(of, _) => **of,
                other => *other,
            };
            format!("[{}]", list.iter().map(|item| flow(item, &of)).collect::<Vec<_>>().join(", "))
        }
        Json::Object(_) => {
            let each = items(json, shape).into_iter();
            let each = each.map(|(key, value, shape)| format!("{}: {}", word(key, true), flow(value, &shape)));
            format!("{{{}}}", each.collect::<Vec<_>>().join(", "))
        }
        value => scalar(value, true),
    }
}

fn scalar(json: &Json, flow: bool) -> String {
    match json {
        Json::String(text) => word(text, flow),
        other => other.to_string(),
    }
}

/// A text in quotes, where it would else be read as something else.
fn word(text: &str, flow: bool) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./@".contains(c) || (!flow && "[],".contains(c));
    let node = Node::scalar(text, Style::Plain, Span::new(SourceId(0), 0..0));
    let is_text = matches!(node.meaning(), Some(Meaning::Text(_)));
    if is_text && text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain) {
        return text.to_owned();
    }
    Json::from(text).to_string()
}
