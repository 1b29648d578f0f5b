//! What the processes of a running job are doing: asked of all workers at once, and put together.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::body::ExecTarget;
use crate::error::Failure;
use crate::exec::gang;
use crate::params::{Input, Name};
use aviflow_api::rest::{AskStacks, MissingStacks, ProcessStacks, StackGroup, StackThreads, Stacks, WorkerStacks};
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
    let mut asking = JoinSet::new();
    for worker in 0..gang.workers {
        let target = ExecTarget { job: gang.job, attempt: gang.attempt, worker };
        let told = app.parts.body.stacks(target, asked.rank);
        asking.spawn(async move {
            let told = tokio::time::timeout(LIMIT, told).await;
            let late = || format!("its agent did not answer within {} s", LIMIT.as_secs());
            (worker, told.map_err(|_| late()).and_then(|told| told.map_err(|refusal| refusal.0)))
        });
    }
    let mut workers = BTreeMap::new();
    let mut missing = BTreeMap::new();
    while let Some(Ok((worker, told))) = asking.join_next().await {
        match told {
            Ok(told) => drop(workers.insert(worker, WorkerStacks { worker, ..told })),
            Err(reason) => drop(missing.insert(worker, MissingStacks { worker, reason })),
        }
    }
    let workers: Vec<WorkerStacks> = workers.into_values().collect();
    if let (Some(rank), true, true) = (asked.rank, missing.is_empty(), workers.iter().all(|w| w.processes.is_empty())) {
        let message = format!("no process has rank {rank}");
        return Err(Failure::not_found("noSuchRank", message).help(
            "ask without a rank: the answer names those that there are; a launcher may not have started it yet",
        ));
    }
    let groups = groups(&workers);
    Ok(Json(Stacks { attempt: gang.attempt, groups, workers, missing: missing.into_values().collect() }))
}

/// Ranks that do the same: by what Python's main thread does, or without Python by where the kernel sees the main
/// thread. The fewest first.
fn groups(workers: &[WorkerStacks]) -> Vec<StackGroup> {
    let mut groups: BTreeMap<(Option<&str>, Option<StackThreads>), StackGroup> = BTreeMap::new();
    let processes = workers.iter().flat_map(|worker| &worker.processes).filter(|process| process.main);
    for process in processes {
        let Some(rank) = process.rank else { continue };
        let thread = process.threads.iter().find(|thread| thread.main).cloned();
        let signature = process.signature.as_deref();
        // What differs between two that wait at one place is no difference: how many threads wait there, say.
        let place = thread.clone().filter(|_| signature.is_none());
        let place = place.map(|t| StackThreads { count: 0, name: String::new(), ..t });
        let group = groups.entry((signature, place)).or_insert_with(|| group(process, thread));
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
    fn children_and_launchers_are_in_no_group() {
        let child = ProcessStacks { main: false, ..rank(0, "worker", Some("c"), "futex") };
        let launcher = ProcessStacks { rank: None, ..rank(1, "launch", Some("d"), "futex") };
        check(vec![rank(0, "step", Some("a"), "futex"), child, launcher], &[(&[0], Some("step"))]);
        check(vec![], &[]);
    }
}
