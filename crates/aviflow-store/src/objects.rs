//! Code snapshots, locks and layers, each under the SHA-256 of its content, in a folder.
//!
//! A layer is asked for by what it is made of, before anybody knows its content: beside the objects stands for each
//! which object it is.
//!
//! Invariants:
//! - an object is whole or absent, whatever happens while it is written;
//! - nothing is read without being checked: damage is an error, never content;
//! - storing an object again, or touching it, makes it young again, so that a
//!   collection which began before the submission that needs it leaves it alone;
//! - a layer that is told is there, and stays as long as a job refers to it.

use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// How much is copied at once.
const BLOCK: usize = 64 << 10;

/// Objects in a folder.
#[derive(Debug)]
pub struct Objects {
    root: PathBuf,
    /// A file for each layer, which names its object.
    layers: PathBuf,
    temp: AtomicU64,
    /// Held where an object or a layer becomes young and where an old one goes, so that
    /// none goes which has just become young.
    ages: Mutex<()>,
}

/// What a collection took away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Objects, and files that were never finished.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Objects {
    /// Opens the objects beneath `folder`, in `objects/sha256`, with the layers in `objects/layers`; the folders are
    /// made as needed.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn open(folder: &Path) -> io::Result<Objects> {
        let root = folder.join("objects").join("sha256");
        make_folder(&root)?;
        make_folder(&root.join("tmp"))?;
        let layers = folder.join("objects").join("layers");
        make_folder(&layers)?;
        Ok(Objects { root, layers, temp: AtomicU64::new(0), ages: Mutex::default() })
    }

    /// Stores what `from` yields; returns its hash and its bytes.
    ///
    /// # Errors
    /// If it cannot be read or written; then nothing is stored.
    pub fn put(&self, from: impl Read) -> io::Result<(String, u64)> {
        self.store(None, from)
    }

    /// Stores what `from` yields if it has the hash that it should have.
    ///
    /// # Errors
    /// As [`Objects::put`], and if the hash is another one.
    pub fn put_expected(&self, hash: &str, from: impl Read) -> io::Result<u64> {
        self.path(hash)?;
        self.store(Some(hash), from).map(|(_, bytes)| bytes)
    }

    /// Opens an object. The reader fails at the end if the content is not what
    /// its hash says, so read it to the end before you use it.
    ///
    /// # Errors
    /// If there is no such object.
    pub fn get(&self, hash: &str) -> io::Result<Checked> {
        Ok(Checked { file: self.file(hash)?, hash: hash.to_owned(), seen: Some(Sha256::new()) })
    }

    /// Opens the file of an object, for who checks it himself.
    ///
    /// # Errors
    /// If there is no such object.
    pub fn file(&self, hash: &str) -> io::Result<File> {
        File::open(self.path(hash)?).map_err(|e| missing(hash, e))
    }

    /// Reads an object whole.
    ///
    /// # Errors
    /// As [`Objects::get`], and if it is damaged.
    pub fn read(&self, hash: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.get(hash)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Whether there is such an object.
    #[must_use]
    pub fn has(&self, hash: &str) -> bool {
        self.path(hash).is_ok_and(|p| p.is_file())
    }

    /// Makes an object young again, as storing it would; says whether it is there.
    /// Whoever is about to refer to it asks with this, and no collection takes it
    /// before that is durable.
    ///
    /// # Errors
    /// If there is one and its age cannot be set.
    pub fn touch(&self, hash: &str) -> io::Result<bool> {
        let path = self.path(hash)?;
        let _ages = self.ages();
        rejuvenate(&path)
    }

    fn ages(&self) -> MutexGuard<'_, ()> {
        self.ages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of an object.
    ///
    /// # Errors
    /// If there is no such object.
    pub fn size(&self, hash: &str) -> io::Result<u64> {
        fs::metadata(self.path(hash)?).map(|m| m.len()).map_err(|e| missing(hash, e))
    }

    /// Says which object, which must be there, a layer is.
    ///
    /// # Errors
    /// If one of the two is no hash, there is no such object, or it cannot be written.
    pub fn set_layer(&self, layer: &str, object: &str) -> io::Result<()> {
        self.path(layer)?;
        let path = self.path(object)?;
        self.drafted(|file, temp| {
            file.write_all(object.as_bytes())?;
            file.sync_all()?;
            {
                let _ages = self.ages();
                if !rejuvenate(&path)? {
                    return Err(missing(object, io::ErrorKind::NotFound.into()));
                }
                fs::rename(temp, self.layers.join(layer))?;
            }
            File::open(&self.layers)?.sync_all()
        })
    }

    /// Says that a layer is not this object any more, which was found to be damaged: it is made again.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn unset_layer(&self, layer: &str, object: &str) -> io::Result<()> {
        self.path(layer)?;
        let path = self.layers.join(layer);
        let _ages = self.ages();
        match fs::read_to_string(&path) {
            Ok(found) if found == object => fs::remove_file(&path),
            // Another has been made meanwhile.
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The object that a layer is, if it is there; makes both young again, as [`Objects::touch`] does.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn layer(&self, layer: &str) -> io::Result<Option<String>> {
        self.path(layer)?;
        let path = self.layers.join(layer);
        // Both at once: a collection takes both, or neither.
        let _ages = self.ages();
        let object = match fs::read_to_string(&path) {
            Ok(object) => object,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        // One that is damaged is made again.
        let Ok(content) = self.path(&object) else { return Ok(None) };
        Ok((rejuvenate(&content)? && rejuvenate(&path)?).then_some(object))
    }

    /// Removes what is not in `live`, and is no layer that is in it, and was last stored before `older_than`.
    ///
    /// # Errors
    /// If a folder cannot be read or a file not removed.
    pub fn collect(&self, live: &BTreeSet<String>, older_than: SystemTime) -> io::Result<Collected> {
        let mut collected = Collected::default();
        let mut live = live.clone();
        for file in fs::read_dir(&self.layers)? {
            let file = file?;
            let _ages = self.ages();
            let kept = live.contains(file.file_name().to_string_lossy().as_ref());
            let done = match kept {
                true => fs::read_to_string(file.path()).map(|object| {
                    live.insert(object);
                }),
                false => file
                    .metadata()
                    .and_then(|meta| meta.modified())
                    .and_then(|modified| if modified < older_than { fs::remove_file(file.path()) } else { Ok(()) }),
            };
            // One that was damaged is gone meanwhile, see `unset_layer`.
            done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })?;
        }
        for folder in fs::read_dir(&self.root)? {
            let folder = folder?;
            let first = folder.file_name();
            for file in fs::read_dir(folder.path())? {
                let file = file?;
                let hash = format!("{}{}", first.to_string_lossy(), file.file_name().to_string_lossy());
                let _ages = self.ages();
                let meta = file.metadata()?;
                if live.contains(&hash) || meta.modified()? >= older_than {
                    continue;
                }
                fs::remove_file(file.path())?;
                collected.files += 1;
                collected.bytes += meta.len();
            }
        }
        Ok(collected)
    }

    /// Bytes on disk.
    ///
    /// # Errors
    /// If a folder cannot be read.
    pub fn disk_usage(&self) -> io::Result<u64> {
        crate::telemetry::disk_usage(&self.root)
    }

    fn store(&self, expected: Option<&str>, mut from: impl Read) -> io::Result<(String, u64)> {
        self.drafted(|file, temp| {
            let (hash, bytes) = copy(&mut from, file)?;
            if let Some(expected) = expected
                && expected != hash
            {
                let why = format!("the content has the hash {hash} and should have {expected}; send it again");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            file.sync_all()?;
            let path = self.path(&hash)?;
            let folder = path.parent().unwrap_or(&self.root);
            make_folder(folder)?;
            // Over an equal object: that replaces a damaged one, and makes it young again.
            {
                let _ages = self.ages();
                fs::rename(temp, &path)?;
            }
            File::open(folder)?.sync_all()?;
            Ok((hash, bytes))
        })
    }

    /// Makes a file that is moved to its place once it is whole; where that fails nothing of it is left.
    fn drafted<T>(&self, make: impl FnOnce(&mut File, &Path) -> io::Result<T>) -> io::Result<T> {
        let number = self.temp.fetch_add(1, Ordering::Relaxed);
        let temp = self.root.join("tmp").join(format!("{}-{number}", std::process::id()));
        let mut open = OpenOptions::new();
        let file = open.write(true).create(true).truncate(true).mode(0o600).open(&temp);
        let made = file.and_then(|mut file| make(&mut file, &temp));
        if made.is_err() {
            let _ = fs::remove_file(&temp);
        }
        made
    }

    fn path(&self, hash: &str) -> io::Result<PathBuf> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if hash.len() != 64 || !hash.bytes().all(hex) {
            let why = format!("{hash:?} is no SHA-256 hash; give 64 lower-case hexadecimal digits");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(self.root.join(&hash[..2]).join(&hash[2..]))
    }
}

/// An object that is being read.
#[derive(Debug)]
pub struct Checked {
    file: File,
    hash: String,
    /// `None` once the end was reached and checked.
    seen: Option<Sha256>,
}

impl Read for Checked {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        if n > 0 {
            if let Some(seen) = &mut self.seen {
                seen.update(&out[..n]);
            }
            return Ok(n);
        }
        if out.is_empty() {
            return Ok(0);
        }
        match self.seen.take().map(|seen| hex(&seen.finalize())) {
            Some(found) if found != self.hash => {
                let why = format!(
                    "the object {} is damaged (its content has the hash {found}); restore it from a backup or submit it again",
                    self.hash
                );
                Err(io::Error::new(io::ErrorKind::InvalidData, why))
            }
            Some(_) | None => Ok(0),
        }
    }
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<(String, u64)> {
    let mut block = vec![0; BLOCK];
    let mut seen = Sha256::new();
    let mut bytes = 0;
    loop {
        let n = match from.read(&mut block) {
            Ok(0) => return Ok((hex(&seen.finalize()), bytes)),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        seen.update(&block[..n]);
        to.write_all(&block[..n])?;
        bytes += n as u64;
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(64), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

fn missing(hash: &str, e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::NotFound => {
            io::Error::new(io::ErrorKind::NotFound, format!("there is no object {hash}; submit it again"))
        }
        _ => e,
    }
}

/// Makes a file young; whether it is there.
fn rejuvenate(path: &Path) -> io::Result<bool> {
    match File::open(path) {
        Ok(file) => file.set_modified(SystemTime::now()).map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;
    use tempfile::TempDir;

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn objects() -> (TempDir, Objects) {
        let folder = TempDir::new().unwrap();
        let objects = Objects::open(folder.path()).unwrap();
        (folder, objects)
    }

    fn files(objects: &Objects) -> usize {
        let folders = fs::read_dir(&objects.root).unwrap();
        folders.map(|f| fs::read_dir(f.unwrap().path()).unwrap().count()).sum()
    }

    #[test]
    fn the_hash_is_that_of_the_content() {
        let (folder, objects) = objects();
        assert_eq!(objects.put(&b""[..]).unwrap(), (EMPTY.to_owned(), 0));
        assert!(folder.path().join("objects/sha256/e3").join(&EMPTY[2..]).is_file());
        assert_eq!(objects.read(EMPTY).unwrap(), b"");
        assert_eq!(objects.size(EMPTY).unwrap(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn what_is_put_is_read_again(content in prop::collection::vec(any::<u8>(), 0..200_000)) {
            let (_folder, objects) = objects();
            let (hash, bytes) = objects.put(&content[..]).unwrap();
            prop_assert_eq!(bytes, content.len() as u64);
            prop_assert_eq!(objects.put_expected(&hash, &content[..]).unwrap(), bytes);
            prop_assert_eq!(objects.read(&hash).unwrap(), content);
            prop_assert_eq!(files(&objects), 1);
        }
    }

    #[test]
    fn content_that_is_not_expected_is_not_stored() {
        let (_folder, objects) = objects();
        let e = objects.put_expected(EMPTY, &b"x"[..]).unwrap_err();
        assert!(e.to_string().contains("send it again"), "{e}");
        assert!(!objects.has(EMPTY));
        assert_eq!(files(&objects), 0);
    }

    #[test]
    fn a_source_that_fails_leaves_nothing() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("gone"))
            }
        }
        let (_folder, objects) = objects();
        assert!(objects.put((&b"some"[..]).chain(Broken)).is_err());
        assert_eq!(files(&objects), 0);
    }

    #[test]
    fn damage_is_an_error_and_storing_again_repairs_it() {
        let (_folder, objects) = objects();
        let (hash, _) = objects.put(&b"content"[..]).unwrap();
        fs::write(objects.path(&hash).unwrap(), b"c0ntent").unwrap();
        let e = objects.read(&hash).unwrap_err();
        assert!(e.to_string().contains("is damaged"), "{e}");
        objects.put(&b"content"[..]).unwrap();
        assert_eq!(objects.read(&hash).unwrap(), b"content");
    }

    #[test]
    fn a_hash_is_no_path() {
        let (_folder, objects) = objects();
        for bad in ["", "../../etc/passwd", &"A".repeat(64), &EMPTY[1..], &format!("{}/", &EMPTY[1..])] {
            assert_eq!(objects.get(bad).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bad}");
        }
        assert_eq!(objects.get(EMPTY).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn collection_takes_what_is_old_and_unreachable() {
        let (_folder, objects) = objects();
        let (live, _) = objects.put(&b"live"[..]).unwrap();
        let (old, _) = objects.put(&b"old"[..]).unwrap();
        let (young, _) = objects.put(&b"young"[..]).unwrap();
        fs::write(objects.root.join("tmp/left"), b"torn").unwrap();
        let noon = SystemTime::now();
        let age = |path: &Path, by: u64| {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.set_modified(noon - Duration::from_secs(by)).unwrap();
        };
        for path in [objects.path(&live), objects.path(&old), Ok(objects.root.join("tmp/left"))] {
            age(&path.unwrap(), 7200);
        }
        age(&objects.path(&young).unwrap(), 60);
        let hour_ago = noon - Duration::from_secs(3600);
        let collected = objects.collect(&BTreeSet::from([live.clone()]), hour_ago).unwrap();
        assert_eq!(collected, Collected { files: 2, bytes: 7 });
        assert!(objects.has(&live) && objects.has(&young) && !objects.has(&old));
        // Stored again, an old object is young.
        age(&objects.path(&young).unwrap(), 7200);
        objects.put(&b"young"[..]).unwrap();
        assert_eq!(objects.collect(&BTreeSet::from([live]), hour_ago).unwrap(), Collected::default());
        assert_eq!(objects.disk_usage().unwrap(), 9);
    }

    #[test]
    fn a_layer_is_kept_with_its_object_as_long_as_it_is_wanted() {
        let (_folder, objects) = objects();
        let layer = "ab".repeat(32);
        assert_eq!(objects.layer(&layer).unwrap(), None);
        assert_eq!(objects.set_layer(&layer, EMPTY).unwrap_err().kind(), io::ErrorKind::NotFound, "no such object");
        assert!(objects.set_layer("../x", EMPTY).is_err());
        let (object, _) = objects.put(&b"packages"[..]).unwrap();
        objects.set_layer(&layer, &object).unwrap();
        assert_eq!(objects.layer(&layer).unwrap(), Some(object.clone()));
        let old = || {
            let hour_ago = SystemTime::now() - Duration::from_secs(3600);
            for path in [objects.path(&object).unwrap(), objects.layers.join(&layer)] {
                File::open(path).unwrap().set_modified(hour_ago).unwrap();
            }
            hour_ago + Duration::from_secs(60)
        };
        let later = old();
        assert_eq!(objects.collect(&BTreeSet::from([layer.clone()]), later).unwrap().files, 0, "a job refers to it");
        // Who asks for it is about to refer to it.
        assert!(objects.layer(&layer).unwrap().is_some());
        assert_eq!(objects.collect(&BTreeSet::new(), later).unwrap().files, 0, "it is young");
        let later = old();
        assert_eq!(objects.collect(&BTreeSet::new(), later).unwrap().files, 1);
        assert_eq!(objects.layer(&layer).unwrap(), None);
        assert_eq!(fs::read_dir(&objects.layers).unwrap().count(), 0);
        // One whose object is lost is not there.
        objects.put(&b"packages"[..]).unwrap();
        objects.set_layer(&layer, &object).unwrap();
        fs::remove_file(objects.path(&object).unwrap()).unwrap();
        assert_eq!(objects.layer(&layer).unwrap(), None);
    }

    #[test]
    fn a_layer_that_is_told_survives_a_collection_at_the_same_time() {
        let (_folder, objects) = objects();
        let layer = "ab".repeat(32);
        let past = SystemTime::now() - Duration::from_secs(7200);
        let older_than = past + Duration::from_secs(3600);
        for round in 0..200 {
            let (object, _) = objects.put(&b"packages"[..]).unwrap();
            objects.set_layer(&layer, &object).unwrap();
            for path in [objects.path(&object).unwrap(), objects.layers.join(&layer)] {
                File::open(path).unwrap().set_modified(past).unwrap();
            }
            let told = std::thread::scope(|scope| {
                let collects = scope.spawn(|| objects.collect(&BTreeSet::new(), older_than).unwrap());
                let told = objects.layer(&layer).unwrap();
                collects.join().unwrap();
                told
            });
            if let Some(told) = told {
                assert_eq!(objects.read(&told).unwrap(), b"packages", "round {round}");
                assert_eq!(objects.layer(&layer).unwrap(), Some(told), "round {round}");
            }
        }
    }

    #[test]
    fn a_layer_is_unset_only_where_it_still_is_that_object() {
        let (_folder, objects) = objects();
        let layer = "ab".repeat(32);
        objects.unset_layer(&layer, EMPTY).unwrap();
        let (object, _) = objects.put(&b"packages"[..]).unwrap();
        objects.set_layer(&layer, &object).unwrap();
        objects.unset_layer(&layer, EMPTY).unwrap();
        assert_eq!(objects.layer(&layer).unwrap(), Some(object.clone()));
        objects.unset_layer(&layer, &object).unwrap();
        assert_eq!(objects.layer(&layer).unwrap(), None);
        assert!(objects.has(&object), "another layer may be the same");
    }

    #[test]
    fn an_object_that_is_touched_is_young_again() {
        let (_folder, objects) = objects();
        assert!(!objects.touch(EMPTY).unwrap());
        let (hash, _) = objects.put(&b"wanted"[..]).unwrap();
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        let old = || File::open(objects.path(&hash).unwrap()).unwrap().set_modified(hour_ago).unwrap();
        let later = hour_ago + Duration::from_secs(60);
        old();
        assert!(objects.touch(&hash).unwrap());
        assert_eq!(objects.collect(&BTreeSet::new(), later).unwrap().files, 0);
        old();
        assert_eq!(objects.collect(&BTreeSet::new(), later).unwrap().files, 1);
        assert!(!objects.touch(&hash).unwrap());
    }
}
