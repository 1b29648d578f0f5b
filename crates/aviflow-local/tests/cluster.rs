//! The body with agents whose words are the test's.

mod common;

use aviflow_agent::protocol::{Ended, Event, ExecOutput, FromAgent, ToAgent, files};
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::ports::{Observation, Order, WorkerEvent};
use aviflow_engine::telemetry::StreamKey;
use aviflow_local::{LocalCluster, LocalError};
use common::{Agent, Body, config, holders_of, kill, record, record_with, wait_until};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const JOB: JobId = JobId(7);
const KEY: StreamKey = StreamKey { job: JOB, attempt: 1, worker: 0 };

fn body(home: &Path) -> Body {
    let mut body = Body::start(config(home), 1);
    body.reconcile(&[]);
    body
}

fn ended(log_end: u64) -> Ended {
    Ended { epoch: 1, at_unix_ms: 0, ranks: BTreeMap::new(), reason: None, last_step: Some(9), log_end, port: 0 }
}

/// The agents of a worker and what they started: whoever inherited its lock.
fn marked(folder: &Path) -> Vec<i32> {
    holders_of(&folder.join(files::LOCK))
}

fn agent_pid(folder: &Path) -> i32 {
    wait_until("the agent runs", || folder.join(files::ALIVE).exists());
    marked(folder)[0]
}

#[test]
fn a_worker_lives_from_launch_to_release() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    let nodes = body.reports.change(|r| r.seen.iter().filter(|o| matches!(o, Observation::NodeSeen { .. })).count());
    assert_eq!(nodes, 2);

    body.launch(&record(7, json!({"seed": 3, "checkpoint": {"path": "/ck"}, "outputs": ["/out"]})), &["n1"]);
    let mut agent = body.agent(JOB, 0);
    agent.expect("the welcome", |m| (m == ToAgent::Welcome { term: 1, log_have: 0, ping_ms: 0 }).then_some(()));
    body.wait_ready(JOB);
    assert_eq!(agent.spec.node, "n1");
    assert_eq!(agent.spec.slots, [0]);
    assert_eq!(agent.spec.env["AVIFLOW_SEED"], "3");
    for (variable, end) in
        [("AVIFLOW_CHECKPOINT_DIR", "jobs/7/volumes/ck"), ("AVIFLOW_OUTPUT_DIR", "jobs/7/volumes/out")]
    {
        assert!(Path::new(&agent.spec.env[variable]).ends_with(end));
        assert!(Path::new(&agent.spec.env[variable]).is_dir());
    }

    body.confirm(JOB, 1);
    agent.expect("the start", |m| matches!(m, ToAgent::Start { term: 1, epoch: 1, .. }).then_some(()));
    agent.event(1, Event::Up);
    agent.expect("the ack", |m| (m == ToAgent::Ack { seq: 1 }).then_some(()));

    agent.event(2, Event::Ended { ended: ended(6) });
    agent.expect("the ack", |m| (m == ToAgent::Ack { seq: 2 }).then_some(()));
    body.wait_event(JOB, "gone", |e, _| matches!(e, WorkerEvent::Gone { last_step: Some(9), .. }).then_some(()));

    // The log is not complete: the agent must not go yet.
    body.order(Order::Remove { job: JOB, attempt: 1 });
    agent.log(0, "a\nb\n");
    agent.expect("the log's ack", |m| (m == ToAgent::LogAck { offset: 4 }).then_some(()));
    agent.log(4, "c\n");
    let mut heard = Vec::new();
    agent.expect("the release", |m| {
        heard.push(m.clone());
        (m == ToAgent::Release).then_some(())
    });
    assert_eq!(heard[0], ToAgent::LogAck { offset: 6 });

    let folder = body.folder(JOB, 0);
    kill(agent_pid(&folder));
    wait_until("the folder is removed", || !folder.exists());
    assert!(home.path().join("jobs/7/volumes/ck").is_dir(), "volumes are kept");
    let ends = body.reports.change(|r| r.seen.iter().filter(|o| is_end(o)).count());
    assert_eq!(ends, 1, "an end that is durable is not reported again");
}

fn is_end(observation: &Observation) -> bool {
    let Observation::Worker { event, .. } = observation else { return false };
    matches!(event, WorkerEvent::Gone { .. } | WorkerEvent::Lost { .. })
}

#[test]
fn events_are_acknowledged_once_durable_and_in_order() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    let mut agent = body.agent(JOB, 0);
    body.wait_ready(JOB);
    body.reports.change(|r| r.hold = true);
    for seq in 1..=3 {
        agent.event(seq, Event::FirstStep { step: seq });
    }
    let pending =
        body.reports.wait("three reports", |r| (r.pending.len() == 3).then(|| std::mem::take(&mut r.pending)));
    let mut pending: Vec<_> = pending.into_iter().map(Some).collect();
    for n in [1, 2, 0] {
        pending[n].take().unwrap()();
    }
    agent.expect("the welcome", |m| matches!(m, ToAgent::Welcome { .. }).then_some(()));
    assert_eq!(agent.hear(), Some(ToAgent::Ack { seq: 3 }));
    kill(agent_pid(&body.folder(JOB, 0)));
    body.wait_lost(JOB);
}

#[test]
fn agents_are_adopted_after_a_crash_of_the_control_plane() {
    let home = tempfile::tempdir().unwrap();
    let job = record(7, json!({}));
    let mut body = body(home.path());
    body.launch(&job, &["n0"]);
    let mut agent = body.agent(JOB, 0);
    body.wait_ready(JOB);
    let folder = body.folder(JOB, 0);
    let pid = agent_pid(&folder);
    let (telemetry, _) = body.crash();
    agent.expect_closed();

    let mut body = Body::start_with(config(home.path()), 2, telemetry);
    // It comes before the control plane knows what it wants, and waits.
    let mut agent = Agent::connect(&folder);
    body.reconcile(&[(JOB, 1)]);
    body.launch(&job, &["n0"]);
    agent.expect("the welcome", |m| matches!(m, ToAgent::Welcome { term: 2, .. }).then_some(()));
    body.wait_ready(JOB);
    assert_eq!(marked(&folder), [pid], "the same agent, and no second one");
    body.order(Order::Stop { job: JOB, attempt: 1, epoch: 1, grace: Span(5), reason: "enough".to_owned() });
    agent.expect("the stop", |m| matches!(m, ToAgent::Stop { term: 2, grace_ms: 5, .. }).then_some(()));
    kill(pid);
    assert_eq!(body.wait_lost(JOB).1, 0, "it was watched to its end");
}

#[test]
fn an_end_while_the_control_plane_was_away_is_found() {
    let home = tempfile::tempdir().unwrap();
    let jobs = [record(7, json!({})), record(8, json!({}))];
    let mut body = body(home.path());
    for job in &jobs {
        body.launch(job, &["n0"]);
        drop(body.agent(job.id, 0));
    }
    let folders = [body.folder(JobId(7), 0), body.folder(JobId(8), 0)];
    let pids = [agent_pid(&folders[0]), agent_pid(&folders[1])];
    let (telemetry, _) = body.crash();
    fs::write(folders[0].join(files::ENDED), serde_json::to_vec(&ended(4)).unwrap()).unwrap();
    fs::create_dir(folders[0].join(files::LOG)).unwrap();
    fs::write(folders[0].join(files::LOG).join("0"), "bye\n").unwrap();
    for (pid, folder) in pids.into_iter().zip(&folders) {
        kill(pid);
        wait_until("the agent is gone", || marked(folder).is_empty());
    }

    let mut body = Body::start_with(config(home.path()), 2, telemetry);
    body.reconcile(&[(JobId(7), 1), (JobId(8), 1)]);
    for job in &jobs {
        body.launch(job, &["n0"]);
    }
    body.wait_event(JobId(7), "gone", |e, _| matches!(e, WorkerEvent::Gone { last_step: Some(9), .. }).then_some(()));
    let (reason, _) = body.wait_lost(JobId(8));
    assert!(reason.contains("while the control plane was away"), "{reason}");
    assert_eq!(body.telemetry.0.change(|kept| kept.logs[&KEY].clone()), "bye\n", "the rest of the log is kept");
}

#[test]
fn a_killed_agent_is_lost_and_leaves_no_process() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    let agent = body.agent(JOB, 0);
    let folder = body.folder(JOB, 0);
    fs::write(folder.join(files::AGENT_LOG), "something is odd\n\n").unwrap();
    let mark = aviflow_agent::mark(&agent.spec);
    let mut rank = Command::new("sleep").arg("3600").env(aviflow_agent::protocol::MARK, mark).spawn().unwrap();
    kill(agent_pid(&folder));
    let (reason, ago) = body.wait_lost(JOB);
    assert_eq!(reason, "its agent was ended by signal 9; its last words: something is odd");
    assert_eq!(ago, 0);
    let exit = rank.try_wait().unwrap().expect("nothing of it runs once it is lost");
    assert_eq!(exit.signal(), Some(9));
}

#[test]
fn what_cannot_be_launched_says_why() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    let environment = json!({"environment": {"name": "e", "version": 1, "hash": "00", "python": "", "locks": []}});
    let code = json!({"code": {"sha256": "aa", "bytes": 1, "files": 1, "dirty": false}});
    let cases = [
        (json!({"data": [{"name": "d", "source": "/nowhere"}]}), json!({}), "/nowhere"),
        (
            json!({"data": [{"name": "d", "source": "s3://b/d"}]}),
            json!({}),
            "not supported on the local body yet; fetch it first",
        ),
        (json!({"secrets": {"KEY": "wandb/key"}}), json!({}), "secrets/wandb/key"),
        (json!({"outputs": ["relative"]}), json!({}), "give an absolute path"),
        (json!({"image": "x@sha256:00"}), json!({}), "runs no containers"),
        (json!({}), environment, "not in the cache any more"),
        (json!({}), code, "the code snapshot aa is not in the store"),
    ];
    for (n, (spec, provenance, part)) in cases.into_iter().enumerate() {
        let job = record_with(100 + n as u64, spec, provenance);
        body.launch(&job, &["n0"]);
        let reason = body.wait_refused(job.id);
        assert!(reason.contains(part), "{reason}");
    }
}

#[test]
fn an_agent_that_is_missing_or_ends_at_once_is_a_failed_launch() {
    for (agent, part) in [
        (vec!["/nowhere/agent"], "the agent /nowhere/agent cannot be started"),
        (vec!["no-such-agent"], "exit code 127"),
        (vec!["/bin/sh", "-c", "echo broken >&2; exit 3"], "ended with exit code 3; its last words: broken"),
    ] {
        let home = tempfile::tempdir().unwrap();
        let mut config = config(home.path());
        config.agent = agent.into_iter().map(Into::into).collect();
        let mut body = Body::start(config, 1);
        body.reconcile(&[]);
        body.launch(&record(7, json!({})), &["n0"]);
        let reason = body.wait_refused(JOB);
        assert!(reason.contains(part), "{reason}");
        body.order(Order::Remove { job: JOB, attempt: 1 });
        let folder = body.folder(JOB, 0);
        wait_until("the folder is removed", || !folder.exists());
    }
}

#[test]
fn a_node_that_is_gone_loses_its_worker() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n9"]);
    let (reason, _) = body.wait_lost(JOB);
    assert_eq!(reason, "node `n9` is not part of this machine any more (it has n0, n1)");
}

#[test]
fn reconciliation_removes_what_nobody_wants() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    for job in 7..=9 {
        body.launch(&record(job, json!({})), &["n0"]);
        drop(body.agent(JobId(job), 0));
    }
    let folders: Vec<_> = (7..=9).map(|job| body.folder(JobId(job), 0)).collect();
    let pids: Vec<_> = folders.iter().map(|f| agent_pid(f)).collect();
    let (telemetry, _) = body.crash();
    // One has ended, and is dead.
    kill(pids[1]);
    fs::write(folders[1].join(files::ENDED), serde_json::to_vec(&ended(0)).unwrap()).unwrap();

    let mut body = Body::start_with(config(home.path()), 2, telemetry);
    body.reconcile(&[(JobId(9), 1)]);
    body.launch(&record(9, json!({})), &["n0"]);
    let mut agent = Agent::connect(&folders[0]);
    agent.expect("to be unknown", |m| matches!(m, ToAgent::Unknown { .. }).then_some(()));
    for folder in &folders[..2] {
        wait_until("the folder is removed", || !folder.exists());
    }
    wait_until("the stray is dead", || !Path::new(&format!("/proc/{}", pids[0])).join("exe").exists());
    assert_eq!(marked(&folders[2]), [pids[2]]);
    assert!(!body.reports.change(|r| r.seen.iter().any(is_end)));
    kill(pids[2]);
    body.wait_lost(JobId(9));
}

#[test]
fn only_the_right_token_is_answered() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    let folder = body.folder(JOB, 0);
    let mut agent = body.agent(JOB, 0);
    agent.expect("the welcome", |m| matches!(m, ToAgent::Welcome { .. }).then_some(()));
    assert_eq!(Agent::connect_with(&folder, "guessed").hear(), None);
    assert_eq!(fs::metadata(folder.join(files::SPEC)).unwrap().permissions().mode() & 0o777, 0o600);
    kill(agent_pid(&folder));
    body.wait_lost(JOB);
}

#[test]
fn log_is_acknowledged_once_the_disk_has_it() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    let mut agent = body.agent(JOB, 0);
    agent.expect("the welcome", |m| matches!(m, ToAgent::Welcome { .. }).then_some(()));
    body.telemetry.0.change(|kept| kept.full = true);
    agent.log(0, "a\n");
    body.telemetry.0.wait("a write that failed", |kept| (kept.refused > 0).then_some(()));
    // Events go on meanwhile.
    agent.event(1, Event::Up);
    assert_eq!(agent.hear(), Some(ToAgent::Ack { seq: 1 }));
    body.telemetry.0.change(|kept| kept.full = false);
    assert_eq!(agent.hear(), Some(ToAgent::LogAck { offset: 2 }));
    kill(agent_pid(&body.folder(JOB, 0)));
    body.wait_lost(JOB);
}

#[test]
fn words_are_kept_for_an_agent_that_is_not_connected() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    body.confirm(JOB, 1);
    let mut agent = body.agent(JOB, 0);
    agent.expect("the start", |m| matches!(m, ToAgent::Start { epoch: 1, .. }).then_some(()));
    drop(agent);
    body.order(Order::Stop { job: JOB, attempt: 1, epoch: 1, grace: Span(5), reason: "enough".to_owned() });
    // What is stopped is not started again, but for an epoch that comes after it.
    body.confirm(JOB, 1);
    let mut agent = body.agent(JOB, 0);
    assert!(matches!(agent.hear(), Some(ToAgent::Welcome { .. })));
    assert!(matches!(agent.hear(), Some(ToAgent::Stop { epoch: 1, .. })));
    body.confirm(JOB, 2);
    assert!(matches!(agent.hear(), Some(ToAgent::Start { epoch: 2, .. })));
    drop(agent);
    let mut agent = body.agent(JOB, 0);
    assert!(matches!(agent.hear(), Some(ToAgent::Welcome { .. })));
    assert!(matches!(agent.hear(), Some(ToAgent::Start { epoch: 2, .. })));
    kill(agent_pid(&body.folder(JOB, 0)));
    body.wait_lost(JOB);
}

#[test]
fn orders_of_an_earlier_term_change_nothing() {
    let home = tempfile::tempdir().unwrap();
    let mut body = Body::start(config(home.path()), 3);
    body.reconcile(&[]);
    body.term = 2;
    body.launch(&record(7, json!({})), &["n0"]);
    body.term = 3;
    body.launch(&record(8, json!({})), &["n0"]);
    body.agent(JobId(8), 0).expect("the welcome", |m| matches!(m, ToAgent::Welcome { term: 3, .. }).then_some(()));
    assert!(!body.folder(JOB, 0).exists());
    kill(agent_pid(&body.folder(JobId(8), 0)));
    body.wait_lost(JobId(8));
}

#[test]
fn commands_run_inside_a_worker() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({})), &["n0"]);
    let mut agent = body.agent(JOB, 0);
    body.wait_ready(JOB);
    let handle = body.cluster.handle();
    assert!(handle.workers()[0].connected.is_some());
    let begin = || handle.exec(KEY, None, vec!["cat".to_owned()], b"in").unwrap();
    let begun = |m| match m {
        ToAgent::Exec { id, argv, stdin, .. } => Some((id, argv, stdin)),
        _ => None,
    };
    let mut stream = begin();
    let (id, argv, stdin) = agent.expect("the command", begun);
    assert_eq!((argv, stdin.as_str()), (vec!["cat".to_owned()], "aW4="));
    for output in [ExecOutput::Stdout("aW4=".to_owned()), ExecOutput::Exit(0)] {
        agent.say(&FromAgent::Exec { id, output: output.clone() });
        assert_eq!(body.block_on(stream.next()), Some(output));
    }
    assert_eq!(body.block_on(stream.next()), None);

    // Who stops reading ends the command; who loses the worker is told.
    drop(begin());
    let (id, ..) = agent.expect("the command", begun);
    agent.expect("its end", |m| (m == ToAgent::ExecKill { id }).then_some(()));
    let mut stream = begin();
    agent.expect("the command", begun);
    drop(agent);
    assert!(matches!(body.block_on(stream.next()), Some(ExecOutput::Failed(_))));
    kill(agent_pid(&body.folder(JOB, 0)));
    body.wait_lost(JOB);
}

#[test]
fn a_home_has_one_control_plane() {
    let home = tempfile::tempdir().unwrap();
    let body = body(home.path());
    let other = LocalCluster::start(
        config(home.path()),
        Arc::new(common::Memory::default()),
        |_, _| {},
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().handle().clone(),
    );
    let Err(error) = other else { panic!("two control planes") };
    assert!(matches!(&error, LocalError::Busy { pid, .. } if *pid == std::process::id().to_string()), "{error}");
    body.crash();
    Body::start(config(home.path()), 2);
}

#[test]
fn the_socket_may_lie_deep() {
    let home = tempfile::tempdir().unwrap();
    let deep = home.path().join("a".repeat(120));
    let mut body = Body::start(config(&deep), 1);
    body.reconcile(&[]);
    let socket = deep.join("agents.sock");
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    // As agents do it: through the open folder.
    let folder = fs::File::open(&deep).unwrap();
    let short = format!("/proc/self/fd/{}/agents.sock", std::os::fd::AsRawFd::as_raw_fd(&folder));
    assert!(std::os::unix::net::UnixStream::connect(short).is_ok());
}

#[test]
fn a_half_made_folder_is_made_again() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir_all(home.path().join("objects")).unwrap();
    let mut tar = tar::Builder::new(fs::File::create(home.path().join("objects/aa")).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_size(2);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append_data(&mut header, "train.py", b"1\n".as_slice()).unwrap();
    tar.finish().unwrap();
    let mut body = body(home.path());
    let folder = body.folder(JOB, 0);
    fs::create_dir_all(folder.join("code")).unwrap();
    fs::write(folder.join("code/train.py"), "half").unwrap();
    let code = json!({"code": {"sha256": "aa", "bytes": 1, "files": 1, "dirty": false}});
    body.launch(&record_with(7, json!({}), code), &["n0"]);
    let agent = body.agent(JOB, 0);
    assert_eq!(agent.spec.cwd, fs::canonicalize(folder.join("code")).unwrap());
    assert_eq!(fs::read_to_string(folder.join("code/train.py")).unwrap(), "1\n");
    kill(agent_pid(&folder));
    body.wait_lost(JOB);
}
