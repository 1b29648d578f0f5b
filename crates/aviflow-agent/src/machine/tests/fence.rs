//! When ranks stop because nobody is reached, and when they do not.

use super::*;

/// In milliseconds; a round of questions each 10 s, the first 15 s after the loss.
const AFTER: u64 = 120_000;

fn peer(worker: u32) -> (u32, SocketAddr) {
    (worker, SocketAddr::from(([10, 0, 0, 1], 4000 + u16::try_from(worker).expect("small"))))
}

fn gang() -> WorkerSpec {
    WorkerSpec { fence_after_ms: Some(AFTER), workers: 3, ..two_ranks() }
}

fn welcome_pinged() -> Input {
    Input::Message(ToAgent::Welcome { term: 7, log_have: 0, ping_ms: 5000 })
}

fn ping(n: u64, heard: u64) -> Input {
    Input::Message(ToAgent::Ping { n, heard })
}

fn all() -> Input {
    Input::Asked { missing: None }
}

fn missing() -> Input {
    Input::Asked { missing: Some("worker 2 is away".into()) }
}

const FENCED: &str = "fenced: neither the control plane nor all peers were reached for 120 s";

/// A machine whose ranks run since 10 ms, and whose hello was sent at 0.
fn running(spec: WorkerSpec) -> Machine {
    let mut machine = Machine::new(spec, 42);
    run(
        &mut machine,
        &[
            (0, opened(), "hello(0,false)"),
            (5, welcome_pinged(), ""),
            (5, ping(1, 0), "pong(1)"),
            (5, start_with(7, 1, (0..3).map(peer).collect()), "spawn(1)"),
            (10, Input::Spawned, "1:up@1-0"),
            (10, Input::Message(ToAgent::Ack { seq: 1 }), ""),
        ],
    );
    machine
}

/// Lets a time pass, with a timer whenever one is due and an answer to every question; gives all that came out.
fn pass(machine: &mut Machine, from: u64, to: u64, answer: &Input) -> Vec<(u64, String)> {
    let mut said = Vec::new();
    let mut now = from;
    loop {
        let Some(at) = machine.next_timer().map(|at| at.max(now)).filter(|at| *at <= to) else { return said };
        now = at;
        let mut out = words(&machine.on(Input::Timer, now));
        if out.starts_with("ask(") {
            now += 100;
            out = words(&machine.on(answer.clone(), now));
        }
        if !out.is_empty() {
            said.push((now, out));
        }
    }
}

#[test]
fn a_gang_without_its_control_plane_goes_on_for_hours() {
    let mut machine = running(gang());
    machine.on(Input::Closed, 1000);
    let day = 24 * 3_600_000;
    assert_eq!(pass(&mut machine, 1000, day, &all()), []);
    // A day later a peer goes away: the last whole round counts from its beginning.
    let said = pass(&mut machine, day, 2 * day, &missing());
    let [(at, out), (killed, kill)] = &said[..] else { panic!("{said:?}") };
    assert_eq!((*killed, kill.as_str()), (at + BROKEN_GRACE_MS, "kill(2) kill(3)"));
    assert!(*at > day + AFTER - 10_100 && *at <= day + AFTER, "{at}");
    assert_eq!(out, &format!("hooks({FENCED} (worker 2 is away)) term(2) term(3)"));
}

#[test]
fn questions_are_asked_of_all_others_and_one_round_at_a_time() {
    let mut machine = running(gang());
    machine.on(Input::Closed, 1000);
    assert_eq!(machine.next_timer(), Some(16_000), "most control planes are back sooner");
    let out = machine.on(Input::Timer, 16_000);
    assert_eq!(out, [Output::Ask { peers: vec![peer(0), peer(2)], within_ms: 5000 }]);
    run(&mut machine, &[(26_000, Input::Timer, ""), (27_000, all(), "ask(2,5000)"), (27_001, all(), "")]);
    // The second began at 27 s, whenever it ended.
    assert_eq!(machine.fence_at(), Some(27_000 + AFTER));
}

#[test]
fn without_anybody_ranks_stop_once_and_on_time() {
    // Of the pong at 5 it is not known that it arrived: the hello is the last that is proven.
    let mut machine = running(gang());
    machine.on(Input::Closed, 1000);
    assert_eq!(pass(&mut machine, 1000, AFTER - 1, &missing()), []);
    let out = words(&machine.on(Input::Timer, AFTER));
    assert_eq!(out, format!("hooks({FENCED} (worker 2 is away)) term(2) term(3)"));
    run(
        &mut machine,
        &[
            (AFTER + 1999, Input::Timer, ""),
            (AFTER + 2000, Input::Timer, "kill(2) kill(3)"),
            (AFTER + 2001, exited(2, 137), ""),
            (AFTER + 2001, exited(3, 137), "sweep(kill)"),
        ],
    );
    let out = machine.on(swept(0), AFTER + 2002);
    let Some(Output::WriteEnded(ended)) = out.first() else { panic!("{out:?}") };
    assert!(ended.reason.as_deref().is_some_and(|reason| reason.starts_with(FENCED)), "{ended:?}");
    assert_eq!(machine.next_timer(), None, "nobody needs to be asked any more");
    // The control plane comes back: it learns of the end, and lets the agent go.
    let again = AFTER + 9000;
    machine.on(opened(), again);
    let out = words(&machine.on(welcome_pinged(), again));
    assert!(out.starts_with("2:exit(2,137,stopping)") && out.contains("4:ended(fenced: "), "{out}");
    run(&mut machine, &[(again, Input::Message(ToAgent::Release), "exit(true)")]);
}

#[test]
fn a_control_plane_that_is_back_in_time_sets_the_clock_back() {
    let mut machine = running(gang());
    machine.on(Input::Closed, 1000);
    assert_eq!(pass(&mut machine, 1000, 100_000, &missing()), []);
    run(&mut machine, &[(100_000, opened(), "hello(1,true)"), (101_000, welcome_pinged(), "")]);
    assert_eq!(machine.fence_at(), Some(100_000 + AFTER), "from the hello that was answered");
    // Pongs count once they are known to have arrived, from when they were sent.
    run(&mut machine, &[(101_000, ping(1, 0), "pong(1)"), (106_000, ping(2, 1), "pong(2)")]);
    assert_eq!(machine.fence_at(), Some(101_000 + AFTER));
    run(&mut machine, &[(111_000, ping(3, 1), "pong(3)")]);
    assert_eq!(machine.fence_at(), Some(101_000 + AFTER), "it hears, and is not heard");
    run(&mut machine, &[(116_000, ping(4, 3), "pong(4)")]);
    assert_eq!(machine.fence_at(), Some(111_000 + AFTER));
}

#[test]
fn a_connection_that_falls_silent_is_closed_where_pings_were_promised() {
    let mut machine = running(gang());
    assert_eq!(machine.next_timer(), Some(10 + 15_000));
    run(&mut machine, &[(15_010, Input::Timer, "disconnect"), (15_010, Input::Closed, "")]);
    assert!(!machine.is_welcomed());
    // One that promises none is left open, and is in touch while it is.
    let mut machine = running(gang());
    run(
        &mut machine,
        &[
            (20, Input::Closed, ""),
            (30, opened(), "hello(1,true)"),
            (40, welcome(7), ""),
            (10 * AFTER, Input::Timer, ""),
            (10 * AFTER, Input::Message(ToAgent::Ping { n: 0, heard: 0 }), "pong(0)"),
            (10 * AFTER + 10, Input::Closed, ""),
        ],
    );
    assert_eq!(machine.fence_at(), Some(11 * AFTER + 10));
}

#[test]
fn a_gang_of_one_and_one_without_a_limit_never_stop() {
    let one = WorkerSpec { workers: 1, worker: 0, ..gang() };
    for spec in [one, WorkerSpec { fence_after_ms: None, ..gang() }] {
        let mut machine = running(spec);
        machine.on(Input::Closed, 1000);
        assert_eq!(pass(&mut machine, 1000, 100 * AFTER, &missing()), []);
        assert_eq!(words(&machine.on(Input::Timer, 100 * AFTER)), "");
    }
}

#[test]
fn where_not_all_peers_are_known_nobody_is_asked() {
    let mut machine = Machine::new(gang(), 42);
    machine.on(opened(), 0);
    machine.on(welcome_pinged(), 0);
    machine.on(start_with(7, 1, vec![peer(0), peer(1)]), 0);
    machine.on(Input::Spawned, 0);
    machine.on(Input::Closed, 0);
    let said = pass(&mut machine, 0, AFTER, &all());
    assert_eq!(said, [(AFTER, format!("hooks({FENCED} (not all peers are known)) term(2) term(3)"))]);
    // A word that is said again may name those that were not known.
    let mut machine = running(gang());
    machine.fence.add(vec![]);
    assert!(machine.fence.ask_at().is_some());
}

#[test]
fn after_a_sleep_ranks_stop_before_anything_else_is_taken_up() {
    // All of this waited in the socket meanwhile.
    for waited in [ping(2, 1), start_with(7, 2, vec![]), all(), Input::Closed, Input::Timer] {
        let mut machine = running(gang());
        let out = words(&machine.on(waited.clone(), 500_000));
        assert!(out.starts_with("hooks(fenced: ") && out.contains("term(2) term(3)"), "{waited:?}: {out}");
        assert!(!out.contains("spawn"), "{out}");
    }
}

#[test]
fn an_old_word_to_start_starts_nothing() {
    let mut machine = Machine::new(gang(), 42);
    let peers = || (0..3).map(peer).collect();
    run(
        &mut machine,
        &[
            (0, opened(), "hello(0,false)"),
            (5, welcome_pinged(), ""),
            (AFTER, start_with(7, 1, peers()), "disconnect"),
            (AFTER, Input::Closed, ""),
            (AFTER + 50, opened(), "hello(0,false)"),
            (AFTER + 60, welcome_pinged(), ""),
            (AFTER + 60, start_with(7, 1, peers()), "spawn(1)"),
        ],
    );
}

#[test]
fn a_stop_that_is_under_way_is_shortened_and_a_fenced_worker_may_start_again() {
    let mut machine = running(gang());
    machine.on(Input::Closed, 1000);
    machine.on(opened(), 90_000);
    machine.on(welcome(7), 90_000);
    run(&mut machine, &[(100_000, stop(7, 600_000), "hooks(preempted) term(2) term(3)"), (100_001, Input::Closed, "")]);
    assert_eq!(machine.fence_at(), Some(100_001 + AFTER));
    let at = 100_001 + AFTER;
    run(&mut machine, &[(at, Input::Timer, ""), (at + 2000, Input::Timer, "kill(2) kill(3)")]);
    run(&mut machine, &[(at + 2001, exited(2, 137), "")]);
    machine.on(exited(3, 137), at + 2001);
    machine.on(swept(0), at + 2001);
    // What the control plane says after the end counts, as ever.
    machine.on(opened(), at + 5000);
    machine.on(welcome_pinged(), at + 5000);
    let out = words(&machine.on(start_with(7, 2, vec![]), at + 5000));
    assert_eq!(out, "remove hooks(-) spawn(2)");
    assert_eq!(machine.fence_at(), Some(at + 5000 + AFTER));
}

#[test]
fn a_restart_that_was_to_follow_does_not() {
    let mut machine = running(gang());
    run(
        &mut machine,
        &[(20, start_with(7, 2, vec![]), "term(2) term(3)"), (30, Input::Closed, ""), (40, exited(2, 143), "")],
    );
    // What the first epoch left behind does not end; meanwhile the time is over.
    assert_eq!(words(&machine.on(exited(3, 143), 41)), "sweep(term)");
    machine.on(swept(1), 41);
    machine.on(Input::Timer, AFTER);
    let out = words(&machine.on(swept(0), AFTER + 10));
    assert!(out.starts_with("write(2)"), "{out}");
}

#[test]
fn a_refusal_is_no_sign_of_life_and_noted_once() {
    let refused = || Input::Message(ToAgent::Refused { reason: "another version".into() });
    let fenced_at = |refuse: bool| {
        let mut machine = running(gang());
        machine.on(Input::Closed, 1000);
        machine.on(opened(), 2000);
        if refuse {
            for (at, notes) in [(3000, 1), (10_000, 0)] {
                let out = machine.on(refused(), at);
                assert!(!machine.is_welcomed());
                assert!(out.iter().all(|o| matches!(o, Output::Note(_))), "it goes on as it is: {out:?}");
                assert_eq!(out.len(), notes, "{out:?}");
            }
        }
        let said = pass(&mut machine, 10_000, 10 * AFTER, &missing());
        said.iter().find(|(_, out)| out.contains("fenced")).map(|(at, _)| *at)
    };
    assert!(fenced_at(false).is_some());
    assert_eq!(fenced_at(true), fenced_at(false));
}

#[test]
fn ranks_that_come_up_after_the_end_of_their_time_are_killed_by_its_grace() {
    let mut machine = Machine::new(gang(), 42);
    run(
        &mut machine,
        &[
            (0, opened(), "hello(0,false)"),
            (5, welcome_pinged(), ""),
            (5, start_with(7, 1, (0..3).map(peer).collect()), "spawn(1)"),
            (10, Input::Closed, ""),
        ],
    );
    let said = pass(&mut machine, 10, 2 * AFTER, &missing());
    let (at, _) = said.iter().find(|(_, out)| out.contains("fenced")).expect("it is fenced while it starts");
    let up = machine.on(Input::Spawned, at + 1500);
    assert!(words(&up).contains("term(2) term(3)"), "{up:?}");
    let said = pass(&mut machine, at + 1500, at + 2 * BROKEN_GRACE_MS, &missing());
    assert_eq!(said, [(at + BROKEN_GRACE_MS, "kill(2) kill(3)".to_owned())]);
}
