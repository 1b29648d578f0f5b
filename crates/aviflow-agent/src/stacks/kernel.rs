//! What the kernel says about the threads of a process, in `/proc` (proc(5)).

use crate::protocol::stacks::Threads;
use crate::sweep;
use crate::sys::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Threads that are looked at: a process of a training has hundreds.
const MOST: usize = 500;

/// Kinds of threads that are told.
const KINDS: usize = 16;

/// Frames of the kernel that are told.
const FRAMES: usize = 12;

/// The threads of a process, those that do the same together: the main thread's first, then most first.
pub(super) fn threads(pid: Pid) -> Vec<Threads> {
    let mut kinds: BTreeMap<Threads, (usize, String, bool)> = BTreeMap::new();
    for tid in tids(pid).into_iter().take(MOST) {
        let Some((name, kind)) = thread(pid, tid) else { continue };
        let main = tid == pid;
        let seen = kinds.entry(kind).or_insert_with(|| (0, name.clone(), false));
        seen.0 += 1;
        if main {
            (seen.1, seen.2) = (name, true);
        }
    }
    let named = |(kind, (count, name, main))| Threads { count, name, main, ..kind };
    let mut threads: Vec<Threads> = kinds.into_iter().map(named).collect();
    threads.sort_by_key(|t| (!t.main, std::cmp::Reverse(t.count)));
    threads.truncate(KINDS);
    threads
}

/// Why a process that was asked said nothing within so many seconds.
pub(super) fn mute(threads: &[Threads], seconds: u64) -> String {
    let main = threads.iter().find(|t| t.main);
    match main.map(|t| (t.state.as_str(), t.wait.as_deref())) {
        Some(("D", wait)) => {
            let place = wait.map_or_else(String::new, |wait| format!(" ({wait})"));
            format!("no answer within {seconds} s: it waits in the kernel for a device or a file system{place}")
        }
        Some(("T" | "t", _)) => format!("no answer within {seconds} s: it is stopped, by SIGSTOP or a debugger"),
        Some(_) => format!("no answer within {seconds} s"),
        None => "it has ended meanwhile".to_owned(),
    }
}

fn tids(pid: Pid) -> Vec<Pid> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"));
    let names = entries.into_iter().flatten().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    names.collect()
}

/// The name of a thread, and what it does.
fn thread(pid: Pid, tid: Pid) -> Option<(String, Threads)> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{file}"));
    let stat = read("stat").ok()?;
    let state = sweep::fields(&stat)?.next()?.to_owned();
    let wait = read("wchan").ok().filter(|name| !name.is_empty() && name != "0");
    let call = read("syscall").ok().and_then(|text| call(&text));
    let kernel = read("stack").map(|text| kernel(&text)).unwrap_or_default();
    let name = read("comm").unwrap_or_default().trim().to_owned();
    Some((name, Threads { state, call, wait, kernel, ..Threads::default() }))
}

/// The system call of a line of `/proc/PID/syscall`: a number and its arguments, `running`, or -1 in none.
fn call(text: &str) -> Option<String> {
    let number: libc::c_long = text.split_ascii_whitespace().next()?.parse().ok().filter(|n| *n >= 0)?;
    let name = CALLS.iter().find(|(known, _)| *known == number).map(|(_, name)| (*name).to_owned());
    Some(name.unwrap_or_else(|| format!("syscall {number}")))
}

/// The functions of lines such as `[<0>] futex_wait_queue+0x60/0x90`.
fn kernel(text: &str) -> Vec<String> {
    let function = |line: &str| {
        let name = line.split_once("] ").map_or(line, |(_, name)| name);
        name.split('+').next().unwrap_or_default().trim().to_owned()
    };
    text.lines().map(function).filter(|name| !name.is_empty()).take(FRAMES).collect()
}

/// Whether a process handles a signal.
pub(super) fn catches(pid: Pid, signal: i32) -> bool {
    mask(&format!("/proc/{pid}/status"), "SigCgt:").is_some_and(|mask| mask & bit(signal) != 0)
}

/// Whether a signal was sent and is not handled yet.
pub(super) fn is_pending(pid: Pid, signal: i32) -> bool {
    mask(&format!("/proc/{pid}/status"), "ShdPnd:").is_some_and(|mask| mask & bit(signal) != 0)
}

/// The threads of a process that block a signal.
pub(super) fn blocking(pid: Pid, signal: i32) -> BTreeSet<Pid> {
    let blocks = |tid: &Pid| {
        mask(&format!("/proc/{pid}/task/{tid}/status"), "SigBlk:").is_some_and(|mask| mask & bit(signal) != 0)
    };
    tids(pid).into_iter().filter(blocks).collect()
}

fn mask(file: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    u64::from_str_radix(value.trim(), 16).ok()
}

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The system calls in which programs wait.
const CALLS: &[(libc::c_long, &str)] = &[
    (libc::SYS_futex, "futex"),
    (libc::SYS_read, "read"),
    (libc::SYS_write, "write"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_close, "close"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pselect6, "pselect6"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_recvmsg, "recvmsg"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_waitid, "waitid"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_munmap, "munmap"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_madvise, "madvise"),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait"),
    (libc::SYS_rt_sigsuspend, "rt_sigsuspend"),
    (libc::SYS_restart_syscall, "restart_syscall"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_pause, "pause"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_is_named() {
        let futex = format!("{} 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f3a\n", libc::SYS_futex);
        assert_eq!(call(&futex).as_deref(), Some("futex"));
        assert_eq!(call("99999 0x0").as_deref(), Some("syscall 99999"));
        for none in ["running\n", "-1 0x7ffd 0x7f3a\n", "", "\u{0}"] {
            assert_eq!(call(none), None, "{none:?}");
        }
    }

    #[test]
    fn the_kernel_s_stack_is_read() {
        let text = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] futex_wait+0x185/0x270\n\n";
        assert_eq!(kernel(text), ["futex_wait_queue", "futex_wait"]);
    }

    #[test]
    fn a_process_that_said_nothing_is_explained() {
        let main = |state: &str| Threads {
            main: true,
            state: state.into(),
            wait: Some("rpc_wait".into()),
            ..Threads::default()
        };
        let why = mute(&[main("D")], 2);
        assert_eq!(why, "no answer within 2 s: it waits in the kernel for a device or a file system (rpc_wait)");
        assert_eq!(mute(&[main("T")], 2), "no answer within 2 s: it is stopped, by SIGSTOP or a debugger");
        assert_eq!(mute(&[], 2), "it has ended meanwhile");
    }

    #[test]
    fn this_process_s_threads_are_seen() {
        let own = crate::sys::getpid();
        let found = threads(own);
        assert!(found[0].main && found.iter().map(|t| t.count).sum::<usize>() >= 2, "{found:?}");
        assert!(!catches(own, 63) && !is_pending(own, 63));
        assert!(threads(Pid::MAX).is_empty());
    }
}
