//! Pushing images into the cluster's registry, from which its nodes pull without TLS.

use crate::oci::Archive;
use anyhow::{Context as _, Result, bail};
use std::path::Path;

/// A registry that speaks plain HTTP.
#[derive(Clone, Debug)]
pub struct Registry {
    address: String,
}

impl Registry {
    pub(crate) fn at(address: String) -> Registry {
        Registry { address }
    }

    /// Its address, as it begins the references of images in it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Pushes an archive under a name; returns the reference by digest, `ADDRESS/NAME@sha256:…`.
    ///
    /// # Errors
    /// If the archive is no image, or the registry refuses it.
    pub fn push(&self, archive: &Path, name: &str) -> Result<String> {
        let archive = Archive::open(archive);
        let (digest, manifest, blobs) = archive.manifest()?;
        let base = format!("http://{}/v2/{name}", self.address);
        for blob in blobs {
            // A registry that has it says 200 to HEAD, 404 else.
            if ureq::head(format!("{base}/blobs/{}", blob.digest)).call().is_ok() {
                continue;
            }
            let begun = ureq::post(format!("{base}/blobs/uploads/")).send_empty().context("an upload")?;
            let place = begun.headers().get("Location").context("an upload has no place")?.to_str()?.to_owned();
            let separator = if place.contains('?') { '&' } else { '?' };
            let place = format!("{place}{separator}digest={}", blob.digest);
            archive.blob(&blob.digest, |content| {
                let put = ureq::put(&place).content_type("application/octet-stream");
                let put = put.header("Content-Length", blob.size.to_string());
                put.send(ureq::SendBody::from_reader(&mut { content })).with_context(|| blob.digest.clone())?;
                Ok(())
            })?;
        }
        let put = ureq::put(format!("{base}/manifests/{digest}")).content_type(Archive::manifest_type());
        let answer = put.send(&manifest).context("the manifest")?;
        match answer.headers().get("Docker-Content-Digest").and_then(|value| value.to_str().ok()) {
            Some(stored) if stored == digest => Ok(format!("{}/{name}@{digest}", self.address)),
            other => bail!("the registry stored {name} as {other:?}, not as {digest}"),
        }
    }

    /// Lets a tag stand for an image that was pushed, named by its digest; returns the reference by tag.
    ///
    /// # Errors
    /// If the reference names no image of this registry.
    pub fn tag(&self, pushed: &str, tag: &str) -> Result<String> {
        let (repository, digest) = pushed.split_once('@').context("the reference has no digest")?;
        let name = repository.strip_prefix(&format!("{}/", self.address)).context("it is of another registry")?;
        let base = format!("http://{}/v2/{name}/manifests", self.address);
        let kind = Archive::manifest_type();
        let mut manifest = ureq::get(format!("{base}/{digest}")).header("Accept", kind).call()?;
        let manifest = manifest.body_mut().read_to_vec()?;
        ureq::put(format!("{base}/{tag}")).content_type(kind).send(&manifest).context("the tag")?;
        Ok(format!("{repository}:{tag}"))
    }
}
