//! What keeps a replay from being made, for a person: what is wrong, where, and what to do.

use thiserror::Error;

/// Why a trace could not be read or replayed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// A file could not be read.
    #[error("{file} cannot be read: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// What the system says.
        reason: String,
    },
    /// A line of a file is not what it should be.
    #[error("{file}:{line}: {what}")]
    Line {
        /// The file.
        file: String,
        /// The line, from 1.
        line: u32,
        /// What is wrong.
        what: String,
        /// What to do.
        help: String,
    },
    /// A file as a whole is not what it should be.
    #[error("{file}: {what}")]
    File {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
        /// What to do.
        help: String,
    },
    /// Options that make no sense, alone or together.
    #[error("{what}")]
    Options {
        /// What is wrong.
        what: String,
        /// What to do.
        help: String,
    },
    /// A policy decided something impossible. Always a fault of the policy, never of the trace.
    #[error("the policy {policy} cannot be followed: {what}")]
    Policy {
        /// The policy.
        policy: String,
        /// What it decided.
        what: String,
    },
}

impl Error {
    /// Options that make no sense.
    pub(crate) fn options(what: impl Into<String>, help: impl Into<String>) -> Error {
        Error::Options { what: what.into(), help: help.into() }
    }

    /// What to do next.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            Error::Unreadable { .. } => Some("check the path, and that the file is text in UTF-8".to_owned()),
            Error::Line { help, .. } | Error::File { help, .. } | Error::Options { help, .. } => Some(help.clone()),
            Error::Policy { .. } => Some("this is a fault of Aviflow; please report it with the trace".to_owned()),
        }
    }

    /// Whether the platform is at fault, and not what was asked of it.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(self, Error::Policy { .. })
    }
}

/// What this crate returns.
pub type Result<T> = std::result::Result<T, Error>;
