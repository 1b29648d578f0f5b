//! What the binary carries: the standard environments and the Python hooks.

use crate::error::{Failure, Result, While};
use crate::home::Home;
use aviflow_api::environment::{hash, hex, parse_environment};
use aviflow_server::CatalogueEntry;
use include_dir::{Dir, File, include_dir};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

static ENVIRONMENTS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../environments");
static HOOKS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../python/aviflow/src");

/// The standard environments.
pub fn environments() -> Result<Vec<CatalogueEntry>> {
    ENVIRONMENTS.dirs().filter(|d| file(d, "environment.yaml").is_some()).map(environment).collect()
}

fn file<'a>(folder: &Dir<'a>, name: &str) -> Option<&'a File<'a>> {
    folder.files().find(|f| f.path().file_name().is_some_and(|n| n == name))
}

fn environment(folder: &Dir<'_>) -> Result<CatalogueEntry> {
    let name = folder.path().display().to_string();
    let broken = |what: String| {
        Failure::platform(format!("the shipped environment `{name}` is broken: {what}")).help("please report this")
    };
    let text = file(folder, "environment.yaml").map(File::contents).unwrap_or_default();
    let parsed = parse_environment(&name, text, Some(&name))
        .map_err(|d| broken(d.iter().map(|d| d.message.clone()).collect::<Vec<_>>().join("; ")))?;
    let description = parsed.description;
    let lock = file(folder, &description.requirements)
        .and_then(File::contents_utf8)
        .ok_or_else(|| broken("it has no lock".to_owned()))?;
    Ok(CatalogueEntry {
        hash: hash(&description, &[lock.as_bytes()]),
        name: description.name,
        version: description.version,
        description: description.description,
        python: description.python,
        env: description.env,
        lock: lock.to_owned(),
    })
}

/// The folder with the hooks, which is put in front of `PYTHONPATH`. It is named by its content,
/// so that trainings of an older version keep theirs.
pub fn hooks(home: &Home) -> Result<PathBuf> {
    let files = sources(&HOOKS);
    let mut hasher = Sha256::new();
    for file in &files {
        hasher.update(file.path().as_os_str().as_encoded_bytes());
        hasher.update([0]);
        hasher.update(Sha256::digest(file.contents()));
    }
    let mut name = hex(&hasher.finalize());
    name.truncate(16);
    let parent = home.join("python");
    let target = parent.join(name);
    if target.is_dir() {
        return Ok(target);
    }
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&parent)?;
        let new = tempfile::Builder::new().prefix(".new-").tempdir_in(&parent)?;
        write_hooks(new.path())?;
        // Whole or not at all, as ranks may start at any time.
        fs::rename(new.path(), &target)
    };
    write().or_fail(|| format!("the Python hooks cannot be written to {}", target.display()))?;
    Ok(target)
}

/// Writes the hooks below a folder.
pub fn write_hooks(folder: &Path) -> std::io::Result<()> {
    for file in sources(&HOOKS) {
        let path = folder.join(file.path());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, file.contents())?;
    }
    Ok(())
}

/// Sources alone: what Python compiled beside them is of the machine that built this program.
fn sources(folder: &'static Dir<'static>) -> Vec<&'static File<'static>> {
    let mut files: Vec<&File<'_>> = folder
        .files()
        .filter(|f| f.path().extension().is_some_and(|e| e == "py") || f.path().ends_with("py.typed"))
        .collect();
    files.extend(folder.dirs().flat_map(sources));
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_environments_are_whole() {
        let entries = environments().expect("environments");
        let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
        assert!(names.contains(&"minimal") && names.contains(&"jax-cpu"), "{names:?}");
        for entry in &entries {
            assert_eq!(aviflow_api::environment::check_lock(&entry.name, entry.lock.as_bytes()), [], "{}", entry.name);
        }
    }

    #[test]
    fn the_hooks_are_written_once() {
        let folder = tempfile::tempdir().expect("folder");
        let home = Home::at(folder.path()).expect("home");
        let target = hooks(&home).expect("hooks");
        assert!(target.join("aviflow/__init__.py").is_file());
        assert_eq!(hooks(&home), Ok(target.clone()));
        assert_eq!(fs::read_dir(folder.path().join("python")).expect("folder").count(), 1);
    }
}
