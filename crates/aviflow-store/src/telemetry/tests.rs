use super::*;
use aviflow_core::time::Time;
use proptest::prelude::*;
use std::fs;
use tempfile::TempDir;

const JOB: JobId = JobId(7);

fn key(attempt: u32, worker: u32) -> StreamKey {
    StreamKey { job: JOB, attempt, worker }
}

fn open() -> (TempDir, FileTelemetry) {
    let folder = TempDir::new().unwrap();
    let telemetry = FileTelemetry::open(folder.path()).unwrap();
    (folder, telemetry)
}

fn texts(lines: impl IntoIterator<Item = LogLine>) -> Vec<String> {
    lines.into_iter().map(|l| l.text).collect()
}

fn read(telemetry: &FileTelemetry, query: &Query) -> Vec<LogLine> {
    telemetry.read_logs(JOB, query).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_stream_is_kept_once_however_often_it_is_sent() {
    let (_folder, t) = open();
    assert_eq!(t.log_have(key(1, 0)), 0);
    assert_eq!(t.log_append(key(1, 0), 0, "10 0 o one\n11 0 e two\n").unwrap(), 22);
    // Again, overlapping, and from the beginning.
    assert_eq!(t.log_append(key(1, 0), 0, "10 0 o one\n").unwrap(), 22);
    assert_eq!(t.log_append(key(1, 0), 11, "11 0 e two\n12 0 a three\n").unwrap(), 35);
    assert_eq!(t.log_have(key(1, 0)), 35);
    let lines = read(&t, &Query::default());
    assert_eq!(texts(lines.clone()), ["one", "two", "three"]);
    let expected = LogLine { at: Time(11), attempt: 1, worker: 0, rank: 0, source: LogSource::Err, text: "two".into() };
    assert_eq!(lines[1], expected);
}

#[test]
fn lines_without_an_end_come_again_with_it() {
    let (_folder, t) = open();
    assert_eq!(t.log_append(key(1, 0), 0, "10 0 o one\n11 0 o tw").unwrap(), 11);
    assert!(t.log_append(key(1, 0), 11, "11 0 o tw").is_err());
    assert_eq!(t.log_append(key(1, 0), 11, "11 0 o two\n").unwrap(), 22);
    assert_eq!(texts(read(&t, &Query::default())), ["one", "two"]);
}

#[test]
fn a_gap_is_said_and_offsets_go_on_across_a_restart() {
    let (folder, t) = open();
    t.log_append(key(1, 0), 0, "10 3 o one\n").unwrap();
    assert_eq!(t.log_append(key(1, 0), 1011, "20 3 o two\n").unwrap(), 1022);
    let lines = read(&t, &Query::default());
    assert_eq!(lines.len(), 3);
    assert!(lines[1].text.starts_with("1000 bytes of output are missing here"), "{}", lines[1].text);
    assert_eq!((lines[1].at, lines[1].rank, lines[1].source), (Time(20), 3, LogSource::Agent));
    drop(t);
    let t = FileTelemetry::open(folder.path()).unwrap();
    assert_eq!(t.log_have(key(1, 0)), 1022);
    assert_eq!(t.log_append(key(1, 0), 1022, "30 3 o three\n").unwrap(), 1035);
    assert_eq!(read(&t, &Query::default())[..3], lines);
}

#[test]
fn a_crash_between_the_gap_and_its_line_leaves_no_trace() {
    let (folder, t) = open();
    t.log_append(key(1, 0), 0, "10 0 o one\n").unwrap();
    t.log_append(key(1, 0), 1011, "20 0 o two\n").unwrap();
    drop(t);
    let log = folder.path().join("logs/7/1/0.log");
    // The gap was noted; of the rest only a part was written.
    fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(20).unwrap();
    let t = FileTelemetry::open(folder.path()).unwrap();
    assert_eq!(t.log_have(key(1, 0)), 11);
    assert_eq!(fs::metadata(&log).unwrap().len(), 11);
    // Were the note still there, the file would pass its position and the offset be wrong.
    let long = format!("30 0 o {}\n", "x".repeat(500));
    assert_eq!(t.log_append(key(1, 0), 11, &long).unwrap(), 11 + long.len() as u64);
    drop(t);
    let t = FileTelemetry::open(folder.path()).unwrap();
    assert_eq!(t.log_have(key(1, 0)), 11 + long.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// An agent's stream comes through whole, whatever a crash cuts off on the way.
    #[test]
    fn a_torn_end_is_cut_and_sent_again(
        lengths in prop::collection::vec(0usize..200, 1..40),
        cuts in prop::collection::vec(0u64..300, 0..4),
    ) {
        let folder = TempDir::new().unwrap();
        let lines: Vec<String> = lengths.iter().enumerate().map(|(i, n)| format!("{i} 0 o {}", "y".repeat(*n))).collect();
        let stream: String = lines.iter().map(|l| format!("{l}\n")).collect();
        for cut in cuts {
            let t = FileTelemetry::open(folder.path()).unwrap();
            let have = t.log_have(key(1, 0));
            t.log_append(key(1, 0), have, &stream[usize::try_from(have).unwrap()..]).unwrap();
            drop(t);
            let log = folder.path().join("logs/7/1/0.log");
            let len = fs::metadata(&log).unwrap().len();
            fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(len.saturating_sub(cut)).unwrap();
        }
        let t = FileTelemetry::open(folder.path()).unwrap();
        let have = t.log_have(key(1, 0));
        prop_assert!(have == 0 || stream.as_bytes()[usize::try_from(have).unwrap() - 1] == b'\n');
        t.log_append(key(1, 0), have, &stream[usize::try_from(have).unwrap()..]).unwrap();
        let found: Vec<String> = read(&t, &Query::default()).iter().map(|l| format!("{} 0 o {}", l.at.0, l.text)).collect();
        prop_assert_eq!(found, lines);
    }

    /// Every way to read agrees with the plain one: all lines sorted, then filtered.
    #[test]
    fn reading_is_sorting_and_filtering(
        streams in prop::collection::vec((1u32..3, 0u32..4, prop::collection::vec((0i64..40, 0u32..3, 0usize..300), 0..120)), 0..6),
        since in prop::option::of(0i64..2000),
        rank in prop::option::of(0u32..3),
        attempt in prop::option::of(1u32..3),
        tail in prop::option::of(0usize..60),
        grep in prop::bool::ANY,
        chunk in 1usize..50,
    ) {
        let (_folder, t) = open();
        let mut follower = t.follow_logs(JOB, Query { since: since.map(Time), ..Query::default() }).unwrap();
        let mut followed = Vec::new();
        let mut all: Vec<LogLine> = Vec::new();
        let mut clocks: BTreeMap<(u32, u32), i64> = BTreeMap::new();
        for (attempt, worker, lines) in &streams {
            let at = clocks.entry((*attempt, *worker)).or_default();
            for lines in lines.chunks(chunk) {
                let mut text = String::new();
                for (later, rank, length) in lines {
                    *at += later;
                    let line = LogLine {
                        at: Time(*at), attempt: *attempt, worker: *worker, rank: *rank, source: LogSource::Out,
                        text: format!("{} {}", all.len(), "Z".repeat(*length)),
                    };
                    text.push_str(&format!("{at} {rank} o {}\n", line.text));
                    all.push(line);
                }
                let key = key(*attempt, *worker);
                t.log_append(key, t.log_have(key), &text).unwrap();
                followed.extend(follower.next_batch().unwrap());
            }
        }
        prop_assert_eq!(follower.next_batch().unwrap(), Vec::<LogLine>::new());
        all.sort_by_key(|l| (l.attempt, l.at, l.worker));
        let query = Query {
            attempt, since: since.map(Time), tail,
            ranks: rank.map(|r| [r].into()),
            grep: grep.then(|| Grep { text: "7 z".into(), ignore_case: true }),
        };
        let mut expected: Vec<LogLine> = all.iter().filter(|l| {
            attempt.is_none_or(|a| l.attempt == a) && since.is_none_or(|s| l.at.0 >= s)
                && rank.is_none_or(|r| l.rank == r) && (!grep || l.text.contains("7 Z"))
        }).cloned().collect();
        expected.drain(..expected.len() - tail.unwrap_or(usize::MAX).min(expected.len()));
        prop_assert_eq!(read(&t, &query), expected.clone());
        // A follower that comes late begins with the same lines.
        let mut late = t.follow_logs(JOB, query).unwrap();
        prop_assert_eq!(late.next_batch().unwrap(), expected);
        prop_assert_eq!(late.next_batch().unwrap(), Vec::<LogLine>::new());
        // Each line once; within a stream in its order.
        let order = |l: &LogLine| (l.attempt, l.worker, l.text.split(' ').next().and_then(|n| n.parse::<usize>().ok()));
        followed.sort_by_key(order);
        let mut wanted: Vec<LogLine> = all.into_iter().filter(|l| since.is_none_or(|s| l.at.0 >= s)).collect();
        wanted.sort_by_key(order);
        prop_assert_eq!(followed, wanted);
    }
}

#[test]
fn large_logs_are_read_from_both_ends_and_from_a_time() {
    let (_folder, t) = open();
    let line = |i: i64| format!("{i} 0 o line {i} {}\n", "x".repeat(usize::try_from(i % 977).unwrap()));
    let mut text: String = (0..5_000).map(line).collect();
    // Longer than any block.
    text.push_str(&format!("5000 0 o {}\n", "long".repeat(100_000)));
    text.extend((5_001..6_000).map(line));
    t.log_append(key(1, 0), 0, &text).unwrap();
    let at = |lines: Vec<LogLine>| lines.iter().map(|l| l.at.0).collect::<Vec<_>>();
    assert_eq!(at(read(&t, &Query::default())), (0..6_000).collect::<Vec<_>>());
    let tail = |n| Query { tail: Some(n), ..Query::default() };
    assert_eq!(at(read(&t, &tail(3))), [5_997, 5_998, 5_999]);
    assert_eq!(at(read(&t, &tail(1_500))), (4_500..6_000).collect::<Vec<_>>());
    for since in [0, 1, 2_345, 4_999, 5_000, 5_001, 5_999, 6_000] {
        let query = Query { since: Some(Time(since)), ..Query::default() };
        assert_eq!(at(read(&t, &query)), (since..6_000).collect::<Vec<_>>());
    }
}

#[test]
fn a_follower_goes_on_across_attempts_and_restarts_of_a_batch() {
    let (_folder, t) = open();
    let mut changed = t.changed_of(JOB);
    let many: String = (0..25_000).map(|i| format!("{i} 0 o {i}\n")).collect();
    t.log_append(key(1, 0), 0, &many).unwrap();
    assert!(changed.has_changed().unwrap());
    changed.mark_unchanged();
    let mut follower = t.follow_logs(JOB, Query::default()).unwrap();
    let mut lines = Vec::new();
    loop {
        let batch = follower.next_batch().unwrap();
        if batch.is_empty() {
            break;
        }
        lines.extend(texts(batch));
    }
    assert_eq!(lines, (0..25_000).map(|i| i.to_string()).collect::<Vec<_>>());
    assert!(!changed.has_changed().unwrap());
    t.log_append(key(2, 1), 0, "30001 1 o b\n").unwrap();
    t.log_append(key(2, 0), 0, "30000 0 o a\n").unwrap();
    assert!(changed.has_changed().unwrap());
    assert_eq!(texts(follower.next_batch().unwrap()), ["a", "b"]);
    let mut late = t.follow_logs(JOB, Query { tail: Some(1), ..Query::default() }).unwrap();
    t.log_append(key(2, 0), 12, "30002 0 o c\n").unwrap();
    assert_eq!(texts(late.next_batch().unwrap()), ["b", "c"]);
    t.log_append(key(2, 0), 24, "30003 0 o d\n").unwrap();
    assert_eq!(texts(late.next_batch().unwrap()), ["d"]);
}

#[test]
fn a_batch_is_bounded_by_its_text_also_where_the_last_lines_are_asked_for() {
    let (_folder, t) = open();
    let text: String = (0..60).map(|i| format!("{i} 0 o {}\n", "x".repeat(100_000))).collect();
    t.log_append(key(1, 0), 0, &text).unwrap();
    for (tail, lines) in [(None, 60), (Some(50), 50)] {
        let mut follower = t.follow_logs(JOB, Query { tail, ..Query::default() }).unwrap();
        let mut batches = Vec::new();
        loop {
            let batch = follower.next_batch().unwrap();
            if batch.is_empty() {
                break;
            }
            assert!(batch.iter().map(|l| l.text.len()).sum::<usize>() <= (1 << 20) + 100_000);
            batches.push(batch);
        }
        let at: Vec<i64> = batches.concat().iter().map(|l| l.at.0).collect();
        assert_eq!(at, (60 - lines..60).collect::<Vec<_>>());
    }
}

#[test]
fn what_has_another_form_is_shown_as_it_is() {
    let (_folder, t) = open();
    t.log_append(key(1, 0), 0, "10 0 o first\nno stamp at all\n11 0 o\n12 x o odd\n").unwrap();
    let lines = read(&t, &Query::default());
    assert_eq!(texts(lines.clone()), ["first", "no stamp at all", "", "12 x o odd"]);
    assert_eq!((lines[1].at, lines[1].source), (Time(10), LogSource::Agent));
}

#[test]
fn builds_are_kept_by_hash() {
    let (_folder, t) = open();
    let progress = |hash: &str, done| BuildProgress {
        hash: hash.into(),
        name: "jax@1".into(),
        step: "installing".into(),
        done,
        total: 9,
    };
    for p in [progress("b", 1), progress("a", 2), progress("b", 3)] {
        t.build(p);
    }
    assert_eq!(t.builds(), [progress("a", 2), progress("b", 3)]);
    let mut changed = (t.changed_of(JOB), t.builds_changed());
    t.forget_build("a");
    assert_eq!(t.builds(), [progress("b", 3)]);
    assert!(changed.1.has_changed().unwrap() && !changed.0.has_changed().unwrap());
    changed.1.mark_unchanged();
    // Nothing was forgotten.
    t.forget_build("a");
    assert!(!changed.1.has_changed().unwrap());
}

#[test]
fn a_job_wakes_only_those_who_follow_it_and_nobody_is_remembered_in_vain() {
    let (_folder, t) = open();
    let (ours, mut others) = (t.changed_of(JOB), t.changed_of(JobId(8)));
    t.log_append(key(1, 0), 0, "10 0 o one\n").unwrap();
    t.log_append(StreamKey { job: JobId(9), attempt: 1, worker: 0 }, 0, "10 0 o one\n").unwrap();
    assert!(ours.has_changed().unwrap() && !others.has_changed().unwrap());
    let again = t.changed_of(JobId(8));
    t.progress(JobId(8), point(0, 1));
    assert!(others.has_changed().unwrap() && again.has_changed().unwrap());
    others.mark_unchanged();
    assert_eq!(t.followed(), 2);
    drop(ours);
    t.log_append(key(1, 0), 11, "11 0 o two\n").unwrap();
    assert_eq!(t.followed(), 1);
    drop((others, again));
    let _new = t.changed_of(JOB);
    assert_eq!(t.followed(), 1);
}

fn point(rank: u32, step: u64) -> Point {
    let (values, odd) = Default::default();
    Point { at: Time(1), attempt: 1, rank, step, total_steps: None, tokens: None, values, odd }
}

#[test]
fn the_latest_point_is_that_of_the_lowest_rank_that_reports() {
    let (folder, t) = open();
    let step = |t: &FileTelemetry| t.latest(JOB).unwrap().map(|p| (p.attempt, p.rank, p.step));
    for (rank, at, latest) in [(3, 1, (1, 3, 1)), (1, 1, (1, 1, 1)), (3, 2, (1, 1, 1)), (1, 2, (1, 1, 2))] {
        t.progress(JOB, point(rank, at));
        assert_eq!(step(&t), Some(latest));
    }
    t.progress(JOB, point(2, 9));
    drop(t);
    let t = FileTelemetry::open(folder.path()).unwrap();
    assert_eq!(step(&t), Some((1, 1, 2)), "from the file");
    // A new attempt may have other ranks; what the old one still ships is late.
    t.progress(JOB, Point { attempt: 2, ..point(5, 3) });
    t.progress(JOB, point(0, 4));
    assert_eq!(step(&t), Some((2, 5, 3)));
}

#[test]
fn an_evaluation_hides_no_loss() {
    let (folder, t) = open();
    let told = |step, values: &[(&str, f64)]| Point {
        values: values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        ..point(0, step)
    };
    let latest = |t: &FileTelemetry| t.latest(JOB).unwrap().map(|p| (p.step, p.values.into_iter().collect::<Vec<_>>()));
    let values = |all: &[(&str, f64)]| all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<Vec<_>>();
    t.progress(JOB, told(20, &[("loss", 2.5), ("mfu", 0.4)]));
    t.progress(JOB, told(18, &[("eval_loss", 2.75)]));
    let both = Some((20, values(&[("eval_loss", 2.75), ("loss", 2.5), ("mfu", 0.4)])));
    assert_eq!(latest(&t), both);
    drop(t);
    let t = FileTelemetry::open(folder.path()).unwrap();
    assert_eq!(latest(&t), both, "from the file");
    t.progress(JOB, told(21, &[("loss", 2.25)]));
    assert_eq!(latest(&t), Some((21, values(&[("loss", 2.25)]))));
}

#[test]
fn a_removed_job_takes_its_files_with_it() {
    let (folder, t) = open();
    t.log_append(key(1, 0), 0, "10 0 o one\n").unwrap();
    t.log_append(key(2, 3), 9, "10 0 o one\n").unwrap();
    let other = StreamKey { job: JobId(8), attempt: 1, worker: 0 };
    t.log_append(other, 0, "10 0 o kept\n").unwrap();
    assert!(t.disk_usage().unwrap().logs > 34);
    t.remove_job(JOB).unwrap();
    t.remove_job(JOB).unwrap();
    assert!(!folder.path().join("logs/7").exists());
    assert_eq!(t.log_have(key(1, 0)), 0);
    assert_eq!(read(&t, &Query::default()), []);
    assert_eq!(t.disk_usage().unwrap(), DiskUsage { logs: 12, series: 0 });
}
