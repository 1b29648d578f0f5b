//! Logs on disk: `logs/<job>/<attempt>/<worker>.log`, lines of the form
//! `<unix ms> <rank> <o|e|a> <text>`.
//!
//! A stream's offset is the file's length until something is missing. From then
//! on the two differ: each line `<position> <offset>` of `<worker>.gaps` says
//! that the file from `position` on is the stream from `offset` on. It is written
//! before the line in the log, so a crash between the two leaves a position that
//! the log does not reach, which is then dropped.

use super::make_folder;
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::telemetry::StreamKey;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much is read at once to find the last whole line.
const BLOCK: u64 = 64 << 10;

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogLine {
    /// When the agent read it.
    pub at: Time,
    /// The attempt.
    pub attempt: u32,
    /// The worker.
    pub worker: u32,
    /// The rank that wrote it.
    pub rank: u32,
    /// Where it came from.
    pub source: LogSource,
    /// The line without its end.
    pub text: String,
}

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LogSource {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// The agent itself.
    Agent,
}

impl LogLine {
    /// Reads a line. What has another form is the agent's word at the time `before`.
    pub(super) fn parse(attempt: u32, worker: u32, line: &str, before: Time) -> LogLine {
        match split(line) {
            Some((at, rank, source, text)) => LogLine { at, attempt, worker, rank, source, text: text.to_owned() },
            None => LogLine { at: before, attempt, worker, rank: 0, source: LogSource::Agent, text: line.to_owned() },
        }
    }
}

/// Time, rank, source and text of a line.
pub(super) fn split(line: &str) -> Option<(Time, u32, LogSource, &str)> {
    let mut parts = line.splitn(4, ' ');
    let at = Time(parts.next()?.parse().ok()?);
    let rank = parts.next()?.parse().ok()?;
    let source = match parts.next()? {
        "o" => LogSource::Out,
        "e" => LogSource::Err,
        "a" => LogSource::Agent,
        _ => return None,
    };
    Some((at, rank, source, parts.next().unwrap_or("")))
}

/// The part of a stream that may be read now: whole lines.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) attempt: u32,
    pub(super) worker: u32,
    pub(super) path: PathBuf,
    pub(super) len: u64,
}

#[derive(Debug)]
pub(super) struct Logs {
    root: PathBuf,
    /// Read from the folder once; from then on this process is the only one that adds.
    jobs: Mutex<HashMap<JobId, Arc<JobLogs>>>,
    /// Bytes that agents had to drop.
    missing: AtomicU64,
}

type Streams = BTreeMap<(u32, u32), Arc<Mutex<Stream>>>;

#[derive(Debug)]
struct JobLogs {
    folder: PathBuf,
    streams: Mutex<Streams>,
}

#[derive(Debug)]
struct Stream {
    path: PathBuf,
    /// Bytes of the file, whole lines.
    len: u64,
    /// The stream's offset at the file's end.
    have: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Logs {
    pub(super) fn new(root: PathBuf) -> Logs {
        Logs { root, jobs: Mutex::default(), missing: AtomicU64::new(0) }
    }

    /// The offset up to which a stream is kept.
    pub(super) fn have(&self, key: StreamKey) -> io::Result<u64> {
        let job = self.job(key.job)?;
        let stream = lock(&job.streams).get(&(key.attempt, key.worker)).cloned();
        Ok(stream.map_or(0, |s| lock(&s).have))
    }

    /// As [`aviflow_engine::telemetry::Telemetry::log_append`].
    pub(super) fn append(&self, key: StreamKey, offset: u64, text: &str) -> io::Result<u64> {
        let job = self.job(key.job)?;
        let stream = {
            let mut streams = lock(&job.streams);
            match streams.get(&(key.attempt, key.worker)) {
                Some(stream) => Arc::clone(stream),
                None => {
                    let folder = job.folder.join(key.attempt.to_string());
                    make_folder(&folder)?;
                    let stream = Stream::open(folder.join(format!("{}.log", key.worker)))?;
                    let stream = Arc::new(Mutex::new(stream));
                    streams.insert((key.attempt, key.worker), Arc::clone(&stream));
                    stream
                }
            }
        };
        let mut stream = lock(&stream);
        let missing = offset.saturating_sub(stream.have);
        let have = stream.append(offset, text)?;
        self.missing.fetch_add(missing, Ordering::Relaxed);
        Ok(have)
    }

    /// Bytes that agents had to drop since this process began.
    pub(super) fn missing(&self) -> u64 {
        self.missing.load(Ordering::Relaxed)
    }

    /// What may be read of a job, by attempt and worker.
    pub(super) fn extents(&self, job: JobId) -> io::Result<Vec<Extent>> {
        let job = self.job(job)?;
        let streams: Vec<_> = lock(&job.streams).iter().map(|(k, s)| (*k, Arc::clone(s))).collect();
        let extent = |((attempt, worker), stream): ((u32, u32), Arc<Mutex<Stream>>)| {
            let stream = lock(&stream);
            Extent { attempt, worker, path: stream.path.clone(), len: stream.len }
        };
        Ok(streams.into_iter().map(extent).collect())
    }

    pub(super) fn remove(&self, job: JobId) -> io::Result<()> {
        // Under the lock, so that nobody reads the folder while it goes.
        let mut jobs = lock(&self.jobs);
        jobs.remove(&job);
        match fs::remove_dir_all(self.root.join(job.0.to_string())) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn job(&self, id: JobId) -> io::Result<Arc<JobLogs>> {
        let mut jobs = lock(&self.jobs);
        if let Some(job) = jobs.get(&id) {
            return Ok(Arc::clone(job));
        }
        let folder = self.root.join(id.0.to_string());
        let streams = Mutex::new(find_streams(&folder)?);
        let job = Arc::new(JobLogs { folder, streams });
        jobs.insert(id, Arc::clone(&job));
        Ok(job)
    }
}

/// Opens the logs that a process before this one left.
fn find_streams(folder: &Path) -> io::Result<Streams> {
    let mut streams = Streams::new();
    for (attempt, folder) in numbered(folder, "")? {
        for (worker, path) in numbered(&folder, ".log")? {
            streams.insert((attempt, worker), Arc::new(Mutex::new(Stream::open(path)?)));
        }
    }
    Ok(streams)
}

/// Entries of a folder whose names are a number and `suffix`; none if there is no such folder.
fn numbered(folder: &Path, suffix: &str) -> io::Result<Vec<(u32, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut out = Vec::new();
    for entry in entries {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|n| n.strip_suffix(suffix)?.parse().ok());
        out.extend(number.map(|n| (n, entry.path())));
    }
    Ok(out)
}

impl Stream {
    /// Finds the end of a log; a last line that a crash tore is cut off, and the agent sends it again.
    fn open(path: PathBuf) -> io::Result<Stream> {
        let mut len = 0;
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => {
                let size = file.metadata()?.len();
                len = end_of_lines(&file, size)?;
                if len < size {
                    file.set_len(len)?;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        let gaps = gaps_path(&path);
        let text = match fs::read_to_string(&gaps) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let reached: Vec<(u64, u64)> = text.split_inclusive('\n').filter_map(gap).filter(|g| g.0 <= len).collect();
        let (position, offset) = reached.last().copied().unwrap_or((0, 0));
        let kept: String = reached.iter().map(|(p, o)| format!("{p} {o}\n")).collect();
        if kept != text {
            let temp = gaps.with_extension("gaps.part");
            fs::write(&temp, kept)?;
            fs::rename(&temp, &gaps)?;
        }
        Ok(Stream { path, len, have: offset + (len - position) })
    }

    fn append(&mut self, offset: u64, text: &str) -> io::Result<u64> {
        // Whole lines only: a rest without its end comes again with it.
        let whole = text.rfind('\n').map_or(0, |i| i + 1);
        if whole == 0 && !text.is_empty() {
            let why = "the log has no whole line; send it with the end of the line";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let bytes = &text.as_bytes()[..whole];
        let known = usize::try_from(self.have.saturating_sub(offset)).unwrap_or(usize::MAX);
        if known >= bytes.len() {
            return Ok(self.have);
        }
        let fresh = &bytes[known..];
        let missing = offset.saturating_sub(self.have);
        let written = if missing > 0 {
            let line = gap_line(missing, text);
            let position = self.len + line.len() as u64;
            let record = format!("{position} {offset}\n");
            open_to_append(&gaps_path(&self.path))
                .and_then(|mut f| f.write_all(record.as_bytes()))
                .and_then(|()| self.write(&[line.as_bytes(), fresh].concat()))
        } else {
            self.write(fresh)
        };
        if let Err(e) = written {
            // Part of it may be there: cut off what is not a line, and take stock again.
            *self = Stream::open(self.path.clone())?;
            return Err(e);
        }
        self.have = self.have.max(offset) + fresh.len() as u64;
        Ok(self.have)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut file = open_to_append(&self.path)?;
        if let Err(e) = file.write_all(bytes) {
            file.set_len(self.len)?;
            return Err(e);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }
}

fn open_to_append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

fn gaps_path(log: &Path) -> PathBuf {
    log.with_extension("gaps")
}

/// A whole line of the gaps file.
fn gap(line: &str) -> Option<(u64, u64)> {
    let (position, offset) = line.strip_suffix('\n')?.split_once(' ')?;
    Some((position.parse().ok()?, offset.parse().ok()?))
}

/// Says what is missing, at the time of what follows.
fn gap_line(missing: u64, following: &str) -> String {
    let (at, rank) = following.lines().find_map(split).map_or((Time(0), 0), |(at, rank, _, _)| (at, rank));
    format!("{} {rank} a {missing} bytes of output are missing here: the agent ran out of room for them\n", at.0)
}

/// The position after the last newline.
fn end_of_lines(file: &File, size: u64) -> io::Result<u64> {
    let mut end = size;
    let mut block = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        block.resize(usize::try_from(end - start).unwrap_or(0), 0);
        file.read_exact_at(&mut block, start)?;
        if let Some(i) = block.iter().rposition(|b| *b == b'\n') {
            return Ok(start + i as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
