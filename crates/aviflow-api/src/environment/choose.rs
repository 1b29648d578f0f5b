//! Which environment a name means.

use crate::rest::ApiError;
use crate::suggest::nearest;

/// What counts of an environment when one is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The name.
    pub name: &'a str,
    /// The version.
    pub version: u32,
    /// What to use instead, where it is not to be used any more.
    pub deprecated: Option<&'a str>,
}

/// The environment that `name@version` means; `name` alone means its newest version that is not deprecated.
///
/// # Errors
/// If there is none, with those that there are.
pub fn choose<'a, T>(all: &'a [T], asked: &str, of: impl Fn(&'a T) -> Candidate<'a>) -> Result<&'a T, ApiError> {
    let (name, version) = match asked.split_once('@') {
        None => (asked, None),
        Some((name, version)) => match version.parse::<u32>() {
            Ok(version) => (name, Some(version)),
            Err(_) => {
                let message = format!("`{version}` is no version; write `{name}@1`");
                return Err(ApiError::new("badRequest", message));
            }
        },
    };
    let mut named: Vec<&T> = all.iter().filter(|e| of(e).name == name).collect();
    named.sort_by_key(|e| of(e).version);
    let fits = |e: &&'a T| version.map_or(of(e).deprecated.is_none(), |v| of(e).version == v);
    if let Some(found) = named.iter().copied().rev().find(fits) {
        return Ok(found);
    }
    let title = |e: &&'a T| format!("`{}@{}`", of(e).name, of(e).version);
    if let (None, Some(last)) = (version, named.last()) {
        let message = format!("every version of environment `{name}` is deprecated");
        let why = of(last).deprecated.unwrap_or_default();
        let help = format!("of the newest it is said: {why}; to use it nevertheless, write {}", title(last));
        return Err(ApiError::new("environmentDeprecated", message).help(help));
    }
    let none = ApiError::new("noSuchEnvironment", format!("there is no environment `{asked}`"));
    let versions: Vec<String> = named.iter().map(title).collect();
    Err(match nearest(name, all.iter().map(|e| of(e).name)) {
        Some(_) if !versions.is_empty() => none.help(format!("there are: {}", versions.join(", "))),
        Some(similar) => none.help(format!("did you mean `{similar}`? `aviflow env ls` lists all")),
        None => none.help("`aviflow env ls` lists all"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(&str, u32, Option<&str>); 5] = [
        ("torch-2.9", 10, Some("it computes wrong sums")),
        ("torch-2.9", 2, None),
        ("torch-2.9", 9, None),
        ("old", 1, Some("use torch-2.9")),
        ("old", 2, Some("use torch-2.9")),
    ];

    fn chosen(asked: &str) -> Result<u32, ApiError> {
        let of = |e: &'static (&'static str, u32, Option<&'static str>)| Candidate {
            name: e.0,
            version: e.1,
            deprecated: e.2,
        };
        static LIST: [(&str, u32, Option<&str>); 5] = ALL;
        choose(&LIST, asked, of).map(|e| e.1)
    }

    #[test]
    fn a_name_means_the_newest_that_is_not_deprecated() {
        assert_eq!(chosen("torch-2.9"), Ok(9));
        assert_eq!(chosen("torch-2.9@10"), Ok(10), "named, it may be used");
        assert_eq!(chosen("torch-2.9@2"), Ok(2));
    }

    #[test]
    fn what_is_not_there_is_told_with_what_is() {
        let told = |asked: &str| {
            let error = chosen(asked).unwrap_err();
            format!("{}: {}; {}", error.code, error.message, error.help.unwrap_or_default())
        };
        assert_eq!(
            told("torch-2.9@3"),
            "noSuchEnvironment: there is no environment `torch-2.9@3`; there are: `torch-2.9@2`, `torch-2.9@9`, `torch-2.9@10`"
        );
        assert_eq!(
            told("torch-29"),
            "noSuchEnvironment: there is no environment `torch-29`; did you mean `torch-2.9`? `aviflow env ls` lists all"
        );
        assert_eq!(
            told("old"),
            "environmentDeprecated: every version of environment `old` is deprecated; of the newest it is said: use torch-2.9; to use it nevertheless, write `old@2`"
        );
        assert_eq!(told("jax@x"), "badRequest: `x` is no version; write `jax@1`; ");
    }
}
