//! How often the kernel has killed for lack of memory in this process's memory group, as cgroup 2 counts it.
//!
//! The count includes groups below; in a container, the group is the container.

use std::fs;
use std::path::Path;

/// The count; none where it cannot be read, as under cgroup 1.
///
/// `proc_self` is usually `/proc/self/cgroup`, `root` `/sys/fs/cgroup`.
#[must_use]
pub fn oom_kills(proc_self: &Path, root: &Path) -> Option<u64> {
    let group = group(&fs::read_to_string(proc_self).ok()?)?.to_owned();
    count(&fs::read_to_string(root.join(group).join("memory.events")).ok()?)
}

/// The group of `0::/path`, below the root.
fn group(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/")).filter(|path| !path.split('/').any(|part| part == ".."))
}

fn count(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|count| count.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let (proc_self, root) = (folder.path().join("cgroup"), folder.path());
        let read = || oom_kills(&proc_self, root);
        assert_eq!(read(), None);
        fs::write(&proc_self, "12:memory:/old\n0::/a/b\n").expect("written");
        assert_eq!(read(), None);
        fs::create_dir_all(root.join("a/b")).expect("a folder");
        fs::write(root.join("a/b/memory.events"), "low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 1\n")
            .expect("written");
        assert_eq!(read(), Some(3));
        fs::write(&proc_self, "0::/../outside\n").expect("written");
        assert_eq!(read(), None);
        fs::write(&proc_self, "0::/\n").expect("written");
        fs::write(root.join("memory.events"), "oom_kill x\n").expect("written");
        assert_eq!(read(), None);
    }
}
