//! The system calls that the standard library does not offer.
//!
//! The only module of the workspace with unsafe code. Every function is safe
//! to call from one thread; agent and guardian have no other. Nothing in here decides
//! anything.

#![expect(unsafe_code, reason = "fork, prctl, signalfd, waitpid and non-blocking sockets have no safe form in std")]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::{mem, ptr};

/// A process id.
pub type Pid = libc::pid_t;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 + the signal.
    pub code: i32,
    /// The signal, if one ended it.
    pub signal: Option<i32>,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// This process.
#[must_use]
pub fn getpid() -> Pid {
    // SAFETY: has no preconditions.
    unsafe { libc::getpid() }
}

/// Milliseconds on a clock that never goes back, and that also counts while the machine sleeps.
#[must_use]
pub fn uptime_ms() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call. It fails for unknown clocks only.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1000 + time.tv_nsec.unsigned_abs() / 1_000_000
}

/// Sends a signal to a process, or with a negative id to a process group. A process that is gone is no error.
pub fn kill(pid: Pid, signal: i32) {
    // A mistake here must never reach every process of the user.
    if pid != 0 && pid != -1 {
        // SAFETY: has no preconditions.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Sends a signal to the main thread of a process.
pub fn kill_main_thread(pid: Pid, signal: i32) {
    if pid > 0 {
        // SAFETY: has no preconditions; a thread that is gone is an error that is passed over.
        unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, signal) };
    }
}

/// Orphans among the descendants become children of this process.
///
/// # Errors
/// If the kernel refuses.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: this option takes one integer.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// Leaves the session and process group of whoever started this process, and ignores SIGHUP: a terminal's
/// Ctrl-C or its closing must not reach a training. Best effort: a leader is in a session of its own already.
pub fn leave_terminal() {
    // SAFETY: both have no preconditions.
    unsafe {
        libc::setsid();
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
    }
}

/// The next child that ended, if one did.
pub fn reap() -> Option<(Pid, Exit)> {
    wait(-1, libc::WNOHANG)
}

/// Whether this process has a child, dead or alive.
#[must_use]
pub fn has_child() -> bool {
    // SAFETY: all zeroes is a valid value, which outlives the call.
    unsafe {
        let mut info = mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_ALL, 0, &raw mut info, flags) == 0
    }
}

/// Waits for the end of a child, whichever it is.
pub fn reap_next() -> Option<(Pid, Exit)> {
    wait(-1, 0)
}

/// Waits for the end of one child.
pub fn reap_one(pid: Pid) -> Option<Exit> {
    wait(pid, 0).map(|(_, exit)| exit)
}

fn wait(pid: Pid, flags: libc::c_int) -> Option<(Pid, Exit)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        let found = unsafe { libc::waitpid(pid, &raw mut status, flags) };
        if found > 0 {
            let exit = if libc::WIFSIGNALED(status) {
                let signal = libc::WTERMSIG(status);
                Exit { code: 128 + signal, signal: Some(signal) }
            } else {
                Exit { code: libc::WEXITSTATUS(status), signal: None }
            };
            return Some((found, exit));
        }
        if found == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Makes reads and writes on a descriptor return instead of waiting.
///
/// # Errors
/// If the descriptor cannot do that.
pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, as it is borrowed.
    unsafe {
        let flags = check(libc::fcntl(fd, libc::F_GETFL))?;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)).map(drop)
    }
}

/// Asks for a larger pipe, so that a writer seldom waits for a busy agent. Best effort.
pub fn enlarge_pipe(fd: impl AsFd, bytes: i32) {
    // SAFETY: the descriptor is open, as it is borrowed.
    unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_SETPIPE_SZ, bytes) };
}

/// Takes over a descriptor that was inherited, and keeps it from every child.
///
/// # Errors
/// If no such descriptor is open.
pub fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    if fd <= 2 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: fcntl on a number that is no descriptor fails with EBADF.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: it is open, and the caller was told its number in order to own it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Files that a process may have open, where the system allows it. More would slow down programs that
/// close every number.
const FILES: libc::rlim_t = 1 << 16;

/// Raises the soft limit of open files, for this process and its children. Best effort; gives the limit.
pub fn raise_file_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return 0;
        }
        let wanted = limit.rlim_max.min(FILES);
        if limit.rlim_cur < wanted {
            let raised = libc::rlimit { rlim_cur: wanted, ..limit };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) == 0 {
                return wanted;
            }
        }
    }
    limit.rlim_cur
}

/// Bytes of the file system of a folder that are free to those who are not root, and all that it has.
///
/// # Errors
/// If the folder cannot be looked at. May wait for ever where the file system hangs.
pub fn space(folder: &Path) -> io::Result<(u64, u64)> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero, both outlive the call, and zeros are a valid `statvfs`.
    let found = unsafe {
        let mut found: libc::statvfs = mem::zeroed();
        check(libc::statvfs(path.as_ptr(), &raw mut found))?;
        found
    };
    Ok((found.f_bavail.saturating_mul(found.f_frsize), found.f_blocks.saturating_mul(found.f_frsize)))
}

/// Locks an open file for as long as its description is open anywhere.
///
/// # Errors
/// `WouldBlock` if somebody else holds the lock.
pub fn lock(fd: impl AsFd) -> io::Result<()> {
    // SAFETY: the descriptor is open, as it is borrowed.
    check(unsafe { libc::flock(fd.as_fd().as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }).map(drop)
}

/// A pipe, both ends closed on exec.
///
/// # Errors
/// If there are too many descriptors.
pub fn pipe() -> io::Result<(File, File)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors, which are new and owned by nobody else.
    unsafe {
        check(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC))?;
        Ok((File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])))
    }
}

/// A file in memory that holds `bytes` and is read from its start.
///
/// # Errors
/// If there is no memory for it.
pub fn memory_file(bytes: &[u8]) -> io::Result<File> {
    // SAFETY: the name is a C string; the descriptor is new.
    let mut file = unsafe { File::from_raw_fd(check(libc::memfd_create(c"stdin".as_ptr(), libc::MFD_CLOEXEC))?) };
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

const SIGNALS_RESET: [libc::c_int; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGPIPE,
    libc::SIGCHLD,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Makes a command start in a session of its own, with usual signals, and freeze when this process dies.
pub fn isolate(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        // SAFETY: runs between fork and exec, and calls only what is async-signal-safe: no allocation, no lock.
        unsafe {
            check(libc::setsid())?;
            // Frozen, not killed: whoever cleans up still finds what descends from it.
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGSTOP, 0, 0, 0))?;
            // The parent may have died before the line above: then nobody would ever send the signal.
            if libc::getppid() != parent {
                libc::_exit(125);
            }
            for signal in SIGNALS_RESET {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none = mem::zeroed();
            libc::sigemptyset(&raw mut none);
            check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()))?;
        }
        Ok(())
    };
    // SAFETY: see the closure.
    unsafe { command.pre_exec(prepare) };
}

/// Makes the terminal that a command has as its standard input that of its session. After [`isolate`], which makes
/// the session.
pub fn own_terminal(command: &mut Command) {
    // SAFETY: runs between fork and exec, and calls only what is async-signal-safe.
    let prepare = || check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) }).map(drop);
    // SAFETY: see the closure.
    unsafe { command.pre_exec(prepare) };
}

/// A new terminal: the end of whoever shows it, which never waits, and the end of the programs on it.
///
/// # Errors
/// If there are too many terminals, or `/dev/pts` is not mounted.
pub fn terminal(columns: u16, rows: u16) -> io::Result<(File, File)> {
    let (mut shown, mut used) = (0, 0);
    let size = window(columns, rows);
    // SAFETY: all pointers are null or outlive the call; the descriptors are new and owned by nobody else.
    let (shown, used) = unsafe {
        check(libc::openpty(&raw mut shown, &raw mut used, ptr::null_mut(), ptr::null_mut(), &raw const size))?;
        (File::from_raw_fd(shown), File::from_raw_fd(used))
    };
    for end in [&shown, &used] {
        // SAFETY: the descriptor is open, as it is borrowed.
        check(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    set_nonblocking(&shown)?;
    Ok((shown, used))
}

/// Gives a terminal another size; its programs hear of it (SIGWINCH). Best effort.
pub fn resize_terminal(terminal: &File, columns: u16, rows: u16) {
    let size = window(columns, rows);
    // SAFETY: the descriptor is open, as it is borrowed, and `size` outlives the call.
    unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
}

const fn window(columns: u16, rows: u16) -> libc::winsize {
    libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Makes a child that goes on from here; gives its process to the parent, and nothing to the child.
///
/// # Errors
/// If no process can be made.
pub fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: the process has one thread, so the child finds every lock free and may do what any process may.
    let pid = check(unsafe { libc::fork() })?;
    Ok((pid > 0).then_some(pid))
}

/// Names this process in `ps` and `top`. Best effort.
pub fn set_name(name: &CStr) {
    // SAFETY: this option takes a string, of which it copies 15 bytes at most.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) };
}

/// If this process is frozen when its parent dies, it goes on. Best effort.
pub fn wake_without_parent() {
    // SAFETY: this option takes one integer.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT, 0, 0, 0) };
}

/// Ends this process as another ended: by the same signal, or else gives the code to end with.
#[must_use]
pub fn end_like(exit: Exit) -> u8 {
    if let Some(signal) = exit.signal {
        // SAFETY: all structures outlive the calls; the signal's number comes from the kernel.
        unsafe {
            // The other one's memory is of interest, not this one's.
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
            libc::signal(signal, libc::SIG_DFL);
            let mut set = mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::kill(libc::getpid(), signal);
            libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
        }
        // Process 1 of a container is not ended by its own signals.
    }
    u8::try_from(exit.code).unwrap_or(u8::MAX)
}

/// SIGCHLD, SIGTERM and SIGINT as something to poll.
pub struct Signals(File);

impl Signals {
    /// Blocks the signals and opens a descriptor that reports them. Children must unblock them ([`isolate`]).
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the set is initialised by sigemptyset; the descriptor is new.
        unsafe {
            let mut set = mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT] {
                libc::sigaddset(&raw mut set, signal);
            }
            check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()))?;
            let fd = check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
            Ok(Self(File::from_raw_fd(fd)))
        }
    }

    /// The next signal that waits.
    pub fn take(&mut self) -> Option<i32> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        match self.0.read(&mut info) {
            // The number is the first field.
            Ok(n) if n == info.len() => Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])),
            _ => None,
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A set of descriptors to wait for.
#[derive(Default)]
pub struct Poll {
    fds: Vec<libc::pollfd>,
}

impl Poll {
    /// Adds a descriptor; gives its place for [`Poll::ready`].
    pub fn add(&mut self, fd: impl AsFd, read: bool, write: bool) -> usize {
        let events = if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
        self.fds.push(libc::pollfd { fd: fd.as_fd().as_raw_fd(), events, revents: 0 });
        self.fds.len() - 1
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.fds.clear();
    }

    /// Waits until one is ready or the time is over.
    pub fn wait(&mut self, timeout_ms: Option<u64>) {
        let timeout = timeout_ms.map_or(-1, |ms| i32::try_from(ms).unwrap_or(i32::MAX));
        // SAFETY: the pointer and the length are of one vector.
        let found = unsafe { libc::poll(self.fds.as_mut_ptr(), self.fds.len() as libc::nfds_t, timeout) };
        if found < 0 {
            self.fds.iter_mut().for_each(|fd| fd.revents = 0);
        }
    }

    /// Whether the descriptor at `place` is readable, writable or closed.
    #[must_use]
    pub fn ready(&self, place: usize) -> bool {
        self.fds.get(place).is_some_and(|fd| fd.revents != 0)
    }
}

/// Begins to connect to a Unix socket; never waits.
///
/// # Errors
/// If nobody listens there, or nobody can be reached now.
pub fn connect_unix(path: &Path) -> io::Result<OwnedFd> {
    // A socket's address holds 107 bytes; a longer path is reached through its open folder.
    let folder;
    let short;
    let path = if path.as_os_str().len() > 107 {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        };
        folder = File::open(parent)?;
        short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        &short
    } else {
        path
    };
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all zeroes is a valid address; the path fits with its NUL, which is checked.
    unsafe {
        let mut address: libc::sockaddr_un = mem::zeroed();
        if bytes.len() >= address.sun_path.len() {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        ptr::copy_nonoverlapping(bytes.as_ptr(), address.sun_path.as_mut_ptr().cast(), bytes.len());
        let socket = socket(libc::AF_UNIX)?;
        check(libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_un>() as libc::socklen_t,
        ))?;
        Ok(socket)
    }
}

/// Begins to connect over TCP; never waits. The first failing read or write tells if it did not work.
///
/// # Errors
/// If it is certain at once that nobody can be reached.
pub fn connect_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let domain = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let socket = socket(domain)?;
    // A control plane whose node vanished must be noticed: nothing else would close the connection.
    for (level, option, value) in [
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 25_000),
    ] {
        set_option(&socket, level, option, value)?;
    }
    let result = with_address(address, |pointer, length| {
        // SAFETY: `with_address` gives a valid address and its length.
        check(unsafe { libc::connect(socket.as_raw_fd(), pointer, length) })
    });
    match result {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(socket),
    }
}

/// Holds a port on all addresses without listening: connections are refused until its user listens.
///
/// # Errors
/// If somebody uses it.
pub fn hold_port(port: u16) -> io::Result<OwnedFd> {
    let socket = socket(libc::AF_INET)?;
    with_address(SocketAddr::from(([0, 0, 0, 0], port)), |pointer, length| {
        // SAFETY: `with_address` gives a valid address and its length.
        check(unsafe { libc::bind(socket.as_raw_fd(), pointer, length) })
    })?;
    Ok(socket)
}

fn socket(domain: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the descriptor is new.
    unsafe { Ok(OwnedFd::from_raw_fd(check(libc::socket(domain, kind, 0))?)) }
}

fn set_option(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` outlives the call and has the given size.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) }).map(drop)
}

fn with_address<T>(address: SocketAddr, call: impl FnOnce(*const libc::sockaddr, libc::socklen_t) -> T) -> T {
    match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            call((&raw const raw).cast(), size_of_val(&raw) as libc::socklen_t)
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            call((&raw const raw).cast(), size_of_val(&raw) as libc::socklen_t)
        }
    }
}
