//! The forms of text that documents have, and what is wrong with a text that has not its form.

use super::shape::{Fault, Text};
use crate::diagnostic::DiagnosticCode;
use crate::duration::{Duration, DurationError};
use crate::image::{self, ImageName, ImageNameError};
use crate::quantity::Quantity;

/// Longest name of a job. Kubernetes' names have 63 characters; the rest is for what is added:
/// `-` and the number of a repeated name, attempt, epoch and worker.
pub const NAME_LIMIT: usize = 40;

type Check = Result<(), Fault>;

pub(crate) const fn text(what: &'static str, pattern: Option<&'static str>, check: fn(&str) -> Check) -> Text {
    Text { what, pattern, literal: false, most: 512, check }
}

/// A job's name.
pub const NAME: Text = text("a name", Some("^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"), |t| label(t, NAME_LIMIT));
/// The name of a job that is there: a number may have been added to it, and its namespace may stand before it.
pub const JOB: Text = text(
    "the name of a job",
    Some("^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"),
    |t| t.split_once('/').map_or_else(|| label(t, 63), |(namespace, name)| label(namespace, 63).and(label(name, 63))),
);
/// The name of a queue.
pub const QUEUE: Text = text("the name of a queue", Some("^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"), queue);
/// The name of a data volume.
pub const DATA_NAME: Text = text("a name", Some("^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"), |t| label(t, NAME_LIMIT));
/// A word, such as a topology level or priority.
pub const WORD: Text = text("a name", Some("^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$"), word);
/// A priority; a number is taken so that it can be told which name it has.
pub const PRIORITY: Text = Text { what: "a priority", pattern: WORD.pattern, literal: true, most: 63, check: word };
/// An accelerator type.
pub const GPU_TYPE: Text = Text {
    what: "a GPU type such as H100",
    pattern: Some("^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$"),
    literal: true,
    most: 63,
    check: word,
};
/// An environment.
pub const ENVIRONMENT: Text =
    text("an environment", Some("^[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?(@[1-9][0-9]{0,8})?$"), environment);
/// An environment's own name.
pub const ENVIRONMENT_NAME: Text = text("a name", Some("^[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?$"), environment_name);
/// A container image, by tag or digest.
pub const IMAGE: Text = text("an image", Some(image::PATTERN), image_name);
/// A container image by digest.
pub const PINNED_IMAGE: Text = text("an image by its digest", Some(image::PINNED_PATTERN), pinned_image);
/// A path beside or below the document.
pub const RELATIVE: Text = text("a path", Some("^[^/\\s]"), relative);
/// A folder.
pub const FOLDER: Text = text("a folder", Some("\\S"), some);
/// Any text that is not empty, numbers included.
pub const ANY: Text = Text { what: "text", pattern: Some("\\S"), literal: true, most: 1024, check: some };
/// Any text.
pub const FREE: Text = Text { what: "text", pattern: None, literal: true, most: 1 << 17, check: |_| Ok(()) };
/// A command.
pub const COMMAND: Text = Text { what: "a command", pattern: Some("\\S"), literal: false, most: 1 << 17, check: some };
/// A variable's name.
pub const VARIABLE: Text = text("a variable", Some("^[A-Za-z_][A-Za-z0-9_]*$"), variable);
/// A reference to a secret.
pub const SECRET: Text =
    text("a reference `secret/key`", Some("^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/[-._A-Za-z0-9]{1,253}$"), secret);
/// An absolute path.
pub const ABSOLUTE: Text = text("an absolute path", Some("^/"), absolute);
/// A duration above zero.
pub const DURATION: Text = text(
    "a duration",
    Some("^(([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?|([0-9]+-)?[0-9]+:[0-5]?[0-9]:[0-5]?[0-9])$"),
    duration,
);
/// An amount of memory above zero.
pub const QUANTITY: Text = text("an amount of memory", Some("^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi)$"), quantity);
/// A web address.
pub const WEBHOOK: Text = text("an address", Some("^https?://[^/\\s]"), webhook);
/// Versions of Python.
pub const PYTHON: Text = text(
    "versions of Python",
    Some("^(>=|<=|==|!=|~=|<|>)\\s*[0-9]+(\\.[0-9]+){0,2}(\\s*,\\s*(>=|<=|==|!=|~=|<|>)\\s*[0-9]+(\\.[0-9]+){0,2})*$"),
    python,
);

fn some(t: &str) -> Check {
    if t.trim().is_empty() { Err(Fault::new("an empty text", "write one, or remove the line")) } else { Ok(()) }
}

fn is_label(t: &str, limit: usize, extra: &str) -> bool {
    let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    t.len() <= limit
        && t.starts_with(ends)
        && t.ends_with(ends)
        && t.chars().all(|c| ends(c) || c == '-' || extra.contains(c))
}

/// The nearest valid name to a text; `job` where nothing is left of it.
#[must_use]
pub fn to_name(t: &str) -> String {
    let mut name = String::new();
    for c in t.chars() {
        let c = c.to_ascii_lowercase();
        if c.is_ascii_lowercase() || c.is_ascii_digit() {
            name.push(c);
        } else if !name.is_empty() && !name.ends_with('-') {
            name.push('-');
        }
    }
    name.truncate(NAME_LIMIT);
    let name = name.trim_end_matches('-');
    if name.is_empty() { "job".to_owned() } else { name.to_owned() }
}

pub(crate) fn label(t: &str, limit: usize) -> Check {
    if is_label(t, limit, "") {
        return Ok(());
    }
    let help = format!("write for example `{}`", to_name(t));
    let length = t.chars().count();
    if length > limit {
        let message = format!(
            "this name has {length} characters, and {limit} is the most; numbers are added to it, and Kubernetes allows 63 in all"
        );
        return Err(Fault::new(message, help).code(DiagnosticCode::TooLong));
    }
    if t.is_empty() {
        return Err(Fault::new("an empty name", "write one, such as `llama3-8b-sft`"));
    }
    Err(Fault::new("a name has lowercase letters, digits and `-`, and begins and ends with a letter or digit", help))
}

fn queue(t: &str) -> Check {
    if let Some((_, last)) = t.trim_end_matches('/').rsplit_once('/') {
        return Err(Fault::new("a queue is given by its name, not by its path", format!("write `{last}`")));
    }
    label(t, 63).map_err(|f| Fault { help: "`aviflow queues` lists them".to_owned(), ..f })
}

pub(crate) fn word(t: &str) -> Check {
    let ends = |c: char| c.is_ascii_alphanumeric();
    let good = t.len() <= 63
        && t.starts_with(ends)
        && t.ends_with(ends)
        && t.chars().all(|c| ends(c) || matches!(c, '-' | '_' | '.'));
    if good {
        return Ok(());
    }
    Err(Fault::new(
        "a name has letters, digits, `-`, `_` and `.`, at most 63 of them",
        "several are a list: `[H100, H200]`",
    ))
}

fn environment_name(t: &str) -> Check {
    if is_label(t, 63, ".") {
        return Ok(());
    }
    Err(Fault::new(
        "an environment's name has lowercase letters, digits, `-` and `.`, at most 63 of them",
        "write for example `torch-2.9`",
    ))
}

fn environment(t: &str) -> Check {
    let Some((name, version)) = t.split_once('@') else {
        if t.contains(':') || t.contains('/') {
            return Err(Fault::new("this is no environment", "an image is given as `image: name:tag`"));
        }
        return environment_name(t);
    };
    if version.starts_with("sha256:") {
        return Err(Fault::new("this is an image", format!("write `image: {t}` instead of `environment`")));
    }
    environment_name(name)?;
    let digits = version.bytes().all(|b| b.is_ascii_digit());
    if digits && version.len() <= 9 && !version.starts_with('0') && !version.is_empty() {
        return Ok(());
    }
    Err(Fault {
        range: Some(name.len() + 1..t.len()),
        ..Fault::new(
            format!("`{version}` is no version; versions are numbered from 1"),
            format!("write `{name}@1`, or `{name}` for its newest version"),
        )
    })
}

fn image_name(t: &str) -> Check {
    let error = match ImageName::parse(t) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let told = error.to_string();
    Err(match error {
        ImageNameError::Digest(_) => Fault {
            range: t.find('@').map(|at| at + 1..t.len()),
            ..Fault::new(told, "copy the whole digest").code(DiagnosticCode::NotPinned)
        },
        ImageNameError::Tag(_) => Fault::new(told, "write for example `registry.example/team/train:v1`"),
        ImageNameError::Name(_) => {
            let help = match t.split_once("://") {
                Some((_, rest)) => format!("an image has no scheme; write `{rest}`"),
                None => "write for example `registry.example/team/train:v1`".to_owned(),
            };
            Fault::new(told, help)
        }
    })
}

/// An image that nobody has to ask a registry for.
fn pinned_image(t: &str) -> Check {
    image_name(t)?;
    if t.contains('@') {
        return Ok(());
    }
    let name = ImageName::parse(t).map_or_else(|_| t.to_owned(), |image| image.name);
    Err(Fault::new(
        "this image must be named by its digest; a tag may be another image tomorrow",
        format!("write `{name}@sha256:…`; `docker buildx imagetools inspect {t}` shows the digest"),
    )
    .code(DiagnosticCode::NotPinned))
}

fn relative(t: &str) -> Check {
    some(t)?;
    if t.starts_with('/') || t.starts_with('~') {
        return Err(Fault::new("an absolute path", "write it relative to the document, such as `extra.lock`"));
    }
    if t.split('/').any(|part| part == "..") {
        return Err(Fault::new("a path out of the document's folder", "move the file beside the document"));
    }
    Ok(())
}

fn variable(t: &str) -> Check {
    let good = t.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && t.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if good {
        return Ok(());
    }
    let better: String = t.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let better = if better.starts_with(|c: char| c.is_ascii_digit()) { format!("_{better}") } else { better };
    Err(Fault::new(
        format!("`{t}` is no name of a variable; it has letters, digits and `_`, and begins with no digit"),
        if better.is_empty() { "write one, such as `WANDB_PROJECT`".to_owned() } else { format!("write `{better}`") },
    ))
}

fn secret(t: &str) -> Check {
    if let Some(found) = crate::secrets::find(t).first() {
        return Err(Fault::new(
            format!("this looks like {} itself; here stands where it is kept", found.kind),
            "write `secret/key`, such as `hf-token/token`; a key that was in a file should be replaced by a new one",
        )
        .code(DiagnosticCode::SecretLiteral));
    }
    let good = t.split_once('/').is_some_and(|(name, key)| {
        is_label(name, 253, ".")
            && (1..=253).contains(&key.len())
            && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    });
    if good {
        return Ok(());
    }
    Err(Fault::new("a secret is referred to as `secret/key`, never by its value", "write for example `hf-token/token`"))
}

fn absolute(t: &str) -> Check {
    some(t)?;
    if !t.starts_with('/') {
        return Err(Fault::new(
            format!("`{t}` is no absolute path"),
            format!("write `/{}`", t.trim_start_matches(['.', '~']).trim_start_matches('/')),
        ));
    }
    let parts: Vec<&str> = t.split('/').filter(|p| !p.is_empty()).collect();
    if parts.iter().any(|p| matches!(*p, "." | "..")) {
        return Err(Fault::new("a path with `.` or `..`", "write the path that is meant"));
    }
    if t.contains(':') || t.contains('\0') {
        return Err(Fault::new("a path with `:`", "write where it is to be within the job, such as `/data`"));
    }
    match parts.first() {
        None => Err(Fault::new("`/` is the whole file system", "write a folder, such as `/data`")),
        Some(&("proc" | "sys" | "dev")) => {
            Err(Fault::new(format!("`{t}` belongs to the system"), "write a folder of your own, such as `/data`"))
        }
        Some(_) => Ok(()),
    }
}

fn duration(t: &str) -> Check {
    match t.parse::<Duration>() {
        Ok(d) if d.0.0 == 0 => {
            Err(Fault::new("a duration of zero", "write a longer one, or remove the line")
                .code(DiagnosticCode::OutOfRange))
        }
        Ok(_) => Ok(()),
        Err(e) => {
            let (message, help) = match &e {
                DurationError::NoUnit(t) => {
                    (format!("`{t}` has no unit"), format!("write `{t}s`, `{t}m` or `{t}h`, whichever is meant"))
                }
                DurationError::Malformed(t) => (
                    format!("`{t}` is not a duration"),
                    "write for example `90s`, `15m`, `24h`, `1h30m`, `7d` or `1-00:00:00`".to_owned(),
                ),
                DurationError::TooLong(t) => {
                    (format!("`{t}` is longer than ten years"), "write a shorter one".to_owned())
                }
            };
            let code = match e {
                DurationError::TooLong(_) => DiagnosticCode::OutOfRange,
                DurationError::NoUnit(_) | DurationError::Malformed(_) => DiagnosticCode::Unit,
            };
            Err(Fault::new(message, help).code(code))
        }
    }
}

fn quantity(t: &str) -> Check {
    match t.parse::<Quantity>() {
        Ok(q) if q.0 == 0 => {
            Err(Fault::new("an amount of zero", "write a greater one, or remove the line")
                .code(DiagnosticCode::OutOfRange))
        }
        Ok(_) => Ok(()),
        Err(e) => Err(Fault::new(e.to_string(), e.help()).code(DiagnosticCode::Unit)),
    }
}

fn webhook(t: &str) -> Check {
    let host = t.strip_prefix("https://").or_else(|| t.strip_prefix("http://"));
    if host.is_some_and(|h| !h.is_empty() && !h.starts_with('/') && !t.contains(char::is_whitespace)) {
        return Ok(());
    }
    Err(Fault::new("a webhook is an address that begins with `https://`", "write the whole address"))
}

fn python(t: &str) -> Check {
    const OPERATORS: [&str; 7] = [">=", "<=", "==", "!=", "~=", "<", ">"];
    let good = t.split(',').map(str::trim).all(|part| {
        let version = OPERATORS.iter().find_map(|o| part.strip_prefix(o)).map(str::trim);
        version.is_some_and(|v| {
            v.split('.').count() <= 3 && v.split('.').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        })
    });
    if good {
        return Ok(());
    }
    Err(Fault::new(format!("`{t}` names no versions of Python"), "write for example `\">=3.11,<3.13\"`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_a_nearest_name() {
        for (text, name) in
            [("Llama3_8B SFT", "llama3-8b-sft"), ("--x--", "x"), ("", "job"), ("日本", "job"), ("a.b/c.py", "a-b-c-py")]
        {
            assert_eq!(to_name(text), name);
            assert_eq!(label(name, NAME_LIMIT), Ok(()));
        }
        let long = to_name(&"ab-".repeat(40));
        assert!(label(&long, NAME_LIMIT).is_ok(), "{long}");
    }
}
