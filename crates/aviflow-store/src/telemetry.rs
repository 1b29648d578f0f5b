//! Logs, series and builds, on files beside the store and never in it.
//!
//! Invariants:
//! - a log holds whole lines, in the order in which its worker's agent sent
//!   them; what is missing is said in a line of its own;
//! - progress never waits for the disk; what had to be dropped is counted;
//! - a reader sees every line once, across attempts too;
//! - what comes for one job wakes only those who follow that job.
//!
//! Nothing here is flushed to the disk itself: a loss of power may take the last
//! seconds of output, which then shows as a gap.

mod logs;
mod merge;
mod ranks;
mod series;
mod stacks;

#[cfg(test)]
mod tests;

pub use logs::{LogLine, LogSource};
pub use merge::{Grep, LogFollower, LogLines, Query};
pub use ranks::RankSeen;
pub use series::{Series, SeriesPoint};

use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::telemetry::{BuildProgress, Point, StreamKey, Telemetry};
use logs::Logs;
use ranks::Ranks;
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Keeps what agents ship in a folder.
#[derive(Debug)]
pub struct FileTelemetry {
    folder: PathBuf,
    logs: Arc<Logs>,
    series: series::Writer,
    ranks: Ranks,
    builds: Mutex<BTreeMap<String, BuildProgress>>,
    builds_changed: watch::Sender<u64>,
    /// Jobs that are followed now; those that nobody follows any more go.
    followed: Mutex<BTreeMap<JobId, watch::Sender<u64>>>,
}

/// Bytes that telemetry takes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Logs.
    pub logs: u64,
    /// Series.
    pub series: u64,
}

impl FileTelemetry {
    /// Opens the telemetry in `folder`: `logs` and `series` beneath it. One
    /// process at a time may have it open, which the store's lock sees to.
    ///
    /// # Errors
    /// If the folders cannot be made or the writer's thread not started.
    pub fn open(folder: &Path) -> io::Result<FileTelemetry> {
        let logs = folder.join("logs");
        let series = folder.join("series");
        for path in [&logs, &series] {
            make_folder(path)?;
        }
        Ok(FileTelemetry {
            folder: folder.to_owned(),
            logs: Arc::new(Logs::new(logs)),
            series: series::Writer::start(series)?,
            ranks: Ranks::default(),
            builds: Mutex::default(),
            builds_changed: watch::Sender::new(0),
            followed: Mutex::default(),
        })
    }

    /// A number that grows with every line and point of a job. Mark it as seen
    /// before you read, and nothing falls between.
    #[must_use]
    pub fn changed_of(&self, job: JobId) -> watch::Receiver<u64> {
        let mut followed = lock(&self.followed);
        followed.retain(|_, sender| sender.receiver_count() > 0);
        followed.entry(job).or_insert_with(|| watch::Sender::new(0)).subscribe()
    }

    /// The same for the builds, all together.
    #[must_use]
    pub fn builds_changed(&self) -> watch::Receiver<u64> {
        self.builds_changed.subscribe()
    }

    /// Lines of a job that are kept now, attempt by attempt, by time over its workers.
    ///
    /// # Errors
    /// If a log cannot be read.
    pub fn read_logs(&self, job: JobId, query: &Query) -> io::Result<LogLines> {
        merge::read(&self.logs, job, query)
    }

    /// As [`FileTelemetry::read_logs`], and then what comes.
    ///
    /// # Errors
    /// If a log cannot be read.
    pub fn follow_logs(&self, job: JobId, query: Query) -> io::Result<LogFollower> {
        LogFollower::new(Arc::clone(&self.logs), job, query)
    }

    /// Points of a job after the number `after` (0 for all), evenly thinned to at most `max`.
    ///
    /// # Errors
    /// If the series cannot be read.
    pub fn points(&self, job: JobId, after: u64, max: usize) -> io::Result<Series> {
        self.series.points(job, after, max)
    }

    /// The last point of a job: in its latest attempt, of the lowest rank that reports.
    ///
    /// # Errors
    /// If the series cannot be read.
    pub fn latest(&self, job: JobId) -> io::Result<Option<Point>> {
        self.series.latest(job)
    }

    /// The same, if this process has heard of it: nothing is read of the disk.
    #[must_use]
    pub fn heard(&self, job: JobId) -> Option<Point> {
        self.series.heard(job)
    }

    /// What was heard of each rank of an attempt since this process began.
    #[must_use]
    pub fn ranks(&self, job: JobId, attempt: u32) -> BTreeMap<u32, RankSeen> {
        self.ranks.of(job, attempt)
    }

    /// Milliseconds of a step of an attempt, of late, by its lowest rank that reports.
    #[must_use]
    pub fn step_ms(&self, job: JobId, attempt: u32) -> Option<f64> {
        self.ranks.step_ms(job, attempt)
    }

    /// How many bytes of output agents had to drop, over all jobs, as far as it was seen since this process began.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.logs.missing()
    }

    /// How many points could not be kept, over all jobs, since this process began.
    #[must_use]
    pub fn dropped_points(&self) -> u64 {
        self.series.dropped()
    }

    /// Builds that were heard of, by hash.
    #[must_use]
    pub fn builds(&self) -> Vec<BuildProgress> {
        lock(&self.builds).values().cloned().collect()
    }

    /// Removes the logs and the series of a job.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn remove_job(&self, job: JobId) -> io::Result<()> {
        self.ranks.remove(job);
        self.logs.remove(job)?;
        self.series.remove(job)
    }

    /// Keeps the stacks of a job that stands still, as they are written; the oldest of several go.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn keep_stacks(&self, job: JobId, at: Time, stacks: &[u8]) -> io::Result<()> {
        stacks::keep(&self.logs_of(job), at, stacks)
    }

    /// The newest of those.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn last_stacks(&self, job: JobId) -> io::Result<Option<Vec<u8>>> {
        stacks::last(&self.logs_of(job))
    }

    fn logs_of(&self, job: JobId) -> PathBuf {
        self.folder.join("logs").join(job.0.to_string())
    }

    /// What is on disk.
    ///
    /// # Errors
    /// If a folder cannot be read.
    pub fn disk_usage(&self) -> io::Result<DiskUsage> {
        Ok(DiskUsage { logs: disk_usage(&self.folder.join("logs"))?, series: disk_usage(&self.folder.join("series"))? })
    }

    fn bump(&self, job: JobId) {
        let mut followed = lock(&self.followed);
        let Some(sender) = followed.get(&job) else { return };
        if sender.receiver_count() == 0 {
            followed.remove(&job);
        } else {
            sender.send_modify(|n| *n += 1);
        }
    }

    #[cfg(test)]
    fn followed(&self) -> usize {
        lock(&self.followed).len()
    }
}

impl Telemetry for FileTelemetry {
    /// 0 for a stream that cannot be read; the append then says why.
    fn log_have(&self, stream: StreamKey) -> u64 {
        self.logs.have(stream).unwrap_or(0)
    }

    fn log_append(&self, stream: StreamKey, offset: u64, text: &str) -> io::Result<u64> {
        let have = self.logs.append(stream, offset, text)?;
        self.ranks.lines(stream, text);
        self.bump(stream.job);
        Ok(have)
    }

    fn progress(&self, job: JobId, point: Point) {
        self.ranks.progress(job, &point);
        self.series.push(job, point);
        self.bump(job);
    }

    fn build(&self, progress: BuildProgress) {
        lock(&self.builds).insert(progress.hash.clone(), progress);
        self.builds_changed.send_modify(|n| *n += 1);
    }

    fn forget_build(&self, hash: &str) {
        if lock(&self.builds).remove(hash).is_some() {
            self.builds_changed.send_modify(|n| *n += 1);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of all files beneath a folder; what disappears meanwhile counts nothing.
pub(crate) fn disk_usage(folder: &Path) -> io::Result<u64> {
    let gone = |e: io::Error| if e.kind() == io::ErrorKind::NotFound { Ok(0) } else { Err(e) };
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) => return gone(e),
    };
    let mut bytes = 0;
    for entry in entries {
        let entry = entry?;
        bytes += match entry.metadata() {
            Ok(meta) if meta.is_dir() => disk_usage(&entry.path())?,
            Ok(meta) => meta.len(),
            Err(e) => gone(e)?,
        };
    }
    Ok(bytes)
}

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
