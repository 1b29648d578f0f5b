//! JSON values as YAML, for people who read and for files that are read again.
//!
//! Text is quoted wherever a YAML reader could take it for something else, so
//! what is written is read as it was.

use serde_json::Value;
use std::fmt::Write as _;

/// The value as a YAML document, with its last newline.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => node(value, 0, &mut out),
        Value::Array(list) if !list.is_empty() => node(value, 0, &mut out),
        other => {
            scalar(other, 0, &mut out);
            out.push('\n');
        }
    }
    out
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    }
}

/// A mapping or list, each line indented by `depth`.
fn node(value: &Value, depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let _ = write!(out, "{indent}{}:", text(key));
                after(value, depth, out);
            }
        }
        Value::Array(list) => {
            for item in list {
                if is_block(item) {
                    // The first line of the item stands behind the dash.
                    let mut inner = String::new();
                    node(item, depth + 1, &mut inner);
                    let _ = write!(out, "{indent}- {}", inner.trim_start());
                } else {
                    let _ = write!(out, "{indent}- ");
                    scalar(item, depth, out);
                    out.push('\n');
                }
            }
        }
        _ => {}
    }
}

fn after(value: &Value, depth: usize, out: &mut String) {
    if is_block(value) {
        out.push('\n');
        node(value, depth + 1, out);
    } else {
        out.push(' ');
        scalar(value, depth, out);
        out.push('\n');
    }
}

fn scalar(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::String(s) if is_literal(s) => {
            let chomp = if s.ends_with('\n') { "|" } else { "|-" };
            out.push_str(chomp);
            let indent = "  ".repeat(depth + 1);
            for line in s.trim_end_matches('\n').split('\n') {
                out.push('\n');
                if !line.is_empty() {
                    out.push_str(&indent);
                    out.push_str(line);
                }
            }
        }
        Value::String(s) => out.push_str(&text(s)),
        Value::Object(_) => out.push_str("{}"),
        Value::Array(_) => out.push_str("[]"),
        other => out.push_str(&other.to_string()),
    }
}

/// Whether a text of several lines can stand as it is.
fn is_literal(s: &str) -> bool {
    s.contains('\n')
        && !s.starts_with([' ', '\n', '\t'])
        && !s.ends_with("\n\n")
        && s.split('\n').all(|l| !l.ends_with([' ', '\t']))
        && !s.chars().any(|c| {
            (c.is_control() && c != '\n' && c != '\t') || c == '\u{feff}' || c == '\u{2028}' || c == '\u{2029}'
        })
}

/// A text on one line, quoted if needed.
fn text(s: &str) -> String {
    if is_plain(s) { s.to_owned() } else { Value::String(s.to_owned()).to_string() }
}

fn is_plain(s: &str) -> bool {
    let first = s.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'/' || b == b'_');
    let rest = s.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./+@=, ()".contains(&b) || b == b':');
    let colon = s.contains(": ") || s.ends_with(':');
    let words = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"];
    first && rest && !colon && !s.ends_with(' ') && !words.contains(&s.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn documents_read_well() {
        let value = json!({"name": "a", "nodes": {"min": 1, "max": 2}, "run": ["bash", "-c", "echo a\necho b\n"], "env": {}, "list": [],
            "data": [{"name": "x", "readOnly": true}, {"name": "y"}], "version": "1.10", "none": null, "share": 0.5});
        insta::assert_snapshot!(to_yaml(&value), @r#"
        data:
          - name: x
            readOnly: true
          - name: "y"
        env: {}
        list: []
        name: a
        nodes:
          max: 2
          min: 1
        none: null
        run:
          - bash
          - "-c"
          - |
            echo a
            echo b
        share: 0.5
        version: "1.10"
        "#);
    }

    /// Read with the reader of job documents, every text is what it was.
    #[test]
    fn what_is_written_is_read_as_it_was() {
        let texts = [
            "",
            "a",
            "no",
            "1",
            "1e3",
            "0x1",
            "~",
            "null",
            "a: b",
            "a #b",
            "- a",
            "{a}",
            "'a'",
            "\"a\"",
            "a\nb",
            "a\nb\n",
            "a\n\n",
            " a\nb",
            "a \nb",
            "\ta",
            "ü",
            "a\tb",
            "@a",
            "a:",
            "!a",
            "&a",
            "*a",
            "%a",
            "`a",
            "|",
            ">",
            "a\u{2028}b",
            "a\\b",
            "a\n  b\n\nc",
            "2026-01-01",
            "=",
            "<<",
        ];
        for text in texts {
            let value = json!({"top": [{"k": text}], text: [text, [text]]});
            let yaml = to_yaml(&value);
            let mut sources = crate::source::Sources::default();
            match crate::yaml::parse(&mut sources, "test", &yaml) {
                Ok(node) => assert_eq!(node.to_json(), value, "{yaml}"),
                Err(errors) => panic!("{text:?}: {errors:?}\n{yaml}"),
            }
        }
    }
}
