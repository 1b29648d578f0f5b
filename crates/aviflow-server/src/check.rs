//! A short test on a node before it takes work again.
//!
//! The node is cordoned while it is tested, so that nothing starts beside the test, and opened only by a test that
//! passed: whoever goes away in between, also the control plane, leaves it cordoned.

use crate::access::User;
use crate::app::{App, blocking};
use crate::body::NodeTest;
use crate::error::Failure;
use crate::exec::hand_on;
use crate::params::{Input, Name};
use crate::pool::one_node;
use aviflow_api::rest::{ExecFrame, NodeCheck};
use aviflow_engine::engine::{Answer, Input as EngineInput};
use axum::extract::State;
use axum::response::Response;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::mpsc;

pub(crate) async fn check(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(check): Input<NodeCheck>,
) -> Result<Response, Failure> {
    let (state, node, asked, person) = (app.clone(), name.clone(), check.clone(), by.clone());
    let frames = blocking(move || begin(&state, &node, asked, &person)).await?;
    let state = app.clone();
    // Before it is told, so that whoever hears of it finds the node open.
    let open = async move |frame| match frame {
        ExecFrame::Exit { code: 0 } => match blocking(move || passed(&state, &name, check.keep_cordoned, by)).await {
            Ok(()) => frame,
            Err(failure) => {
                ExecFrame::Failed { reason: format!("it passed, and stays cordoned: {}", failure.sentence()) }
            }
        },
        frame => frame,
    };
    Ok(hand_on(app, frames, open))
}

/// Cordons the node, and begins where nothing runs on it.
fn begin(app: &App, name: &str, check: NodeCheck, by: &str) -> Result<mpsc::Receiver<ExecFrame>, Failure> {
    // Answers with the similar names where there is none.
    let node = one_node(app, name.to_owned())?;
    if node.condition == "Gone" {
        return Err(Failure::conflict("nodeGone", format!("node `{name}` is not there, so nothing can be run on it")));
    }
    occupied(app, name)?;
    let reason = check.reason.as_deref().unwrap_or("it is checked");
    cordon(app, name, true, by.to_owned(), reason)?;
    // Something may have started before the cordon.
    occupied(app, name)?;
    let gpus = node.gpus.iter().filter(|gpu| !gpu.unhealthy).count();
    let test = NodeTest { node: name.to_owned(), gpus, image: check.image, run: check.run };
    app.parts.body.check(test).map_err(|refusal| Failure::conflict("checkRefused", refusal.0))
}

/// Ends what kept the node from work: its quarantine, and the cordon unless that is to stay.
fn passed(app: &App, name: &str, keep_cordoned: bool, by: String) -> Result<(), Failure> {
    let reason = "it passed its check";
    let passed = EngineInput::Passed { node: name.to_owned(), by: by.clone(), reason: Some(reason.to_owned()) };
    app.parts.engine.ask(passed)?;
    if keep_cordoned { Ok(()) } else { cordon(app, name, false, by, reason) }
}

fn cordon(app: &App, name: &str, cordoned: bool, by: String, reason: &str) -> Result<(), Failure> {
    let input = EngineInput::Cordon { node: name.to_owned(), cordoned, by, reason: Some(reason.to_owned()) };
    match app.parts.engine.ask(input)? {
        Answer::Refused(refusal) => Err(refusal.into()),
        Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } | Answer::Submitted(_) => Ok(()),
    }
}

/// Refuses a node that is in use.
fn occupied(app: &App, name: &str) -> Result<(), Failure> {
    let wanted = name.to_owned();
    let (jobs, others) = app.view(move |view| {
        let Some(node) = view.snapshot.nodes.values().find(|n| n.name == wanted) else { return Default::default() };
        let on = |job: &&aviflow_core::model::Job| job.phase.gang().is_some_and(|g| g.nodes().any(|n| n == node.id));
        let jobs = view.snapshot.jobs.values().filter(on).map(|j| format!("{}/{}", j.key.namespace, j.key.name));
        (jobs.collect::<BTreeSet<String>>(), node.others)
    })?;
    if !jobs.is_empty() {
        let jobs = jobs.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Failure::conflict("nodeInUse", format!("node `{name}` runs {jobs}"))
            .help(format!("empty it first: `aviflow node drain {name}`, and look at it with `aviflow node drains`")));
    }
    if others > 0 {
        return Err(Failure::conflict(
            "nodeInUse",
            format!("workloads that are not Aviflow's use {others} GPUs of node `{name}`"),
        )
        .help("a check needs all of its GPUs; `aviflow observed` says whose they are"));
    }
    Ok(())
}
