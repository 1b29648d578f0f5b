use super::*;
use crate::health::fault::FAULTS;

const NODE: NodeId = NodeId(7);

fn all() -> &'static Settings {
    static ALL: Settings = Settings::all();
    &ALL
}

fn place() -> Place {
    Place { rank: Some(3), node: Some(NODE), gpu: None }
}

fn situation(kind: Kind, past: &Past) -> Situation<'_> {
    Situation { kind, asks: None, place: place(), agents: true, words: false, retry_left: true, past, settings: all() }
}

/// The same fault again and again, without a checkpoint in between; what is done each time.
fn again(n: u32, change: impl Fn(u32, &mut Situation<'_>)) -> Vec<Action> {
    let mut past = Past::default();
    let mut actions = Vec::new();
    for i in 0..n {
        let before = past.clone();
        let mut now = situation(Kind::Exit, &before);
        change(i, &mut now);
        let decision = decide(&now);
        past.note(&decision, Time(i64::from(i)));
        actions.push(decision.action);
    }
    actions
}

use Action::{Drain, Nothing, Replace, ResetGpu, RestartGang, RestartInPlace, Stop};

#[test]
fn an_application_that_fails_is_run_again_and_then_stopped() {
    assert_eq!(again(3, |_, _| {}), [RestartInPlace, RestartGang, Stop]);
    assert_eq!(again(2, |_, s| s.agents = false), [RestartGang, RestartGang]);
    assert_eq!(again(1, |_, s| s.retry_left = false), [Stop]);
    let off = Settings { off: [Kind::CrashLoop].into(), ..Settings::default() };
    let past = Past { failures: 5, ..Past::default() };
    let on = Situation { settings: &off, ..situation(Kind::Exit, &past) };
    assert_eq!(decide(&on).action, RestartGang, "as long as retries are left");
    let mixed = again(3, |i, s| s.kind = [Kind::GpuOutOfMemory, Kind::Exit, Kind::HostOutOfMemory][i as usize]);
    assert_eq!(mixed, [RestartInPlace, RestartGang, Stop]);
}

#[test]
fn a_new_checkpoint_is_progress() {
    let mut past = Past::default();
    for i in 0..20 {
        let before = past.clone();
        let now = situation(if i % 2 == 0 { Kind::Exit } else { Kind::Hang }, &before);
        let decision = decide(&now);
        assert_eq!(decision.action, RestartInPlace, "failure {i}");
        past.note(&decision, Time(i));
        past.checkpoint();
    }
}

#[test]
fn what_nobody_is_to_blame_for_changes_more_each_time() {
    let other = |i: u32, s: &mut Situation<'_>| {
        s.kind = Kind::Hang;
        s.retry_left = false;
        s.place.node = Some(NodeId(i));
    };
    assert_eq!(again(4, other), [RestartInPlace, RestartGang, Replace { node: Some(NodeId(2)) }, Stop]);
    let unnamed = |_: u32, s: &mut Situation<'_>| {
        s.kind = Kind::NcclTimeout;
        s.place = Place::default();
    };
    assert_eq!(again(4, unnamed), [RestartInPlace, RestartGang, Replace { node: None }, Stop]);
    let same = again(2, |_, s| s.kind = Kind::Cuda);
    assert_eq!(same, [RestartInPlace, Replace { node: Some(NODE) }], "the same node stands out again");
}

#[test]
fn an_application_s_fault_never_blames_a_machine() {
    let mut past = Past::default();
    for fault in FAULTS.iter().filter(|f| f.blame == Blame::Application) {
        for failures in 0..4 {
            past.failures = failures;
            for asks in [None, Some(Asks::RestartApplication), Some(Asks::Watch), Some(Asks::Companion)] {
                let decision = decide(&Situation { asks, ..situation(fault.kind, &past) });
                assert_eq!(decision.blame, Blame::Application, "{}", fault.name);
                let moves = matches!(decision.action, Replace { .. } | ResetGpu { .. } | Drain { .. });
                assert!(!moves, "{}: {decision:?}", fault.name);
            }
        }
    }
}

#[test]
fn only_the_application_spends_retries() {
    let past = Past::default();
    for fault in &FAULTS {
        let decision = decide(&situation(fault.kind, &past));
        let restarts = fault.remedy == Remedy::Restart;
        assert_eq!(decision.charged, restarts && fault.blame == Blame::Application, "{}", fault.name);
        let without = decide(&Situation { retry_left: false, ..situation(fault.kind, &past) });
        assert_eq!(without.action == decision.action, !decision.charged, "{}", fault.name);
    }
}

#[test]
fn machines_are_left_out() {
    let past = Past::default();
    let of = |kind, asks| {
        let mut s = situation(kind, &past);
        s.asks = asks;
        s.place.gpu = Some(5);
        (decide(&s).action, decide(&s).blame)
    };
    assert_eq!(of(Kind::NodeLost, None), (Replace { node: Some(NODE) }, Blame::Node));
    assert_eq!(of(Kind::LinkDown, None), (Drain { node: NODE }, Blame::Network));
    assert_eq!(of(Kind::DeviceUnhealthy, None), (Drain { node: NODE }, Blame::Gpu));
    let reset = ResetGpu { node: NODE, gpu: Some(5) };
    assert_eq!(of(Kind::Xid, Some(Asks::ResetGpu)), (reset.clone(), Blame::Gpu));
    assert_eq!(of(Kind::Cuda, Some(Asks::ResetGpu)), (reset.clone(), Blame::Gpu), "the driver explains the error");
    assert_eq!(of(Kind::Exit, Some(Asks::ResetGpu)), (reset, Blame::Gpu));
    for asks in [Asks::Cordon, Asks::RestartNode, Asks::Support] {
        assert_eq!(of(Kind::Xid, Some(asks)), (Drain { node: NODE }, Blame::Node));
    }
    assert_eq!(of(Kind::Xid, Some(Asks::Watch)), (Nothing, Blame::Unknown));
    assert_eq!(of(Kind::Xid, None), (Nothing, Blame::Unknown));
    assert_eq!(of(Kind::Xid, Some(Asks::RestartApplication)), (RestartInPlace, Blame::Application));
    assert_eq!(of(Kind::Cuda, Some(Asks::RestartApplication)), (RestartInPlace, Blame::Application));
}

#[test]
fn what_only_slows_stops_nothing_and_what_cannot_help_is_not_tried() {
    let past = Past::default();
    for kind in [Kind::Straggler, Kind::LossSpike] {
        assert_eq!(decide(&situation(kind, &past)).action, Nothing);
    }
    for kind in [Kind::DiskFull, Kind::NotANumber, Kind::CrashLoop] {
        assert_eq!(decide(&situation(kind, &past)).action, Stop);
    }
}

#[test]
fn a_decision_can_be_stored() {
    for action in [Nothing, Replace { node: None }, ResetGpu { node: NODE, gpu: Some(2) }, Stop] {
        let decision = Decision { action, ..decide(&situation(Kind::Exit, &Past::default())) };
        let text = serde_json::to_string(&decision).expect("writes");
        assert_eq!(serde_json::from_str::<Decision>(&text).expect("reads"), decision, "{text}");
    }
}

#[test]
fn a_decision_says_why() {
    let mut past = Past::default();
    let first = situation(Kind::GpuOutOfMemory, &past);
    let decision = decide(&first);
    assert_eq!(decision.reason, "the ranks start again where they are");
    assert_eq!(decision.next, "take a smaller micro-batch, more recomputation or more sharding");
    let mut after = past.clone();
    after.note(&decision, Time(0));
    after.note(&decision, Time(60_000));
    past = after;
    let last = decide(&situation(Kind::Exit, &past));
    assert_eq!(last.reason, "failed 3 times in a row without a new complete checkpoint, it stops");
    assert_eq!(
        past.summary(Time(90_000)),
        "GPU out of memory of rank 3 1m 30s ago, GPU out of memory of rank 3 30s ago"
    );
    let xid = Situation {
        asks: Some(Asks::RestartNode),
        place: Place { rank: None, gpu: Some(2), ..place() },
        ..situation(Kind::Xid, &past)
    };
    assert_eq!(
        decide(&xid).reason,
        "its node takes nothing new until it was checked, and is left out of the next attempt \
         (drain the node and restart the machine)"
    );
}

#[test]
fn the_past_is_bounded_and_survives() {
    let mut past = Past::default();
    for i in 0..10_000 {
        let before = past.clone();
        let mut now = situation(Kind::Hang, &before);
        now.place.node = Some(NodeId(i));
        let decision = decide(&now);
        past.note(&decision, Time(i64::from(i)));
    }
    assert!(past.faults.len() <= KEPT && past.suspects.len() <= KEPT);
    let text = serde_json::to_string(&past).expect("writes");
    assert_eq!(serde_json::from_str::<Past>(&text).expect("reads"), past);
    assert_eq!(serde_json::from_str::<Past>("{}").expect("reads"), Past::default());
}
