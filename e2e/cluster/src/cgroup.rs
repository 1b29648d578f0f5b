//! Control groups: what marks the processes of a cluster and of its nodes, in every hierarchy of the machine.
//!
//! On a machine with cgroup v2 alone there is one hierarchy. With v1, or both (hybrid), there is one for each
//! controller, and a group is a folder of the same name in each of them. Processes of ours are only in leaves:
//! under v2 a group that hands controllers on may hold none itself.

use crate::run::until;
use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A group: its path below the root of each hierarchy, such as `aviflow-0/hgx0`.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    roots: Vec<Root>,
    path: PathBuf,
}

/// The root of a hierarchy.
#[derive(Clone, Debug)]
struct Root {
    folder: PathBuf,
    /// Whether it is the only one, of version 2, so that controllers must be handed on.
    unified: bool,
}

impl Group {
    /// A group of this machine that may not be there yet.
    pub(crate) fn of(path: &str) -> Result<Group> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("the mounts cannot be read")?;
        let roots = roots(&mounts);
        anyhow::ensure!(!roots.is_empty(), "no control groups are mounted; mount cgroup2 on /sys/fs/cgroup");
        Ok(Group { roots, path: path.into() })
    }

    /// A group below this one.
    pub(crate) fn child(&self, name: &str) -> Group {
        Group { roots: self.roots.clone(), path: self.path.join(name) }
    }

    /// The path as kubelet takes it: absolute, below the hierarchies' roots.
    pub(crate) fn path(&self) -> String {
        format!("/{}", self.path.display())
    }

    /// Makes it, with all above it.
    pub(crate) fn make(&self) -> Result<()> {
        for root in &self.roots {
            let mut folder = root.folder.clone();
            for part in self.path.components() {
                if root.unified {
                    hand_on(&folder)?;
                }
                let child = folder.join(part);
                if !child.exists() {
                    fs::create_dir(&child)
                        .with_context(|| format!("the control group {} cannot be made", child.display()))?;
                }
                // Under v1 a new cpuset is empty, and takes no process before it has been given something.
                for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|_| !root.unified) {
                    if let Ok(value) = fs::read_to_string(folder.join(file)) {
                        fs::write(child.join(file), value.trim())?;
                    }
                }
                folder = child;
            }
        }
        Ok(())
    }

    /// The files that a process writes itself into to join.
    pub(crate) fn doors(&self) -> Vec<PathBuf> {
        self.folders().map(|folder| folder.join("cgroup.procs")).collect()
    }

    /// Kills every process of the group and of those below, and removes them. A group that is not there is fine.
    pub(crate) fn remove(&self) -> Result<()> {
        until(&format!("the control group {} is empty", self.path()), Duration::from_secs(30), || {
            let processes: Vec<Pid> = self.folders().flat_map(|folder| processes(&folder)).collect();
            for process in &processes {
                // It may have ended since.
                let _ = kill_process(*process, Signal::KILL);
            }
            Ok(processes.is_empty().then_some(()))
        })?;
        let removed = || Ok(self.folders().all(|folder| remove_tree(&folder).is_ok()).then_some(()));
        // A group whose last process has just ended may be busy for a moment.
        until(&format!("the control group {} is removed", self.path()), Duration::from_secs(30), removed)
    }

    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.roots.iter().map(|root| root.folder.join(&self.path))
    }
}

/// The roots of the hierarchies among a process's mounts.
fn roots(mounts: &str) -> Vec<Root> {
    let mut roots = Vec::new();
    for line in mounts.lines() {
        // `ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS … - TYPE SOURCE SUPER-OPTIONS`
        let Some((head, tail)) = line.split_once(" - ") else { continue };
        let Some(point) = head.split(' ').nth(4) else { continue };
        match tail.split(' ').next() {
            Some("cgroup2") => roots.push(Root { folder: point.into(), unified: point == "/sys/fs/cgroup" }),
            Some("cgroup") => roots.push(Root { folder: point.into(), unified: false }),
            _ => {}
        }
    }
    roots.sort_by(|a, b| a.folder.cmp(&b.folder));
    roots.dedup_by(|a, b| a.folder == b.folder);
    roots
}

/// Lets the groups below a group of v2 have every controller that it has itself.
fn hand_on(folder: &Path) -> Result<()> {
    let controllers = fs::read_to_string(folder.join("cgroup.controllers"))?;
    let given = fs::read_to_string(folder.join("cgroup.subtree_control"))?;
    let given: Vec<&str> = given.split_whitespace().collect();
    for controller in controllers.split_whitespace().filter(|controller| !given.contains(controller)) {
        fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}")).with_context(|| {
            format!("the controller {controller} cannot be handed on below {}: are processes in it?", folder.display())
        })?;
    }
    Ok(())
}

/// The processes of a group and of those below it.
fn processes(folder: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let own = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect::<Vec<_>>();
    own.into_iter().chain(children(folder).iter().flat_map(|child| processes(child))).collect()
}

/// Removes a group and those below it; they hold no process.
fn remove_tree(folder: &Path) -> std::io::Result<()> {
    for child in children(folder) {
        remove_tree(&child)?;
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir())).map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_read_from_the_mounts() {
        let check = |mounts: &str, expected: &[(&str, bool)]| {
            let found = roots(mounts);
            let found: Vec<(&str, bool)> = found.iter().map(|r| (r.folder.to_str().unwrap(), r.unified)).collect();
            assert_eq!(found, expected);
        };
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n22 1 8:1 / / rw - ext4 a rw\n";
        check(v2, &[("/sys/fs/cgroup", true)]);
        let hybrid = "30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime shared:3 - cgroup cgroup rw,cpu\n\
            32 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup rw\n";
        check(hybrid, &[("/sys/fs/cgroup/cpu", false), ("/sys/fs/cgroup/unified", false)]);
    }
}
