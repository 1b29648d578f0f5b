//! Drains, and what people did.

use crate::access::User;
use crate::app::{App, blocking};
use crate::documents::ask;
use crate::error::Failure;
use crate::params::{Input, Name, Values};
use aviflow_api::convert::full_name;
use aviflow_api::rest::{Act, DrainAction, DrainAnswer, DrainInfo, DrainNode, DrainRequest};
use aviflow_core::model::{Node, NodeId, Snapshot};
use aviflow_core::time::{Span, Time};
use aviflow_engine::engine::{Answer, DrainName, DrainOrder, Input as EngineInput};
use aviflow_engine::ports::ActKind;
use aviflow_store::read::{ActFilter, ActRow};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::sync::Arc;

/// Acts in one answer at most.
const ACTS: u32 = 1000;

pub(crate) async fn drain(
    State(app): State<Arc<App>>,
    User(by): User,
    Input(request): Input<DrainRequest>,
) -> Result<Json<DrainAnswer>, Failure> {
    blocking(move || {
        let wanted = request.clone();
        let nodes = app.view(move |view| wanted.select(view.snapshot))?.map_err(Failure::of)?;
        let order = DrainOrder {
            nodes: nodes.clone(),
            at: request.at.map(Time),
            length: request.length.map(Span),
            max_unavailable: request.max_unavailable,
            by_when: request.by.map(Time),
            by,
            reason: request.reason,
        };
        match app.parts.engine.ask(EngineInput::Drain(order))? {
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Rolling { drain, warnings } => Ok(Json(DrainAnswer { drain: Some(drain), nodes, warnings })),
            Answer::DoneWith(warnings) => Ok(Json(DrainAnswer { drain: None, nodes, warnings })),
            Answer::Done | Answer::Submitted(_) => Ok(Json(DrainAnswer { nodes, ..DrainAnswer::default() })),
        }
    })
    .await
}

pub(crate) async fn drains(State(app): State<Arc<App>>) -> Result<Json<Vec<DrainInfo>>, Failure> {
    blocking(move || app.view(|view| list(view.snapshot, view.now)).map(Json)).await
}

fn list(snapshot: &Snapshot, now: Time) -> Vec<DrainInfo> {
    let mut out = Vec::new();
    let mut rolling = Vec::new();
    for drain in &snapshot.drains {
        let all = drain.nodes.iter().chain(&drain.taken);
        rolling.extend(all.clone().copied());
        out.push(DrainInfo {
            name: drain.id.to_string(),
            nodes: all.filter_map(|id| Some(drain_node(snapshot, snapshot.nodes.get(id)?, now))).collect(),
            max_unavailable: Some(drain.max_unavailable),
            by: drain.by.map(|t| t.0),
            length: drain.each.map(|d| d.0),
            ordered_by: drain.ordered_by.clone(),
            reason: Some(drain.reason.clone()).filter(|r| !r.is_empty()),
        });
    }
    for node in snapshot.nodes.values().filter(|n| !rolling.contains(&n.id)) {
        let Some(drain) = node.drain.as_ref().filter(|d| !d.over(now)) else { continue };
        out.push(DrainInfo {
            name: node.name.clone(),
            nodes: vec![drain_node(snapshot, node, now)],
            max_unavailable: None,
            by: None,
            length: drain.until.map(|u| u.since(drain.from).0),
            ordered_by: drain.by.clone(),
            reason: Some(drain.reason.clone()).filter(|r| !r.is_empty()),
        });
    }
    out
}

fn drain_node(snapshot: &Snapshot, node: &Node, now: Time) -> DrainNode {
    let state = match &node.drain {
        None => "waiting",
        Some(drain) if !drain.covers(now) => "coming",
        Some(_) if node.held.is_empty() => "empty",
        Some(_) => "leaving",
    };
    DrainNode {
        name: node.name.clone(),
        state: state.to_owned(),
        from: node.drain.as_ref().map(|d| d.from.0),
        until: node.drain.as_ref().and_then(|d| d.until).map(|t| t.0),
        jobs: jobs_on(snapshot, node.id),
    }
}

fn jobs_on(snapshot: &Snapshot, node: NodeId) -> Vec<String> {
    let there = |j: &&aviflow_core::model::Job| j.phase.gang().is_some_and(|g| g.nodes().any(|n| n == node));
    snapshot.jobs.values().filter(there).map(|j| full_name(&j.key)).collect()
}

pub(crate) async fn drain_action(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(action): Input<DrainAction>,
) -> Result<Json<DrainAnswer>, Failure> {
    blocking(move || {
        let DrainAction::Cancel { reason } = action;
        let drain = name.parse().map_or_else(|_| DrainName::Node(name.clone()), DrainName::Rolling);
        let warnings = ask(&app, EngineInput::CancelDrain { drain, by, reason })?;
        Ok(Json(DrainAnswer { warnings, ..DrainAnswer::default() }))
    })
    .await
}

/// Which acts are asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct ActQuery {
    kind: Option<String>,
    name: Option<String>,
    by: Option<String>,
    before: Option<u64>,
    limit: Option<u32>,
}

pub(crate) async fn acts(
    State(app): State<Arc<App>>,
    Values(query): Values<ActQuery>,
) -> Result<Json<Vec<Act>>, Failure> {
    blocking(move || {
        let kind = match &query.kind {
            None => None,
            Some(name) => Some(ActKind::ALL.into_iter().find(|k| k.name() == name).ok_or_else(|| {
                let known: Vec<&str> = ActKind::ALL.iter().map(|k| k.name()).collect();
                Failure::bad(format!("there is no kind `{name}`")).help(format!("one of {}", known.join(", ")))
            })?),
        };
        let limit = query.limit.unwrap_or(100).min(ACTS);
        let filter = ActFilter { kind, name: query.name, by: query.by, before: query.before, limit };
        let rows = app.parts.reader.acts(&filter)?;
        let act = |row: ActRow| Act {
            number: row.row,
            at: row.act.at.0,
            by: row.act.by,
            what: row.act.what,
            kind: row.act.kind.name().to_owned(),
            name: Some(row.act.name).filter(|n| !n.is_empty()),
            reason: row.act.reason,
        };
        Ok(Json(rows.into_iter().map(act).collect()))
    })
    .await
}
