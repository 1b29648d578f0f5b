//! Finding names and numbers in a line. Pure; each call looks at a line once.

/// What follows a name and its punctuation, if the name stands as a word of its own and a number follows.
///
/// The line is in lower case. A `loss` after `val`, `eval` and the like is another name's.
#[must_use]
pub fn after<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = line[from..].find(name) {
        let start = from + at;
        let end = start + name.len();
        let before = &line[..start];
        let apart = !before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '/' | '-'));
        let other =
            name == "loss" && before.strip_suffix(' ').is_some_and(|before| HELD_OUT.contains(&last_word(before)));
        let rest = line[end..].trim_start_matches(['\'', '"']);
        let value = rest.trim_start_matches([' ', ':', '=', '[', '(']);
        if apart && !other && value.len() < rest.len() {
            let value = value.trim_start_matches(['\'', '"']);
            if value.starts_with(|c: char| c.is_ascii_digit() || "-+.ni".contains(c)) {
                return Some(value);
            }
        }
        from = end;
    }
    None
}

/// Words for data that is held out.
pub const HELD_OUT: [&str; 13] = [
    "val",
    "valid",
    "validate",
    "validation",
    "validating",
    "eval",
    "evaluate",
    "evaluation",
    "evaluating",
    "test",
    "testing",
    "dev",
    "heldout",
];

fn last_word(text: &str) -> &str {
    let start = text.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |at| at + 1);
    // What is no ASCII may be longer than a byte.
    text.get(start..).unwrap_or_default()
}

/// The number that follows a name.
#[must_use]
pub fn value(line: &str, name: &str) -> Option<f64> {
    after(line, name).and_then(number)
}

/// The whole number that follows a name, and the one after a `/` or `of`.
#[must_use]
pub fn count(line: &str, name: &str) -> Option<(u64, Option<u64>)> {
    let (n, rest) = leading(after(line, name)?)?;
    let rest = rest.trim_start();
    let total = rest.strip_prefix('/').or_else(|| rest.strip_prefix("of "));
    Some((n, total.and_then(|rest| leading(rest.trim_start())).map(|(total, _)| total)))
}

/// A whole number with or without thousands at the start of a text, and what follows; a comma at its end is
/// punctuation. One with a fraction is no step.
fn leading(text: &str) -> Option<(u64, &str)> {
    let end = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b',').count();
    let digits = text[..end].trim_end_matches(',');
    let n = if digits.contains(',') { digits.replace(',', "").parse() } else { digits.parse() };
    let rest = &text[end..];
    let fraction =
        rest.strip_prefix('.').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit() && c != '0'));
    n.ok().filter(|_| !fraction).map(|n| (n, rest))
}

/// The number at the start of a text, in any usual spelling; a percentage becomes a fraction.
#[must_use]
pub fn number(text: &str) -> Option<f64> {
    for (spelling, value) in [("nan", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)] {
        if text.get(..spelling.len()).is_some_and(|start| start.eq_ignore_ascii_case(spelling)) {
            return Some(value);
        }
    }
    let bytes = text.as_bytes();
    let mut end = 0;
    while let Some(&b) = bytes.get(end) {
        let next_is_digit = bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        match b {
            b'0'..=b'9' => {}
            b'.' | b',' if next_is_digit => {}
            b'-' | b'+' if end == 0 || matches!(bytes[end - 1], b'e' | b'E') => {}
            b'e' | b'E' if end > 0 && (next_is_digit || matches!(bytes.get(end + 1), Some(b'-' | b'+'))) => {}
            _ => break,
        }
        end += 1;
    }
    let mut digits = text[..end].replace(',', "");
    if text[end..].starts_with('%') {
        // Exact, as a division by 100 would not be.
        digits.push_str("e-2");
    }
    digits.parse().ok().filter(|n: &f64| n.is_finite())
}

/// Whether a text holds a word in lower case, whatever its own case; `word` begins with a letter.
#[must_use]
pub fn holds(text: &[u8], word: &[u8]) -> bool {
    let Some((&first, rest)) = word.split_first() else { return true };
    let mut at = 0;
    while let Some(found) = text[at..].iter().position(|b| *b | 0x20 == first) {
        at += found + 1;
        if text.get(at..at + rest.len()).is_some_and(|end| end.eq_ignore_ascii_case(rest)) {
            return true;
        }
    }
    false
}
