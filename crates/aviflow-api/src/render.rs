//! Problems as a person reads them: the file, the line, the text underlined, and what to write.
//!
//! Drawn by miette. A long line is cut around what it is about; what looks like a secret is
//! masked in the lines that are shown.

use crate::diagnostic::{Diagnostic, Place, Severity};
use crate::secrets::mask;
use crate::source::Sources;
use miette::{
    GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteError, MietteSpanContents, SourceCode, SourceSpan,
    SpanContents,
};
use std::fmt;

/// How problems are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// With colour and lines, for a terminal.
    Color,
    /// ASCII alone, for files and pipes.
    Plain,
}

/// Most characters of a line that are shown.
const WIDTH: usize = 100;

/// All problems in one text, each with its place, and how many there are at the end.
#[must_use]
pub fn render(diagnostics: &[Diagnostic], sources: &Sources, style: Style) -> String {
    let theme = match style {
        Style::Color => GraphicalTheme::unicode(),
        Style::Plain => GraphicalTheme::none(),
    };
    let handler = GraphicalReportHandler::new_themed(theme).with_links(false).with_context_lines(1).with_width(WIDTH);
    let mut out = String::new();
    for diagnostic in diagnostics {
        let excerpt = diagnostic.place.as_ref().and_then(|p| Excerpt::new(p, sources));
        let shown = Shown { diagnostic, excerpt };
        // Writing to a string cannot fail; a picture that could not be drawn is replaced by its words.
        let mut drawn = String::new();
        if handler.render_report(&mut drawn, &shown).is_err() {
            drawn = format!("{diagnostic_text}\n", diagnostic_text = diagnostic.message);
        }
        for line in drawn.trim_matches('\n').lines() {
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out.push('\n');
    }
    out.push_str(&summary(diagnostics));
    out
}

fn summary(diagnostics: &[Diagnostic]) -> String {
    let errors = diagnostics.iter().filter(|d| d.is_error()).count();
    let warnings = diagnostics.len() - errors;
    let count = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    match (errors, warnings) {
        (0, 0) => String::new(),
        (e, 0) => format!("{}\n", count(e, "error")),
        (0, w) => format!("{}\n", count(w, "warning")),
        (e, w) => format!("{}, {}\n", count(e, "error"), count(w, "warning")),
    }
}

/// A diagnostic as miette wants it.
#[derive(Debug)]
struct Shown<'a> {
    diagnostic: &'a Diagnostic,
    excerpt: Option<Excerpt>,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.diagnostic.message)
    }
}

impl std::error::Error for Shown<'_> {}

impl miette::Diagnostic for Shown<'_> {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let word = match self.diagnostic.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        Some(Box::new(format!("{word}: {}", self.diagnostic.code.name())))
    }

    fn severity(&self) -> Option<miette::Severity> {
        Some(match self.diagnostic.severity {
            Severity::Error => miette::Severity::Error,
            Severity::Warning => miette::Severity::Warning,
        })
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.diagnostic.help.as_ref().map(|h| Box::new(h) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.excerpt.as_ref().map(|e| e as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let excerpt = self.excerpt.as_ref()?;
        let label = LabeledSpan::new_primary_with_span(None, excerpt.label);
        Some(Box::new(std::iter::once(label)))
    }
}

/// The line of a place with its neighbours, each cut to what can be read.
#[derive(Debug)]
struct Excerpt {
    name: String,
    text: String,
    /// The number of the first line shown, from 0.
    first: usize,
    lines: usize,
    /// Where the place begins in the whole text, from 0.
    at: (usize, usize),
    /// The place in the excerpt.
    label: SourceSpan,
}

impl Excerpt {
    fn new(place: &Place, sources: &Sources) -> Option<Excerpt> {
        let source = sources.by_name(&place.source)?;
        let text = mask(&source.text);
        let line = place.line.checked_sub(1)?;
        let all: Vec<&str> = text.trim_start_matches('\u{feff}').lines().collect();
        let first = line.saturating_sub(1);
        let shown = all.get(first..(line + 2).min(all.len()))?;
        // All lines are cut at the same column, or they would not stand below each other.
        let column = place.column.saturating_sub(1);
        let skip = column.saturating_sub(WIDTH / 2);
        let skip = if all.get(line)?.chars().count() <= WIDTH { 0 } else { skip };
        let mut excerpt = String::new();
        let mut label = 0..0;
        for (i, text) in shown.iter().enumerate() {
            let start = excerpt.len();
            let cut = cut(text, skip);
            if first + i == line {
                // `…` stands for the first character that is shown.
                let from = column - skip;
                let offset = |n: usize| cut.char_indices().nth(n).map_or(cut.len(), |(i, _)| i);
                label = start + offset(from)..start + offset(from + place.length);
            }
            excerpt.push_str(&cut);
            excerpt.push('\n');
        }
        Some(Excerpt {
            name: source.name.clone(),
            text: excerpt,
            first,
            lines: shown.len(),
            at: (line, column),
            label: SourceSpan::from(label),
        })
    }
}

/// `WIDTH` characters of a line from `skip` on, with `…` where something is left out.
fn cut(line: &str, skip: usize) -> String {
    let length = line.chars().count();
    let mut shown: Vec<char> = line.chars().skip(skip).take(WIDTH).collect();
    if skip > 0
        && let Some(first) = shown.first_mut()
    {
        *first = '…';
    }
    if length > skip + WIDTH
        && let Some(last) = shown.last_mut()
    {
        *last = '…';
    }
    // One column a character, or the underline would slip.
    shown.into_iter().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl SourceCode for Excerpt {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        // Without context miette asks for the place alone, to write it above the picture.
        if before == 0 && after == 0 {
            let data = self.text.as_bytes().get(span.offset()..span.offset() + span.len()).unwrap_or_default();
            let contents = MietteSpanContents::new_named(self.name.clone(), data, *span, self.at.0, self.at.1, 1);
            return Ok(Box::new(contents));
        }
        let whole = SourceSpan::from(0..self.text.len());
        let data = self.text.as_bytes();
        let contents = MietteSpanContents::new_named(self.name.clone(), data, whole, self.first, 0, self.lines);
        Ok(Box::new(contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostic::DiagnosticCode;
    use crate::source::{SourceId, Span};

    #[test]
    fn a_long_line_is_cut_around_its_place() {
        let text = format!("a: 1\nrun: {} HERE {}\n", "x".repeat(300), "y".repeat(300));
        let sources = Sources::single("job.yaml", text.as_bytes());
        let at = text.find("HERE").unwrap_or_default();
        let d = Diagnostic::error(DiagnosticCode::Syntax, "wrong").at(&sources, Span::new(SourceId(0), at..at + 4));
        let drawn = render(&[d], &sources, Style::Plain);
        assert!(drawn.contains("job.yaml:2:307"), "{drawn}");
        assert!(drawn.lines().all(|l| l.chars().count() < 120), "{drawn}");
        let lines: Vec<&str> = drawn.lines().collect();
        let shown = lines.iter().position(|l| l.contains("HERE")).unwrap_or_default();
        let column = |l: &str, c: char| l.chars().position(|x| x == c);
        assert_eq!(
            column(lines[shown], 'H'),
            column(lines[shown + 1], '^').or(column(lines[shown + 1], '-')),
            "{drawn}"
        );
    }
}
