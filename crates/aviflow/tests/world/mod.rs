//! A control plane of its own for each test, driven through the real binary.
//!
//! Nothing here sleeps or looks at a clock: a test waits for a line, for the end
//! of a command, or holds a job at a gate that it opens. What a test leaves
//! running is ended when its world is dropped, also when it panicked.

#![expect(dead_code, reason = "each test file uses some of it")]

pub mod training;

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

pub struct World {
    folder: tempfile::TempDir,
    /// The address of its store, where that is a database.
    store: Option<String>,
}

/// What a command said.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl World {
    pub fn new() -> World {
        let folder = tempfile::tempdir().expect("folder");
        fs::create_dir(folder.path().join("home")).expect("folder");
        fs::create_dir(folder.path().join("work")).expect("folder");
        World { folder, store: None }
    }

    /// A world whose store is a database.
    pub fn on_database(url: &str) -> World {
        let mut world = World::new();
        world.store = Some(url.to_owned());
        world
    }

    /// A world whose control plane runs with this pool.
    pub fn with_pool(nodes: u32, gpus: u32) -> World {
        let world = World::new();
        let (nodes, gpus) = (nodes.to_string(), gpus.to_string());
        world.ok(&["server", "start", "--nodes", &nodes, "--gpus-per-node", &gpus]);
        world
    }

    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// Where commands are typed.
    pub fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    /// Writes a document beside which nothing lies, and returns its path.
    pub fn document(&self, name: &str, text: &str) -> String {
        let path = self.work().join(format!("{name}.yaml"));
        fs::write(&path, text).expect("write");
        path.display().to_string()
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aviflow"));
        command
            .args(args)
            .current_dir(self.work())
            .env("AVIFLOW_HOME", self.home())
            .env("AVIFLOW_CONFIG", self.folder.path().join("config.yaml"))
            .env("USER", "ada")
            .env_remove("AVIFLOW_CONTEXT")
            .env_remove("AVIFLOW_USER")
            .env_remove("AVIFLOW_STORE")
            .stdin(Stdio::null());
        if let Some(store) = &self.store {
            command.env("AVIFLOW_STORE", store);
        }
        command
    }

    pub fn run(&self, args: &[&str]) -> Said {
        let output = self.command(args).output().expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Said { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }

    /// A command that must succeed; what it wrote.
    pub fn ok(&self, args: &[&str]) -> String {
        let said = self.run(args);
        assert_eq!(said.code, 0, "{args:?}: {said:?}");
        said.out
    }

    /// A command that must succeed; its answer as JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        let (command, rest) = args.split_first().expect("a command");
        let text = self.ok(&[&[*command, "-o", "json"], rest].concat());
        serde_json::from_str(&text).expect("JSON")
    }

    /// A command that goes on, whose lines the test waits for.
    pub fn follow(&self, args: &[&str]) -> Follow {
        let mut child = self.command(args).stdout(Stdio::piped()).spawn().expect("the binary runs");
        let lines = BufReader::new(child.stdout.take().expect("stdout"));
        Follow { child, lines, seen: Vec::new() }
    }

    /// A gate at which jobs wait: `cat GATE` ends when it is opened.
    pub fn gate(&self, name: &str) -> Gate {
        let path = self.folder.path().join(name);
        let made = Command::new("mkfifo").arg(&path).status().expect("mkfifo").success();
        assert!(made);
        Gate(path)
    }

    /// The process of the control plane.
    pub fn server_pid(&self) -> i32 {
        let text = fs::read(self.home().join("server.json")).expect("server.json");
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        i32::try_from(value["pid"].as_i64().expect("pid")).expect("pid")
    }

    /// The agents that live, as they named themselves.
    pub fn agents(&self) -> Vec<i32> {
        let pid = |folder: fs::DirEntry| -> Option<i32> {
            let alive: Value = serde_json::from_slice(&fs::read(folder.path().join("alive.json")).ok()?).ok()?;
            i32::try_from(alive["pid"].as_i64()?).ok()
        };
        let workers = fs::read_dir(self.home().join("workers")).expect("workers").flatten();
        workers.filter_map(pid).filter(|pid| parent(*pid).is_some()).collect()
    }

    /// The processes that watch over them.
    pub fn guardians(&self) -> Vec<i32> {
        self.agents().into_iter().filter_map(parent).collect()
    }

    /// Processes whose command line names this world and the word.
    pub fn processes(&self, word: &str) -> Vec<i32> {
        let home = self.folder.path().display().to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("/proc").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let words: Vec<String> = line.split(|b| *b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
            if words.iter().any(|w| w == word) && words.iter().any(|w| w.contains(&home)) {
                found.push(pid);
            }
        }
        found
    }

    pub fn kill(pid: i32) {
        let status = Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill");
        assert!(status.success());
    }

    /// Waits until no control plane holds the home any more.
    pub fn wait_gone(&self) {
        let lock = fs::File::open(self.home().join("server.lock")).expect("lock");
        lock.lock_shared().expect("lock");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.home().join("server.lock").exists() {
            // A test may have ended without a control plane; trainings may still run then.
            let _ = self.run(&["server", "start"]);
            let names = self.run(&["ls", "-q"]).out;
            for name in names.lines() {
                let _ = self.run(&["cancel", name]);
                let _ = self.run(&["logs", "-f", name]);
            }
            let _ = self.run(&["server", "stop"]);
        }
        // What is left now hung: it carries this world's folder in its command line.
        for word in ["agent", "serve"] {
            for pid in self.processes(word) {
                let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
        }
    }
}

/// A command that goes on.
pub struct Follow {
    child: Child,
    lines: BufReader<ChildStdout>,
    pub seen: Vec<String>,
}

impl Follow {
    /// Reads up to a line that contains this text.
    pub fn until(&mut self, text: &str) -> &mut Follow {
        loop {
            let mut line = String::new();
            let n = self.lines.read_line(&mut line).expect("a line");
            assert!(n > 0, "it ended before `{text}`: {:#?}", self.seen);
            self.seen.push(line.trim_end().to_owned());
            if line.contains(text) {
                return self;
            }
        }
    }

    /// Reads to the end and returns the exit code.
    pub fn end(&mut self) -> i32 {
        let mut line = String::new();
        while self.lines.read_line(&mut line).expect("a line") > 0 {
            self.seen.push(line.trim_end().to_owned());
            line.clear();
        }
        self.child.wait().expect("an end").code().unwrap_or(-1)
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    pub fn text(&self) -> String {
        self.seen.join("\n")
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where jobs wait until it is opened.
pub struct Gate(PathBuf);

impl Gate {
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Lets one reader go on; waits for it to be there.
    pub fn open(&self) {
        let mut file = fs::OpenOptions::new().write(true).open(&self.0).expect("gate");
        file.write_all(b"go\n").expect("gate");
    }
}

/// Makes a wheel with one module in a folder; its line of a lock.
pub fn wheel(folder: &Path, name: &str) -> String {
    let script = "import hashlib, sys, zipfile\nname, path = sys.argv[1:]\ninfo = name + '-1.0.dist-info/'\n\
        with zipfile.ZipFile(path, 'w') as w:\n w.writestr(name + '.py', '')\n\
        \x20w.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: ' + name + '\\nVersion: 1.0\\n')\n\
        \x20w.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        \x20w.writestr(info + 'RECORD', '')\n\
        print(hashlib.sha256(open(path, 'rb').read()).hexdigest(), end='')\n";
    let path = folder.join(format!("{name}-1.0-py3-none-any.whl"));
    let made = Command::new("python3").args(["-c", script, name]).arg(path).output().expect("python3");
    let sha256 = String::from_utf8(made.stdout).expect("text");
    assert_eq!(sha256.len(), 64, "{}", String::from_utf8_lossy(&made.stderr));
    format!("{name}==1.0 --hash=sha256:{sha256}\n")
}

fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
}
