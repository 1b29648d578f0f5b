//! `cargo xtask picture`: a terminal's captured output as an SVG.
//!
//! The capture is what `script -qefc COMMAND CAPTURE` wrote: real output, with
//! its colours and cursor movements. Nothing is drawn that was not there.

mod screen;
mod svg;

use anyhow::{Context as _, Result};
use std::path::Path;

/// Columns of the picture.
const COLUMNS: usize = 100;

/// Draws a capture.
pub fn run(capture: &Path, svg: &Path) -> Result<u8> {
    let bytes = std::fs::read(capture).with_context(|| format!("cannot read {}", capture.display()))?;
    let mut screen = screen::Screen::new(COLUMNS);
    screen.feed(&String::from_utf8_lossy(&bytes));
    let title = capture.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let drawn = svg::draw(&screen.rows(), COLUMNS, &title);
    if let Some(folder) = svg.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(svg, drawn).with_context(|| format!("cannot write {}", svg.display()))?;
    println!("wrote {}", svg.display());
    Ok(0)
}
