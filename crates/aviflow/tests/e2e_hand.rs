//! A hand on the running gang: stacks, terminals, forwarded ports and shells, through the real binary.

mod world;

use aviflow_agent::sys;
use serde_json::Value;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Stdio};
use world::World;

/// A command on a terminal.
struct Terminal {
    child: Child,
    shown: File,
    seen: String,
}

impl Terminal {
    fn new(world: &World, args: &[&str]) -> Terminal {
        let (shown, used) = sys::terminal(90, 30).expect("a terminal");
        let share = || Stdio::from(used.try_clone().expect("a copy"));
        let mut command = world.command(args);
        command.stdin(share()).stdout(share()).stderr(share()).env("TERM", "xterm");
        sys::isolate(&mut command);
        sys::own_terminal(&mut command);
        let child = command.spawn().expect("the binary runs");
        Terminal { child, shown, seen: String::new() }
    }

    /// Reads until something was shown, which is taken.
    fn until(&mut self, text: &str) {
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            assert!(self.read(), "ended before {text:?}: {}", self.seen);
        }
    }

    /// Reads what is shown next; false at the end.
    fn read(&mut self) -> bool {
        let mut poll = sys::Poll::default();
        poll.add(&self.shown, true, false);
        poll.wait(None);
        let mut buffer = [0; 4096];
        match self.shown.read(&mut buffer) {
            Ok(0) => false,
            Ok(n) => {
                self.seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
                true
            }
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn key(&mut self, keys: &str) {
        self.shown.write_all(keys.as_bytes()).expect("written");
    }

    fn end(&mut self) -> i32 {
        while self.read() {}
        self.child.wait().expect("an end").code().unwrap_or(-1)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_terminal_beside_a_rank_has_keys_a_size_and_an_exit_code() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!("echo begun; cat {}", gate.path().display());
    let mut run = world.follow(&["run", "--name", "long", "--", "sh", "-c", &script]);
    run.until("[r0] begun");
    let mut terminal = Terminal::new(&world, &["exec", "-it", "long", "--", "env", "PS1=ready:", "sh"]);
    terminal.until("ready:");
    terminal.key("tty -s && stty size && echo job $AVIFLOW_JOB\r");
    terminal.until("30 90");
    terminal.until("job default/long");
    terminal.until("ready:");
    // A key that interrupts reaches the program there, and not this one.
    terminal.key("echo in; cat\r");
    terminal.until("in\r\n");
    terminal.key("\x03");
    terminal.until("ready:");
    sys::resize_terminal(&terminal.shown, 50, 10);
    terminal.key("until stty size | grep '10 50'; do :; done\r");
    terminal.until("10 50\r\n");
    terminal.until("ready:");
    terminal.key("exit 7\r");
    assert_eq!(terminal.end(), 7);
    // Without a terminal here there is none there.
    let none = world.run(&["exec", "-t", "long", "--", "sh"]);
    assert_eq!(none.code, 2, "{none:?}");
    assert!(none.err.contains("a terminal needs one here"), "{none:?}");
}

/// Says what it is asked, in upper case, to whoever has ended his question.
const ANSWERS: &str = "
import socket, threading
def answer(other):
    question = b''
    while piece := other.recv(65536): question += piece
    other.sendall(question.upper())
    other.close()
listener = socket.create_server(('127.0.0.1', 0))
print('port', listener.getsockname()[1], flush=True)
while True: threading.Thread(target=answer, args=(listener.accept()[0],)).start()
";

#[test]
fn a_port_beside_a_rank_is_reached_by_several_at_a_time() {
    let world = World::with_pool(1, 1);
    let mut run = world.follow(&["run", "--name", "serves", "--", "python3", "-c", ANSWERS]);
    let port = run.until("[r0] port ").text().rsplit(' ').next().expect("a port").trim().to_owned();
    let mut forward = world.follow(&["forward", "serves", &format!(":{port}")]);
    let said = forward.until("forwarding 127.0.0.1:").text();
    let at = said.split_whitespace().nth(1).expect("an address").to_owned();
    // More than all buffers on the way hold, from two at once.
    let ask = |letter: &str| {
        let (at, question) = (at.clone(), letter.repeat(3 << 20));
        std::thread::spawn(move || {
            let mut stream = TcpStream::connect(at).expect("a connection");
            stream.write_all(question.as_bytes()).expect("written");
            stream.shutdown(Shutdown::Write).expect("half closed");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            assert!(answer == question.to_uppercase(), "{} bytes", answer.len());
        })
    };
    let asking = ["a", "b"].map(ask);
    for one in asking {
        one.join().expect("answered");
    }
    world.ok(&["cancel", "serves"]);
    run.end();
    let ended = world.run(&["forward", "serves", "6006"]);
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(ended.err.contains("serves is Cancelled, so nothing listens there"), "{ended:?}");
}

#[test]
fn a_port_on_which_nobody_listens_is_said() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!("echo begun; cat {}", gate.path().display());
    let mut run = world.follow(&["run", "--name", "long", "--", "sh", "-c", &script]);
    run.until("[r0] begun");
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let mut command = world.command(&["forward", "long", &format!(":{free}")]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut lines = std::io::BufReader::new(child.stdout.take().expect("stdout"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut lines, &mut line).expect("a line");
    let mut stream = TcpStream::connect(line.split_whitespace().nth(1).expect("an address")).expect("a connection");
    assert_eq!(stream.read(&mut [0; 8]).expect("its end"), 0);
    let mut errors = std::io::BufReader::new(child.stderr.take().expect("stderr"));
    line.clear();
    std::io::BufRead::read_line(&mut errors, &mut line).expect("a line");
    let _ = child.kill();
    let _ = child.wait();
    assert!(
        line.contains(&format!("port {free} beside rank 0 of default/long: nothing listens on port {free}")),
        "{line}"
    );
}

/// Rank 1 loads where the others wait, as a training hangs.
const HANGS: &str = "
import os
def load():
    print('there', flush=True)
    os.read(os.pipe()[0], 1)
def reduce():
    print('there', flush=True)
    os.read(os.pipe()[0], 1)
load() if os.environ['RANK'] == '1' else reduce()
";

#[test]
fn the_rank_whose_stack_differs_stands_out() {
    let world = World::with_pool(1, 3);
    let args = ["run", "--name", "hangs", "--gpus-per-node", "3", "--set", "processes=perGpu", "--"];
    let mut run = world.follow(&[&args[..], &["python3", "-c", HANGS]].concat());
    for _ in 0..3 {
        run.until("there");
    }
    let stacks = world.json(&["stacks", "hangs"]);
    let groups = stacks["groups"].as_array().expect("groups");
    let seen: Vec<(Value, Value)> =
        groups.iter().map(|g| (g["ranks"].clone(), g["frames"][0]["function"].clone())).collect();
    let group = |ranks: &[u32], function: &str| (Value::from(ranks), Value::from(function));
    assert_eq!(seen, [group(&[1], "load"), group(&[0, 2], "reduce")], "{stacks}");
    let shown = world.ok(&["stacks", "hangs"]);
    assert!(shown.contains("rank 1:") && shown.contains("ranks 0,2:") && shown.contains("load"), "{shown}");
    let one = world.ok(&["stacks", "hangs", "--rank", "2", "--all"]);
    assert!(one.contains("rank 2:") && one.contains("main thread") && !one.contains("rank 1"), "{one}");
    let none = world.run(&["stacks", "hangs", "--rank", "9"]);
    assert!(none.code == 1 && none.err.contains("no process has rank 9"), "{none:?}");
    // Nobody was harmed.
    assert_eq!(world.json(&["show", "hangs"])["phase"], "Running");
}

#[test]
fn a_shell_on_the_pool_waits_its_turn_and_gives_its_gpus_back() {
    let world = World::with_pool(1, 2);
    let gate = world.gate("gate");
    let script = format!("echo begun; cat {}", gate.path().display());
    let mut first = world.follow(&["run", "--name", "first", "--gpus-per-node", "2", "--", "sh", "-c", &script]);
    first.until("[r0] begun");
    let mut shell = Terminal::new(&world, &["dev", "--gpus", "2", "--", "sh"]);
    shell.until("waits, place 1 of 1");
    gate.open();
    shell.key("echo slots $CUDA_VISIBLE_DEVICES\r");
    shell.until("slots 0,1");
    let job = world.json(&["show", "dev"]);
    assert_eq!((&job["phase"], &job["user"]), (&Value::from("Running"), &Value::from("ada")), "{job}");
    shell.key("exit 3\r");
    assert_eq!(shell.end(), 3);
    world.follow(&["logs", "-f", "dev"]).end();
    assert_eq!(world.json(&["show", "dev"])["phase"], "Cancelled");
}

#[test]
fn a_shell_whose_client_is_killed_gives_its_gpus_back() {
    let world = World::with_pool(1, 1);
    let mut shell = Terminal::new(&world, &["dev", "--gpus", "1", "--grace", "1s", "--", "sh"]);
    shell.key("echo here $AVIFLOW_JOB\r");
    shell.until("here default/dev");
    shell.child.kill().expect("killed");
    world.follow(&["logs", "-f", "dev"]).end();
    assert_eq!(world.json(&["show", "dev"])["phase"], "Succeeded");
    let logs = world.ok(&["logs", "dev"]);
    assert!(logs.contains("no terminal was open for 1 s: the GPUs are given back"), "{logs}");
}
