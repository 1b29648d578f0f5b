//! What goes wrong, for a person: what happened, why, and what to do next; and
//! the exit code of each kind.
//!
//! | code | |
//! |---|---|
//! | 0 | done; `run`: succeeded, or detached |
//! | 1 | refused or not possible |
//! | 2 | wrong use, or a document that is refused |
//! | 125 | the platform's own fault |
//! | other | `run`: the job's own code; 75 requeue, 124 time limit, 128 + n signal |

use crate::render::style::{Style, Styled};
use aviflow_api::rest::ApiError;
use std::fmt::Write as _;

/// Refused, or not possible.
pub const REFUSED: u8 = 1;
/// Wrong use, or a document that is refused.
pub const USAGE: u8 = 2;
/// The platform's own fault.
pub const PLATFORM: u8 = 125;

/// Why a command ends without having done what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// What happened, a lowercase fragment; may be empty if `rendered` says everything.
    pub message: String,
    /// Why, one line each.
    pub why: Vec<String>,
    /// What to do next.
    pub help: Option<String>,
    /// Diagnostics of a document, rendered already.
    pub rendered: String,
}

/// What commands return.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// Something was refused or is not possible.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { code: REFUSED, message: message.into(), why: Vec::new(), help: None, rendered: String::new() }
    }

    /// Something was used in a wrong way.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { code: USAGE, ..Failure::new(message) }
    }

    /// The platform failed.
    pub fn platform(message: impl Into<String>) -> Failure {
        Failure { code: PLATFORM, ..Failure::new(message) }
    }

    /// A document was refused, with its problems as a person reads them.
    pub fn document(rendered: String) -> Failure {
        Failure { rendered, ..Failure::usage("") }
    }

    /// With a line of why.
    pub fn why(mut self, why: impl Into<String>) -> Failure {
        self.why.push(why.into());
        self
    }

    /// With what to do next.
    pub fn help(mut self, help: impl Into<String>) -> Failure {
        self.help = Some(help.into());
        self
    }

    /// With another exit code.
    pub fn code(mut self, code: u8) -> Failure {
        self.code = code;
        self
    }

    /// What the server said. `status` is HTTP's.
    pub fn from_server(status: u16, error: ApiError) -> Failure {
        let code = match status {
            400 | 422 => USAGE,
            500.. => PLATFORM,
            _ => REFUSED,
        };
        Failure { help: error.help, ..Failure::new(error.message).code(code) }
    }

    /// The text for a person, with its newline.
    pub fn render(&self, style: Style) -> String {
        let mut text = String::new();
        if !self.rendered.is_empty() {
            text.push_str(self.rendered.trim_end());
            text.push('\n');
        }
        if !self.message.is_empty() {
            let _ = writeln!(text, "{} {}", "error:".style(style, "1;31"), self.message);
        }
        for why in &self.why {
            let _ = writeln!(text, "  {why}");
        }
        if let Some(help) = &self.help {
            let _ = writeln!(text, "{} {help}", "help:".style(style, "36"));
        }
        text
    }
}

/// Says what was being done when the system refused.
pub trait While<T> {
    /// With what was being done, such as `/a/b cannot be read`.
    fn or_fail(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: std::fmt::Display> While<T> for std::result::Result<T, E> {
    fn or_fail(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Failure::new(format!("{}: {e}", what())))
    }
}

/// The code of a process that ended with `code`, as a shell could give it.
pub fn exit_code(code: i32) -> u8 {
    // Only the low byte reaches the parent; a failure must never look like success there.
    match u8::try_from(code & 0xff) {
        Ok(0) if code != 0 => 1,
        Ok(low) => low,
        Err(_) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(message: &str, help: Option<&str>) -> ApiError {
        ApiError { code: "x".into(), message: message.into(), help: help.map(str::to_owned) }
    }

    #[test]
    fn each_kind_has_its_exit_code() {
        let cases = [
            (400, USAGE),
            (401, REFUSED),
            (404, REFUSED),
            (409, REFUSED),
            (422, USAGE),
            (500, PLATFORM),
            (503, PLATFORM),
        ];
        for (status, code) in cases {
            assert_eq!(Failure::from_server(status, api("m", None)).code, code, "{status}");
        }
    }

    #[test]
    fn a_jobs_code_is_passed_on_and_a_failure_is_never_a_success() {
        let cases = [(0, 0), (1, 1), (75, 75), (137, 137), (256, 1), (-1, 255), (512, 1)];
        for (code, exit) in cases {
            assert_eq!(exit_code(code), exit, "{code}");
        }
    }

    #[test]
    fn an_error_says_what_why_and_what_next() {
        let failure = Failure::new("no job is named `tiny`")
            .why("similar: tiny-gpt, tiny-gpt-2")
            .help("`aviflow ls --all` lists all jobs");
        insta::assert_snapshot!(failure.render(Style::plain()), @r"
        error: no job is named `tiny`
          similar: tiny-gpt, tiny-gpt-2
        help: `aviflow ls --all` lists all jobs
        ");
    }
}
