//! What the mirror reads of the engine's state: the jobs that it is about to write, and the words of all that wait.

use super::status::Shown;
use aviflow_core::explain;
use aviflow_core::model::{Job, JobId, NodeId};
use aviflow_core::schedule::Waiting;
use aviflow_engine::driver::View;
use aviflow_engine::ports::JobRecord;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

/// A live job as the mirror needs it.
pub(super) struct Seen {
    job: Job,
    pub(super) record: Arc<JobRecord>,
    reason: Option<String>,
    /// Of the reason, see [`all_words`].
    pub(super) words: u64,
    nodes: Vec<String>,
}

impl Seen {
    pub(super) fn shown(&self) -> Shown<'_> {
        let image = self.record.provenance.image.as_ref();
        Shown { job: &self.job, reason: self.reason.as_deref(), nodes: &self.nodes, image, ended: None }
    }
}

/// Those of some jobs that live.
pub(super) fn seen(view: &View<'_>, ids: &[JobId]) -> BTreeMap<JobId, Seen> {
    let why = |w: &Waiting| explain::constraint(&view.plan.constraints[w.constraint], view.now);
    let waiting = view.plan.waiting.iter().filter(|w| ids.contains(&w.job));
    let mut reasons: BTreeMap<JobId, String> = waiting.map(|w| (w.job, why(w))).collect();
    let name = |id: &NodeId| view.snapshot.nodes.get(id).map(|n| n.name.clone());
    let one = |id: &JobId| {
        let job = view.snapshot.jobs.get(id)?;
        let nodes = job.phase.gang().into_iter().flat_map(|g| &g.workers).filter_map(|w| name(&w.node)).collect();
        let record = view.records.get(id)?.clone();
        let reason = reasons.remove(id);
        let words = reason.as_deref().map(hash).unwrap_or_default();
        Some((*id, Seen { record, reason, words, nodes, job: job.clone() }))
    };
    ids.iter().filter_map(one).collect()
}

/// The words with which each job waits, as a number that tells whether they are others.
pub(super) fn all_words(view: &View<'_>) -> Vec<(JobId, u64)> {
    let texts: Vec<u64> = view.plan.constraints.iter().map(|c| hash(&explain::constraint(c, view.now))).collect();
    view.plan.waiting.iter().map(|w| (w.job, texts[w.constraint])).collect()
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
