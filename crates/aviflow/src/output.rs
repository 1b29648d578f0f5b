//! Where output goes: a terminal or not, its width, colours, and the form that was asked for.

use crate::cli::{ColorChoice, Format};
use crate::error::Result;
use crate::render::View;
use crate::render::style::Style;
use aviflow_api::yaml::to_yaml;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

/// What is known of standard output and standard error.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Standard output's colours.
    pub style: Style,
    /// Standard error's colours.
    pub error_style: Style,
    /// Whether standard output is a terminal.
    pub terminal: bool,
}

impl Output {
    /// Looks at the streams and the environment.
    pub fn new(choice: ColorChoice) -> Output {
        let dumb = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
        let style = |terminal: bool| match choice {
            ColorChoice::Always => Style::coloured(),
            ColorChoice::Auto if terminal && !dumb => Style::coloured(),
            ColorChoice::Auto | ColorChoice::Never => Style::plain(),
        };
        let terminal = std::io::stdout().is_terminal();
        Output { style: style(terminal), error_style: style(std::io::stderr().is_terminal()), terminal }
    }

    /// Lines of the terminal; 24 where it does not say.
    pub fn rows(&self) -> usize {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        size.map(|size| usize::from(size.ws_row)).filter(|rows| *rows >= 4).unwrap_or(24)
    }

    /// What renderers need to know.
    pub fn view(&self) -> View {
        let width = self
            .terminal
            .then(|| rustix::termios::tcgetwinsize(std::io::stdout()).ok())
            .flatten()
            .map(|size| usize::from(size.ws_col))
            .filter(|columns| *columns >= 20);
        View { now: now(), width, style: self.style }
    }

    /// Prints an answer in the form that was asked for.
    pub fn answer<T: Serialize>(&self, format: Format, value: &T, table: impl FnOnce(View) -> String) -> Result<()> {
        match format {
            Format::Table => print(&table(self.view())),
            Format::Json | Format::Yaml => print(&machine(format, value)),
        }
        Ok(())
    }
}

/// The value for a program.
pub fn machine<T: Serialize>(format: Format, value: &T) -> String {
    // The REST types are plain data with text keys: they are always JSON.
    let value = serde_json::to_value(value).unwrap_or_default();
    match format {
        Format::Yaml => to_yaml(&value),
        Format::Json | Format::Table => format!("{value:#}\n"),
    }
}

/// Now, in milliseconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Writes to standard output. A reader that went away, such as `head`, ends the program quietly.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

/// Writes a note to standard error, where it is in nobody's way.
pub fn note(text: &str) {
    // Where standard error is closed nobody wants notes.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples;

    /// Programs read these names: they are those of the REST API.
    #[test]
    fn json_and_yaml_have_the_fields_of_the_api() {
        let jobs = vec![samples::queued()];
        insta::assert_snapshot!(machine(Format::Json, &jobs));
        insta::assert_snapshot!(machine(Format::Yaml, &samples::detail(samples::running())));
    }
}
