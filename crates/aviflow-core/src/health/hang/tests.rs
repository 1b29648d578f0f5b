use super::*;
use crate::health::chance::Chance;

const LIMITS: fn() -> Limits = Limits::default;

/// A healthy training whose hang detector is asked exactly when it wants to be.
struct World {
    hang: Hang,
    limits: Limits,
    now: Time,
    alarms: u32,
    suspicions: u32,
}

impl World {
    fn new() -> World {
        World { hang: Hang::default(), limits: LIMITS(), now: Time(0), alarms: 0, suspicions: 0 }
    }

    /// Time passes; whoever asks to be woken is.
    fn pass(&mut self, ms: i64) {
        let until = self.now + Span(ms);
        while let Some(at) = self.hang.next(&self.limits).filter(|at| *at < until) {
            let before = self.hang.stage;
            let stage = self.hang.ask(at, &self.limits);
            assert!(stage > before, "asked to be woken for nothing at {at:?}");
            self.alarms += u32::from(stage == Stage::Hung);
            self.suspicions += u32::from(stage >= Stage::Suspected && before < Stage::Suspected);
        }
        self.now = until;
    }
}

/// Steps of a log-normal duration, with evaluations that are seen only as lines, and checkpoints.
fn healthy(steps: u64, median_ms: f64, sigma: f64, seed: u64) -> World {
    let mut chance = Chance::new(seed);
    let mut w = World::new();
    w.hang.started(w.now);
    w.pass(120_000);
    let mut evaluation = 250;
    for step in 1..=steps {
        w.pass((median_ms * (sigma * chance.normal()).exp()) as i64 + 1);
        w.hang.step(step, w.now);
        if step == evaluation {
            evaluation += 200 + chance.below(300);
            w.hang.active(w.now + Span(1));
            if chance.below(2) == 0 {
                // One that says only that it begins and how it ended.
                w.pass((median_ms * (1.0 + 19.0 * chance.unit())) as i64 + 1);
            } else {
                for _ in 0..chance.below(20) {
                    w.pass(1000 + chance.below(24_000) as i64);
                    w.hang.active(w.now);
                }
            }
            w.hang.active(w.now);
        }
        if step.is_multiple_of(1000) {
            w.hang.checkpoint_begun(w.now);
            // Where it writes in the background, steps go on.
            if chance.below(3) > 0 {
                w.pass((20_000.0 * (0.7 * chance.normal()).exp()) as i64);
                w.hang.checkpoint_over(w.now);
            }
        }
        if step.is_multiple_of(250_000) {
            w.hang.stopped();
            w.pass(60_000);
            w.hang.started(w.now);
            w.pass(600_000);
        }
    }
    w
}

#[test]
fn no_false_alarm_in_a_million_healthy_steps() {
    for (seed, median_ms) in [(1, 200.0), (2, 1000.0), (3, 5000.0), (4, 40_000.0)] {
        let w = healthy(1_000_000, median_ms, 0.5, seed);
        assert_eq!(w.alarms, 0, "steps of {median_ms} ms");
        // What is told is as rare as the distribution makes it: 3·10⁻⁶ of the steps, more while p99 is too low.
        assert!(w.suspicions <= 30, "steps of {median_ms} ms: {} suspicions", w.suspicions);
    }
}

#[test]
fn a_hang_is_told_within_three_times_p99() {
    for (seed, median_ms, sigma) in [
        (11, 100.0, 0.5),
        (12, 1000.0, 0.5),
        (13, 8000.0, 0.5),
        (14, 8000.0, 0.05),
        (15, 30_000.0, 0.2),
        (16, 300_000.0, 0.3),
    ] {
        let mut chance = Chance::new(seed);
        let mut w = World::new();
        w.hang.started(w.now);
        let mut took = Vec::new();
        for step in 0..900 {
            let ms = (median_ms * (sigma * chance.normal()).exp()) as i64 + 1;
            w.now = w.now + Span(ms);
            w.hang.step(step, w.now);
            took.push(ms);
        }
        took.remove(0);
        took.sort_unstable();
        let p99 = took[(took.len() * 99).div_ceil(100) - 1];
        let limit = Span(30_000.max(3 * p99));
        let last = w.now;
        let mut stages = Vec::new();
        while let Some(at) = w.hang.next(&w.limits) {
            stages.push((w.hang.ask(at, &w.limits), at.since(last)));
        }
        let told = stages.iter().find(|(s, _)| *s >= Stage::Suspected).expect("told").1;
        let acted = stages.last().expect("acted");
        assert!(told <= limit && told.0 * 10 >= limit.0 * 9, "{median_ms} {sigma}: {told} of {limit}");
        assert_eq!(acted.0, Stage::Hung);
        let most = if sigma > 0.3 { 2 * limit.0 } else { limit.0 };
        assert!(acted.1.0 <= most, "{median_ms} {sigma}: acted after {} of {limit}", acted.1);
        assert!(stages[0].0 == Stage::Quiet && stages[0].1 < told, "stacks are taken before");
    }
}

/// A training with steps of one second, `n` of them.
fn steady(n: u64) -> (Hang, Time) {
    let mut hang = Hang::default();
    hang.started(Time(0));
    for step in 1..=n {
        hang.step(step, Time(step as i64 * 1000));
    }
    (hang, Time(n as i64 * 1000))
}

fn hung_at(hang: &Hang) -> Option<Time> {
    let mut hang = hang.clone();
    let mut at = None;
    while let Some(next) = hang.next(&LIMITS()) {
        if hang.ask(next, &LIMITS()) == Stage::Hung {
            at = Some(next);
        }
    }
    at
}

fn hung_after(hang: &Hang, since: Time) -> Option<i64> {
    hung_at(hang).map(|at| at.since(since).0 / 1000)
}

#[test]
fn the_first_steps_have_time() {
    let mut hang = Hang::default();
    assert_eq!(hung_at(&hang), None, "nothing runs");
    hang.started(Time(0));
    assert_eq!(hung_at(&hang), None, "it may never tell a step");
    assert_eq!(hang.clone().ask(Time(1_800_000), &LIMITS()), Stage::Suspected);
    hang.tells_steps();
    assert_eq!(hung_after(&hang, Time(0)), Some(1800));
    hang.active(Time(1_000_000));
    assert_eq!(hung_after(&hang, Time(0)), Some(2800), "loading of data was seen");
    for s in 0..100_000 {
        hang.active(Time(s * 1000));
    }
    assert_eq!(hung_after(&hang, Time(0)), Some(7200), "but not for ever");
    let (hang, last) = steady(1);
    assert_eq!(hung_after(&hang, last), Some(300), "the second may compile again");
    let (hang, last) = steady(400);
    assert_eq!(hung_after(&hang, last), Some(30));
}

#[test]
fn a_checkpoint_has_time_and_is_no_step() {
    let (mut hang, last) = steady(400);
    hang.checkpoint_begun(last);
    assert_eq!(hung_after(&hang, last), Some(600));
    let over = last + Span::seconds(500);
    hang.checkpoint_over(over);
    assert_eq!(hung_after(&hang, over), Some(30));
    let p99 = hang.p99();
    hang.step(401, over + Span::seconds(20));
    assert_eq!(hang.p99(), p99);
    hang.checkpoint_begun(over + Span::seconds(21));
    assert_eq!(hung_after(&hang, over + Span::seconds(21)), Some(1500), "it is known how long they take");
    hang.step(402, over + Span::seconds(22));
    assert_eq!(hung_after(&hang, over + Span::seconds(22)), Some(30), "it writes in the background");
}

#[test]
fn a_rare_line_is_an_evaluation_and_a_usual_one_is_not() {
    let (mut hang, last) = steady(400);
    hang.active(last + Span(500));
    assert_eq!(hung_after(&hang, last), Some(300));
    for s in 1..10_000 {
        hang.active(last + Span::seconds(s));
    }
    assert_eq!(hung_after(&hang, last), Some(1800), "who prints for ever hangs in the end");
    let (mut hang, mut last) = (hang, last);
    for step in 401..500 {
        last = Time(step * 1000);
        hang.active(last - Span(1));
        hang.step(step as u64, last);
    }
    hang.active(last + Span::seconds(2));
    assert_eq!(hung_after(&hang, last), Some(32), "each step has lines: one is a sign of life, no more");
}

#[test]
fn what_was_long_and_healthy_is_remembered() {
    let (mut hang, last) = steady(400);
    hang.active(last);
    let evaluated = last + Span::seconds(280);
    hang.step(401, evaluated);
    hang.active(evaluated);
    assert_eq!(hung_after(&hang, evaluated), Some(420));
}

#[test]
fn another_regime_is_learned() {
    let (mut hang, mut now) = steady(2000);
    for step in 2001..2030 {
        now = now + Span::seconds(25);
        hang.step(step, now);
    }
    assert!(hung_after(&hang, now).expect("some") >= 60, "three times 25 s, less a class");
    for step in 2030..12_000 {
        now = now + Span::seconds(1);
        hang.step(step, now);
    }
    assert_eq!(hung_after(&hang, now), Some(30));
}

#[test]
fn who_is_not_heard_does_not_hang() {
    let (mut hang, last) = steady(400);
    hang.heard(false, last);
    assert_eq!(hung_at(&hang), None);
    let back = last + Span::minutes(60);
    hang.heard(true, back);
    assert_eq!(hung_after(&hang, back), Some(30));
    let p99 = hang.p99();
    hang.step(401, back);
    assert_eq!(hang.p99(), p99, "the absence was no step");
}

#[test]
fn evidence_makes_a_suspicion_a_hang() {
    let (mut hang, last) = (healthy(900, 10_000.0, 0.5, 7).hang, Time(0));
    assert!(!hang.confirm(), "nothing is suspected");
    let told = loop {
        let at = hang.next(&LIMITS()).expect("a suspicion before the hang");
        if hang.ask(at, &LIMITS()) == Stage::Suspected {
            break at;
        }
    };
    assert!(hang.confirm() && told > last);
    assert_eq!(hang.ask(told, &LIMITS()), Stage::Hung);
    assert_eq!(hang.next(&LIMITS()), None);
}

#[test]
fn the_late_and_the_twice_heard_changes_nothing() {
    let (mut hang, last) = steady(400);
    let before = hang.clone();
    assert!(!hang.step(400, last + Span::seconds(9)));
    assert!(!hang.step(12, last + Span::seconds(9)));
    hang.active(last - Span::seconds(5));
    hang.checkpoint_over(last + Span::seconds(9));
    assert_eq!(hang, before);
    hang.stopped();
    hang.step(500, last);
    hang.active(last + Span::seconds(9));
    assert_eq!(hung_at(&hang), None, "what is stopped does not hang");
    for odd in [i64::MIN, i64::MAX] {
        hang.started(Time(odd / 4));
        hang.step(u64::MAX, Time(odd / 4));
        hang.checkpoint_begun(Time(odd / 4));
        assert!(hang.next(&LIMITS()).is_some());
    }
}

#[test]
fn whoever_looks_anew_waits_a_little_longer() {
    let mut hang = Hang::default();
    hang.resumed(Time(0));
    assert_eq!(hung_after(&hang, Time(0)), Some(300), "how long its steps take is not known");
    let (mut hang, last) = steady(400);
    hang.resumed(last);
    assert_eq!(hung_after(&hang, last), Some(300));
    let p99 = hang.p99();
    hang.step(400, last + Span::seconds(100));
    assert_eq!(hang.p99(), p99, "the time until then was no step");
}

#[test]
fn steps_may_be_counted_anew() {
    let (mut hang, last) = steady(400);
    hang.counts_anew(last + Span::seconds(1));
    assert!(hang.step(1, last + Span::seconds(2)) && hang.step(2, last + Span::seconds(3)));
    assert_eq!(hung_after(&hang, last), Some(33));
}

#[test]
fn who_has_made_the_last_step_makes_no_more() {
    let (mut hang, last) = steady(400);
    hang.finishing(last);
    assert_eq!(hung_after(&hang, last), Some(1800));
    hang.active(last + Span::minutes(10));
    assert_eq!(hung_after(&hang, last), Some(2400), "it still says something");
}

#[test]
fn what_is_doubted_is_waited_for_twice_as_long() {
    let (mut hang, last) = steady(400);
    for wait in [30, 60, 120, 240, 240] {
        assert_eq!(hung_after(&hang, last), Some(wait));
        hang.doubt();
    }
    hang.trust();
    assert_eq!(hung_after(&hang, last), Some(30));
}
