//! A terminal beside a rank, on this one.

use super::{Channel, Out, Put};
use crate::client::Client;
use crate::error::{Failure, Result, While};
use aviflow_api::rest::{ChannelTo, OpenChannel, TerminalSize};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGWINCH};
use signal_hook::iterator::Signals;
use std::io::{IsTerminal, Read, Write, stdin, stdout};

/// Keys that are read at once.
const KEYS: usize = 16 << 10;

/// This terminal, as a program's that reads every key: Ctrl-C goes to the other end. Dropping this puts it back.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Raw> {
        let before = tcgetattr(stdin()).or_fail(|| "the terminal cannot be used".to_owned())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw).or_fail(|| "the terminal cannot be used".to_owned())?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // What is typed ahead is the shell's that comes next.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
    }
}

fn size() -> Option<TerminalSize> {
    // Some terminals do not know how large they are.
    let size = tcgetwinsize(stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0)?;
    Some(TerminalSize { columns: size.ws_col, rows: size.ws_row })
}

/// Refuses where there is no terminal here.
pub fn has_terminal() -> Result<()> {
    if stdin().is_terminal() && stdout().is_terminal() {
        return Ok(());
    }
    Err(Failure::usage("a terminal needs one here, and standard input or output is none")
        .help("`aviflow exec JOB -- COMMAND` runs a command without one"))
}

/// Runs a command on a terminal beside a rank; gives its exit code.
pub fn terminal(client: &Client, job: &str, rank: u32, argv: Vec<String>) -> Result<i32> {
    has_terminal()?;
    let to = ChannelTo::Terminal {
        argv,
        size: size().unwrap_or(TerminalSize { columns: 80, rows: 24 }),
        term: std::env::var("TERM").ok().filter(|term| !term.is_empty()),
    };
    let mut channel = Channel::open(client, job, &OpenChannel { rank: Some(rank), to })?;
    let raw = Raw::enter()?;
    let keys = channel.input.clone();
    std::thread::spawn(move || {
        let mut buffer = vec![0; KEYS];
        while let Ok(n) = stdin().lock().read(&mut buffer) {
            let put = if n == 0 { Put::End } else { Put::Data(buffer[..n].to_vec()) };
            if keys.send(put).is_err() || n == 0 {
                return;
            }
        }
    });
    let mut signals = Signals::new([SIGWINCH, SIGTERM, SIGHUP]).or_fail(|| "signals cannot be taken".to_owned())?;
    let (sizes, before) = (channel.input.clone(), raw.0.clone());
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if signal != SIGWINCH {
                let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
                std::process::exit(128 + signal);
            }
            if let Some(size) = size()
                && sizes.send(Put::Size(size)).is_err()
            {
                return;
            }
        }
    });
    loop {
        match channel.next()? {
            Out::Data(bytes) => {
                let mut out = stdout().lock();
                out.write_all(&bytes).and_then(|()| out.flush()).or_fail(|| "nobody sees the terminal".to_owned())?;
            }
            Out::End => {}
            Out::Exit(code) => return Ok(code),
        }
    }
}
