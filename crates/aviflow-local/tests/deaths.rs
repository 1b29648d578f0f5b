//! Agents, guardians and control planes that are killed, in any order: nothing is left, and the truth is told.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use aviflow_agent::protocol::{WorkerSpec, files};
use aviflow_agent::{Alive, sweep};
use aviflow_core::model::JobId;
use aviflow_engine::ports::{JobRecord, WorkerEvent};
use common::{Body, real, record, wait_until};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

const JOB: JobId = JobId(7);

/// Leaves a process behind that has a session of its own, no mark, and no parent but whoever adopts orphans.
const SCRIPT: &str = r#"
(env -i setsid sh -c 'exec 8>"$0"; echo $$ > "$0.pid"; exec sleep 3600' "$0" &)
exec sleep 3600
"#;

struct Victims {
    agent: OwnedFd,
    guardian: OwnedFd,
    spec: WorkerSpec,
    /// Held open by the process that is cut off, and by nobody else.
    pipe: File,
}

fn parent(pid: u32) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat[stat.rfind(')').unwrap() + 1..].split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A process, whoever gets its number later.
fn open(pid: u32) -> OwnedFd {
    pidfd_open(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), PidfdFlags::empty()).unwrap()
}

fn kill(process: &OwnedFd) {
    signal(process, Signal::KILL);
}

fn signal(process: &OwnedFd, signal: Signal) {
    // One that is gone already is no error.
    let _ = pidfd_send_signal(process, signal);
}

fn begin(home: &Path) -> (Body, Arc<JobRecord>, Victims) {
    let fifo = home.join("cut");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
    let pipe = OpenOptions::new().read(true).custom_flags(nonblocking).open(&fifo).unwrap();
    let mut body = Body::start(real(home), 1);
    body.reconcile(&[]);
    let job = record(7, json!({"run": ["sh", "-c", SCRIPT, fifo]}));
    body.launch(&job, &["n0"]);
    body.wait_ready(JOB);
    body.confirm(JOB, 1);
    body.wait_event(JOB, "up", |e, _| (*e == WorkerEvent::Up).then_some(()));
    let folder = body.folder(JOB, 0);
    let spec: WorkerSpec = serde_json::from_slice(&fs::read(folder.join(files::SPEC)).unwrap()).unwrap();
    let agent = Alive::read(&folder).unwrap().pid;
    let mut cut = 0;
    wait_until("a process is cut off", || {
        let said = fs::read_to_string(home.join("cut.pid")).unwrap_or_default();
        cut = said.strip_suffix('\n').map_or(0, |pid| pid.parse().unwrap());
        cut > 0 && parent(cut) == agent
    });
    let found = sweep::processes(&aviflow_agent::mark(&spec), &[], &[]);
    assert!(found.iter().all(|p| p.pid.cast_unsigned() != cut), "it is found by its mark: {found:?}");
    let victims = Victims { agent: open(agent), guardian: open(parent(agent)), spec, pipe };
    assert!(!victims.cut_is_gone());
    (body, job, victims)
}

impl Victims {
    fn cut_is_gone(&self) -> bool {
        match (&self.pipe).read(&mut [0]) {
            Ok(0) => true,
            Err(e) if e.kind() == ErrorKind::WouldBlock => false,
            other => panic!("{other:?}"),
        }
    }

    fn marked(&self) -> usize {
        sweep::processes(&aviflow_agent::mark(&self.spec), &[], &[]).len()
    }

    /// Waits for the worker's end, when nothing may be left.
    fn expect_lost(&self, body: &Body, expected: &str) {
        let (reason, _) = body.wait_lost(JOB);
        assert!(reason.starts_with(expected), "{reason}");
        assert_eq!((self.cut_is_gone(), self.marked()), (true, 0));
    }
}

#[test]
fn an_agent() {
    let home = tempfile::tempdir().unwrap();
    let (body, _, victims) = begin(home.path());
    kill(&victims.agent);
    victims.expect_lost(&body, "its agent was ended by signal 9");
}

#[test]
fn a_guardian() {
    let home = tempfile::tempdir().unwrap();
    let (body, _, victims) = begin(home.path());
    kill(&victims.guardian);
    victims.expect_lost(&body, "its agent lost its guardian, which was ended by signal 9");
}

#[test]
fn an_agent_whose_guardian_is_frozen() {
    let home = tempfile::tempdir().unwrap();
    let (body, _, victims) = begin(home.path());
    signal(&victims.guardian, Signal::STOP);
    kill(&victims.agent);
    victims.expect_lost(&body, "its agent was ended by signal 9");
}

#[test]
fn an_agent_and_then_its_guardian() {
    let home = tempfile::tempdir().unwrap();
    let (body, _, victims) = begin(home.path());
    kill(&victims.agent);
    wait_until("the ranks are gone", || victims.marked() == 0);
    kill(&victims.guardian);
    // The guardian had killed it before the ranks, and may not have lived to see its end.
    wait_until("nothing is left", || victims.cut_is_gone());
    victims.expect_lost(&body, "its agent was ended by signal 9");
}

/// A control plane that is killed, and then `victim`; nobody but the survivor cleans up.
fn check_alone(victim: impl FnOnce(&Victims) -> &OwnedFd, expected: &str) {
    let home = tempfile::tempdir().unwrap();
    let (body, job, victims) = begin(home.path());
    let (telemetry, _) = body.crash();
    kill(victim(&victims));
    wait_until("nothing is left", || victims.cut_is_gone() && victims.marked() == 0);
    let mut body = Body::start_with(real(home.path()), 2, telemetry);
    body.reconcile(&[(JOB, 1)]);
    body.launch(&job, &["n0"]);
    victims.expect_lost(&body, expected);
}

#[test]
fn a_control_plane_and_then_an_agent() {
    check_alone(|v| &v.agent, "its agent ended while the control plane was away");
}

#[test]
fn a_control_plane_and_then_a_guardian() {
    check_alone(|v| &v.guardian, "its agent lost its guardian, which ended while the control plane was away");
}
