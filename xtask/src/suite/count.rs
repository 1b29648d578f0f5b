//! How many tests passed and failed, read from what their runners print.

use std::ops::AddAssign;

/// A number of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Passed.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
    /// Ignored or skipped.
    pub skipped: u64,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl Count {
    /// One test that passed or failed.
    pub fn one(ok: bool) -> Count {
        Count { passed: u64::from(ok), failed: u64::from(!ok), skipped: 0 }
    }

    /// From the output of `cargo test` or Python's unittest, and whether it ended with 0.
    ///
    /// A runner that failed and counted no failure still counts as one.
    pub fn read(output: &str, ok: bool) -> Count {
        let mut count = Count::default();
        let mut ran = 0;
        for line in output.lines() {
            if line.starts_with("test result: ") {
                count.passed += before(line, " passed");
                count.failed += before(line, " failed");
                count.skipped += before(line, " ignored");
            } else if line.starts_with("Ran ") && line.contains(" test") {
                ran = before(line, " test");
            } else if line == "OK" || line.starts_with("OK (") || line.starts_with("FAILED (") {
                let failed = after(line, "failures=") + after(line, "errors=") + after(line, "unexpected successes=");
                let skipped = after(line, "skipped=");
                count.failed += failed;
                count.skipped += skipped;
                count.passed += ran.saturating_sub(failed + skipped);
                ran = 0;
            }
        }
        if !ok && count.failed == 0 {
            count.failed = 1;
        }
        count
    }
}

/// As much as is shown of one failure again.
const LINES: usize = 60;

/// What a runner said of each test that failed, or the end of its output if it named none.
pub fn failures(output: &str) -> String {
    let mut found: Vec<Vec<&str>> = Vec::new();
    let mut within = false;
    for line in output.lines() {
        let cargo = line.starts_with("---- ") && line.ends_with("----");
        let unittest = line.starts_with("FAIL: ") || line.starts_with("ERROR: ");
        if cargo || unittest {
            found.push(Vec::new());
            within = true;
        } else if line == "failures:" || line.starts_with("test result: ") || line.starts_with("Ran ") {
            within = false;
        }
        if let (true, Some(failure)) = (within, found.last_mut()) {
            failure.push(line);
        }
    }
    if found.is_empty() {
        let lines: Vec<&str> = output.lines().collect();
        found.push(lines[lines.len().saturating_sub(LINES)..].to_vec());
    }
    let shown = found.iter().map(|lines| {
        let cut = if lines.len() > LINES { "\n[…]" } else { "" };
        lines[..lines.len().min(LINES)].join("\n").trim_end().to_owned() + cut
    });
    shown.collect::<Vec<_>>().join("\n\n")
}

/// The number that ends right before a word.
fn before(line: &str, word: &str) -> u64 {
    let Some(at) = line.find(word) else { return 0 };
    let head = line[..at].trim_end();
    let digits = head.rfind(|c: char| !c.is_ascii_digit()).map_or(head, |at| &head[at + 1..]);
    digits.parse().unwrap_or(0)
}

/// The number that begins right after a word.
fn after(line: &str, word: &str) -> u64 {
    let Some(at) = line.find(word) else { return 0 };
    let tail = &line[at + word.len()..];
    let digits = tail.find(|c: char| !c.is_ascii_digit()).map_or(tail, |at| &tail[..at]);
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(output: &str, ok: bool, passed: u64, failed: u64, skipped: u64) {
        assert_eq!(Count::read(output, ok), Count { passed, failed, skipped }, "{output}");
    }

    #[test]
    fn cargo_counts() {
        let one = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s\n";
        check(one, true, 12, 0, 1);
        let two = format!("{one}test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured\n");
        check(&two, false, 15, 2, 1);
        check("error: could not compile `x`", false, 0, 1, 0);
    }

    #[test]
    fn failures_are_found_again() {
        let cargo = "running 2 tests\ntest a ... FAILED\n\nfailures:\n\n---- a stdout ----\nleft: 1\n\n---- b ----\n\
                     right\n\n\nfailures:\n    a\n    b\n\ntest result: FAILED. 0 passed; 2 failed\nlater\n";
        assert_eq!(failures(cargo), "---- a stdout ----\nleft: 1\n\n---- b ----\nright");
        let python = "===\nFAIL: test_x (m.C)\n---\nTraceback\n\n---\nRan 3 tests in 1s\n\nFAILED (failures=1)\n";
        assert_eq!(failures(python), "FAIL: test_x (m.C)\n---\nTraceback\n\n---");
        assert_eq!(failures("error: could not compile"), "error: could not compile");
        let long = format!("---- a ----\n{}", "x\n".repeat(100));
        assert!(failures(&long).ends_with("x\n[…]") && failures(&long).lines().count() == LINES + 1);
    }

    #[test]
    fn unittest_counts() {
        check("Ran 23 tests in 0.512s\n\nOK\n", true, 23, 0, 0);
        check("Ran 1 test in 0.5s\n\nOK (skipped=1)\n", true, 0, 0, 1);
        check("Ran 23 tests in 0.5s\n\nFAILED (failures=1, errors=2, skipped=3)\n", false, 17, 3, 3);
    }
}
