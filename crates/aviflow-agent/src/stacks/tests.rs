use super::*;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

fn hooks() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/aviflow/src")
}

/// A Python with the hooks, once it has said that it is where it should be.
struct Python(Child);

impl Python {
    fn new(options: &[&str], program: &str, rank: &str) -> Python {
        let mut command = Command::new("python3");
        command.args(options).args(["-c", program]).stdout(Stdio::piped());
        command.env("PYTHONPATH", hooks()).env("AVIFLOW_SOCKET", "/nowhere").env("AVIFLOW_RANK", rank);
        let mut child = command.spawn().expect("python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line, "there\n");
        Python(child)
    }

    fn process(&self) -> Process {
        let pid = self.0.id().cast_signed();
        Process { pid, parent: sys::getpid(), group: pid, session: pid }
    }

    /// Stacks of these processes.
    fn stacks(found: &[Process], rank: Option<u32>) -> Vec<ProcessStacks> {
        let mut dump = Dump::begin(found, rank, Path::new("/work"), &Hanging::default(), 0);
        loop {
            // By this clock no time passes: what is waited for must come.
            if let Some(stacks) = dump.look(0) {
                return stacks.processes;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const HANGS: &str = "
import os, threading
def wait(): os.read(os.pipe()[0], 1)
def train():
    print('there', flush=True)
    # Holds the lock of the interpreter for ever, as an extension does that hangs.
    while True: 'a'.find('b')
threading.Thread(target=wait, daemon=True).start()
train()
";

#[test]
fn a_process_that_hangs_tells_its_stacks_again_and_again() {
    let python = Python::new(&[], HANGS, "3");
    for _ in 0..3 {
        let told = Python::stacks(&[python.process()], None);
        let [process] = told.as_slice() else { panic!("{told:?}") };
        assert_eq!((process.rank, process.main, process.note.as_deref()), (Some(3), true, None));
        let functions: Vec<Vec<&str>> =
            process.python.iter().map(|t| t.frames.iter().map(|f| f.function.as_str()).collect()).collect();
        assert_eq!(functions[0], ["train", "<module>"], "{process:?}");
        assert!(process.python[0].main && functions.len() == 1, "no other thread is walked: {process:?}");
        assert!(process.signature.is_some() && process.command.contains("python3 -c"), "{process:?}");
        assert!(process.threads[0].main && process.threads[0].name.starts_with("python"), "{process:?}");
    }
    // Of another rank there is nothing.
    assert_eq!(Python::stacks(&[python.process()], Some(4)), []);
}

#[test]
fn what_has_not_registered_is_not_signalled() {
    for options in [&["-I"][..], &["-S"]] {
        let program = "import os; print('there', flush=True); os.read(os.pipe()[0], 1)";
        let mut python = Python::new(options, program, "0");
        let told = Python::stacks(&[python.process()], None);
        let note = told[0].note.as_deref().unwrap_or_default();
        assert!(note.starts_with("its Python tells no stacks") && told[0].signature.is_none(), "{told:?}");
        assert_eq!(python.0.try_wait().expect("a state"), None, "it lives");
    }
}

#[test]
fn a_program_that_python_becomes_is_not_signalled() {
    // A handler is gone with `execve`, and what was sent then would end it.
    let program = "import os; print('there', flush=True); os.execvp('sleep', ['sleep', '1000'])";
    let mut python = Python::new(&[], program, "0");
    let process = python.process();
    let name = || fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
    while name() != "sleep\n" {
        std::thread::yield_now();
    }
    let told = Python::stacks(&[process], None);
    assert_eq!(told[0].note.as_deref(), Some("no Python"));
    assert_eq!(python.0.try_wait().expect("a state"), None, "it lives");
}

#[test]
fn a_child_of_a_fork_tells_its_own() {
    let program = "
import os
def child():
    os.write(told, b'x')
    os.read(os.pipe()[0], 1)
ready, told = os.pipe()
if os.fork() == 0: child()
os.read(ready, 1)
print('there', flush=True)
os.read(os.pipe()[0], 1)
";
    let python = Python::new(&[], program, "0");
    let parent = python.process();
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.pid)).expect("children");
    let pid: Pid = children.trim().parse().expect("one child");
    let child = Process { pid, parent: parent.pid, ..parent };
    let told = Python::stacks(&[parent, child], None);
    sys::kill(pid, libc::SIGKILL);
    let function = |of: Pid| {
        let found = told.iter().find(|p| p.pid == of.cast_unsigned()).expect("it was told");
        (found.main, found.python[0].frames[0].function.clone())
    };
    assert_eq!(function(parent.pid), (true, "<module>".to_owned()));
    assert_eq!(function(pid), (false, "child".to_owned()));
}

#[test]
fn a_process_that_does_not_answer_is_told_with_the_reason() {
    let python = Python::new(&[], "import os; print('there', flush=True); os.read(os.pipe()[0], 1)", "0");
    let process = python.process();
    sys::kill(process.pid, libc::SIGSTOP);
    while kernel::threads(process.pid).first().is_none_or(|main| main.state != "T") {
        std::thread::yield_now();
    }
    let mut dump = Dump::begin(&[process], None, Path::new("/"), &Hanging::default(), 0);
    assert_eq!(dump.look(0), None);
    let told = dump.look(LIMIT_MS).expect("nobody is waited for longer").processes;
    let note = told[0].note.as_deref();
    assert_eq!(note, Some("no answer within 2 s: it is stopped, by SIGSTOP or a debugger"));
}

#[test]
fn a_launcher_has_no_rank_where_its_processes_have() {
    let launcher = Python::new(&[], "import os; print('there', flush=True); os.read(os.pipe()[0], 1)", "1");
    let program = "import os; os.environ['RANK']='6'; os.execvp('python3', ['python3', '-c', \
                   'import os; print(\"there\", flush=True); os.read(os.pipe()[0], 1)'])";
    let rank = Python::new(&[], program, "1");
    let child = Process { parent: launcher.process().pid, ..rank.process() };
    let told = Python::stacks(&[launcher.process(), child], None);
    let mut ranks: Vec<(Option<u32>, bool)> = told.iter().map(|p| (p.rank, p.main)).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [(None, false), (Some(6), true)]);
    assert_eq!(Python::stacks(&[launcher.process(), child], Some(6)).len(), 1);
    assert_eq!(Python::stacks(&[launcher.process(), child], Some(1)).len(), 0);
}
