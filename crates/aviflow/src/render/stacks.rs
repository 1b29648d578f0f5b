//! What the processes of a job are doing.

use super::View;
use super::job::ranges;
use super::number::ago;
use super::style::{Styled, clean};
use aviflow_api::rest::{ProcessStacks, StackFrame, StackGroup, StackThreads, Stacks, TakenStacks, WorkerStacks};
use std::fmt::Write as _;

/// `aviflow stacks`. With `all`, every thread of every process.
pub fn stacks(stacks: &Stacks, all: bool, view: View) -> String {
    let mut out = String::new();
    for group in &stacks.groups {
        put_group(&mut out, group, view);
    }
    if stacks.groups.is_empty() {
        out.push_str("no process of a rank was found; a launcher may not have started one yet\n");
    }
    if all {
        for worker in &stacks.workers {
            put_worker(&mut out, worker, view);
        }
    }
    for missing in &stacks.missing {
        let _ = writeln!(out, "{} {}", format!("worker {}:", missing.worker).style(view.style, "31"), missing.reason);
    }
    out
}

/// `aviflow stacks --last`.
pub fn taken_then(taken: &TakenStacks, all: bool, view: View) -> String {
    let TakenStacks { at, epoch, stacks: told } = taken;
    let again = if *epoch > 1 { format!(", start {epoch}") } else { String::new() };
    let when = format!("taken {} as it stood still, attempt {}{again}", ago(*at, view.now), told.attempt);
    format!("{}\n{}", when.style(view.style, "2"), stacks(told, all, view))
}

fn put_group(out: &mut String, group: &StackGroup, view: View) {
    let word = if group.ranks.len() == 1 { "rank" } else { "ranks" };
    let signature = group.signature.as_ref().map_or_else(String::new, |s| format!("  [{s}]"));
    let _ = writeln!(
        out,
        "{}{}",
        format!("{word} {}:", ranges(&group.ranks)).style(view.style, "1"),
        signature.style(view.style, "2")
    );
    put_frames(out, &group.frames, "  ", view);
    if let Some(thread) = &group.thread {
        let _ = writeln!(out, "  {}", kernel(thread).style(view.style, "2"));
    }
    if let Some(note) = &group.note {
        let _ = writeln!(out, "  {}", format!("({note})").style(view.style, "33"));
    }
}

fn put_frames(out: &mut String, frames: &[StackFrame], indent: &str, view: View) {
    let widest = frames.iter().map(|f| f.function.chars().count()).max().unwrap_or(0).min(30);
    for StackFrame { file, line, function } in frames {
        let place = clean(&format!("{file}:{line}"), view.style);
        let _ = writeln!(out, "{indent}{:widest$}  {place}", clean(function, view.style));
    }
}

/// What the kernel says of threads: `S in futex (futex_wait_queue)`.
fn kernel(thread: &StackThreads) -> String {
    let state = match thread.state.as_str() {
        "R" => "runs",
        "S" => "sleeps",
        "D" => "waits for a device or a file system (D)",
        "T" | "t" => "is stopped",
        "Z" => "has ended",
        other => other,
    };
    let call = thread.call.as_ref().map_or_else(String::new, |call| format!(" in {call}"));
    let wait = thread.wait.as_ref().map_or_else(String::new, |wait| format!(", kernel: {wait}"));
    format!("{state}{call}{wait}")
}

fn put_worker(out: &mut String, worker: &WorkerStacks, view: View) {
    let _ = writeln!(out, "\n{}", format!("worker {}", worker.worker).style(view.style, "1"));
    for process in &worker.processes {
        put_process(out, process, view);
    }
    if worker.omitted > 0 {
        let _ = writeln!(out, "  and {} more processes", worker.omitted);
    }
}

fn put_process(out: &mut String, process: &ProcessStacks, view: View) {
    let rank = match (process.rank, process.main) {
        (Some(rank), true) => format!("rank {rank}"),
        (Some(rank), false) => format!("started by rank {rank}"),
        (None, _) => "of no rank".to_owned(),
    };
    let _ = writeln!(out, "  process {}, {rank}: {}", process.pid, clean(&process.command, view.style));
    if let Some(note) = &process.note {
        let _ = writeln!(out, "    {}", format!("({note})").style(view.style, "33"));
    }
    for thread in &process.python {
        let name = match (&thread.name, thread.main) {
            (_, true) => "main thread".to_owned(),
            (Some(name), false) => format!("thread {}", clean(name, view.style)),
            (None, false) => format!("thread {}", thread.id),
        };
        let _ = writeln!(out, "    {name}");
        put_frames(out, &thread.frames, "      ", view);
        if thread.cut {
            out.push_str("      ...\n");
        }
    }
    for thread in &process.threads {
        let times = if thread.count > 1 { format!("{} x ", thread.count) } else { String::new() };
        let text = format!("{times}{} {}", clean(&thread.name, view.style), kernel(thread));
        let _ = writeln!(out, "    {}", text.style(view.style, "2"));
        if !thread.kernel.is_empty() {
            let _ = writeln!(out, "      {}", thread.kernel.join(" < ").style(view.style, "2"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::style::Style;
    use aviflow_api::rest::{MissingStacks, StackPython};

    fn frame(function: &str, file: &str, line: u32) -> StackFrame {
        StackFrame { file: file.into(), line, function: function.into() }
    }

    fn sample() -> Stacks {
        let thread = |wait: &str, call: &str| StackThreads {
            count: 1,
            name: "pt_main_thread".into(),
            main: true,
            state: "S".into(),
            call: Some(call.into()),
            wait: Some(wait.into()),
            kernel: vec![wait.into(), "do_syscall_64".into()],
        };
        let frames = vec![frame("all_reduce", "torch/distributed.py", 2501), frame("train", "train.py", 40)];
        let odd = vec![frame("read", "data.py", 17), frame("train", "train.py", 31)];
        let group = |ranks: &[u32], signature: &str, frames: &[StackFrame], thread| StackGroup {
            ranks: ranks.to_vec(),
            signature: Some(signature.into()),
            frames: frames.to_vec(),
            thread: Some(thread),
            note: None,
        };
        let python = StackPython { id: "7f".into(), main: true, frames: odd.clone(), ..StackPython::default() };
        let loader = StackPython {
            id: "7e".into(),
            cut: true,
            frames: vec![frame("wait", "queue.py", 9)],
            ..StackPython::default()
        };
        let idle = StackThreads {
            count: 120,
            name: "cuda".into(),
            main: false,
            kernel: vec![],
            ..thread("futex_wait_queue", "futex")
        };
        let process = ProcessStacks {
            pid: 71,
            parent: 70,
            rank: Some(6),
            main: true,
            command: "python \x1b[2Jtrain.py".into(),
            python: vec![python, loader],
            signature: Some("1f00ab".into()),
            threads: vec![thread("pipe_read", "read"), idle],
            note: None,
        };
        let launcher = ProcessStacks {
            pid: 70,
            command: "torchrun train.py".into(),
            note: Some("no Python".into()),
            ..ProcessStacks::default()
        };
        Stacks {
            attempt: 2,
            groups: vec![
                group(&[6], "1f00ab", &odd, thread("pipe_read", "read")),
                group(&[0, 1, 2, 3, 4, 5, 7], "77aa00", &frames, thread("futex_wait_queue", "futex")),
                StackGroup {
                    ranks: vec![8],
                    signature: None,
                    frames: vec![],
                    thread: Some(StackThreads {
                        state: "D".into(),
                        wait: Some("rpc_wait_bit_killable".into()),
                        ..StackThreads::default()
                    }),
                    note: Some("no answer within 2 s".into()),
                },
            ],
            workers: vec![WorkerStacks { worker: 0, processes: vec![launcher, process], omitted: 3 }],
            missing: vec![MissingStacks { worker: 2, reason: "its agent did not answer within 15 s".into() }],
        }
    }

    #[test]
    fn the_odd_one_out_stands_out() {
        let view = View { now: 0, width: None, style: Style::plain() };
        insta::assert_snapshot!(stacks(&sample(), false, view));
    }

    #[test]
    fn all_threads_are_shown_where_that_is_wanted() {
        let view = View { now: 0, width: None, style: Style::plain() };
        let text = stacks(&sample(), true, view);
        assert!(!text.contains('\x1b'));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn of_those_that_were_taken_it_is_said_when() {
        let view = View { now: 7_500_000, width: None, style: Style::plain() };
        let taken = TakenStacks { at: 300_000, epoch: 3, stacks: sample() };
        let text = taken_then(&taken, false, view);
        let (first, rest) = text.split_once('\n').expect("lines");
        assert_eq!(first, "taken 2h ago as it stood still, attempt 2, start 3");
        assert_eq!(rest, stacks(&sample(), false, view));
    }

    #[test]
    fn nothing_found_is_said() {
        let view = View { now: 0, width: None, style: Style::plain() };
        let none = Stacks { groups: vec![], workers: vec![], missing: vec![], ..sample() };
        insta::assert_snapshot!(stacks(&none, false, view));
    }
}
