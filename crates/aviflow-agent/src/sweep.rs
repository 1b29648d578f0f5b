//! Nothing of a worker outlives it: finding its processes, and the keeper.
//!
//! Every process of a worker carries [`MARK`] in its environment, which it
//! passes on. Found are: who carries the mark, whoever descends from such a
//! process or from the agent (which adopts orphans), and who is in a session of
//! a rank. So neither `setsid`, nor a double fork, nor an environment that was
//! overwritten hides a process while its agent lives. After an agent's sudden death
//! a process escapes only if it has all three: a session of its own, no mark, and
//! no living ancestor with one.
//!
//! The keeper is a child of the agent that waits for its death, however sudden,
//! and then kills until nothing is left.

use crate::protocol::{MARK, WorkerSpec};
use crate::sys::{self, Pid};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::time::Duration;

/// The mark of a worker's processes: `JOBID.ATTEMPT.WORKER@` and 16 digits of the token's SHA-256.
#[must_use]
pub fn mark(spec: &WorkerSpec) -> String {
    let hash: String = Sha256::digest(spec.token.as_bytes()).iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("{}.{}.{}@{hash}", spec.job_id, spec.attempt, spec.worker)
}

/// A living process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: Pid,
    /// Its parent.
    pub parent: Pid,
    /// Its process group.
    pub group: Pid,
    /// Its session.
    pub session: Pid,
}

/// The living processes of a worker, as far as they could be looked at: see [`look`].
#[must_use]
pub fn processes(mark: &str, roots: &[Pid], sessions: &BTreeSet<Pid>, except: &[Pid]) -> Vec<Process> {
    look(mark, roots, sessions, except).0
}

/// The living processes of a worker, and whether others may have been overlooked, as there were too many open
/// files or too little memory.
///
/// `roots` and their descendants belong to it, as do the members of `sessions`;
/// `except` never do, nor what only descends from them.
#[must_use]
pub fn look(mark: &str, roots: &[Pid], sessions: &BTreeSet<Pid>, except: &[Pid]) -> (Vec<Process>, bool) {
    let entry = format!("{MARK}={mark}");
    let mut others = Vec::new();
    let mut found = Vec::new();
    let entries = fs::read_dir("/proc");
    let mut unsure = entries.is_err();
    let pids = entries.into_iter().flatten().flatten();
    for pid in pids.filter_map(|e| e.file_name().to_str().and_then(|name| name.parse().ok())) {
        let read = |name: &str, unsure: &mut bool| {
            fs::read(format!("/proc/{pid}/{name}")).inspect_err(|e| *unsure |= overlooks(e)).ok()
        };
        let process = read("stat", &mut unsure).and_then(|stat| parse(pid, &String::from_utf8_lossy(&stat)));
        let Some(process) = process.filter(|p| !except.contains(&p.pid)) else { continue };
        let carries =
            |environment: Vec<u8>| environment.split(|b| *b == 0).any(|entry_of| entry_of == entry.as_bytes());
        let ours = sessions.contains(&process.session) || read("environ", &mut unsure).is_some_and(carries);
        if ours { found.push(process) } else { others.push(process) }
    }
    let mut family: BTreeSet<Pid> = found.iter().map(|p| p.pid).chain(roots.iter().copied()).collect();
    loop {
        let before = found.len();
        others.retain(|process| {
            let ours = family.contains(&process.parent) || found.iter().any(|f| f.pid == process.session);
            if ours {
                family.insert(process.pid);
                found.push(*process);
            }
            !ours
        });
        if found.len() == before {
            found.retain(|p| !roots.contains(&p.pid));
            return (found, unsure);
        }
    }
}

/// Whether an error says nothing of the process that was to be looked at.
fn overlooks(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// A process that lives; a zombie does not.
fn status(pid: Pid) -> Option<Process> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(pid: Pid, stat: &str) -> Option<Process> {
    // The name is in parentheses and may hold anything, parentheses too.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    let mut number = || fields.next()?.parse().ok();
    Some(Process { pid, parent: number()?, group: number()?, session: number()? })
}

/// Whether anybody is in a session. Its number is free for others once nobody is.
#[must_use]
pub fn session_lives(session: Pid) -> bool {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter_map(status).any(|p| p.session == session)
}

/// When a process started, in clock ticks since the machine did: with its id, this names a process for good.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Kills every process that carries a worker's mark, with its descendants, and gives their number, which is not
/// 0 either while any may have been overlooked.
///
/// For the control plane, once it found the agent dead: to be repeated until it
/// gives 0, as a process may take a while to die. A living agent must not be
/// helped like this.
#[must_use]
pub fn sweep(mark: &str) -> usize {
    sweep_with(mark, &BTreeSet::new())
}

fn sweep_with(mark: &str, sessions: &BTreeSet<Pid>) -> usize {
    let (found, unsure) = look(mark, &[], sessions, &[sys::getpid()]);
    for process in &found {
        sys::kill(process.pid, libc::SIGKILL);
    }
    found.len() + usize::from(unsure)
}

/// The process that outlives the agent, for a moment.
#[derive(Debug)]
pub struct Keeper {
    pid: Pid,
    pipe: fs::File,
}

impl Keeper {
    /// Starts one for a mark, that holds a lock for as long as it lives.
    ///
    /// Waits for an earlier keeper that holds the lock: it still kills.
    ///
    /// # Errors
    /// If no process can be made, or no lock.
    pub fn start(mark: &str, lock: &Path) -> io::Result<Self> {
        // Taken before it begins to live: whoever finds the agent dead must find the lock taken.
        let lock = fs::File::options().write(true).create(true).truncate(false).open(lock)?;
        lock.lock()?;
        let (pid, pipe) = sys::fork_watcher(c"aviflow-keeper", lock.into(), |pipe| watch(pipe, mark))?;
        Ok(Self { pid, pipe })
    }

    /// Its process.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// Tells it of a session of a rank, which it kills too, or that this is over.
    pub fn session(&mut self, session: Pid, over: bool) {
        let sign = if over { '-' } else { '+' };
        let _ = self.pipe.write_all(format!("{sign}{session}\n").as_bytes());
    }

    /// Sends it home: nothing is left to be killed.
    pub fn dismiss(mut self) {
        let _ = self.pipe.write_all(b"q\n");
        drop(self.pipe);
        let _ = sys::reap_one(self.pid);
    }
}

fn watch(pipe: fs::File, mark: &str) {
    let mut sessions = BTreeSet::new();
    for line in BufReader::new(pipe).lines().map_while(Result::ok) {
        let (sign, number) = line.split_at(line.len().min(1));
        match (sign, number.parse()) {
            ("q", _) => return,
            ("+", Ok(session)) => drop(sessions.insert(session)),
            ("-", Ok(session)) => drop(sessions.remove(&session)),
            _ => {}
        }
    }
    // A process may fork while it is looked for: only two empty looks in a row count.
    let mut empty = 0;
    let mut pause = 1;
    while empty < 2 {
        if sweep_with(mark, &sessions) == 0 {
            empty += 1;
        } else {
            empty = 0;
            std::thread::sleep(Duration::from_millis(pause));
            pause = (pause * 2).min(100);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_mark_names_the_worker_and_hides_the_token() {
        let mark = mark(&crate::wiring::tests::spec());
        assert!(mark.starts_with("12.3.1@") && mark.len() == 7 + 16 && !mark.contains("secret"), "{mark}");
    }

    #[test]
    fn marked_processes_and_their_unmarked_children_are_swept() {
        let mark = format!("test.{}", std::process::id());
        let mut child = Command::new("bash")
            .args(["-c", "env -i setsid sleep 1000 & echo up; exec sleep 1000"])
            .env(MARK, &mark)
            .stdout(Stdio::piped())
            .spawn()
            .expect("bash");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut line).expect("a line");
        assert!(sweep(&mark) >= 1);
        child.wait().expect("an end");
        while sweep(&mark) > 0 {}
        // The pipe is at its end once the last process is gone, the unmarked one too.
        line.clear();
        assert_eq!(out.read_line(&mut line).expect("the end"), 0);
    }

    #[test]
    fn other_marks_are_left_alone() {
        let mark = format!("alone.{}", std::process::id());
        let mut child = Command::new("sleep").arg("1000").env(MARK, &mark).spawn().expect("sleep");
        assert_eq!(sweep(&mark[..mark.len() - 1]), 0);
        assert_eq!(child.try_wait().expect("a state"), None);
        let _ = child.kill();
        let _ = child.wait();
    }
}
