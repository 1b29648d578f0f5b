//! The agent with real processes and a control plane that the test plays.

mod world;

use aviflow_agent::faults::{Class, Whose};
use aviflow_agent::protocol::channel::{Size, WINDOW};
use aviflow_agent::protocol::{
    Channel, ChannelInput, ChannelOutput, Event, ExecOutput, FromAgent, Sign, ToAgent, files,
};
use base64::Engine;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use world::{MESSY, World, gone, signal, until};

#[test]
fn ranks_that_end_with_0() {
    let mut world = World::with(
        r#"echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, $CUDA_VISIBLE_DEVICES $PYTHONUNBUFFERED"; echo oops >&2"#,
        |spec| {
            (spec.ranks, spec.first_rank, spec.world_size) = (2, 2, 4);
        },
    );
    world.up(1);
    let mut ended = Vec::new();
    for _ in 0..2 {
        let Event::RankExited { rank, code: 0, signal: None, stopping: false, last_lines, .. } = world.event() else {
            panic!()
        };
        assert!(last_lines.contains(&format!("rank {rank} of 4, local {}, 0,1 1", rank - 2)), "{last_lines:?}");
        ended.push(rank);
    }
    ended.sort_unstable();
    assert_eq!(ended, [2, 3]);
    let end = world.ended();
    assert_eq!((end.epoch, end.ranks.len(), &end.reason), (1, 2, &None));
    assert_eq!(world.lines(3, 'o'), ["rank 3 of 4, local 1, 0,1 1"]);
    assert_eq!(world.lines(2, 'e'), ["oops"]);
    assert_eq!(aviflow_agent::read_ended(world.folder.path()), Some(end));
    assert!(!aviflow_agent::left_behind(world.folder.path(), 0).is_empty());
    world.release();
}

#[test]
fn a_failing_rank_is_reported_first_and_ends_the_others() {
    let mut world = World::with(r#"if [ $RANK = 1 ]; then echo "cuda error" >&2; exit 17; fi; sleep 1000"#, |spec| {
        (spec.ranks, spec.world_size) = (2, 2);
    });
    world.up(1);
    let Event::RankExited { rank: 1, code: 17, signal: None, stopping: false, last_lines, .. } = world.event() else {
        panic!()
    };
    assert_eq!(last_lines, ["cuda error"]);
    let Event::RankExited { rank: 0, code: 143, signal: Some(15), stopping: true, .. } = world.event() else {
        panic!()
    };
    let end = world.ended();
    assert_eq!(end.reason.as_deref(), Some("rank 1 ended with 17"));
    assert_eq!((end.ranks[&1].stopping, end.ranks[&0].stopping), (false, true));
    world.release();
}

#[test]
fn what_a_rank_leaves_behind_ends_with_the_epoch() {
    // While the agent lives, nothing escapes it: it adopts what has neither mark nor session of its own.
    let mut world = World::new(&format!("{MESSY}\n(env -i setsid sleep 1000 &)"));
    world.start(1);
    let fifo = world.fifo();
    assert_eq!(world.event(), Event::Up);
    assert_eq!(world.ended().ranks[&0].code, 0);
    gone(fifo);
    world.release();
}

#[test]
fn a_stop_lets_ranks_save() {
    let mut world = World::new("trap 'echo saved > saved; exit 3' TERM; echo ready; while :; do sleep 0.02; done");
    world.up(1);
    world.log_has("ready");
    world.stop(60_000);
    let Event::RankExited { code: 3, stopping: true, .. } = world.event() else { panic!() };
    assert_eq!(world.ended().reason.as_deref(), Some("a person"));
    assert!(world.path("saved").exists());
    world.release();
}

#[test]
fn a_stop_lets_the_training_under_a_shell_save() {
    // The shell ends at SIGTERM; the training that it waits for still saves.
    let training = r#"trap "cat gate; echo saved > saved; exit 0" TERM; echo ready; while :; do sleep 0.02; done"#;
    let mut world = World::new(&format!("bash -c '{training}'; echo after"));
    assert!(Command::new("mkfifo").arg(world.path("gate")).status().unwrap().success());
    world.up(1);
    world.log_has("ready");
    world.stop(60_000);
    let Event::RankExited { signal: Some(15), stopping: true, .. } = world.event() else { panic!() };
    fs::write(world.path("gate"), "go\n").unwrap();
    world.ended();
    assert!(world.path("saved").exists());
    world.release();
}

#[test]
fn who_ignores_sigterm_gets_sigkill() {
    let mut world = World::new("trap '' TERM; echo ready; while :; do sleep 1; done");
    world.up(1);
    world.log_has("ready");
    world.stop(50);
    let Event::RankExited { code: 137, signal: Some(9), stopping: true, .. } = world.event() else { panic!() };
    world.ended();
    world.release();
}

#[test]
fn an_agent_that_is_asked_to_end_says_so_and_is_stopped_with_its_gang() {
    let mut world = World::new("echo ready; exec sleep 1000");
    world.up(1);
    world.log_has("ready");
    // It is told to the process that was started, as to process 1 of a container.
    signal(world.guardian.id(), "TERM");
    let Event::Leaving { .. } = world.event() else { panic!() };
    world.stop(60_000);
    let Event::RankExited { signal: Some(15), stopping: true, .. } = world.event() else { panic!() };
    assert_eq!(world.ended().reason.as_deref(), Some("a person"));
    world.release();
}

#[test]
fn an_agent_that_is_asked_twice_to_end_stops_its_ranks_alone() {
    let mut world = World::new("echo ready; exec sleep 1000");
    world.up(1);
    world.log_has("ready");
    signal(world.guardian.id(), "TERM");
    let Event::Leaving { .. } = world.event() else { panic!() };
    signal(world.guardian.id(), "TERM");
    let Event::RankExited { signal: Some(15), stopping: true, .. } = world.event() else { panic!() };
    let reason = world.ended().reason.unwrap();
    assert!(reason.contains("SIGTERM"), "{reason}");
    world.release();
}

#[test]
fn events_come_again_after_a_reconnection() {
    let mut world = World::new("echo ready; read < gate; exit 4");
    assert!(Command::new("mkfifo").arg(world.path("gate")).status().unwrap().success());
    world.acknowledge = false;
    world.up(1);
    world.log_has("ready");
    world.hang_up();
    fs::write(world.path("gate"), "go\n").unwrap();
    let FromAgent::Hello { epoch: 1, up: true, .. } = world.accept() else { panic!() };
    world.welcome();
    assert_eq!((world.event(), world.last_seq), (Event::Up, 1));
    world.start(1);
    let Event::RankExited { code: 4, .. } = world.event() else { panic!() };
    assert_eq!(world.last_seq, 2);
    world.ended();
    world.hang_up();
    world.accept();
    world.welcome();
    world.send(&ToAgent::Ack { seq: 2 });
    for seq in 1..=3 {
        world.event();
        assert_eq!(world.last_seq, seq);
    }
    world.release();
}

#[test]
fn the_log_has_no_gap_over_reconnections() {
    let mut world = World::new("for i in $(seq 1 20000); do echo line $i; done");
    world.up(1);
    for _ in 0..3 {
        world.log_has("line ");
        world.next();
        world.hang_up();
        world.accept();
        world.welcome();
    }
    world.ended();
    let expected: Vec<String> = (1..=20_000).map(|i| format!("line {i}")).collect();
    assert!(world.lines(0, 'o') == expected, "lines are missing or double");
    assert_eq!(world.log.len() as u64, world.log_end);
    world.release();
}

#[test]
fn the_oldest_log_goes_when_too_much_waits() {
    let mut world =
        World::with("read < gate; seq -f 'a line with the number %.0f' 1 100000", |spec| spec.log_buffer = 1 << 20);
    assert!(Command::new("mkfifo").arg(world.path("gate")).status().unwrap().success());
    world.up(1);
    world.hang_up();
    fs::write(world.path("gate"), "go\n").unwrap();
    until(|| world.path(files::ENDED).exists());
    // The agent greeted the closed socket's next connection long before its end.
    world.accept();
    world.hang_up();
    let FromAgent::Hello { log: (first, last), .. } = world.accept() else { panic!() };
    assert!(first > 0 && last - first <= (1 << 20) + (256 << 10), "{first} {last}");
    world.welcome();
    world.ended();
    assert!(world.log.contains("bytes of the oldest log were dropped"));
    assert_eq!(world.lines(0, 'o').last(), Some(&"a line with the number 100000"));
    assert_eq!(world.log_end, last);
    world.release();
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let mut world = World::with("", |spec| spec.run = vec!["torchrum".into(), "train.py".into()]);
    world.start(1);
    let Event::LaunchFailed { reason } = world.event() else { panic!() };
    assert!(
        reason.starts_with("there is no program `torchrum` on the PATH") && reason.contains("check `run`"),
        "{reason}"
    );
    assert_eq!(world.ended().reason, Some(reason));
    world.release();
}

#[test]
fn commands_run_with_a_rank_s_variables() {
    let mut world = World::with("echo ready; sleep 1000", |spec| (spec.ranks, spec.world_size) = (2, 2));
    world.up(1);
    world.log_has("ready");
    let exec = |id, script: &str| ToAgent::Exec {
        id,
        rank: Some(1),
        argv: vec!["bash".into(), "-c".into(), script.into()],
        stdin: base64::engine::general_purpose::STANDARD.encode("some input\n".repeat(20_000)),
    };
    world.send(&exec(1, "echo $RANK $AVIFLOW_JOB; wc -l; echo err >&2; exit 5"));
    let mut said = BTreeMap::<&str, String>::new();
    loop {
        let FromAgent::Exec { id: 1, output } = world.next().unwrap() else { continue };
        let (name, text) = match output {
            ExecOutput::Stdout(text) => ("out", text),
            ExecOutput::Stderr(text) => ("err", text),
            ExecOutput::Exit(code) => break assert_eq!(code, 5),
            ExecOutput::Failed(reason) => panic!("{reason}"),
        };
        let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
        *said.entry(name).or_default() += &String::from_utf8(bytes).unwrap();
    }
    assert_eq!((said["out"].as_str(), said["err"].as_str()), ("1 default/test\n20000\n", "err\n"));
    world.send(&exec(2, "echo up; sleep 1000"));
    until(|| matches!(world.next(), Some(FromAgent::Exec { id: 2, .. })));
    world.send(&ToAgent::ExecKill { id: 2 });
    until(|| matches!(world.next(), Some(FromAgent::Exec { id: 2, output: ExecOutput::Exit(137) })));
    world.send(&exec(3, "exec 9>$FIFO; echo up; sleep 1000"));
    let fifo = world.fifo();
    world.stop(0);
    world.ended();
    gone(fifo);
    world.release();
}

#[test]
fn busy_channels_do_not_keep_the_log_out() {
    let mut world = World::new("echo ready; cat gate; echo after; exec sleep 1000");
    assert!(Command::new("mkfifo").arg(world.path("gate")).status().unwrap().success());
    world.up(1);
    world.log_has("ready");
    for id in 1..=12 {
        let size = Size { columns: 80, rows: 24 };
        let channel = Channel::Terminal { argv: vec!["yes".into()], size, term: None };
        world.send(&ToAgent::Open { id, rank: None, channel });
    }
    // Reads a message, and gives room for what was in it.
    let read = |world: &mut World| {
        let message = world.next().expect("a message");
        if let FromAgent::Channel { id, output: ChannelOutput::Data(text) } = message {
            let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap().len();
            world.send(&ToAgent::Put { id, input: ChannelInput::Room(bytes) });
            return bytes;
        }
        0
    };
    let mut bytes = 0;
    while bytes < 12 * WINDOW {
        bytes += read(&mut world);
    }
    fs::write(world.path("gate"), "go\n").unwrap();
    let spooled = |world: &World| {
        let files = fs::read_dir(world.path(files::LOG)).unwrap().flatten();
        files.map(|file| fs::read_to_string(file.path()).unwrap_or_default()).any(|text| text.contains("after"))
    };
    until(|| spooled(&world));
    let mut bytes = 0;
    while !world.log.contains("after") {
        bytes += read(&mut world);
        assert!(bytes < 100 * WINDOW, "the log is never shipped");
    }
    world.stop(0);
    while !matches!(world.next(), Some(FromAgent::Event { event: Event::Ended { .. }, .. })) {}
}

#[test]
fn hooks_become_events_and_hear_of_a_stop() {
    let mut world = World::new("echo ready; sleep 1000");
    world.up(1);
    world.log_has("ready");
    let mut hook = UnixStream::connect(world.path(files::HOOKS)).unwrap();
    hook.write_all(
        br#"{"type":"hello","pid":1,"rank":0}
{"type":"metrics","step":1,"values":{"loss":2.5},"total_steps":10,"tokens":null}
nonsense
{"type":"metrics","step":2,"values":{"loss":"NaN"},"total_steps":10,"tokens":null}
{"type":"checkpoint","phase":"complete","step":2,"path":"/c/2"}
{"type":"data","name":"corpus","sha256":"ab","bytes":1}
"#,
    )
    .unwrap();
    assert_eq!(world.event(), Event::FirstStep { step: 1 });
    assert_eq!(world.event(), Event::CaughtUp { step: 2 });
    assert_eq!(world.event(), Event::CheckpointComplete { step: 2, path: "/c/2".into() });
    assert_eq!(world.event(), Event::Facts { values: [("data.corpus".to_owned(), "ab".to_owned())].into() });
    world.stop(60_000);
    let mut line = String::new();
    BufReader::new(hook).read_line(&mut line).unwrap();
    assert_eq!(line, "{\"reason\":\"a person\",\"stop\":true}\n");
    assert_eq!(world.ended().last_step, Some(2));
    world.release();
}

#[test]
fn output_becomes_progress() {
    let mut world = World::new("echo 'step 3/10 loss 2.5'; sleep 1000");
    world.start(1);
    let progress = loop {
        if let FromAgent::Progress { progress, .. } = world.next().unwrap() {
            break progress;
        }
    };
    assert_eq!((progress.step, progress.total_steps), (3, Some(10)));
    world.stop(60_000);
    assert_eq!(world.ended().last_step, Some(3));
    world.release();
}

#[test]
fn checkpoints_and_event_files_are_found_without_hooks() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    fs::create_dir_all(checkpoints.join("step-1")).unwrap();
    fs::write(checkpoints.join("step-1/.metadata"), "pickle.").unwrap();
    // As torch.distributed.checkpoint saves at the very end, and once more after it was asked to stop.
    let script = r#"
        save() { mkdir $C/step-$1; echo weights > $C/step-$1/__0_0.distcp; echo -n pickle. > $C/step-$1/.metadata.tmp
                 mv $C/step-$1/.metadata.tmp $C/step-$1/.metadata; }
        trap 'save 3; exit 0' TERM
        save 2; echo ready; while :; do sleep 0.02; done"#;
    let mut world = World::with(script, |spec| {
        spec.worker = 0;
        spec.workers = 1;
        for name in ["AVIFLOW_CHECKPOINT_DIR", "C"] {
            spec.env.insert(name.into(), checkpoints.display().to_string());
        }
    });
    world.up(1);
    world.log_has("ready");
    world.stop(60_000);
    let mut complete = Vec::new();
    loop {
        match world.event() {
            Event::CheckpointComplete { step, path } => {
                assert_eq!(path, checkpoints.join(format!("step-{step}")).display().to_string());
                complete.push(step);
            }
            Event::Ended { .. } => break,
            _ => {}
        }
    }
    assert_eq!(complete, [2, 3]);
    world.release();
}

#[test]
fn a_fault_is_told_with_the_end() {
    let mut world =
        World::new("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1");
    world.up(1);
    let Event::RankExited { fault: Some(fault), .. } = world.event() else { panic!() };
    assert_eq!((fault.class, fault.whose), (Class::GpuOutOfMemory, Some(Whose::Application)));
    assert_eq!(world.ended().ranks[&0].fault, Some(fault));
    world.release();
}

#[test]
fn a_newer_epoch_starts_in_place() {
    let mut world = World::new("echo epoch $AVIFLOW_EPOCH; [ $AVIFLOW_EPOCH = 3 ] || sleep 1000");
    world.up(1);
    world.log_has("epoch 1");
    world.start(2);
    let Event::RankExited { stopping: true, .. } = world.event() else { panic!() };
    assert_eq!(world.event(), Event::Up);
    world.log_has("epoch 2");
    world.stop(60_000);
    assert_eq!(world.ended().epoch, 2);
    // Also after its end, as long as it was not released.
    world.up(3);
    let end = world.ended();
    assert_eq!((end.epoch, end.ranks[&0].code), (3, 0));
    world.release();
}

#[test]
fn a_stop_right_after_the_start_starts_no_rank() {
    let mut world = World::new("touch ran; exec sleep 1000");
    let (master_host, master_port, best_step, peers) = ("127.0.0.1".into(), 20_000, None, vec![]);
    let start = ToAgent::Start { term: 1, epoch: 1, master_host, master_port, best_step, peers };
    let stop = ToAgent::Stop { term: 1, grace_ms: 60_000, reason: "a person".into(), epoch: 0 };
    world.send_all(&[start, stop]);
    let Event::Ended { ended } = world.event() else { panic!("nothing was up") };
    assert_eq!((ended.epoch, ended.ranks.len(), ended.reason.as_deref()), (1, 0, Some("a person")));
    assert!(!world.path("ran").exists());
    world.release();
}

#[test]
fn another_epoch_gets_a_port_that_the_one_before_never_had() {
    let mut world = World::new("true");
    let first = world.port;
    world.up(1);
    let second = world.ended().port;
    assert!(first != 0 && second != 0 && first != second, "{first} and {second}");
    assert!(std::net::TcpListener::bind(("0.0.0.0", second)).is_err(), "it is kept for rank 0");
    world.start(2);
    assert_eq!(world.event(), Event::Up);
    let third = world.ended().port;
    assert!(third != 0 && third != second, "{third}");
    world.release();
}

#[test]
fn what_is_noticed_is_said() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/aviflow/src");
    let script = format!(
        "PYTHONPATH={} python3 -c 'import aviflow; aviflow.role(3); aviflow.collective(5)'; echo loading; exec sleep 1000",
        python.display()
    );
    let launch = |folder: &Path| {
        fs::write(folder.join("kmsg"), "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, old\n").unwrap();
        let mut agent = Command::new(world::agent());
        agent.arg(folder).env("AVIFLOW_KMSG", folder.join("kmsg")).env("AVIFLOW_INFINIBAND", folder.join("nowhere"));
        agent.spawn().expect("the agent")
    };
    let mut world = World::launched_by(&script, |_| {}, launch);
    world.up(1);
    assert_eq!(world.sign(), Sign::Role { rank: 0, role: 3 });
    assert_eq!(world.sign(), Sign::Collective { rank: 0, number: 5 });
    while !matches!(world.next(), Some(FromAgent::Sign { sign: Sign::Active, epoch: 1, .. })) {}
    let mut log = fs::File::options().append(true).open(world.path("kmsg")).unwrap();
    log.write_all(b"4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n").unwrap();
    assert!(matches!(world.sign(), Sign::Xid { number: 79, .. }));
    world.stop(0);
    world.ended();
    world.release();
}

#[test]
fn an_unknown_attempt_is_ended_and_removed() {
    // What ignores SIGTERM has the whole grace, if it was quick enough to say so.
    let mut world = World::with(&format!("{MESSY}\nsleep 1000"), |spec| spec.grace_ms = 100);
    world.up(1);
    let fifo = world.fifo();
    world.send(&ToAgent::Unknown { reason: "deleted".into() });
    gone(fifo);
    assert!(world.guardian.wait().unwrap().success());
    assert!(!world.path(files::LOG).exists());
}

#[test]
fn a_stop_before_the_start_ends_without_a_rank() {
    let mut world = World::new("touch started");
    world.stop(60_000);
    let end = world.ended();
    assert_eq!((end.epoch, end.ranks.len()), (0, 0));
    assert!(!world.path("started").exists());
    world.release();
}
