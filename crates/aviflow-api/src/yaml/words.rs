//! The YAML parser's errors in words that help who wrote the text.

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::source::{SourceId, Sources, Span};
use std::ops::Range;

/// What the parser says (a part of it), what a person reads, what to do.
const WORDS: &[(&str, &str, &str)] = &[
    ("tab", "a tab where only spaces may stand", "indent with spaces"),
    ("mapping values are not allowed", "a second `: ` in one line", "put a value that contains `: ` in quotes"),
    (
        "illegal placement of ':'",
        "a `:` that belongs to no key",
        "close a `[` or `{` that is open above; a value that contains `: ` must be in quotes",
    ),
    ("found unexpected end of stream", "a quote that is never closed", "close it at the end of the value"),
    ("unexpected document indicator", "a quote that is not closed before `---`", "close it at the end of the value"),
    ("trailing content after double-quoted", "text after the closing quote", "put the whole value in quotes: '…'"),
    (
        "unknown escape character",
        "an escape that YAML does not know",
        "write `\\\\` for a backslash, or use single quotes",
    ),
    ("hexadecimal number", "an escape with too few hexadecimal digits", "write it as `\\u00e9`"),
    ("flow sequence, expected", "a list in `[ ]` that is not closed, or a missing comma", "write `[a, b]`"),
    ("flow mapping, did not find", "a mapping in `{ }` that is not closed, or a missing comma", "write `{a: 1, b: 2}`"),
    ("misplaced bracket", "a closing bracket that closes nothing", "remove it, or put the value in quotes"),
    (
        "invalid indentation in quoted",
        "a quoted text whose next line is not indented",
        "close the quote, or indent the line",
    ),
    (
        "indentation",
        "a line that is indented unlike its neighbours",
        "give the keys of one mapping the same indentation",
    ),
    (
        "block mapping, did not find expected key",
        "a line that does not fit in the mapping above",
        "give the keys of one mapping the same indentation; a value that begins with a quote ends with it",
    ),
    (
        "expected '-' indicator",
        "a line that does not fit in the list above",
        "begin every item with `- `, all equally indented",
    ),
    ("simple key expect", "a line without `key: value`", "write `key: value`, with a space after the colon"),
    (
        "block sequence entries are not allowed",
        "a list item where none can stand",
        "begin the list in its own line below the key",
    ),
    (
        "unknown anchor",
        "an alias of an anchor that is not there",
        "a text that begins with `*` must be in quotes; an alias needs its `&name` before",
    ),
    (
        "expected alphabetic or numeric",
        "an alias or anchor without a name",
        "put a value that begins with `*` or `&` in quotes",
    ),
    (
        "block scalar, did not find expected comment",
        "text behind `|` or `>`",
        "begin the text in the next line, indented",
    ),
    (
        "wrongly indented line in block scalar",
        "a text block whose first lines are indented further",
        "indent the text evenly",
    ),
    ("recursion limit", "more than 64 values in each other", "look for brackets that are not closed"),
    ("unprintable", "a character that cannot be seen", "remove it"),
    ("byte order mark", "a byte order mark within the text", "remove the invisible character"),
    ("unexpected character", "a character that no value may begin with", "put the value in quotes"),
    ("did not find expected node content", "a value is missing", "write one, or put the value in quotes"),
    ("next token", "a character that no value may begin with", "put the value in quotes"),
];

/// The error at byte `at`, in words.
pub(super) fn syntax(sources: &Sources, id: SourceId, at: usize, info: &str) -> Diagnostic {
    let text = sources.get(id).map(|s| s.text.as_str()).unwrap_or_default();
    let line = text.get(..at).and_then(|t| t.rsplit('\n').next()).unwrap_or_default();
    // The first colon of its line is not one too many: the line stands too far to the right.
    let info = if info.contains("mapping values") && !line.contains(": ") { "invalid indentation" } else { info };
    let known = WORDS.iter().find(|(part, ..)| info.contains(part));
    let (message, help) = match known {
        Some((_, message, help)) => ((*message).to_owned(), (*help).to_owned()),
        None => (info.to_owned(), "look at this line and the one above".to_owned()),
    };
    if let Some(range) = bracketed(text, at).filter(|_| info.contains("flow")) {
        let word = text.get(range.clone()).unwrap_or_default();
        return Diagnostic::error(DiagnosticCode::Syntax, "a text with `[` that stands in `[ ]` or `{ }`")
            .help(format!("put it in quotes: `\"{word}\"`"))
            .at(sources, Span::new(id, range));
    }
    // An error at the end of the text is shown where the text ends, on a line that can be seen.
    let mut start = at.min(text.len());
    if text.get(start..).is_some_and(|rest| rest.trim().is_empty()) {
        start = text.get(..start).unwrap_or_default().trim_end().len();
        start = text.get(..start).and_then(|t| t.char_indices().next_back()).map_or(0, |(i, _)| i);
    }
    if info.contains("unexpected end of stream")
        && let Some(quote) = open_quote(text)
    {
        start = quote;
    }
    let length = text.get(start..).and_then(|t| t.chars().next()).map_or(0, char::len_utf8);
    Diagnostic::error(DiagnosticCode::Syntax, message).help(help).at(sources, Span::new(id, start..start + length))
}

/// The word whose `[` is at `at`, such as `node-[1-8]`.
fn bracketed(text: &str, at: usize) -> Option<Range<usize>> {
    let (before, behind) = (text.get(..at)?, text.get(at..)?);
    let start = before.rfind([' ', ',', '[', '{', '\n']).map_or(0, |i| i + 1);
    let end = at + behind.find([']', '\n'])? + 1;
    let word = text.get(start..end)?;
    (start < at && behind.starts_with('[') && word.ends_with(']')).then_some(start..end)
}

/// The last quote that opens a value: after a colon, dash, bracket or comma.
fn open_quote(text: &str) -> Option<usize> {
    text.char_indices().rev().find_map(|(i, c)| {
        let before = text.get(..i)?.trim_end_matches(' ');
        let opens = matches!(c, '"' | '\'') && before.ends_with([':', '-', '[', '{', ',', '\n']);
        opens.then_some(i)
    })
}
