//! What looks like a key or password in a text, and the same text with it masked.
//!
//! Used on documents, and on every log line that is shown. The mask has as many bytes as what
//! it hides, so places in a text stay right. It finds what announces itself (a known prefix, a
//! key block, a password in a URL) and guesses nothing: a random word is never masked.

use std::borrow::Cow;
use std::ops::Range;

/// Something that looks like a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it looks like, such as `a Hugging Face token`.
    pub kind: &'static str,
    /// The bytes of the whole secret.
    pub range: Range<usize>,
    /// How many of its first bytes may be shown, so that a person recognises it.
    pub shown: usize,
}

struct Prefix {
    prefix: &'static str,
    kind: &'static str,
    /// Characters after the prefix, at least.
    least: usize,
    chars: fn(u8) -> bool,
}

const fn prefix(prefix: &'static str, kind: &'static str, least: usize, chars: fn(u8) -> bool) -> Prefix {
    Prefix { prefix, kind, least, chars }
}

fn alnum(b: u8) -> bool {
    b.is_ascii_alphanumeric()
}

fn upper(b: u8) -> bool {
    b.is_ascii_uppercase() || b.is_ascii_digit()
}

fn word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'-'
}

const PREFIXES: &[Prefix] = &[
    prefix("hf_", "a Hugging Face token", 20, alnum),
    prefix("sk-", "an API key", 20, word),
    prefix("AKIA", "an AWS access key", 16, upper),
    prefix("ASIA", "an AWS access key", 16, upper),
    prefix("ghp_", "a GitHub token", 30, alnum),
    prefix("gho_", "a GitHub token", 30, alnum),
    prefix("ghu_", "a GitHub token", 30, alnum),
    prefix("ghs_", "a GitHub token", 30, alnum),
    prefix("ghr_", "a GitHub token", 30, alnum),
    prefix("github_pat_", "a GitHub token", 20, word),
    prefix("glpat-", "a GitLab token", 20, word),
    prefix("xoxb-", "a Slack token", 20, word),
    prefix("xoxp-", "a Slack token", 20, word),
    prefix("AIza", "a Google API key", 35, word),
    prefix("nvapi-", "an NVIDIA API key", 20, word),
    prefix("wandb_v1_", "a Weights & Biases key", 20, word),
    prefix("pypi-", "a PyPI token", 40, word),
];

/// Everything in `text` that looks like a secret, in the order of the text, without overlaps.
#[must_use]
pub fn find(text: &str) -> Vec<Found> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match secret_at(bytes, at) {
            Some(secret) => {
                at = secret.range.end.max(at + 1);
                found.push(secret);
            }
            None => at += 1,
        }
    }
    found
}

fn secret_at(bytes: &[u8], at: usize) -> Option<Found> {
    let rest = bytes.get(at..)?;
    match rest.first()? {
        b'-' => private_key(bytes, at),
        b':' => password(bytes, at),
        first if first.is_ascii_alphabetic() => {
            // In the middle of a word a prefix is chance.
            let before = at.checked_sub(1).and_then(|i| bytes.get(i));
            if before.is_some_and(|b| alnum(*b) || *b == b'_') {
                return None;
            }
            PREFIXES.iter().find_map(|p| prefixed(rest, at, p)).or_else(|| jwt(rest, at)).or_else(|| assigned(rest, at))
        }
        _ => None,
    }
}

fn prefixed(rest: &[u8], at: usize, p: &Prefix) -> Option<Found> {
    let tail = rest.strip_prefix(p.prefix.as_bytes())?;
    let length = run(tail, p.chars);
    // A fixed alphabet followed by more letters is another word.
    let ends = tail.get(length).is_none_or(|b| !alnum(*b));
    // Names of experiments have dashes too; a key made of dashes and letters alone does not exist.
    let dashed = tail.get(..length)?.contains(&b'-');
    let random = !dashed || tail.get(..length)?.iter().any(u8::is_ascii_digit);
    (length >= p.least && ends && random).then(|| Found {
        kind: p.kind,
        range: at..at + p.prefix.len() + length,
        shown: p.prefix.len(),
    })
}

/// Three base64url parts, the first of which is a JSON object.
fn jwt(rest: &[u8], at: usize) -> Option<Found> {
    if !rest.starts_with(b"eyJ") {
        return None;
    }
    let mut end = run(rest, word);
    for least in [10, 10] {
        if rest.get(end) != Some(&b'.') {
            return None;
        }
        let part = run(rest.get(end + 1..)?, word);
        if part < least {
            return None;
        }
        end += 1 + part;
    }
    Some(Found { kind: "a signed token (JWT)", range: at..at + end, shown: 3 })
}

/// A PEM block, from its first line to its last, or to the end where that is missing.
fn private_key(bytes: &[u8], at: usize) -> Option<Found> {
    const OPEN: &[u8] = b"-----BEGIN ";
    const MARK: &[u8] = b"PRIVATE KEY-----";
    let rest = bytes.get(at..)?;
    if !rest.starts_with(OPEN) {
        return None;
    }
    let header = position(rest.get(..rest.len().min(80))?, MARK)? + MARK.len();
    let body = rest.get(header..)?;
    let end = position(body, b"-----END ").unwrap_or(body.len());
    Some(Found { kind: "a private key", range: at..at + header + end, shown: header })
}

/// `scheme://user:password@host`; `at` is the colon before `//`.
fn password(bytes: &[u8], at: usize) -> Option<Found> {
    let authority = bytes.get(at..)?.strip_prefix(b"://")?;
    let length = authority.iter().position(|b| b.is_ascii_whitespace() || matches!(b, b'/' | b'?' | b'"' | b'\''));
    let authority = authority.get(..length.unwrap_or(authority.len()))?;
    let host = authority.iter().rposition(|b| *b == b'@')?;
    let colon = authority.get(..host)?.iter().position(|b| *b == b':')?;
    let secret = authority.get(colon + 1..host)?;
    // A variable is a reference, which is what one should write.
    if secret.is_empty() || secret.starts_with(b"$") || secret.iter().all(|b| *b == b'*') {
        return None;
    }
    let start = at + 3 + colon + 1;
    Some(Found { kind: "a password in an address", range: start..at + 3 + host, shown: 0 })
}

/// `WANDB_API_KEY=…` or `WANDB_API_KEY: …`: the name says it. Short values, variables and
/// references (`secret/key`) are none.
fn assigned(rest: &[u8], at: usize) -> Option<Found> {
    let length = run(rest, |b| upper(b) || b == b'_');
    let name = std::str::from_utf8(rest.get(..length)?).ok()?;
    if !named_secret(name) {
        return None;
    }
    let quote = |b: &u8| matches!(b, b'"' | b'\'');
    let mut from = length + usize::from(rest.get(length).is_some_and(quote));
    match rest.get(from..)? {
        [b'=', ..] => from += 1,
        [b':', b' ', ..] => from += 2,
        _ => return None,
    }
    from += run(rest.get(from..)?, |b| matches!(b, b' ' | b'"' | b'\''));
    let value = rest.get(from..)?;
    let value = value
        .get(..run(value, |b| !b.is_ascii_whitespace() && !matches!(b, b'"' | b'\'' | b',' | b'}' | b']' | b';')))?;
    let lower = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.');
    let reference = value.iter().position(|b| *b == b'/').is_some_and(|i| value.iter().take(i).all(lower));
    let hidden = value.iter().all(|b| *b == b'*') || value.starts_with(b"$") || value.starts_with(b"&");
    (value.len() >= 8 && !reference && !hidden).then(|| Found {
        kind: "the value of a variable that is named as a secret",
        range: at + from..at + from + value.len(),
        shown: 0,
    })
}

fn run(bytes: &[u8], of: fn(u8) -> bool) -> usize {
    bytes.iter().take_while(|b| of(**b)).count()
}

fn position(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|w| w == needle)
}

/// The text with everything that looks like a secret replaced by as many `*`, but for a
/// known prefix and the line ends. Borrowed where there is nothing to hide.
#[must_use]
pub fn mask(text: &str) -> Cow<'_, str> {
    let found = find(text);
    if found.is_empty() {
        return Cow::Borrowed(text);
    }
    let mut masked = String::with_capacity(text.len());
    let mut from = 0;
    for secret in found {
        let hidden = secret.range.start + secret.shown..secret.range.end;
        masked.push_str(text.get(from..hidden.start).unwrap_or_default());
        for c in text.get(hidden.clone()).unwrap_or_default().chars() {
            if matches!(c, '\n' | '\r') {
                masked.push(c);
            } else {
                masked.extend(std::iter::repeat_n('*', c.len_utf8()));
            }
        }
        from = hidden.end;
    }
    masked.push_str(text.get(from..).unwrap_or_default());
    Cow::Owned(masked)
}

/// Whether a variable's name says that its value is a secret, such as `WANDB_API_KEY`.
#[must_use]
pub fn named_secret(variable: &str) -> bool {
    let name = variable.to_ascii_uppercase();
    let last = name.rsplit('_').next().unwrap_or_default();
    name.ends_with("API_KEY")
        || name.ends_with("SECRET_KEY")
        || name.ends_with("ACCESS_KEY")
        || name.ends_with("PRIVATE_KEY")
        || matches!(last, "TOKEN" | "PASSWORD" | "PASSWD" | "SECRET")
}

#[cfg(test)]
mod tests {
    use super::*;

    // Keys are put together here so that no scanner takes the test for a leak.
    fn key(prefix: &str, n: usize) -> String {
        format!("{prefix}{}", "Ab1".repeat(n).chars().take(n).collect::<String>())
    }

    #[test]
    fn keys_are_masked_and_lengths_are_kept() {
        for (prefix, n) in [("hf_", 34), ("sk-", 48), ("ghp_", 36), ("glpat-", 20), ("github_pat_", 40), ("AIza", 35)] {
            let line = format!("token={} done", key(prefix, n));
            let masked = mask(&line);
            assert_eq!(masked, format!("token={prefix}{} done", "*".repeat(n)));
            assert_eq!(masked.len(), line.len());
        }
        let aws = format!("AKIA{}", "Q7".repeat(8));
        assert_eq!(mask(&aws), format!("AKIA{}", "*".repeat(16)));
        let jwt = format!("eyJ{}.{}.{}", "a".repeat(20), "b".repeat(20), "c".repeat(20));
        assert_eq!(find(&jwt).len(), 1);
        assert_eq!(mask("{\"WANDB_API_KEY\": \"0123456789\", X: 1}"), "{\"WANDB_API_KEY\": \"**********\", X: 1}");
        assert_eq!(mask("export DB_PASSWORD=correct-horse x"), "export DB_PASSWORD=************* x");
        assert_eq!(mask("s3://me:geheim@host/x"), "s3://me:******@host/x");
    }

    #[test]
    fn a_key_block_is_masked_over_its_lines() {
        let block = ["-----BEGIN RSA PRIVATE", " KEY-----\nabc\ndéf\n-----END RSA PRIVATE KEY-----\nrest"].concat();
        let masked = mask(&block);
        assert_eq!(
            masked,
            ["-----BEGIN RSA PRIVATE", " KEY-----\n***\n****\n-----END RSA PRIVATE KEY-----\nrest"].concat()
        );
    }

    #[test]
    fn ordinary_words_stay() {
        for text in [
            "hf_transfer",
            "sk-learn",
            "task-hf_hub",
            "the-sk-something-else",
            "sk-a-quite-long-name-of-an-experiment",
            "https://host:8080/path@x",
            "postgres://user:$PASSWORD@host/db",
            "eyJ.a.b",
            "AKIAlowercase",
            "loss 3.1",
            "HF_TOKEN: hf-token/token",
            "API_KEY=$OTHER_VARIABLE",
            "MAX_TOKENS=8192000000",
            "TOKEN: ********",
        ] {
            assert!(matches!(mask(text), Cow::Borrowed(_)), "{text}");
        }
        assert!(named_secret("WANDB_API_KEY") && named_secret("HF_TOKEN") && !named_secret("TOKENIZERS_PARALLELISM"));
    }
}
