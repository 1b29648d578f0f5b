//! Whether a lock is one: every package with one version and its hashes, and nothing that
//! could bring something else tomorrow.

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::source::{SourceId, Sources, Span};
use crate::yaml::MAX_BYTES;

const GENERATE: &str = "write the lock with `uv pip compile --generate-hashes requirements.in -o requirements.lock`";

/// What pip is told wherever a lock is installed, beside the lock: what that does not name with its hash is never
/// installed.
pub const PIP_INSTALL: [&str; 13] = [
    "install",
    "--require-hashes",
    "--only-binary",
    ":all:",
    "--no-input",
    "--progress-bar",
    "off",
    "--disable-pip-version-check",
    "--no-warn-script-location",
    "--retries",
    "2",
    "--no-color",
    "--no-user",
];

/// Everything in a lock that is not fixed. An empty lock is one: it installs nothing.
///
/// Understood is what `pip install --require-hashes` reads: one requirement a line, continued by
/// `\`, with `--hash=sha256:…`, markers after `;`, and comments.
#[must_use]
pub fn check_lock(name: &str, bytes: &[u8]) -> Vec<Diagnostic> {
    let too_large = bytes.len() > 16 * MAX_BYTES;
    let Some(text) = std::str::from_utf8(bytes).ok().filter(|t| !too_large && !t.contains('\0')) else {
        let (code, what) = if too_large {
            (DiagnosticCode::TooLarge, format!("{name} is larger than 16 MiB"))
        } else {
            (DiagnosticCode::NotText, format!("{name} is not a text file"))
        };
        return vec![Diagnostic::error(code, what).help(GENERATE)];
    };
    let sources = Sources::single(name, bytes);
    logical_lines(text).filter_map(|line| check(&sources, &line)).collect()
}

/// A requirement with its continuations and without its comments.
struct Line {
    text: String,
    /// The bytes of its first physical line.
    start: usize,
    end: usize,
}

fn logical_lines(text: &str) -> impl Iterator<Item = Line> {
    let mut lines = Vec::new();
    let mut open: Option<Line> = None;
    let mut at = 0;
    for raw in text.split_inclusive('\n') {
        let body = raw.trim_end_matches(['\n', '\r']);
        let code = without_comment(body).trim_end();
        let continued = code.strip_suffix('\\');
        let part = continued.unwrap_or(code).trim();
        let line = open.get_or_insert_with(|| {
            let indent = body.len() - body.trim_start().len();
            Line { text: String::new(), start: at + indent, end: at + code.len().max(indent) }
        });
        line.text.push_str(part);
        line.text.push(' ');
        // A comment line between the hashes does not end the requirement.
        let only_comment = body.trim_start().starts_with('#') && line.text.trim() != "";
        if continued.is_none() && !only_comment {
            lines.extend(open.take());
        }
        at += raw.len();
    }
    lines.extend(open);
    lines.into_iter().filter(|l| !l.text.trim().is_empty())
}

/// `#` begins a comment at the start of a line or after a blank; in an address it is a fragment.
fn without_comment(line: &str) -> &str {
    let at = line
        .char_indices()
        .find(|(i, c)| *c == '#' && line.get(..*i).is_some_and(|b| b.is_empty() || b.ends_with(char::is_whitespace)));
    at.and_then(|(i, _)| line.get(..i)).unwrap_or(line)
}

fn check(sources: &Sources, line: &Line) -> Option<Diagnostic> {
    let text = line.text.trim();
    let span = Span::new(SourceId(0), line.start..line.end);
    let wrong = |message: String, help: &str| {
        Some(Diagnostic::error(DiagnosticCode::NotLocked, message).help(help).at(sources, span))
    };
    if text.starts_with('-') {
        let option = text.split([' ', '=']).next().unwrap_or_default();
        return match option {
            "-e" | "--editable" => wrong(
                "an editable package is whatever lies in its folder".to_owned(),
                "take it along with the job's `code`, or publish a version of it",
            ),
            "-r" | "--requirement" | "-c" | "--constraint" => {
                wrong(format!("`{option}` brings in another file"), GENERATE)
            }
            "-i" | "--index-url" | "--extra-index-url" | "-f" | "--find-links" | "--no-index" | "--trusted-host" => {
                wrong(
                    format!("`{option}` says where packages come from, which differs from machine to machine"),
                    "remove it, and set the index in the machine's configuration",
                )
            }
            _ => wrong(format!("`{option}` is not possible in a lock"), "remove it"),
        };
    }
    let requirement = text.split(" --").next().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let name =
        requirement.split(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c))).next().unwrap_or_default();
    if requirement.contains("://") || requirement.contains(" @ ") {
        let vcs = ["git+", "hg+", "svn+", "bzr+"].iter().any(|v| requirement.contains(v));
        let what = if vcs { "a repository" } else { "an address" };
        return wrong(
            format!("`{name}` comes from {what}, which may hold something else tomorrow"),
            "lock a published version: `name==1.2.3` with its hashes",
        );
    }
    if name.is_empty() || !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return wrong(format!("`{}` is no requirement", requirement.chars().take(40).collect::<String>()), GENERATE);
    }
    let version = requirement.split_once("==").map(|(_, v)| v.trim_start_matches('=').trim());
    let pinned = version.is_some_and(|v| !v.is_empty() && !v.contains(['*', ',', ' ', '<', '>']));
    if !pinned {
        return wrong(format!("`{name}` has no fixed version"), GENERATE);
    }
    let hashes: Vec<&str> = text.split_whitespace().filter_map(|w| w.strip_prefix("--hash=")).collect();
    if hashes.is_empty() {
        return wrong(format!("`{name}` has no hash"), GENERATE);
    }
    let good =
        |h: &&str| h.strip_prefix("sha256:").is_some_and(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit()));
    if !hashes.iter().any(good) {
        return wrong(format!("`{name}` has no hash of the form `--hash=sha256:` and 64 digits"), GENERATE);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(lock: &str) -> Vec<(usize, String)> {
        check_lock("requirements.lock", lock.as_bytes())
            .into_iter()
            .map(|d| (d.place.map_or(0, |p| p.line), d.message))
            .collect()
    }

    #[test]
    fn a_lock_is_a_lock() {
        let hash = "a".repeat(64);
        let good = format!(
            "# made by a tool\nx[extra]==1.0.post1 ; python_version < '3.12' \\\n    --hash=sha256:{hash} \\\n    --hash=sha256:{hash}\n    # via y\n\ny==2 --hash=sha256:{hash}\r\n"
        );
        assert_eq!(lines(&good), []);
        assert_eq!(lines(""), []);
        assert_eq!(lines("# nothing\n"), []);
    }

    #[test]
    fn what_is_not_fixed_is_told_with_its_line() {
        let hash = "a".repeat(64);
        let bad = format!(
            "a>=1 --hash=sha256:{hash}\nb==1\n-e .\n--index-url https://index.example/simple\nc @ git+https://h/c\nd==1.* --hash=sha256:{hash}\ne==1 \\\n  --hash=sha256:12\nf==1 --hash=md5:{hash}\n???\n-r other.txt\n"
        );
        let found = lines(&bad);
        assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 9, 10, 11], "{found:#?}");
    }
}
