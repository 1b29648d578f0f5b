//! What every process of a worker is doing ([`crate::protocol::stacks`]), without a debugger.
//!
//! Python tells its stacks itself. The hooks' `sitecustomize` opens a file of which nothing is left on disk, named
//! [`FILE`]`PID-THREAD`, and registers `faulthandler` to write there on [`SIGNAL`]. That handler runs in C, needs no
//! lock of the interpreter, and so also tells where a process hangs. The kernel says the rest, in `/proc`.
//!
//! Invariant: a process is signalled only if three things hold that no other process has: one of its descriptors is
//! such a file, the name is its own process id (a child of a fork has its parent's until it has registered
//! itself), and the kernel says that it catches the signal. Between looking and the signal it may still become
//! another program, for some microseconds.
//!
//! A dump is complete once the file has grown, the signal does not wait any more, and no thread blocks it that did
//! not before: while a handler runs, its thread does.
//!
//! Some files of a process that hangs in a driver cannot be read before it goes on ([`careful`]), so all this is done
//! beside the agent's loop ([`collect`]), once at a time.

use crate::protocol::stacks::{ProcessStacks, WorkerStacks};
use crate::sweep::Process;
use crate::sys::{self, Pid};
use careful::Hanging;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

mod careful;
pub mod collect;
mod kernel;
mod python;

/// The signal on which Python tells its stacks: one of those for applications, that no common library takes.
pub const SIGNAL: i32 = 58;

/// How the name of the file begins into which it does.
pub const FILE: &str = "aviflow-stacks-";

/// How long processes have for it, in milliseconds. A process that waits for a device does not answer.
const LIMIT_MS: u64 = 2000;

/// Between two looks whether they have, in milliseconds.
const LOOK_MS: u64 = 10;

/// Processes that are told at most.
const MOST: usize = 256;

/// Bytes of a process's stacks that are read. Python itself says at most 100 frames.
const DUMP: u64 = 256 << 10;

/// Bytes of a command line that are told.
const COMMAND: usize = 300;

/// Why nothing is known of a process but what the kernel says of its threads.
const HANGS: &str = "its variables and command cannot be read: one of its threads hangs in the kernel, as in a driver";

/// A process that was asked for its stacks.
struct Asked {
    /// Its file, as the process has it open, and where that leads.
    file: PathBuf,
    target: PathBuf,
    /// The main thread, as it is named in what it says.
    main: String,
    /// Bytes that were in the file before.
    before: u64,
    /// Its threads that blocked the signal before.
    blocked: BTreeSet<Pid>,
}

/// The stacks of a worker while they are collected.
struct Dump {
    processes: BTreeMap<Pid, ProcessStacks>,
    asked: BTreeMap<Pid, Asked>,
    omitted: usize,
    /// The worker's folder, to which files are told relative.
    folder: PathBuf,
    until: u64,
}

impl Dump {
    /// Asks these processes for their stacks at `now`, of one rank alone if one is named.
    fn begin(found: &[Process], rank: Option<u32>, folder: &Path, hanging: &Hanging, now: u64) -> Dump {
        let read = hanging.read(found.iter().map(|p| p.pid).collect(), |pid| (ranks_of(pid), command(pid)));
        let ranks = |process: &Process| read.get(&process.pid).map(|(ranks, _)| *ranks).unwrap_or_default();
        let variables: Vec<(Process, [Option<u32>; 2])> = found.iter().map(|p| (*p, ranks(p))).collect();
        // Where a launcher such as torchrun gives numbers, it has none itself.
        let launched = variables.iter().any(|(_, [rank, _])| rank.is_some());
        let rank_of = |[given, own]: [Option<u32>; 2]| if launched { given } else { own };
        let all: BTreeMap<Pid, (Process, Option<u32>)> =
            variables.into_iter().map(|(process, ranks)| (process.pid, (process, rank_of(ranks)))).collect();
        // Whose variables cannot be read may be of any rank, and is what is looked for.
        let unread = |process: &Process| !read.contains_key(&process.pid);
        let wanted = all.values().filter(|(process, of)| rank.is_none() || *of == rank || unread(process));
        let mut dump = Dump {
            processes: BTreeMap::new(),
            asked: BTreeMap::new(),
            omitted: wanted.clone().count().saturating_sub(MOST),
            folder: folder.to_owned(),
            until: now + LIMIT_MS,
        };
        for (process, rank) in wanted.take(MOST) {
            let main = rank.is_some() && all.get(&process.parent).is_none_or(|(_, parents)| parents != rank);
            let told = ProcessStacks {
                pid: process.pid.cast_unsigned(),
                parent: process.parent.cast_unsigned(),
                rank: *rank,
                main,
                command: read.get(&process.pid).map(|(_, command)| command.clone()).unwrap_or_default(),
                note: unread(process).then(|| HANGS.to_owned()),
                ..ProcessStacks::default()
            };
            dump.processes.insert(process.pid, told);
        }
        // Before the signal, which wakes a thread that waits.
        for (pid, told) in &mut dump.processes {
            told.threads = kernel::threads(*pid);
        }
        for (pid, told) in &mut dump.processes {
            match registered(*pid) {
                // Looked at last: every moment between this and the signal is one in which it may become another.
                Some(asked) if asked.is_still_there() && kernel::catches(*pid, SIGNAL) => {
                    sys::kill_main_thread(*pid, SIGNAL);
                    dump.asked.insert(*pid, asked);
                }
                Some(_) | None => {
                    told.note.get_or_insert_with(|| silent(*pid).to_owned());
                }
            }
        }
        dump
    }

    /// Looks who has answered; the stacks once nobody is waited for any more.
    fn look(&mut self, now: u64) -> Option<WorkerStacks> {
        let late = now >= self.until;
        let (processes, folder) = (&mut self.processes, &self.folder);
        self.asked.retain(|pid, asked| {
            let Some(told) = processes.get_mut(pid) else { return false };
            let complete = asked.is_complete(*pid);
            let said = if complete || late { asked.read() } else { None };
            match said {
                Some(text) => {
                    told.python = python::parse(&text, &asked.main, folder);
                    told.signature = python::signature(&told.python);
                    if !complete {
                        told.note = Some(format!("what it said within {} s may be cut off", LIMIT_MS / 1000));
                    }
                }
                None if complete || late => {
                    let mute = || kernel::mute(&told.threads, LIMIT_MS / 1000);
                    told.note.get_or_insert_with(mute);
                }
                None => return true,
            }
            false
        });
        if !self.asked.is_empty() {
            return None;
        }
        let processes = std::mem::take(&mut self.processes).into_values().collect();
        Some(WorkerStacks { processes, omitted: self.omitted })
    }
}

impl Asked {
    fn is_still_there(&self) -> bool {
        fs::read_link(&self.file).is_ok_and(|target| target == self.target)
    }

    fn is_complete(&self, pid: Pid) -> bool {
        let Ok(meta) = fs::metadata(&self.file) else {
            // It has ended, or become another program.
            return true;
        };
        meta.len() > self.before
            && !kernel::is_pending(pid, SIGNAL)
            && kernel::blocking(pid, SIGNAL).is_subset(&self.blocked)
    }

    /// What it said; none if that is nothing.
    fn read(&self) -> Option<String> {
        let mut file = File::open(&self.file).ok()?;
        file.seek(SeekFrom::Start(self.before)).ok()?;
        let mut bytes = Vec::new();
        file.take(DUMP).read_to_end(&mut bytes).ok()?;
        // Nobody reads it a second time.
        let _ = File::options().write(true).open(&self.file).and_then(|file| file.set_len(0));
        (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// How to ask a process for its stacks, if it has registered itself.
fn registered(pid: Pid) -> Option<Asked> {
    let own = format!("{FILE}{pid}-");
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let name = target.to_string_lossy();
        // `/memfd:NAME (deleted)`, or a file of the temporary folder that was removed at once.
        let name = name.rsplit(['/', ':']).next().unwrap_or_default();
        let Some(rest) = name.strip_prefix(&own) else { continue };
        let main: String = rest.chars().take_while(char::is_ascii_hexdigit).collect();
        let file = entry.path();
        let before = fs::metadata(&file).ok()?.len();
        return Some(Asked { file, target, main, before, blocked: kernel::blocking(pid, SIGNAL) });
    }
    None
}

/// Why a process was not asked.
fn silent(pid: Pid) -> &'static str {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with("python") || name.starts_with("pypy") {
        "its Python tells no stacks: it was started with -I, -E or -S, or without the job's PYTHONPATH"
    } else {
        "no Python"
    }
}

/// The rank of a process by its variables: `RANK`, and that of what the agent started.
fn ranks_of(pid: Pid) -> [Option<u32>; 2] {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    ["RANK=", "AVIFLOW_RANK="].map(|name| {
        let mut entries = environment.split(|b| *b == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
        entries.find_map(|entry| entry.strip_prefix(name)?.parse().ok())
    })
}

fn command(pid: Pid) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let mut words: String = text.trim_end_matches('\0').chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if words.len() > COMMAND {
        words.truncate((0..=COMMAND).rev().find(|end| words.is_char_boundary(*end)).unwrap_or(0));
        words.push('…');
    }
    words
}

#[cfg(test)]
mod tests;
