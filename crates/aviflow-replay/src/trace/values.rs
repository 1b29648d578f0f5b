//! What stands in a cell: numbers, instants, yes and no, with errors that say where and what instead.

use crate::error::{Error, Result};
use aviflow_core::time::{Span, Time};

/// Where a value stands.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub file: &'a str,
    pub line: u32,
    pub column: &'a str,
}

/// No job of a trace lasts longer, and no instant is later: about 3,000 years.
const MOST_SECONDS: f64 = 1e11;

impl Place<'_> {
    /// A value that is not what it should be.
    pub fn wrong(self, text: &str, expected: &str) -> Error {
        let what = match text {
            "" => format!("the column {} is empty", self.column),
            _ => format!("`{text}` in the column {} is not {expected}", self.column),
        };
        Error::Line {
            file: self.file.to_owned(),
            line: self.line,
            what,
            help: format!("write {expected} there, or take the line out"),
        }
    }

    /// A number of seconds, at least 0.
    pub fn seconds(self, text: &str) -> Result<f64> {
        let expected = "a number of seconds from 0";
        let number: f64 = text.parse().map_err(|_| self.wrong(text, expected))?;
        if (0.0..=MOST_SECONDS).contains(&number) { Ok(number) } else { Err(self.wrong(text, expected)) }
    }

    /// A span of so many seconds; what took no time took a millisecond.
    pub fn run(self, text: &str) -> Result<Span> {
        Ok(Span(millis(self.seconds(text)?).max(1)))
    }

    /// A whole number from 1, also as `8.0`.
    pub fn count(self, text: &str) -> Result<u32> {
        let expected = "a whole number from 1 to 1000000";
        let number: f64 = text.parse().map_err(|_| self.wrong(text, expected))?;
        if (1.0..=1e6).contains(&number) && number.fract() == 0.0 {
            Ok(number as u32)
        } else {
            Err(self.wrong(text, expected))
        }
    }

    /// A whole number.
    pub fn whole(self, text: &str) -> Result<i32> {
        text.parse().map_err(|_| self.wrong(text, "a whole number"))
    }

    /// `true` or `false`.
    pub fn yes_or_no(self, text: &str) -> Result<bool> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.wrong(text, "true or false")),
        }
    }

    /// Seconds since any beginning, or a date and time (UTC).
    pub fn instant(self, text: &str) -> Result<Time> {
        if let Ok(number) = text.parse::<f64>() {
            let fits = (0.0..=MOST_SECONDS).contains(&number);
            return if fits { Ok(Time(millis(number))) } else { Err(self.wrong(text, "an instant")) };
        }
        date_time(text).ok_or_else(|| self.wrong(text, "a number of seconds or a time such as 2026-03-01T12:00:00Z"))
    }
}

/// Seconds in milliseconds.
pub(super) fn millis(seconds: f64) -> i64 {
    (seconds * 1000.0).round() as i64
}

/// `2017-10-09 07:01:55`, also with `T`, `Z` and a part of a second.
fn date_time(text: &str) -> Option<Time> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once(['T', ' '])?;
    let mut date = date.split('-').map(|n| n.parse::<u32>().ok().map(i64::from));
    let (y, m, d) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.split(':');
    let whole = |t: Option<&str>| t?.parse::<u32>().ok().map(i64::from);
    let (h, min) = (whole(time.next())?, whole(time.next())?);
    let s: f64 = time.next().unwrap_or("0").parse().ok()?;
    if date.next().is_some() || time.next().is_some() || !(1..=12).contains(&m) || !(1..=31).contains(&d) {
        return None;
    }
    let fits = h < 24 && min < 60 && (0.0..61.0).contains(&s);
    fits.then(|| Time(((days(y, m, d) * 24 + h) * 60 + min) * 60_000 + millis(s)))
}

/// Days since 1970 of a civil date (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn days(y: i64, m: i64, d: i64) -> i64 {
    let y = if m <= 2 { y - 1 } else { y };
    let era = y.div_euclid(400);
    let year = y.rem_euclid(400);
    let day = (153 * (m + if m > 2 { -3 } else { 9 }) + 2) / 5 + d - 1;
    era * 146_097 + year * 365 + year / 4 - year / 100 + day - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let cases = [
            ("1970-01-01 00:00:00", Some(0)),
            ("2017-10-09 07:01:55", Some(1_507_532_515_000)),
            ("2024-02-29T23:59:59.5Z", Some(1_709_251_199_500)),
            ("2017-13-09 07:01:55", None),
            ("2017-10-09 27:01:55", None),
            ("2017-10-09", None),
            ("yesterday", None),
        ];
        for (text, ms) in cases {
            assert_eq!(date_time(text), ms.map(Time), "{text}");
        }
    }

    #[test]
    fn numbers_say_what_they_should_be() {
        let place = Place { file: "t.csv", line: 3, column: "nodes" };
        assert_eq!(place.count("8.0"), Ok(8));
        for wrong in ["0", "1.5", "-1", "x", "", "1e9", "NaN", "inf"] {
            assert!(place.count(wrong).is_err(), "{wrong}");
        }
        for wrong in ["-1", "x", "NaN", "inf", "1e12"] {
            assert!(place.seconds(wrong).is_err(), "{wrong}");
        }
        let error = place.count("x").expect_err("wrong").to_string();
        assert_eq!(error, "t.csv:3: `x` in the column nodes is not a whole number from 1 to 1000000");
        assert_eq!(place.run("0"), Ok(Span(1)));
    }
}
