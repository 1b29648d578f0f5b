//! Local links of the documents lead somewhere.

use super::Offence;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Checks the links of every Markdown file among the project's files.
pub fn check(files: &BTreeMap<String, String>) -> Vec<Offence> {
    let anchors: BTreeMap<&str, BTreeSet<String>> = files
        .iter()
        .filter(|(name, _)| name.ends_with(".md"))
        .map(|(name, text)| (name.as_str(), slugs(text)))
        .collect();
    let mut offences = Vec::new();
    for (name, text) in files.iter().filter(|(name, _)| name.ends_with(".md")) {
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        for (line, target) in links(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let path = if path.is_empty() { name.clone() } else { normal(&folder.join(path)) };
            let folder = format!("{path}/");
            if !files.contains_key(&path)
                && !files.keys().any(|file| file.starts_with(&folder))
                && !Path::new(&path).exists()
            {
                offences.push(Offence::new(name, line, format!("the link leads nowhere: {target}")));
            } else if !anchor.is_empty() && anchors.get(path.as_str()).is_some_and(|slugs| !slugs.contains(anchor)) {
                offences.push(Offence::new(name, line, format!("{path} has no heading for the link {target}")));
            }
        }
    }
    offences
}

/// Lines outside of code blocks, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((number + 1, line))
    })
}

/// Targets of `[text](target)`, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // What stands in backquotes is no link.
        let line: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            if let Some(end) = rest.find(')') {
                let target = rest[..end].split_whitespace().next().unwrap_or_default();
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

/// The anchors of a document's headings, as GitHub makes them.
fn slugs(text: &str) -> BTreeSet<String> {
    let heading = |line: &str| line.starts_with('#').then(|| line.trim_start_matches('#').trim().to_lowercase());
    let slug = |heading: String| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    prose(text).filter_map(|(_, line)| heading(line)).map(slug).collect()
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> String {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            Component::Normal(_) | Component::RootDir | Component::Prefix(_) => out.push(part),
        }
    }
    out.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_somewhere() {
        let check = |text: &str, expected: usize| {
            let files = BTreeMap::from([
                ("docs/a.md".to_owned(), text.to_owned()),
                ("docs/b.md".to_owned(), "# One, and `two`\n".to_owned()),
                ("README.md".to_owned(), String::new()),
            ]);
            assert_eq!(check(&files).len(), expected, "{text}");
        };
        check("[b](b.md) [top](../README.md) [out](https://example.com/x)", 0);
        check("[b](b.md#one-and-two) [docs](../docs)", 0);
        check("[b](b.md#three)", 1);
        check("[c](c.md)", 1);
        check("`[c](c.md)`", 0);
        check("```\n[c](c.md)\n```", 0);
        check("## Here\n[here](#here) [there](#there)", 1);
    }
}
