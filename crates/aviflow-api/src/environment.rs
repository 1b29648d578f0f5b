//! The description of an environment: `environments/NAME/environment.yaml` and its lock.
//!
//! An environment is a named, numbered, unchangeable place to run in. What makes it the same
//! place is its content, so its hash leaves out what people only read (name, version,
//! description, owner): two names of one content share one cache.

mod choose;
mod lock;

pub use choose::{Candidate, choose};
pub use lock::{PIP_INSTALL, check_lock};

use crate::diagnostic::{Diagnostic, DiagnosticCode, sort};
use crate::file::fields::ENVIRONMENT;
use crate::file::report::Report;
use crate::file::{Places, read_object};
use crate::source::Sources;
use crate::yaml;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The lock's file where a description does not name one.
pub const REQUIREMENTS: &str = "requirements.lock";

/// What an environment is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Description {
    /// The name, the same as its folder's.
    pub name: String,
    /// The version, from 1.
    pub version: u32,
    /// What it is for.
    pub description: String,
    /// Who answers for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The versions of Python that it is locked for, such as `>=3.11,<3.13`.
    pub python: String,
    /// The lock, relative to the description.
    pub requirements: String,
    /// Default variables; what a job declares wins.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// A description that was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedEnvironment {
    /// The environment.
    pub description: Description,
    /// What is probably not meant.
    pub warnings: Vec<Diagnostic>,
    /// Where each field stands.
    pub places: Places,
}

/// Reads the description of an environment. `folder` is the name of the folder it lies in,
/// which must be its name, if that is known.
///
/// # Errors
/// Everything that is wrong with it, in the order of the text.
pub fn parse_environment(name: &str, bytes: &[u8], folder: Option<&str>) -> Result<ParsedEnvironment, Vec<Diagnostic>> {
    let mut sources = Sources::default();
    let root = yaml::parse_bytes(&mut sources, name, bytes)?;
    if root.is_null() {
        let d = Diagnostic::error(DiagnosticCode::Empty, format!("{name} is empty"))
            .help("an environment needs `name`, `version`, `description` and `python`");
        return Err(vec![d]);
    }
    let mut report = Report::new(&sources);
    let mut json = read_object(&mut report, &root, &ENVIRONMENT);
    json.entry("requirements").or_insert_with(|| json!(REQUIREMENTS));
    reserved(&mut report, json.get("env"));
    let told = json.get("name").and_then(Json::as_str);
    if let (Some(told), Some(folder)) = (told, folder)
        && told != folder
    {
        report.error_at(
            DiagnosticCode::Conflict,
            "name",
            format!("the environment is called `{told}`, and its folder `{folder}`"),
            format!("write `name: {folder}`, or rename the folder"),
        );
    }
    crate::check::literals(&mut report);
    sort(&mut report.list, &sources);
    if report.list.iter().any(Diagnostic::is_error) {
        return Err(report.list);
    }
    match serde_json::from_value(Json::Object(json)) {
        Ok(description) => Ok(ParsedEnvironment { description, warnings: report.list, places: report.places }),
        Err(e) => {
            Err(vec![Diagnostic::error(DiagnosticCode::Internal, e.to_string()).help("please report this document")])
        }
    }
}

fn reserved(report: &mut Report<'_>, env: Option<&Json>) {
    let variables = env.and_then(Json::as_object).into_iter().flatten();
    for (variable, _) in variables.filter(|(v, _)| crate::check::is_reserved(v)) {
        report.error_at_key(
            DiagnosticCode::ReservedVariable,
            &format!("env.{variable}"),
            format!("`{variable}` is set by the platform, from where a job is placed"),
            "remove it",
        );
    }
}

/// The content hash of an environment, hexadecimal SHA-256.
///
/// What enters, in this order, each part with its length before it so that no two contents
/// read the same: the word `aviflow-environment-1`; `python` without blanks; the number of
/// locks, and the bytes of each (the environment's own first, then those a job layers onto
/// it); the number of variables, and name and value of each in the order of their names.
/// What does not enter: name, version, description, owner, and how the lock's file is called.
#[must_use]
pub fn hash(description: &Description, locks: &[&[u8]]) -> String {
    let mut hasher = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_be_bytes());
        hasher.update(bytes);
    };
    part(b"aviflow-environment-1");
    let python: String = description.python.chars().filter(|c| !c.is_whitespace()).collect();
    part(python.as_bytes());
    part(&(locks.len() as u64).to_be_bytes());
    for lock in locks {
        part(lock);
    }
    part(&(description.env.len() as u64).to_be_bytes());
    for (name, value) in &description.env {
        part(name.as_bytes());
        part(value.as_bytes());
    }
    hex(&hasher.finalize())
}

/// Bytes as lowercase hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description {
            name: "a".into(),
            version: 1,
            description: "for tests".into(),
            owner: None,
            python: ">=3.11,<3.13".into(),
            requirements: REQUIREMENTS.into(),
            env: BTreeMap::from([("A".into(), "1".into())]),
        }
    }

    #[test]
    fn the_hash_is_of_the_content_alone() {
        let one = description();
        let lock: &[u8] = b"x==1 --hash=sha256:0";
        let base = hash(&one, &[lock]);
        // Fixed: caches and recorded runs are found by it.
        assert_eq!(base, "34ba52a8fd967a549d0a421fdbe1695abaf4dcc6505b1461e9e4ebbb73be241b");
        let renamed = Description {
            name: "b".into(),
            version: 7,
            description: "other words".into(),
            owner: Some("me".into()),
            requirements: "other.lock".into(),
            python: ">=3.11, <3.13".into(),
            ..one.clone()
        };
        assert_eq!(hash(&renamed, &[lock]), base);
        let mut env = one.clone();
        env.env.insert("B".into(), String::new());
        let python = Description { python: ">=3.11".into(), ..one.clone() };
        let split: [&[u8]; 2] = [b"x==1 ", b"--hash=sha256:0"];
        let others = [hash(&env, &[lock]), hash(&python, &[lock]), hash(&one, &[]), hash(&one, &split)];
        for other in &others {
            assert_ne!(*other, base);
        }
    }
}
