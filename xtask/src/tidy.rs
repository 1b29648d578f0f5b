//! The rules that the compiler does not check.
//!
//! Each rule is a function from a file's name and text to offences, so that it
//! is tested without a file. [`all`] applies them to what git knows of.

mod crates;
mod links;
mod text;

use crate::proc::{capture, cargo, command};
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fmt;

/// Something that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Offence {
    /// The file.
    pub file: String,
    /// The line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong, and what to do.
    pub what: String,
}

impl Offence {
    fn new(file: &str, line: usize, what: impl Into<String>) -> Offence {
        Offence { file: file.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.what),
            line => write!(f, "{}:{line}: {}", self.file, self.what),
        }
    }
}

/// `cargo xtask tidy`.
pub fn run() -> Result<u8> {
    let (files, offences) = all()?;
    for offence in &offences {
        println!("{offence}");
    }
    println!("tidy: {files} files, {} offences", offences.len());
    Ok(u8::from(!offences.is_empty()))
}

/// Applies every rule; returns how many files were read, and the offences.
pub fn all() -> Result<(usize, Vec<Offence>)> {
    let listed = capture(command("git").args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]))?;
    let mut files = BTreeMap::new();
    for name in listed.split('\0').filter(|name| !name.is_empty()) {
        // A file that was just removed, a folder behind a link, or no text: nothing to read.
        if let Ok(text) = std::fs::read_to_string(name) {
            files.insert(name.to_owned(), text);
        }
    }
    let mut offences = Vec::new();
    for (name, text) in &files {
        offences.extend(text::check(name, text));
        offences.extend(crates::check_core_source(name, text));
    }
    offences.extend(links::check(&files));
    let metadata = capture(cargo().args(["metadata", "--format-version=1", "--no-deps", "--offline"]))?;
    let metadata = serde_json::from_str(&metadata).context("cargo metadata")?;
    offences.extend(crates::check_dependencies(&metadata));
    offences.extend(crates::check_manifests(&files));
    offences.sort();
    Ok((files.len(), offences))
}
