//! Durations with a unit: `90s`, `15m`, `24h`, `1h30m`, `7d`, `1-00:00:00`, `02:30:00`.

use aviflow_core::time::Span;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A duration as documents write it. Whole milliseconds inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Duration(pub Span);

/// Why a text is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// A number without a unit, which systems read differently.
    #[error("`{0}` has no unit; write `{0}s`, `{0}m` or `{0}h`")]
    NoUnit(String),
    /// Anything else.
    #[error("`{0}` is not a duration; write for example `90s`, `15m`, `24h`, `7d` or `1-00:00:00`")]
    Malformed(String),
    /// Greater than ten years.
    #[error("`{0}` is longer than ten years")]
    TooLong(String),
}

const LIMIT_MS: i64 = 10 * 366 * 86_400_000;

impl FromStr for Duration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Duration, DurationError> {
        let malformed = || DurationError::Malformed(text.to_owned());
        let t = text.trim();
        if t.is_empty() {
            return Err(malformed());
        }
        if t.bytes().all(|b| b.is_ascii_digit()) {
            return Err(DurationError::NoUnit(t.to_owned()));
        }
        let ms = if t.contains(':') { clock(t) } else { units(t) }.ok_or_else(malformed)?;
        if ms > LIMIT_MS {
            return Err(DurationError::TooLong(t.to_owned()));
        }
        Ok(Duration(Span(ms)))
    }
}

/// `[D-]HH:MM:SS`, as Slurm's users write it.
fn clock(t: &str) -> Option<i64> {
    let (days, rest) = match t.split_once('-') {
        Some((d, rest)) => (number(d)?, rest),
        None => (0, t),
    };
    let mut parts = rest.split(':');
    let (h, m, s) = (number(parts.next()?)?, number(parts.next()?)?, number(parts.next()?)?);
    if parts.next().is_some() || m > 59 || s > 59 {
        return None;
    }
    days.checked_mul(86_400)?.checked_add(h.checked_mul(3600)? + m * 60 + s)?.checked_mul(1000)
}

/// Numbers each with a unit, from the largest unit to the smallest.
fn units(t: &str) -> Option<i64> {
    let mut total: i64 = 0;
    let mut last = i64::MAX;
    let mut rest = t;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (n, tail) = rest.split_at(digits);
        let letters = tail.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, tail) = tail.split_at(letters);
        let ms = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 604_800_000,
            _ => return None,
        };
        if ms >= last {
            return None;
        }
        last = ms;
        total = total.checked_add(number(n)?.checked_mul(ms)?)?;
        rest = tail;
    }
    Some(total)
}

fn number(t: &str) -> Option<i64> {
    if t.is_empty() || t.len() > 12 || !t.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    t.parse().ok()
}

/// The shortest exact form: `24h`, `1h30m`, `90s` becomes `1m30s`.
impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ms = self.0.0;
        if ms == 0 {
            return f.write_str("0s");
        }
        for (size, unit) in [(3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")] {
            if ms >= size {
                write!(f, "{}{unit}", ms / size)?;
                ms %= size;
            }
        }
        Ok(())
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Duration {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A duration with a unit, such as 90s, 15m, 24h, 7d or 1-00:00:00. A bare number is refused.",
            "pattern": "^\\s*(([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?|([0-9]+-)?[0-9]+:[0-5]?[0-9]:[0-5]?[0-9])\\s*$",
            "minLength": 1,
            "examples": ["15m", "24h"]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_exactly() {
        let cases = [
            ("90s", 90_000),
            ("15m", 900_000),
            ("1h30m", 5_400_000),
            ("24h", 86_400_000),
            ("7d", 604_800_000),
            ("1-00:00:00", 86_400_000),
            ("02:30:05", 9_005_000),
            ("250ms", 250),
        ];
        for (text, ms) in cases {
            assert_eq!(text.parse(), Ok(Duration(Span(ms))), "{text}");
        }
    }

    #[test]
    fn what_could_be_misread_is_refused() {
        assert_eq!("60".parse::<Duration>(), Err(DurationError::NoUnit("60".into())));
        for text in ["", "h", "1x", "1m1h", "1m1m", "-5m", "1.5h", "25:61:00", "1:2", "9999999999999h", "5 m"] {
            assert!(matches!(text.parse::<Duration>(), Err(DurationError::Malformed(_))), "{text}");
        }
        assert!(matches!("999999d".parse::<Duration>(), Err(DurationError::TooLong(_))));
    }

    #[test]
    fn a_duration_reads_back_what_it_writes() {
        for ms in [0, 1, 999, 1000, 61_000, 5_400_000, 90_061_001] {
            let d = Duration(Span(ms));
            assert_eq!(d.to_string().parse(), Ok(d));
        }
    }
}
