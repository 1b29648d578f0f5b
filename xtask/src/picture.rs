//! `cargo xtask picture`: a session at a terminal as an SVG.
//!
//! The session is run in a pseudo-terminal by `script` of util-linux and
//! captured with its colours and cursor movements. Nothing is drawn that was
//! not printed.

mod screen;
mod svg;

use crate::control::{self, Control, Profile};
use crate::proc::{command, must, target, which};
use anyhow::{Context as _, Result, bail};

/// Columns of the terminal.
const COLUMNS: usize = 100;

/// Rows of the terminal; the picture has as many as were used.
const ROWS: usize = 50;

/// Where the picture is.
const PICTURE: &str = "docs/images/demo.svg";

/// What is typed.
const SESSION: [&str; 3] = ["aviflow run examples/tiny-gpt", "aviflow ls", "aviflow usage --by state --since 1h"];

/// Runs the session and draws it.
pub fn run() -> Result<u8> {
    if which("script").is_none() {
        bail!("this machine lacks `script`, which is in Debian's package bsdutils");
    }
    let control = Control::fresh(control::build(Profile::Dev)?, &control::tested_home()?)?;
    control.start(2)?;
    let outcome = draw(&control);
    control.stop()?;
    outcome.map(|()| 0)
}

fn draw(control: &Control) -> Result<()> {
    let folder = target()?.join("picture");
    std::fs::create_dir_all(&folder)?;
    let (typed, capture) = (folder.join("session.sh"), folder.join("capture"));
    let mut script = format!("stty cols {COLUMNS} rows {ROWS}\nPATH={}:$PATH\n", beside(control)?);
    for line in SESSION {
        script += &format!("printf '\\033[1;32m$\\033[0m %s\\n' '{line}'\n{line}\necho\n");
    }
    std::fs::write(&typed, script)?;
    let bash = format!("bash {}", typed.display());
    let mut session = command("script");
    session.args(["--quiet", "--flush", "--return", "--log-out"]).arg(&capture).args(["--command", &bash]);
    session.env("AVIFLOW_HOME", &control.home).env("TERM", "xterm-256color");
    session.env_remove("AVIFLOW_CONTEXT").env_remove("NO_COLOR");
    must(&mut session)?;
    let bytes = std::fs::read(&capture)?;
    let mut screen = screen::Screen::new(COLUMNS);
    screen.feed(session_only(&String::from_utf8_lossy(&bytes)));
    std::fs::create_dir_all("docs/images")?;
    std::fs::write(PICTURE, svg::draw(&screen.rows(), COLUMNS, "a training with aviflow"))?;
    println!("wrote {PICTURE}");
    Ok(())
}

/// Without the lines that `script` itself writes around a session.
fn session_only(capture: &str) -> &str {
    let begun = match capture.strip_prefix("Script started") {
        Some(rest) => rest.split_once('\n').map_or("", |(_, rest)| rest),
        None => capture,
    };
    begun.rsplit_once("\nScript done").map_or(begun, |(session, _)| session)
}

fn beside(control: &Control) -> Result<String> {
    let folder = control.binary.parent().context("the binary is in no folder")?;
    Ok(folder.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_session_is_drawn() {
        assert_eq!(session_only("Script started on x\n$ a\r\nb\r\n\nScript done on y\n"), "$ a\r\nb\r\n");
        assert_eq!(session_only("$ a\r\n"), "$ a\r\n");
    }
}
