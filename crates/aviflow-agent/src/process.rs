//! Starting processes of a worker: ranks and commands.
//!
//! Each is in a session of its own, dies with the agent, has no descriptor of
//! the agent's, and carries the mark. Its environment is a clean base, what the
//! spec says, and the wiring, of which the later win.

use crate::protocol::channel::Size;
use crate::protocol::{MARK, WorkerSpec};
use crate::sys::{self, Pid};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// What a process gets of the agent's own environment.
const BASE: [&str; 6] = ["PATH", "HOME", "LANG", "TZ", "TMPDIR", "USER"];

/// Bytes of a pipe: a rank seldom waits for an agent that is busy.
pub const PIPE: i32 = 256 << 10;

/// A started process and the reading ends of its output.
#[derive(Debug)]
pub struct Started {
    /// Its process, session and process group.
    pub pid: Pid,
    /// Standard output.
    pub out: File,
    /// Standard error.
    pub err: File,
}

/// The environment of a process: `own` is the agent's.
#[must_use]
pub fn environment(
    own: impl IntoIterator<Item = (OsString, OsString)>,
    spec: &WorkerSpec,
    wiring: &BTreeMap<&'static str, String>,
    mark: &str,
) -> BTreeMap<OsString, OsString> {
    let mut environment: BTreeMap<OsString, OsString> =
        own.into_iter().filter(|(name, _)| spec.inherit || BASE.iter().any(|base| name == base)).collect();
    // Without it, Python holds back the output that somebody waits for.
    environment.insert("PYTHONUNBUFFERED".into(), "1".into());
    for (name, value) in &spec.env {
        // A name that no environment can hold would keep the process from starting.
        if !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0') {
            environment.insert(name.into(), value.into());
        }
    }
    for (name, value) in crate::wiring::DEFAULTS {
        environment.entry(name.into()).or_insert_with(|| value.into());
    }
    for (name, path) in &spec.prepend {
        let list = environment.entry(name.into()).or_default();
        let rest = std::mem::replace(list, path.into());
        if !rest.is_empty() {
            list.push(":");
            list.push(rest);
        }
    }
    for reserved in crate::wiring::RESERVED {
        // Also what this rank does not get: a `RANK` of the job's would mislead torchrun's processes.
        if *reserved != "CUDA_VISIBLE_DEVICES" {
            environment.remove(&OsString::from(reserved));
        }
    }
    environment.extend(wiring.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))));
    environment.insert(MARK.into(), mark.into());
    environment
}

/// Starts a program.
///
/// # Errors
/// A reason for people, which names the program or the folder and what to do.
pub fn start(
    argv: &[String],
    cwd: &Path,
    environment: &BTreeMap<OsString, OsString>,
    stdin: Option<File>,
) -> Result<Started, String> {
    let (mut command, program) = command(argv, cwd, environment)?;
    command.stdin(stdin.map_or_else(Stdio::null, Stdio::from)).stdout(Stdio::piped()).stderr(Stdio::piped());
    sys::isolate(&mut command);
    let mut child = command.spawn().map_err(|e| explain(program, cwd, &e))?;
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(format!("`{program}` was started without its pipes"));
    };
    let (out, err) = (File::from(OwnedFd::from(out)), File::from(OwnedFd::from(err)));
    for pipe in [&out, &err] {
        sys::enlarge_pipe(pipe, PIPE);
        sys::set_nonblocking(pipe).map_err(|e| format!("the output of `{program}` cannot be read: {e}"))?;
    }
    // The agent reaps its children by itself; dropping the handle neither waits nor kills.
    Ok(Started { pid: child.id().cast_signed(), out, err })
}

/// Starts a program on a terminal of its own; gives its process and the end of whoever shows the terminal.
///
/// # Errors
/// As [`start`], and if there is no terminal.
pub fn start_on_terminal(
    argv: &[String],
    cwd: &Path,
    environment: &BTreeMap<OsString, OsString>,
    size: Size,
) -> Result<(Pid, File), String> {
    let (mut command, program) = command(argv, cwd, environment)?;
    let (shown, used) = sys::terminal(size.columns, size.rows)
        .map_err(|e| format!("there is no terminal here ({e}): is /dev/pts mounted? Without one, leave `-t` out"))?;
    let share = || used.try_clone().map_err(|e| format!("the terminal cannot be used: {e}"));
    command.stdin(share()?).stdout(share()?).stderr(used);
    sys::isolate(&mut command);
    sys::own_terminal(&mut command);
    let child = command.spawn().map_err(|e| explain(program, cwd, &e))?;
    Ok((child.id().cast_signed(), shown))
}

/// A command that nothing was begun of, and its program.
fn command<'a>(
    argv: &'a [String],
    cwd: &Path,
    environment: &BTreeMap<OsString, OsString>,
) -> Result<(Command, &'a str), String> {
    let [program, arguments @ ..] = argv else {
        return Err("there is no program to run: give the job a `run`".to_owned());
    };
    let mut command = Command::new(program);
    command.args(arguments).current_dir(cwd).env_clear().envs(environment);
    Ok((command, program))
}

fn explain(program: &str, cwd: &Path, error: &io::Error) -> String {
    let folder = cwd.display();
    if !cwd.is_dir() {
        return format!("the working folder {folder} is not there: check the job's `code` and its mounts");
    }
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound, _) if program.contains('/') => {
            let there = cwd.join(program).exists();
            if there {
                format!(
                    "`{program}` names an interpreter in its first line that is not there: install it in the environment"
                )
            } else {
                format!(
                    "`{program}` is not there, seen from {folder}: check `run`, and that the file is part of `code`"
                )
            }
        }
        (io::ErrorKind::NotFound, _) => {
            format!(
                "there is no program `{program}` on the PATH of the job: check `run`, or choose an environment that has it"
            )
        }
        (io::ErrorKind::PermissionDenied, _) => {
            format!("`{program}` may not be executed: `chmod +x` it, or name its interpreter in `run`")
        }
        (_, Some(libc::ENOEXEC)) => {
            format!(
                "`{program}` is no program of this machine: begin a script with `#!/bin/bash`, or name its interpreter in `run`"
            )
        }
        (_, Some(libc::E2BIG)) => format!("`{program}` was given too much: shorten `run` or `env`"),
        _ => format!("`{program}` could not be started: {error}"),
    }
}

/// What torchrun left about a rank's error: its message and where it was raised.
///
/// torchrun itself ends with 1 whatever its process did, so this is the only trace of the cause.
#[must_use]
pub fn torch_error(file: &Path) -> Vec<String> {
    let Some(json) = std::fs::read(file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) else {
        return Vec::new();
    };
    torch_message(&json)
}

fn torch_message(json: &serde_json::Value) -> Vec<String> {
    let message = &json["message"];
    let text = message.as_str().or_else(|| message["message"].as_str()).unwrap_or_default();
    let stack = message["extraInfo"]["py_callstack"].as_str().unwrap_or_default();
    let stack: Vec<&str> = stack.lines().filter(|line| !line.trim().is_empty()).collect();
    let lines = stack[stack.len().saturating_sub(8)..].iter().copied();
    // The stack ends with the message.
    let message = text.lines().filter(|line| !stack.iter().any(|s| s.contains(line.trim())));
    lines.chain(message).map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wiring::tests::spec;

    fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        pairs.iter().map(|(n, v)| (OsString::from(n), OsString::from(v))).collect()
    }

    #[test]
    fn the_wiring_wins_and_the_base_is_clean() {
        let mut spec = spec();
        for (name, value) in [("RANK", "9"), ("NODE_RANK", "9"), ("PATH", "/venv/bin"), ("X", "1"), ("bad=name", "1")] {
            spec.env.insert(name.into(), value.into());
        }
        let wiring = [("NODE_RANK", "1".to_owned())].into();
        let own = env(&[("PATH", "/bin"), ("HOME", "/root"), ("AVIFLOW_LOCK_FD", "5"), ("SECRET", "x")]);
        let got = environment(own, &spec, &wiring, "m");
        let expected = env(&[
            (MARK, "m"),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            ("HOME", "/root"),
            ("NODE_RANK", "1"),
            ("PATH", "/venv/bin"),
            ("PYTHONUNBUFFERED", "1"),
            ("X", "1"),
        ]);
        assert_eq!(got.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_container_s_variables_are_inherited() {
        let mut spec = spec();
        spec.inherit = true;
        spec.env.insert("X".into(), "job".into());
        spec.prepend.insert("PYTHONPATH".into(), "/hooks".into());
        spec.prepend.insert("NEW".into(), "/new".into());
        let own = env(&[
            ("SECRET", "x"),
            ("X", "image"),
            ("PYTHONPATH", "/image"),
            ("RANK", "7"),
            ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),
        ]);
        let got = environment(own, &spec, &BTreeMap::new(), "m");
        let expected = env(&[
            (MARK, "m"),
            ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),
            ("NEW", "/new"),
            ("PYTHONPATH", "/hooks:/image"),
            ("PYTHONUNBUFFERED", "1"),
            ("SECRET", "x"),
            ("X", "job"),
        ]);
        assert_eq!(got.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_job_s_own_values_win_over_defaults() {
        for (name, value) in [("PYTHONUNBUFFERED", "0"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST")] {
            let mut spec = spec();
            spec.env.insert(name.into(), value.into());
            let got = environment([], &spec, &BTreeMap::new(), "m");
            assert_eq!(got[&OsString::from(name)], value);
        }
    }

    fn check(program: &str, cwd: &str, expected: &str) {
        let environment = env(&[("PATH", "/nowhere")]).into_iter().collect();
        let error = start(&[program.to_owned()], Path::new(cwd), &environment, None).expect_err("a failure");
        assert_eq!(error, expected);
    }

    #[test]
    fn a_failed_start_says_what_to_do() {
        check("x", "/no/folder", "the working folder /no/folder is not there: check the job's `code` and its mounts");
        check(
            "torchrun",
            "/",
            "there is no program `torchrun` on the PATH of the job: check `run`, or choose an environment that has it",
        );
        check(
            "./train.sh",
            "/",
            "`./train.sh` is not there, seen from /: check `run`, and that the file is part of `code`",
        );
        check("/etc/passwd", "/", "`/etc/passwd` may not be executed: `chmod +x` it, or name its interpreter in `run`");
    }

    #[test]
    fn torchrun_s_error_files_are_read() {
        let json = serde_json::json!({"message": {
            "message": "RuntimeError: boom",
            "extraInfo": {"py_callstack": "Traceback:\n  File \"train.py\", line 3\nRuntimeError: boom\n", "timestamp": "1"}
        }});
        assert_eq!(torch_message(&json), ["Traceback:", "  File \"train.py\", line 3", "RuntimeError: boom"]);
        assert_eq!(torch_message(&serde_json::json!({"message": "plain"})), ["plain"]);
        assert_eq!(torch_error(Path::new("/nowhere")), Vec::<String>::new());
    }
}
