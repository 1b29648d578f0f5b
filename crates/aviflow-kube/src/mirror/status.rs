//! The status of a job's object, and what is kept of one that was written.
//!
//! A status is written whole: what is not in it is said to be absent. So of what was written before only a few
//! words are kept, however many objects there are.

use crate::object::{CANCELLED_BY, condition};
use aviflow_api::crd::{
    Condition, ConditionStatus, ConditionType, EstimatedStart, LastCheckpoint, MOST_NODES, MOST_REASON, PhaseWord,
    TrainingJobStatus,
};
use aviflow_api::duration::Duration as Length;
use aviflow_api::rest::JobCounters;
use aviflow_api::spec::ResolvedImage;
use aviflow_core::explain;
use aviflow_core::model::{Cause, Counters, Ending, Intent, Job, Phase, Stopping};
use aviflow_core::time::{Span, Time};
use aviflow_engine::ports::ending;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// The conditions, in the order in which they are written.
const CONDITIONS: [ConditionType; 6] = [
    ConditionType::Accepted,
    ConditionType::Queued,
    ConditionType::Running,
    ConditionType::Suspended,
    ConditionType::Succeeded,
    ConditionType::Failed,
];

/// What is shown of a job.
pub(super) struct Shown<'a> {
    pub(super) job: &'a Job,
    /// Why it waits.
    pub(super) reason: Option<&'a str>,
    /// The names of the nodes that it holds.
    pub(super) nodes: &'a [String],
    /// What runs; none of a job that has ended, where its object says it.
    pub(super) image: Option<&'a ResolvedImage>,
    /// When it ended, if it has.
    pub(super) ended: Option<Time>,
}

/// What is kept of a status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) phase: Option<PhaseWord>,
    pub(super) attempt: Option<u32>,
    /// Whether it says why.
    pub(super) said: bool,
    /// What is wrong with the image, if it says so.
    warned: Option<String>,
    /// When it says that the ranks were up first, in seconds.
    started: Option<i64>,
    /// Whether each condition holds, and since when, in seconds.
    since: [Option<(bool, i64)>; CONDITIONS.len()],
    /// Of all that it says and that may change.
    hash: u64,
}

impl Written {
    /// What is kept of this one.
    pub(super) fn of(status: &TrainingJobStatus) -> Written {
        let since = CONDITIONS.map(|kind| {
            let kind = format!("{kind:?}");
            let condition = status.conditions.iter().find(|c| c.kind == kind)?;
            Some((condition.status == ConditionStatus::True, seconds(&condition.last_transition_time)?))
        });
        let mut hasher = DefaultHasher::new();
        let status = TrainingJobStatus { image: None, ..status.clone() };
        json!(status).to_string().hash(&mut hasher);
        Written {
            phase: status.phase,
            attempt: status.attempt,
            said: status.reason.is_some(),
            warned: status.conditions.iter().find(|c| accepts(c) && !c.message.is_empty()).map(|c| c.message.clone()),
            started: status.started.as_deref().and_then(seconds),
            since,
            hash: hasher.finish(),
        }
    }

    /// Whether nothing was written, which takes a condition at least.
    pub(super) fn is_nothing(&self) -> bool {
        self.since.iter().all(Option::is_none)
    }

    /// Whether the job has ended by what was written.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Some(PhaseWord::Succeeded | PhaseWord::Failed | PhaseWord::Cancelled))
    }

    /// Whether the other says the same but for words and figures.
    pub(super) fn differs_in_words(&self, other: &Written) -> bool {
        self.said && (self.phase, self.attempt) == (other.phase, other.attempt)
    }

    /// Conditions as they are now: those that hold, and those that were written before. One that holds as before keeps
    /// the time since when.
    fn conditions(&self, now: impl Iterator<Item = Condition>) -> Vec<Condition> {
        // What never held is left out: the apiserver's work grows with each more than with all the rest of a status.
        let told =
            |condition: &Condition| condition.status == ConditionStatus::True || self.before(condition).is_some();
        now.filter(told).map(|condition| self.since_when(condition)).collect()
    }

    /// Whether a condition held when it was written last, and since when, in seconds.
    fn before(&self, condition: &Condition) -> Option<(bool, i64)> {
        self.since[CONDITIONS.iter().position(|kind| format!("{kind:?}") == condition.kind)?]
    }

    fn since_when(&self, mut condition: Condition) -> Condition {
        if let Some((before, since)) = self.before(&condition)
            && before == (condition.status == ConditionStatus::True)
        {
            condition.last_transition_time = text(since);
        }
        condition
    }

    /// The status of an object that is refused.
    pub(super) fn refused(&self, generation: Option<i64>, word: &str, message: &str) -> TrainingJobStatus {
        let refused = condition(ConditionType::Accepted, false, word, message, &now());
        TrainingJobStatus {
            observed_generation: generation,
            conditions: vec![self.since_when(refused)],
            reason: Some(bounded(message)),
            ..TrainingJobStatus::default()
        }
    }

    /// The status of a job's object. What goes without saying is left out, as the apiserver's work grows with each
    /// field.
    pub(super) fn next(&self, shown: &Shown<'_>, object: &str, generation: Option<i64>) -> TrainingJobStatus {
        let Shown { job, reason, nodes, image, ended } = shown;
        let reason = reason.map(str::to_owned).or_else(|| match &job.phase {
            Phase::Failed(failure) => Some(match &failure.cause {
                // Nothing else in the cluster says it any more.
                Cause::Launch { reason, .. } => bounded(&format!("{}: {reason}", explain::failure_short(failure))),
                Cause::Rank { .. }
                | Cause::WorkerLost { .. }
                | Cause::TimeLimit { .. }
                | Cause::Found { .. }
                | Cause::Environment { .. }
                | Cause::Recorded { .. } => explain::failure_short(failure),
            }),
            Phase::Cancelled { by } | Phase::Stopping(Stopping { intent: Intent::Cancel { by }, .. }) => {
                Some(format!("{CANCELLED_BY}{by}"))
            }
            _ => None,
        });
        let said = reason.clone().unwrap_or_default();
        let deprecated = image.and_then(|i| i.environment.as_ref().zip(i.deprecated.as_ref()));
        let warning = match image {
            Some(_) => deprecated.map(|(name, why)| format!("environment {name} is deprecated: {why}")),
            None => self.warned.clone(),
        };
        let warning = warning.unwrap_or_default();
        let (now, word) = (now(), job.phase.name());
        let end = ending(&job.phase);
        let estimate = job.estimate.filter(|_| matches!(job.phase, Phase::Queued));
        let suspended = matches!(job.phase, Phase::Queued) && job.attempts > 0;
        let holds = |kind| match kind {
            ConditionType::Accepted => true,
            ConditionType::Queued => matches!(job.phase, Phase::Queued),
            ConditionType::Running => matches!(job.phase, Phase::Running(_)),
            ConditionType::Suspended => suspended || matches!(job.phase, Phase::Suspending(_)),
            ConditionType::Succeeded => end == Some(Ending::Succeeded),
            ConditionType::Failed => end.is_some_and(|end| end != Ending::Succeeded),
        };
        let conditions = CONDITIONS.into_iter().map(|kind| match kind {
            ConditionType::Accepted => condition(kind, true, "Accepted", &warning, &now),
            _ => condition(kind, holds(kind), word, if holds(kind) { said.as_str() } else { "" }, &now),
        });
        TrainingJobStatus {
            observed_generation: generation,
            phase: Some(PhaseWord::from(&job.phase)),
            reason,
            queue: Some(job.request.queue.clone()),
            priority: Some(job.request.priority),
            time_limit: job.request.time_limit.map(Length),
            held: job.held.clone(),
            attempt: Some(job.attempts),
            epoch: job.phase.gang().map(|gang| gang.epoch).filter(|epoch| *epoch > 1),
            counters: counters(&job.counters),
            ran: Some(job.ran.0),
            on: nodes.iter().take(MOST_NODES).cloned().collect(),
            job_name: Some(&job.key.name).filter(|name| *name != object).cloned(),
            job_id: Some(job.id.0),
            image: image.filter(|image| resolved(image)).cloned(),
            submitted_by: Some(job.user.clone()),
            submitted: Some(timestamp(job.submitted)),
            started: self.started.map(text).or_else(|| Some(timestamp(started(job, *ended)?))),
            ended: ended.map(timestamp),
            estimated_start: estimate
                .as_ref()
                .map(|e| EstimatedStart { p50: timestamp(e.p50), p90: Some(timestamp(e.p90)) }),
            step: job.best_step,
            last_checkpoint: job.checkpoint.as_ref().map(|c| LastCheckpoint { step: c.step, at: timestamp(c.at) }),
            conditions: self.conditions(conditions),
        }
    }
}

/// What ended earlier attempts, if anything did.
fn counters(of: &Counters) -> Option<JobCounters> {
    let Counters { failures, node_failures, suspensions, unready } = *of;
    (*of != Counters::default()).then_some(JobCounters { failures, node_failures, suspensions, unready })
}

/// Whether an image is another than the job's document says already.
fn resolved(image: &ResolvedImage) -> bool {
    image.reference != image.pinned || image.environment.is_some()
}

/// Whether a condition says that the job was taken.
fn accepts(condition: &Condition) -> bool {
    condition.kind == format!("{:?}", ConditionType::Accepted) && condition.status == ConditionStatus::True
}

/// When the ranks were up first, of a job whose object does not say it yet: it may have ended before that was written.
fn started(job: &Job, ended: Option<Time>) -> Option<Time> {
    let short = || ended.filter(|_| job.attempts == 1 && job.ran > Span(0)).map(|end| end - job.ran);
    job.phase.gang().and_then(|gang| gang.up).or_else(short)
}

/// A reason that the definition takes.
fn bounded(text: &str) -> String {
    match text.char_indices().nth(MOST_REASON) {
        Some(_) => text.chars().take(MOST_REASON - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// A status as a merge patch that leaves nothing of the one before but the image, which never changes.
pub(super) fn patch(status: &TrainingJobStatus) -> Value {
    /// Every field that may be absent, as it is called in the object.
    const FIELDS: [&str; 22] = [
        "observedGeneration",
        "phase",
        "reason",
        "queue",
        "priority",
        "timeLimit",
        "held",
        "attempt",
        "epoch",
        "counters",
        "ran",
        "on",
        "jobName",
        "jobId",
        "submittedBy",
        "submitted",
        "started",
        "ended",
        "estimatedStart",
        "step",
        "lastCheckpoint",
        "conditions",
    ];
    let mut whole = json!(status);
    if let Some(fields) = whole.as_object_mut() {
        for field in FIELDS {
            fields.entry(field).or_insert(Value::Null);
        }
    }
    json!({"status": whole})
}

fn now() -> String {
    text(Timestamp::now().as_second())
}

fn seconds(text: &str) -> Option<i64> {
    Some(text.parse::<Timestamp>().ok()?.as_second())
}

fn text(seconds: i64) -> String {
    let at = Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH);
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn timestamp(at: Time) -> String {
    text(at.0.div_euclid(1000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::{JobId, JobKey, NodeRange, Request};

    fn job() -> Job {
        let request = Request {
            queue: "nlp".into(),
            priority: 0,
            nodes: NodeRange { min: 1, max: 1 },
            gpus_per_node: 8,
            gpu_types: Vec::new(),
            ranks_per_node: 1,
            time_limit: None,
            preemptible: true,
            failures_allowed: 0,
            grace: Span::seconds(30),
            checkpoint_every: None,
            topology: Default::default(),
            keep_on_failure: None,
        };
        let key = JobKey { namespace: "default".into(), name: "llama".into() };
        Job::submitted(JobId(7), key, "ann".into(), request, None, Time(1_700_000_000_123))
    }

    fn shown<'a>(job: &'a Job, reason: Option<&'a str>) -> Shown<'a> {
        Shown { job, reason, nodes: &[], image: None, ended: None }
    }

    #[test]
    fn what_holds_as_before_keeps_its_time() {
        let mut job = job();
        let first = Written::default().next(&shown(&job, Some("no room")), "llama", Some(1));
        let mut before = Written::of(&first);
        before.since = before.since.map(|since| since.map(|(holds, _)| (holds, 1000)));
        let again = before.next(&shown(&job, Some("no room")), "llama", Some(1));
        assert!(again.conditions.iter().all(|c| c.last_transition_time == "1970-01-01T00:16:40Z"), "{again:?}");
        before.warned = Some("the environment is deprecated".to_owned());
        job.phase = Phase::Succeeded;
        let after = before.next(&shown(&job, None), "llama", Some(1));
        assert_eq!(after.conditions[0].message, "the environment is deprecated", "also where the image is not known");
        assert_eq!(Written::of(&after).warned, before.warned);
        let moved = |kind: &str| {
            let condition = after.conditions.iter().find(|c| c.kind == kind).expect("the condition");
            condition.last_transition_time != "1970-01-01T00:16:40Z"
        };
        assert!(moved("Queued") && moved("Succeeded") && !moved("Accepted"));
        let kinds: Vec<&str> = after.conditions.iter().map(|c| c.kind.as_str()).collect();
        assert_eq!(kinds, ["Accepted", "Queued", "Succeeded"], "what never held is absent");
    }

    #[test]
    fn what_was_written_is_known_again_and_words_are_told_from_more() {
        let mut job = job();
        let first = Written::default().next(&shown(&job, Some("no room")), "llama", Some(1));
        let known = Written::of(&first);
        let read: TrainingJobStatus = serde_json::from_value(json!(first)).expect("a status");
        assert_eq!(Written::of(&read), known);
        let words = Written::of(&known.next(&shown(&job, Some("less room")), "llama", Some(1)));
        assert!(words != known && known.differs_in_words(&words) && !known.is_over());
        job.phase = Phase::Succeeded;
        let over = Written::of(&known.next(&shown(&job, None), "llama", Some(1)));
        assert!(!known.differs_in_words(&over) && over.is_over());
    }

    #[test]
    fn a_patch_leaves_nothing_of_the_status_before() {
        let whole = patch(&TrainingJobStatus { phase: Some(PhaseWord::Queued), ..TrainingJobStatus::default() });
        // Every field that the schema has, so that none is forgotten here when one is added there.
        let schema = json!(schemars::schema_for!(TrainingJobStatus));
        let fields = schema["properties"].as_object().expect("properties");
        for field in fields.keys().filter(|field| *field != "image") {
            let expected = if field == "phase" { json!("Queued") } else { Value::Null };
            assert_eq!(whole["status"].get(field), Some(&expected), "{field}");
        }
        assert_eq!(whole["status"].as_object().map(serde_json::Map::len), Some(fields.len() - 1), "all but the image");
    }
}
