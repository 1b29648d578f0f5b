//! Time as integers: instants and spans of whole milliseconds.
//!
//! The engine is the only source of instants; the core only compares them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// An instant: milliseconds since the Unix epoch, as the engine counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub i64);

/// A span of time in milliseconds. Never negative when the core makes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub i64);

impl Time {
    /// The span from `earlier` to `self`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Time) -> Span {
        Span((self.0 - earlier.0).max(0))
    }
}

impl Span {
    /// A span of whole seconds.
    #[must_use]
    pub const fn seconds(s: i64) -> Span {
        Span(s * 1000)
    }

    /// A span of whole minutes.
    #[must_use]
    pub const fn minutes(m: i64) -> Span {
        Span(m * 60_000)
    }
}

impl Add<Span> for Time {
    type Output = Time;
    fn add(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Time {
    type Output = Time;
    fn sub(self, span: Span) -> Time {
        Time(self.0.saturating_sub(span.0))
    }
}

impl Add for Span {
    type Output = Span;
    fn add(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Span {
    fn add_assign(&mut self, other: Span) {
        *self = *self + other;
    }
}

/// The two largest units, as people say it: `2d 4h`, `3m 20s`, `850ms`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0;
        if ms < 1000 {
            return write!(f, "{ms}ms");
        }
        let s = ms / 1000;
        let units = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")];
        let first = units.iter().position(|(n, _)| s >= *n).unwrap_or(3);
        let (size, name) = units[first];
        write!(f, "{}{name}", s / size)?;
        if let Some((size2, name2)) = units.get(first + 1) {
            let rest = s % size / size2;
            if rest > 0 {
                write!(f, " {rest}{name2}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_as_people_say_them() {
        let cases = [
            (0, "0ms"),
            (850, "850ms"),
            (1_000, "1s"),
            (59_999, "59s"),
            (200_000, "3m 20s"),
            (3_600_000, "1h"),
            (187_200_000, "2d 4h"),
        ];
        for (ms, text) in cases {
            assert_eq!(Span(ms).to_string(), text);
        }
    }

    #[test]
    fn a_span_is_never_negative() {
        assert_eq!(Time(5).since(Time(9)), Span(0));
    }
}
