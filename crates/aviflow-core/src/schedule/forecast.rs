//! When a waiting job will start if nothing else is submitted: the pass, run again and again at the times at
//! which jobs are expected to end.
//!
//! It is the base of an estimate, which is then calibrated by how earlier ones came out. Preemption is not
//! played; where jobs take turns, [`super::turn_forecast`] plays those.

use super::memo::Memo;
use super::pass::Pass;
use super::{Plan, reserve, turn_forecast};
use crate::gpus::Slots;
use crate::model::{Calibration, Estimate, Job, JobId, Snapshot};
use crate::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Jobs in front that are looked at; those behind them only count by their work.
const AHEAD: usize = 500;

/// Node visits that a forecast may cost.
const BUDGET: usize = 200_000;

/// Estimates when a waiting job starts; none if it does not wait for GPUs, or its pool can never hold it.
#[must_use]
pub fn estimate(snapshot: &Snapshot, memo: &mut Memo, plan: &Plan, job: JobId, now: Time) -> Option<Estimate> {
    let base = forecast(snapshot, memo, plan, job, now)?;
    let gpus = snapshot.jobs.get(&job)?.request.gpus();
    let class = Calibration::class(gpus, base);
    let (p50, p90) = snapshot.history.calibration.quantiles(base, class);
    Some(Estimate { made: now, base, class, p50: now + p50, p90: now + p90 })
}

/// How long a job is expected to run once it starts.
pub(super) fn expected_run(snapshot: &Snapshot, job: &Job) -> Span {
    match job.request.time_limit {
        Some(limit) => Span((snapshot.history.total(job.ran, limit).0 - job.ran.0).max(1000)),
        None => snapshot.history.left(job.request.gpus(), job.ran),
    }
}

/// What ends, and what it gives back.
struct Ends {
    slots: Vec<(usize, Slots)>,
    queue: usize,
    gpu_type: usize,
    gpus: u32,
    preemptible: bool,
}

fn forecast(snapshot: &Snapshot, memo: &mut Memo, plan: &Plan, id: JobId, now: Time) -> Option<Span> {
    memo.refresh(snapshot);
    let mut pass = Pass::new(snapshot, memo, now);
    let own = pass.ask(id, pass.index.waiter(id)?)?;
    let place = plan.waiting.iter().position(|w| w.job == id)?;
    if let Some(sharing) = own.sharing {
        return turn_forecast::forecast(&pass, &own, &sharing, plan);
    }
    let ahead = &plan.waiting[..place];
    let mut list: Vec<JobId> = ahead.iter().take(AHEAD).map(|w| w.job).collect();
    list.push(id);
    let mut heap: BinaryHeap<Reverse<(Time, usize)>> = BinaryHeap::new();
    let mut ends: Vec<Ends> = Vec::new();
    for (holder_id, holder) in &pass.index.holders {
        let Some(job) = snapshot.jobs.get(holder_id) else { continue };
        let Some(gang) = job.phase.gang() else { continue };
        let ran = job.ran + super::pass::held_for(job, now);
        let end = match job.request.time_limit {
            Some(limit) => now + Span((snapshot.history.total(ran, limit).0 - ran.0).max(1000)),
            None => now + snapshot.history.left(holder.gpus, ran),
        };
        let end = if holder.leaving { now + job.request.grace.max(Span(1)) } else { end };
        let slots = gang.workers.iter().filter_map(|w| {
            let node = snapshot.nodes.get(&w.node)?;
            Some((*pass.grid.index.get(&w.node)?, w.slots.and(pass.usable(node)).without(node.claimed)))
        });
        heap.push(Reverse((end, ends.len())));
        ends.push(Ends {
            slots: slots.collect(),
            queue: pass.branch[holder.queue as usize],
            gpu_type: holder.gpu_type,
            gpus: holder.gpus,
            preemptible: holder.preemptible,
        });
    }
    let events = (BUDGET / pass.grid.ids.len().max(1)).clamp(30, 1000);
    for _ in 0..events {
        if let Some(start) = round(&mut pass, &mut list, &mut heap, &mut ends, id) {
            return Some(start.since(now));
        }
        let Reverse((at, _)) = *heap.peek()?;
        pass.now = at.max(pass.now);
        while let Some(Reverse((t, i))) = heap.peek().copied().filter(|Reverse((t, _))| *t <= at) {
            let _ = t;
            heap.pop();
            pass.views.truncate(1);
            for (node, slots) in &ends[i].slots {
                let free = pass.views[0].free[*node].or(*slots);
                pass.views[0].set(pass.grid, *node, free);
            }
            pass.quotas.charge(ends[i].queue, ends[i].gpu_type, ends[i].gpus, ends[i].preemptible, false);
        }
        pass.forget();
    }
    Some(pass.now.since(now) + by_work(&pass, &list, &heap, &ends, ahead.get(AHEAD..).unwrap_or_default()))
}

/// One pass over the list; when the job itself starts, that is the answer.
fn round(
    pass: &mut Pass<'_>,
    list: &mut Vec<JobId>,
    heap: &mut BinaryHeap<Reverse<(Time, usize)>>,
    ends: &mut Vec<Ends>,
    id: JobId,
) -> Option<Time> {
    let mut i = 0;
    while i < list.len() {
        let job = list[i];
        let Some(waiter) = pass.index.waiter(job) else {
            list.remove(i);
            continue;
        };
        i += 1;
        let Some(mut ask) = pass.ask(job, waiter) else { continue };
        let run = expected_run(pass.snapshot, ask.job);
        ask.end = pass.now + run;
        if pass.is_blocked(&ask) {
            continue;
        }
        if let Some((segment, placement)) = pass.place_free(&ask) {
            if job == id {
                return Some(pass.now);
            }
            let gpus = placement.gpus().count();
            pass.take(segment, &placement, ask.queue, ask.class.preemptible);
            let slots = placement.0.iter().filter_map(|(n, s)| Some((*pass.grid.index.get(n)?, *s))).collect();
            heap.push(Reverse((ask.end, ends.len())));
            let gpu_type = pass.grid.segments[segment].gpu_type;
            ends.push(Ends { slots, queue: ask.queue, gpu_type, gpus, preemptible: ask.class.preemptible });
            i -= 1;
            list.remove(i);
            continue;
        }
        if pass.promises.is_empty() && ask.sharing.is_none() {
            pass.ends = Some(free_at(pass, heap, ends));
            reserve::reserve(pass, &ask);
        }
        pass.block(&ask);
    }
    None
}

/// When the GPUs of each node are free, from what is expected to end.
fn free_at(pass: &Pass<'_>, heap: &BinaryHeap<Reverse<(Time, usize)>>, ends: &[Ends]) -> Vec<Time> {
    let width = pass.grid.stride.saturating_sub(1);
    let mut out = vec![Time(i64::MAX); pass.grid.ids.len() * width];
    let mut filled = vec![0usize; pass.grid.ids.len()];
    let mut put = |node: usize, n: u32, at: Time| {
        for _ in 0..n {
            if filled[node] < width {
                out[node * width + filled[node]] = at;
                filled[node] += 1;
            }
        }
    };
    for node in 0..pass.grid.ids.len() {
        put(node, pass.views[0].free[node].count(), pass.now);
    }
    let mut order: Vec<(Time, usize)> = heap.iter().map(|Reverse(e)| *e).collect();
    order.sort_unstable();
    for (at, i) in order {
        for (node, slots) in &ends[i].slots {
            put(*node, slots.count(), at);
        }
    }
    out
}

/// The time that the work in front takes on the whole pool.
fn by_work(
    pass: &Pass<'_>,
    list: &[JobId],
    heap: &BinaryHeap<Reverse<(Time, usize)>>,
    ends: &[Ends],
    cut: &[super::Waiting],
) -> Span {
    let work = |id: &JobId| {
        pass.snapshot
            .jobs
            .get(id)
            .map_or(0, |j| i128::from(j.request.gpus()) * i128::from(expected_run(pass.snapshot, j).0))
    };
    let waiting: i128 = list.iter().map(work).sum::<i128>() + cut.iter().map(|w| work(&w.job)).sum::<i128>();
    let running: i128 =
        heap.iter().map(|Reverse((at, i))| i128::from(at.since(pass.now).0) * i128::from(ends[*i].gpus)).sum();
    let gpus: u32 = pass.quotas.capacity.iter().sum();
    Span(i64::try_from((waiting + running) / i128::from(gpus.max(1))).unwrap_or(i64::MAX >> 2))
}
