//! What the processes of a running job are doing: asked of all workers at once, and put together.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::body::{Body, ExecTarget};
use crate::error::Failure;
use crate::exec::gang;
use crate::names::resolve;
use crate::params::{Input, Name};
use aviflow_api::rest::{
    AskStacks, MissingStacks, ProcessStacks, StackGroup, StackThreads, Stacks, TakenStacks, WorkerStacks,
};
use aviflow_core::model::JobId;
use axum::Json;
use axum::extract::State;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// How long workers have to answer; an agent waits 2 s for its processes.
const LIMIT: Duration = Duration::from_secs(15);

pub(crate) async fn stacks(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(asked): Input<AskStacks>,
) -> Result<Json<Stacks>, Failure> {
    let state = app.clone();
    let gang = blocking(move || gang(&state, &name, &caller, "none of its processes can be asked")).await?;
    let of = (gang.job, gang.attempt, gang.workers);
    let told = ask_stacks(&*app.parts.body, of, asked.rank, LIMIT, |_| ()).await;
    let nobody = told.missing.is_empty() && told.workers.iter().all(|w| w.processes.is_empty());
    if let (Some(rank), true) = (asked.rank, nobody) {
        let message = format!("no process has rank {rank}");
        return Err(Failure::not_found("noSuchRank", message).help(
            "ask without a rank: the answer names those that there are; a launcher may not have started it yet",
        ));
    }
    Ok(Json(told))
}

/// Those that were taken when the job last stood still.
pub(crate) async fn last(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<TakenStacks>, Failure> {
    blocking(move || {
        let job = resolve(&app, &name, &caller)?;
        let kept = app.parts.telemetry.last_stacks(job);
        let kept = kept.map_err(|e| Failure::internal(format!("the stacks that were taken cannot be read: {e}")))?;
        let Some(kept) = kept else {
            return Err(Failure::not_found("noStacks", "no stacks of it were taken, as it never stood still for long")
                .help("while it runs, `aviflow stacks` asks what its processes do"));
        };
        let taken = serde_json::from_slice(&kept);
        taken.map(Json).map_err(|e| Failure::internal(format!("the stacks that were taken are not understood: {e}")))
    })
    .await
}

/// Asks all workers of an attempt (a job, its attempt, how many) at once what their processes do, of one rank alone if
/// one is named. `each` is told what a worker says when it does; who says nothing within the limit is missing.
pub async fn ask_stacks(
    body: &dyn Body,
    (job, attempt, workers): (JobId, u32, u32),
    rank: Option<u32>,
    limit: Duration,
    mut each: impl FnMut(&WorkerStacks),
) -> Stacks {
    let mut asking = JoinSet::new();
    for worker in 0..workers {
        let told = body.stacks(ExecTarget { job, attempt, worker }, rank);
        asking.spawn(async move {
            let told = tokio::time::timeout(limit, told).await;
            let late = || format!("its agent did not answer within {} s", limit.as_secs());
            (worker, told.map_err(|_| late()).and_then(|told| told.map_err(|refusal| refusal.0)))
        });
    }
    let mut workers = BTreeMap::new();
    let mut missing = BTreeMap::new();
    while let Some(Ok((worker, told))) = asking.join_next().await {
        match told {
            Ok(told) => {
                let told = WorkerStacks { worker, ..told };
                each(&told);
                workers.insert(worker, told);
            }
            Err(reason) => drop(missing.insert(worker, MissingStacks { worker, reason })),
        }
    }
    let workers: Vec<WorkerStacks> = workers.into_values().collect();
    Stacks { attempt, groups: groups(&workers), workers, missing: missing.into_values().collect() }
}

/// A number for what the main thread of a rank's own process does, equal where [`Stacks::groups`] has them together;
/// none of other processes.
#[must_use]
pub fn stack_number(process: &ProcessStacks) -> Option<(u32, u64)> {
    let rank = process.rank.filter(|_| process.main)?;
    let (signature, place) = doing(process);
    if signature.is_none() && place.is_none() {
        return None;
    }
    let place = place.map(|t| format!("{} {:?} {:?} {:?}", t.state, t.call, t.wait, t.kernel));
    let text = format!("{signature:?} {place:?}");
    // FNV-1a: the same on every machine.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    Some((rank, text.bytes().fold(0xcbf2_9ce4_8422_2325, step)))
}

/// What Python's main thread does, or without Python where the kernel sees the main thread.
fn doing(process: &ProcessStacks) -> (Option<&str>, Option<StackThreads>) {
    let signature = process.signature.as_deref();
    let thread = process.threads.iter().find(|thread| thread.main).filter(|_| signature.is_none());
    // What differs between two that wait at one place is no difference: how many threads wait there, say.
    (signature, thread.map(|t| StackThreads { count: 0, name: String::new(), ..t.clone() }))
}

/// Ranks that do the same: by what Python's main thread does, or without Python by where the kernel sees the main
/// thread. The fewest first.
fn groups(workers: &[WorkerStacks]) -> Vec<StackGroup> {
    let mut groups: BTreeMap<(Option<&str>, Option<StackThreads>), StackGroup> = BTreeMap::new();
    let processes = workers.iter().flat_map(|worker| &worker.processes).filter(|process| process.main);
    for process in processes {
        let Some(rank) = process.rank else { continue };
        let thread = process.threads.iter().find(|thread| thread.main).cloned();
        let group = groups.entry(doing(process)).or_insert_with(|| group(process, thread));
        group.ranks.push(rank);
    }
    let mut groups: Vec<StackGroup> = groups.into_values().collect();
    for group in &mut groups {
        group.ranks.sort_unstable();
        group.ranks.dedup();
    }
    groups.sort_by_key(|group| (group.ranks.len(), group.ranks.first().copied()));
    groups
}

fn group(process: &ProcessStacks, thread: Option<StackThreads>) -> StackGroup {
    let frames = process.python.iter().find(|thread| thread.main).map(|thread| thread.frames.clone());
    StackGroup {
        ranks: Vec::new(),
        signature: process.signature.clone(),
        frames: frames.unwrap_or_default(),
        thread,
        note: process.note.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_api::rest::{StackFrame, StackPython};

    fn rank(rank: u32, function: &str, signature: Option<&str>, wait: &str) -> ProcessStacks {
        let frame = StackFrame { file: "train.py".into(), line: 3, function: function.into() };
        let python = StackPython { main: true, frames: vec![frame], ..StackPython::default() };
        let thread = StackThreads {
            count: rank as usize,
            main: true,
            state: "S".into(),
            wait: Some(wait.into()),
            ..StackThreads::default()
        };
        ProcessStacks {
            pid: rank,
            rank: Some(rank),
            main: true,
            python: signature.map(|_| python).into_iter().collect(),
            signature: signature.map(str::to_owned),
            threads: vec![thread],
            ..ProcessStacks::default()
        }
    }

    fn check(processes: Vec<ProcessStacks>, expected: &[(&[u32], Option<&str>)]) {
        let (first, second) = processes.split_at(processes.len() / 2);
        let worker = |processes: &[ProcessStacks]| WorkerStacks { processes: processes.to_vec(), ..Default::default() };
        let groups = groups(&[worker(second), worker(first)]);
        let got: Vec<(&[u32], Option<&str>)> =
            groups.iter().map(|g| (g.ranks.as_slice(), g.frames.first().map(|f| f.function.as_str()))).collect();
        assert_eq!(got, expected);
    }

    #[test]
    fn the_odd_one_out_comes_first() {
        let loads = rank(6, "load", Some("b"), "pipe_read");
        let mut all: Vec<ProcessStacks> = (0..8).map(|n| rank(n, "all_reduce", Some("a"), "futex")).collect();
        all[6] = loads;
        check(all, &[(&[6], Some("load")), (&[0, 1, 2, 3, 4, 5, 7], Some("all_reduce"))]);
    }

    #[test]
    fn without_python_the_kernel_s_view_counts() {
        let plain = |n, wait| rank(n, "", None, wait);
        check(vec![plain(0, "futex"), plain(1, "poll"), plain(2, "futex")], &[(&[1], None), (&[0, 2], None)]);
    }

    #[test]
    fn who_is_in_one_group_has_one_number() {
        let number = |process: &ProcessStacks| stack_number(process).map(|(_, number)| number);
        let (a, b) = (rank(0, "step", Some("a"), "futex"), rank(1, "load", Some("b"), "futex"));
        let also = rank(2, "step", Some("a"), "poll");
        assert_eq!((number(&a) == number(&also), number(&a) == number(&b)), (true, false));
        let plain = |n, wait| rank(n, "", None, wait);
        assert_eq!(number(&plain(0, "futex")), number(&plain(5, "futex")));
        assert_ne!(number(&plain(0, "futex")), number(&plain(0, "poll")));
        assert_eq!(stack_number(&a), Some((0, 0x666a_477d_dd31_d2eb)), "on every machine");
        let child = ProcessStacks { main: false, ..a };
        let silent = ProcessStacks { rank: Some(1), main: true, ..ProcessStacks::default() };
        assert_eq!([stack_number(&child), stack_number(&silent)], [None, None]);
    }

    #[test]
    fn children_and_launchers_are_in_no_group() {
        let child = ProcessStacks { main: false, ..rank(0, "worker", Some("c"), "futex") };
        let launcher = ProcessStacks { rank: None, ..rank(1, "launch", Some("d"), "futex") };
        check(vec![rank(0, "step", Some("a"), "futex"), child, launcher], &[(&[0], Some("step"))]);
        check(vec![], &[]);
    }
}
