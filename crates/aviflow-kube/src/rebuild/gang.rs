//! Gangs as their pods are.

use super::read::{Told, canceller};
use crate::names;
use crate::pod::SPEC;
use aviflow_agent::protocol::WorkerSpec;
use aviflow_api::crd::PhaseWord;
use aviflow_core::gpus::Slots;
use aviflow_core::model::{Gang, Intent, JobId, NodeId, Phase, Snapshot, Stopping, Suspending, Worker, WorkerState};
use aviflow_core::time::Time;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;

/// Who suspends what was being suspended.
const SUSPENDER: &str = "a control plane whose store was lost";

/// Workers of attempts, by their numbers.
pub(super) struct Gangs(BTreeMap<(JobId, u32), BTreeMap<u32, Found>>);

/// A worker whose pod is there.
struct Found {
    node: String,
    /// Workers of its gang.
    workers: u32,
    since: Option<Time>,
}

impl Gangs {
    /// The gangs of pods that the control plane made.
    pub(super) fn of(pods: &[Pod]) -> Gangs {
        let mut gangs: BTreeMap<(JobId, u32), BTreeMap<u32, Found>> = BTreeMap::new();
        for pod in pods {
            let Some(key) = pod.metadata.labels.as_ref().and_then(names::worker) else { continue };
            let Some(spec) =
                spec(pod).filter(|s| (s.job_id, s.attempt, s.worker) == (key.job.0, key.attempt, key.worker))
            else {
                continue;
            };
            let since = pod.metadata.creation_timestamp.as_ref().map(|at| Time(at.0.as_millisecond()));
            let found = Found { node: spec.node, workers: spec.workers, since };
            gangs.entry((key.job, key.attempt)).or_default().insert(key.worker, found);
        }
        Gangs(gangs)
    }

    /// The phase of a job with its gang, whose GPUs are then held.
    ///
    /// A worker that has begun and whose pod is gone is part of the gang: the cluster says what became of it.
    pub(super) fn take(&self, told: &Told, word: PhaseWord, state: &mut Snapshot, now: Time) -> Result<Phase, String> {
        let (job, attempt) = (&told.job, told.job.attempts);
        let none = BTreeMap::new();
        let pods = self.0.get(&(job.id, attempt)).unwrap_or(&none);
        let first = pods.values().next().ok_or("has no pod any more")?;
        let asked = job.request.nodes;
        if first.workers < asked.min || first.workers > asked.max || pods.values().any(|p| p.workers != first.workers) {
            return Err("has pods that do not fit together".to_owned());
        }
        let mut places: Vec<(NodeId, Slots)> = Vec::new();
        for n in 0..first.workers {
            let on = usize::try_from(n).ok().and_then(|n| told.status.on.get(n));
            let name = match (pods.get(&n), on) {
                (Some(pod), _) => &pod.node,
                // What was never up may never have been made, and must not be made beside what is there.
                (None, Some(name)) if word != PhaseWord::Starting => name,
                (None, _) => return Err(format!("lacks the pod of worker {n}")),
            };
            let node = state.nodes.values().find(|node| node.name == *name);
            let node = node.ok_or_else(|| format!("was on {name}, which is not in the cluster any more"))?;
            let taken =
                places.iter().filter(|(id, _)| *id == node.id).fold(node.held, |all, (_, slots)| all.or(*slots));
            // Which GPUs a pod has is between it and kubelet; the books count them.
            let slots = node.gpus.without(taken).lowest(job.request.gpus_per_node);
            places.push((node.id, slots.ok_or_else(|| format!("has not its GPUs on {name} any more"))?));
        }
        let (reached, up) = match word {
            PhaseWord::Starting => (WorkerState::Ready, None),
            _ => (WorkerState::Up, Some(told.up().unwrap_or(now).min(now))),
        };
        for (id, slots) in &places {
            if let Some(node) = state.nodes.get_mut(id) {
                node.held = node.held.or(*slots);
                node.settle();
            }
        }
        let worker = |(node, slots): (NodeId, Slots)| Worker {
            node,
            slots,
            state: reached,
            address: None,
            exits: BTreeMap::new(),
            ended: None,
            next_port: None,
        };
        let placed = pods.values().filter_map(|p| p.since).min().unwrap_or(now).min(up.unwrap_or(now)).min(now);
        let workers = places.into_iter().map(worker).collect();
        let stepped = up.is_some() && job.best_step.is_some();
        let epoch = told.status.epoch.unwrap_or(1);
        let (again, xids) = ((epoch > 1).then_some(up.unwrap_or(now)), Vec::new());
        let gang = Gang { attempt, epoch, placed, up, workers, stepped, repeating: false, again, xids };
        Ok(match word {
            PhaseWord::Starting => Phase::Starting(gang),
            PhaseWord::Suspending => Phase::Suspending(Suspending { gang, by: SUSPENDER.to_owned(), asked: false }),
            PhaseWord::Stopping => {
                let by = told.status.reason.as_deref().and_then(canceller).map(str::to_owned);
                let intent = by.map_or(Intent::Requeue, |by| Intent::Cancel { by });
                Phase::Stopping(Stopping { gang, intent, kept_until: None })
            }
            _ => Phase::Running(gang),
        })
    }
}

/// What the control plane gave a worker to know.
fn spec(pod: &Pod) -> Option<WorkerSpec> {
    let containers = pod.spec.as_ref()?.init_containers.as_ref()?;
    let variables = containers.iter().filter_map(|c| c.env.as_ref()).flatten();
    let text = variables.into_iter().find(|v| v.name == SPEC)?.value.as_ref()?;
    serde_json::from_str(text).ok()
}
