//! What `faulthandler` writes (`_Py_DumpTracebackThreads` of CPython).
//!
//! ```text
//! Thread 0x00007f3a2d7fe6c0 [worker] (most recent call first):
//!   File "/usr/lib/python3.12/threading.py", line 355 in wait
//!   <no Python frame>
//!   ...
//!
//! Current thread 0x00007f3a3e0c1740 (most recent call first):
//!   File "train.py", line 12 in step
//! ```
//!
//! Names of threads come with Python 3.14; an unknown file, line or function is written as `???`. Whatever is not
//! understood is passed over.

use crate::protocol::stacks::{Frame, PythonThread};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Characters of a name that are told.
const NAME: usize = 300;

/// The threads of a dump, the main thread first. `main` is its id; files below `folder` are named relative to it.
pub(super) fn parse(text: &str, main: &str, folder: &Path) -> Vec<PythonThread> {
    let folder = folder.to_string_lossy();
    let main = main.trim_start_matches('0');
    let mut threads: Vec<PythonThread> = Vec::new();
    for line in text.lines() {
        // Of the thread that was asked alone, which is the main one.
        let only = (line == "Stack (most recent call first):")
            .then(|| PythonThread { id: main.to_owned(), ..PythonThread::default() });
        if let Some(thread) = head(line).or(only) {
            let is_main = !main.is_empty() && thread.id == main;
            threads.push(PythonThread { main: is_main, ..thread });
        } else if let Some(thread) = threads.last_mut() {
            match frame(line, &folder) {
                Some(frame) => thread.frames.push(frame),
                None => thread.cut |= line.trim() == "...",
            }
        }
    }
    threads.sort_by_key(|thread| !thread.main);
    threads
}

/// The line with which a thread begins.
fn head(line: &str) -> Option<PythonThread> {
    let rest = line.strip_prefix("Current thread ").or_else(|| line.strip_prefix("Thread "))?;
    let rest = rest.strip_prefix("0x")?;
    let rest = rest.strip_suffix("(most recent call first):")?.trim_end();
    let (id, name) = rest.split_once(' ').unwrap_or((rest, ""));
    let name = name.trim().strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let id = id.trim_start_matches('0').to_owned();
    Some(PythonThread { id, name: name.map(short), ..PythonThread::default() })
}

fn frame(line: &str, folder: &str) -> Option<Frame> {
    let rest = line.strip_prefix("  File ")?;
    // From the end, as a file's name may hold anything.
    let (place, function) = rest.rsplit_once(" in ")?;
    let (file, number) = place.rsplit_once(", line ")?;
    let file = file.strip_prefix('"').and_then(|file| file.strip_suffix('"')).unwrap_or(file);
    let below = file.strip_prefix(folder).filter(|_| !folder.is_empty()).map(|rest| rest.trim_start_matches('/'));
    let file = below.filter(|file| !file.is_empty()).unwrap_or(file);
    Some(Frame { file: short(file), line: number.parse().unwrap_or(0), function: short(function) })
}

fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(NAME).collect()
}

/// What the main thread is doing, in 16 hexadecimal digits: of the SHA-256 of its frames as `FILE:LINE FUNCTION`, the
/// most recent call first, each with a newline. None without a frame.
pub(super) fn signature(threads: &[PythonThread]) -> Option<String> {
    let main = threads.iter().find(|thread| thread.main).filter(|thread| !thread.frames.is_empty())?;
    let mut hash = Sha256::new();
    for Frame { file, line, function } in &main.frames {
        hash.update(format!("{file}:{line} {function}\n"));
    }
    Some(hash.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Python 3.12 prints it, with a thread's name as 3.14 does.
    const DUMP: &str = "Thread 0x00007f3a2d7fe6c0 [pin_memory] (most recent call first):
  File \"/usr/lib/python3.12/threading.py\", line 355 in wait
  File \"/usr/lib/python3.12/threading.py\", line 1030 in _bootstrap

Thread 0x00007f3a2cffd6c0 (most recent call first):
  <no Python frame>

Current thread 0x00007f3a3e0c1740 (most recent call first):
  File \"/w/code/a \"file\" in, line 3.py\", line 12 in step
  File ???, line ??? in ???
  ...
";

    #[test]
    fn a_dump_is_read() {
        let threads = parse(DUMP, "7f3a3e0c1740", Path::new("/w/code"));
        let ids: Vec<(&str, bool, usize)> = threads.iter().map(|t| (t.id.as_str(), t.main, t.frames.len())).collect();
        assert_eq!(ids, [("7f3a3e0c1740", true, 2), ("7f3a2d7fe6c0", false, 2), ("7f3a2cffd6c0", false, 0)]);
        assert_eq!(threads[1].name.as_deref(), Some("pin_memory"));
        assert!(threads[0].cut && !threads[1].cut);
        let step = Frame { file: "a \"file\" in, line 3.py".into(), line: 12, function: "step".into() };
        let unknown = Frame { file: "???".into(), line: 0, function: "???".into() };
        assert_eq!(threads[0].frames, [step, unknown]);
    }

    #[test]
    fn a_signature_is_of_what_the_main_thread_does_wherever() {
        let of = |text: &str, main, folder| signature(&parse(text, main, Path::new(folder)));
        let here = of(DUMP, "7f3a3e0c1740", "/w/code");
        assert_eq!(here.as_deref().map(str::len), Some(16));
        let there = DUMP.replace("/w/code", "/x").replace("7f3a3e0c1740", "7f0000000001");
        assert_eq!(of(&there, "7f0000000001", "/x"), here);
        assert_ne!(of(&DUMP.replace("line 12", "line 13"), "7f3a3e0c1740", "/w/code"), here);
        // Other threads change nothing, and no main thread is no signature.
        assert_eq!(of(&DUMP.replace("line 355", "line 356"), "7f3a3e0c1740", "/w/code"), here);
        assert_eq!(of(DUMP, "7f3a2cffd6c0", ""), None);
        assert_eq!(of(DUMP, "", ""), None);
    }

    #[test]
    fn whatever_is_written_there_does_no_harm() {
        for text in [
            "",
            "Thread 0x",
            "Thread 0x (most recent call first):\n  File \"\n",
            "\u{0}\n  File \"x\", line 99999999999 in f",
        ] {
            assert!(parse(text, "1", Path::new("/")).iter().all(|t| t.frames.is_empty()), "{text:?}");
        }
        let long =
            format!("Thread 0x1 (most recent call first):\n  File \"{0}\", line 1 in {0}\n", "é".repeat(100_000));
        assert_eq!(parse(&long, "1", Path::new(""))[0].frames[0].file.chars().count(), NAME);
    }
}
