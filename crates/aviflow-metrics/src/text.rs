//! Reads Prometheus' text format, as exporters write it.
//!
//! What is asked comes from another program, perhaps from another one than was expected: a line that is no sample is
//! passed over, as are comments, and lengths are bounded. Timestamps are read over; who scrapes knows when it did.

use std::borrow::Cow;

/// The longest line that is looked at, in bytes.
const LONGEST: usize = 16 << 10;

/// The most labels of a sample.
const LABELS: usize = 64;

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a str,
    labels: Vec<(&'a str, Cow<'a, str>)>,
    /// Its value.
    pub value: f64,
}

impl Sample<'_> {
    /// The value of a label; none where it is absent.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_ref())
    }
}

/// The samples of a text, in its order.
pub fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.split('\n').filter(|line| line.len() <= LONGEST).filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim_matches([' ', '\t', '\r']);
    let named = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let end = line.find(|c| !named(c))?;
    let (name, mut rest) = line.split_at(end);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches([' ', '\t']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, after) = rest.split_once('=')?;
            let after = after.trim_start_matches([' ', '\t']).strip_prefix('"')?;
            let (value, after) = quoted(after)?;
            if labels.len() == LABELS {
                return None;
            }
            labels.push((label.trim_end_matches([' ', '\t']), value));
            rest = after.trim_start_matches([' ', '\t']);
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
    }
    // A timestamp may follow.
    let value = number(rest.split_ascii_whitespace().next()?)?;
    Some(Sample { name, labels, value })
}

/// A quoted text up to its end, and what follows.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let first = text.find(['"', '\\'])?;
    if text[first..].starts_with('"') {
        return Some((Cow::Borrowed(&text[..first]), &text[first + 1..]));
    }
    let mut out = text[..first].to_owned();
    let mut escaped = false;
    for (at, c) in text.char_indices().skip_while(|(at, _)| *at < first) {
        match c {
            '"' if !escaped => return Some((Cow::Owned(out), &text[at + 1..])),
            '\\' if !escaped => {
                escaped = true;
                continue;
            }
            'n' if escaped => out.push('\n'),
            c => out.push(c),
        }
        escaped = false;
    }
    None
}

fn number(word: &str) -> Option<f64> {
    match word {
        "+Inf" | "Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        // Rust's own words for those are not the format's.
        word if word.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c)) => word.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Expected<'a> = Option<(&'a str, &'a [(&'a str, &'a str)], f64)>;

    #[test]
    fn a_line_is_a_sample_or_nothing() {
        let check = |line: &str, expected: Expected<'_>| {
            let read: Vec<_> = samples(line).collect();
            let read = read.first().map(|s| {
                let labels: Vec<(&str, &str)> = s.labels.iter().map(|(n, v)| (*n, v.as_ref())).collect();
                (s.name, labels, s.value)
            });
            assert_eq!(read, expected.map(|(name, labels, value)| (name, labels.to_vec(), value)), "{line}");
        };
        check("up 1", Some(("up", &[], 1.0)));
        check("up{} 1 1700000000000", Some(("up", &[], 1.0)));
        check("up\t1.5e3\r", Some(("up", &[], 1500.0)));
        check(r#"a:b{x="1",y="a\\b\"c\nd",} +Inf"#, Some(("a:b", &[("x", "1"), ("y", "a\\b\"c\nd")], f64::INFINITY)));
        check(r#"a { x = "}" , y="é" } -2"#, None);
        check(r#"a{ x = "}" , y="é" } -2"#, Some(("a", &[("x", "}"), ("y", "é")], -2.0)));
        for nothing in
            ["", "# HELP up Up.", "up", "up{", "up{x} 1", "up{x=\"1\" 1", "9up 1", "up one", "up inf", "{} 1"]
        {
            check(nothing, None);
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_without_harm(text in "(\\PC|[\"{}=,\\\\\n #a-c0-9]){0,200}") {
            for sample in samples(&text) {
                prop_assert!(!sample.name.is_empty());
            }
        }
    }
}
