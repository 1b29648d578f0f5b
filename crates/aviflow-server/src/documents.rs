//! Queues, pools and the policy: their documents are applied whole.

use crate::access::{Caller, User};
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::params::{Input, Name};
use crate::pool::{pools_of, queues_of};
use aviflow_api::admin::{
    AdminDocument, PolicySpec, QueueSpec, check_document, from_policy, from_pool, from_queue, to_policy, to_pool,
    to_queue,
};
use aviflow_api::rest::{
    Applied, PolicyApply, PoolAction, PoolApply, PoolInfo, QueueAction, QueueApply, QueueInfo, QueueJobs,
};
use aviflow_api::rights::{Right, Verb};
use aviflow_api::suggest::nearest;
use aviflow_core::model::{Queue, QueueState};
use aviflow_engine::engine::{Answer, Input as EngineInput, QueueJobs as Jobs};
use axum::Json;
use axum::extract::State;
use std::sync::Arc;

/// Asks the engine, and gives its warnings.
pub(crate) fn ask(app: &App, input: EngineInput) -> Result<Vec<String>, Failure> {
    match app.parts.engine.ask(input)? {
        Answer::Refused(refusal) => Err(refusal.into()),
        Answer::DoneWith(warnings) | Answer::Rolling { warnings, .. } => Ok(warnings),
        Answer::Done | Answer::Submitted(_) => Ok(Vec::new()),
    }
}

/// What a document alone shows to be wrong.
fn check(app: &App, document: &AdminDocument) -> Result<(), Failure> {
    let problems = match check_document(document, &app.parts.defaults.priorities) {
        Ok(_) => return Ok(()),
        Err(problems) => problems,
    };
    let lines: Vec<String> = problems
        .iter()
        .map(|d| {
            let help = d.help.as_ref().map_or(String::new(), |h| format!(" ({h})"));
            format!("`{}`: {}{help}", d.field, d.message)
        })
        .collect();
    Err(Failure::refused("badDocument", lines.join("; ")))
}

/// The name in the path is the document's.
fn same_name(path: &str, document: &str) -> Result<(), Failure> {
    if path == document {
        return Ok(());
    }
    Err(Failure::bad(format!("the path names `{path}` and the document `{document}`")).help("make them the same"))
}

fn queue_of(app: &App, name: &str) -> Result<Option<Queue>, Failure> {
    let name = name.to_owned();
    app.view(move |view| view.snapshot.queues.get(&name).cloned())
}

fn document_of(app: &App, queue: &Queue) -> QueueSpec {
    from_queue(queue, queue.team.as_deref(), &app.parts.defaults.priorities)
}

pub(crate) async fn queue(State(app): State<Arc<App>>, Name(name): Name) -> Result<Json<QueueInfo>, Failure> {
    blocking(move || {
        let priorities = app.parts.defaults.priorities.clone();
        let all = app.view(move |view| queues_of(view.snapshot, view.now, &priorities))?;
        let names: Vec<String> = all.iter().map(|q| q.name.clone()).collect();
        let found = all.into_iter().find(|q| q.name == name);
        found.map(Json).ok_or_else(|| {
            let failure = Failure::not_found("noSuchQueue", format!("there is no queue `{name}`"));
            match nearest(&name, names.iter().map(String::as_str)) {
                Some(similar) => failure.help(format!("did you mean `{similar}`? `aviflow queue ls` lists the queues")),
                None => failure.help("`aviflow queue ls` lists the queues"),
            }
        })
    })
    .await
}

pub(crate) async fn put_queue(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(apply): Input<QueueApply>,
) -> Result<Json<Applied>, Failure> {
    blocking(move || {
        same_name(&name, &apply.queue.name)?;
        check(&app, &AdminDocument::Queue(apply.queue.clone()))?;
        let queue = to_queue(&apply.queue, &app.parts.defaults.priorities);
        change_queue(&app, queue, by, apply.reason).map(Json)
    })
    .await
}

fn change_queue(app: &App, queue: Queue, by: String, reason: Option<String>) -> Result<Applied, Failure> {
    let before = queue_of(app, &queue.name)?;
    let name = queue.name.clone();
    let warnings = ask(app, EngineInput::ApplyQueue { queue, by, reason })?;
    let after = queue_of(app, &name)?;
    let what = match &before {
        None => "created",
        Some(_) if before == after => "unchanged",
        Some(_) => "changed",
    };
    let document = after.map(|q| AdminDocument::Queue(document_of(app, &q)));
    Ok(Applied { what: what.to_owned(), document, warnings })
}

pub(crate) async fn queue_action(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(action): Input<QueueAction>,
) -> Result<Json<Applied>, Failure> {
    let verb = if matches!(action, QueueAction::Delete(_)) { Verb::Delete } else { Verb::Update };
    app.needs(&caller, &Right::on(verb, "queues", Some(name.clone()))).await?;
    let by = caller.user;
    blocking(move || {
        let (state, reason) = match action {
            QueueAction::Open { reason } => (QueueState::Open, reason),
            QueueAction::Hold { reason } => (QueueState::Held, reason),
            QueueAction::Drain { reason } => (QueueState::Draining, reason),
            QueueAction::Delete(delete) => {
                let jobs = match delete.jobs {
                    QueueJobs::Refuse => Jobs::Refuse,
                    QueueJobs::Move { to } => Jobs::Move { to },
                    QueueJobs::Leave => Jobs::Leave,
                };
                let warnings = ask(&app, EngineInput::DeleteQueue { name, jobs, by, reason: delete.reason })?;
                return Ok(Json(Applied { what: "deleted".to_owned(), document: None, warnings }));
            }
        };
        let Some(queue) = queue_of(&app, &name)? else {
            return Err(Failure::not_found("noSuchQueue", format!("there is no queue `{name}`"))
                .help("`aviflow queue ls` lists the queues"));
        };
        change_queue(&app, Queue { state, ..queue }, by, reason).map(Json)
    })
    .await
}

pub(crate) async fn pool(State(app): State<Arc<App>>, Name(name): Name) -> Result<Json<PoolInfo>, Failure> {
    blocking(move || {
        let all = app.view(|view| pools_of(view.snapshot))?;
        all.into_iter().find(|p| p.name == name).map(Json).ok_or_else(|| {
            Failure::not_found("noSuchPool", format!("there is no pool `{name}`"))
                .help("`aviflow pool ls` lists the pools")
        })
    })
    .await
}

pub(crate) async fn put_pool(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(apply): Input<PoolApply>,
) -> Result<Json<Applied>, Failure> {
    blocking(move || {
        same_name(&name, &apply.pool.name)?;
        check(&app, &AdminDocument::Pool(apply.pool.clone()))?;
        let look = |name: &str| {
            let name = name.to_owned();
            app.view(move |view| view.snapshot.pools.get(&name).cloned())
        };
        let before = look(&name)?;
        let warnings = ask(&app, EngineInput::ApplyPool { pool: to_pool(&apply.pool), by, reason: apply.reason })?;
        let after = look(&name)?;
        app.parts.body.describe_pool(&apply.pool).map_err(|why| {
            Failure::refused("notDescribed", format!("the pool's object could not be written: {why}"))
                .help("its topology is applied; apply the document again for its part for Kubernetes")
        })?;
        let what = match &before {
            None => "created",
            Some(_) if before == after => "unchanged",
            Some(_) => "changed",
        };
        let document = after.map(|p| AdminDocument::Pool(from_pool(&p)));
        Ok(Json(Applied { what: what.to_owned(), document, warnings }))
    })
    .await
}

pub(crate) async fn pool_action(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(action): Input<PoolAction>,
) -> Result<Json<Applied>, Failure> {
    blocking(move || {
        let PoolAction::Delete { reason } = action;
        let warnings = ask(&app, EngineInput::DeletePool { name, by, reason })?;
        Ok(Json(Applied { what: "deleted".to_owned(), document: None, warnings }))
    })
    .await
}

pub(crate) async fn policy(State(app): State<Arc<App>>) -> Result<Json<PolicySpec>, Failure> {
    blocking(move || app.view(|view| from_policy(&view.snapshot.policy)).map(Json)).await
}

pub(crate) async fn put_policy(
    State(app): State<Arc<App>>,
    User(by): User,
    Input(apply): Input<PolicyApply>,
) -> Result<Json<Applied>, Failure> {
    blocking(move || {
        check(&app, &AdminDocument::Policy(apply.policy))?;
        let before = app.view(|view| view.snapshot.policy.clone())?;
        let warnings =
            ask(&app, EngineInput::SetPolicy { policy: to_policy(&apply.policy), by, reason: apply.reason })?;
        let after = app.view(|view| view.snapshot.policy.clone())?;
        let what = if before == after { "unchanged" } else { "changed" };
        let document = Some(AdminDocument::Policy(from_policy(&after)));
        Ok(Json(Applied { what: what.to_owned(), document, warnings }))
    })
    .await
}
