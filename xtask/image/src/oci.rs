//! Images as archives or folders of the OCI layout, written and read without a container tool.
//!
//! Invariant: the same layers and configuration give the same bytes, hence the same digest: names are sorted and
//! no time is written. Layers are not compressed: what a compressor makes of the same bytes is its version's affair.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A file of a layer.
#[derive(Clone, Debug)]
pub struct FileEntry {
    /// Its path in the image, absolute.
    pub path: String,
    /// What is in it.
    pub content: Vec<u8>,
    /// Its mode, such as `0o755`.
    pub mode: u32,
}

/// An image to be written: layers from the lowest, and how its containers start.
#[derive(Clone, Debug, Default)]
pub struct Image {
    layers: Vec<Layer>,
    config: BTreeMap<&'static str, Value>,
}

#[derive(Clone, Debug)]
enum Layer {
    /// A tar file on disk.
    File(PathBuf),
    /// A tar file in memory.
    Bytes(Vec<u8>),
}

impl Image {
    /// An image without anything.
    pub fn scratch() -> Image {
        Image::default()
    }

    /// Puts a tar file of a file system on top.
    #[must_use]
    pub fn layer(mut self, tar: impl Into<PathBuf>) -> Image {
        self.layers.push(Layer::File(tar.into()));
        self
    }

    /// Puts a layer of files on top; folders above them are made.
    ///
    /// # Errors
    /// If a path is too long for a tar file.
    pub fn files(mut self, files: &[FileEntry]) -> Result<Image> {
        let files: BTreeMap<&str, &FileEntry> = files.iter().map(|f| (f.path.trim_start_matches('/'), f)).collect();
        let mut tar = tar::Builder::new(Vec::new());
        let mut folders = std::collections::BTreeSet::new();
        for (path, file) in files {
            for (at, _) in path.match_indices('/') {
                if folders.insert(&path[..at]) {
                    let mut header = header(0, 0o755);
                    header.set_entry_type(tar::EntryType::Directory);
                    tar.append_data(&mut header, &path[..at], io::empty())?;
                }
            }
            tar.append_data(&mut header(file.content.len() as u64, file.mode), path, file.content.as_slice())
                .with_context(|| format!("the file {path}"))?;
        }
        self.layers.push(Layer::Bytes(tar.into_inner()?));
        Ok(self)
    }

    /// Sets environment variables, each `NAME=value`.
    #[must_use]
    pub fn env(self, variables: &[&str]) -> Image {
        self.set("Env", json!(variables))
    }

    /// Sets the user, a number or `number:group`.
    #[must_use]
    pub fn user(self, user: &str) -> Image {
        self.set("User", json!(user))
    }

    /// Sets what is started.
    #[must_use]
    pub fn entrypoint(self, words: &[&str]) -> Image {
        self.set("Entrypoint", json!(words))
    }

    /// Sets the folder in which it is started.
    #[must_use]
    pub fn workdir(self, folder: &str) -> Image {
        self.set("WorkingDir", json!(folder))
    }

    /// Sets labels: what is to be known of the image.
    #[must_use]
    pub fn labels(self, labels: &[(&str, &str)]) -> Image {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        self.set("Labels", json!(labels))
    }

    fn set(mut self, name: &'static str, value: Value) -> Image {
        self.config.insert(name, value);
        self
    }

    /// Writes it as an archive, named so; returns the digest of its manifest.
    ///
    /// # Errors
    /// If a layer cannot be read or the archive not be written.
    pub fn write(&self, reference: &str, archive: &Path) -> Result<String> {
        let file = File::create(archive).with_context(|| format!("{} cannot be written", archive.display()))?;
        let mut to = Layout::Archive(tar::Builder::new(io::BufWriter::new(file)));
        let digest = self.write_to(reference, &mut to)?;
        if let Layout::Archive(tar) = to {
            tar.into_inner()?.flush()?;
        }
        Ok(digest)
    }

    /// Writes it as a folder, which is made, and gets what it has not; returns the digest of its manifest.
    ///
    /// # Errors
    /// If a layer cannot be read or the folder not be written.
    pub fn write_folder(&self, reference: &str, folder: &Path) -> Result<String> {
        self.write_to(reference, &mut Layout::Folder(folder.to_owned()))
    }

    fn write_to(&self, reference: &str, to: &mut Layout) -> Result<String> {
        let mut layers = Vec::new();
        for layer in &self.layers {
            layers.push(match layer {
                Layer::Bytes(bytes) => blob(to, LAYER, bytes)?,
                Layer::File(path) => {
                    let file = || File::open(path).with_context(|| format!("the layer {}", path.display()));
                    let (digest, size) = digest_of(file()?)?;
                    to.put(&place(&digest), size, &mut file()?)?;
                    json!({"mediaType": LAYER, "digest": digest, "size": size})
                }
            });
        }
        let config = json!({
            "os": "linux", "architecture": architecture(), "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|l| &l["digest"]).collect::<Vec<_>>()},
        });
        let config = blob(to, CONFIG, config.to_string().as_bytes())?;
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        let mut manifest = blob(to, MANIFEST, manifest.to_string().as_bytes())?;
        let digest = manifest["digest"].as_str().context("a blob has a digest")?.to_owned();
        // The first is what `ctr images import` goes by, the second what everybody else does.
        let last = reference.rsplit_once('/').map_or(reference, |(_, last)| last);
        let tag = last.split_once(':').map_or("latest", |(_, tag)| tag);
        manifest["annotations"] =
            json!({"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": tag});
        let index = json!({"schemaVersion": 2, "manifests": [manifest]}).to_string();
        for (name, text) in [("index.json", index.as_str()), ("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#)] {
            to.put(name, text.len() as u64, &mut text.as_bytes())?;
        }
        Ok(digest)
    }
}

/// Where a layout is written.
enum Layout {
    Archive(tar::Builder<io::BufWriter<File>>),
    Folder(PathBuf),
}

impl Layout {
    fn put(&mut self, name: &str, size: u64, content: &mut dyn Read) -> Result<()> {
        match self {
            Layout::Archive(tar) => tar.append_data(&mut header(size, 0o644), name, content)?,
            Layout::Folder(folder) => {
                let path = folder.join(name);
                let mut write = || {
                    std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
                    io::copy(content, &mut File::create(&path)?)
                };
                write().with_context(|| format!("{} cannot be written", path.display()))?;
            }
        }
        Ok(())
    }
}

/// Something of an image: what kind it is, its digest and size.
#[derive(Clone, Debug)]
pub struct Blob {
    /// Its digest.
    pub digest: String,
    /// Bytes.
    pub size: u64,
}

/// An archive of the OCI layout.
pub struct Archive {
    path: PathBuf,
}

impl Archive {
    /// The archive at a path; it is opened when it is read.
    #[must_use]
    pub fn open(path: &Path) -> Archive {
        Archive { path: path.to_owned() }
    }

    /// The digest and text of the manifest, its media type, and all blobs that it names.
    pub(crate) fn manifest(&self) -> Result<(String, String, Vec<Blob>)> {
        let index: Value = serde_json::from_str(&self.text("index.json")?)?;
        let digest = index["manifests"][0]["digest"].as_str().context("the index names no manifest")?.to_owned();
        let text = self.text(&place(&digest))?;
        let manifest: Value = serde_json::from_str(&text)?;
        let layers = manifest["layers"].as_array().context("the manifest has no layers")?;
        let blobs = std::iter::once(&manifest["config"]).chain(layers).map(|blob| {
            let digest = blob["digest"].as_str().context("a blob has no digest")?.to_owned();
            Ok(Blob { digest, size: blob["size"].as_u64().context("a blob has no size")? })
        });
        Ok((digest, text, blobs.collect::<Result<_>>()?))
    }

    /// Hands the content of a blob to a function.
    pub(crate) fn blob<T>(&self, digest: &str, with: impl FnOnce(&mut dyn Read) -> Result<T>) -> Result<T> {
        self.entry(&place(digest), with)
    }

    fn text(&self, name: &str) -> Result<String> {
        self.entry(name, |entry| {
            let mut text = String::new();
            entry.read_to_string(&mut text)?;
            Ok(text)
        })
    }

    fn entry<T>(&self, name: &str, with: impl FnOnce(&mut dyn Read) -> Result<T>) -> Result<T> {
        let file = File::open(&self.path).with_context(|| format!("the image {}", self.path.display()))?;
        let mut archive = tar::Archive::new(file);
        for entry in archive.entries_with_seek()? {
            let mut entry = entry?;
            if entry.path()? == Path::new(name) {
                return with(&mut entry);
            }
        }
        anyhow::bail!("{} has no {name}: it is no image in the OCI layout", self.path.display())
    }
}

/// Writes a blob and returns its descriptor.
fn blob(to: &mut Layout, kind: &str, mut bytes: &[u8]) -> Result<Value> {
    let (digest, size) = digest_of(bytes)?;
    to.put(&place(&digest), size, &mut bytes)?;
    Ok(json!({"mediaType": kind, "digest": digest, "size": size}))
}

fn place(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

fn header(size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(mode);
    header
}

fn digest_of(mut from: impl Read) -> Result<(String, u64)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut size = 0;
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok((format!("sha256:{}", hex(&hash.finalize())), size)),
            n => {
                hash.update(&buffer[..n]);
                size += n as u64;
            }
        }
    }
}

/// The architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Bytes in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_always_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = |path: &str| FileEntry { path: path.to_owned(), content: b"x".to_vec(), mode: 0o644 };
        let write = |name: &str, files: &[FileEntry], user: &str| {
            let image = Image::scratch().files(files).unwrap().user(user).entrypoint(&["/a/b"]);
            image.write("aviflow.test/x:1", &folder.path().join(name)).unwrap()
        };
        let digest = write("one", &[file("/a/b"), file("/a/c")], "1");
        assert_eq!(digest, write("two", &[file("/a/c"), file("/a/b")], "1"));
        assert_ne!(digest, write("three", &[file("/a/c"), file("/a/b")], "2"));
        // A folder holds the same.
        let image = Image::scratch().files(&[file("/a/b"), file("/a/c")]).unwrap().user("1").entrypoint(&["/a/b"]);
        assert_eq!(digest, image.write_folder("aviflow.test/x:1", &folder.path().join("layout")).unwrap());
        let index = std::fs::read_to_string(folder.path().join("layout/index.json")).unwrap();
        assert!(index.contains(&digest) && index.contains(r#""org.opencontainers.image.ref.name":"1""#), "{index}");
        assert!(folder.path().join("layout/blobs").join(digest.replace(':', "/")).is_file());
        let archive = Archive::open(&folder.path().join("one"));
        let (read, text, blobs) = archive.manifest().unwrap();
        assert_eq!((read, digest_of(text.as_bytes()).unwrap().0), (digest.clone(), digest));
        for blob in blobs {
            let found = archive.blob(&blob.digest, |content| digest_of(content)).unwrap();
            assert_eq!(found, (blob.digest, blob.size));
        }
    }
}
