//! Rules about any text file.

use super::Offence;

/// The most lines of a source file.
const MOST_LINES: usize = 600;

/// Places of one machine, and hosts of registries. Each is in two parts, so that this file has none of them.
const NEVER: [(&str, &str); 11] = [
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("/opt/", "wheels"),
    ("://crates", ".io"),
    ("static.crates", ".io"),
    ("index.crates", ".io"),
    ("pypi", ".org"),
    ("files.python", "hosted.org"),
    ("registry.npm", "js.org"),
    ("proxy.golang", ".org"),
    ("repo.maven", ".apache.org"),
];

/// Checks one file.
pub fn check(name: &str, text: &str) -> Vec<Offence> {
    let mut offences = Vec::new();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    let source = matches!(extension, "rs" | "py" | "sh") || text.starts_with("#!");
    let written_by_hand = extension != "lock" && extension != "svg" && extension != "snap";
    let lines = text.lines().count();
    if source && lines > MOST_LINES {
        let what = format!("{lines} lines, at most {MOST_LINES}: cut it where a reader would");
        offences.push(Offence::new(name, 0, what));
    }
    if written_by_hand && !text.is_empty() && !text.ends_with('\n') {
        offences.push(Offence::new(name, lines, "the last line has no newline"));
    }
    for (number, line) in text.lines().enumerate() {
        let mut offend = |what: String| offences.push(Offence::new(name, number + 1, what));
        if written_by_hand && line.ends_with([' ', '\t', '\r']) {
            offend("white space at the end".to_owned());
        }
        if extension == "rs" && line.contains('\t') {
            offend("a tab".to_owned());
        }
        for (head, tail) in NEVER {
            let word = format!("{head}{tail}");
            if found(line, &word) {
                offend(format!("`{word}` is a place of one machine or a registry's host; neither belongs in a file"));
            }
        }
    }
    if is_test(name) || extension == "rs" {
        offences.extend(sleeps(name, text));
    }
    offences
}

/// Whether a line has the word as a word or path of its own.
fn found(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || (word.starts_with('/') && "._-}~)".contains(c)))
    })
}

fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.ends_with("/tests.rs") || name.contains("/test_")
}

/// A test waits for a condition. Where it must let time pass, a comment `sleep: why` stands there.
fn sleeps(name: &str, text: &str) -> Vec<Offence> {
    let sleep = [concat!("thread::", "sleep("), concat!("time.", "sleep("), concat!("time::", "sleep(")];
    let mut offences = Vec::new();
    let mut in_test = is_test(name);
    let mut excused = false;
    let mut test_only = false;
    for (number, line) in text.lines().enumerate() {
        in_test |= test_only && line.starts_with("mod ") && line.ends_with('{');
        test_only = line.starts_with("#[cfg(test)]");
        let excuses = line.contains("// sleep: ") || line.contains("# sleep: ");
        if in_test && sleep.iter().any(|call| line.contains(call)) && !excused && !excuses {
            let what = "a test waits for a condition, it does not sleep; if it must, say why: `// sleep: …`";
            offences.push(Offence::new(name, number + 1, what));
        }
        // The excuse may run over several comment lines above the call.
        let comment = line.trim_start().starts_with("//") || line.trim_start().starts_with('#');
        excused = excuses || (excused && comment);
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(name: &str, text: &str, expected: &str) {
        let found: Vec<String> = check(name, text).iter().map(ToString::to_string).collect();
        match expected {
            "" => assert!(found.is_empty(), "{found:?}"),
            _ => assert!(found.len() == 1 && found[0].contains(expected), "{found:?}"),
        }
    }

    #[test]
    fn text_is_clean() {
        check_one("a.md", "fine\n", "");
        check_one("a.md", "not fine \n", "a.md:1: white space");
        check_one("a.rs", "\tx\n", "a.rs:1: a tab");
        check_one("a.md", "no newline", "no newline");
        check_one("a.lock", "x  \n", "");
    }

    #[test]
    fn files_are_short() {
        check_one("a.rs", &"x\n".repeat(600), "");
        check_one("a.rs", &"x\n".repeat(601), "601 lines");
        check_one("a.lock", &"x\n".repeat(601), "");
    }

    #[test]
    fn no_place_of_one_machine() {
        check_one("a.md", &format!("see {}/main\n", concat!("/wo", "rk")), "place of one machine");
        check_one("a.md", &format!("see docs{}/main\n", concat!("/wo", "rk")), "");
        check_one("a.md", &format!("https://{}/simple\n", concat!("pypi", ".org")), "registry's host");
        check_one("Cargo.lock", "source = \"registry+https://github.com/rust-lang/crates.io-index\"\n", "");
    }

    #[test]
    fn tests_do_not_sleep() {
        let call = concat!("thread::", "sleep(ms(5));\n");
        check_one("x/tests/a.rs", call, "a test waits");
        check_one("x/src/a.rs", call, "");
        check_one("x/src/a.rs", &format!("#[cfg(test)]\nmod tests {{\n{call}}}\n"), "a test waits");
        check_one("x/tests/a.rs", &format!("// sleep: the clock must move on,\n// here too\n{call}"), "");
    }
}
