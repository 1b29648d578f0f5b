//! Backups: one file that is a store by itself, and the way back.

use super::lock::{FolderLock, make_folder};
use super::read::SqliteReader;
use super::schema::{self, at_path, sql};
use super::{FILE, SqliteStore};
use crate::convert::{failed, int, uint};
use aviflow_engine::ports::StoreError;
use rusqlite::{Connection, OpenFlags};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Added to the numbers of a backup when there is no store that says how far
/// they got since: more than can have been handed out. Agents and logs know
/// those numbers, so none may come twice.
const GAP: i64 = 1_000_000;

impl SqliteStore {
    /// As [`SqliteReader::backup`].
    ///
    /// # Errors
    /// As there.
    pub fn backup(&self, to: &Path) -> Result<(), StoreError> {
        self.reader()?.backup(to)
    }
}

impl SqliteReader {
    /// Copies the store, as it is now, to the new file `to`, while the writer goes on.
    ///
    /// # Errors
    /// If `to` exists, or cannot be written.
    pub fn backup(&self, to: &Path) -> Result<(), StoreError> {
        let temp = sibling(to, "part");
        let io = |e: io::Error| failed(format!("cannot write the backup {}: {e}", to.display()));
        if to.exists() {
            return Err(failed(format!("{} exists; name a new file", to.display())));
        }
        let written = (|| {
            // SQLite accepts an empty file; made here, it is nobody else's to read.
            new_file(&temp).map_err(io)?;
            let name = temp.to_str().ok_or_else(|| failed("the backup's path must be UTF-8; use another"))?;
            self.with(|conn| conn.execute("VACUUM INTO ?1", [name]).map(|_| ()).map_err(sql))?;
            File::open(&temp).and_then(|f| f.sync_all()).map_err(io)?;
            // Unlike a rename, a link never replaces a file that came in between.
            fs::hard_link(&temp, to).map_err(io)?;
            sync_folder(to).map_err(io)
        })();
        let _ = fs::remove_file(&temp);
        written
    }
}

/// Makes `folder` hold the store of the backup `from`. The file before is kept
/// beside it as `store.db.replaced`.
///
/// # Errors
/// If a control plane holds the folder, if the backup is damaged or of a newer
/// version, or if something cannot be written; then nothing was replaced.
pub fn restore(from: &Path, folder: &Path) -> Result<(), StoreError> {
    verify(from)?;
    make_folder(folder)?;
    let _lock = FolderLock::take(folder)?;
    let path = folder.join(FILE);
    let temp = sibling(&path, "restore");
    let io = |e: io::Error| failed(format!("cannot restore to {}: {e}", folder.display()));
    let _ = fs::remove_file(&temp);
    new_file(&temp).map_err(io)?;
    let done = (|| {
        fs::copy(from, &temp).map_err(io)?;
        let _ = fs::set_permissions(&temp, std::os::unix::fs::PermissionsExt::from_mode(0o600));
        raise_numbers(&temp, &path)?;
        File::open(&temp).and_then(|f| f.sync_all()).map_err(io)?;
        if path.exists() {
            let replaced = sibling(&path, "replaced");
            let _ = fs::remove_file(&replaced);
            fs::hard_link(&path, &replaced).map_err(io)?;
        }
        // A WAL of the file before would be applied to the new one.
        for name in ["store.db-wal", "store.db-shm"] {
            match fs::remove_file(folder.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io(e)),
                _ => {}
            }
        }
        fs::rename(&temp, &path).map_err(io)?;
        sync_folder(&path).map_err(io)
    })();
    let _ = fs::remove_file(&temp);
    done
}

/// Whether the file is a store, whole and known.
fn verify(from: &Path) -> Result<(), StoreError> {
    let check = || {
        let conn = Connection::open_with_flags(from, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(sql)?;
        let version = schema::check(&conn, schema::version())?;
        let verdict: String = conn.query_row("PRAGMA integrity_check(1)", [], |r| r.get(0)).map_err(sql)?;
        match verdict.as_str() {
            "ok" if version > 0 => Ok(()),
            "ok" => Err(failed("it is no backup of a store; name another file")),
            wrong => Err(failed(format!("the backup is damaged ({wrong}); use another one"))),
        }
    };
    check().map_err(|e| at_path(e, from))
}

/// Terms and numbers go on from the store that is replaced.
fn raise_numbers(restored: &Path, replaced: &Path) -> Result<(), StoreError> {
    let numbers = if replaced.exists() { read_numbers(replaced) } else { Err(failed("there is none")) };
    let mut conn = Connection::open(restored).map_err(sql)?;
    schema::update(&mut conn)?;
    conn.pragma_update(None, "journal_mode", "DELETE").map_err(sql)?;
    let text = "UPDATE meta SET term = max(term, ?1), last_job = max(last_job, ?2), last_node = max(last_node, ?3),
                last_drain = max(last_drain, ?4)";
    match numbers {
        Ok(n) => conn.execute(text, n.map(int)).map(|_| ()).map_err(sql),
        Err(_) => {
            let text = "UPDATE meta SET term = term + ?1, last_job = last_job + ?1, last_node = last_node + ?1,
                        last_drain = last_drain + ?1";
            conn.execute(text, [GAP]).map(|_| ()).map_err(sql)
        }
    }
}

/// Term, last job, last node and last drain. Reading them also moves what the WAL has into
/// the file, which makes the file that is kept whole by itself.
fn read_numbers(path: &Path) -> Result<[u64; 4], StoreError> {
    let conn = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(sql)?;
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).map_err(sql)?;
    // One of the first version knows no drains.
    let drain = if schema::check(&conn, schema::version())? > 1 { "last_drain" } else { "0" };
    conn.query_row(&format!("SELECT term, last_job, last_node, {drain} FROM meta"), [], |r| {
        Ok([uint(r.get(0)?), uint(r.get(1)?), uint(r.get(2)?), uint(r.get(3)?)])
    })
    .map_err(sql)
}

fn sibling(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Makes a new name durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
