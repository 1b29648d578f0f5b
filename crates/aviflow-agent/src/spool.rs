//! The log stream on disk until the control plane has it.
//!
//! The stream is one sequence of bytes, always whole lines, cut into segments
//! of [`SEGMENT`] bytes in the folder `log`; a segment's name is the offset of
//! its first byte. Segments go when they are acknowledged, or, oldest first,
//! when more than the limit waits; then a line of the agent counts what was
//! lost. A disk that takes nothing loses lines, which are counted too, and
//! never keeps anybody from writing.
//!
//! Invariants: an offset names the same byte for ever and never goes back; a
//! line that could not be written has no offset, so the stream has no holes but
//! the dropped segments; whatever fails, [`Spool::append`] returns.

use crate::log::{self, Source};
use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of one segment.
pub const SEGMENT: u64 = 4 << 20;

/// What the spool asks of a disk; a test puts a failing one in its place.
pub trait Disk {
    /// Writes all bytes at an offset of a segment, which is created with its first byte.
    ///
    /// # Errors
    /// If not all bytes are there.
    fn write(&mut self, segment: u64, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads at most `max` bytes at an offset of a segment.
    ///
    /// # Errors
    /// If the segment cannot be read.
    fn read(&mut self, segment: u64, at: u64, max: usize) -> io::Result<Vec<u8>>;
    /// Removes a segment.
    fn remove(&mut self, segment: u64);
    /// The segments and their lengths, in order.
    fn list(&mut self) -> Vec<(u64, u64)>;
}

/// A folder of files.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    open: Option<(u64, File)>,
}

impl Folder {
    /// The folder, which is made with its first segment.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, open: None }
    }

    fn file(&mut self, segment: u64) -> io::Result<&File> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != segment) {
            let path = self.path.join(segment.to_string());
            let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
            let file = open().or_else(|e| match e.kind() {
                io::ErrorKind::NotFound => fs::create_dir_all(&self.path).and_then(|()| open()),
                _ => Err(e),
            })?;
            self.open = Some((segment, file));
        }
        match &self.open {
            Some((_, file)) => Ok(file),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Disk for Folder {
    fn write(&mut self, segment: u64, at: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.file(segment)?;
        file.write_all_at(bytes, at).inspect_err(|_| {
            // Half a line must not be found there by whoever reads the folder later.
            let _ = file.set_len(at);
        })
    }

    fn read(&mut self, segment: u64, at: u64, max: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; max];
        let n = self.file(segment)?.read_at(&mut bytes, at)?;
        bytes.truncate(n);
        Ok(bytes)
    }

    fn remove(&mut self, segment: u64) {
        if self.open.as_ref().is_some_and(|(open, _)| *open == segment) {
            self.open = None;
        }
        let _ = fs::remove_file(self.path.join(segment.to_string()));
    }

    fn list(&mut self) -> Vec<(u64, u64)> {
        let mut segments: Vec<(u64, u64)> = fs::read_dir(&self.path)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.metadata().ok()?.len())))
            .collect();
        segments.sort_unstable();
        segments
    }
}

/// The log stream of one worker.
#[derive(Debug)]
pub struct Spool<D> {
    disk: D,
    /// Offset and length of each segment, in order.
    segments: VecDeque<(u64, u64)>,
    end: u64,
    acknowledged: u64,
    limit: u64,
    rank: u32,
    /// Lines and bytes that the disk did not take since the last that it took.
    refused: (u64, u64),
    /// Bytes of dropped segments that no line has told of.
    dropped: u64,
}

impl<D: Disk> Spool<D> {
    /// The spool on a disk, which may hold segments of an earlier agent.
    ///
    /// `limit` is in bytes; `rank` stands in the agent's own lines.
    pub fn open(mut disk: D, limit: u64, rank: u32) -> Self {
        let segments: VecDeque<(u64, u64)> = disk.list().into();
        let end = segments.back().map_or(0, |(start, length)| start + length);
        let acknowledged = segments.front().map_or(0, |(start, _)| *start);
        Self { disk, segments, end, acknowledged, limit: limit.max(1), rank, refused: (0, 0), dropped: 0 }
    }

    /// Offsets that are on disk: of the first byte, and one past the last.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        (self.segments.front().map_or(self.end, |(start, _)| *start), self.end)
    }

    /// Adds whole lines, `unix_ms` being the time of the agent's own.
    pub fn append(&mut self, lines: &str, unix_ms: i64) {
        if lines.is_empty() {
            return;
        }
        let mut text = self.notice(unix_ms);
        text.push_str(lines);
        if self.write(text.as_bytes()).is_ok() {
            self.refused = (0, 0);
        } else {
            self.refused.0 += lines.bytes().filter(|b| *b == b'\n').count() as u64;
            self.refused.1 += lines.len() as u64;
        }
        self.enforce(unix_ms);
    }

    /// Says what was lost, where no line after it could say so.
    pub fn settle(&mut self, unix_ms: i64) {
        let notice = self.notice(unix_ms);
        if !notice.is_empty() && self.write(notice.as_bytes()).is_ok() {
            self.refused = (0, 0);
        }
    }

    /// The line about what the disk did not take; empty if it took everything.
    fn notice(&self, unix_ms: i64) -> String {
        match self.refused {
            (0, _) => String::new(),
            (count, bytes) => {
                let text = format!("{count} lines ({bytes} bytes) of output were lost here: the disk took none");
                self.line(unix_ms, &text)
            }
        }
    }

    fn line(&self, unix_ms: i64, text: &str) -> String {
        log::format(unix_ms, self.rank, Source::Agent, text)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (segment, length) = match self.segments.back() {
            Some((start, length)) if *length < self.segment_size() => (*start, *length),
            _ => (self.end, 0),
        };
        self.disk.write(segment, length, bytes)?;
        if length == 0 && self.segments.back().is_none_or(|(start, _)| *start != segment) {
            self.segments.push_back((segment, 0));
        }
        if let Some(last) = self.segments.back_mut() {
            last.1 += bytes.len() as u64;
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// A small limit needs small segments, as whole ones are dropped.
    fn segment_size(&self) -> u64 {
        SEGMENT.min((self.limit / 4).max(1))
    }

    fn enforce(&mut self, unix_ms: i64) {
        while self.segments.len() > 1 && self.waiting() > self.limit {
            if let Some((start, length)) = self.segments.pop_front() {
                self.disk.remove(start);
                self.dropped += (start + length).saturating_sub(self.acknowledged.max(start));
            }
        }
        if self.dropped > 0 {
            let text = format!(
                "{} bytes of the oldest log were dropped: nobody fetched them and more than {} waited",
                self.dropped, self.limit
            );
            let line = self.line(unix_ms, &text);
            if self.write(line.as_bytes()).is_ok() {
                self.dropped = 0;
            }
        }
    }

    fn waiting(&self) -> u64 {
        self.end - self.range().0.max(self.acknowledged)
    }

    /// The control plane has everything before `offset`.
    pub fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = self.acknowledged.max(offset.min(self.end));
        while let Some((start, length)) = self.segments.front().copied() {
            // The last one is still written to, unless it is full.
            let written = self.segments.len() == 1 && length < self.segment_size();
            if start + length > self.acknowledged || written {
                break;
            }
            self.segments.pop_front();
            self.disk.remove(start);
        }
    }

    /// Whole lines from an offset on, at most `max` bytes, with the offset at which they begin.
    ///
    /// The offset is later than `from` where the bytes are gone. None if there is nothing (yet).
    pub fn read(&mut self, from: u64, max: usize) -> Option<(u64, String)> {
        let mut from = from.max(self.range().0);
        for place in 0..self.segments.len() {
            let (start, length) = self.segments[place];
            if from >= start + length {
                continue;
            }
            from = from.max(start);
            let at = from - start;
            let max = max.min(usize::try_from(length - at).unwrap_or(max));
            // A segment that cannot be read is skipped: it must not hold up the rest.
            let Ok(mut bytes) = self.disk.read(start, at, max) else { continue };
            let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
            bytes.truncate(whole);
            if whole > 0 {
                return Some((from, String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
        None
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        for (start, _) in std::mem::take(&mut self.segments) {
            self.disk.remove(start);
        }
    }
}

/// What an agent that is gone left of its log in a worker's folder, from an offset on: offsets and whole lines.
#[must_use]
pub fn left_behind(folder: &Path, mut from: u64) -> Vec<(u64, String)> {
    let mut spool = Spool::open(Folder::new(folder.join(crate::protocol::files::LOG)), u64::MAX, 0);
    let mut pieces = Vec::new();
    while let Some((offset, text)) = spool.read(from, crate::protocol::LOG_CHUNK) {
        from = offset + text.len() as u64;
        pieces.push((offset, text));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Default)]
    struct Memory {
        segments: BTreeMap<u64, Vec<u8>>,
        full: bool,
    }

    impl Disk for Memory {
        fn write(&mut self, segment: u64, at: u64, bytes: &[u8]) -> io::Result<()> {
            if self.full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let file = self.segments.entry(segment).or_default();
            file.truncate(at as usize);
            file.extend_from_slice(bytes);
            Ok(())
        }
        fn read(&mut self, segment: u64, at: u64, max: usize) -> io::Result<Vec<u8>> {
            let file = self.segments.get(&segment).ok_or(io::ErrorKind::NotFound)?;
            Ok(file[at as usize..].iter().take(max).copied().collect())
        }
        fn remove(&mut self, segment: u64) {
            self.segments.remove(&segment);
        }
        fn list(&mut self) -> Vec<(u64, u64)> {
            self.segments.iter().map(|(start, bytes)| (*start, bytes.len() as u64)).collect()
        }
    }

    fn all<D: Disk>(spool: &mut Spool<D>, mut from: u64) -> (u64, String) {
        let mut text = String::new();
        let mut first = None;
        while let Some((offset, piece)) = spool.read(from, 4096) {
            first.get_or_insert(offset);
            from = offset + piece.len() as u64;
            text += &piece;
        }
        (first.unwrap_or(from), text)
    }

    #[test]
    fn what_is_written_is_read_in_whole_lines() {
        let mut spool = Spool::open(Memory::default(), 1 << 20, 0);
        assert_eq!(spool.read(0, 100), None);
        spool.append("one\ntwo\n", 1);
        spool.append("three\n", 1);
        assert_eq!(spool.read(0, 9), Some((0, "one\ntwo\n".into())));
        assert_eq!(spool.read(8, 100), Some((8, "three\n".into())));
        assert_eq!(spool.read(14, 100), None);
    }

    #[test]
    fn acknowledged_segments_go_and_offsets_stay() {
        let mut spool = Spool::open(Memory::default(), 40, 0);
        for n in 0..6 {
            spool.append(&format!("line {n}\n"), 1);
            spool.acknowledge(spool.range().1);
        }
        assert_eq!(spool.range().1, 42);
        assert!(spool.disk.segments.len() <= 1, "{:?}", spool.disk.segments);
        spool.append("more\n", 1);
        assert_eq!(spool.read(42, 100), Some((42, "more\n".into())));
    }

    #[test]
    fn the_oldest_go_when_too_much_waits_and_a_line_says_so() {
        let mut spool = Spool::open(Memory::default(), 200, 3);
        for n in 0..60 {
            spool.append(&format!("line {n:02}\n"), 7);
        }
        let (first, text) = all(&mut spool, 0);
        assert!(first > 0);
        assert!(text.contains("7 3 a "), "{text}");
        assert!(text.contains("bytes of the oldest log were dropped"), "{text}");
        assert_eq!(first + text.len() as u64, spool.range().1);
        assert!(text.contains("line 59"));
    }

    #[test]
    fn a_full_disk_loses_counted_lines_and_no_offset() {
        let mut spool = Spool::open(Memory::default(), 1 << 20, 0);
        spool.append("before\n", 1);
        spool.disk.full = true;
        spool.append("lost\nlost too\n", 2);
        spool.append("lost as well\n", 3);
        assert_eq!(spool.range(), (0, 7));
        spool.disk.full = false;
        spool.append("after\n", 4);
        let (_, text) = all(&mut spool, 0);
        assert_eq!(text, "before\n4 0 a 3 lines (27 bytes) of output were lost here: the disk took none\nafter\n");
    }

    #[test]
    fn what_was_lost_at_the_very_end_is_said_too() {
        let mut spool = Spool::open(Memory::default(), 1 << 20, 0);
        spool.disk.full = true;
        spool.append("lost\n", 1);
        spool.settle(2);
        spool.disk.full = false;
        spool.settle(3);
        spool.settle(4);
        let (_, text) = all(&mut spool, 0);
        assert_eq!(text, "3 0 a 1 lines (5 bytes) of output were lost here: the disk took none\n");
    }

    #[test]
    fn an_agent_s_files_are_found_by_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut spool = Spool::open(Folder::new(folder.path().join("log")), 1 << 20, 0);
        spool.append("one\n", 1);
        spool.append("two\n", 1);
        let mut next = Spool::open(Folder::new(folder.path().join("log")), 1 << 20, 0);
        assert_eq!(next.range(), (0, 8));
        next.append("three\n", 1);
        assert_eq!(left_behind(folder.path(), 4), [(4, "two\nthree\n".to_owned())]);
        next.clear();
        assert_eq!(left_behind(folder.path(), 0), []);
    }

    #[test]
    fn a_real_disk_that_is_full_keeps_whole_lines() {
        // /dev/full takes nothing, as a full disk does.
        let folder = tempfile::tempdir().expect("a folder");
        let mut spool = Spool::open(Folder::new(folder.path().to_owned()), 1 << 20, 0);
        std::os::unix::fs::symlink("/dev/full", folder.path().join("0")).expect("a link");
        spool.append("lost\n", 1);
        assert_eq!((spool.range(), spool.refused), ((0, 0), (1, 5)));
        fs::remove_file(folder.path().join("0")).expect("the link");
        spool.disk.open = None;
        spool.append("kept\n", 2);
        let (_, text) = all(&mut spool, 0);
        assert!(text.contains("1 lines (5 bytes)") && text.ends_with("kept\n"), "{text}");
    }

    proptest! {
        #[test]
        fn offsets_name_the_same_bytes_for_ever(
            steps in prop::collection::vec((0u8..4, 0usize..40), 1..80),
            limit in 50u64..400,
        ) {
            let mut spool = Spool::open(Memory::default(), limit, 0);
            let mut seen: BTreeMap<u64, u8> = BTreeMap::new();
            let mut end = 0;
            for (what, n) in steps {
                match what {
                    0 => spool.disk.full = !spool.disk.full,
                    1 => spool.acknowledge(spool.range().0 + n as u64),
                    _ => spool.append(&format!("{}\n", "x".repeat(n)), 1),
                }
                let (first, last) = spool.range();
                prop_assert!(last >= end && first <= last);
                end = last;
                prop_assert!(spool.waiting() <= limit + 300);
                let (offset, text) = all(&mut spool, first);
                prop_assert_eq!(offset + text.len() as u64, end);
                for (at, byte) in text.bytes().enumerate() {
                    let byte_there = *seen.entry(offset + at as u64).or_insert(byte);
                    prop_assert_eq!(byte_there, byte);
                }
            }
        }
    }
}
