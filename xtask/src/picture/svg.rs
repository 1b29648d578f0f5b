//! A screen as an SVG that needs no font of its own: each run of characters is
//! fitted to its columns.

use super::screen::{Cell, Style};
use std::fmt::Write as _;

const CELL: f64 = 8.4;
const LINE: f64 = 19.0;
const MARGIN: f64 = 18.0;
const BAR: f64 = 34.0;

/// Draws rows of cells.
pub fn draw(rows: &[Vec<Cell>], columns: usize, title: &str) -> String {
    let width = columns as f64 * CELL + 2.0 * MARGIN;
    let height = rows.len() as f64 * LINE + BAR + MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         role=\"img\" aria-label=\"{title}\">\n<title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1e222a\"/>\n",
        title = escaped(title)
    );
    for (number, colour) in ["#e06c75", "#e5c07b", "#98c379"].iter().enumerate() {
        let x = MARGIN + 4.0 + 18.0 * number as f64;
        let _ = writeln!(out, "<circle cx=\"{x:.0}\" cy=\"17\" r=\"5.5\" fill=\"{colour}\"/>");
    }
    out.push_str("<g font-family=\"ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace\" font-size=\"14\">\n");
    for (number, row) in rows.iter().enumerate() {
        let y = BAR + LINE * (number as f64 + 0.72);
        for (from, run) in runs(row) {
            let text: String = run.iter().map(|(c, _)| *c).collect();
            if text.trim().is_empty() {
                continue;
            }
            let _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{y:.1}\" textLength=\"{:.1}\" lengthAdjust=\"spacingAndGlyphs\" \
                 xml:space=\"preserve\"{}>{}</text>",
                MARGIN + from as f64 * CELL,
                run.len() as f64 * CELL,
                looks(run[0].1),
                escaped(&text)
            );
        }
    }
    out.push_str("</g>\n</svg>\n");
    out
}

/// Pieces of one style, with their columns.
fn runs(row: &[Cell]) -> Vec<(usize, &[Cell])> {
    let mut runs = Vec::new();
    let mut from = 0;
    for at in 1..=row.len() {
        if at == row.len() || row[at].1 != row[from].1 {
            runs.push((from, &row[from..at]));
            from = at;
        }
    }
    runs
}

fn looks(style: Style) -> String {
    let mut out = format!(" fill=\"#{:06x}\"", style.colour.unwrap_or(0xd8_dee9));
    for (set, attribute) in [
        (style.bold, " font-weight=\"bold\""),
        (style.dim, " opacity=\"0.6\""),
        (style.italic, " font-style=\"italic\""),
        (style.underline, " text-decoration=\"underline\""),
    ] {
        if set {
            out.push_str(attribute);
        }
    }
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_one_style() {
        let bold = Style { bold: true, ..Style::default() };
        let row = [('a', bold), ('b', bold), ('<', Style::default())];
        assert_eq!(runs(&row).iter().map(|(from, run)| (*from, run.len())).collect::<Vec<_>>(), [(0, 2), (2, 1)]);
        let svg = draw(&[row.to_vec()], 10, "demo");
        assert!(svg.contains("font-weight=\"bold\">ab</text>") && svg.contains(">&lt;</text>"), "{svg}");
    }
}
