//! The way of a control plane to the apiserver, on which it is killed just before or just after one of its writes.
//!
//! `kubectl proxy` speaks TLS with the apiserver; in front of it stand plain sockets on which requests are read. The
//! protocol is HTTP/1.1 without pipelining, so what comes back after a request is its answer.

use anyhow::{Context as _, Result, bail, ensure};
use aviflow_testcluster::binaries::Binary;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// On which side of a write the control plane is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The apiserver never hears of it.
    Before,
    /// The apiserver has carried it out, and the control plane does not hear of that.
    After,
}

/// What is to happen, and what has.
#[derive(Default)]
struct Trap {
    /// The control plane that is to be killed, until it was.
    process: Option<u32>,
    /// How many writes are let through before.
    left: u64,
    /// What a write's line contains that is counted.
    of: String,
    side: Option<Side>,
    /// The write at which it was killed.
    sprung: Option<String>,
}

impl Trap {
    fn kill(&mut self, write: &str) {
        if let Some(process) = self.process.take() {
            let killed = Command::new("kill").args(["-KILL", &process.to_string()]).status();
            self.sprung =
                Some(format!("{write}{}", if killed.is_ok_and(|s| s.success()) { "" } else { " (not killed)" }));
        }
    }
}

/// The way, until it is dropped.
pub struct Writes {
    address: String,
    trap: Arc<Mutex<Trap>>,
    proxy: Child,
}

impl Writes {
    /// Opens one for what a kubeconfig may do.
    ///
    /// # Errors
    /// If `kubectl proxy` does not start.
    pub fn open(kubeconfig: &Path) -> Result<Writes> {
        // It ends with the tests, however they end.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(Binary::Kubectl.path()?);
        command.args(["proxy", "--port=0", "--kubeconfig"]).arg(kubeconfig).stdout(Stdio::piped());
        let mut proxy = command.spawn()?;
        let mut said = String::new();
        BufReader::new(proxy.stdout.take().context("its output is piped")?).read_line(&mut said)?;
        let behind = said.trim().rsplit(' ').next().unwrap_or_default().to_owned();
        ensure!(said.starts_with("Starting to serve on "), "kubectl proxy said `{said}`");
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let trap = Arc::new(Mutex::new(Trap::default()));
        let shared = Arc::clone(&trap);
        // It ends with the process: a listener that nobody connects to does no harm.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (trap, behind) = (Arc::clone(&shared), behind.clone());
                thread::spawn(move || carry(&client, &behind, &trap));
            }
        });
        Ok(Writes { address, trap, proxy })
    }

    /// Where it begins, for a kubeconfig's `server`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Kills a process at its `n`th write from now on, counted from 1, of those whose method and path contain `of`.
    pub fn kill_at(&self, process: u32, n: u64, of: &str, side: Side) {
        let (process, left) = (Some(process), n.saturating_sub(1));
        *lock(&self.trap) = Trap { process, left, of: of.to_owned(), side: Some(side), sprung: None };
    }

    /// Kills nobody any more, and says at which write it did.
    pub fn disarm(&self) -> Option<String> {
        std::mem::take(&mut *lock(&self.trap)).sprung
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

fn lock(trap: &Mutex<Trap>) -> MutexGuard<'_, Trap> {
    trap.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a request changes what the platform relies on: leases and events come at any time, and reviews change
/// nothing.
fn is_write(line: &str) -> bool {
    let (method, path) = line.split_once(' ').unwrap_or_default();
    let aside = ["/leases", "/events", "reviews", "/token"];
    matches!(method, "POST" | "PUT" | "PATCH" | "DELETE") && !aside.iter().any(|word| path.contains(word))
}

/// Carries the requests of one connection, and answers, until either side closes it.
fn carry(client: &TcpStream, behind: &str, trap: &Arc<Mutex<Trap>>) {
    if let Ok(server) = TcpStream::connect(behind) {
        // The write whose answer is held back.
        let held: Arc<Mutex<Option<String>>> = Arc::default();
        if let (Ok(from), Ok(to)) = (server.try_clone(), client.try_clone()) {
            let (held, trap) = (Arc::clone(&held), Arc::clone(trap));
            thread::spawn(move || answers(from, to, &held, &trap));
        }
        let _ = requests(client, &server, &held, trap);
        let _ = server.shutdown(Shutdown::Both);
    }
    let _ = client.shutdown(Shutdown::Both);
}

fn answers(mut from: TcpStream, mut to: TcpStream, held: &Mutex<Option<String>>, trap: &Mutex<Trap>) {
    let mut buffer = [0; 16 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        if let Some(write) = held.lock().unwrap_or_else(PoisonError::into_inner).take() {
            lock(trap).kill(&write);
        } else if n == 0 || to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn requests(
    client: &TcpStream,
    mut server: &TcpStream,
    held: &Mutex<Option<String>>,
    trap: &Mutex<Trap>,
) -> Result<()> {
    let mut client = BufReader::new(client);
    loop {
        let (head, length) = head(&mut client)?;
        let mut request = head.clone().into_bytes();
        let start = request.len();
        request.resize(start + length, 0);
        client.read_exact(&mut request[start..])?;
        let line = head.lines().next().unwrap_or_default();
        let mut trap = lock(trap);
        if is_write(line) && line.contains(&trap.of) {
            match (trap.process, trap.left, trap.side) {
                (Some(_), 0, Some(Side::Before)) => {
                    trap.kill(line);
                    return Ok(());
                }
                (Some(_), 0, Some(Side::After)) => {
                    *held.lock().unwrap_or_else(PoisonError::into_inner) = Some(line.to_owned());
                    // Another connection's write is not the one.
                    trap.left = u64::MAX;
                }
                (Some(_), left, _) => trap.left = left - 1,
                (None, ..) => {}
            }
        }
        drop(trap);
        server.write_all(&request)?;
    }
}

/// A request's head, and the length of its body.
fn head(client: &mut BufReader<&TcpStream>) -> Result<(String, usize)> {
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let begin = head.len();
        if client.read_line(&mut head)? == 0 {
            bail!("the connection was closed");
        }
        let line = head[begin..].trim_end().to_ascii_lowercase();
        if line.is_empty() {
            return Ok((head, length));
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse()?;
        }
        ensure!(!line.starts_with("transfer-encoding:"), "a body without a length is not expected: {head}");
    }
}
