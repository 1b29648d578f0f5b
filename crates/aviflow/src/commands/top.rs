//! `top`: what runs now, again and again in the same place on a terminal, once in a pipe.

use super::App;
use crate::cli::{Format, TopArgs};
use crate::client::Client;
use crate::error::{Failure, PLATFORM, Result};
use crate::output::{machine, print};
use crate::render::top as render;
use signal_hook::consts::SIGINT;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// `aviflow top`
pub fn top(app: &App, args: &TopArgs) -> Result<()> {
    let client = app.client()?;
    let every = Duration::from_secs(args.every.into());
    if args.once || !app.output.terminal || args.output.format != Format::Table {
        print(&frame(app, &client, args)?);
        return Ok(());
    }
    let interrupted = interrupts()?;
    let mut above = 0;
    loop {
        let text = match frame(app, &client, args) {
            Ok(text) => text,
            // The control plane may come back: what runs, runs on.
            Err(failure) if failure.code == PLATFORM && above > 0 => format!("{}\n", failure.message),
            Err(failure) => return Err(failure),
        };
        let every_ms = i64::try_from(every.as_millis()).unwrap_or(i64::MAX);
        let text = render::heading(every_ms, app.output.view()) + &text;
        let text = render::fit(&text, app.output.rows().saturating_sub(1));
        // Up to where the last frame began, and away with it.
        let back = if above > 0 { format!("\x1b[{above}F\x1b[J") } else { String::new() };
        // A line that is too long is cut, as one that goes on below would move all others.
        print(&format!("{back}\x1b[?7l{text}\x1b[?7h"));
        above = text.lines().count();
        match interrupted.recv_timeout(every) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// What is shown at once.
fn frame(app: &App, client: &Client, args: &TopArgs) -> Result<String> {
    let view = app.output.view();
    let table = args.output.format == Format::Table;
    Ok(match &args.job {
        Some(job) => {
            let ranks = client.ranks(job)?;
            if table { render::ranks(&ranks, view) } else { machine(args.output.format, &ranks) }
        }
        None => {
            let top = client.top(app.namespace.as_deref())?;
            if table { render::top(&top, view) } else { machine(args.output.format, &top) }
        }
    })
}

/// Says when Ctrl-C was pressed.
fn interrupts() -> Result<std::sync::mpsc::Receiver<()>> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT])
        .map_err(|e| Failure::new(format!("Ctrl-C cannot be caught: {e}")))?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            // Whoever waited may have ended.
            let _ = sender.send(());
        }
    });
    Ok(receiver)
}
