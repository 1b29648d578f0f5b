//! Reads a tree by its description: reports everything that is not as described, all at once,
//! and gives as JSON what is. A part that was reported is left out of the JSON, so that later
//! stages see only good values and no problem is told twice.

use super::report::{Report, join};
use super::shape::{Field, Object, Shape, Text};
use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::secrets;
use crate::source::Span;
use crate::suggest::{nearest, one_of};
use crate::yaml::{Entry, Meaning, Node, Style, Value};
use serde_json::{Map, Value as Json};

/// Reads `root` as `object`.
pub(crate) fn read(report: &mut Report<'_>, root: &Node, object: &'static Object) -> Map<String, Json> {
    let mut reader = Reader { report, root: object };
    match &root.value {
        Value::Map(entries) => reader.object(entries, object, "", None),
        Value::Scalar { .. } | Value::List(_) => {
            let found = found(root);
            let first = object.fields.iter().filter(|f| f.required).map(|f| format!("`{}: …`", f.key));
            let help = format!("begin with {}, each in a line of its own", first.collect::<Vec<_>>().join(" and "));
            reader.report.error(
                DiagnosticCode::WrongType,
                "",
                root.span,
                format!("{} is a mapping of keys to values; this is {found}", object.what),
                help,
            );
            Map::new()
        }
    }
}

struct Reader<'r, 'a> {
    report: &'r mut Report<'a>,
    root: &'static Object,
}

impl Reader<'_, '_> {
    fn object(
        &mut self,
        entries: &[Entry],
        object: &'static Object,
        path: &str,
        span: Option<Span>,
    ) -> Map<String, Json> {
        let mut json = Map::new();
        let mut meant = Vec::new();
        for entry in entries {
            let Some(field) = object.field(&entry.key) else {
                meant.extend(self.unknown(entry, object, path));
                continue;
            };
            let path = join(path, field.key);
            self.report.places.put(&path, Some(entry.key_span), entry.value.span);
            if let Some(value) = self.present(entry, &field.shape, field.required, &path)
                && self.few_enough(entry, field, &value, &path)
            {
                json.insert(field.key.to_owned(), value);
            }
        }
        for field in object.fields.iter().filter(|f| f.required) {
            // A key that was misspelled was told already.
            let there = entries.iter().any(|e| e.key == field.key) || meant.contains(&field.key);
            if !there {
                self.missing(field, object, path, span);
            }
        }
        json
    }

    /// Reports a list, or a mapping of free keys, that has too many entries.
    fn few_enough(&mut self, entry: &Entry, field: &'static Field, value: &Json, path: &str) -> bool {
        let count = match (field.shape.canonical(), value) {
            (Shape::List(..), Json::Array(list)) => list.len(),
            (Shape::Map(..), Json::Object(map)) => map.len(),
            _ => 0,
        };
        if count <= field.most {
            return true;
        }
        let message = format!("`{}` has {count} entries; {} is the most", field.key, field.most);
        self.report.error(DiagnosticCode::OutOfRange, path, entry.key_span, message, "write fewer of them");
        false
    }

    fn missing(&mut self, field: &Field, object: &Object, path: &str, span: Option<Span>) {
        let example = field.examples.first().map_or("…".to_owned(), |e| e.trim_matches('"').to_owned());
        let message = format!("{} needs `{}`", object.what, field.key);
        let help = format!("add `{}: {example}`", field.key);
        let mut d = Diagnostic::error(DiagnosticCode::MissingKey, message).help(help).field(join(path, field.key));
        if let Some(span) = span {
            d = d.at(self.report.sources, span);
        }
        self.report.list.push(d);
    }

    /// Reports a key that is not known; gives the key of this object that was probably meant.
    fn unknown(&mut self, entry: &Entry, object: &'static Object, path: &str) -> Option<&'static str> {
        let key = entry.key.as_str();
        let fields = || object.fields.iter().map(|f| f.key);
        let meant = meant(key, object);
        let help = match meant {
            Some(target) if target.contains('.') => {
                let (outer, inner) = target.split_once('.').unwrap_or((target, ""));
                format!("write `{outer}: {{{inner}: …}}`")
            }
            Some(target) => format!("write `{target}`"),
            None if !std::ptr::eq(object, self.root) && self.root.field(key).is_some() => {
                format!("`{key}` belongs to {} itself; give it less indentation", self.root.what)
            }
            None => format!("the keys are {}", fields().collect::<Vec<_>>().join(", ")),
        };
        let message = format!("{} has no key `{key}`", object.what);
        self.report.error(DiagnosticCode::UnknownKey, &join(path, key), entry.key_span, message, help);
        meant
    }

    /// A value that must not be nothing.
    fn present(&mut self, entry: &Entry, shape: &Shape, required: bool, path: &str) -> Option<Json> {
        if entry.value.is_null() {
            let help = match shape {
                Shape::Text(text) if text.literal && (text.check)("").is_ok() => {
                    format!("write `{}: \"\"` for an empty text, or remove the line", entry.key)
                }
                _ if required => format!("write {}", shape.expected()),
                _ => format!("write {}, or remove the line", shape.expected()),
            };
            let message = format!("`{}` has no value", entry.key);
            self.report.error(DiagnosticCode::NoValue, path, entry.key_span, message, help);
            return None;
        }
        self.value(&entry.value, shape, path)
    }

    fn value(&mut self, node: &Node, shape: &Shape, path: &str) -> Option<Json> {
        match shape {
            Shape::Text(text) => self.text(node, text, path).map(Json::from),
            Shape::Whole(least, most) => self.whole(node, *least, *most, path),
            Shape::Above(bound) => self.number(node, *bound, path),
            Shape::Bool => self.boolean(node, path),
            Shape::Choice(words) => self.choice(node, words, path),
            Shape::List(of, least) => self.list(node, shape, of, *least, path),
            Shape::Map(keys, of) => self.map(node, keys, of, path),
            Shape::Tree(keys, leaf) => self.tree(node, shape, keys, leaf, path),
            Shape::Object(object) => match &node.value {
                Value::Map(entries) => Some(Json::Object(self.object(entries, object, path, Some(node.span)))),
                Value::Scalar { .. } | Value::List(_) => self.wrong(node, shape, path),
            },
            Shape::Either(shapes) => match shapes.iter().find(|s| same_kind(node, s)) {
                Some(shape) => self.value(node, shape, path),
                None => self.wrong(node, shape, path),
            },
        }
    }

    fn wrong<T>(&mut self, node: &Node, shape: &Shape, path: &str) -> Option<T> {
        let expected = shape.expected();
        let help = match (shape, &node.value) {
            (Shape::List(Shape::Object(object), _), Value::Scalar { text, .. }) => {
                format!("write `[{{{}: {text}}}]`", object.fields.first().map_or("", |f| f.key))
            }
            (Shape::List(..), Value::Scalar { text, .. }) if !text.contains(['\n', ',']) => format!("write `[{text}]`"),
            // Of one word the first key is meant: `retry: 3`, `checkpoint: /c`.
            (Shape::Object(object), Value::Scalar { text, .. }) => {
                format!("write `{{{}: {text}}}`", object.fields.first().map_or("", |f| f.key))
            }
            _ => format!("write {expected}"),
        };
        let message = format!("expected {expected}, found {}", found(node));
        self.report.error(DiagnosticCode::WrongType, path, node.span, message, help);
        None
    }

    fn text(&mut self, node: &Node, text: &'static Text, path: &str) -> Option<String> {
        let (Some(meaning), Some(value)) = (node.meaning(), node.text()) else {
            return self.wrong(node, &Shape::Text(text), path);
        };
        if let Err(fault) = (text.check)(value) {
            let span = match fault.range {
                Some(range) => self.report.within(node, range),
                None => node.span,
            };
            // A name made of a key would still show half of it.
            let about = fault.code == DiagnosticCode::SecretLiteral || secrets::find(value).is_empty();
            let help = if about { fault.help } else { format!("write {}, not a secret", text.what) };
            self.report.error(fault.code, path, span, fault.message, help);
            return None;
        }
        let length = value.chars().count();
        if length > text.most {
            let message = format!("{} of {length} characters; {} is the most", text.what, text.most);
            self.report.error(DiagnosticCode::TooLong, path, node.span, message, "write a shorter one");
            return None;
        }
        if !text.literal && !matches!(meaning, Meaning::Text(_)) {
            let message = format!("expected {}, found {}", text.what, found(node));
            self.report.error(
                DiagnosticCode::WrongType,
                path,
                node.span,
                message,
                format!("write `\"{value}\"`, in quotes"),
            );
            return None;
        }
        Some(value.to_owned())
    }

    fn whole(&mut self, node: &Node, least: u64, most: u64, path: &str) -> Option<Json> {
        let Some(Meaning::Whole(n)) = node.meaning() else {
            if let (Value::Scalar { style: Style::Quoted, .. }, Some(text)) = (&node.value, node.text())
                && text.parse::<u64>().is_ok()
            {
                let message = format!("expected a whole number, found the text \"{text}\"");
                self.report.error(
                    DiagnosticCode::WrongType,
                    path,
                    node.span,
                    message,
                    format!("write {text} without quotes"),
                );
                return None;
            }
            return self.wrong(node, &Shape::Whole(least, most), path);
        };
        match u64::try_from(n) {
            Ok(n) if (least..=most).contains(&n) => Some(Json::from(n)),
            _ => {
                let (message, help) = if n < i128::from(least) {
                    (format!("{n} is too small; the least is {least}"), format!("write a number from {least} on"))
                } else {
                    (format!("{n} is too great; the most is {most}"), format!("write a number up to {most}"))
                };
                self.report.error(DiagnosticCode::OutOfRange, path, node.span, message, help);
                None
            }
        }
    }

    fn number(&mut self, node: &Node, bound: f64, path: &str) -> Option<Json> {
        let n = match node.meaning() {
            #[expect(clippy::cast_precision_loss, reason = "a count of CPUs")]
            Some(Meaning::Whole(n)) => n as f64,
            Some(Meaning::Number(n)) => n,
            _ => return self.wrong(node, &Shape::Above(bound), path),
        };
        if n > bound && n < 1e6 {
            return Some(Json::from(n));
        }
        let message = format!("{n} is out of range; it must be above {bound} and below a million");
        self.report.error(
            DiagnosticCode::OutOfRange,
            path,
            node.span,
            message,
            "write a greater one, or remove the line",
        );
        None
    }

    fn boolean(&mut self, node: &Node, path: &str) -> Option<Json> {
        if let Some(Meaning::Bool(b)) = node.meaning() {
            return Some(Json::Bool(b));
        }
        let lower = node.text().unwrap_or_default().to_ascii_lowercase();
        let meant = match lower.as_str() {
            "yes" | "y" | "on" | "1" | "true" => Some("true"),
            "no" | "n" | "off" | "0" | "false" => Some("false"),
            _ => None,
        };
        let Some(meant) = meant else {
            return self.wrong(node, &Shape::Bool, path);
        };
        let message = format!("expected `true` or `false`, found {}", found(node));
        self.report.error(DiagnosticCode::WrongType, path, node.span, message, format!("write `{meant}`"));
        None
    }

    fn choice(&mut self, node: &Node, words: &'static [(&'static str, &'static str)], path: &str) -> Option<Json> {
        let Some(text) = node.text() else {
            return self.wrong(node, &Shape::Choice(words), path);
        };
        let names = || words.iter().map(|w| w.0);
        if names().any(|w| w == text) {
            return Some(Json::from(text));
        }
        let message = format!("`{text}` is none of the possible words");
        let help = match nearest(text, names()) {
            Some(near) => format!("write `{near}`"),
            None => format!("write {}", one_of(names())),
        };
        self.report.error(DiagnosticCode::UnknownChoice, path, node.span, message, help);
        None
    }

    fn list(&mut self, node: &Node, shape: &Shape, of: &Shape, least: usize, path: &str) -> Option<Json> {
        let Value::List(items) = &node.value else {
            return self.wrong(node, shape, path);
        };
        if items.len() < least {
            let message = "an empty list";
            self.report.error(
                DiagnosticCode::Malformed,
                path,
                node.span,
                message,
                "write at least one value, or remove the line",
            );
            return None;
        }
        let mut list = Vec::new();
        for (i, item) in items.iter().enumerate() {
            let path = format!("{path}[{i}]");
            self.report.places.put(&path, None, item.span);
            if item.is_null() {
                self.report.error(
                    DiagnosticCode::NoValue,
                    &path,
                    item.span,
                    "a list item without a value",
                    "write one, or remove the line",
                );
                continue;
            }
            let Some(value) = self.value(item, of, &path) else {
                continue;
            };
            if unique(of) && list.contains(&value) {
                let message = format!("`{}` is in this list twice", value.as_str().unwrap_or_default());
                self.report.error(DiagnosticCode::Duplicate, &path, item.span, message, "keep one of them");
                continue;
            }
            list.push(value);
        }
        Some(Json::Array(list))
    }

    fn map(&mut self, node: &Node, keys: &'static Text, of: &Shape, path: &str) -> Option<Json> {
        let Value::Map(entries) = &node.value else {
            let message = format!("expected a mapping of names to values, found {}", found(node));
            self.report.error(DiagnosticCode::WrongType, path, node.span, message, "write `NAME: value`, one a line");
            return None;
        };
        Some(self.entries(entries, keys, of, path))
    }

    /// Entries with free keys.
    fn entries(&mut self, entries: &[Entry], keys: &'static Text, of: &Shape, path: &str) -> Json {
        let mut map = Map::new();
        for entry in entries {
            let path = join(path, &entry.key);
            self.report.places.put(&path, Some(entry.key_span), entry.value.span);
            if let Err(fault) = (keys.check)(&entry.key) {
                let help = if secrets::find(&entry.key).is_empty() { fault.help } else { "remove it".to_owned() };
                self.report.error(fault.code, &path, entry.key_span, fault.message, help);
                continue;
            }
            if let Some(value) = self.present(entry, of, false, &path) {
                map.insert(entry.key.clone(), value);
            }
        }
        Json::Object(map)
    }

    /// One leaf may stand without its list.
    fn tree(
        &mut self,
        node: &Node,
        shape: &Shape,
        keys: &'static Text,
        leaf: &'static Shape,
        path: &str,
    ) -> Option<Json> {
        match &node.value {
            Value::Map(entries) => Some(self.entries(entries, keys, shape, path)),
            Value::List(_) => self.value(node, &Shape::List(leaf, 1), path),
            Value::Scalar { .. } => self.value(node, leaf, path).map(|text| Json::from(vec![text])),
        }
    }
}

/// Whether values of a list may not repeat. Words of a command may.
pub(crate) fn unique(of: &Shape) -> bool {
    match of {
        Shape::Choice(_) => true,
        Shape::Text(text) => text.pattern.is_some(),
        _ => false,
    }
}

fn same_kind(node: &Node, shape: &Shape) -> bool {
    match (&node.value, shape) {
        (_, Shape::Tree(..)) => true,
        (Value::List(_), Shape::List(..)) | (Value::Map(_), Shape::Object(_) | Shape::Map(..)) => true,
        (Value::Scalar { .. }, shape) => !matches!(shape, Shape::List(..) | Shape::Object(_) | Shape::Map(..)),
        _ => false,
    }
}

/// The key that was probably meant: the same letters, what other systems call it, or the nearest.
fn meant(key: &str, object: &Object) -> Option<&'static str> {
    let fold = |t: &str| t.replace(['-', '_'], "").to_ascii_lowercase();
    let folded = fold(key);
    let fields = || object.fields.iter().map(|f| f.key);
    fields()
        .find(|f| fold(f) == folded)
        .or_else(|| object.synonyms.iter().find(|s| fold(s.0) == folded).map(|s| s.1))
        .or_else(|| nearest(key, fields()))
        .or_else(|| {
            let near = nearest(key, object.synonyms.iter().map(|s| s.0))?;
            object.synonyms.iter().find(|s| s.0 == near).map(|s| s.1)
        })
}

/// What a value is, for a person.
pub(crate) fn found(node: &Node) -> String {
    let text = node.text().unwrap_or_default();
    let short: String =
        if text.chars().count() > 40 { text.chars().take(37).chain("…".chars()).collect() } else { text.to_owned() };
    match (&node.value, node.meaning()) {
        (Value::List(_), _) => "a list".to_owned(),
        (Value::Map(_), _) => "a mapping".to_owned(),
        (_, Some(Meaning::Null)) => "nothing".to_owned(),
        (_, Some(Meaning::Bool(_))) => format!("`{short}`"),
        (_, Some(Meaning::Whole(_) | Meaning::Number(_))) => format!("the number {short}"),
        _ if text.contains('\n') => "a text of several lines".to_owned(),
        _ => format!("the text `{short}`"),
    }
}
