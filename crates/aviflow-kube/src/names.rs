//! Names, labels and annotations of what Aviflow makes in a cluster.

use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use std::collections::BTreeMap;

pub use aviflow_api::crd::{GROUP, JOB_LABEL as JOB, JOB_SERVICE_ACCOUNT as JOB_ACCOUNT, SUBMITTER, VERSION};

/// Label: the attempt.
pub const ATTEMPT: &str = "aviflow.dev/attempt";
/// Label: the worker.
pub const WORKER: &str = "aviflow.dev/worker";
/// Label: the job's name, for people and selectors.
pub const NAME: &str = "aviflow.dev/name";
/// Label of everything that keeps GPUs for a gang.
pub const PLACEHOLDER: &str = "aviflow.dev/placeholder";
/// Label of the pods of a job that may not be suspended, whose value is `false`.
pub const PREEMPTIBLE: &str = "aviflow.dev/preemptible";
/// The disruption budget of each namespace for these.
pub const BUDGET: &str = "aviflow-not-preemptible";
/// Label of a pod that makes a layer: as much of the layer's hash as a label holds.
pub const LAYER: &str = "aviflow.dev/layer";
/// Label: who made it.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`MANAGED_BY`].
pub const AVIFLOW: &str = "aviflow";
/// Annotation of a TrainingJob that was made for a job which came through the API: the job's number.
pub const FOR_JOB: &str = "aviflow.dev/for-job";
/// Annotation of such a TrainingJob: the name in the job's document, where the object has another.
pub const WORK: &str = "aviflow.dev/work";
/// Finalizer of a TrainingJob: its deletion is a graceful stop.
pub const FINALIZER: &str = "aviflow.dev/stop";
/// Finalizer of a Queue and a Pool: its deletion is heard of, also by a control plane that was away.
pub const DOCUMENT_FINALIZER: &str = "aviflow.dev/document";
/// Annotation of a Queue and a Pool: when it and the control plane said the same, see [`crate::documents::rule`].
pub const AGREED: &str = "aviflow.dev/agreed";
/// Taint of a node whose GPUs are all kept for a gang.
pub const KEEP_TAINT: &str = "aviflow.dev/keep";
/// The container of the control plane in its own pod.
pub const CONTAINER: &str = "aviflow";
/// The audience of the tokens of job pods.
pub const AUDIENCE: &str = "aviflow";

/// The name of a worker's pod: `NAME-ATTEMPT-WORKER`.
///
/// A job's name has at most 40 characters, so this is a DNS label. Two jobs never meet: what stands
/// before the last two dashes is the job's name.
#[must_use]
pub fn pod(job: &str, attempt: u32, worker: u32) -> String {
    format!("{job}-{attempt}-{worker}")
}

/// The labels of a worker's pod.
#[must_use]
pub fn labels(key: StreamKey, job: &str) -> BTreeMap<String, String> {
    [
        (JOB, key.job.0.to_string()),
        (ATTEMPT, key.attempt.to_string()),
        (WORKER, key.worker.to_string()),
        (NAME, job.to_owned()),
        (MANAGED_BY, AVIFLOW.to_owned()),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .into()
}

/// Which worker a pod with these labels is, if it is one of ours.
#[must_use]
pub fn worker(labels: &BTreeMap<String, String>) -> Option<StreamKey> {
    if labels.get(MANAGED_BY).map(String::as_str) != Some(AVIFLOW) {
        return None;
    }
    Some(StreamKey {
        job: JobId(labels.get(JOB)?.parse().ok()?),
        attempt: labels.get(ATTEMPT)?.parse().ok()?,
        worker: labels.get(WORKER)?.parse().ok()?,
    })
}

/// Whether a name is that of the account of job pods, of whichever namespace.
#[must_use]
pub fn is_job_pod(user: &str) -> bool {
    let account = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    account.is_some_and(|(_, name)| name == JOB_ACCOUNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_the_worker() {
        let key = StreamKey { job: JobId(7), attempt: 2, worker: 511 };
        let labels = labels(key, "llama");
        assert_eq!(worker(&labels), Some(key));
        let mut foreign = labels;
        foreign.remove(MANAGED_BY);
        assert_eq!(worker(&foreign), None, "not made by us");
    }

    #[test]
    fn the_longest_name_is_a_label() {
        assert!(pod(&"a".repeat(40), 9999, 4095).len() <= 63);
    }
}
