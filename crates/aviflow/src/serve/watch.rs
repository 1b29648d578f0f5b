//! The watch over running gangs, as it is wired here: stacks through the agents' connections, and what GPUs report.

use crate::cli::ServeArgs;
use crate::error::{Result, While};
use crate::output::note;
use aviflow_api::rest::{Stacks, TakenStacks, WorkerStacks};
use aviflow_core::health::{Fact, Settings, hang};
use aviflow_core::model::{JobId, Phase};
use aviflow_core::time::{Span, Time};
use aviflow_engine::driver::{Feed, Handle, HandleError, View, wall_clock};
use aviflow_engine::ports::TakeStacks;
use aviflow_engine::watcher::{Notice, Said};
use aviflow_metrics::board::{Board, Seen, Share};
use aviflow_metrics::gpu::Sample;
use aviflow_server::{Body, ask_stacks, stack_number};
use aviflow_store::FileTelemetry;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime;

/// How long workers have to tell their stacks: less than a third of what is waited for a step, as they are asked after
/// two thirds of it. An agent waits 2 s for its processes.
const LIMIT: Duration = Duration::from_secs(8);

/// Bytes of stacks that are kept whole; of larger ones only what ranks have in common is.
const WHOLE: usize = 16 << 20;

/// How often it is looked what GPUs reported.
const SAMPLES: Duration = Duration::from_secs(15);

/// What is detected.
pub fn settings(args: &ServeArgs) -> Settings {
    let hang = args.hang_after.map(|seconds| hang::Limits::within(Span::seconds(seconds.into())));
    Settings { hang: hang.unwrap_or_default(), ..Settings::all() }
}

/// Takes stacks through the agents' connections, and keeps them beside the logs.
pub struct Taker {
    pub body: Arc<dyn Body>,
    pub telemetry: Arc<FileTelemetry>,
    pub feed: Feed,
    pub runtime: runtime::Handle,
}

impl TakeStacks for Taker {
    fn take(&self, of: &Said) {
        let (body, telemetry, feed, of) = (self.body.clone(), self.telemetry.clone(), self.feed.clone(), of.clone());
        self.runtime.spawn(async move {
            let (at, gang) = (wall_clock(), (of.job, of.attempt, of.workers));
            let stacks = ask_stacks(&*body, gang, None, LIMIT, |told| tell(&feed, &of, told)).await;
            let (job, epoch) = (of.job, of.epoch);
            let kept = tokio::task::spawn_blocking(move || {
                telemetry.keep_stacks(job, at, &written(TakenStacks { at: at.0, epoch, stacks }))
            });
            if let Ok(Err(error)) = kept.await {
                note(&format!("the stacks of job {} cannot be kept: {error}", job.0));
            }
        });
    }
}

/// Tells the watch of a worker's stacks.
fn tell(feed: &Feed, of: &Said, told: &WorkerStacks) {
    for (rank, stack) in told.processes.iter().filter_map(stack_number) {
        let fact = Fact::Stack { worker: told.worker, rank, stack };
        feed.notice(Notice::Fact { job: of.job, attempt: of.attempt, epoch: Some(of.epoch), fact }, Span(0));
    }
}

fn written(mut taken: TakenStacks) -> Vec<u8> {
    let bytes = serde_json::to_vec(&taken).unwrap_or_default();
    if bytes.len() <= WHOLE {
        return bytes;
    }
    taken.stacks = Stacks { workers: Vec::new(), ..taken.stacks };
    serde_json::to_vec(&taken).unwrap_or_default()
}

/// Tells the watch what GPUs of running gangs report, from now on.
pub fn sample(engine: Handle, body: Arc<dyn Body>, board: Arc<Board>, feed: Feed) -> Result<()> {
    let work = move || {
        loop {
            // sleep: figures come at intervals.
            std::thread::sleep(SAMPLES);
            let now = wall_clock().0;
            if board.sources(now).fresh == 0 {
                continue;
            }
            let gangs = match engine.read(gangs) {
                Ok(gangs) => gangs,
                Err(HandleError::Stopped) => return,
                Err(HandleError::Store(_)) => continue,
            };
            let said = body.agents().into_iter().filter(|agent| !agent.gpus.is_empty());
            let uuids: BTreeMap<_, _> = said.map(|a| ((a.job, a.attempt, a.worker), a.gpus)).collect();
            for gang in &gangs {
                for (worker, place) in (0u32..).zip(&gang.places) {
                    let uuids = uuids.get(&(gang.job, gang.attempt, worker)).map_or(&[][..], Vec::as_slice);
                    let numbered = body.numbers_gpus();
                    let share = Share {
                        node: &place.node,
                        uuids,
                        whole: place.whole && !numbered,
                        slots: numbered.then_some(place.slots.as_slice()),
                        since: gang.since.0,
                    };
                    let Some(limit) = board_limit(&place.gpu_type) else { continue };
                    for (index, utilization, power) in by_rank(board.held(share, now), gang.per_worker, limit) {
                        let rank = worker.saturating_mul(gang.per_worker).saturating_add(index);
                        let fact = Fact::Gpu { rank, utilization, power };
                        let (job, attempt, epoch) = (gang.job, gang.attempt, Some(gang.epoch));
                        feed.notice(Notice::Fact { job, attempt, epoch, fact }, Span(0));
                    }
                }
            }
        }
    };
    let spawned = std::thread::Builder::new().name("watch-gpus".to_owned()).spawn(work);
    spawned.map(drop).or_fail(|| "threads cannot be started".to_owned())
}

/// A gang whose ranks are up.
struct Gang {
    job: JobId,
    attempt: u32,
    epoch: u32,
    per_worker: u32,
    since: Time,
    places: Vec<Place>,
}

struct Place {
    node: String,
    gpu_type: String,
    slots: Vec<u32>,
    whole: bool,
}

fn gangs(view: &View<'_>) -> Vec<Gang> {
    let mut gangs = Vec::new();
    for job in view.snapshot.jobs.values() {
        let Phase::Running(gang) = &job.phase else { continue };
        let place = |worker: &aviflow_core::model::Worker| {
            let node = view.snapshot.nodes.get(&worker.node);
            Place {
                node: node.map(|n| n.name.clone()).unwrap_or_default(),
                gpu_type: node.map(|n| n.gpu_type.clone()).unwrap_or_default(),
                slots: worker.slots.iter().collect(),
                whole: node.is_some_and(|n| n.gpus == worker.slots),
            }
        };
        gangs.push(Gang {
            job: job.id,
            attempt: gang.attempt,
            epoch: gang.epoch,
            per_worker: job.request.ranks_per_node.max(1),
            since: gang.placed,
            places: gang.workers.iter().map(place).collect(),
        });
    }
    gangs
}

/// The power limit of a board in watts, of the types whose servers are in use; of others it is not known.
fn board_limit(gpu_type: &str) -> Option<f32> {
    const LIMITS: [(&str, f32); 8] = [
        ("GB200", 1200.0),
        ("B300", 1100.0),
        ("B200", 1000.0),
        ("H100", 700.0),
        ("H200", 700.0),
        ("H800", 700.0),
        ("A100", 400.0),
        ("A800", 400.0),
    ];
    let known = gpu_type.to_ascii_uppercase();
    LIMITS.iter().find(|(name, _)| known.contains(name)).map(|(_, watts)| *watts)
}

/// What the GPUs of each rank of a worker do, in percent: a rank with several only waits if all of them do. Nothing
/// where a GPU says nothing, or where they cannot be shared out.
fn by_rank(mut seen: Vec<Seen>, ranks: u32, limit: f32) -> Vec<(u32, u32, u32)> {
    let ranks = ranks.max(1) as usize;
    let each = seen.len() / ranks;
    if each == 0 || !seen.len().is_multiple_of(ranks) {
        return Vec::new();
    }
    seen.sort_by_key(|gpu| (gpu.index, gpu.instance));
    let percent = |part: f32| (part.clamp(0.0, 10.0) * 100.0).round() as u32;
    let of = |Sample { utilization, power, .. }: Sample| Some((percent(utilization?), percent(power? / limit)));
    let all = (0u32..).zip(seen.chunks(each)).map(|(rank, gpus)| {
        let gpus: Option<Vec<(u32, u32)>> = gpus.iter().map(|gpu| of(gpu.sample)).collect();
        let (least, most) = gpus?.into_iter().reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
        Some((rank, least, most))
    });
    all.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, utilization: Option<f32>, power: Option<f32>) -> Seen {
        let sample = Sample { utilization, power, ..Sample::default() };
        Seen {
            uuid: index.to_string(),
            instance: None,
            index: Some(index),
            at: 0,
            sample,
            xid: None,
            row_remap_failure: None,
        }
    }

    #[test]
    fn a_rank_with_several_gpus_waits_if_all_of_them_do() {
        let busy = || vec![gpu(1, Some(1.0), Some(140.0)), gpu(0, Some(0.5), Some(700.0))];
        assert_eq!(by_rank(busy(), 2, 700.0), [(0, 50, 100), (1, 100, 20)]);
        assert_eq!(by_rank(busy(), 1, 700.0), [(0, 50, 100)]);
        assert_eq!(by_rank(busy(), 3, 700.0), []);
        assert_eq!(by_rank(vec![gpu(0, Some(1.0), None)], 1, 700.0), [], "what is missing is no sample");
        assert_eq!(by_rank(Vec::new(), 1, 700.0), []);
    }

    #[test]
    fn limits_are_those_of_known_boards() {
        assert_eq!(["NVIDIA H100 80GB HBM3", "gb200", "virtual"].map(board_limit), [Some(700.0), Some(1200.0), None]);
    }

    #[test]
    fn large_stacks_keep_what_ranks_have_in_common() {
        let process = aviflow_api::rest::ProcessStacks { command: "x".repeat(1 << 20), ..Default::default() };
        let worker = |worker| WorkerStacks { worker, processes: vec![process.clone()], omitted: 0 };
        let taken = |workers: u32| {
            let stacks = Stacks {
                attempt: 1,
                groups: Vec::new(),
                workers: (0..workers).map(worker).collect(),
                missing: Vec::new(),
            };
            serde_json::from_slice::<TakenStacks>(&written(TakenStacks { at: 5, epoch: 1, stacks })).expect("JSON")
        };
        assert_eq!((taken(2).stacks.workers.len(), taken(20).stacks.workers.len()), (2, 0));
    }
}
