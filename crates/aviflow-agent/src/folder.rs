//! A worker's folder: the lock, the sign of life, the end, and a port.

use crate::protocol::{Ended, WorkerSpec, files};
use crate::sweep;
use crate::sys;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::SystemTime;

/// Names the descriptor of the lock that the control plane passes on.
pub const LOCK_FD: &str = "AVIFLOW_LOCK_FD";

/// Content of `alive.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Alive {
    /// The agent.
    pub pid: u32,
    /// When it started ([`sweep::start_time`]): with the pid this names it for good.
    pub start_time: u64,
}

impl Alive {
    /// The agent that ran in a folder, if one did.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(files::ALIVE)).ok()?).ok()
    }

    /// Whether that agent lives.
    #[must_use]
    pub fn lives(&self) -> bool {
        sweep::start_time(self.pid) == Some(self.start_time)
    }
}

/// Reads the spec.
///
/// # Errors
/// A reason for people.
pub fn spec(folder: &Path) -> Result<WorkerSpec, String> {
    let path = folder.join(files::SPEC);
    let bytes = fs::read(&path).map_err(|e| {
        format!("{} cannot be read: {e}; the control plane writes it before it starts an agent", path.display())
    })?;
    serde_json::from_slice(&bytes).map_err(|e| format!("{} is no spec of a worker: {e}", path.display()))
}

/// Takes the lock of a folder: the inherited one, or by itself.
///
/// # Errors
/// If an agent already runs here.
pub fn lock(folder: &Path, inherited: Option<&str>) -> Result<OwnedFd, String> {
    let fd = match inherited {
        Some(number) => {
            let fd = number.parse().map_err(|_| format!("{LOCK_FD}={number} is no number of a descriptor"))?;
            sys::adopt(fd).map_err(|e| {
                format!("{LOCK_FD}={number} is no open descriptor: {e}; pass the lock on without CLOEXEC")
            })?
        }
        None => {
            let path = folder.join(files::LOCK);
            let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            open.map_err(|e| format!("{} cannot be opened: {e}", path.display()))?.into()
        }
    };
    sys::lock(&fd).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => {
            format!("an agent already runs in {}: end it first, or leave it to its work", folder.display())
        }
        _ => format!("the lock in {} cannot be taken: {e}", folder.display()),
    })?;
    Ok(fd)
}

/// Writes the sign of life.
///
/// # Errors
/// If the disk does not take it.
pub fn write_alive(folder: &Path, pid: u32) -> io::Result<()> {
    let alive = Alive { pid, start_time: sweep::start_time(pid).unwrap_or_default() };
    replace(folder, files::ALIVE, &serde_json::to_vec(&alive)?, false)
}

/// Renews the sign of life. Best effort.
pub fn touch_alive(folder: &Path) {
    if let Ok(file) = File::options().write(true).open(folder.join(files::ALIVE)) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Writes the end, durably.
///
/// # Errors
/// If the disk does not take it.
pub fn write_ended(folder: &Path, ended: &Ended) -> io::Result<()> {
    replace(folder, files::ENDED, &serde_json::to_vec(ended)?, true)
}

/// The end of the worker of a folder, if it ended and can be read.
#[must_use]
pub fn read_ended(folder: &Path) -> Option<Ended> {
    find_ended(folder).ok().flatten()
}

/// The end of the worker of a folder; none only if it is certain that none is there.
///
/// # Errors
/// If it cannot be read now, or with `InvalidData` is no end.
pub fn find_ended(folder: &Path) -> io::Result<Option<Ended>> {
    match fs::read(folder.join(files::ENDED)) {
        Ok(bytes) => {
            Ok(Some(serde_json::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn replace(folder: &Path, name: &str, bytes: &[u8], durable: bool) -> io::Result<()> {
    let temporary = folder.join(format!("{name}.new"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    if durable {
        file.sync_all()?;
    }
    fs::rename(&temporary, folder.join(name))?;
    if durable {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// A port for rank 0.
#[derive(Debug)]
pub struct Port {
    /// The port.
    pub number: u16,
    /// Keeps everybody away, until rank 0 is about to listen.
    held: Option<OwnedFd>,
    /// Keeps agents away as long as this lives, see [`claim`].
    _claim: UnixDatagram,
}

impl Port {
    /// Lets rank 0 listen there.
    pub fn hand_over(&mut self) {
        self.held = None;
    }

    /// Whether that was done.
    #[must_use]
    pub const fn is_handed_over(&self) -> bool {
        self.held.is_none()
    }
}

/// Claims a port against all other agents that share this network, of whatever control plane.
///
/// Holding the port itself is not enough: between the moment when it is given up for rank 0 and that
/// when rank 0 listens, seconds pass in which it looks free. And gRPC, thus JAX, listens with
/// `SO_REUSEPORT`: two gangs with one port would not fail but meet each other. An abstract socket's
/// name is known to exactly those who share the ports, and is gone with its agent.
fn claim(port: u16) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("aviflow/port/{port}"))?)
}

/// A port for rank 0 that is free here, held until it is handed over and claimed until it is dropped.
///
/// It is outside the range from which the kernel takes ports for connections,
/// and begins at a place that differs between jobs, so that two on one node
/// seldom try the same.
#[must_use]
pub fn free_port(spec: &WorkerSpec, epoch: u32) -> Option<Port> {
    let hold = |number: u16| -> io::Result<Port> {
        let claim = claim(number)?;
        Ok(Port { number, held: Some(sys::hold_port(number)?), _claim: claim })
    };
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut bounds = range.split_ascii_whitespace().filter_map(|n| n.parse::<u64>().ok());
    let (low, high) = (bounds.next().unwrap_or(32_768), bounds.next().unwrap_or(60_999));
    let (first, count) =
        if low >= 16_384 { (12_000, low - 12_000) } else { (high + 1, 65_536_u64.saturating_sub(high + 1)) };
    let place = spec.job_id * 61 + u64::from(spec.attempt) * 17 + u64::from(spec.worker) * 7 + u64::from(epoch);
    for n in 0..count.min(2000) {
        let port = u16::try_from(first + (place + n) % count).ok()?;
        if let Ok(held) = hold(port) {
            return Some(held);
        }
    }
    let port = TcpListener::bind(("0.0.0.0", 0)).and_then(|l| l.local_addr()).ok()?.port();
    hold(port).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wiring::tests::spec;

    #[test]
    fn a_held_port_is_refused_and_given_to_nobody_else() {
        let mut port = free_port(&spec(), 0).expect("a port");
        let number = port.number;
        assert_ne!(number, free_port(&spec(), 0).expect("a port").number);
        assert!(std::net::TcpStream::connect(("127.0.0.1", number)).is_err());
        port.hand_over();
        assert!(TcpListener::bind(("0.0.0.0", number)).is_ok());
        assert_ne!(number, free_port(&spec(), 0).expect("a port").number, "claimed, also while nobody listens");
    }

    #[test]
    fn one_agent_a_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let held = lock(folder.path(), None).expect("the lock");
        let error = lock(folder.path(), None).expect_err("held");
        assert!(error.starts_with("an agent already runs in "), "{error}");
        drop(held);
        assert!(lock(folder.path(), None).is_ok());
        assert!(lock(folder.path(), Some("999")).expect_err("closed").contains("is no open descriptor"));
    }

    #[test]
    fn signs_of_life_and_ends_are_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!((Alive::read(folder.path()), read_ended(folder.path())), (None, None));
        write_alive(folder.path(), std::process::id()).expect("written");
        assert!(Alive::read(folder.path()).expect("alive").lives());
        assert!(!Alive { pid: std::process::id(), start_time: 1 }.lives());
    }
}
