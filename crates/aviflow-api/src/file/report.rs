//! Problems as they are collected, and the places of all fields.

use crate::diagnostic::{Diagnostic, DiagnosticCode, Severity};
use crate::source::{Sources, Span};
use crate::yaml::Node;
use std::collections::BTreeMap;
use std::ops::Range;

/// Where each field of a document stands, by its path: `nodes`, `env.PORT`, `data[0].mount`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places(BTreeMap<String, (Option<Span>, Span)>);

impl Places {
    pub(crate) fn put(&mut self, path: &str, key: Option<Span>, value: Span) {
        self.0.insert(path.to_owned(), (key, value));
    }

    /// The place of a field's value.
    #[must_use]
    pub fn value(&self, path: &str) -> Option<Span> {
        self.0.get(path).map(|p| p.1)
    }

    /// The place of a field's key; of its value where it is a list item.
    #[must_use]
    pub fn key(&self, path: &str) -> Option<Span> {
        self.0.get(path).map(|p| p.0.unwrap_or(p.1))
    }

    /// Whether the document has that field, be it right or wrong.
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    /// Gives a problem that names its field the field's place, if the document has it.
    #[must_use]
    pub fn place(&self, problem: Diagnostic, sources: &Sources) -> Diagnostic {
        // A single item may stand without its list.
        let list = problem.field.rsplit_once('[').map_or("", |(list, _)| list);
        match self.value(&problem.field).or_else(|| self.value(list)) {
            Some(span) => problem.at(sources, span),
            None => problem,
        }
    }

    /// The innermost field whose key or value covers a place.
    #[must_use]
    pub fn covering(&self, span: Span) -> Option<&str> {
        let covers = |s: Span| s.source == span.source && s.start <= span.start && span.end <= s.end;
        self.0
            .iter()
            .filter(|(_, (key, value))| covers(*value) || key.is_some_and(covers))
            .min_by_key(|(_, (_, value))| value.end - value.start)
            .map(|(path, _)| path.as_str())
    }
}

/// `a.b`, or `b` at the top.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Problems of one document.
pub(crate) struct Report<'a> {
    pub sources: &'a Sources,
    pub places: Places,
    pub list: Vec<Diagnostic>,
}

impl<'a> Report<'a> {
    pub fn new(sources: &'a Sources) -> Report<'a> {
        Report { sources, places: Places::default(), list: Vec::new() }
    }

    pub fn error(
        &mut self,
        code: DiagnosticCode,
        path: &str,
        span: Span,
        message: impl AsRef<str>,
        help: impl AsRef<str>,
    ) {
        self.list.push(Diagnostic::error(code, message).help(help).field(path).at(self.sources, span));
    }

    pub fn warning(
        &mut self,
        code: DiagnosticCode,
        path: &str,
        span: Span,
        message: impl AsRef<str>,
        help: impl AsRef<str>,
    ) {
        self.error(code, path, span, message, help);
        if let Some(last) = self.list.last_mut() {
            last.severity = Severity::Warning;
        }
    }

    /// An error at a field: at its value, or at nothing where the field is not in the document.
    pub fn error_at(&mut self, code: DiagnosticCode, path: &str, message: impl AsRef<str>, help: impl AsRef<str>) {
        let mut d = Diagnostic::error(code, message).help(help).field(path);
        if let Some(span) = self.places.value(path) {
            d = d.at(self.sources, span);
        }
        self.list.push(d);
    }

    /// An error at a field's key.
    pub fn error_at_key(&mut self, code: DiagnosticCode, path: &str, message: impl AsRef<str>, help: impl AsRef<str>) {
        self.error_at(code, path, message, help);
        if let (Some(span), Some(last)) = (self.places.key(path), self.list.pop()) {
            self.list.push(last.at(self.sources, span));
        }
    }

    /// A warning at a field's value.
    pub fn warning_at(&mut self, code: DiagnosticCode, path: &str, message: impl AsRef<str>, help: impl AsRef<str>) {
        self.error_at(code, path, message, help);
        if let Some(last) = self.list.last_mut() {
            last.severity = Severity::Warning;
        }
    }

    /// The place of a part of a scalar's text. Where escapes or folding make the text differ
    /// from what was written, the place of the line or of the whole.
    pub fn within(&self, node: &Node, range: Range<usize>) -> Span {
        let written = self.sources.slice(node.span);
        let text = node.text().unwrap_or_default();
        let start = node.span.start as usize;
        if let Some(at) = written.find(text) {
            return Span::new(node.span.source, start + at + range.start..start + at + range.end);
        }
        // Folded lines: what is meant may still stand there only once.
        if let Some(part) = text.get(range.clone()).filter(|p| !p.is_empty())
            && let Some(at) = written.find(part)
            && written.rfind(part) == Some(at)
        {
            return Span::new(node.span.source, start + at..start + at + part.len());
        }
        let line_start = text.get(..range.start).and_then(|t| t.rfind('\n')).map_or(0, |i| i + 1);
        let line = text.get(line_start..).and_then(|t| t.lines().next()).unwrap_or_default();
        let end = range.end.min(line_start + line.len());
        match written.find(line) {
            Some(at) if !line.is_empty() => {
                let shift = start + at;
                Span::new(node.span.source, shift + (range.start - line_start)..shift + (end - line_start))
            }
            _ => node.span,
        }
    }
}
