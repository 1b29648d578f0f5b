//! `server`: the control plane of this machine, in the background.

use super::App;
use crate::cli::{Format, ServerCommand, StartArgs};
use crate::context;
use crate::error::{Failure, PLATFORM, Result, While};
use crate::home::ServerFile;
use crate::output::{machine, print};
use crate::render::platform;
use crate::serve::Announcement;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// After this time somebody should look why it does not end.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// One that was killed is gone by then.
const DYING_LIMIT: Duration = Duration::from_secs(10);

/// `aviflow server`
pub fn server(app: &App, command: ServerCommand) -> Result<ExitCode> {
    match command {
        ServerCommand::Start(args) => {
            let running = app.home.server()?;
            let file = start(app, &args)?;
            let word = if running.is_some() { "runs already" } else { "started" };
            print(&format!("the control plane {word} at {} (process {})\n", file.url, file.pid));
            if running.is_some() && args != StartArgs::default() {
                print("its pool and address are as before; stop it first to change them\n");
            }
            Ok(ExitCode::SUCCESS)
        }
        ServerCommand::Stop => stop(app),
        ServerCommand::Status { output } => status(app, output.format),
    }
}

/// Starts it, unless it runs, and waits until it answers.
pub fn start(app: &App, args: &StartArgs) -> Result<ServerFile> {
    let _only = app.home.lock_start()?;
    if let Some(running) = app.home.server()? {
        if context::local(&app.home)?.is_some_and(|client| client.server().is_ok()) {
            return Ok(running);
        }
        // One that was killed holds its lock until the last of it is gone.
        if !stops(app, DYING_LIMIT)? {
            return Err(stuck(app, running.pid, "does not answer"));
        }
    }
    let log_path = app.home.join("server.log");
    let open = OpenOptions::new().append(true).create(true).mode(0o600).open(&log_path);
    let log = open.or_fail(|| format!("{} cannot be opened", log_path.display()))?;
    let begin = log.metadata().map(|m| m.len()).unwrap_or(0);
    let program = std::env::current_exe().or_fail(|| "this program cannot be found".to_owned())?;
    let mut command = Command::new(program);
    command.arg("serve").arg("--background").arg("--home").arg(app.home.path());
    let number = |n: Option<u32>| n.map(|n| n.to_string());
    let options = [
        ("--nodes", number(args.nodes)),
        ("--gpus-per-node", number(args.gpus_per_node)),
        ("--gpu-type", args.gpu_type.clone()),
        ("--listen", args.listen.clone()),
    ];
    for (option, value) in options {
        if let Some(value) = value {
            command.arg(option).arg(value);
        }
    }
    // Its folder would otherwise be in use for as long as it runs.
    command.current_dir(app.home.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().or_fail(|| "the control plane cannot be started".to_owned())?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).or_fail(|| "the control plane cannot be heard".to_owned())?;
    }
    match serde_json::from_str::<Announcement>(&line) {
        Ok(Announcement::Ready(file)) => Ok(file),
        Ok(Announcement::Failed { message, help, code }) => {
            let failure = Failure::new(message).code(code);
            Err(match help {
                Some(help) => failure.help(help),
                None => failure.help(format!("its log is {}", log_path.display())),
            })
        }
        Err(_) => {
            let mut failure = Failure::platform("the control plane ended before it was ready; its last words:");
            for line in tail(&log_path, begin) {
                failure = failure.why(line);
            }
            Err(failure.help(format!("its log is {}", log_path.display())))
        }
    }
}

/// The last lines of a file after an offset.
fn tail(path: &std::path::Path, from: u64) -> Vec<String> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(from))?;
        file.take(1 << 16).read_to_string(&mut text)
    });
    match read {
        Ok(_) => text.lines().rev().take(10).map(str::to_owned).collect::<Vec<_>>().into_iter().rev().collect(),
        Err(_) => Vec::new(),
    }
}

fn stop(app: &App) -> Result<ExitCode> {
    let Some(file) = app.home.server()? else {
        print(&format!("no control plane runs in {}\n", app.home.path().display()));
        return Ok(ExitCode::SUCCESS);
    };
    // One that does not answer is ended all the same; then nobody knows what goes on.
    let answer = context::local(&app.home)?.and_then(|client| client.stop().ok());
    if answer.is_none() {
        let pid = i32::try_from(file.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Failure::platform(format!("server.json names no process: {}", file.pid)))?;
        kill_process(pid, Signal::TERM).or_fail(|| format!("process {} cannot be ended", file.pid))?;
    }
    if !stops(app, STOP_LIMIT)? {
        return Err(stuck(app, file.pid, "does not end"));
    }
    print(&format!("stopped the control plane (process {})\n", file.pid));
    if let Some(answer) = answer {
        print(&goes_on(&answer.running, answer.waiting));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the control plane is gone within this time.
fn stops(app: &App, limit: Duration) -> Result<bool> {
    let (done, wait) = mpsc::channel();
    let home = app.home.clone();
    std::thread::spawn(move || done.send(home.wait_stopped()));
    match wait.recv_timeout(limit) {
        Ok(waited) => waited.map(|()| true),
        Err(_) => Ok(false),
    }
}

fn stuck(app: &App, pid: u32, what: &str) -> Failure {
    let log = app.home.join("server.log");
    Failure::platform(format!("process {pid}, the control plane in {}, {what}", app.home.path().display()))
        .help(format!("see {}, then `kill -9 {pid}`; nothing that was acknowledged is lost", log.display()))
}

/// What is left behind, and how to see it.
pub fn goes_on(running: &[String], waiting: u32) -> String {
    let mut out = String::new();
    if !running.is_empty() {
        out.push_str(&format!("  goes on    {}\n", running.join(", ")));
    }
    if waiting > 0 {
        out.push_str(&format!("  waits on   {waiting} in the queue\n"));
    }
    if !out.is_empty() {
        out.push_str("  come back  aviflow server start && aviflow ls\n");
    }
    out
}

fn status(app: &App, format: Format) -> Result<ExitCode> {
    let Some(client) = context::local(&app.home)? else {
        match format {
            Format::Table => print(&format!(
                "no control plane runs in {}\nstart it with `aviflow server start`\n",
                app.home.path().display()
            )),
            Format::Json | Format::Yaml => print(&machine(format, &json!({"running": false, "home": app.home.path()}))),
        }
        return Ok(ExitCode::from(1));
    };
    let info = client.server().map_err(|f| f.code(PLATFORM))?;
    app.output.answer(format, &info, |view| platform::server(&info, client.url(), view))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_is_said() {
        assert_eq!(goes_on(&[], 0), "");
        insta::assert_snapshot!(goes_on(&["default/a".into(), "default/b".into()], 3), @r"
          goes on    default/a, default/b
          waits on   3 in the queue
          come back  aviflow server start && aviflow ls
        ");
    }
}
