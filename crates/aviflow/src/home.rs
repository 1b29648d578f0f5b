//! The folder in which the local control plane keeps everything, and how one finds it.
//!
//! ```text
//! server.lock   held by the control plane while it runs
//! server.json   where it listens, written once it answers
//! start.lock    held while somebody starts it
//! token         the bearer token, for this user alone
//! pool.json     the pool it was last started with
//! store.json    the database that has the store, where it is not in this folder
//! notified.json how far people were told of their jobs
//! server.log    what it says when it runs in the background
//! python/       the hooks, by their content
//! ```

use crate::error::{Failure, Result, While};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home(PathBuf);

/// What `server.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerFile {
    /// The process.
    pub pid: u32,
    /// The address.
    pub url: String,
    /// The version of the program.
    pub version: String,
    /// When it started, in milliseconds since 1970.
    pub started: i64,
    /// The certificate in PEM by which it is known, where it speaks TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
}

/// The local pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolFile {
    /// Nodes.
    pub nodes: u32,
    /// GPUs on each.
    pub gpus_per_node: u32,
    /// Their type.
    pub gpu_type: String,
}

impl Default for PoolFile {
    fn default() -> PoolFile {
        PoolFile { nodes: 2, gpus_per_node: 8, gpu_type: "virtual".to_owned() }
    }
}

/// A lock that is held until this is dropped, or the process ends in any way.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not used")] File);

impl Home {
    /// `$AVIFLOW_HOME`, else `$XDG_STATE_HOME/aviflow`, else `~/.local/state/aviflow`.
    pub fn find() -> Result<Home> {
        Home::from_env(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))
    }

    fn from_env(var: impl Fn(&str) -> Option<PathBuf>) -> Result<Home> {
        let folder = var("AVIFLOW_HOME")
            .or_else(|| Some(var("XDG_STATE_HOME").filter(|p| p.is_absolute())?.join("aviflow")))
            .or_else(|| Some(var("HOME")?.join(".local/state/aviflow")));
        let folder = folder.ok_or_else(|| Failure::new("there is no home folder").help("set AVIFLOW_HOME"))?;
        Home::at(&folder)
    }

    /// That folder.
    pub fn at(folder: &Path) -> Result<Home> {
        // Absolute, as the control plane and its agents have other working folders.
        let folder = std::path::absolute(folder).or_fail(|| format!("{} is no path", folder.display()))?;
        Ok(Home(folder))
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A path in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Makes the folder, for this user alone.
    pub fn create(&self) -> Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0).map_err(|e| {
            Failure::new(format!("{} cannot be made: {e}", self.0.display()))
                .help("set AVIFLOW_HOME to a folder that you may write")
        })
    }

    /// What runs, by what it wrote down; `None` where nothing holds the lock.
    pub fn server(&self) -> Result<Option<ServerFile>> {
        if self.try_lock("server.lock", FlockOperation::NonBlockingLockShared)?.is_some() {
            return Ok(None);
        }
        let path = self.join("server.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).or_fail(|| format!("{} is damaged", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Failure::new(format!("{} cannot be read: {e}", path.display()))),
        }
    }

    /// The token, if there is one.
    pub fn token(&self) -> Result<Option<String>> {
        read_token(&self.join("token"))
    }

    /// The pool it was last started with.
    pub fn pool(&self) -> PoolFile {
        // A lost or damaged file costs nothing but the defaults.
        fs::read(self.join("pool.json")).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default()
    }

    /// Becomes the control plane of this folder, or says who is.
    pub fn lock_server(&self) -> Result<Lock> {
        self.try_lock("server.lock", FlockOperation::NonBlockingLockExclusive)?.ok_or_else(|| {
            let who =
                self.server().ok().flatten().map_or(String::new(), |s| format!(" (process {}, {})", s.pid, s.url));
            Failure::new(format!("a control plane runs in {} already{who}", self.0.display()))
                .help("use it, or stop it with `aviflow server stop`")
        })
    }

    /// The same where several may be in one folder, of which another decides who works: none if one of them has it.
    pub fn try_lock_server(&self) -> Result<Option<Lock>> {
        self.try_lock("server.lock", FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes back what a control plane wrote of where it listens, unless another has written it since.
    pub fn forget_server(&self, file: &ServerFile) {
        let path = self.join("server.json");
        let written = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<ServerFile>(&bytes).ok());
        if written.as_ref() == Some(file) {
            // It may be gone; and who reads it looks whether the lock is held.
            let _ = fs::remove_file(path);
        }
    }

    /// Waits until no control plane runs here.
    pub fn wait_stopped(&self) -> Result<()> {
        self.lock_file("server.lock", FlockOperation::LockShared).map(drop)
    }

    /// Waits until nobody else starts one.
    pub fn lock_start(&self) -> Result<Lock> {
        self.create()?;
        self.lock_file("start.lock", FlockOperation::LockExclusive)
    }

    fn lock_file(&self, name: &str, operation: FlockOperation) -> Result<Lock> {
        let path = self.join(name);
        let open = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path);
        let file = open.or_fail(|| format!("{} cannot be opened", path.display()))?;
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(Lock(file)),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Failure::new(format!("{} cannot be locked: {e}", path.display()))),
            }
        }
    }

    fn try_lock(&self, name: &str, operation: FlockOperation) -> Result<Option<Lock>> {
        let path = self.join(name);
        let file = match OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path) {
            Ok(file) => file,
            // Without the folder nothing can run in it.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let unlocked = File::open("/dev/null").or_fail(|| "/dev/null cannot be opened".to_owned())?;
                return Ok(Some(Lock(unlocked)));
            }
            Err(e) => return Err(Failure::new(format!("{} cannot be opened: {e}", path.display()))),
        };
        match flock(&file, operation) {
            Ok(()) => Ok(Some(Lock(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Failure::new(format!("{} cannot be locked: {e}", path.display()))),
        }
    }

    /// Writes a file whole or not at all, for this user alone.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_private(&self.join(name), bytes)
    }
}

/// A token's file, without its newline; `None` if there is none.
pub fn read_token(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Failure::new(format!("{} cannot be read: {e}", path.display()))),
    }
}

/// Writes a file whole or not at all, readable by this user alone.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().or_fail(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_found_in_the_usual_order() {
        let cases: [(&[(&str, &str)], &str); 4] = [
            (&[("AVIFLOW_HOME", "/a"), ("XDG_STATE_HOME", "/x"), ("HOME", "/h")], "/a"),
            (&[("XDG_STATE_HOME", "/x"), ("HOME", "/h")], "/x/aviflow"),
            (&[("XDG_STATE_HOME", "relative"), ("HOME", "/h")], "/h/.local/state/aviflow"),
            (&[("HOME", "/h")], "/h/.local/state/aviflow"),
        ];
        for (vars, path) in cases {
            let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v));
            assert_eq!(Home::from_env(var).expect("home").path(), Path::new(path));
        }
        assert!(Home::from_env(|_| None).is_err());
    }

    #[test]
    fn only_who_holds_the_lock_runs() {
        let folder = tempfile::tempdir().expect("folder");
        let home = Home::at(folder.path()).expect("home");
        let file =
            ServerFile { pid: 1, url: "http://127.0.0.1:1".into(), version: "0".into(), started: 0, authority: None };
        home.write("server.json", &serde_json::to_vec(&file).expect("json")).expect("write");
        assert_eq!(home.server(), Ok(None), "a file of a control plane that is gone says nothing");
        let lock = home.lock_server().expect("lock");
        assert_eq!(home.server(), Ok(Some(file)));
        let refused = home.lock_server().expect_err("refused");
        assert!(refused.message.contains("(process 1, http://127.0.0.1:1)"), "{}", refused.message);
        drop(lock);
        assert_eq!(home.server(), Ok(None));
    }

    #[test]
    fn nothing_runs_in_a_folder_that_does_not_exist() {
        assert_eq!(Home::at(Path::new("/nonexistent/aviflow")).expect("home").server(), Ok(None));
    }
}
