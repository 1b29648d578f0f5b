//! Writes Prometheus' text format, version 0.0.4.
//!
//! What is written is described by [`Family`] constants, so that one table says what there is. Names are ours and
//! fixed; label values are anything, and are escaped. A value that is not there is not written: absent is not zero.

use std::fmt::Write as _;

/// The media type of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a family's samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, and begins anew with the process.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Counts of observations by their size.
    Histogram,
}

impl Kind {
    /// The word of the format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric with all its series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Its name: base units, `_total` for counters.
    pub name: &'static str,
    /// What its samples are.
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// What it says, in a sentence.
    pub help: &'static str,
}

/// A text that grows family by family.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// An empty text with room for so many bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Exposition {
        Exposition { text: String::with_capacity(bytes) }
    }

    /// Begins a family; each is begun once.
    pub fn family<'a>(&'a mut self, family: &'a Family) -> Samples<'a> {
        let Family { name, kind, help, .. } = family;
        // Writing to a string cannot fail.
        let _ = write!(self.text, "# HELP {name} ");
        escape(&mut self.text, help, false);
        let _ = writeln!(self.text, "\n# TYPE {name} {}", kind.name());
        Samples { text: &mut self.text, family }
    }

    /// The text.
    #[must_use]
    pub fn finish(self) -> String {
        self.text
    }
}

/// The samples of a family.
#[derive(Debug)]
pub struct Samples<'a> {
    text: &'a mut String,
    family: &'a Family,
}

impl Samples<'_> {
    /// Adds a sample; there is one value for each of the family's labels.
    pub fn add(&mut self, labels: &[&str], value: f64) {
        self.sample("", labels, None, value);
    }

    /// Adds what there is.
    pub fn add_if(&mut self, labels: &[&str], value: Option<f64>) {
        if let Some(value) = value {
            self.add(labels, value);
        }
    }

    /// Adds a histogram: `bounds` are upper bounds and ascend, `counts` has the observations of each class and of
    /// what is above the last bound.
    pub fn histogram(&mut self, labels: &[&str], bounds: &[f64], counts: &[u64], sum: f64) {
        let mut all = 0;
        let ends = bounds.iter().copied().chain([f64::INFINITY]);
        for (end, count) in ends.zip(counts) {
            all += count;
            self.sample("_bucket", labels, Some(end), float(all));
        }
        self.sample("_sum", labels, None, sum);
        self.sample("_count", labels, None, float(all));
    }

    fn sample(&mut self, suffix: &str, labels: &[&str], le: Option<f64>, value: f64) {
        debug_assert_eq!(labels.len(), self.family.labels.len(), "{}", self.family.name);
        self.text.push_str(self.family.name);
        self.text.push_str(suffix);
        let mut before = '{';
        for (name, value) in self.family.labels.iter().zip(labels) {
            self.text.push(before);
            self.text.push_str(name);
            self.text.push_str("=\"");
            escape(self.text, value, true);
            self.text.push('"');
            before = ',';
        }
        if let Some(le) = le {
            self.text.push(before);
            self.text.push_str("le=\"");
            number(self.text, le);
            self.text.push('"');
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
        self.text.push(' ');
        number(self.text, value);
        self.text.push('\n');
    }
}

/// A count as a sample's value: exact up to 2⁵³.
fn float(count: u64) -> f64 {
    count as f64
}

/// Backslash and newline are escaped everywhere, the quote in label values. What else there is may be any text; of
/// the other control characters none would be read by a person, and some tools end at NUL.
fn escape(out: &mut String, text: &str, quote: bool) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quote => out.push_str("\\\""),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
}

fn number(out: &mut String, value: f64) {
    // Writing to a string cannot fail.
    let _ = if value.is_nan() {
        out.write_str("NaN")
    } else if value.is_infinite() {
        out.write_str(if value > 0.0 { "+Inf" } else { "-Inf" })
    } else {
        write!(out, "{value}")
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;
    use proptest::prelude::*;

    const PLAIN: Family = Family { name: "up", kind: Kind::Gauge, labels: &[], help: "Whether it is \\ up.\nNow." };
    const LABELLED: Family = Family { name: "x", kind: Kind::Gauge, labels: &["a", "b"], help: "X." };
    const TIMES: Family = Family { name: "t_seconds", kind: Kind::Histogram, labels: &["a"], help: "T." };

    #[test]
    fn the_format_is_that_of_its_description() {
        let mut out = Exposition::default();
        out.family(&PLAIN).add(&[], 1.0);
        let mut samples = out.family(&LABELLED);
        samples.add(&["q\"uo\\te\n", ""], f64::NAN);
        samples.add_if(&["absent", ""], None);
        samples.add(&["max", "é"], f64::INFINITY);
        out.family(&TIMES).histogram(&["z"], &[0.5, 1.0], &[2, 0, 1], 7.25);
        let expected = r#"# HELP up Whether it is \\ up.\nNow.
# TYPE up gauge
up 1
# HELP x X.
# TYPE x gauge
x{a="q\"uo\\te\n",b=""} NaN
x{a="max",b="é"} +Inf
# HELP t_seconds T.
# TYPE t_seconds histogram
t_seconds_bucket{a="z",le="0.5"} 2
t_seconds_bucket{a="z",le="1"} 2
t_seconds_bucket{a="z",le="+Inf"} 3
t_seconds_sum{a="z"} 7.25
t_seconds_count{a="z"} 3
"#;
        assert_eq!(out.finish(), expected);
    }

    proptest! {
        #[test]
        fn hostile_labels_break_no_line(a in "\\PC*|[\\x00-\\x7f]*", b in any::<String>(), value in any::<f64>()) {
            let mut out = Exposition::default();
            out.family(&LABELLED).add(&[&a, &b], value);
            let text = out.finish();
            prop_assert_eq!(text.lines().count(), 3, "{}", text);
            let read: Vec<_> = text::samples(&text).collect();
            prop_assert_eq!(read.len(), 1, "{}", text);
            let shown = |s: &str| s.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}");
            prop_assert_eq!(read[0].label("a").map(str::to_owned), Some(shown(&a)));
            prop_assert_eq!(read[0].label("b").map(str::to_owned), Some(shown(&b)));
            prop_assert!(read[0].value == value || value.is_nan() && read[0].value.is_nan());
        }
    }
}
