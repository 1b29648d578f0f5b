//! Nodes, queues, pools, agents, and the control plane itself.

use crate::access::User;
use crate::app::{App, blocking};
use crate::auth::Origin;
use crate::error::Failure;
use crate::params::{Input, Name};
use crate::view::count;
use aviflow_api::admin::{from_pool, from_queue};
use aviflow_api::file::Priorities;
use aviflow_api::rest::{
    AgentInfo, GpuInfo, NodeAction, NodeInfo, PoolInfo, QueueInfo, QuotaInfo, ServerAction, ServerInfo, StopAnswer,
};
use aviflow_api::suggest::nearest;
use aviflow_core::gpus::Slots;
use aviflow_core::model::{Node, NodeCondition, Queue, Snapshot};
use aviflow_core::schedule::{self, QuotaUse};
use aviflow_core::time::Time;
use aviflow_engine::driver::View;
use aviflow_engine::engine::{Answer, Input as EngineInput, default_queue};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A node with its GPUs, slot by slot.
pub(crate) fn node_info(snapshot: &Snapshot, node: &Node) -> NodeInfo {
    let mut gpus: Vec<GpuInfo> = Vec::new();
    for open in snapshot.ledger.node(node.id) {
        let job = open.owner.and_then(|owner| snapshot.jobs.get(&owner.job));
        gpus.extend(open.slots.iter().map(|slot| GpuInfo {
            slot,
            state: open.state.name().to_owned(),
            job: job.map(|j| format!("{}/{}", j.key.namespace, j.key.name)),
            user: job.map(|j| j.user.clone()),
            since: open.from.0,
            unhealthy: node.unhealthy.iter().any(|s| s == slot),
        }));
    }
    gpus.sort_unstable_by_key(|gpu| gpu.slot);
    let levels = snapshot.pools.get(&node.pool).into_iter().flat_map(|pool| &pool.levels);
    NodeInfo {
        name: node.name.clone(),
        pool: node.pool.clone(),
        gpu_type: node.gpu_type.clone(),
        condition: condition(node).to_owned(),
        quarantine: node.quarantine.clone(),
        quarantined: node.quarantined.iter().collect(),
        closed: node.closed.clone(),
        domains: levels.cloned().zip(node.path.iter().cloned()).collect(),
        drain: node.drain.as_ref().map(Into::into),
        gpus,
    }
}

/// Whether a node takes work, in a word.
pub(crate) fn condition(node: &Node) -> &'static str {
    match node.condition {
        NodeCondition::Ready => "Ready",
        NodeCondition::Cordoned if node.closed.is_some() && !node.cordoned && node.drain.is_none() => "Closed",
        NodeCondition::Cordoned => "Cordoned",
        NodeCondition::Gone => "Gone",
    }
}

pub(crate) async fn nodes(State(app): State<Arc<App>>) -> Result<Json<Vec<NodeInfo>>, Failure> {
    blocking(move || {
        // A node without GPUs has left the pool; only its account is kept.
        let there = |n: &&Node| n.gpus != Slots::NONE;
        app.view(move |view| {
            view.snapshot.nodes.values().filter(there).map(|node| node_info(view.snapshot, node)).collect()
        })
        .map(Json)
    })
    .await
}

pub(crate) async fn node(State(app): State<Arc<App>>, Name(name): Name) -> Result<Json<NodeInfo>, Failure> {
    blocking(move || one_node(&app, name).map(Json)).await
}

pub(crate) fn one_node(app: &App, name: String) -> Result<NodeInfo, Failure> {
    app.view(move |view| {
        let nodes = &view.snapshot.nodes;
        if let Some(node) = nodes.values().find(|node| node.name == name) {
            return Ok(node_info(view.snapshot, node));
        }
        let failure = Failure::not_found("noSuchNode", format!("there is no node `{name}`"));
        Err(match nearest(&name, nodes.values().map(|n| n.name.as_str())) {
            Some(similar) => failure.help(format!("did you mean `{similar}`? `aviflow node ls` lists the nodes")),
            None => failure.help("`aviflow node ls` lists the nodes"),
        })
    })?
}

pub(crate) async fn node_action(
    State(app): State<Arc<App>>,
    User(by): User,
    Name(name): Name,
    Input(action): Input<NodeAction>,
) -> Result<Json<NodeInfo>, Failure> {
    blocking(move || {
        // Answers with the similar names where there is none.
        one_node(&app, name.clone())?;
        let (cordoned, reason) = match action {
            NodeAction::Cordon { reason } => (true, reason),
            NodeAction::Uncordon { reason } => (false, reason),
        };
        match app.parts.engine.ask(EngineInput::Cordon { node: name.clone(), cordoned, by, reason })? {
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } | Answer::Submitted(_) => {
                one_node(&app, name).map(Json)
            }
        }
    })
    .await
}

pub(crate) async fn queues(State(app): State<Arc<App>>) -> Result<Json<Vec<QueueInfo>>, Failure> {
    blocking(move || {
        let priorities = app.parts.defaults.priorities.clone();
        app.view(move |view| queues_of(view.snapshot, view.now, &priorities)).map(Json)
    })
    .await
}

pub(crate) fn queues_of(snapshot: &Snapshot, now: Time, priorities: &Priorities) -> Vec<QueueInfo> {
    // It is made by the first submission and takes jobs before.
    let first = snapshot.queues.is_empty().then(default_queue);
    let mut infos: BTreeMap<&str, QueueInfo> = BTreeMap::new();
    let uses = schedule::queues(snapshot, now);
    for queue in first.iter().chain(snapshot.queues.values()) {
        let path = path_of(snapshot, queue);
        let mut info = QueueInfo { path, ..QueueInfo::of(from_queue(queue, queue.team.as_deref(), priorities)) };
        if let Some(seen) = uses.get(&queue.name) {
            info.quotas = seen.quotas.iter().map(|(gpu_type, quota)| (gpu_type.clone(), quota_info(quota))).collect();
            info.decayed_use = i64::try_from(seen.decayed).unwrap_or(i64::MAX);
            info.time_sharing = seen.time_sharing.map(Into::into);
        }
        infos.insert(&queue.name, info);
    }
    for job in snapshot.jobs.values() {
        let Some(info) = infos.get_mut(job.request.queue.as_str()) else { continue };
        match job.phase.gang() {
            Some(gang) => {
                info.running += 1;
                info.gpus += gang.gpus().count();
            }
            None => {
                info.waiting += 1;
                info.waiting_gpus += job.request.gpus();
            }
        }
    }
    infos.into_values().collect()
}

fn quota_info(quota: &QuotaUse) -> QuotaInfo {
    QuotaInfo {
        guarantee: quota.guarantee,
        effective_guarantee: quota.effective,
        limit: quota.limit,
        weight: quota.weight,
        used: quota.used,
        borrowed: quota.used.saturating_sub(quota.effective),
        lent: quota.lent,
        headroom: quota.headroom,
    }
}

/// The names from the root down to a queue.
fn path_of(snapshot: &Snapshot, queue: &Queue) -> String {
    let mut names = vec![queue.name.as_str()];
    let mut above = queue.parent.as_ref();
    while let Some(parent) = above.and_then(|name| snapshot.queues.get(name)) {
        // No document may make a cycle.
        if names.contains(&parent.name.as_str()) {
            break;
        }
        names.push(&parent.name);
        above = parent.parent.as_ref();
    }
    names.reverse();
    names.join("/")
}

pub(crate) async fn pools(State(app): State<Arc<App>>) -> Result<Json<Vec<PoolInfo>>, Failure> {
    blocking(move || app.view(|view| pools_of(view.snapshot)).map(Json)).await
}

pub(crate) fn pools_of(snapshot: &Snapshot) -> Vec<PoolInfo> {
    let mut types: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut infos: BTreeMap<&str, PoolInfo> = BTreeMap::new();
    for node in snapshot.nodes.values() {
        types.entry(&node.pool).or_default().insert(&node.gpu_type);
        let info = infos.entry(&node.pool).or_insert_with(|| PoolInfo {
            name: node.pool.clone(),
            levels: snapshot.pools.get(&node.pool).map(|pool| pool.levels.clone()).unwrap_or_default(),
            document: snapshot.pools.get(&node.pool).map(from_pool),
            ..PoolInfo::default()
        });
        let free = node.free().count();
        info.nodes += 1;
        info.gpus += node.gpus.count();
        info.free += free;
        info.foreign += node.foreign.count();
        info.most_free_on_a_node = info.most_free_on_a_node.max(free);
    }
    let named = infos.into_iter().map(|(name, info)| {
        let gpu_types = types.remove(name).into_iter().flatten().map(str::to_owned).collect();
        PoolInfo { gpu_types, ..info }
    });
    named.collect()
}

pub(crate) async fn agents(State(app): State<Arc<App>>) -> Result<Json<Vec<AgentInfo>>, Failure> {
    blocking(move || {
        let agents = app.parts.body.agents();
        app.view(move |view| {
            let info = |agent: &crate::body::BodyAgent| {
                let job = view.snapshot.jobs.get(&agent.job);
                let name = job.map(|j| format!("{}/{}", j.key.namespace, j.key.name));
                AgentInfo {
                    job: name.unwrap_or_else(|| format!("job {}", agent.job.0)),
                    attempt: agent.attempt,
                    worker: agent.worker,
                    pid: agent.pid,
                    connected: agent.connected,
                }
            };
            agents.iter().map(info).collect()
        })
        .map(Json)
    })
    .await
}

/// Live jobs by phase.
pub(crate) fn phases(view: &View<'_>) -> BTreeMap<String, u32> {
    let mut jobs = BTreeMap::new();
    for job in view.snapshot.jobs.values() {
        *jobs.entry(job.phase.name().to_owned()).or_default() += 1;
    }
    jobs
}

fn server_info(app: &App) -> Result<ServerInfo, Failure> {
    let info = app.parts.info.clone();
    let body = app.parts.body.name().to_owned();
    app.view(move |view| ServerInfo {
        version: info.version,
        body,
        pid: std::process::id(),
        started: info.started,
        term: view.term.0,
        generation: view.generation,
        home: info.home,
        nodes: count(view.snapshot.nodes.len()),
        gpus: view.snapshot.nodes.values().map(|n| n.gpus.count()).sum(),
        jobs: phases(view),
        paused: view.snapshot.paused.clone(),
    })
}

pub(crate) async fn server(State(app): State<Arc<App>>) -> Result<Json<ServerInfo>, Failure> {
    blocking(move || server_info(&app).map(Json)).await
}

pub(crate) async fn server_action(
    State(app): State<Arc<App>>,
    User(by): User,
    Input(action): Input<ServerAction>,
) -> Result<Json<ServerInfo>, Failure> {
    blocking(move || {
        let (on, reason) = match action {
            ServerAction::Pause { reason } => (true, reason),
            ServerAction::Resume { reason } => (false, reason),
        };
        match app.parts.engine.ask(EngineInput::Pause { on, by, reason })? {
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } | Answer::Submitted(_) => {
                server_info(&app).map(Json)
            }
        }
    })
    .await
}

pub(crate) async fn stop(State(app): State<Arc<App>>, from: Origin) -> Result<Json<StopAnswer>, Failure> {
    if !from.here {
        let message = "the control plane can be stopped only from its own machine";
        return Err(Failure::new(StatusCode::FORBIDDEN, "onlyHere", message).help("run `aviflow server stop` there"));
    }
    blocking(move || {
        let answer = app.view(|view| {
            let jobs = view.snapshot.jobs.values();
            let running = jobs.filter(|j| j.phase.gang().is_some());
            StopAnswer {
                running: running.map(|j| format!("{}/{}", j.key.namespace, j.key.name)).collect(),
                waiting: count(view.snapshot.waiting.len()),
            }
        })?;
        app.stopping.send_replace(true);
        Ok(Json(answer))
    })
    .await
}
