//! Colours, or none.

/// Whether there are colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    colour: bool,
}

impl Style {
    /// No colours.
    pub const fn plain() -> Style {
        Style { colour: false }
    }

    /// Colours.
    pub const fn coloured() -> Style {
        Style { colour: true }
    }

    /// Whether there are colours.
    pub fn is_coloured(self) -> bool {
        self.colour
    }
}

/// Text in a colour.
pub trait Styled {
    /// In the colour of an ANSI code such as `1;31`, if there are colours.
    fn style(&self, style: Style, code: &str) -> String;
}

impl Styled for str {
    fn style(&self, style: Style, code: &str) -> String {
        if style.colour && !self.is_empty() { format!("\x1b[{code}m{self}\x1b[0m") } else { self.to_owned() }
    }
}

/// The colour of a phase.
pub fn phase(name: &str) -> &'static str {
    match name {
        "Running" | "Succeeded" => "32",
        "Starting" | "Suspending" | "Stopping" => "36",
        "Queued" => "33",
        "Failed" => "31",
        _ => "2",
    }
}

/// The colour of a rank's prefix; neighbours differ.
pub fn rank(rank: u32) -> &'static str {
    const COLOURS: [&str; 6] = ["36", "33", "35", "32", "34", "96"];
    COLOURS[rank as usize % COLOURS.len()]
}

/// The text without control characters, so that a job's output cannot move the cursor or set the
/// title of somebody's terminal. Tabs and colours (SGR sequences) stay; colours go where there are none.
pub fn clean(text: &str, style: Style) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    let mut open = false;
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                let mut sequence = String::from(c);
                match chars.peek() {
                    Some('[') => {
                        // CSI: parameters up to a final byte in @..~.
                        for next in chars.by_ref() {
                            sequence.push(next);
                            if sequence.len() > 2 && ('@'..='~').contains(&next) {
                                break;
                            }
                        }
                        if style.colour && sequence.ends_with('m') {
                            open = sequence != "\x1b[0m" && sequence != "\x1b[m";
                            out.push_str(&sequence);
                        }
                    }
                    Some(']') => {
                        // OSC: up to BEL or ST.
                        while let Some(next) = chars.next() {
                            if next == '\x07' {
                                break;
                            }
                            if next == '\x1b' {
                                chars.next();
                                break;
                            }
                        }
                    }
                    _ => {
                        chars.next();
                    }
                }
            }
            '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    if open {
        out.push_str("\x1b[0m");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_jobs_cannot_move_the_cursor() {
        let cases = [
            ("plain\ttext", "plain\ttext", "plain\ttext"),
            ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m"),
            ("\x1b[31mred", "red", "\x1b[31mred\x1b[0m"),
            ("\x1b[2Jgone\x1b[1;1H", "gone", "gone"),
            ("\x1b]0;title\x07text", "text", "text"),
            ("a\rb\x08c\x1b", "abc", "abc"),
        ];
        for (text, plain, coloured) in cases {
            assert_eq!(clean(text, Style::plain()), plain, "{text:?}");
            assert_eq!(clean(text, Style::coloured()), coloured, "{text:?}");
        }
    }
}
