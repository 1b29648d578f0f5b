//! `exec`.

use super::App;
use crate::channel::terminal;
use crate::cli::ExecArgs;
use crate::client::lost;
use crate::error::{Failure, Result, While, exit_code};
use aviflow_api::rest::{Exec, ExecFrame};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::io::{Read, Write};
use std::process::ExitCode;

/// `aviflow exec`
pub fn exec(app: &App, args: ExecArgs) -> Result<ExitCode> {
    let client = app.client()?;
    if args.tty {
        let code = terminal(&client, &args.job, args.rank, args.command)?;
        return Ok(ExitCode::from(exit_code(code)));
    }
    let mut stdin = Vec::new();
    if args.stdin {
        std::io::stdin().lock().read_to_end(&mut stdin).or_fail(|| "standard input cannot be read".to_owned())?;
    }
    let exec = Exec { argv: args.command, rank: Some(args.rank), stdin: STANDARD.encode(stdin) };
    for frame in client.exec(&args.job, &exec)? {
        match frame? {
            ExecFrame::Stdout { data } => write(&mut std::io::stdout().lock(), &data)?,
            ExecFrame::Stderr { data } => write(&mut std::io::stderr().lock(), &data)?,
            ExecFrame::Exit { code } => return Ok(ExitCode::from(exit_code(code))),
            ExecFrame::Failed { reason } => {
                return Err(Failure::new(format!(
                    "the command could not be run beside rank {} of {}: {reason}",
                    args.rank, args.job
                ))
                .help(format!("`aviflow show {}` says where its ranks are", args.job)));
            }
        }
    }
    Err(lost("it ended before the command"))
}

pub(super) fn write(out: &mut impl Write, data: &str) -> Result<()> {
    let bytes =
        STANDARD.decode(data).map_err(|e| Failure::platform(format!("output of the command came damaged: {e}")))?;
    if out.write_all(&bytes).and_then(|()| out.flush()).is_err() {
        // Whoever read this has gone; nobody is left to be told.
        std::process::exit(0);
    }
    Ok(())
}
