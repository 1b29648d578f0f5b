//! `dev`: a shell on the pool, under queue and quota as any other job.
//!
//! The job itself holds its GPUs for the shell, and ends once no terminal has been open for a while: it needs neither
//! this program nor the control plane to remember that somebody went away.

use super::App;
use super::run::{client, warn};
use crate::channel::{has_terminal, terminal};
use crate::cli::{DevArgs, DevPlace, SubmitArgs};
use crate::client::{Client, lost};
use crate::error::{Failure, PLATFORM, Result, While, exit_code};
use crate::follow::Follower;
use crate::output::{note, now, print};
use crate::submit::{load, prepare};
use aviflow_api::duration::Duration;
use aviflow_api::rest::{JobAction, JobEvent};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::process::ExitCode;

/// Holds the place of the shells: ends once no terminal has been open for so many seconds. Who is at one has the whole
/// grace to save what he has, when the job must leave.
const HOLD: &str = r#"trap 'asked=yes' TERM
left=SECONDS
while [ "$left" -gt 0 ]; do
  sleep 1 & wait $!
  open=0
  if [ -r "$AVIFLOW_TERMINALS" ]; then read -r open < "$AVIFLOW_TERMINALS"; fi
  if [ "$open" != 0 ]; then left=SECONDS; elif [ -n "$asked" ]; then exit 0; else left=$((left - 1)); fi
done
echo 'no terminal was open for SECONDS s: the GPUs are given back'
"#;

/// The best shell that there is.
const SHELL: &str = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi";

/// `aviflow dev`
pub fn dev(app: &App, args: DevArgs) -> Result<ExitCode> {
    has_terminal()?;
    let DevArgs { gpus, grace, shell, place } = args;
    let grace: Duration = grace.parse().map_err(|e| {
        Failure::usage(format!("`{grace}` is no duration: {e}")).help("write it with a unit, such as `1m` or `1h`")
    })?;
    let seconds = (grace.0.0 / 1000).max(1);
    let submit = document(gpus, seconds, place);
    let loaded = load(&submit, &app.config, app.output.error_style)?;
    let client = client(app)?;
    let prepared = prepare(&client, loaded, &submit, app.output)?;
    warn(&prepared);
    prepared.upload(&client)?;
    let job = client.submit(&prepared.submit)?.summary;
    // The full key: a bare name would mean a later job of the same name.
    let key = format!("{}/{}", job.namespace, job.name);
    print(&format!("submitted {key} to {}\n", client.context()));
    end_on_signals(&client, &key)?;
    wait(app, &client, &key)?;
    let shell = if shell.is_empty() { ["sh", "-c", SHELL].map(str::to_owned).to_vec() } else { shell };
    match terminal(&client, &key, 0, shell) {
        Ok(code) => {
            client.act(&key, &JobAction::Cancel)?;
            note(&format!("{key} ends and gives its GPUs back"));
            Ok(ExitCode::from(exit_code(code)))
        }
        Err(failure) if failure.code == PLATFORM => Err(failure.help(format!(
            "for {seconds} s the GPUs are kept: `aviflow exec -it {key} -- bash` comes back, `aviflow cancel {key}` \
             gives them back now"
        ))),
        // It left for another job, or reached its time limit: the timeline says it.
        Err(failure) => Err(failure.help(format!("`aviflow show {key}` says what became of it"))),
    }
}

/// The job that holds the place of a shell, which is given back after so many seconds.
fn document(gpus: u32, seconds: i64, place: DevPlace) -> SubmitArgs {
    let DevPlace { environment, queue, gpu_type, time_limit, name, code, mut set, env } = place;
    // A shell that is lost is no failure to be repeated.
    set.insert(0, "retry.failures=0".to_owned());
    SubmitArgs {
        arguments: vec!["sh".to_owned(), "-c".to_owned(), HOLD.replace("SECONDS", &seconds.to_string())],
        name: Some(name),
        gpus_per_node: Some(gpus.to_string()),
        time_limit: Some(time_limit),
        max_snapshot: "100MB".to_owned(),
        environment,
        queue,
        gpu_type,
        code,
        set,
        env,
        ..SubmitArgs::default()
    }
}

/// Waits until the job runs, and says meanwhile why it does not.
fn wait(app: &App, client: &Client, key: &str) -> Result<()> {
    let mut follower = Follower::new(app.output.style, false);
    for event in client.events(key)? {
        let event = event?;
        let runs = matches!(&event, JobEvent::Job { job } if job.phase == "Running");
        for line in follower.on(event, now()) {
            print(&format!("{line}\n"));
        }
        if runs {
            return Ok(());
        }
        if let Some(code) = follower.end() {
            return Err(Failure::new(format!("{key} ended before it had a shell"))
                .code(exit_code(code))
                .help(format!("`aviflow show {key}` says why")));
        }
    }
    Err(lost("it ended before the job ran"))
}

/// Who is ended while he waits wants no shell any more. On the terminal, Ctrl-C is a key like others.
fn end_on_signals(client: &Client, key: &str) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).or_fail(|| "Ctrl-C cannot be caught".to_owned())?;
    let (client, key) = (client.clone(), key.to_owned());
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Otherwise it ends by itself.
            if client.act(&key, &JobAction::Cancel).is_ok() {
                note(&format!("{key} is cancelled"));
            }
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_place_is_held_while_a_terminal_is_open() {
        let folder = tempfile::tempdir().expect("a folder");
        let terminals = folder.path().join("terminals");
        let script = HOLD.replace("SECONDS", "1");
        let run = |script: &str| {
            let out = Command::new("sh").args(["-c", script]).env("AVIFLOW_TERMINALS", &terminals).output();
            let out = out.expect("sh");
            (out.status.code(), String::from_utf8_lossy(&out.stdout).into_owned())
        };
        // Nobody ever came: there is not even the file.
        let ended = (Some(0), "no terminal was open for 1 s: the GPUs are given back\n".to_owned());
        assert_eq!(run(&script), ended);
        // Somebody is there for two looks, then nobody.
        std::fs::write(&terminals, "1\n").expect("written");
        let looks = "looks=0\nsleep() { looks=$((looks + 1)); echo look; }\n";
        let leaves =
            script.replace("sleep 1 & wait $!", "sleep; if [ $looks = 3 ]; then echo 0 > \"$AVIFLOW_TERMINALS\"; fi");
        let (code, out) = run(&format!("{looks}{leaves}"));
        assert_eq!((code, out.matches("look\n").count()), (Some(0), 3), "{out}");
    }
}
