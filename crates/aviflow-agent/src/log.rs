//! The log stream of a worker: from the bytes of its ranks to stamped lines.
//!
//! A line is `<unix_ms> <rank> <o|e|a> <text>\n`: the node's clock, the rank of
//! the gang (or of the worker's first, for the agent's own lines), standard
//! output, standard error or the agent itself. The text is UTF-8 (what is not
//! is replaced) without control characters but tab and escape: colours stay,
//! and a reader strips what it does not want ([`plain`]).
//!
//! `\r` ends a line as `\n` does, so that a progress bar can be followed, but
//! at most one such line per [`BAR_MS`] and stream is kept, and always the last.
//! Lines over [`MAX_TEXT`] bytes are split. What becomes of the lines on the
//! disk is [`crate::spool`]'s part.

use std::borrow::Cow;

/// The longest text of a line, in bytes.
pub const MAX_TEXT: usize = 16 << 10;

/// At the end of a line that was too long and goes on in the next.
pub const SPLIT_MARK: &str = " [line continues]";

/// Between two kept states of a progress bar, in milliseconds.
pub const BAR_MS: u64 = 200;

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// The agent.
    Agent,
}

impl Source {
    /// The letter in the stream.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Source::Out => 'o',
            Source::Err => 'e',
            Source::Agent => 'a',
        }
    }
}

/// A line of the stream, with its newline.
#[must_use]
pub fn format(unix_ms: i64, rank: u32, source: Source, text: &str) -> String {
    format!("{unix_ms} {rank} {} {text}\n", source.letter())
}

/// Splits one stream of bytes into texts of lines.
#[derive(Debug, Default)]
pub struct Splitter {
    /// The beginning of a line.
    partial: Vec<u8>,
    /// A `\r` was the last byte: a `\n` after it is the same end of a line.
    after_return: bool,
    /// The latest state of a progress bar that was not kept yet.
    held: Option<String>,
    kept_at: Option<u64>,
    pushed_at: u64,
}

impl Splitter {
    /// Takes bytes, gives whole lines.
    pub fn push(&mut self, mut bytes: &[u8], now_ms: u64, mut line: impl FnMut(String)) {
        self.pushed_at = now_ms;
        while !bytes.is_empty() {
            if self.after_return {
                self.after_return = false;
                if bytes[0] == b'\n' {
                    bytes = &bytes[1..];
                    self.whole(&mut line);
                    continue;
                }
                self.bar(now_ms, &mut line);
            }
            let room = MAX_TEXT - self.partial.len();
            let end = bytes.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len()).min(room)];
            self.partial.extend_from_slice(part);
            bytes = &bytes[part.len()..];
            match bytes.first() {
                Some(b'\n') => {
                    bytes = &bytes[1..];
                    self.whole(&mut line);
                }
                Some(b'\r') => {
                    bytes = &bytes[1..];
                    self.after_return = true;
                }
                Some(_) => self.split(&mut line),
                None => {}
            }
        }
    }

    /// When [`Splitter::flush`] has something to give, if nothing else comes.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        let waits = self.held.is_some() || self.after_return;
        waits.then_some(self.pushed_at + BAR_MS)
    }

    /// Gives the state of a bar that stands still.
    pub fn flush(&mut self, now_ms: u64, mut line: impl FnMut(String)) {
        if self.due().is_some_and(|due| due <= now_ms) {
            if self.after_return {
                self.after_return = false;
                if let Some(text) = self.take().filter(|text| !text.trim().is_empty()) {
                    self.held = Some(text);
                }
            }
            self.release(now_ms, &mut line);
        }
    }

    /// The stream is at its end: gives all that is left.
    pub fn finish(&mut self, mut line: impl FnMut(String)) {
        let last = if self.partial.is_empty() { None } else { self.take() };
        if self.after_return && last.is_some() {
            self.held = None;
        }
        self.after_return = false;
        for text in self.held.take().into_iter().chain(last) {
            line(text);
        }
    }

    fn whole(&mut self, line: &mut impl FnMut(String)) {
        if let Some(held) = self.held.take() {
            line(held);
        }
        line(self.take().unwrap_or_default());
    }

    fn bar(&mut self, now_ms: u64, line: &mut impl FnMut(String)) {
        // Blanks only clear the bar: they must not hide its last state.
        if let Some(text) = self.take().filter(|text| !text.trim().is_empty()) {
            self.held = Some(text);
        }
        if self.kept_at.is_none_or(|kept| now_ms >= kept + BAR_MS) {
            self.release(now_ms, line);
        }
    }

    fn release(&mut self, now_ms: u64, line: &mut impl FnMut(String)) {
        if let Some(held) = self.held.take() {
            self.kept_at = Some(now_ms);
            line(held);
        }
    }

    /// The first part of a line that is too long, cut between characters.
    fn split(&mut self, line: &mut impl FnMut(String)) {
        let mut cut = self.partial.len();
        while cut > MAX_TEXT - 4 && self.partial[cut - 1] & 0b1100_0000 == 0b1000_0000 {
            cut -= 1;
        }
        if cut < self.partial.len() && self.partial[cut - 1] >= 0b1100_0000 {
            // The character's first byte goes with the rest of it, unless it is whole.
            if std::str::from_utf8(&self.partial[cut - 1..]).is_ok() { cut = self.partial.len() } else { cut -= 1 }
        } else if self.partial[cut - 1] >= 0b1100_0000 {
            cut -= 1;
        } else {
            cut = self.partial.len();
        }
        let rest = self.partial.split_off(cut);
        let text = clean(&self.partial);
        self.partial = rest;
        line(text + SPLIT_MARK);
    }

    /// The line so far; none if it is empty.
    fn take(&mut self) -> Option<String> {
        let text = clean(&self.partial);
        self.partial.clear();
        (!text.is_empty()).then_some(text)
    }
}

/// Bytes as text that is safe in a line of the stream.
fn clean(bytes: &[u8]) -> String {
    if is_plain(bytes) {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    let text = String::from_utf8_lossy(bytes);
    if text.chars().any(unwanted) { text.chars().filter(|c| !unwanted(*c)).collect() } else { text.into_owned() }
}

/// Whether bytes are printable ASCII, as those of most lines are: cheap, and there is nothing to be done with them.
fn is_plain(bytes: &[u8]) -> bool {
    bytes.iter().all(|b| matches!(b, b' '..=b'~'))
}

fn unwanted(c: char) -> bool {
    c.is_control() && c != '\t' && c != '\x1b'
}

/// A text without escape sequences and control characters, for people and for reading progress.
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    if is_plain(text.as_bytes()) || !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            match chars.next() {
                // `ESC [ parameters letter`: colours and movements.
                Some('[') => while chars.next().is_some_and(|c| !('@'..='~').contains(&c)) {},
                // `ESC ] text BEL`: titles and links.
                Some(']') => while chars.next().is_some_and(|c| c != '\x07' && c != '\x1b') {},
                _ => {}
            }
        } else if c == '\t' {
            plain.push(' ');
        } else if !c.is_control() {
            plain.push(c);
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pieces of a stream, each at its time, and the lines that come out; `finish` at the end.
    fn check(pieces: &[(u64, &[u8])], expected: &[&str]) {
        assert_eq!(lines(pieces), expected, "{pieces:?}");
    }

    fn lines(pieces: &[(u64, &[u8])]) -> Vec<String> {
        let mut splitter = Splitter::default();
        let mut lines = Vec::new();
        for (now, piece) in pieces {
            splitter.flush(*now, |l| lines.push(l));
            splitter.push(piece, *now, |l| lines.push(l));
        }
        splitter.finish(|l| lines.push(l));
        lines
    }

    #[test]
    fn lines_end_in_any_way() {
        check(&[(0, b"a\nb\r\n\nc")], &["a", "b", "", "c"]);
        check(&[(0, b"a\r"), (0, b"\nb")], &["a", "b"]);
        check(&[(0, b"half "), (5, b"line\n")], &["half line"]);
    }

    #[test]
    fn a_bar_is_kept_now_and_then_and_at_its_end() {
        check(&[(0, b"\r10%\r20%\r30%"), (50, b"\r40%\n"), (60, b"done\n")], &["10%", "30%", "40%", "done"]);
        check(&[(0, b"10%\r"), (300, b"20%\r"), (310, b"30%\r"), (320, b"40%\r")], &["10%", "40%"]);
        check(&[(0, b"1%\r2%\r"), (100, b"3%\r"), (900, b"")], &["1%", "3%"]);
    }

    #[test]
    fn blanks_over_a_bar_are_no_state_of_it() {
        check(&[(0, b"\r1%\r2%"), (50, b"\r3%\r   \r"), (60, b"a line\n")], &["1%", "3%", "a line"]);
    }

    #[test]
    fn a_bar_that_stands_still_is_shown() {
        let mut splitter = Splitter::default();
        let mut got = Vec::new();
        splitter.push(b"1%\r2%\r", 1000, |l| got.push(l));
        assert_eq!(splitter.due(), Some(1200));
        splitter.flush(1199, |l| got.push(l));
        assert_eq!(got, ["1%"]);
        splitter.flush(1200, |l| got.push(l));
        assert_eq!((got, splitter.due()), (vec!["1%".to_owned(), "2%".to_owned()], None));
    }

    #[test]
    fn what_is_no_text_is_made_text() {
        check(&[(0, b"a\xffb\x07\x00c\td\x1b[31mred\x1b[0m\n")], &["a\u{fffd}bc\td\x1b[31mred\x1b[0m"]);
        assert_eq!(plain("\x1b[1;31mred\x1b[0m\tend\x1b]0;title\x07."), "red end.");
    }

    #[test]
    fn long_lines_are_split_between_characters() {
        for lead in 0..4 {
            let text = "x".repeat(lead) + &"é€𝄞".repeat(4000);
            let got = lines(&[(0, text.as_bytes())]);
            assert!(got.len() > 1);
            let joined: String = got.iter().map(|l| l.strip_suffix(SPLIT_MARK).unwrap_or(l)).collect();
            assert!(joined == text, "lead {lead}");
        }
    }

    proptest! {
        #[test]
        fn nothing_is_lost_however_it_is_cut(text in "[a-zé\n]{0,60}", cuts in prop::collection::vec(0usize..60, 0..6)) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<(u64, &[u8])> = cuts.windows(2).map(|w| (0, &bytes[w[0]..w[1]])).collect();
            let expected: Vec<&str> = text.lines().collect();
            prop_assert_eq!(lines(&pieces), expected);
        }

        #[test]
        fn any_bytes_become_clean_lines(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for line in lines(&[(0, &bytes)]) {
                prop_assert!(!line.contains(unwanted));
            }
        }
    }
}
