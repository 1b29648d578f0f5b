//! Documents as people write them, good and bad: what they become, and what is said about them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admin;
mod bad;
mod cases;
mod environments;
mod good;
mod options;
mod pool;
mod roundtrip;
mod schema;

use aviflow_api::diagnostic::Diagnostic;
use aviflow_api::file::{Defaults, Document};
use aviflow_api::render::{Style, render};
use aviflow_api::source::Sources;

/// What is said about a text: everything, drawn as in a file.
fn said(bytes: &[u8]) -> (Vec<Diagnostic>, String) {
    let (sources, diagnostics) = match Document::parse("job.yaml", bytes) {
        Err((sources, diagnostics)) => (sources, diagnostics),
        Ok(document) => {
            let diagnostics = match document.read(&Defaults::default()) {
                Ok(parsed) => parsed.warnings,
                Err(diagnostics) => diagnostics,
            };
            (document.sources().clone(), diagnostics)
        }
    };
    let drawn = draw(&diagnostics, &sources);
    (diagnostics, drawn)
}

fn draw(diagnostics: &[Diagnostic], sources: &Sources) -> String {
    render(diagnostics, sources, Style::Plain)
}
