//! What only the engine knows, taken between two turns: counts, and which gangs there are.

use crate::watched::Gang;
use aviflow_core::gpus::Slots;
use aviflow_core::ledger::GpuState;
use aviflow_core::model::{NodeCondition, Phase};
use aviflow_core::schedule;
use aviflow_engine::driver::View;
use aviflow_engine::engine::default_queue;
use std::collections::BTreeMap;

/// The phases of jobs that have not ended.
pub(super) const PHASES: [&str; 5] = ["Queued", "Starting", "Running", "Suspending", "Stopping"];

/// The conditions of nodes.
pub(super) const CONDITIONS: [&str; 3] = ["Ready", "Cordoned", "Gone"];

/// A pool and an accelerator type.
type Kind = (String, String);

/// GPUs of a queue, of one accelerator type.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Quota {
    pub(super) guarantee: u32,
    pub(super) limit: Option<u32>,
    pub(super) used: u32,
    pub(super) borrowed: u32,
    pub(super) lent: u32,
}

/// The state between two turns, in numbers.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) commits: u64,
    pub(super) paused: bool,
    /// By queue, for each of [`PHASES`].
    pub(super) jobs: BTreeMap<String, [u32; PHASES.len()]>,
    pub(super) waiting: BTreeMap<String, u32>,
    pub(super) gpus: BTreeMap<Kind, BTreeMap<GpuState, u32>>,
    pub(super) nodes: BTreeMap<Kind, [u32; CONDITIONS.len()]>,
    pub(super) quotas: BTreeMap<(String, String), Quota>,
    pub(super) gangs: Vec<Gang>,
}

impl Facts {
    pub(super) fn of(view: &View<'_>) -> Facts {
        let mut facts = Facts {
            commits: view.generation,
            paused: view.snapshot.paused.is_some(),
            gangs: view.snapshot.jobs.values().filter_map(|job| Gang::of(view.snapshot, job)).collect(),
            ..Facts::default()
        };
        facts.count_jobs(view);
        facts.count_gpus(view);
        for (queue, seen) in schedule::queues(view.snapshot, view.now) {
            for (gpu_type, quota) in seen.quotas {
                let value = Quota {
                    guarantee: quota.guarantee,
                    limit: quota.limit,
                    used: quota.used,
                    borrowed: quota.used.saturating_sub(quota.effective),
                    lent: quota.lent,
                };
                facts.quotas.insert((queue.clone(), gpu_type), value);
            }
        }
        facts
    }

    fn count_jobs(&mut self, view: &View<'_>) {
        // It is made by the first submission and takes jobs before.
        let first = view.snapshot.queues.is_empty().then(|| default_queue().name);
        for queue in first.iter().chain(view.snapshot.queues.keys()) {
            self.jobs.insert(queue.clone(), Default::default());
            self.waiting.insert(queue.clone(), 0);
        }
        for job in view.snapshot.jobs.values() {
            let queue = &job.request.queue;
            if let Some(n) = PHASES.iter().position(|phase| *phase == job.phase.name()) {
                count(&mut self.jobs, queue)[n] += 1;
            }
            if matches!(job.phase, Phase::Queued) {
                let waiting = count(&mut self.waiting, queue);
                *waiting = waiting.saturating_add(job.request.gpus());
            }
        }
    }

    fn count_gpus(&mut self, view: &View<'_>) {
        for node in view.snapshot.nodes.values() {
            // A node without GPUs has left the pool; only its account is kept.
            if node.gpus == Slots::NONE {
                continue;
            }
            let kind = (node.pool.clone(), node.gpu_type.clone());
            let n = match node.condition {
                NodeCondition::Ready => 0,
                NodeCondition::Cordoned => 1,
                NodeCondition::Gone => 2,
            };
            self.nodes.entry(kind.clone()).or_default()[n] += 1;
            let states = self.gpus.entry(kind).or_default();
            for open in view.snapshot.ledger.node(node.id) {
                *states.entry(open.state).or_default() += open.slots.count();
            }
        }
    }
}

/// The count of a name, without a copy of the name where there is one.
fn count<'a, V: Default>(counts: &'a mut BTreeMap<String, V>, name: &str) -> &'a mut V {
    if !counts.contains_key(name) {
        counts.insert(name.to_owned(), V::default());
    }
    counts.entry(name.to_owned()).or_default()
}
