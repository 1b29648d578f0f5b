//! Lines of comma-separated values, as RFC 4180 has them, with the header's names.

use crate::error::{Error, Result};

/// The rows of a file below its header.
pub(super) struct Rows<'a> {
    file: &'a str,
    lines: std::iter::Enumerate<std::str::Lines<'a>>,
    names: Vec<String>,
}

/// One row.
pub(super) struct Row<'a> {
    pub file: &'a str,
    /// From 1.
    pub line: u32,
    /// In the order of the header.
    pub cells: Vec<String>,
}

impl<'a> Rows<'a> {
    /// Reads the header.
    pub fn new(file: &'a str, text: &'a str) -> Result<Rows<'a>> {
        let mut lines = text.trim_start_matches('\u{feff}').lines().enumerate();
        let names = match lines.by_ref().find(|(_, line)| !line.trim().is_empty()) {
            Some((number, line)) => cells(line).map_err(|what| at(file, number, what))?,
            None => {
                let help = "a trace begins with a header and has one job a line below it".to_owned();
                return Err(Error::File { file: file.to_owned(), what: "the file is empty".to_owned(), help });
            }
        };
        Ok(Rows { file, lines, names: names.iter().map(|n| n.trim().to_owned()).collect() })
    }

    /// The header's names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The indices of columns that must be there.
    pub fn columns<const N: usize>(&self, wanted: [&str; N], format: &str) -> Result<[usize; N]> {
        let mut out = [0; N];
        let mut missing = Vec::new();
        for (index, name) in out.iter_mut().zip(wanted) {
            match self.names.iter().position(|n| n == name) {
                Some(at) => *index = at,
                None => missing.push(name),
            }
        }
        if missing.is_empty() {
            return Ok(out);
        }
        let what = format!("the header lacks {} of the format `{format}`", missing.join(", "));
        let help = format!(
            "it has {}; `--format` says how a trace is written: kalos, philly or aviflow",
            self.names.join(", ")
        );
        Err(Error::Line { file: self.file.to_owned(), line: 1, what, help })
    }
}

impl<'a> Iterator for Rows<'a> {
    type Item = Result<Row<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (number, line) = self.lines.by_ref().find(|(_, line)| !line.trim().is_empty())?;
        let (file, names) = (self.file, self.names.len());
        let row = cells(line).and_then(|cells| match cells.len() {
            n if n == names => Ok(cells),
            n => Err(format!("{n} cells where the header has {names}")),
        });
        let line = u32::try_from(number + 1).unwrap_or(u32::MAX);
        Some(row.map(|cells| Row { file, line, cells }).map_err(|what| at(file, number, what)))
    }
}

fn at(file: &str, number: usize, what: String) -> Error {
    let line = u32::try_from(number + 1).unwrap_or(u32::MAX);
    let help = "cells are apart by commas; a cell with a comma stands in \"…\"".to_owned();
    Error::Line { file: file.to_owned(), line, what, help }
}

/// The cells of a line. A quoted cell may hold commas and doubled quotes, but no line break.
fn cells(line: &str) -> std::result::Result<Vec<String>, String> {
    if !line.contains('"') {
        return Ok(line.split(',').map(|cell| cell.trim().to_owned()).collect());
    }
    let mut out = Vec::new();
    let mut rest = line;
    loop {
        let (cell, after) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => quoted_cell(quoted)?,
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                (rest[..end].trim().to_owned(), &rest[end..])
            }
        };
        out.push(cell);
        let after = after.trim_start();
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(out),
            None => return Err(format!("`{after}` after a quoted cell")),
        }
    }
}

fn quoted_cell(quoted: &str) -> std::result::Result<(String, &str), String> {
    let mut cell = String::new();
    let mut rest = quoted;
    loop {
        let Some((text, after)) = rest.split_once('"') else {
            return Err("a quoted cell does not end on its line".to_owned());
        };
        cell.push_str(text);
        match after.strip_prefix('"') {
            Some(more) => {
                cell.push('"');
                rest = more;
            }
            None => return Ok((cell, after)),
        }
    }
}

/// A cell as it is written.
pub(super) fn quote(cell: &str) -> String {
    if cell.contains([',', '"', '\n']) || cell != cell.trim() {
        format!("\"{}\"", cell.replace('"', "\"\"").replace('\n', " "))
    } else {
        cell.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_what_was_quoted() {
        for list in [vec!["a", "b"], vec!["a,b", ""], vec!["say \"x\"", " a "], vec![""]] {
            let line: Vec<String> = list.iter().map(|c| quote(c)).collect();
            assert_eq!(cells(&line.join(",")), Ok(list.iter().map(|c| (*c).to_owned()).collect()), "{line:?}");
        }
        assert!(cells("\"open,1").is_err());
        assert!(cells("\"a\"b,1").is_err());
    }
}
