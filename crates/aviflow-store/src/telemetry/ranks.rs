//! What each rank was heard of last: its step, the pace of its steps, its last line.
//!
//! In memory alone, for who looks on now; the files keep the whole. Bounded: the jobs that were not heard of for the
//! longest are forgotten first.

use super::logs::{LogSource, split};
use aviflow_core::model::JobId;
use aviflow_core::time::Time;
use aviflow_engine::telemetry::{Point, StreamKey};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranks that are kept of all jobs: twice those of the largest published training, at 1 kB at most.
const MOST: usize = 32_768;

/// Bytes of a line that are kept.
const LINE: usize = 512;

/// What was heard of a rank last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankSeen {
    /// In which attempt.
    pub attempt: u32,
    /// Its last step, and when it was reported.
    pub step: Option<(u64, Time)>,
    /// Milliseconds of a step, of late; none before two steps were reported.
    pub step_ms: Option<f64>,
    /// Its last line of output, cut, and when it was read.
    pub line: Option<(Time, String)>,
}

impl RankSeen {
    fn of(attempt: u32) -> RankSeen {
        RankSeen { attempt, ..RankSeen::default() }
    }

    fn step(&mut self, step: u64, at: Time) {
        if let Some((before, since)) = self.step
            && step > before
            && at > since
        {
            let took = at.since(since).0 as f64 / (step - before) as f64;
            // Of late: the last four steps make up two thirds.
            self.step_ms = Some(self.step_ms.map_or(took, |mean| mean + (took - mean) / 4.0));
        } else if self.step.is_some_and(|(before, _)| step < before) {
            // It began again, from a checkpoint.
            self.step_ms = None;
        }
        // What is told of a step once more, as its evaluation, does not make it longer.
        if self.step.is_none_or(|(before, _)| before != step) {
            self.step = Some((step, at));
        }
    }
}

#[derive(Debug, Default)]
struct JobRanks {
    ranks: BTreeMap<u32, RankSeen>,
    /// A number that grows with what is heard, over all jobs.
    heard: u64,
}

#[derive(Debug, Default)]
struct All {
    jobs: HashMap<JobId, JobRanks>,
    ranks: usize,
    heard: u64,
}

/// What was heard of the ranks of all jobs.
#[derive(Debug, Default)]
pub(super) struct Ranks(Mutex<All>);

impl Ranks {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self, job: JobId, point: &Point) {
        self.lock().rank(job, point.attempt, point.rank, |seen| seen.step(point.step, point.at));
    }

    /// Lines of a worker as they are in its log.
    pub(super) fn lines(&self, stream: StreamKey, text: &str) {
        let mut last: BTreeMap<u32, (Time, &str)> = BTreeMap::new();
        for (at, rank, source, line) in text.lines().filter_map(split) {
            if source != LogSource::Agent && !line.trim().is_empty() {
                last.insert(rank, (at, line));
            }
        }
        let mut all = self.lock();
        for (rank, (at, line)) in last {
            all.rank(stream.job, stream.attempt, rank, |seen| seen.line = Some((at, cut(line).to_owned())));
        }
    }

    /// The ranks of a job's attempt that were heard of.
    pub(super) fn of(&self, job: JobId, attempt: u32) -> BTreeMap<u32, RankSeen> {
        let all = self.lock();
        let ranks = all.jobs.get(&job).into_iter().flat_map(|job| &job.ranks);
        ranks.filter(|(_, seen)| seen.attempt == attempt).map(|(rank, seen)| (*rank, seen.clone())).collect()
    }

    /// The pace of a job's attempt: that of its lowest rank which has one.
    pub(super) fn step_ms(&self, job: JobId, attempt: u32) -> Option<f64> {
        let all = self.lock();
        let mut ranks = all.jobs.get(&job)?.ranks.values().filter(|seen| seen.attempt == attempt);
        ranks.find_map(|seen| seen.step_ms)
    }

    pub(super) fn remove(&self, job: JobId) {
        self.lock().forget(job);
    }
}

impl All {
    fn rank(&mut self, job: JobId, attempt: u32, rank: u32, change: impl FnOnce(&mut RankSeen)) {
        self.heard += 1;
        let known = self.jobs.get(&job).is_some_and(|job| job.ranks.contains_key(&rank));
        if !known {
            while self.ranks >= MOST {
                let others = self.jobs.iter().filter(|(id, _)| **id != job);
                let Some(oldest) = others.min_by_key(|(_, job)| job.heard).map(|(id, _)| *id) else { return };
                self.forget(oldest);
            }
            self.ranks += 1;
        }
        let ranks = self.jobs.entry(job).or_default();
        ranks.heard = self.heard;
        let seen = ranks.ranks.entry(rank).or_insert_with(|| RankSeen::of(attempt));
        if attempt > seen.attempt {
            *seen = RankSeen::of(attempt);
        }
        // What an attempt before says late is no news.
        if attempt == seen.attempt {
            change(seen);
        }
    }

    fn forget(&mut self, job: JobId) {
        if let Some(gone) = self.jobs.remove(&job) {
            self.ranks -= gone.ranks.len();
        }
    }
}

/// The beginning of a line, in whole characters.
fn cut(line: &str) -> &str {
    if line.len() <= LINE {
        return line;
    }
    let end = (0..=LINE).rev().find(|end| line.is_char_boundary(*end));
    &line[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(attempt: u32, rank: u32, step: u64, at: i64) -> Point {
        let (total_steps, tokens) = (None, None);
        let (values, odd) = Default::default();
        Point { at: Time(at), attempt, rank, step, total_steps, tokens, values, odd }
    }

    fn stream(attempt: u32) -> StreamKey {
        StreamKey { job: JobId(1), attempt, worker: 0 }
    }

    #[test]
    fn the_pace_is_of_late_and_of_one_attempt() {
        let ranks = Ranks::default();
        let pace = |point: Point| {
            ranks.progress(JobId(1), &point);
            ranks.of(JobId(1), point.attempt)[&0].step_ms
        };
        assert_eq!(pace(point(1, 0, 10, 1000)), None, "nothing is known of one step");
        assert_eq!(pace(point(1, 0, 20, 3000)), Some(200.0));
        assert_eq!(pace(point(1, 0, 21, 3600)), Some(300.0));
        assert_eq!(pace(point(1, 0, 21, 3700)), Some(300.0), "the same step again says nothing");
        assert_eq!(pace(point(1, 0, 5, 4000)), None, "it began again");
        assert_eq!(pace(point(2, 0, 6, 5000)), None, "another attempt");
        ranks.progress(JobId(1), &point(1, 0, 7, 6000));
        assert_eq!(ranks.of(JobId(1), 2)[&0].step, Some((6, Time(5000))), "what comes late is no news");
        assert_eq!(ranks.of(JobId(1), 1), BTreeMap::new());
    }

    #[test]
    fn each_rank_has_its_last_line() {
        let ranks = Ranks::default();
        ranks.lines(stream(1), "5 0 o first\n6 1 e other\n7 0 o last\n8 0 a of the agent\n9 1 o  \nno line\n");
        let line = |rank: u32| ranks.of(JobId(1), 1)[&rank].line.clone();
        assert_eq!(line(0), Some((Time(7), "last".into())));
        assert_eq!(line(1), Some((Time(6), "other".into())));
        ranks.lines(stream(1), &format!("9 0 o {}\n", "é".repeat(LINE)));
        assert_eq!(line(0).map(|(_, line)| line.len()), Some(LINE));
        ranks.lines(stream(2), "10 0 o new\n");
        assert_eq!(ranks.of(JobId(1), 2).keys().copied().collect::<Vec<_>>(), [0], "the other said nothing yet");
    }

    #[test]
    fn many_ranks_take_no_more_than_there_is_room_for() {
        let ranks = Ranks::default();
        for job in 1..=9 {
            for rank in 0..8192 {
                ranks.progress(JobId(job), &point(1, rank, 1, 1));
            }
        }
        let kept = || {
            let all = ranks.lock();
            (all.ranks, all.jobs.len())
        };
        assert_eq!(kept(), (MOST, 4));
        assert!(ranks.of(JobId(1), 1).is_empty(), "the oldest went");
        assert_eq!(ranks.of(JobId(9), 1).len(), 8192);
        for rank in 0..2 * u32::try_from(MOST).unwrap() {
            ranks.progress(JobId(10), &point(1, rank, 1, 1));
        }
        assert_eq!(kept(), (MOST, 1));
        ranks.remove(JobId(10));
        assert_eq!(kept(), (0, 0));
    }
}
