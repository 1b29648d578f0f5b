//! Tables for people: a header in upper case, columns as wide as they need, no boxes.

use super::style::{Style, Styled};
use unicode_width::UnicodeWidthStr;

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A cell.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    colour: &'static str,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell { text: text.into(), colour: "" }
    }
}

impl Cell {
    /// A cell in a colour, an ANSI code.
    pub fn coloured(text: impl Into<String>, colour: &'static str) -> Cell {
        Cell { text: text.into(), colour }
    }
}

/// A table under construction.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(columns: &[(&'static str, Align)]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The text. With a width, the last column is cut to fit, as the only one that may be long.
    pub fn render(&self, width: Option<usize>, style: Style) -> String {
        // A column that is empty in every row says nothing.
        let used: Vec<usize> = (0..self.columns.len())
            .filter(|&c| self.rows.is_empty() || self.rows.iter().any(|r| !r[c].text.is_empty()))
            .collect();
        let widths: Vec<usize> = used
            .iter()
            .map(|&c| self.rows.iter().map(|r| r[c].text.width()).chain([self.columns[c].0.width()]).max().unwrap_or(0))
            .collect();
        let header: Vec<Cell> = used.iter().map(|&c| Cell::coloured(self.columns[c].0.to_uppercase(), "2")).collect();
        let mut out = String::new();
        self.line(&header, &used, &widths, width, style, &mut out);
        for row in &self.rows {
            let cells: Vec<Cell> = used.iter().map(|&c| row[c].clone()).collect();
            self.line(&cells, &used, &widths, width, style, &mut out);
        }
        out
    }

    fn line(
        &self,
        cells: &[Cell],
        used: &[usize],
        widths: &[usize],
        width: Option<usize>,
        style: Style,
        out: &mut String,
    ) {
        let mut at = 0;
        let mut line = String::new();
        for (i, cell) in cells.iter().enumerate() {
            let last = i + 1 == cells.len();
            let right = self.columns[used[i]].1 == Align::Right;
            let text = match width {
                Some(width) if last && !right => cut(&cell.text, width.saturating_sub(at).max(8)),
                _ => cell.text.clone(),
            };
            let pad = widths[i].saturating_sub(text.width());
            let text_styled = if cell.colour.is_empty() { text } else { text.style(style, cell.colour) };
            if right {
                line.push_str(&" ".repeat(pad));
                line.push_str(&text_styled);
            } else {
                line.push_str(&text_styled);
                if !last {
                    line.push_str(&" ".repeat(pad));
                }
            }
            if !last {
                line.push_str("  ");
            }
            at += widths[i] + 2;
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

/// The text in at most so many columns, with `…` where something is missing.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    for c in text.chars() {
        if out.width() + unicode_width::UnicodeWidthChar::width(c).unwrap_or(0) + 1 > width {
            break;
        }
        out.push(c);
    }
    out.push('…');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table =
            Table::new(&[("job", Align::Left), ("gpus", Align::Right), ("note", Align::Left), ("why", Align::Left)]);
        table.row(["a".into(), "8".into(), "".into(), "waits for a node with 8 GPUs".into()]);
        table.row(["名前".into(), "1,024".into(), "".into(), "-".into()]);
        table
    }

    #[test]
    fn numbers_are_right_aligned_and_empty_columns_left_out() {
        insta::assert_snapshot!(sample().render(None, Style::plain()), @r"
        JOB    GPUS  WHY
        a         8  waits for a node with 8 GPUs
        名前  1,024  -
        ");
    }

    #[test]
    fn a_terminal_gets_no_line_that_is_too_wide() {
        let text = sample().render(Some(30), Style::plain());
        assert!(text.lines().all(|l| l.width() <= 30), "{text}");
        assert!(text.contains("waits for a node…"), "{text}");
    }
}
