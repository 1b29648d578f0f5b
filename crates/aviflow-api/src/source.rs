//! Where a text came from, and places in it.
//!
//! A job is often written in several texts: a file, and `--set` on the command
//! line. A [`Span`] knows which one it points into, so that an error about
//! `--set nodes=0` never points into the file.

use crate::diagnostic::Place;
use std::ops::Range;

/// One text of [`Sources`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u16);

/// A range of bytes in one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The text.
    pub source: SourceId,
    /// The first byte.
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl Span {
    /// The bytes `range` of the text `source`. Texts are far below 4 GiB.
    #[must_use]
    pub fn new(source: SourceId, range: Range<usize>) -> Span {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Span { source, start: narrow(range.start), end: narrow(range.end.max(range.start)) }
    }

    /// As a range of bytes.
    #[must_use]
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// A text and how a person would name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file as it was given, or the option, such as `--set`.
    pub name: String,
    /// The text.
    pub text: String,
}

/// The texts of one document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources(Vec<Source>);

impl Sources {
    /// One text alone. Bytes that are not UTF-8 are replaced, for rendering only.
    #[must_use]
    pub fn single(name: &str, bytes: &[u8]) -> Sources {
        let mut sources = Sources::default();
        sources.add(name, String::from_utf8_lossy(bytes).into_owned());
        sources
    }

    /// Adds a text. A name that is taken gets a number, so that a [`Place`] names one text.
    pub fn add(&mut self, name: &str, text: String) -> SourceId {
        let mut unique = name.to_owned();
        let mut n = 1;
        while self.0.iter().any(|s| s.name == unique) {
            n += 1;
            unique = format!("{name} #{n}");
        }
        self.0.push(Source { name: unique, text });
        SourceId(u16::try_from(self.0.len() - 1).unwrap_or(u16::MAX))
    }

    /// The text of that number.
    #[must_use]
    pub fn get(&self, id: SourceId) -> Option<&Source> {
        self.0.get(usize::from(id.0))
    }

    /// The text of that name.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&Source> {
        self.0.iter().find(|s| s.name == name)
    }

    /// Which text has that name, in the order they were added.
    #[must_use]
    pub fn position(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|s| s.name == name)
    }

    /// The bytes of a span; empty where it does not fall on characters.
    #[must_use]
    pub fn slice(&self, span: Span) -> &str {
        self.get(span.source).and_then(|s| s.text.get(span.range())).unwrap_or_default()
    }

    /// Line, column and length as an editor counts them, of the span's first line.
    #[must_use]
    pub fn place(&self, span: Span) -> Place {
        let Some(source) = self.get(span.source) else {
            return Place::default();
        };
        let text = source.text.as_str();
        let start = floor(text, span.start as usize);
        let end = floor(text, span.end as usize).max(start);
        let head = text.get(..start).unwrap_or_default();
        let line_start = head.rfind('\n').map_or(0, |i| i + 1);
        let covered = text.get(start..end).unwrap_or_default();
        let first = covered.split('\n').next().unwrap_or_default().trim_end();
        let before = text.get(line_start..start).unwrap_or_default().trim_start_matches('\u{feff}');
        Place {
            source: source.name.clone(),
            line: head.bytes().filter(|b| *b == b'\n').count() + 1,
            column: before.chars().count() + 1,
            length: first.chars().count().max(1),
            offset: start,
            bytes: first.len(),
        }
    }
}

/// The nearest character boundary at or before `at`.
fn floor(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_counts_characters_and_stays_on_its_first_line() {
        let mut sources = Sources::default();
        let id = sources.add("job.yaml", "\u{feff}é: 1\r\nü: [a,\r\n b]\r\n".to_owned());
        let text = sources.get(id).map(|s| s.text.clone()).unwrap_or_default();
        let at = text.find('[').unwrap_or_default();
        let place = sources.place(Span::new(id, at..text.len()));
        assert_eq!((place.line, place.column, place.length), (2, 4, 3));
        assert_eq!(sources.place(Span::new(id, 3..5)).column, 1);
    }

    #[test]
    fn names_are_unique() {
        let mut sources = Sources::default();
        sources.add("--set", "a=1".into());
        let second = sources.add("--set", "b=2".into());
        assert_eq!(sources.get(second).map(|s| s.name.as_str()), Some("--set #2"));
    }
}
