use super::*;
use crate::faults::Class;
use crate::hooks::Message;
use crate::protocol::{Channel, ChannelInput, ChannelOutput, Sign, ToAgent};
use crate::wiring::tests::spec;
use std::net::SocketAddr;

mod fence;
mod life;

fn two_ranks() -> WorkerSpec {
    WorkerSpec { ranks: 2, first_rank: 2, world_size: 4, per_gpu: true, grace_ms: 5000, ..spec() }
}

fn opened() -> Input {
    Input::Opened { port: 1, peer_port: 0, log: (0, 0) }
}

fn welcome(term: u64) -> Input {
    Input::Message(ToAgent::Welcome { term, log_have: 0, ping_ms: 0 })
}

fn start(term: u64, epoch: u32) -> Input {
    start_with(term, epoch, vec![])
}

fn start_with(term: u64, epoch: u32, peers: Vec<(u32, SocketAddr)>) -> Input {
    let (master_host, master_port, best_step) = ("h".to_owned(), 9, None);
    Input::Message(ToAgent::Start { term, epoch, master_host, master_port, best_step, peers })
}

fn stop(term: u64, grace_ms: u64) -> Input {
    Input::Message(ToAgent::Stop { term, grace_ms, reason: "preempted".into(), epoch: 0 })
}

fn exited(rank: u32, code: i32) -> Input {
    let signal = (code > 128).then_some(code - 128);
    Input::Exited { rank, exit: Exit { code, signal }, error: vec![], oom_kill: false }
}

fn swept(left: usize) -> Input {
    Input::Swept { left, unix_ms: 0, log_end: 0, port: 0 }
}

/// Outputs as short words; notes and the ship's offset are left out.
fn words(outputs: &[Output]) -> String {
    let word = |output: &Output| match output {
        Output::Send(FromAgent::Hello { epoch, up, .. }) => Some(format!("hello({epoch},{up})")),
        Output::Send(FromAgent::Event { seq, ago_ms, epoch, event }) => {
            Some(format!("{seq}:{}@{epoch}-{ago_ms}", event_word(event)))
        }
        Output::Send(FromAgent::Progress { rank, progress, .. }) => Some(format!("progress({rank},{})", progress.step)),
        Output::Send(FromAgent::Exec { id, output }) => Some(format!("exec({id},{output:?})")),
        Output::Send(FromAgent::Channel { id, output }) => Some(format!("channel({id},{output:?})")),
        Output::Open { id, rank, .. } => Some(format!("open({id},{rank})")),
        Output::Put { id, input } => Some(format!("put({id},{input:?})")),
        Output::Send(FromAgent::Sign { sign, .. }) => Some(format!("sign({sign:?})")),
        Output::Send(FromAgent::Pong { n }) => Some(format!("pong({n})")),
        Output::Ask { peers, within_ms } => Some(format!("ask({},{within_ms})", peers.len())),
        Output::Send(FromAgent::Log { .. }) => Some("log".into()),
        Output::Disconnect => Some("disconnect".into()),
        Output::Spawn(launch) => Some(format!("spawn({})", launch.epoch)),
        Output::Signal { rank, signal } => Some(format!("{signal:?}({rank})").to_lowercase()),
        Output::Sweep(signal) => {
            Some(format!("sweep({})", signal.map_or("look".into(), |s| format!("{s:?}").to_lowercase())))
        }
        Output::TellHooks(reason) => Some(format!("hooks({})", reason.as_deref().unwrap_or("-"))),
        Output::Exec { id, rank, .. } => Some(format!("run({id},{rank})")),
        Output::ExecKill(id) => Some(format!("execkill({id})")),
        Output::ExecKillAll => None,
        Output::WriteEnded(ended) => Some(format!("write({})", ended.ranks.len())),
        Output::RemoveEnded => Some("remove".into()),
        Output::Exit { clean } => Some(format!("exit({clean})")),
        Output::Note(_) | Output::ShipFrom(_) | Output::LogDurable(_) => None,
    };
    outputs.iter().filter_map(word).collect::<Vec<_>>().join(" ")
}

fn event_word(event: &Event) -> String {
    match event {
        Event::Up => "up".into(),
        Event::LaunchFailed { .. } => "launchfailed".into(),
        Event::RankExited { rank, code, stopping, .. } => {
            format!("exit({rank},{code},{})", if *stopping { "stopping" } else { "itself" })
        }
        Event::FirstStep { step } => format!("first({step})"),
        Event::CaughtUp { step } => format!("caught({step})"),
        Event::CheckpointBegun { .. }
        | Event::CheckpointGoesOn { .. }
        | Event::CheckpointComplete { .. }
        | Event::CheckpointFailed { .. } => "checkpoint".into(),
        Event::Facts { .. } => "facts".into(),
        Event::Leaving { within_ms } => format!("leaving({within_ms})"),
        Event::Ended { ended } => format!("ended({})", ended.reason.as_deref().unwrap_or("-")),
    }
}

/// A welcomed machine, fed with inputs at their times: for each, what comes out.
fn check(script: &[(u64, Input, &str)]) {
    let mut machine = Machine::new(two_ranks(), 42);
    machine.on(opened(), 0);
    machine.on(welcome(7), 0);
    run(&mut machine, script);
}

fn run(machine: &mut Machine, script: &[(u64, Input, &str)]) {
    for (now, input, expected) in script {
        assert_eq!(words(&machine.on(input.clone(), *now)), *expected, "{input:?} at {now}");
    }
}

#[test]
fn ranks_that_end_with_0_end_the_worker_when_the_last_does() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (10, exited(2, 0), "2:exit(2,0,itself)@1-0"),
        (90, exited(3, 0), "3:exit(3,0,itself)@1-0 sweep(kill)"),
        (90, swept(1), ""),
        (91, Input::Timer, ""),
        (92, Input::Timer, "sweep(kill)"),
        (92, swept(0), "write(2) 4:ended(-)@1-0"),
        (93, Input::Message(ToAgent::Release), "exit(true)"),
    ]);
}

#[test]
fn an_agent_that_is_asked_to_end_lets_the_control_plane_stop_the_gang() {
    let up = || [(0, start(7, 1), "spawn(1)"), (1, Input::Spawned, "1:up@1-0")];
    check(&[
        up()[0].clone(),
        up()[1].clone(),
        (10, Input::Terminated, "2:leaving(5000)@1-0"),
        (15, Input::Timer, ""),
        (20, stop(7, 4000), "hooks(preempted) term(2) term(3)"),
        // What the control plane did is not done again.
        (1260, Input::Timer, ""),
        (1300, exited(2, 0), "3:exit(2,0,stopping)@1-0"),
        (4020, Input::Timer, "kill(3)"),
    ]);
    let alone = "hooks(the agent was asked to end (SIGTERM)) term(2) term(3)";
    // Nobody answers: a quarter of the grace later it ends alone.
    check(&[
        up()[0].clone(),
        up()[1].clone(),
        (10, Input::Terminated, "2:leaving(5000)@1-0"),
        (1259, Input::Timer, ""),
        (1260, Input::Timer, alone),
        (6260, Input::Timer, "kill(2) kill(3)"),
    ]);
    // Nobody is there to answer, or somebody does not want to wait.
    check(&[up()[0].clone(), up()[1].clone(), (5, Input::Closed, ""), (10, Input::Terminated, alone)]);
    let mut machine = Machine::new(two_ranks(), 42);
    machine.on(opened(), 0);
    machine.on(welcome(7), 0);
    run(&mut machine, &up());
    run(&mut machine, &[(10, Input::Terminated, "2:leaving(5000)@1-0")]);
    assert_eq!(machine.next_timer(), Some(1260));
    run(&mut machine, &[(11, Input::Terminated, alone)]);
    // One that ends meanwhile has ended as it would have.
    check(&[
        up()[0].clone(),
        up()[1].clone(),
        (10, Input::Terminated, "2:leaving(5000)@1-0"),
        (20, exited(2, 0), "3:exit(2,0,itself)@1-0"),
        (30, exited(3, 0), "4:exit(3,0,itself)@1-0 sweep(kill)"),
        (31, swept(0), "write(2) 5:ended(-)@1-0"),
        (9999, Input::Timer, ""),
    ]);
}

#[test]
fn what_is_known_of_a_worker_is_reported_once_its_ranks_are_up() {
    let facts = [("aviflow.hash".to_owned(), "ab".to_owned())].into();
    let mut machine = Machine::new(WorkerSpec { facts, ..two_ranks() }, 1);
    run(
        &mut machine,
        &[
            (0, opened(), "hello(0,false)"),
            (0, welcome(7), ""),
            (0, start(7, 1), "spawn(1)"),
            (1, Input::Spawned, "1:up@1-0 2:facts@1-0"),
            (10, start(7, 2), "term(2) term(3)"),
        ],
    );
}

#[test]
fn a_failing_rank_is_reported_first_and_ends_the_others() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (10, exited(3, 1), "2:exit(3,1,itself)@1-0 term(2)"),
        (2009, Input::Timer, ""),
        (2010, Input::Timer, "kill(2)"),
        (2011, exited(2, 137), "3:exit(2,137,stopping)@1-0 sweep(kill)"),
        (2011, swept(0), "write(2) 4:ended(rank 3 ended with 1)@1-0"),
    ]);
}

#[test]
fn a_stop_leaves_the_grace_to_what_ranks_left_behind() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (100, stop(7, 1000), "hooks(preempted) term(2) term(3)"),
        (110, exited(2, 0), "2:exit(2,0,stopping)@1-0"),
        (120, exited(3, 143), "3:exit(3,143,stopping)@1-0 sweep(term)"),
        (120, swept(1), ""),
        (122, Input::Timer, "sweep(look)"),
        (122, swept(1), ""),
        (1100, Input::Timer, "sweep(kill)"),
        (1100, swept(0), "write(2) 4:ended(preempted)@1-0"),
    ]);
}

#[test]
fn a_second_stop_may_only_shorten_the_grace() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (100, stop(7, 1000), "hooks(preempted) term(2) term(3)"),
        (200, stop(7, 90_000), ""),
        (300, stop(7, 100), ""),
        (400, Input::Timer, "kill(2) kill(3)"),
        (401, stop(7, 0), ""),
    ]);
}

#[test]
fn old_terms_and_old_epochs_start_nothing() {
    check(&[
        (0, start(6, 1), ""),
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (2, start(7, 1), ""),
        (3, stop(6, 0), ""),
        (4, Input::Closed, ""),
        (4, start(8, 2), ""),
        (5, opened(), "hello(1,true)"),
        (6, welcome(6), "disconnect"),
        (6, start(7, 2), ""),
        (7, opened(), "hello(1,true)"),
        (7, welcome(8), "1:up@1-6"),
    ]);
}

#[test]
fn a_stop_before_the_first_rank_starts_none() {
    let mut machine = Machine::new(two_ranks(), 42);
    run(
        &mut machine,
        &[
            (0, opened(), "hello(0,false)"),
            (0, welcome(7), ""),
            (0, start(7, 1), "spawn(1)"),
            (5, stop(7, 1000), "hooks(preempted)"),
        ],
    );
    assert!(!machine.wants_ranks());
    let told = Input::Swept { left: 0, unix_ms: 0, log_end: 0, port: 12 };
    run(&mut machine, &[(6, Input::NotSpawned, "sweep(kill)")]);
    let out = machine.on(told, 7);
    assert_eq!(words(&out), "write(0) 1:ended(preempted)@1-0");
    // Of the port that was free then, another epoch is told.
    assert!(matches!(&out[0], Output::WriteEnded(Ended { port: 12, .. })));
    // One that was replaced by a newer one gives way to it.
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, start(7, 2), ""),
        (2, Input::NotSpawned, "sweep(kill)"),
        (3, swept(0), "spawn(2)"),
        (4, Input::Spawned, "1:up@2-0"),
        (5, Input::NotSpawned, ""),
    ]);
}

#[test]
fn signs_are_for_who_is_there() {
    let sign = |step| Sign::Collective { rank: 2, number: step };
    let noticed = |step, ago_ms| Input::Noticed { sign: sign(step), ago_ms };
    let line = |text: &str| Input::Line { rank: 2, text: text.to_owned() };
    check(&[
        (0, noticed(1, 0), "sign(Collective { rank: 2, number: 1 })"),
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (10, line("loading shard 3"), "sign(Active)"),
        (20, line("loading shard 4"), ""),
        (30, line("  "), ""),
        (1009, line("loading shard 5"), ""),
        (1010, line("step 80 val_loss 4.3"), "sign(Active) progress(2,80)"),
        (2010, line("step 81 loss 4.0"), "progress(2,81) 2:first(81)@1-0"),
        (2020, Input::Closed, ""),
        (2030, noticed(2, 0), ""),
        (3030, line("loading shard 6"), ""),
        (3040, opened(), "hello(1,true)"),
        (3050, welcome(7), "1:up@1-3049 2:first(81)@1-1040"),
    ]);
}

#[test]
fn a_newer_epoch_replaces_the_present_one_and_the_ended_one() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (10, start(7, 2), "term(2) term(3)"),
        (11, start(7, 2), ""),
        (20, exited(2, 143), "2:exit(2,143,stopping)@1-0"),
        (21, exited(3, 143), "3:exit(3,143,stopping)@1-0 sweep(term)"),
        (22, swept(0), "spawn(2)"),
        (23, Input::Spawned, "4:up@2-0"),
        (30, exited(2, 1), "5:exit(2,1,itself)@2-0 term(3)"),
        (31, exited(3, 143), "6:exit(3,143,stopping)@2-0 sweep(term)"),
        (32, swept(0), "write(2) 7:ended(rank 2 ended with 1)@2-0"),
        (40, start(7, 3), "remove spawn(3)"),
        (41, Input::SpawnFailed { reason: "no such program".into() }, "8:launchfailed@3-0 sweep(kill)"),
        (42, swept(0), "write(0) 9:ended(no such program)@3-0"),
    ]);
}

#[test]
fn a_stop_before_the_start_ends_at_once() {
    check(&[
        (0, stop(7, 1000), "hooks(preempted) sweep(kill)"),
        (0, swept(0), "write(0) 1:ended(preempted)@0-0"),
        (1, Input::Terminated, "exit(false)"),
        (2, start(7, 1), ""),
    ]);
}

#[test]
fn a_stop_cancels_a_restart() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (10, start(7, 2), "term(2) term(3)"),
        (11, stop(7, 9000), "hooks(preempted)"),
        (20, exited(2, 143), "2:exit(2,143,stopping)@1-0"),
        (21, exited(3, 143), "3:exit(3,143,stopping)@1-0 sweep(term)"),
        (22, swept(0), "write(2) 4:ended(epoch 2 begins)@1-0"),
    ]);
}

#[test]
fn an_unknown_attempt_ends_and_waits_for_nobody() {
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (2, Input::Closed, ""),
        (3, opened(), "hello(1,true)"),
        (
            3,
            Input::Message(ToAgent::Unknown { reason: "gone".into() }),
            "hooks(the control plane does not know this attempt: gone) term(2) term(3)",
        ),
        (4, exited(2, 143), ""),
        (4, exited(3, 143), "sweep(term)"),
        (5, swept(0), "write(2) exit(true)"),
    ]);
}

#[test]
fn an_ended_agent_that_is_unknown_leaves_its_log() {
    check(&[
        (0, stop(7, 0), "hooks(preempted) sweep(kill)"),
        (0, swept(0), "write(0) 1:ended(preempted)@0-0"),
        (1, Input::Message(ToAgent::Unknown { reason: "gone".into() }), "exit(false)"),
    ]);
}

#[test]
fn life_is_shown_until_the_end() {
    let mut machine = Machine::new(two_ranks(), 42);
    assert!(machine.shows_life(), "also while it waits for the word to start");
    machine.on(Input::Terminated, 0);
    assert!(machine.shows_life());
    machine.on(swept(0), 0);
    assert!(!machine.shows_life());
}

#[test]
fn commands_need_ranks() {
    let open = |id, rank| Input::Message(ToAgent::Open { id, rank, channel: Channel::Port { port: 6006 } });
    let put = |id| Input::Message(ToAgent::Put { id, input: ChannelInput::End });
    let exec = |id, rank| Input::Message(ToAgent::Exec { id, rank, argv: vec!["ls".into()], stdin: String::new() });
    check(&[
        (0, open(1, None), "channel(1,Failed(\"no rank runs here: wait until the job is Running\"))"),
        (0, exec(1, None), "exec(1,Failed(\"no rank runs here: wait until the job is Running\"))"),
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (2, exec(2, None), "run(2,2)"),
        (2, open(2, None), "open(2,2)"),
        (2, open(3, Some(9)), "channel(3,Failed(\"rank 9 is not here: this worker has 2 to 3\"))"),
        (2, put(2), "put(2,End)"),
        (2, Input::Channel { id: 2, output: ChannelOutput::End }, "channel(2,End)"),
        (2, exec(3, Some(9)), "exec(3,Failed(\"rank 9 is not here: this worker has 2 to 3\"))"),
        (3, Input::Message(ToAgent::Ping { n: 0, heard: 0 }), "pong(0)"),
    ]);
}

#[test]
fn last_lines_are_the_last_and_short() {
    let mut machine = Machine::new(two_ranks(), 1);
    machine.on(opened(), 0);
    machine.on(welcome(1), 0);
    machine.on(start(1, 1), 0);
    machine.on(Input::Spawned, 0);
    for n in 0..30 {
        machine.on(Input::Line { rank: 2, text: format!("\x1b[31mline {n}\x1b[0m {}", "é".repeat(2000)) }, 0);
    }
    let exit = Exit { code: 1, signal: None };
    let out = machine.on(Input::Exited { rank: 2, exit, error: vec!["RuntimeError: boom".into()], oom_kill: false }, 1);
    let Some(Output::Send(FromAgent::Event { event: Event::RankExited { last_lines, fault, .. }, .. })) = out.first()
    else {
        panic!("{out:?}")
    };
    assert_eq!(
        fault.as_ref().map(|fault| (fault.class, fault.line.as_str())),
        Some((Class::Exception, "RuntimeError: boom"))
    );
    assert_eq!(last_lines.len(), LAST_LINES);
    assert!(last_lines[0].starts_with("line 11 é") && last_lines[0].len() <= 1024);
    assert_eq!(last_lines[19], "RuntimeError: boom");
}

#[test]
fn progress_of_the_time_without_a_connection_is_sent_once_it_is_there() {
    let metrics = |step| Input::Hook {
        rank: 2,
        message: Message::Metrics { step, values: BTreeMap::new(), total_steps: None, tokens: None },
    };
    check(&[
        (0, start(7, 1), "spawn(1)"),
        (1, Input::Spawned, "1:up@1-0"),
        (2, Input::Message(ToAgent::Ack { seq: 1 }), ""),
        (3, Input::Closed, ""),
        (4, metrics(1), ""),
        (200, metrics(2), ""),
        (300, opened(), "hello(1,true)"),
        (310, welcome(7), "2:first(1)@1-306 progress(2,2)"),
    ]);
}

/// Time for a line on its way through the machine, as for `output`'s `cost_of_a_line`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_line_on_its_way() {
    let mut machine = Machine::new(two_ranks(), 1);
    for input in [opened(), welcome(1), start(1, 1), Input::Spawned] {
        machine.on(input, 0);
    }
    let text = "2026-02-07 10:00:00,123 - root - INFO - prefetched batch 1234 of shard 17 in 12.5 ms, 4096 tokens, ok";
    let began = std::time::Instant::now();
    for n in 0..500_000 {
        let out = machine.on(Input::Line { rank: 2, text: text.to_owned() }, n / 100);
        assert_eq!(out.is_empty(), n % 100_000 > 0, "a sign a second");
    }
    println!("{} ns a line of {} bytes", began.elapsed().as_nanos() / 500_000, text.len());
}
