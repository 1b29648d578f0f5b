//! The body with real agents and real processes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use aviflow_agent::Alive;
use aviflow_agent::protocol::{ExecOutput, WorkerSpec, files};
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::ports::{Observation, Order, WorkerEvent};
use aviflow_engine::telemetry::StreamKey;
use aviflow_local::LocalConfig;
use common::{Body, kill, real, record, wait_until};
use serde_json::json;
use std::fs;
use std::path::Path;

const JOB: JobId = JobId(7);
const KEY: StreamKey = StreamKey { job: JOB, attempt: 1, worker: 0 };

fn body(home: &Path) -> Body {
    let mut body = Body::start(real(home), 1);
    body.reconcile(&[]);
    body
}

fn spec(folder: &Path) -> WorkerSpec {
    serde_json::from_slice(&fs::read(folder.join(files::SPEC)).unwrap()).unwrap()
}

fn wait_up(body: &Body) {
    body.wait_event(JOB, "up", |e, _| (*e == WorkerEvent::Up).then_some(()));
}

fn processes_of(spec: &WorkerSpec) -> usize {
    aviflow_agent::sweep::processes(&aviflow_agent::mark(spec), &[], &[]).len()
}

#[test]
fn a_job_runs_from_launch_to_removal() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    let run = json!(["sh", "-c", "echo hello $AVIFLOW_NODE; pwd > $AVIFLOW_OUTPUT_DIR/cwd; exit 0"]);
    body.launch(&record(7, json!({"run": run, "outputs": ["/out"]})), &["n1"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    wait_up(&body);
    body.wait_event(JOB, "the exit", |e, _| {
        matches!(e, WorkerEvent::RankExited { rank: 0, code: 0, .. }).then_some(())
    });
    let ranks = body.wait_event(JOB, "gone", |e, _| match e {
        WorkerEvent::Gone { ranks, .. } => Some(ranks.clone()),
        _ => None,
    });
    assert_eq!(ranks[&0].code, 0);
    let cwd = fs::read_to_string(body.cluster.handle().volume(JOB, "/out").unwrap().join("cwd")).unwrap();
    assert!(cwd.trim_end().ends_with("workers/7.1.0/work"), "{cwd}");
    body.order(Order::Remove { job: JOB, attempt: 1 });
    let folder = body.folder(JOB, 0);
    wait_until("the folder is removed", || !folder.exists());
    assert!(body.telemetry.0.change(|kept| kept.logs[&KEY].contains(" 0 o hello n1\n")));
    let seen = body.reports.change(|r| std::mem::take(&mut r.seen));
    let ends = |o: &&Observation| {
        matches!(o, Observation::Worker { event: WorkerEvent::Gone { .. } | WorkerEvent::Lost { .. }, .. })
    };
    assert_eq!(seen.iter().filter(ends).count(), 1, "{seen:#?}");
}

#[test]
fn a_gang_is_stopped_with_grace() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    let run = json!(["sh", "-c", "trap 'echo saved; exit 0' TERM; echo waits; while :; do sleep 0.1; done"]);
    body.launch(&record(7, json!({"run": run, "nodes": {"min": 2, "max": 2}})), &["n0", "n1"]);
    let ready = |body: &Body, n| {
        body.reports.wait("both ready", move |r| {
            let ready =
                r.seen.iter().filter(|o| matches!(o, Observation::Worker { event: WorkerEvent::Ready { .. }, .. }));
            (ready.count() == n).then_some(())
        });
    };
    ready(&body, 2);
    body.confirm(JOB, 1);
    let other = StreamKey { worker: 1, ..KEY };
    body.telemetry.0.wait("both traps are set", |kept| {
        [KEY, other].iter().all(|key| kept.logs.get(key).is_some_and(|log| log.contains("waits"))).then_some(())
    });
    body.order(Order::Stop { job: JOB, attempt: 1, epoch: 1, grace: Span::seconds(60), reason: "enough".to_owned() });
    body.wait_event(JOB, "gone", |e, _| match e {
        WorkerEvent::Gone { ranks, .. } => (ranks[&0].code == 0 && ranks[&0].stopping).then_some(()),
        _ => None,
    });
    body.order(Order::Remove { job: JOB, attempt: 1 });
    for worker in [0, 1] {
        let folder = body.folder(JOB, worker);
        wait_until("the folder is removed", || !folder.exists());
    }
    assert!(body.telemetry.0.change(|kept| kept.logs[&other].contains("saved")));
}

#[test]
fn a_running_job_survives_the_control_plane() {
    let home = tempfile::tempdir().unwrap();
    let job = record(
        7,
        json!({"run": ["sh", "-c", "echo before; read line < $0; echo after $line", home.path().join("go")]}),
    );
    let made = std::process::Command::new("mkfifo").arg(home.path().join("go")).status().unwrap();
    assert!(made.success());
    let mut body = body(home.path());
    body.launch(&job, &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    wait_up(&body);
    let agent = Alive::read(&body.folder(JOB, 0)).unwrap();
    let (telemetry, _) = body.crash();
    // The rank goes on, and its words are kept.
    fs::write(home.path().join("go"), "x\n").unwrap();

    let mut body = Body::start_with(real(home.path()), 2, telemetry);
    body.reconcile(&[(JOB, 1)]);
    body.launch(&job, &["n0"]);
    body.wait_event(JOB, "gone", |e, _| matches!(e, WorkerEvent::Gone { .. }).then_some(()));
    body.telemetry.0.wait("the log", |kept| kept.logs.get(&KEY)?.contains("after x").then_some(()));
    assert_eq!(Alive::read(&body.folder(JOB, 0)), Some(agent), "the same agent");
    body.order(Order::Remove { job: JOB, attempt: 1 });
    let folder = body.folder(JOB, 0);
    wait_until("the folder is removed", || !folder.exists());
}

#[test]
fn nothing_is_left_of_a_killed_agent() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    let run = json!(["sh", "-c", "setsid sleep 3600 & sleep 3600 & echo runs; wait"]);
    body.launch(&record(7, json!({ "run": run })), &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    wait_up(&body);
    body.telemetry.0.wait("its output", |kept| kept.logs.get(&KEY)?.contains("runs").then_some(()));
    let folder = body.folder(JOB, 0);
    let spec = spec(&folder);
    assert!(processes_of(&spec) >= 3);
    kill(i32::try_from(Alive::read(&folder).unwrap().pid).unwrap());
    let (reason, ago) = body.wait_lost(JOB);
    assert!(reason.starts_with("its agent was ended by signal 9"), "{reason}");
    assert_eq!((ago, processes_of(&spec)), (0, 0));
}

#[test]
fn a_frozen_agent_holds_its_node_no_longer_than_its_grace() {
    let home = tempfile::tempdir().unwrap();
    let mut body = Body::start(LocalConfig { stop_slack: Span(0), ..real(home.path()) }, 1);
    body.reconcile(&[]);
    body.launch(&record(7, json!({"run": ["sh", "-c", "setsid sleep 3600 & echo runs; wait"]})), &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    body.telemetry.0.wait("its output", |kept| kept.logs.get(&KEY)?.contains("runs").then_some(()));
    let folder = body.folder(JOB, 0);
    let spec = spec(&folder);
    let agent = i32::try_from(Alive::read(&folder).unwrap().pid).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(agent).unwrap(), rustix::process::Signal::STOP)
        .unwrap();
    body.order(Order::Stop { job: JOB, attempt: 1, epoch: 1, grace: Span(0), reason: "enough".to_owned() });
    let (reason, _) = body.wait_lost(JOB);
    assert!(reason.contains("did not end in time"), "{reason}");
    assert_eq!(processes_of(&spec), 0);
}

#[test]
fn a_missing_program_is_a_failed_launch() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({"run": ["no-such-program"]})), &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    let reason = body.wait_refused(JOB);
    assert!(reason.contains("no-such-program"), "{reason}");
    body.order(Order::Remove { job: JOB, attempt: 1 });
    let folder = body.folder(JOB, 0);
    wait_until("the folder is removed", || !folder.exists());
}

#[test]
fn strays_are_stopped_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let mut first = body(home.path());
    first.launch(&record(7, json!({"run": ["sleep", "3600"]})), &["n0"]);
    first.wait_ready(JOB);
    first.confirm(JOB, 1);
    wait_up(&first);
    let folder = first.folder(JOB, 0);
    let spec = spec(&folder);
    let (telemetry, _) = first.crash();
    let mut second = Body::start_with(real(home.path()), 2, telemetry);
    second.reconcile(&[]);
    wait_until("the folder is removed", || !folder.exists());
    assert_eq!(processes_of(&spec), 0);
}

#[test]
fn commands_see_the_rank_s_variables() {
    let home = tempfile::tempdir().unwrap();
    let mut body = body(home.path());
    body.launch(&record(7, json!({"run": ["sleep", "3600"], "env": {"COLOUR": "blue"}})), &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    wait_up(&body);
    let argv = ["sh", "-c", "cat; echo $COLOUR; exit 3"].map(str::to_owned).to_vec();
    let mut stream = body.cluster.handle().exec(KEY, None, argv, b"in ").unwrap();
    let mut said = Vec::new();
    let code = body.block_on(async {
        use base64::Engine;
        loop {
            match stream.next().await.unwrap() {
                ExecOutput::Stdout(text) => {
                    said.extend(base64::engine::general_purpose::STANDARD.decode(text).unwrap())
                }
                ExecOutput::Exit(code) => return code,
                other => panic!("{other:?}"),
            }
        }
    });
    assert_eq!((String::from_utf8(said).unwrap().as_str(), code), ("in blue\n", 3));
    body.order(Order::Stop { job: JOB, attempt: 1, epoch: 1, grace: Span(0), reason: "over".to_owned() });
    body.wait_event(JOB, "gone", |e, _| matches!(e, WorkerEvent::Gone { .. }).then_some(()));
    body.order(Order::Remove { job: JOB, attempt: 1 });
    let folder = body.folder(JOB, 0);
    wait_until("the folder is removed", || !folder.exists());
}
