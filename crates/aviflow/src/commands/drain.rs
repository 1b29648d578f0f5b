//! `node drain`, `node drains` and `node undrain`.

use super::App;
use crate::cli::{DrainArgs, Format, Why};
use crate::error::{Failure, Result};
use crate::output::{note, now, print};
use crate::render::drain as render;
use crate::render::number::parse_moment;
use aviflow_api::admin::ranges::expand;
use aviflow_api::duration::Duration;
use aviflow_api::rest::{DrainAction, DrainRequest, parse_selector};
use std::collections::BTreeMap;

/// `aviflow node drain`
pub fn drain(app: &App, args: DrainArgs) -> Result<()> {
    let request = request(args, now())?;
    let client = app.client()?;
    let answer = client.drain(&request)?;
    print(&render::answer(&request, &answer, client.context(), app.output.view()));
    answer.warnings.iter().for_each(|warning| note(&format!("warning: {warning}")));
    Ok(())
}

/// What is asked for, with its times as instants.
fn request(args: DrainArgs, now: i64) -> Result<DrainRequest> {
    let moment = |option: &str, text: &Option<String>| -> Result<Option<i64>> {
        let Some(text) = text else { return Ok(None) };
        let at = parse_moment(text, now).ok_or_else(|| {
            Failure::usage(format!("{option}: `{text}` is no time"))
                .help("write `22:00` (UTC), a date and time (2026-03-01T22:00), or `+2h` from now")
        })?;
        if at < now {
            return Err(Failure::usage(format!("{option}: {text} is over")).help("leave it out to begin now"));
        }
        Ok(Some(at))
    };
    let length = args.length.as_deref().map(|text| {
        let length: std::result::Result<Duration, _> = text.parse();
        length.map(|d| d.0.0).map_err(|e| Failure::usage(format!("--for: {e}")))
    });
    let selector = args.selector.as_deref().map(parse_selector).transpose();
    let selector = selector.map_err(|e| Failure::from_server(400, e))?;
    Ok(DrainRequest {
        nodes: args.nodes,
        selector: selector.unwrap_or_else(BTreeMap::new),
        at: moment("--at", &args.at)?,
        length: length.transpose()?,
        max_unavailable: args.max_unavailable,
        by: moment("--by", &args.by)?,
        reason: Some(args.reason),
    })
}

/// `aviflow node drains`
pub fn drains(app: &App, format: Format) -> Result<()> {
    let drains = app.client()?.drains()?;
    if drains.is_empty() && format == Format::Table {
        note("no node is drained");
        return Ok(());
    }
    app.output.answer(format, &drains, |view| render::drains(&drains, view))
}

/// `aviflow node undrain`
pub fn undrain(app: &App, name: &str, why: Why) -> Result<()> {
    let names = expand(name).map_err(|fault| Failure::usage(fault.message).help(fault.help))?;
    let client = app.client()?;
    for name in &names {
        let answer = client.act_on_drain(name, &DrainAction::Cancel { reason: why.reason.clone() })?;
        print(&render::called_off(name, &answer, client.context()));
        answer.warnings.iter().for_each(|warning| note(&format!("warning: {warning}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, NodeCommand};
    use crate::render::samples::NOW;
    use clap::Parser;

    fn of(words: &str) -> Result<DrainRequest> {
        let words = format!("aviflow node drain {words} --reason x");
        let cli = Cli::try_parse_from(words.split(' ')).map_err(|e| Failure::usage(e.to_string()))?;
        match cli.command {
            Command::Node { command: Some(NodeCommand::Drain(args)) } => request(args, NOW),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_typed_becomes_a_request() {
        let nodes = vec!["node-[1-8]".to_owned()];
        let plain = DrainRequest { nodes, reason: Some("x".into()), ..DrainRequest::default() };
        assert_eq!(of("node-[1-8]"), Ok(plain.clone()));
        let window = DrainRequest { at: Some(NOW + 36_000_000), length: Some(7_200_000), ..plain.clone() };
        assert_eq!(of("node-[1-8] --at 22:00 --for 2h"), Ok(window));
        let selector = BTreeMap::from([("leaf".to_owned(), "leaf-1".to_owned())]);
        let by = Some(NOW + 86_400_000);
        let rolling = DrainRequest { nodes: vec![], selector, max_unavailable: Some(2), by, ..plain };
        assert_eq!(of("--selector leaf=leaf-1 --max-unavailable 2 --by +24h"), Ok(rolling));
    }

    #[test]
    fn what_cannot_be_is_refused_here() {
        let cases = [
            ("node-1 --at soon", "--at: `soon` is no time"),
            ("node-1 --at 2026-02-01", "--at: 2026-02-01 is over"),
            ("node-1 --for 2", "--for: `2` has no unit"),
            ("-l leaf", "`leaf` is no `key=value`"),
            ("node-1 --at 22:00 --by 23:00", "cannot be used with"),
            ("node-1 -l leaf=a", "cannot be used with"),
            ("--for 2h", "required"),
            ("node-1 --max-unavailable 0", "0 is not in"),
        ];
        for (words, message) in cases {
            let failure = of(words).expect_err(words);
            assert!(failure.message.contains(message), "{words}: {}", failure.message);
            assert_eq!(failure.code, crate::error::USAGE, "{words}");
        }
    }
}
