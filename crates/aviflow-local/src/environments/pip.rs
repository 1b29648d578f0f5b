//! What pip says: progress for people who wait, and the line that matters when it fails. Pure.

use std::collections::BTreeSet;

/// The packages that a lock pins, as `name==version`.
pub(super) fn pinned(lock: &str) -> Vec<String> {
    let line = |line: &str| {
        let requirement = line.split(['#', ';', '\\']).next().unwrap_or_default();
        let requirement = requirement.split(" --hash").next().unwrap_or_default().trim();
        let begins = requirement.starts_with(|c: char| c.is_ascii_alphanumeric());
        (begins && !line.starts_with(char::is_whitespace)).then(|| requirement.to_owned())
    };
    lock.lines().filter_map(line).collect()
}

/// Follows an installation.
#[derive(Debug, Default)]
pub(super) struct Progress {
    seen: BTreeSet<String>,
    lines: Vec<String>,
}

impl Progress {
    /// Takes a line; says what is being done, if that changed.
    pub(super) fn line(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end();
        self.lines.push(line.to_owned());
        let text = line.trim_start();
        if let Some(rest) = text.strip_prefix("Collecting ").or(text.strip_prefix("Requirement already satisfied: ")) {
            let package = rest.split_whitespace().next().unwrap_or_default();
            self.seen.insert(name(package).to_owned());
            return Some(format!("collecting {}", package.replace("==", " ")));
        }
        // A file that needs no download: `Processing /folder/NAME-VERSION-….whl`.
        if let Some(rest) = text.strip_prefix("Processing ") {
            let file = rest.split_whitespace().next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
            let (package, rest) = file.split_once('-')?;
            let version = rest.split('-').next().unwrap_or(rest);
            self.seen.insert(package.to_owned());
            return Some(format!("collecting {package} {version}"));
        }
        if let Some(rest) = text.strip_prefix("Downloading ").or(text.strip_prefix("Using cached ")) {
            let (file, size) = rest.split_once(' ').unwrap_or((rest, ""));
            let file = file.rsplit('/').next().unwrap_or(file);
            return Some(format!("downloading {file} {size}").trim_end().to_owned());
        }
        let packages = text.strip_prefix("Installing collected packages: ")?;
        Some(format!("installing {} packages", packages.split(',').count()))
    }

    /// How many packages were met.
    pub(super) fn done(&self) -> u32 {
        u32::try_from(self.seen.len()).unwrap_or(u32::MAX)
    }

    /// Why it failed, with the package and what to do.
    pub(super) fn failure(&self) -> String {
        let find = |part: &str| self.lines.iter().find(|l| l.contains(part)).map(|l| clean(l));
        if let Some(line) = find("No space left on device") {
            return format!("the disk is full ({line}); free some space and submit again");
        }
        if self.lines.iter().any(|l| l == "AVIFLOW: no pip") {
            return "Python has no pip of its own; on Debian and Ubuntu install the package python3-venv".to_owned();
        }
        if let Some(at) = self.lines.iter().position(|l| l.contains("DO NOT MATCH THE HASHES")) {
            let rest = &self.lines[at + 1..];
            // `    NAME==VERSION from URL ...:`, then the hashes.
            let package = rest.iter().map(|l| l.trim()).find(|l| l.contains(" from ") && l.ends_with(':'));
            let package = package.and_then(|l| l.split_whitespace().next()).unwrap_or("a package");
            let hashes: Vec<String> = rest
                .iter()
                .map(|l| clean(l))
                .filter(|l| l.starts_with("Expected") || l.starts_with("Got") || l.starts_with("or "))
                .collect();
            return format!(
                "package {package} is not what was locked: {}; if its file was replaced on the index, lock the \
                 requirements anew, otherwise somebody tampers with it",
                hashes.join(", ")
            );
        }
        if let Some(line) = find("require a hash").or_else(|| find("Hashes are required")) {
            return format!("a package of the lock has no hash: {line}; lock the requirements with hashes");
        }
        if let Some(line) = find("must have their versions pinned") {
            let missing = self.lines.iter().skip_while(|l| !l.contains("must have their versions pinned")).nth(1);
            let missing = missing.map(|l| clean(l)).unwrap_or_default();
            return format!("the lock is not complete: {line} {missing}; lock the requirements anew");
        }
        if let Some(line) = find("requires a different Python") {
            return format!("{line}; lock the requirements for this version of Python");
        }
        let unreachable = ["Retrying (", "Temporary failure in name resolution", "Connection refused", "timed out"];
        let network = unreachable.iter().find_map(|part| find(part));
        let wanted = find("No matching distribution found for");
        let package = wanted.as_deref().and_then(|l| l.split("found for ").nth(1)).map(str::to_owned);
        let package = package.or_else(|| self.last_package()).unwrap_or_else(|| "a package".to_owned());
        if let Some(line) = network {
            return format!("package {package} could not be fetched: {line}; see that the index can be reached");
        }
        if wanted.is_some() {
            let line = find("Could not find a version").unwrap_or_default();
            return format!(
                "package {package} is not to be had for this machine: {line}; see that the index has this version as \
                 a wheel for this system and version of Python, or lock another one"
            );
        }
        let line = self.lines.iter().rev().map(|l| clean(l)).find(|l| l.starts_with("ERROR") || l.contains("Error"));
        let line = line.or_else(|| self.lines.iter().rev().map(|l| clean(l)).find(|l| !l.is_empty()));
        format!("pip failed at package {package}: {}", line.unwrap_or_else(|| "it said nothing".to_owned()))
    }

    fn last_package(&self) -> Option<String> {
        let line = self.lines.iter().rev().find_map(|l| l.trim_start().strip_prefix("Collecting "))?;
        line.split_whitespace().next().map(str::to_owned)
    }
}

fn name(package: &str) -> &str {
    package.split(['=', '<', '>', '!', '~', '[', ';']).next().unwrap_or(package)
}

/// A line without its level and without paths of the store.
fn clean(line: &str) -> String {
    let line = line.trim();
    let line = line.strip_prefix("ERROR: ").or(line.strip_prefix("WARNING: ")).unwrap_or(line);
    match line.find(" (from -r ") {
        Some(at) => {
            let rest = line[at..].find("))").map_or("", |end| &line[at + end + 2..]);
            format!("{}{rest}", &line[..at])
        }
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(lines: &str) -> Progress {
        let mut progress = Progress::default();
        for line in lines.lines() {
            let _ = progress.line(line);
        }
        progress
    }

    #[test]
    fn a_lock_says_how_much_there_is() {
        let lock = "# comment\njax==0.10.2 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==1 --hash=sha256:cc\n\n--index-url x\n";
        assert_eq!(pinned(lock), ["jax==0.10.2", "b==1"]);
        assert!(pinned("# nothing\n").is_empty());
    }

    #[test]
    fn progress_names_what_is_being_done() {
        let cases = [
            ("Collecting jax==0.10.2 (from -r /x/lock (line 2))", Some("collecting jax 0.10.2")),
            (
                "  Downloading https://host/a/jax-0.10.2-py3-none-any.whl (2.9 MB)",
                Some("downloading jax-0.10.2-py3-none-any.whl (2.9 MB)"),
            ),
            ("Processing /wheels/flax-1.0-py3-none-any.whl (from -r x (line 1))", Some("collecting flax 1.0")),
            ("Installing collected packages: a, b, c", Some("installing 3 packages")),
            ("Looking in indexes: x", None),
        ];
        let mut progress = Progress::default();
        for (line, step) in cases {
            assert_eq!(progress.line(line).as_deref(), step);
        }
        assert_eq!(progress.done(), 2);
    }

    #[test]
    fn a_failure_names_the_package_and_the_way_out() {
        let cases = [
            (
                "Collecting a==1\nERROR: Could not find a version that satisfies the requirement a==1 (from versions: none)\n\
                 ERROR: No matching distribution found for a==1 (from -r /x/lock (line 2))",
                "package a==1 is not to be had for this machine: Could not find a version that satisfies the requirement a==1 (from versions: none); see",
            ),
            (
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If\n    a==1 from file:///w/a.whl (from -r /x/lock (line 1)):\n        Expected sha256 00\n             Got        11\n",
                "package a==1 is not what was locked: Expected sha256 00, Got        11; if",
            ),
            (
                "Collecting b==2\nWARNING: Retrying (Retry(total=1)) after connection broken by 'x'\nERROR: No matching distribution found for b==2",
                "package b==2 could not be fetched: Retrying (Retry(total=1)) after connection broken by 'x'; see that the index",
            ),
            ("OSError: [Errno 28] No space left on device", "the disk is full"),
            ("AVIFLOW: no pip", "Python has no pip of its own; on Debian"),
            ("Collecting c==3\nERROR: something new", "pip failed at package c==3: something new"),
        ];
        for (lines, expected) in cases {
            let failure = after(lines).failure();
            assert!(failure.starts_with(expected), "{failure}");
        }
    }
}
