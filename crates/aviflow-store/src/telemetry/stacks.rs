//! Stacks of a job that stood still, beside its logs: `logs/<job>/stacks/<unix ms>.json`. The newest are kept.

use super::make_folder;
use aviflow_core::time::Time;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// How many are kept of a job.
const KEPT: usize = 5;

pub(super) fn keep(logs: &Path, at: Time, stacks: &[u8]) -> io::Result<()> {
    let folder = logs.join("stacks");
    make_folder(&folder)?;
    let (part, whole) = (folder.join("part"), folder.join(format!("{}.json", at.0)));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(stacks)?;
    fs::rename(part, whole)?;
    let mut all = all(&folder)?;
    while all.len() > KEPT {
        fs::remove_file(all.remove(0).1)?;
    }
    Ok(())
}

pub(super) fn last(logs: &Path) -> io::Result<Option<Vec<u8>>> {
    let newest = all(&logs.join("stacks"))?.pop();
    newest.map(|(_, path)| fs::read(path)).transpose()
}

/// All that there are, by when they were taken.
fn all(folder: &Path) -> io::Result<Vec<(i64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let at = entry.file_name().to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok());
        found.extend(at.map(|at| (at, entry.path())));
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let logs = tempfile::tempdir().expect("a folder");
        assert_eq!(last(logs.path()).expect("nothing is no error"), None);
        for at in [9, 100, 20, 30, 40, 50, 60] {
            keep(logs.path(), Time(at), format!("{at}").as_bytes()).expect("kept");
        }
        assert_eq!(last(logs.path()).expect("read").as_deref(), Some(&b"100"[..]), "by time, and not by name");
        let kept: Vec<i64> = all(&logs.path().join("stacks")).expect("read").into_iter().map(|(at, _)| at).collect();
        assert_eq!(kept, [30, 40, 50, 60, 100]);
    }
}
