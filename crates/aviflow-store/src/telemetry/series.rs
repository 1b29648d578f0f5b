//! Series on disk: `series/<job>.jsonl`, one point a line, at most about 4 MiB a job.
//!
//! One thread writes; whoever reports a point only puts it into a bounded queue.
//! What does not fit is dropped and counted. A file that grows over its bound is
//! thinned to about half: of four neighbours the least and the greatest loss stay,
//! so a spike outlives the thinning.

use aviflow_core::model::JobId;
use aviflow_engine::telemetry::Point;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Bytes of a job's file before it is thinned.
const BOUND: u64 = 4 << 20;

/// Points that wait for the writer.
const QUEUE: usize = 8192;

/// A point with its number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SeriesPoint {
    /// The number, from 1 in the order in which points came; numbers are left out by thinning.
    pub number: u64,
    /// The point.
    #[serde(flatten)]
    pub point: Point,
}

/// Points of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Series {
    /// The points, oldest first.
    pub points: Vec<SeriesPoint>,
    /// What to give as `after` to get what follows.
    pub last: u64,
    /// Points that could not be kept at all.
    pub dropped: u64,
    /// Points that made room for later ones.
    pub thinned: u64,
}

/// A line of the file: a point with its number, or the counts so far.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    #[serde(rename = "n", default, skip_serializing_if = "Option::is_none")]
    number: Option<u64>,
    #[serde(rename = "p", default, skip_serializing_if = "Option::is_none")]
    point: Option<Point>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counts: Option<Counts>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counts {
    dropped: u64,
    thinned: u64,
    /// The last number given out: a thinned file may end before it.
    last: u64,
}

#[derive(Debug)]
enum Message {
    Point(JobId, Point),
    /// Answered once everything before it is written.
    Flush(Sender<()>),
    Remove(JobId, Sender<io::Result<()>>),
}

#[derive(Debug, Default)]
struct Shared {
    /// The last word on each job, by [`supersedes`].
    latest: Mutex<HashMap<JobId, Point>>,
    /// Drops that no file counts yet.
    dropped: Mutex<BTreeMap<JobId, u64>>,
    all_dropped: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn drop_points(&self, job: JobId, n: u64) {
        *lock(&self.dropped).entry(job).or_default() += n;
        self.all_dropped.fetch_add(n, Ordering::Relaxed);
    }
}

/// Takes points and hands them to the thread.
#[derive(Debug)]
pub(super) struct Writer {
    folder: PathBuf,
    shared: Arc<Shared>,
    /// `None` only while it is being dropped.
    queue: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    /// Writes what waits.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Writer {
    pub(super) fn start(folder: PathBuf) -> io::Result<Writer> {
        let (mut writer, thread) = Writer::parts(folder, QUEUE, BOUND);
        writer.thread = Some(std::thread::Builder::new().name("series".into()).spawn(move || thread.run())?);
        Ok(writer)
    }

    /// The two halves, before the thread runs.
    fn parts(folder: PathBuf, queue: usize, bound: u64) -> (Writer, Thread) {
        let (sender, receiver) = sync_channel(queue);
        let shared = Arc::<Shared>::default();
        let thread =
            Thread { folder: folder.clone(), bound, shared: Arc::clone(&shared), receiver, files: HashMap::new() };
        (Writer { folder, shared, queue: Some(sender), thread: None }, thread)
    }

    pub(super) fn push(&self, job: JobId, point: Point) {
        let point = finite(point);
        {
            let mut latest = lock(&self.shared.latest);
            match latest.get_mut(&job) {
                Some(before) => follow(before, &point),
                None => drop(latest.insert(job, point.clone())),
            }
        }
        let sent = self.queue.as_ref().is_some_and(|q| q.try_send(Message::Point(job, point)).is_ok());
        if !sent {
            self.shared.drop_points(job, 1);
        }
    }

    pub(super) fn dropped(&self) -> u64 {
        self.shared.all_dropped.load(Ordering::Relaxed)
    }

    pub(super) fn points(&self, job: JobId, after: u64, max: usize) -> io::Result<Series> {
        self.flush();
        let (points, counts) = read(&path(&self.folder, job))?;
        let last = points.last().map_or(0, |p| p.number).max(counts.last);
        let wanted: Vec<SeriesPoint> = points.into_iter().filter(|p| p.number > after).collect();
        let pending = lock(&self.shared.dropped).get(&job).copied().unwrap_or(0);
        Ok(Series { points: evenly(wanted, max), last, dropped: counts.dropped + pending, thinned: counts.thinned })
    }

    pub(super) fn heard(&self, job: JobId) -> Option<Point> {
        lock(&self.shared.latest).get(&job).cloned()
    }

    pub(super) fn latest(&self, job: JobId) -> io::Result<Option<Point>> {
        if let Some(point) = lock(&self.shared.latest).get(&job) {
            return Ok(Some(point.clone()));
        }
        // From a process before this one.
        let (points, _) = read(&path(&self.folder, job))?;
        let points = points.into_iter().map(|p| p.point);
        let latest = points.reduce(|mut before, point| {
            follow(&mut before, &point);
            before
        });
        if let Some(point) = &latest {
            lock(&self.shared.latest).entry(job).or_insert_with(|| point.clone());
        }
        Ok(latest)
    }

    pub(super) fn remove(&self, job: JobId) -> io::Result<()> {
        lock(&self.shared.latest).remove(&job);
        self.ask(|answer| Message::Remove(job, answer)).unwrap_or(Ok(()))
    }

    fn flush(&self) {
        self.ask(Message::Flush);
    }

    fn ask<T>(&self, message: impl FnOnce(Sender<T>) -> Message) -> Option<T> {
        let (answer, answered) = std::sync::mpsc::channel();
        self.queue.as_ref()?.send(message(answer)).ok()?;
        answered.recv().ok()
    }
}

/// Whether a point is the last word after `before`: ranks report the same steps, so
/// one of them is enough, the lowest that reports in the latest attempt.
fn supersedes(point: &Point, before: &Point) -> bool {
    point.attempt > before.attempt || point.attempt == before.attempt && point.rank <= before.rank
}

/// The last word on a job, after another point. An evaluation adds to what is known of the training, and hides nothing.
fn follow(latest: &mut Point, point: &Point) {
    if !supersedes(point, latest) {
        return;
    }
    if point.is_evaluation() && point.attempt == latest.attempt {
        for name in point.values.keys().chain(point.odd.keys()) {
            latest.values.remove(name);
            latest.odd.remove(name);
        }
        latest.values.extend(point.values.clone());
        latest.odd.extend(point.odd.clone());
    } else {
        latest.clone_from(point);
    }
}

/// JSON has no word for what is not finite, so that moves to `odd`.
fn finite(mut point: Point) -> Point {
    let odd: Vec<(String, f64)> =
        point.values.iter().filter(|(_, v)| !v.is_finite()).map(|(k, v)| (k.clone(), *v)).collect();
    for (name, value) in odd {
        point.values.remove(&name);
        point.odd.insert(name, value.to_string());
    }
    point
}

fn path(folder: &Path, job: JobId) -> PathBuf {
    folder.join(format!("{}.jsonl", job.0))
}

/// First, last, and what is between at equal distances.
fn evenly(points: Vec<SeriesPoint>, max: usize) -> Vec<SeriesPoint> {
    let n = points.len();
    if n <= max {
        return points;
    }
    // The point `i` of `n` is kept if it is the first one of its step, counted from the end.
    let step = |i: usize| (n - 1 - i) * max.saturating_sub(1) / (n - 1);
    let kept = |i: &usize| match max {
        0 => false,
        1 => *i == n - 1,
        _ => *i == n - 1 || step(*i) != step(*i + 1),
    };
    points.into_iter().enumerate().filter(|(i, _)| kept(i)).map(|(_, p)| p).collect()
}

/// Points and counts of a file; a torn last line is left out.
fn read(path: &Path) -> io::Result<(Vec<SeriesPoint>, Counts)> {
    let (mut points, mut counts) = (Vec::new(), Counts::default());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((points, counts)),
        Err(e) => return Err(e),
    };
    for line in BufReader::new(file).split(b'\n') {
        let Ok(line) = serde_json::from_slice::<Line>(&line?) else { continue };
        if let (Some(number), Some(point)) = (line.number, line.point) {
            points.push(SeriesPoint { number, point });
        }
        counts = line.counts.unwrap_or(counts);
    }
    Ok((points, counts))
}

/// A job's file, as the thread knows it.
#[derive(Debug, Default)]
struct Tracked {
    bytes: u64,
    counts: Counts,
}

/// The only one that writes.
struct Thread {
    folder: PathBuf,
    bound: u64,
    shared: Arc<Shared>,
    receiver: Receiver<Message>,
    files: HashMap<JobId, Tracked>,
}

impl Thread {
    fn run(mut self) {
        while let Ok(message) = self.receiver.recv() {
            let mut batch: BTreeMap<JobId, Vec<Point>> = BTreeMap::new();
            let mut next = Some(message);
            let mut taken = 0;
            while let Some(message) = next {
                match message {
                    Message::Point(job, point) => batch.entry(job).or_default().push(point),
                    Message::Flush(answer) => {
                        self.write(&mut batch);
                        let _ = answer.send(());
                    }
                    Message::Remove(job, answer) => {
                        batch.remove(&job);
                        let _ = answer.send(self.remove(job));
                    }
                }
                taken += 1;
                next = if taken < QUEUE { self.receiver.try_recv().ok() } else { None };
            }
            self.write(&mut batch);
        }
    }

    fn write(&mut self, batch: &mut BTreeMap<JobId, Vec<Point>>) {
        let dropped = std::mem::take(&mut *lock(&self.shared.dropped));
        for job in dropped.keys() {
            batch.entry(*job).or_default();
        }
        for (job, points) in std::mem::take(batch) {
            let lost = dropped.get(&job).copied().unwrap_or(0);
            let n = points.len() as u64;
            if self.append(job, points, lost).is_err() {
                // The file keeps what it had; what was to come is counted.
                self.files.remove(&job);
                self.shared.drop_points(job, n);
                *lock(&self.shared.dropped).entry(job).or_default() += lost;
            }
        }
    }

    fn append(&mut self, job: JobId, points: Vec<Point>, lost: u64) -> io::Result<()> {
        let path = path(&self.folder, job);
        let mut tracked = match self.files.remove(&job) {
            Some(tracked) => tracked,
            None => Tracked::open(&path)?,
        };
        let mut text = Vec::new();
        for point in points {
            tracked.counts.last += 1;
            let line = Line { number: Some(tracked.counts.last), point: Some(point), counts: None };
            add_line(&mut text, &line)?;
        }
        if lost > 0 {
            tracked.counts.dropped += lost;
            add_line(&mut text, &Line { number: None, point: None, counts: Some(tracked.counts) })?;
        }
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        if let Err(e) = file.write_all(&text) {
            file.set_len(tracked.bytes)?;
            return Err(e);
        }
        tracked.bytes += text.len() as u64;
        while tracked.bytes > self.bound && tracked.thin(&path)? {}
        self.files.insert(job, tracked);
        Ok(())
    }

    fn remove(&mut self, job: JobId) -> io::Result<()> {
        self.files.remove(&job);
        lock(&self.shared.dropped).remove(&job);
        match fs::remove_file(path(&self.folder, job)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

impl Tracked {
    /// Takes up a file again; a line that a crash tore is cut off.
    fn open(path: &Path) -> io::Result<Tracked> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Tracked::default()),
            Err(e) => return Err(e),
        };
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        if whole < text.len() {
            OpenOptions::new().write(true).open(path)?.set_len(whole as u64)?;
        }
        let (points, mut counts) = read(path)?;
        counts.last = counts.last.max(points.last().map_or(0, |p| p.number));
        Ok(Tracked { bytes: whole as u64, counts })
    }

    /// Rewrites the file with about half of its points; says whether that made it smaller.
    fn thin(&mut self, path: &Path) -> io::Result<bool> {
        let (points, _) = read(path)?;
        let before = points.len();
        let points = thinned(points);
        let mut counts = self.counts;
        counts.thinned += (before - points.len()) as u64;
        let mut text = Vec::new();
        add_line(&mut text, &Line { number: None, point: None, counts: Some(counts) })?;
        let left = points.len();
        for SeriesPoint { number, point } in points {
            add_line(&mut text, &Line { number: Some(number), point: Some(point), counts: None })?;
        }
        let temp = path.with_extension("part");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temp)?;
        file.write_all(&text)?;
        fs::rename(&temp, path)?;
        self.bytes = text.len() as u64;
        self.counts = counts;
        Ok(left < before)
    }
}

fn add_line(text: &mut Vec<u8>, line: &Line) -> io::Result<()> {
    serde_json::to_writer(&mut *text, line)?;
    text.push(b'\n');
    Ok(())
}

/// About half of the points: of each rank in each attempt the first and the last,
/// and of four neighbours between them the least and the greatest loss.
fn thinned(points: Vec<SeriesPoint>) -> Vec<SeriesPoint> {
    let mut groups: BTreeMap<(u32, u32), Vec<SeriesPoint>> = BTreeMap::new();
    for point in points {
        groups.entry((point.point.attempt, point.point.rank)).or_default().push(point);
    }
    let mut out = Vec::new();
    for mut group in groups.into_values() {
        let last = group.pop();
        let mut group = group.into_iter();
        out.extend(group.next());
        let middle: Vec<SeriesPoint> = group.collect();
        for four in middle.chunks(4) {
            let mut kept = extremes(four);
            kept.sort_unstable();
            out.extend(kept.into_iter().map(|i| four[i].clone()));
        }
        out.extend(last);
    }
    out.sort_by_key(|p| p.number);
    out
}

/// Half of some neighbours, rounded down, with the extremes of the loss where there are two.
fn extremes(four: &[SeriesPoint]) -> Vec<usize> {
    let loss = |i: &usize| four[*i].point.values.get("loss").copied();
    let with_loss = (0..four.len()).filter(|i| loss(i).is_some());
    let order = |a: &usize, b: &usize| loss(a).unwrap_or(0.0).total_cmp(&loss(b).unwrap_or(0.0));
    let (least, greatest) = (with_loss.clone().min_by(order), with_loss.max_by(order));
    match (least, greatest) {
        (Some(a), Some(b)) if a != b && four.len() == 4 => vec![a, b],
        _ => (1..four.len()).step_by(2).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::time::Time;
    use tempfile::TempDir;

    fn point(step: u64, loss: f64) -> Point {
        Point {
            at: Time(i64::try_from(step).unwrap()),
            attempt: 1,
            rank: 0,
            step,
            total_steps: None,
            tokens: Some(step * 4096),
            values: BTreeMap::from([("loss".to_owned(), loss), ("lr".to_owned(), 0.1 + 0.2)]),
            odd: BTreeMap::new(),
        }
    }

    fn start(folder: &Path, queue: usize, bound: u64) -> Writer {
        let (mut writer, thread) = Writer::parts(folder.to_owned(), queue, bound);
        writer.thread = Some(std::thread::spawn(move || thread.run()));
        writer
    }

    fn steps(series: &Series) -> Vec<u64> {
        series.points.iter().map(|p| p.point.step).collect()
    }

    #[test]
    fn points_survive_a_restart_and_numbers_go_on() {
        let folder = TempDir::new().unwrap();
        let writer = start(folder.path(), 100, BOUND);
        for step in 1..=5 {
            writer.push(JobId(1), point(step, 1.0 / step as f64));
        }
        let series = writer.points(JobId(1), 2, 100).unwrap();
        assert_eq!((steps(&series), series.last), (vec![3, 4, 5], 5));
        drop(writer);
        // A crash tore the last line.
        let file = folder.path().join("1.jsonl");
        let mut text = fs::read(&file).unwrap();
        text.extend_from_slice(b"{\"n\":6,\"p\":{\"at\":1");
        fs::write(&file, text).unwrap();
        let writer = start(folder.path(), 100, BOUND);
        assert_eq!(writer.latest(JobId(1)).unwrap(), Some(point(5, 0.2)));
        assert_eq!(writer.latest(JobId(2)).unwrap(), None);
        writer.push(JobId(1), point(6, 0.5));
        let series = writer.points(JobId(1), 0, 100).unwrap();
        assert_eq!(steps(&series), [1, 2, 3, 4, 5, 6]);
        assert_eq!(series.points[5], SeriesPoint { number: 6, point: point(6, 0.5) });
    }

    #[test]
    fn what_does_not_fit_the_queue_is_counted_for_good() {
        let folder = TempDir::new().unwrap();
        let (mut writer, thread) = Writer::parts(folder.path().to_owned(), 2, BOUND);
        for step in 1..=5 {
            writer.push(JobId(1), point(step, 1.0));
        }
        assert_eq!(writer.dropped(), 3);
        assert_eq!(writer.latest(JobId(1)).unwrap().map(|p| p.step), Some(5));
        writer.thread = Some(std::thread::spawn(move || thread.run()));
        let series = writer.points(JobId(1), 0, 100).unwrap();
        assert_eq!((steps(&series), series.dropped), (vec![1, 2], 3));
        drop(writer);
        let series = start(folder.path(), 2, BOUND).points(JobId(1), 0, 100).unwrap();
        assert_eq!((steps(&series), series.dropped), (vec![1, 2], 3));
    }

    #[test]
    fn a_file_over_its_bound_is_thinned_and_keeps_what_stands_out() {
        let folder = TempDir::new().unwrap();
        let bound = 20_000;
        let writer = start(folder.path(), 10_000, bound);
        for step in 1..=2_000 {
            let loss = if step == 700 { 99.0 } else { 5.0 - step as f64 / 1000.0 };
            writer.push(JobId(1), point(step, loss));
        }
        let series = writer.points(JobId(1), 0, usize::MAX).unwrap();
        assert!(fs::metadata(folder.path().join("1.jsonl")).unwrap().len() <= bound);
        assert_eq!(series.thinned + series.points.len() as u64, 2_000);
        assert_eq!((series.last, series.dropped), (2_000, 0));
        let steps = steps(&series);
        assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&2_000)));
        assert!(steps.is_sorted() && steps.contains(&700), "the spike is gone");
        drop(writer);
        let again = start(folder.path(), 10, bound).points(JobId(1), 0, usize::MAX).unwrap();
        assert_eq!(again, series);
    }

    #[test]
    fn a_reader_may_ask_for_fewer() {
        let points: Vec<SeriesPoint> = (1..=1000).map(|n| SeriesPoint { number: n, point: point(n, 1.0) }).collect();
        for max in [0, 1, 2, 3, 10, 333, 999, 1000, 2000] {
            let few = evenly(points.clone(), max);
            assert_eq!(few.len(), max.min(1000), "of {max}");
            if max > 1 {
                assert_eq!((few[0].number, few.last().unwrap().number), (1, 1000), "of {max}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_named() {
        let folder = TempDir::new().unwrap();
        let writer = start(folder.path(), 10, BOUND);
        writer.push(JobId(1), point(1, f64::NAN));
        writer.push(JobId(1), point(2, f64::NEG_INFINITY));
        let series = writer.points(JobId(1), 0, 10).unwrap();
        let odd: Vec<&str> = series.points.iter().map(|p| p.point.odd["loss"].as_str()).collect();
        assert_eq!(odd, ["NaN", "-inf"]);
        assert!(series.points.iter().all(|p| !p.point.values.contains_key("loss")));
    }

    #[test]
    fn a_removed_series_is_gone() {
        let folder = TempDir::new().unwrap();
        let writer = start(folder.path(), 10, BOUND);
        writer.push(JobId(1), point(1, 1.0));
        writer.push(JobId(2), point(1, 1.0));
        writer.remove(JobId(1)).unwrap();
        assert_eq!(writer.points(JobId(1), 0, 10).unwrap(), Series::default());
        assert_eq!(writer.latest(JobId(1)).unwrap(), None);
        assert_eq!(steps(&writer.points(JobId(2), 0, 10).unwrap()), [1]);
    }
}
