//! The last lines of a rank.

use super::io::{LAST_LINES, tail_line};
use std::collections::VecDeque;

/// Lines that are kept to find out why a rank ended: the tracebacks of all processes of a node, behind one pipe.
const KEPT_LINES: usize = 400;

/// Bytes of them.
const KEPT_BYTES: usize = 128 << 10;

/// Lines as they came, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl Tail {
    pub(super) fn push(&mut self, text: &str) {
        let line = tail_line(text);
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.lines.len() > KEPT_LINES || self.bytes > KEPT_BYTES && self.lines.len() > LAST_LINES {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.len());
        }
    }

    /// All that are kept.
    pub(super) fn all(&self) -> Vec<&str> {
        self.lines.iter().map(String::as_str).collect()
    }

    /// The last ones, with those of an error file after them, as many as a report has.
    pub(super) fn report(mut self, error: &[String]) -> Vec<String> {
        let of_error = error.iter().map(|line| tail_line(line));
        let mut lines: Vec<String> = self.lines.drain(self.lines.len().saturating_sub(LAST_LINES)..).collect();
        lines.extend(of_error);
        lines.drain(..lines.len().saturating_sub(LAST_LINES));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_many_lines_nor_long_ones_are_too_many() {
        let mut tail = Tail::default();
        for n in 0..10_000 {
            tail.push(&n.to_string());
        }
        assert_eq!((tail.all().len(), tail.all()[0]), (KEPT_LINES, "9600"));
        for _ in 0..10_000 {
            tail.push(&"x".repeat(1 << 20));
        }
        assert!(tail.bytes <= KEPT_BYTES);
        assert_eq!(tail.bytes, tail.all().iter().map(|line| line.len()).sum::<usize>());
        let report = tail.report(&["why".to_owned()]);
        assert_eq!((report.len(), report[LAST_LINES - 1].as_str()), (LAST_LINES, "why"));
    }
}
