//! What runs now: jobs, ranks and nodes, with what their GPUs do.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::names::resolve;
use crate::params::{Name, Values};
use crate::pool::condition;
use crate::secret::masked;
use crate::view::count;
use crate::watched::{Gang, Holders, TOKENS_PER_SECOND, mfu, reported};
use aviflow_api::rest::{GpuLoad, JobRanks, RankInfo, Top, TopJob, TopNode};
use aviflow_api::rights::{Right, Verb};
use aviflow_core::gpus::Slots;
use aviflow_core::model::Node;
use aviflow_metrics::board::Seen;
use aviflow_metrics::gpu::{Sample, rounded};
use aviflow_store::RankSeen;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::sync::Arc;

/// Which jobs are wanted.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopQuery {
    namespace: Option<String>,
}

pub(crate) async fn top(
    State(app): State<Arc<App>>,
    caller: Caller,
    Values(query): Values<TopQuery>,
) -> Result<Json<Top>, Failure> {
    if let Some(namespace) = &query.namespace {
        crate::access::check_namespace(&app, namespace)?;
    }
    let visible = app.visible(&caller, query.namespace).await?;
    let nodes = app.may(&caller, &Right::on(Verb::List, "nodes", None)).await?;
    blocking(move || {
        let (gangs, nodes) = app.view(move |view| {
            let seen = |gang: &Gang| visible.as_ref().is_none_or(|seen| seen.contains(&gang.namespace));
            let gangs = view.snapshot.jobs.values().filter_map(|job| Gang::of(view.snapshot, job));
            let there = |node: &&Node| nodes && node.gpus != Slots::NONE;
            let nodes = view.snapshot.nodes.values().filter(there).map(node).collect::<Vec<_>>();
            (gangs.filter(seen).collect::<Vec<_>>(), nodes)
        })?;
        let holders = Holders::new(&app, app.parts.body.agents());
        let jobs = gangs.iter().map(|gang| job(&app, &holders, gang)).collect();
        let nodes = nodes.into_iter().map(|node| with_load(&app, node, holders.now.0)).collect();
        Ok(Json(Top { at: holders.now.0, jobs, nodes }))
    })
    .await
}

pub(crate) async fn ranks(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<JobRanks>, Failure> {
    blocking(move || {
        let id = resolve(&app, &name, &caller)?;
        let gang = app.view(move |view| Gang::of(view.snapshot, view.snapshot.jobs.get(&id)?))?;
        let Some(gang) = gang else {
            let seen = crate::jobs::seen(&app, id)?.job;
            let job = TopJob {
                namespace: seen.key.namespace,
                name: seen.key.name,
                queue: seen.request.queue,
                phase: seen.phase.name().to_owned(),
                attempt: seen.attempts,
                ..TopJob::default()
            };
            return Ok(Json(JobRanks { at: aviflow_engine::driver::wall_clock().0, job, ranks: Vec::new() }));
        };
        let holders = Holders::new(&app, app.parts.body.agents());
        let mut heard = app.parts.telemetry.ranks(gang.job, gang.attempt);
        let mut ranks = Vec::new();
        for (worker, place) in (0u32..).zip(&gang.workers) {
            let mut gpus = holders.gpus(&app, &gang, worker, place);
            gpus.sort_by_key(|seen| (seen.index, seen.instance));
            let each = gang.ranks_per_node;
            for local in 0..each {
                let rank = worker * each + local;
                let load = load(rank_gpus(&gpus, local, each));
                let info = RankInfo { rank, worker, node: place.node.clone(), load, ..RankInfo::default() };
                ranks.push(with_words(info, heard.remove(&rank).unwrap_or_default()));
            }
        }
        Ok(Json(JobRanks { at: holders.now.0, job: job(&app, &holders, &gang), ranks }))
    })
    .await
}

/// The GPUs of one of `each` ranks of a worker: its own if there is one for each, else all.
fn rank_gpus(gpus: &[Seen], local: u32, each: u32) -> &[Seen] {
    match gpus.get(local as usize) {
        Some(own) if each > 1 && gpus.len() == each as usize => std::slice::from_ref(own),
        _ if each == 1 => gpus,
        _ => &[],
    }
}

fn with_words(info: RankInfo, seen: RankSeen) -> RankInfo {
    RankInfo {
        step: seen.step.map(|(step, _)| step),
        step_at: seen.step.map(|(_, at)| at.0),
        step_ms: seen.step_ms,
        line_at: seen.line.as_ref().map(|(at, _)| at.0),
        line: seen.line.map(|(_, line)| masked(&line)),
        ..info
    }
}

fn job(app: &App, holders: &Holders, gang: &Gang) -> TopJob {
    let progress = gang.progress(app);
    let said = |names: &[&str]| reported(progress.as_ref()?, names);
    TopJob {
        namespace: gang.namespace.clone(),
        name: gang.name.clone(),
        queue: gang.queue.clone(),
        phase: gang.phase.to_owned(),
        attempt: gang.attempt,
        gpus: gang.gpus,
        step: progress.as_ref().map(|point| point.step),
        total_steps: progress.as_ref().and_then(|point| point.total_steps),
        step_at: progress.as_ref().map(|point| point.at.0),
        step_ms: app.parts.telemetry.step_ms(gang.job, gang.attempt),
        loss: said(&["loss"]),
        tokens_per_second: said(&TOKENS_PER_SECOND),
        mfu: progress.as_ref().and_then(mfu),
        load: load_of(&holders.gang(app, gang)),
    }
}

fn node(node: &Node) -> TopNode {
    TopNode {
        name: node.name.clone(),
        pool: node.pool.clone(),
        gpu_type: node.gpu_type.clone(),
        condition: condition(node).to_owned(),
        gpus: node.gpus.count(),
        held: node.held.count(),
        unhealthy: node.unhealthy.count(),
        ..TopNode::default()
    }
}

fn with_load(app: &App, node: TopNode, now: i64) -> TopNode {
    let seen = app.parts.gpus.node(&node.name, now);
    let mut xids: Vec<u32> = seen.iter().filter_map(|gpu| gpu.xid.filter(|xid| *xid != 0)).collect();
    xids.sort_unstable();
    xids.dedup();
    TopNode {
        load: load(&seen),
        xids,
        row_remap_failures: count(seen.iter().filter(|gpu| gpu.row_remap_failure == Some(true)).count()),
        trouble: app.parts.gpus.trouble(&node.name).map(|why| masked(&why)),
        ..node
    }
}

fn load(seen: &[Seen]) -> GpuLoad {
    load_of(&seen.iter().map(|gpu| gpu.sample).collect::<Vec<_>>())
}

fn load_of(samples: &[Sample]) -> GpuLoad {
    let mean = Sample::mean(samples);
    GpuLoad {
        gpus: count(samples.len()),
        sm_active: mean.sm_active.map(rounded),
        tensor_active: mean.tensor_active.map(rounded),
        dram_active: mean.dram_active.map(rounded),
        utilization: mean.utilization.map(rounded),
        memory_used: Sample::sum(samples, |s| s.memory_used),
        memory_total: Sample::sum(samples, |s| s.memory_total),
        power: Sample::sum(samples, |s| s.power),
    }
}
