//! Whatever dies in whatever order, nothing of a worker is left.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod world;

use aviflow_agent::GUARDIAN_LOST;
use aviflow_agent::protocol::{Event, files};
use aviflow_agent::sys;
use std::fs::{self, File};
use std::process::{Command, Stdio};
use world::{MESSY, World, agent, gone, signal, until};

/// Leaves a process in the background of which nothing leads to the worker: it has no mark, a session of its own,
/// and no parent but whoever adopts orphans. It alone holds `$CUT`.
const CUT: &str = r#"
(env -i setsid sh -c 'exec 8>"$1"; echo $$ > "$2"; exec sleep 1000' cut "$CUT" "$CUT.pid" &)
"#;

/// A worker whose rank has left a process that is cut off.
struct Cut {
    world: World,
    process: u32,
    /// At its end once that process is gone.
    pipe: File,
    /// At its end once all others are gone.
    fifo: File,
}

impl Cut {
    fn new() -> Self {
        Self::launched(Command::new(agent()))
    }

    fn launched(mut command: Command) -> Self {
        let mut world = World::launched_by(
            &format!("{CUT}\n{MESSY}\nsleep 1000"),
            |spec| {
                let cut = spec.cwd.join("cut").display().to_string();
                assert!(Command::new("mkfifo").arg(&cut).status().unwrap().success());
                spec.env.insert("CUT".into(), cut);
            },
            |folder| command.arg(folder).spawn().unwrap(),
        );
        world.up(1);
        let (fifo, pipe) = (world.fifo(), File::open(world.path("cut")).unwrap());
        world.log_has("messy");
        let mut process = 0;
        until(|| {
            let said = fs::read_to_string(world.path("cut.pid")).unwrap_or_default();
            process = said.strip_suffix('\n').map_or(0, |pid| pid.parse().unwrap());
            process > 0
        });
        let cut = Self { world, process, pipe, fifo };
        until(|| cut.parent() == cut.world.agent().pid);
        assert_eq!(cut.stat(3), process, "its session");
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap();
        assert!(!String::from_utf8(environment).unwrap().contains("AVIFLOW"));
        cut
    }

    /// A number of `/proc/PID/stat`, counted from the state.
    fn stat(&self, field: usize) -> u32 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process)).unwrap();
        stat[stat.rfind(')').unwrap() + 1..].split_ascii_whitespace().nth(field).unwrap().parse().unwrap()
    }

    fn parent(&self) -> u32 {
        self.stat(1)
    }
}

#[test]
fn a_killed_agent_leaves_no_process() {
    let mut cut = Cut::new();
    cut.world.kill_agent();
    gone(cut.pipe);
    gone(cut.fifo);
}

#[test]
fn a_killed_guardian_leaves_no_process() {
    // This process adopts the agent, to see how it ends.
    sys::become_subreaper().unwrap();
    let mut command = Command::new(agent());
    command.stderr(Stdio::piped());
    let mut cut = Cut::launched(command);
    let agent = cut.world.agent().pid;
    cut.world.kill_guardian();
    gone(cut.pipe);
    gone(cut.fifo);
    assert_eq!(sys::reap_one(agent.cast_signed()).unwrap().code, 125);
    let said = std::io::read_to_string(cut.world.guardian.stderr.take().unwrap()).unwrap();
    assert!(said.trim_end().ends_with(GUARDIAN_LOST), "{said}");
    assert!(!cut.world.path(files::ENDED).exists(), "nobody may take this for an end that was planned");
}

#[test]
fn an_agent_and_then_its_guardian() {
    let mut cut = Cut::new();
    signal(cut.world.agent().pid, "KILL");
    // The ranks are the last that the guardian kills: once they are gone, nobody needs it any more.
    gone(cut.fifo);
    cut.world.kill_guardian();
    gone(cut.pipe);
}

#[test]
fn a_frozen_agent_and_then_its_guardian() {
    let mut cut = Cut::new();
    signal(cut.world.agent().pid, "STOP");
    cut.world.kill_guardian();
    gone(cut.pipe);
    gone(cut.fifo);
}

#[test]
fn the_guardian_s_lock_is_held_until_nothing_is_left() {
    let mut cut = Cut::new();
    let (agent, guardian) = (cut.world.agent(), cut.world.guardian.id());
    signal(guardian, "STOP");
    signal(agent.pid, "KILL");
    until(|| !agent.lives());
    let lock = File::open(cut.world.path(files::LOCK)).unwrap();
    assert!(lock.try_lock().is_ok(), "somebody else holds the agent's lock");
    let lock = File::open(cut.world.path(files::KEEPER_LOCK)).unwrap();
    assert!(lock.try_lock().is_err(), "its work is not done");
    until(|| cut.parent() == guardian);
    signal(guardian, "CONT");
    lock.lock().unwrap();
    gone(cut.pipe);
    gone(cut.fifo);
    cut.world.guardian.wait().unwrap();
}

#[test]
fn a_sweep_ends_what_agent_and_guardian_could_not() {
    // All that carry the mark, and what they lead to: without agent and guardian nobody knows the others.
    let mut world = World::new(&format!("env -i setsid sleep 1000 &\n{MESSY}\nsleep 1000"));
    world.up(1);
    let fifo = world.fifo();
    world.log_has("messy");
    signal(world.guardian.id(), "STOP");
    let agent = world.agent();
    signal(agent.pid, "KILL");
    until(|| !agent.lives());
    world.kill_guardian();
    let mark = aviflow_agent::mark(&world.spec);
    until(|| aviflow_agent::sweep(&mark) == 0);
    gone(fifo);
}

#[test]
fn a_killed_agent_leaves_no_process_in_the_middle_of_a_stop() {
    let mut world = World::new(&format!("trap '' TERM\n{MESSY}\nwhile :; do sleep 1; done"));
    world.up(1);
    let fifo = world.fifo();
    world.log_has("messy");
    world.stop(600_000);
    world.log_has("stopping: a person");
    world.kill_agent();
    gone(fifo);
}

#[test]
fn the_lock_is_handed_on() {
    let mut world = World::launched_by(
        "echo ready; sleep 1000",
        |_| {},
        |folder| {
            let script = format!(
                "exec 7<>{0}/agent.lock; flock -n 7; AVIFLOW_LOCK_FD=7 exec {1} {0}",
                folder.display(),
                agent()
            );
            Command::new("bash").args(["-c", &script]).spawn().unwrap()
        },
    );
    world.up(1);
    world.log_has("ready");
    let lock = File::open(world.path(files::LOCK)).unwrap();
    assert!(lock.try_lock().is_err());
    let second = Command::new(agent()).arg(world.folder.path()).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(second.status.code(), Some(125));
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("an agent already runs in"), "{said}");
    world.kill_agent();
    assert!(lock.try_lock().is_ok(), "somebody else holds the lock");
}

#[test]
fn a_guardian_ends_as_its_agent_did() {
    let mut world = World::new("echo ready; exec sleep 1000");
    world.up(1);
    world.log_has("ready");
    // Nobody catches this one, and no shell starts what ignores it.
    signal(world.agent().pid, "ABRT");
    let end = world.guardian.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end), Some(6));
}

#[test]
fn a_guardian_outlives_the_end_of_its_agent_s_worker() {
    // After the worker's end the agent waits to be released: its guardian's death is then nobody's loss.
    let mut world = World::new("exit 0");
    world.start(1);
    assert_eq!(world.event(), Event::Up);
    let end = world.ended();
    world.kill_guardian();
    let agent = world.agent();
    until(|| !agent.lives());
    assert_eq!(aviflow_agent::read_ended(world.folder.path()), Some(end));
}
