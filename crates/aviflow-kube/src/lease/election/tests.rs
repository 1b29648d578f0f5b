//! Cases one by one, and histories with random clocks, delays, pauses and crashes around one register that
//! compares before it swaps, as the apiserver does.

use super::*;
use k8s_openapi::jiff::Timestamp;

fn at(ms: i64) -> MicroTime {
    MicroTime(Timestamp::from_millisecond(ms).unwrap())
}

/// A lease as `holder` wrote it at `ms` by its own clock.
fn held_by(holder: &str, ms: i64) -> LeaseSpec {
    written(None, holder, at(ms))
}

fn wait(holder: &str, again: Duration) -> Next {
    Next::Wait { holder: holder.to_owned(), again }
}

fn lost(holder: &str) -> Next {
    Next::Lost { holder: holder.to_owned() }
}

#[test]
fn a_lease_that_nobody_has_is_taken() {
    let now = Instant::now();
    let given_up = LeaseSpec { holder_identity: None, ..held_by("a", 0) };
    let empty = LeaseSpec { holder_identity: Some(String::new()), ..held_by("a", 0) };
    for found in [None, Some(&given_up), Some(&empty), Some(&LeaseSpec::default())] {
        assert_eq!(Election::new("b").look(found, now), Next::Write, "{found:?}");
    }
}

#[test]
fn one_that_another_has_is_waited_for_from_when_it_was_last_seen_to_change() {
    let (start, mut b) = (Instant::now(), Election::new("b"));
    let after = |ms| start + Duration::from_millis(ms);
    // What it says of times may be from any clock.
    assert_eq!(b.look(Some(&held_by("a", -5_000_000)), start), wait("a", LOOK));
    assert_eq!(b.look(Some(&held_by("a", -4_998_000)), after(2000)), wait("a", LOOK));
    assert_eq!(b.look(Some(&held_by("a", -4_998_000)), after(7400)), wait("a", Duration::from_millis(600)));
    assert_eq!(b.look(Some(&held_by("a", -4_998_000)), after(8000)), Next::Write);
    // It was not written: somebody else was faster.
    assert_eq!(b.look(Some(&held_by("c", 0)), after(8010)), wait("c", LOOK));
}

#[test]
fn a_holder_renews_and_goes_once_another_has_it() {
    let (now, mut a) = (Instant::now(), Election::new("a"));
    assert_eq!(a.look(None, now), Next::Write);
    a.wrote();
    // Also where somebody deleted it, or emptied it by hand.
    for found in [Some(held_by("a", 1)), None, Some(LeaseSpec::default())] {
        assert_eq!(a.look(found.as_ref(), now), Next::Write, "{found:?}");
    }
    assert_eq!(a.look(Some(&held_by("b", 1)), now), lost("b"));
    let later = now + Duration::from_secs(3600);
    assert_eq!(a.look(Some(&held_by("b", 1)), later), lost("b"), "nothing of it comes back");
    assert_eq!(a.look(None, later), lost(""));
}

#[test]
fn who_comes_back_under_his_own_name_need_not_wait() {
    assert_eq!(Election::new("a").look(Some(&held_by("a", 0)), Instant::now()), Next::Write);
}

#[test]
fn a_lease_lasts_as_long_as_it_says_within_reason() {
    let now = Instant::now();
    let lasting = |seconds| LeaseSpec { lease_duration_seconds: seconds, ..held_by("a", 0) };
    for (says, is) in [(Some(3), 3), (None, 6), (Some(-1), 6), (Some(0), 6), (Some(100_000), 60)] {
        let (mut b, spec, is) = (Election::new("b"), lasting(says), Duration::from_secs(is));
        b.look(Some(&spec), now);
        let short = Duration::from_millis(1);
        assert_eq!(b.look(Some(&spec), now + is - short), wait("a", short), "{says:?}");
        assert_eq!(b.look(Some(&spec), now + is), Next::Write, "{says:?}");
    }
}

#[test]
fn what_is_written_counts_holders_and_keeps_when_each_came() {
    let first = held_by("a", 1);
    assert_eq!((first.lease_transitions, &first.acquire_time), (Some(0), &Some(at(1))));
    let renewed = written(Some(&first), "a", at(2));
    assert_eq!(renewed, LeaseSpec { renew_time: Some(at(2)), ..first });
    let taken = written(Some(&renewed), "b", at(3));
    assert_eq!(taken, LeaseSpec { lease_transitions: Some(1), ..held_by("b", 3) });
}

/// Numbers that look random and are the same for each seed.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Clocks run between 9 and 11 of their milliseconds to 10 true ones.
const CLOCKS: std::ops::RangeInclusive<u64> = 9..=11;
/// The longest way to the apiserver or back.
const WAY: u64 = 200;

/// Where a candidate is, with what it waits for until when.
#[derive(Clone, Debug)]
enum Doing {
    /// Asks at that time.
    Pauses,
    /// Reads what the register says at that time.
    Reads,
    /// Hears at that time what was read.
    Hears(u64, Option<LeaseSpec>),
    /// Its write arrives: over which version, and what.
    Writes(u64, LeaseSpec),
    /// Hears whether it was written.
    Learns(bool),
    Dead,
}

struct Candidate {
    election: Election,
    clock: u64,
    doing: Doing,
    at: u64,
    term: Option<u64>,
    ended: bool,
}

/// The lease with its version, the term of the store, and who does what.
struct Model {
    rng: Rng,
    base: Instant,
    lease: (u64, Option<LeaseSpec>),
    /// When and by whom it was written last.
    written: (u64, usize),
    term: u64,
    candidates: Vec<Candidate>,
    now: u64,
    taken: u32,
    commits: u32,
}

impl Model {
    fn new(seed: u64) -> Model {
        let mut rng = Rng(seed);
        let candidate = |n: usize, rng: &mut Rng| Candidate {
            election: Election::new(&format!("c{n}")),
            clock: CLOCKS.start() + rng.below(CLOCKS.end() - CLOCKS.start() + 1),
            doing: Doing::Pauses,
            at: rng.below(1000),
            term: None,
            ended: false,
        };
        let candidates = (0..3).map(|n| candidate(n, &mut rng)).collect();
        let base = Instant::now();
        Model { rng, base, lease: (0, None), written: (0, 0), term: 0, candidates, now: 0, taken: 0, commits: 0 }
    }

    fn way(&mut self) -> u64 {
        self.now + 1 + self.rng.below(WAY)
    }

    /// The next thing that happens.
    fn step(&mut self) {
        let alive = |c: &&Candidate| !matches!(c.doing, Doing::Dead);
        let Some(next) = self.candidates.iter().filter(alive).map(|c| c.at).min() else { return };
        let n = self.candidates.iter().position(|c| c.at == next && !matches!(c.doing, Doing::Dead)).unwrap();
        self.now = next;
        let clock = self.candidates[n].clock;
        let by_clock = |d: Duration| u64::try_from(d.as_millis()).unwrap() * 10 / clock;
        let (doing, at) = match self.candidates[n].doing.clone() {
            Doing::Dead => unreachable!("it was left out"),
            Doing::Pauses => (Doing::Reads, self.way()),
            Doing::Reads => (Doing::Hears(self.lease.0, self.lease.1.clone()), self.way()),
            Doing::Hears(version, spec) => {
                let now = self.base + Duration::from_millis(self.now * clock / 10);
                let candidate = &mut self.candidates[n];
                match candidate.election.look(spec.as_ref(), now) {
                    Next::Write => {
                        assert!(!candidate.ended, "who lost it takes it no more");
                        let time = i64::try_from(self.now).unwrap();
                        let spec = written(spec.as_ref(), candidate.election.me(), at(time));
                        (Doing::Writes(version, spec), self.way())
                    }
                    Next::Wait { again, .. } => (Doing::Pauses, self.now + by_clock(again)),
                    Next::Lost { .. } => {
                        candidate.ended = true;
                        candidate.term = None;
                        (Doing::Dead, self.now)
                    }
                }
            }
            Doing::Writes(version, spec) => {
                let wrote = version == self.lease.0;
                if wrote {
                    let (when, who) = self.written;
                    if self.lease.1.is_some() && who != n {
                        let unrenewed = u64::try_from(DURATION.as_millis()).unwrap() * 10 / CLOCKS.end();
                        assert!(self.now - when >= unrenewed, "it was renewed {} ms ago", self.now - when);
                        self.taken += 1;
                    }
                    self.lease = (version + 1, Some(spec));
                    self.written = (self.now, n);
                }
                (Doing::Learns(wrote), self.way())
            }
            Doing::Learns(wrote) => {
                let candidate = &mut self.candidates[n];
                if wrote {
                    candidate.election.wrote();
                    // The first time it takes the store.
                    if candidate.term.is_none() {
                        self.term += 1;
                        candidate.term = Some(self.term);
                    }
                }
                (Doing::Pauses, self.now + if wrote { by_clock(RENEW) } else { 0 })
            }
        };
        self.candidates[n].doing = doing;
        self.candidates[n].at = at;
    }

    /// Somebody who believes that he decides commits; the store takes it from one of them.
    fn commit(&mut self) {
        let taken: Vec<u64> = self.candidates.iter().filter_map(|c| c.term).filter(|t| *t == self.term).collect();
        assert!(taken.len() <= 1, "two have the store's term");
        self.commits += u32::try_from(taken.len()).unwrap();
    }

    fn holder(&self) -> Option<usize> {
        self.candidates.iter().position(|c| c.term == Some(self.term) && !matches!(c.doing, Doing::Dead))
    }
}

#[test]
fn who_renews_in_time_keeps_it_whatever_the_clocks() {
    for seed in 0..200 {
        let mut model = Model::new(seed);
        while model.now < 120_000 {
            model.step();
            model.commit();
        }
        assert_eq!((model.taken, model.term), (0, 1), "seed {seed}");
        assert!(model.commits > 0, "seed {seed}: somebody decided");
    }
}

#[test]
fn after_a_crash_another_has_it_soon() {
    // By the slowest clock, after a last look and with every request as slow as can be.
    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap();
    let longest = (ms(DURATION) + ms(LOOK)) * 10 / CLOCKS.start() + 8 * (WAY + 1);
    for seed in 0..200 {
        let mut model = Model::new(seed);
        for _ in 0..2 {
            let until = model.now + 10_000 + model.rng.below(10_000);
            while model.now < until {
                model.step();
            }
            let holder = model.holder().expect("somebody holds it");
            model.candidates[holder].doing = Doing::Dead;
            let (died, term) = (model.now, model.term);
            while model.term == term {
                model.step();
                assert!(model.now - died <= longest, "seed {seed}: nobody has it after {} ms", model.now - died);
            }
        }
    }
}

#[test]
fn of_any_that_stall_and_crash_one_at_a_time_decides() {
    let (mut taken, mut lost) = (0, 0);
    for seed in 0..500 {
        let mut model = Model::new(seed);
        while model.now < 200_000 {
            model.step();
            model.commit();
            let n = usize::try_from(model.rng.below(3)).unwrap();
            if model.rng.below(40) == 0 {
                // Its machine stands still, or the network does: also between what was read and what is written.
                model.candidates[n].at += model.rng.below(20_000);
            }
            if model.rng.below(100) == 0 && matches!(model.candidates[n].doing, Doing::Dead) {
                // It is started again, as another.
                let name = format!("c{n}-{}", model.now);
                let again = Candidate { election: Election::new(&name), at: model.now, ended: false, ..candidate(n) };
                model.candidates[n] = again;
            }
        }
        taken += model.taken;
        lost += model.candidates.iter().filter(|c| c.ended).count();
        assert_eq!(model.term, u64::from(model.taken) + 1, "seed {seed}: each taking is a term");
    }
    assert!(taken > 500 && lost > 0, "{taken} were taken, {lost} ended by themselves");
}

fn candidate(n: usize) -> Candidate {
    let clock = CLOCKS.start() + n as u64;
    Candidate { election: Election::new(""), clock, doing: Doing::Pauses, at: 0, term: None, ended: false }
}
