//! Times, spans and amounts, as people say them.

use aviflow_core::time::Span;

/// How long ago, such as `3m ago`; `now` under a second.
pub fn ago(at: i64, now: i64) -> String {
    let span = (now - at).max(0);
    if span < 1000 { "now".to_owned() } else { format!("{} ago", short(span)) }
}

/// The largest unit alone, such as `3m`.
pub fn short(ms: i64) -> String {
    let s = ms / 1000;
    match s {
        _ if ms < 1000 => format!("{}ms", ms.max(0)),
        0..60 => format!("{s}s"),
        60..3_600 => format!("{}m", s / 60),
        3_600..172_800 => format!("{}h", s / 3_600),
        _ => format!("{}d", s / 86_400),
    }
}

/// The two largest units, such as `3m 20s`.
pub fn span(ms: i64) -> String {
    Span(ms.max(0)).to_string()
}

/// GPU time: below an hour in minutes and seconds, else in hours with one decimal.
pub fn gpu_time(ms: i64) -> String {
    if ms < 3_600_000 { span(ms) } else { format!("{}h", grouped_decimal(ms, 3_600_000)) }
}

/// `numerator / unit` with one decimal, thousands apart.
fn grouped_decimal(value: i64, unit: i64) -> String {
    let tenths = (i128::from(value) * 10 + i128::from(unit) / 2) / i128::from(unit);
    format!("{}.{}", grouped(i64::try_from(tenths / 10).unwrap_or(i64::MAX)), tenths % 10)
}

/// A whole number with its thousands apart: `12,345`.
pub fn grouped(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    if value < 0 { format!("-{out}") } else { out }
}

/// `1 file`, `3 files`.
pub fn count(n: u64, one: &str) -> String {
    format!("{} {one}{}", grouped(i64::try_from(n).unwrap_or(i64::MAX)), if n == 1 { "" } else { "s" })
}

/// A share in percent with one decimal; `-` of nothing.
pub fn percent(part: i64, whole: i64) -> String {
    if whole <= 0 {
        return "-".to_owned();
    }
    let tenths = (i128::from(part) * 1000 + i128::from(whole) / 2) / i128::from(whole);
    format!("{}.{}%", tenths / 10, tenths % 10)
}

/// Bytes: `999 B`, `1.2 MB`. Units of 1000, as disks and `--max-snapshot` count.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if count < 1000 {
        return format!("{count} B");
    }
    let mut unit = 0;
    let mut value = u128::from(count) * 10 / 1000;
    while value >= 10_000 && unit + 1 < UNITS.len() {
        value /= 1000;
        unit += 1;
    }
    format!("{}.{} {}", value / 10, value % 10, UNITS[unit])
}

/// An amount of bytes as a person types it: `300MB`, `1.5 GB`, `200MiB`, `1000`.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let scale: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "ki" | "kib" => 1024.0,
        "mi" | "mib" => 1_048_576.0,
        "gi" | "gib" => 1_073_741_824.0,
        _ => return None,
    };
    let value = number.parse::<f64>().ok()? * scale;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be in range")]
    (0.0..1e18).contains(&value).then_some(value as u64)
}

/// A measured value, short: four significant digits, `1.2k`, `3.4M`.
pub fn value(v: f64) -> String {
    let size = v.abs();
    match size {
        _ if size >= 1e9 => format!("{:.1}G", v / 1e9),
        _ if size >= 1e6 => format!("{:.1}M", v / 1e6),
        _ if size >= 1e4 => format!("{:.1}k", v / 1e3),
        _ if size >= 100.0 => trim(format!("{v:.1}")),
        _ if size >= 0.001 || size == 0.0 => trim(format!("{v:.4}")),
        _ => format!("{v:.2e}"),
    }
}

fn trim(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// An instant as `2026-03-01 12:00:05`, UTC.
pub fn instant(ms: i64) -> String {
    let (days, second) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000) / 1000);
    let (y, m, d) = civil(days);
    format!("{y:04}-{m:02}-{d:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// The time of day with milliseconds, UTC: `12:00:05.123`.
pub fn clock(ms: i64) -> String {
    let rest = ms.rem_euclid(86_400_000);
    format!("{}.{:03}", &instant(ms)[11..], rest % 1000)
}

/// The civil date of a day since 1970 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (d, m) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    (yoe + era * 400 + i64::from(m <= 2), m, d)
}

/// The day since 1970 of a civil date; `None` where there is no such date.
fn day(y: i64, m: i64, d: i64) -> Option<i64> {
    let (yy, mm) = (y - i64::from(m <= 2), if m > 2 { m - 3 } else { m + 9 });
    let era = yy.div_euclid(400);
    let yoe = yy.rem_euclid(400);
    let doy = (153 * mm + 2) / 5 + d - 1;
    let days = era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468;
    (civil(days) == (y, m, d)).then_some(days)
}

/// An instant as a person types it: a date, a date and time (UTC), or milliseconds since 1970.
pub fn parse_instant(text: &str) -> Option<i64> {
    if text.len() > 8 && text.bytes().all(|b| b.is_ascii_digit()) {
        return text.parse().ok();
    }
    let text = text.trim_end_matches('Z');
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "0:0"));
    let numbers = |text: &str, by: char| -> Option<Vec<i64>> {
        text.split(by).map(|n| n.parse::<u32>().ok().map(i64::from)).collect()
    };
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([y, m, d], [h, min, rest @ ..]) = (date.as_slice(), time.as_slice()) else { return None };
    let s = match rest {
        [] => 0,
        [s] => *s,
        _ => return None,
    };
    let fine = *h < 24 && *min < 60 && s < 60;
    fine.then(|| day(*y, *m, *d)).flatten().map(|days| days * 86_400_000 + (h * 3600 + min * 60 + s) * 1000)
}

/// An instant that is to come, as a person types it: `+2h` from now, `22:00` (the next, UTC), or
/// with its date as [`parse_instant`] reads it, where an offset from UTC such as `+02:00` may follow.
pub fn parse_moment(text: &str, now: i64) -> Option<i64> {
    const DAY: i64 = 86_400_000;
    let text = text.trim();
    if let Some(span) = text.strip_prefix('+') {
        let span: aviflow_api::duration::Duration = span.parse().ok()?;
        return Some(now + span.0.0);
    }
    let today = now - now.rem_euclid(DAY);
    let of_day = |clock: &str| parse_instant(&format!("{}T{clock}", instant(today).get(..10)?));
    if matches!(text.find(':'), Some(1 | 2)) {
        return of_day(text).map(|at| if at < now { at + DAY } else { at });
    }
    let offset = text.get(11..).and_then(|time| time.rfind(['+', '-'])).map(|i| i + 11);
    let Some((at, offset)) = offset.map(|i| text.split_at(i)) else { return parse_instant(text) };
    let (sign, clock) = offset.split_at(1);
    let ahead = of_day(clock)? - today;
    parse_instant(at).map(|at| if sign == "+" { at - ahead } else { at + ahead })
}

/// An instant to the minute, without its date where it is within a day: `22:00 UTC`.
pub fn moment(at: i64, now: i64) -> String {
    let text = instant(at);
    let shown = if (at - now).abs() < 86_400_000 { 11..16 } else { 0..16 };
    format!("{} UTC", text.get(shown).unwrap_or(&text))
}

/// How long until then, to the minute, such as `in 1h 30m`; `now` when it is there.
pub fn until(at: i64, now: i64) -> String {
    let span = at - now;
    match span {
        ..1000 => "now".to_owned(),
        1000..60_000 => format!("in {}", short(span)),
        // To the minute: a window in 1h 59m 59s begins in 2h.
        _ => format!("in {}", self::span((span + 30_000) / 60_000 * 60_000)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_read_as_people_say_them() {
        assert_eq!([999, 1_000, 1_234_567, 100_000_000].map(bytes), ["999 B", "1.0 kB", "1.2 MB", "100.0 MB"]);
        assert_eq!([0, 1_234, -1_234_567].map(grouped), ["0", "1,234", "-1,234,567"]);
        assert_eq!([125_000, 3_600_000, 5_400_000_000].map(gpu_time), ["2m 5s", "1.0h", "1,500.0h"]);
        assert_eq!(
            [2.0, 2.13456, 0.0003, 128.25, 12_345.0, 4.2e6].map(value),
            ["2", "2.1346", "3.00e-4", "128.2", "12.3k", "4.2M"]
        );
        assert_eq!((percent(1, 3), percent(0, 0)), ("33.3%".into(), "-".into()));
        assert_eq!([0, 59_000, 200_000, 7_200_000, 864_000_000].map(short), ["0ms", "59s", "3m", "2h", "10d"]);
    }

    #[test]
    fn amounts_are_read_as_people_type_them() {
        let cases = [
            ("300MB", Some(300_000_000)),
            ("1.5 GB", Some(1_500_000_000)),
            ("1KiB", Some(1024)),
            ("7", Some(7)),
            ("x", None),
            ("5 miles", None),
        ];
        for (text, amount) in cases {
            assert_eq!(parse_bytes(text), amount, "{text}");
        }
    }

    #[test]
    fn instants_are_read_and_written() {
        let cases = [
            ("1970-01-01", 0),
            ("2026-03-01", 1_772_323_200_000),
            ("2024-02-29T23:59:59Z", 1_709_251_199_000),
            ("2026-03-01 12:30", 1_772_368_200_000),
        ];
        for (text, ms) in cases {
            assert_eq!(parse_instant(text), Some(ms), "{text}");
        }
        for wrong in ["2026-02-30", "2026-13-01", "yesterday", "2026-03-01T25:00", "2026-03"] {
            assert_eq!(parse_instant(wrong), None, "{wrong}");
        }
        assert_eq!(instant(1_709_251_199_000), "2024-02-29 23:59:59");
        assert_eq!(clock(1_709_251_199_042), "23:59:59.042");
    }

    #[test]
    fn moments_are_read_and_written() {
        let now = 1_772_366_400_000; // 2026-03-01 12:00 UTC
        let hour = 3_600_000;
        let cases = [
            ("+2h", now + 2 * hour),
            ("22:00", now + 10 * hour),
            ("9:30", now + 21 * hour + hour / 2),
            ("12:00", now),
            ("2026-03-01T22:00", now + 10 * hour),
            ("2026-03-01T22:00:00Z", now + 10 * hour),
            ("2026-03-01T22:00+02:00", now + 8 * hour),
            ("2026-03-01T22:00:00-05:30", now + 15 * hour + hour / 2),
            ("2026-03-02", now + 12 * hour),
        ];
        for (text, at) in cases {
            assert_eq!(parse_moment(text, now), Some(at), "{text}");
        }
        for wrong in ["25:00", "+2", "soon", "tomorrow 22:00", "2026-03-01T22:00+99:00", "", "ü:00"] {
            assert_eq!(parse_moment(wrong, now), None, "{wrong}");
        }
        assert_eq!([now + hour, now + 48 * hour].map(|at| moment(at, now)), ["13:00 UTC", "2026-03-03 12:00 UTC"]);
        assert_eq!([0, 9_000, 60_000, 2 * hour - 9].map(|t| until(now + t, now)), ["now", "in 9s", "in 1m", "in 2h"]);
    }
}
