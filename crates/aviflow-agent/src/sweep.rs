//! Nothing of a worker outlives it: finding its processes, and ending them.
//!
//! Every process of a worker descends from its agent, and the agent from its
//! [guardian](crate::guardian). Both adopt orphans, so that neither `setsid`, nor
//! a double fork, nor an environment that was overwritten hides a process from
//! them. Whoever of the two outlives the other ends all the others
//! ([`end_children`]), and the kernel tells when nobody is left.
//!
//! Every process also carries [`MARK`] in its environment, which it passes on. By
//! it the control plane finds processes where agent and guardian were killed at
//! one instant ([`sweep`]), with what descends from them: ranks freeze when their
//! agent dies, so that their families stay whole. Only there a process escapes
//! that has all three: a session of its own, no mark, and no living ancestor with
//! one.

use crate::protocol::{MARK, WorkerSpec};
use crate::sys::{self, Pid};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::str::SplitAsciiWhitespace;
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
pub fn processes(mark: &str, roots: &[Pid], except: &[Pid]) -> Vec<Process> {
    look(mark, roots, except).0
}

/// The living processes of a worker, and whether others may have been overlooked, as there were too many open
/// files or too little memory.
///
/// Those that carry the mark come first, then their descendants and those of
/// `roots`. `except` never belong to it, nor what only descends from them.
#[must_use]
pub fn look(mark: &str, roots: &[Pid], except: &[Pid]) -> (Vec<Process>, bool) {
    let entry = format!("{MARK}={mark}");
    let (all, mut unsure) = stats();
    let carries = |process: &Process| match fs::read(format!("/proc/{}/environ", process.pid)) {
        Ok(environment) => environment.split(|b| *b == 0).any(|of| of == entry.as_bytes()),
        Err(e) => {
            unsure |= overlooks(&e);
            false
        }
    };
    let all = all.into_iter().filter(|p| !except.contains(&p.pid));
    let (found, others): (Vec<Process>, Vec<Process>) = all.partition(carries);
    (families(found, others, roots), unsure)
}

/// The processes of `found`, and those of the others that descend from them or from `roots`.
fn families(mut found: Vec<Process>, mut others: Vec<Process>, roots: &[Pid]) -> Vec<Process> {
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
            return found;
        }
    }
}

/// The living processes that descend from `root`, and whether others may have been overlooked.
///
/// Never waits for any of them, as nothing of their memory is read: see [`crate::stacks`]. For an agent that lives,
/// these are all, but where one began another while it was looked for.
#[must_use]
pub fn below(root: Pid) -> (Vec<Process>, bool) {
    let (mut all, unsure) = stats();
    all.retain(|process| process.pid != root);
    (families(Vec::new(), all, &[root]), unsure)
}

/// All living processes, and whether others may have been overlooked.
fn stats() -> (Vec<Process>, bool) {
    let entries = fs::read_dir("/proc");
    let mut unsure = entries.is_err();
    let pids = entries.into_iter().flatten().flatten();
    let mut found = Vec::new();
    for pid in pids.filter_map(|e| e.file_name().to_str().and_then(|name| name.parse().ok())) {
        match fs::read(format!("/proc/{pid}/stat")) {
            Ok(stat) => found.extend(parse(pid, &String::from_utf8_lossy(&stat))),
            Err(e) => unsure |= overlooks(&e),
        }
    }
    (found, unsure)
}

/// Whether an error says nothing of the process that was to be looked at.
fn overlooks(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// A process that lives. A zombie does not, unless only its first thread has ended.
fn parse(pid: Pid, stat: &str) -> Option<Process> {
    let mut fields = fields(stat)?;
    let dead = matches!(fields.next()?, "Z" | "X" | "x");
    let mut number = || fields.next()?.parse().ok();
    let process = Process { pid, parent: number()?, group: number()?, session: number()? };
    let threads = fields.nth(13)?;
    (!dead || !matches!(threads, "0" | "1")).then_some(process)
}

/// When a living process started, in clock ticks since the machine did: with its id, this names a process for good.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse(pid.cast_signed(), &stat)?;
    fields(&stat)?.nth(19)?.parse().ok()
}

/// The fields of a process's or thread's `stat` (proc(5)) from the third on, which is its state.
pub(crate) fn fields(stat: &str) -> Option<SplitAsciiWhitespace<'_>> {
    // The name is in parentheses and may hold anything, parentheses too.
    Some(stat[stat.rfind(')')? + 1..].split_ascii_whitespace())
}

/// Kills every process that carries a worker's mark, with its descendants, and gives their number, which is not
/// 0 either while any may have been overlooked.
///
/// For the control plane, once it found the agent dead: to be repeated until it
/// gives 0, as a process may take a while to die. A living agent must not be
/// helped like this.
#[must_use]
pub fn sweep(mark: &str) -> usize {
    let (found, unsure) = look(mark, &[], &[sys::getpid()]);
    kill(&found);
    found.len() + usize::from(unsure)
}

/// Kills processes, those with the mark last: should this process be killed meanwhile, they still lead to the
/// others.
fn kill(found: &[Process]) {
    for process in found.iter().rev() {
        sys::kill(process.pid, libc::SIGKILL);
    }
}

/// Kills all that descends from this process, which adopts orphans, until nothing is left of it.
pub fn end_children(mark: &str) {
    let me = sys::getpid();
    while sys::has_child() {
        let (found, unsure) = look(mark, &[me], &[me]);
        kill(&found);
        if unsure {
            // A child may not have been found: its end must not be waited for.
            std::thread::sleep(Duration::from_millis(100));
        } else {
            // Children that were there before the look were all found, or have ended.
            let _ = sys::reap_next();
        }
        while sys::reap().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
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
    fn a_process_lives_as_long_as_one_of_its_threads() {
        let program = "import ctypes, threading, time\n\
                       threading.Thread(target=time.sleep, args=(1000,)).start()\n\
                       ctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3").args(["-c", program]).spawn().expect("python3");
        let pid = child.id();
        let stat = || fs::read_to_string(format!("/proc/{pid}/stat")).expect("its state");
        while !stat().contains(") Z ") {
            std::thread::yield_now();
        }
        let living =
            || processes("none", &[sys::getpid()], &[sys::getpid()]).iter().any(|p| p.pid.cast_unsigned() == pid);
        assert!(living() && start_time(pid).is_some());
        child.kill().expect("killed");
        while living() {
            std::thread::yield_now();
        }
        assert_eq!(start_time(pid), None);
        child.wait().expect("an end");
    }

    #[test]
    fn what_descends_from_a_process_is_found_without_its_environment() {
        let mut child = Command::new("bash")
            .args(["-c", "env -i setsid sleep 1000 & echo $!; exec sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("bash");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let below_child = below(child.id().cast_signed()).0;
        let pids: Vec<Pid> = below_child.iter().map(|process| process.pid).collect();
        let grandchild: Pid = line.trim().parse().expect("a process");
        assert_eq!(pids, [grandchild]);
        assert!(below(sys::getpid()).0.iter().any(|process| process.pid == grandchild));
        sys::kill(grandchild, libc::SIGKILL);
        child.kill().expect("killed");
        child.wait().expect("an end");
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
