//! What is wrong with a document, where, and what to write instead.
//!
//! Plain data: the command line renders it ([`crate::render`]), the API sends it as JSON.
//! What looks like a secret is masked in every text of it.

use crate::secrets::mask;
use crate::source::{Sources, Span};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// The document is refused.
    Error,
    /// The document is taken; it probably does not do what its author wants.
    Warning,
}

/// What kind of problem; stable, to be searched for and matched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiagnosticCode {
    /// Bytes that are no text.
    NotText,
    /// More than a document may have: bytes, depth, or values.
    TooLarge,
    /// No valid YAML.
    Syntax,
    /// YAML that is valid but not taken here: tags, merge keys, several documents.
    Unsupported,
    /// Nothing in it.
    Empty,
    /// A key twice in one mapping.
    DuplicateKey,
    /// A key that nobody knows.
    UnknownKey,
    /// A key that must be there and is not.
    MissingKey,
    /// A key without a value.
    NoValue,
    /// Text where a number is expected, and so on.
    WrongType,
    /// A number that is too small or too great.
    OutOfRange,
    /// A text that has not the form it must have.
    Malformed,
    /// A duration or quantity without its unit, or with one that is not known.
    Unit,
    /// A name that is too long.
    TooLong,
    /// An image that is not named by its digest.
    NotPinned,
    /// None of the words that are possible.
    UnknownChoice,
    /// The same thing twice in a list.
    Duplicate,
    /// Keys that exclude each other.
    Conflict,
    /// A key that means nothing without another.
    Needs,
    /// Paths that would hide each other.
    Collision,
    /// A variable that belongs to the platform.
    ReservedVariable,
    /// A quote in a command that is not closed.
    Quoting,
    /// What only a shell understands, in a command that no shell reads.
    ShellSyntax,
    /// A job that waits for itself.
    WaitsForItself,
    /// The value of a secret in a document.
    SecretLiteral,
    /// A setting of the launcher that defeats the platform's.
    Wiring,
    /// A default that is probably not meant.
    Default,
    /// A request that the pool can never meet.
    NeverFits,
    /// A file or folder that the document names and that is not there.
    NotThere,
    /// A queue that does not take the job.
    QueueRefuses,
    /// A field that is not acted on, by this version or on this body.
    NotSupported,
    /// An option on the command line that cannot be read.
    Option,
    /// A requirement that is not locked.
    NotLocked,
    /// A mistake of the platform itself.
    Internal,
}

impl DiagnosticCode {
    /// The code as a person reads it, such as `unknown-key`.
    #[must_use]
    pub fn name(self) -> String {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::String(name)) => name,
            _ => String::from("internal"),
        }
    }
}

/// A place in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// The file or option.
    pub source: String,
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// How many characters of that line, at least 1.
    pub length: usize,
    /// The offset in bytes.
    pub offset: usize,
    /// How many bytes of that line.
    pub bytes: usize,
}

/// One problem of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostic {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of problem.
    pub code: DiagnosticCode,
    /// The problem in words, a lowercase fragment.
    pub message: String,
    /// The field, such as `env.PORT` or `data[0].mount`; empty for the whole document.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field: String,
    /// Where it is, if the document was written by a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// The offending text, at most 80 characters of it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// What to write instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// A second place that belongs to the problem, such as the first of two equal keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<Place>,
}

impl Diagnostic {
    /// An error without a place.
    #[must_use]
    pub fn error(code: DiagnosticCode, message: impl AsRef<str>) -> Diagnostic {
        Diagnostic {
            severity: Severity::Error,
            code,
            message: mask(message.as_ref()).into_owned(),
            field: String::new(),
            place: None,
            text: String::new(),
            help: None,
            other: None,
        }
    }

    /// A warning without a place.
    #[must_use]
    pub fn warning(code: DiagnosticCode, message: impl AsRef<str>) -> Diagnostic {
        Diagnostic { severity: Severity::Warning, ..Diagnostic::error(code, message) }
    }

    /// With what to write instead.
    #[must_use]
    pub fn help(mut self, help: impl AsRef<str>) -> Diagnostic {
        self.help = Some(mask(help.as_ref()).into_owned());
        self
    }

    /// With its place and the text there.
    #[must_use]
    pub fn at(mut self, sources: &Sources, span: Span) -> Diagnostic {
        let place = sources.place(span);
        let covered = sources.get(span.source).and_then(|s| s.text.get(place.offset..place.offset + place.bytes));
        self.text = mask(covered.unwrap_or_default()).chars().take(80).collect();
        self.place = Some(place);
        self
    }

    /// With the field.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Diagnostic {
        self.field = mask(&field.into()).into_owned();
        self
    }

    /// With a second place.
    #[must_use]
    pub fn other(mut self, sources: &Sources, span: Span) -> Diagnostic {
        self.other = Some(sources.place(span));
        self
    }

    /// Whether the document is refused for it.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// Problems in the order of the text: the file first, then the options.
pub(crate) fn sort(diagnostics: &mut [Diagnostic], sources: &Sources) {
    diagnostics.sort_by_key(|d| {
        let place = d.place.as_ref();
        let source = place.and_then(|p| sources.position(&p.source));
        (source, place.map(|p| p.offset), d.severity)
    });
}
