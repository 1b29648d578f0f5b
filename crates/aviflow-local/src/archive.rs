//! The one form in which code, and a layer of packages, is archived, and by which it is hashed.
//!
//! An uncompressed tar of files and links, sorted by path, with no times, owners
//! or folders in it; of the mode only the execute bit counts. So the same content
//! gives the same bytes, whether it is taken at submission or read again where it
//! was unpacked.

use aviflow_api::environment::hex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tar::{EntryType, Header};

/// What an archive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A file.
    File {
        /// Its bytes.
        size: u64,
        /// Whether anybody may execute it.
        executable: bool,
    },
    /// A symbolic link, and where it leads.
    Link(PathBuf),
}

/// An archive that is being written.
pub struct Archive<W: Write>(tar::Builder<Hashing<W>>);

impl<W: Write> Archive<W> {
    /// An empty one.
    pub fn new(into: W) -> Archive<W> {
        Archive(tar::Builder::new(Hashing { hasher: Sha256::new(), bytes: 0, inner: into }))
    }

    /// Adds an entry of a folder. They must come in the order of their paths.
    ///
    /// # Errors
    /// If it cannot be read, or has become shorter than it was.
    pub fn add(&mut self, root: &Path, name: &Path, entry: &Entry) -> io::Result<()> {
        // A new header has no times and no owner.
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        match entry {
            Entry::File { size, executable } => {
                header.set_entry_type(EntryType::Regular);
                header.set_mode(if *executable { 0o755 } else { 0o644 });
                header.set_size(*size);
                // A file that grows meanwhile is cut at the size that its header says.
                let mut content = File::open(root.join(name))?.take(*size);
                self.0.append_data(&mut header, name, &mut content)?;
                if content.limit() > 0 {
                    return Err(io::Error::other("it became shorter while it was read; submit again"));
                }
                Ok(())
            }
            Entry::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                header.set_size(0);
                self.0.append_link(&mut header, name, target)
            }
        }
    }

    /// Ends it; gives its SHA-256 and its bytes.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(self) -> io::Result<(String, u64)> {
        let mut done = self.0.into_inner()?;
        done.flush()?;
        Ok((hex(&done.hasher.finalize()), done.bytes))
    }
}

struct Hashing<W> {
    hasher: Sha256,
    bytes: u64,
    inner: W,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Archives all that lies in a folder; gives the archive's SHA-256 and its bytes.
///
/// # Errors
/// If something cannot be read, or is neither a file, a folder nor a link, or the archive cannot be written.
pub fn pack(folder: &Path, into: impl Write) -> io::Result<(String, u64)> {
    let mut entries = BTreeMap::new();
    collect(folder, Path::new(""), &mut entries)?;
    let mut archive = Archive::new(into);
    for (name, entry) in &entries {
        archive.add(folder, name, entry)?;
    }
    archive.finish()
}

/// The SHA-256 that an archive of all that lies in a folder would have.
///
/// # Errors
/// As [`pack`].
pub fn hash(folder: &Path) -> io::Result<String> {
    Ok(pack(folder, io::sink())?.0)
}

fn collect(root: &Path, below: &Path, entries: &mut BTreeMap<PathBuf, Entry>) -> io::Result<()> {
    for found in fs::read_dir(root.join(below))? {
        let found = found?;
        let name = below.join(found.file_name());
        let meta = found.metadata()?;
        if meta.is_dir() {
            collect(root, &name, entries)?;
        } else if meta.is_symlink() {
            entries.insert(name, Entry::Link(fs::read_link(found.path())?));
        } else if meta.is_file() {
            let executable = meta.permissions().mode() & 0o111 != 0;
            entries.insert(name, Entry::File { size: meta.len(), executable });
        } else {
            return Err(io::Error::other(format!("{} is no file", found.path().display())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_unpacked_has_the_hash_of_what_was_archived() {
        let home = tempfile::tempdir().expect("folder");
        let (code, again) = (home.path().join("code"), home.path().join("again"));
        let write = |name: &str, text: &str| {
            let path = code.join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            fs::write(path, text).expect("file");
        };
        for (name, text) in [("train.py", "1"), ("a/b.py", "2"), ("a-b", "3"), ("a.d/c", ""), (".hidden", "4")] {
            write(name, text);
        }
        write(&format!("{}/{}", "d".repeat(120), "f".repeat(120)), "long");
        fs::set_permissions(code.join("a/b.py"), fs::Permissions::from_mode(0o700)).expect("mode");
        std::os::unix::fs::symlink("../train.py", code.join("a/up")).expect("link");
        let tar = home.path().join("code.tar");
        let (sha256, bytes) = pack(&code, File::create(&tar).expect("file")).expect("packed");
        assert_eq!(fs::metadata(&tar).expect("archive").len(), bytes);
        assert_eq!(sha256, hex(&Sha256::digest(fs::read(&tar).expect("archive"))));
        crate::code::unpack("code snapshot", &tar, &again).expect("unpacked");
        assert_eq!(hash(&again).expect("hash"), sha256);

        let differs = |what: &str| assert_ne!(hash(&again).expect("hash"), sha256, "{what}");
        fs::set_permissions(again.join("a/b.py"), fs::Permissions::from_mode(0o644)).expect("mode");
        differs("a mode");
        fs::set_permissions(again.join("a/b.py"), fs::Permissions::from_mode(0o755)).expect("mode");
        assert_eq!(hash(&again).expect("hash"), sha256);
        fs::write(again.join("train.py"), "2").expect("file");
        differs("a text");
        fs::write(again.join("train.py"), "1").expect("file");
        fs::write(again.join("new"), "").expect("file");
        differs("a file that was not there");
    }
}
