//! How far people were told, in a file of the home folder, so that the next control plane tells nothing twice.
//!
//! Where several control planes take turns on one store, each with a folder of its own, a file may be of long ago:
//! the term tells. Whoever has the term right after it goes on from there. Any other tells again what happened in the
//! last half minute before it began, and nothing older.

use crate::home::write_private;
use crate::output::note;
use aviflow_core::model::JobId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cursor {
    /// The term under which the store was held.
    pub term: u64,
    /// The newest job that was looked at.
    pub newest: Option<JobId>,
    /// For each job that lives and tells somebody: up to which row of its timeline, for each of its `notify`.
    pub jobs: BTreeMap<JobId, Vec<u64>>,
}

/// The file, and what was written last.
pub struct CursorFile {
    path: PathBuf,
    written: Cursor,
    well: bool,
}

impl CursorFile {
    /// Reads the file; with what it says, if that holds under this term.
    pub fn open(path: PathBuf, term: u64) -> (CursorFile, Option<Cursor>) {
        let read = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Cursor>(&bytes).ok());
        let holds = read.filter(|cursor| cursor.term + 1 == term);
        (CursorFile { path, written: Cursor::default(), well: true }, holds)
    }

    /// Writes it, if it says something else by now.
    pub fn write(&mut self, cursor: Cursor) {
        if cursor == self.written {
            return;
        }
        let bytes = serde_json::to_vec(&cursor).unwrap_or_default();
        match write_private(&self.path, &bytes) {
            Ok(()) => {
                self.written = cursor;
                self.well = true;
            }
            Err(failure) if std::mem::replace(&mut self.well, false) => {
                note(&format!("how far people were told of their jobs cannot be kept: {}", failure.message));
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_next_term_goes_on_from_it() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("notified.json");
        let (mut file, nothing) = CursorFile::open(path.clone(), 3);
        assert_eq!(nothing, None);
        let cursor = Cursor { term: 3, newest: Some(JobId(9)), jobs: [(JobId(7), vec![4, 0])].into() };
        file.write(cursor.clone());
        for (term, expected) in [(4, Some(&cursor)), (3, None), (5, None)] {
            assert_eq!(CursorFile::open(path.clone(), term).1.as_ref(), expected, "{term}");
        }
        std::fs::write(&path, "{").expect("write");
        assert_eq!(CursorFile::open(path, 4).1, None);
    }
}
