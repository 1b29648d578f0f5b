//! The follower's words on a terminal or in a pipe, and coming back when the stream breaks.

use super::Follower;
use crate::client::{Client, lost};
use crate::context;
use crate::error::{Failure, Result};
use crate::home::Home;
use crate::output::{Output, now, print};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a control plane may be away before following ends.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between two tries to reach it.
const PAUSE: Duration = Duration::from_millis(500);

/// How often the bar is drawn while nothing happens, so that one sees that it lives.
const TICK: Duration = Duration::from_millis(120);

/// Where the follower's words go.
struct Screen {
    bar: Option<ProgressBar>,
    steps: Cell<bool>,
}

impl Screen {
    fn new(terminal: bool) -> Screen {
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
            bar.set_style(waiting_style());
            bar.enable_steady_tick(TICK);
            bar
        });
        Screen { bar, steps: Cell::new(false) }
    }

    fn lines(&self, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        let text = lines.join("\n") + "\n";
        match &self.bar {
            Some(bar) => bar.suspend(|| print(&text)),
            None => print(&text),
        }
    }

    fn status(&self, follower: &Follower) {
        let Some(bar) = &self.bar else { return };
        let status = follower.status();
        if self.steps.replace(status.steps.is_some()) != status.steps.is_some() {
            bar.set_style(if status.steps.is_some() { steps_style() } else { waiting_style() });
        }
        if let Some((step, total)) = status.steps {
            bar.set_length(total);
            bar.set_position(step);
        }
        bar.set_message(status.text);
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn waiting_style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn steps_style() -> ProgressStyle {
    ProgressStyle::with_template("[{bar:24}] {percent:>3}%  {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

/// Follows a job to its end and returns the code to exit with.
///
/// A control plane that goes away is waited for: the job goes on without it. Where it runs on
/// this machine it may come back under another address, so its file is read again each time.
pub fn follow(home: &Home, client: Client, name: &str, output: Output) -> Result<i32> {
    let mut follower = Follower::new(output.style, output.terminal);
    let screen = Screen::new(output.terminal);
    detach_on_interrupt(name, screen.bar.clone())?;
    let mut client = client;
    loop {
        let broken = match watch(&client, name, &mut follower, &screen) {
            Ok(Some(code)) => {
                screen.clear();
                return Ok(code);
            }
            Ok(None) => lost("it ended before the job"),
            Err(failure) if failure.code == crate::error::PLATFORM => failure,
            Err(failure) => {
                screen.clear();
                return Err(failure);
            }
        };
        screen.lines(&[format!("-- {}; the job goes on, waiting for the control plane", broken.message)]);
        match reconnect(home, &client) {
            Some(found) => client = found,
            None => {
                screen.clear();
                return Err(Failure::platform("the control plane did not come back; the job goes on without it")
                    .why(broken.message)
                    .help(format!("`aviflow server start`, then come back with `aviflow logs -f {name}`")));
            }
        }
        follower.again();
    }
}

fn watch(client: &Client, name: &str, follower: &mut Follower, screen: &Screen) -> Result<Option<i32>> {
    for event in client.events(name)? {
        screen.lines(&follower.on(event?, now()));
        screen.status(follower);
        if follower.end().is_some() {
            break;
        }
    }
    Ok(follower.end())
}

fn reconnect(home: &Home, client: &Client) -> Option<Client> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let found =
            if client.context() == context::LOCAL { context::local(home).ok().flatten() } else { Some(client.clone()) };
        if let Some(found) = found.filter(|c| c.server().is_ok()) {
            return Some(found);
        }
        std::thread::sleep(PAUSE);
    }
    None
}

/// Ctrl-C leaves the job alone, says how to come back, and is no failure: exit code 0.
fn detach_on_interrupt(name: &str, bar: Option<ProgressBar>) -> Result<()> {
    let mut signals = Signals::new([SIGINT]).map_err(|e| Failure::new(format!("Ctrl-C cannot be caught: {e}")))?;
    let text = detached(name);
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            if let Some(bar) = bar {
                bar.finish_and_clear();
            }
            print(&format!("\n{text}"));
            std::process::exit(0);
        }
    });
    Ok(())
}

/// What detaching says.
pub fn detached(name: &str) -> String {
    format!("detached; {name} goes on\n  come back   aviflow logs -f {name}\n  end it      aviflow cancel {name}\n")
}
