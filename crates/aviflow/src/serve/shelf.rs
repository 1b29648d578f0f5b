//! The object store, as pods of a cluster need it.

use super::Find;
use aviflow_kube::depot;
use aviflow_store::Objects;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

/// The store's objects.
pub struct Shelf {
    pub objects: Arc<Objects>,
    /// Finds one whose content was checked.
    pub find: Find,
    /// Where they are.
    pub folder: PathBuf,
}

impl depot::Objects for Shelf {
    fn find(&self, sha256: &str) -> io::Result<PathBuf> {
        (self.find)(sha256)
    }

    fn open(&self, sha256: &str) -> io::Result<File> {
        self.objects.file(sha256)
    }

    fn put(&self, sha256: &str, from: &mut dyn Read) -> io::Result<()> {
        self.objects.put_expected(sha256, from).map(|_| ())
    }

    fn layer(&self, hash: &str) -> io::Result<Option<String>> {
        self.objects.layer(hash)
    }

    fn set_layer(&self, hash: &str, sha256: &str) -> io::Result<()> {
        self.objects.set_layer(hash, sha256)
    }

    fn unset_layer(&self, hash: &str, sha256: &str) -> io::Result<()> {
        self.objects.unset_layer(hash, sha256)
    }

    fn free(&self) -> io::Result<u64> {
        let disk = rustix::fs::statvfs(&self.folder)?;
        Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
}
