//! The name of a container image, as people write it: registry, repository, tag, digest.
//!
//! A tag may be another image tomorrow, so nothing runs by one: a control plane asks the registry once, at
//! submission, which content it stands for. This module only reads names; it asks nobody.

use std::fmt;

/// The registry of a name that has none.
pub const DOCKER_HUB: &str = "docker.io";
/// The tag of a name that has neither tag nor digest.
pub const LATEST: &str = "latest";

/// The form of a name, as an ECMA and RE2 expression.
pub const PATTERN: &str = "^([A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?(@sha256:[0-9a-f]{64})?$";
/// The form of a name with a digest.
pub const PINNED_PATTERN: &str = "^[^@\\s]+@sha256:[0-9a-f]{64}$";

/// A name, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// Everything before tag and digest, as it was written.
    pub name: String,
    /// Host and port of the registry, if it was written.
    registry: Option<String>,
    /// The tag, if it was written.
    pub tag: Option<String>,
    /// `sha256:` and 64 digits, if it was written.
    pub digest: Option<String>,
}

/// What is wrong with a name, and what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageNameError {
    /// A digest that is none.
    #[error("a digest is `sha256:` and 64 of 0-9 and a-f; here are {0} characters")]
    Digest(usize),
    /// A tag that is none.
    #[error("`{0}` is no tag; it has letters, digits, `_`, `.` and `-`, at most 128")]
    Tag(String),
    /// A name that is none.
    #[error("`{0}` is no name of an image; it has lowercase letters, digits, `.`, `_`, `-` and `/`")]
    Name(String),
}

impl ImageName {
    /// Takes a name apart.
    ///
    /// # Errors
    /// If it has not the form of one.
    pub fn parse(text: &str) -> Result<ImageName, ImageNameError> {
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (text, None),
        };
        if let Some(digest) = digest.filter(|d| !is_digest(d)) {
            let hex = digest.strip_prefix("sha256:").unwrap_or_default();
            return Err(ImageNameError::Digest(hex.chars().count()));
        }
        // A port is no tag.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        if let Some(tag) = tag.filter(|t| !is_tag(t)) {
            return Err(ImageNameError::Tag(tag.to_owned()));
        }
        // As everywhere: what stands first is a host if it could be no part of a repository of Docker Hub.
        let (registry, repository) = match name.split_once('/') {
            Some((first, rest))
                if first.contains(['.', ':']) || first == "localhost" || first != first.to_lowercase() =>
            {
                (Some(first), rest)
            }
            _ => (None, name),
        };
        if !registry.is_none_or(is_host) || !repository.split('/').all(is_part) {
            return Err(ImageNameError::Name(name.to_owned()));
        }
        let owned = str::to_owned;
        Ok(ImageName {
            name: owned(name),
            registry: registry.map(owned),
            tag: tag.map(owned),
            digest: digest.map(owned),
        })
    }

    /// Host and port of the registry.
    #[must_use]
    pub fn registry(&self) -> &str {
        self.registry.as_deref().unwrap_or(DOCKER_HUB)
    }

    /// The repository, as its registry calls it.
    #[must_use]
    pub fn repository(&self) -> String {
        let rest = match &self.registry {
            Some(registry) => &self.name[registry.len() + 1..],
            None => &self.name,
        };
        match self.registry() == DOCKER_HUB && !rest.contains('/') {
            true => format!("library/{rest}"),
            false => rest.to_owned(),
        }
    }

    /// The name with a digest and without its tag, which no longer says anything.
    #[must_use]
    pub fn pinned(&self, digest: &str) -> String {
        format!("{}@{digest}", self.name)
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

/// Whether a text is `sha256:` and 64 hexadecimal digits.
#[must_use]
pub fn is_digest(text: &str) -> bool {
    let hex = text.strip_prefix("sha256:").unwrap_or_default();
    hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_tag(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (1..=128).contains(&text.len()) && text.starts_with(word) && text.chars().all(|c| word(c) || matches!(c, '.' | '-'))
}

fn is_host(text: &str) -> bool {
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let ends = |c: char| c.is_ascii_alphanumeric();
    host.starts_with(ends)
        && host.ends_with(ends)
        && host.chars().all(|c| ends(c) || matches!(c, '.' | '-'))
        && port.is_none_or(|p| (1..=5).contains(&p.len()) && p.bytes().all(|b| b.is_ascii_digit()))
}

fn is_part(text: &str) -> bool {
    let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.starts_with(ends) && text.ends_with(ends) && text.chars().all(|c| ends(c) || matches!(c, '.' | '_' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, registry: &str, repository: &str, tag: Option<&str>) {
        let name = ImageName::parse(text).unwrap();
        assert_eq!((name.registry(), name.repository().as_str(), name.tag.as_deref()), (registry, repository, tag));
        assert_eq!(name.to_string(), text);
    }

    #[test]
    fn names_are_taken_apart() {
        check("python", "docker.io", "library/python", None);
        check("python:3.12", "docker.io", "library/python", Some("3.12"));
        check("team/train:v1", "docker.io", "team/train", Some("v1"));
        check("docker.io/python", "docker.io", "library/python", None);
        check("host:5000/team/train", "host:5000", "team/train", None);
        check("host:5000/train:v1", "host:5000", "train", Some("v1"));
        check("localhost/a", "localhost", "a", None);
        check("ghcr.io/a/b__c/d:x_Y.1", "ghcr.io", "a/b__c/d", Some("x_Y.1"));
        let digest = format!("sha256:{}", "0".repeat(64));
        let both = ImageName::parse(&format!("a.example/b:v1@{digest}")).unwrap();
        assert_eq!((both.tag.as_deref(), both.digest.as_deref()), (Some("v1"), Some(digest.as_str())));
        assert_eq!(both.pinned(&digest), format!("a.example/b@{digest}"));
    }

    #[test]
    fn what_is_no_name_says_so() {
        for text in ["", "A", "a b", "a/", "/a", "a//b", "host:port/a", "a.example/B", "-a", "https://a.example/b"] {
            assert!(matches!(ImageName::parse(text), Err(ImageNameError::Name(_))), "{text}");
        }
        for text in ["a:", "a:b c", "a:-b"] {
            assert!(matches!(ImageName::parse(text), Err(ImageNameError::Tag(_))), "{text}");
        }
        for text in ["a@sha256:12", "a@", "a@latest"] {
            assert!(matches!(ImageName::parse(text), Err(ImageNameError::Digest(_))), "{text}");
        }
    }
}
