//! A terminal's screen, as far as the output of a command line needs one.
//!
//! The screen has no bottom: lines never scroll away, so a picture can show
//! all of a session.

/// How a cell looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// The colour of the text, as `0xRRGGBB`; none is the terminal's own.
    pub colour: Option<u32>,
    /// Bold.
    pub bold: bool,
    /// Dim.
    pub dim: bool,
    /// Italic.
    pub italic: bool,
    /// Underlined.
    pub underline: bool,
}

/// A character with its style.
pub type Cell = (char, Style);

/// The colours 0 to 15 of a terminal, on a dark ground.
const PALETTE: [u32; 16] = [
    0x3b_4252, 0xe0_6c75, 0x98_c379, 0xe5_c07b, 0x61_afef, 0xc6_78dd, 0x56_b6c2, 0xd8_dee9, 0x7f_8896, 0xff_7b85,
    0xb5_e890, 0xff_d68a, 0x82_c4ff, 0xdd_9bf0, 0x7f_dbe5, 0xff_ffff,
];

/// The screen.
pub struct Screen {
    columns: usize,
    rows: Vec<Vec<Cell>>,
    row: usize,
    column: usize,
    style: Style,
}

impl Screen {
    /// An empty screen.
    pub fn new(columns: usize) -> Screen {
        Screen { columns, rows: vec![Vec::new()], row: 0, column: 0, style: Style::default() }
    }

    /// Takes output.
    pub fn feed(&mut self, text: &str) {
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '\n' => self.go(self.row + 1, 0),
                '\r' => self.column = 0,
                '\u{8}' => self.column = self.column.saturating_sub(1),
                '\t' => self.column = (self.column / 8 + 1) * 8,
                '\u{1b}' => match rest.next() {
                    Some('[') => {
                        let mut arguments = String::new();
                        let end = loop {
                            match rest.next() {
                                Some(c @ ' '..='?') => arguments.push(c),
                                other => break other,
                            }
                        };
                        self.control(end.unwrap_or('m'), &arguments);
                    }
                    // A title or a link: its text ends with a bell or `ESC \`.
                    Some(']') => while rest.next().is_some_and(|c| c != '\u{7}' && c != '\\') {},
                    Some(_) | None => {}
                },
                c if c.is_control() => {}
                c => self.put(c),
            }
        }
    }

    /// The lines, without blank ends.
    pub fn rows(&self) -> Vec<Vec<Cell>> {
        let mut rows = self.rows.clone();
        for row in &mut rows {
            while row.last().is_some_and(|(c, _)| *c == ' ') {
                row.pop();
            }
        }
        while rows.last().is_some_and(Vec::is_empty) {
            rows.pop();
        }
        rows
    }

    fn go(&mut self, row: usize, column: usize) {
        self.row = row;
        self.column = column;
        while self.rows.len() <= row {
            self.rows.push(Vec::new());
        }
    }

    fn put(&mut self, c: char) {
        if self.column >= self.columns {
            self.go(self.row + 1, 0);
        }
        let line = &mut self.rows[self.row];
        while line.len() <= self.column {
            line.push((' ', Style::default()));
        }
        line[self.column] = (c, self.style);
        self.column += 1;
    }

    fn control(&mut self, end: char, arguments: &str) {
        let numbers: Vec<usize> = arguments.split([';', ':']).map(|n| n.parse().unwrap_or(0)).collect();
        let first = numbers.first().copied().unwrap_or(0);
        let many = first.max(1);
        match end {
            'm' => self.graphics(&numbers),
            'A' => self.row = self.row.saturating_sub(many),
            'B' => self.go(self.row + many, self.column),
            'C' => self.column += many,
            'D' => self.column = self.column.saturating_sub(many),
            'G' => self.column = many - 1,
            'F' => self.go(self.row.saturating_sub(many), 0),
            'K' if first == 0 => self.rows[self.row].truncate(self.column),
            'K' => self.rows[self.row].clear(),
            'J' if first == 0 => {
                self.rows[self.row].truncate(self.column);
                self.rows.truncate(self.row + 1);
            }
            // Modes of the terminal, such as the cursor's visibility.
            _ => {}
        }
    }

    fn graphics(&mut self, numbers: &[usize]) {
        let mut rest = numbers.iter().copied();
        while let Some(number) = rest.next() {
            match number {
                0 => self.style = Style::default(),
                1 => self.style.bold = true,
                2 => self.style.dim = true,
                3 => self.style.italic = true,
                4 => self.style.underline = true,
                22 => (self.style.bold, self.style.dim) = (false, false),
                23 => self.style.italic = false,
                24 => self.style.underline = false,
                30..=37 => self.style.colour = Some(PALETTE[number - 30]),
                90..=97 => self.style.colour = Some(PALETTE[number - 90 + 8]),
                39 => self.style.colour = None,
                38 => match rest.next() {
                    Some(5) => self.style.colour = rest.next().map(indexed),
                    Some(2) => {
                        let rgb = [rest.next(), rest.next(), rest.next()].map(|part| part.unwrap_or(0) as u32 & 0xff);
                        self.style.colour = Some(rgb[0] << 16 | rgb[1] << 8 | rgb[2]);
                    }
                    Some(_) | None => {}
                },
                _ => {}
            }
        }
    }
}

/// A colour of the 256.
fn indexed(number: usize) -> u32 {
    match number {
        0..=15 => PALETTE[number],
        16..=231 => {
            let level = |n: usize| if n == 0 { 0 } else { 55 + 40 * n as u32 };
            let cube = number - 16;
            level(cube / 36) << 16 | level(cube / 6 % 6) << 8 | level(cube % 6)
        }
        _ => {
            let grey = 8 + 10 * (number.min(255) as u32 - 232);
            grey << 16 | grey << 8 | grey
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(output: &str, expected: &[&str]) {
        let mut screen = Screen::new(10);
        screen.feed(output);
        let rows: Vec<String> = screen.rows().iter().map(|row| row.iter().map(|(c, _)| *c).collect()).collect();
        assert_eq!(rows, expected, "{output:?}");
    }

    #[test]
    fn the_screen_shows_what_a_terminal_shows() {
        check("one\r\ntwo\r\n", &["one", "two"]);
        check("50%\r100%", &["100%"]);
        check("old\r\x1b[Knew", &["new"]);
        check("a\r\nb\r\n\x1b[2A\x1b[Jc", &["c"]);
        check("a\r\nb\r\n\x1b[1Ac\r\n", &["a", "c"]);
        check("0123456789ab", &["0123456789", "ab"]);
        check("\x1b]0;title\x07x\x1b[?25l", &["x"]);
    }

    #[test]
    fn colours_are_kept() {
        let mut screen = Screen::new(10);
        screen.feed("\x1b[1;32ma\x1b[0mb\x1b[38;5;196mc\x1b[38;2;1;2;3md");
        let row = &screen.rows()[0];
        assert_eq!(row[0].1, Style { bold: true, colour: Some(PALETTE[2]), ..Style::default() });
        assert_eq!(row[1].1, Style::default());
        assert_eq!(row[2].1.colour, Some(0xff_0000));
        assert_eq!(row[3].1.colour, Some(0x01_0203));
    }
}
