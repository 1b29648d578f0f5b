//! `usage`.

use super::App;
use crate::cli::UsageArgs;
use crate::client::ago;
use crate::error::{Failure, Result};
use crate::output::now;
use crate::render::number::parse_instant;
use crate::render::usage as render;

/// `aviflow usage`
pub fn usage(app: &App, args: &UsageArgs) -> Result<()> {
    let (from, to) = period(args)?;
    let usage = app.client()?.usage(args.by.word(), from, to)?;
    app.output.answer(args.output.format, &usage, |view| render::usage(&usage, view))
}

fn period(args: &UsageArgs) -> Result<(i64, i64)> {
    let instant = |text: &String| {
        parse_instant(text).ok_or_else(|| {
            Failure::usage(format!("`{text}` is no time")).help(
                "write a date (2026-03-01), a date and time in UTC (2026-03-01T12:00), or milliseconds since 1970",
            )
        })
    };
    let to = args.to.as_ref().map(instant).transpose()?.unwrap_or_else(now);
    let from = match &args.from {
        Some(from) => instant(from)?,
        None => {
            let span = now() - ago(&args.since)?;
            to - span
        }
    };
    if from >= to {
        return Err(Failure::usage("the period ends before it begins").help("give --from before --to"));
    }
    Ok((from, to))
}
