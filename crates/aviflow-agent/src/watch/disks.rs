//! Whether the folders that a job writes to have space left.

use crate::sys;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Between two looks, in milliseconds.
pub(super) const PERIOD_MS: u64 = 10_000;

/// Bytes below which no space counts as left, where the file system is not so small that they are a part of it.
const LEAST: u64 = 64 << 20;

/// The folders, and whether each was said to be full.
#[derive(Debug, Default)]
pub(super) struct Disks(BTreeMap<PathBuf, bool>);

impl Disks {
    pub(super) fn new(folders: Vec<PathBuf>) -> Disks {
        Disks(folders.into_iter().map(|folder| (folder, false)).collect())
    }

    /// Looks once; tells those that have become full. What cannot be looked at is as it was.
    pub(super) fn look(&mut self, mut full: impl FnMut(String)) {
        for (folder, said) in &mut self.0 {
            if let Ok((free, total)) = sys::space(folder)
                && turn(said, free, total)
            {
                full(folder.to_string_lossy().into_owned());
            }
        }
    }
}

/// Whether a file system has become full: under 0.1% or 64 MiB are free. It is full until there is clearly more.
fn turn(said: &mut bool, free: u64, total: u64) -> bool {
    let least = (total / 1000).max(LEAST.min(total / 16));
    if *said {
        *said = free <= (total / 100).max(2 * least);
        return false;
    }
    *said = free < least;
    *said
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MiB of a file system, and of what is free one look after the other; whether it is told.
    fn check(total: u64, free: &[(u64, bool)]) {
        let mut said = false;
        for (free, told) in free {
            assert_eq!(turn(&mut said, free << 20, total << 20), *told, "{free} of {total}");
        }
    }

    #[test]
    fn a_disk_that_is_full_is_told_once_until_there_is_space_again() {
        let tib = 1 << 20;
        check(
            tib,
            &[(5000, false), (1048, true), (1000, false), (9000, false), (1000, false), (11_000, false), (1000, true)],
        );
        check(10_000, &[(64, false), (63, true), (0, false), (128, false), (60, false), (129, false), (60, true)]);
        // As large as containers have shared memory: it is not full while it is empty.
        check(64, &[(64, false), (5, false), (3, true), (8, false), (3, false), (9, false), (3, true)]);
        check(0, &[(0, false), (0, false)]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_not_full() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disks = Disks::new(vec![folder.path().join("nowhere"), folder.path().to_owned()]);
        let (free, total) = sys::space(folder.path()).expect("its space");
        assert!(free <= total && total > 0);
        disks.look(|full| assert!(full == folder.path().to_string_lossy() && free < LEAST, "{full}"));
    }
}
