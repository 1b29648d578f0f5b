//! A command as it is written and as it is run.
//!
//! One line is a program and its arguments: split at blanks, quotes taken off, and nothing
//! expanded, because no shell reads it. What only a shell would understand is therefore an
//! error (it would arrive as an argument) or, for `$NAME`, a warning. Several lines, or a
//! block after `|`, are a bash script.

use super::report::Report;
use crate::diagnostic::DiagnosticCode;
use crate::yaml::{Node, Style, Value};
use std::ops::Range;

/// What runs a script: it stops at the first error, at an unset variable, and within pipes.
pub const BASH: [&str; 4] = ["bash", "-euo", "pipefail", "-c"];

const SCRIPT: &str = "several lines are a bash script: write `run: |` and the command in the next line";

/// The command of a `run` that has the right type.
pub(super) fn command(report: &mut Report<'_>, node: &Node) -> Option<Vec<String>> {
    match &node.value {
        Value::List(items) => {
            let words: Vec<String> = items.iter().filter_map(|i| i.text().map(str::to_owned)).collect();
            if words.first().is_some_and(|w| w.trim().is_empty()) {
                let span = items.first().map_or(node.span, |i| i.span);
                report.error(
                    DiagnosticCode::Malformed,
                    "run",
                    span,
                    "the first word is the program, and it is empty",
                    "write for example `[python, train.py]`",
                );
                return None;
            }
            Some(words)
        }
        Value::Scalar { text, style } => {
            if text.trim().is_empty() {
                return None; // told by the shape
            }
            let text = text.trim_end();
            if *style == Style::Literal || text.contains('\n') {
                return Some(BASH.iter().map(|w| (*w).to_owned()).chain([text.to_owned()]).collect());
            }
            one_line(report, node, text)
        }
        Value::Map(_) => None,
    }
}

fn one_line(report: &mut Report<'_>, node: &Node, text: &str) -> Option<Vec<String>> {
    let (words, found) = match split(text) {
        Ok(split) => split,
        Err(at) => {
            let quote = text.get(at..at + 1).unwrap_or_default();
            let span = report.within(node, at..text.len());
            let help = if quote == "\\" {
                "write `\\\\` for a backslash".to_owned()
            } else {
                format!("add the missing `{quote}`; one that stands for itself is written `\\{quote}`")
            };
            let message = if quote == "\\" {
                "a backslash at the end of the command".to_owned()
            } else {
                format!("a quote ({quote}) that is never closed")
            };
            report.error(DiagnosticCode::Quoting, "run", span, message, help);
            return None;
        }
    };
    needs_shell(report, node, text, &found);
    let first = words.first()?;
    let program = first.text.as_str();
    if let Some((name, value)) = program.split_once('=')
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    {
        let span = report.within(node, first.range.clone());
        report.error(
            DiagnosticCode::ShellSyntax,
            "run",
            span,
            format!("`{program}` would be taken for the program; only a shell sets variables like this"),
            format!("write `env: {{{name}: {value}}}`, and the program first in `run`"),
        );
    }
    const BUILTINS: [&str; 8] = ["cd", "source", ".", "export", "set", "alias", "ulimit", "eval"];
    if BUILTINS.contains(&program) {
        let span = report.within(node, first.range.clone());
        report.error(
            DiagnosticCode::ShellSyntax,
            "run",
            span,
            format!("`{program}` is a word of the shell, not a program; no shell reads a command of one line"),
            SCRIPT,
        );
    }
    Some(words.into_iter().map(|w| w.text).collect())
}

/// One report for each kind: what helps against one helps against all.
fn needs_shell(report: &mut Report<'_>, node: &Node, text: &str, found: &[(Shell, Range<usize>)]) {
    let of = |kind: Shell| {
        let mut all: Vec<&str> = Vec::new();
        for (_, range) in found.iter().filter(|f| f.0 == kind) {
            let what = text.get(range.clone()).unwrap_or_default();
            if !all.contains(&what) {
                all.push(what);
            }
        }
        let first = found.iter().find(|f| f.0 == kind).map(|f| report.within(node, f.1.clone()));
        let quoted: Vec<String> = all.iter().map(|w| format!("`{w}`")).collect();
        (first, quoted.join(", "), all.len())
    };
    let (operator, variable, pattern) = (of(Shell::Operator), of(Shell::Variable), of(Shell::Pattern));
    if let (Some(span), what, n) = operator {
        let arguments = if n == 1 { "an argument" } else { "arguments" };
        let message = format!("{what} would reach the program as {arguments}; no shell reads a command of one line");
        let help = format!("{SCRIPT}; if it is meant as an argument, put it in quotes");
        report.error(DiagnosticCode::ShellSyntax, "run", span, message, help);
        return;
    }
    for (found, to) in [(variable, ""), (pattern, " to file names")] {
        let (Some(span), what, n) = found else { continue };
        let is = if n == 1 { "is" } else { "are" };
        let message = format!("{what} {is} not expanded{to}; no shell reads a command of one line");
        let help = format!("{SCRIPT}; if the program expands it itself, put it in single quotes");
        report.warning(DiagnosticCode::ShellSyntax, "run", span, message, help);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Word {
    text: String,
    range: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shell {
    Operator,
    Variable,
    Pattern,
}

type Split = (Vec<Word>, Vec<(Shell, Range<usize>)>);

/// Words by a shell's rules of quoting, and what a shell would have done more.
/// The error is the byte of the quote that is not closed.
fn split(text: &str) -> Result<Split, usize> {
    let mut words = Vec::new();
    let mut found = Vec::new();
    let mut word: Option<Word> = None;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if c.is_whitespace() {
            words.extend(word.take());
            continue;
        }
        let starts = word.is_none();
        let current = word.get_or_insert_with(|| Word { text: String::new(), range: at..at });
        match c {
            '\'' => loop {
                match chars.next() {
                    Some((_, '\'')) => break,
                    Some((_, c)) => current.text.push(c),
                    None => return Err(at),
                }
            },
            '"' => loop {
                match chars.next() {
                    Some((_, '"')) => break,
                    Some((_, '\\')) => match chars.next() {
                        Some((_, c @ ('"' | '\\' | '$' | '`'))) => current.text.push(c),
                        Some((_, c)) => current.text.extend(['\\', c]),
                        None => return Err(at),
                    },
                    Some((i, c)) => {
                        current.text.push(c);
                        found.extend(dollar(text, i, c));
                    }
                    None => return Err(at),
                }
            },
            '\\' => match chars.next() {
                Some((_, c)) => current.text.push(c),
                None => return Err(at),
            },
            c => {
                current.text.push(c);
                found.extend(dollar(text, at, c));
                found.extend(plain(text, at, c, starts));
            }
        }
        current.range.end = chars.peek().map_or(text.len(), |(i, _)| *i);
    }
    words.extend(word.take());
    merge(&mut found);
    Ok((words, found))
}

fn dollar(text: &str, at: usize, c: char) -> Option<(Shell, Range<usize>)> {
    let rest = text.get(at..)?;
    if c == '`' {
        return Some((Shell::Operator, at..at + 1));
    }
    if c != '$' {
        return None;
    }
    let tail = rest.get(1..)?;
    if tail.starts_with('(') {
        return Some((Shell::Operator, at..at + 2));
    }
    let inner = tail.strip_prefix('{').unwrap_or(tail);
    let name = inner.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count();
    let braces = if tail.starts_with('{') { 2.min(tail.len() - name) } else { 0 };
    (name > 0).then(|| (Shell::Variable, at..(at + 1 + name + braces).min(text.len())))
}

fn plain(text: &str, at: usize, c: char, starts: bool) -> Option<(Shell, Range<usize>)> {
    let rest = text.get(at..)?;
    let next = rest.chars().nth(1);
    match c {
        '|' | '>' | '<' | ';' => Some((Shell::Operator, at..at + 1)),
        // Within an address `&` is a letter like any other.
        '&' if starts || next.is_none_or(char::is_whitespace) || next == Some('&') => {
            Some((Shell::Operator, at..at + 1))
        }
        '~' if starts && next.is_none_or(|n| n == '/' || n.is_whitespace()) => Some((Shell::Pattern, at..at + 1)),
        '*' => Some((Shell::Pattern, at..at + 1)),
        _ => None,
    }
}

/// `&&` and `>>` are one problem, not two.
fn merge(found: &mut Vec<(Shell, Range<usize>)>) {
    found.dedup_by(|b, a| {
        let adjacent = a.0 == b.0 && a.1.end == b.1.start && a.0 != Shell::Variable;
        if adjacent {
            a.1.end = b.1.end;
        }
        adjacent
    });
}

/// A name for a job that was given as a command alone: the script's, else the program's.
pub(super) fn name_of(command: &[String]) -> String {
    let script = command.iter().find(|w| w.ends_with(".py") || w.ends_with(".sh"));
    let word = script.or_else(|| command.first()).map(String::as_str).unwrap_or_default();
    let file = word.rsplit('/').next().unwrap_or_default();
    let stem = file.strip_suffix(".py").or_else(|| file.strip_suffix(".sh")).unwrap_or(file);
    super::formats::to_name(stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        split(text).map(|s| s.0.into_iter().map(|w| w.text).collect()).unwrap_or_default()
    }

    fn shell(text: &str) -> Vec<&str> {
        let found = split(text).map(|s| s.1).unwrap_or_default();
        found.into_iter().filter_map(|(_, r)| text.get(r)).collect()
    }

    #[test]
    fn words_are_split_as_a_shell_would() {
        assert_eq!(words("torchrun  train.py --lr 1e-3"), ["torchrun", "train.py", "--lr", "1e-3"]);
        assert_eq!(words(r#"a 'b c' "d \"e\" \n" f\ g '' h"i"j"#), ["a", "b c", r#"d "e" \n"#, "f g", "", "hij"]);
        assert_eq!(words("python -c 'print(1)'"), ["python", "-c", "print(1)"]);
        assert_eq!(split("a 'b"), Err(2));
        assert_eq!(split("a \"b"), Err(2));
        assert_eq!(split("a \\"), Err(2));
    }

    #[test]
    fn what_needs_a_shell_is_found() {
        assert_eq!(shell("a && b >> c | d ; e &"), ["&&", ">>", "|", ";", "&"]);
        assert_eq!(shell("a $HOME ${X} \"$Y\" '$Z' $(id) `id`"), ["$HOME", "${X}", "$Y", "$(", "`", "`"]);
        assert_eq!(shell("ls *.py ~/x 'a*b' a~b"), ["*", "~"]);
        assert!(shell("curl http://h/?a=1&b=2 'x|y' \"p>q\" --x={a,b} [1,2] c# $").is_empty());
    }

    #[test]
    fn a_command_has_a_name() {
        let name = |t: &str| name_of(&words(t));
        assert_eq!(name("torchrun src/train_sft.py --x"), "train-sft");
        assert_eq!(name("/usr/bin/env"), "env");
        assert_eq!(name(""), "job");
    }
}
