//! `run` and `plan`.

use super::{App, server};
use crate::cli::{PlanArgs, RunArgs, StartArgs};
use crate::client::Client;
use crate::context;
use crate::error::{Failure, Result, exit_code};
use crate::follow::screen::{detached, follow};
use crate::output::{note, print};
use crate::render::jobs::name;
use crate::render::{plan as render_plan, summary};
use crate::submit::{Prepared, load, prepare};
use aviflow_api::rest::JobDetail;
use std::process::ExitCode;

/// `aviflow run`
pub fn run(app: &App, args: RunArgs) -> Result<ExitCode> {
    let loaded = load(&args.submit, &app.config, app.output.error_style)?;
    let client = client(app)?;
    let prepared = prepare(&client, loaded, &args.submit, app.output)?;
    warn(&prepared);
    prepared.upload(&client)?;
    let job = client.submit(&prepared.submit)?;
    submitted(app, &client, &job, args.detach)
}

/// Says what was submitted, and follows it unless that is not wanted.
pub fn submitted(app: &App, client: &Client, job: &JobDetail, detach: bool) -> Result<ExitCode> {
    let summary = &job.summary;
    print(&format!("submitted {}/{} to {}\n", summary.namespace, summary.name, client.context()));
    if detach {
        print(&detached(&name(summary)).replacen("detached; ", "", 1));
        return Ok(ExitCode::SUCCESS);
    }
    // The full key: a bare name would mean a later job of the same name.
    let key = format!("{}/{}", summary.namespace, summary.name);
    let code = follow(&app.home, client.clone(), &key, app.output)?;
    // The control plane may have come back under another address meanwhile.
    let client = app.client()?;
    print(&summary::summary(&client.job(&key)?, app.output.view()));
    Ok(ExitCode::from(exit_code(code)))
}

/// The control plane; on this machine it is started if none runs.
pub(super) fn client(app: &App) -> Result<Client> {
    if app.is_local() && app.config.current.is_none() && app.home.server()?.is_none() {
        let started = server::start(app, &StartArgs::default())?;
        note(&format!("started the control plane of this machine at {} (`aviflow server stop` ends it)", started.url));
        return context::local(&app.home)?.ok_or_else(|| {
            Failure::platform("the control plane was started and is gone again").help("see `aviflow server status`")
        });
    }
    app.client()
}

pub(super) fn warn(prepared: &Prepared) {
    if !prepared.warnings.is_empty() {
        note(prepared.warnings.trim_end());
    }
}

/// `aviflow plan`
pub fn plan(app: &App, args: &PlanArgs) -> Result<()> {
    let loaded = load(&args.submit, &app.config, app.output.error_style)?;
    let client = client(app)?;
    let prepared = prepare(&client, loaded, &args.submit, app.output)?;
    warn(&prepared);
    let answer = client.plan(&prepared.submit)?;
    app.output.answer(args.output.format, &answer, |view| render_plan::plan(&answer, &prepared.submit.provenance, view))
}
