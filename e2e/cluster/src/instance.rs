//! Which cluster of this machine: a number from 0, from which its addresses, folder and control group follow.
//!
//! Invariant: a number is used by one process at a time, which holds a lock on a file. Whoever has the lock owns
//! everything of that number, and first removes what a predecessor left that was killed.

use crate::cgroup::Group;
use crate::run::output;
use anyhow::{Context as _, Result, bail};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How many clusters there may be at once: each has a network of its own, `10.200.0.0/16` to `10.203.0.0/16`.
const MOST: u8 = 4;

/// The number of a cluster, while it is ours.
#[derive(Debug)]
pub(crate) struct Instance {
    number: u8,
    folder: PathBuf,
    _lock: File,
}

impl Instance {
    /// Takes the first number that is free, and removes what is left of it.
    ///
    /// With `in_memory` its folder is in memory. containerd takes each container's file system off again, which
    /// waits until the disk below has written all that anybody has to write to it: a minute on a busy machine.
    pub(crate) fn take(in_memory: bool) -> Result<Instance> {
        let base = base()?;
        let mut taken = Vec::new();
        for number in 0..MOST {
            let lock = File::create(base.join(format!("{number}.lock")))?;
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    taken.push(format!("{number} is in use"));
                    continue;
                }
                Err(TryLockError::Error(error)) => return Err(error).context("the lock of a cluster"),
            }
            let instance = Instance { number, folder: base.join(number.to_string()), _lock: lock };
            instance.remove().with_context(|| format!("what is left of cluster {number} cannot be removed"))?;
            let network = instance.network();
            let others = output(Command::new("ip").args(["-4", "route", "show", "root", &network]))?;
            if others.trim().is_empty() {
                fs::create_dir_all(&instance.folder)?;
                if in_memory {
                    let mount = ["-t", "tmpfs", "-o", "mode=0700", "aviflow-kube"];
                    output(Command::new("mount").args(mount).arg(&instance.folder))?;
                }
                return Ok(instance);
            }
            taken.push(format!("{network} of {number} is routed elsewhere ({})", others.trim()));
        }
        bail!("no more clusters on this machine: {}", taken.join("; "))
    }

    /// Everything of this cluster below one folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The control group of all its processes.
    pub(crate) fn group(&self) -> Result<Group> {
        Group::of(&format!("aviflow-{}", self.number))
    }

    /// The network device on the host.
    pub(crate) fn device(&self) -> String {
        format!("avf{}", self.number)
    }

    fn prefix(&self) -> String {
        format!("10.{}", 200 + self.number)
    }

    /// All of its addresses.
    pub(crate) fn network(&self) -> String {
        format!("{}.0.0/16", self.prefix())
    }

    /// The host's address on the cluster's network.
    pub(crate) fn host(&self) -> String {
        format!("{}.0.1", self.prefix())
    }

    /// The control plane's address.
    pub(crate) fn control(&self) -> String {
        format!("{}.0.2", self.prefix())
    }

    /// The address of a node.
    pub(crate) fn node(&self, index: usize) -> String {
        format!("{}.0.{}", self.prefix(), 10 + index)
    }

    /// The addresses of a node's pods.
    pub(crate) fn pods(&self, index: usize) -> String {
        format!("{}.{}.0/24", self.prefix(), 100 + index)
    }

    /// The addresses of services.
    pub(crate) fn services(&self) -> String {
        format!("{}.240.0/20", self.prefix())
    }

    /// The address of the service `kubernetes`: the first of them.
    pub(crate) fn service(&self) -> String {
        format!("{}.240.1", self.prefix())
    }

    /// Ends and removes everything of this number: processes, and with them their mounts, devices and
    /// namespaces; control groups; the folder.
    fn remove(&self) -> Result<()> {
        self.group()?.remove()?;
        // The kernel removes it a little after the last process of its network; a successor needs it gone now.
        if Path::new("/sys/class/net").join(self.device()).exists() {
            let removed = output(Command::new("ip").args(["link", "delete", &self.device()]));
            if Path::new("/sys/class/net").join(self.device()).exists() {
                removed?;
            }
        }
        // A mount point is on another device than the folder that it is in.
        let device = |path: &Path| fs::metadata(path).map(|data| data.dev());
        if let (Ok(own), Some(Ok(above))) = (device(&self.folder), self.folder.parent().map(device))
            && own != above
        {
            output(Command::new("umount").arg("--lazy").arg(&self.folder))?;
        }
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{} cannot be removed", self.folder.display()))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("a cluster could not be removed, the next start tries again: {error:#}");
        }
    }
}

/// The folder of all clusters of this machine: `$AVIFLOW_KUBE_STATE`, else `aviflow-kube` in the folder for
/// temporary files. Where clusters are not in memory, it must not be on an overlay, on which containerd's own
/// overlays cannot lie.
fn base() -> Result<PathBuf> {
    let base =
        std::env::var_os("AVIFLOW_KUBE_STATE").map_or_else(|| std::env::temp_dir().join("aviflow-kube"), PathBuf::from);
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    anyhow::ensure!(
        base.to_str().is_some_and(|path| path.chars().all(plain)),
        "{base:?} will stand in scripts; use letters, digits and `._-`"
    );
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&base);
    made.with_context(|| format!("{} cannot be made", base.display()))?;
    // Anybody may write to the folder for temporary files, and what is in ours is run as root.
    let owner = fs::symlink_metadata(&base)?.uid();
    anyhow::ensure!(owner == 0, "{} belongs to user {owner}, not to root; remove it", base.display());
    fs::canonicalize(&base).with_context(|| format!("{} cannot be read", base.display()))
}
