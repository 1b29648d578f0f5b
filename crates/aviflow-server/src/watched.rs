//! Gangs that hold GPUs, with what their trainings and their GPUs report: what monitoring and `top` are made of.

use crate::app::App;
use crate::body::BodyAgent;
use aviflow_core::gpus::Slots;
use aviflow_core::model::{Job, JobId, Phase, Snapshot};
use aviflow_core::time::Time;
use aviflow_engine::driver::wall_clock;
use aviflow_engine::telemetry::Point;
use aviflow_metrics::board::{Seen, Share};
use aviflow_metrics::gpu::Sample;
use std::collections::BTreeMap;

/// Names under which trainings report their speed; the first that is there counts.
pub(crate) const TOKENS_PER_SECOND: [&str; 3] = ["tokens_per_second", "tokens_per_sec", "tokensPerSecond"];

/// A gang, as far as the engine knows it.
#[derive(Clone, Debug)]
pub(crate) struct Gang {
    pub(crate) job: JobId,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) queue: String,
    pub(crate) phase: &'static str,
    pub(crate) attempt: u32,
    pub(crate) gpus: u32,
    pub(crate) ranks_per_node: u32,
    /// Since when its GPUs are its own.
    pub(crate) placed: Time,
    /// Since when every rank is up, in Running.
    pub(crate) up: Option<Time>,
    /// When its last complete checkpoint was seen.
    pub(crate) checkpoint: Option<Time>,
    pub(crate) workers: Vec<Place>,
}

/// Where a worker is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) node: String,
    pub(crate) slots: Slots,
    /// Whether these are all GPUs of the node.
    pub(crate) whole: bool,
}

impl Gang {
    /// The gang of a job that has one.
    pub(crate) fn of(snapshot: &Snapshot, job: &Job) -> Option<Gang> {
        let gang = job.phase.gang()?;
        let place = |worker: &aviflow_core::model::Worker| {
            let node = snapshot.nodes.get(&worker.node)?;
            Some(Place { node: node.name.clone(), slots: worker.slots, whole: node.gpus == worker.slots })
        };
        Some(Gang {
            job: job.id,
            namespace: job.key.namespace.clone(),
            name: job.key.name.clone(),
            queue: job.request.queue.clone(),
            phase: job.phase.name(),
            attempt: gang.attempt,
            gpus: gang.gpu_count(),
            ranks_per_node: job.request.ranks_per_node,
            placed: gang.placed,
            up: if matches!(job.phase, Phase::Running(_)) { gang.up } else { None },
            checkpoint: job.checkpoint.as_ref().map(|c| c.at),
            workers: gang.workers.iter().filter_map(place).collect(),
        })
    }

    /// The last that its training reported, if that was in this attempt.
    pub(crate) fn progress(&self, app: &App) -> Option<Point> {
        app.parts.telemetry.heard(self.job).filter(|point| point.attempt == self.attempt)
    }
}

/// Who holds which GPUs.
pub(crate) struct Holders {
    /// UUIDs of the GPUs that workers got, as their agents say.
    uuids: BTreeMap<(JobId, u32, u32), Vec<String>>,
    /// Whether slots are the numbers of the devices, as on one machine.
    numbered: bool,
    pub(crate) now: Time,
}

impl Holders {
    pub(crate) fn new(app: &App, agents: Vec<BodyAgent>) -> Holders {
        let said = agents.into_iter().filter(|agent| !agent.gpus.is_empty());
        let uuids = said.map(|agent| ((agent.job, agent.attempt, agent.worker), agent.gpus)).collect();
        Holders { uuids, numbered: app.parts.body.numbers_gpus(), now: wall_clock() }
    }

    /// The GPUs of a worker, as they were read lately.
    pub(crate) fn gpus(&self, app: &App, gang: &Gang, worker: u32, place: &Place) -> Vec<Seen> {
        let uuids = self.uuids.get(&(gang.job, gang.attempt, worker)).map_or(&[][..], Vec::as_slice);
        let slots: Vec<u32> = place.slots.iter().collect();
        let share = Share {
            node: &place.node,
            uuids,
            whole: place.whole && !self.numbered,
            slots: self.numbered.then_some(slots.as_slice()),
            since: gang.placed.0,
        };
        app.parts.gpus.held(share, self.now.0)
    }

    /// The GPUs of a whole gang.
    pub(crate) fn gang(&self, app: &App, gang: &Gang) -> Vec<Sample> {
        let workers = (0u32..).zip(&gang.workers);
        workers.flat_map(|(n, place)| self.gpus(app, gang, n, place)).map(|seen| seen.sample).collect()
    }
}

/// The part of the GPUs' peak that a training says it uses, 0 to 1: some say it in percent, and none is above 1.
pub(crate) fn mfu(point: &Point) -> Option<f64> {
    let said = *point.values.get("mfu")?;
    let part = if said > 1.0 { said / 100.0 } else { said };
    // The digits that the division adds are nobody's.
    Some((part * 1e6).round() / 1e6)
}

/// A value that a training reports under one of several names.
pub(crate) fn reported(point: &Point, names: &[&str]) -> Option<f64> {
    names.iter().find_map(|name| point.values.get(*name)).copied()
}
