//! Reading logs: attempt by attempt, merged by time over the workers.
//!
//! Files are read in blocks and closed in between, so a gang of a thousand
//! workers needs neither a thousand open files nor much memory.

use super::logs::{Extent, LogLine, Logs, split};
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the blocks of one reader take together, at most.
const BUFFERS: usize = 8 << 20;
/// A block's bounds.
const BLOCKS: (usize, usize) = (4 << 10, 64 << 10);
/// Lines of one batch of a follower,
const BATCH: usize = 10_000;
/// and bytes of their text, but for its last line.
const BATCH_TEXT: usize = 1 << 20;

/// Which lines. What is not set does not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// One attempt.
    pub attempt: Option<u32>,
    /// Some ranks.
    pub ranks: Option<BTreeSet<u32>>,
    /// From this time on.
    pub since: Option<Time>,
    /// Lines with this text.
    pub grep: Option<Grep>,
    /// Only the last so many lines that fit the rest.
    pub tail: Option<usize>,
}

/// A text to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grep {
    /// The text itself, no pattern.
    pub text: String,
    /// Whether upper and lower case are the same.
    pub ignore_case: bool,
}

impl Query {
    fn takes(&self, line: &LogLine) -> bool {
        self.ranks.as_ref().is_none_or(|ranks| ranks.contains(&line.rank))
            && self.since.is_none_or(|since| line.at >= since)
            && self.grep.as_ref().is_none_or(|g| match g.ignore_case {
                true => line.text.to_lowercase().contains(&g.text.to_lowercase()),
                false => line.text.contains(&g.text),
            })
    }
}

/// Lines in order.
#[derive(Debug)]
pub struct LogLines(Merge);

impl Iterator for LogLines {
    type Item = io::Result<LogLine>;

    fn next(&mut self) -> Option<io::Result<LogLine>> {
        self.0.next().transpose()
    }
}

pub(super) fn read(logs: &Logs, job: JobId, query: &Query) -> io::Result<LogLines> {
    let mut spans = spans(logs, job, query, &BTreeMap::new())?;
    if let Some(n) = query.tail {
        tail(&mut spans, query, n)?;
    }
    Ok(LogLines(Merge::new(spans, query.clone())))
}

/// Gives lines as they come. Every line comes once, in batches that are each in order.
#[derive(Debug)]
pub struct LogFollower {
    logs: Arc<Logs>,
    job: JobId,
    query: Query,
    /// How far each worker of each attempt was read.
    positions: BTreeMap<(u32, u32), u64>,
}

impl LogFollower {
    pub(super) fn new(logs: Arc<Logs>, job: JobId, query: Query) -> io::Result<LogFollower> {
        let mut follower = LogFollower { logs, job, query, positions: BTreeMap::new() };
        if let Some(n) = follower.query.tail.take() {
            let mut spans = spans(&follower.logs, job, &follower.query, &follower.positions)?;
            tail(&mut spans, &follower.query, n)?;
            follower.positions = spans.iter().map(|s| ((s.attempt, s.worker), s.start)).collect();
        }
        Ok(follower)
    }

    /// Lines that came since the last call; none if there are none. After a
    /// batch that is not empty, call again: more may be there.
    ///
    /// # Errors
    /// If a log cannot be read; the next call goes on at the same place.
    pub fn next_batch(&mut self) -> io::Result<Vec<LogLine>> {
        let spans = spans(&self.logs, self.job, &self.query, &self.positions)?;
        let mut merge = Merge::new(spans, self.query.clone());
        let (mut batch, mut text) = (Vec::new(), 0);
        while batch.len() < BATCH && text < BATCH_TEXT {
            let Some(line) = merge.next()? else { break };
            text += line.text.len();
            batch.push(line);
        }
        self.positions.extend(merge.positions());
        Ok(batch)
    }
}

/// A part of a file: whole lines.
#[derive(Clone, Debug)]
struct Span {
    attempt: u32,
    worker: u32,
    path: PathBuf,
    start: u64,
    end: u64,
}

/// What is to be read, by attempt and worker; from `positions` on where there is one.
fn spans(logs: &Logs, job: JobId, query: &Query, positions: &BTreeMap<(u32, u32), u64>) -> io::Result<Vec<Span>> {
    let extents = logs.extents(job)?;
    let wanted = extents.into_iter().filter(|e| query.attempt.is_none_or(|a| a == e.attempt));
    wanted
        .map(|Extent { attempt, worker, path, len }| {
            let start = match (positions.get(&(attempt, worker)), query.since) {
                (Some(position), _) => *position,
                (None, Some(since)) => first_since(&path, len, since)?,
                (None, None) => 0,
            };
            Ok(Span { attempt, worker, path, start, end: len })
        })
        .collect()
}

/// The start of a line before which no line is of `since` or later. Agents stamp
/// their lines in order, so halving finds it; the rest is a few lines too many.
fn first_since(path: &Path, len: u64, since: Time) -> io::Result<u64> {
    let step = BLOCKS.0 as u64;
    let (mut low, mut high) = (0, len);
    while high - low > 2 * step {
        let middle = low + (high - low) / 2;
        let mut lines = Forward::new(path.to_owned(), middle, high, BLOCKS.0);
        // The first is the rest of a line, or a line that need not be looked at.
        lines.next()?;
        let at = lines.position();
        let early = match lines.next()? {
            Some(line) => split(&line).is_some_and(|(time, ..)| time < since),
            None => false,
        };
        if early { low = at } else { high = middle }
    }
    Ok(low)
}

/// Lines of a span, from its start.
#[derive(Debug)]
struct Forward {
    path: PathBuf,
    /// What was read of the file.
    read: u64,
    end: u64,
    block: usize,
    buffer: Vec<u8>,
    /// What was given of the buffer.
    given: usize,
}

impl Forward {
    fn new(path: PathBuf, start: u64, end: u64, block: usize) -> Forward {
        Forward { path, read: start, end, block, buffer: Vec::new(), given: 0 }
    }

    /// Where the next line starts.
    fn position(&self) -> u64 {
        self.read - (self.buffer.len() - self.given) as u64
    }

    fn next(&mut self) -> io::Result<Option<String>> {
        let mut searched = self.given;
        loop {
            if let Some(i) = self.buffer[searched..].iter().position(|b| *b == b'\n') {
                let end = searched + i;
                let line = String::from_utf8_lossy(&self.buffer[self.given..end]).into_owned();
                self.given = end + 1;
                return Ok(Some(line));
            }
            let left = usize::try_from(self.end - self.read).unwrap_or(usize::MAX);
            if left == 0 {
                return Ok(None);
            }
            self.buffer.drain(..self.given);
            self.given = 0;
            searched = self.buffer.len();
            let more = left.min(self.block);
            self.buffer.resize(searched + more, 0);
            if let Err(e) =
                File::open(&self.path).and_then(|f| f.read_exact_at(&mut self.buffer[searched..], self.read))
            {
                self.buffer.truncate(searched);
                return Err(e);
            }
            self.read += more as u64;
        }
    }
}

/// Lines of a span, from its end.
#[derive(Debug)]
struct Backward {
    path: PathBuf,
    start: u64,
    /// Where the buffer begins in the file.
    read: u64,
    block: usize,
    /// Ends with the newline of the next line to give.
    buffer: Vec<u8>,
}

impl Backward {
    /// Where the line that was given last starts.
    fn position(&self) -> u64 {
        self.read + self.buffer.len() as u64
    }

    fn next(&mut self) -> io::Result<Option<String>> {
        // Bytes at the buffer's end in which no newline was found.
        let mut searched = 1;
        loop {
            let open = self.buffer.len().saturating_sub(searched);
            let before = self.buffer[..open].iter().rposition(|b| *b == b'\n').map(|i| i + 1);
            let begin = before.or((self.read == self.start && !self.buffer.is_empty()).then_some(0));
            if let Some(begin) = begin {
                let line = String::from_utf8_lossy(&self.buffer[begin..self.buffer.len() - 1]).into_owned();
                self.buffer.truncate(begin);
                return Ok(Some(line));
            }
            if self.read == self.start {
                return Ok(None);
            }
            searched = self.buffer.len().max(1);
            let more = (self.read - self.start).min(self.block as u64);
            let mut buffer = vec![0; usize::try_from(more).unwrap_or(0)];
            File::open(&self.path)?.read_exact_at(&mut buffer, self.read - more)?;
            buffer.extend_from_slice(&self.buffer);
            self.buffer = buffer;
            self.read -= more;
        }
    }
}

fn block_size(sources: usize) -> usize {
    (BUFFERS / sources.max(1)).clamp(BLOCKS.0, BLOCKS.1)
}

/// Merges spans from their starts.
#[derive(Debug)]
struct Merge {
    query: Query,
    /// Attempts that were not begun.
    later: VecDeque<Span>,
    sources: Vec<Source>,
    /// Sources with a line at hand, by its time, then by worker.
    heads: BinaryHeap<Reverse<(Time, usize)>>,
    done: Vec<((u32, u32), u64)>,
}

#[derive(Debug)]
struct Source {
    attempt: u32,
    worker: u32,
    lines: Forward,
    /// The next line that is wanted, and where it starts.
    head: Option<(u64, LogLine)>,
    before: Time,
}

impl Merge {
    fn new(spans: Vec<Span>, query: Query) -> Merge {
        Merge { query, later: spans.into(), sources: Vec::new(), heads: BinaryHeap::new(), done: Vec::new() }
    }

    fn next(&mut self) -> io::Result<Option<LogLine>> {
        loop {
            if let Some(Reverse((_, i))) = self.heads.pop() {
                let line = self.sources[i].head.take().map(|(_, line)| line);
                self.advance(i)?;
                return Ok(line);
            }
            if !self.begin_attempt()? {
                return Ok(None);
            }
        }
    }

    fn begin_attempt(&mut self) -> io::Result<bool> {
        self.done.extend(self.sources.drain(..).map(|s| s.position()));
        let Some(attempt) = self.later.front().map(|s| s.attempt) else { return Ok(false) };
        let count = self.later.iter().take_while(|s| s.attempt == attempt).count();
        let block = block_size(count);
        for span in self.later.drain(..count) {
            let lines = Forward::new(span.path, span.start, span.end, block);
            let (attempt, worker) = (span.attempt, span.worker);
            self.sources.push(Source { attempt, worker, lines, head: None, before: Time(0) });
        }
        for i in 0..count {
            self.advance(i)?;
        }
        Ok(true)
    }

    /// Finds the next line of a source that is wanted.
    fn advance(&mut self, i: usize) -> io::Result<()> {
        let source = &mut self.sources[i];
        loop {
            let position = source.lines.position();
            let Some(text) = source.lines.next()? else { return Ok(()) };
            let line = LogLine::parse(source.attempt, source.worker, &text, source.before);
            source.before = line.at;
            if self.query.takes(&line) {
                self.heads.push(Reverse((line.at, i)));
                source.head = Some((position, line));
                return Ok(());
            }
        }
    }

    /// Where to go on, for each span.
    fn positions(self) -> impl Iterator<Item = ((u32, u32), u64)> {
        let begun = self.sources.into_iter().map(|s| s.position());
        let later = self.later.into_iter().map(|s| ((s.attempt, s.worker), s.start));
        self.done.into_iter().chain(begun).chain(later)
    }
}

impl Source {
    fn position(&self) -> ((u32, u32), u64) {
        let position = self.head.as_ref().map_or_else(|| self.lines.position(), |(position, _)| *position);
        ((self.attempt, self.worker), position)
    }
}

/// Moves the starts of spans to where their share of the last `n` lines that are
/// wanted begins. Looks from the end, and keeps of each source one line's time.
fn tail(spans: &mut [Span], query: &Query, n: usize) -> io::Result<()> {
    let mut left = n;
    for spans in spans.chunk_by_mut(|a, b| a.attempt == b.attempt).rev() {
        let block = block_size(spans.len());
        let mut sources: Vec<Backward> = spans
            .iter()
            .map(|s| Backward { path: s.path.clone(), start: s.start, read: s.end, block, buffer: Vec::new() })
            .collect();
        spans.iter_mut().for_each(|s| s.start = s.end);
        if left == 0 {
            continue;
        }
        let advance = |span: &Span, lines: &mut Backward| -> io::Result<Option<(Time, u64)>> {
            while let Some(text) = lines.next()? {
                let line = LogLine::parse(span.attempt, span.worker, &text, Time(0));
                if query.takes(&line) {
                    return Ok(Some((line.at, lines.position())));
                }
            }
            Ok(None)
        };
        let mut order = BinaryHeap::new();
        for (i, source) in sources.iter_mut().enumerate() {
            order.extend(advance(&spans[i], source)?.map(|(at, position)| (at, i, position)));
        }
        while left > 0
            && let Some((_, i, position)) = order.pop()
        {
            spans[i].start = position;
            left -= 1;
            order.extend(advance(&spans[i], &mut sources[i])?.map(|(at, position)| (at, i, position)));
        }
    }
    Ok(())
}
