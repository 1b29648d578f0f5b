//! YAML text as a tree in which every key and value knows its place.
//!
//! YAML 1.2 and its core schema: `no`, `yes` and `on` are text. Anchors and aliases are
//! copied, under a bound on the whole, so that a small text never becomes a large tree.
//! What is not taken (tags, merge keys, several documents) is refused by name, never ignored.
//! Scalars keep their text; what they mean is decided by who reads them.

mod words;
mod write;

pub use write::to_yaml;

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::source::{SourceId, Sources, Span};
use saphyr_parser::{Event, Parser, ScalarStyle, Tag};
use std::collections::BTreeMap;

/// A document is refused by its size before it is read.
pub const MAX_BYTES: usize = 1 << 20;
/// How deep values may be in each other.
pub const MAX_DEPTH: usize = 64;
/// Values in the whole tree, copies of anchors included.
pub const MAX_NODES: usize = 20_000;

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Its place. For a value that stands for an alias, the place of the alias.
    pub span: Span,
}

/// A value as it was written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// One word or text.
    Scalar {
        /// The text, quotes and escapes resolved.
        text: String,
        /// How it was written.
        style: Style,
    },
    /// A list.
    List(Vec<Node>),
    /// A mapping, in the order of the text; keys are unique.
    Map(Vec<Entry>),
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key's text.
    pub key: String,
    /// The key's place.
    pub key_span: Span,
    /// The value.
    pub value: Node,
}

/// How a scalar was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without quotes: may be a number, `true`, or nothing.
    Plain,
    /// In quotes: always text.
    Quoted,
    /// A block after `|`.
    Literal,
    /// A block after `>`.
    Folded,
}

/// What a scalar means by the core schema.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Meaning<'a> {
    /// Nothing, `null` or `~`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Whole(i128),
    /// Any other number.
    Number(f64),
    /// Text.
    Text(&'a str),
}

impl Node {
    /// A scalar.
    #[must_use]
    pub fn scalar(text: impl Into<String>, style: Style, span: Span) -> Node {
        Node { value: Value::Scalar { text: text.into(), style }, span }
    }

    /// The text of a scalar, whatever it means.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar { text, .. } => Some(text),
            Value::List(_) | Value::Map(_) => None,
        }
    }

    /// What a scalar means.
    #[must_use]
    pub fn meaning(&self) -> Option<Meaning<'_>> {
        match &self.value {
            Value::Scalar { text, style: Style::Plain } => Some(meaning(text)),
            Value::Scalar { text, .. } => Some(Meaning::Text(text)),
            Value::List(_) | Value::Map(_) => None,
        }
    }

    /// Whether it is nothing, `null` or `~`.
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.meaning() == Some(Meaning::Null)
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|e| e.key == key).map(|e| &e.value),
            Value::Scalar { .. } | Value::List(_) => None,
        }
    }

    /// The tree as JSON, by the core schema. Numbers that JSON has not are text.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match &self.value {
            Value::List(items) => Json::Array(items.iter().map(Node::to_json).collect()),
            Value::Map(entries) => Json::Object(entries.iter().map(|e| (e.key.clone(), e.value.to_json())).collect()),
            Value::Scalar { text, .. } => match self.meaning() {
                Some(Meaning::Null) => Json::Null,
                Some(Meaning::Bool(b)) => Json::Bool(b),
                Some(Meaning::Whole(n)) => match (u64::try_from(n), i64::try_from(n)) {
                    (Ok(n), _) => Json::from(n),
                    (_, Ok(n)) => Json::from(n),
                    _ => Json::from(text.as_str()),
                },
                Some(Meaning::Number(n)) => Json::from(n),
                Some(Meaning::Text(_)) | None => Json::from(text.as_str()),
            },
        }
    }
}

fn meaning(text: &str) -> Meaning<'_> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Meaning::Null,
        "true" | "True" | "TRUE" => return Meaning::Bool(true),
        "false" | "False" | "FALSE" => return Meaning::Bool(false),
        _ => {}
    }
    if let Some(n) = whole(text) {
        return Meaning::Whole(n);
    }
    // Rust also reads `inf` and `nan`; in YAML these are words.
    let digits = text.trim_start_matches(['+', '-']);
    if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.bytes().any(|b| b.is_ascii_digit())
        && let Ok(n) = text.parse::<f64>()
        && n.is_finite()
    {
        return Meaning::Number(n);
    }
    Meaning::Text(text)
}

fn whole(text: &str) -> Option<i128> {
    let digits = |t: &str, radix: u32| {
        // `from_str_radix` takes a sign of its own, which must not stand after the prefix.
        (!t.is_empty() && t.chars().all(|c| c.is_digit(radix))).then(|| i128::from_str_radix(t, radix).ok())?
    };
    if let Some(hex) = text.strip_prefix("0x") {
        return digits(hex, 16);
    }
    if let Some(octal) = text.strip_prefix("0o") {
        return digits(octal, 8);
    }
    match text.strip_prefix('-') {
        Some(t) => digits(t, 10).map(|n| -n),
        None => digits(text.strip_prefix('+').unwrap_or(text), 10),
    }
}

/// Reads bytes as a document, adds their text to `sources`, and gives the tree.
///
/// # Errors
/// The first thing that makes the text no tree, and every duplicate key.
pub fn parse_bytes(sources: &mut Sources, name: &str, bytes: &[u8]) -> Result<Node, Vec<Diagnostic>> {
    let id = add_bytes(sources, name, bytes)?;
    parse_at(sources, id, 0)
}

/// Reads bytes as documents separated by `---`, and gives the trees of those that are not empty.
///
/// # Errors
/// As for [`parse_bytes`]; bounds are those of one document for all together.
pub fn parse_stream(sources: &mut Sources, name: &str, bytes: &[u8]) -> Result<Vec<Node>, Vec<Diagnostic>> {
    let id = add_bytes(sources, name, bytes)?;
    let mut roots = build(sources, id, 0, true)?;
    roots.retain(|root| !root.is_null());
    Ok(roots)
}

/// Adds bytes to the texts, if they are one.
fn add_bytes(sources: &mut Sources, name: &str, bytes: &[u8]) -> Result<SourceId, Vec<Diagnostic>> {
    if bytes.len() > MAX_BYTES {
        sources.add(name, String::new());
        let size = (bytes.len() as u64).div_ceil(1 << 20);
        return Err(vec![
            Diagnostic::error(DiagnosticCode::TooLarge, format!("{name} has {size} MiB; a document has at most 1 MiB"))
                .help("give the document, not data; what the training reads belongs under `data` or into `code`"),
        ]);
    }
    // Not text at all: say so, where a syntax error would puzzle.
    let magic = [&b"\x7fELF"[..], b"\x1f\x8b", b"PK\x03\x04", b"\x89PNG", b"%PDF-"];
    if magic.iter().any(|m| bytes.starts_with(m)) || bytes.contains(&0) {
        sources.add(name, String::new());
        let utf16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
        let help = if utf16 {
            "it is UTF-16; save it again as UTF-8"
        } else {
            "documents are YAML files; give the path of one, such as `job.yaml`"
        };
        return Err(vec![Diagnostic::error(DiagnosticCode::NotText, format!("{name} is not a text file")).help(help)]);
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(sources.add(name, text.to_owned())),
        Err(e) => {
            let at = e.valid_up_to();
            let id = sources.add(name, String::from_utf8_lossy(bytes).into_owned());
            let byte = bytes.get(at).copied().unwrap_or_default();
            let span = Span::new(id, at..at + 3); // the replacement character has three bytes
            Err(vec![
                Diagnostic::error(DiagnosticCode::NotText, format!("byte {at} (0x{byte:02x}) is no valid UTF-8"))
                    .help("save the file as UTF-8")
                    .at(sources, span),
            ])
        }
    }
}

/// Reads a text. See [`parse_bytes`].
///
/// # Errors
/// The first thing that makes the text no tree, and every duplicate key.
pub fn parse(sources: &mut Sources, name: &str, text: &str) -> Result<Node, Vec<Diagnostic>> {
    let id = sources.add(name, text.to_owned());
    parse_at(sources, id, 0)
}

/// Reads the text `id` from the byte `from` on, as a document of its own.
pub(crate) fn parse_at(sources: &Sources, id: SourceId, from: usize) -> Result<Node, Vec<Diagnostic>> {
    let nothing = || Node::scalar("", Style::Plain, Span::new(id, from..from));
    Ok(build(sources, id, from, false)?.pop().unwrap_or_else(nothing))
}

fn build(sources: &Sources, id: SourceId, from: usize, many: bool) -> Result<Vec<Node>, Vec<Diagnostic>> {
    let text = sources.get(id).and_then(|s| s.text.get(from..)).unwrap_or_default();
    let bom = if text.starts_with('\u{feff}') { 3 } else { 0 };
    let body = text.get(bom..).unwrap_or_default();
    Builder::new(sources, id, body, from + bom).run(body, many)
}

/// Builds the tree from the parser's events, with a stack of its own: depth costs no stack.
struct Builder<'s> {
    sources: &'s Sources,
    id: SourceId,
    /// Byte of each character, where characters and bytes differ.
    bytes: Option<Vec<u32>>,
    length: usize,
    base: usize,
    open: Vec<Open>,
    anchors: BTreeMap<usize, (Node, usize)>,
    /// Anchors of collections that are not closed yet.
    pending: Vec<usize>,
    nodes: usize,
    roots: Vec<Node>,
    duplicates: Vec<Diagnostic>,
}

struct Open {
    value: Value,
    start: usize,
    anchor: usize,
    key: Option<(String, Span)>,
    nodes_before: usize,
}

/// Boxed, as there is no error on almost every way through here.
type Step = Result<(), Box<Diagnostic>>;

impl<'s> Builder<'s> {
    fn new(sources: &'s Sources, id: SourceId, text: &str, base: usize) -> Builder<'s> {
        let bytes = (!text.is_ascii())
            .then(|| text.char_indices().map(|(i, _)| u32::try_from(i).unwrap_or(u32::MAX)).collect());
        Builder {
            sources,
            id,
            bytes,
            length: text.len(),
            base,
            open: Vec::new(),
            anchors: BTreeMap::new(),
            pending: Vec::new(),
            nodes: 0,
            roots: Vec::new(),
            duplicates: Vec::new(),
        }
    }

    /// The parser counts characters.
    fn byte(&self, character: usize) -> usize {
        let at = match &self.bytes {
            Some(bytes) => bytes.get(character).map_or(self.length, |b| *b as usize),
            None => character.min(self.length),
        };
        self.base + at
    }

    fn fail(&self, code: DiagnosticCode, message: impl AsRef<str>, help: &str, span: Span) -> Box<Diagnostic> {
        Box::new(Diagnostic::error(code, message).help(help).at(self.sources, span))
    }

    fn run(mut self, text: &str, many: bool) -> Result<Vec<Node>, Vec<Diagnostic>> {
        let mut documents = 0;
        for event in Parser::new_from_str(text) {
            let (event, span) = match event {
                Ok(event) => event,
                Err(e) => {
                    let at = self.byte(e.marker().index());
                    return Err(vec![words::syntax(self.sources, self.id, at, e.info())]);
                }
            };
            let (start, end) = (self.byte(span.start.index()), self.byte(span.end.index()));
            let span = Span::new(self.id, start..end);
            let step = match event {
                Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => Ok(()),
                Event::DocumentStart(_) => {
                    documents += 1;
                    // What an alias names is in its own document.
                    self.anchors.clear();
                    if documents > 1 && !many {
                        Err(self.fail(
                            DiagnosticCode::Unsupported,
                            "a second document begins here; a file holds one",
                            "give each job its own file, and several files to one command: `aviflow submit a.yaml b.yaml`",
                            span,
                        ))
                    } else {
                        Ok(())
                    }
                }
                Event::Alias(anchor) => self.alias(anchor, span),
                Event::Scalar(text, style, anchor, tag) => self.scalar(&text, style, anchor, tag.as_deref(), span),
                Event::SequenceStart(anchor, tag) => {
                    self.open(Value::List(Vec::new()), anchor, tag.as_deref(), start, span)
                }
                Event::MappingStart(anchor, tag) => {
                    self.open(Value::Map(Vec::new()), anchor, tag.as_deref(), start, span)
                }
                Event::SequenceEnd | Event::MappingEnd => self.close(end),
            };
            step.map_err(|d| vec![*d])?;
        }
        if !self.duplicates.is_empty() {
            return Err(self.duplicates);
        }
        Ok(self.roots)
    }

    fn count(&mut self, nodes: usize, span: Span) -> Step {
        self.nodes += nodes;
        if self.nodes > MAX_NODES {
            return Err(self.fail(
                DiagnosticCode::TooLarge,
                format!("with its aliases written out, the document has more than {MAX_NODES} values"),
                "write less of it through `*` aliases",
                span,
            ));
        }
        Ok(())
    }

    fn open(&mut self, value: Value, anchor: usize, tag: Option<&Tag>, start: usize, span: Span) -> Step {
        self.tag(tag, span)?;
        let nodes_before = self.nodes;
        self.count(1, span)?;
        if self.open.len() >= MAX_DEPTH {
            return Err(self.fail(
                DiagnosticCode::TooLarge,
                format!("more than {MAX_DEPTH} values in each other"),
                "a document is at most five deep; look for brackets that are not closed",
                span,
            ));
        }
        if anchor > 0 {
            self.pending.push(anchor);
        }
        if self.awaits_key() {
            return Err(self.no_key(span));
        }
        self.open.push(Open { value, start, anchor, key: None, nodes_before });
        Ok(())
    }

    fn awaits_key(&self) -> bool {
        matches!(self.open.last(), Some(Open { value: Value::Map(_), key: None, .. }))
    }

    fn no_key(&self, span: Span) -> Box<Diagnostic> {
        self.fail(
            DiagnosticCode::Syntax,
            "a key is one word; this is a list or mapping",
            "a text that begins with `{` or `[` must be in quotes",
            span,
        )
    }

    fn close(&mut self, end: usize) -> Step {
        let Some(open) = self.open.pop() else {
            return Ok(());
        };
        // A block collection ends where the next thing begins; its own text ends before the blanks.
        let text = self.sources.get(self.id).map(|s| s.text.as_str()).unwrap_or_default();
        let start = self.first(&open.value).unwrap_or(open.start).min(open.start);
        let covered = text.get(start..end).unwrap_or_default().trim_end().len();
        let last = self.last(&open.value).unwrap_or(start);
        let span = Span::new(self.id, start..(start + covered).max(last));
        let node = Node { value: open.value, span };
        let size = self.nodes - open.nodes_before;
        if open.anchor > 0 {
            self.pending.retain(|a| *a != open.anchor);
            self.anchors.insert(open.anchor, (node.clone(), size));
        }
        self.put(node)
    }

    fn first(&self, value: &Value) -> Option<usize> {
        match value {
            Value::Map(entries) => entries.first().map(|e| e.key_span.start as usize),
            Value::List(_) | Value::Scalar { .. } => None,
        }
    }

    fn last(&self, value: &Value) -> Option<usize> {
        match value {
            Value::Map(entries) => entries.last().map(|e| e.value.span.end as usize),
            Value::List(items) => items.last().map(|n| n.span.end as usize),
            Value::Scalar { .. } => None,
        }
    }

    fn tag(&self, tag: Option<&Tag>, span: Span) -> Step {
        let Some(tag) = tag else {
            return Ok(());
        };
        if tag.is_yaml_core_schema() {
            return Ok(());
        }
        Err(self.fail(
            DiagnosticCode::Unsupported,
            format!("the tag `{}{}` means nothing here", tag.handle, tag.suffix),
            "remove it; a text that begins with `!` must be in quotes",
            span,
        ))
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, anchor: usize, tag: Option<&Tag>, span: Span) -> Step {
        self.tag(tag, span)?;
        self.count(1, span)?;
        let style = match style {
            // `!!str 8080` is text.
            ScalarStyle::Plain if tag.is_some_and(|t| t.suffix == "str") => Style::Quoted,
            ScalarStyle::Plain => Style::Plain,
            ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => Style::Quoted,
            ScalarStyle::Literal => Style::Literal,
            ScalarStyle::Folded => Style::Folded,
        };
        let node = Node::scalar(text, style, span);
        if anchor > 0 {
            self.anchors.insert(anchor, (node.clone(), 1));
        }
        self.put(node)
    }

    fn alias(&mut self, anchor: usize, span: Span) -> Step {
        let Some((node, size)) = self.anchors.get(&anchor) else {
            let inside = self.pending.contains(&anchor);
            let message = if inside { "this alias stands inside of what it names" } else { "this alias names nothing" };
            return Err(self.fail(DiagnosticCode::Syntax, message, "write the value out", span));
        };
        // Counted before it is copied: that is the bound.
        let size = *size;
        if self.nodes + size <= MAX_NODES {
            let mut copy = node.clone();
            copy.span = span;
            self.count(size, span)?;
            return self.put(copy);
        }
        self.count(size, span)
    }

    fn put(&mut self, node: Node) -> Step {
        let Some(top) = self.open.last_mut() else {
            self.roots.push(node);
            return Ok(());
        };
        let entries = match &mut top.value {
            Value::List(items) => {
                items.push(node);
                return Ok(());
            }
            Value::Map(entries) => entries,
            Value::Scalar { .. } => return Ok(()),
        };
        let Some((key, key_span)) = top.key.take() else {
            let span = node.span;
            let Value::Scalar { text, style } = node.value else {
                return Err(self.no_key(span));
            };
            if text == "<<" && style == Style::Plain {
                return Err(self.fail(
                    DiagnosticCode::Unsupported,
                    "merge keys (`<<`) are not part of YAML 1.2",
                    "write the keys out; a whole value can be repeated with `*name`",
                    span,
                ));
            }
            if let Some(first) = entries.iter().find(|e| e.key == text) {
                let line = self.sources.place(first.key_span).line;
                let duplicate = Diagnostic::error(
                    DiagnosticCode::DuplicateKey,
                    format!("`{text}` is written twice, first in line {line}"),
                )
                .help("keep one of them; in YAML the others would be lost silently")
                .at(self.sources, span)
                .other(self.sources, first.key_span);
                self.duplicates.push(duplicate);
            }
            top.key = Some((text, span));
            return Ok(());
        };
        if !entries.iter().any(|e| e.key == key) {
            entries.push(Entry { key, key_span, value: node });
        }
        Ok(())
    }
}
