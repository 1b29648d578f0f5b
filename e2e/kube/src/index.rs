//! A package index of a test's own: wheels that it makes, served over HTTP to pods.

use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Makes a wheel of one module, which prints its name, and one program.
const WHEEL: &str = r#"
import sys, zipfile
name, path = sys.argv[1:]
wheel, info = zipfile.ZipFile(path, "w"), name + "-1.0.dist-info/"
wheel.writestr(name + ".py", "def main():\n print('the program of " + name + "')\n")
wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: " + name + "\nVersion: 1.0\n")
wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
wheel.writestr(info + "entry_points.txt", "[console_scripts]\nrun-" + name + " = " + name + ":main\n")
wheel.writestr(info + "RECORD", "")
wheel.close()
print(__import__("hashlib").sha256(open(path, "rb").read()).hexdigest())
"#;

/// An index. It serves until the test's process ends.
pub struct Index {
    address: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Default)]
struct State {
    wheels: BTreeMap<String, Vec<u8>>,
    asked: Vec<String>,
    /// Whether who asks for a wheel gets no answer yet.
    holds: bool,
}

impl Index {
    /// Starts one at an address of this machine that pods reach.
    ///
    /// # Errors
    /// If nothing can listen there.
    pub fn start(host: &str) -> Result<Index> {
        let listener = TcpListener::bind((host, 0))?;
        let index = Index { address: listener.local_addr()?.to_string(), shared: Arc::default() };
        let shared = Arc::clone(&index.shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // Whoever goes away in the middle of an answer does not want it.
                std::thread::spawn(move || shared.answer(stream));
            }
        });
        Ok(index)
    }

    /// What pip must be told to take packages from here.
    #[must_use]
    pub fn variables(&self) -> [(&'static str, String); 3] {
        let host = self.address.split(':').next().unwrap_or_default().to_owned();
        [
            ("PIP_INDEX_URL", format!("http://{}/simple", self.address)),
            ("PIP_TRUSTED_HOST", host),
            // Longer than anything here waits: of a wheel that is held, pip asks once.
            ("PIP_TIMEOUT", "600".to_owned()),
        ]
    }

    /// Makes a wheel of a package, version 1.0; gives its line of a lock.
    ///
    /// # Errors
    /// If this machine has no Python.
    pub fn wheel(&self, name: &str) -> Result<String> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("wheel");
        let made = Command::new("python3").args(["-c", WHEEL, name]).arg(&path).output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let hash = String::from_utf8(made.stdout)?;
        let content = std::fs::read(&path)?;
        self.shared.lock().wheels.insert(name.to_owned(), content);
        Ok(format!("{name}==1.0 --hash=sha256:{}\n", hash.trim()))
    }

    /// How often the wheel of a package was asked for.
    #[must_use]
    pub fn asked(&self, name: &str) -> usize {
        self.shared.lock().asked.iter().filter(|asked| *asked == name).count()
    }

    /// From now on who asks for a wheel waits, or has it.
    pub fn hold(&self, holds: bool) {
        self.shared.lock().holds = holds;
        self.shared.released.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, stream: TcpStream) -> Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().context("a request")??;
        // Up to the end of the headers: an answer to half a request may be lost.
        for line in lines.by_ref() {
            if line?.is_empty() {
                break;
            }
        }
        let path = request.split(' ').nth(1).unwrap_or_default();
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (kind, body) = match parts[..] {
            ["simple", name] if self.lock().wheels.contains_key(name) => {
                ("text/html", format!("<a href=\"/{name}-1.0-py3-none-any.whl\">{name}</a>").into_bytes())
            }
            [file] => {
                let name = file.split('-').next().unwrap_or_default().to_owned();
                let mut state = self.lock();
                state.asked.push(name.clone());
                while state.holds {
                    state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                ("application/zip", state.wheels.get(&name).cloned().unwrap_or_default())
            }
            _ => ("", Vec::new()),
        };
        let status = if kind.is_empty() { "404 Not Found" } else { "200 OK" };
        let mut stream = stream;
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        )?;
        stream.write_all(&body)?;
        Ok(())
    }
}
