//! How workers end that do not end by themselves, and when their end may be said.

mod common;

use aviflow_agent::protocol::{Ended, ToAgent, files};
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::ports::{Observation, Order, WorkerEvent};
use aviflow_engine::telemetry::StreamKey;
use aviflow_local::LocalConfig;
use common::{Agent, Body, config, holders_of, kill, record, wait_until};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

const JOB: JobId = JobId(7);

fn impatient(home: &Path) -> LocalConfig {
    LocalConfig { stop_slack: Span(0), ..config(home) }
}

fn body(config: LocalConfig) -> Body {
    let mut body = Body::start(config, 1);
    body.reconcile(&[]);
    body
}

fn stop(job: JobId) -> Order {
    Order::Stop { job, attempt: 1, epoch: 1, grace: Span(5), reason: "enough".to_owned() }
}

fn agent_pid(folder: &Path) -> i32 {
    holders_of(&folder.join(files::LOCK))[0]
}

/// Whether the end of a job's worker was said.
fn end_said(body: &Body, of: JobId) -> bool {
    let is_end = |o: &Observation| {
        let Observation::Worker { job, event, .. } = o else { return false };
        *job == of && matches!(event, WorkerEvent::Gone { .. } | WorkerEvent::Lost { .. })
    };
    body.reports.change(|r| r.seen.iter().any(is_end))
}

#[test]
fn an_agent_that_does_not_stop_is_killed() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(impatient(home.path()));
    body.launch(&record(7, json!({})), &["n0"]);
    let mut agent = body.agent(JOB, 0);
    body.order(stop(JOB));
    agent.expect("the stop", |m| matches!(m, ToAgent::Stop { .. }).then_some(()));
    let (reason, _) = body.wait_lost(JOB);
    assert!(reason.contains("did not end in time and was ended by signal 9"), "{reason}");
}

#[test]
fn the_stop_that_recovery_says_again_is_watched_too() {
    let home = tempfile::tempdir().unwrap();
    let job = record(7, json!({}));
    let mut first = body(config(home.path()));
    first.launch(&job, &["n0"]);
    drop(first.agent(JOB, 0));
    first.order(stop(JOB));
    let (telemetry, _) = first.crash();
    let mut second = Body::start_with(impatient(home.path()), 2, telemetry);
    second.reconcile(&[(JOB, 1)]);
    second.launch(&job, &["n0"]);
    second.order(stop(JOB));
    second.wait_lost(JOB);
}

#[test]
fn ended_agents_that_nobody_wants_ship_their_log_first() {
    // The first is found long before the others, as there are dead ones between them.
    let jobs = || [1].into_iter().chain(500..506).map(JobId);
    let home = tempfile::tempdir().unwrap();
    let mut first = body(config(home.path()));
    let key = |job| StreamKey { job, attempt: 1, worker: 0 };
    let folders: Vec<_> = jobs().map(|job| first.folder(job, 0)).collect();
    for job in jobs() {
        first.launch(&record(job.0, json!({})), &["n0"]);
        drop(first.agent(job, 0));
    }
    let (telemetry, _) = first.crash();
    let ended =
        Ended { epoch: 1, at_unix_ms: 0, ranks: BTreeMap::new(), reason: None, last_step: None, log_end: 4, port: 0 };
    for folder in &folders {
        fs::write(folder.join(files::ENDED), serde_json::to_vec(&ended).unwrap()).unwrap();
    }
    for dead in 2..500 {
        let folder = home.path().join(format!("workers/{dead}.1.0"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(files::ENDED), serde_json::to_vec(&ended).unwrap()).unwrap();
    }
    let mut second = Body::start_with(config(home.path()), 2, telemetry);
    // All of them wait for the word of what is wanted.
    let agents: Vec<_> = folders.iter().map(|folder| Agent::connect(folder)).collect();
    second.reconcile(&[]);
    for (mut agent, folder) in agents.into_iter().zip(&folders) {
        let answer = agent.hear();
        assert!(matches!(answer, Some(ToAgent::Welcome { log_have: 0, .. })), "{answer:?}");
        agent.log(0, "bye\n");
        agent.expect("the release", |m| (m == ToAgent::Release).then_some(()));
        kill(agent_pid(folder));
        wait_until("the folder is removed", || !folder.exists());
    }
    let logs = second.telemetry.0.change(|kept| kept.logs.clone());
    assert!(jobs().all(|job| logs[&key(job)] == "bye\n"), "{logs:?}");
}

/// Kills the agent of job 7, waits for the end of another job that began later, and for job 7's after `let_go`.
fn check_end_waits(body: &mut Body, let_go: impl FnOnce(&Path)) {
    let other = JobId(8);
    let folder = body.folder(JOB, 0);
    kill(agent_pid(&folder));
    body.launch(&record(8, json!({})), &["n1"]);
    drop(body.agent(other, 0));
    kill(agent_pid(&body.folder(other, 0)));
    body.wait_lost(other);
    assert!(!end_said(body, JOB));
    let_go(&folder);
    body.wait_lost(JOB);
}

#[test]
fn an_end_is_said_after_the_guardian_s() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(config(home.path()));
    body.launch(&record(7, json!({})), &["n0"]);
    drop(body.agent(JOB, 0));
    let guardian = File::create(body.folder(JOB, 0).join(files::KEEPER_LOCK)).unwrap();
    guardian.lock().unwrap();
    check_end_waits(&mut body, |_| drop(guardian));
}

#[test]
fn what_cannot_be_read_does_not_count_as_absent() {
    for name in [files::SPEC, files::ENDED, files::KEEPER_LOCK] {
        let home = tempfile::tempdir().unwrap();
        let mut body = body(config(home.path()));
        body.launch(&record(7, json!({})), &["n0"]);
        drop(body.agent(JOB, 0));
        let path = body.folder(JOB, 0).join(name);
        let before = fs::read(&path).ok();
        if before.is_some() {
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        check_end_waits(&mut body, |_| {
            fs::remove_dir(&path).unwrap();
            if let Some(before) = before {
                fs::write(&path, before).unwrap();
            }
        });
    }
}
