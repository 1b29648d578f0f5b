//! The folders that a job keeps: checkpoints and outputs.
//!
//! A document names absolute paths, as in a container. Here each becomes a
//! folder below the job's own, shared by all its workers and attempts and kept
//! after its end.

use aviflow_core::model::JobId;
use std::path::{Component, Path, PathBuf};

/// Where jobs keep what outlives them.
#[derive(Clone, Debug)]
pub struct Volumes {
    jobs: PathBuf,
}

impl Volumes {
    pub(crate) fn new(home: &Path) -> Volumes {
        Volumes { jobs: home.join("jobs") }
    }

    /// The folder of everything that a job keeps.
    #[must_use]
    pub fn root(&self, job: JobId) -> PathBuf {
        self.jobs.join(job.0.to_string()).join("volumes")
    }

    /// A path as the job's document would name it, where it is below the job's folder.
    #[must_use]
    pub fn named(&self, job: JobId, path: &str) -> String {
        match Path::new(path).strip_prefix(self.root(job)) {
            Ok(inside) => format!("/{}", inside.display()),
            Err(_) => path.to_owned(),
        }
    }

    /// The folder behind a path of a job's document.
    ///
    /// # Errors
    /// If the path is not absolute, leads upwards, or is `/` itself.
    pub fn path(&self, job: JobId, path: &str) -> Result<PathBuf, String> {
        let mut mapped = self.root(job);
        let mut parts = 0;
        for component in Path::new(path).components() {
            match component {
                Component::RootDir | Component::CurDir => {}
                Component::Normal(name) => {
                    mapped.push(name);
                    parts += 1;
                }
                Component::ParentDir | Component::Prefix(_) => parts = usize::MAX / 2,
            }
        }
        if parts == 0 || parts >= usize::MAX / 2 || !path.starts_with('/') {
            return Err(format!("`{path}` cannot be a folder of the job; give an absolute path without `..`"));
        }
        Ok(mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_job() {
        let volumes = Volumes::new(Path::new("/home"));
        let path = |p| volumes.path(JobId(7), p);
        assert_eq!(volumes.named(JobId(7), "/home/jobs/7/volumes/checkpoints/a"), "/checkpoints/a");
        assert_eq!(volumes.named(JobId(7), "/home/jobs/8/volumes/a"), "/home/jobs/8/volumes/a");
        assert_eq!(path("/checkpoints"), Ok(PathBuf::from("/home/jobs/7/volumes/checkpoints")));
        assert_eq!(path("/a//./b/"), Ok(PathBuf::from("/home/jobs/7/volumes/a/b")));
        for wrong in ["/", "", "a", "/a/../../b", "/.."] {
            assert!(path(wrong).is_err(), "{wrong}");
        }
    }
}
