//! How a document's file form is described: once, as data.
//!
//! [`super::conform`] reads a tree by it, and [`crate::schema`] writes the JSON Schema from it,
//! so what an editor accepts and what the program accepts cannot part.

use crate::diagnostic::DiagnosticCode;
use std::ops::Range;

/// What a value may be.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Text of some form.
    Text(&'static Text),
    /// A whole number, both ends included.
    Whole(u64, u64),
    /// A number greater than this.
    Above(f64),
    /// `true` or `false`.
    Bool,
    /// One of these words, each with what it means.
    Choice(&'static [(&'static str, &'static str)]),
    /// A list of at least so many values, none of them twice.
    List(&'static Shape, usize),
    /// Free keys of some form, and the form of their values.
    Map(&'static Text, &'static Shape),
    /// Mappings of names in each other, as deep as one likes, and such texts or lists of them at the leaves.
    Tree(&'static Text, &'static Shape),
    /// Known keys.
    Object(&'static Object),
    /// One of these, told apart by whether it is one word, a list or a mapping. The last is the canonical form.
    Either(&'static [Shape]),
}

/// Text of some form.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// What it is, with its article, such as `a duration`.
    pub what: &'static str,
    /// The form for editors, an ECMA regular expression; the check decides.
    pub pattern: Option<&'static str>,
    /// Whether a number or `true` is taken by its text, as it was written.
    pub literal: bool,
    /// Most characters. Objects of Kubernetes need a bound on everything: what their rules may cost is
    /// reckoned from it.
    pub most: usize,
    /// What is wrong with a text, if anything.
    pub check: fn(&str) -> Result<(), Fault>,
}

/// What is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind of problem.
    pub code: DiagnosticCode,
    /// The problem.
    pub message: String,
    /// What to write instead.
    pub help: String,
    /// Where in the text, if not everywhere.
    pub range: Option<Range<usize>>,
}

impl Fault {
    /// A text that has not the form it must have.
    pub(crate) fn new(message: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault { code: DiagnosticCode::Malformed, message: message.into(), help: help.into(), range: None }
    }

    /// With another way out.
    pub(crate) fn instead(mut self, help: impl Into<String>) -> Fault {
        self.help = help.into();
        self
    }

    /// With another code.
    pub(crate) fn code(mut self, code: DiagnosticCode) -> Fault {
        self.code = code;
        self
    }
}

/// Known keys.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// What it is, such as `a job`.
    pub what: &'static str,
    /// The keys.
    pub fields: &'static [Field],
    /// What people call a key in other systems, and the key.
    pub synonyms: &'static [(&'static str, &'static str)],
}

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name.
    pub key: &'static str,
    /// What it says, for editors.
    pub doc: &'static str,
    /// What it may be.
    pub shape: Shape,
    /// Whether it must be there.
    pub required: bool,
    /// Examples as JSON.
    pub examples: &'static [&'static str],
    /// The default as JSON, where there is one.
    pub default: Option<&'static str>,
    /// Most entries, if it is a list or a mapping of free keys.
    pub most: usize,
}

impl Object {
    /// A key by its name.
    #[must_use]
    pub fn field(&self, key: &str) -> Option<&'static Field> {
        self.fields.iter().find(|f| f.key == key)
    }
}

impl Shape {
    /// The canonical one of several forms: the last, of which the others are shorthand.
    #[must_use]
    pub fn canonical(&'static self) -> &'static Shape {
        match self {
            Shape::Either(shapes) => shapes.last().map_or(self, Shape::canonical),
            _ => self,
        }
    }

    /// What is expected, for a person.
    #[must_use]
    pub fn expected(&self) -> String {
        match self {
            Shape::Text(text) => text.what.to_owned(),
            Shape::Whole(..) => "a whole number".to_owned(),
            Shape::Above(_) => "a number".to_owned(),
            Shape::Bool => "`true` or `false`".to_owned(),
            Shape::Choice(words) => crate::suggest::one_of(words.iter().map(|w| w.0)),
            Shape::List(of, _) => match of {
                Shape::Object(object) => format!("a list of mappings, each {}", object.what),
                of => format!("a list, each {}", of.expected()),
            },
            Shape::Map(..) => "a mapping of names to values".to_owned(),
            Shape::Tree(..) => "a mapping of names to lists, or to mappings of the same kind".to_owned(),
            Shape::Object(object) => {
                let keys: Vec<&str> = object.fields.iter().map(|f| f.key).collect();
                format!("a mapping with {}", keys.join(", "))
            }
            Shape::Either(shapes) => shapes.iter().map(Shape::expected).collect::<Vec<_>>().join(", or "),
        }
    }
}
