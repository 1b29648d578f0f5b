//! Finding and following the event files that this worker's processes write.
//!
//! A file is theirs if its name has this host's name and the id of a process that carries the worker's mark (or did
//! when it was a rank's), or if such a process has it open: others write to a folder that is shared, from hosts that
//! may have the same name, and look alike. That process's environment has the rank, too. Files that were there before
//! the epoch began are of earlier ones.

use super::Seen;
use crate::output::names::{self, Values};
use crate::protocol::MARK;
use crate::sweep;
use crate::sys::{self, Pid};
use crate::tensorboard::{Reader, Scalar};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How names of event files begin.
const PREFIX: &str = "events.out.tfevents.";

/// Files that are followed at one time.
const MOST_FILES: usize = 32;

/// Entries that a search looks at below each place.
const MOST_ENTRIES: usize = 5000;

/// Folders within folders that are searched.
const DEPTH: usize = 6;

/// Between two searches, in milliseconds; after [`PATIENCE`] that found nothing they are rarer.
const SEARCH_MS: u64 = 10_000;
const PATIENCE: u32 = 10;

/// Bytes of a file that are read in one look.
const CHUNK: usize = 1 << 20;

/// Steps of a file that are told in one look: with a look every two seconds no more than of the output.
const MOST_STEPS: usize = 20;

#[derive(Debug)]
struct Followed {
    rank: u32,
    file: File,
    read: u64,
    reader: Reader,
}

/// The event files of an epoch.
#[derive(Debug)]
pub(super) struct EventFiles {
    places: Vec<PathBuf>,
    mark: String,
    first_rank: u32,
    /// The ranks of processes that the agent started; they may be gone.
    started: BTreeMap<u32, u32>,
    host: String,
    followed: BTreeMap<PathBuf, Followed>,
    /// Of others, or of earlier times.
    others: BTreeSet<PathBuf>,
    search_at: u64,
    searches: u32,
    baseline: bool,
}

impl EventFiles {
    pub(super) fn new(places: Vec<PathBuf>, mark: String, first_rank: u32) -> Self {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
        let (followed, others) = (BTreeMap::new(), BTreeSet::new());
        let started = BTreeMap::new();
        Self { places, mark, first_rank, started, host, followed, others, search_at: 0, searches: 0, baseline: true }
    }

    /// The agent started these processes, each of a rank.
    pub(super) fn add(&mut self, started: Vec<(u32, Pid)>) {
        self.started.extend(started.into_iter().map(|(rank, pid)| (pid.cast_unsigned(), rank)));
    }

    /// Looks once; the first time only remembers what is there.
    pub(super) fn look(&mut self, now: u64, mut seen: impl FnMut(Seen)) {
        if now >= self.search_at {
            self.search();
            self.searches += 1;
            let rarer = if self.followed.is_empty() && self.searches > PATIENCE { 6 } else { 1 };
            self.search_at = now + if self.searches == 1 { 0 } else { SEARCH_MS * rarer };
        }
        let over = |(path, followed): (&PathBuf, &mut Followed)| (!followed.read(&mut seen)).then(|| path.clone());
        let over: Vec<PathBuf> = self.followed.iter_mut().filter_map(over).collect();
        for path in over {
            self.followed.remove(&path);
            self.others.insert(path);
        }
    }

    /// The next look also searches.
    pub(super) fn search_soon(&mut self) {
        self.search_at = 0;
    }

    fn search(&mut self) {
        let mut found = Vec::new();
        for place in &self.places {
            let mut left = MOST_ENTRIES;
            find(place, DEPTH, &mut left, &mut found);
        }
        let first = std::mem::replace(&mut self.baseline, false);
        for path in found {
            if self.followed.contains_key(&path) || self.others.contains(&path) || self.others.len() >= MOST_ENTRIES {
                continue;
            }
            let rank = if first { None } else { self.rank_of(&path) };
            match (rank, File::open(&path)) {
                (Some(rank), Ok(file)) if self.followed.len() < MOST_FILES => {
                    self.followed.insert(path, Followed { rank, file, read: 0, reader: Reader::default() });
                }
                (Some(_), _) => {}
                (None, _) => drop(self.others.insert(path)),
            }
        }
    }

    /// The rank whose process writes a file; none if it is none of this worker's.
    fn rank_of(&self, path: &Path) -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        let (host, pid) = writer(name)?;
        if host != self.host {
            return None;
        }
        let by_name = pid.and_then(|pid| self.of_process(pid).or_else(|| self.started.get(&pid).copied()));
        by_name.or_else(|| self.of_process(opener(path)?))
    }

    /// The rank of a living process, if it is one of this worker's.
    fn of_process(&self, pid: u32) -> Option<u32> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let value = |name: &str| {
            let mut entries = environment.split(|b| *b == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
            entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('=').map(ToOwned::to_owned))
        };
        if value(MARK)? != self.mark {
            return None;
        }
        Some(value("AVIFLOW_RANK").and_then(|rank| rank.parse().ok()).unwrap_or(self.first_rank))
    }
}

/// A process of this worker that has a file open.
fn opener(path: &Path) -> Option<u32> {
    let path = fs::canonicalize(path).ok()?;
    let has_open = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.map(|file| file.path()).any(|file| fs::read_link(file).is_ok_and(|target| target == path))
    };
    sweep::below(sys::getpid()).0.iter().map(|process| process.pid.cast_unsigned()).find(has_open)
}

impl Followed {
    /// Reads what was added; whether there is any sense in looking again.
    fn read(&mut self, seen: &mut impl FnMut(Seen)) -> bool {
        let mut steps: BTreeMap<u64, (i64, Values)> = BTreeMap::new();
        let mut buffer = vec![0; CHUNK.min(64 << 10)];
        let mut taken = 0;
        while taken < CHUNK {
            let Ok(read) = self.file.read_at(&mut buffer, self.read) else { return false };
            if read == 0 {
                break;
            }
            (self.read, taken) = (self.read + read as u64, taken + read);
            self.reader.push(&buffer[..read], |scalar| add(&mut steps, scalar));
        }
        // The newest always, and of the others as many as there is room for.
        let every = steps.len().div_ceil(MOST_STEPS).max(1);
        let last = steps.len().saturating_sub(1);
        for (n, (step, (unix_ms, values))) in steps.into_iter().enumerate() {
            if (last - n).is_multiple_of(every) {
                seen(Seen::Scalars { rank: self.rank, step, unix_ms, values });
            }
        }
        !self.reader.is_broken()
    }
}

fn add(steps: &mut BTreeMap<u64, (i64, Values)>, scalar: Scalar) {
    let Some((name, value)) = names::named(&scalar.tag, scalar.value) else { return };
    let (at, values) = steps.entry(scalar.step).or_default();
    *at = scalar.unix_ms;
    names::put(values, name, value);
}

/// The host and the process in a name: `events.out.tfevents.SECONDS.HOST.PID.N`, with `.v2` after it, or without the
/// last two.
fn writer(name: &str) -> Option<(&str, Option<u32>)> {
    let name = name.strip_suffix(".v2").unwrap_or(name);
    let (_, rest) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let parts = rest.rsplit_once('.').and_then(|(rest, n)| {
        let (host, pid) = rest.rsplit_once('.')?;
        n.parse::<u32>().ok()?;
        Some((host, pid.parse().ok()?))
    });
    Some(parts.map_or((rest, None), |(host, pid)| (host, Some(pid))))
}

fn find(folder: &Path, depth: usize, left: &mut usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        let (name, Ok(kind)) = (entry.file_name(), entry.file_type()) else { continue };
        let name = name.to_string_lossy();
        let hidden = name.starts_with('.') || matches!(&*name, "__pycache__" | "node_modules" | "site-packages");
        if kind.is_file() && name.starts_with(PREFIX) {
            found.push(entry.path());
        } else if kind.is_dir() && depth > 0 && !hidden {
            find(&entry.path(), depth - 1, left, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_say_who_writes_them() {
        assert_eq!(writer("events.out.tfevents.1700000000.node-1.77.0"), Some(("node-1", Some(77))));
        assert_eq!(writer("events.out.tfevents.1700000000.node-1.local.77.0"), Some(("node-1.local", Some(77))));
        assert_eq!(writer("events.out.tfevents.1700000000.node-1"), Some(("node-1", None)));
        assert_eq!(writer("events.out.tfevents.1700000000.node-1.local"), Some(("node-1.local", None)));
        assert_eq!(writer("events.out.tfevents.1700000000.node-1.77.0.v2"), Some(("node-1", Some(77))));
        assert_eq!(writer("events.txt"), None);
    }
}
