//! `logs`.

use super::App;
use crate::cli::{Format, LogsArgs};
use crate::client::{LogFilter, ago};
use crate::error::{Failure, Result};
use crate::follow::log_line;
use crate::output::{machine, note, print};

/// `aviflow logs`
pub fn logs(app: &App, args: LogsArgs) -> Result<()> {
    let client = app.client()?;
    let filter = LogFilter {
        follow: args.follow,
        attempt: args.attempt,
        ranks: args.rank,
        since: args.since.as_deref().map(ago).transpose()?,
        grep: args.grep,
        tail: args.tail,
    };
    let mut any = false;
    for line in client.logs(&args.job, &filter)? {
        let line = line.map_err(|f| come_back(f, &args.job, args.follow))?;
        any = true;
        match args.output.format {
            Format::Table => print(&format!("{}\n", log_line(&line, args.timestamps, app.output.style))),
            Format::Json => print(&format!("{}\n", serde_json::to_string(&line).unwrap_or_default())),
            Format::Yaml => print(&format!("---\n{}", machine(Format::Yaml, &line))),
        }
    }
    if !any && args.output.format == Format::Table {
        note(&format!("no output of {} yet that matches; `aviflow show {0}` says how it stands", args.job));
    }
    Ok(())
}

fn come_back(failure: Failure, job: &str, follow: bool) -> Failure {
    let command = if follow { format!("aviflow logs -f {job}") } else { format!("aviflow logs {job}") };
    failure.help(format!("the job goes on; see `aviflow server status`, then `{command}`"))
}
