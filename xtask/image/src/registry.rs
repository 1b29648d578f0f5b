//! Pushing an image into a registry, by the distribution API.

use crate::login::Login;
use crate::oci::{Archive, MANIFEST};
use anyhow::{Context as _, Result, bail, ensure};
use std::path::Path;
use ureq::http::{Response, StatusCode, header};
use ureq::{Body, SendBody};

/// A place for an image: `HOST[:PORT]/NAME[:TAG]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Host and port of the registry.
    pub host: String,
    /// The repository in it.
    pub name: String,
    /// The tag; `latest` where none is named.
    pub tag: String,
}

impl Reference {
    /// Reads one.
    ///
    /// # Errors
    /// If no registry is named, or a name has letters that registries do not take.
    pub fn parse(text: &str) -> Result<Reference> {
        let (host, rest) = text.split_once('/').with_context(|| {
            format!("`{text}` names no registry; write HOST/NAME:TAG, such as registry.example/aviflow:0.1.0")
        })?;
        let (name, tag) = rest.split_once(':').unwrap_or((rest, "latest"));
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-/".contains(c);
        ensure!(
            !name.is_empty() && name.chars().all(plain),
            "`{name}` is no repository; use a-z, 0-9, `.`, `_`, `-` and `/`"
        );
        let of_tag = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        ensure!(!tag.is_empty() && tag.chars().all(of_tag), "`{tag}` is no tag; use letters, digits, `.`, `_` and `-`");
        Ok(Reference { host: host.to_owned(), name: name.to_owned(), tag: tag.to_owned() })
    }
}

/// A registry.
#[derive(Clone, Debug)]
pub struct Registry {
    host: String,
    plain_http: bool,
}

impl Registry {
    /// The registry at a host and port, over HTTPS; over plain HTTP on this machine itself, or where that is said.
    #[must_use]
    pub fn at(host: &str, plain_http: bool) -> Registry {
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let here = name == "localhost" || name.starts_with("127.") || name == "[::1]";
        Registry { host: host.to_owned(), plain_http: plain_http || here }
    }

    /// Its host and port, as they begin the references of images in it.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.host
    }

    /// Pushes an archive under a name; returns the reference by digest, `HOST/NAME@sha256:…`.
    ///
    /// # Errors
    /// If the archive is no image, or the registry refuses it.
    pub fn push(&self, archive: &Path, name: &str) -> Result<String> {
        self.push_image(&Archive::open(archive), name, None)
    }

    /// The same, with a tag.
    ///
    /// # Errors
    /// If the archive is no image, or the registry refuses it.
    pub fn push_tagged(&self, archive: &Path, name: &str, tag: &str) -> Result<String> {
        self.push_image(&Archive::open(archive), name, Some(tag))
    }

    /// Lets a tag stand for an image that was pushed, named by its digest; returns the reference by tag.
    ///
    /// # Errors
    /// If the reference names no image of this registry.
    pub fn tag(&self, pushed: &str, tag: &str) -> Result<String> {
        let (repository, digest) = pushed.split_once('@').context("the reference has no digest")?;
        let name = repository.strip_prefix(&format!("{}/", self.host)).context("it is of another registry")?;
        let base = format!("{}/v2/{name}/manifests", self.origin());
        let mut manifest = ureq::get(format!("{base}/{digest}")).header("Accept", MANIFEST).call()?;
        let manifest = manifest.body_mut().read_to_vec()?;
        ureq::put(format!("{base}/{tag}")).content_type(MANIFEST).send(&manifest).context("the tag")?;
        Ok(format!("{repository}:{tag}"))
    }

    fn origin(&self) -> String {
        format!("{}://{}", if self.plain_http { "http" } else { "https" }, self.host)
    }

    fn push_image(&self, archive: &Archive, name: &str, tag: Option<&str>) -> Result<String> {
        let (digest, manifest, blobs) = archive.manifest()?;
        let origin = self.origin();
        let base = format!("{origin}/v2/{name}");
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut login = Login::of(&self.host, name);
        for blob in blobs {
            let place = format!("{base}/blobs/{}", blob.digest);
            if login.send(|word| word.on(agent.head(&place)).call())?.status() == StatusCode::OK {
                continue;
            }
            let begin = format!("{base}/blobs/uploads/");
            let begun = login.send(|word| word.on(agent.post(&begin)).send_empty())?;
            let begun = taken(begun, "an upload")?;
            let place = begun.headers().get(header::LOCATION).context("an upload has no place")?.to_str()?;
            let separator = if place.contains('?') { '&' } else { '?' };
            let origin = if place.starts_with('/') { origin.as_str() } else { "" };
            let place = format!("{origin}{place}{separator}digest={}", blob.digest);
            archive.blob(&blob.digest, |content| {
                let put = login.word().on(agent.put(&place)).content_type("application/octet-stream");
                let put = put.header(header::CONTENT_LENGTH, blob.size.to_string());
                taken(put.send(SendBody::from_reader(&mut { content }))?, &blob.digest).map(|_| ())
            })?;
        }
        let place = format!("{base}/manifests/{}", tag.unwrap_or(&digest));
        let put = login.send(|word| word.on(agent.put(&place)).content_type(MANIFEST).send(&manifest))?;
        let put = taken(put, "the manifest")?;
        match put.headers().get("Docker-Content-Digest").map(|value| value.to_str()).transpose()? {
            // It need not say; then what was sent is what it has.
            None => {}
            Some(stored) => ensure!(stored == digest, "the registry stored {stored}, not {digest}"),
        }
        Ok(format!("{}/{name}@{digest}", self.host))
    }
}

/// An answer that says yes, or what it says instead.
fn taken(mut answer: Response<Body>, what: &str) -> Result<Response<Body>> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let said = answer.body_mut().read_to_string().unwrap_or_default();
    let advice = match status.as_u16() {
        401 | 403 => {
            "; log in with `docker login`, `podman login` or `crane auth login` as somebody who may push there"
        }
        _ => "",
    };
    bail!("the registry refuses {what} ({status}): {}{advice}", said.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_names_host_repository_and_tag() {
        let check = |text: &str, host: &str, name: &str, tag: &str| {
            let found = Reference::parse(text).unwrap();
            assert_eq!((found.host.as_str(), found.name.as_str(), found.tag.as_str()), (host, name, tag), "{text}");
        };
        check("registry.example/aviflow:0.1.0", "registry.example", "aviflow", "0.1.0");
        check("10.0.0.2:5000/team/aviflow", "10.0.0.2:5000", "team/aviflow", "latest");
        for wrong in ["aviflow:1", "registry.example/", "registry.example/A:1", "registry.example/a:", "r/a@sha256:1"] {
            Reference::parse(wrong).expect_err(wrong);
        }
    }

    #[test]
    fn only_this_machine_is_spoken_to_in_the_clear() {
        let check = |host: &str, asked: bool, plain: bool| {
            assert_eq!(Registry::at(host, asked).plain_http, plain, "{host}");
        };
        check("registry.example", false, false);
        check("localhost:5000", false, true);
        check("127.0.0.1:5000", false, true);
        check("localhost.example", false, false);
        check("10.0.0.2:5000", true, true);
    }
}
