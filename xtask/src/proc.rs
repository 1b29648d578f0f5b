//! Running other programs: with their output shown, captured, or both.

use anyhow::{Context as _, Result, bail};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// A program to run, without the variables that `cargo run` sets for this one.
///
/// They would reach the processes of jobs, and make build scripts run again.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        let ours = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
        if ours.iter().any(|prefix| name.starts_with(prefix)) || name == "LD_LIBRARY_PATH" {
            command.env_remove(name);
        }
    }
    command
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// A program (`--bin`) or an example (`--example`) of the workspace, built as its tests are: for one package alone,
/// features of dependencies would be others, and much would be compiled again. Returns its path.
pub fn built(kind: &str, name: &str, options: &[&str]) -> Result<PathBuf> {
    must(cargo().args(["build", "--workspace", kind, name]).args(options))?;
    let folder = target()?.join("debug");
    Ok(if kind == "--example" { folder.join("examples") } else { folder }.join(name))
}

/// A command as a person would type it.
pub fn line(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let program = program.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    std::iter::once(program)
        .chain(command.get_args().map(|a| quoted(&a.to_string_lossy())))
        .collect::<Vec<_>>()
        .join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Runs with this program's own input and output.
pub fn show(command: &mut Command) -> Result<ExitStatus> {
    std::io::stdout().flush().ok();
    command.status().with_context(|| format!("`{}` could not be started", line(command)))
}

/// Runs with this program's own input and output; an exit code other than 0 is an error.
pub fn must(command: &mut Command) -> Result<()> {
    let status = show(command)?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Runs and returns standard output; an exit code other than 0 is an error that quotes standard error.
pub fn capture(command: &mut Command) -> Result<String> {
    let out =
        command.stdin(Stdio::null()).output().with_context(|| format!("`{}` could not be started", line(command)))?;
    if !out.status.success() {
        bail!("`{}` failed ({}): {}", line(command), out.status, String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// What a program said and how it ended.
pub struct Ran {
    /// Whether it ended with 0.
    pub ok: bool,
    /// Its standard output and standard error, line by line as they came.
    pub output: String,
}

/// Runs, shows the output as it comes, and keeps it.
pub fn tee(command: &mut Command) -> Result<Ran> {
    tee_unless_silent(command, Duration::MAX)
}

/// The same for a program that says what it does: it is killed once it says nothing for so long.
pub fn tee_unless_silent(command: &mut Command, silence: Duration) -> Result<Ran> {
    println!("$ {}", line(command));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("`{}` could not be started", line(command)))?;
    let (say, said) = mpsc::channel();
    let streams: [Option<Box<dyn Read + Send>>; 2] =
        [child.stdout.take().map(|s| Box::new(s) as _), child.stderr.take().map(|s| Box::new(s) as _)];
    for stream in streams.into_iter().flatten() {
        let say = say.clone();
        std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut bytes = Vec::new();
            while stream.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                if say.send(String::from_utf8_lossy(&bytes).into_owned()).is_err() {
                    return;
                }
                bytes.clear();
            }
        });
    }
    drop(say);
    let mut output = String::new();
    loop {
        match said.recv_timeout(silence) {
            Ok(text) => {
                print!("{text}");
                std::io::stdout().flush().ok();
                output.push_str(&text);
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                for process in descendants(child.id()) {
                    let _ = Command::new("kill").args(["-KILL", &process.to_string()]).status();
                }
                child.wait()?;
                bail!(
                    "`{}` said nothing for {} s and was killed{}",
                    line(command),
                    silence.as_secs(),
                    hanging(&output)
                );
            }
        }
    }
    let status = child.wait()?;
    Ok(Ran { ok: status.success(), output })
}

/// A process and all that come from it, itself last, so that nobody is there to start another.
fn descendants(process: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        children.flat_map(|list| list.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>()).collect();
    let mut all: Vec<u32> = children.into_iter().flat_map(descendants).collect();
    all.push(process);
    all
}

/// The tests that a runner said were running for long, and of which nothing was heard since.
fn hanging(output: &str) -> String {
    let mut tests: Vec<&str> = Vec::new();
    for line in output.lines().filter_map(|l| l.strip_prefix("test ")) {
        if let Some((name, _)) = line.split_once(" has been running for over") {
            tests.push(name);
        } else if let Some((name, _)) = line.split_once(" ... ") {
            tests.retain(|t| *t != name);
        }
    }
    if tests.is_empty() { String::new() } else { format!("; still running: {}", tests.join(", ")) }
}

/// Where a program is, by `PATH`.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| is_executable(file))
}

fn is_executable(file: &std::path::Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Cargo's target folder.
pub fn target() -> Result<PathBuf> {
    let json = capture(cargo().args(["metadata", "--format-version=1", "--no-deps", "--offline"]))?;
    let json: serde_json::Value = serde_json::from_str(&json)?;
    Ok(json["target_directory"].as_str().context("cargo metadata names no target folder")?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_can_be_typed_again() {
        let check = |args: &[&str], expected: &str| assert_eq!(line(Command::new("/usr/bin/x").args(args)), expected);
        check(&["a", "--b=c"], "x a --b=c");
        check(&["a b", "", "it's"], r"x 'a b' '' 'it'\''s'");
    }

    #[test]
    fn tee_keeps_both_streams_and_the_outcome() -> Result<()> {
        let ran = tee(command("sh").args(["-c", "echo out; echo err >&2; exit 3"]))?;
        assert!(!ran.ok);
        assert!(ran.output.contains("out\n") && ran.output.contains("err\n"), "{:?}", ran.output);
        Ok(())
    }

    #[test]
    fn what_hangs_is_killed_and_named() {
        let said = "echo 'test a ... ok'; echo 'test b has been running for over 60 seconds'; sleep 1000 & wait";
        let silent = tee_unless_silent(command("sh").args(["-c", said]), Duration::from_millis(300));
        let error = silent.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.ends_with("was killed; still running: b"), "{error}");
    }
}
