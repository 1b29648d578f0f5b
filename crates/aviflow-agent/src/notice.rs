//! Looks at what the kernel of the node says of its GPUs and its network, as signs ([`crate::protocol::Sign`]).
//!
//! A thread of its own, as reading a counter asks an adapter's firmware. It judges nothing and remembers next to nothing.
//! Where something may not be read, as in many containers, it is silent. Several agents of a node tell the same.

use crate::infiniband::{self, Changes};
use crate::kernel::{Kmsg, What};
use crate::protocol::Sign;
use crate::sys::Poll;
use crate::{devices, kernel};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Between two looks at the kernel's log.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Between two looks at ports.
const PORTS_PERIOD: Duration = Duration::from_secs(10);

/// Errors of GPUs that are told of one look: a GPU that is broken may write thousands of lines.
const MOST_ERRORS: usize = 20;

/// Where to look.
#[derive(Clone, Debug)]
pub struct Places {
    /// The kernel's log.
    pub log: PathBuf,
    /// What the kernel shows of network adapters.
    pub adapters: PathBuf,
    /// What NVIDIA's driver tells of its GPUs.
    pub driver: PathBuf,
}

impl Places {
    /// The usual ones, but those that variables name, for tests.
    #[must_use]
    pub fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let place = |name: &str, usual: &str| variable(name).map_or_else(|| usual.into(), PathBuf::from);
        Self {
            log: place("AVIFLOW_KMSG", "/dev/kmsg"),
            adapters: place("AVIFLOW_INFINIBAND", "/sys/class/infiniband"),
            driver: devices::DRIVER.into(),
        }
    }
}

/// The loop's end.
#[derive(Debug)]
pub struct Notice {
    /// Asks for all ports again; gone, the thread ends.
    again: Sender<()>,
    signs: Receiver<(Instant, Sign)>,
    wake: UnixStream,
    place: usize,
}

impl Notice {
    /// Starts the thread. Of the kernel's log, what is there by now is not told. Signals must be blocked by now.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(places: Places) -> io::Result<Self> {
        let (again, asked) = mpsc::channel();
        let (said, signs) = mpsc::channel();
        let (wake, waker) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        let log = Kmsg::open(&places.log).ok();
        let looks = Looks { places, log, changes: Changes::default(), said, waker };
        Builder::new().name("notice".to_owned()).spawn(move || looks.run(&asked))?;
        Ok(Self { again, signs, wake, place: usize::MAX })
    }

    /// Who listens is another, who knows of no port yet.
    pub fn again(&self) {
        let _ = self.again.send(());
    }

    /// Adds what is to be waited for.
    pub fn watch(&mut self, poll: &mut Poll) {
        self.place = poll.add(&self.wake, true, false);
    }

    /// Takes what was noticed since the last time, and how many milliseconds ago.
    pub fn read(&mut self, poll: &Poll, mut noticed: impl FnMut(Sign, u64)) {
        if !poll.ready(self.place) {
            return;
        }
        let mut buffer = [0; 256];
        while matches!(self.wake.read(&mut buffer), Ok(n) if n == buffer.len()) {}
        for (at, sign) in self.signs.try_iter() {
            noticed(sign, u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX));
        }
    }
}

/// The thread.
struct Looks {
    places: Places,
    log: Option<Kmsg>,
    changes: Changes,
    said: Sender<(Instant, Sign)>,
    waker: UnixStream,
}

impl Looks {
    fn run(mut self, asked: &Receiver<()>) {
        let mut ports_at = Instant::now();
        loop {
            self.read_log();
            if ports_at <= Instant::now() {
                self.read_ports();
                ports_at = Instant::now() + PORTS_PERIOD;
            }
            let pause = if self.log.is_some() { LOG_PERIOD } else { PORTS_PERIOD };
            match asked.recv_timeout(pause) {
                Ok(()) => {
                    self.changes.forget();
                    ports_at = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The agent ends.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn read_log(&mut self) {
        let mut signs = Vec::new();
        if let Some(log) = &mut self.log {
            log.read(|fact| {
                let sign = xid(&fact.what, &self.places.driver).filter(|sign| !signs.contains(sign));
                signs.extend(sign.filter(|_| signs.len() < MOST_ERRORS));
            });
        }
        signs.into_iter().for_each(|sign| self.say(sign));
    }

    fn read_ports(&mut self) {
        let signs = self.changes.take(infiniband::ports(&self.places.adapters));
        signs.into_iter().for_each(|sign| self.say(sign));
    }

    fn say(&mut self, sign: Sign) {
        if self.said.send((Instant::now(), sign)).is_ok() {
            // A full socket wakes as well.
            let _ = self.waker.write(&[0]);
        }
    }
}

/// The sign of an error of a GPU.
fn xid(what: &What, driver: &Path) -> Option<Sign> {
    match what {
        What::Xid { pci, code, text, .. } => {
            let text = kernel::cut(&format!("Xid (PCI:{pci}): {code}, {text}"));
            Some(Sign::Xid { number: *code, gpu: devices::slot(driver, pci), text })
        }
        What::SwitchXid { .. } | What::OomKill { .. } | What::Link { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The next sign.
    fn next(notice: &mut Notice) -> Sign {
        let mut signs = Vec::new();
        while signs.is_empty() {
            let mut poll = Poll::default();
            notice.watch(&mut poll);
            poll.wait(None);
            notice.read(&poll, |sign, _| signs.push(sign));
        }
        assert_eq!(signs.len(), 1, "{signs:?}");
        signs.remove(0)
    }

    #[test]
    fn what_comes_after_the_start_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |path: &str| folder.path().join(path);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().expect("a folder")).expect("a folder");
            fs::write(at(path), text).expect("written");
        };
        write("gpus/0000:3b:00.0/information", "Device Minor: \t 3\n");
        write("ib/mlx5_0/ports/1/state", "4: ACTIVE\n");
        write("ib/mlx5_0/ports/1/counters/link_downed", "2\n");
        write("ib/mlx5_0/ports/1/counters/symbol_error", "5\n");
        write("kmsg", "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, old\n");
        let places = Places { log: at("kmsg"), adapters: at("ib"), driver: at("gpus") };
        let mut notice = Notice::start(places).expect("a thread");
        let port = |active, downed| {
            let device = "mlx5_0".to_owned();
            Sign::Port { device, port: 1, active: Some(active), downed, symbol_errors: 5 }
        };
        assert_eq!(next(&mut notice), port(true, 2));
        let mut log = fs::File::options().append(true).open(at("kmsg")).expect("a file");
        // Repeated, and of what is told otherwise.
        let lines = "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus.\n";
        log.write_all(format!("{lines}{lines}4,3,3,-;mlx5_core 0000:1b:00.0: Link down\n").as_bytes())
            .expect("written");
        let text = "Xid (PCI:0000:3b:00): 79, name=python, GPU has fallen off the bus.".to_owned();
        assert_eq!(next(&mut notice), Sign::Xid { number: 79, gpu: Some(3), text });
        log.write_all(b"4,4,4,-;NVRM: Xid (PCI:0000:3c:00): 48, x\n").expect("written");
        assert!(matches!(next(&mut notice), Sign::Xid { number: 48, gpu: None, .. }));
        // Another who listens is told of the ports anew.
        notice.again();
        assert_eq!(next(&mut notice), port(true, 2));
        write("ib/mlx5_0/ports/1/state", "1: DOWN\n");
        write("ib/mlx5_0/ports/1/counters/link_downed", "3\n");
        notice.again();
        assert_eq!(next(&mut notice), port(false, 3));
    }

    #[test]
    fn where_nothing_may_be_read_there_is_silence() {
        let nowhere = || PathBuf::from("/nowhere");
        let places = Places { log: nowhere(), adapters: nowhere(), driver: nowhere() };
        let (said, signs) = mpsc::channel();
        let (_wake, waker) = UnixStream::pair().expect("a pair");
        let log = Kmsg::open(&places.log).ok();
        let mut looks = Looks { places, log, changes: Changes::default(), said, waker };
        looks.read_log();
        looks.read_ports();
        assert!(signs.try_recv().is_err());
        let places = Places::of(|name| (name == "AVIFLOW_KMSG").then(|| "/x".into()));
        assert_eq!((places.log, places.adapters), ("/x".into(), "/sys/class/infiniband".into()));
    }
}
