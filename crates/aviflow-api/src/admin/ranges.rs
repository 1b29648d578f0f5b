//! Names of nodes as people write them: `node-[1-8]`, `node-[01-16,20]`, `r[1-2]n[1-4]`, `a,b-[1-2]`.

use crate::diagnostic::DiagnosticCode;
use crate::file::shape::Fault;
use std::collections::BTreeMap;

/// Most names that one text may stand for.
pub const MAX_NAMES: usize = 100_000;

/// The names that a text stands for, in its order.
///
/// # Errors
/// What is wrong with it, and where.
pub fn expand(text: &str) -> Result<Vec<String>, Fault> {
    let mut names = Vec::new();
    for (at, part) in parts(text) {
        let found = expand_one(part).map_err(|fault| Fault {
            range: Some(fault.range.map_or(at..at + part.len(), |r| r.start + at..r.end + at)),
            ..fault
        })?;
        if names.len() + found.len() > MAX_NAMES {
            return Err(too_many());
        }
        names.extend(found);
    }
    Ok(names)
}

/// The parts between commas that are in no brackets, each with where it begins.
fn parts(text: &str) -> Vec<(usize, &str)> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            ',' if !inside => {
                parts.push((start, text.get(start..at).unwrap_or_default()));
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push((start, text.get(start..).unwrap_or_default()));
    parts
}

fn too_many() -> Fault {
    Fault::new(format!("more than {MAX_NAMES} nodes"), "write fewer").code(DiagnosticCode::OutOfRange)
}

fn bad(message: impl Into<String>) -> Fault {
    Fault::new(message, "write for example `node-[1-8]` or `node-[01-16,20]`")
}

fn expand_one(text: &str) -> Result<Vec<String>, Fault> {
    let mut names = vec![String::new()];
    let mut rest = text;
    while let Some(open) = rest.find('[') {
        let at = text.len() - rest.len() + open;
        let (head, tail) = (rest.get(..open).unwrap_or_default(), rest.get(open + 1..).unwrap_or_default());
        let Some(close) = tail.find(']') else {
            return Err(Fault { range: Some(at..text.len()), ..bad("a `[` that is not closed") });
        };
        let numbers = numbers(tail.get(..close).unwrap_or_default())
            .map_err(|fault| Fault { range: Some(at..at + close + 2), ..fault })?;
        if names.len().saturating_mul(numbers.len()) > MAX_NAMES {
            return Err(too_many());
        }
        names =
            names.iter().flat_map(|name| numbers.iter().map(move |number| format!("{name}{head}{number}"))).collect();
        rest = tail.get(close + 1..).unwrap_or_default();
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    match names.iter().find(|name| !is_name(name)) {
        Some(name) if name.is_empty() => Err(bad("an empty name")),
        Some(name) => Err(bad(format!("`{name}` is no name of a node"))),
        None => Ok(names),
    }
}

/// Letters, digits, `-`, `_` and `.`, as hosts and Kubernetes have them.
fn is_name(name: &str) -> bool {
    let ends = |c: char| c.is_ascii_alphanumeric();
    name.len() <= 253
        && name.starts_with(ends)
        && name.ends_with(ends)
        && name.chars().all(|c| ends(c) || matches!(c, '-' | '_' | '.'))
}

/// `1-8,10` as its numbers; those of `01-16` keep their width.
fn numbers(text: &str) -> Result<Vec<String>, Fault> {
    let mut numbers = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Some(from), Some(to)) = (number(first), number(last)) else {
            return Err(bad(format!("`{part}` is no range of numbers")));
        };
        if from > to {
            let fault = bad(format!("the range `{part}` begins behind its end"));
            return Err(Fault { help: format!("write `{last}-{first}`"), ..fault });
        }
        if to - from >= MAX_NAMES as u64 || numbers.len() >= MAX_NAMES {
            return Err(too_many());
        }
        let width = width(first);
        numbers.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(numbers)
}

fn number(digits: &str) -> Option<u64> {
    let plain = (1..=18).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| digits.parse().ok())?
}

/// How wide numbers of a range are that begins with these digits; 0 for as wide as they are.
fn width(digits: &str) -> usize {
    if digits.len() > 1 && digits.starts_with('0') { digits.len() } else { 0 }
}

/// The shortest texts that stand for these names, in the order of the names.
#[must_use]
pub fn compress<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    // By what is around the last digits.
    let mut groups: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    let mut texts = Vec::new();
    for name in names {
        match last_digits(name) {
            Some((head, digits, tail)) => groups.entry((head, tail)).or_default().push(digits),
            None => texts.push(name.to_owned()),
        }
    }
    for ((head, tail), mut digits) in groups {
        digits.sort_unstable_by_key(|d| (number(d), d.len()));
        digits.dedup();
        let ranges = runs(&digits);
        match ranges.as_slice() {
            [one] if !one.contains('-') => texts.push(format!("{head}{one}{tail}")),
            _ => texts.push(format!("{head}[{}]{tail}", ranges.join(","))),
        }
    }
    texts.sort_unstable();
    texts.dedup();
    texts
}

/// What is before the last digits of a name, they, and what is behind them.
fn last_digits(name: &str) -> Option<(&str, &str, &str)> {
    let last = name.rfind(|c: char| c.is_ascii_digit())?;
    let (before, tail) = name.split_at(last + 1);
    let head = before.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = before.get(head.len()..)?;
    number(digits).map(|_| (head, digits, tail))
}

/// Digits in their order as ranges that stand for just these.
fn runs(digits: &[&str]) -> Vec<String> {
    let mut runs: Vec<(&str, &str)> = Vec::new();
    for digits in digits {
        if let Some((first, last)) = runs.last_mut()
            && let Some(next) = number(last).map(|n| n + 1)
            && format!("{next:0width$}", width = width(first)) == **digits
        {
            *last = digits;
            continue;
        }
        runs.push((digits, digits));
    }
    let text = |(first, last): (&str, &str)| if first == last { first.to_owned() } else { format!("{first}-{last}") };
    runs.into_iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_stand_for_their_names() {
        for (text, names) in [
            ("node-1", "node-1"),
            ("node-[1-3]", "node-1 node-2 node-3"),
            ("node-[08-11,20]", "node-08 node-09 node-10 node-11 node-20"),
            ("r[1-2]n[1-2].x", "r1n1.x r1n2.x r2n1.x r2n2.x"),
            ("a,b-[1-2],c", "a b-1 b-2 c"),
            ("n[9-11]", "n9 n10 n11"),
        ] {
            assert_eq!(expand(text).map(|n| n.join(" ")), Ok(names.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_range_that_is_none_is_told_where() {
        for (text, at, said) in [
            ("a,n-[1-8", 4..8, "not closed"),
            ("n-[8-1]", 2..7, "behind its end"),
            ("n-[a-b]", 2..7, "no range"),
            ("n-[]", 2..4, "no range"),
            ("a,,b", 2..2, "empty"),
            ("-[1-2]", 0..6, "no name"),
            ("a b", 0..3, "no name"),
            ("n-[1-2]]", 0..8, "no name"),
        ] {
            let fault = expand(text).expect_err(text);
            assert!(fault.message.contains(said), "{text}: {}", fault.message);
            assert_eq!(fault.range, Some(at), "{text}");
        }
        assert_eq!(expand("n[1-99999999]").map_err(|f| f.code), Err(DiagnosticCode::OutOfRange));
        assert!(expand("n[1-1000][1-1000]").is_err() && expand("n[1-60000],m[1-60000]").is_err());
    }

    #[test]
    fn names_are_written_shortly() {
        let names = expand("node-[1-12,14],gpu-[08-11],login,x7y,x8y").expect("names");
        let short = compress(names.iter().map(String::as_str));
        assert_eq!(short, ["gpu-[08-11]", "login", "node-[1-12,14]", "x[7-8]y"]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_shortened_is_expanded_again(
            names in proptest::collection::btree_set("[a-c](-?[0-9]{1,3})?(\\.x)?", 0..40)
        ) {
            let short = compress(names.iter().map(String::as_str));
            let mut again: Vec<String> = short.iter().flat_map(|text| expand(text).expect("a range")).collect();
            again.sort();
            prop_assert_eq!(again, names.into_iter().collect::<Vec<_>>());
        }
    }
}
