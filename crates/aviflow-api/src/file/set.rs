//! Options of the command line, put into the document's tree.
//!
//! `--set FIELD=VALUE` reaches every field by its path: `nodes=4`, `env.LR=1e-3`,
//! `checkpoint.every=5m`, `gpuType=[H100, H200]`, `data.0.mount=/data`. The options that have a
//! name of their own (`--nodes 2`) are the same with a shorter way to write them. Each is a text
//! of its own, so that its errors point at it.

use super::{Document, run};
use crate::diagnostic::{Diagnostic, DiagnosticCode, sort};
use crate::source::{SourceId, Sources, Span};
use crate::suggest::count;
use crate::yaml::{self, Entry, Node, Style, Value};

/// What the command line says of a job. Texts as they were typed; empty and `None` say nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `--name`
    pub name: Option<String>,
    /// `--queue`
    pub queue: Option<String>,
    /// `--priority`
    pub priority: Option<String>,
    /// `--environment`
    pub environment: Option<String>,
    /// `--image`
    pub image: Option<String>,
    /// `--requirements`
    pub requirements: Option<String>,
    /// `--code`
    pub code: Option<String>,
    /// `--nodes`: a number, or `2-8`.
    pub nodes: Option<String>,
    /// `--gpus-per-node`
    pub gpus_per_node: Option<String>,
    /// `--gpu-type`, several times in order of preference, or separated by commas.
    pub gpu_type: Vec<String>,
    /// `--processes`
    pub processes: Option<String>,
    /// `--time-limit`
    pub time_limit: Option<String>,
    /// `keepOnFailure`.
    pub keep_on_failure: Option<String>,
    /// `--retries`
    pub retries: Option<String>,
    /// `--seed`
    pub seed: Option<String>,
    /// `--env NAME=VALUE`, several times.
    pub env: Vec<String>,
    /// `--set FIELD=VALUE`, several times, in order; they go over all others.
    pub set: Vec<String>,
    /// The program and its arguments after `--`, taken literally.
    pub command: Vec<String>,
}

impl Document {
    /// A job without a file: `run --nodes 2 -- torchrun train.py`.
    ///
    /// Without `--name` it is called as its script or program is. Its folder is snapshotted only
    /// with `--code`.
    ///
    /// # Errors
    /// Options that cannot be read. What they say is checked by [`Document::read`].
    pub fn from_command(options: &Options) -> Result<Document, (Sources, Vec<Diagnostic>)> {
        let mut sources = Sources::default();
        if options.command.is_empty() && !options.set.iter().any(|s| s.starts_with("run=")) {
            let d = Diagnostic::error(DiagnosticCode::Option, "no command")
                .help("write it after `--`, such as `-- torchrun train.py`, or give a file");
            return Err((sources, vec![d]));
        }
        let id = sources.add("--", options.command.join(" "));
        let root = Node { value: Value::Map(Vec::new()), span: Span::new(id, 0..0) };
        let mut document = Document { sources, root };
        if options.name.is_none() {
            document.flag("--name", "name", &run::name_of(&options.command));
        }
        match document.apply(options) {
            Ok(()) => Ok(document),
            Err(diagnostics) => Err((document.sources, diagnostics)),
        }
    }

    /// Puts all options over what the document says.
    ///
    /// # Errors
    /// Every option that cannot be read; the others are applied.
    pub fn apply(&mut self, options: &Options) -> Result<(), Vec<Diagnostic>> {
        let mut wrong = Vec::new();
        let flags = [
            ("--name", "name", &options.name),
            ("--queue", "queue", &options.queue),
            ("--priority", "priority", &options.priority),
            ("--environment", "environment", &options.environment),
            ("--image", "image", &options.image),
            ("--requirements", "requirements", &options.requirements),
            ("--code", "code", &options.code),
            ("--gpus-per-node", "gpusPerNode", &options.gpus_per_node),
            ("--processes", "processes", &options.processes),
            ("--time-limit", "timeLimit", &options.time_limit),
            ("--keep-on-failure", "keepOnFailure", &options.keep_on_failure),
            ("--retries", "retry.failures", &options.retries),
            ("--seed", "seed", &options.seed),
        ];
        for (flag, field, value) in flags {
            if let Some(value) = value {
                self.flag(flag, field, value);
            }
        }
        if let Some(nodes) = &options.nodes {
            self.nodes(nodes);
        }
        self.gpu_types(&options.gpu_type);
        for text in &options.env {
            wrong.extend(self.variable(text).err().map(|d| *d));
        }
        if !options.command.is_empty() {
            let root = &mut self.root;
            root.put(vec!["run".to_owned()], words(&mut self.sources, &options.command));
        }
        for text in &options.set {
            if let Err(diagnostics) = self.apply_set(text) {
                wrong.extend(diagnostics);
            }
        }
        sort(&mut wrong, &self.sources);
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// `--set FIELD=VALUE`. An empty value takes the field away, so that its default stands.
    ///
    /// # Errors
    /// A text that has not this form, a path that leads nowhere, a value that is no YAML.
    pub fn apply_set(&mut self, text: &str) -> Result<(), Vec<Diagnostic>> {
        let id = self.sources.add("--set", text.to_owned());
        let all = Span::new(id, 0..text.len());
        let wrong = |message: &str, help: &str, span: Span, sources: &Sources| {
            vec![Diagnostic::error(DiagnosticCode::Option, message).help(help).at(sources, span)]
        };
        const EXAMPLE: &str = "write it as FIELD=VALUE, such as `--set nodes=4` or `--set env.LR=1e-3`";
        let Some(equals) = text.find('=') else {
            return Err(wrong("no `=` between field and value", EXAMPLE, all, &self.sources));
        };
        let field = text.get(..equals).unwrap_or_default();
        let path: Vec<String> = field.split('.').map(|part| part.trim().to_owned()).collect();
        if path.iter().any(String::is_empty) {
            return Err(wrong("a field without a name", EXAMPLE, Span::new(id, 0..equals), &self.sources));
        }
        let value = value(&self.sources, id, equals + 1)?;
        if let Some(at) = self.root.obstacle(&path) {
            let before: usize = path.iter().take(at).map(|p| p.len() + 1).sum();
            let whole = path.get(..at).map(|p| p.join(".")).unwrap_or_default();
            let span = Span::new(id, before..equals);
            let items = self.root.at(path.get(..at).unwrap_or_default()).and_then(Node::items);
            let (message, help) = match items {
                Some(n) => (
                    format!("`{whole}` is a list of {}, numbered from 0", count(n as u64, "value")),
                    format!("`{whole}.{n}` adds one"),
                ),
                None => (
                    format!("`{whole}` is one value, and has no fields of its own"),
                    format!("set it as a whole: `--set '{whole}={{…}}'`"),
                ),
            };
            return Err(wrong(&message, &help, span, &self.sources));
        }
        if value.is_null() {
            self.root.take(&path);
        } else {
            self.root.put_at(path, value, Span::new(id, 0..equals));
        }
        Ok(())
    }

    fn flag(&mut self, flag: &str, field: &str, value: &str) {
        let id = self.sources.add(flag, value.to_owned());
        let span = Span::new(id, 0..value.len());
        // A name is text whatever it looks like: `--name 123`, `-- true`.
        let text = ["name", "queue", "priority", "environment", "image", "requirements", "code"].contains(&field);
        let style = if text { Style::Quoted } else { Style::Plain };
        let node = Node::scalar(value, style, span);
        self.root.put(field.split('.').map(str::to_owned).collect(), node);
    }

    /// `--nodes 2-8` is `{min: 2, max: 8}`.
    fn nodes(&mut self, text: &str) {
        let Some((min, max)) = text.split_once('-').filter(|(min, _)| !min.is_empty()) else {
            self.flag("--nodes", "nodes", text);
            return;
        };
        let id = self.sources.add("--nodes", text.to_owned());
        let part = |key: &str, value: &str, at: usize| {
            let span = Span::new(id, at..at + value.len());
            Entry { key: key.to_owned(), key_span: span, value: Node::scalar(value, Style::Plain, span) }
        };
        let entries = vec![part("min", min, 0), part("max", max, min.len() + 1)];
        let node = Node { value: Value::Map(entries), span: Span::new(id, 0..text.len()) };
        self.root.put(vec!["nodes".to_owned()], node);
    }

    fn gpu_types(&mut self, given: &[String]) {
        let mut items = Vec::new();
        for text in given {
            let id = self.sources.add("--gpu-type", text.clone());
            let mut at = 0;
            for part in text.split(',') {
                items.push(Node::scalar(part, Style::Plain, Span::new(id, at..at + part.len())));
                at += part.len() + 1;
            }
        }
        if let Some(first) = items.first() {
            let span = first.span;
            self.root.put(vec!["gpuType".to_owned()], Node { value: Value::List(items), span });
        }
    }

    fn variable(&mut self, text: &str) -> Result<(), Box<Diagnostic>> {
        let id = self.sources.add("--env", text.to_owned());
        let Some((name, value)) = text.split_once('=') else {
            let d = Diagnostic::error(DiagnosticCode::Option, "no `=` between variable and value")
                .help(format!("write `--env {text}=VALUE`"))
                .at(&self.sources, Span::new(id, 0..text.len()));
            return Err(Box::new(d));
        };
        let span = Span::new(id, name.len() + 1..text.len());
        // Quoted: an empty value is an empty text here.
        let node = Node::scalar(value, Style::Quoted, span);
        self.root.put_at(vec!["env".to_owned(), name.to_owned()], node, Span::new(id, 0..name.len()));
        Ok(())
    }
}

/// The words after `--`, each with its place in the line as it is shown.
fn words(sources: &mut Sources, command: &[String]) -> Node {
    let id = match sources.position("--") {
        Some(0) => SourceId(0),
        _ => sources.add("--", command.join(" ")),
    };
    let mut at = 0;
    let mut items = Vec::new();
    for word in command {
        items.push(Node::scalar(word.as_str(), Style::Quoted, Span::new(id, at..at + word.len())));
        at += word.len() + 1;
    }
    Node { value: Value::List(items), span: Span::new(id, 0..at.saturating_sub(1)) }
}

/// A value on the command line: YAML where it is in brackets or quotes, else its text.
fn value(sources: &Sources, id: SourceId, from: usize) -> Result<Node, Vec<Diagnostic>> {
    let text = sources.get(id).and_then(|s| s.text.get(from..)).unwrap_or_default();
    if text.trim_start().starts_with(['[', '{', '"', '\'']) {
        return yaml::parse_at(sources, id, from);
    }
    Ok(Node::scalar(text, Style::Plain, Span::new(id, from..from + text.len())))
}

impl Node {
    fn at(&self, path: &[String]) -> Option<&Node> {
        path.iter().try_fold(self, |node, part| match &node.value {
            Value::Map(_) => node.get(part),
            Value::List(items) => items.get(part.parse::<usize>().ok()?),
            Value::Scalar { .. } => None,
        })
    }

    fn items(&self) -> Option<usize> {
        match &self.value {
            Value::List(items) => Some(items.len()),
            Value::Map(_) | Value::Scalar { .. } => None,
        }
    }

    /// The first part of a path that cannot be followed, because what is there has no parts.
    fn obstacle(&self, path: &[String]) -> Option<usize> {
        let mut node = self;
        for (i, part) in path.iter().enumerate() {
            node = match &node.value {
                Value::Scalar { .. } => return Some(i),
                Value::Map(_) => node.get(part)?,
                // One behind the last adds an item.
                Value::List(items) => match part.parse::<usize>() {
                    Ok(n) if n <= items.len() => items.get(n)?,
                    _ => return Some(i),
                },
            };
        }
        None
    }

    fn put(&mut self, path: Vec<String>, value: Node) {
        let span = value.span;
        self.put_at(path, value, span);
    }

    /// Puts a value at a path that has no obstacle, with the mappings on the way to it.
    fn put_at(&mut self, path: Vec<String>, value: Node, key_span: Span) {
        let mut parts = path.into_iter();
        let Some(part) = parts.next() else {
            *self = value;
            return;
        };
        let rest: Vec<String> = parts.collect();
        let empty = || Node { value: Value::Map(Vec::new()), span: key_span };
        match &mut self.value {
            Value::Map(entries) => {
                let at = entries.iter().position(|e| e.key == part).unwrap_or_else(|| {
                    entries.push(Entry { key: part, key_span, value: empty() });
                    entries.len() - 1
                });
                if let Some(entry) = entries.get_mut(at) {
                    if rest.is_empty() {
                        entry.key_span = key_span;
                    }
                    entry.value.put_at(rest, value, key_span);
                }
            }
            Value::List(items) => {
                let at = part.parse::<usize>().unwrap_or(items.len());
                if at >= items.len() {
                    items.push(empty());
                }
                if let Some(item) = items.get_mut(at) {
                    item.put_at(rest, value, key_span);
                }
            }
            Value::Scalar { .. } => {
                *self = empty();
                let path = std::iter::once(part).chain(rest).collect();
                self.put_at(path, value, key_span);
            }
        }
    }

    fn take(&mut self, path: &[String]) {
        let Some((part, rest)) = path.split_first() else {
            return;
        };
        match &mut self.value {
            Value::Map(entries) if rest.is_empty() => entries.retain(|e| e.key != *part),
            Value::Map(entries) => {
                if let Some(entry) = entries.iter_mut().find(|e| e.key == *part) {
                    entry.value.take(rest);
                }
            }
            Value::List(items) => {
                let at = part.parse::<usize>().unwrap_or(items.len());
                if rest.is_empty() && at < items.len() {
                    items.remove(at);
                } else if let Some(item) = items.get_mut(at) {
                    item.take(rest);
                }
            }
            Value::Scalar { .. } => {}
        }
    }
}
