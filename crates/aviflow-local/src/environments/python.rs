//! Which interpreter an environment is built with.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An interpreter and what it said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Python {
    pub(super) program: PathBuf,
    pub(super) version: Version,
}

/// Major, minor and micro.
pub(super) type Version = [u32; 3];

pub(super) fn shown(version: Version) -> String {
    version.map(|n| n.to_string()).join(".")
}

/// The configured interpreter, or the first on `PATH` whose version is in the range.
///
/// # Errors
/// With what was found and what is wanted.
pub(super) fn choose(configured: Option<&Path>, range: &str) -> Result<Python, String> {
    let wanted = Range::parse(range)?;
    if let Some(program) = configured {
        let python = ask(program).ok_or_else(|| {
            format!("{} is no Python that runs; correct the configured interpreter", program.display())
        })?;
        if !wanted.contains(python.version) {
            return Err(format!(
                "it needs Python {range}, but the configured {} is {}; configure another one",
                program.display(),
                shown(python.version)
            ));
        }
        return Ok(python);
    }
    let named = (9..=20).map(|minor| format!("python3.{minor}"));
    let mut found = Vec::new();
    for name in ["python3".to_owned()].into_iter().chain(named) {
        let Some(python) = ask(Path::new(&name)) else { continue };
        if wanted.contains(python.version) {
            return Ok(python);
        }
        found.push(shown(python.version));
    }
    found.dedup();
    let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
    Err(format!("it needs Python {range}, and PATH has {found}; install one that fits, or configure its path"))
}

fn ask(program: &Path) -> Option<Python> {
    let script = "import sys; print('%d.%d.%d' % sys.version_info[:3]); print(sys.executable)";
    let output = Command::new(program).args(["-I", "-c", script]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.ok().filter(|o| o.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (version, program) = text.trim_end().split_once('\n')?;
    Some(Python { program: PathBuf::from(program), version: parse_version(version)? })
}

fn parse_version(text: &str) -> Option<Version> {
    let mut version = [0; 3];
    for (n, part) in text.split('.').enumerate() {
        *version.get_mut(n)? = part.parse().ok()?;
    }
    Some(version)
}

/// A version range such as `>=3.11,<3.13`, `==3.12.*` or nothing.
struct Range(Vec<(Operator, Version, usize)>);

#[derive(Clone, Copy)]
enum Operator {
    AtLeast,
    Above,
    Below,
    AtMost,
    Equal,
    Unequal,
    Compatible,
}

impl Range {
    fn parse(text: &str) -> Result<Range, String> {
        let operators = [
            (">=", Operator::AtLeast),
            ("<=", Operator::AtMost),
            ("==", Operator::Equal),
            ("!=", Operator::Unequal),
            ("~=", Operator::Compatible),
            (">", Operator::Above),
            ("<", Operator::Below),
        ];
        let mut parts = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let parsed = operators.iter().find_map(|(sign, operator)| {
                let version = part.strip_prefix(sign)?.trim();
                let (version, wild) = version.strip_suffix(".*").map_or((version, false), |v| (v, true));
                let given = version.split('.').count();
                // `== 3.12` without a star means 3.12.0, as Python has it.
                let compared = if wild || matches!(operator, Operator::Compatible) { given } else { 3 };
                Some((*operator, parse_version(version)?, compared))
            });
            let unclear = || format!("the environment's Python range `{text}` is unclear at `{part}`");
            parts.push(parsed.ok_or_else(unclear)?);
        }
        Ok(Range(parts))
    }

    fn contains(&self, version: Version) -> bool {
        self.0.iter().all(|(operator, bound, compared)| {
            let same = |n: usize| version[..n] == bound[..n];
            match operator {
                Operator::AtLeast => version >= *bound,
                Operator::Above => version > *bound,
                Operator::Below => version < *bound,
                Operator::AtMost => version <= *bound,
                Operator::Equal => same(*compared),
                Operator::Unequal => !same(*compared),
                Operator::Compatible => version >= *bound && same(compared.saturating_sub(1)),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_read_as_python_has_them() {
        let cases = [
            ("", "3.8.0", true),
            (">=3.11,<3.13", "3.11.0", true),
            (">=3.11, <3.13", "3.12.9", true),
            (">=3.11,<3.13", "3.13.0", false),
            ("==3.12.*", "3.12.4", true),
            ("==3.12", "3.12.4", false),
            ("==3.12.4", "3.12.4", true),
            ("!=3.12.*", "3.12.4", false),
            ("~=3.11", "3.13.1", true),
            ("~=3.11.2", "3.12.0", false),
            (">3.11.0,<=3.12.0", "3.12.0", true),
        ];
        for (range, version, inside) in cases {
            let range_ = Range::parse(range).expect(range);
            let version_ = parse_version(version).expect(version);
            assert_eq!(range_.contains(version_), inside, "{version} in `{range}`");
        }
        assert!(Range::parse(">=three").is_err() && Range::parse("3.11").is_err());
    }

    #[test]
    fn a_range_that_nothing_fits_says_what_there_is() {
        let error = choose(None, ">=3.99").expect_err("no such Python");
        assert!(error.starts_with("it needs Python >=3.99, and PATH has "), "{error}");
    }
}
