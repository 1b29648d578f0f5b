//! The lock of a store's folder: one control plane at a time on one machine.
//!
//! The kernel releases it with the process, however that ends. The term of the
//! store fences writers as well; the lock makes the mistake visible at start.

use crate::convert::failed;
use aviflow_engine::ports::StoreError;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// Held while it lives.
#[derive(Debug)]
pub(super) struct FolderLock {
    file: File,
}

impl Drop for FolderLock {
    /// Closing is not enough: a child between its fork and its exec has the file too.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

impl FolderLock {
    /// Takes the lock and writes this process's number into it, for people.
    pub(super) fn take(folder: &Path) -> Result<FolderLock, StoreError> {
        let path = folder.join("store.lock");
        let io = |e: std::io::Error| failed(format!("cannot lock {}: {e}", path.display()));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                // The holder may not have written it yet; then there is no number to show.
                let _ = file.read_to_string(&mut pid);
                let holder = match pid.trim() {
                    "" => "another process".to_owned(),
                    pid => format!("process {pid}"),
                };
                return Err(failed(format!(
                    "{holder} holds the store in {}; stop it first, or use another folder",
                    folder.display()
                )));
            }
            Err(TryLockError::Error(e)) => return Err(io(e)),
        }
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(FolderLock { file })
    }
}

/// Makes the store's folder, for its owner alone.
pub(super) fn make_folder(folder: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|e| failed(format!("cannot make the folder {}: {e}", folder.display())))
}
